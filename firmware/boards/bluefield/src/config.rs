//! What the agent is told.
//!
//! | key | meaning | unsaid |
//! |---|---|---|
//! | `name` | the device's name in the fabric | needed |
//! | `controller` | address and port of the controller | needed |
//! | `interface` | the interface of the data ports | the first with hardware behind it |
//! | `ip` | its address with prefix, as `10.0.2.15/24` | what it has, else a link-local one |
//! | `gateway` | the next hop for everybody else | none |
//! | `listen` | UDP port of the first shard; others take the next ones | 7100 |
//! | `data` | where peers send the first shard's packets to, if that is not `ip` and `listen` | `ip` and `listen` |
//! | `host` | an emulated machine's host as the machine sees it: what addresses of loopback mean | loopback |
//! | `shards` | worker threads | 1 |
//! | `cores` | the processor of each shard, as `2,3` | any |
//! | `poll` | `busy`: look for packets without ever sleeping; `sleep` | `sleep` |
//! | `verbs` | `auto`: data ports over RDMA where a port has the address of the data ports, else UDP; `off`; or the RDMA port | `auto` |
//! | `log` | log filter of the runtime, as `debug` | `info` |
//!
//! In a store these are lines, `key=value`, and `#` begins a comment. On the kernel's command line each is a word with
//! `sumac.` before it, and wins over the store.

use std::fmt::{self, Write};
use std::net::{Ipv4Addr, SocketAddrV4};
use std::str::FromStr;
use sumac_hal::ctrl::{MAX_NAME_LEN, Name};
use sumac_hal::shard::MAX_SHARDS;
use thiserror::Error;

/// What the words of the kernel's command line that are meant begin with.
pub const PREFIX: &str = "sumac.";

/// The UDP port of the first shard, unless another is named.
pub const DEFAULT_PORT: u16 = 7100;

/// What the agent is not told.
#[derive(Debug, Clone, PartialEq, Eq, Error)]
#[non_exhaustive]
pub enum ConfigError {
    /// Not `key=value`.
    #[error("{0:?} is not key=value")]
    Word(String),
    /// A key that nobody knows.
    #[error("{0:?} is no key; there are {known}", known = KEYS.join(", "))]
    Key(String),
    /// A value that is none.
    #[error("{key}={value:?} is not {expected}")]
    Value {
        /// The key.
        key: String,
        /// The value.
        value: String,
        /// What would be.
        expected: &'static str,
    },
    /// A key that is needed.
    #[error("nobody says {0}; put sumac.{0}=... on the kernel's command line, or {0}=... into the store")]
    Missing(&'static str),
}

/// An interface's address.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Cidr {
    /// The address.
    pub ip: Ipv4Addr,
    /// How many bits of it name the network, at most 32.
    pub prefix_len: u8,
}

impl FromStr for Cidr {
    type Err = ();

    fn from_str(text: &str) -> Result<Self, ()> {
        let (ip, prefix) = text.split_once('/').ok_or(())?;
        let ip: Ipv4Addr = ip.parse().map_err(drop)?;
        let prefix_len = prefix.parse().ok().filter(|len| (1..=32).contains(len)).ok_or(())?;
        if ip.is_unspecified() || ip.is_multicast() || ip.is_broadcast() {
            Err(())
        } else {
            Ok(Self { ip, prefix_len })
        }
    }
}

impl fmt::Display for Cidr {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}/{}", self.ip, self.prefix_len)
    }
}

/// How a shard waits for packets.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum Polling {
    /// It sleeps, and the kernel wakes it.
    #[default]
    Sleep,
    /// It looks all the time: the shortest way, for a processor that has nothing else to do.
    Busy,
}

impl FromStr for Polling {
    type Err = ();

    fn from_str(text: &str) -> Result<Self, ()> {
        match text {
            "sleep" => Ok(Self::Sleep),
            "busy" => Ok(Self::Busy),
            _ => Err(()),
        }
    }
}

impl fmt::Display for Polling {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Sleep => "sleep",
            Self::Busy => "busy",
        })
    }
}

/// What the data ports are over.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub enum Verbs {
    /// RDMA where there is a port with their address, else UDP.
    #[default]
    Auto,
    /// UDP.
    Off,
    /// This RDMA port, as `mlx5_0:1`, or an error.
    Link(String),
}

impl FromStr for Verbs {
    type Err = ();

    fn from_str(text: &str) -> Result<Self, ()> {
        match text {
            "" => Err(()),
            "auto" => Ok(Self::Auto),
            "off" => Ok(Self::Off),
            link => Ok(Self::Link(link.to_owned())),
        }
    }
}

/// The keys, in the order in which they are written.
const KEYS: [&str; 13] = [
    "name",
    "controller",
    "interface",
    "ip",
    "gateway",
    "listen",
    "data",
    "host",
    "shards",
    "cores",
    "poll",
    "verbs",
    "log",
];

/// Values of some of the keys, each checked by itself.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Settings {
    /// By the place in [`KEYS`].
    values: [Option<String>; KEYS.len()],
}

impl Settings {
    /// Read the lines of a store.
    ///
    /// # Errors
    /// [`ConfigError`] for the first line that is wrong.
    pub fn from_lines(text: &str) -> Result<Self, ConfigError> {
        let lines = text.lines().map(|line| line.split('#').next().unwrap_or_default().trim());
        Self::from_words(lines.filter(|line| !line.is_empty()))
    }

    /// Read words.
    ///
    /// # Errors
    /// [`ConfigError`] for the first that is wrong.
    pub fn from_words<'a>(words: impl IntoIterator<Item = &'a str>) -> Result<Self, ConfigError> {
        let mut settings = Self::default();
        for word in words {
            let (key, value) = word.split_once('=').ok_or_else(|| ConfigError::Word(word.to_owned()))?;
            let (key, value) = (key.trim(), value.trim());
            let at = KEYS.iter().position(|known| *known == key).ok_or_else(|| ConfigError::Key(key.to_owned()))?;
            check(key, value).map_err(|expected| ConfigError::Value {
                key: key.to_owned(),
                value: value.to_owned(),
                expected,
            })?;
            settings.values[at] = Some(value.to_owned());
        }
        Ok(settings)
    }

    /// Take what `others` say, and keep the rest.
    #[must_use]
    pub fn overridden_by(mut self, others: &Self) -> Self {
        for (value, other) in self.values.iter_mut().zip(&others.values) {
            if other.is_some() {
                value.clone_from(other);
            }
        }
        self
    }

    /// Write them as lines.
    pub fn to_lines(&self) -> String {
        let mut text = String::new();
        for (key, value) in KEYS.iter().zip(&self.values) {
            if let Some(value) = value {
                // Writing to a string can't fail.
                let _ = writeln!(text, "{key}={value}");
            }
        }
        text
    }

    /// Set the address of the data ports.
    pub fn set_ip(&mut self, ip: Cidr) {
        let at = KEYS.iter().position(|key| *key == "ip");
        at.into_iter().for_each(|at| self.values[at] = Some(ip.to_string()));
    }

    fn get<T: FromStr>(&self, key: &str) -> Option<T> {
        let at = KEYS.iter().position(|known| *known == key)?;
        // Checked when it came in.
        self.values[at].as_deref()?.parse().ok()
    }

    /// Put a configuration together.
    ///
    /// # Errors
    /// [`ConfigError::Missing`].
    pub fn config(&self) -> Result<Config, ConfigError> {
        let cores: Option<String> = self.get("cores");
        let cores = cores.iter().flat_map(|cores| cores.split(',')).filter_map(|core| core.parse().ok()).collect();
        Ok(Config {
            name: self.get("name").ok_or(ConfigError::Missing("name"))?,
            controller: self.get("controller").ok_or(ConfigError::Missing("controller"))?,
            interface: self.get("interface"),
            ip: self.get("ip"),
            gateway: self.get("gateway"),
            listen: self.get("listen").unwrap_or(DEFAULT_PORT),
            data: self.get("data"),
            host: self.get("host"),
            shards: self.get("shards").unwrap_or(1),
            cores,
            poll: self.get("poll").unwrap_or_default(),
            verbs: self.get("verbs").unwrap_or_default(),
            log: self.get("log").unwrap_or_else(|| "info".to_owned()),
        })
    }
}

/// Tell what a value should be, if it is not.
fn check(key: &str, value: &str) -> Result<(), &'static str> {
    fn is<T: FromStr>(value: &str, expected: &'static str) -> Result<(), &'static str> {
        value.parse::<T>().map(drop).map_err(|_| expected)
    }
    const { assert!(MAX_NAME_LEN == 64 && MAX_SHARDS == 8) };
    let holds = |holds: bool, expected| if holds { Ok(()) } else { Err(expected) };
    match key {
        "name" => holds(!value.is_empty() && Name::try_from(value).is_ok(), "a name of 1 to 64 bytes"),
        "controller" | "data" => {
            let port = value.parse::<SocketAddrV4>().map_or(0, |addr| addr.port());
            holds(port != 0, "an IPv4 address and a port other than 0, as 10.0.2.2:7847")
        }
        // The kernel's limit (IFNAMSIZ); a name is also a path's part.
        "interface" => {
            let plain = !matches!(value, "" | "." | "..") && value.len() < 16 && !value.contains('/');
            holds(plain, "the name of an interface")
        }
        "ip" => is::<Cidr>(value, "an IPv4 address and prefix, as 10.0.2.15/24"),
        "gateway" | "host" => is::<Ipv4Addr>(value, "an IPv4 address"),
        "listen" => holds(value.parse::<u16>().is_ok_and(|port| port != 0), "a port from 1 to 65535"),
        "shards" => {
            let shards = value.parse::<u16>().unwrap_or(0);
            holds((1..=MAX_SHARDS as u16).contains(&shards), "a number from 1 to 8")
        }
        "cores" => holds(value.split(',').all(|core| core.parse::<usize>().is_ok()), "processors, as 2,3"),
        "poll" => is::<Polling>(value, "busy or sleep"),
        "verbs" => is::<Verbs>(value, "auto, off, or an RDMA port, as mlx5_0:1"),
        _ => Ok(()),
    }
}

/// The whole of it.
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub struct Config {
    /// The device's name.
    pub name: String,
    /// The controller.
    pub controller: SocketAddrV4,
    /// The data ports' interface.
    pub interface: Option<String>,
    /// Its address.
    pub ip: Option<Cidr>,
    /// The next hop.
    pub gateway: Option<Ipv4Addr>,
    /// The first shard's port.
    pub listen: u16,
    /// Where peers send the first shard's packets to.
    pub data: Option<SocketAddrV4>,
    /// What loopback means.
    pub host: Option<Ipv4Addr>,
    /// Worker threads.
    pub shards: u16,
    /// Their processors.
    pub cores: Vec<usize>,
    /// How they wait.
    pub poll: Polling,
    /// What they are over.
    pub verbs: Verbs,
    /// What the runtime logs.
    pub log: String,
}

/// What the kernel's command line, or that of a service, says.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct CommandLine {
    /// What wins over the store.
    pub settings: Settings,
    /// Where the store is (`store=/dev/mmcblk0p3`).
    pub store: Option<String>,
    /// Put the settings into the store, so that the next start has them (`keep=yes`).
    pub keep: bool,
}

impl CommandLine {
    /// Read words; `prefix` is what those that are meant begin with. Others are left alone.
    ///
    /// # Errors
    /// [`ConfigError`] for the first that is wrong.
    pub fn parse<'a>(words: impl IntoIterator<Item = &'a str>, prefix: &str) -> Result<Self, ConfigError> {
        let (mut store, mut keep, mut rest) = (None, false, Vec::new());
        for word in words.into_iter().filter_map(|word| word.strip_prefix(prefix)) {
            match word.split_once('=') {
                Some(("store", path)) => store = Some(path.to_owned()),
                Some(("keep", value)) => {
                    keep = match value {
                        "yes" => true,
                        "no" => false,
                        _ => {
                            let (key, value) = ("keep".to_owned(), value.to_owned());
                            return Err(ConfigError::Value { key, value, expected: "yes or no" });
                        }
                    }
                }
                _ => rest.push(word),
            }
        }
        Ok(Self { settings: Settings::from_words(rest)?, store, keep })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const ALL: &str = "name=leaf0\ncontroller=127.0.0.1:7847\ninterface=p0\nip=10.0.2.15/24\ngateway=10.0.2.2\n\
        listen=7200\ndata=127.0.0.1:7300\nhost=10.0.2.2\nshards=2\ncores=2,3\npoll=busy\nverbs=mlx5_0:1\nlog=debug\n";

    #[test]
    fn every_key_is_read_and_written_back() {
        let settings = Settings::from_lines(ALL).expect("settings");
        assert_eq!(settings.to_lines(), ALL);
        assert_eq!(Settings::from_lines(&settings.to_lines()), Ok(settings.clone()));
        let config = settings.config().expect("a configuration");
        let expected = Config {
            name: "leaf0".into(),
            controller: SocketAddrV4::new(Ipv4Addr::LOCALHOST, 7847),
            interface: Some("p0".into()),
            ip: Some(Cidr { ip: Ipv4Addr::new(10, 0, 2, 15), prefix_len: 24 }),
            gateway: Some(Ipv4Addr::new(10, 0, 2, 2)),
            listen: 7200,
            data: Some(SocketAddrV4::new(Ipv4Addr::LOCALHOST, 7300)),
            host: Some(Ipv4Addr::new(10, 0, 2, 2)),
            shards: 2,
            cores: vec![2, 3],
            poll: Polling::Busy,
            verbs: Verbs::Link("mlx5_0:1".into()),
            log: "debug".into(),
        };
        assert_eq!(config, expected);
    }

    #[test]
    fn what_is_unsaid_has_a_default_or_is_asked_for() {
        let settings =
            Settings::from_lines("# a card\n name = d \ncontroller=10.0.0.1:1 # there\n\n").expect("settings");
        let config = settings.config().expect("a configuration");
        assert_eq!((config.listen, config.shards, config.poll), (7100, 1, Polling::Sleep));
        assert_eq!((config.ip, config.data, config.log.as_str()), (None, None, "info"));
        assert_eq!(config.verbs, Verbs::Auto);
        let off = Settings::from_words(["name=d", "controller=10.0.0.1:1", "verbs=off"]).and_then(|off| off.config());
        assert_eq!(off.map(|config| config.verbs), Ok(Verbs::Off));
        let none = Settings::default();
        assert_eq!(none.config(), Err(ConfigError::Missing("name")));
        let named = Settings::from_words(["name=d"]).expect("settings");
        assert_eq!(named.config(), Err(ConfigError::Missing("controller")));
    }

    #[test]
    fn the_command_line_wins_and_foreign_words_are_left_alone() {
        let words = "console=ttyAMA0 sumac.name=other quiet sumac.store=/dev/vda sumac.keep=yes name=no".split(' ');
        let line = CommandLine::parse(words, PREFIX).expect("a command line");
        assert_eq!((line.store.as_deref(), line.keep), (Some("/dev/vda"), true));
        let settings = Settings::from_lines(ALL).expect("settings").overridden_by(&line.settings);
        assert_eq!(settings.to_lines(), ALL.replace("leaf0", "other"));
    }

    #[test]
    fn what_is_wrong_is_named() {
        let long = format!("name={}", "x".repeat(65));
        let cases = [
            ("name", "\"name\" is not key=value"),
            ("nome=x", "\"nome\" is no key; there are name, controller"),
            ("name=", "a name of 1 to 64 bytes"),
            (&long, "a name of 1 to 64 bytes"),
            ("controller=10.0.0.1", "an IPv4 address and a port"),
            ("data=10.0.0.1:0", "a port other than 0"),
            ("interface=../x", "the name of an interface"),
            ("ip=10.0.2.15", "as 10.0.2.15/24"),
            ("ip=10.0.2.15/33", "as 10.0.2.15/24"),
            ("ip=0.0.0.0/8", "as 10.0.2.15/24"),
            ("host=x", "an IPv4 address"),
            ("listen=0", "a port from 1 to 65535"),
            ("shards=65", "a number from 1 to 8"),
            ("cores=1,,2", "processors, as 2,3"),
            ("poll=never", "busy or sleep"),
            ("verbs=", "auto, off, or an RDMA port"),
        ];
        for (word, named) in cases {
            let said = Settings::from_words([word]).expect_err(word).to_string();
            assert!(said.contains(named), "{said}");
        }
        assert!(CommandLine::parse(["sumac.keep=1"], PREFIX).is_err());
        assert!(CommandLine::parse(["sumac.nome=1"], PREFIX).is_err());
    }
}

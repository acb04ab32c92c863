//! The agent's configuration.
//!
//! | key | meaning | default |
//! |---|---|---|
//! | `name` | the device's name in the fabric | required |
//! | `controller` | address and port of the controller | required |
//! | `interface` | the interface of the data ports, by its name or its port, for example `p0` | the only port |
//! | `ip` | its address and prefix, for example `10.0.2.15/24` | its current address, else a link-local one |
//! | `gateway` | the default gateway | none |
//! | `listen` | UDP port of the first shard; the others use the following ports | 7100 |
//! | `data` | the address and port that peers send to, behind address translation | `ip` and `listen` |
//! | `host` | the address of an emulated machine's host, which loopback addresses denote | loopback |
//! | `shards` | number of shards, each a thread | 1 |
//! | `cores` | the processor of each shard, for example `2,3` | any |
//! | `poll` | `busy`: poll without sleeping; `sleep` | `sleep` |
//! | `verbs` | `auto`: RDMA if a port has the address of the data ports, else UDP; `off`; or an RDMA port | `auto` |
//! | `rdma` | the RDMA port over which ranks of other hosts are served zero-copy, with one shard | none |
//! | `slots` | the two slots that updates of a service are written to, files or block devices, with a comma between them | none |
//! | `update-key` | the public key that signs updates: the middle line of its PEM file | required with `slots` |
//! | `slot` | the slot that runs, `A` or `B`, if what started the agent knows | by the slots' records |
//! | `confirm-after` | for how many seconds an updated card serves before it counts as healthy | 60 |
//! | `log` | log filter of the runtime, for example `debug` | `info` |
//!
//! In a store these are lines of `key=value`, and `#` starts a comment. On the kernel's command line each is a word
//! prefixed with `sumac.`, and overrides the store.
//!
//! The device's key is not among them. In a store it is the line `key=sumac-key-v1 ...`, which `sumac-agent enroll`
//! writes, or `/init` if a key follows the boot stream. All users and all who have the image can read a command line,
//! so it is refused there.

mod command_line;

pub use command_line::CommandLine;

use crate::update::{CONFIRM_AFTER, DISK, slot, slot_paths};
use std::fmt::{self, Write};
use std::net::{Ipv4Addr, SocketAddrV4};
use std::path::Path;
use std::str::FromStr;
use std::time::Duration;
use sumac_firmware::slots::Slot;
use sumac_firmware::update::UpdateKey;
use sumac_hal::ctrl::secure::{Key, KeyError};
use sumac_hal::ctrl::{MAX_NAME_LEN, Name};
use sumac_hal::shard::MAX_SHARDS;
use thiserror::Error;
use zeroize::Zeroizing;

/// The prefix of settings on the kernel's command line.
pub const PREFIX: &str = "sumac.";

/// The default UDP port of the first shard.
pub const DEFAULT_PORT: u16 = 7100;

/// Why a configuration is invalid.
#[derive(Debug, Clone, PartialEq, Eq, Error)]
#[non_exhaustive]
pub enum ConfigError {
    /// Not `key=value`.
    #[error("{0:?} is not key=value")]
    Word(String),
    /// An unknown key.
    #[error("unknown key {0:?}; known are {known}", known = KEYS.join(", "))]
    Key(String),
    /// An invalid value.
    #[error("{key}={value:?} is not {expected}")]
    Value {
        /// The key.
        key: String,
        /// The value.
        value: String,
        /// The expected format.
        expected: &'static str,
    },
    /// A required key is missing.
    #[error("{0} is missing: put sumac.{0}=... on the kernel's command line, or {0}=... into the store")]
    Missing(&'static str),
    /// A line of a store should be a key. No message contains it.
    #[error("the device's key: {0}")]
    DeviceKey(#[from] KeyError),
    /// A key on a command line, where others can read it. No message contains it.
    #[error(
        "a key must not be on a command line, which others can read: replace it, and write the new one to the store with \
         `sumac-agent enroll`"
    )]
    KeyInClear,
}

/// An interface's address.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Cidr {
    /// The address.
    pub ip: Ipv4Addr,
    /// The prefix length, 1 to 32.
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
    /// Sleep until the kernel wakes it.
    #[default]
    Sleep,
    /// Poll continuously: the lowest latency, for a processor that has nothing else to do.
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

/// The transport of the data ports.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub enum Verbs {
    /// RDMA if a port has their address, else UDP.
    #[default]
    Auto,
    /// UDP.
    Off,
    /// This RDMA port, for example `mlx5_0:1`; an error if it does not exist.
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

/// The keys, in output order.
const KEYS: [&str; 18] = [
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
    "rdma",
    "slots",
    "update-key",
    "slot",
    "confirm-after",
    "log",
];

/// What the line of a store with the device's key begins with.
const DEVICE_KEY: &str = "key";

/// The length of that line, or more, in bytes.
const DEVICE_KEY_LINE_MAX_BYTES: usize = 128;

/// Return a store's text as it may be shown: of a key only the id.
pub fn redact(text: &str) -> String {
    let mut shown = String::new();
    for line in text.lines() {
        // Writing to a string cannot fail.
        let _ = match line.split_once('=') {
            Some((key, value)) if key.trim() == DEVICE_KEY => match value.parse::<Key>() {
                Ok(key) => writeln!(shown, "# key {}", key.id()),
                Err(error) => writeln!(shown, "# {error}"),
            },
            _ => writeln!(shown, "{line}"),
        };
    }
    shown
}

/// The values of some keys, each validated on its own, and the device's key.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Settings {
    /// Indexed as [`KEYS`].
    values: [Option<String>; KEYS.len()],
    /// The device's key, of which only the id is ever shown.
    pub key: Option<Key>,
}

impl Settings {
    /// Parse the lines of a store.
    ///
    /// # Errors
    /// [`ConfigError`] for the first invalid line.
    pub fn from_lines(text: &str) -> Result<Self, ConfigError> {
        let mut settings = Self::default();
        for line in text.lines().map(|line| line.split('#').next().unwrap_or_default().trim()) {
            match line.split_once('=') {
                _ if line.is_empty() => {}
                Some((key, value)) if key.trim() == DEVICE_KEY => settings.key = Some(value.parse()?),
                _ => settings.set(line)?,
            }
        }
        Ok(settings)
    }

    /// Parse words of `key=value`. The device's key is refused.
    ///
    /// # Errors
    /// [`ConfigError`] for the first invalid word.
    pub fn from_words<'a>(words: impl IntoIterator<Item = &'a str>) -> Result<Self, ConfigError> {
        let mut settings = Self::default();
        words.into_iter().try_for_each(|word| settings.set(word))?;
        Ok(settings)
    }

    fn set(&mut self, word: &str) -> Result<(), ConfigError> {
        let (key, value) = word.split_once('=').ok_or_else(|| ConfigError::Word(word.to_owned()))?;
        let (key, value) = (key.trim(), value.trim());
        if key == DEVICE_KEY {
            return Err(ConfigError::KeyInClear);
        }
        let at = KEYS.iter().position(|known| *known == key).ok_or_else(|| ConfigError::Key(key.to_owned()))?;
        check(key, value).map_err(|expected| ConfigError::Value {
            key: key.to_owned(),
            value: value.to_owned(),
            expected,
        })?;
        self.values[at] = Some(value.to_owned());
        Ok(())
    }

    /// Override values with those that `others` has.
    #[must_use]
    pub fn overridden_by(mut self, others: &Self) -> Self {
        for (value, other) in self.values.iter_mut().zip(&others.values) {
            if other.is_some() {
                value.clone_from(other);
            }
        }
        self.key = others.key.clone().or(self.key);
        self
    }

    /// Format as lines, with the device's key: for a store and for the runtime.
    pub fn to_secret_lines(&self) -> Zeroizing<String> {
        let text = self.to_lines();
        // Of its final length, so that growing leaves no copies behind.
        let mut secret = Zeroizing::new(String::with_capacity(text.len() + DEVICE_KEY_LINE_MAX_BYTES));
        secret.push_str(&text);
        if let Some(key) = &self.key {
            // Writing to a string cannot fail.
            let _ = writeln!(secret, "{DEVICE_KEY}={}", key.reveal());
        }
        secret
    }

    /// Format as lines, without the device's key.
    pub fn to_lines(&self) -> String {
        let mut text = String::new();
        for (key, value) in KEYS.iter().zip(&self.values) {
            if let Some(value) = value {
                // Writing to a string cannot fail.
                let _ = writeln!(text, "{key}={value}");
            }
        }
        text
    }

    /// Set the device's key.
    #[must_use]
    pub fn with_key(self, key: Option<Key>) -> Self {
        Self { key, ..self }
    }

    /// Set the address of the data ports.
    pub fn set_ip(&mut self, ip: Cidr) {
        self.put("ip", ip.to_string());
    }

    /// Set the slot that runs.
    pub fn set_slot(&mut self, slot: Slot) {
        self.put("slot", slot.to_string());
    }

    /// Set the disk with the slots, of which the firmware has started one.
    pub fn set_slots_of(&mut self, disk: &Path) {
        self.put("slots", format!("{DISK}{}", disk.display()));
    }

    fn put(&mut self, key: &str, value: String) {
        let at = KEYS.iter().position(|known| *known == key);
        at.into_iter().for_each(|at| self.values[at] = Some(value.clone()));
    }

    fn get<T: FromStr>(&self, key: &str) -> Option<T> {
        let at = KEYS.iter().position(|known| *known == key)?;
        // Validated on input.
        self.values[at].as_deref()?.parse().ok()
    }

    /// Build the configuration.
    ///
    /// # Errors
    /// [`ConfigError::Missing`].
    pub fn config(&self) -> Result<Config, ConfigError> {
        let cores: Option<String> = self.get("cores");
        let (slots, update_key) = (self.get::<String>("slots"), self.get("update-key"));
        if slots.is_some() && update_key.is_none() {
            return Err(ConfigError::Missing("update-key"));
        }
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
            rdma: self.get("rdma"),
            slots: slots.as_deref().and_then(slot_paths),
            update_key,
            slot: self.get::<String>("slot").as_deref().and_then(slot),
            confirm_after: self.get("confirm-after").map_or(CONFIRM_AFTER, Duration::from_secs),
            log: self.get("log").unwrap_or_else(|| "info".to_owned()),
            key: self.key.clone(),
        })
    }
}

/// Check a value; the error is the expected format.
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
            holds(port != 0, "an IPv4 address and a port other than 0, such as 10.0.2.2:7847")
        }
        // The kernel's limit (IFNAMSIZ); the name is also used in a path.
        "interface" => {
            let plain = !matches!(value, "" | "." | "..") && value.len() < 16 && !value.contains('/');
            holds(plain, "the name of an interface")
        }
        "ip" => is::<Cidr>(value, "an IPv4 address and prefix, such as 10.0.2.15/24"),
        "gateway" | "host" => is::<Ipv4Addr>(value, "an IPv4 address"),
        "listen" => holds(value.parse::<u16>().is_ok_and(|port| port != 0), "a port from 1 to 65535"),
        "shards" => {
            let shards = value.parse::<u16>().unwrap_or(0);
            holds((1..=MAX_SHARDS as u16).contains(&shards), "a number from 1 to 8")
        }
        "cores" => holds(value.split(',').all(|core| core.parse::<usize>().is_ok()), "processors, such as 2,3"),
        "poll" => is::<Polling>(value, "busy or sleep"),
        "verbs" => is::<Verbs>(value, "auto, off, or an RDMA port such as mlx5_2:1"),
        "slots" => {
            holds(slot_paths(value).is_some(), "two files or block devices, such as /var/lib/sumac/a,/var/lib/sumac/b")
        }
        "update-key" => is::<UpdateKey>(value, "a public ed25519 key: the middle line of its PEM file"),
        "slot" => holds(slot(value).is_some(), "A or B"),
        "confirm-after" => is::<u64>(value, "a number of seconds"),
        "rdma" => holds(!value.is_empty(), "an RDMA port such as mlx5_2:1, or auto"),
        _ => Ok(()),
    }
}

/// Where the slots are.
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub enum SlotPaths {
    /// Two files or block devices of a service: what starts it reads their records.
    Files([String; 2]),
    /// A disk with partitions for them, from which the firmware starts one by its boot entry. Only `/init` sets it.
    Disk(String),
}

/// The complete configuration.
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
    /// The default gateway.
    pub gateway: Option<Ipv4Addr>,
    /// The first shard's port.
    pub listen: u16,
    /// The address and port that peers of the first shard send to.
    pub data: Option<SocketAddrV4>,
    /// The host that loopback addresses denote.
    pub host: Option<Ipv4Addr>,
    /// The number of shards.
    pub shards: u16,
    /// Their processors.
    pub cores: Vec<usize>,
    /// How they wait for packets.
    pub poll: Polling,
    /// The transport of the data ports.
    pub verbs: Verbs,
    /// The RDMA port over which ranks of other hosts are served zero-copy.
    pub rdma: Option<String>,
    /// The two slots that updates are written to.
    pub slots: Option<SlotPaths>,
    /// The key that signs updates.
    pub update_key: Option<UpdateKey>,
    /// The slot that runs.
    pub slot: Option<Slot>,
    /// How long an updated card serves before it counts as healthy.
    pub confirm_after: Duration,
    /// The log filter of the runtime.
    pub log: String,
    /// The device's key, if the controller uses keys.
    pub key: Option<Key>,
}

#[cfg(test)]
mod tests;

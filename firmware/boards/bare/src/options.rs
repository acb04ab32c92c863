//! A board's boot options.

use core::net::{Ipv4Addr, SocketAddrV4};
use core::str::FromStr;
use core::time::Duration;
use heapless::String;
use smoltcp::wire::Ipv4Cidr;
use sumac_hal::ctrl::secure::{Key, KeyError};
use sumac_hal::ctrl::{MAX_NAME_LEN, Name};
use thiserror::Error;

/// A board's boot options: lines of `key=value`, in any order; `#` starts a comment.
///
/// | key | meaning |
/// |---|---|
/// | `name` | the device's name in the fabric |
/// | `controller` | address and port of the controller |
/// | `ip` | the board's address and prefix, for example `10.0.2.15/24` |
/// | `gateway` | the default gateway |
/// | `listen` | the UDP port of the first shard; the others use the following ports |
/// | `data` | the address and port that peers send to, if they differ from `ip` and `listen` because of address translation |
/// | `machine`, `socket` | the machine whose ranks share memory with the board, and the socket of their broker |
/// | `user` | the user id whose ranks, besides root's, the broker accepts; default 0 |
/// | `key` | the device's key, `sumac-key-v1 ID SECRET`, if the controller uses keys |
/// | `watchdog_ms` | the maximum time between two steps of a core; default 20,000 |
/// | `fault` | with the feature `faults`, for tests: `panic`, `access`, `hang` or `trace`, once in the first incarnation |
///
/// A loopback address (127.0.0.0/8) denotes the host behind the gateway, as an emulated machine sees it: packets to it
/// are sent to the gateway, and packets from the gateway appear to come from 127.0.0.1.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct BoardOptions {
    /// The device's name in the fabric.
    pub name: Name,
    /// The controller.
    pub controller: SocketAddrV4,
    /// The board's address and prefix.
    pub ip: Ipv4Cidr,
    /// The default gateway.
    pub gateway: Ipv4Addr,
    /// The UDP port of the first shard.
    pub listen: u16,
    /// The address and port that peers of the first shard send to.
    pub data: SocketAddrV4,
    /// The machine whose ranks share memory with the board, and the socket of their broker.
    pub broker: Option<(Name, Name)>,
    /// The user id whose ranks the broker accepts.
    pub user: u32,
    /// The device's key.
    pub key: Option<Key>,
    /// The maximum time between two steps of a core.
    pub watchdog: Duration,
    /// The fault to inject.
    #[cfg(feature = "faults")]
    pub fault: Option<Fault>,
}

/// A fault to inject, for tests that a board recovers.
#[cfg(feature = "faults")]
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Fault {
    /// A panic.
    Panic,
    /// A read of an unmapped address.
    Access,
    /// An endless loop.
    Hang,
    /// A panic once the first trace entry was reported and not sent.
    Trace,
}

/// The maximum length of all options in bytes, which a board has to reserve.
pub const OPTIONS_MAX_BYTES: usize = 640;

/// Generous, because the host of an emulated machine may be busy.
const WATCHDOG: Duration = Duration::from_secs(20);

/// Why options are invalid.
#[derive(Debug, Clone, PartialEq, Eq, Error)]
#[non_exhaustive]
pub enum OptionsError {
    /// A line that is not `key=value`.
    #[error("line {line} is not key=value")]
    Line {
        /// The line number, from 1.
        line: usize,
    },
    /// An unknown key.
    #[error(
        "line {line}: unknown key; known are name, controller, ip, gateway, listen, data, machine, socket, user, key, watchdog_ms"
    )]
    Key {
        /// The line number, from 1.
        line: usize,
    },
    /// An invalid value.
    #[error("{key}={value:?} is not {expected}")]
    Value {
        /// The key.
        key: &'static str,
        /// The beginning of the value.
        value: String<32>,
        /// The expected format.
        expected: &'static str,
    },
    /// The device's key is malformed. No message contains it.
    #[error("key: {0}")]
    DeviceKey(#[from] KeyError),
    /// A required key is missing.
    #[error("{key} is missing: the board requires it")]
    Missing {
        /// The key.
        key: &'static str,
    },
}

impl BoardOptions {
    /// Parse options.
    ///
    /// # Errors
    /// [`OptionsError`] for the first error.
    pub fn parse(text: &str) -> Result<Self, OptionsError> {
        let (mut name, mut controller, mut ip, mut gateway) = (None, None, None, None);
        let (mut listen, mut data, mut watchdog) = (None, None, WATCHDOG);
        let (mut machine, mut socket, mut user, mut device_key) = (None, None, 0, None);
        #[cfg(feature = "faults")]
        let mut fault = None;
        for (line, text) in (1..).zip(text.lines()) {
            let text = text.split('#').next().unwrap_or_default().trim();
            if text.is_empty() {
                continue;
            }
            let (key, value) = text.split_once('=').ok_or(OptionsError::Line { line })?;
            match (key.trim(), value.trim()) {
                ("name", value) => name = Some(parse_name("name", value)?),
                ("controller", value) => controller = Some(parse("controller", value, "an IPv4 address and port")?),
                ("ip", value) => ip = Some(parse("ip", value, "an IPv4 address and prefix, such as 10.0.2.15/24")?),
                ("gateway", value) => gateway = Some(parse("gateway", value, "an IPv4 address")?),
                ("listen", value) => listen = Some(parse_port(value)?),
                ("data", value) => data = Some(parse("data", value, "an IPv4 address and port")?),
                ("machine", value) => machine = Some(parse_name("machine", value)?),
                ("socket", value) => socket = Some(parse_name("socket", value)?),
                ("user", value) => user = parse("user", value, "a user id")?,
                ("key", value) => device_key = Some(value.parse()?),
                ("watchdog_ms", value) => watchdog = Duration::from_millis(parse_watchdog(value)?),
                #[cfg(feature = "faults")]
                ("fault", value) => fault = Some(parse_fault(value)?),
                _ => return Err(OptionsError::Key { line }),
            }
        }
        let missing = |key| OptionsError::Missing { key };
        let (ip, listen): (Ipv4Cidr, u16) = (ip.ok_or(missing("ip"))?, listen.ok_or(missing("listen"))?);
        Ok(Self {
            name: name.ok_or(missing("name"))?,
            controller: controller.ok_or(missing("controller"))?,
            ip,
            gateway: gateway.ok_or(missing("gateway"))?,
            listen,
            data: data.unwrap_or(SocketAddrV4::new(ip.address(), listen)),
            broker: match (machine, socket) {
                (Some(machine), Some(socket)) => Some((machine, socket)),
                (None, None) => None,
                (None, _) => return Err(missing("machine")),
                (_, None) => return Err(missing("socket")),
            },
            user,
            key: device_key,
            watchdog,
            #[cfg(feature = "faults")]
            fault,
        })
    }

    /// Return the options of shard `index`, which has its own ports; `None` if they exceed 65535.
    pub fn shard(&self, index: u16) -> Option<Self> {
        let port = |port: u16| port.checked_add(index);
        let data = SocketAddrV4::new(*self.data.ip(), port(self.data.port())?);
        Some(Self { listen: port(self.listen)?, data, ..self.clone() })
    }
}

fn wrong(key: &'static str, value: &str, expected: &'static str) -> OptionsError {
    let value = value.chars().take(8).collect();
    OptionsError::Value { key, value, expected }
}

fn parse<T: FromStr>(key: &'static str, value: &str, expected: &'static str) -> Result<T, OptionsError> {
    value.parse().map_err(|_| wrong(key, value, expected))
}

fn parse_port(value: &str) -> Result<u16, OptionsError> {
    let expected = "a port from 1 to 65535";
    parse("listen", value, expected)
        .and_then(|port| if port == 0 { Err(wrong("listen", value, expected)) } else { Ok(port) })
}

fn parse_watchdog(value: &str) -> Result<u64, OptionsError> {
    let expected = "a time from 100 to 600000 ms";
    let time: u64 = parse("watchdog_ms", value, expected)?;
    if (100..=600_000).contains(&time) { Ok(time) } else { Err(wrong("watchdog_ms", value, expected)) }
}

#[cfg(feature = "faults")]
fn parse_fault(value: &str) -> Result<Fault, OptionsError> {
    match value {
        "panic" => Ok(Fault::Panic),
        "access" => Ok(Fault::Access),
        "hang" => Ok(Fault::Hang),
        "trace" => Ok(Fault::Trace),
        _ => Err(wrong("fault", value, "panic, access, hang or trace")),
    }
}

fn parse_name(key: &'static str, value: &str) -> Result<Name, OptionsError> {
    const { assert!(MAX_NAME_LEN == 64) };
    let name = Name::try_from(value).ok().filter(|name| !name.is_empty());
    name.ok_or_else(|| wrong(key, value, "1 to 64 bytes"))
}

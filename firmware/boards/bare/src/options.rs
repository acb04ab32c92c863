//! What a board is told at boot.

use core::net::{Ipv4Addr, SocketAddrV4};
use core::str::FromStr;
use core::time::Duration;
use heapless::String;
use smoltcp::wire::Ipv4Cidr;
use sumac_hal::ctrl::{MAX_NAME_LEN, Name};
use thiserror::Error;

/// What a board is told at boot: lines of `key=value`, in any order; `#` begins a comment.
///
/// | key | meaning |
/// |---|---|
/// | `name` | the device's name in the fabric |
/// | `controller` | address and port of the controller |
/// | `ip` | the board's own address with its prefix, as `10.0.2.15/24` |
/// | `gateway` | the next hop for everybody else |
/// | `listen` | the UDP port of the first shard; others take the next ones |
/// | `data` | where peers send to, if that is not `ip` and `listen`: behind address translation |
/// | `machine`, `socket` | where ranks are that share memory with the board, and what their broker listens on |
/// | `user` | the user whose ranks alone that broker lets in, and the superuser's; 0 unless told |
/// | `watchdog_ms` | how long a core may take to come round; 20,000 unless told |
/// | `fault` | with the feature `faults`, for tests: `panic`, `access`, `hang` or `trace`, once in the first life |
///
/// An address of loopback (127.0.0.0/8) means the host behind the gateway, as an emulated machine sees it: packets to it
/// go to the gateway, and what comes from the gateway comes from 127.0.0.1.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct BoardOptions {
    /// The device's name in the fabric.
    pub name: Name,
    /// The controller.
    pub controller: SocketAddrV4,
    /// The board's own address.
    pub ip: Ipv4Cidr,
    /// The next hop.
    pub gateway: Ipv4Addr,
    /// The UDP port of the first shard.
    pub listen: u16,
    /// Where peers send the first shard's packets to.
    pub data: SocketAddrV4,
    /// The machine whose ranks share memory with the board, and the socket that their broker listens on.
    pub bus: Option<(Name, Name)>,
    /// The broker's user.
    pub user: u32,
    /// How long a core may take to come round.
    pub watchdog: Duration,
    /// What is to go wrong.
    #[cfg(feature = "faults")]
    pub fault: Option<Fault>,
}

/// What can be made to go wrong with a board, to see that it comes back.
#[cfg(feature = "faults")]
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Fault {
    /// It panics.
    Panic,
    /// It reads where there is nothing.
    Access,
    /// It stops coming round.
    Hang,
    /// It panics when the first entry of its trace has been told, and not sent.
    Trace,
}

/// How long all options together can be in bytes, so that a board knows how much to keep of them.
pub const OPTIONS_MAX_BYTES: usize = 512;

/// Generous, as the host of an emulated machine may be busy elsewhere.
const WATCHDOG: Duration = Duration::from_secs(20);

/// Why a board does not know what to do.
#[derive(Debug, Clone, PartialEq, Eq, Error)]
#[non_exhaustive]
pub enum OptionsError {
    /// A line that is not `key=value`.
    #[error("line {line} is not key=value")]
    Line {
        /// Which, from 1.
        line: usize,
    },
    /// A key that nobody knows.
    #[error(
        "line {line}: unknown key; known are name, controller, ip, gateway, listen, data, machine, socket, user, watchdog_ms"
    )]
    Key {
        /// Which, from 1.
        line: usize,
    },
    /// A value that is none.
    #[error("{key}={value:?} is not {expected}")]
    Value {
        /// The key.
        key: &'static str,
        /// As much of the value as is kept.
        value: String<32>,
        /// What would be.
        expected: &'static str,
    },
    /// A key that is needed.
    #[error("no {key}: the board needs one")]
    Missing {
        /// The key.
        key: &'static str,
    },
}

impl BoardOptions {
    /// Read options.
    ///
    /// # Errors
    /// [`OptionsError`] for the first thing that is wrong.
    pub fn parse(text: &str) -> Result<Self, OptionsError> {
        let (mut name, mut controller, mut ip, mut gateway) = (None, None, None, None);
        let (mut listen, mut data, mut watchdog) = (None, None, WATCHDOG);
        let (mut machine, mut socket, mut user) = (None, None, 0);
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
                ("ip", value) => ip = Some(parse("ip", value, "an IPv4 address and prefix, as 10.0.2.15/24")?),
                ("gateway", value) => gateway = Some(parse("gateway", value, "an IPv4 address")?),
                ("listen", value) => listen = Some(parse_port(value)?),
                ("data", value) => data = Some(parse("data", value, "an IPv4 address and port")?),
                ("machine", value) => machine = Some(parse_name("machine", value)?),
                ("socket", value) => socket = Some(parse_name("socket", value)?),
                ("user", value) => user = parse("user", value, "the number of a user")?,
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
            bus: match (machine, socket) {
                (Some(machine), Some(socket)) => Some((machine, socket)),
                (None, None) => None,
                (None, _) => return Err(missing("machine")),
                (_, None) => return Err(missing("socket")),
            },
            user,
            watchdog,
            #[cfg(feature = "faults")]
            fault,
        })
    }

    /// Return these options for shard `index`, which has an address and a port of its own; `None` if there is no such
    /// port.
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

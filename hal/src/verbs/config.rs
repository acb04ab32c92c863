//! Configuration, errors and counters of a verbs port.

use crate::traffic_class::TrafficClass;
use std::fmt;
use std::io;
use std::net::IpAddr;
use std::str::FromStr;
use std::time::Duration;
use thiserror::Error;

/// An RDMA device, port and GID: `DEVICE[:PORT[:GID-INDEX]]`, or `auto`.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct VerbsLink {
    /// The device; `None`: the first one with an active port.
    pub device: Option<String>,
    /// The port, counted from 1; `None`: the first active one.
    pub port: Option<u8>,
    /// The index in the port's GID table; `None`: RoCE version 2 with the preferred address, else with any IPv4
    /// address, else with an IPv6 address, else the first entry.
    pub gid_index: Option<u8>,
}

/// The text is not an RDMA port.
#[derive(Debug, Clone, PartialEq, Eq, Error)]
#[error("{0:?} names no RDMA port; give DEVICE, DEVICE:PORT or DEVICE:PORT:GID-INDEX, as in mlx5_0:1:3, or auto")]
pub struct ParseLinkError(String);

impl FromStr for VerbsLink {
    type Err = ParseLinkError;

    fn from_str(text: &str) -> Result<Self, ParseLinkError> {
        let wrong = || ParseLinkError(text.to_owned());
        let mut parts = text.split(':');
        let device = parts.next().filter(|device| !device.is_empty()).ok_or_else(wrong)?;
        let mut number = || parts.next().map(|part| part.parse::<u8>().map_err(|_| wrong())).transpose();
        let (port, gid_index) = (number()?, number()?);
        if port == Some(0) || parts.next().is_some() || device == AUTO && port.is_some() {
            return Err(wrong());
        }
        Ok(Self { device: (device != AUTO).then(|| device.to_owned()), port, gid_index })
    }
}

impl fmt::Display for VerbsLink {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.device.as_deref().unwrap_or(AUTO))?;
        [self.port, self.gid_index].into_iter().map_while(|part| part).try_for_each(|part| write!(f, ":{part}"))
    }
}

/// The name that selects any active port.
const AUTO: &str = "auto";

/// Configuration of a [`VerbsPort`](super::VerbsPort).
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct VerbsConfig {
    /// The RDMA port.
    pub link: VerbsLink,
    /// The address whose GID is preferred, unless `link` names a GID index.
    pub prefer: Option<IpAddr>,
    /// How many bytes of packets, of 1 KiB and more each, to buffer until they are received. The device may limit the
    /// number of buffers (`max_qp_wr`): the capabilities report the result.
    pub receive_buffer_bytes: usize,
    /// How long `wait` spins before it yields and then sleeps.
    pub spin: Duration,
    /// The traffic class of the packets, which declare ECN capability beside it.
    pub traffic_class: TrafficClass,
}

impl Default for VerbsConfig {
    fn default() -> Self {
        Self {
            link: VerbsLink::default(),
            prefer: None,
            receive_buffer_bytes: 1 << 20,
            spin: Duration::ZERO,
            traffic_class: TrafficClass::default(),
        }
    }
}

/// Why a verbs port could not be opened.
#[derive(Debug, Error)]
#[non_exhaustive]
pub enum VerbsError {
    /// The library cannot list devices.
    #[error(
        "can't list RDMA devices: {source}; load ib_uverbs and the device's driver (modprobe), or rdma_rxe for Soft-RoCE"
    )]
    Devices {
        /// The system's error.
        source: io::Error,
    },
    /// There is no device of this name.
    #[error("there is no RDMA device {wanted}; there are: {}", list(have))]
    NoDevice {
        /// The requested device.
        wanted: String,
        /// The existing devices.
        have: Vec<String>,
    },
    /// No port is active.
    #[error("no port of {device} is active; see `rdma link`, and that its network interface is up")]
    NotActive {
        /// The requested device.
        device: String,
    },
    /// The port has no GID to which peers could send.
    #[error("port {port} of {device} has no identifier{}; see that its network interface has an IP address",
            index.map_or_else(String::new, |index| format!(" at index {index}")))]
    NoGid {
        /// The device.
        device: String,
        /// The port.
        port: u8,
        /// The requested index.
        index: Option<u8>,
    },
    /// Memory could not be registered.
    #[error(
        "can't register {len_bytes} bytes with the RDMA device: {source}; raise the limit of locked memory (ulimit -l, LimitMEMLOCK=)"
    )]
    Register {
        /// The length in bytes.
        len_bytes: usize,
        /// The system's error.
        source: io::Error,
    },
    /// A call of the library failed.
    #[error("{device}: can't {what}: {source}")]
    Refused {
        /// The operation.
        what: &'static str,
        /// The device.
        device: String,
        /// The system's error.
        source: io::Error,
    },
}

impl VerbsError {
    /// Create an error from `errno`.
    pub(super) fn last(what: &'static str, device: &str) -> Self {
        Self::Refused { what, device: device.into(), source: io::Error::last_os_error() }
    }
}

fn list(names: &[String]) -> String {
    if names.is_empty() { "none".into() } else { names.join(", ") }
}

/// Counters of a port since it was opened.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
#[non_exhaustive]
pub struct VerbsStats {
    /// Packets that the device accepted.
    pub sent_packets: u64,
    /// Their bytes.
    pub sent_bytes: u64,
    /// Packets sent inline, which the device did not have to read from memory.
    pub sent_inline: u64,
    /// Calls that posted packets.
    pub send_posts: u64,
    /// Completions of sent packets: one per post.
    pub send_completions: u64,
    /// Packets dropped: invalid or unresolvable destinations, or lost in a restart of the queue pair.
    pub send_dropped_packets: u64,
    /// Packets received.
    pub received_packets: u64,
    /// Their bytes.
    pub received_bytes: u64,
    /// Polls of the receive completion queue, empty ones included.
    pub receive_polls: u64,
    /// Calls that posted receive buffers.
    pub receive_posts: u64,
    /// Packets dropped because they had no source address, were empty or too long, and failed receptions.
    pub receive_errors: u64,
    /// Restarts of the queue pair after an error.
    pub restarts: u64,
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn links_parse_and_print_in_the_usual_notation() {
        let link = |device: &str, port, gid_index| Ok(VerbsLink { device: Some(device.into()), port, gid_index });
        assert_eq!("auto".parse(), Ok(VerbsLink::default()));
        assert_eq!("mlx5_0".parse(), link("mlx5_0", None, None));
        assert_eq!("mlx5_0:1".parse(), link("mlx5_0", Some(1), None));
        assert_eq!("rxe3:2:255".parse(), link("rxe3", Some(2), Some(255)));
        for text in ["auto", "mlx5_0", "mlx5_0:1", "rxe3:2:255"] {
            assert_eq!(text.parse::<VerbsLink>().map(|link| link.to_string()), Ok(text.to_owned()));
        }
        for text in ["", ":1", "a:0", "a:x", "a:1:256", "a:1:1:1", "auto:1", "a:"] {
            assert_eq!(text.parse::<VerbsLink>(), Err(ParseLinkError(text.into())));
        }
    }

    #[test]
    fn readme_lists_every_error() {
        let page = include_str!("README.md");
        let source = || io::Error::from_raw_os_error(12);
        let errors = [
            VerbsError::Devices { source: source() },
            VerbsError::NoDevice { wanted: "a".into(), have: Vec::new() },
            VerbsError::NotActive { device: "a".into() },
            VerbsError::NoGid { device: "a".into(), port: 1, index: Some(3) },
            VerbsError::Register { len_bytes: 1, source: source() },
            VerbsError::Refused { what: "create a queue pair", device: "a".into(), source: source() },
        ];
        let named: Vec<&str> = page.lines().filter_map(|line| line.strip_prefix("| ")?.split(" | ").next()).collect();
        for text in errors.iter().map(ToString::to_string).chain([ParseLinkError("a:b".into()).to_string()]) {
            assert!(named.iter().any(|words| words.len() > 10 && text.contains(words)), "{text}");
        }
    }
}

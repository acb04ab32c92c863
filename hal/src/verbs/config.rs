//! Configuration, errors and counters of a verbs port.

use crate::traffic_class::TrafficClass;
use std::fmt;
use std::io;
use std::net::IpAddr;
use std::str::FromStr;
use std::time::Duration;
use thiserror::Error;

/// An RDMA device, port and GID, `DEVICE[:PORT[:GID-INDEX]]` or `auto`, and settings of the connections on it, each
/// after a slash: `/sl=0..15`, `/pkey=NUMBER`, `/relaxed`.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct VerbsLink {
    /// The device; `None`: the one with the preferred address, else the fastest that has an active port.
    pub device: Option<String>,
    /// The port, counted from 1; `None`: the first active one.
    pub port: Option<u8>,
    /// The index in the port's GID table; `None`: RoCE version 2 with the preferred address, else with any IPv4
    /// address, else with an IPv6 address, else the first entry.
    pub gid_index: Option<u8>,
    /// The service level, at most 15: on InfiniBand it selects the virtual lane, on RoCE with VLANs the priority.
    pub service_level: u8,
    /// The partition key; `None`: the one at index 0 of the port's table, usually the default partition.
    pub partition_key: Option<u16>,
    /// Let the device write to memory in any order (`IBV_ACCESS_RELAXED_ORDERING`), which some processors need for full
    /// rates. Nothing here reads data before its completion, which is still written after it.
    pub is_relaxed: bool,
}

/// The text is not an RDMA port.
#[derive(Debug, Clone, PartialEq, Eq, Error)]
#[error(
    "{0:?} names no RDMA port; give DEVICE, DEVICE:PORT or DEVICE:PORT:GID-INDEX, as in mlx5_0:1:3, or auto; then perhaps \
     /sl=0..15, /pkey=NUMBER or /relaxed"
)]
pub struct ParseLinkError(String);

impl FromStr for VerbsLink {
    type Err = ParseLinkError;

    fn from_str(text: &str) -> Result<Self, ParseLinkError> {
        let wrong = || ParseLinkError(text.to_owned());
        let mut settings = text.split('/');
        let mut parts = settings.next().unwrap_or_default().split(':');
        let device = parts.next().filter(|device| !device.is_empty()).ok_or_else(wrong)?;
        let mut number = || parts.next().map(|part| part.parse::<u8>().map_err(|_| wrong())).transpose();
        let (port, gid_index) = (number()?, number()?);
        if port == Some(0) || parts.next().is_some() || device == AUTO && port.is_some() {
            return Err(wrong());
        }
        let device = (device != AUTO).then(|| device.to_owned());
        let mut link = Self { device, port, gid_index, ..Self::default() };
        for setting in settings {
            match setting.split_once('=') {
                None if setting == "relaxed" => link.is_relaxed = true,
                Some(("sl", level)) => {
                    let level = level.parse().ok().filter(|level| *level <= SERVICE_LEVEL_MAX);
                    link.service_level = level.ok_or_else(wrong)?;
                }
                Some(("pkey", key)) => {
                    let hex = key.strip_prefix("0x").map(|digits| u16::from_str_radix(digits, 16).ok());
                    link.partition_key = Some(hex.unwrap_or_else(|| key.parse().ok()).ok_or_else(wrong)?);
                }
                _ => return Err(wrong()),
            }
        }
        Ok(link)
    }
}

impl fmt::Display for VerbsLink {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.device.as_deref().unwrap_or(AUTO))?;
        [self.port, self.gid_index].into_iter().map_while(|part| part).try_for_each(|part| write!(f, ":{part}"))?;
        if self.service_level > 0 {
            write!(f, "/sl={}", self.service_level)?;
        }
        if let Some(key) = self.partition_key {
            write!(f, "/pkey={key:#x}")?;
        }
        if self.is_relaxed { f.write_str("/relaxed") } else { Ok(()) }
    }
}

/// Service levels have 4 bits.
const SERVICE_LEVEL_MAX: u8 = 15;

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
    /// The completion vector that wakes who waits for packets, modulo how many the device has. Vectors interrupt
    /// different processors, so ports whose threads wait beside each other should have different ones.
    pub vector: u32,
}

impl Default for VerbsConfig {
    fn default() -> Self {
        Self {
            link: VerbsLink::default(),
            prefer: None,
            receive_buffer_bytes: 1 << 20,
            spin: Duration::ZERO,
            traffic_class: TrafficClass::default(),
            vector: 0,
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
    /// `auto` finds no port.
    #[error("no RDMA port can be used{}{}", at.map_or_else(String::new, |addr| format!(" at {addr}")), reasons(skipped))]
    NoPort {
        /// The address that it should have.
        at: Option<IpAddr>,
        /// Why devices were skipped.
        skipped: Vec<String>,
    },
    /// The device belongs to a switchdev representor, which carries raw Ethernet only.
    #[error(
        "{device} is a switchdev representor ({interface}), which has no RoCE: use the device of a sub-function \
         (`mlxdevm port show`, `rdma link`; often mlx5_2) or of the host's function, and give it the IP address"
    )]
    Representor {
        /// The device.
        device: String,
        /// One of its network interfaces.
        interface: String,
    },
    /// The device has no datagrams, and other addresses.
    #[error("{device} is an iWARP device; InfiniBand and RoCE are supported")]
    Iwarp {
        /// The device.
        device: String,
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
    /// The port is no member of the partition.
    #[error(
        "port {port} of {device} has no partition key {key:#x}; see /sys/class/infiniband/{device}/ports/{port}/pkeys"
    )]
    NoPartition {
        /// The device.
        device: String,
        /// The port.
        port: u8,
        /// The requested key.
        key: u16,
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
    #[error("{device}: can't {what}: {source}{}", limit_hint(source))]
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

/// Drivers also lock the memory of queues, so that a low limit shows wherever one is created.
fn limit_hint(source: &io::Error) -> &'static str {
    match source.raw_os_error() {
        Some(libc::ENOMEM) => "; raise the limit of locked memory (ulimit -l, LimitMEMLOCK=)",
        _ => "",
    }
}

fn reasons(skipped: &[String]) -> String {
    if skipped.is_empty() { String::new() } else { format!(": {}", skipped.join("; ")) }
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
        let link = |device: &str, port, gid_index| {
            Ok(VerbsLink { device: Some(device.into()), port, gid_index, ..VerbsLink::default() })
        };
        assert_eq!("auto".parse(), Ok(VerbsLink::default()));
        assert_eq!("mlx5_0".parse(), link("mlx5_0", None, None));
        assert_eq!("mlx5_0:1".parse(), link("mlx5_0", Some(1), None));
        assert_eq!("rxe3:2:255".parse(), link("rxe3", Some(2), Some(255)));
        let all = VerbsLink { service_level: 3, partition_key: Some(0x8001), is_relaxed: true, ..VerbsLink::default() };
        assert_eq!("auto/relaxed/pkey=32769/sl=3".parse(), Ok(all));
        for text in ["auto", "mlx5_0", "mlx5_0:1", "rxe3:2:255", "auto/sl=3/pkey=0x8001/relaxed", "mlx5_0:1/relaxed"] {
            assert_eq!(text.parse::<VerbsLink>().map(|link| link.to_string()), Ok(text.to_owned()));
        }
        for text in [
            "",
            ":1",
            "a:0",
            "a:x",
            "a:1:256",
            "a:1:1:1",
            "auto:1",
            "a:",
            "a/",
            "a/sl=16",
            "a/pkey=",
            "a/x",
            "a/relaxed=1",
        ] {
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
            VerbsError::Refused { what: "create a completion queue", device: "a".into(), source: source() },
            VerbsError::NoPort { at: None, skipped: vec!["a".into()] },
            VerbsError::Representor { device: "a".into(), interface: "p0".into() },
            VerbsError::Iwarp { device: "a".into() },
            VerbsError::NotActive { device: "a".into() },
            VerbsError::NoGid { device: "a".into(), port: 1, index: Some(3) },
            VerbsError::NoPartition { device: "a".into(), port: 1, key: 0x8001 },
            VerbsError::Register { len_bytes: 1, source: source() },
            VerbsError::Refused { what: "create a queue pair", device: "a".into(), source: source() },
        ];
        let named: Vec<&str> = page.lines().filter_map(|line| line.strip_prefix("| ")?.split(" | ").next()).collect();
        for text in errors.iter().map(ToString::to_string).chain([ParseLinkError("a:b".into()).to_string()]) {
            assert!(named.iter().any(|words| words.len() > 10 && text.contains(words)), "{text}");
        }
    }

    #[test]
    fn low_limit_of_locked_memory_is_named_wherever_it_shows() {
        use crate::verbs::fake::machine;
        machine(|machine| _ = machine.add("mlx5_0", std::net::Ipv4Addr::LOCALHOST));
        machine(|machine| machine.locks_no_memory = true);
        let error = crate::verbs::VerbsPort::open(&VerbsConfig::default()).expect_err("nothing can be locked");
        let text = error.to_string();
        assert!(text.contains("create a completion queue: Cannot allocate memory"), "{text}");
        assert!(text.contains("LimitMEMLOCK="), "{text}");
    }
}

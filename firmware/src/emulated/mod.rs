//! The emulated board: a device as an ordinary process.
//!
//! ```text
//!               control (TCP, dials the controller)
//!                      |
//!               +------v-------+   requests, one queue a shard   +---------+
//!               | control      |-------------------------------->| shard 0 |--- UDP
//!               | thread       |<--------------------------------| thread  |
//!               +--------------+   responses                     +---------+
//!                                                                    ...
//! ```
//!
//! Each shard is a thread with a node, a port and storage of its own; they share nothing, so the data path takes no
//! lock. The control thread sends each request to every shard and merges the responses. A board that loses its
//! controller keeps serving its groups, whose leases the ranks' packets renew, and dials again.

mod attach;
mod capture;
mod control;
mod engine;
mod function;
mod functions;
mod maintenance;
mod redo;
mod shard;
mod term_file;
#[cfg(test)]
mod tests;

pub use attach::ZeroCopyConfig;
pub use functions::ZeroCopyError;
pub use maintenance::Maintenance;
pub(crate) use maintenance::update_text;
pub use term_file::TermFileError;

use attach::{LocalListener, RemoteListener};
use capture::Capture;
use control::Control;
use shard::{ShardHandle, start_shard};
use std::net::{IpAddr, Ipv4Addr, SocketAddr};
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;
use sumac_hal::ctrl::secure::{HandshakeError, Key};
use sumac_hal::ctrl::{Announce, DeviceCapabilities, FrameError, JobTicket, Name, Rejection};
use sumac_hal::hosted::HostedError;
use sumac_hal::ids::BootId;
use sumac_hal::port::Addr;
use sumac_hal::shard::MAX_SHARDS;
use sumac_hal::shm::{DeviceUserError, SocketError};
use sumac_hal::udp::UdpConfig;
use thiserror::Error;

/// Configuration of an emulated board.
#[derive(Debug, Clone)]
pub struct BoardConfig {
    /// The device's name in the fabric.
    pub name: String,
    /// The controller to register with.
    pub controller: SocketAddr,
    /// Further addresses, dialled in turn: of the same controller, those of a host name that has several, and of the
    /// other one of a pair.
    pub controller_alternatives: Vec<SocketAddr>,
    /// The device's key, if the controller uses keys.
    pub key: Option<Key>,
    /// The address that the data ports listen on.
    pub bind: IpAddr,
    /// The first shard's UDP port; the others use the following ports. `None`: any free ports.
    pub data_port: Option<u16>,
    /// The addresses that peers send to, one per shard, if they differ from those that the shards listen on because of
    /// address translation.
    pub advertise: Option<Vec<SocketAddr>>,
    /// The number of shards, each a thread with a port of its own.
    pub shards: u16,
    /// The maximum number of groups (and of trees).
    pub groups: u16,
    /// The maximum number of children of all groups.
    pub children: u32,
    /// The number of slots of each shard, for all groups.
    pub slots: u32,
    /// The memory of each shard for accumulators and staging of all slots, in bytes.
    pub slot_memory_bytes: usize,
    /// The configuration of the data ports. Their traffic class is also that of packets over RDMA and of all TCP
    /// connections.
    pub udp: UdpConfig,
    /// The RDMA port to use for data instead of UDP, as `DEVICE[:PORT[:GID-INDEX]]` or `auto`; `None`: UDP.
    pub verbs: Option<String>,
    /// The processor of each shard's thread; threads without one are not pinned.
    pub cores: Vec<usize>,
    /// The pause between two attempts to reach the controller.
    pub redial: Duration,
    /// Zero-copy contributions of ranks on this machine; `None`: unsupported. Only boards of one shard support them.
    pub zero_copy: Option<ZeroCopyConfig>,
    /// The RDMA port whose engine serves zero-copy contributions of ranks on other hosts, as
    /// `DEVICE[:PORT[:GID-INDEX]]` or `auto`; it replaces the emulated engine. `None`: unsupported. Requires
    /// `zero_copy`.
    pub rdma: Option<String>,
    /// The file to capture all packets to, in pcapng; it is created or replaced. It contains keys and data, so only its
    /// owner can read it. Zero-copy contributions of ranks on this machine are no packets.
    pub pcap: Option<PathBuf>,
    /// The file that keeps the highest term of a pair of controllers that the device has seen, so that it refuses an
    /// earlier one also after its own restart. `None`: a restarted device serves whichever controller claims it first.
    pub term_file: Option<PathBuf>,
    /// The job that the device serves, if a rank runs it for the ranks of that job on its host. Its key is then one of
    /// the job's tenant.
    pub ticket: Option<JobTicket>,
    /// What updates the system that the board runs on; `None`: the board does not update itself.
    pub maintenance: Option<Arc<dyn Maintenance>>,
}

impl BoardConfig {
    /// Return the configuration of a board on loopback with one shard and room for a few jobs.
    pub fn new(name: impl Into<String>, controller: SocketAddr) -> Self {
        Self {
            name: name.into(),
            controller,
            controller_alternatives: Vec::new(),
            key: None,
            bind: IpAddr::V4(Ipv4Addr::LOCALHOST),
            data_port: None,
            advertise: None,
            shards: 1,
            groups: 64,
            children: 4096,
            slots: 8192,
            slot_memory_bytes: 256 << 20,
            // All children may send a window at once; the kernel limits this to what it allows.
            udp: UdpConfig { receive_buffer_bytes: 32 << 20, ..UdpConfig::default() },
            verbs: None,
            cores: Vec::new(),
            redial: Duration::from_millis(500),
            zero_copy: Some(ZeroCopyConfig::default()),
            rdma: None,
            pcap: None,
            term_file: None,
            ticket: None,
            maintenance: None,
        }
    }
}

/// Why a board could not be started.
#[derive(Debug, Error)]
#[non_exhaustive]
pub enum BoardError {
    /// The name is too long.
    #[error("device name {0:?} has {len} bytes; the limit is 64", len = .0.len())]
    Name(String),
    /// The number of shards is out of range.
    #[error("{0} shards; a device has 1 to {MAX_SHARDS}")]
    Shards(u16),
    /// The shards' ports are out of range.
    #[error(
        "{shards} shards from data port {first} on exceed the range of ports, 1 to 65535: choose another first port or fewer shards"
    )]
    DataPorts {
        /// The first shard's port.
        first: u16,
        /// The number of shards.
        shards: u16,
    },
    /// The number of advertised addresses differs from the number of shards.
    #[error("{given} advertised address(es) for {shards} shard(s); give one for each shard, in their order")]
    AdvertiseCount {
        /// The number of addresses.
        given: usize,
        /// The number of shards.
        shards: u16,
    },
    /// Peers cannot send to an advertised address.
    #[error("cannot advertise {0}: peers need a specific IP address and a port other than 0")]
    AdvertiseAddr(SocketAddr),
    /// A data port could not be opened.
    #[error("data port: {0}")]
    Port(#[from] HostedError),
    /// Zero-copy contributions could not be set up.
    #[error("zero-copy: {0}; start the device with --no-shm to do without")]
    ZeroCopy(#[from] ZeroCopyError),
    /// The setting of the device user is invalid.
    #[error(transparent)]
    Users(#[from] DeviceUserError),
    /// The socket that ranks attach to could not be opened.
    #[error("attach socket: {0}; start the device with --no-shm to do without zero-copy")]
    Attach(SocketError),
    /// The capture's file could not be created.
    #[error("capture {}: {source}", path.display())]
    Capture {
        /// The file.
        path: PathBuf,
        /// The system's error.
        source: std::io::Error,
    },
    /// The file of the highest term could not be used.
    #[error(transparent)]
    Term(#[from] TermFileError),
    /// A system call failed.
    #[error("{what}: {source}")]
    System {
        /// The operation.
        what: &'static str,
        /// The system's error.
        source: std::io::Error,
    },
}

/// Why a board is not registered with its controller.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Error)]
#[non_exhaustive]
pub enum RegistrationError {
    /// No controller has answered in time.
    #[error("no controller has answered")]
    Unreached,
    /// The controller refuses the device's key, or does not prove that it has it. Whoever has the controller's address
    /// can cause this, so the device tries on.
    #[error("{0}")]
    Key(HandshakeError),
    /// The controller is of another release. It may be replaced, so the device tries on.
    #[error("{0}")]
    Version(FrameError),
    /// The controller did not register the device. Final rejections ([`Rejection::is_final`]) end the wait at once.
    #[error(transparent)]
    Rejected(#[from] Rejection),
}

/// How often a board that serves checks that its shards do.
const END_INTERVAL: Duration = Duration::from_millis(200);

/// A running board. Dropping it stops its threads, except in a forked child, which has none of them.
#[derive(Debug)]
pub struct Board {
    announce: Announce,
    /// `Some` until it is dropped.
    control: Option<Control>,
    // Dropped before the shards, because their threads send to a shard's.
    local: Option<LocalListener>,
    remote: Option<RemoteListener>,
    shards: Vec<ShardHandle>,
    pid: u32,
}

impl Board {
    /// Open the data ports, start the shards, and begin to dial the controller.
    ///
    /// # Errors
    /// [`BoardError`]; nothing keeps running then.
    pub fn start(config: BoardConfig) -> Result<Self, BoardError> {
        let name = Name::try_from(config.name.as_str()).map_err(|_| BoardError::Name(config.name.clone()))?;
        if config.shards == 0 || usize::from(config.shards) > MAX_SHARDS {
            return Err(BoardError::Shards(config.shards));
        }
        check_data_addrs(&config)?;
        let boot_id = random_boot_id()?;
        let capture = config.pcap.as_deref().map(Capture::create).transpose()?;
        let shards = (0..config.shards)
            .map(|index| start_shard(&config, index, boot_id, capture.as_ref()))
            .collect::<Result<Vec<_>, BoardError>>()?;
        let capabilities =
            shards.iter().map(|shard| shard.capabilities).reduce(common_capabilities).ok_or(BoardError::Shards(0))?;
        let data_addrs = match &config.advertise {
            Some(addrs) => addrs.iter().copied().map(Addr::Udp).collect(),
            None => shards.iter().map(|shard| shard.addr).collect(),
        };
        let (local, remote) = start_listeners(&config, boot_id, &shards)?;
        let mut attach = local.as_ref().map(LocalListener::attach_point);
        attach.iter_mut().for_each(|point| point.remote = remote.as_ref().map(RemoteListener::addr));
        let slots = config.maintenance.as_ref().map(|maintenance| maintenance.slots());
        let announce = Announce { name, boot_id, capabilities, data_addrs, attach, slots };
        let links = shards.iter().map(ShardHandle::link).collect();
        let control = Control::start(&config, announce.clone(), links)?;
        Ok(Self { announce, control: Some(control), local, remote, shards, pid: std::process::id() })
    }

    /// Return the announcement that the board sends to its controller.
    pub const fn announce(&self) -> &Announce {
        &self.announce
    }

    /// Return the addresses that peers send to, one per shard.
    pub fn data_addrs(&self) -> impl Iterator<Item = Addr> {
        self.announce.data_addrs.iter().copied()
    }

    /// Return the number of chains that failed in the DMA engine, not counting aborted ones. The node retries them, so
    /// ranks need not notice. Submissions of ranks of this version cause none, not even in strict mode.
    pub fn failed_chains(&self) -> u64 {
        self.shards.iter().map(ShardHandle::failed_chains).sum()
    }

    /// Wait until the board is registered with the controller, for at most `timeout`. The board keeps dialling if this
    /// fails.
    ///
    /// # Errors
    /// [`RegistrationError`]; at once if the controller rejects the device for good.
    pub fn wait_registration(&self, timeout: Duration) -> Result<(), RegistrationError> {
        self.control.as_ref().map_or(Err(RegistrationError::Unreached), |control| control.wait_registration(timeout))
    }

    /// Wait until the board is registered with the controller, for at most `timeout`; false on timeout.
    pub fn wait_registered(&self, timeout: Duration) -> bool {
        self.control.as_ref().is_some_and(|control| control.wait_registered(timeout))
    }

    /// Return whether a shard has ended: its RDMA device has failed, or it panicked. Start another board then.
    pub fn has_ended(&self) -> bool {
        self.shards.iter().any(ShardHandle::has_ended)
    }

    /// Serve until the process ends, or a shard does; see [`Board::has_ended`].
    pub fn serve(mut self) {
        while !self.has_ended() {
            std::thread::park_timeout(END_INTERVAL);
        }
        self.shards.iter_mut().filter(|shard| shard.has_ended()).for_each(ShardHandle::join);
    }
}

impl Drop for Board {
    fn drop(&mut self) {
        if self.pid != std::process::id() {
            std::mem::forget((self.control.take(), self.local.take(), self.remote.take()));
            std::mem::forget(std::mem::take(&mut self.shards));
        }
    }
}

/// Check ports and advertised addresses against the number of shards, which is in range.
fn check_data_addrs(config: &BoardConfig) -> Result<(), BoardError> {
    let shards = config.shards;
    if let Some(first) = config.data_port
        && (first == 0 || first.checked_add(shards - 1).is_none())
    {
        return Err(BoardError::DataPorts { first, shards });
    }
    let Some(addrs) = &config.advertise else { return Ok(()) };
    if addrs.len() != usize::from(shards) {
        return Err(BoardError::AdvertiseCount { given: addrs.len(), shards });
    }
    match addrs.iter().find(|addr| addr.port() == 0 || addr.ip().is_unspecified()) {
        Some(addr) => Err(BoardError::AdvertiseAddr(*addr)),
        None => Ok(()),
    }
}

/// Start the listeners that let ranks attach to the shard that serves them.
fn start_listeners(
    config: &BoardConfig,
    boot_id: BootId,
    shards: &[ShardHandle],
) -> Result<(Option<LocalListener>, Option<RemoteListener>), BoardError> {
    let Some(zero_copy) = &config.zero_copy else { return Ok((None, None)) };
    let Some((arrivals, waker)) = shards.iter().find_map(|shard| Some((shard.arrivals.clone()?, shard.waker()))) else {
        return Ok((None, None));
    };
    let local = LocalListener::start(zero_copy, boot_id, arrivals.clone(), waker.clone())?;
    let class = config.udp.traffic_class;
    let remote =
        config.rdma.as_ref().map(|_| RemoteListener::start((config.bind, class), arrivals, waker)).transpose()?;
    Ok((local, remote))
}

/// Return the capabilities that both shards have.
fn common_capabilities(a: DeviceCapabilities, b: DeviceCapabilities) -> DeviceCapabilities {
    DeviceCapabilities {
        max_packet_len_bytes: a.max_packet_len_bytes.min(b.max_packet_len_bytes),
        receive_buffer_bytes: a.receive_buffer_bytes.min(b.receive_buffer_bytes),
        ..a
    }
}

fn random_boot_id() -> Result<BootId, BoardError> {
    let mut bytes = [0; 8];
    let system = |source: rustix::io::Errno| BoardError::System { what: "random boot id", source: source.into() };
    rustix::rand::getrandom(&mut bytes, rustix::rand::GetRandomFlags::empty()).map_err(system)?;
    Ok(BootId(u64::from_le_bytes(bytes)))
}

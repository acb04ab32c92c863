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
//! lock. The control thread hands each request to every shard and merges what they say. A board that loses its
//! controller goes on serving its groups, whose leases the ranks' packets renew, and dials again.

mod bus;
mod control;
mod engine;
mod function;
mod functions;
mod redo;
mod shard;
#[cfg(test)]
mod tests;

pub use bus::BusConfig;
pub use functions::BusError;

use bus::{Bus, Calls};
use control::Control;
use shard::{ShardHandle, start_shard};
use std::net::{IpAddr, Ipv4Addr, SocketAddr};
use std::time::Duration;
use sumac_hal::ctrl::{Announce, DeviceCapabilities, Name};
use sumac_hal::hosted::HostedError;
use sumac_hal::ids::BootId;
use sumac_hal::port::Addr;
use sumac_hal::shard::MAX_SHARDS;
use sumac_hal::shm::{DeviceUserError, SocketError};
use sumac_hal::udp::UdpConfig;
use thiserror::Error;

/// How to set up an emulated board.
#[derive(Debug, Clone)]
pub struct BoardConfig {
    /// The device's name in the fabric.
    pub name: String,
    /// The controller to serve.
    pub controller: SocketAddr,
    /// Where the data ports listen.
    pub bind: IpAddr,
    /// The first shard's UDP port; the following shards take the next ones. `None`: any that is free.
    pub data_port: Option<u16>,
    /// Where peers send each shard's packets to, one address a shard, if that is not where the shard listens: for a
    /// device behind address translation.
    pub advertise: Option<Vec<SocketAddr>>,
    /// Worker threads, each with a port of its own.
    pub shards: u16,
    /// Groups (and trees) that it can hold.
    pub groups: u16,
    /// Children of all groups.
    pub children: u32,
    /// Slots of all groups, in each shard.
    pub slots: u32,
    /// Accumulators and staging of all slots, in each shard, in bytes.
    pub slot_memory_bytes: usize,
    /// The data ports.
    pub udp: UdpConfig,
    /// The RDMA port that the data ports are on instead, as `DEVICE[:PORT[:GID-INDEX]]` or `auto`; `None`: UDP.
    pub verbs: Option<String>,
    /// The processor of each shard's thread; those without one run anywhere.
    pub cores: Vec<usize>,
    /// How long to wait between two attempts to reach the controller.
    pub redial: Duration,
    /// How ranks of this machine contribute by reference; `None` if they can't. Only a board of one shard has a bus.
    pub bus: Option<BusConfig>,
    /// The RDMA port by whose engine ranks of other hosts contribute by reference as well, as `DEVICE[:PORT[:GID-INDEX]]` or
    /// `auto`; it takes the place of the emulated one. `None`: they can't. Goes with `bus`.
    pub rdma: Option<String>,
}

impl BoardConfig {
    /// Describe a board on loopback with one shard and room for a few jobs.
    pub fn new(name: impl Into<String>, controller: SocketAddr) -> Self {
        Self {
            name: name.into(),
            controller,
            bind: IpAddr::V4(Ipv4Addr::LOCALHOST),
            data_port: None,
            advertise: None,
            shards: 1,
            groups: 64,
            children: 4096,
            slots: 8192,
            slot_memory_bytes: 256 << 20,
            // All children may send a window at once; the kernel cuts this to what it allows.
            udp: UdpConfig { receive_buffer_bytes: 32 << 20, ..UdpConfig::default() },
            verbs: None,
            cores: Vec::new(),
            redial: Duration::from_millis(500),
            bus: Some(BusConfig::default()),
            rdma: None,
        }
    }
}

/// Why a board can't start.
#[derive(Debug, Error)]
#[non_exhaustive]
pub enum BoardError {
    /// The name does not fit.
    #[error("device name {0:?} has {len} bytes; the limit is 64", len = .0.len())]
    Name(String),
    /// No shard, or too many.
    #[error("{0} shards; a device has 1 to {MAX_SHARDS}")]
    Shards(u16),
    /// The shards' ports do not all exist.
    #[error(
        "{shards} shards from data port {first} on: ports are 1 to 65535; choose another first port or fewer shards"
    )]
    DataPorts {
        /// The first shard's port.
        first: u16,
        /// How many shards there are.
        shards: u16,
    },
    /// Not one address for each shard.
    #[error("{given} advertised address(es) for {shards} shard(s); give one for each shard, in their order")]
    AdvertiseCount {
        /// How many addresses.
        given: usize,
        /// How many shards.
        shards: u16,
    },
    /// Nobody can send to an advertised address.
    #[error("can't advertise {0}: peers need one IP address and a port other than 0")]
    AdvertiseAddr(SocketAddr),
    /// A data port could not be opened.
    #[error("data port: {0}")]
    Port(#[from] HostedError),
    /// There is nothing to contribute by reference with.
    #[error("contributions by reference: {0}; start the device without its bus to do without them")]
    References(#[from] BusError),
    /// Whose devices ranks let in is not told in order.
    #[error(transparent)]
    Users(#[from] DeviceUserError),
    /// Nobody can attach.
    #[error("bus: {0}; start the device without it to do without contributions by reference")]
    Bus(SocketError),
    /// The system would not start a thread or give randomness.
    #[error("{what}: {source}")]
    System {
        /// What was tried.
        what: &'static str,
        /// What the system said.
        source: std::io::Error,
    },
}

/// A running board. Dropping it stops its threads; in a process that was forked since, which has none of them, it does
/// nothing.
#[derive(Debug)]
pub struct Board {
    announce: Announce,
    /// There until it is dropped.
    control: Option<Control>,
    // Their threads hand over to a shard's.
    bus: Option<Bus>,
    calls: Option<Calls>,
    shards: Vec<ShardHandle>,
    pid: u32,
}

impl Board {
    /// Open the data ports, start the shards, and begin to dial the controller.
    ///
    /// # Errors
    /// [`BoardError`]; nothing is left running.
    pub fn start(config: BoardConfig) -> Result<Self, BoardError> {
        let name = Name::try_from(config.name.as_str()).map_err(|_| BoardError::Name(config.name.clone()))?;
        if config.shards == 0 || usize::from(config.shards) > MAX_SHARDS {
            return Err(BoardError::Shards(config.shards));
        }
        check_data_addrs(&config)?;
        let boot_id = random_boot_id()?;
        let shards = (0..config.shards)
            .map(|index| start_shard(&config, index, boot_id))
            .collect::<Result<Vec<_>, BoardError>>()?;
        let capabilities =
            shards.iter().map(|shard| shard.capabilities).reduce(narrowest).ok_or(BoardError::Shards(0))?;
        let data_addrs = match &config.advertise {
            Some(addrs) => addrs.iter().copied().map(Addr::Udp).collect(),
            None => shards.iter().map(|shard| shard.addr).collect(),
        };
        let (bus, calls) = start_bus(&config, boot_id, &shards)?;
        let mut announced = bus.as_ref().map(Bus::announced);
        announced.iter_mut().for_each(|bus| bus.remote = calls.as_ref().map(Calls::addr));
        let announce = Announce { name, boot_id, capabilities, data_addrs, bus: announced };
        let links = shards.iter().map(ShardHandle::link).collect();
        let control = Control::start(&config, announce.clone(), links)?;
        Ok(Self { announce, control: Some(control), bus, calls, shards, pid: std::process::id() })
    }

    /// Return what the board tells its controller of itself.
    pub const fn announce(&self) -> &Announce {
        &self.announce
    }

    /// Return where peers send each shard's packets to.
    pub fn data_addrs(&self) -> impl Iterator<Item = Addr> {
        self.announce.data_addrs.iter().copied()
    }

    /// Return how many chains the DMA engine did not carry out, but for those that were aborted: the node tries them
    /// again, so ranks need not notice. What ranks of this version submit fails none, in strict mode neither.
    pub fn failed_chains(&self) -> u64 {
        self.shards.iter().map(ShardHandle::failed_chains).sum()
    }

    /// Wait until the controller has been reached, at most `timeout`; false if it was not.
    pub fn wait_registered(&self, timeout: Duration) -> bool {
        self.control.as_ref().is_some_and(|control| control.wait_registered(timeout))
    }

    /// Serve until the process ends or a shard's thread does, which is a bug.
    pub fn serve(mut self) {
        for shard in &mut self.shards {
            shard.join();
        }
    }
}

impl Drop for Board {
    fn drop(&mut self) {
        if self.pid != std::process::id() {
            std::mem::forget((self.control.take(), self.bus.take(), self.calls.take()));
            std::mem::forget(std::mem::take(&mut self.shards));
        }
    }
}

/// Check ports and advertised addresses against the number of shards, which is in its limits.
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

/// Let ranks attach to the shard that serves them.
fn start_bus(
    config: &BoardConfig,
    boot_id: BootId,
    shards: &[ShardHandle],
) -> Result<(Option<Bus>, Option<Calls>), BoardError> {
    let Some(bus) = &config.bus else { return Ok((None, None)) };
    let Some((arrivals, waker)) = shards.iter().find_map(|shard| Some((shard.arrivals.clone()?, shard.waker()))) else {
        return Ok((None, None));
    };
    let bus = Bus::start(bus, boot_id, arrivals.clone(), waker.clone())?;
    let calls = config.rdma.as_ref().map(|_| Calls::start(config.bind, arrivals, waker)).transpose()?;
    Ok((bus, calls))
}

/// What all shards can do.
fn narrowest(a: DeviceCapabilities, b: DeviceCapabilities) -> DeviceCapabilities {
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

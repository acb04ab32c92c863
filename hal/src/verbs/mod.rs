#![doc = include_str!("README.md")]
//! # The port
//!
//! Packets are datagrams of an unreliable-datagram (UD) queue pair.
//!
//! An address ([`VerbsAddr`]) is the GID of a port and the number of a queue pair. There are no connections: every
//! host that has an address can send to it, as with UDP, and the readers of a packet validate it. The hardware moves
//! packets of up to the link's MTU (at most 4096 bytes) to and from memory that was registered when the port was
//! opened. The kernel is involved only to sleep, and to resolve a host that was not sent to before.
//!
//! Invariants:
//! - sending and receiving take no lock and allocate nothing: [`VerbsPort::open`] creates all buffers, requests and
//!   address handles. The exception is the first packet to a host, for which the library resolves the host's link
//!   address, which may block for up to about a second. A host that could not be resolved is not tried again within a
//!   second;
//! - a flush posts once and requests one completion, however many packets are sent;
//! - a queue pair that fails (link down) is restarted under its old number; packets in flight are lost, as on a
//!   network;
//! - when the table of addresses changes, the port goes on with its own address at its new index, and resolves its
//!   peers again; while the address is missing, packets are dropped and counted;
//! - a device that fails, is reset or loses its driver, or that completes nothing for a second twice, is reported
//!   ([`VerbsPort::has_failed`]): its queue pairs do not come back, and neither does their address. Open another port;
//! - memory owned by the device is not touched; the modules `tx` and `rx` define who owns a slot or buffer.
//!
//! # One-sided connections
//!
//! A [`VerbsDomain`] holds regions that peers access with RDMA READ and WRITE ([`ExposedRegion`]) and the connections
//! over which they do ([`OneSided`]), with bounds, generations and a fence. A [`PeerEngine`] builds a copy-only
//! [`Engine`](crate::dma::Engine) on them, which pulls from peers and writes back: zero-copy contributions of ranks on
//! other hosts ([`remote`](crate::remote)).
//!
//! # DMA copies
//!
//! A BlueField-2 or later copies between registered memory with a DMA engine of its own ([`MemcpyEngine`], a copy-only
//! [`Engine`](crate::dma::Engine)); for other devices, [`MemcpyError`] reports why not. Memory of other functions of
//! the device, such as the host's, is attached by alias keys ([`ExportedMemory`], [`MemcpyEngine::map_alias`]), where
//! the device has them ([`alias_support`]). Neither has run on a card yet.
//!
//! # Tested on
//!
//! Soft-RoCE (`rdma_rxe`) implements all of this in the kernel, through system calls: it shows that the port is
//! correct, and nothing about its speed. The classic calls (`ibv_post_send`, `ibv_poll_cq`) are used, because rxe's
//! newer ones have bugs in distributions that are in use.
//!
//! What mlx5 cards do and Soft-RoCE does not is tested on a fake of the library (`fake`), written from rdma-core and
//! the kernel: discarded completions, keys that are used again, writes that reach memory after their acknowledgement,
//! devices that fail, and addresses that move. It is a model, and no card has confirmed it.

mod address_cache;
mod alias;
mod config;
mod copying;
mod datagrams;
mod discover;
mod events;
#[cfg(test)]
mod fake;
mod grh;
mod locked;
mod memcpy;
mod memory;
mod mlx5;
mod objects;
mod one_sided;
mod pair;
mod peers;
mod quarantine;
mod rank;
mod region;
mod representor;
mod rx;
mod shared_receives;
mod slots;
#[cfg(test)]
mod tests;
mod tx;
mod wait;

#[cfg(test)]
use fake as ibv;
#[cfg(not(test))]
use ibverbs_sys as ibv;

pub use crate::remote::{LinkError, RegionError, RemoteRegion};
pub use alias::{AccessKey, AliasError, AliasSupport, ExportedMemory, MemoryGrant, ParseGrantError, alias_support};
pub use config::{ParseLinkError, VerbsConfig, VerbsError, VerbsLink, VerbsStats};
pub use copying::MapMemoryError;
pub use discover::{VerbsDevice, devices, link_at};
pub use locked::{device_locked_bytes, port_locked_bytes, rank_locked_bytes};
pub use memcpy::{MemcpyEngine, max_memcpy_len_bytes};
pub use mlx5::MemcpyError;
pub use one_sided::{LinkStats, OneSided, OneSidedEnd, PostError, Progress};
pub use peers::PeerEngine;
pub use rank::{RankEnd, rank_link};
pub use region::{ExposedRegion, VerbsDomain};
pub use shared_receives::{ReceiveStats, SharedReceives};

use crate::port::{Addr, Capabilities, Ecn, Port, RxToken, TxToken, VerbsAddr, WaitPort, Wake};
use crate::time::Instant;
use crate::udp::Waker;
use address_cache::AddressCache;
use datagrams::Datagrams;
use discover::PortLocation;
use objects::{Channel, Completions, Context, Domain};
use rx::{Failed, RxQueue};
use std::os::fd::OwnedFd;
use std::sync::Arc;
use std::time::{Duration, Instant as Clock};
use tx::{PACKETS, TxQueue};

/// The bytes that a buffer counts for in the capabilities, whatever packet is in it: the shortest maximum packet length
/// of the conformance suite.
const GUARANTEED_LEN_BYTES: usize = 1024;

/// The minimum time between two restarts of a queue pair.
const RESTART_PAUSE: Duration = Duration::from_millis(10);

/// How often a stopped queue pair is polled for outstanding completions.
const DRAIN_POLLS: u32 = 10_000;

/// How often a port that is used reads its device's events.
const EVENT_INTERVAL: Duration = Duration::from_millis(10);

/// How long packets may be on their way to the wire before the queue pair is restarted, and the second time the device
/// considered failed: a datagram waits for nobody else.
const STALL_LIMIT: Duration = Duration::from_secs(1);

/// A port over a queue pair.
pub struct VerbsPort {
    // First, so that the device releases the memory of the other fields before they are dropped.
    pair: Datagrams,
    rx: RxQueue,
    tx: TxQueue,
    addresses: AddressCache,
    channel: Arc<Channel>,
    addr: VerbsAddr,
    device: String,
    capabilities: Capabilities,
    spin: Duration,
    waker: Waker,
    /// Another descriptor that ends a wait.
    watched: Option<OwnedFd>,
    restarted: Option<Clock>,
    context: Arc<Context>,
    /// Changes of the device's addresses that were processed.
    changes: u32,
    /// When to read events again.
    events_due: Instant,
    /// Packets completed, since when, and how often the queue pair was restarted because no more were.
    stalled: (u64, Instant, u32),
    /// The failure of the device has ended a wait.
    has_reported: bool,
    stats: VerbsStats,
}

impl VerbsPort {
    /// Return the address that peers send to.
    pub const fn local_addr(&self) -> Addr {
        Addr::Verbs(self.addr)
    }

    /// Open a port.
    ///
    /// # Errors
    /// See [`VerbsError`].
    pub fn open(config: &VerbsConfig) -> Result<Self, VerbsError> {
        let location = discover::find(config)?;
        let from = location.source(config)?;
        let PortLocation { context, attr, gid } = location;
        let limits = context.device_attr()?;
        let most = usize::try_from(limits.max_qp_wr.min(limits.max_cqe)).unwrap_or(usize::MAX);
        let buffers =
            (config.receive_buffer_bytes / GUARANTEED_LEN_BYTES).clamp(2 * rx::BATCH, most.max(2 * rx::BATCH));
        let domain = Domain::new(&context, config.link.is_relaxed)?;
        let channel = Channel::new(&context)?;
        let sent = Completions::new(&context, PACKETS, None)?;
        let arrived = Completions::with_vector(&context, buffers, Some(&channel), config.vector)?;
        let pair = Datagrams::new(&domain, &from, (&sent, PACKETS), (&arrived, buffers))?;
        let name = context.name.clone();
        let refused = |what| {
            let device = name.clone();
            move |source| VerbsError::Refused { what, device, source }
        };
        let waker = Waker::new().map_err(refused("open an event file"))?;
        let mut port = Self {
            rx: RxQueue::new(&domain, &arrived, (buffers, attr.mtu_bytes), attr.is_ethernet)?,
            tx: TxQueue::new(&domain, &sent, attr.mtu_bytes, pair.max_inline_len_bytes)?,
            addresses: AddressCache::new(&domain, from),
            channel,
            addr: VerbsAddr { gid: gid.gid, lid: if attr.is_ethernet { 0 } else { attr.lid }, qpn: pair.pair.number() },
            device: format!("{}:{}:{}", context.name, gid.port, gid.index),
            capabilities: Capabilities::new(attr.mtu_bytes, buffers * GUARANTEED_LEN_BYTES, rx::BATCH),
            spin: config.spin,
            waker,
            watched: None,
            restarted: None,
            changes: context.events.changes(),
            context,
            events_due: Instant::ZERO,
            stalled: (0, Instant::ZERO, 0),
            has_reported: false,
            stats: VerbsStats::default(),
            pair,
        };
        port.start().map_err(|error| error.unwrap_or_else(|| VerbsError::last("post buffers", &name)))?;
        Ok(port)
    }

    /// Return the port's counters.
    pub const fn stats(&self) -> VerbsStats {
        self.stats
    }

    /// Return whether the device has failed: the port neither sends nor receives any more.
    pub fn has_failed(&self) -> bool {
        self.context.events.has_failed()
    }

    /// Return the RDMA port and GID index in use, in the format of a [`VerbsLink`].
    pub fn link(&self) -> &str {
        &self.device
    }

    /// Return a handle that wakes this port's waiting thread from any other.
    pub fn waker(&self) -> Waker {
        self.waker.clone()
    }

    /// Let waits also end with [`Wake::Woken`] whenever `file` is readable (level-triggered).
    pub fn watch(&mut self, file: OwnedFd) {
        self.watched = Some(file);
    }

    /// Bring the queue pair up with all buffers posted. `Err(None)`: posting buffers failed.
    fn start(&mut self) -> Result<(), Option<VerbsError>> {
        self.pair.start()?;
        self.rx.start(&mut self.pair, &mut self.stats).map_err(|Failed| None)
    }

    /// Restart the queue pair, unless it was restarted within [`RESTART_PAUSE`].
    fn restart(&mut self) {
        if self.restarted.is_some_and(|at| at.elapsed() < RESTART_PAUSE) {
            self.tx.discard(&mut self.stats);
        } else {
            self.restart_now();
        }
    }

    fn restart_now(&mut self) {
        // One that cannot be stopped is reset anyway, and then has nothing outstanding.
        let _ = self.pair.pair.stop();
        for _ in 0..DRAIN_POLLS {
            self.tx.take(&mut self.stats);
            if self.rx.drain() && !self.tx.is_in_flight() {
                break;
            }
            std::thread::yield_now();
        }
        // If this fails, the next packet triggers another restart.
        let _ = self.start();
        self.tx.restart(&mut self.stats);
        self.addresses.clear();
        self.stats.restarts += 1;
        self.restarted = Some(Clock::now());
    }

    /// Read the device's events, and check that it completes what was posted, if that is due.
    fn check_device(&mut self, now: Instant) {
        if now < self.events_due {
            return;
        }
        self.events_due = now + EVENT_INTERVAL;
        self.poll_events();
        self.tx.take(&mut self.stats);
        let (completed, since, restarts) = self.stalled;
        match self.tx.completed() {
            done if done != completed => self.stalled = (done, now, 0),
            _ if !self.tx.is_in_flight() => self.stalled.1 = now,
            _ if now.saturating_since(since) < STALL_LIMIT => {}
            _ if restarts > 0 => self.context.events.fail(),
            _ => {
                self.restart_now();
                self.stalled = (self.tx.completed(), now, restarts + 1);
            }
        }
    }

    /// Read the device's events; if addresses have changed, find the own one again.
    fn poll_events(&mut self) {
        self.context.poll_events();
        let changes = self.context.events.changes();
        if changes == self.changes || self.has_failed() {
            return;
        }
        self.changes = changes;
        let Ok(gids) = self.context.gids() else { return };
        let (gid, port) = (self.addr.gid, self.pair.port());
        let own = gids.iter().filter(|entry| entry.gid == gid && entry.port == port);
        let own = own.min_by_key(|entry| (!entry.is_v2, entry.index)).copied();
        self.addresses.set_source(own);
        if let Some(own) = own {
            self.device = format!("{}:{}:{}", self.context.name, own.port, own.index);
        }
        // Drops the paths, which nothing in flight may use. Peers may have moved as well.
        self.restart_now();
    }

    /// Fetch packets if the batch is used up; return whether there are any.
    fn fill(&mut self) -> bool {
        match self.rx.fill(&mut self.pair, &mut self.stats) {
            Ok(has_packets) => has_packets,
            Err(Failed) => {
                self.restart();
                false
            }
        }
    }
}

impl std::fmt::Debug for VerbsPort {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("VerbsPort")
            .field("addr", &self.addr)
            .field("device", &self.device)
            .field("capabilities", &self.capabilities)
            .field("stats", &self.stats)
            .finish_non_exhaustive()
    }
}

/// A packet in a registered buffer.
#[derive(Debug)]
pub struct VerbsRx<'a> {
    from: VerbsAddr,
    bytes: &'a [u8],
    is_marked: bool,
}

impl RxToken for VerbsRx<'_> {
    fn ecn(&self) -> Ecn {
        Ecn::from_mark(self.is_marked)
    }

    fn consume<R>(self, f: impl FnOnce(Addr, &[u8]) -> R) -> R {
        f(Addr::Verbs(self.from), self.bytes)
    }
}

/// A slot of the transmit queue, in registered memory.
pub struct VerbsTx<'a> {
    port: &'a mut VerbsPort,
}

impl std::fmt::Debug for VerbsTx<'_> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("VerbsTx").field("port", &self.port).finish_non_exhaustive()
    }
}

impl TxToken for VerbsTx<'_> {
    fn consume<R>(self, to: Addr, f: impl FnOnce(&mut [u8]) -> (usize, R)) -> R {
        let VerbsPort { tx, addresses, stats, .. } = self.port;
        // `transmit` checked that there is room, and has borrowed the queue since.
        let buffer = tx.reserve().unwrap_or_default();
        let room = buffer.len();
        let (len_bytes, result) = f(buffer);
        assert!(len_bytes <= room, "a packet of {len_bytes} bytes was claimed in a buffer of {room}");
        let to = match to {
            // Queue pair numbers have 24 bits; 0 and 1 are reserved for management.
            Addr::Verbs(to) if (2..1 << 24).contains(&to.qpn) => Some(to),
            _ => None,
        };
        // A packet to an invalid address is dropped and counted.
        if len_bytes > 0 && !to.is_some_and(|to| tx.commit(&to, len_bytes, addresses)) {
            stats.send_dropped_packets += 1;
        }
        result
    }
}

impl Port for VerbsPort {
    type Rx<'a> = VerbsRx<'a>;
    type Tx<'a> = VerbsTx<'a>;

    fn capabilities(&self) -> Capabilities {
        self.capabilities
    }

    fn receive(&mut self, now: Instant) -> Option<VerbsRx<'_>> {
        let next = loop {
            if !self.fill() {
                self.check_device(now);
                return None;
            }
            if let Some(next) = self.rx.advance(&mut self.stats) {
                break next;
            }
        };
        Some(VerbsRx { from: next.from, is_marked: next.is_marked, bytes: self.rx.bytes(&next) })
    }

    fn transmit(&mut self, _now: Instant) -> Option<VerbsTx<'_>> {
        (self.tx.room() > 0).then_some(VerbsTx { port: self })
    }

    fn room(&mut self, _now: Instant) -> usize {
        self.tx.room()
    }

    fn flush(&mut self, now: Instant) {
        if !self.tx.flush(&mut self.pair, &mut self.stats) {
            self.restart();
        }
        self.check_device(now);
    }
}

impl WaitPort for VerbsPort {
    fn wait(&mut self, timeout: Option<Duration>) -> Wake {
        crate::udp::wait::wait_on(self, timeout)
    }
}

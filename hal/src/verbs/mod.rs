#![doc = include_str!("README.md")]
//! # The port
//!
//! Packets are datagrams of a queue pair.
//!
//! An address is a queue pair's ([`VerbsAddr`]): its port's identifier and its number. Nothing is connected, so anybody
//! who knows it can send there, as to a UDP socket, and what arrives is checked by those who read it. The hardware moves
//! packets up to the link's MTU (at most 4096 bytes) between memory that was registered when the port was opened; the
//! kernel has no part in it but for sleeping, and for finding the way to a host that was not sent to before.
//!
//! Invariants:
//! - sending and receiving take no lock and allocate nothing; all buffers, requests and ways have their room from
//!   [`VerbsPort::open`] on. The first packet to a host is the exception: the library finds the way there, and the kernel
//!   may wait for that host's link address for up to about a second. A host that is not found is not looked for again
//!   within a second;
//! - a flush posts once and asks for one completion, however many packets leave;
//! - a queue pair that fails (a link that is down, a device that is reset) is restarted under its old number: what was on
//!   its way is lost, as on a wire;
//! - nothing that is the device's is touched: who owns a place or buffer stands at the head of `tx` and `rx`.
//!
//! # One-sided connections
//!
//! A [`VerbsDomain`] has regions that peers read and write by themselves ([`ExposedRegion`]) and connections by which they do
//! ([`OneSided`]): what contributions by reference need on another host, with bounds, generations, and a fence. A [`PeerEngine`] makes a
//! copy-only [`Engine`](crate::dma::Engine) of them, which pulls from peers and writes back. No rank or device uses them yet: by
//! reference still takes one machine.
//!
//! # DMA copies
//!
//! A BlueField-2 or later copies between registered memory by an engine of its own ([`MemcpyEngine`], a copy-only
//! [`Engine`](crate::dma::Engine)); other devices say why they do not ([`MemcpyError`]). It was not run on a card yet.
//!
//! # What it was tried on
//!
//! Soft-RoCE (`rdma_rxe`) does all of this in the kernel, by system calls: it shows that the port is right, and nothing of
//! its speed. The classic calls (`ibv_post_send`, `ibv_poll_cq`) are used, because rxe's newer ones have bugs in
//! distributions that are in use.

mod config;
mod copying;
mod datagrams;
mod discover;
mod grh;
mod memcpy;
mod memory;
mod mlx5;
mod objects;
mod one_sided;
mod pair;
mod paths;
mod peers;
mod rank;
mod region;
mod rx;
mod shared_receives;
mod slots;
mod tx;
mod wait;

pub use crate::remote::{LinkError, RegionError, RemoteRegion};
pub use config::{NoLink, VerbsConfig, VerbsError, VerbsLink, VerbsStats};
pub use copying::MapMemoryError;
pub use discover::{VerbsDevice, devices, link_at};
pub use memcpy::{MemcpyEngine, max_memcpy_len_bytes};
pub use mlx5::MemcpyError;
pub use one_sided::{LinkStats, OneSided, OneSidedEnd, PostError, Progress};
pub use peers::PeerEngine;
pub use rank::{RankEnd, rank_link};
pub use region::{ExposedRegion, VerbsDomain};
pub use shared_receives::{ReceiveStats, SharedReceives};

use crate::port::{Addr, Capabilities, Port, RxToken, TxToken, VerbsAddr, WaitPort, Wake};
use crate::time::Instant;
use crate::udp::Waker;
use datagrams::Datagrams;
use discover::Place;
use objects::{Channel, Completions, Domain};
use paths::Paths;
use rx::{Failed, RxQueue};
use std::os::fd::OwnedFd;
use std::sync::Arc;
use std::time::{Duration, Instant as Clock};
use tx::{PACKETS, TxQueue};

/// What a buffer counts for, whatever packet is in it: the suite's shortest.
const PROMISED_LEN_BYTES: usize = 1024;

/// How long a queue pair that was restarted is left alone.
const RESTART_PAUSE: Duration = Duration::from_millis(10);

/// How often a stopped queue pair is asked for what it has left.
const DRAIN_LOOKS: u32 = 10_000;

/// A port over a queue pair.
pub struct VerbsPort {
    // First, so that the device has let go of the memory of the others before they go.
    pair: Datagrams,
    rx: RxQueue,
    tx: TxQueue,
    paths: Paths,
    channel: Arc<Channel>,
    addr: VerbsAddr,
    device: String,
    capabilities: Capabilities,
    spin: Duration,
    waker: Waker,
    /// What else ends a wait.
    watched: Option<OwnedFd>,
    restarted: Option<Clock>,
    stats: VerbsStats,
}

impl VerbsPort {
    /// Open a port.
    ///
    /// # Errors
    /// See [`VerbsError`].
    pub fn open(config: &VerbsConfig) -> Result<Self, VerbsError> {
        let Place { context, attr, gid } = discover::find(config)?;
        let limits = context.device_attr()?;
        let most = usize::try_from(limits.max_qp_wr.min(limits.max_cqe)).unwrap_or(usize::MAX);
        let buffers = (config.receive_buffer_bytes / PROMISED_LEN_BYTES).clamp(2 * rx::BATCH, most.max(2 * rx::BATCH));
        let domain = Domain::new(&context)?;
        let channel = Channel::new(&context)?;
        let sent = Completions::new(&context, PACKETS, None)?;
        let arrived = Completions::new(&context, buffers, Some(&channel))?;
        let pair = Datagrams::new(&domain, gid.port, (&sent, PACKETS), (&arrived, buffers))?;
        let refused = |what| {
            let device = context.name.clone();
            move |source| VerbsError::Refused { what, device, source }
        };
        let waker = Waker::new().map_err(refused("open an event file"))?;
        let mut port = Self {
            rx: RxQueue::new(&domain, &arrived, (buffers, attr.mtu_bytes), attr.is_ethernet)?,
            tx: TxQueue::new(&domain, &sent, attr.mtu_bytes, pair.max_inline_len_bytes)?,
            paths: Paths::new(&domain, gid),
            channel,
            addr: VerbsAddr { gid: gid.gid, lid: if attr.is_ethernet { 0 } else { attr.lid }, qpn: pair.pair.number() },
            device: format!("{}:{}:{}", context.name, gid.port, gid.index),
            capabilities: Capabilities::new(attr.mtu_bytes, buffers * PROMISED_LEN_BYTES, rx::BATCH),
            spin: config.spin,
            waker,
            watched: None,
            restarted: None,
            stats: VerbsStats::default(),
            pair,
        };
        port.start().map_err(|error| error.unwrap_or_else(|| VerbsError::last("post buffers", &context.name)))?;
        Ok(port)
    }

    /// Return what the port has counted so far.
    pub const fn stats(&self) -> VerbsStats {
        self.stats
    }

    /// Return the RDMA port and identifier that it is on, as a [`VerbsLink`] is written.
    pub fn link(&self) -> &str {
        &self.device
    }

    /// Return a handle that wakes this port's waiting thread from any other.
    pub fn waker(&self) -> Waker {
        self.waker.clone()
    }

    /// Let waits end with [`Wake::Woken`] also when `file` is readable, as often as it still is.
    pub fn watch(&mut self, file: OwnedFd) {
        self.watched = Some(file);
    }

    /// Make the queue pair ready, with all buffers. An error without a word is that buffers were not taken.
    fn start(&mut self) -> Result<(), Option<VerbsError>> {
        self.pair.start()?;
        self.rx.start(&mut self.pair, &mut self.stats).map_err(|Failed| None)
    }

    /// Restart the queue pair, unless that was done just now.
    fn restart(&mut self) {
        if self.restarted.is_some_and(|at| at.elapsed() < RESTART_PAUSE) {
            self.tx.discard(&mut self.stats);
            return;
        }
        // One that can't be stopped is reset all the same, and then has nothing left.
        let _ = self.pair.pair.stop();
        for _ in 0..DRAIN_LOOKS {
            self.tx.take(&mut self.stats);
            if self.rx.drain() && !self.tx.is_in_flight() {
                break;
            }
            std::thread::yield_now();
        }
        // As long as this fails, the next packet brings it here again.
        let _ = self.start();
        self.tx.restart(&mut self.stats);
        self.paths.clear();
        self.stats.restarts += 1;
        self.restarted = Some(Clock::now());
    }

    /// Take in packets if there are none left; return whether there are some now.
    fn fill(&mut self) -> bool {
        match self.rx.fill(&mut self.pair, &mut self.stats) {
            Ok(there_are) => there_are,
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
    fn is_marked(&self) -> bool {
        self.is_marked
    }

    fn consume<R>(self, f: impl FnOnce(Addr, &[u8]) -> R) -> R {
        f(Addr::Verbs(self.from), self.bytes)
    }
}

/// A place in registered memory.
pub struct VerbsTx<'a> {
    port: &'a mut VerbsPort,
    /// `None` where no queue pair can be: the packet is written, dropped and counted.
    to: Option<VerbsAddr>,
}

impl std::fmt::Debug for VerbsTx<'_> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("VerbsTx").field("to", &self.to).finish_non_exhaustive()
    }
}

impl TxToken for VerbsTx<'_> {
    fn consume<R>(self, f: impl FnOnce(&mut [u8]) -> (usize, R)) -> R {
        let VerbsPort { tx, paths, stats, .. } = self.port;
        // `transmit` saw that there is room, and has held the queue since.
        let buffer = tx.reserve().unwrap_or_default();
        let room = buffer.len();
        let (len_bytes, result) = f(buffer);
        assert!(len_bytes <= room, "a packet of {len_bytes} bytes was claimed in a buffer of {room}");
        if len_bytes > 0 && !self.to.is_some_and(|to| tx.commit(&to, len_bytes, paths)) {
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

    fn local_addr(&self) -> Addr {
        Addr::Verbs(self.addr)
    }

    fn receive(&mut self, _now: Instant) -> Option<VerbsRx<'_>> {
        let next = loop {
            if !self.fill() {
                return None;
            }
            if let Some(next) = self.rx.advance(&mut self.stats) {
                break next;
            }
        };
        Some(VerbsRx { from: next.from, is_marked: next.is_marked, bytes: self.rx.bytes(&next) })
    }

    fn transmit(&mut self, to: Addr, _now: Instant) -> Option<VerbsTx<'_>> {
        let to = match to {
            // Numbers have 24 bits; 0 and 1 are the fabric's own.
            Addr::Verbs(to) if (2..1 << 24).contains(&to.qpn) => Some(to),
            _ => None,
        };
        (self.tx.room() > 0).then_some(VerbsTx { port: self, to })
    }

    fn room(&self) -> usize {
        self.tx.room()
    }

    fn flush(&mut self, _now: Instant) {
        if !self.tx.flush(&mut self.pair, &mut self.stats) {
            self.restart();
        }
    }
}

impl WaitPort for VerbsPort {
    fn wait(&mut self, timeout: Option<Duration>) -> Wake {
        crate::udp::wait::wait_on(self, timeout)
    }
}

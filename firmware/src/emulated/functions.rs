//! The functions of a board: its zero-copy ranks, served by the board's one shard.
//!
//! ```text
//! rank ---- submission rings ----> Functions --- Node::submit --------> node
//!   ^                                  |                                  | Node::poll_dma
//!   |                                  v                                  v
//!   '------ completion rings ---- Node::poll_answer <-- completions --- engine
//! ```
//!
//! Submissions wait in the rank's ring: those that the node's window does not admit yet stay there, in order, and are
//! retried when something has advanced.
//!
//! Invariants:
//! - a function accesses only its own rings, memory and connection; a rank that corrupts a ring or an entry is
//!   detached, and no other is affected;
//! - chunks accepted and not answered never exceed the completion ring, so there is always room for an answer;
//! - memory is unmapped when its last use has ended, also that of ranks that have gone;
//! - a rank gets the redo slots of its own group only ([`RedoMemories`]).

use super::attach::{Arrival, LocalArrival, RemoteArrival, ZeroCopyConfig};
use super::engine::BoardEngine;
use super::function::{AttachedRank, DEPTH, DetachReason, unregister};
use super::redo::RedoMemories;
use std::net::IpAddr;
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, AtomicU64, Ordering};
use std::sync::mpsc::Receiver;
use std::thread;
use std::time::Duration;
use sumac_device::function::dispatch_answers;
use sumac_device::{AttachError, Node};
use sumac_hal::ctrl::{GroupConfig, Refusal, ZeroCopyRefusal, send};
use sumac_hal::dma::{Capabilities, Completion, Engine, RegionKey, RegionTable, Span, Status, Tag};
use sumac_hal::emu::dma::{DmaConfig, EmuEngine, StartError, Strictness};
use sumac_hal::ids::{BootId, ChildIndex, Epoch, FunctionId, GroupId};
use sumac_hal::port::WaitPort;
use sumac_hal::remote::LinkFailure;
use sumac_hal::remote::handshake::{AttachReply, AttachRequest, Attachment, Challenge};
use sumac_hal::ring::{Doorbell, SpinPolicy};
use sumac_hal::shm::{AttachRefusal, BellSet, Message, SocketError};
use sumac_hal::time::Instant;
use sumac_hal::traffic_class::TrafficClass;
use sumac_hal::udp::Waker;
use thiserror::Error;

/// The maximum number of regions of all functions.
const REGIONS: usize = 4096;

/// The maximum length of all regions in bytes: half of a 47-bit address space, as the device maps them.
const REGIONS_MAX_BYTES: u64 = 1 << 46;

/// The maximum number of regions of one function: what a program allocates, and its bounce buffer.
const REGIONS_PER_FUNCTION: usize = 256;

/// Chains that write no more than this are executed by the shard itself: some microseconds of work, less than waking an
/// engine's thread takes.
const INLINE_LEN_BYTES: u64 = 192 << 10;

/// The engine's threads wake the shard when no more than this many chains are left, not after each chain: until then
/// they have enough work.
const LOW_CHAINS: u32 = 4;

/// How often the shard yields before it sleeps: about 30 us if no other thread wants the core, which is the cost of a
/// wake-up.
const YIELDS: u32 = 100;

/// The maximum number of turns of the rings before the sockets are polled again: a turn is one chain, or a few short
/// operations.
const TURNS_PER_POLL: usize = 8;

/// Completions fetched in one call.
const BATCH: usize = 32;

/// How long the shard sleeps while a rank's completion ring is full, which ranks of this version never cause.
const FULL_RING: Duration = Duration::from_millis(1);

/// The event number of the engine, which no function has.
const ENGINE: u64 = u64::MAX;

/// Why zero-copy contributions could not be set up.
#[derive(Debug, Error)]
#[non_exhaustive]
pub enum ZeroCopyError {
    /// The engine could not be started.
    #[error(transparent)]
    Engine(#[from] StartError),
    /// The set of event descriptors could not be created.
    #[error("event descriptors: {0}")]
    Bells(#[from] rustix::io::Errno),
    /// The RDMA port could not be opened.
    #[error("RDMA: {0}")]
    Remote(#[from] LinkFailure),
}

/// A child that may attach.
struct Link {
    group: GroupId,
    epoch: Epoch,
    child: ChildIndex,
    key: u64,
    function: FunctionId,
    attached: bool,
}

/// All functions of a board.
pub(super) struct Functions {
    engine: BoardEngine,
    regions: Box<RegionTable<REGIONS>>,
    redo: RedoMemories,
    /// The event descriptors of ranks and connections.
    bells: BellSet,
    /// The doorbell that the engine rings while the shard sleeps.
    doorbell: Arc<Doorbell<AtomicU32>>,
    spin: SpinPolicy,
    boot_id: BootId,
    arrivals: Receiver<Arrival>,
    links: Vec<Link>,
    next: u32,
    attached: Vec<AttachedRank>,
    /// Memory of detached functions that is still in use.
    draining: Vec<RegionKey>,
    /// Functions whose connection is ready.
    ready: Vec<u64>,
    /// The number of chains that failed in the engine.
    failed_chains: Arc<AtomicU64>,
}

impl Functions {
    /// Start the engine: on the RDMA port, with the preferred address and traffic class in `remote`, or else an
    /// emulated one.
    pub(super) fn start(
        config: &ZeroCopyConfig,
        remote: Option<(&str, IpAddr, TrafficClass)>,
        boot_id: BootId,
        arrivals: Receiver<Arrival>,
        waker: Waker,
    ) -> Result<Self, ZeroCopyError> {
        let doorbell = Arc::new(Doorbell::new(AtomicU32::new(0)));
        let bell = doorbell.clone();
        let notify = Box::new(move |left| {
            if left <= LOW_CHAINS && bell.ring() {
                waker.wake();
            }
        });
        // If the engine would leave no core for the shard, the shard itself is one of its threads.
        let shares_work = thread::available_parallelism().map_or(1, usize::from) <= config.threads;
        let threads = config.threads - usize::from(shares_work);
        let dma = DmaConfig {
            shares_work,
            regions: REGIONS + RedoMemories::MAX,
            inline_len_bytes: INLINE_LEN_BYTES,
            strictness: if config.strict { Strictness::Strict } else { Strictness::Hardware },
            ..DmaConfig::new(config.profile, threads)
        };
        let engine = EmuEngine::start_notifying(dma, Some(notify))?;
        let engine = match remote {
            None => BoardEngine::Emulated(Box::new(engine)),
            Some((name, prefer, class)) => {
                BoardEngine::remote(engine, name, (prefer, class), REGIONS + RedoMemories::MAX)?
            }
        };
        let bells = BellSet::new()?;
        engine.file().into_iter().try_for_each(|file| bells.add_connection(file, ENGINE))?;
        Ok(Self {
            engine,
            regions: Box::new(
                RegionTable::new(REGIONS_PER_FUNCTION).with_max_bytes(config.rank_memory_bytes, REGIONS_MAX_BYTES),
            ),
            redo: RedoMemories::new(REGIONS as u16, config.redo_memory_bytes),
            bells,
            doorbell,
            // Threads that may run at once: the shard, its engine's, and a rank.
            spin: SpinPolicy::for_this_machine(threads + 2).with_yields(YIELDS),
            boot_id,
            arrivals,
            links: Vec::new(),
            next: 0,
            attached: Vec::new(),
            draining: Vec::new(),
            ready: Vec::new(),
            failed_chains: Arc::default(),
        })
    }

    /// Return the count of chains that failed in the engine, not counting aborted ones.
    pub(super) fn failed_chains(&self) -> Arc<AtomicU64> {
        Arc::clone(&self.failed_chains)
    }

    /// Return the descriptor that the shard's port has to watch besides its sockets.
    pub(super) fn watched(&self) -> Result<std::os::fd::OwnedFd, ZeroCopyError> {
        use std::os::fd::AsFd;
        Ok(rustix::io::fcntl_dupfd_cloexec(self.bells.as_fd(), 0)?)
    }

    /// Return the redo memory budget of all groups, and the engine's capabilities, for the node.
    pub(super) fn redo_memory(&self) -> (Span, Capabilities) {
        (self.redo.budget(), *self.engine.capabilities())
    }

    /// Reserve what a new group's zero-copy children need, and let them attach.
    pub(super) fn reserve(&mut self, node: &mut Node<'_>, config: &GroupConfig) -> Result<(), Refusal> {
        let mut number = || {
            self.next = self.next.wrapping_add(1);
            FunctionId(self.next)
        };
        let owners: Vec<_> = config.zero_copy.iter().map(|child| (child, number())).collect();
        node.attach(config.group, &owners).map_err(|error| match error {
            AttachError::NoRoom { memory_bytes, .. } => Refusal::NoRedoMemory { need: memory_bytes as u64 },
            AttachError::Steps { .. } | AttachError::Chunk { .. } => Refusal::NoZeroCopy(ZeroCopyRefusal::Engine),
            _ => Refusal::NoZeroCopy(ZeroCopyRefusal::Groups),
        })?;
        self.redo.allocate(node, config.group, &mut self.engine)?;
        self.links.extend(owners.into_iter().map(|(child, function)| Link {
            group: config.group,
            epoch: config.epoch,
            child,
            key: config.secret.child_key(config.group, config.epoch, child),
            function,
            attached: false,
        }));
        Ok(())
    }

    /// Return whether the RDMA device has failed.
    pub(super) fn has_failed(&self) -> bool {
        self.engine.has_failed()
    }

    /// Drop the children of released groups.
    pub(super) fn release_gone(&mut self, node: &Node<'_>) {
        self.links.retain(|link| node.has_group(link.group));
        self.redo.release_gone(node, &mut self.engine);
    }

    /// Process attach requests and messages on connections.
    pub(super) fn poll_connections(&mut self, node: &mut Node<'_>) {
        while let Ok(arrival) = self.arrivals.try_recv() {
            match arrival {
                Arrival::Local(arrival) => {
                    if let Err(error) = self.attach_local(node, arrival) {
                        tracing::warn!(%error, "a rank could not attach");
                    }
                }
                Arrival::Remote(arrival) => self.attach_remote(arrival),
            }
        }
        let ready = &mut self.ready;
        self.bells.poll(|number| ready.push(number));
        while let Some(number) = self.ready.pop() {
            if number == ENGINE {
                // Its completions are polled in each turn.
                self.engine.arm();
            }
            let Some(at) = self.attached.iter().position(|function| function.has_number(number)) else { continue };
            if let Err(ended) = self.attached[at].poll_connection() {
                self.detach(node, at, &ended);
            }
        }
    }

    fn attach_local(&mut self, node: &Node<'_>, arrival: LocalArrival) -> Result<(), SocketError> {
        let LocalArrival { connection, group, child, key } = arrival;
        let link = self.links.iter_mut().find(|link| (link.group, link.child, link.key) == (group, child, key));
        let refused = match &link {
            None => Some(AttachRefusal::UnknownChild),
            Some(link) if link.attached => Some(AttachRefusal::AlreadyAttached),
            Some(_) => None,
        };
        let (Some(link), Some(redo), None) = (link, self.redo.slots(node, group), refused) else {
            let reason = refused.unwrap_or(AttachRefusal::UnknownChild);
            return connection.send(&Message::Refused { reason }, None);
        };
        let capabilities = *self.engine.capabilities();
        match AttachedRank::create(link.function, connection, (self.boot_id, capabilities), redo, &self.bells) {
            Ok(attached) => {
                link.attached = true;
                tracing::debug!(%group, %child, function = %link.function, "attached");
                self.attached.push(attached);
                Ok(())
            }
            Err((connection, error)) => {
                tracing::warn!(%error, "could not create a function for a rank");
                connection.send(&Message::Refused { reason: AttachRefusal::NoMemory }, None)
            }
        }
    }

    /// Attach a rank of another host, if its proof is valid.
    fn attach_remote(&mut self, arrival: RemoteArrival) {
        let RemoteArrival { mut stream, challenge, request } = arrival;
        let answer = match self.try_attach_remote(&stream, &challenge, &request) {
            Ok(attachment) => AttachReply::Accepted(attachment),
            Err(reason) => AttachReply::Refused(reason),
        };
        // A few bytes, which do not block. If the rank has gone meanwhile, its connection reports it.
        if let Err(error) = send(&mut stream, &answer) {
            tracing::debug!(%error, "a rank of another host has gone");
        }
    }

    fn try_attach_remote(
        &mut self,
        stream: &std::net::TcpStream,
        challenge: &Challenge,
        request: &AttachRequest,
    ) -> Result<Attachment, AttachRefusal> {
        let matches = |link: &&mut Link| (link.group, link.child) == (request.group, request.child);
        let link = self.links.iter_mut().find(matches).filter(|link| request.is_proven(link.key, challenge));
        let link = link.ok_or(AttachRefusal::UnknownChild)?;
        if link.attached {
            return Err(AttachRefusal::AlreadyAttached);
        }
        let no_room = |error: &dyn std::fmt::Display| {
            tracing::warn!(%error, "no room for a rank of another host");
            AttachRefusal::NoMemory
        };
        let (peer, end) = self.engine.connect(&request.end).map_err(|error| no_room(&error))?;
        let device = (self.boot_id, *self.engine.capabilities());
        let made = match stream.try_clone() {
            Ok(stream) => AttachedRank::create_remote(link.function, (stream, peer), device, &self.bells)
                .map_err(|error| no_room(&error)),
            Err(error) => Err(no_room(&error)),
        };
        let attached = match made {
            Ok(attached) => attached,
            Err(reason) => {
                self.engine.close(peer);
                return Err(reason);
            }
        };
        link.attached = true;
        tracing::debug!(group = %request.group, child = %request.child, function = %link.function, "attached from another host");
        self.attached.push(attached);
        Ok(Attachment::new(end, self.boot_id, DEPTH, &device.1).prove(link.key, (challenge, request)))
    }

    /// Detach a function: its memory is unmapped after its last use.
    ///
    /// A rank on another host is removed from its group first, because chains that fail with its link say nothing about
    /// the chunk. The other ranks wait for that chunk until recovery.
    fn detach(&mut self, node: &mut Node<'_>, at: usize, ended: &DetachReason) {
        let attached = self.attached.swap_remove(at);
        tracing::debug!(function = %attached.id(), why = %ended, "detached");
        if let Some(peer) = attached.peer() {
            for link in self.links.iter().filter(|link| link.function == attached.id()) {
                node.withdraw(link.group, link.epoch, link.function);
            }
            self.engine.close(peer);
        }
        let memory: Vec<_> = self.regions.owned_by(attached.id()).collect();
        for key in memory {
            if !unregister(attached.id(), key, &mut self.regions, &mut self.engine) {
                self.draining.push(key);
            }
        }
        attached.leave(&self.bells);
    }

    /// Process submissions; true if there were any. Called before the node checks its deadlines, so that no rank counts
    /// as late because the shard was.
    pub(super) fn poll_submissions(&mut self, node: &mut Node<'_>, now: Instant) -> bool {
        let mut taken_any = false;
        let mut at = 0;
        while at < self.attached.len() {
            let function = &mut self.attached[at];
            match function.poll_submissions(node, &mut self.regions, &mut self.engine, now) {
                Ok(taken) => {
                    taken_any |= taken;
                    at += 1;
                }
                Err(ended) => self.detach(node, at, &ended),
            }
        }
        taken_any
    }

    /// Do all pending work without waiting; true if there was any.
    fn advance(&mut self, node: &mut Node<'_>, now: Instant) -> bool {
        let mut busy = self.poll_submissions(node, now);
        let nothing = Completion { tag: Tag::default(), status: Status::Done, step: 0 };
        loop {
            // Short chains may have completed on submission.
            node.poll_dma(&mut self.engine, now);
            let mut completions = [nothing; BATCH];
            let count = self.engine.poll(&mut completions);
            // Detach a rank whose link has ended, and answer it, before the node retries its chains.
            let is_lost = completions[..count].iter().any(|completion| completion.status == Status::Hardware);
            if is_lost {
                self.poll_submissions(node, now);
            }
            for completion in &completions[..count] {
                self.count_failure(completion);
                node.handle_completion(completion);
            }
            if is_lost {
                self.answer(node);
            }
            if count == 0 {
                break;
            }
            busy = true;
        }
        busy |= self.answer(node);
        busy
    }

    /// Count a failed chain. The node retries it, so ranks need not notice.
    fn count_failure(&self, completion: &Completion) {
        if !matches!(completion.status, Status::Done | Status::Aborted) {
            tracing::debug!(tag = ?completion.tag, step = completion.step, why = %completion.status, "a chain failed");
            self.failed_chains.fetch_add(1, Ordering::Relaxed);
        }
    }

    /// Publish answers, and the completions of commands.
    fn answer(&mut self, node: &mut Node<'_>) -> bool {
        let mut busy = dispatch_answers(node, &mut self.regions, &mut self.attached);
        if !self.draining.is_empty() {
            let (regions, engine) = (&self.regions, &mut self.engine);
            self.draining.retain(|&key| {
                let in_use = regions.contains(key);
                if !in_use {
                    engine.unmap(key);
                }
                in_use
            });
        }
        self.redo.release_ended(node, &mut self.engine);
        let mut at = 0;
        while at < self.attached.len() {
            let function = &mut self.attached[at];
            function.complete_commands(node, &self.regions, &mut self.engine);
            match function.publish(&mut self.engine) {
                Ok(published) => {
                    busy |= published;
                    at += 1;
                }
                Err(ended) => self.detach(node, at, &ended),
            }
        }
        busy
    }

    /// Serve the rings, and do the shard's share of the engine's work. While no contributions arrive as packets, yield
    /// for more work before returning. True if there may be more work at once.
    pub(super) fn serve(&mut self, node: &mut Node<'_>, now: impl Fn() -> Instant) -> bool {
        // At least once between two sleeps, and the work of a turn is bounded: ranks treat a shard whose heartbeat
        // stalls as one that has ended.
        self.attached.iter_mut().for_each(AttachedRank::advance_heartbeat);
        let may_spin = !self.attached.is_empty() && node.is_all_zero_copy();
        for turn in 0..TURNS_PER_POLL {
            let served = self.advance(node, now());
            // Between two chains, let the rings and the engine's other threads make progress.
            let worked = self.engine.work();
            if !(served || worked || may_spin && self.yield_for_work()) {
                // Earlier turns may have queued packets.
                return turn > 0;
            }
        }
        true
    }

    /// Yield until there is work; false if there is none after the maximum number of yields.
    fn yield_for_work(&mut self) -> bool {
        for _ in 0..self.spin.yields {
            if self.has_work() {
                return true;
            }
            thread::yield_now();
        }
        self.has_work()
    }

    fn has_work(&mut self) -> bool {
        self.engine.has_work() || self.attached.iter_mut().any(AttachedRank::has_work)
    }

    /// Sleep until there is work, or `timeout` has passed.
    pub(super) fn sleep(&mut self, port: &mut impl WaitPort, timeout: Option<Duration>) {
        self.doorbell.arm();
        self.engine.arm();
        self.attached.iter_mut().for_each(AttachedRank::arm);
        if !self.has_work() {
            let full = self.attached.iter().any(AttachedRank::is_full);
            let timeout =
                if full { Some(timeout.map_or(FULL_RING, |timeout| timeout.min(FULL_RING))) } else { timeout };
            port.wait(timeout);
        }
        self.doorbell.disarm();
        self.attached.iter_mut().for_each(AttachedRank::disarm);
    }

    /// Return whether no rank is attached.
    pub(super) fn is_empty(&self) -> bool {
        self.attached.is_empty()
    }
}

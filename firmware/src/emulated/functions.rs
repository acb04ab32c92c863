//! The functions of a board: ranks of this machine that contribute by reference, served by the board's one shard.
//!
//! ```text
//! rank ---- submission rings ----> Functions --- Node::submit --------> node
//!   ^                                  |                                  | Node::poll_dma
//!   |                                  v                                  v
//!   '------ completion rings ---- Node::poll_answer <-- completions --- engine
//! ```
//!
//! A rank's ring is where its submissions wait: what the node's window does not let in yet stays there, in order, and is
//! tried again when something has moved.
//!
//! Invariants:
//! - a function touches its own rings, memory and connection only; one that breaks a ring or an entry is hung up on, and
//!   nobody else notices;
//! - chunks taken and not answered never exceed the completion ring, so that an answer always has its place;
//! - memory is unmapped when its last use has been released, also that of ranks that are gone;
//! - a rank is given the redo slots of its own group, and no byte of another's ([`RedoMemories`]).

use super::bus::{Arrival, BusConfig, Caller, Neighbour};
use super::engine::BoardEngine;
use super::function::{Attached, DEPTH, Ended, take_away};
use super::redo::RedoMemories;
use std::net::IpAddr;
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, AtomicU64, Ordering};
use std::sync::mpsc::Receiver;
use std::thread;
use std::time::Duration;
use sumac_device::function::hand_out;
use sumac_device::{AttachError, Node};
use sumac_hal::ctrl::{GroupConfig, NoBus, Refusal, send};
use sumac_hal::dma::{Capabilities, Completion, Engine, RegionKey, RegionTable, Span, Status, Tag};
use sumac_hal::emu::dma::{DmaConfig, EmuEngine, StartError, Strictness};
use sumac_hal::hosted::HostedPort;
use sumac_hal::ids::{BootId, ChildIndex, Epoch, FunctionId, GroupId};
use sumac_hal::port::WaitPort;
use sumac_hal::remote::LinkFailure;
use sumac_hal::remote::handshake::{Answer, Call, Challenge, Seat};
use sumac_hal::ring::{Doorbell, Patience};
use sumac_hal::shm::{AttachRefusal, Bells, Message, SocketError};
use sumac_hal::time::Instant;
use sumac_hal::udp::Waker;
use thiserror::Error;

/// Regions of all functions.
const REGIONS: usize = 4096;

/// Bytes of all functions' regions: half of what an address space of 47 bits has, as the device maps them.
const REGIONS_MAX_BYTES: u64 = 1 << 46;

/// Regions of one function: what a program allocates, and its bounce buffer.
const REGIONS_PER_FUNCTION: usize = 256;

/// Chains that write no more than this are done by the shard itself: some microseconds' work, which is less than waking
/// an engine's thread takes.
const INLINE_LEN_BYTES: u64 = 192 << 10;

/// The engine's threads wake the shard when they have no more chains than this left, not after each: until then there is
/// enough for them to do.
const LOW_CHAINS: u32 = 4;

/// How often the shard yields before it sleeps: some 30 us where nobody else wants the core, which is what a wake-up
/// takes.
const YIELDS: u32 = 100;

/// How often the shard turns to its rings before it looks at its sockets again: a turn is a chain of its own, or some
/// short operations.
const TURNS_PER_LOOK: usize = 8;

/// Completions taken at a time.
const BATCH: usize = 32;

/// How long the shard sleeps while a rank leaves no place for its answers, which no rank of this version does.
const FULL_RING: Duration = Duration::from_millis(1);

/// What the engine's events are told under: no function has it.
const ENGINE: u64 = u64::MAX;

/// Why there are no functions.
#[derive(Debug, Error)]
#[non_exhaustive]
pub enum BusError {
    /// No engine.
    #[error(transparent)]
    Engine(#[from] StartError),
    /// Nothing to sleep on.
    #[error("bells: {0}")]
    Bells(#[from] rustix::io::Errno),
    /// Ranks of other hosts can't be reached.
    #[error("by RDMA: {0}")]
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
    /// What ranks and connections wake.
    bells: Bells,
    /// What the engine rings while the shard sleeps.
    doorbell: Arc<Doorbell<AtomicU32>>,
    patience: Patience,
    boot_id: BootId,
    arrivals: Receiver<Arrival>,
    links: Vec<Link>,
    next: u32,
    attached: Vec<Attached>,
    /// Memory of functions that are gone, still in use.
    stranded: Vec<RegionKey>,
    /// Functions whose connection has something.
    stirred: Vec<u64>,
    /// Chains that the engine did not carry out.
    failed_chains: Arc<AtomicU64>,
}

impl Functions {
    /// Start the engine: of the RDMA port called by the first of `remote`, with the identifier of its second, or else emulated.
    pub(super) fn start(
        config: &BusConfig,
        remote: Option<(&str, IpAddr)>,
        boot_id: BootId,
        arrivals: Receiver<Arrival>,
        waker: Waker,
    ) -> Result<Self, BusError> {
        let doorbell = Arc::new(Doorbell::new(AtomicU32::new(0)));
        let bell = doorbell.clone();
        let notify = Box::new(move |left| {
            if left <= LOW_CHAINS && bell.ring() {
                waker.wake();
            }
        });
        // Where the engine would leave no core for the shard, that is one of its threads.
        let helps = thread::available_parallelism().map_or(1, usize::from) <= config.threads;
        let threads = config.threads - usize::from(helps);
        let dma = DmaConfig {
            helps,
            regions: REGIONS + RedoMemories::MAX,
            inline_len_bytes: INLINE_LEN_BYTES,
            strictness: if config.strict { Strictness::Strict } else { Strictness::Hardware },
            ..DmaConfig::new(config.profile, threads)
        };
        let engine = EmuEngine::start_notifying(dma, Some(notify))?;
        let engine = match remote {
            None => BoardEngine::Emulated(Box::new(engine)),
            Some((name, prefer)) => BoardEngine::remote(engine, name, prefer, REGIONS + RedoMemories::MAX)?,
        };
        let bells = Bells::new()?;
        engine.file().into_iter().try_for_each(|file| bells.add_connection(file, ENGINE))?;
        Ok(Self {
            engine,
            regions: Box::new(
                RegionTable::new(REGIONS_PER_FUNCTION).with_max_bytes(config.rank_memory_bytes, REGIONS_MAX_BYTES),
            ),
            redo: RedoMemories::new(REGIONS as u16, config.redo_memory_bytes),
            bells,
            doorbell,
            // The shard, its engine, and a rank.
            patience: Patience::for_this_machine(threads + 2).with_yields(YIELDS),
            boot_id,
            arrivals,
            links: Vec::new(),
            next: 0,
            attached: Vec::new(),
            stranded: Vec::new(),
            stirred: Vec::new(),
            failed_chains: Arc::default(),
        })
    }

    /// Return the count of chains that the engine did not carry out, but for those that were aborted.
    pub(super) fn failed_chains(&self) -> Arc<AtomicU64> {
        Arc::clone(&self.failed_chains)
    }

    /// Return what the shard's port has to watch besides its sockets.
    pub(super) fn watched(&self) -> Result<std::os::fd::OwnedFd, BusError> {
        use std::os::fd::AsFd;
        Ok(rustix::io::fcntl_dupfd_cloexec(self.bells.as_fd(), 0)?)
    }

    /// Return the memory of redo slots as the node is to use it: no more than so much for all groups, each in its own.
    pub(super) fn redo_memory(&self) -> (Span, Capabilities) {
        (self.redo.budget(), *self.engine.capabilities())
    }

    /// Reserve what a new group's children by reference need, and let them attach.
    pub(super) fn expect(&mut self, node: &mut Node<'_>, config: &GroupConfig) -> Result<(), Refusal> {
        let mut number = || {
            self.next = self.next.wrapping_add(1);
            FunctionId(self.next)
        };
        let owners: Vec<_> = config.by_reference.iter().map(|child| (child, number())).collect();
        node.attach(config.group, &owners).map_err(|error| match error {
            AttachError::NoRoom { memory_bytes, .. } => Refusal::NoRedoMemory { need: memory_bytes as u64 },
            AttachError::Steps { .. } | AttachError::Chunk { .. } => Refusal::NoBus(NoBus::Engine),
            _ => Refusal::NoBus(NoBus::Groups),
        })?;
        self.redo.give(node, config.group, &mut self.engine)?;
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

    /// Forget the children of groups that are gone.
    pub(super) fn forget_gone(&mut self, node: &Node<'_>) {
        self.links.retain(|link| node.has_group(link.group));
        self.redo.take_back(node, &mut self.engine);
    }

    /// Take in who has arrived, and what connections say.
    pub(super) fn poll_connections(&mut self, node: &mut Node<'_>) {
        while let Ok(arrival) = self.arrivals.try_recv() {
            match arrival {
                Arrival::Near(neighbour) => {
                    if let Err(error) = self.welcome(node, neighbour) {
                        tracing::warn!(%error, "a rank can't attach");
                    }
                }
                Arrival::Far(caller) => self.welcome_far(caller),
            }
        }
        let stirred = &mut self.stirred;
        self.bells.poll(|number| stirred.push(number));
        while let Some(number) = self.stirred.pop() {
            if number == ENGINE {
                // What it has is looked for in each turn.
                self.engine.arm();
            }
            let Some(at) = self.attached.iter().position(|function| function.is_number(number)) else { continue };
            if let Err(ended) = self.attached[at].hear() {
                self.detach(node, at, &ended);
            }
        }
    }

    fn welcome(&mut self, node: &Node<'_>, arrival: Neighbour) -> Result<(), SocketError> {
        let Neighbour { connection, group, child, key } = arrival;
        let link = self.links.iter_mut().find(|link| (link.group, link.child, link.key) == (group, child, key));
        let refused = match &link {
            None => Some(AttachRefusal::Stranger),
            Some(link) if link.attached => Some(AttachRefusal::Attached),
            Some(_) => None,
        };
        let (Some(link), Some(redo), None) = (link, self.redo.slots(node, group), refused) else {
            let reason = refused.unwrap_or(AttachRefusal::Stranger);
            return connection.send(&Message::Refused { reason }, None);
        };
        let capabilities = *self.engine.capabilities();
        match Attached::create(link.function, connection, (self.boot_id, capabilities), redo, &self.bells) {
            Ok(attached) => {
                link.attached = true;
                tracing::debug!(%group, %child, function = %link.function, "attached");
                self.attached.push(attached);
                Ok(())
            }
            Err((connection, error)) => {
                tracing::warn!(%error, "no function");
                connection.send(&Message::Refused { reason: AttachRefusal::NoRoom }, None)
            }
        }
    }

    /// Let a rank of another host in, if it has proven which child it is.
    fn welcome_far(&mut self, caller: Caller) {
        let Caller { mut stream, challenge, call } = caller;
        let answer = match self.seat_far(&stream, &challenge, &call) {
            Ok(seat) => Answer::Seat(seat),
            Err(reason) => Answer::Refused(reason),
        };
        // Some bytes. One that has gone meanwhile is heard to have.
        if let Err(error) = send(&mut stream, &answer) {
            tracing::debug!(%error, "a rank of another host has left");
        }
    }

    fn seat_far(
        &mut self,
        stream: &std::net::TcpStream,
        challenge: &Challenge,
        call: &Call,
    ) -> Result<Seat, AttachRefusal> {
        let is_it = |link: &&mut Link| (link.group, link.child) == (call.group, call.child);
        let link = self.links.iter_mut().find(is_it).filter(|link| call.is_proven(link.key, challenge));
        let link = link.ok_or(AttachRefusal::Stranger)?;
        if link.attached {
            return Err(AttachRefusal::Attached);
        }
        let no_room = |error: &dyn std::fmt::Display| {
            tracing::warn!(%error, "no room for a rank of another host");
            AttachRefusal::NoRoom
        };
        let (peer, end) = self.engine.connect(&call.end).map_err(|error| no_room(&error))?;
        let device = (self.boot_id, *self.engine.capabilities());
        let made = match stream.try_clone() {
            Ok(stream) => Attached::create_far(link.function, (stream, peer), device, &self.bells)
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
        tracing::debug!(group = %call.group, child = %call.child, function = %link.function, "attached from another host");
        self.attached.push(attached);
        Ok(Seat::new(end, self.boot_id, DEPTH, &device.1).prove(link.key, (challenge, call)))
    }

    /// A function is gone: its memory goes with the last use.
    ///
    /// One of another host is taken out of its group first: chains that fail because its link has ended say nothing of the
    /// chunk. The others wait for it, until somebody repairs.
    fn detach(&mut self, node: &mut Node<'_>, at: usize, ended: &Ended) {
        let attached = self.attached.swap_remove(at);
        tracing::debug!(function = %attached.id(), why = %ended, "detached");
        if let Some(peer) = attached.peer() {
            for link in self.links.iter().filter(|link| link.function == attached.id()) {
                node.withdraw(link.group, link.epoch, link.function);
            }
            self.engine.close(peer);
        }
        let memory: Vec<_> = self.regions.of(attached.id()).collect();
        for key in memory {
            if !take_away(attached.id(), key, &mut self.regions, &mut self.engine) {
                self.stranded.push(key);
            }
        }
        attached.leave(&self.bells);
    }

    /// Take what was submitted; true if there was something. Before the node looks at the time, so that no rank counts as
    /// late because the shard was.
    pub(super) fn take(&mut self, node: &mut Node<'_>, now: Instant) -> bool {
        let mut taken_any = false;
        let mut at = 0;
        while at < self.attached.len() {
            let function = &mut self.attached[at];
            match function.take(node, &mut self.regions, &mut self.engine, now) {
                Ok(taken) => {
                    taken_any |= taken;
                    at += 1;
                }
                Err(ended) => self.detach(node, at, &ended),
            }
        }
        taken_any
    }

    /// Do what there is to do without waiting; true if anything was done.
    fn serve(&mut self, node: &mut Node<'_>, now: Instant) -> bool {
        let mut busy = self.take(node, now);
        let nothing = Completion { tag: Tag::default(), status: Status::Done, step: 0 };
        loop {
            // What was submitted may have ended already: short chains do.
            node.poll_dma(&mut self.engine, now);
            let mut completions = [nothing; BATCH];
            let count = self.engine.poll(&mut completions);
            // A rank whose link has ended is out of its group, and has had its answer, before the node tries its chains again.
            let is_lost = completions[..count].iter().any(|completion| completion.status == Status::Hardware);
            if is_lost {
                self.take(node, now);
            }
            for completion in &completions[..count] {
                self.note(completion);
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

    /// Count a chain that failed: the node tries it again, so that nobody else need notice.
    fn note(&self, completion: &Completion) {
        if !matches!(completion.status, Status::Done | Status::Aborted) {
            tracing::debug!(tag = ?completion.tag, step = completion.step, why = %completion.status, "a chain failed");
            self.failed_chains.fetch_add(1, Ordering::Relaxed);
        }
    }

    /// Hand out answers, and what commands have waited for.
    fn answer(&mut self, node: &mut Node<'_>) -> bool {
        let mut busy = hand_out(node, &mut self.regions, &mut self.attached);
        if !self.stranded.is_empty() {
            let (regions, engine) = (&self.regions, &mut self.engine);
            self.stranded.retain(|&key| {
                let in_use = regions.contains(key);
                if !in_use {
                    engine.unmap(key);
                }
                in_use
            });
        }
        self.redo.take_back_ended(node, &mut self.engine);
        let mut at = 0;
        while at < self.attached.len() {
            let function = &mut self.attached[at];
            function.finish(node, &self.regions, &mut self.engine);
            match function.publish(&mut self.engine) {
                Ok(told) => {
                    busy |= told;
                    at += 1;
                }
                Err(ended) => self.detach(node, at, &ended),
            }
        }
        busy
    }

    /// Serve the rings, and do the shard's share of the engine's work; where nothing comes as packets, look for a while at
    /// nothing else. True if there may be more to do at once.
    pub(super) fn attend(&mut self, node: &mut Node<'_>, now: impl Fn() -> Instant) -> bool {
        // Once between two sleeps at least, and what one turn does is bounded: a rank that sees no beat sees no shard.
        self.attached.iter_mut().for_each(Attached::beat);
        let lingers = !self.attached.is_empty() && node.is_all_by_reference();
        for turn in 0..TURNS_PER_LOOK {
            let served = self.serve(node, now());
            // Between two chains the rings and the engine's other threads get what they wait for.
            let worked = self.engine.work();
            if !(served || worked || lingers && self.linger()) {
                // What was done in earlier turns may have left packets to send.
                return turn > 0;
            }
        }
        true
    }

    /// Let others run until there is news; false if they have had their turns and there is none.
    fn linger(&mut self) -> bool {
        for _ in 0..self.patience.yields {
            if self.has_news() {
                return true;
            }
            thread::yield_now();
        }
        self.has_news()
    }

    fn has_news(&mut self) -> bool {
        self.engine.has_news() || self.attached.iter_mut().any(Attached::has_news)
    }

    /// Sleep until there is something to do, or `timeout` has passed.
    pub(super) fn sleep(&mut self, port: &mut HostedPort, timeout: Option<Duration>) {
        self.doorbell.announce();
        self.engine.arm();
        self.attached.iter_mut().for_each(Attached::announce);
        if !self.has_news() {
            let full = self.attached.iter().any(Attached::is_full);
            let timeout =
                if full { Some(timeout.map_or(FULL_RING, |timeout| timeout.min(FULL_RING))) } else { timeout };
            port.wait(timeout);
        }
        self.doorbell.awake();
        self.attached.iter_mut().for_each(Attached::awake);
    }

    /// Tell whether nobody has attached.
    pub(super) fn is_empty(&self) -> bool {
        self.attached.is_empty()
    }
}

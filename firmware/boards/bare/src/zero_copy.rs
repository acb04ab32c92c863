//! Zero-copy contributions, on a board that shares memory with its ranks' machine through BARs.
//!
//! ```text
//!   rank --- dials --> broker (host) --- admission queue ---> ZeroCopyServer: checks the key, assigns a rank slot
//!   rank <==== rank slot: rings, and the arena of the rank's memory ====> ZeroCopyServer --> Node, Processor
//!   rank <---- redo memory, read-only ----------------------------------- Processor
//! ```
//!
//! The board gets no interrupts: it polls its rings in every step, and reports when the next step is due: soon while
//! there is work, and ever later when idle, so that ranks that compute cost nothing. Ranks cannot be woken either, and
//! poll ([`Features::SILENT`]).
//!
//! Invariants:
//! - memory is mapped only within the rank's own arena;
//! - a rank slot is released only once the engine no longer accesses it;
//! - a corrupt ring or a malformed entry of the admission queue ends the queue, which its function's status shows: no
//!   more ranks are attached in this incarnation. Attached ranks are served until the broker hangs up;
//! - the number of requests and entries processed in a step is bounded;
//! - a group's redo slots are zeroed when they are assigned.
//!
//! The redo slots of all groups are in one BAR, which the host hands to all ranks: a rank can read those of other
//! groups while these exist, and until a later group reuses them. The broker therefore attaches ranks of one user only;
//! groups that must not read each other's results need separate boards, or packets. Emulated boards give each group a
//! file of its own.

mod admission;
#[cfg(test)]
mod tests;

use admission::AdmissionQueue;
use core::sync::atomic::Ordering;
use core::time::Duration;
use heapless::{Deque, Vec};
use sumac_device::function::{self, FunctionError, Mappings};
use sumac_device::{AttachError, Node};
use sumac_hal::atomic::AtomicU64;
use sumac_hal::ctrl::{GroupConfig, Refusal, ZeroCopyRefusal};
use sumac_hal::dma::{Address, Capabilities, Completion, Engine, Processor, RegionKey, RegionTable, Span, Status, Tag};
use sumac_hal::ids::{BootId, ChildIndex, FunctionId, GroupId};
use sumac_hal::mmio::admission::{
    ADMISSION_DEPTH, ARENA_OFFSET_BYTES, AdmissionReply, AdmissionRequest, AttachRefusal, RANK_QUEUE_DEPTH,
    RANK_SLOTS_MAX,
};
use sumac_hal::mmio::{
    Bar, BarError, COMPLETION_WORDS, CompletionEntry, DeviceStatus, EntryStatus, Features, FunctionConfig, Queue,
    SUBMISSION_WORDS, bar_len_bytes,
};
use sumac_hal::ring::SharedRing;
use sumac_hal::time::Instant;

/// The maximum number of regions of all ranks.
const REGIONS: usize = 512;

/// The maximum number of regions of one rank: what a program allocates, and its bounce buffer.
const REGIONS_PER_RANK: usize = 128;

/// The engine's region of the redo slots, after those that the table assigns.
const REDO: RegionKey = RegionKey { index: REGIONS as u16, generation: 1 };

/// The maximum number of zero-copy children of all groups.
const LINKS: usize = 64;

/// The maximum number of steps of a chain.
const STEPS_MAX: u32 = 64;

/// The maximum number of chains with completions not yet polled.
const COMPLETIONS: usize = 64;

/// The maximum number of turns of rings and engine before packets are processed.
const TURNS: usize = 8;

/// Admission requests processed in a step, so that a broker that never stops asking does not starve ranks.
const REQUESTS_PER_TURN: usize = 4;

/// The capacity for answers that wait for room in a rank's ring: as many as the ring has entries.
const BACKLOG: usize = 2 * RANK_QUEUE_DEPTH as usize;

/// The poll interval of rings while ranks are attached and idle for a short time.
const POLL_INTERVAL: Duration = Duration::from_micros(50);

/// The poll interval grows with the idle time: it is this fraction of it.
const IDLE_FRACTION: u32 = 16;

/// The poll interval of the admission queue, and of rings after a long idle time.
const IDLE_POLL_INTERVAL: Duration = Duration::from_millis(10);

type Ring<const WORDS: usize> = SharedRing<'static, WORDS>;
type Rings = function::Function<Ring<SUBMISSION_WORDS>, Ring<COMPLETION_WORDS>, Deque<CompletionEntry, BACKLOG>>;
type Dma = Processor<'static, { REGIONS + 1 }, COMPLETIONS>;

/// The memory that a board shares with the host.
#[derive(Debug)]
pub struct ZeroCopyMemory {
    /// The admission queue: a function of two queues.
    pub admission: &'static [AtomicU64],
    /// The redo slots, which the host reads.
    pub redo: &'static [AtomicU64],
    /// The rank slots.
    pub rank_slots: Vec<&'static [AtomicU64], RANK_SLOTS_MAX>,
}

/// A child that may attach.
#[derive(Debug)]
struct Link {
    group: GroupId,
    child: ChildIndex,
    key: u64,
    function: FunctionId,
    attached: bool,
}

/// A rank in its slot.
#[derive(Debug)]
struct AttachedRank {
    rank_slot: u16,
    bar: Bar<'static>,
    queues: [Queue<'static>; 2],
    rings: Rings,
    heartbeat: u32,
}

impl AsMut<Rings> for AttachedRank {
    fn as_mut(&mut self) -> &mut Rings {
        &mut self.rings
    }
}

/// The mapping of a rank's arena into the engine.
struct ArenaMappings<'a> {
    arena: &'static [AtomicU64],
    engine: &'a mut Dma,
}

impl Mappings for ArenaMappings<'_> {
    type Memory = u64;
    type Error = FunctionError;

    fn find(&mut self, handle: u64) -> Result<Result<u64, EntryStatus>, FunctionError> {
        let is_there = handle.is_multiple_of(8) && handle < size_of_val(self.arena) as u64;
        Ok(if is_there { Ok(handle) } else { Err(EntryStatus::BadRegion) })
    }

    fn map(&mut self, key: RegionKey, start: u64, offset_bytes: u64, len_bytes: u64) -> Result<(), EntryStatus> {
        let end = start.checked_add(len_bytes).filter(|&end| end <= size_of_val(self.arena) as u64);
        let Some(end) = end.filter(|_| offset_bytes == 0) else { return Err(EntryStatus::OutOfBounds) };
        let words = &self.arena[start as usize / 8..(end as usize).div_ceil(8)];
        if self.engine.map(key, words) { Ok(()) } else { Err(EntryStatus::NoResources) }
    }

    fn unmap(&mut self, key: RegionKey) {
        self.engine.unmap(key);
    }
}

/// The tables of a [`ZeroCopyServer`]: put them in a `static` cell, not on a stack.
#[derive(Debug)]
pub struct ZeroCopyTables {
    // `None` until used: all-zero statics take no room in an image.
    engine: Option<Dma>,
    regions: Option<RegionTable<REGIONS>>,
    ranks: Vec<AttachedRank, RANK_SLOTS_MAX>,
}

impl ZeroCopyTables {
    /// Return empty tables.
    pub const fn new() -> Self {
        Self { engine: None, regions: None, ranks: Vec::new() }
    }
}

impl Default for ZeroCopyTables {
    fn default() -> Self {
        Self::new()
    }
}

/// Serves the zero-copy ranks of a board.
#[derive(Debug)]
pub struct ZeroCopyServer {
    engine: &'static mut Dma,
    regions: &'static mut RegionTable<REGIONS>,
    ranks: &'static mut Vec<AttachedRank, RANK_SLOTS_MAX>,
    memory: ZeroCopyMemory,
    boot_id: BootId,
    admission: AdmissionQueue,
    links: Vec<Link, LINKS>,
    next_function: u32,
    /// Rank slots whose rank has gone and whose memory is still in use.
    draining: Vec<(u16, FunctionId), RANK_SLOTS_MAX>,
    is_busy: bool,
    /// The last time that rings or the admission queue had an entry.
    active_at: Instant,
}

/// Create a function in memory that may hold an old one.
fn function(
    memory: &'static [AtomicU64],
    depth: u32,
    boot_id: BootId,
    dma: Capabilities,
) -> Result<(Bar<'static>, [Queue<'static>; 2]), BarError> {
    let needed = bar_len_bytes(2, depth);
    let too_short = BarError::TooShort { needed, len_bytes: size_of_val(memory) };
    let words = memory.get(..needed / 8).ok_or(too_short)?;
    words.iter().for_each(|word| word.store(0, Ordering::Relaxed));
    let features = Features::all();
    let bar = Bar::create(words, &FunctionConfig { boot_id, features, queues: 2, depth, dma })?;
    match (bar.queue(0), bar.queue(1)) {
        (Some(admin), Some(data)) => Ok((bar, [admin, data])),
        _ => Err(BarError::Queues { queues: 2, depth }),
    }
}

impl ZeroCopyServer {
    /// Open the admission queue.
    ///
    /// # Errors
    /// [`BarError`] if its memory is too short or misaligned.
    ///
    /// # Panics
    /// If the tables are in use.
    pub fn open(
        tables: &'static mut ZeroCopyTables,
        memory: ZeroCopyMemory,
        boot_id: BootId,
    ) -> Result<Self, BarError> {
        let ZeroCopyTables { engine, regions, ranks } = tables;
        let (engine, regions) =
            (engine.insert(Dma::new(STEPS_MAX)), regions.insert(RegionTable::new(REGIONS_PER_RANK)));
        assert!(ranks.is_empty() && engine.map_local(REDO, memory.redo), "the tables are in use");
        let (bar, [queue, _]) = function(memory.admission, ADMISSION_DEPTH, boot_id, *engine.capabilities())?;
        let admission = AdmissionQueue::new(bar, queue);
        Ok(Self {
            engine,
            regions,
            ranks,
            memory,
            boot_id,
            admission,
            links: Vec::new(),
            next_function: 0,
            draining: Vec::new(),
            is_busy: false,
            active_at: Instant::ZERO,
        })
    }

    /// Return the memory of the redo slots and the engine's capabilities, for
    /// [`ZeroCopyStorage`](sumac_device::ZeroCopyStorage).
    pub fn redo_memory(&self) -> (Span, Capabilities) {
        let address = Address { region: REDO, offset_bytes: 0 };
        (Span { address, len_bytes: size_of_val(self.memory.redo) as u64 }, *self.engine.capabilities())
    }

    /// Reserve what a new group's zero-copy children need, and let them attach.
    pub(crate) fn reserve(&mut self, node: &mut Node<'_>, config: &GroupConfig) -> Result<(), Refusal> {
        // A group of that number may have been released since the last step.
        self.links.retain(|link| link.group != config.group);
        let mut owners = Vec::<_, LINKS>::new();
        for child in config.zero_copy.iter() {
            self.next_function = self.next_function.wrapping_add(1);
            let owner = (child, FunctionId(self.next_function));
            owners.push(owner).map_err(|_| Refusal::NoZeroCopy(ZeroCopyRefusal::Groups))?;
        }
        if owners.len() > self.links.capacity() - self.links.len() {
            return Err(Refusal::NoZeroCopy(ZeroCopyRefusal::Groups));
        }
        node.attach(config.group, &owners).map_err(|error| match error {
            AttachError::NoRoom { memory_bytes, .. } => Refusal::NoRedoMemory { need: memory_bytes as u64 },
            AttachError::Steps { .. } | AttachError::Chunk { .. } => Refusal::NoZeroCopy(ZeroCopyRefusal::Engine),
            _ => Refusal::NoZeroCopy(ZeroCopyRefusal::Groups),
        })?;
        // Ranks of this group must find neither records nor results of earlier groups.
        if let Some((start, slot_len_bytes, slots)) = node.redo_slots(config.group) {
            let first = start as usize / 8;
            let words = self.memory.redo.get(first..first + (slot_len_bytes * slots).div_ceil(8));
            words.into_iter().flatten().for_each(|word| word.store(0, Ordering::Release));
        }
        let (group, epoch) = (config.group, config.epoch);
        let links = owners.into_iter().map(|(child, function)| {
            let key = config.secret.child_key(group, epoch, child);
            Link { group, child, key, function, attached: false }
        });
        self.links.extend(links);
        Ok(())
    }

    /// Process admission requests and ring entries, and drop the children of released groups. Called before the node is
    /// polled.
    pub(crate) fn poll_requests(&mut self, node: &mut Node<'_>, now: Instant) {
        self.links.retain(|link| node.has_group(link.group));
        self.admission.beat();
        for _ in 0..REQUESTS_PER_TURN {
            let Some(request) = self.admission.next_request() else { break };
            self.active_at = now;
            match request {
                AdmissionRequest::Attach { rank_slot, group, child, key } => {
                    let answer = match self.attach(node, rank_slot, (group, child, key)) {
                        Ok(answer) => answer,
                        Err(reason) => AdmissionReply::Refused { rank_slot, reason },
                    };
                    self.admission.reply(answer);
                }
                AdmissionRequest::Detach { rank_slot } => {
                    if let Some(at) = self.ranks.iter().position(|rank| rank.rank_slot == rank_slot) {
                        self.detach(at);
                    }
                }
                _ => self.admission.end(),
            }
        }
        self.take_submissions(node, now);
        for rank in self.ranks.iter_mut() {
            rank.heartbeat = rank.heartbeat.wrapping_add(1);
            rank.bar.set_heartbeat(rank.heartbeat);
        }
    }

    // A stack frame of its own: the rank's state is large and is moved into the table.
    #[inline(never)]
    fn attach(
        &mut self,
        node: &Node<'_>,
        rank_slot: u16,
        (group, child, key): (GroupId, ChildIndex, u64),
    ) -> Result<AdmissionReply, AttachRefusal> {
        let link = self.links.iter_mut().find(|link| (link.group, link.child, link.key) == (group, child, key));
        let link = link.ok_or(AttachRefusal::UnknownChild)?;
        let (offset_bytes, slot_len_bytes, slots) = node.redo_slots(group).ok_or(AttachRefusal::UnknownChild)?;
        if link.attached {
            return Err(AttachRefusal::AlreadyAttached);
        }
        let is_taken = self.ranks.iter().any(|rank| rank.rank_slot == rank_slot)
            || self.draining.iter().any(|&(draining, _)| draining == rank_slot);
        let memory = self.memory.rank_slots.get(usize::from(rank_slot)).copied().filter(|_| !is_taken);
        let memory = memory.ok_or(AttachRefusal::NoMemory)?;
        let made = function(memory, RANK_QUEUE_DEPTH, self.boot_id, *self.engine.capabilities());
        let (bar, queues) = made.map_err(|_| AttachRefusal::NoMemory)?;
        let [admin, data] = queues.map(|queue| (queue.submissions, queue.completions));
        let rings = Rings::new(link.function, admin, data, Deque::new());
        self.ranks
            .push(AttachedRank { rank_slot, bar, queues, rings, heartbeat: 0 })
            .map_err(|_| AttachRefusal::NoMemory)?;
        link.attached = true;
        let (slot_len_bytes, slots) = (slot_len_bytes as u32, slots as u32);
        Ok(AdmissionReply::Attached { rank_slot, offset_bytes, slot_len_bytes, slots })
    }

    /// A rank has gone: its memory is unmapped after its last use, and then its slot is free.
    #[inline(never)]
    fn detach(&mut self, at: usize) {
        let AttachedRank { rank_slot, bar, rings, .. } = self.ranks.swap_remove(at);
        bar.set_status(DeviceStatus::FAILED);
        self.regions.deregister_all(rings.id());
        self.unmap_gone();
        // The table has room for every rank slot.
        let _ = self.draining.push((rank_slot, rings.id()));
    }

    /// Unmap regions that are no longer registered.
    fn unmap_gone(&mut self) {
        let regions = &*self.regions;
        self.engine.retain(|key| key == REDO || regions.contains(key));
    }

    /// Release the rank slots whose memory is no longer in use.
    fn free_rank_slots(&mut self) {
        if self.draining.is_empty() {
            return;
        }
        self.unmap_gone();
        let Self { regions, draining, admission, .. } = self;
        draining.retain(|&(rank_slot, owner)| {
            let is_used = regions.owned_by(owner).next().is_some();
            if !is_used {
                admission.reply(AdmissionReply::Detached { rank_slot });
            }
            is_used
        });
    }

    fn take_submissions(&mut self, node: &mut Node<'_>, now: Instant) -> bool {
        let mut any = false;
        let mut at = 0;
        while at < self.ranks.len() {
            let rank = &mut self.ranks[at];
            let mut mappings = ArenaMappings::of(&self.memory, rank.rank_slot, self.engine);
            match rank.rings.poll_submissions(node, self.regions, &mut mappings, now) {
                Ok(taken) => {
                    any |= taken;
                    at += 1;
                }
                Err(_) => self.detach(at),
            }
        }
        any
    }

    /// Advance the submitted operations as far as possible, and answer the ranks.
    pub(crate) fn serve(&mut self, node: &mut Node<'_>, now: Instant) {
        for turn in 0..TURNS {
            let mut busy = turn > 0 && self.take_submissions(node, now);
            busy |= self.reduce(node, now);
            busy |= self.answer(node);
            self.is_busy = busy;
            if !busy {
                break;
            }
            self.active_at = now;
        }
        self.free_rank_slots();
        self.admission.publish();
    }

    fn reduce(&mut self, node: &mut Node<'_>, now: Instant) -> bool {
        let mut busy = false;
        let nothing = Completion { tag: Tag::default(), status: Status::Done, step: 0 };
        loop {
            node.poll_dma(self.engine, now);
            let mut completions = [nothing; COMPLETIONS];
            let count = self.engine.poll(&mut completions);
            completions[..count].iter().for_each(|completion| node.handle_completion(completion));
            if count == 0 {
                return busy;
            }
            busy = true;
        }
    }

    fn answer(&mut self, node: &mut Node<'_>) -> bool {
        let mut busy = function::dispatch_answers(node, self.regions, self.ranks);
        if busy && !self.draining.is_empty() {
            // Region indices that were just released may be reused at once.
            self.unmap_gone();
        }
        let mut at = 0;
        while at < self.ranks.len() {
            let rank = &mut self.ranks[at];
            let mut mappings = ArenaMappings::of(&self.memory, rank.rank_slot, self.engine);
            rank.rings.complete_commands(node, self.regions, &mut mappings);
            let queues = &rank.queues;
            let published = rank.rings.publish(|notice| {
                // The rank cannot be woken; setting the word spares it a sleep.
                let queue = &queues[notice.queue as usize];
                let _ = (notice.urgent || queue.host_threshold.is_reached(notice.answered)) && queue.host_bell.ring();
            });
            match published {
                Ok(published) => {
                    busy |= published;
                    at += 1;
                }
                Err(_) => self.detach(at),
            }
        }
        busy
    }

    /// Return when to step again if nothing arrives.
    pub(crate) fn poll_at(&self, now: Instant) -> Instant {
        match (self.is_busy, self.ranks.is_empty() && self.draining.is_empty()) {
            (true, _) => now,
            (false, false) => now + ((now - self.active_at) / IDLE_FRACTION).clamp(POLL_INTERVAL, IDLE_POLL_INTERVAL),
            (false, true) => now + IDLE_POLL_INTERVAL,
        }
    }
}

impl<'a> ArenaMappings<'a> {
    fn of(memory: &ZeroCopyMemory, rank_slot: u16, engine: &'a mut Dma) -> Self {
        let arena =
            memory.rank_slots.get(usize::from(rank_slot)).and_then(|rank_slot| rank_slot.get(ARENA_OFFSET_BYTES / 8..));
        Self { arena: arena.unwrap_or_default(), engine }
    }
}

//! Ranks that contribute by reference, on a board that shares memory with their machine across BARs.
//!
//! ```text
//!   rank --- dials --> broker (host) --- desk ---> Bus: knows the keys, gives a seat
//!   rank <==== seat: rings, and the arena that the rank's memory is in ====> Bus --> Node, Processor
//!   rank <---- redo memory, to read ----------------------------------------- Processor
//! ```
//!
//! Nothing interrupts the board: it looks at its rings whenever it comes round, and it says how soon that is to
//! be: soon while there is work, and after a pause later and later, so that ranks that compute cost nothing. A rank can't be
//! woken either, and looks again before long ([`Features::SILENT`]).
//!
//! Invariants:
//! - memory is mapped within the rank's own arena only;
//! - a seat is given back when the engine has nothing more to do with it;
//! - a desk whose rings are broken, or an entry that is none, ends the desk, which its function shows: nobody else is
//!   seated in this life. Who is seated is served until the broker hangs up;
//! - what desk and rings bring at a time is bounded;
//! - a group's redo slots are zeroed when it gets them.
//!
//! The redo slots of all groups are in one BAR, which the host hands to all ranks: a rank can read those of other groups, as
//! long as these are there and until a later group gets the place. So the broker seats ranks of one user only; groups
//! that must not read each other's sums take boards of their own, or packets. Emulated boards give each group a file of its
//! own.

#[cfg(test)]
mod tests;

use core::sync::atomic::{AtomicU64, Ordering};
use core::time::Duration;
use heapless::{Deque, Vec};
use sumac_device::function::{self, FunctionEnd, Mappings};
use sumac_device::{AttachError, Node};
use sumac_hal::ctrl::{GroupConfig, NoBus, Refusal};
use sumac_hal::dma::{Address, Capabilities, Completion, Engine, Processor, RegionKey, RegionTable, Span, Status, Tag};
use sumac_hal::ids::{BootId, ChildIndex, FunctionId, GroupId};
use sumac_hal::mmio::desk::{
    ARENA_OFFSET_BYTES, AttachRefusal, DESK_DEPTH, DeskAnswer, DeskRequest, SEAT_DEPTH, SEATS_MAX,
};
use sumac_hal::mmio::{
    Bar, BarError, COMPLETION_WORDS, CompletionEntry, DeviceStatus, EntryStatus, Features, FunctionConfig, Queue,
    SUBMISSION_WORDS, bar_len_bytes,
};
use sumac_hal::ring::{Consumer, Producer, SharedRing};
use sumac_hal::time::Instant;

/// Regions of all ranks.
const REGIONS: usize = 512;

/// Regions of one rank: what a program allocates, and its bounce buffer.
const REGIONS_PER_RANK: usize = 128;

/// The redo slots' place among the engine's regions, behind those that the table gives out.
const REDO: RegionKey = RegionKey { index: REGIONS as u16, generation: 1 };

/// Children by reference of all groups.
const LINKS: usize = 64;

/// The longest chain.
const STEPS_MAX: u32 = 64;

/// Chains whose completions wait.
const COMPLETIONS: usize = 64;

/// How often rings and engine get their turn before packets do.
const TURNS: usize = 8;

/// Requests taken from the desk at a time: a broker that never stops asking is not the only one there.
const REQUESTS_PER_TURN: usize = 4;

/// Places for answers that wait for one in a rank's ring: as many as that has.
const BACKLOG: usize = 2 * SEAT_DEPTH as usize;

/// How soon to look at rings again while ranks are seated and nothing is under way.
const LOOK: Duration = Duration::from_micros(50);

/// The part of a pause that whoever ends it waits at most: the longer nothing has come, the later is the next look.
const PAUSE_PART: u32 = 16;

/// How soon to look at the desk, and at rings after a long pause.
const DESK_LOOK: Duration = Duration::from_millis(10);

type Ring<const WORDS: usize> = SharedRing<'static, WORDS>;
type Rings = function::Function<Ring<SUBMISSION_WORDS>, Ring<COMPLETION_WORDS>, Deque<CompletionEntry, BACKLOG>>;
type Dma = Processor<'static, { REGIONS + 1 }, COMPLETIONS>;

/// The memory that a board shares with the host.
#[derive(Debug)]
pub struct BusMemory {
    /// Of the desk: a function of two queues.
    pub desk: &'static [AtomicU64],
    /// Of redo slots: the host reads it.
    pub redo: &'static [AtomicU64],
    /// Of ranks.
    pub seats: Vec<&'static [AtomicU64], SEATS_MAX>,
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

/// A rank in its seat.
#[derive(Debug)]
struct Seated {
    seat: u16,
    bar: Bar<'static>,
    queues: [Queue<'static>; 2],
    rings: Rings,
    beat: u32,
}

impl AsMut<Rings> for Seated {
    fn as_mut(&mut self) -> &mut Rings {
        &mut self.rings
    }
}

/// A rank's memory as this board maps it: places of its arena, and the engine.
struct Places<'a> {
    arena: &'static [AtomicU64],
    engine: &'a mut Dma,
}

impl Mappings for Places<'_> {
    type Memory = u64;
    type End = FunctionEnd;

    fn find(&mut self, handle: u64) -> Result<Result<u64, EntryStatus>, FunctionEnd> {
        let is_there = handle.is_multiple_of(8) && handle < size_of_val(self.arena) as u64;
        Ok(if is_there { Ok(handle) } else { Err(EntryStatus::BadRegion) })
    }

    fn map(&mut self, key: RegionKey, start: u64, offset_bytes: u64, len_bytes: u64) -> Result<(), EntryStatus> {
        let end = start.checked_add(len_bytes).filter(|&end| end <= size_of_val(self.arena) as u64);
        let Some(end) = end.filter(|_| offset_bytes == 0) else { return Err(EntryStatus::OutOfBounds) };
        let words = &self.arena[start as usize / 8..(end as usize).div_ceil(8)];
        if self.engine.map(key, words) { Ok(()) } else { Err(EntryStatus::NoRoom) }
    }

    fn unmap(&mut self, key: RegionKey) {
        self.engine.unmap(key);
    }
}

/// The desk as the board has it.
#[derive(Debug)]
struct Desk {
    bar: Bar<'static>,
    requests: Consumer<Ring<SUBMISSION_WORDS>, SUBMISSION_WORDS>,
    answers: Producer<Ring<COMPLETION_WORDS>, COMPLETION_WORDS>,
    /// As many as can be asked for and not answered, and one for each seat that ends unasked.
    pending: Deque<DeskAnswer, { 2 * SEATS_MAX + DESK_DEPTH as usize }>,
    is_over: bool,
    beat: u32,
}

/// What a bus works in: put it in a `static` cell, not on a stack.
#[derive(Debug)]
pub struct BusTables {
    // `None` until they are used: what is all zeros takes no room in an image.
    engine: Option<Dma>,
    regions: Option<RegionTable<REGIONS>>,
    seated: Vec<Seated, SEATS_MAX>,
}

impl BusTables {
    /// Return empty tables.
    pub const fn new() -> Self {
        Self { engine: None, regions: None, seated: Vec::new() }
    }
}

impl Default for BusTables {
    fn default() -> Self {
        Self::new()
    }
}

/// All that a board does by reference.
#[derive(Debug)]
pub struct Bus {
    engine: &'static mut Dma,
    regions: &'static mut RegionTable<REGIONS>,
    seated: &'static mut Vec<Seated, SEATS_MAX>,
    memory: BusMemory,
    boot_id: BootId,
    desk: Desk,
    links: Vec<Link, LINKS>,
    next_function: u32,
    /// Seats whose rank is gone, and whose memory is still in use.
    leaving: Vec<(u16, FunctionId), SEATS_MAX>,
    is_busy: bool,
    /// When rings or desk had something last.
    news_at: Instant,
}

/// Make a function in memory that may hold an older one.
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

impl Bus {
    /// Open the desk.
    ///
    /// # Errors
    /// [`BarError`] if its memory is too short or lies askew.
    ///
    /// # Panics
    /// If the tables have been in use.
    pub fn open(tables: &'static mut BusTables, memory: BusMemory, boot_id: BootId) -> Result<Self, BarError> {
        let BusTables { engine, regions, seated } = tables;
        let (engine, regions) =
            (engine.insert(Dma::new(STEPS_MAX)), regions.insert(RegionTable::new(REGIONS_PER_RANK)));
        assert!(seated.is_empty() && engine.map_local(REDO, memory.redo), "the tables are in use");
        let (bar, [queue, _]) = function(memory.desk, DESK_DEPTH, boot_id, *engine.capabilities())?;
        let desk = Desk {
            bar,
            requests: Consumer::new(queue.submissions),
            answers: Producer::new(queue.completions),
            pending: Deque::new(),
            is_over: false,
            beat: 0,
        };
        Ok(Self {
            engine,
            regions,
            seated,
            memory,
            boot_id,
            desk,
            links: Vec::new(),
            next_function: 0,
            leaving: Vec::new(),
            is_busy: false,
            news_at: Instant::ZERO,
        })
    }

    /// Return the memory of redo slots, and what the engine can do, as [`References`](sumac_device::References) has them.
    pub fn redo_memory(&self) -> (Span, Capabilities) {
        let address = Address { region: REDO, offset_bytes: 0 };
        (Span { address, len_bytes: size_of_val(self.memory.redo) as u64 }, *self.engine.capabilities())
    }

    /// Reserve what a new group's children by reference need, and let them attach.
    pub(crate) fn expect(&mut self, node: &mut Node<'_>, config: &GroupConfig) -> Result<(), Refusal> {
        // A group of that number may have gone since the last look.
        self.links.retain(|link| link.group != config.group);
        let mut owners = Vec::<_, LINKS>::new();
        for child in config.by_reference.iter() {
            self.next_function = self.next_function.wrapping_add(1);
            let owner = (child, FunctionId(self.next_function));
            owners.push(owner).map_err(|_| Refusal::NoBus(NoBus::Groups))?;
        }
        if owners.len() > self.links.capacity() - self.links.len() {
            return Err(Refusal::NoBus(NoBus::Groups));
        }
        node.attach(config.group, &owners).map_err(|error| match error {
            AttachError::NoRoom { memory_bytes, .. } => Refusal::NoRedoMemory { need: memory_bytes as u64 },
            AttachError::Steps { .. } | AttachError::Chunk { .. } => Refusal::NoBus(NoBus::Engine),
            _ => Refusal::NoBus(NoBus::Groups),
        })?;
        // Ranks of this group find only what is of this group, neither records nor results of those before.
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

    /// Serve desk and rings, and forget the children of groups that are gone. Before the node looks at the time.
    pub(crate) fn take(&mut self, node: &mut Node<'_>, now: Instant) {
        self.links.retain(|link| node.has_group(link.group));
        self.desk.beat = self.desk.beat.wrapping_add(1);
        self.desk.bar.set_heartbeat(self.desk.beat);
        for _ in 0..REQUESTS_PER_TURN {
            let Some(request) = self.desk.hear() else { break };
            self.news_at = now;
            match request {
                DeskRequest::Seat { seat, group, child, key } => {
                    let answer = match self.seat(node, seat, (group, child, key)) {
                        Ok(answer) => answer,
                        Err(reason) => DeskAnswer::Refused { seat, reason },
                    };
                    self.desk.tell(answer);
                }
                DeskRequest::Leave { seat } => {
                    if let Some(at) = self.seated.iter().position(|seated| seated.seat == seat) {
                        self.unseat(at);
                    }
                }
                _ => self.desk.end(),
            }
        }
        self.take_submissions(node, now);
        for seated in self.seated.iter_mut() {
            seated.beat = seated.beat.wrapping_add(1);
            seated.bar.set_heartbeat(seated.beat);
        }
    }

    // A frame of its own: what a rank is kept in is large, and is moved to its place.
    #[inline(never)]
    fn seat(
        &mut self,
        node: &Node<'_>,
        seat: u16,
        (group, child, key): (GroupId, ChildIndex, u64),
    ) -> Result<DeskAnswer, AttachRefusal> {
        let link = self.links.iter_mut().find(|link| (link.group, link.child, link.key) == (group, child, key));
        let link = link.ok_or(AttachRefusal::Stranger)?;
        let (offset_bytes, slot_len_bytes, slots) = node.redo_slots(group).ok_or(AttachRefusal::Stranger)?;
        if link.attached {
            return Err(AttachRefusal::Attached);
        }
        let is_taken = self.seated.iter().any(|seated| seated.seat == seat)
            || self.leaving.iter().any(|&(leaving, _)| leaving == seat);
        let memory = self.memory.seats.get(usize::from(seat)).copied().filter(|_| !is_taken);
        let memory = memory.ok_or(AttachRefusal::NoRoom)?;
        let made = function(memory, SEAT_DEPTH, self.boot_id, *self.engine.capabilities());
        let (bar, queues) = made.map_err(|_| AttachRefusal::NoRoom)?;
        let [admin, data] = queues.map(|queue| (queue.submissions, queue.completions));
        let rings = Rings::new(link.function, admin, data, Deque::new());
        self.seated.push(Seated { seat, bar, queues, rings, beat: 0 }).map_err(|_| AttachRefusal::NoRoom)?;
        link.attached = true;
        let (slot_len_bytes, slots) = (slot_len_bytes as u32, slots as u32);
        Ok(DeskAnswer::Seated { seat, offset_bytes, slot_len_bytes, slots })
    }

    /// A rank is gone: its memory goes with the last use, and then its seat is free.
    #[inline(never)]
    fn unseat(&mut self, at: usize) {
        let Seated { seat, bar, rings, .. } = self.seated.swap_remove(at);
        bar.set_status(DeviceStatus::FAILED);
        self.regions.deregister_all(rings.id());
        self.unmap_gone();
        // There are as many places as seats.
        let _ = self.leaving.push((seat, rings.id()));
    }

    /// Have the engine reach no region that is gone.
    fn unmap_gone(&mut self) {
        let regions = &*self.regions;
        self.engine.retain(|key| key == REDO || regions.contains(key));
    }

    /// Free the seats whose memory nobody uses any more.
    fn free_seats(&mut self) {
        if self.leaving.is_empty() {
            return;
        }
        self.unmap_gone();
        let Self { regions, leaving, desk, .. } = self;
        leaving.retain(|&(seat, owner)| {
            let is_used = regions.of(owner).next().is_some();
            if !is_used {
                desk.tell(DeskAnswer::Left { seat });
            }
            is_used
        });
    }

    fn take_submissions(&mut self, node: &mut Node<'_>, now: Instant) -> bool {
        let mut any = false;
        let mut at = 0;
        while at < self.seated.len() {
            let seated = &mut self.seated[at];
            let mut places = Places::of(&self.memory, seated.seat, self.engine);
            match seated.rings.take(node, self.regions, &mut places, now) {
                Ok(taken) => {
                    any |= taken;
                    at += 1;
                }
                Err(_) => self.unseat(at),
            }
        }
        any
    }

    /// Do what ranks have submitted, as far as it goes, and answer them.
    pub(crate) fn serve(&mut self, node: &mut Node<'_>, now: Instant) {
        for turn in 0..TURNS {
            let mut busy = turn > 0 && self.take_submissions(node, now);
            busy |= self.reduce(node, now);
            busy |= self.answer(node);
            self.is_busy = busy;
            if !busy {
                break;
            }
            self.news_at = now;
        }
        self.free_seats();
        self.desk.publish();
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
        let mut busy = function::hand_out(node, self.regions, self.seated);
        if busy && !self.leaving.is_empty() {
            // The places of regions that have just seen their last use may be given out again at once.
            self.unmap_gone();
        }
        let mut at = 0;
        while at < self.seated.len() {
            let seated = &mut self.seated[at];
            let mut places = Places::of(&self.memory, seated.seat, self.engine);
            seated.rings.finish(node, self.regions, &mut places);
            let queues = &seated.queues;
            let published = seated.rings.publish(|told| {
                // It can't be woken; a word that says that it was spares it a sleep.
                let queue = &queues[told.queue as usize];
                let _ = (told.urgent || queue.host_wants.is_reached(told.answered)) && queue.host_bell.ring();
            });
            match published {
                Ok(told) => {
                    busy |= told;
                    at += 1;
                }
                Err(_) => self.unseat(at),
            }
        }
        busy
    }

    /// Return when to come round again if nothing arrives.
    pub(crate) fn come_again(&self, now: Instant) -> Instant {
        match (self.is_busy, self.seated.is_empty() && self.leaving.is_empty()) {
            (true, _) => now,
            (false, false) => now + ((now - self.news_at) / PAUSE_PART).clamp(LOOK, DESK_LOOK),
            (false, true) => now + DESK_LOOK,
        }
    }
}

impl<'a> Places<'a> {
    fn of(memory: &BusMemory, seat: u16, engine: &'a mut Dma) -> Self {
        let arena = memory.seats.get(usize::from(seat)).and_then(|seat| seat.get(ARENA_OFFSET_BYTES / 8..));
        Self { arena: arena.unwrap_or_default(), engine }
    }
}

impl Desk {
    /// Take the next request, if its answer surely has a place.
    fn hear(&mut self) -> Option<DeskRequest> {
        if self.is_over || self.pending.iter().len() + SEATS_MAX >= self.pending.capacity() {
            return None;
        }
        let request = self.requests.pop().ok().map(|words| words.map(|words| DeskRequest::parse(&words)));
        match request {
            Some(None) => None,
            Some(Some(Some(request))) => Some(request),
            _ => {
                self.end();
                None
            }
        }
    }

    /// Hear nothing more, and show it.
    fn end(&mut self) {
        self.is_over = true;
        self.bar.set_status(DeviceStatus::FAILED);
    }

    fn tell(&mut self, answer: DeskAnswer) {
        // `hear` keeps places for answers, and for all seats.
        if self.pending.push_back(answer).is_err() {
            self.end();
        }
    }

    fn publish(&mut self) {
        while let Some(answer) = self.pending.front() {
            match self.answers.push(&answer.emit()) {
                Ok(true) => drop(self.pending.pop_front()),
                Ok(false) => return,
                Err(_) => return self.end(),
            }
        }
    }
}

//! A device with its engine and functions, as the emulated board serves them: rings, regions, and entries that wait for
//! the node's window. No threads, no sockets: attached ranks are notified directly.
//!
//! Invariant: unanswered chunks never exceed the completion ring.

use super::draw::{CrashPoint, Setup};
use super::engine::{REDO, REGIONS, SimEngine};
use crate::sim::options::Options;
use crate::sim::wiring::{Wiring, group_id, slots_per_shard};
use std::collections::VecDeque;
use std::sync::Arc;
use sumac_device::{BufferRef, Child, Group, Hop, Node, NodeConfig, RedoSlot, Slot, Storage, ZeroCopyStorage};
use sumac_hal::ctrl::{ChildMask, GroupConfig, Request, Response, TreeConfig};
use sumac_hal::dma::{Address, Completion, DmaMemory, Engine, RegionKey, RegionTable, Span, Status, Tag};
use sumac_hal::emu::dma::HeapMemory;
use sumac_hal::ids::{BootId, ChildIndex, ChunkNo, Epoch, FunctionId};
use sumac_hal::mmio::{
    COMPLETION_WORDS, CompletionEntry, Contribution, EntryStatus, SUBMISSION_WORDS, SubmissionEntry,
};
use sumac_hal::ring::{Consumer, OwnedRing, Producer};
use sumac_hal::shard::Shard;
use sumac_hal::time::Instant;
use sumac_hal::wire::pack_op;

/// Groups that a device has room for: one active, and others with their last chains in flight.
const ROOM: usize = 4;

/// Trees that it has room for: one per incarnation of the group.
const TREES: usize = 16;

/// The rank's and the device's ends of a function's rings.
pub(super) type Submissions = OwnedRing<SUBMISSION_WORDS>;
pub(super) type Completions = OwnedRing<COMPLETION_WORDS>;

/// The tables of one incarnation of a device.
pub(super) struct Tables {
    groups: Vec<Option<Group>>,
    trees: Vec<Option<TreeConfig>>,
    children: Vec<Child>,
    hops: Vec<Hop>,
    slots: Vec<Slot>,
    bytes: Vec<u8>,
    redo: Vec<RedoSlot>,
    buffers: Vec<BufferRef>,
}

/// Return the maximum number of children of a node.
fn widest(options: &Options) -> u16 {
    let wiring = Wiring::new(options, 0, options.devices());
    wiring.nodes.iter().map(|node| node.children).max().unwrap_or(1)
}

impl Tables {
    pub(super) fn new(options: &Options) -> Self {
        let (slots, children) = (usize::from(slots_per_shard(options)), widest(options));
        let stages = options.order(0).stages(children);
        Self {
            groups: (0..ROOM).map(|_| None).collect(),
            trees: vec![None; TREES],
            children: vec![Child::EMPTY; ROOM * usize::from(children)],
            hops: (0..ROOM).map(|_| Hop::EMPTY).collect(),
            slots: vec![Slot::EMPTY; ROOM * slots],
            bytes: vec![0; ROOM * slots * stages * usize::from(options.chunk_len_bytes)],
            redo: vec![RedoSlot::EMPTY; ROOM * slots],
            buffers: vec![BufferRef::EMPTY; ROOM * slots * usize::from(children)],
        }
    }
}

/// Return the redo memory of a device, in bytes.
pub(super) fn redo_len_bytes(options: &Options) -> usize {
    let slot = Node::redo_slot_len_bytes(options.order(0), widest(options), options.chunk_len_bytes);
    ROOM * usize::from(slots_per_shard(options)) * slot
}

/// The redo slots of a group: offset, length of each, number.
pub(super) type Place = (u64, usize, usize);

/// A notice for a rank.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Notice {
    /// Its completion ring has entries.
    Answers,
    /// Its fence is complete.
    Fenced,
}

/// A rank that has attached, in one of the group's incarnations.
pub(super) struct Function {
    pub(super) id: FunctionId,
    pub(super) rank: usize,
    submissions: Consumer<Submissions, SUBMISSION_WORDS>,
    completions: Producer<Completions, COMPLETION_WORDS>,
    /// A contribution that the node's window does not admit yet.
    parked: Option<Contribution>,
    /// Chunks taken and not answered.
    outstanding: u32,
    /// Completions to publish.
    pending: VecDeque<CompletionEntry>,
    memory: Vec<RegionKey>,
    epoch: Epoch,
    /// The fence it has requested: not executed, or not answered.
    asks_fence: bool,
    is_fencing: bool,
    /// Regions being deregistered that are still in use.
    leaving: Vec<RegionKey>,
}

/// What a device did in one turn of its loop.
#[derive(Debug, Default)]
pub(super) struct Served {
    /// Notices for ranks.
    pub(super) notices: Vec<(FunctionId, usize, Notice)>,
    /// Entries waiting for the window or for ring space.
    pub(super) parked: u64,
    /// Entries taken.
    pub(super) taken: u64,
    /// Answers with and without a delivered chunk.
    pub(super) answered: u64,
    pub(super) refused: u64,
    /// It made progress: there may be more to do at once.
    pub(super) is_busy: bool,
    /// It died during the turn.
    pub(super) has_died: bool,
}

/// A running device.
pub(super) struct Board<'m> {
    pub(super) node: Node<'m>,
    pub(super) engine: SimEngine,
    pub(super) regions: Box<RegionTable<REGIONS>>,
    functions: Vec<Function>,
    /// Regions of detached functions that are still in use.
    orphaned: Vec<RegionKey>,
    redo: Arc<HeapMemory>,
    next: u32,
}

impl<'m> Board<'m> {
    pub(super) fn boot(
        options: &Options,
        setup: &Setup,
        (boot_id, incarnations, tables): (u64, u64, &'m mut Tables),
        redo: &Arc<HeapMemory>,
        failing: std::collections::BTreeMap<u64, usize>,
    ) -> Self {
        let engine = SimEngine::new(setup, boot_id, Arc::clone(redo), failing);
        let config = NodeConfig {
            shard: Shard::new(0, 1).expect("one"),
            boot_id: BootId(boot_id),
            max_packet_len_bytes: 65_507,
            receive_buffer_bytes: options.link.receive_queue_bytes.unwrap_or(1 << 20),
        };
        let Tables { groups, trees, children, hops, slots, bytes, redo: redo_slots, buffers } = tables;
        let memory = Span { address: Address { region: REDO, offset_bytes: 0 }, len_bytes: redo.len_bytes() as u64 };
        let buffers = ZeroCopyStorage { redo: redo_slots, buffers, memory, capabilities: *engine.capabilities() };
        let storage = Storage { groups, trees, children, hops, slots, bytes };
        Self {
            node: options.planted.node(Node::with_zero_copy(config, storage, buffers)),
            engine,
            regions: Box::new(RegionTable::new(REGIONS / 4)),
            functions: Vec::new(),
            orphaned: Vec::new(),
            redo: Arc::clone(redo),
            // Function ids are unique across all incarnations of a device.
            next: (incarnations as u32) << 16,
        }
    }

    /// Join a tree and attach these zero-copy children. Returns their functions, and the place of the redo slots.
    pub(super) fn join(
        &mut self,
        (tree, mut config): (TreeConfig, GroupConfig),
        children: &[ChildIndex],
        now: Instant,
    ) -> Result<(Vec<FunctionId>, Option<Place>), String> {
        let mut mask = ChildMask::EMPTY;
        children.iter().for_each(|&child| mask.insert(child));
        config.zero_copy = mask;
        let group = config.group;
        for request in [Request::InstallTree(tree), Request::CreateGroup(config)] {
            match self.node.control(&request, now) {
                Response::Done => {}
                response => return Err(format!("{response:?}")),
            }
        }
        if children.is_empty() {
            return Ok((Vec::new(), None));
        }
        let functions: Vec<FunctionId> = children.iter().map(|_| self.number()).collect();
        let owners: Vec<_> = children.iter().copied().zip(functions.iter().copied()).collect();
        self.node.attach(group, &owners).map_err(|error| error.to_string())?;
        let place = self.node.redo_slots(group).ok_or("no redo slots")?;
        // Clear records of other groups.
        let (start, len, slots) = place;
        (0..slots).for_each(|slot| self.redo.write(start as usize + slot * len, &[0; 16]));
        Ok((functions, Some(place)))
    }

    fn number(&mut self) -> FunctionId {
        self.next += 1;
        FunctionId(self.next)
    }

    /// Attach a rank: take the device's ends of its rings.
    pub(super) fn attach(
        &mut self,
        (id, rank, epoch): (FunctionId, usize, Epoch),
        submissions: Submissions,
        completions: Completions,
    ) {
        self.functions.push(Function {
            id,
            rank,
            submissions: Consumer::new(submissions),
            completions: Producer::new(completions),
            parked: None,
            outstanding: 0,
            pending: VecDeque::new(),
            memory: Vec::new(),
            epoch,
            asks_fence: false,
            is_fencing: false,
            leaving: Vec::new(),
        });
    }

    pub(super) fn function(&mut self, id: FunctionId) -> Option<&mut Function> {
        self.functions.iter_mut().find(|function| function.id == id)
    }

    /// Register memory; `None` if there is no room, or no such function.
    pub(super) fn register(&mut self, id: FunctionId, memory: &Arc<HeapMemory>) -> Option<RegionKey> {
        let function = self.functions.iter_mut().find(|function| function.id == id)?;
        let key = self.regions.register(id, memory.len_bytes() as u64).ok()?;
        self.engine.map(key, Arc::clone(memory));
        function.memory.push(key);
        Some(key)
    }

    /// Deregister memory; true if nothing uses it. Otherwise it is released with its last use.
    pub(super) fn deregister(&mut self, id: FunctionId, key: RegionKey) -> bool {
        let Some(function) = self.functions.iter_mut().find(|function| function.id == id) else { return false };
        let is_gone = self.regions.deregister(id, key) == Ok(true);
        if is_gone {
            self.engine.unmap(key);
            function.memory.retain(|&other| other != key);
        } else {
            function.leaving.push(key);
        }
        is_gone
    }

    /// Revoke all memory of a function at once. Returns whether a chain refers to it.
    pub(super) fn revoke(&mut self, id: FunctionId) -> bool {
        let Some(function) = self.functions.iter().find(|function| function.id == id) else { return false };
        function.memory.iter().for_each(|&key| _ = self.engine.unmap(key));
        self.engine.in_flight() > 0
    }

    /// Detach a rank that hung up: its memory is released with its last use. Returns how many regions are in use.
    pub(super) fn detach(&mut self, id: FunctionId) -> usize {
        let Some(at) = self.functions.iter().position(|function| function.id == id) else { return 0 };
        let function = self.functions.swap_remove(at);
        let before = self.orphaned.len();
        for key in function.memory {
            // The rank may have deregistered it before.
            let _ = self.regions.deregister(id, key);
            self.orphaned.push(key);
        }
        self.release_orphaned();
        self.orphaned.len().saturating_sub(before)
    }

    fn release_orphaned(&mut self) {
        let (regions, engine) = (&self.regions, &mut self.engine);
        self.orphaned.retain(|&key| {
            let in_use = regions.contains(key);
            if !in_use {
                engine.unmap(key);
            }
            in_use
        });
    }

    /// Return the functions of ranks that are still attached.
    pub(super) fn attached(&self) -> Vec<(FunctionId, usize)> {
        self.functions.iter().map(|function| (function.id, function.rank)).collect()
    }

    /// Do everything that can be done without waiting.
    pub(super) fn serve(&mut self, now: Instant, dies: &mut impl FnMut(CrashPoint) -> bool) -> Served {
        let mut served = Served::default();
        self.engine.now = now;
        for at in 0..self.functions.len() {
            self.poll_submissions(at, now, &mut served);
        }
        let nothing = Completion { tag: Tag::default(), status: Status::Done, step: 0 };
        loop {
            self.node.poll_dma(&mut self.engine, now);
            let mut completions = [nothing; 4];
            let count = self.engine.poll(&mut completions);
            completions[..count].iter().for_each(|completion| self.node.handle_completion(completion));
            if count == 0 {
                break;
            }
            served.is_busy = true;
        }
        self.collect(&mut served);
        self.release_orphaned();
        for at in 0..self.functions.len() {
            self.complete_commands(at, &mut served);
            if self.publish(at, &mut served, dies) {
                served.has_died = true;
                break;
            }
        }
        served.is_busy |= served.taken + served.answered + served.refused > 0 || !served.notices.is_empty();
        served
    }

    /// Take a function's submissions, as far as possible: a fence before the entries it stops.
    fn poll_submissions(&mut self, at: usize, now: Instant, served: &mut Served) {
        let Self { functions, node, regions, .. } = self;
        let function = &mut functions[at];
        if std::mem::take(&mut function.asks_fence) {
            node.withdraw(group_id(0), function.epoch, function.id);
            function.is_fencing = true;
        }
        loop {
            let entry = match function.parked.take() {
                Some(entry) => entry,
                None => match function.submissions.pop().expect("a ring of this version") {
                    None => return,
                    Some(words) => match SubmissionEntry::parse(&words).expect("an entry of this version") {
                        SubmissionEntry::Contribution(entry) => entry,
                        other => panic!("unexpected entry {other:?}"),
                    },
                },
            };
            let places = function.completions.capacity() as usize;
            let full = function.outstanding as usize + function.pending.len() + usize::from(entry.count) + 1 > places;
            let taken = if full { Err(EntryStatus::Window) } else { node.submit(function.id, &entry, regions, now) };
            match taken {
                Ok(()) => {
                    function.outstanding += u32::from(entry.count);
                    served.taken += 1;
                }
                Err(EntryStatus::Window) => {
                    served.parked += 1;
                    function.parked = Some(entry);
                    return;
                }
                Err(status) => {
                    let Contribution { group, epoch, seq, count, .. } = entry;
                    let (window, stable) = (0, ChunkNo(0));
                    let slowest = None;
                    function.outstanding += u32::from(count);
                    served.refused += 1;
                    let answer = CompletionEntry::Answer { status, group, epoch, seq, count, window, stable, slowest };
                    function.queue_answer(answer);
                }
            }
        }
    }

    /// Collect the node's answers.
    fn collect(&mut self, served: &mut Served) {
        while let Some(answer) = self.node.poll_answer(&mut self.regions) {
            let landed =
                matches!(answer.entry, CompletionEntry::Answer { status: EntryStatus::Result | EntryStatus::Done, .. });
            *if landed { &mut served.answered } else { &mut served.refused } += 1;
            let Some(function) = self.functions.iter_mut().find(|function| function.id == answer.function) else {
                continue;
            };
            if let Some((first, other)) = answer.operations {
                function.queue_answer(CompletionEntry::Operations { first: pack_op(&first), other: pack_op(&other) });
            }
            function.queue_answer(answer.entry);
        }
    }

    /// Complete commands that waited for the last use of memory.
    fn complete_commands(&mut self, at: usize, served: &mut Served) {
        let Self { functions, node, regions, engine, .. } = self;
        let Function { id, rank, memory, leaving, is_fencing, .. } = &mut functions[at];
        leaving.retain(|&key| {
            let in_use = regions.contains(key);
            if !in_use {
                engine.unmap(key);
                memory.retain(|&other| other != key);
            }
            in_use
        });
        if *is_fencing && !node.has_unanswered(group_id(0), *id) {
            *is_fencing = false;
            served.notices.push((*id, *rank, Notice::Fenced));
        }
    }

    /// Publish completions; true if the device dies before the next one.
    fn publish(&mut self, at: usize, served: &mut Served, dies: &mut impl FnMut(CrashPoint) -> bool) -> bool {
        let function = &mut self.functions[at];
        let mut published = false;
        while let Some(entry) = function.pending.front() {
            let landed =
                matches!(entry, CompletionEntry::Answer { status: EntryStatus::Result | EntryStatus::Done, .. });
            if landed && dies(CrashPoint::Answering) {
                return true;
            }
            if !function.completions.push(&entry.emit()).expect("a ring of this version") {
                break;
            }
            function.pending.pop_front();
            published = true;
        }
        if published {
            served.notices.push((function.id, function.rank, Notice::Answers));
        }
        false
    }

    /// Return the longest queues of answers, each with its limit.
    pub(super) fn queues(&self) -> impl Iterator<Item = (u64, u64)> {
        let lens = |function: &Function| {
            (u64::from(function.outstanding) + function.pending.len() as u64, function.completions.capacity().into())
        };
        self.functions.iter().map(lens)
    }

    /// Return how many regions are registered or in use.
    pub(super) fn regions_left(&self) -> usize {
        self.regions.len() + self.orphaned.len()
    }
}

impl Function {
    /// Ask for a fence.
    pub(super) fn fence(&mut self) {
        self.asks_fence = true;
    }

    /// Queue a completion for the rank. Consecutive answers are merged.
    fn queue_answer(&mut self, entry: CompletionEntry) {
        if let CompletionEntry::Answer { count, .. } = entry {
            self.outstanding -= u32::from(count);
        }
        if let (
            Some(CompletionEntry::Answer { status: last, seq: first, count: many, window, stable, .. }),
            CompletionEntry::Answer { status, seq, count, window: now, stable: newest, slowest: None, .. },
        ) = (self.pending.back_mut(), entry)
            && *last == status
            && first.0 + u64::from(*many) == seq.0
        {
            *many += count;
            (*window, *stable) = (now, newest);
            return;
        }
        self.pending.push_back(entry);
    }
}

/// Return the ranks among a node's children, with their child indexes.
pub(super) fn ranks_of(wiring: &Wiring, node: usize) -> Vec<(usize, ChildIndex)> {
    let ranks = wiring.ranks.iter().enumerate().filter(|(_, (leaf, _))| *leaf == node);
    ranks.map(|(rank, (_, child))| (rank, ChildIndex(*child))).collect()
}

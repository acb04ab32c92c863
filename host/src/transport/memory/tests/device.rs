//! A minimal device in a thread of the ranks' own process, honest unless its [`Behaviour`] says otherwise.

use super::{EPOCH, GROUP};
use crate::transport::memory::AttachParams;
use crate::transport::memory::driver::ZeroCopyDriver;
use crate::transport::memory::redo::record;
use crate::transport::memory::retire::ProcessControl;
use crate::wait_policy::WaitPolicy;
use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::os::fd::AsFd;
use std::sync::Mutex;
use std::sync::atomic::{AtomicU32, Ordering};
use std::thread::JoinHandle;
use std::time::Duration;
use sumac_hal::dma::{Address, Capabilities, Coverage, Profile, RegionKey};
use sumac_hal::ids::{BootId, ChildIndex, ChunkNo, Rank};
use sumac_hal::mmio::{
    AdminCommand, COMPLETION_WORDS, CompletionEntry, Contribution, EntryStatus, Features, FunctionConfig,
    SUBMISSION_WORDS, SubmissionEntry,
};
use sumac_hal::op::OpDesc;
use sumac_hal::reduce::Kernel;
use sumac_hal::ring::{Consumer, Producer};
use sumac_hal::shm::{
    AttachRefusal, Bell, Connection, Function, FunctionQueue, FunctionRing, Listener, Message, Pages, Received, Region,
    SocketError, ring,
};
use sumac_hal::wire::pack_op;

pub(super) const CHUNK: u16 = 64;
const REDO_OFFSET: usize = 128;
const SLOT: usize = 64 + 2 * CHUNK as usize;
const SLOTS: u64 = 64;
const LONG: Duration = Duration::from_secs(30);

/// How a device behaves.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Behaviour {
    Honest,
    /// Refuses to attach ranks.
    RefuseAttach(AttachRefusal),
    /// Has this many queues.
    Queues(u32),
    /// Has only these features.
    Features(Features),
    /// Has an engine that requires this alignment in bytes.
    Alignment(u32),
    /// Announces its redo slots this many bytes behind their true place.
    MisplacedRedo(u64),
    /// Registers only the first region.
    RegisterFull,
    /// Registers regions beyond this number under the last one's key.
    DuplicateKeys(usize),
    /// Answers commands, but no contributions.
    IgnoreData,
    /// Has a heartbeat, and stops altogether once this many regions are registered.
    Stalled(usize),
    /// Answers nothing once contributions have arrived, and writes to their destinations for ever.
    Zombie,
    /// Dies once all contributions to this many chunks have arrived, after publishing the even ones and tearing their
    /// destinations.
    Dying(u64),
    /// Does the same for each chunk as soon as it is complete, answers with an error, and lives on.
    FailingWrites,
    /// Publishes the result of other ranks for each complete chunk, and announces that rank 0 is excluded.
    Excluding,
    /// Ignores fences, and later completes what it has as if nothing had happened.
    LateWake(Wake),
    /// Answers each contribution with this entry.
    Answers([u64; COMPLETION_WORDS]),
}

/// When a device wakes, and what it does then.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Wake {
    /// On the fence; it reuses its redo slots at once.
    Fence,
    /// When it is [woken](wake); published results stay.
    Later,
    /// When it is woken; it reuses its redo slots at once.
    LaterAndOn,
}

/// Names of devices that are awake.
static AWAKE: Mutex<BTreeSet<String>> = Mutex::new(BTreeSet::new());

/// Wake the device of this name.
pub(super) fn wake(name: &str) {
    AWAKE.lock().expect("no panic").insert(name.to_owned());
}

/// A rank's contribution to one chunk.
#[derive(Debug, Clone, Copy)]
struct Chunk {
    entry: Contribution,
    src: Option<Address>,
    dst: Option<Address>,
    elements: usize,
}

struct Queue {
    from: Consumer<FunctionRing<SUBMISSION_WORDS>, SUBMISSION_WORDS>,
    to: Producer<FunctionRing<COMPLETION_WORDS>, COMPLETION_WORDS>,
    queue: FunctionQueue,
}

struct RankState {
    connection: Connection,
    queues: [Queue; 2],
    handed: HashMap<u64, Region>,
    gone: bool,
    _function: Function,
}

pub(super) struct Device {
    name: String,
    behaviour: Behaviour,
    rank_states: Vec<RankState>,
    pub(super) regions: HashMap<RegionKey, Region>,
    next_region: u16,
    redo: Region,
    chunks: BTreeMap<u64, HashMap<usize, Chunk>>,
    pub(super) fences: u32,
}

/// Start a device for `ranks` ranks. Returns the name that it listens on, and its thread, which ends when all ranks
/// have disconnected.
pub(super) fn start(ranks: u32, behaviour: Behaviour) -> (String, JoinHandle<Device>) {
    static NEXT: AtomicU32 = AtomicU32::new(0);
    let name = format!("sumac-host-test-{}-{}", std::process::id(), NEXT.fetch_add(1, Ordering::Relaxed));
    let listener = Listener::bind(&name).expect("a free name");
    let own = name.clone();
    let thread = std::thread::spawn(move || {
        let redo = Region::create(REDO_OFFSET + SLOTS as usize * SLOT, Pages::Normal).expect("memory");
        let rank_states = (0..ranks).filter_map(|_| accept_rank(&listener, &redo, behaviour)).collect();
        let (regions, chunks) = (HashMap::new(), BTreeMap::new());
        let mut device = Device { name: own, behaviour, rank_states, regions, next_region: 4, redo, chunks, fences: 0 };
        while device.step() {
            std::thread::sleep(Duration::from_micros(20));
        }
        device
    });
    (name, thread)
}

pub(super) fn params(socket: &str, rank: u32, ranks: u32) -> AttachParams {
    AttachParams {
        device: "leaf".into(),
        socket: socket.into(),
        remote: None,
        group: GROUP,
        epoch: EPOCH,
        child: ChildIndex(rank as u16),
        key: 42,
        rank: Rank(rank),
        ranks,
        ranks_here: ranks as usize,
        wait_policy: WaitPolicy::default(),
        chunk_len_bytes: CHUNK,
        window_max: 32,
        table_version: 1,
    }
}

/// Attach a rank that considers the device dead once it has disconnected.
pub(super) fn attach(socket: &str, rank: u32, ranks: u32) -> ZeroCopyDriver {
    let process_control = ProcessControl { has_ended: |_, _| true, kill: |_| panic!("nobody ends the tests") };
    ZeroCopyDriver::with_process_control(&params(socket, rank, ranks), process_control).expect("attached")
}

fn accept_rank(listener: &Listener, redo: &Region, behaviour: Behaviour) -> Option<RankState> {
    let connection = listener.accept(LONG).expect("a connection")?;
    let received = connection.receive(LONG).expect("a message").message;
    assert!(matches!(received, Message::Attach { group: GROUP, key: 42, .. }), "{received:?}");
    if let Behaviour::RefuseAttach(reason) = behaviour {
        connection.send(&Message::Refused { reason }, None).expect("it is open");
        return None;
    }
    let all = Features::ZERO_COPY | Features::FENCE | Features::REDO | Features::STRAGGLERS;
    let features = match behaviour {
        Behaviour::Features(features) => features,
        Behaviour::Stalled(_) => all | Features::HEARTBEAT,
        _ => all,
    };
    let queues = if let Behaviour::Queues(queues) = behaviour { queues } else { 2 };
    let dma = Capabilities::new(Profile::Full, 8, 8);
    let dma = if let Behaviour::Alignment(bytes) = behaviour { dma.with_alignment(bytes) } else { dma };
    let config = FunctionConfig { boot_id: BootId(1), features, queues, depth: 8, dma };
    let function = Function::create(&config).expect("memory");
    // A rank that rejects what it sees disconnects.
    connection.send(&Message::Function, Some(function.file())).ok()?;
    for queue in 0..queues {
        let bell = Bell::create().expect("an eventfd");
        connection.send(&Message::Bell { queue }, Some(bell.as_fd())).ok()?;
    }
    let file = redo.read_only_file().expect("a descriptor");
    let (offset_bytes, slot_len_bytes, slots) = (REDO_OFFSET as u64, SLOT as u32, SLOTS as u32);
    let offset_bytes = offset_bytes + if let Behaviour::MisplacedRedo(by) = behaviour { by } else { 0 };
    connection.send(&Message::Redo { offset_bytes, slot_len_bytes, slots }, Some(file.as_fd())).ok()?;
    let queues = [0, 1].map(|index| {
        let queue = function.queue(index).expect("a queue");
        let (from, to) = (Consumer::new(queue.submissions.clone()), Producer::new(queue.completions.clone()));
        Queue { from, to, queue }
    });
    Some(RankState { connection, queues, handed: HashMap::new(), gone: false, _function: function })
}

impl Device {
    fn is_stalled(&self) -> bool {
        matches!(self.behaviour, Behaviour::Stalled(regions) if regions == self.regions.len())
    }

    /// Serve every rank once; returns false if none is left, or the device ends.
    fn step(&mut self) -> bool {
        for rank in 0..self.rank_states.len() {
            self.receive_memory(rank);
            while !self.is_stalled()
                && let Ok(Some(words)) = self.rank_states[rank].queues[0].from.pop()
            {
                let Ok(SubmissionEntry::Admin { cookie, command }) = SubmissionEntry::parse(&words) else { panic!() };
                self.receive_memory(rank);
                self.admin(rank, cookie, command);
            }
            while !self.is_stalled()
                && let Ok(Some(words)) = self.rank_states[rank].queues[1].from.pop()
            {
                let Ok(SubmissionEntry::Contribution(entry)) = SubmissionEntry::parse(&words) else { panic!() };
                self.take(rank, entry);
            }
        }
        match self.behaviour {
            Behaviour::Zombie => self.overwrite_destinations(),
            Behaviour::Dying(count) if self.complete().take(count as usize).count() == count as usize => {
                self.publish_and_disconnect(count);
                return false;
            }
            Behaviour::Honest => {
                let complete: Vec<_> = self.complete().collect();
                complete.into_iter().for_each(|seq| self.finish(seq));
            }
            Behaviour::LateWake(_) if AWAKE.lock().expect("no panic").contains(&self.name) => self.wake_up(),
            Behaviour::Excluding => {
                let complete: Vec<_> = self.complete().collect();
                complete.into_iter().for_each(|seq| self.exclude_rank(seq));
            }
            Behaviour::FailingWrites => {
                let complete: Vec<_> = self.complete().collect();
                complete.into_iter().for_each(|seq| self.fail_chunk(seq));
            }
            _ => {}
        }
        !self.rank_states.iter().all(|rank| rank.gone)
    }

    fn receive_memory(&mut self, rank: usize) {
        let rank = &mut self.rank_states[rank];
        while !rank.gone {
            match rank.connection.receive(Duration::ZERO) {
                Ok(Received { message: Message::Memory { handle }, file: Some(file) }) => {
                    rank.handed.insert(handle, Region::open(file, 1 << 24).expect("it is sealed"));
                }
                Ok(other) => panic!("{other:?}"),
                Err(SocketError::Timeout(_)) => return,
                Err(_) => rank.gone = true,
            }
        }
    }

    fn admin(&mut self, rank: usize, cookie: u64, command: AdminCommand) {
        if self.behaviour == Behaviour::Zombie && !self.chunks.is_empty() {
            return;
        }
        let full = self.behaviour == Behaviour::RegisterFull && !self.regions.is_empty();
        let (status, value) = match command {
            AdminCommand::Register { .. } if full => (EntryStatus::NoResources, 0),
            AdminCommand::Register { handle, .. } => {
                if !matches!(self.behaviour, Behaviour::DuplicateKeys(most) if most == self.regions.len()) {
                    self.next_region += 1;
                }
                let key = RegionKey { index: self.next_region, generation: 1 };
                self.regions.insert(key, self.rank_states[rank].handed.remove(&handle).expect("handed over before"));
                (EntryStatus::Result, key.to_bits())
            }
            AdminCommand::Deregister { region } => {
                assert!(self.regions.remove(&region).is_some());
                (EntryStatus::Result, 0)
            }
            AdminCommand::Fence { .. } if matches!(self.behaviour, Behaviour::LateWake(_)) => {
                if self.behaviour == Behaviour::LateWake(Wake::Fence) {
                    wake(&self.name);
                }
                return;
            }
            AdminCommand::Fence { group, epoch } => {
                assert_eq!((group, epoch), (GROUP, EPOCH));
                self.fences += 1;
                self.chunks.clear();
                (EntryStatus::Result, 0)
            }
            _ => panic!("{command:?}"),
        };
        self.post(rank, 0, &CompletionEntry::Admin { status, cookie, value }.emit());
    }

    fn post(&mut self, rank: usize, queue: usize, words: &[u64; COMPLETION_WORDS]) {
        let Queue { to, queue, .. } = &mut self.rank_states[rank].queues[queue];
        assert_eq!(to.push(words), Ok(true), "there is room for all answers");
        ring(queue.host_bell());
    }

    fn take(&mut self, rank: usize, entry: Contribution) {
        if let Behaviour::Answers(words) = self.behaviour {
            self.post(rank, 1, &words);
            return;
        }
        let desc = OpDesc { collective: entry.collective, dtype: entry.dtype, op: entry.op, ..OpDesc::barrier() };
        let limit = usize::from(CHUNK).checked_div(desc.partial_bytes()).unwrap_or(0);
        for k in 0..usize::from(entry.count) {
            let skip = (k * limit * desc.element_bytes()) as u64;
            let at = |base: Option<Address>| {
                base.map(|base| Address { offset_bytes: base.offset_bytes + skip, region: base.region })
            };
            let elements = (entry.elements as usize).saturating_sub(k * limit).min(limit);
            let chunk = Chunk { entry, src: at(entry.src), dst: at(entry.dst), elements };
            self.chunks.entry(entry.seq.0 + k as u64).or_default().insert(rank, chunk);
        }
    }

    /// The chunks that all ranks have contributed to.
    fn complete(&self) -> impl Iterator<Item = u64> {
        let ranks = self.rank_states.len();
        self.chunks.iter().filter(move |(_, parts)| parts.len() == ranks).map(|(&seq, _)| seq)
    }

    /// Return the result of a chunk.
    fn reduce(&self, seq: u64) -> Vec<u8> {
        let parts = &self.chunks[&seq];
        let entry = parts[&0].entry;
        let kernel = entry.dtype.zip(entry.op).and_then(|(dtype, op)| Kernel::new(dtype, op));
        let element = entry.dtype.map_or(0, |dtype| dtype.size_bytes());
        let mut sum: Option<Vec<u8>> = None;
        for rank in 0..self.rank_states.len() {
            let Some(src) = parts[&rank].src else { continue };
            let mut bytes = vec![0; parts[&rank].elements * element];
            self.regions[&src.region].read(src.offset_bytes as usize, &mut bytes);
            match (&mut sum, kernel) {
                (None, _) => sum = Some(bytes),
                (Some(sum), Some(kernel)) => kernel.combine(sum, &bytes, false),
                (Some(_), None) => panic!("moved twice"),
            }
        }
        sum.unwrap_or_default()
    }

    fn publish(&self, seq: u64, result: &[u8]) {
        let slot = REDO_OFFSET + (seq % SLOTS) as usize * SLOT;
        // Store some as if they had been rounded.
        let location = (seq / 2 % 2) as u8;
        let at = if location == 0 { slot + 64 + usize::from(CHUNK) } else { slot + 64 };
        self.redo.write(at, result);
        let [first, second] = record(GROUP, EPOCH, seq, location);
        self.redo.write(slot, &[first, second, Coverage::checksum_word(result)].map(u64::to_le_bytes).concat());
    }

    /// Complete all chunks that all ranks have contributed to.
    fn wake_up(&mut self) {
        let complete: Vec<_> = self.complete().collect();
        for seq in complete {
            self.finish(seq);
            if self.behaviour != Behaviour::LateWake(Wake::Later) {
                self.redo.write(REDO_OFFSET + (seq % SLOTS) as usize * SLOT, &[0; 16]);
            }
        }
    }

    fn finish(&mut self, seq: u64) {
        let parts = self.chunks[&seq].clone();
        let first = parts[&0].entry;
        let differs = parts.values().find(|part| part.entry.signature != first.signature);
        let result = if differs.is_some() { Vec::new() } else { self.reduce(seq) };
        if differs.is_none() {
            self.publish(seq, &result);
        }
        for (&rank, part) in &parts {
            let (group, epoch) = (GROUP, EPOCH);
            let mut status = EntryStatus::Done;
            if let Some(other) = differs {
                let [first, other] = [first, other.entry].map(|entry| {
                    let Contribution { collective, dtype, op, .. } = entry;
                    pack_op(&OpDesc { collective, dtype, op, root: Rank(0), count: entry.elements.into() })
                });
                self.post(rank, 1, &CompletionEntry::Operations { first, other }.emit());
                status = EntryStatus::Mismatch;
            } else if let Some(dst) = part.dst {
                self.regions[&dst.region].write(dst.offset_bytes as usize, &result);
                status = EntryStatus::Result;
            }
            let (seq, stable) = (ChunkNo(seq), ChunkNo(seq));
            let answer =
                CompletionEntry::Answer { status, group, epoch, seq, count: 1, window: 8, stable, slowest: None };
            self.post(rank, 1, &answer.emit());
        }
        self.chunks.remove(&seq);
    }

    /// Write to every destination.
    fn overwrite_destinations(&self) {
        for dst in self.chunks.values().flat_map(HashMap::values).filter_map(|part| part.dst) {
            self.regions[&dst.region].write(dst.offset_bytes as usize, &[0xdd; 4]);
        }
    }

    /// Publish every second result, tear its destinations, and disconnect.
    fn publish_and_disconnect(&mut self, count: u64) {
        (0..count).for_each(|seq| self.tear(seq));
        self.rank_states.clear();
    }

    /// Publish every second result, tear its destinations, and answer with an error.
    fn fail_chunk(&mut self, seq: u64) {
        self.tear(seq);
        for rank in 0..self.rank_states.len() {
            let (group, epoch, status) = (GROUP, EPOCH, EntryStatus::Hardware);
            let (seq, stable) = (ChunkNo(seq), ChunkNo(0));
            let answer =
                CompletionEntry::Answer { status, group, epoch, seq, count: 1, window: 8, stable, slowest: None };
            self.post(rank, 1, &answer.emit());
        }
        self.chunks.remove(&seq);
    }

    fn exclude_rank(&mut self, seq: u64) {
        self.publish(seq, &[0x77; CHUNK as usize]);
        if seq == 0 {
            let without = [Rank(0)].into_iter().collect();
            let halves = CompletionEntry::missing(1, ChunkNo(seq), &without);
            halves.iter().for_each(|half| self.post(0, 1, &half.emit()));
        }
        self.chunks.remove(&seq);
    }

    /// Publish the result of an even chunk, and tear its destinations.
    fn tear(&self, seq: u64) {
        if !seq.is_multiple_of(2) {
            return;
        }
        let result = self.reduce(seq);
        self.publish(seq, &result);
        for dst in self.chunks[&seq].values().filter_map(|part| part.dst) {
            self.regions[&dst.region].write(dst.offset_bytes as usize, &[0xdd; 8]);
        }
    }
}

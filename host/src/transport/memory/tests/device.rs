//! A device in a thread: small, honest where it is not told otherwise, and of the same process as its ranks.

use super::{EPOCH, GROUP};
use crate::transport::memory::Seating;
use crate::transport::memory::driver::ReferenceDriver;
use crate::transport::memory::redo::record;
use crate::transport::memory::retire::Life;
use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::os::fd::AsFd;
use std::sync::Mutex;
use std::sync::atomic::{AtomicU32, Ordering};
use std::thread::JoinHandle;
use std::time::Duration;
use sumac_hal::dma::{Address, Capabilities, Covers, Profile, RegionKey};
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

/// What a device does when it is not honest.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Behaviour {
    Honest,
    /// Lets nobody attach.
    Refuses(AttachRefusal),
    /// Has so many queues.
    Queues(u32),
    /// Has these features only.
    Has(Features),
    /// Has an engine that asks for this alignment.
    Aligns(u32),
    /// Says that its redo slots lie so many bytes behind where they are.
    Misplaces(u64),
    /// Registers no memory but the first region.
    Full,
    /// Registers memory beyond so many regions under the last one's key.
    Repeats(usize),
    /// Answers commands, and no contribution.
    Holds,
    /// Shows a heartbeat, which stands still once so many regions are registered, as all of it does.
    Stands(usize),
    /// Answers nothing once contributions have come, and writes to their destinations for ever.
    Zombie,
    /// Is gone once all contributions to so many chunks are there: has published the even ones, and torn their
    /// destinations.
    Dies(u64),
    /// Does the same as soon as a chunk is there, says of each that it failed, and stays.
    Breaks,
    /// Publishes what others have made of a chunk as soon as it is there, and says that rank 0 has left.
    LeavesOut,
    /// Answers no fence, and finishes what it has at some time, as if nothing had been.
    Wakes(Wake),
    /// Answers the first contribution with this.
    Says([u64; COMPLETION_WORDS]),
}

/// When a device wakes, and what it does then.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Wake {
    /// As the fence comes; it goes on with its redo slots at once.
    Fence,
    /// When it is [woken](wake); what it has published stays.
    Later,
    /// When it is woken; it goes on with its redo slots at once.
    LaterAndOn,
}

/// Devices that are awake, by name.
static AWAKE: Mutex<BTreeSet<String>> = Mutex::new(BTreeSet::new());

/// Wake the device of this name.
pub(super) fn wake(name: &str) {
    AWAKE.lock().expect("no panic").insert(name.to_owned());
}

/// One chunk of one rank.
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

struct Seat {
    connection: Connection,
    queues: [Queue; 2],
    handed: HashMap<u64, Region>,
    gone: bool,
    _function: Function,
}

pub(super) struct Device {
    name: String,
    behaviour: Behaviour,
    seats: Vec<Seat>,
    pub(super) regions: HashMap<RegionKey, Region>,
    next_region: u16,
    redo: Region,
    chunks: BTreeMap<u64, HashMap<usize, Chunk>>,
    pub(super) fences: u32,
}

/// Start a device for so many ranks; returns what it listens on, and its thread, which ends when all ranks are gone.
pub(super) fn start(ranks: u32, behaviour: Behaviour) -> (String, JoinHandle<Device>) {
    static NEXT: AtomicU32 = AtomicU32::new(0);
    let name = format!("sumac-host-test-{}-{}", std::process::id(), NEXT.fetch_add(1, Ordering::Relaxed));
    let listener = Listener::bind(&name).expect("a free name");
    let own = name.clone();
    let thread = std::thread::spawn(move || {
        let redo = Region::create(REDO_OFFSET + SLOTS as usize * SLOT, Pages::Normal).expect("memory");
        let seats = (0..ranks).filter_map(|_| welcome(&listener, &redo, behaviour)).collect();
        let (regions, chunks) = (HashMap::new(), BTreeMap::new());
        let mut device = Device { name: own, behaviour, seats, regions, next_region: 4, redo, chunks, fences: 0 };
        while device.turn() {
            std::thread::sleep(Duration::from_micros(20));
        }
        device
    });
    (name, thread)
}

pub(super) fn seating(socket: &str, rank: u32, ranks: u32) -> Seating {
    Seating {
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
        chunk_len_bytes: CHUNK,
        window_max: 32,
        table_version: 1,
    }
}

/// Attach a rank, for which the device counts as dead when it has hung up.
pub(super) fn attach(socket: &str, rank: u32, ranks: u32) -> ReferenceDriver {
    let life = Life { has_ended: |_, _| true, end: |_| panic!("nobody ends the tests") };
    ReferenceDriver::with_life(&seating(socket, rank, ranks), life).expect("attached")
}

fn welcome(listener: &Listener, redo: &Region, behaviour: Behaviour) -> Option<Seat> {
    let connection = listener.accept(LONG).expect("welcome")?;
    let received = connection.receive(LONG).expect("a message").message;
    assert!(matches!(received, Message::Attach { group: GROUP, key: 42, .. }), "{received:?}");
    if let Behaviour::Refuses(reason) = behaviour {
        connection.send(&Message::Refused { reason }, None).expect("it is open");
        return None;
    }
    let all = Features::BY_REFERENCE | Features::FENCE | Features::REDO | Features::STRAGGLERS;
    let features = match behaviour {
        Behaviour::Has(features) => features,
        Behaviour::Stands(_) => all | Features::HEARTBEAT,
        _ => all,
    };
    let queues = if let Behaviour::Queues(queues) = behaviour { queues } else { 2 };
    let dma = Capabilities::new(Profile::Full, 8, 8);
    let dma = if let Behaviour::Aligns(bytes) = behaviour { dma.with_alignment(bytes) } else { dma };
    let config = FunctionConfig { boot_id: BootId(1), features, queues, depth: 8, dma };
    let function = Function::create(&config).expect("memory");
    // A rank that does not like what it sees leaves.
    connection.send(&Message::Function, Some(function.file())).ok()?;
    for queue in 0..queues {
        let bell = Bell::create().expect("an eventfd");
        connection.send(&Message::Bell { queue }, Some(bell.as_fd())).ok()?;
    }
    let file = redo.read_only_file().expect("a descriptor");
    let (offset_bytes, slot_len_bytes, slots) = (REDO_OFFSET as u64, SLOT as u32, SLOTS as u32);
    let offset_bytes = offset_bytes + if let Behaviour::Misplaces(by) = behaviour { by } else { 0 };
    connection.send(&Message::Redo { offset_bytes, slot_len_bytes, slots }, Some(file.as_fd())).ok()?;
    let queues = [0, 1].map(|index| {
        let queue = function.queue(index).expect("a queue");
        let (from, to) = (Consumer::new(queue.submissions.clone()), Producer::new(queue.completions.clone()));
        Queue { from, to, queue }
    });
    Some(Seat { connection, queues, handed: HashMap::new(), gone: false, _function: function })
}

impl Device {
    /// Serve everybody once; false if nobody is left, or this is the end.
    fn turn(&mut self) -> bool {
        for seat in 0..self.seats.len() {
            self.listen(seat);
            if matches!(self.behaviour, Behaviour::Stands(regions) if regions == self.regions.len()) {
                continue;
            }
            while let Ok(Some(words)) = self.seats[seat].queues[0].from.pop() {
                let Ok(SubmissionEntry::Admin { cookie, command }) = SubmissionEntry::parse(&words) else { panic!() };
                self.listen(seat);
                self.admin(seat, cookie, command);
            }
            while let Ok(Some(words)) = self.seats[seat].queues[1].from.pop() {
                let Ok(SubmissionEntry::Contribution(entry)) = SubmissionEntry::parse(&words) else { panic!() };
                self.take(seat, entry);
            }
        }
        match self.behaviour {
            Behaviour::Zombie => self.haunt(),
            Behaviour::Dies(count) if self.complete().take(count as usize).count() == count as usize => {
                self.die(count);
                return false;
            }
            Behaviour::Honest => {
                let complete: Vec<_> = self.complete().collect();
                complete.into_iter().for_each(|seq| self.finish(seq));
            }
            Behaviour::Wakes(_) if AWAKE.lock().expect("no panic").contains(&self.name) => self.wake_up(),
            Behaviour::LeavesOut => {
                let complete: Vec<_> = self.complete().collect();
                complete.into_iter().for_each(|seq| self.leave_out(seq));
            }
            Behaviour::Breaks => {
                let complete: Vec<_> = self.complete().collect();
                complete.into_iter().for_each(|seq| self.give_up(seq));
            }
            _ => {}
        }
        !self.seats.iter().all(|seat| seat.gone)
    }

    fn listen(&mut self, seat: usize) {
        let seat = &mut self.seats[seat];
        while !seat.gone {
            match seat.connection.receive(Duration::ZERO) {
                Ok(Received { message: Message::Memory { handle }, file: Some(file) }) => {
                    seat.handed.insert(handle, Region::open(file, 1 << 24).expect("it is sealed"));
                }
                Ok(other) => panic!("{other:?}"),
                Err(SocketError::Timeout(_)) => return,
                Err(_) => seat.gone = true,
            }
        }
    }

    fn admin(&mut self, seat: usize, cookie: u64, command: AdminCommand) {
        if self.behaviour == Behaviour::Zombie && !self.chunks.is_empty() {
            return;
        }
        let full = self.behaviour == Behaviour::Full && !self.regions.is_empty();
        let (status, value) = match command {
            AdminCommand::Register { .. } if full => (EntryStatus::NoRoom, 0),
            AdminCommand::Register { handle, .. } => {
                if !matches!(self.behaviour, Behaviour::Repeats(most) if most == self.regions.len()) {
                    self.next_region += 1;
                }
                let key = RegionKey { index: self.next_region, generation: 1 };
                self.regions.insert(key, self.seats[seat].handed.remove(&handle).expect("handed over before"));
                (EntryStatus::Result, key.to_bits())
            }
            AdminCommand::Deregister { region } => {
                assert!(self.regions.remove(&region).is_some());
                (EntryStatus::Result, 0)
            }
            AdminCommand::Fence { .. } if matches!(self.behaviour, Behaviour::Wakes(_)) => {
                if self.behaviour == Behaviour::Wakes(Wake::Fence) {
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
        self.say(seat, 0, &CompletionEntry::Admin { status, cookie, value }.emit());
    }

    fn say(&mut self, seat: usize, queue: usize, words: &[u64; COMPLETION_WORDS]) {
        let Queue { to, queue, .. } = &mut self.seats[seat].queues[queue];
        assert_eq!(to.push(words), Ok(true), "there is room for all answers");
        ring(queue.host_bell());
    }

    fn take(&mut self, seat: usize, entry: Contribution) {
        if let Behaviour::Says(words) = self.behaviour {
            self.say(seat, 1, &words);
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
            self.chunks.entry(entry.seq.0 + k as u64).or_default().insert(seat, chunk);
        }
    }

    /// The chunks that everybody has contributed to.
    fn complete(&self) -> impl Iterator<Item = u64> {
        let ranks = self.seats.len();
        self.chunks.iter().filter(move |(_, parts)| parts.len() == ranks).map(|(&seq, _)| seq)
    }

    /// Return the result of a chunk.
    fn reduce(&self, seq: u64) -> Vec<u8> {
        let parts = &self.chunks[&seq];
        let entry = parts[&0].entry;
        let kernel = entry.dtype.zip(entry.op).and_then(|(dtype, op)| Kernel::new(dtype, op));
        let element = entry.dtype.map_or(0, |dtype| dtype.size_bytes());
        let mut sum: Option<Vec<u8>> = None;
        for seat in 0..self.seats.len() {
            let Some(src) = parts[&seat].src else { continue };
            let mut bytes = vec![0; parts[&seat].elements * element];
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
        // Odd ones as if they had been rounded.
        let location = (seq / 2 % 2) as u8;
        let at = if location == 0 { slot + 64 + usize::from(CHUNK) } else { slot + 64 };
        self.redo.write(at, result);
        let [first, second] = record(GROUP, EPOCH, seq, location);
        self.redo.write(slot, &[first, second, Covers::word(result)].map(u64::to_le_bytes).concat());
    }

    /// Finish all that everybody has contributed to.
    fn wake_up(&mut self) {
        let complete: Vec<_> = self.complete().collect();
        for seq in complete {
            self.finish(seq);
            if self.behaviour != Behaviour::Wakes(Wake::Later) {
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
        for (&seat, part) in &parts {
            let (group, epoch) = (GROUP, EPOCH);
            let mut status = EntryStatus::Done;
            if let Some(other) = differs {
                let [first, other] = [first, other.entry].map(|entry| {
                    let Contribution { collective, dtype, op, .. } = entry;
                    pack_op(&OpDesc { collective, dtype, op, root: Rank(0), count: entry.elements.into() })
                });
                self.say(seat, 1, &CompletionEntry::Operations { first, other }.emit());
                status = EntryStatus::Mismatch;
            } else if let Some(dst) = part.dst {
                self.regions[&dst.region].write(dst.offset_bytes as usize, &result);
                status = EntryStatus::Result;
            }
            let (seq, stable) = (ChunkNo(seq), ChunkNo(seq));
            let answer =
                CompletionEntry::Answer { status, group, epoch, seq, count: 1, window: 8, stable, slowest: None };
            self.say(seat, 1, &answer.emit());
        }
        self.chunks.remove(&seq);
    }

    /// Write to every destination.
    fn haunt(&self) {
        for dst in self.chunks.values().flat_map(HashMap::values).filter_map(|part| part.dst) {
            self.regions[&dst.region].write(dst.offset_bytes as usize, &[0xdd; 4]);
        }
    }

    /// Publish every second result, tear its destinations, and go.
    fn die(&mut self, count: u64) {
        (0..count).for_each(|seq| self.tear(seq));
        self.seats.clear();
    }

    /// Publish every second result, tear its destinations, and say that all have failed.
    fn give_up(&mut self, seq: u64) {
        self.tear(seq);
        for seat in 0..self.seats.len() {
            let (group, epoch, status) = (GROUP, EPOCH, EntryStatus::Hardware);
            let (seq, stable) = (ChunkNo(seq), ChunkNo(0));
            let answer =
                CompletionEntry::Answer { status, group, epoch, seq, count: 1, window: 8, stable, slowest: None };
            self.say(seat, 1, &answer.emit());
        }
        self.chunks.remove(&seq);
    }

    fn leave_out(&mut self, seq: u64) {
        self.publish(seq, &[0x77; CHUNK as usize]);
        if seq == 0 {
            let without = [Rank(0)].into_iter().collect();
            let halves = CompletionEntry::missing(1, ChunkNo(seq), &without);
            halves.iter().for_each(|half| self.say(0, 1, &half.emit()));
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

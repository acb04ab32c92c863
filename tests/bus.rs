//! A board's bus, driven by hand: ranks that keep the rules, break them, or go.

mod common;

use common::Cluster;
use std::time::{Duration, Instant};
use sumac::controller::proto::{JoinRequest, Terms, TreeMembership};
use sumac::controller::{Session, status};
use sumac::{Attach, Collective, Dtype, OpDesc, Order, ReduceOp};
use sumac_hal::dma::{Address, DmaMemory, RegionKey};
use sumac_hal::ids::{ChunkNo, Rank};
use sumac_hal::mmio::{
    AdminCommand, COMPLETION_WORDS, CompletionEntry, Contribution, EntryStatus, SUBMISSION_WORDS, SubmissionEntry,
};
use sumac_hal::ring::{Consumer, Patience, Producer};
use sumac_hal::shard::RUN;
use sumac_hal::shm::{
    AttachRefusal, Bell, Connection, DeviceUsers, Function, FunctionQueue, FunctionRing, Message, Pages, ReadOnly,
    Region, SocketError, Waiter, machine,
};

const LONG: Duration = Duration::from_secs(20);

/// The ends of a queue that a rank holds.
struct Ends {
    queue: FunctionQueue,
    bell: Bell,
    submissions: Producer<FunctionRing<SUBMISSION_WORDS>, SUBMISSION_WORDS>,
    completions: Consumer<FunctionRing<COMPLETION_WORDS>, COMPLETION_WORDS>,
}

impl Ends {
    fn submit(&mut self, words: &[u64; SUBMISSION_WORDS]) {
        assert_eq!(self.submissions.push(words), Ok(true), "there is room");
        self.bell.ring(self.queue.device_bell());
    }

    /// Wait for the next completion.
    fn completion(&mut self) -> Option<CompletionEntry> {
        let Self { queue, completions, .. } = self;
        let waiter = Waiter::new(Patience::NONE);
        let news = || completions.available().expect("an honest device") > 0;
        let came = waiter.wait(&[queue.host_bell()], Some(Instant::now() + LONG), news).expect("a futex");
        let words = came.then(|| self.completions.pop().expect("an honest device").expect("it came"))?;
        Some(CompletionEntry::parse(&words).expect("an entry"))
    }
}

/// A rank that has joined, and a connection to its leaf.
struct Seat {
    rank: u32,
    tree: TreeMembership,
    session: Session,
}

/// A rank that has attached.
struct Attached {
    seat: Seat,
    connection: Connection,
    admin: Ends,
    data: Ends,
    redo: (ReadOnly, u64, u32, u32),
    next: u64,
    _function: Function,
}

fn join(cluster: &Cluster, job: &str, rank: u32, world: u32) -> Seat {
    let request = JoinRequest {
        job: job.into(),
        rank: Rank(rank),
        world,
        host: None,
        order: Order::TreeFold,
        mesh_addr: ([127, 0, 0, 1], 9).into(),
        repair_addr: ([127, 0, 0, 1], 9).into(),
        max_packet_len_bytes: 65_000,
        attach: Attach::Shm,
        machine: machine(),
        device_users: DeviceUsers::own(),
        terms: Terms::default(),
    };
    let joined = Session::join(cluster.controller.local_addr(), request, LONG, |_| None).expect("join");
    let (session, membership) = joined;
    Seat { rank, tree: membership.tree.expect("a tree"), session }
}

fn hello(tree: &TreeMembership) -> Message {
    Message::Attach { group: tree.group, child: tree.child, key: tree.key }
}

fn connect(tree: &TreeMembership, hello: &Message) -> Connection {
    let socket = &tree.bus.as_ref().expect("by reference").socket;
    let connection = Connection::open(socket, LONG).expect("the board listens");
    connection.send(hello, None).expect("it is open");
    connection
}

fn attach(seat: Seat) -> Attached {
    let connection = connect(&seat.tree, &hello(&seat.tree));
    let next = || connection.receive(LONG).expect("a message");
    let received = next();
    assert_eq!(received.message, Message::Function);
    let (function, _) = Function::open(received.file.expect("with its memory")).expect("a function");
    let [admin, data] = [0, 1].map(|index| {
        let received = next();
        assert_eq!(received.message, Message::Bell { queue: index });
        let queue = function.queue(index).expect("a queue");
        Ends {
            submissions: Producer::new(queue.submissions.clone()),
            completions: Consumer::new(queue.completions.clone()),
            queue,
            bell: Bell::open(received.file.expect("with its event")),
        }
    });
    let received = next();
    let Message::Redo { offset_bytes, slot_len_bytes, slots } = received.message else { panic!("redo slots") };
    let redo = ReadOnly::open(received.file.expect("with its memory"), 1 << 40).expect("memory");
    let redo = (redo, offset_bytes, slot_len_bytes, slots);
    Attached { seat, connection, admin, data, redo, next: 0, _function: function }
}

impl Attached {
    fn command(&mut self, command: AdminCommand) -> (EntryStatus, u64) {
        self.admin.submit(&SubmissionEntry::Admin { cookie: 77, command }.emit());
        match self.admin.completion() {
            Some(CompletionEntry::Admin { status, cookie: 77, value }) => (status, value),
            other => panic!("{other:?}"),
        }
    }

    fn register(&mut self, handle: u64, region: &Region) -> RegionKey {
        self.connection.send(&Message::Memory { handle }, Some(region.file())).expect("it is open");
        let len_bytes = region.len_bytes() as u64;
        let (status, value) = self.command(AdminCommand::Register { handle, offset_bytes: 0, len_bytes });
        assert_eq!(status, EntryStatus::Result);
        RegionKey::from_bits(value).expect("a key")
    }

    /// What this rank submits for `count` chunks of f32 from the next one on, in place at the beginning of a region.
    fn run_of(&self, key: RegionKey, count: u16, elements: u32) -> Contribution {
        let at = Address { region: key, offset_bytes: 0 };
        Contribution {
            group: self.seat.tree.group,
            epoch: self.seat.tree.epoch,
            seq: ChunkNo(self.next),
            count,
            elements,
            // As if nothing had come: the device knows better.
            lag: self.next.min(u16::MAX.into()) as u16,
            collective: Collective::AllReduce,
            dtype: Some(Dtype::F32),
            op: Some(ReduceOp::Sum),
            root: Rank(0),
            total: 0,
            signature: 1,
            src: Some(at),
            dst: Some(at),
        }
    }

    fn contribute(&mut self, entry: &Contribution) {
        self.data.submit(&SubmissionEntry::Contribution(*entry).emit());
        self.next = entry.seq.0 + u64::from(entry.count);
    }

    /// All-reduce the whole of a region of `elements` f32 without waiting in between, and wait for all answers.
    fn all_reduce(&mut self, key: RegionKey, elements: usize) {
        let limit = usize::from(self.seat.tree.chunk_len_bytes) / 4;
        let (first, mut done) = (self.next, 0);
        while done < elements {
            let room = (RUN - self.next % RUN).min(self.seat.tree.window_max.into()) as usize * limit;
            let part = room.min(elements - done);
            let count = part.div_ceil(limit) as u16;
            let mut entry = self.run_of(key, count, part as u32);
            for address in [&mut entry.src, &mut entry.dst].into_iter().flatten() {
                address.offset_bytes = done as u64 * 4;
            }
            self.contribute(&entry);
            done += part;
        }
        // Every chunk so far had its answer: woken when these have theirs, too.
        self.data.queue.host_wants().set(self.next as u32);
        let mut answered = first;
        while answered < self.next {
            match self.data.completion() {
                Some(CompletionEntry::Answer { status: EntryStatus::Result, count, .. }) => {
                    answered += u64::from(count);
                }
                other => panic!("rank {}: {other:?}", self.seat.rank),
            }
        }
        assert_eq!(answered, self.next);
    }
}

fn fill(region: &Region, elements: usize, value: impl Fn(usize) -> f32) {
    let bytes: Vec<u8> = (0..elements).flat_map(|index| value(index).to_le_bytes()).collect();
    region.write(0, &bytes);
}

fn floats(region: &Region, elements: usize) -> Vec<f32> {
    let mut bytes = vec![0; elements * 4];
    region.read(0, &mut bytes);
    bytes.as_chunks::<4>().0.iter().map(|word| f32::from_le_bytes(*word)).collect()
}

/// Run as many ranks as threads, each attached.
fn ranks<R: Send>(cluster: &Cluster, job: &str, world: u32, rank: impl Fn(Attached) -> R + Sync) -> Vec<R> {
    let rank = &rank;
    std::thread::scope(|scope| {
        let ranks: Vec<_> =
            (0..world).map(|number| scope.spawn(move || rank(attach(join(cluster, job, number, world))))).collect();
        ranks.into_iter().map(|rank| rank.join().expect("a rank panicked")).collect()
    })
}

#[test]
fn a_whole_operation_is_submitted_at_once_and_reduced_in_place() {
    const ELEMENTS: usize = 3_000_001;
    let cluster = Cluster::start(1, 3);
    ranks(&cluster, "whole", 3, |mut rank| {
        let region = Region::create(ELEMENTS * 4, Pages::Normal).expect("memory");
        let key = rank.register(1, &region);
        for round in 0..3 {
            let number = rank.seat.rank as f32;
            fill(&region, ELEMENTS, |index| (index % 1000) as f32 * (number + 1.0) + round as f32);
            rank.all_reduce(key, ELEMENTS);
            let wrong = floats(&region, ELEMENTS).into_iter().enumerate();
            let wrong = wrong.filter(|(index, sum)| *sum != (index % 1000) as f32 * 6.0 + 3.0 * round as f32).count();
            assert_eq!(wrong, 0, "round {round}");
        }
        // The last result is in its redo slot, for when the device is gone.
        let (redo, start, slot_len_bytes, slots) = &rank.redo;
        let seq = rank.next - 1;
        let mut record = [0; 16];
        assert!(redo.read(start + seq % u64::from(*slots) * u64::from(*slot_len_bytes), &mut record));
        assert_eq!(record[8..], seq.to_le_bytes());
        assert_eq!(rank.command(AdminCommand::Deregister { region: key }).0, EntryStatus::Result);
        rank.seat.session.leave();
    });
}

#[test]
fn only_an_expected_child_attaches_and_only_once() {
    let cluster = Cluster::start(1, 1);
    let seat = join(&cluster, "strangers", 0, 1);
    let refused = |connection: &Connection| match connection.receive(LONG).expect("an answer").message {
        Message::Refused { reason } => reason,
        other => panic!("{other:?}"),
    };
    let Message::Attach { group, child, key } = hello(&seat.tree) else { unreachable!() };
    let wrong_key = Message::Attach { group, child, key: key ^ 1 };
    assert_eq!(refused(&connect(&seat.tree, &wrong_key)), AttachRefusal::Stranger);
    let tree = seat.tree.clone();
    // Who says something else first is hung up on.
    let region = Region::create(4096, Pages::Normal).expect("memory");
    let socket = &tree.bus.as_ref().expect("by reference").socket;
    let rude = Connection::open(socket, LONG).expect("the board listens");
    rude.send(&Message::Memory { handle: 1 }, Some(region.file())).expect("it is open");
    assert!(matches!(rude.receive(LONG), Err(SocketError::Closed)));
    let mut rank = attach(seat);
    assert_eq!(refused(&connect(&tree, &hello(&tree))), AttachRefusal::Attached);
    // The one who is there has not noticed.
    let key = rank.register(1, &region);
    rank.all_reduce(key, 1024);
    rank.seat.session.leave();
}

#[test]
fn what_is_wrong_is_answered_and_what_makes_no_sense_ends_the_function_alone() {
    let cluster = Cluster::start(1, 2);
    let both_are_there = std::sync::Barrier::new(2);
    ranks(&cluster, "wrong", 2, |mut rank| {
        let region = Region::create(4096, Pages::Normal).expect("memory");
        let key = rank.register(9, &region);
        let good = rank.run_of(key, 1, 1024);
        let far = Address { region: RegionKey { index: key.index + 7, ..key }, offset_bytes: 0 };
        let behind = Address { region: key, offset_bytes: 8 };
        let cases = [
            (Contribution { src: Some(far), ..good }, EntryStatus::BadRegion),
            (Contribution { dst: Some(behind), ..good }, EntryStatus::OutOfBounds),
            (Contribution { elements: 0, ..good }, EntryStatus::Malformed),
        ];
        for (entry, expected) in cases {
            rank.contribute(&entry);
            match rank.data.completion() {
                Some(CompletionEntry::Answer { status, seq, count: 1, .. }) => {
                    assert_eq!((status, seq), (expected, entry.seq));
                }
                other => panic!("{other:?}"),
            }
        }
        rank.next = 0;
        let register = AdminCommand::Register { handle: 9, offset_bytes: 0, len_bytes: 4096 };
        assert_eq!(rank.command(register).0, EntryStatus::BadRegion, "a handle is for one registration");
        both_are_there.wait();
        if rank.seat.rank == 0 {
            // A command where contributions go.
            rank.data.submit(&SubmissionEntry::Admin { cookie: 0, command: register }.emit());
            assert!(matches!(rank.connection.receive(LONG), Err(SocketError::Closed)));
            both_are_there.wait();
        } else {
            both_are_there.wait();
            // The other one's end is nothing to this one's function: the group waits, and can be ended.
            rank.contribute(&good);
            let (group, epoch) = (rank.seat.tree.group, rank.seat.tree.epoch);
            assert_eq!(rank.command(AdminCommand::Fence { group, epoch }).0, EntryStatus::Result);
            match rank.data.completion() {
                // Two queues: the fence may have overtaken it.
                Some(CompletionEntry::Answer { status: EntryStatus::Fenced | EntryStatus::UnknownGroup, .. }) => {}
                other => panic!("{other:?}"),
            }
        }
    });
}

#[test]
fn operations_that_differ_are_named() {
    let cluster = Cluster::start(1, 2);
    ranks(&cluster, "differ", 2, |mut rank| {
        let region = Region::create(4096, Pages::Normal).expect("memory");
        let key = rank.register(1, &region);
        let number = rank.seat.rank;
        let op = Some(if number == 0 { ReduceOp::Sum } else { ReduceOp::Max });
        let entry = Contribution { op, signature: number, ..rank.run_of(key, 1, 1024) };
        rank.contribute(&entry);
        let Some(CompletionEntry::Operations { first, other }) = rank.data.completion() else { panic!("names") };
        let mut ops: Vec<_> = [first, other]
            .map(|packed| sumac_hal::wire::unpack_op(packed).expect("an operation"))
            .map(|op: OpDesc| op.op)
            .into();
        ops.sort_by_key(|op| op.map(ReduceOp::to_wire));
        assert_eq!(ops, [Some(ReduceOp::Sum), Some(ReduceOp::Max)]);
        match rank.data.completion() {
            Some(CompletionEntry::Answer { status: EntryStatus::Mismatch, .. }) => {}
            other => panic!("{other:?}"),
        }
    });
}

/// Others attach meanwhile: ranks do not wait for as long as many silent ones may take together.
#[test]
fn who_connects_and_says_nothing_keeps_nobody_waiting() {
    let cluster = Cluster::start(1, 1);
    let seat = join(&cluster, "silent", 0, 1);
    let socket = &seat.tree.bus.as_ref().expect("by reference").socket;
    let _silent: Vec<_> = (0..8).map(|_| Connection::open(socket, LONG).expect("the board listens")).collect();
    let begun = Instant::now();
    attach(seat);
    assert!(begun.elapsed() < Duration::from_secs(4), "it took {:?}", begun.elapsed());
}

/// Answers that nobody takes out are kept up to a limit, and then nothing more is taken in; once they are taken out,
/// everything is answered. The numbers of chunks are those that add up to too much.
#[test]
fn a_rank_that_leaves_its_answers_gets_nothing_more_in() {
    const MORE_THAN_TAKEN: u32 = 20_000;
    let cluster = Cluster::start(1, 1);
    let mut rank = attach(join(&cluster, "leaves", 0, 1));
    let stale = sumac_hal::ids::Epoch { counter: u16::MAX, ..rank.seat.tree.epoch };
    let last = ChunkNo(u64::MAX);
    let refused = Contribution { seq: last, epoch: stale, ..rank.run_of(RegionKey::default(), 1, 1) };
    let command = AdminCommand::Deregister { region: RegionKey::default() };
    let entries = [SubmissionEntry::Admin { cookie: 5, command }, SubmissionEntry::Contribution(refused)]
        .map(|entry| entry.emit());
    for (ends, entry) in [&mut rank.admin, &mut rank.data].into_iter().zip(entries) {
        let (mut submitted, mut taken_last) = (0, Instant::now());
        while taken_last.elapsed() < Duration::from_millis(300) {
            if ends.submissions.push(&entry) == Ok(true) {
                ends.bell.ring(ends.queue.device_bell());
                (submitted, taken_last) = (submitted + 1, Instant::now());
            }
            assert!(submitted < MORE_THAN_TAKEN, "all of them are taken in");
        }
        for answer in 0..submitted {
            match ends.completion() {
                Some(CompletionEntry::Admin { cookie: 5, .. }) => {}
                Some(CompletionEntry::Answer { seq, count: 1, .. }) if seq == last => {}
                other => panic!("{answer} of {submitted}: {other:?}"),
            }
        }
    }
    let region = Region::create(4096, Pages::Normal).expect("memory");
    let key = rank.register(1, &region);
    rank.all_reduce(key, 1024);
}

/// Return all that a rank can read of redo slots.
fn redo_memory(rank: &Attached) -> Vec<u8> {
    const STEP: usize = 64;
    let (redo, ..) = &rank.redo;
    let (mut bytes, mut step) = (Vec::new(), [0; STEP]);
    while redo.read(bytes.len() as u64, &mut step) {
        bytes.extend(step);
    }
    let mut last = [0];
    while redo.read(bytes.len() as u64, &mut last) {
        bytes.extend(last);
    }
    bytes
}

/// Tell how often a value is somewhere in memory.
fn count(memory: &[u8], value: f32) -> usize {
    memory.as_chunks::<4>().0.iter().filter(|word| f32::from_le_bytes(**word) == value).count()
}

/// Sums are in the redo slots, also of who has nothing to do with whoever reads there.
#[test]
fn redo_memory_holds_its_own_group_alone_and_nothing_from_before() {
    const ELEMENTS: usize = 1 << 18;
    let cluster = Cluster::start(1, 1);
    let sum = |rank: &mut Attached, value: f32| {
        let region = Region::create(ELEMENTS * 4, Pages::Normal).expect("memory");
        let key = rank.register(1, &region);
        fill(&region, ELEMENTS, |_| value);
        rank.all_reduce(key, ELEMENTS);
        assert_eq!(rank.command(AdminCommand::Deregister { region: key }).0, EntryStatus::Result);
    };
    let is_zero = |rank: &Attached| redo_memory(rank).iter().all(|&byte| byte == 0);
    let (secret, own) = (1234.5, 77.25);
    let mut victim = attach(join(&cluster, "victim", 0, 1));
    assert!(is_zero(&victim), "it is fresh");
    sum(&mut victim, secret);
    let published = redo_memory(&victim);
    assert!(count(&published, secret) > 0, "what was answered is published");
    // Another job on the same device, at the same time.
    let mut other = attach(join(&cluster, "other", 0, 1));
    assert!(is_zero(&other), "there is more than the group's own");
    sum(&mut other, own);
    let found = redo_memory(&other);
    assert_eq!((count(&found, secret), count(&found, own) > 0), (0, true));
    assert!(redo_memory(&victim) == published, "nobody else's slots are there");
    let (_, start, slot_len_bytes, slots) = other.redo;
    assert_eq!((start, found.len()), (0, slot_len_bytes as usize * slots as usize), "and not a byte more");
    // One that comes when both have gone, and takes what they have had.
    victim.seat.session.leave();
    other.seat.session.leave();
    let deadline = Instant::now() + LONG;
    while !status(cluster.controller.local_addr()).expect("a report").jobs.is_empty() {
        assert!(Instant::now() < deadline, "a job ends with its rank");
        std::thread::yield_now();
    }
    assert!(is_zero(&attach(join(&cluster, "after", 0, 1))), "a job before has left something");
}

/// Memory that a rank has handed over goes with the rank, however it goes.
#[test]
fn nothing_of_a_rank_that_is_gone_stays() {
    let cluster = Cluster::start(1, 1);
    let mapped = || {
        let maps = std::fs::read_to_string("/proc/self/maps").expect("Linux tells");
        maps.lines().filter(|line| line.contains("sumac-region") || line.contains("sumac-bar")).count()
    };
    let (before, fds) = (mapped(), std::fs::read_dir("/proc/self/fd").expect("Linux tells").count());
    for round in 0..5 {
        let mut rank = attach(join(&cluster, &format!("gone-{round}"), 0, 1));
        let region = Region::create(1 << 20, Pages::Normal).expect("memory");
        let key = rank.register(1, &region);
        rank.all_reduce(key, 1 << 18);
        if round % 2 == 0 {
            rank.seat.session.leave();
        }
    }
    let deadline = Instant::now() + LONG;
    while mapped() > before || std::fs::read_dir("/proc/self/fd").expect("Linux tells").count() > fds {
        assert!(Instant::now() < deadline, "{} mappings, {before} before", mapped());
        std::thread::yield_now();
    }
}

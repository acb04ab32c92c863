//! The zero-copy interface of a board, driven without a communicator: ranks that follow the protocol, violate it, or
//! leave.

mod common;

use common::Cluster;
use std::time::{Duration, Instant};
use sumac::controller::proto::{JoinRequest, Terms, TreeMembership};
use sumac::controller::{Session, status};
use sumac::{Collective, Dtype, OpDesc, Order, ReduceOp, Transport};
use sumac_hal::dma::{Address, DmaMemory, RegionKey};
use sumac_hal::ids::{ChunkNo, Rank};
use sumac_hal::mmio::{
    AdminCommand, COMPLETION_WORDS, CompletionEntry, Contribution, EntryStatus, SUBMISSION_WORDS, SubmissionEntry,
};
use sumac_hal::ring::{Consumer, Producer, SpinPolicy};
use sumac_hal::shard::RUN;
use sumac_hal::shm::{
    AttachRefusal, Bell, Connection, DeviceUsers, Function, FunctionQueue, FunctionRing, Message, Pages, ReadOnly,
    Region, SocketError, Waiter, machine,
};

const LONG: Duration = Duration::from_secs(20);

/// A rank's ends of a queue.
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
        let waiter = Waiter::new(SpinPolicy::NONE);
        let news = || completions.available().expect("an honest device") > 0;
        let came = waiter.wait(&[queue.host_bell()], Some(Instant::now() + LONG), news).expect("a futex");
        let words = came.then(|| self.completions.pop().expect("an honest device").expect("it came"))?;
        Some(CompletionEntry::parse(&words).expect("an entry"))
    }
}

/// A rank that has joined but not attached.
struct Joined {
    rank: u32,
    tree: TreeMembership,
    session: Session,
}

/// A rank that has attached.
struct Attached {
    joined: Joined,
    connection: Connection,
    admin: Ends,
    data: Ends,
    redo: (ReadOnly, u64, u32, u32),
    next: u64,
    _function: Function,
}

fn join(cluster: &Cluster, job: &str, rank: u32, world: u32) -> Joined {
    let request = JoinRequest {
        job: job.into(),
        rank: Rank(rank),
        world,
        host: None,
        order: Order::TreeFold,
        mesh_addr: ([127, 0, 0, 1], 9).into(),
        recovery_addr: ([127, 0, 0, 1], 9).into(),
        max_packet_len_bytes: 65_000,
        transport: Transport::Shm,
        machine: machine(),
        device_users: DeviceUsers::own(),
        terms: Terms::default(),
    };
    let joined = Session::join(cluster.controller.local_addr(), request, LONG, |_| None).expect("join");
    let (session, membership) = joined;
    Joined { rank, tree: membership.tree.expect("a tree"), session }
}

fn hello(tree: &TreeMembership) -> Message {
    Message::Attach { group: tree.group, child: tree.child, key: tree.key }
}

fn connect(tree: &TreeMembership, hello: &Message) -> Connection {
    let socket = &tree.attach.as_ref().expect("zero-copy").socket;
    let connection = Connection::open(socket, LONG).expect("the board listens");
    connection.send(hello, None).expect("it is open");
    connection
}

fn attach(joined: Joined) -> Attached {
    let connection = connect(&joined.tree, &hello(&joined.tree));
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
    Attached { joined, connection, admin, data, redo, next: 0, _function: function }
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

    /// Return the entry of the next `count` chunks of f32, in place at the start of a region.
    fn run_of(&self, key: RegionKey, count: u16, elements: u32) -> Contribution {
        let at = Address { region: key, offset_bytes: 0 };
        Contribution {
            group: self.joined.tree.group,
            epoch: self.joined.tree.epoch,
            seq: ChunkNo(self.next),
            count,
            elements,
            // No chunk is acknowledged; the device tracks that itself.
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

    /// All-reduce a region of `elements` f32 in one submission, and wait for all completions.
    fn all_reduce(&mut self, key: RegionKey, elements: usize) {
        let limit = usize::from(self.joined.tree.chunk_len_bytes) / 4;
        let (first, mut done) = (self.next, 0);
        while done < elements {
            let room = (RUN - self.next % RUN).min(self.joined.tree.window_max.into()) as usize * limit;
            let part = room.min(elements - done);
            let count = part.div_ceil(limit) as u16;
            let mut entry = self.run_of(key, count, part as u32);
            for address in [&mut entry.src, &mut entry.dst].into_iter().flatten() {
                address.offset_bytes = done as u64 * 4;
            }
            self.contribute(&entry);
            done += part;
        }
        // All earlier chunks are complete: wake when these are as well.
        self.data.queue.host_threshold().set(self.next as u32);
        let mut answered = first;
        while answered < self.next {
            match self.data.completion() {
                Some(CompletionEntry::Answer { status: EntryStatus::Result, count, .. }) => {
                    answered += u64::from(count);
                }
                other => panic!("rank {}: {other:?}", self.joined.rank),
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

/// Run `world` attached ranks, each on a thread.
fn ranks<R: Send>(cluster: &Cluster, job: &str, world: u32, rank: impl Fn(Attached) -> R + Sync) -> Vec<R> {
    let rank = &rank;
    std::thread::scope(|scope| {
        let ranks: Vec<_> =
            (0..world).map(|number| scope.spawn(move || rank(attach(join(cluster, job, number, world))))).collect();
        ranks.into_iter().map(|rank| rank.join().expect("a rank panicked")).collect()
    })
}

#[test]
fn whole_operation_is_submitted_once_and_reduced_in_place() {
    const ELEMENTS: usize = 3_000_001;
    let cluster = Cluster::start(1, 3);
    ranks(&cluster, "whole", 3, |mut rank| {
        let region = Region::create(ELEMENTS * 4, Pages::Normal).expect("memory");
        let key = rank.register(1, &region);
        for round in 0..3 {
            let number = rank.joined.rank as f32;
            fill(&region, ELEMENTS, |index| (index % 1000) as f32 * (number + 1.0) + round as f32);
            rank.all_reduce(key, ELEMENTS);
            let wrong = floats(&region, ELEMENTS).into_iter().enumerate();
            let wrong = wrong.filter(|(index, sum)| *sum != (index % 1000) as f32 * 6.0 + 3.0 * round as f32).count();
            assert_eq!(wrong, 0, "round {round}");
        }
        // The redo slot holds the last result, for recovery.
        let (redo, start, slot_len_bytes, slots) = &rank.redo;
        let seq = rank.next - 1;
        let mut record = [0; 16];
        assert!(redo.read(start + seq % u64::from(*slots) * u64::from(*slot_len_bytes), &mut record));
        assert_eq!(record[8..], seq.to_le_bytes());
        assert_eq!(rank.command(AdminCommand::Deregister { region: key }).0, EntryStatus::Result);
        rank.joined.session.leave();
    });
}

#[test]
fn attach_is_accepted_once_and_from_expected_children_only() {
    let cluster = Cluster::start(1, 1);
    let joined = join(&cluster, "strangers", 0, 1);
    let refused = |connection: &Connection| match connection.receive(LONG).expect("an answer").message {
        Message::Refused { reason } => reason,
        other => panic!("{other:?}"),
    };
    let Message::Attach { group, child, key } = hello(&joined.tree) else { unreachable!() };
    let wrong_key = Message::Attach { group, child, key: key ^ 1 };
    assert_eq!(refused(&connect(&joined.tree, &wrong_key)), AttachRefusal::UnknownChild);
    let tree = joined.tree.clone();
    // A connection that starts with anything else is closed.
    let region = Region::create(4096, Pages::Normal).expect("memory");
    let socket = &tree.attach.as_ref().expect("zero-copy").socket;
    let invalid = Connection::open(socket, LONG).expect("the board listens");
    invalid.send(&Message::Memory { handle: 1 }, Some(region.file())).expect("it is open");
    assert!(matches!(invalid.receive(LONG), Err(SocketError::Closed)));
    let mut rank = attach(joined);
    assert_eq!(refused(&connect(&tree, &hello(&tree))), AttachRefusal::AlreadyAttached);
    // The attached rank is unaffected.
    let key = rank.register(1, &region);
    rank.all_reduce(key, 1024);
    rank.joined.session.leave();
}

#[test]
fn invalid_entry_is_answered_and_malformed_entry_ends_its_function_alone() {
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
        assert_eq!(rank.command(register).0, EntryStatus::BadRegion, "a handle is valid for one registration");
        both_are_there.wait();
        if rank.joined.rank == 0 {
            // A command on the data queue.
            rank.data.submit(&SubmissionEntry::Admin { cookie: 0, command: register }.emit());
            assert!(matches!(rank.connection.receive(LONG), Err(SocketError::Closed)));
            both_are_there.wait();
        } else {
            both_are_there.wait();
            // The other rank's end does not affect this function: the group waits and can be fenced.
            rank.contribute(&good);
            let (group, epoch) = (rank.joined.tree.group, rank.joined.tree.epoch);
            assert_eq!(rank.command(AdminCommand::Fence { group, epoch }).0, EntryStatus::Result);
            match rank.data.completion() {
                // The queues are independent: the fence may have overtaken it.
                Some(CompletionEntry::Answer { status: EntryStatus::Fenced | EntryStatus::UnknownGroup, .. }) => {}
                other => panic!("{other:?}"),
            }
        }
    });
}

#[test]
fn mismatched_operations_are_answered_with_both() {
    let cluster = Cluster::start(1, 2);
    ranks(&cluster, "differ", 2, |mut rank| {
        let region = Region::create(4096, Pages::Normal).expect("memory");
        let key = rank.register(1, &region);
        let number = rank.joined.rank;
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

/// Attach does not wait for the timeouts of silent connections.
#[test]
fn silent_connection_delays_no_attach() {
    let cluster = Cluster::start(1, 1);
    let joined = join(&cluster, "silent", 0, 1);
    let socket = &joined.tree.attach.as_ref().expect("zero-copy").socket;
    // Each has a second to send its request, so that one after the other they would take far longer than LONG.
    let _silent: Vec<_> = (0..40).map(|_| Connection::open(socket, LONG).expect("the board listens")).collect();
    let begun = Instant::now();
    attach(joined);
    assert!(begun.elapsed() < LONG, "it took {:?}", begun.elapsed());
}

/// The device keeps completions that are not consumed up to a limit, and then accepts no submissions. After they are
/// consumed, everything completes.
#[test]
fn untaken_completions_stop_submissions_at_a_limit() {
    const MORE_THAN_TAKEN: u32 = 20_000;
    let cluster = Cluster::start(1, 1);
    let mut rank = attach(join(&cluster, "leaves", 0, 1));
    let stale = sumac_hal::ids::Epoch { counter: u16::MAX, ..rank.joined.tree.epoch };
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
            assert!(submitted < MORE_THAN_TAKEN, "the device accepts submissions without limit");
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

/// Return all redo memory that a rank can read.
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

/// Return the number of occurrences of a value in memory.
fn count(memory: &[u8], value: f32) -> usize {
    memory.as_chunks::<4>().0.iter().filter(|word| f32::from_le_bytes(**word) == value).count()
}

/// Redo slots hold sums; no other group may read them.
#[test]
fn redo_memory_is_zeroed_and_private_to_its_group() {
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
    assert!(is_zero(&victim), "new redo memory must be zero");
    sum(&mut victim, secret);
    let published = redo_memory(&victim);
    assert!(count(&published, secret) > 0, "redo slots must hold the results");
    // Another job on the same device at the same time.
    let mut other = attach(join(&cluster, "other", 0, 1));
    assert!(is_zero(&other), "the other group's redo memory must be zero");
    sum(&mut other, own);
    let found = redo_memory(&other);
    assert_eq!((count(&found, secret), count(&found, own) > 0), (0, true));
    assert!(redo_memory(&victim) == published, "only the group's own slots are readable");
    let (_, start, slot_len_bytes, slots) = other.redo;
    assert_eq!(
        (start, found.len()),
        (0, slot_len_bytes as usize * slots as usize),
        "exactly the group's slots are readable"
    );
    // A job after both have left reuses their memory.
    victim.joined.session.leave();
    other.joined.session.leave();
    let deadline = Instant::now() + LONG;
    while !status(cluster.controller.local_addr()).expect("a report").jobs.is_empty() {
        assert!(Instant::now() < deadline, "the job must end with its rank");
        std::thread::yield_now();
    }
    assert!(is_zero(&attach(join(&cluster, "after", 0, 1))), "reused redo memory must be zero");
}

/// The device unmaps a rank's memory however the rank leaves.
#[test]
fn departed_rank_leaves_no_resources() {
    let cluster = Cluster::start(1, 1);
    let mapped = || {
        let maps = std::fs::read_to_string("/proc/self/maps").expect("/proc is readable");
        maps.lines().filter(|line| line.contains("sumac-region") || line.contains("sumac-bar")).count()
    };
    let (before, fds) = (mapped(), std::fs::read_dir("/proc/self/fd").expect("/proc is readable").count());
    for round in 0..5 {
        let mut rank = attach(join(&cluster, &format!("gone-{round}"), 0, 1));
        let region = Region::create(1 << 20, Pages::Normal).expect("memory");
        let key = rank.register(1, &region);
        rank.all_reduce(key, 1 << 18);
        if round % 2 == 0 {
            rank.joined.session.leave();
        }
    }
    let deadline = Instant::now() + LONG;
    while mapped() > before || std::fs::read_dir("/proc/self/fd").expect("/proc is readable").count() > fds {
        assert!(Instant::now() < deadline, "{} mappings, {before} before", mapped());
        std::thread::yield_now();
    }
}

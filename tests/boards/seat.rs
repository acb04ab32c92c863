//! A rank attached to a board without the checks that keep an honest rank within the protocol.

use std::net::SocketAddr;
use std::sync::atomic::Ordering;
use std::thread;
use std::time::{Duration, Instant};
use sumac::controller::Session;
use sumac::controller::proto::{JoinRequest, Terms, TreeMembership};
use sumac::{Collective, Dtype, Order, ReduceOp, Transport};
use sumac_hal::dma::{Address, RegionKey};
use sumac_hal::ids::{ChunkNo, Rank};
use sumac_hal::mmio::admission::{ARENA_OFFSET_BYTES, RANK_QUEUE_DEPTH};
use sumac_hal::mmio::{
    AdminCommand, COMPLETION_WORDS, CompletionEntry, Contribution, EntryStatus, SUBMISSION_WORDS, SubmissionEntry,
    queue_stride_bytes,
};
use sumac_hal::ring::{Consumer, Producer};
use sumac_hal::shm::{
    AttachRefusal, BarMemory, Connection, DeviceUsers, Function, FunctionRing, Message, SocketError, machine,
};

const LONG: Duration = Duration::from_secs(20);

/// The offset of the first queue's block in a function (`sumac_hal::mmio`).
const QUEUES_OFFSET: usize = 0x2000;

/// A seeded pseudo-random generator (splitmix64).
pub(crate) struct Random(pub(crate) u64);

impl Random {
    pub(crate) fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mixed = (self.0 ^ self.0 >> 30).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        let mixed = (mixed ^ mixed >> 27).wrapping_mul(0x94d0_49bb_1331_11eb);
        mixed ^ mixed >> 31
    }

    pub(crate) fn below(&mut self, end: u64) -> u64 {
        self.next() % end
    }

    fn pick<T: Copy>(&mut self, of: &[T]) -> T {
        of[self.below(of.len() as u64) as usize]
    }
}

/// Values near the limits of length checks.
pub(crate) struct Edges([u64; 12]);

impl Edges {
    pub(crate) const fn of(len: u64) -> Self {
        Self([0, 0, 1, 4, 7, 8, len - 8, len, len + 1, 1 << 63, u64::MAX - 7, u64::MAX])
    }

    pub(crate) fn pick(&self, random: &mut Random) -> u64 {
        random.pick(&self.0)
    }
}

/// A rank that has joined a job of two.
pub(crate) struct Joined {
    pub(crate) tree: TreeMembership,
    session: Session,
}

/// The ends of a queue.
pub(crate) struct Ends {
    submissions: Producer<FunctionRing<SUBMISSION_WORDS>, SUBMISSION_WORDS>,
    completions: Consumer<FunctionRing<COMPLETION_WORDS>, COMPLETION_WORDS>,
}

/// An attached rank.
pub(crate) struct Seat {
    pub(crate) tree: TreeMembership,
    pub(crate) queues: [Ends; 2],
    pub(crate) arena_len_bytes: u64,
    connection: Connection,
    /// The function's memory, for arbitrary writes.
    memory: BarMemory,
    _session: Session,
}

/// Let two ranks join a new job.
pub(crate) fn join(controller: SocketAddr, job: &str) -> [Joined; 2] {
    let rank = |number| {
        let request = JoinRequest {
            // Names of cases contain spaces.
            job: job.replace(' ', "-"),
            rank: Rank(number),
            world: 2,
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
        let (session, membership) = Session::join(controller, request, LONG, |_| None).expect("join");
        Joined { tree: membership.tree.expect("a tree"), session }
    };
    thread::scope(|scope| {
        let ranks = [0, 1].map(|number| scope.spawn(move || rank(number)));
        ranks.map(|rank| rank.join().expect("a rank panicked"))
    })
}

pub(crate) fn connect(tree: &TreeMembership, hello: &Message) -> Connection {
    let socket = &tree.attach.as_ref().expect("by reference").socket;
    let connection = Connection::open(socket, LONG).expect("the broker listens");
    connection.send(hello, None).expect("it is open");
    connection
}

pub(crate) fn refusal(connection: &Connection) -> AttachRefusal {
    match connection.receive(LONG).expect("an answer").message {
        Message::Refused { reason } => reason,
        other => panic!("{other:?}"),
    }
}

impl Joined {
    pub(crate) fn attach(self) -> Seat {
        let Self { tree, session } = self;
        let hello = Message::Attach { group: tree.group, child: tree.child, key: tree.key };
        let connection = connect(&tree, &hello);
        let next = || connection.receive(LONG).expect("a message");
        let file = next().file.expect("the function");
        let memory = BarMemory::open(file.try_clone().expect("a descriptor"), 1 << 30).expect("its memory");
        let (function, _) = Function::open(file).expect("a function");
        let queues = [0, 1].map(|index| {
            let queue = function.queue(index).expect("a queue");
            assert_eq!(next().message, Message::Bell { queue: index });
            Ends { submissions: Producer::new(queue.submissions), completions: Consumer::new(queue.completions) }
        });
        assert!(matches!(next().message, Message::Redo { .. }));
        let Message::Arena { len_bytes, .. } = next().message else { panic!("an arena") };
        Seat { tree, queues, arena_len_bytes: len_bytes, connection, memory, _session: session }
    }
}

impl Ends {
    pub(crate) fn push(&mut self, words: &[u64; SUBMISSION_WORDS]) {
        assert!(self.try_push(words), "there is room");
    }

    /// As above; false if the ring has no room or no longer exists.
    pub(crate) fn try_push(&mut self, words: &[u64; SUBMISSION_WORDS]) -> bool {
        self.submissions.push(words) == Ok(true)
    }

    /// Take the next reply, if there is one.
    pub(crate) fn poll(&mut self) -> Option<CompletionEntry> {
        let words = self.completions.pop().expect("an honest board")?;
        Some(CompletionEntry::parse(&words).expect("an entry"))
    }
}

impl Seat {
    /// Wait for the next reply on a queue.
    pub(crate) fn answer(&mut self, queue: usize) -> CompletionEntry {
        let deadline = Instant::now() + LONG;
        loop {
            if let Some(entry) = self.queues[queue].poll() {
                return entry;
            }
            assert!(Instant::now() < deadline, "no answer");
            thread::yield_now();
        }
    }

    pub(crate) fn command(&mut self, command: AdminCommand) -> (EntryStatus, u64) {
        self.queues[0].push(&SubmissionEntry::Admin { cookie: 77, command }.emit());
        match self.answer(0) {
            CompletionEntry::Admin { status, cookie: 77, value } => (status, value),
            other => panic!("{other:?}"),
        }
    }

    pub(crate) fn register(&mut self, handle: u64, len_bytes: u64) -> Result<RegionKey, EntryStatus> {
        match self.command(AdminCommand::Register { handle, offset_bytes: 0, len_bytes }) {
            (EntryStatus::Result, value) => Ok(RegionKey::from_bits(value).expect("a key")),
            (status, _) => Err(status),
        }
    }

    /// Wait until the broker disconnects.
    pub(crate) fn wait_for_end(&self) {
        match self.connection.receive(LONG) {
            Err(SocketError::Closed) => {}
            other => panic!("who breaks a ring is hung up on: {other:?}"),
        }
    }

    /// Write an index that this side owns: the number of entries submitted, or of completions consumed.
    pub(crate) fn write_index(&self, queue: u32, completions: bool, index: u32) {
        // In each block: the producer index of submissions; 0x100 later, in the second line, the consumer index of
        // completions.
        let line = if completions { 0x180 } else { 0 };
        let at = QUEUES_OFFSET + queue as usize * queue_stride_bytes(RANK_QUEUE_DEPTH) + line;
        self.memory.words()[at / 8].store(index.into(), Ordering::SeqCst);
    }

    /// Overwrite `words` random words of the function.
    pub(crate) fn scribble(&self, random: &mut Random, words: usize) {
        let all = &self.memory.words()[..ARENA_OFFSET_BYTES / 8];
        (0..words).for_each(|_| all[random.below(all.len() as u64) as usize].store(random.next(), Ordering::Relaxed));
    }

    /// A contribution to the first chunk, valid except perhaps for its region.
    pub(crate) fn contribution(&self, region: RegionKey) -> Contribution {
        let at = Some(Address { region, offset_bytes: 0 });
        Contribution {
            group: self.tree.group,
            epoch: self.tree.epoch,
            seq: ChunkNo(0),
            count: 1,
            elements: u32::from(self.tree.chunk_len_bytes) / 4,
            lag: 0,
            collective: Collective::AllReduce,
            dtype: Some(Dtype::F32),
            op: Some(ReduceOp::Sum),
            root: Rank(0),
            total: 1 << 20,
            signature: 1,
            src: at,
            dst: at,
        }
    }

    /// A contribution whose fields have random valid or boundary values.
    pub(crate) fn edge_contribution(&self, own: RegionKey, random: &mut Random) -> Contribution {
        let good = self.contribution(own);
        let window = u64::from(self.tree.window_max);
        let address = |random: &mut Random| {
            let index = random.pick(&[own.index, own.index, 0, 1, 511, 512, u16::MAX]);
            let generation = random.pick(&[own.generation, own.generation, 0, 1, 2, u32::MAX]);
            let offset_bytes = random.pick(&[0, 0, 8, 4, 1 << 16, (1 << 16) - 8, (1 << 48) - 1]);
            random.pick(&[None, Some(Address { region: RegionKey { index, generation }, offset_bytes })])
        };
        Contribution {
            // Rarely one that waits for a window that never opens: it blocks all later entries of the ring.
            seq: ChunkNo(random.pick(&[0, 0, 1, 2, 15, 16, window - 1, 1 << 40, u64::MAX])),
            count: random.pick(&[1, 1, 2, 16, 17, u16::MAX]),
            elements: random.pick(&[0, 1, good.elements, 2 * good.elements, 16 * good.elements, u32::MAX]),
            lag: random.pick(&[0, 0, 1, 16, u16::MAX]),
            collective: random.pick(Collective::ALL),
            dtype: random.pick(&[None, Some(Dtype::F32), Some(Dtype::I8), Some(Dtype::Bf16), Some(Dtype::F64)]),
            op: random.pick(&[None, Some(ReduceOp::Sum), Some(ReduceOp::Avg), Some(ReduceOp::Bxor)]),
            root: Rank(random.pick(&[0, 1, 2, 65_535])),
            total: random.pick(&[0, 1, 1 << 20, (1 << 40) - 1]),
            signature: random.pick(&[1, 1, 0, u32::MAX]),
            src: address(random),
            dst: address(random),
            ..good
        }
    }
}

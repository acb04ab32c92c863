//! Declared orders: sums that round have the bits of the declared expression, whichever way contributions come, whoever
//! comes first, and whatever the engine does itself.

use crate::calls::{Call, leaf};
use crate::common::Cluster;
use crate::seats::shape;
use std::sync::{Condvar, Mutex};
use std::time::Duration;
use sumac::controller::ControllerConfig;
use sumac::{Algo, Attach, Communicator, Held, JoinConfig, OpDesc, Order, Path, ReduceOp, Transfer};
use sumac_firmware::emulated::BusConfig;
use sumac_hal::dma::Profile;
use sumac_hal::op::Dtype;
use sumac_tests::oracle::{Shape, weight};

const SEED: u64 = 0x0dd5;

const ELEMENTS: u64 = 5000;

/// Small enough for the elements to be many chunks.
const CHUNK_LEN_BYTES: u16 = 2048;

/// Times that each way is gone, by ranks that come in another order each time.
const RUNS: u64 = 3;

const LONG: Duration = Duration::from_secs(60);

/// How the ranks of a job reach their leaf.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Ranks {
    ByReference,
    ByPackets,
    /// Every other one by packets.
    Mixed,
}

impl Ranks {
    fn attach(self, rank: u32) -> Attach {
        match self {
            Self::Mixed if rank % 2 == 1 => Attach::Udp,
            Self::ByPackets => Attach::Udp,
            _ => Attach::Shm,
        }
    }
}

/// Lets ranks begin one after the other.
#[derive(Default)]
struct Turns {
    begun: Mutex<usize>,
    next: Condvar,
}

impl Turns {
    /// Do something as the `turn`th.
    fn take<R>(&self, turn: usize, begin: impl FnOnce() -> R) -> R {
        let begun = self.begun.lock().expect("nobody panics");
        let waited = self.next.wait_timeout_while(begun, LONG, |begun| *begun != turn);
        let (mut begun, late) = waited.expect("nobody panics");
        assert!(!late.timed_out(), "the rank before has not begun");
        let result = begin();
        *begun += 1;
        self.next.notify_all();
        result
    }
}

/// Return each rank's turn in a run: a permutation drawn for it.
fn turns(ranks: usize, run: u64) -> Vec<usize> {
    let mut order: Vec<usize> = (0..ranks).collect();
    order.sort_by_key(|&rank| weight(&[SEED, run, rank as u64]));
    let mut turns = vec![0; ranks];
    order.into_iter().enumerate().for_each(|(turn, rank)| turns[rank] = turn);
    turns
}

/// All-reduce what `call` says in a container of each kind, begun as the `turn`th; returns the bytes of the result.
fn all_reduce<B: Held>(
    comm: &Communicator,
    mut memory: B,
    call: &Call,
    turns: &Turns,
    turn: usize,
) -> (Vec<u8>, Transfer) {
    let rank = comm.rank() as usize;
    bytemuck::cast_slice_mut(memory.values_mut()).copy_from_slice(&call.input(rank, call.given(rank)));
    let handle = turns.take(turn, || comm.start_all_reduce(memory, ReduceOp::Sum).expect("started"));
    let (memory, outcome) = handle.wait().expect("a sum");
    assert_eq!(outcome.path, Path::Tree);
    (bytemuck::cast_slice(memory.values()).to_vec(), outcome.transfer.expect("through the tree"))
}

/// The sums of one rank in one run: registered, then in other memory, each in f32 and bf16.
fn sums(comm: &Communicator, calls: &[Call; 2], turns: &[Turns; 4], turn: usize) -> Vec<(Vec<u8>, Transfer)> {
    let len = ELEMENTS as usize;
    vec![
        all_reduce(comm, comm.alloc::<f32>(len).expect("memory"), &calls[0], &turns[0], turn),
        all_reduce(comm, comm.alloc::<half::bf16>(len).expect("memory"), &calls[1], &turns[1], turn),
        all_reduce(comm, vec![0_f32; len], &calls[0], &turns[2], turn),
        all_reduce(comm, vec![half::bf16::ZERO; len], &calls[1], &turns[3], turn),
    ]
}

fn calls(shape: &Shape, ranks: usize, order: Order) -> [Call; 2] {
    [Dtype::F32, Dtype::Bf16].map(|dtype| {
        let desc = OpDesc::all_reduce(dtype, ReduceOp::Sum, ELEMENTS);
        Call::new(desc, (shape, ranks, order), SEED)
    })
}

/// Run a job several times over, and check every rank's every result; returns how many sums there were.
fn check(cluster: &Cluster, job: &str, ranks: Ranks, order: Order, calls: &[Call; 2], world: usize) -> usize {
    let barriers: Vec<[Turns; 4]> = (0..RUNS).map(|_| Default::default()).collect();
    let configure = |config: &mut JoinConfig| {
        (config.algo, config.order, config.attach) = (Algo::Tree, order, ranks.attach(config.rank));
    };
    let found = cluster.run(job, world as u32, configure, |comm| {
        let run = |run: u64| {
            let turn = turns(world, run)[comm.rank() as usize];
            sums(&comm, calls, &barriers[run as usize], turn)
        };
        let found: Vec<_> = (0..RUNS).flat_map(run).collect();
        comm.leave();
        found
    });
    for (rank, found) in (0..).zip(&found) {
        for (nth, (bits, transfer)) in found.iter().enumerate() {
            let expected = match (ranks.attach(rank), nth % 4) {
                (Attach::Udp, _) => Transfer::Packets,
                (_, 0 | 1) => Transfer::Registered,
                _ => Transfer::Bounced,
            };
            assert_eq!(*transfer, expected, "{job}, rank {rank}");
            let call = &calls[nth % 2];
            assert!(
                *bits == call.result(call.given(0)),
                "{job}, rank {rank}, {transfer:?}, run {}: other bits",
                nth / 4
            );
        }
    }
    found[0].len()
}

/// What an engine would make of bf16 that rounds at every step.
fn rounded_each_time(call: &Call, ranks: usize) -> Vec<u8> {
    let inputs: Vec<Vec<u8>> = (0..ranks).map(|rank| call.input(rank, call.given(rank))).collect();
    let value = |rank: usize, e: usize| half::bf16::from_le_bytes([inputs[rank][2 * e], inputs[rank][2 * e + 1]]);
    let sum = |e| (0..ranks).map(|rank| value(rank, e)).reduce(|a, b| a + b).expect("ranks");
    (0..ELEMENTS as usize).flat_map(|e| sum(e).to_le_bytes()).collect()
}

#[test]
fn every_way_gives_the_bits_of_the_declared_expression() {
    let mut sums = 0;
    for world in [5, 8] {
        let shape = leaf(0..world);
        let [fold, pairwise] = [Order::TreeFold, Order::TreePairwise].map(|order| calls(&shape, world, order));
        let whole = 0..ELEMENTS as usize;
        assert!(fold[0].result(whole.clone()) != pairwise[0].result(whole.clone()), "the order does not matter");
        assert!(fold[1].result(whole.clone()) != rounded_each_time(&fold[1], world), "when to round does not matter");
        for profile in Profile::ALL {
            let bus = BusConfig { profile, strict: true, ..BusConfig::default() };
            let config = ControllerConfig {
                reference_chunk_max_bytes: CHUNK_LEN_BYTES,
                chunk_max_bytes: CHUNK_LEN_BYTES,
                ..ControllerConfig::new()
            };
            let cluster = Cluster::start_on(1, world, bus, config);
            for (order, calls) in [(Order::TreeFold, &fold), (Order::TreePairwise, &pairwise)] {
                for ranks in [Ranks::ByReference, Ranks::Mixed, Ranks::ByPackets] {
                    let job = format!("{order:?} {ranks:?} {profile}");
                    sums += check(&cluster, &job, ranks, order, calls, world);
                }
            }
            assert_eq!(cluster.boards[0].failed_chains(), 0, "strict mode has tripped");
        }
    }
    println!("seed {SEED:#x}: {sums} sums, each with the bits of its expression");
}

/// Two levels: the leaves by reference, in part or not, and packets above them.
#[test]
fn two_levels_give_the_bits_of_the_declared_expression() {
    let mut sums = 0;
    for profile in Profile::ALL {
        let bus = BusConfig { profile, strict: true, ..BusConfig::default() };
        let config = ControllerConfig { chunk_max_bytes: CHUNK_LEN_BYTES, ..ControllerConfig::new() };
        let cluster = Cluster::start_on(2, 3, bus, config);
        for order in [Order::TreeFold, Order::TreePairwise] {
            let shape = shape(&cluster, 6, order);
            assert_ne!(shape, leaf(0..6), "one level");
            let calls = calls(&shape, 6, order);
            for ranks in [Ranks::ByReference, Ranks::Mixed] {
                sums += check(&cluster, &format!("{order:?} {ranks:?}"), ranks, order, &calls, 6);
            }
        }
        let failed = cluster.boards.iter().map(|board| board.failed_chains()).sum::<u64>();
        assert_eq!(failed, 0, "strict mode has tripped");
    }
    println!("seed {SEED:#x}: {sums} sums, each with the bits of its expression");
}

//! Declared orders: sums that round have the bits of the declared order over every transport, for every order of
//! arrival, on every kind of engine.

use crate::call::{Call, leaf};
use crate::common::Cluster;
use crate::membership::shape;
use std::sync::{Condvar, Mutex};
use std::time::Duration;
use sumac::controller::ControllerConfig;
use sumac::{Algo, Communicator, JoinConfig, OpDesc, Order, OwnedBuffer, Path, ReduceOp, Transfer, Transport};
use sumac_firmware::emulated::ZeroCopyConfig;
use sumac_hal::dma::Profile;
use sumac_hal::op::Dtype;
use sumac_tests::oracle::{Shape, weight};

const SEED: u64 = 0x0dd5;

const ELEMENTS: u64 = 5000;

/// Small, so that an operation has many chunks.
const CHUNK_LEN_BYTES: u16 = 2048;

/// Runs of each combination; ranks arrive in another order each time.
const RUNS: u64 = 3;

const LONG: Duration = Duration::from_secs(60);

/// The transports of a job's ranks.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Ranks {
    ZeroCopy,
    Packets,
    /// Every other rank over UDP.
    Mixed,
}

impl Ranks {
    fn transport(self, rank: u32) -> Transport {
        match self {
            Self::Mixed if rank % 2 == 1 => Transport::Udp,
            Self::Packets => Transport::Udp,
            _ => Transport::Shm,
        }
    }
}

/// Makes ranks start in a given order.
#[derive(Default)]
struct Turns {
    begun: Mutex<usize>,
    next: Condvar,
}

impl Turns {
    /// Wait for the turn `turn`, then run `begin`.
    fn take<R>(&self, turn: usize, begin: impl FnOnce() -> R) -> R {
        let begun = self.begun.lock().expect("not poisoned");
        let waited = self.next.wait_timeout_while(begun, LONG, |begun| *begun != turn);
        let (mut begun, late) = waited.expect("not poisoned");
        assert!(!late.timed_out(), "the previous rank has not started");
        let result = begin();
        *begun += 1;
        self.next.notify_all();
        result
    }
}

/// Draw a permutation for a run; return each rank's turn.
fn turns(ranks: usize, run: u64) -> Vec<usize> {
    let mut order: Vec<usize> = (0..ranks).collect();
    order.sort_by_key(|&rank| weight(&[SEED, run, rank as u64]));
    let mut turns = vec![0; ranks];
    order.into_iter().enumerate().for_each(|(turn, rank)| turns[rank] = turn);
    turns
}

/// Run `call` in `memory`, started as the `turn`th rank; return the bytes of the result.
fn all_reduce<B: OwnedBuffer>(
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

/// The sums of one rank in one run: in registered, then in plain memory, each in f32 and bf16.
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

/// Run a job `RUNS` times and check all results of all ranks; return the number of sums of a rank.
fn check(cluster: &Cluster, job: &str, ranks: Ranks, order: Order, calls: &[Call; 2], world: usize) -> usize {
    let barriers: Vec<[Turns; 4]> = (0..RUNS).map(|_| Default::default()).collect();
    let configure = |config: &mut JoinConfig| {
        (config.algo, config.order, config.transport) = (Algo::Tree, order, ranks.transport(config.rank));
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
            let expected = match (ranks.transport(rank), nth % 4) {
                (Transport::Udp, _) => Transfer::Packets,
                (_, 0 | 1) => Transfer::ZeroCopy,
                _ => Transfer::Bounced,
            };
            assert_eq!(*transfer, expected, "{job}, rank {rank}");
            let call = &calls[nth % 2];
            assert!(
                *bits == call.result(call.given(0)),
                "{job}, rank {rank}, {transfer:?}, run {}: the bits differ",
                nth / 4
            );
        }
    }
    found[0].len()
}

/// The sum in bf16 if every step rounded.
fn rounded_each_time(call: &Call, ranks: usize) -> Vec<u8> {
    let inputs: Vec<Vec<u8>> = (0..ranks).map(|rank| call.input(rank, call.given(rank))).collect();
    let value = |rank: usize, e: usize| half::bf16::from_le_bytes([inputs[rank][2 * e], inputs[rank][2 * e + 1]]);
    let sum = |e| (0..ranks).map(|rank| value(rank, e)).reduce(|a, b| a + b).expect("ranks");
    (0..ELEMENTS as usize).flat_map(|e| sum(e).to_le_bytes()).collect()
}

#[test]
fn every_transport_gives_the_bits_of_the_declared_order() {
    let mut sums = 0;
    for world in [5, 8] {
        let shape = leaf(0..world);
        let [fold, pairwise] = [Order::TreeFold, Order::TreePairwise].map(|order| calls(&shape, world, order));
        let whole = 0..ELEMENTS as usize;
        assert!(
            fold[0].result(whole.clone()) != pairwise[0].result(whole.clone()),
            "these inputs do not depend on the order"
        );
        assert!(
            fold[1].result(whole.clone()) != rounded_each_time(&fold[1], world),
            "these inputs do not depend on when to round"
        );
        for profile in Profile::ALL {
            let bus = ZeroCopyConfig { profile, strict: true, ..ZeroCopyConfig::default() };
            let config = ControllerConfig {
                zero_copy_chunk_max_bytes: CHUNK_LEN_BYTES,
                chunk_max_bytes: CHUNK_LEN_BYTES,
                ..ControllerConfig::new()
            };
            let cluster = Cluster::start_zero_copy(1, world, bus, config);
            for (order, calls) in [(Order::TreeFold, &fold), (Order::TreePairwise, &pairwise)] {
                for ranks in [Ranks::ZeroCopy, Ranks::Mixed, Ranks::Packets] {
                    let job = format!("{order:?} {ranks:?} {profile}");
                    sums += check(&cluster, &job, ranks, order, calls, world);
                }
            }
            assert_eq!(cluster.boards[0].failed_chains(), 0, "a chain failed in strict mode");
        }
    }
    println!("seed {SEED:#x}: {sums} sums, each with the bits of its declared order");
}

/// Two levels: zero-copy or mixed transports at the leaves, packets above them.
#[test]
fn two_levels_give_the_bits_of_the_declared_order() {
    let mut sums = 0;
    for profile in Profile::ALL {
        let bus = ZeroCopyConfig { profile, strict: true, ..ZeroCopyConfig::default() };
        let config = ControllerConfig { chunk_max_bytes: CHUNK_LEN_BYTES, ..ControllerConfig::new() };
        let cluster = Cluster::start_zero_copy(2, 3, bus, config);
        for order in [Order::TreeFold, Order::TreePairwise] {
            let shape = shape(&cluster, 6, order);
            assert_ne!(shape, leaf(0..6), "one level");
            let calls = calls(&shape, 6, order);
            for ranks in [Ranks::ZeroCopy, Ranks::Mixed] {
                sums += check(&cluster, &format!("{order:?} {ranks:?}"), ranks, order, &calls, 6);
            }
        }
        let failed = cluster.boards.iter().map(|board| board.failed_chains()).sum::<u64>();
        assert_eq!(failed, 0, "a chain failed in strict mode");
    }
    println!("seed {SEED:#x}: {sums} sums, each with the bits of its declared order");
}

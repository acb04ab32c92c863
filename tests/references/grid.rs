//! The whole table by reference: every offloaded collective x element type x operator x number of ranks, on each kind of
//! engine in strict mode, with counts, memory and places drawn for each call.

use crate::calls::{Arena, Call, Way, check_by_reference, leaf};
use crate::common::Cluster;
use std::collections::BTreeSet;
use std::time::Instant;
use sumac::controller::ControllerConfig;
use sumac::{Algo, Attach, Collective, OpDesc, Order, Path, ReduceOp};
use sumac_firmware::emulated::BusConfig;
use sumac_hal::dma::Profile;
use sumac_hal::ids::Rank;
use sumac_hal::op::Dtype;
use sumac_hal::reduce::Kernel;
use sumac_tests::oracle::weight;

const SEED: u64 = 0x5eed;

/// How often each operation of the table is drawn.
const ROUNDS: u64 = 2;

/// Short chunks, whose chains the device does at once, and ones long enough for the engine's threads.
const CHUNKS_LEN_BYTES: [u16; 2] = [320, 24 << 10];

/// How many elements: none, one, an odd number, some chunks and a bit, more chunks than a window has.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
enum Count {
    Elements(u64),
    Chunks(u64),
}

const COUNTS: [Count; 5] =
    [Count::Elements(0), Count::Elements(1), Count::Elements(13), Count::Chunks(3), Count::Chunks(70)];

impl Count {
    fn elements(self, desc: &OpDesc, chunk_len_bytes: u16) -> u64 {
        match self {
            Self::Elements(count) => count,
            Self::Chunks(chunks) => chunks * (u64::from(chunk_len_bytes) / desc.partial_bytes() as u64) + 5,
        }
    }
}

/// Every type and operator that go together.
fn pairs() -> impl Iterator<Item = (Dtype, ReduceOp)> {
    let all = Dtype::ALL.iter().flat_map(|&dtype| ReduceOp::ALL.iter().map(move |&op| (dtype, op)));
    all.filter(|&(dtype, op)| Kernel::new(dtype, op).is_some())
}

/// Every collective with every type and operator that it takes.
fn shapes(root: Rank) -> Vec<OpDesc> {
    let mut shapes = vec![OpDesc::barrier()];
    for &dtype in Dtype::ALL {
        shapes.extend([OpDesc::broadcast(dtype, root, 0), OpDesc::all_gather(dtype, 0)]);
    }
    for (dtype, op) in pairs() {
        shapes.extend([
            OpDesc::all_reduce(dtype, op, 0),
            OpDesc::reduce(dtype, op, root, 0),
            OpDesc::reduce_scatter(dtype, op, 0),
        ]);
    }
    shapes
}

/// What one communicator runs.
struct Plan {
    ranks: usize,
    profile: Profile,
    chunk_len_bytes: u16,
    order: Order,
    calls: Vec<(Count, Call)>,
}

impl Plan {
    fn draw(ranks: usize, profile: Profile, (chunk_len_bytes, round): (u16, u64)) -> Self {
        let number = [SEED, ranks as u64, profile as u64, chunk_len_bytes.into(), round];
        let drawn = |index: usize, what: u64| weight(&[&number[..], &[index as u64, what]].concat());
        let order = [Order::Arrival, Order::TreeFold, Order::TreePairwise][drawn(0, 0) as usize % 3];
        let root = Rank(drawn(0, 1) as u32 % ranks as u32);
        let is_long = chunk_len_bytes == CHUNKS_LEN_BYTES[1];
        let shapes = shapes(root).into_iter().enumerate();
        // Long chunks take long to check: each type with each operator in one collective, and only counts that have some.
        let taken = shapes
            .filter(|(index, desc)| !is_long || desc.op.is_none() || index % 3 == drawn(index / 3, 2) as usize % 3);
        let calls = taken.map(|(index, desc)| {
            let count = match desc.collective {
                Collective::Barrier => Count::Elements(0),
                _ if is_long => Count::Chunks(1 + drawn(index, 3) % 3),
                _ => COUNTS[drawn(index, 3) as usize % COUNTS.len()],
            };
            let elements = if desc.dtype.is_some() { count.elements(&desc, chunk_len_bytes) } else { 0 };
            let shape = leaf(0..ranks);
            (count, Call::new(OpDesc { count: elements, ..desc }, (&shape, ranks, order), drawn(index, 4)))
        });
        Self { ranks, profile, chunk_len_bytes, order, calls: calls.collect() }
    }

    /// Run the calls on a cluster of their own; returns which ways each rank took for each.
    fn run(&self) -> Vec<Vec<Way>> {
        let bus =
            BusConfig { profile: self.profile, threads: 1 + self.ranks % 2, strict: true, ..BusConfig::default() };
        let config = ControllerConfig { reference_chunk_max_bytes: self.chunk_len_bytes, ..ControllerConfig::new() };
        let cluster = Cluster::start_on(1, self.ranks, bus, config);
        let configure = |config: &mut sumac::JoinConfig| {
            (config.algo, config.attach, config.order) = (Algo::Tree, Attach::Shm, self.order);
        };
        let ways = cluster.run("grid", self.ranks as u32, configure, |comm| {
            let (rank, mut arena) = (comm.rank() as usize, Arena::new(&comm));
            let call = |(_, call): &(Count, Call)| {
                let way = Way::draw(call, rank);
                let checked = arena.call(&comm, call, way).and_then(|outcome| match self.ranks {
                    1 if outcome.path == Path::Local && outcome.transfer.is_none() => Ok(()),
                    _ => check_by_reference(call, way, rank, &outcome),
                });
                checked.unwrap_or_else(|why| {
                    let (Self { ranks, profile, order, .. }, desc) = (self, call.desc);
                    panic!("{desc}, {order:?}, rank {rank} of {ranks}, {profile} engine, {way:?}: {why}")
                });
                way
            };
            let ways = self.calls.iter().map(call).collect();
            comm.leave();
            ways
        });
        let failed = cluster.boards.iter().map(|board| board.failed_chains()).sum::<u64>();
        assert_eq!(failed, 0, "{} ranks on a {} engine: strict mode has tripped", self.ranks, self.profile);
        ways
    }
}

#[test]
fn every_collective_type_and_operator_by_reference() {
    let begun = Instant::now();
    let (mut operations, mut combinations, mut reduced) = (0, BTreeSet::new(), BTreeSet::new());
    for profile in Profile::ALL {
        for ranks in [1, 2, 3, 4, 8] {
            for variant in CHUNKS_LEN_BYTES.into_iter().flat_map(|len| (0..ROUNDS).map(move |round| (len, round))) {
                let plan = Plan::draw(ranks, profile, variant);
                for (rank, ways) in plan.run().into_iter().enumerate() {
                    for ((count, call), way) in plan.calls.iter().zip(ways) {
                        let (desc, memory) = (call.desc, (way.registered_input, way.registered_output, way.in_place));
                        combinations.insert((profile as u8, ranks, desc.collective, *count, memory));
                        reduced.insert((profile as u8, desc.dtype, desc.op));
                        operations += usize::from(rank == 0);
                    }
                }
            }
        }
    }
    let (seconds, combinations) = (begun.elapsed().as_secs_f32(), combinations.len());
    println!(
        "seed {SEED:#x}: {operations} operations in {seconds:.1} s, {combinations} combinations of engine, ranks,"
    );
    println!("collective, count and memory, {} of engine, type and operator", reduced.len());
    // Each pair, and each type that is only moved, on each engine; a barrier has neither.
    assert_eq!(reduced.len(), Profile::ALL.len() * (pairs().count() + Dtype::ALL.len() + 1));
}

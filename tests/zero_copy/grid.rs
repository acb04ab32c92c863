//! Every offloaded collective x element type x operator x number of ranks over zero-copy, on each kind of engine in
//! strict mode. Counts and the placement of buffers are drawn for each call.

use crate::call::{Arena, Call, Placement, check_zero_copy, leaf};
use crate::common::Cluster;
use crate::membership::shape;
use std::collections::BTreeSet;
use std::time::Instant;
use sumac::controller::ControllerConfig;
use sumac::{Algo, Collective, Communicator, JoinConfig, OpDesc, Order, Path, ReduceOp, Transfer, Transport};
use sumac_firmware::emulated::ZeroCopyConfig;
use sumac_hal::dma::Profile;
use sumac_hal::ids::Rank;
use sumac_hal::op::Dtype;
use sumac_hal::reduce::Kernel;
use sumac_tests::oracle::{Shape, weight};

const SEED: u64 = 0x5eed;

/// How often each operation is drawn.
const ROUNDS: u64 = 2;

/// Short chunks, whose chains the device runs inline, and chunks long enough for the engine's threads.
const CHUNKS_LEN_BYTES: [u16; 2] = [320, 24 << 10];

/// A number of elements: none, one, an odd number, several chunks plus a remainder, or more chunks than a window.
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

/// The tree, and the transports of its ranks.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Layout {
    /// One device, all ranks over zero-copy.
    ZeroCopy,
    /// One device, every other rank over UDP.
    Mixed,
    /// Two leaves, all ranks over zero-copy, packets between the devices.
    TwoLevels,
    /// Two leaves, every other rank over UDP.
    TwoLevelsMixed,
}

impl Layout {
    const fn leaves(self) -> usize {
        match self {
            Self::ZeroCopy | Self::Mixed => 1,
            Self::TwoLevels | Self::TwoLevelsMixed => 2,
        }
    }

    const fn transport(self, rank: u32) -> Transport {
        match self {
            Self::Mixed | Self::TwoLevelsMixed if rank % 2 == 1 => Transport::Udp,
            _ => Transport::Shm,
        }
    }
}

/// Return every valid pair of element type and operator.
fn pairs() -> impl Iterator<Item = (Dtype, ReduceOp)> {
    let all = Dtype::ALL.iter().flat_map(|&dtype| ReduceOp::ALL.iter().map(move |&op| (dtype, op)));
    all.filter(|&(dtype, op)| Kernel::new(dtype, op).is_some())
}

/// Return every collective with every valid pair of type and operator.
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

/// The configuration of one communicator.
#[derive(Debug, Clone, Copy)]
struct Setup {
    layout: Layout,
    ranks: usize,
    profile: Profile,
    chunk_len_bytes: u16,
    round: u64,
}

impl Setup {
    fn drawn(&self, index: usize, what: u64) -> u64 {
        let Self { layout, ranks, profile, chunk_len_bytes, round } = *self;
        let number = [layout as u64, ranks as u64, profile as u64, chunk_len_bytes.into(), round];
        weight(&[&[SEED], &number[..], &[index as u64, what]].concat())
    }

    fn order(&self) -> Order {
        [Order::Arrival, Order::TreeFold, Order::TreePairwise][self.drawn(0, 0) as usize % 3]
    }

    /// Draw the calls of the ranks below `tree`.
    fn calls(&self, tree: &Shape) -> Vec<(Count, Call)> {
        let root = Rank(self.drawn(0, 1) as u32 % self.ranks as u32);
        let is_long = self.chunk_len_bytes == CHUNKS_LEN_BYTES[1];
        let shapes = shapes(root);
        let moved = shapes.iter().filter(|desc| desc.op.is_none()).count();
        // Long chunks are slow to check: test each pair of type and operator in one of the collectives only.
        let is_taken = |index: usize| {
            let place = index.checked_sub(moved);
            !is_long || place.is_none_or(|place| place % 3 == self.drawn(place / 3, 2) as usize % 3)
        };
        let call = |(index, desc): (usize, OpDesc)| {
            let count = match desc.collective {
                Collective::Barrier => Count::Elements(0),
                _ if is_long => Count::Chunks(1 + self.drawn(index, 3) % 3),
                _ => COUNTS[self.drawn(index, 3) as usize % COUNTS.len()],
            };
            let elements = if desc.dtype.is_some() { count.elements(&desc, self.chunk_len_bytes) } else { 0 };
            let desc = OpDesc { count: elements, ..desc };
            (count, Call::new(desc, (tree, self.ranks, self.order()), self.drawn(index, 4)))
        };
        shapes.into_iter().enumerate().filter(|(index, _)| is_taken(*index)).map(call).collect()
    }

    /// Run the calls on a cluster of their own.
    fn run(&self, seen: &mut Seen) {
        let Self { layout, ranks, profile, chunk_len_bytes, .. } = *self;
        let bus = ZeroCopyConfig { profile, threads: 1 + ranks % 2, strict: true, ..ZeroCopyConfig::default() };
        let config = ControllerConfig {
            zero_copy_chunk_max_bytes: chunk_len_bytes,
            chunk_max_bytes: chunk_len_bytes,
            ..ControllerConfig::new()
        };
        let cluster = Cluster::start_zero_copy(layout.leaves(), ranks.div_ceil(layout.leaves()), bus, config);
        let order = self.order();
        let tree = if layout.leaves() == 1 { leaf(0..ranks) } else { shape(&cluster, ranks as u32, order) };
        assert_eq!(tree == leaf(0..ranks), layout.leaves() == 1, "{tree:?}");
        let calls = self.calls(&tree);
        let configure = |config: &mut JoinConfig| {
            (config.algo, config.transport, config.order) = (Algo::Tree, layout.transport(config.rank), order);
        };
        let placements = cluster.run("grid", ranks as u32, configure, |comm| {
            let mut arena = Arena::new(&comm);
            let placements = calls.iter().map(|(_, call)| self.call(&comm, &mut arena, call)).collect::<Vec<_>>();
            comm.leave();
            placements
        });
        let failed = cluster.boards.iter().map(|board| board.failed_chains()).sum::<u64>();
        assert_eq!(failed, 0, "{self:?}: a chain failed in strict mode");
        placements.iter().for_each(|placements| seen.note(self, &calls, placements));
        seen.operations += calls.len();
    }

    /// Run a call at one rank; check result and outcome.
    fn call(&self, comm: &Communicator, arena: &mut Arena, call: &Call) -> Placement {
        let rank = comm.rank() as usize;
        let placement = Placement::draw(call, rank);
        let checked = arena.call(comm, call, placement).and_then(|outcome| {
            let expected = match self.layout.transport(comm.rank()) {
                _ if self.ranks == 1 => (Path::Local, None),
                Transport::Udp => (Path::Tree, Some(Transfer::Packets)),
                _ => return check_zero_copy(call, placement, rank, &outcome),
            };
            let found = (outcome.path, outcome.transfer);
            if found == expected { Ok(()) } else { Err(format!("{found:?} where {expected:?} was expected")) }
        });
        if let Err(why) = checked {
            panic!("{}, {:?}, rank {rank}, {self:?}, {placement:?}: {why}", call.desc, self.order());
        }
        placement
    }
}

/// The combinations that were run.
#[derive(Default)]
struct Seen {
    operations: usize,
    combinations: BTreeSet<(u8, u8, usize, Collective, Count, [bool; 3])>,
    pairs: BTreeSet<(u8, Option<Dtype>, Option<ReduceOp>)>,
}

impl Seen {
    fn note(&mut self, setup: &Setup, calls: &[(Count, Call)], placements: &[Placement]) {
        let engine = setup.profile as u8;
        for ((count, Call { desc, .. }), placement) in calls.iter().zip(placements) {
            let memory = [placement.registered_input, placement.registered_output, placement.in_place];
            self.combinations.insert((setup.layout as u8, engine, setup.ranks, desc.collective, *count, memory));
            self.pairs.insert((engine, desc.dtype, desc.op));
        }
    }

    /// Print a summary, and check that each engine ran every pair of type and operator, and moved every type.
    fn finish(&self, began: Instant) {
        let (operations, seconds) = (self.operations, began.elapsed().as_secs_f32());
        let (combinations, pairs_seen) = (self.combinations.len(), self.pairs.len());
        println!(
            "seed {SEED:#x}: {operations} operations in {seconds:.1} s: {combinations} combinations of tree, engine, ranks,"
        );
        println!("collective, count and memory; {pairs_seen} of engine, type and operator");
        // A barrier has neither type nor operator.
        assert_eq!(pairs_seen, Profile::ALL.len() * (pairs().count() + Dtype::ALL.len() + 1));
    }
}

#[test]
fn zero_copy_collectives_give_exact_results_for_all_types_and_operators() {
    let (began, mut seen) = (Instant::now(), Seen::default());
    for profile in Profile::ALL {
        for ranks in [1, 2, 3, 4, 8] {
            for chunk_len_bytes in CHUNKS_LEN_BYTES {
                for round in 0..ROUNDS {
                    Setup { layout: Layout::ZeroCopy, ranks, profile, chunk_len_bytes, round }.run(&mut seen);
                }
            }
        }
    }
    seen.finish(began);
}

#[test]
fn mixed_transports_on_two_levels_give_exact_results_for_all_types() {
    let (began, mut seen) = (Instant::now(), Seen::default());
    for profile in Profile::ALL {
        for (layout, ranks) in
            [(Layout::Mixed, 2), (Layout::Mixed, 5), (Layout::TwoLevels, 4), (Layout::TwoLevelsMixed, 7)]
        {
            Setup { layout, ranks, profile, chunk_len_bytes: CHUNKS_LEN_BYTES[0], round: 0 }.run(&mut seen);
        }
    }
    seen.finish(began);
}

//! All six collectives over all ranks, with a device that adds bytes: for any buffer placement, each rank reads and
//! writes exactly the bytes that the collective defines.

use super::{BOUNCE, config};
use crate::schedule::Span;
use crate::transport::memory::endpoint::{Places, Run, StageOut, ZeroCopyEndpoint};
use crate::transport::packets::{Event, OpId};
use proptest::prelude::*;
use std::collections::{BTreeMap, VecDeque};
use sumac_hal::dma::{Address, RegionKey};
use sumac_hal::ids::{ChunkNo, Rank};
use sumac_hal::mmio::{CompletionEntry, EntryStatus};
use sumac_hal::op::{Collective, Dtype, OpDesc, Path, ReduceOp};
use sumac_hal::shard::RUN;

const INPUT: RegionKey = RegionKey { index: 1, generation: 1 };
const OUTPUT: RegionKey = RegionKey { index: 2, generation: 1 };
/// Where buffers begin in their regions.
const BASE: usize = 64;

/// Buffer placement of a rank, drawn at random.
#[derive(Debug, Clone, Copy)]
struct Layout {
    input: bool,
    output: bool,
    in_place: bool,
    alignment: u32,
}

/// What a rank has submitted of one chunk.
#[derive(Debug, Clone, Copy)]
struct Part {
    src: Option<Address>,
    dst: Option<Address>,
    len: usize,
}

struct SimRank {
    endpoint: ZeroCopyEndpoint,
    layout: Layout,
    /// Memory by region, behind [`BASE`].
    input: Vec<u8>,
    output: Vec<u8>,
    bounce: Vec<u8>,
    read: Vec<u32>,
    written: Vec<u32>,
    submitted: BTreeMap<u64, Part>,
    completed: bool,
}

fn descs(root: u32, dtype: Dtype, count: u64) -> [OpDesc; 6] {
    let op = ReduceOp::Sum;
    [
        OpDesc::all_reduce(dtype, op, count),
        OpDesc::reduce(dtype, op, Rank(root), count),
        OpDesc::broadcast(dtype, Rank(root), count),
        OpDesc::reduce_scatter(dtype, op, count),
        OpDesc::all_gather(dtype, count),
        OpDesc::barrier(),
    ]
}

/// The extents of a rank's input and output within the whole.
fn extents(desc: &OpDesc, rank: u32, ranks: u32) -> (std::ops::Range<usize>, std::ops::Range<usize>) {
    let each = desc.element_bytes();
    let all = 0..desc.count as usize * each;
    let own = Span::of_blocks(desc.count as usize, ranks, rank, rank + 1);
    let own = own.start * each..own.end() * each;
    let at_root = desc.root.0 == rank;
    match desc.collective {
        Collective::Reduce => (all.clone(), if at_root { all } else { 0..0 }),
        Collective::Broadcast => (if at_root { all.clone() } else { 0..0 }, all),
        Collective::ReduceScatter => (all, own),
        Collective::AllGather => (own, all),
        Collective::Barrier => (0..0, 0..0),
        _ => (all.clone(), all),
    }
}

/// The value that a rank has at a byte of the whole.
fn value(rank: u32, at: usize) -> u8 {
    (at as u32).wrapping_mul(31).wrapping_add(rank * 101 + 1) as u8
}

impl SimRank {
    fn new(desc: &OpDesc, rank: u32, ranks: u32, chunk: u16, layout: Layout) -> Self {
        let config = super::ZeroCopyConfig { alignment_bytes: layout.alignment, ..config(rank, ranks, chunk) };
        let (input, output) = extents(desc, rank, ranks);
        let mut sim_rank = Self {
            endpoint: ZeroCopyEndpoint::new(config),
            layout,
            input: input.clone().map(|at| value(rank, at)).collect(),
            output: vec![0xee; output.len()],
            bounce: vec![0; 512],
            read: vec![0; input.len()],
            written: vec![0; output.len()],
            submitted: BTreeMap::new(),
            completed: false,
        };
        if layout.in_place {
            // One region for both, which begins where the first of the two does.
            let start = input.start.min(output.start);
            let mut whole = vec![0xee; input.end.max(output.end) - start];
            whole[input.start - start..input.end - start].copy_from_slice(&sim_rank.input);
            sim_rank.output = whole;
        }
        let at = |region, offset: usize| Address { region, offset_bytes: (BASE + offset) as u64 };
        let start = input.start.min(output.start);
        // The output's region has pages of 128 bytes, of which the first and the last are shared with other memory.
        let pages = layout.output && layout.alignment == 1;
        let end = (BASE + output.len()) / 128 * 128;
        let address = Address { region: OUTPUT, offset_bytes: BASE.next_multiple_of(128) as u64 };
        let len_bytes = (end as u64).saturating_sub(address.offset_bytes);
        let writable = pages.then_some(sumac_hal::dma::Span { address, len_bytes });
        let places = match layout {
            Layout { in_place: true, .. } => Places {
                input: layout.output.then(|| at(OUTPUT, input.start - start)),
                output: layout.output.then(|| at(OUTPUT, output.start - start)),
                writable,
            },
            _ => Places {
                input: layout.input.then(|| at(INPUT, 0)),
                output: layout.output.then(|| at(OUTPUT, 0)),
                writable,
            },
        };
        let op = sim_rank.endpoint.post(*desc, Path::Tree, None, places).expect("room");
        assert_eq!(op, OpId(0));
        sim_rank
    }

    /// The offset of the input in its region: in place, in the output's region.
    fn input_offset(&self, desc: &OpDesc, rank: u32, ranks: u32) -> usize {
        let (input, output) = extents(desc, rank, ranks);
        if self.layout.in_place { input.start - input.start.min(output.start) } else { 0 }
    }

    fn output_offset(&self, desc: &OpDesc, rank: u32, ranks: u32) -> usize {
        let (input, output) = extents(desc, rank, ranks);
        if self.layout.in_place { output.start - input.start.min(output.start) } else { 0 }
    }

    /// Process a run as the device does.
    fn take(&mut self, run: &Run, limit: usize, offset: usize) {
        let entry = run.contribution;
        let count = u64::from(entry.count);
        assert!(count >= 1 && entry.seq.0 % RUN + count <= RUN, "a run stays in its shard");
        assert_eq!(u64::from(entry.lag), entry.seq.0 - self.endpoint.have().0);
        if let Some(stage_in) = &run.stage_in {
            let from = if self.layout.in_place { &self.output[offset..] } else { &self.input[..] };
            let bytes = from[stage_in.from.clone()].to_vec();
            self.bounce[stage_in.to..][..bytes.len()].copy_from_slice(&bytes);
            stage_in.from.clone().for_each(|at| self.read[at] += 1);
        }
        let desc = OpDesc { dtype: entry.dtype, op: entry.op, collective: entry.collective, ..OpDesc::barrier() };
        let elements = entry.elements as usize;
        assert_eq!(elements.div_ceil(limit.max(1)), if elements == 0 { 0 } else { count as usize });
        for k in 0..count as usize {
            let skip = (k * limit * desc.element_bytes()) as u64;
            let at = |base: Option<Address>| {
                base.map(|base| Address { offset_bytes: base.offset_bytes + skip, region: base.region })
            };
            let len = elements.saturating_sub(k * limit).min(limit) * desc.element_bytes();
            let part = Part { src: at(entry.src), dst: at(entry.dst), len };
            for address in [part.src, part.dst].into_iter().flatten() {
                assert_eq!(address.offset_bytes % u64::from(self.layout.alignment), 0, "aligned");
            }
            if let Some(src) = part.src.filter(|src| src.region != BOUNCE) {
                let start = src.offset_bytes as usize - BASE - offset;
                (start..start + len).for_each(|at| self.read[at] += 1);
            }
            assert!(self.submitted.insert(entry.seq.0 + k as u64, part).is_none(), "each chunk once");
        }
    }

    fn memory(&mut self, region: RegionKey) -> (&mut Vec<u8>, usize) {
        match region {
            INPUT => (&mut self.input, BASE),
            OUTPUT => (&mut self.output, BASE),
            _ => (&mut self.bounce, 0),
        }
    }

    fn fetch(&mut self, part: Part) -> Option<Vec<u8>> {
        let src = part.src?;
        let (memory, base) = self.memory(src.region);
        Some(memory[src.offset_bytes as usize - base..][..part.len].to_vec())
    }

    /// Write a result back, and answer.
    fn answer(&mut self, seq: u64, part: Part, result: &[u8], offset: usize) {
        let mut status = EntryStatus::Done;
        if let Some(dst) = part.dst {
            assert_eq!(result.len(), part.len);
            status = EntryStatus::Result;
            let (memory, base) = self.memory(dst.region);
            memory[dst.offset_bytes as usize - base..][..result.len()].copy_from_slice(result);
            if dst.region != BOUNCE {
                let start = dst.offset_bytes as usize - BASE - offset;
                (start..start + result.len()).for_each(|at| self.written[at] += 1);
            }
        }
        let (group, epoch) = (super::GROUP, super::EPOCH);
        let stable = ChunkNo(seq);
        let entry = CompletionEntry::Answer {
            status,
            group,
            epoch,
            seq: ChunkNo(seq),
            count: 1,
            window: 1,
            stable,
            slowest: None,
        };
        let (bounce, output, written) = (&self.bounce, &mut self.output, &mut self.written);
        self.endpoint.handle(&entry.emit(), |StageOut { from, to, .. }| {
            output[offset + to..][..from.len()].copy_from_slice(&bounce[from.clone()]);
            (*to..to + from.len()).for_each(|at| written[at] += 1);
        });
        assert_eq!(self.endpoint.error(), None);
        while let Some(event) = self.endpoint.poll_event() {
            assert_eq!(event, Event::Completed(OpId(0)));
            self.completed = true;
        }
    }
}

/// Run one operation on all ranks; `order` determines the order of answers. Returns the ranks.
fn run(desc: &OpDesc, ranks: u32, chunk: u16, layouts: &[Layout], order: u64) -> Vec<SimRank> {
    let mut sim_ranks: Vec<_> =
        (0..ranks).map(|rank| SimRank::new(desc, rank, ranks, chunk, layouts[rank as usize])).collect();
    let limit = usize::from(chunk).checked_div(desc.partial_bytes()).unwrap_or(0);
    let mut answers: VecDeque<(u64, Vec<u8>)> = VecDeque::new();
    let (mut next, mut draw) = (0, order);
    while !sim_ranks.iter().all(|sim_rank| sim_rank.completed) {
        for (rank, sim_rank) in (0..).zip(&mut sim_ranks) {
            let offset = sim_rank.input_offset(desc, rank, ranks);
            while let Some(run) = sim_rank.endpoint.next_run() {
                sim_rank.take(&run, limit, offset);
            }
        }
        // Chunks submitted by all ranks are reduced in order.
        let before = next;
        while sim_ranks.iter().all(|sim_rank| sim_rank.submitted.contains_key(&next)) {
            let mut result: Option<Vec<u8>> = None;
            for sim_rank in &mut sim_ranks {
                let part = sim_rank.submitted[&next];
                let Some(bytes) = sim_rank.fetch(part) else { continue };
                match &mut result {
                    None => result = Some(bytes),
                    Some(sum) => sum.iter_mut().zip(bytes).for_each(|(sum, byte)| *sum = sum.wrapping_add(byte)),
                }
            }
            answers.push_back((next, result.unwrap_or_default()));
            next += 1;
        }
        assert!(next > before || !answers.is_empty(), "stuck at {next}");
        // Answer some of them, each rank in its own order.
        draw = draw.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1);
        let count = 1 + (draw >> 33) as usize % answers.len();
        let batch: Vec<_> = answers.drain(..count).collect();
        for (rank, sim_rank) in (0..).zip(&mut sim_ranks) {
            let offset = sim_rank.output_offset(desc, rank, ranks);
            let turn = (draw >> 17) as usize % batch.len();
            for index in (turn..batch.len()).chain(0..turn) {
                let (seq, result) = &batch[index];
                let part = sim_rank.submitted[seq];
                sim_rank.answer(*seq, part, result, offset);
            }
        }
    }
    sim_ranks
}

fn check(desc: &OpDesc, ranks: u32, sim_ranks: &[SimRank]) {
    for (rank, sim_rank) in (0..).zip(sim_ranks) {
        let (input, output) = extents(desc, rank, ranks);
        assert!(sim_rank.read.iter().all(|&n| n == 1), "{desc} rank {rank}: input named once: {:?}", sim_rank.read);
        let own = desc.collective == Collective::AllGather;
        let mover = desc.collective == Collective::Broadcast && desc.root.0 == rank;
        let each = desc.element_bytes();
        let block = |at: usize| {
            (0..ranks).find(|&owner| {
                let span = Span::of_blocks(desc.count as usize, ranks, owner, owner + 1);
                (span.start * each..span.end() * each).contains(&at)
            })
        };
        let offset = sim_rank.output_offset(desc, rank, ranks);
        for (index, at) in output.clone().enumerate() {
            let expects = !(mover || own && input.contains(&at));
            assert_eq!(sim_rank.written[index], u32::from(expects), "{desc} rank {rank} byte {at}");
            if expects {
                let expected = match desc.collective {
                    Collective::Broadcast => value(desc.root.0, at),
                    Collective::AllGather => value(block(at).expect("a block"), at),
                    _ => (0..ranks).fold(0, |sum: u8, rank| sum.wrapping_add(value(rank, at))),
                };
                assert_eq!(sim_rank.output[offset + index], expected, "{desc} rank {rank} byte {at}");
            }
        }
        assert!(!sim_rank.endpoint.is_in_flight());
        assert_eq!(sim_rank.endpoint.stats().bytes_out, input.len() as u64, "what was fetched");
    }
}

fn layout() -> impl Strategy<Value = Layout> {
    (any::<bool>(), any::<bool>(), any::<bool>(), prop_oneof![Just(1), Just(8)])
        .prop_map(|(input, output, in_place, alignment)| Layout { input, output, in_place, alignment })
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(300))]

    #[test]
    fn collectives_match_the_oracle_for_any_buffer_placement(
        ranks in 1_u32..=8,
        root in 0_u32..8,
        count in 0_u64..600,
        chunk in prop_oneof![Just(64_u16), Just(66), Just(24), Just(100)],
        dtype in prop_oneof![Just(Dtype::U8), Just(Dtype::Bf16), Just(Dtype::F64)],
        which in 0_usize..6,
        layouts in prop::collection::vec(layout(), 8),
        order in any::<u64>(),
    ) {
        let desc = descs(root % ranks, dtype, count)[which];
        let sim_ranks = run(&desc, ranks, chunk, &layouts, order);
        check(&desc, ranks, &sim_ranks);
    }
}

/// Runs are as long as a shard's, for registered and bounced memory alike.
#[test]
fn runs_are_as_long_as_resources_allow() {
    for registered in [true, false] {
        let mut endpoint = super::endpoint(0, 2);
        let at = Address { region: INPUT, offset_bytes: 0 };
        let places =
            if registered { Places { input: Some(at), output: Some(at), writable: None } } else { Places::default() };
        let desc = OpDesc::all_reduce(Dtype::F32, ReduceOp::Sum, 16 * 40 + 3);
        endpoint.post(desc, Path::Tree, None, places).expect("room");
        let counts: Vec<_> = std::iter::from_fn(|| endpoint.next_run())
            .map(|run| (run.contribution.count, run.stage_in.is_some()))
            .collect();
        // 41 chunks: 40 may be in flight; the bounce buffer has room for 8.
        let expected = if registered { vec![(16, false), (16, false), (8, false)] } else { vec![(8, true)] };
        assert_eq!(counts, expected);
    }
}

/// A device takes a run whole, so one as long as the window would let it wait for its parent before it goes on.
#[test]
fn runs_are_half_a_window_at_most() {
    for (window_max, expected) in [(32, 16), (16, 8), (5, 2), (1, 1)] {
        let mut config = config(0, 2, 64);
        config.window_max = window_max;
        let mut endpoint = ZeroCopyEndpoint::new(config);
        let at = Some(Address { region: INPUT, offset_bytes: 0 });
        let desc = OpDesc::all_reduce(Dtype::F32, ReduceOp::Sum, 16 * 40);
        endpoint.post(desc, Path::Tree, None, Places { input: at, output: at, writable: None }).expect("room");
        assert_eq!(endpoint.next_run().expect("a run").contribution.count, expected, "a window of {window_max}");
    }
}

/// An operation that runs as a host collective is one empty contribution with its signature.
#[test]
fn host_collective_submits_one_empty_contribution() {
    let mut endpoint = super::endpoint(1, 2);
    let desc = OpDesc::all_reduce(Dtype::F32, ReduceOp::Sum, 1 << 20);
    endpoint.post(desc, Path::Ring, None, Places::default()).expect("room");
    endpoint.post(desc, Path::Tree, None, Places::default()).expect("room");
    let run = endpoint.next_run().expect("a run").contribution;
    assert_eq!((run.src, run.dst, run.elements, run.count), (None, None, 0, 1));
    assert_eq!(run.signature, desc.tree_signature(Path::Ring, 1, ChunkNo(0)));
    let run = endpoint.next_run().expect("a run").contribution;
    assert_eq!((run.seq, run.signature), (ChunkNo(1), desc.tree_signature(Path::Tree, 1, ChunkNo(1))));
}

//! Complete recoveries between endpoints. A hand-driven node brings them to any point: some ranks have returned and own
//! their buffers again, while others lack chunks.

use super::{
    ChunkInventory, RecoverySource, Source, append_contribution, append_result, inventory, land, plan, result_lens,
};
use crate::schedule::Span;
use crate::transport::packets::{Buffers, Endpoint, EndpointConfig, Event, OpId};
use proptest::prelude::*;
use std::collections::BTreeMap;
use std::ops::Range;
use sumac_hal::ids::{ChildIndex, ChunkNo, Epoch, GroupId, Rank};
use sumac_hal::op::{Collective, Dtype, OpDesc, Path, ReduceOp};
use sumac_hal::port::{Addr, Ecn};
use sumac_hal::time::Instant;
use sumac_hal::uplink::HopTimers;
use sumac_hal::wire::{Kind, Packet, Repr};

const NODE: Addr = Addr::Emu(9);
const VIEW: (GroupId, Epoch) = (GroupId(3), Epoch { term: 2, counter: 7 });
const SALT: u32 = 77;
const KEY: u64 = 5;
/// i64 elements in a chunk.
const CHUNK: usize = 4;
/// What a caller overwrites its buffers with once it owns them again.
const GARBAGE: u8 = 0xee;

/// The buffers of an operation at one rank, in place or not.
#[derive(Debug, Clone)]
struct Memory {
    bytes: Vec<u8>,
    input: Range<usize>,
    output: Range<usize>,
}

impl Memory {
    fn new(desc: &OpDesc, (rank, ranks): (u32, u32), in_place: bool) -> Self {
        let all = 0..desc.count as usize * 8;
        let own = Span::of_blocks(desc.count as usize, ranks, rank, rank + 1);
        let own = own.start * 8..own.end() * 8;
        let is_root = desc.root.0 == rank;
        let some = |wanted: bool| if wanted { all.clone() } else { 0..0 };
        let (input, output) = match desc.collective {
            Collective::Reduce => (all.clone(), some(is_root)),
            Collective::Broadcast => (some(is_root), all.clone()),
            Collective::ReduceScatter => (all.clone(), own),
            Collective::AllGather => (own, all.clone()),
            _ => (all.clone(), all.clone()),
        };
        let (input, output) = match in_place {
            true => (input, output),
            false => (0..input.len(), input.len()..input.len() + output.len()),
        };
        let mut bytes = vec![0; input.end.max(output.end)];
        let first = if desc.collective == Collective::AllGather { own_first(desc, rank, ranks) } else { 0 };
        for (i, at) in input.clone().step_by(8).enumerate() {
            bytes[at..at + 8].copy_from_slice(&value(rank, first + i).to_le_bytes());
        }
        let mut memory = Self { bytes, input, output };
        // The tree does not send a rank's own block back, so it is there beforehand.
        if !in_place && matches!(desc.collective, Collective::Broadcast | Collective::AllGather) {
            let (from, to) = (memory.input.clone(), memory.output.start + first * 8);
            if !from.is_empty() {
                memory.bytes.copy_within(from, to);
            }
        }
        memory
    }
}

fn own_first(desc: &OpDesc, rank: u32, ranks: u32) -> usize {
    Span::of_blocks(desc.count as usize, ranks, rank, rank + 1).start
}

fn value(rank: u32, i: usize) -> i64 {
    (i64::from(rank) + 1) * 1_000_003 + i as i64 * 17
}

/// The expected output of `rank`.
fn expected(desc: &OpDesc, rank: u32, ranks: u32) -> Vec<u8> {
    let sum = |i| (0..ranks).map(|rank| value(rank, i)).sum::<i64>();
    let count = desc.count as usize;
    let own = Span::of_blocks(count, ranks, rank, rank + 1);
    let owner = |i| (0..ranks).find(|&r| Span::of_blocks(count, ranks, 0, r + 1).len > i).expect("an owner");
    let values: Vec<i64> = match desc.collective {
        Collective::Reduce if desc.root.0 != rank => vec![],
        Collective::ReduceScatter => (own.start..own.end()).map(sum).collect(),
        Collective::Broadcast => (0..count).map(|i| value(desc.root.0, i)).collect(),
        Collective::AllGather => (0..count).map(|i| value(owner(i), i)).collect(),
        _ => (0..count).map(sum).collect(),
    };
    values.iter().flat_map(|value| value.to_le_bytes()).collect()
}

struct TestBuffers<'m>(&'m mut [Memory]);

impl Buffers for TestBuffers<'_> {
    fn input(&self, op: OpId) -> &[u8] {
        let Memory { bytes, input, .. } = &self.0[op.0 as usize];
        &bytes[input.clone()]
    }

    fn output(&mut self, op: OpId) -> &mut [u8] {
        let Memory { bytes, output, .. } = &mut self.0[op.0 as usize];
        &mut bytes[output.clone()]
    }
}

struct Member {
    endpoint: Endpoint,
    memory: Vec<Memory>,
    /// The outputs of operations when they returned; their memory has been overwritten since.
    returned: BTreeMap<u64, Vec<u8>>,
}

impl Member {
    fn new(rank: u32, ranks: u32) -> Self {
        let config = EndpointConfig {
            group: VIEW.0,
            epoch: VIEW.1,
            rank: Rank(rank),
            ranks,
            child: ChildIndex(rank as u16),
            key: KEY,
            shared_key: None,
            parents: vec![NODE],
            window_max: 8,
            window_start: 8,
            chunk_len_bytes: (CHUNK * 8) as u16,
            timers: HopTimers::DEFAULT,
            table_version: 1,
            salt: SALT,
        };
        Self { endpoint: Endpoint::new(config), memory: Vec::new(), returned: BTreeMap::new() }
    }

    fn handle_events(&mut self) {
        while let Some(event) = self.endpoint.poll_event() {
            if let Event::Completed(op) = event {
                let memory = &mut self.memory[op.0 as usize];
                self.returned.insert(op.0, memory.bytes[memory.output.clone()].to_vec());
                memory.bytes.fill(GARBAGE);
            }
        }
    }
}

/// Signature, data, and whether a result is wanted.
type Part = (u32, Vec<u8>, bool);

/// The ranks, and the node above them.
struct Group {
    members: Vec<Member>,
    /// Contributions to each chunk, by rank.
    chunks: BTreeMap<u64, BTreeMap<usize, Part>>,
}

fn now() -> Instant {
    Instant::from_nanos(1_000_000)
}

impl Group {
    fn new(ranks: u32, descs: &[OpDesc], in_place: bool) -> Self {
        let mut members: Vec<_> = (0..ranks).map(|rank| Member::new(rank, ranks)).collect();
        for (rank, member) in (0..).zip(&mut members) {
            for desc in descs {
                member.memory.push(Memory::new(desc, (rank, ranks), in_place));
                member.endpoint.post(*desc, Path::Tree, None).expect("not failed");
            }
        }
        Self { members, chunks: BTreeMap::new() }
    }

    /// Deliver what the ranks send, and answer complete chunks to the ranks for which `reaches` holds, until nothing
    /// changes.
    fn run(&mut self, reports_stable: bool, reaches: impl Fn(usize, u64) -> bool) {
        loop {
            let mut moved = self.collect();
            let stable = self.members.iter().map(|member| member.endpoint.have().0).min().unwrap_or(0);
            let ranks = self.members.len();
            let whole: Vec<u64> =
                self.chunks.iter().filter(|(_, from)| from.len() == ranks).map(|(seq, _)| *seq).collect();
            for seq in whole {
                let result = combine(self.chunks[&seq].values().map(|(_, data, _)| data.as_slice()));
                for rank in 0..ranks {
                    let (signature, _, wants) = self.chunks[&seq][&rank];
                    let member = &mut self.members[rank];
                    if member.endpoint.is_answered(seq) || !reaches(rank, seq) {
                        continue;
                    }
                    let (kind, payload) = if wants { (Kind::Result, &result[..]) } else { (Kind::Done, &[][..]) };
                    let mark = ChunkNo(if reports_stable { stable } else { 0 });
                    answer(member, Repr { signature, mark, seq: ChunkNo(seq), ..down(kind, rank) }, payload);
                    member.handle_events();
                    moved = true;
                }
            }
            if !moved {
                return;
            }
        }
    }

    fn collect(&mut self) -> bool {
        let mut moved = false;
        for (rank, member) in self.members.iter_mut().enumerate() {
            let mut packet = vec![0; 4096];
            let Member { endpoint, memory, .. } = member;
            while let Some(sent) = endpoint.poll_transmit(now(), &TestBuffers(memory)) {
                let packet = Packet::new_checked(sent.write(sent.payload, &mut packet)).expect("valid");
                let repr = Repr::parse(&packet).expect("of this version");
                if !matches!(repr.kind, Kind::Data | Kind::Empty) {
                    continue;
                }
                let wants = repr.flags.contains(sumac_hal::wire::Flags::WANT);
                for seq in repr.seq.0..repr.seq.0 + u64::from(repr.count) {
                    let part = (repr.signature, packet.payload().to_vec(), wants);
                    self.chunks.entry(seq).or_default().insert(rank, part);
                }
                moved = true;
            }
        }
        moved
    }

    /// Recover from the loss of the tree. Returns how many chunks were sent by a holder, and how many were recomputed.
    fn recover(&mut self) -> (u64, u64) {
        let sent: Vec<Vec<u8>> = self
            .members
            .iter_mut()
            .map(|member| {
                member.endpoint.close();
                postcard::to_allocvec(&inventory(&member.endpoint)).expect("in memory")
            })
            .collect();
        let inventories: Vec<ChunkInventory> =
            sent.iter().map(|bytes| postcard::from_bytes(bytes).expect("as it was")).collect();
        let ops = self.members[0].endpoint.ops();
        let ranks = self.members.len() as u32;
        assert!(inventories.iter().all(|inventory| inventory.is_valid(ranks, |desc| ops.chunks(desc))));
        let inventories = (0..).map(Rank).zip(inventories).collect();
        let plan = plan(&inventories, ranks).expect("everything is somewhere");
        let (mut supplied, mut recomputed) = (0, 0);
        for piece in &plan.pieces {
            let len_of = result_lens(&self.members[0].endpoint, &piece.op);
            for seq in piece.first..piece.end {
                let mut result = Vec::new();
                match piece.source {
                    Source::Held(holder) => {
                        let Member { endpoint, memory, .. } = &mut self.members[holder.0 as usize];
                        append_result(endpoint, seq, &mut TestBuffers(memory), &mut result);
                        supplied += 1;
                    }
                    Source::Recompute => {
                        let parts = self.members.iter_mut().map(|Member { endpoint, memory, .. }| {
                            let mut part = Vec::new();
                            append_contribution(endpoint, seq, &TestBuffers(memory), &mut part);
                            part
                        });
                        let parts: Vec<_> = parts.collect();
                        assert!(parts.iter().all(|part| part.len() == len_of(seq)), "{piece:?}: {parts:?}");
                        result = combine(parts.iter().map(Vec::as_slice));
                        recomputed += 1;
                    }
                }
                assert_eq!(result.len(), len_of(seq), "{piece:?}");
                for Member { endpoint, memory, .. } in &mut self.members {
                    land(endpoint, seq, &result, &mut TestBuffers(memory));
                }
            }
        }
        (supplied, recomputed)
    }

    /// Check every result, of operations that had returned and of the others.
    fn check(&self, descs: &[OpDesc]) {
        let ranks = self.members.len() as u32;
        for (rank, member) in (0..).zip(&self.members) {
            for (op, desc) in (0..).zip(descs) {
                let memory = &member.memory[op as usize];
                let found = member.returned.get(&op).map_or(&memory.bytes[memory.output.clone()], Vec::as_slice);
                assert_eq!(found, expected(desc, rank, ranks), "{desc} at rank {rank}");
            }
        }
    }
}

fn down(kind: Kind, rank: usize) -> Repr {
    let child = ChildIndex(rank as u16);
    Repr { count: 1, token: SALT, window: 8, ..Repr::new(kind, VIEW.0, VIEW.1, child, KEY) }
}

fn answer(member: &mut Member, repr: Repr, payload: &[u8]) {
    let repr = Repr { payload_len_bytes: payload.len() as u16, ..repr };
    let mut bytes = vec![0; repr.packet_len()];
    bytes[repr.header_len()..].copy_from_slice(payload);
    repr.emit(&mut Packet::new_unchecked(&mut bytes[..]), sumac_hal::wire::payload_crc(payload));
    member.endpoint.handle(now(), NODE, Ecn::Unmarked, &bytes, &mut TestBuffers(&mut member.memory));
}

/// The wrapping sum of all non-empty parts.
fn combine<'b>(parts: impl Iterator<Item = &'b [u8]>) -> Vec<u8> {
    parts
        .filter(|part| !part.is_empty())
        .map(<[u8]>::to_vec)
        .reduce(|sum, part| {
            let vote = |bytes: &[u8]| i64::from_le_bytes(bytes.try_into().expect("eight"));
            sum.chunks(8).zip(part.chunks(8)).flat_map(|(a, b)| vote(a).wrapping_add(vote(b)).to_le_bytes()).collect()
        })
        .unwrap_or_default()
}

fn descs(root: u32, count: u64) -> [OpDesc; 5] {
    let (dtype, op) = (Dtype::I64, ReduceOp::Sum);
    [
        OpDesc::all_reduce(dtype, op, count),
        OpDesc::reduce(dtype, op, Rank(root), count),
        OpDesc::broadcast(dtype, Rank(root), count),
        OpDesc::reduce_scatter(dtype, op, count),
        OpDesc::all_gather(dtype, count),
    ]
}

/// Rank 0 has returned from everything and overwritten its buffers; rank 1 lacks the last chunk, as the root or not.
#[test]
fn rank_that_has_returned_still_supplies_missing_chunks() {
    for in_place in [false, true] {
        for root in 0..2 {
            for desc in descs(root, 7 * CHUNK as u64 + 1) {
                let mut group = Group::new(2, &[desc], in_place);
                let last = group.members[0].endpoint.ops().end() - 1;
                group.run(false, |rank, seq| rank == 0 || seq < last);
                assert_eq!(
                    group.members.iter().map(|member| member.returned.len()).collect::<Vec<_>>(),
                    [1, 0],
                    "{desc}"
                );
                let (supplied, recomputed) = group.recover();
                let needs = desc.collective != Collective::Reduce && desc.collective != Collective::Broadcast
                    || (desc.root.0 == 1) == (desc.collective == Collective::Reduce);
                // The last block of an all-gather is rank 1's own.
                let needs = needs && desc.collective != Collective::AllGather;
                assert_eq!(supplied + recomputed, u64::from(needs), "{desc}, root {root}");
                group.check(&[desc]);
            }
        }
    }
}

/// The owner of a block of an all-gather has returned.
#[test]
fn returned_owner_of_a_block_still_supplies_it() {
    let desc = OpDesc::all_gather(Dtype::I64, 6 * CHUNK as u64);
    let mut group = Group::new(2, &[desc], true);
    group.run(false, |rank, seq| rank == 0 || seq != 1);
    assert_eq!(group.members[0].returned.len(), 1);
    assert_eq!(group.recover(), (1, 0));
    group.check(&[desc]);
}

proptest! {
    /// Wherever the tree was lost and whatever the ranks know of it, all have every result afterwards.
    #[test]
    fn recovery_completes_every_operation_after_any_loss(
        kinds in proptest::collection::vec(0_usize..5, 1..5),
        ranks in 2_u32..5,
        root in 0_u32..4,
        count in 1_u64..80,
        in_place: bool,
        reports_stable: bool,
        lost in proptest::collection::hash_set((0_usize..4, 0_u64..60), 0..12),
    ) {
        let descs: Vec<_> = kinds.iter().map(|&kind| descs(root % ranks, count)[kind]).collect();
        let mut group = Group::new(ranks, &descs, in_place);
        group.run(reports_stable, |rank, seq| !lost.contains(&(rank, seq)));
        group.recover();
        group.check(&descs);
    }
}

//! What a rank retains of completed operations over zero-copy: whatever no redo slot holds.

use super::{EPOCH, GROUP, endpoint};
use crate::recovery::{
    ChunkInventory, Piece, RecoverySource, Source, append_contribution, append_result, inventory, plan,
};
use crate::transport::memory::endpoint::{Places, ZeroCopyEndpoint};
use crate::transport::packets::{Buffers, Event, OpId, Ops};
use sumac_hal::dma::{Address, RegionKey};
use sumac_hal::ids::{ChunkNo, Rank};
use sumac_hal::mmio::{CompletionEntry, EntryStatus};
use sumac_hal::op::{Dtype, OpDesc, Path, ReduceOp};

const OWN: Address = Address { region: RegionKey { index: 1, generation: 1 }, offset_bytes: 0 };
/// Four chunks.
const COUNT: usize = 64;
/// The bytes of a result in a redo slot.
const PUBLISHED: u8 = 9;

struct Memory(Vec<u8>);

impl Buffers for Memory {
    fn input(&self, _: OpId) -> &[u8] {
        &self.0
    }

    fn output(&mut self, _: OpId) -> &mut [u8] {
        &mut self.0
    }
}

/// A closed endpoint, and the redo slots that it can read.
struct ClosedEndpoint {
    endpoint: ZeroCopyEndpoint,
    published: fn(u64) -> bool,
}

impl RecoverySource for ClosedEndpoint {
    fn ops(&self) -> &Ops {
        self.endpoint.ops()
    }

    fn is_answered(&self, seq: u64) -> bool {
        self.endpoint.has_landed(seq)
    }

    fn published(&self, seq: u64, result: &mut [u8]) -> bool {
        result.fill(PUBLISHED);
        (self.published)(seq)
    }
}

/// Answer `count` chunks from the first on; the first is stable.
fn answer(endpoint: &mut ZeroCopyEndpoint, status: EntryStatus, count: u16) {
    let (group, epoch, seq, stable) = (GROUP, EPOCH, ChunkNo(0), ChunkNo(1));
    let answer = CompletionEntry::Answer { status, group, epoch, seq, count, window: 8, stable, slowest: None };
    endpoint.handle(&answer.emit(), |_| panic!("nothing is bounced"));
}

/// Rank 0's side of an operation that completed there with an input of sevens, which its caller then cleared.
fn returned(desc: OpDesc, published: fn(u64) -> bool) -> (ClosedEndpoint, Memory) {
    let mut endpoint = endpoint(0, 2);
    let places = Places { input: Some(OWN), output: None, writable: None };
    endpoint.post(desc, Path::Tree, None, places).expect("room");
    assert_eq!(endpoint.next_run().expect("a run").contribution.count, 4);
    answer(&mut endpoint, EntryStatus::Done, 4);
    let mut memory = Memory(vec![7; COUNT * 4]);
    endpoint.retain_completed(published, &mut memory);
    assert_eq!(endpoint.poll_event(), Some(Event::Completed(OpId(0))));
    memory.0.fill(0);
    (ClosedEndpoint { endpoint, published }, memory)
}

/// The inventory of rank 1, which has contributed and lacks everything from chunk 1 on.
fn lacking(desc: OpDesc) -> ChunkInventory {
    let mut endpoint = endpoint(1, 2);
    endpoint
        .post(desc, Path::Tree, None, Places { input: Some(OWN), output: Some(OWN), writable: None })
        .expect("room");
    assert!(endpoint.next_run().is_some());
    answer(&mut endpoint, EntryStatus::Result, 1);
    inventory(&ClosedEndpoint { endpoint, published: |_| false })
}

fn pieces(source: &ClosedEndpoint, desc: OpDesc) -> Vec<Piece> {
    plan(&[(Rank(0), inventory(source)), (Rank(1), lacking(desc))].into(), 2)
        .map(|plan| plan.pieces)
        .unwrap_or_default()
}

/// A leaf whose only rank is the broadcast's root has no result in its redo slots, and a rank below another leaf may
/// lack it.
#[test]
fn root_retains_input_that_its_device_has_not_published() {
    let desc = OpDesc::broadcast(Dtype::F32, Rank(0), COUNT as u64);
    let (source, mut memory) = returned(desc, |_| false);
    let pieces = pieces(&source, desc);
    let pieces: Vec<_> = pieces.iter().map(|piece| (piece.first, piece.end, piece.source)).collect();
    assert_eq!(pieces, [(1, 4, Source::Held(Rank(0)))]);
    let mut given = Vec::new();
    append_result(&source, 3, &mut memory, &mut given);
    assert_eq!(given, [7; COUNT]);
}

/// Likewise for a reduction to a rank below another leaf: the contribution is retained.
#[test]
fn non_root_retains_its_contribution() {
    let desc = OpDesc::reduce(Dtype::F32, ReduceOp::Sum, Rank(1), COUNT as u64);
    let (source, mut memory) = returned(desc, |_| false);
    let pieces_of = |source: &ClosedEndpoint| -> Vec<_> {
        pieces(source, desc).iter().map(|piece| (piece.first, piece.end, piece.source)).collect()
    };
    assert_eq!(pieces_of(&source), [(1, 4, Source::Recompute)]);
    let mut given = Vec::new();
    append_contribution(&source, 3, &memory, &mut given);
    assert_eq!(given, [7; COUNT]);
    // Where one of several chunks is published, its result is used, not the contribution retained with the others.
    let (source, _) = returned(desc, |seq| seq == 2);
    let (again, held) = (Source::Recompute, Source::Held(Rank(0)));
    assert_eq!(pieces_of(&source), [(1, 2, again), (2, 3, held), (3, 4, again)]);
    given.clear();
    append_result(&source, 2, &mut memory, &mut given);
    assert_eq!(given, [PUBLISHED; COUNT]);
}

#[test]
fn published_results_are_not_retained() {
    let desc = OpDesc::reduce(Dtype::F32, ReduceOp::Sum, Rank(1), COUNT as u64);
    let (source, _) = returned(desc, |_| true);
    assert!(source.endpoint.ops().retained().all(|kept| !kept.has_bytes()));
    assert_eq!(pieces(&source, desc).len(), 1);
}

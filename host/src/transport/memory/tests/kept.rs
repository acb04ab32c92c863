//! What a rank by reference keeps of operations that have returned: what no redo slot has.

use super::{EPOCH, GROUP, endpoint};
use crate::recovery::{Ledger, Piece, Remains, Source, give_contribution, give_result, ledger, plan};
use crate::transport::memory::endpoint::{Places, ReferenceEndpoint};
use crate::transport::packets::{Buffers, Event, OpId, Ops};
use sumac_hal::dma::{Address, RegionKey};
use sumac_hal::ids::{ChunkNo, Rank};
use sumac_hal::mmio::{CompletionEntry, EntryStatus};
use sumac_hal::op::{Dtype, OpDesc, Path, ReduceOp};

const OWN: Address = Address { region: RegionKey { index: 1, generation: 1 }, offset_bytes: 0 };
/// Four chunks.
const COUNT: usize = 64;
/// What a redo slot has.
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

/// An endpoint that is over, and the redo slots that it can read.
struct Left {
    endpoint: ReferenceEndpoint,
    published: fn(u64) -> bool,
}

impl Remains for Left {
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

/// The answer to so many chunks from the first on; the first is stable.
fn answer(endpoint: &mut ReferenceEndpoint, status: EntryStatus, count: u16) {
    let (group, epoch, seq, stable) = (GROUP, EPOCH, ChunkNo(0), ChunkNo(1));
    let answer = CompletionEntry::Answer { status, group, epoch, seq, count, window: 8, stable, slowest: None };
    endpoint.handle(&answer.emit(), |_| panic!("nothing is bounced"));
}

/// Rank 0's side of an operation that has returned there with its input of sevens, which its caller then cleared.
fn returned(desc: OpDesc, published: fn(u64) -> bool) -> (Left, Memory) {
    let mut endpoint = endpoint(0, 2);
    let places = Places { input: Some(OWN), output: None, writable: None };
    endpoint.post(desc, Path::Tree, places).expect("room");
    assert_eq!(endpoint.next_run().expect("a run").contribution.count, 4);
    answer(&mut endpoint, EntryStatus::Done, 4);
    let mut memory = Memory(vec![7; COUNT * 4]);
    endpoint.keep(published, &mut memory);
    assert_eq!(endpoint.poll_event(), Some(Event::Completed(OpId(0))));
    memory.0.fill(0);
    (Left { endpoint, published }, memory)
}

/// The ledger of rank 1, which has contributed and lacks everything from chunk 1 on.
fn lacking(desc: OpDesc) -> Ledger {
    let mut endpoint = endpoint(1, 2);
    endpoint.post(desc, Path::Tree, Places { input: Some(OWN), output: Some(OWN), writable: None }).expect("room");
    assert!(endpoint.next_run().is_some());
    answer(&mut endpoint, EntryStatus::Result, 1);
    ledger(&Left { endpoint, published: |_| false })
}

fn pieces(left: &Left, desc: OpDesc) -> Vec<Piece> {
    plan(&[(Rank(0), ledger(left)), (Rank(1), lacking(desc))].into(), 2).map(|plan| plan.pieces).unwrap_or_default()
}

/// A leaf whose only rank broadcasts has no result in its redo slots, and a rank below another leaf may lack it.
#[test]
fn a_root_keeps_what_its_device_has_not_published() {
    let desc = OpDesc::broadcast(Dtype::F32, Rank(0), COUNT as u64);
    let (left, mut memory) = returned(desc, |_| false);
    let pieces = pieces(&left, desc);
    let pieces: Vec<_> = pieces.iter().map(|piece| (piece.first, piece.end, piece.source)).collect();
    assert_eq!(pieces, [(1, 4, Source::Held(Rank(0)))]);
    let mut given = Vec::new();
    give_result(&left, 3, &mut memory, &mut given);
    assert_eq!(given, [7; COUNT]);
}

/// The same of a reduction to a rank below another leaf: its contribution.
#[test]
fn who_is_not_the_root_keeps_its_contribution() {
    let desc = OpDesc::reduce(Dtype::F32, ReduceOp::Sum, Rank(1), COUNT as u64);
    let (left, mut memory) = returned(desc, |_| false);
    let pieces_of = |left: &Left| -> Vec<_> {
        pieces(left, desc).iter().map(|piece| (piece.first, piece.end, piece.source)).collect()
    };
    assert_eq!(pieces_of(&left), [(1, 4, Source::Recompute)]);
    let mut given = Vec::new();
    give_contribution(&left, 3, &memory, &mut given);
    assert_eq!(given, [7; COUNT]);
    // Where one chunk of several is published, its result is given, and not the contribution that is kept with the rest.
    let (left, _) = returned(desc, |seq| seq == 2);
    let (again, held) = (Source::Recompute, Source::Held(Rank(0)));
    assert_eq!(pieces_of(&left), [(1, 2, again), (2, 3, held), (3, 4, again)]);
    given.clear();
    give_result(&left, 2, &mut memory, &mut given);
    assert_eq!(given, [PUBLISHED; COUNT]);
}

#[test]
fn nothing_is_kept_of_what_is_published() {
    let desc = OpDesc::reduce(Dtype::F32, ReduceOp::Sum, Rank(1), COUNT as u64);
    let (left, _) = returned(desc, |_| true);
    assert!(left.endpoint.ops().kept().all(|kept| !kept.has_bytes()));
    assert_eq!(pieces(&left, desc).len(), 1);
}

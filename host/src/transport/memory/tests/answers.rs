//! Answers that are errors, and answers that make no sense.

use super::{EPOCH, GROUP, endpoint};
use crate::transport::memory::endpoint::{Places, ReferenceEndpoint};
use crate::transport::memory::{Breach, Drain};
use crate::transport::packets::{EndpointError, Event, OpId};
use sumac_hal::dma::{Address, RegionKey};
use sumac_hal::ids::{ChunkNo, Epoch, GroupId, Rank};
use sumac_hal::mmio::{CompletionEntry, EntryError, EntryStatus, OperationLimit};
use sumac_hal::op::{Dtype, OpDesc, Path, ReduceOp};
use sumac_hal::wire::{Limit, RankMask, pack_op};

const OWN: Address = Address { region: RegionKey { index: 1, generation: 1 }, offset_bytes: 0 };

fn answer(status: EntryStatus, seq: u64, count: u16) -> CompletionEntry {
    let (group, epoch, stable) = (GROUP, EPOCH, ChunkNo(seq));
    CompletionEntry::Answer { status, group, epoch, seq: ChunkNo(seq), count, window: 8, stable, slowest: None }
}

/// An endpoint with an all-reduce of four chunks in flight, registered.
fn in_flight() -> ReferenceEndpoint {
    let mut endpoint = endpoint(0, 2);
    let places = Places { input: Some(OWN), output: Some(OWN), writable: None };
    endpoint.post(OpDesc::all_reduce(Dtype::F32, ReduceOp::Sum, 64), Path::Tree, places).expect("room");
    assert_eq!(endpoint.next_run().expect("a run").contribution.count, 4);
    endpoint
}

fn told(endpoint: &mut ReferenceEndpoint, entry: CompletionEntry) -> Option<EndpointError> {
    endpoint.handle(&entry.emit(), |_: &Drain| panic!("nothing is bounced"));
    endpoint.error()
}

#[test]
fn a_mismatch_ends_the_group_when_every_chunk_below_has_landed() {
    let (first, other) = (OpDesc::all_reduce(Dtype::F32, ReduceOp::Sum, 64), OpDesc::barrier());
    let mut endpoint = in_flight();
    let words = CompletionEntry::Operations { first: pack_op(&first), other: pack_op(&other) };
    assert_eq!(told(&mut endpoint, words), None);
    assert_eq!(told(&mut endpoint, answer(EntryStatus::Mismatch, 2, 2)), None, "chunks 0 and 1 are open");
    assert_eq!(told(&mut endpoint, answer(EntryStatus::Result, 1, 1)), None);
    let error = EndpointError::Mismatch { first, other };
    assert_eq!(told(&mut endpoint, answer(EntryStatus::Result, 0, 1)), Some(error));
    assert_eq!((endpoint.poll_event(), endpoint.poll_event()), (Some(Event::Failed(error)), None));
    assert!(endpoint.post(OpDesc::barrier(), Path::Tree, Places::default()).is_err());
    assert_eq!(endpoint.next_run(), None);

    let mut endpoint = in_flight();
    assert_eq!(told(&mut endpoint, words), None);
    assert_eq!(told(&mut endpoint, answer(EntryStatus::Unsupported, 0, 1)), Some(EndpointError::Unsupported(first)));
}

#[test]
fn refusals_end_the_group_at_once_with_a_name() {
    let chunk = ChunkNo(1);
    for status in EntryStatus::ALL {
        let expected = match status {
            EntryStatus::Result | EntryStatus::Done | EntryStatus::PathLost => continue,
            EntryStatus::Excluded => EndpointError::Excluded,
            EntryStatus::Mismatch | EntryStatus::Unsupported | EntryStatus::Stragglers => {
                Breach::Unnamed { status, chunk }.into()
            }
            EntryStatus::Fenced | EntryStatus::UnknownGroup | EntryStatus::StaleEpoch => EndpointError::GroupLost,
            status => EndpointError::Device { status, chunk },
        };
        assert_eq!(told(&mut in_flight(), answer(status, 1, 3)), Some(expected));
    }
    let mut endpoint = in_flight();
    assert_eq!(told(&mut endpoint, answer(EntryStatus::PathLost, 1, 3)), None, "as for packets: chunk 0 may land");
    assert_eq!(told(&mut endpoint, answer(EntryStatus::Result, 0, 1)), Some(EndpointError::PathLost));
}

fn mask(ranks: &[u32]) -> RankMask {
    ranks.iter().copied().map(Rank).collect()
}

/// An operation with a limit is announced before its first run, and only there; its result is told with whose it is.
#[test]
fn a_limit_goes_before_its_operation_and_who_is_missing_comes_before_its_result() {
    let limit = Limit { us: 500, cuts: true };
    let sum = OpDesc::all_reduce(Dtype::F32, ReduceOp::Sum, 64);
    let places = Places { input: Some(OWN), output: Some(OWN), writable: None };
    let mut endpoint = endpoint(0, 4);
    for limit in [None, Some(limit)] {
        endpoint.post_within(sum, Path::Tree, limit, places).expect("room");
    }
    let runs = [endpoint.next_run(), endpoint.next_run()].map(|run| run.expect("a run"));
    let announced = OperationLimit { group: GROUP, epoch: EPOCH, seq: ChunkNo(4), chunks: 4, limit };
    assert_eq!([runs[0].limit, runs[1].limit], [None, Some(announced)]);
    assert_ne!(runs[0].contribution.signature, runs[1].contribution.signature, "limits are agreed on");
    assert_eq!(told(&mut endpoint, answer(EntryStatus::Result, 0, 4)), None);
    for half in CompletionEntry::missing(1, ChunkNo(4), &mask(&[3])) {
        assert_eq!(told(&mut endpoint, half), None);
    }
    assert_eq!(told(&mut endpoint, answer(EntryStatus::Result, 4, 4)), None);
    for (op, missing) in [(0, mask(&[])), (1, mask(&[3]))] {
        assert_eq!(endpoint.poll_event(), Some(Event::Completed(OpId(op))));
        assert_eq!(endpoint.verdict().missing, missing);
    }
    assert_eq!(endpoint.gone(), mask(&[3]));
}

#[test]
fn who_is_left_out_and_who_was_missing_is_told_by_name() {
    let missing = mask(&[1, 130]);
    let mut endpoint = in_flight();
    for half in CompletionEntry::missing(0, ChunkNo(1), &missing) {
        assert_eq!(told(&mut endpoint, half), None);
    }
    assert_eq!(told(&mut endpoint, answer(EntryStatus::Stragglers, 1, 3)), None, "chunk 0 may land");
    let error = EndpointError::Stragglers { missing };
    assert_eq!(told(&mut endpoint, answer(EntryStatus::Result, 0, 1)), Some(error));
    assert!(endpoint.gone().is_empty());
    // A decision that names this rank, without more.
    let mut endpoint = in_flight();
    let [first, second] = CompletionEntry::missing(1, ChunkNo(0), &mask(&[0]));
    assert_eq!((told(&mut endpoint, first), told(&mut endpoint, second)), (None, Some(EndpointError::Excluded)));
    assert_eq!(endpoint.own_end(), 0);
    // Refused, without a word of the decision.
    let mut endpoint = in_flight();
    assert_eq!(told(&mut endpoint, answer(EntryStatus::Excluded, 1, 3)), Some(EndpointError::Excluded));
    assert_eq!(endpoint.own_end(), 1);
    // What is below lands first.
    let mut endpoint = in_flight();
    for half in CompletionEntry::missing(1, ChunkNo(2), &mask(&[0])) {
        assert_eq!(told(&mut endpoint, half), None);
    }
    assert_eq!((endpoint.own_end(), told(&mut endpoint, answer(EntryStatus::Result, 0, 1))), (2, None));
    assert_eq!(told(&mut endpoint, answer(EntryStatus::Result, 1, 1)), Some(EndpointError::Excluded));
}

#[test]
fn decisions_that_make_no_sense_are_told_apart() {
    let halves = |decision, ranks: &[u32]| CompletionEntry::missing(decision, ChunkNo(0), &mask(ranks));
    let undecided = |decision| Some(EndpointError::Broken(Breach::Undecided { decision, first: ChunkNo(0) }));
    let [first, second] = halves(1, &[1]);
    let cases = [
        (vec![second], 1),
        (vec![first, first], 1),
        (vec![first, halves(2, &[1])[1]], 2),
        (halves(2, &[1]).to_vec(), 2),
        (halves(1, &[]).to_vec(), 1),
        ([first, second].into_iter().chain(halves(1, &[2])).collect(), 1),
    ];
    for (entries, decision) in cases {
        let mut endpoint = in_flight();
        let (last, before) = entries.split_last().expect("entries");
        assert!(before.iter().all(|&entry| told(&mut endpoint, entry).is_none()), "{entries:?}");
        assert_eq!(told(&mut endpoint, *last), undecided(decision), "{entries:?}");
    }
}

#[test]
fn answers_that_make_no_sense_are_told_apart() {
    let unasked = |first, count| EndpointError::Broken(Breach::Unasked { first: ChunkNo(first), count });
    for (seq, count) in [(4, 1), (3, 2), (0, 5), (0, 0), (u64::MAX, 1), (u64::MAX, u16::MAX)] {
        let error = told(&mut in_flight(), answer(EntryStatus::Result, seq, count));
        assert_eq!(error, Some(unasked(seq, count)), "{count} chunks from {seq} on");
    }
    // A second time: of a chunk that has passed, one that has not, and one that was refused.
    for (before, again) in [(0, 0), (2, 2)] {
        let mut endpoint = in_flight();
        assert_eq!(told(&mut endpoint, answer(EntryStatus::Result, before, 1)), None);
        assert_eq!(told(&mut endpoint, answer(EntryStatus::Result, again, 1)), Some(unasked(again, 1)));
    }
    let mut endpoint = in_flight();
    assert_eq!(told(&mut endpoint, answer(EntryStatus::PathLost, 2, 1)), None);
    assert_eq!(told(&mut endpoint, answer(EntryStatus::Result, 2, 1)), Some(unasked(2, 1)));

    let strange = |group, epoch| {
        let (seq, stable) = (ChunkNo(0), ChunkNo(0));
        let status = EntryStatus::Result;
        told(
            &mut in_flight(),
            CompletionEntry::Answer { status, group, epoch, seq, count: 1, window: 0, stable, slowest: None },
        )
    };
    assert_eq!(strange(GroupId(8), EPOCH), Some(Breach::Stranger.into()));
    assert_eq!(strange(GROUP, Epoch { term: 1, counter: 3 }), Some(Breach::Stranger.into()));
    let no_result = Breach::NoResult { chunk: ChunkNo(0) }.into();
    assert_eq!(told(&mut in_flight(), answer(EntryStatus::Done, 0, 1)), Some(no_result));
    let admin = CompletionEntry::Admin { status: EntryStatus::Result, cookie: 0, value: 0 };
    assert_eq!(told(&mut in_flight(), admin), Some(Breach::Misplaced { queue: 1 }.into()));
    let mut endpoint = in_flight();
    endpoint.handle(&[9, 0, 0, 0], |_| {});
    assert_eq!(endpoint.error(), Some(Breach::Entry(EntryError::Opcode(9)).into()));
    // Operations that this version can't read are as none.
    let mut endpoint = in_flight();
    assert_eq!(told(&mut endpoint, CompletionEntry::Operations { first: u64::MAX, other: u64::MAX }), None);
    let unnamed = Breach::Unnamed { status: EntryStatus::Mismatch, chunk: ChunkNo(0) };
    assert_eq!(told(&mut endpoint, answer(EntryStatus::Mismatch, 0, 1)), Some(unnamed.into()));
}

#[test]
fn what_is_open_and_exposed_is_what_the_device_may_write_to() {
    let mut endpoint = in_flight();
    // Behind it one that is bounced, which exposes nothing of the caller's.
    endpoint.post(OpDesc::all_reduce(Dtype::F32, ReduceOp::Sum, 16), Path::Tree, Places::default()).expect("room");
    assert!(endpoint.next_run().expect("a run").fill.is_some());
    assert_eq!(told(&mut endpoint, answer(EntryStatus::Result, 1, 1)), None);
    let exposed: Vec<_> = endpoint.exposed().map(|(seq, address, len)| (seq.0, address.offset_bytes, len)).collect();
    assert_eq!(exposed, [(0, 0, 64), (2, 128, 64), (3, 192, 64)]);
    assert_eq!(told(&mut endpoint, answer(EntryStatus::Result, 0, 1)), None);
    assert_eq!(endpoint.have(), ChunkNo(2));
    assert_eq!(told(&mut endpoint, answer(EntryStatus::Result, 2, 2)), None);
    assert_eq!((endpoint.poll_event(), endpoint.is_in_flight()), (Some(Event::Completed(OpId(0))), true));
    assert_eq!(endpoint.exposed().count(), 0);
}

/// Each of these may stand for a result that was published and is half-written.
#[test]
fn what_is_answered_with_an_error_stays_exposed() {
    for status in [EntryStatus::Fenced, EntryStatus::Hardware, EntryStatus::PathLost, EntryStatus::Mismatch] {
        let mut endpoint = in_flight();
        assert_eq!(told(&mut endpoint, answer(EntryStatus::Result, 2, 1)), None);
        told(&mut endpoint, answer(status, 1, 1));
        let exposed: Vec<_> = endpoint.exposed().map(|(seq, address, _)| (seq.0, address.offset_bytes)).collect();
        assert_eq!(exposed, [(0, 0), (1, 64), (3, 192)], "{status:?}");
    }
}

//! Error answers, and answers that violate the protocol.

use super::{EPOCH, GROUP, endpoint};
use crate::transport::memory::endpoint::{Places, ZeroCopyEndpoint};
use crate::transport::memory::{ProtocolViolation, StageOut};
use crate::transport::packets::{EndpointError, Event, OpId};
use sumac_hal::dma::{Address, RegionKey};
use sumac_hal::ids::{ChunkNo, Epoch, GroupId, Rank};
use sumac_hal::mmio::{CompletionEntry, EntryError, EntryStatus, OperationLimit};
use sumac_hal::op::{Dtype, OpDesc, Path, ReduceOp};
use sumac_hal::wire::{RankMask, StragglerLimit, pack_op};

const OWN: Address = Address { region: RegionKey { index: 1, generation: 1 }, offset_bytes: 0 };

fn answer(status: EntryStatus, seq: u64, count: u16) -> CompletionEntry {
    let (group, epoch, stable) = (GROUP, EPOCH, ChunkNo(seq));
    CompletionEntry::Answer { status, group, epoch, seq: ChunkNo(seq), count, window: 8, stable, slowest: None }
}

/// An endpoint with a registered all-reduce of four chunks in flight.
fn in_flight() -> ZeroCopyEndpoint {
    let mut endpoint = endpoint(0, 2);
    let places = Places { input: Some(OWN), output: Some(OWN), writable: None };
    endpoint.post(OpDesc::all_reduce(Dtype::F32, ReduceOp::Sum, 64), Path::Tree, None, places).expect("room");
    assert_eq!(endpoint.next_run().expect("a run").contribution.count, 4);
    endpoint
}

fn handle(endpoint: &mut ZeroCopyEndpoint, entry: CompletionEntry) -> Option<EndpointError> {
    endpoint.handle(&entry.emit(), |_: &StageOut| panic!("nothing is bounced"));
    endpoint.error()
}

#[test]
fn mismatch_ends_the_group_after_lower_chunks_land() {
    let (first, other) = (OpDesc::all_reduce(Dtype::F32, ReduceOp::Sum, 64), OpDesc::barrier());
    let mut endpoint = in_flight();
    let words = CompletionEntry::Operations { first: pack_op(&first), other: pack_op(&other) };
    assert_eq!(handle(&mut endpoint, words), None);
    assert_eq!(handle(&mut endpoint, answer(EntryStatus::Mismatch, 2, 2)), None, "chunks 0 and 1 are open");
    assert_eq!(handle(&mut endpoint, answer(EntryStatus::Result, 1, 1)), None);
    let error = EndpointError::Mismatch { first, other };
    assert_eq!(handle(&mut endpoint, answer(EntryStatus::Result, 0, 1)), Some(error));
    assert_eq!((endpoint.poll_event(), endpoint.poll_event()), (Some(Event::Failed(error)), None));
    assert!(endpoint.post(OpDesc::barrier(), Path::Tree, None, Places::default()).is_err());
    assert_eq!(endpoint.next_run(), None);

    let mut endpoint = in_flight();
    assert_eq!(handle(&mut endpoint, words), None);
    assert_eq!(handle(&mut endpoint, answer(EntryStatus::Unsupported, 0, 1)), Some(EndpointError::Unsupported(first)));
}

#[test]
fn refusals_map_to_their_errors() {
    let chunk = ChunkNo(1);
    for status in EntryStatus::ALL {
        let expected = match status {
            EntryStatus::Result | EntryStatus::Done | EntryStatus::PathLost => continue,
            EntryStatus::Excluded => EndpointError::Excluded,
            EntryStatus::Mismatch | EntryStatus::Unsupported | EntryStatus::Stragglers => {
                ProtocolViolation::MissingDetails { status, chunk }.into()
            }
            EntryStatus::Fenced | EntryStatus::UnknownGroup | EntryStatus::StaleEpoch => EndpointError::GroupLost,
            status => EndpointError::Device { status, chunk },
        };
        assert_eq!(handle(&mut in_flight(), answer(status, 1, 3)), Some(expected));
    }
    let mut endpoint = in_flight();
    assert_eq!(handle(&mut endpoint, answer(EntryStatus::PathLost, 1, 3)), None, "as for packets: chunk 0 may land");
    assert_eq!(handle(&mut endpoint, answer(EntryStatus::Result, 0, 1)), Some(EndpointError::PathLost));
}

fn mask(ranks: &[u32]) -> RankMask {
    ranks.iter().copied().map(Rank).collect()
}

/// The limit of an operation precedes its first run only; the missing ranks precede its result.
#[test]
fn limit_precedes_its_operation_and_missing_ranks_precede_the_result() {
    let limit = StragglerLimit { us: 500, cuts: true };
    let sum = OpDesc::all_reduce(Dtype::F32, ReduceOp::Sum, 64);
    let places = Places { input: Some(OWN), output: Some(OWN), writable: None };
    let mut endpoint = endpoint(0, 4);
    for limit in [None, Some(limit)] {
        endpoint.post(sum, Path::Tree, limit, places).expect("room");
    }
    let runs = [endpoint.next_run(), endpoint.next_run()].map(|run| run.expect("a run"));
    let announced = OperationLimit { group: GROUP, epoch: EPOCH, seq: ChunkNo(4), chunks: 4, limit };
    assert_eq!([runs[0].limit, runs[1].limit], [None, Some(announced)]);
    assert_ne!(runs[0].contribution.signature, runs[1].contribution.signature, "limits are agreed on");
    assert_eq!(handle(&mut endpoint, answer(EntryStatus::Result, 0, 4)), None);
    for half in CompletionEntry::missing(1, ChunkNo(4), &mask(&[3])) {
        assert_eq!(handle(&mut endpoint, half), None);
    }
    assert_eq!(handle(&mut endpoint, answer(EntryStatus::Result, 4, 4)), None);
    for (op, missing) in [(0, mask(&[])), (1, mask(&[3]))] {
        assert_eq!(endpoint.poll_event(), Some(Event::Completed(OpId(op))));
        assert_eq!(endpoint.completion_info().missing, missing);
    }
    assert_eq!(endpoint.excluded_ranks(), mask(&[3]));
}

#[test]
fn excluded_and_missing_ranks_are_reported() {
    let missing = mask(&[1, 130]);
    let mut endpoint = in_flight();
    for half in CompletionEntry::missing(0, ChunkNo(1), &missing) {
        assert_eq!(handle(&mut endpoint, half), None);
    }
    assert_eq!(handle(&mut endpoint, answer(EntryStatus::Stragglers, 1, 3)), None, "chunk 0 may land");
    let error = EndpointError::Stragglers { missing };
    assert_eq!(handle(&mut endpoint, answer(EntryStatus::Result, 0, 1)), Some(error));
    assert!(endpoint.excluded_ranks().is_empty());
    // A decision that excludes this rank.
    let mut endpoint = in_flight();
    let [first, second] = CompletionEntry::missing(1, ChunkNo(0), &mask(&[0]));
    assert_eq!((handle(&mut endpoint, first), handle(&mut endpoint, second)), (None, Some(EndpointError::Excluded)));
    assert_eq!(endpoint.participation_end(), 0);
    // Refused, without the decision.
    let mut endpoint = in_flight();
    assert_eq!(handle(&mut endpoint, answer(EntryStatus::Excluded, 1, 3)), Some(EndpointError::Excluded));
    assert_eq!(endpoint.participation_end(), 1);
    // Lower chunks land first.
    let mut endpoint = in_flight();
    for half in CompletionEntry::missing(1, ChunkNo(2), &mask(&[0])) {
        assert_eq!(handle(&mut endpoint, half), None);
    }
    assert_eq!((endpoint.participation_end(), handle(&mut endpoint, answer(EntryStatus::Result, 0, 1))), (2, None));
    assert_eq!(handle(&mut endpoint, answer(EntryStatus::Result, 1, 1)), Some(EndpointError::Excluded));
}

#[test]
fn invalid_exclusion_decisions_are_violations() {
    let halves = |decision, ranks: &[u32]| CompletionEntry::missing(decision, ChunkNo(0), &mask(ranks));
    let invalid_decision =
        |decision| Some(EndpointError::Protocol(ProtocolViolation::InvalidDecision { decision, first: ChunkNo(0) }));
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
        assert!(before.iter().all(|&entry| handle(&mut endpoint, entry).is_none()), "{entries:?}");
        assert_eq!(handle(&mut endpoint, *last), invalid_decision(decision), "{entries:?}");
    }
}

#[test]
fn each_invalid_answer_is_its_own_violation() {
    let unsolicited =
        |first, count| EndpointError::Protocol(ProtocolViolation::Unsolicited { first: ChunkNo(first), count });
    for (seq, count) in [(4, 1), (3, 2), (0, 5), (0, 0), (u64::MAX, 1), (u64::MAX, u16::MAX)] {
        let error = handle(&mut in_flight(), answer(EntryStatus::Result, seq, count));
        assert_eq!(error, Some(unsolicited(seq, count)), "{count} chunks from {seq} on");
    }
    // A repeated answer: to a chunk that has passed, to one that has not, and to one that was refused.
    for (before, again) in [(0, 0), (2, 2)] {
        let mut endpoint = in_flight();
        assert_eq!(handle(&mut endpoint, answer(EntryStatus::Result, before, 1)), None);
        assert_eq!(handle(&mut endpoint, answer(EntryStatus::Result, again, 1)), Some(unsolicited(again, 1)));
    }
    let mut endpoint = in_flight();
    assert_eq!(handle(&mut endpoint, answer(EntryStatus::PathLost, 2, 1)), None);
    assert_eq!(handle(&mut endpoint, answer(EntryStatus::Result, 2, 1)), Some(unsolicited(2, 1)));

    let foreign = |group, epoch| {
        let (seq, stable) = (ChunkNo(0), ChunkNo(0));
        let status = EntryStatus::Result;
        handle(
            &mut in_flight(),
            CompletionEntry::Answer { status, group, epoch, seq, count: 1, window: 0, stable, slowest: None },
        )
    };
    assert_eq!(foreign(GroupId(8), EPOCH), Some(ProtocolViolation::WrongGroup.into()));
    assert_eq!(foreign(GROUP, Epoch { term: 1, counter: 3 }), Some(ProtocolViolation::WrongGroup.into()));
    let no_result = ProtocolViolation::NoResult { chunk: ChunkNo(0) }.into();
    assert_eq!(handle(&mut in_flight(), answer(EntryStatus::Done, 0, 1)), Some(no_result));
    let admin = CompletionEntry::Admin { status: EntryStatus::Result, cookie: 0, value: 0 };
    assert_eq!(handle(&mut in_flight(), admin), Some(ProtocolViolation::UnexpectedEntry { queue: 1 }.into()));
    let mut endpoint = in_flight();
    endpoint.handle(&[9, 0, 0, 0], |_| {});
    assert_eq!(endpoint.error(), Some(ProtocolViolation::Entry(EntryError::Opcode(9)).into()));
    // Descriptors that this version cannot read count as none.
    let mut endpoint = in_flight();
    assert_eq!(handle(&mut endpoint, CompletionEntry::Operations { first: u64::MAX, other: u64::MAX }), None);
    let missing_details = ProtocolViolation::MissingDetails { status: EntryStatus::Mismatch, chunk: ChunkNo(0) };
    assert_eq!(handle(&mut endpoint, answer(EntryStatus::Mismatch, 0, 1)), Some(missing_details.into()));
}

#[test]
fn exposed_lists_open_chunks_in_caller_memory() {
    let mut endpoint = in_flight();
    // Followed by a bounced one, which exposes none of the caller's memory.
    endpoint
        .post(OpDesc::all_reduce(Dtype::F32, ReduceOp::Sum, 16), Path::Tree, None, Places::default())
        .expect("room");
    assert!(endpoint.next_run().expect("a run").stage_in.is_some());
    assert_eq!(handle(&mut endpoint, answer(EntryStatus::Result, 1, 1)), None);
    let exposed: Vec<_> = endpoint.exposed().map(|(seq, address, len)| (seq.0, address.offset_bytes, len)).collect();
    assert_eq!(exposed, [(0, 0, 64), (2, 128, 64), (3, 192, 64)]);
    assert_eq!(handle(&mut endpoint, answer(EntryStatus::Result, 0, 1)), None);
    assert_eq!(endpoint.have(), ChunkNo(2));
    assert_eq!(handle(&mut endpoint, answer(EntryStatus::Result, 2, 2)), None);
    assert_eq!((endpoint.poll_event(), endpoint.is_in_flight()), (Some(Event::Completed(OpId(0))), true));
    assert_eq!(endpoint.exposed().count(), 0);
}

/// Each of these may stand for a result that was published and is half-written.
#[test]
fn chunk_answered_with_an_error_stays_exposed() {
    for status in [EntryStatus::Fenced, EntryStatus::Hardware, EntryStatus::PathLost, EntryStatus::Mismatch] {
        let mut endpoint = in_flight();
        assert_eq!(handle(&mut endpoint, answer(EntryStatus::Result, 2, 1)), None);
        handle(&mut endpoint, answer(status, 1, 1));
        let exposed: Vec<_> = endpoint.exposed().map(|(seq, address, _)| (seq.0, address.offset_bytes)).collect();
        assert_eq!(exposed, [(0, 0), (1, 64), (3, 192)], "{status:?}");
    }
}

//! Each [`DropReason`]: triggered by a hand-made packet, counted, and without effect on its chunk.

use super::*;

/// Complete a chunk normally, which shows that packets dropped before had no effect.
fn chunk_still_works(rig: &mut Rig, seq: u64) {
    rig.data(0, seq, &[1.0]);
    rig.data(1, seq, &[2.0]);
    let results: Vec<Sent> = rig.drain().into_iter().filter(|sent| sent.repr.kind == Kind::Result).collect();
    assert_eq!(results.len(), 2, "{results:?}");
    assert!(results.iter().all(|sent| sent.floats() == [3.0]));
}

/// Return all drop counters that are not 0.
fn counted(rig: &Rig) -> Vec<(DropReason, u64)> {
    DropReason::ALL.into_iter().map(|reason| (reason, rig.dropped(reason))).filter(|&(_, n)| n > 0).collect()
}

/// Check that a contribution is dropped for `reason` after `change`.
fn one_field_wrong(reason: DropReason, change: impl Fn(&mut Repr), payload: &[u8]) {
    let mut rig = Rig::new(Setup::default());
    let mut repr = rig.up(Kind::Data, 0, 0);
    change(&mut repr);
    rig.put(child_addr(0), repr, payload);
    assert_eq!(counted(&rig), [(reason, 1)]);
    rig.drain();
    chunk_still_works(&mut rig, 0);
}

#[test]
fn malformed_packet_is_dropped() {
    let mut rig = Rig::new(Setup::default());
    let repr = Repr { payload_len_bytes: 4, ..rig.up(Kind::Data, 0, 0) };
    let mut bytes = vec![0; repr.packet_len()];
    repr.emit(&mut Packet::new_unchecked(&mut bytes[..]), payload_crc(&[0; 4]));
    // Truncated, extended, and with each byte damaged: all are rejected before any field is used.
    (0..bytes.len()).for_each(|len| rig.put_bytes(child_addr(0), &bytes[..len]));
    bytes.push(0);
    rig.put_bytes(child_addr(0), &bytes);
    bytes.pop();
    for i in 0..bytes.len() {
        bytes[i] ^= 0x10;
        rig.put_bytes(child_addr(0), &bytes);
        bytes[i] ^= 0x10;
    }
    let malformed = 2 * bytes.len() as u64;
    assert_eq!(counted(&rig), [(DropReason::Malformed, malformed), (DropReason::WrongVersion, 1)]);
    assert_eq!(rig.drain(), []);
    chunk_still_works(&mut rig, 0);
}

#[test]
fn wrong_kind_is_dropped() {
    for kind in [Kind::Result, Kind::Done, Kind::Status, Kind::Ref] {
        one_field_wrong(DropReason::BadKind, |repr| repr.kind = kind, &[0; 4]);
    }
    for reason in [NakReason::PathLost, NakReason::UnknownGroup, NakReason::WrongEpoch, NakReason::Resend] {
        one_field_wrong(DropReason::BadKind, |repr| (repr.kind, repr.reason) = (Kind::Nak, Some(reason)), &[]);
    }
    one_field_wrong(DropReason::BadKind, |repr| repr.collective = None, &[0; 4]);
    one_field_wrong(DropReason::BadKind, |repr| repr.count = 2, &[0; 4]);
    one_field_wrong(DropReason::BadKind, |repr| repr.count = 0, &[0; 4]);
}

#[test]
fn wrong_kind_from_the_parent_is_dropped() {
    let mut rig = Rig::new(Setup { has_parent: true, ..Setup::default() });
    for kind in [Kind::Data, Kind::Empty, Kind::Probe, Kind::Ref] {
        let repr = rig.down(kind, 0, 0);
        rig.put(PARENT, repr, &[]);
    }
    assert_eq!(counted(&rig), [(DropReason::BadKind, 4)]);
}

#[test]
fn unknown_group_or_epoch_is_dropped() {
    one_field_wrong(DropReason::UnknownGroup, |repr| repr.group = GroupId(99), &[0; 4]);
    one_field_wrong(DropReason::WrongEpoch, |repr| repr.epoch.counter += 1, &[0; 4]);
    one_field_wrong(DropReason::WrongEpoch, |repr| repr.epoch.counter -= 1, &[0; 4]);
    one_field_wrong(DropReason::WrongEpoch, |repr| repr.epoch.term += 1, &[0; 4]);
}

#[test]
fn wrong_child_or_key_is_dropped() {
    one_field_wrong(DropReason::BadChild, |repr| repr.child = ChildIndex(2), &[0; 4]);
    one_field_wrong(DropReason::BadChild, |repr| repr.child = ChildIndex(u16::MAX), &[0; 4]);
    one_field_wrong(DropReason::BadKey, |repr| repr.key ^= 1, &[0; 4]);
    one_field_wrong(DropReason::BadKey, |repr| repr.key = key(0, 1), &[0; 4]);
    one_field_wrong(DropReason::BadKey, |repr| repr.key = 0, &[0; 4]);
}

#[test]
fn wrong_source_is_dropped() {
    let mut rig = Rig::new(Setup::default());
    rig.data(0, 0, &[1.0]);
    let repr = rig.up(Kind::Data, 0, 1);
    rig.put(Addr::Emu(77), repr, &floats(&[5.0]));
    assert_eq!(counted(&rig), [(DropReason::BadSource, 1)]);
    rig.data(1, 0, &[2.0]);
    let sent = rig.drain();
    assert!(sent.iter().all(|sent| sent.to != Addr::Emu(77)), "replies go only to the pinned address");
    chunk_still_works(&mut rig, 1);
}

#[test]
fn foreign_shard_is_dropped() {
    let shard = Shard::new(1, 2).unwrap();
    let mut rig = Rig::new(Setup { shard, ..Setup::default() });
    rig.data(0, 0, &[1.0]);
    rig.data(0, 32, &[1.0]);
    rig.nak(0, NakReason::Missing, 15);
    assert_eq!(counted(&rig), [(DropReason::BadShard, 3)]);
    chunk_still_works(&mut rig, 16);
}

#[test]
fn have_beyond_the_answers_is_dropped() {
    one_field_wrong(DropReason::BadMark, |repr| repr.mark = ChunkNo(1), &[0; 4]);
    one_field_wrong(DropReason::BadMark, |repr| repr.mark = ChunkNo(u64::MAX), &[0; 4]);
    let mut rig = Rig::new(Setup::default());
    rig.all(0);
    rig.all_have(2);
    rig.data(0, 1, &[0.0]);
    assert_eq!(rig.dropped(DropReason::BadMark), 1, "one answer was sent, no child can have two");
    rig.all_have(1);
    rig.drain();
    chunk_still_works(&mut rig, 1);
}

#[test]
fn invalid_payload_length_is_dropped() {
    let bad: [(Kind, usize); 5] =
        [(Kind::Data, 0), (Kind::Data, 5), (Kind::Data, 3), (Kind::Data, 68), (Kind::Empty, 4)];
    for (kind, len) in bad {
        one_field_wrong(DropReason::BadShape, |repr| repr.kind = kind, &vec![0; len]);
    }
    // A barrier has no elements.
    let barrier = |repr: &mut Repr| {
        (repr.collective, repr.dtype, repr.op) = (Some(OpDesc::barrier().collective), None, None);
    };
    let mut rig = Rig::new(Setup::default());
    let mut repr = rig.up(Kind::Data, 0, 0);
    barrier(&mut repr);
    rig.put(child_addr(0), repr, &[0; 4]);
    assert_eq!(counted(&rig), [(DropReason::BadShape, 1)]);
}

#[test]
fn differing_element_count_is_dropped() {
    let mut rig = Rig::new(Setup::default());
    rig.data(0, 0, &[1.0]);
    rig.data(1, 0, &[2.0, 2.0]);
    assert_eq!(counted(&rig), [(DropReason::BadShape, 1)]);
    rig.data(1, 0, &[2.0]);
    assert_eq!(rig.drain()[0].floats(), [3.0]);
}

#[test]
fn invalid_payload_length_from_the_parent_is_dropped() {
    let mut rig = Rig::new(Setup { has_parent: true, ..Setup::default() });
    rig.all(0);
    let own = rig.drain()[0].repr.token;
    for (kind, len) in [(Kind::Result, 8), (Kind::Result, 0), (Kind::Result, 3), (Kind::Result, 68), (Kind::Done, 4)] {
        let repr = rig.down(kind, 0, own);
        rig.put(PARENT, repr, &vec![0; len]);
    }
    assert_eq!(counted(&rig), [(DropReason::BadShape, 5)]);
    let repr = rig.down(Kind::Result, 0, own);
    rig.put(PARENT, repr, &floats(&[1.0]));
    assert_eq!(rig.drain().len(), 2);
}

#[test]
fn stale_or_duplicate_contribution_is_dropped() {
    let mut rig = Rig::new(Setup { window: 1, slots: 2, ..Setup::default() });
    rig.data(0, 0, &[1.0]);
    rig.data(0, 0, &[1.0]);
    assert_eq!(counted(&rig), [(DropReason::Duplicate, 1)]);
    rig.data(1, 0, &[2.0]);
    rig.data(1, 0, &[2.0]);
    assert_eq!(counted(&rig), [(DropReason::Duplicate, 2)], "also after the answer");
    assert!(rig.drain().iter().all(|sent| sent.floats() == [3.0]));
    for seq in 1..=2 {
        rig.all_have(seq);
        chunk_still_works(&mut rig, seq);
    }
    // A delayed copy of chunk 0 finds chunk 2 in its slot.
    rig.have[0] = 0;
    rig.data(0, 0, &[64.0]);
    assert_eq!(counted(&rig), [(DropReason::Stale, 1), (DropReason::Duplicate, 2)]);
    rig.all_have(3);
    chunk_still_works(&mut rig, 3);
}

#[test]
fn stale_or_unexpected_answer_from_the_parent_is_dropped() {
    let mut rig = Rig::new(Setup { has_parent: true, ..Setup::default() });
    rig.data(0, 0, &[1.0]);
    let early = rig.down(Kind::Result, 0, 0);
    rig.put(PARENT, early, &floats(&[9.0]));
    assert_eq!(counted(&rig), [(DropReason::Unexpected, 1)], "an answer before this node has contributed");
    let foreign = rig.down(Kind::Result, 16, 0);
    rig.put(PARENT, foreign, &floats(&[9.0]));
    assert_eq!(rig.dropped(DropReason::Stale), 1, "an answer to a chunk that the slot does not hold");
    rig.data(1, 0, &[2.0]);
    rig.drain();
    for _ in 0..2 {
        rig.put(PARENT, early, &floats(&[3.0]));
    }
    assert_eq!(rig.dropped(DropReason::Duplicate), 1);
    assert_eq!(rig.drain().len(), 2, "a duplicate answer is forwarded once");
}

/// Only the children that claim it go without the answer: the slot serves its next chunk.
#[test]
fn unsent_answer_that_every_child_claims_is_dropped() {
    let mut rig = Rig::new(Setup { window: 1, slots: 2, ..Setup::default() });
    for seq in 0..2 {
        rig.all_have(seq);
        rig.all(seq);
    }
    // Both report that they have chunk 0, whose answer was not even sent.
    rig.all_have(2);
    rig.data(0, 2, &[1.0]);
    assert_eq!(counted(&rig), []);
    assert!(rig.drain().iter().all(|sent| sent.repr.seq == ChunkNo(1)), "chunk 1 keeps its answer");
    chunk_still_works(&mut rig, 2);
}

#[test]
fn contribution_over_the_window_is_dropped() {
    let mut rig = Rig::new(Setup { window: 3, slots: 6, ..Setup::default() });
    rig.data(0, 2, &[1.0]);
    assert_eq!(counted(&rig), []);
    for seq in [3, 4, 1 << 40, u64::MAX] {
        rig.data(0, seq, &[1.0]);
    }
    assert_eq!(counted(&rig), [(DropReason::OverWindow, 4)]);
}

#[test]
fn unexpected_packets_are_dropped() {
    let mut rig = Rig::new(Setup { has_parent: true, ..Setup::default() });
    rig.data(0, 0, &[1.0]);
    rig.nak(0, NakReason::Missing, 0);
    assert_eq!(counted(&rig), [(DropReason::Unexpected, 1)], "there is no answer yet");
    let status = rig.down(Kind::Status, 0, 0x1234);
    rig.put(PARENT, status, &[]);
    let nak = Repr { reason: Some(NakReason::PathLost), ..rig.down(Kind::Nak, 0, 0x1234) };
    rig.put(PARENT, nak, &[]);
    assert_eq!(counted(&rig), [(DropReason::Unexpected, 3)], "the token is not ours");
    assert_eq!(rig.node.poll_event(), None, "no effect");
}

#[test]
fn reply_is_dropped_when_the_queue_is_full() {
    let mut rig = Rig::new(Setup::default());
    for _ in 0..super::super::MAX_REPLIES + 7 {
        rig.probe(0, 0, 1, 0);
    }
    assert_eq!(counted(&rig), [(DropReason::QueueFull, 7)]);
    assert_eq!(rig.drain().len(), super::super::MAX_REPLIES);
    chunk_still_works(&mut rig, 0);
}

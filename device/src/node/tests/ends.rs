//! How groups end: mismatches, unsupported operations, dead hops, leases.

use super::*;
use crate::node::Event;
use crate::trace::Trace;
use sumac_hal::wire::unpack_op;

const OTHER: OpDesc = OpDesc::all_reduce(Dtype::I32, ReduceOp::Max, 7);

/// Let `child` call `op` at `seq` with one element of four bytes.
fn call(rig: &mut Rig, child: u16, seq: u64, op: OpDesc) {
    let repr = Repr {
        collective: Some(op.collective),
        dtype: op.dtype,
        op: op.op,
        bits: op.count,
        signature: op.signature(Path::Tree, 1),
        ..rig.up(Kind::Data, child, seq)
    };
    rig.put(child_addr(child), repr, &[0; 4]);
}

fn ops(sent: &Sent) -> (Option<OpDesc>, Option<OpDesc>) {
    (sent.repr.op_desc(), unpack_op(sent.repr.bits2))
}

#[test]
fn mismatch_at_the_root_gives_every_child_the_same_error() {
    let mut rig = Rig::new(Setup { children: 3, ..Setup::default() });
    call(&mut rig, 1, 0, OP);
    assert_eq!(rig.drain(), []);
    call(&mut rig, 0, 0, OTHER);
    let naks = rig.drain();
    assert_eq!(naks.iter().map(|sent| sent.to).collect::<Vec<_>>(), [child_addr(0), child_addr(1)]);
    // Later calls, matching either or neither, get the same error.
    call(&mut rig, 2, 0, OpDesc { count: 8, ..OTHER });
    rig.probe(0, 0, 1, 0);
    call(&mut rig, 2, 1, OP);
    let later = rig.drain();
    assert_eq!(later.len(), 3);
    for sent in naks.iter().chain(&later) {
        assert!(sent.is_nak(NakReason::Mismatch), "{sent:?}");
        assert_eq!(ops(sent), (Some(OP), Some(OTHER)), "the first to arrive, then the other");
    }
    assert_eq!(later[0].repr.token, token(2), "each echoes the token of its packet");
    assert_eq!(later[1].repr.token, 0x9999);
    let failed = Event::GroupFailed { group: group_id(0), from: ChunkNo(0), reason: NakReason::Mismatch };
    assert_eq!((rig.node.poll_event(), rig.node.poll_event()), (Some(failed), None));
    let failed = Trace::Failed(group_id(0), ChunkNo(0), NakReason::Mismatch);
    assert!(rig.node.trace().iter().any(|entry| entry.event == failed && entry.at == rig.now));
}

#[test]
fn mismatch_in_any_operation_field_is_reported() {
    let others = [
        OpDesc { dtype: Some(Dtype::I32), ..OP },
        OpDesc { op: Some(ReduceOp::Max), ..OP },
        OpDesc { count: 999, ..OP },
        OpDesc::barrier(),
    ];
    for other in others {
        let mut rig = Rig::new(Setup::default());
        call(&mut rig, 0, 0, OP);
        call(&mut rig, 1, 0, other);
        let naks = rig.drain();
        assert_eq!(naks.len(), 2);
        assert!(naks.iter().all(|sent| ops(sent) == (Some(OP), Some(other))));
    }
    // The same operation by another path.
    let mut rig = Rig::new(Setup::default());
    call(&mut rig, 0, 0, OP);
    let repr = Repr { signature: OP.signature(Path::Ring, 1), ..rig.up(Kind::Data, 1, 0) };
    rig.put(child_addr(1), repr, &[0; 4]);
    assert!(rig.drain().iter().all(|sent| sent.is_nak(NakReason::Mismatch)));
}

#[test]
fn chunks_before_a_mismatch_complete() {
    let mut rig = Rig::new(Setup::default());
    rig.data(0, 0, &[1.0]);
    call(&mut rig, 0, 1, OP);
    call(&mut rig, 1, 1, OTHER);
    assert_eq!(rig.drain().len(), 2);
    rig.data(1, 0, &[2.0]);
    let sent = rig.drain();
    assert!(sent.len() == 2 && sent.iter().all(|sent| sent.floats() == [3.0]), "{sent:?}");
}

/// A mismatch at an earlier chunk, found later, replaces that of a later chunk: ranks see the first chunk that they
/// disagree on.
#[test]
fn earliest_mismatch_replaces_a_later_one() {
    let mut rig = Rig::new(Setup::default());
    call(&mut rig, 0, 1, OP);
    call(&mut rig, 1, 1, OTHER);
    rig.drain();
    call(&mut rig, 0, 0, OTHER);
    call(&mut rig, 1, 0, OpDesc { count: 8, ..OTHER });
    rig.drain();
    for seq in [0, 1] {
        for child in [0, 1] {
            rig.probe(child, seq, 1, 0);
            let sent = rig.drain();
            assert_eq!(ops(&sent[0]), (Some(OTHER), Some(OpDesc { count: 8, ..OTHER })));
        }
    }
}

#[test]
fn mismatch_below_the_root_is_reported_by_the_root_only() {
    let mut rig = Rig::new(Setup { has_parent: true, children: 3, ..Setup::default() });
    call(&mut rig, 0, 0, OP);
    call(&mut rig, 1, 0, OTHER);
    let sent = rig.drain();
    let [up] = &sent[..] else { panic!("no Nak to the children yet: {sent:?}") };
    assert!(up.to == PARENT && up.is_nak(NakReason::Mismatch));
    assert_eq!((ops(up), up.repr.seq, up.repr.key), ((Some(OP), Some(OTHER)), ChunkNo(0), PARENT_KEY));
    call(&mut rig, 2, 0, OP);
    assert_eq!(rig.drain(), []);
    // The root saw another pair first: every rank gets that one.
    let pair = [OpDesc::barrier(), OP];
    let nak = Repr {
        reason: Some(NakReason::Mismatch),
        collective: Some(pair[0].collective),
        bits2: sumac_hal::wire::pack_op(&pair[1]),
        ..rig.down(Kind::Nak, 0, up.repr.token)
    };
    rig.put(PARENT, nak, &[]);
    let naks = rig.drain();
    assert_eq!(naks.len(), 2, "the children that have contributed");
    call(&mut rig, 2, 0, OP);
    let late = rig.drain();
    assert!(naks.iter().chain(&late).all(|sent| ops(sent) == (Some(pair[0]), Some(pair[1]))));
}

/// A refusal of a later chunk, found first, does not replace that of an earlier one on the way up.
#[test]
fn refusal_reports_the_operations_of_the_earliest_chunk() {
    let mut rig = Rig::new(Setup { has_parent: true, ..Setup::default() });
    let later = OpDesc { count: 8, ..OTHER };
    call(&mut rig, 0, 1, OP);
    call(&mut rig, 1, 1, later);
    assert_eq!(ops(&rig.drain()[0]), (Some(OP), Some(later)));
    call(&mut rig, 0, 0, OP);
    call(&mut rig, 1, 0, OTHER);
    let sent = rig.drain();
    let [up] = &sent[..] else { panic!("{sent:?}") };
    assert_eq!((up.repr.seq, ops(up)), (ChunkNo(0), (Some(OP), Some(OTHER))));
}

#[test]
fn childs_mismatch_nak_fails_the_group_at_the_root() {
    let mut rig = Rig::new(Setup::default());
    call(&mut rig, 1, 0, OP);
    let nak =
        Repr { reason: Some(NakReason::Mismatch), bits2: sumac_hal::wire::pack_op(&OTHER), ..rig.up(Kind::Nak, 0, 0) };
    rig.put(child_addr(0), nak, &[]);
    let naks = rig.drain();
    assert!(naks.len() == 2 && naks.iter().all(|sent| ops(sent) == (Some(OP), Some(OTHER))), "{naks:?}");
}

/// A Nak whose second operation is unknown to this version still reports two operations: without them ranks could not
/// report the error, and would wait.
#[test]
fn refusal_with_an_unknown_operation_reports_two_operations() {
    let mut rig = Rig::new(Setup::default());
    let nak = Repr { reason: Some(NakReason::Unsupported), bits2: 0xff, ..rig.up(Kind::Nak, 0, 0) };
    rig.put(child_addr(0), nak, &[]);
    let naks = rig.drain();
    assert_eq!(naks.len(), 1);
    assert_eq!(ops(&naks[0]), (Some(OP), Some(OP)));
}

#[test]
fn unsupported_operation_is_reported() {
    let mut rig = Rig::new(Setup::default());
    let senseless = OpDesc { op: None, ..OP };
    call(&mut rig, 0, 0, senseless);
    let naks = rig.drain();
    assert!(naks.len() == 1 && naks[0].is_nak(NakReason::Unsupported));
    assert_eq!(ops(&naks[0]), (Some(senseless), Some(senseless)));
}

#[test]
fn silent_parent_is_dead_after_the_limit_and_fails_the_group() {
    let mut rig = Rig::new(Setup { has_parent: true, ..Setup::default() });
    rig.all(0);
    rig.drain();
    rig.data(0, 1, &[1.0]);
    rig.pass_ms(4_999);
    assert!(rig.drain().iter().all(|sent| sent.repr.kind == Kind::Probe));
    assert_eq!(rig.node.poll_event(), None);
    rig.pass_ms(1);
    let naks = rig.drain();
    assert_eq!(
        naks.iter().map(|sent| (sent.to, sent.repr.seq.0)).collect::<Vec<_>>(),
        [(child_addr(0), 0), (child_addr(1), 0), (child_addr(0), 1)]
    );
    assert!(naks.iter().all(|sent| sent.is_nak(NakReason::PathLost)));
    // Later contributions and probes get the Nak too; the parent is not probed any more.
    rig.data(1, 1, &[1.0]);
    rig.probe(0, 0, 2, 0);
    let naks = rig.drain();
    assert!(naks.len() == 2 && naks.iter().all(|sent| sent.is_nak(NakReason::PathLost)));
    rig.pass_ms(1_000);
    assert_eq!(rig.drain(), []);
}

/// A failure at a later chunk does not stop probes for earlier ones: their answers may still be lost.
#[test]
fn chunks_before_a_failure_are_still_probed() {
    let mut rig = Rig::new(Setup { has_parent: true, ..Setup::default() });
    (0..2).for_each(|seq| rig.all(seq));
    let own = rig.drain()[0].repr.token;
    let nak = Repr {
        reason: Some(NakReason::Mismatch),
        collective: Some(OP.collective),
        bits2: sumac_hal::wire::pack_op(&OTHER),
        ..rig.down(Kind::Nak, 1, own)
    };
    rig.put(PARENT, nak, &[]);
    assert_eq!(rig.drain().len(), 2, "both children get the Nak for chunk 1");
    rig.pass_ms(100);
    let sent = rig.drain();
    assert!(sent.len() == 1 && sent[0].repr.kind == Kind::Probe, "chunk 0 has no answer yet: {sent:?}");
    let result = rig.down(Kind::Result, 0, own);
    rig.put(PARENT, result, &floats(&[1.0]));
    assert_eq!(rig.drain().len(), 2);
    rig.pass_ms(100);
    assert_eq!(rig.drain(), [], "nothing is left to probe for");
}

#[test]
fn unknown_group_nak_from_the_parent_is_path_lost() {
    for reason in [NakReason::UnknownGroup, NakReason::WrongEpoch] {
        let mut rig = Rig::new(Setup { has_parent: true, ..Setup::default() });
        rig.all(0);
        let own = rig.drain()[0].repr.token;
        let nak = Repr { reason: Some(reason), ..rig.down(Kind::Nak, 0, own ^ 1) };
        rig.put(PARENT, nak, &[]);
        assert_eq!(rig.drain(), [], "a Nak without our token is ignored");
        rig.put(PARENT, Repr { token: own, ..nak }, &[]);
        // Together: the value that went up is no answer that the second child could get, too.
        let naks = rig.drain_in_batches(16);
        assert!(naks.len() == 2 && naks.iter().all(|sent| sent.is_nak(NakReason::PathLost)));
    }
}

#[test]
fn lease_expires_unless_a_valid_packet_renews_it() {
    let ms = u64::from(LEASE_MS);
    let mut rig = Rig::new(Setup::default());
    rig.pass_ms(ms - 1);
    rig.data(0, 0, &[1.0]);
    rig.pass_ms(ms - 1);
    // A packet with a wrong key renews nothing.
    let repr = Repr { key: 1, ..rig.up(Kind::Probe, 1, 0) };
    rig.put(child_addr(1), repr, &[]);
    assert_eq!(rig.node.poll_event(), None);
    rig.pass_ms(1);
    assert_eq!(rig.node.poll_event(), Some(Event::LeaseExpired(group_id(0))));
    assert!(rig.node.trace().iter().any(|entry| entry.event == Trace::LeaseExpired(group_id(0))));
    assert_eq!((rig.node.counters().leases_expired, rig.node.stats().slots_used), (1, 0));
    rig.data(0, 1, &[1.0]);
    assert!(rig.drain()[0].is_nak(NakReason::UnknownGroup));
    assert_eq!(rig.node.poll_timeout(), None);
    // The group's entries are free again.
    let again = Request::CreateGroup(group_config(&rig.setup, 0));
    assert_eq!(rig.node.control(&again, rig.now), Response::Done);
    rig.pass_ms(ms - 1);
    assert_eq!(rig.node.control(&Request::RenewGroup(group_id(0)), rig.now), Response::Done);
    rig.pass_ms(ms - 1);
    assert_eq!(rig.node.poll_event(), None, "renewed");
}

type Renewal<'a> = &'a dyn Fn(&mut Rig);

/// Any valid packet with the right key renews a lease (PROTOCOL 10), whatever its effect, except an answer to a probe
/// of the node's own.
#[test]
fn every_valid_packet_kind_renews_the_lease() {
    let setup = || Setup { has_parent: true, ..Setup::default() };
    let up = |kind, child| move |rig: &mut Rig| rig.put(child_addr(child), rig.up(kind, child, 0), &[]);
    let nak = |reason| move |rig: &mut Rig| rig.nak(1, reason, 0);
    let down = |kind| move |rig: &mut Rig| rig.put(PARENT, rig.down(kind, 0, 7), &[]);
    let lost = |rig: &mut Rig| {
        let repr = Repr { reason: Some(NakReason::Missing), ..rig.down(Kind::Nak, 0, 7) };
        rig.put(PARENT, repr, &[]);
    };
    let kinds: [(&str, Renewal<'_>); 10] = [
        ("data", &|rig| rig.data(0, 1, &[1.0])),
        ("a duplicate", &|rig| rig.data(0, 0, &[1.0])),
        ("empty", &up(Kind::Empty, 1)),
        ("probe", &up(Kind::Probe, 0)),
        ("a child's Nak for a missing answer", &nak(NakReason::Missing)),
        ("a child's mismatch Nak", &nak(NakReason::Mismatch)),
        ("result", &down(Kind::Result)),
        ("done", &down(Kind::Done)),
        ("the parent's Nak for a missing contribution", &lost),
        ("renewal", &|rig| {
            assert_eq!(rig.node.control(&Request::RenewGroup(group_id(0)), rig.now), Response::Done);
        }),
    ];
    for (name, renew) in kinds {
        let mut rig = Rig::new(setup());
        rig.data(0, 0, &[1.0]);
        rig.pass_ms(u64::from(LEASE_MS) - 1);
        renew(&mut rig);
        rig.pass_ms(u64::from(LEASE_MS) - 1);
        assert!(rig.node.has_group(group_id(0)), "{name} renews");
        rig.pass_ms(1);
        assert!(!rig.node.has_group(group_id(0)), "{name} renews once");
    }
}

/// The ranks below are gone and the parent is alive: the lease expires nevertheless.
#[test]
fn parents_status_does_not_renew_the_lease() {
    let mut rig = Rig::new(Setup { has_parent: true, ..Setup::default() });
    rig.data(0, 0, &[1.0]);
    rig.data(0, 1, &[1.0]);
    for _ in 0..3 {
        assert!(rig.node.has_group(group_id(0)));
        rig.pass_ms(u64::from(LEASE_MS) / 3 + 1);
        rig.put(PARENT, rig.down(Kind::Status, 0, 7), &[]);
    }
    assert!(!rig.node.has_group(group_id(0)));
}

#[test]
fn rare_events_are_traced() {
    let mut rig = Rig::new(Setup::default());
    (1..4).for_each(|seq| rig.data(0, seq, &[1.0]));
    assert_eq!(rig.node.control(&Request::ReleaseGroup(group_id(0)), rig.now), Response::Done);
    let what: Vec<Trace> = rig.node.trace().iter().map(|entry| entry.event).collect();
    let (group, child) = (group_id(0), ChildIndex(0));
    assert_eq!(
        what,
        [
            Trace::GroupCreated(group),
            Trace::ChildPinned(group, child),
            Trace::Lost(group, child, ChunkNo(0)),
            Trace::GroupReleased(group)
        ]
    );
}

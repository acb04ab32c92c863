//! Results sent to all children in one packet, and the conditions that prevent it.

use super::*;

const SHARES: Setup = Setup {
    children: 3,
    window: 8,
    slots: 16,
    order: Order::Arrival,
    has_parent: false,
    shard: Shard::WHOLE,
    parent_shards: 0,
    chunk_len_bytes: 64,
    groups: 1,
    ranks: &[],
    receive_buffer_bytes: 1 << 20,
    shares: true,
};

fn all_key() -> u64 {
    SECRET.child_key(group_id(0), EPOCH, ChildIndex::ALL)
}

/// Let `child` contribute `1.0` to `seq` with the flags given.
fn contribute(rig: &mut Rig, child: u16, seq: u64, flags: Flags) {
    let repr = Repr { flags, ..rig.up(Kind::Data, child, seq) };
    rig.put(child_addr(child), repr, &floats(&[1.0]));
}

fn all_contribute(rig: &mut Rig, seq: u64) {
    (0..rig.setup.children).for_each(|child| contribute(rig, child, seq, Flags::WANT | Flags::SHARED));
}

#[test]
fn result_is_one_packet_when_all_children_listen() {
    let mut rig = Rig::new(SHARES);
    all_contribute(&mut rig, 0);
    let sent = rig.drain();
    assert_eq!(sent.len(), 1);
    assert_eq!((sent[0].to, sent[0].repr.kind), (SHARED, Kind::Result));
    assert_eq!((sent[0].repr.child, sent[0].repr.key), (ChildIndex::ALL, all_key()));
    assert_eq!(sent[0].floats(), [3.0]);
    assert_eq!((rig.node.counters().answers, rig.node.counters().answers_shared), (3, 1));
}

#[test]
fn result_is_unicast_if_a_child_does_not_listen_or_want_it() {
    for flags in [Flags::WANT, Flags::SHARED, Flags::empty()] {
        let mut rig = Rig::new(SHARES);
        contribute(&mut rig, 0, 0, Flags::WANT | Flags::SHARED);
        contribute(&mut rig, 1, 0, flags);
        contribute(&mut rig, 2, 0, Flags::WANT | Flags::SHARED);
        let sent = rig.drain();
        let to: Vec<Addr> = sent.iter().map(|sent| sent.to).collect();
        assert_eq!(to, [child_addr(0), child_addr(1), child_addr(2)], "{flags:?}");
        assert_eq!(rig.node.counters().answers_shared, 0);
    }
}

#[test]
fn result_is_unicast_without_shared_address_or_with_one_child() {
    for setup in [Setup { shares: false, ..SHARES }, Setup { children: 1, ..SHARES }] {
        let mut rig = Rig::new(setup);
        all_contribute(&mut rig, 0);
        assert!(rig.drain().iter().enumerate().all(|(i, sent)| sent.to == child_addr(i as u16)));
        assert_eq!(rig.node.counters().answers_shared, 0);
    }
}

#[test]
fn done_is_unicast() {
    let mut rig = Rig::new(SHARES);
    for child in 0..3 {
        let repr = Repr { flags: Flags::WANT | Flags::SHARED, ..rig.up(Kind::Empty, child, 0) };
        rig.put(child_addr(child), repr, &[]);
    }
    let sent = rig.drain();
    assert!(sent.len() == 3 && sent.iter().all(|sent| sent.repr.kind == Kind::Done && sent.to != SHARED));
}

#[test]
fn lost_shared_result_is_resent_by_unicast() {
    let mut rig = Rig::new(SHARES);
    all_contribute(&mut rig, 0);
    assert_eq!(rig.drain().len(), 1);
    (0..3).for_each(|child| rig.nak(child, NakReason::Missing, 0));
    let sent = rig.drain();
    let to: Vec<Addr> = sent.iter().map(|sent| sent.to).collect();
    assert_eq!(to, [child_addr(0), child_addr(1), child_addr(2)]);
    assert!(sent.iter().zip(0..).all(|(sent, child)| sent.repr.key == key(0, child) && sent.floats() == [3.0]));
}

#[test]
fn packets_for_the_shared_child_index_are_dropped() {
    let mut rig = Rig::new(SHARES);
    let repr = Repr { child: ChildIndex::ALL, key: all_key(), ..rig.up(Kind::Data, 0, 0) };
    rig.put(child_addr(0), repr, &floats(&[1.0]));
    // A root accepts no results either.
    rig.put(child_addr(0), Repr { kind: Kind::Result, ..repr }, &floats(&[1.0]));
    assert_eq!((rig.dropped(DropReason::BadChild), rig.node.counters().contributions), (2, 0));
}

/// Let all children of an inner node contribute to `seq`, and return what it sends up.
fn inner(rig: &mut Rig, seq: u64) -> Sent {
    all_contribute(rig, seq);
    let sent = rig.drain();
    assert!(sent.len() == 1 && sent[0].to == PARENT, "{sent:?}");
    sent[0].clone()
}

#[test]
fn inner_node_accepts_shared_results_of_its_parent() {
    let mut rig = Rig::new(Setup { has_parent: true, ..SHARES });
    let up = inner(&mut rig, 0);
    assert!(up.repr.flags.contains(Flags::SHARED));
    let shared = Repr { child: ChildIndex::ALL, key: PARENT_SHARED.key, ..rig.down(Kind::Result, 0, 0) };
    for (from, repr) in [
        (PARENT, Repr { key: shared.key + 1, ..shared }),
        (PARENT, Repr { key: all_key(), ..shared }),
        (PARENT, Repr { kind: Kind::Nak, reason: Some(NakReason::PathLost), ..shared }),
        (child_addr(0), shared),
        (PARENT_SHARED.addr, shared),
    ] {
        let payload = if repr.kind == Kind::Nak { vec![] } else { floats(&[9.0]) };
        rig.put(from, repr, &payload);
    }
    assert_eq!((rig.dropped(DropReason::BadChild), rig.drain()), (5, vec![]));
    rig.put(PARENT, shared, &floats(&[7.0]));
    let sent = rig.drain();
    assert!(sent.len() == 1 && sent[0].to == SHARED && sent[0].floats() == [7.0], "{sent:?}");
}

#[test]
fn inner_node_without_shared_results_stops_asking() {
    let mut rig = Rig::new(Setup { has_parent: true, ..SHARES });
    for seq in 0..12 {
        rig.all_have(seq);
        let up = inner(&mut rig, seq);
        assert_eq!(up.repr.flags.contains(Flags::SHARED), seq < 8, "{seq}");
        let own = rig.down(Kind::Result, seq, 0);
        rig.put(PARENT, own, &floats(&[7.0]));
        rig.drain();
    }
    // A late shared copy of the first result shows that shared results do arrive.
    let shared = Repr { child: ChildIndex::ALL, key: PARENT_SHARED.key, ..rig.down(Kind::Result, 0, 0) };
    rig.put(PARENT, shared, &floats(&[7.0]));
    rig.drain();
    rig.all_have(12);
    assert!(inner(&mut rig, 12).repr.flags.contains(Flags::SHARED));
}

//! Ranks that come late, or never: who is named, who is held back, and what the group goes on with.

use super::*;
use sumac_hal::ids::Rank;
use sumac_hal::wire::{Limit, RankMask};

const LIMIT_MS: u64 = 10;
const CUTS: Limit = Limit { us: LIMIT_MS as u32 * 1000, cuts: true };
const FAILS: Limit = Limit { cuts: false, ..CUTS };
const NODE: u16 = TreeConfig::NODE;

const LEAF: Setup = Setup {
    children: 3,
    window: 8,
    slots: 16,
    order: Order::TreeFold,
    has_parent: false,
    shard: Shard::WHOLE,
    chunk_len_bytes: 64,
    groups: 1,
    receive_buffer_bytes: 1 << 20,
    shares: false,
    ranks: &[4, 5, 6],
};

/// Let `child` contribute 2^child to `seq` of an operation that began at `first`.
fn give(rig: &mut Rig, child: u16, (first, seq): (u64, u64), limit: Option<Limit>) {
    give_op(rig, child, (first, seq), limit, &OP);
}

fn give_op(rig: &mut Rig, child: u16, (first, seq): (u64, u64), limit: Option<Limit>, op: &OpDesc) {
    let mut repr = Repr { signature: op.signature(Path::Tree, 1), ..rig.up(Kind::Data, child, seq) };
    repr.set_op(op);
    repr.slowest = Some(Rank(4 + u32::from(child)));
    if let Some(limit) = limit {
        repr.set_limit(limit, (seq - first) as u32);
    }
    rig.put(child_addr(child), repr, &floats(&[f32::from(1_u16 << child)]));
}

fn mask(ranks: &[u32]) -> RankMask {
    ranks.iter().copied().map(Rank).collect()
}

fn mask_of(sent: &Sent) -> RankMask {
    RankMask::from_bytes(&sent.payload).expect("a set of ranks")
}

fn of_kind(sent: &[Sent], kind: Kind) -> Vec<&Sent> {
    sent.iter().filter(|sent| sent.repr.kind == kind).collect()
}

/// A node below reports.
fn late(rig: &mut Rig, child: u16, first: u64, here: u16, missing: &[u32]) {
    let mut repr = Repr { count: here, ..rig.up(Kind::Late, child, first) };
    repr.set_limit(CUTS, 0);
    rig.put(child_addr(child), repr, &mask(missing).to_bytes());
}

#[test]
fn answers_name_the_last_and_how_late_it_was() {
    let mut rig = Rig::new(LEAF);
    give(&mut rig, 2, (0, 0), None);
    rig.pass_ms(3);
    give(&mut rig, 0, (0, 0), None);
    rig.pass_ms(4);
    give(&mut rig, 1, (0, 0), None);
    let sent = rig.drain();
    assert!(sent.iter().all(|sent| (sent.repr.slowest, sent.repr.late_us) == (Some(Rank(5)), 7_000)), "{sent:?}");
    // A node below has the same to say of its own: its first rank came before all others here.
    let slow = Repr { slowest: Some(Rank(77)), late_us: 9_000, ..rig.up(Kind::Data, 0, 1) };
    give(&mut rig, 1, (1, 1), None);
    give(&mut rig, 2, (1, 1), None);
    rig.pass_ms(2);
    rig.put(child_addr(0), slow, &floats(&[1.0]));
    let told = rig.drain()[0].repr;
    assert_eq!((told.slowest, told.late_us), (Some(Rank(77)), 9_000));
}

#[test]
fn what_the_root_saw_is_carried_down() {
    let mut rig = Rig::new(Setup { has_parent: true, ranks: &[], ..LEAF });
    (0..3).for_each(|child| give(&mut rig, child, (0, 0), Some(CUTS)));
    let up = rig.drain();
    assert_eq!((up[0].repr.slowest, up[0].repr.limit()), (Some(Rank(6)), Some((CUTS, 0))));
    let down = Repr { slowest: Some(Rank(9)), late_us: 123, ..rig.down(Kind::Result, 0, 0) };
    rig.put(PARENT, down, &floats(&[7.0]));
    assert!(rig.drain().iter().all(|sent| (sent.repr.slowest, sent.repr.late_us) == (Some(Rank(9)), 123)));
}

#[test]
fn without_a_limit_nobody_is_left_out() {
    let mut rig = Rig::new(LEAF);
    give(&mut rig, 0, (0, 0), None);
    rig.pass_ms(50_000);
    assert_eq!(rig.drain(), []);
    give(&mut rig, 1, (0, 0), None);
    give(&mut rig, 2, (0, 0), None);
    assert_eq!(rig.drain()[0].floats(), [7.0]);
}

#[test]
fn the_root_goes_on_without_who_is_missing() {
    for order in [Order::Arrival, Order::TreeFold, Order::TreePairwise] {
        let mut rig = Rig::new(Setup { order, ..LEAF });
        give(&mut rig, 2, (0, 0), Some(CUTS));
        rig.pass_ms(LIMIT_MS - 1);
        give(&mut rig, 0, (0, 0), Some(CUTS));
        assert_eq!(rig.drain(), [], "a limit counts from the first");
        assert_eq!(rig.node.poll_timeout(), Some(rig.now + core::time::Duration::from_millis(1)));
        rig.pass_ms(1);
        let sent = rig.drain();
        let cuts = of_kind(&sent, Kind::Cut);
        let told: Vec<_> = cuts.iter().map(|cut| (cut.to, cut.repr.view, cut.repr.seq.0, mask_of(cut))).collect();
        assert_eq!(told, [0, 2].map(|child| (child_addr(child), 1, 0, mask(&[5]))));
        let results = of_kind(&sent, Kind::Result);
        assert!(results.len() == 2 && results.iter().all(|sent| sent.floats() == [5.0] && sent.repr.view == 1));
        // The straggler is told, and counts for nothing from now on.
        give(&mut rig, 1, (0, 0), Some(CUTS));
        let told = rig.drain();
        assert!(told.len() == 1 && told[0].is_nak(NakReason::Excluded) && told[0].repr.token == token(1), "{told:?}");
        for seq in 1..40 {
            rig.all_have(seq);
            give(&mut rig, 0, (seq, seq), None);
            give(&mut rig, 2, (seq, seq), None);
            let sent = rig.drain();
            assert!(sent.len() == 2 && sent.iter().all(|sent| sent.floats() == [5.0]), "{seq}: {sent:?}");
        }
        assert_eq!((rig.node.counters().cuts, rig.dropped(DropReason::Late)), (1, 1));
    }
}

#[test]
fn averages_are_over_who_is_left() {
    let mut rig = Rig::new(LEAF);
    let avg = OpDesc { op: Some(ReduceOp::Avg), ..OP };
    [0, 2].into_iter().for_each(|child| give_op(&mut rig, child, (0, 0), Some(CUTS), &avg));
    rig.pass_ms(LIMIT_MS);
    let sent = rig.drain();
    assert_eq!(of_kind(&sent, Kind::Result)[0].floats(), [5.0 / (RANKS.get() - 1) as f32]);
}

/// A rank whose first contribution got lost is there: something of it that came later may be in a result already.
#[test]
fn who_has_come_to_a_later_chunk_is_there() {
    let mut rig = Rig::new(LEAF);
    (0..2).for_each(|child| give(&mut rig, child, (0, 0), Some(CUTS)));
    (0..3).for_each(|child| give(&mut rig, child, (0, 1), Some(CUTS)));
    assert_eq!(rig.drain().len(), 3);
    rig.pass_ms(20 * LIMIT_MS);
    assert_eq!(rig.drain(), []);
    give(&mut rig, 2, (0, 0), Some(CUTS));
    assert_eq!(rig.drain()[0].floats(), [7.0]);
}

/// Once a chunk of it has a result, the members of an operation are decided: all of them.
#[test]
fn nobody_is_left_out_in_the_middle() {
    let mut rig = Rig::new(LEAF);
    (0..3).for_each(|child| give(&mut rig, child, (0, 0), Some(CUTS)));
    (0..2).for_each(|child| give(&mut rig, child, (0, 1), Some(CUTS)));
    rig.drain();
    rig.pass_ms(20 * LIMIT_MS);
    assert_eq!((rig.drain(), rig.node.counters().cuts), (vec![], 0));
}

#[test]
fn without_leave_to_go_on_it_fails_by_name() {
    let mut rig = Rig::new(LEAF);
    (0..2).for_each(|child| give(&mut rig, child, (0, 0), Some(FAILS)));
    rig.pass_ms(LIMIT_MS);
    let told = rig.drain();
    assert!(
        told.len() == 2 && told.iter().all(|sent| sent.is_nak(NakReason::Stragglers) && mask_of(sent) == mask(&[6]))
    );
    // Whoever comes, or asks, later hears the same.
    give(&mut rig, 2, (0, 0), Some(FAILS));
    rig.probe(0, 0, 1, 0);
    let told = rig.drain();
    assert!(
        told.len() == 2 && told.iter().all(|sent| sent.is_nak(NakReason::Stragglers) && mask_of(sent) == mask(&[6]))
    );
}

#[test]
fn an_operation_that_needs_the_missing_fails_by_name() {
    let sum = ReduceOp::Sum;
    for op in [OpDesc::reduce(Dtype::F32, sum, Rank(5), 1), OpDesc::broadcast(Dtype::F32, Rank(5), 1)] {
        let mut rig = Rig::new(LEAF);
        let mut empty = Repr { signature: op.signature(Path::Tree, 1), ..rig.up(Kind::Empty, 0, 0) };
        empty.set_op(&op);
        empty.set_limit(CUTS, 0);
        rig.put(child_addr(0), empty, &[]);
        rig.pass_ms(LIMIT_MS);
        let told = rig.drain();
        assert!(told.len() == 1 && told[0].is_nak(NakReason::Stragglers), "{told:?}");
    }
    // If its root has left before and another is missing now, both are named.
    let mut rig = Rig::new(LEAF);
    [0, 2].into_iter().for_each(|child| give(&mut rig, child, (0, 0), Some(CUTS)));
    rig.pass_ms(LIMIT_MS);
    rig.drain();
    give_op(&mut rig, 0, (1, 1), Some(CUTS), &OpDesc::reduce(Dtype::F32, sum, Rank(5), 1));
    rig.pass_ms(LIMIT_MS);
    let told = rig.drain();
    assert!(told.len() == 1 && mask_of(&told[0]) == mask(&[5, 6]), "{told:?}");
    // Who left earlier is missing in what follows, limit or not.
    let mut rig = Rig::new(LEAF);
    [0, 2].into_iter().for_each(|child| give(&mut rig, child, (0, 0), Some(CUTS)));
    rig.pass_ms(LIMIT_MS);
    rig.drain();
    let gather = OpDesc::all_gather(Dtype::F32, 3);
    for child in [0, 2] {
        let mut empty = Repr { signature: 1, ..rig.up(Kind::Empty, child, 1) };
        empty.set_op(&gather);
        rig.put(child_addr(child), empty, &[]);
    }
    let told = rig.drain();
    assert!(
        told.len() == 2 && told.iter().all(|sent| sent.is_nak(NakReason::Stragglers) && mask_of(sent) == mask(&[5]))
    );
}

/// What a node below the root has when its limit has passed: ranks 4 and 6 are there, 5 is not.
fn holding() -> Rig {
    let mut rig = Rig::new(Setup { has_parent: true, ..LEAF });
    rig.pass_ms(0);
    let hello = rig.drain();
    assert!(hello.len() == 1 && hello[0].repr.kind == Kind::Late && hello[0].payload.is_empty(), "{hello:?}");
    let noted = rig.down(Kind::Late, 0, hello[0].repr.token);
    rig.put(PARENT, noted, &[]);
    [0, 2].into_iter().for_each(|child| give(&mut rig, child, (0, 0), Some(CUTS)));
    rig.pass_ms(LIMIT_MS);
    rig
}

fn check_report(sent: &[Sent]) -> u32 {
    let [report] = sent else { panic!("{sent:?}") };
    let (kind, limit) = (report.repr.kind, report.repr.limit());
    assert_eq!((report.to, kind, report.repr.count, limit), (PARENT, Kind::Late, 2, Some((CUTS, 0))));
    assert_eq!((mask_of(report), report.repr.op_desc()), (mask(&[5]), Some(OP)));
    report.repr.token
}

#[test]
fn a_leaf_reports_and_holds_back_until_the_root_has_decided() {
    let mut rig = holding();
    check_report(&rig.drain());
    // Too late for the report: nothing of it is taken, and nothing said of it, until there is a decision.
    give(&mut rig, 1, (0, 0), Some(CUTS));
    assert_eq!((rig.drain(), rig.dropped(DropReason::Late)), (vec![], 1));
    rig.pass_ms(100);
    let token = check_report(&rig.drain());
    let cut = Repr { view: 1, ..rig.down(Kind::Cut, 0, token) };
    rig.put(PARENT, cut, &mask(&[5, 100]).to_bytes());
    let sent = rig.drain();
    assert!(sent[0].is_nak(NakReason::Excluded) && sent[0].to == child_addr(1), "{sent:?}");
    assert_eq!((sent[1].repr.kind, sent[1].floats()), (Kind::Data, vec![5.0]));
    let cuts = of_kind(&sent, Kind::Cut);
    assert!(cuts.len() == 2 && cuts.iter().all(|cut| mask_of(cut) == mask(&[5, 100])));
    let result = Repr { view: 1, ..rig.down(Kind::Result, 0, token) };
    rig.put(PARENT, result, &floats(&[6.0]));
    assert_eq!(rig.drain().iter().map(|sent| sent.to).collect::<Vec<_>>(), [0, 2].map(child_addr));
    // What was asked before the decision, and comes behind it, is of no interest any more.
    let mut asked = Repr { flags: Flags::WANT, ..rig.down(Kind::Late, 0, token) };
    asked.set_op(&OP);
    asked.set_limit(CUTS, 0);
    rig.put(PARENT, asked, &[]);
    rig.pass_ms(6_000);
    assert_eq!((rig.drain(), rig.dropped(DropReason::Stale)), (vec![], 1));
    // Once more, it changes nothing.
    rig.put(PARENT, cut, &mask(&[5, 100]).to_bytes());
    assert_eq!((rig.dropped(DropReason::Duplicate), rig.drain().len()), (1, 0));
}

#[test]
fn who_holds_back_hears_of_a_failure_and_notices_a_dead_parent() {
    let mut rig = holding();
    let token = check_report(&rig.drain());
    let nak = Repr { reason: Some(NakReason::Stragglers), ..rig.down(Kind::Nak, 0, token) };
    rig.put(PARENT, nak, &mask(&[5, 6]).to_bytes());
    let told = rig.drain();
    assert!(told.len() == 2 && told.iter().all(|sent| sent.is_nak(NakReason::Stragglers)));
    assert!(told.iter().all(|sent| mask_of(sent) == mask(&[5, 6])));

    let mut rig = holding();
    for _ in 0..49 {
        check_report(&rig.drain());
        rig.pass_ms(100);
    }
    rig.drain();
    rig.pass_ms(100);
    assert!(rig.drain().iter().all(|sent| sent.is_nak(NakReason::PathLost)));
    assert_eq!(rig.node.counters().naks, 2);
}

/// The root has a rank and two nodes below; one of them has all its ranks, the other not.
#[test]
fn a_root_asks_its_nodes_and_takes_their_word() {
    let mut rig = Rig::new(Setup { ranks: &[4, NODE, NODE], ..LEAF });
    (1..3).for_each(|child| {
        let hello = rig.up(Kind::Late, child, 0);
        rig.put(child_addr(child), hello, &[]);
    });
    assert_eq!(rig.drain().len(), 2, "both are answered");
    give(&mut rig, 0, (0, 0), Some(CUTS));
    give(&mut rig, 1, (0, 0), Some(CUTS));
    rig.pass_ms(LIMIT_MS);
    let asked = rig.drain();
    assert!(asked.len() == 1 && asked[0].to == child_addr(2), "{asked:?}");
    assert!(asked[0].repr.kind == Kind::Late && asked[0].repr.flags.contains(Flags::WANT | Flags::LIMITED));
    rig.pass_ms(100);
    assert_eq!(rig.drain().len(), 1, "and again");
    late(&mut rig, 2, 0, 3, &[8, 9]);
    let sent = rig.drain();
    assert_eq!(of_kind(&sent, Kind::Cut).iter().map(|cut| mask_of(cut)).collect::<Vec<_>>(), [mask(&[8, 9]); 3]);
    // It is decided once: who is left may take its time.
    rig.pass_ms(6_000);
    assert_eq!(rig.drain(), []);
    // What is left below the node counts.
    give(&mut rig, 2, (0, 0), Some(CUTS));
    assert_eq!(rig.drain()[0].floats(), [7.0]);
    // Asked again, the decision is the same.
    late(&mut rig, 2, 0, 3, &[8, 9]);
    let sent = rig.drain();
    assert!(sent.len() == 1 && sent[0].repr.kind == Kind::Cut && sent[0].repr.view == 1, "{sent:?}");
}

#[test]
fn a_node_with_nobody_left_is_not_waited_for() {
    let mut rig = Rig::new(Setup { ranks: &[4, NODE, 6], ..LEAF });
    give(&mut rig, 0, (0, 0), Some(CUTS));
    late(&mut rig, 1, 0, 0, &[8, 9]);
    // One report is enough to decide on everybody.
    let sent = rig.drain();
    assert_eq!(of_kind(&sent, Kind::Cut).iter().map(|cut| mask_of(cut)).collect::<Vec<_>>(), [mask(&[6, 8, 9])]);
    assert_eq!(of_kind(&sent, Kind::Result)[0].floats(), [1.0]);
}

#[test]
fn a_node_that_misses_nobody_says_so_and_goes_on() {
    let mut rig = Rig::new(Setup { has_parent: true, ..LEAF });
    (0..3).for_each(|child| give(&mut rig, child, (0, 1), Some(CUTS)));
    (0..2).for_each(|child| give(&mut rig, child, (0, 0), Some(CUTS)));
    rig.drain();
    let mut asked = Repr { flags: Flags::WANT, ..rig.down(Kind::Late, 0, 0) };
    asked.set_op(&OP);
    asked.set_limit(CUTS, 0);
    rig.put(PARENT, asked, &[]);
    let sent = rig.drain();
    assert!(sent.len() == 1 && mask_of(&sent[0]).is_empty() && sent[0].repr.count > 0, "{sent:?}");
    give(&mut rig, 2, (0, 0), Some(CUTS));
    assert_eq!(rig.drain()[0].floats(), [7.0]);
}

#[test]
fn a_node_that_has_heard_of_nothing_reports_all() {
    let mut rig = Rig::new(Setup { has_parent: true, ..LEAF });
    let mut asked = Repr { flags: Flags::WANT, ..rig.down(Kind::Late, 0, 0) };
    asked.set_op(&OP);
    asked.set_limit(CUTS, 0);
    rig.put(PARENT, asked, &[]);
    let sent = rig.drain();
    assert!(sent.len() == 1 && sent[0].repr.count == 0 && mask_of(&sent[0]) == mask(&[4, 5, 6]), "{sent:?}");
    let cut = Repr { view: 1, ..rig.down(Kind::Cut, 0, 0) };
    rig.put(PARENT, cut, &mask(&[4, 5, 6]).to_bytes());
    give(&mut rig, 1, (0, 0), Some(CUTS));
    assert!(rig.drain()[0].is_nak(NakReason::Excluded));
}

/// An answer of a view that a node has not heard of yet waits for the decision.
#[test]
fn answers_wait_for_the_decision_that_they_are_of() {
    let mut rig = Rig::new(Setup { has_parent: true, ranks: &[], ..LEAF });
    (0..3).for_each(|child| give(&mut rig, child, (0, 0), Some(CUTS)));
    rig.drain();
    let result = Repr { view: 1, ..rig.down(Kind::Result, 0, 0) };
    rig.put(PARENT, result, &floats(&[9.0]));
    let asked = rig.drain();
    assert!(asked.len() == 1 && asked[0].repr.kind == Kind::Late && asked[0].repr.view == 1, "{asked:?}");
    let cut = Repr { view: 1, ..rig.down(Kind::Cut, 0, 0) };
    rig.put(PARENT, cut, &mask(&[100]).to_bytes());
    assert_eq!(of_kind(&rig.drain(), Kind::Cut).len(), 3);
    rig.put(PARENT, result, &floats(&[9.0]));
    assert_eq!(of_kind(&rig.drain(), Kind::Result).len(), 3);
    // A rank that asks is told, also of what is not the latest.
    let second = Repr { view: 2, ..rig.down(Kind::Cut, 1, 0) };
    rig.put(PARENT, second, &mask(&[101]).to_bytes());
    rig.drain();
    let ask = Repr { view: 1, ..rig.up(Kind::Late, 0, 0) };
    rig.put(child_addr(0), ask, &[]);
    let told = rig.drain();
    assert_eq!((told[0].repr.view, mask_of(&told[0])), (1, mask(&[100])));
}

#[test]
fn a_rank_can_not_report_others() {
    let mut rig = Rig::new(LEAF);
    give(&mut rig, 0, (0, 0), Some(CUTS));
    late(&mut rig, 0, 0, 1, &[5, 6]);
    assert_eq!((rig.drain(), rig.dropped(DropReason::BadKind)), (vec![], 1));
}

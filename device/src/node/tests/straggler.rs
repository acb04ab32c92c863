//! Stragglers: which ranks are reported missing, held back and excluded, and how the group continues.

use super::*;
use sumac_hal::ids::Rank;
use sumac_hal::wire::{RankMask, StragglerLimit};

const LIMIT_MS: u64 = 10;
const CUTS: StragglerLimit = StragglerLimit { us: LIMIT_MS as u32 * 1000, cuts: true };
const FAILS: StragglerLimit = StragglerLimit { cuts: false, ..CUTS };
const NODE: u16 = TreeConfig::NODE;

const LEAF: Setup = Setup {
    children: 3,
    window: 8,
    slots: 16,
    order: Order::TreeFold,
    has_parent: false,
    shard: Shard::WHOLE,
    parent_shards: 0,
    chunk_len_bytes: 64,
    groups: 1,
    receive_buffer_bytes: 1 << 20,
    shares: false,
    ranks: &[4, 5, 6],
};

/// Let `child` contribute 2^child to `seq` of an operation that began at `first`.
fn contribute(rig: &mut Rig, child: u16, (first, seq): (u64, u64), limit: Option<StragglerLimit>) {
    contribute_op(rig, child, (first, seq), limit, &OP);
}

fn contribute_op(rig: &mut Rig, child: u16, (first, seq): (u64, u64), limit: Option<StragglerLimit>, op: &OpDesc) {
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

/// Let a child node report missing ranks.
fn report_missing(rig: &mut Rig, child: u16, first: u64, arrived: u16, missing: &[u32]) {
    let mut repr = Repr { count: arrived, ..rig.up(Kind::Late, child, first) };
    repr.set_limit(CUTS, 0);
    rig.put(child_addr(child), repr, &mask(missing).to_bytes());
}

#[test]
fn answers_report_the_slowest_rank_and_its_lateness() {
    let mut rig = Rig::new(LEAF);
    contribute(&mut rig, 2, (0, 0), None);
    rig.pass_ms(3);
    contribute(&mut rig, 0, (0, 0), None);
    rig.pass_ms(4);
    contribute(&mut rig, 1, (0, 0), None);
    let sent = rig.drain();
    assert!(sent.iter().all(|sent| (sent.repr.slowest, sent.repr.late_us) == (Some(Rank(5)), 7_000)), "{sent:?}");
    // A child node reports its own: its first rank contributed before all others here.
    let slow = Repr { slowest: Some(Rank(77)), late_us: 9_000, ..rig.up(Kind::Data, 0, 1) };
    contribute(&mut rig, 1, (1, 1), None);
    contribute(&mut rig, 2, (1, 1), None);
    rig.pass_ms(2);
    rig.put(child_addr(0), slow, &floats(&[1.0]));
    let replies = rig.drain()[0].repr;
    assert_eq!((replies.slowest, replies.late_us), (Some(Rank(77)), 9_000));
}

#[test]
fn slowest_rank_of_the_root_is_forwarded_down() {
    let mut rig = Rig::new(Setup { has_parent: true, ranks: &[], ..LEAF });
    (0..3).for_each(|child| contribute(&mut rig, child, (0, 0), Some(CUTS)));
    let up = rig.drain();
    assert_eq!((up[0].repr.slowest, up[0].repr.limit()), (Some(Rank(6)), Some((CUTS, 0))));
    let down = Repr { slowest: Some(Rank(9)), late_us: 123, ..rig.down(Kind::Result, 0, 0) };
    rig.put(PARENT, down, &floats(&[7.0]));
    assert!(rig.drain().iter().all(|sent| (sent.repr.slowest, sent.repr.late_us) == (Some(Rank(9)), 123)));
}

#[test]
fn operation_without_limit_waits() {
    let mut rig = Rig::new(LEAF);
    contribute(&mut rig, 0, (0, 0), None);
    rig.pass_ms(50_000);
    assert_eq!(rig.drain(), []);
    contribute(&mut rig, 1, (0, 0), None);
    contribute(&mut rig, 2, (0, 0), None);
    assert_eq!(rig.drain()[0].floats(), [7.0]);
}

#[test]
fn root_excludes_missing_ranks_and_continues() {
    for order in [Order::Arrival, Order::TreeFold, Order::TreePairwise] {
        let mut rig = Rig::new(Setup { order, ..LEAF });
        contribute(&mut rig, 2, (0, 0), Some(CUTS));
        rig.pass_ms(LIMIT_MS - 1);
        contribute(&mut rig, 0, (0, 0), Some(CUTS));
        assert_eq!(rig.drain(), [], "a limit counts from the first contribution");
        assert_eq!(rig.node.poll_timeout(), Some(rig.now + core::time::Duration::from_millis(1)));
        rig.pass_ms(1);
        let sent = rig.drain();
        let cuts = of_kind(&sent, Kind::Cut);
        let replies: Vec<_> = cuts.iter().map(|cut| (cut.to, cut.repr.view, cut.repr.seq.0, mask_of(cut))).collect();
        assert_eq!(replies, [0, 2].map(|child| (child_addr(child), 1, 0, mask(&[5]))));
        let results = of_kind(&sent, Kind::Result);
        assert!(results.len() == 2 && results.iter().all(|sent| sent.floats() == [5.0] && sent.repr.view == 1));
        // The straggler gets a Nak, and nothing of it counts from now on.
        contribute(&mut rig, 1, (0, 0), Some(CUTS));
        let replies = rig.drain();
        assert!(
            replies.len() == 1 && replies[0].is_nak(NakReason::Excluded) && replies[0].repr.token == token(1),
            "{replies:?}"
        );
        for seq in 1..40 {
            rig.all_have(seq);
            contribute(&mut rig, 0, (seq, seq), None);
            contribute(&mut rig, 2, (seq, seq), None);
            let sent = rig.drain();
            assert!(sent.len() == 2 && sent.iter().all(|sent| sent.floats() == [5.0]), "{seq}: {sent:?}");
        }
        assert_eq!((rig.node.counters().cuts, rig.dropped(DropReason::Late)), (1, 1));
    }
}

#[test]
fn average_divides_by_the_remaining_ranks() {
    let mut rig = Rig::new(LEAF);
    let avg = OpDesc { op: Some(ReduceOp::Avg), ..OP };
    [0, 2].into_iter().for_each(|child| contribute_op(&mut rig, child, (0, 0), Some(CUTS), &avg));
    rig.pass_ms(LIMIT_MS);
    let sent = rig.drain();
    assert_eq!(of_kind(&sent, Kind::Result)[0].floats(), [5.0 / (RANKS.get() - 1) as f32]);
}

/// A rank whose first contribution was lost has arrived: a later one of it may already be in a result.
#[test]
fn child_with_a_later_contribution_is_not_excluded() {
    let mut rig = Rig::new(LEAF);
    (0..2).for_each(|child| contribute(&mut rig, child, (0, 0), Some(CUTS)));
    (0..3).for_each(|child| contribute(&mut rig, child, (0, 1), Some(CUTS)));
    assert_eq!(rig.drain().len(), 3);
    rig.pass_ms(20 * LIMIT_MS);
    assert_eq!(rig.drain(), []);
    contribute(&mut rig, 2, (0, 0), Some(CUTS));
    assert_eq!(rig.drain()[0].floats(), [7.0]);
}

/// Once one of its chunks has a result, the members of an operation are decided: all ranks.
#[test]
fn operation_with_a_result_excludes_no_rank() {
    let mut rig = Rig::new(LEAF);
    (0..3).for_each(|child| contribute(&mut rig, child, (0, 0), Some(CUTS)));
    (0..2).for_each(|child| contribute(&mut rig, child, (0, 1), Some(CUTS)));
    rig.drain();
    rig.pass_ms(20 * LIMIT_MS);
    assert_eq!((rig.drain(), rig.node.counters().cuts), (vec![], 0));
}

#[test]
fn limit_without_cuts_fails_and_reports_missing_ranks() {
    let mut rig = Rig::new(LEAF);
    (0..2).for_each(|child| contribute(&mut rig, child, (0, 0), Some(FAILS)));
    rig.pass_ms(LIMIT_MS);
    let replies = rig.drain();
    assert!(
        replies.len() == 2
            && replies.iter().all(|sent| sent.is_nak(NakReason::Stragglers) && mask_of(sent) == mask(&[6]))
    );
    // Later contributions and probes get the same error.
    contribute(&mut rig, 2, (0, 0), Some(FAILS));
    rig.probe(0, 0, 1, 0);
    let replies = rig.drain();
    assert!(
        replies.len() == 2
            && replies.iter().all(|sent| sent.is_nak(NakReason::Stragglers) && mask_of(sent) == mask(&[6]))
    );
}

#[test]
fn operation_that_needs_missing_ranks_fails_and_reports_them() {
    let sum = ReduceOp::Sum;
    for op in [OpDesc::reduce(Dtype::F32, sum, Rank(5), 1), OpDesc::broadcast(Dtype::F32, Rank(5), 1)] {
        let mut rig = Rig::new(LEAF);
        let mut empty = Repr { signature: op.signature(Path::Tree, 1), ..rig.up(Kind::Empty, 0, 0) };
        empty.set_op(&op);
        empty.set_limit(CUTS, 0);
        rig.put(child_addr(0), empty, &[]);
        rig.pass_ms(LIMIT_MS);
        let replies = rig.drain();
        assert!(replies.len() == 1 && replies[0].is_nak(NakReason::Stragglers), "{replies:?}");
    }
    // If its root was excluded earlier and another rank is missing now, both are reported.
    let mut rig = Rig::new(LEAF);
    [0, 2].into_iter().for_each(|child| contribute(&mut rig, child, (0, 0), Some(CUTS)));
    rig.pass_ms(LIMIT_MS);
    rig.drain();
    contribute_op(&mut rig, 0, (1, 1), Some(CUTS), &OpDesc::reduce(Dtype::F32, sum, Rank(5), 1));
    rig.pass_ms(LIMIT_MS);
    let replies = rig.drain();
    assert!(replies.len() == 1 && mask_of(&replies[0]) == mask(&[5, 6]), "{replies:?}");
    // Ranks excluded earlier are missing in later operations, with or without a limit.
    let mut rig = Rig::new(LEAF);
    [0, 2].into_iter().for_each(|child| contribute(&mut rig, child, (0, 0), Some(CUTS)));
    rig.pass_ms(LIMIT_MS);
    rig.drain();
    let gather = OpDesc::all_gather(Dtype::F32, 3);
    for child in [0, 2] {
        let mut empty = Repr { signature: 1, ..rig.up(Kind::Empty, child, 1) };
        empty.set_op(&gather);
        rig.put(child_addr(child), empty, &[]);
    }
    let replies = rig.drain();
    assert!(
        replies.len() == 2
            && replies.iter().all(|sent| sent.is_nak(NakReason::Stragglers) && mask_of(sent) == mask(&[5]))
    );
}

/// An inner node whose limit has expired: ranks 4 and 6 have contributed, 5 has not.
fn holding_leaf() -> Rig {
    let mut rig = Rig::new(Setup { has_parent: true, ..LEAF });
    rig.pass_ms(0);
    let hello = rig.drain();
    assert!(hello.len() == 1 && hello[0].repr.kind == Kind::Late && hello[0].payload.is_empty(), "{hello:?}");
    let ack = rig.down(Kind::Late, 0, hello[0].repr.token);
    rig.put(PARENT, ack, &[]);
    [0, 2].into_iter().for_each(|child| contribute(&mut rig, child, (0, 0), Some(CUTS)));
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
fn leaf_reports_and_holds_back_until_the_decision() {
    let mut rig = holding_leaf();
    check_report(&rig.drain());
    // Too late for the report: the packet is dropped without a reply until there is a decision.
    contribute(&mut rig, 1, (0, 0), Some(CUTS));
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
    // A query from before the decision is ignored after it.
    let mut query = Repr { flags: Flags::WANT, ..rig.down(Kind::Late, 0, token) };
    query.set_op(&OP);
    query.set_limit(CUTS, 0);
    rig.put(PARENT, query, &[]);
    rig.pass_ms(6_000);
    assert_eq!((rig.drain(), rig.dropped(DropReason::Stale)), (vec![], 1));
    // A duplicate decision changes nothing.
    rig.put(PARENT, cut, &mask(&[5, 100]).to_bytes());
    assert_eq!((rig.dropped(DropReason::Duplicate), rig.drain().len()), (1, 0));
}

#[test]
fn hold_ends_with_a_failure_or_a_dead_parent() {
    let mut rig = holding_leaf();
    let token = check_report(&rig.drain());
    let nak = Repr { reason: Some(NakReason::Stragglers), ..rig.down(Kind::Nak, 0, token) };
    rig.put(PARENT, nak, &mask(&[5, 6]).to_bytes());
    let replies = rig.drain();
    assert!(replies.len() == 2 && replies.iter().all(|sent| sent.is_nak(NakReason::Stragglers)));
    assert!(replies.iter().all(|sent| mask_of(sent) == mask(&[5, 6])));

    let mut rig = holding_leaf();
    for _ in 0..49 {
        check_report(&rig.drain());
        rig.pass_ms(100);
    }
    rig.drain();
    rig.pass_ms(100);
    assert!(rig.drain().iter().all(|sent| sent.is_nak(NakReason::PathLost)));
    assert_eq!(rig.node.counters().naks, 2);
}

/// The root has a rank and two nodes below; one node has all its ranks, the other does not.
#[test]
fn root_queries_nodes_and_excludes_the_reported_ranks() {
    let mut rig = Rig::new(Setup { ranks: &[4, NODE, NODE], ..LEAF });
    (1..3).for_each(|child| {
        let hello = rig.up(Kind::Late, child, 0);
        rig.put(child_addr(child), hello, &[]);
    });
    assert_eq!(rig.drain().len(), 2, "both are answered");
    contribute(&mut rig, 0, (0, 0), Some(CUTS));
    contribute(&mut rig, 1, (0, 0), Some(CUTS));
    rig.pass_ms(LIMIT_MS);
    let query = rig.drain();
    assert!(query.len() == 1 && query[0].to == child_addr(2), "{query:?}");
    assert!(query[0].repr.kind == Kind::Late && query[0].repr.flags.contains(Flags::WANT | Flags::LIMITED));
    rig.pass_ms(100);
    assert_eq!(rig.drain().len(), 1, "and again");
    report_missing(&mut rig, 2, 0, 3, &[8, 9]);
    let sent = rig.drain();
    assert_eq!(of_kind(&sent, Kind::Cut).iter().map(|cut| mask_of(cut)).collect::<Vec<_>>(), [mask(&[8, 9]); 3]);
    // The root decides once: remaining ranks may take their time.
    rig.pass_ms(6_000);
    assert_eq!(rig.drain(), []);
    // The remaining ranks below the node count.
    contribute(&mut rig, 2, (0, 0), Some(CUTS));
    assert_eq!(rig.drain()[0].floats(), [7.0]);
    // A repeated report gets the same decision.
    report_missing(&mut rig, 2, 0, 3, &[8, 9]);
    let sent = rig.drain();
    assert!(sent.len() == 1 && sent[0].repr.kind == Kind::Cut && sent[0].repr.view == 1, "{sent:?}");
}

#[test]
fn node_without_remaining_ranks_is_excluded() {
    let mut rig = Rig::new(Setup { ranks: &[4, NODE, 6], ..LEAF });
    contribute(&mut rig, 0, (0, 0), Some(CUTS));
    report_missing(&mut rig, 1, 0, 0, &[8, 9]);
    // One report is enough to decide on all missing ranks.
    let sent = rig.drain();
    assert_eq!(of_kind(&sent, Kind::Cut).iter().map(|cut| mask_of(cut)).collect::<Vec<_>>(), [mask(&[6, 8, 9])]);
    assert_eq!(of_kind(&sent, Kind::Result)[0].floats(), [1.0]);
}

#[test]
fn node_without_missing_ranks_reports_none_and_continues() {
    let mut rig = Rig::new(Setup { has_parent: true, ..LEAF });
    (0..3).for_each(|child| contribute(&mut rig, child, (0, 1), Some(CUTS)));
    (0..2).for_each(|child| contribute(&mut rig, child, (0, 0), Some(CUTS)));
    rig.drain();
    let mut query = Repr { flags: Flags::WANT, ..rig.down(Kind::Late, 0, 0) };
    query.set_op(&OP);
    query.set_limit(CUTS, 0);
    rig.put(PARENT, query, &[]);
    let sent = rig.drain();
    assert!(sent.len() == 1 && mask_of(&sent[0]).is_empty() && sent[0].repr.count > 0, "{sent:?}");
    contribute(&mut rig, 2, (0, 0), Some(CUTS));
    assert_eq!(rig.drain()[0].floats(), [7.0]);
}

#[test]
fn node_without_contributions_reports_all_its_ranks() {
    let mut rig = Rig::new(Setup { has_parent: true, ..LEAF });
    let mut query = Repr { flags: Flags::WANT, ..rig.down(Kind::Late, 0, 0) };
    query.set_op(&OP);
    query.set_limit(CUTS, 0);
    rig.put(PARENT, query, &[]);
    let sent = rig.drain();
    assert!(sent.len() == 1 && sent[0].repr.count == 0 && mask_of(&sent[0]) == mask(&[4, 5, 6]), "{sent:?}");
    let cut = Repr { view: 1, ..rig.down(Kind::Cut, 0, 0) };
    rig.put(PARENT, cut, &mask(&[4, 5, 6]).to_bytes());
    contribute(&mut rig, 1, (0, 0), Some(CUTS));
    assert!(rig.drain()[0].is_nak(NakReason::Excluded));
}

/// An answer under a decision that a node does not know is dropped until it has the decision.
#[test]
fn answer_of_an_unknown_decision_requests_it() {
    let mut rig = Rig::new(Setup { has_parent: true, ranks: &[], ..LEAF });
    (0..3).for_each(|child| contribute(&mut rig, child, (0, 0), Some(CUTS)));
    rig.drain();
    let result = Repr { view: 1, ..rig.down(Kind::Result, 0, 0) };
    rig.put(PARENT, result, &floats(&[9.0]));
    let query = rig.drain();
    assert!(query.len() == 1 && query[0].repr.kind == Kind::Late && query[0].repr.view == 1, "{query:?}");
    let cut = Repr { view: 1, ..rig.down(Kind::Cut, 0, 0) };
    rig.put(PARENT, cut, &mask(&[100]).to_bytes());
    assert_eq!(of_kind(&rig.drain(), Kind::Cut).len(), 3);
    rig.put(PARENT, result, &floats(&[9.0]));
    assert_eq!(of_kind(&rig.drain(), Kind::Result).len(), 3);
    // A rank that requests an older decision gets it too.
    let second = Repr { view: 2, ..rig.down(Kind::Cut, 1, 0) };
    rig.put(PARENT, second, &mask(&[101]).to_bytes());
    rig.drain();
    let ask = Repr { view: 1, ..rig.up(Kind::Late, 0, 0) };
    rig.put(child_addr(0), ask, &[]);
    let replies = rig.drain();
    assert_eq!((replies[0].repr.view, mask_of(&replies[0])), (1, mask(&[100])));
}

#[test]
fn report_from_a_rank_is_dropped() {
    let mut rig = Rig::new(LEAF);
    contribute(&mut rig, 0, (0, 0), Some(CUTS));
    report_missing(&mut rig, 0, 0, 1, &[5, 6]);
    assert_eq!((rig.drain(), rig.dropped(DropReason::BadKind)), (vec![], 1));
}

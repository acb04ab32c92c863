//! Zero-copy stragglers: who waits, which decisions each rank gets, and whose memory is touched.

use super::*;
use crate::node::tests::{PARENT, RANKS, Sent, child_addr};
use sumac_hal::ids::Rank;
use sumac_hal::mmio::OperationLimit;
use sumac_hal::op::{OpDesc, ReduceOp};
use sumac_hal::wire::{Kind, NakReason, RankMask, Repr, StragglerLimit};

const LIMIT_MS: u64 = 10;
const CUTS: StragglerLimit = StragglerLimit { us: LIMIT_MS as u32 * 1000, cuts: true };
const FAILS: StragglerLimit = StragglerLimit { cuts: false, ..CUTS };
/// Chunks per operation.
const LONG: u64 = 2;

const THREE: Setup = Setup {
    children: 3,
    window: 4,
    slots: 8,
    order: Order::TreeFold,
    has_parent: false,
    shard: sumac_hal::shard::Shard::WHOLE,
    parent_shards: 0,
    chunk_len_bytes: 64,
    groups: 1,
    ranks: &[4, 5, 6],
    receive_buffer_bytes: 1 << 20,
    shares: false,
};

fn mask(ranks: &[u32]) -> RankMask {
    ranks.iter().copied().map(Rank).collect()
}

/// A completion as a ring delivered it.
#[derive(Debug, Clone, Copy, PartialEq)]
enum Completion {
    /// An exclusion decision: its child, number (0 for a failure), first chunk and ranks.
    Missing(u16, u16, u64, RankMask),
    Answer(u16, u64, EntryStatus),
}

fn completions(world: &mut World) -> Vec<Completion> {
    let mut completions = Vec::new();
    let mut half = None;
    for (owner, entry) in core::mem::take(&mut world.answers) {
        let child = (owner.0 - 100) as u16;
        match entry {
            CompletionEntry::Missing { decision, second: false, seq, ranks } => {
                assert_eq!(half.replace((child, decision, seq, ranks)), None, "halves are consecutive");
            }
            CompletionEntry::Missing { decision, second: true, seq, ranks } => {
                let (of, number, from, first) = half.take().expect("the first half");
                assert_eq!((of, number, from), (child, decision, seq));
                completions.push(Completion::Missing(child, decision, seq.0, RankMask::from_halves([first, ranks])));
            }
            CompletionEntry::Answer { status, seq, .. } => completions.push(Completion::Answer(child, seq.0, status)),
            other => panic!("{other:?}"),
        }
    }
    assert_eq!(half, None);
    completions
}

fn announce(world: &mut World, child: u16, first: u64, limit: StragglerLimit) {
    let entry = OperationLimit { group: group_id(0), epoch: EPOCH, seq: ChunkNo(first), chunks: LONG, limit };
    world.rig.node.announce(owner(child), &entry);
}

/// Let `child` contribute to `seq` of the operation that begins at `first`, zero-copy or inline.
fn contribute(
    world: &mut World,
    child: u16,
    (first, seq): (u64, u64),
    limit: StragglerLimit,
) -> Result<(), EntryStatus> {
    if world.keys[usize::from(child)].is_some() {
        announce(world, child, first, limit);
        let entry = world.entry(child, seq);
        return world.submit(child, &entry);
    }
    let mut repr = world.rig.up(Kind::Data, child, seq);
    repr.set_limit(limit, (seq - first) as u32);
    world.rig.put(child_addr(child), repr, &floats(&values(child, seq)));
    world.poll();
    Ok(())
}

fn wait(world: &mut World) {
    world.rig.pass_ms(LIMIT_MS);
    world.poll();
}

fn bits(values: &[f32]) -> Vec<u32> {
    values.iter().map(|value| value.to_bits()).collect()
}

/// Return which children got an exclusion decision (true) or an `Excluded` Nak (false) in packets.
fn exclusion_packets(sent: &[Sent]) -> Vec<(u16, bool)> {
    let notified = sent.iter().filter(|sent| sent.repr.kind == Kind::Cut || sent.is_nak(NakReason::Excluded));
    notified.map(|sent| (sent.repr.child.0, sent.repr.kind == Kind::Cut)).collect()
}

/// Excludes each of three children in turn, zero-copy and inline, with engines that combine and engines that only copy.
#[test]
fn root_excludes_missing_ranks_and_continues() {
    let engines = [World::full(), Capabilities::new(Profile::CopyOnly, 64, 64)];
    let orders = [Order::Arrival, Order::TreeFold, Order::TreePairwise];
    let cases = orders.into_iter().flat_map(|order| engines.map(|engine| (order, engine)));
    let cases = cases.flat_map(|case| [0b111, 0b101, 0b010, 0b011].map(|attached| (case, attached)));
    for (((order, engine), attached), late) in cases.flat_map(|case| (0..3).map(move |late| (case, late))) {
        let mut world = World::new(Setup { order, ..THREE }, attached, engine);
        let others: Vec<u16> = (0..3).filter(|&child| child != late).collect();
        let zero_copy: Vec<u16> = others.iter().copied().filter(|&child| has(attached, child)).collect();
        let name = std::format!("{order:?}, {attached:#b} without {late}");
        for &child in &others {
            contribute(&mut world, child, (0, 0), CUTS).expect("in time");
        }
        world.rig.pass_ms(LIMIT_MS - 1);
        world.poll();
        assert!(world.engine.in_flight.is_empty() && completions(&mut world).is_empty(), "{name}: too early");
        world.rig.pass_ms(1);
        world.poll();
        let gone = mask(&[4 + u32::from(late)]);
        let notified = (0..3).filter(|&child| has(attached, child));
        let notified: Vec<_> = notified.map(|child| Completion::Missing(child, 1, 0, gone)).collect();
        world.run_all();
        let mut received = completions(&mut world);
        assert_eq!(received.drain(..notified.len()).collect::<Vec<_>>(), notified, "{name}: decisions first");
        let results: Vec<_> =
            zero_copy.iter().map(|&child| Completion::Answer(child, 0, EntryStatus::Result)).collect();
        assert_eq!(received, results, "{name}");
        for seq in 1..20 {
            world.rig.all_have(seq);
            for &child in &others {
                assert_eq!(contribute(&mut world, child, (seq / LONG * LONG, seq), CUTS), Ok(()), "{name}: {seq}");
            }
            world.run_all();
            world.rig.drain();
        }
        assert_eq!(completions(&mut world).len(), 19 * zero_copy.len(), "{name}");
        for (&child, seq) in zero_copy.iter().flat_map(|child| (0..20).map(move |seq| (child, seq))) {
            let expected = match order {
                Order::Arrival => continue,
                _ => expression_without(order, &[0, 1, 2], seq, 1 << late).expect("a child with data"),
            };
            assert_eq!(bits(&world.memory(child, seq)), bits(&expected), "{name}: {seq}");
        }
        // The excluded child learns of it, and its memory is not touched.
        world.rig.all_have(0);
        let notified = contribute(&mut world, late, (0, 0), CUTS);
        let excluded = exclusion_packets(&world.rig.drain()).contains(&(late, false));
        assert!(if has(attached, late) { notified == Err(EntryStatus::Excluded) } else { excluded }, "{name}");
        if has(attached, late) {
            assert!((0..20).all(|seq| bits(&world.memory(late, seq)) == bits(&values(late, seq))), "{name}");
        }
    }
}

#[test]
fn average_divides_by_the_remaining_ranks() {
    for engine in [World::full(), Capabilities::new(Profile::CopyOnly, 64, 64)] {
        let mut world = World::new(THREE, 0b111, engine);
        for child in [0, 2] {
            announce(&mut world, child, 0, CUTS);
            let entry = Contribution { op: Some(ReduceOp::Avg), ..world.entry(child, 0) };
            assert_eq!(world.submit(child, &entry), Ok(()));
        }
        wait(&mut world);
        world.run_all();
        let sum = expression(Order::TreeFold, &[0, 2], 0);
        let average: Vec<f32> = sum.iter().map(|sum| sum / (RANKS.get() - 1) as f32).collect();
        assert_eq!(bits(&world.memory(0, 0)), bits(&average));
    }
}

/// A rank whose first chunk is missing or waits for its window has arrived: a later chunk of it may already be in a
/// result.
#[test]
fn child_with_any_contribution_is_not_excluded() {
    let mut world = World::new(THREE, 0b111, World::full());
    [0, 1].into_iter().for_each(|child| contribute(&mut world, child, (0, 0), CUTS).expect("in time"));
    contribute(&mut world, 2, (0, 1), CUTS).expect("in time");
    (0..20).for_each(|_| wait(&mut world));
    assert_eq!((completions(&mut world), world.rig.node.counters().cuts), (Vec::new(), 0));
    (0..3).for_each(|child| contribute(&mut world, child, (0, u64::from(child < 2)), CUTS).expect("late, but present"));
    world.run_all();
    assert_eq!(completions(&mut world).len(), 6);
    // The second operation: once its first chunk has a result, its members are decided.
    (0..3).for_each(|child| contribute(&mut world, child, (2, 2), CUTS).expect("in time"));
    world.run_all();
    (0..2).for_each(|child| contribute(&mut world, child, (2, 3), CUTS).expect("in time"));
    (0..20).for_each(|_| wait(&mut world));
    assert_eq!(world.rig.node.counters().cuts, 0);
    // An operation without an announced limit waits, whatever the one before announced.
    contribute(&mut world, 2, (2, 3), CUTS).expect("late, but present");
    world.run_all();
    world.contribute(0, 4);
    (0..20).for_each(|_| wait(&mut world));
    assert_eq!(world.rig.node.counters().cuts, 0);
}

#[test]
fn limit_without_cuts_fails_present_and_late_children() {
    let mut world = World::new(THREE, 0b101, World::full());
    (0..2).for_each(|child| contribute(&mut world, child, (0, 0), FAILS).expect("in time"));
    wait(&mut world);
    let fails =
        |child| [Completion::Missing(child, 0, 0, mask(&[6])), Completion::Answer(child, 0, EntryStatus::Stragglers)];
    assert_eq!(completions(&mut world), fails(0));
    assert!(world.rig.drain().iter().any(|sent| sent.is_nak(NakReason::Stragglers) && sent.to == child_addr(1)));
    assert_eq!(contribute(&mut world, 2, (0, 0), FAILS), Ok(()));
    assert_eq!(completions(&mut world), fails(2));
    assert!(world.engine.in_flight.is_empty());
}

#[test]
fn operation_rooted_at_an_excluded_rank_fails_before_any_chain() {
    let mut world = World::new(THREE, 0b111, World::full());
    [0, 2].into_iter().for_each(|child| contribute(&mut world, child, (0, 0), CUTS).expect("in time"));
    wait(&mut world);
    world.run_all();
    completions(&mut world);
    let reduce = OpDesc::reduce(OP.dtype.expect("a number"), ReduceOp::Sum, Rank(5), OP.count);
    for child in [0, 2] {
        let entry = world.entry(child, 1);
        let entry = Contribution { collective: reduce.collective, root: reduce.root, dst: None, ..entry };
        assert_eq!(world.submit(child, &entry), Ok(()));
    }
    let fails =
        |child| [Completion::Missing(child, 0, 1, mask(&[5])), Completion::Answer(child, 1, EntryStatus::Stragglers)];
    assert_eq!(completions(&mut world), [fails(0), fails(2)].concat());
    assert!(world.engine.in_flight.is_empty());
}

/// Return a leaf that has reported rank 5 missing, with 4 and 6 present, and the token that its parent echoes.
fn holding_leaf(attached: u16) -> (World, u32) {
    let mut world = World::new(Setup { has_parent: true, ..THREE }, attached, World::full());
    world.rig.pass_ms(0);
    let hello = world.rig.drain();
    let ack = world.rig.down(Kind::Late, 0, hello[0].repr.token);
    world.rig.put(PARENT, ack, &[]);
    [0, 2].into_iter().for_each(|child| contribute(&mut world, child, (0, 0), CUTS).expect("in time"));
    wait(&mut world);
    let sent = world.rig.drain();
    let [report] = &sent[..] else { panic!("{sent:?}") };
    assert_eq!((report.to, report.repr.kind, report.repr.limit()), (PARENT, Kind::Late, Some((CUTS, 0))));
    assert_eq!(RankMask::from_bytes(&report.payload), Some(mask(&[5])));
    (world, report.repr.token)
}

#[test]
fn leaf_holds_back_late_children_until_the_decision() {
    for attached in [0b111, 0b010, 0b011] {
        let (mut world, token) = holding_leaf(attached);
        // As if the window were closed: the entry stays in its ring.
        assert_eq!(contribute(&mut world, 1, (0, 0), CUTS), Err(EntryStatus::Window));
        assert!(world.rig.drain().is_empty() && completions(&mut world).is_empty());
        let cut = Repr { view: 1, ..world.rig.down(Kind::Cut, 0, token) };
        world.rig.put(PARENT, cut, &mask(&[5, 100]).to_bytes());
        world.poll();
        assert_eq!(contribute(&mut world, 1, (0, 0), CUTS), Err(EntryStatus::Excluded));
        world.run_all();
        let sent = world.rig.drain();
        let up = sent.iter().find(|sent| sent.repr.kind == Kind::Data).expect("the partial result goes up");
        assert_eq!(bits(&up.floats()), bits(&expression(Order::TreeFold, &[0, 2], 0)));
        let zero_copy = (0..3).filter(|&child| has(attached, child));
        let notified: Vec<_> = zero_copy.map(|child| Completion::Missing(child, 1, 0, mask(&[5, 100]))).collect();
        assert_eq!(completions(&mut world), notified);
        assert_eq!(exclusion_packets(&sent).len(), 3 - notified.len(), "inline children get packets");
        let result = Repr { view: 1, ..world.rig.down(Kind::Result, 0, up.repr.token) };
        world.rig.put(PARENT, result, &floats(&[2.5; ELEMENTS]));
        world.poll();
        world.run_all();
        assert!(
            completions(&mut world)
                .iter()
                .all(|completions| matches!(completions, Completion::Answer(0 | 2, 0, EntryStatus::Result)))
        );
        assert_eq!(bits(&world.memory(1, 0)), bits(&values(1, 0)));
        // The next operation has no announced limit: it goes up without one.
        [0, 2].into_iter().for_each(|child| world.contribute(child, LONG));
        world.run_all();
        let sent = world.rig.drain();
        let up = sent.iter().find(|sent| sent.repr.kind == Kind::Data).expect("up");
        assert_eq!((up.repr.seq, up.repr.limit()), (ChunkNo(LONG), None));
    }
}

#[test]
fn held_back_child_is_answered_when_the_group_fails() {
    // The root fails the operation.
    let (mut world, token) = holding_leaf(0b111);
    assert_eq!(contribute(&mut world, 1, (0, 0), CUTS), Err(EntryStatus::Window));
    let nak = Repr { reason: Some(NakReason::Stragglers), ..world.rig.down(Kind::Nak, 0, token) };
    world.rig.put(PARENT, nak, &mask(&[5, 6]).to_bytes());
    world.poll();
    assert_eq!(contribute(&mut world, 1, (0, 0), CUTS), Ok(()));
    let ends = [0, 2, 1].map(|child| {
        [Completion::Missing(child, 0, 0, mask(&[5, 6])), Completion::Answer(child, 0, EntryStatus::Stragglers)]
    });
    assert_eq!(completions(&mut world), ends.concat());
    // The parent stays silent.
    let (mut world, _) = holding_leaf(0b111);
    (0..51).for_each(|_| world.rig.pass_ms(100));
    world.poll();
    assert_eq!(completions(&mut world), [0, 2].map(|child| Completion::Answer(child, 0, EntryStatus::PathLost)));
    assert_eq!(contribute(&mut world, 1, (0, 0), CUTS), Ok(()));
    assert_eq!(completions(&mut world), [Completion::Answer(1, 0, EntryStatus::PathLost)]);
}

/// What was written before the decision stays; nothing is written after it. Memory is released once no chain touches
/// it.
#[test]
fn excluded_childs_memory_is_released_after_its_last_chain() {
    for answered in [true, false] {
        let mut world = World::new(Setup { has_parent: true, ..THREE }, 0b111, World::full());
        (0..3).for_each(|child| contribute(&mut world, child, (0, 0), CUTS).expect("in time"));
        world.run_all();
        let up = world.rig.drain().into_iter().find(|sent| sent.repr.kind == Kind::Data).expect("up");
        let token = up.repr.token;
        let result = world.rig.down(Kind::Result, 0, token);
        if answered {
            world.rig.put(PARENT, result, &floats(&[2.5; ELEMENTS]));
            world.poll();
            assert_eq!(world.engine.in_flight.len(), 1, "the writes");
        }
        // The next operation excludes rank 5.
        [0, 2].into_iter().for_each(|child| contribute(&mut world, child, (2, 2), CUTS).expect("in time"));
        let mut query = Repr { flags: sumac_hal::wire::Flags::WANT, ..world.rig.down(Kind::Late, 2, token) };
        query.set_op(&OP);
        query.set_limit(CUTS, 0);
        world.rig.put(PARENT, query, &[]);
        let cut = Repr { view: 1, ..world.rig.down(Kind::Cut, 2, token) };
        world.rig.put(PARENT, cut, &mask(&[5]).to_bytes());
        world.poll();
        let key = world.keys[1].expect("a zero-copy child");
        let notified = completions(&mut world);
        let decisions = [0, 1, 2].map(|child| Completion::Missing(child, 1, 2, mask(&[5])));
        assert!(notified.starts_with(&decisions), "{notified:?}");
        if answered {
            assert_eq!(notified.len(), 3, "the engine is still writing");
            world.run_all();
            assert!(completions(&mut world).contains(&Completion::Answer(1, 0, EntryStatus::Result)));
        } else {
            assert_eq!(notified[3..], [Completion::Answer(1, 0, EntryStatus::Excluded)]);
            assert_eq!(world.regions.deregister(owner(1), key), Ok(true), "no region is held");
            world.rig.put(PARENT, result, &floats(&[2.5; ELEMENTS]));
            world.poll();
            world.run_all();
            assert!(
                completions(&mut world)
                    .iter()
                    .all(|completions| matches!(completions, Completion::Answer(0 | 2, 0, EntryStatus::Result)))
            );
            let bytes = &world.engine.memory[&key][..ELEMENTS * 4];
            assert_eq!(bytes, floats(&values(1, 0)), "nothing is written to it");
        }
    }
}

//! Ranks that come late, or never, by reference: who waits, who is told what, and whose memory is touched.

use super::*;
use crate::node::tests::{PARENT, RANKS, Sent, child_addr};
use sumac_hal::ids::Rank;
use sumac_hal::mmio::OperationLimit;
use sumac_hal::op::{OpDesc, ReduceOp};
use sumac_hal::wire::{Kind, Limit, NakReason, RankMask, Repr};

const LIMIT_MS: u64 = 10;
const CUTS: Limit = Limit { us: LIMIT_MS as u32 * 1000, cuts: true };
const FAILS: Limit = Limit { cuts: false, ..CUTS };
/// Chunks of each operation.
const LONG: u64 = 2;

const THREE: Setup = Setup {
    children: 3,
    window: 4,
    slots: 8,
    order: Order::TreeFold,
    has_parent: false,
    shard: sumac_hal::shard::Shard::WHOLE,
    chunk_len_bytes: 64,
    groups: 1,
    ranks: &[4, 5, 6],
    receive_buffer_bytes: 1 << 20,
    shares: false,
};

fn mask(ranks: &[u32]) -> RankMask {
    ranks.iter().copied().map(Rank).collect()
}

/// What a ring said.
#[derive(Debug, Clone, Copy, PartialEq)]
enum Said {
    /// The decision of a number, for an operation that begins at a seq; 0 for none.
    Missing(u16, u16, u64, RankMask),
    Answer(u16, u64, EntryStatus),
}

fn said(world: &mut World) -> Vec<Said> {
    let mut said = Vec::new();
    let mut half = None;
    for (owner, entry) in core::mem::take(&mut world.answers) {
        let child = (owner.0 - 100) as u16;
        match entry {
            CompletionEntry::Missing { decision, second: false, seq, ranks } => {
                assert_eq!(half.replace((child, decision, seq, ranks)), None, "halves come together");
            }
            CompletionEntry::Missing { decision, second: true, seq, ranks } => {
                let (of, number, from, first) = half.take().expect("the first half");
                assert_eq!((of, number, from), (child, decision, seq));
                said.push(Said::Missing(child, decision, seq.0, RankMask::from_halves([first, ranks])));
            }
            CompletionEntry::Answer { status, seq, .. } => said.push(Said::Answer(child, seq.0, status)),
            other => panic!("{other:?}"),
        }
    }
    assert_eq!(half, None);
    said
}

fn announce(world: &mut World, child: u16, first: u64, limit: Limit) {
    let entry = OperationLimit { group: group_id(0), epoch: EPOCH, seq: ChunkNo(first), chunks: LONG, limit };
    world.rig.node.announce(owner(child), &entry);
}

/// Let `child` contribute to `seq` of the operation that begins at `first`, its way.
fn give(world: &mut World, child: u16, (first, seq): (u64, u64), limit: Limit) -> Result<(), EntryStatus> {
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

/// What packets told children of decisions, and of being left out.
fn cuts(sent: &[Sent]) -> Vec<(u16, bool)> {
    let told = sent.iter().filter(|sent| sent.repr.kind == Kind::Cut || sent.is_nak(NakReason::Excluded));
    told.map(|sent| (sent.repr.child.0, sent.repr.kind == Kind::Cut)).collect()
}

/// Every one of three, by reference or inline, beside others of either kind; engines that combine, and that copy.
#[test]
fn the_root_goes_on_without_who_is_missing() {
    let engines = [World::full(), Capabilities::new(Profile::CopyOnly, 64, 64)];
    let orders = [Order::Arrival, Order::TreeFold, Order::TreePairwise];
    let cases = orders.into_iter().flat_map(|order| engines.map(|engine| (order, engine)));
    let cases = cases.flat_map(|case| [0b111, 0b101, 0b010, 0b011].map(|references| (case, references)));
    for (((order, engine), references), late) in cases.flat_map(|case| (0..3).map(move |late| (case, late))) {
        let mut world = World::new(Setup { order, ..THREE }, references, engine);
        let others: Vec<u16> = (0..3).filter(|&child| child != late).collect();
        let by_reference: Vec<u16> = others.iter().copied().filter(|&child| has(references, child)).collect();
        let name = std::format!("{order:?}, {references:#b} without {late}");
        for &child in &others {
            give(&mut world, child, (0, 0), CUTS).expect("in time");
        }
        world.rig.pass_ms(LIMIT_MS - 1);
        world.poll();
        assert!(world.engine.in_flight.is_empty() && said(&mut world).is_empty(), "{name}: too early");
        world.rig.pass_ms(1);
        world.poll();
        let gone = mask(&[4 + u32::from(late)]);
        let told = (0..3).filter(|&child| has(references, child));
        let told: Vec<_> = told.map(|child| Said::Missing(child, 1, 0, gone)).collect();
        world.run_all();
        let mut heard = said(&mut world);
        assert_eq!(heard.drain(..told.len()).collect::<Vec<_>>(), told, "{name}: first who is missing");
        let results: Vec<_> = by_reference.iter().map(|&child| Said::Answer(child, 0, EntryStatus::Result)).collect();
        assert_eq!(heard, results, "{name}");
        for seq in 1..20 {
            world.rig.all_have(seq);
            for &child in &others {
                assert_eq!(give(&mut world, child, (seq / LONG * LONG, seq), CUTS), Ok(()), "{name}: {seq}");
            }
            world.run_all();
            world.rig.drain();
        }
        assert_eq!(said(&mut world).len(), 19 * by_reference.len(), "{name}");
        for (&child, seq) in by_reference.iter().flat_map(|child| (0..20).map(move |seq| (child, seq))) {
            let expected = match order {
                Order::Arrival => continue,
                _ => expression_without(order, &[0, 1, 2], seq, 1 << late).expect("somebody"),
            };
            assert_eq!(bits(&world.memory(child, seq)), bits(&expected), "{name}: {seq}");
        }
        // It is told so, and nothing of it is touched.
        world.rig.all_have(0);
        let told = give(&mut world, late, (0, 0), CUTS);
        let excluded = cuts(&world.rig.drain()).contains(&(late, false));
        assert!(if has(references, late) { told == Err(EntryStatus::Excluded) } else { excluded }, "{name}");
        if has(references, late) {
            assert!((0..20).all(|seq| bits(&world.memory(late, seq)) == bits(&values(late, seq))), "{name}");
        }
    }
}

#[test]
fn averages_are_over_who_is_left() {
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

/// A rank whose first chunk waits for its window, or for nothing, is there: its later one may be in a result already.
#[test]
fn nobody_is_left_out_who_has_come_or_in_the_middle() {
    let mut world = World::new(THREE, 0b111, World::full());
    [0, 1].into_iter().for_each(|child| give(&mut world, child, (0, 0), CUTS).expect("in time"));
    give(&mut world, 2, (0, 1), CUTS).expect("in time");
    (0..20).for_each(|_| wait(&mut world));
    assert_eq!((said(&mut world), world.rig.node.counters().cuts), (Vec::new(), 0));
    (0..3).for_each(|child| give(&mut world, child, (0, u64::from(child < 2)), CUTS).expect("late, but there"));
    world.run_all();
    assert_eq!(said(&mut world).len(), 6);
    // The second operation: once its first chunk has a result, everybody has a part in it.
    (0..3).for_each(|child| give(&mut world, child, (2, 2), CUTS).expect("in time"));
    world.run_all();
    (0..2).for_each(|child| give(&mut world, child, (2, 3), CUTS).expect("in time"));
    (0..20).for_each(|_| wait(&mut world));
    assert_eq!(world.rig.node.counters().cuts, 0);
    // An operation that has announced nothing waits, whatever the one before has said.
    give(&mut world, 2, (2, 3), CUTS).expect("late, but there");
    world.run_all();
    world.contribute(0, 4);
    (0..20).for_each(|_| wait(&mut world));
    assert_eq!(world.rig.node.counters().cuts, 0);
}

#[test]
fn without_leave_to_go_on_it_fails_by_name_for_who_is_there_and_who_comes() {
    let mut world = World::new(THREE, 0b101, World::full());
    (0..2).for_each(|child| give(&mut world, child, (0, 0), FAILS).expect("in time"));
    wait(&mut world);
    let fails = |child| [Said::Missing(child, 0, 0, mask(&[6])), Said::Answer(child, 0, EntryStatus::Stragglers)];
    assert_eq!(said(&mut world), fails(0));
    assert!(world.rig.drain().iter().any(|sent| sent.is_nak(NakReason::Stragglers) && sent.to == child_addr(1)));
    assert_eq!(give(&mut world, 2, (0, 0), FAILS), Ok(()));
    assert_eq!(said(&mut world), fails(2));
    assert!(world.engine.in_flight.is_empty());
}

#[test]
fn an_operation_that_needs_who_has_left_fails_before_anything_is_fetched() {
    let mut world = World::new(THREE, 0b111, World::full());
    [0, 2].into_iter().for_each(|child| give(&mut world, child, (0, 0), CUTS).expect("in time"));
    wait(&mut world);
    world.run_all();
    said(&mut world);
    let reduce = OpDesc::reduce(OP.dtype.expect("a number"), ReduceOp::Sum, Rank(5), OP.count);
    for child in [0, 2] {
        let entry = world.entry(child, 1);
        let entry = Contribution { collective: reduce.collective, root: reduce.root, dst: None, ..entry };
        assert_eq!(world.submit(child, &entry), Ok(()));
    }
    let fails = |child| [Said::Missing(child, 0, 1, mask(&[5])), Said::Answer(child, 1, EntryStatus::Stragglers)];
    assert_eq!(said(&mut world), [fails(0), fails(2)].concat());
    assert!(world.engine.in_flight.is_empty());
}

/// A leaf that has reported that rank 5 is missing; 4 and 6 are there. With the token that its parent echoes.
fn holding(references: u16) -> (World, u32) {
    let mut world = World::new(Setup { has_parent: true, ..THREE }, references, World::full());
    world.rig.pass_ms(0);
    let hello = world.rig.drain();
    let noted = world.rig.down(Kind::Late, 0, hello[0].repr.token);
    world.rig.put(PARENT, noted, &[]);
    [0, 2].into_iter().for_each(|child| give(&mut world, child, (0, 0), CUTS).expect("in time"));
    wait(&mut world);
    let sent = world.rig.drain();
    let [report] = &sent[..] else { panic!("{sent:?}") };
    assert_eq!((report.to, report.repr.kind, report.repr.limit()), (PARENT, Kind::Late, Some((CUTS, 0))));
    assert_eq!(RankMask::from_bytes(&report.payload), Some(mask(&[5])));
    (world, report.repr.token)
}

#[test]
fn a_leaf_holds_back_until_the_root_has_decided() {
    for references in [0b111, 0b010, 0b011] {
        let (mut world, token) = holding(references);
        // As behind a window: it stays in its ring.
        assert_eq!(give(&mut world, 1, (0, 0), CUTS), Err(EntryStatus::Window));
        assert!(world.rig.drain().is_empty() && said(&mut world).is_empty());
        let cut = Repr { view: 1, ..world.rig.down(Kind::Cut, 0, token) };
        world.rig.put(PARENT, cut, &mask(&[5, 100]).to_bytes());
        world.poll();
        assert_eq!(give(&mut world, 1, (0, 0), CUTS), Err(EntryStatus::Excluded));
        world.run_all();
        let sent = world.rig.drain();
        let up = sent.iter().find(|sent| sent.repr.kind == Kind::Data).expect("what is left goes up");
        assert_eq!(bits(&up.floats()), bits(&expression(Order::TreeFold, &[0, 2], 0)));
        let by_reference = (0..3).filter(|&child| has(references, child));
        let told: Vec<_> = by_reference.map(|child| Said::Missing(child, 1, 0, mask(&[5, 100]))).collect();
        assert_eq!(said(&mut world), told);
        assert_eq!(cuts(&sent).len(), 3 - told.len(), "the others by packets");
        let result = Repr { view: 1, ..world.rig.down(Kind::Result, 0, up.repr.token) };
        world.rig.put(PARENT, result, &floats(&[2.5; ELEMENTS]));
        world.poll();
        world.run_all();
        assert!(said(&mut world).iter().all(|said| matches!(said, Said::Answer(0 | 2, 0, EntryStatus::Result))));
        assert_eq!(bits(&world.memory(1, 0)), bits(&values(1, 0)));
        // The next operation has announced nothing: it goes up without a limit.
        [0, 2].into_iter().for_each(|child| world.contribute(child, LONG));
        world.run_all();
        let sent = world.rig.drain();
        let up = sent.iter().find(|sent| sent.repr.kind == Kind::Data).expect("up");
        assert_eq!((up.repr.seq, up.repr.limit()), (ChunkNo(LONG), None));
    }
}

#[test]
fn who_is_held_back_goes_on_where_there_is_an_end() {
    // The root does not go on at all.
    let (mut world, token) = holding(0b111);
    assert_eq!(give(&mut world, 1, (0, 0), CUTS), Err(EntryStatus::Window));
    let nak = Repr { reason: Some(NakReason::Stragglers), ..world.rig.down(Kind::Nak, 0, token) };
    world.rig.put(PARENT, nak, &mask(&[5, 6]).to_bytes());
    world.poll();
    assert_eq!(give(&mut world, 1, (0, 0), CUTS), Ok(()));
    let ends = [0, 2, 1]
        .map(|child| [Said::Missing(child, 0, 0, mask(&[5, 6])), Said::Answer(child, 0, EntryStatus::Stragglers)]);
    assert_eq!(said(&mut world), ends.concat());
    // Nothing is heard of it.
    let (mut world, _) = holding(0b111);
    (0..51).for_each(|_| world.rig.pass_ms(100));
    world.poll();
    assert_eq!(said(&mut world), [0, 2].map(|child| Said::Answer(child, 0, EntryStatus::PathLost)));
    assert_eq!(give(&mut world, 1, (0, 0), CUTS), Ok(()));
    assert_eq!(said(&mut world), [Said::Answer(1, 0, EntryStatus::PathLost)]);
}

/// What was written before the decision has landed; what was not, is not written any more. Memory is let go of when no
/// chain touches it.
#[test]
fn memory_of_who_is_left_out_is_let_go_of_behind_the_last_chain() {
    for answered in [true, false] {
        let mut world = World::new(Setup { has_parent: true, ..THREE }, 0b111, World::full());
        (0..3).for_each(|child| give(&mut world, child, (0, 0), CUTS).expect("in time"));
        world.run_all();
        let up = world.rig.drain().into_iter().find(|sent| sent.repr.kind == Kind::Data).expect("up");
        let token = up.repr.token;
        let result = world.rig.down(Kind::Result, 0, token);
        if answered {
            world.rig.put(PARENT, result, &floats(&[2.5; ELEMENTS]));
            world.poll();
            assert_eq!(world.engine.in_flight.len(), 1, "the writes");
        }
        // The next operation is without rank 5.
        [0, 2].into_iter().for_each(|child| give(&mut world, child, (2, 2), CUTS).expect("in time"));
        let mut asked = Repr { flags: sumac_hal::wire::Flags::WANT, ..world.rig.down(Kind::Late, 2, token) };
        asked.set_op(&OP);
        asked.set_limit(CUTS, 0);
        world.rig.put(PARENT, asked, &[]);
        let cut = Repr { view: 1, ..world.rig.down(Kind::Cut, 2, token) };
        world.rig.put(PARENT, cut, &mask(&[5]).to_bytes());
        world.poll();
        let key = world.keys[1].expect("by reference");
        let told = said(&mut world);
        let decisions = [0, 1, 2].map(|child| Said::Missing(child, 1, 2, mask(&[5])));
        assert!(told.starts_with(&decisions), "{told:?}");
        if answered {
            assert_eq!(told.len(), 3, "the engine is at work");
            world.run_all();
            assert!(said(&mut world).contains(&Said::Answer(1, 0, EntryStatus::Result)));
        } else {
            assert_eq!(told[3..], [Said::Answer(1, 0, EntryStatus::Excluded)]);
            assert_eq!(world.regions.deregister(owner(1), key), Ok(true), "nothing holds it");
            world.rig.put(PARENT, result, &floats(&[2.5; ELEMENTS]));
            world.poll();
            world.run_all();
            assert!(said(&mut world).iter().all(|said| matches!(said, Said::Answer(0 | 2, 0, EntryStatus::Result))));
            let bytes = &world.engine.memory[&key][..ELEMENTS * 4];
            assert_eq!(bytes, floats(&values(1, 0)), "nothing is written to it");
        }
    }
}

//! One test per rule: addresses, shapes, ends of groups, engines that stay broken, and a leaf below an inline root.

use super::*;
use crate::node::tests::{LEASE_MS, PARENT, Sent, child_addr};
use sumac_hal::ctrl::{DropReason, Order, Request, Response};
use sumac_hal::dma::{Completion, Status, Step, Tag};
use sumac_hal::ids::Epoch;
use sumac_hal::op::{Collective, OpDesc};
use sumac_hal::wire::{Flags, Kind, NakReason, Repr};

const TWO: Setup = Setup {
    children: 2,
    window: 4,
    slots: 8,
    order: Order::TreeFold,
    has_parent: false,
    shard: sumac_hal::shard::Shard::WHOLE,
    parent_shards: 0,
    chunk_len_bytes: 64,
    groups: 1,
    ranks: &[],
    receive_buffer_bytes: 1 << 20,
    shares: false,
};

fn two_children() -> World {
    World::new(TWO, 0b11, World::full())
}

fn bits(values: &[f32]) -> Vec<u32> {
    values.iter().map(|value| value.to_bits()).collect()
}

#[test]
fn root_chunk_is_one_chain_that_publishes_before_it_writes() {
    let mut world = two_children();
    world.contribute(1, 0);
    assert_eq!(world.engine.in_flight, [], "pulled only when all children have contributed");
    world.contribute(0, 0);
    let [(tag, _, steps)] = &world.engine.in_flight[..] else { panic!("one chain") };
    assert_eq!((tag.seq, tag.slot), (0, 0));
    assert!(
        matches!(
            steps[..],
            [
                Step::Publish { words: [0, 0], .. },
                Step::Copy { .. },
                Step::Reduce { .. },
                Step::Store { .. },
                Step::Publish { words: [_, 0], .. },
                Step::Copy { .. },
                Step::Copy { .. }
            ]
        ),
        "{steps:?}"
    );
    assert_eq!(world.take_answers(), []);
    world.run_all();
    assert_eq!(world.take_answers(), [(0, 0, EntryStatus::Result), (1, 0, EntryStatus::Result)]);
    assert_eq!(bits(&world.memory(1, 0)), bits(&expression(Order::TreeFold, &[0, 1], 0)));
}

#[test]
fn invalid_entry_is_refused_at_once_without_side_effects() {
    let mut world = two_children();
    let good = world.entry(0, 0);
    let foreign = world.address(1, 0);
    let old = Address { region: RegionKey { generation: 7, ..foreign.region }, ..foreign };
    let beyond = world.address(0, CHUNKS);
    let last = Address { offset_bytes: u64::MAX - 3, ..beyond };
    let cases = [
        (Contribution { group: group_id(1), ..good }, EntryStatus::UnknownGroup),
        (Contribution { epoch: Epoch { term: 9, counter: 9 }, ..good }, EntryStatus::StaleEpoch),
        (Contribution { src: Some(foreign), ..good }, EntryStatus::BadRegion),
        (Contribution { dst: Some(foreign), ..good }, EntryStatus::BadRegion),
        (Contribution { dst: Some(old), ..good }, EntryStatus::BadRegion),
        (Contribution { src: Some(beyond), ..good }, EntryStatus::OutOfBounds),
        (Contribution { dst: Some(last), ..good }, EntryStatus::OutOfBounds),
        (Contribution { elements: 0, ..good }, EntryStatus::Malformed),
        (Contribution { elements: 17, ..good }, EntryStatus::Malformed),
        (Contribution { count: 17, elements: 17 * 16, ..good }, EntryStatus::Malformed),
        (Contribution { lag: 1, ..good }, EntryStatus::Malformed),
        (Contribution { seq: ChunkNo(4), lag: 4, ..good }, EntryStatus::Window),
        (Contribution { seq: ChunkNo(1), lag: 0, ..good }, EntryStatus::Malformed),
        (Contribution { seq: ChunkNo(3), lag: 3, count: 2, elements: 32, ..good }, EntryStatus::Window),
        (Contribution { dtype: None, ..good }, EntryStatus::Malformed),
    ];
    for (entry, status) in cases {
        assert_eq!(world.submit(0, &entry), Err(status), "{entry:?}");
    }
    let unknown = world.rig.node.submit(FunctionId(5), &good, &mut world.regions, world.rig.now);
    assert_eq!(unknown, Err(EntryStatus::UnknownGroup));
    assert_eq!((world.engine.in_flight.len(), world.rig.node.counters().contributions), (0, 0));
    assert_eq!(world.submit(0, &good), Ok(()));
    assert_eq!(world.submit(0, &good), Err(EntryStatus::Malformed), "twice");
    let key = good.src.expect("a zero-copy child").region;
    assert_eq!(world.regions.deregister(owner(0), key), Ok(false), "held by the valid entry");
    let next = world.entry(0, 1);
    assert_eq!(world.submit(0, &next), Err(EntryStatus::StaleRegion));
}

#[test]
fn misaligned_address_is_refused() {
    let mut world = World::new(TWO, 0b11, World::full().with_alignment(64));
    let entry = world.entry(0, 0);
    let odd = Contribution { dst: Some(world.address(0, 1)), ..entry };
    assert_eq!(world.submit(0, &odd), Err(EntryStatus::Misaligned));
    assert_eq!(world.submit(0, &entry), Ok(()));
}

#[test]
fn run_is_split_into_chunks_and_the_last_may_be_short() {
    let mut world = two_children();
    for child in 0..2 {
        let entry = Contribution { count: 3, elements: 40, ..world.entry(child, 0) };
        assert_eq!(world.submit(child, &entry), Ok(()));
    }
    world.run_all();
    assert_eq!(world.take_answers().len(), 6);
    // 40 elements are five of the other tests' chunks.
    for seq in 0..5 {
        assert_eq!(bits(&world.memory(0, seq)), bits(&expression(Order::TreeFold, &[0, 1], seq)));
    }
    assert_eq!(bits(&world.memory(0, 5)), bits(&values(0, 5)), "not one element more");
}

#[test]
fn packet_for_a_zero_copy_child_is_dropped() {
    let mut world = two_children();
    world.rig.data(0, 0, &values(0, 0));
    let repr = world.rig.up(Kind::Ref, 0, 0);
    world.rig.put(child_addr(0), repr, &[]);
    assert_eq!(world.rig.dropped(DropReason::BadSource), 2);
    assert_eq!(world.rig.node.counters().contributions, 0);
}

#[test]
fn persistent_engine_failure_fails_the_chunk_for_every_child() {
    let mut world = World::new(TWO, 0b01, World::full());
    world.contribute(1, 0);
    world.contribute(0, 0);
    let mut tags = Vec::new();
    while let Some((tag, ..)) = world.engine.in_flight.first() {
        tags.push(*tag);
        assert!(tags.len() < 100, "the chunk must be given up");
        world.complete(0, Some(1));
    }
    assert_eq!(tags.len(), 4);
    assert!(tags.windows(2).all(|pair| pair[0] < pair[1]), "each attempt has its own tag");
    assert_eq!(world.take_answers(), [(0, 0, EntryStatus::Unsupported)]);
    let naks: Vec<Sent> = world.rig.drain();
    assert!(matches!(&naks[..], [nak] if nak.is_nak(NakReason::Unsupported) && nak.to == child_addr(1)), "{naks:?}");
    assert_eq!(bits(&world.memory(0, 0)), bits(&values(0, 0)), "the input is intact");
    let late = world.entry(0, 1);
    assert_eq!(world.submit(0, &late), Ok(()));
    assert_eq!(world.take_answers(), [(0, 1, EntryStatus::Unsupported)], "later contributions get the same status");
}

#[test]
fn unwritable_child_does_not_delay_the_others() {
    let mut world = two_children();
    world.contribute(1, 0);
    world.contribute(0, 0);
    // Everything is published; every write to child 0 fails.
    let published = world.engine.in_flight[0].2.len() - 2;
    world.complete(0, Some(published));
    let bad = world.address(0, 0);
    while let Some((_, _, steps)) = world.engine.in_flight.first() {
        assert_eq!(steps.len(), 1, "no pull, and one write at a time: {steps:?}");
        let fails = (steps[0].dst() == bad).then_some(0);
        world.complete(0, fails);
    }
    assert_eq!(world.take_answers(), [(0, 0, EntryStatus::Hardware), (1, 0, EntryStatus::Result)]);
    assert_eq!(bits(&world.memory(1, 0)), bits(&expression(Order::TreeFold, &[0, 1], 0)));
}

#[test]
fn node_reduces_over_256_zero_copy_and_inline_children() {
    let most = sumac_hal::wire::MAX_CHILDREN as u16;
    let all: Vec<u16> = (0..most).collect();
    for order in [Order::TreeFold, Order::TreePairwise] {
        let mut world = World::new(Setup { children: most, order, ..TWO }, u16::MAX, World::full());
        all.iter().for_each(|&child| world.contribute(child, 0));
        world.run_all();
        assert_eq!(world.take_answers().len(), 16, "all zero-copy children");
        assert_eq!(bits(&world.memory(0, 0)), bits(&expression(order, &all, 0)), "{order:?}");
        assert_eq!(world.rig.drain().len(), usize::from(most) - 16, "all inline children");
    }
}

#[test]
fn failed_chain_starts_a_new_attempt_without_inline_resends() {
    let mut world = World::new(Setup { has_parent: true, ..TWO }, 0b10, World::full());
    world.contribute(0, 0);
    world.contribute(1, 0);
    world.complete(0, Some(1));
    world.run_all();
    let sent = world.rig.drain();
    let [up] = &sent[..] else { panic!("no Nak, one contribution: {sent:?}") };
    assert_eq!((up.repr.kind, up.repr.attempt), (Kind::Data, 1));
    assert_eq!(bits(&up.floats()), bits(&expression(Order::TreeFold, &[0, 1], 0)));
}

#[test]
fn zero_copy_leaf_delivers_the_result_of_an_inline_root() {
    for fails in [None, Some(0), Some(1), Some(2)] {
        let mut world = World::new(Setup { children: 3, has_parent: true, ..TWO }, 0b101, World::full());
        (0..3).rev().for_each(|child| world.contribute(child, 0));
        world.run_all();
        let sent = world.rig.drain();
        let [up] = &sent[..] else { panic!("one contribution: {sent:?}") };
        assert_eq!((up.to, up.repr.kind), (PARENT, Kind::Data));
        assert!(up.repr.flags.contains(Flags::PARTIAL | Flags::WANT));
        assert_eq!(bits(&up.floats()), bits(&expression(Order::TreeFold, &[0, 1, 2], 0)));
        assert_eq!(bits(&world.memory(0, 0)), bits(&values(0, 0)), "nothing is written before the root has answered");
        let result = [2.5; ELEMENTS];
        let down = Repr { seq: ChunkNo(0), ..world.rig.down(Kind::Result, 0, up.repr.token) };
        world.rig.put(PARENT, down, &floats(&result));
        world.poll();
        assert!(world.rig.drain().iter().all(|sent| sent.to == child_addr(1) && sent.floats() == result));
        // The fake engine checks that the result is published before it is written.
        world.complete(0, fails);
        world.run_all();
        let mut answers = world.take_answers();
        answers.sort_unstable_by_key(|answer| answer.0);
        assert_eq!(answers, [(0, 0, EntryStatus::Result), (2, 0, EntryStatus::Result)]);
        assert_eq!([world.memory(0, 0), world.memory(2, 0)], [result.to_vec(), result.to_vec()]);
    }
}

#[test]
fn mismatch_is_reported_to_both_children() {
    let mut world = two_children();
    world.contribute(0, 0);
    let other = Contribution { signature: 77, ..world.entry(1, 0) };
    assert_eq!(world.submit(1, &other), Ok(()));
    world.run_all();
    let mut answers = world.take_answers();
    answers.sort_unstable_by_key(|answer| answer.0);
    assert_eq!(answers, [(0, 0, EntryStatus::Mismatch), (1, 0, EntryStatus::Mismatch)]);
}

/// A ring entry counts like a packet, even if it is refused.
#[test]
fn submission_renews_the_lease_even_if_refused() {
    for is_taken in [true, false] {
        let mut world = two_children();
        world.rig.pass_ms(u64::from(LEASE_MS) - 1);
        if is_taken {
            world.contribute(0, 0);
        } else {
            let entry = Contribution { count: 0, ..world.entry(0, 0) };
            assert!(world.submit(0, &entry).is_err());
        }
        world.rig.pass_ms(u64::from(LEASE_MS) - 1);
        assert!(world.rig.node.has_group(group_id(0)));
        world.rig.pass_ms(1);
        assert!(!world.rig.node.has_group(group_id(0)));
    }
}

#[test]
fn ended_group_is_freed_after_its_last_chain() {
    for by_lease in [false, true] {
        let mut world = two_children();
        (0..2).rev().for_each(|child| world.contribute(child, 0));
        world.contribute(1, 1);
        if by_lease {
            world.rig.pass_ms(u64::from(LEASE_MS) + 1);
        } else {
            let released = world.rig.node.control(&Request::ReleaseGroup(group_id(0)), world.rig.now);
            assert_eq!(released, Response::Done);
        }
        assert!(!world.rig.node.has_group(group_id(0)));
        world.poll();
        assert_eq!(world.take_answers(), [(1, 1, EntryStatus::Fenced)], "chunk 0 is still in flight");
        assert_eq!(world.engine.aborts.len(), 1);
        let again =
            world.rig.node.control(&Request::CreateGroup(crate::node::tests::group_config(&TWO, 0)), world.rig.now);
        assert!(matches!(again, Response::Refused(_)), "its entries are still in use");
        assert_eq!(world.rig.node.poll_timeout(), None);
        world.complete(0, Some(3));
        assert_eq!(world.take_answers(), [(0, 0, EntryStatus::Fenced), (1, 0, EntryStatus::Fenced)]);
        assert_eq!(bits(&world.memory(1, 0)), bits(&values(1, 0)));
        let again =
            world.rig.node.control(&Request::CreateGroup(crate::node::tests::group_config(&TWO, 0)), world.rig.now);
        assert_eq!(again, Response::Done);
        assert_eq!(world.rig.node.attach(group_id(0), &[(ChildIndex(0), owner(0))]), Ok(()));
    }
}

#[test]
fn unknown_completion_is_counted_and_ignored() {
    let mut world = two_children();
    (0..2).for_each(|child| world.contribute(child, 0));
    let tag = world.engine.in_flight[0].0;
    for tag in [
        Tag { attempt: tag.attempt + 1, ..tag },
        Tag { seq: 8, ..tag },
        Tag { slot: 7, ..tag },
        Tag { slot: 70, ..tag },
    ] {
        world.rig.node.handle_completion(&Completion { tag, status: Status::Done, step: 1 });
    }
    world.poll();
    assert_eq!((world.rig.dropped(DropReason::Unexpected), world.take_answers()), (4, vec![]));
    world.run_all();
    assert_eq!(world.take_answers().len(), 2);
}

#[test]
fn broadcast_reaches_zero_copy_and_inline_children_from_either() {
    let op = OpDesc { collective: Collective::Broadcast, op: None, ..OP };
    for root in 0..3_u16 {
        for profile in Profile::ALL {
            let mut world = World::new(Setup { children: 3, ..TWO }, 0b011, Capabilities::new(profile, 64, 64));
            for child in 0..3_u16 {
                if child < 2 {
                    let entry = world.entry(child, 0);
                    let (src, dst) = (entry.src.filter(|_| child == root), entry.dst.filter(|_| child != root));
                    let entry = Contribution { collective: op.collective, op: None, src, dst, ..entry };
                    assert_eq!(world.submit(child, &entry), Ok(()));
                } else {
                    let (kind, payload) =
                        if child == root { (Kind::Data, floats(&values(2, 0))) } else { (Kind::Empty, vec![]) };
                    let mut repr = world.rig.up(kind, child, 0);
                    repr.set_op(&op);
                    repr.flags.set(Flags::WANT, child != root);
                    world.rig.put(child_addr(child), repr, &payload);
                    world.poll();
                }
            }
            world.run_all();
            let found = world.take_answers();
            assert!(
                found.len() == 2
                    && found.iter().all(|&(child, _, status)| (status == EntryStatus::Done) == (child == root))
            );
            let sent = world.rig.drain();
            let [sent] = &sent[..] else { panic!("one child is inline: {sent:?}") };
            assert!(root == 2 || sent.floats() == values(root, 0));
            assert!((0..2).all(|child| world.memory(child, 0) == values(root, 0)), "{root} {profile}");
        }
    }
}

#[test]
fn barrier_completes_without_memory() {
    let mut world = two_children();
    for child in 0..2 {
        let entry = world.entry(child, 0);
        let entry =
            Contribution { collective: Collective::Barrier, dtype: None, op: None, src: None, dst: None, ..entry };
        assert_eq!(world.submit(child, &entry), Ok(()));
    }
    assert_eq!(world.take_answers(), [(0, 0, EntryStatus::Done), (1, 0, EntryStatus::Done)]);
    assert_eq!(world.engine.in_flight, []);
}

#[test]
fn attach_is_refused_after_the_first_time() {
    use super::super::AttachError;
    let mut world = two_children();
    let one = [(ChildIndex(0), owner(0))];
    assert_eq!(world.rig.node.attach(group_id(0), &one), Err(AttachError::Started(group_id(0))));
    assert_eq!(world.rig.node.attach(group_id(1), &one), Err(AttachError::NoGroup(group_id(1))));
    let mut plain = Rig::new(TWO);
    assert_eq!(plain.node.attach(group_id(0), &one), Err(AttachError::NoZeroCopy));
}

#[test]
fn have_advances_with_answers_without_reports() {
    let mut world = two_children();
    // Ranks never report `have`: `lag` keeps growing as if nothing had been delivered.
    let ahead = |world: &World, child, seq| Contribution { lag: seq as u16, ..world.entry(child, seq) };
    for seq in 0..CHUNKS {
        for child in 0..2 {
            let entry = ahead(&world, child, seq);
            assert_eq!(world.submit(child, &entry), Ok(()), "seq {seq}");
        }
        let beyond = ahead(&world, 0, seq + 4);
        if seq + 4 < CHUNKS {
            assert_eq!(world.submit(0, &beyond), Err(EntryStatus::Window), "a chunk is still unanswered");
        }
        world.run_all();
        assert_eq!(world.take_answers().len(), 2);
    }
    assert_eq!(bits(&world.memory(1, CHUNKS - 1)), bits(&expression(Order::TreeFold, &[0, 1], CHUNKS - 1)));
}

#[test]
fn out_of_order_answer_does_not_advance_have() {
    let mut world = two_children();
    for seq in 0..4 {
        // Each chunk is one chain.
        [1, 0].into_iter().for_each(|child| world.contribute(child, seq));
    }
    // The chains of 1, 2 and 3 have completed, that of 0 has not.
    for _ in 1..4 {
        world.complete(1, None);
    }
    assert_eq!(world.take_answers().len(), 6);
    let entry = Contribution { lag: 4, ..world.entry(0, 4) };
    assert_eq!(world.submit(0, &entry), Err(EntryStatus::Window));
    world.complete(0, None);
    assert_eq!(world.submit(0, &entry), Ok(()));
}

#[test]
fn attach_refuses_chunks_the_engine_does_not_support() {
    let odd = World::full().with_alignment(128);
    let short = World::full().with_max_len(32);
    for capabilities in [odd, short] {
        let mut world = World::detached(TWO, capabilities);
        let error = world.rig.node.attach(group_id(0), &[(ChildIndex(0), owner(0))]).expect_err("refused");
        assert!(matches!(error, crate::AttachError::Chunk { chunk_len_bytes: 64, .. }), "{error}");
    }
}

#[test]
fn withdrawn_child_is_released_after_its_last_chain() {
    let mut world = two_children();
    [1, 0].into_iter().for_each(|child| world.contribute(child, 0));
    // Chunks 1 and 2 lack a contribution each.
    world.contribute(0, 1);
    world.contribute(1, 2);
    let (id, other) = (group_id(0), Epoch { counter: EPOCH.counter + 1, ..EPOCH });
    assert!(!world.rig.node.withdraw(id, other, owner(1)), "not the group's epoch");
    assert!(!world.rig.node.withdraw(id, EPOCH, FunctionId(5)), "not a function of the group");
    assert_eq!(world.rig.node.redo_slots(id).map(|(start, _, slots)| (start, slots)), Some((0, 8)));
    assert!(world.rig.node.withdraw(id, EPOCH, owner(1)));
    world.poll();
    assert_eq!(world.take_answers(), [(1, 2, EntryStatus::Fenced)]);
    assert!(world.rig.node.has_unanswered(id, owner(1)), "a chain in flight writes to it");
    let entry = world.entry(1, 3);
    assert_eq!(world.submit(1, &entry), Err(EntryStatus::Fenced));
    world.run_all();
    assert_eq!(world.take_answers(), [(0, 0, EntryStatus::Result), (1, 0, EntryStatus::Result)]);
    assert!(!world.rig.node.has_unanswered(id, owner(1)) && world.rig.node.has_unanswered(id, owner(0)));
    assert_eq!(bits(&world.memory(0, 0)), bits(&expression(Order::TreeFold, &[0, 1], 0)));
    let key = world.address(1, 0).region;
    assert_eq!(world.regions.deregister(owner(1), key), Ok(true), "no region of it is in use");
}

#[test]
fn child_withdrawn_after_its_pull_gets_no_result() {
    let ten = Setup { children: 10, ..TWO };
    // This many children need several chains.
    let mut world = World::new(ten, 0x3ff, Capabilities::new(Profile::Full, 9, 64));
    (0..10).for_each(|child| world.contribute(child, 0));
    assert_eq!(world.engine.in_flight.len(), 1);
    assert!(world.rig.node.withdraw(group_id(0), EPOCH, owner(0)));
    world.poll();
    assert_eq!(world.take_answers(), []);
    // Keep the next chain waiting for room, so that nothing is in flight.
    let depth = std::mem::replace(&mut world.engine.depth, 0);
    world.complete(0, None);
    assert_eq!(world.take_answers(), [(0, 0, EntryStatus::Fenced)]);
    let before = world.memory(0, 0);
    world.engine.depth = depth;
    world.poll();
    world.run_all();
    let results: Vec<_> = (1..10).map(|child| (child, 0, EntryStatus::Result)).collect();
    assert_eq!(world.take_answers(), results);
    let all: Vec<u16> = (0..10).collect();
    assert_eq!(
        bits(&world.memory(1, 0)),
        bits(&expression(Order::TreeFold, &all, 0)),
        "the pulled data is in the result"
    );
    assert_eq!(bits(&world.memory(0, 0)), bits(&before), "released memory is not written");
}

#[test]
fn groups_take_turns_at_a_full_engine() {
    let mut world = World::new(Setup { groups: 2, ..TWO }, 0b11, World::full());
    let owners = [0, 1].map(|child| (ChildIndex(child), owner(child)));
    assert_eq!(world.rig.node.attach(group_id(1), &owners), Ok(()));
    world.engine.depth = 1;
    for group in 0..2 {
        for (child, seq) in (0..4).flat_map(|seq| [(0, seq), (1, seq)]) {
            let place = Some(world.address(child, seq + 4 * group as u64));
            let entry = Contribution { group: group_id(group), src: place, dst: place, ..world.entry(child, seq) };
            assert_eq!(world.submit(child, &entry), Ok(()));
        }
    }
    let mut turns = Vec::new();
    while let Some((tag, ..)) = world.engine.in_flight.first() {
        turns.push(tag.slot / u32::from(TWO.slots));
        world.complete(0, None);
    }
    assert_eq!(turns.iter().filter(|&&group| group == 0).count(), 4);
    assert_eq!(turns.len(), 8);
    // The first group had the engine to itself at first.
    assert!(turns[1..7].chunks(2).all(|pair| pair[0] != pair[1]), "{turns:?}");
}

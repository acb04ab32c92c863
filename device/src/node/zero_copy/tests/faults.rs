//! What failed writes leave behind: records stay while a rank may need them, and `have` does not advance.

use super::*;
use crate::node::tests::PARENT;
use sumac_hal::ctrl::{Request, Response};
use sumac_hal::dma::Step;
use sumac_hal::wire::{Kind, Repr};

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

/// Read the record of the first redo slot.
fn record(world: &mut World) -> [u64; 2] {
    world.engine.record_of(Address { region: REDO, offset_bytes: 0 })
}

/// Return `have` of `child` as the node knows it.
fn have(world: &mut World, child: usize) -> u64 {
    world.rig.node.group_ctx(0).expect("a group").children[child].have.0
}

#[test]
fn record_of_a_parents_result_stays_during_torn_writes() {
    let mut world = World::new(Setup { has_parent: true, ..TWO }, 0b11, World::full());
    (0..2).for_each(|child| world.contribute(child, 0));
    world.run_all();
    let sent = world.rig.drain();
    let [up] = &sent[..] else { panic!("one contribution: {sent:?}") };
    let result = [2.5; ELEMENTS];
    let down = Repr { seq: ChunkNo(0), ..world.rig.down(Kind::Result, 0, up.repr.token) };
    world.rig.put(PARENT, down, &floats(&result));
    world.poll();
    // It fails before it has published, and is repeated.
    world.complete(0, Some(0));
    let [(_, _, steps)] = &world.engine.in_flight[..] else { panic!("one chain") };
    assert!(matches!(steps[0], Step::Publish { .. }), "{steps:?}");
    // It fails in the middle of its first write.
    world.complete(0, Some(1));
    assert_ne!([world.memory(0, 0), world.memory(1, 0)], [values(0, 0), values(1, 0)], "a torn write");
    let published = record(&mut world);
    assert_ne!(published, [0, 0], "a rank can recover the result if the device dies now");
    while let Some((_, _, steps)) = world.engine.in_flight.first() {
        assert!(matches!(steps[..], [Step::Copy { .. }]), "nothing is published twice: {steps:?}");
        world.complete(0, None);
        assert_eq!(record(&mut world), published);
    }
    let mut answers = world.take_answers();
    answers.sort_unstable_by_key(|answer| answer.0);
    assert_eq!(answers, [(0, 0, EntryStatus::Result), (1, 0, EntryStatus::Result)]);
    assert_eq!([world.memory(0, 0), world.memory(1, 0)], [result.to_vec(), result.to_vec()]);
}

#[test]
fn failed_write_keeps_have_and_the_record_until_the_group_ends() {
    let mut world = World::new(TWO, 0b11, World::full());
    let bad = world.address(0, 0);
    for seq in 0..4 {
        (0..2).for_each(|child| world.contribute(child, seq));
    }
    while let Some((_, _, steps)) = world.engine.in_flight.first() {
        let fails = steps.iter().position(|step| step.dst() == bad);
        world.complete(0, fails);
    }
    let answers = world.take_answers();
    assert!(answers.contains(&(0, 0, EntryStatus::Hardware)), "{answers:?}");
    assert_eq!(answers.iter().filter(|answer| answer.2 == EntryStatus::Result).count(), 7);
    assert_eq!([have(&mut world, 0), have(&mut world, 1)], [0, 4]);
    // The others continue until they need the child; the slots that it may need are not reused.
    let (published, ahead) = (record(&mut world), Contribution { lag: 4, ..world.entry(0, 4) });
    assert_eq!(world.submit(0, &ahead), Err(EntryStatus::Window));
    world.rig.have[1] = 4;
    (4..8).for_each(|seq| world.contribute(1, seq));
    let again = world.entry(1, 8);
    assert_eq!(world.submit(1, &again), Err(EntryStatus::Window));
    assert_eq!((record(&mut world), published[1]), (published, 0));
    assert_ne!(published[0], 0);
    // Nobody waits forever: the child withdraws, and the others see the end of the group.
    assert!(world.rig.node.withdraw(group_id(0), EPOCH, owner(0)));
    assert!(!world.rig.node.has_unanswered(group_id(0), owner(0)));
    let released = world.rig.node.control(&Request::ReleaseGroup(group_id(0)), world.rig.now);
    assert_eq!(released, Response::Done);
    world.poll();
    assert_eq!(world.take_answers(), [4, 5, 6, 7].map(|seq| (1, seq, EntryStatus::Fenced)));
}

/// Each attempt starts well: child 0 is fetched by a chain of its own.
#[test]
fn unreadable_input_fails_the_chunk_after_a_few_attempts() {
    let mut world = World::new(TWO, 0b11, Capabilities::new(Profile::CopyOnly, 64, 64));
    let bad = world.address(1, 0);
    (0..2).for_each(|child| world.contribute(child, 0));
    let mut chains = 0;
    while let Some((_, _, steps)) = world.engine.in_flight.first() {
        let fails = steps.iter().position(|step| step.src() == Some(bad));
        world.complete(0, fails);
        chains += 1;
        assert!(chains < 100, "it is retried forever");
    }
    let mut answers = world.take_answers();
    answers.sort_unstable_by_key(|answer| answer.0);
    assert_eq!(answers, [(0, 0, EntryStatus::Unsupported), (1, 0, EntryStatus::Unsupported)]);
    assert_eq!([world.memory(0, 0), world.memory(1, 0)], [values(0, 0), values(1, 0)], "inputs are intact");
}

#[test]
fn withdrawal_before_delivery_keeps_have() {
    let ten = Setup { children: 10, ..TWO };
    // This many children need several chains.
    let mut world = World::new(ten, 0x3ff, Capabilities::new(Profile::Full, 9, 64));
    for seq in 0..2 {
        (0..10).for_each(|child| world.contribute(child, seq));
    }
    assert_eq!(world.engine.in_flight.len(), 2);
    assert!(world.rig.node.withdraw(group_id(0), EPOCH, owner(0)));
    // Keep the next chain waiting for room, so that nothing of chunk 0 is in flight.
    let depth = std::mem::replace(&mut world.engine.depth, 1);
    world.complete(0, None);
    assert_eq!(world.take_answers(), [(0, 0, EntryStatus::Fenced)]);
    world.engine.depth = depth;
    world.poll();
    // The others get chunk 0 before the child's answer for chunk 1 triggers another look at it.
    while world.engine.in_flight.len() > 1 {
        world.complete(1, None);
    }
    let results: Vec<_> = (1..10).map(|child| (child, 0, EntryStatus::Result)).collect();
    assert_eq!(world.take_answers(), results);
    world.engine.depth = 0;
    world.complete(0, None);
    assert_eq!(world.take_answers(), [(0, 1, EntryStatus::Fenced)]);
    assert_eq!((have(&mut world, 0), have(&mut world, 1)), (0, 1));
    assert_ne!(record(&mut world), [0, 0]);
}

#[test]
fn withdrawal_after_delivery_advances_have() {
    let mut world = World::new(TWO, 0b11, World::full());
    (0..2).for_each(|child| world.contribute(child, 0));
    assert!(world.rig.node.withdraw(group_id(0), EPOCH, owner(1)));
    world.run_all();
    assert_eq!(world.take_answers(), [(0, 0, EntryStatus::Result), (1, 0, EntryStatus::Result)]);
    assert_eq!([have(&mut world, 0), have(&mut world, 1)], [1, 1]);
}

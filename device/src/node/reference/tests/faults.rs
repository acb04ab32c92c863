//! What stays when writes to ranks fail: records as long as somebody may need them, and `have` where it is.

use super::*;
use crate::node::tests::PARENT;
use sumac_hal::dma::Step;
use sumac_hal::wire::{Kind, Repr};

const TWO: Setup = Setup {
    children: 2,
    window: 4,
    slots: 8,
    order: Order::TreeFold,
    has_parent: false,
    shard: sumac_hal::shard::Shard::WHOLE,
    chunk_len_bytes: 64,
    groups: 1,
    receive_buffer_bytes: 1 << 20,
    shares: false,
};

/// What the record of the first redo slot says.
fn record(world: &mut World) -> [u64; 2] {
    world.engine.record_of(Address { region: REDO, offset_bytes: 0 })
}

#[test]
fn a_record_of_a_result_from_above_stays_while_destinations_are_half_written() {
    let mut world = World::new(Setup { has_parent: true, ..TWO }, 0b11, World::full());
    (0..2).for_each(|child| world.contribute(child, 0));
    world.run_all();
    let sent = world.rig.drain();
    let [up] = &sent[..] else { panic!("one contribution: {sent:?}") };
    let result = [2.5; ELEMENTS];
    let down = Repr { seq: ChunkNo(0), ..world.rig.down(Kind::Result, 0, up.repr.token) };
    world.rig.put(PARENT, down, &floats(&result));
    world.poll();
    // It ends before it has published: that is done again.
    world.complete(0, Some(0));
    let [(_, _, steps)] = &world.engine.in_flight[..] else { panic!("one chain") };
    assert!(matches!(steps[0], Step::Publish { .. }), "{steps:?}");
    // It ends in the middle of its first write.
    world.complete(0, Some(1));
    assert_ne!([world.memory(0, 0), world.memory(1, 0)], [values(0, 0), values(1, 0)], "somebody's input is torn");
    let published = record(&mut world);
    assert_ne!(published, [0, 0], "a rank finds the result if the device ends now");
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

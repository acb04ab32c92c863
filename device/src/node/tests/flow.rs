//! Operation without faults: one level, two levels, slot reuse, windows, orders, many children.

use super::*;
use std::collections::BTreeSet;

#[test]
fn root_sums_and_answers_each_child_once() {
    let mut rig = Rig::new(Setup { children: 3, ..Setup::default() });
    rig.data(2, 0, &[4.0, 40.0]);
    rig.data(0, 0, &[1.0, 10.0]);
    assert_eq!(rig.drain(), [], "nothing is sent before every child has contributed");
    rig.data(1, 0, &[2.0, 20.0]);
    let sent = rig.drain();
    assert_eq!(sent.len(), 3);
    for (child, sent) in (0..).zip(&sent) {
        assert_eq!((sent.to, sent.repr.kind), (child_addr(child), Kind::Result));
        assert_eq!(sent.repr.key, key(0, child));
        assert_eq!((sent.repr.seq, sent.repr.signature), (ChunkNo(0), OP.signature(Path::Tree, 1)));
        assert_eq!(sent.floats(), [7.0, 70.0]);
    }
    let counters = rig.node.counters();
    assert_eq!((counters.contributions, counters.completed, counters.answers), (3, 1, 3));
}

#[test]
fn empty_is_skipped_and_done_answers_children_without_want() {
    let mut rig = Rig::new(Setup { children: 3, ..Setup::default() });
    let repr = Repr { flags: Flags::empty(), ..rig.up(Kind::Empty, 0, 0) };
    rig.put(child_addr(0), repr, &[]);
    // -0 + nothing stays -0; an identity element +0 would show.
    rig.data(1, 0, &[-0.0]);
    let repr = rig.up(Kind::Empty, 2, 0);
    rig.put(child_addr(2), repr, &[]);
    let kinds: Vec<Kind> = rig.drain().iter().map(|sent| sent.repr.kind).collect();
    assert_eq!(kinds, [Kind::Done, Kind::Result, Kind::Result]);
    let mut rig = Rig::new(Setup { children: 1, ..Setup::default() });
    rig.data(0, 0, &[-0.0]);
    assert_eq!(rig.drain()[0].floats()[0].to_bits(), (-0.0_f32).to_bits());
}

#[test]
fn inner_node_sends_one_partial_up_and_forwards_the_answer() {
    let mut rig = Rig::new(Setup { has_parent: true, ..Setup::default() });
    rig.data(0, 0, &[1.0]);
    rig.data(1, 0, &[2.0]);
    let sent = rig.drain();
    let [up] = &sent[..] else { panic!("one contribution goes up: {sent:?}") };
    assert_eq!((up.to, up.repr.kind, up.repr.child, up.repr.key), (PARENT, Kind::Data, OWN_PLACE, PARENT_KEY));
    assert!(up.repr.flags.contains(Flags::PARTIAL | Flags::WANT));
    assert_eq!((up.repr.op_desc(), up.repr.mark, up.floats()), (Some(OP), ChunkNo(0), vec![3.0]));
    let result = Repr { mark: ChunkNo(0), ..rig.down(Kind::Result, 0, up.repr.token) };
    rig.put(PARENT, result, &floats(&[30.0]));
    let down = rig.drain();
    assert_eq!(down.iter().map(|sent| sent.to).collect::<Vec<_>>(), [child_addr(0), child_addr(1)]);
    assert!(down.iter().all(|sent| sent.repr.kind == Kind::Result && sent.floats() == [30.0]));
    // The next contribution carries the minimum `have` of all children, and the root's `stable` comes down.
    (rig.have[0], rig.have[1]) = (1, 0);
    rig.all(1);
    let up = rig.drain();
    assert_eq!(up[0].repr.mark, ChunkNo(0));
    rig.have[1] = 1;
    rig.all(2);
    assert_eq!(rig.drain()[0].repr.mark, ChunkNo(1));
    let result = Repr { mark: ChunkNo(1), window: 3, ..rig.down(Kind::Result, 1, up[0].repr.token) };
    rig.put(PARENT, result, &floats(&[31.0]));
    assert!(rig.drain().iter().all(|sent| sent.repr.mark == ChunkNo(1) && sent.repr.window == 3));
}

#[test]
fn partial_results_use_the_accumulator_type() {
    let mut rig = Rig::new(Setup { has_parent: true, ..Setup::default() });
    // bf16 bits of 1.0 and 2^-8: their sum is not a bf16, but is an f32.
    for (child, bits) in [(0, 0x3f80_u16), (1, 0x3b80)] {
        let repr = Repr { dtype: Some(Dtype::Bf16), ..rig.up(Kind::Data, child, 0) };
        rig.put(child_addr(child), repr, &bits.to_le_bytes());
    }
    let up = rig.drain();
    assert_eq!(up[0].floats(), [1.0 + 1.0 / 256.0]);
    let result = rig.down(Kind::Result, 0, up[0].repr.token);
    rig.put(PARENT, result, &0x3f80_u16.to_le_bytes());
    assert!(rig.drain().iter().all(|sent| sent.payload == 0x3f80_u16.to_le_bytes()), "results are rounded");
}

/// The reuse rule by itself: the window check is disabled, so that only `have` protects the slot.
#[test]
fn slot_is_reused_only_after_every_child_has_its_answer() {
    let mut rig = Rig::new(Setup { window: 1, slots: 2, ..Setup::default() });
    rig.node.storage.groups[0].as_mut().unwrap().window_local = 2;
    rig.all(0);
    rig.drain();
    rig.have[0] = 1;
    rig.data(0, 2, &[1.0]);
    assert_eq!(rig.dropped(DropReason::SlotBusy), 1, "child 1 has not reported that it has chunk 0");
    rig.nak(1, NakReason::Missing, 0);
    assert_eq!(rig.drain()[0].floats(), [1.0], "so it can still be resent");
    rig.have[1] = 1;
    rig.data(1, 2, &[2.0]);
    rig.data(0, 2, &[1.0]);
    assert!(rig.drain().iter().all(|sent| sent.repr.seq == ChunkNo(2) && sent.floats() == [3.0]));
    assert_eq!(rig.dropped(DropReason::SlotBusy), 1);
}

/// A busy port delays a copy until the child has the answer by another one, and reports it.
#[test]
fn queued_copy_is_dropped_once_every_child_has_the_answer() {
    let mut rig = Rig::new(Setup { window: 1, slots: 2, ..Setup::default() });
    rig.all(0);
    rig.drain();
    rig.nak(1, NakReason::Missing, 0);
    rig.have = [1, 1].into();
    rig.all(1);
    rig.have = [2, 2].into();
    rig.data(0, 2, &[1.0]);
    rig.data(1, 2, &[2.0]);
    assert_eq!(rig.dropped(DropReason::SlotBusy), 0);
    let sent = rig.drain();
    assert!(sent.iter().all(|sent| sent.repr.seq != ChunkNo(0)), "the copy of chunk 0 is outdated");
    assert!(sent.iter().any(|sent| sent.repr.seq == ChunkNo(2) && sent.floats() == [3.0]));
}

/// Chunks are identified by their full number, not its low bits: chunks that map to the same slot are kept apart.
#[test]
fn chunks_that_share_a_slot_are_kept_apart() {
    let mut rig = Rig::new(Setup { window: 2, slots: 4, ..Setup::default() });
    rig.node.storage.groups[0].as_mut().unwrap().window_local = 64;
    rig.data(0, 1, &[1.0]);
    for seq in [5, 9, 1 + 4 * 8] {
        rig.data(1, seq, &[2.0]);
        assert_eq!(rig.drain(), [], "chunk {seq} must not complete chunk 1");
    }
    assert_eq!(rig.dropped(DropReason::SlotBusy), 3);
    rig.data(1, 1, &[2.0]);
    assert_eq!(rig.drain()[0].floats(), [3.0]);
}

#[test]
fn window_grows_from_the_receive_buffer_to_its_limit() {
    // Room for four packets of 112 bytes from each of two children.
    let mut rig = Rig::new(Setup { window: 64, slots: 128, receive_buffer_bytes: 8 * 112, ..Setup::default() });
    let mut windows = Vec::new();
    for seq in 0..300 {
        rig.all_have(seq);
        rig.all(seq);
        windows.push(rig.drain()[0].repr.window);
    }
    assert_eq!(windows[0], 4);
    assert!(windows.windows(2).all(|pair| pair[0] <= pair[1] && pair[1] <= pair[0] + 1), "{windows:?}");
    assert!((20..=64).contains(&windows[299]), "additive: about sqrt(2 x 300): {}", windows[299]);
}

#[test]
fn node_sums_over_256_children() {
    for order in [Order::Arrival, Order::TreeFold, Order::TreePairwise] {
        let mut rig = Rig::new(Setup { children: 256, window: 2, slots: 4, order, ..Setup::default() });
        for seq in 0..6 {
            rig.all_have(seq);
            // From the last child to the first, each twice.
            for child in (0..256).rev() {
                rig.data(child, seq, &[f32::from(child)]);
                rig.data(child, seq, &[f32::from(child)]);
            }
            let sent = rig.drain();
            let to: BTreeSet<Addr> = sent.iter().map(|sent| sent.to).collect();
            assert_eq!((sent.len(), to.len()), (256, 256));
            assert!(sent.iter().all(|sent| sent.floats() == [255.0 * 128.0]));
        }
        assert_eq!(rig.dropped(DropReason::Duplicate), 6 * 256);
    }
}

#[test]
fn tree_orders_give_the_same_bits_for_any_arrival() {
    let values = [1e8_f32, 1.0, -1e8, 1.0];
    let expected = [(Order::TreeFold, 1.0), (Order::TreePairwise, 0.0)];
    for (order, expected) in expected {
        for arrival in [[0, 1, 2, 3], [3, 2, 1, 0], [2, 0, 3, 1], [1, 3, 0, 2]] {
            let mut rig = Rig::new(Setup { children: 4, order, ..Setup::default() });
            arrival.iter().for_each(|&child| rig.data(child, 0, &[values[usize::from(child)]]));
            assert_eq!(rig.drain()[0].floats(), [expected], "{order:?} {arrival:?}");
        }
    }
}

/// The root divides once, by the number of ranks in the group; an inner node sends the sum.
#[test]
fn average_is_divided_at_the_root_only() {
    let average = |has_parent| {
        let mut rig = Rig::new(Setup { has_parent, ..Setup::default() });
        for (child, value) in [(0, 5.0), (1, 9.0)] {
            let repr = Repr { op: Some(ReduceOp::Avg), ..rig.up(Kind::Data, child, 0) };
            rig.put(child_addr(child), repr, &floats(&[value]));
        }
        rig.drain()[0].floats()
    };
    assert_eq!(average(true), [14.0]);
    assert_eq!(average(false), [14.0 / RANKS.get() as f32]);
}

/// Elements of 16 bytes: half an element is invalid, and four fill a chunk of 64.
#[test]
fn value_index_pairs_are_counted_whole() {
    let mut rig = Rig::new(Setup::default());
    let pair = |value: f64, index: u64| [value.to_le_bytes(), index.to_le_bytes()].concat();
    let put = |rig: &mut Rig, child, payload: &[u8]| {
        let repr = Repr { dtype: Some(Dtype::F64), op: Some(ReduceOp::MinLoc), ..rig.up(Kind::Data, child, 0) };
        rig.put(child_addr(child), repr, payload);
    };
    put(&mut rig, 0, &[0; 24]);
    put(&mut rig, 0, &[0; 80]);
    assert_eq!(rig.dropped(DropReason::BadShape), 2);
    put(&mut rig, 0, &[pair(1.0, 8), pair(2.0, 8), pair(f64::NAN, 8), pair(-0.0, 8)].concat());
    put(&mut rig, 1, &[pair(1.0, 7), pair(3.0, 7), pair(-1.0, 7), pair(0.0, 7)].concat());
    let result = [pair(1.0, 7), pair(2.0, 8), pair(f64::NAN, 8), pair(-0.0, 8)].concat();
    assert!(rig.drain().iter().all(|sent| sent.payload == result));
}

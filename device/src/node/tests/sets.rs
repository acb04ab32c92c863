//! Who contributes and who receives: collectives as sets, elements that are only moved, and runs of Empty and Done.

use super::*;
use sumac_hal::ids::Rank;
use sumac_hal::op::Collective;

const BROADCAST: OpDesc = OpDesc::broadcast(Dtype::Bf16, Rank(1), 1000);

/// Let `child` contribute to `op` at `count` seqs from `seq` on: the payload if there is one, else nothing.
fn give(rig: &mut Rig, child: u16, (seq, count): (u64, u16), op: &OpDesc, wants: bool, payload: &[u8]) {
    let kind = if payload.is_empty() { Kind::Empty } else { Kind::Data };
    let mut repr = Repr { signature: op.signature(Path::Tree, 1), count, ..rig.up(kind, child, seq) };
    repr.set_op(op);
    repr.flags.set(Flags::WANT, wants);
    rig.put(child_addr(child), repr, payload);
}

fn kinds(sent: &[Sent]) -> Vec<(Addr, Kind, u64, u16)> {
    sent.iter().map(|sent| (sent.to, sent.repr.kind, sent.repr.seq.0, sent.repr.count)).collect()
}

/// A broadcast moves bytes as they are, signalling NaNs and all, and its root gets no copy back.
#[test]
fn what_is_moved_is_not_rounded() {
    // A signalling NaN, a negative one with payload, a subnormal, -0.
    let bytes: Vec<u8> = [0x7f81_u16, 0xffff, 0x0001, 0x8000].iter().flat_map(|bits| bits.to_le_bytes()).collect();
    for order in [Order::Arrival, Order::TreeFold, Order::TreePairwise] {
        let mut rig = Rig::new(Setup { children: 3, order, ..Setup::default() });
        give(&mut rig, 2, (0, 1), &BROADCAST, true, &[]);
        give(&mut rig, 1, (0, 1), &BROADCAST, false, &bytes);
        assert_eq!(rig.drain(), []);
        give(&mut rig, 0, (0, 1), &BROADCAST, true, &[]);
        let sent = rig.drain();
        let expected = [(0, Kind::Result), (1, Kind::Done), (2, Kind::Result)];
        assert_eq!(kinds(&sent), expected.map(|(child, kind)| (child_addr(child), kind, 0, 1)));
        assert!(sent[0].payload == bytes && sent[2].payload == bytes, "{sent:?}");
        assert_eq!(sent[0].repr.op_desc(), Some(BROADCAST), "the root is told too");
    }
}

/// In a whole chunk as many elements fit as of the operation's type, not of an accumulator.
#[test]
fn what_is_moved_has_no_partial_form() {
    let mut rig = Rig::new(Setup { has_parent: true, ..Setup::default() });
    let chunk = [0xa5; 64];
    give(&mut rig, 0, (0, 1), &BROADCAST, true, &[]);
    give(&mut rig, 1, (0, 1), &BROADCAST, false, &chunk);
    let up = rig.drain();
    assert_eq!((up[0].repr.kind, &up[0].payload[..]), (Kind::Data, &chunk[..]));
    let mut result = rig.down(Kind::Result, 0, up[0].repr.token);
    result.set_op(&BROADCAST);
    rig.put(PARENT, result, &chunk);
    assert_eq!(rig.drain()[0].payload, chunk);
}

#[test]
fn a_second_source_of_what_is_only_moved_is_refused() {
    let mut rig = Rig::new(Setup::default());
    give(&mut rig, 0, (0, 1), &BROADCAST, false, &[1, 2]);
    give(&mut rig, 1, (0, 1), &BROADCAST, false, &[3, 4]);
    assert_eq!((rig.dropped(DropReason::BadShape), rig.drain().len()), (1, 0));
    give(&mut rig, 1, (0, 1), &BROADCAST, true, &[]);
    assert_eq!(rig.drain()[1].payload, [1, 2]);
}

#[test]
fn a_reduction_answers_its_root_alone() {
    let mut rig = Rig::new(Setup { children: 3, ..Setup::default() });
    let op = OpDesc::reduce(Dtype::F32, ReduceOp::Sum, Rank(2), 1);
    (0..3).for_each(|child| give(&mut rig, child, (0, 1), &op, child == 2, &floats(&[1.0])));
    let sent = rig.drain();
    assert_eq!(sent.iter().map(|sent| sent.repr.kind).collect::<Vec<_>>(), [Kind::Done, Kind::Done, Kind::Result]);
    assert_eq!(sent[2].floats(), [3.0]);
}

/// Other roots are other operations, and both are told with their roots.
#[test]
fn ranks_that_name_other_roots_are_told() {
    let mut rig = Rig::new(Setup::default());
    let other = OpDesc { root: Rank(0), ..BROADCAST };
    give(&mut rig, 0, (0, 1), &BROADCAST, true, &[]);
    give(&mut rig, 1, (0, 1), &other, true, &[]);
    let told = rig.drain();
    assert!(told.len() == 2 && told.iter().all(|sent| sent.is_nak(NakReason::Mismatch)));
    let second = sumac_hal::wire::unpack_op(told[0].repr.bits2);
    assert_eq!((told[0].repr.op_desc(), second), (Some(BROADCAST), Some(other)));
}

/// One Empty for a run of chunks sets a bit in each, one Done answers them.
#[test]
fn runs_travel_as_one_packet() {
    let mut rig = Rig::new(Setup { has_parent: true, ..Setup::default() });
    let op = OpDesc::all_gather(Dtype::F32, 1000);
    give(&mut rig, 0, (0, 4), &op, true, &[]);
    give(&mut rig, 1, (0, 3), &op, true, &[]);
    give(&mut rig, 1, (3, 1), &op, true, &[1, 2, 3, 4]);
    let sent = rig.drain();
    assert_eq!(kinds(&sent), [(PARENT, Kind::Empty, 0, 3), (PARENT, Kind::Data, 3, 1)]);
    assert_eq!(rig.node.counters().contributions, 8);
    let own = sent[0].repr.token;
    let done = Repr { count: 4, ..rig.down(Kind::Done, 0, own) };
    rig.put(PARENT, done, &[]);
    assert_eq!(kinds(&rig.drain()), [(child_addr(0), Kind::Done, 0, 4), (child_addr(1), Kind::Done, 0, 4)]);
    assert_eq!(rig.node.counters().answers, 8);
}

/// Chunks that differ in what is wanted of them, or belong to another operation, are runs of their own.
#[test]
fn runs_are_of_chunks_alike() {
    let mut rig = Rig::new(Setup { children: 1, has_parent: true, ..Setup::default() });
    let (first, second) = (OpDesc::all_gather(Dtype::F32, 1000), OpDesc::barrier());
    give(&mut rig, 0, (0, 2), &first, true, &[]);
    give(&mut rig, 0, (2, 2), &first, false, &[]);
    give(&mut rig, 0, (4, 1), &second, false, &[]);
    let runs = rig.drain();
    assert_eq!(kinds(&runs), [(PARENT, Kind::Empty, 0, 2), (PARENT, Kind::Empty, 2, 2), (PARENT, Kind::Empty, 4, 1)]);
    assert!(runs[0].repr.flags.contains(Flags::WANT) && !runs[1].repr.flags.contains(Flags::WANT));
}

#[test]
fn a_lost_run_is_asked_for_chunk_by_chunk() {
    let mut rig = Rig::new(Setup::default());
    let op = OpDesc::all_gather(Dtype::F32, 1000);
    give(&mut rig, 0, (2, 4), &op, true, &[]);
    let asked = rig.drain();
    assert_eq!(asked.iter().map(|sent| sent.repr.seq.0).collect::<Vec<_>>(), [0, 1]);
    assert!(asked.iter().all(|sent| sent.is_nak(NakReason::Missing)));
    // What was in the run is not taken twice.
    give(&mut rig, 0, (0, 6), &op, true, &[]);
    assert_eq!((rig.dropped(DropReason::Duplicate), rig.node.counters().contributions), (4, 6));
}

/// A run ends where the shard's does, is not of nothing, and only of Empty or Done.
#[test]
fn runs_that_no_peer_sends_are_dropped() {
    let mut rig = Rig::new(Setup { has_parent: true, window: 64, slots: 128, ..Setup::default() });
    let op = OpDesc::all_gather(Dtype::F32, 1000);
    for run in [(0, 0), (0, 17), (15, 2), (1, u16::MAX), (u64::MAX, 2)] {
        give(&mut rig, 0, run, &op, true, &[]);
        let done = Repr { count: run.1, ..rig.down(Kind::Done, run.0, 0) };
        rig.put(PARENT, done, &[]);
    }
    give(&mut rig, 0, (0, 2), &op, true, &[1, 2, 3, 4]);
    let result = Repr { count: 2, ..rig.down(Kind::Result, 0, 0) };
    rig.put(PARENT, result, &[0; 4]);
    assert_eq!((rig.dropped(DropReason::BadKind), rig.drain().len()), (12, 0));
    give(&mut rig, 0, (0, 16), &op, true, &[]);
    assert_eq!(rig.node.counters().contributions, 16);
}

/// What schedules alone can do, and operators where nothing combines, are refused by name.
#[test]
fn what_a_tree_can_not_do_is_refused() {
    let sum = Some(ReduceOp::Sum);
    let schedules = [Collective::Gather, Collective::Scatter, Collective::AllToAll, Collective::AllToAllV];
    let refused = schedules
        .map(|collective| OpDesc { collective, ..BROADCAST })
        .into_iter()
        .chain([OpDesc { op: sum, ..BROADCAST }, OpDesc { op: None, ..OP }, OpDesc { dtype: None, ..OP }])
        .chain([OpDesc { dtype: Some(Dtype::F32), ..OpDesc::barrier() }]);
    for op in refused {
        let mut rig = Rig::new(Setup::default());
        give(&mut rig, 0, (0, 1), &op, true, &[]);
        let told = rig.drain();
        assert!(told.len() == 1 && told[0].is_nak(NakReason::Unsupported), "{op}: {told:?}");
    }
}

/// What runs by a schedule is told by an Empty that wants nothing: any operation, compared like the others.
#[test]
fn what_runs_elsewhere_is_compared_and_not_refused() {
    let mut rig = Rig::new(Setup::default());
    let gather = OpDesc { collective: Collective::Gather, ..BROADCAST };
    give(&mut rig, 0, (0, 1), &gather, false, &[]);
    give(&mut rig, 1, (0, 1), &gather, false, &[]);
    assert_eq!(rig.drain().iter().map(|sent| sent.repr.kind).collect::<Vec<_>>(), [Kind::Done, Kind::Done]);
    give(&mut rig, 0, (1, 1), &gather, false, &[]);
    give(&mut rig, 1, (1, 1), &OpDesc { root: Rank(2), ..gather }, false, &[]);
    assert!(rig.drain().iter().all(|sent| sent.is_nak(NakReason::Mismatch)));
}

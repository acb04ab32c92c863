//! Collectives as sets of contributors and receivers, data that is only moved, and runs of Empty and Done.

use super::*;
use sumac_hal::ids::Rank;
use sumac_hal::op::Collective;

const BROADCAST: OpDesc = OpDesc::broadcast(Dtype::Bf16, Rank(1), 1000);

/// Let `child` contribute to `op` at `count` seqs from `seq` on: `payload`, or Empty if that is empty.
fn contribute(rig: &mut Rig, child: u16, (seq, count): (u64, u16), op: &OpDesc, wants: bool, payload: &[u8]) {
    let kind = if payload.is_empty() { Kind::Empty } else { Kind::Data };
    let mut repr = Repr { signature: op.signature(Path::Tree, 1), count, ..rig.up(kind, child, seq) };
    repr.set_op(op);
    repr.flags.set(Flags::WANT, wants);
    rig.put(child_addr(child), repr, payload);
}

fn kinds(sent: &[Sent]) -> Vec<(Addr, Kind, u64, u16)> {
    sent.iter().map(|sent| (sent.to, sent.repr.kind, sent.repr.seq.0, sent.repr.count)).collect()
}

/// A broadcast moves bytes unchanged, signalling NaNs included, and its root gets no copy back.
#[test]
fn broadcast_is_bit_exact() {
    // A signalling NaN, a negative one with payload, a subnormal, -0.
    let bytes: Vec<u8> = [0x7f81_u16, 0xffff, 0x0001, 0x8000].iter().flat_map(|bits| bits.to_le_bytes()).collect();
    for order in [Order::Arrival, Order::TreeFold, Order::TreePairwise] {
        let mut rig = Rig::new(Setup { children: 3, order, ..Setup::default() });
        contribute(&mut rig, 2, (0, 1), &BROADCAST, true, &[]);
        contribute(&mut rig, 1, (0, 1), &BROADCAST, false, &bytes);
        assert_eq!(rig.drain(), []);
        contribute(&mut rig, 0, (0, 1), &BROADCAST, true, &[]);
        let sent = rig.drain();
        let expected = [(0, Kind::Result), (1, Kind::Done), (2, Kind::Result)];
        assert_eq!(kinds(&sent), expected.map(|(child, kind)| (child_addr(child), kind, 0, 1)));
        assert!(sent[0].payload == bytes && sent[2].payload == bytes, "{sent:?}");
        assert_eq!(sent[1].repr.op_desc(), Some(BROADCAST), "the root gets the operation too");
    }
}

/// A full chunk holds as many elements as fit in the operation's type, not the accumulator's.
#[test]
fn broadcast_chunk_travels_up_unconverted() {
    let mut rig = Rig::new(Setup { has_parent: true, ..Setup::default() });
    let chunk = [0xa5; 64];
    contribute(&mut rig, 0, (0, 1), &BROADCAST, true, &[]);
    contribute(&mut rig, 1, (0, 1), &BROADCAST, false, &chunk);
    let up = rig.drain();
    assert_eq!((up[0].repr.kind, up[0].repr.op_desc()), (Kind::Operation, Some(BROADCAST)));
    assert_eq!((up[1].repr.kind, &up[1].payload[..]), (Kind::Data, &chunk[..]));
    let result = rig.down(Kind::Result, 0, up[0].repr.token);
    rig.put(PARENT, Repr { signature: up[1].repr.signature, ..result }, &chunk);
    assert_eq!(rig.drain()[0].payload, chunk);
}

#[test]
fn second_broadcast_source_is_dropped() {
    let mut rig = Rig::new(Setup::default());
    contribute(&mut rig, 0, (0, 1), &BROADCAST, false, &[1, 2]);
    contribute(&mut rig, 1, (0, 1), &BROADCAST, false, &[3, 4]);
    assert_eq!((rig.dropped(DropReason::BadShape), rig.drain().len()), (1, 0));
    contribute(&mut rig, 1, (0, 1), &BROADCAST, true, &[]);
    assert_eq!(rig.drain()[1].payload, [1, 2]);
}

#[test]
fn reduce_sends_the_result_to_its_root_only() {
    let mut rig = Rig::new(Setup { children: 3, ..Setup::default() });
    let op = OpDesc::reduce(Dtype::F32, ReduceOp::Sum, Rank(2), 1);
    (0..3).for_each(|child| contribute(&mut rig, child, (0, 1), &op, child == 2, &floats(&[1.0])));
    let sent = rig.drain();
    assert_eq!(sent.iter().map(|sent| sent.repr.kind).collect::<Vec<_>>(), [Kind::Done, Kind::Done, Kind::Result]);
    assert_eq!(sent[2].floats(), [3.0]);
}

/// Calls with different roots are different operations; both are reported.
#[test]
fn different_roots_are_a_mismatch() {
    let mut rig = Rig::new(Setup::default());
    let other = OpDesc { root: Rank(0), ..BROADCAST };
    contribute(&mut rig, 0, (0, 1), &BROADCAST, true, &[]);
    contribute(&mut rig, 1, (0, 1), &other, true, &[]);
    let replies = rig.drain();
    assert!(replies.len() == 2 && replies.iter().all(|sent| sent.is_nak(NakReason::Mismatch)));
    let second = sumac_hal::wire::unpack_op(replies[0].repr.bits2);
    assert_eq!((replies[0].repr.op_desc(), second), (Some(BROADCAST), Some(other)));
}

/// One Empty contributes to a run of chunks; one Done answers them.
#[test]
fn runs_of_empty_and_done_are_one_packet() {
    let mut rig = Rig::new(Setup { has_parent: true, ..Setup::default() });
    let op = OpDesc::all_gather(Dtype::F32, 1000);
    contribute(&mut rig, 0, (0, 4), &op, true, &[]);
    contribute(&mut rig, 1, (0, 3), &op, true, &[]);
    contribute(&mut rig, 1, (3, 1), &op, true, &[1, 2, 3, 4]);
    let sent = rig.drain();
    assert_eq!(kinds(&sent), [(PARENT, Kind::Empty, 0, 3), (PARENT, Kind::Data, 3, 1)]);
    assert_eq!(rig.node.counters().contributions, 8);
    let own = sent[0].repr.token;
    let done = Repr { count: 4, signature: sent[0].repr.signature, ..rig.down(Kind::Done, 0, own) };
    rig.put(PARENT, done, &[]);
    assert_eq!(kinds(&rig.drain()), [(child_addr(0), Kind::Done, 0, 4), (child_addr(1), Kind::Done, 0, 4)]);
    assert_eq!(rig.node.counters().answers, 8);
}

/// Chunks that differ in `WANT` or in their operation are not in one run.
#[test]
fn run_ends_where_chunks_differ() {
    let mut rig = Rig::new(Setup { children: 1, has_parent: true, ..Setup::default() });
    let (first, second) = (OpDesc::all_gather(Dtype::F32, 1000), OpDesc::barrier());
    contribute(&mut rig, 0, (0, 2), &first, true, &[]);
    contribute(&mut rig, 0, (2, 2), &first, false, &[]);
    contribute(&mut rig, 0, (4, 1), &second, false, &[]);
    let runs = rig.drain();
    assert_eq!(kinds(&runs), [(PARENT, Kind::Empty, 0, 2), (PARENT, Kind::Empty, 2, 2), (PARENT, Kind::Empty, 4, 1)]);
    assert!(runs[0].repr.flags.contains(Flags::WANT) && !runs[1].repr.flags.contains(Flags::WANT));
}

#[test]
fn lost_run_is_requested_chunk_by_chunk() {
    let mut rig = Rig::new(Setup::default());
    let op = OpDesc::all_gather(Dtype::F32, 1000);
    contribute(&mut rig, 0, (2, 4), &op, true, &[]);
    let naks = rig.drain();
    assert_eq!(naks.iter().map(|sent| sent.repr.seq.0).collect::<Vec<_>>(), [0, 1]);
    assert!(naks.iter().all(|sent| sent.is_nak(NakReason::Missing)));
    // Chunks that were in the run are not taken twice.
    contribute(&mut rig, 0, (0, 6), &op, true, &[]);
    assert_eq!((rig.dropped(DropReason::Duplicate), rig.node.counters().contributions), (4, 6));
}

/// A run stays within the shard's run, is not empty, and consists of Empty or Done only.
#[test]
fn malformed_runs_are_dropped() {
    let mut rig = Rig::new(Setup { has_parent: true, window: 64, slots: 128, ..Setup::default() });
    let op = OpDesc::all_gather(Dtype::F32, 1000);
    for run in [(0, 0), (0, 17), (15, 2), (1, u16::MAX), (u64::MAX, 2)] {
        contribute(&mut rig, 0, run, &op, true, &[]);
        let done = Repr { count: run.1, ..rig.down(Kind::Done, run.0, 0) };
        rig.put(PARENT, done, &[]);
    }
    contribute(&mut rig, 0, (0, 2), &op, true, &[1, 2, 3, 4]);
    let result = Repr { count: 2, ..rig.down(Kind::Result, 0, 0) };
    rig.put(PARENT, result, &[0; 4]);
    assert_eq!((rig.dropped(DropReason::BadKind), rig.drain().len()), (12, 0));
    contribute(&mut rig, 0, (0, 16), &op, true, &[]);
    assert_eq!(rig.node.counters().contributions, 16);
}

/// Collectives that only host collectives support, and operators where nothing is combined, are refused as unsupported.
#[test]
fn operation_without_tree_support_is_refused() {
    let sum = Some(ReduceOp::Sum);
    let schedules = [Collective::Gather, Collective::Scatter, Collective::AllToAll, Collective::AllToAllV];
    let refused = schedules
        .map(|collective| OpDesc { collective, ..BROADCAST })
        .into_iter()
        .chain([OpDesc { op: sum, ..BROADCAST }, OpDesc { op: None, ..OP }, OpDesc { dtype: None, ..OP }])
        .chain([OpDesc { dtype: Some(Dtype::F32), ..OpDesc::barrier() }]);
    for op in refused {
        let mut rig = Rig::new(Setup::default());
        contribute(&mut rig, 0, (0, 1), &op, true, &[]);
        let replies = rig.drain();
        assert!(replies.len() == 1 && replies[0].is_nak(NakReason::Unsupported), "{op}: {replies:?}");
    }
}

/// A host collective is announced by an Empty that wants nothing; any operation is accepted and compared.
#[test]
fn host_collective_is_compared_and_not_refused() {
    let mut rig = Rig::new(Setup::default());
    let gather = OpDesc { collective: Collective::Gather, ..BROADCAST };
    contribute(&mut rig, 0, (0, 1), &gather, false, &[]);
    contribute(&mut rig, 1, (0, 1), &gather, false, &[]);
    assert_eq!(rig.drain().iter().map(|sent| sent.repr.kind).collect::<Vec<_>>(), [Kind::Done, Kind::Done]);
    contribute(&mut rig, 0, (1, 1), &gather, false, &[]);
    contribute(&mut rig, 1, (1, 1), &OpDesc { root: Rank(2), ..gather }, false, &[]);
    assert!(rig.drain().iter().all(|sent| sent.is_nak(NakReason::Mismatch)));
}

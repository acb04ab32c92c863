//! Contributing and receiving ranks: runs of Empty and Done, blocks and their owners.

use super::*;

/// In an all-gather, chunks owned by other ranks leave as one Empty a run, and come back as results.
#[test]
fn empties_leave_in_runs() {
    let mut rig = Rig::new(32, 1);
    let desc = OpDesc::all_gather(Dtype::F32, 20 * CHUNK);
    // Rank 1 of 4 owns chunks 5 to 9: 5 x 16 floats in, all of 20 x 16 out, here in one buffer.
    rig.memory.0.push(vec![0; 20 * 64]);
    rig.endpoint.post(desc, Path::Tree, None).unwrap();
    let sent = rig.drain();
    let runs: Vec<_> = sent.iter().map(|(_, repr, _)| (repr.kind, repr.seq.0, repr.count)).collect();
    let own = (5..10).map(|seq| (Kind::Data, seq, 1));
    let others = [(Kind::Empty, 10, 6), (Kind::Empty, 16, 4)];
    assert_eq!(runs, [(Kind::Empty, 0, 5)].into_iter().chain(own).chain(others).collect::<Vec<_>>());
    let wants = |repr: &Repr| repr.flags.contains(Flags::WANT);
    assert!(sent.iter().all(|(_, repr, _)| wants(repr) == (repr.kind == Kind::Empty)));
    // Requested again, each is sent separately.
    rig.nak(NakReason::Missing, 3, SALT);
    assert_eq!(rig.sent(), [(Kind::Empty, 3)]);
    // The Done of a run completes what it covers, once.
    rig.put(NODE, Repr { kind: Kind::Done, count: 5, ..Rig::result_header(5, desc, 0) }, &[]);
    rig.put(NODE, Repr { kind: Kind::Done, count: 5, ..Rig::result_header(5, desc, 0) }, &[]);
    assert_eq!((rig.endpoint.have(), rig.dropped()), (ChunkNo(0), 1));
    (0..5).for_each(|seq| rig.result(seq, desc, 16, seq as f32));
    assert_eq!(rig.endpoint.have(), ChunkNo(10));
    // Runs that no node sends.
    rig.put(NODE, Repr { kind: Kind::Done, count: 0, ..Rig::result_header(10, desc, 0) }, &[]);
    rig.put(NODE, Repr { kind: Kind::Done, count: 7, ..Rig::result_header(10, desc, 0) }, &[]);
    assert_eq!((rig.endpoint.have(), rig.dropped()), (ChunkNo(10), 3));
}

/// Each owner lands its part of a chunk that crosses blocks.
#[test]
fn reduce_scatter_lands_only_the_own_block() {
    let mut rig = Rig::new(8, 1);
    let desc = OpDesc::reduce_scatter(Dtype::F32, ReduceOp::Sum, 24);
    // Rank 1 of 4 owns elements 6 to 11; chunk 0 has elements 0 to 15.
    rig.memory.0.push(vec![0; 24 * 4]);
    rig.endpoint.post(desc, Path::Tree, None).unwrap();
    let wants: Vec<_> = rig.drain().iter().map(|(_, repr, _)| repr.flags.contains(Flags::WANT)).collect();
    assert_eq!(wants, [true, false]);
    let result: Vec<u8> = (0..16).flat_map(|i| (i as f32).to_le_bytes()).collect();
    rig.put(NODE, Rig::result_header(0, desc, 0), &result);
    rig.put(NODE, Repr { kind: Kind::Done, ..Rig::result_header(1, desc, 0) }, &[]);
    assert_eq!(rig.endpoint.poll_event(), Some(Event::Completed(OpId(0))));
    assert_eq!(rig.memory.0[0][..24], result[24..48]);
    assert!(rig.memory.0[0][24..].iter().all(|&byte| byte == 0), "nothing else is touched");
}

//! Descriptions of operations: in the first packet to a shard, or before it, and again when the node asks.

use super::*;

/// Return what it sends now: kind, sequence number, and whether the header is short.
fn forms(rig: &mut Rig) -> Vec<(Addr, Kind, u64, bool)> {
    let packets = rig.packets();
    packets.iter().map(|(to, repr, _)| (*to, repr.kind, repr.seq.0, repr.flags.contains(Flags::SHORT))).collect()
}

const OTHER_NODE: Addr = Addr::Emu(51);

#[test]
fn operation_is_described_to_each_shard_before_its_first_chunk() {
    let mut rig = Rig::new(64, 2);
    rig.post(18 * CHUNK, 1.0);
    let data = |to, range: std::ops::Range<u64>| range.map(move |seq| (to, Kind::Data, seq, true));
    let expected = [(NODE, Kind::Operation, 0, false)].into_iter().chain(data(NODE, 0..16));
    let expected = expected.chain([(OTHER_NODE, Kind::Operation, 16, false)]).chain(data(OTHER_NODE, 16..18));
    assert_eq!(forms(&mut rig), expected.collect::<Vec<_>>());
    // The next operation has another signature, even if it is the same call.
    rig.post(CHUNK, 1.0);
    assert_eq!(forms(&mut rig), [(OTHER_NODE, Kind::Operation, 18, false), (OTHER_NODE, Kind::Data, 18, true)]);
}

#[test]
fn description_says_what_the_chunks_leave_out() {
    let mut rig = Rig::new(8, 1);
    let desc = sum(2 * CHUNK);
    rig.post(2 * CHUNK, 1.0);
    let packets = rig.packets();
    let [(_, described, _), chunks @ ..] = &packets[..] else { panic!("a description first") };
    let signature = desc.tree_signature(Path::Tree, 1, ChunkNo(0));
    assert_eq!((described.op_desc(), described.signature, described.token), (Some(desc), signature, SALT));
    for (_, repr, _) in chunks {
        assert_eq!((repr.op_desc(), repr.signature, repr.token), (None, signature, SALT));
    }
}

#[test]
fn small_operation_describes_itself() {
    let mut rig = Rig::new(8, 1);
    // Six elements under a full header are as long as a chunk of sixteen under a short one.
    rig.post(6, 1.0);
    rig.post(7, 1.0);
    let own = [(NODE, Kind::Data, 0, false)];
    assert_eq!(forms(&mut rig), [own[0], (NODE, Kind::Data, 1, false)], "shorter than a Nak");
    rig.post(CHUNK, 1.0);
    rig.post(0, 1.0);
    let expected = [(Kind::Operation, 2, false), (Kind::Data, 2, true), (Kind::Empty, 3, false)];
    assert_eq!(forms(&mut rig), expected.map(|(kind, seq, short)| (NODE, kind, seq, short)));
}

#[test]
fn operation_is_described_again_when_the_node_does_not_know_it() {
    let mut rig = Rig::new(8, 1);
    rig.post(3 * CHUNK, 1.0);
    rig.packets();
    rig.nak(NakReason::UnknownOperation, 1, SALT ^ 1);
    assert_eq!(forms(&mut rig), [], "not our token");
    rig.nak(NakReason::UnknownOperation, 1, SALT);
    rig.nak(NakReason::UnknownOperation, 2, SALT);
    let expected = [(Kind::Operation, 1, false), (Kind::Data, 1, true), (Kind::Data, 2, true)];
    assert_eq!(forms(&mut rig), expected.map(|(kind, seq, short)| (NODE, kind, seq, short)));
    assert_eq!(rig.endpoint.stats().retransmits, 2, "a description is none");
    rig.nak(NakReason::Missing, 1, SALT);
    assert_eq!(forms(&mut rig), [(NODE, Kind::Data, 1, true)], "the node knows it");
}

//! Results that the node sends to all its children at once.

use super::*;

const SHARED_KEY: u64 = 0x5ead;

/// An endpoint that has joined the shared address, with `chunks` chunks posted.
fn shared_results(chunks: u64) -> (Rig, OpDesc) {
    let mut rig = Rig::with(EndpointConfig { shared_key: Some(SHARED_KEY), ..config(64, 1) });
    rig.post(chunks * CHUNK, 1.0);
    (rig, sum(chunks * CHUNK))
}

fn shared_header(seq: u64, desc: OpDesc) -> Repr {
    Repr { child: ChildIndex::ALL, key: SHARED_KEY, ..Rig::result_header(seq, desc, 0) }
}

#[test]
fn shared_result_lands_like_a_unicast_one() {
    let (mut rig, desc) = shared_results(2);
    assert!(rig.drain().iter().all(|(_, repr, _)| repr.flags.contains(Flags::SHARED)));
    let payload = 4.0_f32.to_le_bytes().repeat(16);
    rig.put(NODE, shared_header(0, desc), &payload);
    rig.put(NODE, shared_header(0, desc), &payload);
    assert_eq!((rig.endpoint.have(), rig.dropped()), (ChunkNo(1), 1), "and lands once");
    rig.result(1, desc, 16, 5.0);
    assert_eq!(rig.endpoint.poll_event(), Some(Event::Completed(OpId(0))));
    assert_eq!(rig.memory.0[0][..64], payload);
    assert_eq!(rig.endpoint.stats().shared_results, 1);
}

#[test]
fn foreign_shared_packets_are_dropped() {
    let (mut rig, desc) = shared_results(1);
    rig.drain();
    let payload = 4.0_f32.to_le_bytes().repeat(16);
    let good = shared_header(0, desc);
    rig.put(Addr::Emu(51), good, &payload);
    rig.put(NODE, Repr { key: KEY, ..good }, &payload);
    rig.put(NODE, Repr { child: ChildIndex(1), ..good }, &payload);
    rig.put(NODE, Repr { epoch: Epoch { term: 2, counter: 6 }, ..good }, &payload);
    rig.put(NODE, Repr { kind: Kind::Nak, reason: Some(NakReason::PathLost), ..good }, &[]);
    assert_eq!((rig.dropped(), rig.endpoint.have(), rig.endpoint.error()), (5, ChunkNo(0), None));
    // An endpoint that has not joined drops them too.
    let mut rig = Rig::new(64, 1);
    rig.post(CHUNK, 1.0);
    assert!(rig.drain().iter().all(|(_, repr, _)| !repr.flags.contains(Flags::SHARED)));
    rig.put(NODE, shared_header(0, sum(CHUNK)), &payload);
    assert_eq!((rig.dropped(), rig.endpoint.have()), (1, ChunkNo(0)));
}

#[test]
fn endpoint_stops_requesting_shared_results_that_never_arrive() {
    let (mut rig, desc) = shared_results(9);
    rig.drain();
    for seq in 0..9 {
        rig.result(seq, desc, 16, 2.0);
    }
    rig.post(CHUNK, 1.0);
    assert!(rig.drain().iter().all(|(_, repr, _)| repr.flags - Flags::SHORT == Flags::WANT));
    // A shared result that was queued behind those, too late to be of use, shows that joining was not in vain.
    rig.put(NODE, shared_header(0, desc), &2.0_f32.to_le_bytes().repeat(16));
    rig.post(CHUNK, 1.0);
    let sent = rig.drain();
    assert!(sent.len() == 1 && sent[0].1.flags - Flags::SHORT == Flags::WANT | Flags::SHARED, "{sent:?}");
    // One shared result is enough to keep requesting them.
    let (mut rig, desc) = shared_results(9);
    rig.drain();
    rig.put(NODE, shared_header(0, desc), &2.0_f32.to_le_bytes().repeat(16));
    (1..9).for_each(|seq| rig.result(seq, desc, 16, 2.0));
    rig.post(CHUNK, 1.0);
    assert!(rig.drain().iter().all(|(_, repr, _)| repr.flags - Flags::SHORT == Flags::WANT | Flags::SHARED));
}

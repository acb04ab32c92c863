//! Probes about paths: what a node answers to its children, and what it finds out about its own parent.

use super::*;
use sumac_hal::wire::{HEADER_LEN, SHORT_HEADER_LEN};

const CHUNK: u16 = 1424;
const LONGEST: usize = CHUNK as usize + SHORT_HEADER_LEN;

fn rig(has_parent: bool) -> Rig {
    Rig::new(Setup { chunk_len_bytes: CHUNK, has_parent, ..Setup::default() })
}

fn ask(rig: &mut Rig) -> Option<u32> {
    match rig.node.control(&Request::ProbePath(group_id(0)), rig.now) {
        Response::Path { max_packet_len_bytes } => max_packet_len_bytes,
        other => panic!("{other:?}"),
    }
}

/// Answer the probes that a path of `mtu` bytes carries, until the node knows. Returns what it has found.
fn search(rig: &mut Rig, mtu: usize) -> Option<u32> {
    assert_eq!(ask(rig), None, "it begins to search");
    for _ in 0..500 {
        rig.pass_ms(1);
        for sent in rig.drain() {
            assert_eq!((sent.to, sent.repr.kind, sent.repr.count), (PARENT, Kind::Probe, 0));
            assert!(sent.payload.iter().all(|byte| *byte == 0), "padding tells nothing");
            if sent.repr.packet_len() <= mtu {
                let status = Repr { count: 0, ..rig.down(Kind::Status, 0, sent.repr.token) };
                rig.put(PARENT, status, &sent.payload);
            }
        }
        if let Some(found) = ask(rig) {
            return Some(found);
        }
    }
    None
}

#[test]
fn probe_about_the_path_is_answered_by_a_packet_of_its_length() {
    let mut rig = rig(false);
    for len in [0, 1, 700, LONGEST - HEADER_LEN] {
        let probe = Repr { count: 0, token: 77, ..rig.up(Kind::Probe, 1, 0) };
        rig.put(child_addr(1), probe, &vec![0xaa; len]);
        let sent = rig.drain();
        assert_eq!(sent.len(), 1);
        let Sent { to, repr, payload } = &sent[0];
        assert_eq!((*to, repr.kind, repr.count, repr.token), (child_addr(1), Kind::Status, 0, 77));
        assert_eq!(*payload, vec![0; len], "not what another group has left there");
    }
}

#[test]
fn probe_about_the_path_needs_key_and_address_and_fits_a_chunk() {
    let mut rig = rig(false);
    rig.data(1, 0, &[1.0]);
    let probe = Repr { count: 0, ..rig.up(Kind::Probe, 1, 0) };
    rig.put(child_addr(1), Repr { key: 5, ..probe }, &[0; 100]);
    rig.put(child_addr(0), probe, &[0; 100]);
    rig.put(child_addr(1), probe, &vec![0; usize::from(CHUNK) + 1]);
    assert_eq!(rig.drain(), []);
    let dropped = [DropReason::BadKey, DropReason::BadSource, DropReason::BadShape].map(|reason| rig.dropped(reason));
    assert_eq!(dropped, [1; 3]);
}

#[test]
fn node_finds_the_longest_packet_that_reaches_its_parent() {
    assert_eq!(search(&mut rig(true), 1472), Some(1472));
    assert_eq!(search(&mut rig(true), 1300), Some(1296));
    assert_eq!(search(&mut rig(true), 0), None, "a silent parent");
    assert_eq!(ask(&mut rig(false)), Some(LONGEST as u32), "the root needs no path");
}

#[test]
fn node_probes_no_path_unless_asked() {
    let mut rig = rig(true);
    rig.pass_ms(1000);
    assert_eq!(rig.drain(), []);
}

#[test]
fn status_that_answers_no_probe_about_the_path_is_dropped() {
    let mut rig = rig(true);
    let status = Repr { count: 0, ..rig.down(Kind::Status, 0, 1) };
    rig.put(PARENT, status, &[0; 1000]);
    assert_eq!(ask(&mut rig), None);
    rig.pass_ms(1);
    let token = rig.drain()[1].repr.token;
    rig.put(PARENT, Repr { token: token.wrapping_add(1), ..status }, &[0; 1384]);
    rig.put(child_addr(0), Repr { token, ..status }, &[0; 1384]);
    assert_eq!((ask(&mut rig), rig.dropped(DropReason::Unexpected)), (None, 2));
    rig.put(PARENT, Repr { token, ..status }, &[0; 1384]);
    assert_eq!(ask(&mut rig), Some(1472));
}

#[test]
fn path_of_an_unknown_group_is_refused() {
    let refused = rig(true).node.control(&Request::ProbePath(GroupId(99)), Instant::ZERO);
    assert!(matches!(refused, Response::Refused(_)), "{refused:?}");
}

/// Let the node wait for its parent for `ms` milliseconds, over a path of `mtu` bytes. The parent has its contribution.
fn stall(rig: &mut Rig, mtu: usize, ms: u64) -> Vec<Sent> {
    let mut to_children = Vec::new();
    for _ in 0..ms {
        rig.pass_ms(1);
        for sent in rig.drain() {
            if sent.to != PARENT {
                to_children.push(sent);
            } else if sent.repr.kind == Kind::Probe && sent.repr.packet_len() <= mtu {
                let bits = if sent.repr.count > 0 { u64::MAX } else { 0 };
                let status = Repr { count: sent.repr.count, bits, ..rig.down(Kind::Status, 0, sent.repr.token) };
                rig.put(PARENT, status, &sent.payload);
            }
        }
    }
    to_children
}

#[test]
fn path_to_the_parent_that_becomes_narrow_fails_the_group() {
    let mut rig = rig(true);
    assert_eq!(search(&mut rig, 1472), Some(1472));
    rig.all(0);
    assert_eq!(stall(&mut rig, 1472, 3000), [], "it is as wide as before");
    let sent = stall(&mut rig, 1300, 3000);
    assert!(sent.len() == 2 && sent.iter().all(|sent| sent.is_nak(NakReason::PathLost)), "{sent:?}");
}

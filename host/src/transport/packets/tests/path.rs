//! A path that becomes too narrow for the group's packets.

use super::*;
use sumac_hal::wire::{HEADER_LEN, SHORT_HEADER_LEN};

const FAR: Addr = Addr::Udp(std::net::SocketAddr::new(std::net::IpAddr::V4(std::net::Ipv4Addr::new(10, 0, 0, 1)), 9));
const LONGEST: usize = 1424 + SHORT_HEADER_LEN;

fn rig(parent: Addr) -> Rig {
    Rig::with(EndpointConfig { parents: vec![parent], chunk_len_bytes: 1424, ..config(8, 1) })
}

/// Run for `ms` milliseconds: the leaf answers probes, but gets no packet longer than `carries`, and no contribution is
/// ever complete. Returns how many probes of paths there were.
fn stall(rig: &mut Rig, carries: usize, ms: u64) -> usize {
    stall_shards(rig, |_| carries, ms)
}

/// The same, with paths of different widths to the shards of the leaf.
fn stall_shards(rig: &mut Rig, carries: impl Fn(Addr) -> usize, ms: u64) -> usize {
    let mut of_paths = 0;
    for _ in 0..ms {
        rig.now = rig.now + Duration::from_millis(1);
        rig.endpoint.handle_timeout(rig.now);
        for (to, repr, payload) in rig.drain() {
            if repr.kind != Kind::Probe {
                continue;
            }
            assert!(payload.iter().all(|byte| *byte == 0), "padding tells nothing");
            of_paths += usize::from(repr.count == 0);
            if repr.packet_len() <= carries(to) {
                let bits = if repr.count > 0 { u64::MAX } else { 0 };
                let status = Repr { count: repr.count, token: repr.token, bits, ..Rig::down(Kind::Status, repr.seq.0) };
                rig.put(to, status, &payload);
            }
        }
    }
    of_paths
}

#[test]
fn hop_that_stalls_over_a_narrow_path_fails_the_group() {
    let mut rig = rig(FAR);
    rig.post(400, 1.0);
    stall(&mut rig, LONGEST - 100, 2000);
    assert_eq!(rig.endpoint.error(), Some(EndpointError::PathLost));
    assert!(rig.endpoint.is_path_narrow());
}

#[test]
fn path_to_each_shard_of_the_leaf_is_probed() {
    let addr = |shard: u16| Addr::Udp((std::net::Ipv4Addr::new(10, 0, 0, 1), 9 + shard).into());
    for narrow in 0..2 {
        let parents = vec![addr(0), addr(1)];
        let mut rig = Rig::with(EndpointConfig { parents, chunk_len_bytes: 1424, ..config(32, 1) });
        rig.post(400 * 16, 1.0);
        stall_shards(&mut rig, |to| if to == addr(narrow) { LONGEST - 100 } else { LONGEST }, 2000);
        assert!(rig.endpoint.is_path_narrow(), "shard {narrow}");
    }
}

#[test]
fn shortest_chunk_needs_room_for_a_full_header() {
    for (carries, is_narrow) in [(112, true), (127, true), (128, false)] {
        let mut rig = Rig::with(EndpointConfig { parents: vec![FAR], chunk_len_bytes: 64, ..config(8, 1) });
        rig.post(9, 1.0);
        stall(&mut rig, carries, 2000);
        assert_eq!(rig.endpoint.is_path_narrow(), is_narrow, "{carries} bytes");
    }
}

#[test]
fn hop_that_stalls_for_another_reason_probes_its_path_once_a_second() {
    let mut rig = rig(FAR);
    rig.post(400, 1.0);
    let probes = stall(&mut rig, LONGEST, 10_000);
    assert_eq!((rig.endpoint.error(), rig.endpoint.is_path_narrow()), (None, false));
    assert!((10..=24).contains(&probes), "{probes} probes, two a search");
    assert!(rig.endpoint.poll_timeout().is_some());
}

#[test]
fn silent_leaf_is_dead_but_its_path_is_not_narrow() {
    let mut rig = rig(FAR);
    rig.post(400, 1.0);
    stall(&mut rig, 0, 6000);
    assert_eq!(rig.endpoint.error(), Some(EndpointError::PathLost));
    assert!(!rig.endpoint.is_path_narrow());
}

#[test]
fn path_within_the_host_is_not_probed() {
    let here = Addr::Udp((std::net::Ipv4Addr::LOCALHOST, 9).into());
    for parent in [here, NODE] {
        let mut rig = rig(parent);
        rig.post(400, 1.0);
        assert_eq!(stall(&mut rig, HEADER_LEN, 3000), 0);
        assert_eq!(rig.endpoint.error(), None);
    }
}

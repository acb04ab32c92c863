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
            if repr.packet_len() <= carries {
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

//! Transports over RDMA: memberships on matching devices, and refusals on others.

use super::*;
use sumac_hal::port::VerbsAddr;

fn over_verbs(controller: &Controller, name: &str, attach_point: Option<AttachPoint>) -> Device {
    let at = Addr::Verbs(VerbsAddr { gid: [7; 16], lid: 0, qpn: 17 });
    let announce = Announce { data_addrs: [at].into_iter().collect(), ..announce(name, 1, attach_point) };
    Device::serve(controller, announce, |_| Reply::Done)
}

#[test]
fn verbs_ranks_get_the_devices_verbs_address() {
    let controller = controller();
    let device = over_verbs(&controller, "leaf0", attach_point(1 << 20));
    // Zero-copy is available but was not requested.
    let ranks = join(&controller, "job", &[(Transport::Verbs, Some(HERE)), (Transport::Verbs, None)]);
    for tree in ranks.iter().map(tree) {
        assert!(matches!(tree.parents[..], [Addr::Verbs(VerbsAddr { qpn: 17, .. })]), "{:?}", tree.parents);
        assert_eq!((tree.shared, &tree.attach, tree.facts.over_verbs), (None, &None, true));
    }
    assert_eq!(device.group().shared, None, "a queue pair reaches one child at a time");
}

#[test]
fn zero_copy_works_with_a_verbs_device() {
    let controller = controller();
    let _device = over_verbs(&controller, "leaf0", attach_point(1 << 20));
    let ranks = join(&controller, "job", &[AUTO, SHM]);
    assert!(ranks.iter().all(|rank| tree(rank).attach.is_some()));
}

#[test]
fn rdma_ranks_of_any_machine_use_zero_copy() {
    let controller = controller();
    let door = SocketAddr::from(([10, 0, 0, 1], 9));
    let far = attach_point(1 << 20).map(|attach_point| AttachPoint { remote: Some(door), ..attach_point });
    let device = Device::start(&controller, "leaf0", far, None);
    let ranks = join(&controller, "job", &[(Transport::Rdma, Some("there")), (Transport::Rdma, None), AUTO]);
    for tree in ranks.iter().map(tree) {
        assert_eq!(tree.attach.as_ref().and_then(|attach_point| attach_point.remote), Some(door));
        assert_eq!((tree.facts.zero_copy_ranks, tree.facts.rdma_ranks), (3, 2));
    }
    assert_eq!(children(device.group().zero_copy), [0, 1, 2]);
}

#[test]
fn unavailable_rdma_is_refused_with_the_reason() {
    let controller = controller();
    let device = Device::start(&controller, "leaf0", attach_point(1 << 20), None);
    let ranks = join(&controller, "job", &[(Transport::Rdma, Some(HERE)), AUTO]);
    for why in ranks.iter().map(no_tree_reason_of) {
        let all = ["rank 0", "leaf0", "no RDMA engine", "--rdma", "`verbs`"];
        assert!(all.iter().all(|part| why.contains(part)), "{why}");
    }
    drop(device);
    let controller = self::controller();
    let _device = Device::start(&controller, "leaf0", None, None);
    let ranks = join(&controller, "no-bus", &[(Transport::Rdma, None)]);
    assert!(no_tree_reason_of(&ranks[0]).contains("does not offer zero-copy"), "{}", no_tree_reason_of(&ranks[0]));
}

#[test]
fn mismatched_packet_transport_is_refused_with_the_reason() {
    let controller = controller();
    let device = over_verbs(&controller, "leaf0", None);
    for transport in [Transport::Udp, Transport::Auto] {
        let ranks = join(&controller, transport.name(), &[(Transport::Verbs, None), (transport, Some(HERE))]);
        for why in ranks.iter().map(no_tree_reason_of) {
            assert!(
                ["rank 1", "leaf0", "receives over verbs", "`verbs`"].iter().all(|part| why.contains(part)),
                "{why}"
            );
        }
    }
    drop(device);
    let controller = self::controller();
    let _device = Device::start(&controller, "leaf0", None, None);
    let ranks = join(&controller, "over-verbs", &[AUTO, (Transport::Verbs, None)]);
    for why in ranks.iter().map(no_tree_reason_of) {
        assert!(["rank 1", "leaf0", "--verbs", "`udp`"].iter().all(|part| why.contains(part)), "{why}");
    }
}

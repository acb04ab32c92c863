//! Devices that receive over RDMA verbs: who gets a tree on them, and who is told why not.

use super::*;
use sumac_hal::port::VerbsAddr;

fn over_verbs(controller: &Controller, name: &str, bus: Option<Bus>) -> Device {
    let at = Addr::Verbs(VerbsAddr { gid: [7; 16], lid: 0, qpn: 17 });
    let announce = Announce { data_addrs: [at].into_iter().collect(), ..announce(name, 1, bus) };
    Device::serve(controller, announce, |_| Reply::Yes)
}

#[test]
fn ranks_that_attach_over_verbs_get_the_devices_address() {
    let controller = controller();
    let device = over_verbs(&controller, "leaf0", bus(1 << 20));
    // The bus is there, and is not what they ask for.
    let ranks = join(&controller, "job", &[(Attach::Verbs, Some(HERE)), (Attach::Verbs, None)]);
    for tree in ranks.iter().map(tree) {
        assert!(matches!(tree.parents[..], [Addr::Verbs(VerbsAddr { qpn: 17, .. })]), "{:?}", tree.parents);
        assert_eq!((tree.shared, &tree.bus, tree.facts.over_verbs), (None, &None, true));
    }
    assert_eq!(device.group().shared, None, "a queue pair reaches one child at a time");
}

#[test]
fn ranks_in_its_memory_need_not_send_to_it() {
    let controller = controller();
    let _device = over_verbs(&controller, "leaf0", bus(1 << 20));
    let ranks = join(&controller, "job", &[AUTO, SHM]);
    assert!(ranks.iter().all(|rank| tree(rank).bus.is_some()));
}

#[test]
fn ranks_of_other_machines_contribute_by_rdma_where_the_leaf_takes_that() {
    let controller = controller();
    let door = SocketAddr::from(([10, 0, 0, 1], 9));
    let far = bus(1 << 20).map(|bus| Bus { remote: Some(door), ..bus });
    let device = Device::start(&controller, "leaf0", far, None);
    let ranks = join(&controller, "job", &[(Attach::Rdma, Some("there")), (Attach::Rdma, None), AUTO]);
    for tree in ranks.iter().map(tree) {
        assert_eq!(tree.bus.as_ref().and_then(|bus| bus.remote), Some(door));
        assert_eq!((tree.facts.ranks_by_reference, tree.facts.ranks_by_rdma), (3, 2));
    }
    assert_eq!(children(device.group().by_reference), [0, 1, 2]);
}

#[test]
fn who_asks_for_rdma_where_there_is_none_gets_the_reason() {
    let controller = controller();
    let device = Device::start(&controller, "leaf0", bus(1 << 20), None);
    let ranks = join(&controller, "job", &[(Attach::Rdma, Some(HERE)), AUTO]);
    for why in ranks.iter().map(why_not) {
        let all = ["rank 0", "leaf0", "no RDMA engine", "--rdma", "`verbs`"];
        assert!(all.iter().all(|part| why.contains(part)), "{why}");
    }
    drop(device);
    let controller = self::controller();
    let _device = Device::start(&controller, "leaf0", None, None);
    let ranks = join(&controller, "no-bus", &[(Attach::Rdma, None)]);
    assert!(why_not(&ranks[0]).contains("no bus"), "{}", why_not(&ranks[0]));
}

#[test]
fn who_sends_by_another_way_than_the_leaf_receives_gets_the_reason() {
    let controller = controller();
    let device = over_verbs(&controller, "leaf0", None);
    for attach in [Attach::Udp, Attach::Auto] {
        let ranks = join(&controller, attach.name(), &[(Attach::Verbs, None), (attach, Some(HERE))]);
        for why in ranks.iter().map(why_not) {
            assert!(
                ["rank 1", "leaf0", "receives over verbs", "`verbs`"].iter().all(|part| why.contains(part)),
                "{why}"
            );
        }
    }
    drop(device);
    let controller = self::controller();
    let _device = Device::start(&controller, "leaf0", None, None);
    let ranks = join(&controller, "over-verbs", &[AUTO, (Attach::Verbs, None)]);
    for why in ranks.iter().map(why_not) {
        assert!(["rank 1", "leaf0", "--verbs", "`udp`"].iter().all(|part| why.contains(part)), "{why}");
    }
}

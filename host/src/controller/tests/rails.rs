//! Jobs whose trees enter at different adapters of the ranks' servers, on raw connections.

use super::super::admit::JobRails;
use super::super::proto::{RailGrant, StripeOf, Striping, stripe_name};
use super::replan::{Raw, disconnect_device, request, tree_of};
use super::*;
use crate::topo::{Rate, generate};

/// Servers of two adapters each, each rail below a leaf of its own: `leaf0-0` and `leaf1-0`.
fn with_rails(servers: usize) -> (Controller, Vec<Device>) {
    let shape =
        generate::Rails { servers, rails: 2, servers_per_leaf: servers, spines: 0, rate: Rate::from_gbits(8.0) };
    let fabric = Some(generate::rails(shape).expect("a possible shape"));
    let controller = Controller::start(ControllerConfig { fabric, ..ControllerConfig::new() }).expect("a port");
    let devices = ["leaf0-0", "leaf1-0"].map(|name| Device::start(&controller, name, None, None)).into();
    (controller, devices)
}

/// A rank that wants two trees and has so many addresses.
fn rank_at(host: String, rank: u32, addresses: u8) -> JoinRequest {
    let like = request(rank, 2);
    JoinRequest { host: Some(host), terms: Terms { trees: 2, rails: addresses, ..like.terms.clone() }, ..like }
}

/// Join two ranks, and return what they are told.
fn join(controller: &Controller, requests: [JoinRequest; 2]) -> (Vec<Raw>, [Membership; 2]) {
    let mut ranks: Vec<_> = requests.into_iter().map(|request| Raw::join_with(controller, request, &[])).collect();
    let memberships = [ranks[0].joined(), ranks[1].joined()];
    (ranks, memberships)
}

fn grants(of: &Striping) -> Vec<(&str, u16)> {
    of.rails.iter().map(|RailGrant { adapter, index }| (adapter.as_str(), *index)).collect()
}

fn host_of(membership: &Membership) -> Option<&str> {
    tree_of(membership).host.as_deref()
}

#[test]
fn ranks_with_addresses_for_two_rails_get_a_tree_on_each() {
    // A server's name stands for its first adapter.
    for host in ["n0", "n0 rail0"] {
        let (controller, _devices) = with_rails(3);
        let requests = [rank_at(host.into(), 0, 2), rank_at("n2 rail0".into(), 1, u8::MAX)];
        let (_ranks, own) = join(&controller, requests.clone());
        for (membership, server) in own.iter().zip(["n0", "n2"]) {
            let striping = &membership.striping;
            let rails = [format!("{server} rail0"), format!("{server} rail1")];
            assert_eq!(grants(striping), [(rails[0].as_str(), 0), (rails[1].as_str(), 1)]);
            assert_eq!((striping.shares.len(), &striping.reason), (2, &None));
            assert_eq!((tree_of(membership).leaf.as_str(), host_of(membership)), ("leaf0-0", Some(rails[0].as_str())));
        }
        // The stripe enters where it was planned.
        let stripe = |(request, own): (JoinRequest, &Membership)| {
            let terms = Terms { stripe: Some(StripeOf { job: "job".into(), index: 1 }), ..request.terms };
            let host = Some(own.striping.rails[1].adapter.clone());
            JoinRequest { job: stripe_name("job", 1), host, terms, ..request }
        };
        let [first, second] = requests;
        let (_stripe, further) = join(&controller, [stripe((first, &own[0])), stripe((second, &own[1]))]);
        for (membership, adapter) in further.iter().zip(["n0 rail1", "n2 rail1"]) {
            assert_eq!((tree_of(membership).leaf.as_str(), host_of(membership)), ("leaf1-0", Some(adapter)));
        }
    }
}

#[test]
fn rank_with_one_address_leaves_its_job_one_tree_and_the_reason() {
    let (controller, _devices) = with_rails(2);
    let requests = [rank_at("n0 rail0".into(), 0, 2), rank_at("n1 rail0".into(), 1, 1)];
    let (_ranks, [first, second]) = join(&controller, requests);
    for membership in [first, second] {
        assert!(membership.striping.shares.len() < 2 && membership.striping.rails.is_empty());
        assert_eq!(tree_of(&membership).leaf, "leaf0-0");
        let why = membership.striping.reason.expect("there are two rails");
        assert!(why.starts_with("1 of 2 trees: "), "{why}");
        assert!(why.contains("rank 1 has one address for the 2 adapters or more of its server"), "{why}");
    }
}

#[test]
fn ranks_that_chose_a_rail_stay_there() {
    let (controller, _devices) = with_rails(2);
    let requests = [rank_at("n0 rail1".into(), 0, 2), rank_at("n1 rail1".into(), 1, 2)];
    let (_ranks, memberships) = join(&controller, requests);
    for (membership, adapter) in memberships.iter().zip(["n0 rail1", "n1 rail1"]) {
        assert!(membership.striping.shares.len() < 2 && membership.striping.rails.is_empty());
        assert_eq!((tree_of(membership).leaf.as_str(), host_of(membership)), ("leaf1-0", Some(adapter)));
    }
}

#[test]
fn rails_of_which_one_has_no_device_are_one_tree() {
    let (controller, mut devices) = with_rails(2);
    disconnect_device(devices.remove(1), &controller);
    let requests = [rank_at("n0".into(), 0, 2), rank_at("n1".into(), 1, 2)];
    let (_ranks, [first, _]) = join(&controller, requests);
    let why = first.striping.reason.expect("two were requested");
    assert!(why.starts_with("1 of 2 trees: ") && !why.contains("SUMAC_BIND"), "{why}");
}

#[test]
fn adapter_of_another_rank_of_the_server_is_not_used() {
    let shape = generate::Rails { servers: 1, rails: 3, servers_per_leaf: 1, spines: 0, rate: None };
    let fabric = generate::rails(shape).expect("a possible shape");
    let rails_of = |hosts: [&str; 2], addresses| {
        let requests = [rank_at(hosts[0].into(), 0, addresses), rank_at(hosts[1].into(), 1, addresses)];
        JobRails::of(&fabric, &requests.each_ref()).map(|rails| {
            let names = |adapters: &Vec<_>| adapters.iter().map(|id| fabric.host(*id).name.clone()).collect();
            rails.adapters.iter().map(names).collect::<Vec<Vec<String>>>()
        })
    };
    let apart = rails_of(["n0", "n0 rail1"], 3).expect("hosts are named");
    assert_eq!(apart, [vec!["n0 rail0", "n0 rail2"], vec!["n0 rail1"]]);
    assert_eq!(rails_of(["n0", "n0 rail1"], 2).expect("hosts are named"), [["n0 rail0"], ["n0 rail1"]]);
    // The planner refuses them, by name.
    assert_eq!(rails_of(["n0", "n0 rail0"], 3), None);
    assert_eq!(rails_of(["n0", "n7"], 3), None);
}

//! The shape of a job: asked for alike by all ranks, or that of their machines, or of their hosts on the fabric.

use super::super::proto::{ClientReply, JoinRefusal};
use super::replan::{Raw, request};
use super::*;
use crate::schedule::Shape;
use crate::topo::generate::{self, Dragonfly};

/// Join ranks, the nth at this address of loopback, which ask for these shapes.
fn ranks(controller: &Controller, job: &str, ranks: &[(u8, Option<&str>)]) -> Vec<Raw> {
    let join = |(rank, &(host, shape)): (u32, &(u8, Option<&str>))| {
        let terms = Terms { shape: shape.map(|shape| shape.parse().expect("a shape")), ..Terms::default() };
        let mesh_addr = ([127, 0, 0, host], 1).into();
        let world = ranks.len() as u32;
        Raw::join_with(controller, JoinRequest { job: job.into(), mesh_addr, terms, ..request(rank, world) }, &[])
    };
    (0..).zip(ranks).map(join).collect()
}

fn shapes(controller: &Controller, job: &str, asked: &[(u8, Option<&str>)]) -> Vec<String> {
    ranks(controller, job, asked).iter_mut().map(|rank| rank.joined().shape.to_string()).collect()
}

#[test]
fn job_has_the_shape_of_its_machines() {
    let controller = controller();
    let of = |job, hosts: &[u8]| {
        let asked: Vec<_> = hosts.iter().map(|&host| (host, None)).collect();
        let found = shapes(&controller, job, &asked);
        assert!(found.iter().all(|shape| *shape == found[0]), "{found:?}");
        found[0].clone()
    };
    assert_eq!(of("equal", &[1, 1, 2, 2, 3, 3]), "servers:2");
    assert_eq!(of("uneven", &[1, 1, 2]), "line");
    assert_eq!(of("apart", &[1, 2, 1, 2]), "line");
    assert_eq!(of("one", &[1, 1, 1]), "line");
}

/// Join ranks of these hosts of a fabric, each on a machine of its own unless two have the same number.
fn on_fabric(controller: &Controller, job: &str, ranks: &[(u8, Option<&str>, Option<&str>)]) -> String {
    let join = |(rank, &(machine, host, shape)): (u32, &(u8, Option<&str>, Option<&str>))| {
        let terms = Terms { shape: shape.map(|shape| shape.parse().expect("a shape")), ..Terms::default() };
        let (mesh_addr, host) = (([127, 0, 0, machine], 1).into(), host.map(str::to_owned));
        let world = ranks.len() as u32;
        Raw::join_with(controller, JoinRequest { job: job.into(), mesh_addr, host, terms, ..request(rank, world) }, &[])
    };
    let mut joined: Vec<Raw> = (0..).zip(ranks).map(join).collect();
    let memberships: Vec<Membership> = joined.iter_mut().map(Raw::joined).collect();
    assert!(memberships.iter().all(|one| one.shape == memberships[0].shape), "{memberships:?}");
    let tree = if memberships[0].tree.is_ok() { " with a tree" } else { "" };
    format!("{}{tree}", memberships[0].shape)
}

#[test]
fn ranks_that_name_their_hosts_have_the_shape_of_the_fabric() {
    let fabric = generate::dragonfly(Dragonfly { routers: 4, global: 1, hosts: 1, rate: None }).expect("valid");
    let config = ControllerConfig { fabric: Some(fabric), ..ControllerConfig::new() };
    let controller = Controller::start(config).expect("a port");
    let hosts: Vec<String> = (0..8).map(|host| format!("h{host}")).collect();
    let of = |job: &str, order: &[usize], shape: Option<&'static str>| {
        let ranks: Vec<_> = (1..).zip(order).map(|(machine, at)| (machine, Some(&*hosts[*at]), shape)).collect();
        on_fabric(&controller, job, &ranks)
    };
    // Without a device of the fabric, there is no tree; ranks are in groups all the same.
    assert_eq!(of("groups", &[0, 1, 2, 3, 4, 5, 6, 7], None), "servers:4");
    assert_eq!(of("turns", &[0, 4, 1, 5], None), "line");
    assert_eq!(of("asked", &[0, 1, 4, 5], Some("2x2")), "2x2");
    // Machines of several ranks are narrower than any group.
    let named = |host: usize| Some(&*hosts[host]);
    let together = [(1, named(0), None), (1, named(0), None), (2, named(1), None), (2, named(1), None)];
    assert_eq!(on_fabric(&controller, "machines", &together), "servers:2");
    let apart = [0, 1, 4, 5].map(|host| (1, named(host), None));
    assert_eq!(on_fabric(&controller, "memory", &apart), "line", "adapters of one machine");
    // Ranks that name no host are at the first ones, unless that cannot be.
    let nameless = |job: &str, machines: &[u8]| {
        on_fabric(&controller, job, &machines.iter().map(|&machine| (machine, None, None)).collect::<Vec<_>>())
    };
    assert_eq!(nameless("first", &[1, 2, 3, 4, 5, 6, 7, 8]), "servers:4");
    assert_eq!(nameless("together", &[1, 1, 1, 1, 1, 1, 1, 1]), "line");
    assert_eq!(nameless("more", &(1..=24).collect::<Vec<u8>>()), "line");
}

#[test]
fn ranks_on_a_torus_are_a_grid_with_a_tree_or_without() {
    let fabric = generate::torus(&[2, 3], 1, None).expect("valid").with_aggregation_everywhere();
    let switches: Vec<String> = fabric.switches().iter().map(|switch| switch.name.clone()).collect();
    let config = ControllerConfig { fabric: Some(fabric), ..ControllerConfig::new() };
    let controller = Controller::start(config).expect("a port");
    let hosts: Vec<String> = (0..6).map(|host| format!("h{host}")).collect();
    let ranks: Vec<_> = (1..).zip(&hosts).map(|(machine, host)| (machine, Some(&**host), None)).collect();
    assert_eq!(on_fabric(&controller, "without", &ranks), "2x3");
    let _devices: Vec<_> = switches.iter().map(|switch| Device::start(&controller, switch, None, None)).collect();
    assert_eq!(on_fabric(&controller, "with", &ranks), "2x3 with a tree");
}

#[test]
fn shape_that_all_ranks_ask_for_beats_that_of_their_machines() {
    let controller = controller();
    for shape in ["2x2", "4", "line", "servers:4"] {
        let asked: Vec<_> = [1, 1, 2, 2].map(|host| (host, Some(shape))).to_vec();
        assert_eq!(shapes(&controller, &shape.replace(':', "-"), &asked), [shape; 4]);
    }
}

#[test]
fn ranks_that_ask_for_different_shapes_are_refused() {
    let controller = controller();
    let join = |rank, shape: Option<&str>| {
        let terms = Terms { shape: shape.map(|shape| shape.parse().expect("a shape")), ..Terms::default() };
        Raw::join_with(&controller, JoinRequest { terms, ..request(rank, 4) }, &[])
    };
    let _first = join(0, Some("2x2"));
    while status(controller.local_addr()).expect("a report").jobs.is_empty() {
        thread::yield_now();
    }
    for (other, named) in [(Some("4x1"), "the shape: 4x1 here"), (None, "the shape: not set here")] {
        let ClientReply::Refused(refusal) = join(1, other).recv() else { panic!("they disagree") };
        assert!(matches!(refusal, JoinRefusal::Mismatch { .. }), "{refusal}");
        assert!(refusal.to_string().ends_with(&format!("{named}, 2x2 at rank 0")), "{refusal}");
    }
}

#[test]
fn shape_of_another_number_of_ranks_is_refused_with_both_numbers() {
    let controller = controller();
    for (shape, why) in
        [("2x3", "2x3 does not fit 4 ranks; it has 6"), ("servers:3", "servers of 3 have a multiple of 3")]
    {
        let terms = Terms { shape: shape.parse::<Shape>().ok(), ..Terms::default() };
        let refused = Raw::join_with(&controller, JoinRequest { terms, ..request(0, 4) }, &[]).recv();
        let ClientReply::Refused(refusal) = refused else { panic!("{shape} is taken") };
        assert!(matches!(refusal, JoinRefusal::Shape { .. }), "{refusal}");
        let text = refusal.to_string();
        assert!(text.contains(why) && text.contains("set SUMAC_SHAPE alike on all ranks, or on none"), "{text}");
    }
}

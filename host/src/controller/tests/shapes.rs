//! The shape of a job: asked for alike by all ranks, or that of their machines.

use super::super::proto::{ClientReply, JoinRefusal};
use super::replan::{Raw, request};
use super::*;
use crate::schedule::Shape;

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
    for (other, named) in [(Some("4x1"), "the shape: 4x1 here"), (None, "the shape: of its machines here")] {
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

//! What a fence guarantees: nothing that the peer has begun takes effect afterwards.

use super::*;
use crate::remote::{Access, RankLink};
use crate::shm::{Pages, Region};
use crate::verbs::{ExposedRegion, RankEnd};

const LEN: usize = 4096;

fn bytes(region: &ExposedRegion) -> Vec<u8> {
    let mut bytes = vec![0; region.len_bytes()];
    region.read(0, &mut bytes).expect("all of it");
    bytes
}

/// Let everything that the cards still do take effect.
fn settle() {
    machine(|machine| (0..100).for_each(|_| machine.tick()));
}

/// A peer has written to a region of `owner`, and its card has acknowledged it; the owner's card has not passed it on.
fn fence_after_a_write(mut owner: OneSided, mut writer: OneSided, domain: &VerbsDomain) {
    let mut region = domain.expose(LEN).expect("memory");
    owner.connect(&writer.end()).expect("connected");
    writer.connect(&owner.end()).expect("connected");
    let mut source = domain.expose(LEN).expect("memory");
    source.write(0, &[7; LEN]).expect("inside");
    writer.write((&source, 0), (&region.remote(), 0), LEN as u64).expect("room");
    writer.flush();
    assert_eq!(writer.poll().done, 1, "acknowledged");
    assert_eq!(bytes(&region), [0; LEN], "not in memory");
    owner.fence([&mut region]).expect("fenced");
    let fenced = bytes(&region);
    drop(owner);
    settle();
    assert!(bytes(&region) == fenced, "memory changed after the fence");
}

fn domain() -> VerbsDomain {
    machine(|machine| _ = machine.add("mlx5_0", ADDR));
    machine(|machine| machine.delays_writes = true);
    VerbsDomain::open(&VerbsConfig::default()).expect("a domain")
}

#[test]
fn fence_waits_for_acknowledged_writes() {
    let domain = domain();
    let (owner, writer) = (domain.one_sided().expect("an end"), domain.one_sided().expect("an end"));
    fence_after_a_write(owner, writer, &domain);
}

#[test]
fn fence_of_a_shared_queue_waits_for_acknowledged_writes() {
    let domain = domain();
    let receives = SharedReceives::new(&domain, 64).expect("a queue");
    let (owner, writer) = (domain.messaging(&receives).expect("an end"), domain.one_sided().expect("an end"));
    fence_after_a_write(owner, writer, &domain);
}

#[test]
fn fence_without_an_event_destroys_the_queue_pair() {
    let domain = domain();
    machine(|machine| machine.loses_events = true);
    machine(|machine| machine.stops_late = true);
    let receives = SharedReceives::new(&domain, 64).expect("a queue");
    let (owner, writer) = (domain.messaging(&receives).expect("an end"), domain.one_sided().expect("an end"));
    fence_after_a_write(owner, writer, &domain);
}

/// A rank and the device's end of its link.
fn linked() -> (RankEnd, VerbsDomain, SharedReceives, OneSided) {
    let device = domain();
    let receives = SharedReceives::new(&device, 64).expect("a queue");
    let mut rank = RankEnd::new(VerbsDomain::open(&VerbsConfig::default()).expect("a domain")).expect("an end");
    let mut end = device.messaging(&receives).expect("an end");
    rank.connect(&end.end().to_link_end()).expect("connected");
    end.connect(&crate::verbs::OneSidedEnd::from_link_end(&rank.end())).expect("connected");
    (rank, device, receives, end)
}

#[test]
fn rank_takes_what_arrived_before_its_fence() {
    let (mut rank, _device, _receives, mut end) = linked();
    assert_eq!(end.send(b"first"), Ok(true));
    rank.fence().expect("fenced");
    let mut message = [0; MESSAGE_LEN_BYTES];
    assert_eq!(rank.receive(&mut message), Ok(Some(Arrived::Message(5))));
    assert_eq!(rank.receive(&mut message), Err(LinkError::Fenced));
    assert_eq!(end.send(b"second"), Ok(true), "posted");
    assert_eq!(end.poll().error, Some(LinkError::PeerGone));
}

#[test]
fn failed_deregistration_is_no_fence() {
    let (mut rank, ..) = linked();
    let landing = Region::create(LEN, Pages::Normal).expect("memory");
    let region = rank.expose(landing, Access::Land).expect("exposed");
    machine(|machine| machine.refuses_deregistration = true);
    let error = rank.fence().expect_err("the key still opens memory").to_string();
    assert!(error.contains("can't deregister memory"), "{error}");
    assert!(machine(|machine| machine.access(region.rkey)).is_some());
}

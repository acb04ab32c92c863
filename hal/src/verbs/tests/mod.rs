//! Tests of whole links on fake cards (`fake`).

mod events;
mod fences;
mod keys;
mod links;
mod settings;

use super::fake::machine;
use super::{OneSided, PeerEngine, SharedReceives, VerbsConfig, VerbsDomain};
use crate::remote::{Arrived, Link, LinkError, MESSAGE_LEN_BYTES};
use std::net::Ipv4Addr;

const ADDR: Ipv4Addr = Ipv4Addr::new(10, 0, 0, 1);

/// A device's engine on a card, with a queue for messages of `buffers` buffers.
fn engine(buffers: usize) -> (VerbsDomain, PeerEngine) {
    machine(|machine| _ = machine.add("mlx5_0", ADDR));
    let domain = VerbsDomain::open(&VerbsConfig::default()).expect("a domain");
    let receives = SharedReceives::new(&domain, buffers).expect("a queue");
    let engine = PeerEngine::with_receives(&domain, 8, receives);
    (domain, engine)
}

/// A rank of another process, and its queue.
fn rank() -> (SharedReceives, OneSided) {
    let domain = VerbsDomain::open(&VerbsConfig::default()).expect("a domain");
    let receives = SharedReceives::new(&domain, 64).expect("a queue");
    let end = domain.messaging(&receives).expect("an end");
    (receives, end)
}

/// Connect a rank's end to the engine; returns the peer's number.
fn attach(domain: &VerbsDomain, engine: &mut PeerEngine, end: &mut OneSided) -> u16 {
    let mut own = engine.messaging(domain).expect("an end").expect("it has a queue");
    own.connect(&end.end()).expect("connected");
    end.connect(&own.end()).expect("connected");
    engine.attach(own)
}

/// Take the arrivals of a peer until there are none, or the link has ended.
fn arrivals(engine: &mut PeerEngine, peer: u16) -> (usize, Option<LinkError>) {
    let mut count = 0;
    loop {
        match engine.link(peer).expect("a link").receive(&mut [0; MESSAGE_LEN_BYTES]) {
            Ok(Some(Arrived::Message(_) | Arrived::Landed(_))) => count += 1,
            Ok(None) => return (count, None),
            Err(error) => return (count, Some(error)),
        }
    }
}

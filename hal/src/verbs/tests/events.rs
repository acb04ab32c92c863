//! Devices that fail, and addresses that change, under ports and links that are in use.

use super::*;
use crate::port::{Addr, Port, RxToken, TxToken, WaitPort, Wake};
use crate::remote::BUFFERS;
use crate::time::Instant;
use crate::verbs::{RankEnd, VerbsPort};
use std::time::Duration;

const OTHER: Ipv4Addr = Ipv4Addr::new(10, 0, 0, 2);

/// Ports on two cards.
fn ports() -> [VerbsPort; 2] {
    [("mlx5_0", ADDR), ("mlx5_1", OTHER)].map(|(name, addr)| {
        machine(|machine| _ = machine.add(name, addr));
        let link = name.parse().expect("a name");
        VerbsPort::open(&VerbsConfig { link, ..VerbsConfig::default() }).expect("a port")
    })
}

/// Seconds after the start of a test, far enough from each other for all timers.
fn at(seconds: u64) -> Instant {
    Instant::from_nanos(0) + Duration::from_secs(seconds)
}

fn send(port: &mut VerbsPort, to: Addr, now: Instant) {
    port.transmit(now).expect("room").consume(to, |buffer| {
        buffer[..5].copy_from_slice(b"bytes");
        (5, ())
    });
    port.flush(now);
}

fn receives(port: &mut VerbsPort, now: Instant) -> bool {
    port.receive(now).is_some_and(|token| token.consume(|_, bytes| bytes == b"bytes"))
}

#[test]
fn packets_arrive_after_their_address_moves_in_the_table() {
    let [mut a, mut b] = ports();
    send(&mut a, b.local_addr(), at(0));
    assert!(receives(&mut b, at(0)));
    machine(|machine| machine.set_gids(0, &[None, None, Some(ADDR)]));
    send(&mut a, b.local_addr(), at(1));
    send(&mut a, b.local_addr(), at(2));
    assert!(receives(&mut b, at(2)), "{:?}", a.stats());
    assert!(!a.has_failed());
}

#[test]
fn packets_are_dropped_and_counted_while_the_address_is_gone() {
    let [mut a, mut b] = ports();
    machine(|machine| machine.set_gids(0, &[None]));
    send(&mut a, b.local_addr(), at(1));
    let before = a.stats().send_dropped_packets;
    send(&mut a, b.local_addr(), at(2));
    assert_eq!(a.stats().send_dropped_packets, before + 1);
    assert!(!receives(&mut b, at(2)));
    machine(|machine| machine.set_gids(0, &[Some(OTHER), Some(ADDR)]));
    send(&mut a, b.local_addr(), at(3));
    send(&mut a, b.local_addr(), at(4));
    assert!(receives(&mut b, at(4)), "{:?}", a.stats());
}

#[test]
fn device_reset_ends_a_wait_and_is_reported() {
    let [mut a, _b] = ports();
    assert!(!a.has_failed());
    machine(|machine| machine.reset(0));
    assert_eq!(a.wait(None), Wake::Woken);
    assert!(a.has_failed());
    assert_eq!(a.wait(Some(Duration::from_millis(1))), Wake::Timeout, "reported once");
}

#[test]
fn device_reset_is_reported_to_a_port_that_is_polled() {
    let [mut a, _b] = ports();
    machine(|machine| machine.reset(0));
    assert!(!receives(&mut a, at(1)) && a.has_failed());
}

#[test]
fn device_that_completes_nothing_has_failed() {
    let [mut a, b] = ports();
    machine(|machine| machine.hang(0));
    for second in 0..10 {
        send(&mut a, b.local_addr(), at(second));
    }
    assert!(a.has_failed(), "{:?}", a.stats());
}

#[test]
fn device_reset_ends_every_link_on_it() {
    let (domain, mut engine) = engine(4 * BUFFERS);
    let (_receives, mut end) = rank();
    let peer = attach(&domain, &mut engine, &mut end);
    let mut rank = RankEnd::new(VerbsDomain::open(&VerbsConfig::default()).expect("a domain")).expect("an end");
    machine(|machine| machine.reset(0));
    engine.arm();
    assert_eq!(arrivals(&mut engine, peer), (0, Some(LinkError::DeviceFailed)));
    assert!(engine.has_failed());
    assert!(engine.detach(peer).is_err(), "nothing can be stopped on it");
    let mut message = [0; MESSAGE_LEN_BYTES];
    let ended = (0..10_000).find_map(|_| rank.receive(&mut message).err());
    assert_eq!(ended, Some(LinkError::DeviceFailed), "polled without sleeping");
}

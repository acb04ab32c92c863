//! Tests of the listeners; the workspace's own tests cover whole boards.

use super::local::ATTACH_REQUEST_TIMEOUT;
use super::*;
use std::io::Read;
use std::net::{Ipv4Addr, TcpStream};
use std::process::Command;
use std::time::{Duration, Instant};
use sumac_hal::ctrl::{FrameReader, send};
use sumac_hal::ids::{ChildIndex, GroupId};
use sumac_hal::remote::handshake::{AttachRequest, Challenge};
use sumac_hal::remote::{LINK_END_LEN_BYTES, LinkEnd};
use sumac_hal::shm::{Connection, Message, SocketError};
use sumac_hal::traffic_class::TrafficClass;
use sumac_hal::udp::{UdpConfig, UdpPort};

const LONG: Duration = Duration::from_secs(20);

fn pending(test: &str) -> (PendingAttaches, String) {
    let name = format!("sumac-attach-{}-{test}", std::process::id());
    (PendingAttaches::new(Listener::bind(&name).expect("a free name")), name)
}

fn unset_event() -> OwnedFd {
    eventfd(0, EventfdFlags::CLOEXEC).expect("an event")
}

fn hello(key: u64) -> Message {
    Message::Attach { group: GroupId(1), child: ChildIndex(0), key }
}

#[test]
fn attach_request_is_received_while_silent_connections_are_pending() {
    let (mut pending, name) = pending("silent");
    let connect = || Connection::open(&name, LONG).expect("it listens");
    let start = Instant::now();
    // More than the maximum: the oldest are evicted.
    let silent: Vec<_> = (0..100).map(|_| connect()).collect();
    let speaker = connect();
    speaker.send(&hello(7), None).expect("it is open");
    let (stop, mut keys) = (unset_event(), Vec::new());
    while keys.is_empty() && start.elapsed() < LONG {
        pending.poll(&stop, |arrival| keys.push(arrival.key));
    }
    assert!(keys == [7] && start.elapsed() < ATTACH_REQUEST_TIMEOUT, "{keys:?} after {:?}", start.elapsed());
    assert!(silent[0].receive(LONG).is_err(), "it was evicted");
    assert!(matches!(silent[99].receive(Duration::ZERO), Err(SocketError::Timeout(_))), "it is still pending");
    silent[99].send(&hello(8), None).expect("it is open");
    while keys.len() < 2 && start.elapsed() < LONG {
        pending.poll(&stop, |arrival| keys.push(arrival.key));
    }
    assert_eq!(keys, [7, 8]);
}

#[test]
fn silent_or_malformed_connections_are_closed() {
    let (mut pending, name) = pending("malformed");
    let silent = Connection::open(&name, LONG).expect("it listens");
    let malformed = Connection::open(&name, LONG).expect("it listens");
    let reason = sumac_hal::shm::AttachRefusal::NoMemory;
    malformed.send(&Message::Refused { reason }, None).expect("it is open");
    // The stop event is set, so that `poll` does not sleep: a closed connection may stay open for a moment, in a
    // process that another test is about to start.
    let stop = eventfd(1, EventfdFlags::CLOEXEC).expect("an event");
    let start = Instant::now();
    for connection in [&malformed, &silent] {
        while matches!(connection.receive(Duration::ZERO), Err(SocketError::Timeout(_))) {
            assert!(start.elapsed() < LONG, "the connection stays open");
            pending.poll(&stop, |_| panic!("an unexpected arrival"));
        }
    }
    assert!(start.elapsed() >= ATTACH_REQUEST_TIMEOUT, "the silent one was closed before its deadline");
}

/// A listener that is out of descriptors pauses; tested in a process of its own, which runs out of them.
#[test]
fn listener_out_of_descriptors_backs_off() {
    expect_success("emulated::attach::tests::other_process_without_descriptors");
}

/// A connection takes two descriptors.
#[test]
fn listener_with_one_descriptor_left_backs_off() {
    expect_success("emulated::attach::tests::other_process_with_one_descriptor");
}

fn expect_success(test: &str) {
    let mut program = Command::new(std::env::current_exe().expect("the test program"));
    let output = program.args(["--exact", "--ignored", "--nocapture", test]).output().expect("a process");
    let output_text = String::from_utf8_lossy(&output.stdout);
    assert!(output.status.success() && output_text.contains("1 passed"), "{output_text}");
}

#[test]
#[ignore = "the other process of another test"]
fn other_process_without_descriptors() {
    expect_backoff_with_free_descriptors("room", 0);
}

#[test]
#[ignore = "the other process of another test"]
fn other_process_with_one_descriptor() {
    expect_backoff_with_free_descriptors("half", 1);
}

/// Check that a rank that connects while `free` descriptors are left is received once there are more.
fn expect_backoff_with_free_descriptors(name: &str, free: u64) {
    use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};
    use std::os::fd::AsRawFd;
    let (mut pending, name) = pending(name);
    let rank = Connection::open(&name, LONG).expect("it listens");
    rank.send(&hello(9), None).expect("it is open");
    let (stop, limit, start) = (unset_event(), getrlimit(Resource::Nofile), Instant::now());
    // The system hands out the lowest free number; all below it are in use, and open descriptors stay open.
    let lowest = unset_event().as_raw_fd().unsigned_abs();
    setrlimit(Resource::Nofile, Rlimit { current: Some(u64::from(lowest) + free), ..limit }).expect("less than before");
    let mut turns = 0;
    while start.elapsed() < Duration::from_millis(500) {
        pending.poll(&stop, |_| panic!("there are no descriptors"));
        assert!(matches!(rank.receive(Duration::ZERO), Err(SocketError::Timeout(_))), "the connection stays open");
        turns += 1;
    }
    assert!(turns <= 20, "{turns} turns in half a second");
    setrlimit(Resource::Nofile, limit).expect("as before");
    let mut key = None;
    while key.is_none() && start.elapsed() < LONG {
        pending.poll(&stop, |arrival| key = Some(arrival.key));
    }
    assert_eq!(key, Some(9), "it stayed in the backlog");
}

/// A silent connection from another host delays no other connection, and is closed.
#[test]
fn silent_remote_connections_delay_no_other_and_are_closed() {
    let (sender, arrivals) = std::sync::mpsc::channel();
    let port = UdpPort::bind((Ipv4Addr::LOCALHOST, 0).into(), &UdpConfig::default()).expect("a port");
    let waker = port.waker();
    let listener =
        RemoteListener::start((Ipv4Addr::LOCALHOST.into(), TrafficClass::default()), sender, waker).expect("a port");
    let connect = || {
        let stream = TcpStream::connect(listener.addr()).expect("it listens");
        stream.set_read_timeout(Some(LONG)).expect("a timeout");
        stream
    };
    let start = Instant::now();
    let mut silent: Vec<_> = (0..3).map(|_| connect()).collect();
    let mut speaker = connect();
    let challenge: Challenge = FrameReader::new(&speaker).recv().expect("a challenge");
    let end = LinkEnd([1; LINK_END_LEN_BYTES]);
    let request = AttachRequest::new(GroupId(1), ChildIndex(2), [3; 16], end).prove(4, &challenge);
    send(&mut speaker, &request).expect("it is open");
    let Ok(Arrival::Remote(arrival)) = arrivals.recv_timeout(LONG) else { panic!("no arrival") };
    assert!(start.elapsed() < ATTACH_REQUEST_TIMEOUT, "{:?}", start.elapsed());
    assert_eq!((arrival.challenge, arrival.request), (challenge, request));
    assert!(arrival.request.is_proven(4, &arrival.challenge));
    for stream in &mut silent {
        let mut challenge = Vec::new();
        stream.read_to_end(&mut challenge).expect("closed by the listener");
        assert!(!challenge.is_empty());
    }
}

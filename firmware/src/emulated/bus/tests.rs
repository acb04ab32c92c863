//! The reception by itself; whole boards are in the workspace's own tests.

use super::reception::HELLO_LIMIT;
use super::*;
use std::io::Read;
use std::net::{Ipv4Addr, TcpStream};
use std::process::Command;
use std::time::{Duration, Instant};
use sumac_hal::ctrl::{FrameReader, send};
use sumac_hal::ids::{ChildIndex, GroupId};
use sumac_hal::remote::handshake::{Call, Challenge};
use sumac_hal::remote::{LINK_END_LEN_BYTES, LinkEnd};
use sumac_hal::shm::{Connection, Message, SocketError};
use sumac_hal::udp::{UdpConfig, UdpPort};

const LONG: Duration = Duration::from_secs(20);

fn reception(test: &str) -> (Reception, String) {
    let name = format!("sumac-bus-{}-{test}", std::process::id());
    (Reception::new(Listener::bind(&name).expect("a free name")), name)
}

fn never() -> OwnedFd {
    eventfd(0, EventfdFlags::CLOEXEC).expect("an event")
}

fn hello(key: u64) -> Message {
    Message::Attach { group: GroupId(1), child: ChildIndex(0), key }
}

#[test]
fn who_speaks_is_heard_before_those_who_do_not_have_had_their_time() {
    let (mut reception, name) = reception("silent");
    let connect = || Connection::open(&name, LONG).expect("it listens");
    let begun = Instant::now();
    // More than are listened to: the first of them give way.
    let silent: Vec<_> = (0..100).map(|_| connect()).collect();
    let speaker = connect();
    speaker.send(&hello(7), None).expect("it is open");
    let (stop, mut keys) = (never(), Vec::new());
    while keys.is_empty() && begun.elapsed() < LONG {
        reception.turn(&stop, |arrival| keys.push(arrival.key));
    }
    assert!(keys == [7] && begun.elapsed() < HELLO_LIMIT, "{keys:?} after {:?}", begun.elapsed());
    assert!(silent[0].receive(LONG).is_err(), "it gave way");
    assert!(matches!(silent[99].receive(Duration::ZERO), Err(SocketError::Timeout(_))), "it may still speak");
    silent[99].send(&hello(8), None).expect("it is open");
    while keys.len() < 2 && begun.elapsed() < LONG {
        reception.turn(&stop, |arrival| keys.push(arrival.key));
    }
    assert_eq!(keys, [7, 8]);
}

#[test]
fn who_says_nothing_or_something_else_is_hung_up_on() {
    let (mut reception, name) = reception("rude");
    let silent = Connection::open(&name, LONG).expect("it listens");
    let rude = Connection::open(&name, LONG).expect("it listens");
    let reason = sumac_hal::shm::AttachRefusal::NoRoom;
    rude.send(&Message::Refused { reason }, None).expect("it is open");
    // It does not sleep: what it hangs up on may stay open for a moment, in a process that another test is about to start.
    let stop = eventfd(1, EventfdFlags::CLOEXEC).expect("an event");
    let begun = Instant::now();
    for connection in [&rude, &silent] {
        while matches!(connection.receive(Duration::ZERO), Err(SocketError::Timeout(_))) {
            assert!(begun.elapsed() < LONG, "nobody hangs up");
            reception.turn(&stop, |_| panic!("who?"));
        }
    }
    assert!(begun.elapsed() >= HELLO_LIMIT, "the silent one had its time");
}

/// A device without room for connections rests. In a process of its own, which runs out of descriptors.
#[test]
fn a_listener_without_room_rests() {
    expect_success("emulated::bus::tests::other_process_without_room");
}

/// A connection takes two descriptors.
#[test]
fn a_listener_with_room_for_half_a_connection_rests() {
    expect_success("emulated::bus::tests::other_process_with_room_for_half");
}

fn expect_success(test: &str) {
    let mut program = Command::new(std::env::current_exe().expect("the test program"));
    let output = program.args(["--exact", "--ignored", "--nocapture", test]).output().expect("a process");
    let said = String::from_utf8_lossy(&output.stdout);
    assert!(output.status.success() && said.contains("1 passed"), "{said}");
}

#[test]
#[ignore = "the other process of another test"]
fn other_process_without_room() {
    expect_to_wait_where_so_many_are_free("room", 0);
}

#[test]
#[ignore = "the other process of another test"]
fn other_process_with_room_for_half() {
    expect_to_wait_where_so_many_are_free("half", 1);
}

/// See that a rank that comes while so many descriptors are free is heard once there are more.
fn expect_to_wait_where_so_many_are_free(name: &str, free: u64) {
    use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};
    use std::os::fd::AsRawFd;
    let (mut reception, name) = reception(name);
    let rank = Connection::open(&name, LONG).expect("it listens");
    rank.send(&hello(9), None).expect("it is open");
    let (stop, limit, begun) = (never(), getrlimit(Resource::Nofile), Instant::now());
    // The system gives out the lowest number that is free; all below are in use, and what is open stays open.
    let lowest = never().as_raw_fd().unsigned_abs();
    setrlimit(Resource::Nofile, Rlimit { current: Some(u64::from(lowest) + free), ..limit }).expect("less than before");
    let mut turns = 0;
    while begun.elapsed() < Duration::from_millis(500) {
        reception.turn(&stop, |_| panic!("there is no room"));
        assert!(matches!(rank.receive(Duration::ZERO), Err(SocketError::Timeout(_))), "nobody has hung up");
        turns += 1;
    }
    assert!(turns <= 20, "{turns} turns in half a second");
    setrlimit(Resource::Nofile, limit).expect("as before");
    let mut key = None;
    while key.is_none() && begun.elapsed() < LONG {
        reception.turn(&stop, |arrival| key = Some(arrival.key));
    }
    assert_eq!(key, Some(9), "it has waited");
}

/// Who calls from another host and says nothing keeps nobody waiting, and is hung up on.
#[test]
fn silent_callers_keep_nobody_waiting() {
    let (sender, arrivals) = std::sync::mpsc::channel();
    let port = UdpPort::bind((Ipv4Addr::LOCALHOST, 0).into(), &UdpConfig::default()).expect("a port");
    let waker = port.waker();
    let calls = Calls::start(Ipv4Addr::LOCALHOST.into(), sender, waker).expect("a port");
    let connect = || {
        let stream = TcpStream::connect(calls.addr()).expect("it listens");
        stream.set_read_timeout(Some(LONG)).expect("a timeout");
        stream
    };
    let begun = Instant::now();
    let mut silent: Vec<_> = (0..3).map(|_| connect()).collect();
    let mut speaker = connect();
    let challenge: Challenge = FrameReader::new(&speaker).recv().expect("a challenge");
    let end = LinkEnd([1; LINK_END_LEN_BYTES]);
    let call = Call::new(GroupId(1), ChildIndex(2), [3; 16], end).prove(4, &challenge);
    send(&mut speaker, &call).expect("it is open");
    let Ok(Arrival::Far(caller)) = arrivals.recv_timeout(LONG) else { panic!("nobody has come") };
    assert!(begun.elapsed() < HELLO_LIMIT, "{:?}", begun.elapsed());
    assert_eq!((caller.challenge, caller.call), (challenge, call));
    assert!(caller.call.is_proven(4, &caller.challenge));
    for stream in &mut silent {
        let mut challenge = Vec::new();
        stream.read_to_end(&mut challenge).expect("hung up on");
        assert!(!challenge.is_empty());
    }
}

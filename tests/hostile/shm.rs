//! Attacks on the socket at which ranks of the same machine attach to their device.

use crate::testbed::{JobConfig, LONG, TestBed, Tools};
use crate::traffic::Random;
use rustix::net::{AddressFamily, SendFlags, SocketAddrUnix, SocketFlags, SocketType, connect, send, socket_with};
use std::os::fd::OwnedFd;
use std::time::Duration;
use sumac::Transport;
use sumac_hal::ids::{ChildIndex, GroupId};
use sumac_hal::shm::{AttachRefusal, Connection, Message, SocketError};

const OVER_SHM: JobConfig = JobConfig { transport: Transport::Shm, schedules: true };

/// Return the name of the device's socket.
pub(crate) fn socket_of(testbed: &TestBed<'_>) -> String {
    testbed.device_status("one").attach.expect("the device has a bus").socket.as_str().to_owned()
}

/// Open a raw connection; `None` if the socket has no room.
pub(crate) fn raw(name: &str) -> Option<OwnedFd> {
    let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
    let socket = socket_with(AddressFamily::UNIX, SocketType::SEQPACKET, flags, None).expect("a socket");
    let addr = SocketAddrUnix::new_abstract_name(name.as_bytes()).expect("a name");
    connect(&socket, &addr).ok().map(|()| socket)
}

pub(crate) fn garbage(tools: &Tools) {
    let mut testbed = TestBed::start(tools).with_job(OVER_SHM);
    let (before, name, mut random) = (testbed.count(), socket_of(&testbed), Random(4));
    let group = testbed.job_status("work").and_then(|job| job.tree?.ok()).expect("a tree").group;
    for nth in 0..300_usize {
        let Some(socket) = raw(&name) else { continue };
        for _ in 0..1 + nth % 3 {
            let mut bytes = random.bytes([0, 1, 31, 32, 33, 4_000][nth % 6]);
            if nth % 2 == 0 && bytes.len() >= 32 {
                // A valid header of any kind.
                bytes[..8].copy_from_slice(&[b'S', b'U', b'M', b'S', 1, 0, random.below(9) as u8, 0]);
            }
            // The device may have disconnected.
            let _ = send(&socket, &bytes, SendFlags::NOSIGNAL);
        }
    }
    for nth in 0..100_u16 {
        let hello = Message::Attach { group, child: ChildIndex(nth % 8), key: random.next() };
        let answer = attach(&name, &hello).expect("an answer");
        assert!(matches!(answer, Message::Refused { reason: AttachRefusal::UnknownChild }), "{hello:?}: {answer:?}");
        let hello = Message::Attach { group: GroupId(random.next() as u32), child: ChildIndex(0), key: 0 };
        let answer = attach(&name, &hello).expect("an answer");
        assert!(matches!(answer, Message::Refused { .. }), "{hello:?}: {answer:?}");
    }
    testbed.check_that_others_join("beside", OVER_SHM);
    testbed.check_unaffected(&before);
}

/// Send an attach request; return the first reply.
pub(crate) fn attach(name: &str, hello: &Message) -> Result<Message, SocketError> {
    let connection = Connection::open(name, LONG)?;
    connection.send(hello, None)?;
    connection.receive(Duration::from_secs(5)).map(|received| received.message)
}

pub(crate) fn idle_connections(tools: &Tools) {
    let mut testbed = TestBed::start(tools).with_job(OVER_SHM);
    let (before, name) = (testbed.count(), socket_of(&testbed));
    let open: Vec<OwnedFd> = (0..400).filter_map(|_| raw(&name)).collect();
    testbed.check_that_others_join("beside", OVER_SHM);
    let again: Vec<OwnedFd> = (0..400).filter_map(|_| raw(&name)).collect();
    testbed.check_that_others_join("beside-again", OVER_SHM);
    drop((open, again));
    testbed.check_unaffected(&before);
}

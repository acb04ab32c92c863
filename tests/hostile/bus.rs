//! Attacks on the socket where ranks of the same machine find their device.

use crate::place::{LONG, Place, Tools, Way};
use crate::strangers::Random;
use rustix::net::{AddressFamily, SendFlags, SocketAddrUnix, SocketFlags, SocketType, connect, send, socket_with};
use std::os::fd::OwnedFd;
use std::time::Duration;
use sumac::Attach;
use sumac_hal::ids::{ChildIndex, GroupId};
use sumac_hal::shm::{AttachRefusal, Connection, Message, SocketError};

const BY_REFERENCE: Way = Way { attach: Attach::Shm, schedules: true };

/// Where the device's ranks find it.
pub(crate) fn socket_of(place: &Place<'_>) -> String {
    place.device_status("one").bus.expect("the device has a bus").socket.as_str().to_owned()
}

/// A connection without anything that keeps its user from sending nonsense; `None` if there is no room for it.
fn raw(name: &str) -> Option<OwnedFd> {
    let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
    let socket = socket_with(AddressFamily::UNIX, SocketType::SEQPACKET, flags, None).expect("a socket");
    let addr = SocketAddrUnix::new_abstract_name(name.as_bytes()).expect("a name");
    connect(&socket, &addr).ok().map(|()| socket)
}

pub(crate) fn garbage(tools: &Tools) {
    let mut place = Place::start(tools).with_job(BY_REFERENCE);
    let (before, name, mut random) = (place.count(), socket_of(&place), Random(4));
    let group = place.job_status("work").and_then(|job| job.tree?.ok()).expect("a tree").group;
    for nth in 0..300_usize {
        let Some(socket) = raw(&name) else { continue };
        for _ in 0..1 + nth % 3 {
            let mut bytes = random.bytes([0, 1, 31, 32, 33, 4_000][nth % 6]);
            if nth % 2 == 0 && bytes.len() >= 32 {
                // Of this version, and of any kind.
                bytes[..8].copy_from_slice(&[b'S', b'U', b'M', b'S', 1, 0, random.below(9) as u8, 0]);
            }
            // It may be hung up on before.
            let _ = send(&socket, &bytes, SendFlags::NOSIGNAL);
        }
    }
    for nth in 0..100_u16 {
        let hello = Message::Attach { group, child: ChildIndex(nth % 8), key: random.next() };
        let answer = attach(&name, &hello).expect("an answer");
        assert!(matches!(answer, Message::Refused { reason: AttachRefusal::Stranger }), "{hello:?}: {answer:?}");
        let hello = Message::Attach { group: GroupId(random.next() as u32), child: ChildIndex(0), key: 0 };
        let answer = attach(&name, &hello).expect("an answer");
        assert!(matches!(answer, Message::Refused { .. }), "{hello:?}: {answer:?}");
    }
    place.check_that_others_join("beside", BY_REFERENCE);
    place.check_unhurt(&before);
}

/// Say hello to a device; returns what it says first.
pub(crate) fn attach(name: &str, hello: &Message) -> Result<Message, SocketError> {
    let connection = Connection::open(name, LONG)?;
    connection.send(hello, None)?;
    connection.receive(Duration::from_secs(5)).map(|received| received.message)
}

pub(crate) fn idle_connections(tools: &Tools) {
    let mut place = Place::start(tools).with_job(BY_REFERENCE);
    let (before, name) = (place.count(), socket_of(&place));
    let open: Vec<OwnedFd> = (0..400).filter_map(|_| raw(&name)).collect();
    place.check_that_others_join("beside", BY_REFERENCE);
    let again: Vec<OwnedFd> = (0..400).filter_map(|_| raw(&name)).collect();
    place.check_that_others_join("beside-again", BY_REFERENCE);
    drop((open, again));
    place.check_unhurt(&before);
}

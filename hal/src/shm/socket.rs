//! The Unix socket through which a rank attaches to a device and both hand memory over.
//!
//! The socket is in the abstract namespace: it has no file and disappears with its process. Messages are 32 bytes,
//! little-endian:
//!
//! | offset | size | field |
//! |---|---|---|
//! | 0 | 4 | magic "SUMS" |
//! | 4 | 2 | version, 1 |
//! | 6 | 2 | kind: 1 attach, 2 function, 3 memory, 4 refused, 5 bell, 6 redo, 7 arena, 8 withdrawn |
//! | 8 | 8 | attach: group (32 bits), child (16); memory, withdrawn: handle; refused: reason; bell: queue; redo, arena: byte offset in the memory |
//! | 16 | 8 | attach: key; redo: bytes of a slot (32 bits), slots (32); arena: its length in bytes |
//! | 24 | 8 | 0 |
//!
//! Functions, memory, bells, redo slots and arenas carry one file descriptor; the others carry none.
//!
//! A rank sends `attach`. The device answers with `refused`, or with the function, a bell for each of its queues, and
//! the redo slots of the rank's group. From then on only memory is handed over, and each side detects the end of the
//! other.
//!
//! A device that cannot access memory allocated by the rank ([`Features::ARENA`](crate::mmio::Features::ARENA)) hands
//! over an arena last; the rank allocates its memory there and hands over none. Such a socket may belong to a broker
//! instead of the device itself.

use super::memory_channel::MemoryChannel;
use super::peer::{Peer, PeerError};
use super::ready::readable;
use super::users::{DEVICE_USER_VARIABLE, DeviceUsers};
use crate::ids::{ChildIndex, GroupId};
pub use crate::mmio::admission::AttachRefusal;
use rustix::io::{Errno, fcntl_dupfd_cloexec, retry_on_intr};
use rustix::net::sockopt::{Timeout, set_socket_timeout};
use rustix::net::{
    AddressFamily, RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, ReturnFlags, SendAncillaryBuffer,
    SendAncillaryMessage, SendFlags, Shutdown, SocketAddrUnix, SocketFlags, SocketType, accept_with, bind, connect,
    listen, recvmsg, sendmsg, shutdown, socket_with,
};
use rustix::process::geteuid;
use std::io::{IoSlice, IoSliceMut};
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::time::{Duration, Instant};

const MESSAGE_LEN: usize = 32;
const MAGIC: [u8; 4] = *b"SUMS";
const VERSION: u16 = 1;

/// The maximum number of connections waiting to be accepted.
const BACKLOG: i32 = 128;

/// How long a device waits for a rank to receive a message. The socket buffers a few.
const SEND_LIMIT: Duration = Duration::from_secs(1);

/// A message on the socket.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub enum Message {
    /// From a rank, first: the child that it is, and the key that proves it.
    Attach {
        /// The group.
        group: GroupId,
        /// The child of the device's node.
        child: ChildIndex,
        /// The key of that link, from the controller.
        key: u64,
    },
    /// From the device: the rank's function. With a descriptor.
    Function,
    /// From a rank: memory to register under this handle. With a descriptor.
    Memory {
        /// What [`AdminCommand::Register`](crate::mmio::AdminCommand::Register) will call it.
        handle: u64,
    },
    /// From the device: the rank is refused.
    Refused {
        /// Why.
        reason: AttachRefusal,
    },
    /// From the device: the bell that wakes it ([`Bell`](super::Bell)). With a descriptor.
    Bell {
        /// The queue of the bell.
        queue: u32,
    },
    /// From the device: the group's redo slots, from which ranks read published results after the device has died. With
    /// a descriptor.
    Redo {
        /// Their offset in the memory, in bytes.
        offset_bytes: u64,
        /// The length of each slot in bytes.
        slot_len_bytes: u32,
        /// The number of slots.
        slots: u32,
    },
    /// From a device with [`Features::ARENA`](crate::mmio::Features::ARENA), last: the only memory that it can access.
    /// With a descriptor.
    Arena {
        /// Its offset in the memory, in bytes.
        offset_bytes: u64,
        /// Its length in bytes.
        len_bytes: u64,
    },
    /// Between ranks ([`MemoryChannel`](super::MemoryChannel)): the sender has freed memory that it handed over.
    Withdrawn {
        /// The handle under which it was handed over.
        handle: u64,
    },
}

/// A message, and the descriptor that came with it.
#[derive(Debug)]
pub struct Received {
    /// The message.
    pub message: Message,
    /// The descriptor; present exactly if the kind of message has one.
    pub file: Option<OwnedFd>,
}

/// Why an operation on the socket failed.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum SocketError {
    /// The name is taken or too long, or no process listens on it.
    #[error("device '{name}': {call}: {errno}")]
    Name {
        /// The device's name.
        name: String,
        /// The system call.
        call: &'static str,
        /// Why.
        errno: Errno,
    },
    /// The peer's process belongs to a user that is not accepted.
    #[error(
        "process {pid} belongs to user {uid}, with whom this process does not share memory: run device and ranks as one \
         user, run the device as root, or set {DEVICE_USER_VARIABLE} to the device's user for both"
    )]
    User {
        /// The process.
        pid: i32,
        /// Its user.
        uid: u32,
    },
    /// The peer's process cannot be watched.
    #[error(transparent)]
    Peer(#[from] PeerError),
    /// The peer has closed the connection.
    #[error("the peer closed the connection")]
    Closed,
    /// No message arrived in time, or the peer did not receive one.
    #[error("the peer sent or received nothing within {0:?}")]
    Timeout(Duration),
    /// The message is malformed, or its descriptor is missing or unexpected.
    #[error("malformed message, or a message of another version")]
    Malformed,
    /// A message arrived, but this process could not open its descriptor. The connection stays usable.
    #[error("out of file descriptors for a message that carries one: raise the limit of open files (`ulimit -n`)")]
    NoDescriptor {
        /// The message.
        message: Message,
    },
    /// A system call failed.
    #[error("{call}: {errno}")]
    System {
        /// The system call.
        call: &'static str,
        /// Why.
        errno: Errno,
    },
}

/// A device's listening socket.
#[derive(Debug)]
pub struct Listener {
    socket: OwnedFd,
    serves_all: bool,
}

/// A connection between a rank and a device.
#[derive(Debug)]
pub struct Connection {
    socket: OwnedFd,
    peer: Peer,
    send_limit: Duration,
}

fn open(name: &str) -> Result<(OwnedFd, SocketAddrUnix), SocketError> {
    let failed = |call| move |errno| SocketError::Name { name: name.into(), call, errno };
    let addr = SocketAddrUnix::new_abstract_name(name.as_bytes()).map_err(failed("name"))?;
    let socket = socket_with(AddressFamily::UNIX, SocketType::SEQPACKET, SocketFlags::CLOEXEC, None);
    Ok((socket.map_err(failed("socket"))?, addr))
}

impl Listener {
    /// Listen on a name in the abstract namespace of this network namespace.
    ///
    /// # Errors
    /// [`SocketError::Name`].
    pub fn bind(name: &str) -> Result<Self, SocketError> {
        let failed = |call| move |errno| SocketError::Name { name: name.into(), call, errno };
        let (socket, addr) = open(name)?;
        bind(&socket, &addr).map_err(failed("bind"))?;
        listen(&socket, BACKLOG).map_err(failed("listen"))?;
        Ok(Self { socket, serves_all: false })
    }

    /// Accept ranks of all users instead of only this process's user and root.
    #[must_use]
    pub fn serving_all(mut self, serves_all: bool) -> Self {
        self.serves_all = serves_all;
        self
    }

    /// Wait for the next rank; `None` if no rank has connected within `timeout`.
    ///
    /// # Errors
    /// [`SocketError`]: this rank was refused or has gone; accept the next one. After [`SocketError::System`] (no
    /// descriptors left), the next rank stays in the backlog.
    pub fn accept(&self, timeout: Duration) -> Result<Option<Connection>, SocketError> {
        if !wait(&self.socket, timeout)? {
            return Ok(None);
        }
        // A connection takes two descriptors, the second for the pidfd. Reserve it first, since an accepted rank that
        // finds no descriptor left could only be disconnected.
        let second = fcntl_dupfd_cloexec(&self.socket, 0);
        let second = second.map_err(|errno| SocketError::System { call: "fcntl(F_DUPFD_CLOEXEC)", errno })?;
        let socket = retry_on_intr(|| accept_with(&self.socket, SocketFlags::CLOEXEC));
        let socket = socket.map_err(|errno| SocketError::System { call: "accept", errno })?;
        drop(second);
        limit_sends(&socket, SEND_LIMIT)?;
        let (own, serves_all) = (geteuid().as_raw(), self.serves_all);
        Connection::new(socket, SEND_LIMIT, |rank| serves_all || rank == own || rank == 0).map(Some)
    }
}

impl AsFd for Listener {
    /// Readable when a rank waits to be accepted.
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.socket.as_fd()
    }
}

impl Connection {
    /// Connect to the device `name` if it belongs to this process's user or root; see [`Connection::open_of`].
    ///
    /// # Errors
    /// As [`Connection::open_of`].
    pub fn open(name: &str, limit: Duration) -> Result<Self, SocketError> {
        Self::open_of(name, limit, DeviceUsers::own())
    }

    /// Connect to the device `name` if it belongs to one of these users. Neither this call nor any [`Connection::send`]
    /// takes longer than `limit`, which must not be 0 (twice `limit` if interrupted by a signal).
    ///
    /// # Errors
    /// [`SocketError`]; [`SocketError::Timeout`] if the device does not accept, [`SocketError::User`] if it belongs to
    /// another user.
    pub fn open_of(name: &str, limit: Duration, users: DeviceUsers) -> Result<Self, SocketError> {
        let (socket, addr) = open(name)?;
        limit_sends(&socket, limit)?;
        match retry_within(limit, || connect(&socket, &addr)) {
            Ok(()) => Self::new(socket, limit, |device| users.admit(device)),
            Err(Errno::AGAIN) => Err(SocketError::Timeout(limit)),
            Err(errno) => Err(SocketError::Name { name: name.into(), call: "connect", errno }),
        }
    }

    fn new(socket: OwnedFd, send_limit: Duration, admits: impl FnOnce(u32) -> bool) -> Result<Self, SocketError> {
        let peer = Peer::of(&socket)?;
        if !admits(peer.uid()) {
            return Err(SocketError::User { pid: peer.pid(), uid: peer.uid() });
        }
        Ok(Self { socket, peer, send_limit })
    }

    /// Return the peer's process.
    pub fn peer(&self) -> &Peer {
        &self.peer
    }

    /// Close the connection, and keep the peer's process.
    pub fn into_peer(self) -> Peer {
        self.peer
    }

    /// Keep the connection for memory that is handed over later, apart from the peer's process.
    pub fn into_channel(self) -> (MemoryChannel, Peer) {
        (MemoryChannel::new(self.socket), self.peer)
    }

    /// Send a message, with a descriptor if its kind has one.
    ///
    /// # Errors
    /// [`SocketError`]; [`SocketError::Malformed`] if the descriptor is missing or unexpected.
    pub fn send(&self, message: &Message, file: Option<BorrowedFd<'_>>) -> Result<(), SocketError> {
        send(&self.socket, (message, file), (self.send_limit, SendFlags::empty()))
    }

    /// Close this side for sending, which the peer receives as the end of the connection; the peer may continue to
    /// send.
    ///
    /// # Errors
    /// [`SocketError::System`], also if the peer has gone.
    pub fn shutdown_write(&self) -> Result<(), SocketError> {
        shutdown(&self.socket, Shutdown::Write).map_err(|errno| SocketError::System { call: "shutdown", errno })
    }

    /// Wait for the next message.
    ///
    /// # Errors
    /// [`SocketError`]; after [`SocketError::Malformed`] do not trust the peer any more.
    pub fn receive(&self, timeout: Duration) -> Result<Received, SocketError> {
        receive(&self.socket, timeout)
    }
}

impl AsFd for Connection {
    /// Readable when a message waits or the peer has closed.
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.socket.as_fd()
    }
}

impl Message {
    const fn has_file(&self) -> bool {
        matches!(
            self,
            Self::Function | Self::Memory { .. } | Self::Bell { .. } | Self::Redo { .. } | Self::Arena { .. }
        )
    }

    fn emit(&self) -> [u8; MESSAGE_LEN] {
        let (kind, value, second) = match *self {
            Self::Attach { group, child, key } => (1_u16, u64::from(group.0) | u64::from(child.0) << 32, key),
            Self::Function => (2, 0, 0),
            Self::Memory { handle } => (3, handle, 0),
            Self::Refused { reason } => (4, reason as u64, 0),
            Self::Bell { queue } => (5, queue.into(), 0),
            Self::Redo { offset_bytes, slot_len_bytes, slots } => {
                (6, offset_bytes, u64::from(slot_len_bytes) | u64::from(slots) << 32)
            }
            Self::Arena { offset_bytes, len_bytes } => (7, offset_bytes, len_bytes),
            Self::Withdrawn { handle } => (8, handle, 0),
        };
        let mut bytes = [0; MESSAGE_LEN];
        bytes[..4].copy_from_slice(&MAGIC);
        bytes[4..6].copy_from_slice(&VERSION.to_le_bytes());
        bytes[6..8].copy_from_slice(&kind.to_le_bytes());
        bytes[8..16].copy_from_slice(&value.to_le_bytes());
        bytes[16..24].copy_from_slice(&second.to_le_bytes());
        bytes
    }

    fn parse(bytes: &[u8]) -> Option<Self> {
        let bytes: &[u8; MESSAGE_LEN] = bytes.first_chunk()?;
        let word = |at: usize| bytes[at..].first_chunk().map(|bytes| u64::from_le_bytes(*bytes));
        let (value, second) = (word(8)?, word(16)?);
        let message = match bytes[6] {
            1 => Self::Attach { group: GroupId(value as u32), child: ChildIndex((value >> 32) as u16), key: second },
            2 => Self::Function,
            3 => Self::Memory { handle: value },
            4 => Self::Refused { reason: AttachRefusal::from_wire(value)? },
            5 => Self::Bell { queue: value as u32 },
            6 => Self::Redo { offset_bytes: value, slot_len_bytes: second as u32, slots: (second >> 32) as u32 },
            7 => Self::Arena { offset_bytes: value, len_bytes: second },
            8 => Self::Withdrawn { handle: value },
            _ => return None,
        };
        // Checks magic, version and reserved bits in one comparison.
        (message.emit() == *bytes).then_some(message)
    }
}

/// Send a message, with a descriptor if its kind has one, within a limit that the socket or the flags set.
///
/// # Errors
/// As [`Connection::send`].
pub(super) fn send(
    socket: &OwnedFd,
    (message, file): (&Message, Option<BorrowedFd<'_>>),
    (limit, flags): (Duration, SendFlags),
) -> Result<(), SocketError> {
    if message.has_file() != file.is_some() {
        return Err(SocketError::Malformed);
    }
    let bytes = message.emit();
    let files: Vec<_> = file.into_iter().collect();
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(1))];
    let mut control = SendAncillaryBuffer::new(&mut space);
    if !files.is_empty() {
        // There is room for one.
        control.push(SendAncillaryMessage::ScmRights(&files));
    }
    let send = || sendmsg(socket, &[IoSlice::new(&bytes)], &mut control, flags | SendFlags::NOSIGNAL);
    match retry_within(limit, send) {
        Ok(_) => Ok(()),
        Err(Errno::AGAIN) => Err(SocketError::Timeout(limit)),
        Err(Errno::PIPE | Errno::CONNRESET) => Err(SocketError::Closed),
        Err(errno) => Err(SocketError::System { call: "sendmsg", errno }),
    }
}

/// Wait for the next message.
///
/// # Errors
/// As [`Connection::receive`].
pub(super) fn receive(socket: &OwnedFd, timeout: Duration) -> Result<Received, SocketError> {
    if !wait(socket, timeout)? {
        return Err(SocketError::Timeout(timeout));
    }
    let mut bytes = [0; MESSAGE_LEN + 1];
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(1))];
    let mut control = RecvAncillaryBuffer::new(&mut space);
    let received =
        retry_on_intr(|| recvmsg(socket, &mut [IoSliceMut::new(&mut bytes)], &mut control, RecvFlags::CMSG_CLOEXEC));
    let (len, is_cut) = match received {
        Ok(received) => (received.bytes, received.flags.contains(ReturnFlags::CTRUNC)),
        Err(Errno::CONNRESET) => (0, false),
        Err(errno) => return Err(SocketError::System { call: "recvmsg", errno }),
    };
    // The kernel closes descriptors beyond the first, for which there is no room; any that arrived close when
    // dropped.
    let mut files = control.drain().filter_map(|message| match message {
        RecvAncillaryMessage::ScmRights(files) => Some(files),
        _ => None,
    });
    let file = files.by_ref().flatten().next();
    match len {
        0 => Err(SocketError::Closed),
        MESSAGE_LEN => {
            let message = Message::parse(&bytes).ok_or(SocketError::Malformed)?;
            match (message.has_file(), file.is_some()) {
                (needs, has) if needs == has => Ok(Received { message, file }),
                (true, _) if is_cut => Err(SocketError::NoDescriptor { message }),
                _ => Err(SocketError::Malformed),
            }
        }
        _ => Err(SocketError::Malformed),
    }
}

/// Limit the time of calls that send, `connect` included: they fail with `AGAIN` after `limit`.
fn limit_sends(socket: &OwnedFd, limit: Duration) -> Result<(), SocketError> {
    let failed = |errno| SocketError::System { call: "setsockopt(SO_SNDTIMEO)", errno };
    set_socket_timeout(socket, Timeout::Send, Some(limit)).map_err(failed)
}

/// Repeat such a call when a signal interrupts it, until `limit` has passed.
fn retry_within<R>(limit: Duration, mut call: impl FnMut() -> Result<R, Errno>) -> Result<R, Errno> {
    let start = Instant::now();
    loop {
        match call() {
            Err(Errno::INTR) if start.elapsed() < limit => {}
            Err(Errno::INTR) => return Err(Errno::AGAIN),
            returned => return returned,
        }
    }
}

/// Wait until a socket is readable; false on timeout.
fn wait(socket: &OwnedFd, timeout: Duration) -> Result<bool, SocketError> {
    readable(socket, timeout).map_err(|errno| SocketError::System { call: "poll", errno })
}

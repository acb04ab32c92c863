//! The handshake with the device (`sumac_hal::shm`, socket): what a rank shows, and what it gets.

use super::arena::Arena;
use super::error::AttachError;
use super::far::{Far, Way};
use super::queue::Ends;
use super::redo::{REDO_HEAD_BYTES, REDO_MAX_BYTES, Redo};
use std::net::{IpAddr, SocketAddr};
use std::sync::Arc;
use std::time::Duration;
use sumac_hal::ids::{ChildIndex, Epoch, GroupId, Rank};
use sumac_hal::mmio::{Features, HostControl, Identity};
use sumac_hal::shm::{Bell, Connection, DeviceUsers, Function, Message, ReadOnly, Received};

/// How long the device may take to accept, and for each message.
pub(super) const ANSWER_TIMEOUT: Duration = Duration::from_secs(5);

/// What a device has to have.
pub(super) const NEEDED: Features =
    Features::BY_REFERENCE.union(Features::FENCE).union(Features::REDO).union(Features::STRAGGLERS);

/// A rank's place at its leaf device.
#[derive(Debug, Clone)]
pub struct Seating {
    /// The device's name, for messages.
    pub device: String,
    /// What it listens on.
    pub socket: String,
    /// Where and how to reach it on another host, instead.
    pub remote: Option<Remote>,
    /// The group.
    pub group: GroupId,
    /// Its epoch.
    pub epoch: Epoch,
    /// Which child of the device the rank is.
    pub child: ChildIndex,
    /// The key of that link.
    pub key: u64,
    /// Which rank of the group this is.
    pub rank: Rank,
    /// How many there are.
    pub ranks: u32,
    /// How many of them run on this machine.
    pub ranks_here: usize,
    /// The payload limit of a packet in this group in bytes.
    pub chunk_len_bytes: u16,
    /// The most chunks that the device takes in ahead of the oldest.
    pub window_max: u16,
    /// The version of the cost table.
    pub table_version: u32,
}

/// A leaf device on another host.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Remote {
    /// Where it lets ranks in.
    pub addr: SocketAddr,
    /// This rank's RDMA port, as `DEVICE[:PORT[:GID-INDEX]]` or `auto`.
    pub link: String,
    /// The address that the port's identifier should be.
    pub prefer: IpAddr,
}

/// What a device has given.
#[derive(Debug)]
pub(super) struct Attached {
    pub(super) way: Way,
    pub(super) function: Function,
    pub(super) identity: Identity,
    pub(super) admin: Ends,
    pub(super) data: Ends,
    /// Over shared memory.
    pub(super) redo: Option<Redo>,
    /// The only memory that the device reaches, if it does not reach all.
    pub(super) arena: Option<Arena>,
}

impl Attached {
    pub(super) fn open(seating: &Seating) -> Result<Self, AttachError> {
        match &seating.remote {
            Some(remote) => Far::attach(seating, remote),
            None => Self::open_near(seating),
        }
    }

    fn open_near(seating: &Seating) -> Result<Self, AttachError> {
        let users = DeviceUsers::from_env()?;
        let connection = Connection::open_of(&seating.socket, ANSWER_TIMEOUT, users)?;
        let Seating { group, child, key, .. } = *seating;
        connection.send(&Message::Attach { group, child, key }, None)?;
        let file = match next(&connection)? {
            Received { message: Message::Function, file: Some(file) } => file,
            other => return Err(unexpected(&other.message, "its function")),
        };
        let (function, identity) = Function::open(file)?;
        if !identity.features.contains(NEEDED) {
            return Err(AttachError::Features { has: identity.features, needs: NEEDED });
        }
        let queues = function.bar().queues();
        if queues != 2 {
            return Err(AttachError::Queues(queues));
        }
        let ends = |number| -> Result<Ends, AttachError> {
            let bell = match next(&connection)? {
                Received { message: Message::Bell { queue }, file: Some(file) } if queue == number => Bell::open(file),
                other => return Err(unexpected(&other.message, "the bell of the next queue")),
            };
            let queue = function.queue(number).ok_or(AttachError::Queues(queues))?;
            Ok(Ends::new(queue, bell))
        };
        let (admin, data) = (ends(0)?, ends(1)?);
        let redo = match next(&connection)? {
            Received { message: Message::Redo { offset_bytes, slot_len_bytes, slots }, file: Some(file) } => {
                let needs = REDO_HEAD_BYTES as u32 + 2 * u32::from(seating.chunk_len_bytes);
                if slots == 0 || slot_len_bytes < needs {
                    return Err(AttachError::Redo { slots, slot_len_bytes, needs });
                }
                let memory = ReadOnly::open(file, REDO_MAX_BYTES)?;
                // A record that can't be read would pass for one that is not there, and inputs for intact.
                let len_bytes = u64::from(slot_len_bytes) * u64::from(slots);
                let last = offset_bytes.checked_add(len_bytes - 1);
                if !last.is_some_and(|last| memory.read(last, &mut [0])) {
                    return Err(AttachError::RedoMemory { slots, slot_len_bytes, offset_bytes });
                }
                let chunk_len_bytes = seating.chunk_len_bytes.into();
                Redo {
                    memory,
                    offset_bytes,
                    slot_len_bytes: slot_len_bytes.into(),
                    slots: slots.into(),
                    chunk_len_bytes,
                    frozen: None,
                }
            }
            other => return Err(unexpected(&other.message, "the redo slots")),
        };
        let arena = match identity.features.contains(Features::ARENA) {
            false => None,
            true => match next(&connection)? {
                Received { message: Message::Arena { offset_bytes, len_bytes }, file: Some(file) } => {
                    Some(Arena::new(file, offset_bytes, len_bytes))
                }
                other => return Err(unexpected(&other.message, "the arena")),
            },
        };
        function.bar().set_control(HostControl::ENABLE);
        let (way, redo) = (Way::Near(Arc::new(connection)), Some(redo));
        Ok(Self { way, function, identity, admin, data, redo, arena })
    }
}

fn next(connection: &Connection) -> Result<Received, AttachError> {
    match connection.receive(ANSWER_TIMEOUT)? {
        Received { message: Message::Refused { reason }, .. } => Err(AttachError::Refused(reason)),
        received => Ok(received),
    }
}

fn unexpected(message: &Message, expected: &'static str) -> AttachError {
    let said = match message {
        Message::Attach { .. } => "that it attaches",
        Message::Function => "its function",
        Message::Memory { .. } => "memory",
        Message::Bell { .. } => "a bell",
        Message::Redo { .. } => "the redo slots",
        Message::Arena { .. } => "the arena",
        _ => "something else",
    };
    AttachError::Order(said, expected)
}

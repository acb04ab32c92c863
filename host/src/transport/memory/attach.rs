//! Attaching to a device: what a rank sends, and the function, queues and memory that it receives (`sumac_hal::shm`,
//! socket).

use super::arena::Arena;
use super::error::AttachError;
use super::queue::HostQueue;
use super::redo::{REDO_HEAD_BYTES, REDO_MAX_BYTES, Redo};
use super::remote::{DeviceLink, RemoteLink};
use crate::wait_policy::WaitPolicy;
use std::net::{IpAddr, SocketAddr};
use std::sync::Arc;
use std::time::Duration;
use sumac_hal::ids::{ChildIndex, Epoch, GroupId, Rank};
use sumac_hal::mmio::{Features, HostControl, Identity};
use sumac_hal::shm::{Bell, Connection, DeviceUsers, Function, Message, ReadOnly, Received};
use sumac_hal::traffic_class::TrafficClass;

/// Limit for the device to accept the connection, and for each of its messages.
pub(super) const ANSWER_TIMEOUT: Duration = Duration::from_secs(5);

/// Features that a device must offer.
pub(super) const NEEDED: Features =
    Features::ZERO_COPY.union(Features::FENCE).union(Features::REDO).union(Features::STRAGGLERS);

/// How a rank attaches to its leaf device.
#[derive(Debug, Clone)]
pub struct AttachParams {
    /// The device's name, for error messages and logs.
    pub device: String,
    /// The name of the socket that it listens on.
    pub socket: String,
    /// Set if the device is on another host: how to reach it. `socket` is not used then.
    pub remote: Option<Remote>,
    /// The group.
    pub group: GroupId,
    /// The group's epoch.
    pub epoch: Epoch,
    /// The rank's child index at the device.
    pub child: ChildIndex,
    /// The key of the link between the two.
    pub key: u64,
    /// The rank.
    pub rank: Rank,
    /// The number of ranks in the group.
    pub ranks: u32,
    /// The number of ranks on this machine.
    pub ranks_here: usize,
    /// How the rank waits for the device.
    pub wait_policy: WaitPolicy,
    /// The payload limit of a packet in this group in bytes.
    pub chunk_len_bytes: u16,
    /// The maximum number of chunks that the device accepts ahead of the oldest open one.
    pub window_max: u16,
    /// The version of the cost table.
    pub table_version: u32,
}

/// A leaf device on another host.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Remote {
    /// The address at which it accepts ranks.
    pub addr: SocketAddr,
    /// This rank's RDMA port, as `DEVICE[:PORT[:GID-INDEX]]` or `auto`.
    pub link: String,
    /// The address that the port's GID should have.
    pub prefer: IpAddr,
    /// The traffic class of the connection, and of the packets over RDMA.
    pub traffic_class: TrafficClass,
}

/// Everything that a device provides on attach.
#[derive(Debug)]
pub(super) struct Attached {
    pub(super) device_link: DeviceLink,
    pub(super) function: Function,
    pub(super) identity: Identity,
    pub(super) admin: HostQueue,
    pub(super) data: HostQueue,
    /// Redo slots, readable only over shared memory.
    pub(super) redo: Option<Redo>,
    /// The only memory that the device can reach, if it cannot reach all.
    pub(super) arena: Option<Arena>,
}

impl Attached {
    pub(super) fn open(params: &AttachParams) -> Result<Self, AttachError> {
        match &params.remote {
            Some(remote) => RemoteLink::attach(params, remote),
            None => Self::open_local(params),
        }
    }

    fn open_local(params: &AttachParams) -> Result<Self, AttachError> {
        let users = DeviceUsers::from_env()?;
        let connection = Connection::open_of(&params.socket, ANSWER_TIMEOUT, users)?;
        let AttachParams { group, child, key, .. } = *params;
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
        let host_queue = |number| -> Result<HostQueue, AttachError> {
            let bell = match next(&connection)? {
                Received { message: Message::Bell { queue }, file: Some(file) } if queue == number => Bell::open(file),
                other => return Err(unexpected(&other.message, "the next queue's doorbell")),
            };
            let queue = function.queue(number).ok_or(AttachError::Queues(queues))?;
            Ok(HostQueue::new(queue, bell))
        };
        let (admin, data) = (host_queue(0)?, host_queue(1)?);
        let redo = match next(&connection)? {
            Received { message: Message::Redo { offset_bytes, slot_len_bytes, slots }, file: Some(file) } => {
                let needs = REDO_HEAD_BYTES as u32 + 2 * u32::from(params.chunk_len_bytes);
                if slots == 0 || slot_len_bytes < needs {
                    return Err(AttachError::Redo { slots, slot_len_bytes, needs });
                }
                let memory = ReadOnly::open(file, REDO_MAX_BYTES)?;
                // An unreadable record would pass for an unpublished result, and overwritten inputs for intact ones.
                let len_bytes = u64::from(slot_len_bytes) * u64::from(slots);
                let last = offset_bytes.checked_add(len_bytes - 1);
                if !last.is_some_and(|last| memory.read(last, &mut [0])) {
                    return Err(AttachError::RedoMemory { slots, slot_len_bytes, offset_bytes });
                }
                let chunk_len_bytes = params.chunk_len_bytes.into();
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
        let (device_link, redo) = (DeviceLink::Local(Arc::new(connection)), Some(redo));
        Ok(Self { device_link, function, identity, admin, data, redo, arena })
    }
}

fn next(connection: &Connection) -> Result<Received, AttachError> {
    match connection.receive(ANSWER_TIMEOUT)? {
        Received { message: Message::Refused { reason }, .. } => Err(AttachError::Refused(reason)),
        received => Ok(received),
    }
}

fn unexpected(message: &Message, expected: &'static str) -> AttachError {
    let received = match message {
        Message::Attach { .. } => "an attach request",
        Message::Function => "its function",
        Message::Memory { .. } => "memory",
        Message::Bell { .. } => "a doorbell",
        Message::Redo { .. } => "the redo slots",
        Message::Arena { .. } => "the arena",
        _ => "an unknown message",
    };
    AttachError::UnexpectedMessage(received, expected)
}

//! A leaf device on another host. Its function lies in this process's own memory, where a [`Carrier`] plays the device
//! by messages. The device itself reads and writes memory that is exposed to it by RDMA; see [`sumac_hal::remote`] for
//! why this is safe.
//!
//! Invariants:
//! - The device can only read a caller's memory; everything that it writes lands in the bounce buffer.
//! - `landed` holds the offsets of complete results of chunks that are open. What was announced for an offset is
//!   forgotten when the next chunk gets it.

use super::attach::{ANSWER_TIMEOUT, AttachParams, Attached, NEEDED, Remote};
use super::error::{AttachError, ProtocolViolation, RegisterError};
use super::queue::HostQueue;
use rustix::event::{EventfdFlags, PollFd, PollFlags, Timespec, eventfd, poll};
use std::io::{ErrorKind, Read};
use std::net::TcpStream;
use std::os::fd::OwnedFd;
use std::sync::Arc;
use std::time::{Duration, Instant};
use sumac_hal::ctrl::{FrameReader, StreamError, send};
use sumac_hal::dma::{Capabilities, Profile, RegionKey};
use sumac_hal::mmio::{
    COMPLETION_WORDS, DEPTH_MIN, DMA_ALIGNMENT_MAX_BYTES, Features, FunctionConfig, HostControl, Identity,
    SUBMISSION_WORDS,
};
use sumac_hal::remote::handshake::{AttachReply, AttachRequest, Attachment, Challenge, VERSION};
use sumac_hal::remote::{Access, Carrier, CarrierError, CarrierEvent, LinkFailure, Memory, RankLink};
use sumac_hal::shm::{Bell, Connection, Function, FunctionQueue, Message, Peer, Region, SocketError};

/// The maximum ring depth: as many answers as a rank's link has room for.
const DEPTH_MAX: u32 = 1024;

/// The maximum number of announced offsets: one for each cache line of the landing area.
const LANDED_MAX: usize = 1 << 16;

/// Polls that suffice to process everything that had arrived: each handles some hundreds of arrivals.
const LAST_TURNS: usize = 8;

/// The device's engine as a rank sees it.
const ENGINE: Capabilities = Capabilities::new(Profile::CopyOnly, 1, 1);

/// How the device is reached.
#[derive(Debug)]
pub(super) enum DeviceLink {
    /// Over shared memory, on this machine.
    Local(Arc<Connection>),
    /// Over RDMA, on another host.
    Remote(Box<RemoteLink>),
}

/// This rank's end of a device on another host.
#[derive(Debug)]
pub(super) struct RemoteLink {
    // Dropped before the memory that it exposes.
    rdma: Box<dyn RankLink>,
    carrier: Carrier<SUBMISSION_WORDS, COMPLETION_WORDS>,
    /// The connection of the handshake; it closes when the device's process ends.
    stream: TcpStream,
    /// Wakes this side from other threads.
    event: Arc<OwnedFd>,
    /// Offsets at which results have landed.
    landed: Vec<u32>,
    /// Exposed memory: its handle or, once registered, its key, with the remote key that exposes it.
    exposed: Vec<(Handle, u32)>,
    lost: Option<CarrierError>,
    is_trusted: bool,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Handle {
    Pending(u64),
    Registered(RegionKey),
}

fn failed(why: impl ToString) -> AttachError {
    AttachError::Remote(why.to_string())
}

impl From<LinkFailure> for AttachError {
    fn from(failure: LinkFailure) -> Self {
        Self::Remote(failure.0)
    }
}

impl RemoteLink {
    /// Connect to the device, and authenticate both sides.
    pub(super) fn attach(params: &AttachParams, remote: &Remote) -> Result<Attached, AttachError> {
        let mut link = sumac_hal::rank_link::open(&remote.link, remote.prefer, remote.traffic_class)?;
        let (stream, attachment) = call(params, remote, &mut *link)?;
        link.connect(&attachment.end)?;
        let found = attachment.alignment_bytes;
        if !found.is_power_of_two() || found > DMA_ALIGNMENT_MAX_BYTES {
            return Err(AttachError::Alignment { found, max: DMA_ALIGNMENT_MAX_BYTES });
        }
        if !(DEPTH_MIN..=DEPTH_MAX).contains(&attachment.depth) {
            return Err(failed(format!(
                "the device offers rings of {} entries; {DEPTH_MIN} to {DEPTH_MAX} are supported",
                attachment.depth
            )));
        }
        let (boot_id, features, dma) = (attachment.boot_id, NEEDED | Features::HEARTBEAT, ENGINE.with_alignment(found));
        let function =
            Function::create(&FunctionConfig { boot_id, features, queues: 2, depth: attachment.depth, dma })?;
        // It has the queues that it was created with.
        let queues: [FunctionQueue; 2] = [0, 1].map(|index| function.queue(index).expect("as many as asked for"));
        let carrier = Carrier::new(
            queues.each_ref().map(|queue| queue.submissions.clone()),
            queues.each_ref().map(|queue| queue.completions.clone()),
        );
        let bell = || Bell::create().map_err(failed);
        let [admin, data] = queues;
        let (admin, data) = (HostQueue::new(admin, bell()?), HostQueue::new(data, bell()?));
        let event = Arc::new(eventfd(0, EventfdFlags::NONBLOCK | EventfdFlags::CLOEXEC).map_err(failed)?);
        function.bar().set_control(HostControl::ENABLE);
        let remote = Self {
            rdma: link,
            carrier,
            stream,
            event,
            landed: Vec::with_capacity(attachment.depth as usize),
            exposed: Vec::new(),
            lost: None,
            is_trusted: true,
        };
        let identity = Identity { boot_id, version_minor: 0, features, dma };
        Ok(Attached {
            device_link: DeviceLink::Remote(Box::new(remote)),
            function,
            identity,
            admin,
            data,
            redo: None,
            arena: None,
        })
    }

    /// Exchange messages; returns whether there were any.
    pub(super) fn poll(&mut self, function: &Function) -> bool {
        if self.lost.is_some() {
            return false;
        }
        let (landed, mut is_invalid) = (&mut self.landed, false);
        let polled = self.carrier.poll(&mut *self.rdma, |event| match event {
            // A result that is written again after a failure is announced again.
            CarrierEvent::Landed(at) if landed.contains(&at) => {}
            CarrierEvent::Landed(at) if landed.len() < LANDED_MAX => landed.push(at),
            CarrierEvent::Heartbeat(beat) => function.bar().set_heartbeat(beat),
            // More offsets than exist, or memory, which only ranks expose.
            _ => is_invalid = true,
        });
        match polled {
            Ok(any) if !is_invalid => any,
            Ok(_) => {
                self.lost = Some(CarrierError::Flood);
                true
            }
            Err(error) => {
                crate::log::debug!(%error, "link to the device lost");
                self.lost = Some(error);
                true
            }
        }
    }

    pub(super) const fn is_lost(&self) -> bool {
        self.lost.is_some()
    }

    /// Sleep until a message arrives, this side is woken, or the deadline has passed.
    pub(super) fn sleep(&mut self, function: &Function, deadline: Instant) {
        self.rdma.arm();
        if self.poll(function) || self.carrier.has_work() || self.is_lost() {
            return;
        }
        let timeout = Timespec::try_from(deadline.saturating_duration_since(Instant::now())).ok();
        let file = self.rdma.file();
        let mut fds = [PollFd::from_borrowed_fd(file, PollFlags::IN), PollFd::new(&self.event, PollFlags::IN)];
        // If interrupted, the caller's loop checks again.
        let _ = poll(&mut fds, timeout.as_ref());
        if !fds[1].revents().is_empty() {
            let _ = rustix::io::read(&self.event, &mut [0; 8]);
        }
    }

    /// Close the link. Afterwards nothing that the device has begun takes effect here.
    pub(super) fn fence(&mut self) -> Result<(), LinkFailure> {
        let fenced = self.rdma.fence();
        self.exposed.clear();
        self.is_trusted = fenced.is_ok();
        fenced
    }

    /// Return whether the complete result of the chunk that is open at this offset has landed.
    pub(super) fn has_landed(&self, at: u64) -> bool {
        self.is_trusted && u32::try_from(at).is_ok_and(|at| self.landed.contains(&at))
    }
}

/// The rank's side of the handshake.
fn call(
    params: &AttachParams,
    remote: &Remote,
    link: &mut dyn RankLink,
) -> Result<(TcpStream, Attachment), AttachError> {
    let mut stream = TcpStream::connect_timeout(&remote.addr, ANSWER_TIMEOUT)
        .map_err(|error| failed(format!("the device does not answer at {}: {error}", remote.addr)))?;
    let stream_error = |error: StreamError| failed(format!("the device at {}: {error}", remote.addr));
    let io = |error: std::io::Error| stream_error(error.into());
    remote.traffic_class.apply(&stream).map_err(io)?;
    stream.set_nodelay(true).map_err(io)?;
    stream.set_read_timeout(Some(ANSWER_TIMEOUT)).map_err(io)?;
    let mut reader = FrameReader::new(stream.try_clone().map_err(io)?);
    let challenge: Challenge = reader.recv().map_err(stream_error)?;
    if challenge.version != VERSION {
        return Err(failed(format!(
            "the device uses protocol version {}; this is version {VERSION}",
            challenge.version
        )));
    }
    let mut number = [0; 16];
    rustix::rand::getrandom(&mut number, rustix::rand::GetRandomFlags::empty()).map_err(failed)?;
    let call = AttachRequest::new(params.group, params.child, number, link.end()).prove(params.key, &challenge);
    send(&mut stream, &call).map_err(stream_error)?;
    match reader.recv().map_err(stream_error)? {
        AttachReply::Refused(reason) => Err(AttachError::Refused(reason)),
        AttachReply::Accepted(attachment) if attachment.is_proven(params.key, (&challenge, &call)) => {
            stream.set_nonblocking(true).map_err(io)?;
            Ok((stream, attachment))
        }
        AttachReply::Accepted(_) => {
            Err(failed(format!("the peer at {} is not the leaf device: it cannot prove the key", remote.addr)))
        }
    }
}

impl DeviceLink {
    /// Return the eventfd that wakes a wait for a device on another host.
    pub(super) fn event(&self) -> Option<Arc<OwnedFd>> {
        match self {
            Self::Local(_) => None,
            Self::Remote(remote) => Some(Arc::clone(&remote.event)),
        }
    }

    /// Return the connection to a device on this machine.
    pub(super) fn connection(&self) -> Option<&Arc<Connection>> {
        match self {
            Self::Local(connection) => Some(connection),
            Self::Remote(_) => None,
        }
    }

    /// Return the device's process, if it runs on this machine.
    pub(super) fn peer(&self) -> Option<&Peer> {
        match self {
            Self::Local(connection) => Some(connection.peer()),
            Self::Remote(_) => None,
        }
    }

    /// Give the device access to memory under a handle; `lands` if results may land in it.
    pub(super) fn hand_over(&mut self, handle: u64, region: &Region, lands: bool) -> Result<(), RegisterError> {
        let remote = match self {
            Self::Remote(remote) => remote,
            Self::Local(connection) => {
                let sent = connection.send(&Message::Memory { handle }, Some(region.file()));
                return sent.map_err(|error| match error {
                    SocketError::Closed => RegisterError::DeviceLost,
                    error => RegisterError::Socket(error.to_string()),
                });
            }
        };
        // A separate mapping, which the link keeps as long as the device can reach it.
        let socket = |why: &dyn ToString| RegisterError::Socket(why.to_string());
        let file = region.file().try_clone_to_owned().map_err(|error| socket(&error))?;
        let memory = Region::open(file, u64::MAX)?;
        let access = if lands { Access::Land } else { Access::Read };
        let region = remote.rdma.expose(memory, access).map_err(|failure| socket(&failure))?;
        remote.exposed.push((Handle::Pending(handle), region.rkey));
        remote.carrier.hand_over(Memory { handle, region, lands });
        Ok(())
    }

    /// Record the key under which exposed memory was registered. `None`: the device does not have it.
    pub(super) fn bind_key(&mut self, handle: u64, key: Option<RegionKey>) {
        let Self::Remote(remote) = self else { return };
        let Some(at) = remote.exposed.iter().position(|(known, _)| *known == Handle::Pending(handle)) else { return };
        match key {
            Some(key) => remote.exposed[at].0 = Handle::Registered(key),
            None => {
                let (_, rkey) = remote.exposed.swap_remove(at);
                remote.rdma.withdraw(rkey);
            }
        }
    }

    /// Withdraw a region that the device has released.
    pub(super) fn withdraw(&mut self, key: RegionKey) {
        let Self::Remote(remote) = self else { return };
        let RemoteLink { exposed, rdma, .. } = &mut **remote;
        exposed.retain(|(known, rkey)| {
            let keep = *known != Handle::Registered(key);
            if !keep {
                rdma.withdraw(*rkey);
            }
            keep
        });
    }

    /// Forget announcements for these offsets, which now belong to another chunk.
    pub(super) fn forget_landed(&mut self, start: u64, end: u64) {
        if let Self::Remote(remote) = self {
            remote.landed.retain(|at| !(start..end).contains(&u64::from(*at)));
        }
    }

    /// Ask the device for a heartbeat.
    pub(super) fn ping(&mut self) {
        if let Self::Remote(remote) = self {
            remote.carrier.request_heartbeat();
        }
    }

    /// Return whether the device has closed the connection.
    pub(super) fn is_disconnected(&mut self) -> Result<bool, ProtocolViolation> {
        match self {
            Self::Local(connection) => match connection.receive(Duration::ZERO) {
                Err(SocketError::Timeout(_)) => Ok(false),
                Err(SocketError::Malformed) | Ok(_) => Err(ProtocolViolation::UnexpectedMessage),
                Err(_) => Ok(true),
            },
            Self::Remote(remote) => match remote.stream.read(&mut [0]) {
                Ok(0) => Ok(true),
                Ok(_) => Err(ProtocolViolation::UnexpectedMessage),
                Err(error) => Ok(!matches!(error.kind(), ErrorKind::WouldBlock | ErrorKind::Interrupted)),
            },
        }
    }

    /// Process everything that a device on another host had sent, even after its link has ended.
    pub(super) fn drain(&mut self) {
        let Self::Remote(remote) = self else { return };
        let RemoteLink { carrier, rdma, landed, .. } = &mut **remote;
        for _ in 0..LAST_TURNS {
            // The loss of the link itself is already known.
            let _ = carrier.poll(&mut **rdma, |event| {
                if let CarrierEvent::Landed(at) = event
                    && landed.len() < LANDED_MAX
                {
                    landed.push(at);
                }
            });
        }
    }
}

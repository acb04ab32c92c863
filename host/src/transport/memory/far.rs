//! A leaf device on another host: its function is in this process's own memory, and a [`Carrier`] plays the device there, by
//! messages; what the device reads and writes itself is opened to it ([`sumac_hal::remote`], which has the argument).
//!
//! Invariants:
//! - The device gets a caller's memory to read and nothing else; what it writes lands in the bounce buffer.
//! - `landed` has the places of results that are whole and of chunks that are open: what was announced before a place was given
//!   to the next chunk is forgotten with that.

use super::attach::{ANSWER_TIMEOUT, Attached, NEEDED, Remote, Seating};
use super::error::{AttachError, Breach, RegisterError};
use super::queue::Ends;
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
use sumac_hal::remote::handshake::{Answer, Call, Challenge, Seat, VERSION};
use sumac_hal::remote::{self, Access, Carrier, CarrierError, Heard, LinkFailure, Memory, RankLink};
use sumac_hal::shm::{Bell, Connection, Function, FunctionQueue, Message, Peer, Region, SocketError};

/// The deepest rings of a device: as many answers as a rank's link has places for what lands.
const DEPTH_MAX: u32 = 1024;

/// Places that can be announced: one for each cache line of a landing area.
const LANDED_MAX: usize = 1 << 16;

/// Turns after which nothing is left that had come: each takes some hundreds of arrivals.
const LAST_TURNS: usize = 8;

/// The device's engine, as far as a rank has to know it.
const ENGINE: Capabilities = Capabilities::new(Profile::CopyOnly, 1, 1);

/// How the device is reached.
#[derive(Debug)]
pub(super) enum Way {
    /// It shares memory with this process.
    Near(Arc<Connection>),
    /// It is on another host.
    Far(Box<Far>),
}

/// What is of a device on another host.
#[derive(Debug)]
pub(super) struct Far {
    // Before the memory that it has opened goes.
    link: Box<dyn RankLink>,
    carrier: Carrier<SUBMISSION_WORDS, COMPLETION_WORDS>,
    /// That of the set-up. It hangs up when the device's process ends.
    stream: TcpStream,
    /// Wakes this side from other threads.
    event: Arc<OwnedFd>,
    /// Where results have landed.
    landed: Vec<u32>,
    /// Memory that the device has: the handle, and then the region, with what opens it.
    exposed: Vec<(Handle, u32)>,
    lost: Option<CarrierError>,
    is_trusted: bool,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Handle {
    Told(u64),
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

impl Far {
    /// Call the device, prove who this is, and connect.
    pub(super) fn attach(seating: &Seating, remote: &Remote) -> Result<Attached, AttachError> {
        let mut link = remote::open(&remote.link, remote.prefer)?;
        let (stream, seat) = call(seating, remote, &mut *link)?;
        link.connect(&seat.end)?;
        let found = seat.alignment_bytes;
        if !found.is_power_of_two() || found > DMA_ALIGNMENT_MAX_BYTES {
            return Err(AttachError::Alignment { found, max: DMA_ALIGNMENT_MAX_BYTES });
        }
        if !(DEPTH_MIN..=DEPTH_MAX).contains(&seat.depth) {
            return Err(failed(format!(
                "rings of {} places, where {DEPTH_MIN} to {DEPTH_MAX} are to be had",
                seat.depth
            )));
        }
        let (boot_id, features, dma) = (seat.boot_id, NEEDED | Features::HEARTBEAT, ENGINE.with_alignment(found));
        let function = Function::create(&FunctionConfig { boot_id, features, queues: 2, depth: seat.depth, dma })?;
        // It has the queues that it was made with.
        let queues: [FunctionQueue; 2] = [0, 1].map(|index| function.queue(index).expect("as many as asked for"));
        let carrier = Carrier::new(
            queues.each_ref().map(|queue| queue.submissions.clone()),
            queues.each_ref().map(|queue| queue.completions.clone()),
        );
        let bell = || Bell::create().map_err(failed);
        let [admin, data] = queues;
        let (admin, data) = (Ends::new(admin, bell()?), Ends::new(data, bell()?));
        let event = Arc::new(eventfd(0, EventfdFlags::NONBLOCK | EventfdFlags::CLOEXEC).map_err(failed)?);
        function.bar().set_control(HostControl::ENABLE);
        let far = Self {
            link,
            carrier,
            stream,
            event,
            landed: Vec::with_capacity(seat.depth as usize),
            exposed: Vec::new(),
            lost: None,
            is_trusted: true,
        };
        let identity = Identity { boot_id, version_minor: 0, features, dma };
        Ok(Attached { way: Way::Far(Box::new(far)), function, identity, admin, data, redo: None, arena: None })
    }

    /// Have a turn at the messages; true if there were any.
    pub(super) fn turn(&mut self, function: &Function) -> bool {
        if self.lost.is_some() {
            return false;
        }
        let (landed, mut is_rude) = (&mut self.landed, false);
        let turned = self.carrier.turn(&mut *self.link, |heard| match heard {
            // Written again, after a failure, it is announced again.
            Heard::Landed(at) if landed.contains(&at) => {}
            Heard::Landed(at) if landed.len() < LANDED_MAX => landed.push(at),
            Heard::Beat(beat) => function.bar().set_heartbeat(beat),
            // More places than there are, or memory, which only ranks hand over.
            _ => is_rude = true,
        });
        match turned {
            Ok(any) if !is_rude => any,
            Ok(_) => {
                self.lost = Some(CarrierError::Flood);
                true
            }
            Err(error) => {
                tracing::debug!(%error, "the link to the device has ended");
                self.lost = Some(error);
                true
            }
        }
    }

    pub(super) const fn is_lost(&self) -> bool {
        self.lost.is_some()
    }

    /// Sleep until something comes, somebody wakes this side, or the deadline has passed.
    pub(super) fn sleep(&mut self, function: &Function, deadline: Instant) {
        self.link.arm();
        if self.turn(function) || self.carrier.has_news() || self.is_lost() {
            return;
        }
        let timeout = Timespec::try_from(deadline.saturating_duration_since(Instant::now())).ok();
        let file = self.link.file();
        let mut fds = [PollFd::from_borrowed_fd(file, PollFlags::IN), PollFd::new(&self.event, PollFlags::IN)];
        // Interrupted: the caller's loop looks again.
        let _ = poll(&mut fds, timeout.as_ref());
        if !fds[1].revents().is_empty() {
            let _ = rustix::io::read(&self.event, &mut [0; 8]);
        }
    }

    /// End the link: afterwards nothing that the device has begun takes effect here.
    pub(super) fn fence(&mut self) -> Result<(), LinkFailure> {
        let fenced = self.link.fence();
        self.exposed.clear();
        self.is_trusted = fenced.is_ok();
        fenced
    }

    /// Tell whether a whole result has landed at this place, of the chunk that is open there.
    pub(super) fn has_landed(&self, at: u64) -> bool {
        self.is_trusted && u32::try_from(at).is_ok_and(|at| self.landed.contains(&at))
    }
}

/// The set-up of a connection, as the rank.
fn call(seating: &Seating, remote: &Remote, link: &mut dyn RankLink) -> Result<(TcpStream, Seat), AttachError> {
    let mut stream = TcpStream::connect_timeout(&remote.addr, ANSWER_TIMEOUT)
        .map_err(|error| failed(format!("the device does not answer at {}: {error}", remote.addr)))?;
    let said = |error: StreamError| failed(format!("the device at {}: {error}", remote.addr));
    let io = |error: std::io::Error| said(error.into());
    stream.set_nodelay(true).map_err(io)?;
    stream.set_read_timeout(Some(ANSWER_TIMEOUT)).map_err(io)?;
    let mut reader = FrameReader::new(stream.try_clone().map_err(io)?);
    let challenge: Challenge = reader.recv().map_err(said)?;
    if challenge.version != VERSION {
        return Err(failed(format!("the device speaks version {}, and this is version {VERSION}", challenge.version)));
    }
    let mut number = [0; 16];
    rustix::rand::getrandom(&mut number, rustix::rand::GetRandomFlags::empty()).map_err(failed)?;
    let call = Call::new(seating.group, seating.child, number, link.end()).prove(seating.key, &challenge);
    send(&mut stream, &call).map_err(said)?;
    match reader.recv().map_err(said)? {
        Answer::Refused(reason) => Err(AttachError::Refused(reason)),
        Answer::Seat(seat) if seat.is_proven(seating.key, (&challenge, &call)) => {
            stream.set_nonblocking(true).map_err(io)?;
            Ok((stream, seat))
        }
        Answer::Seat(_) => Err(failed(format!("who answers at {} is not the leaf device", remote.addr))),
    }
}

impl Way {
    /// Return what wakes a wait for a device on another host.
    pub(super) fn event(&self) -> Option<Arc<OwnedFd>> {
        match self {
            Self::Near(_) => None,
            Self::Far(far) => Some(Arc::clone(&far.event)),
        }
    }

    /// Return the connection to a device that shares memory.
    pub(super) fn near(&self) -> Option<&Arc<Connection>> {
        match self {
            Self::Near(connection) => Some(connection),
            Self::Far(_) => None,
        }
    }

    /// Return the device's process, if it is one of this machine.
    pub(super) fn peer(&self) -> Option<&Peer> {
        match self {
            Self::Near(connection) => Some(connection.peer()),
            Self::Far(_) => None,
        }
    }

    /// Let the device know memory by a handle; results land in it or not.
    pub(super) fn hand_over(&mut self, handle: u64, region: &Region, lands: bool) -> Result<(), RegisterError> {
        let far = match self {
            Self::Far(far) => far,
            Self::Near(connection) => {
                let sent = connection.send(&Message::Memory { handle }, Some(region.file()));
                return sent.map_err(|error| match error {
                    SocketError::Closed => RegisterError::Gone,
                    error => RegisterError::Socket(error.to_string()),
                });
            }
        };
        // A mapping of its own, which the link keeps as long as the device reaches it.
        let socket = |why: &dyn ToString| RegisterError::Socket(why.to_string());
        let file = region.file().try_clone_to_owned().map_err(|error| socket(&error))?;
        let memory = Region::open(file, u64::MAX)?;
        let access = if lands { Access::Land } else { Access::Read };
        let region = far.link.expose(memory, access).map_err(|failure| socket(&failure))?;
        far.exposed.push((Handle::Told(handle), region.rkey));
        far.carrier.hand_over(Memory { handle, region, lands });
        Ok(())
    }

    /// Note what memory that was handed over is registered as; `None`: the device does not have it.
    pub(super) fn note(&mut self, handle: u64, key: Option<RegionKey>) {
        let Self::Far(far) = self else { return };
        let Some(at) = far.exposed.iter().position(|(known, _)| *known == Handle::Told(handle)) else { return };
        match key {
            Some(key) => far.exposed[at].0 = Handle::Registered(key),
            None => {
                let (_, rkey) = far.exposed.swap_remove(at);
                far.link.withdraw(rkey);
            }
        }
    }

    /// Take a region away that the device has let go of.
    pub(super) fn withdraw(&mut self, key: RegionKey) {
        let Self::Far(far) = self else { return };
        let Far { exposed, link, .. } = &mut **far;
        exposed.retain(|(known, rkey)| {
            let stays = *known != Handle::Registered(key);
            if !stays {
                link.withdraw(*rkey);
            }
            stays
        });
    }

    /// Forget what was announced of these places: they are another chunk's.
    pub(super) fn forget_landed(&mut self, start: u64, end: u64) {
        if let Self::Far(far) = self {
            far.landed.retain(|at| !(start..end).contains(&u64::from(*at)));
        }
    }

    /// Ask the device to show that it goes on.
    pub(super) fn ask(&mut self) {
        if let Self::Far(far) = self {
            far.carrier.ask();
        }
    }

    /// Tell whether the device has hung up.
    pub(super) fn is_gone(&mut self) -> Result<bool, Breach> {
        match self {
            Self::Near(connection) => match connection.receive(Duration::ZERO) {
                Err(SocketError::Timeout(_)) => Ok(false),
                Err(SocketError::Malformed) | Ok(_) => Err(Breach::Message),
                Err(_) => Ok(true),
            },
            Self::Far(far) => match far.stream.read(&mut [0]) {
                Ok(0) => Ok(true),
                Ok(_) => Err(Breach::Message),
                Err(error) => Ok(!matches!(error.kind(), ErrorKind::WouldBlock | ErrorKind::Interrupted)),
            },
        }
    }

    /// Take in all that had come of a device on another host, also after the end of its link.
    pub(super) fn drain(&mut self) {
        let Self::Far(far) = self else { return };
        let Far { carrier, link, landed, .. } = &mut **far;
        for _ in 0..LAST_TURNS {
            // The end itself is known.
            let _ = carrier.turn(&mut **link, |heard| {
                if let Heard::Landed(at) = heard
                    && landed.len() < LANDED_MAX
                {
                    landed.push(at);
                }
            });
        }
    }
}

//! All connections of a controller, on one thread: it accepts, reads what has come, hands it to the state, and sends what
//! waits in the peers' [`Outbox`]es.
//!
//! Nothing here waits for a peer. Who does not say who it is, does not end a message, does not read, or sends what is no
//! message is hung up on; what each and all may hold is in [`Limits`].
//!
//! A connection that ends takes its membership or its device along, whatever ended it. Those that end together are closed
//! before anybody is told, so that the dead are not told of the dead.

use super::limits::{Limits, NameKind, REQUEST_LEN_MAX, check_name};
use super::line::{Frames, Line, Outbox, Sending};
use super::proto::{ClientReply, ClientRequest, JoinRefusal};
use super::state::{Client, Served};
use super::{DeviceSession, Shared};
use rustix::event::{Timespec, epoll};
use std::collections::HashMap;
use std::io::{self, ErrorKind, Read};
use std::net::{Shutdown, TcpListener, TcpStream};
use std::os::fd::OwnedFd;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::{Duration, Instant};
use sumac_hal::ctrl::{Announce, Envelope, FrameBuffer, FrameError, Greeting, MAX_MESSAGE_LEN, Response};
use sumac_hal::ids::Rank;

const LISTENER: u64 = 0;
const WAKEUP: u64 = 1;
const FIRST_CONN: u64 = 2;

/// What the system buffers towards one peer, in bytes; it doubles that.
const SEND_BUFFER_BYTES: usize = 32 * 1024;

/// The longest greeting in bytes: a device with all its shards.
const GREETING_LEN_MAX: usize = 8 * 1024;

/// How many connections beyond the limit are told so.
const TURNED_AWAY_MAX: usize = 64;

/// How long they may take to hear it.
const TURN_AWAY_LIMIT: Duration = Duration::from_secs(2);

/// How long nobody is accepted after the system had no descriptor for it.
const ACCEPT_PAUSE: Duration = Duration::from_millis(100);

/// How many are accepted before others have their turn.
const ACCEPTS_A_TURN: usize = 256;

/// How many events are taken at a time: all connections that end together, if they can be.
const EVENTS_MAX: usize = 32_768;

/// How often deadlines are looked at.
const SWEEP_EVERY: Duration = Duration::from_millis(100);

/// Who a peer is.
#[derive(Debug)]
enum Peer {
    /// It has not said so.
    Unknown,
    Device(Arc<DeviceSession>),
    /// With the job and rank that it has joined as.
    Client(Arc<Client>, Option<(String, Rank)>),
    /// One too many, which is being told.
    TurnedAway,
}

#[derive(Debug)]
struct Conn {
    stream: TcpStream,
    inbox: FrameBuffer,
    outbox: Arc<Outbox>,
    peer: Peer,
    /// When it came, or said something whole last.
    heard_at: Instant,
    /// Since when it has read nothing of what waits for it.
    blocked_since: Option<Instant>,
}

/// Why a connection ends.
#[derive(Debug, thiserror::Error)]
enum Ended {
    #[error("closed by the peer")]
    Closed,
    #[error("{0}")]
    Io(#[from] io::Error),
    #[error("{0}")]
    Frame(#[from] FrameError),
    #[error("hung up on")]
    HungUp,
    #[error("it has not said in time who it is")]
    Greeting,
    #[error("it has asked for nothing, or not ended a message, in time")]
    Idle,
    #[error("it does not read what it is sent")]
    Stalled,
    #[error("all peers together have begun messages of more bytes than the controller keeps, and it of the most")]
    Input,
    #[error("all peers together do not read more bytes than the controller keeps, and it the most")]
    Output,
    #[error("it was refused as a device")]
    Refused,
}

/// The connections.
pub(super) struct Connections {
    shared: Arc<Shared>,
    listener: TcpListener,
    epoll: OwnedFd,
    conns: HashMap<u64, Conn>,
    next: u64,
    turned_away: usize,
    /// What waits to be sent to all, in bytes.
    output_bytes: Arc<AtomicUsize>,
    /// Parts of messages that have come.
    input_bytes: usize,
    /// Those that have asked for a report since the last turn.
    reports: Vec<Arc<Client>>,
    /// When accepting goes on, where the system had no descriptor.
    accepts_at: Option<Instant>,
    swept_at: Instant,
    buffer: Vec<u8>,
}

impl Connections {
    pub(super) fn new(shared: Arc<Shared>, listener: TcpListener) -> io::Result<Self> {
        listener.set_nonblocking(true)?;
        let epoll = epoll::create(epoll::CreateFlags::CLOEXEC)?;
        epoll::add(&epoll, &listener, epoll::EventData::new_u64(LISTENER), epoll::EventFlags::IN)?;
        epoll::add(&epoll, shared.wakeup.fd(), epoll::EventData::new_u64(WAKEUP), epoll::EventFlags::IN)?;
        Ok(Self {
            shared,
            listener,
            epoll,
            conns: HashMap::new(),
            next: FIRST_CONN,
            turned_away: 0,
            output_bytes: Arc::default(),
            input_bytes: 0,
            reports: Vec::new(),
            accepts_at: None,
            swept_at: Instant::now(),
            buffer: vec![0; 64 * 1024],
        })
    }

    /// Serve until the controller has ended, and let go of everybody then.
    pub(super) fn run(mut self) {
        let mut events = Vec::new();
        while !self.shared.has_ended() {
            if let Err(error) = self.turn(&mut events) {
                // None of its causes goes away by itself: there is no epoll any more.
                tracing::error!(%error, "the controller can't wait for its connections");
                return;
            }
        }
        for conn in self.conns.values() {
            // What was said last, as far as it goes.
            let _ = conn.outbox.flush(&conn.stream);
        }
    }

    fn limits(&self) -> &Limits {
        &self.shared.config.limits
    }

    /// Wait for something to happen, and deal with all that has.
    fn turn(&mut self, events: &mut Vec<epoll::Event>) -> io::Result<()> {
        self.wait(events)?;
        let mut ended = Vec::new();
        for event in events.drain(..) {
            let (data, flags) = (event.data, event.flags);
            match data.u64() {
                LISTENER => self.accept()?,
                WAKEUP => {}
                id => {
                    let is_readable = flags.intersects(
                        epoll::EventFlags::IN
                            | epoll::EventFlags::HUP
                            | epoll::EventFlags::ERR
                            | epoll::EventFlags::RDHUP,
                    );
                    let read = if is_readable { self.read(id) } else { Ok(()) };
                    if let Err(why) = read.and_then(|()| self.flush(id)) {
                        ended.push((id, why));
                    }
                    self.shed_input();
                }
            }
        }
        self.end(ended);
        // Who asks has seen what ended before: it is no more in the report.
        self.shared.ask_for_reports(&mut self.reports);
        let noted = self.shared.wakeup.take().into_iter();
        let ended = noted.filter_map(|id| self.flush(id).err().map(|why| (id, why))).collect();
        self.end(ended);
        self.shed_output();
        self.sweep()
    }

    fn wait(&self, events: &mut Vec<epoll::Event>) -> io::Result<()> {
        let is_quiet = self.conns.is_empty() && self.accepts_at.is_none();
        let limit = Timespec { tv_sec: 0, tv_nsec: SWEEP_EVERY.subsec_nanos().into() };
        events.reserve(EVENTS_MAX.min(self.conns.len() + 2));
        let spare = rustix::buffer::spare_capacity(events);
        match epoll::wait(&self.epoll, spare, (!is_quiet).then_some(&limit)) {
            Ok(_) | Err(rustix::io::Errno::INTR) => Ok(()),
            Err(error) => Err(error.into()),
        }
    }

    fn accept(&mut self) -> io::Result<()> {
        for _ in 0..ACCEPTS_A_TURN {
            match self.listener.accept() {
                Ok((stream, _)) if self.shared.stopping() => drop(stream),
                Ok((stream, _)) => {
                    if let Err(error) = self.take_in(stream) {
                        tracing::debug!(%error, "a connection could not be taken in");
                    }
                }
                Err(error) if error.kind() == ErrorKind::WouldBlock => return Ok(()),
                Err(error) if matches!(error.kind(), ErrorKind::Interrupted | ErrorKind::ConnectionAborted) => {}
                Err(error) => {
                    // Who waits there would be announced again at once: nothing is accepted for a while instead.
                    tracing::warn!(%error, connections = self.conns.len(), "no connection can be accepted now");
                    self.accepts_at = Some(Instant::now() + ACCEPT_PAUSE);
                    epoll::delete(&self.epoll, &self.listener)?;
                    return Ok(());
                }
            }
        }
        Ok(())
    }

    fn take_in(&mut self, stream: TcpStream) -> io::Result<()> {
        let limit = self.limits().connections;
        let is_one_too_many = self.conns.len() - self.turned_away >= limit;
        if is_one_too_many && self.turned_away >= TURNED_AWAY_MAX {
            return Err(io::Error::other(format!("there are {limit} already")));
        }
        stream.set_nonblocking(true)?;
        stream.set_nodelay(true)?;
        // What waits is kept here, where it counts, and not in the system, where it does not.
        rustix::net::sockopt::set_socket_send_buffer_size(&stream, SEND_BUFFER_BYTES)?;
        let id = self.next;
        self.next += 1;
        epoll::add(&self.epoll, &stream, epoll::EventData::new_u64(id), epoll::EventFlags::IN)?;
        let wakeup = Arc::clone(&self.shared.wakeup);
        let outbox = Arc::new(Outbox::new(id, self.limits().peer_output_bytes, Arc::clone(&self.output_bytes), wakeup));
        let peer = if is_one_too_many { Peer::TurnedAway } else { Peer::Unknown };
        if is_one_too_many {
            self.turned_away += 1;
            let refusal = JoinRefusal::Limit { what: "connections".into(), limit: limit as u64 };
            if let Ok(frames) = Frames::of(&ClientReply::Refused(refusal)) {
                outbox.put(&[frames]);
            }
        }
        let inbox = FrameBuffer::new(GREETING_LEN_MAX);
        let conn = Conn { stream, inbox, outbox, peer, heard_at: Instant::now(), blocked_since: None };
        self.conns.insert(id, conn);
        Ok(())
    }

    /// Read what has come, and do what it asks for.
    fn read(&mut self, id: u64) -> Result<(), Ended> {
        let Some(conn) = self.conns.get_mut(&id) else { return Ok(()) };
        let len = match (&conn.stream).read(&mut self.buffer) {
            Ok(0) => return Err(Ended::Closed),
            Ok(len) => len,
            Err(error) if matches!(error.kind(), ErrorKind::WouldBlock | ErrorKind::Interrupted) => return Ok(()),
            Err(error) => return Err(error.into()),
        };
        if matches!(conn.peer, Peer::TurnedAway) {
            return Ok(());
        }
        let before = conn.inbox.len();
        conn.inbox.push(&self.buffer[..len]);
        let heard = conn.hear(&self.shared, &mut self.reports);
        self.input_bytes = self.input_bytes + conn.inbox.len() - before;
        heard
    }

    /// Hang up on those that have begun messages of the most bytes, if all together are more than the controller keeps: not
    /// on who has added the last of them.
    fn shed_input(&mut self) {
        let limit = self.limits().input_bytes;
        if self.input_bytes <= limit {
            return;
        }
        let (mut left, mut ended) = (self.input_bytes, Vec::new());
        for (bytes, id) in most_first(self.conns.iter().map(|(id, conn)| (conn.inbox.len(), *id))) {
            if left <= limit / 4 * 3 {
                break;
            }
            left -= bytes;
            ended.push((id, Ended::Input));
        }
        self.end(ended);
    }

    /// The same of those that do not read what waits for them.
    fn shed_output(&mut self) {
        let limit = self.limits().output_bytes;
        let is_over = |limit| self.output_bytes.load(Ordering::Acquire) > limit;
        if !is_over(limit) {
            return;
        }
        let blocked = self.conns.iter().filter(|(_, conn)| conn.blocked_since.is_some());
        let mut ended = Vec::new();
        for (_, id) in most_first(blocked.map(|(id, conn)| (conn.outbox.waiting_bytes(), *id))) {
            if !is_over(limit / 4 * 3) {
                break;
            }
            // What others wait for, too, stays.
            self.conns[&id].outbox.close();
            tracing::warn!(limit, "peers do not read what they are sent: one of them is hung up on");
            ended.push((id, Ended::Output));
        }
        self.end(ended);
    }

    /// Send what waits.
    fn flush(&mut self, id: u64) -> Result<(), Ended> {
        let Some(conn) = self.conns.get_mut(&id) else { return Ok(()) };
        let sending = conn.outbox.flush(&conn.stream);
        let was_blocked = conn.blocked_since.is_some();
        match sending {
            Sending::Empty => conn.blocked_since = None,
            Sending::Blocked { has_moved } if has_moved || !was_blocked => conn.blocked_since = Some(Instant::now()),
            Sending::Blocked { .. } => {}
            Sending::Over => return Err(Ended::HungUp),
        }
        if was_blocked != conn.blocked_since.is_some() {
            let write = if was_blocked { epoll::EventFlags::empty() } else { epoll::EventFlags::OUT };
            let data = epoll::EventData::new_u64(id);
            epoll::modify(&self.epoll, &conn.stream, data, epoll::EventFlags::IN | write).map_err(io::Error::from)?;
        }
        Ok(())
    }

    /// Deal with what is due.
    fn sweep(&mut self) -> io::Result<()> {
        let now = Instant::now();
        if self.accepts_at.is_some_and(|at| at <= now) {
            self.accepts_at = None;
            epoll::add(&self.epoll, &self.listener, epoll::EventData::new_u64(LISTENER), epoll::EventFlags::IN)?;
        }
        if now.duration_since(self.swept_at) >= SWEEP_EVERY {
            self.swept_at = now;
            let limits = &self.shared.config.limits;
            let due = |(id, conn): (&u64, &Conn)| Some((*id, conn.due(limits, now)?));
            let ended = self.conns.iter().filter_map(due).collect();
            self.end(ended);
        }
        Ok(())
    }

    /// Let go of these: first of all of them, then of what they stood for.
    fn end(&mut self, ended: Vec<(u64, Ended)>) {
        let mut gone = Vec::with_capacity(ended.len());
        for (id, why) in ended {
            let Some(conn) = self.conns.remove(&id) else { continue };
            conn.outbox.close();
            self.input_bytes -= conn.inbox.len();
            tracing::debug!(peer = ?conn.stream.peer_addr(), %why, "connection ended");
            // The descriptor leaves the epoll set as it is closed, unless it was inherited.
            let _ = epoll::delete(&self.epoll, &conn.stream);
            let _ = conn.stream.shutdown(Shutdown::Both);
            match conn.peer {
                Peer::TurnedAway => self.turned_away -= 1,
                Peer::Unknown => {}
                peer => gone.push(peer),
            }
        }
        let (mut devices, mut clients) = (Vec::new(), Vec::new());
        for peer in gone {
            match peer {
                Peer::Device(session) => devices.push(session),
                Peer::Client(client, Some(place)) => clients.push((client, place)),
                _ => {}
            }
        }
        if !clients.is_empty() {
            self.shared.lock().depart_all(clients);
        }
        for session in devices {
            session.end();
            self.shared.lock().remove_device(&session);
            tracing::info!(device = session.name(), "device gone");
        }
    }
}

impl Conn {
    /// Take in the messages that are whole.
    fn hear(&mut self, shared: &Arc<Shared>, reports: &mut Vec<Arc<Client>>) -> Result<(), Ended> {
        loop {
            let is_heard = match &mut self.peer {
                Peer::TurnedAway => false,
                Peer::Unknown => match self.inbox.take_message()? {
                    Some(greeting) => {
                        self.peer = greet(shared, greeting, &self.outbox)?;
                        let is_device = matches!(self.peer, Peer::Device(_));
                        self.inbox.limit(if is_device { MAX_MESSAGE_LEN } else { REQUEST_LEN_MAX });
                        true
                    }
                    None => false,
                },
                Peer::Device(session) => match self.inbox.take_message::<Envelope<Response>>()? {
                    Some(response) => {
                        session.take(response);
                        true
                    }
                    None => false,
                },
                Peer::Client(client, place) => match self.inbox.take_message::<ClientRequest>()? {
                    Some(request) => {
                        if let Served::Report = serve(shared, request, client, place)? {
                            reports.push(Arc::clone(client));
                        }
                        true
                    }
                    None => false,
                },
            };
            if !is_heard {
                return Ok(());
            }
            self.heard_at = Instant::now();
        }
    }

    /// Return why it is to end by now, if so.
    fn due(&self, limits: &Limits, now: Instant) -> Option<Ended> {
        let silent = now.saturating_duration_since(self.heard_at);
        let blocked = self.blocked_since.map(|since| now.saturating_duration_since(since));
        if blocked.is_some_and(|blocked| blocked >= limits.stalled) {
            return Some(Ended::Stalled);
        }
        match &self.peer {
            Peer::Unknown => (silent >= limits.greeting).then_some(Ended::Greeting),
            Peer::TurnedAway => (silent >= TURN_AWAY_LIMIT).then_some(Ended::HungUp),
            Peer::Client(_, None) => (silent >= limits.idle).then_some(Ended::Idle),
            Peer::Client(..) | Peer::Device(_) => {
                (!self.inbox.is_empty() && silent >= limits.idle).then_some(Ended::Idle)
            }
        }
    }
}

/// Sort connections by what they hold, the most first.
fn most_first(held: impl Iterator<Item = (usize, u64)>) -> Vec<(usize, u64)> {
    let mut held: Vec<_> = held.filter(|(bytes, _)| *bytes > 0).collect();
    held.sort_unstable_by(|one, other| other.cmp(one));
    held
}

/// Take in a peer that has said who it is.
fn greet(shared: &Arc<Shared>, greeting: Greeting, outbox: &Arc<Outbox>) -> Result<Peer, Ended> {
    let line = || Box::new(Arc::clone(outbox));
    match greeting {
        Greeting::Device(announce) => {
            if let Err(why) = check_announce(&announce) {
                tracing::warn!(%why, "a device is refused");
                return Err(Ended::Refused);
            }
            let session = Arc::new(DeviceSession::on(announce, line()));
            if let Err(why) = shared.lock().add_device(&shared.config, &session) {
                tracing::warn!(device = session.name(), %why, "a device is refused");
                return Err(Ended::Refused);
            }
            tracing::info!(device = session.name(), boot_id = session.announce.boot_id.0, "device connected");
            // Welcomes it: the device knows then that it is registered.
            session.hello();
            Ok(Peer::Device(session))
        }
        _ => Ok(Peer::Client(Arc::new(Client::new(line())), None)),
    }
}

/// Check what a device says of itself, as far as it is shown.
fn check_announce(announce: &Announce) -> Result<(), super::limits::BadName> {
    check_name(NameKind::Fabric, "device", &announce.name)?;
    match &announce.bus {
        Some(bus) => check_name(NameKind::Fabric, "machine", &bus.machine),
        None => Ok(()),
    }
}

/// Do what a client asks for.
fn serve(
    shared: &Arc<Shared>,
    request: ClientRequest,
    client: &Arc<Client>,
    place: &mut Option<(String, Rank)>,
) -> Result<Served, Ended> {
    let mut state = shared.lock();
    if shared.stopping() {
        return Err(Ended::HungUp);
    }
    Ok(state.serve(&shared.config, request, client, place))
}

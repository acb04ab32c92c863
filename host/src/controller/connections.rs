//! The thread that serves all connections: it accepts, reads messages, hands them to the state, and flushes the peers'
//! [`Outbox`]es.
//!
//! It never blocks on a peer. A peer that sends no handshake, leaves a message incomplete, does not read or sends
//! malformed data is disconnected. [`Limits`] bounds what each peer and all peers together may hold.
//!
//! When a connection ends, for whatever reason, its membership or device ends with it. Connections that end together
//! are all closed before anyone is notified, so that lost ranks are not notified of each other.

use super::limits::{Limits, NameKind, REQUEST_LEN_MAX, check_name};
use super::outbox::{FlushStatus, Frames, MessageSink, Outbox};
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
use sumac_hal::ctrl::{
    Announce, Envelope, FrameBuffer, FrameError, Hello, MAX_MESSAGE_LEN, Rejection, Request, Response,
};
use sumac_hal::ids::Rank;

const LISTENER: u64 = 0;
const NOTIFIER: u64 = 1;
const FIRST_CONN: u64 = 2;

/// The send buffer of a socket, in bytes; the kernel doubles it.
const SEND_BUFFER_BYTES: usize = 32 * 1024;

/// The maximum length of a handshake in bytes: fits a device with all its shards.
const HELLO_LEN_MAX: usize = 8 * 1024;

/// How many connections beyond the limit are accepted to be told so.
const TURNED_AWAY_MAX: usize = 64;

/// How long such a connection may take to read the refusal.
const TURN_AWAY_TIMEOUT: Duration = Duration::from_secs(2);

/// How long to stop accepting after the system ran out of file descriptors.
const ACCEPT_PAUSE: Duration = Duration::from_millis(100);

/// How many connections to accept before serving the others.
const ACCEPTS_PER_POLL: usize = 256;

/// How many events to take at a time: enough to see connections that end together in one batch.
const EVENTS_MAX: usize = 32_768;

/// How often deadlines are checked.
const SWEEP_INTERVAL: Duration = Duration::from_millis(100);

/// The role of a peer.
#[derive(Debug)]
enum Peer {
    /// The handshake is outstanding.
    Unknown,
    Device(Arc<DeviceSession>),
    /// A client, and the job and rank that it has joined as.
    Client(Arc<Client>, Option<(String, Rank)>),
    /// Beyond the connection limit; being refused.
    TurnedAway,
}

#[derive(Debug)]
struct Conn {
    stream: TcpStream,
    inbox: FrameBuffer,
    outbox: Arc<Outbox>,
    peer: Peer,
    /// When it connected or last completed a message.
    active_at: Instant,
    /// Since when it has read nothing although output is queued.
    blocked_since: Option<Instant>,
}

/// Why a connection ends.
#[derive(Debug, thiserror::Error)]
enum CloseReason {
    #[error("closed by the peer")]
    Closed,
    #[error("{0}")]
    Io(#[from] io::Error),
    #[error("{0}")]
    Frame(#[from] FrameError),
    #[error("disconnected by the controller")]
    Disconnected,
    #[error("no handshake within the time limit")]
    Greeting,
    #[error("idle, or sending one message, for longer than the limit")]
    Idle,
    #[error("it does not read its input")]
    Stalled,
    #[error("incomplete messages of all peers exceed the limit, and this peer's are the longest")]
    Input,
    #[error("output queued for all peers exceeds the limit, and this peer's queue is the longest")]
    Output,
}

/// All connections, and the state of their thread.
pub(super) struct Connections {
    shared: Arc<Shared>,
    listener: TcpListener,
    epoll: OwnedFd,
    conns: HashMap<u64, Conn>,
    next: u64,
    turned_away: usize,
    /// Bytes queued for all peers.
    output_bytes: Arc<AtomicUsize>,
    /// Bytes of incomplete messages from all peers.
    input_bytes: usize,
    /// Clients that have requested a report since the last poll.
    reports: Vec<Arc<Client>>,
    /// When to accept again after the system ran out of file descriptors.
    accepts_at: Option<Instant>,
    swept_at: Instant,
    buffer: Vec<u8>,
}

impl Connections {
    pub(super) fn new(shared: Arc<Shared>, listener: TcpListener) -> io::Result<Self> {
        listener.set_nonblocking(true)?;
        let epoll = epoll::create(epoll::CreateFlags::CLOEXEC)?;
        epoll::add(&epoll, &listener, epoll::EventData::new_u64(LISTENER), epoll::EventFlags::IN)?;
        epoll::add(&epoll, shared.notifier.fd(), epoll::EventData::new_u64(NOTIFIER), epoll::EventFlags::IN)?;
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

    /// Serve until the controller has stopped, then close all connections.
    pub(super) fn run(mut self) {
        let mut events = Vec::new();
        while !self.shared.has_ended() {
            if let Err(error) = self.poll(&mut events) {
                // Not recoverable: epoll itself has failed.
                tracing::error!(%error, "cannot poll connections; the controller stops serving");
                return;
            }
        }
        for conn in self.conns.values() {
            // Best effort: send the last messages.
            let _ = conn.outbox.flush(&conn.stream);
        }
    }

    fn limits(&self) -> &Limits {
        &self.shared.config.limits
    }

    /// Wait for events and handle them.
    fn poll(&mut self, events: &mut Vec<epoll::Event>) -> io::Result<()> {
        self.wait(events)?;
        let mut ended = Vec::new();
        for event in events.drain(..) {
            let (data, flags) = (event.data, event.flags);
            match data.u64() {
                LISTENER => self.accept()?,
                NOTIFIER => {}
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
        // Queue reports only now, so that they no longer show connections that ended before the request.
        self.shared.queue_reports(&mut self.reports);
        let noted = self.shared.notifier.take_ready().into_iter();
        let ended = noted.filter_map(|id| self.flush(id).err().map(|why| (id, why))).collect();
        self.end(ended);
        self.shed_output();
        self.sweep()
    }

    fn wait(&self, events: &mut Vec<epoll::Event>) -> io::Result<()> {
        let is_quiet = self.conns.is_empty() && self.accepts_at.is_none();
        let limit = Timespec { tv_sec: 0, tv_nsec: SWEEP_INTERVAL.subsec_nanos().into() };
        events.reserve(EVENTS_MAX.min(self.conns.len() + 2));
        let spare = rustix::buffer::spare_capacity(events);
        match epoll::wait(&self.epoll, spare, (!is_quiet).then_some(&limit)) {
            Ok(_) | Err(rustix::io::Errno::INTR) => Ok(()),
            Err(error) => Err(error.into()),
        }
    }

    fn accept(&mut self) -> io::Result<()> {
        for _ in 0..ACCEPTS_PER_POLL {
            match self.listener.accept() {
                Ok((stream, _)) if self.shared.stopping() => drop(stream),
                Ok((stream, _)) => {
                    if let Err(error) = self.register(stream) {
                        tracing::debug!(%error, "cannot accept a connection");
                    }
                }
                Err(error) if error.kind() == ErrorKind::WouldBlock => return Ok(()),
                Err(error) if matches!(error.kind(), ErrorKind::Interrupted | ErrorKind::ConnectionAborted) => {}
                Err(error) => {
                    // epoll would report the pending connection again at once, so stop accepting for a while.
                    tracing::warn!(%error, connections = self.conns.len(), "cannot accept; raise the open file limit");
                    self.accepts_at = Some(Instant::now() + ACCEPT_PAUSE);
                    epoll::delete(&self.epoll, &self.listener)?;
                    return Ok(());
                }
            }
        }
        Ok(())
    }

    fn register(&mut self, stream: TcpStream) -> io::Result<()> {
        let limit = self.limits().connections;
        let is_one_too_many = self.conns.len() - self.turned_away >= limit;
        if is_one_too_many && self.turned_away >= TURNED_AWAY_MAX {
            return Err(io::Error::other(format!("there are already {limit}, the limit")));
        }
        stream.set_nonblocking(true)?;
        stream.set_nodelay(true)?;
        // Keep the backlog in the outbox, where it counts towards the limits, instead of in the kernel.
        rustix::net::sockopt::set_socket_send_buffer_size(&stream, SEND_BUFFER_BYTES)?;
        let id = self.next;
        self.next += 1;
        epoll::add(&self.epoll, &stream, epoll::EventData::new_u64(id), epoll::EventFlags::IN)?;
        let notifier = Arc::clone(&self.shared.notifier);
        let outbox =
            Arc::new(Outbox::new(id, self.limits().peer_output_bytes, Arc::clone(&self.output_bytes), notifier));
        let peer = if is_one_too_many { Peer::TurnedAway } else { Peer::Unknown };
        if is_one_too_many {
            self.turned_away += 1;
            let refusal = JoinRefusal::Limit { what: "connections".into(), limit: limit as u64 };
            if let Ok(frames) = Frames::of(&ClientReply::Refused(refusal)) {
                outbox.put(&[frames]);
            }
        }
        let inbox = FrameBuffer::new(HELLO_LEN_MAX);
        let conn = Conn { stream, inbox, outbox, peer, active_at: Instant::now(), blocked_since: None };
        self.conns.insert(id, conn);
        Ok(())
    }

    /// Read from a connection and handle complete messages.
    fn read(&mut self, id: u64) -> Result<(), CloseReason> {
        let Some(conn) = self.conns.get_mut(&id) else { return Ok(()) };
        let len = match (&conn.stream).read(&mut self.buffer) {
            Ok(0) => return Err(CloseReason::Closed),
            Ok(len) => len,
            Err(error) if matches!(error.kind(), ErrorKind::WouldBlock | ErrorKind::Interrupted) => return Ok(()),
            Err(error) => return Err(error.into()),
        };
        if matches!(conn.peer, Peer::TurnedAway) {
            return Ok(());
        }
        let before = conn.inbox.len();
        conn.inbox.push(&self.buffer[..len]);
        let handled = conn.handle_messages(&self.shared, &mut self.reports);
        self.input_bytes = self.input_bytes + conn.inbox.len() - before;
        handled
    }

    /// If incomplete messages exceed the limit, disconnect the peers that hold most, rather than the one that sent
    /// last.
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
            ended.push((id, CloseReason::Input));
        }
        self.end(ended);
    }

    /// If queued output exceeds the limit, disconnect the blocked peers with the longest queues.
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
            // Messages shared with other outboxes stay allocated.
            self.conns[&id].outbox.close();
            tracing::warn!(limit, "queued output exceeds the limit in bytes; disconnecting a peer that does not read");
            ended.push((id, CloseReason::Output));
        }
        self.end(ended);
    }

    /// Send queued output.
    fn flush(&mut self, id: u64) -> Result<(), CloseReason> {
        let Some(conn) = self.conns.get_mut(&id) else { return Ok(()) };
        let sending = conn.outbox.flush(&conn.stream);
        let was_blocked = conn.blocked_since.is_some();
        match sending {
            FlushStatus::Drained => conn.blocked_since = None,
            FlushStatus::Blocked { has_progressed } if has_progressed || !was_blocked => {
                conn.blocked_since = Some(Instant::now())
            }
            FlushStatus::Blocked { .. } => {}
            FlushStatus::Closed => return Err(CloseReason::Disconnected),
        }
        if was_blocked != conn.blocked_since.is_some() {
            let write = if was_blocked { epoll::EventFlags::empty() } else { epoll::EventFlags::OUT };
            let data = epoll::EventData::new_u64(id);
            epoll::modify(&self.epoll, &conn.stream, data, epoll::EventFlags::IN | write).map_err(io::Error::from)?;
        }
        Ok(())
    }

    /// Handle deadlines.
    fn sweep(&mut self) -> io::Result<()> {
        let now = Instant::now();
        if self.accepts_at.is_some_and(|at| at <= now) {
            self.accepts_at = None;
            epoll::add(&self.epoll, &self.listener, epoll::EventData::new_u64(LISTENER), epoll::EventFlags::IN)?;
        }
        if now.duration_since(self.swept_at) >= SWEEP_INTERVAL {
            self.swept_at = now;
            let limits = &self.shared.config.limits;
            let due = |(id, conn): (&u64, &Conn)| Some((*id, conn.due(limits, now)?));
            let ended = self.conns.iter().filter_map(due).collect();
            self.end(ended);
        }
        Ok(())
    }

    /// Close connections: first all of them, then end their memberships and devices.
    fn end(&mut self, ended: Vec<(u64, CloseReason)>) {
        let mut gone = Vec::with_capacity(ended.len());
        for (id, why) in ended {
            let Some(conn) = self.conns.remove(&id) else { continue };
            conn.outbox.close();
            self.input_bytes -= conn.inbox.len();
            tracing::debug!(peer = ?conn.stream.peer_addr(), %why, "connection ended");
            // Closing removes the descriptor from the epoll set, unless a child process inherited it.
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
            session.mark_closed();
            self.shared.lock().remove_device(&session);
            tracing::info!(device = session.name(), "device disconnected");
        }
    }
}

impl Conn {
    /// Handle complete messages.
    fn handle_messages(&mut self, shared: &Arc<Shared>, reports: &mut Vec<Arc<Client>>) -> Result<(), CloseReason> {
        loop {
            let is_handled = match &mut self.peer {
                Peer::TurnedAway => false,
                Peer::Unknown => match self.inbox.take_message()? {
                    Some(greeting) => {
                        self.peer = handle_hello(shared, greeting, &self.outbox)?;
                        let is_device = matches!(self.peer, Peer::Device(_));
                        self.inbox.limit(if is_device { MAX_MESSAGE_LEN } else { REQUEST_LEN_MAX });
                        true
                    }
                    None => false,
                },
                Peer::Device(session) => match self.inbox.take_message::<Envelope<Response>>()? {
                    Some(response) => {
                        session.handle_response(response);
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
            if !is_handled {
                return Ok(());
            }
            self.active_at = Instant::now();
        }
    }

    /// Return why the connection must be closed by now, if so.
    fn due(&self, limits: &Limits, now: Instant) -> Option<CloseReason> {
        let silent = now.saturating_duration_since(self.active_at);
        let blocked = self.blocked_since.map(|since| now.saturating_duration_since(since));
        if blocked.is_some_and(|blocked| blocked >= limits.stalled) {
            return Some(CloseReason::Stalled);
        }
        match &self.peer {
            Peer::Unknown => (silent >= limits.greeting).then_some(CloseReason::Greeting),
            Peer::TurnedAway => (silent >= TURN_AWAY_TIMEOUT).then_some(CloseReason::Disconnected),
            Peer::Client(_, None) => (silent >= limits.idle).then_some(CloseReason::Idle),
            Peer::Client(..) | Peer::Device(_) => {
                (!self.inbox.is_empty() && silent >= limits.idle).then_some(CloseReason::Idle)
            }
        }
    }
}

/// Sort connections by the bytes they hold, largest first.
fn most_first(held: impl Iterator<Item = (usize, u64)>) -> Vec<(usize, u64)> {
    let mut held: Vec<_> = held.filter(|(bytes, _)| *bytes > 0).collect();
    held.sort_unstable_by(|one, other| other.cmp(one));
    held
}

/// Register a peer by its handshake.
fn handle_hello(shared: &Arc<Shared>, greeting: Hello, outbox: &Arc<Outbox>) -> Result<Peer, CloseReason> {
    let sink = || Box::new(Arc::clone(outbox));
    match greeting {
        Hello::Device(announce) => {
            if let Err(why) = check_announce(&announce) {
                tracing::warn!(%why, "refusing a device");
                return Ok(reject(outbox, Rejection::Name));
            }
            let session = Arc::new(DeviceSession::new(announce, sink()));
            if let Err(why) = shared.lock().add_device(&shared.config, &session) {
                tracing::warn!(device = session.name(), %why, "refusing the device");
                return Ok(reject(outbox, why.rejection()));
            }
            tracing::info!(device = session.name(), boot_id = session.announce.boot_id.0, "device connected");
            // The device learns that it is registered.
            session.welcome();
            Ok(Peer::Device(session))
        }
        _ => Ok(Peer::Client(Arc::new(Client::new(sink())), None)),
    }
}

/// Tell a device why it is not registered, and close the connection.
fn reject(outbox: &Arc<Outbox>, rejection: Rejection) -> Peer {
    if let Ok(frames) = Frames::of(&Envelope { id: u32::MAX, message: Request::Rejected(rejection) }) {
        outbox.put(&[frames]);
    }
    outbox.disconnect();
    Peer::Unknown
}

/// Check the names in a device's announcement, which are displayed.
fn check_announce(announce: &Announce) -> Result<(), super::limits::InvalidName> {
    check_name(NameKind::Fabric, "device", &announce.name)?;
    match &announce.attach {
        Some(bus) => check_name(NameKind::Fabric, "machine", &bus.machine),
        None => Ok(()),
    }
}

/// Handle a client's request.
fn serve(
    shared: &Arc<Shared>,
    request: ClientRequest,
    client: &Arc<Client>,
    place: &mut Option<(String, Rank)>,
) -> Result<Served, CloseReason> {
    let mut state = shared.lock();
    if shared.stopping() {
        return Err(CloseReason::Disconnected);
    }
    Ok(state.serve(&shared.config, request, client, place))
}

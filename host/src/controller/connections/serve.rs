//! The thread that moves bytes between sockets and [`Connections`]. It never blocks on a peer, and holds the lock on
//! the machine only while messages are handled, never while it reads or writes.
//!
//! New connections, and those whose peers are not known yet, are in an epoll set of their own, which wakes the thread
//! once every [`OPENING_INTERVAL`] however many there are: a flood of them must not interrupt the job beside it, nor
//! keep known peers waiting.

use super::pace::{Pace, Taken};
use super::{CloseReason, Connections, SWEEP_INTERVAL};
use crate::controller::Shared;
use crate::controller::entropy::Entropy;
use crate::controller::keys::KeysFile;
use crate::controller::output::ConnId;
use rustix::event::{Timespec, epoll};
use rustix::io::Errno;
use rustix::net::{SocketFlags, acceptfrom_with, sockopt};
use std::collections::HashMap;
use std::io::{self, ErrorKind, Read};
use std::net::{IpAddr, Shutdown, SocketAddr, TcpListener, TcpStream};
use std::os::fd::OwnedFd;
use std::sync::Arc;
use std::time::Duration;
use sumac_hal::time::Instant;

const LISTENER: u64 = 0;
const NOTIFIER: u64 = 1;
/// The epoll set of connections whose peers are not known.
const OPENING: u64 = 2;
const FIRST_CONN: ConnId = ConnId(3);

/// How often to look at connections whose peers are not known, if they are many.
const OPENING_INTERVAL: Duration = Duration::from_millis(2);

/// How often one may look without waiting: a key exchange takes two looks.
const OPENING_BURST: u32 = 32;

const OPENING_PACE: Pace = Pace::new(OPENING_INTERVAL, OPENING_BURST);

/// The send buffer of a socket, in bytes; the kernel doubles it.
const SEND_BUFFER_BYTES: usize = 32 * 1024;

/// How long to stop accepting after the system ran out of file descriptors.
const ACCEPT_PAUSE: Duration = Duration::from_millis(100);

/// How many connections may wait to be accepted. The kernel allows as many as `net.core.somaxconn` says.
const BACKLOG: i32 = 4096;

/// How many connections to accept before serving the others.
const ACCEPTS_PER_POLL: usize = 256;

/// How many events to take at a time: enough to see connections that end together in one batch.
const EVENTS_MAX: usize = 32_768;

/// The longest wait, although nothing happens before.
const WAIT_MAX: Duration = Duration::from_secs(3600);

/// The epoll set that a socket is in.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Set {
    None,
    Opening,
    Known,
}

/// A socket, and whether it is watched for room to write.
struct Socket {
    stream: TcpStream,
    set: Set,
    awaits_room: bool,
}

impl Socket {
    const fn events(&self) -> epoll::EventFlags {
        if self.awaits_room { epoll::EventFlags::IN.union(epoll::EventFlags::OUT) } else { epoll::EventFlags::IN }
    }
}

/// The sockets of all connections.
pub(in crate::controller) struct Server {
    shared: Arc<Shared>,
    listener: TcpListener,
    epoll: OwnedFd,
    /// The set of the listener, and of connections whose peers are not known. It is in `epoll` for one event at a time.
    opening: OwnedFd,
    /// How often that set was looked at.
    looked: Taken,
    /// When to look at it again, unless it is in `epoll`.
    looks_at: Option<Instant>,
    connections: Connections,
    keys_file: Option<KeysFile>,
    sockets: HashMap<ConnId, Socket>,
    /// When the machine is due.
    due: Instant,
    /// When to accept again after the system ran out of file descriptors.
    accepts_at: Option<Instant>,
    buffer: Vec<u8>,
}

impl Server {
    pub(in crate::controller) fn new(shared: Arc<Shared>, listener: TcpListener, began_ms: u64) -> io::Result<Self> {
        listener.set_nonblocking(true)?;
        set_options(&listener)?;
        let (epoll, opening) =
            (epoll::create(epoll::CreateFlags::CLOEXEC)?, epoll::create(epoll::CreateFlags::CLOEXEC)?);
        epoll::add(&opening, &listener, epoll::EventData::new_u64(LISTENER), epoll::EventFlags::IN)?;
        epoll::add(&epoll, &opening, epoll::EventData::new_u64(OPENING), ONE_EVENT)?;
        epoll::add(&epoll, shared.notifier.fd(), epoll::EventData::new_u64(NOTIFIER), epoll::EventFlags::IN)?;
        let (now, config) = (shared.now(), &shared.config);
        let connections = Connections::new(config.limits.clone(), FIRST_CONN, now);
        let keys_file = config.keys_file.clone().map(KeysFile::new);
        Ok(Self {
            connections: connections.with_keys(config.keys.clone(), Entropy::System, began_ms),
            keys_file,
            shared,
            listener,
            epoll,
            opening,
            looked: Taken::default(),
            looks_at: None,
            sockets: HashMap::new(),
            due: now,
            accepts_at: None,
            buffer: vec![0; 64 * 1024],
        })
    }

    /// Serve until the controller has stopped, then close all connections.
    pub(in crate::controller) fn run(mut self) {
        let mut events = Vec::new();
        while !self.shared.lock().has_stopped() {
            if let Err(error) = self.poll(&mut events) {
                // Not recoverable: epoll itself has failed.
                tracing::error!(%error, "cannot poll connections; the controller stops serving");
                return;
            }
        }
        for socket in self.sockets.values() {
            let _ = socket.stream.shutdown(Shutdown::Both);
        }
    }

    /// Wait for events and handle them.
    fn poll(&mut self, events: &mut Vec<epoll::Event>) -> io::Result<()> {
        let has_opening = self.wait(events)?;
        for event in events.drain(..) {
            let (data, flags) = (event.data, event.flags);
            match data.u64() {
                NOTIFIER => self.shared.notifier.clear(),
                OPENING => {}
                id => self.handle_event(ConnId(id), flags)?,
            }
        }
        if has_opening {
            self.look_at_opening(events)?;
        }
        self.close_ended();
        if let Some(keys) = self.keys_file.as_mut().and_then(|file| file.poll(self.shared.now())) {
            self.connections.set_keys(keys);
        }
        self.connections.handle_timeout(self.shared.now());
        self.close_ended();
        self.settle();
        self.flush_all()?;
        self.close_ended();
        self.accept_again()
    }

    /// Wait for events. Returns whether there are some of connections whose peers are not known.
    fn wait(&mut self, events: &mut Vec<epoll::Event>) -> io::Result<bool> {
        let now = self.shared.now();
        if self.looks_at.take_if(|at| *at <= now).is_some() {
            epoll::modify(&self.epoll, &self.opening, epoll::EventData::new_u64(OPENING), ONE_EVENT)?;
        }
        let is_quiet = self.connections.is_empty() && self.accepts_at.is_none();
        let limit = if is_quiet { WAIT_MAX } else { SWEEP_INTERVAL };
        let limit = self.looks_at.map_or(limit, |at| limit.min(at - now));
        // Connections that ended while output was flushed are reported in the next round.
        let wait = if self.connections.has_ended() { Duration::ZERO } else { limit.min(self.due - now) };
        take_events(&self.epoll, events, self.sockets.len(), wait)?;
        Ok(events.iter().any(|event| { event.data }.u64() == OPENING))
    }

    /// Serve connections whose peers are not known, and accept new ones.
    fn look_at_opening(&mut self, events: &mut Vec<epoll::Event>) -> io::Result<()> {
        take_events(&self.opening, events, self.sockets.len(), Duration::ZERO)?;
        // Peers that prove to have a key make room for new ones.
        let mut has_new = false;
        for event in events.drain(..) {
            let (data, flags) = (event.data, event.flags);
            match data.u64() {
                LISTENER => has_new = true,
                id => self.handle_event(ConnId(id), flags)?,
            }
        }
        if has_new {
            self.close_ended();
            self.accept()?;
        }
        let now = self.shared.now();
        self.looked.take(OPENING_PACE, now);
        self.looks_at = Some(self.looked.next_at(OPENING_PACE));
        Ok(())
    }

    fn handle_event(&mut self, id: ConnId, flags: epoll::EventFlags) -> io::Result<()> {
        let readable =
            epoll::EventFlags::IN | epoll::EventFlags::HUP | epoll::EventFlags::ERR | epoll::EventFlags::RDHUP;
        if flags.intersects(readable) {
            self.read(id);
        }
        self.flush(id)?;
        self.watch(id)
    }

    /// Have a connection in the epoll set in which it belongs.
    fn watch(&mut self, id: ConnId) -> io::Result<()> {
        let Some(socket) = self.sockets.get_mut(&id) else { return Ok(()) };
        let set = if self.connections.is_opening(id) { Set::Opening } else { Set::Known };
        if socket.set == set || !self.connections.is_open(id) {
            return Ok(());
        }
        if socket.set == Set::Opening {
            epoll::delete(&self.opening, &socket.stream)?;
        }
        socket.set = set;
        let epoll = if set == Set::Opening { &self.opening } else { &self.epoll };
        Ok(epoll::add(epoll, &socket.stream, epoll::EventData::new_u64(id.0), socket.events())?)
    }

    /// Read from a connection and handle complete messages.
    fn read(&mut self, id: ConnId) {
        let Some(socket) = self.sockets.get(&id) else { return };
        match (&socket.stream).read(&mut self.buffer) {
            Ok(0) => self.connections.handle_closed(id, &CloseReason::Closed),
            Ok(len) => {
                self.connections.receive(id, &self.buffer[..len], self.shared.now());
                if self.connections.has_messages(id) {
                    let mut machine = self.shared.lock();
                    let now = self.shared.now();
                    self.connections.handle_messages(id, &mut machine, now);
                }
            }
            Err(error) if matches!(error.kind(), ErrorKind::WouldBlock | ErrorKind::Interrupted) => {}
            Err(error) => self.connections.handle_closed(id, &error.into()),
        }
    }

    /// Let the machine take up what has happened, and wake the threads that have something to do.
    fn settle(&mut self) {
        let mut machine = self.shared.lock();
        // Read under the lock, so that the machine's time does not go back.
        let now = self.shared.now();
        self.connections.settle(&mut machine, now);
        self.due = machine.poll_timeout();
        if machine.has_plan() || machine.has_report() {
            self.shared.work.notify_all();
        }
    }

    /// Send new output.
    fn flush_all(&mut self) -> io::Result<()> {
        while let Some(id) = self.connections.poll_unflushed() {
            self.flush(id)?;
        }
        Ok(())
    }

    fn flush(&mut self, id: ConnId) -> io::Result<()> {
        let Some(socket) = self.sockets.get_mut(&id) else { return Ok(()) };
        let awaits_room = self.connections.flush(id, &socket.stream, self.shared.now());
        if socket.awaits_room != awaits_room {
            socket.awaits_room = awaits_room;
            let data = epoll::EventData::new_u64(id.0);
            match socket.set {
                Set::None => {}
                Set::Opening => epoll::modify(&self.opening, &socket.stream, data, socket.events())?,
                Set::Known => epoll::modify(&self.epoll, &socket.stream, data, socket.events())?,
            }
        }
        Ok(())
    }

    /// Close the sockets of connections that have ended.
    fn close_ended(&mut self) {
        while let Some(id) = self.connections.poll_closed() {
            let Some(Socket { stream, set, .. }) = self.sockets.remove(&id) else { continue };
            tracing::debug!(conn = id.0, peer = ?stream.peer_addr(), "closing a connection");
            // Closing removes the descriptor from the epoll set, unless a child process inherited it.
            let _ = match set {
                Set::None => continue,
                Set::Opening => epoll::delete(&self.opening, &stream),
                Set::Known => epoll::delete(&self.epoll, &stream),
            };
            let _ = stream.shutdown(Shutdown::Both);
        }
    }

    /// Accept new connections.
    fn accept(&mut self) -> io::Result<()> {
        let is_stopping = self.shared.lock().is_stopping();
        for _ in 0..ACCEPTS_PER_POLL {
            match acceptfrom_with(&self.listener, SocketFlags::NONBLOCK | SocketFlags::CLOEXEC) {
                Ok((stream, _)) if is_stopping => drop(stream),
                Ok((stream, from)) => {
                    let from = from.and_then(|from| SocketAddr::try_from(from).ok());
                    let from = from.map_or(IpAddr::from([0; 4]), |from| from.ip());
                    if let Err(error) = self.register(stream.into(), from) {
                        tracing::debug!(%error, "cannot accept a connection");
                    }
                }
                Err(Errno::AGAIN) => return Ok(()),
                Err(Errno::INTR | Errno::CONNABORTED) => {}
                Err(error) => {
                    // epoll would report the pending connection again at once, so stop accepting for a while.
                    tracing::warn!(%error, connections = self.sockets.len(), "cannot accept; raise the open file limit");
                    self.accepts_at = Some(self.shared.now() + ACCEPT_PAUSE);
                    epoll::delete(&self.opening, &self.listener)?;
                    return Ok(());
                }
            }
        }
        Ok(())
    }

    /// Accept again after a pause.
    fn accept_again(&mut self) -> io::Result<()> {
        let now = self.shared.now();
        if self.accepts_at.take_if(|at| *at <= now).is_some() {
            epoll::add(&self.opening, &self.listener, epoll::EventData::new_u64(LISTENER), epoll::EventFlags::IN)?;
        }
        Ok(())
    }

    /// Begin to serve a connection. Most peers have sent something by now, and some are refused for it.
    fn register(&mut self, stream: TcpStream, from: IpAddr) -> io::Result<()> {
        // Without room for it, it is closed unread.
        let Some(id) = self.connections.connect(from, self.shared.now()) else { return Ok(()) };
        self.sockets.insert(id, Socket { stream, set: Set::None, awaits_room: false });
        self.read(id);
        self.flush(id)?;
        let watched = self.watch(id);
        if let Err(error) = &watched {
            self.connections.handle_closed(id, &io::Error::from(error.kind()).into());
        }
        watched
    }
}

/// Set how many connections may wait, and what they inherit, which saves them system calls of their own.
fn set_options(listener: &TcpListener) -> rustix::io::Result<()> {
    sockopt::set_tcp_nodelay(listener, true)?;
    // A backlog of output waits in the outbox, where it counts towards the limits, instead of in the kernel.
    sockopt::set_socket_send_buffer_size(listener, SEND_BUFFER_BYTES)?;
    // The default of 128 overflows between two looks when many connect at once, and they try again a second later.
    rustix::net::listen(listener, BACKLOG)
}

/// One event, until the set is watched again.
const ONE_EVENT: epoll::EventFlags = epoll::EventFlags::IN.union(epoll::EventFlags::ONESHOT);

/// Take events of a set, and wait at most this long for the first.
fn take_events(set: &OwnedFd, events: &mut Vec<epoll::Event>, sockets: usize, wait: Duration) -> io::Result<()> {
    // Rounded up to the resolution of the system call.
    let wait = Duration::from_millis(wait.as_nanos().div_ceil(1_000_000) as u64);
    let limit = Timespec { tv_sec: wait.as_secs() as i64, tv_nsec: wait.subsec_nanos().into() };
    events.reserve(EVENTS_MAX.min(sockets + 2));
    match epoll::wait(set, rustix::buffer::spare_capacity(events), Some(&limit)) {
        Ok(_) | Err(Errno::INTR) => Ok(()),
        Err(error) => Err(error.into()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn connections_inherit_the_options_of_their_listener() {
        let listener = TcpListener::bind("127.0.0.1:0").expect("a port");
        set_options(&listener).expect("a socket");
        let _peer = TcpStream::connect(listener.local_addr().expect("bound")).expect("it listens");
        let (stream, _) = listener.accept().expect("a peer");
        let is_set = sockopt::tcp_nodelay(&stream).expect("a socket");
        // The kernel doubles it.
        assert_eq!((is_set, sockopt::socket_send_buffer_size(&stream)), (true, Ok(2 * SEND_BUFFER_BYTES)));
    }
}

//! The thread that moves bytes between sockets and [`Connections`]. It never blocks on a peer, and holds the lock on
//! the machine only while messages are handled, never while it reads or writes.

use super::{CloseReason, Connections, SWEEP_INTERVAL};
use crate::controller::Shared;
use crate::controller::entropy::Entropy;
use crate::controller::keys::KeysFile;
use crate::controller::output::ConnId;
use rustix::event::{Timespec, epoll};
use std::collections::HashMap;
use std::io::{self, ErrorKind, Read};
use std::net::{Shutdown, TcpListener, TcpStream};
use std::os::fd::OwnedFd;
use std::sync::Arc;
use std::time::Duration;
use sumac_hal::time::Instant;

const LISTENER: u64 = 0;
const NOTIFIER: u64 = 1;
const FIRST_CONN: ConnId = ConnId(2);

/// The send buffer of a socket, in bytes; the kernel doubles it.
const SEND_BUFFER_BYTES: usize = 32 * 1024;

/// How long to stop accepting after the system ran out of file descriptors.
const ACCEPT_PAUSE: Duration = Duration::from_millis(100);

/// How many connections to accept before serving the others.
const ACCEPTS_PER_POLL: usize = 256;

/// How many events to take at a time: enough to see connections that end together in one batch.
const EVENTS_MAX: usize = 32_768;

/// The longest wait, although nothing happens before.
const WAIT_MAX: Duration = Duration::from_secs(3600);

/// A socket, and whether it is watched for room to write.
struct Socket {
    stream: TcpStream,
    awaits_room: bool,
}

/// The sockets of all connections.
pub(in crate::controller) struct Server {
    shared: Arc<Shared>,
    listener: TcpListener,
    epoll: OwnedFd,
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
        let epoll = epoll::create(epoll::CreateFlags::CLOEXEC)?;
        epoll::add(&epoll, &listener, epoll::EventData::new_u64(LISTENER), epoll::EventFlags::IN)?;
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
        self.wait(events)?;
        for event in events.drain(..) {
            let (data, flags) = (event.data, event.flags);
            match data.u64() {
                LISTENER => self.accept()?,
                NOTIFIER => self.shared.notifier.clear(),
                id => self.handle_event(ConnId(id), flags)?,
            }
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

    fn wait(&self, events: &mut Vec<epoll::Event>) -> io::Result<()> {
        let is_quiet = self.connections.is_empty() && self.accepts_at.is_none();
        let limit = if is_quiet { WAIT_MAX } else { SWEEP_INTERVAL };
        // Connections that ended while output was flushed are reported in the next round.
        let wait = if self.connections.has_ended() { Duration::ZERO } else { limit.min(self.due - self.shared.now()) };
        // Rounded up to the resolution of the system call.
        let wait = Duration::from_millis(wait.as_nanos().div_ceil(1_000_000) as u64);
        let limit = Timespec { tv_sec: wait.as_secs() as i64, tv_nsec: wait.subsec_nanos().into() };
        events.reserve(EVENTS_MAX.min(self.sockets.len() + 2));
        let spare = rustix::buffer::spare_capacity(events);
        match epoll::wait(&self.epoll, spare, Some(&limit)) {
            Ok(_) | Err(rustix::io::Errno::INTR) => Ok(()),
            Err(error) => Err(error.into()),
        }
    }

    fn handle_event(&mut self, id: ConnId, flags: epoll::EventFlags) -> io::Result<()> {
        let readable =
            epoll::EventFlags::IN | epoll::EventFlags::HUP | epoll::EventFlags::ERR | epoll::EventFlags::RDHUP;
        if flags.intersects(readable) {
            self.read(id);
        }
        self.flush(id)
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
            let write = if awaits_room { epoll::EventFlags::OUT } else { epoll::EventFlags::empty() };
            let data = epoll::EventData::new_u64(id.0);
            epoll::modify(&self.epoll, &socket.stream, data, epoll::EventFlags::IN | write)?;
        }
        Ok(())
    }

    /// Close the sockets of connections that have ended.
    fn close_ended(&mut self) {
        while let Some(id) = self.connections.poll_closed() {
            let Some(Socket { stream, .. }) = self.sockets.remove(&id) else { continue };
            tracing::debug!(conn = id.0, peer = ?stream.peer_addr(), "closing a connection");
            // Closing removes the descriptor from the epoll set, unless a child process inherited it.
            let _ = epoll::delete(&self.epoll, &stream);
            let _ = stream.shutdown(Shutdown::Both);
        }
    }

    fn accept(&mut self) -> io::Result<()> {
        for _ in 0..ACCEPTS_PER_POLL {
            match self.listener.accept() {
                Ok((stream, _)) if self.shared.lock().is_stopping() => drop(stream),
                Ok((stream, _)) => {
                    if let Err(error) = self.register(stream) {
                        tracing::debug!(%error, "cannot accept a connection");
                    }
                }
                Err(error) if error.kind() == ErrorKind::WouldBlock => return Ok(()),
                Err(error) if matches!(error.kind(), ErrorKind::Interrupted | ErrorKind::ConnectionAborted) => {}
                Err(error) => {
                    // epoll would report the pending connection again at once, so stop accepting for a while.
                    tracing::warn!(%error, connections = self.sockets.len(), "cannot accept; raise the open file limit");
                    self.accepts_at = Some(self.shared.now() + ACCEPT_PAUSE);
                    epoll::delete(&self.epoll, &self.listener)?;
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
            epoll::add(&self.epoll, &self.listener, epoll::EventData::new_u64(LISTENER), epoll::EventFlags::IN)?;
        }
        Ok(())
    }

    fn register(&mut self, stream: TcpStream) -> io::Result<()> {
        stream.set_nonblocking(true)?;
        stream.set_nodelay(true)?;
        // Keep the backlog in the outbox, where it counts towards the limits, instead of in the kernel.
        rustix::net::sockopt::set_socket_send_buffer_size(&stream, SEND_BUFFER_BYTES)?;
        let limit = self.shared.config.limits.connections;
        let id = self.connections.connect(self.shared.now());
        let id = id.ok_or_else(|| io::Error::other(format!("there are already {limit}, the limit")))?;
        if let Err(error) = epoll::add(&self.epoll, &stream, epoll::EventData::new_u64(id.0), epoll::EventFlags::IN) {
            self.connections.handle_closed(id, &io::Error::from(error).into());
            return Err(error.into());
        }
        self.sockets.insert(id, Socket { stream, awaits_room: false });
        Ok(())
    }
}

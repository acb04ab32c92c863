//! Out-of-band channel: short messages between ranks at any time, even while neither is in a call, and detection of
//! ranks that are gone or unresponsive.
//!
//! A thread maintains one connection for each direction between two ranks, opened when there is first something to
//! send. A connection begins with magic `SMCN`, the version (u32), the job token (u64), and the ranks from and to (u32
//! each). The peer accepts it with the single byte 1. Each message follows as its length (u32) and its bytes; all
//! numbers are little-endian. The empty message is a ping; its answer, a message in the other direction, is the single
//! byte 0.
//!
//! Messages in flight when a connection breaks may be lost, and messages of an older connection may arrive after those
//! of a newer one. An unknown peer gets no further than the hello. Messages are limited to the length given at the
//! start.
//!
//! Invariants:
//! - Connections that have not identified themselves share [`UNKNOWN_PEERS_MAX`] places and have [`HELLO_LIMIT`] each;
//!   ranks have places of their own.
//! - Bytes that have arrived are processed before a connection is evicted, and a connection that was not accepted loses
//!   no message: it is dialled again. So unknown peers cost time, but never make a rank appear lost.

#[cfg(test)]
mod tests;

use super::acceptor::{Accepted, Acceptor, Redial, dial};
use super::mesh::JobToken;
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use std::collections::{BTreeSet, VecDeque};
use std::io::{self, ErrorKind, Read, Write};
use std::net::{Shutdown, SocketAddr, TcpListener, TcpStream};
use std::os::unix::net::UnixStream;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};
use sumac_hal::ids::Rank;

/// An event from other ranks.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum OobEvent {
    /// A message.
    Message(Rank, Vec<u8>),
    /// A watched rank's host reports that nobody listens at its address. Messages to it are lost.
    Gone(Rank),
    /// A watched rank has not answered for [`SILENCE_LIMIT`].
    Silent(Rank),
}

/// Commands to the thread.
#[derive(Debug, Default)]
struct Commands {
    messages: VecDeque<(Rank, Vec<u8>)>,
    watched: BTreeSet<Rank>,
    is_closing: bool,
}

/// Sends commands to the thread.
#[derive(Debug)]
pub(crate) struct OobSender {
    commands: Mutex<Commands>,
    wake: UnixStream,
}

/// This rank's end of the out-of-band channel. Dropping it flushes what is queued.
#[derive(Debug)]
pub(crate) struct OobChannel {
    sender: Arc<OobSender>,
    thread: Option<JoinHandle<()>>,
    pid: u32,
}

impl OobChannel {
    /// Start the channel: `addresses` holds the address of each rank's `listener`. From now on `on_event` is called
    /// with each event, on a separate thread, and may return an answer.
    pub(crate) fn start(
        (rank, token, max_len_bytes): (Rank, JobToken, usize),
        listener: TcpListener,
        addresses: Vec<SocketAddr>,
        on_event: impl FnMut(OobEvent) -> Option<Vec<u8>> + Send + 'static,
    ) -> io::Result<Self> {
        let acceptor = Acceptor::new(listener)?;
        let (wake, wake_receiver) = UnixStream::pair()?;
        wake.set_nonblocking(true)?;
        wake_receiver.set_nonblocking(true)?;
        let sender = Arc::new(OobSender { commands: Mutex::default(), wake });
        let outbound = addresses.iter().map(|_| Outbound::default()).collect();
        let worker = Worker {
            own: (rank, token),
            max_len_bytes,
            acceptor,
            addresses,
            outbound,
            inbound: Vec::new(),
            unknown_peers: VecDeque::new(),
            wake_receiver,
            watched: BTreeSet::new(),
            sender: Arc::clone(&sender),
            on_event: Box::new(on_event),
        };
        let thread = std::thread::Builder::new().name("oob".into()).spawn(move || worker.run())?;
        Ok(Self { sender, thread: Some(thread), pid: std::process::id() })
    }

    /// Return the sender. It may outlive the channel, and then does nothing.
    pub(crate) const fn sender(&self) -> &Arc<OobSender> {
        &self.sender
    }
}

impl OobSender {
    fn lock(&self) -> MutexGuard<'_, Commands> {
        self.commands.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Send a message.
    pub(crate) fn send(&self, to: Rank, message: Vec<u8>) {
        self.lock().messages.push_back((to, message));
        self.wake();
    }

    /// Watch these ranks, and no others.
    pub(crate) fn watch(&self, ranks: impl IntoIterator<Item = Rank>) {
        let watched: BTreeSet<Rank> = ranks.into_iter().collect();
        let mut commands = self.lock();
        if commands.watched != watched {
            commands.watched = watched;
            drop(commands);
            self.wake();
        }
    }

    fn wake(&self) {
        // If full, the pipe wakes the thread as well.
        let _ = (&self.wake).write(&[1]);
    }
}

impl Drop for OobChannel {
    fn drop(&mut self) {
        if self.pid != std::process::id() {
            // A forked child does not have the thread.
            return std::mem::forget(self.thread.take());
        }
        self.sender.lock().is_closing = true;
        self.sender.wake();
        if let Some(thread) = self.thread.take() {
            // A panic there has been reported.
            let _ = thread.join();
        }
    }
}

/// State of the connection to a rank.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
enum Stage {
    /// Dialled, if there is a socket.
    #[default]
    Connecting,
    /// Our hello is sent, the answer awaited.
    Handshake,
    /// Messages may be sent.
    Ready,
}

/// Why a connection to a rank ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Loss {
    /// Nobody listens there.
    Refused,
    /// It was not accepted; the rank may still be there.
    NotAccepted,
    /// It broke after it was accepted.
    Broken,
}

/// The connection to a rank.
#[derive(Debug, Default)]
struct Outbound {
    stream: Option<TcpStream>,
    stage: Stage,
    /// Bytes to send.
    bytes: VecDeque<u8>,
    /// When it may be dialled again.
    redial: Redial,
    /// Since when no connection was accepted.
    failing_since: Option<Instant>,
    pinged_at: Option<Instant>,
    /// When the rank last proved to be there.
    alive_at: Option<Instant>,
}

/// A connection from a rank.
#[derive(Debug)]
struct Inbound {
    stream: TcpStream,
    from: Rank,
    bytes: Vec<u8>,
}

/// A connection that has not identified itself.
#[derive(Debug)]
struct UnknownPeer {
    stream: TcpStream,
    since: Instant,
    hello: [u8; HELLO_BYTES],
    filled: usize,
}

#[derive(Debug, Clone, Copy)]
enum PollTarget {
    Wake,
    Listener,
    Inbound(usize),
    UnknownPeer(usize),
    Outbound(Rank),
}

struct Worker {
    own: (Rank, JobToken),
    max_len_bytes: usize,
    acceptor: Acceptor,
    addresses: Vec<SocketAddr>,
    outbound: Vec<Outbound>,
    inbound: Vec<Inbound>,
    /// In order of arrival.
    unknown_peers: VecDeque<UnknownPeer>,
    wake_receiver: UnixStream,
    watched: BTreeSet<Rank>,
    sender: Arc<OobSender>,
    on_event: Box<dyn FnMut(OobEvent) -> Option<Vec<u8>> + Send>,
}

impl Worker {
    fn run(mut self) {
        let mut end = None;
        loop {
            let now = Instant::now();
            if self.take_commands(now) {
                // Flush what is queued to the ranks that listen.
                let until = *end.get_or_insert(now + FLUSH_LIMIT);
                if now >= until || self.outbound.iter().all(|out| out.bytes.is_empty()) {
                    return self.outbound.iter().filter_map(|out| out.stream.as_ref()).for_each(|stream| {
                        // Fails if the peer was faster.
                        let _ = stream.shutdown(Shutdown::Write);
                    });
                }
            }
            self.check_watched(now);
            self.expire(now);
            self.dial_all(now);
            let ready = self.poll(self.next_deadline(end).map(|at| at.saturating_duration_since(Instant::now())));
            // From the back: a connection that ends leaves the list.
            for what in ready.into_iter().rev() {
                match what {
                    PollTarget::Wake => while matches!((&self.wake_receiver).read(&mut [0; 64]), Ok(n) if n > 0) {},
                    PollTarget::Listener => self.accept(Instant::now()),
                    PollTarget::Inbound(index) => self.receive(index),
                    PollTarget::UnknownPeer(index) => drop(self.identify(index)),
                    PollTarget::Outbound(rank) => self.send(rank),
                }
            }
        }
    }

    /// Take the pending commands; returns whether the channel is closing.
    fn take_commands(&mut self, now: Instant) -> bool {
        let (messages, watched, is_closing) = {
            let mut commands = self.sender.lock();
            (std::mem::take(&mut commands.messages), commands.watched.clone(), commands.is_closing)
        };
        for (rank, message) in messages {
            self.enqueue(rank, &message);
        }
        for rank in watched.difference(&self.watched) {
            let out = &mut self.outbound[rank.0 as usize];
            (out.alive_at, out.pinged_at) = (Some(now), None);
        }
        self.watched = watched;
        is_closing
    }

    /// Queue a message.
    fn enqueue(&mut self, to: Rank, message: &[u8]) {
        let Some(out) = self.outbound.get_mut(to.0 as usize).filter(|_| to != self.own.0) else { return };
        out.bytes.extend((message.len() as u32).to_le_bytes());
        out.bytes.extend(message);
    }

    fn deliver(&mut self, event: OobEvent) {
        let (OobEvent::Message(rank, _) | OobEvent::Gone(rank) | OobEvent::Silent(rank)) = event;
        if let Some(answer) = (self.on_event)(event) {
            self.enqueue(rank, &answer);
        }
    }

    /// Ping watched ranks, and report those that are silent.
    fn check_watched(&mut self, now: Instant) {
        for rank in self.watched.clone() {
            let out = &mut self.outbound[rank.0 as usize];
            if now.saturating_duration_since(*out.alive_at.get_or_insert(now)) >= SILENCE_LIMIT {
                out.alive_at = Some(now);
                self.deliver(OobEvent::Silent(rank));
            } else if out.pinged_at.is_none_or(|at| at + PING_INTERVAL <= now) && out.bytes.is_empty() {
                out.pinged_at = Some(now);
                self.enqueue(rank, &[]);
            }
        }
    }

    /// Return when the next timer is due.
    fn next_deadline(&self, end: Option<Instant>) -> Option<Instant> {
        let pings = self.watched.iter().filter_map(|rank| {
            let out = &self.outbound[rank.0 as usize];
            Some(out.alive_at? + SILENCE_LIMIT).into_iter().chain(out.pinged_at.map(|at| at + PING_INTERVAL)).min()
        });
        let dials = self.outbound.iter().filter(|out| out.stream.is_none() && !out.bytes.is_empty());
        let dials = dials.filter_map(|out| out.redial.at());
        let hellos = self.unknown_peers.front().map(|peer| peer.since + HELLO_LIMIT);
        let accepts = self.acceptor.resume_at(Instant::now());
        pings.chain(dials).chain(end).chain(hellos).chain(accepts).min()
    }

    /// Dial ranks with queued messages.
    fn dial_all(&mut self, now: Instant) {
        for index in 0..self.outbound.len() {
            let out = &self.outbound[index];
            if out.stream.is_some() || out.bytes.is_empty() || out.redial.is_pausing(now) {
                continue;
            }
            let rank = Rank(index as u32);
            match dial(self.addresses[index]) {
                Ok(Some(stream)) => {
                    (self.outbound[index].stream, self.outbound[index].stage) = (Some(stream), Stage::Connecting)
                }
                Err(error) if error.kind() == ErrorKind::ConnectionRefused => self.handle_loss(rank, Loss::Refused),
                Ok(None) | Err(_) => self.handle_loss(rank, Loss::NotAccepted),
            }
        }
    }

    /// Handle the loss of a connection. Its queued messages are lost too, unless it was not even accepted.
    fn handle_loss(&mut self, rank: Rank, loss: Loss) {
        let now = Instant::now();
        let out = &mut self.outbound[rank.0 as usize];
        out.stream = None;
        if loss == Loss::Broken {
            out.redial = Redial::default();
        } else {
            out.redial.fail(now);
        }
        let failing_since = *out.failing_since.get_or_insert(now);
        if loss == Loss::NotAccepted && now.saturating_duration_since(failing_since) < SILENCE_LIMIT {
            return;
        }
        out.failing_since = None;
        out.bytes.clear();
        // Ranks that are not watched may have left in good order.
        if !self.watched.contains(&rank) {
            return;
        }
        match loss {
            Loss::Refused => self.deliver(OobEvent::Gone(rank)),
            Loss::Broken => {
                // Is the rank gone? If it listens, it answers a ping.
                self.outbound[rank.0 as usize].pinged_at = Some(now);
                self.enqueue(rank, &[]);
            }
            Loss::NotAccepted => {}
        }
    }

    /// Accept some connections; the oldest unidentified one makes room for the newest.
    fn accept(&mut self, now: Instant) {
        for _ in 0..ACCEPTS_PER_ROUND {
            let Some(Accepted { stream, is_last }) = self.acceptor.accept(now) else { return };
            self.unknown_peers.push_back(UnknownPeer { stream, since: now, hello: [0; HELLO_BYTES], filled: 0 });
            let is_unknown = !self.identify(self.unknown_peers.len() - 1);
            if is_last || is_unknown && self.unknown_peers.len() > UNKNOWN_PEERS_MAX {
                self.evict();
            }
        }
    }

    /// Close connections that have not identified themselves in time.
    fn expire(&mut self, now: Instant) {
        while self.unknown_peers.front().is_some_and(|peer| peer.since + HELLO_LIMIT <= now) {
            self.evict();
        }
    }

    /// Evict the oldest unidentified connection, unless it turns out to be a rank's, which has a place of its own.
    fn evict(&mut self) {
        if !self.unknown_peers.is_empty() && !self.identify(0) {
            self.unknown_peers.pop_front();
        }
    }

    /// Process the bytes of an unidentified connection; returns whether it has left the list, as a rank's or closed.
    fn identify(&mut self, index: usize) -> bool {
        let (own, token) = self.own;
        let peer = &mut self.unknown_peers[index];
        let rank = loop {
            match peer.stream.read(&mut peer.hello[peer.filled..]) {
                Ok(n @ 1..) => peer.filled += n,
                Err(error) if error.kind() == ErrorKind::WouldBlock => return false,
                Err(error) if error.kind() == ErrorKind::Interrupted => continue,
                Ok(0) | Err(_) => break None,
            }
            if peer.filled == HELLO_BYTES {
                let rank = Rank(u32::from_le_bytes(std::array::from_fn(|byte| peer.hello[16 + byte])));
                let is_other = (rank.0 as usize) < self.addresses.len() && rank != own;
                break Some(rank).filter(|_| is_other && peer.hello == hello(token, rank, own));
            }
        };
        let Some(UnknownPeer { mut stream, .. }) = self.unknown_peers.remove(index) else { return true };
        // A new socket's buffer holds a byte.
        if let Some(from) = rank
            && matches!(stream.write(&[ACCEPTED]), Ok(1))
        {
            self.outbound[from.0 as usize].alive_at = Some(Instant::now());
            self.inbound.push(Inbound { stream, from, bytes: Vec::new() });
        }
        true
    }

    /// Read from a rank.
    fn receive(&mut self, index: usize) {
        let mut buffer = [0; 16 << 10];
        let ended = loop {
            let from = &mut self.inbound[index];
            match from.stream.read(&mut buffer) {
                Ok(0) => break true,
                Ok(n) => from.bytes.extend_from_slice(&buffer[..n]),
                Err(error) if error.kind() == ErrorKind::WouldBlock => break false,
                Err(error) if error.kind() == ErrorKind::Interrupted => {}
                Err(_) => break true,
            }
            if !self.parse(index) {
                break true;
            }
        };
        if ended {
            self.inbound.swap_remove(index);
        }
    }

    /// Extract complete messages from the bytes read; returns false if one is too long.
    fn parse(&mut self, index: usize) -> bool {
        let Inbound { from: rank, .. } = self.inbound[index];
        let from = &mut self.inbound[index];
        let mut at = 0;
        self.outbound[rank.0 as usize].alive_at = Some(Instant::now());
        let mut messages = Vec::new();
        while let Some(len) = from.bytes[at..].first_chunk::<4>() {
            let len = u32::from_le_bytes(*len) as usize;
            if len > self.max_len_bytes {
                return false;
            }
            let Some(message) = from.bytes[at + 4..].get(..len) else { break };
            messages.push(message.to_vec());
            at += 4 + len;
        }
        from.bytes.drain(..at);
        for message in messages {
            match &message[..] {
                [] => self.enqueue(rank, &ALIVE),
                message if message == ALIVE => {}
                _ => self.deliver(OobEvent::Message(rank, message)),
            }
        }
        true
    }

    /// Send what the socket accepts. A dialled connection is first checked and its handshake completed.
    fn send(&mut self, rank: Rank) {
        let out = &mut self.outbound[rank.0 as usize];
        let Some(stream) = &mut out.stream else { return };
        if out.stage == Stage::Connecting {
            match stream.take_error() {
                // A new socket's buffer holds a hello.
                Ok(None) if matches!(stream.write(&hello(self.own.1, self.own.0, rank)), Ok(HELLO_BYTES)) => {
                    out.stage = Stage::Handshake;
                    return;
                }
                Ok(Some(error)) if error.kind() == ErrorKind::ConnectionRefused => {
                    return self.handle_loss(rank, Loss::Refused);
                }
                _ => return self.handle_loss(rank, Loss::NotAccepted),
            }
        }
        if out.stage == Stage::Handshake {
            let mut answer = [0];
            match stream.read(&mut answer) {
                Ok(1) if answer == [ACCEPTED] => {
                    (out.stage, out.redial, out.failing_since) = (Stage::Ready, Redial::default(), None);
                    out.alive_at = Some(Instant::now());
                }
                Err(error) if matches!(error.kind(), ErrorKind::WouldBlock | ErrorKind::Interrupted) => return,
                _ => return self.handle_loss(rank, Loss::NotAccepted),
            }
        }
        // The peer sends nothing more on this connection: readable means closed.
        let lost = match stream.read(&mut [0; 16]) {
            Err(error) if error.kind() == ErrorKind::WouldBlock => false,
            Err(error) => error.kind() != ErrorKind::Interrupted,
            Ok(_) => true,
        };
        if lost {
            return self.handle_loss(rank, Loss::Broken);
        }
        while !out.bytes.is_empty() {
            match stream.write(out.bytes.as_slices().0) {
                Ok(n) => drop(out.bytes.drain(..n)),
                Err(error) if error.kind() == ErrorKind::WouldBlock => return,
                Err(error) if error.kind() == ErrorKind::Interrupted => {}
                Err(_) => return self.handle_loss(rank, Loss::Broken),
            }
        }
    }

    /// Wait until something can be done; returns the ready targets.
    fn poll(&self, timeout: Option<Duration>) -> Vec<PollTarget> {
        let mut fds = vec![PollFd::new(&self.wake_receiver, PollFlags::IN)];
        let mut watched = vec![PollTarget::Wake];
        if self.acceptor.resume_at(Instant::now()).is_none() {
            fds.push(PollFd::new(self.acceptor.listener(), PollFlags::IN));
            watched.push(PollTarget::Listener);
        }
        for (index, from) in self.inbound.iter().enumerate() {
            fds.push(PollFd::new(&from.stream, PollFlags::IN));
            watched.push(PollTarget::Inbound(index));
        }
        for (index, peer) in self.unknown_peers.iter().enumerate() {
            fds.push(PollFd::new(&peer.stream, PollFlags::IN));
            watched.push(PollTarget::UnknownPeer(index));
        }
        for (index, out) in self.outbound.iter().enumerate() {
            let Some(stream) = &out.stream else { continue };
            let interest = match out.stage {
                Stage::Connecting => PollFlags::OUT,
                Stage::Ready if !out.bytes.is_empty() => PollFlags::IN | PollFlags::OUT,
                Stage::Handshake | Stage::Ready => PollFlags::IN,
            };
            fds.push(PollFd::new(stream, interest));
            watched.push(PollTarget::Outbound(Rank(index as u32)));
        }
        let timeout = timeout.map(|timeout| Timespec {
            tv_sec: i64::try_from(timeout.as_secs()).unwrap_or(i64::MAX),
            tv_nsec: timeout.subsec_nanos().into(),
        });
        let polled = poll(&mut fds, timeout.as_ref());
        let is_ready = fds.iter().map(|fd| polled.is_ok() && !fd.revents().is_empty());
        watched.iter().zip(is_ready).filter(|(_, ready)| *ready).map(|(watched, _)| *watched).collect()
    }
}

fn hello(token: JobToken, from: Rank, to: Rank) -> [u8; HELLO_BYTES] {
    let mut bytes = [0; HELLO_BYTES];
    bytes[0..4].copy_from_slice(b"SMCN");
    bytes[4..8].copy_from_slice(&VERSION.to_le_bytes());
    bytes[8..16].copy_from_slice(&token.0.to_le_bytes());
    bytes[16..20].copy_from_slice(&from.0.to_le_bytes());
    bytes[20..24].copy_from_slice(&to.0.to_le_bytes());
    bytes
}

const HELLO_BYTES: usize = 24;
const VERSION: u32 = 2;
/// Accepts a hello.
const ACCEPTED: u8 = 1;
/// Answers a ping.
const ALIVE: [u8; 1] = [0];
/// Interval between pings to a watched rank.
const PING_INTERVAL: Duration = Duration::from_millis(500);
/// How long a watched rank may be silent. Pings are answered by a thread that does nothing else.
const SILENCE_LIMIT: Duration = Duration::from_secs(2);
/// How long flushing may take when the channel closes.
const FLUSH_LIMIT: Duration = Duration::from_millis(200);
/// Maximum number of unidentified connections.
const UNKNOWN_PEERS_MAX: usize = 64;
/// Time limit for the whole handshake: the thread has nothing else to do.
const HELLO_LIMIT: Duration = Duration::from_secs(2);
/// Connections accepted before others are served.
const ACCEPTS_PER_ROUND: usize = 64;

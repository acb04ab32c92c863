//! Notes: short messages from rank to rank at any time, also while neither is in a call; and whether a rank is there.
//!
//! A thread has a connection for each direction between two ranks, made when there is first something to say. A
//! connection begins with magic `SMCN`, the version (u32), the job's token (u64), and the ranks from and to (u32 each).
//! The other end answers with the single byte 1: it is accepted. Then every note is its length (u32) and its bytes, all
//! little-endian. The empty note asks whether the other is there; the answer, which is a note of its own direction, is
//! the single byte 0.
//!
//! What is on its way when a connection breaks may be lost, and notes of an older connection may come after those of a
//! newer one. Nothing of a stranger gets past the first bytes; a note is at most as long as was said at the start.
//!
//! Invariants:
//! - connections that have not identified themselves share [`STRANGERS_MAX`] places and have [`HELLO_LIMIT`] each; those of
//!   ranks have places of their own;
//! - what a connection has said is looked at before it loses its place, and a connection that was not accepted loses no
//!   note: it is made again. So strangers cost time, and make no rank appear lost.

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

/// What comes of other ranks.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum Heard {
    /// A note.
    Note(Rank, Vec<u8>),
    /// Nobody listens where a rank that is watched did, as its host says. Notes to it are lost.
    Gone(Rank),
    /// A rank that is watched has not answered for [`SILENCE`].
    Silent(Rank),
}

/// What the thread is to do.
#[derive(Debug, Default)]
struct Orders {
    notes: VecDeque<(Rank, Vec<u8>)>,
    watched: BTreeSet<Rank>,
    is_over: bool,
}

/// Gives the thread its orders.
#[derive(Debug)]
pub(crate) struct Sender {
    orders: Mutex<Orders>,
    wake: UnixStream,
}

/// This rank's end of all notes. Dropping it sends what is left to send.
#[derive(Debug)]
pub(crate) struct Notes {
    sender: Arc<Sender>,
    thread: Option<JoinHandle<()>>,
    pid: u32,
}

impl Notes {
    /// Begin: `addresses` holds where every rank's `listener` is. From now on, `on_heard` is called on a thread of its own
    /// with what comes, and may return an answer.
    pub(crate) fn start(
        (rank, token, max_len_bytes): (Rank, JobToken, usize),
        listener: TcpListener,
        addresses: Vec<SocketAddr>,
        on_heard: impl FnMut(Heard) -> Option<Vec<u8>> + Send + 'static,
    ) -> io::Result<Self> {
        let acceptor = Acceptor::new(listener)?;
        let (wake, woken) = UnixStream::pair()?;
        wake.set_nonblocking(true)?;
        woken.set_nonblocking(true)?;
        let sender = Arc::new(Sender { orders: Mutex::default(), wake });
        let outs = addresses.iter().map(|_| Out::default()).collect();
        let carrier = Carrier {
            own: (rank, token),
            max_len_bytes,
            acceptor,
            addresses,
            outs,
            ins: Vec::new(),
            strangers: VecDeque::new(),
            woken,
            watched: BTreeSet::new(),
            sender: Arc::clone(&sender),
            on_heard: Box::new(on_heard),
        };
        let thread = std::thread::Builder::new().name("notes".into()).spawn(move || carrier.run())?;
        Ok(Self { sender, thread: Some(thread), pid: std::process::id() })
    }

    /// Return what gives orders; it may outlive this, and does nothing then.
    pub(crate) const fn sender(&self) -> &Arc<Sender> {
        &self.sender
    }
}

impl Sender {
    fn lock(&self) -> MutexGuard<'_, Orders> {
        self.orders.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Send a note.
    pub(crate) fn send(&self, to: Rank, note: Vec<u8>) {
        self.lock().notes.push_back((to, note));
        self.wake();
    }

    /// Watch these ranks, and no others.
    pub(crate) fn watch(&self, ranks: impl IntoIterator<Item = Rank>) {
        let watched: BTreeSet<Rank> = ranks.into_iter().collect();
        let mut orders = self.lock();
        if orders.watched != watched {
            orders.watched = watched;
            drop(orders);
            self.wake();
        }
    }

    fn wake(&self) {
        // Full, it wakes as well.
        let _ = (&self.wake).write(&[1]);
    }
}

impl Drop for Notes {
    fn drop(&mut self) {
        if self.pid != std::process::id() {
            // A forked child does not have the thread.
            return std::mem::forget(self.thread.take());
        }
        self.sender.lock().is_over = true;
        self.sender.wake();
        if let Some(thread) = self.thread.take() {
            // A panic there has been reported.
            let _ = thread.join();
        }
    }
}

/// How far the connection to a rank is.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
enum Stage {
    /// Dialled, if there is a socket.
    #[default]
    Connecting,
    /// Our hello is sent, the answer awaited.
    Greeting,
    /// Notes flow.
    Ready,
}

/// Why there is no connection to a rank any more.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Loss {
    /// Nobody listens there.
    Refused,
    /// It was not accepted: somebody may be there all the same.
    NotAccepted,
    /// It broke, having been accepted.
    Broken,
}

/// The connection to a rank.
#[derive(Debug, Default)]
struct Out {
    stream: Option<TcpStream>,
    stage: Stage,
    /// What is to be sent.
    bytes: VecDeque<u8>,
    /// When it may be dialled again.
    redial: Redial,
    /// Since when no connection was accepted.
    failing_since: Option<Instant>,
    asked_at: Option<Instant>,
    /// When it was last known to be there.
    there_at: Option<Instant>,
}

/// A connection from a rank.
#[derive(Debug)]
struct In {
    stream: TcpStream,
    from: Rank,
    bytes: Vec<u8>,
}

/// A connection that has not identified itself.
#[derive(Debug)]
struct Stranger {
    stream: TcpStream,
    since: Instant,
    hello: [u8; HELLO_BYTES],
    filled: usize,
}

#[derive(Debug, Clone, Copy)]
enum Watched {
    Wake,
    Listener,
    In(usize),
    Stranger(usize),
    Out(Rank),
}

struct Carrier {
    own: (Rank, JobToken),
    max_len_bytes: usize,
    acceptor: Acceptor,
    addresses: Vec<SocketAddr>,
    outs: Vec<Out>,
    ins: Vec<In>,
    /// In the order in which they came.
    strangers: VecDeque<Stranger>,
    woken: UnixStream,
    watched: BTreeSet<Rank>,
    sender: Arc<Sender>,
    on_heard: Box<dyn FnMut(Heard) -> Option<Vec<u8>> + Send>,
}

impl Carrier {
    fn run(mut self) {
        let mut end = None;
        loop {
            let now = Instant::now();
            if self.take_orders(now) {
                // What is left to say is said, to those that listen.
                let until = *end.get_or_insert(now + LAST_WORDS);
                if now >= until || self.outs.iter().all(|out| out.bytes.is_empty()) {
                    return self.outs.iter().filter_map(|out| out.stream.as_ref()).for_each(|stream| {
                        // Fails if the peer was faster.
                        let _ = stream.shutdown(Shutdown::Write);
                    });
                }
            }
            self.look_after(now);
            self.expire(now);
            self.dial_all(now);
            let ready = self.poll(self.next_at(end).map(|at| at.saturating_duration_since(Instant::now())));
            // From the back: a connection that ends leaves the list.
            for what in ready.into_iter().rev() {
                match what {
                    Watched::Wake => while matches!((&self.woken).read(&mut [0; 64]), Ok(n) if n > 0) {},
                    Watched::Listener => self.accept(Instant::now()),
                    Watched::In(index) => self.receive(index),
                    Watched::Stranger(index) => drop(self.identify(index)),
                    Watched::Out(rank) => self.send(rank),
                }
            }
        }
    }

    /// Take the orders in; tells whether it is over.
    fn take_orders(&mut self, now: Instant) -> bool {
        let (notes, watched, is_over) = {
            let mut orders = self.sender.lock();
            (std::mem::take(&mut orders.notes), orders.watched.clone(), orders.is_over)
        };
        for (rank, note) in notes {
            self.put(rank, &note);
        }
        for rank in watched.difference(&self.watched) {
            let out = &mut self.outs[rank.0 as usize];
            (out.there_at, out.asked_at) = (Some(now), None);
        }
        self.watched = watched;
        is_over
    }

    /// Line up a note.
    fn put(&mut self, to: Rank, note: &[u8]) {
        let Some(out) = self.outs.get_mut(to.0 as usize).filter(|_| to != self.own.0) else { return };
        out.bytes.extend((note.len() as u32).to_le_bytes());
        out.bytes.extend(note);
    }

    fn hear(&mut self, heard: Heard) {
        let (Heard::Note(rank, _) | Heard::Gone(rank) | Heard::Silent(rank)) = heard;
        if let Some(answer) = (self.on_heard)(heard) {
            self.put(rank, &answer);
        }
    }

    /// Ask those that are watched whether they are there.
    fn look_after(&mut self, now: Instant) {
        for rank in self.watched.clone() {
            let out = &mut self.outs[rank.0 as usize];
            if now.saturating_duration_since(*out.there_at.get_or_insert(now)) >= SILENCE {
                out.there_at = Some(now);
                self.hear(Heard::Silent(rank));
            } else if out.asked_at.is_none_or(|at| at + ASK_EVERY <= now) && out.bytes.is_empty() {
                out.asked_at = Some(now);
                self.put(rank, &[]);
            }
        }
    }

    /// Return when there is something to do without being woken.
    fn next_at(&self, end: Option<Instant>) -> Option<Instant> {
        let asks = self.watched.iter().filter_map(|rank| {
            let out = &self.outs[rank.0 as usize];
            Some(out.there_at? + SILENCE).into_iter().chain(out.asked_at.map(|at| at + ASK_EVERY)).min()
        });
        let dials = self.outs.iter().filter(|out| out.stream.is_none() && !out.bytes.is_empty());
        let dials = dials.filter_map(|out| out.redial.at());
        let hellos = self.strangers.front().map(|stranger| stranger.since + HELLO_LIMIT);
        let accepts = self.acceptor.resume_at(Instant::now());
        asks.chain(dials).chain(end).chain(hellos).chain(accepts).min()
    }

    /// Dial where there is something to say.
    fn dial_all(&mut self, now: Instant) {
        for index in 0..self.outs.len() {
            let out = &self.outs[index];
            if out.stream.is_some() || out.bytes.is_empty() || out.redial.is_pausing(now) {
                continue;
            }
            let rank = Rank(index as u32);
            match dial(self.addresses[index]) {
                Ok(Some(stream)) => {
                    (self.outs[index].stream, self.outs[index].stage) = (Some(stream), Stage::Connecting)
                }
                Err(error) if error.kind() == ErrorKind::ConnectionRefused => self.lose(rank, Loss::Refused),
                Ok(None) | Err(_) => self.lose(rank, Loss::NotAccepted),
            }
        }
    }

    /// The connection to a rank has come to nothing, and with it what was to be said, unless it was not even accepted.
    fn lose(&mut self, rank: Rank, loss: Loss) {
        let now = Instant::now();
        let out = &mut self.outs[rank.0 as usize];
        out.stream = None;
        if loss == Loss::Broken {
            out.redial = Redial::default();
        } else {
            out.redial.fail(now);
        }
        let failing_since = *out.failing_since.get_or_insert(now);
        if loss == Loss::NotAccepted && now.saturating_duration_since(failing_since) < SILENCE {
            return;
        }
        out.failing_since = None;
        out.bytes.clear();
        // Others may have left in good order.
        if !self.watched.contains(&rank) {
            return;
        }
        match loss {
            Loss::Refused => self.hear(Heard::Gone(rank)),
            Loss::Broken => {
                // Is it gone? Who listens answers.
                self.outs[rank.0 as usize].asked_at = Some(now);
                self.put(rank, &[]);
            }
            Loss::NotAccepted => {}
        }
    }

    /// Accept a few connections; the oldest that has still not identified itself makes room for the newest.
    fn accept(&mut self, now: Instant) {
        for _ in 0..ACCEPTS_PER_ROUND {
            let Some(Accepted { stream, is_last }) = self.acceptor.accept(now) else { return };
            self.strangers.push_back(Stranger { stream, since: now, hello: [0; HELLO_BYTES], filled: 0 });
            let is_stranger = !self.identify(self.strangers.len() - 1);
            if is_last || is_stranger && self.strangers.len() > STRANGERS_MAX {
                self.evict();
            }
        }
    }

    /// Hang up on those who have not identified themselves in time.
    fn expire(&mut self, now: Instant) {
        while self.strangers.front().is_some_and(|stranger| stranger.since + HELLO_LIMIT <= now) {
            self.evict();
        }
    }

    /// Take the place of who has waited longest, unless it is a rank after all, which has another then.
    fn evict(&mut self) {
        if !self.strangers.is_empty() && !self.identify(0) {
            self.strangers.pop_front();
        }
    }

    /// Look at what a connection has said; returns whether it has left the strangers, for the ranks or for good.
    fn identify(&mut self, index: usize) -> bool {
        let (own, token) = self.own;
        let stranger = &mut self.strangers[index];
        let rank = loop {
            match stranger.stream.read(&mut stranger.hello[stranger.filled..]) {
                Ok(n @ 1..) => stranger.filled += n,
                Err(error) if error.kind() == ErrorKind::WouldBlock => return false,
                Err(error) if error.kind() == ErrorKind::Interrupted => continue,
                Ok(0) | Err(_) => break None,
            }
            if stranger.filled == HELLO_BYTES {
                let rank = Rank(u32::from_le_bytes(std::array::from_fn(|byte| stranger.hello[16 + byte])));
                let is_other = (rank.0 as usize) < self.addresses.len() && rank != own;
                break Some(rank).filter(|_| is_other && stranger.hello == hello(token, rank, own));
            }
        };
        let Some(Stranger { mut stream, .. }) = self.strangers.remove(index) else { return true };
        // A fresh socket's buffer holds a byte.
        if let Some(from) = rank
            && matches!(stream.write(&[ACCEPTED]), Ok(1))
        {
            self.outs[from.0 as usize].there_at = Some(Instant::now());
            self.ins.push(In { stream, from, bytes: Vec::new() });
        }
        true
    }

    /// Read what has come from a rank.
    fn receive(&mut self, index: usize) {
        let mut buffer = [0; 16 << 10];
        let ended = loop {
            let from = &mut self.ins[index];
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
            self.ins.swap_remove(index);
        }
    }

    /// Take the notes out of what was read; false if one is too long.
    fn parse(&mut self, index: usize) -> bool {
        let In { from: rank, .. } = self.ins[index];
        let from = &mut self.ins[index];
        let mut at = 0;
        self.outs[rank.0 as usize].there_at = Some(Instant::now());
        let mut notes = Vec::new();
        while let Some(len) = from.bytes[at..].first_chunk::<4>() {
            let len = u32::from_le_bytes(*len) as usize;
            if len > self.max_len_bytes {
                return false;
            }
            let Some(note) = from.bytes[at + 4..].get(..len) else { break };
            notes.push(note.to_vec());
            at += 4 + len;
        }
        from.bytes.drain(..at);
        for note in notes {
            match &note[..] {
                [] => self.put(rank, &HERE),
                note if note == HERE => {}
                _ => self.hear(Heard::Note(rank, note)),
            }
        }
        true
    }

    /// Send what the socket takes; a connection that was dialled is there or not.
    fn send(&mut self, rank: Rank) {
        let out = &mut self.outs[rank.0 as usize];
        let Some(stream) = &mut out.stream else { return };
        if out.stage == Stage::Connecting {
            match stream.take_error() {
                // A fresh socket's buffer holds a hello.
                Ok(None) if matches!(stream.write(&hello(self.own.1, self.own.0, rank)), Ok(HELLO_BYTES)) => {
                    out.stage = Stage::Greeting;
                    return;
                }
                Ok(Some(error)) if error.kind() == ErrorKind::ConnectionRefused => {
                    return self.lose(rank, Loss::Refused);
                }
                _ => return self.lose(rank, Loss::NotAccepted),
            }
        }
        if out.stage == Stage::Greeting {
            let mut answer = [0];
            match stream.read(&mut answer) {
                Ok(1) if answer == [ACCEPTED] => {
                    (out.stage, out.redial, out.failing_since) = (Stage::Ready, Redial::default(), None);
                    out.there_at = Some(Instant::now());
                }
                Err(error) if matches!(error.kind(), ErrorKind::WouldBlock | ErrorKind::Interrupted) => return,
                _ => return self.lose(rank, Loss::NotAccepted),
            }
        }
        // The other end says nothing more: what is there to read is its end.
        let lost = match stream.read(&mut [0; 16]) {
            Err(error) if error.kind() == ErrorKind::WouldBlock => false,
            Err(error) => error.kind() != ErrorKind::Interrupted,
            Ok(_) => true,
        };
        if lost {
            return self.lose(rank, Loss::Broken);
        }
        while !out.bytes.is_empty() {
            match stream.write(out.bytes.as_slices().0) {
                Ok(n) => drop(out.bytes.drain(..n)),
                Err(error) if error.kind() == ErrorKind::WouldBlock => return,
                Err(error) if error.kind() == ErrorKind::Interrupted => {}
                Err(_) => return self.lose(rank, Loss::Broken),
            }
        }
    }

    /// Wait until something can be done; returns what.
    fn poll(&self, timeout: Option<Duration>) -> Vec<Watched> {
        let mut fds = vec![PollFd::new(&self.woken, PollFlags::IN)];
        let mut watched = vec![Watched::Wake];
        if self.acceptor.resume_at(Instant::now()).is_none() {
            fds.push(PollFd::new(self.acceptor.listener(), PollFlags::IN));
            watched.push(Watched::Listener);
        }
        for (index, from) in self.ins.iter().enumerate() {
            fds.push(PollFd::new(&from.stream, PollFlags::IN));
            watched.push(Watched::In(index));
        }
        for (index, stranger) in self.strangers.iter().enumerate() {
            fds.push(PollFd::new(&stranger.stream, PollFlags::IN));
            watched.push(Watched::Stranger(index));
        }
        for (index, out) in self.outs.iter().enumerate() {
            let Some(stream) = &out.stream else { continue };
            let interest = match out.stage {
                Stage::Connecting => PollFlags::OUT,
                Stage::Ready if !out.bytes.is_empty() => PollFlags::IN | PollFlags::OUT,
                Stage::Greeting | Stage::Ready => PollFlags::IN,
            };
            fds.push(PollFd::new(stream, interest));
            watched.push(Watched::Out(Rank(index as u32)));
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
/// The answer to a hello.
const ACCEPTED: u8 = 1;
/// The answer to the empty note.
const HERE: [u8; 1] = [0];
/// How often a rank that is watched is asked.
const ASK_EVERY: Duration = Duration::from_millis(500);
/// How long a rank that is watched may be silent; its notes are answered by a thread that does nothing else.
const SILENCE: Duration = Duration::from_secs(2);
/// How long sending what is left may take at the end.
const LAST_WORDS: Duration = Duration::from_millis(200);
/// Connections that have not identified themselves.
const STRANGERS_MAX: usize = 64;
/// How long a connection may take to identify itself, altogether: ranks have nothing else to do then.
const HELLO_LIMIT: Duration = Duration::from_secs(2);
/// Connections accepted before others are looked at.
const ACCEPTS_PER_ROUND: usize = 64;

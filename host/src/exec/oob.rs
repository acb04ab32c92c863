//! Out-of-band channel: short messages between ranks at any time, even while neither is in a call, and detection of
//! ranks that are gone or unresponsive.
//!
//! A thread maintains one connection for each direction between two ranks, opened when there is first something to
//! send. It begins with a handshake, in which both ranks prove that they know the job's secret ([`super::auth`]). Each
//! message follows as its length (u32, little-endian) and its bytes. The empty message is a ping; its answer, a message
//! in the other direction, is the single byte 0.
//!
//! Messages in flight when a connection breaks may be lost, and messages of an older connection may arrive after those
//! of a newer one. An unknown peer gets no further than the proof. Messages are limited to the length given at the
//! start.
//!
//! Invariants:
//! - Connections that have not identified themselves share [`inbound::UNKNOWN_PEERS_MAX`] places and have
//!   [`HELLO_LIMIT`] each; ranks have places of their own.
//! - Bytes that have arrived are processed before a connection is evicted, and a connection that was not accepted loses
//!   no message: it is dialled again. So unknown peers cost time, but never make a rank appear lost.
//! - Whoever listens at a rank's address without knowing the secret counts as nobody: the rank has ended, and its port
//!   is another's.

mod inbound;
mod outbound;
#[cfg(test)]
mod tests;
mod worker;

use super::acceptor::Acceptor;
use super::auth::RefusalCount;
use crate::secret::JobSecret;
use outbound::Outbound;
use std::collections::{BTreeSet, VecDeque};
use std::io::{self, Write};
use std::net::{SocketAddr, TcpListener};
use std::os::unix::net::UnixStream;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::thread::JoinHandle;
use std::time::Duration;
use sumac_hal::ids::Rank;
use worker::Worker;

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
        (rank, secret, max_len_bytes): (Rank, JobSecret, usize),
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
            own: rank,
            secret,
            max_len_bytes,
            acceptor,
            addresses,
            outbound,
            inbound: Vec::new(),
            unknown_peers: VecDeque::new(),
            refusals: RefusalCount::default(),
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

/// Answers a ping.
const ALIVE: [u8; 1] = [0];
/// How long a watched rank may be silent. Pings are answered by a thread that does nothing else.
const SILENCE_LIMIT: Duration = Duration::from_secs(2);
/// Time limit for the whole handshake: the thread has nothing else to do.
const HELLO_LIMIT: Duration = Duration::from_secs(2);

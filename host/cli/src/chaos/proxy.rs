//! The engine on real UDP sockets: one thread, which waits in one place.
//!
//! Each link has a socket that clients send to, and each client one towards the target, which takes packets of the target
//! alone. Links and clients are numbered in an epoll set; the thread sleeps on that, on an event for its owner's orders, and
//! until the next packet that is held back is due.
//!
//! Invariant: what one socket brings in a turn is bounded, so that none keeps the others waiting.

use super::engine::{Direction, Engine, Flow, LinkCounters, Sockets};
use rustix::event::epoll::{self, CreateFlags, EventData, EventFlags};
use rustix::event::{EventfdFlags, PollFd, PollFlags, Timespec, eventfd, poll};
use rustix::io::Errno;
use std::collections::BTreeMap;
use std::io;
use std::net::{Ipv4Addr, Ipv6Addr, SocketAddr, UdpSocket};
use std::os::fd::OwnedFd;
use std::sync::mpsc::{Sender, channel};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::thread::JoinHandle;
use std::time::Instant as Clock;
use sumac_hal::time::Instant;

/// The longest UDP datagram, and a little more.
const PACKET_MAX_BYTES: usize = 1 << 16;

/// Packets taken from a socket before others get their turn.
const PACKETS_PER_TURN: usize = 64;

/// Sockets told of at a time.
const EVENTS: usize = 64;

/// What a socket is to hold, in bytes, as far as the system allows: a window of each child.
const BUFFER_BYTES: usize = 4 << 20;

/// How many bits of a socket's number are its client's; the others are its link's.
const CLIENT_BITS: u32 = 48;

/// The number of a link's own socket among its clients', of whom there are never so many.
const FRONT: u64 = (1 << CLIENT_BITS) - 1;

/// A running proxy. Dropping it ends its thread.
#[derive(Debug)]
pub(crate) struct Proxy {
    fronts: Vec<SocketAddr>,
    shared: Arc<Shared>,
    thread: Option<JoinHandle<()>>,
}

/// What the thread and its owner share.
#[derive(Debug)]
struct Shared {
    wake: OwnedFd,
    orders: Mutex<Orders>,
    counters: Mutex<Vec<LinkCounters>>,
}

#[derive(Debug, Default)]
struct Orders {
    stop: bool,
    /// Let all clients go, and drop this.
    forget: Option<Sender<()>>,
}

/// Open a socket to relay from.
pub(crate) fn front(addr: SocketAddr) -> io::Result<UdpSocket> {
    let socket = UdpSocket::bind(addr)?;
    socket.set_nonblocking(true)?;
    // What the system does not grant is lost when much comes at once, as on any link.
    let _ = rustix::net::sockopt::set_socket_recv_buffer_size(&socket, BUFFER_BYTES);
    let _ = rustix::net::sockopt::set_socket_send_buffer_size(&socket, BUFFER_BYTES);
    Ok(socket)
}

impl Proxy {
    /// Relay from each of these sockets to its target; `engine` has as many links. `ended` is called when the thread ends,
    /// for whatever reason.
    ///
    /// # Errors
    /// The system's, if it has no descriptors or threads.
    pub(crate) fn start(
        engine: Engine,
        links: Vec<(UdpSocket, SocketAddr)>,
        ended: impl FnOnce() + Send + 'static,
    ) -> io::Result<Self> {
        let fronts = links.iter().map(|(front, _)| front.local_addr()).collect::<io::Result<_>>()?;
        let epoll = epoll::create(CreateFlags::CLOEXEC)?;
        for (link, (front, _)) in links.iter().enumerate() {
            epoll::add(&epoll, front, number((link, FRONT)), EventFlags::IN)?;
        }
        let shared = Shared {
            wake: eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK)?,
            orders: Mutex::default(),
            counters: Mutex::new(engine.counters().to_vec()),
        };
        let shared = Arc::new(shared);
        let seen = Arc::clone(&shared);
        let wires = Wires { epoll, links, backs: BTreeMap::new() };
        let thread = std::thread::Builder::new().name("relay".into()).spawn(move || {
            if let Err(error) = run(engine, wires, &seen) {
                tracing::error!(%error, "the relay has ended");
            }
            ended();
        })?;
        Ok(Self { fronts, shared, thread: Some(thread) })
    }

    /// Return where clients send to, link by link.
    pub(crate) fn fronts(&self) -> &[SocketAddr] {
        &self.fronts
    }

    /// Return what was counted so far, link by link.
    pub(crate) fn counters(&self) -> Vec<LinkCounters> {
        lock(&self.shared.counters).clone()
    }

    /// Let all clients go, and what is held back for them; returns when that is done.
    pub(crate) fn forget(&self) {
        let (done, wait) = channel();
        lock(&self.shared.orders).forget = Some(done);
        self.wake();
        // It ends without a word: the sender is dropped, also by a thread that has ended.
        let _ = wait.recv();
    }

    /// End the thread, and return what was counted.
    pub(crate) fn finish(mut self) -> Vec<LinkCounters> {
        self.stop();
        self.counters()
    }

    fn wake(&self) {
        // It can fail only when the counter is full, and then the thread is awake.
        let _ = rustix::io::write(&self.shared.wake, &1_u64.to_ne_bytes());
    }

    fn stop(&mut self) {
        lock(&self.shared.orders).stop = true;
        self.wake();
        if let Some(thread) = self.thread.take() {
            let _ = thread.join();
        }
    }
}

impl Drop for Proxy {
    fn drop(&mut self) {
        self.stop();
    }
}

/// The sockets.
struct Wires {
    epoll: OwnedFd,
    links: Vec<(UdpSocket, SocketAddr)>,
    backs: BTreeMap<Flow, UdpSocket>,
}

impl Sockets for Wires {
    fn open(&mut self, flow: Flow) -> bool {
        let opened = connected(self.links[flow.0].1).and_then(|back| {
            epoll::add(&self.epoll, &back, number(flow), EventFlags::IN)?;
            Ok(back)
        });
        opened.map(|back| _ = self.backs.insert(flow, back)).inspect_err(no_socket).is_ok()
    }

    fn close(&mut self, flow: Flow) {
        // Closing takes it out of the set.
        self.backs.remove(&flow);
    }

    fn send(&mut self, flow: Flow, direction: Direction, client: SocketAddr, bytes: &[u8]) -> bool {
        let sent = match direction {
            Direction::Up => self.backs.get(&flow).map(|back| back.send(bytes)),
            Direction::Down => Some(self.links[flow.0].0.send_to(bytes, client)),
        };
        sent.is_some_and(|sent| sent.is_ok())
    }
}

fn no_socket(error: &io::Error) {
    tracing::debug!(%error, "no socket for another client");
}

/// Return a socket that sends to `target`, and takes packets of it alone.
fn connected(target: SocketAddr) -> io::Result<UdpSocket> {
    let any = match target {
        SocketAddr::V4(_) => SocketAddr::from((Ipv4Addr::UNSPECIFIED, 0)),
        SocketAddr::V6(_) => SocketAddr::from((Ipv6Addr::UNSPECIFIED, 0)),
    };
    let socket = front(any)?;
    socket.connect(target)?;
    Ok(socket)
}

/// Number a socket in the epoll set.
fn number((link, client): Flow) -> EventData {
    EventData::new_u64((link as u64) << CLIENT_BITS | client & FRONT)
}

/// Relay until the owner wants no more, or the system.
fn run(mut engine: Engine, mut wires: Wires, shared: &Shared) -> io::Result<()> {
    let start = Clock::now();
    let now = || Instant::from_nanos(u64::try_from(start.elapsed().as_nanos()).unwrap_or(u64::MAX));
    let mut buffer = vec![0; PACKET_MAX_BYTES];
    loop {
        let Orders { stop, forget } = std::mem::take(&mut *lock(&shared.orders));
        if forget.is_some() {
            engine.forget(&mut wires);
        }
        engine.release(now(), &mut wires);
        lock(&shared.counters).copy_from_slice(engine.counters());
        // Whoever waits for it sees what was counted before.
        drop(forget);
        if stop {
            return Ok(());
        }
        let left = engine.next_release().map(|at| at - now());
        let left = left.and_then(|left| Timespec::try_from(left).ok());
        let mut fds = [PollFd::new(&wires.epoll, PollFlags::IN), PollFd::new(&shared.wake, PollFlags::IN)];
        match poll(&mut fds, left.as_ref()) {
            Ok(_) => {}
            Err(Errno::INTR) => continue,
            Err(error) => return Err(error.into()),
        }
        let [stirred, woken] = fds.map(|fd| !fd.revents().is_empty());
        if woken {
            // What it counts does not matter, only that it is taken.
            let _ = rustix::io::read(&shared.wake, &mut [0; 8]);
        }
        if stirred {
            take_in(&mut engine, &mut wires, &now, &mut buffer)?;
        }
    }
}

/// Take in what has come.
fn take_in(engine: &mut Engine, wires: &mut Wires, now: &impl Fn() -> Instant, buffer: &mut [u8]) -> io::Result<()> {
    let mut events = [const { epoll::Event { flags: EventFlags::empty(), data: EventData::new_u64(0) } }; EVENTS];
    let at_once = Timespec { tv_sec: 0, tv_nsec: 0 };
    let count = match epoll::wait(&wires.epoll, &mut events[..], Some(&at_once)) {
        Err(Errno::INTR) => 0,
        count => count?,
    };
    for event in &events[..count] {
        let number = event.data.u64();
        let (link, client) = ((number >> CLIENT_BITS) as usize, number & FRONT);
        for _ in 0..PACKETS_PER_TURN {
            let received = if client == FRONT {
                wires.links[link].0.recv_from(buffer)
            } else {
                // It may have been closed for another client since.
                let Some(back) = wires.backs.get(&(link, client)) else { break };
                back.recv(buffer).map(|len| (len, wires.links[link].1))
            };
            match received {
                Ok((len, from)) if client == FRONT => engine.up(now(), link, from, &buffer[..len], wires),
                Ok((len, _)) => engine.down(now(), (link, client), &buffer[..len], wires),
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => break,
                // An ICMP message about an earlier packet: that one is lost.
                Err(_) => {}
            }
        }
    }
    Ok(())
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

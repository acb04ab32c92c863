//! The engine on real UDP sockets, on one thread.
//!
//! Each link has a front socket to which clients send, and each client has a socket towards the target that receives
//! from the target only. All sockets are in one epoll set. The thread waits for this set, for commands of its owner (an
//! eventfd), and until the next delayed packet is due.
//!
//! Invariant: the number of packets read from one socket per turn is bounded, so that no socket starves the others.

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

/// Room for the longest UDP datagram.
const PACKET_MAX_BYTES: usize = 1 << 16;

/// Packets read from a socket per turn.
const PACKETS_PER_TURN: usize = 64;

/// Ready sockets per call of epoll.
const EVENTS: usize = 64;

/// The requested buffer size of a socket in bytes, for a window of each child; the system may grant less.
const BUFFER_BYTES: usize = 4 << 20;

/// How many bits of a socket's number hold the client; the others hold the link.
const CLIENT_BITS: u32 = 48;

/// The client number that stands for a link's front socket; no client reaches it.
const FRONT: u64 = (1 << CLIENT_BITS) - 1;

/// A running proxy. Dropping it ends its thread.
#[derive(Debug)]
pub(crate) struct Proxy {
    fronts: Vec<SocketAddr>,
    shared: Arc<Shared>,
    thread: Option<JoinHandle<()>>,
}

/// The state that the thread shares with its owner.
#[derive(Debug)]
struct Shared {
    wake: OwnedFd,
    commands: Mutex<Commands>,
    counters: Mutex<Vec<LinkCounters>>,
}

#[derive(Debug, Default)]
struct Commands {
    stop: bool,
    /// Remove all clients, then drop this sender.
    forget: Option<Sender<()>>,
}

/// Open a front socket.
pub(crate) fn front(addr: SocketAddr) -> io::Result<UdpSocket> {
    let socket = UdpSocket::bind(addr)?;
    socket.set_nonblocking(true)?;
    // With a smaller buffer than requested, bursts lose packets, as on any link.
    let _ = rustix::net::sockopt::set_socket_recv_buffer_size(&socket, BUFFER_BYTES);
    let _ = rustix::net::sockopt::set_socket_send_buffer_size(&socket, BUFFER_BYTES);
    Ok(socket)
}

impl Proxy {
    /// Relay from each of these sockets to its target; `engine` has as many links. `ended` is called when the thread
    /// ends, for whatever reason.
    ///
    /// # Errors
    /// The system has no file descriptor or thread left.
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
            commands: Mutex::default(),
            counters: Mutex::new(engine.counters().to_vec()),
        };
        let shared = Arc::new(shared);
        let seen = Arc::clone(&shared);
        let sockets = UdpSockets { epoll, links, backs: BTreeMap::new() };
        let thread = std::thread::Builder::new().name("relay".into()).spawn(move || {
            if let Err(error) = run(engine, sockets, &seen) {
                tracing::error!(%error, "the relay failed");
            }
            ended();
        })?;
        Ok(Self { fronts, shared, thread: Some(thread) })
    }

    /// Return the addresses to which clients send, link by link.
    pub(crate) fn fronts(&self) -> &[SocketAddr] {
        &self.fronts
    }

    /// Return the counters, link by link.
    pub(crate) fn counters(&self) -> Vec<LinkCounters> {
        lock(&self.shared.counters).clone()
    }

    /// Remove all clients and their delayed packets, and wait until that is done.
    pub(crate) fn forget(&self) {
        let (done, wait) = channel();
        lock(&self.shared.commands).forget = Some(done);
        self.wake();
        // The thread drops the sender when it is done, or when it ends.
        let _ = wait.recv();
    }

    /// End the thread and return the counters.
    pub(crate) fn finish(mut self) -> Vec<LinkCounters> {
        self.stop();
        self.counters()
    }

    fn wake(&self) {
        // It fails only if the counter is full, and then the thread is awake.
        let _ = rustix::io::write(&self.shared.wake, &1_u64.to_ne_bytes());
    }

    fn stop(&mut self) {
        lock(&self.shared.commands).stop = true;
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

/// The sockets of all links and clients.
struct UdpSockets {
    epoll: OwnedFd,
    links: Vec<(UdpSocket, SocketAddr)>,
    backs: BTreeMap<Flow, UdpSocket>,
}

impl Sockets for UdpSockets {
    fn open(&mut self, flow: Flow) -> bool {
        let opened = connected(self.links[flow.0].1).and_then(|back| {
            epoll::add(&self.epoll, &back, number(flow), EventFlags::IN)?;
            Ok(back)
        });
        opened.map(|back| _ = self.backs.insert(flow, back)).inspect_err(no_socket).is_ok()
    }

    fn close(&mut self, flow: Flow) {
        // Closing removes it from the epoll set.
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
    tracing::debug!(%error, "cannot open a socket for a new client");
}

/// Return a socket that sends to `target` and receives from it only.
fn connected(target: SocketAddr) -> io::Result<UdpSocket> {
    let any = match target {
        SocketAddr::V4(_) => SocketAddr::from((Ipv4Addr::UNSPECIFIED, 0)),
        SocketAddr::V6(_) => SocketAddr::from((Ipv6Addr::UNSPECIFIED, 0)),
    };
    let socket = front(any)?;
    socket.connect(target)?;
    Ok(socket)
}

/// Return the number of a socket in the epoll set.
fn number((link, client): Flow) -> EventData {
    EventData::new_u64((link as u64) << CLIENT_BITS | client & FRONT)
}

/// Relay until the owner stops it or a system call fails.
fn run(mut engine: Engine, mut sockets: UdpSockets, shared: &Shared) -> io::Result<()> {
    let start = Clock::now();
    let now = || Instant::from_nanos(u64::try_from(start.elapsed().as_nanos()).unwrap_or(u64::MAX));
    let mut buffer = vec![0; PACKET_MAX_BYTES];
    loop {
        let Commands { stop, forget } = std::mem::take(&mut *lock(&shared.commands));
        if forget.is_some() {
            engine.forget(&mut sockets);
        }
        engine.release(now(), &mut sockets);
        lock(&shared.counters).copy_from_slice(engine.counters());
        // Wakes the owner, which sees the counters published above.
        drop(forget);
        if stop {
            return Ok(());
        }
        let left = engine.next_release().map(|at| at - now());
        let left = left.and_then(|left| Timespec::try_from(left).ok());
        let mut fds = [PollFd::new(&sockets.epoll, PollFlags::IN), PollFd::new(&shared.wake, PollFlags::IN)];
        match poll(&mut fds, left.as_ref()) {
            Ok(_) => {}
            Err(Errno::INTR) => continue,
            Err(error) => return Err(error.into()),
        }
        let [sockets_ready, woken] = fds.map(|fd| !fd.revents().is_empty());
        if woken {
            // Reset the counter; its value is of no interest.
            let _ = rustix::io::read(&shared.wake, &mut [0; 8]);
        }
        if sockets_ready {
            receive_ready(&mut engine, &mut sockets, &now, &mut buffer)?;
        }
    }
}

/// Receive from the sockets that are ready.
fn receive_ready(
    engine: &mut Engine,
    sockets: &mut UdpSockets,
    now: &impl Fn() -> Instant,
    buffer: &mut [u8],
) -> io::Result<()> {
    let mut events = [const { epoll::Event { flags: EventFlags::empty(), data: EventData::new_u64(0) } }; EVENTS];
    let at_once = Timespec { tv_sec: 0, tv_nsec: 0 };
    let count = match epoll::wait(&sockets.epoll, &mut events[..], Some(&at_once)) {
        Err(Errno::INTR) => 0,
        count => count?,
    };
    for event in &events[..count] {
        let number = event.data.u64();
        let (link, client) = ((number >> CLIENT_BITS) as usize, number & FRONT);
        for _ in 0..PACKETS_PER_TURN {
            let received = if client == FRONT {
                sockets.links[link].0.recv_from(buffer)
            } else {
                // It may have been closed meanwhile, for another client.
                let Some(back) = sockets.backs.get(&(link, client)) else { break };
                back.recv(buffer).map(|len| (len, sockets.links[link].1))
            };
            match received {
                Ok((len, from)) if client == FRONT => engine.up(now(), link, from, &buffer[..len], sockets),
                Ok((len, _)) => engine.down(now(), (link, client), &buffer[..len], sockets),
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => break,
                // An ICMP error about an earlier packet, which is lost.
                Err(_) => {}
            }
        }
    }
    Ok(())
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

//! A listener that neither spins nor fails when the process has run out of file descriptors.
//!
//! A connection that cannot be accepted keeps the listener readable. The acceptor therefore holds one descriptor in
//! reserve. When there is no other, it first pauses, so that waiting peers have time to send their hello. Then it
//! accepts each connection with the reserve; the caller inspects it, and either keeps it or closes it for the next one.

use rustix::event::{EventfdFlags, eventfd};
use std::io::{self, ErrorKind};
use std::net::{SocketAddr, TcpListener, TcpStream};
use std::os::fd::OwnedFd;
use std::time::{Duration, Instant};
use sumac_hal::traffic_class::TrafficClass;

/// A listening socket and the reserve descriptor.
#[derive(Debug)]
pub(super) struct Acceptor {
    listener: TcpListener,
    /// The listener's, also of connections that are dialled.
    traffic_class: TrafficClass,
    reserve: Option<OwnedFd>,
    /// No connection is accepted before.
    resume_at: Option<Instant>,
    /// Connections that may still be accepted with the reserve before the next pause.
    on_reserve: u32,
}

/// An accepted, non-blocking connection.
#[derive(Debug)]
pub(super) struct Accepted {
    pub(super) stream: TcpStream,
    /// It took the last descriptor: the caller must close this connection or another.
    pub(super) is_last: bool,
}

impl Acceptor {
    /// Take over a listening socket.
    pub(super) fn new(listener: TcpListener) -> io::Result<Self> {
        listener.set_nonblocking(true)?;
        // If the system refuses, the backlog stays as it was.
        let _ = rustix::net::listen(&listener, BACKLOG);
        let traffic_class = TrafficClass::of(&listener)?;
        Ok(Self { listener, traffic_class, reserve: reserve(), resume_at: None, on_reserve: 0 })
    }

    /// Return the socket.
    pub(super) const fn listener(&self) -> &TcpListener {
        &self.listener
    }

    /// Start connecting to a rank; `None` for a transient shortage that warrants a retry.
    ///
    /// # Errors
    /// The system's error; [`ErrorKind::ConnectionRefused`] if nobody listens there.
    pub(super) fn dial(&self, address: SocketAddr) -> io::Result<Option<TcpStream>> {
        use rustix::io::Errno;
        use rustix::net::{AddressFamily, SocketFlags, SocketType, connect, socket_with};
        let family = if address.is_ipv4() { AddressFamily::INET } else { AddressFamily::INET6 };
        let socket = socket_with(family, SocketType::STREAM, SocketFlags::NONBLOCK | SocketFlags::CLOEXEC, None)?;
        let stream = TcpStream::from(socket);
        self.traffic_class.apply(&stream)?;
        stream.set_nodelay(true)?;
        match connect(&stream, &address) {
            Ok(()) | Err(Errno::INPROGRESS) => Ok(Some(stream)),
            // No local port is free, as when others connect to the same address without end.
            Err(Errno::ADDRNOTAVAIL | Errno::AGAIN) => Ok(None),
            Err(errno) => Err(errno.into()),
        }
    }

    /// Return when to try again; `None`: whenever the socket is readable.
    pub(super) fn resume_at(&self, now: Instant) -> Option<Instant> {
        self.resume_at.filter(|at| *at > now)
    }

    /// Accept the next connection, if one is waiting and may be accepted now.
    pub(super) fn accept(&mut self, now: Instant) -> Option<Accepted> {
        if self.resume_at(now).is_some() {
            return None;
        }
        self.resume_at = None;
        self.reserve = self.reserve.take().or_else(reserve);
        match self.next() {
            Ok(stream) => return stream.map(|stream| Accepted { stream, is_last: false }),
            Err(error) if self.on_reserve == 0 => {
                crate::log::warn!(%error, "cannot accept connections; pausing");
                self.on_reserve = ON_RESERVE_MAX;
            }
            Err(_) => {
                self.on_reserve -= 1;
                let had_reserve = self.reserve.take().is_some();
                if let (true, Ok(stream)) = (had_reserve, self.next()) {
                    return stream.map(|stream| Accepted { stream, is_last: true });
                }
            }
        }
        self.resume_at = Some(now + ACCEPT_PAUSE);
        None
    }

    /// Accept one connection; `Ok(None)` if none is waiting.
    fn next(&self) -> io::Result<Option<TcpStream>> {
        loop {
            match self.listener.accept() {
                Ok((stream, _)) if stream.set_nonblocking(true).and_then(|()| stream.set_nodelay(true)).is_ok() => {
                    return Ok(Some(stream));
                }
                // The peer has reset it already.
                Ok(_) => {}
                Err(error) if error.kind() == ErrorKind::WouldBlock => return Ok(None),
                Err(error) if matches!(error.kind(), ErrorKind::Interrupted | ErrorKind::ConnectionAborted) => {}
                Err(error) => return Err(error),
            }
        }
    }
}

/// Redial timer: pauses double, up to [`REDIAL_PAUSE_MAX`].
#[derive(Debug, Default)]
pub(super) struct Redial {
    failures: u32,
    at: Option<Instant>,
}

impl Redial {
    /// Record a failed connection attempt.
    pub(super) fn fail(&mut self, now: Instant) {
        let pause = REDIAL_PAUSE.saturating_mul(1 << self.failures.min(16)).min(REDIAL_PAUSE_MAX);
        self.failures = self.failures.saturating_add(1);
        self.at = Some(now + pause);
    }

    /// Return when to dial again after a failed attempt.
    pub(super) const fn at(&self) -> Option<Instant> {
        self.at
    }

    /// Return whether the pause is still on.
    pub(super) fn is_pausing(&self, now: Instant) -> bool {
        self.at.is_some_and(|at| at > now)
    }
}

fn reserve() -> Option<OwnedFd> {
    eventfd(0, EventfdFlags::CLOEXEC).ok()
}

/// Requested listen backlog: between calls nobody accepts connections.
const BACKLOG: i32 = 4096;
/// Pause when no descriptor is left.
const ACCEPT_PAUSE: Duration = Duration::from_millis(20);
/// Connections accepted with the reserve between two pauses.
const ON_RESERVE_MAX: u32 = 64;
/// First pause before redialling.
const REDIAL_PAUSE: Duration = Duration::from_millis(1);
/// Longest pause before redialling.
pub(super) const REDIAL_PAUSE_MAX: Duration = Duration::from_millis(200);

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn dialled_connections_have_the_traffic_class_of_the_listener() {
        let class = TrafficClass::try_from(0x68).expect("AF31");
        let listener = TcpListener::bind("127.0.0.1:0").expect("a port");
        class.apply(&listener).expect("set");
        let acceptor = Acceptor::new(listener).expect("a listener");
        let peer = TcpListener::bind("127.0.0.1:0").expect("a port");
        let dialled = acceptor.dial(peer.local_addr().expect("bound")).expect("dialled").expect("a free port");
        assert_eq!(TrafficClass::of(&dialled).expect("a socket"), class);
    }

    #[test]
    fn redial_pauses_double_up_to_their_limit() {
        let now = Instant::now();
        let mut redial = Redial::default();
        assert!(!redial.is_pausing(now) && redial.at().is_none());
        let pauses = [1, 2, 4, 8, 16, 32, 64, 128, 200, 200].map(Duration::from_millis);
        for pause in pauses {
            redial.fail(now);
            assert_eq!(redial.at(), Some(now + pause));
            assert!(redial.is_pausing(now) && !redial.is_pausing(now + pause));
        }
    }
}

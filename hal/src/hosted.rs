//! The port of a hosted target: over sockets or over verbs, as it is opened.
//!
//! Invariant: what is asked for is what there is, or an error that says why not; nothing is replaced silently.

use crate::port::{Addr, Capabilities, Gather, Port, RxToken, TxToken, WaitPort, Wake};
use crate::time::Instant;
use crate::udp::{UdpConfig, UdpError, UdpPort, UdpRx, UdpTx, Waker};
#[cfg(feature = "verbs")]
use crate::verbs::{VerbsConfig, VerbsError, VerbsLink, VerbsPort, VerbsRx, VerbsTx};
use std::net::SocketAddr;
use std::os::fd::{BorrowedFd, OwnedFd};
use std::time::Duration;
use thiserror::Error;

/// A port of a hosted target.
#[derive(Debug)]
#[non_exhaustive]
pub enum HostedPort {
    /// Over a UDP socket.
    Udp(Box<UdpPort>),
    /// Over a queue pair.
    #[cfg(feature = "verbs")]
    Verbs(Box<VerbsPort>),
}

/// Why a port can't be opened.
#[derive(Debug, Error)]
#[non_exhaustive]
pub enum HostedError {
    /// The socket.
    #[error(transparent)]
    Udp(#[from] UdpError),
    /// The name is none.
    #[cfg(feature = "verbs")]
    #[error(transparent)]
    Link(#[from] crate::verbs::NoLink),
    /// The queue pair.
    #[cfg(feature = "verbs")]
    #[error(transparent)]
    Verbs(#[from] VerbsError),
    /// This build can't.
    #[error(
        "RDMA port {link}: this build has no verbs; build with `--features verbs`, which takes cmake, libclang and \
         libibverbs (Debian: apt-get install cmake libclang-dev libibverbs-dev)"
    )]
    NoVerbs {
        /// The RDMA port asked for.
        link: String,
    },
}

impl HostedPort {
    /// Open a port on the RDMA port called `verbs` (see `VerbsLink`), or on the UDP address `addr` without one. Of
    /// `verbs`, the identifier that is `addr`'s counts, if there is one.
    ///
    /// # Errors
    /// [`HostedError`]
    pub fn open(addr: SocketAddr, udp: &UdpConfig, verbs: Option<&str>) -> Result<Self, HostedError> {
        match verbs {
            None => Ok(Self::Udp(Box::new(UdpPort::bind(addr, udp)?))),
            #[cfg(feature = "verbs")]
            Some(link) => {
                let config = VerbsConfig {
                    link: link.parse::<VerbsLink>()?,
                    prefer: Some(addr.ip()),
                    receive_buffer_bytes: udp.receive_buffer_bytes.min(VERBS_BUFFER_MAX_BYTES),
                    spin: udp.spin,
                };
                Ok(Self::Verbs(Box::new(VerbsPort::open(&config)?)))
            }
            #[cfg(not(feature = "verbs"))]
            Some(link) => Err(HostedError::NoVerbs { link: link.into() }),
        }
    }

    /// Return a handle that wakes this port's waiting thread from any other.
    pub fn waker(&self) -> Waker {
        match self {
            Self::Udp(port) => port.waker(),
            #[cfg(feature = "verbs")]
            Self::Verbs(port) => port.waker(),
        }
    }

    /// Let waits end with [`Wake::Woken`] also when `file` is readable, as often as it still is.
    pub fn watch(&mut self, file: OwnedFd) {
        match self {
            Self::Udp(port) => port.watch(file),
            #[cfg(feature = "verbs")]
            Self::Verbs(port) => port.watch(file),
        }
    }

    /// Return what becomes readable when packets arrive, for a loop that waits on several things; see
    /// [`UdpPort::poll_fd`]. `None` of a port that has to be looked at.
    pub fn poll_fd(&self) -> Option<BorrowedFd<'_>> {
        match self {
            Self::Udp(port) => Some(port.poll_fd()),
            #[cfg(feature = "verbs")]
            Self::Verbs(_) => None,
        }
    }
}

/// The most that a queue pair is asked to hold: its buffers are locked memory, four bytes for each of these.
#[cfg(feature = "verbs")]
const VERBS_BUFFER_MAX_BYTES: usize = 4 << 20;

/// A packet that has arrived.
#[derive(Debug)]
#[non_exhaustive]
pub enum HostedRx<'a> {
    /// From a socket.
    Udp(UdpRx<'a>),
    /// From a queue pair.
    #[cfg(feature = "verbs")]
    Verbs(VerbsRx<'a>),
}

impl RxToken for HostedRx<'_> {
    fn is_marked(&self) -> bool {
        match self {
            Self::Udp(token) => token.is_marked(),
            #[cfg(feature = "verbs")]
            Self::Verbs(token) => token.is_marked(),
        }
    }

    fn consume<R>(self, f: impl FnOnce(Addr, &[u8]) -> R) -> R {
        match self {
            Self::Udp(token) => token.consume(f),
            #[cfg(feature = "verbs")]
            Self::Verbs(token) => token.consume(f),
        }
    }
}

/// Room for a packet.
#[derive(Debug)]
#[non_exhaustive]
pub enum HostedTx<'a> {
    /// For a socket.
    Udp(UdpTx<'a>),
    /// For a queue pair.
    #[cfg(feature = "verbs")]
    Verbs(VerbsTx<'a>),
}

impl TxToken for HostedTx<'_> {
    fn consume<R>(self, f: impl FnOnce(&mut [u8]) -> (usize, R)) -> R {
        match self {
            Self::Udp(token) => token.consume(f),
            #[cfg(feature = "verbs")]
            Self::Verbs(token) => token.consume(f),
        }
    }
}

impl Port for HostedPort {
    type Rx<'a> = HostedRx<'a>;
    type Tx<'a> = HostedTx<'a>;

    fn capabilities(&self) -> Capabilities {
        match self {
            Self::Udp(port) => port.capabilities(),
            #[cfg(feature = "verbs")]
            Self::Verbs(port) => port.capabilities(),
        }
    }

    fn local_addr(&self) -> Addr {
        match self {
            Self::Udp(port) => port.local_addr(),
            #[cfg(feature = "verbs")]
            Self::Verbs(port) => port.local_addr(),
        }
    }

    fn receive(&mut self, now: Instant) -> Option<HostedRx<'_>> {
        match self {
            Self::Udp(port) => port.receive(now).map(HostedRx::Udp),
            #[cfg(feature = "verbs")]
            Self::Verbs(port) => port.receive(now).map(HostedRx::Verbs),
        }
    }

    fn transmit(&mut self, to: Addr, now: Instant) -> Option<HostedTx<'_>> {
        match self {
            Self::Udp(port) => port.transmit(to, now).map(HostedTx::Udp),
            #[cfg(feature = "verbs")]
            Self::Verbs(port) => port.transmit(to, now).map(HostedTx::Verbs),
        }
    }

    fn room(&self) -> usize {
        match self {
            Self::Udp(port) => port.room(),
            #[cfg(feature = "verbs")]
            Self::Verbs(port) => port.room(),
        }
    }

    fn transmit_gather<'a>(&mut self, packets: impl Iterator<Item = Gather<'a>>, now: Instant) {
        match self {
            Self::Udp(port) => port.transmit_gather(packets, now),
            #[cfg(feature = "verbs")]
            Self::Verbs(port) => port.transmit_gather(packets, now),
        }
    }

    fn join(&mut self, group: Addr) -> bool {
        match self {
            Self::Udp(port) => port.join(group),
            #[cfg(feature = "verbs")]
            Self::Verbs(port) => port.join(group),
        }
    }

    fn leave(&mut self, group: Addr) {
        match self {
            Self::Udp(port) => port.leave(group),
            #[cfg(feature = "verbs")]
            Self::Verbs(port) => port.leave(group),
        }
    }

    fn flush(&mut self, now: Instant) {
        match self {
            Self::Udp(port) => port.flush(now),
            #[cfg(feature = "verbs")]
            Self::Verbs(port) => port.flush(now),
        }
    }
}

impl WaitPort for HostedPort {
    fn wait(&mut self, timeout: Option<Duration>) -> Wake {
        match self {
            Self::Udp(port) => port.wait(timeout),
            #[cfg(feature = "verbs")]
            Self::Verbs(port) => port.wait(timeout),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::net::Ipv4Addr;

    #[test]
    fn without_a_link_it_is_a_socket_and_with_one_never() {
        let addr = SocketAddr::from((Ipv4Addr::LOCALHOST, 0));
        let port = HostedPort::open(addr, &UdpConfig::default(), None).expect("a port on loopback");
        assert!(matches!(port.local_addr(), Addr::Udp(_)) && port.poll_fd().is_some());
        let error = HostedPort::open(addr, &UdpConfig::default(), Some("none0")).expect_err("no such link").to_string();
        assert!(error.contains(if cfg!(feature = "verbs") { "RDMA device" } else { "--features verbs" }), "{error}");
    }
}

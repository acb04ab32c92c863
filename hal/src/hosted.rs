//! A port for hosted targets, over UDP sockets or RDMA verbs, chosen when it is opened.
//!
//! Invariant: a port is of the kind that was requested, or opening it fails; there is no silent fallback.

use crate::port::{Addr, Capabilities, Ecn, Gather, MulticastPort, Port, RxToken, Train, TxToken, WaitPort, Wake};
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

/// Why a port cannot be opened.
#[derive(Debug, Error)]
#[non_exhaustive]
pub enum HostedError {
    /// The socket cannot be opened.
    #[error(transparent)]
    Udp(#[from] UdpError),
    /// The RDMA port's name is invalid.
    #[cfg(feature = "verbs")]
    #[error(transparent)]
    Link(#[from] crate::verbs::ParseLinkError),
    /// The queue pair cannot be created.
    #[cfg(feature = "verbs")]
    #[error(transparent)]
    Verbs(#[from] VerbsError),
    /// This build does not support verbs.
    #[error(
        "RDMA port {link}: this build has no verbs; build with `--features verbs`, which needs cmake, libclang and \
         libibverbs (Debian: apt-get install cmake libclang-dev libibverbs-dev)"
    )]
    NoVerbs {
        /// The requested RDMA port.
        link: String,
    },
}

impl HostedPort {
    /// Open a port on the RDMA port named `verbs` (see `VerbsLink`), or on the UDP address `addr` if `verbs` is `None`.
    /// On an RDMA port, the GID that belongs to `addr` is preferred.
    ///
    /// # Errors
    /// [`HostedError`]: the name is invalid, the socket or queue pair cannot be created, or the build has no verbs.
    pub fn open(addr: SocketAddr, udp: &UdpConfig, verbs: Option<&str>) -> Result<Self, HostedError> {
        Self::open_beside(addr, udp, verbs, 0)
    }

    /// The same for the port of this number among several of a host or device, each of which a thread of its own waits
    /// for: on an RDMA port, each has another completion vector (`VerbsConfig::vector`).
    ///
    /// # Errors
    /// As those of [`open`](Self::open).
    pub fn open_beside(
        addr: SocketAddr,
        udp: &UdpConfig,
        verbs: Option<&str>,
        number: u32,
    ) -> Result<Self, HostedError> {
        #[cfg(not(feature = "verbs"))]
        let _ = number;
        match verbs {
            None => Ok(Self::Udp(Box::new(UdpPort::bind(addr, udp)?))),
            #[cfg(feature = "verbs")]
            Some(link) => {
                let config = VerbsConfig {
                    link: link.parse::<VerbsLink>()?,
                    prefer: Some(addr.ip()),
                    receive_buffer_bytes: udp.receive_buffer_bytes.min(VERBS_BUFFER_MAX_BYTES),
                    spin: udp.spin,
                    traffic_class: udp.traffic_class,
                    vector: number,
                };
                Ok(Self::Verbs(Box::new(VerbsPort::open(&config)?)))
            }
            #[cfg(not(feature = "verbs"))]
            Some(link) => Err(HostedError::NoVerbs { link: link.into() }),
        }
    }

    /// Return the address that peers send to.
    pub fn local_addr(&self) -> Addr {
        match self {
            Self::Udp(port) => port.local_addr(),
            #[cfg(feature = "verbs")]
            Self::Verbs(port) => port.local_addr(),
        }
    }

    /// Return whether the port's device has failed, so that the port neither sends nor receives any more. Only RDMA
    /// ports report this.
    pub fn has_failed(&self) -> bool {
        match self {
            Self::Udp(_) => false,
            #[cfg(feature = "verbs")]
            Self::Verbs(port) => port.has_failed(),
        }
    }

    /// Return a handle that wakes the thread that waits on this port; it can be used from any thread.
    pub fn waker(&self) -> Waker {
        match self {
            Self::Udp(port) => port.waker(),
            #[cfg(feature = "verbs")]
            Self::Verbs(port) => port.waker(),
        }
    }

    /// Make waits end with [`Wake::Woken`] whenever `file` is readable.
    pub fn watch(&mut self, file: OwnedFd) {
        match self {
            Self::Udp(port) => port.watch(file),
            #[cfg(feature = "verbs")]
            Self::Verbs(port) => port.watch(file),
        }
    }

    /// Return a descriptor that becomes readable when packets arrive, for a loop that waits on several sources; see
    /// [`UdpPort::poll_fd`]. `None` if the port has to be polled.
    pub fn poll_fd(&self) -> Option<BorrowedFd<'_>> {
        match self {
            Self::Udp(port) => Some(port.poll_fd()),
            #[cfg(feature = "verbs")]
            Self::Verbs(_) => None,
        }
    }
}

/// The upper limit for a queue pair's receive buffer. Its buffers are locked memory: four bytes for each byte of this.
#[cfg(feature = "verbs")]
const VERBS_BUFFER_MAX_BYTES: usize = 4 << 20;

/// A received packet.
#[derive(Debug)]
#[non_exhaustive]
pub enum HostedRx<'a> {
    /// From a UDP socket.
    Udp(UdpRx<'a>),
    /// From a queue pair.
    #[cfg(feature = "verbs")]
    Verbs(VerbsRx<'a>),
}

impl RxToken for HostedRx<'_> {
    fn ecn(&self) -> Ecn {
        match self {
            Self::Udp(token) => token.ecn(),
            #[cfg(feature = "verbs")]
            Self::Verbs(token) => token.ecn(),
        }
    }

    fn consume<R>(self, f: impl FnOnce(Addr, &[u8]) -> R) -> R {
        match self {
            Self::Udp(token) => token.consume(f),
            #[cfg(feature = "verbs")]
            Self::Verbs(token) => token.consume(f),
        }
    }

    fn consume_train<R>(self, f: impl FnOnce(Addr, Train<'_>) -> R) -> R {
        match self {
            Self::Udp(token) => token.consume_train(f),
            #[cfg(feature = "verbs")]
            Self::Verbs(token) => token.consume_train(f),
        }
    }
}

/// Permission to send one packet.
#[derive(Debug)]
#[non_exhaustive]
pub enum HostedTx<'a> {
    /// On a UDP socket.
    Udp(UdpTx<'a>),
    /// On a queue pair.
    #[cfg(feature = "verbs")]
    Verbs(VerbsTx<'a>),
}

impl TxToken for HostedTx<'_> {
    fn consume<R>(self, to: Addr, f: impl FnOnce(&mut [u8]) -> (usize, R)) -> R {
        match self {
            Self::Udp(token) => token.consume(to, f),
            #[cfg(feature = "verbs")]
            Self::Verbs(token) => token.consume(to, f),
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

    fn receive(&mut self, now: Instant) -> Option<HostedRx<'_>> {
        match self {
            Self::Udp(port) => port.receive(now).map(HostedRx::Udp),
            #[cfg(feature = "verbs")]
            Self::Verbs(port) => port.receive(now).map(HostedRx::Verbs),
        }
    }

    fn receive_train(&mut self, now: Instant, packets_max: usize) -> Option<HostedRx<'_>> {
        match self {
            Self::Udp(port) => port.receive_train(now, packets_max).map(HostedRx::Udp),
            #[cfg(feature = "verbs")]
            Self::Verbs(port) => port.receive_train(now, packets_max).map(HostedRx::Verbs),
        }
    }

    fn transmit(&mut self, now: Instant) -> Option<HostedTx<'_>> {
        match self {
            Self::Udp(port) => port.transmit(now).map(HostedTx::Udp),
            #[cfg(feature = "verbs")]
            Self::Verbs(port) => port.transmit(now).map(HostedTx::Verbs),
        }
    }

    fn room(&mut self, now: Instant) -> usize {
        match self {
            Self::Udp(port) => port.room(now),
            #[cfg(feature = "verbs")]
            Self::Verbs(port) => port.room(now),
        }
    }

    fn transmit_gather<'a>(&mut self, packets: impl Iterator<Item = Gather<'a>>, now: Instant) {
        match self {
            Self::Udp(port) => port.transmit_gather(packets, now),
            #[cfg(feature = "verbs")]
            Self::Verbs(port) => port.transmit_gather(packets, now),
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

impl MulticastPort for HostedPort {
    fn join(&mut self, group: Addr) -> bool {
        match self {
            Self::Udp(port) => port.join(group),
            // Queue pairs listen to no groups.
            #[cfg(feature = "verbs")]
            Self::Verbs(_) => false,
        }
    }

    fn leave(&mut self, group: Addr) {
        match self {
            Self::Udp(port) => port.leave(group),
            #[cfg(feature = "verbs")]
            Self::Verbs(_) => {}
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
    fn port_is_a_socket_only_if_no_rdma_port_is_named() {
        let addr = SocketAddr::from((Ipv4Addr::LOCALHOST, 0));
        let port = HostedPort::open(addr, &UdpConfig::default(), None).expect("a port on loopback");
        assert!(matches!(port.local_addr(), Addr::Udp(_)) && port.poll_fd().is_some());
        let error = HostedPort::open(addr, &UdpConfig::default(), Some("none0")).expect_err("no such link").to_string();
        assert!(error.contains(if cfg!(feature = "verbs") { "RDMA device" } else { "--features verbs" }), "{error}");
    }
}

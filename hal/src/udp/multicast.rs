//! Shared addresses: IP multicast groups, each received on a socket of its own.
//!
//! On one host a packet to a group crosses the stack once and is queued to each member, which takes 0.6 of the time of
//! one packet to each member (4 members, 60 KiB, loopback; measured by `tests/peers`).
//!
//! Invariants:
//! - IPv4 only, and only on the interface of the port's own address;
//! - the sockets are received from in turn, so that none starves another;
//! - only `join` allocates.

use super::{UdpConfig, set_buffers, sys};
use crate::port::Addr;
use rustix::event::epoll;
use rustix::io::Errno;
use rustix::net::{AddressFamily, SocketFlags, SocketType, sockopt};
use std::io;
use std::net::{IpAddr, Ipv4Addr, SocketAddr, SocketAddrV4, UdpSocket};
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};

/// The maximum number of groups of a port: each costs a call in every wait.
const MAX_JOINED: usize = 64;

/// Batches received from one socket before the next socket follows.
const BATCHES_PER_TURN: u32 = 4;

/// The groups of a port.
pub(super) struct MulticastGroups {
    members: Vec<Member>,
    /// Readable when any socket of the port is; created by the first `join`.
    epoll: Option<OwnedFd>,
    /// The socket to receive from next: 0 for the port's own, otherwise a member's index + 1.
    next: usize,
    batches: u32,
}

struct Member {
    group: SocketAddrV4,
    socket: UdpSocket,
}

/// Send multicast on the interface of the socket's address. If the kernel refuses, it has no multicast; such packets
/// are then lost, as on a network without receivers.
pub(super) fn prepare(socket: &UdpSocket, local_addr: SocketAddr) {
    if let IpAddr::V4(interface) = local_addr.ip() {
        let _ = sockopt::set_ip_multicast_if(socket, &interface);
        let _ = sockopt::set_ip_multicast_ttl(socket, 1);
        let _ = sockopt::set_ip_multicast_loop(socket, true);
    }
}

impl MulticastGroups {
    pub(super) fn new() -> Self {
        Self { members: Vec::new(), epoll: None, next: 0, batches: 0 }
    }

    pub(super) fn is_empty(&self) -> bool {
        self.members.is_empty()
    }

    /// Return the descriptor that is readable when any socket is; `None` if the port's own is the only one.
    pub(super) fn poll_fd(&self) -> Option<BorrowedFd<'_>> {
        self.epoll.as_ref().filter(|_| !self.is_empty()).map(AsFd::as_fd)
    }

    /// Join `group` on the interface of `local_addr`.
    ///
    /// # Errors
    /// The kernel's error, or `INVAL`, `EXIST` or `MFILE`: not an IPv4 multicast address, already joined, too many
    /// groups.
    pub(super) fn join(
        &mut self,
        group: Addr,
        own: BorrowedFd<'_>,
        local_addr: SocketAddr,
        config: &UdpConfig,
        gro: bool,
    ) -> io::Result<()> {
        let (Some(group), IpAddr::V4(interface)) = (multicast(group), local_addr.ip()) else {
            return Err(Errno::INVAL.into());
        };
        if self.members.iter().any(|member| member.group == group) {
            return Err(Errno::EXIST.into());
        }
        if self.members.len() == MAX_JOINED {
            return Err(Errno::MFILE.into());
        }
        let socket = open(group, interface, config)?;
        if gro {
            sys::enable_gro(socket.as_fd());
        }
        let epoll = match &self.epoll {
            Some(epoll) => epoll,
            None => {
                let epoll = epoll::create(epoll::CreateFlags::CLOEXEC)?;
                epoll::add(&epoll, own, epoll::EventData::new_u64(0), epoll::EventFlags::IN)?;
                self.epoll.insert(epoll)
            }
        };
        epoll::add(epoll, &socket, epoll::EventData::new_u64(0), epoll::EventFlags::IN)?;
        self.members.push(Member { group, socket });
        Ok(())
    }

    /// Leave `group`. Closing the socket ends the membership, and takes it out of the epoll set.
    pub(super) fn leave(&mut self, group: Addr) {
        self.members.retain(|member| Some(member.group) != multicast(group));
        self.next = 0;
    }

    /// Call `fill` on the sockets in turn until one has packets; return whether one had.
    pub(super) fn fill_in_turn(&mut self, own: BorrowedFd<'_>, mut fill: impl FnMut(BorrowedFd<'_>) -> bool) -> bool {
        let sockets = self.members.len() + 1;
        if self.batches == BATCHES_PER_TURN {
            self.advance();
        }
        for _ in 0..sockets {
            let fd = match self.next.checked_sub(1) {
                Some(member) => self.members[member].socket.as_fd(),
                None => own,
            };
            if fill(fd) {
                self.batches += 1;
                return true;
            }
            self.advance();
        }
        false
    }

    fn advance(&mut self) {
        self.next = (self.next + 1) % (self.members.len() + 1);
        self.batches = 0;
    }
}

/// Return the group if it is an IPv4 multicast address.
fn multicast(group: Addr) -> Option<SocketAddrV4> {
    match group {
        Addr::Udp(SocketAddr::V4(group)) if group.ip().is_multicast() && group.port() != 0 => Some(group),
        _ => None,
    }
}

/// Open a socket that receives only packets to `group` on the interface of this address.
fn open(group: SocketAddrV4, interface: Ipv4Addr, config: &UdpConfig) -> io::Result<UdpSocket> {
    let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
    let socket = rustix::net::socket_with(AddressFamily::INET, SocketType::DGRAM, flags, None)?;
    // All members on this host bind the same address.
    sockopt::set_socket_reuseaddr(&socket, true)?;
    rustix::net::bind(&socket, &group)?;
    // Optional, as for the port's own socket: without marks, losses signal congestion.
    let _ = sockopt::set_ip_recvtos(&socket, true);
    sockopt::set_ip_add_membership(&socket, group.ip(), &interface)?;
    let socket = UdpSocket::from(socket);
    set_buffers(&socket, config)?;
    Ok(socket)
}

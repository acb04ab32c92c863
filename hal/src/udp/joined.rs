//! Shared addresses: IP multicast groups that a port receives from, each by a socket of its own.
//!
//! On one host a packet to a group crosses the stack once and is queued to each member, which takes 0.6 of the time of
//! as many packets to one member each (4 members, 60 KiB, loopback; `tests/peers` has the whole).
//!
//! Invariants:
//! - IPv4 only, and only on the interface of the port's own address: a group is nobody else's business;
//! - receiving takes the sockets in turn, so that none is starved by another;
//! - nothing here allocates but `join`.

use super::{UdpConfig, set_buffers, sys};
use crate::port::Addr;
use rustix::event::epoll;
use rustix::io::Errno;
use rustix::net::{AddressFamily, SocketFlags, SocketType, sockopt};
use std::io;
use std::net::{IpAddr, Ipv4Addr, SocketAddr, SocketAddrV4, UdpSocket};
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};

/// The most groups that one port joins: each costs a look a wait.
const MAX_JOINED: usize = 64;

/// How many batches may come from one socket before the next has its turn.
const BATCHES_A_TURN: u32 = 4;

/// The groups of a port.
pub(super) struct Joined {
    members: Vec<Member>,
    /// Readable when any socket of the port is; made by the first `join`.
    epoll: Option<OwnedFd>,
    /// Whose turn it is: 0 for the port's own socket, else a member's index + 1.
    turn: usize,
    batches: u32,
}

struct Member {
    group: SocketAddrV4,
    socket: UdpSocket,
}

/// Let what goes from `socket` to a group stay on the interface of its address. A kernel that can't has no groups
/// either; then what is sent there is lost, as on a wire.
pub(super) fn prepare_to_share(socket: &UdpSocket, local_addr: SocketAddr) {
    if let IpAddr::V4(interface) = local_addr.ip() {
        let _ = sockopt::set_ip_multicast_if(socket, &interface);
        let _ = sockopt::set_ip_multicast_ttl(socket, 1);
        let _ = sockopt::set_ip_multicast_loop(socket, true);
    }
}

impl Joined {
    pub(super) fn new() -> Self {
        Self { members: Vec::new(), epoll: None, turn: 0, batches: 0 }
    }

    pub(super) fn is_empty(&self) -> bool {
        self.members.is_empty()
    }

    /// Return what is readable when any socket is; `None` if the port's own is the only one.
    pub(super) fn poll_fd(&self) -> Option<BorrowedFd<'_>> {
        self.epoll.as_ref().filter(|_| !self.is_empty()).map(AsFd::as_fd)
    }

    /// Join `group` on the interface of `local_addr`.
    ///
    /// # Errors
    /// The kernel's word, or `INVAL`, `EXIST` or `MFILE`: no group of IPv4, joined already, too many.
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
        self.turn = 0;
    }

    /// Have `fill` try the sockets in turn until one has packets; return whether one had.
    pub(super) fn in_turn(&mut self, own: BorrowedFd<'_>, mut fill: impl FnMut(BorrowedFd<'_>) -> bool) -> bool {
        let sockets = self.members.len() + 1;
        if self.batches == BATCHES_A_TURN {
            self.pass_turn();
        }
        for _ in 0..sockets {
            let fd = match self.turn.checked_sub(1) {
                Some(member) => self.members[member].socket.as_fd(),
                None => own,
            };
            if fill(fd) {
                self.batches += 1;
                return true;
            }
            self.pass_turn();
        }
        false
    }

    fn pass_turn(&mut self) {
        self.turn = (self.turn + 1) % (self.members.len() + 1);
        self.batches = 0;
    }
}

/// Return the group if it is one of IPv4.
fn multicast(group: Addr) -> Option<SocketAddrV4> {
    match group {
        Addr::Udp(SocketAddr::V4(group)) if group.ip().is_multicast() && group.port() != 0 => Some(group),
        _ => None,
    }
}

/// Open a socket that receives what is sent to `group` on the interface of one address, and nothing else.
fn open(group: SocketAddrV4, interface: Ipv4Addr, config: &UdpConfig) -> io::Result<UdpSocket> {
    let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
    let socket = rustix::net::socket_with(AddressFamily::INET, SocketType::DGRAM, flags, None)?;
    // Each member of this host binds the same address.
    sockopt::set_socket_reuseaddr(&socket, true)?;
    rustix::net::bind(&socket, &group)?;
    // As for the port's own socket: a congestion mark that the kernel does not tell of is only missed.
    let _ = sockopt::set_ip_recvtos(&socket, true);
    sockopt::set_ip_add_membership(&socket, group.ip(), &interface)?;
    let socket = UdpSocket::from(socket);
    set_buffers(&socket, config)?;
    Ok(socket)
}

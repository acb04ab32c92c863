//! Addresses, routes and the state of interfaces, through netlink (rtnetlink(7)).

use crate::config::Cidr;
use netlink_packet_core::{
    NLM_F_ACK, NLM_F_CREATE, NLM_F_DUMP, NLM_F_EXCL, NLM_F_REQUEST, NetlinkHeader, NetlinkMessage, NetlinkPayload,
};
use netlink_packet_route::address::{AddressAttribute, AddressMessage};
use netlink_packet_route::link::{LinkFlags, LinkMessage};
use netlink_packet_route::route::{
    RouteAddress, RouteAttribute, RouteHeader, RouteMessage, RouteProtocol, RouteScope, RouteType,
};
use netlink_packet_route::{AddressFamily, RouteNetlinkMessage};
use rustix::net::netlink::SocketAddrNetlink;
use rustix::net::{RecvFlags, SendFlags, SocketFlags, SocketType, bind, recv, send, socket_with};
use std::io;
use std::net::{IpAddr, Ipv4Addr};
use std::os::fd::OwnedFd;

/// The size of the receive buffer in bytes: dump messages of the kernel are shorter.
pub(crate) const ANSWER_BYTES: usize = 64 << 10;

/// Open a netlink socket that receives the messages of these multicast groups.
pub(crate) fn open_socket(groups: u32) -> io::Result<OwnedFd> {
    let family = rustix::net::AddressFamily::NETLINK;
    // The protocol is NETLINK_ROUTE, which is 0, as is the default.
    let socket = socket_with(family, SocketType::RAW, SocketFlags::CLOEXEC, None)?;
    bind(&socket, &SocketAddrNetlink::new(0, groups))?;
    Ok(socket)
}

/// A netlink socket.
#[derive(Debug)]
pub struct Netlink {
    socket: OwnedFd,
    sequence: u32,
}

impl Netlink {
    /// Open the socket.
    ///
    /// # Errors
    /// The kernel's error.
    pub fn open() -> io::Result<Self> {
        Ok(Self { socket: open_socket(0)?, sequence: 0 })
    }

    /// Bring an interface up.
    ///
    /// # Errors
    /// The kernel's error.
    pub fn set_up(&mut self, index: u32) -> io::Result<()> {
        let mut link = LinkMessage::default();
        link.header.index = index;
        link.header.flags = LinkFlags::Up;
        link.header.change_mask = LinkFlags::Up;
        self.request(RouteNetlinkMessage::SetLink(link), NLM_F_ACK).map(drop)
    }

    /// Assign an address to an interface; not an error if it has the address.
    ///
    /// # Errors
    /// The kernel's error.
    pub fn add_address(&mut self, index: u32, address: Cidr) -> io::Result<()> {
        let mut message = AddressMessage::default();
        message.header.family = AddressFamily::Inet;
        message.header.prefix_len = address.prefix_len;
        message.header.index = index;
        let ip = IpAddr::V4(address.ip);
        message.attributes = vec![AddressAttribute::Local(ip), AddressAttribute::Address(ip)];
        self.add(RouteNetlinkMessage::NewAddress(message))
    }

    /// Add a default route through `gateway`; not an error if it exists.
    ///
    /// # Errors
    /// The kernel's error.
    pub fn add_gateway(&mut self, gateway: Ipv4Addr) -> io::Result<()> {
        let mut message = RouteMessage::default();
        message.header = RouteHeader {
            address_family: AddressFamily::Inet,
            table: RouteHeader::RT_TABLE_MAIN,
            protocol: RouteProtocol::Boot,
            scope: RouteScope::Universe,
            kind: RouteType::Unicast,
            ..RouteHeader::default()
        };
        message.attributes = vec![RouteAttribute::Gateway(RouteAddress::Inet(gateway))];
        self.add(RouteNetlinkMessage::NewRoute(message))
    }

    /// Return an interface's IPv4 addresses.
    ///
    /// # Errors
    /// The kernel's error.
    pub fn addresses(&mut self, index: u32) -> io::Result<Vec<Cidr>> {
        let mut message = AddressMessage::default();
        message.header.family = AddressFamily::Inet;
        let replies = self.request(RouteNetlinkMessage::GetAddress(message), NLM_F_DUMP)?;
        let address = |reply| match reply {
            RouteNetlinkMessage::NewAddress(message) if message.header.index == index => {
                let prefix_len = message.header.prefix_len;
                // On a point-to-point link, `Address` is the peer's.
                message.attributes.into_iter().find_map(|attribute| match attribute {
                    AddressAttribute::Local(IpAddr::V4(ip)) => Some(Cidr { ip, prefix_len }),
                    _ => None,
                })
            }
            _ => None,
        };
        Ok(replies.into_iter().filter_map(address).collect())
    }

    fn add(&mut self, message: RouteNetlinkMessage) -> io::Result<()> {
        match self.request(message, NLM_F_ACK | NLM_F_CREATE | NLM_F_EXCL) {
            Err(error) if error.kind() == io::ErrorKind::AlreadyExists => Ok(()),
            reply => reply.map(drop),
        }
    }

    /// Send a request, and return all replies.
    fn request(&mut self, message: RouteNetlinkMessage, flags: u16) -> io::Result<Vec<RouteNetlinkMessage>> {
        self.sequence += 1;
        let mut header = NetlinkHeader::default();
        header.flags = NLM_F_REQUEST | flags;
        header.sequence_number = self.sequence;
        let mut message = NetlinkMessage::new(header, NetlinkPayload::from(message));
        message.finalize();
        let mut bytes = vec![0; message.buffer_len()];
        message.serialize(&mut bytes);
        // Without a destination it goes to the kernel.
        send(&self.socket, &bytes, SendFlags::empty())?;
        let (mut replies, mut buffer) = (Vec::new(), vec![0; ANSWER_BYTES]);
        loop {
            let (len, _) = recv(&self.socket, &mut buffer[..], RecvFlags::empty())?;
            let mut rest = &buffer[..len];
            while !rest.is_empty() {
                let reply = NetlinkMessage::<RouteNetlinkMessage>::deserialize(rest).map_err(io::Error::other)?;
                // Messages are aligned to four bytes.
                let len = (reply.header.length as usize).max(1).next_multiple_of(4).min(rest.len());
                rest = &rest[len..];
                if reply.header.sequence_number != self.sequence {
                    continue;
                }
                match reply.payload {
                    NetlinkPayload::Done(_) => return Ok(replies),
                    NetlinkPayload::Error(error) if error.code.is_none() => return Ok(replies),
                    NetlinkPayload::Error(error) => return Err(error.to_io()),
                    NetlinkPayload::InnerMessage(reply) => replies.push(reply),
                    _ => {}
                }
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn netlink_returns_the_address_of_loopback() {
        let index = std::fs::read_to_string("/sys/class/net/lo/ifindex").expect("every machine has one");
        let index = index.trim().parse().expect("a number");
        let mut netlink = Netlink::open().expect("a socket");
        let expected: Cidr = "127.0.0.1/8".parse().expect("an address");
        assert!(netlink.addresses(index).expect("a reply").contains(&expected));
        // Errors are returned by their number: no interface has this index.
        let error = netlink.set_up(i32::MAX as u32).expect_err("no such interface");
        assert!(matches!(error.raw_os_error(), Some(1 | 19)), "not permitted, or no such device: {error}");
    }
}

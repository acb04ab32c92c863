//! System calls that no safe crate offers without allocating: `sendmmsg`, `recvmmsg` and UDP's segmentation options
//! (Linux 4.18 for `UDP_SEGMENT`, 5.0 for `UDP_GRO`; see udp(7)); and those about MTUs.
//!
//! All unsafe code of the port is here, behind safe functions. Invariants:
//! - every pointer handed to the kernel is derived from a live borrow within the same call, and none is used after it;
//! - lengths reported by the kernel are clamped to the buffers before a slice is taken.

mod mtu;

pub(super) use mtu::{forbid_fragments, interface_mtu};

use rustix::io::Errno;
use std::mem::{self, MaybeUninit};
use std::net::{Ipv4Addr, Ipv6Addr, SocketAddr, SocketAddrV4, SocketAddrV6};
use std::os::fd::{AsRawFd, BorrowedFd};
use std::ptr;

/// A socket address in the kernel's layout.
#[derive(Clone, Copy)]
#[repr(C)]
pub(super) union SockName {
    family: libc::sa_family_t,
    v4: libc::sockaddr_in,
    v6: libc::sockaddr_in6,
}

impl SockName {
    fn zeroed() -> Self {
        // SAFETY: both structures are plain integers and arrays of integers, for which all zeroes is valid.
        unsafe { mem::zeroed() }
    }

    fn len(&self) -> libc::socklen_t {
        // SAFETY: `family` is the first field of both structures, and every constructor fills it.
        let family = unsafe { self.family };
        let len = if family == libc::AF_INET as u16 {
            size_of::<libc::sockaddr_in>()
        } else {
            size_of::<libc::sockaddr_in6>()
        };
        len as libc::socklen_t
    }

    /// Read the address back; `None` if it is of a family that no UDP socket has.
    fn to_socket_addr(self) -> Option<SocketAddr> {
        // SAFETY: the family says which structure the kernel wrote; both are plain integers, valid for any bytes.
        unsafe {
            match i32::from(self.family) {
                libc::AF_INET => {
                    let ip = Ipv4Addr::from(u32::from_be(self.v4.sin_addr.s_addr));
                    Some(SocketAddrV4::new(ip, u16::from_be(self.v4.sin_port)).into())
                }
                libc::AF_INET6 => {
                    let v6 = self.v6;
                    let ip = Ipv6Addr::from(v6.sin6_addr.s6_addr);
                    // The flow label is not part of the sender's identity.
                    Some(SocketAddrV6::new(ip, u16::from_be(v6.sin6_port), 0, v6.sin6_scope_id).into())
                }
                _ => None,
            }
        }
    }
}

impl From<SocketAddr> for SockName {
    fn from(addr: SocketAddr) -> Self {
        let mut name = Self::zeroed();
        match addr {
            SocketAddr::V4(addr) => {
                name.v4 = libc::sockaddr_in {
                    sin_family: libc::AF_INET as libc::sa_family_t,
                    sin_port: addr.port().to_be(),
                    sin_addr: libc::in_addr { s_addr: u32::from(*addr.ip()).to_be() },
                    sin_zero: [0; 8],
                };
            }
            SocketAddr::V6(addr) => {
                name.v6 = libc::sockaddr_in6 {
                    sin6_family: libc::AF_INET6 as libc::sa_family_t,
                    sin6_port: addr.port().to_be(),
                    sin6_flowinfo: addr.flowinfo(),
                    sin6_addr: libc::in6_addr { s6_addr: addr.ip().octets() },
                    sin6_scope_id: addr.scope_id(),
                };
            }
        }
        name
    }
}

/// Room for two control messages with an integer each (24 bytes on 64-bit machines), with the kernel's alignment.
#[derive(Clone, Copy)]
#[repr(C, align(8))]
struct Control([u8; 64]);

/// Storage whose contents are rebuilt by each call.
struct Scratch<T>(Vec<T>);

// SAFETY: `T` is not `Send` because of raw pointers to buffers. They are written and used within one call of
// `SendBatch::send` or `RecvBatch::recv`, which hold the only reference to the storage; between calls nothing reads
// them.
unsafe impl<T> Send for Scratch<T> {}

/// One message of a batch: one or more equal-size packets (the last may be shorter) to one destination.
#[derive(Clone, Copy)]
pub(super) struct Message {
    /// The destination.
    pub(super) to: SockName,
    /// Its range of the batch's parts.
    pub(super) parts: (usize, usize),
    /// The size of all packets but the last, for the kernel to cut the message by; 0 for a single packet.
    pub(super) segment_len_bytes: u16,
}

/// The arguments of `sendmmsg`.
pub(super) struct SendBatch {
    headers: Scratch<libc::mmsghdr>,
    iovecs: Scratch<libc::iovec>,
    controls: Scratch<Control>,
}

/// A piece of a packet to send.
#[derive(Debug, Clone, Copy)]
pub(super) enum Part {
    /// Start and length in the arena.
    Arena(usize, usize),
    /// One of the borrowed slices, by index.
    Borrowed(usize),
}

impl Part {
    /// Return its length in bytes.
    pub(super) fn len(self, borrowed: &[&[u8]]) -> usize {
        match self {
            Self::Arena(_, len) => len,
            Self::Borrowed(index) => borrowed[index].len(),
        }
    }
}

impl SendBatch {
    /// Allocate for `messages` messages of `parts` parts in total.
    pub(super) fn new(messages: usize, parts: usize) -> Self {
        Self {
            headers: Scratch(Vec::with_capacity(messages)),
            iovecs: Scratch(Vec::with_capacity(parts)),
            controls: Scratch(Vec::with_capacity(messages)),
        }
    }

    /// Send `messages`, whose packets are `parts` of `arena` and of the slices `borrowed`, without blocking.
    ///
    /// # Returns
    /// How many messages the kernel accepted, from the first on.
    ///
    /// # Errors
    /// The error of the first message.
    ///
    /// # Panics
    /// If a range is outside the arena, or a message's parts are outside `parts`.
    pub(super) fn send(
        &mut self,
        fd: BorrowedFd<'_>,
        arena: &[u8],
        borrowed: &[&[u8]],
        messages: &[Message],
        parts: &[Part],
    ) -> Result<usize, Errno> {
        self.iovecs.0.clear();
        self.iovecs.0.extend(parts.iter().map(|part| {
            let bytes = match *part {
                Part::Arena(start, len) => &arena[start..][..len],
                Part::Borrowed(index) => borrowed[index],
            };
            libc::iovec { iov_base: bytes.as_ptr().cast_mut().cast(), iov_len: bytes.len() }
        }));
        self.controls.0.clear();
        self.controls.0.resize(messages.len(), Control([0; 64]));
        self.headers.0.clear();
        for (message, control) in messages.iter().zip(&mut self.controls.0) {
            let mut header = zeroed_header();
            header.msg_hdr.msg_name = ptr::from_ref(&message.to).cast_mut().cast();
            header.msg_hdr.msg_namelen = message.to.len();
            let iovecs = &self.iovecs.0[message.parts.0..message.parts.1];
            header.msg_hdr.msg_iov = iovecs.as_ptr().cast_mut();
            header.msg_hdr.msg_iovlen = iovecs.len() as _;
            if message.segment_len_bytes > 0 {
                put_segment_len(&mut header.msg_hdr, control, message.segment_len_bytes);
            }
            self.headers.0.push(header);
        }
        let count = self.headers.0.len() as libc::c_uint;
        let headers = self.headers.0.as_mut_ptr();
        // Not libc's function: musl's loops over `sendmsg`, a system call for each message.
        // SAFETY: every pointer in the headers was made above from `arena`, `borrowed`, `messages` and own storage.
        // They are borrowed until the call returns, and were not moved or resized since. `sendmmsg` writes only to the
        // headers (`msg_len`). Padding that a libc has where the kernel has the upper half of a length is zero, as the
        // headers started as zeros.
        let sent = unsafe {
            libc::syscall(libc::SYS_sendmmsg, fd.as_raw_fd(), headers, count, libc::MSG_DONTWAIT as libc::c_int)
        };
        usize::try_from(sent).map_err(|_| last_errno())
    }
}

/// One message as it arrived.
#[derive(Clone, Copy)]
pub(super) struct Arrived {
    /// The sender; `None` if it is not an IP address.
    pub(super) from: Option<SocketAddr>,
    /// Its length in bytes.
    pub(super) len_bytes: usize,
    /// The size of all packets in it but the last; its length if it is one packet.
    pub(super) segment_len_bytes: usize,
    /// It was longer than the buffer and truncated.
    pub(super) truncated: bool,
    /// The network marked it (ECN-CE).
    pub(super) marked: bool,
}

/// The arguments of `recvmmsg`: `messages` buffers of `stride_bytes` each.
pub(super) struct RecvBatch {
    headers: Scratch<libc::mmsghdr>,
    iovecs: Scratch<libc::iovec>,
    controls: Scratch<Control>,
    names: Scratch<SockName>,
    arena: Box<[u8]>,
    stride_bytes: usize,
}

impl RecvBatch {
    /// Allocate for `messages` messages of up to `stride_bytes`.
    pub(super) fn new(messages: usize, stride_bytes: usize) -> Self {
        Self {
            headers: Scratch(Vec::with_capacity(messages)),
            iovecs: Scratch(Vec::with_capacity(messages)),
            controls: Scratch(vec![Control([0; 64]); messages]),
            names: Scratch(vec![SockName::zeroed(); messages]),
            arena: vec![0; messages * stride_bytes].into_boxed_slice(),
            stride_bytes,
        }
    }

    /// Receive up to `limit` messages, without blocking.
    ///
    /// # Returns
    /// How many messages were received, at least 1.
    ///
    /// # Errors
    /// `AGAIN` if no message waits, or another error of the kernel.
    pub(super) fn recv(&mut self, fd: BorrowedFd<'_>, limit: usize) -> Result<usize, Errno> {
        self.headers.0.clear();
        self.iovecs.0.clear();
        for buffer in self.arena.chunks_exact_mut(self.stride_bytes).take(limit) {
            self.iovecs.0.push(libc::iovec { iov_base: buffer.as_mut_ptr().cast(), iov_len: buffer.len() });
        }
        let slots = self.iovecs.0.iter_mut().zip(&mut self.controls.0).zip(&mut self.names.0);
        for ((iovec, control), name) in slots {
            let mut header = zeroed_header();
            header.msg_hdr.msg_name = ptr::from_mut(name).cast();
            header.msg_hdr.msg_namelen = size_of::<SockName>() as libc::socklen_t;
            header.msg_hdr.msg_iov = iovec;
            header.msg_hdr.msg_iovlen = 1;
            header.msg_hdr.msg_control = control.0.as_mut_ptr().cast();
            header.msg_hdr.msg_controllen = control.0.len() as _;
            self.headers.0.push(header);
        }
        let count = self.headers.0.len() as libc::c_uint;
        // SAFETY: every pointer in the headers was made above from this batch's own storage, which nothing else can
        // reach during the call and which was not moved or resized since; the lengths beside them are the buffers'.
        let received = unsafe {
            libc::recvmmsg(fd.as_raw_fd(), self.headers.0.as_mut_ptr(), count, libc::MSG_DONTWAIT as _, ptr::null_mut())
        };
        usize::try_from(received).map_err(|_| last_errno())
    }

    /// Describe message `i` of the last `recv`.
    pub(super) fn arrived(&self, i: usize) -> Arrived {
        let header = &self.headers.0[i];
        let len_bytes = (header.msg_len as usize).min(self.stride_bytes);
        let control_data = ControlData::read(&header.msg_hdr, &self.controls.0[i]);
        Arrived {
            from: self.names.0[i].to_socket_addr(),
            len_bytes,
            segment_len_bytes: control_data.segment_len_bytes.unwrap_or(len_bytes),
            marked: control_data.marked,
            truncated: header.msg_hdr.msg_flags & libc::MSG_TRUNC != 0,
        }
    }

    /// Return the buffer of message `i`.
    pub(super) fn buffer(&self, i: usize) -> &[u8] {
        &self.arena[i * self.stride_bytes..][..self.stride_bytes]
    }
}

/// Return whether the kernel segments datagrams (`UDP_SEGMENT`).
pub(super) fn has_gso(fd: BorrowedFd<'_>) -> bool {
    let mut value = MaybeUninit::<libc::c_int>::uninit();
    let mut len = size_of::<libc::c_int>() as libc::socklen_t;
    // SAFETY: `value` and `len` are valid until the call returns, and `len` is the size of `value`, which is not read.
    let rc = unsafe {
        libc::getsockopt(fd.as_raw_fd(), libc::SOL_UDP, libc::UDP_SEGMENT, value.as_mut_ptr().cast(), &raw mut len)
    };
    rc == 0
}

/// Make the kernel coalesce received packets (`UDP_GRO`); return whether it will.
pub(super) fn enable_gro(fd: BorrowedFd<'_>) -> bool {
    let on: libc::c_int = 1;
    let len = size_of::<libc::c_int>() as libc::socklen_t;
    // SAFETY: `on` is valid until the call returns, and `len` is its size.
    let rc = unsafe { libc::setsockopt(fd.as_raw_fd(), libc::SOL_UDP, libc::UDP_GRO, ptr::from_ref(&on).cast(), len) };
    rc == 0
}

fn zeroed_header() -> libc::mmsghdr {
    // SAFETY: integers and pointers, for which all zeroes (null) is valid.
    unsafe { mem::zeroed() }
}

fn last_errno() -> Errno {
    Errno::from_io_error(&std::io::Error::last_os_error()).unwrap_or(Errno::IO)
}

/// Have the kernel cut the message into segments of `len_bytes`.
fn put_segment_len(header: &mut libc::msghdr, control: &mut Control, len_bytes: u16) {
    header.msg_control = control.0.as_mut_ptr().cast();
    // SAFETY: `control` is aligned and, with 32 bytes, has room for a header and a `u16` (`CMSG_SPACE(2)` is 24 on
    // 64-bit machines), so `CMSG_FIRSTHDR` is not null and `CMSG_DATA` is inside; the write is unaligned.
    unsafe {
        header.msg_controllen = libc::CMSG_SPACE(size_of::<u16>() as u32) as _;
        let cmsg = libc::CMSG_FIRSTHDR(header);
        (*cmsg).cmsg_level = libc::SOL_UDP;
        (*cmsg).cmsg_type = libc::UDP_SEGMENT;
        (*cmsg).cmsg_len = libc::CMSG_LEN(size_of::<u16>() as u32) as _;
        libc::CMSG_DATA(cmsg).cast::<u16>().write_unaligned(len_bytes);
    }
}

/// The control data of a received message.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
struct ControlData {
    /// The size of its packets, if it coalesced several.
    segment_len_bytes: Option<usize>,
    /// The network marked it: both ECN bits are set (RFC 3168).
    marked: bool,
}

impl ControlData {
    /// Parse the control messages. Their headers are read from the borrowed storage, not through the pointers of the
    /// last call.
    fn read(header: &libc::msghdr, control: &Control) -> Self {
        #[allow(clippy::unnecessary_cast, reason = "the type of msg_controllen differs between C libraries")]
        let filled = (header.msg_controllen as usize).min(control.0.len());
        let mut rest = &control.0[..filled];
        let mut control_data = Self::default();
        while let Some((cmsg, data)) = rest.split_at_checked(CMSG_HEADER_LEN) {
            let word = |at: usize| i32::from_ne_bytes([cmsg[at], cmsg[at + 1], cmsg[at + 2], cmsg[at + 3]]);
            #[allow(clippy::unnecessary_cast, reason = "the type of cmsg_len differs between C libraries")]
            let len = {
                let mut bytes = [0; size_of::<usize>()];
                bytes.copy_from_slice(&cmsg[..size_of::<usize>()]);
                usize::from_ne_bytes(bytes)
            };
            let Some(data_len) = len.checked_sub(CMSG_HEADER_LEN).filter(|&len| len <= data.len()) else { break };
            let level_at = std::mem::offset_of!(libc::cmsghdr, cmsg_level);
            let type_at = std::mem::offset_of!(libc::cmsghdr, cmsg_type);
            match (word(level_at), word(type_at), &data[..data_len]) {
                (libc::SOL_UDP, libc::UDP_GRO, &[a, b, c, d, ..]) => {
                    let value = libc::c_int::from_ne_bytes([a, b, c, d]);
                    control_data.segment_len_bytes = usize::try_from(value).ok().filter(|&len| len > 0);
                }
                (libc::IPPROTO_IP, libc::IP_TOS, &[tos, ..]) => control_data.marked = tos & ECN_MASK == ECN_CE,
                _ => {}
            }
            rest = data.get(data_len.next_multiple_of(size_of::<usize>())..).unwrap_or_default();
        }
        control_data
    }
}

/// The length of a control message's header, in front of its data.
const CMSG_HEADER_LEN: usize = size_of::<libc::cmsghdr>();

/// The two lowest bits of IPv4's type of service (RFC 3168, section 5).
const ECN_MASK: u8 = 0b11;

/// Congestion experienced.
const ECN_CE: u8 = 0b11;

#[cfg(test)]
mod tests {
    use super::*;
    use std::net::UdpSocket;
    use std::os::fd::AsFd;

    #[test]
    fn addresses_round_trip_through_the_kernels_layout() {
        for text in ["127.0.0.1:1", "10.255.0.7:65535", "[::1]:4791", "[fe80::1%3]:9"] {
            let addr: SocketAddr = text.parse().unwrap();
            assert_eq!(SockName::from(addr).to_socket_addr(), Some(addr));
        }
        assert_eq!(SockName::zeroed().to_socket_addr(), None);
    }

    #[test]
    fn segment_length_round_trips_through_control_data() {
        let mut control = Control([0; 64]);
        let mut header = zeroed_header().msg_hdr;
        put_segment_len(&mut header, &mut control, 1472);
        // Sent as a u16 (UDP_SEGMENT), received as an int (UDP_GRO).
        assert_eq!(ControlData::read(&header, &control), ControlData::default());
        // SAFETY: as in `put_segment_len`.
        unsafe {
            let cmsg = control.0.as_mut_ptr().cast::<libc::cmsghdr>();
            (*cmsg).cmsg_type = libc::UDP_GRO;
            (*cmsg).cmsg_len = libc::CMSG_LEN(size_of::<libc::c_int>() as u32) as _;
        }
        assert_eq!(ControlData::read(&header, &control).segment_len_bytes, Some(1472));
    }

    #[test]
    fn batch_with_a_segmented_message_reaches_two_destinations() {
        let socket = || UdpSocket::bind("127.0.0.1:0").unwrap();
        let (a, b, c) = (socket(), socket(), socket());
        let arena: Vec<u8> = (0..=99).collect();
        let borrowed = [5; 10];
        let parts =
            [Part::Arena(0, 40), Part::Arena(40, 40), Part::Arena(80, 10), Part::Arena(90, 10), Part::Borrowed(0)];
        let to = |socket: &UdpSocket| SockName::from(socket.local_addr().unwrap());
        let gso = has_gso(a.as_fd());
        let messages = [
            Message { to: to(&b), parts: (0, if gso { 3 } else { 1 }), segment_len_bytes: if gso { 40 } else { 0 } },
            Message { to: to(&c), parts: (3, 5), segment_len_bytes: 0 },
        ];
        let mut batch = SendBatch::new(2, 5);
        assert_eq!(batch.send(a.as_fd(), &arena, &[&borrowed], &messages, &parts), Ok(2));
        let mut recv = RecvBatch::new(4, 64);
        let n = recv.recv(b.as_fd(), 4).unwrap();
        let lens: Vec<usize> = (0..n).map(|i| recv.arrived(i).len_bytes).collect();
        assert_eq!(lens, if gso { vec![40, 40, 10] } else { vec![40] });
        assert_eq!(recv.arrived(0).from, Some(a.local_addr().unwrap()));
        assert_eq!(recv.buffer(0)[..40], arena[..40]);
        assert_eq!(recv.recv(c.as_fd(), 4), Ok(1));
        assert_eq!((&recv.buffer(0)[..10], &recv.buffer(0)[10..20]), (&arena[90..], &borrowed[..]));
        assert_eq!(recv.recv(c.as_fd(), 4), Err(Errno::AGAIN));
        a.send_to(&[7; 65], c.local_addr().unwrap()).unwrap();
        assert_eq!(recv.recv(c.as_fd(), 4), Ok(1));
        assert!(recv.arrived(0).truncated);
    }
}

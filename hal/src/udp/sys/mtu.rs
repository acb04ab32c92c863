//! MTUs of interfaces, and what happens to packets that are longer.

use std::mem;
use std::os::fd::{AsRawFd, BorrowedFd};
use std::ptr;

/// Forbid that packets are fragmented, by this host or a router, and ignore path MTUs that ICMP messages report: they
/// can be forged (`IP_PMTUDISC_PROBE`, ip(7); RFC 8899 section 4.6.1). Packets longer than the interface's MTU are
/// refused (`EMSGSIZE`).
pub(in crate::udp) fn forbid_fragments(fd: BorrowedFd<'_>, is_ipv4: bool) -> std::io::Result<()> {
    let options: &[(libc::c_int, libc::c_int, libc::c_int)] = if is_ipv4 {
        &[(libc::IPPROTO_IP, libc::IP_MTU_DISCOVER, libc::IP_PMTUDISC_PROBE)]
    } else {
        &[
            (libc::IPPROTO_IPV6, libc::IPV6_MTU_DISCOVER, libc::IPV6_PMTUDISC_PROBE),
            (libc::IPPROTO_IPV6, libc::IPV6_DONTFRAG, 1),
        ]
    };
    for (level, name, value) in options {
        let len = size_of::<libc::c_int>() as libc::socklen_t;
        // SAFETY: `value` is valid until the call returns, and `len` is its size.
        let rc = unsafe { libc::setsockopt(fd.as_raw_fd(), *level, *name, ptr::from_ref(value).cast(), len) };
        if rc != 0 {
            return Err(std::io::Error::last_os_error());
        }
    }
    Ok(())
}

/// Return the MTU of the interface of this name in bytes (`SIOCGIFMTU`, netdevice(7)).
pub(in crate::udp) fn interface_mtu(socket: BorrowedFd<'_>, name: &str) -> std::io::Result<usize> {
    // SAFETY: arrays of integers and a union of integers, addresses and pointers, for which all zeroes is valid.
    let mut request: libc::ifreq = unsafe { mem::zeroed() };
    // A name ends with a zero byte.
    if name.len() >= request.ifr_name.len() {
        return Err(std::io::ErrorKind::InvalidInput.into());
    }
    for (to, &from) in request.ifr_name.iter_mut().zip(name.as_bytes()) {
        *to = from as libc::c_char;
    }
    // SAFETY: `request` is an `ifreq` with a terminated name, which the call reads and writes, and is valid until it
    // returns.
    let rc = unsafe { libc::ioctl(socket.as_raw_fd(), libc::SIOCGIFMTU as _, &raw mut request) };
    if rc != 0 {
        return Err(std::io::Error::last_os_error());
    }
    // SAFETY: an integer, valid for any bytes; the call has written it.
    let mtu = unsafe { request.ifr_ifru.ifru_mtu };
    Ok(usize::try_from(mtu).unwrap_or(0))
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::net::UdpSocket;
    use std::os::fd::AsFd;

    /// The kernel refuses to send what it would have to fragment, whatever an ICMP message says about the path.
    #[test]
    fn sockets_that_forbid_fragments_say_so_to_the_kernel() {
        for (addr, level, name, probe) in [
            ("127.0.0.1:0", libc::IPPROTO_IP, libc::IP_MTU_DISCOVER, libc::IP_PMTUDISC_PROBE),
            ("[::1]:0", libc::IPPROTO_IPV6, libc::IPV6_MTU_DISCOVER, libc::IPV6_PMTUDISC_PROBE),
        ] {
            // Some machines have no IPv6.
            let Ok(socket) = UdpSocket::bind(addr) else { continue };
            forbid_fragments(socket.as_fd(), level == libc::IPPROTO_IP).expect("an option of Linux");
            let (mut value, mut len) = (0, size_of::<libc::c_int>() as libc::socklen_t);
            // SAFETY: `value` and `len` are valid until the call returns, and `len` is the size of `value`.
            let rc = unsafe {
                let to = ptr::from_mut(&mut value).cast();
                libc::getsockopt(socket.as_raw_fd(), level, name, to, &raw mut len)
            };
            assert_eq!((rc, value), (0, probe), "{addr}");
        }
    }
}

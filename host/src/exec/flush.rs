//! Waits until all peers' kernels have acknowledged what this rank has sent, so that closing loses none of it.
//!
//! A peer that has waited for this rank has announced its operation ([`super::announce`]), and nobody reads the
//! announcement once the operation is complete here. Closing a socket with unread bytes resets the connection, and so
//! does a byte that arrives later. A reset discards what the socket has yet to send; what has reached the peer's kernel
//! is still read.

use super::link::{Link, State};
use super::mesh::Mesh;
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::ioctl::{Getter, Opcode, ioctl};
use std::net::TcpStream;
use std::os::fd::AsFd;
use std::time::{Duration, Instant};

/// `SIOCOUTQ`: the number of bytes that the peer has not acknowledged, as an `int` (`man 7 tcp`).
const UNACKNOWLEDGED: Opcode = 0x5411;
/// How long to wait before the first look again, and the limit to which the wait doubles: no event reports an
/// acknowledgement.
const FIRST_WAIT: Duration = Duration::from_micros(100);
const LONGEST_WAIT: Duration = Duration::from_millis(10);

impl Mesh {
    /// Wait until peers have acknowledged everything that was sent to them, or are gone; at most until `until`. Returns
    /// whether they have: then the mesh can be dropped, and slower peers still receive it.
    pub fn flush(&mut self, until: Instant) -> bool {
        let mut wait = FIRST_WAIT;
        loop {
            let channels = self.messages.out.iter().map(|channel| &channel.link);
            let streams = self.links.iter().chain(channels).filter_map(open_stream);
            let waits: Vec<&TcpStream> = streams.filter(|stream| has_unacknowledged(stream)).collect();
            let left = until.saturating_duration_since(Instant::now());
            if waits.is_empty() || left.is_zero() {
                return waits.is_empty();
            }
            // A connection that breaks wakes it at once.
            let mut fds: Vec<_> = waits.iter().map(|stream| PollFd::new(*stream, PollFlags::empty())).collect();
            let pause = wait.min(left);
            let _ = poll(&mut fds, Some(&Timespec { tv_sec: 0, tv_nsec: pause.subsec_nanos().into() }));
            wait = (wait * 2).min(LONGEST_WAIT);
        }
    }
}

/// Return the stream over which frames were exchanged.
const fn open_stream(link: &Link) -> Option<&TcpStream> {
    match &link.state {
        State::Ready(stream) => Some(stream),
        _ => None,
    }
}

/// Return whether a connected peer has yet to acknowledge bytes.
fn has_unacknowledged(stream: &TcpStream) -> bool {
    // The count of a connection that was reset never changes again.
    let mut fds = [PollFd::new(stream, PollFlags::empty())];
    let broken = PollFlags::HUP | PollFlags::ERR;
    if poll(&mut fds, Some(&Timespec::default())).is_err() || fds[0].revents().intersects(broken) {
        return false;
    }
    // SAFETY: on any socket, this request writes one `int` to the address that it is given, and nothing else; `Getter`
    // passes the address of a `c_int` and returns it only if the call succeeded.
    let bytes = unsafe { ioctl(stream.as_fd(), Getter::<UNACKNOWLEDGED, std::ffi::c_int>::new()) };
    bytes.is_ok_and(|bytes| bytes > 0)
}

#[cfg(test)]
mod tests;

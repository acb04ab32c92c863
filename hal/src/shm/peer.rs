//! The process at the other end of a socket: its identity, whether it is alive, and how to make sure that it has ended.

use super::ready::readable;
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::io::Errno;
use rustix::process::{Pid, PidfdFlags, Signal, pidfd_open, pidfd_send_signal};
use rustix::time::{ClockId, clock_gettime};
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, FromRawFd, OwnedFd};
use std::time::Duration;

/// `SO_PEERPIDFD` of Linux 6.5 and later, `include/uapi/asm-generic/socket.h`. Older kernels answer `ENOPROTOOPT`.
const SO_PEERPIDFD: libc::c_int = 77;

/// A process, held by a pidfd, which never refers to another process.
#[derive(Debug)]
pub struct Peer {
    pid: i32,
    uid: u32,
    process: OwnedFd,
}

/// A system call that inspects or signals the peer's process failed.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[error("{call} of process {pid}: {errno}")]
pub struct PeerError {
    /// The system call.
    pub call: &'static str,
    /// The process id; 0 if the process is in a PID namespace that this one does not see.
    pub pid: i32,
    /// The system's error.
    pub errno: Errno,
}

impl Peer {
    /// Open a pidfd of the process at the other end of a socket that has just been connected.
    ///
    /// Linux 6.5 hands out the pidfd itself. Older kernels report only the process id, which may have been reused: the
    /// process must then be older than this call, and the socket must still be connected once the pidfd is open. What
    /// this cannot detect is a process that ended and left its socket to a child, and whose id was reused before this
    /// call.
    pub(super) fn of(socket: &OwnedFd) -> Result<Self, PeerError> {
        let now = boot_time();
        let (pid, uid) = credentials(socket)?;
        let process = match process_of(socket) {
            Err(Errno::NOPROTOOPT) => by_number(socket, pid, now)?,
            process => process.map_err(|errno| PeerError { call: "getsockopt(SO_PEERPIDFD)", pid, errno })?,
        };
        Ok(Self { pid, uid, process })
    }

    /// Return the process id; 0 if the process is in a PID namespace that this one does not see.
    pub fn pid(&self) -> i32 {
        self.pid
    }

    /// Return the user id of the process at the time it connected or listened.
    pub fn uid(&self) -> u32 {
        self.uid
    }

    /// Wait until the process has ended or `timeout` has passed; true if it has ended. No access of an ended process to
    /// any memory can still take effect: this is the fence of PROTOCOL 6.
    ///
    /// # Errors
    /// [`PeerError`].
    pub fn wait(&self, timeout: Duration) -> Result<bool, PeerError> {
        readable(&self.process, timeout).map_err(|errno| PeerError { call: "poll", pid: self.pid(), errno })
    }

    /// Kill the process. [`Peer::wait`] reports when it has ended.
    ///
    /// # Errors
    /// [`PeerError`]. A process that has already ended is not an error.
    pub fn kill(&self) -> Result<(), PeerError> {
        match pidfd_send_signal(&self.process, Signal::KILL) {
            Ok(()) | Err(Errno::SRCH) => Ok(()),
            Err(errno) => Err(PeerError { call: "pidfd_send_signal", pid: self.pid(), errno }),
        }
    }
}

impl AsFd for Peer {
    /// Readable when the process has ended.
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.process.as_fd()
    }
}

/// Return the process id and user id of the peer. The process id is 0 across PID namespaces, which `rustix`'s type
/// cannot represent.
fn credentials(socket: &OwnedFd) -> Result<(i32, u32), PeerError> {
    let mut found = libc::ucred { pid: 0, uid: u32::MAX, gid: u32::MAX };
    // SAFETY: the structure is what this option fills, plain numbers, and outlives the call.
    let done = unsafe { socket_option(socket, libc::SO_PEERCRED, &mut found) };
    done.map_err(|errno| PeerError { call: "getsockopt(SO_PEERCRED)", pid: 0, errno })?;
    Ok((found.pid, found.uid))
}

/// Return a pidfd of the peer; [`Errno::NOPROTOOPT`] before Linux 6.5.
fn process_of(socket: &OwnedFd) -> Result<OwnedFd, Errno> {
    let mut file: libc::c_int = -1;
    // SAFETY: this option writes one integer, which outlives the call.
    unsafe { socket_option(socket, SO_PEERPIDFD, &mut file) }?;
    // SAFETY: the kernel has just created this descriptor, close-on-exec, for this call; nothing else owns it.
    Ok(unsafe { OwnedFd::from_raw_fd(file) })
}

/// Read an option of a socket.
///
/// # Safety
/// The option fills at most a `T`, of which all bit patterns are valid.
unsafe fn socket_option<T>(socket: &OwnedFd, option: libc::c_int, value: &mut T) -> Result<(), Errno> {
    let mut len = size_of::<T>() as libc::socklen_t;
    let (file, to) = (socket.as_raw_fd(), std::ptr::from_mut(value).cast());
    // SAFETY: the descriptor is open, and the system writes at most `len` bytes to the value.
    match unsafe { libc::getsockopt(file, libc::SOL_SOCKET, option, to, &raw mut len) } {
        0 if len as usize == size_of::<T>() => Ok(()),
        0 => Err(Errno::INVAL),
        _ => Err(Errno::from_raw_os_error(std::io::Error::last_os_error().raw_os_error().unwrap_or(libc::EIO))),
    }
}

/// Open a pidfd by process id, and check that the process existed at time `at` since boot and that the socket is still
/// connected afterwards.
fn by_number(socket: &OwnedFd, pid: i32, at: Duration) -> Result<OwnedFd, PeerError> {
    let failed = |errno| PeerError { call: "pidfd_open", pid, errno };
    let number = Pid::from_raw(pid).ok_or(failed(Errno::SRCH))?;
    let process = pidfd_open(number, PidfdFlags::empty()).map_err(failed)?;
    let began = start_time(pid).ok_or(failed(Errno::SRCH))?;
    // `began` belongs to this process if it is still alive: its id is not reused before it has ended.
    let has_ended = readable(&process, Duration::ZERO).map_err(failed)?;
    let mut hung_up = [PollFd::new(socket, PollFlags::empty())];
    poll(&mut hung_up, Some(&Timespec { tv_sec: 0, tv_nsec: 0 })).map_err(failed)?;
    if began > at || has_ended || hung_up[0].revents().contains(PollFlags::HUP) {
        return Err(failed(Errno::SRCH));
    }
    Ok(process)
}

/// Return the start time of a process since boot, in whole ticks (proc(5), `/proc/PID/stat`, field 22).
fn start_time(pid: i32) -> Option<Duration> {
    let stat = std::fs::read_to_string(format!("/proc/{pid}/stat")).ok()?;
    // The second field, the program's name, may contain any character, including parentheses.
    let (_, fields) = stat.rsplit_once(')')?;
    let ticks: u64 = fields.split_ascii_whitespace().nth(19)?.parse().ok()?;
    // SAFETY: it has no conditions.
    let per_s = u64::try_from(unsafe { libc::sysconf(libc::_SC_CLK_TCK) }).ok().filter(|&ticks| ticks > 0)?;
    Some(Duration::from_secs(ticks / per_s) + Duration::from_secs(ticks % per_s) / u32::try_from(per_s).ok()?)
}

/// Return the time since boot.
fn boot_time() -> Duration {
    let now = clock_gettime(ClockId::Boottime);
    Duration::new(u64::try_from(now.tv_sec).unwrap_or(0), u32::try_from(now.tv_nsec).unwrap_or(0))
}

#[cfg(test)]
mod tests {
    use super::*;
    use rustix::net::{AddressFamily, SocketFlags, SocketType, socketpair};
    use std::process::Command;

    fn pair() -> (OwnedFd, OwnedFd) {
        socketpair(AddressFamily::UNIX, SocketType::SEQPACKET, SocketFlags::CLOEXEC, None).expect("sockets")
    }

    /// The other tests also pass with the fallback by process id, so they would not notice if this call stopped
    /// working.
    #[test]
    fn peer_pidfd_comes_from_the_socket_since_linux_6_5() {
        let (ours, _theirs) = pair();
        match process_of(&ours) {
            Ok(process) => assert_eq!(readable(&process, Duration::ZERO), Ok(false), "this process has not ended"),
            Err(errno) => assert_eq!(errno, Errno::NOPROTOOPT, "only kernels before 6.5 lack it"),
        }
        let (pid, uid) = credentials(&ours).expect("a socket");
        assert_eq!((pid as u32, uid), (std::process::id(), rustix::process::getuid().as_raw()));
    }

    #[test]
    fn process_by_id_is_refused_if_younger_or_ended_or_disconnected() {
        let (ours, theirs) = pair();
        let own = std::process::id() as i32;
        assert!(by_number(&ours, own, boot_time()).is_ok());
        // The id was reused after the connection was made.
        let before =
            start_time(own).expect("/proc is mounted").checked_sub(Duration::from_secs(1)).expect("later than boot");
        let refused = |result: Result<OwnedFd, PeerError>| result.expect_err("another process").errno;
        assert_eq!(refused(by_number(&ours, own, before)), Errno::SRCH);
        // The process has ended and was not reaped yet.
        let mut child = Command::new("true").spawn().expect("a process");
        let pid = child.id() as i32;
        let process = pidfd_open(Pid::from_raw(pid).expect("a number"), PidfdFlags::empty()).expect("own child");
        assert_eq!(readable(&process, Duration::from_secs(60)), Ok(true));
        assert_eq!(refused(by_number(&ours, pid, boot_time())), Errno::SRCH);
        child.wait().expect("own child");
        assert_eq!(refused(by_number(&ours, 0, boot_time())), Errno::SRCH, "in another namespace");
        drop(theirs);
        assert_eq!(refused(by_number(&ours, own, boot_time())), Errno::SRCH);
    }
}

//! The process on the other side: whether it is alive, and how to be sure that it is not.

use super::ready::readable;
use rustix::io::Errno;
use rustix::process::{Pid, PidfdFlags, Signal, pidfd_open, pidfd_send_signal};
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::time::Duration;

/// A process, by a descriptor that never names another one.
#[derive(Debug)]
pub struct Peer {
    pid: Pid,
    process: OwnedFd,
}

/// What could not be found out or done about a process.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[error("{call} of process {pid}: {errno}")]
pub struct PeerError {
    /// The system call.
    pub call: &'static str,
    /// The process.
    pub pid: i32,
    /// Why.
    pub errno: Errno,
}

impl Peer {
    /// Take hold of a process that is known to be alive: the other end of a connection that has not hung up.
    pub(super) fn open(pid: Pid) -> Result<Self, PeerError> {
        let process = pidfd_open(pid, PidfdFlags::empty());
        let failed = |errno| PeerError { call: "pidfd_open", pid: pid.as_raw_nonzero().get(), errno };
        Ok(Self { pid, process: process.map_err(failed)? })
    }

    /// Return the process's number.
    pub fn pid(&self) -> i32 {
        self.pid.as_raw_nonzero().get()
    }

    /// Wait until the process has ended, or `timeout` has passed; true if it has ended. Then no access of it to any
    /// memory can take effect any more: it is the fence of PROTOCOL 6.
    ///
    /// # Errors
    /// [`PeerError`].
    pub fn wait(&self, timeout: Duration) -> Result<bool, PeerError> {
        readable(&self.process, timeout).map_err(|errno| PeerError { call: "poll", pid: self.pid(), errno })
    }

    /// End the process by force. [`Peer::wait`] tells when it has.
    ///
    /// # Errors
    /// [`PeerError`]; not if it has ended already.
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

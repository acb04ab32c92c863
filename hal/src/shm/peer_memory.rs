//! Copies out of another process's memory, with its consent: `process_vm_readv(2)`.
//!
//! The kernel permits it between processes of one user that may trace each other (ptrace(2),
//! `PTRACE_MODE_ATTACH_REALCREDS`). Yama, and containers without `CAP_SYS_PTRACE` in the other's user namespace, refuse
//! it. Nothing here changes that permission.
//!
//! Invariant: bytes count only if the process was alive after they were copied. Until then its id is not reused, so
//! they are its bytes and no other process's.

use super::peer::{Peer, PeerError};
use rustix::io::Errno;
use std::time::Duration;

/// Why another process's memory cannot be read.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum PeerMemoryError {
    /// The kernel refuses.
    #[error(
        "process_vm_readv of process {pid}: {errno}; the kernel permits it to processes of one user that may trace each \
         other (kernel.yama.ptrace_scope)"
    )]
    Read {
        /// The process.
        pid: i32,
        /// Why.
        errno: Errno,
    },
    /// The process is in a PID namespace that this one does not see.
    #[error("the other process is in another PID namespace")]
    Namespace,
    /// The process has ended.
    #[error("process {pid} has ended")]
    Ended {
        /// The process.
        pid: i32,
    },
    /// It cannot be found out whether the process has ended.
    #[error(transparent)]
    Peer(#[from] PeerError),
    /// The bytes at the address that the process gave are not those that it named.
    #[error("the other process's memory does not hold what it says it does")]
    Probe,
}

/// The memory of another process.
#[derive(Debug)]
pub struct PeerMemory {
    peer: Peer,
}

impl PeerMemory {
    /// Prepare to read the memory of a process.
    ///
    /// # Errors
    /// [`PeerMemoryError::Namespace`].
    pub fn new(peer: Peer) -> Result<Self, PeerMemoryError> {
        if peer.pid() > 0 { Ok(Self { peer }) } else { Err(PeerMemoryError::Namespace) }
    }

    /// Copy `bytes.len()` bytes at an address of the other process. They are a mixture of old and new if it writes
    /// concurrently.
    ///
    /// # Errors
    /// [`PeerMemoryError`]; the destination then holds anything. An address that the process does not have fails with
    /// `EFAULT`.
    pub fn read(&self, address: u64, bytes: &mut [u8]) -> Result<(), PeerMemoryError> {
        let pid = self.peer.pid();
        let mut done = 0;
        while done < bytes.len() {
            let rest = &mut bytes[done..];
            let to = libc::iovec { iov_base: rest.as_mut_ptr().cast(), iov_len: rest.len() };
            // On a 32-bit host an address above its range fails below, as any that the process does not have.
            let at = address.wrapping_add(done as u64) as usize;
            let from = libc::iovec { iov_base: std::ptr::without_provenance_mut(at), iov_len: rest.len() };
            // SAFETY: the kernel writes at most `rest.len()` bytes to `rest`, which is borrowed mutably. The other
            // address belongs to the other process, and the kernel checks it.
            let copied = unsafe { libc::process_vm_readv(pid, &raw const to, 1, &raw const from, 1, 0) };
            match usize::try_from(copied) {
                Ok(copied) if copied > 0 => done += copied,
                _ => return Err(PeerMemoryError::Read { pid, errno: last_error() }),
            }
        }
        if self.peer.wait(Duration::ZERO)? { Err(PeerMemoryError::Ended { pid }) } else { Ok(()) }
    }
}

fn last_error() -> Errno {
    std::io::Error::last_os_error().raw_os_error().map_or(Errno::IO, Errno::from_raw_os_error)
}

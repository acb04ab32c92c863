//! Waits for a descriptor up to a deadline, across interruptions by signals.

use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::io::Errno;
use std::os::fd::AsFd;
use std::time::{Duration, Instant};

/// Wait until `file` is readable or hung up, or `timeout` has passed; true if it is ready.
pub(super) fn readable(file: impl AsFd, timeout: Duration) -> Result<bool, Errno> {
    // A timeout beyond the clock's range means no deadline.
    let deadline = Instant::now().checked_add(timeout);
    let mut left = timeout;
    loop {
        let limit = deadline.and_then(|_| Timespec::try_from(left).ok());
        match poll(&mut [PollFd::new(&file, PollFlags::IN)], limit.as_ref()) {
            Ok(ready) => return Ok(ready > 0),
            Err(Errno::INTR) => {}
            Err(errno) => return Err(errno),
        }
        left = deadline.map_or(timeout, |deadline| deadline.saturating_duration_since(Instant::now()));
    }
}

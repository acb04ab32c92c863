//! Waiting for a descriptor: for as long as was asked for, whatever signals the process gets meanwhile.

use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::io::Errno;
use std::os::fd::AsFd;
use std::time::{Duration, Instant};

/// Wait until there is something to read, or `timeout` has passed; true if there is something. A hang-up counts.
pub(super) fn readable(file: impl AsFd, timeout: Duration) -> Result<bool, Errno> {
    // A time beyond all times is none.
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

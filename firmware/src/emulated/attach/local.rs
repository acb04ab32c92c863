//! Ranks of this machine that have connected and not yet sent their attach request.
//!
//! All pending connections are polled together: one that sends nothing does not delay the others, and is closed after a
//! timeout. If the system has no descriptor left for another connection, accepting pauses ([`ACCEPT_BACKOFF`]) instead
//! of failing repeatedly.

use rustix::event::{self, PollFd, PollFlags, Timespec};
use std::collections::VecDeque;
use std::os::fd::AsFd;
use std::thread;
use std::time::{Duration, Instant};
use sumac_hal::ids::{ChildIndex, GroupId};
use sumac_hal::shm::{Connection, Listener, Message, Received, SocketError};

/// How long a connection may take to send its attach request.
pub(super) const ATTACH_REQUEST_TIMEOUT: Duration = Duration::from_secs(1);

/// The maximum number of pending connections; another one evicts the oldest.
pub(super) const PENDING_MAX: usize = 64;

/// The pause after a failed accept.
pub(super) const ACCEPT_BACKOFF: Duration = Duration::from_millis(100);

/// A rank that has sent an attach request.
pub(in crate::emulated) enum Arrival {
    /// On this machine.
    Local(LocalArrival),
    /// On another host.
    Remote(super::RemoteArrival),
}

/// A rank on this machine that has sent its attach request.
pub(in crate::emulated) struct LocalArrival {
    pub(in crate::emulated) connection: Connection,
    pub(in crate::emulated) group: GroupId,
    pub(in crate::emulated) child: ChildIndex,
    pub(in crate::emulated) key: u64,
}

/// The listener and its pending connections.
pub(super) struct PendingAttaches {
    listener: Listener,
    /// The connections with their deadlines, oldest first.
    pending: VecDeque<(Connection, Instant)>,
    /// No connections are accepted until then.
    backoff_until: Option<Instant>,
}

impl PendingAttaches {
    pub(super) const fn new(listener: Listener) -> Self {
        Self { listener, pending: VecDeque::new(), backoff_until: None }
    }

    /// Sleep until a connection or request arrives, a request is overdue, or `stop` is readable; hand over received
    /// requests.
    pub(super) fn poll(&mut self, stop: &impl AsFd, mut arrived: impl FnMut(LocalArrival)) {
        let now = Instant::now();
        self.backoff_until.take_if(|deadline| *deadline <= now);
        let deadline = self.pending.front().map(|(_, deadline)| *deadline).into_iter().chain(self.backoff_until).min();
        let timeout = deadline.and_then(|at| Timespec::try_from(at.saturating_duration_since(now)).ok());
        let mut fds = vec![PollFd::new(stop, PollFlags::IN)];
        fds.extend(self.pending.iter().map(|(connection, _)| PollFd::new(connection, PollFlags::IN)));
        if self.backoff_until.is_none() {
            fds.push(PollFd::new(&self.listener, PollFlags::IN));
        }
        match event::poll(&mut fds, timeout.as_ref()) {
            // The caller's loop checks time and connections again.
            Err(rustix::io::Errno::INTR) => return,
            Err(error) => {
                tracing::warn!(%error, "poll failed");
                return thread::sleep(ACCEPT_BACKOFF);
            }
            Ok(_) => {}
        }
        let is_ready: Vec<bool> = fds.iter().map(|fd| !fd.revents().is_empty()).collect();
        let has_connection = self.backoff_until.is_none() && is_ready.last() == Some(&true);
        self.receive(&is_ready[1..], &mut arrived);
        if has_connection {
            self.accept();
        }
    }

    /// Receive requests, and close connections whose deadline has passed.
    fn receive(&mut self, is_ready: &[bool], arrived: &mut impl FnMut(LocalArrival)) {
        let now = Instant::now();
        for &is_ready in &is_ready[..self.pending.len()] {
            let Some((connection, deadline)) = self.pending.pop_front() else { return };
            if !is_ready && now < deadline {
                self.pending.push_back((connection, deadline));
                continue;
            }
            match connection.receive(Duration::ZERO) {
                Ok(Received { message: Message::Attach { group, child, key }, .. }) => {
                    arrived(LocalArrival { connection, group, child, key });
                }
                // The peer closed the connection.
                Err(SocketError::Closed) => {}
                Err(SocketError::Timeout(_)) => {
                    let pid = connection.peer().pid();
                    tracing::warn!(pid, limit = ?ATTACH_REQUEST_TIMEOUT, "a connection sent no attach request in time");
                }
                Ok(_) => tracing::warn!(
                    pid = connection.peer().pid(),
                    "a connection sent something other than an attach request"
                ),
                Err(error) => tracing::warn!(%error, "a rank could not connect"),
            }
        }
    }

    fn accept(&mut self) {
        match self.listener.accept(Duration::ZERO) {
            Ok(Some(connection)) => {
                if self.pending.len() == PENDING_MAX {
                    self.pending.pop_front();
                }
                self.pending.push_back((connection, Instant::now() + ATTACH_REQUEST_TIMEOUT));
            }
            Ok(None) => {}
            Err(error) => {
                tracing::warn!(%error, "a rank could not connect");
                // The connection stays in the backlog.
                if matches!(error, SocketError::System { .. }) {
                    self.backoff_until = Some(Instant::now() + ACCEPT_BACKOFF);
                }
            }
        }
    }
}

//! Who has connected and not said yet who it is.
//!
//! All are listened to at once: one that says nothing keeps nobody waiting, and is hung up on after a while. Where the
//! system has no room for another connection, the listener rests for a moment instead of being asked again and again.

use rustix::event::{PollFd, PollFlags, Timespec, poll};
use std::collections::VecDeque;
use std::os::fd::AsFd;
use std::thread;
use std::time::{Duration, Instant};
use sumac_hal::ids::{ChildIndex, GroupId};
use sumac_hal::shm::{Connection, Listener, Message, Received, SocketError};

/// How long who has connected may take to say who it is.
pub(super) const HELLO_LIMIT: Duration = Duration::from_secs(1);

/// How many may be about to say it; one more, and the one that has had most time is hung up on.
pub(super) const WAITING_MAX: usize = 64;

/// How long to leave who wants to connect waiting when there was no room.
pub(super) const REST: Duration = Duration::from_millis(100);

/// Somebody who wants to attach.
pub(in crate::emulated) enum Arrival {
    /// Of this machine.
    Near(Neighbour),
    /// Of another host.
    Far(super::Caller),
}

/// A process of this machine that wants to attach.
pub(in crate::emulated) struct Neighbour {
    pub(in crate::emulated) connection: Connection,
    pub(in crate::emulated) group: GroupId,
    pub(in crate::emulated) child: ChildIndex,
    pub(in crate::emulated) key: u64,
}

/// The listener, and who has connected to it.
pub(super) struct Reception {
    listener: Listener,
    /// With the time when each has to have spoken, the first one's first.
    waiting: VecDeque<(Connection, Instant)>,
    /// The listener rests until then.
    rests_until: Option<Instant>,
}

impl Reception {
    pub(super) const fn new(listener: Listener) -> Self {
        Self { listener, waiting: VecDeque::new(), rests_until: None }
    }

    /// Sleep until somebody comes or speaks, or has had its time, or `stop` is readable; hand over who has spoken.
    pub(super) fn turn(&mut self, stop: &impl AsFd, mut arrived: impl FnMut(Neighbour)) {
        let now = Instant::now();
        self.rests_until.take_if(|until| *until <= now);
        let deadline = self.waiting.front().map(|(_, until)| *until).into_iter().chain(self.rests_until).min();
        let timeout = deadline.and_then(|at| Timespec::try_from(at.saturating_duration_since(now)).ok());
        let mut fds = vec![PollFd::new(stop, PollFlags::IN)];
        fds.extend(self.waiting.iter().map(|(connection, _)| PollFd::new(connection, PollFlags::IN)));
        if self.rests_until.is_none() {
            fds.push(PollFd::new(&self.listener, PollFlags::IN));
        }
        match poll(&mut fds, timeout.as_ref()) {
            // Whoever calls looks at time and connections again.
            Err(rustix::io::Errno::INTR) => return,
            Err(error) => {
                tracing::warn!(%error, "nobody can be heard now");
                return thread::sleep(REST);
            }
            Ok(_) => {}
        }
        let has_news: Vec<bool> = fds.iter().map(|fd| !fd.revents().is_empty()).collect();
        let somebody_comes = self.rests_until.is_none() && has_news.last() == Some(&true);
        self.hear(&has_news[1..], &mut arrived);
        if somebody_comes {
            self.accept();
        }
    }

    /// Hear those who have something to say, and hang up on those whose time is over.
    fn hear(&mut self, has_news: &[bool], arrived: &mut impl FnMut(Neighbour)) {
        let now = Instant::now();
        for &has_news in &has_news[..self.waiting.len()] {
            let Some((connection, until)) = self.waiting.pop_front() else { return };
            if !has_news && now < until {
                self.waiting.push_back((connection, until));
                continue;
            }
            match connection.receive(Duration::ZERO) {
                Ok(Received { message: Message::Attach { group, child, key }, .. }) => {
                    arrived(Neighbour { connection, group, child, key });
                }
                // It has thought better of it.
                Err(SocketError::Closed) => {}
                Err(SocketError::Timeout(_)) => {
                    tracing::warn!(pid = connection.peer().pid(), limit = ?HELLO_LIMIT, "somebody says nothing");
                }
                Ok(_) => tracing::warn!(pid = connection.peer().pid(), "somebody does not say who it is"),
                Err(error) => tracing::warn!(%error, "somebody can't attach"),
            }
        }
    }

    fn accept(&mut self) {
        match self.listener.accept(Duration::ZERO) {
            Ok(Some(connection)) => {
                if self.waiting.len() == WAITING_MAX {
                    self.waiting.pop_front();
                }
                self.waiting.push_back((connection, Instant::now() + HELLO_LIMIT));
            }
            Ok(None) => {}
            Err(error) => {
                tracing::warn!(%error, "somebody can't attach");
                // Who could not be accepted waits there still.
                if matches!(error, SocketError::System { .. }) {
                    self.rests_until = Some(Instant::now() + REST);
                }
            }
        }
    }
}

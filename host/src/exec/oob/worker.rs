//! The thread of the channel: takes commands, watches ranks, and serves the connections that are ready.

use super::inbound::{Inbound, UnknownPeer};
use super::outbound::{Outbound, Stage};
use super::{HELLO_LIMIT, OobEvent, OobSender, SILENCE_LIMIT};
use crate::exec::acceptor::Acceptor;
use crate::exec::auth::RefusalCount;
use crate::secret::JobSecret;
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use std::collections::{BTreeSet, VecDeque};
use std::io::Read;
use std::net::{Shutdown, SocketAddr};
use std::os::unix::net::UnixStream;
use std::sync::Arc;
use std::time::{Duration, Instant};
use sumac_hal::ids::Rank;

#[derive(Debug, Clone, Copy)]
pub(super) enum PollTarget {
    Wake,
    Listener,
    Inbound(usize),
    UnknownPeer(usize),
    Outbound(Rank),
}

pub(super) struct Worker {
    pub(super) own: Rank,
    pub(super) secret: JobSecret,
    pub(super) max_len_bytes: usize,
    pub(super) acceptor: Acceptor,
    pub(super) addresses: Vec<SocketAddr>,
    pub(super) outbound: Vec<Outbound>,
    pub(super) inbound: Vec<Inbound>,
    /// In order of arrival.
    pub(super) unknown_peers: VecDeque<UnknownPeer>,
    pub(super) refusals: RefusalCount,
    pub(super) wake_receiver: UnixStream,
    pub(super) watched: BTreeSet<Rank>,
    pub(super) sender: Arc<OobSender>,
    pub(super) on_event: Box<dyn FnMut(OobEvent) -> Option<Vec<u8>> + Send>,
}

impl Worker {
    pub(super) fn run(mut self) {
        let mut end = None;
        loop {
            let now = Instant::now();
            if self.take_commands(now) {
                // Flush what is queued to the ranks that listen.
                let until = *end.get_or_insert(now + FLUSH_LIMIT);
                if now >= until || self.outbound.iter().all(|out| out.bytes.is_empty()) {
                    return self.outbound.iter().filter_map(|out| out.stream.as_ref()).for_each(|stream| {
                        // Fails if the peer was faster.
                        let _ = stream.shutdown(Shutdown::Write);
                    });
                }
            }
            self.check_watched(now);
            self.expire(now);
            self.dial_all(now);
            let ready = self.poll(self.next_deadline(end).map(|at| at.saturating_duration_since(Instant::now())));
            // From the back: a connection that ends leaves the list.
            for what in ready.into_iter().rev() {
                match what {
                    PollTarget::Wake => while matches!((&self.wake_receiver).read(&mut [0; 64]), Ok(n) if n > 0) {},
                    PollTarget::Listener => self.accept(Instant::now()),
                    PollTarget::Inbound(index) => self.receive(index),
                    PollTarget::UnknownPeer(index) => drop(self.identify(index)),
                    PollTarget::Outbound(rank) => self.send(rank),
                }
            }
        }
    }

    /// Take the pending commands; returns whether the channel is closing.
    fn take_commands(&mut self, now: Instant) -> bool {
        let (messages, watched, is_closing) = {
            let mut commands = self.sender.lock();
            (std::mem::take(&mut commands.messages), commands.watched.clone(), commands.is_closing)
        };
        for (rank, message) in messages {
            self.enqueue(rank, &message);
        }
        for rank in watched.difference(&self.watched) {
            let out = &mut self.outbound[rank.0 as usize];
            (out.alive_at, out.pinged_at) = (Some(now), None);
        }
        self.watched = watched;
        is_closing
    }

    /// Queue a message.
    pub(super) fn enqueue(&mut self, to: Rank, message: &[u8]) {
        let Some(out) = self.outbound.get_mut(to.0 as usize).filter(|_| to != self.own) else { return };
        out.bytes.extend((message.len() as u32).to_le_bytes());
        out.bytes.extend(message);
    }

    pub(super) fn deliver(&mut self, event: OobEvent) {
        let (OobEvent::Message(rank, _) | OobEvent::Gone(rank) | OobEvent::Silent(rank)) = event;
        if let Some(answer) = (self.on_event)(event) {
            self.enqueue(rank, &answer);
        }
    }

    /// Ping watched ranks, and report those that are silent.
    fn check_watched(&mut self, now: Instant) {
        for rank in self.watched.clone() {
            let out = &mut self.outbound[rank.0 as usize];
            if now.saturating_duration_since(*out.alive_at.get_or_insert(now)) >= SILENCE_LIMIT {
                out.alive_at = Some(now);
                self.deliver(OobEvent::Silent(rank));
            } else if out.pinged_at.is_none_or(|at| at + PING_INTERVAL <= now) && out.bytes.is_empty() {
                out.pinged_at = Some(now);
                self.enqueue(rank, &[]);
            }
        }
    }

    /// Return when the next timer is due.
    fn next_deadline(&self, end: Option<Instant>) -> Option<Instant> {
        let pings = self.watched.iter().filter_map(|rank| {
            let out = &self.outbound[rank.0 as usize];
            Some(out.alive_at? + SILENCE_LIMIT).into_iter().chain(out.pinged_at.map(|at| at + PING_INTERVAL)).min()
        });
        let dials = self.outbound.iter().filter(|out| out.stream.is_none() && !out.bytes.is_empty());
        let dials = dials.filter_map(|out| out.redial.at());
        let hellos = self.unknown_peers.front().map(|peer| peer.since + HELLO_LIMIT);
        let accepts = self.acceptor.resume_at(Instant::now());
        pings.chain(dials).chain(end).chain(hellos).chain(accepts).min()
    }

    /// Wait until something can be done; returns the ready targets.
    fn poll(&self, timeout: Option<Duration>) -> Vec<PollTarget> {
        let mut fds = vec![PollFd::new(&self.wake_receiver, PollFlags::IN)];
        let mut watched = vec![PollTarget::Wake];
        if self.acceptor.resume_at(Instant::now()).is_none() {
            fds.push(PollFd::new(self.acceptor.listener(), PollFlags::IN));
            watched.push(PollTarget::Listener);
        }
        for (index, from) in self.inbound.iter().enumerate() {
            fds.push(PollFd::new(&from.stream, PollFlags::IN));
            watched.push(PollTarget::Inbound(index));
        }
        for (index, peer) in self.unknown_peers.iter().enumerate() {
            fds.push(PollFd::new(&peer.stream, PollFlags::IN));
            watched.push(PollTarget::UnknownPeer(index));
        }
        for (index, out) in self.outbound.iter().enumerate() {
            let Some(stream) = &out.stream else { continue };
            let interest = match out.stage {
                Stage::Connecting => PollFlags::OUT,
                Stage::Ready if !out.bytes.is_empty() => PollFlags::IN | PollFlags::OUT,
                Stage::AwaitingAnswer | Stage::AwaitingVerdict | Stage::Ready => PollFlags::IN,
            };
            fds.push(PollFd::new(stream, interest));
            watched.push(PollTarget::Outbound(Rank(index as u32)));
        }
        let timeout = timeout.map(|timeout| Timespec {
            tv_sec: i64::try_from(timeout.as_secs()).unwrap_or(i64::MAX),
            tv_nsec: timeout.subsec_nanos().into(),
        });
        let polled = poll(&mut fds, timeout.as_ref());
        let is_ready = fds.iter().map(|fd| polled.is_ok() && !fd.revents().is_empty());
        watched.iter().zip(is_ready).filter(|(_, ready)| *ready).map(|(watched, _)| *watched).collect()
    }
}

/// Interval between pings to a watched rank.
const PING_INTERVAL: Duration = Duration::from_millis(500);

/// How long flushing may take when the channel closes.
const FLUSH_LIMIT: Duration = Duration::from_millis(200);

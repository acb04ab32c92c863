//! Notifies all ranks that an operation has failed.
//!
//! The rank that detects an error notifies every rank: connected ones over their connection, the others over a one-shot
//! connection that carries a single frame. Notified ranks forward the error to those that are connected or connecting.
//!
//! Invariant: a peer in the middle of a frame receives the rest of it, unaltered, before the abort: those may be the
//! last bytes that its own result needs.

use super::error::ExecError;
use super::frame::AbortFrame;
use super::handshake::{ACCEPTS_PER_ROUND, HandshakeOutcome};
use super::link::{IoOutcome, Link, State, read, write};
use super::run::{Failure, Run, is_next};
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use std::net::{Shutdown, TcpStream};
use std::time::{Duration, Instant};
use sumac_hal::ids::Rank;

/// A notice on its way to one peer.
struct AbortNotice {
    peer: Rank,
    /// The one-shot connection; `None`: the notice goes over the link.
    one_shot: Option<TcpStream>,
    bytes: Vec<u8>,
    sent: usize,
}

impl Run<'_> {
    /// Accept whoever is just connecting, and return the error that ends this operation. A rank that comes late finds
    /// nobody at the other ranks' addresses; what they sent before they ended says why.
    pub(super) fn cause(&mut self, failure: Failure) -> Failure {
        let now = Instant::now();
        for _ in 0..ACCEPTS_PER_ROUND {
            if self.mesh.accept(now).is_none_or(|is_last| is_last) {
                break;
            }
        }
        let mut reported = None;
        for index in (0..self.mesh.pending.len()).rev() {
            if let HandshakeOutcome::Aborted(error) = self.mesh.advance_handshake(index) {
                reported = Some(error);
            }
        }
        match (failure, reported) {
            (Failure::Local(ExecError::RankLost { .. }), Some(error)) => Failure::Remote(error),
            (failure, _) => failure,
        }
    }

    /// Notify the other ranks, for at most [`GRACE_PERIOD`]. A peer that reads nothing by then finds its connection
    /// closed. Ranks that [`Run::cause`] has accepted are notified, too.
    pub(super) fn abort(&mut self, failure: &Failure) {
        let (Failure::Local(error) | Failure::Remote(error)) = failure;
        // What is forwarded stays the error of the call that it was in.
        let number = match failure {
            Failure::Local(_) => self.number,
            Failure::Remote(_) => self.mesh.aborted.unwrap_or(self.number),
        };
        let frame = AbortFrame::new((self.call, number), error);
        let mut notices = self.notices(matches!(failure, Failure::Local(_)), &frame);
        let until = Instant::now() + GRACE_PERIOD;
        loop {
            notices.retain_mut(|notice| !self.send_notice(notice));
            let rest = until.saturating_duration_since(Instant::now());
            if notices.is_empty() || rest.is_zero() {
                break;
            }
            // No descriptor says that there is room in shared memory.
            let is_shared = |notice: &AbortNotice| self.mesh.links[notice.peer.0 as usize].shared.is_some();
            let rest = if notices.iter().any(is_shared) { rest.min(SHARED_POLL_INTERVAL) } else { rest };
            let streams = notices.iter().filter(|notice| !is_shared(notice));
            let streams = streams.filter_map(|notice| notice.stream(&self.mesh.links));
            let mut fds: Vec<_> = streams.map(|stream| PollFd::new(stream, PollFlags::IN | PollFlags::OUT)).collect();
            let timeout = Timespec { tv_sec: rest.as_secs() as i64, tv_nsec: rest.subsec_nanos().into() };
            // An interrupted poll means another round.
            let _ = poll(&mut fds, Some(&timeout));
        }
        for notice in notices {
            if notice.one_shot.is_none() {
                self.mesh.links[notice.peer.0 as usize].state = State::Ended;
            }
        }
        // The callers get the memory of their messages back, too.
        self.mesh.withdraw_references();
        self.mesh.messages.out.iter_mut().for_each(|channel| channel.link.withdraw_reference());
    }

    /// Prepare a notice for each rank concerned.
    fn notices(&mut self, one_shots: bool, frame: &AbortFrame) -> Vec<AbortNotice> {
        let mut notices = Vec::new();
        let claimed = self.mesh.claimed();
        for index in 0..self.mesh.links.len() {
            let peer = Rank(index as u32);
            let (mut one_shot, mut bytes) = (None, frame.bytes().to_vec());
            match self.mesh.links[index].state {
                // The peer reads frames once it has read our proof.
                State::Ready(_) | State::AwaitingVerdict(_) => {}
                State::Ended => continue,
                State::Idle if peer == self.mesh.rank() || !one_shots && !claimed.contains(&peer) => continue,
                State::Idle | State::Connecting(_) | State::AwaitingAnswer(..) => {
                    // A rank that is unreachable, or for which there is no randomness, cannot be notified.
                    let Ok(sealed) = self.mesh.one_shot(peer, frame.bytes()) else { continue };
                    bytes = sealed;
                    if !matches!(self.mesh.links[index].state, State::Connecting(_)) {
                        let Ok(Some(stream)) = self.mesh.connecting(peer) else { continue };
                        one_shot = Some(stream);
                    }
                }
            }
            notices.push(AbortNotice { peer, one_shot, bytes, sent: 0 });
        }
        notices
    }

    /// Move bytes in both directions; returns whether the notice is sent or its peer is gone.
    fn send_notice(&mut self, notice: &mut AbortNotice) -> bool {
        let finished = match notice.one_shot {
            Some(_) => IoOutcome::Bytes(0),
            None => self.finish_frame(notice.peer),
        };
        let mesh = &mut *self.mesh;
        let link = &mut mesh.links[notice.peer.0 as usize];
        // A peer that is notifying us reads only once we have read its bytes.
        let drained = match &notice.one_shot {
            Some(stream) => drain(&mut mesh.scratch, |into| read(stream, into)),
            None => drain(&mut mesh.scratch, |into| link.read(into)),
        };
        if finished == IoOutcome::Ended || !drained {
            return true;
        }
        if finished == IoOutcome::WouldBlock {
            return false;
        }
        let rest = &notice.bytes[notice.sent..];
        let moved = match &notice.one_shot {
            Some(stream) => write(stream, rest, &[]),
            None => link.write(rest, &[]),
        };
        let sent = match moved {
            IoOutcome::WouldBlock => return false,
            IoOutcome::Ended => return true,
            IoOutcome::Bytes(sent) => notice.sent + sent,
        };
        let is_sent = sent == notice.bytes.len();
        if is_sent && let Some(stream) = notice.stream(&mesh.links) {
            // The end of the stream follows the abort; failing to send it is harmless.
            let _ = stream.shutdown(Shutdown::Write);
        }
        notice.sent = sent;
        is_sent
    }

    /// Send the rest of a frame that a peer has partly received.
    fn finish_frame(&mut self, peer: Rank) -> IoOutcome {
        let mesh = &mut *self.mesh;
        let link = &mut mesh.links[peer.0 as usize];
        // What the peer has not copied is not part of its result.
        link.withdraw_reference();
        match link.flush_bare() {
            IoOutcome::Bytes(_) => {}
            other => return other,
        }
        while !link.tx.is_between_frames() {
            let sends = &self.step.sends;
            let slot = (0..sends.len()).find(|&slot| sends[slot].peer == peer && is_next(sends, &mesh.sends, slot));
            let Some(slot) = slot else { return IoOutcome::Ended };
            let bytes = self.memory.outgoing(sends[slot].from);
            match link.write_transfer(&self.call, bytes, mesh.sends[slot].bytes) {
                IoOutcome::Bytes(n) => mesh.sends[slot].bytes += n,
                other => return other,
            }
        }
        IoOutcome::Bytes(0)
    }
}

impl AbortNotice {
    fn stream<'a>(&'a self, links: &'a [Link]) -> Option<&'a TcpStream> {
        self.one_shot.as_ref().or_else(|| links[self.peer.0 as usize].stream())
    }
}

/// Read and discard input; returns whether the peer is still connected.
fn drain(scratch: &mut [u8], mut read: impl FnMut(&mut [u8]) -> IoOutcome) -> bool {
    for _ in 0..DRAINS_PER_ROUND {
        match read(scratch) {
            IoOutcome::Bytes(_) => {}
            IoOutcome::WouldBlock => return true,
            IoOutcome::Ended => return false,
        }
    }
    true
}

/// How long a peer may take to read a notice.
const GRACE_PERIOD: Duration = Duration::from_secs(1);
/// Reads from one peer before the others get their turn.
const DRAINS_PER_ROUND: usize = 64;
/// Interval at which a rank looks for room in shared memory.
const SHARED_POLL_INTERVAL: Duration = Duration::from_millis(1);

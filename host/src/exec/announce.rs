//! Announces the current operation to a peer that this rank waits for and has had no reason to send to.
//!
//! Ranks that called different algorithms may each wait for the other without exchanging a frame. A rank that has
//! waited for a while therefore sends an *announce* frame, a header without payload, over the connection or, where a
//! lower rank has not dialled, over a one-shot connection. The peer checks it like any frame. A refused one-shot
//! connection also reveals a rank that died before it connected. None of this happens while operations proceed
//! normally.

use super::error::ExecError;
use super::frame::{FrameKind, Header};
use super::link::{IoOutcome, State, write};
use super::run::{Failure, Run, open};
use std::io::ErrorKind;
use std::time::{Duration, Instant};

/// Time of the next announcement: after a pause that doubles each time.
#[derive(Debug)]
pub(super) struct RetryTimer {
    pause: Duration,
    since: Option<Instant>,
}

impl Default for RetryTimer {
    fn default() -> Self {
        Self { pause: FIRST_PAUSE, since: None }
    }
}

impl RetryTimer {
    /// Return when the current pause ends; the first call starts it.
    pub(super) fn expires_at(&mut self, now: Instant) -> Option<Instant> {
        self.since.get_or_insert(now).checked_add(self.pause)
    }
}

impl Run<'_> {
    /// Announce the operation to the ranks that the step waits for.
    pub(super) fn announce(&mut self) -> Result<(), Failure> {
        self.announce_timer = RetryTimer { pause: self.announce_timer.pause.saturating_mul(2), since: None };
        for slot in 0..self.step.recvs.len() {
            let peer = self.step.recvs[slot].peer;
            if open(&self.step.recvs[slot..=slot], &self.mesh.recvs[slot..=slot]).next().is_none() {
                continue;
            }
            let link = &mut self.mesh.links[peer.0 as usize];
            if matches!(link.state, State::Ready(_)) {
                if link.write_announce(&self.call) == IoOutcome::Ended {
                    return Err(self.closing_error(peer));
                }
            } else if matches!(link.state, State::Idle)
                && self.mesh.announcements.iter().all(|(other, _)| *other != peer)
            {
                let one_shot = self.mesh.connecting(peer)?;
                self.mesh.announcements.extend(one_shot.map(|one_shot| (peer, one_shot)));
            }
        }
        Ok(())
    }

    /// Send an announcement on its connected one-shot connection, and close it.
    pub(super) fn send_announce(&mut self, index: usize) -> Result<(), Failure> {
        let (peer, one_shot) = self.mesh.announcements.remove(index);
        match one_shot.take_error() {
            Ok(None) => {}
            // Retried after the next pause.
            Ok(Some(error)) if error.kind() == ErrorKind::ConnectionReset => return Ok(()),
            _ => return Err(ExecError::RankLost { rank: peer }.into()),
        }
        let header = Header { number: self.number, ..Header::bare(FrameKind::Announce, self.call, 0) }.emit();
        let bytes = self.mesh.one_shot(peer, &header)?;
        // A new socket's buffer holds it all; otherwise it is retried after the next pause.
        let sent = write(&one_shot, &bytes, &[]);
        debug_assert!(sent == IoOutcome::Bytes(bytes.len()) || sent == IoOutcome::Ended);
        Ok(())
    }
}

/// Longer than ranks of a job usually wait for each other, shorter than people notice.
const FIRST_PAUSE: Duration = Duration::from_millis(20);

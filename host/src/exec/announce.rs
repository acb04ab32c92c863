//! Telling a peer which operation this rank is in, when it waits for that peer and has had no reason to send to it.
//!
//! Ranks that called different algorithms may each wait for the other without a frame between them. So who has
//! waited for a while sends a *want*: a header without payload, over the connection, or, where a lower rank has
//! not dialled, by a courier. The peer compares it as it compares every frame. A courier that is refused also
//! finds a rank that died before it ever connected. Nothing of this happens while operations go smoothly.

use super::error::ExecError;
use super::frame::{FrameKind, HEADER_BYTES, HELLO_BYTES, Header, HelloKind};
use super::link::{Moved, State, write};
use super::run::{Failure, Run, open};
use std::io::ErrorKind;
use std::time::{Duration, Instant};

/// When to announce next: after a pause that doubles each time.
#[derive(Debug)]
pub(super) struct Patience {
    pause: Duration,
    since: Option<Instant>,
}

impl Default for Patience {
    fn default() -> Self {
        Self { pause: FIRST_PAUSE, since: None }
    }
}

impl Patience {
    /// Return when this pause ends; it begins with the first wait.
    pub(super) fn ends(&mut self, now: Instant) -> Option<Instant> {
        self.since.get_or_insert(now).checked_add(self.pause)
    }
}

impl Run<'_> {
    /// Tell those for whom the step waits which operation this is.
    pub(super) fn announce(&mut self) -> Result<(), Failure> {
        self.patience = Patience { pause: self.patience.pause.saturating_mul(2), since: None };
        for slot in 0..self.step.recvs.len() {
            let peer = self.step.recvs[slot].peer;
            if open(&self.step.recvs[slot..=slot], &self.mesh.recvs[slot..=slot]).next().is_none() {
                continue;
            }
            let link = &mut self.mesh.links[peer.0 as usize];
            if matches!(link.state, State::Ready(_)) {
                if link.write_want(&self.call) == Moved::Ended {
                    return Err(self.last_words(peer));
                }
            } else if matches!(link.state, State::Idle) && self.mesh.wants.iter().all(|(other, _)| *other != peer) {
                let courier = self.mesh.connecting(peer)?;
                self.mesh.wants.extend(courier.map(|courier| (peer, courier)));
            }
        }
        Ok(())
    }

    /// Let a courier that is connected say what it is for, and end.
    pub(super) fn send_want(&mut self, index: usize) -> Result<(), Failure> {
        let (peer, courier) = self.mesh.wants.remove(index);
        match courier.take_error() {
            Ok(None) => {}
            // It is tried again after the next pause.
            Ok(Some(error)) if error.kind() == ErrorKind::ConnectionReset => return Ok(()),
            _ => return Err(ExecError::RankLost { rank: peer }.into()),
        }
        let hello = self.mesh.hello(HelloKind::Courier, peer).emit();
        let header = Header { kind: FrameKind::Want, call: self.call, step: 0, len_bytes: 0, transfer_bytes: 0 }.emit();
        // A fresh socket's buffer holds both; one that does not is tried again after the next pause.
        let sent = write(&courier, &hello, &header);
        debug_assert!(matches!(sent, Moved::Bytes(n) if n == HELLO_BYTES + HEADER_BYTES) || sent == Moved::Ended);
        Ok(())
    }
}

/// Longer than ranks of one job usually wait for each other, shorter than people notice.
const FIRST_PAUSE: Duration = Duration::from_millis(20);

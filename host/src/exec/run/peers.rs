//! The peers of a run's transfers: of the current step, and of the others, which are read for it one at a time.

use super::{Progress, Run};
use crate::exec::error::ExecError;
use crate::exec::link::State;
use crate::schedule::{Recv, Send, Step};
use sumac_hal::ids::Rank;

impl Run<'_> {
    /// Dial the higher ranks of all steps at once, so that steps do not wait for connections one by one.
    pub(super) fn dial_peers(&mut self) -> Result<(), ExecError> {
        let above = self.mesh.rank().0 as usize + 1;
        if !self.mesh.links[above..].iter().any(|link| matches!(link.state, State::Idle)) {
            return Ok(());
        }
        let mut step = std::mem::take(&mut self.mesh.later_step);
        let dialled = (0..self.schedule.len()).try_for_each(|index| {
            self.schedule.read(index, &mut step);
            let mut peers = step.sends.iter().map(Send::peer).chain(step.recvs.iter().map(Recv::peer));
            peers.try_for_each(|peer| self.dial_idle(peer))
        });
        self.mesh.later_step = step;
        dialled
    }

    /// Dial a rank, if this one is to and has not.
    pub(in crate::exec) fn dial_idle(&mut self, peer: Rank) -> Result<(), ExecError> {
        let is_due = peer > self.mesh.rank() && matches!(self.mesh.links[peer.0 as usize].state, State::Idle);
        if is_due { self.mesh.dial(peer) } else { Ok(()) }
    }

    /// Return whether the rest of the schedule receives from `peer` what that has not posted yet.
    pub(super) fn awaits(&mut self, peer: Rank) -> bool {
        let open = open(&self.step.recvs, &self.mesh.recvs).any(|recv| recv.peer == peer) && !self.has_posted(peer);
        open || self.is_later(|run, step, ahead| {
            step.recvs.iter().any(|recv| recv.peer == peer) && !run.has_posted_ahead(peer, ahead)
        })
    }

    /// Return whether the rest of the schedule involves `peer`.
    pub(in crate::exec) fn needs(&mut self, peer: Rank) -> bool {
        let open = open(&self.step.sends, &self.mesh.sends).any(|send| send.peer == peer);
        open || self.awaits(peer) || self.is_later(|_, step, _| step.sends.iter().any(|send| send.peer == peer))
    }

    /// Return whether this is so of any step that is still to come: with the number of steps with messages between it
    /// and those that are done.
    fn is_later(&mut self, is_so: impl Fn(&Self, Step<'_>, u64) -> bool) -> bool {
        let mut room = std::mem::take(&mut self.mesh.later_step);
        let mut ahead = u64::from(!self.is_step_done());
        let is_later = (self.index + 1..self.schedule.len()).any(|index| {
            let Some(step) = self.schedule.step(index, &mut room) else { return false };
            let is_later = is_so(self, step, ahead);
            ahead += u64::from(step.has_messages());
            is_later
        });
        self.mesh.later_step = room;
        is_later
    }
}

/// A send or receive of a step.
pub(in crate::exec) trait HasPeer {
    fn peer(&self) -> Rank;
}

impl HasPeer for Send {
    fn peer(&self) -> Rank {
        self.peer
    }
}

impl HasPeer for Recv {
    fn peer(&self) -> Rank {
        self.peer
    }
}

/// Return whether transfer `slot` is the first open one with its peer.
pub(in crate::exec) fn is_next<T: HasPeer>(messages: &[T], progress: &[Progress], slot: usize) -> bool {
    !progress[slot].done && open(&messages[..slot], progress).all(|other| other.peer() != messages[slot].peer())
}

/// Return the transfers that are not done.
pub(in crate::exec) fn open<'a, T: HasPeer>(
    messages: &'a [T],
    progress: &'a [Progress],
) -> impl Iterator<Item = &'a T> {
    messages.iter().zip(progress).filter(|(_, progress)| !progress.done).map(|(message, _)| message)
}

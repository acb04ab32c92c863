//! A rank's part in a turn: packets or rings, and what its endpoint says.

use super::seat::op_of;
use super::world::{Stage, Way, World};
use crate::sim::coverage::Mark;
use crate::sim::report::Violation;
use crate::sim::wiring::rank_addr;
use std::time::Duration;
use sumac::transport::packets::{EndpointError, Event};

impl World<'_, '_> {
    /// Let a rank do what is due.
    pub(super) fn rank_due(&mut self, rank: usize) -> Result<(), Violation> {
        let member = &mut self.members[rank];
        let is_woken = member.wake.is_some_and(|at| at <= self.now);
        if member.is_dead || member.failed_from.is_some() {
            return Ok(());
        }
        match &mut member.way {
            Way::Packets(endpoint) => {
                let is_due = endpoint.poll_timeout().is_some_and(|at| at <= self.now);
                if !is_due && !is_woken {
                    return Ok(());
                }
                if is_due {
                    endpoint.handle_timeout(self.now);
                }
                member.wake = None;
                let from = rank_addr(rank, 0);
                while self.fabric.ready_at(from) <= self.now
                    && let Some(sent) = endpoint.poll_transmit(&member.memory, &mut self.buffer, self.now)
                {
                    self.fabric.send(self.now, from, sent.to, &self.buffer[..sent.len_bytes]);
                }
                if endpoint.poll_destination().is_some() {
                    // Timers do not speak of a link that is busy.
                    member.wake = Some(self.fabric.ready_at(from));
                }
            }
            Way::References(_) if is_woken => {
                member.wake = None;
                self.pump(rank)?;
            }
            Way::References(_) => return Ok(()),
        }
        self.take_events(rank)
    }

    /// Take in what has come through the rings, and submit what may be.
    fn pump(&mut self, rank: usize) -> Result<(), Violation> {
        let member = &mut self.members[rank];
        let Way::References(seat) = &mut member.way else { return Ok(()) };
        if !matches!(member.stage, Stage::Running) {
            return Ok(());
        }
        seat.collect(&mut member.memory, &mut self.seen);
        seat.notice(false);
        let submitted = seat.submit(&member.memory, &mut self.seen);
        let (chunks, kept) = seat.endpoint.queues();
        let limits = [
            ("chunks in flight by reference", chunks, seat.in_flight_max as usize),
            (
                "bytes kept by a rank by reference",
                kept,
                2 * usize::from(self.options.window) * usize::from(self.options.chunk_len_bytes),
            ),
        ];
        for (what, found, limit) in limits {
            if found > limit {
                return Err(Violation::Limit { what, found: found as u64, limit: limit as u64 });
            }
        }
        let device = seat.device;
        if submitted {
            let lag = self.a_while(self.by.setup.lag);
            self.wake_device(device, lag);
        }
        Ok(())
    }

    /// Take what an endpoint has to say.
    pub(super) fn take_events(&mut self, rank: usize) -> Result<(), Violation> {
        loop {
            let member = &mut self.members[rank];
            let event = match &mut member.way {
                Way::Packets(endpoint) => endpoint.poll_event(),
                Way::References(seat) => seat.endpoint.poll_event(),
            };
            match event {
                None => return Ok(()),
                Some(Event::Completed(id)) if op_of(&member.memory, id) == member.done => {
                    self.seen.note(Mark::OpReturned);
                    self.return_op(rank)?;
                    self.wake_rank(rank, Duration::ZERO);
                }
                Some(Event::Completed(id)) => {
                    let (found, expected) = (op_of(&member.memory, id) as u64, member.done as u64);
                    return Err(Violation::Completion { group: 0, rank, found, expected });
                }
                Some(Event::Failed(_)) if !matches!(member.stage, Stage::Running) => {}
                Some(Event::Failed(error)) => self.lose(rank, error)?,
                Some(other) => panic!("unknown event {other:?}"),
            }
        }
    }

    /// A rank's endpoint has failed: it says so, and freezes.
    fn lose(&mut self, rank: usize, error: EndpointError) -> Result<(), Violation> {
        let is_loss = matches!(
            error,
            EndpointError::PathLost
                | EndpointError::GroupLost
                | EndpointError::DeviceLost
                | EndpointError::Device { .. }
        );
        let has_dead = self.members.iter().any(|member| member.is_dead);
        // Where a rank's memory is gone, its chunks can't be had: the device says that it can't do them.
        let is_known = is_loss && self.is_lossy() || has_dead && matches!(error, EndpointError::Unsupported(_));
        if !is_known {
            let (done, expected) = (self.members[rank].done as u64, "no loss, as nothing was lost".to_owned());
            return Err(Violation::End { group: 0, rank, done, error: Some(error), expected });
        }
        self.seen.endpoint_error(error);
        self.seen.note(Mark::FrozenByLoss);
        self.tell_all();
        self.freeze(rank)
    }

    /// Tell whether anything was lost that may end a tree.
    fn is_lossy(&self) -> bool {
        !self.happened.is_empty()
    }
}

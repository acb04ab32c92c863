//! A rank's turn: packets or rings, and the events of its endpoint.

use super::driver::op_of;
use super::world::{Stage, Transport, World};
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
        match &mut member.transport {
            Transport::Packets(endpoint) => {
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
                    && let Some(sent) = endpoint.poll_transmit(self.now, &member.memory)
                {
                    self.fabric.send(self.now, from, sent.to, sent.write(sent.payload, &mut self.buffer));
                }
                if endpoint.poll_destination().is_some() {
                    // Timers do not cover a busy link.
                    member.wake = Some(self.fabric.ready_at(from));
                }
            }
            Transport::ZeroCopy(_) if is_woken => {
                member.wake = None;
                self.pump(rank)?;
            }
            Transport::ZeroCopy(_) => return Ok(()),
        }
        self.take_events(rank)
    }

    /// Process completions and submit what is possible.
    fn pump(&mut self, rank: usize) -> Result<(), Violation> {
        let member = &mut self.members[rank];
        let Transport::ZeroCopy(driver) = &mut member.transport else { return Ok(()) };
        if !matches!(member.stage, Stage::Running) {
            return Ok(());
        }
        driver.collect(&mut member.memory, &mut self.seen);
        driver.check_device(false);
        let submitted = driver.submit(&member.memory, &mut self.seen);
        let (chunks, kept) = driver.endpoint.queues();
        let limits = [
            ("zero-copy chunks in flight", chunks, driver.in_flight_max as usize),
            (
                "bytes kept by a zero-copy rank",
                kept,
                2 * usize::from(self.options.window) * usize::from(self.options.chunk_len_bytes),
            ),
        ];
        for (what, found, limit) in limits {
            if found > limit {
                return Err(Violation::Limit { what, found: found as u64, limit: limit as u64 });
            }
        }
        let device = driver.device;
        if submitted {
            let lag = self.random_delay(self.by.setup.lag);
            self.wake_device(device, lag);
        }
        Ok(())
    }

    /// Process the events of an endpoint.
    pub(super) fn take_events(&mut self, rank: usize) -> Result<(), Violation> {
        loop {
            let member = &mut self.members[rank];
            let event = match &mut member.transport {
                Transport::Packets(endpoint) => endpoint.poll_event(),
                Transport::ZeroCopy(driver) => driver.endpoint.poll_event(),
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

    /// A rank's endpoint has failed: report it, and freeze.
    fn lose(&mut self, rank: usize, error: EndpointError) -> Result<(), Violation> {
        let is_loss = matches!(
            error,
            EndpointError::PathLost
                | EndpointError::GroupLost
                | EndpointError::DeviceLost
                | EndpointError::Device { .. }
        );
        let has_dead = self.members.iter().any(|member| member.is_dead);
        // Chunks of a rank whose memory is gone cannot be computed: the device reports them as unsupported.
        let is_known = is_loss && self.is_lossy() || has_dead && matches!(error, EndpointError::Unsupported(_));
        if !is_known {
            let (done, expected) = (self.members[rank].done as u64, "no loss, as nothing was lost".to_owned());
            return Err(Violation::End { group: 0, rank, done, error: Some(error), expected });
        }
        self.seen.endpoint_error(error);
        self.seen.note(Mark::FrozenByLoss);
        self.notify_all();
        self.freeze(rank)
    }

    /// Return whether a loss happened that may end a tree.
    fn is_lossy(&self) -> bool {
        !self.happened.is_empty()
    }
}

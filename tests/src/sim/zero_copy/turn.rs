//! A device's turn: its engine's steps, its loop, its packets, and the points at which mishaps happen.

use super::board::Notice;
use super::draw::{CrashPoint, Fate, Mishap, When, ZeroCopy};
use super::driver::Fence;
use super::engine::Effect;
use super::world::{Stage, Transport, World};
use crate::sim::coverage::Mark;
use crate::sim::report::Violation;
use crate::sim::wiring::{Wiring, node_addr, sharer};
use std::collections::{BTreeMap, BTreeSet};
use std::time::Duration;
use sumac_hal::dma::Address;
use sumac_hal::ids::FunctionId;

impl World<'_, '_> {
    /// Return the mishap at a point of a device, for the n-th time it is reached.
    fn mishap_at(
        (by, wiring): (&ZeroCopy, &Wiring),
        points: &mut BTreeMap<(usize, CrashPoint), u64>,
        happened: &BTreeSet<usize>,
        (device, point): (usize, CrashPoint),
    ) -> Option<usize> {
        let count = points.entry((device, point)).or_default();
        *count += 1;
        let is_it = |when: When| matches!(when, When::Point(at, nth) if at == point && nth <= *count);
        by.mishaps.iter().enumerate().position(|(index, mishap)| {
            !happened.contains(&index)
                && match *mishap {
                    Mishap::Device { device: of, when, .. } => of == device && is_it(when),
                    Mishap::Rank { rank, when, .. } => {
                        let leaf = wiring.ranks.get(rank).map(|(leaf, _)| wiring.nodes[*leaf].device);
                        leaf == Some(device) && is_it(when)
                    }
                    Mishap::Chain { .. } => false,
                }
        })
    }

    /// Advance a device's engine.
    pub(super) fn advance_engine(&mut self, index: usize) -> Result<(), Violation> {
        while let Some(board) = &mut self.devices[index].board
            && board.engine.next_due().is_some_and(|at| at <= self.now)
        {
            let mut hit = None;
            let (by, wiring, points, happened) = (self.by, &self.wiring, &mut self.points, &self.happened);
            let effects = board.engine.advance(self.now, &mut |point| {
                let found = Self::mishap_at((by, wiring), points, happened, (index, point));
                let Some(found) = found.filter(|_| hit.is_none()) else { return false };
                hit = Some((found, point));
                matches!(by.mishaps[found], Mishap::Device { fate: Fate::Dies | Fate::Restarts(_), .. })
            });
            let completes = board.engine.has_completions();
            for effect in effects {
                self.take_effect(index, effect)?;
            }
            if let Some((mishap, point)) = hit {
                self.trigger_mishap(mishap, Some(point));
            }
            if completes {
                let lag = self.random_delay(self.by.setup.lag);
                self.wake_device(index, lag);
            }
        }
        Ok(())
    }

    fn take_effect(&mut self, device: usize, effect: Effect) -> Result<(), Violation> {
        match effect {
            Effect::Pulled => self.seen.note(Mark::RefPulled),
            Effect::Published => self.seen.note(Mark::RedoPublished),
            Effect::Poisoned => self.seen.note(Mark::RefPoisoned),
            Effect::WriteFailed => self.seen.note(Mark::RedoWriteFailed),
            Effect::Died => {}
            Effect::Wrote { to, len_bytes } => {
                self.seen.note(Mark::RedoWritten);
                self.take_write(device, to, len_bytes)?;
            }
        }
        Ok(())
    }

    /// Check an engine write to a rank's memory: it must be the place of a chunk's result, and the rank must still
    /// allow it.
    fn take_write(&mut self, device: usize, to: Address, len_bytes: u64) -> Result<(), Violation> {
        let incarnation = self.incarnation;
        for (rank, member) in self.members.iter_mut().enumerate() {
            let Transport::ZeroCopy(driver) = &member.transport else { continue };
            let is_its = driver.bounce_key == to.region || driver.regions.contains_key(&to.region);
            let is_its =
                is_its && (driver.device, driver.device_incarnation) == (device, self.devices[device].incarnations);
            if !is_its || driver.fence == Some(Fence::Severed) {
                continue;
            }
            if !member.is_dead && !driver.may_write(to, len_bytes) {
                return Err(Violation::StrayWrite { rank, incarnation, offset_bytes: to.offset_bytes, len_bytes });
            }
            driver.mirror_write(to, len_bytes, &mut member.memory);
            return Ok(());
        }
        if let Some(&rank) = self.closed.get(&(device, self.devices[device].incarnations, to.region)) {
            return Err(Violation::StrayWrite { rank, incarnation, offset_bytes: to.offset_bytes, len_bytes });
        }
        // The rank has severed it: the device writes to the old memory.
        Ok(())
    }

    pub(super) fn serve_due(&mut self, index: usize) -> Result<(), Violation> {
        let device = &mut self.devices[index];
        let Some(board) = &mut device.board else { return Ok(()) };
        if device.stalled_until.is_some_and(|until| until <= self.now) {
            (device.stalled_until, device.wake) = (None, Some(self.now));
        }
        let is_due = board.node.poll_timeout().is_some_and(|at| at <= self.now);
        if device.stalled_until.is_some() || !(is_due || device.wake.is_some_and(|at| at <= self.now)) {
            return Ok(());
        }
        device.wake = None;
        if is_due {
            board.node.handle_timeout(self.now);
        }
        let mut hit = None;
        let (by, wiring, points, happened) = (self.by, &self.wiring, &mut self.points, &self.happened);
        let served = board.serve(self.now, &mut |point| {
            let found = Self::mishap_at((by, wiring), points, happened, (index, point));
            let Some(found) = found.filter(|_| hit.is_none()) else { return false };
            hit = Some((found, point));
            matches!(by.mishaps[found], Mishap::Device { fate: Fate::Dies | Fate::Restarts(_), .. })
        });
        while let Some(event) = board.node.poll_event() {
            self.seen.device_event(event);
        }
        if let Some(what) = board.engine.conflict.take() {
            return Err(Violation::Conflict { what });
        }
        let marks = [
            (served.parked, Mark::RefParked),
            (served.taken, Mark::RefTaken),
            (served.answered, Mark::RefAnswered),
            (served.refused, Mark::RefRefused),
            (board.engine.refused, Mark::EngineFull),
        ];
        board.engine.refused = 0;
        marks.iter().for_each(|&(count, mark)| (0..count).for_each(|_| self.seen.note(mark)));
        let over = board.queues().find(|(found, limit)| found > limit);
        if let Some((found, limit)) = over {
            return Err(Violation::Limit { what: "answers that a device owes a ring", found, limit });
        }
        if served.is_busy {
            self.wake_device(index, Duration::ZERO);
        }
        for (function, rank, notices) in served.notices {
            self.notify(rank, function, notices)?;
        }
        if let Some((mishap, point)) = hit {
            self.trigger_mishap(mishap, Some(point));
        }
        self.send_from_device(index);
        Ok(())
    }

    /// Deliver a notice to a rank.
    fn notify(&mut self, rank: usize, function: FunctionId, notices: Notice) -> Result<(), Violation> {
        let lag = self.random_delay(self.by.setup.lag);
        let member = &self.members[rank];
        let Transport::ZeroCopy(driver) = &member.transport else { return Ok(()) };
        if driver.function != function || member.is_dead {
            return Ok(());
        }
        match notices {
            Notice::Answers => self.wake_rank(rank, lag),
            Notice::Fenced if matches!(member.stage, Stage::Fencing) => self.fenced(rank, Fence::Confirmed)?,
            Notice::Fenced => {}
        }
        Ok(())
    }

    fn send_from_device(&mut self, index: usize) {
        let from = node_addr(index, 0);
        let Self { devices, fabric, wiring, options, buffer, now, .. } = self;
        let device = &mut devices[index];
        let Some(board) = &mut device.board else { return };
        while fabric.ready_at(from) <= *now {
            let Some(sent) = board.node.poll_transmit(*now) else { break };
            let bytes = sent.write(board.node.payload(&sent), buffer);
            match sharer(sent.to) {
                Some(sharer) => {
                    wiring.listeners(options, sharer).iter().for_each(|&to| fabric.send(*now, from, to, bytes));
                }
                None => fabric.send(*now, from, sent.to, bytes),
            }
        }
        if board.node.poll_destination().is_some() {
            let at = fabric.ready_at(from);
            device.wake = Some(device.wake.map_or(at, |before| before.min(at)));
        }
    }
}

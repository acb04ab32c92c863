//! Losses and tree changes: every rank fences its device and salvages what was published, all report their state, the
//! plan is executed, and the group continues in another epoch on another tree.
//!
//! Messages of the [agreement](super::agreement) always arrive at once; see [`super::super::ranks`] for others.
//! Simulated is what a device does meanwhile: fences, hang-ups, and everything between PLAN and COMMIT.

use super::draw::{CrashPoint, Fate, Mishap};
use super::driver::Fence;
use super::world::{Alarm, DEAD, Stage, Transport, World};
use crate::oracle::weight;
use crate::sim::coverage::Mark;
use crate::sim::reduce::{reduce, tree};
use crate::sim::report::Violation;
use std::time::Duration;
use sumac::harness::{Chunk, Landed, Origin, RankReport};
use sumac::transport::packets::OpId;
use sumac_hal::ids::{FunctionId, Rank};
use sumac_hal::op::Collective;
use sumac_hal::planted;

impl World<'_, '_> {
    pub(super) fn on_alarm(&mut self, alarm: Alarm) -> Result<(), Violation> {
        match alarm {
            Alarm::Mishap(index) => self.trigger_mishap(index, None),
            Alarm::Boot { device } => {
                self.seen.note(Mark::RefBootedAgain);
                self.boot(device);
            }
            Alarm::HungUp { rank, incarnation } if incarnation == self.incarnation => self.on_hangup(rank)?,
            Alarm::Still { rank, incarnation } if incarnation == self.incarnation => self.on_stalled(rank)?,
            Alarm::TreeLost { rank, incarnation } if incarnation == self.incarnation => self.on_tree_lost(rank)?,
            Alarm::FenceLimit { rank, incarnation } if incarnation == self.incarnation && self.is_fencing(rank) => {
                self.sever(rank)?;
            }
            Alarm::Sever { rank, incarnation } if incarnation == self.incarnation && self.is_fencing(rank) => {
                self.continue_severing(rank)?
            }
            Alarm::Detach { device, function } => self.detach(device, function),
            Alarm::Settle { attempt } if attempt == self.attempt => self.settle()?,
            Alarm::Commit { attempt } if attempt == self.attempt => self.commit()?,
            Alarm::Replan => self.replan()?,
            // An event of an earlier incarnation or attempt.
            _ => {}
        }
        Ok(())
    }

    fn is_fencing(&self, rank: usize) -> bool {
        matches!(self.members[rank].stage, Stage::Fencing)
    }

    /// A rank learns that the tree or another rank is lost.
    fn on_tree_lost(&mut self, rank: usize) -> Result<(), Violation> {
        let member = &self.members[rank];
        if member.is_dead || member.failed_from.is_some() || !matches!(member.stage, Stage::Running) {
            return Ok(());
        }
        self.seen.note(Mark::FrozenByController);
        self.freeze(rank)
    }

    /// Trigger a mishap.
    pub(super) fn trigger_mishap(&mut self, index: usize, point: Option<CrashPoint>) {
        self.happened.insert(index);
        match self.by.mishaps[index] {
            Mishap::Chain { .. } => {}
            Mishap::Device { device, fate, .. } => self.lose_device(device, fate, point),
            Mishap::Rank { rank, is_revoked, .. } => self.kill(rank, is_revoked),
        }
    }

    fn lose_device(&mut self, index: usize, fate: Fate, point: Option<CrashPoint>) {
        if self.devices[index].board.is_none() {
            return;
        }
        let seats = |member: &super::world::Member| matches!(&member.transport, Transport::ZeroCopy(driver) if driver.device == index);
        let there: Vec<usize> = (0..self.members.len()).filter(|&rank| seats(&self.members[rank])).collect();
        let incarnation = self.incarnation;
        if let Fate::Stands(time) = fate {
            self.seen.note(Mark::RefStands);
            self.devices[index].stalled_until = Some(self.now + time);
            for rank in there {
                let after = DEAD + self.random_delay(SLICE);
                self.schedule(after, Alarm::Still { rank, incarnation });
            }
            return;
        }
        let mark = match point {
            None => Mark::LossDevice,
            Some(CrashPoint::Pulled) => Mark::CrashPulled,
            Some(CrashPoint::Reduced) => Mark::CrashReduced,
            Some(CrashPoint::Published) => Mark::CrashPublished,
            Some(CrashPoint::Writing) => Mark::CrashWriting,
            Some(CrashPoint::Written) => Mark::CrashWritten,
            Some(CrashPoint::Answering) => Mark::CrashAnswering,
        };
        self.seen.note(mark);
        if self.members.iter().any(|member| !matches!(member.stage, Stage::Running)) {
            self.seen.note(Mark::LossInRecovery);
        }
        let device = &mut self.devices[index];
        if let Some(board) = device.board.take() {
            self.past.merge(board.node.counters());
            self.hash = weight(&[self.hash, board.engine.hash]);
        }
        (device.stalled_until, device.wake) = (None, None);
        for rank in there {
            let after = self.random_delay(SLICE);
            self.schedule(after, Alarm::HungUp { rank, incarnation });
        }
        if let Fate::Restarts(after) = fate {
            self.schedule(after, Alarm::Boot { device: index });
        }
    }

    fn kill(&mut self, rank: usize, is_revoked: bool) {
        if self.members[rank].failed_from.is_some() || std::mem::replace(&mut self.members[rank].is_dead, true) {
            return;
        }
        self.report.killed += 1;
        let in_change = self.members.iter().any(|member| !matches!(member.stage, Stage::Running));
        self.seen.note(if in_change { Mark::RankDiedInChange } else { Mark::RankDied });
        if let Transport::ZeroCopy(driver) = &self.members[rank].transport {
            let (device, function) = (driver.device, driver.function);
            if let Some(board) = self.devices[device].board.as_mut().filter(|_| is_revoked)
                && board.revoke(function)
            {
                self.seen.note(Mark::RefRevoked);
            }
            let after = self.random_delay(SLICE);
            self.schedule(after, Alarm::Detach { device, function });
        }
        self.attempt += 1;
        self.notify_all();
        self.all_frozen();
    }

    /// Notify all ranks, one after the other, that the tree is lost.
    pub(super) fn notify_all(&mut self) {
        let incarnation = self.incarnation;
        for rank in 0..self.members.len() {
            let after = self.random_delay(NOTIFY_DELAY);
            self.schedule(after, Alarm::TreeLost { rank, incarnation });
        }
    }

    fn on_hangup(&mut self, rank: usize) -> Result<(), Violation> {
        let member = &mut self.members[rank];
        let Transport::ZeroCopy(driver) = &mut member.transport else { return Ok(()) };
        driver.gone = true;
        match member.stage {
            Stage::Fencing => self.fenced(rank, Fence::Ended),
            _ => {
                self.wake_rank(rank, Duration::ZERO);
                Ok(())
            }
        }
    }

    fn on_stalled(&mut self, rank: usize) -> Result<(), Violation> {
        let member = &mut self.members[rank];
        let Transport::ZeroCopy(driver) = &mut member.transport else { return Ok(()) };
        if self.devices[driver.device].stalled_until.is_none() {
            return Ok(());
        }
        driver.is_stalled = true;
        match member.stage {
            Stage::Fencing => self.sever(rank),
            _ => {
                self.wake_rank(rank, Duration::ZERO);
                Ok(())
            }
        }
    }

    fn detach(&mut self, device: usize, function: FunctionId) {
        let stands = self.devices[device].stalled_until.is_some();
        if stands {
            return self.schedule(DETACH_RETRY, Alarm::Detach { device, function });
        }
        if let Some(board) = &mut self.devices[device].board {
            if board.detach(function) > 0 {
                self.seen.note(Mark::RefOrphaned);
            }
            self.wake_device(device, Duration::ZERO);
        }
    }

    /// Freeze: accept nothing more from the tree; with zero-copy, once the device has stopped writing.
    pub(super) fn freeze(&mut self, rank: usize) -> Result<(), Violation> {
        if let Transport::Packets(_) = self.members[rank].transport {
            // Accept what has arrived so far.
            self.take_events(rank)?;
        }
        let incarnation = self.incarnation;
        let member = &mut self.members[rank];
        if !matches!(member.stage, Stage::Running) {
            return Ok(());
        }
        match &mut member.transport {
            Transport::Packets(endpoint) => {
                endpoint.freeze();
                self.frozen(rank);
                Ok(())
            }
            Transport::ZeroCopy(driver) => {
                member.stage = Stage::Fencing;
                let (device, function) = (driver.device, driver.function);
                if !driver.endpoint.is_in_flight() {
                    return self.fenced(rank, Fence::Nothing);
                }
                if driver.gone {
                    return self.fenced(rank, Fence::Ended);
                }
                if driver.is_stalled {
                    return self.sever(rank);
                }
                if planted!(self.options.planted, FenceSkipped) {
                    return self.fenced(rank, Fence::Confirmed);
                }
                if let Some(function) = self.devices[device].board.as_mut().and_then(|board| board.function(function)) {
                    function.fence();
                }
                let lag = self.random_delay(self.by.setup.lag);
                self.wake_device(device, lag);
                self.schedule(FENCE_LIMIT, Alarm::FenceLimit { rank, incarnation });
                Ok(())
            }
        }
    }

    /// Sever a rank's memory from its device, which may continue meanwhile; first accept what it has answered.
    fn sever(&mut self, rank: usize) -> Result<(), Violation> {
        let pieces_each = 1 + self.draw.below(3) as usize;
        let Transport::ZeroCopy(driver) = &mut self.members[rank].transport else { return Ok(()) };
        if driver.is_severing() {
            return Ok(());
        }
        driver.begin_severing(pieces_each);
        self.continue_severing(rank)
    }

    /// Copy pieces that are due, and install the copies once all are done.
    fn continue_severing(&mut self, rank: usize) -> Result<(), Violation> {
        let (incarnation, severing) = (self.incarnation, self.by.setup.severing);
        let Transport::ZeroCopy(driver) = &mut self.members[rank].transport else { return Ok(()) };
        while driver.copy_piece() {
            if !severing.is_zero() {
                let after = self.random_delay(severing);
                self.schedule(after, Alarm::Sever { rank, incarnation });
                return Ok(());
            }
        }
        self.end_fence(rank, Fence::Severed)
    }

    /// The device has stopped writing to this rank's memory: it has confirmed that, or it is dead.
    pub(super) fn fenced(&mut self, rank: usize, fence: Fence) -> Result<(), Violation> {
        // A severing in progress always completes.
        if matches!(&self.members[rank].transport, Transport::ZeroCopy(driver) if driver.is_severing()) {
            return Ok(());
        }
        self.end_fence(rank, fence)
    }

    fn end_fence(&mut self, rank: usize, fence: Fence) -> Result<(), Violation> {
        let takes_late = planted!(self.options.planted, LateAnswerAccepted);
        self.seen.note(match fence {
            Fence::Nothing => Mark::FenceNothing,
            Fence::Confirmed => Mark::FenceConfirmed,
            Fence::Ended => Mark::FenceEnded,
            Fence::Severed => Mark::FenceSevered,
        });
        let Self { members, seen, .. } = self;
        let member = &mut members[rank];
        let Transport::ZeroCopy(driver) = &mut member.transport else { return Ok(()) };
        if let Some(op) = driver.stray_write(&member.memory) {
            return Err(Violation::UnexpectedChange { rank, op });
        }
        driver.fence = Some(fence);
        driver.salvage(&mut member.memory, seen, takes_late);
        let open = member.done..member.called;
        open.clone().try_for_each(|op| self.check_whole(rank, op))?;
        self.frozen(rank);
        self.take_events(rank)
    }

    fn frozen(&mut self, rank: usize) {
        let report = self.report_of(rank);
        self.members[rank].stage = Stage::Frozen(Box::new(report));
        self.all_frozen();
    }

    /// Return what a rank has of its lost tree alone.
    fn report_of(&self, rank: usize) -> RankReport {
        let (member, trees) = (&self.members[rank], self.incarnation as u32);
        RankReport::of(member.transport.tree_source(), &Landed::default(), member.memory.first as u64, trees)
    }

    /// Continue once all survivors are frozen.
    fn all_frozen(&mut self) {
        let mut live = self.members.iter().filter(|member| !member.is_dead).peekable();
        if live.peek().is_some() && live.all(|member| matches!(member.stage, Stage::Frozen(_))) {
            self.attempt += 1;
            let after = self.random_delay(Duration::from_millis(5));
            self.schedule(after, Alarm::Settle { attempt: self.attempt });
        }
    }

    fn live(&self) -> Vec<usize> {
        (0..self.members.len()).filter(|&rank| !self.members[rank].is_dead).collect()
    }

    /// Agree on a plan, and execute it.
    fn settle(&mut self) -> Result<(), Violation> {
        let live = self.live();
        let plan = self.agree_on_plan(&live)?;
        match plan.failure() {
            None => {}
            Some(_) if self.is_unknown(&live) => {
                self.end_unknown(&live);
                return Ok(());
            }
            Some(why) => return Err(Violation::Unrecoverable { group: 0, rank: live[0], why }),
        }
        for chunk in &plan.chunks {
            self.execute(&live, chunk)?;
        }
        for &rank in &live {
            let member = &self.members[rank];
            if let Transport::ZeroCopy(driver) = &member.transport {
                (member.memory.first..member.called).for_each(|op| driver.sync(&member.memory, op));
            }
        }
        self.plan = Some(plan);
        let most = self.draw.one_of(&[1, 100, 3_000]);
        let after = self.random_delay(Duration::from_millis(most));
        self.schedule(after, Alarm::Commit { attempt: self.attempt });
        Ok(())
    }

    /// Return whether the content of some rank's memory for an operation is unknown.
    pub(super) fn is_in_doubt(&self, rank: usize, op: usize) -> bool {
        let member = &self.members[rank];
        let id = op.checked_sub(member.memory.first).map(|id| OpId(id as u64));
        id.is_some_and(|id| member.transport.tree_source().is_in_doubt(id))
    }

    fn is_unknown(&self, live: &[usize]) -> bool {
        let open = |rank: &usize| self.members[*rank].done..self.members[*rank].called;
        live.iter().any(|rank| open(rank).any(|op| self.is_in_doubt(*rank, op)))
    }

    /// Nobody has the result that a device answered to a rank with severed memory: all ranks fail, not knowing the
    /// outcome of the operation elsewhere.
    fn end_unknown(&mut self, live: &[usize]) {
        self.seen.note(Mark::RefUnknown);
        self.end_agreement();
        for &rank in live {
            let member = &mut self.members[rank];
            (member.failed_from, member.stage) = (Some(member.done), Stage::Running);
        }
    }

    fn execute(&mut self, live: &[usize], chunk: &Chunk) -> Result<(), Violation> {
        let holders = live.iter().filter(|&&rank| self.members[rank].transport.tree_source().has(chunk.seq));
        let mut given = Vec::new();
        let has_holder = chunk.desc.collective == Collective::AllReduce && holders.count() > 0;
        if chunk.origin == Origin::Recompute && (live.len() < self.options.ranks || has_holder) {
            return Err(Violation::Recomputed { group: 0, view: self.incarnation as u32, seq: chunk.seq });
        }
        for &rank in live {
            let member = &mut self.members[rank];
            let bytes =
                chunk.give(member.transport.tree_source(), &member.landed, Rank(rank as u32), &mut member.memory);
            match chunk.origin {
                Origin::Held(holder) if holder.0 as usize != rank => {}
                _ => given.push(bytes),
            }
        }
        let result = if chunk.origin == Origin::Recompute {
            self.seen.note(Mark::ChunkComputed);
            let tree = tree(&self.options.trees[0], self.options.ranks, self.options.order(0));
            reduce(&tree, &chunk.desc, &given)
        } else {
            self.seen.note(Mark::ChunkHeld);
            given.pop().unwrap_or_default()
        };
        if result.len() != chunk.len_bytes {
            let why = format!("chunk {}: {} bytes where {} are due", chunk.seq, result.len(), chunk.len_bytes);
            return Err(Violation::Unrecoverable { group: 0, rank: live[0], why });
        }
        self.report.recovery_bytes += (result.len() * (live.len() - 1)) as u64;
        for &rank in live {
            let super::world::Member { transport, landed, memory, .. } = &mut self.members[rank];
            chunk.land_once(transport.tree_source(), landed, &result, memory);
        }
        Ok(())
    }

    /// All ranks are done: operations of the lost tree return, and the group continues, or fails because of dead ranks.
    fn commit(&mut self) -> Result<(), Violation> {
        let Some(plan) = self.plan.take() else { return Ok(()) };
        let (live, view) = (self.live(), self.incarnation as u32);
        let outcome = self.agree_on_outcome(&live)?;
        if outcome.cut != plan.cut() {
            return Err(Violation::Disagreement { group: 0, view });
        }
        let has_dead = live.len() < self.options.ranks;
        self.report.view_changes += 1;
        for rank in live {
            let member = &self.members[rank];
            let report = self.report_of(rank);
            let Stage::Frozen(frozen) = &member.stage else { continue };
            let is_kept = match &member.transport {
                Transport::Packets(_) => **frozen == report,
                Transport::ZeroCopy(_) => report.keeps(frozen),
            };
            if !is_kept {
                return Err(Violation::NotFenced { group: 0, rank, view });
            }
            if let Transport::ZeroCopy(driver) = &member.transport
                && let Some(op) = driver.stray_write(&member.memory)
            {
                return Err(Violation::UnexpectedChange { rank, op });
            }
            let (returned, below) = (
                member.done,
                member.memory.first + member.transport.tree_source().first_behind(outcome.cut).0 as usize,
            );
            while self.members[rank].done < below {
                self.seen.note(Mark::OpRecovered);
                self.return_op(rank)?;
            }
            let member = &mut self.members[rank];
            if has_dead {
                let (done, operation) = (member.done, outcome.operation as usize);
                if done != returned.max(operation) {
                    let end = format!("{returned} before, and the first to fail is {operation}");
                    return Err(Violation::RankEnd { group: 0, rank, done: done as u64, end });
                }
                self.seen.note(Mark::CommitRanksFailed);
                (member.failed_from, member.stage) = (Some(operation), Stage::Running);
            } else if member.done < member.called {
                self.seen.note(Mark::OpRestarted);
            }
        }
        if has_dead { Ok(()) } else { self.replan() }
    }
}

/// Delay until the end of a connection or a stopped heartbeat is noticed.
pub(super) const SLICE: Duration = Duration::from_millis(20);

/// Maximum delay until a rank learns what another knows.
const NOTIFY_DELAY: Duration = Duration::from_millis(300);

/// Limit for a fence.
const FENCE_LIMIT: Duration = Duration::from_secs(1);

/// Interval at which a stalled device is notified again that a rank is gone.
const DETACH_RETRY: Duration = Duration::from_millis(500);

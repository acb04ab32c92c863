//! What is lost, and what becomes of the tree then: every rank fences its device and salvages what that had published,
//! all tell what they have, the production plan is carried out, and the group goes on in another epoch on another tree.
//!
//! Who agrees with whom, over which connections, is [`super::super::ranks`]'s to try: here letters arrive. What takes time is
//! what a device does meanwhile: fences, hang-ups, and everything between PLAN and COMMIT.

use super::draw::{CrashPoint, Fate, Mishap};
use super::seat::Fence;
use super::world::{Alarm, DEAD, Stage, Way, World};
use crate::oracle::weight;
use crate::sim::coverage::Mark;
use crate::sim::reduce::{reduce, tree};
use crate::sim::report::Violation;
use std::time::Duration;
use sumac::rehearsal::{Landed, Origin, Promise, Promises, Settlement};
use sumac::transport::packets::OpId;
use sumac_hal::ids::{FunctionId, Rank};
use sumac_hal::op::Collective;
use sumac_hal::planted;

impl World<'_, '_> {
    pub(super) fn sound(&mut self, alarm: Alarm) -> Result<(), Violation> {
        match alarm {
            Alarm::Mishap(index) => self.happen(index, None),
            Alarm::Boot { device } => {
                self.seen.note(Mark::RefBootedAgain);
                self.boot(device);
            }
            Alarm::HungUp { rank, life } if life == self.life => self.hung_up(rank)?,
            Alarm::Still { rank, life } if life == self.life => self.stands_still(rank)?,
            Alarm::Told { rank, life } if life == self.life => self.told(rank)?,
            Alarm::FenceLimit { rank, life } if life == self.life && self.is_fencing(rank) => {
                self.sever(rank)?;
            }
            Alarm::Sever { rank, life } if life == self.life && self.is_fencing(rank) => self.go_on_severing(rank)?,
            Alarm::Detach { device, function } => self.detach(device, function),
            Alarm::Settle { attempt } if attempt == self.attempt => self.settle()?,
            Alarm::Commit { attempt } if attempt == self.attempt => self.commit()?,
            Alarm::Replan => self.replan()?,
            // Of a life, or an attempt, that is over.
            _ => {}
        }
        Ok(())
    }

    fn is_fencing(&self, rank: usize) -> bool {
        matches!(self.members[rank].stage, Stage::Fencing)
    }

    /// A rank hears that the tree, or another rank, is lost.
    fn told(&mut self, rank: usize) -> Result<(), Violation> {
        let member = &self.members[rank];
        if member.is_dead || member.failed_from.is_some() || !matches!(member.stage, Stage::Running) {
            return Ok(());
        }
        self.seen.note(Mark::FrozenByWord);
        self.freeze(rank)
    }

    /// Something goes wrong.
    pub(super) fn happen(&mut self, index: usize, point: Option<CrashPoint>) {
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
        let seats =
            |member: &super::world::Member| matches!(&member.way, Way::References(seat) if seat.device == index);
        let there: Vec<usize> = (0..self.members.len()).filter(|&rank| seats(&self.members[rank])).collect();
        let life = self.life;
        if let Fate::Stands(time) = fate {
            self.seen.note(Mark::RefStands);
            self.devices[index].stands_until = Some(self.now + time);
            for rank in there {
                let after = DEAD + self.a_while(SLICE);
                self.schedule(after, Alarm::Still { rank, life });
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
            self.seen.note(Mark::LossInRepair);
        }
        let device = &mut self.devices[index];
        if let Some(board) = device.board.take() {
            self.past.merge(board.node.counters());
            self.hash = weight(&[self.hash, board.engine.hash]);
        }
        (device.stands_until, device.wake) = (None, None);
        for rank in there {
            let after = self.a_while(SLICE);
            self.schedule(after, Alarm::HungUp { rank, life });
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
        if let Way::References(seat) = &self.members[rank].way {
            let (device, function) = (seat.device, seat.function);
            if let Some(board) = self.devices[device].board.as_mut().filter(|_| is_revoked)
                && board.revoke(function)
            {
                self.seen.note(Mark::RefRevoked);
            }
            let after = self.a_while(SLICE);
            self.schedule(after, Alarm::Detach { device, function });
        }
        self.attempt += 1;
        self.tell_all();
        self.all_frozen();
    }

    /// Tell all ranks, one after the other, that the tree is lost.
    pub(super) fn tell_all(&mut self) {
        let life = self.life;
        for rank in 0..self.members.len() {
            let after = self.a_while(WORD);
            self.schedule(after, Alarm::Told { rank, life });
        }
    }

    fn hung_up(&mut self, rank: usize) -> Result<(), Violation> {
        let member = &mut self.members[rank];
        let Way::References(seat) = &mut member.way else { return Ok(()) };
        seat.gone = true;
        match member.stage {
            Stage::Fencing => self.fenced(rank, Fence::Ended),
            _ => {
                self.wake_rank(rank, Duration::ZERO);
                Ok(())
            }
        }
    }

    fn stands_still(&mut self, rank: usize) -> Result<(), Violation> {
        let member = &mut self.members[rank];
        let Way::References(seat) = &mut member.way else { return Ok(()) };
        if self.devices[seat.device].stands_until.is_none() {
            return Ok(());
        }
        seat.still = true;
        match member.stage {
            Stage::Fencing => self.sever(rank),
            _ => {
                self.wake_rank(rank, Duration::ZERO);
                Ok(())
            }
        }
    }

    fn detach(&mut self, device: usize, function: FunctionId) {
        let stands = self.devices[device].stands_until.is_some();
        if stands {
            return self.schedule(DETACH_AGAIN, Alarm::Detach { device, function });
        }
        if let Some(board) = &mut self.devices[device].board {
            if board.detach(function) > 0 {
                self.seen.note(Mark::RefStranded);
            }
            self.wake_device(device, Duration::ZERO);
        }
    }

    /// Take nothing more in from the tree; by reference, once the device writes nothing any more.
    pub(super) fn freeze(&mut self, rank: usize) -> Result<(), Violation> {
        if let Way::Packets(_) = self.members[rank].way {
            // What has landed by now has landed.
            self.take_events(rank)?;
        }
        let life = self.life;
        let member = &mut self.members[rank];
        if !matches!(member.stage, Stage::Running) {
            return Ok(());
        }
        match &mut member.way {
            Way::Packets(endpoint) => {
                endpoint.freeze();
                self.promise(rank);
                Ok(())
            }
            Way::References(seat) => {
                member.stage = Stage::Fencing;
                let (device, function) = (seat.device, seat.function);
                if !seat.endpoint.is_in_flight() {
                    return self.fenced(rank, Fence::Nothing);
                }
                if seat.gone {
                    return self.fenced(rank, Fence::Ended);
                }
                if seat.still {
                    return self.sever(rank);
                }
                if planted!(self.options.planted, FenceForgotten) {
                    return self.fenced(rank, Fence::Confirmed);
                }
                if let Some(function) = self.devices[device].board.as_mut().and_then(|board| board.function(function)) {
                    function.fence();
                }
                let lag = self.a_while(self.by.setup.lag);
                self.wake_device(device, lag);
                self.schedule(FENCE_LIMIT, Alarm::FenceLimit { rank, life });
                Ok(())
            }
        }
    }

    /// Take a rank's memory away from its device, which may go on meanwhile: first, what it has answered is taken in.
    fn sever(&mut self, rank: usize) -> Result<(), Violation> {
        let pieces_each = 1 + self.draw.below(3) as usize;
        let Way::References(seat) = &mut self.members[rank].way else { return Ok(()) };
        if seat.is_severing() {
            return Ok(());
        }
        seat.begin_severing(pieces_each);
        self.go_on_severing(rank)
    }

    /// Copy what is due, and put the copies in place when all is copied.
    fn go_on_severing(&mut self, rank: usize) -> Result<(), Violation> {
        let (life, severing) = (self.life, self.by.setup.severing);
        let Way::References(seat) = &mut self.members[rank].way else { return Ok(()) };
        while seat.copy_piece() {
            if !severing.is_zero() {
                let after = self.a_while(severing);
                self.schedule(after, Alarm::Sever { rank, life });
                return Ok(());
            }
        }
        self.end_fence(rank, Fence::Severed)
    }

    /// The device writes nothing any more to this rank's memory, as it says, or as it is dead.
    pub(super) fn fenced(&mut self, rank: usize, fence: Fence) -> Result<(), Violation> {
        // Once it has begun, it is done.
        if matches!(&self.members[rank].way, Way::References(seat) if seat.is_severing()) {
            return Ok(());
        }
        self.end_fence(rank, fence)
    }

    fn end_fence(&mut self, rank: usize, fence: Fence) -> Result<(), Violation> {
        let takes_late = planted!(self.options.planted, LateAnswerTaken);
        self.seen.note(match fence {
            Fence::Nothing => Mark::FenceNothing,
            Fence::Confirmed => Mark::FenceConfirmed,
            Fence::Ended => Mark::FenceEnded,
            Fence::Severed => Mark::FenceSevered,
        });
        let Self { members, seen, .. } = self;
        let member = &mut members[rank];
        let Way::References(seat) = &mut member.way else { return Ok(()) };
        if let Some(op) = seat.strayed(&member.memory) {
            return Err(Violation::Strayed { rank, op });
        }
        seat.fence = Some(fence);
        seat.salvage(&mut member.memory, seen, takes_late);
        let open = member.done..member.called;
        open.clone().try_for_each(|op| self.check_whole(rank, op))?;
        self.promise(rank);
        self.take_events(rank)
    }

    fn promise(&mut self, rank: usize) {
        let member = &mut self.members[rank];
        let promise = Promise::of(member.way.left(), &Landed::default(), member.memory.first as u64);
        member.stage = Stage::Frozen(Box::new(promise));
        self.all_frozen();
    }

    /// Go on if all that live have promised.
    fn all_frozen(&mut self) {
        let mut live = self.members.iter().filter(|member| !member.is_dead).peekable();
        if live.peek().is_some() && live.all(|member| matches!(member.stage, Stage::Frozen(_))) {
            self.attempt += 1;
            let after = self.a_while(Duration::from_millis(5));
            self.schedule(after, Alarm::Settle { attempt: self.attempt });
        }
    }

    fn live(&self) -> Vec<usize> {
        (0..self.members.len()).filter(|&rank| !self.members[rank].is_dead).collect()
    }

    /// Work out the same plan everywhere, and carry it out.
    fn settle(&mut self) -> Result<(), Violation> {
        let (live, ranks) = (self.live(), self.options.ranks as u32);
        let promise = |rank: usize| {
            let member = &self.members[rank];
            Promise::of(member.way.left(), &member.landed, member.memory.first as u64)
        };
        let promises = Promises::of(live.iter().map(|&rank| (Rank(rank as u32), promise(rank))));
        let mut settled: Option<Settlement> = None;
        for &rank in &live {
            let own = match Settlement::of(&promises, Some(self.members[rank].way.left()), ranks) {
                Ok(own) => own,
                Err(_) if self.is_unknown(&live) => {
                    self.end_unknown(&live);
                    return Ok(());
                }
                Err(why) => return Err(Violation::Unrepairable { group: 0, rank, why }),
            };
            if *settled.get_or_insert_with(|| own.clone()) != own {
                return Err(Violation::Disagreement { group: 0, view: self.life as u32 });
            }
        }
        let settlement = settled.expect("somebody lives");
        for chunk in &settlement.chunks {
            self.carry_out(&live, chunk)?;
        }
        for &rank in &live {
            let member = &self.members[rank];
            if let Way::References(seat) = &member.way {
                (member.memory.first..member.called).for_each(|op| seat.sync(&member.memory, op));
            }
        }
        self.settlement = Some(settlement);
        let most = self.draw.one_of(&[1, 100, 3_000]);
        let after = self.a_while(Duration::from_millis(most));
        self.schedule(after, Alarm::Commit { attempt: self.attempt });
        Ok(())
    }

    /// Tell whether nobody knows what some rank's memory holds of an operation.
    pub(super) fn is_in_doubt(&self, rank: usize, op: usize) -> bool {
        let member = &self.members[rank];
        let id = op.checked_sub(member.memory.first).map(|id| OpId(id as u64));
        id.is_some_and(|id| member.way.left().is_in_doubt(id))
    }

    fn is_unknown(&self, live: &[usize]) -> bool {
        let open = |rank: &usize| self.members[*rank].done..self.members[*rank].called;
        live.iter().any(|rank| open(rank).any(|op| self.is_in_doubt(*rank, op)))
    }

    /// Nobody has the result of what a device has answered a rank whose memory was taken away: all end without knowing
    /// what became of the operation elsewhere.
    fn end_unknown(&mut self, live: &[usize]) {
        self.seen.note(Mark::RefUnknown);
        for &rank in live {
            let member = &mut self.members[rank];
            (member.failed_from, member.stage) = (Some(member.done), Stage::Running);
        }
    }

    fn carry_out(&mut self, live: &[usize], chunk: &sumac::rehearsal::Chunk) -> Result<(), Violation> {
        let holders = live.iter().filter(|&&rank| self.members[rank].way.left().has(chunk.seq));
        let mut given = Vec::new();
        let has_holder = chunk.desc.collective == Collective::AllReduce && holders.count() > 0;
        if chunk.origin == Origin::Recompute && (live.len() < self.options.ranks || has_holder) {
            return Err(Violation::Again { group: 0, view: self.life as u32, seq: chunk.seq });
        }
        for &rank in live {
            let member = &mut self.members[rank];
            let bytes = chunk.give_landed(member.way.left(), &member.landed, Rank(rank as u32), &mut member.memory);
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
            return Err(Violation::Unrepairable { group: 0, rank: live[0], why });
        }
        self.report.repair_bytes += (result.len() * (live.len() - 1)) as u64;
        for &rank in live {
            let super::world::Member { way, landed, memory, .. } = &mut self.members[rank];
            chunk.land_once(way.left(), landed, &result, memory);
        }
        Ok(())
    }

    /// All are through: operations of the lost tree return, and the group goes on, or ends with who is dead.
    fn commit(&mut self) -> Result<(), Violation> {
        let Some(settlement) = self.settlement.take() else { return Ok(()) };
        let (live, view) = (self.live(), self.life as u32);
        let has_dead = live.len() < self.options.ranks;
        self.report.view_changes += 1;
        for rank in live {
            let member = &self.members[rank];
            let promise = Promise::of(member.way.left(), &Landed::default(), member.memory.first as u64);
            let Stage::Frozen(told) = &member.stage else { continue };
            let is_kept = match &member.way {
                Way::Packets(_) => **told == promise,
                Way::References(_) => promise.keeps(told),
            };
            if !is_kept {
                return Err(Violation::NotFenced { group: 0, rank, view });
            }
            if let Way::References(seat) = &member.way
                && let Some(op) = seat.strayed(&member.memory)
            {
                return Err(Violation::Strayed { rank, op });
            }
            let (returned, below) =
                (member.done, member.memory.first + member.way.left().first_behind(settlement.cut()).0 as usize);
            while self.members[rank].done < below {
                self.seen.note(Mark::OpRepaired);
                self.return_op(rank)?;
            }
            let member = &mut self.members[rank];
            if has_dead {
                let (done, operation) = (member.done, settlement.operation() as usize);
                if done != returned.max(operation) {
                    let end = format!("{returned} before, and the first to fail is {operation}");
                    return Err(Violation::RankEnd { group: 0, rank, done: done as u64, end });
                }
                self.seen.note(Mark::CommitRanksFailed);
                (member.failed_from, member.stage) = (Some(operation), Stage::Running);
            } else if member.done < member.called {
                self.seen.note(Mark::OpBegunAgain);
            }
        }
        if has_dead { Ok(()) } else { self.replan() }
    }
}

/// How long it takes until a connection's end, or a heart that stands still, is noticed.
pub(super) const SLICE: Duration = Duration::from_millis(20);

/// How long it takes until a rank is told what another knows.
const WORD: Duration = Duration::from_millis(300);

/// How long a device may take for a fence.
const FENCE_LIMIT: Duration = Duration::from_secs(1);

/// When a device that stands still is told again that a rank is gone.
const DETACH_AGAIN: Duration = Duration::from_millis(500);

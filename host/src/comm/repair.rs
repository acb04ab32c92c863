//! The parts of a view change ([`super::change`]) that are about the way of operations: the pieces of a plan, another
//! tree, and what goes on there.

use super::change::{Left, Urgent};
use super::core::Core;
use super::error::Error;
use super::join::{JoinError, enter};
use super::offer::Turn;
use super::progress::{Deadline, Lines};
use super::started::{Owned, Started};
use super::tree::Tree;
use crate::controller::proto::Membership;
use crate::exec::{Buffers, Mesh};
use crate::recovery::{self, Account, Ballot, Piece, Source};
use crate::schedule::Place;
use crate::select::{Algo, Declared, Situation, explain};
use crate::transport::packets::OpId;
use std::collections::BTreeMap;
use std::net::TcpListener;
use std::sync::Arc;
use std::time::{Duration, Instant};
use sumac_hal::ctrl::Order;
use sumac_hal::ids::Rank;
use sumac_hal::op::{Collective, Dtype, OpDesc, Path};

/// The most that is moved or computed at a time: what a rank has in memory twice.
const BATCH_BYTES: usize = 8 << 20;

/// How long the controller may take for another tree, and at most half of what is left of the call's time: all ranks
/// still have to agree afterwards. Without one, schedules take over.
const REPLAN_LIMIT: Duration = Duration::from_secs(6);

/// A tree that the controller has found, and what goes with it.
pub(super) struct Found {
    tree: Tree,
    situation: Situation,
    /// Its group and one.
    pub(super) group: u64,
}

/// Connections between the ranks that live, for one attempt.
pub(super) struct Attempt {
    lines: Lines,
    /// In the order of their ranks there.
    live: Vec<Rank>,
}

impl Attempt {
    pub(super) const fn sent_bytes(&self) -> u64 {
        self.lines.mesh.sent_bytes()
    }
}

impl Core {
    /// Return the connections for the pieces of an attempt's plan.
    pub(super) fn lines_of(
        &self,
        ballot: Ballot,
        accounts: &BTreeMap<Rank, Account>,
        listener: TcpListener,
    ) -> Result<Attempt, Error> {
        let live: Vec<Rank> = accounts.keys().copied().collect();
        let own = live.iter().position(|&rank| rank == Rank(self.config.rank)).unwrap_or(0);
        let broken = |what: String| Error::Argument(format!("connections for a repair: {what}"));
        let place = Place::new(Rank(own as u32), live.len() as u32).map_err(|error| broken(error.to_string()))?;
        let addresses = accounts.values().map(|account| account.address).collect();
        let mesh = Mesh::new(place, self.token_of(ballot), listener, addresses);
        Ok(Attempt { lines: Lines::new(mesh.map_err(|error| broken(error.to_string()))?), live })
    }

    /// Bring the results of a piece to who waits for them.
    pub(super) fn run_piece(
        &self,
        left: &mut Left<'_, '_, '_>,
        piece: &Piece,
        attempt: &mut Attempt,
        deadline: Deadline,
        urgent: &mut Urgent<'_>,
    ) -> Result<(), Error> {
        let Some(tree) = left.tree.map(Tree::remains) else {
            return Err(Error::Argument(format!("the repair of {} without a tree", piece.op.desc)));
        };
        let len_of = recovery::result_lens(tree, &piece.op);
        let mut bytes = Vec::new();
        let mut first = piece.first;
        while first < piece.end {
            let (mut end, mut len) = (first, 0);
            while end < piece.end && (end == first || len + len_of(end) <= BATCH_BYTES) {
                len += len_of(end);
                end += 1;
            }
            let remains = left.landed.over(tree);
            bytes.clear();
            let desc = match piece.source {
                Source::Held(holder) => {
                    if holder.0 == self.config.rank {
                        (first..end).for_each(|seq| recovery::give_result(&remains, seq, left.buffers, &mut bytes));
                    } else {
                        bytes.resize(len, 0);
                    }
                    let root = attempt.live.iter().position(|&rank| rank == holder).unwrap_or(0);
                    OpDesc::broadcast(Dtype::U8, Rank(root as u32), len as u64)
                }
                Source::Recompute => {
                    (first..end).for_each(|seq| recovery::give_contribution(&remains, seq, left.buffers, &mut bytes));
                    let count = len / piece.op.desc.element_bytes().max(1);
                    OpDesc { collective: Collective::AllReduce, root: Rank(0), count: count as u64, ..piece.op.desc }
                }
            };
            if bytes.len() != len {
                let what = format!("the repair of {}: {} bytes where {len} are due", piece.op.desc, bytes.len());
                return Err(Error::Argument(what));
            }
            self.run_among_live(&desc, attempt, &mut bytes, deadline, urgent)?;
            let mut at = 0;
            for seq in first..end {
                recovery::land(&remains, seq, &bytes[at..at + len_of(seq)], left.buffers);
                at += len_of(seq);
            }
            left.landed.note(first..end);
            first = end;
        }
        Ok(())
    }

    /// Run an operation between the ranks that live, by the cheapest schedule; where all do, by one that evaluates the
    /// declared expression.
    fn run_among_live(
        &self,
        desc: &OpDesc,
        attempt: &mut Attempt,
        bytes: &mut [u8],
        deadline: Deadline,
        urgent: &mut Urgent<'_>,
    ) -> Result<(), Error> {
        let place = attempt.lines.mesh.place();
        if place.ranks() == 1 {
            return Ok(());
        }
        let situation = Situation { ranks: place.ranks(), ..self.situation.clone() };
        let explanation = explain(&situation, desc, Algo::Auto);
        let Some(path) = explanation.chosen else {
            let why = explanation.refusal().cloned();
            return Err(why.map_or_else(|| Error::Argument(format!("no schedule for {desc}")), Error::NotPossible));
        };
        let buffers = Buffers::InPlace(bytes);
        let schedule = self.schedule_at(place, desc, path, &buffers)?;
        let table_version = self.situation.table.version;
        Ok(attempt.lines.run((desc, path), table_version, &schedule, buffers, (deadline, urgent))?)
    }

    /// Agree with all ranks on the tree that was found: everybody has it, or nobody.
    fn agree_on(&mut self, found: Option<Found>, deadline: Deadline) -> Result<Option<Found>, Error> {
        let own = found.as_ref().map_or(0, |found| found.group);
        let mut groups = vec![0_u64; self.config.world as usize];
        let desc = OpDesc::all_gather(Dtype::U64, groups.len() as u64);
        // Not by the tree from before: who comes late to this has yet to move when others have left that.
        let situation = Situation { tree: Err("all ranks move to another one".into()), ..self.situation.clone() };
        let explanation = explain(&situation, &desc, Algo::Auto);
        let no_schedule = || Error::Argument(format!("no schedule for {desc}"));
        let path = explanation.chosen.ok_or_else(no_schedule)?;
        let buffers =
            Buffers::Separate { input: bytemuck::bytes_of(&own), output: bytemuck::cast_slice_mut(&mut groups) };
        let schedule = self.schedule_at(self.place, &desc, path, &buffers)?;
        let asked = self.job_view();
        self.run_schedule((&desc, path), &schedule, buffers, deadline)?;
        let all_alike = groups.iter().all(|&group| group != 0 && group == groups[0]);
        if let (Some(_), false) = (&found, all_alike) {
            let without = (0..).map(Rank).zip(&groups).find(|(_, group)| **group == 0).map(|(rank, _)| rank);
            let why = without
                .map_or_else(|| "ranks were given different trees".into(), |rank| format!("{rank} is not in it"));
            if self.job_view() == asked {
                self.decline(None, &why);
            }
        }
        Ok(found.filter(|_| all_alike))
    }

    /// Go on with this tree, or without.
    pub(super) fn install(&mut self, found: Option<Found>) {
        self.view += 1;
        self.completed_below = 0;
        self.publish_landed();
        self.lost.offers.outdate(self.job_view());
        if let Some(found) = found {
            self.situation = found.situation;
            self.tree = Some(found.tree);
            self.forget_choices();
        }
    }

    /// Begin a call of all ranks, the next in their common order: where they have agreed to move to a tree, do that
    /// first.
    ///
    /// # Errors
    /// What the communicator ends with.
    pub(super) fn begin_call(&mut self, deadline: Deadline) -> Result<(), Error> {
        let lost = Arc::clone(&self.lost);
        let (at, waited) = deadline;
        let is_over = |epoch| lost.is_unsettled(epoch) || lost.is_cancelled();
        let mut call = lost.offers.count();
        self.calling = Some(call);
        let mut turn = lost.offers.begin_again(call, at, || is_over(self.epoch));
        while turn == Turn::InDoubt {
            let cause = self.loss();
            self.change_view(None, &cause, deadline)?;
            call = self.calling.unwrap_or(call);
            turn = lost.offers.begin_again(call, at, || is_over(self.epoch));
        }
        match turn {
            Turn::Go | Turn::InDoubt => Ok(()),
            Turn::TooLate => Err(Error::Deadline { desc: OpDesc::barrier(), waited }),
            Turn::Move(view) => {
                let moved = self.move_to(view, deadline).map_err(|error| self.after_loss(error, deadline));
                self.answer_offer(self.lost.offers.moved());
                // The others move, whatever this rank makes of it.
                moved.map_err(Error::ending)
            }
        }
    }

    /// Move to the tree that was offered; all ranks come here. What was started before runs to its end first, since only
    /// then all connections are between the same two operations, and nobody needs a tree from before, which works until
    /// then, and on if there is no other. Where the view has changed meanwhile, all ranks have what came of that.
    fn move_to(&mut self, offered: u32, deadline: Deadline) -> Result<(), Error> {
        self.run_started(deadline)?;
        self.end_started_in_tree(deadline)?;
        // What becomes of the tree from here on is nothing to them.
        let handles: Vec<u64> = self.started.keys().copied().collect();
        handles.into_iter().for_each(|handle| self.settle(handle));
        let (view, before) = (self.view, self.lost.tree_wakers());
        let is_offered = self.job_view() <= offered && !self.lost.offers.is_cut_off();
        self.job_view = self.job_view.max(offered);
        let found = if is_offered { self.find_tree(deadline) } else { None };
        let found = self.agree_on(found, deadline)?;
        let (job, rank, moved) = (&self.config.job, self.config.rank, found.is_some());
        tracing::info!(job, rank, moved, "a tree was offered");
        if self.view != view {
            return Ok(());
        }
        match found {
            Some(found) => {
                self.leave_tree();
                self.install(Some(found));
            }
            None if self.tree.is_some() => self.lost.set_wakers(before.0, before.1),
            None => self.install(None),
        }
        Ok(())
    }

    /// Wait for all that was started in the tree.
    pub(super) fn end_started_in_tree(&mut self, deadline: Deadline) -> Result<(), Error> {
        let in_tree = |core: &Self| core.owned.keys().any(|op| op.0 >= core.completed_below);
        while in_tree(self) {
            match self.step(None, deadline) {
                Err(error) if self.is_repairable(&error) => {
                    self.change_view(None, &error, deadline)?;
                }
                stepped => stepped?,
            }
        }
        Ok(())
    }

    /// Nothing of the tree is needed any more: its group ends by itself, as nobody renews it.
    fn leave_tree(&mut self) {
        let Some(mut tree) = self.tree.take() else { return };
        tree.retire();
        let stats = tree.stats();
        self.past_bytes += stats.bytes_out;
        self.past_retransmits += stats.retransmits;
        self.relaunch(OpId(self.completed_below));
    }

    /// Answer what was offered while another move was due.
    pub(super) fn answer_offer(&self, offered: Option<(u32, u64)>) {
        if let (Some((view, at)), Some(session)) = (offered, &self.session) {
            session.pause(view, at);
        }
    }

    /// Return the view of the job, as the controller of the moment counts.
    pub(super) fn job_view(&self) -> u32 {
        self.job_view.max(self.lost.job_view())
    }

    /// Tell the controller that its tree is not taken, and why; later calls say so too.
    fn decline(&mut self, device: Option<String>, why: &str) {
        if let Some(session) = &self.session {
            session.decline(self.job_view(), device, why);
        }
        self.note_none(format!("the controller's tree was declined: {why}"));
    }

    /// There is no other tree. A rank that has one goes on with that.
    fn note_none(&mut self, why: String) {
        if self.tree.is_none() {
            self.situation.tree = Err(why);
            self.forget_choices();
        }
    }

    /// Ask the controller for another tree and take a seat in it. `None` if there is none, which is no error.
    pub(super) fn find_tree(&mut self, (at, _): Deadline) -> Option<Found> {
        let (job, rank) = (self.config.job.clone(), self.config.rank);
        let on = self.tree.as_ref().map_or("schedules", |_| "the tree from before");
        let none = |why: &dyn std::fmt::Display| -> Option<Found> {
            tracing::warn!(job, rank, %why, on, "no other tree");
            None
        };
        let now = Instant::now();
        let limit = now + REPLAN_LIMIT.min(at.saturating_duration_since(now) / 2);
        let view = self.job_view();
        let membership = match self.session.as_ref()?.replan(view, limit) {
            Ok(membership) => membership,
            Err(error) => return none(&error),
        };
        self.job_view = view + 1;
        let Membership { tree, expression, table, .. } = membership;
        let place = match tree {
            Ok(place) => place,
            Err(why) => {
                self.note_none(why.clone());
                return none(&why);
            }
        };
        let declared = match Declared::new(expression, self.config.world, self.config.order) {
            // The communicator keeps its expression for life (PROTOCOL 9).
            Ok(declared) if declared == self.situation.declared || self.config.order == Order::Arrival => {
                self.situation.declared.clone()
            }
            other => {
                let why = other.map_or_else(
                    |error| error.to_string(),
                    |_| "it would combine in another order than the declared one".into(),
                );
                self.decline(None, &why);
                return none(&why);
            }
        };
        let group = u64::from(place.group.0) + 1;
        let facts = place.facts;
        match enter(&self.config, self.ranks_here, place, table.version, &self.lost) {
            Ok(tree) => {
                let situation = Situation { tree: Ok(facts), table, declared, ..self.situation.clone() };
                Some(Found { tree, situation, group })
            }
            Err(error) => {
                let device = match &error {
                    JoinError::Attach { device, .. } => Some(device.clone()),
                    _ => None,
                };
                self.decline(device, &error.to_string());
                none(&error)
            }
        }
    }

    /// Started operations of the lost tree: those below are complete, the others begin again, in the order of posting.
    /// Numbers of the lost tree mean nothing from here on: no buffer stays under one.
    pub(super) fn relaunch(&mut self, completed_below: OpId) {
        let handles: Vec<u64> = self.started.keys().copied().collect();
        for handle in handles {
            let Some(mut started) = self.started.remove(&handle) else { continue };
            if let Some(op) = started.tree_op.take()
                && started.path == Path::Tree
            {
                let buffers = self.owned.remove(&op).map(|in_tree| in_tree.into_buffers());
                if started.finished.is_some() || op < completed_below {
                    started.buffers = buffers;
                    let way = (started.path, started.transfer);
                    let outcome = self.outcome(way, started.fallback.clone(), started.begun);
                    started.finished.get_or_insert(Ok(outcome));
                } else if let Some(buffers) = buffers {
                    self.launch_again(handle, &mut started, buffers);
                }
            }
            self.started.insert(handle, started);
        }
        self.reclaim_abandoned();
    }

    fn launch_again(&mut self, handle: u64, started: &mut Started, buffers: Owned) {
        let options = super::CallOptions { algo: Some(started.algo), ..super::CallOptions::default() };
        let launched = self.choose(&started.desc, &options).and_then(|(path, fallback)| {
            (started.path, started.fallback) = (path, fallback);
            self.launch(handle, started, buffers).map_err(|refused| refused.0)
        });
        let Err(error) = launched else { return };
        if error.is_harmless() {
            // No rank has a way for it, and those that have yet to call it are refused: it never counted.
            self.uncount(started.call);
        } else {
            self.note_untold_end(error.clone());
        }
        started.finished = Some(Err(error));
    }
}

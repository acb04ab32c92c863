//! What a communicator does when its tree is lost under operations: complete what all ranks had entered, go on without
//! that tree, or with another ([`crate::repair`] says what is done about which chunk).
//!
//! A repair is made by all ranks together, over connections that are for repairs alone: by those that wait for an
//! operation within their call, be it one that runs by a schedule or a message, and by the others on a thread that the
//! controller's word starts. A schedule that is under way rests meanwhile, as other ranks may come to it only when their
//! earlier operations are repaired; so it shares neither connections nor numbers with repairs. In order:
//! 1. freeze: nothing is taken in from the tree any more, and the device no longer writes; what it had published is landed;
//! 2. ledgers: everybody tells everybody what it has;
//! 3. pieces: what is missing is moved or computed again, and landed, whole chunks at a time;
//! 4. another tree, if the controller has one;
//! 5. commit: all ranks have come so far, and all have the new tree or none.
//!
//! Until 5 no repaired operation returns. A rank that is lost meanwhile, or a deadline, ends the communicator with that
//! error; each chunk of a buffer is wholly old or wholly new then.

use super::core::Core;
use super::error::Error;
use super::join::enter;
use super::offer::Turn;
use super::progress::{Deadline, InFlight, Lent};
use super::started::{Owned, Started};
use super::tree::Tree;
use crate::choice::{Algo, Declared, Situation, explain};
use crate::controller::proto::Membership;
use crate::endpoint::{OpId, Ops};
use crate::exec::{Buffers, ExecError};
use crate::repair::{self, Ledger, Piece, Source, Unrepairable};
use std::sync::Arc;
use std::time::{Duration, Instant};
use sumac_hal::ctrl::Order;
use sumac_hal::ids::Rank;
use sumac_hal::op::{Collective, Dtype, OpDesc, Path};

/// The most that is moved or computed at a time: what a rank has in memory twice.
const BATCH_BYTES: usize = 8 << 20;

/// The longest ledger that is taken from a peer: runs of chunks, not chunks.
const LEDGER_MAX_BYTES: u64 = 1 << 20;

/// How long the controller may take for another tree, and at most half of what is left of the call's time: all ranks
/// still have to agree afterwards. Without one, schedules take over.
const REPLAN_LIMIT: Duration = Duration::from_secs(6);

/// A tree that the controller has found, and what goes with it.
struct Found {
    tree: Tree,
    situation: Situation,
    group: u64,
}

impl Core {
    /// Tell whether an error is one that a repair may mend.
    pub(super) fn is_repairable(&self, error: &Error) -> bool {
        self.config.repair && self.tree.is_some() && self.config.world > 1 && error.is_loss_of_tree()
    }

    /// Make good what the loss of the tree has left, with all other ranks. Afterwards operations of the lost tree with
    /// lower numbers than what is returned are complete, and started ones behind are on their new way; the buffers of
    /// the blocking call, `lent`, are not: it is for its caller to begin again.
    ///
    /// # Errors
    /// What the communicator ends with: `cause`, if nothing can be done about it.
    pub(super) fn repair(
        &mut self,
        lent: Option<Lent<'_, '_>>,
        cause: &Error,
        deadline: Deadline,
    ) -> Result<OpId, Error> {
        // It takes all ranks, of which some have left: results are over others than it would complete them with.
        if !self.gone().is_empty() {
            return Err(cause.clone());
        }
        let Some(mut tree) = self.tree.take() else { return Err(cause.clone()) };
        let (began, sent_before) = (Instant::now(), self.repair_bytes());
        let (job, rank, view) = (self.config.job.clone(), self.config.rank, self.view);
        tracing::warn!(job, rank, view, %cause, "the tree is lost: repairing");
        if let Some(session) = &self.session {
            session.suspect(self.job_view);
        }
        self.situation.tree = Err(format!("its tree was lost ({cause})"));
        self.forget_choices();
        let mut owned = std::mem::take(&mut self.owned);
        let mut buffers = InFlight { owned: &mut owned, lent };
        tree.salvage(&mut buffers);
        let repaired = self.complete(&tree, &mut buffers, cause, deadline);
        let repaired = repaired.and_then(|cut| Ok((cut, self.commit(deadline)?)));
        self.owned = owned;
        let stats = tree.stats();
        self.past_bytes += stats.bytes_out;
        self.past_retransmits += stats.retransmits;
        let (cut, found) = match repaired {
            Ok(repaired) => repaired,
            Err(error) => {
                tracing::warn!(job, rank, view, %error, "the repair failed");
                let ops = tree.remains().ops();
                // What the device had answered is here, whatever becomes of the others.
                self.completed_below = ops.in_flight().next().map_or(ops.next_id(), |op| op.id).0;
                self.tree = Some(tree);
                return Err(error.ending());
            }
        };
        let ops = tree.remains().ops();
        let completed_below = ops.in_flight().find(|op| op.end() > cut).map_or(ops.next_id(), |op| op.id);
        self.install(found);
        let (took, repair_bytes) = (began.elapsed(), self.repair_bytes() - sent_before);
        let on = self.tree.as_ref().map_or("schedules", |_| "another tree");
        tracing::warn!(job, rank, view, repair_bytes, took_ms = took.as_millis() as u64, on, "repaired");
        self.relaunch(completed_below);
        Ok(completed_below)
    }

    fn repair_bytes(&self) -> u64 {
        self.repairs.as_ref().map_or(0, |lines| lines.mesh.sent_bytes())
    }

    /// Repair because another rank has asked for it, outside of any call.
    pub(super) fn serve_repair(&mut self, view: u32) {
        let is_over = self.tree.is_none() || self.has_ended() || self.usable().is_err();
        if view != self.job_view || is_over || !self.config.repair {
            return;
        }
        let limit = self.config.deadline;
        if let Err(error) = self.repair(None, &Error::PathLost, (Instant::now() + limit, limit)) {
            self.note_end(&error);
            self.is_untold = true;
        }
    }

    /// Move and compute what is missing; returns the seq below which operations are complete.
    fn complete(
        &mut self,
        tree: &Tree,
        buffers: &mut InFlight<'_, '_>,
        cause: &Error,
        deadline: Deadline,
    ) -> Result<u64, Error> {
        let remains = tree.remains();
        let ledgers = self.exchange(&repair::ledger(remains), remains.ops(), deadline)?;
        let plan = repair::plan(&ledgers).map_err(|why| match why {
            Unrepairable::Mismatch { first, other } => Error::mismatch(first, other),
            why => {
                tracing::error!(job = self.config.job, %why, "nothing can be repaired");
                cause.clone()
            }
        })?;
        for piece in &plan.pieces {
            self.run_piece(tree, piece, buffers, deadline)?;
        }
        Ok(plan.cut)
    }

    /// Give every rank every rank's ledger.
    fn exchange(&mut self, ledger: &Ledger, ops: &Ops, deadline: Deadline) -> Result<Vec<Ledger>, Error> {
        let own_rank = Rank(self.config.rank);
        let broken =
            |rank, what: String| Error::Schedule(ExecError::Protocol { rank, what: format!("its ledger {what}") });
        let own = postcard::to_allocvec(ledger).map_err(|error| broken(own_rank, error.to_string()))?;
        let lens = self.gather_words(own.len() as u64, deadline)?;
        let (rank, most) =
            (0..).map(Rank).zip(lens.iter().copied()).max_by_key(|(_, len)| *len).unwrap_or((own_rank, 0));
        if most > LEDGER_MAX_BYTES {
            return Err(broken(rank, format!("is {most} bytes long, more than {LEDGER_MAX_BYTES}")));
        }
        let most = most as usize;
        let mut block = own;
        block.resize(most, 0);
        let mut all = vec![0; most * lens.len()];
        let desc = OpDesc::all_gather(Dtype::U8, all.len() as u64);
        self.by_schedule(&desc, Buffers::Separate { input: &block, output: &mut all }, deadline)?;
        let parse = |(rank, bytes): (Rank, &[u8])| {
            let ledger: Ledger = postcard::from_bytes(bytes).map_err(|error| broken(rank, error.to_string()))?;
            let is_sound = ledger.is_sound(self.config.world, |desc| ops.chunks(desc));
            is_sound.then_some(ledger).ok_or_else(|| broken(rank, "makes no sense".into()))
        };
        (0..).map(Rank).zip(all.chunks(most.max(1))).map(parse).collect()
    }

    /// Give every rank a number of every rank.
    fn gather_words(&mut self, own: u64, deadline: Deadline) -> Result<Vec<u64>, Error> {
        let mut all = vec![0_u64; self.config.world as usize];
        let desc = OpDesc::all_gather(Dtype::U64, all.len() as u64);
        let (input, output) = (bytemuck::bytes_of(&own), bytemuck::cast_slice_mut(&mut all));
        self.by_schedule(&desc, Buffers::Separate { input, output }, deadline)?;
        Ok(all)
    }

    /// Run an operation between the ranks, by the cheapest schedule that evaluates the declared expression.
    fn by_schedule(&mut self, desc: &OpDesc, buffers: Buffers<'_>, deadline: Deadline) -> Result<(), Error> {
        let explanation = explain(&self.situation, desc, Algo::Auto);
        let Some(path) = explanation.chosen else {
            let why = explanation.refusal().cloned();
            return Err(why.map_or_else(|| Error::Argument(format!("no schedule for {desc}")), Error::NotPossible));
        };
        let schedule = self.schedule(desc, path, &buffers)?;
        self.run_repairing((desc, path), &schedule, buffers, deadline)
    }

    /// Bring the results of a piece to who waits for them.
    fn run_piece(
        &mut self,
        tree: &Tree,
        piece: &Piece,
        buffers: &mut InFlight<'_, '_>,
        deadline: Deadline,
    ) -> Result<(), Error> {
        let remains = tree.remains();
        let len_of = repair::result_lens(remains, &piece.op);
        let mut bytes = Vec::new();
        let mut first = piece.first;
        while first < piece.end {
            let (mut end, mut len) = (first, 0);
            while end < piece.end && (end == first || len + len_of(end) <= BATCH_BYTES) {
                len += len_of(end);
                end += 1;
            }
            bytes.clear();
            let desc = match piece.source {
                Source::Held(holder) => {
                    if holder.0 == self.config.rank {
                        (first..end).for_each(|seq| repair::give_result(remains, seq, buffers, &mut bytes));
                    } else {
                        bytes.resize(len, 0);
                    }
                    OpDesc::broadcast(Dtype::U8, holder, len as u64)
                }
                Source::Recompute => {
                    (first..end).for_each(|seq| repair::give_contribution(remains, seq, buffers, &mut bytes));
                    let count = len / piece.op.desc.element_bytes().max(1);
                    OpDesc { collective: Collective::AllReduce, root: Rank(0), count: count as u64, ..piece.op.desc }
                }
            };
            if bytes.len() != len {
                let what = format!("the repair of {}: {} bytes where {len} are due", piece.op.desc, bytes.len());
                return Err(Error::Argument(what));
            }
            self.by_schedule(&desc, Buffers::InPlace(&mut bytes), deadline)?;
            let mut at = 0;
            for seq in first..end {
                repair::land(remains, seq, &bytes[at..at + len_of(seq)], buffers);
                at += len_of(seq);
            }
            first = end;
        }
        Ok(())
    }

    /// Get another tree, and agree with all ranks that everybody has come so far and whether everybody has it.
    fn commit(&mut self, deadline: Deadline) -> Result<Option<Found>, Error> {
        let found = self.find_tree(deadline);
        let groups = self.gather_words(found.as_ref().map_or(0, |found| found.group), deadline)?;
        let all_alike = groups.iter().all(|&group| group != 0 && group == groups[0]);
        Ok(found.filter(|_| all_alike))
    }

    /// Go on with this tree, or without.
    fn install(&mut self, found: Option<Found>) {
        self.view += 1;
        self.completed_below = 0;
        self.lost.offers.withdraw();
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
        match lost.offers.begin(at, || lost.rank().is_some() || lost.is_cancelled()) {
            Turn::Go => Ok(()),
            Turn::TooLate => Err(Error::Deadline { desc: OpDesc::barrier(), waited }),
            Turn::Move(view) => self.move_to(view, deadline),
        }
    }

    /// Move to the tree that was offered; all ranks are here. What was started before runs to its end first, since only
    /// then all connections are between the same two operations.
    fn move_to(&mut self, job_view: u32, deadline: Deadline) -> Result<(), Error> {
        if self.tree.is_some() {
            self.lost.offers.withdraw();
            return Ok(());
        }
        self.run_started(deadline)?;
        self.job_view = job_view;
        let found = self.commit(deadline)?;
        let (job, rank, moved) = (&self.config.job, self.config.rank, found.is_some());
        tracing::info!(job, rank, moved, "a tree was offered");
        self.install(found);
        Ok(())
    }

    /// Ask the controller for another tree and take a seat in it. `None` if there is none, which is no error.
    fn find_tree(&mut self, (at, _): Deadline) -> Option<Found> {
        let (job, rank) = (self.config.job.clone(), self.config.rank);
        let none = |why: &dyn std::fmt::Display| -> Option<Found> {
            tracing::warn!(job, rank, %why, "no other tree: schedules take over");
            None
        };
        let now = Instant::now();
        let limit = now + REPLAN_LIMIT.min(at.saturating_duration_since(now) / 2);
        let membership = match self.session.as_ref()?.replan(self.job_view, limit) {
            Ok(membership) => membership,
            Err(error) => return none(&error),
        };
        self.job_view += 1;
        let Membership { tree, expression, table, .. } = membership;
        let place = match tree {
            Ok(place) => place,
            Err(why) => return none(&why),
        };
        let declared = match Declared::new(expression, self.config.world, self.config.order) {
            // The communicator keeps its expression for life (PROTOCOL 9).
            Ok(declared) if declared == self.situation.declared || self.config.order == Order::Arrival => {
                self.situation.declared.clone()
            }
            Ok(_) => return none(&"it would combine in another order than the declared one"),
            Err(error) => return none(&error),
        };
        let group = u64::from(place.group.0) + 1;
        let facts = place.facts;
        match enter(&self.config, self.ranks_here, place, table.version, &self.lost) {
            Ok(tree) => {
                let situation = Situation { tree: Ok(facts), table, declared, ..self.situation.clone() };
                Some(Found { tree, situation, group })
            }
            Err(error) => none(&error),
        }
    }

    /// Started operations of the lost tree: those below are complete, the others begin again, in the order of posting.
    /// Numbers of the lost tree mean nothing from here on: no buffer stays under one.
    fn relaunch(&mut self, completed_below: OpId) {
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
    }

    fn launch_again(&mut self, handle: u64, started: &mut Started, buffers: Owned) {
        let options = super::CallOptions { algo: Some(started.algo), ..super::CallOptions::default() };
        let launched = self.choose(&started.desc, &options).and_then(|(path, fallback)| {
            (started.path, started.fallback) = (path, fallback);
            self.launch(handle, started, buffers)
        });
        if let Err(error) = launched {
            started.finished = Some(Err(error));
        }
    }
}

//! The parts of a view change ([`super::change`]) that move operations on: executing the pieces of a plan, finding
//! another tree, migrating to it, and launching operations again.

use super::change::{PendingOps, PlanInterrupt};
use super::core::Core;
use super::error::Error;
use super::config::JoinError;
use super::join::attach_to_new_tree;
use super::migration_gate::Admission;
use super::progress::{Connections, Deadline};
use super::started::{Owned, Started};
use super::tree::Tree;
use crate::controller::proto::Membership;
use crate::exec::{Buffers, Mesh};
use crate::recovery::{self, Ballot, Migration, Piece, RankReport, Source};
use crate::schedule::Place;
use crate::select::{Algo, Declared, SelectionContext, explain};
use crate::transport::packets::OpId;
use std::collections::BTreeMap;
use std::net::TcpListener;
use std::sync::Arc;
use std::time::{Duration, Instant};
use sumac_hal::ctrl::Order;
use sumac_hal::ids::Rank;
use sumac_hal::op::{Collective, Dtype, OpDesc, Path};

/// Maximum number of bytes moved or computed at a time, which a rank holds in memory twice.
const BATCH_BYTES: usize = 8 << 20;

/// How long the controller may take to find another tree, and at most half of the call's remaining time, because all
/// ranks must still agree afterwards. Without another tree, host collectives take over.
const REPLAN_LIMIT: Duration = Duration::from_secs(6);

/// A tree from the controller, with its selection context.
pub(super) struct NewTree {
    tree: Tree,
    selection: SelectionContext,
    /// Its group number plus one.
    pub(super) group: u64,
}

/// Connections between the surviving ranks for one attempt.
pub(super) struct Attempt {
    connections: Connections,
    /// The surviving ranks, in the order of their ranks in the mesh.
    live: Vec<Rank>,
}

impl Attempt {
    pub(super) const fn sent_bytes(&self) -> u64 {
        self.connections.mesh.sent_bytes()
    }
}

impl Core {
    /// Connect the surviving ranks for an attempt.
    pub(super) fn connect_survivors(
        &self,
        ballot: Ballot,
        reports: &BTreeMap<Rank, RankReport>,
        listener: TcpListener,
    ) -> Result<Attempt, Error> {
        let live: Vec<Rank> = reports.keys().copied().collect();
        let own = live.iter().position(|&rank| rank == Rank(self.config.rank)).unwrap_or(0);
        let broken = |what: String| Error::Argument(format!("cannot connect ranks for recovery: {what}"));
        let place = Place::new(Rank(own as u32), live.len() as u32).map_err(|error| broken(error.to_string()))?;
        let addresses = reports.values().map(|report| report.address).collect();
        let mesh = Mesh::new(place, self.token_of(ballot), listener, addresses);
        Ok(Attempt { connections: Connections::new(mesh.map_err(|error| broken(error.to_string()))?), live })
    }

    /// Deliver the results of a piece to the ranks that need them.
    pub(super) fn run_piece(
        &self,
        pending: &mut PendingOps<'_, '_, '_>,
        piece: &Piece,
        attempt: &mut Attempt,
        deadline: Deadline,
        interrupt: &mut PlanInterrupt<'_>,
    ) -> Result<(), Error> {
        let Some(tree) = pending.tree.map(Tree::recovery_source) else {
            return Err(Error::Argument(format!("cannot recover {}: this rank has no tree", piece.op.desc)));
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
            let source = pending.landed.over(tree);
            bytes.clear();
            let desc = match piece.source {
                Source::Held(holder) => {
                    if holder.0 == self.config.rank {
                        (first..end).for_each(|seq| recovery::append_result(&source, seq, pending.buffers, &mut bytes));
                    } else {
                        bytes.resize(len, 0);
                    }
                    let root = attempt.live.iter().position(|&rank| rank == holder).unwrap_or(0);
                    OpDesc::broadcast(Dtype::U8, Rank(root as u32), len as u64)
                }
                Source::Recompute => {
                    (first..end)
                        .for_each(|seq| recovery::append_contribution(&source, seq, pending.buffers, &mut bytes));
                    let count = len / piece.op.desc.element_bytes().max(1);
                    OpDesc { collective: Collective::AllReduce, root: Rank(0), count: count as u64, ..piece.op.desc }
                }
            };
            if bytes.len() != len {
                let what = format!("cannot recover {}: got {} bytes, expected {len}", piece.op.desc, bytes.len());
                return Err(Error::Argument(what));
            }
            self.run_among_live(&desc, attempt, &mut bytes, deadline, interrupt)?;
            let mut at = 0;
            for seq in first..end {
                recovery::land(&source, seq, &bytes[at..at + len_of(seq)], pending.buffers);
                at += len_of(seq);
            }
            pending.landed.note(first..end);
            first = end;
        }
        Ok(())
    }

    /// Run an operation between the surviving ranks by the cheapest schedule; if all are alive, by one that evaluates
    /// the declared expression.
    fn run_among_live(
        &self,
        desc: &OpDesc,
        attempt: &mut Attempt,
        bytes: &mut [u8],
        deadline: Deadline,
        interrupt: &mut PlanInterrupt<'_>,
    ) -> Result<(), Error> {
        let place = attempt.connections.mesh.place();
        if place.ranks() == 1 {
            return Ok(());
        }
        let selection = SelectionContext { ranks: place.ranks(), ..self.selection.clone() };
        let explanation = explain(&selection, desc, Algo::Auto);
        let Some(path) = explanation.chosen else {
            let why = explanation.refusal().cloned();
            return Err(why.map_or_else(|| Error::Argument(format!("no schedule for {desc}")), Error::NotPossible));
        };
        let buffers = Buffers::InPlace(bytes);
        let schedule = self.schedule_at(place, desc, path, &buffers)?;
        let table_version = self.selection.table.version;
        Ok(attempt.connections.run((desc, path), table_version, &schedule, buffers, (deadline, interrupt))?)
    }

    /// Agree with all ranks on the new tree: all have it, or none.
    fn agree_on(&mut self, new_tree: Option<NewTree>, deadline: Deadline) -> Result<Option<NewTree>, Error> {
        let own = new_tree.as_ref().map_or(0, |new_tree| new_tree.group);
        let mut groups = vec![0_u64; self.config.world as usize];
        let desc = OpDesc::all_gather(Dtype::U64, groups.len() as u64);
        // Not through the old tree: a rank that comes late to this would find that the others have already left it.
        let selection =
            SelectionContext { tree: Err("all ranks migrate to another one".into()), ..self.selection.clone() };
        let explanation = explain(&selection, &desc, Algo::Auto);
        let no_schedule = || Error::Argument(format!("no schedule for {desc}"));
        let path = explanation.chosen.ok_or_else(no_schedule)?;
        let buffers =
            Buffers::Separate { input: bytemuck::bytes_of(&own), output: bytemuck::cast_slice_mut(&mut groups) };
        let schedule = self.schedule_at(self.place, &desc, path, &buffers)?;
        let asked = self.job_view();
        self.run_schedule((&desc, path), &schedule, buffers, deadline)?;
        let all_alike = groups.iter().all(|&group| group != 0 && group == groups[0]);
        if let (Some(_), false) = (&new_tree, all_alike) {
            let without = (0..).map(Rank).zip(&groups).find(|(_, group)| **group == 0).map(|(rank, _)| rank);
            let why = without
                .map_or_else(|| "ranks were given different trees".into(), |rank| format!("{rank} is not in it"));
            if self.job_view() == asked {
                self.decline(None, &why);
            }
        }
        Ok(new_tree.filter(|_| all_alike))
    }

    /// Continue with this tree, or without one.
    pub(super) fn install(&mut self, new_tree: Option<NewTree>) {
        self.view += 1;
        self.completed_below = 0;
        self.publish_watermark();
        let job_view = self.job_view();
        self.notices.migration.update(|migration, _| migration.enter_view(job_view));
        if let Some(new_tree) = new_tree {
            self.selection = new_tree.selection;
            self.tree = Some(new_tree.tree);
            self.clear_selection_cache();
        }
    }

    /// Begin the next call in the common order of all ranks. If they have agreed to migrate here, do that first.
    ///
    /// # Errors
    /// The error that the communicator ends with.
    pub(super) fn begin_call(&mut self, deadline: Deadline) -> Result<(), Error> {
        let notices = Arc::clone(&self.notices);
        let (at, waited) = deadline;
        let is_over = |epoch| notices.needs_view_change(epoch) || notices.is_cancelled();
        let mut call = notices.migration.count_call();
        self.calling = Some(call);
        let mut admission = notices.migration.admit(call, at, || is_over(self.epoch));
        while admission == Admission::InDoubt {
            let cause = self.loss_error();
            self.change_view(None, &cause, deadline)?;
            call = self.calling.unwrap_or(call);
            admission = notices.migration.admit(call, at, || is_over(self.epoch));
        }
        match admission {
            Admission::Begin | Admission::InDoubt => Ok(()),
            Admission::TimedOut => Err(Error::Deadline { desc: OpDesc::barrier(), waited }),
            Admission::Migrate(view) => {
                let moved = self.migrate_to(view, deadline).map_err(|error| self.agreed_loss_error(error, deadline));
                self.reply_to_offer(self.notices.migration.update(Migration::moved));
                // The other ranks migrate in any case, so this cannot be a rejection.
                moved.map_err(Error::ending)
            }
        }
    }

    /// Migrate to the offered tree; all ranks come here. Operations that were started before are completed first: only
    /// then are all connections between the same two operations, and no rank needs the old tree, which works until
    /// then, and afterwards if there is no other. If the view has changed meanwhile, all ranks have the result of that.
    fn migrate_to(&mut self, offered: u32, deadline: Deadline) -> Result<(), Error> {
        self.run_started(deadline)?;
        self.end_started_in_tree(deadline)?;
        // They no longer depend on the tree.
        let handles: Vec<u64> = self.started.keys().copied().collect();
        handles.into_iter().for_each(|handle| self.try_finish(handle));
        let (view, before) = (self.view, self.notices.tree_wakers());
        let is_offered = self.job_view() <= offered && !self.notices.migration.is_cut_off();
        self.job_view = self.job_view.max(offered);
        let new_tree = if is_offered { self.find_tree(deadline) } else { None };
        let new_tree = self.agree_on(new_tree, deadline)?;
        let (job, rank, moved) = (&self.config.job, self.config.rank, new_tree.is_some());
        tracing::info!(job, rank, moved, "handled the offer of a tree");
        if self.view != view {
            return Ok(());
        }
        match new_tree {
            Some(new_tree) => {
                self.leave_tree();
                self.install(Some(new_tree));
            }
            None if self.tree.is_some() => self.notices.set_wakers(before.0, before.1),
            None => self.install(None),
        }
        Ok(())
    }

    /// Wait for all started operations in the tree.
    pub(super) fn end_started_in_tree(&mut self, deadline: Deadline) -> Result<(), Error> {
        let in_tree = |core: &Self| core.owned.keys().any(|op| op.0 >= core.completed_below);
        while in_tree(self) {
            match self.step(None, deadline) {
                Err(error) if self.is_recoverable(&error) => {
                    self.change_view(None, &error, deadline)?;
                }
                stepped => stepped?,
            }
        }
        Ok(())
    }

    /// Leave the tree. Its group expires, because nobody renews it.
    fn leave_tree(&mut self) {
        let Some(mut tree) = self.tree.take() else { return };
        tree.retire();
        let stats = tree.stats();
        self.past_bytes += stats.bytes_out;
        self.past_retransmits += stats.retransmits;
        self.relaunch(OpId(self.completed_below));
    }

    /// Reply to an offer that came while another migration was due.
    pub(super) fn reply_to_offer(&self, offered: Option<(u32, u64)>) {
        if let (Some((view, at)), Some(session)) = (offered, &self.session) {
            session.pause(view, at);
        }
    }

    /// Return the job's view, as the current controller counts.
    pub(super) fn job_view(&self) -> u32 {
        self.job_view.max(self.notices.job_view())
    }

    /// Decline the controller's tree, with the reason, which later calls report too.
    fn decline(&mut self, device: Option<String>, why: &str) {
        if let Some(session) = &self.session {
            session.decline(self.job_view(), device, why);
        }
        self.note_no_tree(format!("the controller's tree was declined: {why}"));
    }

    /// Record why there is no other tree. A rank that has one continues with it.
    fn note_no_tree(&mut self, why: String) {
        if self.tree.is_none() {
            self.selection.tree = Err(why);
            self.clear_selection_cache();
        }
    }

    /// Ask the controller for another tree, and attach to it. `None` if there is none, which is no error.
    pub(super) fn find_tree(&mut self, (at, _): Deadline) -> Option<NewTree> {
        let (job, rank) = (self.config.job.clone(), self.config.rank);
        let on = self.tree.as_ref().map_or("host collectives", |_| "the present tree");
        let none = |why: &dyn std::fmt::Display| -> Option<NewTree> {
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
                self.note_no_tree(why.clone());
                return none(&why);
            }
        };
        let declared = match Declared::new(expression, self.config.world, self.config.order) {
            // A communicator never changes its expression (PROTOCOL 9).
            Ok(declared) if declared == self.selection.declared || self.config.order == Order::Arrival => {
                self.selection.declared.clone()
            }
            other => {
                let why = other.map_or_else(
                    |error| error.to_string(),
                    |_| "it would combine contributions in a different order than declared".into(),
                );
                self.decline(None, &why);
                return none(&why);
            }
        };
        let group = u64::from(place.group.0) + 1;
        let facts = place.facts;
        match attach_to_new_tree(&self.config, self.ranks_here, place, table.version, &self.notices) {
            Ok(tree) => {
                let selection = SelectionContext { tree: Ok(facts), table, declared, ..self.selection.clone() };
                Some(NewTree { tree, selection, group })
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

    /// Finish or launch again the started operations of the lost tree: those below `completed_below` are complete, the
    /// others start again in the order of posting. Operation numbers of the lost tree are void, so no buffer may stay
    /// under one.
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
                    let operation = (started.path, started.transfer);
                    let outcome = self.outcome(operation, started.fallback.clone(), started.begun);
                    started.finished.get_or_insert(Ok(outcome));
                } else if let Some(buffers) = buffers {
                    self.launch_again(handle, &mut started, buffers);
                }
            }
            self.started.insert(handle, started);
        }
        self.reclaim_detached();
    }

    fn launch_again(&mut self, handle: u64, started: &mut Started, buffers: Owned) {
        let options = super::options::CallOptions { algo: Some(started.algo), ..super::options::CallOptions::default() };
        let launched = self.choose(&started.desc, &options).and_then(|(path, fallback)| {
            (started.path, started.fallback) = (path, fallback);
            self.launch(handle, started, buffers).map_err(|refused| refused.0)
        });
        let Err(error) = launched else { return };
        if error.is_rejection() {
            // No rank has a path for it, and ranks that have not called it yet will be rejected, so it never counted.
            self.uncount_call(started.call);
        } else {
            self.note_unreported_end(error.clone());
        }
        started.finished = Some(Err(error));
    }
}

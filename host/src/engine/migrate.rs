//! Where calls begin: in the common order of all ranks, and after the migration to another tree if they have agreed to
//! migrate there.

use super::core::Core;
use super::data_path::Deadline;
use super::error::Error;
use super::migration_gate::Admission;
use super::new_tree::NewTree;
use crate::exec::Buffers;
use crate::recovery::{Migration, MigrationVote, Verdict};
use crate::select::{Algo, SelectionContext, explain};
use std::sync::Arc;
use sumac_hal::op::{Dtype, OpDesc};

impl Core {
    /// Begin the next call in the common order of all ranks. If they have agreed to migrate here, do that first.
    ///
    /// # Errors
    /// The error that the communicator ends with.
    pub(super) fn begin_call(&mut self, deadline: Deadline) -> Result<(), Error> {
        let notices = Arc::clone(self.notices());
        let (at, waited) = deadline;
        let is_over = |epoch| notices.needs_view_change(epoch) || notices.is_cancelled();
        let mut call = notices.migration.count_call();
        self.data.operations.calling = Some(call);
        let mut admission = notices.migration.admit(call, at, || is_over(self.data.watch.epoch()));
        while admission == Admission::InDoubt {
            let cause = self.data.loss_error();
            self.change_view(None, &cause, deadline)?;
            call = self.data.operations.calling.unwrap_or(call);
            admission = notices.migration.admit(call, at, || is_over(self.data.watch.epoch()));
        }
        match admission {
            Admission::Begin | Admission::InDoubt => Ok(()),
            Admission::TimedOut => Err(Error::Deadline { desc: OpDesc::barrier(), waited }),
            Admission::Migrate(view) => {
                let moved = self.migrate_to(view, deadline).map_err(|error| self.agreed_loss_error(error, deadline));
                self.reply_to_offer(self.notices().migration.update(Migration::moved));
                // The other ranks migrate in any case, so this cannot be a rejection.
                moved.map_err(Error::ending)
            }
        }
    }

    /// Migrate to the offered tree; all ranks come here. Operations that were started before are completed first: only
    /// then are all connections between the same two operations, and no rank needs the old tree, which works until
    /// then, and afterwards if there is no other. If the view has changed meanwhile, all ranks have the result of that.
    fn migrate_to(&mut self, offered: u32, deadline: Deadline) -> Result<(), Error> {
        self.finish_started(deadline)?;
        // They no longer depend on the tree.
        self.data.operations.handles().into_iter().for_each(|handle| self.data.try_finish(handle));
        let (before, job_view) = (self.notices().tree_wakers(), self.data.watch.job_view());
        let vote = self.notices().migration.vote(offered, job_view, self.data.tree.view());
        self.data.watch.enter_job_view(offered);
        let new_tree = if vote.asks() { self.find_tree(deadline) } else { None };
        self.data.selection.migrate_to(new_tree.as_ref().map(|new_tree| new_tree.selection.clone()));
        let agreed = self.agree_on(vote, new_tree.as_ref(), deadline);
        self.data.selection.migrate_to(None);
        let verdict = agreed?;
        let (job, rank) = (&self.data.config.job, self.data.config.rank);
        crate::log::info!(job, rank, ?verdict, "handled the offer of a tree");
        match (verdict, new_tree) {
            (Verdict::Superseded, _) => {}
            (Verdict::Migrate, Some(new_tree)) => {
                if self.data.tree.leave() {
                    self.relaunch(self.data.tree.completed_below());
                }
                self.install(Some(new_tree));
            }
            _ if self.data.tree.is_there() => self.notices().set_wakers(before.0, before.1),
            _ => self.install(None),
        }
        Ok(())
    }

    /// Agree with all ranks on the new tree: all have it, or none.
    fn agree_on(
        &mut self,
        mut vote: MigrationVote,
        new_tree: Option<&NewTree>,
        deadline: Deadline,
    ) -> Result<Verdict, Error> {
        vote.cast(new_tree.map_or(0, |new_tree| new_tree.group), self.data.watch.job_view());
        let own = vote.own();
        let mut votes = vec![0_u64; self.data.config.world as usize];
        let desc = OpDesc::all_gather(Dtype::U64, votes.len() as u64);
        // Not through the old tree: a rank that comes late to this would find that the others have already left it.
        let selection = SelectionContext {
            tree: Err("all ranks migrate to another one".into()),
            ..self.data.selection.context().clone()
        };
        let explanation = explain(&selection, &desc, Algo::Auto);
        let no_schedule = || Error::Argument(format!("no schedule for {desc}"));
        let path = explanation.chosen.ok_or_else(no_schedule)?;
        let buffers =
            Buffers::Separate { input: bytemuck::bytes_of(&own), output: bytemuck::cast_slice_mut(&mut votes) };
        let schedule = self.data.schedule(&desc, path, false)?;
        self.run_schedule((&desc, path, 0), &schedule, buffers, deadline)?;
        if let Some(why) = vote.declines(&votes, self.data.watch.job_view()) {
            self.decline(None, &why);
        }
        Ok(vote.verdict(&votes, self.data.tree.view()))
    }
}

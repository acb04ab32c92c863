//! How a rank's operations run: through a tree, or as host collectives between the ranks. After a recovery they
//! continue on the next tree, or without one.
//!
//! Oracle: an operation that has returned is not written to again.

use super::cluster::{Actor, Cluster};
use super::coverage::Mark;
use super::memory::OpMemory;
use super::messages::Message;
use super::report::Violation;
use sumac::transport::packets::{Endpoint, EndpointError};
use sumac_hal::op::{Collective, Path};

/// How a rank's operations run.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Route {
    /// Through a tree; `None` is the only one of scenarios without recovery.
    Tree(Option<usize>),
    /// As host collectives between the ranks.
    HostCollectives,
}

impl Cluster<'_, '_> {
    /// Handle the failure of a rank's endpoint.
    pub(super) fn lose_tree(&mut self, rank: usize, group: usize) -> Result<(), Violation> {
        self.seen.note(Mark::FrozenByLoss);
        self.suspect((rank, group));
        self.change_view((rank, group), true)
    }

    /// Continue with this tree, or with host collectives.
    pub(super) fn install(&mut self, rank: usize, group: usize, found: Option<usize>) {
        let member = &mut self.members[rank][group];
        member.first = member.done as usize;
        member.memory.first = member.first;
        member.route = found.map_or(Route::HostCollectives, |tree| Route::Tree(Some(tree)));
        let Some(found) = found else { return };
        let membership = self.control.sessions[rank][group].membership.as_ref();
        let (_, membership) = membership.filter(|(tree, _)| *tree == Some(found)).expect("it was told of this tree");
        let config = self.endpoint_on((rank, group), found, membership, self.members[rank][group].view);
        let member = &mut self.members[rank][group];
        (member.window, member.chunk_len_bytes) = (config.window_max, config.chunk_len_bytes);
        member.endpoint = self.options.planted.endpoint(Endpoint::new(config));
        member.progress = member.endpoint.progress();
        for op in member.first..member.called {
            let posted = member.endpoint.post(self.options.call(group, rank, op), Path::Tree, None);
            assert!(posted.is_ok(), "{posted:?}");
        }
        self.touched.insert(Actor::Rank { rank, group });
    }

    /// An operation returns: its contents must be right, and the caller may overwrite its buffers from now on.
    pub(super) fn finish_op(&mut self, rank: usize, group: usize) -> Result<(), Violation> {
        let op = self.members[rank][group].done as usize;
        let called = self.called.get(&(group, op)).copied().unwrap_or(0);
        let desc = self.options.call(group, rank, op);
        // Operations that need a dead rank need not complete.
        let may_do_without = desc.count > 0 && desc.collective != Collective::AllReduce && self.options.ranks_die();
        if called < self.options.ranks && !may_do_without {
            return Err(Violation::Early { group, rank, op, called });
        }
        self.check_op_at(rank, group, op)?;
        let member = &mut self.members[rank][group];
        member.memory.ops[op].scribble();
        member.done += 1;
        Ok(())
    }

    /// A rank enters an operation that runs as a host collective.
    pub(super) fn enter_host_collective(&mut self, rank: usize, group: usize) -> Result<(), Violation> {
        let member = &mut self.members[rank][group];
        let op = member.done as usize;
        if member.membership.is_frozen() {
            return Ok(());
        }
        if member.route == Route::HostCollectives && op < member.called && member.entered_below <= op {
            member.entered_below = op + 1;
            for to in 0..self.options.ranks {
                self.send_message(Message::Entered { to, group, op, from: rank });
            }
        }
        self.run_host_collectives(rank, group)
    }

    /// Host collectives have their own tests: here they complete at once when all ranks have entered.
    pub(super) fn run_host_collectives(&mut self, rank: usize, group: usize) -> Result<(), Violation> {
        let member = &self.members[rank][group];
        let op = member.done as usize;
        let is_there =
            member.route == Route::HostCollectives && member.entered_below > op && !member.membership.is_frozen();
        if !is_there || member.entered.get(&op).is_none_or(|ranks| ranks.len() < self.options.ranks) {
            return Ok(());
        }
        let desc = self.options.call(group, rank, op);
        let before = OpMemory::before(self.options, self.incarnation, group, rank, op);
        let after = before.after(&desc, self.options.ranks, rank, self.results_of(group, op));
        self.members[rank][group].memory.ops[op] = after;
        self.seen.note(Mark::OpByHost);
        self.finish_op(rank, group)?;
        self.enter_host_collective(rank, group)
    }
}

/// Return whether an error is one that a recovery handles.
pub(super) fn is_loss_of_tree(error: EndpointError) -> bool {
    matches!(error, EndpointError::PathLost | EndpointError::GroupLost)
}

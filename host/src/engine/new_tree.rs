//! Another tree from the controller: asking for it, attaching to it, continuing with it.

use super::config::JoinError;
use super::core::Core;
use super::data_path::Deadline;
use super::join::{PROBE_LIMIT, attach_to_new_tree};
use super::tree::Tree;
use crate::controller::proto::Membership;
use crate::select::{Declared, SelectionContext};
use crate::transport::path::PathToProbe;
use std::time::{Duration, Instant};
use sumac_hal::ctrl::Order;

/// How long the controller may take to find another tree, and at most half of the call's remaining time, because all
/// ranks must still agree afterwards. Without another tree, host collectives take over.
const REPLAN_LIMIT: Duration = Duration::from_secs(6);

/// A tree from the controller, with its selection context.
pub(super) struct NewTree {
    tree: Tree,
    pub(super) selection: SelectionContext,
    /// Its group number plus one.
    pub(super) group: u64,
}

impl Core {
    /// Ask the controller for another tree, and attach to it. `None` if there is none, which is no error.
    pub(super) fn find_tree(&mut self, (at, _): Deadline) -> Option<NewTree> {
        let (job, rank) = (self.data.config.job.clone(), self.data.config.rank);
        let on = if self.data.tree.is_there() { "the present tree" } else { "host collectives" };
        let none = |why: &dyn std::fmt::Display| -> Option<NewTree> {
            crate::log::info!(job, rank, %why, on, "no other tree");
            None
        };
        let now = Instant::now();
        let limit = now + REPLAN_LIMIT.min(at.saturating_duration_since(now) / 2);
        let view = self.data.watch.job_view();
        let mut port = None;
        let config = &self.data.config;
        let probe = |path: &PathToProbe| {
            // A port that cannot be opened is reported below.
            let port = port.get_or_insert_with(|| config.open_port()).as_mut().ok()?;
            path.probe(port, PROBE_LIMIT.min(limit.saturating_duration_since(Instant::now())))
        };
        let membership = match self.members.session.as_ref()?.replan_with(view, limit, probe) {
            Ok(membership) => membership,
            Err(error) => return none(&error),
        };
        self.data.watch.set_job_view(view + 1);
        let Membership { tree, expression, table, .. } = membership;
        let place = match tree {
            Ok(place) => place,
            Err(why) => {
                self.note_no_tree(why.clone());
                return none(&why);
            }
        };
        // The shape is the communicator's, whatever tree it has.
        let shape = self.data.selection.context().shape;
        let declared = match Declared::new(expression, self.data.config.world, self.data.config.order, shape) {
            // A communicator never changes its expression (PROTOCOL 9).
            Ok(declared)
                if declared == self.data.selection.context().declared || self.data.config.order == Order::Arrival =>
            {
                self.data.selection.context().declared.clone()
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
        let port = port.unwrap_or_else(|| self.data.config.open_port()).map_err(JoinError::from);
        let (config, ranks_here) = (&self.data.config, self.members.ranks_here);
        let attach = |port| attach_to_new_tree(config, ranks_here, place, table.version, (port, self.notices()));
        match port.and_then(attach) {
            Ok(tree) => {
                let selection =
                    SelectionContext { tree: Ok(facts), table, declared, ..self.data.selection.context().clone() };
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

    /// Decline the controller's tree, with the reason, which later calls report too.
    pub(super) fn decline(&mut self, device: Option<String>, why: &str) {
        if let Some(session) = &self.members.session {
            session.decline(self.data.watch.job_view(), device, why);
        }
        self.note_no_tree(format!("the controller's tree was declined: {why}"));
    }

    /// Record why there is no other tree. A rank that has one continues with it.
    fn note_no_tree(&mut self, why: String) {
        if !self.data.tree.is_there() {
            self.data.selection.without_tree(why);
        }
    }

    /// Continue with this tree, or without one.
    pub(super) fn install(&mut self, new_tree: Option<NewTree>) {
        let (tree, selection) = new_tree.map(|new_tree| (new_tree.tree, new_tree.selection)).unzip();
        self.data.tree.install(tree);
        self.data.publish_watermark();
        let job_view = self.data.watch.job_view();
        self.notices().migration.update(|migration, _| migration.enter_view(job_view));
        if let Some(selection) = selection {
            self.data.selection.install(selection);
        }
    }
}

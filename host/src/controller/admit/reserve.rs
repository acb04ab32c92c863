//! A tree and its group on every node, or on none.
//!
//! Three steps, between which devices take their time: all are asked ([`Placement::ask`]); where one refuses or does not
//! answer, all free it again ([`Placement::answered`]), and one that refused says what it has left
//! ([`Placement::counted`]).

use super::{PlacedNode, Placement};
use crate::controller::ControllerConfig;
use crate::controller::device::{Asked, DeviceError, answer_due};
use std::time::Instant;
use sumac_hal::ctrl::{Order, Request};
use sumac_hal::planted;

/// What each node was asked, root first.
#[derive(Debug)]
pub(in crate::controller) struct Reserving(Vec<Result<[Asked; 2], DeviceError>>);

/// A tree that could not be reserved, and has been freed; its device is being asked what it counts then.
#[derive(Debug)]
pub(in crate::controller) struct Failed {
    index: usize,
    error: DeviceError,
    stats: Option<Asked>,
}

/// A tree that could not be reserved.
#[derive(Debug)]
pub(in crate::controller) struct Unreserved {
    /// The node.
    pub(in crate::controller) index: usize,
    pub(in crate::controller) error: DeviceError,
    /// The slots that its device counts without the group, if it refused.
    pub(in crate::controller) slots_used: Option<u32>,
}

impl Placement {
    /// Install the tree and create the group on every node, and wait. Where one refuses or does not answer, nothing stays;
    /// returned is the first that did not, root first, and what it counts then, if it says so.
    pub(in crate::controller) fn reserve(&self, config: &ControllerConfig, order: Order) -> Result<(), Unreserved> {
        let asked = self.ask(config, order);
        self.answered(asked, answer_due()).map_err(|failed| self.counted(failed, answer_due()))
    }

    /// Ask all nodes to install the tree and to create the group.
    pub(in crate::controller) fn ask(&self, config: &ControllerConfig, order: Order) -> Reserving {
        let ask = |(index, node): (usize, &PlacedNode)| {
            let install = node.device.post(Request::InstallTree(self.tree_config(index)))?;
            Ok([install, node.device.post(Request::CreateGroup(self.group_config(config, order, node)))?])
        };
        Reserving(self.nodes.iter().enumerate().map(ask).collect())
    }

    /// Take in all answers, waiting until `due` at most.
    pub(in crate::controller) fn answered(&self, asked: Reserving, due: Instant) -> Result<(), Failed> {
        let mut failed = None;
        for (index, (node, asked)) in self.nodes.iter().zip(asked.0).enumerate() {
            let done = asked.and_then(|asked| asked.iter().try_for_each(|asked| node.device.done(asked, due)));
            failed = failed.or(done.err().map(|error| (index, error)));
        }
        let Some((index, error)) = failed else { return Ok(()) };
        let kept = |at: usize| planted!(self, ReservationKept) && at != index;
        let all = self.nodes.iter().enumerate().filter(|(at, _)| !kept(*at));
        all.for_each(|(_, node)| drop(self.release_on(&node.device)));
        let device = &self.nodes[index].device;
        let stats = matches!(error, DeviceError::Refused(_)).then(|| device.post(Request::Stats).ok()).flatten();
        Err(Failed { index, error, stats })
    }

    /// Take in what the device counts, waiting until `due` at most.
    pub(in crate::controller) fn counted(&self, failed: Failed, due: Instant) -> Unreserved {
        let Failed { index, error, stats } = failed;
        let stats = stats.and_then(|asked| self.nodes[index].device.counted(&asked, due).ok());
        Unreserved { index, error, slots_used: stats.map(|stats| stats.slots_used) }
    }

    /// Tell whether nothing more has to be waited for before the answers are taken in.
    #[cfg(feature = "snapshot")]
    pub(in crate::controller) fn has_answers(&self, asked: &Reserving) -> bool {
        let all = |node: &PlacedNode, asked: &[Asked; 2]| asked.iter().all(|asked| node.device.is_answered(asked));
        self.nodes.iter().zip(&asked.0).all(|(node, asked)| asked.as_ref().map_or(true, |asked| all(node, asked)))
    }

    /// Tell whether nothing more has to be waited for before the count is taken in.
    #[cfg(feature = "snapshot")]
    pub(in crate::controller) fn has_count(&self, failed: &Failed) -> bool {
        failed.stats.as_ref().is_none_or(|asked| self.nodes[failed.index].device.is_answered(asked))
    }
}

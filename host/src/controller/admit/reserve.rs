//! Reserves a tree and its group on every node, or on none.
//!
//! The steps, with a wait for the devices between them: send the requests to all nodes
//! ([`Placement::send_reservation`]); if one refuses or does not respond, roll back on all
//! ([`Placement::finish_reservation`]); if it refused, query its counters ([`Placement::finish_rollback`]).

use super::{PlacedNode, Placement};
use crate::controller::ControllerConfig;
use crate::controller::device::{DeviceError, PendingReply, reply_deadline};
use std::time::Instant;
use sumac_hal::ctrl::{Order, Request};
use sumac_hal::planted;

/// The requests sent to each node, root first.
#[derive(Debug)]
pub(in crate::controller) struct PendingReservation(Vec<Result<[PendingReply; 2], DeviceError>>);

/// A reservation that failed and was rolled back; the counters of the device that failed are being queried.
#[derive(Debug)]
pub(in crate::controller) struct RolledBack {
    index: usize,
    error: DeviceError,
    stats: Option<PendingReply>,
}

/// A failed reservation.
#[derive(Debug)]
pub(in crate::controller) struct ReservationFailure {
    /// The index of the node that failed.
    pub(in crate::controller) index: usize,
    pub(in crate::controller) error: DeviceError,
    /// The slots in use on its device without the group, if the device refused and reported them.
    pub(in crate::controller) slots_used: Option<u32>,
}

impl Placement {
    /// Install the tree and create the group on every node, and wait. If a node refuses or does not respond, roll back
    /// and return the first such node from the root.
    pub(in crate::controller) fn reserve(
        &self,
        config: &ControllerConfig,
        order: Order,
    ) -> Result<(), ReservationFailure> {
        let asked = self.send_reservation(config, order);
        self.finish_reservation(asked, reply_deadline())
            .map_err(|failed| self.finish_rollback(failed, reply_deadline()))
    }

    /// Send the requests to install the tree and create the group to all nodes.
    pub(in crate::controller) fn send_reservation(
        &self,
        config: &ControllerConfig,
        order: Order,
    ) -> PendingReservation {
        let ask = |(index, node): (usize, &PlacedNode)| {
            let install = node.device.post(Request::InstallTree(self.tree_config(index)))?;
            Ok([install, node.device.post(Request::CreateGroup(self.group_config(config, order, node)))?])
        };
        PendingReservation(self.nodes.iter().enumerate().map(ask).collect())
    }

    /// Collect all responses, waiting until `due` at most, and roll back if one is missing or a refusal.
    pub(in crate::controller) fn finish_reservation(
        &self,
        asked: PendingReservation,
        due: Instant,
    ) -> Result<(), RolledBack> {
        let mut failed = None;
        for (index, (node, asked)) in self.nodes.iter().zip(asked.0).enumerate() {
            let done = asked.and_then(|asked| asked.iter().try_for_each(|asked| node.device.wait_done(asked, due)));
            failed = failed.or(done.err().map(|error| (index, error)));
        }
        let Some((index, error)) = failed else { return Ok(()) };
        let kept = |at: usize| planted!(self, ReservationKept) && at != index;
        let all = self.nodes.iter().enumerate().filter(|(at, _)| !kept(*at));
        all.for_each(|(_, node)| drop(self.release_on(&node.device)));
        let device = &self.nodes[index].device;
        let stats = matches!(error, DeviceError::Refused(_)).then(|| device.post(Request::Stats).ok()).flatten();
        Err(RolledBack { index, error, stats })
    }

    /// Collect the counters of the device that failed, waiting until `due` at most.
    pub(in crate::controller) fn finish_rollback(&self, failed: RolledBack, due: Instant) -> ReservationFailure {
        let RolledBack { index, error, stats } = failed;
        let stats = stats.and_then(|asked| self.nodes[index].device.wait_stats(&asked, due).ok());
        ReservationFailure { index, error, slots_used: stats.map(|stats| stats.slots_used) }
    }

    /// Whether all responses have arrived, so that [`Placement::finish_reservation`] would not wait.
    #[cfg(feature = "snapshot")]
    pub(in crate::controller) fn is_answered_by_all(&self, asked: &PendingReservation) -> bool {
        let all =
            |node: &PlacedNode, asked: &[PendingReply; 2]| asked.iter().all(|asked| node.device.is_answered(asked));
        self.nodes.iter().zip(&asked.0).all(|(node, asked)| asked.as_ref().map_or(true, |asked| all(node, asked)))
    }

    /// Whether the counters have arrived, so that [`Placement::finish_rollback`] would not wait.
    #[cfg(feature = "snapshot")]
    pub(in crate::controller) fn is_rolled_back(&self, failed: &RolledBack) -> bool {
        failed.stats.as_ref().is_none_or(|asked| self.nodes[failed.index].device.is_answered(asked))
    }
}

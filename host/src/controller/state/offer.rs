//! Offers a tree to a running job that has none.
//!
//! Ranks that use host collectives cannot switch just anywhere: some are in the middle of an operation that others have
//! not started. So each rank names the call at which it pauses, and all move at the highest of these
//! ([`ClientReply::Offer`]). They then request a tree as after a loss. The resources are claimed for them meanwhile,
//! but not indefinitely: a job that makes no calls gets what is available when it finally asks.

use super::{Job, State};
use crate::controller::output::{ConnId, Outputs};
use crate::controller::proto::ClientReply;
use std::collections::BTreeMap;
use sumac_hal::ids::Rank;

impl State {
    /// A rank pauses at call `at`. The last rank to answer fixes the call at which all move.
    pub(in crate::controller) fn pause(&mut self, place: Option<&(String, Rank)>, client: ConnId, view: u32, at: u64) {
        let Some((name, rank)) = place else { return };
        let Some(job) = self.jobs.get_mut(name).filter(|job| job.has(*rank, client) && job.view == view) else {
            return;
        };
        let Some(offer) = &mut job.offer else { return };
        offer.insert(*rank, at);
        if offer.len() == job.world as usize {
            let call = offer.values().copied().max().unwrap_or(0);
            (job.offer, job.is_moving) = (None, true);
            job.broadcast(&mut self.output, &ClientReply::MoveAt { view, call });
        }
    }
}

impl Job {
    /// Whether the job can be offered a tree: it has none, all ranks are connected, and no replan is in progress.
    pub(super) fn can_take_offer(&self) -> bool {
        let is_whole = self.members.len() == self.world as usize;
        let is_busy = self.tree_suspected || !self.replan_requests.is_empty() || self.placing.is_some();
        is_whole && !is_busy && self.offer_not_before.is_none() && matches!(self.placement, Some(Err(_)))
    }

    /// Offer a tree, unless an offer is pending or the ranks are already moving.
    pub(super) fn make_offer(&mut self, output: &mut Outputs) {
        if self.offer.is_none() && !self.is_moving {
            self.offer = Some(BTreeMap::new());
            self.broadcast(output, &ClientReply::Offer { view: self.view });
        }
    }

    /// Withdraw the offer because a rank is gone: paused ranks continue.
    pub(super) fn withdraw_offer(&mut self, output: &mut Outputs) {
        if self.offer.take().is_some() {
            self.broadcast(output, &ClientReply::OfferWithdrawn);
        }
    }
}

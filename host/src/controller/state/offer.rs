//! A tree for a running job that has none, once there is a device that was not there before.
//!
//! Ranks that run schedules can't stop anywhere: some are in the middle of an operation that others have not begun. So
//! each says from which call on it waits, and all move at the greatest of these numbers ([`ClientReply::Offer`]). Then they
//! ask for a tree as after the loss of one.

use super::{Client, Job, State};
use crate::controller::proto::ClientReply;
use std::collections::BTreeMap;
use std::sync::Arc;
use sumac_hal::ids::Rank;

impl State {
    /// There is a device more: offer it to jobs without a tree.
    pub(super) fn offer(&mut self) {
        for (name, job) in &mut self.jobs {
            let is_whole = job.members.len() == job.world as usize;
            if matches!(job.placement, Some(Err(_))) && is_whole && job.offer.is_none() && job.waiting.is_empty() {
                tracing::info!(job = name, view = job.view, "a device has come: the job may have a tree");
                job.offer = Some(BTreeMap::new());
                job.tell(&ClientReply::Offer { view: job.view });
            }
        }
    }

    /// A rank waits from a call on; the last one to say so says when the job moves.
    pub(in crate::controller) fn pause(
        &mut self,
        place: Option<&(String, Rank)>,
        client: &Arc<Client>,
        view: u32,
        at: u64,
    ) {
        let Some((name, rank)) = place else { return };
        let Some(job) = self.jobs.get_mut(name).filter(|job| job.has(*rank, client) && job.view == view) else {
            return;
        };
        let Some(offer) = &mut job.offer else { return };
        offer.insert(*rank, at);
        if offer.len() == job.world as usize {
            let call = offer.values().copied().max().unwrap_or(0);
            job.offer = None;
            job.tell(&ClientReply::MoveAt { view, call });
        }
    }
}

impl Job {
    /// A rank is gone, and a tree is for all: those that wait go on.
    pub(super) fn withdraw_offer(&mut self) {
        if self.offer.take().is_some() {
            self.tell(&ClientReply::Withdrawn);
        }
    }

    /// Tell all ranks that are there.
    pub(super) fn tell(&self, reply: &ClientReply) {
        self.members.values().for_each(|member| member.client.send(reply));
    }
}

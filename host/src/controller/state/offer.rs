//! A tree for a running job that has none, once there is one for it.
//!
//! Ranks that run schedules can't stop anywhere: some are in the middle of an operation that others have not begun. So
//! each says from which call on it waits, and all move at the greatest of these numbers ([`ClientReply::Offer`]). Then they
//! ask for a tree as after the loss of one. What it takes is held for them meanwhile, but not for ever: a job that makes no
//! calls gets what there is when it comes.

use super::{Client, Job, State};
use crate::controller::line::Frames;
use crate::controller::proto::ClientReply;
use std::collections::BTreeMap;
use std::sync::Arc;
use sumac_hal::ctrl::{FrameError, encode_frames};
use sumac_hal::ids::Rank;

impl State {
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
            (job.offer, job.is_moving) = (None, true);
            job.tell(&ClientReply::MoveAt { view, call });
        }
    }
}

impl Job {
    /// Tell whether ranks can be offered a tree: all are there, none is busy with the loss of one.
    pub(super) fn can_move(&self) -> bool {
        let is_whole = self.members.len() == self.world as usize;
        let is_busy = self.suspected || !self.waiting.is_empty() || self.placing.is_some();
        is_whole && !is_busy && self.settles_at.is_none() && matches!(self.placement, Some(Err(_)))
    }

    /// Offer a tree, unless the ranks are on their way to one already.
    pub(super) fn make_offer(&mut self) {
        if self.offer.is_none() && !self.is_moving {
            self.offer = Some(BTreeMap::new());
            self.tell(&ClientReply::Offer { view: self.view });
        }
    }

    /// A rank is gone, and a tree is for all: those that wait go on.
    pub(super) fn withdraw_offer(&mut self) {
        if self.offer.take().is_some() {
            self.tell(&ClientReply::Withdrawn);
        }
    }

    /// Tell all ranks that are there.
    pub(super) fn tell(&self, reply: &ClientReply) {
        self.put(Frames::of(reply));
    }

    /// The same of several replies, which all ranks' queues share as one: as many as the ranks can die together.
    pub(super) fn tell_all(&self, replies: impl Iterator<Item = ClientReply>) {
        let frames: Result<Vec<_>, _> = replies.map(|reply| encode_frames(&reply)).collect();
        self.put(frames.map(|frames| Frames::new(frames.concat())));
    }

    fn put(&self, frames: Result<Frames, FrameError>) {
        match frames {
            Ok(frames) => self.members.values().for_each(|member| member.client.put(std::slice::from_ref(&frames))),
            Err(error) => tracing::error!(%error, "ranks can't be told"),
        }
    }
}

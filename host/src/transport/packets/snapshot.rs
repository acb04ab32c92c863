//! An endpoint without what says only what was: for searches over all states of a group. Under the feature it can be
//! copied, compared and hashed, and its end can be rehearsed ([`crate::rehearsal`]).

use super::{Endpoint, EndpointStats, OpId};
use sumac_hal::ids::ChunkNo;
use sumac_hal::op::OpDesc;
use sumac_hal::shard::Shard;
use sumac_hal::uplink::Uplink;

impl Endpoint {
    /// Forget counts and moments, as at the moment [`Uplink::AFTERWARDS`].
    ///
    /// # Panics
    /// If something waits to be sent.
    pub fn rest(&mut self) {
        assert!(self.poll_destination().is_none(), "not at rest");
        self.stats = EndpointStats::default();
        self.hops.iter_mut().for_each(Uplink::forget_time);
        self.ops.forget_slowest();
    }

    /// Forget the probes that are out: see [`Uplink::forget_probe`].
    pub fn forget_probes(&mut self) {
        self.hops.iter_mut().for_each(Uplink::forget_probe);
    }

    /// Keep nothing of what has returned, as if others could not need it any more.
    pub fn forget_kept(&mut self) {
        self.ops.forget_below(u64::MAX);
    }

    /// Tell whether the answer to chunk `seq` is here.
    pub fn holds(&self, seq: u64) -> bool {
        let index = usize::from(Shard::of(ChunkNo(seq), self.hops.len() as u16));
        self.hops[index].is_answered(self.shard(index).below(ChunkNo(seq)))
    }

    /// End the group, for what its user found out: nothing is taken in any more, and nothing sent.
    pub fn freeze(&mut self) {
        self.close();
    }

    /// Return the first operation that ends behind chunk `cut`, or the one that is posted next.
    pub fn first_behind(&self, cut: u64) -> OpId {
        self.ops.in_flight().find(|op| op.end() > cut).map_or(self.ops.next_id(), |op| op.id)
    }

    /// Return how many chunks an operation has that goes through the tree.
    pub fn chunks(&self, desc: &OpDesc) -> u64 {
        self.ops.chunks(desc)
    }

    /// Return where the endpoint stands.
    pub fn progress(&self) -> Progress {
        let (mut kept, mut kept_bytes) = (0, 0);
        for operation in self.ops.kept() {
            kept += 1;
            kept_bytes += operation.len_bytes();
        }
        Progress {
            posted: self.ops.next_id().0,
            sent: self.next,
            kept,
            kept_bytes,
            is_ending: self.ending.is_some() && self.failed.is_none(),
            replies: self.replies.len(),
            again: self.again.len(),
        }
    }
}

/// Where an endpoint stands, and how long its queues are.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Progress {
    /// Operations posted.
    pub posted: u64,
    /// Chunks sent at least once.
    pub sent: u64,
    /// Operations that have returned and are kept.
    pub kept: usize,
    /// What is kept of them.
    pub kept_bytes: usize,
    /// The tree ends, and chunks before its end are still open.
    pub is_ending: bool,
    /// Headers to be sent.
    pub replies: usize,
    /// Chunks to be sent again.
    pub again: usize,
}

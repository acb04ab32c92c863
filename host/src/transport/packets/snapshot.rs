//! State of an endpoint, without counters and times: for exhaustive searches over the states of a group. With the
//! feature `snapshot` endpoints can be copied, compared and hashed.

use super::{Endpoint, EndpointStats, OpId};
use sumac_hal::ids::ChunkNo;
use sumac_hal::op::OpDesc;
use sumac_hal::shard::Shard;
use sumac_hal::uplink::Uplink;

impl Endpoint {
    /// Reset counters and times, as at the instant [`Uplink::RESUME_AT`].
    ///
    /// # Panics
    /// If anything is waiting to be sent.
    pub fn rest(&mut self) {
        assert!(self.poll_destination().is_none(), "not at rest");
        self.stats = EndpointStats::default();
        self.hops.iter_mut().for_each(Uplink::forget_time);
        self.ops.forget_slowest();
    }

    /// Forget outstanding probes; see [`Uplink::forget_probe`].
    pub fn forget_probes(&mut self) {
        self.hops.iter_mut().for_each(Uplink::forget_probe);
    }

    /// Drop everything retained, as if no rank could need it any more.
    pub fn forget_retained(&mut self) {
        self.ops.forget_below(u64::MAX);
    }

    /// Return whether chunk `seq` has been answered.
    pub fn holds(&self, seq: u64) -> bool {
        let index = usize::from(Shard::of(ChunkNo(seq), self.hops.len() as u16));
        self.hops[index].is_answered(self.shard(index).below(ChunkNo(seq)))
    }

    /// Close the endpoint: nothing is processed or sent any more.
    pub fn freeze(&mut self) {
        self.close();
    }

    /// Return the first operation that ends behind chunk `cut`, or the one that is posted next.
    pub fn first_behind(&self, cut: u64) -> OpId {
        self.ops.in_flight().find(|op| op.end() > cut).map_or(self.ops.next_id(), |op| op.id)
    }

    /// Return the number of chunks of an operation that goes through the tree.
    pub fn chunks(&self, desc: &OpDesc) -> u64 {
        self.ops.chunks(desc)
    }

    /// Return the progress of the endpoint.
    pub fn progress(&self) -> Progress {
        let (mut kept, mut kept_bytes) = (0, 0);
        for operation in self.ops.retained() {
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

/// Progress of an endpoint, and lengths of its queues.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Progress {
    /// Operations posted.
    pub posted: u64,
    /// Chunks sent at least once.
    pub sent: u64,
    /// Completed operations that are retained.
    pub kept: usize,
    /// Bytes retained of them.
    pub kept_bytes: usize,
    /// The tree has reported an error, and chunks below it are open.
    pub is_ending: bool,
    /// Packets without payload to send.
    pub replies: usize,
    /// Chunks to retransmit.
    pub again: usize,
}

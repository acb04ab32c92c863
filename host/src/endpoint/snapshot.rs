//! An endpoint without what says only what was: for searches over all states of a group. Under the feature it can be
//! copied, compared and hashed.

use super::{Endpoint, EndpointStats};
use sumac_hal::ids::ChunkNo;
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

    /// Tell whether the answer to chunk `seq` is here.
    pub fn holds(&self, seq: u64) -> bool {
        let index = usize::from(Shard::of(ChunkNo(seq), self.hops.len() as u16));
        self.hops[index].is_answered(self.shard(index).below(ChunkNo(seq)))
    }
}

//! Chooses chunk and window of a group: the largest that all ports and the available resources allow.

use super::{PlacedNode, Placement, PlacementRequest};
use crate::controller::resources::{Available, ResourceLedger};
use crate::controller::{ControllerConfig, WINDOW_MIN};
use std::time::Duration;
use sumac_hal::ctrl::Order;
use sumac_hal::uplink::MAX_WINDOW;
use sumac_hal::wire::{PACKET_LIMIT_MIN, SHORT_HEADER_LEN};

/// How long a window may take over the busiest cable of its tree, where a job has several trees. A rank fills the
/// windows of one tree after the other, and a chunk is complete once its last rank has come to that tree: until then
/// the device sends nothing. Longer than any round trip, with time for a busy host to run each process.
const WINDOW_DRAIN: Duration = Duration::from_millis(4);

/// The smallest window of each of several trees, in chunks.
const WINDOW_MIN_OF_TREES: u16 = WINDOW_MIN / 2;

/// The memory that one slot of a group takes on a device, in bytes.
#[derive(Debug, Clone, Copy)]
struct SlotCost {
    memory_bytes: u64,
    redo_memory_bytes: u64,
}

impl SlotCost {
    fn on(node: &PlacedNode, order: Order, chunk: u32) -> Self {
        let redo = redo_slot_len_bytes(order, node.children, chunk);
        Self {
            memory_bytes: order.stages(node.children) as u64 * u64::from(chunk),
            redo_memory_bytes: if node.zero_copy.is_empty() { 0 } else { redo },
        }
    }
}

impl SlotCost {
    /// Whether `slots` slots fit into what is available.
    fn fits(&self, slots: u64, available: &Available) -> bool {
        slots <= available.slots
            && slots * self.memory_bytes <= available.memory_bytes
            && slots * self.redo_memory_bytes <= available.redo_memory_bytes
            && slots * (self.memory_bytes + self.redo_memory_bytes) <= available.quota_memory_bytes
    }
}

/// The redo memory of a slot: a header of one cache line, the accumulators, and one chunk for contributions that cannot
/// be combined in place. Pairwise order takes one accumulator per level of pairs.
fn redo_slot_len_bytes(order: Order, children: u16, chunk: u32) -> u64 {
    let accumulators = match order {
        Order::TreePairwise if children > 2 => (children - 1).ilog2() + 1,
        _ => 1,
    };
    64 + u64::from(1 + accumulators) * u64::from(chunk)
}

impl Placement {
    /// Choose chunk and window, and switch leaves without memory for redo slots to packets.
    pub(super) fn size(
        &mut self,
        config: &ControllerConfig,
        ledger: &ResourceLedger,
        request: PlacementRequest<'_>,
    ) -> Result<(), String> {
        let requests = request.requests;
        let available = |node: &PlacedNode| ledger.available(request.tenant, &node.device.key());
        let mut chunk = self.chunk_len(config, request)?;
        if let Some(node) = self.nodes.iter().find(|node| node.shards() == 0) {
            return Err(format!("device {} announces no shard", node.device.name()));
        }
        let order = requests[0].order;
        for index in 0..self.nodes.len() {
            let node = &self.nodes[index];
            let (available, slot) = (available(node), SlotCost::on(node, order, chunk));
            let least = node.slots_for(1);
            let need = least * slot.redo_memory_bytes;
            let most =
                available.redo_memory_bytes.min(available.quota_memory_bytes.saturating_sub(least * slot.memory_bytes));
            if need > most {
                let why = format!(
                    "the device has {most} bytes of redo memory free; a window of one chunk of {chunk} bytes needs \
                     {need}"
                );
                self.fall_back_to_packets(index, requests, &why)?;
                // Packets carry the chunks from now on. The chunk does not grow for leaves that were already checked: a
                // tree of several leaves is limited to packets anyway.
                chunk = self.chunk_len(config, request)?;
            }
        }
        // Zero-copy on one device needs few slots, which stay in its caches; packets must fill a network.
        let mut window = match self.all_zero_copy() && self.nodes.len() == 1 {
            true => u64::from(config.zero_copy_window_chunks).clamp(1, MAX_WINDOW),
            false => self.packet_window(config, request.trees, chunk),
        };
        for node in &self.nodes {
            let (available, slot) = (available(node), SlotCost::on(node, order, chunk));
            while window > 0 && !slot.fits(node.slots_for(window), &available) {
                window /= 2;
            }
            if window == 0 || available.groups == 0 {
                return Err(format!(
                    "device {} has {} slots and {} bytes of slot memory free; a window of one chunk of {chunk} bytes \
                     from {} children needs more",
                    node.device.name(),
                    available.slots,
                    available.memory_bytes,
                    node.children
                ));
            }
        }
        self.window_max = window as u16;
        self.chunk_len_bytes = chunk as u16;
        for node in &mut self.nodes {
            let slot = SlotCost::on(node, order, chunk);
            let slots = node.slots_for(window);
            node.slots = slots as u16;
            node.memory_bytes = slots * slot.memory_bytes;
            node.redo_memory_bytes = slots * slot.redo_memory_bytes;
        }
        Ok(())
    }

    /// The window of ranks or devices that send packets, in chunks.
    fn packet_window(&self, config: &ControllerConfig, trees: usize, chunk: u32) -> u64 {
        let (bytes, min) = match trees {
            0 | 1 => (u64::from(config.window_bytes), WINDOW_MIN),
            trees => {
                let drained = self.links.map_or(u64::MAX, |links| links.tree_bytes_in(WINDOW_DRAIN));
                ((u64::from(config.window_bytes) / trees as u64).min(drained), WINDOW_MIN_OF_TREES)
            }
        };
        (bytes / u64::from(chunk)).clamp(u64::from(min), MAX_WINDOW)
    }

    /// The largest chunk that all ports and paths allow, in whole cache lines if zero-copy is used.
    fn chunk_len(&self, config: &ControllerConfig, request: PlacementRequest<'_>) -> Result<u32, String> {
        let devices = self.nodes.iter().map(|node| node.device.announce.capabilities.max_packet_len_bytes);
        let ranks = request.requests.iter().map(|request| request.max_packet_len_bytes);
        let longest = devices.chain(ranks).min().unwrap_or(0).min(self.narrowest(request.narrow));
        let on_one_device = self.all_zero_copy() && self.nodes.len() == 1;
        let most = if on_one_device { config.zero_copy_chunk_max_bytes } else { config.chunk_max_bytes };
        let multiple = if self.zero_copy_ranks() > 0 { 64 } else { 16 };
        let chunk = longest.saturating_sub(SHORT_HEADER_LEN as u32).min(u32::from(most)) / multiple * multiple;
        if chunk < 64 || longest < PACKET_LIMIT_MIN as u32 {
            return Err(format!("the shortest packet limit in the tree, {longest} bytes, is too short for a chunk"));
        }
        Ok(chunk)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Must match the layout in `sumac_device`'s node.
    #[test]
    fn redo_slot_has_a_header_its_accumulators_and_one_more_chunk() {
        let chunks = |order, children| (redo_slot_len_bytes(order, children, 1024) - 64) / 1024 - 1;
        assert_eq!([1, 2, 3, 4, 5, 256].map(|children| chunks(Order::TreePairwise, children)), [1, 1, 2, 2, 3, 8]);
        assert_eq!([1, 3, 256].map(|children| chunks(Order::TreeFold, children)), [1; 3]);
        assert_eq!([1, 3, 256].map(|children| chunks(Order::Arrival, children)), [1; 3]);
    }
}

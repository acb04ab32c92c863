//! How large chunk and window of a group are: the largest that all ports, and what is free on all devices, allow.

use super::{Asking, PlacedNode, Placement};
use crate::controller::books::{Books, Left};
use crate::controller::proto::JoinRequest;
use crate::controller::{ControllerConfig, WINDOW_MIN};
use sumac_hal::ctrl::Order;
use sumac_hal::shard::Shard;
use sumac_hal::uplink::MAX_WINDOW;
use sumac_hal::wire::HEADER_LEN;

/// What a slot of a group takes on a device, in bytes.
#[derive(Debug, Clone, Copy)]
struct Slot {
    memory_bytes: u64,
    redo_memory_bytes: u64,
}

impl Slot {
    fn on(node: &PlacedNode, order: Order, chunk: u32) -> Self {
        let redo = redo_slot_len_bytes(order, node.children, chunk);
        Self {
            memory_bytes: order.stages(node.children) as u64 * u64::from(chunk),
            redo_memory_bytes: if node.by_reference.is_empty() { 0 } else { redo },
        }
    }
}

impl Slot {
    /// Tell whether so many fit into what is left.
    fn fits(&self, slots: u64, left: &Left) -> bool {
        slots <= left.slots
            && slots * self.memory_bytes <= left.memory_bytes
            && slots * self.redo_memory_bytes <= left.redo_memory_bytes
            && slots * (self.memory_bytes + self.redo_memory_bytes) <= left.quota_memory_bytes
    }
}

/// Return how much redo memory a slot takes: a head of a cache line, the accumulators, and one chunk for what can't be
/// combined where it is. Contributions that combine pairwise take an accumulator a level of the pairs.
fn redo_slot_len_bytes(order: Order, children: u16, chunk: u32) -> u64 {
    let accumulators = match order {
        Order::TreePairwise if children > 2 => (children - 1).ilog2() + 1,
        _ => 1,
    };
    64 + u64::from(1 + accumulators) * u64::from(chunk)
}

impl Placement {
    /// Choose chunk and window, and let leaves without room for redo slots take packets.
    pub(super) fn size(&mut self, config: &ControllerConfig, books: &Books, asking: Asking<'_>) -> Result<(), String> {
        let requests = asking.requests;
        let left = |node: &PlacedNode| books.left(asking.tenant, &node.device.key());
        let mut chunk = self.chunk_len(config, requests)?;
        let shard = Shard::new(0, self.nodes[0].device.announce.data_addrs.len() as u16);
        let shard = shard.ok_or_else(|| format!("device {} has no shard", self.nodes[0].device.name()))?;
        let slots = |window: u64| 2 * shard.most_within(window);
        let order = requests[0].order;
        for index in 0..self.nodes.len() {
            let node = &self.nodes[index];
            let (left, slot) = (left(node), Slot::on(node, order, chunk));
            let need = slots(1) * slot.redo_memory_bytes;
            let most = left.redo_memory_bytes.min(left.quota_memory_bytes.saturating_sub(slots(1) * slot.memory_bytes));
            if need > most {
                let why = format!(
                    "the device has {most} bytes of memory for redo slots free, and a window of one chunk of {chunk} bytes \
                     takes {need}"
                );
                self.turn_inline(index, requests, &why)?;
                // Packets carry chunks from now on. Those of leaves that were looked at do not grow: several leaves have
                // what packets carry anyway.
                chunk = self.chunk_len(config, requests)?;
            }
        }
        // What a device moves by itself needs few slots, which stay in its caches; packets fill a network.
        let mut window = match self.all_by_reference() && self.nodes.len() == 1 {
            true => u64::from(config.reference_window_chunks).clamp(1, MAX_WINDOW),
            false => u64::from(config.window_bytes / chunk).clamp(u64::from(WINDOW_MIN), MAX_WINDOW),
        };
        for node in &self.nodes {
            let (left, slot) = (left(node), Slot::on(node, order, chunk));
            while window > 0 && !slot.fits(slots(window), &left) {
                window /= 2;
            }
            if window == 0 || left.groups == 0 {
                return Err(format!(
                    "device {} has {} slots and {} bytes of slot memory free, too little for a window of one chunk of \
                     {chunk} bytes from {} children",
                    node.device.name(),
                    left.slots,
                    left.memory_bytes,
                    node.children
                ));
            }
        }
        self.window_max = window as u16;
        self.slots = slots(window) as u16;
        self.chunk_len_bytes = chunk as u16;
        for node in &mut self.nodes {
            let slot = Slot::on(node, order, chunk);
            node.memory_bytes = u64::from(self.slots) * slot.memory_bytes;
            node.redo_memory_bytes = u64::from(self.slots) * slot.redo_memory_bytes;
        }
        Ok(())
    }

    /// Return the largest chunk that all ports take: in whole cache lines if an engine moves it.
    fn chunk_len(&self, config: &ControllerConfig, requests: &[&JoinRequest]) -> Result<u32, String> {
        let devices = self.nodes.iter().map(|node| node.device.announce.capabilities.max_packet_len_bytes);
        let longest = devices.chain(requests.iter().map(|request| request.max_packet_len_bytes)).min().unwrap_or(0);
        let on_one_device = self.all_by_reference() && self.nodes.len() == 1;
        let most = if on_one_device { config.reference_chunk_max_bytes } else { config.chunk_max_bytes };
        let multiple = if self.ranks_by_reference() > 0 { 64 } else { 16 };
        let chunk = longest.saturating_sub(HEADER_LEN as u32).min(u32::from(most)) / multiple * multiple;
        if chunk < 64 {
            return Err(format!("the shortest packet on the way, {longest} bytes, leaves no room for a chunk"));
        }
        Ok(chunk)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The numbers of `sumac_device`'s node, which lays the slots out.
    #[test]
    fn a_redo_slot_has_a_head_the_accumulators_and_one_more_chunk() {
        let chunks = |order, children| (redo_slot_len_bytes(order, children, 1024) - 64) / 1024 - 1;
        assert_eq!([1, 2, 3, 4, 5, 256].map(|children| chunks(Order::TreePairwise, children)), [1, 1, 2, 2, 3, 8]);
        assert_eq!([1, 3, 256].map(|children| chunks(Order::TreeFold, children)), [1; 3]);
        assert_eq!([1, 3, 256].map(|children| chunks(Order::Arrival, children)), [1; 3]);
    }
}

//! The longest packet that a hop carries (PROTOCOL 12). Towards its parent a node searches for it when the controller
//! asks, and again when the hop stalls; its children search for themselves, and it answers their probes.
//!
//! A probe that asks about no seqs (`count` 0) is about the path. Its Status is as long as the probe, so nobody gets
//! more than was sent. Padding is the memory of the group's first slot: zeros, or what this group has put there.

use super::transmit::Payload;
use super::{GroupCtx, Node};
use crate::node::group::{Failure, Parent};
use sumac_hal::ctrl::{DropReason, Refusal};
use sumac_hal::driver::Transmit;
use sumac_hal::ids::{ChunkNo, GroupId};
use sumac_hal::path_mtu::PathSearch;
use sumac_hal::planted;
use sumac_hal::port::Addr;
use sumac_hal::time::Instant;
use sumac_hal::wire::{HEADER_LEN, Kind, NakReason, Repr, packet_len_max, payload_crc};

impl Node<'_> {
    /// Return the longest packet that the path to the group's parent carries, in bytes; `None` while it is not known.
    /// The first call begins the search. At the root, which has no parent, it is what the group needs.
    pub(super) fn probe_path(&mut self, id: GroupId, now: Instant) -> Result<Option<u32>, Refusal> {
        let index = self.find(id).ok_or(Refusal::NoGroup(id))?;
        let Some(group) = &mut self.storage.groups[index] else { return Err(Refusal::NoGroup(id)) };
        let longest = packet_len_max(group.config.chunk_len_bytes);
        let Some(parent) = &mut group.parent else { return Ok(Some(longest as u32)) };
        // The token differs from those of contributions, and from those of probes about seqs.
        let search = parent.path.get_or_insert_with(|| PathSearch::new(longest, group.token ^ 1 << 30, now));
        Ok(search.result().map(|len| len as u32))
    }

    /// Return a reply, padded to the length of its payload with memory of its group.
    pub(super) fn padded(&self, to: Addr, mut repr: Repr) -> Transmit<Payload> {
        let len = usize::from(repr.payload_len_bytes);
        let group = self.find(repr.group).and_then(|index| self.storage.groups[index].as_ref());
        let bytes = group.map_or(0..0, |group| group.bytes.range());
        let range = bytes.start..bytes.end.min(bytes.start + len);
        repr.payload_len_bytes = range.len() as u16;
        let header = repr.header(payload_crc(&self.storage.bytes[range.clone()]));
        Transmit { to, header, payload: Payload::Slots(range) }
    }
}

impl GroupCtx<'_> {
    /// Answer a child's probe about the path with a Status of the same length.
    pub(super) fn on_path_probe(&mut self, child: usize, repr: &Repr) {
        self.common.counters.probes_in += 1;
        let Some(to) = self.children[child].addr else { return };
        if repr.payload_len_bytes > self.group.config.chunk_len_bytes {
            return self.common.drop_packet(DropReason::BadShape);
        }
        let status = self.down_header(Kind::Status, child, repr.seq, repr.token);
        let is_amplified = planted!(self.common, PathAnswerAmplified);
        let longest = (packet_len_max(self.group.config.chunk_len_bytes) - HEADER_LEN) as u16;
        let payload_len_bytes = if is_amplified { longest } else { repr.payload_len_bytes };
        self.common.reply(to, Repr { count: 0, payload_len_bytes, ..status });
    }

    /// Handle the parent's answer to a probe about the path.
    pub(super) fn on_path_status(&mut self, repr: &Repr, now: Instant) {
        let search = self.group.parent.as_mut().and_then(|parent| parent.path.as_mut());
        let longest = packet_len_max(self.group.config.chunk_len_bytes);
        let len = if planted!(self.common, ShortAnswerAccepted) { longest } else { repr.packet_len() };
        if !search.is_some_and(|search| search.on_reply(repr.token, len, now)) {
            return self.common.drop_packet(DropReason::Unexpected);
        }
        self.poll_path(now);
    }

    /// Send the probes about the path to the parent that are due.
    pub(super) fn poll_path(&mut self, now: Instant) {
        while let Some(Parent { path: Some(path), .. }) = &mut self.group.parent {
            let Some(probe) = path.poll(now) else { return self.check_path(now) };
            self.common.counters.probes_out += 1;
            let payload_len_bytes = (probe.len_bytes - HEADER_LEN) as u16;
            let header = self.up_header(Kind::Probe, ChunkNo(0), probe.token);
            self.send_up(Repr { count: 0, payload_len_bytes, ..header });
        }
    }

    /// Fail the group if the path to the parent has become too narrow for its packets.
    fn check_path(&mut self, now: Instant) {
        let shard = self.shard();
        let Some(Parent { path: Some(path), hop, .. }) = &self.group.parent else { return };
        if planted!(self.common, NarrowingUnreported) {
            return;
        }
        if path.is_narrow() && hop.in_flight() && self.group.failed.is_none() {
            let from = shard.global(hop.answered_below());
            self.fail(Failure { from, reason: NakReason::PathLost, ops: None }, now);
        }
    }
}

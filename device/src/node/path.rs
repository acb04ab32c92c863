//! The longest packet that a hop carries (PROTOCOL 12). Towards its parent a node searches for it when the controller
//! asks, and again when the hop stalls; its children search for themselves, and it answers their probes.
//!
//! A probe that asks about no seqs (`count` 0) is about the path. Its Status is as long as the probe, so nobody gets
//! more than was sent. Padding is the memory of the group's first slot: zeros, or what this group has put there.

use super::transmit::Payload;
use super::{GroupCtx, Hop, Node};
use crate::node::group::Failure;
use sumac_hal::ctrl::{DropReason, Refusal};
use sumac_hal::driver::Transmit;
use sumac_hal::ids::GroupId;
use sumac_hal::path_mtu::PathSearch;
use sumac_hal::planted;
use sumac_hal::port::Addr;
use sumac_hal::time::Instant;
use sumac_hal::wire::{HEADER_LEN, Kind, NakReason, Repr, packet_len_max, payload_crc};

impl Node<'_> {
    /// Return the longest packet that the paths to the shards of the group's parent carry, in bytes; `None` while it is
    /// not known. The first call begins the search. At the root, which has no parent, it is what the group needs.
    pub(super) fn probe_path(&mut self, id: GroupId, now: Instant) -> Result<Option<u32>, Refusal> {
        let index = self.find(id).ok_or(Refusal::NoGroup(id))?;
        let Some(group) = &self.storage.groups[index] else { return Err(Refusal::NoGroup(id)) };
        let longest = packet_len_max(group.config.chunk_len_bytes);
        let mut narrowest = Some(longest);
        for (index, hop) in (0..).zip(&mut self.storage.hops[group.hops().range()]) {
            // The token differs from those of contributions, and from those of probes about seqs.
            let salt = group.token.rotate_left(index) ^ 1 << 30;
            let search = hop.path.get_or_insert_with(|| PathSearch::new(longest, salt, now));
            narrowest = search.result().zip(narrowest).map(|(here, others)| here.min(others));
        }
        Ok(narrowest.map(|len| len as u32))
    }

    /// Return a reply, padded to the length of its payload with memory of its group.
    pub(super) fn padded(&self, to: Addr, mut repr: Repr) -> Transmit<Payload> {
        let len = usize::from(repr.payload_len_bytes);
        let group = self.find(repr.group).and_then(|index| self.storage.groups[index].as_ref());
        let bytes = group.map_or(0..0, |group| group.bytes.range());
        let range = bytes.start..bytes.end.min(bytes.start + len);
        repr.payload_len_bytes = range.len() as u16;
        let header = repr.header(payload_crc(&self.storage.bytes[range.clone()]));
        Transmit { to, header, payload: Payload::Slots { start: range.start, len: range.len() } }
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
    pub(super) fn on_path_status(&mut self, hop: usize, repr: &Repr, now: Instant) {
        let search = self.hops[hop].path.as_mut();
        let longest = packet_len_max(self.group.config.chunk_len_bytes);
        let len = if planted!(self.common, ShortAnswerAccepted) { longest } else { repr.packet_len() };
        if !search.is_some_and(|search| search.on_reply(repr.token, len, now)) {
            return self.common.drop_packet(DropReason::Unexpected);
        }
        self.poll_path(hop, now);
    }

    /// Send the probes about the path of a hop to the parent that are due.
    pub(super) fn poll_path(&mut self, hop: usize, now: Instant) {
        while let Hop { path: Some(path), shard, .. } = &mut self.hops[hop] {
            // The answer names a seq of its shard, as every packet does.
            let first = shard.global(0);
            let Some(probe) = path.poll(now) else { return self.check_path(hop, now) };
            self.common.counters.probes_out += 1;
            let payload_len_bytes = (probe.len_bytes - HEADER_LEN) as u16;
            let header = self.up_header(Kind::Probe, first, probe.token);
            self.send_up(hop, Repr { count: 0, payload_len_bytes, ..header });
        }
    }

    /// Fail the group if the path to the parent has become too narrow for its packets.
    fn check_path(&mut self, hop: usize, now: Instant) {
        let Hop { path: Some(path), link, shard, .. } = &self.hops[hop] else { return };
        if planted!(self.common, NarrowingUnreported) {
            return;
        }
        if path.is_narrow() && link.in_flight() && self.group.failed.is_none() {
            let from = shard.global(link.answered_below());
            self.fail(Failure { from, reason: NakReason::PathLost, ops: None }, now);
        }
    }
}

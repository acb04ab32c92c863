//! A node's packets: to which group and link each belongs, and what becomes of those that belong to none.

use super::Node;
use super::train::Admitted;
use core::time::Duration;
use sumac_hal::ctrl::DropReason;
use sumac_hal::planted;
use sumac_hal::port::{Addr, Ecn};
use sumac_hal::time::Instant;
use sumac_hal::wire::{Flags, HEADER_LEN, Kind, Lead, NakReason, Packet, Repr, WireError};

/// Maximum number of Naks per millisecond to packets of an unknown group or another epoch.
const UNKNOWN_SENDER_NAKS_PER_MS: u8 = 16;

impl Node<'_> {
    /// Handle a packet that arrived at `now` from `from`. For one with a congestion mark, the group's window is cut as
    /// for a loss (PROTOCOL 3): here, or by the parent if the packet came from there.
    pub fn handle(&mut self, now: Instant, from: Addr, ecn: Ecn, packet: &[u8]) {
        // Nothing follows.
        let _ = self.handle_first(now, from, ecn, packet, false);
    }

    /// Handle packets that arrived together from `from`, with the same mark, as if [`Node::handle`] got each in turn.
    /// Consecutive chunks of one child are admitted once: link, group, epoch and operation are those of the first.
    pub fn handle_train<'p>(
        &mut self,
        now: Instant,
        from: Addr,
        ecn: Ecn,
        packets: impl IntoIterator<Item = &'p [u8]>,
    ) {
        let mut packets = packets.into_iter().peekable();
        while let Some(packet) = packets.next() {
            let Some(mut admitted) = self.handle_first(now, from, ecn, packet, true) else { continue };
            let Some(mut ctx) = self.group_ctx(admitted.group) else { continue };
            let (mut count, mut bytes) = (0, 0);
            while let Some(packet) = packets.next_if(|packet| admitted.lead.leads(packet)) {
                (count, bytes) = (count + 1, bytes + packet.len() as u64);
                ctx.handle_next(&mut admitted, packet, now);
            }
            ctx.common.note_received(count, bytes, ecn);
        }
    }

    /// Handle a packet. Returns what packets behind it need not be checked for, if a child was admitted with it.
    #[inline]
    fn handle_first(&mut self, now: Instant, from: Addr, ecn: Ecn, packet: &[u8], in_train: bool) -> Option<Admitted> {
        let bytes = packet;
        self.common.note_received(1, packet.len() as u64, ecn);
        let (packet, payload_crc) = match Packet::new_checked_with_crc(packet) {
            Ok(checked) => checked,
            Err(error) => {
                let is_version = matches!(error, WireError::Version { .. });
                self.common.drop_packet(if is_version { DropReason::WrongVersion } else { DropReason::Malformed });
                return None;
            }
        };
        let Ok(mut repr) = Repr::parse(&packet) else {
            self.common.drop_packet(DropReason::Malformed);
            return None;
        };
        if ecn.is_ce() {
            repr.flags |= Flags::CONGESTED;
        }
        let Some(index) = self.find(repr.group) else {
            self.common.drop_packet(DropReason::UnknownGroup);
            self.nak_unknown_sender(from, &repr, NakReason::UnknownGroup, now);
            return None;
        };
        let mut ctx = self.group_ctx(index)?;
        if repr.epoch != ctx.group.config.epoch && !planted!(ctx.common, EpochUnchecked) {
            ctx.common.drop_packet(DropReason::WrongEpoch);
            self.nak_unknown_sender(from, &repr, NakReason::WrongEpoch, now);
            return None;
        }
        let mut child = None;
        if let Some(hop) = ctx.hop_from(from, &repr) {
            ctx.handle_parent(hop, &repr, packet.payload(), payload_crc, now);
        } else {
            child = ctx.handle_child(from, &repr, packet.payload(), now, in_train);
        }
        ctx.note_output();
        let (child, usual) = child.filter(|_| repr.kind == Kind::Data)?;
        Some(Admitted { group: index, child, lead: Lead::new(bytes, &repr)?, usual })
    }

    /// Tell the sender of an upward packet why it was not accepted. Nothing in the packet is authenticated, so the
    /// reply is a header that echoes what the sender can recognise, no longer than the packet, and replies are rate
    /// limited.
    fn nak_unknown_sender(&mut self, to: Addr, repr: &Repr, reason: NakReason, now: Instant) {
        let is_up = matches!(repr.kind, Kind::Data | Kind::Ref | Kind::Empty | Kind::Probe | Kind::Operation);
        if !is_up || repr.packet_len() < HEADER_LEN {
            return;
        }
        if now >= self.unknown_sender_refill_at {
            self.unknown_sender_naks = UNKNOWN_SENDER_NAKS_PER_MS;
            self.unknown_sender_refill_at = now + Duration::from_millis(1);
        }
        let Some(left) = self.unknown_sender_naks.checked_sub(1) else { return };
        self.unknown_sender_naks = left;
        let nak = Repr {
            reason: Some(reason),
            seq: repr.seq,
            count: repr.count,
            token: repr.token,
            ..Repr::new(Kind::Nak, repr.group, repr.epoch, repr.child, repr.key)
        };
        self.common.reply(to, nak);
    }
}

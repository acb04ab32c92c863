//! The sans-I/O core of a device: packets and time in; packets, events and deadlines out.
//!
//! One [`Node`] is one shard. It owns its tables, so two nodes need no lock. Drive it with five calls:
//! [`Node::handle`], [`Node::handle_timeout`], [`Node::poll_transmit`], [`Node::poll_timeout`] and
//! [`Node::poll_event`]. After either of the first two, call `poll_transmit` until it returns `None`. Control requests
//! go to [`Node::control`].
//!
//! Where the rules of PROTOCOL are implemented: `child.rs` (contributions and probes: sections 1 to 3), `parent.rs`
//! (answers, and the link to the parent), `straggler.rs` (ranks that do not arrive: section 10), `transmit.rs` (what is
//! sent next: deficit round robin over groups), `control.rs` (groups, reserved whole or not at all), `zero_copy/`
//! (children whose data a DMA engine fetches: sections 5 to 7).
//!
//! Invariants:
//! - nothing that a peer writes is trusted: each field is checked before use, and invalid packets are dropped and
//!   counted by [`DropReason`]; no packet can panic a node;
//! - the work of each call is bounded: by the window for a packet, by the tables for a timeout;
//! - every queue has a limit; what does not fit is dropped, counted, and requested again by its owner.
//!
//! Three rules go beyond PROTOCOL 3. All were found by measuring goodput (`tests/goodput.rs`): without them it falls to
//! a hundredth at 1 % loss.
//! - Nodes and ranks repeat a request that is still unanswered after a part of a window has arrived behind it.
//!   Otherwise a second loss of the same chunk would wait for a probe.
//! - Losses cut the window only if they are at least one in sixteen of what all children send in a window. Fewer are
//!   random; congestion drops many packets at once, and marks packets where it can.
//! - A child that misses an answer names the highest answer that it has. If later answers were sent first, the answer
//!   was late, not lost, and is not resent.
//!
//! One rule goes beyond PROTOCOL 10's "replies are never larger than the request": a lost Result is resent to a child
//! that asks with a header-sized Probe or Nak. The child is authenticated by key, pinned to its address, and has credit
//! for each contribution and probe of its own. So a node cannot be made to amplify traffic towards others, and sends
//! about as many results as it received contributions.

mod child;
mod control;
mod group;
mod memory;
mod parent;
#[cfg(feature = "snapshot")]
mod snapshot;
mod straggler;
#[cfg(test)]
mod tests;
mod transmit;
mod zero_copy;

pub use group::{Child, Group};
pub use memory::{Memory, Storage};
#[cfg(feature = "snapshot")]
pub use snapshot::{NodeSnapshot, Phase};
pub(crate) use straggler::View;
pub(crate) use zero_copy::ZeroCopyGroup;
pub use zero_copy::{Answer, AttachError, BufferRef, RedoSlot, ZeroCopyStorage};

use crate::order::Stages;
use crate::sets::MAX_SLOTS;
use crate::slot::{Slot, State};
use crate::trace::{Trace, TraceRing};
use core::ops::Range;
use core::time::Duration;
use group::Failure;
use heapless::Deque;
use sumac_hal::ctrl::{Counters, DropReason, TreeConfig};
use sumac_hal::ids::{BootId, ChildIndex, ChunkNo, GroupId};
use sumac_hal::op::{Collective, OpDesc};
use sumac_hal::planted;
use sumac_hal::port::Addr;
use sumac_hal::reduce::Kernel;
use sumac_hal::shard::Shard;
use sumac_hal::time::Instant;
use sumac_hal::wire::{Flags, HEADER_LEN, Kind, NakReason, Packet, RankMask, Repr, pack_op};
use zero_copy::Refs;

/// Maximum number of replies (Status, Nak, Probe) waiting to be sent.
pub const MAX_REPLIES: usize = 64;

/// Maximum number of events waiting for the board.
pub const MAX_EVENTS: usize = 16;

/// Maximum number of Naks per millisecond to packets of an unknown group or another epoch.
const UNKNOWN_SENDER_NAKS_PER_MS: u8 = 16;

/// What a board configures its node with.
#[derive(Debug, Clone, Copy)]
#[cfg_attr(feature = "snapshot", derive(PartialEq, Eq, Hash))]
pub struct NodeConfig {
    /// The shard of the device that this node is.
    pub shard: Shard,
    /// Identifies this boot of the device: differs after every restart.
    pub boot_id: BootId,
    /// Longest packet of its port, in bytes.
    pub max_packet_len_bytes: usize,
    /// Receive buffer of its port, in bytes. A group's window starts at the size with which all children together fill
    /// it.
    pub receive_buffer_bytes: usize,
}

/// A packet to send: the first `len_bytes` of the buffer given.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Transmit {
    /// Destination address.
    pub to: Addr,
    /// Length of the packet, in bytes.
    pub len_bytes: usize,
}

/// A packet to send whose payload stays in the node's memory; see [`Node::poll_outgoing`].
#[derive(Debug, Clone)]
pub struct Outgoing {
    /// Destination address.
    pub to: Addr,
    /// The packet's header.
    pub header: [u8; HEADER_LEN],
    /// Where the payload is in the node's slot memory.
    payload: Range<usize>,
    /// A rank mask sent as payload in place of that.
    mask: Option<[u8; RankMask::LEN_BYTES]>,
}

impl Outgoing {
    fn payload_len(&self) -> usize {
        self.mask.map_or(self.payload.len(), |mask| mask.len())
    }
}

/// Something that the board may log or report.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub enum Event {
    /// A group's lease expired and the group was released.
    LeaseExpired(GroupId),
    /// A group failed at a chunk.
    GroupFailed {
        /// The group.
        group: GroupId,
        /// The first chunk that has no result.
        from: ChunkNo,
        /// Why it failed.
        reason: NakReason,
    },
}

/// A header to send.
#[derive(Debug, Clone, Copy)]
struct Reply {
    to: Addr,
    repr: Repr,
    /// Sent as payload.
    mask: Option<RankMask>,
}

/// The parts of a node that all groups share.
#[derive(Debug)]
struct Common {
    config: NodeConfig,
    counters: Counters,
    trace: TraceRing,
    replies: Deque<Reply, MAX_REPLIES>,
    events: Deque<Event, MAX_EVENTS>,
    #[cfg(feature = "planted")]
    bug: Option<sumac_hal::planted::Bug>,
    /// Some group may have something to send. False only if none has, so that polling an idle node costs nothing,
    /// however large the table of groups.
    may_send: bool,
}

impl Common {
    fn drop_packet(&mut self, reason: DropReason) {
        self.counters.drop_packet(reason);
    }

    fn reply(&mut self, to: Addr, repr: Repr) {
        self.reply_with(to, repr, None);
    }

    fn reply_with(&mut self, to: Addr, repr: Repr, mask: Option<RankMask>) {
        if self.replies.push_back(Reply { to, repr, mask }).is_err() {
            self.drop_packet(DropReason::QueueFull);
        } else if repr.kind == Kind::Nak {
            self.counters.naks += 1;
        }
    }

    /// Queue an event. The oldest is dropped if the board does not collect them.
    fn event(&mut self, event: Event) {
        if self.events.is_full() {
            self.events.pop_front();
        }
        // There is room now.
        let _ = self.events.push_back(event);
    }
}

/// The sans-I/O core of one shard of a device.
///
/// - After [`Node::handle`], [`Node::handle_timeout`] or [`Node::control`], call [`Node::poll_transmit`] until it
///   returns `None`.
/// - With zero-copy children, also after [`Node::submit`] and [`Node::handle_completion`]: call [`Node::poll_dma`], then
///   [`Node::poll_answer`] and `poll_transmit` until both return `None`.
/// - Then [`Node::poll_timeout`] returns the next deadline, and [`Node::poll_event`] what the board may log.
///
/// [`runtime::poll`](crate::runtime::poll) does this for the packets of a port.
#[derive(Debug)]
pub struct Node<'m> {
    storage: Storage<'m>,
    /// Zero-copy tables, if the board supplies them.
    zero_copy: Option<ZeroCopyStorage<'m>>,
    common: Common,
    /// One past the last group entry in use, so that scans cost what is in use, not the capacity.
    groups_end: usize,
    /// The group whose turn it is to send.
    turn: usize,
    /// The group whose turn it is to use the DMA engine.
    dma_turn: usize,
    unknown_sender_naks: u8,
    unknown_sender_refill_at: Instant,
}

/// One group with its entries of all tables. Most rules are methods of this.
struct GroupCtx<'a> {
    group: &'a mut Group,
    children: &'a mut [Child],
    slots: &'a mut [Slot],
    bytes: &'a mut [u8],
    /// Zero-copy tables of the group, if it has zero-copy children.
    refs: Option<Refs<'a>>,
    common: &'a mut Common,
}

impl<'m> Node<'m> {
    /// Return a node without groups, in storage that the board supplies.
    pub fn new(config: NodeConfig, storage: Storage<'m>) -> Self {
        let common = Common {
            config,
            counters: Counters::default(),
            trace: TraceRing::new(),
            replies: Deque::new(),
            events: Deque::new(),
            #[cfg(feature = "planted")]
            bug: None,
            may_send: false,
        };
        Self {
            storage,
            zero_copy: None,
            common,
            groups_end: 0,
            turn: 0,
            dma_turn: 0,
            unknown_sender_naks: 0,
            unknown_sender_refill_at: Instant::ZERO,
        }
    }

    /// Plant a bug in this node.
    #[cfg(feature = "planted")]
    pub fn plant(&mut self, bug: sumac_hal::planted::Bug) {
        self.common.bug = Some(bug);
    }

    /// Handle a packet that arrived at `now` from `from`.
    pub fn handle(&mut self, from: Addr, packet: &[u8], now: Instant) {
        self.on_packet(from, packet, Flags::empty(), now);
    }

    /// Handle a packet that the network marked for congestion (ECN CE). The group's window is cut as for a loss
    /// (PROTOCOL 3): here, or by the parent if the packet came from there.
    pub fn handle_marked(&mut self, from: Addr, packet: &[u8], now: Instant) {
        self.on_packet(from, packet, Flags::CONGESTED, now);
    }

    fn on_packet(&mut self, from: Addr, packet: &[u8], met: Flags, now: Instant) {
        self.common.counters.packets_in += 1;
        self.common.counters.bytes_in += packet.len() as u64;
        let Ok((packet, payload_crc)) = Packet::new_checked_with_crc(packet) else {
            return self.common.drop_packet(DropReason::Malformed);
        };
        let Ok(mut repr) = Repr::parse(&packet) else {
            return self.common.drop_packet(DropReason::Malformed);
        };
        repr.flags |= met;
        let Some(index) = self.find(repr.group) else {
            self.common.drop_packet(DropReason::UnknownGroup);
            return self.nak_unknown_sender(from, &repr, NakReason::UnknownGroup, now);
        };
        let Some(mut ctx) = self.group_ctx(index) else { return };
        if repr.epoch != ctx.group.config.epoch && !planted!(ctx.common, EpochUnchecked) {
            ctx.common.drop_packet(DropReason::WrongEpoch);
            return self.nak_unknown_sender(from, &repr, NakReason::WrongEpoch, now);
        }
        if ctx.is_parent(from, &repr) || ctx.is_shared(from, &repr) {
            ctx.handle_parent(&repr, packet.payload(), payload_crc, now);
        } else {
            ctx.handle_child(from, &repr, packet.payload(), now);
        }
        ctx.note_output();
    }

    /// Handle expired timers: probes, dead hops, leases, straggler limits.
    pub fn handle_timeout(&mut self, now: Instant) {
        for index in 0..self.groups_end {
            let Some(mut ctx) = self.group_ctx(index).filter(|ctx| !ctx.group.is_closing()) else { continue };
            if now >= ctx.group.lease_until {
                let id = ctx.group.config.group;
                ctx.common.counters.leases_expired += 1;
                ctx.common.trace.record(now, Trace::LeaseExpired(id));
                ctx.common.event(Event::LeaseExpired(id));
                if !(planted!(ctx.common, LeaseLeak) && ctx.group.failed.is_some()) {
                    self.close_group(index);
                }
            } else {
                ctx.poll_parent(now);
                ctx.poll_stragglers(now);
                ctx.note_output();
            }
        }
    }

    /// Return the destination of the next packet, for ports that need it before the packet is written. Sends nothing:
    /// the next [`Node::poll_transmit`] writes that packet, unless something was handled in between.
    pub fn poll_destination(&mut self) -> Option<Addr> {
        if let Some(reply) = self.common.replies.front() {
            return Some(reply.to);
        }
        let turn = self.take_turn()?;
        self.group_ctx(turn)?.destination()
    }

    /// Write the next packet to `buffer`, which has room for the port's longest; `None` if there is none.
    ///
    /// Call it after each `handle` and `handle_timeout` until it returns `None`, or until the port is full; then
    /// continue later.
    pub fn poll_transmit(&mut self, buffer: &mut [u8], now: Instant) -> Option<Transmit> {
        let out = self.poll_outgoing(now)?;
        let payload = self.payload(&out);
        buffer[..HEADER_LEN].copy_from_slice(&out.header);
        buffer[HEADER_LEN..][..payload.len()].copy_from_slice(payload);
        Some(Transmit { to: out.to, len_bytes: HEADER_LEN + payload.len() })
    }

    /// Return the next packet without copying its payload, for ports that gather. [`Node::payload`] returns the
    /// payload, which stays valid until the next `handle`, `handle_timeout` or `control`. The packet counts as sent.
    pub fn poll_outgoing(&mut self, now: Instant) -> Option<Outgoing> {
        let out = self.next_reply().or_else(|| self.next_in_turn(now))?;
        self.common.counters.packets_out += 1;
        self.common.counters.bytes_out += (HEADER_LEN + out.payload_len()) as u64;
        Some(out)
    }

    /// Return the payload of a packet that [`Node::poll_outgoing`] has just returned.
    pub fn payload<'a>(&'a self, out: &'a Outgoing) -> &'a [u8] {
        out.mask.as_ref().map_or_else(|| &self.storage.bytes[out.payload.clone()], |mask| &mask[..])
    }

    /// Return when to call [`Node::handle_timeout`] next if nothing arrives before; `None` if no timer is armed.
    pub fn poll_timeout(&self) -> Option<Instant> {
        let groups = self.storage.groups[..self.groups_end].iter().flatten().filter(|group| !group.is_closing());
        let shard = self.common.config.shard;
        groups
            .map(|group| {
                let hop = group.parent.as_ref().filter(|_| group.waits_for_parent(shard));
                let probe = hop.and_then(|parent| parent.hop.timeout());
                let straggler = self.straggler_timeout(group);
                [probe, straggler].into_iter().flatten().fold(group.lease_until, Instant::min)
            })
            .min()
    }

    /// Return whether a group exists here: it may have been released, or its lease may have expired.
    pub fn has_group(&self, id: GroupId) -> bool {
        self.find(id).is_some()
    }

    /// Return the next event; `None` if there is none.
    pub fn poll_event(&mut self) -> Option<Event> {
        self.common.events.pop_front()
    }

    /// Return the counters since boot.
    pub fn counters(&self) -> &Counters {
        &self.common.counters
    }

    /// Return the trace of rare events.
    pub fn trace(&self) -> &TraceRing {
        &self.common.trace
    }

    fn find(&self, id: GroupId) -> Option<usize> {
        self.storage
            .groups
            .iter()
            .position(|group| group.as_ref().is_some_and(|group| group.config.group == id && !group.is_closing()))
    }

    fn group_ctx(&mut self, index: usize) -> Option<GroupCtx<'_>> {
        let group = self.storage.groups[index].as_mut()?;
        let refs = match (&mut self.zero_copy, &group.zero_copy) {
            (Some(tables), Some(zero_copy)) => Some(tables.of(group.slots, zero_copy)),
            _ => None,
        };
        Some(GroupCtx {
            refs,
            children: &mut self.storage.children[group.children.range()],
            slots: &mut self.storage.slots[group.slots.range()],
            bytes: &mut self.storage.bytes[group.bytes.range()],
            group,
            common: &mut self.common,
        })
    }

    /// Tell the sender of an upward packet why it was not accepted. Nothing in the packet is authenticated, so the
    /// reply is a header that echoes what the sender can recognise, and replies are rate limited.
    fn nak_unknown_sender(&mut self, to: Addr, repr: &Repr, reason: NakReason, now: Instant) {
        if !matches!(repr.kind, Kind::Data | Kind::Ref | Kind::Empty | Kind::Probe) {
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

impl GroupCtx<'_> {
    fn shard(&self) -> Shard {
        self.common.config.shard
    }

    /// Record that this group may have something to send. Call it after anything that may have produced output.
    fn note_output(&mut self) {
        if !self.common.may_send {
            self.common.may_send = self.group.has_output();
        }
    }

    fn slot_index(&self, local: u64) -> usize {
        debug_assert!(self.slots.len() <= MAX_SLOTS);
        (local % self.slots.len() as u64) as usize
    }

    /// Return the chunk buffers of slot `index`.
    fn stages(&mut self, index: usize) -> Stages<'_> {
        let slot = &self.slots[index];
        let len = slot.elements.unwrap_or(0) as usize * slot.element_bytes(true).unwrap_or(0);
        let stride = usize::from(self.group.config.chunk_len_bytes);
        let slot_len = stride * self.group.stages;
        Stages { bytes: &mut self.bytes[index * slot_len..][..slot_len], stride, len }
    }

    /// Return where the value of slot `index` is in the group's bytes: at the start of its stages.
    fn value(&self, index: usize) -> Range<usize> {
        let start = index * usize::from(self.group.config.chunk_len_bytes) * self.group.stages;
        start..start + usize::from(self.slots[index].value_len)
    }

    /// Fail the group at `failure.from` and send a Nak to every child that waits for this or a later chunk. Later
    /// contributions are answered with the same Nak.
    fn fail(&mut self, failure: Failure, now: Instant) {
        if self.group.failed.is_some_and(|earlier| earlier.from <= failure.from) {
            return;
        }
        self.group.failed = Some(failure);
        let id = self.group.config.group;
        self.common.trace.record(now, Trace::Failed(id, failure.from, failure.reason));
        self.common.event(Event::GroupFailed { group: id, from: failure.from, reason: failure.reason });
        let from = self.shard().below(failure.from);
        for index in 0..self.slots.len() {
            let slot = &mut self.slots[index];
            if slot.local >= from && matches!(slot.state, State::Filling | State::Up | State::Refused) {
                slot.pending = slot.bits.difference(&self.group.view.excluded);
                self.group.up.remove(index);
                self.mark_all_to_answer(index);
                if !self.slots[index].pending.is_empty() {
                    self.group.down.insert(index);
                }
            }
        }
    }

    /// Return the Nak that reports `failure` to a child.
    fn failure_nak(&self, failure: &Failure, child: usize, seq: ChunkNo, token: u32) -> Repr {
        let config = &self.group.config;
        let mut nak = Repr {
            reason: Some(failure.reason),
            seq,
            count: 1,
            token,
            mark: self.group.stable(),
            ..Repr::new(Kind::Nak, config.group, config.epoch, ChildIndex(child as u16), self.children[child].key)
        };
        put_ops(&mut nak, failure.ops);
        nak
    }
}

/// Write the two operations of a mismatch into a Nak: the first into the header's fields, the other packed.
fn put_ops(nak: &mut Repr, ops: Option<(OpDesc, OpDesc)>) {
    let Some((first, other)) = ops else { return };
    nak.set_op(&first);
    nak.bits2 = pack_op(&other);
}

/// Return whether a tree's size is valid. Checked by `control`; kept here beside what relies on it.
fn tree_is_valid(tree: &TreeConfig) -> bool {
    (1..=sumac_hal::wire::MAX_CHILDREN as u16).contains(&tree.children)
}

/// Return whether this node supports an operation: it knows the collective, and has a kernel for what is combined.
fn supported(op: &OpDesc) -> bool {
    if op.collective == Collective::Barrier {
        return op.dtype.is_none() && op.op.is_none();
    }
    let fits = match (op.dtype, op.op) {
        (Some(dtype), Some(reduce)) => op.collective.reduces() && Kernel::new(dtype, reduce).is_some(),
        (Some(_), None) => !op.collective.reduces(),
        _ => false,
    };
    fits && op.collective.is_offloadable()
}

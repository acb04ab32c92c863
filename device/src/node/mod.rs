//! The sans-I/O core of a device: packets and time in; packets, events and deadlines out.
//!
//! One [`Node`] is one shard: it owns its tables, so two of them need no lock. The five verbs are
//! [`Node::handle`], [`Node::handle_timeout`], [`Node::poll_transmit`], [`Node::poll_timeout`] and
//! [`Node::poll_event`]; after the first two, call `poll_transmit` until it returns `None`. Control requests
//! come in through [`Node::control`].
//!
//! Where the rules of PROTOCOL live: `child.rs` (contributions, probes: sections 1 to 3), `parent.rs` (answers
//! and the way up), `straggler.rs` (ranks that do not come: section 10), `transmit.rs` (what leaves, in which order: deficit round robin over groups), `control.rs`
//! (groups, reserved whole or not at all), `reference/` (children whose data a DMA engine fetches: sections 5 to 7).
//!
//! Invariants:
//! - nothing that a peer writes is trusted: each field is checked before use, and what fails is dropped and
//!   counted by [`DropReason`]; no packet can panic a node;
//! - the work of each call is bounded: by the window for one packet, by the tables for a timeout;
//! - every queue has a limit, and what does not fit is dropped, counted, and asked for again by its owner.
//!
//! Three rules go beyond PROTOCOL 3, all found by measuring goodput (`tests/goodput.rs`): at 1 % loss it was a hundredth
//! of what it is with them.
//! - What was asked for and is still missing when a part of a window has come behind it, is asked for again, by nodes and
//!   ranks: its second loss would else wait for a probe.
//! - The window is cut for losses only if they are one in sixteen of what all children send in a window. Fewer are
//!   chance; congestion takes many at once, and marks packets where it can.
//! - A child that misses an answer says up to where it has later ones. If those were given first, the answer was late,
//!   not lost, and is not sent again.
//!
//! One rule goes beyond PROTOCOL 10's "replies are never larger than the request": a lost Result is sent again
//! to a child that asks with a header-sized Probe or Nak. The child is authenticated by key, pinned to its
//! address, and has credit for each contribution and probe of its own, so a node can't be made to amplify
//! towards others and sends about as many results as it got contributions.

mod child;
mod control;
mod parent;
mod reference;
#[cfg(feature = "snapshot")]
mod snapshot;
mod straggler;
#[cfg(test)]
mod tests;
mod transmit;

pub(crate) use reference::ByReference;
pub use reference::{Answer, AttachError, RedoSlot, Reference, References};
#[cfg(feature = "snapshot")]
pub use snapshot::{Phase, Rest};
pub(crate) use straggler::View;

use crate::group::{Child, Failure, Group};
use crate::memory::Storage;
use crate::order::Stages;
use crate::sets::MAX_SLOTS;
use crate::slot::{Slot, State};
use crate::trace::{Trace, TraceRing};
use core::ops::Range;
use core::time::Duration;
use heapless::Deque;
use reference::Refs;
use sumac_hal::ctrl::{Counters, DropReason, TreeConfig};
use sumac_hal::ids::{BootId, ChildIndex, ChunkNo, GroupId};
use sumac_hal::op::{Collective, OpDesc};
use sumac_hal::planted;
use sumac_hal::port::Addr;
use sumac_hal::reduce::Kernel;
use sumac_hal::shard::Shard;
use sumac_hal::time::Instant;
use sumac_hal::wire::{Flags, HEADER_LEN, Kind, NakReason, Packet, RankMask, Repr, pack_op};

/// The most replies (Status, Nak, Probe) that wait to be sent.
pub const MAX_REPLIES: usize = 64;

/// The most events that wait for the board.
pub const MAX_EVENTS: usize = 16;

/// Replies a millisecond to packets of no known group or of another epoch.
const STRANGER_REPLIES_PER_MS: u8 = 16;

/// What a board tells its node.
#[derive(Debug, Clone, Copy)]
#[cfg_attr(feature = "snapshot", derive(PartialEq, Eq, Hash))]
pub struct NodeConfig {
    /// Which shard of the device this is.
    pub shard: Shard,
    /// The device's life.
    pub boot_id: BootId,
    /// The longest packet of its port in bytes.
    pub max_packet_len_bytes: usize,
    /// What its port buffers in bytes: a group's window starts where all children together fill it.
    pub receive_buffer_bytes: usize,
}

/// A packet to send: the first `len_bytes` of the buffer given.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Transmit {
    /// To whom.
    pub to: Addr,
    /// How long it is.
    pub len_bytes: usize,
}

/// A packet to send whose payload is still where the node has it; see [`Node::poll_outgoing`].
#[derive(Debug, Clone)]
pub struct Outgoing {
    /// To whom.
    pub to: Addr,
    /// The packet's header.
    pub header: [u8; HEADER_LEN],
    /// Where the payload lies in the node's slot memory.
    payload: Range<usize>,
    /// A payload of its own.
    mask: Option<[u8; RankMask::LEN_BYTES]>,
}

impl Outgoing {
    fn payload_len(&self) -> usize {
        self.mask.map_or(self.payload.len(), |mask| mask.len())
    }
}

/// Something that the board may want to know.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub enum Event {
    /// A group's lease ran out; it is gone.
    LeaseExpired(GroupId),
    /// A group can't go on from this chunk.
    GroupFailed {
        /// The group.
        group: GroupId,
        /// The first chunk that has no result.
        from: ChunkNo,
        /// Why.
        reason: NakReason,
    },
}

/// A header to be sent.
#[derive(Debug, Clone, Copy)]
struct Reply {
    to: Addr,
    repr: Repr,
    /// What is behind it.
    mask: Option<RankMask>,
}

/// The parts of a node that serve all groups.
#[derive(Debug)]
struct Common {
    config: NodeConfig,
    counters: Counters,
    trace: TraceRing,
    replies: Deque<Reply, MAX_REPLIES>,
    events: Deque<Event, MAX_EVENTS>,
    #[cfg(feature = "planted")]
    bug: Option<sumac_hal::planted::Bug>,
    /// Some group may have something to send: false only while none has, so that polling for nothing costs nothing
    /// however long the table of groups is.
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

    /// Note an event; the board sees the newest ones if it does not look.
    fn event(&mut self, event: Event) {
        if self.events.is_full() {
            self.events.pop_front();
        }
        // There is room now.
        let _ = self.events.push_back(event);
    }
}

/// The sans-I/O core of one shard of a device.
#[derive(Debug)]
pub struct Node<'m> {
    storage: Storage<'m>,
    /// What contributions by reference need, if the board has it.
    references: Option<References<'m>>,
    common: Common,
    /// Behind the last entry of the table of groups that is in use: looking for work costs what is there, not what could
    /// be.
    groups_end: usize,
    /// Whose turn it is to send.
    turn: usize,
    /// Whose turn it is to use the engine.
    dma_turn: usize,
    stranger_replies: u8,
    stranger_refill_at: Instant,
}

/// One group with its entries of the tables: what most rules work on.
struct Live<'a> {
    group: &'a mut Group,
    children: &'a mut [Child],
    slots: &'a mut [Slot],
    bytes: &'a mut [u8],
    /// Of a group with children by reference.
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
            references: None,
            common,
            groups_end: 0,
            turn: 0,
            dma_turn: 0,
            stranger_replies: 0,
            stranger_refill_at: Instant::ZERO,
        }
    }

    /// Give this node a bug.
    #[cfg(feature = "planted")]
    pub fn plant(&mut self, bug: sumac_hal::planted::Bug) {
        self.common.bug = Some(bug);
    }

    /// Take in a packet that arrived at `now` from `from`.
    pub fn handle(&mut self, from: Addr, packet: &[u8], now: Instant) {
        self.take_in(from, packet, Flags::empty(), now);
    }

    /// The same for a packet that the network marked as having met congestion: its group's window is cut as for a loss
    /// (PROTOCOL 3), here or, if it came from the parent, there.
    pub fn handle_marked(&mut self, from: Addr, packet: &[u8], now: Instant) {
        self.take_in(from, packet, Flags::CONGESTED, now);
    }

    fn take_in(&mut self, from: Addr, packet: &[u8], met: Flags, now: Instant) {
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
            return self.answer_stranger(from, &repr, NakReason::UnknownGroup, now);
        };
        let Some(mut live) = self.live(index) else { return };
        if repr.epoch != live.group.config.epoch && !planted!(live.common, EpochForgotten) {
            live.common.drop_packet(DropReason::WrongEpoch);
            return self.answer_stranger(from, &repr, NakReason::WrongEpoch, now);
        }
        if live.is_parent(from, &repr) || live.is_shared(from, &repr) {
            live.handle_parent(&repr, packet.payload(), payload_crc, now);
        } else {
            live.handle_child(from, &repr, packet.payload(), now);
        }
        live.note_output();
    }

    /// Do what is due at `now`: probes, dead hops, leases.
    pub fn handle_timeout(&mut self, now: Instant) {
        for index in 0..self.groups_end {
            let Some(mut live) = self.live(index).filter(|live| !live.group.is_closing()) else { continue };
            if now >= live.group.lease_until {
                let id = live.group.config.group;
                live.common.counters.leases_expired += 1;
                live.common.trace.record(now, Trace::LeaseExpired(id));
                live.common.event(Event::LeaseExpired(id));
                if !(planted!(live.common, LeaseLeak) && live.group.failed.is_some()) {
                    self.close_group(index);
                }
            } else {
                live.poll_parent(now);
                live.poll_stragglers(now);
                live.note_output();
            }
        }
    }

    /// Return where the next packet goes, if there is one: for ports that want to know before it is written.
    /// Nothing is sent by asking; the next [`Node::poll_transmit`] writes that packet, unless something was
    /// handled in between.
    pub fn poll_destination(&mut self) -> Option<Addr> {
        if let Some(reply) = self.common.replies.front() {
            return Some(reply.to);
        }
        let turn = self.take_turn()?;
        self.live(turn)?.destination()
    }

    /// Write the next packet to `buffer`, which has room for the port's longest; `None` if there is none.
    ///
    /// Call it after each `handle` and `handle_timeout` until it returns `None` (or the port is full: then go on
    /// later).
    pub fn poll_transmit(&mut self, buffer: &mut [u8], now: Instant) -> Option<Transmit> {
        let out = self.poll_outgoing(now)?;
        let payload = self.payload(&out);
        buffer[..HEADER_LEN].copy_from_slice(&out.header);
        buffer[HEADER_LEN..][..payload.len()].copy_from_slice(payload);
        Some(Transmit { to: out.to, len_bytes: HEADER_LEN + payload.len() })
    }

    /// Return the next packet without copying its payload, for ports that gather: [`Node::payload`] tells where it
    /// is, and it stays there until the next `handle`, `handle_timeout` or `control`. The packet counts as sent.
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

    /// Return when [`Node::handle_timeout`] is to be called next, if nothing arrives before.
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

    /// Tell whether a group is here: it may have been released, or its lease may have run out.
    pub fn has_group(&self, id: GroupId) -> bool {
        self.find(id).is_some()
    }

    /// Return the next event.
    pub fn poll_event(&mut self) -> Option<Event> {
        self.common.events.pop_front()
    }

    /// Return what was counted since boot.
    pub fn counters(&self) -> &Counters {
        &self.common.counters
    }

    /// Return the trace of what was rare.
    pub fn trace(&self) -> &TraceRing {
        &self.common.trace
    }

    fn find(&self, id: GroupId) -> Option<usize> {
        self.storage
            .groups
            .iter()
            .position(|group| group.as_ref().is_some_and(|group| group.config.group == id && !group.is_closing()))
    }

    fn live(&mut self, index: usize) -> Option<Live<'_>> {
        let group = self.storage.groups[index].as_mut()?;
        let refs = match (&mut self.references, &group.by_reference) {
            (Some(references), Some(by_reference)) => Some(references.of(group.slots, by_reference)),
            _ => None,
        };
        Some(Live {
            refs,
            children: &mut self.storage.children[group.children.range()],
            slots: &mut self.storage.slots[group.slots.range()],
            bytes: &mut self.storage.bytes[group.bytes.range()],
            group,
            common: &mut self.common,
        })
    }

    /// Tell the sender of an upward packet that can't be taken why. Nothing in it is authenticated, so the
    /// answer is a header that echoes what the sender can recognise, and their rate is limited.
    fn answer_stranger(&mut self, to: Addr, repr: &Repr, reason: NakReason, now: Instant) {
        if !matches!(repr.kind, Kind::Data | Kind::Ref | Kind::Empty | Kind::Probe) {
            return;
        }
        if now >= self.stranger_refill_at {
            self.stranger_replies = STRANGER_REPLIES_PER_MS;
            self.stranger_refill_at = now + Duration::from_millis(1);
        }
        let Some(left) = self.stranger_replies.checked_sub(1) else { return };
        self.stranger_replies = left;
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

impl Live<'_> {
    fn shard(&self) -> Shard {
        self.common.config.shard
    }

    /// Note whether this group has something to send, after anything that may have given it some.
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

    /// Return where the value of slot `index` lies in the group's bytes: at the start of its buffers.
    fn value(&self, index: usize) -> Range<usize> {
        let start = index * usize::from(self.group.config.chunk_len_bytes) * self.group.stages;
        start..start + usize::from(self.slots[index].value_len)
    }

    /// The group can't go on from `failure.from`: tell every child that waits for this or a later chunk. Who
    /// contributes later is told then.
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
                slot.pending = slot.bits.without(&self.group.view.out);
                self.group.up.remove(index);
                self.owe_all(index);
                if !self.slots[index].pending.is_empty() {
                    self.group.down.insert(index);
                }
            }
        }
    }

    /// Return the Nak that tells a child of `failure`.
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

/// Tell whether a tree can be kept: used by control, stated here beside what relies on it.
fn tree_is_valid(tree: &TreeConfig) -> bool {
    (1..=sumac_hal::wire::MAX_CHILDREN as u16).contains(&tree.children)
}

/// Tell whether this node can do an operation: it knows the collective, and has a kernel for what combines.
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

//! The sans-I/O core of a device: packets and time in; packets, events and deadlines out.
//!
//! One [`Node`] is one shard. It owns its tables, so two nodes need no lock. Its methods are in groups: see [`Node`].
//!
//! Where the rules of PROTOCOL are implemented: `receive.rs` (which group and link a packet is for), `child.rs`
//! (contributions: sections 1 and 2), `train.rs` (the same for consecutive ones, in the usual case), `loss.rs` (gaps,
//! probes and answers sent again: section 3), `parent.rs` (answers, and the link to the parent), `straggler.rs` (ranks
//! that do not arrive: section 10), `transmit.rs` (what is sent next: deficit round robin over groups), `operation.rs`
//! (operations that Data names by signature), `control.rs` (groups, reserved whole or not at all), `path.rs` (the
//! longest packet that a hop carries: section 12), `zero_copy/` (children whose data a DMA engine fetches: sections 5
//! to 7).
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
mod context;
mod control;
mod group;
mod loss;
mod memory;
mod operation;
mod parent;
mod path;
mod receive;
#[cfg(feature = "snapshot")]
mod snapshot;
mod straggler;
#[cfg(test)]
mod tests;
mod train;
mod transmit;
mod zero_copy;

pub use group::{Child, Group, Hop};
pub use memory::{Memory, Storage};
#[cfg(feature = "snapshot")]
pub use snapshot::{NodeSnapshot, Phase};
pub(crate) use straggler::View;
pub use transmit::Payload;
pub(crate) use zero_copy::ZeroCopyGroup;
pub use zero_copy::{Answer, AttachError, BufferRef, RedoSlot, ZeroCopyStorage};

use crate::trace::{Trace, TraceRing};
use context::{GroupCtx, put_ops};
use heapless::Deque;
use sumac_hal::ctrl::{Counters, DropReason, TreeConfig};
use sumac_hal::ids::{BootId, ChunkNo, GroupId};
use sumac_hal::op::{Collective, OpDesc};
use sumac_hal::planted;
use sumac_hal::port::{Addr, Ecn};
use sumac_hal::reduce::Kernel;
use sumac_hal::shard::Shard;
use sumac_hal::time::Instant;
use sumac_hal::wire::{Kind, NakReason, RankMask, Repr};

/// Maximum number of replies (Status, Nak, Probe) waiting to be sent.
pub const MAX_REPLIES: usize = 64;

/// Maximum number of events waiting for the board.
pub const MAX_EVENTS: usize = 16;

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

/// A header to send. If its payload has a length, it is padded to it.
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

    /// Count packets that have arrived with the same mark.
    fn note_received(&mut self, packets: u64, len_bytes: u64, ecn: Ecn) {
        self.counters.packets_in += packets;
        self.counters.bytes_in += len_bytes;
        self.counters.marked += if ecn.is_ce() { packets } else { 0 };
    }

    /// Count packets that are handed out.
    fn note_sent(&mut self, packets: usize, len_bytes: usize) {
        self.counters.packets_out += packets as u64;
        self.counters.bytes_out += len_bytes as u64;
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
/// | input | then call, until it returns `None` or false |
/// |---|---|
/// | [`handle`](Node::handle): a packet | [`poll_transmit`](Node::poll_transmit) |
/// | [`handle_timeout`](Node::handle_timeout): time has passed | `poll_transmit` |
/// | [`control`](Node::control): a request of the controller | `poll_transmit` |
/// | [`submit`](Node::submit): entries of a zero-copy child | [`poll_dma`](Node::poll_dma), [`poll_answer`](Node::poll_answer), `poll_transmit` |
/// | [`handle_completion`](Node::handle_completion): a DMA chain has ended | `poll_dma`, `poll_answer`, `poll_transmit` |
///
/// With zero-copy children, packets and timeouts can make chains due and give answers, too: call all three then.
/// After any of them, [`poll_timeout`](Node::poll_timeout) returns the next deadline, and
/// [`poll_event`](Node::poll_event) what the board may log. [`runtime::poll`](crate::runtime::poll) does all this for
/// the packets of a port.
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
                ctx.poll_hops(now);
                ctx.poll_stragglers(now);
                ctx.note_output();
            }
        }
    }

    /// Return when to call [`Node::handle_timeout`] next if nothing arrives before; `None` if no timer is armed.
    #[must_use]
    pub fn poll_timeout(&self) -> Option<Instant> {
        let groups = self.storage.groups[..self.groups_end].iter().flatten().filter(|group| !group.is_closing());
        groups
            .map(|group| {
                let hops = self.storage.hops[group.hops().range()].iter();
                let probes = hops.clone().filter(|hop| group.waits_for(hop)).filter_map(|hop| hop.link.timeout());
                let paths = hops.filter_map(|hop| hop.path.as_ref()?.timeout());
                probes.chain(paths).chain(self.straggler_timeout(group)).fold(group.lease_until, Instant::min)
            })
            .min()
    }

    /// Return whether a group exists here: it may have been released, or its lease may have expired.
    pub fn has_group(&self, id: GroupId) -> bool {
        self.find(id).is_some()
    }

    /// Return the next event; `None` if there is none.
    #[must_use]
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
            hops: &mut self.storage.hops[group.hops().range()],
            slots: &mut self.storage.slots[group.slots.range()],
            bytes: &mut self.storage.bytes[group.bytes.range()],
            group,
            common: &mut self.common,
        })
    }
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

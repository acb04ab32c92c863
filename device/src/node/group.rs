//! One aggregation group on one node: its children, its congestion window and the link to its parent.

use super::memory::Span;
use super::operation::Operations;
use super::{View, ZeroCopyGroup};
use crate::sets::SlotSet;
use core::time::Duration;
use sumac_hal::ctrl::{GroupConfig, SharedLink};
use sumac_hal::ids::{ChildIndex, ChunkNo, FunctionId, Rank};
use sumac_hal::op::OpDesc;
use sumac_hal::path_mtu::PathSearch;
use sumac_hal::port::Addr;
use sumac_hal::shard::Shard;
use sumac_hal::time::Instant;
use sumac_hal::uplink::{HopTimers, SharedResults, Uplink};
use sumac_hal::wire::{NakReason, StragglerLimit};

/// What a child of this node is.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(crate) enum ChildKind {
    /// The tree does not name its children.
    Unknown,
    /// A rank.
    Rank(Rank),
    /// A node.
    Node,
}

impl ChildKind {
    pub(crate) fn rank(self) -> Option<Rank> {
        if let Self::Rank(rank) = self { Some(rank) } else { None }
    }
}

/// A straggler limit that a zero-copy rank announces before it contributes.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(crate) struct AnnouncedLimit {
    /// The operation's chunks: `first..end`.
    pub(crate) first: u64,
    pub(crate) end: u64,
    pub(crate) limit: StragglerLimit,
}

/// State of one child of a group. The board allocates the entries; the node owns their content.
#[derive(Debug, Clone, Copy)]
#[cfg_attr(feature = "snapshot", derive(PartialEq, Eq, Hash))]
pub struct Child {
    pub(crate) key: u64,
    /// Address of its first valid packet. Replies go to no other address.
    pub(crate) addr: Option<Addr>,
    /// Every chunk below this number has been delivered to everybody at or below the child.
    pub(crate) have: ChunkNo,
    /// The first local number without its contribution.
    pub(crate) next_missing: u64,
    /// The highest local number with its contribution, plus one.
    pub(crate) top: u64,
    /// Gaps below this number have been asked for.
    pub(crate) asked_below: u64,
    /// Its kind, if the tree names its children.
    pub(crate) kind: ChildKind,
    /// `top` at the time the lowest gap was asked for.
    pub(crate) asked_at: u64,
    /// The function whose ring it contributes through, if it is zero-copy.
    pub(crate) owner: Option<FunctionId>,
    /// The last straggler limit that it announced (zero-copy).
    pub(crate) announced: Option<AnnouncedLimit>,
    /// Halves of exclusion decisions sent to it (zero-copy): a completion entry carries half a rank mask.
    pub(crate) decision_halves_sent: u16,
    /// Token of its last contribution, echoed in answers.
    pub(crate) token: u32,
    /// Answers that may be resent to it. Each contribution and each probe earns one, so a node never sends a child much
    /// more than the child sent.
    pub(crate) credit: u16,
}

impl Child {
    /// An unused entry.
    pub const EMPTY: Self = Self {
        key: 0,
        addr: None,
        have: ChunkNo(0),
        next_missing: 0,
        top: 0,
        asked_below: 0,
        kind: ChildKind::Unknown,
        asked_at: 0,
        owner: None,
        announced: None,
        decision_halves_sent: 0,
        token: 0,
        credit: 0,
    };

    /// Upper bound of `credit`.
    pub(crate) const CREDIT_MAX: u16 = 64;
}

/// Why a group failed, and from which chunk on.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(crate) struct Failure {
    pub(crate) from: ChunkNo,
    pub(crate) reason: NakReason,
    /// The two operations of a mismatch.
    pub(crate) ops: Option<(OpDesc, OpDesc)>,
}

/// The window that answers grant: additive increase, multiplicative decrease (PROTOCOL 3).
#[derive(Debug, Clone, Copy)]
#[cfg_attr(feature = "snapshot", derive(PartialEq, Eq, Hash))]
pub(crate) struct Window {
    /// Size in 1/256 of a contribution.
    q8: u32,
    max: u32,
    /// The window was already cut for losses below this local number.
    cut_below: u64,
    /// Losses below this local number count as one window's losses.
    counted_below: u64,
    /// Losses counted for the current window.
    lost: u32,
}

impl Window {
    pub(crate) fn new(start: usize, max: u16) -> Self {
        let max = u32::from(max) << 8;
        let start = u32::try_from(start).unwrap_or(u32::MAX).saturating_mul(256);
        Self { q8: start.clamp(256, max), max, cut_below: 0, counted_below: 0, lost: 0 }
    }

    pub(crate) fn size(&self) -> u16 {
        (self.q8 >> 8) as u16
    }

    /// Grow by one contribution per window: called for each completed chunk.
    pub(crate) fn grow(&mut self) {
        self.q8 = (self.q8 + (256 * 256) / self.q8).min(self.max);
    }

    /// Count the lost contribution to chunk `local`; `top` is one past the highest chunk in flight. Returns true if
    /// that cut the window. Congestion drops many packets at once. A few losses among all that `children` send in a
    /// window are random, and are resent without slowing anybody down.
    pub(crate) fn lost(&mut self, local: u64, top: u64, children: usize) -> bool {
        if local >= self.counted_below {
            (self.counted_below, self.lost) = (top, 0);
        }
        self.lost = self.lost.saturating_add(1);
        let sent = usize::from(self.size()) * children;
        self.lost as usize * Self::CHANCE >= sent && self.cut(local, top)
    }

    /// One loss in this many contributions counts as random.
    const CHANCE: usize = 16;

    /// Halve the window for the loss of chunk `local`, at most once per window. `top` is one past the highest chunk in
    /// flight. Returns true if the window was halved.
    pub(crate) fn cut(&mut self, local: u64, top: u64) -> bool {
        if local < self.cut_below {
            return false;
        }
        self.cut_below = top;
        self.q8 = (self.q8 / 2).max(256);
        true
    }
}

/// The link to the parent.
#[derive(Debug, Clone)]
#[cfg_attr(feature = "snapshot", derive(PartialEq, Eq, Hash))]
pub(crate) struct Parent {
    pub(crate) child: ChildIndex,
    /// The hops to the parent's shards that this node sends to: one, or, if this node is undivided, as many as the
    /// parent has.
    pub(crate) hops: Span,
    /// The smallest window that a shard of the parent granted last, in contributions.
    pub(crate) window: u16,
    /// The last `stable` received from the root.
    pub(crate) stable: ChunkNo,
    /// Decides whether contributions ask for shared results.
    pub(crate) shared_results: SharedResults,
}

/// State of the hop to one shard of a group's parent. The board allocates the entries; the node owns their content.
#[derive(Debug, Clone)]
#[cfg_attr(feature = "snapshot", derive(PartialEq, Eq, Hash))]
pub struct Hop {
    /// Where the shard receives.
    pub(crate) addr: Addr,
    /// Which of the parent's shards it is. The local numbers of `link` are this shard's.
    pub(crate) shard: Shard,
    pub(crate) link: Uplink,
    /// The window that the shard granted last, in contributions.
    pub(crate) window: u16,
    /// The search for the longest packet, once the controller has asked for it.
    pub(crate) path: Option<PathSearch>,
}

impl Hop {
    /// An unused entry.
    pub const EMPTY: Self = Self {
        addr: Addr::Emu(0),
        shard: Shard::WHOLE,
        link: Uplink::new(HopTimers::DEFAULT, 0),
        window: 0,
        path: None,
    };
}

/// State of one aggregation group. The board allocates the entries; the node owns their content.
#[derive(Debug)]
#[cfg_attr(feature = "snapshot", derive(Clone, PartialEq, Eq, Hash))]
pub struct Group {
    pub(crate) config: GroupConfig,
    pub(crate) children: Span,
    pub(crate) slots: Span,
    pub(crate) bytes: Span,
    /// Chunk buffers per slot.
    pub(crate) stages: usize,
    pub(crate) parent: Option<Parent>,
    /// The address that reaches all children with one packet, and the key of such packets.
    pub(crate) shared: Option<SharedLink>,
    pub(crate) window: Window,
    /// The largest share of the window that can fall into this shard, in chunks.
    pub(crate) window_local: u64,
    /// The minimum of `have` over all children.
    pub(crate) min_have: ChunkNo,
    /// Every local number below this one has its answer.
    pub(crate) answered_below: u64,
    /// No local number from this one on has its answer.
    pub(crate) answered_top: u64,
    /// The group failed: the root reported it, or the link to the parent is lost.
    pub(crate) failed: Option<Failure>,
    /// This subtree cannot continue; the root has not confirmed the failure yet.
    pub(crate) refusal: Option<Failure>,
    pub(crate) lease_until: Instant,
    /// Slots with a contribution to send to the parent.
    pub(crate) up: SlotSet,
    /// Slots with answers to send to children.
    pub(crate) down: SlotSet,
    /// Bytes that it may still send in its turn (deficit round robin).
    pub(crate) deficit: usize,
    /// Token sent with contributions; the parent echoes it in Naks.
    pub(crate) token: u32,
    /// A packet from the parent met congestion; the next packet up reports it.
    pub(crate) congested: bool,
    /// Zero-copy state, if the group has zero-copy children.
    pub(crate) zero_copy: Option<ZeroCopyGroup>,
    /// Excluded children, and children that may be excluded.
    pub(crate) view: View,
    /// Operations that children have described.
    pub(crate) operations: Operations,
}

impl Group {
    pub(crate) fn lease(&self) -> Duration {
        Duration::from_millis(u64::from(self.config.lease_ms))
    }

    /// Return whether the group has ended and only waits for its zero-copy chains and answers.
    pub(crate) fn is_closing(&self) -> bool {
        self.zero_copy.as_ref().is_some_and(ZeroCopyGroup::is_closing)
    }

    pub(crate) fn has_output(&self) -> bool {
        !self.up.is_empty() || !self.down.is_empty() || !self.view.to_notify.is_empty()
    }

    /// Return whether this node still expects answers on a hop to its parent: always, or, once the group has failed,
    /// while chunks before the failure are unanswered.
    pub(crate) fn waits_for(&self, hop: &Hop) -> bool {
        self.failed.is_none_or(|failure| hop.link.answered_below() < hop.shard.below(failure.from))
    }

    /// Return the entries of its hops to the parent.
    pub(crate) fn hops(&self) -> Span {
        self.parent.as_ref().map_or(Span::default(), |parent| parent.hops)
    }

    /// Return the window to grant: the smaller of this node's and its parent's.
    pub(crate) fn granted(&self) -> u16 {
        let own = self.window.size();
        self.parent.as_ref().map_or(own, |parent| own.min(parent.window))
    }

    /// Return the `stable` to send to children: the root's value, which at the root is the minimum `have`.
    pub(crate) fn stable(&self) -> ChunkNo {
        self.parent.as_ref().map_or(self.min_have, |parent| parent.stable)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn window_grows_additively_and_halves_once_per_window() {
        let mut window = Window::new(8, 64);
        (0..8).for_each(|_| window.grow());
        assert!((8..=9).contains(&window.size()));
        (0..10_000).for_each(|_| window.grow());
        assert_eq!(window.size(), 64);
        assert!(window.cut(10, 40));
        assert!(!window.cut(39, 50), "same window");
        assert_eq!(window.size(), 32);
        (0..20).for_each(|i| assert!(window.cut(100 * (i + 1), 100 * (i + 1) + 1)));
        assert_eq!(window.size(), 1, "never less than one");
        let mut window = Window::new(32, 32);
        assert!((0..7).all(|local| !window.lost(local, 32, 4)), "7 of 128");
        assert!(window.lost(7, 32, 4) && window.size() == 16);
        assert!(!window.lost(32, 64, 4), "the next window's first");
        assert_eq!(Window::new(usize::MAX, 5).size(), 5);
        assert_eq!(Window::new(0, 5).size(), 1);
    }
}

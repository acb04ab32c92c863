//! One aggregation group on one node: its children, its window, its way to the parent.

use crate::memory::Span;
use crate::node::{ByReference, View};
use crate::sets::SlotSet;
use core::time::Duration;
use sumac_hal::ctrl::{GroupConfig, SharedLink};
use sumac_hal::ids::{ChildIndex, ChunkNo, FunctionId, Rank};
use sumac_hal::op::OpDesc;
use sumac_hal::port::Addr;
use sumac_hal::shard::Shard;
use sumac_hal::time::Instant;
use sumac_hal::uplink::{Listening, Uplink};
use sumac_hal::wire::{Limit, NakReason};

/// Who sits below a group's node.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(crate) enum Seat {
    /// The tree does not say.
    Unknown,
    /// A rank.
    Rank(Rank),
    /// A node.
    Node,
}

impl Seat {
    pub(crate) fn rank(self) -> Option<Rank> {
        if let Self::Rank(rank) = self { Some(rank) } else { None }
    }
}

/// How long an operation waits for ranks to come to it, as a rank says before it contributes by reference.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(crate) struct Announced {
    /// Its seqs.
    pub(crate) first: u64,
    pub(crate) end: u64,
    pub(crate) limit: Limit,
}

/// One child of a group. Boards allocate these; their content is the node's.
#[derive(Debug, Clone, Copy)]
#[cfg_attr(feature = "snapshot", derive(PartialEq, Eq, Hash))]
pub struct Child {
    pub(crate) key: u64,
    /// Where its first valid packet came from; replies go only there.
    pub(crate) addr: Option<Addr>,
    /// Every seq below is held by everybody at or below it.
    pub(crate) have: ChunkNo,
    /// The first local number that it has not contributed to.
    pub(crate) next_missing: u64,
    /// The highest local number that it has contributed to, plus one.
    pub(crate) top: u64,
    /// Gaps below were asked for already.
    pub(crate) asked_below: u64,
    /// Who it is.
    pub(crate) seat: Seat,
    /// `top` when the lowest of them was asked for.
    pub(crate) asked_at: u64,
    /// The function that it contributes through, if it does so by reference.
    pub(crate) owner: Option<FunctionId>,
    /// The operation with a limit that it was the last to announce, by reference.
    pub(crate) announced: Option<Announced>,
    /// Halves of decisions that it was told, by reference.
    pub(crate) told_halves: u16,
    /// Of its last contribution, echoed in what it is told.
    pub(crate) token: u32,
    /// Answers that may be sent to it again: one earned by each contribution and each probe, so that nobody is
    /// sent much more than he sent.
    pub(crate) credit: u16,
}

impl Child {
    /// An entry that nobody uses.
    pub const EMPTY: Self = Self {
        key: 0,
        addr: None,
        have: ChunkNo(0),
        next_missing: 0,
        top: 0,
        asked_below: 0,
        seat: Seat::Unknown,
        asked_at: 0,
        owner: None,
        announced: None,
        told_halves: 0,
        token: 0,
        credit: 0,
    };

    /// The most credit that it can save up.
    pub(crate) const CREDIT_MAX: u16 = 64;
}

/// Why a group is at its end, and from which chunk on.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(crate) struct Failure {
    pub(crate) from: ChunkNo,
    pub(crate) reason: NakReason,
    /// For a mismatch: the two operations.
    pub(crate) ops: Option<(OpDesc, OpDesc)>,
}

/// The window that answers grant: additive increase, multiplicative decrease (PROTOCOL 3).
#[derive(Debug, Clone, Copy)]
#[cfg_attr(feature = "snapshot", derive(PartialEq, Eq, Hash))]
pub(crate) struct Window {
    /// In 1/256 of a contribution.
    q8: u32,
    max: u32,
    /// A loss below this local number was answered for.
    cut_below: u64,
    /// Losses below this local number are counted together.
    counted_below: u64,
    /// Those.
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

    /// A chunk is complete: one more contribution per window.
    pub(crate) fn grow(&mut self) {
        self.q8 = (self.q8 + (256 * 256) / self.q8).min(self.max);
    }

    /// A child's contribution to chunk `local` got lost while `top` was the highest on its way; true if that cut the
    /// window. Congestion takes many at once; a few of what all `children` send in a window are chance, and are sent
    /// again without slowing anybody down.
    pub(crate) fn lost(&mut self, local: u64, top: u64, children: usize) -> bool {
        if local >= self.counted_below {
            (self.counted_below, self.lost) = (top, 0);
        }
        self.lost = self.lost.saturating_add(1);
        let sent = usize::from(self.size()) * children;
        self.lost as usize * Self::CHANCE >= sent && self.cut(local, top)
    }

    /// Of so many contributions one may get lost by chance.
    const CHANCE: usize = 16;

    /// Chunk `local` got lost while `top` was the highest on its way; true if the window was halved, which
    /// happens once a window.
    pub(crate) fn cut(&mut self, local: u64, top: u64) -> bool {
        if local < self.cut_below {
            return false;
        }
        self.cut_below = top;
        self.q8 = (self.q8 / 2).max(256);
        true
    }
}

/// The way to the parent.
#[derive(Debug, Clone)]
#[cfg_attr(feature = "snapshot", derive(PartialEq, Eq, Hash))]
pub(crate) struct Parent {
    pub(crate) addr: Addr,
    pub(crate) child: ChildIndex,
    pub(crate) hop: Uplink,
    /// The window that it granted last.
    pub(crate) window: u16,
    /// The root's `stable`, as it came down last.
    pub(crate) stable: ChunkNo,
    /// Whether contributions ask for shared results.
    pub(crate) listening: Listening,
}

/// One aggregation group. Boards allocate these; their content is the node's.
#[derive(Debug)]
#[cfg_attr(feature = "snapshot", derive(Clone, PartialEq, Eq, Hash))]
pub struct Group {
    pub(crate) config: GroupConfig,
    pub(crate) children: Span,
    pub(crate) slots: Span,
    pub(crate) bytes: Span,
    /// Chunk buffers a slot.
    pub(crate) stages: usize,
    pub(crate) parent: Option<Parent>,
    /// Where one result goes to all children, and the key that they know it by.
    pub(crate) shared: Option<SharedLink>,
    pub(crate) window: Window,
    /// What of the window can fall into this shard.
    pub(crate) window_local: u64,
    /// The least `have` of all children.
    pub(crate) min_have: ChunkNo,
    /// All local numbers below are answered here.
    pub(crate) answered_below: u64,
    /// Of those above, none that is as high, or higher, is.
    pub(crate) answered_top: u64,
    /// The group is at its end, by the root's word or because the way there is lost.
    pub(crate) failed: Option<Failure>,
    /// This subtree can't go on; the root has yet to say so.
    pub(crate) refusal: Option<Failure>,
    pub(crate) lease_until: Instant,
    /// Slots with something to send up.
    pub(crate) up: SlotSet,
    /// Slots with answers to send down.
    pub(crate) down: SlotSet,
    /// What is left of its turn, in bytes (deficit round robin).
    pub(crate) deficit: usize,
    /// Sent with contributions, echoed in Naks.
    pub(crate) token: u32,
    /// Something from the parent met congestion, which it has yet to be told.
    pub(crate) congested: bool,
    /// What it needs for children that contribute by reference, if it has any.
    pub(crate) by_reference: Option<ByReference>,
    /// Who has left it, and who may be about to.
    pub(crate) view: View,
}

impl Group {
    pub(crate) fn lease(&self) -> Duration {
        Duration::from_millis(u64::from(self.config.lease_ms))
    }

    /// Tell whether the group is gone for everybody but its references, which are still in use.
    pub(crate) fn is_closing(&self) -> bool {
        self.by_reference.as_ref().is_some_and(ByReference::is_closing)
    }

    pub(crate) fn has_output(&self) -> bool {
        !self.up.is_empty() || !self.down.is_empty() || !self.view.tell.is_empty()
    }

    /// Tell whether answers of the parent still matter: always, or, when the group has failed, as long as there are
    /// chunks before the failure.
    pub(crate) fn waits_for_parent(&self, shard: Shard) -> bool {
        let Some(parent) = &self.parent else { return false };
        self.failed.is_none_or(|failure| parent.hop.answered_below() < shard.below(failure.from))
    }

    /// Return the window to grant: this node's and its parent's, whichever is less.
    pub(crate) fn granted(&self) -> u16 {
        let own = self.window.size();
        self.parent.as_ref().map_or(own, |parent| own.min(parent.window))
    }

    /// Return what goes down as `stable`: the root's word, or, at the root, the least `have`.
    pub(crate) fn stable(&self) -> ChunkNo {
        self.parent.as_ref().map_or(self.min_have, |parent| parent.stable)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn window_grows_by_one_a_window_and_halves_once_a_window() {
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

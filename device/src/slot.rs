//! One chunk in flight (SHARP calls it an OST).
//!
//! ```text
//! Free -> Filling -> Answered            at the root
//! Free -> Filling -> Up -> Answered      at any other node
//!              \-> Refused               the calls differ or are unsupported here: waiting for the root's answer
//! Answered -> Filling                    only once every child's `have` has passed the chunk
//! ```
//!
//! Invariants, asserted where they could break:
//! - a child's bit is set once per (seq, attempt);
//! - a slot holds exactly one chunk, identified by its full number; packets of other chunks never touch it;
//! - the answer stays until the slot is reused, so that any child can get it again.

use crate::sets::ChildSet;
use sumac_hal::ids::Rank;
use sumac_hal::op::OpDesc;
use sumac_hal::reduce::Kernel;
use sumac_hal::time::Instant;
use sumac_hal::wire::StragglerLimit;

/// The state of a slot.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(crate) enum State {
    /// Never used in this group.
    Free,
    /// Some children have contributed.
    Filling,
    /// All children have contributed; the partial result is on its way to the parent.
    Up,
    /// A Nak is on its way to the parent in place of a contribution.
    Refused,
    /// The answer is in the slot.
    Answered,
}

/// State of one chunk in flight. The board allocates the entries; the node owns their content.
#[derive(Debug, Clone, Copy)]
#[cfg_attr(feature = "snapshot", derive(PartialEq, Eq, Hash))]
pub struct Slot {
    /// The chunk's local number; meaningless while `Free`.
    pub(crate) local: u64,
    pub(crate) state: State,
    pub(crate) attempt: u16,
    pub(crate) op: OpDesc,
    pub(crate) signature: u32,
    /// Elements in the chunk; set by the first contribution with data.
    pub(crate) elements: Option<u32>,
    /// Children that contributed.
    pub(crate) bits: ChildSet,
    /// Children that contributed data.
    pub(crate) data: ChildSet,
    /// Children that want the result.
    pub(crate) want: ChildSet,
    /// Those of them that listen to the shared address; emptied once the result was sent there.
    pub(crate) shared: ChildSet,
    /// Children that the answer has yet to be sent to.
    pub(crate) pending: ChildSet,
    pub(crate) fold_next: u16,
    /// How far above this chunk others were answered before it. Up to there, a later answer is no sign that this one
    /// was lost.
    pub(crate) overtaken: u16,
    /// Length in bytes of the value to send, up or down; it is in stage 0.
    pub(crate) value_len: u16,
    /// Checksum of the value, once computed.
    pub(crate) value_crc: Option<u32>,
    /// The operation's straggler limit, if it has one.
    pub(crate) limit: Option<StragglerLimit>,
    /// The operation's first chunk, if it has a limit.
    pub(crate) op_first: u64,
    /// When the first rank at or below this node contributed, as far as known.
    pub(crate) first_at: Option<Instant>,
    /// When the last contribution came.
    pub(crate) last_at: Instant,
    /// The last rank to contribute, and how long after the first, in microseconds. Covers all ranks once answered.
    pub(crate) slowest: Option<Rank>,
    pub(crate) late_us: u32,
}

impl Slot {
    /// An unused slot.
    pub const EMPTY: Self = Self {
        local: 0,
        state: State::Free,
        attempt: 0,
        op: OpDesc::barrier(),
        signature: 0,
        elements: None,
        bits: ChildSet::EMPTY,
        data: ChildSet::EMPTY,
        want: ChildSet::EMPTY,
        shared: ChildSet::EMPTY,
        pending: ChildSet::EMPTY,
        fold_next: 0,
        overtaken: 0,
        value_len: 0,
        value_crc: None,
        limit: None,
        op_first: 0,
        first_at: None,
        last_at: Instant::ZERO,
        slowest: None,
        late_us: 0,
    };

    /// Start chunk `local` with the operation of its first contributor.
    pub(crate) fn begin(&mut self, local: u64, op: OpDesc, signature: u32) {
        *self = Self { local, state: State::Filling, op, signature, ..Self::EMPTY };
    }

    /// Return whether this slot holds chunk `local`.
    pub(crate) fn holds(&self, local: u64) -> bool {
        self.state != State::Free && self.local == local
    }

    /// Return the kernel of the slot's operation; `None` if elements are only moved, or there are none.
    pub(crate) fn kernel(&self) -> Option<Kernel> {
        Kernel::new(self.op.dtype?, self.op.op?)
    }

    /// Return the length of an element in bytes, in the accumulator type if `partial`, else in the operation's type.
    /// `None` for an operation without elements.
    pub(crate) fn element_bytes(&self, partial: bool) -> Option<usize> {
        let len = if partial { self.op.partial_bytes() } else { self.op.element_bytes() };
        (len > 0).then_some(len)
    }

    /// Return the length of the slot's accumulators in bytes.
    pub(crate) fn value_bytes(&self) -> usize {
        self.elements.unwrap_or(0) as usize * self.op.partial_bytes()
    }

    /// Return whether the answer to `child` is a Result, not a Done.
    pub(crate) fn has_result_for(&self, child: usize) -> bool {
        self.value_len > 0 && self.want.contains(child)
    }

    /// Record the arrival time of a contribution in which `slowest` came last, `late_us` after the first rank below.
    /// [`Slot::settle_time`] then finds out how late it was.
    #[inline]
    pub(crate) fn note_time(&mut self, slowest: Option<Rank>, late_us: u32, now: Instant) {
        let began = Instant::from_nanos(now.as_nanos().saturating_sub(u64::from(late_us) * 1000));
        let first = self.first_at.map_or(began, |first| first.min(began));
        (self.first_at, self.last_at) = (Some(first), now);
        self.slowest = slowest;
    }

    /// Compute how long after the first rank the last one came, before that is sent. Once a chunk is enough.
    #[inline]
    pub(crate) fn settle_time(&mut self) {
        let Some(first) = self.first_at else { return };
        let late_us = self.last_at.as_nanos().saturating_sub(first.as_nanos()) / 1000;
        self.late_us = u32::try_from(late_us).unwrap_or(u32::MAX);
    }

    /// Reset times and the slowest rank: they do not affect behaviour.
    #[cfg(feature = "snapshot")]
    pub(crate) fn forget_time(&mut self) {
        (self.first_at, self.last_at, self.slowest, self.late_us) = (None, Instant::ZERO, None, 0);
    }

    /// Set a child's bit.
    ///
    /// # Panics
    /// If the bit is set: the caller must have checked, since a second contribution would be counted twice.
    #[inline]
    pub(crate) fn mark(&mut self, child: usize, with_data: bool, wants: bool) {
        assert!(!self.bits.contains(child), "a child's bit is set once per (seq, attempt)");
        self.bits.insert(child);
        if with_data {
            self.data.insert(child);
        }
        if wants {
            self.want.insert(child);
        }
    }
}

//! One chunk in flight (SHARP calls it an OST).
//!
//! ```text
//! Free -> Filling -> Answered            at the root
//! Free -> Filling -> Up -> Answered      at any other node
//!              \-> Refused               the children do not agree, or the node can't do it: waiting for the root's word
//! Answered -> Filling                    only when every child's `have` has passed the chunk
//! ```
//!
//! Invariants, asserted where they could break:
//! - a child's bit is set once per (seq, attempt);
//! - the slot holds exactly one chunk, by its full number; a packet of another chunk never touches it;
//! - the answer stays until the slot is re-used, so any child can get it again.

use crate::sets::ChildSet;
use core::time::Duration;
use sumac_hal::ids::Rank;
use sumac_hal::op::OpDesc;
use sumac_hal::reduce::Kernel;
use sumac_hal::time::Instant;
use sumac_hal::wire::Limit;

/// Where a slot is in its chunk's life.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(crate) enum State {
    /// Never used in this group.
    Free,
    /// Some children are in.
    Filling,
    /// All children are in, the contribution is on its way up.
    Up,
    /// A Nak is on its way up in place of a contribution.
    Refused,
    /// The answer is here.
    Answered,
}

/// One chunk in flight. Boards allocate these; their content is the node's.
#[derive(Debug, Clone, Copy)]
#[cfg_attr(feature = "snapshot", derive(PartialEq, Eq, Hash))]
pub struct Slot {
    /// The chunk's local number; meaningless while `Free`.
    pub(crate) local: u64,
    pub(crate) state: State,
    pub(crate) attempt: u16,
    pub(crate) op: OpDesc,
    pub(crate) signature: u32,
    /// Elements in the chunk, known from the first contribution with data.
    pub(crate) elements: Option<u32>,
    /// Who contributed.
    pub(crate) bits: ChildSet,
    /// Who of them with data.
    pub(crate) data: ChildSet,
    /// Who wants the result.
    pub(crate) want: ChildSet,
    /// Who of them listens to the shared address; nobody once the result went there.
    pub(crate) shared: ChildSet,
    /// Who is to be sent the answer.
    pub(crate) pending: ChildSet,
    pub(crate) fold_next: u16,
    /// How far above this chunk others were answered before it: till there, answers show no loss of this one's.
    pub(crate) overtaken: u16,
    /// Length of the value to be sent, up or down, in bytes; it lies in stage 0.
    pub(crate) value_len: u16,
    /// Its checksum, once somebody needed it.
    pub(crate) value_crc: Option<u32>,
    /// How long the operation waits for ranks to come to it, if not as long as it takes.
    pub(crate) limit: Option<Limit>,
    /// The operation's first seq, where there is a limit.
    pub(crate) op_first: u64,
    /// When the first rank at or below this node contributed, as far as is known.
    pub(crate) first_at: Option<Instant>,
    /// The last to contribute, and how long after the first, in microseconds; once answered, of all ranks.
    pub(crate) slowest: Option<Rank>,
    pub(crate) late_us: u32,
}

impl Slot {
    /// A slot that was never used.
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
        slowest: None,
        late_us: 0,
    };

    /// Start on chunk `local` of the operation that its first contributor calls.
    pub(crate) fn begin(&mut self, local: u64, op: OpDesc, signature: u32) {
        *self = Self { local, state: State::Filling, op, signature, ..Self::EMPTY };
    }

    /// Tell whether this slot holds chunk `local`.
    pub(crate) fn holds(&self, local: u64) -> bool {
        self.state != State::Free && self.local == local
    }

    /// Return the kernel of the slot's operation, `None` for one whose elements are only moved, or that has none.
    pub(crate) fn kernel(&self) -> Option<Kernel> {
        Kernel::new(self.op.dtype?, self.op.op?)
    }

    /// Return the length of an element in bytes: of a partial one, or of one of the operation's type. `None` for an
    /// operation without elements.
    pub(crate) fn element_bytes(&self, partial: bool) -> Option<usize> {
        let len = if partial { self.op.partial_bytes() } else { self.op.element_bytes() };
        (len > 0).then_some(len)
    }

    /// Tell whether the answer to `child` is a Result, not a Done.
    pub(crate) fn has_result_for(&self, child: usize) -> bool {
        self.value_len > 0 && self.want.contains(child)
    }

    /// Note that a contribution came at `now`, in which `slowest` was the last below, `late_us` after the first there.
    pub(crate) fn note_time(&mut self, slowest: Option<Rank>, late_us: u32, now: Instant) {
        let late_ns = Duration::from_micros(late_us.into()).as_nanos() as u64;
        let began = Instant::from_nanos(now.as_nanos().saturating_sub(late_ns));
        let first = self.first_at.map_or(began, |first| first.min(began));
        self.first_at = Some(first);
        self.slowest = slowest;
        self.late_us = u32::try_from((now - first).as_micros()).unwrap_or(u32::MAX);
    }

    /// Forget moments and who was late: they change nothing that follows.
    #[cfg(feature = "snapshot")]
    pub(crate) fn forget_time(&mut self) {
        (self.first_at, self.slowest, self.late_us) = (None, None, 0);
    }

    /// Set a child's bit.
    ///
    /// # Panics
    /// If it is set: the caller has to have asked, since a second contribution would be counted twice.
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

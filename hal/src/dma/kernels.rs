//! The arithmetic of one step, over memory that others read and write at the same time.
//!
//! Kernels work on slices, and of shared memory there are none ([`shared`](super::shared)): elements are copied, block by
//! block, into a [`Workspace`] of this side's own that stays in the L1 cache, combined there, and copied back. What goes on
//! being used is kept there: accumulators while one contribution after the other comes, and a result while one rank
//! after the other gets it.
//!
//! All of it is `reduce`'s kernels. What is added here are accumulators in a narrow type itself, as inline-reducing
//! hardware has them: widen both operands, combine, round. One rounding of an exact widening is what such hardware
//! does: f32 has more than twice the digits of the narrow types and two more, so its own rounding is invisible (Figueroa,
//! "When is double rounding innocuous?", 1995).

use super::shared::{copy_in, copy_out, transfer};
use crate::op::{Dtype, ReduceOp};
use crate::reduce::Kernel;

/// Bytes of f32 accumulators that a narrow reduction works in at a time: they stay in the L1 cache.
const BLOCK: usize = 4096;

/// What a step does to each element.
#[derive(Debug, Clone, Copy)]
pub(crate) enum Action {
    /// `dst = src`.
    Copy,
    /// `dst = widen(src)`.
    Load(Kernel),
    /// `dst = dst op src`, where `dst` is of the kernel's accumulator type.
    Combine(Kernel),
    /// `dst = round(widen(dst) op widen(src))`.
    CombineNarrow(Kernel),
    /// `dst = round(src)`, the result of so many ranks.
    Store(Kernel, u32),
    /// The same where `dst` is `src`, so that there is one span only.
    Finish(Kernel, u32),
}

impl Action {
    /// Return how to widen `source`s.
    pub(crate) fn load(source: Dtype, accumulator: Dtype) -> Option<Self> {
        if source == accumulator { Some(Self::Copy) } else { Kernel::new(source, ReduceOp::Sum).map(Self::Load) }
    }

    /// Return how to reduce `source`s into accumulators.
    pub(crate) fn reduce(op: ReduceOp, source: Dtype, accumulator: Dtype) -> Option<Self> {
        let kernel = Kernel::new(source, op)?;
        Some(if accumulator == kernel.accumulator() { Self::Combine(kernel) } else { Self::CombineNarrow(kernel) })
    }

    /// Return how to round accumulators.
    pub(crate) fn store(op: ReduceOp, output: Dtype, ranks: u32) -> Option<Self> {
        Kernel::new(output, op).map(|kernel| Self::Store(kernel, ranks))
    }

    /// Tell whether what was at the destination is of no account.
    const fn overwrites(self) -> bool {
        matches!(self, Self::Copy | Self::Load(_) | Self::Store(..))
    }

    /// Do it to slices that hold equally many elements; one that finishes has no use for `src`.
    fn apply(self, dst: &mut [u8], src: &[u8]) {
        match self {
            Self::Copy => dst.copy_from_slice(src),
            Self::Load(kernel) => kernel.load(dst, src, false),
            Self::Combine(kernel) => kernel.combine(dst, src, false),
            Self::CombineNarrow(kernel) => combine_narrow(kernel, dst, src),
            Self::Store(kernel, ranks) => kernel.store(dst, src, ranks),
            Self::Finish(kernel, ranks) => {
                kernel.finish(dst, dst.len() / kernel.accumulator_bytes(), ranks);
            }
        }
    }
}

/// Elements in shared memory, by where they begin.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Elements {
    /// Where they are, for this process.
    pub(crate) base: *mut u8,
    /// Their length together.
    pub(crate) len_bytes: usize,
}

/// A block of this side's own.
#[derive(Debug, Clone)]
#[repr(align(64))]
struct Block([u8; WORKSPACE_BLOCK_LEN_BYTES]);

/// Bytes of the elements that a workspace takes at a time, on each side of a step: two of them, and what a kernel needs besides,
/// stay in any L1 cache; boards without an operating system have less memory. Tests have many blocks of few bytes.
pub(crate) const WORKSPACE_BLOCK_LEN_BYTES: usize = match (cfg!(test), cfg!(feature = "std")) {
    (true, _) => 64,
    (false, true) => 8 << 10,
    (false, false) => 1 << 10,
};

/// Where elements are combined: a copy of what shared memory holds at one place, and of what comes to it.
///
/// Invariant: but for the bytes of `held`, where `is_dirty`, shared memory is what the steps so far make of it.
#[derive(Debug, Clone)]
pub(crate) struct Workspace {
    kept: Block,
    coming: Block,
    held: Option<Elements>,
    is_dirty: bool,
}

impl Workspace {
    pub(crate) const fn new() -> Self {
        Self {
            kept: Block([0; WORKSPACE_BLOCK_LEN_BYTES]),
            coming: Block([0; WORKSPACE_BLOCK_LEN_BYTES]),
            held: None,
            is_dirty: false,
        }
    }

    /// Do a step to equally many elements at two places, which together fit a block each, but for copies of any length.
    /// `keeps_source` says that the next step copies from here as well.
    ///
    /// # Safety
    /// This process can read and write both places, whatever its peers do, until [`Workspace::flush`] returns. They are
    /// disjoint, or, to finish, one. Among the places since the last flush, those that are written are disjoint from all
    /// others that are not the same.
    pub(crate) unsafe fn step(&mut self, action: Action, dst: Elements, src: Elements, keeps_source: bool) {
        // SAFETY, for all calls below: as the caller has promised; what is copied here is at most a block.
        if let Action::Copy = action {
            let is_kept = self.held == Some(src);
            if is_kept || keeps_source && src.len_bytes <= WORKSPACE_BLOCK_LEN_BYTES && self.held != Some(dst) {
                // SAFETY: see above.
                unsafe {
                    self.hold(src, true);
                    copy_in(dst.base, &self.kept.0[..src.len_bytes]);
                }
                return;
            }
            // What is held of the destination is overwritten, and what is held of others stays.
            if self.held == Some(dst) {
                (self.held, self.is_dirty) = (None, false);
            }
            // SAFETY: see above.
            unsafe { transfer(dst.base, src.base, dst.len_bytes) };
            return;
        }
        let coming = if let Action::Finish(..) = action {
            0
        } else {
            if self.held == Some(src) {
                // SAFETY: see above.
                unsafe { self.flush() };
            }
            let coming = &mut self.coming.0[..src.len_bytes];
            // SAFETY: see above.
            unsafe { copy_out(coming, src.base) };
            src.len_bytes
        };
        // SAFETY: see above.
        unsafe { self.hold(dst, !action.overwrites()) };
        action.apply(&mut self.kept.0[..dst.len_bytes], &self.coming.0[..coming]);
        self.is_dirty = true;
    }

    /// Hold what is at a place, or what is going to be.
    ///
    /// # Safety
    /// As [`Workspace::step`], and it fits a block.
    unsafe fn hold(&mut self, place: Elements, reads: bool) {
        if self.held == Some(place) {
            return;
        }
        // SAFETY: the caller's promise.
        unsafe { self.flush() };
        if reads {
            // SAFETY: as above.
            unsafe { copy_out(&mut self.kept.0[..place.len_bytes], place.base) };
        }
        self.held = Some(place);
    }

    /// Write back what was changed here, and hold nothing.
    ///
    /// # Safety
    /// As [`Workspace::step`].
    pub(crate) unsafe fn flush(&mut self) {
        if let (Some(place), true) = (self.held.take(), core::mem::take(&mut self.is_dirty)) {
            // SAFETY: the caller's promise.
            unsafe { copy_in(place.base, &self.kept.0[..place.len_bytes]) };
        }
    }
}

// SAFETY: a workspace that is sent away holds nothing: who uses one flushes it before it returns.
unsafe impl Send for Workspace {}
// SAFETY: through a shared borrow nothing of it is used.
unsafe impl Sync for Workspace {}

fn combine_narrow(kernel: Kernel, dst: &mut [u8], src: &[u8]) {
    let mut wide = [0; BLOCK];
    let (size_bytes, acc_bytes) = (kernel.element_bytes(), kernel.accumulator_bytes());
    let block = BLOCK / acc_bytes * size_bytes;
    for (dst, src) in dst.chunks_mut(block).zip(src.chunks(block)) {
        let wide = &mut wide[..dst.len() / size_bytes * acc_bytes];
        kernel.load(wide, dst, false);
        kernel.combine(wide, src, false);
        // Nothing is divided before the end, also of an average.
        kernel.store(dst, wide, 1);
    }
}

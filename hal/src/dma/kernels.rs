//! The arithmetic of one step, over memory that others read and write at the same time.
//!
//! Kernels work on slices, and of shared memory there are none ([`shared`](super::shared)): elements are copied, block by
//! block, into a [`Workspace`] of this side's own that stays in its caches, combined there, and copied back. What goes on
//! being used is kept there: accumulators, while one contribution after the other comes. Sums of the commonest types add
//! contributions to them without a copy ([`fused`]).
//!
//! All of it is `reduce`'s kernels. What is added here are accumulators in a narrow type itself, as inline-reducing
//! hardware has them: widen both operands, combine, round. One rounding of an exact widening is what such hardware
//! does: f32 has more than twice the digits of the narrow types and two more, so its own rounding is invisible (Figueroa,
//! "When is double rounding innocuous?", 1995).

use super::fused;
use super::shared::{copy_in, copy_out, transfer};
use crate::crc::Crc32c;
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

/// Bytes of this side's own, aligned for any vector.
#[derive(Debug, Clone)]
#[repr(align(64))]
struct Block<const LEN_BYTES: usize>([u8; LEN_BYTES]);

/// Bytes that a workspace keeps: with a part of a source beside it, they stay in an L1 cache of 32 KiB. Longer ones read
/// sources from memory faster, and are slower where all is in a cache. Boards without an operating system have less memory.
/// Tests have many tiles of few bytes.
pub(crate) const KEPT_LEN_BYTES: usize = match (cfg!(test), cfg!(feature = "std")) {
    (true, _) => 64,
    (false, true) => 16 << 10,
    (false, false) => 1 << 10,
};

/// Bytes of a source that are here at a time.
const COMING_LEN_BYTES: usize = match (cfg!(test), cfg!(feature = "std")) {
    (true, _) => 32,
    (false, true) => 8 << 10,
    (false, false) => 1 << 10,
};

/// Where elements are combined: a copy of what shared memory holds at one place, and of what comes to it.
///
/// Invariant: but for the bytes of `held`, where `is_dirty`, shared memory is what the steps so far make of it.
#[derive(Debug, Clone)]
pub(crate) struct Workspace {
    kept: Block<KEPT_LEN_BYTES>,
    coming: Block<COMING_LEN_BYTES>,
    held: Option<Elements>,
    is_dirty: bool,
}

impl Workspace {
    pub(crate) const fn new() -> Self {
        Self { kept: Block([0; KEPT_LEN_BYTES]), coming: Block([0; COMING_LEN_BYTES]), held: None, is_dirty: false }
    }

    /// Do a step to `count` elements at two places, of which each is at most [`KEPT_LEN_BYTES`] long, but for copies.
    /// `is_kept` says that the next step uses what this one writes. `crc` takes in what this one writes.
    ///
    /// # Safety
    /// This process can read and write both places, whatever its peers do, until [`Workspace::flush`] returns. They are
    /// disjoint, or, to finish, one. Among the places since the last flush, those that are written are disjoint from all
    /// others that are not the same.
    pub(crate) unsafe fn step(
        &mut self,
        action: Action,
        count: usize,
        dst: Elements,
        src: Elements,
        is_kept: bool,
        mut crc: Option<&mut Crc32c>,
    ) {
        if let Action::Copy = action {
            // SAFETY: the caller's promise.
            unsafe { self.copy(dst, src, is_kept, crc) };
            return;
        }
        let goes_elsewhere = self.held == Some(src) && self.held != Some(dst);
        if !goes_elsewhere {
            // SAFETY: the caller's promise.
            unsafe { self.hold(dst, !action.overwrites()) };
            self.is_dirty = true;
        }
        if let Action::Finish(..) = action {
            let kept = &mut self.kept.0[..dst.len_bytes];
            action.apply(kept, &[]);
            take_in(crc, kept);
            return;
        }
        let mut done = 0;
        if let (Action::Combine(kernel), false) = (action, goes_elsewhere) {
            // SAFETY: the caller's promise: the source has an element for each of the accumulators that are held.
            done = unsafe { fused::combine(kernel, &mut self.kept.0[..dst.len_bytes], src.base) };
        }
        let (dst_bytes, src_bytes) = (dst.len_bytes / count, src.len_bytes / count);
        let block = COMING_LEN_BYTES / dst_bytes.max(src_bytes);
        for from in (done..count).step_by(block) {
            let elements = block.min(count - from);
            let (to, of) = (from * dst_bytes, from * src_bytes);
            let (to_len, of_len) = (elements * dst_bytes, elements * src_bytes);
            // SAFETY: the caller's promise: these are parts of both places, and they are disjoint. What is held and dirty is
            // not at the one that is read.
            unsafe {
                if goes_elsewhere {
                    let (kept, coming) = (&self.kept.0[of..][..of_len], &mut self.coming.0[..to_len]);
                    if !action.overwrites() {
                        copy_out(coming, dst.base.add(to));
                    }
                    action.apply(coming, kept);
                    take_in(crc.as_deref_mut(), coming);
                    copy_in(dst.base.add(to), coming);
                } else {
                    let (kept, coming) = (&mut self.kept.0[to..][..to_len], &mut self.coming.0[..of_len]);
                    copy_out(coming, src.base.add(of));
                    action.apply(kept, coming);
                }
            }
        }
        if !goes_elsewhere {
            take_in(crc, &self.kept.0[..dst.len_bytes]);
        }
    }

    /// # Safety
    /// As [`Workspace::step`].
    unsafe fn copy(&mut self, dst: Elements, src: Elements, is_kept: bool, mut crc: Option<&mut Crc32c>) {
        // SAFETY: the caller's promise, for all of it. Copies have one length on both sides.
        unsafe {
            if self.held == Some(src) {
                let kept = &self.kept.0[..src.len_bytes];
                take_in(crc, kept);
                copy_in(dst.base, kept);
            } else if is_kept && src.len_bytes <= KEPT_LEN_BYTES {
                self.hold(dst, false);
                let kept = &mut self.kept.0[..src.len_bytes];
                copy_out(kept, src.base);
                take_in(crc, kept);
                self.is_dirty = true;
            } else if crc.is_some() {
                if self.held == Some(dst) {
                    (self.held, self.is_dirty) = (None, false);
                }
                for at in (0..src.len_bytes).step_by(COMING_LEN_BYTES) {
                    let coming = &mut self.coming.0[..COMING_LEN_BYTES.min(src.len_bytes - at)];
                    copy_out(coming, src.base.add(at));
                    take_in(crc.as_deref_mut(), coming);
                    copy_in(dst.base.add(at), coming);
                }
            } else {
                // What is held of the destination is overwritten.
                if self.held == Some(dst) {
                    (self.held, self.is_dirty) = (None, false);
                }
                transfer(dst.base, src.base, dst.len_bytes);
            }
        }
    }

    /// Hold what is at a place, or what is going to be.
    ///
    /// # Safety
    /// As [`Workspace::step`], and it fits.
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

/// Carry a checksum on, if there is one.
fn take_in(crc: Option<&mut Crc32c>, bytes: &[u8]) {
    if let Some(crc) = crc {
        crc.update(bytes);
    }
}

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

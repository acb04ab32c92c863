//! The arithmetic of one step, over memory that peers access concurrently.
//!
//! Kernels work on slices, which must not refer to shared memory ([`shared`](super::shared)). Elements are therefore
//! copied block by block into a private [`Workspace`], which stays in cache, combined there, and copied back.
//! Accumulators stay in the workspace from one contribution to the next. Sums of the most common types add
//! contributions to them without a copy ([`fused`]).
//!
//! The kernels are those of `reduce`. This module adds accumulators in a narrow type, as inline-reducing hardware has
//! them: widen both operands, combine, round. The result is the same as that of hardware that rounds once: f32 has at
//! least two digits more than twice those of the narrow types, so its own rounding is invisible (Figueroa, "When is
//! double rounding innocuous?", 1995).

use super::fused;
use super::shared::{copy_in, copy_out, transfer};
use crate::crc::Crc32c;
use crate::op::{Dtype, ReduceOp};
use crate::reduce::Kernel;

/// The block size of narrow reductions, in bytes of f32 accumulators, which stay in the L1 cache.
const BLOCK: usize = 4096;

/// What a step does to each element.
#[derive(Debug, Clone, Copy)]
pub(crate) enum Action {
    /// `dst = src`.
    Copy,
    /// `dst = widen(src)`.
    Load(Kernel),
    /// `dst = dst op widen(src)`, where `dst` has the kernel's accumulator type.
    Combine(Kernel),
    /// `dst = round(widen(dst) op widen(src))`.
    CombineNarrow(Kernel),
    /// `dst = round(src)`: the result of this many ranks.
    Store(Kernel, u32),
    /// `dst = round(dst)`: a store in place.
    Finish(Kernel, u32),
}

impl Action {
    /// Return the action that widens elements of type `source`.
    pub(crate) fn load(source: Dtype, accumulator: Dtype) -> Option<Self> {
        if source == accumulator { Some(Self::Copy) } else { Kernel::new(source, ReduceOp::Sum).map(Self::Load) }
    }

    /// Return the action that reduces elements of type `source` into accumulators.
    pub(crate) fn reduce(op: ReduceOp, source: Dtype, accumulator: Dtype) -> Option<Self> {
        let kernel = Kernel::new(source, op)?;
        Some(if accumulator == kernel.accumulator() { Self::Combine(kernel) } else { Self::CombineNarrow(kernel) })
    }

    /// Return the action that rounds accumulators.
    pub(crate) fn store(op: ReduceOp, output: Dtype, ranks: u32) -> Option<Self> {
        Kernel::new(output, op).map(|kernel| Self::Store(kernel, ranks))
    }

    /// Return whether the destination's previous content is irrelevant.
    const fn overwrites(self) -> bool {
        matches!(self, Self::Copy | Self::Load(_) | Self::Store(..))
    }

    /// Run the action on slices with equally many elements. [`Action::Finish`] ignores `src`.
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

/// Elements in shared memory.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Elements {
    /// Their address in this process.
    pub(crate) base: *mut u8,
    /// Their total length in bytes.
    pub(crate) len_bytes: usize,
}

/// Private bytes, aligned for vector instructions.
#[derive(Debug, Clone)]
#[repr(align(64))]
struct Block<const LEN_BYTES: usize>([u8; LEN_BYTES]);

/// The size of a workspace's working block, in bytes. Together with the staging block it fits an L1 cache of 32 KiB. A
/// larger block reads sources from memory faster, but is slower if everything is cached. Boards without an operating
/// system have less memory. Tests use small blocks to cover many of them.
pub(crate) const WORKSPACE_LEN_BYTES: usize = match (cfg!(test), cfg!(feature = "std")) {
    (true, _) => 64,
    (false, true) => 16 << 10,
    (false, false) => 1 << 10,
};

/// The size of a workspace's staging block, in bytes.
const STAGING_LEN_BYTES: usize = match (cfg!(test), cfg!(feature = "std")) {
    (true, _) => 32,
    (false, true) => 8 << 10,
    (false, false) => 1 << 10,
};

/// Private memory in which elements are combined: a working copy of one destination, and a staging block for its
/// sources.
///
/// Invariant: shared memory reflects all steps so far, except for the bytes of `held` if `is_dirty`.
#[derive(Debug, Clone)]
pub(crate) struct Workspace {
    working: Block<WORKSPACE_LEN_BYTES>,
    staging: Block<STAGING_LEN_BYTES>,
    held: Option<Elements>,
    is_dirty: bool,
}

impl Workspace {
    pub(crate) const fn new() -> Self {
        Self {
            working: Block([0; WORKSPACE_LEN_BYTES]),
            staging: Block([0; STAGING_LEN_BYTES]),
            held: None,
            is_dirty: false,
        }
    }

    /// Run an action on `count` elements. Except for copies, `dst` and `src` are at most [`WORKSPACE_LEN_BYTES`] long.
    /// `is_kept` indicates that the next step uses what this one writes. `crc` is updated with what this one writes.
    ///
    /// # Safety
    /// `dst` and `src` must be readable and writable, whatever peers do, until [`Workspace::flush`] returns. They must
    /// be disjoint or, for [`Action::Finish`], identical. Each destination since the last flush must be disjoint from,
    /// or identical to, every other source and destination since then.
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
            // SAFETY: guaranteed by the caller.
            unsafe { self.copy(dst, src, is_kept, crc) };
            return;
        }
        let is_other_dst = self.held == Some(src) && self.held != Some(dst);
        if !is_other_dst {
            // SAFETY: guaranteed by the caller.
            unsafe { self.hold(dst, !action.overwrites()) };
            self.is_dirty = true;
        }
        if let Action::Finish(..) = action {
            let working = &mut self.working.0[..dst.len_bytes];
            action.apply(working, &[]);
            update_crc(crc, working);
            return;
        }
        let mut done = 0;
        if let (Action::Combine(kernel), false) = (action, is_other_dst) {
            // SAFETY: guaranteed by the caller: the source has an element for each accumulator that is held.
            done = unsafe { fused::combine(kernel, &mut self.working.0[..dst.len_bytes], src.base) };
        }
        let (dst_bytes, src_bytes) = (dst.len_bytes / count, src.len_bytes / count);
        let block = STAGING_LEN_BYTES / dst_bytes.max(src_bytes);
        for from in (done..count).step_by(block) {
            let elements = block.min(count - from);
            let (to, of) = (from * dst_bytes, from * src_bytes);
            let (to_len, of_len) = (elements * dst_bytes, elements * src_bytes);
            // SAFETY: guaranteed by the caller: these are parts of `dst` and `src`, which are disjoint. The bytes that
            // are held and dirty are not those that are read.
            unsafe {
                if is_other_dst {
                    let (working, staging) = (&self.working.0[of..][..of_len], &mut self.staging.0[..to_len]);
                    if !action.overwrites() {
                        copy_out(staging, dst.base.add(to));
                    }
                    action.apply(staging, working);
                    update_crc(crc.as_deref_mut(), staging);
                    copy_in(dst.base.add(to), staging);
                } else {
                    let (working, staging) = (&mut self.working.0[to..][..to_len], &mut self.staging.0[..of_len]);
                    copy_out(staging, src.base.add(of));
                    action.apply(working, staging);
                }
            }
        }
        if !is_other_dst {
            update_crc(crc, &self.working.0[..dst.len_bytes]);
        }
    }

    /// # Safety
    /// As [`Workspace::step`].
    unsafe fn copy(&mut self, dst: Elements, src: Elements, is_kept: bool, mut crc: Option<&mut Crc32c>) {
        // SAFETY: guaranteed by the caller. Source and destination of a copy have the same length.
        unsafe {
            if self.held == Some(src) {
                let working = &self.working.0[..src.len_bytes];
                update_crc(crc, working);
                copy_in(dst.base, working);
            } else if is_kept && src.len_bytes <= WORKSPACE_LEN_BYTES {
                self.hold(dst, false);
                let working = &mut self.working.0[..src.len_bytes];
                copy_out(working, src.base);
                update_crc(crc, working);
                self.is_dirty = true;
            } else if crc.is_some() {
                if self.held == Some(dst) {
                    (self.held, self.is_dirty) = (None, false);
                }
                for at in (0..src.len_bytes).step_by(STAGING_LEN_BYTES) {
                    let staging = &mut self.staging.0[..STAGING_LEN_BYTES.min(src.len_bytes - at)];
                    copy_out(staging, src.base.add(at));
                    update_crc(crc.as_deref_mut(), staging);
                    copy_in(dst.base.add(at), staging);
                }
            } else {
                // A working copy of the destination is obsolete.
                if self.held == Some(dst) {
                    (self.held, self.is_dirty) = (None, false);
                }
                transfer(dst.base, src.base, dst.len_bytes);
            }
        }
    }

    /// Make `place` the destination that is held. If `reads`, copy its content first.
    ///
    /// # Safety
    /// As [`Workspace::step`]; `place` must fit the working block.
    unsafe fn hold(&mut self, place: Elements, reads: bool) {
        if self.held == Some(place) {
            return;
        }
        // SAFETY: guaranteed by the caller.
        unsafe { self.flush() };
        if reads {
            // SAFETY: see above.
            unsafe { copy_out(&mut self.working.0[..place.len_bytes], place.base) };
        }
        self.held = Some(place);
    }

    /// Write back the working copy if it has changed, and hold nothing.
    ///
    /// # Safety
    /// As [`Workspace::step`].
    pub(crate) unsafe fn flush(&mut self) {
        if let (Some(place), true) = (self.held.take(), core::mem::take(&mut self.is_dirty)) {
            // SAFETY: guaranteed by the caller.
            unsafe { copy_in(place.base, &self.working.0[..place.len_bytes]) };
        }
    }
}

// SAFETY: users flush a workspace before they return, so one that moves between threads holds no pointer.
unsafe impl Send for Workspace {}
// SAFETY: no method uses it through a shared borrow.
unsafe impl Sync for Workspace {}

/// Update the checksum, if there is one.
fn update_crc(crc: Option<&mut Crc32c>, bytes: &[u8]) {
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
        // Averages are divided only at the end.
        kernel.store(dst, wide, 1);
    }
}

//! The arithmetic of one step over bytes that the engine reaches by pointers.
//!
//! All of it is `reduce`'s kernels. What is added here are accumulators in a narrow type itself, as inline-reducing
//! hardware has them: widen both operands, combine, round. One rounding of an exact widening is what such hardware
//! does: f32 has more than twice the digits of the narrow types and two more, so its own rounding is invisible (Figueroa,
//! "When is double rounding innocuous?", 1995).

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

    /// Do it to accumulators that the result takes the place of; true if this is for one span only.
    pub(crate) fn apply_in_place(self, dst: &mut [u8]) -> bool {
        let Self::Finish(kernel, ranks) = self else { return false };
        kernel.finish(dst, dst.len() / kernel.accumulator_bytes(), ranks);
        true
    }

    /// Do it to slices that hold equally many elements.
    pub(crate) fn apply(self, dst: &mut [u8], src: &[u8]) {
        match self {
            Self::Copy => dst.copy_from_slice(src),
            Self::Load(kernel) => kernel.load(dst, src, false),
            Self::Combine(kernel) => kernel.combine(dst, src, false),
            Self::CombineNarrow(kernel) => combine_narrow(kernel, dst, src),
            Self::Store(kernel, ranks) | Self::Finish(kernel, ranks) => kernel.store(dst, src, ranks),
        }
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

//! The capabilities of engines, and the check of a step against them.

use super::{Address, Coverage, Status, Step};
use crate::op::{Dtype, ReduceOp};
use crate::reduce::Kernel;
use core::fmt;

/// The family of an engine.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
#[repr(u8)]
#[non_exhaustive]
pub enum Profile {
    /// Copies bytes: NVIDIA BlueField (DOCA DMA, mlx5 MMO), Intel DSA, AMD SDMA, copy engines of GPUs. The runtime's
    /// kernels do the arithmetic.
    CopyOnly = 1,
    /// Also combines a source into a destination of the same type: Huawei Ascend's SDMA, with sum, min and max of i8,
    /// i16, i32, f16, bf16 and f32 (CANN, `aclrtReduceAsync`). Narrow floats are rounded at every step.
    InlineReduce = 2,
    /// Also widens, accumulates in the accumulator type and rounds once, as the emulated engine does. No commercial
    /// engine is known to.
    Full = 3,
}

impl Profile {
    /// Every profile.
    pub const ALL: [Self; 3] = [Self::CopyOnly, Self::InlineReduce, Self::Full];

    /// Return the name for tables, logs and options.
    pub const fn name(self) -> &'static str {
        match self {
            Self::CopyOnly => "copy-only",
            Self::InlineReduce => "inline-reduce",
            Self::Full => "full",
        }
    }
}

impl fmt::Display for Profile {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(self.name())
    }
}

macro_rules! sets {
    ($($(#[$meta:meta])* $name:ident of $item:ident;)*) => {$(
        $(#[$meta])*
        #[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Default)]
        pub struct $name(u32);

        impl $name {
            /// The empty set.
            pub const NONE: Self = Self(0);

            /// Return the set of `items`.
            pub const fn of(items: &[$item]) -> Self {
                let (mut bits, mut at) = (0, 0);
                while at < items.len() {
                    bits |= 1 << items[at].to_wire();
                    at += 1;
                }
                Self(bits)
            }

            /// Return whether `item` is in the set.
            pub const fn contains(self, item: $item) -> bool {
                self.0 >> item.to_wire() & 1 == 1
            }

            /// Return the set as a register value: bit n stands for wire number n.
            pub const fn bits(self) -> u32 {
                self.0
            }

            /// Return the set with this register value. Bits of unknown numbers are kept.
            pub const fn from_bits(bits: u32) -> Self {
                Self(bits)
            }
        }
    )*};
}

sets! {
    /// A set of element types.
    DtypeSet of Dtype;
    /// A set of operators.
    OpSet of ReduceOp;
}

/// The capabilities of an engine.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub struct Capabilities {
    /// The engine's family.
    pub profile: Profile,
    /// The supported types of sources of reductions and, for [`Profile::Full`], of outputs.
    pub dtypes: DtypeSet,
    /// The supported operators.
    pub ops: OpSet,
    /// The required alignment of every address, in bytes: a power of two.
    pub alignment_bytes: u32,
    /// The maximum length that one step reads or writes, in bytes.
    pub max_len_bytes: u32,
    /// The maximum number of steps of a chain.
    pub max_steps: u32,
    /// The queue's capacity in descriptors (steps).
    pub queue_depth: u32,
}

/// The element types and operators of today's inline-reducing engines.
const INLINE_DTYPES: DtypeSet = DtypeSet::of(&[Dtype::I8, Dtype::I16, Dtype::I32, Dtype::F16, Dtype::Bf16, Dtype::F32]);
const INLINE_OPS: OpSet = OpSet::of(&[ReduceOp::Sum, ReduceOp::Min, ReduceOp::Max]);

impl Capabilities {
    /// Return the capabilities of an engine of this profile, with no limits other than `max_steps` and `queue_depth`.
    pub const fn new(profile: Profile, max_steps: u32, queue_depth: u32) -> Self {
        let (dtypes, ops) = match profile {
            Profile::CopyOnly => (DtypeSet::NONE, OpSet::NONE),
            Profile::InlineReduce => (INLINE_DTYPES, INLINE_OPS),
            Profile::Full => (DtypeSet::of(Dtype::ALL), OpSet::of(ReduceOp::ALL)),
        };
        Self { profile, dtypes, ops, alignment_bytes: 1, max_len_bytes: u32::MAX, max_steps, queue_depth }
    }

    /// Set the alignment, a power of two.
    #[must_use]
    pub const fn with_alignment(mut self, alignment_bytes: u32) -> Self {
        self.alignment_bytes = alignment_bytes;
        self
    }

    /// Set the maximum length of a step, in bytes.
    #[must_use]
    pub const fn with_max_len(mut self, max_len_bytes: u32) -> Self {
        self.max_len_bytes = max_len_bytes;
        self
    }

    /// Return whether the engine can reduce elements of `dtype` with `op`, in the accumulator type or in `dtype`. Both
    /// the engine and [`Kernel`] must support it.
    pub const fn reduces(&self, dtype: Dtype, op: ReduceOp) -> bool {
        self.dtypes.contains(dtype) && self.ops.contains(op) && Kernel::new(dtype, op).is_some()
    }

    /// Check a step against the capabilities, without the regions.
    ///
    /// # Errors
    /// The status of the chain: [`Status::Unsupported`], [`Status::TooLong`], [`Status::Misaligned`] or
    /// [`Status::Overlap`].
    pub fn check(&self, step: &Step) -> Result<(), Status> {
        if !self.supports(step) {
            return Err(Status::Unsupported);
        }
        let covers = if let Step::Publish { covers, .. } = *step { covers } else { Coverage::NONE };
        let longest = step.src_len_bytes().max(step.dst_len_bytes()).max(covers.len_bytes.into());
        if longest == 0 || longest > u64::from(self.max_len_bytes) {
            return Err(Status::TooLong);
        }
        let mask = u64::from(self.alignment_bytes) - 1;
        let misaligned = |address: Address| address.offset_bytes & mask != 0;
        let word = matches!(step, Step::Publish { .. }) && !step.dst().offset_bytes.is_multiple_of(8);
        if word || misaligned(step.dst()) || step.src().is_some_and(misaligned) {
            return Err(Status::Misaligned);
        }
        // The published words would be among the bytes that the checksum covers.
        if !covers.is_empty() && covers.offset_bytes < Coverage::OFFSET_MIN_BYTES {
            return Err(Status::Overlap);
        }
        Ok(())
    }

    fn supports(&self, step: &Step) -> bool {
        let full = matches!(self.profile, Profile::Full);
        match *step {
            Step::Copy { .. } | Step::Publish { .. } => true,
            Step::Load { source, accumulator, .. } => {
                full && self.dtypes.contains(source) && (accumulator == source.accumulator() || accumulator == source)
            }
            Step::Reduce { op, source, accumulator, .. } => {
                let wide = full && accumulator == source.accumulator();
                self.reduces(source, op) && (accumulator == source || wide)
            }
            Step::Store { op, accumulator, output, ranks, .. } => {
                full && self.reduces(output, op) && accumulator == output.accumulator() && ranks > 0
            }
        }
    }
}

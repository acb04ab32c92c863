//! What an engine can do, and the check of a step against it.

use super::{Address, Covers, Status, Step};
use crate::op::{Dtype, ReduceOp};
use crate::reduce::Kernel;
use core::fmt;

/// Which family of engines one is of.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
#[repr(u8)]
#[non_exhaustive]
pub enum Profile {
    /// It moves bytes: the engines of NVIDIA BlueField (DOCA DMA, mlx5 MMO), Intel DSA, AMD SDMA, copy engines of
    /// GPUs. The runtime's own kernels do the arithmetic.
    CopyOnly = 1,
    /// It also combines a source into a destination of the same type: Huawei Ascend's SDMA, with sum, min and max of
    /// i8, i16, i32, f16, bf16 and f32 (CANN, `aclrtReduceAsync`). Narrow floats are rounded at every step.
    InlineReduce = 2,
    /// It also widens, accumulates in the accumulator type and rounds once: no engine that can be bought, but what
    /// one should do, and what the emulated one does.
    Full = 3,
}

impl Profile {
    /// Every profile.
    pub const ALL: [Self; 3] = [Self::CopyOnly, Self::InlineReduce, Self::Full];

    /// Return the name used in tables, logs and options.
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

            /// Return the set of these.
            pub const fn of(items: &[$item]) -> Self {
                let (mut bits, mut at) = (0, 0);
                while at < items.len() {
                    bits |= 1 << items[at].to_wire();
                    at += 1;
                }
                Self(bits)
            }

            /// Tell whether `item` is in the set.
            pub const fn contains(self, item: $item) -> bool {
                self.0 >> item.to_wire() & 1 == 1
            }

            /// Return the bits as a register holds them: bit n for wire number n.
            pub const fn bits(self) -> u32 {
                self.0
            }

            /// Return the set of a register's bits; those of numbers that this version does not know stay set.
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

/// What an engine can do.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub struct Capabilities {
    /// The family.
    pub profile: Profile,
    /// The types of the sources that it reduces, and, if it is [`Profile::Full`], of the outputs.
    pub dtypes: DtypeSet,
    /// The operators that it has.
    pub ops: OpSet,
    /// What every address has to be a multiple of, in bytes: a power of two.
    pub alignment_bytes: u32,
    /// The most bytes that one step reads or writes.
    pub max_len_bytes: u32,
    /// The most steps of a chain.
    pub max_steps: u32,
    /// The most descriptors (steps) that wait in its queue.
    pub queue_depth: u32,
}

/// What the reducing engines of today have.
const INLINE_DTYPES: DtypeSet = DtypeSet::of(&[Dtype::I8, Dtype::I16, Dtype::I32, Dtype::F16, Dtype::Bf16, Dtype::F32]);
const INLINE_OPS: OpSet = OpSet::of(&[ReduceOp::Sum, ReduceOp::Min, ReduceOp::Max]);

impl Capabilities {
    /// Describe an engine of a profile with no limits of its own beyond `max_steps` and `queue_depth`.
    pub const fn new(profile: Profile, max_steps: u32, queue_depth: u32) -> Self {
        let (dtypes, ops) = match profile {
            Profile::CopyOnly => (DtypeSet::NONE, OpSet::NONE),
            Profile::InlineReduce => (INLINE_DTYPES, INLINE_OPS),
            Profile::Full => (DtypeSet::of(Dtype::ALL), OpSet::of(ReduceOp::ALL)),
        };
        Self { profile, dtypes, ops, alignment_bytes: 1, max_len_bytes: u32::MAX, max_steps, queue_depth }
    }

    /// Replace the alignment; `alignment_bytes` is a power of two.
    #[must_use]
    pub const fn with_alignment(mut self, alignment_bytes: u32) -> Self {
        self.alignment_bytes = alignment_bytes;
        self
    }

    /// Replace the longest step.
    #[must_use]
    pub const fn with_max_len(mut self, max_len_bytes: u32) -> Self {
        self.max_len_bytes = max_len_bytes;
        self
    }

    /// Tell whether the engine can reduce elements of `dtype` with `op`, in the accumulator type or in `dtype`. It
    /// takes what both it and [`Kernel`] have.
    pub const fn reduces(&self, dtype: Dtype, op: ReduceOp) -> bool {
        self.dtypes.contains(dtype) && self.ops.contains(op) && Kernel::new(dtype, op).is_some()
    }

    /// Check a step as far as it can be without the regions.
    ///
    /// # Errors
    /// The status that the chain ends with: [`Status::Unsupported`], [`Status::TooLong`] or [`Status::Misaligned`].
    pub fn check(&self, step: &Step) -> Result<(), Status> {
        if !self.supports(step) {
            return Err(Status::Unsupported);
        }
        let covers = if let Step::Publish { covers, .. } = *step { covers } else { Covers::NOTHING };
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
        // The words would be part of what they vouch for.
        if !covers.is_nothing() && covers.skip_bytes < Covers::SKIP_MIN_BYTES {
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

//! What an operation is: collective, element type, operator, and the signature that ranks compare.
//!
//! The numbers are wire format and frozen; the gaps belong to types and operators that later versions add,
//! so an unknown number is refused by name instead of being taken for something else.

use crate::ids::{ChunkNo, Rank};
use core::fmt;
use serde::{Deserialize, Serialize};

macro_rules! wire_enum {
    ($(#[$meta:meta])* $name:ident, $what:literal { $($(#[$vmeta:meta])* $variant:ident = $num:literal, $text:literal;)* }) => {
        $(#[$meta])*
        #[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
        #[repr(u8)]
        #[non_exhaustive]
        pub enum $name { $($(#[$vmeta])* $variant = $num,)* }

        impl $name {
            #[doc = concat!("Every ", $what, " of this version.")]
            pub const ALL: &'static [Self] = &[$(Self::$variant),*];

            #[doc = concat!("Return the ", $what, " of a wire number, if this version knows it.")]
            pub const fn from_wire(number: u8) -> Option<Self> {
                match number { $($num => Some(Self::$variant),)* _ => None }
            }

            /// Return the wire number.
            pub const fn to_wire(self) -> u8 {
                self as u8
            }

            /// Return the name that the command line and nccl-tests use.
            pub const fn name(self) -> &'static str {
                match self { $(Self::$variant => $text,)* }
            }

            #[doc = concat!("Return the ", $what, " of that name.")]
            pub fn from_name(name: &str) -> Option<Self> {
                match name { $($text => Some(Self::$variant),)* _ => None }
            }
        }

        impl fmt::Display for $name {
            fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.pad(self.name())
            }
        }
    };
}

wire_enum! {
    /// A collective operation.
    Collective, "collective" {
        /// Everybody contributes, everybody receives.
        AllReduce = 1, "all_reduce";
        /// Everybody contributes, the root receives.
        Reduce = 2, "reduce";
        /// The root contributes, everybody receives.
        Broadcast = 3, "broadcast";
        /// Everybody contributes, the owner of a block receives it.
        ReduceScatter = 4, "reduce_scatter";
        /// The owner of a block contributes it, everybody receives.
        AllGather = 5, "all_gather";
        /// Nobody contributes data, nobody receives any; everybody waits for everybody.
        Barrier = 6, "barrier";
        /// The owner of a block contributes it, the root receives. By schedules only.
        Gather = 7, "gather";
        /// The root contributes, the owner of a block receives it. By schedules only.
        Scatter = 8, "scatter";
        /// Every rank has a block for every rank. By schedules only.
        AllToAll = 9, "all_to_all";
        /// The same with blocks of any length. By schedules only.
        AllToAllV = 10, "all_to_all_v";
    }
}

impl Collective {
    /// Tell whether contributions combine: then the operation has an operator, else its elements are only moved.
    pub const fn reduces(self) -> bool {
        matches!(self, Self::AllReduce | Self::Reduce | Self::ReduceScatter)
    }

    /// Tell whether one rank has another part than the others: its root.
    pub const fn is_rooted(self) -> bool {
        matches!(self, Self::Reduce | Self::Broadcast | Self::Gather | Self::Scatter)
    }

    /// Tell whether an aggregation tree can do it, as one contribution and one answer for each chunk.
    pub const fn is_offloadable(self) -> bool {
        matches!(
            self,
            Self::AllReduce | Self::Reduce | Self::Broadcast | Self::ReduceScatter | Self::AllGather | Self::Barrier
        )
    }
}

wire_enum! {
    /// An element type. Numbers 1..=4, 6, 8, 13, 14 are kept for i8, u8, i16, u16, u32, u64, fp8 e4m3 and e5m2.
    Dtype, "element type" {
        /// 32-bit signed integer; sums wrap.
        I32 = 5, "i32";
        /// 64-bit signed integer; sums wrap.
        I64 = 7, "i64";
        /// IEEE 754 binary16; accumulated in [`Dtype::F32`].
        F16 = 9, "f16";
        /// bfloat16; accumulated in [`Dtype::F32`].
        Bf16 = 10, "bf16";
        /// IEEE 754 binary32.
        F32 = 11, "f32";
        /// IEEE 754 binary64.
        F64 = 12, "f64";
    }
}

impl Dtype {
    /// Return the size of one element in bytes.
    pub const fn size_bytes(self) -> usize {
        match self {
            Self::F16 | Self::Bf16 => 2,
            Self::I32 | Self::F32 => 4,
            Self::I64 | Self::F64 => 8,
        }
    }

    /// Return the type in which nodes accumulate, and in which partial results travel (PROTOCOL 9).
    pub const fn accumulator(self) -> Self {
        match self {
            Self::F16 | Self::Bf16 => Self::F32,
            other => other,
        }
    }
}

wire_enum! {
    /// A reduction operator. Number 2 is kept for the product, 5 and up for averages, bits and locations.
    ReduceOp, "operator" {
        /// Sum: integers wrap, floats round once an addition in the accumulator type.
        Sum = 1, "sum";
        /// IEEE 754-2019 `minimum`: NaN wins, -0 < +0.
        Min = 3, "min";
        /// IEEE 754-2019 `maximum`: NaN wins, -0 < +0.
        Max = 4, "max";
    }
}

/// Which way an operation takes, as far as ranks must agree on it (PROTOCOL 2).
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[repr(u8)]
#[non_exhaustive]
pub enum Path {
    /// Through the aggregation tree.
    Tree = 1,
    /// By the ring schedule, host to host.
    Ring = 2,
    /// By the recursive halving-doubling schedule, host to host.
    HalvingDoubling = 3,
    /// By the dissemination schedule, host to host: barriers where there is no tree.
    Dissemination = 4,
    /// Nowhere: a communicator of one rank.
    Local = 5,
}

impl Path {
    /// Every path.
    pub const ALL: [Self; 5] = [Self::Tree, Self::Ring, Self::HalvingDoubling, Self::Dissemination, Self::Local];

    /// Return the path of a wire number, if this version knows it.
    pub fn from_wire(number: u8) -> Option<Self> {
        Self::ALL.into_iter().find(|&path| path as u8 == number)
    }

    /// Return the name used in tables, logs and options.
    pub const fn name(self) -> &'static str {
        match self {
            Self::Tree => "tree",
            Self::Ring => "ring",
            Self::HalvingDoubling => "hd",
            Self::Dissemination => "dissemination",
            Self::Local => "local",
        }
    }
}

/// One operation as all ranks must call it.
///
/// Barriers carry no elements: `dtype` and `op` are `None` and travel as 0.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct OpDesc {
    /// The collective.
    pub collective: Collective,
    /// The element type, `None` for a barrier.
    pub dtype: Option<Dtype>,
    /// The operator, `None` for a barrier.
    pub op: Option<ReduceOp>,
    /// The root of rooted collectives; rank 0 otherwise.
    pub root: Rank,
    /// The number of elements of the whole operation: over all blocks where ranks own blocks.
    pub count: u64,
}

impl OpDesc {
    /// Describe an all-reduce of `count` elements.
    pub const fn all_reduce(dtype: Dtype, op: ReduceOp, count: u64) -> Self {
        Self { collective: Collective::AllReduce, dtype: Some(dtype), op: Some(op), root: Rank(0), count }
    }

    /// Describe a reduction of `count` elements to `root`.
    pub const fn reduce(dtype: Dtype, op: ReduceOp, root: Rank, count: u64) -> Self {
        Self { collective: Collective::Reduce, dtype: Some(dtype), op: Some(op), root, count }
    }

    /// Describe a broadcast of `count` elements from `root`.
    pub const fn broadcast(dtype: Dtype, root: Rank, count: u64) -> Self {
        Self { collective: Collective::Broadcast, dtype: Some(dtype), op: None, root, count }
    }

    /// Describe a reduce-scatter of `count` elements over all blocks.
    pub const fn reduce_scatter(dtype: Dtype, op: ReduceOp, count: u64) -> Self {
        Self { collective: Collective::ReduceScatter, dtype: Some(dtype), op: Some(op), root: Rank(0), count }
    }

    /// Describe an all-gather of `count` elements over all blocks.
    pub const fn all_gather(dtype: Dtype, count: u64) -> Self {
        Self { collective: Collective::AllGather, dtype: Some(dtype), op: None, root: Rank(0), count }
    }

    /// Describe a barrier.
    pub const fn barrier() -> Self {
        Self { collective: Collective::Barrier, dtype: None, op: None, root: Rank(0), count: 0 }
    }

    /// Return the operation's signature: CRC-32C over its fields, the path and the cost table's version.
    ///
    /// It guards against ranks that call different things, not against an adversary, who could compute it.
    pub fn signature(&self, path: Path, table_version: u32) -> u32 {
        let mut bytes = [0_u8; 20];
        bytes[0] = self.collective.to_wire();
        bytes[1] = self.dtype.map_or(0, Dtype::to_wire);
        bytes[2] = self.op.map_or(0, ReduceOp::to_wire);
        bytes[3] = path as u8;
        bytes[4..8].copy_from_slice(&self.root.0.to_le_bytes());
        bytes[8..16].copy_from_slice(&self.count.to_le_bytes());
        bytes[16..20].copy_from_slice(&table_version.to_le_bytes());
        crate::wire::crc32c(&bytes)
    }

    /// Return the signature of the operation in a tree, where it begins at seq `first`.
    ///
    /// The first seq keeps operations apart that are called alike but begin at different seqs: they follow one that
    /// some rank called with another number of chunks. Their chunks must not combine, whichever shard sees them
    /// first.
    pub fn tree_signature(&self, path: Path, table_version: u32, first: ChunkNo) -> u32 {
        let mut bytes = [0_u8; 12];
        bytes[..4].copy_from_slice(&self.signature(path, table_version).to_le_bytes());
        bytes[4..].copy_from_slice(&first.0.to_le_bytes());
        crate::wire::crc32c(&bytes)
    }
}

impl fmt::Display for OpDesc {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.collective.fmt(f)?;
        if let Some(dtype) = self.dtype {
            write!(f, " {dtype}")?;
            if let Some(op) = self.op {
                write!(f, " {op}")?;
            }
            write!(f, " x {}", self.count)?;
        }
        if self.collective.is_rooted() {
            write!(f, ", root {}", self.root.0)?;
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_field_reaches_the_signature() {
        let base = OpDesc::all_reduce(Dtype::F32, ReduceOp::Sum, 7);
        let sig = base.signature(Path::Tree, 1);
        let others = [
            OpDesc { collective: Collective::Barrier, ..base }.signature(Path::Tree, 1),
            OpDesc { dtype: Some(Dtype::I32), ..base }.signature(Path::Tree, 1),
            OpDesc { op: Some(ReduceOp::Max), ..base }.signature(Path::Tree, 1),
            OpDesc { root: Rank(1), ..base }.signature(Path::Tree, 1),
            OpDesc { count: 8, ..base }.signature(Path::Tree, 1),
            base.signature(Path::Ring, 1),
            base.signature(Path::Tree, 2),
        ];
        assert!(others.iter().all(|&other| other != sig));
        let at = |seq| base.tree_signature(Path::Tree, 1, ChunkNo(seq));
        assert!(at(0) != at(1) && at(0) != at(1 << 40));
    }

    #[test]
    fn numbers_and_names_round_trip() {
        for &dtype in Dtype::ALL {
            assert_eq!(Dtype::from_wire(dtype.to_wire()), Some(dtype));
            assert_eq!(Dtype::from_name(dtype.name()), Some(dtype));
        }
        assert_eq!(Dtype::from_wire(0), None);
        assert_eq!(ReduceOp::from_name("nonsense"), None);
    }
}

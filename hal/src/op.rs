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
    /// An element type. [`reduce`](crate::reduce) has the table of what each does under each operator.
    Dtype, "element type" {
        /// 8-bit signed integer; sums and products wrap.
        I8 = 1, "i8";
        /// 8-bit unsigned integer; sums and products wrap.
        U8 = 2, "u8";
        /// 16-bit signed integer; sums and products wrap.
        I16 = 3, "i16";
        /// 16-bit unsigned integer; sums and products wrap.
        U16 = 4, "u16";
        /// 32-bit signed integer; sums and products wrap.
        I32 = 5, "i32";
        /// 32-bit unsigned integer; sums and products wrap.
        U32 = 6, "u32";
        /// 64-bit signed integer; sums and products wrap.
        I64 = 7, "i64";
        /// 64-bit unsigned integer; sums and products wrap.
        U64 = 8, "u64";
        /// IEEE 754 binary16; accumulated in [`Dtype::F32`].
        F16 = 9, "f16";
        /// bfloat16; accumulated in [`Dtype::F32`].
        Bf16 = 10, "bf16";
        /// IEEE 754 binary32.
        F32 = 11, "f32";
        /// IEEE 754 binary64.
        F64 = 12, "f64";
        /// OCP 8-bit float E4M3 (no infinities, so "fn" in other libraries); accumulated in [`Dtype::F32`].
        E4m3 = 13, "f8e4m3";
        /// OCP 8-bit float E5M2; accumulated in [`Dtype::F32`].
        E5m2 = 14, "f8e5m2";
    }
}

impl Dtype {
    /// Return the size of one value in bytes. An operation's element may be two: [`OpDesc::element_bytes`].
    pub const fn size_bytes(self) -> usize {
        match self {
            Self::I8 | Self::U8 | Self::E4m3 | Self::E5m2 => 1,
            Self::I16 | Self::U16 | Self::F16 | Self::Bf16 => 2,
            Self::I32 | Self::U32 | Self::F32 => 4,
            Self::I64 | Self::U64 | Self::F64 => 8,
        }
    }

    /// Return the type in which nodes accumulate, and in which partial results travel (PROTOCOL 9).
    pub const fn accumulator(self) -> Self {
        match self {
            Self::F16 | Self::Bf16 | Self::E4m3 | Self::E5m2 => Self::F32,
            other => other,
        }
    }

    /// Return whether this is an integer type.
    pub const fn is_integer(self) -> bool {
        self.to_wire() <= Self::U64.to_wire()
    }
}

wire_enum! {
    /// A reduction operator.
    ReduceOp, "operator" {
        /// Sum: integers wrap, floats round once an addition in the accumulator type.
        Sum = 1, "sum";
        /// Product: integers wrap, floats round once a multiplication in the accumulator type.
        Prod = 2, "prod";
        /// IEEE 754-2019 `minimum`: NaN wins, -0 < +0.
        Min = 3, "min";
        /// IEEE 754-2019 `maximum`: NaN wins, -0 < +0.
        Max = 4, "max";
        /// The sum, divided once by the number of ranks where the result is rounded.
        Avg = 5, "avg";
        /// The sum of contributions that each rank has multiplied by a scalar of its own before they leave.
        PremulSum = 6, "premul_sum";
        /// Bitwise and of integers.
        Band = 7, "band";
        /// Bitwise or of integers.
        Bor = 8, "bor";
        /// Bitwise exclusive or of integers.
        Bxor = 9, "bxor";
        /// Logical and of integers: 1 if none is 0, else 0.
        Land = 10, "land";
        /// Logical or of integers: 1 if any is not 0, else 0.
        Lor = 11, "lor";
        /// Logical exclusive or of integers: 1 if an odd number of them is not 0, else 0.
        Lxor = 12, "lxor";
        /// The least of {value, index} pairs: NaN wins, ties go to the lowest index.
        MinLoc = 13, "minloc";
        /// The greatest of {value, index} pairs: NaN wins, ties go to the lowest index.
        MaxLoc = 14, "maxloc";
    }
}

impl ReduceOp {
    /// Return whether elements are pairs of a value and an unsigned index of the same size.
    pub const fn is_located(self) -> bool {
        matches!(self, Self::MinLoc | Self::MaxLoc)
    }
}

wire_enum! {
    /// Which way an operation takes, as far as ranks must agree on it (PROTOCOL 2): the network's tree, or a family of
    /// schedules from host to host.
    Path, "path" {
        /// Through the aggregation tree.
        Tree = 1, "tree";
        /// By ring.
        Ring = 2, "ring";
        /// By recursive halving and doubling.
        HalvingDoubling = 3, "hd";
        /// By dissemination.
        Dissemination = 4, "dissemination";
        /// Nowhere: a communicator of one rank.
        Local = 5, "local";
        /// By recursive doubling.
        RecursiveDoubling = 6, "rd";
        /// By binomial trees.
        Binomial = 7, "binomial";
        /// By Bruck's algorithm.
        Bruck = 8, "bruck";
        /// By pairwise exchange.
        Pairwise = 9, "pairwise";
        /// By the aggregation tree's expression, with ranks in the places of its nodes.
        HostTree = 10, "host-tree";
        /// From one rank to another.
        PointToPoint = 11, "point-to-point";
        /// By NCCL, over the memory of GPUs.
        Nccl = 12, "nccl";
    }
}

/// One operation as all ranks must call it.
///
/// Barriers carry no elements: `dtype` and `op` are `None` and travel as 0.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
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

    /// Return the size of one element in bytes: of a value, or of a pair for operators with locations. 0 for an
    /// operation without elements.
    pub const fn element_bytes(&self) -> usize {
        match self.dtype {
            Some(dtype) => dtype.size_bytes() * self.values_each(),
            None => 0,
        }
    }

    /// Return the size of one element of a partial result in bytes: as [`OpDesc::element_bytes`], in the accumulator
    /// type. What is only moved has no other form.
    pub const fn partial_bytes(&self) -> usize {
        match (self.dtype, self.op) {
            (Some(dtype), Some(_)) => dtype.accumulator().size_bytes() * self.values_each(),
            _ => self.element_bytes(),
        }
    }

    const fn values_each(&self) -> usize {
        match self.op {
            Some(op) if op.is_located() => 2,
            _ => 1,
        }
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
    fn an_element_is_a_value_or_a_pair() {
        let sizes = |dtype, op| {
            let desc = OpDesc::all_reduce(dtype, op, 1);
            (desc.element_bytes(), desc.partial_bytes())
        };
        assert_eq!(sizes(Dtype::E4m3, ReduceOp::Prod), (1, 4));
        assert_eq!(sizes(Dtype::F64, ReduceOp::Min), (8, 8));
        assert_eq!(sizes(Dtype::F32, ReduceOp::MinLoc), (8, 8));
        assert_eq!(sizes(Dtype::U64, ReduceOp::MaxLoc), (16, 16));
        let moved = OpDesc::all_gather(Dtype::F16, 1);
        assert_eq!((moved.element_bytes(), moved.partial_bytes()), (2, 2));
        assert_eq!(OpDesc::barrier().element_bytes(), 0);
    }

    #[test]
    fn the_integers_are_named() {
        let integers: Vec<_> = Dtype::ALL.iter().filter(|dtype| dtype.is_integer()).map(|dtype| dtype.name()).collect();
        assert_eq!(integers, ["i8", "u8", "i16", "u16", "i32", "u32", "i64", "u64"]);
    }

    #[test]
    fn numbers_and_names_round_trip() {
        for &dtype in Dtype::ALL {
            assert_eq!(Dtype::from_wire(dtype.to_wire()), Some(dtype));
            assert_eq!(Dtype::from_name(dtype.name()), Some(dtype));
        }
        for &op in ReduceOp::ALL {
            assert_eq!(ReduceOp::from_wire(op.to_wire()), Some(op));
            assert_eq!(ReduceOp::from_name(op.name()), Some(op));
        }
        assert_eq!(Dtype::from_wire(0), None);
        assert_eq!(Dtype::from_wire(15), None);
        assert_eq!(ReduceOp::from_wire(15), None);
        assert_eq!(ReduceOp::from_name("nonsense"), None);
    }
}

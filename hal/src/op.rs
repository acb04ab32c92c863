//! The description of an operation: collective, element type, operator and root, and the signature that ranks compare.
//!
//! The numbers are part of the wire format and never change. An unknown number is refused, so that later versions can
//! add types and operators.

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

            #[doc = concat!("Return the ", $what, " with this wire number, if this version knows it.")]
            pub const fn from_wire(number: u8) -> Option<Self> {
                match number { $($num => Some(Self::$variant),)* _ => None }
            }

            /// Return the wire number.
            pub const fn to_wire(self) -> u8 {
                self as u8
            }

            /// Return the name that `sumac` and nccl-tests use.
            pub const fn name(self) -> &'static str {
                match self { $(Self::$variant => $text,)* }
            }

            #[doc = concat!("Return the ", $what, " with this name, if there is one.")]
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
        /// All ranks contribute, all ranks receive the reduction.
        AllReduce = 1, "all_reduce";
        /// All ranks contribute, the root receives the reduction.
        Reduce = 2, "reduce";
        /// The root contributes, all ranks receive.
        Broadcast = 3, "broadcast";
        /// All ranks contribute, each rank receives its block of the reduction.
        ReduceScatter = 4, "reduce_scatter";
        /// Each rank contributes its block, all ranks receive every block.
        AllGather = 5, "all_gather";
        /// No data; every rank waits for all ranks.
        Barrier = 6, "barrier";
        /// Each rank contributes its block, the root receives every block. Host collectives only.
        Gather = 7, "gather";
        /// The root contributes, each rank receives its block. Host collectives only.
        Scatter = 8, "scatter";
        /// Every rank sends one block to every rank. Host collectives only.
        AllToAll = 9, "all_to_all";
        /// All-to-all with blocks of different lengths. Host collectives only.
        AllToAllV = 10, "all_to_all_v";
    }
}

impl Collective {
    /// Return whether the collective combines contributions with an operator. Otherwise it only moves elements.
    pub const fn reduces(self) -> bool {
        matches!(self, Self::AllReduce | Self::Reduce | Self::ReduceScatter)
    }

    /// Return whether the collective has a root.
    pub const fn is_rooted(self) -> bool {
        matches!(self, Self::Reduce | Self::Broadcast | Self::Gather | Self::Scatter)
    }

    /// Return whether an aggregation tree can run the collective, with one contribution and one answer per chunk.
    pub const fn is_offloadable(self) -> bool {
        matches!(
            self,
            Self::AllReduce | Self::Reduce | Self::Broadcast | Self::ReduceScatter | Self::AllGather | Self::Barrier
        )
    }
}

wire_enum! {
    /// An element type. See the table in [`reduce`](crate::reduce) for what each operator does with each type.
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
        /// OCP 8-bit float E4M3 (without infinities; other libraries call it "e4m3fn"); accumulated in [`Dtype::F32`].
        E4m3 = 13, "f8e4m3";
        /// OCP 8-bit float E5M2; accumulated in [`Dtype::F32`].
        E5m2 = 14, "f8e5m2";
    }
}

impl Dtype {
    /// Return the size of one value in bytes. An element may consist of two values: see [`OpDesc::element_bytes`].
    #[inline]
    pub const fn size_bytes(self) -> usize {
        match self {
            Self::I8 | Self::U8 | Self::E4m3 | Self::E5m2 => 1,
            Self::I16 | Self::U16 | Self::F16 | Self::Bf16 => 2,
            Self::I32 | Self::U32 | Self::F32 => 4,
            Self::I64 | Self::U64 | Self::F64 => 8,
        }
    }

    /// Return the type of accumulators and of partial results on the wire (PROTOCOL 9).
    #[inline]
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
        /// Sum. Integers wrap; floats are rounded to the accumulator type after each addition.
        Sum = 1, "sum";
        /// Product. Integers wrap; floats are rounded to the accumulator type after each multiplication.
        Prod = 2, "prod";
        /// IEEE 754-2019 `minimum`: NaN propagates, and -0 < +0.
        Min = 3, "min";
        /// IEEE 754-2019 `maximum`: NaN propagates, and -0 < +0.
        Max = 4, "max";
        /// Average: the sum, divided once by the number of ranks, before the result is rounded.
        Avg = 5, "avg";
        /// Sum of the contributions, each multiplied by a scalar of its rank before it is sent.
        PremulSum = 6, "premul_sum";
        /// Bitwise and of integers.
        Band = 7, "band";
        /// Bitwise or of integers.
        Bor = 8, "bor";
        /// Bitwise exclusive or of integers.
        Bxor = 9, "bxor";
        /// Logical and of integers: 1 if no value is 0, else 0.
        Land = 10, "land";
        /// Logical or of integers: 1 if any value is not 0, else 0.
        Lor = 11, "lor";
        /// Logical exclusive or of integers: 1 if an odd number of values is not 0, else 0.
        Lxor = 12, "lxor";
        /// The pair {value, index} with the smallest value: NaN propagates, and ties go to the lowest index.
        MinLoc = 13, "minloc";
        /// The pair {value, index} with the largest value: NaN propagates, and ties go to the lowest index.
        MaxLoc = 14, "maxloc";
    }
}

impl ReduceOp {
    /// Return whether an element is a pair of a value and an unsigned index of the same size.
    pub const fn is_located(self) -> bool {
        matches!(self, Self::MinLoc | Self::MaxLoc)
    }
}

wire_enum! {
    /// The path of an operation, on which all ranks must agree (PROTOCOL 2): the aggregation tree, or an algorithm
    /// between ranks.
    Path, "path" {
        /// Through the aggregation tree.
        Tree = 1, "tree";
        /// Ring.
        Ring = 2, "ring";
        /// Recursive halving and doubling.
        HalvingDoubling = 3, "hd";
        /// Dissemination.
        Dissemination = 4, "dissemination";
        /// No communication: a communicator of one rank.
        Local = 5, "local";
        /// Recursive doubling.
        RecursiveDoubling = 6, "rd";
        /// Binomial tree.
        Binomial = 7, "binomial";
        /// Bruck's algorithm.
        Bruck = 8, "bruck";
        /// Pairwise exchange.
        Pairwise = 9, "pairwise";
        /// The aggregation tree's expression, evaluated by ranks in place of nodes.
        HostTree = 10, "host-tree";
        /// From one rank to another.
        PointToPoint = 11, "point-to-point";
        /// NCCL, on GPU memory.
        Nccl = 12, "nccl";
        /// One-shot exchange: every rank sends to every other directly, in one step.
        OneShot = 13, "one-shot";
        /// A star: one rank collects and distributes.
        Star = 20, "star";
        /// Full mesh: every rank exchanges with all others at once.
        FullMesh = 21, "full-mesh";
        /// Double binary tree.
        DoubleTree = 22, "dbt";
        /// Nonuniform hierarchical ring.
        Nhr = 23, "nhr";
        /// Parallel aggregated trees.
        Pat = 24, "pat";
        /// Swing, in its bandwidth form.
        Swing = 25, "swing";
        /// Swing, in its latency form.
        SwingLatency = 26, "swing-latency";
        /// Bine trees and butterflies.
        Bine = 27, "bine";
        /// Van de Geijn's broadcast: scatter, then all-gather.
        VanDeGeijn = 28, "van-de-geijn";
        /// Rings along the dimensions of a grid, one after the other.
        Ring2d = 29, "2d-ring";
        /// Rings along all dimensions of a torus at once, each on its share.
        Torus2d = 30, "2d-torus";
        /// Exchanges between neighbours of a mesh without links around its ends.
        Mesh2d = 31, "2d-mesh";
        /// Full meshes inside servers, and rings between them.
        HierarchicalRing = 32, "hier-ring";
        /// Pipelined chain: each rank passes segments on to the next one.
        Chain = 33, "chain";
        /// Full meshes inside servers, and pairwise exchange between them.
        HierarchicalPairwise = 34, "hier-pairwise";
        /// Reduce-scatter inside servers, a tree for each rail, all-gather inside.
        Hybrid = 35, "hybrid";
        /// Reduce inside servers, all-reduce of their leaders in a tree, broadcast inside.
        Rab = 36, "rab";
    }
}

/// The parameters of an operation that must be the same on all ranks.
///
/// A barrier has no elements: `dtype` and `op` are `None`, and 0 on the wire.
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
    /// The number of elements of the whole operation: the sum over all blocks where each rank has one.
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

    /// Return the operation's signature: CRC-32C over its fields, the path and the version of the cost table.
    ///
    /// It detects ranks that call different operations. It does not protect against an adversary, who can compute it.
    pub fn signature(&self, path: Path, table_version: u32) -> u32 {
        let mut bytes = [0_u8; 20];
        bytes[0] = self.collective.to_wire();
        bytes[1] = self.dtype.map_or(0, Dtype::to_wire);
        bytes[2] = self.op.map_or(0, ReduceOp::to_wire);
        bytes[3] = path as u8;
        bytes[4..8].copy_from_slice(&self.root.0.to_le_bytes());
        bytes[8..16].copy_from_slice(&self.count.to_le_bytes());
        bytes[16..20].copy_from_slice(&table_version.to_le_bytes());
        crate::crc::crc32c(&bytes)
    }

    /// Return the operation's signature in a tree, where it starts at seq `first`.
    ///
    /// The first seq distinguishes equal calls that start at different seqs, after an operation that some rank called
    /// with a different number of chunks. Their chunks must not combine, whichever shard receives them first.
    pub fn tree_signature(&self, path: Path, table_version: u32, first: ChunkNo) -> u32 {
        let mut bytes = [0_u8; 12];
        bytes[..4].copy_from_slice(&self.signature(path, table_version).to_le_bytes());
        bytes[4..].copy_from_slice(&first.0.to_le_bytes());
        crate::crc::crc32c(&bytes)
    }

    /// Return the size of one element in bytes: one value, or two for operators with an index. 0 for an operation
    /// without elements.
    #[inline]
    pub const fn element_bytes(&self) -> usize {
        match self.dtype {
            Some(dtype) => dtype.size_bytes() * self.values_each(),
            None => 0,
        }
    }

    /// Return the size of one element of a partial result in bytes: like [`OpDesc::element_bytes`], but in the
    /// accumulator type. Elements that are only moved have no partial form.
    #[inline]
    pub const fn partial_bytes(&self) -> usize {
        match (self.dtype, self.op) {
            (Some(dtype), Some(_)) => dtype.accumulator().size_bytes() * self.values_each(),
            _ => self.element_bytes(),
        }
    }

    #[inline]
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
    fn signature_depends_on_every_field() {
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
    fn element_size_counts_one_value_or_a_pair() {
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
    fn is_integer_holds_for_exactly_the_integer_types() {
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

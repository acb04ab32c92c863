//! NCCL as one more way of an all-reduce: when it can be taken, and what it can't do.
//!
//! It is a candidate like any other, with a cost and a place in the explanation, or with the first condition that rules
//! it out. It never stands in for another way in silence.
//!
//! What it does not do: keep a declared order of sums that round; bitwise operators, indices, integers of 16 bits;
//! averages of integers and minima of floats as the CPU's kernels have them. It adds narrow floats in the
//! element type at every step, where the schedules have an accumulator.

use super::error::GpuError;
use super::{Gpu, Part};
use crate::select::RuledOut;
use serde::{Deserialize, Serialize};
use sumac_hal::ctrl::Order;
use sumac_hal::op::{Collective, Dtype, OpDesc, Path, ReduceOp};

/// The oldest version that is used, as `ncclGetVersion` has it: the first with all types here.
pub const MIN_VERSION: u32 = 22_400;

/// What the ranks of an NCCL communicator find each other by; its 128 bytes come from one of them.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct NcclId(pub Vec<u8>);

/// A GPU whose process can load NCCL.
pub trait Nccl: Gpu {
    /// One rank of a communicator. Dropping it does not abort it.
    type Comm;

    /// Return NCCL's version: 22403 for 2.24.3.
    ///
    /// # Errors
    /// [`Absent::Nccl`](super::Absent::Nccl) if it can't be loaded; NCCL's words, here and below.
    fn nccl_version(&self) -> Result<u32, GpuError>;

    /// Return what ranks find each other by.
    ///
    /// # Errors
    /// As above.
    fn nccl_id(&self) -> Result<NcclId, GpuError>;

    /// Begin to set up a communicator; it goes on by itself.
    ///
    /// # Errors
    /// As above.
    fn nccl_init(&self, id: &NcclId, rank: u32, ranks: u32) -> Result<Self::Comm, GpuError>;

    /// Tell whether what was begun is set up or handed over. This is where errors of other ranks come out.
    ///
    /// # Errors
    /// As above.
    fn nccl_is_ready(&self, comm: &Self::Comm) -> Result<bool, GpuError>;

    /// Hand an all-reduce to a stream: `to` may be `from`.
    ///
    /// # Errors
    /// [`GpuError::Kernel`] for what [`why_not`] refuses, else as above.
    fn nccl_all_reduce(
        &self,
        comm: &Self::Comm,
        on: &Self::Stream,
        types: (Dtype, ReduceOp),
        places: (Part<'_, Self::Memory>, Part<'_, Self::Memory>),
    ) -> Result<(), GpuError>;

    /// End what a communicator has under way; it can't be used any more.
    fn nccl_abort(&self, comm: &Self::Comm);
}

/// Return why NCCL can't take an operation, whatever the machine has.
pub fn why_not(order: Order, desc: &OpDesc) -> Option<RuledOut> {
    let refused = |why: String| Some(RuledOut::Nccl(why));
    if desc.collective != Collective::AllReduce {
        return Some(RuledOut::Collective { path: Path::Nccl.name(), collective: desc.collective });
    }
    let (Some(dtype), Some(op)) = (desc.dtype, desc.op) else {
        return refused("an operation without a type".into());
    };
    let is_known = matches!(
        dtype,
        Dtype::I8
            | Dtype::U8
            | Dtype::I32
            | Dtype::U32
            | Dtype::I64
            | Dtype::U64
            | Dtype::F16
            | Dtype::Bf16
            | Dtype::F32
            | Dtype::F64
    );
    if !is_known {
        return refused(format!("it does not reduce {dtype}"));
    }
    match op {
        ReduceOp::Sum | ReduceOp::Prod => {}
        ReduceOp::Avg | ReduceOp::Min | ReduceOp::Max => match (op == ReduceOp::Avg, dtype.is_integer()) {
            (true, true) => return refused(format!("its average of {dtype} is rounded otherwise")),
            (false, false) => return refused(format!("its {op} of {dtype} does not promise IEEE's NaN")),
            _ => {}
        },
        _ => return refused(format!("it has no {op}")),
    }
    let rounds = !dtype.is_integer() && matches!(op, ReduceOp::Sum | ReduceOp::Prod | ReduceOp::Avg);
    (order != Order::Arrival && rounds).then(|| RuledOut::Order {
        path: Path::Nccl.name(),
        order,
        why: "it chooses its own order, which may differ from run to run".into(),
    })
}

/// Return why the ranks of a group can't use NCCL together, from what each says of its version and its GPU.
pub(super) fn why_not_together<'a>(ranks: impl Iterator<Item = (&'a Result<u32, String>, String)>) -> Option<String> {
    let ranks: Vec<_> = ranks.collect();
    if ranks.len() < 2 {
        return Some("one rank has nobody to talk to".into());
    }
    let mut first: Option<(usize, u32)> = None;
    for (rank, (version, _)) in ranks.iter().enumerate() {
        let version = match version {
            Err(why) => return Some(format!("at rank {rank} {why}")),
            Ok(version) if *version < MIN_VERSION => {
                return Some(format!("at rank {rank} it is {version}, and {MIN_VERSION} is needed: update it"));
            }
            Ok(version) => *version,
        };
        match first {
            Some((other, theirs)) if theirs != version => {
                return Some(format!("it is {theirs} at rank {other} and {version} at rank {rank}: it must be one"));
            }
            _ => first = first.or(Some((rank, version))),
        }
    }
    for (rank, (_, gpu)) in ranks.iter().enumerate() {
        if let Some(other) = ranks[..rank].iter().position(|(_, theirs)| theirs == gpu) {
            return Some(format!("ranks {other} and {rank} share a GPU, which it refuses"));
        }
    }
    None
}

//! NCCL as an algorithm for all-reduce: when it is eligible, and why not.
//!
//! NCCL is a candidate like any other, with a cost in the explanation, or the first condition that rules it out. It
//! never replaces another algorithm silently.
//!
//! NCCL does not keep a declared order for sums that round. It lacks bitwise operators, index operators and 16-bit
//! integers, and its averages of integers and minima of floats differ from the CPU kernels'. It adds narrow floats in
//! the element type at every step, where the schedules use an accumulator.

use super::error::GpuError;
use super::{Gpu, Part};
use crate::select::RuledOut;
use serde::{Deserialize, Serialize};
use std::time::Instant;
use sumac_hal::ctrl::Order;
use sumac_hal::op::{Collective, Dtype, OpDesc, Path, ReduceOp};

/// The oldest supported version, as reported by `ncclGetVersion`: the first with all types used here.
pub const MIN_VERSION: u32 = 22_400;

/// The unique id by which the ranks of an NCCL communicator find each other; one of them creates its 128 bytes.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct NcclId(pub Vec<u8>);

/// A GPU whose process can load NCCL.
pub trait Nccl: Gpu {
    /// One rank of a communicator. Dropping it does not abort it.
    type Comm;

    /// Return NCCL's version: 22403 for 2.24.3.
    ///
    /// # Errors
    /// [`Unavailable::Nccl`](super::Unavailable::Nccl) if it cannot be loaded; NCCL's error, here and below.
    fn nccl_version(&self) -> Result<u32, GpuError>;

    /// Create a unique id.
    ///
    /// # Errors
    /// As above.
    fn nccl_id(&self) -> Result<NcclId, GpuError>;

    /// Start setting up a communicator; setup continues asynchronously.
    ///
    /// # Errors
    /// As above.
    fn nccl_init(&self, id: &NcclId, rank: u32, ranks: u32) -> Result<Self::Comm, GpuError>;

    /// Return whether setup is complete, or the last operation is enqueued. Errors of other ranks surface here.
    ///
    /// # Errors
    /// As above.
    fn nccl_is_ready(&self, comm: &Self::Comm) -> Result<bool, GpuError>;

    /// Enqueue an all-reduce; `to` may be `from`.
    ///
    /// # Errors
    /// [`GpuError::Kernel`] for operations that [`why_not`] rules out, otherwise as above.
    fn nccl_all_reduce(
        &self,
        comm: &Self::Comm,
        on: &Self::Stream,
        types: (Dtype, ReduceOp),
        places: (Part<'_, Self::Memory>, Part<'_, Self::Memory>),
    ) -> Result<(), GpuError>;

    /// Abort the communicator, which is unusable afterwards; returns whether that has ended by `until`. Otherwise it
    /// goes on in the background, and further calls wait for it: NCCL frees memory, which waits for all streams.
    fn nccl_abort(&self, comm: &Self::Comm, until: Instant) -> bool;
}

/// Return why NCCL cannot run an operation on any machine.
pub fn why_not(order: Order, desc: &OpDesc) -> Option<RuledOut> {
    let refused = |why: String| Some(RuledOut::Nccl(why));
    if desc.collective != Collective::AllReduce {
        return Some(RuledOut::Collective { path: Path::Nccl.name(), collective: desc.collective });
    }
    let (Some(dtype), Some(op)) = (desc.dtype, desc.op) else {
        return refused("the operation has no type".into());
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
        return refused(format!("it does not support {dtype}"));
    }
    match op {
        ReduceOp::Sum | ReduceOp::Prod => {}
        ReduceOp::Avg | ReduceOp::Min | ReduceOp::Max => match (op == ReduceOp::Avg, dtype.is_integer()) {
            (true, true) => return refused(format!("its average of {dtype} rounds differently")),
            (false, false) => return refused(format!("its {op} of {dtype} does not guarantee IEEE 754 NaN semantics")),
            _ => {}
        },
        _ => return refused(format!("it does not support {op}")),
    }
    let rounds = !dtype.is_integer() && matches!(op, ReduceOp::Sum | ReduceOp::Prod | ReduceOp::Avg);
    (order != Order::Arrival && rounds).then(|| RuledOut::Order {
        path: Path::Nccl.name(),
        order,
        why: "it chooses its own order, which may differ from run to run".into(),
    })
}

/// Return why the ranks of a group cannot use NCCL together, given each rank's version and GPU.
pub(super) fn why_not_together<'a>(ranks: impl Iterator<Item = (&'a Result<u32, String>, String)>) -> Option<String> {
    let ranks: Vec<_> = ranks.collect();
    if ranks.len() < 2 {
        return Some("the group has only one rank".into());
    }
    let mut first: Option<(usize, u32)> = None;
    for (rank, (version, _)) in ranks.iter().enumerate() {
        let version = match version {
            Err(why) => return Some(format!("rank {rank}: {why}")),
            Ok(version) if *version < MIN_VERSION => {
                return Some(format!("rank {rank} has version {version}, but {MIN_VERSION} is required; update it"));
            }
            Ok(version) => *version,
        };
        match first {
            Some((other, theirs)) if theirs != version => {
                return Some(format!("versions differ: {theirs} at rank {other}, {version} at rank {rank}"));
            }
            _ => first = first.or(Some((rank, version))),
        }
    }
    for (rank, (_, gpu)) in ranks.iter().enumerate() {
        if let Some(other) = ranks[..rank].iter().position(|(_, theirs)| theirs == gpu) {
            return Some(format!("ranks {other} and {rank} share a GPU, which it does not support"));
        }
    }
    None
}

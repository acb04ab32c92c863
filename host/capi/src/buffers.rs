//! Operations as C describes them, and what of the caller's memory they read and write.

use crate::last_error::Failure;
use sumac::{Collective, Communicator, Counts, Dtype, OpDesc, Rank, RawBuffers, ReduceOp};

/// Memory in which input and output lie apart; lengths are in bytes.
pub(crate) const fn separate(
    (input, input_len): (*const u8, usize),
    (output, output_len): (*mut u8, usize),
) -> RawBuffers {
    RawBuffers::Separate { input, input_len, output, output_len }
}

/// Memory that is both input and output.
pub(crate) const fn in_place(bytes: *mut u8, len: usize) -> RawBuffers {
    RawBuffers::InPlace { bytes, len }
}

/// Numbers of a call as C passes them. Counts are of elements: of the whole operation, or of one rank's block where the
/// collective has blocks.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Numbers {
    pub(crate) collective: Collective,
    pub(crate) count: u64,
    pub(crate) dtype: i32,
    /// 0 for none.
    pub(crate) op: i32,
    pub(crate) root: u32,
}

/// Return the element type that a number stands for; `None` for 0.
pub(crate) fn dtype(number: i32) -> Result<Option<Dtype>, Failure> {
    known(number, "sumac_dtype", Dtype::from_wire)
}

/// Return the operator that a number stands for; `None` for 0.
pub(crate) fn op(number: i32) -> Result<Option<ReduceOp>, Failure> {
    known(number, "sumac_op", ReduceOp::from_wire)
}

/// Return the collective that a number stands for.
pub(crate) fn collective(number: i32) -> Result<Collective, Failure> {
    known(number, "sumac_collective", Collective::from_wire)?
        .ok_or_else(|| Failure::argument("0 is not a sumac_collective"))
}

fn known<T>(number: i32, what: &str, from_wire: fn(u8) -> Option<T>) -> Result<Option<T>, Failure> {
    if number == 0 {
        return Ok(None);
    }
    let found = u8::try_from(number).ok().and_then(from_wire);
    found.map(Some).ok_or_else(|| Failure::argument(format!("{number} is not a {what} of this version")))
}

/// An operation with its memory.
#[derive(Debug)]
pub(crate) struct Call {
    pub(crate) desc: OpDesc,
    pub(crate) memory: RawBuffers,
    /// Set if blocks have any length.
    pub(crate) counts: Option<Counts>,
}

impl Call {
    /// Describe a call with equal blocks, and find out whether it is in place: as with NCCL, if the pointers are the
    /// same, or the block lies at its place in the other buffer.
    pub(crate) fn new(
        comm: &Communicator,
        numbers: Numbers,
        input: *const u8,
        output: *mut u8,
    ) -> Result<Self, Failure> {
        let Numbers { collective, count, root, .. } = numbers;
        let (rank, ranks) = (comm.rank() as usize, comm.size() as usize);
        let has_blocks = matches!(
            collective,
            Collective::ReduceScatter
                | Collective::AllGather
                | Collective::Gather
                | Collective::Scatter
                | Collective::AllToAll
        );
        let too_large = || Failure::argument(format!("{count} elements exceed the address space"));
        let whole = if has_blocks { count.checked_mul(ranks as u64).ok_or_else(too_large)? } else { count };
        let desc = OpDesc {
            collective,
            dtype: dtype(numbers.dtype)?,
            op: op(numbers.op)?,
            root: Rank(if collective.is_rooted() { root } else { 0 }),
            count: whole,
        };
        let bytes = |count: u64| {
            usize::try_from(count).ok().and_then(|count| count.checked_mul(desc.element_bytes())).ok_or_else(too_large)
        };
        let (all, own) = (bytes(whole)?, bytes(count)?);
        let at_root = desc.root.0 == comm.rank();
        let (input_len, output_len) = match collective {
            Collective::Reduce => (all, if at_root { all } else { 0 }),
            Collective::ReduceScatter => (all, own),
            Collective::AllGather => (own, all),
            Collective::Gather => (own, if at_root { all } else { 0 }),
            Collective::Scatter => (if at_root { all } else { 0 }, own),
            Collective::Broadcast => (if at_root { all } else { 0 }, all),
            _ => (all, all),
        };
        let is_same = std::ptr::addr_eq(input, output) && !input.is_null();
        let is_at = |block: *const u8, whole: *const u8| !whole.is_null() && block == whole.wrapping_add(rank * own);
        let memory = match collective {
            Collective::AllReduce | Collective::AllToAll | Collective::Broadcast if is_same => in_place(output, all),
            // Only the root's output is written to.
            Collective::Reduce if is_same && at_root => in_place(output, all),
            Collective::ReduceScatter if is_at(output, input) => in_place(input.cast_mut(), all),
            Collective::Scatter if at_root && is_at(output, input) => in_place(input.cast_mut(), all),
            Collective::AllGather if is_at(input, output) => in_place(output, all),
            Collective::Gather if at_root && is_at(input, output) => in_place(output, all),
            _ => separate((input, input_len), (output, output_len)),
        };
        Ok(Self { desc, memory, counts: None })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn numbers_that_stand_for_nothing_are_refused() {
        assert!(dtype(15).is_err() && dtype(-1).is_err() && dtype(256 + 11).is_err());
        assert!(op(15).is_err() && collective(0).is_err() && collective(11).is_err());
        assert_eq!(dtype(11).ok().flatten(), Some(Dtype::F32));
        assert_eq!(op(0).ok(), Some(None));
    }
}

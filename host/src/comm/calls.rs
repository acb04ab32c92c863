//! Blocking collectives. Each returns when it is complete at this rank.
//!
//! Lengths follow NCCL: where ranks own blocks, all blocks have the same length. [`Communicator::run`] takes any count
//! of any collective, with blocks that differ by one element.

use super::{CallOptions, Communicator, Counts, Element, Error, Outcome};
use crate::exec::Buffers;
use sumac_hal::ids::Rank;
use sumac_hal::op::{Collective, Dtype, OpDesc, ReduceOp};
use sumac_hal::reduce::Kernel;

impl Communicator {
    /// Run an operation that is described at run time, on bytes of whole little-endian elements, in place or from an
    /// input to an output. [`crate::comm`] has a table of the buffer lengths.
    ///
    /// # Errors
    /// [`Error::Argument`] if type and operator do not go together or a buffer has the wrong length; otherwise any
    /// [`Error`] if the operation failed or was rejected.
    pub fn run<'b>(
        &self,
        desc: &OpDesc,
        buffers: impl Into<Buffers<'b>>,
        options: &CallOptions,
    ) -> Result<Outcome, Error> {
        check(desc)?;
        let mut buffers = buffers.into();
        if self.core.has_progress_thread() && self.stripes.is_single() {
            return self.core.run_by_thread(desc, None, &mut buffers, options);
        }
        let mut core = self.lock()?;
        core.serve_submissions();
        self.stripes.run(&mut core, *desc, &mut buffers, options)
    }

    /// All-reduce in place: combine `buffer` elementwise over all ranks; every rank gets the result.
    ///
    /// # Errors
    /// [`Error`] if the operation failed or was rejected.
    pub fn all_reduce<T: Element>(&self, buffer: &mut [T], op: ReduceOp) -> Result<Outcome, Error> {
        self.all_reduce_with(buffer, op, &CallOptions::default())
    }

    /// All-reduce in place with options.
    ///
    /// # Errors
    /// [`Error`] if the operation failed or was rejected.
    pub fn all_reduce_with<T: Element>(
        &self,
        buffer: &mut [T],
        op: ReduceOp,
        options: &CallOptions,
    ) -> Result<Outcome, Error> {
        let desc = OpDesc::all_reduce(T::DTYPE, op, elements(buffer, Some(op))?);
        self.run(&desc, bytemuck::cast_slice_mut(buffer), options)
    }

    /// All-reduce from `input` to `output`, which have the same length.
    ///
    /// # Errors
    /// [`Error`] if the operation failed or was rejected.
    pub fn all_reduce_into<T: Element>(&self, input: &[T], output: &mut [T], op: ReduceOp) -> Result<Outcome, Error> {
        let desc = OpDesc::all_reduce(T::DTYPE, op, elements(input, Some(op))?);
        self.run(&desc, separate(input, output), &CallOptions::default())
    }

    /// Reduce in place: combine `buffer` elementwise over all ranks. `root` gets the result; the other ranks' buffers
    /// are unchanged.
    ///
    /// # Errors
    /// [`Error`] if the operation failed or was rejected.
    pub fn reduce<T: Element>(&self, buffer: &mut [T], op: ReduceOp, root: u32) -> Result<Outcome, Error> {
        let desc = OpDesc::reduce(T::DTYPE, op, Rank(root), elements(buffer, Some(op))?);
        self.run(&desc, bytemuck::cast_slice_mut(buffer), &CallOptions::default())
    }

    /// Reduce from `input` to `output`, which has the same length at `root` and is empty elsewhere.
    ///
    /// # Errors
    /// [`Error`] if the operation failed or was rejected.
    pub fn reduce_into<T: Element>(
        &self,
        input: &[T],
        output: &mut [T],
        op: ReduceOp,
        root: u32,
    ) -> Result<Outcome, Error> {
        let desc = OpDesc::reduce(T::DTYPE, op, Rank(root), elements(input, Some(op))?);
        self.run(&desc, separate(input, output), &CallOptions::default())
    }

    /// Broadcast `root`'s `buffer` to all ranks.
    ///
    /// # Errors
    /// [`Error`] if the operation failed or was rejected.
    pub fn broadcast<T: Element>(&self, buffer: &mut [T], root: u32) -> Result<Outcome, Error> {
        let desc = OpDesc::broadcast(T::DTYPE, Rank(root), elements(buffer, None)?);
        self.run(&desc, bytemuck::cast_slice_mut(buffer), &CallOptions::default())
    }

    /// Reduce-scatter: combine `input` elementwise over all ranks; rank r gets block r of the result in `output`.
    /// `input` is as long as `output` times the number of ranks.
    ///
    /// # Errors
    /// [`Error`] if the operation failed or was rejected.
    pub fn reduce_scatter<T: Element>(&self, input: &[T], output: &mut [T], op: ReduceOp) -> Result<Outcome, Error> {
        self.in_blocks(input.len(), output.len())?;
        let desc = OpDesc::reduce_scatter(T::DTYPE, op, elements(input, Some(op))?);
        self.run(&desc, separate(input, output), &CallOptions::default())
    }

    /// All-gather: every rank gets the `input` of all ranks in `output`, in rank order.
    ///
    /// # Errors
    /// [`Error`] if the operation failed or was rejected.
    pub fn all_gather<T: Element>(&self, input: &[T], output: &mut [T]) -> Result<Outcome, Error> {
        self.in_blocks(output.len(), input.len())?;
        let desc = OpDesc::all_gather(T::DTYPE, elements(output, None)?);
        self.run(&desc, separate(input, output), &CallOptions::default())
    }

    /// Gather: `root` gets the `input` of all ranks in `output`, in rank order. `output` is empty elsewhere.
    ///
    /// # Errors
    /// [`Error`] if the operation failed or was rejected.
    pub fn gather<T: Element>(&self, input: &[T], output: &mut [T], root: u32) -> Result<Outcome, Error> {
        if self.rank() == root {
            self.in_blocks(output.len(), input.len())?;
        }
        let desc = self.blocks::<T>(Collective::Gather, root, input.len())?;
        self.run(&desc, separate(input, output), &CallOptions::default())
    }

    /// Scatter: rank r gets block r of `root`'s `input`, which is empty elsewhere.
    ///
    /// # Errors
    /// [`Error`] if the operation failed or was rejected.
    pub fn scatter<T: Element>(&self, input: &[T], output: &mut [T], root: u32) -> Result<Outcome, Error> {
        if self.rank() == root {
            self.in_blocks(input.len(), output.len())?;
        }
        let desc = self.blocks::<T>(Collective::Scatter, root, output.len())?;
        self.run(&desc, separate(input, output), &CallOptions::default())
    }

    /// All-to-all: rank r gets block r of every rank's `input`, in rank order.
    ///
    /// # Errors
    /// [`Error`] if the operation failed or was rejected.
    pub fn all_to_all<T: Element>(&self, input: &[T], output: &mut [T]) -> Result<Outcome, Error> {
        let block = input.len() / self.size() as usize;
        self.in_blocks(input.len(), block)?;
        let desc = self.blocks::<T>(Collective::AllToAll, 0, block)?;
        self.run(&desc, separate(input, output), &CallOptions::default())
    }

    /// All-to-all with blocks of any length: send `send_counts[r]` elements of `input` to each rank r, and receive
    /// `recv_counts[r]` elements from it. Blocks lie behind each other in rank order. What a rank sends must be as long
    /// as what its peer receives.
    ///
    /// # Errors
    /// [`Error`] if the operation failed or was rejected.
    pub fn all_to_all_v<T: Element>(
        &self,
        (input, send_counts): (&[T], &[usize]),
        (output, recv_counts): (&mut [T], &[usize]),
    ) -> Result<Outcome, Error> {
        let counts = Counts::Exchange { send: send_counts.to_vec(), recv: recv_counts.to_vec() };
        let desc = self.blocks::<T>(Collective::AllToAll, 0, 0)?;
        self.run_v(&desc, &counts, separate(input, output), &CallOptions::default())
    }

    /// All-gather with blocks of any length: every rank r contributes `counts[r]` elements, and all get all blocks, one
    /// behind the other in rank order. The counts must be the same on all ranks.
    ///
    /// # Errors
    /// [`Error`] if the operation failed or was rejected.
    pub fn all_gather_v<T: Element>(
        &self,
        input: &[T],
        (output, counts): (&mut [T], &[usize]),
    ) -> Result<Outcome, Error> {
        let desc = self.blocks::<T>(Collective::AllGather, 0, 0)?;
        self.run_v(&desc, &Counts::Blocks(counts.to_vec()), separate(input, output), &CallOptions::default())
    }

    /// Reduce-scatter with blocks of any length: combine `input` elementwise over all ranks; rank r gets `counts[r]`
    /// elements of the result, behind those of the ranks before it. The counts must be the same on all ranks.
    ///
    /// # Errors
    /// [`Error`] if the operation failed or was rejected.
    pub fn reduce_scatter_v<T: Element>(
        &self,
        (input, counts): (&[T], &[usize]),
        output: &mut [T],
        op: ReduceOp,
    ) -> Result<Outcome, Error> {
        let desc = OpDesc { op: Some(op), ..self.blocks::<T>(Collective::ReduceScatter, 0, 0)? };
        self.run_v(&desc, &Counts::Blocks(counts.to_vec()), separate(input, output), &CallOptions::default())
    }

    /// Run an operation on blocks of any length that is described at run time: an all-to-all, an all-gather or a
    /// reduce-scatter, whose count is not used. Buffers are bytes of whole little-endian elements, which do not
    /// overlap. Takes pairwise exchange between hosts, in any declared order; an all-to-all may name
    /// [`Algo::HierarchicalPairwise`](crate::Algo::HierarchicalPairwise), which sends fewer messages between servers.
    ///
    /// # Errors
    /// [`Error::Argument`] if a buffer has another length than its counts add up to, collective and counts do not go
    /// together, or the options name an algorithm that takes no counts; otherwise any [`Error`].
    pub fn run_v(
        &self,
        desc: &OpDesc,
        counts: &Counts,
        mut buffers: Buffers<'_>,
        options: &CallOptions,
    ) -> Result<Outcome, Error> {
        let desc = counts.describe(desc)?;
        check(&desc)?;
        if matches!(buffers, Buffers::InPlace(_)) {
            return Err(Error::Argument(format!("{desc} with counts needs an output apart from its input")));
        }
        if self.core.has_progress_thread() {
            return self.core.run_by_thread(&desc, Some(counts.clone()), &mut buffers, options);
        }
        self.lock()?.run_uneven(desc, counts, buffers, options)
    }

    /// Barrier: wait until every rank has called this.
    ///
    /// # Errors
    /// [`Error`] if the operation failed or was rejected.
    pub fn barrier(&self) -> Result<Outcome, Error> {
        self.barrier_with(&CallOptions::default())
    }

    /// Barrier with options.
    ///
    /// # Errors
    /// [`Error`] if the operation failed or was rejected.
    pub fn barrier_with(&self, options: &CallOptions) -> Result<Outcome, Error> {
        self.run(&OpDesc::barrier(), Buffers::InPlace(&mut []), options)
    }

    /// Check that `whole` elements are one block of `block` elements for each rank.
    fn in_blocks(&self, whole: usize, block: usize) -> Result<(), Error> {
        let ranks = self.size() as usize;
        match block.checked_mul(ranks) == Some(whole) {
            true => Ok(()),
            false => Err(Error::Argument(format!(
                "{whole} elements are not {ranks} blocks of {block}; use Communicator::run, which takes any count"
            ))),
        }
    }

    /// Describe an operation that moves one block of `block` elements for each rank.
    fn blocks<T: Element>(&self, collective: Collective, root: u32, block: usize) -> Result<OpDesc, Error> {
        let count = (block as u64).checked_mul(u64::from(self.size()));
        let count = count.ok_or_else(|| Error::Argument(format!("{} blocks of {block} elements", self.size())))?;
        Ok(OpDesc { collective, dtype: Some(T::DTYPE), op: None, root: Rank(root), count })
    }
}

/// Check that an operation is valid: reductions have an operator that is defined for their type, data movement has
/// none.
pub(super) fn check(desc: &OpDesc) -> Result<(), Error> {
    let needs_dtype = desc.collective != Collective::Barrier;
    let fits = (desc.op.is_some(), desc.dtype.is_some()) == (desc.collective.reduces(), needs_dtype);
    if !fits {
        let what = format!("{desc}: a reduction needs a type and an operator, data movement a type only");
        return Err(Error::Argument(what));
    }
    match desc.dtype.zip(desc.op).and_then(|(dtype, op)| Kernel::unsupported_reason(dtype, op)) {
        Some(why) => Err(Error::Argument(format!("{desc}: {why}"))),
        None => Ok(()),
    }
}

/// Return how many elements a slice holds. For operators with locations, an element is a pair of a value and an index.
pub(super) fn elements<T: Element>(values: &[T], op: Option<ReduceOp>) -> Result<u64, Error> {
    let each = if op.is_some_and(ReduceOp::is_located) { 2 } else { 1 };
    if !values.len().is_multiple_of(each) {
        let dtype: Dtype = T::DTYPE;
        return Err(Error::Argument(format!(
            "{} values of {dtype} are not pairs of a value and an index",
            values.len()
        )));
    }
    Ok((values.len() / each) as u64)
}

fn separate<'b, T: Element>(input: &'b [T], output: &'b mut [T]) -> Buffers<'b> {
    Buffers::Separate { input: bytemuck::cast_slice(input), output: bytemuck::cast_slice_mut(output) }
}

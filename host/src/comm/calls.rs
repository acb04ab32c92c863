//! The collectives as methods of [`Communicator`]: each blocks until it is done at this rank.
//!
//! Lengths are NCCL's: where ranks own blocks, all blocks have the same length. [`Communicator::run`] takes any count
//! of any collective, with blocks that differ by one element.

use super::{CallOptions, Communicator, Element, Error, Outcome};
use crate::exec::Buffers;
use sumac_hal::ids::Rank;
use sumac_hal::op::{Collective, Dtype, OpDesc, ReduceOp};
use sumac_hal::reduce::Kernel;

impl Communicator {
    /// Run an operation that is described at run time, on the bytes of whole little-endian elements: one buffer for
    /// input and output, or two. How long they have to be is in a table of [`crate::comm`].
    ///
    /// # Errors
    /// [`Error::Argument`] if type and operator don't go together or lengths are wrong, else [`Error`].
    pub fn run<'b>(
        &self,
        desc: &OpDesc,
        buffers: impl Into<Buffers<'b>>,
        options: &CallOptions,
    ) -> Result<Outcome, Error> {
        check(desc)?;
        self.lock()?.run(*desc, &mut buffers.into(), options)
    }

    /// Combine `buffer` element by element over all ranks; every rank gets the result in place.
    ///
    /// # Errors
    /// [`Error`].
    pub fn all_reduce<T: Element>(&self, buffer: &mut [T], op: ReduceOp) -> Result<Outcome, Error> {
        self.all_reduce_with(buffer, op, &CallOptions::default())
    }

    /// The same with options.
    ///
    /// # Errors
    /// [`Error`].
    pub fn all_reduce_with<T: Element>(
        &self,
        buffer: &mut [T],
        op: ReduceOp,
        options: &CallOptions,
    ) -> Result<Outcome, Error> {
        let desc = OpDesc::all_reduce(T::DTYPE, op, elements(buffer, Some(op))?);
        self.run(&desc, bytemuck::cast_slice_mut(buffer), options)
    }

    /// The same from `input` to `output`, which are equally long.
    ///
    /// # Errors
    /// [`Error`].
    pub fn all_reduce_into<T: Element>(&self, input: &[T], output: &mut [T], op: ReduceOp) -> Result<Outcome, Error> {
        let desc = OpDesc::all_reduce(T::DTYPE, op, elements(input, Some(op))?);
        self.run(&desc, apart(input, output), &CallOptions::default())
    }

    /// Combine `buffer` over all ranks to `root`, which gets the result in place; the other ranks' stay as they are.
    ///
    /// # Errors
    /// [`Error`].
    pub fn reduce<T: Element>(&self, buffer: &mut [T], op: ReduceOp, root: u32) -> Result<Outcome, Error> {
        let desc = OpDesc::reduce(T::DTYPE, op, Rank(root), elements(buffer, Some(op))?);
        self.run(&desc, bytemuck::cast_slice_mut(buffer), &CallOptions::default())
    }

    /// The same from `input` to `output`, which is as long at `root` and empty elsewhere.
    ///
    /// # Errors
    /// [`Error`].
    pub fn reduce_into<T: Element>(
        &self,
        input: &[T],
        output: &mut [T],
        op: ReduceOp,
        root: u32,
    ) -> Result<Outcome, Error> {
        let desc = OpDesc::reduce(T::DTYPE, op, Rank(root), elements(input, Some(op))?);
        self.run(&desc, apart(input, output), &CallOptions::default())
    }

    /// Give every rank `root`'s `buffer`.
    ///
    /// # Errors
    /// [`Error`].
    pub fn broadcast<T: Element>(&self, buffer: &mut [T], root: u32) -> Result<Outcome, Error> {
        let desc = OpDesc::broadcast(T::DTYPE, Rank(root), elements(buffer, None)?);
        self.run(&desc, bytemuck::cast_slice_mut(buffer), &CallOptions::default())
    }

    /// Combine `input` over all ranks; rank r gets block r of the result in `output`, whose length times the number
    /// of ranks is that of `input`.
    ///
    /// # Errors
    /// [`Error`].
    pub fn reduce_scatter<T: Element>(&self, input: &[T], output: &mut [T], op: ReduceOp) -> Result<Outcome, Error> {
        self.in_blocks(input.len(), output.len())?;
        let desc = OpDesc::reduce_scatter(T::DTYPE, op, elements(input, Some(op))?);
        self.run(&desc, apart(input, output), &CallOptions::default())
    }

    /// Give every rank all ranks' `input`, in the order of ranks.
    ///
    /// # Errors
    /// [`Error`].
    pub fn all_gather<T: Element>(&self, input: &[T], output: &mut [T]) -> Result<Outcome, Error> {
        self.in_blocks(output.len(), input.len())?;
        let desc = OpDesc::all_gather(T::DTYPE, elements(output, None)?);
        self.run(&desc, apart(input, output), &CallOptions::default())
    }

    /// Give `root` all ranks' `input`, in the order of ranks; `output` is empty elsewhere.
    ///
    /// # Errors
    /// [`Error`].
    pub fn gather<T: Element>(&self, input: &[T], output: &mut [T], root: u32) -> Result<Outcome, Error> {
        if self.rank() == root {
            self.in_blocks(output.len(), input.len())?;
        }
        let desc = self.blocks::<T>(Collective::Gather, root, input.len())?;
        self.run(&desc, apart(input, output), &CallOptions::default())
    }

    /// Give rank r block r of `root`'s `input`, which is empty elsewhere.
    ///
    /// # Errors
    /// [`Error`].
    pub fn scatter<T: Element>(&self, input: &[T], output: &mut [T], root: u32) -> Result<Outcome, Error> {
        if self.rank() == root {
            self.in_blocks(input.len(), output.len())?;
        }
        let desc = self.blocks::<T>(Collective::Scatter, root, output.len())?;
        self.run(&desc, apart(input, output), &CallOptions::default())
    }

    /// Give rank r block r of every rank's `input`, in the order of ranks.
    ///
    /// # Errors
    /// [`Error`].
    pub fn all_to_all<T: Element>(&self, input: &[T], output: &mut [T]) -> Result<Outcome, Error> {
        let block = input.len() / self.size() as usize;
        self.in_blocks(input.len(), block)?;
        let desc = self.blocks::<T>(Collective::AllToAll, 0, block)?;
        self.run(&desc, apart(input, output), &CallOptions::default())
    }

    /// Give rank r the `send_counts[r]` elements of `input` behind those for the ranks before it, and take
    /// `recv_counts[r]` elements from each rank r, in the order of ranks. What a rank sends to another has to be as
    /// long as the other takes from it.
    ///
    /// # Errors
    /// [`Error`].
    pub fn all_to_all_v<T: Element>(
        &self,
        (input, send_counts): (&[T], &[usize]),
        (output, recv_counts): (&mut [T], &[usize]),
    ) -> Result<Outcome, Error> {
        let buffers = apart(input, output);
        self.lock()?.all_to_all_v(T::DTYPE, buffers, send_counts, recv_counts, &CallOptions::default())
    }

    /// Wait until every rank has called this.
    ///
    /// # Errors
    /// [`Error`].
    pub fn barrier(&self) -> Result<Outcome, Error> {
        self.barrier_with(&CallOptions::default())
    }

    /// The same with options.
    ///
    /// # Errors
    /// [`Error`].
    pub fn barrier_with(&self, options: &CallOptions) -> Result<Outcome, Error> {
        self.run(&OpDesc::barrier(), Buffers::InPlace(&mut []), options)
    }

    /// Check that `whole` elements are a block of `block` for each rank.
    fn in_blocks(&self, whole: usize, block: usize) -> Result<(), Error> {
        let ranks = self.size() as usize;
        match block.checked_mul(ranks) == Some(whole) {
            true => Ok(()),
            false => Err(Error::Argument(format!(
                "{whole} elements are not {ranks} blocks of {block}; Communicator::run takes blocks that differ"
            ))),
        }
    }

    /// Describe an operation that moves a block of `block` elements for each rank.
    fn blocks<T: Element>(&self, collective: Collective, root: u32, block: usize) -> Result<OpDesc, Error> {
        let count = (block as u64).checked_mul(u64::from(self.size()));
        let count = count.ok_or_else(|| Error::Argument(format!("{} blocks of {block} elements", self.size())))?;
        Ok(OpDesc { collective, dtype: Some(T::DTYPE), op: None, root: Rank(root), count })
    }
}

/// Check that a description makes sense: what combines has an operator that goes with its type, what is moved has none.
pub(super) fn check(desc: &OpDesc) -> Result<(), Error> {
    let needs_dtype = desc.collective != Collective::Barrier;
    let fits = (desc.op.is_some(), desc.dtype.is_some()) == (desc.collective.reduces(), needs_dtype);
    if !fits {
        let what =
            format!("{desc}: operations that combine have a type and an operator, others that move a type alone");
        return Err(Error::Argument(what));
    }
    match desc.dtype.zip(desc.op).and_then(|(dtype, op)| Kernel::why_not(dtype, op)) {
        Some(why) => Err(Error::Argument(format!("{desc}: {why}"))),
        None => Ok(()),
    }
}

/// Return how many elements of an operation a slice holds: for operators with locations, pairs of values.
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

fn apart<'b, T: Element>(input: &'b [T], output: &'b mut [T]) -> Buffers<'b> {
    Buffers::Separate { input: bytemuck::cast_slice(input), output: bytemuck::cast_slice_mut(output) }
}

//! Asynchronous collectives: start now, wait later ([`Handle`]).
//!
//! The communicator owns the buffer, a [`Vec`] or a [`Buffer`](super::Buffer), until the operation completes, so you
//! may drop or forget the handle. The buffer comes back with the result. Memory beside it never changes, whatever
//! happens to the device that works on it.
//!
//! Up to 1024 operations may be in flight. At the limit, a start waits for room until its deadline, as a blocking call
//! does, and advances the operations in flight meanwhile. If none completes, it fails with [`Error::TooManyInFlight`]
//! and does not count as a call.
//!
//! Operations of the tree overlap. Host collectives run one at a time, when one of them or a later operation is waited
//! for, and after all operations that were started before them. So ranks may wait in different orders, and drop some
//! handles.
//!
//! A start that fails gives the buffer back, unchanged ([`StartError`]); a wait that fails gives it back, too
//! ([`WaitError`](super::WaitError)).

use super::calls::{check, elements};
use super::{CallOptions, Communicator, Element, Error, Handle, OwnedBuffer, StartError};
use crate::engine::{ErasedBuffer, Operation, Work};
use sumac_hal::ids::Rank;
use sumac_hal::op::{Dtype, OpDesc, ReduceOp};

impl Communicator {
    /// Start an all-reduce of `buffer`; [`Handle::wait`] returns it with the result.
    ///
    /// # Errors
    /// [`StartError`], with the buffer, if the operation cannot be started.
    pub fn start_all_reduce<B: OwnedBuffer>(&self, buffer: B, op: ReduceOp) -> Result<Handle<B>, StartError<B>> {
        self.start_all_reduce_with(buffer, op, &CallOptions::default())
    }

    /// Start an all-reduce as [`Communicator::start_all_reduce`] does, with options.
    ///
    /// # Errors
    /// [`StartError`], with the buffer, if the operation cannot be started.
    pub fn start_all_reduce_with<B: OwnedBuffer>(
        &self,
        buffer: B,
        op: ReduceOp,
        options: &CallOptions,
    ) -> Result<Handle<B>, StartError<B>> {
        let count = elements(buffer.values(), Some(op));
        let desc = count.map(|count| (OpDesc::all_reduce(dtype::<B>(), op, count), None));
        self.start(desc, buffer, options)
    }

    /// Start a reduction to `root`; [`Handle::wait`] returns the buffer, which holds the result at the root only.
    ///
    /// # Errors
    /// [`StartError`], with the buffer, if the operation cannot be started.
    pub fn start_reduce<B: OwnedBuffer>(&self, buffer: B, op: ReduceOp, root: u32) -> Result<Handle<B>, StartError<B>> {
        let count = elements(buffer.values(), Some(op));
        let desc = count.map(|count| (OpDesc::reduce(dtype::<B>(), op, Rank(root), count), None));
        self.start(desc, buffer, &CallOptions::default())
    }

    /// Start a broadcast of `root`'s `buffer`; [`Handle::wait`] returns the buffer with the root's values.
    ///
    /// # Errors
    /// [`StartError`], with the buffer, if the operation cannot be started.
    pub fn start_broadcast<B: OwnedBuffer>(&self, buffer: B, root: u32) -> Result<Handle<B>, StartError<B>> {
        let count = elements(buffer.values(), None);
        let desc = count.map(|count| (OpDesc::broadcast(dtype::<B>(), Rank(root), count), None));
        self.start(desc, buffer, &CallOptions::default())
    }

    /// Start a reduce-scatter of `input`; [`Handle::wait`] returns this rank's block of the result. All blocks have the
    /// same length.
    ///
    /// # Errors
    /// [`StartError`], with `input`, if the operation cannot be started.
    pub fn start_reduce_scatter<B: OwnedBuffer>(&self, input: B, op: ReduceOp) -> Result<Handle<B>, StartError<B>> {
        let desc = self.reduce_scatter_of(&input, op);
        self.start(desc, input, &CallOptions::default())
    }

    fn reduce_scatter_of<B: OwnedBuffer>(&self, input: &B, op: ReduceOp) -> Result<(OpDesc, Option<B>), Error> {
        let ranks = self.size() as usize;
        let len = input.values().len();
        if !len.is_multiple_of(ranks) {
            return Err(Error::Argument(format!("{len} elements are not {ranks} equal blocks")));
        }
        let output = B::zeroed(self, len / ranks)?;
        Ok((OpDesc::reduce_scatter(dtype::<B>(), op, elements(input.values(), Some(op))?), Some(output)))
    }

    /// Start an all-gather of `input`; [`Handle::wait`] returns the inputs of all ranks, in rank order.
    ///
    /// # Errors
    /// [`StartError`], with `input`, if the operation cannot be started.
    pub fn start_all_gather<B: OwnedBuffer>(&self, input: B) -> Result<Handle<B>, StartError<B>> {
        let desc = self.all_gather_of(&input);
        self.start(desc, input, &CallOptions::default())
    }

    fn all_gather_of<B: OwnedBuffer>(&self, input: &B) -> Result<(OpDesc, Option<B>), Error> {
        let block = input.values().len();
        let len = block.checked_mul(self.size() as usize);
        let len = len.ok_or_else(|| Error::Argument(format!("{} blocks of {block}", self.size())))?;
        let output = B::zeroed(self, len)?;
        Ok((OpDesc::all_gather(dtype::<B>(), elements(output.values(), None)?), Some(output)))
    }

    /// Start an operation from `buffer` to the output beside its description, or else in place.
    fn start<B: OwnedBuffer>(
        &self,
        desc: Result<(OpDesc, Option<B>), Error>,
        buffer: B,
        options: &CallOptions,
    ) -> Result<Handle<B>, StartError<B>> {
        let ready = desc.and_then(|(desc, output)| {
            check(&desc)?;
            Ok((desc, output))
        });
        let (desc, output) = match ready {
            Ok(ready) => ready,
            Err(error) => return Err(StartError { error, buffer }),
        };
        let output = output.map(|output| Box::new(output) as Box<dyn ErasedBuffer>);
        let operation = Operation { desc, counts: None, memory: Box::new(buffer), output, options: *options };
        match self.core.begin(Work::Operation(operation)) {
            Ok(task) => Ok(Handle::new(self.core.clone(), task)),
            Err(refused) => {
                let StartError { error, buffer: work } = *refused;
                let memory = work.into_memory().and_then(|memory| memory.into_any().downcast().ok());
                Err(StartError { error, buffer: *memory.expect("the core returns the buffer that it was given") })
            }
        }
    }
}

const fn dtype<B: OwnedBuffer>() -> Dtype {
    B::Element::DTYPE
}

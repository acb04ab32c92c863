//! Asynchronous collectives: start now, wait later ([`Handle`]).
//!
//! The communicator owns the buffer, a [`Vec`] or a [`Buffer`](super::Buffer), until the operation completes, so you
//! may drop or forget the handle. The buffer comes back with the result. Memory beside it never changes, whatever
//! happens to the device that works on it.
//!
//! Up to 1024 operations may be in flight. At the limit, a start waits for room until its deadline, as a blocking call
//! does, and advances the operations in flight meanwhile. If none completes, it fails with [`Error::TooManyInFlight`]
//! and does not count as a call.

use super::calls::{check, elements};
use super::{CallOptions, Communicator, Element, Error, Handle, OwnedBuffer};
use crate::engine::ErasedBuffer;
use sumac_hal::ids::Rank;
use sumac_hal::op::{Dtype, OpDesc, ReduceOp};

impl Communicator {
    /// Start an all-reduce of `buffer`; [`Handle::wait`] returns it with the result.
    ///
    /// # Errors
    /// [`Error`] if the operation cannot be started. The buffer is lost.
    pub fn start_all_reduce<B: OwnedBuffer>(&self, buffer: B, op: ReduceOp) -> Result<Handle<B>, Error> {
        self.start_all_reduce_with(buffer, op, &CallOptions::default())
    }

    /// Start an all-reduce as [`Communicator::start_all_reduce`] does, with options.
    ///
    /// # Errors
    /// [`Error`] if the operation cannot be started. The buffer is lost.
    pub fn start_all_reduce_with<B: OwnedBuffer>(
        &self,
        buffer: B,
        op: ReduceOp,
        options: &CallOptions,
    ) -> Result<Handle<B>, Error> {
        let desc = OpDesc::all_reduce(dtype::<B>(), op, elements(buffer.values(), Some(op))?);
        self.start(desc, buffer, None, options)
    }

    /// Start a reduction to `root`; [`Handle::wait`] returns the buffer, which holds the result at the root only.
    ///
    /// # Errors
    /// [`Error`] if the operation cannot be started. The buffer is lost.
    pub fn start_reduce<B: OwnedBuffer>(&self, buffer: B, op: ReduceOp, root: u32) -> Result<Handle<B>, Error> {
        let desc = OpDesc::reduce(dtype::<B>(), op, Rank(root), elements(buffer.values(), Some(op))?);
        self.start(desc, buffer, None, &CallOptions::default())
    }

    /// Start a broadcast of `root`'s `buffer`; [`Handle::wait`] returns the buffer with the root's values.
    ///
    /// # Errors
    /// [`Error`] if the operation cannot be started. The buffer is lost.
    pub fn start_broadcast<B: OwnedBuffer>(&self, buffer: B, root: u32) -> Result<Handle<B>, Error> {
        let desc = OpDesc::broadcast(dtype::<B>(), Rank(root), elements(buffer.values(), None)?);
        self.start(desc, buffer, None, &CallOptions::default())
    }

    /// Start a reduce-scatter of `input`; [`Handle::wait`] returns this rank's block of the result. All blocks have the
    /// same length.
    ///
    /// # Errors
    /// [`Error`] if the operation cannot be started. The buffer is lost.
    pub fn start_reduce_scatter<B: OwnedBuffer>(&self, input: B, op: ReduceOp) -> Result<Handle<B>, Error> {
        let ranks = self.size() as usize;
        let len = input.values().len();
        if !len.is_multiple_of(ranks) {
            return Err(Error::Argument(format!("{len} elements are not {ranks} equal blocks")));
        }
        let output = B::zeroed(self, len / ranks)?;
        let desc = OpDesc::reduce_scatter(dtype::<B>(), op, elements(input.values(), Some(op))?);
        self.start(desc, input, Some(output), &CallOptions::default())
    }

    /// Start an all-gather of `input`; [`Handle::wait`] returns the inputs of all ranks, in rank order.
    ///
    /// # Errors
    /// [`Error`] if the operation cannot be started. The buffer is lost.
    pub fn start_all_gather<B: OwnedBuffer>(&self, input: B) -> Result<Handle<B>, Error> {
        let block = input.values().len();
        let len = block.checked_mul(self.size() as usize);
        let len = len.ok_or_else(|| Error::Argument(format!("{} blocks of {block}", self.size())))?;
        let output = B::zeroed(self, len)?;
        let desc = OpDesc::all_gather(dtype::<B>(), elements(output.values(), None)?);
        self.start(desc, input, Some(output), &CallOptions::default())
    }

    fn start<B: OwnedBuffer>(
        &self,
        desc: OpDesc,
        memory: B,
        output: Option<B>,
        options: &CallOptions,
    ) -> Result<Handle<B>, Error> {
        check(&desc)?;
        let output = output.map(|output| Box::new(output) as Box<dyn ErasedBuffer>);
        let id = self.lock()?.start(desc, Box::new(memory), output, options)?;
        Ok(Handle::new(self.core.clone(), id))
    }
}

const fn dtype<B: OwnedBuffer>() -> Dtype {
    B::Element::DTYPE
}

//! Collectives that are started and waited for later, in a [`Vec`] or a [`Buffer`](super::Buffer). Buffers are the
//! communicator's until then, so that a handle may be dropped or forgotten; what comes back is the buffer with the result.
//! Nothing beside it changes, whatever becomes of the device that works on it.
//!
//! 1024 operations may be in flight. Then a start waits for room until its deadline, as a blocking call does, and moves
//! on what is in flight meanwhile; if none completes, it fails with [`Error::TooManyInFlight`], and counts for nothing.

use super::calls::{check, elements};
use super::element::OwnedBuffer;
use super::{CallOptions, Communicator, Element, Error, Handle, Held};
use sumac_hal::ids::Rank;
use sumac_hal::op::{Dtype, OpDesc, ReduceOp};

impl Communicator {
    /// Start an all-reduce of `buffer`, which [`Handle::wait`] gives back.
    ///
    /// # Errors
    /// [`Error`]; the buffer is gone then.
    pub fn start_all_reduce<B: Held>(&self, buffer: B, op: ReduceOp) -> Result<Handle<B>, Error> {
        self.start_all_reduce_with(buffer, op, &CallOptions::default())
    }

    /// The same with options.
    ///
    /// # Errors
    /// [`Error`]; the buffer is gone then.
    pub fn start_all_reduce_with<B: Held>(
        &self,
        buffer: B,
        op: ReduceOp,
        options: &CallOptions,
    ) -> Result<Handle<B>, Error> {
        let desc = OpDesc::all_reduce(dtype::<B>(), op, elements(buffer.values(), Some(op))?);
        self.start(desc, buffer, None, options)
    }

    /// Start a reduction to `root`; [`Handle::wait`] gives the buffer back, at the root with the result.
    ///
    /// # Errors
    /// [`Error`]; the buffer is gone then.
    pub fn start_reduce<B: Held>(&self, buffer: B, op: ReduceOp, root: u32) -> Result<Handle<B>, Error> {
        let desc = OpDesc::reduce(dtype::<B>(), op, Rank(root), elements(buffer.values(), Some(op))?);
        self.start(desc, buffer, None, &CallOptions::default())
    }

    /// Start a broadcast of `root`'s `buffer`.
    ///
    /// # Errors
    /// [`Error`]; the buffer is gone then.
    pub fn start_broadcast<B: Held>(&self, buffer: B, root: u32) -> Result<Handle<B>, Error> {
        let desc = OpDesc::broadcast(dtype::<B>(), Rank(root), elements(buffer.values(), None)?);
        self.start(desc, buffer, None, &CallOptions::default())
    }

    /// Start a reduce-scatter of `input`; [`Handle::wait`] gives this rank's block of the result.
    ///
    /// # Errors
    /// [`Error`]; the buffer is gone then.
    pub fn start_reduce_scatter<B: Held>(&self, input: B, op: ReduceOp) -> Result<Handle<B>, Error> {
        let ranks = self.size() as usize;
        let len = input.values().len();
        if !len.is_multiple_of(ranks) {
            return Err(Error::Argument(format!("{len} elements are not {ranks} equal blocks")));
        }
        let output = B::zeroed(self, len / ranks)?;
        let desc = OpDesc::reduce_scatter(dtype::<B>(), op, elements(input.values(), Some(op))?);
        self.start(desc, input, Some(output), &CallOptions::default())
    }

    /// Start an all-gather of `input`; [`Handle::wait`] gives all ranks' inputs, in the order of ranks.
    ///
    /// # Errors
    /// [`Error`]; the buffer is gone then.
    pub fn start_all_gather<B: Held>(&self, input: B) -> Result<Handle<B>, Error> {
        let block = input.values().len();
        let len = block.checked_mul(self.size() as usize);
        let len = len.ok_or_else(|| Error::Argument(format!("{} blocks of {block}", self.size())))?;
        let output = B::zeroed(self, len)?;
        let desc = OpDesc::all_gather(dtype::<B>(), elements(output.values(), None)?);
        self.start(desc, input, Some(output), &CallOptions::default())
    }

    fn start<B: Held>(
        &self,
        desc: OpDesc,
        memory: B,
        output: Option<B>,
        options: &CallOptions,
    ) -> Result<Handle<B>, Error> {
        check(&desc)?;
        let output = output.map(|output| Box::new(output) as Box<dyn OwnedBuffer>);
        let id = self.lock()?.start(desc, Box::new(memory), output, options)?;
        Ok(Handle::new(self.own.clone(), id))
    }
}

const fn dtype<B: Held>() -> Dtype {
    B::Element::DTYPE
}

//! Collectives that are started and waited for later. Buffers are the communicator's until then, so that a handle may
//! be forgotten; what comes back is the buffer with the result.

use super::calls::{check, elements};
use super::core::Owned;
use super::{CallOptions, Communicator, Element, Error, Handle};
use std::sync::Arc;
use sumac_hal::ids::Rank;
use sumac_hal::op::{OpDesc, ReduceOp};

impl Communicator {
    /// Start an all-reduce of `buffer`, which [`Handle::wait`] gives back.
    ///
    /// # Errors
    /// [`Error`]; the buffer is gone then.
    pub fn start_all_reduce<T: Element>(&self, buffer: Vec<T>, op: ReduceOp) -> Result<Handle<T>, Error> {
        self.start_all_reduce_with(buffer, op, &CallOptions::default())
    }

    /// The same with options.
    ///
    /// # Errors
    /// [`Error`]; the buffer is gone then.
    pub fn start_all_reduce_with<T: Element>(
        &self,
        buffer: Vec<T>,
        op: ReduceOp,
        options: &CallOptions,
    ) -> Result<Handle<T>, Error> {
        let desc = OpDesc::all_reduce(T::DTYPE, op, elements(&buffer, Some(op))?);
        self.start(desc, buffer, None, options)
    }

    /// Start a reduction to `root`; [`Handle::wait`] gives the buffer back, at the root with the result.
    ///
    /// # Errors
    /// [`Error`]; the buffer is gone then.
    pub fn start_reduce<T: Element>(&self, buffer: Vec<T>, op: ReduceOp, root: u32) -> Result<Handle<T>, Error> {
        let desc = OpDesc::reduce(T::DTYPE, op, Rank(root), elements(&buffer, Some(op))?);
        self.start(desc, buffer, None, &CallOptions::default())
    }

    /// Start a broadcast of `root`'s `buffer`.
    ///
    /// # Errors
    /// [`Error`]; the buffer is gone then.
    pub fn start_broadcast<T: Element>(&self, buffer: Vec<T>, root: u32) -> Result<Handle<T>, Error> {
        let desc = OpDesc::broadcast(T::DTYPE, Rank(root), elements(&buffer, None)?);
        self.start(desc, buffer, None, &CallOptions::default())
    }

    /// Start a reduce-scatter of `input`; [`Handle::wait`] gives this rank's block of the result.
    ///
    /// # Errors
    /// [`Error`]; the buffer is gone then.
    pub fn start_reduce_scatter<T: Element>(&self, input: Vec<T>, op: ReduceOp) -> Result<Handle<T>, Error> {
        let ranks = self.size() as usize;
        if !input.len().is_multiple_of(ranks) {
            return Err(Error::Argument(format!("{} elements are not {ranks} equal blocks", input.len())));
        }
        let output = vec![T::zeroed(); input.len() / ranks];
        let desc = OpDesc::reduce_scatter(T::DTYPE, op, elements(&input, Some(op))?);
        self.start(desc, input, Some(output), &CallOptions::default())
    }

    /// Start an all-gather of `input`; [`Handle::wait`] gives all ranks' inputs, in the order of ranks.
    ///
    /// # Errors
    /// [`Error`]; the buffer is gone then.
    pub fn start_all_gather<T: Element>(&self, input: Vec<T>) -> Result<Handle<T>, Error> {
        let len = input.len().checked_mul(self.size() as usize);
        let len = len.ok_or_else(|| Error::Argument(format!("{} blocks of {}", self.size(), input.len())))?;
        let output = vec![T::zeroed(); len];
        let desc = OpDesc::all_gather(T::DTYPE, elements(&output, None)?);
        self.start(desc, input, Some(output), &CallOptions::default())
    }

    fn start<T: Element>(
        &self,
        desc: OpDesc,
        memory: Vec<T>,
        output: Option<Vec<T>>,
        options: &CallOptions,
    ) -> Result<Handle<T>, Error> {
        check(&desc)?;
        let output = output.map(|output| Box::new(output) as _);
        let id = self.lock().start(desc, Owned { memory: Box::new(memory), output }, options)?;
        Ok(Handle::new(Arc::clone(&self.core), id))
    }
}

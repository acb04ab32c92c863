//! Persistent operations: checked and decided once, run many times, as `MPI_Allreduce_init` and its relatives (MPI 4.1,
//! section 6.13) have them.
//!
//! A [`Prepared`] owns its buffers between runs. Each run counts as a call: all ranks run their operations in the same
//! order, but one rank may prepare what another calls directly. A change of the tree, a recovery for example, is no
//! reason to prepare anew: the next run is decided by what there is then.

use super::calls::{check, elements};
use super::{CallOptions, Communicator, Element, Error, Outcome, OwnedBuffer, StartError};
use crate::engine::{ErasedBuffer, Operation, Owned, PreparedCall, SharedCore, Stripes, Task, Work};
use crate::exec::Buffers;
use std::fmt;
use std::sync::Arc;
use sumac_hal::op::{OpDesc, ReduceOp};

/// An operation that is prepared to run many times on the same buffers.
///
/// Like a [`Handle`](super::Handle), it holds a reference to the communicator, and dropping it detaches a started run.
pub struct Prepared<B: OwnedBuffer> {
    core: SharedCore,
    stripes: Arc<Stripes>,
    /// There are no further trees and no progress thread.
    is_by_caller: bool,
    call: PreparedCall,
    /// `None` while a started run has them, and after an error that did not return them.
    buffers: Option<Box<B>>,
    output: Option<Box<B>>,
    /// The started run.
    started: Option<Task>,
}

impl<B: OwnedBuffer> fmt::Debug for Prepared<B> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Prepared").field("call", &self.call).field("started", &self.started).finish_non_exhaustive()
    }
}

impl Communicator {
    /// Prepare an all-reduce of `buffer`, in place.
    ///
    /// # Errors
    /// [`StartError`], with the buffer, if the operation is not possible.
    pub fn prepare_all_reduce<B: OwnedBuffer>(&self, buffer: B, op: ReduceOp) -> Result<Prepared<B>, StartError<B>> {
        match elements(buffer.values(), Some(op)) {
            Ok(count) => {
                self.prepare(&OpDesc::all_reduce(B::Element::DTYPE, op, count), buffer, None, &CallOptions::default())
            }
            Err(error) => Err(StartError { error, buffer }),
        }
    }

    /// Prepare an operation that is described at run time, from `input` to `output`, or in place without one.
    /// [`crate::comm`] has a table of the buffer lengths.
    ///
    /// # Errors
    /// [`StartError`], with the input, if the operation is not possible.
    pub fn prepare<B: OwnedBuffer>(
        &self,
        desc: &OpDesc,
        input: B,
        output: Option<B>,
        options: &CallOptions,
    ) -> Result<Prepared<B>, StartError<B>> {
        let (mut buffers, mut output) = (Box::new(input), output.map(Box::new));
        let prepared = check(desc).and_then(|()| {
            let buffers = borrow(&mut *buffers, &mut output);
            self.lock()?.prepare(*desc, &buffers, options)
        });
        match prepared {
            Ok(call) => Ok(Prepared {
                core: self.core.clone(),
                stripes: Arc::clone(&self.stripes),
                is_by_caller: self.stripes.is_single() && !self.core.has_progress_thread(),
                call,
                buffers: Some(buffers),
                output,
                started: None,
            }),
            Err(error) => Err(StartError { error, buffer: *buffers }),
        }
    }
}

impl<B: OwnedBuffer> Prepared<B> {
    /// Run the operation to completion.
    ///
    /// # Errors
    /// [`Error`] if it failed or was rejected, or a started run has not been waited for.
    pub fn run(&mut self) -> Result<Outcome, Error> {
        let Self { core, stripes, is_by_caller, call, buffers, output, .. } = self;
        let buffers = buffers.as_deref_mut().ok_or_else(in_flight)?;
        let mut buffers = borrow(buffers, output);
        if *is_by_caller {
            return core.lock_settled()?.run_prepared(call, buffers);
        }
        match stripes.is_single() {
            true => core.run_by_thread(call.desc(), None, &mut buffers, call.options()),
            false => {
                let mut core = core.lock()?;
                core.serve_submissions();
                stripes.run(&mut core, *call.desc(), &mut buffers, call.options())
            }
        }
    }

    /// Start a run; [`Prepared::wait`] completes it.
    ///
    /// # Errors
    /// [`Error`] if it cannot be started, or the last started run has not been waited for.
    pub fn start(&mut self) -> Result<(), Error> {
        let memory: Box<dyn ErasedBuffer> = self.buffers.take().ok_or_else(in_flight)?;
        let output = self.output.take().map(|output| output as Box<dyn ErasedBuffer>);
        let (desc, options) = (*self.call.desc(), *self.call.options());
        match self.core.begin(Work::Operation(Operation { desc, counts: None, memory, output, options })) {
            Ok(task) => {
                self.started = Some(task);
                Ok(())
            }
            Err(refused) => {
                let StartError { error, buffer: work } = *refused;
                if let Work::Operation(Operation { memory, output, .. }) = work {
                    self.take_back(memory, output);
                }
                Err(error)
            }
        }
    }

    /// Return whether the started run has completed or failed, as [`Handle::test`](super::Handle::test) does; true if
    /// there is none.
    pub fn test(&mut self) -> bool {
        self.started.is_none_or(|task| self.core.has_ended(task))
    }

    /// Wait for the started run, within the deadline of the options, from now.
    ///
    /// # Errors
    /// [`Error`] if it failed, or there is none.
    pub fn wait(&mut self) -> Result<Outcome, Error> {
        let Some(task) = self.started.take() else {
            return Err(Error::Argument("this operation has not been started; call start before wait".into()));
        };
        let (owned, result) = self.core.finish(task, self.call.options()).into_operation();
        if let Some((memory, output)) = owned.map(Owned::into_parts) {
            self.take_back(memory, output);
        }
        result
    }

    /// Return the buffer: the input, and also the output unless that is separate. `None` while a started run has it.
    pub fn buffer(&mut self) -> Option<&mut B> {
        self.buffers.as_deref_mut()
    }

    /// Return the separate output. `None` if there is none, or a started run has it.
    pub fn output(&mut self) -> Option<&mut B> {
        self.output.as_deref_mut()
    }

    /// Return the buffers, unless a started run has them.
    pub fn into_buffers(mut self) -> Option<(B, Option<B>)> {
        Some((*self.buffers.take()?, self.output.take().map(|output| *output)))
    }

    fn take_back(&mut self, memory: Box<dyn ErasedBuffer>, output: Option<Box<dyn ErasedBuffer>>) {
        let typed = |buffer: Box<dyn ErasedBuffer>| buffer.into_any().downcast::<B>().ok();
        (self.buffers, self.output) = (typed(memory), output.and_then(typed));
    }
}

impl<B: OwnedBuffer> Drop for Prepared<B> {
    fn drop(&mut self) {
        if let Some(task) = self.started {
            self.core.detach(task);
        }
    }
}

fn borrow<'b, B: OwnedBuffer>(memory: &'b mut B, output: &'b mut Option<Box<B>>) -> Buffers<'b> {
    match output {
        Some(output) => Buffers::Separate { input: memory.bytes(), output: output.bytes_mut() },
        None => Buffers::InPlace(memory.bytes_mut()),
    }
}

fn in_flight() -> Error {
    Error::Argument("a started run of this operation has its buffers; wait for it first".into())
}

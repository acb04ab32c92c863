//! A communicator that Python's objects and threads share, and the thread that gives back to Python what they leave.

use crate::errors::Failure;
use crate::wait::Slot;
use pyo3::exceptions::PyRuntimeError;
use pyo3::prelude::*;
use std::any::Any;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::mpsc::{Receiver, Sender, channel};
use std::sync::{Arc, PoisonError, RwLock};
use std::thread;
use sumac::{Canceller, Communicator, JoinConfig};

/// A communicator, until its rank leaves.
///
/// The library's progress thread never waits for the GIL: it could hold it up, and whoever has the GIL may wait for the
/// library. What has to be done under the GIL at the end of an operation goes to [`Errands`].
pub(crate) struct SharedCommunicator {
    /// Locked for the time of a call, but never by a thread that has the GIL.
    comm: RwLock<Option<Communicator>>,
    errands: Errands,
    canceller: Canceller,
    pid: u32,
    rank: u32,
    size: u32,
    name: String,
}

impl SharedCommunicator {
    /// Join a job.
    pub(crate) fn join(py: Python<'_>, config: JoinConfig) -> PyResult<Self> {
        let joined = blocking(py, || Communicator::join(config))?;
        Self::adopt(joined.map_err(|error| Failure::Join(Arc::new(error)).raise(py))?)
    }

    /// Share a communicator.
    pub(crate) fn adopt(comm: Communicator) -> PyResult<Self> {
        Ok(Self {
            canceller: comm.canceller(),
            pid: std::process::id(),
            rank: comm.rank(),
            size: comm.size(),
            name: comm.name(),
            errands: Errands::new()?,
            comm: RwLock::new(Some(comm)),
        })
    }

    /// Return this rank.
    pub(crate) const fn rank(&self) -> u32 {
        self.rank
    }

    /// Return the number of ranks.
    pub(crate) const fn size(&self) -> u32 {
        self.size
    }

    /// Return the communicator's name.
    pub(crate) fn name(&self) -> &str {
        &self.name
    }

    /// Return who runs errands under the GIL.
    pub(crate) const fn errands(&self) -> &Errands {
        &self.errands
    }

    /// End the communicator, also while it runs an operation.
    pub(crate) fn cancel(&self) {
        self.canceller.cancel();
    }

    /// Return whether this process was forked from the one that joined.
    pub(crate) fn is_forked(&self) -> bool {
        std::process::id() != self.pid
    }

    /// Call something that does not block, without the GIL.
    ///
    /// # Errors
    /// What failed.
    pub(crate) fn start<T: Send>(
        &self,
        py: Python<'_>,
        call: impl FnOnce(&Communicator) -> Result<T, Failure> + Send,
    ) -> PyResult<T> {
        self.check(py)?;
        py.detach(|| self.with(call)).map_err(|failure| failure.raise(py))
    }

    /// Call something that may block, on a thread of its own, and wait for its result.
    ///
    /// # Errors
    /// What failed, or what a signal handler raised; then `call` goes on.
    pub(crate) fn call<T: Send + 'static>(
        self: &Arc<Self>,
        py: Python<'_>,
        call: impl FnOnce(&Communicator) -> Result<T, Failure> + Send + 'static,
    ) -> PyResult<T> {
        self.check(py)?;
        let shared = Arc::clone(self);
        blocking(py, move || shared.with(call))?.map_err(|failure| failure.raise(py))
    }

    /// Leave by `leave`, after all calls; `None` if this rank has left.
    ///
    /// # Errors
    /// What failed, or what a signal handler raised; then the rank leaves all the same.
    pub(crate) fn leave<T: Send + 'static>(
        self: &Arc<Self>,
        py: Python<'_>,
        leave: impl FnOnce(Communicator) -> T + Send + 'static,
    ) -> PyResult<Option<T>> {
        self.check(py)?;
        let shared = Arc::clone(self);
        blocking(py, move || {
            let comm = shared.comm.write().unwrap_or_else(PoisonError::into_inner).take();
            comm.map(leave)
        })
    }

    fn with<T>(&self, call: impl FnOnce(&Communicator) -> Result<T, Failure>) -> Result<T, Failure> {
        let comm = self.comm.read().unwrap_or_else(PoisonError::into_inner);
        comm.as_ref().map_or(Err(Failure::Closed), call)
    }

    /// Check the process before any lock, which another thread may have held when the process was forked.
    pub(crate) fn check(&self, py: Python<'_>) -> PyResult<()> {
        if self.is_forked() { Err(Failure::Forked.raise(py)) } else { Ok(()) }
    }
}

/// What is to be done under the GIL: callbacks, and the release of Python's objects. A thread does it in order.
#[derive(Clone)]
pub(crate) struct Errands {
    sender: Sender<Errand>,
    pid: u32,
}

/// Something to be done under the GIL.
pub(crate) type Errand = Box<dyn FnOnce(Python<'_>) + Send>;

impl Errands {
    fn new() -> PyResult<Self> {
        let (sender, errands) = channel();
        thread::Builder::new().name("sumac-python".into()).spawn(move || run(errands))?;
        Ok(Self { sender, pid: std::process::id() })
    }

    /// Have something done. Does not block.
    pub(crate) fn send(&self, errand: impl FnOnce(Python<'_>) + Send + 'static) {
        let errand: Errand = Box::new(errand);
        if std::process::id() == self.pid {
            // The thread receives until nobody can send.
            let _ = self.sender.send(errand);
        } else {
            // A forked process has no such thread, and another thread may have been sending when it was forked.
            std::mem::forget(errand);
        }
    }
}

fn run(errands: Receiver<Errand>) {
    for errand in errands {
        let mut errand = Some(errand);
        let done = Python::try_attach(|py| errand.take().into_iter().for_each(|errand| errand(py)));
        if done.is_none() {
            // The interpreter ends: there is nothing to release any more.
            std::mem::forget(errand);
        }
    }
}

/// Run something on a thread of its own and wait for it, without the GIL.
///
/// # Errors
/// What a signal handler raised; then it goes on.
pub(crate) fn blocking<T: Send + 'static>(py: Python<'_>, run: impl FnOnce() -> T + Send + 'static) -> PyResult<T> {
    let slot = Arc::new(Slot::default());
    let done = Arc::clone(&slot);
    let run = move || {
        // The result is dropped with what the panic left.
        let result = catch_unwind(AssertUnwindSafe(run)).map_err(|panic| message(&*panic));
        done.set(result);
    };
    thread::Builder::new().name("sumac-call".into()).spawn(run)?;
    slot.wait(py, None)?;
    let result = slot.lock().take();
    let result = result.unwrap_or_else(|| Err("the result is gone".into()));
    result.map_err(|message| PyRuntimeError::new_err(format!("a defect in sumac: {message}")))
}

fn message(panic: &(dyn Any + Send)) -> String {
    let text = panic.downcast_ref::<&str>().map(ToString::to_string);
    text.or_else(|| panic.downcast_ref::<String>().cloned()).unwrap_or_else(|| "(no message)".into())
}

//! Started operations and messages.

use crate::array::Array;
use crate::errors::Failure;
use crate::outcome::Outcome;
use crate::shared::{Errands, SharedCommunicator};
use crate::wait::Slot;
use pyo3::exceptions::{PyTimeoutError, PyValueError};
use pyo3::prelude::*;
use std::any::Any;
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError};
use std::time::Duration;

type Completed = Result<Option<sumac::Outcome>, Failure>;

/// An operation that was started. Dropping it detaches the operation, which goes on.
#[pyclass(frozen, module = "sumac")]
pub(crate) struct Request {
    state: Arc<State>,
    /// The communicator lives as long as its operations.
    shared: Arc<SharedCommunicator>,
    /// Dropped under the GIL, so that the library is never the one who releases them, unless this is dropped before.
    _arrays: Vec<Array>,
}

struct State {
    operation: Mutex<Operation>,
    has_ended: Slot<()>,
    /// The rank at the other end of a message, once it was waited for.
    source: OnceLock<Option<u32>>,
    /// To be called at the end.
    callbacks: Mutex<Vec<Py<PyAny>>>,
    errands: Errands,
}

/// An operation, or its result.
enum Operation {
    Started(Option<sumac::Request>),
    Ended(Completed),
}

impl State {
    fn callbacks(&self) -> MutexGuard<'_, Vec<Py<PyAny>>> {
        self.callbacks.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn operation(&self) -> MutexGuard<'_, Operation> {
        self.operation.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Note the end. A callback that is added meanwhile sees it, or is seen here.
    fn end(&self) {
        self.has_ended.set(());
        let callbacks = std::mem::take(&mut *self.callbacks());
        if !callbacks.is_empty() {
            self.errands.send(move |py| callbacks.iter().for_each(|callback| run(py, callback)));
        }
    }

    /// Return the result of an operation that has ended.
    fn result(&self) -> Completed {
        let mut operation = self.operation();
        if let Operation::Started(request) = &mut *operation {
            let wait = |mut request: sumac::Request| {
                let outcome = request.wait()?;
                self.source.get_or_init(|| request.source());
                Ok(outcome)
            };
            let result = request.take().map_or(Err(Failure::Closed), wait);
            *operation = Operation::Ended(result);
        }
        match &*operation {
            Operation::Ended(result) => result.clone(),
            Operation::Started(_) => Err(Failure::Closed),
        }
    }
}

fn run(py: Python<'_>, callback: &Py<PyAny>) {
    if let Err(error) = callback.call0(py) {
        error.write_unraisable(py, Some(callback.bind(py)));
    }
}

/// What the library keeps of an operation's arrays until it has ended.
struct Kept {
    arrays: Vec<Array>,
    errands: Errands,
}

impl Drop for Kept {
    fn drop(&mut self) {
        // The last one to hold an array releases it under the GIL, for which the library's thread must not wait.
        let owners: Vec<_> = self.arrays.drain(..).filter_map(Array::into_owner).collect();
        if !owners.is_empty() {
            self.errands.send(move |_| drop(owners));
        }
    }
}

impl Request {
    /// Start something on these arrays.
    ///
    /// # Errors
    /// What failed.
    pub(crate) fn start(
        py: Python<'_>,
        shared: &Arc<SharedCommunicator>,
        arrays: Vec<Array>,
        start: impl FnOnce(&sumac::Communicator, Box<dyn Any + Send>) -> Result<sumac::Request, sumac::Error> + Send,
    ) -> PyResult<Self> {
        let errands = shared.errands().clone();
        let keep = Box::new(Kept { arrays: arrays.clone(), errands: errands.clone() });
        let operation = Mutex::new(Operation::Started(None));
        let state = State {
            operation,
            has_ended: Slot::default(),
            source: OnceLock::new(),
            callbacks: Mutex::default(),
            errands,
        };
        let state = Arc::new(state);
        shared.start(py, |comm| {
            let mut request = start(comm, keep)?;
            let ended = Arc::clone(&state);
            request.on_completion(move || ended.end());
            *state.operation() = Operation::Started(Some(request));
            Ok(())
        })?;
        Ok(Self { state, shared: Arc::clone(shared), _arrays: arrays })
    }
}

impl Drop for Request {
    fn drop(&mut self) {
        if self.shared.is_forked() {
            return;
        }
        let detached = std::mem::replace(&mut *self.state.operation(), Operation::Started(None));
        if let Operation::Started(Some(request)) = detached {
            // Detaching locks the communicator, and this thread has the GIL.
            self.state.errands.send(move |py| py.detach(move || drop(request)));
        }
    }
}

#[pymethods]
impl Request {
    /// Return whether the operation has completed or failed. Never waits.
    fn test(&self, py: Python<'_>) -> PyResult<bool> {
        self.shared.check(py)?;
        Ok(self.state.has_ended.lock().is_some())
    }

    /// Wait until the operation has completed, and return its outcome; `None` for a message. May be called again.
    #[pyo3(signature = (timeout=None))]
    fn wait(&self, py: Python<'_>, timeout: Option<f64>) -> PyResult<Option<Outcome>> {
        self.shared.check(py)?;
        let limit = timeout.map(seconds).transpose()?;
        if !self.state.has_ended.wait(py, limit)? {
            let waited = timeout.unwrap_or_default();
            return Err(PyTimeoutError::new_err(format!("the operation goes on after {waited} s; wait again")));
        }
        match py.detach(|| self.state.result()) {
            Ok(outcome) => Ok(outcome.map(Outcome)),
            Err(failure) => Err(failure.raise(py)),
        }
    }

    /// The rank at the other end of a message that was waited for.
    #[getter]
    fn source(&self) -> Option<u32> {
        self.state.source.get().copied().flatten()
    }

    /// mpi4py's name of `test`.
    #[pyo3(name = "Test")]
    fn mpi_test(&self, py: Python<'_>) -> PyResult<bool> {
        self.test(py)
    }

    /// mpi4py's name of `wait`: returns `True`, and raises the operation's error.
    #[pyo3(name = "Wait")]
    fn mpi_wait(&self, py: Python<'_>) -> PyResult<bool> {
        self.wait(py, None).map(|_| true)
    }

    /// Call `callback` without arguments when the operation has completed or failed: on a thread of the communicator,
    /// or at once if it has. Callbacks of a communicator run one after the other.
    fn add_done_callback(&self, py: Python<'_>, callback: Py<PyAny>) -> PyResult<()> {
        self.shared.check(py)?;
        self.state.callbacks().push(callback);
        if self.state.has_ended.lock().is_some() {
            let callbacks = std::mem::take(&mut *self.state.callbacks());
            callbacks.iter().for_each(|callback| run(py, callback));
        }
        Ok(())
    }
}

/// Read a time limit in seconds.
pub(crate) fn seconds(seconds: f64) -> PyResult<Duration> {
    Duration::try_from_secs_f64(seconds)
        .map_err(|error| PyValueError::new_err(format!("{seconds} is no time limit in seconds: {error}")))
}

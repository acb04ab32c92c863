//! Failures as Python's exceptions: a class of `sumac.errors` for each kind, with the error's data as attributes.

use pyo3::prelude::*;
use pyo3::sync::PyOnceLock;
use pyo3::types::{PyDict, PyType};
use sumac::comm::OutputState;
use sumac::{Error, JoinError, OpDesc, ShrinkError, SplitError};

/// Why something of a communicator failed.
#[derive(Clone)]
pub(crate) enum Failure {
    /// A call failed.
    Call(Error),
    /// Joining failed.
    Join(std::sync::Arc<JoinError>),
    /// Splitting failed.
    Split(std::sync::Arc<SplitError>),
    /// Shrinking failed.
    Shrink(std::sync::Arc<ShrinkError>),
    /// This rank has left.
    Closed,
    /// This process was forked from the one that joined.
    Forked,
}

impl From<Error> for Failure {
    fn from(error: Error) -> Self {
        if error == Error::Forked { Self::Forked } else { Self::Call(error) }
    }
}

impl Failure {
    /// Return the exception to raise.
    pub(crate) fn raise(&self, py: Python<'_>) -> PyErr {
        self.exception(py).unwrap_or_else(|error| error)
    }

    fn exception(&self, py: Python<'_>) -> PyResult<PyErr> {
        let data = PyDict::new(py);
        match self {
            Self::Call(error) => call_exception(py, error),
            Self::Join(error) => exception(py, "JoinError", format!("{error:?}"), &data),
            Self::Split(error) => exception(py, "SplitError", format!("{error:?}"), &data),
            Self::Shrink(error) => exception(py, "ShrinkError", format!("{error:?}"), &data),
            Self::Closed => exception(py, "LeftError", "this rank has left the communicator".into(), &data),
            Self::Forked => exception(py, "ForkedError", Error::Forked.to_string(), &data),
        }
    }
}

/// Return the exception of a failed call.
fn call_exception(py: Python<'_>, error: &Error) -> PyResult<PyErr> {
    let data = PyDict::new(py);
    let class = match error {
        Error::Mismatch { first, other } => {
            data.set_item("first", operation(py, first)?)?;
            data.set_item("other", operation(py, other)?)?;
            "MismatchError"
        }
        Error::RankLost { rank } => {
            data.set_item("rank", rank.0)?;
            "RankLostError"
        }
        Error::RanksFailed { ranks, operation, output } => {
            data.set_item("ranks", ranks.iter().map(|rank| rank.0).collect::<Vec<_>>())?;
            data.set_item("operation", operation)?;
            data.set_item("output", runs(output))?;
            "RanksFailedError"
        }
        Error::Partitioned { reachable, ranks, output } => {
            data.set_item("reachable", reachable)?;
            data.set_item("size", ranks)?;
            data.set_item("output", runs(output))?;
            "PartitionedError"
        }
        Error::OutcomeUnknown { desc, waited, output } => {
            data.set_item("operation", operation(py, desc)?)?;
            data.set_item("waited", waited.as_secs_f64())?;
            data.set_item("output", runs(output))?;
            "OutcomeUnknownError"
        }
        Error::PathLost => "PathLostError",
        Error::GroupLost => "GroupLostError",
        Error::DeviceLost { device } | Error::Device { device, .. } => {
            data.set_item("device", device)?;
            if matches!(error, Error::DeviceLost { .. }) { "DeviceLostError" } else { "DeviceError" }
        }
        Error::Memory { device, len_bytes, .. } => {
            data.set_item("device", device)?;
            data.set_item("len_bytes", len_bytes)?;
            "RegistrationError"
        }
        Error::Stragglers { missing } => {
            data.set_item("missing", missing.iter().map(|rank| rank.0).collect::<Vec<_>>())?;
            "StragglersError"
        }
        Error::Excluded => "ExcludedError",
        Error::Deadline { desc, waited } => {
            data.set_item("operation", operation(py, desc)?)?;
            data.set_item("waited", waited.as_secs_f64())?;
            "DeadlineError"
        }
        Error::TooManyInFlight { limit, waited } => {
            data.set_item("limit", limit)?;
            data.set_item("waited", waited.as_secs_f64())?;
            "TooManyInFlightError"
        }
        Error::NotPossible(_) => "NotPossibleError",
        Error::Unsupported(desc) => {
            data.set_item("operation", operation(py, desc)?)?;
            "UnsupportedError"
        }
        Error::Argument(_) => "ArgumentError",
        Error::Schedule(_) => "HostCollectiveError",
        Error::Cancelled => "CancelledError",
        Error::Left => "LeftError",
        Error::Ended(cause) => {
            data.set_item("cause", call_exception(py, cause)?)?;
            "EndedError"
        }
        // Without data of its own, as all later ones until they have a class.
        _ => "Error",
    };
    exception(py, class, error.to_string(), &data)
}

/// Return the ranges of elements that hold results; `None` if the output is unspecified.
fn runs(output: &OutputState) -> Option<Vec<(u64, u64)>> {
    match output {
        OutputState::Elements(runs) => Some(runs.iter().map(|run| (run.start, run.end)).collect()),
        _ => None,
    }
}

/// Return an operation's description as `sumac.errors.Operation`.
fn operation<'py>(py: Python<'py>, desc: &OpDesc) -> PyResult<Bound<'py, PyAny>> {
    let (dtype, op) = (desc.dtype.map(|dtype| dtype.name()), desc.op.map(|op| op.name()));
    let root = desc.collective.is_rooted().then_some(desc.root.0);
    class(py, "Operation")?.call1((desc.collective.name(), dtype, op, root, desc.count))
}

fn exception(py: Python<'_>, name: &str, text: String, data: &Bound<'_, PyDict>) -> PyResult<PyErr> {
    let exception = class(py, name)?.call1((text,))?;
    for (name, value) in data {
        exception.setattr(name.str()?, value)?;
    }
    Ok(PyErr::from_value(exception))
}

/// Return a class of `sumac.errors`.
fn class<'py>(py: Python<'py>, name: &str) -> PyResult<Bound<'py, PyAny>> {
    static BASE: PyOnceLock<Py<PyType>> = PyOnceLock::new();
    // The first look-up reports what is wrong with the package.
    let base = BASE.import(py, "sumac.errors", "Error")?;
    if name == "Error" { Ok(base.clone().into_any()) } else { py.import("sumac.errors")?.getattr(name) }
}

//! Communicators as Python sees them: operations on borrowed arrays, started or waited for.

use crate::array::Array;
use crate::config::{call_options, join_config, operator};
use crate::errors::Failure;
use crate::memory;
use crate::names::{self, ElementKind};
use crate::request::{Request, seconds};
use crate::shared::SharedCommunicator;
use pyo3::exceptions::{PyOverflowError, PyTypeError, PyValueError};
use pyo3::prelude::*;
use pyo3::types::PyDict;
use std::ptr::null_mut;
use std::sync::Arc;
use sumac::comm::Departure;
use sumac::{Algo, CallOptions, Collective, Counts, OpDesc, Rank, RawBuffers};

/// Join a job by the environment, or by keyword arguments.
#[pyfunction]
#[pyo3(signature = (**settings))]
pub(crate) fn join(py: Python<'_>, settings: Option<&Bound<'_, PyDict>>) -> PyResult<Communicator> {
    let none = PyDict::new(py);
    let config = join_config(py, settings.unwrap_or(&none))?;
    Ok(Communicator(Arc::new(SharedCommunicator::join(py, config)?)))
}

/// A rank's membership in a job.
#[pyclass(frozen, module = "sumac._sumac")]
pub(crate) struct Communicator(Arc<SharedCommunicator>);

/// The arrays of a call.
enum Arrays {
    None,
    InPlace(Array),
    Input(Array),
    Separate(Array, Array),
}

impl Arrays {
    fn borrow(input: Option<&Bound<'_, PyAny>>, output: Option<&Bound<'_, PyAny>>) -> PyResult<Self> {
        match (input, output) {
            (None, None) => Ok(Self::None),
            (None, Some(array)) => Ok(Self::InPlace(Array::write(array)?)),
            (Some(array), None) => Ok(Self::Input(Array::read(array)?)),
            (Some(input), Some(output)) => {
                let (input, output) = (Array::read(input)?, Array::write(output)?);
                if input.kind() != output.kind() {
                    let (input, output) = (input.kind().dtype(), output.kind().dtype());
                    let text = format!("the input has elements of {input}, the output of {output}; make them the same");
                    return Err(PyTypeError::new_err(text));
                }
                Ok(Self::Separate(input, output))
            }
        }
    }

    /// Work in place where one array is the other, or this rank's block of it, as the collective has it in place.
    fn in_place(self, collective: Collective, rank: u32, size: u32) -> PyResult<Self> {
        let Self::Separate(input, output) = self else { return Ok(self) };
        if !input.overlaps(&output) {
            return Ok(Self::Separate(input, output));
        }
        let is_whole = |block: &Array, whole: &Array| {
            block.len_bytes().checked_mul(size as usize) == Some(whole.len_bytes())
                && block.address() == whole.address() + rank as usize * block.len_bytes()
        };
        let is_same = input.address() == output.address() && input.len_bytes() == output.len_bytes();
        match collective {
            Collective::AllReduce | Collective::Reduce | Collective::AllToAll if is_same => Ok(Self::InPlace(output)),
            Collective::AllGather | Collective::Gather if is_whole(&input, &output) => Ok(Self::InPlace(output)),
            _ => Err(PyValueError::new_err("input and output share memory: pass the array once, to work in place")),
        }
    }

    fn kind(&self) -> Option<ElementKind> {
        match self {
            Self::None => None,
            Self::InPlace(array) | Self::Input(array) | Self::Separate(array, _) => Some(array.kind()),
        }
    }

    /// Return the number of values that the operation counts, by the table of lengths in `sumac::comm`.
    fn count(&self, collective: Collective, is_root: bool, size: u32) -> Option<u64> {
        let (first, last) = match self {
            Self::None => return Some(0),
            Self::InPlace(array) | Self::Input(array) => (array, array),
            Self::Separate(input, output) => (input, output),
        };
        let in_place = matches!(self, Self::InPlace(_));
        let (first, last) = (first.values() as u64, last.values() as u64);
        let blocks = |block: u64| block.checked_mul(size.into());
        match collective {
            Collective::AllGather | Collective::Broadcast => Some(last),
            Collective::Gather if !(in_place && is_root) => blocks(first),
            Collective::Scatter if !(is_root && in_place) => {
                if is_root && matches!(self, Self::Input(_)) {
                    Some(first)
                } else {
                    blocks(last)
                }
            }
            _ => Some(first),
        }
    }

    /// Return the memory as the library takes it.
    fn raw(&self) -> RawBuffers {
        match self {
            Self::None => RawBuffers::InPlace { bytes: null_mut(), len: 0 },
            Self::InPlace(array) => RawBuffers::InPlace { bytes: array.base(), len: array.len_bytes() },
            Self::Input(array) => RawBuffers::Separate {
                input: array.base(),
                input_len: array.len_bytes(),
                output: null_mut(),
                output_len: 0,
            },
            Self::Separate(input, output) => RawBuffers::Separate {
                input: input.base(),
                input_len: input.len_bytes(),
                output: output.base(),
                output_len: output.len_bytes(),
            },
        }
    }

    fn into_vec(self) -> Vec<Array> {
        match self {
            Self::None => Vec::new(),
            Self::InPlace(array) | Self::Input(array) => vec![array],
            Self::Separate(input, output) => vec![input, output],
        }
    }
}

impl Communicator {
    fn describe(&self, (collective, root, op): (Collective, u32, Option<&str>), arrays: &Arrays) -> PyResult<OpDesc> {
        let op = arrays.kind().map_or(Ok(None), |kind| operator(kind, op))?;
        let dtype = arrays.kind().map(ElementKind::dtype).filter(|_| collective != Collective::Barrier);
        let is_root = self.0.rank() == root;
        let values = arrays.count(collective, is_root, self.0.size());
        let values = values.ok_or_else(|| PyOverflowError::new_err("the blocks of all ranks are too long together"))?;
        let each = if op.is_some_and(|op| op.is_located()) { 2 } else { 1 };
        if !values.is_multiple_of(each) {
            return Err(PyValueError::new_err(format!("{values} values are not pairs of a value and an index")));
        }
        Ok(OpDesc { collective, dtype, op, root: Rank(root), count: values / each })
    }

    /// Start an operation on blocks of any length; counts are of the arrays' elements.
    fn start_v(
        &self,
        py: Python<'_>,
        (collective, op): (Collective, Option<&str>),
        arrays: Arrays,
        counts: Counts,
    ) -> PyResult<Request> {
        let arrays = arrays.in_place(collective, self.0.rank(), self.0.size())?;
        let kind = arrays.kind().unwrap_or(ElementKind::Bool);
        let values = |counts: Vec<usize>| -> PyResult<Vec<usize>> {
            let scaled = counts.into_iter().map(|count| count.checked_mul(kind.values_each()));
            scaled.collect::<Option<_>>().ok_or_else(|| PyOverflowError::new_err("the blocks are too long"))
        };
        let counts = match counts {
            Counts::Exchange { send, recv } => Counts::Exchange { send: values(send)?, recv: values(recv)? },
            Counts::Blocks(counts) => Counts::Blocks(values(counts)?),
            other => other,
        };
        let desc = OpDesc { collective, dtype: Some(kind.dtype()), op: operator(kind, op)?, root: Rank(0), count: 0 };
        let raw = Memory(arrays.raw());
        Request::start(py, &self.0, arrays.into_vec(), move |comm, keep| {
            let (raw, options) = (raw.into_inner(), CallOptions::default());
            // SAFETY: the arrays are kept until the operation has ended, and their borrows say who uses them.
            unsafe { comm.start_raw_v(&desc, counts, raw, keep, &options) }
        })
    }
}

#[pymethods]
impl Communicator {
    /// This rank.
    #[getter]
    fn rank(&self) -> u32 {
        self.0.rank()
    }

    /// The number of ranks.
    #[getter]
    fn size(&self) -> u32 {
        self.0.size()
    }

    /// The communicator's name.
    #[getter]
    fn name(&self) -> &str {
        self.0.name()
    }

    /// Start a collective from an input to an output, or in place on an output.
    #[pyo3(signature = (collective, input, output, op=None, root=0, options=None))]
    #[expect(clippy::too_many_arguments, reason = "they describe one operation; the package calls it")]
    fn start(
        &self,
        py: Python<'_>,
        collective: &str,
        input: Option<&Bound<'_, PyAny>>,
        output: Option<&Bound<'_, PyAny>>,
        op: Option<&str>,
        root: u32,
        options: Option<&Bound<'_, PyDict>>,
    ) -> PyResult<Request> {
        let collective = names::collective(collective)?;
        let arrays = Arrays::borrow(input, output)?.in_place(collective, self.0.rank(), self.0.size())?;
        if matches!(arrays, Arrays::None) && collective != Collective::Barrier {
            return Err(PyTypeError::new_err(format!("{collective} without an array")));
        }
        let desc = self.describe((collective, root, op), &arrays)?;
        let options = call_options(options)?;
        let raw = Memory(arrays.raw());
        Request::start(py, &self.0, arrays.into_vec(), move |comm, keep| {
            // SAFETY: `keep` holds the arrays, and by contract nobody uses them until the operation has ended.
            unsafe { comm.start_raw(&desc, raw.into_inner(), keep, &options) }
        })
    }

    /// Start an all-to-all of blocks of any length.
    fn start_all_to_all_v(
        &self,
        py: Python<'_>,
        input: &Bound<'_, PyAny>,
        send_counts: Vec<usize>,
        output: &Bound<'_, PyAny>,
        recv_counts: Vec<usize>,
    ) -> PyResult<Request> {
        let arrays = Arrays::borrow(Some(input), Some(output))?;
        let counts = Counts::Exchange { send: send_counts, recv: recv_counts };
        self.start_v(py, (Collective::AllToAllV, None), arrays, counts)
    }

    /// Start an all-gather, or with an operator a reduce-scatter, of blocks of any length.
    #[pyo3(signature = (input, output, counts, op=None))]
    fn start_blocks_v(
        &self,
        py: Python<'_>,
        input: &Bound<'_, PyAny>,
        output: &Bound<'_, PyAny>,
        counts: Vec<usize>,
        op: Option<&str>,
    ) -> PyResult<Request> {
        let collective = if op.is_some() { Collective::ReduceScatter } else { Collective::AllGather };
        self.start_v(py, (collective, op), Arrays::borrow(Some(input), Some(output))?, Counts::Blocks(counts))
    }

    /// Start to send an array to a rank.
    fn start_send(&self, py: Python<'_>, array: &Bound<'_, PyAny>, to: u32, tag: u32) -> PyResult<Request> {
        let array = Array::read(array)?;
        let sent = Memory((array.base(), array.len_bytes()));
        Request::start(py, &self.0, vec![array], move |comm, keep| {
            let (base, len) = sent.into_inner();
            // SAFETY: as above; what is sent is only read.
            unsafe { comm.start_send_raw(to, tag, (base, len), keep) }
        })
    }

    /// Start to receive an array from a rank, or from whichever sends first.
    #[pyo3(signature = (array, source, tag))]
    fn start_receive(
        &self,
        py: Python<'_>,
        array: &Bound<'_, PyAny>,
        source: Option<u32>,
        tag: u32,
    ) -> PyResult<Request> {
        let array = Array::write(array)?;
        let received = Memory((array.base(), array.len_bytes()));
        // SAFETY: as above.
        Request::start(py, &self.0, vec![array], move |comm, keep| unsafe {
            match source {
                Some(source) => comm.start_receive_raw(source, tag, received.into_inner(), keep),
                None => comm.start_receive_any_raw(tag, received.into_inner(), keep),
            }
        })
    }

    /// Split the communicator: ranks with the same color form a new one. Returns `None` without a color.
    #[pyo3(signature = (color, key))]
    fn split(&self, py: Python<'_>, color: Option<u32>, key: i64) -> PyResult<Option<Self>> {
        let split =
            self.0.call(py, move |comm| comm.split(color, key).map_err(|error| Failure::Split(Arc::new(error))))?;
        split.map(|comm| Ok(Self(Arc::new(SharedCommunicator::adopt(comm)?)))).transpose()
    }

    /// Make a new communicator of the surviving ranks.
    fn shrink(&self, py: Python<'_>) -> PyResult<Self> {
        let shrunk = self.0.call(py, |comm| comm.shrink().map_err(|error| Failure::Shrink(Arc::new(error))))?;
        Ok(Self(Arc::new(SharedCommunicator::adopt(shrunk)?)))
    }

    /// Leave the job after what was started before. Returns whether other ranks may still need this one.
    #[pyo3(signature = (timeout))]
    fn leave(&self, py: Python<'_>, timeout: f64) -> PyResult<bool> {
        let limit = seconds(timeout)?;
        let left = self.0.leave(py, move |comm| comm.leave_within(limit) == Departure::Clean)?;
        // Without a communicator, it has left already.
        Ok(left.unwrap_or(true))
    }

    /// End the communicator, also while operations run: they fail, and other ranks see this one as lost.
    fn cancel(&self) {
        self.0.cancel();
    }

    /// Whether this process was forked from the one that joined.
    #[getter]
    fn is_forked(&self) -> bool {
        self.0.is_forked()
    }

    /// Allocate registered, zeroed memory.
    fn alloc(&self, py: Python<'_>, len_bytes: usize) -> PyResult<memory::Memory> {
        let buffer = self.0.call(py, move |comm| Ok(comm.alloc::<u64>(len_bytes.div_ceil(8))?))?;
        Ok(memory::Memory::new(buffer, len_bytes))
    }

    /// Explain which path an operation would take: the text, the chosen path, and each candidate's cost in seconds or
    /// the reason why it is ruled out.
    #[pyo3(signature = (collective, dtype, op, root, count, algo))]
    #[expect(clippy::too_many_arguments, reason = "they describe one operation; the package calls it")]
    #[expect(clippy::type_complexity, reason = "a tuple for Python")]
    fn explain(
        &self,
        py: Python<'_>,
        collective: &str,
        dtype: Option<&str>,
        op: Option<&str>,
        root: u32,
        count: u64,
        algo: &str,
    ) -> PyResult<(String, Option<&'static str>, Vec<(&'static str, Option<f64>, Option<String>)>)> {
        let algo: Algo =
            algo.parse().map_err(|error: sumac::select::UnknownAlgo| PyValueError::new_err(error.to_string()))?;
        let collective = names::collective(collective)?;
        let dtype = dtype.map(names::dtype).transpose()?;
        let op = op.map(names::operator).transpose()?;
        let desc = OpDesc { collective, dtype, op, root: Rank(root), count };
        let explanation = self.0.call(py, move |comm| Ok(comm.explain(&desc, algo)))?;
        let candidates = explanation.candidates.iter().map(|candidate| {
            let why = candidate.cost_s.as_ref().err().map(ToString::to_string);
            (candidate.path.name(), candidate.cost_s.as_ref().ok().copied(), why)
        });
        Ok((explanation.to_string(), explanation.chosen.map(|path| path.name()), candidates.collect()))
    }
}

/// Pointers to memory that an operation keeps, on their way to the library.
struct Memory<T>(T);

// SAFETY: the memory may be used from any thread while its arrays are held.
unsafe impl<T> Send for Memory<T> {}

impl<T> Memory<T> {
    /// A method, so that closures capture the whole.
    fn into_inner(self) -> T {
        self.0
    }
}

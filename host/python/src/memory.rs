//! Registered memory, exported by the buffer protocol: a numpy array on it, and each view of that, keeps it.

use pyo3::exceptions::PyBufferError;
use pyo3::ffi;
use pyo3::prelude::*;
use std::ffi::c_int;
use sumac::Buffer;

/// Registered, zeroed memory: where this rank shares memory with its leaf device, operations on it are zero-copy.
///
/// It lives as long as this object, which each view of it holds, also after the communicator.
#[pyclass(frozen, module = "sumac")]
pub(crate) struct Memory {
    /// Whole words, so that elements of every type are aligned. Never read or written through this: views do.
    buffer: Buffer<u64>,
    base: usize,
    len_bytes: usize,
}

impl Memory {
    pub(crate) fn new(mut buffer: Buffer<u64>, len_bytes: usize) -> Self {
        let base = buffer.as_mut_ptr() as usize;
        Self { buffer, base, len_bytes }
    }
}

#[pymethods]
impl Memory {
    /// Whether a device reaches the memory.
    #[getter]
    fn is_registered(&self) -> bool {
        self.buffer.is_registered()
    }

    fn __len__(&self) -> usize {
        self.len_bytes
    }

    /// # Safety
    /// Called by Python only, with a view to fill.
    unsafe fn __getbuffer__(slf: Bound<'_, Self>, view: *mut ffi::Py_buffer, flags: c_int) -> PyResult<()> {
        let (base, len) = (slf.get().base, slf.get().len_bytes);
        let len = isize::try_from(len).map_err(|_| PyBufferError::new_err("the memory is too large for a view"))?;
        // SAFETY: Python passes a view to fill. The view holds this object, which keeps `len` bytes at `base`; they may
        // be written, as views of the same memory do in Python.
        match unsafe { ffi::PyBuffer_FillInfo(view, slf.as_ptr(), base as *mut _, len, 0, flags) } {
            0 => Ok(()),
            _ => Err(PyErr::fetch(slf.py())),
        }
    }
}

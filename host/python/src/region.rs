//! Memory by its address, for code of the package that knows an array's memory without a protocol: `sumac.torch`, where
//! the buffer protocol and DLPack would cost more than the call.

use crate::array::Array;
use crate::names::ElementKind;
use pyo3::prelude::*;

/// Memory by its address. Private to the package: programs pass arrays.
///
/// Without a constructor, so that no value of a program becomes one by accident.
#[pyclass(frozen, module = "sumac._sumac")]
pub(crate) struct Region {
    memory: Array,
    dtype: String,
}

impl Region {
    /// Return the memory.
    pub(crate) const fn memory(&self) -> &Array {
        &self.memory
    }
}

#[pymethods]
impl Region {
    /// **Unsafe**: operations read and write `len_bytes` bytes at `address` without a further check. `owner` must keep
    /// them there for as long as it lives, in host memory, writable where the region is an output.
    #[staticmethod]
    fn _at(address: usize, len_bytes: usize, dtype: String, owner: Bound<'_, PyAny>) -> PyResult<Self> {
        let kind = ElementKind::from_name(&dtype)?;
        // SAFETY: what the caller of a method that is documented as unsafe promises.
        let memory = unsafe { Array::at(address, len_bytes, kind, owner)? };
        Ok(Self { memory, dtype })
    }

    /// The name of the elements' type.
    #[getter]
    fn dtype(&self) -> &str {
        &self.dtype
    }
}

//! The memory of Python arrays, borrowed without a copy: by the buffer protocol or by DLPack.

use crate::dlpack;
use crate::names::ElementKind;
use crate::region::Region;
use pyo3::buffer::PyUntypedBuffer;
use pyo3::exceptions::{PyBufferError, PyTypeError, PyValueError};
use pyo3::ffi;
use pyo3::prelude::*;
use std::ptr::NonNull;
use std::sync::Arc;
use sumac::Dtype;

/// What keeps memory where it is. Dropping a view waits for the GIL.
#[expect(dead_code, reason = "held for their drop")]
pub(crate) enum Owner {
    View(PyUntypedBuffer),
    Object(Py<PyAny>),
}

/// The memory of an array. It stays as long as this or a clone of it.
#[derive(Clone)]
pub(crate) struct Array {
    base: NonNull<u8>,
    len_bytes: usize,
    kind: ElementKind,
    owner: Arc<Owner>,
}

// SAFETY: the memory may be used from any thread while `owner` holds it, and `owner` may be dropped on any.
unsafe impl Send for Array {}
// SAFETY: nothing is read or written through a shared reference.
unsafe impl Sync for Array {}

impl Array {
    /// Borrow an array to read it.
    pub(crate) fn read(object: &Bound<'_, PyAny>) -> PyResult<Self> {
        Self::borrow(object, false)
    }

    /// Borrow an array to write to it.
    pub(crate) fn write(object: &Bound<'_, PyAny>) -> PyResult<Self> {
        Self::borrow(object, true)
    }

    /// Return the memory that a caller describes.
    ///
    /// # Safety
    /// `owner` keeps `len_bytes` bytes at `address` readable, and writable where they are an output.
    pub(crate) unsafe fn at(
        address: usize,
        len_bytes: usize,
        kind: ElementKind,
        owner: Bound<'_, PyAny>,
    ) -> PyResult<Self> {
        if isize::try_from(len_bytes).is_err() || address.checked_add(len_bytes).is_none() {
            return Err(PyValueError::new_err(format!("{len_bytes} bytes at address {address:#x} are not in memory")));
        }
        if !len_bytes.is_multiple_of(kind.dtype().size_bytes() * kind.values_each()) {
            return Err(PyValueError::new_err(format!("{len_bytes} bytes are no whole number of elements")));
        }
        Self::new(address as *mut u8, len_bytes, kind, Owner::Object(owner.unbind()))
    }

    fn new(base: *mut u8, len_bytes: usize, kind: ElementKind, owner: Owner) -> PyResult<Self> {
        let base = match (NonNull::new(base), len_bytes) {
            (Some(base), _) => base,
            (None, 0) => NonNull::dangling(),
            (None, _) => return Err(PyValueError::new_err(format!("{len_bytes} bytes at address 0"))),
        };
        Ok(Self { base, len_bytes, kind, owner: Arc::new(owner) })
    }

    fn borrow(object: &Bound<'_, PyAny>, is_output: bool) -> PyResult<Self> {
        let py = object.py();
        if let Ok(region) = object.cast::<Region>() {
            return Ok(region.get().memory().clone());
        }
        // SAFETY: the object is alive, and this thread is attached.
        let has_buffer = unsafe { ffi::PyObject_CheckBuffer(object.as_ptr()) } == 1;
        if has_buffer {
            match PyUntypedBuffer::get(object) {
                Ok(view) => return Self::of_view(object, view, None, is_output),
                // Arrays of types that the protocol has no letter for, ml_dtypes' narrow floats: jax shares them by
                // DLPack; numpy does not, but has views of their bits.
                Err(error) => {
                    let has_dlpack = object.hasattr("__dlpack__")?;
                    let narrow = if has_dlpack && dlpack::describe(object).is_ok() { None } else { narrow(object)? };
                    if let Some((dtype, bits)) = narrow {
                        let view = PyUntypedBuffer::get(&bits)?;
                        return Self::of_view(object, view, Some(ElementKind::Plain(dtype)), is_output);
                    }
                    if !has_dlpack {
                        return Err(as_type_error(py, error));
                    }
                }
            }
        }
        if !object.hasattr("__dlpack__")? {
            return Err(PyTypeError::new_err(format!(
                "{} is no array: pass an object that has the buffer protocol or __dlpack__, such as one of numpy, torch \
                 or array.array",
                type_name(object)
            )));
        }
        let found = dlpack::describe(object).map_err(|error| as_type_error(py, error))?;
        // Where the capsule cannot say it, an array that has buffers, and gave none, is not writable: one of jax.
        let is_read_only = found.is_read_only.unwrap_or(has_buffer);
        check_layout(object, found.is_contiguous, is_output && is_read_only)?;
        Self::new(found.base, found.len_bytes, found.kind, Owner::Object(found.capsule))
    }

    fn of_view(
        object: &Bound<'_, PyAny>,
        view: PyUntypedBuffer,
        kind: Option<ElementKind>,
        is_output: bool,
    ) -> PyResult<Self> {
        check_layout(object, view.is_c_contiguous(), is_output && view.readonly())?;
        let kind = match kind {
            Some(kind) => kind,
            None => kind_of_format(&view.format().to_string_lossy(), view.item_size())?,
        };
        let (base, len_bytes) = (view.buf_ptr().cast(), view.len_bytes());
        Self::new(base, len_bytes, kind, Owner::View(view))
    }

    /// Return what the elements are.
    pub(crate) const fn kind(&self) -> ElementKind {
        self.kind
    }

    /// Return the number of values of the described type: two for a complex number.
    pub(crate) const fn values(&self) -> usize {
        self.len_bytes / self.kind.dtype().size_bytes()
    }

    /// Return what keeps the memory, if nobody else holds it.
    pub(crate) fn into_owner(self) -> Option<Owner> {
        Arc::into_inner(self.owner)
    }

    /// Return the first byte.
    pub(crate) const fn base(&self) -> *mut u8 {
        self.base.as_ptr()
    }

    /// Return whether both have bytes in common.
    pub(crate) fn overlaps(&self, other: &Self) -> bool {
        let (a, b) = (self.base.as_ptr() as usize, other.base.as_ptr() as usize);
        a < b + other.len_bytes && b < a + self.len_bytes && self.len_bytes > 0 && other.len_bytes > 0
    }

    /// Return the first byte's address.
    pub(crate) fn address(&self) -> usize {
        self.base.as_ptr() as usize
    }

    /// Return the length in bytes.
    pub(crate) const fn len_bytes(&self) -> usize {
        self.len_bytes
    }
}

/// Return a narrow float's type and the array's bits, if this is an array of one, as ml_dtypes has them.
fn narrow<'py>(object: &Bound<'py, PyAny>) -> PyResult<Option<(Dtype, Bound<'py, PyAny>)>> {
    let name = object.getattr("dtype").and_then(|dtype| dtype.getattr("name"));
    let Ok(name) = name.and_then(|name| name.extract::<String>()) else { return Ok(None) };
    let (dtype, bits) = match name.as_str() {
        "bfloat16" => (Dtype::Bf16, "uint16"),
        "float8_e4m3fn" => (Dtype::E4m3, "uint8"),
        "float8_e5m2" => (Dtype::E5m2, "uint8"),
        _ => return Ok(None),
    };
    if !object.hasattr("view")? {
        return Ok(None);
    }
    let mut bits = object.call_method1("view", (bits,))?;
    // A view of an array without dimensions has no shape.
    if bits.getattr("ndim")?.extract::<usize>()? == 0 {
        bits = bits.call_method1("reshape", (1,))?;
    }
    Ok(Some((dtype, bits)))
}

fn check_layout(object: &Bound<'_, PyAny>, is_contiguous: bool, is_forbidden: bool) -> PyResult<()> {
    let name = type_name(object);
    if !is_contiguous {
        return Err(PyTypeError::new_err(format!(
            "this {name} is strided, and operations take memory without gaps, in C order: pass \
             numpy.ascontiguousarray(x) or x.contiguous(), and copy a result back"
        )));
    }
    if is_forbidden {
        return Err(PyTypeError::new_err(format!(
            "this {name} is read-only, and the operation writes its result to it: pass a writable copy, as \
             numpy.array(x), or a separate output"
        )));
    }
    Ok(())
}

fn type_name(object: &Bound<'_, PyAny>) -> String {
    object.get_type().name().map_or_else(|_| "object".into(), |name| name.to_string())
}

/// Report an array that cannot be borrowed as the type error that it is.
fn as_type_error(py: Python<'_>, error: PyErr) -> PyErr {
    let is_export = error.is_instance_of::<PyBufferError>(py) || error.is_instance_of::<PyValueError>(py);
    if !is_export {
        return error;
    }
    let wrapped = PyTypeError::new_err(format!("the array cannot be shared: {}", error.value(py)));
    wrapped.set_cause(py, Some(error));
    wrapped
}

/// Read the format of the buffer protocol (the module `struct`'s letters).
fn kind_of_format(format: &str, item_size: usize) -> PyResult<ElementKind> {
    let letter = format.trim_start_matches(['@', '=', '<']);
    let refused = || {
        let choices = crate::names::dtypes().join(", ");
        PyTypeError::new_err(format!("elements of format {format:?}; choose from {choices}, bool and complex"))
    };
    let integer = |signed: Dtype, unsigned, is_signed| if is_signed { signed } else { unsigned };
    let dtype = match (letter, item_size) {
        ("?", 1) => return Ok(ElementKind::Bool),
        ("Zf", 8) => return Ok(ElementKind::Complex(Dtype::F32)),
        ("Zd", 16) => return Ok(ElementKind::Complex(Dtype::F64)),
        ("e", 2) => Dtype::F16,
        ("f", 4) => Dtype::F32,
        ("d", 8) => Dtype::F64,
        ("b" | "B" | "h" | "H" | "i" | "I" | "l" | "L" | "q" | "Q" | "n" | "N", size) => {
            let is_signed = letter.chars().all(|letter| letter.is_ascii_lowercase());
            match size {
                1 => integer(Dtype::I8, Dtype::U8, is_signed),
                2 => integer(Dtype::I16, Dtype::U16, is_signed),
                4 => integer(Dtype::I32, Dtype::U32, is_signed),
                8 => integer(Dtype::I64, Dtype::U64, is_signed),
                _ => return Err(refused()),
            }
        }
        _ => return Err(refused()),
    };
    Ok(ElementKind::Plain(dtype))
}

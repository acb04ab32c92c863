//! DLPack's structures, as its header `dlpack.h` (version 1.1) lays them out, and how a producer's capsule is read.
//!
//! A capsule that is not consumed owns its tensor: its destructor calls the producer's deleter. So keeping the capsule
//! keeps the memory, and nothing of it is ever renamed or freed here.

use crate::names::ElementKind;
use pyo3::exceptions::{PyBufferError, PyTypeError};
use pyo3::ffi::c_str;
use pyo3::prelude::*;
use pyo3::types::{PyCapsule, PyCapsuleMethods, PyDict};
use std::ffi::c_void;
use std::slice;
use sumac::Dtype;

/// `kDLCPU`, and memory of the host that a GPU reaches as well: `kDLCUDAHost`, `kDLROCMHost`.
const HOST_DEVICES: [i32; 3] = [1, 3, 11];

/// `DLPACK_FLAG_BITMASK_READ_ONLY`.
const READ_ONLY: u64 = 1;

#[repr(C)]
struct Device {
    kind: i32,
    id: i32,
}

#[repr(C)]
struct DataType {
    code: u8,
    bits: u8,
    lanes: u16,
}

#[repr(C)]
struct Tensor {
    data: *mut c_void,
    device: Device,
    ndim: i32,
    dtype: DataType,
    shape: *const i64,
    strides: *const i64,
    byte_offset: u64,
}

#[repr(C)]
struct VersionedTensor {
    major: u32,
    minor: u32,
    manager: *mut c_void,
    deleter: *mut c_void,
    flags: u64,
    tensor: Tensor,
}

/// What a capsule describes.
pub(crate) struct Described {
    /// The first byte.
    pub(crate) base: *mut u8,
    /// The length in bytes.
    pub(crate) len_bytes: usize,
    /// The elements.
    pub(crate) kind: ElementKind,
    /// Whether the producer forbids writing; `None` before version 1 of the protocol, which could not say so.
    pub(crate) is_read_only: Option<bool>,
    /// Whether the elements lie behind each other in C order.
    pub(crate) is_contiguous: bool,
    /// What keeps the memory.
    pub(crate) capsule: Py<PyAny>,
}

/// Ask an object that implements DLPack for its memory.
pub(crate) fn describe(array: &Bound<'_, PyAny>) -> PyResult<Described> {
    let py = array.py();
    let (kind, id): (i32, i32) = array.call_method0("__dlpack_device__")?.extract()?;
    if !HOST_DEVICES.contains(&kind) {
        let name = device_name(kind);
        return Err(PyTypeError::new_err(format!(
            "the array is on a device ({name} {id}), and this call takes memory of the host: copy it there first, with \
             .cpu() in torch, .get() in cupy, or jax.device_get()"
        )));
    }
    let versioned = PyDict::new(py);
    versioned.set_item("max_version", (1, 1))?;
    let capsule = match array.call_method("__dlpack__", (), Some(&versioned)) {
        // Before version 1 of the protocol there was no such argument.
        Err(error) if error.is_instance_of::<PyTypeError>(py) => array.call_method0("__dlpack__")?,
        other => other?,
    };
    read(capsule.cast::<PyCapsule>()?)
}

fn read(capsule: &Bound<'_, PyCapsule>) -> PyResult<Described> {
    let owner = capsule.clone().into_any().unbind();
    if capsule.is_valid_checked(Some(c_str!("dltensor_versioned"))) {
        let pointer = capsule.pointer_checked(Some(c_str!("dltensor_versioned")))?.cast::<VersionedTensor>();
        // SAFETY: by its name, the capsule points to this structure, and it is alive. Its head is the same in every
        // version; the rest is read only after the version is known.
        let versioned = unsafe { pointer.as_ref() };
        if versioned.major != 1 {
            return Err(PyBufferError::new_err(format!("DLPack version {}; this reads version 1", versioned.major)));
        }
        return view(&versioned.tensor, Some(versioned.flags & READ_ONLY != 0), owner);
    }
    let pointer = capsule.pointer_checked(Some(c_str!("dltensor")))?.cast::<Tensor>();
    // SAFETY: by its name, the capsule points to a live `DLManagedTensor`, which begins with this structure.
    view(unsafe { pointer.as_ref() }, None, owner)
}

fn view(tensor: &Tensor, is_read_only: Option<bool>, capsule: Py<PyAny>) -> PyResult<Described> {
    let kind = kind(&tensor.dtype)?;
    let ndim = usize::try_from(tensor.ndim).unwrap_or(0);
    // SAFETY: the producer's arrays have `ndim` entries; strides may be absent, and both may where there are none.
    let (shape, strides) = unsafe { (entries(tensor.shape, ndim), entries(tensor.strides, ndim)) };
    let len = shape.iter().try_fold(usize::from(tensor.dtype.bits / 8), |len, &dimension| {
        usize::try_from(dimension).ok().and_then(|dimension| len.checked_mul(dimension))
    });
    let len_bytes = len.filter(|&len| isize::try_from(len).is_ok());
    let len_bytes = len_bytes.ok_or_else(|| PyBufferError::new_err(format!("DLPack shape {shape:?}")))?;
    let offset = usize::try_from(tensor.byte_offset).map_err(|_| PyBufferError::new_err("DLPack offset"))?;
    Ok(Described {
        base: tensor.data.cast::<u8>().wrapping_add(offset),
        len_bytes,
        kind,
        is_read_only,
        is_contiguous: len_bytes == 0 || is_contiguous(shape, strides),
        capsule,
    })
}

/// # Safety
/// A pointer that is not null must point to `len` entries, which stay as they are.
unsafe fn entries<'a>(pointer: *const i64, len: usize) -> &'a [i64] {
    // SAFETY: the caller promises it.
    if pointer.is_null() { &[] } else { unsafe { slice::from_raw_parts(pointer, len) } }
}

fn is_contiguous(shape: &[i64], strides: &[i64]) -> bool {
    let mut expected = 1;
    // No strides mean C order.
    strides.is_empty()
        || shape.iter().zip(strides).rev().all(|(&dimension, &stride)| {
            let fits = dimension == 1 || stride == expected;
            expected *= dimension;
            fits
        })
}

fn kind(dtype: &DataType) -> PyResult<ElementKind> {
    let plain = |dtype| Ok(ElementKind::Plain(dtype));
    match (dtype.code, dtype.bits, dtype.lanes) {
        (0, 8, 1) => plain(Dtype::I8),
        (0, 16, 1) => plain(Dtype::I16),
        (0, 32, 1) => plain(Dtype::I32),
        (0, 64, 1) => plain(Dtype::I64),
        (1, 8, 1) => plain(Dtype::U8),
        (1, 16, 1) => plain(Dtype::U16),
        (1, 32, 1) => plain(Dtype::U32),
        (1, 64, 1) => plain(Dtype::U64),
        (2, 16, 1) => plain(Dtype::F16),
        (2, 32, 1) => plain(Dtype::F32),
        (2, 64, 1) => plain(Dtype::F64),
        (4, 16, 1) => plain(Dtype::Bf16),
        (5, 64, 1) => Ok(ElementKind::Complex(Dtype::F32)),
        (5, 128, 1) => Ok(ElementKind::Complex(Dtype::F64)),
        (6, 8, 1) => Ok(ElementKind::Bool),
        (10, 8, 1) => plain(Dtype::E4m3),
        (12, 8, 1) => plain(Dtype::E5m2),
        (code, bits, lanes) => Err(PyTypeError::new_err(format!(
            "elements of DLPack type {code} with {bits} bits and {lanes} lane(s); choose from {}",
            crate::names::dtypes().join(", ")
        ))),
    }
}

const fn device_name(kind: i32) -> &'static str {
    match kind {
        2 => "CUDA",
        4 => "OpenCL",
        7 => "Vulkan",
        8 => "Metal",
        10 => "ROCm",
        13 => "CUDA managed memory",
        14 => "oneAPI",
        _ => "of another kind",
    }
}

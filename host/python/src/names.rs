//! Names of element types, operators and collectives, as Python programs write them.

use pyo3::exceptions::{PyTypeError, PyValueError};
use pyo3::prelude::*;
use sumac::{Collective, Dtype, ReduceOp};

/// Return the names of all element types.
pub(crate) fn dtypes() -> Vec<&'static str> {
    Dtype::ALL.iter().map(|dtype| dtype.name()).collect()
}

/// Return the names of all operators.
pub(crate) fn operators() -> Vec<&'static str> {
    ReduceOp::ALL.iter().map(|op| op.name()).collect()
}

/// Parse an operator's name.
pub(crate) fn operator(name: &str) -> PyResult<ReduceOp> {
    ReduceOp::from_name(name).ok_or_else(|| {
        PyValueError::new_err(format!("{name:?} is no operator; choose from {}", operators().join(", ")))
    })
}

/// Parse a collective's name.
pub(crate) fn collective(name: &str) -> PyResult<Collective> {
    Collective::from_name(name).ok_or_else(|| {
        let known: Vec<_> = Collective::ALL.iter().map(|collective| collective.name()).collect();
        PyValueError::new_err(format!("{name:?} is no collective; choose from {}", known.join(", ")))
    })
}

/// Parse an element type's name.
pub(crate) fn dtype(name: &str) -> PyResult<Dtype> {
    Dtype::from_name(name).ok_or_else(|| {
        PyValueError::new_err(format!("{name:?} is no element type; choose from {}", dtypes().join(", ")))
    })
}

/// What the elements of an array are to Python.
///
/// Booleans are bytes of 0 and 1, and complex numbers pairs of floats: operations on them are those of these types,
/// where that gives the same result.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum ElementKind {
    /// A type that the library has.
    Plain(Dtype),
    /// A byte that is 0 or 1.
    Bool,
    /// A pair of these floats.
    Complex(Dtype),
}

impl ElementKind {
    /// Return the type that operations are described with.
    pub(crate) const fn dtype(self) -> Dtype {
        match self {
            Self::Plain(dtype) | Self::Complex(dtype) => dtype,
            Self::Bool => Dtype::U8,
        }
    }

    /// Return how many values of that type an element is.
    pub(crate) const fn values_each(self) -> usize {
        if matches!(self, Self::Complex(_)) { 2 } else { 1 }
    }

    /// Return the kind of this name: that of a [`Dtype`], `bool`, `complex64` or `complex128`.
    pub(crate) fn from_name(name: &str) -> PyResult<Self> {
        match name {
            "bool" => Ok(Self::Bool),
            "complex64" => Ok(Self::Complex(Dtype::F32)),
            "complex128" => Ok(Self::Complex(Dtype::F64)),
            _ => dtype(name).map(Self::Plain),
        }
    }

    /// Check that an operator on the type that stands for these elements gives what it gives on these elements.
    pub(crate) fn check(self, op: ReduceOp) -> PyResult<()> {
        let refusal = match self {
            Self::Plain(_) => return Ok(()),
            Self::Bool => match op {
                ReduceOp::Sum
                | ReduceOp::Prod
                | ReduceOp::Avg
                | ReduceOp::PremulSum
                | ReduceOp::MinLoc
                | ReduceOp::MaxLoc => "booleans have lor, land, lxor, max and min; for counts use an integer type",
                _ => return Ok(()),
            },
            Self::Complex(_) => match op {
                ReduceOp::Sum | ReduceOp::Avg | ReduceOp::PremulSum => return Ok(()),
                _ => "complex numbers have sum, avg and premul_sum",
            },
        };
        Err(PyTypeError::new_err(format!("{op}: {refusal}")))
    }
}

//! What completed operations report.

use pyo3::prelude::*;

/// How a completed operation was carried out.
#[pyclass(frozen, module = "sumac")]
pub(crate) struct Outcome(pub(crate) sumac::Outcome);

#[pymethods]
impl Outcome {
    /// The path taken: `tree`, or a host collective.
    #[getter]
    fn path(&self) -> &'static str {
        self.0.path.name()
    }

    /// How many trees the operation was spread over.
    #[getter]
    fn trees(&self) -> u32 {
        self.0.trees
    }

    /// How the payload moved to the leaf device; `None` for host collectives.
    #[getter]
    fn transfer(&self) -> Option<&'static str> {
        self.0.transfer.map(|transfer| transfer.name())
    }

    /// Why the operation did not use the tree.
    #[getter]
    fn fallback(&self) -> Option<&str> {
        self.0.fallback.as_deref()
    }

    /// Bytes that this rank sent.
    #[getter]
    fn wire_bytes(&self) -> u64 {
        self.0.wire_bytes
    }

    /// Contributions that this rank sent again.
    #[getter]
    fn retransmits(&self) -> u64 {
        self.0.retransmits
    }

    /// Whether the operation was interrupted by a failure and recovered.
    #[getter]
    fn recovered(&self) -> bool {
        self.0.recovered
    }

    /// The rank that entered last, and how late in seconds.
    #[getter]
    fn slowest(&self) -> Option<(u32, f64)> {
        self.0.slowest.as_ref().map(|slowest| (slowest.rank.0, f64::from(slowest.late_us) / 1e6))
    }

    /// The ranks that did not contribute.
    #[getter]
    fn missing(&self) -> Vec<u32> {
        self.0.missing.iter().map(|rank| rank.0).collect()
    }

    fn __repr__(&self) -> String {
        let fallback = self.0.fallback.as_ref().map_or_else(String::new, |why| format!(", fallback={why:?}"));
        let recovered = if self.0.recovered { ", recovered=True" } else { "" };
        format!("Outcome(path={:?}, wire_bytes={}{fallback}{recovered})", self.0.path.name(), self.0.wire_bytes)
    }
}

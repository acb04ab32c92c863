//! The extension module `sumac._sumac`: communicators, memory and errors of the crate `sumac` as Python objects. The
//! package `sumac` (pure Python, beside this crate) puts both dialects on top, this library's own and mpi4py's.
//!
//! Invariants:
//! - **No wait holds the GIL.** Whoever waits does so without it, and looks for signals every 50 ms, so that Ctrl-C
//!   ends each wait.
//! - **The library's progress thread never waits for the GIL.** What has to be done under it at the end of an
//!   operation, callbacks and the release of arrays, goes to another thread. No lock of the library is taken under it.
//! - **Memory of an operation outlives it.** An operation holds what it was given (a buffer view or a DLPack capsule)
//!   until it has ended, whatever became of the Python objects that started it.
//! - A communicator belongs to the process that joined: in a forked child every call is an error, not a hang.

mod array;
mod cluster;
mod communicator;
mod config;
mod dlpack;
mod errors;
mod memory;
mod names;
mod outcome;
mod region;
mod request;
mod shared;
mod wait;

use pyo3::prelude::*;

/// Communicators, memory and errors of the crate `sumac`.
#[pymodule]
fn _sumac(module: &Bound<'_, PyModule>) -> PyResult<()> {
    module.add("__version__", env!("CARGO_PKG_VERSION"))?;
    module.add("DTYPES", names::dtypes())?;
    module.add("OPERATORS", names::operators())?;
    module.add_class::<communicator::Communicator>()?;
    module.add_class::<request::Request>()?;
    module.add_class::<outcome::Outcome>()?;
    module.add_class::<memory::Memory>()?;
    // Not with `add_class`, which would list it in `__all__`.
    module.setattr("Region", module.py().get_type::<region::Region>())?;
    module.add_class::<cluster::Controller>()?;
    module.add_class::<cluster::Cluster>()?;
    module.add_function(wrap_pyfunction!(communicator::join, module)?)?;
    Ok(())
}

//! The C interface of Sumac: `include/sumac.h` is written from these sources, and the guide `host/docs/c.md` introduces
//! it. Programs in Rust use the crate `sumac`.
//!
//! Objects are opaque: functions make, change, read and free them, so that a later version can add to them. Every
//! function that can fail returns a [`Status`], and what it makes goes to its last argument.
//!
//! Invariants:
//! - No panic crosses the border (`last_error::guard`).
//! - NULL, unknown numbers, lengths that cannot be and memory that overlaps are errors before anything is done with
//!   them. What cannot be checked is the caller's promise, which the section *Safety* of each function states: that a
//!   pointer leads to what it claims, and that an object is not used after it was freed.
//! - An output pointer is NULL after an error, never uninitialised.
//! - What is exported is in `abi.txt`, and only ever grows.

mod buffers;
mod calls;
mod comm;
mod config;
mod explain;
mod last_error;
mod memory;
mod messages;
mod numbers;
mod options;
mod outcome;
mod request;
mod started;
mod status;
mod uneven;

pub use calls::*;
pub use comm::*;
pub use config::*;
pub use explain::*;
pub use last_error::*;
pub use memory::*;
pub use messages::*;
pub use numbers::*;
pub use options::*;
pub use outcome::*;
pub use request::*;
pub use started::*;
pub use status::*;
pub use uneven::*;

use std::ffi::c_char;

/// Return the version of the library, such as "0.1.0".
#[unsafe(no_mangle)]
pub extern "C" fn sumac_version() -> *const c_char {
    const VERSION: &std::ffi::CStr =
        match std::ffi::CStr::from_bytes_with_nul(concat!(env!("CARGO_PKG_VERSION"), "\0").as_bytes()) {
            Ok(version) => version,
            Err(_) => panic!("a version has no NUL inside"),
        };
    VERSION.as_ptr()
}

#[cfg(test)]
mod tests;

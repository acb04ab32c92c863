//! Devices that die under operations: every rank gets the right result all the same, and says so.
//!
//! Controller, boards and communicators as they ship, over real sockets, in one process. A board that is dropped is a
//! device that dies; when it does is drawn, so that operations are hit at many points. Processes that are really killed
//! are `host/cli/tests/faults.rs`' part.

#[path = "../common/mod.rs"]
mod common;

mod again;
mod busy;
mod collectives;
mod death;
mod devices;
mod far;
mod orders;
mod started;
mod work;

//! Recovery after the loss of a device: every rank still gets the exact result, and its outcome reports the recovery.
//!
//! The production controller, boards and communicators run in one process, over real sockets. Dropping a board loses
//! its device, at moments spread over an operation. `host/cli/tests` kills real processes.

#[path = "../common/mod.rs"]
mod common;

mod collectives;
mod devices;
mod host_collectives;
mod late_ranks;
mod loss;
mod orders;
mod remote;
mod repeated;
mod started;
mod workload;

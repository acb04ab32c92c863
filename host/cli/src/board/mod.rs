//! Boards: building and running images of boards without an operating system, decoding their logs, and building the
//! agent for boards that run Linux.
//!
//! Images are built from the sources in `firmware/boards`, each board for its own target and with its own
//! configuration.

mod agent;
mod build;
mod bus;
mod log;
mod run;

pub(crate) use agent::build_agent;
pub(crate) use build::{BareBoard, BuildOptions, build};
pub(crate) use log::{LogArgs, run as show_log};
pub(crate) use run::{EmulateArgs, RunArgs, emulate, run};

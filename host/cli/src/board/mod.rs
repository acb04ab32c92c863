//! Boards without an operating system: their images, the emulator that runs them, and their logs. And the agent for the
//! Linux of those that have one.
//!
//! An image is built from the sources in `firmware/boards`, as firmware is: for a target of its own, with what the board's
//! folder says.

mod agent;
mod build;
mod bus;
mod log;
mod run;

pub(crate) use agent::build_agent;
pub(crate) use build::{BareBoard, BuildOptions, build};
pub(crate) use log::{LogArgs, run as show_log};
pub(crate) use run::{EmulateArgs, RunArgs, emulate, run};

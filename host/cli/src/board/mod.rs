//! Boards without an operating system: their images, the emulator that runs them, and their logs.
//!
//! An image is built from the sources in `firmware/boards`, as firmware is: for a target of its own, with what the board's
//! folder says.

mod build;
mod log;
mod run;

pub(crate) use build::{BareBoard, BuildOptions, build};
pub(crate) use log::{LogArgs, run as show_log};
pub(crate) use run::{EmulateArgs, RunArgs, emulate, run};

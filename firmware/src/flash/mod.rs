#![doc = include_str!("README.md")]
//!
//! # Inside
//!
//! [`check`] decides whether an image may go to a card; [`Session`] is the whole of flashing as a state machine without
//! I/O, clock or threads; [`run`] moves what it asks for between it and a card. So every failure, however slow, is tested
//! in virtual time against the session, and once more as a whole against a simulated card.

mod check;
mod drive;
mod failure;
mod session;
#[cfg(test)]
mod tests;

pub use check::{STREAM_MAX_BYTES, Terms, check, usable};
pub use drive::{Image, Interrupter, run, within};
pub use failure::{Failure, Refusal, Stage};
pub use session::{Command, Event, Limits, Outcome, Progress, Restored, Session, Until};

#![doc = include_str!("README.md")]
//!
//! # Inside
//!
//! [`check`] decides whether an image may go to a card; [`Session`] is the whole of flashing as a state machine without
//! I/O, clock or threads; [`Workers`] moves what it asks for between it and two processes ([`serve_misc`], [`serve_boot`])
//! that talk to the driver. So every failure, however slow, is tested in virtual time against the session, and once more
//! as a whole against a simulated card.

mod check;
mod drive;
mod failure;
mod sealed;
mod session;
#[cfg(test)]
mod tests;
mod verbs;
mod worker;

pub use check::{STREAM_MAX_BYTES, Terms, check, usable};
pub use drive::{Image, Interrupter, Role, Workers};
pub use failure::{Failure, Refusal, Stage};
pub use sealed::{SealError, SealedImage};
pub use session::Session;
pub use verbs::{Command, Event, Goal, Limits, Outcome, Progress, Restored, Until};
pub use worker::{serve_boot, serve_misc};

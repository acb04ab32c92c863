#![doc = include_str!("README.md")]
//!
//! # Design
//!
//! [`check`] decides whether an image may be written to a card; [`Session`] is the flashing procedure as a state
//! machine without I/O, clock or threads; [`Workers`] connects it to two processes ([`serve_misc`], [`serve_boot`])
//! that access the driver. Every failure, however slow, is thus tested in virtual time against the session, and the
//! whole against a simulated card.

mod check;
mod drive;
mod failure;
mod messages;
mod sealed;
mod session;
#[cfg(test)]
mod tests;
mod worker;

pub use check::{RollbackPolicy, STREAM_MAX_BYTES, check, usable};
pub use drive::{Image, Interrupter, Role, Workers};
pub use failure::{Failure, Refusal, Stage};
pub use messages::{Command, Event, Goal, Length, Limits, Outcome, Progress, Restored, Until};
pub use sealed::{SealError, SealedImage};
pub use session::Session;
pub use worker::{Contents, serve_boot, serve_misc};

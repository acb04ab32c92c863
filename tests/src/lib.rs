//! Whole-cluster tests: the production state machines on one virtual clock, with an oracle outside.
#![forbid(unsafe_code)]

pub mod oracle;
pub mod sim;

//! The host's side of Sumac.

pub mod coll;
pub mod exec;

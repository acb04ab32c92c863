//! The host's side of Sumac.

pub mod choice;
pub mod coll;
pub mod controller;
pub mod endpoint;
pub mod exec;
pub mod plan;
pub mod topo;

//! The host's side of Sumac.

pub mod coll;
pub mod endpoint;
pub mod plan;
pub mod topo;

//! The host's side of Sumac.

pub mod plan;
pub mod topo;

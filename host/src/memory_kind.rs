//! What the buffers of most calls are: memory that devices access, or memory that ranks copy first.

use serde::{Deserialize, Serialize};
use std::fmt;

/// What memory the buffers of a communicator's calls are in.
///
/// Operations work on either. Where ranks share memory with their device, they copy plain memory in and out, which
/// moves as many bytes again, so `auto` takes the tree less often than for registered memory.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Default, Serialize, Deserialize)]
#[non_exhaustive]
pub enum MemoryKind {
    /// Memory of the communicator, from [`Communicator::alloc`](crate::Communicator::alloc), which devices access
    /// themselves.
    #[default]
    Registered,
    /// Any other memory of the process.
    Plain,
}

impl MemoryKind {
    /// Each kind with its name in `SUMAC_MEMORY`.
    pub const NAMES: [(&'static str, Self); 2] = [("registered", Self::Registered), ("plain", Self::Plain)];

    /// Return its name.
    pub const fn name(self) -> &'static str {
        match self {
            Self::Registered => "registered",
            Self::Plain => "plain",
        }
    }
}

impl fmt::Display for MemoryKind {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(self.name())
    }
}

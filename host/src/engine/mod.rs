//! From a call to its outcome: posting, progress, started operations and memory. Only [`crate::comm`] enters it.

mod change;
mod config;
mod core;
mod dropped;
mod element;
mod error;
mod extent;
mod join;
mod leave;
mod membership;
mod messages;
mod migration_gate;
mod notices;
mod options;
mod progress;
mod recover;
mod selection_cache;
mod shared;
mod started;
mod straggler;
mod tree;

pub use config::{DEFAULT_PORT, JoinConfig, JoinError};
pub use element::Element;
pub(crate) use element::ErasedBuffer;
pub use error::{Error, OutputState};
pub(crate) use join::join;
pub use leave::Departure;
pub use notices::ControllerState;
pub(crate) use notices::Notices;
pub use options::{CallOptions, Outcome, Outstanding, Repairs, Straggler};
pub(crate) use self::core::Core;
pub(crate) use shared::SharedCore;

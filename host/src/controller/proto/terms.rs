//! On whose account a job runs, and how its ranks want to reach their devices.

use serde::{Deserialize, Serialize};
use std::fmt;
use std::str::FromStr;
use thiserror::Error;

/// On whose account a job runs, and what it does while there is no tree for it.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Terms {
    /// The tenant: see [`check_tenant`].
    pub tenant: String,
    /// How long joining waits for a tree that others hold, in milliseconds.
    pub wait_ms: u32,
    /// Whether the ranks take a tree that is offered later.
    pub moves: bool,
}

impl Default for Terms {
    /// [`DEFAULT_TENANT`], which does not wait and does not move.
    fn default() -> Self {
        Self { tenant: DEFAULT_TENANT.to_owned(), wait_ms: 0, moves: false }
    }
}

/// The tenant of jobs that name none.
pub const DEFAULT_TENANT: &str = "default";

/// The longest name of a tenant in bytes.
pub const MAX_TENANT_LEN: usize = 64;

/// Check a tenant's name.
///
/// # Errors
/// [`BadTenant`] if it is empty, longer than [`MAX_TENANT_LEN`], or of other characters than letters, digits, `.`, `_` and `-`.
pub fn check_tenant(name: &str) -> Result<(), BadTenant> {
    let is_plain = name.bytes().all(|byte| byte.is_ascii_alphanumeric() || b"._-".contains(&byte));
    if (1..=MAX_TENANT_LEN).contains(&name.len()) && is_plain {
        return Ok(());
    }
    Err(BadTenant { len: name.len(), begin: name.chars().take(MAX_TENANT_LEN).collect() })
}

/// A name that no tenant can have.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, Error)]
#[error("{begin:?} ({len} bytes) is no tenant; a name has 1 to {MAX_TENANT_LEN} letters, digits, `.`, `_` or `-`")]
pub struct BadTenant {
    /// Its length in bytes.
    pub len: usize,
    /// How it begins.
    pub begin: String,
}

/// How a rank reaches its leaf device.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Default, Serialize, Deserialize)]
#[non_exhaustive]
pub enum Attach {
    /// By shared memory if the leaf is on the same machine and has a bus, else by packets.
    #[default]
    Auto,
    /// By packets, which carry the data.
    Udp,
    /// By shared memory, which the device's engine reads and writes; or there is no tree, for that reason.
    Shm,
    /// By packets over RDMA verbs, to a device that receives them so; or there is no tree, for that reason.
    Verbs,
    /// By reference over RDMA verbs: the device's engine reads this rank's memory, and writes to it; or there is no tree, for
    /// that reason.
    Rdma,
}

impl Attach {
    /// Every way.
    pub const ALL: [Self; 5] = [Self::Auto, Self::Udp, Self::Shm, Self::Verbs, Self::Rdma];

    /// Return its name on the command line.
    pub const fn name(self) -> &'static str {
        match self {
            Self::Auto => "auto",
            Self::Udp => "udp",
            Self::Shm => "shm",
            Self::Verbs => "verbs",
            Self::Rdma => "rdma",
        }
    }

    /// Whether a rank contributes by reference, or there is no tree.
    pub const fn insists_on_reference(self) -> bool {
        matches!(self, Self::Shm | Self::Rdma)
    }

    /// Whether a rank may contribute by reference, over memory that it shares with its leaf.
    pub const fn may_share_memory(self) -> bool {
        matches!(self, Self::Auto | Self::Shm)
    }
}

impl fmt::Display for Attach {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(self.name())
    }
}

/// A name that is no way to reach a leaf.
#[derive(Debug, Clone, PartialEq, Eq, Error)]
#[error("{0:?} is no way to attach; known are {known}", known = Attach::ALL.map(Attach::name).join(", "))]
pub struct UnknownAttach(String);

impl FromStr for Attach {
    type Err = UnknownAttach;

    fn from_str(text: &str) -> Result<Self, UnknownAttach> {
        Self::ALL.into_iter().find(|attach| attach.name() == text).ok_or_else(|| UnknownAttach(text.to_owned()))
    }
}

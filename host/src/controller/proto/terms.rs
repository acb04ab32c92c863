//! A job's tenant and admission terms, and the transports to its devices.

use super::{RailJobs, RailOf, StripeOf};
use crate::schedule::Shape;
use serde::{Deserialize, Serialize};
use std::fmt;
use std::str::FromStr;
use thiserror::Error;

/// A job's tenant, and what the job does while no tree is available.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Terms {
    /// The tenant's name, valid by [`check_tenant`].
    pub tenant: String,
    /// How long joining waits for a tree that depends on resources of other jobs, in milliseconds.
    pub wait_ms: u32,
    /// Whether the running job accepts a tree that is offered later.
    pub accepts_migration: bool,
    /// Whether this rank can run a device for the ranks on its host, and combines there first.
    pub hierarchical: bool,
    /// The maximum number of trees to spread operations over; 0: as many as raise the predicted rate.
    pub trees: u8,
    /// For how many adapters of its server this rank has addresses: the first ones in the fabric's order. 0 and 1: for
    /// its host alone. More than [`TREES_MAX`](crate::controller::TREES_MAX) are not used. May differ between ranks.
    pub rails: u8,
    /// The job of which this one is a further tree, if it is one.
    pub stripe: Option<StripeOf>,
    /// Which of its rails the job's ranks also join, each a job with a tree of its own.
    pub rail_jobs: RailJobs,
    /// The job of which this one is a rail, if it is one.
    pub rail: Option<RailOf>,
    /// The shape that the job asks for. `None`: that of its machines, or of their hosts on the fabric.
    pub shape: Option<Shape>,
}

impl Default for Terms {
    /// [`DEFAULT_TENANT`], no wait, no migration, no host device, as many trees as are faster, one adapter, no
    /// rails, the shape of its machines or hosts.
    fn default() -> Self {
        Self {
            tenant: DEFAULT_TENANT.to_owned(),
            wait_ms: 0,
            accepts_migration: false,
            hierarchical: false,
            trees: 0,
            rails: 1,
            stripe: None,
            rail_jobs: RailJobs::None,
            rail: None,
            shape: None,
        }
    }
}

/// The tenant of jobs that do not name one.
pub const DEFAULT_TENANT: &str = "default";

/// The maximum length of a tenant's name, in bytes.
pub const MAX_TENANT_LEN: usize = 64;

/// Check a tenant's name.
///
/// # Errors
/// [`InvalidTenant`] if it is empty, longer than [`MAX_TENANT_LEN`], or contains characters other than letters, digits,
/// `.`, `_` and `-`.
pub fn check_tenant(name: &str) -> Result<(), InvalidTenant> {
    let is_plain = name.bytes().all(|byte| byte.is_ascii_alphanumeric() || b"._-".contains(&byte));
    if (1..=MAX_TENANT_LEN).contains(&name.len()) && is_plain {
        return Ok(());
    }
    Err(InvalidTenant { len: name.len(), begin: name.chars().take(MAX_TENANT_LEN).collect() })
}

/// An invalid tenant name.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, Error)]
#[error(
    "{begin:?} ({len} bytes) is not a valid tenant name; use 1 to {MAX_TENANT_LEN} letters, digits, `.`, `_` or `-`"
)]
pub struct InvalidTenant {
    /// The length of the name in bytes.
    pub len: usize,
    /// The beginning of the name.
    pub begin: String,
}

/// How a rank reaches its leaf device.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Default, Serialize, Deserialize)]
#[non_exhaustive]
pub enum Transport {
    /// Shared memory if the leaf is on the same machine and takes it, else UDP.
    #[default]
    Auto,
    /// UDP packets that carry the data.
    Udp,
    /// Zero-copy over shared memory, which the device's engine reads and writes. If it is unavailable, there is no
    /// tree.
    Shm,
    /// Packets over RDMA verbs, for a device that receives them so. If it is unavailable, there is no tree.
    Verbs,
    /// Zero-copy over RDMA verbs: the device's engine reads and writes this rank's memory. If it is unavailable, there
    /// is no tree.
    Rdma,
}

impl Transport {
    /// All transports.
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

    /// Whether the rank needs a zero-copy transport and takes no tree without one.
    pub const fn requires_zero_copy(self) -> bool {
        matches!(self, Self::Shm | Self::Rdma)
    }

    /// Whether the rank may share memory with its leaf.
    pub const fn may_share_memory(self) -> bool {
        matches!(self, Self::Auto | Self::Shm)
    }
}

impl fmt::Display for Transport {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(self.name())
    }
}

/// A name that no transport has.
#[derive(Debug, Clone, PartialEq, Eq, Error)]
#[error("{0:?} is not a transport; choose one of {known}", known = Transport::ALL.map(Transport::name).join(", "))]
pub struct UnknownTransport(String);

impl FromStr for Transport {
    type Err = UnknownTransport;

    fn from_str(text: &str) -> Result<Self, UnknownTransport> {
        let named = Self::ALL.into_iter().find(|transport| transport.name() == text);
        named.ok_or_else(|| UnknownTransport(text.to_owned()))
    }
}

//! Keys of a controller: who may connect, and what each may do (PROTOCOL 10).
//!
//! A [`KeyStore`] is the controller's file, written by `sumac key`. Each principal gets its own key in a file of its
//! own ([`read_key`]). Secrets are cleared when they are dropped and no message contains one; a parser's copies of the
//! store's text are not cleared, so a controller's memory has all secrets, as its file has.
//!
//! A tenant's ranks share one key. Who has it can stand for any rank of the tenant's jobs, or for the controller
//! towards these ranks, and for nobody else.

mod memory;
mod store;
mod watched;

pub use memory::PrivateMemory;
pub use store::{KeyRecord, KeyStore, KeyStoreError};
pub use sumac_hal::ctrl::secure::{KeyFileError, parse_key, read_key, write_new_key};
pub(super) use watched::KeysFile;

use super::limits::{InvalidName, NameKind, check_name};
use super::proto::{InvalidTenant, check_tenant};
use std::fmt;
use thiserror::Error;

/// Whom a key stands for, and thus what it is good for.
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub enum Principal {
    /// Devices: may register under these names.
    Device {
        /// The names; at least one.
        names: Vec<String>,
    },
    /// A tenant: may run jobs of this tenant, and sees them in reports.
    Tenant {
        /// The tenant's name.
        name: String,
    },
    /// An operator: sees all of a report, and may run jobs on chosen devices, which bypass the fabric.
    Operator,
}

/// Why there can be no key for a principal.
#[derive(Debug, Clone, PartialEq, Eq, Error)]
#[non_exhaustive]
pub enum InvalidPrincipal {
    /// A device's name is invalid.
    #[error(transparent)]
    Name(#[from] InvalidName),
    /// A tenant's name is invalid.
    #[error(transparent)]
    Tenant(#[from] InvalidTenant),
    /// A key for no device, or for too many.
    #[error("{count} device names; a key is good for 1 to {DEVICE_NAMES_MAX}")]
    Count {
        /// The number of names.
        count: usize,
    },
}

/// The maximum number of device names of a key.
pub const DEVICE_NAMES_MAX: usize = 1024;

impl Principal {
    /// Check names and their number.
    ///
    /// # Errors
    /// [`InvalidPrincipal`].
    pub fn check(&self) -> Result<(), InvalidPrincipal> {
        match self {
            Self::Device { names } if !(1..=DEVICE_NAMES_MAX).contains(&names.len()) => {
                Err(InvalidPrincipal::Count { count: names.len() })
            }
            Self::Device { names } => {
                Ok(names.iter().try_for_each(|name| check_name(NameKind::Fabric, "device", name))?)
            }
            Self::Tenant { name } => Ok(check_tenant(name)?),
            Self::Operator => Ok(()),
        }
    }

    /// Whether a device of this name may register.
    pub fn may_register(&self, device: &str) -> bool {
        matches!(self, Self::Device { names } if names.iter().any(|name| name == device))
    }

    /// Whether a rank of a job of this tenant may join. Operators may if the job's devices are chosen explicitly.
    pub fn may_join(&self, tenant: &str, is_pinned: bool) -> bool {
        match self {
            Self::Device { .. } => false,
            Self::Tenant { name } => name == tenant && !is_pinned,
            Self::Operator => is_pinned,
        }
    }
}

impl fmt::Display for Principal {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Device { names } => write!(f, "device {}", names.join(", ")),
            Self::Tenant { name } => write!(f, "tenant {name}"),
            Self::Operator => write!(f, "operator"),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn principal_may_do_what_its_kind_allows_and_nothing_else() {
        let device = Principal::Device { names: vec!["leaf0".into(), "leaf1".into()] };
        let tenant = Principal::Tenant { name: "ml".into() };
        let may = |principal: &Principal| {
            [
                principal.may_register("leaf1"),
                principal.may_register("leaf"),
                principal.may_join("ml", false),
                principal.may_join("ml", true),
                principal.may_join("other", false),
            ]
        };
        assert_eq!(may(&device), [true, false, false, false, false]);
        assert_eq!(may(&tenant), [false, false, true, false, false]);
        assert_eq!(may(&Principal::Operator), [false, false, false, true, false]);
    }

    #[test]
    fn names_of_principals_are_checked() {
        assert_eq!(Principal::Device { names: Vec::new() }.check(), Err(InvalidPrincipal::Count { count: 0 }));
        for invalid in [
            Principal::Device { names: vec!["a\nb".into()] },
            Principal::Device { names: vec!["d".into(); DEVICE_NAMES_MAX + 1] },
            Principal::Tenant { name: "a b".into() },
        ] {
            assert!(invalid.check().is_err(), "{invalid}");
        }
        assert_eq!(Principal::Device { names: vec!["n1 mlx5_0".into()] }.check(), Ok(()));
    }
}

//! The quotas of `sumac controller --quota`: `TENANT=groups:2,slots:64,memory:16M`.

use crate::size::{SizeBytes, SizeError};
use anyhow::ensure;
use std::collections::BTreeMap;
use std::num::ParseIntError;
use std::str::FromStr;
use sumac::controller::proto::{InvalidTenant, check_tenant};
use sumac::controller::{Quota, Quotas};
use thiserror::Error;

/// Stands for every tenant without a quota of its own.
const OTHERS: &str = "*";

/// One tenant's quota.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct TenantQuota {
    tenant: String,
    quota: Quota,
}

/// Why a quota cannot be parsed.
#[derive(Debug, PartialEq, Eq, Error)]
#[non_exhaustive]
pub(crate) enum QuotaError {
    /// A part is missing or unknown.
    #[error("{0:?} is not a limit; use TENANT=groups:N,slots:N,memory:SIZE with at least one of the three")]
    Syntax(String),
    /// The tenant's name is invalid.
    #[error(transparent)]
    Tenant(#[from] InvalidTenant),
    /// A limit is given twice.
    #[error("{0} is given twice; give each limit once")]
    Twice(String),
    /// A value is not a number.
    #[error("{value:?} is not a number of {what}: {source}")]
    Number {
        /// The limit.
        what: String,
        /// The value.
        value: String,
        /// Why it cannot be parsed.
        source: ParseIntError,
    },
    /// A value is not a size.
    #[error(transparent)]
    Size(#[from] SizeError),
}

impl FromStr for TenantQuota {
    type Err = QuotaError;

    fn from_str(text: &str) -> Result<Self, QuotaError> {
        let syntax = |part: &str| QuotaError::Syntax(part.to_owned());
        let (tenant, limits) = text.split_once('=').ok_or_else(|| syntax(text))?;
        if tenant != OTHERS {
            check_tenant(tenant)?;
        }
        let mut quota = Quota::default();
        for limit in limits.split(',') {
            let (what, value) = limit.split_once(':').ok_or_else(|| syntax(limit))?;
            let number = || {
                let no_number = |source| QuotaError::Number { what: what.to_owned(), value: value.to_owned(), source };
                value.parse().map_err(no_number)
            };
            let (place, number) = match what {
                "groups" => (&mut quota.groups, number()?),
                "slots" => (&mut quota.slots, number()?),
                "memory" => (&mut quota.memory_bytes, value.parse::<SizeBytes>()?.0),
                _ => return Err(syntax(limit)),
            };
            if place.replace(number).is_some() {
                return Err(QuotaError::Twice(what.to_owned()));
            }
        }
        Ok(Self { tenant: tenant.to_owned(), quota })
    }
}

/// Combine the quotas of all tenants.
///
/// # Errors
/// A tenant is given twice.
pub(crate) fn all(quotas: &[TenantQuota]) -> anyhow::Result<Quotas> {
    let mut tenants = BTreeMap::new();
    for TenantQuota { tenant, quota } in quotas {
        let is_new = tenants.insert(tenant.clone(), *quota).is_none();
        ensure!(is_new, "--quota names {tenant} twice; combine its limits in one option");
    }
    let other = tenants.remove(OTHERS).unwrap_or_default();
    Ok(Quotas { other, tenants })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn parse(text: &str) -> Result<TenantQuota, String> {
        text.parse().map_err(|error: QuotaError| error.to_string())
    }

    #[test]
    fn quotas_parse_in_any_order_and_default_to_others() {
        let quota = Quota { groups: Some(2), slots: Some(64), memory_bytes: Some(16 << 20) };
        assert_eq!(parse("a=slots:64,groups:2,memory:16M"), Ok(TenantQuota { tenant: "a".into(), quota }));
        let others = parse("*=groups:0").expect("a quota");
        let named = parse("a=slots:4").expect("a quota");
        let quotas = all(&[others.clone(), named.clone()]).expect("two tenants");
        assert_eq!((quotas.of("a"), quotas.of("b")), (named.quota, others.quota));
        assert_eq!(all(&[]).expect("none"), Quotas::default());
        let twice = all(&[named.clone(), named]).expect_err("twice").to_string();
        assert!(twice.contains("names a twice"), "{twice}");
    }

    #[test]
    fn invalid_quota_error_names_the_part() {
        let cases = [
            ("a", "\"a\" is not a limit"),
            ("a=", "\"\" is not a limit"),
            ("a=groups", "\"groups\" is not a limit"),
            ("a=chunks:3", "\"chunks:3\" is not a limit"),
            ("a=groups:x", "\"x\" is not a number of groups"),
            ("a=slots:-1", "\"-1\" is not a number of slots"),
            ("a=memory:much", "\"much\" is not a size"),
            ("a=groups:1,groups:2", "groups is given twice"),
            ("=groups:1", "is not a valid tenant name"),
            ("a b=groups:1", "is not a valid tenant name"),
        ];
        for (text, named) in cases {
            let error = parse(text).expect_err("refused");
            assert!(error.contains(named), "{text}: {error}");
        }
    }
}

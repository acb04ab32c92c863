//! Host selections: all, the first N, a list of names and GUIDs, or servers with several adapters.
//!
//! Invariant: the resolved list has no duplicates, and its order is that of the ranks.

use super::PlanError;
pub(super) use crate::topo::similar::{hint, some_of};
use crate::topo::{Fabric, HostId, Which, similar};
use std::collections::BTreeSet;
use std::convert::Infallible;
use std::str::FromStr;

/// The hosts of a tree.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum HostSelection {
    /// Every host, in natural name order.
    All,
    /// The first N in natural name order.
    First(usize),
    /// These hosts, by name or GUID; rank i is the i-th.
    Named(Vec<String>),
    /// Servers with several adapters, as [`Taken::rails`](crate::topo::Taken::rails) lists them: rank i is at the i-th
    /// server, and a tree enters at any of its adapters.
    Rails(Vec<Vec<HostId>>),
}

impl FromStr for HostSelection {
    type Err = Infallible;

    /// Parse `all`, a number, or a comma-separated list of names and GUIDs. A number of 16 digits is a GUID.
    fn from_str(text: &str) -> Result<Self, Infallible> {
        Ok(match text.parse()? {
            Which::All => Self::All,
            Which::First(count) => Self::First(count),
            Which::List(names) => Self::Named(
                names.split(',').map(|name| name.trim().to_owned()).filter(|name| !name.is_empty()).collect(),
            ),
        })
    }
}

impl HostSelection {
    /// Resolve the selection; the index of each host is its rank. Of several adapters, it is the first.
    ///
    /// # Errors
    /// [`PlanError`] if there is no host, too many are requested, one is repeated, or a name is unknown (with similar
    /// names) or ambiguous.
    pub fn resolve(&self, fabric: &Fabric) -> Result<Vec<HostId>, PlanError> {
        let ranks = self.resolve_with(fabric, &|name| fabric.find_host(name))?;
        Ok(ranks.iter().map(|adapters| adapters[0]).collect())
    }

    /// Resolve the selection with a faster way to find hosts.
    pub(super) fn resolve_with(
        &self,
        fabric: &Fabric,
        find: &dyn Fn(&str) -> Option<HostId>,
    ) -> Result<Ranks, PlanError> {
        let available = fabric.hosts().len();
        let hosts: Vec<HostId> = match self {
            Self::All => fabric.host_ids().collect(),
            Self::First(asked) if *asked > available => {
                return Err(PlanError::TooManyHosts { asked: *asked, available });
            }
            Self::First(asked) => fabric.host_ids().take(*asked).collect(),
            Self::Named(names) => named(fabric, names, find)?,
            Self::Rails(servers) => return Ranks::of_servers(fabric, servers),
        };
        if hosts.is_empty() { Err(PlanError::NoHosts) } else { Ok(Ranks::of_hosts(hosts)) }
    }
}

/// The adapters of each rank; at least one each.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Ranks {
    adapters: Vec<HostId>,
    /// Where each rank's adapters start, and the end.
    starts: Vec<u32>,
}

impl Ranks {
    /// One adapter a rank.
    fn of_hosts(adapters: Vec<HostId>) -> Self {
        let starts = (0..=adapters.len() as u32).collect();
        Self { adapters, starts }
    }

    fn of_servers(fabric: &Fabric, servers: &[Vec<HostId>]) -> Result<Self, PlanError> {
        let (mut adapters, mut starts, mut seen) = (Vec::new(), vec![0], BTreeSet::new());
        for server in servers {
            if server.is_empty() {
                return Err(PlanError::NoHosts);
            }
            for host in server {
                if !seen.insert(*host) {
                    return Err(PlanError::DuplicateHost { name: fabric.host(*host).name.clone() });
                }
            }
            adapters.extend(server);
            starts.push(adapters.len() as u32);
        }
        if servers.is_empty() { Err(PlanError::NoHosts) } else { Ok(Self { adapters, starts }) }
    }

    pub(super) fn len(&self) -> usize {
        self.starts.len() - 1
    }

    /// The adapters of a rank.
    pub(super) fn adapters(&self, rank: usize) -> &[HostId] {
        &self.adapters[self.starts[rank] as usize..self.starts[rank + 1] as usize]
    }

    pub(super) fn iter(&self) -> impl Iterator<Item = &[HostId]> {
        (0..self.len()).map(|rank| self.adapters(rank))
    }
}

fn named(fabric: &Fabric, names: &[String], find: &dyn Fn(&str) -> Option<HostId>) -> Result<Vec<HostId>, PlanError> {
    let mut seen = BTreeSet::new();
    names
        .iter()
        .map(|name| {
            let host = find(name).ok_or_else(|| not_found(fabric, name))?;
            let first_time = seen.insert(host);
            first_time.then_some(host).ok_or_else(|| PlanError::DuplicateHost { name: fabric.host(host).name.clone() })
        })
        .collect()
}

fn not_found(fabric: &Fabric, name: &str) -> PlanError {
    let with_description = fabric.hosts().iter().filter(|host| host.description.as_deref() == Some(name));
    let guids: Vec<String> = with_description.map(|host| host.guid.clone()).collect();
    if !guids.is_empty() {
        return PlanError::AmbiguousHost { name: name.into(), guids };
    }
    let near = similar::nearest(name, fabric.hosts().iter().map(|host| host.name.as_str()));
    PlanError::UnknownHost { name: name.into(), near }
}

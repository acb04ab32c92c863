//! Rails: the adapters of its server through which a rank may enter trees, so that each tree takes another one.
//!
//! A rank that has addresses for several adapters, and whose host is the first adapter of its server, may use the first
//! ones in the fabric's order. A rank at another adapter chose that one by itself, and stays there.
//!
//! Invariants:
//! - only adapters that every rank with several has an address for are used, at most [`TREES_MAX`] a rank;
//! - no adapter belongs to two ranks;
//! - a job's own tree enters at each rank's own adapter, for the ranks' data ports were bound before they joined.

use super::TreeSketch;
use crate::controller::limits::TREES_MAX;
use crate::controller::proto::JoinRequest;
use crate::topo::{Fabric, HostId};
use std::collections::BTreeSet;

/// The adapters of a job's ranks.
#[derive(Debug)]
pub(in crate::controller) struct JobRails {
    /// Those of each rank, its own first.
    pub(in crate::controller) adapters: Vec<Vec<HostId>>,
    /// Why servers have more adapters than are used.
    pub(in crate::controller) reason: Option<String>,
}

impl JobRails {
    /// The adapters of a job whose ranks all name their hosts; `None` if the planner has to take, or refuse, the hosts
    /// as they are.
    pub(in crate::controller) fn of(fabric: &Fabric, requests: &[&JoinRequest]) -> Option<Self> {
        let own: Option<Vec<HostId>> =
            requests.iter().map(|request| find_adapter(fabric, request.host.as_deref()?)).collect();
        let own = own?;
        let taken: BTreeSet<HostId> = own.iter().copied().collect();
        let fewest = requests.iter().min_by_key(|request| request.terms.rails)?;
        if taken.len() < own.len() {
            return None;
        }
        let addresses = usize::from(fewest.terms.rails.clamp(1, TREES_MAX));
        let all = |own: HostId| &fabric.server(fabric.host(own).server).adapters[..];
        let is_first = |own: HostId| all(own).first() == Some(&own);
        let adapters = own.iter().map(|&own| match is_first(own) {
            true => {
                let free = |adapter: &HostId| *adapter == own || !taken.contains(adapter);
                all(own).iter().take(addresses).copied().filter(free).collect()
            }
            false => vec![own],
        });
        let least = own.iter().map(|&own| if is_first(own) { all(own).len() } else { 1 }).min().unwrap_or(1);
        let reason = (addresses < least).then(|| {
            let (rank, is_one) = (fewest.rank, addresses == 1);
            let addresses = if is_one { "one address".into() } else { format!("{addresses} addresses") };
            format!(
                "{rank} has {addresses} for the {least} adapters or more of its server; list one for each, up to \
                 {TREES_MAX}, in SUMAC_BIND on all ranks"
            )
        });
        Some(Self { adapters: adapters.collect(), reason })
    }

    /// Whether any rank may use several adapters.
    pub(in crate::controller) fn has_several(&self) -> bool {
        self.adapters.iter().any(|adapters| adapters.len() > 1)
    }

    /// Move a tree that enters at each rank's own adapter to the front.
    ///
    /// # Errors
    /// The reason why there can be only one tree, if there is none that does.
    pub(in crate::controller) fn put_own_first(&self, trees: &mut [TreeSketch]) -> Result<(), String> {
        let is_own = |tree: &TreeSketch| tree.adapters.iter().zip(&self.adapters).all(|(at, rails)| *at == rails[0]);
        let Some(at) = trees.iter().position(is_own) else {
            return Err(format!("none of {} trees enters at the first adapter of every server", trees.len()));
        };
        trees[..=at].rotate_right(1);
        Ok(())
    }
}

/// Find an adapter by its name or GUID. A server's name stands for its first one.
pub(super) fn find_adapter(fabric: &Fabric, name: &str) -> Option<HostId> {
    let of_server = || fabric.server(fabric.find_server(name)?).adapters.first().copied();
    fabric.find_host(name).or_else(of_server)
}

//! The shape of a job's tree on connected devices: planned on the fabric, or pinned by the job.

use super::admit::HostBlock;
use super::device::Device;
use crate::plan::{Child, Plan};
use crate::transport::local::{self, HostGroups};
use std::collections::BTreeMap;
use std::sync::Arc;
use sumac_hal::ids::Rank;

/// The nodes of a tree, and their children.
#[derive(Debug, Clone)]
pub(super) struct TreeShape {
    pub(super) levels: u32,
    pub(super) max_children: u32,
    /// Root first; children in declared order, nodes by their index here.
    pub(super) nodes: Vec<(Arc<Device>, Vec<Child>)>,
    pub(super) ranks: usize,
    /// Each rank's host, if there is a fabric.
    pub(super) hosts: Option<Vec<String>>,
}

impl TreeShape {
    /// Map a plan's nodes to connected devices, by name or GUID.
    pub(super) fn planned(plan: &Plan, devices: &BTreeMap<String, Arc<Device>>) -> Result<Self, String> {
        let nodes = plan.nodes.iter().map(|node| {
            let by_guid = || devices.values().find(|device| device.name() == node.guid);
            let device = devices.get(&node.name).or_else(by_guid);
            let device = device.ok_or_else(|| format!("device {} is not connected", node.name))?;
            Ok((Arc::clone(device), node.children.clone()))
        });
        Ok(Self {
            levels: plan.levels as u32,
            max_children: plan.max_children as u32,
            nodes: nodes.collect::<Result<_, String>>()?,
            ranks: plan.ranks.len(),
            hosts: None,
        })
    }

    /// Expand a tree over groups of ranks to one over ranks: each of `hosts` becomes a node.
    pub(super) fn expand(self, groups: &HostGroups, hosts: &[HostBlock]) -> Self {
        let (mut devices, mut children): (Vec<_>, Vec<_>) = self.nodes.into_iter().unzip();
        for host in groups.expand(&mut children) {
            devices.push(Arc::clone(&hosts[host].device));
        }
        let max_children = children.iter().map(Vec::len).max().unwrap_or(0) as u32;
        let ranks = groups.group_of_ranks().len();
        let levels = local::levels(&children);
        Self { levels, max_children, nodes: devices.into_iter().zip(children).collect(), ranks, hosts: self.hosts }
    }

    /// Build a chain of devices, root first, with all ranks at the last one.
    pub(super) fn pinned(
        names: &[String],
        ranks: usize,
        devices: &BTreeMap<String, Arc<Device>>,
    ) -> Result<Self, String> {
        let mut nodes = Vec::with_capacity(names.len());
        for (index, name) in names.iter().enumerate() {
            if names[..index].contains(name) {
                return Err(format!("device {name} is pinned twice; it can be one node of a tree"));
            }
            let device = devices.get(name).ok_or_else(|| format!("device {name} is pinned, but not connected"))?;
            let children = if index + 1 < names.len() {
                vec![Child::Node(index + 1)]
            } else {
                (0..ranks as u32).map(|rank| Child::Rank(Rank(rank))).collect()
            };
            nodes.push((Arc::clone(device), children));
        }
        Ok(Self { levels: names.len() as u32, max_children: ranks.max(1) as u32, nodes, ranks, hosts: None })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::controller::output::ConnId;
    use sumac_hal::ctrl::{Announce, DeviceCapabilities, Name};
    use sumac_hal::ids::BootId;

    /// Connected devices with these names, which discard all requests.
    fn devices(names: &[&str]) -> BTreeMap<String, Arc<Device>> {
        let session = |name: &&str| {
            let capabilities = DeviceCapabilities {
                max_packet_len_bytes: 1500,
                receive_buffer_bytes: 1 << 20,
                groups: 4,
                children: 8,
                slots: 64,
                slot_memory_bytes: 1 << 20,
                dtypes: u32::MAX,
                ops: u32::MAX,
                collectives: u32::MAX,
            };
            let name = Name::try_from(*name).expect("short");
            let announce = Announce {
                name,
                boot_id: BootId(1),
                capabilities,
                data_addrs: Default::default(),
                attach: None,
                slots: None,
            };
            (name_of(&announce), Arc::new(Device { conn: ConnId(1), announce }))
        };
        names.iter().map(session).collect()
    }

    fn name_of(announce: &Announce) -> String {
        announce.name.as_str().to_owned()
    }

    fn names(names: &[&str]) -> Vec<String> {
        names.iter().map(|name| (*name).to_owned()).collect()
    }

    #[test]
    fn pinned_tree_is_a_chain_in_the_given_order() {
        let shape = TreeShape::pinned(&names(&["c", "a"]), 2, &devices(&["a", "b", "c"])).expect("a chain");
        let found: Vec<_> = shape.nodes.iter().map(|(device, children)| (device.name(), children.clone())).collect();
        let ranks = vec![Child::Rank(Rank(0)), Child::Rank(Rank(1))];
        assert_eq!(found, [("c", vec![Child::Node(1)]), ("a", ranks)]);
        assert_eq!((shape.levels, shape.max_children), (2, 2));
    }

    #[test]
    fn pinned_device_that_is_missing_or_repeated_is_refused() {
        let devices = devices(&["a", "b"]);
        let gone = TreeShape::pinned(&names(&["a", "x"]), 1, &devices).expect_err("no such device");
        assert_eq!(gone, "device x is pinned, but not connected");
        let twice = TreeShape::pinned(&names(&["a", "b", "a"]), 1, &devices).expect_err("a loop");
        assert_eq!(twice, "device a is pinned twice; it can be one node of a tree");
    }
}

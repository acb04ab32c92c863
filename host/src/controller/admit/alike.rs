//! What the devices of a tree have in common: the number of their shards, and how they receive packets.

use super::PlacedNode;
use crate::controller::resources::is_host_device;

/// Check that the nodes of a tree fit together.
pub(super) fn check(nodes: &[PlacedNode]) -> Result<(), String> {
    check_shards(nodes)?;
    check_links(nodes)
}

/// Check that every node has as many shards as the one above it. A host device may be undivided: it sends each chunk to
/// the right shard.
fn check_shards(nodes: &[PlacedNode]) -> Result<(), String> {
    for node in nodes {
        let Some((above, _)) = node.parent else { continue };
        let (name, here, above) = (node.device.name(), node.shards(), &nodes[above]);
        let is_undivided = here == 1 && is_host_device(name);
        if here != above.shards() && !is_undivided {
            return Err(format!(
                "device {name} has {here} shards, device {} above it has {}; all devices of a tree need the same number, \
                 but host devices, which may have one",
                above.device.name(),
                above.shards()
            ));
        }
    }
    Ok(())
}

/// Check that all nodes receive over UDP, or all over RDMA verbs.
fn check_links(nodes: &[PlacedNode]) -> Result<(), String> {
    let kind = |node: &PlacedNode| if node.over_verbs() { "over verbs" } else { "over UDP" };
    if let Some(other) = nodes.iter().find(|node| node.over_verbs() != nodes[0].over_verbs()) {
        return Err(format!(
            "device {} receives {}, device {} {}; all devices of a tree must receive the same way",
            other.device.name(),
            kind(other),
            nodes[0].device.name(),
            kind(&nodes[0])
        ));
    }
    Ok(())
}

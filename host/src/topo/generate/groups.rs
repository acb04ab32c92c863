//! Groups of switches that are joined by cables between groups, and rails.

use super::{CABLES_EXPECTED, CABLES_MAX, HOSTS_EXPECTED, HOSTS_MAX, PORTS_MAX, SWITCHES_MAX};
use super::{add_host, add_switch, join, port, within};
use crate::topo::build::{Builder, Kind, Node, Record};
use crate::topo::servers::Origin;
use crate::topo::{Fabric, FabricError, Format, Rate};

/// The shape of a balanced dragonfly (Kim et al., ISCA 2008).
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Dragonfly {
    /// Routers in a group (a), each joined to each other.
    pub routers: usize,
    /// Cables of a router to other groups (h); there are a h + 1 groups.
    pub global: usize,
    /// Hosts at a router (p).
    pub hosts: usize,
    /// The rate of every cable.
    pub rate: Option<Rate>,
}

/// Generate a dragonfly: a h + 1 groups of routers `r<group>-<i>`, with one cable between any two groups.
///
/// # Errors
/// [`FabricError::Shape`] unless there are 1 to 65,536 routers and at most 524,288 hosts.
pub fn dragonfly(shape: Dragonfly) -> Result<Fabric, FabricError> {
    let Dragonfly { routers, global, hosts, rate } = shape;
    within("routers a group", routers, 1..=256, "1 to 256")?;
    within("global cables a router", global, 1..=256, "1 to 256")?;
    let groups = routers * global + 1;
    within("routers", groups * routers, 1..=SWITCHES_MAX, "1 to 65536")?;
    within("hosts a router", hosts, 0..=PORTS_MAX, "0 to 65535")?;
    within("hosts", groups * routers * hosts, 0..=HOSTS_MAX, HOSTS_EXPECTED)?;
    let mut builder = Builder::default();
    let mut nodes: Vec<Vec<Node>> = Vec::with_capacity(groups);
    for group in 0..groups {
        nodes.push(tier(&mut builder, &format!("r{group}-"), routers, hosts, group * routers * hosts, rate)?);
        let group = &nodes[group];
        for (index, node) in group.iter().enumerate() {
            group[index + 1..].iter().try_for_each(|other| join(&mut builder, *node, *other, rate))?;
        }
    }
    for (a, b) in pairs(groups) {
        // The k-th other group of a group hangs on its router k / h.
        let (from, to) = (nodes[a][(b - 1) / global], nodes[b][a / global]);
        join(&mut builder, from, to, rate)?;
    }
    builder.finish(Format::Generated, "a router")
}

/// The shape of a dragonfly+ (Shpiner et al., HiPINEB 2017): groups are leaf-spine, and spines join them.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct DragonflyPlus {
    /// Groups, at least 2.
    pub groups: usize,
    /// Leaves of a group.
    pub leaves: usize,
    /// Spines of a group.
    pub spines: usize,
    /// Hosts at a leaf.
    pub hosts: usize,
    /// Cables between any two groups, spread over their spines.
    pub cables: usize,
    /// The rate of every cable.
    pub rate: Option<Rate>,
}

/// Generate a dragonfly+: leaves `leaf<group>-<i>` and spines `spine<group>-<i>`.
///
/// # Errors
/// [`FabricError::Shape`] for fewer than 2 groups, none of something else, more than 65,536 switches or 524,288 hosts.
pub fn dragonfly_plus(shape: DragonflyPlus) -> Result<Fabric, FabricError> {
    let DragonflyPlus { groups, leaves, spines, hosts, cables, rate } = shape;
    within("groups", groups, 2..=1024, "2 to 1024")?;
    within("leaves a group", leaves, 1..=1024, "1 to 1024")?;
    within("spines a group", spines, 1..=1024, "1 to 1024")?;
    within("cables a pair of groups", cables, 1..=1024, "1 to 1024")?;
    within("switches", groups * (leaves + spines), 1..=SWITCHES_MAX, "1 to 65536")?;
    within("hosts a leaf", hosts, 0..=PORTS_MAX, "0 to 65535")?;
    within("hosts", groups * leaves * hosts, 0..=HOSTS_MAX, HOSTS_EXPECTED)?;
    let between = groups * leaves * spines + groups * (groups - 1) / 2 * cables;
    within("cables", between, 0..=CABLES_MAX, CABLES_EXPECTED)?;
    let mut builder = Builder::default();
    let mut tops: Vec<Vec<Node>> = Vec::with_capacity(groups);
    for group in 0..groups {
        let low = tier(&mut builder, &format!("leaf{group}-"), leaves, hosts, group * leaves * hosts, rate)?;
        let top = tier(&mut builder, &format!("spine{group}-"), spines, 0, 0, rate)?;
        for leaf in &low {
            top.iter().try_for_each(|spine| join(&mut builder, *leaf, *spine, rate))?;
        }
        tops.push(top);
    }
    // The spine of each group whose turn it is.
    let mut next = vec![0_usize; groups];
    for _ in 0..cables {
        for (a, b) in pairs(groups) {
            join(&mut builder, tops[a][next[a] % spines], tops[b][next[b] % spines], rate)?;
            (next[a], next[b]) = (next[a] + 1, next[b] + 1);
        }
    }
    builder.finish(Format::Generated, "a leaf")
}

/// The shape of a fabric of rails: adapter i of every server hangs on rail i.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Rails {
    /// Servers.
    pub servers: usize,
    /// Rails: adapters of a server.
    pub rails: usize,
    /// Servers at a leaf; a rail has as many leaves as that takes.
    pub servers_per_leaf: usize,
    /// Spines of a rail, if it has several leaves.
    pub spines: usize,
    /// The rate of every cable.
    pub rate: Option<Rate>,
}

/// Generate rails: leaves `leaf<rail>-<i>`, spines `spine<rail>-<i>`, and servers `n<i>` with the hosts
/// `n<i> rail<r>`. Rails are not joined.
///
/// # Errors
/// [`FabricError::Shape`] for none of something, several leaves without a spine, or more than 524,288 hosts.
pub fn rails(shape: Rails) -> Result<Fabric, FabricError> {
    let Rails { servers, rails, servers_per_leaf, spines, rate } = shape;
    within("servers", servers, 1..=HOSTS_MAX, "1 to 524288")?;
    within("rails", rails, 1..=1024, "1 to 1024")?;
    within("servers a leaf", servers_per_leaf, 1..=PORTS_MAX, "1 to 65535")?;
    let leaves = servers.div_ceil(servers_per_leaf);
    within("spines", spines, usize::from(leaves > 1)..=1024, "1 to 1024 (0 for a single leaf)")?;
    within("switches", rails * (leaves + spines), 1..=SWITCHES_MAX, "1 to 65536")?;
    within("hosts", servers * rails, 0..=HOSTS_MAX, HOSTS_EXPECTED)?;
    within("cables", rails * leaves * spines, 0..=CABLES_MAX, CABLES_EXPECTED)?;
    let mut builder = Builder::default();
    for rail in 0..rails {
        let low = tier(&mut builder, &format!("leaf{rail}-"), leaves, 0, 0, rate)?;
        for server in 0..servers {
            let name = format!("n{server}");
            let description = Some(format!("{name} rail{rail}"));
            let origin = Origin { system_image: None, server: Some(name.as_str().into()) };
            let record = Record { kind: Kind::Host, description, origin, line: 0 };
            let node = builder.record(&format!("{name} rail{rail}"), record)?;
            let leaf = low[server / servers_per_leaf];
            builder.cable((node, 1), (leaf, port(server % servers_per_leaf)), rate, 0)?;
        }
        let top = tier(&mut builder, &format!("spine{rail}-"), spines, 0, 0, rate)?;
        for leaf in &low {
            top.iter().try_for_each(|spine| join(&mut builder, *leaf, *spine, rate))?;
        }
    }
    builder.finish(Format::Generated, "a leaf")
}

/// Add switches of one kind, with the hosts at each.
fn tier(
    builder: &mut Builder,
    prefix: &str,
    count: usize,
    hosts: usize,
    first_host: usize,
    rate: Option<Rate>,
) -> Result<Vec<Node>, FabricError> {
    let mut nodes = Vec::with_capacity(count);
    for index in 0..count {
        let node = add_switch(builder, &format!("{prefix}{index}"))?;
        for slot in 0..hosts {
            add_host(builder, first_host + index * hosts + slot, (node, slot), rate)?;
        }
        nodes.push(node);
    }
    Ok(nodes)
}

/// All pairs of numbers below `count`, the smaller first.
fn pairs(count: usize) -> impl Iterator<Item = (usize, usize)> {
    (0..count).flat_map(move |a| (a + 1..count).map(move |b| (a, b)))
}

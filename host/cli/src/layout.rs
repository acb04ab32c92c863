//! The devices and ranks of a run: a fabric and the tree planned on it.
//!
//! The supervisor plans the same tree as the controller, in order to start one device per node and to place each rank
//! at a host. The controller then plans on the devices that have registered.

use crate::fabric;
use anyhow::Context;
use std::fmt::Write;
use std::path::{Path, PathBuf};
use sumac::plan::{self, HostSelection, Limits};
use sumac::topo::Fabric;

/// A run's fabric, devices and hosts.
#[derive(Debug)]
pub(crate) struct Layout {
    /// The fabric that the controller reads.
    pub(crate) source: Source,
    /// Names of the devices at the tree's nodes, the root's first.
    pub(crate) devices: Vec<String>,
    /// The host of each rank.
    pub(crate) hosts: Vec<String>,
    /// Index of the leaf device of each rank.
    pub(crate) leaves: Vec<usize>,
    /// Levels of the tree.
    pub(crate) levels: usize,
}

/// Where the fabric comes from.
#[derive(Debug, PartialEq, Eq)]
pub(crate) enum Source {
    /// A file that the user gave.
    File(PathBuf),
    /// A fabric that was generated, or read from stdin.
    Text(String),
}

impl Layout {
    /// Plan a tree for `ranks` ranks on the fabric in a file, or on stdin for `-`.
    pub(crate) fn from_file(path: &Path, ranks: u32) -> anyhow::Result<Self> {
        let (fabric, stdin) = fabric::read(path)?;
        Self::plan(&fabric, stdin.map_or_else(|| Source::File(path.into()), Source::Text), ranks)
            .with_context(|| format!("{}: no tree for {ranks} ranks", path.display()))
    }

    /// Plan a tree for `ranks` ranks on a generated fabric: one switch, or two leaves and a spine. The spine has no
    /// aggregation node: one of the leaves is the root, and there is one process less on this machine.
    pub(crate) fn generated(levels: u8, ranks: u32) -> anyhow::Result<Self> {
        let leaves = if levels > 1 && ranks > 1 { 2 } else { 1 };
        let leaf_of = |rank| u64::from(rank) * leaves / u64::from(ranks.max(1));
        let text = toml(leaves, ranks, leaf_of);
        let fabric = Fabric::from_toml(&text)?;
        Self::plan(&fabric, Source::Text(text), ranks)
    }

    fn plan(fabric: &Fabric, source: Source, ranks: u32) -> anyhow::Result<Self> {
        let plan = plan::plan(fabric, &HostSelection::First(ranks as usize), &Limits::default())?;
        Ok(Self {
            source,
            devices: plan.nodes.iter().map(|node| node.name.clone()).collect(),
            hosts: plan.ranks.iter().map(|rank| rank.name.clone()).collect(),
            leaves: plan.ranks.iter().map(|rank| rank.leaf).collect(),
            levels: plan.levels,
        })
    }
}

/// Generate a fabric of leaves with their ranks, and a spine if there are two leaves.
fn toml(leaves: u64, ranks: u32, leaf_of: impl Fn(u32) -> u64) -> String {
    let mut text = String::new();
    let mut add = |line: std::fmt::Arguments<'_>| {
        // Writing to a string cannot fail.
        let _ = writeln!(text, "{line}");
    };
    for leaf in 0..leaves {
        add(format_args!("[[switch]]\nname = \"leaf{leaf}\"\naggregation = true"));
    }
    if leaves > 1 {
        add(format_args!("[[switch]]\nname = \"spine0\""));
    }
    for rank in 0..ranks {
        let leaf = leaf_of(rank);
        add(format_args!("[[host]]\nname = \"h{rank}\"\n[[link]]\nends = [\"h{rank}\", \"leaf{leaf}\"]"));
    }
    for leaf in (0..leaves).filter(|_| leaves > 1) {
        add(format_args!("[[link]]\nends = [\"leaf{leaf}\", \"spine0\"]"));
    }
    text
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn two_levels_have_two_leaves_and_no_spine_device() {
        for ranks in [4, 5, 8, 64] {
            let layout = Layout::generated(2, ranks).expect("a plan");
            assert_eq!((layout.levels, layout.devices), (2, vec!["leaf0".into(), "leaf1".into()]), "{ranks} ranks");
        }
        let layout = Layout::generated(2, 4).expect("a plan");
        assert_eq!(layout.hosts, ["h0", "h1", "h2", "h3"]);
        assert_eq!(layout.leaves, [0, 0, 1, 1]);
    }

    #[test]
    fn any_number_of_ranks_has_a_tree() {
        for ranks in 1..=9 {
            let one = Layout::generated(1, ranks).expect("a plan");
            assert_eq!((one.levels, one.devices.len()), (1, 1), "{ranks} ranks");
            let two = Layout::generated(2, ranks).expect("a plan");
            assert_eq!(two.levels, if ranks > 1 { 2 } else { 1 }, "{ranks} ranks");
        }
    }

    #[test]
    fn too_small_fabric_error_names_both_numbers_of_hosts() {
        let fabric = Fabric::from_toml(&toml(1, 3, |_| 0)).expect("a fabric");
        let error = Layout::plan(&fabric, Source::Text(String::new()), 9).expect_err("too many");
        assert_eq!(error.to_string(), "9 hosts requested, but the fabric has 3");
    }
}

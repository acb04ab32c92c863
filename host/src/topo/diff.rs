//! The difference of two readings of a fabric: switches, hosts and cables that came or went.
//!
//! Cables go by the names and ports of their ends, so ids may differ. Invariant: of equal fabrics the difference is
//! empty, and it swaps its sides with the fabrics.

use super::{Fabric, Link};
use std::collections::BTreeSet;
use std::fmt;

/// What two readings of a fabric differ in.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Difference {
    /// Switches, hosts and cables that only the first has.
    pub lost: Vec<String>,
    /// Those that only the second has, and rates that changed.
    pub gained: Vec<String>,
}

impl Difference {
    /// Compare two readings.
    pub fn between(before: &Fabric, after: &Fabric) -> Self {
        let (old, new) = (parts(before), parts(after));
        let only = |a: &BTreeSet<String>, b: &BTreeSet<String>| a.difference(b).cloned().collect();
        Self { lost: only(&old, &new), gained: only(&new, &old) }
    }

    /// Whether the two are the same.
    pub fn is_empty(&self) -> bool {
        self.lost.is_empty() && self.gained.is_empty()
    }
}

impl fmt::Display for Difference {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let signed = self.lost.iter().map(|part| ('-', part)).chain(self.gained.iter().map(|part| ('+', part)));
        signed.into_iter().try_for_each(|(sign, part)| writeln!(f, "{sign} {part}"))
    }
}

/// Everything in a fabric, a line each.
fn parts(fabric: &Fabric) -> BTreeSet<String> {
    let switches = fabric.switches().iter().map(|switch| match switch.aggregation {
        Some(_) => format!("switch {}, with a device", switch.name),
        None => format!("switch {}", switch.name),
    });
    let hosts = fabric.hosts().iter().map(|host| format!("host {}", host.name));
    let links = fabric.links().iter().map(|link| cable(fabric, link));
    switches.chain(hosts).chain(links).collect()
}

fn cable(fabric: &Fabric, link: &Link) -> String {
    let end = |port: super::Port| {
        let name = fabric.name(port.device);
        fabric.port_name(port).map_or_else(|| format!("{name}[{}]", port.number), |label| format!("{name}[{label}]"))
    };
    let mut ends = link.ends.map(end);
    ends.sort();
    let rate = link.rate.map_or_else(String::new, |rate| format!(", {rate}"));
    format!("cable {} to {}{rate}", ends[0], ends[1])
}

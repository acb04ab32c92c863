//! Generated fabrics: leaf-spine and fat trees, for tests and for `perf`.
//!
//! Names sort naturally and hosts are numbered leaf by leaf, so the first N hosts fill the first leaves. Every
//! switch has an aggregation node. Host port 1 is cabled; a switch's ports are its hosts' first, then its uplinks.

use super::build::{Builder, Kind};
use super::{Fabric, FabricError, Rate};

/// The shape of a two-level fabric in which every leaf reaches every spine.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct LeafSpine {
    /// Leaf switches, at least 1.
    pub leaves: usize,
    /// Spine switches; may be 0 below a single leaf.
    pub spines: usize,
    /// Hosts at each leaf.
    pub hosts_per_leaf: usize,
    /// Parallel cables between each leaf and each spine, at least 1.
    pub cables: usize,
    /// The rate of every cable.
    pub rate: Option<Rate>,
}

impl Fabric {
    /// Generate a leaf-spine fabric: hosts `h0..`, switches `leaf0..` and `spine0..`.
    ///
    /// # Errors
    /// [`FabricError::Shape`] for no leaf, no cable, several leaves without a spine, or more than 65535 ports on a
    /// switch.
    pub fn leaf_spine(shape: LeafSpine) -> Result<Self, FabricError> {
        let LeafSpine { leaves, spines, hosts_per_leaf, cables, rate } = shape;
        within("leaves", leaves, 1..=PORTS_MAX, "1 to 65535")?;
        within("cables", cables, 1..=PORTS_MAX, "1 to 65535")?;
        within("spines", spines, usize::from(leaves > 1)..=PORTS_MAX, "1 to 65535 (0 below a single leaf)")?;
        within("hosts_per_leaf", hosts_per_leaf, 0..=PORTS_MAX, "0 to 65535")?;
        within("ports per leaf", hosts_per_leaf + spines * cables, 0..=PORTS_MAX, "at most 65535")?;
        within("ports per spine", leaves * cables, 0..=PORTS_MAX, "at most 65535")?;
        let mut builder = Builder::default();
        for spine in 0..spines {
            add_switch(&mut builder, &format!("spine{spine}"))?;
        }
        for leaf in 0..leaves {
            let name = format!("leaf{leaf}");
            add_switch(&mut builder, &name)?;
            for slot in 0..hosts_per_leaf {
                add_host(&mut builder, leaf * hosts_per_leaf + slot, (&name, slot), rate)?;
            }
            for uplink in 0..spines * cables {
                let (spine, cable) = (uplink / cables, uplink % cables);
                let far = (&*format!("spine{spine}"), port(leaf * cables + cable));
                builder.cable((&name, port(hosts_per_leaf + uplink)), far, rate, 0)?;
            }
        }
        builder.finish("a leaf")
    }

    /// Generate a three-level fat tree of `radix`-port switches (Al-Fares et al., SIGCOMM 2008): `radix` pods of
    /// radix/2 edge (`edge<pod>-<i>`) and radix/2 aggregation-layer switches (`agg<pod>-<i>`), (radix/2)^2 cores
    /// (`core<i>`) and radix^3/4 hosts (`h<i>`).
    ///
    /// # Errors
    /// [`FabricError::Shape`] unless the radix is even and 2 to 128.
    pub fn fat_tree(radix: usize, rate: Option<Rate>) -> Result<Self, FabricError> {
        let expected = "an even number from 2 to 128";
        within("radix", radix, 2..=128, expected)?;
        if !radix.is_multiple_of(2) {
            return Err(FabricError::Shape { what: "radix", value: radix, expected });
        }
        let half = radix / 2;
        let mut builder = Builder::default();
        for core in 0..half * half {
            add_switch(&mut builder, &format!("core{core}"))?;
        }
        for pod in 0..radix {
            for agg in 0..half {
                let name = format!("agg{pod}-{agg}");
                add_switch(&mut builder, &name)?;
                for up in 0..half {
                    let core = format!("core{}", agg * half + up);
                    builder.cable((&name, port(half + up)), (&core, port(pod)), rate, 0)?;
                }
            }
            for edge in 0..half {
                let name = format!("edge{pod}-{edge}");
                add_switch(&mut builder, &name)?;
                for slot in 0..half {
                    add_host(&mut builder, (pod * half + edge) * half + slot, (&name, slot), rate)?;
                    let far = (&*format!("agg{pod}-{slot}"), port(edge));
                    builder.cable((&name, port(half + slot)), far, rate, 0)?;
                }
            }
        }
        builder.finish("an edge switch")
    }
}

const PORTS_MAX: usize = u16::MAX as usize;

fn within(
    what: &'static str,
    value: usize,
    range: std::ops::RangeInclusive<usize>,
    expected: &'static str,
) -> Result<(), FabricError> {
    if range.contains(&value) { Ok(()) } else { Err(FabricError::Shape { what, value, expected }) }
}

/// The number of the port with this index; the callers keep the index below 65535.
fn port(index: usize) -> u16 {
    index as u16 + 1
}

fn add_switch(builder: &mut Builder, name: &str) -> Result<(), FabricError> {
    builder.named(Kind::Switch, name, 0)?;
    builder.equip(name);
    Ok(())
}

fn add_host(builder: &mut Builder, host: usize, at: (&str, usize), rate: Option<Rate>) -> Result<(), FabricError> {
    let name = format!("h{host}");
    builder.named(Kind::Host, &name, 0)?;
    builder.cable((&name, 1), (at.0, port(at.1)), rate, 0)
}

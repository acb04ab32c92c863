//! Generated fabrics of textbook shapes, for tests, for planning ahead, and for ibsim.
//!
//! Names sort naturally and hosts are numbered switch by switch, so the first N hosts fill the first switches. Every
//! switch has an aggregation node. Host port 1 is cabled; a switch's ports are its hosts' first, then its cables to
//! other switches.
//!
//! | shape | switches | hosts | cables between switches |
//! |---|---|---|---|
//! | [`Fabric::leaf_spine`] of L leaves, S spines, c cables | L + S | L h | L S c |
//! | [`Fabric::fat_tree`] of radix k | 5 k^2/4 | k^3/4 | k^3/2 |
//! | [`rails`] of n servers, r rails | r (1 + S) | n r | as leaf-spine |
//! | [`dragonfly`] of a, h, p | a (a h + 1) | a p (a h + 1) | groups a (a - 1)/2, and one a pair of groups |
//! | [`dragonfly_plus`] of g groups, l leaves, s spines | g (l + s) | g l p | g l s, and k a pair of groups |
//! | [`torus`], [`mesh`] of d1 x d2 x ... | product | p a switch | product, a dimension (mesh: less its last row) |
//! | [`hypercube`] of d dimensions | 2^d | p a switch | d 2^(d-1) |
//! | [`ring`], [`full_mesh`] of n | n | p a switch | n; n (n - 1)/2 |
//! | [`star`] of n hosts | 1 | n | 0 |

mod direct;
mod groups;

pub use direct::{full_mesh, hypercube, mesh, ring, star, torus};
pub use groups::{Dragonfly, DragonflyPlus, Rails, dragonfly, dragonfly_plus, rails};

use super::build::{Builder, Kind, Node};
use super::{Fabric, FabricError, Format, Rate};

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
        within("hosts", leaves * hosts_per_leaf, 0..=HOSTS_MAX, HOSTS_EXPECTED)?;
        within("cables in all", leaves * spines * cables, 0..=CABLES_MAX, CABLES_EXPECTED)?;
        let mut builder = Builder::default();
        let spines: Vec<Node> =
            (0..spines).map(|spine| add_switch(&mut builder, &format!("spine{spine}"))).collect::<Result<_, _>>()?;
        for leaf in 0..leaves {
            let node = add_switch(&mut builder, &format!("leaf{leaf}"))?;
            for slot in 0..hosts_per_leaf {
                add_host(&mut builder, leaf * hosts_per_leaf + slot, (node, slot), rate)?;
            }
            for uplink in 0..spines.len() * cables {
                let (spine, cable) = (uplink / cables, uplink % cables);
                let far = (spines[spine], port(leaf * cables + cable));
                builder.cable((node, port(hosts_per_leaf + uplink)), far, rate, 0)?;
            }
        }
        builder.finish(Format::Generated, "a leaf")
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
        let cores: Vec<Node> =
            (0..half * half).map(|core| add_switch(&mut builder, &format!("core{core}"))).collect::<Result<_, _>>()?;
        for pod in 0..radix {
            let mut aggs = Vec::with_capacity(half);
            for agg in 0..half {
                let node = add_switch(&mut builder, &format!("agg{pod}-{agg}"))?;
                for up in 0..half {
                    builder.cable((node, port(half + up)), (cores[agg * half + up], port(pod)), rate, 0)?;
                }
                aggs.push(node);
            }
            for edge in 0..half {
                let node = add_switch(&mut builder, &format!("edge{pod}-{edge}"))?;
                for (slot, agg) in aggs.iter().enumerate() {
                    add_host(&mut builder, (pod * half + edge) * half + slot, (node, slot), rate)?;
                    builder.cable((node, port(half + slot)), (*agg, port(edge)), rate, 0)?;
                }
            }
        }
        builder.finish(Format::Generated, "an edge switch")
    }
}

const PORTS_MAX: usize = u16::MAX as usize;
/// Hosts of a generated fabric: those of a fat tree of radix 128.
const HOSTS_MAX: usize = 1 << 19;
const HOSTS_EXPECTED: &str = "at most 524288";
/// Switches of a generated fabric.
const SWITCHES_MAX: usize = 1 << 16;
/// Cables between the switches of a generated fabric.
const CABLES_MAX: usize = 1 << 20;
const CABLES_EXPECTED: &str = "at most 1048576";

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

fn add_switch(builder: &mut Builder, name: &str) -> Result<Node, FabricError> {
    let node = builder.named(Kind::Switch, name, 0)?;
    builder.equip(node);
    Ok(node)
}

fn add_host(builder: &mut Builder, host: usize, at: (Node, usize), rate: Option<Rate>) -> Result<(), FabricError> {
    let node = builder.named(Kind::Host, &format!("h{host}"), 0)?;
    builder.cable((node, 1), (at.0, port(at.1)), rate, 0)
}

/// A cable between switches, on the next free port of each.
fn join(builder: &mut Builder, a: Node, b: Node, rate: Option<Rate>) -> Result<(), FabricError> {
    let full = FabricError::Shape { what: "more ports a switch than", value: PORTS_MAX, expected: "at most 65535" };
    match (builder.free_port(a), builder.free_port(b)) {
        (Some(from), Some(to)) => builder.cable((a, from), (b, to), rate, 0),
        _ => Err(full),
    }
}

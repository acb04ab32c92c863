//! Direct networks: every switch has hosts, and no switch is above another.

use super::{CABLES_EXPECTED, CABLES_MAX, HOSTS_EXPECTED, HOSTS_MAX, PORTS_MAX, SWITCHES_MAX};
use super::{add_host, add_switch, join, within};
use crate::topo::build::{Builder, Node};
use crate::topo::{Fabric, FabricError, Format, Rate};

/// Generate a torus: a mesh whose rows are closed to rings. Switches are called `s<x>-<y>...`, the last dimension
/// counts fastest, and each has `hosts` hosts. A dimension of 2 has one cable, as there is one neighbour.
///
/// # Errors
/// [`FabricError::Shape`] unless there are 1 to 6 dimensions of 2 to 65,535, and at most 65,536 switches and 524,288
/// hosts.
///
/// ```
/// use sumac::topo::generate;
/// let torus = generate::torus(&[4, 4], 1, None)?;
/// assert_eq!((torus.switches().len(), torus.links().len()), (16, 16 + 2 * 16));
/// # Ok::<(), sumac::topo::FabricError>(())
/// ```
pub fn torus(dimensions: &[usize], hosts: usize, rate: Option<Rate>) -> Result<Fabric, FabricError> {
    grid(dimensions, hosts, rate, true)
}

/// Generate a mesh: neighbours along each dimension are joined. Names as in [`torus`].
///
/// # Errors
/// As [`torus`].
pub fn mesh(dimensions: &[usize], hosts: usize, rate: Option<Rate>) -> Result<Fabric, FabricError> {
    grid(dimensions, hosts, rate, false)
}

fn grid(dimensions: &[usize], hosts: usize, rate: Option<Rate>, is_closed: bool) -> Result<Fabric, FabricError> {
    within("dimensions", dimensions.len(), 1..=6, "1 to 6")?;
    let mut count = 1_usize;
    for size in dimensions {
        within("a dimension of", *size, 2..=PORTS_MAX, "2 to 65535")?;
        count = count.saturating_mul(*size);
    }
    let (mut builder, nodes) = switches(count, hosts, rate, |index| {
        let mut rest = index;
        let mut place: Vec<String> = Vec::new();
        for size in dimensions.iter().rev() {
            place.push((rest % size).to_string());
            rest /= size;
        }
        place.reverse();
        format!("s{}", place.join("-"))
    })?;
    let mut stride = count;
    for size in dimensions {
        stride /= size;
        for (index, node) in nodes.iter().enumerate() {
            let at = index / stride % size;
            if at + 1 < *size {
                join(&mut builder, *node, nodes[index + stride], rate)?;
            } else if is_closed && *size > 2 {
                join(&mut builder, *node, nodes[index - at * stride], rate)?;
            }
        }
    }
    builder.finish(Format::Generated, "a switch")
}

/// Generate a hypercube: switches `s<i>` and `s<j>` are joined where i and j differ in one bit.
///
/// # Errors
/// [`FabricError::Shape`] unless there are 1 to 16 dimensions and at most 524,288 hosts.
pub fn hypercube(dimensions: usize, hosts: usize, rate: Option<Rate>) -> Result<Fabric, FabricError> {
    within("dimensions", dimensions, 1..=16, "1 to 16")?;
    let (mut builder, nodes) = switches(1 << dimensions, hosts, rate, |index| format!("s{index}"))?;
    for bit in 0..dimensions {
        for (index, node) in nodes.iter().enumerate().filter(|(index, _)| index >> bit & 1 == 0) {
            join(&mut builder, *node, nodes[index | 1 << bit], rate)?;
        }
    }
    builder.finish(Format::Generated, "a switch")
}

/// Generate a ring of switches `s<i>` with `hosts` hosts each.
///
/// # Errors
/// [`FabricError::Shape`] unless there are 2 to 65,535 switches and at most 524,288 hosts.
pub fn ring(switches: usize, hosts: usize, rate: Option<Rate>) -> Result<Fabric, FabricError> {
    torus(&[switches], hosts, rate)
}

/// Generate a full mesh: each of the switches `s<i>` is joined to each other.
///
/// # Errors
/// [`FabricError::Shape`] unless there are 2 to 1,448 switches and at most 524,288 hosts.
pub fn full_mesh(count: usize, hosts: usize, rate: Option<Rate>) -> Result<Fabric, FabricError> {
    within("switches", count, 2..=PORTS_MAX, "2 to 65535")?;
    within("cables", count * (count - 1) / 2, 0..=CABLES_MAX, CABLES_EXPECTED)?;
    let (mut builder, nodes) = switches(count, hosts, rate, |index| format!("s{index}"))?;
    for (index, node) in nodes.iter().enumerate() {
        for other in &nodes[index + 1..] {
            join(&mut builder, *node, *other, rate)?;
        }
    }
    builder.finish(Format::Generated, "a switch")
}

/// Generate a star: one switch `s0` with all hosts.
///
/// # Errors
/// [`FabricError::Shape`] unless there are at most 65,535 hosts.
pub fn star(hosts: usize, rate: Option<Rate>) -> Result<Fabric, FabricError> {
    let (builder, _) = switches(1, hosts, rate, |index| format!("s{index}"))?;
    builder.finish(Format::Generated, "a switch")
}

/// Add switches with their hosts.
fn switches(
    count: usize,
    hosts: usize,
    rate: Option<Rate>,
    name: impl Fn(usize) -> String,
) -> Result<(Builder, Vec<Node>), FabricError> {
    within("switches", count, 1..=SWITCHES_MAX, "1 to 65536")?;
    within("hosts a switch", hosts, 0..=PORTS_MAX, "0 to 65535")?;
    within("hosts", count * hosts, 0..=HOSTS_MAX, HOSTS_EXPECTED)?;
    let mut builder = Builder::default();
    let mut nodes = Vec::with_capacity(count);
    for index in 0..count {
        let node = add_switch(&mut builder, &name(index))?;
        for slot in 0..hosts {
            add_host(&mut builder, index * hosts + slot, (node, slot), rate)?;
        }
        nodes.push(node);
    }
    Ok((builder, nodes))
}

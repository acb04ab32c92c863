//! What a tree costs: the predicted time of an all-reduce of n bytes, from link rates and a few constants.
//!
//! ```text
//!   T(n) = R + (n - min(n, chunk)) B
//!   R    = 2 (host + the slowest way from a rank to the root), for the first chunk
//!   B    = max(the most loaded cable or device port, R / window), in seconds per byte
//! ```
//!
//! - The way from a rank to the root is the sum of its edges and nodes. An edge takes `cable` for each of its cables
//!   and the first chunk at its rate. A node takes `node`, and `child` for each child.
//! - A cable carries each of its edges once in either direction: its load is the number of edges, of this tree and of
//!   others, times the seconds per byte at its rate.
//! - A device in its switch receives from all ports at once. One behind a port of its own takes in all its children's
//!   bytes through that port.
//!
//! [`FabricCosts::DATA_SHEET`] is not calibrated: it holds for no fabric in particular, but ranks the trees of one.

use super::Refusal;
use crate::topo::{Fabric, LinkId, Rate, Routes};
use serde::{Deserialize, Serialize};
use std::sync::Arc;

/// The constants of the prediction.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
pub struct FabricCosts {
    /// Seconds that a message takes in the sending or receiving host.
    pub host_s: f64,
    /// Seconds over one cable and into the next switch.
    pub cable_s: f64,
    /// Seconds in an aggregation node.
    pub node_s: f64,
    /// Seconds that a node takes for each of its children's messages.
    pub child_s: f64,
    /// The payload of a packet, in bytes.
    pub chunk_bytes: u32,
    /// The bytes that a rank has in flight.
    pub window_bytes: u32,
    /// The rate of cables whose rate the fabric's description does not state, in Gbit/s.
    pub assumed_gbits: f64,
    /// Whether the constants were measured on this fabric.
    pub calibrated: bool,
}

impl FabricCosts {
    /// From data sheets, for any fabric: 130 ns through a switch (NVIDIA QM9700) and 25 ns over 5 m of cable; 600 ns in
    /// an adapter (ConnectX-6); 5 ns a message at its 200 million messages a second. The time in a node is what then
    /// remains of the 2.83 us that 128 hosts take for 8 B through two levels (Graham et al., COM-HPC 2016).
    pub const DATA_SHEET: Self = Self {
        host_s: 0.6e-6,
        cable_s: 0.155e-6,
        node_s: 0.2e-6,
        child_s: 5e-9,
        chunk_bytes: 4096,
        window_bytes: 1 << 20,
        assumed_gbits: 100.0,
        calibrated: false,
    };
}

impl Default for FabricCosts {
    fn default() -> Self {
        Self::DATA_SHEET
    }
}

/// The sizes that a tree is chosen for.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum Size {
    /// One tree for small and large messages: the least product of the times for 8 B and for 16 MiB.
    #[default]
    Any,
    /// Messages of this many bytes.
    Bytes(u64),
}

impl Size {
    /// A small message, in bytes.
    pub const SMALL: u64 = 8;
    /// A large message, in bytes.
    pub const LARGE: u64 = 16 << 20;

    /// The sizes in bytes that count.
    pub(super) const fn bytes(self) -> [u64; 2] {
        match self {
            Self::Any => [Self::SMALL, Self::LARGE],
            Self::Bytes(bytes) => [bytes; 2],
        }
    }
}

/// How trees are priced.
#[derive(Debug, Clone, PartialEq, Default)]
pub struct Pricing {
    /// The constants.
    pub costs: FabricCosts,
    /// The sizes that a tree is chosen for.
    pub size: Size,
    /// How many edges of other trees each cable carries, by [`LinkId`]; `None` if there are none.
    pub load: Option<Arc<[u32]>>,
    /// The fabric's forwarding tables; without them, routes are assumed.
    pub routes: Option<Arc<Routes>>,
}

impl Pricing {
    /// The number of edges of other trees on a cable.
    pub(super) fn others(&self, link: LinkId) -> u32 {
        self.load.as_ref().and_then(|load| load.get(link.0 as usize)).copied().unwrap_or(0)
    }
}

/// The predicted speed of a tree.
#[derive(Debug, Clone, PartialEq)]
pub struct Prediction {
    /// Pairs of a message's size in bytes and the seconds that it takes; the sizes that the tree was chosen for.
    pub times: Vec<(u64, f64)>,
    /// Seconds for the first chunk of bytes there and back.
    pub round_trip_s: f64,
    /// Seconds per further byte: the inverse of the tree's rate.
    pub byte_s: f64,
    /// What keeps the tree from a higher rate.
    pub bottleneck: Bottleneck,
}

impl Prediction {
    /// The tree's rate in Gbit/s.
    pub fn gbits(&self) -> f64 {
        gbits(self.byte_s)
    }
}

/// The rate in Gbit/s that takes so many seconds a byte.
pub(super) fn gbits(byte_s: f64) -> f64 {
    8e-9 / byte_s
}

/// The seconds per byte of a cable that other trees of the same ranks have filled: much more than of any rate.
pub(super) const SATURATED_S: f64 = 1e6;

/// The seconds that a byte takes at a rate.
pub(super) fn byte_s(rate: Option<Rate>, costs: &FabricCosts) -> f64 {
    8e-9 / rate.map_or(costs.assumed_gbits, Rate::gbits)
}

/// What limits a tree's rate.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub enum Bottleneck {
    /// A cable, and the edges on it, those of other trees included.
    Cable {
        /// The cable.
        link: LinkId,
        /// The edges.
        edges: u32,
    },
    /// The port of a device, which all its children's bytes pass.
    Port {
        /// The node's index in the plan.
        node: usize,
        /// The children.
        children: usize,
    },
    /// The window of a rank.
    Window,
}

/// The first chunk of a message, in bytes.
pub(super) fn first_chunk(bytes: u64, costs: &FabricCosts) -> f64 {
    bytes.min(u64::from(costs.chunk_bytes)) as f64
}

/// The predicted time, from the way up for the first chunk and the most loaded cable or port.
pub(super) fn seconds(bytes: u64, way_s: f64, busiest_byte_s: f64, costs: &FabricCosts) -> f64 {
    let round_trip_s = 2.0 * (costs.host_s + way_s);
    let byte_s = busiest_byte_s.max(round_trip_s / f64::from(costs.window_bytes));
    round_trip_s + (bytes as f64 - first_chunk(bytes, costs)) * byte_s
}

/// The limits of each switch's node.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(super) struct NodeLimits {
    /// The maximum number of children; 0 if there is no node.
    pub(super) children_max: usize,
    /// Seconds per byte and child through the device's own port; 0 if it is in the switch.
    pub(super) port_byte_s: f64,
}

impl NodeLimits {
    pub(super) fn of(fabric: &Fabric, limits: &super::Limits) -> Vec<Result<Self, Refusal>> {
        let one = |switch| {
            let children_max = limits.children_max(fabric, switch)?;
            let port = limits.devices.as_ref().and_then(|devices| devices.get(&switch)?.port);
            Ok(Self { children_max, port_byte_s: port.map_or(0.0, |port| byte_s(Some(port), &limits.pricing.costs)) })
        };
        fabric.switch_ids().map(one).collect()
    }
}

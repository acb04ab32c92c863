//! Limits on the nodes of a tree.

use super::cost::Pricing;
use crate::topo::{Fabric, Rate, SwitchId};
use std::collections::BTreeMap;

/// Limits on the nodes of a tree, and how trees are priced.
#[derive(Debug, Clone, PartialEq)]
pub struct Limits {
    /// Maximum number of children of a node, ranks and nodes together; at least 2.
    pub max_children: usize,
    /// Slots that the group needs on every node.
    pub slots_needed: u32,
    /// The usable devices, by switch. `None` allows every aggregation node of the fabric, without limits of its own.
    pub devices: Option<BTreeMap<SwitchId, DeviceLimits>>,
    /// How trees are priced.
    pub pricing: Pricing,
}

impl Default for Limits {
    /// 256 children, as the wire format allows; any device; no other trees.
    fn default() -> Self {
        Self { max_children: 256, slots_needed: 0, devices: None, pricing: Pricing::default() }
    }
}

impl Limits {
    /// The maximum number of children of the switch's aggregation node.
    ///
    /// # Errors
    /// The first condition that rules the switch out as a node.
    pub fn children_max(&self, fabric: &Fabric, switch: SwitchId) -> Result<usize, Refusal> {
        if fabric.switch(switch).aggregation.is_none() {
            return Err(Refusal::NoAggregationNode);
        }
        let Some(devices) = &self.devices else { return Ok(self.max_children) };
        let device = devices.get(&switch).ok_or(Refusal::NoDevice)?;
        if device.slots_free < self.slots_needed {
            return Err(Refusal::TooFewSlots { free: device.slots_free, needed: self.slots_needed });
        }
        match device.max_children.min(self.max_children) {
            0 | 1 => Err(Refusal::TooFewChildren { max_children: device.max_children }),
            usable => Ok(usable),
        }
    }
}

/// The limits of one device.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct DeviceLimits {
    /// Maximum number of children.
    pub max_children: usize,
    /// Slots that are not claimed by other groups.
    pub slots_free: u32,
    /// The rate of the device's own port, through which all its children's bytes pass. `None` if the device is in its
    /// switch and receives from all ports at once.
    pub port: Option<Rate>,
}

/// Why a switch cannot be a node.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum Refusal {
    /// The fabric has no aggregation node there.
    #[error("it has no aggregation node")]
    NoAggregationNode,
    /// No usable device is registered there.
    #[error("no device is registered for it")]
    NoDevice,
    /// The device has too few free slots.
    #[error("its device has {free} free slots; the group needs {needed}")]
    TooFewSlots {
        /// Free slots.
        free: u32,
        /// Slots that the group needs.
        needed: u32,
    },
    /// The device supports too few children.
    #[error("its device supports {max_children} children; a node needs at least 2")]
    TooFewChildren {
        /// The device's limit.
        max_children: usize,
    },
}

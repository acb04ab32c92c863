//! Ranks that share a host combine there first, so that one contribution a host goes up to the leaf device.
//!
//! ```text
//!                 leaf device                 in a switch, or on another host
//!                 /         \                 packets: one contribution and one result a host
//!        host device       host device       a thread of the lowest rank of each host
//!          /    \            /    \          zero-copy
//!      rank 0  rank 1    rank 2  rank 3
//! ```
//!
//! The host device is an ordinary device, one level below the leaf of its ranks. So declared orders, epochs, recovery
//! and leases are those of any tree, and the block of a host is a node of the declared expression. It serves one job:
//! the controller asks the lowest rank of a host to run it, authorises it by a ticket of the job, plans it for that job
//! alone and disconnects it with the job. If its rank dies, so does the device, and the job goes on or ends as after
//! any loss of a rank.
//!
//! It has one shard, because zero-copy needs that, and a hop to each shard of the device above it. Towards that device
//! it uses UDP or RDMA verbs, as the other devices of the tree do.
//!
//! This crate knows no device but in `emulated`, behind the feature `host-devices`: there an emulated one is started. A
//! program may start devices of another kind ([`HostDevices`]).

#[cfg(feature = "host-devices")]
mod emulated;
mod groups;

pub use groups::HostGroups;
pub(crate) use groups::levels;

use std::any::Any;
use std::fmt;
use std::net::{IpAddr, SocketAddr};
use std::sync::Arc;
use sumac_hal::ctrl::JobTicket;
use sumac_hal::ctrl::secure::Key;
use sumac_hal::udp::UdpConfig;

/// A device for the ranks of a job on one host.
#[derive(Debug, Clone)]
#[non_exhaustive]
pub struct HostDeviceConfig {
    /// The device's name, which the controller has chosen.
    pub name: String,
    /// What the device shows to the controller.
    pub ticket: JobTicket,
    /// The addresses of the controller.
    pub controllers: Vec<SocketAddr>,
    /// The key of the rank, which is good for the device, too.
    pub key: Option<Key>,
    /// The address that the device receives packets on: that of the rank.
    pub bind: IpAddr,
    /// Options of the data port: those of the rank.
    pub udp: UdpConfig,
    /// The RDMA port that it receives packets on, as `DEVICE[:PORT[:GID-INDEX]]` or `auto`, if the devices above it
    /// receive over verbs; `None`: UDP.
    pub verbs: Option<String>,
}

impl HostDeviceConfig {
    /// Configure a device without a key and with default options of its data port.
    pub fn new(name: String, ticket: JobTicket, controllers: Vec<SocketAddr>, bind: IpAddr) -> Self {
        Self { name, ticket, controllers, key: None, bind, udp: UdpConfig::default(), verbs: None }
    }
}

/// A running host device. Dropping it stops the device.
pub type HostDevice = Box<dyn Any + Send + Sync>;

/// Starts host devices.
pub trait HostDevices: fmt::Debug + Send + Sync {
    /// Start a device, which registers with the controller by itself.
    ///
    /// # Errors
    /// The reason why there is none. The ranks of the host then contribute one by one.
    fn start(&self, config: HostDeviceConfig) -> Result<HostDevice, Box<dyn std::error::Error + Send + Sync>>;
}

/// Return what starts the host devices of programs that choose nothing else.
#[cfg(feature = "host-devices")]
pub(crate) fn default_host_devices() -> Option<Arc<dyn HostDevices>> {
    Some(Arc::new(emulated::EmulatedHostDevices))
}

/// Return what starts the host devices of programs that choose nothing else: nothing, without the feature
/// `host-devices`.
#[cfg(not(feature = "host-devices"))]
pub(crate) fn default_host_devices() -> Option<Arc<dyn HostDevices>> {
    None
}

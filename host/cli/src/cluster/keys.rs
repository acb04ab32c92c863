//! Keys of a cluster that this process starts, made for one run.
//!
//! Every user of a machine reaches its loopback, so the controller of a run serves only those who have a key. Devices
//! and ranks get theirs through stdin. The controller's store and the key for `sumac status`, which are read by name,
//! are in [`PrivateMemory`] of this process.

use super::ClusterError;
use crate::layout::Layout;
use std::io;
use std::net::SocketAddr;
use std::path::PathBuf;
use sumac::controller::ControllerAddr;
use sumac::controller::keys::{KeyStore, Principal, PrivateMemory};
use sumac::controller::proto::DEFAULT_TENANT;
use sumac_hal::ctrl::secure::Key;
use zeroize::Zeroizing;

/// The keys of the parts of a cluster.
#[derive(Debug)]
pub(crate) struct ClusterKeys {
    store: PrivateMemory,
    /// By index of the device.
    devices: Vec<Key>,
    rank: Key,
    operator: Key,
    operator_file: PrivateMemory,
}

impl ClusterKeys {
    /// Make keys for the devices of a layout, the ranks, and an operator.
    ///
    /// # Errors
    /// [`ClusterError::System`].
    pub(crate) fn new(layout: &Layout) -> Result<Self, ClusterError> {
        Self::make(layout).map_err(|source| ClusterError::System { what: "make keys for the cluster".into(), source })
    }

    fn make(layout: &Layout) -> io::Result<Self> {
        let mut store = KeyStore::default();
        let mut add = |principal| store.add_random(principal).cloned().map_err(io::Error::other);
        let devices = layout.devices.iter().map(|name| add(Principal::Device { names: vec![name.clone()] }));
        let devices = devices.collect::<io::Result<_>>()?;
        let rank = add(Principal::Tenant { name: DEFAULT_TENANT.into() })?;
        let operator = add(Principal::Operator)?;
        let operator_file = PrivateMemory::new(&text(&operator))?;
        let store = PrivateMemory::new(&store.reveal())?;
        Ok(Self { store, devices, rank, operator, operator_file })
    }

    /// The file that the controller reads.
    pub(super) fn store_path(&self) -> PathBuf {
        self.store.path()
    }

    /// What a device reads from stdin.
    pub(super) fn device_text(&self, index: usize) -> Zeroizing<String> {
        text(&self.devices[index])
    }

    /// The key of the ranks.
    pub(crate) const fn rank(&self) -> &Key {
        &self.rank
    }
}

/// Return how to reach a controller with these keys, as an operator.
pub(crate) fn controller_addr(addr: SocketAddr, keys: Option<&ClusterKeys>) -> ControllerAddr {
    ControllerAddr { key: keys.map(|keys| keys.operator.clone()), ..addr.into() }
}

/// Name a controller, and the command by which this user can watch it.
pub(crate) fn describe_controller(addr: SocketAddr, keys: Option<&ClusterKeys>) -> String {
    let key = keys.map(|keys| format!(" --key-file {}", keys.operator_file.path().display())).unwrap_or_default();
    format!("controller {addr}  watch with: sumac status --watch --controller {addr}{key}")
}

fn text(key: &Key) -> Zeroizing<String> {
    Zeroizing::new(format!("{}\n", key.reveal()))
}

#[cfg(test)]
mod tests {
    use super::*;
    use sumac::controller::keys::read_key;

    #[test]
    fn keys_are_read_by_their_owner_and_good_for_their_parts_only() {
        let layout = Layout::generated(2, 4).expect("a plan");
        let keys = ClusterKeys::new(&layout).expect("keys");
        let store = KeyStore::read(&keys.store_path()).expect("private");
        let principal = |key: &Key| store.find(key.id(), 0).expect("it is in the store").principal.to_string();
        let of_devices: Vec<_> = keys.devices.iter().map(principal).collect();
        assert_eq!(of_devices, layout.devices.iter().map(|name| format!("device {name}")).collect::<Vec<_>>());
        assert_eq!((principal(&keys.rank), principal(&keys.operator)), ("tenant default".into(), "operator".into()));
        assert_eq!(read_key(&keys.operator_file.path()).expect("private"), keys.operator);
        let other = ClusterKeys::new(&layout).expect("keys");
        assert!(other.operator != keys.operator && other.rank != keys.rank);
    }

    #[test]
    fn description_names_the_key_file_and_no_secret() {
        let keys = ClusterKeys::new(&Layout::generated(1, 2).expect("a plan")).expect("keys");
        let addr = SocketAddr::from(([127, 0, 0, 1], 7847));
        let text = describe_controller(addr, Some(&keys));
        let file = keys.operator_file.path().display().to_string();
        let watch = "watch with: sumac status --watch --controller 127.0.0.1:7847";
        assert_eq!(text, format!("controller 127.0.0.1:7847  {watch} --key-file {file}"));
        assert!(!format!("{keys:?}").contains(&keys.operator.reveal_secret().to_string()));
        assert!(describe_controller(addr, None).ends_with(watch));
    }
}

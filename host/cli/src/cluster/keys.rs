//! Keys of a cluster that this process starts, made for one run.
//!
//! Every user of a machine reaches its loopback, so the controller of a run serves only those who have a key. Devices
//! and ranks of this binary get theirs through stdin. What is read by name is in [`PrivateMemory`] of this process: the
//! controller's store, the key for `sumac status`, and that of ranks that are programs of the user.

use super::ClusterError;
use crate::exit::Failure;
use crate::layout::Layout;
use anyhow::anyhow;
use std::io;
use std::net::SocketAddr;
use std::path::{Path, PathBuf};
use sumac::controller::ControllerAddr;
use sumac::controller::keys::{KeyRecord, KeyStore, Principal, PrivateMemory};
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
    rank_file: PrivateMemory,
    operator: Key,
    operator_file: PrivateMemory,
}

impl ClusterKeys {
    /// Make keys for the devices of a layout, ranks of the default tenant, and an operator.
    ///
    /// # Errors
    /// [`ClusterError::System`].
    pub(crate) fn new(layout: &Layout) -> Result<Self, ClusterError> {
        Self::for_tenant(layout, DEFAULT_TENANT)
    }

    /// Make keys for the devices of a layout, ranks of a tenant, and an operator.
    ///
    /// # Errors
    /// [`ClusterError::System`], also if the tenant's name is invalid.
    pub(crate) fn for_tenant(layout: &Layout, tenant: &str) -> Result<Self, ClusterError> {
        Self::make(layout, tenant, KeyStore::default())
            .map_err(|source| ClusterError::System { what: "make keys for the cluster".into(), source })
    }

    /// Make such keys, and accept those that the store of this name has for existing devices, by their index.
    ///
    /// # Errors
    /// [`Failure::Input`] if the store cannot be read or has no key for one of them, and those of [`Self::new`].
    pub(crate) fn with_store(layout: &Layout, path: &Path, given: &[usize]) -> Result<Self, Failure> {
        let store = KeyStore::read(path).map_err(Failure::input)?;
        let names = || given.iter().map(|&index| &layout.devices[index]);
        if let Some(name) = names().find(|name| {
            let is_valid = |record: &KeyRecord| !record.is_revoked && !record.has_expired();
            !store.records().any(|record| record.principal.may_register(name) && is_valid(record))
        }) {
            let path = path.display();
            return Err(Failure::Input(anyhow!(
                "{path} has no valid key for device {name}; make one with `sumac key new --keys {path} --device {name}`"
            )));
        }
        let store = store.only(|record| names().any(|name| record.principal.may_register(name)));
        let made = Self::make(layout, DEFAULT_TENANT, store);
        Ok(made.map_err(|source| ClusterError::System { what: "make keys for the cluster".into(), source })?)
    }

    fn make(layout: &Layout, tenant: &str, mut store: KeyStore) -> io::Result<Self> {
        let mut add = |principal| store.add_random(principal).cloned().map_err(io::Error::other);
        let devices = layout.devices.iter().map(|name| add(Principal::Device { names: vec![name.clone()] }));
        let devices = devices.collect::<io::Result<_>>()?;
        let rank = add(Principal::Tenant { name: tenant.into() })?;
        let operator = add(Principal::Operator)?;
        let (rank_file, operator_file) = (PrivateMemory::new(&text(&rank))?, PrivateMemory::new(&text(&operator))?);
        let store = PrivateMemory::new(&store.reveal())?;
        Ok(Self { store, devices, rank, rank_file, operator, operator_file })
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

    /// The variables by which programs find the keys of ranks and operator: names of files, which programs that this
    /// user starts can open as long as this process runs, and no other ones.
    pub(crate) fn variables(&self) -> [(&'static str, String); 2] {
        let name = |file: &PrivateMemory| file.path().display().to_string();
        [("SUMAC_KEY_FILE", name(&self.rank_file)), (OPERATOR_KEY_FILE, name(&self.operator_file))]
    }
}

/// The variable that names a file with an operator's key, for `status` and `selftest` among the ranks of a run.
pub(crate) const OPERATOR_KEY_FILE: &str = "SUMAC_OPERATOR_KEY_FILE";

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

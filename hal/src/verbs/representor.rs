//! Representors: the switch side of a card's functions in switchdev mode.
//!
//! On a BlueField in DPU mode, and on a host whose card is in switchdev mode, the uplinks and the host's functions
//! appear as representors, which a software switch (OVS) owns. Their RDMA device carries raw Ethernet only: it has no
//! address table and refuses other queue pairs (Linux: drivers/infiniband/hw/mlx5/ib_rep.c). RoCE lives on functions,
//! on a card's own Linux on sub-functions such as `enp3s0f0s0`.
//!
//! A representor is a network interface with a switch's identifier (`phys_switch_id`), which functions do not have, and
//! cards outside switchdev mode refuse to report (Linux: Documentation/networking/switchdev.rst).

use std::fs;
use std::path::Path;

/// Return a representor that an RDMA device belongs to, by the name of its interface; `root` is the folder
/// `/sys/class/infiniband`.
pub(super) fn of(root: &Path, device: &str) -> Option<String> {
    let interfaces = fs::read_dir(root.join(device).join("device/net")).ok()?;
    let mut names: Vec<_> = interfaces.filter_map(Result::ok).filter(|entry| has_switch(&entry.path())).collect();
    names.sort_by_key(fs::DirEntry::file_name);
    names.first().map(|entry| entry.file_name().to_string_lossy().into_owned())
}

fn has_switch(interface: &Path) -> bool {
    fs::read_to_string(interface.join("phys_switch_id")).is_ok_and(|id| !id.trim().is_empty())
}

#[cfg(test)]
pub(super) mod tests {
    use super::*;
    use std::path::PathBuf;

    /// A folder with the files of `/sys/class/infiniband` that matter here.
    pub(in crate::verbs) struct Sysfs(PathBuf);

    impl Sysfs {
        pub(in crate::verbs) fn new() -> Self {
            let thread = format!("{:?}", std::thread::current().id());
            let digits: String = thread.chars().filter(char::is_ascii_digit).collect();
            let root = std::env::temp_dir().join(format!("sumac-sysfs-{}-{digits}", std::process::id()));
            fs::create_dir_all(&root).expect("a folder");
            Self(root)
        }

        pub(in crate::verbs) fn root(&self) -> &Path {
            &self.0
        }

        pub(in crate::verbs) fn interface(&self, device: &str, name: &str, port: Option<&str>, switch: Option<&str>) {
            let folder = self.0.join(device).join("device/net").join(name);
            fs::create_dir_all(&folder).expect("a folder");
            for (file, text) in [("phys_port_name", port), ("phys_switch_id", switch)] {
                text.iter().for_each(|text| fs::write(folder.join(file), format!("{text}\n")).expect("written"));
            }
        }
    }

    impl Drop for Sysfs {
        fn drop(&mut self) {
            let _ = fs::remove_dir_all(&self.0);
        }
    }

    #[test]
    fn only_interfaces_of_a_switch_are_representors() {
        let sysfs = Sysfs::new();
        // A BlueField-2 in DPU mode: one device for the uplink and what the host and sub-functions are connected to.
        sysfs.interface("mlx5_0", "p0", Some("p0"), Some("a4b1c20003ebb808"));
        sysfs.interface("mlx5_0", "pf0hpf", Some("pf0hpf"), Some("a4b1c20003ebb808"));
        sysfs.interface("mlx5_0", "en3f0pf0sf0", Some("pf0sf0"), Some("a4b1c20003ebb808"));
        // Its sub-function, a card outside switchdev mode, and one without an interface.
        sysfs.interface("mlx5_2", "enp3s0f0s0", None, None);
        sysfs.interface("mlx5_4", "ens1f0np0", Some("p0"), Some(""));
        let found = ["mlx5_0", "mlx5_2", "mlx5_4", "mlx5_9"].map(|device| of(sysfs.root(), device));
        assert_eq!(found, [Some("en3f0pf0sf0".into()), None, None, None]);
    }
}

//! The kernel modules that the agent needs, in load order.
//!
//! `depmod` writes `modules.dep`: for each module a line `PATH: PATH…` with its dependencies. Modules that it does not
//! list, such as built-in ones, are ignored and need no loading.

use std::collections::{BTreeMap, BTreeSet};

/// The modules that the agent uses if the hardware exists, in load order: the boot log first, so that later problems
/// can be reported; the host link; pins, which the management port's interrupt comes through, before that port; the
/// NIC; the eMMC of each generation and NVMe; the firmware's variables and the watchdog; their counterparts in an
/// emulated machine.
pub const REQUIRED_MODULES: [&str; 19] = [
    "mlxbf_bootctl",
    "mlxbf_tmfifo",
    "gpio_mlxbf2",
    "pinctrl_mlxbf3",
    "gpio_mlxbf3",
    "mlxbf_gige",
    "mlx5_core",
    "sdhci_of_dwcmshc",
    "dw_mmc_bluefield",
    "mmc_block",
    "nvme",
    "efivarfs",
    "sbsa_gwdt",
    "i6300esb",
    "virtio_mmio",
    "virtio_pci",
    "virtio_rng",
    "virtio_net",
    "virtio_blk",
];

/// The modules of a kernel and their dependencies.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Modules {
    /// Dependencies by path, as in the list.
    needs: BTreeMap<String, Vec<String>>,
}

impl Modules {
    /// Parse a `modules.dep`; malformed lines are ignored.
    pub fn parse(text: &str) -> Self {
        let lines = text.lines().filter_map(|line| line.split_once(':'));
        let owned = |needs: &str| needs.split_whitespace().map(str::to_owned).collect();
        Self { needs: lines.map(|(path, needs)| (path.trim().to_owned(), owned(needs))).collect() }
    }

    /// Return the paths of these modules and their dependencies, each once and after its dependencies. Unlisted modules
    /// are ignored.
    pub fn in_order(&self, names: &[&str]) -> Vec<&str> {
        let (mut order, mut seen) = (Vec::new(), BTreeSet::new());
        for name in names {
            let path = self.needs.keys().find(|path| name_of(path).as_deref() == Some(*name));
            path.into_iter().for_each(|path| self.visit(path, &mut seen, &mut order));
        }
        order
    }

    fn visit<'a>(&'a self, path: &'a str, seen: &mut BTreeSet<&'a str>, order: &mut Vec<&'a str>) {
        // Marked before its dependencies, so that a cycle, which depmod never writes, terminates.
        if seen.insert(path) {
            for need in self.needs.get(path).into_iter().flatten() {
                self.visit(need, seen, order);
            }
            order.push(path);
        }
    }

    /// Format the part of the list for these paths, from which the same order results.
    pub fn part(&self, paths: &[&str]) -> String {
        let line = |path: &&str| {
            let needs = self.needs.get(*path).into_iter().flatten();
            format!("{path}:{}\n", needs.map(|need| format!(" {need}")).collect::<String>())
        };
        paths.iter().map(line).collect()
    }
}

/// Return the name of a file's module: kernel and file names differ in `-` and `_`.
fn name_of(path: &str) -> Option<String> {
    let file = path.rsplit('/').next()?;
    let (stem, _) = file.split_once(".ko")?;
    Some(stem.replace('-', "_"))
}

#[cfg(test)]
mod tests {
    use super::*;

    const LIST: &str = "\
kernel/drivers/net/virtio_net.ko: kernel/drivers/net/net_failover.ko kernel/net/core/failover.ko kernel/virtio/virtio.ko
kernel/drivers/net/net_failover.ko: kernel/net/core/failover.ko
kernel/net/core/failover.ko:
kernel/virtio/virtio.ko.xz:
kernel/drivers/block/virtio-blk.ko.zst: kernel/virtio/virtio.ko.xz
no line
kernel/a.ko: kernel/b.ko
kernel/b.ko: kernel/a.ko
";

    #[test]
    fn dependencies_come_first_and_once() {
        let modules = Modules::parse(LIST);
        let order = modules.in_order(&["virtio_blk", "mlx5_core", "virtio_net", "virtio_blk"]);
        let expected = [
            "kernel/virtio/virtio.ko.xz",
            "kernel/drivers/block/virtio-blk.ko.zst",
            "kernel/net/core/failover.ko",
            "kernel/drivers/net/net_failover.ko",
            "kernel/virtio/virtio.ko",
            "kernel/drivers/net/virtio_net.ko",
        ];
        assert_eq!(order, expected);
        assert_eq!(modules.in_order(&["a"]), ["kernel/b.ko", "kernel/a.ko"], "a cycle terminates");
        assert!(Modules::parse("").in_order(&REQUIRED_MODULES).is_empty());
    }

    /// Names of files as the kernel's makefiles have them, and the order that the hardware requires.
    #[test]
    fn modules_of_cards_are_found_by_their_files() {
        let files = [
            "drivers/gpio/gpio-mlxbf2.ko",
            "drivers/gpio/gpio-mlxbf3.ko.zst",
            "drivers/mmc/host/dw_mmc-bluefield.ko",
            "drivers/mmc/host/dw_mmc-pltfm.ko",
            "drivers/mmc/host/sdhci-of-dwcmshc.ko",
            "drivers/net/ethernet/mellanox/mlxbf_gige/mlxbf_gige.ko",
            "drivers/nvme/host/nvme-core.ko",
            "drivers/nvme/host/nvme.ko",
            "drivers/pinctrl/pinctrl-mlxbf3.ko",
            "drivers/platform/mellanox/mlxbf-bootctl.ko",
            "drivers/platform/mellanox/mlxbf-tmfifo.ko.xz",
        ];
        let need = |file: &str| match file {
            "drivers/mmc/host/dw_mmc-bluefield.ko" => "drivers/mmc/host/dw_mmc-pltfm.ko",
            "drivers/nvme/host/nvme.ko" => "drivers/nvme/host/nvme-core.ko",
            _ => "",
        };
        let list: String = files.iter().map(|file| format!("{file}: {}\n", need(file))).collect();
        let modules = Modules::parse(&list);
        let order = modules.in_order(&REQUIRED_MODULES);
        assert_eq!(order.len(), files.len(), "{order:?}");
        let at = |part: &str| order.iter().position(|path| path.contains(part)).expect("loaded");
        assert_eq!(at("mlxbf-bootctl"), 0, "the log comes first");
        assert!(at("pinctrl") < at("gpio-mlxbf3") && at("gpio-mlxbf3") < at("mlxbf_gige"), "{order:?}");
    }

    #[test]
    fn part_of_the_list_gives_the_same_order() {
        let modules = Modules::parse(LIST);
        let order = modules.in_order(&["virtio_net"]);
        let part = modules.part(&order);
        assert_eq!(Modules::parse(&part).in_order(&["virtio_net"]), order);
        assert!(!part.contains("virtio-blk"), "{part}");
    }
}

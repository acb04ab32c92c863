//! Which of a kernel's modules the agent needs, and in which order they are loaded.
//!
//! `depmod` writes `modules.dep`: a line for each module, `PATH: PATH…`, with those that it needs. Only modules that
//! it names are known here; what a kernel has built in, it does not name, and need not be loaded.

use std::collections::{BTreeMap, BTreeSet};

/// What the agent needs where there is the hardware for it, in this order: the boot log first, so that what follows can
/// be told; the host's network, the NIC and the eMMC of a BlueField; what an emulated machine has in their place.
pub const WANTED: [&str; 11] = [
    "mlxbf_bootctl",
    "mlxbf_tmfifo",
    "mlxbf_gige",
    "mlx5_core",
    "sdhci_of_dwcmshc",
    "mmc_block",
    "virtio_mmio",
    "virtio_pci",
    "virtio_rng",
    "virtio_net",
    "virtio_blk",
];

/// Where modules are, and what each needs.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Modules {
    /// By path, as the list has it.
    needs: BTreeMap<String, Vec<String>>,
}

impl Modules {
    /// Read a `modules.dep`. A line that is none is left out: so is, then, what it stands for.
    pub fn parse(text: &str) -> Self {
        let lines = text.lines().filter_map(|line| line.split_once(':'));
        let owned = |needs: &str| needs.split_whitespace().map(str::to_owned).collect();
        Self { needs: lines.map(|(path, needs)| (path.trim().to_owned(), owned(needs))).collect() }
    }

    /// Return the paths of these modules and of all that they need, each once and behind what it needs. Modules that
    /// are not in the list are left out.
    pub fn in_order(&self, names: &[&str]) -> Vec<&str> {
        let (mut order, mut seen) = (Vec::new(), BTreeSet::new());
        for name in names {
            let path = self.needs.keys().find(|path| name_of(path).as_deref() == Some(*name));
            path.into_iter().for_each(|path| self.visit(path, &mut seen, &mut order));
        }
        order
    }

    fn visit<'a>(&'a self, path: &'a str, seen: &mut BTreeSet<&'a str>, order: &mut Vec<&'a str>) {
        // Seen before its needs: a circle, which depmod does not write, ends.
        if seen.insert(path) {
            for need in self.needs.get(path).into_iter().flatten() {
                self.visit(need, seen, order);
            }
            order.push(path);
        }
    }

    /// Write the part of the list that is about these paths, in which they are still in order.
    pub fn part(&self, paths: &[&str]) -> String {
        let line = |path: &&str| {
            let needs = self.needs.get(*path).into_iter().flatten();
            format!("{path}:{}\n", needs.map(|need| format!(" {need}")).collect::<String>())
        };
        paths.iter().map(line).collect()
    }
}

/// Return the name of the module in a file: kernel and files do not agree on `-` and `_`.
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
    fn what_is_needed_comes_first_and_once() {
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
        assert_eq!(modules.in_order(&["a"]), ["kernel/b.ko", "kernel/a.ko"], "a circle ends");
        assert!(Modules::parse("").in_order(&WANTED).is_empty());
    }

    #[test]
    fn a_part_of_the_list_gives_the_same_order() {
        let modules = Modules::parse(LIST);
        let order = modules.in_order(&["virtio_net"]);
        let part = modules.part(&order);
        assert_eq!(Modules::parse(&part).in_order(&["virtio_net"]), order);
        assert!(!part.contains("virtio-blk"), "{part}");
    }
}

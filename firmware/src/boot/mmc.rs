//! The eMMC boot partitions of the running card, through Linux: block devices, sysfs and debugfs.
//!
//! Which partition is primary is in the eMMC's register EXT_CSD, which debugfs shows in hexadecimal (Linux,
//! drivers/mmc/core/block.c: `ext_csd`). It is read only: the boot loader swaps ([`super::SwapBootOrder`]), so that no
//! command is sent to the eMMC. Bytes: JEDEC JESD84-B51, 7.4.

use super::swap::{BootPartition, BootPartitions, ResetSetting};
use std::fs::{self, File, OpenOptions};
use std::io::{self, Read, Write};
use std::path::{Path, PathBuf};

/// Where the kernel shows what this needs.
const SYSFS: &str = "/sys";
const DEBUGFS: &str = "/sys/kernel/debug";
const DEV: &str = "/dev";
/// The folders of the driver's settings, of newer and older kernels, below sysfs.
const SETTINGS: [&str; 2] = ["bus/platform/devices/MLNXBF04:00", "bus/platform/devices/MLNXBF04:00/driver"];

/// RST_n_FUNCTION: the eMMC is reset with the card if its lower two bits are 1.
const RST_N: usize = 162;
/// PARTITION_CONFIG: bits 3 to 5 are the partition that boots, 1 or 2.
const PARTITION_CONFIG: usize = 179;
const EXT_CSD_BYTES: usize = 512;
/// The longest partition that is read, in bytes: 255 units of 128 KiB (BOOT_SIZE_MULT).
const LEN_MAX_BYTES: u64 = 255 * (128 << 10);

/// The boot partitions.
#[derive(Debug, Clone)]
pub struct EmmcPartitions {
    sysfs: PathBuf,
    dev: PathBuf,
    /// The eMMC, such as `mmcblk0`.
    name: String,
    settings: PathBuf,
    ext_csd: PathBuf,
}

impl EmmcPartitions {
    /// Find the card's eMMC.
    ///
    /// # Errors
    /// There is none with two boot partitions, or the driver `mlxbf-bootctl` or debugfs are not there; the message says
    /// which.
    pub fn find() -> io::Result<Self> {
        Self::find_below(Path::new(SYSFS), Path::new(DEBUGFS), Path::new(DEV))
    }

    fn find_below(sysfs: &Path, debugfs: &Path, dev: &Path) -> io::Result<Self> {
        let missing = |what: &str| io::Error::new(io::ErrorKind::NotFound, what.to_owned());
        let settings = SETTINGS.map(|folder| sysfs.join(folder)).into_iter();
        let settings = settings.into_iter().find(|folder| folder.join(ResetSetting::Action.name()).exists());
        let settings = settings.ok_or_else(|| missing("the driver mlxbf-bootctl is not there"))?;
        let mut names: Vec<_> = fs::read_dir(sysfs.join("block"))?
            .flatten()
            .filter_map(|entry| entry.file_name().into_string().ok()?.strip_suffix("boot1").map(str::to_owned))
            .collect();
        names.sort();
        let name = names.into_iter().next().ok_or_else(|| missing("no eMMC with boot partitions is there"))?;
        let device = fs::canonicalize(sysfs.join("block").join(&name).join("device"))?;
        let card = device.file_name().and_then(|name| name.to_str()).unwrap_or_default();
        let host = card.split(':').next().unwrap_or_default();
        let ext_csd = debugfs.join(host).join(card).join("ext_csd");
        if !ext_csd.exists() {
            return Err(missing("debugfs does not show the eMMC's EXT_CSD"));
        }
        let found = Self { sysfs: sysfs.into(), dev: dev.into(), name, settings, ext_csd };
        if found.ext_csd()?[RST_N] & 3 != 1 {
            return Err(io::Error::other(
                "the eMMC is not reset with the card: `mlxbf-bootctl -e` on the card enables it",
            ));
        }
        Ok(found)
    }

    fn ext_csd(&self) -> io::Result<[u8; EXT_CSD_BYTES]> {
        let text = fs::read_to_string(&self.ext_csd)?;
        let text = text.trim();
        let digit = |at: usize| char::from(*text.as_bytes().get(at)?).to_digit(16);
        let byte = |index: usize| Some((digit(2 * index)? << 4 | digit(2 * index + 1)?) as u8);
        let mut bytes = [0; EXT_CSD_BYTES];
        for (index, to) in bytes.iter_mut().enumerate() {
            let why = || io::Error::new(io::ErrorKind::InvalidData, "EXT_CSD is not 512 bytes in hexadecimal");
            *to = byte(index).ok_or_else(why)?;
        }
        Ok(bytes)
    }

    fn name_of(&self, partition: BootPartition) -> String {
        format!("{}boot{}", self.name, partition as u8)
    }

    fn path(&self, partition: BootPartition) -> PathBuf {
        self.dev.join(self.name_of(partition))
    }
}

impl BootPartitions for EmmcPartitions {
    fn primary(&self) -> io::Result<BootPartition> {
        match self.ext_csd()?[PARTITION_CONFIG] >> 3 & 7 {
            1 => Ok(BootPartition::Boot0),
            2 => Ok(BootPartition::Boot1),
            other => {
                Err(io::Error::other(format!("the eMMC boots from partition {other}, which is no boot partition")))
            }
        }
    }

    fn len_bytes(&self, partition: BootPartition) -> io::Result<u64> {
        let mut file = File::open(self.path(partition))?;
        Ok(io::Seek::seek(&mut file, io::SeekFrom::End(0))?.min(LEN_MAX_BYTES))
    }

    fn read(&self, partition: BootPartition) -> io::Result<Vec<u8>> {
        let mut bytes = Vec::new();
        File::open(self.path(partition))?.take(LEN_MAX_BYTES).read_to_end(&mut bytes)?;
        Ok(bytes)
    }

    /// The kernel lets nobody write a boot partition until it is told to.
    fn write(&mut self, partition: BootPartition, bytes: &[u8]) -> io::Result<()> {
        let force_ro = self.sysfs.join("block").join(self.name_of(partition)).join("force_ro");
        fs::write(&force_ro, "0")?;
        let write = || -> io::Result<()> {
            let mut file = OpenOptions::new().write(true).open(self.path(partition))?;
            file.write_all(bytes)?;
            file.sync_all()
        };
        let written = write();
        fs::write(&force_ro, "1")?;
        written
    }

    fn setting(&self, setting: ResetSetting) -> io::Result<String> {
        fs::read_to_string(self.settings.join(setting.name()))
    }

    fn set(&mut self, setting: ResetSetting, value: &str) -> io::Result<()> {
        // No truncation and no creation: sysfs takes one write.
        let mut file = OpenOptions::new().write(true).open(self.settings.join(setting.name()))?;
        file.write_all(format!("{value}\n").as_bytes())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Folders and files as the kernel shows them.
    fn card(config: u8, rst_n: u8) -> (tempfile::TempDir, io::Result<EmmcPartitions>) {
        let folder = tempfile::tempdir().expect("a folder");
        let root = folder.path();
        let device = root.join("sys/devices/mmc_host/mmc0/mmc0:0001");
        let settings = root.join("sys").join(SETTINGS[1]);
        let debug = root.join("debug/mmc0/mmc0:0001");
        for made in [&device, &settings, &debug, &root.join("sys/block/mmcblk0"), &root.join("dev")] {
            fs::create_dir_all(made).expect("made");
        }
        std::os::unix::fs::symlink(&device, root.join("sys/block/mmcblk0/device")).expect("linked");
        for boot in ["mmcblk0boot0", "mmcblk0boot1"] {
            fs::create_dir_all(root.join("sys/block").join(boot)).expect("made");
            fs::write(root.join("sys/block").join(boot).join("force_ro"), "1").expect("written");
            fs::write(root.join("dev").join(boot), boot.repeat(100)).expect("written");
        }
        for (name, value) in [("reset_action", "emmc\n"), ("second_reset_action", "none\n"), ("post_reset_wdog", "0\n")]
        {
            fs::write(settings.join(name), value).expect("written");
        }
        let mut ext_csd = [0_u8; EXT_CSD_BYTES];
        (ext_csd[PARTITION_CONFIG], ext_csd[RST_N]) = (config, rst_n);
        let text: String = ext_csd.iter().map(|byte| format!("{byte:02x}")).collect();
        fs::write(debug.join("ext_csd"), text + "\n").expect("written");
        let found = EmmcPartitions::find_below(&root.join("sys"), &root.join("debug"), &root.join("dev"));
        (folder, found)
    }

    #[test]
    fn partitions_and_settings_are_those_of_the_kernel() {
        // With BOOT_ACK, and the access bits of a driver that is at work.
        let (folder, found) = card(0x48 | 3, 1);
        let mut emmc = found.expect("an eMMC");
        assert_eq!(emmc.primary().expect("readable"), BootPartition::Boot0);
        assert_eq!(emmc.read(BootPartition::Boot1).expect("readable"), "mmcblk0boot1".repeat(100).as_bytes());
        emmc.write(BootPartition::Boot1, b"new").expect("written");
        assert!(emmc.read(BootPartition::Boot1).expect("readable").starts_with(b"newblk0boot1"));
        let force_ro = folder.path().join("sys/block/mmcblk0boot1/force_ro");
        assert_eq!(fs::read_to_string(force_ro).expect("readable"), "1");
        // A write that fails leaves no partition writable.
        let path = folder.path().join("dev/mmcblk0boot0");
        fs::remove_file(&path).expect("removed");
        emmc.write(BootPartition::Boot0, b"new").expect_err("it is not there");
        let force_ro = folder.path().join("sys/block/mmcblk0boot0/force_ro");
        assert_eq!(fs::read_to_string(force_ro).expect("readable"), "1");
        fs::write(&path, "mmcblk0boot0".repeat(100)).expect("written");
        emmc.set(ResetSetting::Action, "swap_emmc").expect("set");
        assert_eq!(emmc.setting(ResetSetting::Action).expect("readable"), "swap_emmc\n");
        assert_eq!(emmc.len_bytes(BootPartition::Boot0).expect("readable"), 1200);
        assert_eq!(card(0x50, 1).1.expect("an eMMC").primary().expect("readable"), BootPartition::Boot1);
        assert!(card(0x38, 1).1.expect("an eMMC").primary().is_err(), "the user area boots");
    }

    #[test]
    fn missing_part_of_the_system_is_named() {
        let (folder, found) = card(0x48, 1);
        found.expect("an eMMC");
        let why = |folder: &Path| {
            let found = EmmcPartitions::find_below(&folder.join("sys"), &folder.join("debug"), &folder.join("dev"));
            found.expect_err("something is missing").to_string()
        };
        fs::remove_dir_all(folder.path().join("debug/mmc0")).expect("removed");
        assert!(why(folder.path()).contains("EXT_CSD"));
        fs::remove_dir_all(folder.path().join("sys/block/mmcblk0boot1")).expect("removed");
        assert!(why(folder.path()).contains("no eMMC"));
        fs::remove_dir_all(folder.path().join("sys/bus")).expect("removed");
        assert!(why(folder.path()).contains("mlxbf-bootctl"));
        let error = card(0x48, 0).1.expect_err("a reset does not reach it").to_string();
        assert!(error.contains("mlxbf-bootctl -e"), "{error}");
    }
}

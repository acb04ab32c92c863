//! The names of images, their order in the stream, and the cards that they are for.

use std::fmt;
use std::str::FromStr;
use thiserror::Error;

/// The highest known version. Images for a later card than BlueField-3 are listed, verified and copied, but no
/// [`Generation`] takes them.
pub const VERSION_MAX: u8 = 3;

/// The kind of an image, as in the header's `image_id`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct ImageId(pub u8);

impl ImageId {
    /// Trusted boot firmware, second boot loader (BL2), which every bootable stream has.
    pub const BL2: Self = Self(1);
    /// Information about the stream; holds Sumac's manifest.
    pub const INFO: Self = Self(50);
    /// The boot menu's entry.
    pub const BOOT_DESC: Self = Self(57);
    /// Path of the boot image, as UEFI writes it.
    pub const BOOT_PATH: Self = Self(58);
    /// Arguments of the boot image.
    pub const BOOT_ARGS: Self = Self(59);
    /// The kernel, or any other UEFI application.
    pub const IMAGE: Self = Self(62);
    /// Initial RAM file system of the kernel.
    pub const INITRAMFS: Self = Self(63);

    /// Return whether it changes the card's firmware when the stream boots, rather than what the stream boots:
    /// capsules of UEFI, firmware of the NIC, images for recovery.
    pub const fn is_firmware_update(self) -> bool {
        // nicfw, cfg-gi, dpu-gi, upgrade-image, capsule.
        matches!(self.0, 41 | 48 | 49 | 51 | 52)
    }

    /// Return its name in `mlx-mkbfb`, if it has one.
    pub fn name(self) -> Option<&'static str> {
        ORDER.iter().find(|(_, id)| *id == self.0).map(|(name, _)| *name)
    }

    /// Return the id of a name.
    pub fn from_name(name: &str) -> Option<Self> {
        ORDER.iter().find(|(known, _)| *known == name).map(|(_, id)| Self(*id))
    }

    /// Return its place in the stream's order, which consumers require. Unknown ids have none.
    pub fn rank(self) -> Option<usize> {
        ORDER.iter().position(|(_, id)| *id == self.0)
    }

    /// Return its bit in `following_images`; 0 for ids from 64 on, which have none.
    pub const fn bit(self) -> u64 {
        if self.0 < 64 { 1 << self.0 } else { 0 }
    }
}

impl fmt::Display for ImageId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.name() {
            Some(name) => f.pad(name),
            None => write!(f, "id{}", self.0),
        }
    }
}

/// An image of a stream: there is at most one of each id and version.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct ImageName {
    /// The kind of the image.
    pub id: ImageId,
    /// The cards that it is for: 0 BlueField-1, or all if the id has no higher version; 1 BlueField-2; 2 BlueField-3;
    /// 3 a later card.
    pub version: u8,
}

impl ImageName {
    /// Create a name.
    pub const fn new(id: ImageId, version: u8) -> Self {
        Self { id, version }
    }
}

impl fmt::Display for ImageName {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}-v{}", self.id, self.version)
    }
}

impl FromStr for ImageName {
    type Err = ImageNameError;

    /// Parse `NAME` or `NAME-vN`, as in `mlx-mkbfb`'s options; the default version is 0.
    fn from_str(text: &str) -> Result<Self, ImageNameError> {
        let (name, version) = match text.rsplit_once("-v") {
            // No known name ends like this; others, such as `boot-vxy`, are unknown anyway.
            Some((name, digits)) if digits.bytes().all(|byte| byte.is_ascii_digit()) && !digits.is_empty() => {
                let version = digits.parse().ok().filter(|version| *version <= VERSION_MAX);
                (name, version.ok_or_else(|| ImageNameError::Version(text.into()))?)
            }
            _ => (text, 0),
        };
        let id = ImageId::from_name(name).ok_or_else(|| ImageNameError::Unknown(text.into()))?;
        Ok(Self { id, version })
    }
}

/// Why a text is not an image name.
#[derive(Debug, Clone, PartialEq, Eq, Error)]
#[non_exhaustive]
pub enum ImageNameError {
    /// The name is unknown.
    #[error(
        "{0:?} is not an image name; use NAME or NAME-v0 to NAME-v3, with NAME as in mlx-mkbfb's options, such as image or boot-args"
    )]
    Unknown(String),
    /// The version exceeds [`VERSION_MAX`].
    #[error("{0:?}: the version has to be 0 to {VERSION_MAX}")]
    Version(String),
}

/// The generation of a card, which determines the version of each image that it uses.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Generation {
    /// BlueField (1).
    BlueField1,
    /// BlueField-2.
    BlueField2,
    /// BlueField-3.
    BlueField3,
}

impl Generation {
    /// All generations that the format supports.
    pub const ALL: [Self; 3] = [Self::BlueField1, Self::BlueField2, Self::BlueField3];

    /// Return the version of its images.
    pub const fn version(self) -> u8 {
        match self {
            Self::BlueField1 => 0,
            Self::BlueField2 => 1,
            Self::BlueField3 => 2,
        }
    }

    /// Return its name.
    pub const fn name(self) -> &'static str {
        match self {
            Self::BlueField1 => "bluefield-1",
            Self::BlueField2 => "bluefield-2",
            Self::BlueField3 => "bluefield-3",
        }
    }

    /// Return the generation of a name.
    pub fn from_name(name: &str) -> Option<Self> {
        Self::ALL.into_iter().find(|generation| generation.name() == name)
    }

    /// Return whether an image of this version was made for it, where `highest` is the highest version of the same id
    /// in the stream. As in `mlxbf-bootctl`, an id that exists only in version 0 is for all cards. It may use images of
    /// lower versions, too: [`Generation::choose`].
    pub const fn takes(self, version: u8, highest: u8) -> bool {
        version == self.version() || highest == 0
    }

    /// Return which of an id's versions it uses: the highest up to its own, as the filter of `mlx-mkbfb` keeps. A
    /// BlueField-2 thus boots with arguments of version 0, which BlueField-1 shares with it.
    pub fn choose(self, versions: impl IntoIterator<Item = u8>) -> Option<u8> {
        versions.into_iter().filter(|version| *version <= self.version()).max()
    }
}

impl fmt::Display for Generation {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(self.name())
    }
}

/// Names and ids in the order of `mlx-mkbfb` (Mellanox/bfscripts 2c42ba6), which consumers require.
const ORDER: &[(&str, u8)] = &[
    ("psc-bl", 36),
    ("psc-fw", 37),
    ("bl2r-cert", 31),
    ("bl2r", 30),
    ("bl2r-auth-cert", 42),
    ("bl2-cert", 6),
    ("bl2", 1),
    ("sys", 29),
    ("bl2-auth-cert", 43),
    ("ddr-cert", 38),
    ("ddr_ini", 32),
    ("snps_images", 33),
    ("ddr5_snps_images", 40),
    ("ddr_ate_imem", 34),
    ("ddr_ate_dmem", 35),
    ("bl30-key-cert", 8),
    ("bl30-cert", 12),
    ("bl30", 2),
    ("psc-app", 39),
    ("psc-certs", 53),
    ("trusted-key-cert", 7),
    ("bl31-key-cert", 9),
    ("bl31-cert", 13),
    ("bl31", 3),
    ("bl32-key-cert", 10),
    ("bl32-cert", 14),
    ("bl32", 4),
    ("bl33-key-cert", 11),
    ("bl33-cert", 15),
    ("bl33", 5),
    ("capsule", 52),
    ("boot-acpi", 55),
    ("boot-dtb", 56),
    ("boot-desc", 57),
    ("boot-path", 58),
    ("boot-args", 59),
    ("boot-timeout", 60),
    ("uefi-tests", 61),
    ("nicfw", 41),
    ("ramdisk", 54),
    ("dpu-gi", 49),
    ("cfg-gi", 48),
    ("info", 50),
    ("image", 62),
    ("initramfs", 63),
    ("upgrade-image", 51),
];

//! The images of a boot stream with a custom kernel: the last step of Mellanox/bfb-build.
//!
//! The boot loaders up to UEFI come from a vendor's base stream that the user supplies (`default.bfb` of the package
//! mlxbf-bootimages). UEFI exposes the rest of the stream as files, takes the boot entry from `boot-path`, `boot-args`
//! and `boot-desc`, and starts `image`.

use crate::bfb::{Builder, ImageId, ImageName, Source, WriteError};

/// The stream's `image`, as a UEFI device path: the vendor's file system over the boot stream.
pub const BOOT_PATH: &str = "VenHw(F019E406-8C9C-11E5-8797-001ACA00BFC4)/Image";
/// The boot menu's entry.
pub const BOOT_DESC: &str = "Linux from rshim";
/// Kernel arguments by image version: from BlueField-3 on, consoles have other addresses.
pub const BOOT_ARGS: [(u8, &str); 2] = [
    (
        0,
        "console=ttyAMA1 console=hvc0 console=ttyAMA0 earlycon=pl011,0x01000000 earlycon=pl011,0x01800000 initrd=initramfs",
    ),
    (2, "console=hvc0 console=ttyAMA0 earlycon=pl011,0x13010000 initrd=initramfs"),
];

/// The user's choices.
#[derive(Debug, Clone)]
#[non_exhaustive]
pub struct Recipe {
    /// The kernel, or another UEFI application.
    pub kernel: Source,
    /// Its initramfs.
    pub initramfs: Source,
    /// Additional kernel arguments after those of [`BOOT_ARGS`]; may be empty.
    pub more_args: String,
}

impl Recipe {
    /// Boot this kernel with this initramfs.
    pub fn new(kernel: Source, initramfs: Source) -> Self {
        Self { kernel, initramfs, more_args: String::new() }
    }

    /// Insert the images, replacing those of the base.
    ///
    /// # Errors
    /// An image is too long.
    pub fn put_into(&self, builder: &mut Builder) -> Result<(), WriteError> {
        let replaced = [ImageId::IMAGE, ImageId::INITRAMFS, ImageId::BOOT_ARGS, ImageId::BOOT_PATH, ImageId::BOOT_DESC];
        for id in replaced {
            // A version that only the base has would take precedence on its cards.
            builder.remove(id);
        }
        builder.insert(ImageName::new(ImageId::IMAGE, 0), self.kernel.clone())?;
        builder.insert(ImageName::new(ImageId::INITRAMFS, 0), self.initramfs.clone())?;
        let text = |text: &str| Source::Bytes(text.as_bytes().to_vec());
        builder.insert(ImageName::new(ImageId::BOOT_PATH, 0), text(BOOT_PATH))?;
        builder.insert(ImageName::new(ImageId::BOOT_DESC, 0), text(BOOT_DESC))?;
        for (version, args) in BOOT_ARGS {
            let args = [args, self.more_args.as_str()].join(" ");
            builder.insert(ImageName::new(ImageId::BOOT_ARGS, version), text(args.trim_end()))?;
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn recipe_replaces_all_versions_of_the_bases_boot_images() {
        let mut builder = Builder::new();
        let bytes = |text: &str| Source::Bytes(text.as_bytes().to_vec());
        for (id, version) in [(ImageId::BL2, 2), (ImageId::IMAGE, 2), (ImageId::BOOT_ARGS, 1)] {
            builder.insert(ImageName::new(id, version), bytes("base")).expect("fits");
        }
        let mut recipe = Recipe::new(bytes("kernel"), bytes("files"));
        recipe.more_args = "quiet".into();
        recipe.put_into(&mut builder).expect("fits");
        let images: Vec<_> = builder.images().map(|(name, _)| name.to_string()).collect();
        let expected =
            ["bl2-v2", "boot-desc-v0", "boot-path-v0", "boot-args-v0", "boot-args-v2", "image-v0", "initramfs-v0"];
        assert_eq!(images, expected);
        let args = builder.images().find(|(name, _)| name.to_string() == "boot-args-v2");
        let expected = bytes("console=hvc0 console=ttyAMA0 earlycon=pl011,0x13010000 initrd=initramfs quiet");
        assert_eq!(args.map(|(_, source)| source.clone()), Some(expected));
    }
}

//! The images of a boot stream with a custom kernel: the last step of Mellanox/bfb-build.
//!
//! The boot loaders up to UEFI come from a vendor's base stream that the user supplies (`default.bfb` of the package
//! mlxbf-bootimages). UEFI exposes the rest of the stream as files, takes the boot entry from `boot-path`, `boot-args`
//! and `boot-desc`, and starts `image`.

use crate::bfb::{Builder, ImageId, ImageName, Source, WriteError};
use std::io::{self, Read};
use thiserror::Error;

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

/// Why a file is not a kernel that UEFI starts.
#[derive(Debug, Error)]
#[non_exhaustive]
pub enum KernelError {
    /// It is compressed.
    #[error("is compressed with {0}, which UEFI does not unpack: pass the uncompressed Image, or one with EFI_ZBOOT")]
    Compressed(&'static str),
    /// An arm64 Image without a header for UEFI.
    #[error("is an arm64 Image that UEFI cannot start: build it with CONFIG_EFI_STUB")]
    NoEfiStub,
    /// An application for another processor.
    #[error("is an application for UEFI, but for another processor (machine {0:#06x}, not 0xaa64, arm64)")]
    Machine(u16),
    /// Anything else.
    #[error("is neither an arm64 Image nor another application for UEFI (it has no PE header)")]
    Other,
    /// It cannot be read.
    #[error("cannot be read: {0}")]
    Read(#[from] io::Error),
}

/// How much of a kernel is read: a header may be anywhere in the first pages.
const HEAD_BYTES: u64 = 4096;

/// What compressed files begin with.
const COMPRESSED: [(&[u8], &str); 6] = [
    (b"\x1f\x8b", "gzip"),
    (b"\x28\xb5\x2f\xfd", "zstd"),
    (b"\xfd7zXZ\0", "xz"),
    (b"BZh", "bzip2"),
    (b"\x04\x22\x4d\x18", "lz4"),
    (b"\x02\x21\x4c\x18", "lz4"),
];

/// Check that UEFI on a card can start a kernel: it needs a PE header for arm64 (Microsoft, "PE Format"; Linux,
/// Documentation/arch/arm64/booting.rst).
///
/// # Errors
/// [`KernelError`].
pub fn check_kernel(kernel: &Source) -> Result<(), KernelError> {
    let mut head = Vec::new();
    kernel.open()?.take(HEAD_BYTES).read_to_end(&mut head)?;
    if let Some((_, name)) = COMPRESSED.iter().find(|(magic, _)| head.starts_with(magic)) {
        return Err(KernelError::Compressed(name));
    }
    let bytes = |at: usize, len: usize| head.get(at..at.checked_add(len)?);
    let pe_at = || {
        let at = bytes(0x3c, 4).filter(|_| head.starts_with(b"MZ"))?;
        let at = u32::from_le_bytes(at.try_into().ok()?) as usize;
        bytes(at, 4).filter(|magic| *magic == b"PE\0\0").map(|_| at)
    };
    match pe_at().and_then(|at| bytes(at + 4, 2)) {
        Some([0x64, 0xaa]) => Ok(()),
        Some(&[low, high]) => Err(KernelError::Machine(u16::from_le_bytes([low, high]))),
        _ if bytes(56, 4) == Some(b"ARM\x64") => Err(KernelError::NoEfiStub),
        _ => Err(KernelError::Other),
    }
}

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
    use proptest::prelude::*;

    fn check(bytes: &[u8]) -> Result<(), String> {
        check_kernel(&Source::Bytes(bytes.to_vec())).map_err(|error| error.to_string())
    }

    /// An arm64 Image's header: its own magic at 56, and the PE header behind it.
    fn image(machine: [u8; 2]) -> Vec<u8> {
        let mut image = vec![0; 512];
        image[..2].copy_from_slice(b"MZ");
        image[56..60].copy_from_slice(b"ARM\x64");
        image[60] = 64;
        image[64..68].copy_from_slice(b"PE\0\0");
        image[68..70].copy_from_slice(&machine);
        image
    }

    #[test]
    fn only_an_application_for_uefi_on_arm64_is_a_kernel() {
        assert_eq!(check(&image([0x64, 0xaa])), Ok(()));
        for (bytes, part) in [
            (image([0x64, 0x86]), "machine 0x8664"),
            (image([0x64, 0xaa])[..69].to_vec(), "EFI_STUB"),
            ([&[0; 2], &image([0x64, 0xaa])[2..]].concat(), "EFI_STUB"),
            (b"\x1f\x8b\x08\0kernel".to_vec(), "gzip"),
            (b"\xfd7zXZ\0\0".to_vec(), "xz"),
            (b"\x28\xb5\x2f\xfd".to_vec(), "zstd"),
            (Vec::new(), "neither"),
            (b"MZ".to_vec(), "neither"),
            (vec![0x5a; 4096], "neither"),
        ] {
            let error = check(&bytes).expect_err(part);
            assert!(error.contains(part), "{error}");
        }
        let mut far = image([0x64, 0xaa]);
        far[60..64].fill(0xff);
        assert!(check(&far).is_err(), "a PE header beyond the file");
    }

    proptest! {
        #[test]
        fn arbitrary_kernel_does_not_panic(bytes in prop::collection::vec(any::<u8>(), 0..200), at: u32) {
            let mut bytes = [b"MZ", &bytes[..]].concat();
            if bytes.len() > 64 {
                bytes[60..64].copy_from_slice(&at.to_le_bytes());
            }
            let _ = check(&bytes);
        }
    }

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

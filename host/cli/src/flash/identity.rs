//! Which card a record belongs to.
//!
//! `misc` has no serial number, but the card's vital product data has (PCI Local Bus Specification 3.0, Appendix I),
//! which Linux shows for each PCI function. A card over USB, or one whose data cannot be read, is known by its slot
//! alone, and another card may come to be in it. Its records therefore hold for one start of this host and one
//! appearance of the device, as the kernel's numbers for both tell.

use std::fs::{self, File};
use std::io::Read;
use std::os::unix::fs::MetadataExt;
use std::path::Path;
use sumac_firmware::rshim::{Misc, Rshim};

/// The number of this start of the host.
const BOOT_ID: &str = "/proc/sys/kernel/random/boot_id";
/// How much vital product data is read: cards have a few hundred bytes.
const DATA_MAX_BYTES: u64 = 4096;
/// The longest serial number.
const SERIAL_MAX_BYTES: usize = 64;

/// What tells a card from others.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) enum Identity {
    /// Its serial number.
    Serial(String),
    /// Its slot, and a token that changes when another card may be in it.
    Slot { name: String, token: String },
}

impl Identity {
    /// Identify a card from its `misc` and `sysfs`.
    pub(super) fn of(card: &Rshim, misc: &Misc, sysfs: &Path) -> Self {
        let name = misc.dev_name.clone().unwrap_or_else(|| card.folder().display().to_string());
        let folder = function(&name).map(|function| sysfs.join("bus/pci/devices").join(function));
        let data = folder.iter().find_map(|folder| {
            let mut data = Vec::new();
            // Reading beyond the end may fail; what was read counts.
            let _ = File::open(folder.join("vpd")).ok()?.take(DATA_MAX_BYTES).read_to_end(&mut data);
            serial(&data)
        });
        data.map_or_else(|| Self::Slot { token: token(&name, misc, sysfs), name }, Self::Serial)
    }

    /// Return the name of its records.
    pub(super) fn record(&self) -> String {
        match self {
            Self::Serial(serial) => format!("serial-{serial}"),
            Self::Slot { name, .. } => name.clone(),
        }
    }

    /// Return what its records must contain.
    pub(super) fn token(&self) -> Option<&str> {
        match self {
            Self::Serial(_) => None,
            Self::Slot { token, .. } => Some(token),
        }
    }
}

/// Return the first function of a card's PCI device, as in `0000:04:00.0` of `pcie-0000:04:00.2`.
pub(super) fn function(dev_name: &str) -> Option<String> {
    let (device, _) = dev_name.strip_prefix("pcie-")?.rsplit('-').next()?.rsplit_once('.')?;
    let is_address = device.bytes().all(|byte| byte.is_ascii_hexdigit() || byte == b':');
    is_address.then(|| format!("{device}.0"))
}

/// Return a text that changes with this host's start, the appearance of the device, and the model.
fn token(dev_name: &str, misc: &Misc, sysfs: &Path) -> String {
    let boot = fs::read_to_string(BOOT_ID).unwrap_or_default();
    let folder = match (function(dev_name), dev_name.strip_prefix("usb-")) {
        (Some(function), _) => Some(sysfs.join("bus/pci/devices").join(function)),
        (None, Some(port)) if !port.contains('/') => Some(sysfs.join("bus/usb/devices").join(port)),
        _ => None,
    };
    // sysfs never gives the number of a folder again.
    let number = folder.and_then(|folder| fs::metadata(folder).ok()).map_or(0, |folder| folder.ino());
    let model = [&misc.dev_info, &misc.opn].map(|text| text.as_deref().unwrap_or("?")).join(" ");
    format!("{} {number} {model}", boot.trim())
}

/// Return the serial number in vital product data.
fn serial(mut data: &[u8]) -> Option<String> {
    /// A large resource with read-only fields.
    const READ_ONLY: u8 = 0x90;
    loop {
        let (&[tag, low, high], rest) = data.split_first_chunk()?;
        let len = usize::from(u16::from_le_bytes([low, high]));
        // A small resource, such as the end.
        if tag & 0x80 == 0 || rest.len() < len {
            return None;
        }
        let (mut fields, next) = rest.split_at(len);
        while let (READ_ONLY, Some((&[first, second, len], rest))) = (tag, fields.split_first_chunk()) {
            let (value, rest) = rest.split_at_checked(len.into())?;
            if [first, second] == *b"SN" {
                let text = std::str::from_utf8(value).ok()?.trim_matches(|character: char| character <= ' ');
                let is_serial = (1..=SERIAL_MAX_BYTES).contains(&text.len()) && text.bytes().all(|byte| byte > b' ');
                return is_serial.then(|| text.to_owned());
            }
            fields = rest;
        }
        data = next;
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn serial_number_is_read_from_vital_product_data() {
        let with = |fields: &[u8]| {
            let mut data = b"\x82\x04\0NIC!\x90".to_vec();
            data.extend((fields.len() as u16).to_le_bytes());
            [&data[..], fields, b"\x78"].concat()
        };
        let good = with(b"PN\x03B32SN\x0dMT2245X00175 RV\x01\0");
        assert_eq!(serial(&good).as_deref(), Some("MT2245X00175"));
        assert_eq!(serial(&with(b"PN\x03B32")), None);
        assert_eq!(serial(&with(b"SN\x02  ")), None, "blank");
        assert_eq!(serial(&with(b"SN\x03a b")), None);
        assert_eq!(serial(&with(b"SN\xffMT")), None, "longer than the data");
        for len in 0..good.len() {
            let found = serial(&good[..len]);
            assert!(found.is_none() || found.as_deref() == Some("MT2245X00175"), "{len}: {found:?}");
        }
    }

    #[test]
    fn pci_function_is_found_in_the_names_of_the_driver() {
        assert_eq!(function("pcie-0000:04:00.2").as_deref(), Some("0000:04:00.0"));
        assert_eq!(function("pcie-lf-0000:04:00.2").as_deref(), Some("0000:04:00.0"));
        for other in ["usb-2-1.7", "pcie-../x.0", "pcie-", "rshim0"] {
            assert_eq!(function(other), None, "{other}");
        }
    }

    proptest! {
        #[test]
        fn arbitrary_product_data_does_not_panic(data in prop::collection::vec(any::<u8>(), 0..300)) {
            let _ = serial(&data);
            let _ = serial(&[b"\x90\xff\0", &data[..]].concat());
        }
    }
}

//! What is known of a card: from the host's Linux, which shows its network adapter, and from its record.
//!
//! Only `sysfs` is read. The driver of the network adapter need not be loaded; what it would show is absent then.

use super::identity::{Identity, function};
use super::pin::Pin;
use super::record::{Record, unix_s};
use crate::exit::Failure;
use serde::Serialize;
use std::fs;
use std::path::Path;
use sumac_firmware::rshim::{Misc, Rshim};

/// What is known of a card.
#[derive(Debug, Serialize)]
pub(crate) struct Inventory {
    serial: Option<String>,
    /// Vendor's identifier of the card's configuration (`board_id`).
    psid: Option<String>,
    /// The version of the network adapter's firmware.
    nic_firmware: Option<String>,
    /// The address of the host's first interface on the card.
    host_mac: Option<String>,
    record: Option<Record>,
    /// The only version that it may be flashed with.
    pin: Option<Pin>,
    /// Why it is not known to run the recorded image, if it is not.
    not_running: Option<&'static str>,
}

impl Inventory {
    /// Read what is known of a card.
    ///
    /// # Errors
    /// Its record is damaged.
    pub(crate) fn read(card: &Rshim, misc: &Misc, sysfs: &Path, records: &Path) -> Result<Self, Failure> {
        let identity = Identity::of(card, misc, sysfs);
        let record = Record::read(records, &identity)?;
        let pin = Pin::read(records, &identity)?;
        let folder = misc.dev_name.as_deref().and_then(function);
        let folder = folder.map(|function| sysfs.join("bus/pci/devices").join(function));
        let first = |class: &str, file: &str| folder.as_ref().and_then(|folder| first(&folder.join(class), file));
        Ok(Self {
            psid: first("infiniband", "board_id"),
            nic_firmware: first("infiniband", "fw_ver"),
            host_mac: first("net", "address"),
            not_running: record.as_ref().and_then(|record| record.why_not_running(misc, unix_s())),
            record: record.map(Record::without_token),
            pin,
            serial: match identity {
                Identity::Serial(serial) => Some(serial),
                Identity::Slot { .. } => None,
            },
        })
    }

    /// Return what is known as a line of text.
    pub(crate) fn line(&self) -> String {
        let Self { serial, psid, nic_firmware, host_mac, record, pin, not_running } = self;
        let known = [("serial number", serial), ("PSID", psid), ("NIC firmware", nic_firmware), ("MAC", host_mac)];
        let known = known.into_iter().filter_map(|(name, value)| Some(format!("{name} {}", value.as_ref()?)));
        let record = record.as_ref().map_or_else(|| "never flashed from here".into(), Record::line);
        let record = not_running.map_or(record.clone(), |why| format!("{record} ({why})"));
        let pin = pin.as_ref().map(|pin| format!("pinned to {pin}"));
        known.chain([record]).chain(pin).collect::<Vec<_>>().join(", ")
    }
}

/// Pin a card to a version, or to none.
///
/// # Errors
/// It has no serial number, or its pin cannot be changed.
pub(crate) fn set_pin(
    pin: Option<&Pin>,
    card: &Rshim,
    misc: &Misc,
    sysfs: &Path,
    records: &Path,
) -> Result<(), Failure> {
    Pin::set(pin, records, &Identity::of(card, misc, sysfs))
}

/// Return the text of a file of a class's first device.
fn first(class: &Path, file: &str) -> Option<String> {
    let mut devices: Vec<_> = fs::read_dir(class).ok()?.flatten().map(|entry| entry.path()).collect();
    devices.sort();
    let text = fs::read_to_string(devices.first()?.join(file)).ok()?;
    Some(text.trim().to_owned()).filter(|text| !text.is_empty())
}

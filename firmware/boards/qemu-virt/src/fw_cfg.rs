//! QEMU's `fw_cfg` device, which passes options to the guest (QEMU's docs/specs/fw_cfg).

use core::str;

const DATA: *const u8 = 0x0902_0000 as *const u8;
const SELECTOR: *mut u16 = 0x0902_0008 as *mut u16;

/// The item that lists all named ones.
const DIRECTORY: u16 = 0x19;

/// An upper bound for the number of named items.
const FILES_MAX: u32 = 512;

const NAME_BYTES: usize = 56;

fn select(item: u16) {
    // SAFETY: the selector register is there, big-endian, mapped as Device memory; one core uses it.
    unsafe { SELECTOR.write_volatile(item.to_be()) };
}

fn read(bytes: &mut [u8]) {
    for byte in bytes {
        // SAFETY: the data register is there; each read returns the next byte of the selected item.
        *byte = unsafe { DATA.read_volatile() };
    }
}

fn read_u32() -> u32 {
    let mut bytes = [0; 4];
    read(&mut bytes);
    u32::from_be_bytes(bytes)
}

/// Read the item `name` into `buffer`; `None` if it does not exist, does not fit or is not UTF-8.
pub(crate) fn file<'b>(name: &str, buffer: &'b mut [u8]) -> Option<&'b str> {
    select(DIRECTORY);
    for _ in 0..read_u32().min(FILES_MAX) {
        let (len, item) = (read_u32() as usize, read_u32());
        let mut label = [0; NAME_BYTES];
        read(&mut label);
        let label = label.split(|&byte| byte == 0).next().unwrap_or_default();
        if label == name.as_bytes() {
            let bytes = buffer.get_mut(..len)?;
            select((item >> 16) as u16);
            read(bytes);
            return str::from_utf8(bytes).ok();
        }
    }
    None
}

//! QEMU's `fw_cfg` device, which passes options to the guest (QEMU's docs/specs/fw_cfg), through ports.

use crate::cpu;
use core::str;

const SELECTOR: u16 = 0x510;
const DATA: u16 = 0x511;

/// The item that lists all named ones.
const DIRECTORY: u16 = 0x19;

/// An upper bound for the number of named items.
const FILES_MAX: u32 = 512;

const NAME_BYTES: usize = 56;

fn read(bytes: &mut [u8]) {
    bytes.iter_mut().for_each(|byte| *byte = cpu::read_port(DATA));
}

fn read_u32() -> u32 {
    let mut bytes = [0; 4];
    read(&mut bytes);
    u32::from_be_bytes(bytes)
}

/// Read the item `name` into `buffer`; `None` if it does not exist, does not fit or is not UTF-8.
pub(crate) fn file<'b>(name: &str, buffer: &'b mut [u8]) -> Option<&'b str> {
    cpu::write_port_u16(SELECTOR, DIRECTORY);
    for _ in 0..read_u32().min(FILES_MAX) {
        let (len, item) = (read_u32() as usize, read_u32());
        let mut label = [0; NAME_BYTES];
        read(&mut label);
        if label.split(|&byte| byte == 0).next() == Some(name.as_bytes()) {
            let bytes = buffer.get_mut(..len)?;
            cpu::write_port_u16(SELECTOR, (item >> 16) as u16);
            read(bytes);
            return str::from_utf8(bytes).ok();
        }
    }
    None
}

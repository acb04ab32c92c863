//! The board's options, which QEMU's loader puts behind the image (`-device
//! loader,file=...,addr=0x81000000,force-raw=on`).
//!
//! Not `fw_cfg`: on this machine, QEMU before version 8 has it too late for items of the command line.

use core::ptr;
use core::str;

/// Behind the memory of `link.ld`. The text ends with a zero byte, as RAM does that nothing was loaded into.
const ADDRESS: usize = 0x8100_0000;

/// Read the options into `buffer`; `None` if there are none, they do not fit, or they are not UTF-8.
pub(crate) fn read(buffer: &mut [u8]) -> Option<&str> {
    let first = ptr::with_exposed_provenance::<u8>(ADDRESS);
    for (index, byte) in buffer.iter_mut().enumerate() {
        // SAFETY: RAM behind the image, which only the loader writes.
        *byte = unsafe { first.add(index).read_volatile() };
    }
    let len = buffer.iter().position(|&byte| byte == 0).filter(|&len| len > 0)?;
    str::from_utf8(buffer.get(..len)?).ok()
}

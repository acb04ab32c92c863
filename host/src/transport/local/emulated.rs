//! The host devices of every program that starts none of its own: emulated devices, in threads of the rank's process.
//!
//! Nothing runs, and no memory is held, until the controller asks a rank for a device. This file alone names
//! `sumac-firmware`, behind the feature `host-devices`, which is on by default.

use super::{HostDevice, HostDeviceConfig, HostDevices};
use std::error::Error;
use sumac_firmware::emulated::{Board, BoardConfig, ZeroCopyConfig};
use sumac_hal::udp::UdpConfig;

/// Starts emulated devices.
#[derive(Debug)]
pub(super) struct EmulatedHostDevices;

/// The groups of a device: its job's tree, and the next one while the first is released.
const GROUPS: u16 = 4;

/// Slots and their memory, for the window of a tree on a fast network. The kernel allocates what is used.
const SLOTS: u32 = 4096;
const SLOT_MEMORY_BYTES: usize = 64 << 20;

/// What the leaf device may send at once.
const RECEIVE_BUFFER_BYTES: usize = 4 << 20;

impl HostDevices for EmulatedHostDevices {
    fn start(&self, config: HostDeviceConfig) -> Result<HostDevice, Box<dyn Error + Send + Sync>> {
        let HostDeviceConfig { name, ticket, controllers, key, bind, udp, verbs } = config;
        let (controller, others) = controllers.split_first().ok_or("the controller has no address")?;
        let receive_buffer_bytes = udp.receive_buffer_bytes.max(RECEIVE_BUFFER_BYTES);
        let board = Board::start(BoardConfig {
            controller_alternatives: others.to_vec(),
            key,
            bind,
            udp: UdpConfig { receive_buffer_bytes, ..udp },
            verbs,
            groups: GROUPS,
            slots: SLOTS,
            slot_memory_bytes: SLOT_MEMORY_BYTES,
            zero_copy: Some(ZeroCopyConfig { threads: 1, ..ZeroCopyConfig::default() }),
            ticket: Some(ticket),
            ..BoardConfig::new(name, *controller)
        })?;
        Ok(Box::new(board))
    }
}

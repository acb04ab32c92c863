//! The contract between device and host, and between the runtime and the hardware.
#![cfg_attr(not(any(feature = "std", test)), no_std)]

pub mod ctrl;
#[cfg(feature = "emu")]
pub mod emu;
pub mod ids;
pub mod key;
pub mod op;
pub mod port;
pub mod reduce;
pub mod rtt;
pub mod shard;
pub mod time;
#[cfg(all(feature = "udp", target_os = "linux"))]
pub mod udp;
pub mod uplink;
pub mod wire;

//! The contract between device and host, and between the runtime and the hardware.
#![cfg_attr(not(any(feature = "std", test)), no_std)]

#[cfg(feature = "emu")]
pub mod emu;
pub mod ids;
pub mod op;
pub mod port;
pub mod time;
#[cfg(all(feature = "udp", target_os = "linux"))]
pub mod udp;
pub mod wire;

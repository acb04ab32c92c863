//! The contract between device and host, and between the runtime and the hardware.
#![cfg_attr(not(any(feature = "std", test)), no_std)]

pub mod ids;
pub mod op;
pub mod port;
pub mod reduce;
pub mod time;
pub mod wire;

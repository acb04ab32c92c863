//! Boards: what stands between the device runtime and a machine.
//!
//! A board supplies storage, ports, a clock and threads or cores, and puts `sumac-hal` and `sumac-device` together.
//! Here is the *emulated* board ([`emulated`]): the runtime as an ordinary process, on UDP sockets.
#![forbid(unsafe_code)]

pub mod emulated;

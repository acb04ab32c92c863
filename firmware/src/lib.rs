//! Boards, and how Sumac gets onto them.
//!
//! A board supplies storage, ports, a clock and threads or cores, and puts `sumac-hal` and `sumac-device` together.
//! Here is the *emulated* board ([`emulated`]): the runtime as an ordinary process, on UDP sockets. The agent on a
//! BlueField-class card (`firmware/boards/bluefield`) runs the same one on the card's Linux, with sockets of its NIC.
//!
//! BlueField-class cards boot from a stream of images that a host pushes:
//!
//! | module | what |
//! |---|---|
//! | [`bfb`] | the boot stream: read, check, write |
//! | [`emmc`] | its form in an eMMC boot partition |
//! | [`recipe`] | which images an own kernel needs |
//! | [`initramfs`] | the file system whose `/init` is the agent |
//! | [`modules`] | which of a kernel's modules the agent needs, in which order |
//! | [`manifest`] | what is in it, signed; for the stream and for the files on the card |
//! | [`rshim`] | a card's boot FIFO, settings and boot log, as its driver shows them |
//! | [`flash`] | pushing a stream, and following it until the card is up; what to do when it is not |
//! | [`slots`] | two images of which one always boots: what the agent updates itself |
#![forbid(unsafe_code)]

pub mod bfb;
pub mod emmc;
pub mod emulated;
pub mod flash;
pub mod initramfs;
pub mod manifest;
pub mod modules;
pub mod recipe;
pub mod rshim;
pub mod slots;

//! Boards, and the tools that install Sumac on them.
//!
//! A board supplies storage, ports, a clock and threads or cores, and combines `sumac-hal` and `sumac-device`. This
//! crate holds the *emulated* board ([`emulated`]): the runtime as an ordinary process, on UDP sockets. The agent on a
//! BlueField-class card (`firmware/boards/bluefield`) runs the same board on the card's Linux.
//!
//! BlueField-class cards boot from a stream of images that a host pushes (feature `cards`, on by default):
//!
//! | module | what |
//! |---|---|
//! | [`bfb`] | the boot stream format: read, check, write |
//! | [`emmc`] | its format in an eMMC boot partition |
//! | [`recipe`] | the images that boot a custom kernel |
//! | [`initramfs`] | the file system whose `/init` is the agent |
//! | [`modules`] | the kernel modules that the agent needs, in load order |
//! | [`manifest`] | signed manifests of the stream and of the files on the card |
//! | [`rshim`] | a card's boot FIFO, settings and boot log, through its driver |
//! | [`flash`] | writing a stream to a card and monitoring its boot |
//! | [`enrolment`] | a device's key behind a stream |
//! | [`payload`] | what an update slot holds |
//! | [`tail`] | what follows a stream into the boot FIFO: a key, a payload |
//! | [`disk`] | the partitions of slots and store |
//! | [`boot`] | the firmware's boot order: EFI variables |
//! | [`slots`] | A/B update slots, of which one always boots |
//! | [`update`] | an image that reaches the other slot of a card over the network |
#![forbid(unsafe_code)]

#[cfg(feature = "cards")]
pub mod bfb;
#[cfg(feature = "cards")]
pub mod boot;
#[cfg(feature = "cards")]
pub mod disk;
#[cfg(feature = "cards")]
pub mod emmc;
pub mod emulated;
#[cfg(feature = "cards")]
pub mod enrolment;
#[cfg(feature = "cards")]
pub mod flash;
#[cfg(feature = "cards")]
pub mod initramfs;
#[cfg(feature = "cards")]
pub mod manifest;
#[cfg(feature = "cards")]
pub mod modules;
#[cfg(feature = "cards")]
pub mod payload;
#[cfg(feature = "cards")]
pub mod recipe;
#[cfg(feature = "cards")]
pub mod rshim;
#[cfg(feature = "cards")]
pub mod slots;
#[cfg(feature = "cards")]
pub mod tail;
#[cfg(feature = "cards")]
pub mod update;

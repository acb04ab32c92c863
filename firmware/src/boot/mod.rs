//! The firmware's boot order: EFI variables, through Linux's efivarfs, or the eMMC's boot partitions
//! ([`SwapBootOrder`]) where the firmware keeps no variables.
//!
//! Each slot has a boot entry of its own (`Boot####`), which names its partition by GUID and holds the kernel's command
//! line: that of the kernel that was running when the slot was written. A trial is started with `BootNext`, which the
//! firmware deletes before it starts the entry: if the trial panics, hangs until a watchdog resets the machine, or
//! loses power, the firmware goes on with `BootOrder`, and with it the slot that was confirmed last, without any code
//! of ours. A confirmed slot moves to the front of `BootOrder`.
//!
//! ```text
//! Boot0010 "Sumac A"    HD(1,GPT,GUID of the partition)/\KERNEL.EFI    console=… initrd=\INITRD sumac.slot=A
//! Boot0011 "Sumac B"    HD(2,GPT,…)/\KERNEL.EFI                        console=… initrd=\INITRD sumac.slot=B
//! BootOrder 0010 0011 …  BootNext 0011
//! ```
//!
//! Sources: UEFI Specification 2.10, 3.1.3 "Load Options", 3.3 "Globally Defined Variables", 10.3.5.1 "Hard Drive Media
//! Device Path"; Linux, Documentation/filesystems/efivarfs.rst.
//!
//! Invariants: an entry is written completely before an order names it; no order names a slot that is being written;
//! entries of others are never changed, and stay in `BootOrder` in their order.

mod entries;
mod load_option;
mod loader;
mod mmc;
mod order;
mod swap;
mod variables;

pub use entries::BootEntries;
pub use load_option::{LoadOption, Partition};
pub use loader::{LoaderError, SlotLoader, lock_disk};
pub use mmc::EmmcPartitions;
pub use order::{EfiBootOrder, EntryError};
pub use swap::{BootPartition, BootPartitions, ResetSetting, SwapBootOrder, SwapError};
pub use variables::{EFIVARS, Efivarfs, Variables};

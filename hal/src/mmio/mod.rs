//! The device as a PCIe function: one memory region (a BAR) with registers, queues and doorbells.
//!
//! Each rank has its own function, just as each process has its own doorbell page on an RDMA card, so a rank can only
//! break its own queues. The BAR consists of little-endian words at fixed offsets, without pointers or host types. The
//! same layout therefore serves shared memory between processes, ivshmem between a guest and its host, and a PCIe card.
//!
//! | offset | size | what | written by |
//! |---|---|---|---|
//! | 0x0000 | 4 | magic, [`MAGIC`] | device |
//! | 0x0004 | 4 | version: major in bits 16..32, minor in 0..16 | device |
//! | 0x0008 | 8 | boot id: identifies the device's incarnation (PROTOCOL 4) | device |
//! | 0x0010 | 8 | length of the BAR in bytes | device |
//! | 0x0018 | 4 | features, [`Features`] | device |
//! | 0x001c | 4 | status, [`DeviceStatus`] | device |
//! | 0x0020 | 4 | number of queues, 2 to [`QUEUES_MAX`]; queue 0 is the admin queue | device |
//! | 0x0024 | 4 | depth of each queue, a power of two, [`DEPTH_MIN`] to [`DEPTH_MAX`] | device |
//! | 0x0028 | 4 | distance between queues in bytes: [`queue_stride_bytes`] of the depth | device |
//! | 0x002c | 4 | heartbeat: changes with each iteration of the device's runtime | device |
//! | 0x0030 | 4 | DMA profile: a [`Profile`](crate::dma::Profile) | device |
//! | 0x0034 | 4 | DMA element types, [`DtypeSet`](crate::dma::DtypeSet) | device |
//! | 0x0038 | 4 | DMA operators, [`OpSet`](crate::dma::OpSet) | device |
//! | 0x003c | 4 | DMA alignment in bytes, a power of two up to [`DMA_ALIGNMENT_MAX_BYTES`] | device |
//! | 0x0040 | 4 | longest DMA step in bytes | device |
//! | 0x1000 | 4 | control, [`HostControl`] | host |
//! | 0x2000 | | the queues, one stride apart, starting with queue 0 | |
//!
//! Each queue is a block:
//!
//! | offset | size | what | written by |
//! |---|---|---|---|
//! | 0x000 | 0x100 | indices of the submission ring, [`Indices`](crate::ring::Indices) | both |
//! | 0x100 | 0x100 | indices of the completion ring | both |
//! | 0x200 | 4 | the device's doorbell, [`Doorbell`](crate::ring::Doorbell) | both |
//! | 0x280 | 4 | the host's doorbell | both |
//! | 0x300 | 4 | the host's wake threshold: chunks ever answered on this queue, modulo 2^32 | host |
//! | 0x400 | depth x 64 | submission entries, [`SubmissionEntry`] | host |
//! | after those | depth x 64 | completion entries, [`CompletionEntry`], 32 bytes each, twice as many | device |
//!
//! A host that waits for a whole operation sets the threshold at 0x300. The device then rings the host's doorbell only
//! when that many chunks have been answered, or when one of them fails, like virtio's `used_event`. Replies to admin
//! commands always ring.
//!
//! All other bytes are reserved and 0. Registers, like ring indices and doorbells ([`ring`](crate::ring)), are accessed
//! as atomics of their own size, because both sides may write at the same time. Everything that the device wrote before
//! it set [`DeviceStatus::READY`] is visible to a host that has seen that status.
//!
//! If host and device do not share an operating system, a rank gets its function through [`admission`].
//!
//! The positions of the queues follow from a formula instead of a table in the BAR: what a host does not read, it does
//! not have to validate.
//!
//! Invariants: neither side relies on a value that the other side can change after it was checked. The host checks
//! every register once, before it uses the queues. The device never reads its own registers.

pub mod admission;
mod bar;
mod entry;
#[cfg(test)]
mod tests;

pub use bar::{
    BAR_ALIGNMENT_BYTES, Bar, BarError, DEPTH_MAX, DEPTH_MIN, DMA_ALIGNMENT_MAX_BYTES, DeviceStatus, Features,
    FunctionConfig, HostControl, Identity, MAGIC, ProbeError, QUEUES_MAX, Queue, VERSION_MAJOR, VERSION_MINOR,
    bar_len_bytes, queue_stride_bytes,
};
pub use entry::{
    AdminCommand, COMPLETION_WORDS, CompletionEntry, Contribution, EntryError, EntryStatus, OperationLimit,
    SUBMISSION_WORDS, SubmissionEntry,
};

//! The device as a PCIe function: one memory region (a BAR) with registers, queues and doorbells.
//!
//! A rank has a function of its own, as a process has a page of doorbells of its own on an RDMA card: it can break its
//! own queues and nobody else's. What is in the BAR is words at fixed offsets, little-endian, without pointers or
//! types of a host, so that one layout serves shared memory between processes, ivshmem between a guest and its host,
//! and a card.
//!
//! | offset | size | what | written by |
//! |---|---|---|---|
//! | 0x0000 | 4 | magic, [`MAGIC`] | device |
//! | 0x0004 | 4 | version: major in bits 16..32, minor in 0..16 | device |
//! | 0x0008 | 8 | boot id: one life of the device (PROTOCOL 4) | device |
//! | 0x0010 | 8 | length of the BAR in bytes | device |
//! | 0x0018 | 4 | features, [`Features`] | device |
//! | 0x001c | 4 | status, [`DeviceStatus`] | device |
//! | 0x0020 | 4 | number of queues, 2 to [`QUEUES_MAX`]; queue 0 is the admin queue | device |
//! | 0x0024 | 4 | depth of each queue, a power of two, [`DEPTH_MIN`] to [`DEPTH_MAX`] | device |
//! | 0x0028 | 4 | distance of the queues in bytes, [`queue_stride_bytes`] of the depth | device |
//! | 0x002c | 4 | heartbeat: changes with each turn of the device's runtime | device |
//! | 0x0030 | 4 | DMA profile, number of [`Profile`](crate::dma::Profile) | device |
//! | 0x0034 | 4 | DMA element types, [`DtypeSet`](crate::dma::DtypeSet) | device |
//! | 0x0038 | 4 | DMA operators, [`OpSet`](crate::dma::OpSet) | device |
//! | 0x003c | 4 | DMA alignment in bytes, a power of two up to [`DMA_ALIGNMENT_MAX_BYTES`] | device |
//! | 0x0040 | 4 | longest DMA step in bytes | device |
//! | 0x1000 | 4 | control, [`HostControl`] | host |
//! | 0x2000 | | queue 0, then the others, one stride apart | |
//!
//! A queue is a block of:
//!
//! | offset | size | what | written by |
//! |---|---|---|---|
//! | 0x000 | 0x100 | indices of the submission ring, [`Indices`](crate::ring::Indices) | both |
//! | 0x100 | 0x100 | indices of the completion ring | both |
//! | 0x200 | 4 | the device's doorbell, [`Doorbell`](crate::ring::Doorbell) | both |
//! | 0x280 | 4 | the host's doorbell | both |
//! | 0x300 | 4 | what the host waits for: chunks ever answered on this queue, modulo 2^32 | host |
//! | 0x400 | depth x 64 | submission entries, [`SubmissionEntry`] | host |
//! | behind | depth x 64 | completion entries, [`CompletionEntry`], 32 bytes each: twice as many places | device |
//!
//! A host that sleeps until a whole operation is done says so by the word at 0x300: the device rings its doorbell when
//! that many chunks have been answered, and not for each (as virtio's `used_event` does), or when one of them has
//! failed. Answers to admin commands always ring.
//!
//! What is not named is 0 and reserved. Registers are atomics of their own size, as ring indices and doorbells are
//! ([`ring`](crate::ring)): both sides may write at the same time, and what the device wrote before it says
//! [`DeviceStatus::READY`] is there once the host has seen that.
//!
//! Where host and device share no operating system, [`desk`] is how a rank gets its function.
//!
//! Why the layout is a formula and not a table of offsets: what a host does not read, it need not distrust.
//!
//! Invariants: neither side reads back what the other can write and relies on it; the host checks every register once,
//! before it makes a ring of it, and the device never reads its own.

mod bar;
pub mod desk;
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

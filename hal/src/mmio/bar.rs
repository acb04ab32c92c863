//! The registers and the positions of the queues: created by a device, probed by a host.
//!
//! Invariant: a `Bar` and all its queues lie within the memory that it was created from.

use super::entry::{COMPLETION_WORDS, SUBMISSION_WORDS};
use crate::atomic::AtomicU64;
use crate::dma::{Capabilities, DtypeSet, OpSet, Profile};
use crate::ids::BootId;
use crate::ring::{Doorbell, Indices, Line, RingError, SharedRing, WakeThreshold};
use bitflags::bitflags;
use core::marker::PhantomData;
use core::mem::offset_of;
use core::ptr::NonNull;
use core::sync::atomic::{AtomicU32, Ordering};

/// "SUMA" in ASCII, as a little-endian number.
pub const MAGIC: u32 = u32::from_le_bytes(*b"SUMA");

/// The major version of the layout; others are refused. Version 2 added checksums of results to redo records.
pub const VERSION_MAJOR: u16 = 2;

/// The minor version of the layout. Minor versions only assign reserved fields.
pub const VERSION_MINOR: u16 = 0;

/// The maximum number of queues of a function: the admin queue, and one per shard of the device.
pub const QUEUES_MAX: u32 = 64;

/// The minimum depth of a queue.
pub const DEPTH_MIN: u32 = 2;

/// The maximum depth of a queue.
pub const DEPTH_MAX: u32 = 1 << 12;

/// The strictest alignment that a device's DMA engine may require: a page, which memory always provides. Hosts align
/// buffers to it.
pub const DMA_ALIGNMENT_MAX_BYTES: u32 = 4096;

/// The alignment of a BAR's address.
pub const BAR_ALIGNMENT_BYTES: usize = 4096;

const CONTROL_OFFSET: usize = 0x1000;
const QUEUES_OFFSET: usize = 0x2000;
const ENTRIES_OFFSET: usize = 0x400;

bitflags! {
    /// Optional features of a device.
    #[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Default)]
    pub struct Features: u32 {
        /// The device serves zero-copy children.
        const ZERO_COPY = 1 << 0;
        /// The device stops accessing a rank's memory on [`AdminCommand::Fence`](super::AdminCommand::Fence).
        const FENCE = 1 << 1;
        /// The redo slots are in memory that outlives the device's runtime (PROTOCOL 7).
        const REDO = 1 << 2;
        /// The heartbeat changes with each iteration of the device's runtime, and every doorbell causes one. A
        /// heartbeat that does not change after a doorbell means that the runtime is stuck or stopped. Since version
        /// 1.1.
        const HEARTBEAT = 1 << 3;
        /// The device supports straggler limits ([`OperationLimit`](super::OperationLimit)) and reports the ranks that
        /// an operation was completed without. Since version 1.2.
        const STRAGGLERS = 1 << 4;
        /// The device can access only the arena that comes with the function. A rank allocates its memory there and
        /// registers it with its offset as the handle. Since version 1.3.
        const ARENA = 1 << 5;
        /// The device cannot wake ranks, so they have to poll. Since version 1.3.
        const POLL_ONLY = 1 << 6;
    }
}

bitflags! {
    /// The status of a device.
    #[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Default)]
    pub struct DeviceStatus: u32 {
        /// All registers are valid and the queues are served.
        const READY = 1 << 0;
        /// The device accepts no new work and finishes what it has.
        const DRAINING = 1 << 1;
        /// The device no longer serves this function; the rank must attach again.
        const FAILED = 1 << 2;
    }
}

bitflags! {
    /// Requests of the host that concern the whole function.
    #[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Default)]
    pub struct HostControl: u32 {
        /// The queues are in use.
        const ENABLE = 1 << 0;
        /// The host is detaching: abort all work and release its memory.
        const RESET = 1 << 1;
    }
}

/// The device's registers, for their offsets only. Each is accessed as one atomic of its size.
#[repr(C)]
struct Registers {
    magic: u32,
    version: u32,
    boot_id: u64,
    bar_len_bytes: u64,
    features: u32,
    status: u32,
    queue_count: u32,
    queue_depth: u32,
    queue_stride_bytes: u32,
    heartbeat: u32,
    dma_profile: u32,
    dma_dtypes: u32,
    dma_ops: u32,
    dma_alignment_bytes: u32,
    dma_max_len_bytes: u32,
}

/// The start of a queue's block; the entries follow.
#[repr(C)]
struct QueueHead {
    submissions: Indices,
    completions: Indices,
    device_bell: Line,
    host_bell: Line,
    host_threshold: Line,
}

const _: () = {
    assert!(offset_of!(Registers, magic) == 0x00);
    assert!(offset_of!(Registers, version) == 0x04);
    assert!(offset_of!(Registers, boot_id) == 0x08);
    assert!(offset_of!(Registers, bar_len_bytes) == 0x10);
    assert!(offset_of!(Registers, features) == 0x18);
    assert!(offset_of!(Registers, status) == 0x1c);
    assert!(offset_of!(Registers, queue_count) == 0x20);
    assert!(offset_of!(Registers, queue_depth) == 0x24);
    assert!(offset_of!(Registers, queue_stride_bytes) == 0x28);
    assert!(offset_of!(Registers, heartbeat) == 0x2c);
    assert!(offset_of!(Registers, dma_profile) == 0x30);
    assert!(offset_of!(Registers, dma_dtypes) == 0x34);
    assert!(offset_of!(Registers, dma_ops) == 0x38);
    assert!(offset_of!(Registers, dma_alignment_bytes) == 0x3c);
    assert!(offset_of!(Registers, dma_max_len_bytes) == 0x40);
    assert!(size_of::<Registers>() <= CONTROL_OFFSET);
    assert!(offset_of!(QueueHead, submissions) == 0x000);
    assert!(offset_of!(QueueHead, completions) == 0x100);
    assert!(offset_of!(QueueHead, device_bell) == 0x200);
    assert!(offset_of!(QueueHead, host_bell) == 0x280);
    assert!(offset_of!(QueueHead, host_threshold) == 0x300);
    assert!(size_of::<QueueHead>() <= ENTRIES_OFFSET);
    assert!(ENTRIES_OFFSET.is_multiple_of(align_of::<QueueHead>()));
};

/// Return the distance in bytes between queues of `depth`: a head, and 128 bytes per submission.
pub const fn queue_stride_bytes(depth: u32) -> usize {
    (ENTRIES_OFFSET + depth as usize * 8 * (SUBMISSION_WORDS + 2 * COMPLETION_WORDS)).next_multiple_of(4096)
}

/// Return the length in bytes of a BAR with `queues` queues of `depth`.
pub const fn bar_len_bytes(queues: u32, depth: u32) -> usize {
    QUEUES_OFFSET + queues as usize * queue_stride_bytes(depth)
}

/// The parameters of a function.
#[derive(Debug, Clone, Copy)]
pub struct FunctionConfig {
    /// The device's incarnation.
    pub boot_id: BootId,
    /// The device's features.
    pub features: Features,
    /// The number of queues including the admin queue, 2 to [`QUEUES_MAX`].
    pub queues: u32,
    /// The depth of each queue: a power of two from [`DEPTH_MIN`] to [`DEPTH_MAX`].
    pub depth: u32,
    /// The capabilities of the DMA engine.
    pub dma: Capabilities,
}

/// Why a function cannot be created.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum BarError {
    /// The memory is not aligned.
    #[error("BAR at {address:#x} is not aligned to {BAR_ALIGNMENT_BYTES} bytes")]
    Unaligned {
        /// The memory's address.
        address: usize,
    },
    /// The number or depth of the queues is out of range.
    #[error(
        "{queues} queues of depth {depth}; a function has 2 to {QUEUES_MAX} queues, with a depth of {DEPTH_MIN} to \
         {DEPTH_MAX} that is a power of two"
    )]
    Queues {
        /// The number of queues.
        queues: u32,
        /// The depth.
        depth: u32,
    },
    /// The memory is too short.
    #[error("the BAR needs {needed} bytes, but the memory has {len_bytes}")]
    TooShort {
        /// The required length in bytes.
        needed: usize,
        /// The length of the memory in bytes.
        len_bytes: usize,
    },
}

/// Why memory is not a function that this version supports.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum ProbeError {
    /// The magic is wrong.
    #[error("not a Sumac device: magic is {0:#010x}, expected {MAGIC:#010x}")]
    Magic(u32),
    /// The layout has another major version.
    #[error(
        "the device has layout version {major}.{minor}, this build supports {VERSION_MAJOR}.x; update the older side"
    )]
    Version {
        /// The major version.
        major: u16,
        /// The minor version.
        minor: u16,
    },
    /// The device is not ready, or has failed.
    #[error("the device is not ready: status is {0:?}")]
    Status(DeviceStatus),
    /// The registers contradict each other or the memory.
    #[error("invalid device registers: {0}")]
    Registers(#[from] BarError),
    /// The DMA engine requires a stricter alignment than is supported.
    #[error("the device's DMA engine requires an alignment of {found} bytes; the maximum is {DMA_ALIGNMENT_MAX_BYTES}")]
    Alignment {
        /// The alignment that it requires, in bytes.
        found: u32,
    },
    /// A register holds an invalid value.
    #[error("device register {offset:#x} holds {value:#x}, which is not valid in this version")]
    Value {
        /// The register's offset.
        offset: usize,
        /// The register's value.
        value: u64,
    },
}

/// What a host has read from a device's registers and checked.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Identity {
    /// The device's incarnation.
    pub boot_id: BootId,
    /// The minor version of the layout.
    pub version_minor: u16,
    /// The device's features.
    pub features: Features,
    /// The capabilities of the DMA engine, without the limits of its internal queues.
    pub dma: Capabilities,
}

/// A function's memory.
#[derive(Debug, Clone, Copy)]
pub struct Bar<'a> {
    base: NonNull<u8>,
    queues: u32,
    depth: u32,
    memory: PhantomData<&'a [AtomicU64]>,
}

// SAFETY: all accesses are atomic, whatever the other side does.
unsafe impl Send for Bar<'_> {}
// SAFETY: as above.
unsafe impl Sync for Bar<'_> {}

/// One queue of a function.
#[derive(Debug, Clone, Copy)]
pub struct Queue<'a> {
    /// From host to device.
    pub submissions: SharedRing<'a, SUBMISSION_WORDS>,
    /// From device to host.
    pub completions: SharedRing<'a, COMPLETION_WORDS>,
    /// Wakes the device.
    pub device_bell: Doorbell<&'a AtomicU32>,
    /// Wakes the host.
    pub host_bell: Doorbell<&'a AtomicU32>,
    /// The count of answered chunks at which the host wants to be woken.
    pub host_threshold: WakeThreshold<&'a AtomicU32>,
}

impl<'a> Bar<'a> {
    /// Create a function in zeroed memory, as the device, and set [`DeviceStatus::READY`].
    ///
    /// # Errors
    /// [`BarError`]: the memory is misaligned or too short, or the queues are out of range.
    pub fn create(memory: &'a [AtomicU64], config: &FunctionConfig) -> Result<Self, BarError> {
        let bar = Self::in_memory(memory, config.queues, config.depth)?;
        let word = |offset, value: u32| bar.word(offset).store(value.to_le(), Ordering::Relaxed);
        let wide = |offset, value: u64| bar.wide(offset).store(value.to_le(), Ordering::Relaxed);
        word(offset_of!(Registers, magic), MAGIC);
        word(offset_of!(Registers, version), u32::from(VERSION_MAJOR) << 16 | u32::from(VERSION_MINOR));
        wide(offset_of!(Registers, boot_id), config.boot_id.0);
        wide(offset_of!(Registers, bar_len_bytes), bar_len_bytes(config.queues, config.depth) as u64);
        word(offset_of!(Registers, features), config.features.bits());
        word(offset_of!(Registers, queue_count), config.queues);
        word(offset_of!(Registers, queue_depth), config.depth);
        word(offset_of!(Registers, queue_stride_bytes), queue_stride_bytes(config.depth) as u32);
        word(offset_of!(Registers, dma_profile), config.dma.profile as u32);
        word(offset_of!(Registers, dma_dtypes), config.dma.dtypes.bits());
        word(offset_of!(Registers, dma_ops), config.dma.ops.bits());
        word(offset_of!(Registers, dma_alignment_bytes), config.dma.alignment_bytes);
        word(offset_of!(Registers, dma_max_len_bytes), config.dma.max_len_bytes);
        bar.set_status(DeviceStatus::READY);
        Ok(bar)
    }

    /// Probe a function, as the host. Every register is read and checked exactly once.
    ///
    /// # Errors
    /// [`ProbeError`]: the memory is not a function of this version, is not ready, or has an invalid register.
    pub fn probe(memory: &'a [AtomicU64]) -> Result<(Self, Identity), ProbeError> {
        // The smallest BAR, to read the registers; the real size is checked below.
        let registers = Self::in_memory(memory, 2, DEPTH_MIN)?;
        let status = registers.status();
        let word = |offset: usize| u32::from_le(registers.word(offset).load(Ordering::Relaxed));
        let wide = |offset: usize| u64::from_le(registers.wide(offset).load(Ordering::Relaxed));
        let magic = word(offset_of!(Registers, magic));
        if magic != MAGIC {
            return Err(ProbeError::Magic(magic));
        }
        let version = word(offset_of!(Registers, version));
        let (major, minor) = ((version >> 16) as u16, version as u16);
        if major != VERSION_MAJOR {
            return Err(ProbeError::Version { major, minor });
        }
        if !status.contains(DeviceStatus::READY) || status.contains(DeviceStatus::FAILED) {
            return Err(ProbeError::Status(status));
        }
        let depth = word(offset_of!(Registers, queue_depth));
        let bar = Self::in_memory(memory, word(offset_of!(Registers, queue_count)), depth)?;
        let expect =
            |offset, value: u64, holds: bool| if holds { Ok(()) } else { Err(ProbeError::Value { offset, value }) };
        let stride = word(offset_of!(Registers, queue_stride_bytes));
        expect(0x28, stride.into(), stride as usize == queue_stride_bytes(depth))?;
        let len_bytes = wide(offset_of!(Registers, bar_len_bytes));
        expect(0x10, len_bytes, len_bytes == bar_len_bytes(bar.queues, depth) as u64)?;
        let number = word(offset_of!(Registers, dma_profile));
        let profile = Profile::ALL.into_iter().find(|&profile| profile as u32 == number);
        let profile = profile.ok_or(ProbeError::Value { offset: 0x30, value: number.into() })?;
        let alignment_bytes = word(offset_of!(Registers, dma_alignment_bytes));
        expect(0x3c, alignment_bytes.into(), alignment_bytes.is_power_of_two())?;
        if alignment_bytes > DMA_ALIGNMENT_MAX_BYTES {
            return Err(ProbeError::Alignment { found: alignment_bytes });
        }
        let mut dma = Capabilities::new(profile, 0, 0)
            .with_alignment(alignment_bytes)
            .with_max_len(word(offset_of!(Registers, dma_max_len_bytes)));
        dma.dtypes = DtypeSet::from_bits(word(offset_of!(Registers, dma_dtypes)));
        dma.ops = OpSet::from_bits(word(offset_of!(Registers, dma_ops)));
        let identity = Identity {
            boot_id: BootId(wide(offset_of!(Registers, boot_id))),
            version_minor: minor,
            features: Features::from_bits_truncate(word(offset_of!(Registers, features))),
            dma,
        };
        Ok((bar, identity))
    }

    fn in_memory(memory: &'a [AtomicU64], queues: u32, depth: u32) -> Result<Self, BarError> {
        let address = memory.as_ptr().addr();
        if !address.is_multiple_of(BAR_ALIGNMENT_BYTES) {
            return Err(BarError::Unaligned { address });
        }
        let depth_fits = (DEPTH_MIN..=DEPTH_MAX).contains(&depth) && depth.is_power_of_two();
        if !(2..=QUEUES_MAX).contains(&queues) || !depth_fits {
            return Err(BarError::Queues { queues, depth });
        }
        let (needed, len_bytes) = (bar_len_bytes(queues, depth), size_of_val(memory));
        if len_bytes < needed {
            return Err(BarError::TooShort { needed, len_bytes });
        }
        Ok(Self { base: NonNull::from(memory).cast(), queues, depth, memory: PhantomData })
    }

    /// Return the number of queues, including the admin queue.
    pub const fn queues(&self) -> u32 {
        self.queues
    }

    /// Return the depth of each queue.
    pub const fn depth(&self) -> u32 {
        self.depth
    }

    /// Return queue `index`, or `None` if there are fewer. Queue 0 is the admin queue.
    pub fn queue(&self, index: u32) -> Option<Queue<'a>> {
        if index >= self.queues {
            return None;
        }
        let offset = QUEUES_OFFSET + index as usize * queue_stride_bytes(self.depth);
        let depth = self.depth as usize;
        // SAFETY: `in_memory` has checked that all queues lie in the memory, which is borrowed for 'a, and its
        // alignment, of which all offsets keep at least 128 bytes. Every byte of these types is an atomic or padding,
        // for which all values are valid.
        let (head, submissions, completions) = unsafe {
            let block = self.base.add(offset);
            let entries = block.add(ENTRIES_OFFSET).cast::<AtomicU64>();
            (
                block.cast::<QueueHead>().as_ref(),
                NonNull::slice_from_raw_parts(entries, depth * SUBMISSION_WORDS).as_ref(),
                NonNull::slice_from_raw_parts(entries.add(depth * SUBMISSION_WORDS), 2 * depth * COMPLETION_WORDS)
                    .as_ref(),
            )
        };
        let queue = || -> Result<Queue<'a>, RingError> {
            Ok(Queue {
                submissions: SharedRing::new(&head.submissions, submissions)?,
                completions: SharedRing::new(&head.completions, completions)?,
                device_bell: Doorbell::new(&head.device_bell.word),
                host_bell: Doorbell::new(&head.host_bell.word),
                host_threshold: WakeThreshold::new(&head.host_threshold.word),
            })
        };
        queue().ok()
    }

    /// Return the device's status, with acquire ordering.
    pub fn status(&self) -> DeviceStatus {
        let status = self.word(offset_of!(Registers, status)).load(Ordering::Acquire);
        DeviceStatus::from_bits_truncate(u32::from_le(status))
    }

    /// Set the status, as the device, with release ordering.
    pub fn set_status(&self, status: DeviceStatus) {
        self.word(offset_of!(Registers, status)).store(status.bits().to_le(), Ordering::Release);
    }

    /// Return the heartbeat; see [`Features::HEARTBEAT`].
    pub fn heartbeat(&self) -> u32 {
        u32::from_le(self.word(offset_of!(Registers, heartbeat)).load(Ordering::Relaxed))
    }

    /// Set the heartbeat, as the device.
    pub fn set_heartbeat(&self, beat: u32) {
        self.word(offset_of!(Registers, heartbeat)).store(beat.to_le(), Ordering::Relaxed);
    }

    /// Return the host's requests.
    pub fn control(&self) -> HostControl {
        let control = self.word(CONTROL_OFFSET).load(Ordering::Acquire);
        HostControl::from_bits_truncate(u32::from_le(control))
    }

    /// Set the requests, as the host.
    pub fn set_control(&self, control: HostControl) {
        self.word(CONTROL_OFFSET).store(control.bits().to_le(), Ordering::Release);
    }

    /// Return a 32-bit register, at an offset below the queues.
    fn word(&self, offset: usize) -> &'a AtomicU32 {
        debug_assert!(offset.is_multiple_of(4) && offset < QUEUES_OFFSET);
        // SAFETY: the registers are the first bytes of the memory, which is borrowed for 'a as atomics, so nobody has a
        // plain reference to them. Each is reached by atomics of its own size only, here and by all that follow the
        // layout; a peer that writes it in other pieces makes a value of them, and every value is one that the reader
        // checks.
        unsafe { self.base.add(offset).cast().as_ref() }
    }

    /// Return a 64-bit register, at an offset below the queues.
    fn wide(&self, offset: usize) -> &'a AtomicU64 {
        debug_assert!(offset.is_multiple_of(8) && offset < QUEUES_OFFSET);
        // SAFETY: as above.
        unsafe { self.base.add(offset).cast().as_ref() }
    }
}

//! The registers, and where the queues are: made by a device, probed by a host.
//!
//! Invariant: a `Bar` lies wholly in the words that it was made of, and its queues in it.

use super::entry::{COMPLETION_WORDS, SUBMISSION_WORDS};
use crate::dma::{Capabilities, DtypeSet, OpSet, Profile};
use crate::ids::BootId;
use crate::ring::{Doorbell, Indices, Line, RingError, SharedRing, Wanted};
use bitflags::bitflags;
use core::marker::PhantomData;
use core::mem::offset_of;
use core::ptr::NonNull;
use core::sync::atomic::{AtomicU32, AtomicU64, Ordering};

/// "SUMA" in ASCII, the first byte lowest.
pub const MAGIC: u32 = u32::from_le_bytes(*b"SUMA");

/// Layouts of another major version are refused. Since 2, the records of redo slots have checksums of their results.
pub const VERSION_MAJOR: u16 = 2;

/// A later minor version only gives a meaning to what was reserved.
pub const VERSION_MINOR: u16 = 0;

/// The most queues of a function: the admin queue, and one for each of the device's shards.
pub const QUEUES_MAX: u32 = 64;

/// The smallest depth of a queue.
pub const DEPTH_MIN: u32 = 2;

/// The largest depth of a queue.
pub const DEPTH_MAX: u32 = 1 << 12;

/// What a device's engine may ask addresses to be a multiple of, at most: a page, which memory always keeps. A host sizes
/// buffers by it.
pub const DMA_ALIGNMENT_MAX_BYTES: u32 = 4096;

/// What a BAR's address is a multiple of.
pub const BAR_ALIGNMENT_BYTES: usize = 4096;

const CONTROL_OFFSET: usize = 0x1000;
const QUEUES_OFFSET: usize = 0x2000;
const ENTRIES_OFFSET: usize = 0x400;

bitflags! {
    /// What a device has.
    #[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Default)]
    pub struct Features: u32 {
        /// It takes contributions by reference.
        const BY_REFERENCE = 1 << 0;
        /// It lets go of a rank's memory on [`AdminCommand::Fence`](super::AdminCommand::Fence).
        const FENCE = 1 << 1;
        /// Its redo slots are in memory that outlives its runtime (PROTOCOL 7).
        const REDO = 1 << 2;
        /// Its heartbeat changes with each turn of its runtime, and there is a turn whenever it is rung: one that stands
        /// still then is stuck or stopped. Since version 1.1.
        const HEARTBEAT = 1 << 3;
        /// It takes how long an operation waits for ranks ([`OperationLimit`](super::OperationLimit)), and says who has no
        /// part in one. Since version 1.2.
        const STRAGGLERS = 1 << 4;
        /// It reaches only the arena that comes with the function: a rank takes its memory from there, and registers it by
        /// its offset as the handle. Since version 1.3.
        const ARENA = 1 << 5;
        /// It can't wake a rank: who waits for it looks again before long. Since version 1.3.
        const SILENT = 1 << 6;
    }
}

bitflags! {
    /// How a device is.
    #[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Default)]
    pub struct DeviceStatus: u32 {
        /// All registers are valid and the queues are served.
        const READY = 1 << 0;
        /// It takes no new work and finishes what it has.
        const DRAINING = 1 << 1;
        /// It has given up on this function: attach anew.
        const FAILED = 1 << 2;
    }
}

bitflags! {
    /// What a host asks of the whole function.
    #[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Default)]
    pub struct HostControl: u32 {
        /// The queues are in use.
        const ENABLE = 1 << 0;
        /// The host is leaving: end everything, and release its memory.
        const RESET = 1 << 1;
    }
}

/// The device's registers: for their offsets only. Each is read and written as one atomic of its size.
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

/// The head of a queue's block; the entries follow.
#[repr(C)]
struct QueueHead {
    submissions: Indices,
    completions: Indices,
    device_bell: Line,
    host_bell: Line,
    host_wants: Line,
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
    assert!(offset_of!(QueueHead, host_wants) == 0x300);
    assert!(size_of::<QueueHead>() <= ENTRIES_OFFSET);
    assert!(ENTRIES_OFFSET.is_multiple_of(align_of::<QueueHead>()));
};

/// Return the distance of two queues of `depth` in bytes: a head, and 128 bytes for each place.
pub const fn queue_stride_bytes(depth: u32) -> usize {
    (ENTRIES_OFFSET + depth as usize * 8 * (SUBMISSION_WORDS + 2 * COMPLETION_WORDS)).next_multiple_of(4096)
}

/// Return the length in bytes of a BAR with so many queues of `depth`.
pub const fn bar_len_bytes(queues: u32, depth: u32) -> usize {
    QUEUES_OFFSET + queues as usize * queue_stride_bytes(depth)
}

/// What a device's function is to be.
#[derive(Debug, Clone, Copy)]
pub struct FunctionConfig {
    /// The device's life.
    pub boot_id: BootId,
    /// What it has.
    pub features: Features,
    /// The number of queues with the admin queue, 2 to [`QUEUES_MAX`].
    pub queues: u32,
    /// The depth of each, a power of two from [`DEPTH_MIN`] to [`DEPTH_MAX`].
    pub depth: u32,
    /// What its engine can do.
    pub dma: Capabilities,
}

/// Why no function was made.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum BarError {
    /// The memory is not aligned.
    #[error("a BAR is aligned to {BAR_ALIGNMENT_BYTES} bytes: not at {address:#x}")]
    Unaligned {
        /// Where it is.
        address: usize,
    },
    /// The queues are not.
    #[error(
        "a function has 2 to {QUEUES_MAX} queues, of {DEPTH_MIN} to {DEPTH_MAX}, a power of two: not {queues} of {depth}"
    )]
    Queues {
        /// How many.
        queues: u32,
        /// How deep.
        depth: u32,
    },
    /// The memory is shorter.
    #[error("the BAR needs {needed} bytes, and has {len_bytes}")]
    TooShort {
        /// What there must be.
        needed: usize,
        /// What there is.
        len_bytes: usize,
    },
}

/// Why memory is not a function that this version can use.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum ProbeError {
    /// Its first word is another.
    #[error("this is no Sumac device: magic {0:#010x}, expected {MAGIC:#010x}")]
    Magic(u32),
    /// Its layout is of another major version.
    #[error("the device's layout is version {major}.{minor}, and {VERSION_MAJOR}.x is needed: update the older side")]
    Version {
        /// The major version.
        major: u16,
        /// The minor version.
        minor: u16,
    },
    /// It is not ready, or has failed.
    #[error("the device is not ready: status {0:?}")]
    Status(DeviceStatus),
    /// Its registers contradict each other or the memory.
    #[error("the device's registers are wrong: {0}")]
    Registers(#[from] BarError),
    /// Its engine asks for more than memory keeps.
    #[error(
        "the device's engine asks for addresses at multiples of {found} bytes, where memory keeps at most \
         {DMA_ALIGNMENT_MAX_BYTES}"
    )]
    Alignment {
        /// What it asks for.
        found: u32,
    },
    /// Its registers hold a stride or a profile that is not.
    #[error("register {offset:#x} of the device holds {value:#x}, which no device of this version has there")]
    Value {
        /// The register's offset.
        offset: usize,
        /// What it holds.
        value: u64,
    },
}

/// What a host has read from a device's registers, and checked.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Identity {
    /// The device's life.
    pub boot_id: BootId,
    /// The minor version of its layout.
    pub version_minor: u16,
    /// What it has.
    pub features: Features,
    /// What its engine can do; the limits of its own queues are not told.
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

// SAFETY: all accesses are to atomics, whatever the other side does to them.
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
    /// What wakes the device.
    pub device_bell: Doorbell<&'a AtomicU32>,
    /// What wakes the host.
    pub host_bell: Doorbell<&'a AtomicU32>,
    /// What the host waits for.
    pub host_wants: Wanted<&'a AtomicU32>,
}

impl<'a> Bar<'a> {
    /// Make a function in zeroed memory, as its device, and say that it is ready.
    ///
    /// # Errors
    /// [`BarError`].
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

    /// Look at a function as its host: check every register, and trust none of them again.
    ///
    /// # Errors
    /// [`ProbeError`].
    pub fn probe(memory: &'a [AtomicU64]) -> Result<(Self, Identity), ProbeError> {
        // Enough for the registers; a BAR of one queue less than there can be is too short below.
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

    /// Return how many queues there are, with the admin queue.
    pub const fn queues(&self) -> u32 {
        self.queues
    }

    /// Return the depth of each queue.
    pub const fn depth(&self) -> u32 {
        self.depth
    }

    /// Return a queue; 0 is the admin queue. `None` if there are not as many.
    ///
    /// # Panics
    /// Never: the depths that a BAR can have all make rings.
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
                host_wants: Wanted::new(&head.host_wants.word),
            })
        };
        queue().ok()
    }

    /// Return the device's status; whatever it wrote before is visible afterwards.
    pub fn status(&self) -> DeviceStatus {
        let status = self.word(offset_of!(Registers, status)).load(Ordering::Acquire);
        DeviceStatus::from_bits_truncate(u32::from_le(status))
    }

    /// Set the status, as the device.
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

    /// Return what the host asks for.
    pub fn control(&self) -> HostControl {
        let control = self.word(CONTROL_OFFSET).load(Ordering::Acquire);
        HostControl::from_bits_truncate(u32::from_le(control))
    }

    /// Ask for something, as the host.
    pub fn set_control(&self, control: HostControl) {
        self.word(CONTROL_OFFSET).store(control.bits().to_le(), Ordering::Release);
    }

    /// Return a register of 32 bits, below those of the queues.
    fn word(&self, offset: usize) -> &'a AtomicU32 {
        debug_assert!(offset.is_multiple_of(4) && offset < QUEUES_OFFSET);
        // SAFETY: the registers are the first bytes of the memory, which is borrowed for 'a as atomics, so nobody has a
        // plain reference to them. Each is reached by atomics of its own size only, here and by all that follow the layout; a
        // peer that writes it in other pieces makes a value of them, and every value is one that the reader checks.
        unsafe { self.base.add(offset).cast().as_ref() }
    }

    /// Return a register of 64 bits.
    fn wide(&self, offset: usize) -> &'a AtomicU64 {
        debug_assert!(offset.is_multiple_of(8) && offset < QUEUES_OFFSET);
        // SAFETY: as above.
        unsafe { self.base.add(offset).cast().as_ref() }
    }
}

//! Drivers for the network card and entropy source of emulated machines: virtio over MMIO (Virtual I/O Device 1.2,
//! 4.2), for boards without an operating system.
//!
//! Invariants:
//! - frames are read and written in place; a buffer belongs to the driver or to the card, never to both;
//! - no allocation: queues and frames are in statics, and each device is taken once.
#![no_std]

use core::cell::{RefCell, UnsafeCell};
use core::ptr::NonNull;
use core::sync::atomic::{AtomicU64, AtomicUsize, Ordering};
use heapless::Vec;
use smoltcp::phy::{Checksum, Device, DeviceCapabilities, Medium, RxToken, TxToken};
use smoltcp::time::Instant;
use virtio_drivers::device::net::VirtIONetRaw;
use virtio_drivers::device::rng::VirtIORng;
use virtio_drivers::transport::DeviceType;
use virtio_drivers::transport::mmio::{MmioTransport, VirtIOHeader};
use virtio_drivers::{BufferDirection, Hal, PAGE_SIZE, PhysAddr};

/// Descriptors of each queue; QEMU's default limit.
const QUEUE: usize = 256;

/// The maximum number of frames being sent.
const TX_FRAMES: usize = 128;

/// The size of a frame with virtio's header, which is at most 12 + 1,514 bytes.
const FRAME_BYTES: usize = 1536;

/// The virtio slots of a machine.
#[derive(Debug, Clone, Copy)]
pub struct Slots {
    first: usize,
    count: usize,
    first_interrupt: u32,
}

/// A bit for each slot whose device is taken: a machine has one such region.
static TAKEN: AtomicU64 = AtomicU64::new(0);

/// The distance of two slots in bytes.
const SLOT_BYTES: usize = 0x200;

/// Pages for the queues: one network card per core, and one entropy source.
const DMA_PAGES: usize = 64;

#[repr(C, align(4096))]
struct Pages(UnsafeCell<[[u8; PAGE_SIZE]; DMA_PAGES]>);

// SAFETY: `dma_alloc` hands out each page once.
unsafe impl Sync for Pages {}

static PAGES: Pages = Pages(UnsafeCell::new([[0; PAGE_SIZE]; DMA_PAGES]));
static PAGES_TAKEN: AtomicUsize = AtomicUsize::new(0);

/// Memory as virtio devices access it: identity-mapped and coherent.
struct Memory;

// SAFETY: `dma_alloc` hands out each zeroed page of a static once; addresses are the same on both sides.
unsafe impl Hal for Memory {
    fn dma_alloc(pages: usize, _direction: BufferDirection) -> (PhysAddr, NonNull<u8>) {
        let first = PAGES_TAKEN.fetch_add(pages, Ordering::Relaxed);
        assert!(first + pages <= DMA_PAGES, "{pages} more pages for queues: {first} of {DMA_PAGES} are in use");
        let page = PAGES.0.get().cast::<[u8; PAGE_SIZE]>().wrapping_add(first).cast::<u8>();
        let page = NonNull::new(page).unwrap_or(NonNull::dangling());
        (page.as_ptr() as PhysAddr, page)
    }

    unsafe fn dma_dealloc(_physical: PhysAddr, _virtual: NonNull<u8>, _pages: usize) -> i32 {
        // Queues are never freed.
        0
    }

    unsafe fn mmio_phys_to_virt(physical: PhysAddr, _size: usize) -> NonNull<u8> {
        NonNull::new(physical as *mut u8).unwrap_or(NonNull::dangling())
    }

    unsafe fn share(buffer: NonNull<[u8]>, _direction: BufferDirection) -> PhysAddr {
        buffer.cast::<u8>().as_ptr() as PhysAddr
    }

    unsafe fn unshare(_physical: PhysAddr, _buffer: NonNull<[u8]>, _direction: BufferDirection) {}
}

impl Slots {
    /// Describe `count` slots from address `first` on, with interrupts from `first_interrupt` on.
    ///
    /// # Safety
    /// The machine has virtio MMIO slots there, mapped as uncached memory at the same addresses, and nothing else uses
    /// them.
    pub const unsafe fn new(first: usize, count: usize, first_interrupt: u32) -> Self {
        Self { first, count, first_interrupt }
    }

    /// Return the slots with devices of a kind.
    fn of(self, kind: DeviceType) -> impl Iterator<Item = usize> {
        (0..self.count).filter(move |slot| {
            // SAFETY: a virtio slot, as `new` requires; empty ones report kind 0.
            let found = unsafe { ((self.first + slot * SLOT_BYTES + KIND_OFFSET) as *const u32).read_volatile() };
            found == kind as u32
        })
    }

    /// Take the `nth` device of a kind, and its interrupt; `None` if there is none or it is taken.
    fn take(self, kind: DeviceType, nth: usize) -> Option<(MmioTransport<'static>, u32)> {
        let slot = self.of(kind).nth(nth)?;
        let bit = 1_u64.checked_shl(slot as u32)?;
        if TAKEN.fetch_or(bit, Ordering::AcqRel) & bit != 0 {
            return None;
        }
        let header = NonNull::new((self.first + slot * SLOT_BYTES) as *mut VirtIOHeader)?;
        // SAFETY: the slot holds a device that was not taken before.
        let transport = unsafe { MmioTransport::new(header, SLOT_BYTES) }.ok()?;
        Some((transport, self.first_interrupt + slot as u32))
    }

    /// Return the number of network cards.
    pub fn network_cards(self) -> usize {
        self.of(DeviceType::Network).count()
    }

    /// Take the machine's entropy source, if it has one that is not taken.
    pub fn entropy(self) -> Option<EntropySource> {
        let (transport, _) = self.take(DeviceType::EntropySource, 0)?;
        VirtIORng::new(transport).ok().map(EntropySource)
    }
}

/// An entropy source.
pub struct EntropySource(VirtIORng<Memory, MmioTransport<'static>>);

impl EntropySource {
    /// Return random bytes; `None` if the device fails. Waits until the device has them.
    pub fn bytes<const N: usize>(&mut self) -> Option<[u8; N]> {
        let (mut bytes, mut have) = ([0; N], 0);
        while have < N {
            have += self.0.request_entropy(&mut bytes[have..]).ok().filter(|&count| count > 0)?;
        }
        Some(bytes)
    }
}

/// The offset of the device id (4.2.2): reading it has no side effects.
const KIND_OFFSET: usize = 8;

/// The frames of a card: put them in a `static` cell.
#[derive(Debug)]
pub struct Frames {
    rx: [[u8; FRAME_BYTES]; QUEUE],
    tx: [[u8; FRAME_BYTES]; TX_FRAMES],
}

impl Frames {
    /// Return empty frames.
    pub const fn new() -> Self {
        Self { rx: [[0; FRAME_BYTES]; QUEUE], tx: [[0; FRAME_BYTES]; TX_FRAMES] }
    }
}

impl Default for Frames {
    fn default() -> Self {
        Self::new()
    }
}

/// The card's queues, and the transmit frames.
struct Queues {
    card: VirtIONetRaw<Memory, MmioTransport<'static>, QUEUE>,
    tx: &'static mut [[u8; FRAME_BYTES]; TX_FRAMES],
    free: Vec<u8, TX_FRAMES>,
    /// The frame that each descriptor sends, and its length with virtio's header.
    sent: [(u8, u16); QUEUE],
}

/// A network card.
pub struct Nic {
    // Separate cells, because a received frame may be answered while it is processed.
    rx: RefCell<&'static mut [[u8; FRAME_BYTES]; QUEUE]>,
    queues: RefCell<Queues>,
    interrupt: u32,
}

impl Nic {
    /// Take network card `nth` and give it its buffers.
    ///
    /// # Panics
    /// If the card does not exist or is taken: such a board is of no use.
    pub fn new(slots: Slots, nth: usize, frames: &'static mut Frames) -> Self {
        let Some((transport, interrupt)) = slots.take(DeviceType::Network, nth) else {
            panic!("no network card {nth}: start QEMU with -device virtio-net-device");
        };
        let mut card = match VirtIONetRaw::new(transport) {
            Ok(card) => card,
            Err(error) => panic!("virtio-net: {error}"),
        };
        let Frames { rx, tx } = frames;
        for (index, frame) in rx.iter_mut().enumerate() {
            // SAFETY: the frame belongs to the card until `receive_complete` returns it; nothing accesses it meanwhile.
            let token = unsafe { card.receive_begin(frame) };
            // There is one descriptor for each frame, and it returns before it is used again, so the numbers stay the
            // same.
            assert!(token == Ok(index as u16), "descriptor {index} of an empty queue");
        }
        card.enable_interrupts();
        let free = (0..TX_FRAMES as u8).collect();
        let queues = RefCell::new(Queues { card, tx, free, sent: [(0, 0); QUEUE] });
        Self { rx: RefCell::new(rx), queues, interrupt }
    }

    /// Return its MAC address.
    pub fn mac(&self) -> [u8; 6] {
        self.queues.borrow().card.mac_address()
    }

    /// Return the number of its interrupt.
    pub const fn interrupt(&self) -> u32 {
        self.interrupt
    }

    /// Acknowledge the interrupt: the next frame raises it again.
    pub fn acknowledge(&mut self) {
        self.queues.get_mut().card.ack_interrupt();
    }
}

impl Queues {
    /// Reclaim frames that were sent.
    fn reap(&mut self) {
        while let Some(token) = self.card.poll_transmit() {
            let (frame, len) = self.sent[usize::from(token)];
            let bytes = &self.tx[usize::from(frame)][..usize::from(len)];
            // SAFETY: the same bytes as at `transmit_begin`.
            if unsafe { self.card.transmit_complete(token, bytes) }.is_err() {
                panic!("virtio-net gave back descriptor {token}, which was not its own");
            }
            // There is room for all frames.
            let _ = self.free.push(frame);
        }
    }
}

/// A received frame: a descriptor that the card is done with.
pub struct Received<'a> {
    nic: &'a Nic,
    token: u16,
}

impl RxToken for Received<'_> {
    fn consume<R, F: FnOnce(&[u8]) -> R>(self, f: F) -> R {
        let mut frames = self.nic.rx.borrow_mut();
        let frame = &mut frames[usize::from(self.token)];
        // SAFETY: the frame that was passed to `receive_begin`, which returned this number.
        let done = unsafe { self.nic.queues.borrow_mut().card.receive_complete(self.token, frame) };
        let result = f(done.ok().and_then(|(head, len)| frame.get(head..head + len)).unwrap_or_default());
        // SAFETY: as in `new`: the frame belongs to the card again.
        let token = unsafe { self.nic.queues.borrow_mut().card.receive_begin(frame) };
        assert!(token == Ok(self.token), "a reused descriptor got a number other than {}", self.token);
        result
    }
}

/// A transmit token.
pub struct Sending<'a>(&'a Nic);

impl TxToken for Sending<'_> {
    fn consume<R, F: FnOnce(&mut [u8]) -> R>(self, len: usize, f: F) -> R {
        let mut queues = self.0.queues.borrow_mut();
        let queues = &mut *queues;
        // A token is handed out only if a frame is free, and one at a time.
        let Some(index) = queues.free.pop() else { panic!("no frame for {len} bytes") };
        let frame = &mut queues.tx[usize::from(index)];
        let head = queues.card.fill_buffer_header(frame).unwrap_or(0);
        let result = f(&mut frame[head..head + len]);
        // SAFETY: the bytes belong to the card until `transmit_complete`; nothing accesses them meanwhile.
        match unsafe { queues.card.transmit_begin(&frame[..head + len]) } {
            Ok(token) => queues.sent[usize::from(token)] = (index, (head + len) as u16),
            Err(error) => panic!("virtio-net refused a frame with {} free: {error}", queues.free.len()),
        }
        result
    }
}

impl Device for Nic {
    type RxToken<'a> = Received<'a>;
    type TxToken<'a> = Sending<'a>;

    fn receive(&mut self, _now: Instant) -> Option<(Received<'_>, Sending<'_>)> {
        let queues = self.queues.get_mut();
        queues.reap();
        // A received frame may have to be answered.
        if queues.free.is_empty() {
            return None;
        }
        let token = queues.card.poll_receive()?;
        Some((Received { nic: self, token }, Sending(self)))
    }

    fn transmit(&mut self, _now: Instant) -> Option<Sending<'_>> {
        let queues = self.queues.get_mut();
        queues.reap();
        (!queues.free.is_empty()).then_some(Sending(self))
    }

    fn capabilities(&self) -> DeviceCapabilities {
        let mut capabilities = DeviceCapabilities::default();
        capabilities.medium = Medium::Ethernet;
        capabilities.max_transmission_unit = 1514;
        capabilities.max_burst_size = Some(TX_FRAMES);
        capabilities.checksum.udp = Checksum::Both;
        capabilities
    }
}

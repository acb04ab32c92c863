//! What emulated machines have instead of a network card and a source of randomness: virtio over MMIO (Virtual I/O Device
//! 1.2, 4.2), for boards without an operating system.
//!
//! Invariants:
//! - frames are read and written where the card puts them; a buffer is the driver's or the card's, never both's;
//! - no allocation: queues and frames lie in statics, and each device is taken once.
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

/// Frames on their way out.
const TX_FRAMES: usize = 128;

/// A frame with virtio's header: the longest is 12 + 1,514 bytes.
const FRAME_BYTES: usize = 1536;

/// Where a machine has its virtio devices.
#[derive(Debug, Clone, Copy)]
pub struct Slots {
    first: usize,
    count: usize,
    first_interrupt: u32,
}

/// Slots whose devices are taken, a bit each: a machine has one such region.
static TAKEN: AtomicU64 = AtomicU64::new(0);

/// What lies between two slots in bytes.
const SLOT_BYTES: usize = 0x200;

/// Pages for the queues of a network card a core and one source of randomness.
const DMA_PAGES: usize = 64;

#[repr(C, align(4096))]
struct Pages(UnsafeCell<[[u8; PAGE_SIZE]; DMA_PAGES]>);

// SAFETY: each page is given out once, by `dma_alloc`.
unsafe impl Sync for Pages {}

static PAGES: Pages = Pages(UnsafeCell::new([[0; PAGE_SIZE]; DMA_PAGES]));
static PAGES_TAKEN: AtomicUsize = AtomicUsize::new(0);

/// Memory as virtio devices see it: all of it, at the same addresses, coherently.
struct Memory;

// SAFETY: `dma_alloc` gives out zeroed pages of a static, each once; addresses are the same on both sides.
unsafe impl Hal for Memory {
    fn dma_alloc(pages: usize, _direction: BufferDirection) -> (PhysAddr, NonNull<u8>) {
        let first = PAGES_TAKEN.fetch_add(pages, Ordering::Relaxed);
        assert!(first + pages <= DMA_PAGES, "{pages} pages for queues, and {first} of {DMA_PAGES} are taken");
        let page = PAGES.0.get().cast::<[u8; PAGE_SIZE]>().wrapping_add(first).cast::<u8>();
        let page = NonNull::new(page).unwrap_or(NonNull::dangling());
        (page.as_ptr() as PhysAddr, page)
    }

    unsafe fn dma_dealloc(_physical: PhysAddr, _virtual: NonNull<u8>, _pages: usize) -> i32 {
        // Queues live as long as the board.
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
    /// Describe `count` slots from the address `first` on, whose interrupts are `first_interrupt` and the following.
    ///
    /// # Safety
    /// The machine has virtio over MMIO there, mapped as uncached memory at the same addresses, and nobody else uses it.
    pub const unsafe fn new(first: usize, count: usize, first_interrupt: u32) -> Self {
        Self { first, count, first_interrupt }
    }

    /// Return the slots of devices of a kind.
    fn of(self, kind: DeviceType) -> impl Iterator<Item = usize> {
        (0..self.count).filter(move |slot| {
            // SAFETY: there is a virtio slot there, as `new` was told; empty ones say kind 0.
            let found = unsafe { ((self.first + slot * SLOT_BYTES + KIND_OFFSET) as *const u32).read_volatile() };
            found == kind as u32
        })
    }

    /// Take device number `nth` of a kind, with its interrupt; `None` also if it is taken.
    fn take(self, kind: DeviceType, nth: usize) -> Option<(MmioTransport<'static>, u32)> {
        let slot = self.of(kind).nth(nth)?;
        let bit = 1_u64.checked_shl(slot as u32)?;
        if TAKEN.fetch_or(bit, Ordering::AcqRel) & bit != 0 {
            return None;
        }
        let header = NonNull::new((self.first + slot * SLOT_BYTES) as *mut VirtIOHeader)?;
        // SAFETY: the slot holds a device, as it said, and nobody has taken it before.
        let transport = unsafe { MmioTransport::new(header, SLOT_BYTES) }.ok()?;
        Some((transport, self.first_interrupt + slot as u32))
    }

    /// Return how many network cards there are.
    pub fn network_cards(self) -> usize {
        self.of(DeviceType::Network).count()
    }

    /// Return random bits, if the machine has a source of them.
    pub fn random(self) -> Option<u64> {
        let (transport, _) = self.take(DeviceType::EntropySource, 0)?;
        let mut source = VirtIORng::<Memory, _>::new(transport).ok()?;
        let mut bytes = [0; 8];
        let mut have = 0;
        while have < bytes.len() {
            have += source.request_entropy(&mut bytes[have..]).ok().filter(|&count| count > 0)?;
        }
        Some(u64::from_le_bytes(bytes))
    }
}

/// Where a virtio device says of which kind it is (4.2.2): looking there disturbs nobody.
const KIND_OFFSET: usize = 8;

/// What the frames of a card lie in: put it in a `static` cell.
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

/// The queues, and the way out.
struct Queues {
    card: VirtIONetRaw<Memory, MmioTransport<'static>, QUEUE>,
    tx: &'static mut [[u8; FRAME_BYTES]; TX_FRAMES],
    free: Vec<u8, TX_FRAMES>,
    /// Which frame a descriptor sends, and how long it is with virtio's header.
    sent: [(u8, u16); QUEUE],
}

/// A network card.
pub struct Nic {
    // Apart, as a frame that is looked at may be answered at once.
    rx: RefCell<&'static mut [[u8; FRAME_BYTES]; QUEUE]>,
    queues: RefCell<Queues>,
    interrupt: u32,
}

impl Nic {
    /// Take network card `nth` and hand it its buffers.
    ///
    /// # Panics
    /// If there is none, or it is taken: such a board is of no use.
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
            // SAFETY: the frame is the card's until `receive_complete` gives it back; nobody touches it meanwhile.
            let token = unsafe { card.receive_begin(frame) };
            // One descriptor a frame, and each comes back before it is used again: so numbers stay the same.
            assert!(token == Ok(index as u16), "descriptor {index} of an empty queue");
        }
        card.enable_interrupts();
        let free = (0..TX_FRAMES as u8).collect();
        let queues = RefCell::new(Queues { card, tx, free, sent: [(0, 0); QUEUE] });
        Self { rx: RefCell::new(rx), queues, interrupt }
    }

    /// Return its hardware address.
    pub fn mac(&self) -> [u8; 6] {
        self.queues.borrow().card.mac_address()
    }

    /// Return the number of its interrupt.
    pub const fn interrupt(&self) -> u32 {
        self.interrupt
    }

    /// Let the interrupt go: it comes again with the next frame.
    pub fn acknowledge(&mut self) {
        self.queues.get_mut().card.ack_interrupt();
    }
}

impl Queues {
    /// Take back frames that have left.
    fn reap(&mut self) {
        while let Some(token) = self.card.poll_transmit() {
            let (frame, len) = self.sent[usize::from(token)];
            let bytes = &self.tx[usize::from(frame)][..usize::from(len)];
            // SAFETY: the same bytes as at `transmit_begin`.
            if unsafe { self.card.transmit_complete(token, bytes) }.is_err() {
                panic!("virtio-net gave back descriptor {token}, which was not its own");
            }
            // As many places as frames.
            let _ = self.free.push(frame);
        }
    }
}

/// A frame that has arrived: a descriptor that the card is done with.
pub struct Received<'a> {
    nic: &'a Nic,
    token: u16,
}

impl RxToken for Received<'_> {
    fn consume<R, F: FnOnce(&[u8]) -> R>(self, f: F) -> R {
        let mut frames = self.nic.rx.borrow_mut();
        let frame = &mut frames[usize::from(self.token)];
        // SAFETY: the frame is that of `receive_begin`, which gave it this number.
        let done = unsafe { self.nic.queues.borrow_mut().card.receive_complete(self.token, frame) };
        let result = f(done.ok().and_then(|(head, len)| frame.get(head..head + len)).unwrap_or_default());
        // SAFETY: as at first: it is the card's again.
        let token = unsafe { self.nic.queues.borrow_mut().card.receive_begin(frame) };
        assert!(token == Ok(self.token), "descriptor {} has changed its number", self.token);
        result
    }
}

/// Room for a frame.
pub struct Sending<'a>(&'a Nic);

impl TxToken for Sending<'_> {
    fn consume<R, F: FnOnce(&mut [u8]) -> R>(self, len: usize, f: F) -> R {
        let mut queues = self.0.queues.borrow_mut();
        let queues = &mut *queues;
        // A token is given out only if there is a frame, and one at a time.
        let Some(index) = queues.free.pop() else { panic!("no frame for {len} bytes") };
        let frame = &mut queues.tx[usize::from(index)];
        let head = queues.card.fill_buffer_header(frame).unwrap_or(0);
        let result = f(&mut frame[head..head + len]);
        // SAFETY: the bytes are the card's until `transmit_complete`; nobody touches them meanwhile.
        match unsafe { queues.card.transmit_begin(&frame[..head + len]) } {
            Ok(token) => queues.sent[usize::from(token)] = (index, (head + len) as u16),
            Err(error) => panic!("virtio-net takes no frame, and {} are free: {error}", queues.free.len()),
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
        // What arrives may have to be answered.
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

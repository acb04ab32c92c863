//! Drivers for the network card and entropy source of emulated machines: virtio over MMIO (Virtual I/O Device 1.2,
//! 4.2), for boards without an operating system.
//!
//! Invariants:
//! - frames are read and written in place; a buffer belongs to the driver or to the card, never to both;
//! - no allocation: queues and frames are in memory that the board provides, and each device is taken once.
#![no_std]

use core::cell::RefCell;
use core::ptr::{self, NonNull};
use core::sync::atomic::{AtomicPtr, AtomicU32, AtomicUsize, Ordering};
use heapless::Vec;
use smoltcp::phy::{Checksum, Device, DeviceCapabilities, Medium, RxToken, TxToken};
use smoltcp::time::Instant;
use virtio_drivers::device::net::VirtIONetRaw;
use virtio_drivers::device::rng::VirtIORng;
use virtio_drivers::transport::DeviceType;
use virtio_drivers::transport::mmio::{MmioTransport, VirtIOHeader};
use virtio_drivers::{BufferDirection, Hal, PAGE_SIZE, PhysAddr};

/// Received frames of a card unless it is given another number, a power of two: QEMU's default limit of descriptors.
pub const RX_FRAMES: usize = 256;

/// Frames of a card that are being sent, unless it is given another number.
pub const TX_FRAMES: usize = 128;

/// The size of a frame with virtio's header, which is at most 12 + 1,514 bytes.
const FRAME_BYTES: usize = 1536;

/// The virtio slots of a machine.
#[derive(Debug, Clone, Copy)]
pub struct Slots {
    first: usize,
    stride_bytes: usize,
    count: usize,
    first_interrupt: u32,
}

/// The most slots of a machine.
const SLOTS_MAX: usize = 32;

/// A bit for each slot whose device is taken: a machine has one such region.
static TAKEN: AtomicU32 = AtomicU32::new(0);

/// Memory for the queues: put it in a `static` cell. Each queue of up to 128 descriptors needs two pages, a longer one
/// three; a network card has two queues, and an entropy source one.
#[derive(Debug)]
#[repr(C, align(4096))]
pub struct Pages<const N: usize>([[u8; PAGE_SIZE]; N]);

impl<const N: usize> Pages<N> {
    /// Return empty pages.
    pub const fn new() -> Self {
        Self([[0; PAGE_SIZE]; N])
    }
}

impl<const N: usize> Default for Pages<N> {
    fn default() -> Self {
        Self::new()
    }
}

/// The pages, their number, and how many are in use. `virtio-drivers` asks for them through a function without `self`.
static PAGES: AtomicPtr<[u8; PAGE_SIZE]> = AtomicPtr::new(ptr::null_mut());
static PAGES_PROVIDED: AtomicUsize = AtomicUsize::new(0);
static PAGES_TAKEN: AtomicUsize = AtomicUsize::new(0);

/// Provide memory for all queues, before the first device is taken.
///
/// # Panics
/// If memory was provided before.
pub fn provide<const N: usize>(pages: &'static mut Pages<N>) {
    let first = PAGES.swap(pages.0.as_mut_ptr(), Ordering::Relaxed);
    assert!(first.is_null(), "memory for queues is provided once");
    PAGES_PROVIDED.store(N, Ordering::Release);
}

/// Memory as virtio devices access it: identity-mapped and coherent.
struct Memory;

// SAFETY: `dma_alloc` hands out each zeroed page, which `provide` has borrowed for ever, once; addresses are the same
// on both sides.
unsafe impl Hal for Memory {
    fn dma_alloc(pages: usize, _direction: BufferDirection) -> (PhysAddr, NonNull<u8>) {
        let provided = PAGES_PROVIDED.load(Ordering::Acquire);
        let first = PAGES_TAKEN.fetch_add(pages, Ordering::Relaxed);
        assert!(first + pages <= provided, "{pages} more pages for queues: {first} of {provided} are in use");
        let page = PAGES.load(Ordering::Relaxed).wrapping_add(first).cast::<u8>();
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
    /// Describe `count` slots, at most 32, from address `first` on, each `stride_bytes` behind the one before, with
    /// interrupts from `first_interrupt` on.
    ///
    /// # Safety
    /// The machine has virtio MMIO slots there, mapped as uncached memory at the same addresses, and nothing else uses
    /// them.
    pub const unsafe fn new(first: usize, stride_bytes: usize, count: usize, first_interrupt: u32) -> Self {
        assert!(count <= SLOTS_MAX && stride_bytes >= REGISTERS_BYTES, "more slots, or smaller ones, than virtio has");
        Self { first, stride_bytes, count, first_interrupt }
    }

    const fn address(self, slot: usize) -> usize {
        self.first + slot * self.stride_bytes
    }

    /// Return the slots with devices of a kind.
    fn of(self, kind: DeviceType) -> impl Iterator<Item = usize> {
        (0..self.count).filter(move |slot| {
            // SAFETY: a virtio slot, as `new` requires; empty ones report kind 0.
            let found = unsafe { ((self.address(*slot) + KIND_OFFSET) as *const u32).read_volatile() };
            found == kind as u32
        })
    }

    /// Take the `nth` device of a kind, and its interrupt; `None` if there is none or it is taken.
    fn take(self, kind: DeviceType, nth: usize) -> Option<(MmioTransport<'static>, u32)> {
        let slot = self.of(kind).nth(nth)?;
        let bit = 1_u32.checked_shl(slot as u32)?;
        if TAKEN.fetch_or(bit, Ordering::AcqRel) & bit != 0 {
            return None;
        }
        let header = NonNull::new(self.address(slot) as *mut VirtIOHeader)?;
        // SAFETY: the slot holds a device that was not taken before.
        let transport = unsafe { MmioTransport::new(header, self.stride_bytes) }.ok()?;
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

/// The registers that all devices have, and some of their own (4.2.2).
const REGISTERS_BYTES: usize = 0x200;

/// The frames of a card, `RX` received and `TX` being sent: put them in a `static` cell.
#[derive(Debug)]
pub struct Frames<const RX: usize = RX_FRAMES, const TX: usize = TX_FRAMES> {
    rx: [[u8; FRAME_BYTES]; RX],
    tx: [[u8; FRAME_BYTES]; TX],
}

impl<const RX: usize, const TX: usize> Frames<RX, TX> {
    /// Return empty frames.
    pub const fn new() -> Self {
        const {
            assert!(RX.is_power_of_two() && RX <= 1 << 15, "virtio 2.7: a queue's size is a power of two up to 32768");
            assert!(
                TX > 0 && TX <= RX && TX <= 256,
                "a frame that is being sent has a descriptor, and a number of 8 bits"
            );
        }
        Self { rx: [[0; FRAME_BYTES]; RX], tx: [[0; FRAME_BYTES]; TX] }
    }
}

impl<const RX: usize, const TX: usize> Default for Frames<RX, TX> {
    fn default() -> Self {
        Self::new()
    }
}

/// The card's queues, of `RX` descriptors each, and the transmit frames.
struct Queues<const RX: usize, const TX: usize> {
    card: VirtIONetRaw<Memory, MmioTransport<'static>, RX>,
    tx: &'static mut [[u8; FRAME_BYTES]; TX],
    free: Vec<u8, TX>,
    /// The frame that each descriptor sends, and its length with virtio's header.
    sent: [(u8, u16); RX],
}

/// A network card.
pub struct Nic<const RX: usize = RX_FRAMES, const TX: usize = TX_FRAMES> {
    // Separate cells, because a received frame may be answered while it is processed.
    rx: RefCell<&'static mut [[u8; FRAME_BYTES]; RX]>,
    queues: RefCell<Queues<RX, TX>>,
    interrupt: u32,
}

impl<const RX: usize, const TX: usize> Nic<RX, TX> {
    /// Take network card `nth` and give it its buffers.
    ///
    /// # Panics
    /// If the card does not exist or is taken: such a board is of no use.
    pub fn new(slots: Slots, nth: usize, frames: &'static mut Frames<RX, TX>) -> Self {
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
        let free = (0..=(TX - 1) as u8).collect();
        let queues = RefCell::new(Queues { card, tx, free, sent: [(0, 0); RX] });
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

impl<const RX: usize, const TX: usize> Queues<RX, TX> {
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
pub struct Received<'a, const RX: usize, const TX: usize> {
    nic: &'a Nic<RX, TX>,
    token: u16,
}

impl<const RX: usize, const TX: usize> RxToken for Received<'_, RX, TX> {
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
pub struct Sending<'a, const RX: usize, const TX: usize>(&'a Nic<RX, TX>);

impl<const RX: usize, const TX: usize> TxToken for Sending<'_, RX, TX> {
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

impl<const RX: usize, const TX: usize> Device for Nic<RX, TX> {
    type RxToken<'a> = Received<'a, RX, TX>;
    type TxToken<'a> = Sending<'a, RX, TX>;

    fn receive(&mut self, _now: Instant) -> Option<(Received<'_, RX, TX>, Sending<'_, RX, TX>)> {
        let queues = self.queues.get_mut();
        queues.reap();
        // A received frame may have to be answered.
        if queues.free.is_empty() {
            return None;
        }
        let token = queues.card.poll_receive()?;
        Some((Received { nic: self, token }, Sending(self)))
    }

    fn transmit(&mut self, _now: Instant) -> Option<Sending<'_, RX, TX>> {
        let queues = self.queues.get_mut();
        queues.reap();
        (!queues.free.is_empty()).then_some(Sending(self))
    }

    fn capabilities(&self) -> DeviceCapabilities {
        let mut capabilities = DeviceCapabilities::default();
        capabilities.medium = Medium::Ethernet;
        capabilities.max_transmission_unit = 1514;
        capabilities.max_burst_size = Some(TX);
        capabilities.checksum.udp = Checksum::Both;
        capabilities
    }
}

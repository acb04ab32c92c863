//! Sumac's device runtime on QEMU's virt machine: riscv64 in machine mode, without an operating system or a heap.
//!
//! The third port, made by the guide in `firmware/boards/README.md`: one hart, which sleeps until a packet or a timer;
//! variables and the stack within 512 KiB, as a microcontroller has; a plain-text log on the serial port.
#![no_std]
#![no_main]

mod cpu;
mod entropy;
mod options;
mod plic;

use core::fmt::{self, Write};
use core::sync::atomic::{AtomicU32, Ordering};
use core::time::Duration;
use sumac_bare::{
    Board, BoardEvent, BoardOptions, Buffers, MAX_PACKET_LEN_BYTES, OPTIONS_MAX_BYTES, PACKET_GUARANTEED_LEN_BYTES,
    SingleShard, Stack,
};
use sumac_device::{Memory, Node, NodeConfig, Storage};
use sumac_hal::ctrl::StackUsage;
use sumac_hal::ids::BootId;
use sumac_hal::shard::Shard;
use sumac_hal::time::Instant;
use sumac_virtio::{Frames, Nic, Pages, Slots};

/// The board's virtio devices (QEMU's hw/riscv/virt), and the distance of two in bytes.
// SAFETY: the devices are there, in memory that is I/O.
const VIRTIO: Slots = unsafe { Slots::new(0x1000_1000, 0x1000, 8, 1) };

/// The maximum numbers of groups, children and slots, and the slots' memory in bytes.
const GROUPS: usize = 4;
const CHILDREN: usize = 32;
const SLOTS: usize = 128;
const SLOT_MEMORY_BYTES: usize = 96 << 10;

/// Packets received and sent that wait, and frames of the network card.
const RX_PACKETS: usize = 32;
const TX_PACKETS: usize = 16;
const RX_FRAMES: usize = 32;
const TX_FRAMES: usize = 16;

/// The longest sleep: what the log has to tell does not wait longer.
const SLEEP_MAX: Duration = Duration::from_secs(1);

static mut TABLES: Memory<GROUPS, CHILDREN, SLOTS, 0> = Memory::new();
static mut SLOT_MEMORY: [u8; SLOT_MEMORY_BYTES] = [0; SLOT_MEMORY_BYTES];
static mut BUFFERS: Buffers<RX_PACKETS, TX_PACKETS> = Buffers::new();
static mut FRAMES: Frames<RX_FRAMES, TX_FRAMES> = Frames::new();
static mut PAGES: Pages<8> = Pages::new();

/// A magic number and the count of incarnations, in memory that a reset preserves.
#[unsafe(link_section = ".keep")]
static INCARNATIONS: [AtomicU32; 2] = [const { AtomicU32::new(0) }; 2];
const KEPT: u32 = u32::from_le_bytes(*b"kept");

/// The serial port (a 16550).
struct Console;

impl Write for Console {
    fn write_str(&mut self, text: &str) -> fmt::Result {
        const DATA: *mut u8 = 0x1000_0000 as *mut u8;
        const STATUS: *const u8 = 0x1000_0005 as *const u8;
        const ROOM: u8 = 1 << 5;
        for byte in text.bytes() {
            // SAFETY: the registers are there (QEMU's hw/riscv/virt); one hart uses them.
            unsafe {
                while STATUS.read_volatile() & ROOM == 0 {}
                DATA.write_volatile(byte);
            }
        }
        Ok(())
    }
}

macro_rules! log {
    ($($arg:tt)*) => {{
        let us = cpu::now().as_nanos() / 1_000;
        // Writing to the console cannot fail.
        let _ = write!(Console, "{:5}.{:06} ", us / 1_000_000, us % 1_000_000);
        let _ = writeln!(Console, $($arg)*);
    }};
}

/// The entry point, once there is a stack.
extern "C" fn main() -> ! {
    if INCARNATIONS[0].swap(KEPT, Ordering::Relaxed) != KEPT {
        INCARNATIONS[1].store(0, Ordering::Relaxed);
    }
    let incarnation = INCARNATIONS[1].fetch_add(1, Ordering::Relaxed) + 1;
    // One more for the end.
    let mut text = [0; OPTIONS_MAX_BYTES + 1];
    let options = match options::read(&mut text).map(BoardOptions::parse) {
        None => panic!("no options: start QEMU with -device loader,file=...,addr=0x81000000,force-raw=on"),
        Some(Err(error)) => panic!("options: {error}"),
        Some(Ok(options)) => options,
    };
    // SAFETY: called once, on the only hart; nothing else accesses these.
    let (tables, slot_memory, buffers, frames, pages) = unsafe {
        (
            &mut *&raw mut TABLES,
            &mut *&raw mut SLOT_MEMORY,
            &mut *&raw mut BUFFERS,
            &mut *&raw mut FRAMES,
            &mut *&raw mut PAGES,
        )
    };
    sumac_virtio::provide(pages);
    entropy::start(VIRTIO);
    // Without an entropy source, the start time distinguishes incarnations. It is no secret, and good for nothing else.
    let boot_id = entropy::bytes().map(u64::from_le_bytes);
    let boot_id = BootId(boot_id.unwrap_or_else(|| cpu::now().as_nanos() ^ u64::from(incarnation) << 48));
    let nic = Nic::new(VIRTIO, 0, frames);
    let (mac, interrupt) = (nic.mac(), nic.interrupt());
    let stack = Stack::new(nic, mac, &options, buffers, boot_id.0, cpu::now());
    let config = NodeConfig {
        shard: Shard::WHOLE,
        boot_id,
        max_packet_len_bytes: MAX_PACKET_LEN_BYTES,
        receive_buffer_bytes: RX_PACKETS * PACKET_GUARANTEED_LEN_BYTES,
    };
    let node = Node::new(config, Storage { bytes: slot_memory, ..tables.storage() });
    let mut board = Board::new(stack, node, SingleShard, None, &options, boot_id);
    board.set_entropy(entropy::bytes);
    board.set_stack_gauge(|| {
        let (used, size) = cpu::stack_high_water();
        Some(StackUsage { used_bytes: used as u32, size_bytes: size as u32 })
    });
    log!("info  {} is ready: incarnation {incarnation}, boot id {:016x}", options.name, boot_id.0);
    #[cfg(feature = "faults")]
    if incarnation == 1 {
        match options.fault {
            Some(sumac_bare::Fault::Access) => cpu::fault(),
            Some(_) => panic!("injected fault"),
            None => {}
        }
    }
    plic::enable(interrupt);
    loop {
        // Before the step, so that what arrives later ends the next wait; the controller first, which notices only that
        // the card's interrupt comes, not that it stays.
        plic::acknowledge();
        board.device_mut().acknowledge();
        let next = board.step(cpu::now());
        while let Some(event) = board.poll_event() {
            match event {
                BoardEvent::Connected => log!("info  the controller is connected"),
                BoardEvent::Disconnected(error) => log!("warn  controller: {error}"),
                BoardEvent::Trace(entry) => log!("debug trace: {:?}", entry.event),
                event => log!("info  {event:?}"),
            }
        }
        cpu::check_stack();
        sleep_until(next);
    }
}

/// Sleep until an instant, or an interrupt.
fn sleep_until(next: Option<Instant>) {
    let now = cpu::now();
    let latest = now + SLEEP_MAX;
    let at = next.unwrap_or(latest).min(latest);
    if at > now {
        cpu::set_alarm(at);
        cpu::wait_for_interrupt();
    }
}

/// Report a fault of the processor, and start another incarnation.
fn fault(cause: u64, at: u64, value: u64) -> ! {
    log!("error fault: mcause {cause:#x}, mepc {at:#x}, mtval {value:#x}");
    cpu::reset()
}

#[panic_handler]
fn panic(info: &core::panic::PanicInfo<'_>) -> ! {
    log!("error panic: {info}");
    cpu::reset()
}

//! Sumac's device runtime on QEMU's microvm: x86-64, without an operating system or a heap.
//!
//! The worked example of `firmware/boards/README.md`: the minimum that a board needs. One core, which polls; a
//! plain-text log on the serial port. `qemu-virt` adds interrupts, several cores, a watchdog and a cheaper log.
#![no_std]
#![no_main]

mod cpu;
mod entropy;
mod fw_cfg;

use core::fmt::{self, Write};
use core::sync::atomic::{AtomicU32, Ordering};
use sumac_bare::{
    Board, BoardEvent, BoardOptions, Buffers, MAX_PACKET_LEN_BYTES, OPTIONS_MAX_BYTES, PACKET_GUARANTEED_LEN_BYTES,
    RX_PACKETS, SingleShard, Stack,
};
use sumac_device::{Memory, Node, NodeConfig, Storage};
use sumac_hal::ids::BootId;
use sumac_hal::shard::Shard;
use sumac_virtio::{Frames, Nic, Pages, Slots};

/// The board's virtio devices (QEMU's hw/i386/microvm); their interrupts are not used.
// SAFETY: the devices are there, in the gigabyte that `cpu` maps uncached.
const VIRTIO: Slots = unsafe { Slots::new(0xfeb0_0000, 0x200, 8, 5) };

/// The maximum numbers of groups, children and slots, and the slots' memory in bytes.
const GROUPS: usize = 8;
const CHILDREN: usize = 256;
const SLOTS: usize = 1024;
const SLOT_MEMORY_BYTES: usize = 2 << 20;

static mut TABLES: Memory<GROUPS, CHILDREN, SLOTS, 0> = Memory::new();
static mut SLOT_MEMORY: [u8; SLOT_MEMORY_BYTES] = [0; SLOT_MEMORY_BYTES];
static mut BUFFERS: Buffers = Buffers::new();
static mut FRAMES: Frames = Frames::new();
/// Memory for the queues of a network card and an entropy source.
static mut PAGES: Pages<8> = Pages::new();

/// A magic number and the count of incarnations, in memory that a reset preserves.
#[unsafe(link_section = ".keep")]
static INCARNATIONS: [AtomicU32; 2] = [const { AtomicU32::new(0) }; 2];
const KEPT: u32 = u32::from_le_bytes(*b"kept");

/// The serial port.
struct Console;

impl Write for Console {
    fn write_str(&mut self, text: &str) -> fmt::Result {
        text.bytes().for_each(|byte| cpu::write_port(0x3f8, byte));
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
    cpu::start_clock();
    if INCARNATIONS[0].swap(KEPT, Ordering::Relaxed) != KEPT {
        INCARNATIONS[1].store(0, Ordering::Relaxed);
    }
    let incarnation = INCARNATIONS[1].fetch_add(1, Ordering::Relaxed) + 1;
    let mut text = [0; OPTIONS_MAX_BYTES];
    let options = match fw_cfg::file("opt/sumac/options", &mut text).map(BoardOptions::parse) {
        None => panic!("no options: start QEMU with -fw_cfg name=opt/sumac/options,file=..."),
        Some(Err(error)) => panic!("options: {error}"),
        Some(Ok(options)) => options,
    };
    // SAFETY: called once, on the only core; nothing else accesses it.
    sumac_virtio::provide(unsafe { &mut *&raw mut PAGES });
    entropy::start(VIRTIO);
    // Without an entropy source, the start time distinguishes incarnations. It is no secret, and good for nothing else.
    let boot_id = entropy::bytes().map(u64::from_le_bytes);
    let boot_id = BootId(boot_id.unwrap_or_else(|| cpu::now().as_nanos() ^ u64::from(incarnation) << 48));
    // SAFETY: called once, on the only core; nothing else accesses these.
    let (tables, slot_memory, buffers, frames) =
        unsafe { (&mut *&raw mut TABLES, &mut *&raw mut SLOT_MEMORY, &mut *&raw mut BUFFERS, &mut *&raw mut FRAMES) };
    let nic = Nic::new(VIRTIO, 0, frames);
    let mac = nic.mac();
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
    log!("info  {} is ready: incarnation {incarnation}, boot id {:016x}", options.name, boot_id.0);
    #[cfg(feature = "faults")]
    if options.fault.is_some() && incarnation == 1 {
        panic!("injected fault");
    }
    loop {
        board.device_mut().acknowledge();
        board.step(cpu::now());
        while let Some(event) = board.poll_event() {
            match event {
                BoardEvent::Connected => log!("info  the controller is connected"),
                BoardEvent::Disconnected(error) => log!("warn  controller: {error}"),
                BoardEvent::Trace(entry) => log!("debug trace: {:?}", entry.event),
                event => log!("info  {event:?}"),
            }
        }
        core::hint::spin_loop();
    }
}

#[panic_handler]
fn panic(info: &core::panic::PanicInfo<'_>) -> ! {
    log!("error panic: {info}");
    cpu::reset()
}

//! Sumac's device runtime on QEMU's virt board: aarch64 at EL1, without an operating system or a heap.
//!
//! ```text
//!   _start (cpu) -> main: kept memory, log, options, NIC, node -> loop: step, log, sleep until packet or timer
//! ```
//!
//! QEMU hands the board its options ([`sumac_bare::BoardOptions`]) as `-fw_cfg name=opt/sumac/options,string=...`; a
//! virtio source of randomness gives each life its boot id. The log leaves by the serial port.
#![no_std]
#![no_main]

mod cpu;
mod crash;
mod fw_cfg;
mod gic;
mod keep;
mod log;
mod nic;
mod uart;

use core::time::Duration;
use nic::{Frames, Nic};
use sumac_bare::{Board, BoardEvent, BoardOptions, Buffers, MAX_PACKET_LEN_BYTES, RX_PACKETS, Stack};
use sumac_device::{Memory, Node, NodeConfig, Storage};
use sumac_hal::ids::BootId;
use sumac_hal::shard::Shard;

/// Groups that the board can hold.
const GROUPS: usize = 16;
/// Children of all groups.
const CHILDREN: usize = 512;
/// Slots of all groups.
const SLOTS: usize = 2048;
/// Accumulators and staging of all slots.
const SLOT_MEMORY_BYTES: usize = 8 << 20;

/// How long the loop may take to come round before the watchdog bites. Generous, as the host may be busy elsewhere.
const PATIENCE: Duration = Duration::from_secs(20);

/// The longest sleep: the watchdog is to be petted.
const LONGEST_SLEEP: Duration = Duration::from_secs(5);

/// How many bytes of options there can be.
const OPTIONS_BYTES: usize = 512;

// Everything that is large, and lives as long as the board.
static mut TABLES: Memory<GROUPS, CHILDREN, SLOTS, 0> = Memory::new();
static mut SLOT_MEMORY: [u8; SLOT_MEMORY_BYTES] = [0; SLOT_MEMORY_BYTES];
static mut BUFFERS: Buffers = Buffers::new();
static mut FRAMES: Frames = Frames::new();

/// Where `cpu` leads to once there is a stack.
extern "C" fn main() -> ! {
    cpu::pet_watchdog(PATIENCE);
    let (life, end) = keep::begin();
    let mut text = [0; OPTIONS_BYTES];
    let options = match fw_cfg::file("opt/sumac/options", &mut text) {
        None => panic!("no options: start QEMU with -fw_cfg name=opt/sumac/options,string=..."),
        Some(text) => match BoardOptions::parse(text) {
            Ok(options) => options,
            Err(error) => panic!("options: {error}"),
        },
    };
    // Without a source of randomness, lives still differ by when they began.
    let random = nic::random().unwrap_or_else(|| cpu::now().as_nanos() ^ u64::from(life) << 48);
    let boot_id = BootId(random);
    // SAFETY: called once, on the only core, and nobody else names these.
    let (tables, slot_memory, buffers, frames) =
        unsafe { (&mut *&raw mut TABLES, &mut *&raw mut SLOT_MEMORY, &mut *&raw mut BUFFERS, &mut *&raw mut FRAMES) };
    let nic = Nic::new(frames);
    let (mac, interrupt) = (nic.mac(), nic.interrupt());
    gic::start(interrupt);
    cpu::unmask_watchdog();
    let stack = Stack::new(nic, mac, &options, buffers, random, cpu::now());
    let config = NodeConfig {
        shard: Shard::WHOLE,
        boot_id,
        max_packet_len_bytes: MAX_PACKET_LEN_BYTES,
        receive_buffer_bytes: RX_PACKETS * 1024,
    };
    let storage = Storage { bytes: slot_memory, ..tables.storage() };
    let mut board = Board::new(stack, Node::new(config, storage), &options, boot_id);
    defmt::info!("{=str} is ready: life {=u32}, boot id {=u64:016x}", options.name.as_str(), life, boot_id.0);
    match end {
        keep::End::None => {}
        keep::End::Panic => defmt::warn!("the life before ended by a panic"),
        keep::End::Fault => defmt::warn!("the life before ended by a fault"),
        keep::End::Watchdog => defmt::warn!("the life before was ended by the watchdog"),
    }
    serve(&mut board)
}

fn serve(board: &mut Board<'_, Nic>) -> ! {
    let mut lost = 0;
    loop {
        cpu::pet_watchdog(PATIENCE);
        // Before the look at what has arrived: what comes after it brings another interrupt.
        board.device_mut().acknowledge();
        let now = cpu::now();
        let next = board.step(now);
        while let Some(event) = board.poll_event() {
            note(event);
        }
        if keep::lost() > lost {
            lost = keep::lost();
            defmt::warn!("{=u32} bytes of the log were overwritten before they were sent", lost);
        }
        if next.is_some_and(|at| at <= cpu::now()) {
            continue;
        }
        if log::drain() {
            continue;
        }
        let wake = now + LONGEST_SLEEP;
        cpu::set_alarm(next.map_or(wake, |at| at.min(wake)));
        cpu::wait_for_interrupt();
    }
}

fn note(event: BoardEvent) {
    match event {
        BoardEvent::Connected => {
            let (used, of) = cpu::stack_high_water();
            defmt::info!("the controller is connected; stack {=usize} of {=usize} B", used, of);
        }
        BoardEvent::Disconnected(error) => defmt::warn!("controller: {}", defmt::Display2Format(&error)),
        BoardEvent::Node(event) => defmt::info!("{}", defmt::Debug2Format(&event)),
        _ => {}
    }
}

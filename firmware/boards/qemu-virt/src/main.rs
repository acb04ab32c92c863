//! Sumac's device runtime on QEMU's virt board: aarch64 at EL1, without an operating system or a heap.
//!
//! ```text
//!   _start (cpu) -> main: kept memory, log, options, NIC, node -> loop: step, log, sleep until packet or timer
//! ```
//!
//! Each network card makes a shard, which has a core of its own (`-smp`). QEMU hands the board its options ([`sumac_bare::BoardOptions`]) as `-fw_cfg name=opt/sumac/options,string=...`; a
//! virtio source of randomness gives each life its boot id. The log leaves by the serial port.
#![no_std]
#![no_main]

mod cpu;
mod crash;
mod fw_cfg;
mod gic;
mod keep;
mod log;
mod pci;
mod uart;

use core::sync::atomic::{AtomicUsize, Ordering};
use core::time::Duration;
use cpu::MAX_CORES;
use heapless::Vec;
use sumac_bare::{
    Answering, Asking, Board, BoardEvent, BoardOptions, Buffers, Bus, BusMemory, BusTables, Desk, Further,
    MAX_PACKET_LEN_BYTES, OPTIONS_MAX_BYTES, RX_PACKETS, Stack,
};
use sumac_device::{Memory, Node, NodeConfig, RedoSlot, Reference, References, Storage};
use sumac_hal::ctrl::StackUse;
use sumac_hal::ids::BootId;
use sumac_hal::shard::Shard;
use sumac_hal::time::Instant;
use sumac_virtio::{Frames, Nic, Slots};

/// The board's virtio devices (QEMU's hw/arm/virt).
// SAFETY: they are there, in the gigabyte that `cpu` maps as Device memory.
const VIRTIO: Slots = unsafe { Slots::new(0x0a00_0000, 32, 48) };

/// Groups that a core can hold.
const GROUPS: usize = 16;
/// Children of all groups.
const CHILDREN: usize = 512;
/// Slots of all groups.
const SLOTS: usize = 2048;
/// Accumulators and staging of all slots.
const SLOT_MEMORY_BYTES: usize = 4 << 20;

/// Contributions by reference of all slots: slots x children of each group.
const REFERENCES: usize = 4096;

/// How long a core may take to start.
const START: Duration = Duration::from_secs(20);

/// How many sleeps a core's patience has room for at least: the watchdog is to be petted between them.
const SLEEPS: u32 = 4;

/// What one core works in.
struct Core {
    tables: Memory<GROUPS, CHILDREN, SLOTS, 0>,
    buffers: Buffers,
    frames: Frames,
}

static mut CORES: [Core; MAX_CORES] =
    [const { Core { tables: Memory::new(), buffers: Buffers::new(), frames: Frames::new() } }; MAX_CORES];
// Apart: all zeros, which take no room in the image.
static mut SLOT_MEMORY: [[u8; SLOT_MEMORY_BYTES]; MAX_CORES] = [[0; SLOT_MEMORY_BYTES]; MAX_CORES];
/// What ranks by reference need besides, on the first core.
struct ByReference {
    tables: BusTables,
    redo: [RedoSlot; SLOTS],
    references: [Reference; REFERENCES],
}

static mut BY_REFERENCE: ByReference = ByReference {
    tables: BusTables::new(),
    redo: [RedoSlot::EMPTY; SLOTS],
    references: [Reference::EMPTY; REFERENCES],
};
static mut DESKS: [Desk; MAX_CORES - 1] = [const { Desk::new() }; MAX_CORES - 1];

/// What the first core tells the others before they start.
struct Told {
    options: BoardOptions,
    boot_id: BootId,
    shards: u16,
    /// The sides of the desks that wait for their cores.
    desks: [Option<Answering<'static>>; MAX_CORES - 1],
}

static mut TOLD: Option<Told> = None;

/// Cores that serve.
static SERVING: AtomicUsize = AtomicUsize::new(0);

/// The other cores, as the first one reaches them.
struct Others {
    desks: Vec<Asking<'static>, { MAX_CORES - 1 }>,
}

impl sumac_bare::Others for Others {
    fn desks(&mut self) -> &mut [Asking<'static>] {
        &mut self.desks
    }

    fn wake(&mut self) {
        gic::wake_others(self.desks.len());
    }

    fn wait(&mut self) {
        // A core that never answers lets the watchdog of this one bite.
        core::hint::spin_loop();
    }
}

/// The board as the first core has it.
type FirstBoard = Board<'static, Nic, Others>;

static mut BOARD: Option<FirstBoard> = None;

/// Where `cpu` leads the first core to once there is a stack.
extern "C" fn main() -> ! {
    cpu::pet_watchdog(START);
    let (board, options) = set_up();
    let (mut lost, mut busy) = (0, Duration::ZERO);
    serve(options.watchdog, |now| {
        // Before the look at what has arrived: what comes after it brings another interrupt.
        board.device_mut().acknowledge();
        let next = board.step(now);
        busy += cpu::now() - now;
        while let Some(event) = board.poll_event() {
            note(event);
            #[cfg(feature = "faults")]
            if let BoardEvent::Trace(_) = event
                && options.fault == Some(sumac_bare::Fault::Trace)
                && keep::life() == 1
            {
                panic!("as told");
            }
            if matches!(event, BoardEvent::Disconnected(_)) {
                // With QEMU's -icount shift=0 a nanosecond is an instruction.
                let (nanos, packets) = (busy.as_nanos() as u64, board.packets_in());
                defmt::info!("so far {=u64} ns of work over {=u64} packets that came", nanos, packets);
            }
        }
        if keep::lost() > lost {
            lost = keep::lost();
            defmt::warn!("{=u32} bytes of the log were overwritten before they were sent", lost);
        }
        next
    })
}

/// Put the board together. Its frame, with all that is moved to its place, is gone when the board serves.
#[inline(never)]
fn set_up() -> (&'static mut FirstBoard, BoardOptions) {
    let (life, end) = keep::begin();
    let mut text = [0; OPTIONS_MAX_BYTES];
    let options = match fw_cfg::file("opt/sumac/options", &mut text) {
        None => panic!("no options: start QEMU with -fw_cfg name=opt/sumac/options,string=..."),
        Some(text) => match BoardOptions::parse(text) {
            Ok(options) => options,
            Err(error) => panic!("options: {error}"),
        },
    };
    // Without a source of randomness, lives still differ by when they began.
    let boot_id = BootId(VIRTIO.random().unwrap_or_else(|| cpu::now().as_nanos() ^ u64::from(life) << 48));
    let shards = VIRTIO.network_cards().clamp(1, MAX_CORES);
    let others = start_others(&options, boot_id, shards);
    // SAFETY: the first core alone names it, here and once.
    let ByReference { tables, redo, references } = unsafe { &mut *&raw mut BY_REFERENCE };
    let bus = options.bus.as_ref().filter(|_| shards == 1).map(|_| open_bus(tables, boot_id));
    let references = bus.as_ref().map(|bus| {
        let (memory, capabilities) = bus.redo_memory();
        References { redo, references, memory, capabilities }
    });
    let (stack, node) = shard(0, &options, boot_id, shards as u16, references);
    defmt::info!(
        "{=str} is ready: life {=u32}, boot id {=u64:016x}, {=usize} cores",
        options.name.as_str(),
        life,
        boot_id.0,
        shards
    );
    match end {
        keep::End::None => {}
        keep::End::Panic => defmt::warn!("the life before ended by a panic"),
        keep::End::Fault => defmt::warn!("the life before ended by a fault"),
        keep::End::Watchdog => defmt::warn!("the life before was ended by the watchdog"),
    }
    // SAFETY: the first core alone names it, here and once.
    let place = unsafe { &mut *&raw mut BOARD };
    let board = place.insert(Board::new(stack, node, others, bus, &options, boot_id));
    board.gauge_stack(stack_use);
    #[cfg(feature = "faults")]
    if let Some(fault) = options.fault.filter(|_| life == 1) {
        go_wrong(fault);
    }
    (board, options)
}

/// What the stack of this core has come to.
fn stack_use() -> Option<StackUse> {
    let (used, of) = cpu::stack_high_water();
    Some(StackUse { used_bytes: used as u32, of_bytes: of as u32 })
}

/// Let ranks of the host contribute by reference: the first function is the desk, the second redo memory, all others seats.
fn open_bus(tables: &'static mut BusTables, boot_id: BootId) -> Bus {
    let (mut desk, mut redo, mut seats) = (None, None, Vec::new());
    pci::shared_memory(|memory| match (desk, redo) {
        (None, _) => desk = Some(memory),
        (_, None) => redo = Some(memory),
        // More than there can be are left alone.
        _ => drop(seats.push(memory)),
    });
    let (Some(desk), Some(redo)) = (desk, redo) else {
        panic!("options name a bus, and QEMU has not two ivshmem functions for it");
    };
    defmt::info!("by reference: {=usize} seats, {=usize} B of redo memory", seats.len(), size_of_val(redo));
    match Bus::open(tables, BusMemory { desk, redo, seats }, boot_id) {
        Ok(bus) => bus,
        Err(error) => panic!("the bus: {error}"),
    }
}

/// Start a core for each further shard; returns their desks.
fn start_others(options: &BoardOptions, boot_id: BootId, shards: usize) -> Others {
    let mut told = [const { None }; MAX_CORES - 1];
    // SAFETY: this core alone runs, and names DESKS nowhere else.
    let desks = unsafe { &mut *&raw mut DESKS };
    let mut asking = Vec::new();
    for (desk, told) in desks.iter_mut().zip(&mut told).take(shards - 1) {
        let (ask, answer) = desk.split();
        *told = Some(answer);
        // As many as there can be cores.
        let _ = asking.push(ask);
    }
    // SAFETY: the other cores, which read it, start below.
    unsafe { *&raw mut TOLD = Some(Told { options: options.clone(), boot_id, shards: shards as u16, desks: told }) };
    for core in 1..shards {
        if !cpu::start_core(core) {
            panic!("{shards} network cards and no core {core}: start QEMU with -smp {shards}");
        }
        // One after the other: each takes its part of what they are told.
        while SERVING.load(Ordering::Acquire) < core {
            core::hint::spin_loop();
        }
    }
    Others { desks: asking }
}

/// Where `cpu` leads another core to once it has a stack.
extern "C" fn further(core: usize) -> ! {
    cpu::pet_watchdog(START);
    // SAFETY: the first core has written it and waits for SERVING; other cores start after that.
    let told = unsafe { &mut *&raw mut TOLD };
    let Some((told, desk)) = told.as_mut().and_then(|told| told.desks[core - 1].take().map(|desk| (told, desk))) else {
        panic!("core {core} was told nothing");
    };
    let Some(options) = told.options.shard(core as u16) else { panic!("no port for core {core}") };
    let (stack, node) = shard(core, &options, told.boot_id, told.shards, None);
    let mut further = Further::new(stack, node, desk);
    further.gauge_stack(stack_use);
    SERVING.store(core, Ordering::Release);
    serve(options.watchdog, |now| {
        gic::woken();
        further.device_mut().acknowledge();
        let next = further.step(now);
        while let Some(event) = further.poll_event() {
            note(event);
        }
        next
    })
}

/// Set up this core's interrupts, network and node. Once a core.
fn shard(
    core: usize,
    options: &BoardOptions,
    boot_id: BootId,
    shards: u16,
    references: Option<References<'static>>,
) -> (Stack<Nic>, Node<'static>) {
    let Some(shard) = Shard::new(core as u16, shards) else { panic!("core {core} of {shards}") };
    // SAFETY: each core takes its own part, once.
    let (memory, slot_memory) = unsafe { (&mut (*&raw mut CORES)[core], &mut (*&raw mut SLOT_MEMORY)[core]) };
    let Core { tables, buffers, frames } = memory;
    let nic = Nic::new(VIRTIO, core, frames);
    gic::start(core, nic.interrupt());
    cpu::unmask_watchdog();
    let mac = nic.mac();
    let stack = Stack::new(nic, mac, options, buffers, boot_id.0.wrapping_add(core as u64), cpu::now());
    let config = NodeConfig {
        shard,
        boot_id,
        max_packet_len_bytes: MAX_PACKET_LEN_BYTES,
        receive_buffer_bytes: RX_PACKETS * 1024,
    };
    let storage = Storage { bytes: slot_memory, ..tables.storage() };
    let node = match references {
        Some(references) => Node::with_references(config, storage, references),
        None => Node::new(config, storage),
    };
    (stack, node)
}

/// Come round for ever: `step` says when there is something to do again.
fn serve(patience: Duration, mut step: impl FnMut(Instant) -> Option<Instant>) -> ! {
    loop {
        cpu::pet_watchdog(patience);
        cpu::check_stack();
        let now = cpu::now();
        let next = step(now);
        if next.is_some_and(|at| at <= cpu::now()) || cpu::core() == 0 && log::drain() {
            continue;
        }
        let wake = now + patience / SLEEPS;
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
        BoardEvent::Trace(entry) => defmt::debug!("trace: {}", defmt::Debug2Format(&entry.what)),
        _ => {}
    }
}

/// Do what the options say.
#[cfg(feature = "faults")]
fn go_wrong(fault: sumac_bare::Fault) {
    defmt::info!("going wrong, as told");
    match fault {
        sumac_bare::Fault::Panic => panic!("as told"),
        // What is in the trace by then, and not sent, has to come out in the next life: see `main`.
        sumac_bare::Fault::Trace => 0,
        // SAFETY: none: there is nothing at that address, which is the point.
        sumac_bare::Fault::Access => unsafe { (0x80_0000_0000 as *const u32).read_volatile() },
        sumac_bare::Fault::Hang => {
            cpu::pet_watchdog(Duration::from_millis(500));
            loop {
                core::hint::spin_loop();
            }
        }
    };
}

//! Sumac's device runtime on QEMU's virt board: aarch64 at EL1, without an operating system or a heap.
//!
//! ```text
//!   _start (cpu) -> main: retained memory, log, options, NIC, node -> loop: step, log, sleep until packet or timer
//! ```
//!
//! Each network card becomes a shard, which has a core of its own (`-smp`). QEMU passes the board's options
//! ([`sumac_bare::BoardOptions`]) as `-fw_cfg name=opt/sumac/options,file=...`; a virtio entropy source, or the
//! processor's own, gives each incarnation its boot id and each connection to a controller with keys its ephemeral key.
//! The log goes to the serial port.
#![no_std]
#![no_main]

mod cpu;
mod crash;
mod entropy;
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
    Board, BoardEvent, BoardOptions, Buffers, MAX_PACKET_LEN_BYTES, Mailbox, MailboxClient, MailboxServer,
    OPTIONS_MAX_BYTES, PACKET_GUARANTEED_LEN_BYTES, RX_PACKETS, SecondaryShard, Stack, ZeroCopyMemory, ZeroCopyServer,
    ZeroCopyTables,
};
use sumac_device::{BufferRef, Memory, Node, NodeConfig, RedoSlot, Storage, ZeroCopyStorage};
use sumac_hal::ctrl::StackUsage;
use sumac_hal::ids::BootId;
use sumac_hal::shard::Shard;
use sumac_hal::time::Instant;
use sumac_virtio::{Frames, Nic, Pages, Slots};

/// The board's virtio devices (QEMU's hw/arm/virt).
// SAFETY: they are there, in the gigabyte that `cpu` maps as Device memory.
const VIRTIO: Slots = unsafe { Slots::new(0x0a00_0000, 0x200, 32, 48) };

/// The maximum number of groups of a core.
const GROUPS: usize = 16;
/// The maximum number of children of all groups.
const CHILDREN: usize = 512;
/// The maximum number of slots of all groups.
const SLOTS: usize = 2048;
/// Memory for accumulators and staging of all slots, in bytes.
const SLOT_MEMORY_BYTES: usize = 4 << 20;

/// Zero-copy contributions of all slots: slots x children of each group.
const BUFFER_REFS: usize = 4096;

/// The watchdog's limit during start-up.
const START: Duration = Duration::from_secs(20);

/// The minimum number of sleeps within the watchdog's limit: the watchdog is reset between them.
const SLEEPS: u32 = 4;

/// The memory of one core.
struct Core {
    tables: Memory<GROUPS, CHILDREN, SLOTS, 0>,
    buffers: Buffers,
    frames: Frames,
}

static mut CORES: [Core; MAX_CORES] =
    [const { Core { tables: Memory::new(), buffers: Buffers::new(), frames: Frames::new() } }; MAX_CORES];
/// Memory for the queues of a network card for each core, and of an entropy source.
static mut PAGES: Pages<{ 6 * MAX_CORES + 2 }> = Pages::new();
// Separate, because all-zero statics take no room in the image.
static mut SLOT_MEMORY: [[u8; SLOT_MEMORY_BYTES]; MAX_CORES] = [[0; SLOT_MEMORY_BYTES]; MAX_CORES];
/// The additional memory for zero-copy ranks, on the first core.
struct ZeroCopy {
    tables: ZeroCopyTables,
    redo: [RedoSlot; SLOTS],
    references: [BufferRef; BUFFER_REFS],
}

static mut ZERO_COPY: ZeroCopy = ZeroCopy {
    tables: ZeroCopyTables::new(),
    redo: [RedoSlot::EMPTY; SLOTS],
    references: [BufferRef::EMPTY; BUFFER_REFS],
};
static mut MAILBOXES: [Mailbox; MAX_CORES - 1] = [const { Mailbox::new() }; MAX_CORES - 1];

/// What the first core passes to the secondary ones before they start.
struct SecondaryBoot {
    options: BoardOptions,
    boot_id: BootId,
    shards: u16,
    /// The mailboxes' server sides, to be taken by their cores.
    mailboxes: [Option<MailboxServer<'static>>; MAX_CORES - 1],
}

static mut SECONDARY_BOOT: Option<SecondaryBoot> = None;

/// The number of secondary cores that have started.
static SERVING: AtomicUsize = AtomicUsize::new(0);

/// The first core's access to the secondary ones.
struct OtherCores {
    mailboxes: Vec<MailboxClient<'static>, { MAX_CORES - 1 }>,
}

impl sumac_bare::OtherShards for OtherCores {
    fn mailboxes(&mut self) -> &mut [MailboxClient<'static>] {
        &mut self.mailboxes
    }

    fn wake(&mut self) {
        gic::wake_others(self.mailboxes.len());
    }

    fn wait(&mut self) {
        // If a core never responds, this core's watchdog expires.
        core::hint::spin_loop();
    }
}

/// The board, on the first core.
type FirstBoard = Board<'static, Nic, OtherCores>;

static mut BOARD: Option<FirstBoard> = None;

/// The entry point of the first core, once it has a stack.
extern "C" fn main() -> ! {
    cpu::rearm_watchdog(START);
    let (board, options) = set_up();
    let (mut lost, mut busy) = (0, Duration::ZERO);
    serve(options.watchdog, |now| {
        // Acknowledge before polling: a later arrival raises another interrupt.
        board.device_mut().acknowledge();
        let next = board.step(now);
        busy += cpu::now() - now;
        while let Some(event) = board.poll_event() {
            log_event(event);
            #[cfg(feature = "faults")]
            if let BoardEvent::Trace(_) = event
                && options.fault == Some(sumac_bare::Fault::Trace)
                && keep::incarnation() == 1
            {
                panic!("injected fault");
            }
            if matches!(event, BoardEvent::Disconnected(_)) {
                // With QEMU's -icount shift=0 a nanosecond is an instruction.
                let (nanos, packets) = (busy.as_nanos() as u64, board.packets_in());
                defmt::info!("so far {=u64} ns of work over {=u64} packets received", nanos, packets);
            }
        }
        if keep::lost() > lost {
            lost = keep::lost();
            defmt::warn!("{=u32} bytes of the log were overwritten before they were sent", lost);
        }
        next
    })
}

/// Set up the board. The stack frame, with everything that is moved to its place, is gone when the board serves.
#[inline(never)]
fn set_up() -> (&'static mut FirstBoard, BoardOptions) {
    let (incarnation, end) = keep::begin();
    let mut text = [0; OPTIONS_MAX_BYTES];
    let options = match fw_cfg::file("opt/sumac/options", &mut text) {
        None => panic!("no options: start QEMU with -fw_cfg name=opt/sumac/options,file=..."),
        Some(text) => match BoardOptions::parse(text) {
            Ok(options) => options,
            Err(error) => panic!("options: {error}"),
        },
    };
    // SAFETY: called once, on the first core; nothing else accesses it.
    sumac_virtio::provide(unsafe { &mut *&raw mut PAGES });
    entropy::start(VIRTIO);
    // Without an entropy source, the start time distinguishes incarnations. It is no secret, and good for nothing else.
    let boot_id = entropy::bytes().map(u64::from_le_bytes);
    let boot_id = BootId(boot_id.unwrap_or_else(|| cpu::now().as_nanos() ^ u64::from(incarnation) << 48));
    let shards = VIRTIO.network_cards().clamp(1, MAX_CORES);
    let others = start_others(&options, boot_id, shards);
    // SAFETY: only the first core accesses it, here and once.
    let ZeroCopy { tables, redo, references } = unsafe { &mut *&raw mut ZERO_COPY };
    let zero_copy = options.broker.as_ref().filter(|_| shards == 1).map(|_| open_zero_copy(tables, boot_id));
    let storage = zero_copy.as_ref().map(|zero_copy| {
        let (memory, capabilities) = zero_copy.redo_memory();
        ZeroCopyStorage { redo, buffers: references, memory, capabilities }
    });
    let (stack, node) = shard(0, &options, boot_id, shards as u16, storage);
    defmt::info!(
        "{=str} is ready: incarnation {=u32}, boot id {=u64:016x}, {=usize} cores",
        options.name.as_str(),
        incarnation,
        boot_id.0,
        shards
    );
    match end {
        keep::End::None => {}
        keep::End::Panic => defmt::warn!("the previous incarnation ended with a panic"),
        keep::End::Fault => defmt::warn!("the previous incarnation ended with a fault"),
        keep::End::Watchdog => defmt::warn!("the previous incarnation was reset by the watchdog"),
    }
    // SAFETY: only the first core accesses it, here and once.
    let place = unsafe { &mut *&raw mut BOARD };
    let board = place.insert(Board::new(stack, node, others, zero_copy, &options, boot_id));
    board.set_stack_gauge(stack_use);
    board.set_entropy(entropy::bytes);
    #[cfg(feature = "faults")]
    if let Some(fault) = options.fault.filter(|_| incarnation == 1) {
        inject(fault);
    }
    (board, options)
}

/// Return the stack use of this core.
fn stack_use() -> Option<StackUsage> {
    let (used, of) = cpu::stack_high_water();
    Some(StackUsage { used_bytes: used as u32, size_bytes: of as u32 })
}

/// Serve zero-copy ranks of the host: the first ivshmem function is the admission queue, the second the redo memory,
/// all others are rank slots.
fn open_zero_copy(tables: &'static mut ZeroCopyTables, boot_id: BootId) -> ZeroCopyServer {
    let (mut admission, mut redo, mut rank_slots) = (None, None, Vec::new());
    pci::shared_memory(|memory| match (admission, redo) {
        (None, _) => admission = Some(memory),
        (_, None) => redo = Some(memory),
        // Functions beyond the maximum are ignored.
        _ => drop(rank_slots.push(memory)),
    });
    let (Some(admission), Some(redo)) = (admission, redo) else {
        panic!("options name a broker, but QEMU has fewer than two ivshmem functions");
    };
    defmt::info!("zero-copy: {=usize} rank slots, {=usize} B of redo memory", rank_slots.len(), size_of_val(redo));
    match ZeroCopyServer::open(tables, ZeroCopyMemory { admission, redo, rank_slots }, boot_id) {
        Ok(server) => server,
        Err(error) => panic!("zero-copy: {error}"),
    }
}

/// Start a core for each secondary shard; returns their mailboxes.
fn start_others(options: &BoardOptions, boot_id: BootId, shards: usize) -> OtherCores {
    let mut servers = [const { None }; MAX_CORES - 1];
    // SAFETY: only this core runs, and this is the only use of MAILBOXES.
    let mailboxes = unsafe { &mut *&raw mut MAILBOXES };
    let mut clients = Vec::new();
    for (mailbox, slot) in mailboxes.iter_mut().zip(&mut servers).take(shards - 1) {
        let (client, server) = mailbox.split();
        *slot = Some(server);
        // At most MAX_CORES - 1.
        let _ = clients.push(client);
    }
    // SAFETY: the other cores, which read it, are started below.
    unsafe {
        *&raw mut SECONDARY_BOOT =
            Some(SecondaryBoot { options: options.clone(), boot_id, shards: shards as u16, mailboxes: servers })
    };
    for core in 1..shards {
        if !cpu::start_core(core) {
            panic!("{shards} network cards and no core {core}: start QEMU with -smp {shards}");
        }
        // One after the other: each takes its own part of SECONDARY_BOOT.
        while SERVING.load(Ordering::Acquire) < core {
            core::hint::spin_loop();
        }
    }
    OtherCores { mailboxes: clients }
}

/// The entry point of a secondary core, once it has a stack.
extern "C" fn secondary(core: usize) -> ! {
    cpu::rearm_watchdog(START);
    // SAFETY: the first core has written it and waits for SERVING; no other core starts before.
    let boot = unsafe { &mut *&raw mut SECONDARY_BOOT };
    let Some((boot, mailbox)) =
        boot.as_mut().and_then(|boot| boot.mailboxes[core - 1].take().map(|mailbox| (boot, mailbox)))
    else {
        panic!("core {core} has no boot data");
    };
    let Some(options) = boot.options.shard(core as u16) else { panic!("core {core}: its port exceeds 65535") };
    let (stack, node) = shard(core, &options, boot.boot_id, boot.shards, None);
    let mut secondary = SecondaryShard::new(stack, node, mailbox);
    secondary.set_stack_gauge(stack_use);
    SERVING.store(core, Ordering::Release);
    serve(options.watchdog, |now| {
        gic::acknowledge_wake();
        secondary.device_mut().acknowledge();
        let next = secondary.step(now);
        while let Some(event) = secondary.poll_event() {
            log_event(event);
        }
        next
    })
}

/// Set up the interrupts, network and node of this core. Called once per core.
fn shard(
    core: usize,
    options: &BoardOptions,
    boot_id: BootId,
    shards: u16,
    zero_copy: Option<ZeroCopyStorage<'static>>,
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
        receive_buffer_bytes: RX_PACKETS * PACKET_GUARANTEED_LEN_BYTES,
    };
    let storage = Storage { bytes: slot_memory, ..tables.storage() };
    let node = match zero_copy {
        Some(zero_copy) => Node::with_zero_copy(config, storage, zero_copy),
        None => Node::new(config, storage),
    };
    (stack, node)
}

/// Call `step` for ever; it returns when the next step is due.
fn serve(watchdog: Duration, mut step: impl FnMut(Instant) -> Option<Instant>) -> ! {
    loop {
        cpu::rearm_watchdog(watchdog);
        cpu::check_stack();
        let now = cpu::now();
        let next = step(now);
        if next.is_some_and(|at| at <= cpu::now()) || cpu::core() == 0 && log::drain() {
            continue;
        }
        let wake = now + watchdog / SLEEPS;
        cpu::set_alarm(next.map_or(wake, |at| at.min(wake)));
        cpu::wait_for_interrupt();
    }
}

fn log_event(event: BoardEvent) {
    match event {
        BoardEvent::Connected => {
            let (used, of) = cpu::stack_high_water();
            defmt::info!("the controller is connected; stack {=usize} of {=usize} B", used, of);
        }
        BoardEvent::Disconnected(error) => defmt::warn!("controller: {}", defmt::Display2Format(&error)),
        BoardEvent::Node(event) => defmt::info!("{}", defmt::Debug2Format(&event)),
        BoardEvent::Trace(entry) => defmt::debug!("trace: {}", defmt::Debug2Format(&entry.event)),
        _ => {}
    }
}

/// Inject the configured fault.
#[cfg(feature = "faults")]
fn inject(fault: sumac_bare::Fault) {
    defmt::info!("injecting a fault");
    match fault {
        sumac_bare::Fault::Panic => panic!("injected fault"),
        // Trace entries not sent by then have to appear in the next incarnation: see `main`.
        sumac_bare::Fault::Trace => 0,
        // SAFETY: none: nothing is mapped at that address, which is the point.
        sumac_bare::Fault::Access => unsafe { (0x80_0000_0000 as *const u32).read_volatile() },
        sumac_bare::Fault::Hang => {
            cpu::rearm_watchdog(Duration::from_millis(500));
            loop {
                core::hint::spin_loop();
            }
        }
    };
}

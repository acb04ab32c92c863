//! The interrupt controller (GICv2): forwards interrupts that end a wait, and the watchdog's.
//!
//! No interrupt is taken as an IRQ: they stay masked at the core and wake it. Group 0, which contains only the
//! watchdog, is signalled as FIQ (GICv2 architecture specification, IHI 0048B, 4.4.4).

use core::ptr::NonNull;
use volatile::access::{ReadWrite, WriteOnly};
use volatile::{VolatileFieldAccess, VolatilePtr, VolatileRef};

/// The virtual timer's interrupt: a private one.
pub(crate) const VIRTUAL_TIMER: u32 = 27;

/// The physical timer's interrupt, used as the watchdog.
pub(crate) const PHYSICAL_TIMER: u32 = 30;

/// The registers of the distributor that are used (IHI 0048B, 4.3).
#[repr(C)]
#[derive(VolatileFieldAccess)]
struct Distributor {
    #[access(ReadWrite)]
    control: u32,
    reserved: [u32; 31],
    #[access(ReadWrite)]
    group: [u32; 32],
    /// Writing 1 enables; reading returns the state.
    #[access(ReadWrite)]
    set_enable: [u32; 32],
    between: [u32; 32 * 5 + 256],
    /// The target cores of each interrupt, a byte each.
    #[access(ReadWrite)]
    targets: [u8; 1024],
    between_too: [u32; 192],
    /// Generates an interrupt.
    #[access(WriteOnly)]
    generate: u32,
    reserved_too: [u32; 3],
    /// Writing 1 clears, for the first four that software generates, a byte each: bit n for core n.
    #[access(ReadWrite)]
    clear_pending_generated: u32,
}

const _: () = assert!(core::mem::offset_of!(Distributor, targets) == 0x800);
const _: () = assert!(core::mem::offset_of!(Distributor, generate) == 0xf00);
const _: () = assert!(core::mem::offset_of!(Distributor, clear_pending_generated) == 0xf10);

bitflags::bitflags! {
    /// GICC_CTLR (IHI 0048B, 4.4.1).
    struct InterfaceControl: u32 {
        const GROUP_0 = 1 << 0;
        const GROUP_1 = 1 << 1;
        const GROUP_0_AS_FIQ = 1 << 3;
    }
}

/// The core's interface (IHI 0048B, 4.4).
#[repr(C)]
#[derive(VolatileFieldAccess)]
struct Interface {
    #[access(ReadWrite)]
    control: u32,
    #[access(ReadWrite)]
    priority_mask: u32,
}

const DISTRIBUTOR: NonNull<Distributor> = NonNull::new(0x0800_0000 as *mut Distributor).unwrap();
const INTERFACE: NonNull<Interface> = NonNull::new(0x0801_0000 as *mut Interface).unwrap();

/// The interrupt with which one core wakes another: the first software-generated one.
const WAKE: u32 = 0;

/// Enable both timers, the shared interrupt `nic` and wake-ups from other cores for this core. Called by the first core
/// first, which enables the distributor.
///
/// # Panics
/// If `nic` is not a valid interrupt: GICv2 has 1,020.
pub(crate) fn start(core: usize, nic: u32) {
    assert!(nic < 1_020, "interrupt {nic}");
    // SAFETY: QEMU's virt board has these registers there, mapped as Device memory, and nothing else uses them.
    let (mut distributor, mut interface) = unsafe { (VolatileRef::new(DISTRIBUTOR), VolatileRef::new(INTERFACE)) };
    let distributor = distributor.as_mut_ptr();
    for number in [VIRTUAL_TIMER, WAKE, nic] {
        let group = word(distributor.group(), number);
        group.write(group.read() | 1 << (number % 32));
    }
    for number in [VIRTUAL_TIMER, WAKE, nic, PHYSICAL_TIMER] {
        word(distributor.set_enable(), number).write(1 << (number % 32));
    }
    // SAFETY: a byte for each interrupt, of which there are enough.
    let target = unsafe { distributor.targets().map(|bytes| bytes.cast::<u8>().add(nic as usize)) };
    target.write(1 << core);
    distributor.control().write(0b11);
    let interface = interface.as_mut_ptr();
    interface.priority_mask().write(0xff);
    let control = InterfaceControl::GROUP_0 | InterfaceControl::GROUP_1 | InterfaceControl::GROUP_0_AS_FIQ;
    interface.control().write(control.bits());
}

/// Wake the cores from 1 to `last`.
pub(crate) fn wake_others(last: usize) {
    // SAFETY: as in `start`.
    let mut distributor = unsafe { VolatileRef::new(DISTRIBUTOR) };
    let cores = (1..=last as u32).fold(0, |cores, core| cores | 1 << core);
    // GICD_SGIR (4.3.15): to the listed cores; the bit for group 1, where it waits masked.
    distributor.as_mut_ptr().generate().write(cores << 16 | 1 << 15 | WAKE);
}

/// Acknowledge a wake-up.
pub(crate) fn acknowledge_wake() {
    // SAFETY: as in `start`. The register is this core's own.
    let mut distributor = unsafe { VolatileRef::new(DISTRIBUTOR) };
    distributor.as_mut_ptr().clear_pending_generated().write(0xff);
}

/// Return the word that holds the bit of interrupt `number`.
fn word(registers: VolatilePtr<'_, [u32; 32], ReadWrite>, number: u32) -> VolatilePtr<'_, u32, ReadWrite> {
    // SAFETY: 32 words have bits for 1,024 interrupts, and there is none behind them.
    unsafe { registers.map(|words| words.cast::<u32>().add(number as usize / 32)) }
}

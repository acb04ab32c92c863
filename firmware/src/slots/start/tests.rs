//! A machine with firmware that knows only its order, versions that are good, panic or never get healthy, and power
//! that fails after any number of writes.

use super::*;
use crate::slots::{Event, Notice, Offer, Policy, Updater};
use sha2::{Digest, Sha256};
use std::cell::Cell;
use std::rc::Rc;
use sumac_hal::flash::Geometry;
use sumac_hal::time::Instant;

const BLOCK: usize = 128;
const GEOMETRY: Geometry = Geometry { block_len_bytes: BLOCK, blocks: 6 };

/// Writes until power fails.
#[derive(Debug, Clone, Default)]
struct Power(Rc<Cell<usize>>);

#[derive(Debug, PartialEq, Eq, Error)]
#[error("no power")]
struct NoPower;

impl Power {
    fn draw(&self) -> Result<(), NoPower> {
        self.0.set(self.0.get().checked_sub(1).ok_or(NoPower)?);
        Ok(())
    }
}

#[derive(Debug)]
struct Blocks<'a> {
    bytes: &'a mut Vec<u8>,
    power: Power,
}

impl BlockDevice for Blocks<'_> {
    type Error = NoPower;

    fn geometry(&self) -> Geometry {
        GEOMETRY
    }

    fn read(&mut self, block: u32, buffer: &mut [u8]) -> Result<(), NoPower> {
        buffer.copy_from_slice(&self.bytes[block as usize * BLOCK..][..buffer.len()]);
        Ok(())
    }

    fn write(&mut self, block: u32, data: &[u8]) -> Result<(), NoPower> {
        for (data, at) in data.chunks(BLOCK).zip(block as usize..) {
            let to = &mut self.bytes[at * BLOCK..][..BLOCK];
            if self.power.draw().is_err() {
                // Torn.
                to[..BLOCK / 2].copy_from_slice(&data[..BLOCK / 2]);
                return Err(NoPower);
            }
            to.copy_from_slice(data);
        }
        Ok(())
    }

    fn flush(&mut self) -> Result<(), NoPower> {
        Ok(())
    }
}

/// The firmware's variables: `BootNext` and `BootOrder`.
#[derive(Debug, Clone, Default)]
struct Firmware {
    next: Option<Slot>,
    order: Vec<Slot>,
    power: Power,
}

impl BootOrder for Firmware {
    type Error = NoPower;

    fn try_once(&mut self, slot: Slot) -> Result<(), NoPower> {
        self.power.draw()?;
        self.next = Some(slot);
        Ok(())
    }

    fn prefer(&mut self, slot: Slot) -> Result<(), NoPower> {
        if self.order.first() != Some(&slot) {
            self.power.draw()?;
            self.order.retain(|other| *other != slot);
            self.order.insert(0, slot);
        }
        Ok(())
    }
}

/// What a version does, which is the first byte of its payload.
const GOOD: u8 = b'g';
const PANICS: u8 = b'p';
const NEVER_HEALTHY: u8 = b'n';

#[derive(Debug, Clone)]
struct Machine {
    disks: [Vec<u8>; 2],
    firmware: Firmware,
    power: Power,
    restarts: usize,
}

/// Where a start ends.
#[derive(Debug, PartialEq, Eq)]
enum Ends {
    /// A confirmed version of this epoch serves.
    Serves { slot: Slot, epoch: u64 },
    /// No slot is in the order: another system boots.
    Elsewhere,
    /// The running version refuses.
    Refuses(String),
}

impl Machine {
    fn new() -> Self {
        let power = Power(Rc::new(Cell::new(usize::MAX)));
        let firmware = Firmware { power: power.clone(), ..Firmware::default() };
        Self { disks: [(); 2].map(|()| vec![0xa5; BLOCK * 6]), firmware, power, restarts: 0 }
    }

    fn slots(&mut self) -> Slots<Blocks<'_>> {
        let power = &self.power;
        let devices = self.disks.each_mut().map(|bytes| Blocks { bytes, power: power.clone() });
        Slots::new(devices).expect("large enough")
    }

    /// Install from the running slot, or over rshim.
    fn install(&mut self, running: Option<Slot>, behaviour: u8, epoch: u64) -> Result<(), String> {
        let payload = [behaviour; 300];
        let offer = Offer {
            version: format!("{behaviour}-{epoch}"),
            epoch,
            len_bytes: 300,
            sha256: Sha256::digest(payload).into(),
        };
        let mut slots = self.slots();
        let running = running.map(|slot| {
            let record = slots.record(slot).expect("readable").expect("running");
            Selected { slot, record }
        });
        let mut updater = Updater::new(Policy::default(), running, Instant::ZERO);
        for event in [Event::Begin(&offer), Event::Chunk(&payload), Event::Finish] {
            updater.handle(event, &mut slots).map_err(|error| error.to_string())?;
        }
        let Some(Notice::Restart { slot }) = updater.poll_event() else { panic!("no notice") };
        let selected = slots.select().map_err(|error| error.to_string())?;
        assert_eq!(selected.slot, slot);
        self.firmware.try_once(slot).map_err(|error| error.to_string())
    }

    /// Run a version that the firmware has started; `None`: the machine restarts.
    fn run(&mut self, running: Slot) -> Option<Ends> {
        let behaviour = self.disks[running.index()][0];
        if behaviour == PANICS {
            return None;
        }
        let (preferred, mut firmware) = (self.firmware.order.first().copied(), self.firmware.clone());
        let started = start(&mut self.slots(), running, preferred, &mut firmware);
        self.firmware = firmware;
        let selected = match started {
            Ok(Start::Run(selected)) => selected,
            Ok(Start::Restart(_)) | Err(StartError::Order(NoPower) | StartError::Slot(SlotError::Device { .. })) => {
                return None;
            }
            Err(error) => return Some(Ends::Refuses(error.to_string())),
        };
        let epoch = selected.record.epoch;
        if matches!(selected.record.state, State::Trial { .. }) {
            if behaviour == NEVER_HEALTHY {
                return None;
            }
            let mut slots = self.slots();
            let mut updater = Updater::new(Policy::default(), Some(selected), Instant::ZERO);
            updater.handle(Event::Healthy, &mut slots).ok()?;
            self.firmware.prefer(running).ok()?;
        }
        Some(Ends::Serves { slot: running, epoch })
    }

    /// Start until something stays.
    fn boot(&mut self) -> Ends {
        for _ in 0..20 {
            let Some(slot) = self.firmware.next.take().or(self.firmware.order.first().copied()) else {
                return Ends::Elsewhere;
            };
            if let Some(ends) = self.run(slot) {
                return ends;
            }
            // Power is back.
            self.power.0.set(usize::MAX);
            self.restarts += 1;
        }
        panic!("it restarts without end: {self:?}");
    }
}

fn installed(epoch: u64) -> Machine {
    let mut machine = Machine::new();
    machine.install(None, GOOD, epoch).expect("installed");
    assert_eq!(machine.boot(), Ends::Serves { slot: Slot::A, epoch });
    assert_eq!(machine.firmware.order, [Slot::A]);
    machine
}

#[test]
fn good_update_stays_and_a_bad_one_is_tried_twice() {
    let mut machine = installed(1);
    machine.install(Some(Slot::A), GOOD, 2).expect("installed");
    assert_eq!(machine.boot(), Ends::Serves { slot: Slot::B, epoch: 2 });
    for bad in [PANICS, NEVER_HEALTHY] {
        machine.restarts = 0;
        machine.install(Some(Slot::B), bad, 3).expect("installed");
        assert_eq!(machine.boot(), Ends::Serves { slot: Slot::B, epoch: 2 });
        // Twice from the trial to the running version, and once from there to the second try.
        assert_eq!(machine.restarts, 3);
        assert_eq!(machine.boot(), Ends::Serves { slot: Slot::B, epoch: 2 }, "and stays abandoned");
    }
    let error = machine.install(Some(Slot::B), GOOD, 1).expect_err("older");
    assert!(error.contains("epoch 1") && error.contains("rollback is refused"), "{error}");
}

#[test]
fn first_install_that_fails_leaves_the_machine_to_its_own_system() {
    for bad in [PANICS, NEVER_HEALTHY] {
        let mut machine = Machine::new();
        machine.install(None, bad, 1).expect("installed");
        assert_eq!(machine.boot(), Ends::Elsewhere);
    }
}

/// Power fails once after any number of writes, during install, trial or confirmation.
#[test]
fn power_cut_anywhere_ends_in_a_confirmed_version_of_no_older_epoch() {
    for behaviour in [GOOD, PANICS, NEVER_HEALTHY] {
        let (mut cut_in, mut installs) = (0, 0);
        for writes in 0.. {
            let mut machine = installed(5);
            machine.power.0.set(writes);
            let is_installed = machine.install(Some(Slot::A), behaviour, 6).is_ok();
            if !is_installed {
                machine.power.0.set(usize::MAX);
            }
            let ends = machine.boot();
            let (old, new) = (Ends::Serves { slot: Slot::A, epoch: 5 }, Ends::Serves { slot: Slot::B, epoch: 6 });
            assert!(ends == old || behaviour == GOOD && ends == new, "{behaviour} cut after {writes} writes: {ends:?}");
            assert_eq!(machine.boot(), ends, "it stays");
            let uncut = machine.power.0.get() > 1000 && is_installed && machine.restarts == 0;
            installs += usize::from(is_installed);
            cut_in += usize::from(!is_installed);
            if uncut || writes > 60 {
                break;
            }
        }
        assert!(cut_in > 5 && installs > 2, "{cut_in} cuts while installing, {installs} afterwards");
    }
}

#[test]
fn version_that_is_older_than_a_confirmed_one_does_not_serve() {
    let mut machine = installed(1);
    machine.install(Some(Slot::A), GOOD, 2).expect("installed");
    assert_eq!(machine.boot(), Ends::Serves { slot: Slot::B, epoch: 2 });
    // Somebody selects the old one in the firmware's menu, once, and for ever.
    machine.firmware.next = Some(Slot::A);
    assert!(matches!(machine.boot(), Ends::Refuses(why) if why.contains("epoch 1") && why.contains("epoch 2")));
    machine.firmware.order = vec![Slot::A];
    assert_eq!(machine.boot(), Ends::Serves { slot: Slot::B, epoch: 2 });
    // The confirmed version is damaged.
    machine.disks[1][10] ^= 1;
    machine.firmware.next = Some(Slot::A);
    assert!(matches!(machine.boot(), Ends::Refuses(_)), "an older epoch does not serve");
    let error = machine.install(None, GOOD, 1).expect_err("older, over rshim");
    assert!(error.contains("epoch 1") && error.contains("epoch 2"), "{error}");
    machine.install(None, GOOD, 2).expect("installed");
    assert!(matches!(machine.boot(), Ends::Serves { epoch: 2, .. }));
}

#[test]
fn version_of_the_same_epoch_serves_when_the_confirmed_one_is_damaged() {
    let mut machine = installed(1);
    machine.install(Some(Slot::A), GOOD, 1).expect("installed");
    assert_eq!(machine.boot(), Ends::Serves { slot: Slot::B, epoch: 1 });
    machine.disks[1][10] ^= 1;
    // The firmware cannot start it and goes on with the next in its order.
    machine.firmware.next = Some(Slot::A);
    assert_eq!(machine.boot(), Ends::Serves { slot: Slot::A, epoch: 1 });
}

#[test]
fn half_written_slot_starts_the_other() {
    let mut machine = installed(1);
    machine.power.0.set(3);
    machine.install(Some(Slot::A), GOOD, 2).expect_err("power fails");
    machine.power.0.set(usize::MAX);
    machine.disks[1][0] = GOOD;
    machine.firmware.next = Some(Slot::B);
    assert_eq!(machine.boot(), Ends::Serves { slot: Slot::A, epoch: 1 });
}

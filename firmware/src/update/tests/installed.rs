//! A card that firmware starts by boot entries: power fails after any write to a slot or to a variable, during updates,
//! rollbacks, starts and confirmations.

use super::*;
use crate::boot::{BootEntries, EfiBootOrder, Partition, SlotLoader, Variables};
use crate::slots::{BootLoader, BootOrder, Start, State as Trust, start};
use std::cell::{Cell, RefCell};
use std::collections::BTreeMap;
use std::rc::Rc;

/// Writes until power fails.
#[derive(Debug, Clone)]
struct Power(Rc<Cell<usize>>);

impl Power {
    fn draw(&self) -> io::Result<()> {
        self.0.set(self.0.get().checked_sub(1).ok_or_else(|| io::Error::other("no power"))?);
        Ok(())
    }
}

/// How much of a torn write is executed, in bytes: within a record.
const TORN_BYTES: usize = 64;

/// A slot's device. A write that power fails in is torn.
#[derive(Debug, Clone)]
struct Disk(Ram, Power);

impl BlockDevice for Disk {
    type Error = io::Error;

    fn geometry(&self) -> Geometry {
        self.0.geometry()
    }

    fn read(&mut self, block: u32, buffer: &mut [u8]) -> io::Result<()> {
        self.0.read(block, buffer)
    }

    fn write(&mut self, block: u32, data: &[u8]) -> io::Result<()> {
        for (block, data) in (block..).zip(data.chunks(BLOCK_LEN_BYTES)) {
            if let Err(error) = self.1.draw() {
                let mut torn = [0; BLOCK_LEN_BYTES];
                self.0.read(block, &mut torn)?;
                torn[..TORN_BYTES].copy_from_slice(&data[..TORN_BYTES]);
                self.0.write(block, &torn)?;
                return Err(error);
            }
            self.0.write(block, data)?;
        }
        Ok(())
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

/// The firmware's variables.
#[derive(Debug, Clone)]
struct Firmware(Rc<RefCell<BTreeMap<String, Vec<u8>>>>, Power);

impl Variables for Firmware {
    fn read(&self, name: &str) -> io::Result<Option<Vec<u8>>> {
        Ok(self.0.borrow().get(name).cloned())
    }

    fn write(&mut self, name: &str, value: &[u8]) -> io::Result<()> {
        self.1.draw()?;
        self.0.borrow_mut().insert(name.into(), value.into());
        Ok(())
    }

    fn remove(&mut self, name: &str) -> io::Result<()> {
        self.1.draw()?;
        self.0.borrow_mut().remove(name);
        Ok(())
    }
}

/// What happens on the card, which may end in a loss of power.
type Happens = Result<(), String>;

struct Machine {
    disks: [Ram; 2],
    firmware: Firmware,
    power: Power,
    /// Versions that start with this never get healthy.
    sick: &'static str,
    /// Which slots were started by the last call of [`Machine::boot`].
    starts: Vec<Slot>,
    /// Power has failed there.
    was_cut: bool,
}

impl Machine {
    /// A card that runs version 2.0 in slot B, confirmed, after an update from 1.0 in slot A. Both have epoch 1.
    fn updated() -> Self {
        let power = Power(Rc::new(Cell::new(usize::MAX)));
        let firmware = Firmware(Rc::default(), power.clone());
        let disks = [Ram::new(), Ram::new()];
        let mut machine = Self { disks, firmware, power, sick: "sick", starts: Vec::new(), was_cut: false };
        machine.install("1.0", 1).expect("power");
        assert_eq!(machine.boot(), (Slot::A, "1.0".to_owned(), 1));
        machine.update(Slot::A, &Image::new("2.0", 1, &key(1))).expect("power");
        assert_eq!(machine.boot(), (Slot::B, "2.0".to_owned(), 1));
        machine
    }

    fn slots(&self) -> Slots<Disk> {
        Slots::new(self.disks.clone().map(|disk| Disk(disk, self.power.clone()))).expect("large enough")
    }

    fn order(&self) -> EfiBootOrder<Firmware> {
        EfiBootOrder::new(self.firmware.clone())
    }

    fn loader(&self, running: Option<Slot>) -> SlotLoader<EfiBootOrder<Firmware>> {
        let partition = |number| Partition { number, start: 2048, blocks: 64, guid: [number as u8; 16] };
        SlotLoader::new(self.order(), running, [partition(1), partition(2)], "console=hvc0".into())
    }

    /// Install over rshim, as the agent does.
    fn install(&mut self, version: &str, epoch: u64) -> Happens {
        let image = Image::new(version, epoch, &key(1));
        let (mut slots, mut loader) = (self.slots(), self.loader(None));
        let mut updater = Updater::new(Policy::default(), None, Instant::ZERO);
        let UpdateOffer { len_bytes, sha256, .. } = image.offer();
        let offer = crate::slots::Offer { version: version.into(), epoch, len_bytes, sha256 };
        let fail = |error: &dyn std::fmt::Display| error.to_string();
        updater.handle(SlotEvent::Begin(&offer), &mut slots).map_err(|error| fail(&error))?;
        loader.prepare(updater.writing().expect("a slot")).map_err(|error| fail(&error))?;
        for event in [SlotEvent::Chunk(&image.bytes), SlotEvent::Finish] {
            updater.handle(event, &mut slots).map_err(|error| fail(&error))?;
        }
        let selected = slots.select().map_err(|error| fail(&error))?;
        loader.try_once(selected.slot).map_err(|error| fail(&error))
    }

    fn card(&self, running: Slot) -> Card<Disk, SlotLoader<EfiBootOrder<Firmware>>, Recorder> {
        let key = key(1).verifying_key().into();
        Card::new(self.slots(), Some(running), key, (self.loader(Some(running)), Recorder::default()))
    }

    fn work(&self, running: Slot, work: impl IntoIterator<Item = Work>) -> Happens {
        let mut card = self.card(running);
        for work in work {
            if let Done::Failed(why) = card.run(work) {
                return Err(why);
            }
        }
        Ok(())
    }

    /// Take an update over the network.
    fn update(&self, running: Slot, image: &Image) -> Happens {
        let begin = Work::Begin { offer: image.offer(), manifest: image.manifest.clone() };
        let pieces = image.bytes.chunks(1000).map(|piece| Work::Write(piece.to_vec()));
        self.work(running, [begin].into_iter().chain(pieces).chain([Work::Finish]))
    }

    fn roll_back(&self, running: Slot) -> Happens {
        self.work(running, [Work::RollBack])
    }

    /// What the firmware starts next, if it is a slot.
    fn firmware_starts(&self) -> Option<Slot> {
        let next = self.firmware.0.borrow_mut().remove("BootNext");
        let first = || self.firmware.0.borrow().get("BootOrder").and_then(|order| order.get(..2).map(<[u8]>::to_vec));
        let number = next.or_else(first)?;
        self.firmware.0.borrow_mut().insert("BootCurrent".into(), number);
        self.order().current().expect("readable")
    }

    /// Run a version that was started; `None`: the machine restarts.
    fn run(&mut self, running: Slot) -> Option<(Slot, String, u64)> {
        let (mut slots, mut order) = (self.slots(), self.order());
        let preferred = order.preferred().expect("readable");
        let Start::Run(selected) = start(&mut slots, running, preferred, &mut order).ok()? else { return None };
        let (version, epoch) = (selected.record.version.clone(), selected.record.epoch);
        if selected.record.state != Trust::Confirmed {
            if version.starts_with(self.sick) {
                return None;
            }
            let mut updater = Updater::new(Policy::default(), Some(selected), Instant::ZERO);
            updater.handle(SlotEvent::Healthy, &mut slots).ok()?;
            order.prefer(running).ok()?;
        }
        Some((running, version, epoch))
    }

    /// Start until something stays. Returns what serves, confirmed.
    fn boot(&mut self) -> (Slot, String, u64) {
        self.starts.clear();
        self.was_cut = false;
        for _ in 0..20 {
            let slot = self.firmware_starts().expect("one of our slots");
            self.starts.push(slot);
            let record = self.slots().record(slot).expect("readable").expect("a record");
            assert!(record.state != Trust::Empty, "the firmware starts slot {slot}, which is being written");
            if let Some(serves) = self.run(slot) {
                return serves;
            }
            if self.power.0.get() == 0 {
                // It is back.
                self.power.0.set(usize::MAX);
                self.was_cut = true;
            }
        }
        panic!("it restarts without end: {:?}", self.starts);
    }
}

/// Let power fail after each number of writes of `act`, and in the starts after it. `may_serve` says what may serve
/// then. Returns how often power failed in `act`, and how often after it.
fn cut_everywhere(
    prepare: impl Fn() -> Machine,
    act: impl Fn(&Machine) -> Happens,
    may_serve: &[(Slot, &str, u64)],
) -> (usize, usize) {
    let (mut within, mut after) = (0, 0);
    let mut served = std::collections::BTreeSet::new();
    for writes in 0..200 {
        let mut machine = prepare();
        machine.power.0.set(writes);
        let is_done = act(&machine).is_ok();
        if !is_done {
            machine.power.0.set(usize::MAX);
            within += 1;
        }
        let serves = machine.boot();
        assert!(
            may_serve
                .iter()
                .any(|(slot, version, epoch)| (*slot, *version, *epoch) == (serves.0, &*serves.1, serves.2)),
            "cut after {writes} writes: {serves:?}"
        );
        let was_cut = machine.was_cut;
        machine.power.0.set(usize::MAX);
        assert_eq!(machine.boot(), serves, "cut after {writes} writes: it stays");
        served.insert(serves.1);
        if is_done && !was_cut {
            assert_eq!(served.len(), may_serve.len(), "{served:?}");
            return (within, after);
        }
        after += usize::from(is_done);
    }
    panic!("it writes without end")
}

#[test]
fn card_is_updated_and_rolled_back_by_boot_entries() {
    let mut machine = Machine::updated();
    assert_eq!(machine.starts, [Slot::B], "tried once");
    machine.roll_back(Slot::B).expect("power");
    assert_eq!(machine.boot(), (Slot::A, "1.0".to_owned(), 1));
    assert_eq!(machine.starts, [Slot::A]);
    assert_eq!(machine.order().preferred().expect("readable"), Some(Slot::A), "it was confirmed again");
}

/// As one that was installed over rshim.
#[test]
fn version_that_never_gets_healthy_is_tried_twice_by_boot_entries() {
    let mut machine = Machine::updated();
    machine.update(Slot::B, &Image::new("sick", 2, &key(1))).expect("power");
    assert_eq!(machine.boot(), (Slot::B, "2.0".to_owned(), 1));
    assert_eq!(machine.starts, [Slot::A, Slot::B, Slot::A, Slot::B]);
    // The same for a version that was confirmed before.
    let mut machine = Machine::updated();
    machine.sick = "1.0";
    machine.roll_back(Slot::B).expect("power");
    assert_eq!(machine.boot(), (Slot::B, "2.0".to_owned(), 1));
    assert_eq!(machine.starts, [Slot::A, Slot::B, Slot::A, Slot::B]);
}

#[test]
fn power_cut_in_an_update_over_the_network_ends_in_a_confirmed_version() {
    let image = Image::new("3.0", 2, &key(1));
    let may_serve = [(Slot::B, "2.0", 1), (Slot::A, "3.0", 2)];
    let (within, after) = cut_everywhere(Machine::updated, |machine| machine.update(Slot::B, &image), &may_serve);
    assert!(within > 15 && after >= 2, "{within} cuts within, {after} after");
    let sick = Image::new("sick", 2, &key(1));
    let (_, after) = cut_everywhere(Machine::updated, |machine| machine.update(Slot::B, &sick), &may_serve[..1]);
    assert!(after >= 2, "{after}");
}

#[test]
fn power_cut_in_a_rollback_ends_in_a_confirmed_version() {
    let may_serve = [(Slot::B, "2.0", 1), (Slot::A, "1.0", 1)];
    let (within, after) = cut_everywhere(Machine::updated, |machine| machine.roll_back(Slot::B), &may_serve);
    assert!(within >= 3 && after >= 2, "{within} cuts within, {after} after");
    // A trial is rolled back: the version before, or the trial once more.
    let on_trial = || {
        let mut machine = Machine::updated();
        machine.update(Slot::B, &Image::new("3.0", 2, &key(1))).expect("power");
        assert_eq!(machine.firmware_starts(), Some(Slot::A));
        let (mut slots, mut order) = (machine.slots(), machine.order());
        let started = start(&mut slots, Slot::A, Some(Slot::B), &mut order).expect("power");
        assert!(matches!(started, Start::Run(selected) if selected.record.state != Trust::Confirmed));
        machine.starts.clear();
        machine
    };
    let may_serve = [(Slot::B, "2.0", 1), (Slot::A, "3.0", 2)];
    let (within, _) = cut_everywhere(on_trial, |machine| machine.roll_back(Slot::A), &may_serve);
    assert!(within >= 2, "{within} cuts");
}

/// A transfer that is begun anew, or never ends, leaves the card to what runs.
#[test]
fn slot_that_is_written_again_before_the_restart_is_not_started() {
    let mut machine = Machine::updated();
    machine.update(Slot::B, &Image::new("3.0", 2, &key(1))).expect("power");
    let next = Image::new("4.0", 2, &key(1));
    let begin = Work::Begin { offer: next.offer(), manifest: next.manifest.clone() };
    machine.work(Slot::B, [begin, Work::Write(next.bytes[..1000].to_vec())]).expect("power");
    assert_eq!(machine.boot(), (Slot::B, "2.0".to_owned(), 1));
    assert_eq!(machine.starts, [Slot::B]);
}

#[test]
fn boot_order_is_set_once_the_image_is_checked_and_its_failure_is_reported() {
    /// A firmware that allows no change.
    #[derive(Debug)]
    struct ReadOnly;
    impl BootOrder for ReadOnly {
        type Error = &'static str;
        fn try_once(&mut self, slot: Slot) -> Result<(), &'static str> {
            assert_eq!(slot, Slot::B);
            Err("read-only")
        }
        fn prefer(&mut self, _: Slot) -> Result<(), &'static str> {
            Err("read-only")
        }
    }
    impl BootLoader for ReadOnly {
        type Lock = ();
        const READS_RECORDS: bool = true;
        fn lock(&mut self) -> Result<(), &'static str> {
            Ok(())
        }
        fn prepare(&mut self, slot: Slot) -> Result<(), &'static str> {
            assert_eq!(slot, Slot::B);
            Ok(())
        }
    }
    let (rig, image) = (Rig::new(), Image::new("2.0", 2, &key(1)));
    let slots = Slots::new(rig.slots.clone()).expect("large enough");
    let mut card = Card::new(slots, Some(Slot::A), key(1).verifying_key().into(), (ReadOnly, Recorder::default()));
    assert_eq!(card.run(Work::Begin { offer: image.offer(), manifest: image.manifest.clone() }), Done::Begun);
    assert_eq!(card.run(Work::Write(image.bytes.clone())), Done::Written(image.bytes.len() as u64));
    let Done::Failed(why) = card.run(Work::Finish) else { panic!("the firmware refuses") };
    assert!(why.contains("boot order") && why.contains("read-only"), "{why}");
}

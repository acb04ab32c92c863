//! A simulated card with two boot partitions: what the boot ROM and the boot loader do at resets, and power cuts after
//! every single write.

use super::*;
use crate::slots::{Event, Notice};
use crate::slots::{FileBlocks, Offer, Policy, Record, Selected, Slots, Start, State, Updater, start};
use sha2::{Digest, Sha256};
use std::cell::{Cell, RefCell};
use std::rc::Rc;
use sumac_hal::time::Instant;
use tempfile::TempDir;

const LEN_BYTES: usize = 64 << 10;
const LINE: &str = "console=hvc0 initrd=initramfs sumac.name=leaf0";

/// The registers, which power cuts clear.
#[derive(Debug, Clone, Default)]
struct Registers {
    action: String,
    second: String,
    watchdog: u32,
}

#[derive(Debug)]
struct Hardware {
    primary: BootPartition,
    partitions: [Vec<u8>; 2],
    registers: Registers,
}

/// The card's eMMC and registers; writes fail once the power is gone.
#[derive(Debug, Clone)]
struct Emmc {
    hardware: Rc<RefCell<Hardware>>,
    writes_left: Rc<Cell<usize>>,
    forgets: bool,
    /// A bit of what is written is lost.
    corrupts: bool,
}

impl Emmc {
    fn new() -> Self {
        Self::with_images(&[(ImageId::BL2, vec![2; 5000]), (ImageId(5), vec![33; 3000]), (ImageId(52), vec![9; 100])])
    }

    fn with_images(images: &[(ImageId, Vec<u8>)]) -> Self {
        let mut builder = Builder::new();
        for (id, bytes) in images {
            builder.insert(ImageName::new(*id, 0), Source::Bytes(bytes.clone())).expect("known");
        }
        builder.insert(ImageName::new(ImageId::BOOT_PATH, 2), Source::Bytes(b"vendor".to_vec())).expect("known");
        let mut stream = Cursor::new(Vec::new());
        builder.write_to(&mut stream).expect("memory");
        let mut first = Vec::new();
        let stream = stream.into_inner();
        emmc::write(&stream[..], stream.len() as u64, LEN_BYTES as u64, &mut first).expect("fits");
        first.resize(LEN_BYTES, 0xff);
        // The other one was never written.
        let partitions = [first, vec![0xff; LEN_BYTES]];
        let registers = Registers { action: PRIMARY.into(), second: NONE.into(), watchdog: 0 };
        let hardware = Hardware { primary: BootPartition::Boot0, partitions, registers };
        let (hardware, writes_left) = (Rc::new(RefCell::new(hardware)), Rc::new(Cell::new(usize::MAX)));
        Self { hardware, writes_left, forgets: false, corrupts: false }
    }

    fn draw(&self) -> io::Result<()> {
        let left = self.writes_left.get().checked_sub(1).ok_or_else(|| io::Error::other("no power"))?;
        self.writes_left.set(left);
        Ok(())
    }

    /// A power cut: the registers are lost, and what the boot loader has swapped is not.
    fn cut_power(&self) {
        self.writes_left.set(usize::MAX);
        self.hardware.borrow_mut().registers = Registers { action: PRIMARY.into(), second: NONE.into(), watchdog: 0 };
    }

    /// A reset, up to the kernel: what the boot loader does first. Returns whether a watchdog runs, which resets the
    /// card again unless something takes it over.
    fn reset(&self) -> bool {
        let mut hardware = self.hardware.borrow_mut();
        if hardware.registers.action == SWAP {
            hardware.primary = hardware.primary.other();
            hardware.registers.action = PRIMARY.into();
        }
        let Registers { second, watchdog, .. } = hardware.registers.clone();
        if second != NONE {
            hardware.registers.action = second;
        }
        (hardware.registers.second, hardware.registers.watchdog) = (NONE.into(), 0);
        watchdog > 0
    }

    /// The kernel loads the driver.
    fn load_driver(&self) {
        self.hardware.borrow_mut().registers.action = PRIMARY.into();
    }
}

impl BootPartitions for Emmc {
    fn primary(&self) -> io::Result<BootPartition> {
        Ok(self.hardware.borrow().primary)
    }

    fn len_bytes(&self, _partition: BootPartition) -> io::Result<u64> {
        Ok(LEN_BYTES as u64)
    }

    fn read(&self, partition: BootPartition) -> io::Result<Vec<u8>> {
        Ok(self.hardware.borrow().partitions[partition as usize].clone())
    }

    fn write(&mut self, partition: BootPartition, bytes: &[u8]) -> io::Result<()> {
        assert_ne!(partition, self.hardware.borrow().primary, "the primary partition is never written");
        let target = partition as usize;
        for (block, at) in bytes.chunks(512).zip((0..).step_by(512)) {
            if let Err(error) = self.draw() {
                // Torn.
                self.hardware.borrow_mut().partitions[target][at..][..block.len() / 2].fill(0x5a);
                return Err(error);
            }
            self.hardware.borrow_mut().partitions[target][at..][..block.len()].copy_from_slice(block);
        }
        if self.corrupts {
            self.hardware.borrow_mut().partitions[target][bytes.len() - 1] ^= 1;
        }
        Ok(())
    }

    fn setting(&self, setting: ResetSetting) -> io::Result<String> {
        let Registers { action, second, watchdog } = self.hardware.borrow().registers.clone();
        Ok(match setting {
            ResetSetting::Action => action + "\n",
            ResetSetting::SecondAction => second + "\n",
            ResetSetting::Watchdog => format!("{watchdog}\n"),
        })
    }

    fn set(&mut self, setting: ResetSetting, value: &str) -> io::Result<()> {
        self.draw()?;
        if self.forgets {
            return Ok(());
        }
        let registers = &mut self.hardware.borrow_mut().registers;
        match setting {
            ResetSetting::Action => registers.action = value.into(),
            ResetSetting::SecondAction => registers.second = value.into(),
            ResetSetting::Watchdog => registers.watchdog = value.parse().expect("a number"),
        }
        Ok(())
    }
}

fn partition(slot: Slot) -> Partition {
    Partition { number: 1 + slot as u32, start: 2048, blocks: 4096, guid: [slot as u8; 16] }
}

/// What a version does, by the first byte of its payload.
const GOOD: u8 = 1;
/// Its kernel hangs before the driver is loaded.
const HANGS: u8 = 2;
const NEVER_HEALTHY: u8 = 3;

/// Where a card ends.
#[derive(Debug, PartialEq, Eq)]
enum Ends {
    /// A version of this epoch serves, confirmed.
    Serves { slot: Slot, epoch: u64 },
    /// The vendor's system boots.
    Elsewhere,
    /// A kernel hangs, and nothing resets the card.
    Hangs,
}

struct Card {
    folder: TempDir,
    emmc: Emmc,
    order: SwapBootOrder<Emmc>,
    restarts: usize,
}

impl Card {
    fn new() -> Self {
        let (folder, emmc) = (tempfile::tempdir().expect("a folder"), Emmc::new());
        for name in ["a", "b"] {
            FileBlocks::create(&folder.path().join(name), 4096).expect("made");
        }
        Self { folder, order: SwapBootOrder::new(emmc.clone()), emmc, restarts: 0 }
    }

    fn slots(&self) -> Slots<FileBlocks> {
        Slots::new(["a", "b"].map(|name| FileBlocks::open(&self.folder.path().join(name)).expect("there")))
            .expect("fit")
    }

    fn record(&self, slot: Slot) -> Option<Record> {
        self.slots().record(slot).expect("readable")
    }

    /// Install from the running slot, or over rshim, as the agent does.
    fn install(&mut self, running: Option<Slot>, behaviour: u8, epoch: u64) -> Result<(), String> {
        let payload = [behaviour; 300];
        let (version, sha256) = (format!("v{epoch}"), Sha256::digest(payload).into());
        let offer = Offer { version, epoch, len_bytes: 300, sha256 };
        let mut slots = self.slots();
        let selected = running.map(|slot| Selected { slot, record: self.record(slot).expect("running") });
        let mut updater = Updater::new(Policy::default(), selected, Instant::ZERO);
        let text = |error: &dyn std::fmt::Display| error.to_string();
        if let Some(running) = running {
            self.order.try_once(running).map_err(|error| text(&error))?;
        }
        updater.handle(Event::Begin(&offer), &mut slots).map_err(|error| text(&error))?;
        let slot = updater.writing().expect("begun");
        self.order.set_entry(slot, partition(slot), LINE).map_err(|error| text(&error))?;
        updater.handle(Event::Chunk(&payload), &mut slots).map_err(|error| text(&error))?;
        updater.handle(Event::Finish, &mut slots).map_err(|error| text(&error))?;
        assert!(matches!(updater.poll_event(), Some(Notice::Restart { .. })));
        let selected = slots.select().map_err(|error| text(&error))?;
        self.order.try_once(selected.slot).map_err(|error| text(&error))
    }

    /// Run what the boot loader has started; `None`: the card is reset.
    fn run(&mut self, has_watchdog: bool) -> Option<Ends> {
        let primary = self.emmc.primary().expect("readable");
        let Some(slot) = self.order.slot_in(primary).expect("readable") else {
            self.emmc.load_driver();
            return Some(Ends::Elsewhere);
        };
        let file = std::fs::read(self.folder.path().join(if slot == Slot::A { "a" } else { "b" })).expect("there");
        if file[0] == HANGS {
            return if has_watchdog { None } else { Some(Ends::Hangs) };
        }
        self.emmc.load_driver();
        let preferred = self.order.preferred().expect("readable");
        let started = start(&mut self.slots(), slot, preferred, &mut self.order);
        let Start::Run(selected) = started.ok()? else { return None };
        let epoch = selected.record.epoch;
        if selected.record.state != State::Confirmed {
            self.order.keep_fallback(slot).ok()?;
            if file[0] == NEVER_HEALTHY {
                return None;
            }
            let mut updater = Updater::new(Policy::default(), Some(selected), Instant::ZERO);
            updater.handle(Event::Healthy, &mut self.slots()).ok()?;
            self.order.prefer(slot).ok()?;
        }
        Some(Ends::Serves { slot, epoch })
    }

    /// Reset until something stays.
    fn boot(&mut self) -> Ends {
        for _ in 0..20 {
            let has_watchdog = self.emmc.reset();
            if let Some(ends) = self.run(has_watchdog) {
                return ends;
            }
            if self.emmc.writes_left.get() == 0 {
                self.emmc.cut_power();
            }
            self.restarts += 1;
        }
        panic!("it restarts without end");
    }

    /// A card that serves version 1 from slot A.
    fn serving() -> Self {
        let mut card = Self::new();
        card.install(None, GOOD, 1).expect("installed");
        assert_eq!(card.boot(), Ends::Serves { slot: Slot::A, epoch: 1 });
        card
    }
}

#[test]
fn installed_version_boots_at_every_reset_and_after_power_cuts() {
    let mut card = Card::serving();
    assert_eq!(card.emmc.primary().expect("readable"), BootPartition::Boot1, "the vendor's stream is untouched");
    for cut in [false, true, false] {
        if cut {
            card.emmc.cut_power();
        }
        assert_eq!(card.boot(), Ends::Serves { slot: Slot::A, epoch: 1 });
        assert_eq!(card.order.preferred().expect("readable"), Some(Slot::A));
    }
    card.install(Some(Slot::A), GOOD, 2).expect("installed");
    assert_eq!(card.order.preferred().expect("readable"), Some(Slot::A), "until it is confirmed");
    assert_eq!(card.boot(), Ends::Serves { slot: Slot::B, epoch: 2 });
    card.emmc.cut_power();
    assert_eq!(card.boot(), Ends::Serves { slot: Slot::B, epoch: 2 });
    assert_eq!(card.restarts, 0);
}

#[test]
fn stream_of_a_slot_has_the_boot_loaders_and_its_entry_only() {
    let card = Card::serving();
    let bytes = card.emmc.read(BootPartition::Boot1).expect("readable");
    let found = images(&bytes).expect("a stream");
    let names: Vec<_> = found.iter().map(|(name, _)| name.to_string()).collect();
    assert_eq!(names, ["bl2-v0", "bl33-v0", "boot-desc-v0", "boot-path-v0", "boot-args-v0"]);
    let text = |at: usize| std::str::from_utf8(&found[at].1).expect("text");
    assert_eq!((&found[0].1, &found[1].1), (&vec![2; 5000], &vec![33; 3000]));
    assert_eq!(text(2), "Sumac A");
    assert_eq!(text(3), "HD(1,GPT,00000000-0000-0000-0000-000000000000,0x800,0x1000)/\\KERNEL.EFI");
    assert_eq!(text(4), "console=hvc0 sumac.name=leaf0 panic=10 initrd=\\INITRD sumac.slot=A");
    let guid = Partition { guid: *b"0123456789abcdef", ..partition(Slot::B) };
    assert!(path_text(guid).contains("33323130-3534-3736-3839-616263646566"), "{}", path_text(guid));
}

#[test]
fn bad_versions_are_swapped_back_and_given_up_after_their_tries() {
    for behaviour in [HANGS, NEVER_HEALTHY] {
        let mut card = Card::serving();
        card.install(Some(Slot::A), behaviour, 2).expect("installed");
        assert_eq!(card.boot(), Ends::Serves { slot: Slot::A, epoch: 1 }, "{behaviour}");
        assert!(card.restarts >= 2, "it is tried twice");
        assert_eq!(card.boot(), Ends::Serves { slot: Slot::A, epoch: 1 });
        // With nothing of ours before it, the vendor's system comes back.
        let mut card = Card::new();
        card.install(None, behaviour, 1).expect("installed");
        assert_eq!(card.boot(), Ends::Elsewhere, "{behaviour}");
    }
}

/// The limit that the module's documentation names.
#[test]
fn power_cut_in_a_trial_whose_kernel_never_starts_needs_rshim() {
    let mut card = Card::serving();
    card.install(Some(Slot::A), HANGS, 2).expect("installed");
    assert!(card.emmc.reset(), "a watchdog runs");
    card.emmc.cut_power();
    assert_eq!(card.boot(), Ends::Hangs);
    // BOOT_MODE 2.
    card.emmc.hardware.borrow_mut().registers.action = SWAP.into();
    assert_eq!(card.boot(), Ends::Serves { slot: Slot::A, epoch: 1 });
}

#[test]
fn power_cut_after_any_write_leaves_a_version_that_serves() {
    for behaviour in [GOOD, NEVER_HEALTHY] {
        let mut ends = Vec::new();
        for writes in 0..200 {
            let mut card = Card::serving();
            card.emmc.writes_left.set(writes);
            let installed = card.install(Some(Slot::A), behaviour, 2);
            if installed.is_err() {
                card.emmc.cut_power();
            }
            let end = card.boot();
            card.emmc.cut_power();
            let Ends::Serves { epoch, .. } = card.boot() else { panic!("{writes}: {end:?}") };
            ends.push(epoch);
            if installed.is_ok() && card.emmc.writes_left.get() > 1000 && card.restarts == 0 && writes > 60 {
                break;
            }
        }
        assert!(ends.contains(&1), "{ends:?}");
        assert_eq!(ends.contains(&2), behaviour == GOOD, "{ends:?}");
    }
}

#[test]
fn card_that_cannot_swap_is_an_error_before_anything_is_written() {
    let mut card = Card::new();
    let mut emmc = card.emmc.clone();
    emmc.forgets = true;
    emmc.hardware.borrow_mut().registers.action = SWAP.into();
    let mut order = SwapBootOrder::new(emmc);
    let before = card.emmc.hardware.borrow().partitions.clone();
    let error = order.set_entry(Slot::A, partition(Slot::A), LINE).expect_err("it keeps nothing").to_string();
    assert!(error.contains("reset_action is \"swap_emmc\" after \"emmc\" was written"), "{error}");
    assert_eq!(card.emmc.hardware.borrow().partitions, before);
    assert!(matches!(card.order.try_once(Slot::A), Err(SwapError::NoEntry(Slot::A))));
    // The primary partition has nothing to copy.
    card.emmc.hardware.borrow_mut().primary = BootPartition::Boot1;
    assert!(matches!(card.order.set_entry(Slot::A, partition(Slot::A), LINE), Err(SwapError::Stream(_))));
    let mut card = Card::serving();
    assert!(matches!(card.order.set_entry(Slot::A, partition(Slot::A), LINE), Err(SwapError::Primary(Slot::A))));
    let long = "x".repeat(LEN_BYTES);
    assert!(matches!(card.order.set_entry(Slot::B, partition(Slot::B), &long), Err(SwapError::Emmc(_))));
}

#[test]
fn partition_that_does_not_read_back_or_has_no_boot_loaders_to_copy_is_an_error() {
    let mut emmc = Emmc::new();
    emmc.corrupts = true;
    let damaged = SwapBootOrder::new(emmc).set_entry(Slot::A, partition(Slot::A), LINE);
    assert!(matches!(damaged, Err(SwapError::ReadBack)), "{damaged:?}");
    let emmc = Emmc::with_images(&[(ImageId(5), vec![33; 3000])]);
    let before = emmc.hardware.borrow().partitions.clone();
    let refused = SwapBootOrder::new(emmc.clone()).set_entry(Slot::A, partition(Slot::A), LINE);
    assert!(matches!(refused, Err(SwapError::NoBootLoaders)), "{refused:?}");
    assert_eq!(emmc.hardware.borrow().partitions, before);
}

/// The driver fails, and the power stays.
#[test]
fn setting_that_fails_leaves_the_running_version_as_the_next_one() {
    let mut card = Card::serving();
    card.install(Some(Slot::A), GOOD, 2).expect("installed");
    let mut failures = 0;
    for writes in 0.. {
        card.order.try_once(Slot::A).expect("the running one");
        card.emmc.writes_left.set(writes);
        let tried = card.order.try_once(Slot::B);
        card.emmc.writes_left.set(usize::MAX);
        let action = card.emmc.hardware.borrow().registers.action.clone();
        assert_eq!(action, if tried.is_ok() { SWAP } else { PRIMARY }, "after {writes} settings");
        if tried.is_ok() {
            break;
        }
        failures += 1;
    }
    assert_eq!(failures, 3, "each setting has failed");
}

#[test]
fn slot_that_is_preferred_already_is_started_without_a_way_back() {
    let mut card = Card::serving();
    card.install(Some(Slot::A), GOOD, 2).expect("installed");
    let settings = |card: &Card| {
        let Registers { action, second, watchdog } = card.emmc.hardware.borrow().registers.clone();
        (action, second, watchdog)
    };
    assert_eq!(settings(&card), (SWAP.into(), SWAP.into(), WATCHDOG_S), "a trial");
    card.order.prefer(Slot::B).expect("set");
    assert_eq!(card.order.preferred().expect("readable"), Some(Slot::B));
    card.order.try_once(Slot::B).expect("set");
    assert_eq!(settings(&card), (SWAP.into(), NONE.into(), 0));
}

//! Images for a running version: what is written, what the firmware is told, and in which order.

use super::*;
use crate::disks::Target;
use crate::memory_variables::MemoryVariables;
use ed25519_dalek::SigningKey;
use std::collections::BTreeMap;
use std::fs;
use std::os::unix::fs::FileExt;
use sumac_firmware::bfb::Builder;
use sumac_firmware::boot::{EfiBootOrder, LoadOption};
use sumac_firmware::disk::Permission;
use sumac_firmware::manifest::{Manifest, SlotDigest, hex, sha256_of};
use sumac_firmware::slots::{BootOrder, Event, FileBlocks, Policy, Record, State};
use sumac_firmware::tail;

/// The key that the running version trusts.
const TRUSTED: u8 = 7;
const DISK_LEN_BYTES: u64 = 4 << 30;

fn key(bytes: u8) -> SigningKey {
    SigningKey::from_bytes(&[bytes; 32])
}

fn payload(epoch: u64) -> Vec<u8> {
    (0..200_000_u32).map(|at| (at / 7) as u8 ^ epoch as u8).collect()
}

/// What the host sends for the version of this epoch, and the same, signed by another key.
fn sent(epoch: u64, by: u8) -> Vec<u8> {
    let payload = payload(epoch);
    let mut manifest = Manifest::of(&Builder::default(), &format!("v{epoch}"), epoch).expect("a version");
    let sha256 = hex(&sha256_of(&payload[..]).expect("memory"));
    manifest.slot = Some(SlotDigest { len_bytes: payload.len() as u64, sha256 });
    let manifest = manifest.seal(Some(&key(by))).expect("short");
    [tail::emit(&manifest, payload.len() as u64).expect("fits"), payload].concat()
}

/// A card that runs version 1 from slot A, confirmed.
struct Card {
    _folder: tempfile::TempDir,
    installer: Installer,
    slots: Slots<FileBlocks>,
    order: EfiBootOrder<MemoryVariables>,
    variables: MemoryVariables,
    log: Log,
    log_path: PathBuf,
}

impl Card {
    fn new() -> Self {
        let folder = tempfile::tempdir().expect("a folder");
        let path = folder.path().join("disk");
        File::create(&path).and_then(|file| file.set_len(DISK_LEN_BYTES)).expect("sparse");
        let log_path = folder.path().join("rsh_log");
        fs::write(&log_path, "").expect("written");
        let log = Log::new([log_path.clone()]);
        let target = Target { disk: Some(path), permission: Permission::Add };
        let disk = SlotDisk::prepare(&target, &log).expect("room");
        let variables = MemoryVariables::default();
        let (mut slots, mut order) = (disk.slots().expect("made"), EfiBootOrder::new(variables.clone()));
        let line = CommandLine { update_key: Some(key(TRUSTED).verifying_key().into()), ..CommandLine::default() };
        let command_line = "console=hvc0 sumac.slot=A initrd=\\INITRD".into();
        let installer = Installer { disk, slot: Slot::A, line, command_line, fifo: PathBuf::new() };
        // As it was installed: slot A is the first that is written.
        let mut updater = Updater::new(Policy::default(), None, Instant::ZERO);
        let bytes = sent(1, TRUSTED);
        let mut fifo = Fifo::new(&bytes[..], |_| false);
        let first = fifo.next_payload().expect("readable").expect("a payload");
        let offer = offer_of(&first, installer.line.update_key.as_ref()).expect("trusted");
        write(&mut fifo, &offer, &mut updater, &mut slots, |slot| {
            Ok(order.set_entry(slot, installer.disk.partition(slot), &installer.command_line)?)
        })
        .expect("written");
        let selected = select_next(&mut slots, &mut order).expect("selected");
        assert_eq!(selected.slot, Slot::A);
        let mut card = Self { _folder: folder, installer, slots, order, variables, log, log_path };
        card.confirm(selected);
        card
    }

    /// The firmware starts a slot, which becomes healthy.
    fn confirm(&mut self, selected: Selected) {
        let mut updater = Updater::new(Policy::default(), Some(selected.clone()), Instant::ZERO);
        updater.handle(Event::Healthy, &mut self.slots).expect("confirmed");
        self.order.prefer(selected.slot).expect("set");
    }

    /// Give these bytes to the running version.
    fn take(&mut self, bytes: &[u8]) -> Result<Selected, InstallError> {
        self.take_from(&mut Fifo::new(bytes, |_| false))
    }

    fn take_from<R: Read, W: FnMut(u32) -> bool>(&mut self, fifo: &mut Fifo<R, W>) -> Result<Selected, InstallError> {
        let found = fifo.next_payload().expect("readable").expect("a payload");
        let Self { installer, slots, order, log, .. } = self;
        let partition = |slot| installer.disk.partition(slot);
        install(fifo, &found, installer, (slots, order, partition), log)
    }

    fn record(&mut self, slot: Slot) -> Option<Record> {
        self.slots.record(slot).expect("readable")
    }

    /// The slot that the next restart starts.
    fn next(&self) -> Slot {
        next(&self.variables)
    }

    /// All that a power cut leaves.
    fn state(&mut self) -> (BTreeMap<String, Vec<u8>>, [Option<Record>; 2]) {
        let variables = self.variables.0.borrow().clone();
        (variables, [Slot::A, Slot::B].map(|slot| self.record(slot)))
    }

    fn logged(&self) -> String {
        fs::read_to_string(&self.log_path).expect("readable")
    }
}

/// The slot of `BootNext`, which a restart uses up.
fn next(variables: &MemoryVariables) -> Slot {
    let variables = variables.0.borrow();
    let number = &variables["BootNext"];
    let name = format!("Boot{:02X}{:02X}", number[1], number[0]);
    let is_b = LoadOption::description_of(&variables[&name]).is_some_and(|name| name == "Sumac B");
    if is_b { Slot::B } else { Slot::A }
}

#[test]
fn image_is_installed_in_the_other_slot_and_started_at_the_next_restart() {
    let mut card = Card::new();
    let selected = card.take(&sent(2, TRUSTED)).expect("installed");
    assert_eq!((selected.slot, selected.record.version.as_str()), (Slot::B, "v2"));
    assert_eq!(card.next(), Slot::B);
    // Until then, and if it fails, the running version is preferred.
    assert_eq!(card.order.preferred().expect("readable"), Some(Slot::A));
    assert_eq!(card.record(Slot::A).map(|record| record.state), Some(State::Confirmed));
    assert!(matches!(card.record(Slot::B).map(|record| record.state), Some(State::Trial { tries_left: 1 })));
    // Another image before the restart replaces it.
    let selected = card.take(&sent(3, TRUSTED)).expect("installed");
    assert_eq!((selected.slot, selected.record.version.as_str(), card.next()), (Slot::B, "v3", Slot::B));
    // On the disk are its bytes.
    let SlotDisk { path, layout } = &card.installer.disk;
    let mut bytes = vec![0; payload(3).len()];
    File::open(path).expect("there").read_exact_at(&mut bytes, layout.slots[1].offset).expect("long enough");
    assert!(bytes == payload(3), "another payload");
}

#[test]
fn image_that_is_cut_off_is_not_started_though_an_earlier_one_was_to_be() {
    let whole = sent(3, TRUSTED);
    for len in [whole.len() - 8, whole.len() / 2, whole.len() - payload(3).len()] {
        let mut card = Card::new();
        card.take(&sent(2, TRUSTED)).expect("installed");
        assert_eq!(card.next(), Slot::B);
        let error = card.take(&whole[..len / 8 * 8]).expect_err("cut off");
        assert!(matches!(error, InstallError::Fifo(_)), "{error}");
        assert_eq!(card.next(), Slot::A, "after {len} bytes");
        assert_eq!(card.record(Slot::B).map(|record| record.state), Some(State::Empty));
        assert_eq!(card.order.preferred().expect("readable"), Some(Slot::A));
        let selected = card.take(&whole).expect("the next one is installed");
        assert_eq!((selected.record.version.as_str(), card.next()), ("v3", Slot::B));
    }
}

/// A host that looks at what a power cut would leave each time that the card takes something.
struct Watching<'a> {
    bytes: &'a [u8],
    variables: MemoryVariables,
    disk: SlotDisk,
    seen: Vec<(Slot, State)>,
}

impl Read for Watching<'_> {
    fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        let record = self.disk.slots().expect("there").record(Slot::B).expect("readable").expect("a record");
        self.seen.push((next(&self.variables), record.state));
        self.bytes.read(buffer)
    }
}

#[test]
fn half_written_slot_is_never_the_one_to_be_started() {
    let mut card = Card::new();
    card.take(&sent(2, TRUSTED)).expect("installed");
    let (disk, variables, bytes) = (card.installer.disk.clone(), card.variables.clone(), sent(3, TRUSTED));
    let mut host = Watching { bytes: &bytes, variables, disk, seen: Vec::new() };
    card.take_from(&mut Fifo::new(&mut host, |_| false)).expect("installed");
    let trial = State::Trial { tries_left: 1 };
    assert_eq!(host.seen.first(), Some(&(Slot::B, trial)), "the image before was to be started");
    let first = host.seen.iter().position(|seen| *seen == (Slot::A, State::Empty)).expect("it is written");
    assert!(host.seen[..first].iter().all(|seen| *seen == (Slot::B, trial)), "{:?}", host.seen);
    assert!(host.seen[first..].iter().all(|seen| *seen == (Slot::A, State::Empty)), "{:?}", host.seen);
    assert!(host.seen.len() - first > 3, "the payload takes several pieces");
}

#[test]
fn image_that_is_not_trusted_or_older_changes_nothing() {
    let mut card = Card::new();
    card.take(&sent(2, TRUSTED)).expect("installed");
    let before = card.state();
    let forged = sent(3, 8);
    let error = card.take(&forged).expect_err("another key").to_string();
    assert!(error.contains("not signed by the key"), "{error}");
    let mut longer = sent(3, TRUSTED);
    longer[16] += 8;
    assert!(matches!(card.take(&longer), Err(InstallError::Length { .. })));
    assert_eq!(card.state(), before);
    let error = card.take(&sent(0, TRUSTED)).expect_err("an older epoch").to_string();
    assert!(error.contains("rollback is refused"), "{error}");
    // The image before is not started any more, and still there.
    assert_eq!((card.next(), card.state().1), (Slot::A, before.1));
    card.installer.line.update_key = None;
    assert!(matches!(card.take(&sent(3, TRUSTED)), Err(InstallError::NoTrust)));
}

#[test]
fn version_on_trial_takes_no_image() {
    let mut card = Card::new();
    let selected = card.take(&sent(2, TRUSTED)).expect("installed");
    // The restart.
    card.installer.slot = selected.slot;
    let error = card.take(&sent(3, TRUSTED)).expect_err("on trial").to_string();
    assert!(error.contains("on trial"), "{error}");
    card.confirm(selected);
    let selected = card.take(&sent(3, TRUSTED)).expect("installed");
    assert_eq!((selected.slot, card.next()), (Slot::A, Slot::A));
}

#[test]
fn outcome_is_reported_and_repeated_until_another_image_comes() {
    let card = Card::new();
    let mut outcome = Outcome::default();
    fs::write(&card.log_path, "").expect("emptied");
    let nothing = || Fifo::new(&[0; 64][..], |_| false);
    assert!(!card.installer.look(&mut nothing(), &mut outcome, &card.log));
    assert_eq!(card.logged(), "", "nothing to report yet");
    // It is not trusted, which is found out before the disk is touched.
    let forged = sent(3, 8);
    let mut fifo = Fifo::new(&forged[..], |_| false);
    assert!(card.installer.look(&mut fifo, &mut outcome, &card.log));
    assert!(card.logged().starts_with("INFO Runtime upgrade failed: "), "{}", card.logged());
    // The rest of it is no image.
    for repeat in 0..=REPEATS {
        fs::write(&card.log_path, "").expect("emptied");
        assert!(!card.installer.look(&mut fifo, &mut outcome, &card.log));
        assert_eq!(card.logged().starts_with("INFO Runtime upgrade failed: "), repeat < REPEATS, "{repeat}");
    }
    // A FIFO that fails is reported once, and not read without a pause.
    struct Fails;
    impl Read for Fails {
        fn read(&mut self, _buffer: &mut [u8]) -> io::Result<usize> {
            Err(io::ErrorKind::BrokenPipe.into())
        }
    }
    for is_first in [true, false] {
        fs::write(&card.log_path, "").expect("emptied");
        assert!(!card.installer.look(&mut Fifo::new(Fails, |_| false), &mut outcome, &card.log));
        assert_eq!(card.logged().contains("Runtime upgrade failed: boot FIFO"), is_first, "{}", card.logged());
    }
    // Another writer has the disk.
    let lock = card.installer.disk.lock().expect("free");
    let bytes = sent(3, TRUSTED);
    card.installer.look(&mut Fifo::new(&bytes[..], |_| false), &mut outcome, &card.log);
    assert!(card.logged().contains("another update"), "{}", card.logged());
    drop(lock);
    card.installer.disk.lock().expect("free again");
}

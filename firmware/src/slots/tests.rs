//! Power fails after every single write, with torn and lost writes, and a known version always boots.

use super::*;
use std::cell::RefCell;
use std::collections::BTreeSet;
use std::convert::Infallible;
use std::rc::Rc;
use std::time::Duration;
use sumac_hal::time::Instant;

const BLOCK_LEN_BYTES: usize = 128;
const BLOCKS: u32 = 12;

/// The power of both devices, which fails when its budget of writes and flushes is used up.
#[derive(Debug)]
struct Power {
    /// The number of operations until it fails.
    left: usize,
    used: usize,
}

/// A device whose cache is lost with power.
#[derive(Debug, Clone)]
struct Ram {
    power: Rc<RefCell<Power>>,
    safe: Vec<u8>,
    /// Written but not flushed, oldest first.
    cache: Vec<(u32, Vec<u8>)>,
}

#[derive(Debug, PartialEq, Eq, Error)]
#[error("no power")]
struct NoPower;

impl Ram {
    fn new(power: &Rc<RefCell<Power>>) -> Self {
        // Not zero: blocks that were never written hold arbitrary bytes.
        Self { power: power.clone(), safe: vec![0xa5; BLOCK_LEN_BYTES * BLOCKS as usize], cache: Vec::new() }
    }

    fn draw(&self) -> Result<(), NoPower> {
        let mut power = self.power.borrow_mut();
        power.left = power.left.checked_sub(1).ok_or(NoPower)?;
        power.used += 1;
        Ok(())
    }

    fn block(bytes: &mut [u8], block: u32) -> &mut [u8] {
        &mut bytes[block as usize * BLOCK_LEN_BYTES..][..BLOCK_LEN_BYTES]
    }

    /// Power fails: each cached write is kept, lost or torn.
    fn fail(&mut self, rng: &mut Rng) {
        for (block, data) in std::mem::take(&mut self.cache) {
            let to = Self::block(&mut self.safe, block);
            match rng.below(4) {
                0 => {}
                1 => to.copy_from_slice(&data),
                // Torn: new up to some byte, or from some byte on.
                2 => {
                    let at = rng.below(BLOCK_LEN_BYTES + 1);
                    if rng.below(2) == 0 {
                        to[..at].copy_from_slice(&data[..at])
                    } else {
                        to[at..].copy_from_slice(&data[at..])
                    }
                }
                _ => to.iter_mut().for_each(|byte| *byte = rng.below(256) as u8),
            }
        }
    }
}

impl BlockDevice for Ram {
    type Error = NoPower;

    fn geometry(&self) -> Geometry {
        Geometry { block_len_bytes: BLOCK_LEN_BYTES, blocks: BLOCKS }
    }

    fn read(&mut self, block: u32, buffer: &mut [u8]) -> Result<(), NoPower> {
        assert!(self.geometry().holds(block, buffer.len()));
        let at = block as usize * BLOCK_LEN_BYTES;
        let mut all = self.safe.clone();
        for (block, data) in &self.cache {
            Self::block(&mut all, *block).copy_from_slice(data);
        }
        buffer.copy_from_slice(&all[at..at + buffer.len()]);
        Ok(())
    }

    fn write(&mut self, block: u32, data: &[u8]) -> Result<(), NoPower> {
        assert!(self.geometry().holds(block, data.len()));
        for (block, data) in (block..).zip(data.chunks(BLOCK_LEN_BYTES)) {
            // The write in flight when power fails may have been executed in part.
            self.cache.push((block, data.to_vec()));
            self.draw()?;
        }
        Ok(())
    }

    fn flush(&mut self) -> Result<(), NoPower> {
        self.draw()?;
        for (block, data) in std::mem::take(&mut self.cache) {
            Self::block(&mut self.safe, block).copy_from_slice(&data);
        }
        Ok(())
    }
}

/// splitmix64 (Steele, Lea, Flood: Fast splittable pseudorandom number generators, 2014).
struct Rng(u64);

impl Rng {
    fn below(&mut self, limit: usize) -> usize {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut z = self.0;
        z = (z ^ z >> 30).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ z >> 27).wrapping_mul(0x94d0_49bb_1331_11eb);
        ((z ^ z >> 31) % limit as u64) as usize
    }
}

/// The payload of a version: a different length and content for each.
fn payload(version: u64) -> Vec<u8> {
    (0..300 + 131 * version).map(|at| (at * 31 + version * 7) as u8).collect()
}

fn offer(version: u64) -> Offer {
    let payload = payload(version);
    let (len_bytes, sha256) = (payload.len() as u64, Sha256::digest(&payload).into());
    Offer { version: version.to_string(), epoch: version / 2, len_bytes, sha256 }
}

fn policy() -> Policy {
    Policy { tries: 2, confirm_within: Duration::from_secs(60) }
}

type Failed = UpdateError<NoPower>;

/// Write a version to the other slot.
fn update(slots: &mut Slots<Ram>, running: Option<Selected>, version: u64) -> Result<(), Failed> {
    let mut updater = Updater::new(policy(), running, Instant::ZERO);
    updater.handle(Event::Begin(&offer(version)), slots)?;
    for piece in payload(version).chunks(100) {
        updater.handle(Event::Chunk(piece), slots)?;
    }
    updater.handle(Event::Finish, slots)?;
    assert!(matches!(updater.poll_event(), Some(Notice::Restart { .. })));
    Ok(())
}

/// Start, and report that it is healthy if `is_healthy`.
fn start(slots: &mut Slots<Ram>, is_healthy: bool) -> Result<Selected, Failed> {
    let selected = slots.select()?;
    let mut updater = Updater::new(policy(), Some(selected.clone()), Instant::ZERO);
    if is_healthy {
        updater.handle(Event::Healthy, slots)?;
    }
    Ok(selected)
}

/// Run a card through its first version and two updates, the second of which never becomes healthy. `reached` holds the
/// version that was confirmed last, or 0 while a version is on trial.
fn card_lifecycle(slots: &mut Slots<Ram>, reached: &RefCell<Option<u64>>) -> Result<(), Failed> {
    update(slots, None, 1)?;
    *reached.borrow_mut() = Some(0);
    start(slots, true)?;
    *reached.borrow_mut() = Some(1);
    let running = start(slots, true)?;
    update(slots, Some(running), 2)?;
    let second = start(slots, true)?;
    assert_eq!(second.record.version, "2");
    *reached.borrow_mut() = Some(2);
    let running = start(slots, true)?;
    update(slots, Some(running), 3)?;
    for _ in 0..policy().tries {
        assert_eq!(start(slots, false)?.record.version, "3");
    }
    assert_eq!(start(slots, true)?.record.version, "2", "rolled back");
    Ok(())
}

fn check_payload(slots: &mut Slots<Ram>, selected: &Selected) {
    let version: u64 = selected.record.version.parse().expect("a version that was written");
    let mut bytes = vec![0; BLOCK_LEN_BYTES * BLOCKS as usize];
    slots.devices[selected.slot.index()].read(0, &mut bytes).expect("power");
    assert!(bytes.starts_with(&payload(version)), "{selected:?} holds another payload");
}

#[test]
fn power_loss_after_any_write_leaves_a_known_version_bootable() {
    let power = Rc::new(RefCell::new(Power { left: usize::MAX, used: 0 }));
    let mut slots = Slots::new([Ram::new(&power), Ram::new(&power)]).expect("large enough");
    card_lifecycle(&mut slots, &RefCell::default()).expect("power");
    let operations = power.borrow().used;
    assert!(operations > 40, "{operations}: each block and each flush counts");
    let mut booted = BTreeSet::new();
    for budget in 0..operations {
        for seed in 0..64 {
            let power = Rc::new(RefCell::new(Power { left: budget, used: 0 }));
            let mut slots = Slots::new([Ram::new(&power), Ram::new(&power)]).expect("large enough");
            let reached = RefCell::default();
            let error = card_lifecycle(&mut slots, &reached).expect_err("power fails");
            assert!(matches!(error, UpdateError::Slot(SlotError::Device { error: NoPower, .. })), "{error}");
            let mut rng = Rng(budget as u64 * 1000 + seed);
            slots.devices.iter_mut().for_each(|device| device.fail(&mut rng));
            power.borrow_mut().left = usize::MAX;
            let reached = *reached.borrow();
            let selected = match slots.select() {
                Ok(selected) => selected,
                // Before the first version was put on trial, nothing can boot.
                Err(SlotError::NothingBoots { .. }) if reached.is_none() => continue,
                Err(error) => panic!("after {budget} writes, seed {seed}: {error}"),
            };
            check_payload(&mut slots, &selected);
            let version: u64 = selected.record.version.parse().expect("a number");
            let reached = reached.unwrap_or(0);
            assert!(
                version >= reached,
                "after {budget} writes, seed {seed}: {version}, though {reached} was confirmed"
            );
            booted.insert((reached, version));
            check_next_update(&mut slots, selected);
        }
    }
    // Every reachable state occurred: each version, before and after it was confirmed.
    assert_eq!(booted, BTreeSet::from([(0, 1), (1, 1), (1, 2), (2, 2), (2, 3)]));
}

/// After a power failure, the next update works as usual.
fn check_next_update(slots: &mut Slots<Ram>, selected: Selected) {
    let mut updater = Updater::new(policy(), Some(selected.clone()), Instant::ZERO);
    updater.handle(Event::Healthy, slots).expect("power");
    let running = slots.select().expect("confirmed");
    assert_eq!((running.slot, running.record.state), (selected.slot, State::Confirmed));
    update(slots, Some(running), 5).expect("power");
    let updated = start(slots, true).expect("power");
    assert_eq!((updated.record.version.as_str(), updated.slot), ("5", selected.slot.other()));
    check_payload(slots, &updated);
}

fn slots_with(version: u64) -> (Slots<Ram>, Selected) {
    let power = Rc::new(RefCell::new(Power { left: usize::MAX, used: 0 }));
    let mut slots = Slots::new([Ram::new(&power), Ram::new(&power)]).expect("large enough");
    update(&mut slots, None, version).expect("power");
    start(&mut slots, true).expect("power");
    let running = slots.select().expect("confirmed");
    (slots, running)
}

#[test]
fn update_not_healthy_in_time_is_rolled_back() {
    let (mut slots, running) = slots_with(1);
    update(&mut slots, Some(running.clone()), 2).expect("power");
    let selected = slots.select().expect("on trial");
    let mut updater = Updater::new(policy(), Some(selected.clone()), Instant::ZERO);
    let deadline = updater.poll_timeout().expect("on trial");
    updater.handle_timeout(Instant::from_nanos(deadline.as_nanos() - 1));
    assert_eq!(updater.poll_event(), None);
    updater.handle_timeout(deadline);
    assert_eq!(updater.poll_event(), Some(Notice::RollBack { slot: running.slot }));
    // It becomes healthy too late.
    updater.handle(Event::Healthy, &mut slots).expect("power");
    assert_eq!((updater.poll_event(), updater.poll_timeout()), (None, None));
    slots.select().expect("the second try");
    assert_eq!(slots.select().expect("the old one").slot, running.slot);
}

#[test]
fn confirmed_version_has_no_deadline_and_no_further_notice() {
    let (mut slots, running) = slots_with(1);
    let mut updater = Updater::new(policy(), Some(running.clone()), Instant::ZERO);
    assert_eq!(updater.poll_timeout(), None);
    updater.handle(Event::Healthy, &mut slots).expect("power");
    assert_eq!(updater.poll_event(), None);
    assert_eq!(slots.record(running.slot).expect("power"), Some(running.record));
}

#[test]
fn invalid_update_is_refused_and_running_slot_is_unchanged() {
    let (mut slots, running) = slots_with(4);
    let before = slots.devices[running.slot.index()].safe.clone();
    let mut updater = Updater::new(policy(), Some(running.clone()), Instant::ZERO);
    let mut refused = |offer: &Offer| updater.handle(Event::Begin(offer), &mut slots).expect_err("refused");
    assert!(matches!(refused(&offer(3)), UpdateError::Rollback { epoch: 1, running: 2 }));
    let long = Offer { len_bytes: 10 * BLOCK_LEN_BYTES as u64 + 1, ..offer(5) };
    assert!(matches!(refused(&long), UpdateError::TooLong { .. }));
    assert!(matches!(refused(&Offer { version: "x".repeat(45), ..offer(5) }), UpdateError::Version(_)));
    let mut handle = |event| updater.handle(event, &mut slots);
    assert!(matches!(handle(Event::Chunk(b"x")), Err(UpdateError::NotBegun)));
    assert!(matches!(handle(Event::Finish), Err(UpdateError::NotBegun)));
    let five = offer(5);
    let bytes = payload(5);
    let (longer, other) = ([&bytes[..], b"x"].concat(), vec![0; bytes.len()]);
    handle(Event::Begin(&five)).expect("may be written");
    handle(Event::Chunk(&bytes[1..])).expect("not too long");
    assert!(matches!(handle(Event::Finish), Err(UpdateError::Length { .. })));
    handle(Event::Begin(&five)).expect("again");
    assert!(matches!(handle(Event::Chunk(&longer)), Err(UpdateError::Length { .. })));
    handle(Event::Begin(&five)).expect("again");
    handle(Event::Chunk(&other)).expect("not too long");
    assert!(matches!(handle(Event::Finish), Err(UpdateError::Digest)));
    assert_eq!(slots.select().expect("runs").slot, running.slot);
    assert_eq!(slots.devices[running.slot.index()].safe, before);
    update(&mut slots, Some(running), 5).expect("power");
    let on_trial = slots.select().expect("on trial");
    let mut updater = Updater::new(policy(), Some(on_trial), Instant::ZERO);
    assert!(matches!(updater.handle(Event::Begin(&offer(6)), &mut slots), Err(UpdateError::OnTrial)));
}

#[test]
fn corrupt_payload_is_not_started() {
    let (mut slots, running) = slots_with(1);
    update(&mut slots, Some(running.clone()), 2).expect("power");
    slots.devices[running.slot.other().index()].safe[100] ^= 1;
    assert_eq!(slots.select().expect("the old one").slot, running.slot);
    slots.devices[running.slot.index()].safe[100] ^= 1;
    let error = slots.select().expect_err("nothing is whole").to_string();
    assert!(error.contains("1 (epoch 0), confirmed") && error.contains("on trial, 2 tries left"), "{error}");
}

/// A device that is too small; never accessed.
#[derive(Debug)]
struct Small(Geometry);

impl BlockDevice for Small {
    type Error = Infallible;

    fn geometry(&self) -> Geometry {
        self.0
    }

    fn read(&mut self, _: u32, _: &mut [u8]) -> Result<(), Infallible> {
        Ok(())
    }

    fn write(&mut self, _: u32, _: &[u8]) -> Result<(), Infallible> {
        Ok(())
    }

    fn flush(&mut self) -> Result<(), Infallible> {
        Ok(())
    }
}

#[test]
fn device_without_room_for_records_is_refused() {
    let is_usable = |block_len_bytes, blocks| {
        let device = || Small(Geometry { block_len_bytes, blocks });
        Slots::new([device(), device()]).is_ok()
    };
    assert!(is_usable(128, 3) && !is_usable(128, 2) && !is_usable(127, 100));
}

#[test]
fn files_work_as_slots() {
    let folder = tempfile::tempdir().expect("a folder");
    let paths = ["a", "b"].map(|name| folder.path().join(name));
    let open = |path: &std::path::PathBuf| FileBlocks::open(path).expect("opens");
    for path in &paths {
        FileBlocks::create(path, 64 << 10).expect("made");
        assert!(FileBlocks::create(path, 64 << 10).is_err(), "an existing file is not overwritten");
    }
    for version in 1..=3 {
        let mut slots = Slots::new(paths.each_ref().map(open)).expect("large enough");
        let running = slots.select().ok();
        let mut updater = Updater::new(policy(), running, Instant::ZERO);
        updater.handle(Event::Begin(&offer(version)), &mut slots).expect("begun");
        updater.handle(Event::Chunk(&payload(version)), &mut slots).expect("written");
        updater.handle(Event::Finish, &mut slots).expect("whole");
        let mut slots = Slots::new(paths.each_ref().map(open)).expect("large enough");
        let selected = slots.select().expect("on trial");
        assert_eq!(selected.record.version, version.to_string());
        Updater::new(policy(), Some(selected), Instant::ZERO).handle(Event::Healthy, &mut slots).expect("confirmed");
    }
    let mut device = open(&paths[0]);
    assert!(device.read(0, &mut [0; 100]).is_err() && device.write(u32::MAX, &[0; 512]).is_err());
}

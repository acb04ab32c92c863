//! How many messages a transfer takes, and how it ends when its operator has gone.

use super::*;
use crate::boot::{BootEntries, EfiBootOrder, Partition, SlotLoader, Variables, lock_disk};
use crate::slots::{Slot, State as Trust};
use std::collections::BTreeMap;
use std::path::Path;
use sumac_hal::ctrl::update::{PIECE_MAX_BYTES, SlotImage, SlotTrust, TRANSFER_LEASE, UPDATE_WINDOW_BYTES};

/// What a card with a confirmed version in slot A reports.
fn confirmed() -> SlotsStatus {
    let version = "1.0".try_into().expect("short");
    let image = SlotImage { version, epoch: 1, sha256: [1; 32], trust: SlotTrust::Confirmed };
    SlotsStatus { running: Some(SlotId::A), images: [Some(image), None] }
}

/// Transfer so many bytes, up to the command that has them checked. The disk is done with `works` pieces of work after
/// each command. Returns how many pieces there were, and how many other commands.
fn transfer(manifest_len_bytes: u32, len_bytes: u64, works: usize) -> (u64, u64) {
    let offer = UpdateOffer { manifest_len_bytes, len_bytes, sha256: [2; 32] };
    let (mut session, slots, mut now) = (Session::default(), confirmed(), Instant::ZERO);
    let goal = Goal::Update { offer, epoch: 2 };
    let mut sender = Sender::new(goal, Limits::default(), PIECE_MAX_BYTES as u32, now);
    let (mut pieces, mut others, mut waits) = (0, 0, 0);
    loop {
        let Some(command) = sender.poll_transmit(now) else {
            now = sender.poll_timeout().expect("it waits");
            waits += 1;
            assert!(works < 2 || waits == 0, "a disk that keeps up is not waited for");
            continue;
        };
        let request = match command {
            Command::Status => UpdateRequest::Status,
            Command::Begin(offer) => UpdateRequest::Begin(offer),
            Command::Piece { offset, len_bytes } => piece(offset, &vec![0; len_bytes as usize]),
            Command::Finish => return (pieces, others),
            other => panic!("{other:?}"),
        };
        match command {
            Command::Piece { .. } => pieces += 1,
            _ => others += 1,
        }
        let status = session.handle(request, &slots, now).expect("the next request");
        for _ in 0..works {
            let Some((transfer, work)) = session.poll_work() else { break };
            let done = match work {
                Work::Begin { .. } => Done::Begun,
                Work::Write(bytes) => Done::Written(bytes.len() as u64),
                other => panic!("{other:?}"),
            };
            session.handle_done(transfer, done, now);
        }
        sender.handle_reply(Reply::Status(Box::new(status)), now);
    }
}

#[test]
fn transfer_takes_one_message_for_each_32_kib() {
    let longest = PIECE_MAX_BYTES as u64;
    assert_eq!(longest, 32 << 10);
    for (manifest, len) in [(1, 1), (700, longest), (700, longest + 1), (64 << 10, 40_000_000), (900, 40_000_000)] {
        let expected = u64::from(manifest).div_ceil(longest) + len.div_ceil(longest);
        // The others: the status, and the offer.
        assert_eq!(transfer(manifest, len, 2), (expected, 2), "{manifest} and {len} bytes");
    }
}

/// With one piece of work done after each command, the disk is one piece late and never a window.
#[test]
fn disk_that_lags_costs_questions_and_no_piece() {
    let len_bytes = 4 * UPDATE_WINDOW_BYTES;
    assert_eq!(transfer(900, len_bytes, 1), (1 + len_bytes / PIECE_MAX_BYTES as u64, 2));
}

fn image() -> Image {
    Image::new("2.0", 2, &key(1))
}

/// Begin a transfer, and send so much of it.
fn begin(rig: &mut Rig, image: &Image, len_bytes: usize) {
    rig.request(UpdateRequest::Begin(image.offer())).expect("begun");
    let sent = image.sent();
    let (manifest, rest) = sent[..len_bytes].split_at(image.manifest.len().min(len_bytes));
    let mut offset = 0;
    for bytes in manifest.chunks(PART_BYTES).chain(rest.chunks(PART_BYTES)) {
        rig.request(piece(offset, bytes)).expect("the next piece");
        offset += bytes.len() as u64;
        rig.work(usize::MAX);
    }
}

fn after(rig: &mut Rig, time: Duration) {
    rig.now = rig.now + time;
    rig.running.session.handle_timeout(rig.now);
    rig.work(usize::MAX);
}

fn transfer_of(rig: &mut Rig) -> Transfer {
    rig.request(UpdateRequest::Status).expect("a status").transfer
}

const MOMENT: Duration = Duration::from_millis(1);

#[test]
fn transfer_ends_a_lease_after_its_last_piece_whoever_asks_meanwhile() {
    let image = image();
    for len_bytes in [0, 10, image.manifest.len(), image.manifest.len() + 3000] {
        let mut rig = Rig::new();
        begin(&mut rig, &image, len_bytes);
        let end = rig.running.session.poll_timeout().expect("a lease");
        assert_eq!(end, rig.now + TRANSFER_LEASE);
        after(&mut rig, TRANSFER_LEASE - MOMENT);
        assert!(matches!(transfer_of(&mut rig), Transfer::Receiving { .. }), "{len_bytes} bytes");
        // Neither questions nor refused requests renew it.
        rig.request(piece(1 << 40, &[1])).expect_err("misplaced");
        assert_eq!(rig.running.session.poll_timeout(), Some(end));
        after(&mut rig, MOMENT);
        assert_eq!(transfer_of(&mut rig), Transfer::None, "{len_bytes} bytes");
        assert_eq!(rig.running.session.poll_timeout(), None);
        let why = rig.request(piece(len_bytes as u64, &[1])).expect_err("it has ended");
        assert!(why.contains("no update is in progress"), "{why}");
        assert_eq!(rig.version(), "1.0");
    }
}

#[test]
fn each_piece_renews_the_lease_and_so_does_each_write() {
    let (mut rig, image) = (Rig::new(), image());
    begin(&mut rig, &image, image.manifest.len());
    let mut offset = image.manifest.len() as u64;
    for bytes in image.bytes[..5000].chunks(PART_BYTES) {
        rig.now = rig.now + (TRANSFER_LEASE - MOMENT);
        rig.request(piece(offset, bytes)).expect("in time");
        offset += bytes.len() as u64;
        // The disk is slow.
        rig.now = rig.now + (TRANSFER_LEASE - MOMENT);
        rig.work(usize::MAX);
    }
    let goes_on = pursue_from(&mut rig, &image);
    assert_eq!(goes_on, Some(offset), "nothing was lost");
}

/// Pursue an update; returns where its first piece started, if it needed no offer.
fn pursue_from(rig: &mut Rig, image: &Image) -> Option<u64> {
    let mut sender = Sender::new(image.goal(), Limits::default(), 2000, rig.now);
    let (mut first, mut offers) = (None, 0);
    while sender.outcome().is_none() {
        let Some(command) = sender.poll_transmit(rig.now) else {
            rig.now = sender.poll_timeout().expect("it waits");
            continue;
        };
        match command {
            Command::Piece { offset, .. } => _ = first.get_or_insert(offset),
            Command::Begin(_) => offers += 1,
            _ => {}
        }
        let reply = rig.command(command, &image.sent());
        sender.handle_reply(reply, rig.now);
        rig.work(usize::MAX);
    }
    sender.outcome().cloned().expect("ended").expect("updated");
    assert_eq!(rig.version(), image_version(image));
    first.filter(|_| offers == 0)
}

fn image_version(image: &Image) -> String {
    String::from_utf8_lossy(&image.bytes[..3]).into_owned()
}

#[test]
fn operator_that_comes_back_after_the_lease_starts_over() {
    let (mut rig, image) = (Rig::new(), image());
    begin(&mut rig, &image, image.manifest.len() + 3000);
    after(&mut rig, TRANSFER_LEASE);
    assert_eq!(pursue_from(&mut rig, &image), None, "it was offered again");
}

/// Work that was taken before the lease ended comes to an end after it, and changes nothing of the next transfer.
#[test]
fn result_of_an_abandoned_transfer_is_ignored() {
    let (mut rig, image) = (Rig::new(), image());
    begin(&mut rig, &image, image.manifest.len());
    rig.request(piece(image.manifest.len() as u64, &image.bytes[..100])).expect("the first");
    let (of_first, Work::Write(_)) = rig.running.session.poll_work().expect("work") else { panic!("a write") };
    // What waited is not written any more.
    rig.request(piece(image.manifest.len() as u64 + 100, &image.bytes[100..200])).expect("the next");
    rig.now = rig.now + TRANSFER_LEASE;
    rig.running.session.handle_timeout(rig.now);
    assert!(matches!(rig.running.session.poll_work(), Some((_, Work::Abandon))));
    assert_eq!(rig.running.session.poll_work(), None);
    let slots = rig.status();
    let offer = UpdateRequest::Begin(image.offer());
    rig.running.session.handle(offer, &slots, rig.now).expect("begun again");
    rig.running.session.handle_done(of_first, Done::Failed("late".into()), rig.now);
    assert!(matches!(transfer_of(&mut rig), Transfer::Receiving { received_bytes: 0, .. }));
}

#[derive(Debug, Default)]
struct Memory(BTreeMap<String, Vec<u8>>);

impl Variables for Memory {
    fn read(&self, name: &str) -> io::Result<Option<Vec<u8>>> {
        Ok(self.0.get(name).cloned())
    }

    fn write(&mut self, name: &str, value: &[u8]) -> io::Result<()> {
        self.0.insert(name.into(), value.into());
        Ok(())
    }

    fn remove(&mut self, name: &str) -> io::Result<()> {
        self.0.remove(name);
        Ok(())
    }
}

fn loader(disk: &Path) -> SlotLoader<EfiBootOrder<Memory>> {
    let partition = |number| Partition { number, start: 2048, blocks: 64, guid: [number as u8; 16] };
    let mut order = EfiBootOrder::new(Memory::default());
    for (slot, number) in [(Slot::A, 1), (Slot::B, 2)] {
        order.set_entry(slot, partition(number), "console=hvc0").expect("set");
    }
    SlotLoader::new(order, Some(Slot::A), [partition(1), partition(2)], "console=hvc0".into()).on_disk(disk.into())
}

/// An operator that sends half of an image and falls silent: `sumac flash --runtime`, which takes the same lock, may
/// write once the lease is over.
#[test]
fn silent_operator_gives_the_disk_back_after_the_lease() {
    let (rig, image, disk) = (Rig::new(), image(), tempfile::NamedTempFile::new().expect("a file"));
    let slots = Slots::new(rig.slots.clone()).expect("large enough");
    let key = key(1).verifying_key().into();
    let mut card = Card::new(slots, Some(Slot::A), key, (loader(disk.path()), Recorder::default()));
    let running = |rig: &Rig| rig.slots[0].0.lock().expect("no panic").clone();
    let before = running(&rig);
    let (mut session, status, now) = (Session::default(), confirmed(), Instant::ZERO);
    let work = |session: &mut Session, card: &mut Card<_, _, _>, now| {
        while let Some((transfer, work)) = session.poll_work() {
            let done = card.run(work);
            assert!(!matches!(done, Done::Failed(_)), "{done:?}");
            session.handle_done(transfer, done, now);
        }
    };
    let manifest_len = image.manifest.len() as u64;
    for request in [
        UpdateRequest::Begin(image.offer()),
        piece(0, &image.manifest),
        piece(manifest_len, &image.bytes[..image.bytes.len() / 2]),
    ] {
        session.handle(request, &status, now).expect("the next request");
        work(&mut session, &mut card, now);
    }
    assert!(matches!(lock_disk(disk.path()), Err(None)), "the update holds the disk");
    let end = session.poll_timeout().expect("a lease");
    session.handle_timeout(end);
    work(&mut session, &mut card, end);
    // The other writer.
    let lock = lock_disk(disk.path()).expect("free");
    let mut slots = Slots::new(rig.slots.clone()).expect("large enough");
    let records = [Slot::A, Slot::B].map(|slot| slots.record(slot).expect("readable").map(|record| record.state));
    assert_eq!(records, [Some(Trust::Confirmed), Some(Trust::Empty)]);
    assert_eq!(slots.select().expect("one starts").slot, Slot::A);
    assert_eq!(running(&rig), before, "slot A, with its records, is as it was");
    // Another transfer is refused by name meanwhile, and taken afterwards.
    let begin = Work::Begin { offer: image.offer(), manifest: image.manifest.clone() };
    let Done::Failed(why) = card.run(begin.clone()) else { panic!("the disk is locked") };
    assert!(why.contains("another update is being written"), "{why}");
    drop(lock);
    assert_eq!(card.run(begin), Done::Begun);
}

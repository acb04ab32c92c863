//! Images that are not as signed, and peers that answer or request anything.

use super::*;
use sumac_hal::ctrl::update::{PIECE_MAX_BYTES, SlotTrust, UPDATE_MANIFEST_MAX_BYTES, UPDATE_WINDOW_BYTES};

/// What the card accepts of whoever has an operator's key, but not the key that signs images.
#[test]
fn image_that_is_not_as_signed_is_refused_and_never_starts() {
    let good = Image::new("2.0", 2, &key(1));
    let other = Image::new("2.1", 2, &key(1));
    let changed = changed_at(&good, 700);
    let mut longer = good.clone();
    longer.bytes.extend([0; 8]);
    let mut shorter = good.clone();
    shorter.bytes.truncate(good.bytes.len() - 8);
    let swapped = Image { bytes: other.bytes.clone(), ..good.clone() };
    let unsigned = Image { manifest: b"{}".to_vec(), ..good.clone() };
    let unsealed = Image { manifest: manifest("2.0", 2, &good.bytes).seal(None).expect("short"), ..good.clone() };
    let sealed = |manifest: Manifest| Image { manifest: manifest.seal(Some(&key(1))).expect("short"), ..good.clone() };
    let mut foreign = manifest("2.0", 2, &good.bytes);
    foreign.board = "toaster".into();
    let mut ram_only = manifest("2.0", 2, &good.bytes);
    ram_only.slot = None;
    let mut no_digest = manifest("2.0", 2, &good.bytes);
    no_digest.slot = Some(SlotDigest { len_bytes: good.bytes.len() as u64, sha256: "abc".into() });
    for (what, image, says) in [
        ("another key", Image::new("2.0", 2, &key(2)), "not signed by the key"),
        ("no manifest", unsigned, "manifest"),
        ("no signature", unsealed, "not signed by the key"),
        ("another board", sealed(foreign), "toaster"),
        ("no payload", sealed(ram_only), "no payload for an update slot"),
        ("no digest", sealed(no_digest), "not a SHA-256"),
        ("a changed byte", changed, "another one"),
        ("bytes behind the end", longer, "another one"),
        ("a missing end", shorter, "another one"),
        ("another image than announced", swapped, "another one"),
        ("a long version", Image::new(&"9".repeat(60), 2, &key(1)), "exceeds"),
    ] {
        let mut rig = Rig::new();
        let (outcome, _) = pursue(&mut rig, image.goal(), &image.sent(), |_| Fate::Arrives);
        let why = outcome.expect_err(what).to_string();
        assert!(why.contains(says) && why.contains("the card runs slot A, version 1.0"), "{what}: {why}");
        assert!(rig.status().image(SlotId::B).is_none(), "{what}: nothing is on trial");
        rig.restart();
        assert_eq!(rig.version(), "1.0", "{what}");
    }
    // An operator's command that offers what the manifest says, and sends something else of the same length.
    for lie in [changed_at(&good, 0), changed_at(&good, good.bytes.len() - 1)] {
        let mut rig = Rig::new();
        let (outcome, _) = pursue(&mut rig, good.goal(), &lie.sent(), |_| Fate::Arrives);
        let why = outcome.expect_err("another payload").to_string();
        assert!(why.contains("SHA-256 of the update differs"), "{why}");
        assert!(rig.status().image(SlotId::B).is_none());
        rig.restart();
        assert_eq!(rig.version(), "1.0");
    }
}

fn changed_at(image: &Image, at: usize) -> Image {
    let mut changed = image.clone();
    changed.bytes[at] ^= 1;
    changed
}

/// Requests of a hostile controller, in any order, with any numbers.
#[test]
fn hostile_requests_change_no_running_slot_and_take_bounded_memory() {
    let image = Image::new("2.0", 2, &key(1));
    let bad = Image::new("6.6", 9, &key(2));
    for seed in 0..200 {
        let (mut rng, mut rig) = (Rng(seed), Rig::new());
        let slot_a = rig.slots[0].0.lock().expect("no panic").clone();
        for _ in 0..60 {
            let from = [&image, &bad][rng.below(2) as usize];
            let sent = from.sent();
            let request = match rng.below(9) {
                0 => UpdateRequest::Begin(UpdateOffer {
                    manifest_len_bytes: [0, 1, from.manifest.len() as u32, u32::MAX][rng.below(4) as usize],
                    len_bytes: [0, 1, from.bytes.len() as u64, u64::MAX][rng.below(4) as usize],
                    ..from.offer()
                }),
                1 => UpdateRequest::Begin(from.offer()),
                2 => UpdateRequest::Finish,
                3 => UpdateRequest::Restart { sha256: from.offer().sha256 },
                4 => UpdateRequest::RollBack,
                5 => UpdateRequest::Confirm,
                _ => {
                    let slots = rig.status();
                    let expected = match rig.running.session.status(&slots).transfer {
                        Transfer::Receiving { received_bytes, .. } if rng.below(5) > 0 => received_bytes,
                        _ => [0, 1, 512, u64::MAX][rng.below(4) as usize],
                    };
                    let end = sent.len().min(expected.saturating_add(1 + rng.below(512)).min(1 << 20) as usize);
                    let bytes = sent.get(expected as usize..end).unwrap_or(&[1; 3]);
                    piece(expected, bytes)
                }
            };
            let _ = rig.request(request);
            rig.work(rng.below(3) as usize);
            assert_eq!(rig.version(), "1.0", "seed {seed}: nothing was complete and signed");
        }
        assert_eq!(*rig.slots[0].0.lock().expect("no panic"), slot_a, "seed {seed}: slot A was written");
    }
}

#[test]
fn pieces_beyond_the_window_are_refused_until_others_are_written() {
    let mut rig = Rig::new();
    let offer = UpdateOffer { manifest_len_bytes: 1, len_bytes: u64::MAX / 2, sha256: [1; 32] };
    rig.request(UpdateRequest::Begin(offer)).expect("begun");
    rig.request(piece(0, &[7])).expect("the manifest");
    let mut offset = 1;
    let refused = loop {
        match rig.request(piece(offset, &[0; PIECE_MAX_BYTES])) {
            Ok(_) => offset += PIECE_MAX_BYTES as u64,
            Err(why) => break why,
        }
        assert!(offset <= UPDATE_WINDOW_BYTES + 1, "{offset} bytes wait");
    };
    assert_eq!(offset, 1 + UPDATE_WINDOW_BYTES, "whole pieces fill it");
    assert!(refused.contains(&UPDATE_WINDOW_BYTES.to_string()), "{refused}");
    let long = UpdateOffer { manifest_len_bytes: UPDATE_MANIFEST_MAX_BYTES + 1, ..offer };
    assert!(rig.request(UpdateRequest::Begin(long)).expect_err("too long").contains("manifest of"));
    // A new transfer drops what waits.
    rig.request(UpdateRequest::Begin(offer)).expect("begun again");
    assert!(rig.running.session.poll_work().is_none());
}

/// A hostile card: whatever it answers, the operator's command ends, with an outcome that the card has claimed.
#[test]
fn sender_ends_whatever_a_card_answers() {
    let image = Image::new("2.0", 2, &key(1));
    for seed in 0..2000 {
        let mut rng = Rng(seed);
        let limits = Limits { total: Duration::from_secs(5), interval: Duration::from_millis(10), ..Limits::default() };
        let goal = [image.goal(), Goal::RollBack, Goal::Confirm][rng.below(3) as usize].clone();
        let (mut sender, mut now) = (Sender::new(goal, limits, 2000, Instant::ZERO), Instant::ZERO);
        let mut commands = 0;
        while sender.outcome().is_none() {
            let Some(command) = sender.poll_transmit(now) else {
                now = sender.poll_timeout().expect("it waits").max(now + Duration::from_millis(1));
                continue;
            };
            if let Command::Piece { offset, len_bytes } = command {
                assert!(offset + u64::from(len_bytes) <= image.offer().total_bytes(), "seed {seed}: {command:?}");
                assert!(len_bytes > 0 && len_bytes <= 2000, "seed {seed}: {command:?}");
            }
            commands += 1;
            now = now + Duration::from_millis(1);
            sender.handle_reply(any_reply(&mut rng, &image), now);
        }
        assert!(commands <= 5001, "seed {seed}: {commands} commands");
    }
}

fn any_reply(rng: &mut Rng, image: &Image) -> Reply {
    let sha256 = [image.offer().sha256, [0; 32]][rng.below(2) as usize];
    let mut any_image = || {
        let trust = [SlotTrust::Confirmed, SlotTrust::Trial { tries_left: 0 }][rng.below(2) as usize];
        let sha256 = [image.offer().sha256, [0; 32]][rng.below(2) as usize];
        let version = "x".try_into().expect("short");
        (rng.below(3) > 0).then_some(sumac_hal::ctrl::update::SlotImage { version, epoch: rng.below(4), sha256, trust })
    };
    let images = [any_image(), any_image()];
    let running = [None, Some(SlotId::A), Some(SlotId::B)][rng.below(3) as usize];
    let any = |rng: &mut Rng| [0, 1, 4000, image.offer().total_bytes(), u64::MAX][rng.below(5) as usize];
    let transfer = match rng.below(6) {
        0 => Transfer::None,
        1 => Transfer::Receiving { sha256, received_bytes: any(rng), written_bytes: any(rng) },
        2 => Transfer::Checking { sha256 },
        3 => Transfer::Ready { sha256, slot: SlotId::B },
        4 => Transfer::Failed { sha256, why: "no".try_into().expect("short") },
        _ => Transfer::Restarting,
    };
    match rng.below(8) {
        0 => Reply::Refused("no".into()),
        1 => Reply::Away,
        2 => Reply::Lost("cut".into()),
        _ => Reply::Status(Box::new(UpdateStatus { slots: SlotsStatus { running, images }, transfer })),
    }
}

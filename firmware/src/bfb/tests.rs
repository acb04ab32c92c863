//! Golden vectors of the format, damage at every offset, and tolerance of odd input.

use super::*;
use proptest::prelude::*;
use std::collections::{BTreeMap, BTreeSet};
use std::io::Cursor;

/// `image` "KERNEL" and `initramfs` "INITRAMFS", as mlx-mkbfb writes them.
const GOLDEN_1: &str = "
    42660213 2100303e 06000000 73c82974 00000000 00000080 4b45524e 454c0000
    42660213 2100303f 09000000 2b8509c4 00000000 00000000 494e4954 52414d46 53000000 00000000";
/// `boot-args` v0 "a0", `boot-args` v2 "a2-args!" and an empty `image`.
const GOLDEN_2: &str = "
    42660213 2120303b 02000000 1eda00d1 00000000 00000048 61300000 00000000
    42660213 2100323b 08000000 fb0c2a9d 00000000 00000040 61322d61 72677321
    42660213 2100303e 00000000 00000000 00000000 00000000";

fn hex(text: &str) -> Vec<u8> {
    let digits: Vec<u8> =
        text.bytes().filter_map(|byte| (byte as char).to_digit(16)).map(|digit| digit as u8).collect();
    digits.chunks_exact(2).map(|pair| pair[0] << 4 | pair[1]).collect()
}

fn build(images: &[(&str, &[u8])]) -> Vec<u8> {
    let mut builder = Builder::new();
    for (name, data) in images {
        builder.insert(name.parse().expect("a name"), Source::Bytes(data.to_vec())).expect("has a place");
    }
    let mut out = Cursor::new(Vec::new());
    builder.write_to(&mut out).expect("memory takes it");
    out.into_inner()
}

fn read(bytes: &[u8], policy: Policy) -> Result<Report, BfbError> {
    scan(bytes, policy, |_, _| Ok(()))
}

fn fault(bytes: &[u8]) -> (u64, Fault) {
    match read(bytes, Policy::Strict) {
        Err(BfbError::Damaged { offset, fault, .. }) => (offset, fault),
        other => panic!("{other:?} is no damage"),
    }
}

#[test]
fn builder_writes_golden_vectors_in_any_input_order() {
    assert_eq!(build(&[("initramfs", b"INITRAMFS"), ("image", b"KERNEL")]), hex(GOLDEN_1));
    assert_eq!(build(&[("image", b""), ("boot-args-v2", b"a2-args!"), ("boot-args-v0", b"a0")]), hex(GOLDEN_2));
}

#[test]
fn scan_reads_golden_vectors() {
    let mut data = Vec::new();
    let bytes = hex(GOLDEN_2);
    let report = scan(bytes.as_slice(), Policy::Strict, |entry, piece| {
        if piece.is_empty() {
            data.push((entry.header.name.to_string(), Vec::new()));
        }
        data.last_mut().expect("the empty piece comes first").1.extend_from_slice(piece);
        Ok(())
    })
    .expect("no damage");
    let expected = [("boot-args-v0", "a0"), ("boot-args-v2", "a2-args!"), ("image-v0", "")];
    assert_eq!(data, expected.map(|(name, text)| (name.to_owned(), text.as_bytes().to_vec())));
    assert_eq!(report.len_bytes, bytes.len() as u64);
    assert_eq!(report.entries.iter().map(|entry| entry.offset).collect::<Vec<_>>(), [0, 32, 64]);
    assert_eq!(report.entries[0].header.next_version, 2);
}

/// The format cannot detect three kinds of damage: the version of the first image with its id, and the id of a first
/// image that is the only one with it, because no earlier image announces them; and a length that includes padding,
/// because the checksum covers both. Everything else must be detected, at every offset and for every value of the byte.
/// A manifest detects these three as well (see `manifest`).
#[test]
fn damage_of_any_byte_is_detected() {
    for text in [GOLDEN_1, GOLDEN_2] {
        let good = hex(text);
        let entries = read(&good, Policy::Strict).expect("no damage").entries;
        for offset in 0..good.len() {
            for change in 1..=255 {
                let mut bad = good.clone();
                bad[offset] ^= change;
                let found = read(&bad, Policy::Strict).is_err();
                let noted = read(&bad, Policy::Vendor).map_or(true, |report| !report.notes.is_empty());
                assert!(noted || !found, "vendors' tools do not write {offset} by {change:#x}");
                assert_eq!(found, !hidden_by_the_format(&entries, offset as u64, change), "{offset} by {change:#x}");
            }
        }
    }
}

fn hidden_by_the_format(entries: &[Entry], offset: u64, change: u8) -> bool {
    let alone =
        |entry: &Entry| entries.iter().filter(|other| other.header.name.id == entry.header.name.id).count() == 1;
    let version = entries.iter().enumerate().any(|(index, entry)| {
        let ImageName { id, version } = entry.header.name;
        let same = |other: &Entry| other.header.name.id == id;
        let next = entries[index + 1..]
            .iter()
            .find(|other| same(other))
            .map_or(VERSION_MAX + 1, |next| next.header.name.version);
        offset == entry.offset + 6 && !entries[..index].iter().any(same) && version ^ change < next
    });
    let id = ImageId(entries[0].header.name.id.0 ^ change);
    let in_order =
        entries.iter().skip(1).all(|entry| id.rank().is_none_or(|_| id.rank() < entry.header.name.id.rank()));
    let len = entries.iter().any(|entry| {
        let old = u64::from(entry.header.len_bytes);
        let new = old ^ u64::from(change);
        offset == entry.offset + 8 && new > old && new <= old + padding_len_bytes(old) as u64
    });
    version || len || (offset == 7 && alone(&entries[0]) && in_order)
}

#[test]
fn each_fault_is_reported_with_its_offset() {
    let good = hex(GOLDEN_2);
    let with = |offset: usize, byte: u8| {
        let mut bad = good.clone();
        bad[offset] = byte;
        fault(&bad)
    };
    assert_eq!(fault(&[]), (0, Fault::Empty));
    assert_eq!(fault(&good[..10]), (0, Fault::ShortHeader { have: 10 }));
    assert_eq!(with(32, b'C'), (32, Fault::Magic { found: 0x1302_6643 }));
    assert_eq!(with(36, 0x22), (36, Fault::Major { found: 2 }));
    assert_eq!(with(36, 0x31), (36, Fault::Minor { found: 3 }));
    assert_eq!(with(36, 0x11), (36, Fault::OldMinor { found: 1 }));
    assert_eq!(with(37, 0x01), (37, Fault::Reserved { found: 1 }));
    assert_eq!(with(38, 0x34), (38, Fault::Version { found: 4 }));
    // ATF skips extra words of a longer header; mlx-mkbfb and we refuse it.
    assert_eq!(with(38, 0x42), (38, Fault::HeaderWords { found: 4 }));
    assert_eq!(with(5, 0x10), (5, Fault::NextVersion { stored: 1, expected: 2 }));
    assert_eq!(with(16, 1), (16, Fault::Following { stored: 0x4800_0000_0000_0001, expected: 0x4800_0000_0000_0000 }));
    assert_eq!(with(27, 7), (27, Fault::Padding { found: 7 }));
    assert_eq!(with(24, b'b').0, 12, "a checksum");
    assert_eq!(fault(&good[..60]), (32 + 8, Fault::Truncated { need: 8, have: 4 }));
    // Missing padding of the first image, now the last one.
    assert_eq!(fault(&good[..28]), (8, Fault::Truncated { need: 8, have: 4 }));
    let appended = [good.as_slice(), b"DEBUG=1\n"].concat();
    assert_eq!(fault(&appended), (good.len() as u64, Fault::Magic { found: u32::from_le_bytes(*b"DEBU") }));
}

#[test]
fn messages_contain_offset_field_and_image() {
    let mut bad = hex(GOLDEN_2);
    bad[56] ^= 1;
    let message = read(&bad, Policy::Strict).expect_err("damaged").to_string();
    for part in ["offset 0x2c", "image_crc", "image 1", "boot-args-v2", "0x9d2a0cfb"] {
        assert!(message.contains(part), "{part} is missing: {message}");
    }
}

#[test]
fn repairable_faults_are_noted_or_refused_by_policy() {
    // The images of the first vector, swapped.
    let good = hex(GOLDEN_1);
    let swapped = [&good[32..], &good[..32]].concat();
    let report = read(&swapped, Policy::Repairable).expect("can be repaired");
    let faults = report.notes.iter().map(|note| match note {
        BfbError::Damaged { index, fault, .. } => (*index, fault.field()),
        other => panic!("{other}"),
    });
    assert_eq!(faults.collect::<Vec<_>>(), [(0, "following_images"), (1, "image_id"), (1, "following_images")]);
    assert!(matches!(fault(&swapped).1, Fault::Following { .. }));
    let twice = [&good[..32], &good].concat();
    assert!(read(&twice, Policy::Repairable).is_err(), "which of the two is meant can't be repaired");
}

#[test]
fn unknown_ids_are_noted_by_scan_and_refused_by_the_builder() {
    let mut bytes = build(&[("image", b"KERNEL")]);
    bytes[7] = 99;
    let report = read(&bytes, Policy::Strict).expect("consumers skip it");
    assert_eq!(report.entries[0].header.name.to_string(), "id99-v0");
    assert_eq!(report.notes.len(), 1);
    let error = Builder::new().insert_stream(std::path::Path::new("x"), &report, &[]);
    assert!(matches!(error, Err(WriteError::UnknownId(_))));
}

#[test]
fn generation_takes_its_version_or_a_common_one() {
    let bytes = build(&[("bl2", b"1"), ("bl2-v1", b"2"), ("boot-args-v2", b"3"), ("image", b"4")]);
    let report = read(&bytes, Policy::Strict).expect("no damage");
    let serves = |id, generation| report.serves(id, generation);
    let [one, two, three] = Generation::ALL;
    assert_eq!([one, two, three].map(|card| serves(ImageId::BL2, card)), [true, true, false]);
    assert_eq!([one, two, three].map(|card| serves(ImageId::BOOT_ARGS, card)), [false, false, true]);
    assert_eq!([one, two, three].map(|card| serves(ImageId::IMAGE, card)), [true; 3]);
    assert_eq!([one, two, three].map(|card| serves(ImageId::INITRAMFS, card)), [false; 3]);
}

#[test]
fn card_keeps_the_highest_version_up_to_its_own() {
    let all = ["bl2-v1", "bl2-v2", "boot-args", "boot-args-v2", "image", "nicfw-v2", "nicfw-v3", "sys", "sys-v1"];
    let kept = |generation| {
        let mut builder = Builder::new();
        for name in all {
            builder.insert(name.parse().expect("a name"), Source::Bytes(Vec::new())).expect("has a place");
        }
        builder.keep_for(generation);
        builder.images().map(|(name, _)| name.to_string()).collect::<Vec<_>>().join(" ")
    };
    let [one, two, three] = Generation::ALL;
    assert_eq!(kept(one), "sys-v0 boot-args-v0 image-v0");
    assert_eq!(kept(two), "bl2-v1 sys-v1 boot-args-v0 image-v0", "arguments of version 0 are also BlueField-2's");
    assert_eq!(kept(three), "bl2-v2 sys-v1 boot-args-v2 nicfw-v2 image-v0");
}

/// `mlx-mkbfb -f` writes the version of the next image into `next_img_ver`, whatever its id is.
#[test]
fn filtered_stream_of_a_vendor_is_noted_and_other_faults_are_refused() {
    let mut bytes = build(&[("bl2-v2", b"a"), ("boot-args-v2", b"b"), ("image", b"c")]);
    bytes[5] |= 0x20;
    assert_eq!(fault(&bytes), (5, Fault::NextVersion { stored: 2, expected: 0 }));
    let report = read(&bytes, Policy::Vendor).expect("cards boot it");
    assert_eq!((report.notes.len(), report.entries.len()), (1, 3));
    for wrong in [0x10, 0x30, 0xf0] {
        bytes[5] = bytes[5] & 0xf | wrong;
        assert!(read(&bytes, Policy::Vendor).is_err(), "{wrong:#x} is not the version of the next image");
    }
    let golden = hex(GOLDEN_1);
    let swapped = [&golden[32..], &golden[..32]].concat();
    assert!(read(&swapped, Policy::Vendor).is_err(), "the boot stages would skip an image");
}

#[test]
fn data_behind_the_last_image_is_noted_unless_it_may_be_a_damaged_image() {
    let good = hex(GOLDEN_1);
    let long = vec![b'x'; 200_000];
    for tail in [&b"\n"[..], b"B", b"X=1\n", b"ubuntu_PASSWORD='x'\nUPDATE_ATF_UEFI=no\n", &long] {
        let bytes = [&good[..], tail].concat();
        assert!(read(&bytes, Policy::Strict).is_err());
        for policy in [Policy::Vendor, Policy::Repairable] {
            let found = read(&bytes, policy);
            if tail == b"B" {
                assert!(matches!(found, Err(BfbError::Damaged { fault: Fault::ShortHeader { have: 1 }, .. })));
                continue;
            }
            let report = found.expect("installers read it");
            assert_eq!((report.tail_len_bytes, report.len_bytes), (tail.len() as u64, bytes.len() as u64));
            let note = report.notes[0].to_string();
            let expected =
                format!("offset {:#x} (end of image 1, initramfs-v0): {} bytes follow", good.len(), tail.len());
            assert!(report.notes.len() == 1 && note.starts_with(&expected), "{note}");
        }
    }
    // An image that the previous one announces is missing.
    let mut damaged = good.clone();
    damaged[32] ^= 1;
    assert!(matches!(read(&damaged, Policy::Repairable), Err(BfbError::Damaged { offset: 32, .. })));
    damaged[0] ^= 1;
    assert!(matches!(read(&damaged, Policy::Repairable), Err(BfbError::Damaged { offset: 0, .. })));
}

#[test]
fn image_for_a_later_card_is_read_but_no_card_takes_it() {
    let bytes = build(&[("bl2-v2", b"a"), ("bl2-v3", b"b")]);
    let report = read(&bytes, Policy::Strict).expect("no damage");
    assert_eq!(report.entries[1].header.name.to_string(), "bl2-v3");
    let takes = Generation::ALL.map(|card| report.serves(ImageId::BL2, card));
    assert_eq!(takes, [false, false, true]);
}

#[test]
fn image_names_parse_and_print() {
    let name = |text: &str| text.parse::<ImageName>();
    assert_eq!(name("boot-args-v2").map(|name| name.to_string()), Ok("boot-args-v2".into()));
    assert_eq!(name("image").map(|name| name.to_string()), Ok("image-v0".into()));
    assert_eq!(name("boot-args-v4"), Err(ImageNameError::Version("boot-args-v4".into())));
    assert_eq!(name("kernel"), Err(ImageNameError::Unknown("kernel".into())));
    assert_eq!(name("image-v"), Err(ImageNameError::Unknown("image-v".into())));
}

proptest! {
    #[test]
    fn arbitrary_input_does_not_panic(mut bytes: Vec<u8>, offset in 0_usize..200, good: bool) {
        if good {
            let golden = hex(GOLDEN_2);
            let offset = offset % golden.len();
            bytes = [&golden[..offset], &bytes, &golden[offset..]].concat();
        }
        let _ = read(&bytes, Policy::Repairable);
    }

    #[test]
    fn written_streams_scan_strictly(lengths in prop::collection::vec((1_u8..64, 0_u8..=2, 0_usize..70_000), 1..8)) {
        let mut builder = Builder::new();
        for (id, version, len) in lengths {
            let name = ImageName::new(ImageId(id), version);
            if id_has_place(name) {
                builder.insert(name, Source::Bytes(vec![id; len])).expect("has a place");
            }
        }
        let mut out = Cursor::new(Vec::new());
        if let Ok(entries) = builder.write_to(&mut out) {
            let report = read(out.get_ref(), Policy::Strict).expect("what the writer writes is strict");
            prop_assert_eq!(report.entries, entries);
            prop_assert!(report.notes.is_empty());
        }
    }
}

proptest! {
    /// The rule of `filter_bootstream` in Mellanox/bfscripts `mlx-mkbfb`, as two lists: everything but the card's
    /// version is to be dropped, and of each id the highest version up to it is taken off that list again.
    #[test]
    fn kept_versions_are_those_of_a_vendors_filter(
        drawn in prop::collection::btree_set((1_u8..64, 0_u8..=VERSION_MAX), 1..24),
        version in 0_u8..=2,
    ) {
        let names = drawn.into_iter().map(|(id, version)| ImageName::new(ImageId(id), version));
        let names: Vec<_> = names.filter(|name| id_has_place(*name)).collect();
        let mut builder = Builder::new();
        for name in &names {
            builder.insert(*name, Source::Bytes(Vec::new())).expect("has a place");
        }
        let mut dropped: Vec<_> = names.iter().filter(|name| name.version != version).collect();
        let mut by_version: Vec<_> = names.iter().filter(|name| name.version <= version).collect();
        by_version.sort_by_key(|name| name.version);
        let compatible: BTreeMap<_, _> = by_version.iter().map(|name| (name.id, name.version)).collect();
        dropped.retain(|name| compatible.get(&name.id) != Some(&name.version));
        let expected: BTreeSet<_> = names.iter().filter(|name| !dropped.contains(name)).copied().collect();
        builder.keep_for(Generation::ALL[usize::from(version)]);
        let kept: BTreeSet<_> = builder.images().map(|(name, _)| name).collect();
        prop_assert_eq!(kept, expected);
    }
}

fn id_has_place(name: ImageName) -> bool {
    name.id.rank().is_some()
}

//! Golden descriptors, capabilities of each profile, and the region table compared with a model.

use super::*;
use crate::ids::FunctionId;
use crate::op::{Dtype, ReduceOp};
use proptest::prelude::*;
use std::collections::BTreeMap;

fn at(index: u16, generation: u32, offset_bytes: u64) -> Address {
    Address { region: RegionKey { index, generation }, offset_bytes }
}

#[test]
fn descriptors_of_every_kind_encode_to_golden_words() {
    let (src, dst) = (at(3, 7, 0x1000), at(4, 9, 0x2000));
    let (source, accumulator, op) = (Dtype::Bf16, Dtype::F32, ReduceOp::Sum);
    let descriptor = |step, more| Descriptor {
        tag: Tag { seq: 0x1122_3344_5566_7788, slot: 5, attempt: 6 },
        scope: Scope(0xab),
        scope_generation: 0xcdef,
        more,
        step,
    };
    let golden = [
        (Step::Copy { src, dst, len_bytes: 99 }, true, 0xcdef_ab00_0000_0081, 99),
        (Step::Load { source, accumulator, src, dst, count: 8 }, true, 0xcdef_ab00_0b0a_0082, 8),
        (Step::Reduce { op, source, accumulator, src, dst, count: 8 }, true, 0xcdef_ab00_0b0a_0183, 8),
        (
            Step::Store { op, accumulator, output: source, src, dst, count: 8, ranks: 4 },
            false,
            0xcdef_ab0a_0b00_0104,
            0x4_0000_0008,
        ),
    ];
    for (step, more, head, length) in golden {
        let words = [head, 0x1122_3344_5566_7788, 0x6_0000_0005, 0x7_0000_0003, 0x1000, 0x9_0000_0004, 0x2000, length];
        assert_eq!(descriptor(step, more).emit(), words, "{step:?}");
        assert_eq!(Descriptor::parse(&words), Ok(descriptor(step, more)));
    }
    let covers = [Coverage::NONE, Coverage { offset_bytes: 64, len_bytes: 99 }];
    for (covers, last) in covers.into_iter().zip([0, 64 << 32 | 99]) {
        let publish = Step::Publish { dst, words: [1, u64::MAX], covers };
        let head = [0xcdef_ab00_0000_0005, 0x1122_3344_5566_7788, 0x6_0000_0005];
        let words = [head[0], head[1], head[2], 1, u64::MAX, 0x9_0000_0004, 0x2000, last];
        assert_eq!(descriptor(publish, false).emit(), words);
        assert_eq!(Descriptor::parse(&words), Ok(descriptor(publish, false)));
    }
    let nowhere = [5, 0, 0, 1, 2, 0x9_0000_0004, 0x2000, 64 << 32];
    assert_eq!(Descriptor::parse(&nowhere), Err(DescriptorError::Reserved(7)), "an offset without covered bytes");
}

proptest! {
    #[test]
    fn words_that_parse_are_emitted_unchanged(
        mut words in any::<[u64; DESCRIPTOR_WORDS]>(),
        kind in 0..8_u64, op in 0..16_u64, types in any::<[u8; 3]>(), clear in any::<bool>(),
    ) {
        // Random words rarely parse, so half of the runs make them plausible.
        if clear {
            words[0] = kind | op << 8 | words[0] & 0xffff_ff00_0000_0000;
            for (at, dtype) in types.iter().enumerate() {
                words[0] |= u64::from(dtype % 16) << (16 + 8 * at);
            }
            for word in [3, 5] {
                words[word] &= 0xffff_ffff_0000_ffff;
            }
        }
        if let Ok(descriptor) = Descriptor::parse(&words) {
            prop_assert_eq!(descriptor.emit(), words);
        }
    }
}

#[test]
fn reserved_and_unexpected_bits_are_refused() {
    let step = Step::Copy { src: at(0, 1, 0), dst: at(1, 1, 0), len_bytes: 1 };
    let tag = Tag { seq: 0, slot: 0, attempt: 0 };
    let words = Descriptor { tag, scope: Scope(0), scope_generation: 0, more: false, step }.emit();
    let with = |word: usize, bits: u64| {
        let mut words = words;
        words[word] |= bits;
        Descriptor::parse(&words).err()
    };
    assert_eq!(with(0, 1 << 8), Some(DescriptorError::Types(words[0] | 1 << 8)), "a copy has no operator");
    assert_eq!(with(3, 1 << 16), Some(DescriptorError::Reserved(3)));
    assert_eq!(with(7, 1 << 32), Some(DescriptorError::Reserved(7)), "a copy has no ranks");
    assert_eq!(with(0, 6), Some(DescriptorError::Kind(7)));
}

#[test]
fn each_profile_supports_its_steps() {
    let (src, dst, op) = (at(0, 1, 0), at(1, 1, 0), ReduceOp::Sum);
    let reduce = |source, accumulator| Step::Reduce { op, source, accumulator, src, dst, count: 4 };
    let minloc = |dtype| Step::Reduce { op: ReduceOp::MinLoc, source: dtype, accumulator: dtype, src, dst, count: 4 };
    assert_eq!(minloc(Dtype::F64).dst_len_bytes(), 64, "an element is a pair");
    let store = |ranks| Step::Store { op, accumulator: Dtype::F32, output: Dtype::F16, src, dst, count: 4, ranks };
    let steps = [
        (Step::Copy { src, dst, len_bytes: 4 }, [true, true, true]),
        (Step::Publish { dst, words: [0; 2], covers: Default::default() }, [true, true, true]),
        (reduce(Dtype::F32, Dtype::F32), [false, true, true]),
        (reduce(Dtype::Bf16, Dtype::Bf16), [false, true, true]),
        (reduce(Dtype::Bf16, Dtype::F32), [false, false, true]),
        (reduce(Dtype::F64, Dtype::F64), [false, false, true]),
        (reduce(Dtype::F32, Dtype::F64), [false, false, false]),
        (Step::Load { source: Dtype::F16, accumulator: Dtype::F32, src, dst, count: 4 }, [false, false, true]),
        (reduce(Dtype::I8, Dtype::I8), [false, true, true]),
        (reduce(Dtype::U8, Dtype::U8), [false, false, true]),
        (minloc(Dtype::I32), [false, false, true]),
        (minloc(Dtype::F16), [false, false, false]),
        (store(2), [false, false, true]),
        (store(0), [false, false, false]),
    ];
    for (step, expected) in steps {
        let supported = Profile::ALL.map(|profile| Capabilities::new(profile, 8, 8).check(&step).is_ok());
        assert_eq!(supported, expected, "{step:?}");
    }
}

#[test]
fn check_refuses_invalid_lengths_and_alignment() {
    let capabilities = Capabilities::new(Profile::Full, 8, 8).with_alignment(64).with_max_len(4096);
    let copy = |offset_bytes, len_bytes| {
        capabilities.check(&Step::Copy { src: at(0, 1, offset_bytes), dst: at(1, 1, 64), len_bytes })
    };
    assert_eq!(copy(0, 4096), Ok(()));
    assert_eq!(copy(0, 4097), Err(Status::TooLong));
    assert_eq!(copy(0, 0), Err(Status::TooLong));
    assert_eq!(copy(32, 64), Err(Status::Misaligned));
    let word = Capabilities::new(Profile::Full, 8, 8).check(&Step::Publish {
        dst: at(0, 1, 4),
        words: [0; 2],
        covers: Default::default(),
    });
    assert_eq!(word, Err(Status::Misaligned));
    // The limit applies to the accumulators, which are wider than the source.
    let wide =
        Step::Load { source: Dtype::F16, accumulator: Dtype::F32, src: at(0, 1, 0), dst: at(1, 1, 0), count: 1025 };
    assert_eq!(capabilities.check(&wide), Err(Status::TooLong));
}

#[test]
fn status_numbers_round_trip() {
    for (number, status) in Status::ALL.into_iter().enumerate() {
        assert_eq!((status as usize, Status::from_wire(number as u8)), (number, Some(status)));
    }
    assert_eq!(Status::from_wire(Status::ALL.len() as u8), None);
}

#[derive(Debug, Clone)]
enum Operation {
    Register { owner: u32, len_bytes: u64 },
    Deregister { owner: u32, key: usize },
    DeregisterAll { owner: u32 },
    Hold { owner: u32, key: usize, offset_bytes: u64, len_bytes: u64 },
    Release { hold: usize },
}

fn operation() -> impl Strategy<Value = Operation> {
    // Includes offsets and lengths at the end of the number range, where sums overflow.
    let far = prop_oneof![4 => 0..40_u64, 1 => (u64::MAX - 2)..=u64::MAX];
    prop_oneof![
        3 => (0..3_u32, 0..32_u64).prop_map(|(owner, len_bytes)| Operation::Register { owner, len_bytes }),
        2 => (0..3_u32, any::<usize>()).prop_map(|(owner, key)| Operation::Deregister { owner, key }),
        1 => (0..3_u32).prop_map(|owner| Operation::DeregisterAll { owner }),
        4 => (0..3_u32, any::<usize>(), far.clone(), far)
            .prop_map(|(owner, key, offset_bytes, len_bytes)| Operation::Hold { owner, key, offset_bytes, len_bytes }),
        3 => any::<usize>().prop_map(|hold| Operation::Release { hold }),
    ]
}

/// The model's state of a key.
#[derive(Debug, Clone, Copy)]
struct Known {
    owner: u32,
    len_bytes: u64,
    live: bool,
    uses: u32,
}

proptest! {
    #[test]
    fn region_table_behaves_like_its_model(operations in prop::collection::vec(operation(), 0..200)) {
        const OWNER_BYTES: u64 = 40;
        const ALL_BYTES: u64 = 60;
        let mut table = RegionTable::<4>::new(2).with_max_bytes(OWNER_BYTES, ALL_BYTES);
        let mut known: BTreeMap<RegionKey, Known> = BTreeMap::new();
        let mut holds: Vec<RegionKey> = Vec::new();
        for operation in operations {
            let keys: Vec<RegionKey> = known.keys().copied().collect();
            let pick = |key: usize| keys.get(key % keys.len().max(1)).copied().unwrap_or_default();
            let taken = |known: &BTreeMap<RegionKey, Known>, owner: Option<u32>| {
                known.values().filter(|k| (k.live || k.uses > 0) && owner.is_none_or(|owner| k.owner == owner)).count()
            };
            let bytes = |known: &BTreeMap<RegionKey, Known>, owner: Option<u32>| -> u64 {
                let there = known.values().filter(|k| (k.live || k.uses > 0) && owner.is_none_or(|owner| k.owner == owner));
                there.map(|k| k.len_bytes).sum()
            };
            match operation {
                Operation::Register { owner, len_bytes } => match table.register(FunctionId(owner), len_bytes) {
                    Ok(key) => {
                        prop_assert!(len_bytes > 0 && taken(&known, Some(owner)) < 2 && taken(&known, None) < 4);
                        prop_assert!(bytes(&known, Some(owner)) + len_bytes <= OWNER_BYTES);
                        prop_assert!(bytes(&known, None) + len_bytes <= ALL_BYTES);
                        let new = known.insert(key, Known { owner, len_bytes, live: true, uses: 0 });
                        prop_assert!(new.is_none(), "keys are unique");
                    }
                    Err(RegisterError::Empty) => prop_assert_eq!(len_bytes, 0),
                    Err(RegisterError::RegionQuota { .. }) => prop_assert_eq!(taken(&known, Some(owner)), 2),
                    Err(RegisterError::ByteQuota { held_bytes, .. }) => {
                        prop_assert_eq!(held_bytes, bytes(&known, Some(owner)));
                        prop_assert!(held_bytes + len_bytes > OWNER_BYTES);
                    }
                    Err(RegisterError::DeviceBytes { held_bytes, .. }) => {
                        prop_assert_eq!(held_bytes, bytes(&known, None));
                        prop_assert!(held_bytes + len_bytes > ALL_BYTES);
                    }
                    Err(RegisterError::Full { .. }) => prop_assert_eq!(taken(&known, None), 4),
                },
                Operation::Deregister { owner, key } => {
                    let key = pick(key);
                    let entry = known.get_mut(&key).filter(|k| k.live && k.owner == owner);
                    let expected = entry.as_ref().map(|k| k.uses == 0);
                    prop_assert_eq!(table.deregister(FunctionId(owner), key).ok(), expected);
                    if let Some(entry) = entry {
                        entry.live = false;
                    }
                }
                Operation::DeregisterAll { owner } => {
                    let mine = known.values_mut().filter(|k| k.owner == owner);
                    let draining = mine.map(|k| { k.live = false; usize::from(k.uses > 0) }).sum::<usize>();
                    prop_assert_eq!(table.deregister_all(FunctionId(owner)), draining);
                }
                Operation::Hold { owner, key, offset_bytes, len_bytes } => {
                    let address = Address { region: pick(key), offset_bytes };
                    let entry = known.get_mut(&address.region).filter(|k| {
                        let end = u128::from(offset_bytes) + u128::from(len_bytes);
                        k.live && k.owner == owner && end <= u128::from(k.len_bytes)
                    });
                    prop_assert_eq!(table.hold(FunctionId(owner), address, len_bytes).is_ok(), entry.is_some());
                    if let Some(entry) = entry {
                        entry.uses += 1;
                        holds.push(address.region);
                    }
                }
                Operation::Release { hold } if !holds.is_empty() => {
                    let key = holds.swap_remove(hold % holds.len());
                    let entry = known.get_mut(&key).expect("it was held");
                    entry.uses -= 1;
                    prop_assert_eq!(table.release(key), entry.uses == 0 && !entry.live);
                }
                Operation::Release { .. } => {}
            }
            prop_assert_eq!(table.len(), taken(&known, None));
        }
    }
}

#[test]
fn region_of_another_owner_is_reported_as_unknown() {
    let mut table = RegionTable::<4>::new(4);
    let key = table.register(FunctionId(0), 100).expect("room");
    let address = Address { region: key, offset_bytes: 0 };
    let unknown = RegionError::Unknown { owner: FunctionId(1), index: key.index };
    assert_eq!(table.hold(FunctionId(1), address, 1), Err(unknown));
    assert_eq!(table.deregister(FunctionId(1), key), Err(unknown));
    let none = Address { region: RegionKey { index: 3, generation: 1 }, offset_bytes: 0 };
    assert_eq!(table.hold(FunctionId(1), none, 1), Err(RegionError::Unknown { owner: FunctionId(1), index: 3 }));
    table.deregister(FunctionId(0), key).expect("it is there");
    assert!(matches!(table.hold(FunctionId(0), address, 1), Err(RegionError::Stale { .. })));
}

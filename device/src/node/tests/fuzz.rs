//! Fuzzing: random bytes, and valid headers with some fields changed. Nothing panics, and the invariants hold after
//! each packet (`check_invariants` in [`Rig::put_bytes`]).

use super::*;
use proptest::prelude::*;
use sumac_hal::op::Collective;
use sumac_hal::wire::{HEADER_LEN, SHORT_HEADER_LEN};

/// Small numbers, and numbers at which arithmetic could overflow.
fn numbers() -> impl Strategy<Value = u64> {
    prop_oneof![4 => 0_u64..24, 1 => any::<u64>(), 1 => prop::sample::select(vec![u64::MAX, u64::MAX - 63, 1 << 63, 255, 256])]
}

/// A change to one header field.
#[derive(Debug, Clone, Copy)]
enum Change {
    Nothing,
    Child(u16),
    Key(u64),
    Group(u32),
    Epoch(u32),
    Count(u16),
    Mark(u64),
    Signature(u32),
    Bits(u64),
    Bits2(u64),
    Dtype(Option<Dtype>),
    Op(Option<ReduceOp>),
    Collective(Option<Collective>),
    Partial,
    Form,
    Token(u32),
}

fn changes() -> impl Strategy<Value = Change> {
    prop_oneof![
        8 => Just(Change::Nothing),
        1 => any::<u16>().prop_map(Change::Child),
        1 => any::<u64>().prop_map(Change::Key),
        1 => any::<u32>().prop_map(Change::Group),
        1 => any::<u32>().prop_map(Change::Epoch),
        1 => any::<u16>().prop_map(Change::Count),
        1 => numbers().prop_map(Change::Mark),
        1 => any::<u32>().prop_map(Change::Signature),
        1 => numbers().prop_map(Change::Bits),
        1 => any::<u64>().prop_map(Change::Bits2),
        1 => prop::option::of(prop::sample::select(Dtype::ALL)).prop_map(Change::Dtype),
        1 => prop::option::of(prop::sample::select(ReduceOp::ALL)).prop_map(Change::Op),
        1 => prop::option::of(prop::sample::select(Collective::ALL)).prop_map(Change::Collective),
        1 => Just(Change::Partial),
        2 => Just(Change::Form),
        1 => any::<u32>().prop_map(Change::Token),
    ]
}

#[derive(Debug, Clone)]
struct Step {
    from_parent: bool,
    child: u16,
    kind: u8,
    reason: u8,
    seq: u64,
    /// Report everything answered as received.
    up_to_date: bool,
    elements: usize,
    extra: usize,
    change: Change,
    after: u8,
}

prop_compose! {
    fn steps()(
        from_parent in prop::bool::weighted(0.3),
        child in 0_u16..3,
        kind in prop_oneof![6 => Just(1_u8), 1 => 2_u8..12],
        reason in 1_u8..11,
        seq in numbers(),
        up_to_date in any::<bool>(),
        elements in prop_oneof![8 => Just(2_usize), 1 => 0_usize..20],
        extra in prop_oneof![8 => Just(0_usize), 1 => 0_usize..4],
        change in changes(),
        after in 0_u8..12,
    ) -> Step {
        Step { from_parent, child, kind, reason, seq, up_to_date, elements, extra, change, after }
    }
}

fn apply(change: Change, repr: &mut Repr) {
    match change {
        Change::Nothing => {}
        Change::Child(n) => repr.child = ChildIndex(n),
        Change::Key(n) => repr.key = n,
        Change::Group(n) => repr.group = GroupId(n),
        Change::Epoch(n) => repr.epoch = Epoch::from_bits(n),
        Change::Count(n) => repr.count = n,
        Change::Mark(n) => repr.mark = ChunkNo(n),
        Change::Signature(n) => repr.signature = n,
        Change::Bits(n) => repr.bits = n,
        Change::Bits2(n) => repr.bits2 = n,
        Change::Dtype(dtype) => repr.dtype = dtype,
        Change::Op(op) => repr.op = op,
        Change::Collective(collective) => repr.collective = collective,
        Change::Partial => repr.flags.toggle(Flags::PARTIAL),
        Change::Form => repr.flags.toggle(Flags::SHORT),
        Change::Token(n) => repr.token = n,
    }
}

fn run(setup: Setup, script: &[Step]) {
    let mut rig = Rig::new(setup);
    for step in script {
        let group = rig.node.storage.groups[0].as_ref();
        let (own, answered) = group.map_or((0, 0), |group| (group.token, group.answered_below));
        let kind = Kind::from_wire(step.kind).expect("1 to 11");
        rig.have.fill(if step.up_to_date { setup.shard.global(answered).0 } else { 0 });
        let (from, mut repr) = if step.from_parent {
            (PARENT, Repr { bits: u64::from(step.reason), ..rig.down(kind, step.seq, own) })
        } else {
            (child_addr(step.child), rig.up(kind, step.child, step.seq))
        };
        if kind == Kind::Nak {
            repr.reason = NakReason::from_wire(step.reason);
        }
        if step.from_parent {
            (repr.collective, repr.bits2) = (Some(OP.collective), sumac_hal::wire::pack_op(&OP));
        }
        apply(step.change, &mut repr);
        rig.put(from, repr, &vec![step.kind; step.elements * 4 + step.extra]);
        match step.after {
            0..=4 => drop(rig.drain()),
            5 => rig.pass_ms(3),
            6 => rig.pass_ms(700),
            7 => drop(rig.next()),
            _ => {}
        }
    }
    assert_eq!(rig.node.counters().packets_in, script.len() as u64);
    rig.drain();
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(300))]

    #[test]
    fn arbitrary_packets_keep_the_invariants(
        script in prop::collection::vec(steps(), 1..120),
        order in prop::sample::select(vec![Order::Arrival, Order::TreeFold, Order::TreePairwise]),
        has_parent in any::<bool>(),
        shards in 1_u16..3,
    ) {
        let shard = Shard::new(shards - 1, shards).unwrap();
        run(Setup { children: 3, window: 4, slots: 8, order, has_parent, shard, ..Setup::default() }, &script);
    }

    #[test]
    fn random_bytes_are_dropped_as_malformed(bytes in prop::collection::vec(any::<u8>(), 0..300)) {
        let mut rig = Rig::new(Setup::default());
        rig.put_bytes(child_addr(0), &bytes);
        prop_assert_eq!(rig.dropped(DropReason::Malformed) + rig.dropped(DropReason::WrongVersion), 1);
        prop_assert_eq!(rig.drain(), vec![]);
    }

    /// A valid packet with some bytes overwritten and the checksum recomputed.
    #[test]
    fn damaged_header_with_valid_checksum_keeps_the_invariants(
        edits in prop::collection::vec((0_usize..48, any::<u8>()), 1..8),
        elements in 0_usize..20,
        short in any::<bool>(),
    ) {
        let mut rig = Rig::new(Setup { has_parent: true, ..Setup::default() });
        rig.data(1, 0, &[1.0]);
        let payload = vec![0; elements * 4];
        let mut repr = Repr { payload_len_bytes: payload.len() as u16, ..rig.up(Kind::Data, 0, 0) };
        repr.flags.set(Flags::SHORT, short);
        let mut bytes = vec![0; repr.packet_len()];
        repr.emit(&mut Packet::new_unchecked(&mut bytes[..]), payload_crc(&payload));
        edits.iter().for_each(|&(at, byte)| bytes[at] = byte);
        // The edited flags decide on the form.
        let header_len = if bytes[3] & Flags::SHORT.bits() != 0 { SHORT_HEADER_LEN } else { HEADER_LEN };
        bytes.resize(bytes.len().max(header_len), 0);
        let (header, payload) = bytes.split_at_mut(header_len);
        let (covered, crc) = header.split_at_mut(header_len - 4);
        let covered = [&*covered, &payload_crc(payload).to_le_bytes()].concat();
        crc.copy_from_slice(&sumac_hal::wire::crc32c(&covered).to_le_bytes());
        rig.put_bytes(child_addr(0), &bytes);
        rig.put_bytes(PARENT, &bytes);
        rig.drain();
    }
}

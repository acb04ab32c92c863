//! Trains: a node that handles packets as one train is in the same state afterwards, and sends the same packets, as one
//! that handles each on its own.

use super::*;
use proptest::prelude::*;
use std::format;

/// What is wrong with a packet of a train, if anything.
#[derive(Debug, Clone, Copy)]
enum Fault {
    None,
    /// One bit is flipped.
    Damaged(u16),
    /// Cut to this length.
    Cut(usize),
    Epoch,
    Group,
    Key,
    Child(u16),
    Signature,
    Token,
    /// A `have` beyond what was answered.
    Mark,
    /// No window reaches as far.
    Far,
    /// A chunk that came before.
    Again,
    Gap,
    Shape,
    Tiny,
    Full,
    Congested,
    Empty,
    Probe,
    /// In the accumulator type, as from a node.
    Partial,
    /// The sender listens to the shared address.
    Shares,
    /// The sender wants no result.
    Unwanted,
}

fn faults() -> impl Strategy<Value = Fault> {
    prop_oneof![
        24 => Just(Fault::None),
        2 => any::<u16>().prop_map(Fault::Damaged),
        1 => (0_usize..60).prop_map(Fault::Cut),
        1 => Just(Fault::Epoch),
        1 => Just(Fault::Group),
        1 => Just(Fault::Key),
        1 => (0_u16..4).prop_map(Fault::Child),
        1 => Just(Fault::Signature),
        1 => Just(Fault::Token),
        1 => Just(Fault::Mark),
        1 => Just(Fault::Far),
        2 => Just(Fault::Again),
        2 => Just(Fault::Gap),
        1 => Just(Fault::Shape),
        1 => Just(Fault::Tiny),
        2 => Just(Fault::Full),
        2 => Just(Fault::Congested),
        1 => Just(Fault::Empty),
        1 => Just(Fault::Probe),
        1 => Just(Fault::Partial),
        1 => Just(Fault::Shares),
        1 => Just(Fault::Unwanted),
    ]
}

#[derive(Debug, Clone)]
struct Train {
    child: u16,
    packets: Vec<Fault>,
    from_elsewhere: bool,
    is_marked: bool,
    /// The child first reports everything answered as received.
    up_to_date: bool,
    drain: bool,
    ms: u64,
}

fn trains() -> impl Strategy<Value = Train> {
    let one = || prop::bool::weighted(0.05);
    // Whole trains without a fault, too: a fault early in a script often keeps what follows from being in order.
    let packets = prop_oneof![
        3 => prop::collection::vec(Just(Fault::None), 1..20),
        1 => (prop::collection::vec(Just(Fault::None), 0..12), faults()).prop_map(|(mut train, fault)| {
            train.insert(train.len() / 2, fault);
            train
        }),
        1 => prop::collection::vec(faults(), 1..20),
    ];
    (0_u16..3, packets, one(), one(), any::<bool>(), any::<bool>(), 0_u64..4).prop_map(
        |(child, packets, from_elsewhere, is_marked, up_to_date, drain, ms)| Train {
            child,
            packets,
            from_elsewhere,
            is_marked,
            up_to_date,
            drain,
            ms,
        },
    )
}

/// Return the packets of a train; `next` is the child's next chunk. If `sends_again`, it sends a chunk that was lost
/// again at once.
fn packets(rig: &mut Rig, train: &Train, next: &mut u64, sends_again: bool) -> Vec<Vec<u8>> {
    let packet = |&fault: &Fault| {
        let mut repr = rig.up(Kind::Data, train.child, *next);
        repr.flags |= Flags::SHORT;
        // Now and then a number of elements that every child agrees on, but not every chunk has.
        let elements = if *next % 7 == 6 { 11 } else { 12 };
        let mut payload = floats(&vec![f32::from(train.child) + *next as f32; elements]);
        match fault {
            Fault::Epoch => repr.epoch = Epoch { term: 1, counter: 2 },
            Fault::Group => repr.group = GroupId(99),
            Fault::Key => repr.key ^= 1,
            Fault::Child(child) => repr.child = ChildIndex(child),
            Fault::Signature => repr.signature ^= 1,
            Fault::Token => repr.token ^= 1,
            Fault::Mark => repr.mark = repr.seq,
            Fault::Far => repr.seq.0 += 1000,
            Fault::Again => repr.seq.0 = repr.seq.0.saturating_sub(1),
            Fault::Gap => repr.seq.0 += 2,
            Fault::Shape => payload.truncate(40),
            Fault::Tiny => payload.truncate(8),
            Fault::Full => repr.flags.remove(Flags::SHORT),
            Fault::Congested => repr.flags |= Flags::CONGESTED,
            Fault::Empty => (repr.kind, repr.flags) = (Kind::Empty, Flags::WANT),
            Fault::Probe => (repr.kind, repr.flags, repr.bits) = (Kind::Probe, Flags::empty(), 0),
            Fault::Partial => repr.flags |= Flags::PARTIAL,
            Fault::Shares => repr.flags |= Flags::SHARED,
            Fault::Unwanted => repr.flags.remove(Flags::WANT),
            Fault::None | Fault::Damaged(_) | Fault::Cut(_) => {}
        }
        if matches!(repr.kind, Kind::Empty | Kind::Probe) {
            payload.clear();
        }
        let is_lost = matches!(fault, Fault::Damaged(_) | Fault::Cut(_) | Fault::Epoch | Fault::Group | Fault::Key);
        let is_other = matches!(fault, Fault::Again | Fault::Gap | Fault::Far | Fault::Probe);
        if !(is_other || is_lost && sends_again) {
            *next += 1;
        }
        repr.payload_len_bytes = payload.len() as u16;
        let mut bytes = vec![0; repr.packet_len()];
        bytes[repr.header_len()..].copy_from_slice(&payload);
        repr.emit(&mut Packet::new_unchecked(&mut bytes[..]), payload_crc(&payload));
        match fault {
            Fault::Damaged(bit) => {
                let at = usize::from(bit) % (8 * bytes.len());
                bytes[at / 8] ^= 1 << (at % 8);
            }
            Fault::Cut(len) => bytes.truncate(len),
            _ => {}
        }
        bytes
    };
    train.packets.iter().map(packet).collect()
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(300))]

    #[test]
    fn trains_in_and_out_leave_the_state_of_their_packets_one_by_one(
        script in prop::collection::vec(trains(), 1..24),
        order in prop::sample::select(vec![Order::Arrival, Order::TreeFold, Order::TreePairwise]),
        has_parent in any::<bool>(),
        shares in any::<bool>(),
        describe in prop::bool::weighted(0.9),
        shards in 1_u16..3,
        batch in 1_usize..20,
        sends_again in any::<bool>(),
    ) {
        let shard = Shard::new(shards - 1, shards).unwrap();
        let setup = Setup { children: 3, window: 32, slots: 64, order, has_parent, shares, shard, ..Setup::default() };
        let mut rigs = [Rig::new(setup), Rig::new(setup)];
        let mut next = [0; 3];
        if describe {
            rigs.iter_mut().for_each(|rig| rig.put(child_addr(0), rig.up(Kind::Operation, 0, 0), &[]));
        }
        for train in &script {
            let answered = rigs[0].node.storage.groups[0].as_ref().map_or(0, |group| group.answered_below);
            if train.up_to_date {
                rigs[0].have[usize::from(train.child)] = shard.global(answered).0;
            }
            let packets = packets(&mut rigs[0], train, &mut next[usize::from(train.child)], sends_again);
            let from = if train.from_elsewhere { Addr::Emu(77) } else { child_addr(train.child) };
            let (ecn, now) = (Ecn::from_mark(train.is_marked), rigs[0].now);
            packets.iter().for_each(|packet| rigs[0].node.handle(now, from, ecn, packet));
            rigs[1].node.handle_train(now, from, ecn, packets.iter().map(Vec::as_slice));
            prop_assert_eq!(format!("{:?}", rigs[0].node), format!("{:?}", rigs[1].node));
            check_invariants(&mut rigs[1].node);
            if train.drain {
                prop_assert_eq!(rigs[0].drain(), rigs[1].drain_in_batches(batch));
            }
            rigs.iter_mut().for_each(|rig| rig.pass_ms(train.ms));
        }
        prop_assert_eq!(rigs[0].drain(), rigs[1].drain_in_batches(batch));
        prop_assert_eq!(format!("{:?}", rigs[0].node), format!("{:?}", rigs[1].node));
    }
}

#[test]
fn damaged_packet_in_a_train_is_dropped_and_those_behind_it_are_combined() {
    let setup = Setup { children: 1, ..Setup::default() };
    let mut rig = Rig::new(setup);
    rig.put(child_addr(0), rig.up(Kind::Operation, 0, 0), &[]);
    let faults = vec![Fault::None, Fault::None, Fault::Damaged(48 * 8), Fault::None, Fault::Again];
    let train = Train {
        child: 0,
        packets: faults,
        from_elsewhere: false,
        is_marked: false,
        up_to_date: false,
        drain: false,
        ms: 0,
    };
    let packets = packets(&mut rig, &train, &mut 0, false);
    rig.node.handle_train(rig.now, child_addr(0), Ecn::Unmarked, packets.iter().map(Vec::as_slice));
    let results: Vec<u64> = rig.drain().iter().map(|sent| sent.repr.seq.0).collect();
    assert_eq!(results, [0, 1, 3]);
    assert_eq!((rig.dropped(DropReason::Malformed), rig.dropped(DropReason::Duplicate)), (1, 1));
}

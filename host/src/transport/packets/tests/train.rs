//! Trains: an endpoint that handles packets as one train is in the same state afterwards, and sends the same packets,
//! as one that handles each on its own.

use super::*;
use proptest::prelude::*;
use sumac_hal::driver::Batch;

const SHARED_KEY: u64 = 0x5ead;

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
    Shared,
    Signature,
    Window(u16),
    View,
    Again,
    Gap,
    Far,
    Shape,
    Full,
    Done,
    Missing,
    /// The group fails at a chunk to come.
    Fails(u64),
}

fn faults() -> impl Strategy<Value = Fault> {
    prop_oneof![
        24 => Just(Fault::None),
        2 => any::<u16>().prop_map(Fault::Damaged),
        1 => (0_usize..60).prop_map(Fault::Cut),
        1 => Just(Fault::Epoch),
        1 => Just(Fault::Group),
        1 => Just(Fault::Key),
        4 => Just(Fault::Shared),
        1 => Just(Fault::Signature),
        2 => (1_u16..40).prop_map(Fault::Window),
        1 => Just(Fault::View),
        2 => Just(Fault::Again),
        2 => Just(Fault::Gap),
        1 => Just(Fault::Far),
        1 => Just(Fault::Shape),
        2 => Just(Fault::Full),
        1 => Just(Fault::Done),
        1 => Just(Fault::Missing),
        1 => (0_u64..6).prop_map(Fault::Fails),
    ]
}

/// Most trains have no fault, or one: a fault early in a script often keeps what follows from being in order.
fn trains() -> impl Strategy<Value = Vec<Fault>> {
    prop_oneof![
        3 => prop::collection::vec(Just(Fault::None), 1..20),
        1 => (prop::collection::vec(Just(Fault::None), 0..12), faults()).prop_map(|(mut train, fault)| {
            train.insert(train.len() / 2, fault);
            train
        }),
        1 => prop::collection::vec(faults(), 1..20),
    ]
}

/// The operations of a test, in elements: of many chunks, of one, and with a last chunk that is shorter.
const COUNTS: [u64; 4] = [20 * CHUNK, 3, 30 * CHUNK + 5, 9 * CHUNK];

/// Return the operation that chunk `seq` belongs to, its first chunk, and the elements of chunk `seq`.
fn operation(seq: u64) -> (OpDesc, u64, u64) {
    let mut first = 0;
    for count in COUNTS {
        let end = first + count.div_ceil(CHUNK);
        if seq < end {
            return (sum(count), first, CHUNK.min(count - (seq - first) * CHUNK));
        }
        first = end;
    }
    (sum(1), first, CHUNK)
}

/// Return the packet for a chunk, with what is wrong about it.
fn packet(fault: Fault, next: &mut u64, sends_again: bool) -> Vec<u8> {
    let (desc, first, elements) = operation(*next);
    let mut repr = Repr { mark: ChunkNo(next.saturating_sub(3)), ..Rig::result_header(*next, desc, first) };
    repr.flags |= Flags::SHORT;
    let mut payload = (*next as f32).to_le_bytes().repeat(elements as usize);
    match fault {
        Fault::Epoch => repr.epoch = Epoch { term: 2, counter: 6 },
        Fault::Group => repr.group = GroupId(4),
        Fault::Key => repr.key ^= 1,
        Fault::Shared => (repr.child, repr.key) = (ChildIndex::ALL, SHARED_KEY),
        Fault::Signature => repr.signature ^= 1,
        Fault::Window(window) => repr.window = window,
        Fault::View => repr.view = 1,
        Fault::Again => repr.seq.0 = repr.seq.0.saturating_sub(1),
        Fault::Gap => repr.seq.0 += 2,
        Fault::Far => repr.seq.0 += 1000,
        Fault::Shape => payload.truncate(60),
        Fault::Full => repr.flags.remove(Flags::SHORT),
        Fault::Done => (repr.kind, repr.flags) = (Kind::Done, Flags::empty()),
        Fault::Missing | Fault::Fails(_) => (repr.kind, repr.flags) = (Kind::Nak, Flags::empty()),
        Fault::None | Fault::Damaged(_) | Fault::Cut(_) => {}
    }
    if let Fault::Fails(later) = fault {
        (repr.reason, repr.seq.0) = (Some(NakReason::PathLost), *next + later);
    } else if repr.kind == Kind::Nak {
        repr.reason = Some(NakReason::Missing);
    }
    if repr.kind != Kind::Result {
        payload.clear();
    }
    *next += match fault {
        Fault::None | Fault::Shared | Fault::Window(_) | Fault::Full => 1,
        Fault::Damaged(_) => u64::from(!sends_again),
        _ => 0,
    };
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
}

/// Return everything that can be seen of an endpoint, as text. Its packets are polled `batch` at a time, or one by one.
fn seen(rig: &mut Rig, batch: Option<usize>) -> String {
    let state = format!("{:?}", rig.endpoint);
    let events: Vec<Event> = std::iter::from_fn(|| rig.endpoint.poll_event()).collect();
    let sent = match batch {
        Some(packets_max) => packets_in_batches(rig, packets_max),
        None => rig.packets(),
    };
    format!("{state} {events:?} {sent:?} {:?} {:?}", rig.memory.0, rig.endpoint)
}

fn packets_in_batches(rig: &mut Rig, packets_max: usize) -> Vec<(Addr, Repr, Vec<u8>)> {
    let mut buffer = vec![0; 4096];
    let mut all = Vec::new();
    loop {
        let mut batch = Batch::new();
        rig.endpoint.poll_batch(rig.now, &rig.memory, packets_max, &mut batch);
        assert!(batch.len() <= packets_max);
        for sent in &batch {
            let packet = Packet::new_checked(sent.write(sent.payload, &mut buffer)).expect("valid");
            all.push((sent.to, Repr::parse(&packet).expect("of this version"), packet.payload().to_vec()));
        }
        if batch.len() < packets_max {
            return all;
        }
    }
}

proptest! {
    #[test]
    fn train_leaves_the_state_of_its_packets_one_by_one(
        script in prop::collection::vec((trains(), prop::bool::weighted(0.2), 0_u8..20), 1..12),
        sends_again in any::<bool>(),
        shards in 1_u32..3,
        shares in any::<bool>(),
        batch in 1_usize..40,
    ) {
        let config = || EndpointConfig { shared_key: shares.then_some(SHARED_KEY), ..config(32, shards) };
        let mut rigs = [Rig::with(config()), Rig::with(config())];
        for rig in &mut rigs {
            for count in COUNTS {
                rig.post(count, 1.0);
            }
        }
        prop_assert_eq!(seen(&mut rigs[0], None), seen(&mut rigs[1], Some(batch)));
        let mut next = 0;
        for (faults, is_marked, from) in script {
            let packets: Vec<Vec<u8>> = faults.iter().map(|&fault| packet(fault, &mut next, sends_again)).collect();
            let from = if from == 0 { Addr::Emu(77) } else { Addr::Emu(50 + u32::from(from) % shards) };
            let ecn = Ecn::from_mark(is_marked);
            let [one_by_one, at_once] = &mut rigs;
            let now = one_by_one.now;
            packets.iter().for_each(|packet| one_by_one.endpoint.handle(now, from, ecn, packet, &mut one_by_one.memory));
            at_once.endpoint.handle_train(now, from, ecn, packets.iter().map(Vec::as_slice), &mut at_once.memory);
            prop_assert_eq!(seen(one_by_one, None), seen(at_once, Some(batch)));
        }
    }
}

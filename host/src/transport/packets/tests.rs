//! One endpoint, packet by packet, against a leaf node played by the tests.

mod operation;
mod path;
mod sets;
mod shared;
mod straggler;
mod train;

use super::*;
use std::time::Duration;
use sumac_hal::op::{Dtype, ReduceOp};
use sumac_hal::port::Ecn;
use sumac_hal::wire::{BITMAP_SEQS, Flags, NakReason, Packet, pack_op, payload_crc};

const NODE: Addr = Addr::Emu(50);
const EPOCH: Epoch = Epoch { term: 2, counter: 7 };
const SALT: u32 = 0x5a17;
const KEY: u64 = 0x1234_5678;
/// f32 elements in a chunk.
const CHUNK: u64 = 16;

/// One buffer for each operation, input and output alike.
struct Memory(Vec<Vec<u8>>);

impl Buffers for Memory {
    fn input(&self, op: OpId) -> &[u8] {
        &self.0[op.0 as usize]
    }

    fn output(&mut self, op: OpId) -> &mut [u8] {
        &mut self.0[op.0 as usize]
    }
}

struct Rig {
    endpoint: Endpoint,
    memory: Memory,
    now: Instant,
}

fn config(window: u16, shards: u32) -> EndpointConfig {
    EndpointConfig {
        group: GroupId(3),
        epoch: EPOCH,
        rank: Rank(1),
        ranks: 4,
        child: ChildIndex(1),
        key: KEY,
        shared_key: None,
        parents: (0..shards).map(|shard| Addr::Emu(50 + shard)).collect(),
        window_max: window,
        window_start: window,
        chunk_len_bytes: CHUNK as u16 * 4,
        timers: HopTimers::DEFAULT,
        table_version: 1,
        salt: SALT,
    }
}

fn sum(count: u64) -> OpDesc {
    OpDesc::all_reduce(Dtype::F32, ReduceOp::Sum, count)
}

impl Rig {
    fn new(window: u16, shards: u32) -> Self {
        Self::with(config(window, shards))
    }

    fn with(config: EndpointConfig) -> Self {
        let endpoint = Endpoint::new(config);
        Self { endpoint, memory: Memory(Vec::new()), now: Instant::from_nanos(1_000_000) }
    }

    /// Post a sum of `count` elements, all of them `value`.
    fn post(&mut self, count: u64, value: f32) -> OpId {
        self.memory.0.push(value.to_le_bytes().repeat(count as usize));
        self.endpoint.post(sum(count), Path::Tree, None).expect("not failed")
    }

    /// Return all packets that it sends now, but descriptions of operations.
    fn drain(&mut self) -> Vec<(Addr, Repr, Vec<u8>)> {
        self.packets().into_iter().filter(|(_, repr, _)| repr.kind != Kind::Operation).collect()
    }

    /// Return all packets that it sends now.
    fn packets(&mut self) -> Vec<(Addr, Repr, Vec<u8>)> {
        let mut buffer = vec![0; 4096];
        let mut all = Vec::new();
        loop {
            let to = self.endpoint.poll_destination();
            let sent = self.endpoint.poll_transmit(self.now, &self.memory);
            assert_eq!(to, sent.as_ref().map(|sent| sent.to));
            let Some(sent) = sent else { return all };
            let packet = Packet::new_checked(sent.write(sent.payload, &mut buffer)).expect("valid");
            let repr = Repr::parse(&packet).expect("of this version");
            all.push((sent.to, repr, packet.payload().to_vec()));
        }
    }

    /// Return the packets of [`Rig::drain`] as kinds and sequence numbers.
    fn sent(&mut self) -> Vec<(Kind, u64)> {
        self.drain().iter().map(|(_, repr, _)| (repr.kind, repr.seq.0)).collect()
    }

    /// A header from the node, valid in every field.
    fn down(kind: Kind, seq: u64) -> Repr {
        Repr {
            seq: ChunkNo(seq),
            count: 1,
            token: SALT,
            window: 8,
            ..Repr::new(kind, GroupId(3), EPOCH, ChildIndex(1), KEY)
        }
    }

    fn put(&mut self, from: Addr, repr: Repr, payload: &[u8]) {
        let repr = Repr { payload_len_bytes: payload.len() as u16, ..repr };
        let mut bytes = vec![0; repr.packet_len()];
        bytes[repr.header_len()..].copy_from_slice(payload);
        repr.emit(&mut Packet::new_unchecked(&mut bytes[..]), payload_crc(payload));
        self.endpoint.handle(self.now, from, Ecn::Unmarked, &bytes, &mut self.memory);
    }

    /// The header of the result of `seq`, which belongs to an operation that begins at `first`.
    fn result_header(seq: u64, desc: OpDesc, first: u64) -> Repr {
        Repr { signature: desc.tree_signature(Path::Tree, 1, ChunkNo(first)), ..Self::down(Kind::Result, seq) }
    }

    /// The result of `seq` of the first operation arrives: `elements` times `value`.
    fn result(&mut self, seq: u64, desc: OpDesc, elements: usize, value: f32) {
        self.result_from(seq, desc, 0, elements, value);
    }

    /// The result of `seq` of an operation that begins at `first` arrives.
    fn result_from(&mut self, seq: u64, desc: OpDesc, first: u64, elements: usize, value: f32) {
        self.put(NODE, Self::result_header(seq, desc, first), &value.to_le_bytes().repeat(elements));
    }

    fn nak(&mut self, reason: NakReason, seq: u64, token: u32) {
        self.put(NODE, Repr { reason: Some(reason), token, ..Self::down(Kind::Nak, seq) }, &[]);
    }

    fn mismatch(&mut self, seq: u64, first: OpDesc, other: OpDesc) {
        let nak = Repr {
            reason: Some(NakReason::Mismatch),
            collective: Some(first.collective),
            dtype: first.dtype,
            op: first.op,
            bits: first.count,
            bits2: pack_op(&other),
            ..Self::down(Kind::Nak, seq)
        };
        self.put(NODE, nak, &[]);
    }

    fn dropped(&self) -> u64 {
        self.endpoint.stats().dropped
    }
}

#[test]
fn window_is_contiguous() {
    let mut rig = Rig::new(3, 1);
    let desc = sum(6 * CHUNK);
    rig.post(6 * CHUNK, 1.0);
    assert_eq!(rig.sent(), [(Kind::Data, 0), (Kind::Data, 1), (Kind::Data, 2)]);
    // Two answers, but none for chunk 0: fewer packets in flight do not open the window.
    rig.result(1, desc, 16, 2.0);
    rig.result(2, desc, 16, 2.0);
    assert_eq!((rig.sent(), rig.endpoint.have()), (vec![], ChunkNo(0)));
    rig.result(0, desc, 16, 2.0);
    let sent = rig.drain();
    assert_eq!(sent.iter().map(|(_, repr, _)| repr.seq.0).collect::<Vec<_>>(), [3, 4, 5]);
    assert!(sent.iter().all(|(_, repr, _)| repr.mark == ChunkNo(3) && repr.count == 1 && repr.token == SALT));
    assert!(sent.iter().all(|(to, repr, _)| *to == NODE && repr.flags.contains(Flags::WANT)));
}

#[test]
fn node_grant_shrinks_the_window_and_never_exceeds_the_maximum() {
    let mut rig = Rig::new(4, 1);
    let desc = sum(100 * CHUNK);
    rig.post(100 * CHUNK, 1.0);
    assert_eq!(rig.sent().len(), 4);
    let grant = |rig: &mut Rig, seq: u64, window: u16| {
        rig.put(NODE, Repr { window, ..Rig::result_header(seq, desc, 0) }, &[0; 64]);
        rig.sent().len()
    };
    assert_eq!(grant(&mut rig, 0, 2), 0);
    assert_eq!(grant(&mut rig, 1, 2), 0);
    assert_eq!(grant(&mut rig, 2, 2), 1);
    assert_eq!(grant(&mut rig, 3, u16::MAX), 3, "window_max, whatever the packet says");
    assert_eq!(rig.endpoint.window(), 4);
}

#[test]
fn result_lands_once_in_its_own_chunk() {
    let mut rig = Rig::new(8, 1);
    let desc = sum(2 * CHUNK + 3);
    let id = rig.post(2 * CHUNK + 3, 1.0);
    let sizes: Vec<usize> = rig.drain().iter().map(|(_, _, payload)| payload.len()).collect();
    assert_eq!(sizes, [64, 64, 12]);
    rig.result(2, desc, 3, 9.0);
    rig.result(2, desc, 3, 8.0);
    assert_eq!(rig.dropped(), 1, "the second copy");
    assert_eq!(rig.memory.0[0][..128], 1.0_f32.to_le_bytes().repeat(32), "other chunks' inputs are untouched");
    assert_eq!(rig.memory.0[0][128..], 9.0_f32.to_le_bytes().repeat(3));
    assert_eq!(rig.endpoint.poll_event(), None);
    rig.result(0, desc, 16, 9.0);
    rig.result(1, desc, 16, 9.0);
    assert_eq!((rig.endpoint.poll_event(), rig.endpoint.poll_event()), (Some(Event::Completed(id)), None));
    assert_eq!(rig.memory.0[0], 9.0_f32.to_le_bytes().repeat(35));
    assert_eq!((rig.endpoint.have(), rig.endpoint.poll_timeout()), (ChunkNo(3), None));
}

#[test]
fn foreign_and_malformed_packets_are_dropped() {
    let mut rig = Rig::new(8, 1);
    let desc = sum(CHUNK);
    rig.post(CHUNK, 1.0);
    rig.post(CHUNK, 1.0);
    let header = Rig::result_header(0, desc, 0);
    rig.put(NODE, header, &[7; 64]);
    assert_eq!(rig.dropped(), 1, "an answer to what was not sent");
    rig.drain();
    let payload = [7; 64];
    let foreign = [
        Repr { group: GroupId(4), ..header },
        Repr { epoch: Epoch { term: 2, counter: 6 }, ..header },
        Repr { child: ChildIndex(0), ..header },
        Repr { key: KEY + 1, ..header },
        Repr { signature: sum(CHUNK + 1).tree_signature(Path::Tree, 1, ChunkNo(0)), ..header },
        Repr { signature: desc.tree_signature(Path::Tree, 1, ChunkNo(1)), ..header },
        Repr { seq: ChunkNo(2), ..header },
        Repr { seq: ChunkNo(u64::MAX), ..header },
        Repr { kind: Kind::Done, ..header },
        Repr { kind: Kind::Data, ..header },
        Repr { kind: Kind::Status, ..header },
    ];
    for repr in foreign {
        rig.put(NODE, repr, &payload);
    }
    rig.put(Addr::Emu(51), header, &payload);
    rig.put(NODE, header, &payload[..60]);
    rig.put(NODE, header, &[]);
    rig.endpoint.handle(rig.now, NODE, Ecn::Unmarked, &payload, &mut rig.memory);
    assert_eq!(rig.dropped(), 1 + foreign.len() as u64 + 4);
    assert_eq!(rig.memory.0[0], 1.0_f32.to_le_bytes().repeat(16), "nothing landed");
    assert_eq!((rig.endpoint.have(), rig.endpoint.poll_event()), (ChunkNo(0), None));
    rig.put(NODE, header, &payload);
    assert_eq!(rig.endpoint.have(), ChunkNo(1));
}

#[test]
fn operations_complete_in_order_and_empty_ones_send_one_empty() {
    let mut rig = Rig::new(8, 1);
    let first = rig.post(CHUNK, 1.0);
    let between = rig.post(0, 0.0);
    let last = rig.post(CHUNK, 1.0);
    assert_eq!(rig.sent(), [(Kind::Data, 0), (Kind::Empty, 1), (Kind::Data, 2)]);
    rig.result_from(2, sum(CHUNK), 2, 16, 2.0);
    rig.put(NODE, Repr { kind: Kind::Done, ..Rig::result_header(1, sum(0), 1) }, &[]);
    assert_eq!(rig.endpoint.poll_event(), None, "not before the first");
    rig.result(0, sum(CHUNK), 16, 2.0);
    let events: Vec<Event> = std::iter::from_fn(|| rig.endpoint.poll_event()).collect();
    assert_eq!(events, [first, between, last].map(Event::Completed));
}

#[test]
fn barrier_sends_one_empty_and_awaits_one_done() {
    let mut rig = Rig::new(8, 1);
    rig.memory.0.push(Vec::new());
    let id = rig.endpoint.post(OpDesc::barrier(), Path::Tree, None).unwrap();
    let sent = rig.drain();
    assert_eq!(sent.iter().map(|(_, repr, _)| repr.kind).collect::<Vec<_>>(), [Kind::Empty]);
    let signature = OpDesc::barrier().tree_signature(Path::Tree, 1, ChunkNo(0));
    rig.put(NODE, Repr { signature, ..Rig::down(Kind::Result, 0) }, &[0; 4]);
    assert_eq!(rig.endpoint.poll_event(), None);
    rig.put(NODE, Repr { signature, ..Rig::down(Kind::Done, 0) }, &[]);
    assert_eq!(rig.endpoint.poll_event(), Some(Event::Completed(id)));
}

#[test]
fn posting_stops_at_the_operation_limit() {
    let mut rig = Rig::new(64, 1);
    let limit = loop {
        rig.memory.0.push(1.0_f32.to_le_bytes().to_vec());
        match rig.endpoint.post(sum(1), Path::Tree, None) {
            Ok(_) => {}
            Err(PostError::TooMany { limit }) => break limit,
            Err(error) => panic!("{error}"),
        }
    };
    let mut done = 0;
    while done < limit {
        for (_, seq) in rig.sent() {
            rig.result_from(seq, sum(1), seq, 1, seq as f32);
        }
        while let Some(event) = rig.endpoint.poll_event() {
            assert_eq!(event, Event::Completed(OpId(done as u64)));
            assert_eq!(rig.memory.0[done], (done as f32).to_le_bytes());
            done += 1;
        }
    }
    assert!(rig.endpoint.post(sum(1), Path::Tree, None).is_ok());
}

#[test]
fn gap_naks_after_three_later_answers() {
    let mut rig = Rig::new(8, 1);
    let desc = sum(8 * CHUNK);
    rig.post(8 * CHUNK, 1.0);
    rig.drain();
    for seq in 1..=3 {
        assert_eq!(rig.sent(), []);
        rig.result(seq, desc, 16, 2.0);
    }
    let sent = rig.drain();
    assert_eq!(
        sent.iter().map(|(_, r, _)| (r.kind, r.reason, r.seq.0)).collect::<Vec<_>>(),
        [(Kind::Nak, Some(NakReason::Missing), 0)]
    );
    rig.result(4, desc, 16, 2.0);
    assert_eq!(rig.sent(), [], "asked for once");
}

#[test]
fn payload_is_resent_only_when_the_node_reports_it_missing() {
    let mut rig = Rig::new(8, 1);
    rig.post(3 * CHUNK, 1.0);
    rig.drain();
    rig.nak(NakReason::Missing, 1, SALT ^ 1);
    assert_eq!(rig.sent(), [], "not our token");
    rig.nak(NakReason::Missing, 1, SALT);
    rig.nak(NakReason::Missing, 1, SALT);
    rig.nak(NakReason::Missing, 7, SALT);
    assert_eq!(rig.sent(), [(Kind::Data, 1)], "once, and nothing that was never sent");
    // Without answers, a header probes first; only what the Status lacks is sent again.
    rig.now = rig.endpoint.poll_timeout().expect("armed");
    rig.endpoint.handle_timeout(rig.now);
    let sent = rig.drain();
    let [(_, probe, payload)] = &sent[..] else { panic!("{sent:?}") };
    assert_eq!((probe.kind, probe.count, payload.len()), (Kind::Probe, 3, 0));
    rig.result(0, sum(3 * CHUNK), 16, 2.0);
    let status = Repr { bits: 0b011, count: BITMAP_SEQS, token: probe.token, ..Rig::down(Kind::Status, 0) };
    rig.put(NODE, status, &[]);
    rig.put(NODE, status, &[]);
    assert_eq!(rig.sent(), [(Kind::Data, 2)]);
    assert_eq!(rig.endpoint.stats().retransmits, 2);
    // A retransmission that is answered before its turn is not sent.
    rig.nak(NakReason::Missing, 2, SALT);
    rig.result(2, sum(3 * CHUNK), 16, 2.0);
    assert_eq!(rig.sent(), []);
}

#[test]
fn silent_node_is_path_lost() {
    let mut rig = Rig::new(8, 1);
    rig.now = rig.now + Duration::from_secs(100);
    rig.post(CHUNK, 1.0);
    rig.drain();
    rig.now = rig.now + Duration::from_millis(4_999);
    rig.endpoint.handle_timeout(rig.now);
    assert_eq!(rig.sent(), [(Kind::Probe, 0)], "idle time before does not count");
    rig.now = rig.now + Duration::from_millis(1);
    rig.endpoint.handle_timeout(rig.now);
    assert_eq!(rig.endpoint.poll_event(), Some(Event::Failed(EndpointError::PathLost)));
    assert_eq!((rig.endpoint.poll_event(), rig.sent(), rig.endpoint.poll_timeout()), (None, vec![], None));
    assert_eq!(rig.endpoint.post(sum(1), Path::Tree, None), Err(PostError::Failed(EndpointError::PathLost)));
}

#[test]
fn group_lost_requires_an_echo_of_our_token() {
    for reason in [NakReason::UnknownGroup, NakReason::WrongEpoch] {
        let mut rig = Rig::new(8, 1);
        rig.post(CHUNK, 1.0);
        rig.drain();
        rig.nak(reason, 0, SALT + 1);
        rig.nak(reason, 0, 0);
        assert_eq!((rig.endpoint.poll_event(), rig.dropped()), (None, 2));
        rig.nak(reason, 0, SALT);
        assert_eq!(rig.endpoint.poll_event(), Some(Event::Failed(EndpointError::GroupLost)));
    }
    // The token of an outstanding probe is ours too.
    let mut rig = Rig::new(8, 1);
    rig.post(CHUNK, 1.0);
    rig.drain();
    rig.now = rig.endpoint.poll_timeout().unwrap();
    rig.endpoint.handle_timeout(rig.now);
    let token = rig.drain()[0].1.token;
    rig.nak(NakReason::UnknownGroup, 0, token);
    assert_eq!(rig.endpoint.error(), Some(EndpointError::GroupLost));
}

#[test]
fn mismatch_names_both_operations_after_lower_chunks_land() {
    let (first, other) = (sum(9), OpDesc::barrier());
    let mut rig = Rig::new(8, 1);
    let earlier = rig.post(2 * CHUNK, 1.0);
    rig.post(4 * CHUNK, 1.0);
    rig.drain();
    // A later chunk's error arrives first, with another pair: the lowest chunk's counts.
    rig.mismatch(4, other, first);
    rig.mismatch(2, first, other);
    assert_eq!(rig.endpoint.poll_event(), None, "chunks 0 and 1 may still come");
    rig.nak(NakReason::Missing, 1, SALT);
    rig.nak(NakReason::Missing, 3, SALT);
    assert_eq!(rig.sent(), [(Kind::Data, 1)], "and others may need this rank for them, but not for the rest");
    rig.result(1, sum(2 * CHUNK), 16, 2.0);
    rig.now = rig.endpoint.poll_timeout().expect("still asking for chunk 0");
    rig.endpoint.handle_timeout(rig.now);
    assert_eq!(rig.sent(), [(Kind::Probe, 0)]);
    rig.result(0, sum(2 * CHUNK), 16, 2.0);
    let error = EndpointError::Mismatch { first, other };
    assert_eq!(rig.endpoint.poll_event(), Some(Event::Completed(earlier)));
    assert_eq!(rig.endpoint.poll_event(), Some(Event::Failed(error)));
    assert_eq!((rig.sent(), rig.endpoint.poll_timeout()), (vec![], None));
    assert_eq!(rig.memory.0[1], 1.0_f32.to_le_bytes().repeat(64), "its input is as it was");
    let text = error.to_string();
    assert!(text.contains("all_reduce f32 sum x 9") && text.contains("barrier"), "{text}");
}

/// Shards report independently: a lower chunk in another shard is still awaited.
#[test]
fn mismatch_in_one_shard_waits_for_lower_chunks_in_another() {
    let mut rig = Rig::new(64, 2);
    let desc = sum(33 * CHUNK);
    rig.post(33 * CHUNK, 1.0);
    let sent = rig.drain();
    let to = |seq: usize| sent[seq].0;
    assert_eq!((to(0), to(15), to(16), to(31), to(32)), (NODE, NODE, Addr::Emu(51), Addr::Emu(51), NODE));
    for seq in 0..16 {
        rig.result(seq, desc, 16, 2.0);
    }
    rig.mismatch(32, desc, sum(1));
    assert_eq!(rig.endpoint.poll_event(), None, "16 to 31 are in the other shard");
    for seq in 16..32 {
        rig.put(Addr::Emu(51), Rig::result_header(seq, desc, 0), &[0; 64]);
    }
    let error = EndpointError::Mismatch { first: desc, other: sum(1) };
    assert_eq!(rig.endpoint.poll_event(), Some(Event::Failed(error)));
}

#[test]
fn unsupported_and_path_lost_naks_map_to_their_errors() {
    let mut rig = Rig::new(8, 1);
    rig.post(CHUNK, 1.0);
    rig.drain();
    let nak = Repr {
        reason: Some(NakReason::Unsupported),
        collective: Some(sum(1).collective),
        bits2: pack_op(&sum(1)),
        ..Rig::down(Kind::Nak, 0)
    };
    rig.put(NODE, nak, &[]);
    assert!(matches!(rig.endpoint.error(), Some(EndpointError::Unsupported(_))));
    let mut rig = Rig::new(8, 1);
    rig.post(CHUNK, 1.0);
    rig.drain();
    rig.nak(NakReason::PathLost, 0, SALT);
    assert_eq!(rig.endpoint.error(), Some(EndpointError::PathLost));
    // On another path only the signature goes through the tree, as one Empty.
    let mut rig = Rig::new(8, 1);
    rig.memory.0.push(vec![0; 4096]);
    rig.endpoint.post(sum(1024), Path::Ring, None).unwrap();
    let sent = rig.drain();
    let [(_, repr, payload)] = &sent[..] else { panic!("{sent:?}") };
    let signature = sum(1024).tree_signature(Path::Ring, 1, ChunkNo(0));
    assert_eq!((repr.kind, repr.signature, payload.len()), (Kind::Empty, signature, 0));
}

/// A congestion mark is reported with the next contribution, once; one on a foreign packet is not.
#[test]
fn congestion_mark_is_reported_once_with_the_next_contribution() {
    let mut rig = Rig::new(1, 1);
    let desc = sum(3 * CHUNK);
    rig.post(3 * CHUNK, 1.0);
    let congested = |rig: &mut Rig| rig.drain().iter().any(|(_, repr, _)| repr.flags.contains(Flags::CONGESTED));
    assert!(!congested(&mut rig));
    let marked = |rig: &mut Rig, seq: u64, key: u64| {
        let repr = Repr { payload_len_bytes: 64, key, window: 1, ..Rig::result_header(seq, desc, 0) };
        let mut bytes = vec![0; repr.packet_len()];
        repr.emit(&mut Packet::new_unchecked(&mut bytes[..]), payload_crc(&[0; 64]));
        rig.endpoint.handle(rig.now, NODE, Ecn::Ce, &bytes, &mut rig.memory);
    };
    marked(&mut rig, 0, KEY + 1);
    assert!(!congested(&mut rig), "a foreign packet");
    marked(&mut rig, 0, KEY);
    assert!(congested(&mut rig));
    rig.result(1, desc, 16, 2.0);
    assert!(!congested(&mut rig), "once");
}

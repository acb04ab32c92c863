//! Streams compared with a plain queue of bytes, and with peers that write garbage.

use super::super::{Indices, Poisoned, StreamConsumer, StreamMemory, StreamProducer};
use core::sync::atomic::{AtomicU8, Ordering};
use proptest::prelude::*;
use std::collections::VecDeque;

/// A stream in private memory.
struct Stream {
    indices: Indices,
    bytes: Vec<AtomicU8>,
}

impl Stream {
    fn new(capacity_bytes: usize) -> Self {
        Self { indices: Indices::default(), bytes: (0..capacity_bytes).map(|_| AtomicU8::new(0)).collect() }
    }
}

impl StreamMemory for &Stream {
    fn capacity_bytes(&self) -> u32 {
        self.bytes.len() as u32
    }

    fn produced(&self) -> u32 {
        self.indices.produced()
    }

    fn set_produced(&self, produced: u32) {
        self.indices.set_produced(produced);
    }

    fn consumed(&self) -> u32 {
        self.indices.consumed()
    }

    fn set_consumed(&self, consumed: u32) {
        self.indices.set_consumed(consumed);
    }

    fn read(&self, place: u32, bytes: &mut [u8]) {
        let from = &self.bytes[place as usize..][..bytes.len()];
        bytes.iter_mut().zip(from).for_each(|(to, from)| *to = from.load(Ordering::Relaxed));
    }

    fn write(&self, place: u32, bytes: &[u8]) {
        let to = &self.bytes[place as usize..][..bytes.len()];
        to.iter().zip(bytes).for_each(|(to, from)| to.store(*from, Ordering::Relaxed));
    }
}

#[derive(Debug, Clone)]
enum Operation {
    Write(usize, usize),
    Read(usize),
    Room,
    Available,
}

fn operations() -> impl Strategy<Value = Vec<Operation>> {
    let operation = prop_oneof![
        4 => (0..40_usize, 0..40_usize).prop_map(|(head, body)| Operation::Write(head, body)),
        4 => (0..70_usize).prop_map(Operation::Read),
        1 => Just(Operation::Room),
        1 => Just(Operation::Available),
    ];
    prop::collection::vec(operation, 0..300)
}

proptest! {
    #[test]
    fn stream_behaves_like_a_bounded_queue_of_bytes(
        operations in operations(),
        capacity_log2 in 0..7_u32,
        // In half of the runs the indices wrap around.
        start in prop_oneof![Just(0), (u32::MAX - 200)..=u32::MAX],
    ) {
        let capacity = 1_usize << capacity_log2;
        let stream = Stream::new(capacity);
        stream.indices.set_produced(start);
        stream.indices.set_consumed(start);
        let mut producer = StreamProducer::starting_at(&stream, start);
        let mut consumer = StreamConsumer::starting_at(&stream, start);
        let (mut oracle, mut next) = (VecDeque::new(), 0_u8);
        // Bytes that were read, and whose places are not released.
        let mut held = 0;
        for operation in operations {
            match operation {
                Operation::Write(head, body) => {
                    let bytes: Vec<u8> = (0..head + body).map(|at| next.wrapping_add(at as u8)).collect();
                    let written = producer.write(&[&bytes[..head], &bytes[head..]]).expect("the peer is correct");
                    prop_assert_eq!(written, (head + body).min(capacity - oracle.len() - held));
                    oracle.extend(&bytes[..written]);
                    next = next.wrapping_add(written as u8);
                }
                Operation::Read(len) => {
                    let mut bytes = vec![0; len];
                    let read = consumer.read(&mut bytes).expect("the peer is correct");
                    prop_assert_eq!(read, len.min(oracle.len()));
                    for byte in &bytes[..read] {
                        prop_assert_eq!(Some(*byte), oracle.pop_front());
                    }
                    held = stream.indices.produced().wrapping_sub(stream.indices.consumed()) as usize - oracle.len();
                    prop_assert!(held < (capacity / 4).max(1), "{held} of {capacity} places are held back");
                    prop_assert!(!oracle.is_empty() || held == 0, "an empty stream holds nothing back");
                }
                Operation::Room => {
                    prop_assert_eq!(producer.room_bytes(), Ok((capacity - oracle.len() - held) as u32));
                }
                Operation::Available => prop_assert_eq!(consumer.available_bytes(), Ok(oracle.len() as u32)),
            }
        }
    }

    #[test]
    fn garbage_indices_poison_an_end_and_move_no_byte(
        written in any::<u32>(),
        start in any::<u32>(),
        is_producer in any::<bool>(),
    ) {
        let stream = Stream::new(64);
        stream.indices.set_produced(start.wrapping_add(32));
        stream.indices.set_consumed(start);
        let mut bytes = [0; 64];
        let (moved, limit) = if is_producer {
            let mut producer = StreamProducer::starting_at(&stream, start);
            prop_assert_eq!(producer.write(&[&bytes[..32]]), Ok(32));
            stream.indices.set_consumed(written);
            (producer.write(&[&bytes]), start.wrapping_add(32))
        } else {
            let mut consumer = StreamConsumer::starting_at(&stream, start);
            stream.indices.set_produced(written);
            (consumer.read(&mut bytes), start.wrapping_add(64))
        };
        let is_valid = written.wrapping_sub(start) <= limit.wrapping_sub(start);
        let poisoned = Err(Poisoned { from: start, to: written, limit });
        prop_assert!(if is_valid { moved.is_ok_and(|len| len <= 64) } else { moved == poisoned }, "{moved:?}");
    }
}

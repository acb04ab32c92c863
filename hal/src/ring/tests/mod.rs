//! Rings compared with a plain queue, with peers that write garbage, and under every interleaving.

mod interleavings;
mod streams;

use super::{CAPACITY_MAX, Consumer, Indices, Memory, Poisoned, Producer, RingError, SharedRing};
use core::sync::atomic::AtomicU64;
use proptest::prelude::*;
use std::collections::VecDeque;

fn words(count: usize) -> Vec<AtomicU64> {
    (0..count).map(|_| AtomicU64::new(0)).collect()
}

#[derive(Debug, Clone)]
enum Operation {
    Push(usize),
    Pop(usize),
    Room,
    Available,
}

fn operations() -> impl Strategy<Value = Vec<Operation>> {
    let operation = prop_oneof![
        4 => (0..12_usize).prop_map(Operation::Push),
        4 => (0..12_usize).prop_map(Operation::Pop),
        1 => Just(Operation::Room),
        1 => Just(Operation::Available),
    ];
    prop::collection::vec(operation, 0..200)
}

proptest! {
    #[test]
    fn ring_behaves_like_a_bounded_queue(
        operations in operations(),
        capacity_log2 in 0..4_u32,
        // In half of the runs the indices wrap around.
        start in prop_oneof![Just(0), (u32::MAX - 100)..=u32::MAX],
    ) {
        let capacity = 1_usize << capacity_log2;
        let (indices, entries) = (Indices::default(), words(3 * capacity));
        let ring = SharedRing::<3>::new(&indices, &entries).expect("a power of two");
        ring.set_produced(start);
        ring.set_consumed(start);
        let mut producer = Producer::starting_at(ring, start);
        let mut consumer = Consumer::starting_at(ring, start);
        let mut oracle = VecDeque::new();
        let mut next = 0;
        for operation in operations {
            match operation {
                Operation::Push(count) => {
                    let batch: Vec<_> = (next..).take(count).map(|n| [n, !n, n * 7]).collect();
                    let pushed = producer.push_batch(&batch).expect("the peer is correct");
                    prop_assert_eq!(pushed, count.min(capacity - oracle.len()));
                    oracle.extend(&batch[..pushed]);
                    next += pushed as u64;
                }
                Operation::Pop(count) => {
                    let mut batch = vec![[0; 3]; count];
                    let popped = consumer.pop_batch(&mut batch).expect("the peer is correct");
                    // A call may take only the entries that it already knew of, but at least one if any is ready.
                    prop_assert!(popped <= count.min(oracle.len()));
                    prop_assert_eq!(popped == 0, count == 0 || oracle.is_empty());
                    for entry in &batch[..popped] {
                        prop_assert_eq!(Some(*entry), oracle.pop_front());
                    }
                }
                Operation::Room => prop_assert_eq!(producer.room(), Ok((capacity - oracle.len()) as u32)),
                Operation::Available => prop_assert_eq!(consumer.available(), Ok(oracle.len() as u32)),
            }
        }
    }

    #[test]
    fn garbage_from_the_peer_poisons_permanently_and_does_not_panic(
        garbage in prop::collection::vec((any::<u32>(), any::<u32>(), any::<u64>()), 1..50),
        small in any::<bool>(),
    ) {
        let (indices, entries) = (Indices::default(), words(2 * 8));
        let ring = SharedRing::<2>::new(&indices, &entries).expect("a power of two");
        let mut producer = Producer::new(ring);
        let mut consumer = Consumer::new(ring);
        let mut ends = [None; 2];
        for (produced, consumed, word) in garbage {
            // Small numbers are often plausible indices.
            let mask = if small { 15 } else { u32::MAX };
            ring.set_produced(produced & mask);
            ring.set_consumed(consumed & mask);
            ring.write(produced & 7, &[word, !word]);
            for (end, result) in [
                (0, producer.push_batch(&[[1, 2], [3, 4]]).map(|moved| moved as u32)),
                (0, producer.room()),
                (1, consumer.pop_batch(&mut [[0; 2]; 3]).map(|moved| moved as u32)),
                (1, consumer.available()),
            ] {
                match (ends[end], result) {
                    (Some(first), result) => prop_assert_eq!(result, Err(first), "poison is permanent"),
                    (None, Ok(moved)) => prop_assert!(moved <= 8),
                    (None, Err(poisoned)) => ends[end] = Some(poisoned),
                }
            }
        }
    }
}

#[test]
fn index_beyond_the_capacity_or_backwards_poisons() {
    let (indices, entries) = (Indices::default(), words(4));
    let ring = SharedRing::<1>::new(&indices, &entries).expect("a power of two");
    let mut consumer = Consumer::new(ring);
    ring.set_produced(5);
    assert_eq!(consumer.pop(), Err(Poisoned { from: 0, to: 5, limit: 4 }));

    let mut producer = Producer::new(ring);
    assert_eq!(producer.push_batch(&[[1], [2], [3]]), Ok(3));
    ring.set_consumed(2);
    assert_eq!(producer.room(), Ok(3));
    ring.set_consumed(1);
    assert_eq!(producer.room(), Err(Poisoned { from: 2, to: 1, limit: 3 }));
    assert_eq!(producer.push(&[4]), Err(Poisoned { from: 2, to: 1, limit: 3 }), "even if room was known before");
}

#[test]
fn ring_capacity_must_be_a_power_of_two_of_whole_entries() {
    let indices = Indices::default();
    for count in [0, 1, 3, 6, 9] {
        let entries = words(count);
        let error = RingError::Capacity { words: count, entry_words: 2 };
        assert_eq!(SharedRing::<2>::new(&indices, &entries).err(), Some(error));
    }
    let entries = words(2 * CAPACITY_MAX as usize);
    assert!(SharedRing::<1>::new(&indices, &entries).is_err());
    assert!(SharedRing::<2>::new(&indices, &entries).is_ok());
}

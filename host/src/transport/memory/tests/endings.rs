//! Ends of groups with chunks in flight: nothing is written afterwards, and each chunk is old or new.

use super::device::{Behaviour, CHUNK, attach, start};
use super::driver::{Lent, all_reduce, drive, post};
use crate::transport::memory::Breach;
use crate::transport::memory::driver::ReferenceDriver;
use crate::transport::memory::memory::Buffer;
use crate::transport::memory::retire::Fence;
use crate::transport::packets::EndpointError;
use std::time::Duration;
use sumac_hal::ids::{ChunkNo, Epoch};
use sumac_hal::mmio::{CompletionEntry, EntryStatus};

const PER_CHUNK: usize = CHUNK as usize / 4;
const CHUNKS: usize = 7;

/// A rank with an all-reduce of some chunks in its registered memory, all of them submitted.
fn in_flight(name: &str) -> (ReferenceDriver, Buffer<f32>) {
    let mut driver = attach(name, 0, 1);
    let mut buffer = driver.alloc::<f32>(CHUNKS * PER_CHUNK).expect("memory");
    buffer.fill(3.0);
    let mut lent = Lent::InPlace(bytemuck::cast_slice_mut(&mut buffer));
    post(&mut driver, all_reduce(CHUNKS * PER_CHUNK), &mut lent);
    driver.pump(&mut lent);
    (driver, buffer)
}

/// Let the device have its turns.
fn pause() {
    std::thread::sleep(Duration::from_millis(50));
}

#[test]
fn a_device_that_is_there_is_fenced() {
    let (name, device) = start(1, Behaviour::Holds);
    let (mut driver, buffer) = in_flight(&name);
    assert_eq!(driver.fence(), Fence::Confirmed);
    assert_eq!(driver.pump(&mut Lent::InPlace(&mut [])), None);
    driver.retire();
    assert!(buffer.iter().all(|&value| value == 3.0));
    assert!(driver.post(all_reduce(1), sumac_hal::op::Path::Tree, Default::default()).is_err());
    drop(driver);
    assert_eq!(device.join().expect("no panic").fences, 1, "a fence holds");
}

#[test]
fn a_group_with_nothing_in_flight_needs_no_fence() {
    let (name, device) = start(1, Behaviour::Honest);
    drop(attach(&name, 0, 1));
    assert_eq!(device.join().expect("no panic").fences, 0);
}

#[test]
fn dropping_a_driver_with_operations_in_flight_fences() {
    let (name, device) = start(1, Behaviour::Holds);
    let (driver, mut buffer) = in_flight(&name);
    drop(driver);
    buffer.fill(1.0);
    drop(buffer);
    assert_eq!(device.join().expect("no panic").fences, 1);
}

#[test]
fn a_silent_device_keeps_writing_to_memory_that_is_nobodys_any_more() {
    let (name, device) = start(1, Behaviour::Zombie);
    let (mut driver, mut buffer) = in_flight(&name);
    pause();
    assert!(buffer[0] != 3.0, "it writes");
    assert_eq!(driver.fence(), Fence::Severed);
    buffer.fill(5.0);
    pause();
    assert!(buffer.iter().all(|&value| value == 5.0), "it writes elsewhere");
    // Nothing of it was ever published.
    driver.retire();
    assert!(buffer.iter().all(|&value| value == 5.0));
    drop(driver);
    drop(device.join());
}

#[test]
fn a_device_that_dies_leaves_chunks_wholly_old_or_wholly_new() {
    let (name, device) = start(2, Behaviour::Dies(CHUNKS as u64));
    let rank = |rank: u32| {
        let mut driver = attach(&name, rank, 2);
        let mut buffer = driver.alloc::<f32>(CHUNKS * PER_CHUNK).expect("memory");
        buffer.fill(3.0 + rank as f32);
        let mut lent = Lent::InPlace(bytemuck::cast_slice_mut(&mut buffer));
        let (op, _) = post(&mut driver, all_reduce(CHUNKS * PER_CHUNK), &mut lent);
        assert_eq!(drive(&mut driver, op, &mut lent), Err(EndpointError::DeviceLost));
        assert_eq!(driver.fence(), Fence::Ended);
        driver.retire();
        for (seq, chunk) in buffer.chunks(PER_CHUNK).enumerate() {
            let expected = if seq % 2 == 0 { 7.0 } else { 3.0 + rank as f32 };
            assert!(chunk.iter().all(|&value| value == expected), "rank {rank}, chunk {seq}: {chunk:?}");
        }
    };
    std::thread::scope(|scope| {
        (0..2).for_each(|number| _ = scope.spawn(move || rank(number)));
    });
    drop(device.join());
}

/// An error may stand for a result that is published and half-written, on a device that lives as on one that is dead.
#[test]
fn a_device_that_fails_to_write_leaves_chunks_wholly_old_or_wholly_new() {
    let (name, device) = start(1, Behaviour::Breaks);
    let (mut driver, mut buffer) = in_flight(&name);
    let mut lent = Lent::InPlace(bytemuck::cast_slice_mut(&mut buffer));
    let found = drive(&mut driver, crate::transport::packets::OpId(0), &mut lent);
    assert_eq!(found, Err(EndpointError::Device { status: EntryStatus::Hardware, chunk: ChunkNo(0) }));
    driver.retire();
    // With one rank the result is the input: what was torn is whole again.
    assert!(buffer.iter().all(|&value| value == 3.0), "{:?}", &buffer[..PER_CHUNK]);
    drop(driver);
    assert_eq!(device.join().expect("no panic").fences, 1);
}

/// What others have made of a chunk is in its redo slot, and is none of who has left.
#[test]
fn who_is_left_out_looks_up_nothing_that_it_has_no_part_in() {
    let (name, device) = start(1, Behaviour::LeavesOut);
    let (mut driver, mut buffer) = in_flight(&name);
    let mut lent = Lent::InPlace(bytemuck::cast_slice_mut(&mut buffer));
    assert_eq!(drive(&mut driver, crate::transport::packets::OpId(0), &mut lent), Err(EndpointError::Excluded));
    driver.salvage(&mut lent);
    assert!(buffer.iter().all(|&value| value == 3.0), "{:?}", &buffer[..PER_CHUNK]);
    drop(driver);
    assert_eq!(device.join().expect("no panic").fences, 1);
}

/// Bounced memory is written by this side alone: what has not been copied out stays as it was.
#[test]
fn a_device_that_dies_leaves_bounced_memory_alone() {
    let (name, device) = start(1, Behaviour::Dies(1));
    let mut driver = attach(&name, 0, 1);
    let mut values = vec![3_f32; 2 * PER_CHUNK];
    let mut lent = Lent::InPlace(bytemuck::cast_slice_mut(&mut values));
    let (op, _) = post(&mut driver, all_reduce(2 * PER_CHUNK), &mut lent);
    assert_eq!(drive(&mut driver, op, &mut lent), Err(EndpointError::DeviceLost));
    driver.retire();
    assert!(values.iter().all(|&value| value == 3.0));
    drop(device.join());
}

#[test]
fn a_device_that_talks_nonsense_is_not_believed_and_fenced() {
    let answer = |seq, count| CompletionEntry::Answer {
        status: EntryStatus::Result,
        group: super::GROUP,
        epoch: Epoch { term: 1, counter: 2 },
        seq: ChunkNo(seq),
        count,
        window: 1,
        stable: ChunkNo(0),
        slowest: None,
    };
    let unasked = |first, count| Breach::Unasked { first: ChunkNo(first), count };
    let cases = [
        (answer(CHUNKS as u64, 1).emit(), unasked(CHUNKS as u64, 1)),
        (answer(0, u16::MAX).emit(), unasked(0, u16::MAX)),
        ([0x77, 0, 0, 0], Breach::Entry(sumac_hal::mmio::EntryError::Opcode(0x77))),
    ];
    for (words, breach) in cases {
        let (name, device) = start(1, Behaviour::Says(words));
        let (mut driver, mut buffer) = in_flight(&name);
        let mut lent = Lent::InPlace(bytemuck::cast_slice_mut(&mut buffer));
        let found = drive(&mut driver, crate::transport::packets::OpId(0), &mut lent);
        assert_eq!(found, Err(EndpointError::Broken(breach)));
        driver.retire();
        drop(driver);
        assert_eq!(device.join().expect("no panic").fences, 1);
    }
}

//! Ending groups with chunks in flight: nothing is written afterwards, and each chunk is wholly old or new.

use super::device::{Behaviour, CHUNK, attach, start};
use super::driver::{BorrowedBuffers, all_reduce, drive, post};
use crate::transport::memory::Buffer;
use crate::transport::memory::ProtocolViolation;
use crate::transport::memory::driver::ZeroCopyDriver;
use crate::transport::memory::retire::Fence;
use crate::transport::packets::EndpointError;
use std::time::Duration;
use sumac_hal::ids::{ChunkNo, Epoch};
use sumac_hal::mmio::{CompletionEntry, EntryStatus};

const PER_CHUNK: usize = CHUNK as usize / 4;
const CHUNKS: usize = 7;

/// A rank with an all-reduce of several chunks in registered memory, fully submitted.
fn in_flight(name: &str) -> (ZeroCopyDriver, Buffer<f32>) {
    let mut driver = attach(name, 0, 1);
    let mut buffer = driver.alloc::<f32>(CHUNKS * PER_CHUNK).expect("memory");
    buffer.fill(3.0);
    let mut buffers = BorrowedBuffers::InPlace(bytemuck::cast_slice_mut(&mut buffer));
    post(&mut driver, all_reduce(CHUNKS * PER_CHUNK), &mut buffers);
    driver.pump(&mut buffers);
    (driver, buffer)
}

/// Give the device time to act.
fn pause() {
    std::thread::sleep(Duration::from_millis(50));
}

#[test]
fn live_device_confirms_the_fence() {
    let (name, device) = start(1, Behaviour::IgnoreData);
    let (mut driver, buffer) = in_flight(&name);
    assert_eq!(driver.fence(), Fence::Confirmed);
    assert_eq!(driver.pump(&mut BorrowedBuffers::InPlace(&mut [])), None);
    driver.retire();
    assert!(buffer.iter().all(|&value| value == 3.0));
    assert!(driver.post(all_reduce(1), sumac_hal::op::Path::Tree, None, Default::default()).is_err());
    drop(driver);
    assert_eq!(device.join().expect("no panic").fences, 1, "a fence holds");
}

#[test]
fn idle_group_needs_no_fence() {
    let (name, device) = start(1, Behaviour::Honest);
    drop(attach(&name, 0, 1));
    assert_eq!(device.join().expect("no panic").fences, 0);
}

#[test]
fn dropping_a_driver_with_operations_in_flight_fences() {
    let (name, device) = start(1, Behaviour::IgnoreData);
    let (driver, mut buffer) = in_flight(&name);
    drop(driver);
    buffer.fill(1.0);
    drop(buffer);
    assert_eq!(device.join().expect("no panic").fences, 1);
}

#[test]
fn silent_device_loses_access_to_caller_memory() {
    let (name, device) = start(1, Behaviour::Zombie);
    let (mut driver, mut buffer) = in_flight(&name);
    pause();
    assert!(buffer[0] != 3.0, "it writes");
    assert_eq!(driver.fence(), Fence::Severed);
    buffer.fill(5.0);
    pause();
    assert!(buffer.iter().all(|&value| value == 5.0), "it writes elsewhere");
    // None of it was ever published.
    driver.retire();
    assert!(buffer.iter().all(|&value| value == 5.0));
    drop(driver);
    drop(device.join());
}

#[test]
fn dead_device_leaves_each_chunk_wholly_old_or_new() {
    let (name, device) = start(2, Behaviour::Dying(CHUNKS as u64));
    let rank = |rank: u32| {
        let mut driver = attach(&name, rank, 2);
        let mut buffer = driver.alloc::<f32>(CHUNKS * PER_CHUNK).expect("memory");
        buffer.fill(3.0 + rank as f32);
        let mut buffers = BorrowedBuffers::InPlace(bytemuck::cast_slice_mut(&mut buffer));
        let (op, _) = post(&mut driver, all_reduce(CHUNKS * PER_CHUNK), &mut buffers);
        assert_eq!(drive(&mut driver, op, &mut buffers), Err(EndpointError::DeviceLost));
        assert_eq!(driver.fence(), Fence::ProcessExited);
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

/// An error answer may stand for a result that is published and half-written, on a live device as on a dead one.
#[test]
fn failed_write_leaves_each_chunk_wholly_old_or_new() {
    let (name, device) = start(1, Behaviour::FailingWrites);
    let (mut driver, mut buffer) = in_flight(&name);
    let mut buffers = BorrowedBuffers::InPlace(bytemuck::cast_slice_mut(&mut buffer));
    let found = drive(&mut driver, crate::transport::packets::OpId(0), &mut buffers);
    assert_eq!(found, Err(EndpointError::Device { status: EntryStatus::Hardware, chunk: ChunkNo(0) }));
    driver.retire();
    // With one rank the result equals the input: torn chunks are whole again.
    assert!(buffer.iter().all(|&value| value == 3.0), "{:?}", &buffer[..PER_CHUNK]);
    drop(driver);
    assert_eq!(device.join().expect("no panic").fences, 1);
}

/// Results of the other ranks are in redo slots, and do not belong to an excluded rank.
#[test]
fn excluded_rank_salvages_no_results_of_others() {
    let (name, device) = start(1, Behaviour::Excluding);
    let (mut driver, mut buffer) = in_flight(&name);
    let mut buffers = BorrowedBuffers::InPlace(bytemuck::cast_slice_mut(&mut buffer));
    assert_eq!(drive(&mut driver, crate::transport::packets::OpId(0), &mut buffers), Err(EndpointError::Excluded));
    driver.salvage(&mut buffers);
    assert!(buffer.iter().all(|&value| value == 3.0), "{:?}", &buffer[..PER_CHUNK]);
    drop(driver);
    assert_eq!(device.join().expect("no panic").fences, 1);
}

/// Bounced memory is written by this side only: what has not been copied out is unchanged.
#[test]
fn dead_device_leaves_bounced_memory_untouched() {
    let (name, device) = start(1, Behaviour::Dying(1));
    let mut driver = attach(&name, 0, 1);
    let mut values = vec![3_f32; 2 * PER_CHUNK];
    let mut buffers = BorrowedBuffers::InPlace(bytemuck::cast_slice_mut(&mut values));
    let (op, _) = post(&mut driver, all_reduce(2 * PER_CHUNK), &mut buffers);
    assert_eq!(drive(&mut driver, op, &mut buffers), Err(EndpointError::DeviceLost));
    driver.retire();
    assert!(values.iter().all(|&value| value == 3.0));
    drop(device.join());
}

#[test]
fn invalid_answers_end_the_group_and_are_fenced() {
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
    let unsolicited = |first, count| ProtocolViolation::Unsolicited { first: ChunkNo(first), count };
    let cases = [
        (answer(CHUNKS as u64, 1).emit(), unsolicited(CHUNKS as u64, 1)),
        (answer(0, u16::MAX).emit(), unsolicited(0, u16::MAX)),
        ([0x77, 0, 0, 0], ProtocolViolation::Entry(sumac_hal::mmio::EntryError::Opcode(0x77))),
    ];
    for (words, violation) in cases {
        let (name, device) = start(1, Behaviour::Answers(words));
        let (mut driver, mut buffer) = in_flight(&name);
        let mut buffers = BorrowedBuffers::InPlace(bytemuck::cast_slice_mut(&mut buffer));
        let found = drive(&mut driver, crate::transport::packets::OpId(0), &mut buffers);
        assert_eq!(found, Err(EndpointError::Protocol(violation)));
        driver.retire();
        drop(driver);
        assert_eq!(device.join().expect("no panic").fences, 1);
    }
}

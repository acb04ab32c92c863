//! Staging through pinned host memory.

use super::{ROOM, long_deadline};
use crate::gpu::{FakeGpu, Gpu, GpuError, Staging};
use std::time::Instant;

#[test]
fn buffer_is_staged_in_chunks() {
    for seed in 0..20 {
        let gpu = FakeGpu::new(seed, ROOM);
        let mut staging = Staging::new(&gpu, 64).expect("room");
        let bytes: Vec<u8> = (0..1000).map(|index| (index * 7) as u8).collect();
        let memory = gpu.upload_now(&bytes).expect("room");
        let ready = gpu.event().expect("an event");
        let mut lens = Vec::new();
        let doubled = staging.run(&gpu, &memory, &ready, long_deadline(), |chunk| {
            lens.push(chunk.len());
            chunk.iter_mut().for_each(|byte| *byte = byte.wrapping_add(1));
            Ok::<_, GpuError>(())
        });
        doubled.expect("through");
        assert_eq!((lens.len(), lens[0], lens[15]), (16, 64, 40));
        let wanted: Vec<u8> = bytes.iter().map(|byte| byte.wrapping_add(1)).collect();
        assert_eq!(gpu.download_now(&memory), wanted, "seed {seed}");
        // An error leaves whole chunks.
        let mut left = 5;
        let failed = staging.run(&gpu, &memory, &ready, long_deadline(), |chunk| {
            chunk.fill(0);
            left -= 1;
            if left == 0 { Err(GpuError::Cancelled) } else { Ok(()) }
        });
        assert_eq!(failed, Err(GpuError::Cancelled));
        let after = gpu.download_now(&memory);
        assert!(after[..256].iter().all(|&byte| byte == 0));
        assert_eq!(after[256..], wanted[256..], "seed {seed}");
    }
}

#[test]
fn missing_chunk_fails_at_the_deadline() {
    let gpu = FakeGpu::new(2, ROOM);
    let mut staging = Staging::new(&gpu, 64).expect("room");
    let memory = gpu.alloc(100).expect("room");
    let (producer, produced) = (gpu.stream().expect("a stream"), gpu.event().expect("an event"));
    let gate = gpu.gate(&producer);
    gpu.record(&produced, &producer).expect("recorded");
    let late = staging.run(&gpu, &memory, &produced, Instant::now(), |_| Ok::<_, GpuError>(()));
    assert_eq!(late, Err(GpuError::Deadline));
    gate.open();
    staging.run(&gpu, &memory, &produced, long_deadline(), |_| Ok::<_, GpuError>(())).expect("through");
}

//! Through pinned memory of the process.

use super::{ROOM, far};
use crate::gpu::{Double, Gpu, GpuError, Staging};
use std::time::Instant;

#[test]
fn a_buffer_goes_through_the_host_in_chunks() {
    for seed in 0..20 {
        let gpu = Double::new(seed, ROOM);
        let mut staging = Staging::new(&gpu, 64).expect("room");
        let bytes: Vec<u8> = (0..1000).map(|index| (index * 7) as u8).collect();
        let memory = gpu.upload_now(&bytes).expect("room");
        let ready = gpu.event().expect("an event");
        let mut lens = Vec::new();
        let doubled = staging.run(&gpu, &memory, &ready, far(), |chunk| {
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
        let failed = staging.run(&gpu, &memory, &ready, far(), |chunk| {
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
fn a_chunk_that_does_not_come_passes_the_deadline() {
    let gpu = Double::new(2, ROOM);
    let mut staging = Staging::new(&gpu, 64).expect("room");
    let memory = gpu.alloc(100).expect("room");
    let (producer, produced) = (gpu.stream().expect("a stream"), gpu.event().expect("an event"));
    let gate = gpu.gate(&producer);
    gpu.record(&produced, &producer).expect("recorded");
    let late = staging.run(&gpu, &memory, &produced, Instant::now(), |_| Ok::<_, GpuError>(()));
    assert_eq!(late, Err(GpuError::Deadline));
    gate.open();
    staging.run(&gpu, &memory, &produced, far(), |_| Ok::<_, GpuError>(())).expect("through");
}

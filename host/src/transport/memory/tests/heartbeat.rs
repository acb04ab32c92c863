//! A device whose connection is open and whose runtime has stopped, as if suspended.

use super::device::{Behaviour, CHUNK, attach, start};
use super::driver::{BorrowedBuffers, all_reduce, drive, post};
use crate::transport::memory::RegisterError;
use crate::transport::memory::heartbeat::CHECK_GAP_MAX;
use crate::transport::memory::retire::Fence;
use crate::transport::packets::EndpointError;
use std::time::{Duration, Instant};
use sumac_hal::uplink::HopTimers;

const COUNT: usize = CHUNK as usize;

/// Slack for a busy machine: less than the limit for a registration.
const SLACK: Duration = Duration::from_millis(4500);

/// Less than the limit for a fence.
const AT_ONCE: Duration = Duration::from_millis(900);

fn expect_noticed(begun: Instant) {
    let (took, dead) = (begun.elapsed(), HopTimers::DEFAULT.dead);
    // The time since the last check before the wait counts, up to a limit.
    assert!((dead - CHECK_GAP_MAX..dead + SLACK).contains(&took), "{took:?}");
}

#[test]
fn stalled_device_fails_operations_and_is_severed_without_a_fence() {
    let (name, device) = start(1, Behaviour::Stalled(2));
    let mut driver = attach(&name, 0, 1);
    let mut buffer = driver.alloc::<f32>(COUNT).expect("not stalled yet");
    buffer.fill(3.0);
    let mut buffers = BorrowedBuffers::InPlace(bytemuck::cast_slice_mut(&mut buffer));
    let (op, _) = post(&mut driver, all_reduce(COUNT), &mut buffers);
    let begun = Instant::now();
    assert_eq!(drive(&mut driver, op, &mut buffers), Err(EndpointError::PathLost));
    expect_noticed(begun);
    let begun = Instant::now();
    assert_eq!(driver.fence(), Fence::Severed);
    assert!(begun.elapsed() < AT_ONCE, "no wait for a fence: {:?}", begun.elapsed());
    driver.retire();
    drop(driver);
    assert!(buffer.iter().all(|&value| value == 3.0));
    drop(device.join());
}

#[test]
fn registration_on_a_stalled_device_fails_at_the_heartbeat_limit() {
    let (name, device) = start(1, Behaviour::Stalled(1));
    let mut driver = attach(&name, 0, 1);
    let begun = Instant::now();
    assert_eq!(driver.alloc::<f32>(COUNT).expect_err("it has stopped"), RegisterError::DeviceLost);
    expect_noticed(begun);
    assert_eq!(driver.error(), Some(EndpointError::PathLost));
    let begun = Instant::now();
    assert_eq!(driver.alloc::<f32>(COUNT).expect_err("known to have stopped"), RegisterError::DeviceLost);
    assert!(begun.elapsed() < AT_ONCE, "{:?}", begun.elapsed());
    drop(driver);
    drop(device.join());
}

//! A device whose connection is open and whose runtime stands still, as one that is stopped.

use super::device::{Behaviour, CHUNK, attach, start};
use super::driver::{Lent, all_reduce, drive, post};
use crate::transport::memory::RegisterError;
use crate::transport::memory::pulse::GAP_MAX;
use crate::transport::memory::retire::Fence;
use crate::transport::packets::EndpointError;
use std::time::{Duration, Instant};
use sumac_hal::uplink::HopTimers;

const COUNT: usize = CHUNK as usize;

/// What a machine may take that does something else: less than what registering may take.
const SLACK: Duration = Duration::from_millis(4500);

/// Less than a fence may take.
const AT_ONCE: Duration = Duration::from_millis(900);

fn expect_noticed(begun: Instant) {
    let (took, dead) = (begun.elapsed(), HopTimers::DEFAULT.dead);
    // The time since the last look before the wait counts, up to a limit.
    assert!((dead - GAP_MAX..dead + SLACK).contains(&took), "{took:?}");
}

#[test]
fn operations_end_at_the_limit_for_silence_and_the_memory_is_taken_away_at_once() {
    let (name, device) = start(1, Behaviour::Stands(2));
    let mut driver = attach(&name, 0, 1);
    let mut buffer = driver.alloc::<f32>(COUNT).expect("it goes still");
    buffer.fill(3.0);
    let mut lent = Lent::InPlace(bytemuck::cast_slice_mut(&mut buffer));
    let (op, _) = post(&mut driver, all_reduce(COUNT), &mut lent);
    let begun = Instant::now();
    assert_eq!(drive(&mut driver, op, &mut lent), Err(EndpointError::PathLost));
    expect_noticed(begun);
    let begun = Instant::now();
    assert_eq!(driver.fence(), Fence::Severed);
    assert!(begun.elapsed() < AT_ONCE, "nobody waits for its word: {:?}", begun.elapsed());
    driver.retire();
    drop(driver);
    assert!(buffer.iter().all(|&value| value == 3.0));
    drop(device.join());
}

#[test]
fn memory_is_not_waited_for_longer_than_a_device_may_be_silent() {
    let (name, device) = start(1, Behaviour::Stands(1));
    let mut driver = attach(&name, 0, 1);
    let begun = Instant::now();
    assert_eq!(driver.alloc::<f32>(COUNT).expect_err("it stands still"), RegisterError::Gone);
    expect_noticed(begun);
    assert_eq!(driver.error(), Some(EndpointError::PathLost));
    let begun = Instant::now();
    assert_eq!(driver.alloc::<f32>(COUNT).expect_err("it is known to stand still"), RegisterError::Gone);
    assert!(begun.elapsed() < AT_ONCE, "{:?}", begun.elapsed());
    drop(driver);
    drop(device.join());
}

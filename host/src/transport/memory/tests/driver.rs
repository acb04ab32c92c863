//! The driver on an honest device, and devices that refuse or fail to attach.

use super::device::{Behaviour, CHUNK, attach, params, start};
use crate::transport::memory::driver::ZeroCopyDriver;
use crate::transport::memory::{AttachError, Places, ProtocolViolation, RegisterError, Transfer};
use crate::transport::packets::{Buffers, EndpointError, Event, OpId};
use std::time::{Duration, Instant};
use sumac_hal::dma::RegionKey;
use sumac_hal::mmio::{EntryStatus, Features};
use sumac_hal::op::{Dtype, OpDesc, Path, ReduceOp};
use sumac_hal::shm::AttachRefusal;

const LONG: Duration = Duration::from_secs(30);

/// The buffers of one operation.
pub(super) enum BorrowedBuffers<'b> {
    InPlace(&'b mut [u8]),
    Separate(&'b [u8], &'b mut [u8]),
}

impl Buffers for BorrowedBuffers<'_> {
    fn input(&self, _: OpId) -> &[u8] {
        match self {
            Self::InPlace(buffer) => buffer,
            Self::Separate(input, _) => input,
        }
    }

    fn output(&mut self, _: OpId) -> &mut [u8] {
        match self {
            Self::InPlace(buffer) => buffer,
            Self::Separate(_, output) => output,
        }
    }
}

pub(super) fn post(driver: &mut ZeroCopyDriver, desc: OpDesc, buffers: &mut BorrowedBuffers<'_>) -> (OpId, Transfer) {
    let (input, input_len) = (driver.place(buffers.input(OpId(0)), &desc), buffers.input(OpId(0)).len());
    let (output, output_len) = (driver.place(buffers.output(OpId(0)), &desc), buffers.output(OpId(0)).len());
    let writable = driver.whole_pages(buffers.output(OpId(0)));
    let places = Places { input, output, writable };
    let transfer = driver.transfer(&places, input_len, output_len);
    (driver.post(desc, Path::Tree, None, places).expect("room"), transfer)
}

/// Drive an operation to completion or failure.
pub(super) fn drive(
    driver: &mut ZeroCopyDriver,
    op: OpId,
    buffers: &mut BorrowedBuffers<'_>,
) -> Result<(), EndpointError> {
    let deadline = Instant::now() + LONG;
    loop {
        let next = driver.pump(buffers);
        match driver.poll_event() {
            Some(Event::Completed(done)) if done == op => return Ok(()),
            Some(Event::Failed(error)) => return Err(error),
            Some(other) => panic!("{other:?}"),
            None => {}
        }
        assert!(Instant::now() < deadline, "stuck: {driver:?}");
        if next.is_none() {
            driver.wait(Some(LONG));
        }
    }
}

pub(super) fn all_reduce(count: usize) -> OpDesc {
    OpDesc::all_reduce(Dtype::F32, ReduceOp::Sum, count as u64)
}

fn values(rank: u32, len: usize) -> impl Iterator<Item = f32> {
    (0..len).map(move |i| (i as u32 * 3 + rank) as f32)
}

/// Every kind of buffer, every length, several operations in a row.
#[test]
fn all_reduce_is_correct_for_any_buffer_placement() {
    const RANKS: u32 = 3;
    let (name, device) = start(RANKS, Behaviour::Honest);
    let rank = |rank: u32| {
        let mut driver = attach(&name, rank, RANKS);
        // 3000 elements are 188 chunks: more than the rings and the bounce buffer hold.
        for (round, len) in [1, 16, 17, 300, 3000].into_iter().enumerate() {
            let mut registered = driver.alloc::<f32>(len + 5).expect("memory");
            let mut other = driver.alloc::<f32>(len).expect("memory");
            let mut plain: Vec<f32> = values(rank, len).collect();
            let mut elsewhere = vec![0_f32; len];
            registered[5..].copy_from_slice(&plain);
            other.copy_from_slice(&plain);
            let case = (round + rank as usize) % 5;
            // An output that does not reach beyond the page of its first element is all on a shared page.
            let beside = if len > 1024 { Transfer::ZeroCopy } else { Transfer::Bounced };
            let ends = match case {
                0 => (BorrowedBuffers::InPlace(bytemuck::cast_slice_mut(&mut registered[5..])), beside),
                1 => (BorrowedBuffers::InPlace(bytemuck::cast_slice_mut(&mut plain)), Transfer::Bounced),
                2 => (
                    BorrowedBuffers::Separate(
                        bytemuck::cast_slice(&registered[5..]),
                        bytemuck::cast_slice_mut(&mut other),
                    ),
                    Transfer::ZeroCopy,
                ),
                3 => (
                    BorrowedBuffers::Separate(
                        bytemuck::cast_slice(&registered[5..]),
                        bytemuck::cast_slice_mut(&mut elsewhere),
                    ),
                    Transfer::Bounced,
                ),
                _ => (
                    BorrowedBuffers::Separate(bytemuck::cast_slice(&plain), bytemuck::cast_slice_mut(&mut other)),
                    Transfer::Bounced,
                ),
            };
            let (mut buffers, expected_transfer) = ends;
            let (op, transfer) = post(&mut driver, all_reduce(len), &mut buffers);
            assert_eq!(transfer, expected_transfer);
            assert_eq!(drive(&mut driver, op, &mut buffers), Ok(()));
            let found: &[f32] = match case {
                0 => &registered[5..],
                1 => &plain,
                3 => &elsewhere,
                _ => &other,
            };
            let expected: Vec<f32> = (0..len).map(|i| (i as u32 * 9 + 3) as f32).collect();
            assert_eq!(found, expected, "rank {rank}, case {case}, {len} elements");
            if case > 1 {
                let input = if case == 4 { &plain[..] } else { &registered[5..] };
                assert!(input.iter().copied().eq(values(rank, len)), "a separate input stays as it is");
            }
        }
        assert!(driver.stats().bytes_out >= 4 * 3334);
        // Dropped buffers are deregistered by the next call.
        let deadline = Instant::now() + LONG;
        let kept = driver.alloc::<u8>(100).expect("memory");
        while driver.registered() > 1 {
            assert!(Instant::now() < deadline, "{driver:?}");
            driver.pump(&mut BorrowedBuffers::InPlace(&mut []));
        }
        assert!(kept.iter().all(|&byte| byte == 0));
        // Addresses are passed to the engine only where elements are aligned.
        let found = |skip: usize, dtype| driver.place(&kept[skip..], &OpDesc::all_gather(dtype, 0)).is_some();
        assert!(found(0, Dtype::F64) && found(8, Dtype::F64) && found(3, Dtype::U8));
        assert!(!found(4, Dtype::F64) && !found(3, Dtype::F16));
        drop(driver);
        assert_eq!(kept.len(), 100, "memory outlives its driver");
    };
    std::thread::scope(|scope| {
        (0..RANKS).for_each(|number| _ = scope.spawn(move || rank(number)));
    });
    let device = device.join().expect("an honest device");
    // A bounce buffer and one live buffer for each rank; no fence was needed.
    assert_eq!((device.regions.len(), device.fences), (2 * RANKS as usize, 0));
}

#[test]
fn operations_are_submitted_ahead_of_answers() {
    let (name, device) = start(2, Behaviour::Honest);
    let (mut driver, mut late) = std::thread::scope(|scope| {
        let late = scope.spawn(|| attach(&name, 1, 2));
        (attach(&name, 0, 2), late.join().expect("attached"))
    });
    let mut buffer = driver.alloc::<f32>(64).expect("memory");
    let mut buffers = BorrowedBuffers::InPlace(bytemuck::cast_slice_mut(&mut buffer));
    let ops: Vec<_> = (0..3).map(|_| post(&mut driver, all_reduce(4), &mut buffers).0).collect();
    driver.pump(&mut buffers);
    assert!(driver.poll_event().is_none(), "the other rank has not called yet");
    for _ in &ops {
        let mut other = vec![0_f32; 4];
        let mut other = BorrowedBuffers::InPlace(bytemuck::cast_slice_mut(&mut other));
        let (op, _) = post(&mut late, all_reduce(4), &mut other);
        assert_eq!(drive(&mut late, op, &mut other), Ok(()), "the first rank has submitted, and does nothing now");
    }
    let deadline = Instant::now() + LONG;
    for op in ops {
        let event = loop {
            driver.pump(&mut buffers);
            match driver.poll_event() {
                Some(event) => break event,
                None => assert!(Instant::now() < deadline),
            }
        };
        assert_eq!(event, Event::Completed(op));
    }
    drop((driver, late));
    assert_eq!(device.join().expect("an honest device").fences, 0);
}

#[test]
fn waker_ends_a_wait_from_another_thread() {
    let (name, _device) = start(1, Behaviour::IgnoreData);
    let mut driver = attach(&name, 0, 1);
    let waker = driver.waker();
    waker.wake();
    let begun = Instant::now();
    driver.wait(Some(LONG));
    assert!(begun.elapsed() < LONG, "a wake before the wait counts");
    std::thread::scope(|scope| {
        scope.spawn(|| waker.wake());
        driver.wait(Some(LONG));
    });
}

#[test]
fn failed_attach_reports_the_reason() {
    let attach_to = |behaviour| {
        let (name, _device) = start(1, behaviour);
        ZeroCopyDriver::attach(&params(&name, 0, 1)).expect_err("refused")
    };
    let error = attach_to(Behaviour::RefuseAttach(AttachRefusal::AlreadyAttached));
    assert!(matches!(error, AttachError::Refused(AttachRefusal::AlreadyAttached)), "{error}");
    assert!(matches!(attach_to(Behaviour::Queues(3)), AttachError::Queues(3)));
    let error = attach_to(Behaviour::Alignment(8192));
    let is_alignment = matches!(&error, AttachError::Function(why) if why.to_string().contains("an alignment of 8192"));
    assert!(is_alignment, "{error}");
    // Unreadable redo slots would pass for unpublished results, and inputs for intact.
    for by in [1, u64::MAX / 2] {
        assert!(matches!(attach_to(Behaviour::MisplacedRedo(by)), AttachError::RedoMemory { .. }));
    }
    let has = Features::ZERO_COPY | Features::REDO;
    let error = attach_to(Behaviour::Features(has));
    assert!(matches!(error, AttachError::Features { has: found, .. } if found == has), "{error}");
    let error = ZeroCopyDriver::attach(&params("sumac-host-test-nobody", 0, 1)).expect_err("nobody listens");
    assert!(matches!(error, AttachError::Socket(_)) && error.to_string().contains("nobody"), "{error}");
    // Slots too short for a chunk.
    let (name, _device) = start(1, Behaviour::Honest);
    let chunk_len_bytes = CHUNK + 1;
    let error =
        ZeroCopyDriver::attach(&crate::transport::memory::AttachParams { chunk_len_bytes, ..params(&name, 0, 1) });
    assert!(matches!(error.expect_err("too short"), AttachError::Redo { needs: 194, .. }));
}

#[test]
fn refused_registration_is_an_error_and_the_group_survives() {
    let (name, _device) = start(1, Behaviour::RegisterFull);
    let mut driver = attach(&name, 0, 1);
    let error = driver.alloc::<f32>(10).expect_err("full");
    assert_eq!(error, RegisterError::Refused(EntryStatus::NoResources));
    assert!(matches!(driver.alloc::<f64>(usize::MAX), Err(RegisterError::Memory(_))));
    assert!(!driver.alloc::<f32>(0).expect("nothing").is_registered());
    assert_eq!(driver.error(), None);
}

/// The key of the bounce buffer, and of another buffer: contents of one would be taken for the other's.
#[test]
fn duplicate_region_key_ends_the_group() {
    for regions in [1, 2] {
        let (name, _device) = start(1, Behaviour::DuplicateKeys(regions));
        let mut driver = attach(&name, 0, 1);
        let kept: Vec<_> = (1..regions).map(|_| driver.alloc::<f32>(10).expect("a key of its own")).collect();
        let violation =
            ProtocolViolation::DuplicateRegion { region: RegionKey { index: 4 + regions as u16, generation: 1 } };
        assert_eq!(driver.alloc::<f32>(20).expect_err("a duplicate key"), RegisterError::Protocol(violation));
        assert_eq!(driver.error(), Some(EndpointError::Protocol(violation)));
        assert_eq!(driver.registered(), kept.len());
    }
}

#[test]
fn mismatched_calls_get_the_same_error_on_every_rank() {
    let (name, _device) = start(2, Behaviour::Honest);
    let rank = |rank: u32, count: usize| {
        let mut driver = attach(&name, rank, 2);
        let mut values = vec![0_f32; count];
        let mut buffers = BorrowedBuffers::InPlace(bytemuck::cast_slice_mut(&mut values));
        let (op, _) = post(&mut driver, all_reduce(count), &mut buffers);
        drive(&mut driver, op, &mut buffers).expect_err("they differ")
    };
    let errors = std::thread::scope(|scope| {
        [(0, 4), (1, 5)].map(|(number, count)| scope.spawn(move || rank(number, count))).map(|rank| rank.join())
    });
    let [first, other] = errors.map(|error| error.expect("no panic"));
    assert_eq!(first, other);
    assert!(matches!(first, EndpointError::Mismatch { .. }), "{first}");
}

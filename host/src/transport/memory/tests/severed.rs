//! Devices that ignore fences and keep running while, or after, their memory is revoked.
//!
//! Time is driven by events: a device wakes when the test wakes it, and the test continues when it has answered.

use super::device::{Behaviour, CHUNK, Wake, attach, start, wake};
use super::driver::{BorrowedBuffers, all_reduce, post};
use crate::recovery::{RecoverySource, Unrecoverable, inventory, is_unknown, plan};
use crate::region_exports::RegionExports;
use crate::transport::memory::Buffer;
use crate::transport::memory::driver::ZeroCopyDriver;
use crate::transport::memory::retire::Fence;
use crate::transport::packets::{Event, OpId};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};
use sumac_hal::ids::{ChunkNo, Rank};

const PER_CHUNK: usize = CHUNK as usize / 4;
const CHUNKS: usize = 7;

/// Two ranks with an all-reduce of threes and fours in registered memory, fully submitted, on a device that completes
/// nothing until it wakes.
struct Job {
    name: String,
    drivers: [ZeroCopyDriver; 2],
    buffers: [Buffer<f32>; 2],
    /// What other ranks may map of rank 0.
    exports: Arc<RegionExports>,
}

fn in_flight(behaviour: Wake) -> Job {
    let (name, _device) = start(2, Behaviour::LateWake(behaviour));
    let mut drivers = std::thread::scope(|scope| {
        let ranks = [0, 1].map(|rank| {
            scope.spawn({
                let name = &name;
                move || attach(name, rank, 2)
            })
        });
        ranks.map(|rank| rank.join().expect("attached"))
    });
    let exports = Arc::default();
    drivers[0].export_to(&exports);
    let buffers = [0, 1].map(|rank| {
        let mut buffer = drivers[rank].alloc::<f32>(CHUNKS * PER_CHUNK).expect("memory");
        buffer.fill(3.0 + rank as f32);
        let mut buffers = BorrowedBuffers::InPlace(bytemuck::cast_slice_mut(&mut buffer));
        post(&mut drivers[rank], all_reduce(CHUNKS * PER_CHUNK), &mut buffers);
        drivers[rank].pump(&mut buffers);
        buffer
    });
    Job { name, drivers, buffers, exports }
}

impl Job {
    /// Fence rank 0, then have the device complete and answer everything.
    fn sever_and_wake(&mut self) {
        assert_eq!(self.drivers[0].fence(), Fence::Severed);
        wake(&self.name);
        let deadline = Instant::now() + Duration::from_secs(30);
        // Chunks of rank 1 are answered after those of rank 0.
        let Self { drivers: [_, other], buffers: [_, buffer], .. } = self;
        let mut buffers = BorrowedBuffers::InPlace(bytemuck::cast_slice_mut(buffer));
        loop {
            other.pump(&mut buffers);
            if other.poll_event() == Some(Event::Completed(OpId(0))) {
                break;
            }
            assert!(Instant::now() < deadline, "it does not wake");
            std::thread::yield_now();
        }
        assert!(self.buffers[1].iter().all(|&value| value == 7.0), "the other rank has its result");
    }

    fn salvage(&mut self) {
        let mut buffers = BorrowedBuffers::InPlace(bytemuck::cast_slice_mut(&mut self.buffers[0]));
        self.drivers[0].salvage(&mut buffers);
    }

    fn holds(&self, value: f32) -> bool {
        self.buffers[0].iter().all(|&found| found == value)
    }
}

/// Ranks that have mapped the memory would read what the device still writes to, and not what this rank has.
#[test]
fn severed_memory_is_withdrawn_from_other_ranks() {
    let mut job = in_flight(Wake::LaterAndOn);
    assert_eq!(job.exports.removals(), 0);
    job.sever_and_wake();
    assert_eq!(job.exports.removals(), 1);
}

/// The copy was made before the device wrote: trusting the answer, a rank would take its own input for the sum.
#[test]
fn answers_after_sever_land_nothing() {
    let mut job = in_flight(Wake::LaterAndOn);
    job.sever_and_wake();
    job.salvage();
    let driver = &mut job.drivers[0];
    assert_ne!(driver.poll_event(), Some(Event::Completed(OpId(0))));
    assert!((0..CHUNKS as u64).all(|seq| !driver.is_answered(seq) && driver.is_unknown(seq)));
    assert!(is_unknown(driver, OpId(0)));
    // These bytes must not be used as a contribution either. The other rank has returned, and its redo slots have been
    // reused.
    let inventories = [0, 1].map(|rank| (Rank(rank), inventory(&job.drivers[rank as usize])));
    let lost = plan(&inventories.into(), 2).expect_err("nobody has it");
    assert_eq!(lost, Unrecoverable::ChunkLost { chunk: ChunkNo(0), rank: Rank(0) });
    assert!(job.holds(3.0));
}

#[test]
fn answers_after_sever_leave_contents_unknown_on_retire() {
    let mut job = in_flight(Wake::LaterAndOn);
    job.sever_and_wake();
    job.drivers[0].retire();
    assert!(is_unknown(&job.drivers[0], OpId(0)) && job.holds(3.0));
}

#[test]
fn redo_records_land_results_after_sever() {
    for ends in [false, true] {
        let mut job = in_flight(Wake::Later);
        job.sever_and_wake();
        if ends {
            job.drivers[0].retire()
        } else {
            job.salvage()
        }
        assert!((0..CHUNKS as u64).all(|seq| job.drivers[0].is_answered(seq)));
        assert!(job.holds(7.0) && !is_unknown(&job.drivers[0], OpId(0)));
    }
}

#[test]
fn answers_before_sever_count() {
    for ends in [false, true] {
        let mut job = in_flight(Wake::Fence);
        assert_eq!(job.drivers[0].fence(), Fence::Severed);
        if ends {
            job.drivers[0].retire()
        } else {
            job.salvage()
        }
        assert!((0..CHUNKS as u64).all(|seq| job.drivers[0].is_answered(seq)));
        let completed = (!ends).then_some(Event::Completed(OpId(0)));
        assert_eq!(job.drivers[0].poll_event(), completed);
        assert!(job.holds(7.0) && !is_unknown(&job.drivers[0], OpId(0)));
    }
}

/// A silent device has published nothing: the copy is the input, and the sum can be recomputed.
#[test]
fn inputs_are_intact_after_severing_a_silent_device() {
    let mut job = in_flight(Wake::Later);
    assert_eq!(job.drivers[0].fence(), Fence::Severed);
    job.salvage();
    assert!(job.holds(3.0) && !is_unknown(&job.drivers[0], OpId(0)));
    let state = inventory(&job.drivers[0]).state(0).0;
    assert!(state.needs && state.gives && !state.holds);
}

/// Safe Rust lets other threads use the memory beside an operation's buffer.
#[test]
fn sever_preserves_concurrent_writes_to_other_parts() {
    // More than an operation has in flight, so that copying everything would take a while.
    const LEN: usize = 15 << 20;
    let (name, _device) = start(1, Behaviour::Zombie);
    let mut driver = attach(&name, 0, 1);
    let mut buffer = driver.alloc::<u32>(LEN / 4).expect("memory");
    let page =
        driver.whole_pages(bytemuck::cast_slice(&buffer[1..])).expect("registered").address.offset_bytes as usize;
    // The operation begins with two chunks on a page of the left part, and ends on a page of the right part.
    let start = page - 2 * usize::from(CHUNK);
    let (left, rest) = buffer.split_at_mut(start / 4);
    let (own, right) = rest.split_at_mut((3 * page - start + 100) / 4);
    let desc =
        sumac_hal::op::OpDesc::all_reduce(sumac_hal::op::Dtype::U32, sumac_hal::op::ReduceOp::Sum, own.len() as u64);
    let own_pages = page as u64..3 * page as u64;
    let own_base = own.as_ptr();
    let mut buffers = BorrowedBuffers::InPlace(bytemuck::cast_slice_mut(own));
    post(&mut driver, desc, &mut buffers);
    driver.pump(&mut buffers);
    let exposed: Vec<_> = driver.endpoint.exposed().map(|(_, at, len)| (at.offset_bytes, len as u64)).collect();
    assert!(!exposed.is_empty() && driver.endpoint.unanswered() > exposed.len() as u64, "{exposed:?}");
    assert!(exposed.iter().all(|&(at, len)| own_pages.contains(&at) && at + len <= own_pages.end), "{exposed:?}");
    // The device answers fences until it has the contributions, and then writes to their destinations.
    let written_to = own_base.wrapping_byte_add(exposed[0].0 as usize - start);
    let deadline = Instant::now() + Duration::from_secs(30);
    // SAFETY: it is a word of the operation's part, which nobody in this process uses meanwhile.
    while unsafe { written_to.read_volatile() } != 0xdddd_dddd {
        assert!(Instant::now() < deadline, "the device does not write");
        std::thread::yield_now();
    }
    let over = AtomicBool::new(false);
    std::thread::scope(|scope| {
        let writers = [left.last_mut().expect("some"), &mut right[0]].map(|word| {
            scope.spawn(|| {
                let (mut written, mut undone) = (0_u32, 0_u64);
                // A faulty driver would change the memory under this thread: no read may be optimized away.
                let word: *mut u32 = word;
                while !over.load(Ordering::Relaxed) {
                    // SAFETY: it is this thread's, and lives as long as the scope.
                    let found = unsafe { word.read_volatile() };
                    undone += u64::from(found != written);
                    written = written.wrapping_add(1);
                    // SAFETY: as above.
                    unsafe { word.write_volatile(written) };
                }
                (written, undone)
            })
        });
        let fence = driver.fence();
        // Before any assertion, as the scope waits for its threads.
        over.store(true, Ordering::Relaxed);
        assert_eq!(fence, Fence::Severed);
        for (written, undone) in writers.map(|writer| writer.join().expect("no panic")) {
            assert!(written > 0 && undone == 0, "{undone} of {written} writes are undone");
        }
    });
    drop(driver);
}

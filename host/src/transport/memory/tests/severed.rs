//! Devices that answer no fence and go on while, or after, their memory is taken away.
//!
//! Time is an event here: a device wakes when it is told to, and a test goes on when it has answered.

use super::device::{Behaviour, CHUNK, Wake, attach, start, wake};
use super::driver::{Lent, all_reduce, post};
use crate::recovery::{Remains, Unrepairable, is_unknown, ledger, plan};
use crate::transport::memory::driver::ReferenceDriver;
use crate::transport::memory::memory::Buffer;
use crate::transport::memory::retire::Fence;
use crate::transport::packets::{Event, OpId};
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};
use sumac_hal::ids::{ChunkNo, Rank};

const PER_CHUNK: usize = CHUNK as usize / 4;
const CHUNKS: usize = 7;

/// Two ranks with an all-reduce of threes and fours in registered memory, all of it submitted, on a device that
/// finishes nothing until it wakes.
struct Job {
    name: String,
    drivers: [ReferenceDriver; 2],
    buffers: [Buffer<f32>; 2],
}

fn in_flight(behaviour: Wake) -> Job {
    let (name, _device) = start(2, Behaviour::Wakes(behaviour));
    let mut drivers = std::thread::scope(|scope| {
        let ranks = [0, 1].map(|rank| {
            scope.spawn({
                let name = &name;
                move || attach(name, rank, 2)
            })
        });
        ranks.map(|rank| rank.join().expect("attached"))
    });
    let buffers = [0, 1].map(|rank| {
        let mut buffer = drivers[rank].alloc::<f32>(CHUNKS * PER_CHUNK).expect("memory");
        buffer.fill(3.0 + rank as f32);
        let mut lent = Lent::InPlace(bytemuck::cast_slice_mut(&mut buffer));
        post(&mut drivers[rank], all_reduce(CHUNKS * PER_CHUNK), &mut lent);
        drivers[rank].pump(&mut lent);
        buffer
    });
    Job { name, drivers, buffers }
}

impl Job {
    /// Fence rank 0, and have the device finish then, and answer.
    fn sever_and_wake(&mut self) {
        assert_eq!(self.drivers[0].fence(), Fence::Severed);
        wake(&self.name);
        let deadline = Instant::now() + Duration::from_secs(30);
        // All chunks of rank 1 are answered behind those of rank 0.
        let Self { drivers: [_, other], buffers: [_, buffer], .. } = self;
        let mut lent = Lent::InPlace(bytemuck::cast_slice_mut(buffer));
        loop {
            other.pump(&mut lent);
            if other.poll_event() == Some(Event::Completed(OpId(0))) {
                break;
            }
            assert!(Instant::now() < deadline, "it does not wake");
            std::thread::yield_now();
        }
        assert!(self.buffers[1].iter().all(|&value| value == 7.0), "the other rank has its result");
    }

    fn salvage(&mut self) {
        let mut lent = Lent::InPlace(bytemuck::cast_slice_mut(&mut self.buffers[0]));
        self.drivers[0].salvage(&mut lent);
    }

    fn holds(&self, value: f32) -> bool {
        self.buffers[0].iter().all(|&found| found == value)
    }
}

/// The copy was made before the device wrote: by the answer alone, a rank would take its own input for the sum.
#[test]
fn answers_behind_a_severing_land_nothing() {
    let mut job = in_flight(Wake::LaterAndOn);
    job.sever_and_wake();
    job.salvage();
    let driver = &mut job.drivers[0];
    assert_ne!(driver.poll_event(), Some(Event::Completed(OpId(0))));
    assert!((0..CHUNKS as u64).all(|seq| !driver.is_answered(seq) && driver.is_unknown(seq)));
    assert!(is_unknown(driver, OpId(0)));
    // Nobody may take these bytes for a contribution either. The other rank has returned, and its redo slots are used again.
    let ledgers = [0, 1].map(|rank| (Rank(rank), ledger(&job.drivers[rank as usize])));
    let lost = plan(&ledgers.into(), 2).expect_err("nobody has it");
    assert_eq!(lost, Unrepairable::Forgotten { chunk: ChunkNo(0), rank: Rank(0) });
    assert!(job.holds(3.0));
}

#[test]
fn answers_behind_a_severing_are_no_word_to_a_rank_that_ends() {
    let mut job = in_flight(Wake::LaterAndOn);
    job.sever_and_wake();
    job.drivers[0].retire();
    assert!(is_unknown(&job.drivers[0], OpId(0)) && job.holds(3.0));
}

#[test]
fn records_vouch_for_what_came_behind_a_severing() {
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
fn answers_before_a_severing_count() {
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

/// Who stays silent has published nothing: the copy is the input, and all can compute the sum again.
#[test]
fn inputs_are_whole_where_a_device_stays_silent() {
    let mut job = in_flight(Wake::Later);
    assert_eq!(job.drivers[0].fence(), Fence::Severed);
    job.salvage();
    assert!(job.holds(3.0) && !is_unknown(&job.drivers[0], OpId(0)));
    let class = ledger(&job.drivers[0]).class(0).0;
    assert!(class.needs && class.gives && !class.holds);
}

/// From safe Rust other threads may have the parts beside an operation's.
#[test]
fn severing_undoes_no_write_of_threads_that_have_other_parts() {
    // Beyond what an operation has in flight, so that a copy of everything takes a while.
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
    let mut lent = Lent::InPlace(bytemuck::cast_slice_mut(own));
    post(&mut driver, desc, &mut lent);
    driver.pump(&mut lent);
    let exposed: Vec<_> = driver.endpoint.exposed().map(|(_, at, len)| (at.offset_bytes, len as u64)).collect();
    assert!(!exposed.is_empty() && driver.endpoint.on_its_way() > exposed.len() as u64, "{exposed:?}");
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
                // The memory may change under this thread if the driver is wrong: so no read is left out.
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
        // Before anything can fail, as the scope waits for its threads.
        over.store(true, Ordering::Relaxed);
        assert_eq!(fence, Fence::Severed);
        for (written, undone) in writers.map(|writer| writer.join().expect("no panic")) {
            assert!(written > 0 && undone == 0, "{undone} of {written} writes are undone");
        }
    });
    drop(driver);
}

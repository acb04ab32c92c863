//! The round trip of a cache line between two cores, which dominates the latency of small messages.
//!
//! It differs by a factor of five between hosts of the same virtual machine type, so every table shows it.

use rustix::thread::{CpuSet, sched_getaffinity, sched_setaffinity};
use std::hint::spin_loop;
use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};
use std::thread;
use std::time::{Duration, Instant};

/// The time limit of the measurement: a busy core must not delay the command.
const LIMIT: Duration = Duration::from_millis(50);

/// Round trips per batch. The fastest batch counts, because it was disturbed the least.
const BATCH: u32 = 1000;

/// Return the round trip of a cache line between two of this process's cores in nanoseconds; `None` if there is only
/// one core or no batch finished in time.
pub(crate) fn cache_line_round_trip_ns() -> Option<f64> {
    let allowed = sched_getaffinity(None).ok()?;
    let mut cores = (0..CpuSet::MAX_CPU).filter(|&cpu| allowed.is_set(cpu));
    let (here, there) = (cores.next()?, cores.next()?);
    let (line, stop) = (AtomicU32::new(0), AtomicBool::new(false));
    thread::scope(|scope| {
        let echo = scope.spawn(|| {
            // Reply to each odd number with the next even one.
            pin(there)?;
            while !stop.load(Ordering::Relaxed) {
                let seen = line.load(Ordering::Acquire);
                if seen % 2 == 1 {
                    line.store(seen.wrapping_add(1), Ordering::Release);
                } else {
                    spin_loop();
                }
            }
            Some(())
        });
        // Pinned on a thread of its own, so that the caller's affinity does not change.
        let measure = scope.spawn(|| {
            let best = pin(here).and_then(|()| fastest_batch(&line));
            stop.store(true, Ordering::Relaxed);
            best
        });
        let best = measure.join().ok().flatten();
        echo.join().ok().flatten().and(best)
    })
}

fn fastest_batch(line: &AtomicU32) -> Option<f64> {
    let end = Instant::now() + LIMIT;
    let mut best: Option<Duration> = None;
    loop {
        let start = Instant::now();
        for _ in 0..BATCH {
            let sent = line.load(Ordering::Relaxed).wrapping_add(1);
            line.store(sent, Ordering::Release);
            let mut spins = 0_u32;
            while line.load(Ordering::Acquire) == sent {
                spin_loop();
                spins = spins.wrapping_add(1);
                if spins.is_multiple_of(1024) && Instant::now() > end {
                    return best.map(|best| best.as_nanos() as f64 / f64::from(BATCH));
                }
            }
        }
        let time = start.elapsed();
        best = Some(best.map_or(time, |best| best.min(time)));
        if Instant::now() > end {
            return best.map(|best| best.as_nanos() as f64 / f64::from(BATCH));
        }
    }
}

fn pin(cpu: usize) -> Option<()> {
    let mut set = CpuSet::new();
    set.set(cpu);
    sched_setaffinity(None, &set).ok()
}

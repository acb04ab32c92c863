//! Times all-reduces through the library, for `host/python/tests/costs`: as a rank, prints the median of a call and the
//! processor time per call, in seconds.
//!
//!     costs COUNT CALLS

use rustix::time::{ClockId, clock_gettime};
use std::time::{Duration, Instant};
use sumac::{Communicator, JoinConfig, ReduceOp};

/// Return the processor time of all threads.
fn processor_time() -> Duration {
    let time = clock_gettime(ClockId::ProcessCPUTime);
    Duration::new(time.tv_sec.unsigned_abs(), u32::try_from(time.tv_nsec).unwrap_or(0))
}

fn main() -> Result<(), Box<dyn std::error::Error>> {
    let numbers = std::env::args().skip(1).map(|number| number.parse()).collect::<Result<Vec<usize>, _>>()?;
    let [count, calls] = numbers[..] else { return Err("usage: costs COUNT CALLS".into()) };
    let comm = Communicator::join(JoinConfig::from_env()?)?;
    let mut values = vec![0_f32; count];
    for _ in 0..=calls / 10 {
        comm.all_reduce(&mut values[..], ReduceOp::Sum)?;
    }
    let mut times = Vec::with_capacity(calls);
    let begin = processor_time();
    for _ in 0..calls {
        let begin = Instant::now();
        comm.all_reduce(&mut values[..], ReduceOp::Sum)?;
        times.push(begin.elapsed());
    }
    let used = (processor_time() - begin).as_secs_f64() / calls as f64;
    times.sort_unstable();
    println!("{:.9} {used:.9}", times[calls / 2].as_secs_f64());
    comm.leave();
    Ok(())
}

//! Ring and halving-doubling with one thread per rank, over loopback TCP and through shared memory: median and 99th
//! percentile of the slowest rank.
//!
//! `cargo bench -p sumac --bench exec -- [RANKS]`. Compare ratios within one run only: absolute figures vary with the
//! host.

use std::hint::black_box;
use std::net::TcpListener;
use std::sync::Barrier;
use std::thread;
use std::time::{Duration, Instant};
use sumac::exec::{Context, JobSecret, Mesh, NoInterrupt, SharedMemory, execute};
use sumac::schedule::{Place, Schedule, halving_doubling, ring};
use sumac_hal::op::{Dtype, OpDesc, Path, ReduceOp};
use sumac_hal::reduce::Kernel;

type Algorithm = fn(Place, usize) -> Schedule;

fn main() {
    let ranks = std::env::args().filter_map(|arg| arg.parse().ok()).next().unwrap_or(4);
    println!(
        "{:>12} {:>6} {:>4} {:>12} {:>12} {:>12} {:>12} {:>12}",
        "bytes", "dtype", "algo", "TCP us", "p99 us", "shared us", "p99 us", "TCP/shared"
    );
    for (dtype, bytes, iterations) in [
        (Dtype::F32, 8, 2000),
        (Dtype::F32, 1 << 10, 2000),
        (Dtype::F32, 64 << 10, 500),
        (Dtype::F32, 1 << 20, 100),
        (Dtype::F32, 16 << 20, 20),
        (Dtype::Bf16, 16 << 20, 20),
    ] {
        let algorithms: [(Path, Algorithm); 2] =
            [(Path::Ring, ring::all_reduce), (Path::HalvingDoubling, halving_doubling::all_reduce)];
        for (path, algorithm) in algorithms {
            let [(tcp, tcp_p99), (shared, shared_p99)] = [SharedMemory::Avoid, SharedMemory::Use].map(|memory| {
                let count = bytes / dtype.size_bytes();
                let mut times = measure((ranks, memory), dtype, count, iterations, (path, algorithm));
                times.sort_unstable();
                let micros = |time: Duration| time.as_secs_f64() * 1e6;
                (micros(times[times.len() / 2]), micros(times[times.len() * 99 / 100]))
            });
            println!(
                "{bytes:>12} {dtype:>6} {:>4} {tcp:>12.1} {tcp_p99:>12.1} {shared:>12.1} {shared_p99:>12.1} {:>12.2}",
                path.name(),
                tcp / shared
            );
        }
    }
}

/// Return, for each iteration, the time of the slowest rank.
fn measure(
    (ranks, memory): (u32, SharedMemory),
    dtype: Dtype,
    count: usize,
    iterations: usize,
    (path, algorithm): (Path, Algorithm),
) -> Vec<Duration> {
    let listeners: Vec<_> = (0..ranks).map(|_| TcpListener::bind("127.0.0.1:0").expect("loopback")).collect();
    let addresses: Vec<_> = listeners.iter().map(|listener| listener.local_addr().expect("bound")).collect();
    let start = Barrier::new(ranks as usize);
    let run = |(place, listener): (Place, TcpListener)| {
        let mut mesh = Mesh::new(place, JobSecret::new([1; 32]), listener, addresses.clone(), memory).expect("a mesh");
        let schedule = algorithm(place, count);
        let desc = OpDesc::all_reduce(dtype, ReduceOp::Sum, count as u64);
        let kernel = Kernel::new(dtype, ReduceOp::Sum);
        let mut buf = vec![0; count * dtype.size_bytes()];
        let mut times = Vec::with_capacity(iterations);
        for op_index in 0..(iterations + WARM_UP) as u64 {
            let deadline = Instant::now() + Duration::from_secs(60);
            let ctx = Context { op_index, signature: desc.signature(path, 0), desc, path, deadline };
            start.wait();
            let begin = Instant::now();
            execute(&mut mesh, &schedule, kernel.as_ref(), black_box(&mut buf[..]), &ctx, &mut NoInterrupt)
                .expect("runs");
            times.push(begin.elapsed());
        }
        times.split_off(WARM_UP)
    };
    let each: Vec<Vec<Duration>> = thread::scope(|scope| {
        let run = &run;
        let threads: Vec<_> = Place::all(ranks).zip(listeners).map(|rank| scope.spawn(move || run(rank))).collect();
        threads.into_iter().map(|thread| thread.join().expect("no panic")).collect()
    });
    (0..iterations).map(|index| each.iter().map(|times| times[index]).max().unwrap_or_default()).collect()
}

/// Enough for shared memory to take over.
const WARM_UP: usize = 20;

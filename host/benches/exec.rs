//! Host all-reduces with one thread per rank, over loopback TCP and through shared memory: median and 99th percentile
//! of the slowest rank. Short ones are called a hundred times in a row: one costs less than starting the ranks.
//!
//! `cargo bench -p sumac --bench exec -- [RANKS]`. Compare ratios within one run only: absolute figures vary with the
//! host.

use std::hint::black_box;
use std::net::TcpListener;
use std::sync::Barrier;
use std::thread;
use std::time::{Duration, Instant};
use sumac::exec::{Context, JobSecret, Mesh, NoInterrupt, SharedMemory, execute};
use sumac::schedule::tree::Tree;
use sumac::schedule::{Place, Schedule, halving_doubling, one_shot, recursive_doubling, ring};
use sumac_hal::ctrl::Order;
use sumac_hal::op::{Dtype, OpDesc, Path, ReduceOp};
use sumac_hal::reduce::Kernel;

type Algorithm = fn(Place, usize) -> Schedule;

const ALGORITHMS: [(Path, Algorithm); 4] = [
    (Path::Ring, ring::all_reduce),
    (Path::HalvingDoubling, halving_doubling::all_reduce),
    (Path::RecursiveDoubling, recursive_doubling::all_reduce),
    (Path::OneShot, |place, count| {
        one_shot::all_reduce(place, count, &Tree::flat(place.ranks(), Order::TreeFold).expect("a tree"))
    }),
];

/// Operations up to this length are short.
const SHORT_BYTES: usize = 4 << 10;

fn main() {
    let ranks = std::env::args().filter_map(|arg| arg.parse().ok()).next().unwrap_or(4);
    println!(
        "{:>12} {:>6} {:>8} {:>12} {:>12} {:>12} {:>12} {:>12}",
        "bytes", "dtype", "algo", "TCP us", "p99 us", "shared us", "p99 us", "TCP/shared"
    );
    for (dtype, bytes, iterations) in [
        (Dtype::F32, 8, 200),
        (Dtype::F32, 1 << 10, 200),
        (Dtype::F32, 64 << 10, 500),
        (Dtype::F32, 1 << 20, 100),
        (Dtype::F32, 16 << 20, 20),
        (Dtype::Bf16, 16 << 20, 20),
    ] {
        let is_short = bytes <= SHORT_BYTES;
        for (path, algorithm) in ALGORITHMS.into_iter().take(if is_short { 4 } else { 2 }) {
            let [(tcp, tcp_p99), (shared, shared_p99)] = [SharedMemory::Avoid, SharedMemory::Use].map(|memory| {
                let count = bytes / dtype.size_bytes();
                let mut times = measure((ranks, memory), dtype, count, iterations, (path, algorithm));
                times.sort_unstable();
                let micros = |time: Duration| time.as_secs_f64() * 1e6;
                (micros(times[times.len() / 2]), micros(times[times.len() * 99 / 100]))
            });
            println!(
                "{bytes:>12} {dtype:>6} {:>8} {tcp:>12.1} {tcp_p99:>12.1} {shared:>12.1} {shared_p99:>12.1} {:>12.2}",
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
    let calls = if count * dtype.size_bytes() <= SHORT_BYTES { 100 } else { 1 };
    let run = |(place, listener): (Place, TcpListener)| {
        let mut mesh = Mesh::new(place, JobSecret::new([1; 32]), listener, addresses.clone(), memory).expect("a mesh");
        let schedule = algorithm(place, count);
        let desc = OpDesc::all_reduce(dtype, ReduceOp::Sum, count as u64);
        let kernel = Kernel::new(dtype, ReduceOp::Sum);
        let mut buf = vec![0; count * dtype.size_bytes()];
        let mut times = Vec::with_capacity(iterations);
        for iteration in 0..(iterations + WARM_UP) as u64 {
            let deadline = Instant::now() + Duration::from_secs(60);
            let first = iteration * u64::from(calls);
            start.wait();
            let begin = Instant::now();
            for op_index in first..first + u64::from(calls) {
                let ctx = Context { op_index, number: 0, signature: desc.signature(path, 0), desc, path, deadline };
                execute(&mut mesh, &schedule, kernel.as_ref(), black_box(&mut buf[..]), &ctx, &mut NoInterrupt)
                    .expect("runs");
            }
            times.push(begin.elapsed() / calls);
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

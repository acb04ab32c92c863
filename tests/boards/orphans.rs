//! Ranks that continue without their controller, on devices of any kind (`tests/boards/run`).
//!
//!     orphans CONTROLLER udp|shm
//!
//! They print `reducing`, reduce through the tree until a line on stdin reports that the controller has ended, and then
//! some operations more. Exit status 101 if an expectation is not met.

use std::io::stdin;
use std::net::SocketAddr;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::thread;
use sumac::{Algo, CallOptions, Communicator, JoinConfig, Path, ReduceOp, Transport};

const RANKS: u32 = 4;
const COUNT: usize = 3_000;
/// Operations before and after the controller's end.
const OPERATIONS: u64 = 100;

/// State shared by the ranks and the main thread.
#[derive(Default)]
struct Run {
    done: AtomicU64,
    stop: AtomicBool,
}

/// Reduce until rank 0 contributes the end to the sum; the values differ in each operation.
fn reduce(comm: &Communicator, rank: u32, run: &Run) {
    let tree = CallOptions { algo: Some(Algo::Tree), ..CallOptions::default() };
    let mut buffer = comm.alloc::<u64>(COUNT).expect("memory");
    for round in 0.. {
        let is_last = rank == 0 && run.stop.load(Ordering::Acquire);
        buffer.fill(round + u64::from(rank));
        buffer[0] = is_last.into();
        let outcome = comm.all_reduce_with(&mut buffer[..], ReduceOp::Sum, &tree).expect("the tree is there");
        assert!(outcome.path == Path::Tree && !outcome.recovered, "{outcome:?}");
        let sum = u64::from(RANKS) * round + u64::from(RANKS * (RANKS - 1) / 2);
        assert!(buffer[1..].iter().all(|&value| value == sum), "round {round}");
        run.done.fetch_add(u64::from(rank == 0), Ordering::Release);
        if buffer[0] > 0 {
            return;
        }
    }
}

fn wait_for(run: &Run, operations: u64) {
    while run.done.load(Ordering::Acquire) < operations {
        thread::yield_now();
    }
}

fn main() -> Result<(), Box<dyn std::error::Error>> {
    // A failed rank ends the process, because others may wait for it.
    let say = std::panic::take_hook();
    std::panic::set_hook(Box::new(move |info| {
        say(info);
        std::process::exit(101);
    }));
    let usage = "usage: orphans CONTROLLER udp|shm";
    let mut args = std::env::args().skip(1);
    let controller: SocketAddr = args.next().ok_or(usage)?.parse()?;
    let transport = match args.next().as_deref() {
        Some("udp") => Transport::Udp,
        Some("shm") => Transport::Shm,
        _ => return Err(usage.into()),
    };
    let run = Run::default();
    thread::scope(|scope| {
        let run = &run;
        let rank = move |number| {
            let config = JoinConfig { transport, ..JoinConfig::new(controller, "orphans", number, RANKS) };
            let comm = Communicator::join(config).expect("join");
            reduce(&comm, number, run);
        };
        (0..RANKS).for_each(|number| _ = scope.spawn(move || rank(number)));
        wait_for(run, OPERATIONS);
        println!("reducing");
        stdin().read_line(&mut String::new()).expect("a line");
        let before = run.done.load(Ordering::Acquire);
        wait_for(run, before + OPERATIONS);
        run.stop.store(true, Ordering::Release);
    });
    println!("{OPERATIONS} operations and more without a controller, 0 wrong");
    Ok(())
}

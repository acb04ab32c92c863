//! Ranks fill buffers while their board resets, and other ranks attach meanwhile (`tests/boards/run`).
//!
//!     kept CONTROLLER     run a controller at this address; start the ranks on a line on stdin, once the board is
//!     connected
//!
//! Prints `filled` when the buffers are. On a second line on stdin, once the board is in its next incarnation, other
//! ranks reduce and the first ones allocate further buffers. The first buffers, in memory shared with the board, must
//! keep their contents until dropped. Exit status 101 if an expectation is not met.

use std::io::stdin;
use std::sync::Barrier;
use std::thread;
use std::time::{Duration, Instant};
use sumac::controller::{Controller, ControllerConfig};
use sumac::{Algo, CallOptions, Communicator, JoinConfig, ReduceOp, Transport};

const RANKS: u64 = 2;
const COUNT: usize = 100_000;
const LONG: Duration = Duration::from_secs(30);

/// Let two ranks of a job reduce, and then call `with` with each rank's communicator and buffer.
fn job<R: Send>(
    controller: &Controller,
    job: &str,
    with: impl Fn(u64, &Communicator, &mut [u64]) -> R + Sync,
) -> Vec<R> {
    let rank = |number: u64| {
        let config = JoinConfig {
            transport: Transport::Shm,
            ..JoinConfig::new(controller.local_addr(), job, number as u32, RANKS as u32)
        };
        let comm = Communicator::join(config).expect("join");
        let tree = CallOptions { algo: Some(Algo::Tree), ..CallOptions::default() };
        let mut buffer = comm.alloc::<u64>(COUNT).expect("memory");
        assert!(buffer.is_registered(), "there is no seat");
        buffer.fill(number + 1);
        comm.all_reduce_with(&mut buffer[..], ReduceOp::Sum, &tree).expect("the tree is there");
        assert!(buffer.iter().all(|&value| value == 3));
        with(number, &comm, &mut buffer)
    };
    thread::scope(|scope| {
        let rank = &rank;
        let ranks: Vec<_> = (0..RANKS).map(|number| scope.spawn(move || rank(number))).collect();
        ranks.into_iter().map(|rank| rank.join().expect("a rank panicked")).collect()
    })
}

/// Allocate memory shared with the board again, on all ranks of a job.
fn allocate_in_the_next_incarnation(comm: &Communicator) {
    let until = Instant::now() + LONG;
    loop {
        let buffer = comm.alloc::<u64>(COUNT).expect("memory");
        let mut all = [u64::from(buffer.is_registered())];
        comm.all_reduce(&mut all, ReduceOp::Min).expect("by some way");
        if all == [1] {
            return;
        }
        assert!(Instant::now() < until, "the ranks are not back at their board");
    }
}

fn main() -> Result<(), Box<dyn std::error::Error>> {
    // A failed rank ends the process, because others may wait for it.
    let say = std::panic::take_hook();
    std::panic::set_hook(Box::new(move |info| {
        say(info);
        std::process::exit(101);
    }));
    let listen = std::env::args().nth(1).ok_or("usage: kept CONTROLLER")?.parse()?;
    let controller = Controller::start(ControllerConfig { listen, ..ControllerConfig::new() })?;
    stdin().read_line(&mut String::new())?;
    let [filled, over] = [(); 2].map(|()| Barrier::new(RANKS as usize + 1));
    thread::scope(|scope| {
        let first = scope.spawn(|| {
            job(&controller, "first", |number, comm, buffer| {
                buffer.iter_mut().zip(number..).for_each(|(value, index)| *value = index * 7);
                filled.wait();
                // It computes, and calls nothing.
                over.wait();
                allocate_in_the_next_incarnation(comm);
                buffer.iter().zip(number..).filter(|&(&value, index)| value != index * 7).count()
            })
        });
        filled.wait();
        println!("filled");
        stdin().read_line(&mut String::new()).expect("a line");
        job(&controller, "second", |_, _, _| ());
        over.wait();
        let wrong = first.join().expect("a rank panicked");
        assert_eq!(wrong, [0, 0], "elements that are others'");
    });
    println!("buffers of {COUNT} elements kept, 0 wrong");
    Ok(())
}

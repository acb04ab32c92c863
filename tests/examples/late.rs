//! Straggler policies with a late rank, on devices of any kind (`tests/boards/run`).
//!
//!     late CONTROLLER     run a controller at this address; start the ranks on a line on stdin, once devices are
//!     connected
//!
//! A straggler deadline fails the operation on all ranks and names the missing one. A partial limit completes it
//! without the late rank, whose own call fails as excluded. Exit status 101 if an expectation is not met.

use std::io::stdin;
use std::sync::Barrier;
use std::thread;
use std::time::Duration;
use sumac::controller::{Controller, ControllerConfig};
use sumac::{Algo, CallOptions, Communicator, Error, JoinConfig, Outcome, Rank, ReduceOp, Straggler, Transport};

const RANKS: u32 = 4;
const LATE: u32 = RANKS - 1;
const COUNT: usize = 3_000;
/// Long compared with the scheduling delays of a loaded machine.
const LIMIT: Duration = Duration::from_secs(1);

/// The result of a rank's call: its outcome, and the buffer, which every rank had filled with its number.
type Called = Result<(Outcome, Vec<f32>), Error>;

/// Reduce on all ranks; the last one calls after the others have returned.
fn reduce(controller: &Controller, job: &str, straggler: Straggler) -> Vec<Called> {
    let [over, ended] = [(); 2].map(|()| Barrier::new(RANKS as usize));
    let rank = |number| {
        let config =
            JoinConfig { transport: Transport::Udp, ..JoinConfig::new(controller.local_addr(), job, number, RANKS) };
        let comm = Communicator::join(config).expect("join");
        let tree = CallOptions { algo: Some(Algo::Tree), ..CallOptions::default() };
        comm.barrier_with(&tree).expect("all are there, and so is a tree");
        if number == LATE {
            over.wait();
        }
        let mut buffer = vec![number as f32; COUNT];
        let options = CallOptions { straggler: Some(straggler), ..tree };
        let called = comm.all_reduce_with(&mut buffer[..], ReduceOp::Sum, &options);
        if number != LATE {
            over.wait();
        }
        // A rank that left early would be lost to the late one.
        ended.wait();
        called.map(|outcome| (outcome, buffer))
    };
    thread::scope(|scope| {
        let rank = &rank;
        let ranks: Vec<_> = (0..RANKS).map(|number| scope.spawn(move || rank(number))).collect();
        ranks.into_iter().map(|rank| rank.join().expect("a rank panicked")).collect()
    })
}

fn main() -> Result<(), Box<dyn std::error::Error>> {
    let listen = std::env::args().nth(1).ok_or("usage: late CONTROLLER")?.parse()?;
    let controller = Controller::start(ControllerConfig { listen, ..ControllerConfig::new() })?;
    stdin().read_line(&mut String::new())?;
    for called in reduce(&controller, "deadline", Straggler::Deadline(LIMIT)) {
        let error = called.expect_err("the last is late");
        assert!(matches!(&error, Error::Stragglers { missing } if missing.iter().eq([Rank(LATE)])), "{error}");
    }
    println!("by a deadline: {RANKS} ranks name rank {LATE}");
    let mut called = reduce(&controller, "partial", Straggler::Partial(LIMIT));
    assert_eq!(called.pop().expect("the last").expect_err("left out"), Error::Excluded);
    let sum: f32 = (0..LATE).map(|rank| rank as f32).sum();
    for called in called {
        let (outcome, buffer) = called?;
        assert!(outcome.missing.iter().eq([Rank(LATE)]) && buffer.iter().all(|&x| x == sum), "{outcome:?}");
    }
    println!("partial: {LATE} ranks have their sum without rank {LATE}");
    Ok(())
}

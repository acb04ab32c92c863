//! Ranks of which the last comes late, through devices of any kind (`tests/boards/run`).
//!
//!     late CONTROLLER     listens there as the controller; the ranks come when a line on stdin says that devices have
//!
//! A limit for stragglers by name fails the operation at all ranks, and names who was missing; a partial one completes it
//! without the last, whose own call then says that it is left out. Exit status 101: something was otherwise.

use std::io::stdin;
use std::sync::Barrier;
use std::thread;
use std::time::Duration;
use sumac::controller::{Controller, ControllerConfig};
use sumac::{Algo, Attach, CallOptions, Communicator, Error, JoinConfig, Outcome, Rank, ReduceOp, Straggler};

const RANKS: u32 = 4;
const LATE: u32 = RANKS - 1;
const COUNT: usize = 3_000;
/// Long beside what a loaded machine keeps a rank from running.
const LIMIT: Duration = Duration::from_secs(1);

/// What a rank's call came to: the outcome and the buffer, which all ranks have filled with their numbers.
type Called = Result<(Outcome, Vec<f32>), Error>;

/// Have all ranks reduce, the last one when the others are done.
fn reduce(controller: &Controller, job: &str, straggler: Straggler) -> Vec<Called> {
    let [over, ended] = [(); 2].map(|()| Barrier::new(RANKS as usize));
    let rank = |number| {
        let config = JoinConfig { attach: Attach::Udp, ..JoinConfig::new(controller.local_addr(), job, number, RANKS) };
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
        // Who leaves is lost to those that come.
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

//! What a call costs beside waiting: a broadcast of 8 B between two ranks of one thread, called or prepared. The root's
//! message is there when the other rank calls, so nobody waits, and every run executes the same instructions.
//!
//! `cargo bench -p sumac --bench calls` prints times; `calls --instructions called|prepared CALLS` is for
//! `tests/bench/instructions`, which counts those of [`Pair::send`] and [`Pair::receive`].

use std::hint::black_box;
use std::process::ExitCode;
use std::thread;
use std::time::Instant;
use sumac::comm::Prepared;
use sumac::controller::{Controller, ControllerConfig};
use sumac::{Algo, CallOptions, Communicator, Dtype, JoinConfig, OpDesc};
use sumac_hal::ids::Rank;
use sumac_hal::shm::Board;

/// Barriers before what is counted: connections are made, shared memory takes over, and all agree on the board.
const WARM_UP: usize = 64;

/// Calls of the root before the other rank's: as many as the board holds.
const AHEAD: usize = Board::ROUNDS_AHEAD as usize;

fn main() -> ExitCode {
    let args: Vec<String> = std::env::args().skip(1).filter(|arg| arg != "--bench").collect();
    let args: Vec<&str> = args.iter().map(String::as_str).collect();
    match args[..] {
        // `cargo bench` passes --bench; `cargo test --benches` does not, and has nothing to check here.
        [] if !std::env::args().any(|arg| arg == "--bench") => {
            println!("nothing measured: run by `cargo bench`, or with --bench");
        }
        [] => table(),
        ["--instructions", kind @ ("called" | "prepared"), calls] => {
            let Ok(calls) = calls.parse() else { return ExitCode::from(2) };
            let ranks = Ranks::join();
            Pair::new(&ranks, kind == "prepared").drive(calls);
        }
        _ => {
            eprintln!("usage: calls [--instructions called|prepared CALLS]");
            return ExitCode::from(2);
        }
    }
    ExitCode::SUCCESS
}

fn table() {
    let ranks = Ranks::join();
    for (name, is_prepared) in [("called", false), ("prepared", true)] {
        let mut pair = Pair::new(&ranks, is_prepared);
        let calls = 100_000;
        let begun = Instant::now();
        pair.drive(calls);
        let ns = begun.elapsed().as_nanos() as f64 / calls as f64;
        println!("broadcast of 8 B between two ranks of one thread, {name}: {ns:.0} ns, both ranks together");
    }
}

/// Two ranks, and the controller of their job.
struct Ranks {
    comms: [Communicator; 2],
    options: CallOptions,
    _controller: Controller,
}

impl Ranks {
    fn join() -> Self {
        let controller = Controller::start(ControllerConfig::new()).expect("a controller on loopback");
        let address = controller.local_addr();
        let join = |rank| thread::spawn(move || Communicator::join(JoinConfig::new(address, "calls", rank, 2)));
        let comms = [join(0), join(1)].map(|join| join.join().expect("no panic").expect("joins"));
        let options = CallOptions { algo: Some(Algo::OneShot), ..CallOptions::default() };
        let ranks = Self { comms, options, _controller: controller };
        // Both at once, because they connect to each other.
        thread::scope(|scope| {
            for comm in &ranks.comms {
                let options = &ranks.options;
                scope.spawn(move || {
                    for _ in 0..WARM_UP {
                        comm.run(&OpDesc::barrier(), &mut [0_u8; 0][..], options).expect("a barrier");
                    }
                });
            }
        });
        ranks
    }
}

/// The operation of both ranks.
struct Pair<'r> {
    ranks: &'r Ranks,
    buffers: [[u8; 8]; 2],
    prepared: Option<[Prepared<Vec<u8>>; 2]>,
}

impl<'r> Pair<'r> {
    fn new(ranks: &'r Ranks, is_prepared: bool) -> Self {
        let prepare = |rank: usize| {
            let buffer = vec![if rank == 0 { 7_u8 } else { 0 }; 8];
            ranks.comms[rank].prepare(&describe(), buffer, None, &ranks.options).expect("possible")
        };
        let mut pair =
            Self { ranks, buffers: [[7; 8], [0; 8]], prepared: is_prepared.then(|| [prepare(0), prepare(1)]) };
        pair.drive(AHEAD);
        pair
    }

    /// Let each rank call so many times, the root first.
    fn drive(&mut self, calls: usize) {
        for first in (0..calls).step_by(AHEAD) {
            let calls = AHEAD.min(calls - first);
            self.send(calls);
            self.receive(calls);
        }
        let received = match &mut self.prepared {
            Some([_, receiver]) => receiver.buffer().map(|buffer| buffer.as_slice()),
            None => Some(&self.buffers[1][..]),
        };
        assert_eq!(received, Some(&[7; 8][..]), "the root's bytes");
    }

    /// The root's calls. Not inlined: the instructions in here are counted.
    #[inline(never)]
    fn send(&mut self, calls: usize) {
        (0..calls).for_each(|_| self.call(0));
    }

    /// The other rank's calls. Not inlined: the instructions in here are counted.
    #[inline(never)]
    fn receive(&mut self, calls: usize) {
        (0..calls).for_each(|_| self.call(1));
    }

    fn call(&mut self, rank: usize) {
        let outcome = match &mut self.prepared {
            Some(prepared) => prepared[rank].run(),
            None => self.ranks.comms[rank].run(&describe(), &mut self.buffers[rank][..], &self.ranks.options),
        };
        black_box(outcome.expect("a broadcast"));
    }
}

fn describe() -> OpDesc {
    OpDesc::broadcast(Dtype::U8, Rank(0), 8)
}

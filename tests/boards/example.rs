//! The board of `firmware/examples/board.rs` serves a job: a controller, that board and two ranks, over real sockets.

#[path = "../../firmware/examples/board.rs"]
mod board;

use std::thread;
use std::time::{Duration, Instant};
use sumac::controller::{Controller, ControllerConfig, status};
use sumac::topo::Fabric;
use sumac::{Algo, CallOptions, Communicator, JoinConfig, ReduceOp, Transport};

const RANKS: u32 = 2;

const FABRIC: &str = r#"
switch = [{ name = "leaf0", aggregation = true }]
host = [{ name = "h0" }, { name = "h1" }]
link = [{ ends = ["h0", "leaf0"] }, { ends = ["h1", "leaf0"] }]
"#;

#[test]
fn example_board_serves_a_job_through_the_tree() {
    let fabric = Some(Fabric::from_toml(FABRIC).expect("a fabric"));
    let controller = Controller::start(ControllerConfig { fabric, ..ControllerConfig::new() }).expect("a controller");
    let addr = controller.local_addr();
    let board = thread::spawn(move || board::run("leaf0", addr).map_err(|error| error.to_string()));
    let until = Instant::now() + Duration::from_secs(30);
    while status(addr).expect("a report").devices.is_empty() {
        assert!(!board.is_finished() && Instant::now() < until, "the board did not register");
        thread::yield_now();
    }
    thread::scope(|scope| {
        for rank in 0..RANKS {
            scope.spawn(move || {
                let host = Some(format!("h{rank}"));
                let config =
                    JoinConfig { host, transport: Transport::Udp, ..JoinConfig::new(addr, "job", rank, RANKS) };
                let comm = Communicator::join(config).expect("join");
                // No other algorithm may stand in for the board.
                let tree = CallOptions { algo: Some(Algo::Tree), ..CallOptions::default() };
                let mut values: Vec<u64> = (0..100_000).map(|index| index * u64::from(rank + 1)).collect();
                let outcome = comm.all_reduce_with(&mut values[..], ReduceOp::Sum, &tree).expect("the tree is there");
                assert_eq!(outcome.path, sumac::Path::Tree);
                assert!(values.iter().zip(0..).all(|(&value, index)| value == 3 * index));
                comm.leave();
            });
        }
    });
    let report = status(addr).expect("a report");
    assert_eq!(report.devices.len(), 1);
    drop(controller);
    assert_eq!(board.join().expect("no panic"), Ok(()), "it ends with its controller");
}

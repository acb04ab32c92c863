//! Jobs whose rank 0 runs the controller.

mod common;

use common::{SUM_LEN, checked_sum};
use std::net::SocketAddr;
use std::sync::Barrier;
use std::sync::atomic::{AtomicU8, Ordering};
use std::thread;
use std::time::{Duration, Instant};
use sumac::comm::{ControllerState, DEFAULT_PORT, Departure};
use sumac::controller::{Controller, ControllerConfig};
use sumac::{Algo, CallOptions, Communicator, Error, JoinConfig, JoinError, Path, ReduceOp};
use sumac_firmware::emulated::{Board, BoardConfig};
use sumac_hal::ctrl::secure::{Key, KeyId};

const RANKS: u32 = 3;

const LONG: Duration = Duration::from_secs(30);

/// How long the others watch the controller while rank 0 leaves.
const WATCHED: Duration = Duration::from_millis(200);

/// Return a loopback address that no other test has.
fn free_addr() -> SocketAddr {
    static NEXT: AtomicU8 = AtomicU8::new(1);
    let [.., high, low] = std::process::id().to_be_bytes();
    SocketAddr::from(([127, NEXT.fetch_add(1, Ordering::Relaxed), high, low], DEFAULT_PORT))
}

/// Run the ranks of a job, the last one first, on one thread each.
fn run<R: Send>(
    configure: impl Fn(&mut JoinConfig) + Sync,
    rank: impl Fn(Communicator) -> R + Sync,
) -> Vec<Result<R, JoinError>> {
    let addr = free_addr();
    let run = |number| {
        let mut config = JoinConfig::new(addr, "embedded", number, RANKS);
        config.embedded_controller = true;
        config.join_timeout = LONG;
        configure(&mut config);
        Communicator::join(config).map(&rank)
    };
    thread::scope(|scope| {
        let ranks: Vec<_> = (0..RANKS).rev().map(|number| scope.spawn(move || run(number))).collect();
        ranks.into_iter().rev().map(|rank| rank.join().expect("a rank panicked")).collect()
    })
}

#[test]
fn ranks_meet_without_a_controller_and_none_misses_it_at_the_end() {
    let key = Key::new(KeyId(7), [9; 32]);
    for key in [None, Some(key)] {
        let is_leaving = Barrier::new(RANKS as usize);
        let departures = run(
            |config| config.key = key.clone(),
            |comm| {
                let outcome = checked_sum(&comm, 1);
                assert_ne!(outcome.path, Path::Tree, "there is no device");
                is_leaving.wait();
                // Rank 0 is the first to leave.
                let begun = Instant::now();
                while comm.rank() > 0 && begun.elapsed() < WATCHED * comm.rank() {
                    assert_eq!(comm.controller(), ControllerState::Connected);
                    thread::yield_now();
                }
                comm.leave_within(LONG)
            },
        );
        assert!(departures.iter().all(|departure| matches!(departure, Ok(Departure::Clean))), "{departures:?}");
    }
}

#[test]
fn device_serves_a_job_with_its_own_controller() {
    let addr = free_addr();
    // It waits for its controller.
    let board = Board::start(BoardConfig { slot_memory_bytes: 16 << 20, ..BoardConfig::new("leaf0", addr) });
    let board = board.expect("a board on loopback");
    let paths = run(
        |config| (config.controller, config.wait_for_tree) = (addr, LONG),
        |comm| {
            assert!(board.wait_registered(LONG));
            let by_tree = CallOptions { algo: Some(Algo::Tree), ..CallOptions::default() };
            let give_up = Instant::now() + LONG;
            for op in 0.. {
                assert!(Instant::now() < give_up, "rank {}: the tree serves no operation", comm.rank());
                // Ranks migrate to the tree at the same call, so all are refused or none.
                checked_sum(&comm, op);
                match comm.all_reduce_with(&mut [1_u32], ReduceOp::Sum, &by_tree) {
                    Ok(_) => break,
                    Err(Error::NotPossible(_)) => {}
                    Err(error) => panic!("{error}"),
                }
            }
            comm.leave_within(LONG)
        },
    );
    assert!(paths.iter().all(|departure| matches!(departure, Ok(Departure::Clean))), "{paths:?}");
}

#[test]
fn part_of_the_job_keeps_the_controller_that_its_parent_has_left() {
    let has_left = Barrier::new(RANKS as usize);
    let sums = run(
        |_| (),
        |comm| {
            let part = comm.split(Some(0), 0).expect("split").expect("all ranks are in it");
            assert_eq!(comm.leave_within(LONG), Departure::Clean);
            has_left.wait();
            assert_eq!(part.controller(), ControllerState::Connected);
            let mut buffer = vec![1_u32; SUM_LEN];
            part.all_reduce(&mut buffer, ReduceOp::Sum).expect("a sum");
            assert_eq!(part.leave_within(LONG), Departure::Clean);
            buffer[SUM_LEN - 1]
        },
    );
    assert!(sums.iter().all(|sum| matches!(sum, Ok(RANKS))), "{sums:?}");
}

#[test]
fn address_that_is_taken_or_open_to_others_is_refused_at_rank_0() {
    let other = Controller::start(ControllerConfig::new()).expect("a controller on loopback");
    for (addr, named) in [(other.local_addr(), "in use"), (SocketAddr::from(([0, 0, 0, 0], 0)), "without keys")] {
        let mut config = JoinConfig::new(addr, "embedded", 0, 1);
        config.embedded_controller = true;
        let error = Communicator::join(config).map(drop).expect_err("refused").to_string();
        assert!(error.contains("cannot start the job's controller") && error.contains(named), "{error}");
    }
}

#[test]
fn survivors_of_the_rank_with_the_controller_get_one_error() {
    let have_summed = Barrier::new(RANKS as usize);
    let results = run(
        |_| (),
        |comm| {
            checked_sum(&comm, 1);
            have_summed.wait();
            if comm.rank() == 0 {
                return None;
            }
            comm.all_reduce(&mut vec![1_u32; SUM_LEN], ReduceOp::Sum).err()
        },
    );
    let errors: Vec<_> = results.into_iter().map(|result| result.expect("joined")).collect();
    let is_named = |error: &Option<Error>| matches!(error, Some(Error::RanksFailed { ranks, .. }) if ranks.iter().map(|rank| rank.0).eq([0]));
    assert!(errors[0].is_none() && errors[1..].iter().all(is_named), "{errors:?}");
}

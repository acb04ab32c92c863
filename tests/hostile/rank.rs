//! A rank of the job that attacks must not affect: it reduces until it receives `stop`, and checks every element.
//!
//!     hostile --rank CONTROLLER JOB RANK WORLD ATTACH tree|schedules
//!
//! Commands on stdin: `count` prints `count ROUNDS IN_TREE RECOVERIES`, or `failed` and the reason; `stop` ends all
//! ranks after the same round. The rank ends with its stdin.

use std::io::stdin;
use std::sync::Mutex;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::thread;
use std::time::Duration;
use sumac::{Algo, CallOptions, Communicator, JoinConfig, Path, ReduceOp};

/// The upper 16 bits of all results, which identify them in memory.
pub(crate) const SECRET_BITS: u64 = 0x5ec2;

/// Elements of an operation: enough for several chunks.
const LEN: usize = 6_000;

/// The interval of rounds that use a host collective, in rounds.
const SCHEDULE_EVERY: u64 = 4;

/// The deadline of calls, shorter than the limit of those that wait for this rank.
const CALL_LIMIT: Duration = Duration::from_secs(10);

static STOPS: AtomicBool = AtomicBool::new(false);
static ROUNDS: AtomicU64 = AtomicU64::new(0);
static IN_TREE: AtomicU64 = AtomicU64::new(0);
static REPAIRED: AtomicU64 = AtomicU64::new(0);
static FAILED: Mutex<Option<String>> = Mutex::new(None);

pub(crate) fn main(args: &[String]) -> Result<(), String> {
    let [controller, job, rank, world, transport, way] = args else { return Err(format!("{args:?}")) };
    let number = |text: &str| text.parse::<u32>().map_err(|error| format!("{text}: {error}"));
    let addr = controller.parse().map_err(|error| format!("{controller}: {error}"))?;
    thread::spawn(answer);
    let mut config = JoinConfig::new(addr, job.as_str(), number(rank)?, number(world)?);
    config.transport = transport.parse().map_err(|error| format!("{error}"))?;
    (config.deadline, config.join_timeout) = (CALL_LIMIT, CALL_LIMIT);
    let worked = Communicator::join(config).map_err(|error| format!("join: {error}")).and_then(|comm| {
        work(&comm, way == "schedules")?;
        comm.leave();
        Ok(())
    });
    let Err(error) = worked else { return Ok(()) };
    eprintln!("{error}");
    *FAILED.lock().expect("no panic") = Some(error.clone());
    // Keep answering until stdin ends.
    while !STOPS.load(Ordering::SeqCst) {
        thread::park();
    }
    Err(error)
}

/// Serve commands on stdin until its end.
fn answer() {
    for line in stdin().lines().map_while(Result::ok) {
        let failed = FAILED.lock().expect("no panic").clone();
        let load = |counter: &AtomicU64| counter.load(Ordering::SeqCst);
        match (&line[..], failed) {
            ("stop", Some(_)) => std::process::exit(1),
            ("stop", None) => STOPS.store(true, Ordering::SeqCst),
            (_, Some(error)) => println!("failed {}", error.replace('\n', " ")),
            _ => println!("count {} {} {}", load(&ROUNDS), load(&IN_TREE), load(&REPAIRED)),
        }
    }
    std::process::exit(3);
}

fn work(comm: &Communicator, schedules: bool) -> Result<(), String> {
    let (ranks, rank) = (u64::from(comm.size()), u64::from(comm.rank()));
    let mut buffer = comm.alloc::<u64>(LEN).map_err(|error| format!("memory: {error}"))?;
    let by_schedule = CallOptions { algo: Some(Algo::RecursiveDoubling), ..CallOptions::default() };
    let mut was_in_tree = false;
    for round in 0.. {
        let secret = if rank == 0 { SECRET_BITS << 48 } else { 0 };
        buffer.iter_mut().zip(0_u64..).for_each(|(value, index)| *value = secret + round * index + rank);
        buffer[0] = (rank == 0 && STOPS.load(Ordering::SeqCst)).into();
        let failed = |error| format!("round {round}: {error}");
        let outcome = comm.all_reduce(&mut buffer, ReduceOp::Sum).map_err(failed)?;
        let sum = |index: u64| (SECRET_BITS << 48) + ranks * round * index + ranks * (ranks - 1) / 2;
        if let Some((index, value)) = (0..).zip(buffer.iter()).skip(1).find(|&(index, &value)| value != sum(index)) {
            return Err(format!("round {round}: element {index} is {value:#x}, not {:#x}", sum(index)));
        }
        if schedules && round % SCHEDULE_EVERY == 0 {
            let mut most = [round + rank; 100];
            comm.all_reduce_with(&mut most, ReduceOp::Max, &by_schedule).map_err(failed)?;
            if most != [round + ranks - 1; 100] {
                return Err(format!("round {round}: {} is not the maximum", most[0]));
            }
        }
        ROUNDS.fetch_add(1, Ordering::SeqCst);
        // What was lost between two rounds shows only by the path.
        let is_in_tree = outcome.path == Path::Tree;
        let is_repaired = outcome.recovered || was_in_tree && !is_in_tree;
        was_in_tree = is_in_tree;
        IN_TREE.fetch_add((is_in_tree && !outcome.recovered).into(), Ordering::SeqCst);
        REPAIRED.fetch_add(is_repaired.into(), Ordering::SeqCst);
        if buffer[0] > 0 {
            return Ok(());
        }
    }
    Ok(())
}

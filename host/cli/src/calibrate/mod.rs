//! `sumac calibrate`: measures every algorithm of a cluster in turns, and fits the cost table that selection uses.
//!
//! Where a launcher has started the command as a rank, the ranks measure on their cluster ([`launched`]): all of them
//! together, then half of them, and so on. Otherwise clusters of emulated devices are started on this machine, one
//! after the other ([`here`]).
//!
//! Times that were measured minutes apart differ by more than algorithms do. So all algorithms of a size take turns,
//! and the figure of each is the median over the turns.
//!
//! Invariant: the table is written at the end, as a whole, or not at all.

mod args;
mod here;
mod launched;
mod output;

pub(crate) use args::{CalibrateArgs, HELP};

use crate::costs;
use crate::exit::Failure;
use crate::job::{Case, Report, Turns};
use crate::options::Algo;
use crate::stats;
use anyhow::anyhow;
use sumac::comm::launcher;
use sumac::schedule::ALGORITHMS;
use sumac::select::{JobFacts, Sample};

/// Calibrate, or check a table.
pub(crate) fn run(args: &CalibrateArgs, verbose: u8) -> Result<(), Failure> {
    let checked = args.check.as_deref().map(costs::read).transpose().map_err(Failure::Input)?;
    let groups = args.groups(checked.is_some()).map_err(Failure::Input)?;
    let reading = launcher::from_env();
    if reading.is_rank() && !args.is_local() {
        return launched::run(args, &groups, checked.as_ref());
    }
    let jobs = here::measure(args, &groups, verbose)?;
    output::finish(args, &jobs, checked.as_ref())
}

/// What was measured of a job.
#[derive(Debug)]
struct MeasuredJob {
    facts: JobFacts,
    /// By group of cases: the median time of each case that was possible.
    cells: Vec<Vec<Cell>>,
}

/// The time of an algorithm.
#[derive(Debug)]
struct Cell {
    case: Case,
    sample: Sample,
}

/// The cases that take turns: one operation by every algorithm that the collective has.
fn turns(args: &CalibrateArgs, case: Case, with_auto: bool) -> Turns {
    let has = |algo: &Algo| match algo {
        Algo::Auto => with_auto,
        Algo::Tree => case.collective.is_offloadable(),
        algo => ALGORITHMS
            .iter()
            .any(|known| known.pattern.collective() == case.collective && known.path().name() == algo.name()),
    };
    let cases = Algo::ALL.into_iter().filter(has).map(|algo| Case { algo, ..case }).collect();
    // Short operations need more of them for a stable median, and more turns: in each, the system's scheduler has
    // placed the processes in another way.
    let often = (BYTES_PER_TURN / case.size_bytes().max(1)).max(1);
    let (iterations, turns) = (often.min(ITERATIONS_MAX), (often / ITERATIONS_MAX).clamp(1, TURNS_MAX));
    let [iterations, turns] = [iterations, turns].map(|often| u32::try_from(often).unwrap_or(1));
    Turns { cases, rounds: args.rounds * turns, iterations }
}

/// About how many bytes an algorithm reduces in one turn, within the limit of iterations.
const BYTES_PER_TURN: u64 = 8 << 20;

/// The most iterations of a turn.
const ITERATIONS_MAX: u64 = 16;

/// The most turns in the place of one.
const TURNS_MAX: u64 = 4;

/// Combine the ranks' reports of a case. `None` if its algorithm is not possible.
fn cell(case: Case, facts: &JobFacts, reports: Vec<Report>) -> Result<Option<Cell>, Failure> {
    let (mut times, mut path) = (Vec::new(), None);
    for report in reports {
        match report {
            Report::Measured(measured) => {
                if measured.wrong > 0 {
                    let (algo, bytes) = (case.algo, case.size_bytes());
                    return Err(Failure::Run(anyhow!(
                        "{} elements of {bytes} bytes by {algo} are wrong",
                        measured.wrong
                    )));
                }
                path = measured.path;
                times.push(measured.times_ns);
            }
            Report::NotPossible { .. } => return Ok(None),
            other => return Err(Failure::Run(anyhow!("unexpected report of a rank: {other:?}"))),
        }
    }
    let seconds = stats::median_ns(&stats::slowest_ns(&times)) / 1e9;
    let Some(path) = path.filter(|_| seconds > 0.0) else { return Ok(None) };
    Ok(Some(Cell { case, sample: Sample { facts: facts.clone(), desc: case.desc(), path, seconds } }))
}

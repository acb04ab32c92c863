//! `sumac rank` (hidden): one rank, told by its supervisor what to do.
//!
//! In the timed part of an iteration there is the operation and nothing else: no allocation, no output, no filling and
//! no checking. Every iteration starts after a barrier, so that the time is the operation's and not that of waiting for
//! a rank that is still checking its last result.

use crate::collective;
use crate::exit::Failure;
use crate::job::{Case, Measured, RankJob, Report, Work};
use crate::perf::Explained;
use crate::workload::{MemoryKind, Workload};
use anyhow::{Context, anyhow};
use rustix::time::{ClockId, clock_gettime};
use std::io::{self, Write};
use std::time::{Duration, Instant};
use sumac::choice::Attached;
use sumac::{Algo, Attach, CallOptions, Communicator, JoinConfig, Outcome};
use sumac_hal::op::OpDesc;

/// Read the job from stdin, do it, and report on stdout.
pub(crate) fn run() -> Result<(), Failure> {
    let mut line = String::new();
    io::stdin().read_line(&mut line)?;
    let job: RankJob = serde_json::from_str(&line)
        .context("stdin holds no job for a rank; `sumac perf`, `sumac all-reduce` and the like start ranks")
        .map_err(Failure::Input)?;
    let mut config = JoinConfig::new(job.controller, job.job.as_str(), job.rank, job.world);
    config.host = Some(job.host.clone());
    config.order = job.order.unwrap_or(config.order);
    config.attach = job.attach;
    config.deadline = Duration::from_millis(job.deadline_ms);
    let communicator = Communicator::join(config).map_err(Failure::run)?;
    report(&Report::Joined { attached: attached(&job, &communicator)? })?;
    match &job.work {
        Work::Perf { cases, warmup, iterations, memory } => {
            let mut bench = Bench::new(&communicator, (*warmup, *iterations), *memory);
            for case in cases {
                report(&bench.measure(case)?)?;
            }
        }
        Work::Explain { cases } => {
            for case in cases {
                let explanation = communicator.explain(&case.desc(), case.algo);
                report(&Report::Explained(Explained::new(case, &explanation)))?;
            }
        }
        Work::Files(work) => report(&collective::run_rank(&communicator, work)?)?,
    }
    communicator.leave();
    Ok(())
}

/// Return how the ranks reach their tree, if there is one. Fails where this one insists on shared memory and there is
/// none: what is done instead would not be what was asked for. Explaining does nothing else.
fn attached(job: &RankJob, communicator: &Communicator) -> Result<Option<Attached>, Failure> {
    let explanation = communicator.explain(&OpDesc::barrier(), Algo::Tree);
    let insists = job.attach == Attach::Shm && !matches!(job.work, Work::Explain { .. });
    match explanation.refusal() {
        Some(why) if insists => Err(Failure::Run(anyhow!("--attach shm: {why}"))),
        _ => Ok(explanation.attached),
    }
}

/// What stays from case to case.
#[derive(Debug)]
struct Bench<'a> {
    communicator: &'a Communicator,
    warmup: u32,
    iterations: u32,
    memory: MemoryKind,
    /// Counts on over all cases, so that no case's values are an earlier one's.
    iteration: u64,
    /// The buffers of an operation, which its next algorithm takes over.
    workload: Option<(OpDesc, Workload)>,
}

impl<'a> Bench<'a> {
    fn new(communicator: &'a Communicator, (warmup, iterations): (u32, u32), memory: MemoryKind) -> Self {
        Self { communicator, warmup, iterations, memory, iteration: 0, workload: None }
    }

    /// Measure a case: every iteration is checked, those after the warm-up count.
    fn measure(&mut self, case: &Case) -> Result<Report, Failure> {
        let desc = case.desc();
        usize::try_from(case.size_bytes()).map_err(Failure::run)?;
        let workload = match self.workload.take().filter(|(known, _)| *known == desc) {
            Some((_, workload)) => workload,
            None => Workload::new(desc, self.communicator, self.memory).map_err(|error| failed(case, &error))?,
        };
        let (_, workload) = self.workload.insert((desc, workload));
        let options = CallOptions { algo: Some(case.algo), ..CallOptions::default() };
        let mut sum = Measured {
            times_ns: Vec::with_capacity(self.iterations as usize),
            wrong: 0,
            path: None,
            fallback: None,
            wire_bytes: 0,
            cpu_ns: 0,
            retransmits: 0,
            repaired: false,
        };
        for nth in 0..u64::from(self.warmup) + u64::from(self.iterations) {
            self.iteration += 1;
            workload.fill(self.iteration);
            self.communicator.barrier().map_err(|error| failed(case, &error))?;
            let cpu_before = cpu_time();
            let start = Instant::now();
            let outcome = workload.run(self.communicator, &options);
            let time = start.elapsed();
            let cpu = cpu_time().saturating_sub(cpu_before);
            let outcome = match outcome {
                Ok(outcome) => outcome,
                // Nothing was started, at no rank.
                Err(sumac::Error::NotPossible(why)) => return Ok(Report::NotPossible { why: why.to_string() }),
                Err(error) => return Err(failed(case, &error)),
            };
            // Nobody's check takes a core from a rank that is still being timed.
            self.communicator.barrier().map_err(|error| failed(case, &error))?;
            sum.wrong += workload.wrong(self.iteration);
            if nth >= u64::from(self.warmup) {
                sum.times_ns.push(u64::try_from(time.as_nanos()).unwrap_or(u64::MAX));
                sum.cpu_ns += u64::try_from(cpu.as_nanos()).unwrap_or(u64::MAX);
                add(&mut sum, outcome);
            }
        }
        Ok(Report::Measured(sum))
    }
}

fn add(sum: &mut Measured, outcome: Outcome) {
    sum.path = Some(outcome.path);
    sum.fallback = sum.fallback.take().or(outcome.fallback);
    sum.wire_bytes += outcome.wire_bytes;
    sum.retransmits += outcome.retransmits;
    sum.repaired |= outcome.repaired;
}

fn failed(case: &Case, error: &sumac::Error) -> Failure {
    Failure::Run(anyhow!("{} of {} bytes by {}: {error}", case.collective, case.size_bytes(), case.algo))
}

/// Return the processor time that this process has used, user and system, all threads.
fn cpu_time() -> Duration {
    let time = clock_gettime(ClockId::ProcessCPUTime);
    Duration::new(time.tv_sec.unsigned_abs(), u32::try_from(time.tv_nsec).unwrap_or(0))
}

fn report(report: &Report) -> Result<(), Failure> {
    let mut out = io::stdout().lock();
    serde_json::to_writer(&mut out, report).map_err(Failure::run)?;
    writeln!(out)?;
    Ok(out.flush()?)
}

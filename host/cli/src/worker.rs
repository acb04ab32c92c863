//! `sumac rank` (hidden): one rank, told by its supervisor what to do.
//!
//! In the timed part of an iteration there is the operation and nothing else: no allocation, no output, no filling and
//! no checking. Every iteration starts after a barrier, so that the time is the operation's and not that of waiting for
//! a rank that is still checking its last result.

use crate::collective;
use crate::exit::Failure;
use crate::job::{Case, Measured, RankJob, Repair, Report, Work};
use crate::perf::Explained;
use crate::stats;
use crate::workload::{Check, MemoryKind, Workload};
use anyhow::{Context, anyhow};
use rustix::time::{ClockId, clock_gettime};
use std::io::{self, Write};
use std::time::{Duration, Instant};
use sumac::select::Attached;
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
    config.verbs = job.verbs.clone();
    config.deadline = Duration::from_millis(job.deadline_ms);
    let communicator = Communicator::join(config).map_err(Failure::run)?;
    report(&Report::Joined { attached: attached(&job, &communicator)? })?;
    match &job.work {
        &Work::Perf { ref cases, warmup, iterations, memory, check, announced } => {
            let (iteration, workload) = (0, None);
            let communicator = &communicator;
            let mut bench = Bench { communicator, warmup, iterations, check, announced, memory, iteration, workload };
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

/// Return how the ranks reach their tree, if there is one. Fails where this one insists on shared memory or RDMA and there
/// is no tree: what is done instead would not be what was asked for. Explaining does nothing else.
fn attached(job: &RankJob, communicator: &Communicator) -> Result<Option<Attached>, Failure> {
    let explanation = communicator.explain(&OpDesc::barrier(), Algo::Tree);
    let insists =
        matches!(job.attach, Attach::Shm | Attach::Verbs | Attach::Rdma) && !matches!(job.work, Work::Explain { .. });
    match explanation.refusal() {
        Some(why) if insists => Err(Failure::Run(anyhow!("--attach {}: {why}", job.attach))),
        _ => Ok(explanation.attached),
    }
}

/// What stays from case to case.
#[derive(Debug)]
struct Bench<'a> {
    communicator: &'a Communicator,
    warmup: u32,
    iterations: u32,
    check: Check,
    /// The measured iteration whose beginning is reported, and whose end waits for the supervisor.
    announced: Option<u32>,
    memory: MemoryKind,
    /// Counts on over all cases, so that no case's values are an earlier one's.
    iteration: u64,
    /// The buffers of an operation, which its next algorithm takes over.
    workload: Option<(OpDesc, Workload)>,
}

impl Bench<'_> {
    /// Measure a case: those iterations count that come after the warm-up.
    fn measure(&mut self, case: &Case) -> Result<Report, Failure> {
        let desc = case.desc();
        usize::try_from(case.size_bytes()).map_err(Failure::run)?;
        let mut workload = match self.workload.take().filter(|(known, _)| *known == desc) {
            Some((_, workload)) => workload,
            None => Workload::new(desc, self.communicator, self.memory).map_err(|error| failed(case, &error))?,
        };
        let options = CallOptions { algo: Some(case.algo), ..CallOptions::default() };
        let mut sum = Measured {
            times_ns: Vec::with_capacity(self.iterations as usize),
            wrong: 0,
            path: None,
            fallback: None,
            wire_bytes: 0,
            cpu_ns: 0,
            retransmits: 0,
            repair: None,
            repairs: 0,
            repairs_ns: 0,
            repair_bytes: 0,
            slowest: None,
        };
        let before = self.communicator.repairs();
        let outcome = match self.check {
            Check::Every => self.each_checked(&mut workload, &options, &mut sum),
            Check::Ends => self.back_to_back(&mut workload, &options, &mut sum),
        };
        let after = self.communicator.repairs();
        sum.repairs = after.count - before.count;
        sum.repairs_ns = nanos(after.time - before.time);
        sum.repair_bytes = after.bytes - before.bytes;
        self.workload = Some((desc, workload));
        match outcome {
            Ok(()) => Ok(Report::Measured(sum)),
            // Nothing was started, at no rank.
            Err(sumac::Error::NotPossible(why)) => Ok(Report::NotPossible { why: why.to_string() }),
            Err(error) => Err(failed(case, &error)),
        }
    }

    /// Run iterations in values of their own.
    fn each_checked(
        &mut self,
        workload: &mut Workload,
        options: &CallOptions,
        sum: &mut Measured,
    ) -> Result<(), sumac::Error> {
        for nth in 0..u64::from(self.warmup) + u64::from(self.iterations) {
            let counted = nth >= u64::from(self.warmup);
            let wrong = self.checked(workload, options, counted.then_some(&mut *sum))?;
            sum.wrong += wrong;
        }
        Ok(())
    }

    /// Run iterations that have nothing but a barrier between them.
    fn back_to_back(
        &mut self,
        workload: &mut Workload,
        options: &CallOptions,
        sum: &mut Measured,
    ) -> Result<(), sumac::Error> {
        sum.wrong += self.checked(workload, options, None)?;
        workload.clear();
        for _ in 0..self.warmup {
            self.timed(workload, options, None)?;
        }
        for _ in 0..self.iterations {
            self.timed(workload, options, Some(sum))?;
        }
        self.communicator.barrier()?;
        sum.wrong += workload.not_clear();
        sum.wrong += self.checked(workload, options, None)?;
        Ok(())
    }

    /// Run an iteration in new values, and return how many elements came out wrong.
    fn checked(
        &mut self,
        workload: &mut Workload,
        options: &CallOptions,
        mut sum: Option<&mut Measured>,
    ) -> Result<u64, sumac::Error> {
        self.iteration += 1;
        workload.fill(self.iteration);
        let iteration = sum.as_deref().map_or(0, Measured::iteration);
        self.timed(workload, options, sum.as_deref_mut())?;
        // Nobody's check takes a core from a rank that is still being timed.
        self.barrier(sum, iteration)?;
        Ok(workload.wrong(self.iteration))
    }

    /// Run the operation when all ranks are ready for it.
    fn timed(
        &self,
        workload: &mut Workload,
        options: &CallOptions,
        mut sum: Option<&mut Measured>,
    ) -> Result<(), sumac::Error> {
        let iteration = sum.as_deref().map_or(0, Measured::iteration);
        self.barrier(sum.as_deref_mut(), iteration)?;
        let is_announced = sum.is_some() && self.announced == Some(iteration);
        if let Some(sum) = sum.as_deref().filter(|_| is_announced) {
            let (at_ns, usual_ns) = (now_ns(), stats::median_ns(&sum.times_ns) as u64);
            // Where nobody listens any more, the supervisor has ended, and this process ends, too.
            let _ = report(&Report::Begins { at_ns, usual_ns });
        }
        let cpu_before = cpu_time();
        let start = Instant::now();
        let outcome = workload.run(self.communicator, options);
        let time = start.elapsed();
        let cpu = cpu_time().saturating_sub(cpu_before);
        let outcome = outcome?;
        if let Some(sum) = sum.as_deref_mut() {
            if outcome.repaired {
                sum.repair = Some(Repair { iteration, in_barrier: false, time_ns: nanos(time) });
            }
            sum.times_ns.push(nanos(time));
            sum.cpu_ns += nanos(cpu);
            add(sum, outcome);
        }
        if is_announced {
            // Whatever comes, the supervisor does nothing more to this row; and what it did is noticed here at the latest.
            let _ = io::stdin().read_line(&mut String::new());
            self.barrier(sum, iteration)?;
        }
        Ok(())
    }

    /// Wait for all ranks, before or after an iteration. No figure of a row counts this, but that something was repaired
    /// here.
    fn barrier(&self, sum: Option<&mut Measured>, iteration: u32) -> Result<(), sumac::Error> {
        let start = Instant::now();
        let outcome = self.communicator.barrier()?;
        if let Some(sum) = sum
            && outcome.repaired
        {
            let time_ns = nanos(start.elapsed());
            sum.repair = Some(Repair { iteration, in_barrier: true, time_ns });
        }
        Ok(())
    }
}

impl Measured {
    /// Return the number of the iteration that is measured next, or now.
    fn iteration(&self) -> u32 {
        u32::try_from(self.times_ns.len()).unwrap_or(u32::MAX)
    }
}

fn nanos(time: Duration) -> u64 {
    u64::try_from(time.as_nanos()).unwrap_or(u64::MAX)
}

fn add(sum: &mut Measured, outcome: Outcome) {
    sum.path = Some(outcome.path);
    sum.fallback = sum.fallback.take().or(outcome.fallback);
    sum.wire_bytes += outcome.wire_bytes;
    sum.retransmits += outcome.retransmits;
    let slowest = outcome.slowest.map(|slowest| (slowest.rank.0, slowest.late_us));
    sum.slowest = sum.slowest.into_iter().chain(slowest).max_by_key(|(_, late_us)| *late_us);
}

fn failed(case: &Case, error: &sumac::Error) -> Failure {
    Failure::Run(anyhow!("{} of {} bytes by {}: {error}", case.collective, case.size_bytes(), case.algo))
}

/// Return the processor time that this process has used, user and system, all threads.
fn cpu_time() -> Duration {
    let time = clock_gettime(ClockId::ProcessCPUTime);
    Duration::new(time.tv_sec.unsigned_abs(), u32::try_from(time.tv_nsec).unwrap_or(0))
}

/// Return the clock that all processes of this machine share.
pub(crate) fn now_ns() -> u64 {
    let now = clock_gettime(ClockId::Monotonic);
    nanos(Duration::new(now.tv_sec.unsigned_abs(), u32::try_from(now.tv_nsec).unwrap_or(0)))
}

fn report(report: &Report) -> Result<(), Failure> {
    let mut out = io::stdout().lock();
    serde_json::to_writer(&mut out, report).map_err(Failure::run)?;
    writeln!(out)?;
    Ok(out.flush()?)
}

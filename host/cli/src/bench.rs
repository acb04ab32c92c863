//! Measuring operations at one rank.
//!
//! The timed part of an iteration contains nothing but the operation: no allocation, output, filling or checking. Every
//! iteration starts after a barrier, so the time does not include waiting for a rank that is still checking its
//! previous result.

use crate::exit::Failure;
use crate::job::{Case, Measured, Recovery, Report, Turns, now_ns, report};
use crate::stats;
use crate::workload::{Check, Placement, Placements, Workload};
use anyhow::anyhow;
use rustix::time::{ClockId, clock_gettime};
use std::io;
use std::time::{Duration, Instant};
use sumac::select::TreeTransport;
use sumac::{Algo, CallOptions, Communicator, MemoryKind, Outcome, Transport};
use sumac_hal::op::{Collective, OpDesc};

/// Return the transport to the tree, if there is one.
///
/// A transport that was requested explicitly and is unavailable is an error if it is required.
pub(crate) fn tree_transport(
    requested: Transport,
    is_required: bool,
    communicator: &Communicator,
) -> Result<Option<TreeTransport>, Failure> {
    let explanation = communicator.explain(&OpDesc::barrier(), Algo::Tree);
    let is_explicit = matches!(requested, Transport::Shm | Transport::Verbs | Transport::Rdma);
    match explanation.refusal() {
        Some(why) if is_required && is_explicit => Err(Failure::Run(anyhow!("--transport {requested}: {why}"))),
        _ => Ok(explanation.transport),
    }
}

/// Measure cases of one operation in turns, and return a report for each. Results are checked before and after the
/// first turn.
pub(crate) fn measure_in_turns(
    communicator: &Communicator,
    memory: MemoryKind,
    turns: &Turns,
) -> Result<Vec<Report>, Failure> {
    let mut bench = Bench {
        communicator,
        warmup: 1,
        iterations: turns.iterations,
        check: Check::Ends,
        placements: Placements::InPlace,
        announced: None,
        memory,
        iteration: 0,
        workload: None,
    };
    let placement = |case: &Case| bench_placement(case.collective);
    let mut reports =
        turns.cases.iter().map(|case| bench.measure(case, placement(case))).collect::<Result<Vec<_>, _>>()?;
    for _ in 1..turns.rounds {
        for (case, report) in turns.cases.iter().zip(&mut reports) {
            if let Report::Measured(measured) = report {
                bench.repeat(case, measured)?;
            }
        }
    }
    Ok(reports)
}

/// The state that is kept from case to case.
#[derive(Debug)]
pub(crate) struct Bench<'a> {
    pub(crate) communicator: &'a Communicator,
    pub(crate) warmup: u32,
    pub(crate) iterations: u32,
    pub(crate) check: Check,
    pub(crate) placements: Placements,
    /// The measured iteration whose start is reported and after which the rank waits for its supervisor.
    pub(crate) announced: Option<u32>,
    pub(crate) memory: MemoryKind,
    /// Counts over all cases, so that no case repeats the values of an earlier one.
    pub(crate) iteration: u64,
    /// The buffers of the previous case, reused if the next one differs only in its algorithm.
    pub(crate) workload: Option<(OpDesc, Workload)>,
}

/// Where buffers lie in a calibration: in place, as gradients are reduced, unless the collective has no such form.
fn bench_placement(collective: Collective) -> Placement {
    Placements::InPlace.of(collective).first().copied().unwrap_or(Placement::InPlace)
}

impl Bench<'_> {
    /// Measure the case again whose operation was measured last, without checks.
    fn repeat(&mut self, case: &Case, sum: &mut Measured) -> Result<(), Failure> {
        let Some((desc, mut workload)) = self.workload.take() else { return Ok(()) };
        let options = CallOptions { algo: Some(case.algo), ..CallOptions::default() };
        workload.clear();
        let outcome = (0..self.iterations).try_for_each(|_| self.timed(&mut workload, &options, Some(&mut *sum)));
        self.workload = Some((desc, workload));
        outcome.map_err(|error| failed(case, &error))
    }

    /// Measure a case. The warm-up does not count.
    pub(crate) fn measure(&mut self, case: &Case, placement: Placement) -> Result<Report, Failure> {
        let desc = case.desc();
        usize::try_from(case.size_bytes()).map_err(Failure::run)?;
        let mut workload = match self.workload.take().filter(|(known, _)| *known == desc) {
            Some((_, workload)) => workload,
            None => {
                let out_of_place = self.placements.of(case.collective).contains(&Placement::OutOfPlace);
                Workload::new(desc, self.communicator, self.memory, out_of_place)
                    .map_err(|error| failed(case, &error))?
            }
        };
        workload.place(placement);
        let options = CallOptions { algo: Some(case.algo), ..CallOptions::default() };
        let mut sum = Measured {
            times_ns: Vec::with_capacity(self.iterations as usize),
            wrong: 0,
            path: None,
            trees: None,
            fallback: None,
            wire_bytes: 0,
            cpu_ns: 0,
            retransmits: 0,
            recovery: None,
            recoveries: 0,
            recoveries_ns: 0,
            repair_bytes: 0,
            slowest: None,
        };
        let before = self.communicator.recoveries();
        let outcome = match self.check {
            Check::Every => self.each_checked(&mut workload, &options, &mut sum),
            Check::Ends => self.back_to_back(&mut workload, &options, &mut sum),
        };
        let outcome = outcome.and_then(|()| self.measure_cpu(&mut workload, &options, &mut sum));
        let after = self.communicator.recoveries();
        sum.recoveries = after.count - before.count;
        sum.recoveries_ns = nanos(after.time - before.time);
        sum.repair_bytes = after.bytes - before.bytes;
        self.workload = Some((desc, workload));
        match outcome {
            Ok(()) => Ok(Report::Measured(sum)),
            // Nothing was started on any rank.
            Err(sumac::Error::NotPossible(why)) => Ok(Report::NotPossible { why: why.to_string() }),
            Err(error) => Err(failed(case, &error)),
        }
    }

    /// Run every iteration with values of its own and check it.
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

    /// Run iterations with nothing but a barrier between them, and check one operation before and one after.
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

    /// Measure the processor time of further iterations: reading its clock is a system call, which short operations
    /// that are timed would feel, most of all where ranks share a core.
    fn measure_cpu(
        &mut self,
        workload: &mut Workload,
        options: &CallOptions,
        sum: &mut Measured,
    ) -> Result<(), sumac::Error> {
        workload.clear();
        let iterations = (self.iterations / 4).max(1);
        let mut used = Duration::ZERO;
        for _ in 0..iterations {
            self.communicator.barrier()?;
            let before = cpu_time();
            workload.run(self.communicator, options)?;
            used += cpu_time().saturating_sub(before);
        }
        sum.cpu_ns = nanos(used / iterations).saturating_mul(self.iterations.into());
        Ok(())
    }

    /// Run an iteration with new values and return the number of wrong elements.
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
        // Wait for all ranks, so that no check takes a core from a rank that is still being timed.
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
            // If nobody reads the report, the supervisor has ended, and this process ends with it.
            let _ = report(&Report::Begins { at_ns, usual_ns });
        }
        let start = Instant::now();
        let outcome = workload.run(self.communicator, options);
        let time = start.elapsed();
        let outcome = outcome?;
        if let Some(sum) = sum.as_deref_mut() {
            if outcome.recovered {
                sum.recovery = Some(Recovery { iteration, in_barrier: false, time_ns: nanos(time) });
            }
            sum.times_ns.push(nanos(time));
            add(sum, outcome);
        }
        if is_announced {
            // Whatever the line says, the fault has been injected; the barrier detects it at the latest.
            let _ = io::stdin().read_line(&mut String::new());
            self.barrier(sum, iteration)?;
        }
        Ok(())
    }

    /// Wait for all ranks before or after an iteration. Of this call, a row counts nothing but a recovery.
    fn barrier(&self, sum: Option<&mut Measured>, iteration: u32) -> Result<(), sumac::Error> {
        let start = Instant::now();
        let outcome = self.communicator.barrier()?;
        if let Some(sum) = sum
            && outcome.recovered
        {
            let time_ns = nanos(start.elapsed());
            sum.recovery = Some(Recovery { iteration, in_barrier: true, time_ns });
        }
        Ok(())
    }
}

impl Measured {
    /// Return the number of the iteration that is being measured, or that is next.
    fn iteration(&self) -> u32 {
        u32::try_from(self.times_ns.len()).unwrap_or(u32::MAX)
    }
}

fn nanos(time: Duration) -> u64 {
    u64::try_from(time.as_nanos()).unwrap_or(u64::MAX)
}

fn add(sum: &mut Measured, outcome: Outcome) {
    sum.path = Some(outcome.path);
    sum.trees = sum.trees.into_iter().chain([outcome.trees]).min();
    sum.fallback = sum.fallback.take().or(outcome.fallback.map(|why| why.to_string()));
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

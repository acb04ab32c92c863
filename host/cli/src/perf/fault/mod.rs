//! `sumac perf --fault`: inject a fault into the live cluster in the middle of an operation of each row.
//!
//! The ranks of each row are processes and a job of their own, while controller and devices outlive the row. The ranks
//! report the start of the iteration in the middle of the row and the usual time of the iterations before it. The
//! fault's moment is drawn from that time span. Ranks whose operation was faster wait until the fault has been
//! injected. Killed processes are restarted before the next row.
//!
//! While there is a tree, every operation that can use it does: the controller prefers the tree, and rows of `tree` run
//! as `auto`, because a rank that requires the tree could not continue without it. In rows of a host collective, only
//! the barriers use the tree.
//!
//! Invariant: processes that are killed here may end; the end of any other process fails the run.

use super::args::PerfArgs;
use super::output::Output;
use super::relay::Link;
use super::row::Measurement;
use super::{JOIN_LIMIT, JobOf, Reports, case_limit, joined, measured, start_ranks};
use crate::cluster::{
    self, ChildId, ClusterConfig, LISTENING, Limit, Preference, READY, START_LIMIT, Started, Supervisor,
    controller_addr, describe_controller, spawn_controller, start_controller, start_device,
};
use crate::exit::Failure;
use crate::job::{Case, Measured, Report, now_ns};
use crate::options::Algo;
use crate::stats;
use anyhow::{Context, anyhow};
use clap::ValueEnum;
use std::hash::{BuildHasher, RandomState};
use std::thread;
use std::time::{Duration, Instant};
use sumac::controller::{ControllerAddr, status};

/// How often to ask a restarted controller for its devices and jobs.
const POLL_INTERVAL: Duration = Duration::from_millis(20);

/// A fault to inject.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub(crate) enum Fault {
    /// Kill the leaf device of rank 0; restart it before the next row
    KillDevice,
    /// Kill the leaf device of rank 0 and restart it at once under the same name
    RestartDevice,
    /// Drop all packets between rank 0 and its leaf device from then on; implies --transport udp and a relay in front
    /// of that device
    CutLink,
    /// Kill the controller; restart it on the same port before the next row
    KillController,
    /// Kill the controller and restart it at once; the row reports when the ranks had restored its job
    RestartController,
    /// Kill the last rank; the others fail, their errors are printed, and the exit status is 1
    KillRank,
}

/// A running cluster and the fault to inject into it.
struct FaultyCluster<'a> {
    args: &'a PerfArgs,
    fault: Fault,
    config: ClusterConfig<'a>,
    supervisor: Supervisor,
    started: Started,
    /// The index of the leaf device of rank 0.
    leaf: usize,
    /// The proxies in front of devices, the leaf's among them if its link is to be cut.
    links: &'a [Link],
    /// Whether a process has been killed that the next row needs.
    needs_restart: bool,
}

/// When the fault is injected.
#[derive(Debug, Clone, Copy)]
struct Moment {
    /// The time on the clock that the ranks report, in nanoseconds.
    at_ns: u64,
    /// The usual time of an operation.
    usual_ns: u64,
    /// How much of the usual time has passed, in percent.
    percent: u64,
}

/// Run all rows and inject one fault into each.
pub(super) fn measure(
    args: &PerfArgs,
    (fault, links): (Fault, &[Link]),
    cases: &[Case],
    config: ClusterConfig<'_>,
    mut supervisor: Supervisor,
    output: &mut Output<'_>,
) -> Result<(), Failure> {
    let leaf = config.layout.leaves.first().copied().unwrap_or(0);
    let config = ClusterConfig { preference: Preference::Tree, ..config };
    let started = cluster::start(&mut supervisor, &config)?;
    let mut cluster = FaultyCluster { args, fault, config, supervisor, started, leaf, links, needs_restart: false };
    for (nth, case) in cases.iter().enumerate() {
        cluster.restore()?;
        output.begin_row(case);
        cluster.row(nth, case, output)?;
    }
    Ok(())
}

impl FaultyCluster<'_> {
    /// Restart what was killed and wait until it is ready.
    fn restore(&mut self) -> Result<(), Failure> {
        if !std::mem::take(&mut self.needs_restart) {
            return Ok(());
        }
        if self.fault == Fault::RestartController {
            return self.wait_for_devices();
        }
        if self.fault == Fault::KillController {
            let listen = self.started.addr;
            (self.started.controller, _) = start_controller(&mut self.supervisor, &self.config, listen)?;
            return self.wait_for_devices();
        }
        let device = self.start_leaf()?;
        let limit = Limit::new(START_LIMIT);
        let (id, line) = self.supervisor.next_line(limit, device, "register with the controller")?;
        if id != device || !line.starts_with(READY) {
            let name = self.supervisor.name(id);
            return Err(Failure::Run(anyhow!("unexpected line from {name} before the next row: {line:?}")));
        }
        Ok(())
    }

    /// Return how to ask the controller.
    fn controller(&self) -> ControllerAddr {
        controller_addr(self.started.addr, self.config.keys.as_deref())
    }

    fn start_leaf(&mut self) -> Result<ChildId, Failure> {
        let device = start_device(&mut self.supervisor, &self.config, self.leaf, self.started.addr)?;
        self.started.devices[self.leaf] = device;
        Ok(device)
    }

    /// Wait until all devices have registered with the restarted controller.
    fn wait_for_devices(&mut self) -> Result<(), Failure> {
        let (limit, expected) = (Limit::new(START_LIMIT), self.started.devices.len());
        loop {
            let known = status(self.controller()).map_err(Failure::run)?.devices.len();
            if known == expected {
                return Ok(());
            }
            self.supervisor.check()?;
            if limit.is_over() {
                let seconds = START_LIMIT.as_secs();
                return Err(Failure::Run(anyhow!(
                    "{known} of {expected} devices registered with the restarted controller within {seconds} s"
                )));
            }
            thread::sleep(POLL_INTERVAL);
        }
    }

    /// Run a row and inject the fault while it runs.
    fn row(&mut self, nth: usize, case: &Case, output: &mut Output<'_>) -> Result<(), Failure> {
        self.links.iter().for_each(Link::renew);
        let announced = self.args.iterations / 2;
        // The controller prefers the tree, so `auto` uses it while there is one, and ranks can continue without it.
        let algo = if case.algo == Algo::Tree { Algo::Auto } else { case.algo };
        let (name, cases) = (format!("perf{nth}"), vec![Case { algo, ..*case }]);
        let job = JobOf { name, controller: self.started.addr, cases, announced: Some(announced) };
        let ranks = start_ranks(&mut self.supervisor, self.args, &self.config, job)?;
        let mut reports = Reports::new(ranks.clone());
        let transport = joined(&mut reports, &mut self.supervisor)?;
        let keys = self.config.keys.as_deref();
        output.begin(&describe_controller(self.started.addr, keys), transport)?;
        let limit = Limit::new(case_limit(self.args));
        let moment = match moment(reports.next_of_each(&mut self.supervisor, limit, "begin to measure")?)? {
            Ok(moment) => moment,
            Err(why) => {
                output.skipped(case, &why);
                return Ok(self.supervisor.wait_ended(&ranks, Limit::new(JOIN_LIMIT))?);
            }
        };
        // The sleep determines when the fault is injected; nothing is synchronised by it.
        thread::sleep(Duration::from_nanos(moment.at_ns.saturating_sub(now_ns())));
        let what = self.inject((&format!("perf{nth}"), &ranks), &mut reports)?;
        ranks.iter().for_each(|&rank| self.supervisor.write(rank, b"done\n".into()));
        let fault = format!("{what} {}", moment.describe(case, announced, self.args.iterations));
        if self.fault == Fault::KillRank {
            output.remark(&fault);
            return self.report_survivors(&ranks, limit, output);
        }
        let reports = reports.next_of_each(&mut self.supervisor, limit, "report a measurement")?;
        let measured = measured(reports)?.map_err(|why| Failure::Run(anyhow!("{fault}; then: {why}")))?;
        self.supervisor.wait_ended(&ranks, Limit::new(JOIN_LIMIT))?;
        let consequence = consequence(&measured, announced);
        // `--buffers both` and faults exclude each other.
        let placement = self.args.placements().of(case.collective)[0];
        output.row(case, &[Measurement { placement, ranks: measured }], transport)?;
        output.remark(&format!("{fault}; {consequence}"));
        Ok(())
    }

    /// Inject the fault and return a description of it.
    fn inject(&mut self, (job, ranks): (&str, &[ChildId]), reports: &mut Reports) -> Result<String, Failure> {
        let (leaf, supervisor) = (self.started.devices[self.leaf], &mut self.supervisor);
        let name = supervisor.name(leaf).to_owned();
        match self.fault {
            Fault::KillDevice => {
                supervisor.kill(leaf)?;
                self.needs_restart = true;
                Ok(format!("{name} killed"))
            }
            Fault::RestartDevice => {
                supervisor.kill(leaf)?;
                let device = self.start_leaf()?;
                self.wait_for_line((device, READY), "register with the controller", reports)?;
                Ok(format!("{name} killed and restarted"))
            }
            Fault::CutLink => {
                let link = self.links.iter().find(|link| link.device == self.leaf);
                let cut = link.zip(ranks.first());
                let cut = cut.map_or(Ok(()), |(link, &rank)| link.cut(supervisor.pid(rank)));
                cut.context("cannot list the ports of rank 0").map_err(Failure::Run)?;
                Ok(format!("link between rank 0 and {name} cut"))
            }
            Fault::KillController => {
                supervisor.kill(self.started.controller)?;
                self.needs_restart = true;
                Ok("the controller killed".into())
            }
            Fault::RestartController => {
                supervisor.kill(self.started.controller)?;
                self.needs_restart = true;
                let after = self.restart_controller(job, reports)?;
                Ok(format!("the controller killed and restarted (job restored after {after:.1?})"))
            }
            Fault::KillRank => {
                ranks.iter().for_each(|&rank| supervisor.may_fail(rank));
                let Some(&last) = ranks.last() else { return Ok("nobody killed".into()) };
                supervisor.kill(last)?;
                Ok(format!("{} killed", supervisor.name(last)))
            }
        }
    }

    /// Wait for a line of a child, and queue the ranks' reports meanwhile.
    fn wait_for_line(
        &mut self,
        (child, begin): (ChildId, &str),
        what: &'static str,
        reports: &mut Reports,
    ) -> Result<(), Failure> {
        let limit = Limit::new(START_LIMIT);
        loop {
            match self.supervisor.next_line(limit, child, what)? {
                (id, line) if id == child && line.starts_with(begin) => return Ok(()),
                (id, line) => reports.take(&mut self.supervisor, id, line)?,
            }
        }
    }

    /// Restart the controller and wait until all ranks have rejoined the job. Returns how long that took.
    fn restart_controller(&mut self, job: &str, reports: &mut Reports) -> Result<Duration, Failure> {
        let (began, limit) = (Instant::now(), Limit::new(START_LIMIT));
        let controller = spawn_controller(&mut self.supervisor, &self.config, self.started.addr)?;
        self.started.controller = controller;
        self.wait_for_line((controller, LISTENING), "listen", reports)?;
        loop {
            let report = status(self.controller()).map_err(Failure::run)?;
            if report.jobs.iter().any(|known| known.name == job && known.running && known.joined == known.world) {
                return Ok(began.elapsed());
            }
            self.supervisor.check()?;
            if limit.is_over() {
                let seconds = START_LIMIT.as_secs();
                let why = anyhow!("the restarted controller did not recover job {job} within {seconds} s");
                return Err(Failure::Run(why));
            }
            thread::sleep(POLL_INTERVAL);
        }
    }

    /// Print how the surviving ranks end, which ends the run.
    fn report_survivors(&mut self, ranks: &[ChildId], limit: Limit, output: &Output<'_>) -> Result<(), Failure> {
        let Some((&lost, left)) = ranks.split_last() else { return Ok(()) };
        for &rank in left {
            let (status, stderr) = self.supervisor.ending(rank, limit)?;
            let error = stderr.iter().rev().find_map(|line| line.strip_prefix("error: "));
            output.remark(&format!("{}: {}", self.supervisor.name(rank), error.unwrap_or(&status.to_string())));
        }
        let name = self.supervisor.name(lost);
        Err(Failure::Run(anyhow!("{name} is lost to --fault kill-rank; no collective can continue without it")))
    }
}

impl Moment {
    /// Describe the operation into which the fault was injected.
    fn describe(self, case: &Case, iteration: u32, iterations: u32) -> String {
        let (desc, size, usual_ms) = (case.desc(), case.size_bytes(), self.usual_ns as f64 / 1e6);
        let (nth, percent) = (iteration + 1, self.percent);
        format!(
            "in iteration {nth} of {iterations} of {desc} ({size} B) by {}, after {percent} % of the usual {usual_ms:.3} ms",
            case.algo
        )
    }
}

/// Draw the moment within the iteration that all ranks have begun, or return why they cannot begin.
fn moment(reports: Vec<Report>) -> Result<Result<Moment, String>, Failure> {
    let (mut begun_ns, mut usual_ns) = (0, 0);
    for report in reports {
        match report {
            Report::Begins { at_ns, usual_ns: usual } => {
                (begun_ns, usual_ns) = (begun_ns.max(at_ns), usual_ns.max(usual));
            }
            Report::NotPossible { why } => return Ok(Err(why)),
            other => {
                return Err(Failure::Run(anyhow!("unexpected report of a rank before its measurement: {other:?}")));
            }
        }
    }
    let percent = RandomState::new().hash_one(begun_ns) % 100;
    Ok(Ok(Moment { at_ns: begun_ns + usual_ns * percent / 100, usual_ns, percent }))
}

/// Describe the fault's effect. The time of a recovery is the time that the ranks waited beyond the usual.
fn consequence(ranks: &[Measured], faulty_iteration: u32) -> String {
    let times: Vec<_> = ranks.iter().map(|rank| rank.times_ns.clone()).collect();
    let slowest = stats::slowest_ns(&times);
    let median_ns = stats::median_ns(&slowest);
    let time_ns = |iteration: u32| slowest.get(iteration as usize).map_or(0.0, |&time_ns| time_ns as f64);
    let recoveries = || ranks.iter().filter_map(|rank| rank.recovery);
    if let Some(recovery) = recoveries().find(|recovery| !recovery.in_barrier) {
        let (iteration, time_ms) = (recovery.iteration + 1, time_ns(recovery.iteration) / 1e6);
        if slowest.len() == 1 {
            return format!(
                "detected and recovered in less than {time_ms:.3} ms, the total time of the only iteration"
            );
        }
        let longer_ms = time_ms - median_ns / 1e6;
        format!("detected and recovered in {longer_ms:.3} ms, the time of iteration {iteration} beyond the median")
    } else if let Some(recovery) = recoveries().max_by_key(|recovery| recovery.time_ns) {
        let (iteration, time_ms) = (recovery.iteration + 1, recovery.time_ns as f64 / 1e6);
        format!("detected and recovered in {time_ms:.3} ms, in the barrier next to iteration {iteration}")
    } else if let Some(ns) = ranks.iter().filter(|rank| rank.recoveries > 0).map(|rank| rank.recoveries_ns).max() {
        format!("detected and recovered in {:.3} ms, while no rank was in a call", ns as f64 / 1e6)
    } else {
        let (time_ms, median_ms) = (time_ns(faulty_iteration) / 1e6, median_ns / 1e6);
        format!("nothing was recovered; the iteration took {time_ms:.3} ms, the median is {median_ms:.3} ms")
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::job::Recovery;

    fn measured(times_ns: [u64; 3], recovery: Option<Recovery>) -> Measured {
        let (path, fallback, wire_bytes, cpu_ns, retransmits) = (None, None, 0, 0, 0);
        Measured {
            times_ns: times_ns.into(),
            wrong: 0,
            path,
            trees: None,
            fallback,
            wire_bytes,
            cpu_ns,
            retransmits,
            recovery,
            recoveries: 0,
            recoveries_ns: 0,
            repair_bytes: 0,
            slowest: None,
        }
    }

    #[test]
    fn moment_lies_within_the_usual_time_after_the_last_rank_began() {
        let begins = |at_ns, usual_ns| Report::Begins { at_ns, usual_ns };
        let Moment { at_ns, usual_ns, percent } =
            moment(vec![begins(700, 1000), begins(900, 800)]).expect("all have begun").expect("a moment");
        assert!(usual_ns == 1000 && percent < 100 && at_ns == 900 + 10 * percent, "{at_ns} at {percent} %");
        let refused = moment(vec![Report::NotPossible { why: "no tree".into() }]).expect("an answer");
        assert_eq!(refused.map(|_| ()), Err("no tree".into()));
    }

    #[test]
    fn consequence_reports_the_time_beyond_the_usual() {
        let in_operation = Recovery { iteration: 1, in_barrier: false, time_ns: 7_000_000 };
        let in_barrier = Recovery { iteration: 1, in_barrier: true, time_ns: 4_000_000 };
        let usual = [1_000_000, 1_000_000, 1_000_000];
        let hit = measured([1_000_000, 7_000_000, 1_000_000], Some(in_operation));
        let text = consequence(&[measured(usual, Some(in_barrier)), hit], 1);
        assert!(text.contains("recovered in 6.000 ms, the time of iteration 2 beyond"), "{text}");
        let only =
            Measured { times_ns: vec![7_000_000], ..measured(usual, Some(Recovery { iteration: 0, ..in_operation })) };
        let text = consequence(&[only], 0);
        assert!(text.contains("recovered in less than 7.000 ms"), "{text}");
        let text = consequence(&[measured(usual, Some(in_barrier)), measured(usual, None)], 1);
        assert!(text.contains("recovered in 4.000 ms, in the barrier next to iteration 2"), "{text}");
        let between = Measured { recoveries: 1, recoveries_ns: 3_000_000, ..measured(usual, None) };
        let text = consequence(&[measured(usual, None), between], 1);
        assert!(text.contains("recovered in 3.000 ms, while no rank was in a call"), "{text}");
        let text = consequence(&[measured([1_000_000, 1_500_000, 1_000_000], None)], 1);
        assert!(text.contains("took 1.500 ms, the median is 1.000 ms"), "{text}");
    }
}

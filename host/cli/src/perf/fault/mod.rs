//! `sumac perf --fault`: something is done to the live cluster in the middle of an operation of each row.
//!
//! The ranks of a row are processes and a job of their own, on controller and devices that outlive it. They report that
//! the iteration in the middle of the row begins, and what those before took; the moment is drawn within that time. Ranks
//! whose operation was faster wait before the next one until it is done. What was killed is started again before the
//! next row.
//!
//! Through the tree go all operations that may, as long as there is one: the controller is told so, as is every rank that
//! was asked for the tree, which could not go on without it otherwise. In rows by a schedule, that is the barriers.
//!
//! Invariant: the end of what is killed here is in order; that of anything else is not.

use super::args::PerfArgs;
use super::output::Output;
use super::relay::Link;
use super::{JOIN_LIMIT, JobOf, Reports, case_limit, joined, measured, start_ranks};
use crate::cluster::{
    self, ChildId, ClusterConfig, LISTENING, Limit, Preference, READY, START_LIMIT, Started, Supervisor,
    spawn_controller, start_controller, start_device,
};
use crate::exit::Failure;
use crate::job::{Case, Measured, Report};
use crate::options::Algo;
use crate::stats;
use crate::worker::now_ns;
use anyhow::{Context, anyhow};
use clap::ValueEnum;
use std::hash::{BuildHasher, RandomState};
use std::thread;
use std::time::{Duration, Instant};
use sumac::controller::status;

/// How often to look whether all devices have found a controller that was started again.
const LOOK_EVERY: Duration = Duration::from_millis(20);

/// What is done to the cluster.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub(crate) enum Fault {
    /// Kill the leaf device of rank 0, and start it again before the next row
    KillDevice,
    /// The same, and start it again at once, under the same name
    RestartDevice,
    /// Lose all packets between rank 0 and its leaf device from then on; ranks send packets then (--attach udp), and
    /// a relay stands before that device
    CutLink,
    /// Kill the controller, and start it again on the same port before the next row
    KillController,
    /// The same, and start it again at once; the row says when it knew the job again, by what the ranks told it
    RestartController,
    /// Kill the last rank: the others can't go on, and the run ends with what they say and exit status 1
    KillRank,
}

/// A cluster that is hurt, and mended.
struct Patient<'a> {
    args: &'a PerfArgs,
    fault: Fault,
    config: ClusterConfig<'a>,
    supervisor: Supervisor,
    started: Started,
    /// The index of the leaf device of rank 0.
    leaf: usize,
    /// Before devices that have a proxy: the leaf, if its link is to be cut.
    links: &'a [Link],
    /// Something is dead that the next row needs.
    is_hurt: bool,
}

/// When it is done.
#[derive(Debug, Clone, Copy)]
struct Moment {
    /// On the clock that ranks report.
    at_ns: u64,
    usual_ns: u64,
    /// What part of the usual time of an operation is over, in percent.
    percent: u64,
}

/// Run all rows, each hurt once.
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
    let mut patient = Patient { args, fault, config, supervisor, started, leaf, links, is_hurt: false };
    for (nth, case) in cases.iter().enumerate() {
        output.bar.set_message(format!("{} {} {} B", case.collective, case.algo, case.size_bytes()));
        patient.mend()?;
        patient.row(nth, case, output)?;
    }
    Ok(())
}

impl Patient<'_> {
    /// Start again what is dead, and wait until it can be used.
    fn mend(&mut self) -> Result<(), Failure> {
        if !std::mem::take(&mut self.is_hurt) {
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
            return Err(Failure::Run(anyhow!("{name} printed {line:?} before the next row")));
        }
        Ok(())
    }

    fn start_leaf(&mut self) -> Result<ChildId, Failure> {
        let device = start_device(&mut self.supervisor, &self.config, self.leaf, self.started.addr)?;
        self.started.devices[self.leaf] = device;
        Ok(device)
    }

    /// Wait until the devices have found the controller again.
    fn wait_for_devices(&mut self) -> Result<(), Failure> {
        let (limit, expected) = (Limit::new(START_LIMIT), self.started.devices.len());
        loop {
            let known = status(self.started.addr).map_err(Failure::run)?.devices.len();
            if known == expected {
                return Ok(());
            }
            self.supervisor.check()?;
            if limit.is_over() {
                let seconds = START_LIMIT.as_secs();
                return Err(Failure::Run(anyhow!(
                    "{known} of {expected} devices have found the controller again within {seconds} s"
                )));
            }
            thread::sleep(LOOK_EVERY);
        }
    }

    /// Run a row, and hurt the cluster meanwhile.
    fn row(&mut self, nth: usize, case: &Case, output: &mut Output<'_>) -> Result<(), Failure> {
        self.links.iter().for_each(Link::renew);
        let announced = self.args.iterations / 2;
        // The tree, while there is one, is the controller's choice.
        let algo = if case.algo == Algo::Tree { Algo::Auto } else { case.algo };
        let (name, cases) = (format!("perf{nth}"), vec![Case { algo, ..*case }]);
        let job = JobOf { name, controller: self.started.addr, cases, announced: Some(announced) };
        let ranks = start_ranks(&mut self.supervisor, self.args, &self.config, job)?;
        let mut reports = Reports::new(ranks.clone());
        let attached = joined(&mut reports, &mut self.supervisor)?;
        output.begin(attached)?;
        let limit = Limit::new(case_limit(self.args));
        let moment = match moment(reports.next_of_each(&mut self.supervisor, limit, "begin to measure")?)? {
            Ok(moment) => moment,
            Err(why) => {
                output.left_out(case, &why);
                return Ok(self.supervisor.wait_ended(&ranks, Limit::new(JOIN_LIMIT))?);
            }
        };
        // Choosing the moment is all that this is for.
        thread::sleep(Duration::from_nanos(moment.at_ns.saturating_sub(now_ns())));
        let what = self.hurt((&format!("perf{nth}"), &ranks), &mut reports)?;
        ranks.iter().for_each(|&rank| self.supervisor.say(rank, b"done\n".into()));
        let told = format!("{what} {}", moment.within(case, announced, self.args.iterations));
        if self.fault == Fault::KillRank {
            output.tell(&told);
            return self.survivors(&ranks, limit, output);
        }
        let reports = reports.next_of_each(&mut self.supervisor, limit, "report a measurement")?;
        let measured = measured(reports)?.map_err(|why| Failure::Run(anyhow!("{told}; then: {why}")))?;
        self.supervisor.wait_ended(&ranks, Limit::new(JOIN_LIMIT))?;
        output.row(case, &measured, attached)?;
        output.tell(&format!("{told}; {}", consequence(&measured, announced)));
        Ok(())
    }

    /// Do it, and say what was done.
    fn hurt(&mut self, (job, ranks): (&str, &[ChildId]), reports: &mut Reports) -> Result<String, Failure> {
        let (leaf, supervisor) = (self.started.devices[self.leaf], &mut self.supervisor);
        let name = supervisor.name(leaf).to_owned();
        match self.fault {
            Fault::KillDevice => {
                supervisor.kill(leaf)?;
                self.is_hurt = true;
                Ok(format!("{name} killed"))
            }
            Fault::RestartDevice => {
                supervisor.kill(leaf)?;
                let device = self.start_leaf()?;
                self.wait_for_line((device, READY), "register with the controller", reports)?;
                Ok(format!("{name} killed and started again"))
            }
            Fault::CutLink => {
                let link = self.links.iter().find(|link| link.device == self.leaf);
                let cut = link.zip(ranks.first());
                let cut = cut.map_or(Ok(()), |(link, &rank)| link.cut(supervisor.pid(rank)));
                cut.context("the ports of rank 0").map_err(Failure::Run)?;
                Ok(format!("link between rank 0 and {name} cut"))
            }
            Fault::KillController => {
                supervisor.kill(self.started.controller)?;
                self.is_hurt = true;
                Ok("the controller killed".into())
            }
            Fault::RestartController => {
                supervisor.kill(self.started.controller)?;
                self.is_hurt = true;
                let after = self.restart_controller(job, reports)?;
                Ok(format!("the controller killed and started again, which knew the job after {after:.1?},"))
            }
            Fault::KillRank => {
                ranks.iter().for_each(|&rank| supervisor.may_fail(rank));
                let Some(&last) = ranks.last() else { return Ok("nobody killed".into()) };
                supervisor.kill(last)?;
                Ok(format!("{} killed", supervisor.name(last)))
            }
        }
    }

    /// Wait until a child says so, and keep what ranks report meanwhile.
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

    /// Start the controller again, and wait until all ranks of the job have come back to it. Returns how long that took.
    fn restart_controller(&mut self, job: &str, reports: &mut Reports) -> Result<Duration, Failure> {
        let (began, limit) = (Instant::now(), Limit::new(START_LIMIT));
        let controller = spawn_controller(&mut self.supervisor, &self.config, self.started.addr)?;
        self.started.controller = controller;
        self.wait_for_line((controller, LISTENING), "listen", reports)?;
        loop {
            let report = status(self.started.addr).map_err(Failure::run)?;
            if report.jobs.iter().any(|known| known.name == job && known.running && known.joined == known.world) {
                return Ok(began.elapsed());
            }
            self.supervisor.check()?;
            if limit.is_over() {
                let seconds = START_LIMIT.as_secs();
                let why = anyhow!("{job} is not known to the controller that was started again within {seconds} s");
                return Err(Failure::Run(why));
            }
            thread::sleep(LOOK_EVERY);
        }
    }

    /// Say what became of the ranks that were left, which is how the run ends.
    fn survivors(&mut self, ranks: &[ChildId], limit: Limit, output: &Output<'_>) -> Result<(), Failure> {
        let Some((&lost, left)) = ranks.split_last() else { return Ok(()) };
        for &rank in left {
            let (status, stderr) = self.supervisor.ending(rank, limit)?;
            let words = stderr.iter().rev().find_map(|line| line.strip_prefix("error: "));
            output.tell(&format!("{}: {}", self.supervisor.name(rank), words.unwrap_or(&status.to_string())));
        }
        let name = self.supervisor.name(lost);
        Err(Failure::Run(anyhow!("{name} is lost, as --fault kill-rank wants it; no collective goes on without it")))
    }
}

impl Moment {
    /// Put into words which operation was hit.
    fn within(self, case: &Case, iteration: u32, iterations: u32) -> String {
        let (desc, size, usual_ms) = (case.desc(), case.size_bytes(), self.usual_ns as f64 / 1e6);
        let (nth, percent) = (iteration + 1, self.percent);
        format!(
            "in iteration {nth} of {iterations} of {desc} ({size} B) by {}, after {percent} % of the usual {usual_ms:.3} ms",
            case.algo
        )
    }
}

/// Draw the moment in the iteration that begins at all ranks; or return why the ranks can't begin.
fn moment(reports: Vec<Report>) -> Result<Result<Moment, String>, Failure> {
    let (mut begun_ns, mut usual_ns) = (0, 0);
    for report in reports {
        match report {
            Report::Begins { at_ns, usual_ns: usual } => {
                (begun_ns, usual_ns) = (begun_ns.max(at_ns), usual_ns.max(usual));
            }
            Report::NotPossible { why } => return Ok(Err(why)),
            other => return Err(Failure::Run(anyhow!("a rank reported {other:?} before it measured"))),
        }
    }
    let percent = RandomState::new().hash_one(begun_ns) % 100;
    Ok(Ok(Moment { at_ns: begun_ns + usual_ns * percent / 100, usual_ns, percent }))
}

/// Put into words what came of it. The time of a repair is what the ranks waited longer than usual.
fn consequence(ranks: &[Measured], hurt_in: u32) -> String {
    let times: Vec<_> = ranks.iter().map(|rank| rank.times_ns.clone()).collect();
    let slowest = stats::slowest_ns(&times);
    let median_ns = stats::median_ns(&slowest);
    let time_ns = |iteration: u32| slowest.get(iteration as usize).map_or(0.0, |&time_ns| time_ns as f64);
    let repairs = || ranks.iter().filter_map(|rank| rank.repair);
    if let Some(repair) = repairs().find(|repair| !repair.in_barrier) {
        let (iteration, time_ms) = (repair.iteration + 1, time_ns(repair.iteration) / 1e6);
        if slowest.len() == 1 {
            return format!("noticed and repaired in less than {time_ms:.3} ms, all that the only iteration took");
        }
        let longer_ms = time_ms - median_ns / 1e6;
        format!("noticed and repaired in {longer_ms:.3} ms, which iteration {iteration} took longer than the median")
    } else if let Some(repair) = repairs().max_by_key(|repair| repair.time_ns) {
        let (iteration, time_ms) = (repair.iteration + 1, repair.time_ns as f64 / 1e6);
        format!("noticed and repaired in {time_ms:.3} ms, by the barrier next to iteration {iteration}")
    } else if let Some(ns) = ranks.iter().filter(|rank| rank.repairs > 0).map(|rank| rank.repairs_ns).max() {
        format!("noticed and repaired in {:.3} ms, while no rank was in a call", ns as f64 / 1e6)
    } else {
        let (time_ms, median_ms) = (time_ns(hurt_in) / 1e6, median_ns / 1e6);
        format!("nothing was repaired; the iteration took {time_ms:.3} ms, the median is {median_ms:.3} ms")
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::job::Repair;

    fn measured(times_ns: [u64; 3], repair: Option<Repair>) -> Measured {
        let (path, fallback, wire_bytes, cpu_ns, retransmits) = (None, None, 0, 0, 0);
        Measured {
            times_ns: times_ns.into(),
            wrong: 0,
            path,
            fallback,
            wire_bytes,
            cpu_ns,
            retransmits,
            repair,
            repairs: 0,
            repairs_ns: 0,
            repair_bytes: 0,
            slowest: None,
        }
    }

    #[test]
    fn the_moment_is_within_the_usual_time_after_the_last_begin() {
        let begins = |at_ns, usual_ns| Report::Begins { at_ns, usual_ns };
        let Moment { at_ns, usual_ns, percent } =
            moment(vec![begins(700, 1000), begins(900, 800)]).expect("all have begun").expect("a moment");
        assert!(usual_ns == 1000 && percent < 100 && at_ns == 900 + 10 * percent, "{at_ns} at {percent} %");
        let refused = moment(vec![Report::NotPossible { why: "no tree".into() }]).expect("an answer");
        assert_eq!(refused.map(|_| ()), Err("no tree".into()));
    }

    #[test]
    fn a_repair_is_timed_by_what_its_iteration_took_longer() {
        let in_operation = Repair { iteration: 1, in_barrier: false, time_ns: 7_000_000 };
        let in_barrier = Repair { iteration: 1, in_barrier: true, time_ns: 4_000_000 };
        let usual = [1_000_000, 1_000_000, 1_000_000];
        let hit = measured([1_000_000, 7_000_000, 1_000_000], Some(in_operation));
        let said = consequence(&[measured(usual, Some(in_barrier)), hit], 1);
        assert!(said.contains("repaired in 6.000 ms, which iteration 2"), "{said}");
        let only =
            Measured { times_ns: vec![7_000_000], ..measured(usual, Some(Repair { iteration: 0, ..in_operation })) };
        let said = consequence(&[only], 0);
        assert!(said.contains("repaired in less than 7.000 ms"), "{said}");
        let said = consequence(&[measured(usual, Some(in_barrier)), measured(usual, None)], 1);
        assert!(said.contains("repaired in 4.000 ms, by the barrier next to iteration 2"), "{said}");
        let between = Measured { repairs: 1, repairs_ns: 3_000_000, ..measured(usual, None) };
        let said = consequence(&[measured(usual, None), between], 1);
        assert!(said.contains("repaired in 3.000 ms, while no rank was in a call"), "{said}");
        let said = consequence(&[measured([1_000_000, 1_500_000, 1_000_000], None)], 1);
        assert!(said.contains("took 1.500 ms, the median is 1.000 ms"), "{said}");
    }
}

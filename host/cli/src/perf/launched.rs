//! `sumac perf` as a rank that a launcher has started, as nccl-tests are run: `mpirun -np 4 sumac perf`.
//!
//! All ranks run the cases of the same command line in one communicator. After each measurement rank 0 gathers the
//! figures of all ranks and prints the row.
//!
//! Invariant: the last operation tells every rank what all of them found, so all exit with the same status.

use super::args::PerfArgs;
use super::output::Output;
use super::row::Measurement;
use super::{measured, progress_bar, ssh};
use crate::address;
use crate::bench::{Bench, tree_transport};
use crate::cluster::describe_controller;
use crate::exit::Failure;
use crate::job::{Case, Explained, Report};
use crate::layout::{Layout, Source};
use crate::ranks::{gather, joining, sum};
use anyhow::{anyhow, ensure};
use indicatif::ProgressBar;
use std::io;
use std::time::Duration;
use sumac::comm::DEFAULT_PORT;
use sumac::comm::launcher::Reading;
use sumac::controller::status;
use sumac::{Algo, Communicator, JoinConfig};

/// Run as a rank.
pub(super) fn run(args: &PerfArgs, reading: &Reading) -> Result<(), Failure> {
    args.check_launched().map_err(Failure::Input)?;
    let key = if args.follow_stdin { ssh::follow()? } else { None };
    let mut config = JoinConfig::from_env().map_err(Failure::input)?;
    if let Some(text) = &args.controller {
        let mut addrs = address::all("--controller", text, DEFAULT_PORT)?.into_iter();
        config.controller = addrs.next().unwrap_or(config.controller);
        config.controller_alternatives = addrs.collect();
    }
    config.key = key.or(config.key);
    config.order = args.order.map_or(config.order, Into::into);
    config.transport = args.transport();
    let local = reading.placement.as_ref().ok().and_then(|placement| placement.local_rank);
    config.verbs = args.verbs.in_turn(local.unwrap_or(config.rank) as usize).or(config.verbs);
    config.trees = args.trees.unwrap_or(config.trees);
    config.shape = args.shape.or(config.shape);
    config.hybrid |= args.joins_for(Algo::Hybrid);
    config.rab |= args.joins_for(Algo::Rab);
    config.memory = args.memory();
    config.wait_policy = args.wait_policy.unwrap_or(config.wait_policy);
    config.deadline = Duration::from_secs(args.timeout_s);
    let cases = args.cases().map_err(Failure::Input)?;
    let communicator = Communicator::join(config.clone()).map_err(joining)?;
    let rank = Rank { args, config: &config, communicator: &communicator, failure: None };
    let outcome = if args.explain { rank.explain(&cases) } else { rank.measure(&cases) };
    communicator.leave();
    outcome
}

/// Return the number of ranks, if a launcher has started this process as one of them.
///
/// # Errors
/// The launcher's variables are invalid.
pub(super) fn world(reading: &Reading) -> Result<Option<u32>, Failure> {
    match &reading.placement {
        Ok(placement) => Ok(Some(placement.world)),
        Err(error) if reading.is_rank() => Err(Failure::Input(anyhow!(
            "environment variable {}: {error}, or give --ranks to start a cluster here",
            error.variable()
        ))),
        Err(_) => Ok(None),
    }
}

impl PerfArgs {
    /// Refuse options of the cluster that `perf` starts where no launcher has started it.
    pub(super) fn check_launched(&self) -> anyhow::Result<()> {
        let options = [
            ("--levels", self.levels != 2),
            ("--shards", self.shards != 1),
            ("--no-bind", self.no_bind),
            ("--topology", self.topology.is_some()),
            ("--device", !self.devices.is_empty()),
            ("--overrides", self.overrides.is_some()),
            ("--costs", self.costs.is_some()),
            ("--fault", self.fault.is_some()),
            ("--chaos", self.chaos.is_some()),
        ];
        for (option, is_given) in options {
            ensure!(
                !is_given,
                "{option} is for the cluster that perf starts itself, and a launcher has started this process as a \
                 rank; leave it out, or give --ranks to start a cluster here"
            );
        }
        Ok(())
    }
}

/// This rank in a running job.
struct Rank<'a> {
    args: &'a PerfArgs,
    config: &'a JoinConfig,
    communicator: &'a Communicator,
    /// Why rank 0 cannot print any more. The measurement goes on, as all ranks must make the same calls.
    failure: Option<Failure>,
}

impl Rank<'_> {
    fn measure(mut self, cases: &[Case]) -> Result<(), Failure> {
        let (args, is_printing) = (self.args, self.config.rank == 0);
        let transport = tree_transport(args.transport(), true, self.communicator)?;
        let bar = if is_printing { progress_bar(cases.len(), args.is_quiet()) } else { ProgressBar::hidden() };
        let layout = if is_printing { Some(self.layout()?) } else { None };
        let mut output = layout.as_ref().map(|layout| Output::new(args, layout, cases, None, &bar)).transpose()?;
        if let Some(output) = &mut output {
            self.failure =
                output.begin(&describe_controller(self.config.controller, None), transport).err().map(Failure::from);
        }
        let mut bench = Bench {
            communicator: self.communicator,
            warmup: args.warmup,
            iterations: args.iterations,
            check: args.check,
            placements: args.placements(),
            announced: None,
            memory: args.memory(),
            iteration: 0,
            workload: None,
        };
        let (mut wrong, mut rows) = (0, 0_u64);
        for case in cases {
            if let Some(output) = &mut output {
                output.begin_row(case);
            }
            let (mut measurements, mut refused) = (Vec::new(), None);
            for &placement in args.placements().of(case.collective) {
                let report = bench.measure(case, placement)?;
                match &report {
                    Report::Measured(measured) => wrong += measured.wrong,
                    Report::NotPossible { why } => refused = Some(why.clone()),
                    _ => {}
                }
                let reports = gather(self.communicator, &report)?;
                if let Some(Ok(ranks)) = reports.map(measured).transpose()? {
                    measurements.push(Measurement { placement, ranks });
                }
            }
            rows += u64::from(refused.is_none());
            let Some(output) = &mut output else { continue };
            match refused {
                Some(why) => output.skipped(case, &why),
                None if self.failure.is_none() => {
                    self.failure = output.row(case, &measurements, transport).err().map(Failure::from);
                }
                None => {}
            }
        }
        let is_failed = self.failure.is_some();
        let [wrong, failed] = sum(self.communicator, [wrong, u64::from(is_failed)])?;
        bar.finish_and_clear();
        match (self.failure, output) {
            (Some(failure), _) => Err(failure),
            (None, Some(output)) => output.finish().and_then(|_| verdict(wrong, failed, rows)),
            (None, None) => verdict(wrong, failed, rows),
        }
    }

    /// Print the explanation of each case, which is the same on all ranks.
    fn explain(self, cases: &[Case]) -> Result<(), Failure> {
        let mut printed = Ok(());
        for case in cases.iter().filter(|_| self.config.rank == 0) {
            let explanation = self.communicator.explain(&case.desc(), case.algo);
            printed = printed
                .and_then(|()| Explained::new(case, &explanation).write(&mut io::stdout().lock(), self.args.json));
        }
        let [failed] = sum(self.communicator, [u64::from(printed.is_err())])?;
        printed.map_err(Failure::from)?;
        verdict(0, failed, 1)
    }

    /// Describe the job's devices, as the controller reports them. Whoever started them knows whether they are
    /// emulated.
    fn layout(&self) -> Result<Layout, Failure> {
        let report = status(self.config.controller_addr()).map_err(Failure::run)?;
        let tree = report.jobs.into_iter().find(|job| job.name == self.config.job).and_then(|job| job.tree?.ok());
        let (levels, devices) = tree.map_or((0, Vec::new()), |tree| (tree.levels as usize, tree.devices));
        let hosts = vec![String::new(); self.config.world as usize];
        Ok(Layout { source: Source::Text(String::new()), devices, hosts, leaves: Vec::new(), levels })
    }
}

/// Return the failure of all ranks, if there is one. Rank 0 has printed it.
fn verdict(wrong: u64, failed: u64, rows: u64) -> Result<(), Failure> {
    if wrong == 0 && failed == 0 && rows > 0 { Ok(()) } else { Err(Failure::Reported) }
}

//! `sumac rank` (hidden): one rank, which runs the job that its supervisor sends. [`crate::bench`] measures.

use crate::bench::{Bench, measure_in_turns, tree_transport};
use crate::collective;
use crate::exit::Failure;
use crate::job::{Explained, RankJob, Report, Work, report};
use anyhow::Context;
use std::io;
use std::time::Duration;
use sumac::{Communicator, JoinConfig};

/// Read the job from stdin, run it, and report on stdout.
pub(crate) fn run() -> Result<(), Failure> {
    let mut line = String::new();
    io::stdin().read_line(&mut line)?;
    let job: RankJob = serde_json::from_str(&line)
        .context("stdin contains no job; ranks are started by `sumac perf`, `sumac all-reduce` and the like")
        .map_err(Failure::Input)?;
    let mut config = JoinConfig::new(job.controller, job.job.as_str(), job.rank, job.world);
    config.host = Some(job.host.clone());
    config.key = job.key.clone();
    config.order = job.order.unwrap_or(config.order);
    config.transport = job.transport;
    config.verbs = job.verbs.clone();
    config.trees = job.trees;
    (config.memory, config.wait_policy) = (job.memory, job.wait_policy);
    config.shape = job.shape;
    (config.hybrid, config.rab) = (job.hybrid, job.rab);
    config.deadline = Duration::from_millis(job.deadline_ms);
    let communicator = Communicator::join(config).map_err(Failure::run)?;
    // A job that only explains shows the refusal.
    let is_required = !matches!(job.work, Work::Explain { .. });
    let transport = tree_transport(job.transport, is_required, &communicator)?;
    report(&Report::Joined { transport })?;
    match &job.work {
        &Work::Perf { ref cases, warmup, iterations, check, placements, announced } => {
            let mut bench = Bench {
                communicator: &communicator,
                warmup,
                iterations,
                check,
                placements,
                announced,
                memory: job.memory,
                iteration: 0,
                workload: None,
            };
            for case in cases {
                for &placement in placements.of(case.collective) {
                    report(&bench.measure(case, placement)?)?;
                }
            }
        }
        Work::InTurns { groups } => {
            report(&Report::Facts(communicator.facts()))?;
            for group in groups {
                measure_in_turns(&communicator, job.memory, group)?.iter().try_for_each(report)?;
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

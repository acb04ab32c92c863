//! Calibration by ranks that a launcher has started, on the devices of a running controller.
//!
//! Invariant: the last operation tells every rank whether rank 0 could write the table, so all exit with the same
//! status.

use super::{CalibrateArgs, MeasuredJob, cell, output};
use crate::address;
use crate::bench::measure_in_turns;
use crate::exit::Failure;
use crate::job::{Report, Turns};
use crate::options::Transport;
use crate::ranks::{gather, joining, sum};
use anyhow::anyhow;
use std::time::Duration;
use sumac::comm::DEFAULT_PORT;
use sumac::select::CostTable;
use sumac::{Communicator, JoinConfig, MemoryKind};

/// Run as a rank.
pub(super) fn run(args: &CalibrateArgs, groups: &[Turns], checked: Option<&CostTable>) -> Result<(), Failure> {
    let mut config = JoinConfig::from_env().map_err(Failure::input)?;
    if let Some(text) = &args.controller {
        let mut addrs = address::all("--controller", text, DEFAULT_PORT)?.into_iter();
        config.controller = addrs.next().unwrap_or(config.controller);
        config.controller_alternatives = addrs.collect();
    }
    config.transport = match args.transports[..] {
        [] => Transport::Auto,
        [transport] => transport,
        _ => {
            return Err(Failure::Input(anyhow!(
                "--transport: ranks of a launcher use one transport; run once for each"
            )));
        }
    };
    config.memory = MemoryKind::Registered;
    config.deadline = Duration::from_secs(args.timeout_s);
    let world = Communicator::join(config).map_err(joining)?;
    let is_writing = world.rank() == 0;
    let mut jobs = Vec::new();
    for ranks in halves(world.size()) {
        let is_member = world.rank() < ranks;
        let part = match ranks == world.size() {
            true => None,
            false => world.split(is_member.then_some(0), i64::from(world.rank())).map_err(Failure::run)?,
        };
        let communicator = if is_member { Some(part.as_ref().unwrap_or(&world)) } else { None };
        jobs.extend(measure(&world, communicator, groups)?);
        if let Some(part) = part {
            part.leave();
        }
    }
    let outcome = if is_writing { output::finish(args, &jobs, checked) } else { Ok(()) };
    let [failed] = sum(&world, [u64::from(outcome.is_err())])?;
    world.leave();
    outcome?;
    if failed == 0 { Ok(()) } else { Err(Failure::Reported) }
}

/// All ranks, half of them and so on down to two.
fn halves(ranks: u32) -> Vec<u32> {
    std::iter::successors(Some(ranks), |ranks| Some(ranks / 2)).take_while(|&ranks| ranks >= 2).collect()
}

/// Measure on a communicator, where this rank is a member, and return what all members measured at rank 0.
fn measure(
    world: &Communicator,
    communicator: Option<&Communicator>,
    groups: &[Turns],
) -> Result<Option<MeasuredJob>, Failure> {
    let facts = communicator.map(Communicator::facts);
    let mut cells = Vec::new();
    for group in groups {
        let reports = match communicator {
            Some(communicator) => measure_in_turns(communicator, MemoryKind::Registered, group)?,
            None => Vec::new(),
        };
        let Some(of_ranks) = gather::<Vec<Report>>(world, &reports)? else { continue };
        let mut of_members: Vec<_> =
            of_ranks.into_iter().filter(|reports| !reports.is_empty()).map(Vec::into_iter).collect();
        let mut row = Vec::new();
        for &case in &group.cases {
            let reports = of_members.iter_mut().filter_map(Iterator::next).collect();
            row.extend(facts.as_ref().map(|facts| cell(case, facts, reports)).transpose()?.flatten());
        }
        cells.push(row);
    }
    Ok(facts.filter(|_| world.rank() == 0).map(|facts| MeasuredJob { facts, cells }))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn halves_end_at_two_ranks() {
        assert_eq!(halves(8), [8, 4, 2]);
        assert_eq!(halves(7), [7, 3]);
        assert!(halves(1).is_empty());
    }
}

//! `sumac selftest` as a rank that a launcher has started: `mpirun -np 4 sumac selftest --controller C`.
//!
//! The ranks test one after another, so that none disturbs the others, and rank 0 prints one table. Each rank tests its
//! own links to the devices; rank 0 also those between devices.
//!
//! Invariant: no tree of the ranks' own is on the devices while a rank tests. Between two turns the ranks meet in a job
//! of that name, and while they wait for its last member it has no tree.

use super::link::{HERE, Row};
use super::{LARGE_OPERATIONS, SelftestArgs, Tester, table};
use crate::exit::Failure;
use crate::ranks::{gather, joining, sum};
use anyhow::anyhow;
use std::io;
use std::time::Duration;
use sumac::controller::{ControllerAddr, derived_name};
use sumac::{Communicator, JoinConfig};

/// How long a link may take to join its job and to leave it.
const LINK_OVERHEAD: Duration = Duration::from_secs(60);

/// Test the links of all ranks. A bad link fails all of them.
pub(super) fn run(args: &SelftestArgs) -> Result<(), Failure> {
    for (option, is_given) in [("--topology", args.topology.is_some()), ("--levels", args.levels != 2)] {
        let why = "is for the tree that selftest starts itself, and a launcher has started this process as a rank; \
                   leave it out, or give --ranks to start a tree here";
        if is_given {
            return Err(Failure::Input(anyhow!("{option} {why}")));
        }
    }
    let mut config = JoinConfig::from_env().map_err(Failure::input)?;
    if let Some(controller) = args.controller.named()? {
        (config.controller, config.controller_alternatives) = (controller.addr, controller.alternatives);
    }
    // The ranks meet by their own key; jobs on chosen devices take an operator's.
    let operator = args.key.read_operator()?;
    if config.key.is_none() {
        config.key.clone_from(&operator);
    }
    // Where the ranks meet, they need no device of their host.
    config.hierarchical = false;
    let controller = ControllerAddr { key: operator, ..config.controller_addr() };
    let devices = args.devices_of(&controller)?;
    config.join_timeout = turn_limit(args, devices.len());
    let mut bad = 0;
    let mut output = Printed { rows: Vec::new(), json: args.json, failure: None };
    if config.rank == 0 && !args.json {
        output.failure = table::write_head(&mut io::stdout()).err();
    }
    for turn in 0..config.world {
        let own = if turn == config.rank { test(args, &config, &controller, &devices) } else { Ok(Vec::new()) };
        let job = derived_name(&config.job, &format!("~selftest-{turn}"));
        let communicator = Communicator::join(JoinConfig { job, ..config.clone() }).map_err(joining)?;
        for rows in gather(&communicator, &own)?.into_iter().flatten() {
            output.print(rows);
        }
        if turn + 1 == config.world && config.rank == 0 && !args.json {
            let summary = table::write_summary(&mut io::stdout(), &output.rows);
            output.failure = output.failure.or(summary.err());
        }
        let is_bad = own.as_ref().map_or(true, |rows| rows.iter().any(|row| !row.ok));
        bad += sum(&communicator, [u64::from(is_bad || output.failure.is_some())])?[0];
        communicator.leave();
    }
    if let Some(error) = output.failure {
        return Err(error.into());
    }
    if bad == 0 { Ok(()) } else { Err(Failure::Reported) }
}

/// Return how long the other ranks wait for one that tests so many devices.
fn turn_limit(args: &SelftestArgs, devices: usize) -> Duration {
    let links = devices + devices * devices / 2;
    let operations = args.iterations.saturating_add(LARGE_OPERATIONS);
    let link = Duration::from_secs(args.timeout_s.saturating_mul(operations.into()))
        + Duration::from_secs(args.wait_for_tree.into())
        + LINK_OVERHEAD;
    link.saturating_mul(u32::try_from(links).unwrap_or(u32::MAX)).min(Duration::from_secs(u32::MAX.into()))
}

/// Test this rank's links, or return why it cannot.
fn test(
    args: &SelftestArgs,
    config: &JoinConfig,
    controller: &ControllerAddr,
    devices: &[String],
) -> Result<Vec<Row>, String> {
    let name = derived_name(&config.job, &format!("~probe-{}", config.rank));
    let mut tester = Tester::new(args, controller.clone(), name);
    tester.is_silent = true;
    tester.test_all(devices, config.rank == 0).map_err(|failure| match failure {
        Failure::Input(error) | Failure::Run(error) => format!("{error:#}"),
        other => format!("{other:?}"),
    })?;
    let here = |row: Row| if row.from == HERE { Row { from: format!("rank {}", config.rank), ..row } } else { row };
    Ok(tester.rows.into_iter().map(here).collect())
}

/// The rows that rank 0 has printed.
struct Printed {
    rows: Vec<Row>,
    json: bool,
    /// Why no further row can be printed. The tests go on, as all ranks must take part.
    failure: Option<io::Error>,
}

impl Printed {
    fn print(&mut self, rows: Result<Vec<Row>, String>) {
        match rows {
            Ok(rows) => rows.into_iter().for_each(|row| {
                if self.failure.is_none() {
                    self.failure = super::write_row(&row, self.json).err();
                }
                self.rows.push(row);
            }),
            Err(why) => message!("error: {}", anyhow!("a rank could not test its links: {why}")),
        }
    }
}

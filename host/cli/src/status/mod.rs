//! `sumac status`: a controller's fabric, devices, tenants, jobs and recoveries.

mod json;
mod rates;
mod text;
mod watch;

use crate::address::ControllerAddress;
use crate::exit::Failure;
use crate::key::KeyOption;
use clap::Args;
use rates::Sample;
use std::io::{self, Write};
use std::time::Duration;
use sumac::controller::{ControllerAddr, status};
#[cfg(test)]
pub(crate) use text::tests::job;

/// `sumac status`.
#[derive(Debug, Args)]
pub(crate) struct StatusArgs {
    #[command(flatten)]
    controller: ControllerAddress,
    #[command(flatten)]
    key: KeyOption,
    /// Repeat the report every SECONDS until Ctrl-C, with rates between two reports
    #[arg(long, value_name = "SECONDS", num_args = 0..=1, default_missing_value = "2", value_parser = interval)]
    watch: Option<Duration>,
    /// Print the whole report as JSON; with --watch, one object per line
    #[arg(long)]
    json: bool,
}

/// Query the controller and print its report.
pub(crate) fn run(args: &StatusArgs) -> Result<(), Failure> {
    let controller = ControllerAddr { key: args.key.read_operator()?, ..args.controller.or_default()? };
    if let Some(interval) = args.watch {
        return watch::run(controller, interval, args.json);
    }
    let sample = Sample::new(status(controller).map_err(Failure::run)?);
    let mut out = io::stdout().lock();
    if args.json {
        serde_json::to_writer_pretty(&mut out, &json::value(&sample, None)?).map_err(io::Error::from)?;
        writeln!(out)?;
    } else {
        text::write_report(&mut out, &sample.report, None)?;
    }
    Ok(out.flush()?)
}

/// Parse the interval of --watch.
fn interval(text: &str) -> Result<Duration, String> {
    let seconds = text.parse().ok().and_then(|seconds| Duration::try_from_secs_f64(seconds).ok());
    seconds
        .filter(|time| (Duration::from_millis(100)..=Duration::from_secs(86_400)).contains(time))
        .ok_or_else(|| "not a number of seconds from 0.1 to 86400".to_owned())
}

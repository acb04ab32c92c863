//! The `sumac` command: the one place where controller, devices and ranks are put together.
//!
//! Every subcommand is a module with its options (clap) and a `run`. Three kinds of process come from this one
//! binary: the *supervisor* (`perf`, `all-reduce`, ...) starts a controller, emulated devices and ranks as children of its
//! own, talks to them in lines over pipes ([`cluster`]), and leaves none of them behind.
//!
//! Invariants: results go to stdout and everything else to stderr; the exit status is one of those in
//! [`exit`]; no outside input (option, file, environment, peer) panics.

/// Print a line on stderr. A reader that has gone away misses it; that is no reason to end, as `eprintln!` would.
macro_rules! tell {
    ($($arg:tt)*) => { $crate::exit::tell(format_args!($($arg)*)) };
}

mod address;
mod args;
mod board;
mod chaos;
mod cluster;
mod collective;
mod devices;
mod doctor;
mod exit;
mod files;
mod flash;
mod image;
mod job;
mod layout;
mod logging;
mod machine;
mod options;
mod pattern;
mod perf;
mod plan;
mod quota;
mod selftest;
mod server;
mod size;
mod stats;
mod status;
mod worker;
mod workload;

use args::{Cli, Command};
use clap::Parser;
use std::process::ExitCode;

fn main() -> ExitCode {
    // First of all: from here on, a supervised process can't outlive its supervisor.
    cluster::die_with_supervisor();
    let cli = Cli::parse();
    logging::init(cli.verbose);
    let outcome = match cli.command {
        Command::Perf(args) => perf::run(&args, cli.verbose),
        Command::AllReduce(args) => collective::all_reduce(&args, cli.verbose),
        Command::ReduceScatter(args) => collective::reduce_scatter(&args, cli.verbose),
        Command::AllGather(args) => collective::all_gather(&args, cli.verbose),
        Command::Broadcast(args) => collective::broadcast(&args, cli.verbose),
        Command::Device(args) => server::run_device(args),
        Command::Controller(args) => server::run_controller(&args),
        Command::Chaos(args) => chaos::run(&args),
        Command::Selftest(args) => selftest::run(&args, cli.verbose),
        Command::Status(args) => status::run(&args),
        Command::Plan(args) => plan::run(&args),
        Command::Doctor(args) => doctor::run(&args),
        Command::Image(args) => image::run(&args),
        Command::Log(args) => board::show_log(&args),
        Command::Emulate(args) => board::emulate(&args),
        Command::Flash(args) => flash::run(&args),
        Command::Devices(args) => devices::run(&args),
        Command::RshimWorker(args) => flash::worker::run(&args),
        Command::Rank => worker::run(),
    };
    exit::report(outcome)
}

//! The `sumac` command, which composes controller, devices and ranks.
//!
//! Every subcommand is a module with its options (clap) and a `run` function. A *supervisor* (`perf`, `all-reduce`,
//! ...) starts a controller, emulated devices and ranks as child processes of the same binary, exchanges lines with
//! them over pipes ([`cluster`]), and ends all of them.
//!
//! Invariants: results go to stdout and everything else to stderr. The exit status is one of those in [`exit`]. No
//! external input (option, file, environment, peer) causes a panic.

/// Print a line on stderr. Unlike `eprintln!`, it ignores a closed stderr.
macro_rules! message {
    ($($arg:tt)*) => { $crate::exit::print_line(format_args!($($arg)*)) };
}

/// Print a note on stderr, unless the command is quiet.
macro_rules! note {
    ($($arg:tt)*) => {
        if !$crate::exit::is_quiet() {
            message!($($arg)*);
        }
    };
}

mod address;
mod args;
mod bench;
mod board;
mod calibrate;
mod card;
mod chaos;
mod cluster;
mod collective;
mod config;
mod costs;
mod deprecated;
mod doctor;
mod exit;
mod fabric;
mod files;
mod flash;
mod generate;
mod image;
mod job;
mod key;
mod layout;
mod logging;
mod machine;
mod options;
mod pattern;
mod perf;
mod plan;
mod quota;
mod ranks;
mod run;
mod selftest;
mod server;
mod size;
mod ssh;
mod stats;
mod status;
mod topology;
mod worker;
mod workload;

use args::{Cli, Command};
use clap::CommandFactory;
use std::process::ExitCode;

fn main() -> ExitCode {
    // First, so that a supervised process cannot outlive its supervisor.
    cluster::die_with_supervisor();
    let arguments = deprecated::Arguments::new(std::env::args_os());
    let cli = config::parse::<Cli>(arguments.args);
    if cli.as_ref().is_ok_and(|cli| cli.quiet) {
        exit::be_quiet();
    }
    // The processes that a supervisor starts have its environment, and it has warned already.
    if !cluster::is_supervised() {
        let variables = sumac::comm::environment::check().into_iter().map(|warning| warning.to_string());
        arguments.warnings.into_iter().chain(variables).for_each(|warning| note!("warning: {warning}"));
    }
    // Help and usage errors end the command here.
    let cli = match cli {
        Ok(cli) => cli,
        Err(config::ParseError::Usage(error)) => error.exit(),
        Err(config::ParseError::File(error)) => return exit::report(Err(exit::Failure::Input(error))),
    };
    logging::init(cli.verbose);
    let outcome = match cli.command {
        Command::Perf(args) => perf::run(*args, cli.verbose),
        Command::Calibrate(args) => calibrate::run(&args, cli.verbose),
        Command::AllReduce(args) => collective::all_reduce(&args, cli.verbose),
        Command::ReduceScatter(args) => collective::reduce_scatter(&args, cli.verbose),
        Command::AllGather(args) => collective::all_gather(&args, cli.verbose),
        Command::Broadcast(args) => collective::broadcast(&args, cli.verbose),
        Command::Device(args) => server::run_device(args),
        Command::Controller(args) => server::run_controller(&args),
        Command::Chaos(args) => chaos::run(&args),
        Command::Run(args) => run::run(&args, cli.verbose),
        Command::Selftest(args) => selftest::run(&args, cli.verbose),
        Command::Status(args) => status::run(&args),
        Command::Key(args) => key::run(&args),
        Command::Plan(args) => plan::run(&args),
        Command::Topology(args) => topology::run(&args),
        Command::Doctor(args) => doctor::run(&args, &Cli::command()),
        Command::Completions(args) => generate::completions(&Cli::command(), &args),
        Command::Man(args) => generate::man(&Cli::command(), &args),
        Command::Image(args) => image::run(&args),
        Command::Log(args) => board::show_log(&args),
        Command::Emulate(args) => board::emulate(&args),
        Command::Flash(args) => flash::run(&args),
        Command::Card(args) => card::run(&args),
        Command::RshimWorker(args) => flash::worker::run(&args),
        Command::Rank => worker::run(),
        Command::Become(args) => run::become_program(&args),
        Command::Guard => run::watch(),
    };
    exit::report(outcome)
}

//! Programs that use the library, as child processes: this test program, in a role.

use crate::train;
use std::error::Error;
use std::process::{Child, Command, Output, Stdio, Termination};
use sumac::testing::LocalCluster;
use sumac::{CallOptions, Communicator, JoinConfig, ReduceOp};

const ROLE: &str = "SUMAC_TEST_LIBRARY_ROLE";

/// Return the command of a program: `join`, `train`, `cancel`, `subscribe`, `subscribe-late` or `recover`.
pub(crate) fn program(role: &str) -> Command {
    let mut command = Command::new(std::env::current_exe().expect("this program"));
    command.args(["--exact", "programs::run_role", "--nocapture"]).env(ROLE, role).env_remove("SUMAC_LOG");
    command
}

/// Start a program on each rank of a new job.
pub(crate) fn start_ranks(cluster: &LocalCluster, role: &str, log: Option<&str>) -> Vec<Child> {
    let start = |variables| {
        let mut command = program(role);
        command.envs(variables).envs(log.map(|value| ("SUMAC_LOG", value)));
        command.stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().expect("a process")
    };
    cluster.environments().into_iter().map(start).collect()
}

/// Run a program on each rank of a new job.
pub(crate) fn run_ranks(cluster: &LocalCluster, role: &str, log: Option<&str>) -> Vec<Output> {
    let ranks = start_ranks(cluster, role, log);
    ranks.into_iter().map(|rank| rank.wait_with_output().expect("an end")).collect()
}

/// Return what a program printed to stderr.
pub(crate) fn stderr(output: &Output) -> String {
    String::from_utf8_lossy(&output.stderr).into_owned()
}

/// Return what a program printed to stdout, beside the test harness.
pub(crate) fn stdout(output: &Output) -> String {
    String::from_utf8_lossy(&output.stdout).into_owned()
}

/// The programs; no test by itself.
#[test]
fn run_role() {
    let Ok(role) = std::env::var(ROLE) else { return };
    match role.as_str() {
        "join" => end(join(|_| Ok(()))),
        "train" => end(train::main()),
        "cancel" => end(join(cancelled)),
        "subscribe" => {
            subscribe();
            end(join(|_| Ok(())));
        }
        "subscribe-late" => end(join(|comm| {
            subscribe();
            cancelled(comm)
        })),
        "recover" => end(join(recover)),
        other => panic!("no role {other}"),
    }
}

/// End the process as if `main` had returned this.
fn end<E: std::fmt::Debug>(result: Result<(), E>) {
    let status = i32::from(result.is_err());
    result.report();
    std::process::exit(status);
}

fn subscribe() {
    tracing_subscriber::fmt().with_ansi(false).with_writer(std::io::stdout).init();
}

fn join(then: impl FnOnce(&Communicator) -> Result<(), sumac::Error>) -> Result<(), Box<dyn Error>> {
    let comm = Communicator::join(JoinConfig::from_env()?)?;
    comm.all_reduce(&mut [1_u32], ReduceOp::Sum)?;
    then(&comm)?;
    comm.leave();
    Ok(())
}

/// Rank 0 cancels its communicator, and is lost to the others.
fn cancelled(comm: &Communicator) -> Result<(), sumac::Error> {
    if comm.rank() == 0 {
        comm.barrier()?;
        comm.canceller().cancel();
    }
    let error = loop {
        if let Err(error) = comm.barrier() {
            break error;
        }
    };
    match error {
        sumac::Error::Cancelled if comm.rank() == 0 => Ok(()),
        sumac::Error::RanksFailed { .. } if comm.rank() != 0 => Ok(()),
        other => Err(other),
    }
}

/// Sum until all ranks have recovered from a lost device, and some more.
fn recover(comm: &Communicator) -> Result<(), sumac::Error> {
    println!("ready");
    let mut rounds_after = 0;
    while rounds_after < 3 {
        let mut recovered = [u32::from(comm.recoveries().count > 0)];
        comm.all_reduce_with(&mut recovered, ReduceOp::Sum, &CallOptions::default())?;
        rounds_after += u32::from(recovered[0] == comm.size());
    }
    Ok(())
}

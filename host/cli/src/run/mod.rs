//! `sumac run`: a program as the ranks of a job on this machine, with a controller and emulated devices of its own.
//!
//! Invariant: nothing that was started is left when the command has ended, however it ends. In order: each program is
//! asked to end (SIGTERM), and killed with its process group after [`GRACE`]; then controller and devices; then every
//! process that has left its group and become a child of this one ([`leftovers`]). If the command itself is killed,
//! [`guard`] kills the groups.
//!
//! The controller serves only those who have a key ([`ClusterKeys`]). The programs, which may close what they inherit
//! and start others, find theirs by name: in memory of this process, which is gone with it.

mod guard;
mod leftovers;

pub(crate) use guard::watch;

use crate::cluster::{
    self, ChildId, ClusterConfig, ClusterError, ClusterKeys, Limit, Program, Supervisor, describe_controller,
};
use crate::exit::Failure;
use crate::layout::Layout;
use anyhow::{Context, anyhow, ensure};
use clap::Args;
use guard::Guard;
use indicatif::ProgressBar;
use rustix::process::Signal;
use std::ffi::{OsStr, OsString};
use std::net::SocketAddr;
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::mpsc::{RecvTimeoutError, Sender, channel};
use std::time::Duration;
use sumac::comm::environment::file_settings;
use sumac::config_file::{ConfigFile, ConfigFileError};
use sumac::controller::proto::{DEFAULT_TENANT, check_tenant};

/// How long a program may take to end after SIGTERM.
const GRACE: Duration = Duration::from_secs(5);

/// How long output may take to arrive from processes that have ended.
const OUTPUT_LIMIT: Duration = Duration::from_secs(2);

/// How long ranks may run: forever.
const FOREVER: Duration = Duration::from_secs(u32::MAX as u64);

/// `sumac run`.
#[derive(Debug, Args)]
pub(crate) struct RunArgs {
    /// Number of ranks, each a process of the program
    #[arg(short = 'n', long = "ranks", value_name = "N", value_parser = clap::value_parser!(u32).range(1..=1024))]
    ranks: u32,
    /// Number of emulated devices: a single one, or two leaf devices, one of which is the root
    #[arg(long, value_name = "N", default_value_t = 1, value_parser = clap::value_parser!(u8).range(1..=2),
          conflicts_with = "topology")]
    devices: u8,
    /// Plan the tree on this fabric (see `sumac topology --help`) and build it from emulated devices
    #[arg(long, value_name = "FILE")]
    topology: Option<PathBuf>,
    /// Begin each line of output with the rank, as in `2: `
    #[arg(short, long)]
    label: bool,
    /// The program and its arguments
    #[arg(required = true, trailing_var_arg = true, value_name = "PROGRAM")]
    command: Vec<OsString>,
}

/// `sumac become` (hidden).
#[derive(Debug, Args)]
pub(crate) struct BecomeArgs {
    #[arg(required = true, last = true, value_name = "PROGRAM")]
    command: Vec<OsString>,
}

/// Become the program of a rank.
pub(crate) fn become_program(args: &BecomeArgs) -> Result<(), Failure> {
    let (program, rest) = args.command.split_first().ok_or_else(|| Failure::Input(anyhow!("no program")))?;
    let error = cluster::become_program(program, rest);
    Err(Failure::Input(anyhow!("cannot run {}: {error}", program.display())))
}

/// Run a program on all ranks.
pub(crate) fn run(args: &RunArgs, verbose: u8) -> Result<(), Failure> {
    check_program(&args.command[0], std::env::var_os("PATH").as_deref()).map_err(Failure::Input)?;
    let layout = match &args.topology {
        Some(path) => Layout::from_file(path, args.ranks),
        None => Layout::generated(args.devices, args.ranks),
    };
    let layout = layout.map_err(Failure::Input)?;
    let keys = Arc::new(ClusterKeys::for_tenant(&layout, &tenant()?)?);
    leftovers::adopt();
    let supervisor = Supervisor::new(ProgressBar::hidden(), verbose)?;
    let guard = Guard::start().context("cannot start the guard process").map_err(Failure::Run)?;
    let mut ranks = Ranks { supervisor, guard, ids: Vec::new() };
    let outcome = ranks.run(args, &layout, &keys);
    let Ranks { supervisor, guard, ids } = ranks;
    let groups: Vec<u32> = ids.into_iter().map(|id| supervisor.pid(id)).collect();
    drop(supervisor);
    leftovers::end(&guard);
    guard.end(groups);
    outcome.map_err(|error| match error {
        ClusterError::Died { name, status, .. } if name.starts_with(RANK) => {
            Failure::Run(anyhow!("{name} failed ({status}); the other ranks were ended"))
        }
        error => error.into(),
    })
}

/// The variable that names a job's tenant.
const TENANT: &str = "SUMAC_TENANT";

/// The beginning of a rank's name.
const RANK: &str = "rank ";

/// The processes of a run.
struct Ranks {
    supervisor: Supervisor,
    guard: Guard,
    ids: Vec<ChildId>,
}

impl Ranks {
    /// Start everything, and wait until all ranks have succeeded or one has failed. Then end all ranks.
    fn run(&mut self, args: &RunArgs, layout: &Layout, keys: &Arc<ClusterKeys>) -> Result<(), ClusterError> {
        let config = ClusterConfig { keys: Some(Arc::clone(keys)), ..ClusterConfig::without_keys(layout) };
        let controller = cluster::start(&mut self.supervisor, &config)?.addr;
        note!("# {}", describe_controller(controller, Some(keys)));
        let (output, all_output) = channel();
        let outcome = self.start(args, layout, (controller, keys), output).and_then(|()| self.wait());
        if outcome.is_err() {
            self.end();
        }
        match all_output.recv_timeout(OUTPUT_LIMIT) {
            Ok(()) | Err(RecvTimeoutError::Disconnected) => {}
            Err(RecvTimeoutError::Timeout) => {
                tracing::info!("a process of a rank that has ended holds its output open")
            }
        }
        outcome
    }

    /// Wait until all ranks have succeeded.
    fn wait(&mut self) -> Result<(), ClusterError> {
        let mut left = self.ids.clone();
        while !left.is_empty() {
            let ended = self.supervisor.wait_any_ended(&left, Limit::new(FOREVER))?;
            ended.iter().for_each(|&id| self.guard.remove(self.supervisor.pid(id)));
            left.retain(|id| !ended.contains(id));
        }
        Ok(())
    }

    fn start(
        &mut self,
        args: &RunArgs,
        layout: &Layout,
        (controller, keys): (SocketAddr, &ClusterKeys),
        output: Sender<()>,
    ) -> Result<(), ClusterError> {
        let job = std::env::var("SUMAC_JOB").ok().filter(|job| !job.is_empty());
        let job = job.unwrap_or_else(|| format!("run-{}", std::process::id()));
        let (controller, world) = (controller.to_string(), args.ranks.to_string());
        for (rank, host) in layout.hosts.iter().enumerate() {
            let number = rank.to_string();
            let variables = [
                ("SUMAC_CONTROLLER", &controller),
                ("SUMAC_JOB", &job),
                ("SUMAC_HOST", host),
                ("SUMAC_RANK", &number),
                ("SUMAC_WORLD", &world),
                ("SUMAC_LOCAL_RANK", &number),
                // For programs that look for them on their own.
                ("RANK", &number),
                ("WORLD_SIZE", &world),
                ("LOCAL_RANK", &number),
            ];
            let id = self.supervisor.spawn_program(Program {
                name: format!("{RANK}{rank}"),
                command: &args.command,
                variables: variables
                    .map(|(name, value)| (name, value.to_owned()))
                    .into_iter()
                    .chain(keys.variables())
                    .collect(),
                // It would contradict the file.
                hidden: &["SUMAC_KEY"],
                label: if args.label { format!("{rank}: ") } else { String::new() },
                output: output.clone(),
            })?;
            self.ids.push(id);
            self.guard.add(self.supervisor.pid(id));
        }
        Ok(())
    }

    /// End all ranks that still run: ask them to, and kill those that do not. A signal to this process ends the wait.
    fn end(&mut self) {
        let limit = Limit::new(GRACE);
        self.ids.iter().for_each(|&id| {
            self.supervisor.may_fail(id);
            self.supervisor.signal_group(id, Signal::TERM);
        });
        let ended = self.ids.clone().into_iter().try_for_each(|id| self.supervisor.ending(id, limit).map(|_| ()));
        if let Err(error) = ended {
            tracing::info!(%error, "killing the ranks that are left");
        }
        self.ids.iter().for_each(|&id| self.supervisor.signal_group(id, Signal::KILL));
    }
}

/// Return the tenant as which ranks join unless their program decides otherwise.
fn tenant() -> Result<String, Failure> {
    let in_file = || {
        let Some(file) = ConfigFile::from_env()? else { return Ok(None) };
        let settings = file_settings(&file)?;
        Ok(settings.into_iter().find(|setting| setting.variable == TENANT).map(|setting| setting.value))
    };
    let named = match std::env::var(TENANT) {
        Ok(named) => Some(named),
        Err(_) => in_file().map_err(|error: ConfigFileError| Failure::input(error))?,
    };
    let named = named.unwrap_or_else(|| DEFAULT_TENANT.to_owned());
    check_tenant(&named).map_err(|why| Failure::Input(anyhow!("{TENANT}: {why}")))?;
    Ok(named)
}

/// Check that a program can be found before anything starts.
fn check_program(program: &OsStr, path: Option<&OsStr>) -> anyhow::Result<()> {
    let is_executable = |path: &Path| {
        path.metadata().is_ok_and(|metadata| metadata.is_file() && metadata.permissions().mode() & 0o111 != 0)
    };
    let shown = program.display();
    if program.as_encoded_bytes().contains(&b'/') {
        let path = Path::new(program);
        let metadata = path.metadata().with_context(|| format!("cannot run {shown}"))?;
        ensure!(metadata.is_file(), "cannot run {shown}: it is not a file");
        ensure!(is_executable(path), "cannot run {shown}: it is not executable");
        return Ok(());
    }
    let mut folders = path.map(std::env::split_paths).into_iter().flatten();
    ensure!(
        folders.any(|folder| is_executable(&folder.join(program))),
        "cannot find {shown} in PATH; write ./{shown} for a program in this folder"
    );
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn program_is_found_in_path_or_by_its_own() {
        let check = |program: &str, path: &str| check_program(program.as_ref(), Some(path.as_ref()));
        assert!(check("sh", "/nowhere:/bin").is_ok() && check("/bin/sh", "").is_ok());
        for (program, why) in [
            ("sh", "cannot find sh in PATH; write ./sh"),
            ("/nowhere/sh", "cannot run /nowhere/sh"),
            ("/bin", "it is not a file"),
            (concat!(env!("CARGO_MANIFEST_DIR"), "/Cargo.toml"), "it is not executable"),
        ] {
            let error = check(program, "/nowhere").expect_err(program).to_string();
            assert!(error.contains(why), "{error}");
        }
    }
}

//! Attacks by unknown peers, tenants and other users on every port of live processes. A job of real processes must keep
//! running with exact results meanwhile (`tests/run hostile`).
//!
//!     hostile [NAME...]    run all cases, or those whose names contain one of these
//!     hostile --list       list the cases
//!
//! Uses the `sumac` command built beside this program, or that in SUMAC. Exit status: 0 if nothing failed, 77 if a case
//! was skipped, 101 if one failed, 2 for wrong usage.

mod controller;
mod data;
mod devices;
mod rank;
mod ranks;
mod shm;
mod testbed;
mod throughput;
mod traffic;
mod users;

use rustix::process::{Resource, Rlimit, geteuid, getrlimit, setrlimit};
use std::collections::VecDeque;
use std::os::unix::fs::PermissionsExt;
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Command, ExitCode};
use std::sync::Mutex;
use std::time::Instant;
use std::{env, fs, thread};
use testbed::Tools;

/// What a case needs to run.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Needs {
    /// Nothing: it runs beside others.
    Nothing,
    /// All processors, because it measures throughput.
    Alone,
    /// Root: it acts as another user, or captures packets.
    Root,
}

/// An attack; it panics if an expectation is not met.
struct Case {
    name: &'static str,
    needs: Needs,
    run: fn(&Tools),
}

const fn case(name: &'static str, run: fn(&Tools)) -> Case {
    Case { name, needs: Needs::Nothing, run }
}

const fn root(name: &'static str, run: fn(&Tools)) -> Case {
    Case { name, needs: Needs::Root, run }
}

const fn alone(name: &'static str, run: fn(&Tools)) -> Case {
    Case { name, needs: Needs::Alone, run }
}

/// The cases, longest first.
const CASES: &[Case] = &[
    alone("flood_leaves_half_the_throughput_over_udp", throughput::over_udp),
    alone("flood_leaves_half_the_throughput_over_shm", throughput::over_shm),
    case("slow_handshake_at_the_controller_is_disconnected", controller::drip_handshakes),
    case("slow_handshakes_at_rank_ports_do_not_block_recovery", ranks::drip_hellos),
    case("garbage_at_the_controller_is_refused", controller::garbage),
    case("idle_connections_do_not_block_the_controller", controller::idle_connections),
    case("client_that_never_reads_blocks_no_other", controller::client_that_never_reads),
    case("joins_on_one_connection_hold_one_group", controller::joins_without_end),
    case("invalid_names_are_refused", controller::long_and_wild_names),
    case("resumed_job_of_impossible_size_is_refused", controller::impossible_world),
    case("job_of_300_ranks_pinned_to_one_device_gets_replies", controller::crowd_on_one_device),
    case("controller_without_descriptors_does_not_spin", controller::no_descriptors),
    case("silent_devices_do_not_delay_status", devices::mute),
    case("crash_looping_device_is_offered_rarely", devices::crash_loop),
    case("taken_device_name_is_refused", devices::taken_name),
    case("idle_connections_at_rank_ports_do_not_block_recovery", ranks::idle_connections),
    case("connect_flood_at_rank_ports_does_not_block_recovery", ranks::connect_flood),
    case("garbage_at_rank_ports_is_dropped", ranks::garbage),
    case("garbage_at_sockets_for_ranks_memory_is_dropped", ranks::garbage_at_memory_sockets),
    case("rank_without_descriptors_does_not_spin", ranks::no_descriptors),
    case("garbage_at_the_shm_socket_is_dropped", shm::garbage),
    case("idle_connections_at_the_shm_socket_do_not_block_attach", shm::idle_connections),
    case("forged_packets_at_data_ports_are_dropped", data::forged),
    root("replayed_packets_from_elsewhere_are_dropped", data::replayed),
    root("redo_memory_shows_no_results_to_another_user", users::redo_memory),
    root("memory_cannot_be_opened_by_another_user", users::files),
    root("attach_without_a_key_is_refused_to_another_user", users::stolen_function),
    root("root_shares_no_memory_with_another_users_device", users::foreign_device),
];

/// The number of cases that run at a time.
const PARALLEL: usize = 3;

/// The exit status if a case was skipped.
const SKIPPED: u8 = 77;

fn main() -> ExitCode {
    let args: Vec<String> = env::args().skip(1).collect();
    let of_role = match args.first().map(String::as_str) {
        Some("--rank") => Some(rank::main(&args[1..])),
        Some("--as") => Some(become_user(&args[1..])),
        Some("--spy") => Some(users::spy(&args[1..])),
        _ => None,
    };
    if let Some(ended) = of_role {
        return ended.map_or_else(
            |error| {
                eprintln!("{error}");
                ExitCode::FAILURE
            },
            |()| ExitCode::SUCCESS,
        );
    }
    if args.iter().any(|arg| arg == "--list") {
        CASES.iter().for_each(|case| println!("{}", case.name));
        return ExitCode::SUCCESS;
    }
    // Ignore Cargo's own options.
    let names: Vec<&String> = args.iter().filter(|arg| !arg.starts_with('-')).collect();
    let chosen = |case: &&Case| names.is_empty() || names.iter().any(|name| case.name.contains(name.as_str()));
    let cases: Vec<&Case> = CASES.iter().filter(chosen).collect();
    if cases.is_empty() {
        eprintln!("no case matches {names:?}; --list lists them");
        return ExitCode::from(2);
    }
    match tools() {
        Ok(tools) => {
            let status = run_all(&tools, &cases);
            // Failure to remove the logs does not matter.
            let _ = fs::remove_dir_all(&tools.logs);
            status
        }
        Err(why) => {
            eprintln!("{why}");
            ExitCode::from(2)
        }
    }
}

/// Copy the programs to where any user may run them, and raise the limit of descriptors.
fn tools() -> Result<Tools, String> {
    let own = env::current_exe().map_err(|error| error.to_string())?;
    let beside = own.parent().and_then(Path::parent).map(|folder| folder.join("sumac"));
    let sumac = env::var_os("SUMAC").map(PathBuf::from).or(beside).filter(|path| path.is_file());
    let sumac = sumac.ok_or("no `sumac` command: run cargo build -p sumac-cli, or set SUMAC to its path")?;
    let folder = env::temp_dir().join(format!("sumac-hostile-{}", std::process::id()));
    fs::create_dir(&folder).map_err(|error| format!("{}: {error}", folder.display()))?;
    let open = |path: &Path, mode| fs::set_permissions(path, fs::Permissions::from_mode(mode));
    let copy = |from: &Path, name: &str| {
        let to = folder.join(name);
        let copied = fs::copy(from, &to).and_then(|_| open(&to, 0o755));
        copied.map(|()| to).map_err(|error| format!("copy {} into {}: {error}", from.display(), folder.display()))
    };
    open(&folder, 0o755).map_err(|error| error.to_string())?;
    let files = getrlimit(Resource::Nofile);
    // All attackers' connections belong to this process.
    setrlimit(Resource::Nofile, Rlimit { current: files.maximum, ..files }).map_err(|error| error.to_string())?;
    Ok(Tools { sumac: copy(&sumac, "sumac")?, own: copy(&own, "hostile")?, logs: folder, files })
}

fn run_all(tools: &Tools, cases: &[&Case]) -> ExitCode {
    let (failed, skipped) = (Mutex::new(Vec::new()), Mutex::new(Vec::new()));
    let run = |case: &Case| {
        if case.needs == Needs::Root && !geteuid().is_root() {
            println!("SKIPPED {}: it needs root", case.name);
            return skipped.lock().expect("no panic").push(case.name);
        }
        let begun = Instant::now();
        let ended = thread::scope(|scope| {
            let thread = thread::Builder::new().name(case.name.into());
            thread.spawn_scoped(scope, || (case.run)(tools)).expect("a thread").join()
        });
        let verdict = if ended.is_ok() { "ok" } else { "FAILED" };
        println!("{verdict:7} {:62} {:5.1} s", case.name, begun.elapsed().as_secs_f64());
        if ended.is_err() {
            failed.lock().expect("no panic").push(case.name);
        }
    };
    cases.iter().filter(|case| case.needs == Needs::Alone).for_each(|case| run(case));
    let rest: VecDeque<&Case> = cases.iter().copied().filter(|case| case.needs != Needs::Alone).collect();
    let rest = Mutex::new(rest);
    let next = || rest.lock().expect("no panic").pop_front();
    thread::scope(|scope| {
        for _ in 0..PARALLEL {
            scope.spawn(|| {
                while let Some(case) = next() {
                    run(case);
                }
            });
        }
    });
    let (failed, skipped) = (failed.into_inner().expect("no panic"), skipped.into_inner().expect("no panic"));
    println!("{} cases, {} failed, {} skipped", cases.len(), failed.len(), skipped.len());
    failed.iter().for_each(|name| println!("to repeat it: cargo test -p sumac-tests --test hostile {name}"));
    match (failed.is_empty(), skipped.is_empty()) {
        (false, _) => ExitCode::from(101),
        (true, false) => ExitCode::from(SKIPPED),
        (true, true) => ExitCode::SUCCESS,
    }
}

/// Run a command as another user: `USER COMMAND...`.
fn become_user(args: &[String]) -> Result<(), String> {
    let (user, command) = args.split_first().ok_or("no user")?;
    let user = user.parse().map_err(|error| format!("user {user}: {error}"))?;
    users::set(user)?;
    let (program, rest) = command.split_first().ok_or("no command")?;
    Err(format!("{program}: {}", Command::new(program).args(rest).exec()))
}

//! `sumac perf --ssh HOST,...`: ranks on several hosts where no launcher can start them.
//!
//! Each rank is a child of this process: the `ssh` of its host, which runs `sumac perf` there as a rank
//! ([`super::launched`]). Rank 0's lines are this command's.
//!
//! Invariants:
//! - A key travels on the standard input of `ssh` alone: never in an argument or a variable, which others on the hosts
//!   could read.
//! - A rank ends with its `ssh`: it reads its standard input to the end, which comes when `ssh` ends ([`follow`]).

use super::args::PerfArgs;
use crate::cluster::{ClusterError, Limit, Supervisor};
use crate::exit::Failure;
use crate::ssh::{self, is_host, program, quoted};
use anyhow::{Context, anyhow, ensure};
use indicatif::ProgressBar;
use std::ffi::OsString;
use std::io::{self, BufRead, Read, Write};
use std::str::FromStr;
use std::thread;
use std::time::{Duration, SystemTime, UNIX_EPOCH};
use sumac::comm::environment::key_from_env;
use sumac::controller::keys::parse_key;
use sumac_hal::ctrl::secure::Key;
use zeroize::Zeroizing;

/// The hidden option of the ranks.
pub(super) const FOLLOW: &str = "follow-stdin";

/// The most ranks on one host.
const SLOTS_MAX: u32 = 256;

/// The length of a key with its comments, in bytes.
const KEY_LEN_MAX: u64 = 64 << 10;

/// Ranks may run for any time.
const FOREVER: Duration = Duration::from_secs(u32::MAX as u64);

/// Options that are not passed on.
const OWN_OPTIONS: [&str; 2] = ["--ssh", "--sumac-path"];

/// Variables that every rank has its own value of, and secrets.
const OWN_VARIABLES: [&str; 11] = [
    "SUMAC_BIND",
    "SUMAC_CONFIG",
    "SUMAC_HOST",
    "SUMAC_JOB",
    "SUMAC_KEY",
    "SUMAC_KEY_FILE",
    "SUMAC_LOCAL_RANK",
    "SUMAC_RANK",
    "SUMAC_SSH",
    "SUMAC_SUPERVISOR",
    "SUMAC_WORLD",
];

/// A host, and the number of ranks on it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Host {
    name: String,
    slots: u32,
}

impl FromStr for Host {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        // The colons of an IPv6 address are within brackets.
        let (name, slots) = match text.rsplit_once(':') {
            Some((name, slots)) if !slots.ends_with(']') => (name, slots),
            _ => (text, "1"),
        };
        let slots = slots.parse().ok().filter(|slots| (1..=SLOTS_MAX).contains(slots));
        let slots = slots.ok_or_else(|| format!("write HOST or HOST:RANKS, with 1 to {SLOTS_MAX} ranks"))?;
        let name = name.strip_prefix('[').and_then(|name| name.strip_suffix(']')).unwrap_or(name);
        is_host(name).then(|| Self { name: name.into(), slots }).ok_or_else(|| format!("{name:?} is no name of a host"))
    }
}

/// Run the measurement on these hosts.
pub(super) fn run(args: &PerfArgs, hosts: &[Host], verbose: u8) -> Result<(), Failure> {
    args.check_launched().map_err(Failure::Input)?;
    let controller = args.controller.clone().or_else(|| variable("SUMAC_CONTROLLER"));
    let controller =
        controller.context("--ssh needs a running controller: name it by --controller or SUMAC_CONTROLLER");
    let controller = controller.map_err(Failure::Input)?;
    let key = key_from_env().map_err(Failure::input)?;
    let input = Zeroizing::new(key.map_or_else(|| "\n".to_owned(), |key| format!("{}\n\n", key.reveal())));
    let program = program(args.sumac_path.as_deref()).map_err(Failure::Input)?;
    let options = options(std::env::args_os().skip(1)).map_err(Failure::Input)?;
    let ssh = ssh::words(&[]);
    let places: Vec<_> = hosts.iter().flat_map(|host| (0..host.slots).map(move |local| (&host.name, local))).collect();
    let job = variable("SUMAC_JOB").unwrap_or_else(job_name);
    let mut supervisor = Supervisor::new(ProgressBar::hidden(), verbose)?;
    let mut ranks = Vec::with_capacity(places.len());
    for (rank, (host, local)) in places.iter().enumerate() {
        let own = [
            ("SUMAC_CONTROLLER", controller.clone()),
            ("SUMAC_JOB", job.clone()),
            ("SUMAC_RANK", rank.to_string()),
            ("SUMAC_WORLD", places.len().to_string()),
            ("SUMAC_LOCAL_RANK", local.to_string()),
        ];
        let variables = own.map(|(name, value)| (name.to_owned(), value)).into_iter().chain(inherited());
        let words =
            ["exec".into(), "env".into()].into_iter().chain(variables.map(|(name, value)| format!("{name}={value}")));
        let words = words.chain([program.clone()]).chain(options.iter().cloned()).chain([format!("--{FOLLOW}")]);
        let command = words.map(|word| quoted(&word)).collect::<Vec<_>>().join(" ");
        let start = [&ssh[..], &[(*host).clone(), command]].concat();
        let id = supervisor.spawn_other(&format!("rank {rank} on {host}"), &start)?;
        supervisor.write(id, input.as_bytes().to_vec());
        supervisor.may_end(id);
        ranks.push(id);
    }
    match supervisor.pass_on_lines(&ranks, Limit::new(FOREVER), |line| writeln!(io::stdout(), "{line}")) {
        Err(ClusterError::Died { name, status, stderr }) if status.code() == Some(2) => {
            Err(Failure::Input(ClusterError::Died { name, status, stderr }.into()))
        }
        Err(ClusterError::System { source, .. }) if source.kind() == io::ErrorKind::BrokenPipe => Err(source.into()),
        ended => Ok(ended?),
    }
}

/// Read the key that `perf --ssh` has sent, if it has one. From then on, this process ends when its standard input
/// does.
pub(super) fn follow() -> Result<Option<Key>, Failure> {
    let mut text = Zeroizing::new(String::with_capacity(KEY_LEN_MAX as usize));
    let mut input = io::BufReader::new(io::stdin());
    while !(text.ends_with("\n\n") || *text == "\n") {
        let left = KEY_LEN_MAX - text.len() as u64;
        let len = input.by_ref().take(left).read_line(&mut text).context("cannot read the key from stdin");
        if len.map_err(Failure::Run)? == 0 {
            return Err(Failure::Input(anyhow!("the key on stdin does not end with an empty line")));
        }
    }
    let start = thread::Builder::new().name("stdin".into()).spawn(move || {
        // Whether it ends or fails, the starter has gone.
        let _ = io::copy(&mut input, &mut io::sink());
        std::process::exit(1);
    });
    start.context("cannot watch stdin").map_err(Failure::Run)?;
    let key = (text.trim() != "").then(|| parse_key(&text)).transpose();
    key.context("the key on stdin").map_err(Failure::Input)
}

/// Return a variable that is set and not empty.
fn variable(name: &str) -> Option<String> {
    std::env::var(name).ok().filter(|value| !value.is_empty())
}

/// Return the variables that the ranks have from this process.
fn inherited() -> impl Iterator<Item = (String, String)> {
    let own = |name: &str| name == "SUMAC_CONTROLLER" || OWN_VARIABLES.contains(&name);
    let all =
        std::env::vars_os().filter_map(|(name, value)| Some((name.into_string().ok()?, value.into_string().ok()?)));
    all.filter(move |(name, _)| name.starts_with("SUMAC_") && !own(name))
}

/// Return a name that no other run has.
fn job_name() -> String {
    let since = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
    format!("perf-{}-{}", since.as_secs(), std::process::id())
}

/// Return the arguments of this command without those that are its own.
fn options(arguments: impl Iterator<Item = OsString>) -> anyhow::Result<Vec<String>> {
    let (mut options, mut is_value) = (Vec::new(), false);
    for argument in arguments {
        let argument = argument.into_string().map_err(|argument| anyhow!("argument {argument:?} is not UTF-8"))?;
        ensure!(!argument.contains('\0'), "argument {argument:?} contains a zero byte");
        let name = argument.split('=').next().unwrap_or_default();
        if std::mem::take(&mut is_value) {
            continue;
        }
        match OWN_OPTIONS.contains(&name) {
            true => is_value = name == argument,
            false => options.push(argument),
        }
    }
    Ok(options)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn host_has_one_rank_unless_it_says_how_many() {
        let host = |name: &str, slots| Ok(Host { name: name.into(), slots });
        for (text, expected) in [
            ("n1", host("n1", 1)),
            ("me@n1.lab:16", host("me@n1.lab", 16)),
            ("[fe80::1]", host("fe80::1", 1)),
            ("[::1]:2", host("::1", 2)),
        ] {
            assert_eq!(text.parse::<Host>(), expected, "{text}");
        }
        for text in ["", "n1:0", "n1:257", "n1:x", ":2", "-oProxyCommand=x", "a b"] {
            assert!(text.parse::<Host>().is_err(), "{text}");
        }
    }

    #[test]
    fn own_options_are_not_passed_on() {
        let given = ["-v", "perf", "--ssh", "a,b", "-e", "8", "--sumac-path=/x", "--ssh=c", "--algo", "tree"];
        let options = options(given.into_iter().map(OsString::from)).expect("UTF-8");
        assert_eq!(options, ["-v", "perf", "-e", "8", "--algo", "tree"]);
    }
}

//! A rank's configuration as environment variables: what [`JoinConfig::from_env`] reads.
//!
//! Launchers say which rank of which job a process is ([`launcher`]); everything else is a variable that begins with
//! `SUMAC_`, and `MASTER_ADDR`. A misspelled variable would otherwise be ignored without a trace, so [`check`] finds
//! the ones that nothing reads. Reading takes a lookup function, so that tests need no process environment.

mod file;
mod setting;

pub use file::{FileSetting, file_settings};
pub use setting::SettingError;

use super::launcher::{self, LaunchError, Launcher, Placement};
use super::{DEFAULT_PORT, JoinConfig, JoinError, Progress, Straggler};
use crate::config_file::{ConfigFile, closest};
use crate::controller::keys::{parse_key, read_key};
use crate::controller::proto::check_tenant;
use crate::controller::{TREES_MAX, resolve_all};
use crate::local_address;
use crate::memory_kind::MemoryKind;
use crate::wait_policy::WaitPolicy;
use file::read_with;
use std::fmt;
use std::net::{IpAddr, SocketAddr, ToSocketAddrs};
use std::path::Path;
use std::sync::Once;
use std::time::Duration;
use sumac_hal::ctrl::Order;
use sumac_hal::ctrl::secure::Key;
use sumac_hal::udp::Offload;
use zeroize::Zeroizing;

/// A variable that begins with `SUMAC_` and is not used as it stands.
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub enum Warning {
    /// It has a new name; the old one works for one more release.
    Deprecated {
        /// The old name.
        old: &'static str,
        /// The new name.
        new: &'static str,
    },
    /// Nothing reads it.
    Unknown {
        /// Its name.
        name: String,
        /// The known variable whose name is closest, if one is close.
        similar: Option<&'static str>,
    },
}

impl fmt::Display for Warning {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Deprecated { old, new } => write!(f, "{old} is deprecated; use {new}"),
            Self::Unknown { name, similar: Some(similar) } => {
                write!(f, "unknown environment variable {name}; did you mean {similar}?")
            }
            Self::Unknown { name, similar: None } => write!(f, "unknown environment variable {name}"),
        }
    }
}

/// Old names of variables, each with the new one. They go with the next release.
pub const DEPRECATED: [(&str, &str); 2] = [("SUMAC_ATTACH", "SUMAC_TRANSPORT"), ("SUMAC_REPAIR", "SUMAC_RECOVER")];

/// Return a warning for each variable of this process that begins with `SUMAC_` and is unknown or deprecated, in order
/// of name.
pub fn check() -> Vec<Warning> {
    let mut names: Vec<_> = std::env::vars_os().filter_map(|(name, _)| name.into_string().ok()).collect();
    names.sort_unstable();
    names.iter().filter_map(|name| warning(name)).collect()
}

impl JoinConfig {
    /// Describe a rank by environment variables. Variables that are not set leave the defaults of [`JoinConfig::new`].
    ///
    /// | field | variable | value |
    /// |---|---|---|
    /// | `rank` | `SUMAC_RANK` | default: the [`launcher`]'s, as `RANK` |
    /// | `world` | `SUMAC_WORLD` | default: the launcher's, as `WORLD_SIZE` |
    /// | `controller` | `SUMAC_CONTROLLER` | `HOST:PORT`, or both of a pair; all addresses of a host name are tried |
    /// | | `MASTER_ADDR`, `SUMAC_PORT` | host and port if that is not set; default 127.0.0.1 and [`DEFAULT_PORT`] |
    /// | `embedded_controller` | `SUMAC_EMBEDDED_CONTROLLER` | `1` or `0` |
    /// | `key` | `SUMAC_KEY_FILE` | a file with the key, which only its owner can read; `-` is stdin |
    /// | | `SUMAC_KEY` | the key itself, as in the file |
    /// | `job` | `SUMAC_JOB` | default: the launcher's name of the job; `default` for a bare `RANK` |
    /// | `host` | `SUMAC_HOST` | the host's name in the fabric; set it on all ranks or on none |
    /// | `order` | `SUMAC_ORDER` | `arrival`, `fold` or `pairwise` |
    /// | `algo` | `SUMAC_ALGO` | the name of an [`Algo`](crate::Algo), as `auto`, `tree` or `ring` |
    /// | `shape` | `SUMAC_SHAPE` | a [`Shape`](crate::schedule::Shape), as `line`, `4x8` or `servers:4` |
    /// | `deadline` | `SUMAC_DEADLINE` | seconds |
    /// | `join_timeout` | `SUMAC_JOIN_TIMEOUT` | seconds |
    /// | `bind` | `SUMAC_BIND` | an IP address or a host name; default: the address that routes to the controller |
    /// | `rails` | | after a comma each: the addresses of further adapters, as `10.0.0.7,10.1.0.7` |
    /// | `interfaces` | `SUMAC_IFNAME` | an [`InterfaceFilter`](crate::local_address::InterfaceFilter), as `eth,ib` |
    /// | `udp` | `SUMAC_UDP_MAX_PACKET`, `SUMAC_UDP_RECEIVE_BUFFER`, `SUMAC_UDP_SEND_BUFFER` | bytes |
    /// | | `SUMAC_UDP_GSO`, `SUMAC_UDP_GRO` | `auto` or `off` |
    /// | | `SUMAC_TRAFFIC_CLASS` | of all packets and connections: 0 to 252, four times the DSCP |
    /// | | `SUMAC_UDP_PEER`, `SUMAC_UDP_SPIN_US` | `IP:PORT`; microseconds |
    /// | `transport` | `SUMAC_TRANSPORT` | `auto`, `udp`, `shm`, `verbs` or `rdma` |
    /// | `verbs` | `SUMAC_VERBS` | `DEVICE[:PORT[:GID-INDEX]]` |
    /// | `recover` | `SUMAC_RECOVER` | `1` or `0` |
    /// | `hierarchical` | `SUMAC_HIERARCHICAL` | `1` or `0` |
    /// | `trees` | `SUMAC_TREES` | a number, 0 to 255 |
    /// | `hybrid` | `SUMAC_HYBRID` | `1` or `0` |
    /// | `rab` | `SUMAC_RAB` | `1` or `0` |
    /// | `tenant` | `SUMAC_TENANT` | default `default` |
    /// | `wait_for_tree` | `SUMAC_WAIT_FOR_TREE` | seconds |
    /// | `progress` | `SUMAC_PROGRESS` | `caller` or `thread` |
    /// | `memory` | `SUMAC_MEMORY` | `plain` or `registered` |
    /// | `wait_policy` | `SUMAC_WAIT_POLICY` | `auto`, `spin`, `yield` or `sleep` |
    /// | `straggler` | `SUMAC_STRAGGLER` | `wait`, `deadline:SECONDS` or `partial:SECONDS` |
    ///
    /// Seconds may have decimals. [`UdpConfig::loopback_at`](sumac_hal::udp::UdpConfig::loopback_at), which only
    /// emulated machines need, has no variable.
    ///
    /// If `SUMAC_CONFIG` names a [configuration file](crate::config_file), its table `[rank]` sets what the environment
    /// does not: its keys are the variables without `SUMAC_`, in lower case, as `join_timeout`. `MASTER_ADDR` and
    /// `SUMAC_PORT` are defaults, which a `controller` in the file beats.
    ///
    /// The first call in a process logs a warning for each variable that begins with `SUMAC_` and is unknown or
    /// deprecated ([`check`]).
    ///
    /// # Errors
    /// [`JoinError::Environment`] names the variable that is missing or invalid, [`JoinError::ConfigFile`] the file and
    /// the key.
    pub fn from_env() -> Result<Self, JoinError> {
        Self::from_env_and_file(ConfigFile::from_env()?.as_ref())
    }

    /// Describe a rank as [`from_env`](Self::from_env) does, by this file instead of that which `SUMAC_CONFIG` names.
    ///
    /// # Errors
    /// As [`from_env`](Self::from_env).
    pub fn from_env_and_file(file: Option<&ConfigFile>) -> Result<Self, JoinError> {
        warn_once();
        read_with(file, launcher::from_env().placement, variable)
    }

    /// Describe a rank as [`from_env`](Self::from_env) does, but for which rank of which job it is: programs that a
    /// framework starts learn that from the framework.
    ///
    /// # Errors
    /// As [`from_env`](Self::from_env).
    pub fn from_env_for(job: impl Into<String>, rank: u32, world: u32) -> Result<Self, JoinError> {
        warn_once();
        let placement = Placement { launcher: Launcher::Sumac, rank, world, local_rank: None, job: job.into() };
        read_with(ConfigFile::from_env()?.as_ref(), Ok(placement), variable)
    }
}

/// Look a variable of this process up.
fn variable(name: &str) -> Option<String> {
    std::env::var_os(name).map(|value| value.to_string_lossy().into_owned())
}

/// Log what [`check`] finds, once in a process.
fn warn_once() {
    static WARNED: Once = Once::new();
    WARNED.call_once(|| check().iter().for_each(|warning| crate::log::warn!("{warning}")));
}

/// Read the configuration of a rank.
fn read(
    placement: Result<Placement, LaunchError>,
    variable: impl Fn(&str) -> Option<String>,
) -> Result<JoinConfig, JoinError> {
    let Placement { rank, world, job, .. } = placement.map_err(|error| invalid(error.variable(), error.to_string()))?;
    let variables = Variables(variable);
    let (controller, alternatives) = variables.controller()?;
    let mut config = JoinConfig::new(controller, job, rank, world);
    config.controller_alternatives = alternatives;
    config.embedded_controller = variables.embedded()?;
    config.key = key(&variables.0).map_err(|(name, why)| invalid(name, why))?;
    variables.placement(&mut config)?;
    variables.calls(&mut config)?;
    variables.udp(&mut config)?;
    Ok(config)
}

/// Read the key that SUMAC_KEY_FILE or SUMAC_KEY gives, if one does. An error names the variable and the reason.
fn key(variable: impl Fn(&str) -> Option<String>) -> Result<Option<Key>, (&'static str, String)> {
    match (variable("SUMAC_KEY_FILE"), variable("SUMAC_KEY")) {
        (Some(_), Some(_)) => Err(("SUMAC_KEY", "SUMAC_KEY_FILE is set as well; set one of them".into())),
        (Some(path), None) => {
            read_key(Path::new(&path)).map(Some).map_err(|error| ("SUMAC_KEY_FILE", error.to_string()))
        }
        (None, Some(text)) => {
            parse_key(&Zeroizing::new(text)).map(Some).map_err(|error| ("SUMAC_KEY", error.to_string()))
        }
        (None, None) => Ok(None),
    }
}

/// Read the key that this process's environment gives, in SUMAC_KEY_FILE or SUMAC_KEY, if it does.
///
/// # Errors
/// [`JoinError::Environment`].
pub fn key_from_env() -> Result<Option<Key>, JoinError> {
    key(variable).map_err(|(name, why)| invalid(name, why))
}

/// Return the error for a variable.
fn invalid(name: &'static str, why: impl Into<String>) -> JoinError {
    JoinError::Environment { name, why: why.into() }
}

/// A lookup of variables by name.
struct Variables<F>(F);

impl<F: Fn(&str) -> Option<String>> Variables<F> {
    /// Read the address of the controller, and further ones.
    fn controller(&self) -> Result<(SocketAddr, Vec<SocketAddr>), JoinError> {
        let mut addrs = self.controller_addrs()?.into_iter();
        let first = addrs.next().ok_or_else(|| invalid("SUMAC_CONTROLLER", "the host has no address"))?;
        Ok((first, addrs.collect()))
    }

    fn controller_addrs(&self) -> Result<Vec<SocketAddr>, JoinError> {
        if let Some(text) = (self.0)("SUMAC_CONTROLLER") {
            return resolve_all(&text, DEFAULT_PORT).map_err(|why| invalid("SUMAC_CONTROLLER", why.to_string()));
        }
        let host = (self.0)("MASTER_ADDR").unwrap_or_else(|| "127.0.0.1".into());
        let port = self.parsed("SUMAC_PORT", "a port number")?.unwrap_or(DEFAULT_PORT);
        let addrs: Vec<_> = (host.as_str(), port).to_socket_addrs().into_iter().flatten().collect();
        if addrs.is_empty() {
            return Err(invalid("MASTER_ADDR", format!("{host:?} is not an address or the name of a host")));
        }
        Ok(addrs)
    }

    /// Read whether rank 0 runs the controller.
    fn embedded(&self) -> Result<bool, JoinError> {
        Ok(self.one_of("SUMAC_EMBEDDED_CONTROLLER", &[("1", true), ("0", false)])?.unwrap_or(false))
    }

    /// Read where the rank is and how it reaches its device.
    fn placement(&self, config: &mut JoinConfig) -> Result<(), JoinError> {
        let Self(variable) = self;
        set(&mut config.host, variable("SUMAC_HOST").map(Some));
        set(&mut config.verbs, variable("SUMAC_VERBS").map(Some));
        if let Some(text) = variable("SUMAC_BIND") {
            let mut addrs = addresses(&text, config.controller)?;
            config.bind = addrs.remove(0);
            config.rails = addrs;
        }
        set(&mut config.interfaces, self.named("SUMAC_IFNAME")?.map(Some));
        if let Some(transport) = self.named("SUMAC_TRANSPORT")? {
            config.transport = transport;
        } else if let Some(transport) = self.named("SUMAC_ATTACH")? {
            config.transport = transport;
        }
        if let Some(tenant) = variable("SUMAC_TENANT") {
            check_tenant(&tenant).map_err(|why| invalid("SUMAC_TENANT", why.to_string()))?;
            config.tenant = tenant;
        }
        set(&mut config.join_timeout, self.seconds("SUMAC_JOIN_TIMEOUT")?);
        set(&mut config.wait_for_tree, self.seconds("SUMAC_WAIT_FOR_TREE")?);
        Ok(())
    }

    /// Read what calls do that do not say otherwise.
    fn calls(&self, config: &mut JoinConfig) -> Result<(), JoinError> {
        let orders = [("arrival", Order::Arrival), ("fold", Order::TreeFold), ("pairwise", Order::TreePairwise)];
        set(&mut config.order, self.one_of("SUMAC_ORDER", &orders)?);
        set(&mut config.algo, self.named("SUMAC_ALGO")?);
        set(&mut config.shape, self.named("SUMAC_SHAPE")?.map(Some));
        set(&mut config.deadline, self.seconds("SUMAC_DEADLINE")?);
        let switch = |name| self.one_of(name, &[("1", true), ("0", false)]);
        // The old name first, so that the new one beats it.
        set(&mut config.recover, switch("SUMAC_REPAIR")?);
        set(&mut config.recover, switch("SUMAC_RECOVER")?);
        set(&mut config.hierarchical, switch("SUMAC_HIERARCHICAL")?);
        set(&mut config.hybrid, switch("SUMAC_HYBRID")?);
        set(&mut config.rab, switch("SUMAC_RAB")?);
        let progress = [("caller", Progress::Caller), ("thread", Progress::Thread)];
        set(&mut config.progress, self.one_of("SUMAC_PROGRESS", &progress)?.map(Some));
        set(&mut config.memory, self.one_of("SUMAC_MEMORY", &MemoryKind::NAMES)?);
        set(&mut config.wait_policy, self.one_of("SUMAC_WAIT_POLICY", &WaitPolicy::NAMES)?);
        set(&mut config.trees, self.parsed("SUMAC_TREES", "a number of trees")?);
        if let Some(value) = (self.0)("SUMAC_STRAGGLER") {
            config.straggler = straggler(&value).ok_or_else(|| {
                invalid("SUMAC_STRAGGLER", format!("{value:?} is not wait, deadline:SECONDS or partial:SECONDS"))
            })?;
        }
        Ok(())
    }

    /// Read the data port's configuration.
    fn udp(&self, config: &mut JoinConfig) -> Result<(), JoinError> {
        const OFFLOADS: [(&str, Offload); 2] = [("auto", Offload::Auto), ("off", Offload::Off)];
        let udp = &mut config.udp;
        set(&mut udp.max_packet_len_bytes, self.parsed("SUMAC_UDP_MAX_PACKET", "a number of bytes")?.map(Some));
        set(&mut udp.peer, self.parsed("SUMAC_UDP_PEER", "an IP address and port")?.map(Some));
        set(&mut udp.receive_buffer_bytes, self.parsed("SUMAC_UDP_RECEIVE_BUFFER", "a number of bytes")?);
        set(&mut udp.send_buffer_bytes, self.parsed("SUMAC_UDP_SEND_BUFFER", "a number of bytes")?);
        set(&mut udp.gso, self.one_of("SUMAC_UDP_GSO", &OFFLOADS)?);
        set(&mut udp.gro, self.one_of("SUMAC_UDP_GRO", &OFFLOADS)?);
        set(&mut udp.traffic_class, self.named("SUMAC_TRAFFIC_CLASS")?);
        let spin_us = self.parsed("SUMAC_UDP_SPIN_US", "a number of microseconds")?;
        set(&mut udp.spin, spin_us.map(Duration::from_micros));
        Ok(())
    }

    fn parsed<T: std::str::FromStr>(&self, name: &'static str, what: &str) -> Result<Option<T>, JoinError> {
        let Some(value) = (self.0)(name) else { return Ok(None) };
        value.parse().map(Some).map_err(|_| invalid(name, format!("{value:?} is not {what}")))
    }

    /// Parse a type whose error lists the names that it takes.
    fn named<T: std::str::FromStr<Err: fmt::Display>>(&self, name: &'static str) -> Result<Option<T>, JoinError> {
        let Some(value) = (self.0)(name) else { return Ok(None) };
        value.parse().map(Some).map_err(|why: T::Err| invalid(name, why.to_string()))
    }

    fn one_of<T: Copy>(&self, name: &'static str, values: &[(&str, T)]) -> Result<Option<T>, JoinError> {
        let Some(value) = (self.0)(name) else { return Ok(None) };
        let found = values.iter().find(|(known, _)| *known == value);
        let known = || values.iter().map(|(known, _)| *known).collect::<Vec<_>>().join(", ");
        found
            .map(|&(_, found)| Some(found))
            .ok_or_else(|| invalid(name, format!("{value:?} is not one of {}", known())))
    }

    fn seconds(&self, name: &'static str) -> Result<Option<Duration>, JoinError> {
        let Some(value) = (self.0)(name) else { return Ok(None) };
        seconds(&value).map(Some).ok_or_else(|| invalid(name, format!("{value:?} is not a number of seconds")))
    }
}

/// Resolve `SUMAC_BIND`: the address of each adapter of the server, of at least one.
fn addresses(text: &str, controller: SocketAddr) -> Result<Vec<IpAddr>, JoinError> {
    let names: Vec<&str> = text.split(',').map(str::trim).collect();
    if names.len() > TREES_MAX.into() {
        let why = format!("{text:?} lists {} addresses; list at most {TREES_MAX}, one for each adapter", names.len());
        return Err(invalid("SUMAC_BIND", why));
    }
    let resolve = |name: &&str| {
        local_address::resolve(name, controller).map_err(|why| {
            let of = if names.len() > 1 { format!("{text:?}: ") } else { String::new() };
            invalid("SUMAC_BIND", format!("{of}{name:?} is not an IP address or the name of a host: {why}"))
        })
    };
    names.iter().map(resolve).collect()
}

fn set<T>(field: &mut T, value: Option<T>) {
    if let Some(value) = value {
        *field = value;
    }
}

fn seconds(text: &str) -> Option<Duration> {
    text.parse().ok().and_then(|seconds| Duration::try_from_secs_f64(seconds).ok())
}

fn straggler(text: &str) -> Option<Straggler> {
    match text.split_once(':') {
        None if text == "wait" => Some(Straggler::Wait),
        Some(("deadline", limit)) => seconds(limit).map(Straggler::Deadline),
        Some(("partial", limit)) => seconds(limit).map(Straggler::Partial),
        _ => None,
    }
}

/// Return what is to be said about a variable of this name, if anything is.
fn warning(name: &str) -> Option<Warning> {
    if let Some(&(old, new)) = DEPRECATED.iter().find(|(old, _)| *old == name) {
        return Some(Warning::Deprecated { old, new });
    }
    let is_known = KNOWN.contains(&name) || !name.starts_with("SUMAC_") || name.starts_with(TESTS);
    (!is_known).then(|| Warning::Unknown { name: name.to_owned(), similar: closest(name, KNOWN) })
}

/// Variables of this project's own tests begin so.
const TESTS: &str = "SUMAC_TEST_";

/// All variables that something reads: [`JoinConfig::from_env`], devices, and the `sumac` command.
const KNOWN: [&str; 45] = [
    "SUMAC_ALGO",
    "SUMAC_BIND",
    "SUMAC_CARDS",
    "SUMAC_CONFIG",
    "SUMAC_CONTROLLER",
    "SUMAC_DEADLINE",
    "SUMAC_DEVICE_USER",
    "SUMAC_EMBEDDED_CONTROLLER",
    "SUMAC_HIERARCHICAL",
    "SUMAC_HOST",
    "SUMAC_HYBRID",
    "SUMAC_IFNAME",
    "SUMAC_JOB",
    "SUMAC_JOIN_TIMEOUT",
    "SUMAC_KEY",
    "SUMAC_KEY_FILE",
    "SUMAC_LOCAL_RANK",
    "SUMAC_LOG",
    "SUMAC_MEMORY",
    "SUMAC_OPERATOR_KEY_FILE",
    "SUMAC_ORDER",
    "SUMAC_PORT",
    "SUMAC_PROGRESS",
    "SUMAC_RAB",
    "SUMAC_RANK",
    "SUMAC_RECOVER",
    "SUMAC_SHAPE",
    "SUMAC_SSH",
    "SUMAC_STRAGGLER",
    "SUMAC_SUPERVISOR",
    "SUMAC_TENANT",
    "SUMAC_TRAFFIC_CLASS",
    "SUMAC_TRANSPORT",
    "SUMAC_TREES",
    "SUMAC_UDP_GRO",
    "SUMAC_UDP_GSO",
    "SUMAC_UDP_MAX_PACKET",
    "SUMAC_UDP_PEER",
    "SUMAC_UDP_RECEIVE_BUFFER",
    "SUMAC_UDP_SEND_BUFFER",
    "SUMAC_UDP_SPIN_US",
    "SUMAC_VERBS",
    "SUMAC_WAIT_FOR_TREE",
    "SUMAC_WAIT_POLICY",
    "SUMAC_WORLD",
];

#[cfg(test)]
mod tests;

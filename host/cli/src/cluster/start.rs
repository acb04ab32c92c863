//! How a cluster comes up: the controller, then the devices, then the ranks, each waited for by its first line.

use super::bind::Parts;
use super::{ChildId, ClusterError, Limit, Supervisor};
use crate::layout::{Layout, Source};
use std::collections::HashSet;
use std::net::{Ipv4Addr, SocketAddr};
use std::path::Path;
use std::time::Duration;

/// How long a process may take to get ready. Hundreds of them on a small machine take their time.
pub(crate) const START_LIMIT: Duration = Duration::from_secs(60);

/// What the controller prints once it listens, in front of its address.
pub(crate) const LISTENING: &str = "listening ";

/// What a device prints once the controller knows it, in front of its name.
pub(crate) const READY: &str = "ready ";

/// What to start besides the ranks.
#[derive(Debug)]
pub(crate) struct ClusterConfig<'a> {
    /// Fabric, devices and hosts.
    pub(crate) layout: &'a Layout,
    /// Worker threads of a device.
    pub(crate) shards: u16,
    /// Which processors each leaf runs on.
    pub(crate) parts: Parts,
    /// What the controller takes whatever it costs.
    pub(crate) preference: Preference<'a>,
    /// Further options of the devices of these indices.
    pub(crate) device_options: Vec<(usize, Vec<String>)>,
    /// Where the controller listens; `None`: on any port of loopback that is free.
    pub(crate) listen: Option<SocketAddr>,
    /// Devices of the layout that are there already, and where they receive packets: none are started for them.
    pub(crate) given: Vec<(usize, SocketAddr)>,
}

impl<'a> ClusterConfig<'a> {
    /// Describe a cluster of emulated devices of one worker thread each, bound nowhere, that goes by cost.
    pub(crate) fn new(layout: &'a Layout) -> Self {
        Self {
            layout,
            shards: 1,
            parts: Parts::anywhere(),
            preference: Preference::Cost,
            device_options: Vec::new(),
            listen: None,
            given: Vec::new(),
        }
    }
}

/// Ways that a controller takes whatever they cost.
#[derive(Debug, Clone, Copy)]
pub(crate) enum Preference<'a> {
    /// None.
    Cost,
    /// Those of an override file.
    File(&'a Path),
    /// The tree while there is one.
    Tree,
}

/// The processes of a cluster but its ranks.
#[derive(Debug)]
pub(crate) struct Started {
    /// Where the controller listens.
    pub(crate) addr: SocketAddr,
    pub(crate) controller: ChildId,
    /// The layout's devices, in its order, but for those that were there already.
    pub(crate) devices: Vec<ChildId>,
}

/// Start a controller and devices; returns when every device has registered with it.
///
/// # Errors
/// [`ClusterError`]; the processes started so far are the supervisor's.
pub(crate) fn start(supervisor: &mut Supervisor, config: &ClusterConfig<'_>) -> Result<Started, ClusterError> {
    let anywhere = SocketAddr::from((Ipv4Addr::LOCALHOST, 0));
    let (controller, addr) = start_controller(supervisor, config, config.listen.unwrap_or(anywhere))?;
    let is_given = |index: &usize| config.given.iter().any(|(given, _)| given == index);
    let devices: Vec<ChildId> = (0..config.layout.devices.len())
        .filter(|index| !is_given(index))
        .map(|index| start_device(supervisor, config, index, addr))
        .collect::<Result<_, _>>()?;
    let limit = Limit::new(START_LIMIT);
    let mut waiting: HashSet<ChildId> = devices.iter().copied().collect();
    while let Some(&awaited) = waiting.iter().next() {
        let (id, line) = supervisor.next_line(limit, awaited, "register with the controller")?;
        if !line.starts_with(READY) || !waiting.remove(&id) {
            return Err(unexpected(supervisor, id, line, "`ready NAME`, once"));
        }
    }
    for &(index, at) in &config.given {
        supervisor.wait_registered(addr, &config.layout.devices[index], at)?;
    }
    Ok(Started { addr, controller, devices })
}

/// Start a controller that listens at `listen`; returns when it does, and where.
///
/// # Errors
/// [`ClusterError`], also if any other child says something meanwhile.
pub(crate) fn start_controller(
    supervisor: &mut Supervisor,
    config: &ClusterConfig<'_>,
    listen: SocketAddr,
) -> Result<(ChildId, SocketAddr), ClusterError> {
    let controller = spawn_controller(supervisor, config, listen)?;
    let (id, line) = supervisor.next_line(Limit::new(START_LIMIT), controller, "listen")?;
    let addr = line.strip_prefix(LISTENING).filter(|_| id == controller).and_then(|addr| addr.parse().ok());
    let addr = addr.ok_or_else(|| unexpected(supervisor, id, line, "`listening ADDRESS`"))?;
    Ok((controller, addr))
}

/// The same without waiting: it prints [`LISTENING`] and its address when it listens.
///
/// # Errors
/// [`ClusterError::System`] if it can't be started.
pub(crate) fn spawn_controller(
    supervisor: &mut Supervisor,
    config: &ClusterConfig<'_>,
    listen: SocketAddr,
) -> Result<ChildId, ClusterError> {
    let (topology, stdin) = match &config.layout.source {
        Source::File(path) => (path.to_string_lossy().into_owned(), Vec::new()),
        Source::Toml(text) => ("-".to_owned(), text.clone().into_bytes()),
    };
    // What ends its devices is meant to, as often as it does.
    let own = [
        "controller".into(),
        format!("--listen={listen}"),
        format!("--topology={topology}"),
        "--device-backoff=0".into(),
    ];
    let preference = match config.preference {
        Preference::Cost => None,
        Preference::File(path) => Some(format!("--overrides={}", path.display())),
        Preference::Tree => Some("--prefer-tree".into()),
    };
    let args: Vec<String> = own.into_iter().chain(preference).collect();
    supervisor.spawn("the controller", &args, stdin)
}

/// Start the layout's device of an index, which prints [`READY`] when the controller knows it.
///
/// # Errors
/// [`ClusterError::System`] if it can't be started.
pub(crate) fn start_device(
    supervisor: &mut Supervisor,
    config: &ClusterConfig<'_>,
    index: usize,
    controller: SocketAddr,
) -> Result<ChildId, ClusterError> {
    let name = &config.layout.devices[index];
    let own = [
        "device".into(),
        format!("--name={name}"),
        format!("--controller={controller}"),
        format!("--shards={}", config.shards),
    ];
    let further = config.device_options.iter().filter(|(of, _)| *of == index).flat_map(|(_, options)| options.clone());
    let args: Vec<String> = own.into_iter().chain(further).collect();
    config.parts.within(index, || supervisor.spawn(&format!("device {name}"), &args, Vec::new()))
}

fn unexpected(supervisor: &Supervisor, id: ChildId, line: String, expected: &'static str) -> ClusterError {
    ClusterError::Unexpected { name: supervisor.name(id).to_owned(), line, expected }
}

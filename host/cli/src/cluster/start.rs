//! Start of a cluster: first the controller, then the devices. Each prints a line when it is ready.

use super::bind::Parts;
use super::{ChildId, ClusterError, ClusterKeys, Limit, Supervisor, controller_addr};
use crate::layout::{Layout, Source};
use std::collections::HashSet;
use std::net::{Ipv4Addr, SocketAddr};
use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

/// How long a process may take to get ready; generous, because hundreds may start on a small machine.
pub(crate) const START_LIMIT: Duration = Duration::from_secs(60);

/// The prefix of the line with the controller's address, printed once it listens.
pub(crate) const LISTENING: &str = "listening ";

/// The prefix of the line with a device's name, printed once it has registered.
pub(crate) const READY: &str = "ready ";

/// The configuration of a cluster, without its ranks.
#[derive(Debug)]
pub(crate) struct ClusterConfig<'a> {
    /// Fabric, devices and hosts.
    pub(crate) layout: &'a Layout,
    /// Shards of each device.
    pub(crate) shards: u16,
    /// The processors on which each leaf runs.
    pub(crate) parts: Parts,
    /// What the controller prefers regardless of cost.
    pub(crate) preference: Preference<'a>,
    /// The controller's cost table; `None`: its own.
    pub(crate) costs: Option<&'a Path>,
    /// Additional options of devices, by index.
    pub(crate) device_options: Vec<(usize, Vec<String>)>,
    /// Where the controller listens; `None`: on any free port of loopback.
    pub(crate) listen: Option<SocketAddr>,
    /// Existing devices that take the place of emulated ones, with the addresses at which they receive packets.
    pub(crate) given: Vec<(usize, SocketAddr)>,
    /// The keys of all parts; `None`: the controller serves everybody on this machine, for existing devices without
    /// keys.
    pub(crate) keys: Option<Arc<ClusterKeys>>,
}

impl<'a> ClusterConfig<'a> {
    /// Describe a cluster of emulated devices with one shard each, with keys, bound to no processors, that selects by
    /// cost.
    ///
    /// # Errors
    /// [`ClusterError::System`] if there can be no keys.
    pub(crate) fn new(layout: &'a Layout) -> Result<Self, ClusterError> {
        Ok(Self { keys: Some(Arc::new(ClusterKeys::new(layout)?)), ..Self::without_keys(layout) })
    }

    /// Describe such a cluster without keys.
    pub(crate) fn without_keys(layout: &'a Layout) -> Self {
        Self {
            layout,
            shards: 1,
            parts: Parts::anywhere(),
            preference: Preference::Cost,
            costs: None,
            device_options: Vec::new(),
            listen: None,
            given: Vec::new(),
            keys: None,
        }
    }
}

/// Algorithms that a controller prefers regardless of cost.
#[derive(Debug, Clone, Copy)]
pub(crate) enum Preference<'a> {
    /// No preference: select by cost.
    Cost,
    /// The algorithms of an override file.
    File(&'a Path),
    /// The tree, while there is one.
    Tree,
}

/// The processes of a cluster, without its ranks.
#[derive(Debug)]
pub(crate) struct Started {
    /// Where the controller listens.
    pub(crate) addr: SocketAddr,
    pub(crate) controller: ChildId,
    /// The emulated devices, in the order of the layout.
    pub(crate) devices: Vec<ChildId>,
}

/// Start a controller and devices, and wait until every device has registered.
///
/// # Errors
/// [`ClusterError`]. The supervisor owns the processes started so far.
pub(crate) fn start(supervisor: &mut Supervisor, config: &ClusterConfig<'_>) -> Result<Started, ClusterError> {
    let anywhere = SocketAddr::from((Ipv4Addr::LOCALHOST, 0));
    let (controller, addr) = start_controller(supervisor, config, config.listen.unwrap_or(anywhere))?;
    if !config.given.is_empty() {
        // So that given devices need not keep the trees of a job that is gone until their leases end.
        supervisor.end_in_order(controller);
    }
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
        let controller = controller_addr(addr, config.keys.as_deref());
        supervisor.wait_registered(&controller, &config.layout.devices[index], at)?;
    }
    Ok(Started { addr, controller, devices })
}

/// Start a controller at `listen`, wait until it listens, and return its address.
///
/// # Errors
/// [`ClusterError`], also if any other child prints a line meanwhile.
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

/// Start a controller without waiting. It prints [`LISTENING`] and its address when it listens.
///
/// # Errors
/// [`ClusterError::System`] if it cannot be started.
pub(crate) fn spawn_controller(
    supervisor: &mut Supervisor,
    config: &ClusterConfig<'_>,
    listen: SocketAddr,
) -> Result<ChildId, ClusterError> {
    let (topology, stdin) = match &config.layout.source {
        Source::File(path) => (path.to_string_lossy().into_owned(), Vec::new()),
        Source::Text(text) => ("-".to_owned(), text.clone().into_bytes()),
    };
    // Faults end devices on purpose, so the controller must not delay their return.
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
    let costs = config.costs.map(|path| format!("--costs={}", path.display()));
    let keys = config.keys.as_ref().map(|keys| format!("--keys={}", keys.store_path().display()));
    // The controller looks for changes of the store as long as it runs.
    supervisor.keys = config.keys.clone();
    let args: Vec<String> = own.into_iter().chain(preference).chain(costs).chain(keys).collect();
    supervisor.spawn("the controller", &args, stdin)
}

/// Start the device at an index of the layout. It prints [`READY`] when it has registered.
///
/// # Errors
/// [`ClusterError::System`] if it cannot be started.
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
    let mut args: Vec<String> = own.into_iter().chain(further).collect();
    if !args.iter().any(|arg| arg.starts_with("--bind=")) {
        // Whatever SUMAC_BIND says: the ranks are on this host.
        args.push(format!("--bind={}", controller.ip()));
    }
    let key = config.keys.as_ref().map(|keys| keys.device_text(index));
    args.extend(key.is_some().then(|| "--key-file=-".to_owned()));
    let stdin = key.map(|key| key.as_bytes().to_vec()).unwrap_or_default();
    config.parts.within(index, || supervisor.spawn(&format!("device {name}"), &args, stdin))
}

fn unexpected(supervisor: &Supervisor, id: ChildId, line: String, expected: &'static str) -> ClusterError {
    ClusterError::Unexpected { name: supervisor.name(id).to_owned(), line, expected }
}

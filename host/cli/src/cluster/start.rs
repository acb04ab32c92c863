//! How a cluster comes up: the controller, then the devices, then the ranks, each waited for by its first line.

use super::bind::Parts;
use super::{ChildId, ClusterError, Limit, Supervisor};
use crate::layout::{Layout, Source};
use std::collections::HashSet;
use std::net::SocketAddr;
use std::path::Path;
use std::time::Duration;

/// How long a process may take to get ready. Hundreds of them on a small machine take their time.
const START_LIMIT: Duration = Duration::from_secs(60);

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
    /// The controller's override file.
    pub(crate) overrides: Option<&'a Path>,
}

/// Start a controller and devices, and return the controller's address once every device has registered with it.
///
/// # Errors
/// [`ClusterError`]; the processes started so far are the supervisor's.
pub(crate) fn start(supervisor: &mut Supervisor, config: &ClusterConfig<'_>) -> Result<SocketAddr, ClusterError> {
    let limit = Limit::new(START_LIMIT);
    let (topology, stdin) = match &config.layout.source {
        Source::File(path) => (path.to_string_lossy().into_owned(), Vec::new()),
        Source::Toml(text) => ("-".to_owned(), text.clone().into_bytes()),
    };
    let own = ["controller".into(), "--listen=127.0.0.1:0".into(), format!("--topology={topology}")];
    let overrides = config.overrides.map(|path| format!("--overrides={}", path.display()));
    let args: Vec<String> = own.into_iter().chain(overrides).collect();
    let controller = supervisor.spawn("the controller", &args, stdin)?;
    let (_, line) = supervisor.next_line(limit, controller, "listen")?;
    let addr = line.strip_prefix(LISTENING).and_then(|addr| addr.parse::<SocketAddr>().ok());
    let addr = addr.ok_or_else(|| unexpected(supervisor, controller, line, "`listening ADDRESS`"))?;

    let mut waiting = HashSet::new();
    for (index, name) in config.layout.devices.iter().enumerate() {
        let args = [
            "device".into(),
            format!("--name={name}"),
            format!("--controller={addr}"),
            format!("--shards={}", config.shards),
        ];
        let name = format!("device {name}");
        waiting.insert(config.parts.within(index, || supervisor.spawn(&name, &args, Vec::new()))?);
    }
    while let Some(&awaited) = waiting.iter().next() {
        let (id, line) = supervisor.next_line(limit, awaited, "register with the controller")?;
        if !line.starts_with(READY) || !waiting.remove(&id) {
            return Err(unexpected(supervisor, id, line, "`ready NAME`, once"));
        }
    }
    Ok(addr)
}

fn unexpected(supervisor: &Supervisor, id: ChildId, line: String, expected: &'static str) -> ClusterError {
    ClusterError::Unexpected { name: supervisor.name(id).to_owned(), line, expected }
}

//! One shard: a thread with a node, a port and storage of its own.

use super::bus::Arrival;
use super::functions::Functions;
use super::{BoardConfig, BoardError};
use rustix::thread::{CpuSet, sched_setaffinity};
use std::net::SocketAddr;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::mpsc::{Receiver, Sender, channel};
use std::thread::JoinHandle;
use std::time::Instant as Clock;
use sumac_device::{Child, Event, Node, NodeConfig, RedoSlot, Reference, References, Slot, Storage, runtime};
use sumac_hal::ctrl::{DeviceCapabilities, GroupConfig, NoBus, Refusal, Request, Response};
use sumac_hal::hosted::HostedPort;
use sumac_hal::ids::{BootId, GroupId};
use sumac_hal::port::{Addr, Port, WaitPort};
use sumac_hal::shard::Shard;
use sumac_hal::time::Instant;
use sumac_hal::udp::Waker;

/// What the board keeps of a shard.
#[derive(Debug)]
pub(super) struct ShardHandle {
    pub(super) addr: Addr,
    pub(super) capabilities: DeviceCapabilities,
    /// Where to hand over who wants to attach, if it serves the bus.
    pub(super) arrivals: Option<Sender<Arrival>>,
    /// Chains that its engine did not carry out, if it has one.
    failed_chains: Option<Arc<AtomicU64>>,
    link: ShardLink,
    stop: Arc<AtomicBool>,
    thread: Option<JoinHandle<()>>,
}

/// A way to ask a shard something from another thread.
#[derive(Debug, Clone)]
pub(super) struct ShardLink {
    requests: Sender<(Request, Sender<Response>)>,
    waker: Waker,
}

impl ShardLink {
    /// Hand a request over; the answer comes through the receiver, which ends without one if the shard is gone.
    pub(super) fn ask(&self, request: Request) -> Receiver<Response> {
        let (answer, receiver) = channel();
        // A shard that has ended drops the sender, which the receiver sees.
        let _ = self.requests.send((request, answer));
        self.waker.wake();
        receiver
    }
}

impl ShardHandle {
    pub(super) fn link(&self) -> ShardLink {
        self.link.clone()
    }

    pub(super) fn waker(&self) -> Waker {
        self.link.waker.clone()
    }

    pub(super) fn failed_chains(&self) -> u64 {
        self.failed_chains.as_ref().map_or(0, |count| count.load(Ordering::Relaxed))
    }

    pub(super) fn join(&mut self) {
        if let Some(thread) = self.thread.take()
            && thread.join().is_err()
        {
            tracing::error!("a shard's thread panicked");
        }
    }
}

impl Drop for ShardHandle {
    fn drop(&mut self) {
        self.stop.store(true, Ordering::Release);
        self.link.waker.wake();
        self.join();
    }
}

/// Open the shard's port and start its thread.
pub(super) fn start_shard(config: &BoardConfig, index: u16, boot_id: BootId) -> Result<ShardHandle, BoardError> {
    let shard = Shard::new(index, config.shards).ok_or(BoardError::Shards(config.shards))?;
    // The board has checked that the sum is a port.
    let data_port = config.data_port.map_or(0, |first| first.saturating_add(index));
    let addr = SocketAddr::new(config.bind, data_port);
    let mut port = HostedPort::open(addr, &config.udp, config.verbs.as_deref())?;
    let node_config = NodeConfig {
        shard,
        boot_id,
        max_packet_len_bytes: port.capabilities().max_packet_len_bytes,
        receive_buffer_bytes: port.capabilities().receive_buffer_bytes,
    };
    let (addr, waker) = (port.local_addr(), port.waker());
    let (requests, inbox) = channel();
    let stop = Arc::new(AtomicBool::new(false));
    let mut tables = Tables::new(config);
    let capabilities = Node::new(node_config, tables.lend()).capabilities();
    let (arrivals, functions) = match &config.bus {
        // Memory is registered with the device; only with one shard is that with one table.
        Some(bus) if config.shards == 1 => {
            let (sender, arrivals) = channel();
            let remote = config.rdma.as_deref().map(|name| (name, config.bind));
            let functions = Functions::start(bus, remote, boot_id, arrivals, waker.clone())?;
            port.watch(functions.watched()?);
            (Some(sender), Some(functions))
        }
        _ => (None, None),
    };
    let failed_chains = functions.as_ref().map(Functions::failed_chains);
    let (stopped, name) = (Arc::clone(&stop), config.name.clone());
    // Where loopback is another machine, nobody on this one can share an address with it.
    let shares = config.udp.loopback_at.is_none();
    let worker = Worker { port, node_config, inbox, stop: stopped, name, shares, joined: Vec::new(), functions };
    let core = config.cores.get(usize::from(index)).copied();
    let thread = std::thread::Builder::new()
        .name(format!("shard-{index}"))
        .spawn(move || {
            pin(core);
            worker.run(tables);
        })
        .map_err(|source| BoardError::System { what: "start a shard's thread", source })?;
    let link = ShardLink { requests, waker };
    Ok(ShardHandle { addr, capabilities, arrivals, failed_chains, link, stop, thread: Some(thread) })
}

/// Keep this thread on a processor. One that there is not, or that this process may not use, is no reason not to serve.
fn pin(core: Option<usize>) {
    let Some(core) = core else { return };
    let mut only = CpuSet::new();
    if core < CpuSet::MAX_CPU {
        only.set(core);
    }
    if let Err(error) = sched_setaffinity(None, &only) {
        tracing::warn!(core, %error, "a shard can't be kept on this processor; it runs on any");
    }
}

/// The shard's storage, on the heap.
struct Tables {
    groups: Vec<Option<sumac_device::Group>>,
    trees: Vec<Option<sumac_hal::ctrl::TreeConfig>>,
    children: Vec<Child>,
    slots: Vec<Slot>,
    bytes: Vec<u8>,
    redo: Vec<RedoSlot>,
    references: Vec<Reference>,
}

impl Tables {
    fn new(config: &BoardConfig) -> Self {
        Self {
            groups: (0..config.groups).map(|_| None).collect(),
            trees: (0..config.groups).map(|_| None).collect(),
            children: vec![Child::EMPTY; config.children as usize],
            slots: vec![Slot::EMPTY; config.slots as usize],
            bytes: vec![0; config.slot_memory_bytes],
            redo: vec![RedoSlot::EMPTY; if config.bus.is_some() { config.slots as usize } else { 0 }],
            references: vec![Reference::EMPTY; if config.bus.is_some() { REFERENCES } else { 0 }],
        }
    }

    fn lend(&mut self) -> Storage<'_> {
        Storage {
            groups: &mut self.groups,
            trees: &mut self.trees,
            children: &mut self.children,
            slots: &mut self.slots,
            bytes: &mut self.bytes,
        }
    }

    /// Make the node, with what `functions` need if there are any.
    fn node(&mut self, config: NodeConfig, functions: Option<&Functions>) -> Node<'_> {
        let Some(functions) = functions else { return Node::new(config, self.lend()) };
        let Self { groups, trees, children, slots, bytes, redo, references } = self;
        let (memory, capabilities) = functions.redo_memory();
        let references = References { redo, references, memory, capabilities };
        Node::with_references(config, Storage { groups, trees, children, slots, bytes }, references)
    }
}

/// References of all groups: slots times children of each.
const REFERENCES: usize = 1 << 16;

struct Worker {
    port: HostedPort,
    node_config: NodeConfig,
    inbox: Receiver<(Request, Sender<Response>)>,
    stop: Arc<AtomicBool>,
    name: String,
    /// Whether what is sent to a shared address gets anywhere.
    shares: bool,
    /// Shared addresses that the port listens to, each for a group.
    joined: Vec<(GroupId, Addr)>,
    /// Ranks of this machine that contribute by reference, if this shard serves the bus.
    functions: Option<Functions>,
}

impl Worker {
    fn run(mut self, mut tables: Tables) {
        let mut node = tables.node(self.node_config, self.functions.as_ref());
        let start = Clock::now();
        let now = || Instant::from_nanos(u64::try_from(start.elapsed().as_nanos()).unwrap_or(u64::MAX));
        while !self.stop.load(Ordering::Acquire) {
            while let Ok((request, answer)) = self.inbox.try_recv() {
                let response = match request {
                    Request::CreateGroup(config) => self.create_group(&mut node, config, now()),
                    request => node.control(&request, now()),
                };
                self.leave_gone(&node);
                // Nobody waits for the answer if the board's control thread has ended.
                let _ = answer.send(response);
            }
            if let Some(functions) = &mut self.functions {
                functions.poll_connections(&mut node);
                functions.take(&mut node, now());
            }
            let next = runtime::poll(&mut node, &mut self.port, now());
            let busy = self.functions.as_mut().is_some_and(|functions| functions.attend(&mut node, now));
            while let Some(event) = node.poll_event() {
                self.log(event);
                self.leave_gone(&node);
            }
            // What packets have brought may be ready for the parent only now, without a chain to wait for.
            if busy || node.poll_destination().is_some() {
                continue;
            }
            let wait = next.map(|at| at - now());
            if wait.is_none_or(|wait| !wait.is_zero()) {
                match &mut self.functions {
                    Some(functions) if !functions.is_empty() => functions.sleep(&mut self.port, wait),
                    _ => {
                        self.port.wait(wait);
                    }
                }
            }
        }
    }

    /// Create a group, which listens to its parent's shared address if the port can.
    fn create_group(&mut self, node: &mut Node<'_>, mut config: GroupConfig, now: Instant) -> Response {
        if node.has_group(config.group) {
            return node.control(&Request::CreateGroup(config), now);
        }
        // Shard speaks to shard: a tree's nodes have equally many.
        if !config.by_reference.is_empty() && self.functions.is_none() {
            return Response::Refused(Refusal::NoBus(NoBus::None));
        }
        if !self.shares {
            config.shared = None;
        }
        let shard = self.node_config.shard.index();
        match config.parent_shared.and_then(|shared| shared.addr.behind(shard)) {
            Some(addr) if self.port.join(addr) => self.joined.push((config.group, addr)),
            _ => config.parent_shared = None,
        }
        let response = node.control(&Request::CreateGroup(config), now);
        if let (Response::Done, Some(functions), false) =
            (&response, &mut self.functions, config.by_reference.is_empty())
            && let Err(refusal) = functions.expect(node, &config)
        {
            // Whole or not at all.
            node.control(&Request::ReleaseGroup(config.group), now);
            return Response::Refused(refusal);
        }
        response
    }

    /// Stop listening for groups that are gone, or were refused.
    fn leave_gone(&mut self, node: &Node<'_>) {
        let port = &mut self.port;
        self.joined.retain(|(group, addr)| {
            let stays = node.has_group(*group);
            if !stays {
                port.leave(*addr);
            }
            stays
        });
        if let Some(functions) = &mut self.functions {
            functions.forget_gone(node);
        }
    }

    fn log(&self, event: Event) {
        let device = &self.name;
        match event {
            Event::LeaseExpired(group) => tracing::warn!(%device, %group, "lease ran out, group freed"),
            Event::GroupFailed { group, from, reason } => {
                tracing::warn!(%device, %group, %from, ?reason, "group can't go on");
            }
            other => tracing::info!(%device, ?other),
        }
    }
}

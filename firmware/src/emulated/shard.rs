//! One shard: a thread with a node, a port and storage of its own.

use super::attach::Arrival;
use super::capture::Capture;
use super::functions::Functions;
use super::{BoardConfig, BoardError};
use rustix::thread::{CpuSet, sched_setaffinity};
use std::net::SocketAddr;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::mpsc::{Receiver, Sender, channel};
use std::thread::JoinHandle;
use std::time::{Instant as Clock, SystemTime};
use sumac_device::{BufferRef, Child, Event, Hop, Node, NodeConfig, RedoSlot, Slot, Storage, ZeroCopyStorage, runtime};
use sumac_hal::ctrl::{DeviceCapabilities, GroupConfig, Refusal, Request, Response, ZeroCopyRefusal};
use sumac_hal::hosted::HostedPort;
use sumac_hal::ids::{BootId, GroupId};
use sumac_hal::port::pcap::Pcap;
use sumac_hal::port::trace::Tracer;
use sumac_hal::port::{Addr, MulticastPort, Port, WaitPort};
use sumac_hal::shard::{MAX_SHARDS, Shard};
use sumac_hal::time::Instant;
use sumac_hal::udp::Waker;

/// The board's handle of a shard.
#[derive(Debug)]
pub(super) struct ShardHandle {
    pub(super) addr: Addr,
    pub(super) capabilities: DeviceCapabilities,
    /// Where attaching ranks are handed over, if this shard serves them.
    pub(super) arrivals: Option<Sender<Arrival>>,
    /// The count of failed chains, if it has an engine.
    failed_chains: Option<Arc<AtomicU64>>,
    link: ShardLink,
    stop: Arc<AtomicBool>,
    thread: Option<JoinHandle<()>>,
}

/// Sends requests to a shard from another thread.
#[derive(Debug, Clone)]
pub(super) struct ShardLink {
    requests: Sender<(Request, Sender<Response>)>,
    waker: Waker,
}

impl ShardLink {
    /// Send a request; the response comes through the receiver, which ends without one if the shard has ended.
    pub(super) fn request(&self, request: Request) -> Receiver<Response> {
        let (sender, receiver) = channel();
        // If the shard has ended, the sender is dropped, which the receiver detects.
        let _ = self.requests.send((request, sender));
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

    /// Return whether the thread has ended.
    pub(super) fn has_ended(&self) -> bool {
        self.thread.as_ref().is_none_or(JoinHandle::is_finished)
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
pub(super) fn start_shard(
    config: &BoardConfig,
    index: u16,
    boot_id: BootId,
    capture: Option<&Capture>,
) -> Result<ShardHandle, BoardError> {
    let shard = Shard::new(index, config.shards).ok_or(BoardError::Shards(config.shards))?;
    // The board has checked that the sum is a valid port.
    let data_port = config.data_port.map_or(0, |first| first.saturating_add(index));
    let addr = SocketAddr::new(config.bind, data_port);
    let mut port = HostedPort::open_beside(addr, &config.udp, config.verbs.as_deref(), index.into())?;
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
    let capabilities = Node::new(node_config, tables.storage()).capabilities();
    let (arrivals, functions) = match &config.zero_copy {
        // Memory is registered with the device, and only with one shard is there one table.
        Some(zero_copy) if config.shards == 1 => {
            let (sender, arrivals) = channel();
            let remote = config.rdma.as_deref().map(|name| (name, config.bind, config.udp.traffic_class));
            let functions = Functions::start(zero_copy, remote, boot_id, arrivals, waker.clone())?;
            port.watch(functions.watched()?);
            (Some(sender), Some(functions))
        }
        _ => (None, None),
    };
    let failed_chains = functions.as_ref().map(Functions::failed_chains);
    let (stopped, name) = (Arc::clone(&stop), config.name.clone());
    // If loopback denotes another machine, no process on this one can share an address with it.
    let shares = config.udp.loopback_at.is_none();
    let start = Clock::now();
    let port = Tracer::new(port, capture.map(|capture| capture.shard((&config.name, index), addr, SystemTime::now())));
    let worker = Worker { start, port, node_config, inbox, stop: stopped, name, shares, joined: Vec::new(), functions };
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

/// Pin this thread to a processor. A processor that does not exist, or that this process may not use, is only logged.
fn pin(core: Option<usize>) {
    let Some(core) = core else { return };
    let mut only = CpuSet::new();
    if core < CpuSet::MAX_CPU {
        only.set(core);
    }
    if let Err(error) = sched_setaffinity(None, &only) {
        tracing::warn!(core, %error, "cannot pin a shard to this processor; it runs on any");
    }
}

/// The shard's storage, on the heap.
struct Tables {
    groups: Vec<Option<sumac_device::Group>>,
    trees: Vec<Option<sumac_hal::ctrl::TreeConfig>>,
    children: Vec<Child>,
    hops: Vec<Hop>,
    slots: Vec<Slot>,
    bytes: Vec<u8>,
    redo: Vec<RedoSlot>,
    references: Vec<BufferRef>,
}

impl Tables {
    fn new(config: &BoardConfig) -> Self {
        Self {
            groups: (0..config.groups).map(|_| None).collect(),
            trees: (0..config.groups).map(|_| None).collect(),
            children: vec![Child::EMPTY; config.children as usize],
            hops: vec![Hop::EMPTY; hops_per_group(config) * usize::from(config.groups)],
            slots: vec![Slot::EMPTY; config.slots as usize],
            bytes: vec![0; config.slot_memory_bytes + PAGE_LEN_BYTES],
            redo: vec![RedoSlot::EMPTY; if config.zero_copy.is_some() { config.slots as usize } else { 0 }],
            references: vec![BufferRef::EMPTY; if config.zero_copy.is_some() { BUFFER_REFS } else { 0 }],
        }
    }

    fn storage(&mut self) -> Storage<'_> {
        Storage {
            groups: &mut self.groups,
            trees: &mut self.trees,
            children: &mut self.children,
            hops: &mut self.hops,
            slots: &mut self.slots,
            bytes: slot_memory(&mut self.bytes),
        }
    }

    /// Create the node, with zero-copy storage if there are `functions`.
    fn node(&mut self, config: NodeConfig, functions: Option<&Functions>) -> Node<'_> {
        let Some(functions) = functions else { return Node::new(config, self.storage()) };
        let Self { groups, trees, children, hops, slots, bytes, redo, references } = self;
        let (memory, capabilities) = functions.redo_memory();
        let references = ZeroCopyStorage { redo, buffers: references, memory, capabilities };
        let bytes = slot_memory(bytes);
        Node::with_zero_copy(config, Storage { groups, trees, children, hops, slots, bytes }, references)
    }
}

/// The length of a page.
const PAGE_LEN_BYTES: usize = 4096;

/// The memory of slots: what was allocated, less a page, from the start of a page on. Redo slots start there, too. Some
/// processors' string moves, which copy chunks between both, take a byte at a time where the destination starts a few
/// bytes behind the source's place in a page (glibc's bug 30994).
fn slot_memory(allocated: &mut [u8]) -> &mut [u8] {
    let start = allocated.as_ptr().align_offset(PAGE_LEN_BYTES).min(PAGE_LEN_BYTES);
    let len = allocated.len() - PAGE_LEN_BYTES;
    &mut allocated[start..][..len]
}

/// How many shards of a parent each group can have a hop to. The device of a host is undivided, whatever the devices
/// above it are.
fn hops_per_group(config: &BoardConfig) -> usize {
    if config.ticket.is_some() && config.shards == 1 { MAX_SHARDS } else { 1 }
}

/// Buffer references of all groups: slots times children of each.
const BUFFER_REFS: usize = 1 << 16;

/// A data port with an optional capture.
type PacketPort = Tracer<HostedPort, Option<Pcap<Capture>>>;

struct Worker {
    /// The zero of the node's time.
    start: Clock,
    /// The data port, which writes its packets to the capture if there is one.
    port: PacketPort,
    node_config: NodeConfig,
    inbox: Receiver<(Request, Sender<Response>)>,
    stop: Arc<AtomicBool>,
    name: String,
    /// Whether packets to shared addresses can arrive.
    shares: bool,
    /// Shared addresses that the port has joined, each for a group.
    joined: Vec<(GroupId, Addr)>,
    /// The zero-copy ranks, if this shard serves them.
    functions: Option<Functions>,
}

impl Worker {
    fn run(mut self, mut tables: Tables) {
        let mut node = tables.node(self.node_config, self.functions.as_ref());
        let start = self.start;
        let now = || Instant::from_nanos(u64::try_from(start.elapsed().as_nanos()).unwrap_or(u64::MAX));
        while !self.stop.load(Ordering::Acquire) {
            if self.port.inner().has_failed() || self.functions.as_ref().is_some_and(Functions::has_failed) {
                // Its address does not come back, and neither do the ranks' connections: a new process gets others.
                tracing::error!(device = %self.name, "the RDMA device has failed, was reset, or has lost its driver");
                return;
            }
            while let Ok((request, answer)) = self.inbox.try_recv() {
                let response = match request {
                    Request::CreateGroup(config) => self.create_group(&mut node, config, now()),
                    request => node.control(&request, now()),
                };
                self.leave_released(&node);
                // If the control thread has ended, the response is not needed.
                let _ = answer.send(response);
            }
            if let Some(functions) = &mut self.functions {
                functions.poll_connections(&mut node);
                functions.poll_submissions(&mut node, now());
            }
            let next = runtime::poll(&mut node, &mut self.port, now());
            let busy = self.functions.as_mut().is_some_and(|functions| functions.serve(&mut node, now));
            while let Some(event) = node.poll_event() {
                self.log(event);
                self.leave_released(&node);
            }
            // Packets may have completed something for the parent just now, without a chain to wait for.
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

    /// Create a group, joining its parent's shared address if the port can.
    fn create_group(&mut self, node: &mut Node<'_>, mut config: GroupConfig, now: Instant) -> Response {
        if node.has_group(config.group) {
            return node.control(&Request::CreateGroup(config), now);
        }
        // Packets go from shard to shard: all nodes of a tree have equally many.
        if !config.zero_copy.is_empty() && self.functions.is_none() {
            return Response::Refused(Refusal::NoZeroCopy(ZeroCopyRefusal::Unsupported));
        }
        if !self.shares {
            config.shared = None;
        }
        let shard = self.node_config.shard.index();
        match config.parent_shared.and_then(|shared| shared.addr.offset_by(shard)) {
            Some(addr) if self.port.join(addr) => self.joined.push((config.group, addr)),
            _ => config.parent_shared = None,
        }
        let response = node.control(&Request::CreateGroup(config), now);
        if let (Response::Done, Some(functions), false) = (&response, &mut self.functions, config.zero_copy.is_empty())
            && let Err(refusal) = functions.reserve(node, &config)
        {
            // A group is created as a whole or not at all.
            node.control(&Request::ReleaseGroup(config.group), now);
            return Response::Refused(refusal);
        }
        response
    }

    /// Leave the shared addresses of groups that were released or refused.
    fn leave_released(&mut self, node: &Node<'_>) {
        let port = &mut self.port;
        self.joined.retain(|(group, addr)| {
            let exists = node.has_group(*group);
            if !exists {
                port.leave(*addr);
            }
            exists
        });
        if let Some(functions) = &mut self.functions {
            functions.release_gone(node);
        }
    }

    fn log(&self, event: Event) {
        let device = &self.name;
        match event {
            Event::LeaseExpired(group) => tracing::warn!(%device, %group, "the lease expired; the group was freed"),
            Event::GroupFailed { group, from, reason } => {
                tracing::warn!(%device, %group, %from, ?reason, "the group has failed");
            }
            other => tracing::info!(%device, ?other),
        }
    }
}

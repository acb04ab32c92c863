//! One step of a board: of its first shard, which has the control connection, and of the secondary ones.
//!
//! ```text
//!   core 0: Board = Shard + Control --- Mailbox ---> core 1: SecondaryShard = Shard
//!                                   --- Mailbox ---> core 2: SecondaryShard = Shard
//! ```
//!
//! Every shard has a core, a network interface and a node of its own. The first shard shares one [`Mailbox`] with each
//! other shard, through which it sends requests and receives responses, so the data path takes no lock.

use crate::control::{Control, ControlError, Entropy};
use crate::options::BoardOptions;
use crate::stack::Stack;
use crate::zero_copy::ZeroCopyServer;
use heapless::Vec;
use heapless::spsc::{Consumer, Producer, Queue};
use smoltcp::phy::Device;
use sumac_device::{Entry, Event, Node, TRACE_LEN, runtime};
use sumac_hal::ctrl::{self, Announce, GroupConfig, Request, Response, StackUsage, Stats, shards};
use sumac_hal::ids::BootId;
use sumac_hal::shard::MAX_SHARDS;
use sumac_hal::time::Instant;

/// An event for the board's log.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub enum BoardEvent {
    /// The controller is connected.
    Connected,
    /// The connection was lost or could not be established; reported once, however often it is dialled.
    Disconnected(ControlError),
    /// An event of the node.
    Node(Event),
    /// An entry of the node's trace. In a log that outlives a panic, the trace does too.
    Trace(Entry),
}

/// A node and its network.
#[derive(Debug)]
struct Shard<'m, D: Device> {
    stack: Stack<D>,
    node: Node<'m>,
    /// The number of trace entries reported.
    traced: u64,
    /// Measures the stack of this core.
    gauge: StackGauge,
}

/// Returns the high-water mark of the calling core's stack, if known.
pub type StackGauge = fn() -> Option<StackUsage>;

/// Add the stack use of this core to a `Stats` response.
fn with_stack(response: Response, gauge: StackGauge) -> Response {
    match response {
        Response::Stats(stats) => Response::Stats(Stats { stack: gauge(), ..stats }),
        other => other,
    }
}

impl<D: Device> Shard<'_, D> {
    /// Move packets; returns when the node has to be polled again.
    fn step(&mut self, now: Instant) -> Option<Instant> {
        runtime::poll(&mut self.node, &mut self.stack, now)
    }

    fn poll_event(&mut self) -> Option<BoardEvent> {
        if let Some(event) = self.node.poll_event() {
            return Some(BoardEvent::Node(event));
        }
        let trace = self.node.trace();
        let entry = *trace.since(self.traced).next()?;
        // Entries that were overwritten meanwhile are skipped.
        self.traced = (self.traced + 1).max(trace.recorded().saturating_sub(TRACE_LEN as u64 - 1));
        Some(BoardEvent::Trace(entry))
    }

    /// Send what is left, and return when to step again.
    fn finish(&mut self, next: impl IntoIterator<Item = Option<Instant>>, now: Instant) -> Option<Instant> {
        self.stack.poll(now);
        next.into_iter().chain([self.stack.poll_at(now)]).flatten().min()
    }
}

/// The channel between the first shard and another: one request at a time, and its response.
#[derive(Debug)]
pub struct Mailbox {
    requests: Queue<Request, 2>,
    responses: Queue<Response, 2>,
}

impl Mailbox {
    /// Return an empty mailbox.
    pub const fn new() -> Self {
        Self { requests: Queue::new(), responses: Queue::new() }
    }

    /// Split into the two sides.
    pub fn split(&mut self) -> (MailboxClient<'_>, MailboxServer<'_>) {
        let ((send, receive), (respond, responses)) = (self.requests.split(), self.responses.split());
        (MailboxClient { requests: send, responses }, MailboxServer { requests: receive, responses: respond })
    }
}

impl Default for Mailbox {
    fn default() -> Self {
        Self::new()
    }
}

/// The first shard's side of a [`Mailbox`].
pub struct MailboxClient<'d> {
    requests: Producer<'d, Request>,
    responses: Consumer<'d, Response>,
}

/// The other shard's side of a [`Mailbox`].
pub struct MailboxServer<'d> {
    requests: Consumer<'d, Request>,
    responses: Producer<'d, Response>,
}

/// The first shard's access to the other shards.
pub trait OtherShards {
    /// Return the mailboxes, in order of shard.
    fn mailboxes(&mut self) -> &mut [MailboxClient<'static>];

    /// Wake the other shards, so that they poll their mailboxes.
    fn wake(&mut self);

    /// Called repeatedly while a response is due. Does not return if the board resets because a core is stuck.
    fn wait(&mut self);
}

/// A board of one shard.
#[derive(Debug, Clone, Copy, Default)]
pub struct SingleShard;

impl OtherShards for SingleShard {
    fn mailboxes(&mut self) -> &mut [MailboxClient<'static>] {
        &mut []
    }

    fn wake(&mut self) {}

    fn wait(&mut self) {}
}

/// Execute a request on all shards, or on none.
fn execute(
    request: &Request,
    (node, gauge): (&mut Node<'_>, StackGauge),
    others: &mut impl OtherShards,
    now: Instant,
) -> Response {
    let responses = request_all(request, others, |_| true);
    let own = with_stack(node.control(request, now), gauge);
    let refused = responses.iter().chain([&own]).any(|response| matches!(response, Response::Refused(_)));
    if let Some(undo) = shards::undo(request).filter(|_| refused) {
        request_all(&undo, others, |shard| responses.get(shard) == Some(&Response::Done));
        if own == Response::Done {
            node.control(&undo, now);
        }
    }
    // Not empty: the first shard has responded.
    shards::merge([own].into_iter().chain(responses)).unwrap_or(Response::Done)
}

/// Send a request to the `chosen` shards, and wait for their responses.
fn request_all(
    request: &Request,
    others: &mut impl OtherShards,
    chosen: impl Fn(usize) -> bool,
) -> Vec<Response, MAX_SHARDS> {
    let mailboxes = others.mailboxes().iter_mut().enumerate().filter(|(shard, _)| chosen(*shard));
    // One request is in flight at a time, so there is room.
    mailboxes.for_each(|(_, mailbox)| drop(mailbox.requests.enqueue(request.clone())));
    others.wake();
    let mut responses = Vec::new();
    for shard in (0..others.mailboxes().len()).filter(|shard| chosen(*shard)) {
        let response = loop {
            match others.mailboxes()[shard].responses.dequeue() {
                Some(response) => break response,
                None => others.wait(),
            }
        };
        // At most MAX_SHARDS.
        let _ = responses.push(response);
    }
    responses
}

/// Reserve what a new group's zero-copy children need. If that fails, the group is released.
fn reserve(config: &GroupConfig, node: &mut Node<'_>, zero_copy: &mut ZeroCopyServer, now: Instant) -> Response {
    if config.zero_copy.is_empty() {
        return Response::Done;
    }
    match zero_copy.reserve(node, config) {
        Ok(()) => Response::Done,
        Err(refusal) => {
            node.control(&Request::ReleaseGroup(config.group), now);
            Response::Refused(refusal)
        }
    }
}

/// The first shard of a board, and its control connection.
pub struct Board<'m, D: Device, O: OtherShards = SingleShard> {
    shard: Shard<'m, D>,
    control: Control,
    others: O,
    /// Serves zero-copy ranks, if configured.
    zero_copy: Option<ZeroCopyServer>,
    /// The last connection state reported: connected, disconnected, or none yet.
    reported_up: Option<bool>,
    ended: Option<ControlError>,
}

impl<'m, D: Device, O: OtherShards> Board<'m, D, O> {
    /// Create a board, which dials the controller in its first step. `options` are those of the first shard.
    /// `zero_copy` serves zero-copy ranks, and is used only if there is one shard: memory is registered with the
    /// device, and only with one shard does that mean one table.
    pub fn new(
        stack: Stack<D>,
        node: Node<'m>,
        others: O,
        zero_copy: Option<ZeroCopyServer>,
        options: &BoardOptions,
        boot_id: BootId,
    ) -> Self {
        let mut others = others;
        let shards = 1 + others.mailboxes().len() as u16;
        let addrs = (0..shards).filter_map(|shard| stack.local_addr().offset_by(shard));
        let zero_copy = zero_copy.filter(|_| shards == 1);
        let announced = options.broker.clone().zip(zero_copy.as_ref()).map(|((machine, socket), zero_copy)| {
            let (redo, _) = zero_copy.redo_memory();
            // All ranks can read the redo memory of all groups, so only ranks of one user are served.
            let user = ctrl::DeviceUser { uid: options.user, serves_all: false };
            ctrl::AttachPoint { machine, socket, user, redo_memory_bytes: redo.len_bytes, remote: None }
        });
        let announce = Announce {
            name: options.name.clone(),
            boot_id,
            capabilities: node.capabilities(),
            data_addrs: addrs.take(MAX_SHARDS).collect(),
            attach: announced,
            slots: None,
        };
        let control = Control::new(options.controller, announce, options.key.clone(), boot_id.0 as u16);
        let shard = Shard { stack, node, traced: 0, gauge: || None };
        Self { shard, control, others, zero_copy, reported_up: None, ended: None }
    }

    /// Include this core's stack use in stats.
    pub const fn set_stack_gauge(&mut self, gauge: StackGauge) {
        self.shard.gauge = gauge;
    }

    /// Set the source of randomness, without which a board with a key does not connect to its controller.
    pub const fn set_entropy(&mut self, entropy: Entropy) {
        self.control.set_entropy(entropy);
    }

    /// Return the NIC.
    pub const fn device_mut(&mut self) -> &mut D {
        self.shard.stack.device_mut()
    }

    /// Return the number of packets received.
    pub fn packets_in(&self) -> u64 {
        self.shard.node.counters().packets_in
    }

    /// Do all work due at `now`. Returns when to step again if nothing arrives before: at once if that is `now` or
    /// earlier.
    pub fn step(&mut self, now: Instant) -> Option<Instant> {
        if let Some(zero_copy) = &mut self.zero_copy {
            zero_copy.poll_requests(&mut self.shard.node, now);
        }
        let next = self.shard.step(now);
        let Self { shard: Shard { stack, node, gauge, .. }, control, others, zero_copy, .. } = self;
        if let Some(zero_copy) = zero_copy {
            zero_copy.serve(node, now);
        }
        let polled = control.poll(stack, now, |request| {
            let is_new = |config: &&GroupConfig| !node.has_group(config.group);
            let created = if let Request::CreateGroup(config) = request { Some(config).filter(is_new) } else { None };
            match (execute(request, (node, *gauge), others, now), created, &mut *zero_copy) {
                (Response::Done, Some(config), Some(zero_copy)) => reserve(config, node, zero_copy, now),
                (response, _, _) => response,
            }
        });
        if let Err(error) = polled {
            self.ended = Some(error);
        }
        let redial = self.control.poll_at();
        let poll = self.zero_copy.as_ref().map(|zero_copy| zero_copy.poll_at(now));
        self.shard.finish([next, redial, poll], now)
    }

    /// Return the next event.
    pub fn poll_event(&mut self) -> Option<BoardEvent> {
        if let Some(error) = self.ended.take()
            && self.reported_up != Some(false)
        {
            self.reported_up = Some(false);
            return Some(BoardEvent::Disconnected(error));
        }
        if self.control.is_up() && self.reported_up != Some(true) {
            self.reported_up = Some(true);
            return Some(BoardEvent::Connected);
        }
        self.shard.poll_event()
    }
}

/// A shard of a board other than the first.
pub struct SecondaryShard<'m, D: Device> {
    shard: Shard<'m, D>,
    mailbox: MailboxServer<'static>,
}

impl<'m, D: Device> SecondaryShard<'m, D> {
    /// Create the shard.
    pub const fn new(stack: Stack<D>, node: Node<'m>, mailbox: MailboxServer<'static>) -> Self {
        Self { shard: Shard { stack, node, traced: 0, gauge: || None }, mailbox }
    }

    /// As [`Board::set_stack_gauge`].
    pub const fn set_stack_gauge(&mut self, gauge: StackGauge) {
        self.shard.gauge = gauge;
    }

    /// Return the NIC.
    pub const fn device_mut(&mut self) -> &mut D {
        self.shard.stack.device_mut()
    }

    /// As [`Board::step`].
    pub fn step(&mut self, now: Instant) -> Option<Instant> {
        while let Some(request) = self.mailbox.requests.dequeue() {
            // There is room: the first shard has taken the previous response.
            let response = with_stack(self.shard.node.control(&request, now), self.shard.gauge);
            let _ = self.mailbox.responses.enqueue(response);
        }
        let next = self.shard.step(now);
        self.shard.finish([next], now)
    }

    /// Return the next event.
    pub fn poll_event(&mut self) -> Option<BoardEvent> {
        self.shard.poll_event()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use core::num::NonZeroU32;
    use std::boxed::Box;
    use sumac_device::{Memory, NodeConfig};
    use sumac_hal::ctrl::{ChildMask, GroupConfig, Order, Refusal, TreeConfig};
    use sumac_hal::ids::{Epoch, GroupId, TreeId};
    use sumac_hal::key::GroupSecret;
    use sumac_hal::shard::Shard as ShardOf;
    use sumac_hal::uplink::HopTimers;

    /// Another shard, which polls its mailbox when the first waits.
    struct Second {
        client: [MailboxClient<'static>; 1],
        server: MailboxServer<'static>,
        node: Node<'static>,
    }

    impl OtherShards for Second {
        fn mailboxes(&mut self) -> &mut [MailboxClient<'static>] {
            &mut self.client
        }

        fn wake(&mut self) {}

        fn wait(&mut self) {
            let request = self.server.requests.dequeue().expect("the first shard waits for a response");
            let _ = self.server.responses.enqueue(self.node.control(&request, Instant::ZERO));
        }
    }

    fn node<const SLOTS: usize>(index: u16) -> Node<'static> {
        let shard = ShardOf::new(index, 2).expect("a shard");
        let config =
            NodeConfig { shard, boot_id: BootId(1), max_packet_len_bytes: 1472, receive_buffer_bytes: 1 << 16 };
        let memory: &'static mut Memory<2, 8, SLOTS, 65_536> = Box::leak(Box::default());
        Node::new(config, memory.storage())
    }

    fn group(slots: u16) -> Request {
        Request::CreateGroup(GroupConfig {
            group: GroupId(1),
            tree: TreeId(1),
            epoch: Epoch { term: 1, counter: 1 },
            order: Order::Arrival,
            secret: GroupSecret([0; 16]),
            parent_key: 0,
            shared: None,
            parent_shared: None,
            window_max: 2,
            slots,
            chunk_len_bytes: 64,
            ranks: NonZeroU32::MIN,
            lease_ms: 1_000,
            timers: HopTimers::DEFAULT.into(),
            zero_copy: ChildMask::EMPTY,
        })
    }

    #[test]
    fn request_is_executed_by_all_shards_or_none() {
        let mut first = node::<64>(0);
        let (client, server) = Box::leak(Box::new(Mailbox::new())).split();
        let mut others = Second { client: [client], server, node: node::<8>(1) };
        let gauge: StackGauge = || Some(StackUsage { used_bytes: 7, size_bytes: 9 });
        let mut execute_all = |request: &Request| execute(request, (&mut first, gauge), &mut others, Instant::ZERO);
        let tree = Request::InstallTree(TreeConfig { tree: TreeId(1), parent: None, children: 1, ranks: Vec::new() });
        assert_eq!(execute_all(&tree), Response::Done);
        // The second shard has fewer slots.
        assert!(matches!(execute_all(&group(32)), Response::Refused(Refusal::NoSlots { .. })));
        // The first shard has released the group: otherwise it would still exist.
        assert_eq!(execute_all(&group(8)), Response::Done);
        let Response::Stats(stats) = execute_all(&Request::Stats) else { panic!("no stats") };
        assert_eq!((stats.slots_used, stats.stack), (16, gauge()));
        assert!(first.has_group(GroupId(1)) && others.node.has_group(GroupId(1)));
    }
}

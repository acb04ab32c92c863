//! One step of a board: of its first shard, which has the control connection, and of further ones.
//!
//! ```text
//!   core 0: Board   = Shard + Control --- Desk ---> core 1: Further = Shard
//!                                     --- Desk ---> core 2: Further = Shard
//! ```
//!
//! Every shard has a core, a network interface and a node of its own; what they share is a [`Desk`] each, over which the
//! first hands requests and gets answers. So the data path takes no lock.

use crate::bus::Bus;
use crate::control::{Control, ControlError};
use crate::options::BoardOptions;
use crate::stack::Stack;
use heapless::Vec;
use heapless::spsc::{Consumer, Producer, Queue};
use smoltcp::phy::Device;
use sumac_device::{Entry, Event, Node, TRACE_LEN, runtime};
use sumac_hal::ctrl::{self, Announce, GroupConfig, Request, Response, StackUse, Stats, shards};
use sumac_hal::ids::BootId;
use sumac_hal::port::Port;
use sumac_hal::shard::MAX_SHARDS;
use sumac_hal::time::Instant;

/// Something that a board may want to log.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub enum BoardEvent {
    /// The controller is connected.
    Connected,
    /// It is no more, or can't be reached; told once, however often it is dialled.
    Disconnected(ControlError),
    /// The node's.
    Node(Event),
    /// What the node has put into its trace: in a log that outlives a panic, so does the trace.
    Trace(Entry),
}

/// A node and its network.
#[derive(Debug)]
struct Shard<'m, D: Device> {
    stack: Stack<D>,
    node: Node<'m>,
    /// Trace entries that were told.
    traced: u64,
    /// Measures this core's stack.
    gauge: Gauge,
}

/// What tells how far the stack of the core that calls it was ever used, where that is known.
pub type Gauge = fn() -> Option<StackUse>;

/// Have stats tell what a core's stack has come to.
fn with_stack(answer: Response, gauge: Gauge) -> Response {
    match answer {
        Response::Stats(stats) => Response::Stats(Stats { stack: gauge(), ..stats }),
        other => other,
    }
}

impl<D: Device> Shard<'_, D> {
    /// Move packets; returns when the node wants to be called again.
    fn step(&mut self, now: Instant) -> Option<Instant> {
        runtime::poll(&mut self.node, &mut self.stack, now)
    }

    fn poll_event(&mut self) -> Option<BoardEvent> {
        if let Some(event) = self.node.poll_event() {
            return Some(BoardEvent::Node(event));
        }
        let trace = self.node.trace();
        let entry = *trace.since(self.traced).next()?;
        // Those that were overwritten meanwhile are passed over.
        self.traced = (self.traced + 1).max(trace.recorded().saturating_sub(TRACE_LEN as u64 - 1));
        Some(BoardEvent::Trace(entry))
    }

    /// Send what is left, and return when to come again.
    fn finish(&mut self, next: impl IntoIterator<Item = Option<Instant>>, now: Instant) -> Option<Instant> {
        self.stack.poll(now);
        next.into_iter().chain([self.stack.poll_at(now)]).flatten().min()
    }
}

/// The way between the first shard and another: one request at a time, and its answer.
#[derive(Debug)]
pub struct Desk {
    requests: Queue<Request, 2>,
    answers: Queue<Response, 2>,
}

impl Desk {
    /// Return an empty desk.
    pub const fn new() -> Self {
        Self { requests: Queue::new(), answers: Queue::new() }
    }

    /// Give each side its own.
    pub fn split(&mut self) -> (Asking<'_>, Answering<'_>) {
        let ((ask, hear), (answer, get)) = (self.requests.split(), self.answers.split());
        (Asking { ask, get }, Answering { hear, answer })
    }
}

impl Default for Desk {
    fn default() -> Self {
        Self::new()
    }
}

/// The first shard's side of a [`Desk`].
pub struct Asking<'d> {
    ask: Producer<'d, Request>,
    get: Consumer<'d, Response>,
}

/// The other shard's side.
pub struct Answering<'d> {
    hear: Consumer<'d, Request>,
    answer: Producer<'d, Response>,
}

/// The shards behind the first, as that one reaches them.
pub trait Others {
    /// Return their desks, in order of shard.
    fn desks(&mut self) -> &mut [Asking<'static>];

    /// See that they look at their desks soon.
    fn wake(&mut self);

    /// Called again and again while an answer is due: may give up, as a board does whose core is stuck.
    fn wait(&mut self);
}

/// A board of one shard.
#[derive(Debug, Clone, Copy, Default)]
pub struct Alone;

impl Others for Alone {
    fn desks(&mut self) -> &mut [Asking<'static>] {
        &mut []
    }

    fn wake(&mut self) {}

    fn wait(&mut self) {}
}

/// Have all shards carry out a request, or none of them.
fn carry_out(
    request: &Request,
    (node, gauge): (&mut Node<'_>, Gauge),
    others: &mut impl Others,
    now: Instant,
) -> Response {
    let answers = ask(request, others, |_| true);
    let own = with_stack(node.control(request, now), gauge);
    let refused = answers.iter().chain([&own]).any(|answer| matches!(answer, Response::Refused(_)));
    if let Some(undo) = shards::undo(request).filter(|_| refused) {
        ask(&undo, others, |shard| answers.get(shard) == Some(&Response::Done));
        if own == Response::Done {
            node.control(&undo, now);
        }
    }
    // The first shard has answered.
    shards::merge([own].into_iter().chain(answers)).unwrap_or(Response::Done)
}

/// Hand a request to those of the others that are `chosen`, and wait for their answers.
fn ask(request: &Request, others: &mut impl Others, chosen: impl Fn(usize) -> bool) -> Vec<Response, MAX_SHARDS> {
    let desks = others.desks().iter_mut().enumerate().filter(|(shard, _)| chosen(*shard));
    // One request is under way at a time, so there is room.
    desks.for_each(|(_, desk)| drop(desk.ask.enqueue(request.clone())));
    others.wake();
    let mut answers = Vec::new();
    for shard in (0..others.desks().len()).filter(|shard| chosen(*shard)) {
        let answer = loop {
            match others.desks()[shard].get.dequeue() {
                Some(answer) => break answer,
                None => others.wait(),
            }
        };
        // As many as there can be shards.
        let _ = answers.push(answer);
    }
    answers
}

/// Let a new group's children by reference attach; a group whose children can't is none.
fn admit(config: &GroupConfig, node: &mut Node<'_>, bus: &mut Bus, now: Instant) -> Response {
    if config.by_reference.is_empty() {
        return Response::Done;
    }
    match bus.expect(node, config) {
        Ok(()) => Response::Done,
        Err(refusal) => {
            node.control(&Request::ReleaseGroup(config.group), now);
            Response::Refused(refusal)
        }
    }
}

/// The first shard of a board, and its control connection.
pub struct Board<'m, D: Device, O: Others = Alone> {
    shard: Shard<'m, D>,
    control: Control,
    others: O,
    /// Ranks by reference, if there are any.
    bus: Option<Bus>,
    /// What was told last of the controller: that it is connected, that it is not, or nothing yet.
    told_up: Option<bool>,
    ended: Option<ControlError>,
}

impl<'m, D: Device, O: Others> Board<'m, D, O> {
    /// Put a board together; it dials the controller with the first step. `options` are the first shard's. `bus` serves
    /// ranks by reference if that is the only shard: memory is registered with the device, and only then is that with one
    /// table.
    pub fn new(
        stack: Stack<D>,
        node: Node<'m>,
        others: O,
        bus: Option<Bus>,
        options: &BoardOptions,
        boot_id: BootId,
    ) -> Self {
        let mut others = others;
        let shards = 1 + others.desks().len() as u16;
        let addrs = (0..shards).filter_map(|shard| stack.local_addr().behind(shard));
        let bus = bus.filter(|_| shards == 1);
        let announced = options.bus.clone().zip(bus.as_ref()).map(|((machine, socket), bus)| {
            let (redo, _) = bus.redo_memory();
            // Its ranks share the redo memory of all groups.
            let user = ctrl::BusUser { uid: options.user, serves_all: false };
            ctrl::Bus { machine, socket, user, redo_memory_bytes: redo.len_bytes, remote: None }
        });
        let announce = Announce {
            name: options.name.clone(),
            boot_id,
            capabilities: node.capabilities(),
            data_addrs: addrs.take(MAX_SHARDS).collect(),
            bus: announced,
        };
        let control = Control::new(options.controller, announce, boot_id.0 as u16);
        let shard = Shard { stack, node, traced: 0, gauge: || None };
        Self { shard, control, others, bus, told_up: None, ended: None }
    }

    /// Have stats tell what this core's stack has come to.
    pub const fn gauge_stack(&mut self, gauge: Gauge) {
        self.shard.gauge = gauge;
    }

    /// Return the NIC.
    pub const fn device_mut(&mut self) -> &mut D {
        self.shard.stack.device_mut()
    }

    /// Return how many packets have come.
    pub fn packets_in(&self) -> u64 {
        self.shard.node.counters().packets_in
    }

    /// Do what there is to do at `now`; returns when to come again if nothing arrives before, `Some(now)` or earlier if
    /// at once.
    pub fn step(&mut self, now: Instant) -> Option<Instant> {
        if let Some(bus) = &mut self.bus {
            bus.take(&mut self.shard.node, now);
        }
        let next = self.shard.step(now);
        let Self { shard: Shard { stack, node, gauge, .. }, control, others, bus, .. } = self;
        if let Some(bus) = bus {
            bus.serve(node, now);
        }
        let polled = control.poll(stack, now, |request| {
            let is_new = |config: &&GroupConfig| !node.has_group(config.group);
            let created = if let Request::CreateGroup(config) = request { Some(config).filter(is_new) } else { None };
            match (carry_out(request, (node, *gauge), others, now), created, &mut *bus) {
                (Response::Done, Some(config), Some(bus)) => admit(config, node, bus, now),
                (response, _, _) => response,
            }
        });
        if let Err(error) = polled {
            self.ended = Some(error);
        }
        let redial = self.control.poll_at();
        let look = self.bus.as_ref().map(|bus| bus.come_again(now));
        self.shard.finish([next, redial, look], now)
    }

    /// Return the next thing that has happened.
    pub fn poll_event(&mut self) -> Option<BoardEvent> {
        if let Some(error) = self.ended.take()
            && self.told_up != Some(false)
        {
            self.told_up = Some(false);
            return Some(BoardEvent::Disconnected(error));
        }
        if self.control.is_up() && self.told_up != Some(true) {
            self.told_up = Some(true);
            return Some(BoardEvent::Connected);
        }
        self.shard.poll_event()
    }
}

/// Another shard of a board.
pub struct Further<'m, D: Device> {
    shard: Shard<'m, D>,
    desk: Answering<'static>,
}

impl<'m, D: Device> Further<'m, D> {
    /// Put it together.
    pub const fn new(stack: Stack<D>, node: Node<'m>, desk: Answering<'static>) -> Self {
        Self { shard: Shard { stack, node, traced: 0, gauge: || None }, desk }
    }

    /// As [`Board::gauge_stack`].
    pub const fn gauge_stack(&mut self, gauge: Gauge) {
        self.shard.gauge = gauge;
    }

    /// Return the NIC.
    pub const fn device_mut(&mut self) -> &mut D {
        self.shard.stack.device_mut()
    }

    /// As [`Board::step`].
    pub fn step(&mut self, now: Instant) -> Option<Instant> {
        while let Some(request) = self.desk.hear.dequeue() {
            // The first shard has taken the answer before.
            let answer = with_stack(self.shard.node.control(&request, now), self.shard.gauge);
            let _ = self.desk.answer.enqueue(answer);
        }
        let next = self.shard.step(now);
        self.shard.finish([next], now)
    }

    /// Return the next thing that has happened.
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

    /// Another shard, which looks at its desk when the first waits.
    struct Second {
        asking: [Asking<'static>; 1],
        answering: Answering<'static>,
        node: Node<'static>,
    }

    impl Others for Second {
        fn desks(&mut self) -> &mut [Asking<'static>] {
            &mut self.asking
        }

        fn wake(&mut self) {}

        fn wait(&mut self) {
            let request = self.answering.hear.dequeue().expect("the first waits for an answer to something");
            let _ = self.answering.answer.enqueue(self.node.control(&request, Instant::ZERO));
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
            by_reference: ChildMask::EMPTY,
        })
    }

    #[test]
    fn all_shards_carry_out_a_request_or_none_does() {
        let mut first = node::<64>(0);
        let (asking, answering) = Box::leak(Box::new(Desk::new())).split();
        let mut others = Second { asking: [asking], answering, node: node::<8>(1) };
        let gauge: Gauge = || Some(StackUse { used_bytes: 7, of_bytes: 9 });
        let mut order = |request: &Request| carry_out(request, (&mut first, gauge), &mut others, Instant::ZERO);
        let tree = Request::InstallTree(TreeConfig { tree: TreeId(1), parent: None, children: 1, ranks: Vec::new() });
        assert_eq!(order(&tree), Response::Done);
        // The second has fewer slots.
        assert!(matches!(order(&group(32)), Response::Refused(Refusal::NoSlots { .. })));
        // The first has given its own back: else the group would exist.
        assert_eq!(order(&group(8)), Response::Done);
        let Response::Stats(stats) = order(&Request::Stats) else { panic!("no stats") };
        assert_eq!((stats.slots_used, stats.stack), (16, gauge()));
        assert!(first.has_group(GroupId(1)) && others.node.has_group(GroupId(1)));
    }
}

//! One step of a board.

use crate::control::{Control, ControlError};
use crate::options::BoardOptions;
use crate::stack::Stack;
use heapless::Vec;
use smoltcp::phy::Device;
use sumac_device::{Event, Node, runtime};
use sumac_hal::ctrl::Announce;
use sumac_hal::ids::BootId;
use sumac_hal::port::Port;
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
}

/// A node, its network and its control connection.
#[derive(Debug)]
pub struct Board<'m, D: Device> {
    stack: Stack<D>,
    node: Node<'m>,
    control: Control,
    /// What was told last of the controller: that it is connected, that it is not, or nothing yet.
    told_up: Option<bool>,
    ended: Option<ControlError>,
}

impl<'m, D: Device> Board<'m, D> {
    /// Put a board together; it dials the controller with the first step.
    pub fn new(stack: Stack<D>, node: Node<'m>, options: &BoardOptions, boot_id: BootId) -> Self {
        let mut data_addrs = Vec::new();
        // A device has room for one address at least.
        let _ = data_addrs.push(stack.local_addr());
        let announce =
            Announce { name: options.name.clone(), boot_id, capabilities: node.capabilities(), data_addrs, bus: None };
        let control = Control::new(options.controller, announce, boot_id.0 as u16);
        Self { stack, node, control, told_up: None, ended: None }
    }

    /// Return the NIC.
    pub const fn device_mut(&mut self) -> &mut D {
        self.stack.device_mut()
    }

    /// Return what the node says of itself.
    pub const fn node(&self) -> &Node<'m> {
        &self.node
    }

    /// Do what there is to do at `now`; returns when to come again if nothing arrives before, `Some(now)` or earlier if
    /// at once.
    pub fn step(&mut self, now: Instant) -> Option<Instant> {
        let next = runtime::poll(&mut self.node, &mut self.stack, now);
        let node = &mut self.node;
        if let Err(error) = self.control.poll(&mut self.stack, now, |request| node.control(request, now)) {
            self.ended = Some(error);
        }
        self.stack.poll(now);
        [next, self.control.poll_at(), self.stack.poll_at(now)].into_iter().flatten().min()
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
        self.node.poll_event().map(BoardEvent::Node)
    }
}

//! Devices of a cluster as boards keep them at a controller: they dial and announce themselves, and execute requests in
//! order, on all shards or on none.
//!
//! The controller detects at once that a device has restarted. Of a device that has died it may detect nothing, until
//! the device does not reply.

use super::cluster::Cluster;
use super::controller::Peer;
use super::coverage::Mark;
use super::incident::Alarm;
use super::loss::Point;
use super::messages::Message;
use super::paths::Host;
use super::places::switch;
use super::setup::boot_id;
use super::wiring::node_addr;
use std::time::Duration;
use sumac::controller::machine::ConnId;
use sumac_hal::ctrl::shards::{merge, undo};
use sumac_hal::ctrl::{Announce, Envelope, Hello, Name, Request, Response};

impl Cluster<'_, '_> {
    /// A device dials, if it is up and not connected.
    pub(super) fn dial_device(&mut self, index: usize) {
        let now = self.now;
        if !self.devices[index].alive || self.devices[index].conn.is_some() || self.control.is_gone {
            return;
        }
        let hello = Hello::Device(self.announce(index));
        match self.control.controller.as_mut().and_then(|controller| controller.dial(&hello, now)) {
            Some(conn) => {
                self.control.conns.insert(conn, Peer::Device(index));
                self.control.is_due = true;
                self.devices[index].conn = Some(conn);
            }
            None => self.schedule(now + REDIAL_DELAY, Alarm::DialDevice(index)),
        }
    }

    fn announce(&self, index: usize) -> Announce {
        let device = &self.devices[index];
        Announce {
            name: Name::try_from(switch(index).as_str()).expect("short"),
            boot_id: boot_id(self.options, index, device.incarnation),
            capabilities: device.shards[0].capabilities(),
            data_addrs: (0..self.options.shards).map(|shard| self.options.address(node_addr(index, shard))).collect(),
            attach: None,
            slots: None,
        }
    }

    /// A device dies.
    pub(super) fn device_died(&mut self, index: usize) {
        self.devices[index].alive = false;
        let is_noticed = self.message_draw.chance(700);
        self.lose_device_conn(index, is_noticed);
    }

    /// A device has restarted: its groups are gone, and it dials.
    pub(super) fn device_restarted(&mut self, index: usize) {
        self.placed.retain(|(device, _)| *device != index);
        self.lose_device_conn(index, true);
        self.schedule(self.now + REDIAL_DELAY, Alarm::DialDevice(index));
    }

    fn lose_device_conn(&mut self, index: usize, is_noticed: bool) {
        let Some(conn) = self.devices[index].conn.take() else { return };
        if self.control.conns.remove(&conn).is_some() && is_noticed {
            self.send_message(Message::Gone(conn));
        }
    }

    /// A device's connection to the controller has ended.
    pub(super) fn device_lost_controller(&mut self, index: usize, conn: ConnId) {
        if self.devices[index].conn == Some(conn) {
            self.devices[index].conn = None;
            self.schedule(self.now + REDIAL_DELAY, Alarm::DialDevice(index));
        }
    }

    /// Execute a request of the controller, and reply.
    pub(super) fn on_device_request(&mut self, index: usize, conn: ConnId, request: Envelope<Request>) {
        let Envelope { id, message } = request;
        if !self.devices[index].alive || matches!(message, Request::Rejected(_)) {
            return;
        }
        let message = match message {
            Request::Identify => Response::Announce(self.announce(index)),
            request => self.execute(index, request),
        };
        self.send_message(Message::FromDevice(conn, Box::new(Envelope { id, message })));
    }

    fn execute(&mut self, index: usize, mut request: Request) -> Response {
        let now = self.device_time(index);
        let tree = match &mut request {
            Request::CreateGroup(config) => {
                let tree = self.tree_of(config.group);
                tree.iter().for_each(|&tree| self.assignments[tree].share(self.options, index, config));
                tree
            }
            Request::ReleaseGroup(group) => self.tree_of(*group),
            _ => None,
        };
        let shards = &mut self.devices[index].shards;
        let response = merge(shards.iter_mut().map(|node| node.control(&request, now))).expect("a device has shards");
        if let (Response::Refused(_), Some(undo)) = (&response, undo(&request)) {
            shards.iter_mut().for_each(|node| _ = node.control(&undo, now));
        }
        self.touch_device(index);
        if let (Request::ProbePath(group), Response::Path { max_packet_len_bytes: Some(_) }) = (&request, &response) {
            self.seen.note(Mark::PathKnownBelow);
            self.paths.note_known(*group, Host::Device(index), self.now);
        }
        match (&request, &response, tree) {
            (Request::CreateGroup(_), Response::Done, Some(tree)) => {
                self.seen.note(Mark::GroupCreated);
                self.placed.insert((index, tree));
                self.assignments[tree].reserved.insert(index);
                self.reach(Point::Reserved, None);
            }
            (Request::ReleaseGroup(_), Response::Done, tree) => {
                self.seen.note(Mark::GroupReleased);
                tree.iter().for_each(|&tree| _ = self.placed.remove(&(index, tree)));
            }
            _ => {}
        }
        response
    }
}

/// Delay before a device redials.
const REDIAL_DELAY: Duration = Duration::from_millis(120);

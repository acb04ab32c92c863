//! Connections to the controller, and messages between the ranks of a job. Messages are delayed and stay in order; a
//! connection may end, and its messages are then lost.

use super::TenantViolation as Violation;
use super::draw::Step;
use super::job::{JobMessage, Phase};
use super::world::{Alarm, World};
use crate::sim::controller::Peer;
use std::time::Duration;
use sumac::controller::machine::ConnId;
use sumac::controller::proto::{ClientReply, ClientRequest};
use sumac_hal::ctrl::{Envelope, Request, Response, encode_frames};

/// A message in flight.
// The size is fine: few messages exist at a time.
#[allow(clippy::large_enum_variant)]
pub(super) enum Message {
    ToDevice(ConnId, Envelope<Request>),
    FromDevice(ConnId, Envelope<Response>),
    ToRank(ConnId, Box<ClientReply>),
    FromRank(ConnId, ClientRequest),
    /// The peer has closed its connection, and sends nothing more.
    Closed(ConnId),
    /// The controller detects that a connection is gone.
    Gone(ConnId),
    /// The peer detects that a connection is gone.
    Ended(ConnId, Peer),
    /// Between ranks of a job; `None` sends to all of its ranks at once.
    Mesh {
        job: usize,
        from: usize,
        to: Option<usize>,
        body: JobMessage,
    },
}

impl Message {
    /// Return the connection to a controller that it is on.
    pub(super) const fn wire_conn(&self) -> Option<ConnId> {
        match self {
            Self::ToDevice(conn, _)
            | Self::FromDevice(conn, _)
            | Self::ToRank(conn, _)
            | Self::FromRank(conn, _)
            | Self::Closed(conn)
            | Self::Gone(conn) => Some(*conn),
            Self::Ended(..) | Self::Mesh { .. } => None,
        }
    }

    /// Return whether it is on a connection to a controller.
    const fn is_on_wire(&self) -> bool {
        self.wire_conn().is_some()
    }

    /// Return the channel within which messages keep their order.
    const fn channel(&self) -> (u64, u64) {
        match self {
            Self::ToDevice(conn, _) | Self::ToRank(conn, _) => (0, conn.0),
            Self::FromDevice(conn, _) | Self::FromRank(conn, _) | Self::Closed(conn) => (1, conn.0),
            Self::Gone(conn) => (2, conn.0),
            Self::Ended(conn, _) => (3, conn.0),
            Self::Mesh { job, from, to, .. } => {
                let to = if let Some(to) = to { *to as u64 } else { u32::MAX as u64 };
                (4 + *job as u64, (*from as u64) << 32 | to)
            }
        }
    }
}

impl World<'_, '_> {
    /// Send a message.
    pub(super) fn send_message(&mut self, message: Message) {
        let most = self.plan.message_delay_max.as_nanos() as u64;
        let most = self.draw.one_of(&[20_000, most / 8, most]).max(1_000);
        let at = self.now + Duration::from_nanos(1_000 + self.draw.below(most));
        let last = self.last.entry(message.channel()).or_default();
        *last = at.max(*last);
        let at = *last;
        self.message_numbers += 1;
        self.on_wire += usize::from(message.is_on_wire());
        self.messages.insert((at, self.message_numbers), message);
        self.report.messages_max = self.report.messages_max.max(self.messages.len() as u64);
    }

    /// A connection is gone: each end detects it in its own time, and messages in flight are lost.
    pub(super) fn cut(&mut self, conn: ConnId) {
        let Some(peer) = self.conns.remove(&conn) else { return };
        self.send_message(Message::Gone(conn));
        self.notify_end(conn, peer);
        if let Peer::Device(device) = peer {
            self.devices[device].disturbed = true;
        }
    }

    /// Notify the peer of a connection that it is gone. After a strike, ranks detect it late: some that were told where
    /// to move get there before others know that they will not be told.
    pub(super) fn notify_end(&mut self, conn: ConnId, peer: Peer) {
        if self.has_struck() && matches!(peer, Peer::Rank(..)) {
            let most = self.draw.one_of(&[1, 500_000, 5_000_000, 5_000_000]);
            let at = self.now + Duration::from_micros(self.draw.below(most));
            return self.schedule(at, Alarm::Ended(conn, peer));
        }
        self.send_message(Message::Ended(conn, peer));
    }

    /// A peer closes its connection; what it has sent still arrives.
    pub(super) fn close(&mut self, conn: ConnId) {
        self.send_message(Message::Closed(conn));
    }

    pub(super) fn take(&mut self, message: Message) -> Result<(), Violation> {
        let is_on_wire = message.is_on_wire();
        self.on_wire -= usize::from(is_on_wire);
        match message {
            Message::ToDevice(conn, request) => {
                if let Some(Peer::Device(device)) = self.conns.get(&conn).copied() {
                    self.ask_of_device(device, conn, request)?;
                }
            }
            Message::FromDevice(conn, response) => {
                let now = self.now;
                if self.conns.contains_key(&conn)
                    && let Some(controller) = self.controller_of(conn)
                {
                    controller.handle(conn, &encode_frames(&response).expect("a message"), now);
                }
            }
            Message::ToRank(conn, reply) => {
                if let Some(Peer::Rank(job, rank)) = self.conns.get(&conn).copied() {
                    self.on_reply((job, rank), *reply)?;
                }
            }
            Message::FromRank(conn, request) => {
                let now = self.now;
                if self.conns.contains_key(&conn)
                    && let Some(controller) = self.controller_of(conn)
                {
                    controller.handle(conn, &encode_frames(&request).expect("a message"), now);
                    if matches!(request, ClientRequest::Pause { .. }) {
                        self.reach(Step::Promised);
                    }
                }
            }
            Message::Closed(conn) => {
                self.conns.remove(&conn);
                self.lose(conn);
            }
            Message::Gone(conn) => self.lose(conn),
            Message::Ended(conn, peer) => self.end_of(conn, peer)?,
            Message::Mesh { job, from, to, body } => {
                let all = 0..self.plan.jobs[job].world;
                for to in to.map_or(all, |to| to..to + 1) {
                    self.on_job_message((job, to), from, body.clone())?;
                }
            }
        }
        self.watch.is_stale |= is_on_wire;
        Ok(())
    }

    fn lose(&mut self, conn: ConnId) {
        if let Some(controller) = self.controller_of(conn) {
            controller.handle_closed(conn);
        }
    }

    pub(super) fn end_of(&mut self, conn: ConnId, peer: Peer) -> Result<(), Violation> {
        match peer {
            Peer::Device(device) if self.devices[device].conn == Some(conn) => {
                self.devices[device].conn = None;
                self.note_end_of_host_device(device);
                self.schedule(self.now + REDIAL_DELAY, Alarm::DialDevice(device));
                Ok(())
            }
            Peer::Rank(job, rank) if self.jobs[job].ranks[rank].conn == Some(conn) => {
                self.jobs[job].ranks[rank].conn = None;
                self.on_controller_lost((job, rank))
            }
            _ => Ok(()),
        }
    }

    /// A device dials, if it is up and not connected.
    pub(super) fn dial_device(&mut self, device: usize) {
        let now = self.now;
        if !self.devices[device].is_on() || self.devices[device].conn.is_some() {
            return;
        }
        let Some(hello) = self.hello(device) else { return };
        match self.controller.as_mut().and_then(|controller| controller.dial(&hello, now)) {
            Some(conn) => {
                self.conns.insert(conn, Peer::Device(device));
                self.devices[device].conn = Some(conn);
                self.watch.is_stale = true;
            }
            None => self.schedule(now + REDIAL_DELAY, Alarm::DialDevice(device)),
        }
    }

    /// Send a rank's request to the controller, if it has a connection.
    pub(super) fn ask_controller(&mut self, (job, rank): (usize, usize), request: ClientRequest) {
        let member = &self.jobs[job].ranks[rank];
        let may_ask = !member.takeover.is_pending || matches!(request, ClientRequest::Resume(_) | ClientRequest::Leave);
        if let Some(conn) = member.conn.filter(|_| may_ask) {
            self.send_message(Message::FromRank(conn, request));
        }
    }

    /// Send a message to all ranks of a job, the sender included.
    pub(super) fn broadcast(&mut self, (job, from): (usize, usize), body: &JobMessage) {
        let world = self.plan.jobs[job].world;
        if world > INDIVIDUAL_MAX {
            return self.send_message(Message::Mesh { job, from, to: None, body: body.clone() });
        }
        for to in 0..world {
            self.send_message(Message::Mesh { job, from, to: Some(to), body: body.clone() });
        }
    }

    /// A rank is gone: the others detect it.
    pub(super) fn leave_mesh(&mut self, (job, from): (usize, usize)) {
        for to in 0..self.plan.jobs[job].world {
            if to != from && !matches!(self.jobs[job].ranks[to].phase, Phase::Ended(_)) {
                self.send_message(Message::Mesh { job, from, to: Some(to), body: JobMessage::Gone });
            }
        }
    }

    /// Return whether nothing is in flight to or from the controller.
    pub(super) const fn is_silent(&self) -> bool {
        self.on_wire == 0
    }

    /// Return whether all incidents are over.
    pub(super) fn is_healed(&self) -> bool {
        self.now > self.healed_at
    }
}

/// Maximum number of ranks that get individual messages: their number grows with the square.
const INDIVIDUAL_MAX: usize = 16;

/// Delay before a device redials.
const REDIAL_DELAY: Duration = Duration::from_millis(120);

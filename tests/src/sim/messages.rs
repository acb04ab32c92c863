//! Messages between ranks, and on connections to the controller. They are delayed, and arrive in order per pair and
//! connection.

use super::cluster::Cluster;
use super::controller::Peer;
use super::report::Violation;
use super::trial::Piece;
use std::time::Duration;
use sumac::controller::machine::ConnId;
use sumac::controller::proto::{ClientReply, ClientRequest};
use sumac::harness::{Attempt, ViewMessage};
use sumac_hal::ctrl::{Envelope, Request, Response, encode_frames};

/// A message between ranks, or on a connection to the controller.
#[derive(Debug, Clone)]
pub(super) enum Message {
    ToDevice(ConnId, Box<Envelope<Request>>),
    FromDevice(ConnId, Box<Envelope<Response>>),
    ToRank(ConnId, Box<ClientReply>),
    FromRank(ConnId, Box<ClientRequest>),
    /// The controller detects that a connection is gone.
    Gone(ConnId),
    /// Between ranks, about a view change.
    View {
        from: usize,
        to: usize,
        group: usize,
        view: u32,
        message: Box<ViewMessage>,
    },
    /// Between ranks, in an attempt at a view change.
    Piece {
        from: usize,
        to: usize,
        group: usize,
        view: u32,
        attempt: Attempt,
        piece: Piece,
    },
    /// A rank has entered an operation that runs as a host collective.
    Entered {
        to: usize,
        group: usize,
        op: usize,
        from: usize,
    },
}

impl Message {
    /// Return the sending and receiving rank of a message between ranks.
    pub(super) const fn between_ranks(&self) -> Option<(usize, usize)> {
        match self {
            Self::ToDevice(..) | Self::FromDevice(..) | Self::ToRank(..) | Self::FromRank(..) | Self::Gone(_) => None,
            Self::Entered { from, to, .. } | Self::View { from, to, .. } | Self::Piece { from, to, .. } => {
                Some((*from, *to))
            }
        }
    }

    /// Return its connection to the controller, if it is on one.
    pub(super) const fn conn(&self) -> Option<ConnId> {
        match self {
            Self::ToDevice(conn, _)
            | Self::FromDevice(conn, _)
            | Self::ToRank(conn, _)
            | Self::FromRank(conn, _)
            | Self::Gone(conn) => Some(*conn),
            Self::Entered { .. } | Self::View { .. } | Self::Piece { .. } => None,
        }
    }

    /// Return the channel within which messages keep their order.
    const fn channel(&self) -> (u64, u64) {
        match self {
            Self::ToDevice(conn, _) | Self::ToRank(conn, _) => (u64::MAX, conn.0),
            Self::FromDevice(conn, _) | Self::FromRank(conn, _) => (u64::MAX - 1, conn.0),
            Self::Gone(conn) => (u64::MAX - 2, conn.0),
            Self::Entered { from, to, .. } | Self::View { from, to, .. } | Self::Piece { from, to, .. } => {
                (*from as u64, *to as u64)
            }
        }
    }
}

impl Cluster<'_, '_> {
    /// Send a message; messages of one pair or connection keep their order.
    pub(super) fn send_message(&mut self, message: Message) {
        let most = self.message_draw.one_of(&[20_000, 300_000, 5_000_000]);
        let at = self.now + Duration::from_nanos(1_000 + self.message_draw.below(most));
        let last = self.message_last.entry(message.channel()).or_default();
        *last = at.max(*last);
        self.message_numbers += 1;
        self.messages.insert((*last, self.message_numbers), message);
        self.messages_max = self.messages_max.max(self.messages.len() as u64);
    }

    pub(super) fn deliver_messages(&mut self) -> Result<(), Violation> {
        while let Some(entry) = self.messages.first_entry().filter(|entry| entry.key().0 <= self.now) {
            let message = entry.remove();
            let Some(message) = self.intercept(message) else { continue };
            match message {
                Message::ToDevice(conn, request) => {
                    if let Some(Peer::Device(device)) = self.control.conns.get(&conn).copied() {
                        self.on_device_request(device, conn, *request);
                    }
                }
                Message::FromDevice(conn, response) => {
                    self.tell_controller(conn, &encode_frames(&*response).expect("a message"));
                }
                Message::FromRank(conn, request) => {
                    self.tell_controller(conn, &encode_frames(&*request).expect("a message"));
                }
                Message::ToRank(conn, reply) => {
                    if let Some(Peer::Rank(rank, group)) = self.control.conns.get(&conn).copied() {
                        self.on_reply((rank, group), *reply)?;
                    }
                }
                Message::Gone(conn) => {
                    if let Some(controller) = &mut self.control.controller {
                        controller.handle_closed(conn);
                        self.control.is_due = true;
                    }
                }
                Message::View { from, to, group, view, message } => {
                    self.on_view_message((from, to, group), view, *message)?
                }
                Message::Piece { from, to, group, view, attempt, piece } => {
                    self.take_piece((from, to, group), (view, attempt), piece)?;
                }
                Message::Entered { to, group, op, from } => {
                    self.members[to][group].entered.entry(op).or_default().insert(from);
                    self.run_host_collectives(to, group)?;
                }
            }
        }
        Ok(())
    }

    /// A message arrives at the controller, unless its connection has ended.
    fn tell_controller(&mut self, conn: ConnId, bytes: &[u8]) {
        let control = &mut self.control;
        if let Some(controller) = control.controller.as_mut().filter(|_| control.conns.contains_key(&conn)) {
            controller.handle(conn, bytes, self.now);
            control.is_due = true;
        }
    }
}

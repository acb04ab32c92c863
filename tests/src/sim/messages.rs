//! Messages between ranks, and between ranks and the controller. They are delayed, and arrive in order per pair.

use super::cluster::Cluster;
use super::controller::ControllerRequest;
use super::report::Violation;
use super::trial::Piece;
use std::time::Duration;
use sumac::harness::{Attempt, ViewMessage};

/// A message between ranks, or between a rank and the controller.
#[derive(Debug, Clone)]
pub(super) enum Message {
    /// To the controller.
    Request { rank: usize, group: usize, view: u32, request: ControllerRequest },
    /// From the controller: the tree of this view is lost.
    TreeLost { rank: usize, group: usize, view: u32 },
    /// From the controller: another tree, or none.
    Found { rank: usize, group: usize, view: u32, tree: Option<usize> },
    /// Between ranks, about a view change.
    View { from: usize, to: usize, group: usize, view: u32, message: Box<ViewMessage> },
    /// Between ranks, in an attempt at a view change.
    Piece { from: usize, to: usize, group: usize, view: u32, attempt: Attempt, piece: Piece },
    /// A rank has entered an operation that runs as a host collective.
    Entered { to: usize, group: usize, op: usize, from: usize },
}

impl Message {
    /// Return the sending and receiving rank of a message between ranks.
    pub(super) const fn between_ranks(&self) -> Option<(usize, usize)> {
        match self {
            Self::Request { .. } | Self::TreeLost { .. } | Self::Found { .. } => None,
            Self::Entered { from, to, .. } | Self::View { from, to, .. } | Self::Piece { from, to, .. } => {
                Some((*from, *to))
            }
        }
    }

    /// Return the receiving rank.
    pub(super) const fn to_rank(&self) -> Option<usize> {
        match self {
            Self::Request { .. } => None,
            Self::TreeLost { rank, .. } | Self::Found { rank, .. } => Some(*rank),
            Self::Entered { to, .. } | Self::View { to, .. } | Self::Piece { to, .. } => Some(*to),
        }
    }
}

impl Cluster<'_, '_> {
    /// Send a message; messages of one pair keep their order.
    pub(super) fn send_message(&mut self, message: Message) {
        let ends = match &message {
            Message::Request { rank, .. } => (*rank, usize::MAX),
            other => other.between_ranks().or(other.to_rank().map(|rank| (usize::MAX, rank))).expect("to a rank"),
        };
        let most = self.message_draw.one_of(&[20_000, 300_000, 5_000_000]);
        let at = self.now + Duration::from_nanos(1_000 + self.message_draw.below(most));
        let last = self.message_last.entry(ends).or_default();
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
                Message::Request { rank, group, view, request } => {
                    self.on_controller_request((rank, group), view, request)
                }
                Message::TreeLost { rank, group, view } => self.on_tree_lost((rank, group), view)?,
                Message::Found { rank, group, view, tree } => {
                    self.members[rank][group].found.insert(view, tree);
                    self.finish_trial((rank, group), false)?;
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
}

//! Messages between the caller's buffers.

use super::{Message, Ticket, cancel, drive_until};
use crate::exec::ExecError;
use crate::exec::mesh::Mesh;
use crate::exec::p2p::{P2pChannel, Slot};
use crate::exec::run::{Interrupt, Status};
use std::time::Instant;

/// Messages between the caller's buffers, from [`Transfer::new`] until all are complete.
#[derive(Debug)]
pub struct Transfer<'a, 'm> {
    mesh: &'a mut Mesh,
    messages: &'a mut [Message<'m>],
    first: Ticket,
    deadline: Instant,
}

impl<'a, 'm> Transfer<'a, 'm> {
    /// Post `messages`, to be complete by `deadline`, in any order.
    ///
    /// # Errors
    /// [`ExecError::Invalid`] if a peer is this rank or out of range: nothing has been sent. The mesh's own error if it
    /// has ended.
    pub fn new(mesh: &'a mut Mesh, messages: &'a mut [Message<'m>], deadline: Instant) -> Result<Self, ExecError> {
        for message in messages.iter() {
            mesh.check_message(message.address().0)?;
        }
        let first = Ticket(mesh.messages.next);
        for (index, message) in messages.iter().enumerate() {
            let (peer, tag, direction) = message.address();
            mesh.messages.push(peer, direction, tag, Slot::Borrowed(index));
        }
        Ok(Self { mesh, messages, first, deadline })
    }

    /// Drive the messages until all are complete, or they are paused.
    ///
    /// # Errors
    /// An error ends the mesh; the contents of receive buffers are then unspecified.
    pub fn drive(&mut self, interrupt: &mut dyn Interrupt) -> Result<Status, ExecError> {
        let first = self.first;
        // Messages posted earlier may stay open.
        let is_open = |channel: &P2pChannel| channel.posts.iter().any(|post| post.ticket >= first);
        let is_done = |mesh: &Mesh| !mesh.messages.out.iter().chain(&mesh.messages.from).any(is_open);
        let borrowed = self.messages.iter_mut().map(Message::reborrow).collect();
        drive_until(self.mesh, borrowed, Some(self.deadline), interrupt, &is_done)
    }

    /// End the messages of the mesh on all ranks, and the mesh, with an error of the caller's.
    pub fn cancel(&mut self, error: ExecError) {
        cancel(self.mesh, error);
    }

    /// Return the mesh, to post messages while these are paused.
    pub const fn mesh(&mut self) -> &mut Mesh {
        self.mesh
    }
}

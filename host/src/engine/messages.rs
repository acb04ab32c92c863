//! Point-to-point messages: they share the connections and the progress of host collectives.

use super::connections::{Posted, PostedUntil};
use super::core::Core;
use super::data_path::Deadline;
use super::error::{Error, StartError, WaitError};
use super::options::CallOptions;
use super::task::{EndOfMessage, Post};
use crate::exec::message::{self, Message, MessageBuffer, PostError, Ticket, Transfer};

impl Core {
    pub(crate) fn transfer(&mut self, messages: &mut [Message<'_>], options: &CallOptions) -> Result<(), Error> {
        self.check_usable()?;
        let deadline = self.deadline(options);
        let result = self.with_connections(|core, connections| {
            let mut transfer = Transfer::new(&mut connections.mesh, messages, deadline.0)?;
            core.drive_host(&mut transfer, deadline)
        });
        self.message_result(result, deadline)
    }

    pub(crate) fn post_message(&mut self, post: Post) -> Result<Ticket, StartError<Box<dyn MessageBuffer>>> {
        if let Err(error) = self.check_usable() {
            return Err(StartError { error, buffer: post.buffer });
        }
        let deadline = self.deadline(&CallOptions::default());
        // The caller's buffer, while the mesh does not have it.
        let Post { peer, direction, tag, buffer } = post;
        let mut unposted = Some(buffer);
        let result = self.with_connections(|core, connections| {
            let mesh = &mut connections.mesh;
            core.drive_host(&mut Posted { mesh: &mut *mesh, until: PostedUntil::Room(deadline.0) }, deadline)?;
            if mesh.is_full() {
                return Ok(None);
            }
            let Some(buffer) = unposted.take() else { return Ok(None) };
            let posted = Post { peer, direction, tag, buffer }.post_on(mesh);
            let ticket = posted.map_err(|PostError { error, buffer }| {
                unposted = Some(buffer);
                error
            })?;
            let driven = core.drive_host(&mut Posted { mesh: &mut *mesh, until: PostedUntil::Blocked }, deadline);
            driven.inspect_err(|_| unposted = mesh.take_back(ticket))?;
            Ok(Some(ticket))
        });
        let too_many = Error::TooManyInFlight { limit: message::POSTS_MAX, waited: deadline.1 };
        let result = self.message_result(result, deadline).and_then(|ticket| ticket.ok_or(too_many));
        result.map_err(|error| {
            let buffer = unposted.expect("an error that follows the post ends the mesh, which then gives buffers back");
            StartError { error, buffer }
        })
    }

    /// Drive messages without waiting, and return whether this one has ended.
    pub(crate) fn test_message(&mut self, ticket: Ticket) -> bool {
        let deadline = self.deadline(&CallOptions::default());
        let driven = self.with_connections(|core, connections| {
            let mesh = &mut connections.mesh;
            core.drive_host(&mut Posted { mesh: &mut *mesh, until: PostedUntil::Blocked }, deadline)?;
            Ok(mesh.is_complete(ticket))
        });
        // An error ends all messages.
        self.message_result(driven, deadline).unwrap_or(true)
    }

    pub(crate) fn wait_message(&mut self, ticket: Ticket, options: &CallOptions) -> EndOfMessage {
        let deadline = self.deadline(options);
        let mut buffer = None;
        let result = self.with_connections(|core, connections| {
            let mesh = &mut connections.mesh;
            let until = PostedUntil::Complete(ticket, deadline.0);
            let driven = core.drive_host(&mut Posted { mesh: &mut *mesh, until }, deadline);
            driven.inspect_err(|_| buffer = mesh.take_back(ticket))?;
            Ok(message::take_complete(mesh, ticket)?)
        });
        self.message_result(result, deadline).map_err(|error| WaitError { error, buffer })
    }

    /// A failed message ends the communicator, unless nothing was sent. If its peer is lost, the error names that rank,
    /// while the communicator ends with the error that all ranks agree on.
    pub(super) fn message_result<R>(&mut self, result: Result<R, Error>, deadline: Deadline) -> Result<R, Error> {
        result.inspect_err(|error| match self.agreed_loss_error(error.clone(), deadline) {
            end if end == *error => self.note_end(error),
            end => self.note_unreported_end(end),
        })
    }
}

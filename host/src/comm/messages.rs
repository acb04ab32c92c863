//! Point to point: messages from one rank to another, beside collectives.
//!
//! The n-th message from a to b meets the n-th receive at b from a; tag and length must be the same at both ends. A
//! blocking send may wait for its receiver. Collectives and messages don't wait for each other.

use super::core::Core;
use super::own::Own;
use super::progress::Deadline;
use super::{CallOptions, Communicator, Element, Error};
use crate::exec::message::{self, Direction, Message, MessageBuffer, Ticket};
use std::any::Any;
use std::marker::PhantomData;
use sumac_hal::ids::Rank;

impl Communicator {
    /// Send `values` to rank `to`, which receives them with the same tag.
    ///
    /// # Errors
    /// [`Error`].
    pub fn send<T: Element>(&self, values: &[T], to: u32, tag: u32) -> Result<(), Error> {
        let bytes = bytemuck::cast_slice(values);
        self.lock()?.transfer(&mut [Message::Send { peer: Rank(to), tag, bytes }], &CallOptions::default())
    }

    /// Receive as many values as `values` is long from rank `from`.
    ///
    /// # Errors
    /// [`Error`]; if tag or length are not the sender's, both ends get one.
    pub fn receive<T: Element>(&self, values: &mut [T], from: u32, tag: u32) -> Result<(), Error> {
        let bytes = bytemuck::cast_slice_mut(values);
        self.lock()?.transfer(&mut [Message::Receive { peer: Rank(from), tag, bytes }], &CallOptions::default())
    }

    /// Send and receive at the same time, as neighbours in a ring or a grid do: neither waits for the other.
    ///
    /// # Errors
    /// [`Error`].
    pub fn send_receive<T: Element>(
        &self,
        (values, to): (&[T], u32),
        (received, from): (&mut [T], u32),
        tag: u32,
    ) -> Result<(), Error> {
        let send = Message::Send { peer: Rank(to), tag, bytes: bytemuck::cast_slice(values) };
        let receive = Message::Receive { peer: Rank(from), tag, bytes: bytemuck::cast_slice_mut(received) };
        self.lock()?.transfer(&mut [send, receive], &CallOptions::default())
    }

    /// Start to send `values` to rank `to`; [`MessageHandle::wait`] gives them back. As many as 4096 messages may be on
    /// their way; then this waits for one to be through, at most until the communicator's deadline.
    ///
    /// # Errors
    /// [`Error`]; the values are gone then.
    pub fn start_send<T: Element>(&self, values: Vec<T>, to: u32, tag: u32) -> Result<MessageHandle<T>, Error> {
        self.post(values, to, tag, Direction::Send)
    }

    /// Start to receive `count` values from rank `from`; [`MessageHandle::wait`] gives them.
    ///
    /// # Errors
    /// [`Error`].
    pub fn start_receive<T: Element>(&self, count: usize, from: u32, tag: u32) -> Result<MessageHandle<T>, Error> {
        self.post(vec![T::zeroed(); count], from, tag, Direction::Receive)
    }

    fn post<T: Element>(
        &self,
        values: Vec<T>,
        peer: u32,
        tag: u32,
        direction: Direction,
    ) -> Result<MessageHandle<T>, Error> {
        let ticket = self.lock()?.post_message(Rank(peer), direction, tag, Box::new(Typed(values)))?;
        Ok(MessageHandle { own: self.own.clone(), ticket, values: PhantomData, is_finished: false })
    }
}

/// A started message.
///
/// Dropping it abandons the message, which goes on, as the other end waits for it: its memory goes when it is through.
/// Forgetting it ([`std::mem::forget`]) is safe: the communicator then keeps the memory for good.
#[derive(Debug)]
#[must_use = "a started message gives its values back when it is waited for"]
pub struct MessageHandle<T> {
    own: Own,
    ticket: Ticket,
    values: PhantomData<T>,
    is_finished: bool,
}

impl<T: Element> MessageHandle<T> {
    /// Wait until the message is through, and get its values.
    ///
    /// # Errors
    /// [`Error`].
    pub fn wait(mut self) -> Result<Vec<T>, Error> {
        self.is_finished = true;
        let buffer = self.own.lock()?.wait_message(self.ticket, &CallOptions::default())?;
        let values = buffer.into_any().downcast::<Typed<T>>();
        values.map(|values| values.0).map_err(|_| Error::Argument("the message's values are gone".into()))
    }
}

impl<T> Drop for MessageHandle<T> {
    fn drop(&mut self) {
        if !self.is_finished {
            self.own.reclaim(|dropped| dropped.push_message(self.ticket));
        }
    }
}

/// Values as a message's memory.
struct Typed<T>(Vec<T>);

impl<T: Element> MessageBuffer for Typed<T> {
    fn bytes(&self) -> &[u8] {
        bytemuck::cast_slice(&self.0)
    }

    fn bytes_mut(&mut self) -> &mut [u8] {
        bytemuck::cast_slice_mut(&mut self.0)
    }

    fn into_any(self: Box<Self>) -> Box<dyn Any> {
        self
    }
}

impl Core {
    fn transfer(&mut self, messages: &mut [Message<'_>], options: &CallOptions) -> Result<(), Error> {
        self.usable()?;
        let deadline = self.deadline(options);
        let result =
            self.beside(deadline, |lines, along| message::transfer(&mut lines.mesh, messages, deadline.0, along));
        self.message_result(result, deadline)
    }

    fn post_message(
        &mut self,
        peer: Rank,
        direction: Direction,
        tag: u32,
        buffer: Box<dyn MessageBuffer>,
    ) -> Result<Ticket, Error> {
        self.usable()?;
        let deadline = self.deadline(&CallOptions::default());
        let result = self.beside(deadline, |lines, along| {
            if !message::make_room(&mut lines.mesh, deadline.0, along)? {
                return Ok(None);
            }
            let ticket = lines.mesh.post(peer, direction, tag, buffer)?;
            message::poll(&mut lines.mesh, along).map(|()| Some(ticket))
        });
        let too_many = Error::TooManyInFlight { limit: message::POSTS_MAX, waited: deadline.1 };
        self.message_result(result, deadline)?.ok_or(too_many)
    }

    fn wait_message(&mut self, ticket: Ticket, options: &CallOptions) -> Result<Box<dyn MessageBuffer>, Error> {
        let deadline = self.deadline(options);
        let result = self.beside(deadline, |lines, along| message::wait(&mut lines.mesh, ticket, deadline.0, along));
        self.message_result(result, deadline)
    }

    /// A message that fails ends the communicator, unless nothing was sent. Where its rank is lost, this names it; what
    /// the communicator ends with is what all ranks agree on.
    fn message_result<R>(&mut self, result: Result<R, Error>, deadline: Deadline) -> Result<R, Error> {
        result.inspect_err(|error| match self.after_loss(error.clone(), deadline) {
            end if end == *error => self.note_end(error),
            end => self.note_untold_end(end),
        })
    }
}

//! Point-to-point messages.
//!
//! Messages from a to b match receives at b from a in order: the n-th message meets the n-th receive. Tag and length
//! must be the same on both ends. A blocking send may wait for its receiver. Messages and collectives do not block each
//! other.

use super::{CallOptions, Communicator, Element, Error};
use crate::engine::SharedCore;
use crate::exec::message::{Direction, Message, MessageBuffer, Ticket};
use std::any::Any;
use std::marker::PhantomData;
use sumac_hal::ids::Rank;

impl Communicator {
    /// Send `values` to rank `to`, which receives them with the same tag. May block until the receiver is ready.
    ///
    /// # Errors
    /// [`Error`]; both ends get one if tag or length differ.
    pub fn send<T: Element>(&self, values: &[T], to: u32, tag: u32) -> Result<(), Error> {
        let bytes = bytemuck::cast_slice(values);
        self.lock()?.transfer(&mut [Message::Send { peer: Rank(to), tag, bytes }], &CallOptions::default())
    }

    /// Receive exactly `values.len()` values from rank `from`.
    ///
    /// # Errors
    /// [`Error`]; both ends get one if tag or length differ from the sender's.
    pub fn receive<T: Element>(&self, values: &mut [T], from: u32, tag: u32) -> Result<(), Error> {
        let bytes = bytemuck::cast_slice_mut(values);
        self.lock()?.transfer(&mut [Message::Receive { peer: Rank(from), tag, bytes }], &CallOptions::default())
    }

    /// Send to one rank and receive from another at the same time, without deadlock, for neighbours in a ring or a
    /// grid.
    ///
    /// # Errors
    /// [`Error`] if either message fails.
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

    /// Start to send `values` to rank `to`; [`MessageHandle::wait`] returns them. Up to 4096 messages may be in flight.
    /// At the limit this waits for one to complete, at most until the communicator's deadline.
    ///
    /// # Errors
    /// [`Error`]; the values are lost.
    pub fn start_send<T: Element>(&self, values: Vec<T>, to: u32, tag: u32) -> Result<MessageHandle<T>, Error> {
        self.post(values, to, tag, Direction::Send)
    }

    /// Start to receive `count` values from rank `from`; [`MessageHandle::wait`] returns them.
    ///
    /// # Errors
    /// [`Error`] if the message cannot be posted.
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
        Ok(MessageHandle { core: self.core.clone(), ticket, values: PhantomData, is_finished: false })
    }
}

/// A message that has been started, and owns its values.
///
/// Dropping the handle detaches the message: it continues, because the other end waits for it, and its memory is freed
/// when it completes. Forgetting it ([`std::mem::forget`]) is safe: the communicator then keeps the memory for its
/// lifetime.
#[derive(Debug)]
#[must_use = "`wait` returns the message's values"]
pub struct MessageHandle<T> {
    core: SharedCore,
    ticket: Ticket,
    values: PhantomData<T>,
    is_finished: bool,
}

impl<T: Element> MessageHandle<T> {
    /// Wait until the message is complete and return its values.
    ///
    /// # Errors
    /// [`Error`] if the message failed. The values are lost.
    pub fn wait(mut self) -> Result<Vec<T>, Error> {
        self.is_finished = true;
        let buffer = self.core.lock()?.wait_message(self.ticket, &CallOptions::default())?;
        let values = buffer.into_any().downcast::<Typed<T>>();
        values.map(|values| values.0).map_err(|_| Error::Argument("the values of this message are gone".into()))
    }
}

impl<T> Drop for MessageHandle<T> {
    fn drop(&mut self) {
        if !self.is_finished {
            self.core.reclaim(|dropped| dropped.push_message(self.ticket));
        }
    }
}

/// A vector as the memory of a message.
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

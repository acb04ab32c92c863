//! Point-to-point messages.
//!
//! Messages from a to b match receives at b from a in order: the n-th message meets the n-th receive. Tag and length
//! must be the same on both ends. A blocking send may wait for its receiver. Messages and collectives do not block each
//! other.

use super::{CallOptions, Communicator, Element, Error, StartError, WaitError};
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
    /// [`StartError`], with the values.
    pub fn start_send<T: Element>(
        &self,
        values: Vec<T>,
        to: u32,
        tag: u32,
    ) -> Result<MessageHandle<T>, StartError<Vec<T>>> {
        self.post(values, to, tag, Direction::Send)
    }

    /// Start to receive `count` values from rank `from`; [`MessageHandle::wait`] returns them.
    ///
    /// # Errors
    /// [`Error`] if the message cannot be posted.
    pub fn start_receive<T: Element>(&self, count: usize, from: u32, tag: u32) -> Result<MessageHandle<T>, Error> {
        Ok(self.post(vec![T::zeroed(); count], from, tag, Direction::Receive)?)
    }

    fn post<T: Element>(
        &self,
        values: Vec<T>,
        peer: u32,
        tag: u32,
        direction: Direction,
    ) -> Result<MessageHandle<T>, StartError<Vec<T>>> {
        let mut core = match self.lock() {
            Ok(core) => core,
            Err(error) => return Err(StartError { error, buffer: values }),
        };
        match core.post_message(Rank(peer), direction, tag, Box::new(Typed(values))) {
            Ok(ticket) => {
                Ok(MessageHandle { core: self.core.clone(), ticket, values: PhantomData, is_finished: false })
            }
            Err(StartError { error, buffer }) => {
                let buffer = typed(buffer).expect("the core returns the buffer that it was given");
                Err(StartError { error, buffer })
            }
        }
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
    /// [`WaitError`], with the vector, if the message failed. What was to be sent is unchanged; what was to be received
    /// is unspecified.
    pub fn wait(mut self) -> Result<Vec<T>, WaitError<Vec<T>>> {
        self.is_finished = true;
        let result = match self.core.lock() {
            Ok(mut core) => core.wait_message(self.ticket, &CallOptions::default()),
            Err(error) => return Err(WaitError { error, buffer: None }),
        };
        let gone = || Error::Argument("the values of this message are gone".into());
        match result {
            Ok(buffer) => typed(buffer).ok_or_else(|| WaitError { error: gone(), buffer: None }),
            Err(WaitError { error, buffer }) => Err(WaitError { error, buffer: buffer.and_then(typed) }),
        }
    }
}

impl<T> Drop for MessageHandle<T> {
    fn drop(&mut self) {
        if !self.is_finished {
            self.core.reclaim(|dropped| dropped.push_message(self.ticket));
        }
    }
}

/// Return a message's memory as the vector that it was made from.
fn typed<T: Element>(buffer: Box<dyn MessageBuffer>) -> Option<Vec<T>> {
    buffer.into_any().downcast::<Typed<T>>().ok().map(|values| values.0)
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

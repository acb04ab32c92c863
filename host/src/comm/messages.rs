//! Point-to-point messages.
//!
//! Messages from a to b match receives at b from a in order: the n-th message meets the n-th receive. Tag and length
//! must be the same on both ends. A blocking send may wait for its receiver. Messages and collectives do not block each
//! other.
//!
//! A receive from any rank takes the next message with its tag of whichever rank's comes first, unless a receive that
//! was started before takes that message.

use super::{CallOptions, Communicator, Element, Error, StartError, WaitError};
use crate::engine::{Post, SharedCore, Task, Work};
use crate::exec::message::{Direction, Message, MessageBuffer};
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
        self.core.transfer(&mut [Message::Send { peer: Rank(to), tag, bytes }])
    }

    /// Receive exactly `values.len()` values from rank `from`.
    ///
    /// # Errors
    /// [`Error`]; both ends get one if tag or length differ from the sender's.
    pub fn receive<T: Element>(&self, values: &mut [T], from: u32, tag: u32) -> Result<(), Error> {
        let bytes = bytemuck::cast_slice_mut(values);
        self.core.transfer(&mut [Message::Receive { peer: Rank(from), tag, bytes }])
    }

    /// Receive exactly `values.len()` values from any other rank, and return which.
    ///
    /// # Errors
    /// As for [`Communicator::receive`].
    pub fn receive_any<T: Element>(&self, values: &mut [T], tag: u32) -> Result<u32, Error> {
        let received = self.start_receive_any::<T>(values.len(), tag)?.wait_with_source();
        let (source, received) = received.map_err(|failed| failed.error)?;
        values.copy_from_slice(&received);
        Ok(source)
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
        self.core.transfer(&mut [send, receive])
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
        self.post(values, Some(to), tag, Direction::Send)
    }

    /// Start to receive `count` values from rank `from`; [`MessageHandle::wait`] returns them.
    ///
    /// # Errors
    /// [`Error`] if the message cannot be posted.
    pub fn start_receive<T: Element>(&self, count: usize, from: u32, tag: u32) -> Result<MessageHandle<T>, Error> {
        Ok(self.post(vec![T::zeroed(); count], Some(from), tag, Direction::Receive)?)
    }

    /// Start to receive `count` values from any other rank; [`MessageHandle::wait_with_source`] returns them and says
    /// which.
    ///
    /// # Errors
    /// [`Error`] if the message cannot be posted.
    pub fn start_receive_any<T: Element>(&self, count: usize, tag: u32) -> Result<MessageHandle<T>, Error> {
        Ok(self.post(vec![T::zeroed(); count], None, tag, Direction::Receive)?)
    }

    fn post<T: Element>(
        &self,
        values: Vec<T>,
        peer: Option<u32>,
        tag: u32,
        direction: Direction,
    ) -> Result<MessageHandle<T>, StartError<Vec<T>>> {
        let post = Post { peer: peer.map(Rank), direction, tag, buffer: Box::new(Typed(values)) };
        match self.core.begin(Work::Message(post)) {
            Ok(task) => Ok(MessageHandle { core: self.core.clone(), task, values: PhantomData, is_finished: false }),
            Err(refused) => {
                let StartError { error, buffer: work } = *refused;
                let buffer = work.into_message().and_then(typed);
                Err(StartError { error, buffer: buffer.expect("the core returns the buffer that it was given") })
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
    task: Task,
    values: PhantomData<T>,
    is_finished: bool,
}

impl<T: Element> MessageHandle<T> {
    /// Return whether the message is complete or has failed, so that [`MessageHandle::wait`] returns at once. Does not
    /// block.
    pub fn test(&mut self) -> bool {
        self.core.has_ended(self.task)
    }

    /// Wait until the message is complete and return its values.
    ///
    /// # Errors
    /// [`WaitError`], with the vector, if the message failed. What was to be sent is unchanged; what was to be received
    /// is unspecified.
    pub fn wait(self) -> Result<Vec<T>, WaitError<Vec<T>>> {
        self.wait_with_source().map(|(_, values)| values)
    }

    /// As [`MessageHandle::wait`], with the rank at the other end.
    ///
    /// # Errors
    /// As for [`MessageHandle::wait`].
    pub fn wait_with_source(mut self) -> Result<(u32, Vec<T>), WaitError<Vec<T>>> {
        self.is_finished = true;
        let result = self.core.finish(self.task, &CallOptions::default()).into_message();
        let gone = || Error::Argument("the values of this message are gone".into());
        match result {
            Ok((peer, buffer)) => match typed(buffer) {
                Some(values) => Ok((peer.0, values)),
                None => Err(WaitError { error: gone(), buffer: None }),
            },
            Err(WaitError { error, buffer }) => Err(WaitError { error, buffer: buffer.and_then(typed) }),
        }
    }
}

impl<T> Drop for MessageHandle<T> {
    fn drop(&mut self) {
        if !self.is_finished {
            self.core.detach(self.task);
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

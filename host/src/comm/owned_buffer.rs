//! Buffers that started operations may own.

use super::{Buffer, Communicator, Element, Error};
use crate::engine::ErasedBuffer;
use std::any::Any;

/// A buffer that a started operation takes ownership of: a [`Vec`], or a [`Buffer`], on which operations are zero-copy
/// where the rank shares memory with its leaf device.
///
/// Moving the container does not move its values. This trait is sealed.
pub trait OwnedBuffer: sealed::Sealed + Send + Sized + 'static {
    /// The type of its elements.
    type Element: Element;

    /// Return the elements.
    fn values(&self) -> &[Self::Element];

    /// Return the elements for writing.
    fn values_mut(&mut self) -> &mut [Self::Element];

    /// Make a buffer of `len` zeroes.
    ///
    /// # Errors
    /// [`Error::Memory`] if no registered memory is available.
    fn zeroed(comm: &Communicator, len: usize) -> Result<Self, Error>;
}

pub(super) mod sealed {
    pub trait Sealed {}
}

impl<T> sealed::Sealed for Vec<T> {}
impl<T: Element> sealed::Sealed for Buffer<T> {}

impl<T: Element> OwnedBuffer for Vec<T> {
    type Element = T;

    fn values(&self) -> &[T] {
        self
    }

    fn values_mut(&mut self) -> &mut [T] {
        self
    }

    fn zeroed(_: &Communicator, len: usize) -> Result<Self, Error> {
        Ok(vec![T::zeroed(); len])
    }
}

impl<T: Element> OwnedBuffer for Buffer<T> {
    type Element = T;

    fn values(&self) -> &[T] {
        self
    }

    fn values_mut(&mut self) -> &mut [T] {
        self
    }

    fn zeroed(comm: &Communicator, len: usize) -> Result<Self, Error> {
        comm.alloc(len)
    }
}

impl<B: OwnedBuffer> ErasedBuffer for B {
    fn bytes(&self) -> &[u8] {
        bytemuck::cast_slice(self.values())
    }

    fn bytes_mut(&mut self) -> &mut [u8] {
        bytemuck::cast_slice_mut(self.values_mut())
    }

    fn into_any(self: Box<Self>) -> Box<dyn Any> {
        self
    }
}

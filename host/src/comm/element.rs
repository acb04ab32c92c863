//! What buffers are made of.

use super::{Communicator, Error};
use crate::transport::memory::Buffer;
use std::any::Any;
use sumac_hal::op::Dtype;

/// A Rust type that is an element type of operations.
pub trait Element: bytemuck::Pod + Send + 'static {
    /// Which one.
    const DTYPE: Dtype;
}

macro_rules! element {
    ($($ty:ty: $dtype:ident,)*) => {$(
        impl Element for $ty {
            const DTYPE: Dtype = Dtype::$dtype;
        }
    )*};
}

element! {
    i8: I8,
    u8: U8,
    i16: I16,
    u16: U16,
    i32: I32,
    u32: U32,
    i64: I64,
    u64: U64,
    f32: F32,
    f64: F64,
    half::f16: F16,
    half::bf16: Bf16,
}

// Values travel as they lie in memory, which the wire wants little-endian.
const _: () = assert!(cfg!(target_endian = "little"), "buffers are reduced in place and must be little-endian");

/// A buffer that the communicator owns while its operation is on its way.
pub(super) trait OwnedBuffer: Send {
    fn bytes(&self) -> &[u8];
    fn bytes_mut(&mut self) -> &mut [u8];
    fn into_any(self: Box<Self>) -> Box<dyn Any>;
}

impl<B: Held> OwnedBuffer for B {
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

/// A container that a started operation holds until it is waited for: [`Vec`], or [`Buffer`], which the leaf device
/// reads and writes by itself where the communicator attaches by reference.
///
/// Its values stay where they are when it moves.
pub trait Held: sealed::Sealed + Send + Sized + 'static {
    /// What it contains.
    type Element: Element;

    /// Borrow the values.
    fn values(&self) -> &[Self::Element];

    /// Borrow the values to write to them.
    fn values_mut(&mut self) -> &mut [Self::Element];

    /// Make one of zeroes.
    ///
    /// # Errors
    /// [`Error::Memory`] if there is none that the device reaches.
    fn zeroed(comm: &Communicator, len: usize) -> Result<Self, Error>;
}

mod sealed {
    pub trait Sealed {}
}

impl<T> sealed::Sealed for Vec<T> {}
impl<T: Element> sealed::Sealed for Buffer<T> {}

impl<T: Element> Held for Vec<T> {
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

impl<T: Element> Held for Buffer<T> {
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

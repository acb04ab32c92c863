//! Element types of operations, and buffers that started operations may own.

use super::{Communicator, Error};
use crate::transport::memory::Buffer;
use std::any::Any;
use sumac_hal::op::Dtype;

/// A Rust type that operations take as elements: integers, floats, and [`sumac::f16`](crate::f16) and
/// [`sumac::bf16`](crate::bf16) of the `half` crate.
///
/// ```no_run
/// # fn sum(comm: &sumac::Communicator) -> Result<(), sumac::Error> {
/// let mut gradients = vec![sumac::bf16::ONE; 1024];
/// comm.all_reduce(&mut gradients, sumac::ReduceOp::Sum)?;
/// # Ok(())
/// # }
/// ```
pub trait Element: bytemuck::Pod + Send + 'static {
    /// The element type that it stands for.
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

// Elements are sent as they are in memory, and the wire is little-endian.
const _: () = assert!(cfg!(target_endian = "little"), "buffers are reduced in place and must be little-endian");

/// A type-erased [`OwnedBuffer`], which the communicator owns until its operation completes.
pub(super) trait ErasedBuffer: Send {
    fn bytes(&self) -> &[u8];
    fn bytes_mut(&mut self) -> &mut [u8];
    fn into_any(self: Box<Self>) -> Box<dyn Any>;
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

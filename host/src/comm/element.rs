//! What buffers are made of.

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

impl<T: Element> OwnedBuffer for Vec<T> {
    fn bytes(&self) -> &[u8] {
        bytemuck::cast_slice(self)
    }

    fn bytes_mut(&mut self) -> &mut [u8] {
        bytemuck::cast_slice_mut(self)
    }

    fn into_any(self: Box<Self>) -> Box<dyn Any> {
        self
    }
}

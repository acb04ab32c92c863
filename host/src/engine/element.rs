//! Element types of operations, and type-erased buffers.

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

/// A type-erased buffer which the communicator owns until its operation completes.
pub(crate) trait ErasedBuffer: Send {
    fn bytes(&self) -> &[u8];
    fn bytes_mut(&mut self) -> &mut [u8];
    fn into_any(self: Box<Self>) -> Box<dyn Any>;
}

//! The double's copy engine that reduces on the way.

use super::state::Task;
use super::{Double, DoubleMemory, DoubleStream, place};
use crate::gpu::engine::{Bulk, bulk_instruction};
use crate::gpu::{GpuError, Part};
use sumac_hal::op::{Dtype, ReduceOp};
use sumac_hal::reduce::Kernel;

impl Bulk for Double {
    fn check_bulk(&self) -> Result<(), GpuError> {
        Ok(())
    }

    fn bulk_reduce(
        &self,
        on: &DoubleStream,
        (dtype, op): (Dtype, ReduceOp),
        to: Part<'_, DoubleMemory>,
        from: Part<'_, DoubleMemory>,
    ) -> Result<(), GpuError> {
        let kernel = bulk_instruction(dtype, op).and(Kernel::new(dtype, op)).ok_or_else(|| GpuError::Kernel {
            kernel: format!("{dtype} {op}"),
            why: "the copy engine has no such reduction".into(),
        })?;
        let (to, from) = (place(&to), place(&from));
        assert!((to.bytes.start | to.bytes.len() | from.bytes.start).is_multiple_of(16), "multiples of 16 bytes");
        self.lock().push(on.0, Task::Bulk { kernel, to, from })
    }

    fn publish(&self, on: &DoubleStream, to: Part<'_, DoubleMemory>, words: [u64; 2]) -> Result<(), GpuError> {
        self.lock().push(on.0, Task::Publish { to: place(&to), words })
    }
}

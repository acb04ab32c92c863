//! The fake GPU's reducing copy engine.

use super::state::Task;
use super::{FakeGpu, FakeMemory, FakeStream, place};
use crate::gpu::engine::{Bulk, bulk_instruction};
use crate::gpu::{GpuError, Part};
use sumac_hal::op::{Dtype, ReduceOp};
use sumac_hal::reduce::Kernel;

impl Bulk for FakeGpu {
    fn check_bulk(&self) -> Result<(), GpuError> {
        Ok(())
    }

    fn bulk_reduce(
        &self,
        on: &FakeStream,
        (dtype, op): (Dtype, ReduceOp),
        to: Part<'_, FakeMemory>,
        from: Part<'_, FakeMemory>,
    ) -> Result<(), GpuError> {
        let kernel = bulk_instruction(dtype, op).and(Kernel::new(dtype, op)).ok_or_else(|| GpuError::Kernel {
            kernel: format!("{dtype} {op}"),
            why: "the copy engine does not support this reduction".into(),
        })?;
        let (to, from) = (place(&to), place(&from));
        assert!((to.bytes.start | to.bytes.len() | from.bytes.start).is_multiple_of(16), "multiples of 16 bytes");
        self.lock().push(on.0, Task::Bulk { kernel, to, from })
    }

    fn publish(&self, on: &FakeStream, to: Part<'_, FakeMemory>, words: [u64; 2]) -> Result<(), GpuError> {
        self.lock().push(on.0, Task::Publish { to: place(&to), words })
    }
}

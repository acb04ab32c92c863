//! The reducing copy engine of sm_90 and later (`bulk.cu`).

use super::compile::{self, BULK_ARCH, CompiledKernel};
use super::{Cuda, CudaMemory, address, driver, function, module};
use crate::gpu::engine::Bulk;
use crate::gpu::{GpuError, Part};
use cudarc::driver::{CudaFunction, CudaStream, LaunchConfig, PushKernelArg};
use std::sync::{Arc, PoisonError};
use sumac_hal::op::{Dtype, ReduceOp};

/// Bytes of a tile, as in `bulk.cu`.
const TILE_BYTES: usize = 8192;

/// Blocks for each multiprocessor: as many as their shared memory allows.
const BLOCKS_EACH: usize = 6;

/// One warp, of which one thread drives the engine.
const THREADS: u32 = 32;

impl Cuda {
    /// Return the function for a type and an operator; also loads the publishing function.
    fn bulk(&self, dtype: Dtype, op: ReduceOp) -> Result<CudaFunction, GpuError> {
        self.check_bulk()?;
        let mut known = self.loaded.bulk.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(known) = known.get(&(dtype, op)) {
            return Ok(known.clone());
        }
        let name = CompiledKernel::bulk_file_name(dtype, op);
        let code = self.code(name, |target| compile::compile_bulk(dtype, op, target))?;
        let module = module(&self.context, code, || format!("the copy engine's {dtype} {op}"))?;
        let new = function(&module, "sumac_bulk")?;
        known.insert((dtype, op), new.clone());
        let mut publish = self.loaded.publish.lock().unwrap_or_else(PoisonError::into_inner);
        if publish.is_none() {
            *publish = Some(function(&module, "sumac_publish")?);
        }
        Ok(new)
    }

    /// Return the publishing function, from the module of a reduction that every engine supports.
    fn publisher(&self) -> Result<CudaFunction, GpuError> {
        self.bulk(Dtype::U32, ReduceOp::Sum)?;
        let publish = self.loaded.publish.lock().unwrap_or_else(PoisonError::into_inner);
        publish.clone().ok_or_else(|| GpuError::Invalid("the copy engine's module publishes nothing".into()))
    }
}

const fn grid(blocks: u32) -> LaunchConfig {
    LaunchConfig { grid_dim: (blocks, 1, 1), block_dim: (THREADS, 1, 1), shared_mem_bytes: 0 }
}

impl Bulk for Cuda {
    fn check_bulk(&self) -> Result<(), GpuError> {
        if self.capability >= BULK_ARCH {
            return Ok(());
        }
        let why = format!("sm_{} copies without reducing; sm_{BULK_ARCH} and later reduce", self.capability);
        Err(GpuError::Kernel { kernel: "the copy engine".into(), why })
    }

    fn bulk_reduce(
        &self,
        on: &Arc<CudaStream>,
        (dtype, op): (Dtype, ReduceOp),
        to: Part<'_, CudaMemory>,
        from: Part<'_, CudaMemory>,
    ) -> Result<(), GpuError> {
        let function = self.bulk(dtype, op)?;
        let (src, dst, len_bytes, stop) = (address(&from), address(&to), to.len_bytes as u64, self.stop.address());
        if !(src | dst | len_bytes).is_multiple_of(16) || from.len_bytes != to.len_bytes {
            let what = format!("{len_bytes} bytes from {src:#x} to {dst:#x}: the copy engine takes multiples of 16");
            return Err(GpuError::Invalid(what));
        }
        let most = self.multiprocessors as usize * BLOCKS_EACH;
        let blocks = to.len_bytes.div_ceil(TILE_BYTES).clamp(1, most) as u32;
        let mut arguments = on.launch_builder(&function);
        arguments.arg(&src).arg(&dst).arg(&len_bytes).arg(&stop);
        // SAFETY: the arguments are the kernel's, and both parts are `len_bytes` long.
        unsafe { arguments.launch(grid(blocks)) }.map(|_| ()).map_err(|error| driver("a launch", error))
    }

    fn publish(&self, on: &Arc<CudaStream>, to: Part<'_, CudaMemory>, words: [u64; 2]) -> Result<(), GpuError> {
        let function = self.publisher()?;
        let dst = address(&to);
        if to.len_bytes != size_of::<[u64; 2]>() || !dst.is_multiple_of(8) {
            return Err(GpuError::Invalid(format!("two words in {} bytes at {dst:#x}", to.len_bytes)));
        }
        let mut arguments = on.launch_builder(&function);
        arguments.arg(&dst).arg(&words[0]).arg(&words[1]);
        // SAFETY: the arguments are the kernel's, and `to` holds two words.
        unsafe { arguments.launch(grid(1)) }.map(|_| ()).map_err(|error| driver("a launch", error))
    }
}

//! A matrix product: computation for measuring overlap with communication.

use super::compile::{self, CompiledKernel};
use super::{Cuda, CudaMemory, driver, function, module};
use crate::gpu::{Gpu, GpuError};
use cudarc::driver::{CudaFunction, CudaStream, LaunchConfig, PushKernelArg};
use std::sync::Arc;

/// Side of a tile, as in `product.cu`.
const TILE: u32 = 64;

/// Two square matrices and their product.
#[derive(Debug)]
pub struct Product {
    function: CudaFunction,
    matrices: [CudaMemory; 3],
    side: u32,
}

impl Cuda {
    /// Allocate two matrices of `side` rows, a multiple of 64, with unspecified contents.
    ///
    /// # Errors
    /// [`GpuError::Invalid`] for another side; [`GpuError::OutOfMemory`]; [`GpuError::Unavailable`] without its code.
    pub fn product(&self, side: u32) -> Result<Product, GpuError> {
        if side == 0 || !side.is_multiple_of(TILE) {
            return Err(GpuError::Invalid(format!("{side} rows are not a multiple of {TILE}")));
        }
        let code = self.code(CompiledKernel::PRODUCT_FILE_NAME.into(), compile::compile_product)?;
        let function = function(&module(&self.context, code, || "the matrix product".into())?, "sumac_product")?;
        let len_bytes = side as usize * side as usize * size_of::<f32>();
        let matrices = [self.alloc(len_bytes)?, self.alloc(len_bytes)?, self.alloc(len_bytes)?];
        Ok(Product { function, matrices, side })
    }
}

impl Product {
    /// Enqueue one product. The caller must keep it alive until it is complete.
    ///
    /// # Errors
    /// The driver's error.
    pub fn run(&self, on: &Arc<CudaStream>) -> Result<(), GpuError> {
        let addresses = self.matrices.each_ref().map(CudaMemory::address);
        let blocks = self.side / TILE;
        let grid = LaunchConfig { grid_dim: (blocks, blocks, 1), block_dim: (256, 1, 1), shared_mem_bytes: 0 };
        let mut arguments = on.launch_builder(&self.function);
        arguments.arg(&addresses[0]).arg(&addresses[1]).arg(&addresses[2]).arg(&self.side);
        // SAFETY: the arguments are the kernel's, and each matrix has as many elements as it touches.
        unsafe { arguments.launch(grid) }.map(|_| ()).map_err(|error| driver("a launch", error))
    }
}

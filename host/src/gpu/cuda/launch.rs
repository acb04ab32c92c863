//! Launch of a fused pass: arguments, alignment, grid.
//!
//! [`Launch`] and [`Scaling`] mirror the structures of `kernels.cu` field by field; the bitwise comparison of the
//! kernels on the host uses the same bytes.

use super::compile::CompiledKernel;
use super::{address, driver, function, module};
use crate::gpu::cuda::CudaMemory;
use crate::gpu::{Fused, GpuError, Part};
use cudarc::driver::{CudaContext, CudaFunction, CudaStream, DeviceRepr, LaunchConfig, PushKernelArg};
use std::sync::Arc;
use sumac_hal::op::{Dtype, ReduceOp};
use sumac_hal::reduce::Kernel;

/// The kernels' `Landing`.
#[repr(C)]
#[derive(Debug, Clone, Copy)]
pub(super) struct Launch {
    src: u64,
    own: u64,
    dst: u64,
    count: u64,
    head: u64,
    flags: u32,
    ranks: u32,
}

impl Launch {
    /// Describe a landing: addresses of input, operand and result; number of elements, and of those before the first
    /// vector; whether the input and the operand are accumulators, and whether the result is finished.
    pub(super) const fn new(
        [src, own, dst]: [u64; 3],
        (count, head): (u64, u64),
        (is_partial, own_form, is_finished): (bool, Option<bool>, bool),
        ranks: u32,
    ) -> Self {
        let own_flags = match own_form {
            None => 0,
            Some(false) => OWN,
            Some(true) => OWN | OWN_PARTIAL,
        };
        let flags = own_flags | if is_partial { SRC_PARTIAL } else { 0 } | if is_finished { FINISH } else { 0 };
        Self { src, own, dst, count, head, flags, ranks }
    }

    /// Return the structure as words in memory order.
    #[cfg(test)]
    pub(super) fn words(&self) -> [u64; 6] {
        let last = u64::from(self.flags) | u64::from(self.ranks) << 32;
        [self.src, self.own, self.dst, self.count, self.head, last]
    }
}

// SAFETY: integers in C's order, which the kernel reads as the same structure.
unsafe impl DeviceRepr for Launch {}

/// The kernels' `Scaling`.
#[repr(C)]
#[derive(Debug, Clone, Copy)]
pub(super) struct Scaling {
    pub(super) src: u64,
    pub(super) dst: u64,
    pub(super) count: u64,
    pub(super) scalar: f64,
    pub(super) integer: u64,
}

impl Scaling {
    /// Return the structure as words in memory order.
    #[cfg(test)]
    pub(super) fn words(&self) -> [u64; 5] {
        [self.src, self.dst, self.count, self.scalar.to_bits(), self.integer]
    }
}

// SAFETY: as above.
unsafe impl DeviceRepr for Scaling {}

const SRC_PARTIAL: u32 = 1;
const OWN: u32 = 2;
const OWN_PARTIAL: u32 = 4;
const FINISH: u32 = 8;

/// Threads of a block, as declared in `kernels.cu`.
const BLOCK: u32 = 256;

/// Blocks for each multiprocessor: several times what the kernels' registers allow at once.
const BLOCKS_EACH: u32 = 8;

/// Loaded code for one type and operator.
#[derive(Debug, Clone)]
pub struct Loaded {
    kernel: Kernel,
    land: CudaFunction,
    scale: Option<CudaFunction>,
}

impl Loaded {
    pub(super) fn new(context: &Arc<CudaContext>, kernel: &Kernel, code: CompiledKernel) -> Result<Self, GpuError> {
        let module = module(context, code, || format!("{} {}", kernel.dtype(), kernel.op()))?;
        let scale = (kernel.op() == ReduceOp::PremulSum).then(|| function(&module, "sumac_scale")).transpose()?;
        Ok(Self { kernel: *kernel, land: function(&module, "sumac_land")?, scale })
    }

    pub(super) fn land(
        &self,
        on: &CudaStream,
        multiprocessors: u32,
        fused: &Fused<'_, CudaMemory>,
        stop: u64,
    ) -> Result<(), GpuError> {
        let own = fused.own.as_ref();
        let (src, dst) = (address(&fused.from), address(&fused.to));
        let each = |is_partial: bool| self.kernel.source_bytes(is_partial) as u64;
        let mut ends = vec![(src, each(fused.is_partial)), (dst, each(!fused.is_finished))];
        ends.extend(own.map(|(part, is_partial)| (address(part), each(*is_partial))));
        let count = fused.count as u64;
        let launch = Launch::new(
            [src, own.map_or(0, |(part, _)| address(part)), dst],
            (count, head(&ends, self.width(), count)),
            (fused.is_partial, own.map(|(_, is_partial)| *is_partial), fused.is_finished),
            fused.ranks,
        );
        let mut arguments = on.launch_builder(&self.land);
        arguments.arg(&launch).arg(&stop);
        // SAFETY: the arguments are the kernel's, and every part holds `count` elements of the form that the flags say.
        unsafe { arguments.launch(self.grid(count, multiprocessors)) }
            .map(|_| ())
            .map_err(|error| driver("a launch", error))
    }

    pub(super) fn scale(
        &self,
        on: &CudaStream,
        multiprocessors: u32,
        (to, from): (&Part<'_, CudaMemory>, &Part<'_, CudaMemory>),
        scalar: f64,
        stop: u64,
    ) -> Result<(), GpuError> {
        let integer = whole(&self.kernel, scalar)?;
        let function = self
            .scale
            .as_ref()
            .ok_or_else(|| GpuError::Invalid(format!("{} takes no scalar; only premul_sum does", self.kernel.op())))?;
        let count = (from.len_bytes / self.kernel.element_bytes()) as u64;
        let scaling = Scaling { src: address(from), dst: address(to), count, scalar, integer };
        let mut arguments = on.launch_builder(function);
        arguments.arg(&scaling).arg(&stop);
        // SAFETY: the arguments are the kernel's, and both parts hold `count` elements.
        unsafe { arguments.launch(self.grid(count, multiprocessors)) }
            .map(|_| ())
            .map_err(|error| driver("a launch", error))
    }

    /// Elements in 16 bytes.
    const fn width(&self) -> u64 {
        (16 / self.kernel.element_bytes()) as u64
    }

    fn grid(&self, count: u64, multiprocessors: u32) -> LaunchConfig {
        let blocks = count.div_ceil(self.width() * u64::from(BLOCK)).clamp(1, u64::from(multiprocessors * BLOCKS_EACH));
        LaunchConfig { grid_dim: (blocks as u32, 1, 1), block_dim: (BLOCK, 1, 1), shared_mem_bytes: 0 }
    }
}

/// Return the number of elements after which all of `ends`, (address, element bytes), are multiples of 16 bytes;
/// `count` if never.
pub(super) fn head(ends: &[(u64, u64)], width: u64, count: u64) -> u64 {
    let is_aligned = |after: &u64| ends.iter().all(|(start, each)| (start + after * each).is_multiple_of(16));
    (0..width).find(is_aligned).map_or(count, |head| head.min(count))
}

/// Return a scalar modulo 2^64, for integers; 0 for floats.
pub(super) fn whole(kernel: &Kernel, scalar: f64) -> Result<u64, GpuError> {
    let invalid = |error: sumac_hal::reduce::ScaleError| GpuError::Invalid(error.to_string());
    kernel.scale(&mut [], &[], scalar).map_err(invalid)?;
    if !kernel.dtype().is_integer() {
        return Ok(0);
    }
    let mut product = [0; 8];
    match Kernel::new(Dtype::U64, ReduceOp::PremulSum) {
        Some(by_one) => by_one.scale(&mut product, &1_u64.to_le_bytes(), scalar).map_err(invalid)?,
        None => return Ok(0),
    }
    Ok(u64::from_le_bytes(product))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn vectors_begin_where_all_are_aligned() {
        assert_eq!(head(&[(0, 4), (4096, 4)], 4, 100), 0);
        assert_eq!(head(&[(4, 4), (20, 4)], 4, 100), 3);
        assert_eq!(head(&[(4, 4), (24, 4)], 4, 100), 100, "never together");
        assert_eq!(head(&[(2, 2), (4, 4)], 8, 100), 7, "a bf16 and its accumulator");
        assert_eq!(head(&[(4, 4)], 4, 2), 2, "none that many");
    }

    #[test]
    fn scalars_of_integers_are_whole() {
        let kernel = |dtype| Kernel::new(dtype, ReduceOp::PremulSum).expect("supported");
        assert_eq!(whole(&kernel(Dtype::I32), -3.0), Ok(u64::MAX - 2));
        assert_eq!(whole(&kernel(Dtype::F32), 0.5), Ok(0));
        assert!(whole(&kernel(Dtype::I32), 0.5).is_err());
    }
}

//! Conversions of narrow floats, which the GPU has instructions for: every value, and every way to round one.

use super::{get, put};
use sumac::gpu::{Fused, Gpu, GpuError, Part};
use sumac::{Dtype, ReduceOp};
use sumac_hal::reduce::Kernel;

/// Compare conversions with the CPU's: of each narrow value to its accumulator, and of floats at and beside the
/// midpoints between neighbours back.
pub(super) fn conversions<G: Gpu>(gpu: &G) -> Result<(), String> {
    let text = |error: GpuError| error.to_string();
    for dtype in [Dtype::F16, Dtype::Bf16, Dtype::E4m3, Dtype::E5m2] {
        let Some(kernel) = Kernel::new(dtype, ReduceOp::Sum) else { continue };
        let size = dtype.size_bytes();
        let all: Vec<u8> = (0..1_u32 << (8 * size)).flat_map(|bits| bits.to_le_bytes()[..size].to_vec()).collect();
        let mut wanted = vec![0; all.len() / size * 4];
        kernel.load(&mut wanted, &all, false);
        let found = convert(gpu, &kernel, (&all, false), wanted.len()).map_err(text)?;
        compare(
            &format!("{dtype} to its accumulator"),
            (&all, size),
            (&without_payloads(&wanted), 4),
            &without_payloads(&found),
        )?;
        for low in [0_u32, 1, 0x7fff, 0x8000, 0x8001, 0xffff] {
            let floats: Vec<u8> = (0..1_u32 << 16).flat_map(|high| (high << 16 | low).to_le_bytes()).collect();
            let mut wanted = vec![0; floats.len() / 4 * size];
            kernel.store(&mut wanted, &floats, 1);
            let found = convert(gpu, &kernel, (&floats, true), wanted.len()).map_err(text)?;
            compare(&format!("an accumulator to {dtype}"), (&floats, 4), (&wanted, size), &found)?;
        }
    }
    println!("every narrow float converts as on the CPU");
    Ok(())
}

/// Convert elements to accumulators, or the other way round if they are partial.
fn convert<G: Gpu>(
    gpu: &G,
    kernel: &Kernel,
    (bytes, is_partial): (&[u8], bool),
    len_bytes: usize,
) -> Result<Vec<u8>, GpuError> {
    let stream = gpu.stream()?;
    let code = gpu.load(kernel)?;
    let (from, to) = (put(gpu, &stream, bytes)?, gpu.alloc(len_bytes)?);
    let count = bytes.len() / if is_partial { 4 } else { kernel.element_bytes() };
    let (from, part) = (Part { memory: &from, at: 0, len_bytes: bytes.len() }, Part { memory: &to, at: 0, len_bytes });
    gpu.land(
        &stream,
        &code,
        &Fused { from, is_partial, own: None, to: part, is_finished: is_partial, count, ranks: 1 },
    )?;
    get(gpu, &stream, &to, len_bytes)
}

/// Replace NaNs, whose bits are unspecified in accumulators.
fn without_payloads(floats: &[u8]) -> Vec<u8> {
    let each = |float: &[u8; 4]| if f32::from_le_bytes(*float).is_nan() { [0xff; 4] } else { *float };
    floats.as_chunks().0.iter().flat_map(each).collect()
}

fn compare(
    what: &str,
    (inputs, input_size): (&[u8], usize),
    (wanted, size): (&[u8], usize),
    found: &[u8],
) -> Result<(), String> {
    let differs = |at: &usize| wanted[at * size..(at + 1) * size] != found[at * size..(at + 1) * size];
    let mut differing = (0..wanted.len() / size).filter(differs);
    let Some(first) = differing.next() else { return Ok(()) };
    let bytes = |bytes: &[u8], size: usize| format!("{:02x?}", &bytes[first * size..(first + 1) * size]);
    let (input, found, wanted) = (bytes(inputs, input_size), bytes(found, size), bytes(wanted, size));
    let more = differing.count();
    Err(format!("{what}: {input} becomes {found}, on the CPU {wanted}; {more} more differ"))
}

//! Special floats: zeros, subnormals, infinities and NaNs, and what the copy engine makes of them.

use super::engines::on_the_cpu;
use sumac::Dtype;
use sumac_hal::reduce::Kernel;

/// Bits of a type's exponent and fraction; none for integers.
const fn layout(dtype: Dtype) -> Option<(u32, u32)> {
    Some(match dtype {
        Dtype::F64 => (11, 52),
        Dtype::F32 => (8, 23),
        Dtype::F16 => (5, 10),
        Dtype::Bf16 => (8, 7),
        Dtype::E4m3 => (4, 3),
        Dtype::E5m2 => (5, 2),
        _ => return None,
    })
}

/// Return special values of a type, and one, as little-endian bytes; empty for integers.
pub(super) fn specials(dtype: Dtype) -> Vec<Vec<u8>> {
    let Some((exponent, fraction)) = layout(dtype) else { return Vec::new() };
    let sign = 1_u64 << (exponent + fraction);
    let infinity = ((1_u64 << exponent) - 1) << fraction;
    let (normal, quiet) = (1_u64 << fraction, infinity | 1 << (fraction - 1));
    let one = ((1_u64 << (exponent - 1)) - 1) << fraction;
    let magnitudes =
        [0, 1, normal - 1, normal, normal + 1, one, infinity - 1, infinity, quiet, quiet | 1, infinity | 1];
    let both = magnitudes.into_iter().flat_map(|magnitude| [magnitude, magnitude | sign]);
    both.map(|bits| bits.to_le_bytes()[..dtype.size_bytes()].to_vec()).collect()
}

/// Return two operands that hold each pair of special values, padded to a multiple of 16 bytes.
pub(super) fn special_sums(dtype: Dtype) -> (Vec<u8>, Vec<u8>) {
    let all = specials(dtype);
    let (mut a, mut b) = (Vec::new(), Vec::new());
    for left in &all {
        for right in &all {
            a.extend(left);
            b.extend(right);
        }
    }
    a.resize(a.len().next_multiple_of(16), 0);
    b.resize(a.len(), 0);
    (a, b)
}

/// Print where results differ from the CPU's, by the kind of the difference. These are properties of the hardware,
/// which the engine documents: no failures.
pub(super) fn tell(kernel: &Kernel, operands: &(Vec<u8>, Vec<u8>), found: &[u8]) {
    let (dtype, size) = (kernel.dtype(), kernel.element_bytes());
    let Some((exponent, fraction)) = layout(dtype) else { return };
    let infinity = ((1_u64 << exponent) - 1) << fraction;
    let magnitude = |bits: u64| bits & ((1 << (exponent + fraction)) - 1);
    let is_subnormal = |bits: u64| magnitude(bits) != 0 && magnitude(bits) < 1 << fraction;
    let kind = |a: u64, b: u64, wanted: u64| match () {
        () if magnitude(wanted) > infinity => "NaN results",
        () if is_subnormal(a) || is_subnormal(b) || is_subnormal(wanted) => "subnormals",
        () => "other values",
    };
    let bits = |bytes: &[u8], at: usize| {
        let mut wide = [0; 8];
        wide[..size].copy_from_slice(&bytes[at * size..(at + 1) * size]);
        u64::from_le_bytes(wide)
    };
    let wanted = on_the_cpu(kernel, operands);
    for each in ["NaN results", "subnormals", "other values"] {
        let (mut count, mut differing) = (0, Vec::new());
        for at in 0..found.len() / size {
            let (a, b, wanted, found) =
                (bits(&operands.0, at), bits(&operands.1, at), bits(&wanted, at), bits(found, at));
            if kind(a, b, wanted) == each {
                count += 1;
                if wanted != found {
                    differing.push(format!("{a:#x} + {b:#x} = {found:#x}, on the CPU {wanted:#x}"));
                }
            }
        }
        let examples = differing.iter().step_by((differing.len() / 3).max(1)).take(3).cloned().collect::<Vec<_>>();
        println!(
            "the copy engine's {dtype} sums of special values, {each}: {} of {count} differ; {}",
            differing.len(),
            examples.join("; ")
        );
    }
}

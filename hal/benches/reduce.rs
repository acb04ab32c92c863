//! How fast the reduction kernels and the CRC are, on data that stays in the L2 cache.
//!
//! Prints a table of source bytes per second for each element type and operator, and the ratios that the project
//! asks for, each taken within this run: the f32 sum against the same loop written by hand with the widest vectors
//! of this machine (at least 80 %), and the bf16 sum against the f32 sum (at least 40 % of its bytes a second).
//!
//! A sample is one pass over the buffers, repeated for about [`SAMPLE_US`]; what is compared is measured in turns, so
//! that a busy machine slows all sides down, and the table shows the best sample of each.

use std::hint::black_box;
use std::time::{Duration, Instant};
use sumac_hal::op::{Dtype, ReduceOp};
use sumac_hal::reduce::Kernel;
use sumac_hal::wire::crc32c;

/// Rounds of turns; each contender gets one sample a round.
const ROUNDS: usize = 40;

/// The length of one sample in microseconds.
const SAMPLE_US: u64 = 1000;

/// Bytes of accumulators. With as many of source, neither fits a usual L1, and both fit the L2 of every server core.
const ACC_LENS_BYTES: [usize; 2] = [32 << 10, 128 << 10];

fn main() {
    // `cargo bench` passes this; `cargo test --benches` does not, and has nothing to check here.
    if !std::env::args().any(|arg| arg == "--bench") {
        println!("nothing measured: run by `cargo bench`, or with --bench");
        return;
    }
    println!("widest loop by hand: {}", widest::name());
    for acc_len_bytes in ACC_LENS_BYTES {
        kernels(acc_len_bytes);
    }
    crc();
}

/// One thing to measure: its name, the bytes of source that a pass reads, and the pass.
struct Contender<'a> {
    name: String,
    bytes: usize,
    pass: Box<dyn FnMut() + 'a>,
}

/// Measure contenders in turns; return the best gigabytes per second of each.
fn measure(contenders: &mut [Contender<'_>]) -> Vec<f64> {
    let sample = Duration::from_micros(SAMPLE_US);
    let passes: Vec<u32> = contenders
        .iter_mut()
        .map(|contender| {
            let start = Instant::now();
            let mut passes = 0;
            while start.elapsed() < sample {
                (contender.pass)();
                passes += 1;
            }
            passes
        })
        .collect();
    let mut best = vec![0.0_f64; contenders.len()];
    for _ in 0..ROUNDS {
        for ((contender, &passes), best) in contenders.iter_mut().zip(&passes).zip(&mut best) {
            let start = Instant::now();
            for _ in 0..passes {
                (contender.pass)();
            }
            let bytes = contender.bytes as f64 * f64::from(passes);
            *best = best.max(bytes / start.elapsed().as_nanos() as f64);
        }
    }
    best
}

/// A buffer whose first byte is aligned as the widest vectors are, or just off it.
struct Buffer {
    bytes: Vec<u8>,
    start: usize,
    len: usize,
}

impl Buffer {
    /// Make a buffer of zeros, the one value that stays what it is under every operator.
    fn new(len: usize, misalignment: usize) -> Self {
        let bytes = vec![0; len + 128];
        let start = bytes.as_ptr().align_offset(64) + misalignment;
        Self { bytes, start, len }
    }

    fn as_mut(&mut self) -> &mut [u8] {
        &mut self.bytes[self.start..][..self.len]
    }
}

fn kernel_contender<'a>(dtype: Dtype, op: ReduceOp, acc_len_bytes: usize, misalignment: usize) -> Contender<'a> {
    let kernel = Kernel::new(dtype, op).expect("every pair is supported");
    let count = acc_len_bytes / kernel.accumulator().size_bytes();
    let mut acc = Buffer::new(acc_len_bytes, misalignment);
    let mut src = Buffer::new(count * dtype.size_bytes(), misalignment);
    let bytes = src.len;
    let name = match misalignment {
        0 => format!("{dtype} {op}"),
        _ => format!("{dtype} {op}, {misalignment} B off"),
    };
    let pass = move || kernel.combine(black_box(acc.as_mut()), black_box(src.as_mut()), false);
    Contender { name, bytes, pass: Box::new(pass) }
}

fn kernels(acc_len_bytes: usize) {
    let mut acc = Buffer::new(acc_len_bytes, 0);
    let mut src = Buffer::new(acc_len_bytes, 0);
    let by_hand = move || widest::sum_f32(black_box(acc.as_mut()), black_box(src.as_mut()));
    let mut contenders = vec![
        Contender { name: "f32 sum by hand".into(), bytes: acc_len_bytes, pass: Box::new(by_hand) },
        kernel_contender(Dtype::F32, ReduceOp::Sum, acc_len_bytes, 0),
        kernel_contender(Dtype::Bf16, ReduceOp::Sum, acc_len_bytes, 0),
        kernel_contender(Dtype::F32, ReduceOp::Sum, acc_len_bytes, 4),
    ];
    for &dtype in Dtype::ALL {
        for &op in ReduceOp::ALL {
            if !matches!((dtype, op), (Dtype::F32 | Dtype::Bf16, ReduceOp::Sum)) {
                contenders.push(kernel_contender(dtype, op, acc_len_bytes, 0));
            }
        }
    }
    for dtype in [Dtype::F16, Dtype::Bf16, Dtype::F32] {
        contenders.push(store_contender(dtype, acc_len_bytes));
    }
    let speeds = measure(&mut contenders);

    println!("\n{} KiB of accumulators", acc_len_bytes >> 10);
    println!("{:<24} {:>10} {:>12}", "kernel", "GB/s", "Gelements/s");
    for (contender, speed) in contenders.iter().zip(&speeds) {
        let size = contender.name.split(' ').next().and_then(Dtype::from_name).map_or(4, Dtype::size_bytes);
        println!("{:<24} {speed:>10.1} {:>12.2}", contender.name, speed / size as f64);
    }
    ratio("f32 sum / by hand", speeds[1] / speeds[0], 0.8);
    ratio("bf16 sum / f32 sum, bytes of source", speeds[2] / speeds[1], 0.4);
}

/// Rounding accumulators to `dtype`; the bytes counted are those of `dtype`, as for sources.
fn store_contender<'a>(dtype: Dtype, acc_len_bytes: usize) -> Contender<'a> {
    let kernel = Kernel::new(dtype, ReduceOp::Sum).expect("every pair is supported");
    let count = acc_len_bytes / kernel.accumulator().size_bytes();
    let mut acc = Buffer::new(acc_len_bytes, 0);
    let mut dst = Buffer::new(count * dtype.size_bytes(), 0);
    let bytes = dst.len;
    let pass = move || kernel.store(black_box(dst.as_mut()), black_box(acc.as_mut()), 3);
    Contender { name: format!("{dtype} store"), bytes, pass: Box::new(pass) }
}

fn ratio(what: &str, ratio: f64, least: f64) {
    let verdict = if ratio >= least { "ok" } else { "TOO SLOW" };
    println!("{what}: {:.0} % (at least {:.0} %) {verdict}", ratio * 100.0, least * 100.0);
}

fn crc() {
    let mut contenders: Vec<Contender<'_>> = [64, 1 << 10, 16 << 10, 64 << 10]
        .into_iter()
        .map(|len| {
            let mut bytes = Buffer::new(len, 0);
            let pass = move || {
                black_box(crc32c(black_box(bytes.as_mut())));
            };
            Contender { name: format!("crc32c, {len} B"), bytes: len, pass: Box::new(pass) }
        })
        .collect();
    println!("\n{:<24} {:>10}", "checksum", "GB/s");
    for (speed, contender) in measure(&mut contenders).iter().zip(&contenders) {
        println!("{:<24} {speed:>10.1}", contender.name);
    }
}

/// The f32 sum by hand, with the widest vectors that the machine has, four to a turn of the loop.
#[cfg(target_arch = "x86_64")]
mod widest {
    use std::arch::x86_64::*;

    /// Return the name of what runs.
    pub(super) fn name() -> &'static str {
        match (is_x86_feature_detected!("avx512f"), is_x86_feature_detected!("avx2")) {
            (true, _) => "AVX-512",
            (_, true) => "AVX2",
            _ => "SSE2",
        }
    }

    macro_rules! by_hand {
        ($name:ident $feature:literal $load:ident $add:ident $store:ident $bytes:literal) => {
            #[target_feature(enable = $feature)]
            fn $name(acc: &mut [u8], src: &[u8]) {
                let acc = acc.as_chunks_mut::<{ 4 * $bytes }>().0;
                for (a, s) in acc.iter_mut().zip(src.as_chunks::<{ 4 * $bytes }>().0) {
                    let (a, s) = (a.as_mut_ptr().cast::<f32>(), s.as_ptr().cast::<f32>());
                    // SAFETY: `a` and `s` point to four vectors each, and these accesses need no alignment.
                    unsafe {
                        for at in [0, $bytes / 4, $bytes / 2, 3 * $bytes / 4] {
                            $store(a.add(at), $add($load(a.add(at)), $load(s.add(at))));
                        }
                    }
                }
            }
        };
    }

    by_hand!(avx512 "avx512f" _mm512_loadu_ps _mm512_add_ps _mm512_storeu_ps 64);
    by_hand!(avx2 "avx2" _mm256_loadu_ps _mm256_add_ps _mm256_storeu_ps 32);
    by_hand!(sse2 "sse2" _mm_loadu_ps _mm_add_ps _mm_storeu_ps 16);

    /// Add `src` to `acc`; their lengths are multiples of 256 bytes.
    pub(super) fn sum_f32(acc: &mut [u8], src: &[u8]) {
        if is_x86_feature_detected!("avx512f") {
            // SAFETY: the processor has the feature that the function was compiled for.
            unsafe { avx512(acc, src) }
        } else if is_x86_feature_detected!("avx2") {
            // SAFETY: as above.
            unsafe { avx2(acc, src) }
        } else {
            // SAFETY: SSE2 is part of the architecture.
            unsafe { sse2(acc, src) }
        }
    }
}

/// The f32 sum by hand, with NEON, four vectors to a turn of the loop.
#[cfg(target_arch = "aarch64")]
mod widest {
    use std::arch::aarch64::*;

    /// Return the name of what runs.
    pub(super) fn name() -> &'static str {
        "NEON"
    }

    /// Add `src` to `acc`; their lengths are multiples of 64 bytes.
    pub(super) fn sum_f32(acc: &mut [u8], src: &[u8]) {
        for (a, s) in acc.as_chunks_mut::<64>().0.iter_mut().zip(src.as_chunks::<64>().0) {
            let (a, s) = (a.as_mut_ptr().cast::<f32>(), s.as_ptr().cast::<f32>());
            // SAFETY: `a` and `s` point to four vectors each, NEON is part of the architecture, and these accesses
            // need no alignment beyond a byte's, which normal memory grants.
            unsafe {
                for at in [0, 4, 8, 12] {
                    vst1q_f32(a.add(at), vaddq_f32(vld1q_f32(a.add(at)), vld1q_f32(s.add(at))));
                }
            }
        }
    }
}

/// No vectors known: the plain loop.
#[cfg(not(any(target_arch = "x86_64", target_arch = "aarch64")))]
mod widest {
    /// Return the name of what runs.
    pub(super) fn name() -> &'static str {
        "none for this architecture, a plain loop instead"
    }

    /// Add `src` to `acc`.
    pub(super) fn sum_f32(acc: &mut [u8], src: &[u8]) {
        for (a, s) in acc.as_chunks_mut::<4>().0.iter_mut().zip(src.as_chunks::<4>().0) {
            *a = (f32::from_le_bytes(*a) + f32::from_le_bytes(*s)).to_le_bytes();
        }
    }
}

//! The speed of the reduction kernels and of the CRC, on data in the L2 cache and in memory.
//!
//! For each element type and operator, the benchmark prints the bytes per second relative to the f32 sum. The speed of
//! the f32 sum is printed beside that of a copy of the same bytes, which is what cache or memory allow. Bytes are those
//! of the contribution that a pass reads, or of the accumulators if it rounds them. The required ratios are measured
//! within one run: the f32 sum relative to the same loop written by hand with the machine's widest vectors (at least 80
//! %), the bf16 sum relative to the f32 sum (at least 40 %), and every other kernel relative to it (at least 25 %),
//! with the exceptions of [`exception`].
//!
//! A sample repeats one pass over the buffers for about [`SAMPLE_US`]. Contenders are measured alternately, so that a
//! busy machine slows all of them, and the table shows the best sample of each.

use std::hint::black_box;
use std::time::{Duration, Instant};
use sumac_hal::op::{Dtype, ReduceOp};
use sumac_hal::reduce::Kernel;
use sumac_hal::wire::crc32c;

/// The length of one sample in microseconds.
const SAMPLE_US: u64 = 1000;

/// The minimum speed of a kernel relative to the f32 sum, unless it is an exception.
const SHARE_MIN: f64 = 0.25;

/// Where the buffers are, the length of the accumulators in bytes, and the number of samples per contender. Including
/// sources of the same length, the first two exceed a usual L1 cache and fit the L2 cache of every server core. The
/// last exceeds the share of any L3 cache that one core can fill.
const PLACES: [(&str, usize, usize); 3] =
    [("L2 cache", 32 << 10, 40), ("L2 cache", 128 << 10, 40), ("memory", 64 << 20, 5)];

/// The operators that have their own loop.
const OPERATORS: [(&str, ReduceOp); 11] = [
    ("sum", ReduceOp::Sum),
    ("prod", ReduceOp::Prod),
    ("min", ReduceOp::Min),
    ("max", ReduceOp::Max),
    ("band", ReduceOp::Band),
    ("bor", ReduceOp::Bor),
    ("bxor", ReduceOp::Bxor),
    ("land", ReduceOp::Land),
    ("lxor", ReduceOp::Lxor),
    ("minloc", ReduceOp::MinLoc),
    ("maxloc", ReduceOp::MaxLoc),
];

/// Steps that are applied once to a result or a contribution.
const STEPS: [(&str, ReduceOp); 4] =
    [("round", ReduceOp::Sum), ("avg", ReduceOp::Avg), ("bool", ReduceOp::Lor), ("scale", ReduceOp::PremulSum)];

fn main() {
    // `cargo bench` passes `--bench`. `cargo test --benches` does not; there is nothing to test.
    if !std::env::args().any(|arg| arg == "--bench") {
        println!("nothing measured: use `cargo bench`, or pass --bench");
        return;
    }
    println!("widest loop by hand: {}", widest::name());
    for (place, acc_len_bytes, rounds) in PLACES {
        kernels(place, acc_len_bytes, rounds);
    }
    crc();
}

/// A pass over accumulators and a source.
type Pass = dyn Fn(&mut [u8], &mut [u8]);

/// A contender: a pass, and the number of bytes that it reads.
struct Contender {
    bytes: usize,
    pass: Box<Pass>,
}

/// Measure contenders alternately on the same buffers, and return the best gigabytes per second of each.
fn measure(contenders: &[Contender], acc: &mut [u8], src: &mut [u8], rounds: usize) -> Vec<f64> {
    let sample = Duration::from_micros(SAMPLE_US);
    let passes: Vec<u32> = contenders
        .iter()
        .map(|contender| {
            let start = Instant::now();
            let mut passes = 0;
            while start.elapsed() < sample {
                (contender.pass)(acc, src);
                passes += 1;
            }
            passes
        })
        .collect();
    let mut best = vec![0.0_f64; contenders.len()];
    for _ in 0..rounds {
        for ((contender, &passes), best) in contenders.iter().zip(&passes).zip(&mut best) {
            let start = Instant::now();
            for _ in 0..passes {
                (contender.pass)(black_box(acc), black_box(src));
            }
            let bytes = contender.bytes as f64 * f64::from(passes);
            *best = best.max(bytes / start.elapsed().as_nanos() as f64);
        }
    }
    best
}

/// A buffer that is aligned for the widest vectors.
struct Buffer {
    bytes: Vec<u8>,
    start: usize,
    len: usize,
}

impl Buffer {
    /// Return a buffer of zeros, which no operator changes, with room for a misalignment.
    fn new(len: usize) -> Self {
        let bytes = vec![0; len + 128];
        let start = bytes.as_ptr().align_offset(64);
        Self { bytes, start, len }
    }

    fn as_mut(&mut self) -> &mut [u8] {
        &mut self.bytes[self.start..][..self.len + MISALIGNMENT_MAX]
    }
}

/// The maximum distance of a pass's start from an aligned address.
const MISALIGNMENT_MAX: usize = 64;

/// Return a contender that combines a contribution.
fn combine(kernel: Kernel, acc_len_bytes: usize, misalignment: usize) -> Contender {
    let bytes = acc_len_bytes / kernel.accumulator_bytes() * kernel.element_bytes();
    let pass = move |acc: &mut [u8], src: &mut [u8]| {
        kernel.combine(&mut acc[misalignment..][..acc_len_bytes], &src[misalignment..][..bytes], false);
    };
    Contender { bytes, pass: Box::new(pass) }
}

/// Return a contender that converts accumulators to results, or scales a contribution to a premultiplied sum.
fn step(kernel: Kernel, acc_len_bytes: usize) -> Contender {
    let bytes = acc_len_bytes / kernel.accumulator_bytes() * kernel.element_bytes();
    let pass = move |acc: &mut [u8], src: &mut [u8]| {
        if kernel.op() == ReduceOp::PremulSum {
            kernel.scale(&mut acc[..bytes], &src[..bytes], 3.0).expect("a scalar of every type");
        } else {
            kernel.store(&mut src[..bytes], &acc[..acc_len_bytes], 3);
        }
    };
    let read = if kernel.op() == ReduceOp::PremulSum { bytes } else { acc_len_bytes };
    Contender { bytes: read, pass: Box::new(pass) }
}

/// Return a row of the table: a type's contender for each column, or `None`.
fn row(dtype: Dtype, acc_len_bytes: usize) -> Vec<Option<Contender>> {
    let combined = OPERATORS.iter().map(|&(_, op)| Kernel::new(dtype, op).map(|k| combine(k, acc_len_bytes, 0)));
    let stepped = STEPS.iter().map(|&(_, op)| Kernel::new(dtype, op).map(|k| step(k, acc_len_bytes)));
    combined.chain(stepped).collect()
}

/// Return why a kernel may be slower than [`SHARE_MIN`], if it may.
fn exception(dtype: Dtype, op: ReduceOp) -> Option<&'static str> {
    match (dtype, op) {
        (Dtype::E4m3 | Dtype::E5m2, _) => Some("fp8: four bytes of accumulator for one of source, and a conversion"),
        (Dtype::I64 | Dtype::U64, ReduceOp::Prod) => Some("no vector unit but AVX-512's multiplies 64-bit integers"),
        (_, ReduceOp::MinLoc | ReduceOp::MaxLoc) => Some("pairs: two comparisons and a selection of both halves"),
        _ => None,
    }
}

fn kernels(place: &str, acc_len_bytes: usize, rounds: usize) {
    let (mut acc, mut src) = (Buffer::new(acc_len_bytes), Buffer::new(acc_len_bytes));
    let f32_sum = Kernel::new(Dtype::F32, ReduceOp::Sum).expect("every type has sums");
    let whole = |pass: fn(&mut [u8], &[u8])| Contender {
        bytes: acc_len_bytes,
        pass: Box::new(move |acc, src| pass(&mut acc[..acc_len_bytes], &src[..acc_len_bytes])),
    };
    let mut contenders = vec![
        combine(f32_sum, acc_len_bytes, 0),
        whole(widest::sum_f32),
        whole(|acc, src| acc.copy_from_slice(src)),
        combine(f32_sum, acc_len_bytes, 4),
    ];
    let singles = contenders.len();
    let mut cells = Vec::new();
    for &dtype in Dtype::ALL {
        for (column, contender) in row(dtype, acc_len_bytes).into_iter().enumerate() {
            if let Some(contender) = contender {
                contenders.push(contender);
                cells.push((dtype, column));
            }
        }
    }
    let speeds = measure(&contenders, acc.as_mut(), src.as_mut(), rounds);

    println!("\n{} KiB of accumulators, {place}", acc_len_bytes >> 10);
    for (name, speed) in ["f32 sum", "f32 sum by hand", "copy", "f32 sum, 4 B off"].iter().zip(&speeds) {
        println!("{name:<18} {speed:>8.1} GB/s {:>5.0} % of the copy", speed / speeds[2] * 100.0);
    }
    ratio("f32 sum / by hand", speeds[0] / speeds[1], 0.8);
    let shares: Vec<_> = cells.into_iter().zip(speeds[singles..].iter().map(|speed| speed / speeds[0])).collect();
    table(&shares);
    report_slow(&shares);
}

/// Print speeds relative to the f32 sum, in percent. `shares` are by type and column.
fn table(shares: &[((Dtype, usize), f64)]) {
    print!("{:<7}", "%");
    OPERATORS.iter().chain(&STEPS).for_each(|(name, _)| print!("{name:>7}"));
    println!("   (avg, premul_sum: as sum; lor: as bor)");
    for &dtype in Dtype::ALL {
        print!("{:<7}", dtype.name());
        for column in 0..OPERATORS.len() + STEPS.len() {
            let cell = shares.iter().find(|(cell, _)| *cell == (dtype, column));
            print!("{:>7}", cell.map_or("-".into(), |(_, share)| format!("{:.0}", share * 100.0)));
        }
        println!();
    }
}

/// Print the kernels that are too slow. Steps run once per operation and are not checked.
fn report_slow(shares: &[((Dtype, usize), f64)]) {
    let mut slow = 0;
    for &((dtype, column), share) in shares {
        let Some(&(name, op)) = OPERATORS.get(column).filter(|_| share < SHARE_MIN) else { continue };
        let why = exception(dtype, op);
        slow += usize::from(why.is_none());
        println!("{dtype} {name}: {:.0} %: {}", share * 100.0, why.unwrap_or("TOO SLOW"));
    }
    println!("{slow} kernels that are no exception are below {:.0} % of the f32 sum", SHARE_MIN * 100.0);
    let bf16_sum = shares.iter().find(|(cell, _)| *cell == (Dtype::Bf16, 0)).map_or(0.0, |(_, share)| *share);
    ratio("bf16 sum / f32 sum, bytes of source", bf16_sum, 0.4);
}

fn ratio(what: &str, ratio: f64, least: f64) {
    let verdict = if ratio >= least { "ok" } else { "TOO SLOW" };
    println!("{what}: {:.0} % (at least {:.0} %) {verdict}", ratio * 100.0, least * 100.0);
}

fn crc() {
    const LENS_BYTES: [usize; 4] = [64, 1 << 10, 16 << 10, 64 << 10];
    let contenders = LENS_BYTES.map(|bytes| {
        let pass = move |acc: &mut [u8], _: &mut [u8]| {
            black_box(crc32c(&acc[..bytes]));
        };
        Contender { bytes, pass: Box::new(pass) }
    });
    let mut bytes = Buffer::new(LENS_BYTES[3]);
    println!("\n{:<24} {:>10}", "checksum", "GB/s");
    for (speed, len) in measure(&contenders, bytes.as_mut(), &mut [], 40).iter().zip(LENS_BYTES) {
        println!("{:<24} {speed:>10.1}", format!("crc32c, {len} B"));
    }
}

/// The f32 sum written by hand with the machine's widest vectors, four per iteration.
#[cfg(target_arch = "x86_64")]
mod widest {
    use std::arch::x86_64::*;

    /// Return the name of the instruction set.
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
            // SAFETY: see above.
            unsafe { avx2(acc, src) }
        } else {
            // SAFETY: SSE2 is part of the architecture.
            unsafe { sse2(acc, src) }
        }
    }
}

/// The f32 sum written by hand with NEON, four vectors per iteration.
#[cfg(target_arch = "aarch64")]
mod widest {
    use std::arch::aarch64::*;

    /// Return the name of the instruction set.
    pub(super) fn name() -> &'static str {
        "NEON"
    }

    /// Add `src` to `acc`; their lengths are multiples of 64 bytes.
    pub(super) fn sum_f32(acc: &mut [u8], src: &[u8]) {
        for (a, s) in acc.as_chunks_mut::<64>().0.iter_mut().zip(src.as_chunks::<64>().0) {
            let (a, s) = (a.as_mut_ptr().cast::<f32>(), s.as_ptr().cast::<f32>());
            // SAFETY: `a` and `s` point to four vectors each, NEON is part of the architecture, and these accesses
            // need no alignment in normal memory.
            unsafe {
                for at in [0, 4, 8, 12] {
                    vst1q_f32(a.add(at), vaddq_f32(vld1q_f32(a.add(at)), vld1q_f32(s.add(at))));
                }
            }
        }
    }
}

/// Other architectures: a plain loop.
#[cfg(not(any(target_arch = "x86_64", target_arch = "aarch64")))]
mod widest {
    /// Return the name of the instruction set.
    pub(super) fn name() -> &'static str {
        "a plain loop (no hand-written one for this architecture)"
    }

    /// Add `src` to `acc`.
    pub(super) fn sum_f32(acc: &mut [u8], src: &[u8]) {
        for (a, s) in acc.as_chunks_mut::<4>().0.iter_mut().zip(src.as_chunks::<4>().0) {
            *a = (f32::from_le_bytes(*a) + f32::from_le_bytes(*s)).to_le_bytes();
        }
    }
}

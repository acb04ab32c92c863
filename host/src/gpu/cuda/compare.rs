//! The kernels' arithmetic, compiled for the host, against the CPU kernels: every type, operator and form, bit for bit.

use super::launch::{Launch, Scaling, head, whole};
use std::io::{Read, Write};
use std::process::{Child, ChildStdin, ChildStdout, Command, Stdio};
use sumac_hal::op::{Dtype, ReduceOp};
use sumac_hal::reduce::Kernel;

/// Random numbers.
struct Draws(u64);

impl Draws {
    fn next(&mut self) -> u64 {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        self.0.wrapping_mul(0x9e37_79b9_7f4a_7c15)
    }

    fn below(&mut self, limit: u64) -> u64 {
        (self.next() >> 32) % limit
    }
}

/// The kernels as a process.
struct Kernels {
    child: Child,
    to: ChildStdin,
    from: ChildStdout,
}

impl Kernels {
    fn start() -> Self {
        let path =
            std::env::var_os("SUMAC_HOST_KERNELS").expect("SUMAC_HOST_KERNELS names tests/gpu/kernels.cpp, compiled");
        let spawned = Command::new(path).stdin(Stdio::piped()).stdout(Stdio::piped()).spawn();
        let mut child = spawned.expect("the compiled kernels run");
        let (to, from) = (child.stdin.take().expect("piped"), child.stdout.take().expect("piped"));
        Self { child, to, from }
    }

    /// Run a job, given its header, its buffers (bytes, offset, alias) and its structure; returns `dst`.
    fn run(&mut self, job: [u64; 4], buffers: [(&[u8], u64, u64); 3], structure: &[u64]) -> Vec<u8> {
        let mut words = job.to_vec();
        words.extend(buffers.iter().flat_map(|&(bytes, off, same_as)| [bytes.len() as u64, off, same_as]));
        words.extend(structure);
        let mut sent: Vec<u8> = words.iter().flat_map(|word| word.to_le_bytes()).collect();
        for (bytes, _, same_as) in buffers {
            if same_as == 3 {
                sent.extend(bytes);
            }
        }
        self.to.write_all(&sent).expect("the kernels listen");
        let mut answer = vec![0; buffers[2].0.len() + 32];
        self.from.read_exact(&mut answer).expect("the kernels answer");
        answer
    }
}

impl Drop for Kernels {
    fn drop(&mut self) {
        // Close its input before waiting for the process.
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// Random elements of a type, or pairs, including special values.
fn elements(draws: &mut Draws, dtype: Dtype, is_located: bool, count: usize) -> Vec<u8> {
    let size = dtype.size_bytes();
    let bits = size as u32 * 8;
    let fraction = match dtype {
        Dtype::F64 => 52,
        Dtype::F32 => 23,
        Dtype::F16 => 10,
        Dtype::Bf16 => 7,
        Dtype::E4m3 => 3,
        Dtype::E5m2 => 2,
        _ => bits / 2,
    };
    let sign = 1_u64 << (bits - 1);
    let infinity = (sign - 1) >> fraction << fraction;
    let special = [
        0,
        sign,
        1,
        sign | 1,
        infinity,
        sign | infinity,
        infinity - 1,
        sign - 1,
        infinity | 1,
        1 << fraction,
        u64::MAX,
    ];
    let mut bytes = Vec::new();
    for _ in 0..count {
        let value = match draws.below(3) {
            0 => special[draws.below(special.len() as u64) as usize],
            // Near 1, so that sums round.
            1 => (infinity >> 1) ^ (draws.next() & (sign | ((1 << (fraction + 1)) - 1))),
            _ => draws.next(),
        };
        bytes.extend(&value.to_le_bytes()[..size]);
        if is_located {
            bytes.extend(&draws.below(4).to_le_bytes()[..size]);
        }
    }
    bytes
}

/// Canonicalize NaNs of accumulators, whose payloads are unspecified.
fn without_payloads(dtype: Dtype, is_located: bool, bytes: &mut [u8]) {
    let each = dtype.size_bytes() * if is_located { 2 } else { 1 };
    for element in bytes.chunks_exact_mut(each) {
        let value = &mut element[..dtype.size_bytes()];
        match dtype {
            Dtype::F32 if f32::from_le_bytes(value.try_into().expect("4")).is_nan() => value.fill(0xff),
            Dtype::F64 if f64::from_le_bytes(value.try_into().expect("8")).is_nan() => value.fill(0xff),
            _ => {}
        }
    }
}

/// A form of a landing.
#[derive(Debug, Clone, Copy)]
struct Form {
    is_partial: bool,
    /// Whether accumulators.
    own: Option<bool>,
    is_finished: bool,
}

fn forms(kernel: &Kernel) -> Vec<Form> {
    let is_narrow = kernel.element_bytes() != kernel.accumulator_bytes();
    let partials: &[bool] = if is_narrow { &[false, true] } else { &[false] };
    let mut forms = Vec::new();
    for &is_partial in partials {
        for own in std::iter::once(None).chain(partials.iter().copied().map(Some)) {
            forms.extend([true, false].map(|is_finished| Form { is_partial, own, is_finished }));
        }
    }
    forms
}

fn compare(kernels: &mut Kernels, draws: &mut Draws, kernel: &Kernel, form: Form) {
    let (dtype, is_located) = (kernel.dtype(), kernel.op().is_located());
    let count = [1, 7, 64, 333][draws.below(4) as usize];
    let ranks = [1, 2, 3, 7, 1000][draws.below(5) as usize];
    let threads = [1, 5, 64][draws.below(3) as usize];
    let each = |is_partial| kernel.source_bytes(is_partial);
    let mut source = |is_partial| elements(draws, kernel.source(is_partial), is_located, count);
    let (src, own) = (source(form.is_partial), source(form.own.unwrap_or(false)));
    let dst = vec![0x5a; count * each(!form.is_finished)];
    // A common offset in whole elements, differing ones, or none.
    let (shift, apart) = (draws.below(5), draws.below(2));
    let off = |is_partial, extra: u64| (shift + extra) * each(is_partial) as u64 % 16;
    let offs = [off(form.is_partial, 0), off(form.own.unwrap_or(false), 0), off(!form.is_finished, apart)];
    // In place where the forms match: on the operand, or on the input.
    let same_as = match (draws.below(3), form.own) {
        (0, Some(own)) if each(own) == each(!form.is_finished) => 1,
        (1, _) if each(form.is_partial) == each(!form.is_finished) => 0,
        _ => 3,
    };
    let place = |index: usize| 4096 + if index == 2 && same_as < 3 { offs[same_as as usize] } else { offs[index] };
    let mut ends = vec![(place(0), each(form.is_partial) as u64), (place(2), each(!form.is_finished) as u64)];
    ends.extend(form.own.map(|own| (place(1), each(own) as u64)));
    let width = (16 / kernel.element_bytes()) as u64;
    let head = head(&ends, width, count as u64);
    let launch = Launch::new([0; 3], (count as u64, head), (form.is_partial, form.own, form.is_finished), ranks);
    let job = [0, u64::from(dtype.to_wire()), u64::from(kernel.op().to_wire()), threads];
    let answer = kernels.run(job, [(&src, offs[0], 3), (&own, offs[1], 3), (&dst, offs[2], same_as)], &launch.words());

    let mut accumulators = vec![0; count * kernel.accumulator_bytes()];
    if let Some(own_is_partial) = form.own {
        kernel.load(&mut accumulators, &own, own_is_partial);
        kernel.combine(&mut accumulators, &src, form.is_partial);
    } else {
        kernel.load(&mut accumulators, &src, form.is_partial);
    }
    let mut wanted = vec![0; dst.len()];
    let mut found = answer[16..16 + dst.len()].to_vec();
    if form.is_finished {
        kernel.store(&mut wanted, &accumulators, ranks);
    } else {
        wanted.copy_from_slice(&accumulators);
        without_payloads(kernel.accumulator(), is_located, &mut wanted);
        without_payloads(kernel.accumulator(), is_located, &mut found);
    }
    let what =
        format!("{dtype} {} {form:?}, {count} elements of {ranks} ranks, offsets {offs:?}, head {head}", kernel.op());
    if let Some(at) = (0..wanted.len()).find(|&at| wanted[at] != found[at]) {
        let each = each(!form.is_finished);
        let element = at / each;
        let of = |bytes: &[u8]| format!("{:02x?}", &bytes[element * each..(element + 1) * each]);
        panic!("{what}: element {element} is {} where the CPU has {}", of(&found), of(&wanted));
    }
    let (before, behind) = (&answer[..16], &answer[16 + dst.len()..]);
    if same_as == 3 {
        assert!(before.iter().chain(behind).all(|&byte| byte == 0xa5), "{what}: it wrote beside its elements");
    }
}

#[test]
#[ignore = "needs a C++ compiler: tests/run cuda"]
fn kernels_match_the_cpu_bit_for_bit() {
    let seed = std::env::var("SEED").ok().and_then(|seed| seed.parse().ok()).unwrap_or(0x5ac);
    let (mut kernels, mut draws, mut compared) = (Kernels::start(), Draws(seed | 1), 0);
    for &dtype in Dtype::ALL {
        for &op in ReduceOp::ALL {
            let Some(kernel) = Kernel::new(dtype, op) else { continue };
            for form in forms(&kernel) {
                for _ in 0..24 {
                    compare(&mut kernels, &mut draws, &kernel, form);
                    compared += 1;
                }
            }
        }
    }
    println!("{compared} launches have the CPU's bits");
    assert!(compared > 10_000);
}

#[test]
#[ignore = "needs a C++ compiler: tests/run cuda"]
fn narrow_floats_convert_as_on_the_cpu() {
    let mut kernels = Kernels::start();
    for dtype in [Dtype::F16, Dtype::Bf16, Dtype::E4m3, Dtype::E5m2] {
        let kernel = Kernel::new(dtype, ReduceOp::Sum).expect("sums");
        let count = 1_usize << (dtype.size_bytes() * 8);
        let all: Vec<u8> =
            (0..count).flat_map(|bits| (bits as u32).to_le_bytes()[..dtype.size_bytes()].to_vec()).collect();
        let mut wanted = vec![0; count * 4];
        kernel.load(&mut wanted, &all, false);
        let launch = Launch::new([0; 3], (count as u64, 0), (false, None, false), 1);
        let job = [0, u64::from(dtype.to_wire()), 1, 7];
        let dst = vec![0; count * 4];
        let mut found =
            kernels.run(job, [(&all, 0, 3), (&[], 0, 3), (&dst, 0, 3)], &launch.words())[16..][..count * 4].to_vec();
        without_payloads(Dtype::F32, false, &mut wanted);
        without_payloads(Dtype::F32, false, &mut found);
        assert!(wanted == found, "{dtype} widens otherwise");
        // Every f32 with sixteen leading bits, at and beside the midpoints between neighbours of the narrow type.
        for low in [0_u32, 1, 0x7fff, 0x8000, 0x8001, 0xffff] {
            let floats: Vec<u8> = (0..1_u32 << 16).flat_map(|high| (high << 16 | low).to_le_bytes()).collect();
            let len = (1 << 16) * dtype.size_bytes();
            let (mut wanted, dst) = (vec![0; len], vec![0; len]);
            kernel.store(&mut wanted, &floats, 1);
            let launch = Launch::new([0; 3], (1 << 16, 0), (true, None, true), 1);
            let answer = kernels.run(job, [(&floats, 0, 3), (&[], 0, 3), (&dst, 0, 3)], &launch.words());
            assert!(wanted == answer[16..16 + len], "{dtype} rounds otherwise");
        }
    }
}

#[test]
#[ignore = "needs a C++ compiler: tests/run cuda"]
fn scaling_matches_the_cpu() {
    let (mut kernels, mut draws) = (Kernels::start(), Draws(77));
    for &dtype in Dtype::ALL {
        let kernel = Kernel::new(dtype, ReduceOp::PremulSum).expect("premultiplied sums");
        for scalar in [1.0, -3.0, 0.1, 1e30, f64::from(u32::MAX)] {
            let Ok(integer) = whole(&kernel, scalar) else { continue };
            let src = elements(&mut draws, dtype, false, 500);
            let (mut wanted, dst) = (vec![0; src.len()], vec![0; src.len()]);
            kernel.scale(&mut wanted, &src, scalar).expect("whole");
            let scaling = Scaling { src: 0, dst: 0, count: 500, scalar, integer };
            let job = [1, u64::from(dtype.to_wire()), 0, 9];
            let answer = kernels.run(job, [(&src, 0, 3), (&[], 0, 3), (&dst, 0, 3)], &scaling.words());
            assert!(answer[16..16 + src.len()] == wanted, "{dtype} times {scalar}");
        }
    }
}

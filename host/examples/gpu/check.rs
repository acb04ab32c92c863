//! Every type, operator and algorithm on the GPU, compared with float64 and with the bits of a fake GPU.
//!
//! A failure does not stop the check: time on a GPU is scarce, so one run must show all that is wrong. Operations are
//! drawn in random order, so that a time limit leaves out none of a kind. A fake can also stand in for the GPU under
//! test, so that the checks themselves are tested without one ([`dry_run`]).

use super::conversions::conversions;
use super::engines::engines;
use super::findings::Findings;
use super::{Draws, get, put, write};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::{Duration, Instant};
use sumac::gpu::cuda::Cuda;
use sumac::gpu::engine::Bulk;
use sumac::gpu::{FakeGpu, Gpu, GpuBuffers, GpuError, Group, GroupOptions, Part, Request, Staging};
use sumac::schedule::{ALGORITHMS, Algorithm, Place, Problem, Shape, tree::Tree};
use sumac::{Algo, Collective, Dtype, OpDesc, Order, Rank, ReduceOp};
use sumac_hal::reduce::Kernel;

const ALGOS: [Algo; 6] =
    [Algo::Ring, Algo::HalvingDoubling, Algo::RecursiveDoubling, Algo::Binomial, Algo::HostTree, Algo::Pairwise];

/// Long enough for a kernel that is compiled on first use.
pub(super) const TIMEOUT: Duration = Duration::from_secs(60);

/// How to open the GPU again, and how much to check.
pub(super) struct Check<'a, G> {
    pub(super) another: &'a dyn Fn() -> Result<G, GpuError>,
    ranks: &'a [u32],
    /// Maximum number of elements of an operation.
    pub(super) elements: usize,
    /// Enough bytes to keep the GPU busy for longer than submission takes.
    long_bytes: usize,
    /// When to stop comparing operations.
    until: Instant,
}

/// Check everything within the time limit; returns the number of operations that were left out.
pub(super) fn run(cuda: &Cuda, limit: Duration) -> Result<usize, String> {
    let another = || cuda.another();
    let (ranks, until) = (&[1, 2, 3, 4, 8], Instant::now() + limit);
    let mut findings = Findings::default();
    preload(cuda, &mut findings);
    check(&Check { another: &another, ranks, elements: 20_000, long_bytes: 512 << 20, until }, findings)
}

/// Load all kernels, compiled on all cores.
fn preload(cuda: &Cuda, findings: &mut Findings) {
    let all = Dtype::ALL.iter().flat_map(|&dtype| ReduceOp::ALL.iter().filter_map(move |&op| Kernel::new(dtype, op)));
    let (kernels, next, begun): (Vec<_>, _, _) = (all.collect(), AtomicUsize::new(0), Instant::now());
    let work = || {
        let mut failed = Vec::new();
        while let Some(kernel) = kernels.get(next.fetch_add(1, Ordering::Relaxed)) {
            failed.extend(cuda.load(kernel).err().map(|error| format!("{} {}: {error}", kernel.dtype(), kernel.op())));
        }
        failed
    };
    let threads = std::thread::available_parallelism().map_or(1, usize::from);
    std::thread::scope(|scope| {
        let workers: Vec<_> = (0..threads).map(|_| scope.spawn(work)).collect();
        for worker in workers {
            let failed = worker.join().unwrap_or_else(|_| vec!["a thread panicked".to_owned()]);
            failed.into_iter().for_each(|why| findings.note("loading", Err(why)));
        }
    });
    println!("loaded {} kernels in {:.1} s", kernels.len(), begun.elapsed().as_secs_f64());
}

/// Check a fake GPU against another.
pub(super) fn dry_run() -> Result<(), String> {
    let another = || Ok(FakeGpu::new(3, 1 << 28));
    let long = Instant::now() + Duration::from_secs(3600);
    let mut short = Check { another: &another, ranks: &[1, 3, 4], elements: 200, long_bytes: 1 << 20, until: long };
    match check(&short, Findings::default())? {
        0 => {}
        left_out => return Err(format!("{left_out} operations were left out of the dry run")),
    }
    // Without any time, everything is left out, and reported as such.
    (short.ranks, short.until) = (&[3], Instant::now());
    match check(&short, Findings::default())? {
        0 => Err("a check without any time should leave everything out".into()),
        _ => Ok(()),
    }
}

/// Check everything; returns the number of operations that were left out, or how many checks failed.
fn check<G: Bulk>(check: &Check<'_, G>, mut findings: Findings) -> Result<usize, String> {
    let mut draws = Draws::fresh();
    findings.note("replays", repeats(check));
    findings.note("stopping", ends(check));
    findings.note("staging", stages(check));
    findings.note("a conversion", (check.another)().map_err(to_text).and_then(|gpu| conversions(&gpu)));
    engines(check, &mut draws, &mut findings);
    let (compared, left_out) = compare_all(check, &mut draws, &mut findings)?;
    if left_out > 0 {
        println!("{left_out} operations were left out: the time limit was reached");
    }
    findings.end()?;
    println!("{compared} operations match the CPU's bits, and all-reduced floats match float64 within rounding");
    Ok(left_out)
}

/// Compare operations in random order until the time limit; returns how many, and how many were left out.
fn compare_all<G: Bulk>(
    check: &Check<'_, G>,
    draws: &mut Draws,
    findings: &mut Findings,
) -> Result<(usize, usize), String> {
    // On a stream for each rank, and on one for all.
    let serial = || GroupOptions { serial_bytes: u64::MAX, ..pieces() };
    let options = [pieces(), serial()]
        .into_iter()
        .flat_map(|options| check.ranks.iter().map(move |&ranks| (ranks, options.clone())));
    let groups = options.map(|(ranks, options)| Ok((group(check, options, ranks)?, fake(ranks)?)));
    let mut groups = groups.collect::<Result<Vec<_>, String>>()?;
    let mut compared = 0;
    for (ours, fake) in &mut groups {
        compared += others(ours, fake, draws, findings);
    }
    let mut cases = Vec::new();
    for kernel in
        Dtype::ALL.iter().flat_map(|&dtype| ReduceOp::ALL.iter().filter_map(move |&op| Kernel::new(dtype, op)))
    {
        for (algo, is_in_place) in ALGOS.into_iter().flat_map(|algo| [(algo, true), (algo, false)]) {
            cases.extend((0..groups.len()).map(|group| (kernel, algo, is_in_place, group)));
        }
    }
    draws.shuffle(&mut cases);
    for (index, (kernel, algo, is_in_place, at)) in cases.iter().enumerate() {
        if Instant::now() >= check.until || findings.are_too_many() {
            return Ok((compared, cases.len() - index));
        }
        let (ours, fake) = &mut groups[*at];
        let count = 1 + (draws.next() >> 32) as usize % check.elements;
        let data = Data::all_reduce(draws, kernel, ours.ranks(), count);
        findings.note("a result", compare(ours, fake, (*algo, *is_in_place), &data));
        compared += 1;
    }
    Ok((compared, 0))
}

/// An operation and its inputs.
struct Data {
    desc: OpDesc,
    kernel: Option<Kernel>,
    inputs: Vec<Vec<u8>>,
    /// The length of each rank's result in bytes.
    outputs: Vec<usize>,
    scalars: Vec<f64>,
}

impl Data {
    fn all_reduce(draws: &mut Draws, kernel: &Kernel, ranks: u32, count: usize) -> Self {
        let inputs: Vec<Vec<u8>> = (0..ranks).map(|_| elements(draws, kernel, count)).collect();
        let is_scaled = kernel.op() == ReduceOp::PremulSum;
        Self {
            desc: OpDesc::all_reduce(kernel.dtype(), kernel.op(), count as u64),
            kernel: Some(*kernel),
            outputs: inputs.iter().map(Vec::len).collect(),
            inputs,
            scalars: if is_scaled { (0..ranks).map(|rank| f64::from(rank) + 2.0).collect() } else { Vec::new() },
        }
    }
}

/// Compare the other collectives, by every algorithm; returns how many.
fn others<G: Gpu>(
    group: &mut Group<G>,
    fake: &mut Group<FakeGpu>,
    draws: &mut Draws,
    findings: &mut Findings,
) -> usize {
    let ranks = group.ranks();
    let Ok(tree) = Tree::flat(ranks, Order::TreeFold) else { return 0 };
    let mut compared = 0;
    // A group has no shape, and no data for a barrier.
    let has =
        |algorithm: &&Algorithm| algorithm.pattern.collective() != Collective::Barrier && !algorithm.needs_dimensions();
    for algorithm in ALGORITHMS.iter().filter(has) {
        let collective = algorithm.pattern.collective();
        for dtype in [Dtype::F32, Dtype::Bf16] {
            let Some(kernel) = Kernel::new(dtype, ReduceOp::Sum) else { continue };
            let (count, root) = (1 + (draws.next() >> 32) as usize % 500, Rank((draws.next() >> 32) as u32 % ranks));
            let root = if collective.is_rooted() { root } else { Rank(0) };
            let problem = |place| Problem { place, count, root, tree: &tree, shape: Shape::Line };
            let layouts: Vec<_> =
                Place::all(ranks).map(|place| *(algorithm.schedule)(&problem(place)).layout()).collect();
            let op = collective.reduces().then_some(ReduceOp::Sum);
            let data = Data {
                desc: OpDesc { collective, dtype: Some(dtype), op, root, count: count as u64 },
                kernel: None,
                inputs: layouts.iter().map(|layout| elements(draws, &kernel, layout.input)).collect(),
                outputs: layouts.iter().map(|layout| layout.output * dtype.size_bytes()).collect(),
                scalars: Vec::new(),
            };
            let algo = algorithm.path().name().parse().map_err(|error| format!("{algorithm:?}: {error}"));
            findings.note("a result", algo.and_then(|algo| compare(group, fake, (algo, false), &data)));
            compared += 1;
        }
    }
    compared
}

pub(super) fn to_text(error: GpuError) -> String {
    error.to_string()
}

/// Short pieces, so that every message has several, each on its rank's stream.
fn pieces() -> GroupOptions {
    GroupOptions { piece_bytes: 4096, serial_bytes: 0, replay_bytes: 0, ..GroupOptions::default() }
}

fn fake(ranks: u32) -> Result<Group<FakeGpu>, String> {
    Group::new(FakeGpu::new(1, 1 << 30), ranks, pieces()).map_err(to_text)
}

fn group<G: Bulk>(check: &Check<'_, G>, options: GroupOptions, ranks: u32) -> Result<Group<G>, String> {
    (check.another)().and_then(|gpu| Group::new(gpu, ranks, options)).map_err(to_text)
}

/// Run an operation on both, and compare the results.
fn compare<G: Gpu>(
    group: &mut Group<G>,
    fake: &mut Group<FakeGpu>,
    (algo, is_in_place): (Algo, bool),
    data: &Data,
) -> Result<(), String> {
    let what = format!("{} by {algo}, {} ranks, in place: {is_in_place}", data.desc, group.ranks());
    let ours = reduced(group, algo, is_in_place, data).map_err(|error| format!("{what}: {error}"))?;
    let theirs = reduced(fake, algo, is_in_place, data).map_err(|error| format!("{what}, on the fake GPU: {error}"))?;
    for (rank, (found, wanted)) in ours.iter().zip(&theirs).enumerate() {
        if let Some(at) = (0..found.len()).find(|&at| found[at] != wanted[at]) {
            let (found, wanted) = (found[at], wanted[at]);
            return Err(format!("{what}: byte {at} of rank {rank} is {found:#x}, the CPU has {wanted:#x}"));
        }
    }
    match data.kernel.filter(|_| data.scalars.is_empty()) {
        Some(kernel) => against_float64(&kernel, &data.inputs, &ours[0]).map_err(|error| format!("{what}: {error}")),
        None => Ok(()),
    }
}

/// Run an operation and return every rank's result.
fn reduced<G: Gpu>(group: &mut Group<G>, algo: Algo, is_in_place: bool, data: &Data) -> Result<Vec<Vec<u8>>, GpuError> {
    let stream = group.gpu().stream()?;
    let lens = data.inputs.iter().zip(&data.outputs);
    let memory = lens.map(|(input, &len)| buffers(group.gpu(), put(group.gpu(), &stream, input)?, is_in_place, len));
    let memory = memory.collect::<Result<Vec<_>, _>>()?;
    let request = Request { desc: data.desc, algo, buffers: &memory, scalars: &data.scalars };
    let work = group.start(&request, &[])?;
    group.wait(work, Instant::now() + TIMEOUT)?;
    memory.iter().zip(&data.outputs).map(|(buffers, &len)| get(group.gpu(), &stream, output(buffers), len)).collect()
}

fn buffers<G: Gpu>(
    gpu: &G,
    input: G::Memory,
    is_in_place: bool,
    len: usize,
) -> Result<GpuBuffers<G::Memory>, GpuError> {
    Ok(match is_in_place {
        true => GpuBuffers::InPlace(input),
        false => GpuBuffers::Separate { input, output: gpu.alloc(len)? },
    })
}

fn output<M>(buffers: &GpuBuffers<M>) -> &M {
    match buffers {
        GpuBuffers::InPlace(memory) | GpuBuffers::Separate { output: memory, .. } => memory,
    }
}

/// Draw elements as [`ordinary`] ones, but one float in 32 is special: infinite, subnormal, not a number.
fn elements(draws: &mut Draws, kernel: &Kernel, count: usize) -> Vec<u8> {
    let mut bytes = ordinary(draws, kernel, count);
    if kernel.dtype().is_integer() {
        return bytes;
    }
    let specials = super::specials::specials(kernel.dtype());
    for element in bytes.chunks_exact_mut(kernel.element_bytes()) {
        let draw = draws.next() >> 32;
        if draw.is_multiple_of(32) {
            let special = &specials[(draw / 32) as usize % specials.len()];
            element[..special.len()].copy_from_slice(special);
        }
    }
    bytes
}

/// Draw elements: floats from -1 to 1, integers of any bits, and few distinct indices, so that there are ties.
pub(super) fn ordinary(draws: &mut Draws, kernel: &Kernel, count: usize) -> Vec<u8> {
    let (dtype, size) = (kernel.dtype(), kernel.dtype().size_bytes());
    let rounder = Kernel::new(dtype, ReduceOp::Sum);
    let mut bytes = Vec::new();
    for _ in 0..count {
        match (dtype, rounder) {
            (Dtype::F64, _) => bytes.extend(f64::from(draws.unit()).to_le_bytes()),
            (Dtype::F32, _) => bytes.extend(draws.unit().to_le_bytes()),
            (_, Some(rounder)) if !dtype.is_integer() => {
                let mut element = [0; 2];
                rounder.store(&mut element[..size], &draws.unit().to_le_bytes(), 1);
                bytes.extend(&element[..size]);
            }
            _ => bytes.extend(&draws.next().to_le_bytes()[..size]),
        }
        if kernel.op().is_located() {
            bytes.extend(&(draws.next() >> 62).to_le_bytes()[..size]);
        }
    }
    bytes
}

/// Convert floats to float64; `None` for integers and pairs, which are compared by their bits only.
fn values(kernel: &Kernel, bytes: &[u8]) -> Option<Vec<f64>> {
    let dtype = kernel.dtype();
    if dtype.is_integer() || kernel.op().is_located() {
        return None;
    }
    if dtype == Dtype::F64 {
        return Some(bytes.as_chunks().0.iter().map(|element| f64::from_le_bytes(*element)).collect());
    }
    let mut wide = vec![0; bytes.len() / dtype.size_bytes() * 4];
    kernel.load(&mut wide, bytes, false);
    Some(wide.as_chunks().0.iter().map(|element| f64::from(f32::from_le_bytes(*element))).collect())
}

/// Compare a result with float64's, within the possible rounding errors.
fn against_float64(kernel: &Kernel, inputs: &[Vec<u8>], found: &[u8]) -> Result<(), String> {
    let all: Option<Vec<Vec<f64>>> = inputs.iter().map(|input| values(kernel, input)).collect();
    let (Some(all), Some(found)) = (all, values(kernel, found)) else { return Ok(()) };
    let ranks = all.len() as f64;
    // Half a unit in the last place of 1, for the element and for the accumulator, and the least subnormal.
    let (element, accumulator, least) = match kernel.dtype() {
        Dtype::F64 => (2_f64.powi(-53), 2_f64.powi(-53), 0.0),
        Dtype::F32 => (2_f64.powi(-24), 2_f64.powi(-24), 2_f64.powi(-149)),
        Dtype::F16 => (2_f64.powi(-11), 2_f64.powi(-24), 2_f64.powi(-24)),
        Dtype::Bf16 => (2_f64.powi(-8), 2_f64.powi(-24), 2_f64.powi(-133)),
        Dtype::E4m3 => (2_f64.powi(-4), 2_f64.powi(-24), 2_f64.powi(-9)),
        _ => (2_f64.powi(-3), 2_f64.powi(-24), 2_f64.powi(-16)),
    };
    for (index, &found) in found.iter().enumerate() {
        let each = all.iter().map(|rank| rank[index]);
        // Special values, tiny and huge ones are compared by their bits only: the tolerance is for ordinary ones.
        let is_ordinary = |value: f64| value == 0.0 || (2_f64.powi(-24)..=1.0).contains(&value.abs());
        if !each.clone().all(is_ordinary) {
            continue;
        }
        let sum: f64 = each.clone().sum();
        let size: f64 = each.clone().map(f64::abs).sum();
        let (wanted, on_the_way) = match kernel.op() {
            ReduceOp::Sum | ReduceOp::PremulSum => (sum, size),
            ReduceOp::Avg => (sum / ranks, size / ranks),
            ReduceOp::Prod => (each.clone().product(), each.clone().product::<f64>().abs()),
            ReduceOp::Min => (each.clone().fold(f64::INFINITY, f64::min), 0.0),
            _ => (each.clone().fold(f64::NEG_INFINITY, f64::max), 0.0),
        };
        let margin = wanted.abs() * element * 1.01 + on_the_way * accumulator * (ranks + 1.0) + least;
        if (found - wanted).abs() > margin {
            return Err(format!("element {index} is {found}, float64 gives {wanted}, and the tolerance is {margin}"));
        }
    }
    Ok(())
}

/// Check that a captured operation can be replayed.
fn repeats<G: Bulk>(check: &Check<'_, G>) -> Result<(), String> {
    let mut group = group(check, GroupOptions { replay_bytes: u64::MAX, ..pieces() }, 4)?;
    let stream = group.gpu().stream().map_err(to_text)?;
    let ones: Vec<u8> = (0..10_000).flat_map(|_| 1_i32.to_le_bytes()).collect();
    let upload = || put(group.gpu(), &stream, &ones).map(GpuBuffers::InPlace);
    let buffers = (0..4).map(|_| upload()).collect::<Result<Vec<_>, _>>().map_err(to_text)?;
    let desc = OpDesc::all_reduce(Dtype::I32, ReduceOp::Sum, 10_000);
    let request = Request { desc, algo: Algo::Ring, buffers: &buffers, scalars: &[] };
    let repeat = group.capture(&request).map_err(to_text)?;
    let work = group.replay(&repeat, &[]).map_err(to_text)?;
    group.wait(work, Instant::now() + TIMEOUT).map_err(to_text)?;
    // The same call again and again is replayed as well, from the second time on.
    for _ in 0..4 {
        let work = group.start(&request, &[]).map_err(to_text)?;
        group.wait(work, Instant::now() + TIMEOUT).map_err(to_text)?;
    }
    let found = get(group.gpu(), &stream, output(&buffers[3]), ones.len()).map_err(to_text)?;
    if !found.as_chunks().0.iter().all(|sum| i32::from_le_bytes(*sum) == 1024) {
        return Err("an operation of four ranks, replayed and repeated five times, does not give 4^5".into());
    }
    println!("a captured operation can be replayed, and a repeated one is");
    Ok(())
}

/// Check a deadline that passes with kernels in flight, and the group afterwards.
fn ends<G: Bulk>(check: &Check<'_, G>) -> Result<(), String> {
    let mut group = group(check, GroupOptions::default(), 8)?;
    // A fast GPU may be done by the time that the host looks: then more bytes.
    for len in [check.long_bytes, check.long_bytes * 2, check.long_bytes * 4] {
        let memory = || group.gpu().alloc(len).map(GpuBuffers::InPlace);
        let buffers = (0..8).map(|_| memory()).collect::<Result<Vec<_>, _>>().map_err(to_text)?;
        let desc = OpDesc::all_reduce(Dtype::F32, ReduceOp::Sum, len as u64 / 4);
        let request = Request { desc, algo: Algo::Ring, buffers: &buffers, scalars: &[] };
        let work = group.start(&request, &[]).map_err(to_text)?;
        let begun = Instant::now();
        match group.wait(work, begun) {
            Err(GpuError::Deadline) => {
                println!("a deadline ended an operation in {:.1} ms", begun.elapsed().as_secs_f64() * 1e3);
                return sums_again(&mut group, &request);
            }
            Ok(()) => println!("8 times {len} bytes were reduced before the deadline was checked"),
            Err(error) => return Err(format!("waiting with an expired deadline returned {error}")),
        }
    }
    Err("no operation was long enough to miss an expired deadline".into())
}

/// Check a sum of ones after an expired deadline.
fn sums_again<G: Gpu>(group: &mut Group<G>, request: &Request<'_, G::Memory>) -> Result<(), String> {
    let stream = group.gpu().stream().map_err(to_text)?;
    let len = request.desc.count as usize * 4;
    let ones = 1_f32.to_le_bytes().repeat(len / 4);
    for each in request.buffers {
        write(group.gpu(), &stream, output(each), &ones).map_err(to_text)?;
    }
    let work = group.start(request, &[]).map_err(to_text)?;
    group.wait(work, Instant::now() + TIMEOUT).map_err(to_text)?;
    let found = get(group.gpu(), &stream, output(&request.buffers[5]), len).map_err(to_text)?;
    if !found.as_chunks().0.iter().all(|sum| f32::from_le_bytes(*sum) == 8.0) {
        return Err("the first sum after an expired deadline is wrong".into());
    }
    println!("the group works after an expired deadline");
    Ok(())
}

/// Check a buffer that goes through pinned chunks.
fn stages<G: Bulk>(check: &Check<'_, G>) -> Result<(), String> {
    let gpu = (check.another)().map_err(to_text)?;
    staged(&gpu, check.long_bytes / 50 + 1)
        .map_err(to_text)?
        .then_some(())
        .ok_or_else(|| "a buffer was changed on its way through pinned chunks".to_owned())?;
    println!("a buffer passes through pinned chunks intact");
    Ok(())
}

fn staged<G: Gpu>(gpu: &G, len_bytes: usize) -> Result<bool, GpuError> {
    let bytes: Vec<u8> = (0..len_bytes).map(|index| (index * 7) as u8).collect();
    let (producer, produced) = (gpu.stream()?, gpu.event()?);
    let (memory, source) = (gpu.alloc(len_bytes)?, put(gpu, &producer, &bytes)?);
    let part = |memory| Part { memory, at: 0, len_bytes };
    gpu.copy(&producer, part(&memory), part(&source))?;
    gpu.record(&produced, &producer)?;
    let mut staging = Staging::new(gpu, 1 << 20)?;
    staging.run(gpu, &memory, &produced, Instant::now() + TIMEOUT, |chunk| {
        chunk.iter_mut().for_each(|byte| *byte = byte.wrapping_add(1));
        Ok::<_, GpuError>(())
    })?;
    let found = get(gpu, &producer, &memory, len_bytes)?;
    Ok(found.iter().zip(&bytes).all(|(found, byte)| *found == byte.wrapping_add(1)))
}

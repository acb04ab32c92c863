//! Every type, operator and algorithm on the GPU: against float64, and against the bits of the double.

use super::Draws;
use std::time::{Duration, Instant};
use sumac::exec::cuda::{Cuda, CudaMemory};
use sumac::exec::gpu::engine::{Bulk, Family, GpuEngine};
use sumac::exec::gpu::{Double, DoubleMemory, Gpu, GpuBuffers, GpuError, Group, GroupOptions, Part, Request, Staging};
use sumac::{Algo, Dtype, OpDesc, ReduceOp};
use sumac_hal::dma::{Address, Chain, Completion, Engine, Scope, Status, Step, Tag};
use sumac_hal::reduce::Kernel;

const ALGOS: [Algo; 6] =
    [Algo::Ring, Algo::HalvingDoubling, Algo::RecursiveDoubling, Algo::Binomial, Algo::HostTree, Algo::Pairwise];

/// Long enough for a kernel that is compiled on the way.
const PATIENCE: Duration = Duration::from_secs(60);

pub(super) fn run(cuda: &Cuda) -> Result<(), String> {
    let mut draws = Draws::fresh();
    let mut compared = 0;
    for ranks in [1, 2, 3, 4, 8] {
        let mut group = group(cuda, pieces(), ranks)?;
        let mut double = Group::new(Double::new(1, 1 << 30), ranks, pieces()).map_err(words)?;
        for &dtype in Dtype::ALL {
            for &op in ReduceOp::ALL {
                let Some(kernel) = Kernel::new(dtype, op) else { continue };
                for algo in ALGOS {
                    for is_in_place in [true, false] {
                        compare(&mut group, &mut double, &kernel, algo, is_in_place, &mut draws)?;
                        compared += 1;
                    }
                }
            }
        }
    }
    println!("{compared} all-reduces have the bits of the same schedule on the CPU, and floats the values of float64");
    repeats(cuda)?;
    ends(cuda)?;
    stages(cuda)?;
    engines(cuda, &mut draws)
}

fn words(error: GpuError) -> String {
    error.to_string()
}

/// Short pieces, so that every message is more than one.
fn pieces() -> GroupOptions {
    GroupOptions { piece_bytes: 4096, ..GroupOptions::default() }
}

fn group(cuda: &Cuda, options: GroupOptions, ranks: u32) -> Result<Group<Cuda>, String> {
    cuda.another().and_then(|cuda| Group::new(cuda, ranks, options)).map_err(words)
}

/// Run one all-reduce on both, and compare.
fn compare(
    group: &mut Group<Cuda>,
    double: &mut Group<Double>,
    kernel: &Kernel,
    algo: Algo,
    is_in_place: bool,
    draws: &mut Draws,
) -> Result<(), String> {
    let (dtype, op, ranks) = (kernel.dtype(), kernel.op(), group.ranks());
    // Not a multiple of anything: heads, tails and blocks of different lengths.
    let count = 1 + (draws.next() >> 32) as usize % 20_000;
    let inputs: Vec<Vec<u8>> = (0..ranks).map(|_| elements(draws, kernel, count)).collect();
    let desc = OpDesc::all_reduce(dtype, op, count as u64);
    let what = format!("{dtype} {op} by {algo}, {ranks} ranks, {count} elements, in place: {is_in_place}");

    let upload = |input: &Vec<u8>| -> Result<GpuBuffers<CudaMemory>, GpuError> {
        let memory = group.gpu().alloc(input.len())?;
        group.gpu().write(&memory, input)?;
        buffers(group.gpu(), memory, is_in_place, input.len())
    };
    let memory = inputs.iter().map(upload).collect::<Result<Vec<_>, _>>().map_err(words)?;
    run_one(group, desc, algo, &memory).map_err(|error| format!("{what}: {error}"))?;
    let upload = |input: &Vec<u8>| -> Result<GpuBuffers<DoubleMemory>, GpuError> {
        buffers(double.gpu(), double.gpu().upload_now(input)?, is_in_place, input.len())
    };
    let twin = inputs.iter().map(upload).collect::<Result<Vec<_>, _>>().map_err(words)?;
    run_one(double, desc, algo, &twin).map_err(|error| format!("{what}, on the double: {error}"))?;

    for (rank, (ours, theirs)) in memory.iter().zip(&twin).enumerate() {
        let mut found = vec![0; inputs[0].len()];
        group.gpu().read(&mut found, output(ours)).map_err(words)?;
        let wanted = double.gpu().download_now(output(theirs));
        if let Some(at) = (0..found.len()).find(|&at| found[at] != wanted[at]) {
            return Err(format!(
                "{what}: byte {at} of rank {rank} is {:#x} where the CPU has {:#x}",
                found[at], wanted[at]
            ));
        }
        if rank == 0 {
            against_float64(kernel, &inputs, &found).map_err(|error| format!("{what}: {error}"))?;
        }
    }
    Ok(())
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

fn run_one<G: Gpu>(
    group: &mut Group<G>,
    desc: OpDesc,
    algo: Algo,
    buffers: &[GpuBuffers<G::Memory>],
) -> Result<(), GpuError> {
    let work = group.start(&Request { desc, algo, buffers, scalars: &[] }, &[])?;
    group.wait(work, Instant::now() + PATIENCE)
}

/// Draw elements: floats from -1 to 1, integers of any bits, and few indices, so that there are ties.
fn elements(draws: &mut Draws, kernel: &Kernel, count: usize) -> Vec<u8> {
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

/// Return floats as float64; `None` for integers and pairs, which are compared by their bits alone.
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

/// Compare a result with float64's: within what the roundings on the way may make.
fn against_float64(kernel: &Kernel, inputs: &[Vec<u8>], found: &[u8]) -> Result<(), String> {
    let all: Option<Vec<Vec<f64>>> = inputs.iter().map(|input| values(kernel, input)).collect();
    let (Some(all), Some(found)) = (all, values(kernel, found)) else { return Ok(()) };
    let ranks = all.len() as f64;
    // Half a unit in the last place of 1, of the element and of the accumulator; a least subnormal besides.
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
            return Err(format!("element {index} is {found} where float64 has {wanted}, and {margin} is allowed"));
        }
    }
    Ok(())
}

/// A captured operation, repeated.
fn repeats(cuda: &Cuda) -> Result<(), String> {
    let mut group = group(cuda, pieces(), 4)?;
    let ones: Vec<u8> = (0..10_000).flat_map(|_| 1_i32.to_le_bytes()).collect();
    let upload = || -> Result<GpuBuffers<CudaMemory>, GpuError> {
        let memory = group.gpu().alloc(ones.len())?;
        group.gpu().write(&memory, &ones)?;
        Ok(GpuBuffers::InPlace(memory))
    };
    let buffers = (0..4).map(|_| upload()).collect::<Result<Vec<_>, _>>().map_err(words)?;
    let desc = OpDesc::all_reduce(Dtype::I32, ReduceOp::Sum, 10_000);
    let request = Request { desc, algo: Algo::Ring, buffers: &buffers, scalars: &[] };
    let repeat = group.capture(&request).map_err(words)?;
    for _ in 0..5 {
        let work = group.replay(&repeat, &[]).map_err(words)?;
        group.wait(work, Instant::now() + PATIENCE).map_err(words)?;
    }
    let mut found = vec![0; ones.len()];
    group.gpu().read(&mut found, output(&buffers[3])).map_err(words)?;
    if !found.as_chunks().0.iter().all(|sum| i32::from_le_bytes(*sum) == 1024) {
        return Err("a captured operation, repeated five times over four ranks, is not 4^5".into());
    }
    println!("a captured operation repeats");
    Ok(())
}

/// A deadline that passes with kernels in flight, and the group afterwards.
fn ends(cuda: &Cuda) -> Result<(), String> {
    let mut group = group(cuda, GroupOptions::default(), 8)?;
    // Milliseconds of work, which takes less than one to hand over.
    let len = 512 << 20;
    let memory = || group.gpu().alloc(len).map(GpuBuffers::InPlace);
    let buffers = (0..8).map(|_| memory()).collect::<Result<Vec<_>, _>>().map_err(words)?;
    let desc = OpDesc::all_reduce(Dtype::F32, ReduceOp::Sum, len as u64 / 4);
    let request = Request { desc, algo: Algo::Ring, buffers: &buffers, scalars: &[] };
    let work = group.start(&request, &[]).map_err(words)?;
    let begun = Instant::now();
    match group.wait(work, begun) {
        Err(GpuError::Deadline) => {
            println!("a deadline ended an operation in {:.1} ms", begun.elapsed().as_secs_f64() * 1e3)
        }
        other => return Err(format!("a deadline that had passed gave {other:?}")),
    }
    let ones: Vec<u8> = (0..len / 4).flat_map(|_| 1_f32.to_le_bytes()).collect();
    for each in &buffers {
        group.gpu().write(output(each), &ones).map_err(words)?;
    }
    run_one(&mut group, desc, Algo::Ring, &buffers).map_err(words)?;
    let mut found = vec![0; len];
    group.gpu().read(&mut found, output(&buffers[5])).map_err(words)?;
    if !found.as_chunks().0.iter().all(|sum| f32::from_le_bytes(*sum) == 8.0) {
        return Err("after a deadline the next sum is wrong".into());
    }
    println!("the group goes on after a deadline");
    Ok(())
}

/// A buffer through pinned chunks.
fn stages(cuda: &Cuda) -> Result<(), String> {
    let bytes: Vec<u8> = (0..10_000_001_u32).map(|index| (index * 7) as u8).collect();
    let memory = cuda.alloc(bytes.len()).map_err(words)?;
    let (producer, produced) = (cuda.stream().map_err(words)?, cuda.event().map_err(words)?);
    let source = cuda.alloc(bytes.len()).map_err(words)?;
    cuda.write(&source, &bytes).map_err(words)?;
    let part = |memory| Part { memory, at: 0, len_bytes: bytes.len() };
    cuda.copy(&producer, part(&memory), part(&source)).map_err(words)?;
    cuda.record(&produced, &producer).map_err(words)?;
    let mut staging = Staging::new(cuda, 1 << 20).map_err(words)?;
    let staged = staging.run(cuda, &memory, &produced, Instant::now() + PATIENCE, |chunk| {
        chunk.iter_mut().for_each(|byte| *byte = byte.wrapping_add(1));
        Ok::<_, GpuError>(())
    });
    staged.map_err(words)?;
    let mut found = vec![0; bytes.len()];
    cuda.read(&mut found, &memory).map_err(words)?;
    if !found.iter().zip(&bytes).all(|(found, byte)| *found == byte.wrapping_add(1)) {
        return Err("a buffer did not come back through pinned chunks as it went".into());
    }
    println!("a buffer goes through pinned chunks");
    Ok(())
}

/// The copy engine's reductions, against the CPU's kernels.
fn engines(cuda: &Cuda, draws: &mut Draws) -> Result<(), String> {
    if let Err(error) = cuda.check_bulk() {
        println!("{error}");
        return Ok(());
    }
    for family in [Family::Sums, Family::Integers] {
        let mut engine = GpuEngine::new(cuda.another().map_err(words)?, family).map_err(words)?;
        for &dtype in Dtype::ALL {
            for &op in ReduceOp::ALL {
                let Some(kernel) = Kernel::new(dtype, op).filter(|_| engine.capabilities().reduces(dtype, op)) else {
                    continue;
                };
                // Several tiles for some blocks, and a last one that is not full.
                engine_one(&mut engine, &kernel, 16 * (1 + (draws.next() >> 32) as usize % 2_000_000), draws)
                    .map_err(|error| format!("the copy engine's {dtype} {op}: {error}"))?;
            }
        }
    }
    println!("the copy engine's reductions have the bits of the CPU's kernels");
    Ok(())
}

fn engine_one(engine: &mut GpuEngine<Cuda>, kernel: &Kernel, len: usize, draws: &mut Draws) -> Result<(), String> {
    let count = len / kernel.element_bytes();
    let (src, dst) = (elements(draws, kernel, count), elements(draws, kernel, count));
    let memory = [&src, &dst].map(|bytes| -> Result<CudaMemory, GpuError> {
        let memory = engine.gpu().alloc(len)?;
        engine.gpu().write(&memory, bytes)?;
        Ok(memory)
    });
    let [from, to] = memory;
    let (from, to) = (from.map_err(words)?, to.map_err(words)?);
    let key = |engine: &mut GpuEngine<Cuda>, memory: &CudaMemory| engine.register(memory.clone()).ok_or("no region");
    let (from_key, to_key) = (key(engine, &from)?, key(engine, &to)?);
    let at = |region| Address { region, offset_bytes: 0 };
    let step = Step::Reduce {
        op: kernel.op(),
        source: kernel.dtype(),
        accumulator: kernel.dtype(),
        src: at(from_key),
        dst: at(to_key),
        count: count as u32,
    };
    let tag = Tag { seq: 1, slot: 0, attempt: 0 };
    engine.submit(Chain { tag, scope: Scope(0), steps: &[step] }).map_err(|error| error.to_string())?;
    let mut ends = [Completion { tag, status: Status::Aborted, step: 0 }];
    let deadline = Instant::now() + PATIENCE;
    while engine.poll(&mut ends) == 0 {
        if Instant::now() > deadline {
            return Err("it does not end".into());
        }
    }
    let mut accumulators = vec![0; count * kernel.accumulator_bytes()];
    kernel.load(&mut accumulators, &dst, false);
    kernel.combine(&mut accumulators, &src, false);
    let (mut wanted, mut found) = (vec![0; len], vec![0; len]);
    kernel.store(&mut wanted, &accumulators, 1);
    engine.gpu().read(&mut found, &to).map_err(words)?;
    engine.deregister(from_key);
    engine.deregister(to_key);
    match (ends[0].status, wanted == found) {
        (Status::Done, true) => Ok(()),
        (Status::Done, false) => Err(format!("{count} elements have other bits")),
        (status, _) => Err(status.to_string()),
    }
}

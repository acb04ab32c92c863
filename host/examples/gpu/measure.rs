//! Tables: passes beside the copy that is measured in the same run, all-reduces of ranks on one GPU, small messages.
//!
//! Times are medians. "Moved" is what the passes of an operation read and write, so its rate can be compared with the
//! copy's, which reads and writes each byte.

use std::time::{Duration, Instant};
use sumac::exec::cuda::{Cuda, CudaMemory};
use sumac::exec::gpu::engine::Bulk;
use sumac::exec::gpu::{Fused, Gpu, GpuBuffers, GpuError, Group, GroupOptions, Part, Request};
use sumac::{Algo, Dtype, OpDesc, ReduceOp};
use sumac_hal::reduce::Kernel;

const MIB: usize = 1 << 20;
const ROUNDS: usize = 21;
const PATIENCE: Duration = Duration::from_secs(60);

pub(super) fn run(cuda: &Cuda) -> Result<(), String> {
    measure(cuda).map_err(|error| error.to_string())
}

fn measure(cuda: &Cuda) -> Result<(), GpuError> {
    let copy = passes(cuda)?;
    all_reduces(cuda, copy)?;
    small_messages(cuda)
}

fn median(mut times: Vec<f64>) -> f64 {
    times.sort_by(f64::total_cmp);
    times[times.len() / 2]
}

/// Return the median time in seconds of what `body` hands to a stream, by the GPU's clock.
fn timed(
    cuda: &Cuda,
    stream: &<Cuda as Gpu>::Stream,
    mut body: impl FnMut() -> Result<(), GpuError>,
) -> Result<f64, GpuError> {
    let (begin, end) = (cuda.timer()?, cuda.timer()?);
    body()?;
    let mut times = Vec::new();
    for _ in 0..ROUNDS {
        cuda.record(&begin, stream)?;
        body()?;
        cuda.record(&end, stream)?;
        while !cuda.is_done(&end)? {
            std::hint::spin_loop();
        }
        times.push(cuda.elapsed_us(&begin, &end)? / 1e6);
    }
    Ok(median(times))
}

/// Measure copies and passes at 256 MiB; return the copy's bytes read and written a second.
fn passes(cuda: &Cuda) -> Result<f64, GpuError> {
    let len_bytes = 256 * MIB;
    let stream = cuda.stream()?;
    let memory = (0..3).map(|_| cuda.alloc(len_bytes)).collect::<Result<Vec<_>, _>>()?;
    for each in &memory {
        cuda.write(each, &vec![0; len_bytes])?;
    }
    let part = |index: usize| Part { memory: &memory[index], at: 0, len_bytes };
    let seconds = timed(cuda, &stream, || cuda.copy(&stream, part(0), part(1)))?;
    let copy = 2.0 * len_bytes as f64 / seconds;
    println!("\n| 256 MiB | us | GB/s moved | of the copy |\n|---|---|---|---|");
    println!("| copy | {:.1} | {:.0} | 100 % |", seconds * 1e6, copy / 1e9);
    for (dtype, op) in [
        (Dtype::F32, ReduceOp::Sum),
        (Dtype::Bf16, ReduceOp::Sum),
        (Dtype::F16, ReduceOp::Sum),
        (Dtype::F64, ReduceOp::Sum),
        (Dtype::I8, ReduceOp::Sum),
        (Dtype::E4m3, ReduceOp::Sum),
        (Dtype::F32, ReduceOp::Max),
        (Dtype::F32, ReduceOp::Avg),
    ] {
        let Some(kernel) = Kernel::new(dtype, op) else { continue };
        let code = cuda.load(&kernel)?;
        let fused = Fused {
            from: part(0),
            is_partial: false,
            own: Some((part(1), false)),
            to: part(2),
            is_finished: true,
            count: len_bytes / kernel.element_bytes(),
            ranks: 8,
        };
        let seconds = timed(cuda, &stream, || cuda.land(&stream, &code, &fused))?;
        let rate = 3.0 * len_bytes as f64 / seconds;
        println!("| {dtype} {op} | {:.1} | {:.0} | {:.1} % |", seconds * 1e6, rate / 1e9, rate / copy * 100.0);
    }
    // In flight: the destination is read by the memory's own units, so as much is moved, by other means.
    if let Err(error) = cuda.check_bulk() {
        println!("| copy engine: {error} | | | |");
        return Ok(copy);
    }
    for dtype in [Dtype::F32, Dtype::Bf16, Dtype::F16, Dtype::F64, Dtype::I32] {
        let types = (dtype, ReduceOp::Sum);
        let seconds = timed(cuda, &stream, || cuda.bulk_reduce(&stream, types, part(2), part(0)))?;
        let rate = 3.0 * len_bytes as f64 / seconds;
        println!("| {dtype} sum in flight | {:.1} | {:.0} | {:.1} % |", seconds * 1e6, rate / 1e9, rate / copy * 100.0);
    }
    Ok(copy)
}

fn buffers(cuda: &Cuda, ranks: u32, len_bytes: usize) -> Result<Vec<GpuBuffers<CudaMemory>>, GpuError> {
    let zeros = vec![0; len_bytes];
    let buffer = || {
        let memory = cuda.alloc(len_bytes)?;
        cuda.write(&memory, &zeros)?;
        Ok(GpuBuffers::InPlace(memory))
    };
    (0..ranks).map(|_| buffer()).collect()
}

/// Return the median time in seconds from handing over to knowing that it is done, by the host's clock.
fn waited(
    group: &mut Group<Cuda>,
    mut start: impl FnMut(&mut Group<Cuda>) -> Result<sumac::exec::gpu::Work<Cuda>, GpuError>,
) -> Result<f64, GpuError> {
    let mut times = Vec::new();
    for round in 0..=ROUNDS {
        let begun = Instant::now();
        let work = start(group)?;
        group.wait(work, begun + PATIENCE)?;
        // The first one loads code and makes memory.
        if round > 0 {
            times.push(begun.elapsed().as_secs_f64());
        }
    }
    Ok(median(times))
}

fn group(cuda: &Cuda, ranks: u32) -> Result<Group<Cuda>, GpuError> {
    Group::new(cuda.another()?, ranks, GroupOptions::default())
}

fn all_reduces(cuda: &Cuda, copy: f64) -> Result<(), GpuError> {
    println!(
        "\n| all-reduce, f32 sum, in place | ranks | MiB | us | GB/s moved | of the copy |\n|---|---|---|---|---|---|"
    );
    for ranks in [2, 4, 8] {
        let mut group = group(cuda, ranks)?;
        for mib in [1, 4, 16, 64, 256, 1024] {
            let len_bytes = mib * MIB;
            let buffers = buffers(group.gpu(), ranks, len_bytes)?;
            let desc = OpDesc::all_reduce(Dtype::F32, ReduceOp::Sum, len_bytes as u64 / 4);
            for algo in [Algo::Ring, Algo::HalvingDoubling] {
                let request = Request { desc, algo, buffers: &buffers, scalars: &[] };
                let moved = group.moved_bytes(&request)? as f64;
                let seconds = waited(&mut group, |group| group.start(&request, &[]))?;
                let rate = moved / seconds;
                let (us, share) = (seconds * 1e6, rate / copy * 100.0);
                println!("| {algo} | {ranks} | {mib} | {us:.1} | {:.0} | {share:.1} % |", rate / 1e9);
            }
        }
    }
    Ok(())
}

fn small_messages(cuda: &Cuda) -> Result<(), GpuError> {
    println!("\n| all-reduce, f32 sum, 4 ranks, bytes | by | us | captured, us |\n|---|---|---|---|");
    let mut group = group(cuda, 4)?;
    for len_bytes in [8, 256, 4096, 65536] {
        let buffers = buffers(group.gpu(), 4, len_bytes)?;
        let desc = OpDesc::all_reduce(Dtype::F32, ReduceOp::Sum, len_bytes as u64 / 4);
        let request = Request { desc, algo: Algo::Auto, buffers: &buffers, scalars: &[] };
        let path = group.explain(&desc, Algo::Auto).chosen.map_or("none", |path| path.name());
        let plain = waited(&mut group, |group| group.start(&request, &[]))?;
        let repeat = group.capture(&request)?;
        let captured = waited(&mut group, |group| group.replay(&repeat, &[]))?;
        println!("| {len_bytes} | {path} | {:.1} | {:.1} |", plain * 1e6, captured * 1e6);
    }
    Ok(())
}

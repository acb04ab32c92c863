//! Measurements: passes relative to a copy in the same run, all-reduces of ranks on one GPU, small messages, and
//! communication beside a matrix product.
//!
//! Times are medians. "Moved" is what the passes of an operation read and write, so its rate is comparable with the
//! copy's, which reads and writes each byte. Each row is printed when it is measured; a row that cannot be measured
//! says why, and the others go on. Only a real GPU gives figures: [`dry_run`] runs the same on a fake GPU and prints
//! none.

use super::out::Out;
use super::{Draws, put};
use std::time::{Duration, Instant};
use sumac::gpu::cuda::{Cuda, Product};
use sumac::gpu::engine::Bulk;
use sumac::gpu::nccl::Nccl;
use sumac::gpu::trace::Kind;
use sumac::gpu::{FakeGpu, Fused, Gpu, GpuBuffers, GpuError, Group, GroupOptions, Part, Request, Work};
use sumac::{Algo, Dtype, OpDesc, ReduceOp};
use sumac_hal::reduce::Kernel;

const MIB: usize = 1 << 20;
const TIMEOUT: Duration = Duration::from_secs(60);
/// Rounds that are not counted.
const WARM_UP: usize = 3;

/// What to measure, and with what.
struct Bench<'a, G: Gpu, P> {
    gpu: &'a G,
    another: &'a dyn Fn() -> Result<G, GpuError>,
    /// Enqueues one unit of computation on a stream.
    compute: P,
    /// The number of bytes in a "MiB": fewer in a dry run.
    mib: usize,
    rounds: usize,
}

/// The sections, each of which can be run alone.
pub(super) const SECTIONS: [&str; 4] = ["passes", "all-reduce", "small", "overlap"];

/// Run one section on the GPU. `overlap` writes a timeline to `trace`.
pub(super) fn run(cuda: &Cuda, section: &str, out: &mut Out, trace: Option<&str>) -> Result<(), String> {
    let another = || cuda.another();
    let product = match section {
        // Small enough to leave room beside it, and to take less time than a few sums.
        "overlap" => Some(cuda.product(1024).map_err(|error| format!("the matrix product: {error}"))?),
        _ => None,
    };
    let compute = |on: &_| product.as_ref().map_or(Ok(()), |product: &Product| product.run(on));
    let mut bench = Bench { gpu: cuda, another: &another, compute, mib: MIB, rounds: 21 };
    bench.section(section, out, trace).map_err(|error| error.to_string())
}

/// Run all sections on a fake GPU, with small sizes and without figures.
pub(super) fn dry_run() -> Result<(), String> {
    let gpu = FakeGpu::new(5, 1 << 26);
    let another = || Ok(gpu.clone());
    let (a, b) = (gpu.alloc(5_000).map_err(to_text)?, gpu.alloc(5_000).map_err(to_text)?);
    let whole = |memory| Part { memory, at: 0, len_bytes: 5_000 };
    let compute = |on: &_| gpu.copy(on, whole(&a), whole(&b));
    let mut bench = Bench { gpu: &gpu, another: &another, compute, mib: 64, rounds: 2 };
    let trace = std::env::temp_dir().join(format!("sumac-dry-run-{}.json", std::process::id()));
    for section in SECTIONS {
        let mut out = Out::dry_run();
        bench.section(section, &mut out, trace.to_str()).map_err(to_text)?;
        if out.failed() > 0 {
            return Err(format!("{} rows of the dry run of {section} failed", out.failed()));
        }
    }
    let written = std::fs::read_to_string(&trace).map_err(|error| format!("{}: {error}", trace.display()))?;
    std::fs::remove_file(&trace).map_err(|error| error.to_string())?;
    if !(written.contains("\"compute\"") && written.contains("\"communication\"")) {
        return Err("the trace of the dry run lacks a kind of span".into());
    }
    println!("dry run of the tables: passed on a fake GPU, without figures");
    Ok(())
}

fn to_text(error: GpuError) -> String {
    error.to_string()
}

fn median(mut times: Vec<f64>) -> f64 {
    times.sort_by(f64::total_cmp);
    times[times.len() / 2]
}

impl<G: Bulk + Nccl, P: FnMut(&G::Stream) -> Result<(), GpuError>> Bench<'_, G, P> {
    fn section(&mut self, section: &str, out: &mut Out, trace: Option<&str>) -> Result<(), GpuError> {
        match section {
            "passes" => self.passes(out),
            "all-reduce" => self.all_reduces(out),
            "small" => self.small_messages(out),
            "overlap" => self.overlap(out, trace),
            other => Err(GpuError::Invalid(format!("unknown section {other}: choose one of {}", SECTIONS.join(", ")))),
        }
    }

    /// Return the median time in seconds of what `body` enqueues on a stream, by the GPU's clock.
    fn timed(&self, on: &G::Stream, mut body: impl FnMut() -> Result<(), GpuError>) -> Result<f64, GpuError> {
        let (begin, end) = (self.gpu.timer()?, self.gpu.timer()?);
        body()?;
        let mut times = Vec::new();
        for _ in 0..self.rounds {
            self.gpu.record(&begin, on)?;
            body()?;
            self.gpu.record(&end, on)?;
            until(self.gpu, &end)?;
            times.push(self.gpu.elapsed_us(&begin, &end)? / 1e6);
        }
        Ok(median(times))
    }

    /// Allocate memory of random bits: a GPU's power draw, and so its clock, depends on the data.
    fn random(&self, len_bytes: usize) -> Result<G::Memory, GpuError> {
        let stream = self.gpu.stream()?;
        let memory = self.gpu.alloc(len_bytes)?;
        let mut draws = Draws::fresh();
        let block: Vec<u8> = (0..len_bytes.min(4 * MIB).div_ceil(4)).flat_map(|_| draws.unit().to_le_bytes()).collect();
        let source = put(self.gpu, &stream, &block)?;
        for at in (0..len_bytes).step_by(block.len()) {
            let len_bytes = block.len().min(len_bytes - at);
            let (to, from) = (Part { memory: &memory, at, len_bytes }, Part { memory: &source, at: 0, len_bytes });
            self.gpu.copy(&stream, to, from)?;
        }
        let end = self.gpu.event()?;
        self.gpu.record(&end, &stream)?;
        until(self.gpu, &end)?;
        Ok(memory)
    }

    /// Return the bytes per second that a copy of 256 MiB reads and writes, and its time in seconds.
    fn copy_rate(&self) -> Result<(f64, f64), GpuError> {
        let len_bytes = 256 * self.mib;
        let (stream, a, b) = (self.gpu.stream()?, self.gpu.alloc(len_bytes)?, self.random(len_bytes)?);
        let part = |memory| Part { memory, at: 0, len_bytes };
        let seconds = self.timed(&stream, || self.gpu.copy(&stream, part(&a), part(&b)))?;
        Ok((2.0 * len_bytes as f64 / seconds, seconds))
    }

    /// Measure copies and passes of 256 MiB.
    fn passes(&self, out: &mut Out) -> Result<(), GpuError> {
        let len_bytes = 256 * self.mib;
        let stream = self.gpu.stream()?;
        let memory = (0..3).map(|_| self.random(len_bytes)).collect::<Result<Vec<_>, _>>()?;
        let part = |index: usize| Part { memory: &memory[index], at: 0, len_bytes };
        out.head(&["256 MiB", "us", "GB/s moved", "of the copy", "goal"]);
        let (copy, seconds) = self.copy_rate()?;
        out.row("copy", &[], || Ok(vec![us(seconds), gb(copy), "100 %".into(), String::new()]));
        let pass = |dtype, op, goal| (dtype, op, goal);
        for (dtype, op, goal) in [
            pass(Dtype::F32, ReduceOp::Sum, Some(85.0)),
            pass(Dtype::Bf16, ReduceOp::Sum, Some(85.0)),
            pass(Dtype::F16, ReduceOp::Sum, None),
            pass(Dtype::F64, ReduceOp::Sum, None),
            pass(Dtype::I32, ReduceOp::Sum, None),
            pass(Dtype::I8, ReduceOp::Sum, None),
            pass(Dtype::E4m3, ReduceOp::Sum, None),
            pass(Dtype::F32, ReduceOp::Max, None),
            pass(Dtype::F32, ReduceOp::Avg, None),
        ] {
            let Some(kernel) = Kernel::new(dtype, op) else { continue };
            out.row(&format!("{dtype} {op}"), &[], || {
                let code = self.gpu.load(&kernel)?;
                let fused = Fused {
                    from: part(0),
                    is_partial: false,
                    own: Some((part(1), false)),
                    to: part(2),
                    is_finished: true,
                    count: len_bytes / kernel.element_bytes(),
                    ranks: 8,
                };
                let seconds = self.timed(&stream, || self.gpu.land(&stream, &code, &fused))?;
                Ok(moved(3.0 * len_bytes as f64, seconds, copy, goal))
            });
            // "In flight": the memory's own units read the destination, so the same amount is moved by other means.
            if op == ReduceOp::Sum && sumac::gpu::engine::bulk_instruction(dtype, op).is_some() {
                if let Err(error) = self.gpu.check_bulk() {
                    out.note(&format!("{dtype} {op} in flight: {error}"));
                    continue;
                }
                out.row(&format!("{dtype} {op} in flight"), &[], || {
                    let seconds =
                        self.timed(&stream, || self.gpu.bulk_reduce(&stream, (dtype, op), part(2), part(0)))?;
                    Ok(moved(3.0 * len_bytes as f64, seconds, copy, None))
                });
            }
        }
        Ok(())
    }

    fn group(&self, ranks: u32) -> Result<Group<G>, GpuError> {
        Group::new((self.another)()?, ranks, GroupOptions::default())
    }

    /// Return the median time in seconds from submission to detected completion, by the host's clock.
    fn waited(
        &self,
        group: &mut Group<G>,
        mut start: impl FnMut(&mut Group<G>) -> Result<Work<G>, GpuError>,
    ) -> Result<f64, GpuError> {
        let mut times = Vec::new();
        for round in 0..WARM_UP + self.rounds {
            let begun = Instant::now();
            let work = start(group)?;
            group.wait(work, begun + TIMEOUT)?;
            // The first round loads code and allocates memory; the next ones find cold caches.
            if round >= WARM_UP {
                times.push(begun.elapsed().as_secs_f64());
            }
        }
        Ok(median(times))
    }

    fn all_reduces(&self, out: &mut Out) -> Result<(), GpuError> {
        let (copy, _) = self.copy_rate()?;
        out.head(&["all-reduce, f32 sum, in place", "ranks", "MiB", "us", "GB/s moved", "of the copy", "goal"]);
        for mib in [256, 1, 4, 16, 64, 1024] {
            for ranks in [2, 4, 8] {
                let len_bytes = mib * self.mib;
                for algo in [Algo::Ring, Algo::HalvingDoubling] {
                    out.row(algo.name(), &[ranks.to_string(), mib.to_string()], || {
                        let mut group = self.group(ranks)?;
                        let buffer = || self.random(len_bytes).map(GpuBuffers::InPlace);
                        let buffers = (0..ranks).map(|_| buffer()).collect::<Result<Vec<_>, _>>()?;
                        let desc = OpDesc::all_reduce(Dtype::F32, ReduceOp::Sum, len_bytes as u64 / 4);
                        let request = Request { desc, algo, buffers: &buffers, scalars: &[] };
                        let bytes = group.moved_bytes(&request)? as f64;
                        let seconds = self.waited(&mut group, |group| group.start(&request, &[]))?;
                        Ok(moved(bytes, seconds, copy, (mib == 256).then_some(75.0)))
                    });
                }
            }
        }
        Ok(())
    }

    fn small_messages(&self, out: &mut Out) -> Result<(), GpuError> {
        out.head(&["all-reduce, f32 sum, 4 ranks, bytes", "by", "us", "repeated, us", "captured, us"]);
        let mut group = self.group(4)?;
        let never = GroupOptions { replay_bytes: 0, ..GroupOptions::default() };
        let mut plainly = Group::new((self.another)()?, 4, never)?;
        for len_bytes in [8, 256, 4096, 65536] {
            let desc = OpDesc::all_reduce(Dtype::F32, ReduceOp::Sum, len_bytes as u64 / 4);
            let path = group.explain(&desc, Algo::Auto).chosen.map_or("none", |path| path.name());
            out.row(&len_bytes.to_string(), &[path.into()], || {
                let buffer = || self.random(len_bytes).map(GpuBuffers::InPlace);
                let buffers = (0..4).map(|_| buffer()).collect::<Result<Vec<_>, _>>()?;
                let request = Request { desc, algo: Algo::Auto, buffers: &buffers, scalars: &[] };
                let plain = self.waited(&mut plainly, |group| group.start(&request, &[]))?;
                let repeated = self.waited(&mut group, |group| group.start(&request, &[]))?;
                let repeat = group.capture(&request)?;
                let captured = self.waited(&mut group, |group| group.replay(&repeat, &[]))?;
                Ok(vec![us(plain), us(repeated), us(captured)])
            });
        }
        match self.gpu.nccl_version() {
            Ok(version) => self.nccl_of_one(version, out),
            Err(error) => out.note(&format!("NCCL: {error}")),
        }
        Ok(())
    }

    /// Measure NCCL with one rank, for which an all-reduce is a copy: the least that a call costs. It accepts no second
    /// rank on a GPU.
    fn nccl_of_one(&self, version: u32, out: &mut Out) {
        out.head(&["NCCL, all-reduce of one rank, a copy, f32 sum, bytes", "by", "us"]);
        for len_bytes in [8, 65536] {
            out.row(&len_bytes.to_string(), &[format!("NCCL {version}")], || {
                let comm = self.gpu.nccl_init(&self.gpu.nccl_id()?, 0, 1)?;
                self.until_ready(&comm)?;
                let (stream, done) = (self.gpu.stream()?, self.gpu.event()?);
                let (from, to) = (self.random(len_bytes)?, self.gpu.alloc(len_bytes)?);
                let part = |memory| Part { memory, at: 0, len_bytes };
                let mut times = Vec::new();
                for round in 0..=self.rounds {
                    let begun = Instant::now();
                    let types = (Dtype::F32, ReduceOp::Sum);
                    self.gpu.nccl_all_reduce(&comm, &stream, types, (part(&to), part(&from)))?;
                    self.until_ready(&comm)?;
                    self.gpu.record(&done, &stream)?;
                    until(self.gpu, &done)?;
                    if round > 0 {
                        times.push(begun.elapsed().as_secs_f64());
                    }
                }
                self.gpu.nccl_abort(&comm, Instant::now() + TIMEOUT);
                Ok(vec![us(median(times))])
            });
        }
    }

    /// Wait until NCCL has set up or enqueued.
    fn until_ready(&self, comm: &G::Comm) -> Result<(), GpuError> {
        let deadline = Instant::now() + TIMEOUT;
        while !self.gpu.nccl_is_ready(comm)? {
            if Instant::now() > deadline {
                return Err(GpuError::Deadline);
            }
            std::hint::spin_loop();
        }
        Ok(())
    }

    /// Measure all-reduces and an equal amount of computation, alone and at the same time, and trace one round.
    fn overlap(&mut self, out: &mut Out, trace: Option<&str>) -> Result<(), GpuError> {
        out.head(&["4 ranks, f32 sum, beside matrix products", "us"]);
        let (ranks, len_bytes) = (4, 64 * self.mib);
        let mut group = self.group(ranks)?;
        let buffer = || self.random(len_bytes).map(GpuBuffers::InPlace);
        let buffers = (0..ranks).map(|_| buffer()).collect::<Result<Vec<_>, _>>()?;
        let desc = OpDesc::all_reduce(Dtype::F32, ReduceOp::Sum, len_bytes as u64 / 4);
        let request = Request { desc, algo: Algo::Ring, buffers: &buffers, scalars: &[] };
        let alone = self.waited(&mut group, |group| group.start(&request, &[]))?;
        let stream = group.gpu().stream()?;
        let end = group.gpu().event()?;
        let computed = |group: &Group<G>, compute: &mut P, times: usize| {
            let begun = Instant::now();
            (0..times).try_for_each(|_| compute(&stream))?;
            group.gpu().record(&end, &stream)?;
            until(group.gpu(), &end)?;
            Ok::<_, GpuError>(begun.elapsed().as_secs_f64())
        };
        computed(&group, &mut self.compute, 1)?;
        let one = computed(&group, &mut self.compute, 1)?.max(1e-7);
        // As much computation as the all-reduces take.
        let (sums, times) = (8, ((8.0 * alone / one) as usize).clamp(1, 1000));
        let (mut computing, mut communicating, mut both) = (Vec::new(), Vec::new(), Vec::new());
        for round in 0..self.rounds.min(7) {
            computing.push(computed(&group, &mut self.compute, times)?);
            communicating.push(reduced(&mut group, &request, sums)?);
            if round == 0 {
                group.start_trace()?;
            }
            let begun = Instant::now();
            let mut works = Vec::new();
            for index in 0..sums.max(times) {
                if index < times {
                    group.trace_span(&stream, ("products", "product"), || (self.compute)(&stream))?;
                }
                if index < sums {
                    works.push(group.start(&request, &[])?);
                }
            }
            group.gpu().record(&end, &stream)?;
            works.into_iter().try_for_each(|work| group.wait(work, begun + TIMEOUT))?;
            until(group.gpu(), &end)?;
            if round > 0 || self.rounds < 3 {
                both.push(begun.elapsed().as_secs_f64());
            }
            if round == 0 {
                let timeline = group.take_trace()?;
                write_trace(&timeline, trace, out)?;
            }
        }
        let (computing, communicating, both) = (median(computing), median(communicating), median(both));
        let hidden = (computing + communicating - both) / computing.min(communicating);
        out.row(&format!("{times} matrix products alone"), &[], || Ok(vec![us(computing)]));
        out.row(&format!("{sums} all-reduces alone"), &[], || Ok(vec![us(communicating)]));
        out.row("both at the same time", &[], || Ok(vec![us(both)]));
        out.row("overlap efficiency: time saved, as a share of the shorter", &[], || {
            Ok(vec![format!("{:.1} %", hidden * 100.0)])
        });
        Ok(())
    }
}

/// Say how much of a trace overlaps, and write it.
fn write_trace(timeline: &sumac::gpu::trace::Timeline, to: Option<&str>, out: &mut Out) -> Result<(), GpuError> {
    let overlap = timeline.overlap();
    for kind in [Kind::Compute, Kind::Communication] {
        if !timeline.spans.iter().any(|span| span.kind == kind) {
            return Err(GpuError::Invalid(format!("the trace has no {kind:?} spans")));
        }
    }
    let efficiency = overlap.efficiency() * 100.0;
    out.row("by the trace: time when both run, as a share of the shorter", &[], || {
        Ok(vec![format!("{efficiency:.1} %")])
    });
    let Some(path) = to else { return Ok(()) };
    let mut bytes = Vec::new();
    let written = timeline.write(&mut bytes).and_then(|()| std::fs::write(path, bytes));
    written.map_err(|error| GpuError::Invalid(format!("{path}: {error}")))?;
    out.note(&format!("wrote {} spans to {path}, for ui.perfetto.dev", timeline.spans.len()));
    Ok(())
}

fn reduced<G: Gpu>(group: &mut Group<G>, request: &Request<'_, G::Memory>, times: usize) -> Result<f64, GpuError> {
    let begun = Instant::now();
    let works = (0..times).map(|_| group.start(request, &[])).collect::<Result<Vec<_>, _>>()?;
    works.into_iter().try_for_each(|work| group.wait(work, begun + TIMEOUT))?;
    Ok(begun.elapsed().as_secs_f64())
}

fn until<G: Gpu>(gpu: &G, event: &G::Event) -> Result<(), GpuError> {
    let deadline = Instant::now() + TIMEOUT;
    while !gpu.is_done(event)? {
        if Instant::now() > deadline {
            return Err(GpuError::Deadline);
        }
        std::hint::spin_loop();
    }
    Ok(())
}

fn us(seconds: f64) -> String {
    format!("{:.1}", seconds * 1e6)
}

fn gb(rate: f64) -> String {
    format!("{:.0}", rate / 1e9)
}

/// Return the columns of a row that moves bytes: time, rate, share of the copy's rate, and the goal for that.
fn moved(bytes: f64, seconds: f64, copy: f64, goal: Option<f64>) -> Vec<String> {
    let share = bytes / seconds / copy * 100.0;
    let verdict = |goal: f64| format!("{goal:.0} %: {}", if share >= goal { "met" } else { "missed" });
    vec![us(seconds), gb(bytes / seconds), format!("{share:.1} %"), goal.map(verdict).unwrap_or_default()]
}

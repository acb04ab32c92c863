//! Ranks in processes of their own, assigned to the GPUs in turn, over CUDA IPC handles; staged through the host where
//! those are unavailable, with the reason. NCCL beside them, where each rank has its own GPU.
//!
//! Rank 0 spawns the others as child processes and relays their messages.

use super::out::Out;
use super::{Draws, put};
use std::io::{self, Read, Write};
use std::net::{TcpListener, TcpStream};
use std::process::{Child, Command};
use std::sync::Mutex;
use std::time::{Duration, Instant};
use sumac::gpu::cuda::{Cuda, CudaOptions};
use sumac::gpu::nccl::Nccl;
use sumac::gpu::peers::{Bootstrap, PeerError, PeerGroup, PeerOptions, PeerTransport, Peered, Reduced};
use sumac::gpu::{FakeGpu, Gpu, GpuBuffers, GpuError, Group, Part, Request};
use sumac::{Algo, Dtype, Error, OpDesc, Path, ReduceOp};
use sumac_hal::reduce::Kernel;

const TIMEOUT: Duration = Duration::from_secs(60);
/// The algorithms to check.
const ALGOS: [Algo; 3] = [Algo::Ring, Algo::HalvingDoubling, Algo::Binomial];

/// A rank's connection to rank 0, or rank 0's to all others.
struct Star {
    rank: u32,
    ranks: u32,
    streams: Mutex<Vec<TcpStream>>,
}

impl Star {
    fn hub(listener: &TcpListener, ranks: u32) -> io::Result<Self> {
        let mut streams: Vec<Option<TcpStream>> = (1..ranks).map(|_| None).collect();
        for _ in 1..ranks {
            let (mut stream, _) = listener.accept()?;
            let mut rank = [0; 4];
            stream.read_exact(&mut rank)?;
            let place = streams.get_mut((u32::from_le_bytes(rank) as usize).wrapping_sub(1));
            *place.ok_or_else(|| io::Error::other("the rank is out of range"))? = Some(stream);
        }
        Ok(Self { rank: 0, ranks, streams: Mutex::new(streams.into_iter().flatten().collect()) })
    }

    fn spoke(addr: &str, rank: u32, ranks: u32) -> io::Result<Self> {
        let mut stream = TcpStream::connect(addr)?;
        stream.write_all(&rank.to_le_bytes())?;
        Ok(Self { rank, ranks, streams: Mutex::new(vec![stream]) })
    }

    fn round(&self, bytes: &[u8], deadline: Instant) -> io::Result<Vec<Vec<u8>>> {
        let mut streams = self.streams.lock().map_err(|_| io::Error::other("a rank panicked"))?;
        let left = deadline.saturating_duration_since(Instant::now()).max(Duration::from_millis(1));
        streams.iter().try_for_each(|stream| stream.set_read_timeout(Some(left)))?;
        if self.rank > 0 {
            send(&mut streams[0], bytes)?;
            return (0..self.ranks).map(|_| receive(&mut streams[0])).collect();
        }
        let mut all = vec![bytes.to_vec()];
        for stream in streams.iter_mut() {
            all.push(receive(stream)?);
        }
        for stream in streams.iter_mut() {
            all.iter().try_for_each(|bytes| send(stream, bytes))?;
        }
        Ok(all)
    }
}

fn send(stream: &mut TcpStream, bytes: &[u8]) -> io::Result<()> {
    stream.write_all(&(bytes.len() as u32).to_le_bytes())?;
    stream.write_all(bytes)
}

fn receive(stream: &mut TcpStream) -> io::Result<Vec<u8>> {
    let mut len = [0; 4];
    stream.read_exact(&mut len)?;
    let mut bytes = vec![0; u32::from_le_bytes(len) as usize];
    stream.read_exact(&mut bytes)?;
    Ok(bytes)
}

impl Bootstrap for Star {
    fn rank(&self) -> u32 {
        self.rank
    }

    fn ranks(&self) -> u32 {
        self.ranks
    }

    fn exchange(&self, bytes: &[u8], deadline: Instant) -> Result<Vec<Vec<u8>>, PeerError> {
        self.round(bytes, deadline).map_err(|error| PeerError::Bootstrap(Error::Argument(error.to_string())))
    }

    fn all_reduce(&self, desc: &OpDesc, bytes: &mut [u8], deadline: Instant) -> Result<Reduced, PeerError> {
        let all = self.exchange(bytes, deadline)?;
        if let Some(kernel) = desc.dtype.zip(desc.op).and_then(|(dtype, op)| Kernel::new(dtype, op)) {
            let mut accumulators = vec![0; bytes.len() / kernel.element_bytes() * kernel.accumulator_bytes()];
            kernel.load(&mut accumulators, &all[0], false);
            all[1..].iter().for_each(|each| kernel.combine(&mut accumulators, each, false));
            kernel.store(bytes, &accumulators, self.ranks);
        }
        Ok(Reduced { path: Path::Ring, fallback: Some("a star of sockets".into()), recovered: false })
    }

    fn cost_s(&self, _: &OpDesc) -> Option<f64> {
        None
    }
}

/// The size of a run.
#[derive(Clone, Copy)]
struct Size {
    ranks: u32,
    elements: usize,
    /// The size of the timed all-reduce in bytes.
    timed_bytes: usize,
    rounds: usize,
}

/// Spawn the other ranks, run as rank 0, and print the results.
pub(super) fn run(cuda: &Cuda, kernels: &[String], out: &mut Out) -> Result<(), String> {
    let gpus = Cuda::count().map_err(|error| error.to_string())?;
    out.head(&[&format!("processes on {gpus} GPUs, f32 sum of 256 MiB"), "ranks", "path", "us"]);
    for ranks in [2, 4, 8] {
        if out.is_late() {
            out.row("all", &[ranks.to_string()], || Ok(Vec::new()));
            continue;
        }
        let listener = TcpListener::bind("127.0.0.1:0").map_err(|error| error.to_string())?;
        let addr = listener.local_addr().map_err(|error| error.to_string())?.to_string();
        let mut children = Vec::new();
        for rank in 1..ranks {
            let program = std::env::current_exe().map_err(|error| error.to_string())?;
            let arguments = ["peer".to_owned(), rank.to_string(), ranks.to_string(), addr.clone()];
            let child = Command::new(program).args(arguments).args(kernels).spawn();
            children.push(Reaped(child.map_err(|error| error.to_string())?));
        }
        let gpu = cuda.another().map_err(|error| error.to_string())?;
        let star = Star::hub(&listener, ranks).map_err(|error| error.to_string())?;
        let size = Size { ranks, elements: 50_000, timed_bytes: 256 << 20, rounds: 11 };
        match rank(gpu, star, size) {
            Ok(rows) => {
                for (name, figures) in rows {
                    out.row(name, &[ranks.to_string()], || Ok(figures));
                }
            }
            Err(error) => out.row("all", &[ranks.to_string()], || Err(GpuError::Lost(error))),
        }
        for child in &mut children {
            let status = child.0.wait().map_err(|error| error.to_string())?;
            if !status.success() {
                return Err(format!("one of {ranks} processes failed: {status}"));
            }
        }
    }
    Ok(())
}

/// Run as one of the other ranks.
pub(super) fn run_peer(options: CudaOptions, rank_of: u32, ranks: u32, addr: &str) -> Result<(), String> {
    let gpus = Cuda::count().map_err(|error| error.to_string())?.max(1);
    let options = CudaOptions { ordinal: rank_of as usize % gpus, ..options };
    let gpu = Cuda::open(options).map_err(|error| error.to_string())?;
    let star = Star::spoke(addr, rank_of, ranks).map_err(|error| error.to_string())?;
    rank(gpu, star, Size { ranks, elements: 50_000, timed_bytes: 256 << 20, rounds: 11 }).map(|_| ())
}

/// Do the same on a fake GPU, in threads.
pub(super) fn dry_run() -> Result<(), String> {
    let (machine, size) = (FakeGpu::new(3, 1 << 28), Size { ranks: 3, elements: 100, timed_bytes: 4096, rounds: 2 });
    let listener = TcpListener::bind("127.0.0.1:0").map_err(|error| error.to_string())?;
    let addr = listener.local_addr().map_err(|error| error.to_string())?.to_string();
    std::thread::scope(|scope| {
        let spoke = |number: u32| {
            let (gpu, addr) = (machine.process(number as u8), &addr);
            scope.spawn(move || {
                let star = Star::spoke(addr, number, size.ranks).map_err(|error| error.to_string())?;
                rank(gpu, star, size)
            })
        };
        let others: Vec<_> = (1..size.ranks).map(spoke).collect();
        let star = Star::hub(&listener, size.ranks).map_err(|error| error.to_string())?;
        let first = rank(machine.process(0), star, size)?;
        let ways: Vec<&str> = first.iter().map(|(_, figures)| figures[0].as_str()).collect();
        if ways != ["direct", "nccl"] {
            return Err(format!("the dry run took the paths {ways:?}"));
        }
        others.into_iter().try_for_each(|rank| rank.join().map_err(|_| "a rank panicked".to_owned())?.map(|_| ()))
    })?;
    println!("dry run of ranks in processes: passed on a fake GPU");
    Ok(())
}

/// Kills a child process that is still running when something has failed.
struct Reaped(Child);

impl Drop for Reaped {
    fn drop(&mut self) {
        // Killing fails if it has already exited, which is fine.
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

/// What was timed, and its path and time.
type Row = (&'static str, Vec<String>);

/// Run one rank: compare bits with the same schedules on a fake GPU, then time one of them, and NCCL.
fn rank<G: Peered + Nccl>(gpu: G, star: Star, size: Size) -> Result<Vec<Row>, String> {
    let me = star.rank as usize;
    let deadline = || Instant::now() + TIMEOUT;
    let stream = gpu.stream().map_err(|error| error.to_string())?;
    let mut peers =
        PeerGroup::join(gpu, star, PeerOptions::default(), deadline()).map_err(|error| error.to_string())?;
    let way = peers.why_staged().map_or_else(|| "direct".to_owned(), |why| format!("staged: {why}"));
    for (dtype, op) in [(Dtype::F32, ReduceOp::Sum), (Dtype::Bf16, ReduceOp::Sum), (Dtype::I32, ReduceOp::Max)] {
        for algo in ALGOS {
            let what = format!("rank {me}: {dtype} {op} by {algo}");
            let failed = |error: &dyn std::fmt::Display| format!("{what}: {error}");
            let inputs: Vec<Vec<u8>> = (0..size.ranks).map(|rank| input(rank, dtype, size.elements)).collect();
            let memory = put(peers.gpu(), &stream, &inputs[me]).map_err(|error| failed(&error))?;
            let shared = peers.share(&memory, deadline()).map_err(|error| failed(&error))?;
            // Staged memory supports only one path.
            let algo = if shared.why_staged().is_some() { Algo::Auto } else { algo };
            let is_exact = shared.why_staged().is_none();
            let outcome = peers.all_reduce(&shared, (dtype, op, algo), &[], deadline());
            let outcome = outcome.map_err(|error| failed(&error))?;
            let found = super::get(peers.gpu(), &stream, &memory, inputs[me].len()).map_err(|error| failed(&error))?;
            if is_exact != matches!(outcome.transport, PeerTransport::Direct(_)) && peers.why_no_nccl().is_some() {
                return Err(failed(&format!("it took the path {:?}", outcome.transport)));
            }
            if is_exact && found != on_the_fake(dtype, op, algo, &inputs).map_err(|error| failed(&error))?[me] {
                return Err(failed(&"the bits differ from those of a single process"));
            }
            peers.unshare(shared, deadline()).map_err(|error| failed(&error))?;
        }
    }
    let failed = |error: &dyn std::fmt::Display| format!("rank {me}: {error}");
    let memory = peers.gpu().alloc(size.timed_bytes).map_err(|error| failed(&error))?;
    let shared = peers.share(&memory, deadline()).map_err(|error| failed(&error))?;
    let mut rows = Vec::new();
    let ring = if shared.why_staged().is_some() { Algo::Auto } else { Algo::Ring };
    for (name, algo, way) in [("ring", ring, way), ("NCCL", Algo::Nccl, "nccl".to_owned())] {
        if let (Algo::Nccl, Some(why)) = (algo, peers.why_no_nccl()) {
            rows.push((name, vec![format!("left out: {why}"), String::new()]));
            continue;
        }
        let mut times = Vec::new();
        for _ in 0..size.rounds {
            let begun = Instant::now();
            peers.all_reduce(&shared, (Dtype::F32, ReduceOp::Sum, algo), &[], deadline()).map_err(|e| failed(&e))?;
            times.push(begun.elapsed().as_secs_f64());
        }
        times.sort_by(f64::total_cmp);
        rows.push((name, vec![way, format!("{:.1}", times[times.len() / 2] * 1e6)]));
    }
    peers.unshare(shared, deadline()).map_err(|error| failed(&error))?;
    peers.leave(deadline()).map_err(|error| failed(&error))?;
    Ok(rows)
}

/// A rank's contribution: the same in every process.
fn input(rank: u32, dtype: Dtype, elements: usize) -> Vec<u8> {
    let mut draws = Draws::seeded(u64::from(rank) + 77);
    let element = |_| match dtype {
        Dtype::Bf16 => draws.unit().to_le_bytes()[2..].to_vec(),
        Dtype::F32 => draws.unit().to_le_bytes().to_vec(),
        _ => draws.next().to_le_bytes()[..dtype.size_bytes()].to_vec(),
    };
    (0..elements).flat_map(element).collect()
}

fn on_the_fake(dtype: Dtype, op: ReduceOp, algo: Algo, inputs: &[Vec<u8>]) -> Result<Vec<Vec<u8>>, GpuError> {
    let options = PeerOptions::default().group;
    let mut group = Group::new(FakeGpu::new(1, 1 << 28), inputs.len() as u32, options)?;
    let stream = group.gpu().stream()?;
    let memory = inputs.iter().map(|input| put(group.gpu(), &stream, input)).collect::<Result<Vec<_>, _>>()?;
    let buffers: Vec<_> = memory.iter().cloned().map(GpuBuffers::InPlace).collect();
    let count = inputs[0].len() / dtype.size_bytes();
    let request = Request { desc: OpDesc::all_reduce(dtype, op, count as u64), algo, buffers: &buffers, scalars: &[] };
    let work = group.start(&request, &[])?;
    group.wait(work, Instant::now() + TIMEOUT)?;
    let whole = |memory| Part { memory, at: 0, len_bytes: inputs[0].len() };
    Ok(memory.iter().map(|memory| group.gpu().download_now(whole(memory).memory)).collect())
}

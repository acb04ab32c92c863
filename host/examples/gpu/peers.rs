//! Ranks in processes of their own, assigned to the GPUs in turn, over CUDA IPC handles; staged through the host where
//! those are unavailable, with the reason. NCCL beside them, where each rank has its own GPU.
//!
//! Rank 0 spawns the others as child processes and relays their messages. Processes that share a GPU take turns on it,
//! so their times say nothing about ranks with a GPU each; their rows say so.

use super::out::Out;
use super::{Draws, put};
use std::io::{self, BufRead, BufReader, Read, Write};
use std::net::{TcpListener, TcpStream};
use std::process::{Child, Command, Stdio};
use std::sync::{Mutex, mpsc};
use std::time::{Duration, Instant};
use sumac::gpu::cuda::{Cuda, CudaOptions};
use sumac::gpu::nccl::Nccl;
use sumac::gpu::peers::{Bootstrap, PeerError, PeerGroup, PeerOptions, PeerTransport, Peered, Reduced, Shared};
use sumac::gpu::{FakeGpu, Gpu, GpuBuffers, GpuError, Group, GroupOptions, Part, Request};
use sumac::{Algo, Dtype, Error, OpDesc, Path, ReduceOp};
use sumac_hal::reduce::Kernel;

const TIMEOUT: Duration = Duration::from_secs(30);
/// What an operation whose peer is killed may take, before it is stopped.
const SHORT: Duration = Duration::from_millis(500);
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
        let deadline = Instant::now() + TIMEOUT;
        for _ in 1..ranks {
            let mut stream = accept(listener, deadline)?;
            stream.set_read_timeout(Some(TIMEOUT))?;
            let mut rank = [0; 4];
            stream.read_exact(&mut rank)?;
            let place = streams.get_mut((u32::from_le_bytes(rank) as usize).wrapping_sub(1));
            *place.ok_or_else(|| io::Error::other("the rank is out of range"))? = Some(stream);
        }
        Ok(Self { rank: 0, ranks, streams: Mutex::new(streams.into_iter().flatten().collect()) })
    }

    fn spoke(addr: &str, rank: u32, ranks: u32) -> io::Result<Self> {
        let mut stream = TcpStream::connect(addr)?;
        stream.set_nodelay(true)?;
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

/// Accept a connection; an error if none comes by the deadline, such as when a child has failed.
fn accept(listener: &TcpListener, deadline: Instant) -> io::Result<TcpStream> {
    listener.set_nonblocking(true)?;
    loop {
        match listener.accept() {
            Ok((stream, _)) => {
                stream.set_nonblocking(false)?;
                stream.set_nodelay(true)?;
                return Ok(stream);
            }
            Err(error) if error.kind() == io::ErrorKind::WouldBlock && Instant::now() < deadline => {
                std::thread::park_timeout(Duration::from_millis(1));
            }
            Err(error) => return Err(io::Error::other(format!("a rank did not connect: {error}"))),
        }
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
    /// The size of the timed all-reduce in bytes, and of one that is staged through sockets.
    timed_bytes: usize,
    staged_bytes: usize,
    rounds: usize,
}

impl Size {
    const fn of(ranks: u32) -> Self {
        Self { ranks, elements: 50_000, timed_bytes: 256 << 20, staged_bytes: 8 << 20, rounds: 7 }
    }
}

/// Spawn the other ranks, run as rank 0, and print the results.
pub(super) fn run(cuda: &Cuda, kernels: &[String], out: &mut Out) -> Result<(), String> {
    let gpus = Cuda::count().map_err(|error| error.to_string())?;
    out.head(&[&format!("processes on {gpus} GPUs, f32 sum"), "ranks", "path", "MiB", "us", "shared"]);
    for ranks in [2, 4, 8] {
        if out.is_late() {
            out.row("all", &[ranks.to_string()], || Ok(Vec::new()));
            continue;
        }
        let shared = match (ranks as usize).div_ceil(gpus.max(1)) {
            0 | 1 => "no".to_owned(),
            each => format!("{each} processes take turns on a GPU"),
        };
        match ranks_of(cuda, kernels, ranks) {
            Ok(rows) => {
                for (name, mut figures) in rows {
                    figures.push(shared.clone());
                    out.row(name, &[ranks.to_string()], || Ok(figures));
                }
            }
            Err(error) => out.row("all", &[ranks.to_string()], || Err(GpuError::Lost(error))),
        }
    }
    Ok(())
}

/// Run so many ranks, this process among them.
fn ranks_of(cuda: &Cuda, kernels: &[String], ranks: u32) -> Result<Vec<Row>, String> {
    let (listener, mut children) = spawn("peer", kernels, ranks)?;
    let gpu = cuda.another().map_err(|error| error.to_string())?;
    let star = Star::hub(&listener, ranks).map_err(|error| error.to_string())?;
    let rows = rank(gpu, star, Size::of(ranks))?;
    for child in &mut children {
        let status = child.0.wait().map_err(|error| error.to_string())?;
        if !status.success() {
            return Err(format!("one of {ranks} processes failed: {status}"));
        }
    }
    Ok(rows)
}

/// Spawn all ranks but the first as child processes of this program.
fn spawn(command: &str, kernels: &[String], ranks: u32) -> Result<(TcpListener, Vec<Reaped>), String> {
    let listener = TcpListener::bind("127.0.0.1:0").map_err(|error| error.to_string())?;
    let addr = listener.local_addr().map_err(|error| error.to_string())?.to_string();
    let program = std::env::current_exe().map_err(|error| error.to_string())?;
    let mut children = Vec::new();
    for rank in 1..ranks {
        let arguments = [command.to_owned(), rank.to_string(), ranks.to_string(), addr.clone()];
        let child = Command::new(&program).args(arguments).args(kernels).spawn();
        children.push(Reaped(child.map_err(|error| error.to_string())?));
    }
    Ok((listener, children))
}

/// Run as one of the other ranks; a victim only joins and shares, and waits to be killed.
pub(super) fn run_peer(options: CudaOptions, (rank_of, ranks): (u32, u32), addr: &str, is_victim: bool) -> Outcome {
    let gpus = Cuda::count().map_err(|error| error.to_string())?.max(1);
    let options = CudaOptions { ordinal: rank_of as usize % gpus, ..options };
    let gpu = Cuda::open(options).map_err(|error| error.to_string())?;
    let star = Star::spoke(addr, rank_of, ranks).map_err(|error| error.to_string())?;
    if is_victim {
        let (peers, shared) = shared(gpu, star)?;
        let _ = peers.bootstrap().exchange(&[], Instant::now() + TIMEOUT);
        drop(shared);
        return Ok(());
    }
    rank(gpu, star, Size::of(ranks)).map(|_| ())
}

type Outcome = Result<(), String>;

/// Join a group, and share some memory.
fn shared(gpu: Cuda, star: Star) -> Result<(PeerGroup<Cuda, Star>, Shared<Cuda>), String> {
    let deadline = Instant::now() + TIMEOUT;
    let memory = gpu.alloc(64 << 20).map_err(|error| error.to_string())?;
    let mut peers = PeerGroup::join(gpu, star, PeerOptions::default(), deadline).map_err(|error| error.to_string())?;
    let shared = peers.share(&memory, deadline).map_err(|error| error.to_string())?;
    Ok((peers, shared))
}

/// Kill a peer before and during an operation: each must end with an error, and the GPU must work afterwards. Where all
/// streams share one queue of the hardware, the process may be stuck, but must say so in time. Each case has a process
/// of its own.
pub(super) fn run_killed(kernels: &[String], out: &mut Out) -> Outcome {
    out.head(&["2 processes, one is killed", "hardware queues", "ended in ms", "dropped in ms", "with"]);
    for queues in ["8", "1"] {
        for name in ["before", "during"] {
            let row = format!("{name} the operation");
            out.row(&row, &[queues.into()], || survivor(name, queues, kernels).map_err(GpuError::Lost));
        }
    }
    Ok(())
}

/// Run one case in a process of its own, which is killed in the end: one that is stuck does not exit.
fn survivor(name: &str, queues: &str, kernels: &[String]) -> Result<Vec<String>, String> {
    let program = std::env::current_exe().map_err(|error| error.to_string())?;
    let mut command = Command::new(program);
    command.args(["survivor", name]).args(kernels).env("CUDA_DEVICE_MAX_CONNECTIONS", queues).stdout(Stdio::piped());
    let mut child = Reaped(command.spawn().map_err(|error| error.to_string())?);
    let stdout = child.0.stdout.take().ok_or("it has no output")?;
    let (send, receive) = mpsc::channel();
    std::thread::spawn(move || {
        let mut line = String::new();
        let read = BufReader::new(stdout).read_line(&mut line);
        let _ = send.send(read.map(|_| line));
    });
    let line = receive.recv_timeout(TIMEOUT).map_err(|_| format!("it hung: nothing in {} s", TIMEOUT.as_secs()))?;
    let line = line.map_err(|error| error.to_string())?;
    match line.trim().strip_prefix("ended|") {
        Some(figures) => Ok(figures.split('|').map(str::to_owned).collect()),
        None => Err(line.trim().to_owned()),
    }
}

/// Run one case, and print one line.
pub(super) fn run_survivor(cuda: &Cuda, name: &str, kernels: &[String]) -> Outcome {
    match killed(cuda, kernels, name == "during") {
        Ok(figures) => println!("ended|{}", figures.join("|")),
        Err(why) => println!("{why}"),
    }
    io::stdout().flush().map_err(|error| error.to_string())
}

fn killed(cuda: &Cuda, kernels: &[String], is_in_flight: bool) -> Result<Vec<String>, String> {
    let (listener, mut children) = spawn("victim", kernels, 2)?;
    let gpu = cuda.another().map_err(|error| error.to_string())?;
    let star = Star::hub(&listener, 2).map_err(|error| error.to_string())?;
    let (mut peers, shared) = shared(gpu, star)?;
    if let Some(why) = shared.why_staged() {
        return Err(format!("the processes do not access each other's memory: {why}"));
    }
    if !is_in_flight {
        children.clear();
    }
    let desc = OpDesc::all_reduce(Dtype::F32, ReduceOp::Sum, (64 << 20) / 4);
    let begun = Instant::now();
    let deadline = begun + SHORT;
    let work = peers.start(&shared, (&desc, Algo::Ring), &[], deadline);
    // Dropping a child kills it and waits for its end.
    children.clear();
    let error = match work.and_then(|work| peers.wait(work, deadline)) {
        Ok(()) => return Err("an all-reduce with a killed rank succeeded".into()),
        Err(error) => error,
    };
    let ended = begun.elapsed().saturating_sub(SHORT);
    let begun = Instant::now();
    drop((peers, shared));
    let dropped = begun.elapsed();
    let has_one_queue = std::env::var("CUDA_DEVICE_MAX_CONNECTIONS").is_ok_and(|queues| queues == "1");
    if !(has_one_queue && matches!(error, PeerError::Gpu(GpuError::Stuck))) {
        sums_to_two(cuda)?;
    }
    let ms = |time: Duration| format!("{:.1}", time.as_secs_f64() * 1e3);
    Ok(vec![ms(ended), ms(dropped), error.to_string()])
}

/// Check that the GPU of this process still works.
fn sums_to_two(cuda: &Cuda) -> Result<(), String> {
    let check = || -> Result<bool, GpuError> {
        let mut group = Group::new(cuda.another()?, 2, GroupOptions::default())?;
        let stream = group.gpu().stream()?;
        let ones = 1_i32.to_le_bytes().repeat(1000);
        let memory = [put(group.gpu(), &stream, &ones)?, put(group.gpu(), &stream, &ones)?];
        let buffers = memory.clone().map(GpuBuffers::InPlace);
        let desc = OpDesc::all_reduce(Dtype::I32, ReduceOp::Sum, 1000);
        let request = Request { desc, algo: Algo::Ring, buffers: &buffers, scalars: &[] };
        let work = group.start(&request, &[])?;
        group.wait(work, Instant::now() + TIMEOUT)?;
        Ok(super::get(group.gpu(), &stream, &memory[1], ones.len())? == 2_i32.to_le_bytes().repeat(1000))
    };
    match check() {
        Ok(true) => Ok(()),
        Ok(false) => Err("a sum after the kill is wrong".into()),
        Err(error) => Err(format!("a sum after the kill: {error}")),
    }
}

/// Do the same on a fake GPU, in threads.
pub(super) fn dry_run() -> Result<(), String> {
    let size = Size { ranks: 3, elements: 100, timed_bytes: 4096, staged_bytes: 4096, rounds: 2 };
    let machine = FakeGpu::new(3, 1 << 28);
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
    let timed_bytes = if peers.why_staged().is_some() { size.staged_bytes } else { size.timed_bytes };
    let memory = peers.gpu().alloc(timed_bytes).map_err(|error| failed(&error))?;
    let shared = peers.share(&memory, deadline()).map_err(|error| failed(&error))?;
    let mut rows = Vec::new();
    let ring = if shared.why_staged().is_some() { Algo::Auto } else { Algo::Ring };
    for (name, algo, way) in [("ring", ring, way), ("NCCL", Algo::Nccl, "nccl".to_owned())] {
        if let (Algo::Nccl, Some(why)) = (algo, peers.why_no_nccl()) {
            rows.push((name, vec![format!("left out: {why}"), String::new(), String::new()]));
            continue;
        }
        let mut times = Vec::new();
        for _ in 0..size.rounds {
            let begun = Instant::now();
            peers.all_reduce(&shared, (Dtype::F32, ReduceOp::Sum, algo), &[], deadline()).map_err(|e| failed(&e))?;
            times.push(begun.elapsed().as_secs_f64());
        }
        times.sort_by(f64::total_cmp);
        let mib = timed_bytes as f64 / f64::from(1 << 20);
        rows.push((name, vec![way, format!("{mib:.0}"), format!("{:.1}", times[times.len() / 2] * 1e6)]));
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

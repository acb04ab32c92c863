//! GPU buffers reduced in a tree, staged through chunks, also with the loss of a device; and GPUs of several processes
//! that join over a communicator. The GPU is a fake; controller, boards and communicators are the production code.

#[path = "../common/mod.rs"]
mod common;

use common::{Cluster, over_udp, plain, prefer_tree};
use std::sync::{Barrier, Mutex};
use std::time::{Duration, Instant};
use sumac::controller::ControllerConfig;
use sumac::gpu::peers::{PeerGroup, PeerOptions, PeerOutcome, PeerTransport, WhyStaged};
use sumac::gpu::{FakeGpu, FakeMemory, Gpu, StagedError, Staging, all_reduce_staged};
use sumac::{Algo, Communicator, Dtype, Error, Outcome, Path, ReduceOp};
use sumac_firmware::emulated::ZeroCopyConfig;

const RANKS: u32 = 4;
const COUNT: usize = 300_000;
/// Does not divide the buffer, so the last chunk is shorter.
const CHUNK_BYTES: usize = 64 << 10;

fn value(rank: u32, i: usize) -> u32 {
    (i as u32 + 1).wrapping_mul(0x9e37_79b9) ^ rank.wrapping_mul(0x85eb_ca6b)
}

fn upload(gpu: &FakeGpu, rank: u32) -> FakeMemory {
    let bytes: Vec<u8> = (0..COUNT).flat_map(|i| value(rank, i).to_le_bytes()).collect();
    gpu.upload_now(&bytes).expect("room")
}

fn all_reduce(gpu: &FakeGpu, comm: &Communicator) -> Result<Vec<Outcome>, StagedError> {
    let memory = upload(gpu, comm.rank());
    let mut staging = Staging::new(gpu, CHUNK_BYTES)?;
    let (ready, deadline) = (gpu.event()?, Instant::now() + Duration::from_secs(60));
    let outcomes =
        all_reduce_staged((gpu, &mut staging), comm, &memory, (Dtype::U32, ReduceOp::Sum), &ready, deadline)?;
    let total = |i| (0..RANKS).fold(0, |sum: u32, rank| sum.wrapping_add(value(rank, i)));
    let wanted: Vec<u8> = (0..COUNT).flat_map(|i| total(i).to_le_bytes()).collect();
    assert!(gpu.download_now(&memory) == wanted, "rank {}", comm.rank());
    Ok(outcomes)
}

#[test]
fn gpu_buffer_is_reduced_in_the_tree() {
    for configure in [over_udp, plain] {
        let cluster = Cluster::start_zero_copy(2, 2, ZeroCopyConfig::default(), prefer_tree());
        let paths = cluster.run("staged", RANKS, configure, |comm| {
            let gpu = FakeGpu::new(u64::from(comm.rank()) + 3, 1 << 24);
            let outcomes = all_reduce(&gpu, &comm).expect("reduced");
            comm.leave();
            outcomes.into_iter().map(|outcome| outcome.path).collect::<Vec<_>>()
        });
        let chunks = (COUNT * 4).div_ceil(CHUNK_BYTES);
        assert!(paths.iter().all(|paths| *paths == vec![Path::Tree; chunks]), "{paths:?}");
    }
}

#[test]
fn gpu_buffer_survives_device_loss() {
    let mut cluster = Cluster::start_zero_copy(2, 2, ZeroCopyConfig::default(), ControllerConfig::new());
    let boards = Mutex::new(std::mem::take(&mut cluster.boards));
    let gate = Barrier::new(RANKS as usize);
    let seen = cluster.run("dies", RANKS, plain, |comm| {
        let gpu = FakeGpu::new(u64::from(comm.rank()) + 9, 1 << 24);
        all_reduce(&gpu, &comm).expect("while all is well");
        gate.wait();
        let outcomes = std::thread::scope(|scope| {
            if comm.rank() == 0 {
                scope.spawn(|| boards.lock().expect("not poisoned").remove(0));
            }
            all_reduce(&gpu, &comm).expect("got over")
        });
        comm.leave();
        outcomes.iter().any(|outcome| outcome.recovered || outcome.fallback.is_some() || outcome.path != Path::Tree)
    });
    assert!(seen.iter().any(|&noticed| noticed), "no rank has noticed the loss of the leaf");
}

#[test]
fn network_error_is_returned_unchanged() {
    let cluster = Cluster::start(1, 1);
    let errors = cluster.run("alone", 1, plain, |comm| {
        let gpu = FakeGpu::new(1, 1 << 24);
        comm.canceller().cancel();
        all_reduce(&gpu, &comm)
    });
    assert!(matches!(errors[0], Err(StagedError::Network(Error::Cancelled))), "{errors:?}");
}

/// All-reduce among the GPUs of a communicator's ranks, and check the sum.
fn among_peers(peers: &mut PeerGroup<FakeGpu, Communicator>, rank: u32, algo: Algo) -> PeerOutcome {
    let memory = upload(peers.gpu(), rank);
    let deadline = Instant::now() + Duration::from_secs(60);
    let shared = peers.share(&memory, deadline).expect("shown");
    let outcome = peers.all_reduce(&shared, (Dtype::U32, ReduceOp::Sum, algo), &[], deadline).expect("reduced");
    let total = |i| (0..RANKS).fold(0, |sum: u32, rank| sum.wrapping_add(value(rank, i)));
    let wanted: Vec<u8> = (0..COUNT).flat_map(|i| total(i).to_le_bytes()).collect();
    assert!(peers.gpu().download_now(&memory) == wanted, "rank {rank}");
    outcome
}

#[test]
fn gpu_peers_of_several_processes_join_over_a_communicator() {
    let cluster = Cluster::start_zero_copy(1, 4, ZeroCopyConfig::default(), ControllerConfig::new());
    let machine = FakeGpu::new(21, 1 << 28);
    cluster.run("peers", RANKS, plain, |comm| {
        let (rank, deadline) = (comm.rank(), Instant::now() + Duration::from_secs(60));
        let gpu = machine.process(rank as u8 % 2);
        let options = PeerOptions { nccl: false, ..PeerOptions::default() };
        let mut peers = PeerGroup::join(gpu, comm, options, deadline).expect("joined");
        assert_eq!(peers.why_staged(), None);
        let forced = among_peers(&mut peers, rank, Algo::Ring);
        assert_eq!(forced.transport, PeerTransport::Direct(Path::Ring));
        let open = among_peers(&mut peers, rank, Algo::Auto);
        assert!(matches!(open.transport, PeerTransport::Direct(_)), "the communicator's tree costs more: {open:?}");
    });
}

/// The buffer is staged through the tree. When the device is lost and only host collectives remain, the rest of the
/// buffer moves from GPU to GPU.
#[test]
fn gpu_peers_complete_the_operations_of_a_lost_device() {
    let mut cluster = Cluster::start_zero_copy(1, 4, ZeroCopyConfig::default(), prefer_tree());
    let boards = Mutex::new(std::mem::take(&mut cluster.boards));
    let (machine, gate) = (FakeGpu::new(22, 1 << 28), Barrier::new(RANKS as usize));
    let seen = cluster.run("left", RANKS, plain, |comm| {
        let (rank, deadline) = (comm.rank(), Instant::now() + Duration::from_secs(60));
        let gpu = machine.process(rank as u8);
        let options =
            PeerOptions { nccl: false, network_first: true, chunk_bytes: CHUNK_BYTES, ..PeerOptions::default() };
        let mut peers = PeerGroup::join(gpu, comm, options, deadline).expect("joined");
        let whole = among_peers(&mut peers, rank, Algo::Auto);
        assert_eq!((whole.transport, whole.direct_bytes), (PeerTransport::Staged(WhyStaged::Asked), 0));
        assert!(whole.chunks.iter().all(|path| *path == Path::Tree), "{:?}", whole.chunks);
        gate.wait();
        let left = std::thread::scope(|scope| {
            if rank == 0 {
                scope.spawn(|| boards.lock().expect("not poisoned").clear());
            }
            among_peers(&mut peers, rank, Algo::Auto)
        });
        gate.wait();
        // Even if this operation completed in the tree, the next one has none.
        let next = among_peers(&mut peers, rank, Algo::Auto);
        (left, next)
    });
    for (left, next) in &seen {
        assert_eq!((left.direct_bytes, next.direct_bytes), (seen[0].0.direct_bytes, seen[0].1.direct_bytes));
        assert!(next.direct_bytes > 0 && next.fallback.is_some(), "{next:?}");
    }
}

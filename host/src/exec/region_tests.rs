//! Registered memory that ranks map of each other: what is read there, when it is unmapped, and peers that break the
//! rules.

use super::error::Call;
use super::frame::{FrameKind, HEADER_BYTES, Header};
use super::link::IoOutcome;
use super::regions::{REGIONS_MAX, RegionLink, RegionPlace};
use super::shared::{MAPPED_MIN_BYTES, REFERENCE_MIN_BYTES};
use super::tests::{BOTH, all_reduce, connected_meshes, context, on_ranks};
use super::*;
use crate::region_exports::{Export, RegionExports};
use crate::schedule::binomial;
use rustix::fs::{MemfdFlags, memfd_create};
use std::fs::File;
use std::os::fd::{AsFd, OwnedFd};
use std::sync::{Arc, Mutex, mpsc};
use std::time::{Duration, Instant};
use sumac_hal::dma::DmaMemory;
use sumac_hal::ids::Rank;
use sumac_hal::op::{Dtype, OpDesc, Path, ReduceOp};
use sumac_hal::shm::{Connection, Listener, MemoryChannel, Pages, Region};

/// Exported memory.
struct Memory {
    region: Arc<Mutex<Region>>,
    _export: Export,
}

impl Memory {
    fn new(exports: &Arc<RegionExports>, len_bytes: usize) -> Self {
        let region = Arc::new(Mutex::new(Region::create(len_bytes, Pages::Normal).expect("memory")));
        let _export = exports.add(&region);
        Self { region, _export }
    }

    fn bytes(&mut self) -> &mut [u8] {
        let region = self.region.lock().expect("no panic");
        // SAFETY: the region outlives the slice, which borrows all of `self`; others only read it.
        unsafe { std::slice::from_raw_parts_mut(region.base().as_ptr(), region.len_bytes()) }
    }
}

/// Return the regions that the peer of a link has been handed, and those of the peer that are mapped here.
fn counts(mesh: &Mesh, peer: usize) -> (usize, usize) {
    mesh.links[peer].shared.as_ref().expect("shared memory").regions.as_ref().expect("a peer's link").counts()
}

fn broadcast(mesh: &mut Mesh, op_index: u64, bytes: &mut [u8]) -> Result<(), ExecError> {
    let desc = OpDesc::broadcast(Dtype::U8, Rank(0), bytes.len() as u64);
    let ctx = context(op_index, desc, Path::Binomial);
    execute(mesh, &binomial::broadcast(mesh.place(), bytes.len(), Rank(0)), None, bytes, &ctx, &mut NoInterrupt)
}

/// Return what every element of the ranks' contributions is, and what comes of it.
fn contribution(rank: u32, round: u64, at: usize) -> f32 {
    (at % 251) as f32 * (rank + 1) as f32 * 0.37 + round as f32
}

/// Results in mapped memory are those in plain memory, bit for bit, and the memory is in use.
#[test]
fn mapped_memory_reduces_to_the_same_bits_as_plain() {
    for ranks in [2_u32, 3, 4] {
        let mut meshes = connected_meshes(ranks);
        on_ranks(&mut meshes, |mesh| {
            let rank = mesh.place().rank().0;
            let mut op_index = 0;
            for count in [MAPPED_MIN_BYTES / 2 + 3, 100_003, 700_001] {
                let mut memory = Memory::new(mesh.exports(), count * 4 + 64);
                for (path, _) in BOTH {
                    for round in 0..4 {
                        let input: Vec<f32> = (0..count).map(|at| contribution(rank, round, at)).collect();
                        let mut plain = bytemuck::cast_slice(&input).to_vec();
                        all_reduce(mesh, op_index, path, Dtype::F32, ReduceOp::Sum, &mut plain).expect("no error");
                        let mapped = &mut memory.bytes()[64..];
                        mapped.copy_from_slice(bytemuck::cast_slice(&input));
                        all_reduce(mesh, op_index + 1, path, Dtype::F32, ReduceOp::Sum, mapped).expect("no error");
                        assert!(mapped == plain, "{count} elements, {path:?}, round {round}");
                        op_index += 2;
                    }
                }
            }
            let all = (0..ranks).filter(|peer| *peer != rank).map(|peer| counts(mesh, peer as usize));
            let (handed_over, mapped) = all.fold((0, 0), |sum, link| (sum.0 + link.0, sum.1 + link.1));
            assert!(handed_over > 0 && mapped > 0, "{handed_over} and {mapped}");
        });
    }
}

/// What is sent from mapped memory after a write is what was written, in every element type's granularity.
#[test]
fn each_operation_reads_what_the_memory_holds_then() {
    let mut meshes = connected_meshes(2);
    on_ranks(&mut meshes, |mesh| {
        let mut memory = Memory::new(mesh.exports(), 3 << 20);
        let is_root = mesh.place().rank() == Rank(0);
        for op_index in 0..8_u64 {
            let len = (3 << 20) - 5 * op_index as usize;
            let bytes = &mut memory.bytes()[..len];
            bytes.fill(if is_root { op_index as u8 } else { 0xff });
            broadcast(mesh, op_index, bytes).expect("no error");
            assert!(bytes.iter().all(|byte| *byte == op_index as u8), "{op_index}");
        }
        assert_eq!(counts(mesh, usize::from(is_root)), if is_root { (1, 0) } else { (0, 1) });
    });
}

/// Where the kernel refuses `process_vm_readv`, registered memory is still copied once.
#[test]
fn mapped_memory_is_read_without_permission_to_read_processes() {
    let mut meshes = connected_meshes(2);
    on_ranks(&mut meshes, |mesh| {
        let (is_root, len) = (mesh.place().rank() == Rank(0), 1 << 20);
        let mut memory = Memory::new(mesh.exports(), len);
        for op_index in 0..6_u64 {
            // Too short for a reference through the kernel, until the memory is mapped.
            let bytes = &mut memory.bytes()[..if op_index < 3 { REFERENCE_MIN_BYTES / 2 } else { len }];
            bytes.fill(if is_root { op_index as u8 } else { 0xff });
            mesh.links[usize::from(is_root)].shared.as_mut().expect("shared memory").memory = None;
            broadcast(mesh, op_index, bytes).expect("no error");
            assert!(bytes.iter().all(|byte| *byte == op_index as u8), "{op_index}");
        }
    });
}

/// Many regions are allocated, used and freed: nothing of them stays, and addresses come back for other memory.
#[test]
fn freed_regions_are_unmapped_and_their_addresses_reused() {
    let mut meshes = connected_meshes(2);
    let rounds = 2 * REGIONS_MAX as u64 + 50;
    on_ranks(&mut meshes, |mesh| {
        let is_root = mesh.place().rank() == Rank(0);
        for round in 0..rounds {
            let mut memory = Memory::new(mesh.exports(), REFERENCE_MIN_BYTES);
            for again in 0..3 {
                let value = (round * 3 + again) as u8;
                let bytes = memory.bytes();
                bytes.fill(if is_root { value } else { !value });
                broadcast(mesh, round * 3 + again, bytes).expect("no error");
                assert!(bytes.iter().all(|byte| *byte == value), "{round} {again}");
            }
            let (handed_over, mapped) = counts(mesh, usize::from(is_root));
            assert!(handed_over <= 2 && mapped <= 2, "round {round}: {handed_over} and {mapped}");
        }
        // The last frame announced that the region before the last was freed.
        let mut plain = vec![7; REFERENCE_MIN_BYTES];
        broadcast(mesh, rounds * 3, &mut plain).expect("no error");
        assert_eq!(counts(mesh, usize::from(is_root)), (0, 0));
        assert_eq!(mappings(), 0, "of other ranks' regions");
    });
}

/// Return the number of mappings of regions that this process may only read.
fn mappings() -> usize {
    let maps = std::fs::read_to_string("/proc/self/maps").expect("a process has mappings");
    let is_of_this_test = |line: &&str| line.contains(" r--s ") && line.contains("sumac-region");
    // Other tests of this process map regions of their own, of other lengths.
    let len = |line: &str| {
        let (from, to) = line.split(' ').next()?.split_once('-')?;
        Some(u64::from_str_radix(to, 16).ok()? - u64::from_str_radix(from, 16).ok()?)
    };
    maps.lines().filter(is_of_this_test).filter(|line| len(line) == Some(REFERENCE_MIN_BYTES as u64)).count()
}

/// More regions than a peer maps: the rest goes as before.
#[test]
fn regions_beyond_the_limit_are_sent_as_before() {
    let mut meshes = connected_meshes(2);
    on_ranks(&mut meshes, |mesh| {
        let is_root = mesh.place().rank() == Rank(0);
        let mut all: Vec<_> =
            (0..REGIONS_MAX + 5).map(|_| Memory::new(mesh.exports(), REFERENCE_MIN_BYTES + 8192)).collect();
        for op_index in 0..2 * all.len() as u64 {
            let nth = op_index as usize % all.len();
            let bytes = all[nth].bytes();
            bytes.fill(if is_root { nth as u8 } else { 0xff });
            broadcast(mesh, op_index, bytes).expect("no error");
            assert!(bytes.iter().all(|byte| *byte == nth as u8), "{op_index}");
        }
        assert_eq!(counts(mesh, usize::from(is_root)), if is_root { (REGIONS_MAX, 0) } else { (0, REGIONS_MAX) });
    });
}

/// Severed memory is no longer what peers have mapped: what is sent from it afterwards is what it holds.
#[test]
fn severed_region_is_not_read_through_its_old_mapping() {
    let mut meshes = connected_meshes(2);
    on_ranks(&mut meshes, |mesh| {
        let is_root = mesh.place().rank() == Rank(0);
        let mut memory = Memory::new(mesh.exports(), 1 << 20);
        for op_index in 0..6_u64 {
            if op_index == 3 && is_root {
                memory._export.withdraw();
                let pages = 0..1 << 20;
                memory.region.lock().expect("no panic").sever(std::slice::from_ref(&pages)).expect("memory");
            }
            let bytes = memory.bytes();
            bytes.fill(if is_root { op_index as u8 } else { 0xff });
            broadcast(mesh, op_index, bytes).expect("no error");
            assert!(bytes.iter().all(|byte| *byte == op_index as u8), "{op_index}");
        }
        assert_eq!(counts(mesh, usize::from(is_root)), (0, 0));
    });
}

/// The ends of a channel, as two processes have them.
fn channels(name: &str) -> (MemoryChannel, MemoryChannel) {
    let name = format!("sumac-regions-{name}-{}", std::process::id());
    let listener = Listener::bind(&name).expect("a free name");
    let one = Connection::open(&name, Duration::from_secs(20)).expect("it listens");
    let other = listener.accept(Duration::from_secs(20)).expect("a connection").expect("it waits");
    (one.into_channel().0, other.into_channel().0)
}

fn reader_file(len_bytes: usize) -> OwnedFd {
    Region::create(len_bytes, Pages::Normal).expect("memory").reader_file().expect("a descriptor")
}

#[test]
fn memory_of_a_hostile_peer_is_not_mapped() {
    let unsealed = memfd_create("unsealed", MemfdFlags::CLOEXEC).expect("a descriptor");
    File::from(unsealed.try_clone().expect("a descriptor")).set_len(1 << 20).expect("memory");
    let file: OwnedFd = File::open("/proc/self/exe").expect("this program").into();
    for (nth, (handle, memory)) in
        [(1, unsealed), (1, file), (0, reader_file(4096)), (1 << 24, reader_file(4096)), (u64::MAX, reader_file(4096))]
            .into_iter()
            .enumerate()
    {
        let (peer, own) = channels(&format!("hostile{nth}"));
        let mut link = RegionLink::new(own, Arc::default());
        peer.hand_over(handle, memory.as_fd()).expect("there is room");
        assert_eq!((link.receive(), link.counts()), (0, (0, 0)), "{nth}");
        // Nor is anything that follows.
        peer.hand_over(1, reader_file(4096).as_fd()).expect("there is room");
        assert_eq!((link.receive(), link.counts()), (0, (0, 0)), "{nth}");
    }
}

#[test]
fn places_outside_of_mapped_memory_are_not_read() {
    let (peer, own) = channels("places");
    let mut link = RegionLink::new(own, Arc::default());
    for handle in [3, 5] {
        peer.hand_over(handle, reader_file(8192).as_fd()).expect("there is room");
    }
    assert_eq!(link.receive(), 5);
    let read = |link: &RegionLink, handle, offset_bytes, len: usize| {
        link.read(RegionPlace { handle, offset_bytes }, &mut vec![0; len])
    };
    assert!(read(&link, 3, 0, 8192) && read(&link, 5, 8191, 1));
    for (handle, offset_bytes, len) in
        [(3, 1, 8192), (3, 8192, 1), (3, u64::MAX, 1), (3, 1 << 39, 1), (0, 0, 1), (4, 0, 1), (6, 0, 1)]
    {
        assert!(!read(&link, handle, offset_bytes, len), "{len} bytes at {offset_bytes} of {handle}");
    }
    // A handle that was used is not taken again, even when its region is withdrawn.
    peer.withdraw(3).expect("there is room");
    assert_eq!(link.receive(), 5);
    assert!(!read(&link, 3, 0, 1) && read(&link, 5, 0, 1));
    peer.hand_over(3, reader_file(8192).as_fd()).expect("there is room");
    assert_eq!(link.receive(), 5);
    assert!(!read(&link, 3, 0, 1));
}

/// A peer hands over more than it may, and no end of messages: the rest is not mapped, and nobody is kept busy.
#[test]
fn flood_of_regions_is_cut() {
    let (peer, own) = channels("flood");
    let mut link = RegionLink::new(own, Arc::default());
    let memory = reader_file(4096);
    for handle in 1..=REGIONS_MAX as u64 + 1 {
        peer.hand_over(handle, memory.as_fd()).expect("there is room");
        link.receive();
    }
    assert_eq!(link.counts(), (0, REGIONS_MAX));
    let sent = (0..100_000).take_while(|handle| peer.withdraw(*handle).is_ok()).count();
    assert!(sent < 100_000, "the socket is full");
}

/// A frame that refers to memory that was not handed over, or beyond its end, is that of a lost rank.
#[test]
fn frame_with_a_wrong_place_is_a_lost_rank() {
    let len = 1_usize << 20;
    let places = [(1, 0), (1, 4096), (2, 0), (0, 0), (1 << 20, 0), (1, (1 << 40) - 4096)];
    for (nth, (handle, offset_bytes)) in places.into_iter().enumerate() {
        let mut meshes = connected_meshes(2);
        let mut memories = meshes.iter().map(|mesh| Memory::new(mesh.exports(), len)).collect::<Vec<_>>();
        // Rank 1 has mapped region 1 of rank 0 if the frame names a place beyond its end.
        if nth > 0 {
            for op_index in 0..3 {
                std::thread::scope(|scope| {
                    for (mesh, memory) in meshes.iter_mut().zip(&mut memories) {
                        scope.spawn(move || broadcast(mesh, op_index, memory.bytes()).expect("no error"));
                    }
                });
            }
            assert_eq!(counts(&meshes[1], 0), (0, 1));
        }
        let (mut hostile, mut mesh) = (meshes.remove(0), meshes.remove(0));
        let desc = OpDesc::broadcast(Dtype::U8, Rank(0), len as u64);
        let ctx = context(9, desc, Path::Binomial);
        let bare =
            Header::bare(FrameKind::MappedReference, Call::new(Rank(0), 9, ctx.signature, &desc, Path::Binomial), 0);
        let address = RegionPlace { handle, offset_bytes }.to_wire();
        let header = Header { len_bytes: len, transfer_bytes: len as u64, address, ..bare };
        assert_eq!(hostile.links[1].write(&header.emit(), &[]), IoOutcome::Bytes(HEADER_BYTES));
        drop(hostile);
        let result = broadcast(&mut mesh, 9, &mut vec![0; len]);
        assert_eq!(result, Err(ExecError::RankLost { rank: Rank(0) }), "{nth}");
    }
}

/// Rank 0 leaves while its reference is not taken, and frees the memory. Rank 1, which comes too late, gets the error,
/// and never success with what was written later.
#[test]
fn mapped_reference_that_was_withdrawn_is_an_error() {
    let len = 1 << 20;
    let mut meshes = connected_meshes(2);
    let (left, enters) = mpsc::channel();
    let enters = Mutex::new(enters);
    let results = on_ranks(&mut meshes, |mesh| {
        let mut memory = Memory::new(mesh.exports(), len);
        for op_index in 0..3 {
            broadcast(mesh, op_index, memory.bytes()).expect("no error");
        }
        if mesh.place().rank() == Rank(0) {
            assert_eq!(counts(mesh, 1), (1, 0));
            let desc = OpDesc::broadcast(Dtype::U8, Rank(0), len as u64);
            let mut ctx = context(3, desc, Path::Binomial);
            ctx.deadline = Instant::now() + Duration::from_millis(50);
            let schedule = binomial::broadcast(mesh.place(), len, Rank(0));
            let result = execute(mesh, &schedule, None, memory.bytes(), &ctx, &mut NoInterrupt);
            memory.bytes().fill(2);
            left.send(()).expect("rank 1 is there");
            return result;
        }
        enters.lock().expect("no panic").recv().expect("rank 0 is there");
        broadcast(mesh, 3, &mut vec![0; len])
    });
    let error = Err(ExecError::Deadline { op_index: 3, rank: Rank(0), peer: Rank(1) });
    assert_eq!(results, [error.clone(), error]);
}

/// A rank's process ends, and its mesh with it, while a peer has its reference: what was mapped stays readable, and the
/// rank is named as lost.
#[test]
fn rank_that_ends_with_a_mapped_reference_is_named() {
    let len = 1 << 20;
    let mut meshes = connected_meshes(2);
    let memories: Vec<_> = on_ranks(&mut meshes, |mesh| {
        let mut memory = Memory::new(mesh.exports(), len);
        for op_index in 0..3 {
            broadcast(mesh, op_index, memory.bytes()).expect("no error");
        }
        memory
    });
    let (mut gone, mut late) = (meshes.remove(0), meshes.remove(0));
    let desc = OpDesc::broadcast(Dtype::U8, Rank(0), len as u64);
    let call = Call::new(Rank(0), 3, context(3, desc, Path::Binomial).signature, &desc, Path::Binomial);
    let mut memories = memories.into_iter();
    let mut memory = memories.next().expect("that of rank 0");
    gone.links[1].begin_operation(4);
    assert_eq!(gone.links[1].write_transfer(&call, memory.bytes(), 0), IoOutcome::Bytes(0), "only the frame");
    assert!(gone.links[1].tx.reference.is_some());
    drop((gone, memory));
    let result = broadcast(&mut late, 3, &mut vec![0; len]);
    assert_eq!(result, Err(ExecError::RankLost { rank: Rank(0) }));
}

//! Whole communicators on a device in a thread, connected by a controller that knows one job and one device.

use super::device::{Behaviour, CHUNK, start};
use super::{EPOCH, GROUP};
use crate::comm::{Communicator, Error, JoinConfig, JoinError};
use crate::controller::proto::{ClientReply, ClientRequest, Membership, TreeMembership};
use crate::plan::Child;
use crate::select::{Algo, CostTable, TreeFacts};
use crate::transport::memory::Transfer;
use std::net::{SocketAddr, TcpListener, TcpStream};
use std::time::{Duration, Instant};
use sumac_hal::ctrl::{AttachPoint, DeviceUser, FrameReader, Hello, TimersConfig, send};
use sumac_hal::ids::{ChildIndex, Rank};
use sumac_hal::op::{Dtype, OpDesc, Path, ReduceOp};
use sumac_hal::port::Addr;
use sumac_hal::shm::AttachRefusal;

const PER_CHUNK: usize = CHUNK as usize / 4;

/// Start a controller of one job of `ranks` ranks, below the device that listens on `socket`.
fn controller(ranks: u32, socket: String) -> SocketAddr {
    let listener = TcpListener::bind("127.0.0.1:0").expect("a port");
    let addr = listener.local_addr().expect("bound");
    std::thread::spawn(move || {
        let mut joined: Vec<_> = (0..ranks).map(|_| accept_join(&listener)).collect();
        joined.sort_by_key(|(request, _)| request.rank);
        let mesh: Vec<_> = joined.iter().map(|(request, _)| request.mesh_addr).collect();
        let recovery_mesh: Vec<_> = joined.iter().map(|(request, _)| request.recovery_addr).collect();
        for (request, stream) in &mut joined {
            let membership = Membership {
                tree: Ok(tree(request.rank, &socket)),
                queue: None,
                striping: Default::default(),
                mesh: mesh.clone(),
                recovery_mesh: recovery_mesh.clone(),
                secret: crate::secret::JobSecret::new([1; 32]),
                expression: vec![(0..ranks).map(|rank| Child::Rank(Rank(rank))).collect()],
                table: CostTable::emulated(),
                shape: Default::default(),
            };
            send(stream, &ClientReply::Joined(Box::new(membership))).expect("a rank");
        }
        // Until all ranks have left.
        joined.iter_mut().for_each(|(_, stream)| _ = std::io::copy(stream, &mut std::io::sink()));
    });
    addr
}

fn accept_join(listener: &TcpListener) -> (crate::controller::proto::JoinRequest, TcpStream) {
    let (stream, _) = listener.accept().expect("a rank");
    let mut reader = FrameReader::new(stream.try_clone().expect("a descriptor"));
    assert!(matches!(reader.recv::<Hello>(), Ok(Hello::Client)));
    let Ok(ClientRequest::Join(request)) = reader.recv() else { panic!("a rank joins") };
    (request, stream)
}

fn tree(rank: Rank, socket: &str) -> TreeMembership {
    let facts = TreeFacts {
        levels: 1,
        max_children: 8,
        chunk_len_bytes: 1024,
        dtypes: u32::MAX,
        ops: u32::MAX,
        collectives: u32::MAX,
        zero_copy_ranks: 2,
        rdma_ranks: 0,
        over_verbs: false,
        shards: 1,
        links: None,
    };
    TreeMembership {
        group: GROUP,
        epoch: EPOCH,
        leaf: "leaf0".into(),
        host: None,
        child: ChildIndex(rank.0 as u16),
        key: 42,
        shared: None,
        parents: vec![Addr::Udp("127.0.0.1:9".parse().expect("an address"))],
        window_max: 32,
        window_start: 8,
        chunk_len_bytes: CHUNK,
        timers: TimersConfig { probe_min_us: 1000, probe_max_us: 1000, dead_us: 1_000_000 },
        facts,
        attach: Some(AttachPoint {
            machine: "here".try_into().expect("short"),
            socket: socket.try_into().expect("short"),
            user: DeviceUser::ROOT,
            redo_memory_bytes: 1 << 20,
            remote: None,
        }),
        packets_reason: None,
    }
}

fn config(controller: SocketAddr, rank: u32, ranks: u32) -> JoinConfig {
    JoinConfig { algo: Algo::Tree, recover: false, ..JoinConfig::new(controller, "test", rank, ranks) }
}

/// Run `program` at each rank of a job on such a device.
fn job(ranks: u32, behaviour: Behaviour, program: impl Fn(Communicator) + Sync) {
    job_within(Duration::from_secs(60), ranks, behaviour, program);
}

/// The same with a deadline for calls.
fn job_within(deadline: Duration, ranks: u32, behaviour: Behaviour, program: impl Fn(Communicator) + Sync) {
    let (socket, device) = start(ranks, behaviour);
    let controller = controller(ranks, socket);
    std::thread::scope(|scope| {
        for rank in 0..ranks {
            let program = &program;
            let config = JoinConfig { deadline, ..config(controller, rank, ranks) };
            scope.spawn(move || program(Communicator::join(config).expect("a member")));
        }
    });
    drop(device.join());
}

#[test]
fn calls_take_any_slice_and_report_the_transfer() {
    job(2, Behaviour::Honest, |comm| {
        let rank = comm.rank();
        let mut buffer = comm.alloc::<f32>(3000).expect("memory");
        assert!(buffer.is_registered() && buffer.iter().all(|&value| value == 0.0));
        buffer.fill(1.0 + rank as f32);
        let outcome = comm.all_reduce(&mut buffer[10..2900], ReduceOp::Sum).expect("a result");
        assert_eq!((outcome.path, outcome.transfer), (Path::Tree, Some(Transfer::ZeroCopy)));
        assert_eq!(outcome.wire_bytes, 2890 * 4, "what the device fetched");
        let inside = |at| (10..2900).contains(&at);
        assert!((0..3000).all(|at| buffer[at] == if inside(at) { 3.0 } else { 1.0 + rank as f32 }));

        // The device must not write to a page that holds other elements too.
        buffer[10..900].fill(1.0 + rank as f32);
        let outcome = comm.all_reduce(&mut buffer[10..900], ReduceOp::Sum).expect("a result");
        assert_eq!((outcome.path, outcome.transfer), (Path::Tree, Some(Transfer::Bounced)));
        assert!((0..3000).all(|at| buffer[at] == if inside(at) { 3.0 } else { 1.0 + rank as f32 }));

        let mut plain = vec![1.0 + rank as f32; 1000];
        let outcome = comm.all_reduce(&mut plain, ReduceOp::Sum).expect("a result");
        assert_eq!(outcome.transfer, Some(Transfer::Bounced));
        assert!(plain.iter().all(|&value| value == 3.0));

        // Blocks cross chunks.
        let input: Vec<i32> = (0..130).collect();
        let mut block = comm.alloc::<i32>(65).expect("memory");
        comm.reduce_scatter(&input, &mut block, ReduceOp::Sum).expect("a result");
        assert!(block.iter().zip(65 * rank as i32..).all(|(&value, at)| value == 2 * at));
        let mut all = comm.alloc::<i32>(130).expect("memory");
        comm.all_gather(&block, &mut all).expect("a result");
        assert!(all.iter().zip(0..).all(|(&value, at)| value == 2 * at));
        let mut value = vec![rank; 50];
        comm.broadcast(&mut value, 1).expect("a result");
        assert!(value.iter().all(|&value| value == 1));
        assert_eq!(comm.barrier().expect("all are there").transfer, Some(Transfer::ZeroCopy));
        comm.leave();
        assert_eq!(buffer[0], 1.0 + rank as f32, "memory outlives its communicator");
    });
}

/// Schedules read registered memory of ranks of one machine where it is, whatever is allocated and freed meanwhile.
#[test]
fn schedules_reduce_registered_memory_that_comes_and_goes() {
    job(2, Behaviour::Honest, |comm| {
        let options = crate::comm::CallOptions { algo: Some(Algo::Ring), ..Default::default() };
        for round in 0..20_usize {
            let mut buffer = comm.alloc::<i32>(100_000 + round).expect("memory");
            for again in 0..4 {
                let value = (round * 4 + again) as i32;
                buffer.iter_mut().zip(0..).for_each(|(element, at)| *element = value + at % 7);
                let outcome = comm.all_reduce_with(&mut buffer, ReduceOp::Sum, &options).expect("a result");
                assert_eq!(outcome.path, Path::Ring);
                assert!(buffer.iter().zip(0..).all(|(&found, at)| found == 2 * (value + at % 7)), "{round} {again}");
            }
            let mapped = comm.mapped_regions();
            assert!(mapped <= 2, "{mapped} regions of the other rank are mapped");
            assert!(mapped > 0 || round == 0, "nothing is mapped");
        }
        comm.leave();
    });
}

#[test]
fn started_operations_return_the_same_container() {
    job(2, Behaviour::Honest, |comm| {
        let started: Vec<_> = (0..20)
            .map(|k| {
                let mut buffer = comm.alloc::<i32>(100 + k).expect("memory");
                buffer.fill(k as i32);
                comm.start_all_reduce(buffer, ReduceOp::Sum).expect("started")
            })
            .collect();
        let scattered = comm.start_reduce_scatter(vec![1_i64; 100], ReduceOp::Sum).expect("started");
        for (k, handle) in started.into_iter().enumerate() {
            let (buffer, outcome) = handle.wait().expect("a result");
            assert!(buffer.is_registered() && outcome.transfer == Some(Transfer::ZeroCopy));
            assert!(buffer.len() == 100 + k && buffer.iter().all(|&value| value == 2 * k as i32));
        }
        assert_eq!(scattered.wait().expect("a result").0, vec![2_i64; 50]);
        // Never waited for: the communicator keeps the buffer. (A forgotten handle would keep the communicator too.)
        let buffer = comm.alloc::<i32>(64).expect("memory");
        drop(comm.start_all_reduce(buffer, ReduceOp::Sum).expect("started"));
        comm.barrier().expect("all are there");
        comm.leave();
    });
}

/// A deadline, and a cancellation: nothing is written after the call has returned.
#[test]
fn deadline_and_cancel_fence_before_returning() {
    for cancels in [false, true] {
        job(2, Behaviour::IgnoreData, |comm| {
            let canceller = comm.canceller();
            let mut buffer = comm.alloc::<f32>(10 * PER_CHUNK).expect("memory");
            let (limit, begun) = (Duration::from_millis(if cancels { 20_000 } else { 100 }), Instant::now());
            let options = crate::comm::CallOptions { deadline: Some(limit), ..Default::default() };
            let waits = Duration::from_millis(50);
            let error = std::thread::scope(|scope| {
                if cancels {
                    scope.spawn(move || {
                        std::thread::sleep(waits);
                        canceller.cancel();
                    });
                }
                comm.all_reduce_with(&mut buffer, ReduceOp::Sum, &options).expect_err("nobody answers")
            });
            match cancels {
                true => assert_eq!(error, Error::Cancelled),
                false => assert!(matches!(error, Error::Deadline { .. }), "{error}"),
            }
            assert!(begun.elapsed() < Duration::from_secs(15), "{:?}", begun.elapsed());
            assert!(buffer.iter().all(|&value| value == 0.0));
            assert!(matches!(comm.barrier(), Err(Error::Ended(_))));
            assert!(comm.alloc::<u8>(1).is_ok_and(|buffer| buffer[..] == [0]), "ordinary memory");
        });
    }
}

/// The device disconnects, and its process lives: memory is revoked, and published results are delivered.
#[test]
fn lost_device_is_named_and_chunks_are_whole() {
    job(2, Behaviour::Dying(7), |comm| {
        let old = 1.0 + comm.rank() as f32;
        let mut buffer = comm.alloc::<f32>(6 * PER_CHUNK).expect("memory");
        buffer.fill(old);
        let handle = comm.start_all_reduce(comm.alloc::<f32>(0).expect("none"), ReduceOp::Sum);
        drop(handle);
        let error = comm.all_reduce(&mut buffer, ReduceOp::Sum).expect_err("the device is gone");
        assert_eq!(error, Error::DeviceLost { device: "leaf0".into() });
        // The first chunk was the empty operation before.
        for (index, chunk) in buffer.chunks(PER_CHUNK).enumerate() {
            let expected = if index % 2 == 1 { 3.0 } else { old };
            assert!(chunk.iter().all(|&value| value == expected), "chunk {index}: {chunk:?}");
        }
    });
}

/// A polling loop ends, with the error that a wait would have returned.
#[test]
fn polling_ends_with_the_same_error_as_waiting() {
    let (long, short) = (Duration::from_secs(60), Duration::from_millis(100));
    let lost = Error::DeviceLost { device: "leaf0".into() };
    let desc = OpDesc::all_reduce(Dtype::F32, ReduceOp::Sum, 6 * PER_CHUNK as u64);
    let late = Error::Deadline { desc, waited: short };
    let cases = [
        (long, Behaviour::Dying(6), lost),
        (short, Behaviour::IgnoreData, late),
        (long, Behaviour::IgnoreData, Error::Cancelled),
    ];
    for (deadline, behaviour, expected) in cases {
        job_within(deadline, 2, behaviour, |comm| {
            let buffer = comm.alloc::<f32>(6 * PER_CHUNK).expect("memory");
            let mut handle = comm.start_all_reduce(buffer, ReduceOp::Sum).expect("started");
            if expected == Error::Cancelled {
                assert!(!handle.test(), "nobody answers");
                comm.canceller().cancel();
            }
            let begun = Instant::now();
            while !handle.test() {
                assert!(begun.elapsed() < Duration::from_secs(20), "still to come: {expected}");
                std::thread::yield_now();
            }
            let failed = handle.wait().expect_err("no result");
            assert_eq!(
                (failed.error, failed.buffer.map(|buffer| buffer.len())),
                (expected.clone(), Some(6 * PER_CHUNK))
            );
            assert!(matches!(comm.barrier(), Err(Error::Ended(_))));
        });
    }
}

#[test]
fn refused_attach_names_the_device_and_the_remedy() {
    let (socket, device) = start(1, Behaviour::RefuseAttach(AttachRefusal::NoMemory));
    let joined = Communicator::join(config(controller(1, socket), 0, 1));
    let error = joined.expect_err("refused");
    assert!(matches!(&error, JoinError::Attach { device, .. } if device == "leaf0"), "{error}");
    let text = error.to_string();
    assert!(text.contains("no memory for another function") && text.contains("transport: udp"), "{text}");
    drop(device.join());
}

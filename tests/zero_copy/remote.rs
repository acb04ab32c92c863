//! Ranks on other hosts than their device: the same rings and engine, connected by messages over an emulated link
//! (`sumac_hal::remote::Exchange`). `tests/rdma` tests the same over RDMA verbs.

use crate::call::{Arena, Call, Placement, leaf};
use crate::common::Cluster;
use crate::membership::shape;
use std::io::{ErrorKind, Read};
use std::net::{SocketAddr, TcpStream};
use std::sync::Barrier;
use std::time::Duration;
use sumac::controller::{ControllerConfig, status};
use sumac::{Algo, Collective, JoinConfig, OpDesc, Order, Path, ReduceOp, Transfer, Transport};
use sumac_firmware::emulated::ZeroCopyConfig;
use sumac_hal::ctrl::{FrameReader, send};
use sumac_hal::dma::Profile;
use sumac_hal::ids::{ChildIndex, GroupId, Rank};
use sumac_hal::op::Dtype;
use sumac_hal::remote::handshake::{AttachReply, AttachRequest, Challenge};
use sumac_hal::remote::{LINK_END_LEN_BYTES, LinkEnd};
use sumac_hal::shm::AttachRefusal;

fn over(exchange: &str) -> impl Fn(&mut JoinConfig) + Sync {
    let exchange = exchange.to_owned();
    move |config| {
        (config.algo, config.transport, config.verbs) = (Algo::Tree, Transport::Rdma, Some(exchange.clone()));
    }
}

/// Every collective, on one and two levels, with engines that combine and engines that only copy; from registered and
/// plain memory, in place and out of place. Each rank sends its bytes once.
#[test]
fn remote_zero_copy_collectives_give_exact_results() {
    let counts = [0, 1, 13, 2_000, 15_000];
    for (leaves, ranks, profile) in [(1, 3, Profile::Full), (2, 4, Profile::CopyOnly)] {
        let exchange = format!("exchange:remote-{leaves}");
        let bus = ZeroCopyConfig { profile, strict: true, ..ZeroCopyConfig::default() };
        let config =
            ControllerConfig { chunk_max_bytes: 4096, zero_copy_chunk_max_bytes: 4096, ..ControllerConfig::new() };
        let cluster = Cluster::start_remote(leaves, ranks / leaves, (bus, &exchange), config);
        let shape = if leaves == 1 { leaf(0..ranks) } else { shape(&cluster, ranks as u32, Order::Arrival) };
        let order = Order::Arrival;
        let kinds = [Collective::AllReduce, Collective::Reduce, Collective::ReduceScatter];
        let moved = [Collective::Broadcast, Collective::AllGather, Collective::Barrier];
        let combine = kinds.into_iter().flat_map(|collective| {
            let desc = |(dtype, op)| OpDesc { collective, dtype: Some(dtype), op: Some(op), ..OpDesc::barrier() };
            [(Dtype::F32, ReduceOp::Sum), (Dtype::Bf16, ReduceOp::Max), (Dtype::I64, ReduceOp::Prod)].map(desc)
        });
        let moved = moved.map(|collective| {
            let dtype = (collective != Collective::Barrier).then_some(Dtype::F64);
            OpDesc { collective, dtype, op: None, ..OpDesc::barrier() }
        });
        let descs: Vec<OpDesc> = combine.chain(moved).collect();
        let calls: Vec<Call> = (0..)
            .zip(descs.iter().flat_map(|desc| counts.map(|count| (desc, count))))
            .filter(|(_, (desc, count))| desc.dtype.is_some() || *count == 0)
            .map(|(seed, (desc, count))| {
                let root = Rank(seed as u32 % ranks as u32);
                Call::new(OpDesc { count, root, ..*desc }, (&shape, ranks, order), seed)
            })
            .collect();
        cluster.run("far", ranks as u32, over(&exchange), |comm| {
            let (rank, mut arena) = (comm.rank() as usize, Arena::new(&comm));
            for call in &calls {
                let placement = Placement::draw(call, rank);
                let outcome = arena.call(&comm, call, placement).unwrap_or_else(|why| panic!("{:?}: {why}", call.desc));
                let sent = (call.given(rank).len() * call.desc.element_bytes()) as u64;
                assert_eq!(
                    (outcome.path, outcome.wire_bytes, outcome.retransmits),
                    (Path::Tree, sent, 0),
                    "{:?}",
                    call.desc
                );
            }
            // Results are copied out of a landing buffer: a remote device never writes to the caller's memory.
            let desc = OpDesc::all_reduce(Dtype::F32, ReduceOp::Sum, 1000);
            let call = Call::new(desc, (&shape, ranks, order), 7);
            let outcome = arena.call(&comm, &call, Placement::of(true, true)).expect("a sum");
            assert_eq!(outcome.transfer, Some(Transfer::Bounced));
            comm.leave();
        });
        drop(cluster);
    }
}

/// Allocate, use and drop registered buffers repeatedly.
#[test]
fn remote_memory_is_reused_while_operations_overlap() {
    let exchange = "exchange:remote-in-flight";
    let config = ControllerConfig { zero_copy_chunk_max_bytes: 4096, ..ControllerConfig::new() };
    let cluster = Cluster::start_remote(1, 2, (ZeroCopyConfig::default(), exchange), config);
    cluster.run("flight", 2, over(exchange), |comm| {
        for round in 0..300_u64 {
            let buffers: Vec<_> = (0..3_u64)
                .map(|nth| {
                    let mut buffer = comm.alloc::<u64>(3000).expect("memory");
                    buffer.fill(round * 10 + nth);
                    buffer
                })
                .collect();
            for (nth, mut buffer) in (0..).zip(buffers) {
                comm.all_reduce(&mut buffer, ReduceOp::Sum).expect("a sum");
                assert!(buffer.iter().all(|&x| x == 2 * (round * 10 + nth)), "round {round}");
            }
        }
        comm.leave();
    });
}

/// Return the address at which a device accepts remote ranks.
fn attach_addr(cluster: &Cluster) -> SocketAddr {
    let report = status(cluster.controller.local_addr()).expect("a report");
    report.devices[0].attach.as_ref().and_then(|bus| bus.remote).expect("the device accepts remote ranks")
}

/// An attach without the child's key is refused, reveals nothing, and does not block the rank that has the key.
#[test]
fn remote_attach_without_the_key_is_refused() {
    let exchange = "exchange:remote-attach";
    let cluster = Cluster::start_remote(1, 2, (ZeroCopyConfig::default(), exchange), ControllerConfig::new());
    let gate = Barrier::new(2);
    cluster.run("attach", 2, over(exchange), |comm| {
        if comm.rank() == 0 {
            let limit = Some(Duration::from_secs(20));
            let end = LinkEnd([0; LINK_END_LEN_BYTES]);
            for child in [0, 1, 7] {
                let mut stream = TcpStream::connect(attach_addr(&cluster)).expect("it listens");
                stream.set_read_timeout(limit).expect("a timeout");
                let mut reader = FrameReader::new(stream.try_clone().expect("a descriptor"));
                let challenge: Challenge = reader.recv().expect("a challenge");
                // All public values are correct; the key is not.
                let group = GroupId(1);
                let hello = AttachRequest::new(group, ChildIndex(child), [1; 16], end).prove(42, &challenge);
                send(&mut stream, &hello).expect("it is open");
                let answer: AttachReply = reader.recv().expect("an answer");
                assert_eq!(answer, AttachReply::Refused(AttachRefusal::UnknownChild), "child {child}");
            }
            let mut http = TcpStream::connect(attach_addr(&cluster)).expect("it listens");
            http.set_read_timeout(limit).expect("a timeout");
            std::io::Write::write_all(&mut http, b"GET / HTTP/1.1\r\n\r\n").expect("it is open");
            let mut rest = Vec::new();
            let ended = http.read_to_end(&mut rest);
            assert!(ended.is_ok() || ended.is_err_and(|error| error.kind() == ErrorKind::ConnectionReset));
        }
        gate.wait();
        let mut values = [comm.rank() + 1; 100];
        comm.all_reduce(&mut values, ReduceOp::Sum).expect("both ranks attached");
        assert_eq!(values, [3; 100]);
        comm.leave();
    });
}

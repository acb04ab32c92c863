//! Ranks on other hosts than their devices: the same rings and the same engine, with messages between them, over the double of
//! a link (`sumac_hal::remote::Exchange`). What the hardware adds is in `tests/rdma`.

use crate::calls::{Arena, Call, Way, leaf};
use crate::common::Cluster;
use crate::seats::shape;
use std::io::{ErrorKind, Read};
use std::net::{SocketAddr, TcpStream};
use std::sync::Barrier;
use std::time::Duration;
use sumac::controller::{ControllerConfig, status};
use sumac::{Algo, Attach, Collective, JoinConfig, OpDesc, Order, Path, ReduceOp, Transfer};
use sumac_firmware::emulated::BusConfig;
use sumac_hal::ctrl::{FrameReader, send};
use sumac_hal::dma::Profile;
use sumac_hal::ids::{ChildIndex, GroupId, Rank};
use sumac_hal::op::Dtype;
use sumac_hal::remote::handshake::{Answer, Call as Hello, Challenge};
use sumac_hal::remote::{LINK_END_LEN_BYTES, LinkEnd};
use sumac_hal::shm::AttachRefusal;

fn over(exchange: &str) -> impl Fn(&mut JoinConfig) + Sync {
    let exchange = exchange.to_owned();
    move |config| {
        (config.algo, config.attach, config.verbs) = (Algo::Tree, Attach::Rdma, Some(exchange.clone()));
    }
}

/// Every collective, through one device and through two levels, with engines that combine and that only copy; from memory that
/// is registered and that is not, in place and not. A rank's bytes leave it once.
#[test]
fn every_collective_from_other_hosts() {
    let counts = [0, 1, 13, 2_000, 15_000];
    for (leaves, ranks, profile) in [(1, 3, Profile::Full), (2, 4, Profile::CopyOnly)] {
        let exchange = format!("exchange:far-{leaves}");
        let bus = BusConfig { profile, strict: true, ..BusConfig::default() };
        let config =
            ControllerConfig { chunk_max_bytes: 4096, reference_chunk_max_bytes: 4096, ..ControllerConfig::new() };
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
                let way = Way::draw(call, rank);
                let outcome = arena.call(&comm, call, way).unwrap_or_else(|why| panic!("{:?}: {why}", call.desc));
                let sent = (call.given(rank).len() * call.desc.element_bytes()) as u64;
                assert_eq!(
                    (outcome.path, outcome.wire_bytes, outcome.retransmits),
                    (Path::Tree, sent, 0),
                    "{:?}",
                    call.desc
                );
            }
            // What lands is copied out, so that the caller's memory is never written from afar.
            let desc = OpDesc::all_reduce(Dtype::F32, ReduceOp::Sum, 1000);
            let call = Call::new(desc, (&shape, ranks, order), 7);
            let outcome = arena.call(&comm, &call, Way::of(true, true)).expect("a sum");
            assert_eq!(outcome.transfer, Some(Transfer::Bounced));
            comm.leave();
        });
        drop(cluster);
    }
}

/// Operations in flight at once, and buffers that come and go.
#[test]
fn memory_comes_and_goes_and_operations_overlap() {
    let exchange = "exchange:far-flight";
    let config = ControllerConfig { reference_chunk_max_bytes: 4096, ..ControllerConfig::new() };
    let cluster = Cluster::start_remote(1, 2, (BusConfig::default(), exchange), config);
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

/// Where a device lets ranks of other hosts in.
fn door(cluster: &Cluster) -> SocketAddr {
    let report = status(cluster.controller.local_addr()).expect("a report");
    report.devices[0].bus.as_ref().and_then(|bus| bus.remote).expect("it has an engine for them")
}

/// Who has no key gets no seat, takes none from who has, and is told nothing that would help.
#[test]
fn strangers_are_not_let_in() {
    let exchange = "exchange:far-strangers";
    let cluster = Cluster::start_remote(1, 2, (BusConfig::default(), exchange), ControllerConfig::new());
    let gate = Barrier::new(2);
    cluster.run("strangers", 2, over(exchange), |comm| {
        if comm.rank() == 0 {
            let limit = Some(Duration::from_secs(20));
            let end = LinkEnd([0; LINK_END_LEN_BYTES]);
            for child in [0, 1, 7] {
                let mut stream = TcpStream::connect(door(&cluster)).expect("it listens");
                stream.set_read_timeout(limit).expect("a timeout");
                let mut reader = FrameReader::new(stream.try_clone().expect("a descriptor"));
                let challenge: Challenge = reader.recv().expect("a challenge");
                // With all that can be seen, and a key that is not this child's.
                let group = GroupId(1);
                let hello = Hello::new(group, ChildIndex(child), [1; 16], end).prove(42, &challenge);
                send(&mut stream, &hello).expect("it is open");
                let answer: Answer = reader.recv().expect("an answer");
                assert_eq!(answer, Answer::Refused(AttachRefusal::Stranger), "child {child}");
            }
            let mut rude = TcpStream::connect(door(&cluster)).expect("it listens");
            rude.set_read_timeout(limit).expect("a timeout");
            std::io::Write::write_all(&mut rude, b"GET / HTTP/1.1\r\n\r\n").expect("it is open");
            let mut rest = Vec::new();
            let ended = rude.read_to_end(&mut rest);
            assert!(ended.is_ok() || ended.is_err_and(|error| error.kind() == ErrorKind::ConnectionReset));
        }
        gate.wait();
        let mut values = [comm.rank() + 1; 100];
        comm.all_reduce(&mut values, ReduceOp::Sum).expect("nobody else is there");
        assert_eq!(values, [3; 100]);
        comm.leave();
    });
}

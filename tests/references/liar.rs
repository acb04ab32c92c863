//! A rank on another host that lies about its memory: it is out, and nobody else is told that the operation can't be.

use crate::common::Cluster;
use std::net::TcpStream;
use std::time::{Duration, Instant};
use sumac::controller::proto::{JoinRequest, Terms, TreeMembership};
use sumac::controller::{ControllerConfig, Session};
use sumac::{Attach, Collective, Dtype, Order, ReduceOp};
use sumac_firmware::emulated::BusConfig;
use sumac_hal::ctrl::{FrameReader, send};
use sumac_hal::dma::{Address, Capabilities, Profile, RegionKey};
use sumac_hal::ids::{BootId, ChunkNo, Rank};
use sumac_hal::mmio::{
    AdminCommand, COMPLETION_WORDS, CompletionEntry, Contribution, EntryStatus, Features, FunctionConfig,
    SUBMISSION_WORDS, SubmissionEntry,
};
use sumac_hal::remote::handshake::{Answer, Call, Challenge};
use sumac_hal::remote::{Access, Carrier, CarrierError, Exchange, ExchangeLink, Memory, RankLink};
use sumac_hal::ring::{Consumer, Producer};
use sumac_hal::shm::{DeviceUsers, Function, FunctionRing, Pages, Region};

const LONG: Duration = Duration::from_secs(20);
const EXCHANGE: &str = "exchange:liar";
const DEPTH: u32 = 64;

/// Bytes of each rank's memory.
const LEN: usize = 64 << 10;

/// A rank, driven by hand.
struct Hand {
    tree: TreeMembership,
    link: ExchangeLink,
    carrier: Carrier<SUBMISSION_WORDS, COMPLETION_WORDS>,
    to: [Producer<FunctionRing<SUBMISSION_WORDS>, SUBMISSION_WORDS>; 2],
    from: [Consumer<FunctionRing<COMPLETION_WORDS>, COMPLETION_WORDS>; 2],
    _session: Session,
    _stream: TcpStream,
    _function: Function,
}

impl Hand {
    fn attach(cluster: &Cluster, rank: u32) -> Self {
        let request = JoinRequest {
            job: "liar".into(),
            rank: Rank(rank),
            world: 2,
            host: None,
            order: Order::TreeFold,
            mesh_addr: ([127, 0, 0, 1], 9).into(),
            repair_addr: ([127, 0, 0, 1], 9).into(),
            max_packet_len_bytes: 65_000,
            attach: Attach::Rdma,
            machine: None,
            device_users: DeviceUsers::own(),
            terms: Terms::default(),
        };
        let joined = Session::join(cluster.controller.local_addr(), request, LONG, |_| None).expect("join");
        let (session, membership) = joined;
        let tree = membership.tree.expect("a tree");
        let mut link = Exchange::named(EXCHANGE).expect("a name of one").rank_link().expect("an end");
        let door = tree.bus.as_ref().and_then(|bus| bus.remote).expect("it takes ranks of other hosts");
        let mut stream = TcpStream::connect(door).expect("it listens");
        let mut reader = FrameReader::new(stream.try_clone().expect("a descriptor"));
        let challenge: Challenge = reader.recv().expect("a challenge");
        let call = Call::new(tree.group, tree.child, [9; 16], link.end()).prove(tree.key, &challenge);
        send(&mut stream, &call).expect("it is open");
        let Answer::Seat(seat) = reader.recv().expect("an answer") else { panic!("refused") };
        assert!(seat.is_proven(tree.key, (&challenge, &call)));
        link.connect(&seat.end).expect("it is there");
        let dma = Capabilities::new(Profile::CopyOnly, 1, 1);
        let config = FunctionConfig { boot_id: BootId(1), features: Features::all(), queues: 2, depth: DEPTH, dma };
        let function = Function::create(&config).expect("memory");
        let queues = [0, 1].map(|index| function.queue(index).expect("two"));
        let submissions = queues.each_ref().map(|queue| queue.submissions.clone());
        let completions = queues.each_ref().map(|queue| queue.completions.clone());
        Self {
            tree,
            link,
            to: submissions.clone().map(Producer::new),
            from: completions.clone().map(Consumer::new),
            carrier: Carrier::new(submissions, completions),
            _session: session,
            _stream: stream,
            _function: function,
        }
    }

    /// Wait for a completion, at most so long.
    fn completion(&mut self, queue: usize, limit: Duration) -> Result<Option<CompletionEntry>, CarrierError> {
        let begun = Instant::now();
        loop {
            let turned = self.carrier.turn(&mut self.link, |_| {});
            if let Some(words) = self.from[queue].pop().expect("whole") {
                return Ok(Some(CompletionEntry::parse(&words).expect("an entry")));
            }
            turned?;
            if begun.elapsed() > limit {
                return Ok(None);
            }
            std::thread::yield_now();
        }
    }

    /// Register memory, which is perhaps shorter than is said.
    fn register(&mut self, handle: u64, (len_bytes, said): (usize, u64), access: Access) -> RegionKey {
        let memory = Region::create(len_bytes, Pages::Normal).expect("memory");
        let mut region = self.link.expose(memory, access).expect("memory");
        region.len_bytes = said;
        self.carrier.hand_over(Memory { handle, region, lands: access == Access::Land });
        let command = AdminCommand::Register { handle, offset_bytes: 0, len_bytes: said };
        assert_eq!(self.to[0].push(&SubmissionEntry::Admin { cookie: handle, command }.emit()), Ok(true));
        match self.completion(0, LONG) {
            Ok(Some(CompletionEntry::Admin { status: EntryStatus::Result, value, .. })) => {
                RegionKey::from_bits(value).expect("a key")
            }
            other => panic!("{other:?}"),
        }
    }

    /// Contribute a chunk from here, to be landed there.
    fn contribute(&mut self, src: (RegionKey, u64), dst: (RegionKey, u64)) {
        let at = |(region, offset_bytes)| Some(Address { region, offset_bytes });
        let entry = Contribution {
            group: self.tree.group,
            epoch: self.tree.epoch,
            seq: ChunkNo(0),
            count: 1,
            elements: 64,
            lag: 0,
            collective: Collective::AllReduce,
            dtype: Some(Dtype::F32),
            op: Some(ReduceOp::Sum),
            root: Rank(0),
            total: 0,
            signature: 1,
            src: at(src),
            dst: at(dst),
        };
        assert_eq!(self.to[1].push(&SubmissionEntry::Contribution(entry).emit()), Ok(true));
        assert_eq!(self.carrier.turn(&mut self.link, |_| {}), Ok(true), "it leaves");
    }
}

/// Its own hardware refuses what the device reads beyond its memory, which ends its link. The other rank's chunk waits for it:
/// an answer that the operation is not to be had would be the end of a communicator that could be repaired.
#[test]
fn a_rank_that_lies_about_its_memory_is_out_alone() {
    let cluster = Cluster::start_remote(1, 2, (BusConfig::default(), EXCHANGE), ControllerConfig::new());
    let (mut honest, mut liar) = std::thread::scope(|scope| {
        let liar = scope.spawn(|| Hand::attach(&cluster, 1));
        (Hand::attach(&cluster, 0), liar.join().expect("attached"))
    });
    let truth = (LEN, LEN as u64);
    let (input, landing) = (honest.register(1, truth, Access::Read), honest.register(2, truth, Access::Land));
    let lie = liar.register(1, (LEN, 1 << 30), Access::Read);
    let place = liar.register(2, truth, Access::Land);
    honest.contribute((input, 0), (landing, 0));
    liar.contribute((lie, 1 << 29), (place, 0));
    let ended = liar.completion(1, LONG);
    assert!(matches!(ended, Err(CarrierError::Link(_))), "{ended:?}");
    assert_eq!(honest.completion(1, Duration::from_millis(500)), Ok(None), "nobody else is told anything");
}

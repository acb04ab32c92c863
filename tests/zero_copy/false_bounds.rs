//! A remote rank that announces more memory than it has loses its own link; the other ranks see no error.

use crate::common::Cluster;
use std::net::TcpStream;
use std::time::{Duration, Instant};
use sumac::controller::proto::{JoinRequest, Terms, TreeMembership};
use sumac::controller::{ControllerConfig, Session};
use sumac::{Collective, Dtype, Order, ReduceOp, Transport};
use sumac_firmware::emulated::ZeroCopyConfig;
use sumac_hal::ctrl::{FrameReader, send};
use sumac_hal::dma::{Address, Capabilities, Profile, RegionKey};
use sumac_hal::ids::{BootId, ChunkNo, Rank};
use sumac_hal::mmio::{
    AdminCommand, COMPLETION_WORDS, CompletionEntry, Contribution, EntryStatus, Features, FunctionConfig,
    SUBMISSION_WORDS, SubmissionEntry,
};
use sumac_hal::remote::handshake::{AttachReply, AttachRequest, Challenge};
use sumac_hal::remote::{Access, Carrier, CarrierError, Exchange, ExchangeLink, Memory, RankLink};
use sumac_hal::ring::{Consumer, Producer};
use sumac_hal::shm::{DeviceUsers, Function, FunctionRing, Pages, Region};

const LONG: Duration = Duration::from_secs(20);
const EXCHANGE: &str = "exchange:false-bounds";
const DEPTH: u32 = 64;

/// The length of each rank's memory, in bytes.
const LEN: usize = 64 << 10;

/// A rank without a communicator: the test writes its ring entries.
struct RawRank {
    tree: TreeMembership,
    link: ExchangeLink,
    carrier: Carrier<SUBMISSION_WORDS, COMPLETION_WORDS>,
    to: [Producer<FunctionRing<SUBMISSION_WORDS>, SUBMISSION_WORDS>; 2],
    from: [Consumer<FunctionRing<COMPLETION_WORDS>, COMPLETION_WORDS>; 2],
    _session: Session,
    _stream: TcpStream,
    _function: Function,
}

impl RawRank {
    fn attach(cluster: &Cluster, rank: u32) -> Self {
        let request = JoinRequest {
            job: "liar".into(),
            rank: Rank(rank),
            world: 2,
            host: None,
            order: Order::TreeFold,
            mesh_addr: ([127, 0, 0, 1], 9).into(),
            recovery_addr: ([127, 0, 0, 1], 9).into(),
            max_packet_len_bytes: 65_000,
            transport: Transport::Rdma,
            machine: None,
            device_users: DeviceUsers::own(),
            terms: Terms::default(),
        };
        let joined = Session::join(cluster.controller.local_addr(), request, LONG, |_| None).expect("join");
        let (session, membership) = joined;
        let tree = membership.tree.expect("a tree");
        let mut link = Exchange::named(EXCHANGE).expect("a name of one").rank_link().expect("an end");
        let attach_addr = tree.attach.as_ref().and_then(|bus| bus.remote).expect("the device accepts remote ranks");
        let mut stream = TcpStream::connect(attach_addr).expect("it listens");
        let mut reader = FrameReader::new(stream.try_clone().expect("a descriptor"));
        let challenge: Challenge = reader.recv().expect("a challenge");
        let request = AttachRequest::new(tree.group, tree.child, [9; 16], link.end()).prove(tree.key, &challenge);
        send(&mut stream, &request).expect("it is open");
        let AttachReply::Accepted(accepted) = reader.recv().expect("an answer") else { panic!("refused") };
        assert!(accepted.is_proven(tree.key, (&challenge, &request)));
        link.connect(&accepted.end).expect("it is there");
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

    /// Wait for a completion; return `None` after `limit`.
    fn completion(&mut self, queue: usize, limit: Duration) -> Result<Option<CompletionEntry>, CarrierError> {
        let begun = Instant::now();
        loop {
            let turned = self.carrier.poll(&mut self.link, |_| {});
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

    /// Register `len_bytes` bytes of memory, announced as `announced` bytes.
    fn register(&mut self, handle: u64, (len_bytes, announced): (usize, u64), access: Access) -> RegionKey {
        let memory = Region::create(len_bytes, Pages::Normal).expect("memory");
        let mut region = self.link.expose(memory, access).expect("memory");
        region.len_bytes = announced;
        self.carrier.hand_over(Memory { handle, region, lands: access == Access::Land });
        let command = AdminCommand::Register { handle, offset_bytes: 0, len_bytes: announced };
        assert_eq!(self.to[0].push(&SubmissionEntry::Admin { cookie: handle, command }.emit()), Ok(true));
        match self.completion(0, LONG) {
            Ok(Some(CompletionEntry::Admin { status: EntryStatus::Result, value, .. })) => {
                RegionKey::from_bits(value).expect("a key")
            }
            other => panic!("{other:?}"),
        }
    }

    /// Contribute the chunk at `src`; its result is written to `dst`.
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
        assert_eq!(self.carrier.poll(&mut self.link, |_| {}), Ok(true), "it leaves");
    }
}

/// The rank's own hardware refuses the device's read beyond its memory, which ends its link. The other rank's chunk
/// stays pending: an error reply would end a communicator that can still recover.
#[test]
fn rank_with_false_memory_bounds_fails_alone() {
    let cluster = Cluster::start_remote(1, 2, (ZeroCopyConfig::default(), EXCHANGE), ControllerConfig::new());
    let (mut honest, mut liar) = std::thread::scope(|scope| {
        let liar = scope.spawn(|| RawRank::attach(&cluster, 1));
        (RawRank::attach(&cluster, 0), liar.join().expect("attached"))
    });
    let actual = (LEN, LEN as u64);
    let (input, landing) = (honest.register(1, actual, Access::Read), honest.register(2, actual, Access::Land));
    let short = liar.register(1, (LEN, 1 << 30), Access::Read);
    let landing_zone = liar.register(2, actual, Access::Land);
    honest.contribute((input, 0), (landing, 0));
    liar.contribute((short, 1 << 29), (landing_zone, 0));
    let ended = liar.completion(1, LONG);
    assert!(matches!(ended, Err(CarrierError::Link(_))), "{ended:?}");
    assert_eq!(honest.completion(1, Duration::from_millis(500)), Ok(None), "the honest rank gets no completion");
}

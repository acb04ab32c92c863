//! A cluster in one process: the production controller, boards and communicators, over real sockets.

use std::net::SocketAddr;
use std::thread;
use std::time::{Duration, Instant};
use sumac::controller::{Controller, ControllerConfig};
use sumac::select::CostTable;
use sumac::topo::{Fabric, LeafSpine};
use sumac::{Communicator, JoinConfig, Outcome, Path, ReduceOp, Transport};
use sumac_firmware::emulated::{Board, BoardConfig, ZeroCopyConfig};

#[allow(dead_code)]
/// A controller by whose costs `auto` takes the tree where there is one, also where all ranks are in one process.
pub(crate) fn prefer_tree() -> ControllerConfig {
    let table = CostTable::emulated().with_overrides("[[override]]\npath = \"tree\"\n").expect("an override file");
    ControllerConfig { table, ..ControllerConfig::new() }
}

/// A controller and its boards.
pub(crate) struct Cluster {
    pub(crate) controller: Controller,
    // Keeps the boards running; some tests stop one.
    #[allow(dead_code)]
    pub(crate) boards: Vec<Board>,
}

impl Cluster {
    #[allow(dead_code)]
    /// Start a leaf-spine fabric of `leaves` devices with `hosts` hosts each, whose trees `auto` prefers.
    pub(crate) fn start(leaves: usize, hosts: usize) -> Self {
        Self::start_with(leaves, hosts, 1, prefer_tree())
    }

    #[allow(dead_code)]
    /// Start a cluster of devices with `shards` shards; `config` applies except for its fabric.
    pub(crate) fn start_with(leaves: usize, hosts: usize, shards: u16, config: ControllerConfig) -> Self {
        Self::start_with_boards(leaves, hosts, config, |board| board.shards = shards)
    }

    #[allow(dead_code)]
    /// Start a cluster of devices with one shard each that offer zero-copy as `bus` configures it.
    pub(crate) fn start_zero_copy(leaves: usize, hosts: usize, bus: ZeroCopyConfig, config: ControllerConfig) -> Self {
        Self::start_with_boards(leaves, hosts, config, |board| board.zero_copy = Some(bus))
    }

    #[allow(dead_code)]
    /// Start a cluster whose devices reach ranks on other hosts over emulated links, which `exchange` connects.
    pub(crate) fn start_remote(
        leaves: usize,
        hosts: usize,
        (bus, exchange): (ZeroCopyConfig, &str),
        config: ControllerConfig,
    ) -> Self {
        Self::start_with_boards(leaves, hosts, config, |board| {
            (board.zero_copy, board.rdma) = (Some(bus), Some(exchange.into()));
        })
    }

    #[allow(dead_code)]
    /// Start zero-copy devices without a fabric: each can serve any job.
    pub(crate) fn spare(devices: usize, config: ControllerConfig) -> Self {
        let controller = Controller::start(config).expect("a controller on loopback");
        let configure = |board: &mut BoardConfig| board.zero_copy = Some(ZeroCopyConfig::default());
        let names = (0..devices).map(|nth| format!("spare{nth}"));
        let boards = names.map(|name| board(name, controller.local_addr(), configure)).collect();
        Self { controller, boards }
    }

    #[allow(dead_code)]
    /// Start a device like those of [`Cluster::spare`]; the name may be that of a device that was stopped.
    pub(crate) fn start_spare_board(&self, name: &str) -> Board {
        let configure = |board: &mut BoardConfig| board.zero_copy = Some(ZeroCopyConfig::default());
        board(name.into(), self.controller.local_addr(), configure)
    }

    fn start_with_boards(
        leaves: usize,
        hosts: usize,
        config: ControllerConfig,
        configure: impl Fn(&mut BoardConfig),
    ) -> Self {
        let spines = usize::from(leaves > 1);
        let fabric = Fabric::leaf_spine(LeafSpine { leaves, spines, hosts_per_leaf: hosts, cables: 1, rate: None });
        Self::start_on(fabric.expect("a valid shape"), config, configure)
    }

    #[allow(dead_code)]
    /// Start a fabric with a device at each place that it has for one.
    pub(crate) fn on(fabric: Fabric, config: ControllerConfig) -> Self {
        Self::start_on(fabric, config, |_| {})
    }

    fn start_on(fabric: Fabric, config: ControllerConfig, configure: impl Fn(&mut BoardConfig)) -> Self {
        let places = fabric.switches().iter().filter(|switch| switch.aggregation.is_some());
        let names: Vec<String> = places.map(|switch| switch.name.clone()).collect();
        let config = ControllerConfig { fabric: Some(fabric), ..config };
        let controller = Controller::start(config).expect("a controller on loopback");
        let boards = names.into_iter().map(|name| board(name, controller.local_addr(), &configure)).collect();
        Self { controller, boards }
    }

    #[allow(dead_code)]
    /// Run `rank` on one thread per rank of a job; return the results in the order of ranks.
    pub(crate) fn run<R: Send>(
        &self,
        job: &str,
        world: u32,
        configure: impl Fn(&mut JoinConfig) + Sync,
        rank: impl Fn(Communicator) -> R + Sync,
    ) -> Vec<R> {
        let addr = self.controller.local_addr();
        let run = |number| {
            let mut config = JoinConfig::new(addr, job_name(job), number, world);
            config.join_timeout = Duration::from_secs(20);
            configure(&mut config);
            rank(Communicator::join(config).expect("join"))
        };
        thread::scope(|scope| {
            let ranks: Vec<_> = (0..world).map(|number| scope.spawn(move || run(number))).collect();
            ranks.into_iter().map(|rank| rank.join().expect("a rank panicked")).collect()
        })
    }
}

/// Turn the name of a test case into a valid job name.
#[allow(dead_code)]
pub(crate) fn job_name(case: &str) -> String {
    case.replace(|c: char| !c.is_ascii_alphanumeric(), "-")
}

/// Start a board and wait until it is registered with the controller.
fn board(name: String, controller: SocketAddr, configure: impl Fn(&mut BoardConfig)) -> Board {
    let mut config = BoardConfig { slot_memory_bytes: 16 << 20, ..BoardConfig::new(name, controller) };
    configure(&mut config);
    let board = Board::start(config).expect("a board on loopback");
    assert!(board.wait_registered(Duration::from_secs(20)), "the board is not registered within 20 s");
    board
}

/// Join over UDP, even where zero-copy is possible.
#[allow(dead_code)]
pub(crate) fn over_udp(config: &mut JoinConfig) {
    config.transport = Transport::Udp;
}

/// Join with the default configuration.
#[allow(dead_code)]
pub(crate) fn plain(_: &mut JoinConfig) {}

/// Number of elements of [`checked_sum`].
#[allow(dead_code)]
pub(crate) const SUM_LEN: usize = 3000;

/// Run an all-reduce whose values depend on `op` and the rank, and check every element.
#[allow(dead_code)]
pub(crate) fn checked_sum(comm: &Communicator, op: u64) -> Outcome {
    let mut buffer: Vec<u64> = (0..SUM_LEN as u64).map(|i| op * i + u64::from(comm.rank())).collect();
    let outcome = comm.all_reduce(&mut buffer, ReduceOp::Sum).expect("a sum");
    let ranks = u64::from(comm.size());
    let sum = |i: u64| ranks * op * i + ranks * (ranks - 1) / 2;
    assert!((0..).zip(&buffer).all(|(i, &x)| x == sum(i)), "operation {op}");
    outcome
}

/// Run [`checked_sum`] until an operation uses `path`, at most for `limit`; return its number.
#[allow(dead_code)]
pub(crate) fn sum_until(comm: &Communicator, op: &mut u64, path: Path, limit: Duration) -> u64 {
    let give_up = Instant::now() + limit;
    loop {
        assert!(Instant::now() < give_up, "rank {}: no operation used {}", comm.rank(), path.name());
        let outcome = checked_sum(comm, *op);
        *op += 1;
        if outcome.path == path {
            return *op - 1;
        }
    }
}

#[allow(dead_code)]
/// Call checked sums until one does not take the tree, at most for `limit`; returns its number.
pub(crate) fn sum_until_fallback(comm: &Communicator, op: &mut u64, limit: Duration) -> u64 {
    let give_up = Instant::now() + limit;
    loop {
        assert!(Instant::now() < give_up, "rank {}: all operations used the tree", comm.rank());
        let outcome = checked_sum(comm, *op);
        *op += 1;
        if outcome.path != Path::Tree {
            return *op - 1;
        }
    }
}

//! A cluster in one process: controller, boards and communicators as they ship, only the process boundaries missing.

use std::net::SocketAddr;
use std::thread;
use std::time::Duration;
use sumac::controller::{Controller, ControllerConfig};
use sumac::topo::{Fabric, LeafSpine};
use sumac::{Attach, Communicator, JoinConfig};
use sumac_firmware::emulated::{Board, BoardConfig, BusConfig};

/// A controller and its boards.
pub(crate) struct Cluster {
    pub(crate) controller: Controller,
    // Kept alive; some tests stop one.
    #[allow(dead_code)]
    pub(crate) boards: Vec<Board>,
}

impl Cluster {
    #[allow(dead_code)]
    /// `leaves` devices with `hosts` hosts each.
    pub(crate) fn start(leaves: usize, hosts: usize) -> Self {
        Self::start_with(leaves, hosts, 1, ControllerConfig::new())
    }

    // Most tests take devices as they come.
    #[allow(dead_code)]
    /// The same with devices of `shards` shards, and all of `config` but the fabric.
    pub(crate) fn start_with(leaves: usize, hosts: usize, shards: u16, config: ControllerConfig) -> Self {
        Self::start_boards(leaves, hosts, config, |board| board.shards = shards)
    }

    #[allow(dead_code)]
    /// The same with devices of one shard, on such a bus.
    pub(crate) fn start_on(leaves: usize, hosts: usize, bus: BusConfig, config: ControllerConfig) -> Self {
        Self::start_boards(leaves, hosts, config, |board| board.bus = Some(bus))
    }

    #[allow(dead_code)]
    /// The same with devices that reach ranks of other hosts, over the double of links called `exchange`.
    pub(crate) fn start_remote(
        leaves: usize,
        hosts: usize,
        (bus, exchange): (BusConfig, &str),
        config: ControllerConfig,
    ) -> Self {
        Self::start_boards(leaves, hosts, config, |board| {
            (board.bus, board.rdma) = (Some(bus), Some(exchange.into()));
        })
    }

    #[allow(dead_code)]
    /// Devices with a bus each, without a fabric: any of them does for any job.
    pub(crate) fn spare(devices: usize, config: ControllerConfig) -> Self {
        let controller = Controller::start(config).expect("a controller on loopback");
        let configure = |board: &mut BoardConfig| board.bus = Some(BusConfig::default());
        let names = (0..devices).map(|nth| format!("spare{nth}"));
        let boards = names.map(|name| board(name, controller.local_addr(), configure)).collect();
        Self { controller, boards }
    }

    // Most devices stay.
    #[allow(dead_code)]
    /// Start a device with a bus, as [`Cluster::spare`] does, perhaps one that was there before.
    pub(crate) fn board_on_a_bus(&self, name: &str) -> Board {
        let configure = |board: &mut BoardConfig| board.bus = Some(BusConfig::default());
        board(name.into(), self.controller.local_addr(), configure)
    }

    fn start_boards(
        leaves: usize,
        hosts: usize,
        config: ControllerConfig,
        configure: impl Fn(&mut BoardConfig),
    ) -> Self {
        let spines = usize::from(leaves > 1);
        let fabric = Fabric::leaf_spine(LeafSpine { leaves, spines, hosts_per_leaf: hosts, cables: 1, rate: None });
        let fabric = fabric.expect("a valid shape");
        let names: Vec<String> = fabric.switches().iter().map(|switch| switch.name.clone()).collect();
        let config = ControllerConfig { fabric: Some(fabric), ..config };
        let controller = Controller::start(config).expect("a controller on loopback");
        let boards = names.into_iter().map(|name| board(name, controller.local_addr(), &configure)).collect();
        Self { controller, boards }
    }

    // Not every test has communicators.
    #[allow(dead_code)]
    /// Run `rank` as every rank of a job, and return what each returned.
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

/// Return a job's name that a controller takes for what a case is called.
// Not every test has communicators.
#[allow(dead_code)]
pub(crate) fn job_name(case: &str) -> String {
    case.replace(|c: char| !c.is_ascii_alphanumeric(), "-")
}

/// Start a board and wait until the controller knows it.
fn board(name: String, controller: SocketAddr, configure: impl Fn(&mut BoardConfig)) -> Board {
    let mut config = BoardConfig { slot_memory_bytes: 16 << 20, ..BoardConfig::new(name, controller) };
    configure(&mut config);
    let board = Board::start(config).expect("a board on loopback");
    assert!(board.wait_registered(Duration::from_secs(20)), "the controller does not answer");
    board
}

/// Join by packets, also where memory could be shared.
#[allow(dead_code)]
pub(crate) fn by_packets(config: &mut JoinConfig) {
    config.attach = Attach::Udp;
}

/// Join as usual.
#[allow(dead_code)]
pub(crate) fn plain(_: &mut JoinConfig) {}

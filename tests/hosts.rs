//! Ranks that share a host and combine there first, on a device that the lowest of them runs.
//!
//! The hosts are those of a fabric. The leaf device is elsewhere: it has another address, and shares no memory.

mod common;

use common::checked_sum;
use std::collections::BTreeMap;
use std::fmt;
use std::net::{Ipv4Addr, SocketAddr};
use std::sync::{Arc, Barrier, Mutex};
use std::thread;
use std::time::{Duration, Instant};
use sumac::comm::Departure;
use sumac::controller::{Controller, ControllerConfig, status};
use sumac::select::CostTable;
use sumac::topo::{Fabric, LeafSpine};
use sumac::transport::local::{HostDevice, HostDeviceConfig, HostDevices};
use sumac::{Algo, CallOptions, Communicator, Error, JoinConfig, Order, Path, ReduceOp, Straggler};
use sumac_firmware::emulated::{Board, BoardConfig};
use sumac_hal::op::Dtype;
use sumac_tests::oracle::{Shape, expected, input};

const RANKS: u32 = 4;
/// A passing test never reaches it.
const LONG: Duration = Duration::from_secs(30);

/// The host of each rank.
type Placed = [usize; RANKS as usize];
const BY_HOST: Placed = [0, 0, 1, 1];
const ROUND_ROBIN: Placed = [0, 1, 0, 1];

/// The devices that ranks have started. They can be stopped while their ranks live.
#[derive(Clone, Default)]
struct Started(Arc<Mutex<Vec<Running>>>);

type Running = Arc<Mutex<Option<Board>>>;

impl fmt::Debug for Started {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Started")
    }
}

impl HostDevices for Started {
    fn start(&self, config: HostDeviceConfig) -> Result<HostDevice, Box<dyn std::error::Error + Send + Sync>> {
        let HostDeviceConfig { name, ticket, controllers, bind, .. } = config;
        let board = BoardConfig { bind, ticket: Some(ticket), ..small(BoardConfig::new(name, controllers[0])) };
        let board = Arc::new(Mutex::new(Some(Board::start(board)?)));
        self.0.lock().expect("not poisoned").push(Arc::clone(&board));
        Ok(Box::new(Stop(board)))
    }
}

/// Stops the device when its rank drops it.
struct Stop(Running);

impl Drop for Stop {
    fn drop(&mut self) {
        self.0.lock().expect("not poisoned").take();
    }
}

fn small(config: BoardConfig) -> BoardConfig {
    BoardConfig { slot_memory_bytes: 16 << 20, ..config }
}

fn by_tree(listen: SocketAddr) -> ControllerConfig {
    let table = CostTable::emulated().with_overrides("[[override]]\npath = \"tree\"\n").expect("an override file");
    ControllerConfig { table, fabric: Some(fabric()), listen, ..ControllerConfig::new() }
}

fn fabric() -> Fabric {
    let shape = LeafSpine { leaves: 1, spines: 0, hosts_per_leaf: RANKS as usize, cables: 1, rate: None };
    Fabric::leaf_spine(shape).expect("a valid shape")
}

struct Cluster {
    controller: Mutex<Option<Controller>>,
    addr: SocketAddr,
    leaf: Mutex<Option<Board>>,
    started: Started,
}

impl Cluster {
    fn start() -> Self {
        Self::with_shards(1)
    }

    /// Start a controller, and a leaf device with so many shards.
    fn with_shards(shards: u16) -> Self {
        let controller = Controller::start(by_tree(ControllerConfig::new().listen)).expect("a controller on loopback");
        let addr = controller.local_addr();
        let leaf = Board::start(BoardConfig {
            bind: Ipv4Addr::new(127, 0, 0, 2).into(),
            zero_copy: None,
            shards,
            ..small(BoardConfig::new(fabric().switches()[0].name.clone(), addr))
        });
        let leaf = leaf.expect("a board on loopback");
        assert!(leaf.wait_registered(LONG), "the board is not registered");
        Self {
            controller: Mutex::new(Some(controller)),
            addr,
            leaf: Mutex::new(Some(leaf)),
            started: Started::default(),
        }
    }

    /// Run a rank on each thread, and return the results in order.
    fn run<R: Send>(
        &self,
        placed: impl AsRef<[usize]>,
        configure: impl Fn(&mut JoinConfig) + Sync,
        rank: impl Fn(Communicator) -> R + Sync,
    ) -> Vec<R> {
        let placed = placed.as_ref();
        let world = placed.len() as u32;
        let run = |number: u32| {
            let mut config = JoinConfig::new(self.addr, "hosts", number, world);
            config.host = Some(fabric().hosts()[placed[number as usize]].name.clone());
            config.host_devices = Some(Arc::new(self.started.clone()));
            (config.join_timeout, config.deadline) = (LONG, LONG);
            configure(&mut config);
            rank(Communicator::join(config).expect("join"))
        };
        thread::scope(|scope| {
            let run = &run;
            let ranks: Vec<_> = (0..world).map(|number| scope.spawn(move || run(number))).collect();
            ranks.into_iter().map(|rank| rank.join().expect("a rank panicked")).collect()
        })
    }

    /// The devices of the job's tree.
    fn devices(&self) -> Vec<String> {
        let report = status(self.addr).expect("a report");
        let tree = report.jobs.into_iter().find(|job| job.name == "hosts").and_then(|job| job.tree);
        tree.and_then(Result::ok).map_or_else(Vec::new, |tree| tree.devices)
    }
}

/// Values whose sum depends on the order: nothing, one or two remain.
fn sum_of_order(comm: &Communicator) -> (f32, Path) {
    let own = [1e8_f32, 1.0, -1e8, 1.0][comm.rank() as usize];
    let mut buffer = vec![own; 5000];
    let path = comm.all_reduce(&mut buffer, ReduceOp::Sum).expect("a sum").path;
    assert!(buffer.iter().all(|value| value.to_bits() == buffer[0].to_bits()));
    (buffer[0], path)
}

#[test]
fn ranks_of_a_host_are_a_node_of_the_declared_expression() {
    for order in [Order::TreeFold, Order::TreePairwise] {
        for (placed, expected) in [(BY_HOST, 0.0), (ROUND_ROBIN, 2.0)] {
            let cluster = Cluster::start();
            let sums = cluster.run(
                placed,
                |config| config.order = order,
                |comm| {
                    let sum = sum_of_order(&comm);
                    let devices = cluster.devices();
                    comm.barrier().expect("all are there");
                    (sum, devices, comm.leave_within(LONG))
                },
            );
            for (sum, devices, departure) in sums {
                assert_eq!(sum, (expected, Path::Tree), "{order:?} {placed:?}");
                assert_eq!(
                    devices[1..],
                    ["hosts#host0".to_owned(), format!("hosts#host{}", if placed == BY_HOST { 2 } else { 1 })]
                );
                assert_eq!(departure, Departure::Clean);
            }
        }
    }
}

/// The ranks of each host, in order of the lowest.
fn blocks(placed: &[usize]) -> Vec<Vec<usize>> {
    let mut blocks: BTreeMap<usize, Vec<usize>> = BTreeMap::new();
    for (rank, host) in placed.iter().enumerate() {
        blocks.entry(*host).or_default().push(rank);
    }
    let mut blocks: Vec<_> = blocks.into_values().collect();
    blocks.sort();
    blocks
}

/// The expression that the documentation declares: each host first, then the hosts.
fn by_host(placed: &[usize]) -> Shape {
    let block = |ranks: Vec<usize>| match ranks[..] {
        [only] => Shape::Rank(only),
        _ => Shape::Node(ranks.into_iter().map(Shape::Rank).collect()),
    };
    Shape::Node(blocks(placed).into_iter().map(block).collect())
}

#[test]
fn every_order_has_the_bits_of_its_expression_on_every_path() {
    const ELEMENTS: usize = 3000;
    let placements = [[0, 0, 0, 0, 0, 1, 2, 2, 2], [0, 1, 2, 0, 1, 2, 0, 1, 2], [2, 0, 1, 1, 0, 2, 2, 2, 0]];
    for (order, op) in [(Order::Arrival, ReduceOp::Sum), (Order::TreeFold, ReduceOp::Sum)]
        .into_iter()
        .chain([(Order::TreePairwise, ReduceOp::Sum), (Order::TreePairwise, ReduceOp::Prod)])
    {
        let element =
            |rank: usize, index: usize| input(Dtype::F32, op, order == Order::Arrival, &[7, rank as u64, index as u64]);
        let evaluate = |shape: &Shape| -> Vec<Vec<u8>> {
            let value = |index| expected(shape, order, Dtype::F32, op, &|rank| element(rank, index));
            (0..ELEMENTS).map(value).collect()
        };
        let values = placements.map(|placed| evaluate(&by_host(&placed)));
        let without_hosts = evaluate(&Shape::Node((0..placements[0].len()).map(Shape::Rank).collect()));
        // A declared order of others has other bits; otherwise this test shows nothing.
        let is_told_apart =
            |(index, value): (usize, &Vec<_>)| *value != without_hosts && !values[..index].contains(value);
        assert!(order == Order::Arrival || values.iter().enumerate().all(is_told_apart), "{order:?} {op}");
        for (placed, values) in placements.iter().zip(&values) {
            let cluster = Cluster::start();
            let devices = blocks(placed).iter().filter(|ranks| ranks.len() > 1).count();
            cluster.run(
                placed,
                |config| config.order = order,
                |comm| {
                    for (algo, path) in [(Algo::Auto, Path::Tree), (Algo::HostTree, Path::HostTree)] {
                        let own = (0..ELEMENTS).map(|index| element(comm.rank() as usize, index));
                        let mut sums: Vec<f32> = own.map(|bytes| from_bytes(&bytes)).collect();
                        let options = CallOptions { algo: Some(algo), ..CallOptions::default() };
                        let outcome = comm.all_reduce_with(&mut sums, op, &options).expect("a result");
                        assert_eq!(outcome.path, path, "{:?}", outcome.fallback);
                        let differs =
                            sums.iter().zip(values).position(|(sum, value)| sum.to_le_bytes()[..] != value[..]);
                        assert_eq!(differs, None, "{order:?} {op} {placed:?} {algo:?}");
                    }
                    assert_eq!(cluster.devices().len(), 1 + devices);
                    comm.barrier().expect("all are there");
                    comm.leave();
                },
            );
        }
    }
}

/// Long enough for several runs of chunks in each shard.
const LARGE: usize = 1_000_000;

/// Sum values that are exact in any order, and check each of them.
fn checked_large_sum(comm: &Communicator, call: u32) -> Path {
    let value = |rank: u32, index: usize| ((index as u32).wrapping_mul(7) ^ rank.wrapping_mul(call)) % 1000;
    let mut sums: Vec<u32> = (0..LARGE).map(|index| value(comm.rank(), index)).collect();
    let path = comm.all_reduce(&mut sums, ReduceOp::Sum).expect("a sum").path;
    let expected = |index: usize| (0..comm.size()).map(|rank| value(rank, index)).sum::<u32>();
    assert_eq!((0..LARGE).find(|&index| sums[index] != expected(index)), None, "call {call}");
    path
}

/// Ranks on a host reach its device by shared memory, although the device above has several shards.
#[test]
fn hosts_contribute_once_to_a_device_of_several_shards() {
    for shards in [2, 8] {
        for order in [Order::Arrival, Order::TreeFold] {
            let cluster = Cluster::with_shards(shards);
            let seen = cluster.run(
                ROUND_ROBIN,
                |config| config.order = order,
                |comm| {
                    let paths = [1, 2, 3].map(|call| checked_large_sum(&comm, call));
                    let sum = (order == Order::TreeFold).then(|| sum_of_order(&comm));
                    let mut copied = vec![comm.rank(); LARGE];
                    comm.broadcast(&mut copied, 3).expect("a broadcast");
                    assert!(copied.iter().all(|&rank| rank == 3));
                    let devices = cluster.devices();
                    comm.barrier().expect("all are there");
                    (paths, sum, devices, comm.leave_within(LONG))
                },
            );
            for (paths, sum, devices, departure) in seen {
                assert_eq!((paths, departure), ([Path::Tree; 3], Departure::Clean));
                assert!(sum.is_none_or(|sum| sum == (2.0, Path::Tree)), "{sum:?}");
                assert_eq!(devices[1..], ["hosts#host0", "hosts#host1"]);
            }
        }
    }
}

/// Shards do not decide together, although each rank sees one device of one shard.
#[test]
fn stragglers_are_not_excluded_below_a_device_of_several_shards() {
    for (shards, answer) in [(1, Ok(())), (2, Err(true))] {
        let cluster = Cluster::with_shards(shards);
        cluster.run(BY_HOST, common::plain, |comm| {
            let options = CallOptions { straggler: Some(Straggler::Partial(LONG)), ..CallOptions::default() };
            let summed = comm.all_reduce_with(&mut [1_u32; 8], ReduceOp::Sum, &options).map(drop);
            assert_eq!(summed.map_err(|error| error.to_string().contains("several shards")), answer);
            comm.leave();
        });
    }
}

/// The device above, with all its shards, ends in the middle of an operation.
#[test]
fn loss_of_a_device_of_several_shards_is_recovered() {
    let cluster = Cluster::with_shards(3);
    let departures = cluster.run(BY_HOST, common::plain, |comm| {
        checked_large_sum(&comm, 1);
        if comm.rank() == 3 {
            drop(cluster.leaf.lock().expect("not poisoned").take());
        }
        until_recovered(&comm, |call| _ = checked_large_sum(&comm, call as u32));
        comm.leave_within(LONG)
    });
    assert!(departures.iter().all(|departure| *departure == Departure::Clean), "{departures:?}");
}

/// Call again until all ranks have recovered from a loss.
fn until_recovered(comm: &Communicator, call: impl Fn(u64)) {
    let (mut recovered, mut number) = ([0], 2);
    let give_up = Instant::now() + LONG;
    while recovered == [0] {
        assert!(Instant::now() < give_up, "no recovery");
        call(number);
        number += 1;
        // All ranks make the same calls.
        recovered = [comm.recoveries().count];
        comm.all_reduce(&mut recovered, ReduceOp::Min).expect("the least");
    }
}

fn from_bytes(bytes: &[u8]) -> f32 {
    f32::from_le_bytes(bytes.try_into().expect("four bytes"))
}

/// Two rails of one machine, each a host of the fabric with an address of its own.
#[test]
fn ranks_of_a_rail_contribute_once_through_its_address() {
    let cluster = Cluster::start();
    let rail_addr = |rail: u8| Ipv4Addr::new(127, 0, 0, 10 + rail);
    let by_rail = |config: &mut JoinConfig| config.bind = rail_addr(config.rank as u8 % 2).into();
    let seen = cluster.run(ROUND_ROBIN, by_rail, |comm| {
        let path = checked_sum(&comm, 1).path;
        let devices = cluster.devices();
        comm.barrier().expect("all are there");
        if comm.rank() == 0 {
            let mut rails = Vec::new();
            for board in cluster.started.0.lock().expect("not poisoned").iter() {
                let board = board.lock().expect("not poisoned");
                rails.extend(board.as_ref().expect("it runs").data_addrs().map(|addr| addr.to_string()));
            }
            rails.sort();
            let of_rail = |(rail, addr): (u8, &String)| addr.starts_with(&format!("{}:", rail_addr(rail)));
            assert!(rails.len() == 2 && (0..).zip(&rails).all(of_rail), "{rails:?}");
        }
        comm.barrier().expect("all are there");
        comm.leave();
        (path, devices)
    });
    for (path, devices) in seen {
        assert_eq!((path, &devices[1..]), (Path::Tree, &["hosts#host0".to_owned(), "hosts#host1".to_owned()][..]));
    }
}

#[test]
fn program_that_sets_nothing_combines_by_host() {
    let cluster = Cluster::start();
    let by_default = |config: &mut JoinConfig| {
        config.host_devices = JoinConfig::new(config.controller, "", 0, 1).host_devices;
    };
    let seen = cluster.run(BY_HOST, by_default, |comm| {
        let path = checked_sum(&comm, 1).path;
        let devices = cluster.devices();
        comm.barrier().expect("all are there");
        (path, devices, comm.leave_within(LONG))
    });
    for (path, devices, departure) in seen {
        assert_eq!(devices[1..], ["hosts#host0", "hosts#host2"]);
        assert_eq!((path, departure), (Path::Tree, Departure::Clean));
    }
}

#[test]
fn ranks_that_do_not_combine_by_host_start_no_device() {
    let cluster = Cluster::start();
    let distinct = [0, 1, 2, 3];
    for (placed, configure) in
        [(BY_HOST, (|config| config.hierarchical = false) as fn(&mut JoinConfig)), (distinct, common::plain)]
    {
        cluster.run(placed, configure, |comm| {
            checked_sum(&comm, 1);
            comm.leave();
        });
        assert!(cluster.started.0.lock().expect("not poisoned").is_empty());
    }
}

#[test]
fn rank_with_the_device_of_its_host_that_dies_is_named_and_the_others_go_on() {
    let cluster = Cluster::start();
    let sums = cluster.run(
        BY_HOST,
        |_| (),
        |comm| {
            checked_sum(&comm, 1);
            if comm.rank() == 2 {
                // Without leaving, as if the process had ended.
                return None;
            }
            let begun = Instant::now();
            let lost = comm.all_reduce(&mut [1_u32; 5000], ReduceOp::Sum).expect_err("a rank is lost");
            assert!(matches!(&lost, Error::RanksFailed { ranks, .. } if ranks.len() == 1), "{lost}");
            assert!(begun.elapsed() < LONG);
            let smaller = comm.shrink().expect("three survivors");
            drop(comm);
            let path = checked_sum(&smaller, 2).path;
            assert_eq!(smaller.leave_within(LONG), Departure::Clean);
            Some(path)
        },
    );
    assert_eq!(sums, [Some(Path::Tree), Some(Path::Tree), None, Some(Path::Tree)]);
}

#[test]
fn device_of_a_host_that_dies_alone_costs_a_recovery() {
    for order in [Order::Arrival, Order::TreeFold] {
        let cluster = Cluster::start();
        let has_summed = Barrier::new(RANKS as usize);
        let departures = cluster.run(
            BY_HOST,
            |config| config.order = order,
            |comm| {
                checked_sum(&comm, 1);
                has_summed.wait();
                if comm.rank() == 0 {
                    let boards = cluster.started.0.lock().expect("not poisoned").clone();
                    drop(boards[1].lock().expect("not poisoned").take());
                }
                // Declared orders keep their bits, by whichever path.
                until_recovered(&comm, |op| _ = checked_sum(&comm, op));
                if order == Order::TreeFold {
                    assert_eq!(sum_of_order(&comm).0, 0.0);
                }
                comm.leave_within(LONG)
            },
        );
        assert!(departures.iter().all(|departure| *departure == Departure::Clean), "{departures:?}");
    }
}

#[test]
fn next_controller_plans_with_the_devices_of_the_hosts() {
    let cluster = Cluster::start();
    let sums = cluster.run(
        BY_HOST,
        |config| config.order = Order::TreeFold,
        |comm| {
            let before = sum_of_order(&comm);
            comm.barrier().expect("all are there");
            if comm.rank() == 0 {
                let mut controller = cluster.controller.lock().expect("not poisoned");
                drop(controller.take());
                *controller = Some(Controller::start(by_tree(cluster.addr)).expect("the port is free again"));
            }
            // The declared order rules out every tree without the blocks of the hosts.
            let give_up = Instant::now() + LONG;
            while comm.rank() == 0 && cluster.devices().len() < 3 {
                assert!(Instant::now() < give_up, "no tree by the next controller: {:?}", status(cluster.addr));
                comm.all_reduce(&mut [0_u32], ReduceOp::Sum).expect("a sum");
            }
            if comm.rank() == 0 {
                comm.all_reduce(&mut [1_u32], ReduceOp::Sum).expect("a sum");
            } else {
                let mut value = [0_u32];
                while value == [0] {
                    comm.all_reduce(&mut value, ReduceOp::Sum).expect("a sum");
                }
            }
            let after = sum_of_order(&comm);
            comm.leave();
            (before, after)
        },
    );
    assert!(sums.iter().all(|sums| *sums == ((0.0, Path::Tree), (0.0, Path::Tree))), "{sums:?}");
    drop(cluster.leaf.lock().expect("not poisoned").take());
}

/// The device of a host serves its ranks until the last of them has left, in whichever order they leave.
#[test]
fn ranks_that_leave_without_recovery_get_their_results() {
    for round in 0..10 {
        let cluster = Cluster::start();
        let departures = cluster.run(
            BY_HOST,
            |config| config.recover = false,
            |comm| {
                checked_sum(&comm, round);
                comm.leave_within(LONG)
            },
        );
        assert!(departures.iter().all(|departure| *departure == Departure::Clean), "{departures:?}");
    }
}

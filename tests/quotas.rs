//! Tenants that share a device with too little capacity. Jobs without a tree use host collectives, report their
//! position in the queue, and all their ranks move to a tree at the same call when it is their turn.

mod common;

use common::{Cluster, SUM_LEN, checked_sum, over_udp, plain, sum_until};
use std::net::{SocketAddr, TcpStream};
use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};
use std::sync::mpsc::channel;
use std::sync::{Arc, Mutex};
use std::thread;
use std::time::{Duration, Instant};
use sumac::controller::proto::{JobStatus, QueuePosition};
use sumac::controller::{Controller, ControllerConfig, Quota, Quotas, status};
use sumac::select::CostTable;
use sumac::{Algo, Communicator, Dtype, JoinConfig, OpDesc, Path, ReduceOp};
use sumac_firmware::emulated::{Board, BoardConfig, ZeroCopyConfig};
use sumac_hal::ctrl::{
    Announce, AttachPoint, DeviceCapabilities, DeviceUser, Envelope, FrameReader, Hello, Name, Request, Response, send,
};
use sumac_hal::ids::BootId;
use sumac_hal::port::Addr;

/// The limit of each wait.
const SOON: Duration = Duration::from_secs(30);

/// A controller that prefers the tree, and a device with room for one group.
fn one_group(quotas: Quotas, lease: Duration) -> Cluster {
    let table = CostTable::emulated().with_overrides("[[override]]\npath = \"tree\"\n").expect("an override file");
    let config = ControllerConfig { table, quotas, lease, ..ControllerConfig::new() };
    let controller = Controller::start(config).expect("a controller on loopback");
    let board = board(controller.local_addr(), 1);
    Cluster { controller, boards: vec![board] }
}

fn board(controller: SocketAddr, groups: u16) -> Board {
    let zero_copy = Some(ZeroCopyConfig::default());
    let config =
        BoardConfig { slot_memory_bytes: 16 << 20, groups, zero_copy, ..BoardConfig::new("small", controller) };
    let board = Board::start(config).expect("a board on loopback");
    assert!(board.wait_registered(SOON), "the board is not registered");
    board
}

fn explained(comm: &Communicator) -> String {
    comm.explain(&OpDesc::all_reduce(Dtype::U64, ReduceOp::Sum, SUM_LEN as u64), Algo::Tree).to_string()
}

fn wait_for(what: &str, done: impl Fn() -> bool) {
    let give_up = Instant::now() + SOON;
    while !done() {
        assert!(Instant::now() < give_up, "{what}");
        thread::yield_now();
    }
}

fn job(cluster: &Cluster, name: &str) -> Option<JobStatus> {
    let report = status(cluster.controller.local_addr()).expect("a report");
    report.jobs.into_iter().find(|job| job.name == name)
}

fn of_tenant(tenant: &'static str, transport: fn(&mut JoinConfig)) -> impl Fn(&mut JoinConfig) + Sync {
    move |config| {
        transport(config);
        config.tenant = tenant.into();
    }
}

/// Check that the controller and the device hold no resources after the last job.
fn assert_all_is_free(cluster: &Cluster) {
    let is_free = || {
        let report = status(cluster.controller.local_addr()).expect("a report");
        let stats = report.devices[0].stats.as_ref().expect("the device answers");
        let device = (stats.groups, stats.trees, stats.slots_used, stats.slot_memory_used_bytes);
        report.tenants.iter().all(|tenant| tenant.groups == 0) && report.jobs.is_empty() && device == (0, 0, 0, 0)
    };
    wait_for("all resources are free", is_free);
}

#[test]
fn second_tenant_uses_schedules_until_the_first_leaves() {
    for transport in [plain as fn(&mut JoinConfig), over_udp] {
        let cluster = one_group(Quotas::default(), Duration::from_secs(30));
        let (first_runs, second_waits, moved) = (AtomicBool::new(false), AtomicU32::new(0), AtomicU32::new(0));
        let ops = thread::scope(|scope| {
            scope.spawn(|| {
                cluster.run("first", 2, of_tenant("a", transport), |comm| {
                    let mut op = 0;
                    sum_until(&comm, &mut op, Path::Tree, SOON);
                    first_runs.store(true, Ordering::SeqCst);
                    // Rank 0 decides when to stop, so that both make the same calls.
                    loop {
                        let mut enough = [u64::from(second_waits.load(Ordering::SeqCst) == 2)];
                        comm.broadcast(&mut enough, 0).expect("rank 0 is there");
                        assert_eq!(checked_sum(&comm, op).path, Path::Tree);
                        op += 1;
                        if enough == [1] {
                            break;
                        }
                    }
                    comm.leave();
                });
            });
            wait_for("the first job has a tree", || first_runs.load(Ordering::SeqCst));
            cluster.run("second", 2, of_tenant("b", transport), |comm| {
                let first = checked_sum(&comm, 0);
                assert_ne!(first.path, Path::Tree);
                let why = first.fallback.expect("a reason for the fallback");
                let full = "device small is full: 1 of 1 groups in use";
                assert!(why.contains(full) && why.contains("position 1 of 1 in the queue for a tree"), "{why}");
                assert_eq!(comm.queue_position(), Some(QueuePosition { position: 1, of: 1 }));
                let text = explained(&comm);
                assert!(text.contains(full) && text.contains("position 1 of 1 in the queue"), "{text}");
                if comm.rank() == 0 {
                    let job_status = job(&cluster, "second").expect("it runs");
                    assert_eq!(
                        (job_status.tenant.as_str(), job_status.queue),
                        ("b", Some(QueuePosition { position: 1, of: 1 }))
                    );
                }
                comm.barrier().expect("all are there");
                second_waits.fetch_add(1, Ordering::SeqCst);
                let mut op = 1;
                let at = sum_until(&comm, &mut op, Path::Tree, SOON);
                (0..3).for_each(|nth| assert_eq!(checked_sum(&comm, op + nth).path, Path::Tree));
                assert_eq!(comm.queue_position(), None);
                moved.fetch_add(1, Ordering::SeqCst);
                comm.leave();
                at
            })
        });
        assert!(ops.iter().all(|&op| op == ops[0]), "ranks moved at different operations: {ops:?}");
        assert_eq!(moved.load(Ordering::SeqCst), 2);
        assert_all_is_free(&cluster);
    }
}

#[test]
fn job_that_waits_for_a_tree_has_it_from_its_first_call() {
    let cluster = one_group(Quotas::default(), Duration::from_secs(30));
    let first_runs = AtomicBool::new(false);
    thread::scope(|scope| {
        scope.spawn(|| {
            cluster.run("first", 2, of_tenant("a", plain), |comm| {
                assert_eq!(checked_sum(&comm, 0).path, Path::Tree);
                first_runs.store(true, Ordering::SeqCst);
                wait_for("the second job is queued", || job(&cluster, "second").is_some_and(|job| job.queue.is_some()));
                assert!(!job(&cluster, "second").expect("a queued job").running);
                assert_eq!(checked_sum(&comm, 1).path, Path::Tree);
                comm.leave();
            });
        });
        wait_for("the first job has a tree", || first_runs.load(Ordering::SeqCst));
        let waits = |config: &mut JoinConfig| config.wait_for_tree = SOON;
        cluster.run("second", 2, waits, |comm| {
            assert_eq!(checked_sum(&comm, 0).path, Path::Tree);
            comm.leave();
        });
    });
    assert_all_is_free(&cluster);
}

#[test]
fn exhausted_quota_is_reported_with_limit_and_use() {
    let quota = Quota { groups: Some(1), ..Quota::default() };
    let quotas = Quotas { other: Quota::default(), tenants: [("a".into(), quota)].into() };
    let mut cluster = one_group(quotas, Duration::from_secs(30));
    cluster.boards.clear();
    wait_for("the device is gone", || status(cluster.controller.local_addr()).expect("a report").devices.is_empty());
    cluster.boards.push(board(cluster.controller.local_addr(), 8));
    cluster.run("first", 2, of_tenant("a", plain), |comm| {
        assert_eq!(checked_sum(&comm, 0).path, Path::Tree);
        // A sub-communicator needs a group of its own.
        let half = comm.split(Some(0), 0).expect("a split").expect("a color");
        let why = checked_sum(&half, 1).fallback.expect("a reason for the fallback");
        assert!(why.contains("tenant a holds 1 of 1 groups"), "{why}");
        half.leave();
        comm.leave();
    });
    assert_all_is_free(&cluster);
}

/// No packets renew the lease of an idle job; the controller does.
#[test]
fn idle_job_keeps_its_tree_beyond_a_lease() {
    let cluster = one_group(Quotas::default(), Duration::from_secs(1));
    cluster.run("idle", 2, plain, |comm| {
        assert_eq!(checked_sum(&comm, 0).path, Path::Tree);
        comm.barrier().expect("all are there");
        let begun = Instant::now();
        wait_for("more than two leases have passed", || begun.elapsed() > Duration::from_millis(2500));
        let outcome = checked_sum(&comm, 1);
        assert_eq!((outcome.path, outcome.recovered), (Path::Tree, false));
        assert_eq!(job(&cluster, "idle").expect("it runs").view, 0);
        comm.leave();
    });
    assert_all_is_free(&cluster);
}

/// The ranks disappear without leaving.
#[test]
fn job_whose_ranks_die_releases_its_quota() {
    let cluster = one_group(Quotas::default(), Duration::from_secs(30));
    cluster.run("dies", 2, plain, |comm| drop(checked_sum(&comm, 0)));
    assert_all_is_free(&cluster);
}

/// Start a fake device that accepts every request and announces a socket where nothing listens. Returns the number of
/// groups that the controller releases. It ends with the controller.
fn unreachable(controller: SocketAddr, name: &str) -> Arc<AtomicU32> {
    let short = |text: &str| Name::try_from(text).expect("short");
    let machine = sumac_hal::shm::machine().expect("an identifier of this machine");
    let announce = Announce {
        name: short(name),
        boot_id: BootId(99),
        capabilities: DeviceCapabilities {
            max_packet_len_bytes: 60_000,
            receive_buffer_bytes: 1 << 20,
            groups: 4,
            children: 8,
            slots: 1024,
            slot_memory_bytes: 1 << 30,
            dtypes: u32::MAX,
            ops: u32::MAX,
            collectives: u32::MAX,
        },
        data_addrs: [Addr::Udp(SocketAddr::from(([127, 0, 0, 1], 9)))].into_iter().collect(),
        attach: Some(AttachPoint {
            machine,
            socket: short("no-listener"),
            user: DeviceUser::ROOT,
            redo_memory_bytes: 1 << 30,
            remote: None,
        }),
        slots: None,
    };
    let mut stream = TcpStream::connect(controller).expect("a controller");
    send(&mut stream, &Hello::Device(announce.clone())).expect("it listens");
    let released = Arc::new(AtomicU32::new(0));
    let count = Arc::clone(&released);
    let (welcomed, welcome) = channel();
    thread::spawn(move || {
        let mut reader = FrameReader::new(stream.try_clone().expect("a file"));
        while let Ok(Envelope { id, message }) = reader.recv::<Envelope<Request>>() {
            let message = match message {
                Request::Identify => {
                    welcomed.send(()).expect("the test waits");
                    Response::Announce(announce.clone())
                }
                Request::ReleaseGroup(_) => {
                    count.fetch_add(1, Ordering::SeqCst);
                    Response::Done
                }
                _ => Response::Done,
            };
            if send(&mut stream, &Envelope { id, message }).is_err() {
                return;
            }
        }
    });
    welcome.recv_timeout(SOON).expect("the fake device is registered");
    released
}

/// A device is lost, and ranks cannot attach to the only other one: its group is released and the job has no tree. The
/// job is offered the first device when it returns, but never the other one again.
#[test]
fn unattachable_tree_is_released_and_not_offered_again() {
    let mut cluster = one_group(Quotas::default(), Duration::from_secs(30));
    let controller = cluster.controller.local_addr();
    let board_here = Mutex::new(cluster.boards.pop());
    // Sorts after the other device's name.
    let released = unreachable(controller, "unreachable");
    let begun = AtomicU32::new(0);
    thread::scope(|scope| {
        scope.spawn(|| {
            wait_for("both ranks have started", || begun.load(Ordering::SeqCst) == 2);
            drop(board_here.lock().expect("not poisoned").take());
            wait_for("the declined group is released", || released.load(Ordering::SeqCst) == 1);
            wait_for("the job reports why it has no tree", || {
                let job = job(&cluster, "job").expect("it runs");
                let why = job.tree.expect("running").err().unwrap_or_default();
                why.contains("declined its tree: cannot attach to device unreachable")
            });
            *board_here.lock().expect("not poisoned") = Some(board(controller, 1));
        });
        cluster.run("job", 2, plain, |comm| {
            let mut op = 0;
            sum_until(&comm, &mut op, Path::Tree, SOON);
            comm.barrier().expect("all are there");
            begun.fetch_add(1, Ordering::SeqCst);
            let mut whys = Vec::new();
            let give_up = Instant::now() + SOON;
            // Until the tree was lost and another one was used.
            loop {
                assert!(Instant::now() < give_up, "no new tree: {whys:?}");
                let outcome = checked_sum(&comm, op);
                op += 1;
                match (outcome.path, whys.is_empty()) {
                    (Path::Tree, false) => break,
                    (Path::Tree, true) => {}
                    _ => whys.extend(outcome.fallback.filter(|why| whys.last() != Some(why))),
                }
            }
            assert!(
                whys.iter().any(|why| why.contains("the controller's tree was declined: cannot attach to")),
                "{whys:?}"
            );
            comm.leave();
        });
    });
    wait_for("the job has ended", || job(&cluster, "job").is_none());
    assert_eq!(released.load(Ordering::SeqCst), 1, "the unreachable device was tried again");
}

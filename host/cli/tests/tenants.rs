//! Tenants, quotas, the queue and leases with real processes: options, the output of `sumac status`, and groups whose
//! controller is stopped or killed.

mod common;

use common::{Server, exit_status, serve, stderr, stdout, sumac};
use rustix::process::{Signal, kill_process};
use serde_json::Value;
use std::net::SocketAddr;
use std::sync::Arc;
use std::thread;
use std::time::{Duration, Instant};
use sumac::{Communicator, JoinConfig, Path, ReduceOp};

/// The limit of every wait; a passing test never reaches it.
const LIMIT: Duration = Duration::from_secs(40);

fn controller(options: &[&str]) -> (Server, String) {
    let mut args = vec!["controller", "--listen", "127.0.0.1:0", "--prefer-tree"];
    args.extend_from_slice(options);
    let mut server = serve(&args);
    let line = server.line();
    let address = line.strip_prefix("listening ").unwrap_or_else(|| panic!("listening: {line}")).to_owned();
    (server, address)
}

fn device(controller: &str, slots: &str) -> Server {
    let mut server = serve(&["device", "--name", "leaf0", "--controller", controller, "--slots", slots]);
    assert_eq!(server.line(), "ready leaf0");
    server
}

/// Join both ranks of a job.
fn join(controller: &str, job: &str, tenant: &str) -> Vec<Communicator> {
    let addr: SocketAddr = controller.parse().expect("an address");
    let config = |rank| JoinConfig { tenant: tenant.into(), ..JoinConfig::new(addr, job, rank, 2) };
    thread::scope(|scope| {
        let join = |rank| Communicator::join(config(rank)).expect("joined");
        let ranks: Vec<_> = (0..2).map(|rank| scope.spawn(move || join(rank))).collect();
        ranks.into_iter().map(|rank| rank.join().expect("no panic")).collect()
    })
}

/// Run an all-reduce on both ranks. Returns the path and the reason of a fallback.
fn add(ranks: &[Communicator]) -> (Path, Option<Arc<str>>, bool) {
    thread::scope(|scope| {
        let add = |comm: &Communicator| {
            let mut values = [u64::from(comm.rank()) + 1; 100];
            let outcome = comm.all_reduce(&mut values, ReduceOp::Sum).expect("a sum");
            assert_eq!(values, [3; 100]);
            (outcome.path, outcome.fallback, outcome.recovered)
        };
        let outcomes: Vec<_> = ranks.iter().map(|comm| scope.spawn(move || add(comm))).collect();
        let mut outcomes = outcomes.into_iter().map(|rank| rank.join().expect("no panic"));
        let first = outcomes.next().expect("two ranks");
        assert!(outcomes.all(|other| other.0 == first.0));
        first
    })
}

fn report(controller: &str) -> Value {
    let output = sumac(&["status", "--json", "--controller", controller]);
    assert_eq!(exit_status(&output), 0, "{}", stderr(&output));
    serde_json::from_str(&stdout(&output)).expect("JSON")
}

fn wait_for(what: &str, mut done: impl FnMut() -> bool) {
    let give_up = Instant::now() + LIMIT;
    while !done() {
        assert!(Instant::now() < give_up, "{what}");
        thread::yield_now();
    }
}

#[test]
fn invalid_quotas_leases_and_tenants_are_usage_errors() {
    let cases: [(&[&str], &str); 6] = [
        (&["--quota", "a"], "TENANT=groups:N,slots:N,memory:SIZE"),
        (&["--quota", "a=groups:many"], "\"many\" is not a number of groups"),
        (&["--quota", "a=chunks:3"], "\"chunks:3\" is not a limit"),
        (&["--quota", "two words=groups:3"], "is not a valid tenant name"),
        (&["--quota", "a=groups:1", "--quota", "a=slots:2"], "names a twice"),
        (&["--lease", "0"], "1..=86400"),
    ];
    for (options, named) in cases {
        let output = sumac(&[&["controller", "--listen", "127.0.0.1:0"], options].concat());
        assert_eq!(exit_status(&output), 2, "{options:?}: {}", stderr(&output));
        assert!(stderr(&output).contains(named), "{options:?}: {}", stderr(&output));
    }
    let output = sumac(&["selftest", "--tenant", "a=b"]);
    assert_eq!(exit_status(&output), 2, "{}", stderr(&output));
}

#[test]
fn status_shows_tenants_quotas_and_queue_positions() {
    let quotas = ["--quota", "team-a=groups:1,memory:64M", "--quota", "*=slots:4096", "--quota", "guest=groups:0"];
    let (mut controller, address) = controller(&quotas);
    let mut device = device(&address, "8192");
    let first = join(&address, "first", "team-a");
    assert_eq!(add(&first).0, Path::Tree);
    let second = join(&address, "second", "team-a");
    let (path, fallback, _) = add(&second);
    let why = fallback.expect("the tree was wanted");
    assert!(path != Path::Tree && why.contains("tenant team-a holds 1 of 1 groups"), "{why}");
    assert!(why.ends_with("position 1 of 1 in the queue for a tree"), "{why}");

    let table = stdout(&sumac(&["status", "--controller", &address]));
    let line = |begin: &str| table.lines().find(|line| line.starts_with(begin)).unwrap_or_else(|| panic!("{table}"));
    assert!(line("  team-a ").contains("groups 1/1  "), "{table}");
    assert!(line("  team-a ").ends_with("/67108864"), "{table}");
    assert!(line("  guest ").contains("groups 0/0  "), "{table}");
    assert!(line("  first ").contains("tenant team-a  ranks 2/2  group "), "{table}");
    assert!(line("  second ").ends_with("position 1 of 1 in the queue for a tree"), "{table}");
    let json = report(&address);
    let jobs = json["jobs"].as_array().expect("jobs");
    let second_job = jobs.iter().find(|job| job["name"] == "second").expect("it runs");
    assert_eq!((&second_job["queue"]["position"], &second_job["tenant"]), (&1.into(), &"team-a".into()));
    let tenants = json["tenants"].as_array().expect("tenants");
    let team = tenants.iter().find(|tenant| tenant["name"] == "team-a").expect("it has jobs");
    assert_eq!((&team["groups"], &team["quota"]["groups"]), (&1.into(), &1.into()));

    // The jobs of selftest count towards quotas, too.
    let guest = sumac(&["selftest", "--controller", &address, "--tenant", "guest", "-n", "1", "-e", "1K"]);
    assert_eq!(exit_status(&guest), 1, "{}", stdout(&guest));
    assert!(stdout(&guest).contains("tenant guest holds 0 of 0 groups"), "{}", stdout(&guest));
    let other = sumac(&["selftest", "--controller", &address, "--tenant", "other", "-n", "1", "-e", "1K"]);
    assert_eq!(exit_status(&other), 0, "{} {}", stdout(&other), stderr(&other));

    first.into_iter().for_each(Communicator::leave);
    wait_for("the tree is not assigned to the next job", || add(&second).0 == Path::Tree);
    second.into_iter().for_each(Communicator::leave);
    controller.interrupt_and_expect_success();
    device.interrupt_and_expect_success();
}

/// The lease of an idle job expires at the device while its controller is stopped. When the controller continues, it
/// learns of that, and assigns the job another tree on the same device.
#[test]
fn job_gets_another_tree_after_its_lease_expired() {
    let (controller, address) = controller(&["--lease", "1"]);
    let _device = device(&address, "8192");
    let ranks = join(&address, "idle", "default");
    assert_eq!(add(&ranks).0, Path::Tree);
    kill_process(controller.pid(), Signal::STOP).expect("it runs");
    let begun = Instant::now();
    wait_for("time stands still", || begun.elapsed() > Duration::from_millis(2500));
    kill_process(controller.pid(), Signal::CONT).expect("it is there");
    wait_for("the job has no other tree", || {
        let job = report(&address)["jobs"][0].clone();
        job["view"] == 1 && job["tree"]["Ok"]["devices"][0] == "leaf0"
    });
    wait_for("the ranks do not take it", || add(&ranks).0 == Path::Tree);
    let json = report(&address);
    assert_eq!(json["devices"][0]["stats"]["Ok"]["counters"]["leases_expired"], 1);
    assert_eq!(json["devices"][0]["stats"]["Ok"]["groups"], 1, "the expired group is gone");
    ranks.into_iter().for_each(Communicator::leave);
}

/// A killed controller leaves a group on the device. The group lives as long as its ranks use it, even if the next
/// controller, to which the ranks report the job, has no room for a tree of its own. When the ranks are gone, the group
/// expires, and its slots go to the next job in the queue.
#[test]
fn orphaned_group_lives_while_used_and_then_expires() {
    let (first, address) = controller(&["--lease", "2"]);
    // Room for one window of one chunk.
    let _device = device(&address, "2");
    let orphan = join(&address, "orphan", "default");
    assert_eq!(add(&orphan).0, Path::Tree);
    first.kill();
    let mut second = serve(&["controller", "--listen", &address, "--prefer-tree", "--lease", "2"]);
    assert_eq!(second.line(), format!("listening {address}"));
    let slots_used = || report(&address)["devices"][0]["stats"]["Ok"]["slots_used"].clone();
    wait_for("the device does not register", || slots_used() == 2);
    // Packets alone keep the group alive for longer than its lease.
    let begun = Instant::now();
    wait_for("the tree is lost", || {
        assert_eq!(add(&orphan).0, Path::Tree);
        begun.elapsed() > Duration::from_secs(5)
    });
    let queued = join(&address, "next", "default");
    let (path, fallback, _) = add(&queued);
    let why = fallback.expect("the tree was wanted");
    // The device refuses, or has reported its slots before.
    let reasons = ["leaf0: refused: not enough free slots: the group needs 2 contiguous", "has 0 free slots"];
    assert!(path != Path::Tree && reasons.iter().any(|reason| why.contains(reason)), "{why}");
    assert!(why.ends_with("in the queue for a tree"), "{why}");
    drop(orphan);
    wait_for("the slots are not assigned to the next job", || add(&queued).0 == Path::Tree);
    assert_eq!(slots_used(), 2);
    queued.into_iter().for_each(Communicator::leave);
}

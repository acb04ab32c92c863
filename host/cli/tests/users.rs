//! Ranks and a device of different users: ranks share memory only with devices of their own user or of root.

mod common;

use common::{Server, exit_status, serve, serve_as, stderr, stdout, sumac};
use std::net::SocketAddr;
use std::sync::Arc;
use std::thread;
use sumac::{Communicator, JoinConfig, Path, ReduceOp, Transport};

/// An unprivileged user.
const OTHER_USER: u32 = 65_534;

fn cluster() -> Option<(Server, Server, SocketAddr)> {
    let mut controller = serve(&["controller", "--listen", "127.0.0.1:0", "--prefer-tree"]);
    let line = controller.line();
    let address = line.strip_prefix("listening ").unwrap_or_else(|| panic!("listening: {line}")).to_owned();
    let mut device = serve_as(OTHER_USER, &["device", "--name", "leaf0", "--controller", &address])?;
    assert_eq!(device.line(), "ready leaf0");
    Some((controller, device, address.parse().expect("an address")))
}

/// Run an all-reduce on two ranks with this transport. Returns the path, the reason of a fallback, and the number of
/// zero-copy ranks in the tree.
fn add(controller: SocketAddr, transport: Transport) -> (Path, Option<Arc<str>>, Option<u64>) {
    let rank = |rank| {
        let config = JoinConfig { transport, ..JoinConfig::new(controller, transport.name(), rank, 2) };
        let comm = Communicator::join(config).expect("joined");
        let mut values = [u64::from(rank) + 1; 100];
        let outcome = comm.all_reduce(&mut values, ReduceOp::Sum).expect("a sum");
        assert_eq!(values, [3; 100]);
        (comm, outcome)
    };
    thread::scope(|scope| {
        let ranks = [0, 1].map(|number| scope.spawn(move || rank(number)));
        let [(_first, outcome), _second] = ranks.map(|rank| rank.join().expect("no panic"));
        let output = sumac(&["status", "--json", "--controller", &controller.to_string()]);
        assert_eq!(exit_status(&output), 0, "{}", stderr(&output));
        let report: serde_json::Value = serde_json::from_str(&stdout(&output)).expect("JSON");
        let jobs = report["jobs"].as_array().expect("a list");
        let job = jobs.iter().find(|job| job["name"] == transport.name()).expect("it is there while its ranks are");
        let zero_copy_ranks = job["tree"]["Ok"]["by_reference"].as_u64();
        (outcome.path, outcome.fallback, zero_copy_ranks)
    })
}

/// A device maps the ranks' memory, which belongs to root where CI runs the test.
#[test]
fn device_of_another_user_gets_packets_and_no_shared_memory() {
    let Some((_controller, _device, controller)) = cluster() else { return };
    assert_eq!(add(controller, Transport::Auto), (Path::Tree, None, Some(0)));
    let (path, fallback, zero_copy_ranks) = add(controller, Transport::Shm);
    let why = fallback.expect("a reason");
    assert!(path != Path::Tree && zero_copy_ranks.is_none());
    assert!(why.contains("shared memory") && why.contains("user 65534") && why.contains("SUMAC_DEVICE_USER"), "{why}");
}

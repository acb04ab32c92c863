//! `host/examples/train.rs`: it learns, and because it declares an order of summation, neither a lost device, nor the
//! transport, nor who is late changes a bit of what it learns.

use crate::programs::{run_ranks, stderr, stdout};
use crate::train::{checksum, train};
use std::time::Duration;
use sumac::testing::{LocalCluster, LocalClusterConfig};
use sumac::{Communicator, Order, Path, Transport};

const STEPS: usize = 120;

/// What a rank saw.
#[derive(Debug, Clone)]
struct Seen {
    losses: Vec<f32>,
    paths: Vec<Path>,
    fallback: Option<String>,
    recoveries: u32,
    checksum: u64,
}

/// How much later than the others a rank begins each step.
const LATENESS: Duration = Duration::from_millis(1);

/// Train on three ranks, of which `late` contributes last; lose the device after step `kill_at`.
fn run(order: Order, transport: Transport, late: u32, kill_at: Option<usize>) -> Vec<Seen> {
    let shape = LocalClusterConfig { transport, ..LocalClusterConfig::new(3) };
    let cluster = LocalCluster::start_with(shape).expect("a cluster");
    let rank = |mut config: sumac::JoinConfig| {
        config.order = order;
        let comm = Communicator::join(config).expect("a job");
        let (mut losses, mut paths, mut fallback) = (Vec::new(), Vec::new(), None);
        let network = train(&comm, STEPS, |step, loss, outcome| {
            losses.push(loss);
            paths.push(outcome.path);
            fallback = outcome.fallback.as_deref().map(str::to_owned);
            if comm.rank() == 0 && Some(step) == kill_at {
                cluster.kill_device(0);
            }
            if comm.rank() == late {
                std::thread::sleep(LATENESS);
            }
        });
        let network = network.expect("training");
        let recoveries = comm.recoveries().count;
        comm.leave();
        Seen { losses, paths, fallback, recoveries, checksum: checksum(&network) }
    };
    std::thread::scope(|scope| {
        let ranks: Vec<_> = cluster.join_configs().into_iter().map(|config| scope.spawn(|| rank(config))).collect();
        ranks.into_iter().map(|rank| rank.join().expect("a rank")).collect()
    })
}

#[test]
fn training_in_a_declared_order_gives_the_same_bits_on_every_path() {
    let run = |transport, late, kill_at| run(Order::TreePairwise, transport, late, kill_at);
    let undisturbed = [run(Transport::Shm, 2, None), run(Transport::Udp, 0, None)].concat();
    let kill_at = Some(STEPS / 3);
    let disturbed = [run(Transport::Shm, 0, kill_at), run(Transport::Udp, 2, kill_at)].concat();
    for seen in &undisturbed {
        assert!(seen.losses[STEPS - 1] < seen.losses[0] / 3.0, "{seen:?}");
        assert!(seen.recoveries == 0 && seen.paths.iter().all(|&path| path == Path::Tree), "{seen:?}");
    }
    for seen in &disturbed {
        assert_eq!((seen.recoveries, seen.paths[STEPS / 3]), (1, Path::Tree));
        assert!(seen.paths[STEPS - 1] != Path::Tree && seen.fallback.is_some(), "{seen:?}");
        assert_eq!(seen.losses, undisturbed[0].losses);
    }
    let checksums: Vec<u64> = undisturbed.iter().chain(&disturbed).map(|seen| seen.checksum).collect();
    assert_eq!(checksums, [checksums[0]; 12]);
}

/// Over packets, a device adds contributions as they arrive unless an order is declared. So the test above can fail:
/// its runs differ in who is late.
#[test]
fn training_without_a_declared_order_depends_on_who_is_late() {
    let checksum = |late| run(Order::Arrival, Transport::Udp, late, None)[0].checksum;
    // A rank that is late by a millisecond may still not be the last one on a busy machine.
    assert!((0..10).any(|_| checksum(0) != checksum(2)), "the order of arrival does not show in the sums");
}

#[test]
fn program_prints_falling_loss_path_and_transfer() {
    let outputs = run_ranks(&LocalCluster::start(2).expect("a cluster"), "train", None);
    assert!(outputs.iter().all(|output| output.status.success() && stderr(output).is_empty()), "{outputs:?}");
    let text = stdout(&outputs[0]);
    let losses: Vec<f32> = text
        .lines()
        .filter_map(|line| line.split_once(": loss ")?.1.strip_suffix(", by tree (zero-copy)")?.parse().ok())
        .collect();
    assert!(losses.len() == 5 && losses[4] < losses[0] / 3.0, "{text}");
    assert!(text.contains("the parameters' checksum: "), "{text}");
}

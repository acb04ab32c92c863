//! `host/examples/train.rs`: it learns, and a lost device changes nothing in what it learns.

use crate::programs::{run_ranks, stderr, stdout};
use crate::train::{checksum, train};
use sumac::testing::LocalCluster;
use sumac::{Communicator, Order, Path};

const STEPS: usize = 120;

/// What a rank saw.
#[derive(Debug)]
struct Seen {
    losses: Vec<f32>,
    paths: Vec<Path>,
    fallback: Option<String>,
    recoveries: u32,
    checksum: u64,
}

/// Train on three ranks; lose the device after step `kill_at`.
fn run(kill_at: Option<usize>) -> Vec<Seen> {
    let cluster = LocalCluster::start(3).expect("a cluster");
    let rank = |mut config: sumac::JoinConfig| {
        config.order = Order::TreePairwise;
        let comm = Communicator::join(config).expect("a job");
        let (mut losses, mut paths, mut fallback) = (Vec::new(), Vec::new(), None);
        let network = train(&comm, STEPS, |step, loss, outcome| {
            losses.push(loss);
            paths.push(outcome.path);
            fallback.clone_from(&outcome.fallback);
            if comm.rank() == 0 && Some(step) == kill_at {
                cluster.kill_device(0);
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
fn training_with_a_lost_device_gives_the_same_bits() {
    let (undisturbed, disturbed) = (run(None), run(Some(STEPS / 3)));
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
    assert_eq!(checksums, [checksums[0]; 6]);
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

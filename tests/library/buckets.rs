//! Buckets in registered memory.

use sumac::comm::Outcome;
use sumac::testing::{LocalCluster, LocalClusterConfig};
use sumac::{Communicator, Path, ReduceOp, Transfer, Transport};

/// Lengths of tensors; with buckets of [`BUCKET_BYTES`], several buckets of unequal lengths.
const LENS: [usize; 7] = [70_000, 3, 0, 50_000, 40_000, 300_000, 20_001];
const BUCKET_BYTES: usize = 512 << 10;

/// Sum tensors in buckets, check them, and return the outcomes.
fn sum(comm: &Communicator) -> Vec<Outcome> {
    let mut tensors: Vec<Vec<f32>> = LENS.iter().map(|&len| vec![1.0 + comm.rank() as f32; len]).collect();
    let mut views: Vec<&mut [f32]> = tensors.iter_mut().map(Vec::as_mut_slice).collect();
    let outcomes = comm.all_reduce_bucketed(&mut views, ReduceOp::Sum, BUCKET_BYTES).expect("sums");
    let total = (1..=comm.size()).sum::<u32>() as f32;
    assert!(tensors.iter().zip(LENS).all(|(tensor, len)| *tensor == vec![total; len]));
    outcomes
}

fn transfers(outcomes: &[Outcome]) -> Vec<Option<Transfer>> {
    outcomes.iter().map(|outcome| outcome.transfer).collect()
}

#[test]
fn buckets_are_zero_copy_where_memory_is_shared() {
    for (transport, transfer) in [(Transport::Shm, Transfer::ZeroCopy), (Transport::Udp, Transfer::Packets)] {
        let config = LocalClusterConfig { transport, ..LocalClusterConfig::new(2) };
        LocalCluster::start_with(config).expect("a cluster").run(|comm| {
            // The second call uses the buckets of the first.
            for _ in 0..2 {
                assert_eq!(transfers(&sum(&comm)), [Some(transfer); 4], "{transport}");
            }
            comm.leave();
        });
    }
}

/// Buckets that are registered with a lost device are replaced by ones that the next device can reach.
#[test]
fn buckets_are_zero_copy_again_on_the_next_device() {
    let config = LocalClusterConfig { devices: 2, transport: Transport::Shm, ..LocalClusterConfig::new(2) };
    let cluster = LocalCluster::start_with(config).expect("a cluster");
    cluster.run(|comm| {
        sum(&comm);
        if comm.rank() == 0 {
            cluster.kill_device(cluster.devices_in_use()[0]);
        }
        // In the first call the loss shows, at the latest; each of the next may find one bucket of the lost device.
        (0..6).for_each(|_| drop(sum(&comm)));
        let outcomes = sum(&comm);
        assert!(
            comm.recoveries().count == 1 && outcomes.iter().all(|outcome| outcome.path == Path::Tree),
            "{outcomes:?}"
        );
        assert_eq!(transfers(&outcomes), [Some(Transfer::ZeroCopy); 4]);
        comm.leave();
    });
}

//! Every single loss of a device that serves zero-copy ranks: at each point of each chunk, for good, with a restart, or
//! for longer than ranks wait. All callers overwrite their buffers as soon as an operation returns.
//!
//! Scheduling is the simulator's, one order of events per loss, so the search is exhaustive in losses only. The stage
//! `planted` shows that the same search finds a node that keeps no result of chunks out of place.

use sumac_tests::sim::{Planted, Report, every_device_loss, run};

#[test]
fn every_loss_of_a_device_leaves_results_or_inputs() {
    let mut total = Report::default();
    let mut runs = 0;
    for options in every_device_loss(Planted::default()) {
        match run(&options) {
            Ok(report) => total.merge(&report),
            Err(violation) => panic!("{options:?}: {violation}"),
        }
        runs += 1;
    }
    println!("{runs} losses: {} operations recovered, {} changes of trees", total.recoveries, total.view_changes);
    assert!(total.recoveries > 0 && total.view_changes > 0, "no loss struck");
}

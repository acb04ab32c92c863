//! Loses a device at a moment that all ranks know.

use crate::common::{Cluster, over_udp, plain};
use crate::workload::board_of;
use std::net::SocketAddr;
use std::sync::{Barrier, Mutex};
use std::thread;
use std::time::{Duration, Instant};
use sumac::JoinConfig;
use sumac::controller::status;
use sumac_firmware::emulated::Board;

/// Configurations over UDP and over the default transport.
pub(crate) const TRANSPORTS: [fn(&mut JoinConfig); 2] = [over_udp, plain];

/// Add a deadline, so that a rank that would wait forever fails the test.
pub(crate) fn with_deadline(configure: fn(&mut JoinConfig)) -> impl Fn(&mut JoinConfig) + Sync {
    move |config| {
        configure(config);
        config.deadline = Duration::from_secs(20);
    }
}

/// Loses the devices of a cluster, one at a time.
pub(crate) struct DeviceLoss {
    boards: Mutex<Vec<Board>>,
    gate: Barrier,
    controller: SocketAddr,
}

impl DeviceLoss {
    /// Take the devices of a cluster whose jobs have `ranks` ranks together.
    pub(crate) fn of(cluster: &mut Cluster, ranks: u32) -> Self {
        let (boards, gate) = (Mutex::new(std::mem::take(&mut cluster.boards)), Barrier::new(ranks as usize));
        Self { boards, gate, controller: cluster.controller.local_addr() }
    }

    /// Wait for all ranks.
    pub(crate) fn sync(&self) {
        self.gate.wait();
    }

    /// Wait for all ranks, drop the next device, and wait for all ranks again.
    pub(crate) fn strike(&self, rank: u32) {
        self.drop_board(rank, |_| 0);
    }

    /// As [`DeviceLoss::strike`], for the root of the only job's tree.
    pub(crate) fn strike_root(&self, rank: u32) {
        self.drop_board(rank, |boards| board_of(boards, &status(self.controller).expect("a report"), 0));
    }

    fn drop_board(&self, rank: u32, choose: impl FnOnce(&[Board]) -> usize) {
        self.gate.wait();
        if rank == 0 {
            let mut boards = self.boards.lock().expect("not poisoned");
            let chosen = choose(&boards);
            drop(boards.remove(chosen));
        }
        self.gate.wait();
    }

    /// Wait for all ranks, and drop the next device while they run `operation`.
    pub(crate) fn strike_during<R>(&self, rank: u32, operation: impl FnOnce() -> R) -> R {
        self.gate.wait();
        thread::scope(|scope| {
            if rank == 0 {
                scope.spawn(|| {
                    // Spin: the moment of the loss matters.
                    let at = Instant::now() + MOMENT;
                    while Instant::now() < at {
                        thread::yield_now();
                    }
                    self.boards.lock().expect("not poisoned").remove(0)
                });
            }
            operation()
        })
    }
}

/// The time from an operation's start to the loss: in the middle of an operation of many chunks.
const MOMENT: Duration = Duration::from_millis(2);

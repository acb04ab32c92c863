//! Devices that die at a moment that all ranks know.

use crate::common::Cluster;
use std::sync::{Barrier, Mutex};
use sumac_firmware::emulated::Board;

/// The devices of a cluster, and when they die.
pub(crate) struct Death {
    boards: Mutex<Vec<Board>>,
    gate: Barrier,
}

impl Death {
    /// Take the devices of a cluster whose jobs have `ranks` ranks together.
    pub(crate) fn of(cluster: &mut Cluster, ranks: u32) -> Self {
        Self { boards: Mutex::new(std::mem::take(&mut cluster.boards)), gate: Barrier::new(ranks as usize) }
    }

    /// All ranks call this, and wait for each other.
    pub(crate) fn meets(&self) {
        self.gate.wait();
    }

    /// All ranks call this. No rank comes here before the others do, and none goes on before the next device has died.
    pub(crate) fn strikes(&self, rank: u32) {
        self.gate.wait();
        if rank == 0 {
            let board = self.boards.lock().expect("nobody panicked").remove(0);
            drop(board);
        }
        self.gate.wait();
    }
}

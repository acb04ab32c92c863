//! Devices that die at a moment that all ranks know.

use crate::common::{Cluster, by_packets, plain};
use std::sync::{Barrier, Mutex};
use std::thread;
use std::time::{Duration, Instant};
use sumac::JoinConfig;
use sumac_firmware::emulated::Board;

/// The ways to join.
pub(crate) const WAYS: [fn(&mut JoinConfig); 2] = [by_packets, plain];

/// The same with a deadline that a rank which waits for ever runs into while somebody still watches.
pub(crate) fn soon(configure: fn(&mut JoinConfig)) -> impl Fn(&mut JoinConfig) + Sync {
    move |config| {
        configure(config);
        config.deadline = Duration::from_secs(20);
    }
}

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

    /// All ranks call this, for an operation under which the next device dies.
    pub(crate) fn strikes_during<R>(&self, rank: u32, operation: impl FnOnce() -> R) -> R {
        self.gate.wait();
        thread::scope(|scope| {
            if rank == 0 {
                scope.spawn(|| {
                    // The moment is what is tested.
                    let at = Instant::now() + MOMENT;
                    while Instant::now() < at {
                        thread::yield_now();
                    }
                    self.boards.lock().expect("nobody panicked").remove(0)
                });
            }
            operation()
        })
    }
}

/// How far an operation of many chunks is when its device dies: neither at its beginning nor at its end.
const MOMENT: Duration = Duration::from_millis(2);

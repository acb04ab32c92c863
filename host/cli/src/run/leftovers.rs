//! Processes that ranks leave behind outside their process groups, such as daemons: this process adopts them, and ends
//! them when it ends.

use super::guard::Guard;
use rustix::process::{Pid, Signal, WaitOptions, getpid, kill_process, set_child_subreaper, waitpid};
use std::fs;

/// Have the kernel make this process the parent of orphans among its descendants.
pub(super) fn adopt() {
    if let Err(error) = set_child_subreaper(Some(getpid())) {
        tracing::info!(%error, "processes that ranks leave outside their process groups are not ended");
    }
}

/// Kill and reap all children but the guard, and theirs, which become children in turn.
pub(super) fn end(guard: &Guard) {
    loop {
        let left: Vec<Pid> = children().into_iter().filter(|pid| pid.as_raw_pid() as u32 != guard.pid()).collect();
        if left.is_empty() {
            return;
        }
        for pid in left {
            let _ = kill_process(pid, Signal::KILL);
            let _ = waitpid(Some(pid), WaitOptions::empty());
        }
    }
}

/// Return the children of all threads of this process.
fn children() -> Vec<Pid> {
    let threads = fs::read_dir("/proc/self/task").into_iter().flatten().flatten();
    let lists = threads.filter_map(|thread| fs::read_to_string(thread.path().join("children")).ok());
    lists
        .flat_map(|list| list.split_whitespace().filter_map(|pid| pid.parse().ok()).collect::<Vec<i32>>())
        .filter_map(Pid::from_raw)
        .collect()
}

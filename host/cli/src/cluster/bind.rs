//! Processor affinity of leaf devices and their ranks, for a cluster on one machine.
//!
//! Most bytes of a run travel between a rank and its leaf. Where processors are far apart (two dies, two sockets),
//! these bytes cost twice as much if rank and leaf run on different ones, and the kernel's scheduler, which does not
//! know the tree, migrates them. So each leaf shares an equal part of the processors with its ranks, as a switch sits
//! next to its hosts and as MPI launchers bind ranks to sockets. Devices without ranks run anywhere.
//!
//! Invariant: with a single leaf, a single processor or a kernel that refuses, nothing is bound.

use crate::layout::Layout;
use rustix::thread::{CpuSet, sched_getaffinity, sched_setaffinity};
use std::collections::BTreeSet;

/// A partition of this machine's processors, one part per leaf.
#[derive(Debug, Default)]
pub(crate) struct Parts {
    /// By index of the device; `None` if it has no ranks. Empty if nothing is bound.
    of_device: Vec<Option<CpuSet>>,
}

impl Parts {
    /// Bind nothing.
    pub(crate) fn anywhere() -> Self {
        Self::default()
    }

    /// Divide the processors that this process may use among the leaves of `layout`.
    pub(crate) fn new(layout: &Layout) -> Self {
        let Ok(own) = sched_getaffinity(None) else { return Self::anywhere() };
        let cpus: Vec<usize> = (0..CpuSet::MAX_CPU).filter(|&cpu| own.is_set(cpu)).collect();
        let leaves: BTreeSet<usize> = layout.leaves.iter().copied().collect();
        if leaves.len() < 2 || cpus.len() < 2 {
            return Self::anywhere();
        }
        let mut of_device = vec![None; layout.devices.len()];
        for (nth, leaf) in leaves.iter().enumerate() {
            let mut part = CpuSet::new();
            share(&cpus, nth, leaves.len()).iter().for_each(|&cpu| part.set(cpu));
            of_device[*leaf] = Some(part);
        }
        Self { of_device }
    }

    /// Run `spawn`, and let the processes that it starts run on the part of `device`.
    pub(crate) fn within<T>(&self, device: usize, spawn: impl FnOnce() -> T) -> T {
        // Children inherit the affinity of the thread that starts them. If the kernel refuses, they run anywhere.
        let part = self.of_device.get(device).and_then(Option::as_ref);
        let own = part.and_then(|part| {
            let own = sched_getaffinity(None).ok()?;
            sched_setaffinity(None, part).ok().map(|()| own)
        });
        let result = spawn();
        if let Some(own) = own {
            let _ = sched_setaffinity(None, &own);
        }
        result
    }
}

/// Return part `nth` of `shares` of the processors: adjacent ones, of nearly equal number, at least one.
fn share(cpus: &[usize], nth: usize, shares: usize) -> &[usize] {
    let start = nth * cpus.len() / shares;
    let end = ((nth + 1) * cpus.len() / shares).max(start + 1);
    &cpus[start..end]
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn shares_are_even_and_never_empty() {
        let all = |cpus: &[usize], shares| (0..shares).map(|nth| share(cpus, nth, shares).to_vec()).collect::<Vec<_>>();
        assert_eq!(all(&[0, 1], 2), [[0], [1]]);
        assert_eq!(all(&[0, 1, 4, 5, 6], 2), [vec![0, 1], vec![4, 5, 6]]);
        assert_eq!(all(&[3, 7], 4), [[3], [3], [7], [7]]);
    }

    #[test]
    fn only_children_are_bound() {
        let layout = Layout::generated(2, 4).expect("a plan");
        let before = sched_getaffinity(None).expect("an affinity");
        let parts = Parts::new(&layout);
        if before.count() == 1 {
            assert_eq!(parts.of_device, []);
            return;
        }
        let seen = [0, 1].map(|device| parts.within(device, || sched_getaffinity(None).expect("an affinity")));
        assert_eq!(sched_getaffinity(None).expect("an affinity"), before);
        assert_eq!(seen[0].count() + seen[1].count(), before.count());
        assert!((0..CpuSet::MAX_CPU).all(|cpu| !(seen[0].is_set(cpu) && seen[1].is_set(cpu))));
        // A device without ranks runs anywhere.
        assert_eq!(parts.within(2, || sched_getaffinity(None).expect("an affinity")), before);
        // With a single leaf there is nothing to divide.
        assert_eq!(Parts::new(&Layout::generated(1, 4).expect("a plan")).of_device, []);
    }
}

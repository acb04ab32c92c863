//! How long plans take on large fabrics, and how that grows.
//!
//! ```text
//! cargo bench -p sumac --bench plan              # fat trees of 10,000 to 101,306 hosts
//! cargo bench -p sumac --bench plan -- 16 24     # of these radices
//! ```
//!
//! Prints the CPU time to prepare a fabric, to plan a tree of all its hosts and of 8 hosts below one leaf, and 1,000
//! jobs of 8 to 512 hosts that come and go, with the most edges that a cable between switches has carried, beside those
//! of an even spread and one more (`allowed`). Then the exponent by which the time for all hosts grows with their
//! number. The system counts thread time in steps of some milliseconds: single times are multiples of these.

use std::collections::{BTreeSet, VecDeque};
use std::sync::Arc;
use sumac::plan::{HostSelection, Limits, Plan, Planner, Pricing, verify};
use sumac::topo::{Device, Fabric, LinkId, Rate};

/// A generator of numbers (xorshift64*), so that each run draws the same jobs.
struct Random(u64);

impl Random {
    fn below(&mut self, limit: usize) -> usize {
        self.0 ^= self.0 >> 12;
        self.0 ^= self.0 << 25;
        self.0 ^= self.0 >> 27;
        (self.0.wrapping_mul(0x2545_f491_4f6c_dd1d) >> 33) as usize % limit
    }
}

/// The seconds that this thread has run. Other processes on the machine do not count.
fn cpu_s() -> f64 {
    let stat = std::fs::read_to_string("/proc/thread-self/schedstat").expect("Linux counts scheduled time");
    stat.split(' ').next().and_then(|ns| ns.parse::<f64>().ok()).expect("nanoseconds come first") * 1e-9
}

fn main() {
    let given: Vec<usize> = std::env::args().skip(1).filter_map(|text| text.parse().ok()).collect();
    let radices = if given.is_empty() { vec![34, 48, 58, 74] } else { given };
    println!(
        "{:>6} {:>8} {:>12} {:>10} {:>12} {:>10} {:>10} {:>9} {:>9} {:>9} {:>9}",
        "radix",
        "hosts",
        "prepare ms",
        "all ms",
        "one leaf us",
        "job p50 ms",
        "mean ms",
        "p99 ms",
        "max ms",
        "edges",
        "allowed"
    );
    let mut sizes = Vec::new();
    for radix in radices {
        let fabric = Fabric::fat_tree(radix, Rate::from_gbits(400.0)).expect("a possible radix");
        let start = cpu_s();
        let planner = Planner::new(&fabric);
        let prepare_ms = (cpu_s() - start) * 1e3;
        let start = cpu_s();
        let limits = Limits::default();
        let all = planner.plan(&HostSelection::All, &limits).expect("a tree");
        let all_ms = (cpu_s() - start) * 1e3;
        verify(&fabric, &all, &limits).expect("a valid plan");
        sizes.push((fabric.hosts().len() as f64, all_ms));
        let one_leaf_us = one_leaf_us(&planner, &limits);
        let jobs = run_jobs(&fabric, &planner, 1000);
        let at = |share: usize| jobs.times_ms[jobs.times_ms.len() * share / 100];
        println!(
            "{radix:>6} {:>8} {prepare_ms:>12.0} {all_ms:>10.0} {one_leaf_us:>12.0} {:>10.2} {:>10.2} {:>9.2} {:>9.2} \
             {:>9} {:>9}",
            fabric.hosts().len(),
            at(50),
            jobs.times_ms.iter().sum::<f64>() / jobs.times_ms.len() as f64,
            at(99),
            jobs.times_ms[jobs.times_ms.len() - 1],
            jobs.most_edges,
            jobs.bound + 1
        );
        println!("       all hosts: {}", all.to_text().lines().take(2).collect::<Vec<_>>().join("; "));
    }
    if let [(few, fast), .., (many, slow)] = sizes[..] {
        println!("all hosts: time grows with hosts to the power of {:.2}", (slow / fast).ln() / (many / few).ln());
    }
    if let Ok(status) = std::fs::read_to_string("/proc/self/status") {
        status.lines().filter(|line| line.starts_with("VmHWM")).for_each(|line| println!("{line}"));
    }
}

/// The mean over many plans: the system counts thread time in steps.
fn one_leaf_us(planner: &Planner<'_>, limits: &Limits) -> f64 {
    let start = cpu_s();
    for _ in 0..1000 {
        planner.plan(&HostSelection::First(8), limits).expect("a tree");
    }
    (cpu_s() - start) * 1e3
}

struct Jobs {
    times_ms: Vec<f64>,
    /// The most edges on a cable between switches at any time.
    most_edges: u32,
    /// The maximum over leaves of the edges that had to leave it, divided by its cables to switches and rounded up.
    bound: u32,
}

/// Plan jobs that come and go, at most 100 at a time, each on what the others have left.
fn run_jobs(fabric: &Fabric, planner: &Planner<'_>, count: usize) -> Jobs {
    let mut random = Random(0x9e37_79b9_7f4a_7c15);
    let mut load = vec![0u32; fabric.links().len()];
    let mut leaving = vec![0u32; fabric.switches().len()];
    let mut running: VecDeque<Plan> = VecDeque::new();
    let mut jobs = Jobs { times_ms: Vec::new(), most_edges: 0, bound: 0 };
    let names: Vec<&str> = fabric.hosts().iter().map(|host| host.name.as_str()).collect();
    for _ in 0..count {
        if running.len() == 100 {
            let gone = random.below(running.len());
            let gone = running.remove(gone).expect("in range");
            add(fabric, &gone, &mut load, &mut leaving, u32::wrapping_sub);
        }
        let ranks = 8 + random.below(505);
        let mut hosts = BTreeSet::new();
        while hosts.len() < ranks.min(names.len()) {
            hosts.insert(random.below(names.len()));
        }
        let hosts = HostSelection::Named(hosts.into_iter().map(|host| names[host].to_owned()).collect());
        let pricing = Pricing { load: Some(Arc::from(&load[..])), ..Pricing::default() };
        let limits = Limits { pricing, ..Limits::default() };
        let start = cpu_s();
        let plan = planner.plan(&hosts, &limits).expect("a tree");
        jobs.times_ms.push((cpu_s() - start) * 1e3);
        add(fabric, &plan, &mut load, &mut leaving, u32::wrapping_add);
        running.push_back(plan);
        jobs.observe(fabric, &load, &leaving);
    }
    jobs.times_ms.sort_by(f64::total_cmp);
    jobs
}

fn add(fabric: &Fabric, plan: &Plan, load: &mut [u32], leaving: &mut [u32], change: fn(u32, u32) -> u32) {
    let is_between = |link: &LinkId| fabric.link(*link).ends.iter().all(|end| matches!(end.device, Device::Switch(_)));
    let nodes = plan.nodes.iter().flat_map(|node| &node.path);
    for link in nodes.chain(plan.ranks.iter().flat_map(|rank| &rank.path)).filter(|link| is_between(link)) {
        load[link.0 as usize] = change(load[link.0 as usize], 1);
    }
    for node in plan.nodes.iter().filter(|node| node.parent.is_some()) {
        leaving[node.switch.0 as usize] = change(leaving[node.switch.0 as usize], 1);
    }
}

impl Jobs {
    fn observe(&mut self, fabric: &Fabric, load: &[u32], leaving: &[u32]) {
        self.most_edges = self.most_edges.max(load.iter().copied().max().unwrap_or(0));
        let leaves = fabric.switch_ids().filter(|switch| fabric.switch(*switch).name.starts_with("edge"));
        let bound = leaves.map(|leaf| leaving[leaf.0 as usize].div_ceil(fabric.adjacent(leaf).len().max(1) as u32));
        self.bound = self.bound.max(bound.max().unwrap_or(0));
    }
}

//! Seeded swarms of simulated clusters, one test per scenario. `SEED=n` runs one seed, `SEEDS=n` that many from
//! `SEED_FROM` on. A failing seed prints the command that repeats it, and the first one also a test with a minimal
//! script of faults.
//!
//! The last scenario to end prints the coverage of all: transitions of the state machines and reasons to drop a packet.
//! With at least [`SEEDS_FOR_ALL`] seeds per scenario, each one that can occur must have occurred.

use std::sync::Mutex;
use sumac_hal::ctrl::DropReason;
use sumac_tests::sim::{
    Extents, Options, Report, ScenarioKind, Stragglers, Tenancy, TenantReport, record, run, run_stragglers,
    run_tenants, shrink, shrink_tenants,
};

const KINDS: [ScenarioKind; 10] = [
    ScenarioKind::Calm,
    ScenarioKind::Mismatch,
    ScenarioKind::Death,
    ScenarioKind::Restart,
    ScenarioKind::Hostile,
    ScenarioKind::Recovery,
    ScenarioKind::Ranks,
    ScenarioKind::ZeroCopy,
    ScenarioKind::Severing,
    ScenarioKind::Paths,
];

/// The number of scenarios beside [`KINDS`]: late ranks, and tenants that call one operation after the other, start
/// several, share hosts, or have several trees.
const OTHERS: usize = 5;

/// The maximum number of seeds with late ranks, because some of their clusters are large.
const LATE_MAX: u64 = 500;

/// The number of seeds per scenario from which on coverage must be complete.
const SEEDS_FOR_ALL: u64 = 300;

/// The number of scenarios that have ended, the fewest seeds of one, and the coverage of all.
static ALL: Mutex<(usize, u64, Option<Report>)> = Mutex::new((0, u64::MAX, None));

/// The maximum number of runs to shrink a failing seed.
const SHRINK_RUNS: usize = 500;

fn number(name: &str) -> Option<u64> {
    std::env::var(name).ok().map(|text| text.parse().unwrap_or_else(|_| panic!("{name}={text} is not a number")))
}

/// Return the name of a kind's test, for the command that repeats a seed.
const fn test_name(kind: ScenarioKind) -> &'static str {
    match kind {
        ScenarioKind::Calm => "lossy_links_give_exact_results",
        ScenarioKind::Mismatch => "mismatched_calls_fail_on_every_rank",
        ScenarioKind::Death => "device_loss_ends_in_a_result_or_an_error",
        ScenarioKind::Restart => "device_restart_ends_in_a_result_or_an_error",
        ScenarioKind::Hostile => "hostile_packets_change_no_result",
        ScenarioKind::Recovery => "device_loss_is_recovered",
        ScenarioKind::Ranks => "survivors_agree_on_failed_ranks",
        ScenarioKind::ZeroCopy => "zero_copy_gives_exact_results",
        ScenarioKind::Severing => "device_that_goes_on_changes_no_severed_memory",
        ScenarioKind::Paths => "packets_fit_paths_that_change",
    }
}

/// Run `seeds` clusters of one kind, print their coverage, and check that each of `marks` occurred.
fn swarm(kind: ScenarioKind, seeds: u64, marks: &[&str]) {
    let test = test_name(kind);
    // The harness runs each test on a thread of the test's name, or all on the main one.
    let thread = std::thread::current();
    let name = thread.name().filter(|name| *name != "main").unwrap_or(test);
    assert_eq!(name, test, "the printed command must name this test");
    let from = number("SEED_FROM").unwrap_or(0);
    let one = number("SEED");
    // Zero-copy clusters are small, and some of their outcomes are rare.
    let times = if kind == ScenarioKind::ZeroCopy { 10 } else { 1 };
    let range = one.map_or(from..from + times * number("SEEDS").unwrap_or(seeds), |seed| seed..seed + 1);
    let count = range.end - range.start;
    let mut failed = Vec::new();
    let mut total = Report::default();
    for seed in range {
        let options = Options::draw(seed, kind);
        match run(&options) {
            Ok(report) => total.merge(&report),
            Err(violation) => {
                println!("SEED={seed} {options:?}\n  {violation}");
                println!("  replay: SEED={seed} cargo test -p sumac-tests --test swarm {test} -- --exact --nocapture");
                if failed.is_empty()
                    && let Some(shrunk) = shrink(&options, SHRINK_RUNS)
                {
                    println!("{shrunk}");
                }
                failed.push(seed);
            }
        }
        if failed.len() > 5 {
            break;
        }
    }
    println!("{kind:?}: {:?} of virtual time, log hash {:#018x}", total.took, total.log_hash);
    let coverage = total.coverage();
    coverage.iter().for_each(|(name, n)| println!("  {name:24}{n:>10}"));
    assert!(failed.is_empty(), "seeds {failed:?} failed");
    let missed: Vec<_> = coverage.iter().filter(|(name, n)| *n == 0 && marks.contains(&name.as_str())).collect();
    assert!(one.is_some() || missed.is_empty(), "never occurred: {missed:?}");
    add(count, &total);
}

/// Add a scenario to the total coverage; the last one checks it.
fn add(count: u64, total: &Report) {
    let mut all = ALL.lock().unwrap_or_else(|poisoned| poisoned.into_inner());
    all.0 += 1;
    all.1 = all.1.min(count);
    all.2.get_or_insert_default().merge(total);
    if let (ended, fewest, Some(report)) = &*all
        && *ended == KINDS.len() + OTHERS
    {
        cover(*fewest, report);
    }
}

/// Print the coverage of all scenarios, and check that everything that can occur has occurred.
fn cover(fewest: u64, all: &Report) {
    let (mut missed, mut wrong) = (Vec::new(), Vec::new());
    println!("All scenarios, at least {fewest} seeds each: {:?} of virtual time", all.took);
    let counts =
        [("packets", all.packets), ("recovered operations", all.recoveries), ("view changes", all.view_changes)];
    counts.iter().for_each(|(name, count)| println!("  {name:36}{count:>12}"));
    for (what, rows) in [("transitions", all.transitions()), ("drop reasons", all.drops())] {
        let met = rows.iter().filter(|(_, count, _)| *count > 0).count();
        let all = rows.iter().filter(|(_, _, why)| why.is_none()).count();
        println!("  {what}: {met} of {all} that can occur have occurred");
        for (name, count, why) in rows {
            println!("    {name:34}{count:>12}  {}", why.unwrap_or_default());
            match why {
                Some(_) if count > 0 => wrong.push(name),
                None if count == 0 => missed.push(name),
                _ => {}
            }
        }
    }
    let mut short = Vec::new();
    for ((name, limits), met) in Extents::LIMITS.into_iter().zip(all.extents.of) {
        println!("  {name}: {} to {} of {} to {}", met[0], met[1], limits[0], limits[1]);
        if met[0] > limits[0] || met[1] < limits[1] {
            short.push((name, met));
        }
    }
    assert!(fewest < SEEDS_FOR_ALL || short.is_empty(), "limits not reached: {short:?}");
    assert!(wrong.is_empty(), "occurred, though marked as impossible: {wrong:?}");
    assert!(fewest < SEEDS_FOR_ALL || missed.is_empty(), "never occurred: {missed:?}");
}

/// The marks that every kind of cluster with lossy links hits.
const LOSSY: [&str; 15] = [
    "answers shared",
    "answers resent",
    "contributions resent",
    "naks",
    "probes in",
    "probes out",
    "window cuts",
    "drop: malformed",
    "drop: stale",
    "drop: duplicate",
    "drop: unexpected",
    "rank retransmits",
    "rank probes",
    "rank shared results",
    "rank drops",
];

#[test]
fn lossy_links_give_exact_results() {
    swarm(ScenarioKind::Calm, 300, &[&LOSSY[..], &["incast drops", "marked", "ends: complete"]].concat());
}

#[test]
fn mismatched_calls_fail_on_every_rank() {
    swarm(ScenarioKind::Mismatch, 150, &[&LOSSY[..], &["ends: complete", "ends: mismatch"]].concat());
}

#[test]
fn device_loss_ends_in_a_result_or_an_error() {
    let ends = ["drop: unknown-group", "ends: complete", "ends: path lost", "ends: group lost"];
    swarm(ScenarioKind::Death, 100, &[&LOSSY[..], &ends].concat());
}

#[test]
fn device_restart_ends_in_a_result_or_an_error() {
    let ends = ["drop: unknown-group", "drop: wrong-epoch", "ends: complete", "ends: path lost", "ends: group lost"];
    swarm(ScenarioKind::Restart, 100, &[&LOSSY[..], &ends].concat());
}

#[test]
fn hostile_packets_change_no_result() {
    let refused = [
        "drop: bad-kind",
        "drop: wrong-epoch",
        "drop: bad-child",
        "drop: bad-key",
        "drop: bad-source",
        "drop: bad-shard",
        "drop: bad-mark",
        "drop: bad-shape",
        "drop: over-window",
        "drop: queue-full",
        "attacks",
        "ends: complete",
    ];
    swarm(ScenarioKind::Hostile, 100, &[&LOSSY[..], &refused].concat());
}

#[test]
fn device_loss_is_recovered() {
    let ends = ["drop: unknown-group", "ends: complete", "view changes", "recovered operations", "recovery bytes"];
    swarm(ScenarioKind::Recovery, 100, &[&LOSSY[..], &ends].concat());
}

#[test]
fn packets_fit_paths_that_change() {
    let ends = ["ends: complete", "view changes", "recovered operations", "attacks", "drop: bad-key"];
    swarm(ScenarioKind::Paths, 100, &[&LOSSY[..], &ends].concat());
}

/// Ranks are late for operations with a straggler limit: the others complete without them, or all ranks get an error
/// that names them.
#[test]
fn late_ranks_are_excluded_or_named() {
    let one = number("SEED");
    let from = number("SEED_FROM").unwrap_or(0);
    let count = number("SEEDS").map_or(150, |seeds| seeds.min(LATE_MAX));
    let seeds = one.map_or(from..from + count, |seed| seed..seed + 1);
    let (mut total, mut failed) = (Stragglers::default(), Vec::new());
    for seed in seeds {
        match run_stragglers(seed) {
            Ok(report) => total.merge(&report),
            Err(what) => {
                println!("SEED={seed}: {what}");
                println!(
                    "  replay: SEED={seed} cargo test -p sumac-tests --test swarm late_ranks_are_excluded_or_named -- --exact --nocapture"
                );
                failed.push(seed);
            }
        }
    }
    println!("{total:?}");
    assert!(failed.is_empty(), "seeds {failed:?} failed");
    let Stragglers { decisions, excluded, waited_for, failed, dropped, partial } = total;
    let marks = [decisions, excluded, waited_for, failed, dropped, partial];
    assert!(one.is_some() || marks.iter().all(|&mark| mark > 0), "never occurred: {total:?}");
    let mut report = Report::default();
    (0..dropped).for_each(|_| report.counters.drop_packet(DropReason::Late));
    add(if one.is_some() { 1 } else { u64::MAX }, &report);
}

#[test]
fn survivors_agree_on_failed_ranks() {
    let ends = [
        "ends: complete",
        "ends: ranks failed",
        "ends: partitioned",
        "ranks killed",
        "view changes",
        "recovered operations",
        "recovery bytes",
    ];
    swarm(ScenarioKind::Ranks, 100, &[&LOSSY[..], &ends].concat());
}

/// Tenants with quotas share devices; their jobs start and end, and trees are lost and rebuilt.
#[test]
fn tenants_stay_within_their_quotas() {
    swarm_of_tenants("tenants_stay_within_their_quotas", Tenancy::draw, &["handles dropped"]);
}

/// Their ranks start several operations at once, drop some handles, and wait in other orders than other ranks do.
#[test]
fn dropped_handles_leave_nothing_and_stop_no_rank() {
    swarm_of_tenants("dropped_handles_leave_nothing_and_stop_no_rank", Tenancy::draw_started, &[]);
}

/// Their ranks share hosts, and combine there on devices that they run.
#[test]
fn hosts_contribute_once_and_leave_no_device() {
    swarm_of_tenants("hosts_contribute_once_and_leave_no_device", Tenancy::draw_hosts, &["handles dropped"]);
}

/// Their jobs are on several trees.
#[test]
fn trees_of_a_job_are_recovered_one_by_one() {
    swarm_of_tenants("trees_of_a_job_are_recovered_one_by_one", Tenancy::draw_stripes, &["handles dropped"]);
}

/// Run worlds of tenants, print their coverage, and check that all counts but some are above zero.
fn swarm_of_tenants(test: &str, draw: impl Fn(u64) -> Tenancy, except: &[&str]) {
    let one = number("SEED");
    let from = number("SEED_FROM").unwrap_or(0);
    let seeds = one.map_or(from..from + number("SEEDS").unwrap_or(100), |seed| seed..seed + 1);
    let count = seeds.end - seeds.start;
    let (mut total, mut failed) = (TenantReport::default(), Vec::new());
    for seed in seeds {
        let plan = draw(seed);
        match run_tenants(&plan) {
            Ok(report) => total.merge(&report),
            Err(violation) => {
                println!("SEED={seed} {plan:?}\n  {violation}");
                println!("  replay: SEED={seed} cargo test -p sumac-tests --test swarm {test} -- --exact --nocapture");
                if failed.is_empty()
                    && let Some(shrunk) = shrink_tenants(&plan, SHRINK_RUNS)
                {
                    println!("{shrunk}");
                }
                failed.push(seed);
            }
        }
        if failed.len() > 5 {
            break;
        }
    }
    println!("{test}: {:?} of virtual time, log hash {:#018x}", total.took, total.log_hash);
    total.counts().iter().for_each(|(name, n)| println!("  {name:24}{n:>10}"));
    let report = Report { seen: total.seen, extents: total.extents, took: total.took, ..Report::default() };
    let met = report.transitions().into_iter().filter(|(name, ..)| name.starts_with("tenants: "));
    met.for_each(|(name, n, _)| println!("  {name:36}{n:>10}"));
    println!("  devices, levels, ranks, tenants: {:?}", total.extents.of);
    assert!(failed.is_empty(), "seeds {failed:?} failed");
    let missed: Vec<_> = total.counts().into_iter().filter(|(_, n)| **n == 0).map(|(name, _)| name).collect();
    let missed: Vec<_> = missed.into_iter().filter(|name| !except.contains(name)).collect();
    assert!(one.is_some() || missed.is_empty(), "never occurred: {missed:?}");
    add(count, &report);
}

#[test]
fn zero_copy_gives_exact_results() {
    let ends = ["ends: complete", "ends: ranks failed", "ranks killed", "view changes", "recovered operations"];
    swarm(ScenarioKind::ZeroCopy, 300, &ends);
}

#[test]
fn device_that_goes_on_changes_no_severed_memory() {
    swarm(ScenarioKind::Severing, 100, &["ends: complete", "view changes", "recovered operations"]);
}

/// Seeds that have failed before, with their causes. A change of the drawing makes them other clusters; each fixed bug
/// has a test of its own beside the code.
#[test]
fn previously_failing_seeds_pass() {
    use ScenarioKind::{Death, Hostile, Mismatch, Paths, Ranks, Restart, ZeroCopy};
    // Equal operations that began at different seqs were combined: `OpDesc::tree_signature`.
    let torn = [(Mismatch, 1649), (Mismatch, 1758)];
    // The refusal of a later chunk replaced that of an earlier one.
    let replaced = [578, 755, 1109, 1183, 1276, 1865].map(|seed| (Mismatch, seed));
    // 256 ranks probed at the same moments: `Uplink` had no jitter.
    let crowded = [(Death, 472), (Restart, 1693), (Hostile, 1984)];
    // A barrier completed that a failed rank had not called: `recovery::plan`.
    let passed = [13, 49, 93, 140].map(|seed| (Ranks, seed));
    // Worlds of tenants: unremoved trees filled a device; a queue position was not reported; a device that renewed late
    // was forgotten; nodes without ranks kept each other's groups; a rank with all results recovered its tree with
    // ranks that had left; a job that no device answered counted as a later one; jobs that a device refused retried
    // without end, because of each other's rollbacks.
    let tenants = [1_795_360_704_003_162, 1_795_367_790_000_969, 1_795_371_618_000_038, 1_795_376_618_002_178];
    for seed in [1, 4, 13, 15, 215, 351].into_iter().chain(tenants) {
        run_tenants(&Tenancy::draw(seed)).unwrap_or_else(|violation| panic!("tenants SEED={seed}: {violation}"));
    }
    // The same with started operations: a job waited for a device that had been silent to another job, which had ended
    // meanwhile; a reply of a controller that has ended was judged as the next one's.
    for seed in [1_795_400_292, 1_795_401_417] {
        run_tenants(&Tenancy::draw_started(seed))
            .unwrap_or_else(|violation| panic!("started SEED={seed}: {violation}"));
    }
    // An unreachable fetch was retried forever if others preceded it: `RedoSlot::reached`.
    let fetched = [83, 256, 437].map(|seed| (ZeroCopy, seed));
    // A gap was queued to be asked for while it still waited to be: `Endpoint::ask_for_gaps`.
    let doubled = [(Death, 1_795_360_217_000_356)];
    // A copy queued for a child that had the answer by then held its slot back: `GroupCtx::is_reusable`.
    let outdated = [(Restart, 1_795_372_110_001_202)];
    // Duplicates that links held back counted against the limit of packets in flight: `Fabric::sent_in_flight`.
    let held = [(Restart, 1_795_380_982_008_740)];
    // A limit was taken from the description of a later operation: `GroupCtx::operation_of`.
    let described = [374, 392].map(|seed| (Hostile, seed));
    // While ranks still probed and devices no longer did, the controller was busy asking nobody: `TreeProbes::ask_at`.
    let busy = [(Paths, 0), (Paths, 2)];
    // Answers about the path to a shard of the leaf but the first were dropped: `Endpoint::poll_path`. Short payloads
    // under full headers did not fit a path that the shortest chunk fitted: `wire::packet_len_max`.
    let narrow = [(Paths, 35), (Paths, 26)];
    let early = torn.into_iter().chain(replaced).chain(crowded).chain(passed);
    for (kind, seed) in
        early.chain(fetched).chain(doubled).chain(outdated).chain(held).chain(described).chain(busy).chain(narrow)
    {
        run(&Options::draw(seed, kind)).unwrap_or_else(|violation| panic!("{kind:?} SEED={seed}: {violation}"));
    }
}

/// Replaying the recorded faults of a run gives the same report.
#[test]
fn recorded_faults_replay_the_same_run() {
    let mut faults = 0;
    for (seed, kind) in (0..6).flat_map(|seed| KINDS.map(|kind| (seed, kind))) {
        let options = Options::draw(seed, kind);
        let (report, script) = record(&options);
        assert_eq!(run(&options), report, "{kind:?} {seed}: recording changes nothing");
        let mut again = options;
        again.faults.script = Some(script.clone());
        assert_eq!(record(&again), (report, script.clone()), "{kind:?} {seed}");
        faults += script.len();
    }
    assert!(faults > 1000, "{faults} faults");
}

#[test]
fn same_seed_gives_the_same_log() {
    let drawn = |seed| {
        [Tenancy::draw(seed), Tenancy::draw_started(seed), Tenancy::draw_hosts(seed), Tenancy::draw_stripes(seed)]
    };
    for plan in (0..30).flat_map(drawn) {
        let (seed, starts, shares_hosts) = (plan.seed, plan.starts, plan.shares_hosts);
        assert_eq!(run_tenants(&plan), run_tenants(&plan), "tenants {seed}, {starts}, {shares_hosts}");
    }
    for kind in KINDS {
        let report = |seed| run(&Options::draw(seed, kind)).unwrap_or_else(|violation| panic!("{seed}: {violation}"));
        let reports: Vec<Report> = (0..6).map(report).collect();
        let again: Vec<Report> = (0..6).map(report).collect();
        assert_eq!(reports, again, "{kind:?}");
        assert!(reports.windows(2).all(|pair| pair[0].log_hash != pair[1].log_hash), "{kind:?}");
    }
}

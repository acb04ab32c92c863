//! Seeded swarms, one a scenario. `SEED=n` runs one seed, `SEEDS=n` that many from `SEED_FROM` on. A seed that fails
//! prints how to repeat it, and the first one also a test with as few faults as it takes.
//!
//! The last scenario to end prints what all have covered: every step of the state machines and every reason to drop a
//! packet. With [`SEEDS_FOR_ALL`] seeds or more each that can be met has to have been.

use std::sync::Mutex;
use sumac_hal::ctrl::DropReason;
use sumac_tests::sim::{
    Extents, Options, Report, ScenarioKind, Stragglers, Tenancy, TenantReport, record, run, run_stragglers,
    run_tenants, shrink, shrink_tenants,
};

const KINDS: [ScenarioKind; 8] = [
    ScenarioKind::Calm,
    ScenarioKind::Mismatch,
    ScenarioKind::Death,
    ScenarioKind::Restart,
    ScenarioKind::Hostile,
    ScenarioKind::Repair,
    ScenarioKind::Ranks,
    ScenarioKind::Reference,
];

/// Scenarios beside [`KINDS`]: ranks that come late, and tenants.
const OTHERS: usize = 2;

/// The most seeds of ranks that come late: some of their clusters are large.
const LATE_MAX: u64 = 500;

/// From so many seeds a scenario on nothing may be missed.
const SEEDS_FOR_ALL: u64 = 300;

/// How many scenarios have ended, the fewest seeds that one had, and what all have covered.
static ALL: Mutex<(usize, u64, Option<Report>)> = Mutex::new((0, u64::MAX, None));

/// How many runs the shortest script of a failing seed may take to be found.
const SHRINK_RUNS: usize = 500;

fn number(name: &str) -> Option<u64> {
    std::env::var(name).ok().map(|text| text.parse().unwrap_or_else(|_| panic!("{name}={text} is not a number")))
}

/// Run `seeds` clusters of one kind, print what they covered, and check that each of `marks` was hit.
fn swarm(kind: ScenarioKind, seeds: u64, marks: &[&str]) {
    let test = format!("{kind:?}").to_lowercase();
    // The harness runs each test on a thread of the test's name, or all on the main one.
    let thread = std::thread::current();
    let name = thread.name().filter(|name| *name != "main").unwrap_or(&test);
    assert_eq!(name, test, "the line that repeats a seed has to name this test");
    let from = number("SEED_FROM").unwrap_or(0);
    let one = number("SEED");
    // Those by reference are small, and some of what they can meet is rare.
    let times = if kind == ScenarioKind::Reference { 10 } else { 1 };
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
    assert!(one.is_some() || missed.is_empty(), "never happened: {missed:?}");
    add(count, &total);
}

/// Add a scenario to what all have covered; the last one has it judged.
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

/// Print what all scenarios have covered, and check that nothing is missed that can be met.
fn cover(fewest: u64, all: &Report) {
    let (mut missed, mut wrong) = (Vec::new(), Vec::new());
    println!("All scenarios, {fewest} seeds each at least: {:?} of virtual time", all.took);
    let counts = [("packets", all.packets), ("repaired operations", all.repairs), ("view changes", all.view_changes)];
    counts.iter().for_each(|(name, count)| println!("  {name:36}{count:>12}"));
    for (what, rows) in [("transitions", all.transitions()), ("drop reasons", all.drops())] {
        let met = rows.iter().filter(|(_, count, _)| *count > 0).count();
        let all = rows.iter().filter(|(_, _, why)| why.is_none()).count();
        println!("  {what}: {met} seen of {all} that can be");
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
        println!("  {name}: {} to {} met of {} to {}", met[0], met[1], limits[0], limits[1]);
        if met[0] > limits[0] || met[1] < limits[1] {
            short.push((name, met));
        }
    }
    assert!(fewest < SEEDS_FOR_ALL || short.is_empty(), "not from the least to the most: {short:?}");
    assert!(wrong.is_empty(), "can be met, and said to be not: {wrong:?}");
    assert!(fewest < SEEDS_FOR_ALL || missed.is_empty(), "never met: {missed:?}");
}

/// What every kind of cluster with lossy links runs into.
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
fn calm() {
    swarm(ScenarioKind::Calm, 300, &[&LOSSY[..], &["incast drops", "marked", "ends: complete"]].concat());
}

#[test]
fn mismatch() {
    swarm(ScenarioKind::Mismatch, 150, &[&LOSSY[..], &["ends: complete", "ends: mismatch"]].concat());
}

#[test]
fn death() {
    let ends = ["drop: unknown-group", "ends: complete", "ends: path lost", "ends: group lost"];
    swarm(ScenarioKind::Death, 100, &[&LOSSY[..], &ends].concat());
}

#[test]
fn restart() {
    let ends = ["drop: unknown-group", "drop: wrong-epoch", "ends: complete", "ends: path lost", "ends: group lost"];
    swarm(ScenarioKind::Restart, 100, &[&LOSSY[..], &ends].concat());
}

#[test]
fn hostile() {
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
fn repair() {
    let ends = ["drop: unknown-group", "ends: complete", "view changes", "repaired operations", "repair bytes"];
    swarm(ScenarioKind::Repair, 100, &[&LOSSY[..], &ends].concat());
}

/// Ranks that come late to operations that have a limit, or never: the others go on without them, or all fail by name.
#[test]
fn late() {
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
                println!("  replay: SEED={seed} cargo test -p sumac-tests --test swarm late -- --exact --nocapture");
                failed.push(seed);
            }
        }
    }
    println!("{total:?}");
    assert!(failed.is_empty(), "seeds {failed:?} failed");
    let Stragglers { decisions, left_out, waited_for, failed, dropped, partial } = total;
    let marks = [decisions, left_out, waited_for, failed, dropped, partial];
    assert!(one.is_some() || marks.iter().all(|&mark| mark > 0), "never happened: {total:?}");
    let mut report = Report::default();
    (0..dropped).for_each(|_| report.counters.drop_packet(DropReason::Late));
    add(if one.is_some() { 1 } else { u64::MAX }, &report);
}

#[test]
fn ranks() {
    let ends = [
        "ends: complete",
        "ends: ranks failed",
        "ends: partitioned",
        "ranks killed",
        "view changes",
        "repaired operations",
        "repair bytes",
    ];
    swarm(ScenarioKind::Ranks, 100, &[&LOSSY[..], &ends].concat());
}

/// Tenants with quotas, jobs that come and go on shared devices, trees that are lost and come back.
#[test]
fn tenants() {
    let one = number("SEED");
    let from = number("SEED_FROM").unwrap_or(0);
    let seeds = one.map_or(from..from + number("SEEDS").unwrap_or(100), |seed| seed..seed + 1);
    let count = seeds.end - seeds.start;
    let (mut total, mut failed) = (TenantReport::default(), Vec::new());
    for seed in seeds {
        let plan = Tenancy::draw(seed);
        match run_tenants(&plan) {
            Ok(report) => total.merge(&report),
            Err(violation) => {
                println!("SEED={seed} {plan:?}\n  {violation}");
                println!("  replay: SEED={seed} cargo test -p sumac-tests --test swarm tenants -- --exact --nocapture");
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
    println!("Tenants: {:?} of virtual time, log hash {:#018x}", total.took, total.log_hash);
    total.counts().iter().for_each(|(name, n)| println!("  {name:24}{n:>10}"));
    let report = Report { seen: total.seen, extents: total.extents, took: total.took, ..Report::default() };
    let met = report.transitions().into_iter().filter(|(name, ..)| name.starts_with("tenants: "));
    met.for_each(|(name, n, _)| println!("  {name:36}{n:>10}"));
    println!("  devices, levels, ranks, tenants: {:?}", total.extents.of);
    assert!(failed.is_empty(), "seeds {failed:?} failed");
    let missed: Vec<_> = total.counts().into_iter().filter(|(_, n)| **n == 0).map(|(name, _)| name).collect();
    assert!(one.is_some() || missed.is_empty(), "never happened: {missed:?}");
    add(count, &report);
}

#[test]
fn reference() {
    let ends = ["ends: complete", "ends: ranks failed", "ranks killed", "view changes", "repaired operations"];
    swarm(ScenarioKind::Reference, 300, &ends);
}

/// Seeds that failed once, by what was wrong. A change of what is drawn from a seed makes another cluster of it; what
/// these found has a test of its own beside the code that was mended.
#[test]
fn seeds_that_failed_once() {
    use ScenarioKind::{Death, Hostile, Mismatch, Ranks, Reference, Restart};
    // Operations called alike that begin at different seqs combined: `OpDesc::tree_signature`.
    let torn = [(Mismatch, 1649), (Mismatch, 1758)];
    // A refusal of a later chunk took the place of an earlier one's.
    let told = [578, 755, 1109, 1183, 1276, 1865].map(|seed| (Mismatch, seed));
    // 256 ranks asked again at the same moments: `Uplink` without jitter.
    let crowded = [(Death, 472), (Restart, 1693), (Hostile, 1984)];
    // A barrier was passed that a dead rank had not come to: `repair::plan`.
    let passed = [13, 140, 164].map(|seed| (Ranks, seed));
    // A run was judged while letters waited for ranks to hear each other again: `Cluster::settled_at`.
    let unsettled = [5_000_699, 5_000_833].map(|seed| (Ranks, seed));
    // Worlds of tenants: trees that nobody removed filled a device, a place in the queue was not told, a device that had not
    // renewed in time was forgotten, nodes whose ranks were gone kept each other's groups, a rank that had all repaired its
    // tree with ranks that had left, a job that no device answered was taken for one that came later.
    for seed in [1, 4, 13, 15, 215, 351, 1_795_360_704_003_162, 1_795_367_790_000_969, 1_795_371_618_000_038] {
        run_tenants(&Tenancy::draw(seed)).unwrap_or_else(|violation| panic!("tenants SEED={seed}: {violation}"));
    }
    // What can never be fetched was fetched for ever, where others were fetched before it: `RedoSlot::reached`.
    let fetched = [83, 256, 437].map(|seed| (Reference, seed));
    // A gap was queued to be asked for while it still waited to be: `Endpoint::ask_for_gaps`.
    let doubled = [(Death, 1_795_360_217_000_356)];
    let early = torn.into_iter().chain(told).chain(crowded).chain(passed);
    for (kind, seed) in early.chain(unsettled).chain(fetched).chain(doubled) {
        run(&Options::draw(seed, kind)).unwrap_or_else(|violation| panic!("{kind:?} SEED={seed}: {violation}"));
    }
}

/// What the links did wrong in a run, written down and repeated, is the same run.
#[test]
fn a_script_repeats_its_run() {
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
fn same_seed_same_log() {
    for seed in 0..30 {
        let plan = Tenancy::draw(seed);
        assert_eq!(run_tenants(&plan), run_tenants(&plan), "tenants {seed}");
    }
    for kind in KINDS {
        let report = |seed| run(&Options::draw(seed, kind)).unwrap_or_else(|violation| panic!("{seed}: {violation}"));
        let reports: Vec<Report> = (0..6).map(report).collect();
        let again: Vec<Report> = (0..6).map(report).collect();
        assert_eq!(reports, again, "{kind:?}");
        assert!(reports.windows(2).all(|pair| pair[0].log_hash != pair[1].log_hash), "{kind:?}");
    }
}

//! Tests the simulator's oracles: each planted bug ([`Bug`]) must be found; prints the number of seeds that it takes.
//! Also tests the shrinker on the failures.
//!
//! Seed n runs one cluster of the n-th kind in turn, or of the only kind that can show the bug; most bugs of the
//! controller, and those of ranks' calls and handles, are searched in scenarios of tenants. `SEEDS=n` limits the seeds
//! per bug, `BUGS=Name,Name` selects bugs. The table also shows how many link faults, of those recorded, suffice to
//! reproduce the bug.

use std::collections::BTreeMap;
use std::sync::Mutex;
use std::sync::atomic::{AtomicUsize, Ordering};
use sumac_hal::planted::Bug;
use sumac_tests::sim::{
    Options, Planted, ScenarioKind, Tenancy, Violation, every_device_loss, run, run_tenants, shrink, shrink_tenants,
};

const KINDS: [ScenarioKind; 6] = [
    ScenarioKind::Calm,
    ScenarioKind::Mismatch,
    ScenarioKind::Death,
    ScenarioKind::Restart,
    ScenarioKind::Hostile,
    ScenarioKind::Recovery,
];

/// The default limit of seeds per bug.
const SEEDS: u64 = 10_000;

/// The maximum number of runs to shrink a failure.
const SHRINK_RUNS: usize = 30;

/// Return the kinds of cluster in which to search for a bug; none for scenarios of tenants.
fn kinds(bug: Bug) -> &'static [ScenarioKind] {
    match bug {
        _ if is_of_tenants(bug) => &[],
        Bug::LateAnswerAccepted => &[ScenarioKind::Severing],
        // Other kinds of cluster have no controller.
        Bug::SameEpoch => &[ScenarioKind::Recovery],
        _ if Bug::OF_PATHS.contains(&bug) => &[ScenarioKind::Paths],
        _ if Bug::ZERO_COPY.contains(&bug) => &[ScenarioKind::ZeroCopy],
        _ => &KINDS,
    }
}

fn cluster(kinds: &[ScenarioKind], seed: u64) -> Options {
    Options::draw(seed, kinds[seed as usize % kinds.len()])
}

fn with(bug: Bug, seed: u64) -> Options {
    Options { planted: bug.into(), ..cluster(kinds(bug), seed) }
}

fn tenancy(bug: Bug, seed: u64) -> Tenancy {
    let draw = match bug {
        _ if is_of_started(bug) => Tenancy::draw_started,
        _ if is_of_hosts(bug) => Tenancy::draw_hosts,
        _ => Tenancy::draw,
    };
    Tenancy { planted: bug.into(), ..draw(seed) }
}

/// Return whether it takes ranks that start several operations at once.
const fn is_of_started(bug: Bug) -> bool {
    matches!(
        bug,
        Bug::DroppedOperationFreed | Bug::RunningDropMissed | Bug::EarlierScheduleSkipped | Bug::EndedScheduleRun
    )
}

/// Return whether it takes a device with one shard below one with several: that of a host.
const fn is_of_hosts(bug: Bug) -> bool {
    matches!(bug, Bug::FirstShardOnly | Bug::LocalNumbersMixed)
}

/// Return whether only scenarios of tenants run the code that has the bug.
const fn is_of_tenants(bug: Bug) -> bool {
    let is_of_tenants = matches!(
        bug,
        Bug::ReservationKept
            | Bug::NewestFirst
            | Bug::QuotaAfterBooking
            | Bug::OldReservationTrusted
            | Bug::NumbersReused
            | Bug::MinorityResumed
            | Bug::ViewReused
            | Bug::EarlierPathForgotten
            | Bug::RefusedCallCounted
            | Bug::DoubtForgotten
            | Bug::LoneMigration
            | Bug::StalledPeerKept
            | Bug::OutputUnbounded
    );
    is_of_tenants || is_of_started(bug) || is_of_hosts(bug)
}

/// A bug that was found: the seed, the scenario, the oracle, and the number of link faults that reproduce it.
struct Found {
    seed: u64,
    place: String,
    faults: String,
    oracle: &'static str,
}

/// Search for a bug in the first `limit` seeds.
fn look_for(bug: Bug, limit: u64) -> Option<Found> {
    if is_of_tenants(bug) {
        let seed = (0..limit).find(|&seed| run_tenants(&tenancy(bug, seed)).is_err())?;
        let shrunk = shrink_tenants(&tenancy(bug, seed), SHRINK_RUNS)?;
        let left = shrunk.plan.faults.script.as_ref().map_or(0, Vec::len);
        let faults = format!("{left} of {}", shrunk.recorded);
        return Some(Found { seed, place: "Tenants".into(), faults, oracle: shrunk.violation.oracle });
    }
    let seed = (0..limit).find(|&seed| run(&with(bug, seed)).is_err())?;
    let shrunk = shrink(&with(bug, seed), SHRINK_RUNS)?;
    let left = shrunk.options.faults.script.as_ref().map_or(0, Vec::len);
    let place = format!("{:?}", shrunk.options.scenario.kind());
    let faults = format!("{left} of {}", shrunk.recorded);
    Some(Found { seed, place, faults, oracle: shrunk.violation.oracle() })
}

/// Run `work` for each number below `count`, on all cores.
fn on_all_cores<R: Send>(count: usize, work: impl Fn(usize) -> R + Sync) -> Vec<R> {
    let next = AtomicUsize::new(0);
    let done: Vec<Mutex<Option<R>>> = (0..count).map(|_| Mutex::new(None)).collect();
    std::thread::scope(|scope| {
        for _ in 0..std::thread::available_parallelism().map_or(1, usize::from) {
            scope.spawn(|| {
                while let Some((item, place)) =
                    Some(next.fetch_add(1, Ordering::Relaxed)).and_then(|item| Some((item, done.get(item)?)))
                {
                    *place.lock().unwrap() = Some(work(item));
                }
            });
        }
    });
    done.into_iter().map(|result| result.into_inner().unwrap().expect("every number was taken")).collect()
}

/// Bugs that concern many jobs, calls beside the tree, or handles are found within few seeds, each by the matching
/// oracle. Of a rank's wrong announcement, others see the wrong operation, or wait for it: both oracles find it.
#[test]
fn planted_bugs_of_tenants_are_found() {
    let oracles = [
        (Bug::ReservationKept, "kept on one node"),
        (Bug::NewestFirst, "order of the queue"),
        (Bug::QuotaAfterBooking, "over a quota"),
        (Bug::OldReservationTrusted, "left behind"),
        (Bug::NumbersReused, "group number reused"),
        (Bug::MinorityResumed, "minority"),
        (Bug::ViewReused, "view reused"),
        (Bug::EarlierPathForgotten, "different operations"),
        (Bug::RefusedCallCounted, "hang"),
        (Bug::FirstShardOnly, "hang"),
        (Bug::LocalNumbersMixed, "hang"),
        (Bug::DoubtForgotten, "hang"),
        (Bug::LoneMigration, "hang"),
        (Bug::DroppedOperationFreed, "freed too early"),
        (Bug::RunningDropMissed, "held at the end"),
        (Bug::EarlierScheduleSkipped, "hang"),
        (Bug::EndedScheduleRun, "begun after the end"),
        (Bug::StalledPeerKept, "stalled client"),
        (Bug::OutputUnbounded, "output limit"),
    ];
    for (bug, oracle) in oracles {
        // Few jobs move, and fewer get different answers there; few ranks are in a host collective while the view
        // changes.
        let is_rare = matches!(bug, Bug::LoneMigration | Bug::EarlierPathForgotten);
        let limit = if is_rare { 1_000 } else { 300 };
        let violations = (0..limit).filter_map(|seed| Some((seed, run_tenants(&tenancy(bug, seed)).err()?)));
        let is_acceptable = |found: &str| found == oracle || bug == Bug::EarlierPathForgotten && found == "hang";
        let mut violations = violations.inspect(|(seed, violation)| {
            assert!(is_acceptable(violation.oracle), "{bug:?} at seed {seed}: {violation}");
        });
        let is_found = violations.any(|(_, violation)| violation.oracle == oracle);
        assert!(is_found, "{oracle} does not find {bug:?} in {limit} seeds");
    }
}

/// Print the number of seeds that each bug took; fail if one exceeds the limit, or if a seed fails without any bug.
#[test]
fn planted_bugs_are_found() {
    let limit = std::env::var("SEEDS").map_or(SEEDS, |text| text.parse().unwrap_or_else(|_| panic!("SEEDS={text}")));
    // Suppress the messages of assertions in the code, which would hide the table.
    let hook = std::panic::take_hook();
    std::panic::set_hook(Box::new(|_| {}));
    let asked = std::env::var("BUGS").ok();
    let is_asked =
        |bug: &Bug| asked.as_ref().is_none_or(|names| names.split(',').any(|name| name == format!("{bug:?}")));
    let bugs: Vec<Bug> = Bug::ALL.into_iter().filter(is_asked).collect();
    let found = on_all_cores(bugs.len(), |nth| look_for(bugs[nth], limit));
    std::panic::set_hook(hook);

    println!("{:20}{:>6}  {:10}{:>12}  found by", "bug", "seeds", "in", "faults");
    for (bug, found) in bugs.iter().zip(&found) {
        let name = format!("{bug:?}");
        match found {
            Some(Found { seed, place, faults, oracle }) => {
                println!("{name:20}{:>6}  {place:10}{faults:>12}  {oracle}", seed + 1);
            }
            None => println!("{name:20}     -  not found in {limit} seeds"),
        }
    }
    // It was the bug: what found it passes without it. That all seeds do is for the stage seeds to show.
    let fails = |nth: usize| {
        let (bug, seed) = (bugs[nth], found[nth].as_ref()?.seed);
        let violation = if is_of_tenants(bug) {
            let mended = Tenancy { planted: Default::default(), ..tenancy(bug, seed) };
            run_tenants(&mended).err()?.to_string()
        } else {
            let mended = Options { planted: Default::default(), ..with(bug, seed) };
            run(&mended).err()?.to_string()
        };
        Some((bug, seed, violation))
    };
    let without: Vec<_> = on_all_cores(bugs.len(), fails).into_iter().flatten().collect();
    assert!(without.is_empty(), "without the bug: {without:?}");
    println!("the seeds that found them, without the bugs: passed");
    assert!(found.iter().all(Option::is_some), "not all were found");
}

/// Of hundreds of faults a few are left, they are enough, and it takes each of them.
#[test]
fn failing_seed_shrinks_to_a_short_script() {
    let bug = Bug::VersionBit;
    let seed = (0..SEEDS).find(|&seed| run(&with(bug, seed)).is_err()).expect("it is found");
    let shrunk = shrink(&with(bug, seed), 2000).expect("it fails");
    println!("{shrunk}");
    let script = shrunk.options.faults.script.clone().expect("it is scripted");
    assert!(shrunk.recorded > 50 && script.len() < 5, "{} of {} faults", script.len(), shrunk.recorded);
    assert_eq!(run(&shrunk.options).err().as_ref(), Some(&shrunk.violation));
    for without in 0..script.len() {
        let mut fewer = shrunk.options.clone();
        fewer.faults.script.as_mut().expect("it is scripted").remove(without);
        let found = run(&fewer).err().map(|violation| std::mem::discriminant(&violation));
        assert_ne!(found, Some(std::mem::discriminant(&shrunk.violation)), "fault {without} is not needed");
    }
    let mended = Options { planted: Default::default(), ..shrunk.options };
    run(&mended).unwrap_or_else(|violation| panic!("without the bug: {violation}"));
}

/// By reference, chains, devices and ranks fail as well: the few of these that it takes are left, and each is needed.
#[test]
fn failing_zero_copy_seed_shrinks_to_fewer_faults() {
    let bug = Bug::RecordIgnored;
    let seed = (0..SEEDS).find(|&seed| run(&with(bug, seed)).is_err()).expect("it is found");
    let shrunk = shrink(&with(bug, seed), 2000).expect("it fails");
    println!("{shrunk}");
    let kept = shrunk.mishaps.clone().expect("it is by reference");
    let keep = |kept: &[usize]| {
        let mut options = with(bug, seed);
        options.faults.script.clone_from(&shrunk.options.faults.script);
        options.keep_mishaps(kept);
        run(&options).err()
    };
    assert!((1..4).contains(&kept.len()), "{kept:?}");
    assert_eq!(keep(&kept).as_ref(), Some(&shrunk.violation));
    assert!(shrunk.to_string().contains(&format!("options.keep_mishaps(&{kept:?});")), "it prints as a test");
    for without in 0..kept.len() {
        let mut fewer = kept.clone();
        fewer.remove(without);
        let found = keep(&fewer).map(|violation| std::mem::discriminant(&violation));
        assert_ne!(found, Some(std::mem::discriminant(&shrunk.violation)), "mishap {without} is not needed");
    }
}

/// Out of place, inputs are intact while an operation runs, so redo slots look superfluous. They are not. A device may
/// die after it has answered one rank, whose caller overwrites its buffers at once, and before it answers another. And
/// a chunk that was half written is torn until it is computed again, which takes every rank.
#[test]
fn results_out_of_place_without_redo_slots_are_lost_or_torn() {
    let bug = Bug::OutOfPlaceUnpublished;
    let mut found = BTreeMap::<_, usize>::new();
    for options in every_device_loss(bug.into()) {
        if let Err(violation) = run(&options) {
            *found.entry(violation.oracle()).or_default() += 1;
        }
    }
    println!("losses of devices: {found:?}");
    assert!(found.keys().eq(&["torn chunk", "unrecoverable"]), "{found:?}");
    for (seed, oracle) in OUT_OF_PLACE_SEEDS {
        let violation = run(&with(bug, seed)).err();
        assert_eq!(violation.as_ref().map(Violation::oracle), Some(oracle), "seed {seed}: {violation:?}");
        let mended = Options { planted: Planted::default(), ..with(bug, seed) };
        run(&mended).unwrap_or_else(|violation| panic!("seed {seed} without the bug: {violation}"));
    }
}

/// Seeds that find [`Bug::OutOfPlaceUnpublished`], and what finds it.
const OUT_OF_PLACE_SEEDS: [(u64, &str); 3] = [(52, "torn chunk"), (70, "torn chunk"), (1208, "unrecoverable")];

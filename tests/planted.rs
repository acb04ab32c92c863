//! How good the simulator's oracles are: each planted bug ([`Bug`]) has to be found, and within how many seeds it is.
//! And what the shrinker makes of what was found.
//!
//! Seed n runs one cluster, of the n-th kind in turn; bugs of the controller's own decisions are looked for in worlds of
//! tenants. `SEEDS=n` sets how many seeds a bug may take. The table also says
//! how many faults of the links it takes to show the bug, out of how many there were.

use std::sync::Mutex;
use std::sync::atomic::{AtomicUsize, Ordering};
use sumac_hal::planted::Bug;
use sumac_tests::sim::{Options, ScenarioKind, Tenancy, run, run_tenants, shrink, shrink_tenants};

const KINDS: [ScenarioKind; 6] = [
    ScenarioKind::Calm,
    ScenarioKind::Mismatch,
    ScenarioKind::Death,
    ScenarioKind::Restart,
    ScenarioKind::Hostile,
    ScenarioKind::Repair,
];

/// Seeds that a bug may take.
const SEEDS: u64 = 10_000;

/// Runs that the shortest script of a bug may take to be found.
const SHRINK_RUNS: usize = 200;

fn cluster(seed: u64) -> Options {
    Options::draw(seed, KINDS[seed as usize % KINDS.len()])
}

fn with(bug: Bug, seed: u64) -> Options {
    Options { planted: bug.into(), ..cluster(seed) }
}

fn tenancy(bug: Bug, seed: u64) -> Tenancy {
    Tenancy { planted: bug.into(), ..Tenancy::draw(seed) }
}

/// Tell whether it is a bug of what the controller decides, which clusters of other kinds have only a model of.
const fn is_of_tenants(bug: Bug) -> bool {
    matches!(bug, Bug::ReservationKept | Bug::NewestFirst | Bug::QuotaAfterBooking | Bug::OldLeaseBelieved)
}

/// A bug that was found: at which seed, in what, by what, and how many faults of the links it takes.
struct Found {
    seed: u64,
    place: String,
    faults: String,
    oracle: &'static str,
}

/// Look for a bug in the first `limit` seeds.
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
    let place = format!("{:?}", KINDS[seed as usize % KINDS.len()]);
    let faults = format!("{left} of {}", shrunk.recorded);
    Some(Found { seed, place, faults, oracle: shrunk.violation.oracle() })
}

/// Do `work` for each number below `count`, on all cores.
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

/// The controller's own are found in few seeds each, by an oracle that says what is wrong.
#[test]
fn those_of_the_controller_are_found_by_name() {
    let oracles = [
        (Bug::ReservationKept, "kept on one node"),
        (Bug::NewestFirst, "order of the queue"),
        (Bug::QuotaAfterBooking, "over a quota"),
        (Bug::OldLeaseBelieved, "left behind"),
    ];
    for (bug, oracle) in oracles {
        let found = look_for(bug, 300).unwrap_or_else(|| panic!("{bug:?} is not found"));
        assert_eq!(found.oracle, oracle, "{bug:?} at seed {}", found.seed);
    }
}

/// Print how many seeds each bug took, and fail if one took more than it may, or a seed fails without any bug.
#[test]
fn each_is_found() {
    let limit = std::env::var("SEEDS").map_or(SEEDS, |text| text.parse().unwrap_or_else(|_| panic!("SEEDS={text}")));
    // Some are found by an assertion of the code: what it says would hide the table.
    let hook = std::panic::take_hook();
    std::panic::set_hook(Box::new(|_| {}));
    let found = on_all_cores(Bug::ALL.len(), |nth| look_for(Bug::ALL[nth], limit));
    std::panic::set_hook(hook);

    println!("{:20}{:>6}  {:10}{:>12}  found by", "bug", "seeds", "in", "faults");
    for (bug, found) in Bug::ALL.iter().zip(&found) {
        let name = format!("{bug:?}");
        match found {
            Some(Found { seed, place, faults, oracle }) => {
                println!("{name:20}{:>6}  {place:10}{faults:>12}  {oracle}", seed + 1);
            }
            None => println!("{name:20}     -  not found in {limit} seeds"),
        }
    }
    let most = |of_tenants| {
        let found = Bug::ALL.iter().zip(&found).filter(|(bug, _)| is_of_tenants(**bug) == of_tenants);
        found.filter_map(|(_, found)| Some(found.as_ref()?.seed + 1)).max().unwrap_or(0)
    };
    let without = on_all_cores(most(false) as usize, |seed| {
        run(&cluster(seed as u64)).err().map(|violation| (seed, violation.to_string()))
    });
    let of_tenants = on_all_cores(most(true) as usize, |seed| {
        run_tenants(&Tenancy::draw(seed as u64)).err().map(|violation| (seed, violation.to_string()))
    });
    let without: Vec<_> = without.into_iter().chain(of_tenants).flatten().collect();
    assert!(without.is_empty(), "without any bug: {without:?}");
    println!("the same seeds, {} and {} of tenants, without any bug: passed", most(false), most(true));
    assert!(found.iter().all(Option::is_some), "not all were found");
}

/// Of hundreds of faults a few are left, they are enough, and it takes each of them.
#[test]
fn a_failing_seed_shrinks_to_a_short_script() {
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

//! Seeded swarms, one a scenario. `SEED=n` runs one seed, `SEEDS=n` that many from `SEED_FROM` on.

use sumac_tests::sim::{Options, Report, ScenarioKind, run};

fn number(name: &str) -> Option<u64> {
    std::env::var(name).ok().map(|text| text.parse().unwrap_or_else(|_| panic!("{name}={text} is not a number")))
}

/// Run `seeds` clusters of one kind, print what they covered, and check that each of `marks` was hit.
fn swarm(kind: ScenarioKind, seeds: u64, marks: &[&str]) {
    let from = number("SEED_FROM").unwrap_or(0);
    let one = number("SEED");
    let range = one.map_or(from..from + number("SEEDS").unwrap_or(seeds), |seed| seed..seed + 1);
    let mut failed = Vec::new();
    let mut total = Report::default();
    for seed in range {
        let options = Options::draw(seed, kind);
        match run(&options) {
            Ok(report) => total.merge(&report),
            Err(violation) => {
                println!("SEED={seed} {options:?}\n  {violation}");
                println!("  replay: SEED={seed} cargo test -p sumac-tests --test swarm {kind:?} -- --nocapture");
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
}

#[test]
fn calm() {
    swarm(ScenarioKind::Calm, 300, &[]);
}

#[test]
fn mismatch() {
    swarm(ScenarioKind::Mismatch, 200, &[]);
}

#[test]
fn death() {
    swarm(ScenarioKind::Death, 150, &[]);
}

#[test]
fn restart() {
    swarm(ScenarioKind::Restart, 150, &[]);
}

#[test]
fn hostile() {
    swarm(ScenarioKind::Hostile, 150, &[]);
}

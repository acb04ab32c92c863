//! Seeded swarms: `SEED=n` runs one seed, `SEEDS=n` that many from `SEED_FROM` on.

use sumac_tests::sim::{Options, run};

fn number(name: &str) -> Option<u64> {
    std::env::var(name).ok().map(|text| text.parse().unwrap_or_else(|_| panic!("{name}={text} is not a number")))
}

#[test]
fn swarm() {
    let seeds = match number("SEED") {
        Some(seed) => seed..seed + 1,
        None => {
            let from = number("SEED_FROM").unwrap_or(0);
            from..from + number("SEEDS").unwrap_or(300)
        }
    };
    let mut failed = Vec::new();
    for seed in seeds {
        let options = Options::draw(seed);
        match run(&options) {
            Ok(report) if number("SEED").is_some() => println!("SEED={seed} {options:?}\n{report:?}"),
            Ok(_) => {}
            Err(violation) => {
                println!(
                    "SEED={seed} {options:?}\n  {violation}\n  replay: SEED={seed} cargo test -p sumac-tests --test swarm -- --nocapture"
                );
                failed.push(seed);
            }
        }
        if failed.len() > 5 {
            break;
        }
    }
    assert!(failed.is_empty(), "seeds {failed:?} failed");
}

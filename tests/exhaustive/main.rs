//! Small clusters in all their states: every interleaving of packets, losses, duplicates, timers, calls and restarts, by
//! the production state machines themselves.
//!
//! ```text
//! scope -> search -> library -> machine: device, rank -> sumac_device::Node, sumac::transport::packets::Endpoint
//!            |
//!          store: the states, each once
//! ```
//!
//! | file | what |
//! |---|---|
//! | `scope` | how large a search is; wiring; what ranks put in, and what has to come out |
//! | `machine`, `device`, `rank` | one machine between two events, taken apart by the feature `snapshot` |
//! | `library` | states of single machines and packets, by number; production code runs once for each pair |
//! | `search` | states of the cluster breadth first, the oracles, ways to the end, traces |
//! | `repair` | one repair with a second failure, from what ranks have in all states of their tree |
//! | `faithful` | that machines taken apart and put together after each event do what those do that never were |
//!
//! What has to hold in every state: buffers hold inputs or results, to the bit; no slot is used again while a rank below
//! needs what was in it; no node refuses what the rules allow to be sent; `stable` is true; nothing panics; and from
//! every state there is a way to the end without another fault, where nothing is left to be waited for.
//!
//! What is left out: time (timers that are armed may fire; `T_dead` and leases never pass; a contribution that follows
//! its hop's probe is taken to follow it by more than the 66 us that a hop tells apart), congestion marks, results to
//! shared addresses, contributions by reference, and nodes that begin to send what they can't finish sending.
//!
//! What becomes of it when the tree is lost for good, and something else with it, is searched by `repair`.
//!
//! `cargo test -p sumac-tests --test exhaustive -- --nocapture` shows what was searched; with `--ignored` the deep scopes,
//! which take minutes and some gigabytes each.

mod device;
mod faithful;
mod library;
mod machine;
mod rank;
mod repair;
mod scope;
mod search;
mod store;

use machine::Flaw;
use scope::{Rules, Scope, all_reduce, one_level, two_levels};
use search::{Violation, search};
use sumac_hal::ids::Rank;
use sumac_hal::op::{Dtype, OpDesc, ReduceOp};

/// Search scopes in which nothing may be wrong.
fn hold(scopes: impl IntoIterator<Item = Scope>) {
    println!("deeper scopes: cargo test -p sumac-tests --test exhaustive -- --ignored --nocapture --test-threads 1");
    for scope in scopes {
        match search(&scope) {
            Ok(report) => println!("{scope}: {report}"),
            Err(violation) => panic!("{scope}: {violation}"),
        }
    }
}

/// Search a scope in which something has to be found.
fn find(flaw: Flaw, scope: &Scope) -> Violation {
    let violation = match search(scope) {
        Ok(report) => panic!("{scope}: nothing found: {report}"),
        Err(violation) => *violation,
    };
    println!("{scope}: {violation}");
    assert_eq!(violation.flaw, flaw, "{scope}");
    violation
}

#[test]
fn one_level_holds() {
    hold([
        Scope::new(one_level(2), (1, 2), 6).with_faults(2, 2, 0),
        Scope::new(one_level(2), (1, 2), 4).with_faults(1, 1, 1),
        Scope::new(one_level(3), (1, 2), 6).with_faults(1, 1, 0),
        Scope::new(one_level(3), (1, 2), 4).with_faults(1, 0, 1),
        Scope::new(one_level(2), (2, 4), 6).with_faults(1, 1, 0),
        Scope::new(one_level(2), (2, 4), 9).with_faults(1, 0, 0),
        Scope::new(one_level(3), (2, 4), 5).with_faults(1, 0, 0),
    ]);
}

#[test]
fn two_levels_hold() {
    hold([
        Scope::new(two_levels(&[1, 1]), (1, 2), 4).with_faults(1, 1, 0),
        Scope::new(two_levels(&[1, 0]), (1, 2), 3).with_faults(1, 1, 1),
        Scope::new(two_levels(&[2, 0]), (1, 2), 5).with_faults(2, 0, 0),
        Scope::new(two_levels(&[2, 1]), (1, 2), 4).with_faults(1, 1, 0),
        Scope::new(two_levels(&[1, 0]), (2, 4), 5).with_faults(1, 0, 0),
        Scope::new(two_levels(&[2, 0]), (2, 4), 5),
    ]);
}

/// The other sets of who contributes and who receives, called one after the other.
#[test]
fn other_collectives_hold() {
    let calls = || {
        let broadcast = OpDesc::broadcast(Dtype::U64, Rank(1), 1);
        let reduce = OpDesc::reduce(Dtype::U64, ReduceOp::Sum, Rank(0), 1);
        vec![vec![broadcast, OpDesc::barrier(), OpDesc::barrier()], vec![reduce, all_reduce(1)]]
    };
    hold([
        Scope::new(one_level(2), (1, 2), 1).with_calls(calls()).with_faults(1, 0, 1),
        Scope::new(one_level(2), (2, 4), 1).with_calls(calls()).with_faults(1, 1, 0),
        Scope::new(two_levels(&[2, 0]), (1, 2), 1).with_calls(calls()).with_faults(1, 0, 0),
    ]);
}

/// A device starts again at any moment; the controller begins a new epoch at one machine after the other, while packets
/// of the old one are on their way.
#[test]
fn restarts_hold() {
    hold([
        Scope::new(one_level(2), (1, 2), 3).with_faults(1, 1, 0).with_restarts(1),
        Scope::new(one_level(2), (2, 4), 3).with_faults(1, 0, 0).with_restarts(1),
        Scope::new(one_level(2), (1, 2), 2).with_faults(1, 0, 1).with_restarts(1),
        Scope::new(two_levels(&[1, 0]), (1, 2), 2).with_faults(1, 1, 0).with_restarts(1),
        Scope::new(two_levels(&[2, 0]), (1, 2), 2).with_restarts(1),
    ]);
}

/// Machines that take in two packets before they send. A node did not take a chunk because an answer to a probe that was
/// overtaken was waiting in its slot.
#[test]
fn bursts_hold() {
    hold([
        Scope::new(one_level(2), (1, 2), 4).with_faults(1, 1, 1).with_bursts(),
        Scope::new(one_level(2), (2, 4), 5).with_faults(1, 1, 0).with_bursts(),
        Scope::new(two_levels(&[2, 0]), (1, 2), 3).with_faults(1, 1, 0).with_bursts(),
    ]);
}

/// Windows alone protect slots that are twice as many: nodes would not even have to wait for `have`.
#[test]
fn windows_alone_protect_slots_that_are_twice_as_many() {
    let trusting = Rules { trusting: true, ..Rules::default() };
    hold([
        Scope::new(one_level(2), (1, 2), 4).with_faults(1, 1, 0).with_rules(trusting),
        Scope::new(one_level(2), (2, 4), 6).with_faults(1, 0, 0).with_rules(trusting),
        Scope::new(two_levels(&[2, 0]), (1, 2), 4).with_faults(1, 1, 0).with_rules(trusting),
    ]);
}

/// Fewer slots: what is sent within the window is refused, and would cost another rank its result if it were not.
#[test]
fn fewer_slots_are_too_few() {
    let trusting = Rules { trusting: true, ..Rules::default() };
    for sizes in [(2, 3), (1, 1)] {
        for shape in [one_level(2), one_level(3), two_levels(&[2, 0])] {
            let scope = Scope::new(shape, sizes, 6).with_faults(1, 0, 0);
            let refused = find(Flaw::Refused, &scope);
            assert!(refused.text.contains("slot-busy"), "{refused}");
            find(Flaw::Freed, &scope.with_rules(trusting));
        }
    }
}

/// Counting what is in flight, in place of a window that begins at `have`, leaves somebody who has lost a result behind.
#[test]
fn a_counted_window_is_no_window() {
    let counted = Rules { counted: true, ..Rules::default() };
    for (shape, chunks) in [(one_level(2), 6), (two_levels(&[1, 0]), 5)] {
        let scope = Scope::new(shape, (2, 4), chunks).with_faults(1, 0, 0);
        let refused = find(Flaw::Refused, &scope.clone().with_rules(counted));
        assert!(refused.text.contains("over-window"), "{refused}");
        find(Flaw::Freed, &scope.with_rules(Rules { trusting: true, ..counted }));
    }
}

/// A new life in the old epoch takes in what was meant for the old life.
#[test]
fn one_epoch_for_two_lives_mixes_them() {
    let one_epoch = Rules { one_epoch: true, ..Rules::default() };
    find(Flaw::Wrong, &Scope::new(one_level(2), (1, 2), 2).with_restarts(1).with_rules(one_epoch));
}

/// Without timers nothing comes after a loss.
#[test]
fn without_timers_a_loss_is_the_end() {
    let timeless = Rules { timeless: true, ..Rules::default() };
    hold([Scope::new(one_level(2), (1, 2), 2).with_rules(timeless)]);
    let stuck = find(Flaw::Stuck, &Scope::new(one_level(2), (1, 2), 2).with_faults(1, 0, 0).with_rules(timeless));
    assert!(stuck.trace.last().is_some_and(|step| step.starts_with("lost")), "{stuck}");
}

/// Packets that are taken away because they make no difference make none: the machines get into the same states.
#[test]
fn what_is_taken_away_makes_no_difference() {
    for scope in [
        Scope::new(one_level(2), (1, 2), 3).with_faults(1, 1, 0),
        Scope::new(one_level(2), (2, 4), 3).with_faults(0, 1, 0),
        Scope::new(one_level(2), (1, 2), 2).with_faults(0, 1, 0).with_restarts(1),
        Scope::new(two_levels(&[1, 0]), (1, 2), 2).with_faults(0, 1, 0),
    ] {
        let [some, all] = [true, false].map(|reduced| search::reachable(&scope, reduced));
        println!("{scope}: {} states in place of {}", some.0, all.0);
        assert!(some.0 < all.0 && some.1 == all.1, "{scope}");
    }
}

#[test]
#[ignore = "takes minutes"]
fn deep_one_level_holds() {
    hold([
        Scope::new(one_level(2), (1, 2), 4).with_faults(2, 2, 1),
        Scope::new(one_level(2), (1, 2), 3).with_faults(2, 1, 2),
        Scope::new(one_level(2), (2, 4), 9).with_faults(2, 1, 0),
        Scope::new(one_level(2), (2, 4), 5).with_faults(1, 1, 1),
        Scope::new(one_level(3), (1, 2), 6).with_faults(2, 2, 0),
        Scope::new(one_level(3), (2, 4), 6).with_faults(1, 1, 0),
    ]);
}

#[test]
#[ignore = "takes minutes"]
fn deep_two_levels_hold() {
    hold([
        Scope::new(two_levels(&[2, 1]), (1, 2), 6).with_faults(2, 2, 0),
        Scope::new(two_levels(&[2, 0]), (1, 2), 3).with_faults(1, 1, 1),
        Scope::new(two_levels(&[1, 0]), (2, 4), 6).with_faults(1, 1, 0),
        Scope::new(two_levels(&[2, 0]), (2, 4), 6).with_faults(1, 0, 0),
    ]);
}

#[test]
#[ignore = "takes minutes"]
fn deep_restarts_hold() {
    hold([
        Scope::new(one_level(3), (1, 2), 3).with_faults(1, 1, 0).with_restarts(1),
        Scope::new(one_level(2), (2, 4), 3).with_faults(1, 1, 0).with_restarts(1),
        Scope::new(two_levels(&[1, 1]), (1, 2), 2).with_faults(1, 1, 0).with_restarts(1),
        Scope::new(two_levels(&[2, 0]), (1, 2), 2).with_faults(1, 1, 0).with_restarts(1),
    ]);
}

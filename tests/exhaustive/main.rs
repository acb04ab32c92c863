//! Exhaustive search of small clusters: every interleaving of packets, losses, duplicates, timers, calls and restarts,
//! executed by the production state machines.
//!
//! ```text
//! scope -> search -> library -> machine: device, rank -> sumac_device::Node, sumac::transport::packets::Endpoint
//!            |
//!          store: the states, each once
//! ```
//!
//! | file | contents |
//! |---|---|
//! | `scope` | the bounds of a search, the wiring, inputs and expected results |
//! | `machine`, `device`, `rank` | one machine between two events, packed by the feature `snapshot` |
//! | `library` | numbered states of single machines and packets; production code runs once for each pair |
//! | `search` | breadth-first search of cluster states, oracles, reachability of the end, traces |
//! | `recovery` | one recovery with a second failure, from all states in which a tree can be lost |
//! | `packing` | packed and unpacked machines behave the same |
//! | `zero_copy` | every single loss of a device that serves zero-copy ranks, by the simulator's machines |
//!
//! Invariants of every state: buffers hold exactly inputs or results; no slot is reused while a rank below needs its
//! contents; no node refuses a valid packet; `stable` is true; nothing panics; and without further faults an end is
//! reachable in which nothing is pending.
//!
//! Not modelled: time (any armed timer may fire; `T_dead` and leases never expire; a contribution after its hop's probe
//! counts as more than the hop's resolution of 66 us later), congestion marks, results to shared addresses, nodes that
//! can send only part of their packets, and zero-copy except by `zero_copy`.
//!
//! `recovery` searches the loss of the tree together with a second failure.
//!
//! `cargo test -p sumac-tests --test exhaustive -- --nocapture` prints the size of each search; `--ignored` runs the
//! deep scopes, which take minutes and some gigabytes each.

mod device;
mod library;
mod machine;
mod packing;
mod rank;
mod recovery;
mod scope;
mod search;
mod store;
mod zero_copy;

use machine::ViolationKind;
use scope::{Rules, Scope, all_reduce, one_level, two_levels};
use search::{Violation, search};
use sumac_hal::ids::Rank;
use sumac_hal::op::{Dtype, OpDesc, ReduceOp};

/// Search scopes that must have no violation.
fn hold(scopes: impl IntoIterator<Item = Scope>) {
    println!("deeper scopes: cargo test -p sumac-tests --test exhaustive -- --ignored --nocapture --test-threads 1");
    for scope in scopes {
        match search(&scope) {
            Ok(report) => println!("{scope}: {report}"),
            Err(violation) => panic!("{scope}: {violation}"),
        }
    }
}

/// Search a scope that must have a violation of this kind.
fn find(flaw: ViolationKind, scope: &Scope) -> Violation {
    let violation = match search(scope) {
        Ok(report) => panic!("{scope}: nothing found: {report}"),
        Err(violation) => *violation,
    };
    println!("{scope}: {violation}");
    assert_eq!(violation.flaw, flaw, "{scope}");
    violation
}

#[test]
fn one_level_keeps_its_invariants() {
    hold([
        Scope::new(one_level(2), (1, 2), 6).with_faults(2, 2, 0),
        Scope::new(one_level(2), (1, 2), 4).with_faults(1, 1, 1),
        Scope::new(one_level(3), (1, 2), 6).with_faults(1, 1, 0),
        Scope::new(one_level(3), (1, 2), 4).with_faults(1, 0, 1),
        Scope::new(one_level(2), (2, 4), 6).with_faults(1, 1, 0),
        Scope::new(one_level(2), (2, 4), 9).with_faults(1, 0, 0),
        Scope::new(one_level(3), (2, 4), 4).with_faults(1, 0, 0),
    ]);
}

#[test]
fn two_levels_keep_their_invariants() {
    hold([
        Scope::new(two_levels(&[1, 1]), (1, 2), 4).with_faults(1, 1, 0),
        Scope::new(two_levels(&[1, 0]), (1, 2), 3).with_faults(1, 1, 1),
        Scope::new(two_levels(&[2, 0]), (1, 2), 5).with_faults(2, 0, 0),
        Scope::new(two_levels(&[2, 1]), (1, 2), 4).with_faults(1, 1, 0),
        Scope::new(two_levels(&[1, 0]), (2, 4), 5).with_faults(1, 0, 0),
        Scope::new(two_levels(&[2, 0]), (2, 4), 4),
    ]);
}

/// The other collectives, which differ in the ranks that contribute and receive, called in a row.
#[test]
fn other_collectives_keep_their_invariants() {
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

/// A device restarts at any moment. The controller starts a new epoch on one machine after the other while packets of
/// the old one are in flight.
#[test]
fn restarts_keep_the_invariants() {
    hold([
        Scope::new(one_level(2), (1, 2), 3).with_faults(1, 1, 0).with_restarts(1),
        Scope::new(one_level(2), (2, 4), 3).with_faults(1, 0, 0).with_restarts(1),
        Scope::new(one_level(2), (1, 2), 2).with_faults(1, 0, 1).with_restarts(1),
        Scope::new(two_levels(&[1, 0]), (1, 2), 2).with_faults(1, 1, 0).with_restarts(1),
        Scope::new(two_levels(&[2, 0]), (1, 2), 2).with_restarts(1),
    ]);
}

/// Machines receive two packets before they send. Regression: a node refused a chunk because the answer to an overtaken
/// probe was pending in its slot.
#[test]
fn bursts_keep_the_invariants() {
    hold([
        Scope::new(one_level(2), (1, 2), 4).with_faults(1, 1, 1).with_bursts(),
        Scope::new(one_level(2), (2, 4), 5).with_faults(1, 1, 0).with_bursts(),
        Scope::new(two_levels(&[2, 0]), (1, 2), 3).with_faults(1, 1, 0).with_bursts(),
    ]);
}

/// With twice as many slots as the window, the window alone protects them: nodes need not wait for `have`.
#[test]
fn twice_the_window_of_slots_needs_no_acknowledgement() {
    let trusting = Rules { trusting: true, ..Rules::default() };
    hold([
        Scope::new(one_level(2), (1, 2), 4).with_faults(1, 1, 0).with_rules(trusting),
        Scope::new(one_level(2), (2, 4), 6).with_faults(1, 0, 0).with_rules(trusting),
        Scope::new(two_levels(&[2, 0]), (1, 2), 4).with_faults(1, 1, 0).with_rules(trusting),
    ]);
}

/// With fewer slots, packets within the window are refused; accepting them would lose another rank's result.
#[test]
fn fewer_slots_break_the_invariants() {
    let trusting = Rules { trusting: true, ..Rules::default() };
    for sizes in [(2, 3), (1, 1)] {
        for shape in [one_level(2), one_level(3), two_levels(&[2, 0])] {
            let scope = Scope::new(shape, sizes, 6).with_faults(1, 0, 0);
            let refused = find(ViolationKind::Refused, &scope);
            assert!(refused.text.contains("slot-busy"), "{refused}");
            find(ViolationKind::Freed, &scope.with_rules(trusting));
        }
    }
}

/// A window that counts chunks in flight, instead of starting at `have`, strands a rank that has lost a result.
#[test]
fn counted_window_breaks_the_invariants() {
    let counted = Rules { counted: true, ..Rules::default() };
    for (shape, chunks) in [(one_level(2), 6), (two_levels(&[1, 0]), 5)] {
        let scope = Scope::new(shape, (2, 4), chunks).with_faults(1, 0, 0);
        let refused = find(ViolationKind::Refused, &scope.clone().with_rules(counted));
        assert!(refused.text.contains("over-window"), "{refused}");
        find(ViolationKind::Freed, &scope.with_rules(Rules { trusting: true, ..counted }));
    }
}

/// A new incarnation in the old epoch accepts packets that were meant for the old incarnation.
#[test]
fn reused_epoch_mixes_two_incarnations() {
    let one_epoch = Rules { one_epoch: true, ..Rules::default() };
    find(ViolationKind::WrongBytes, &Scope::new(one_level(2), (1, 2), 2).with_restarts(1).with_rules(one_epoch));
}

/// Without timers a loss is never recovered from.
#[test]
fn loss_without_timers_deadlocks() {
    let timeless = Rules { timeless: true, ..Rules::default() };
    hold([Scope::new(one_level(2), (1, 2), 2).with_rules(timeless)]);
    let stuck =
        find(ViolationKind::Stuck, &Scope::new(one_level(2), (1, 2), 2).with_faults(1, 0, 0).with_rules(timeless));
    assert!(stuck.trace.last().is_some_and(|step| step.starts_with("lost")), "{stuck}");
}

/// Removing inert packets changes no outcome: the machines reach the same states.
#[test]
fn state_reduction_keeps_all_outcomes() {
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
fn deep_one_level_keeps_its_invariants() {
    hold([
        Scope::new(one_level(2), (1, 2), 4).with_faults(2, 2, 1),
        Scope::new(one_level(2), (1, 2), 3).with_faults(2, 1, 2),
        Scope::new(one_level(2), (2, 4), 9).with_faults(2, 1, 0),
        Scope::new(one_level(2), (2, 4), 5).with_faults(1, 1, 1),
        Scope::new(one_level(3), (1, 2), 6).with_faults(2, 2, 0),
        Scope::new(one_level(3), (2, 4), 5).with_faults(1, 0, 0),
        Scope::new(one_level(3), (2, 4), 6).with_faults(1, 1, 0),
    ]);
}

#[test]
#[ignore = "takes minutes"]
fn deep_two_levels_keep_their_invariants() {
    hold([
        Scope::new(two_levels(&[2, 1]), (1, 2), 6).with_faults(2, 2, 0),
        Scope::new(two_levels(&[2, 0]), (1, 2), 3).with_faults(1, 1, 1),
        Scope::new(two_levels(&[1, 0]), (2, 4), 6).with_faults(1, 1, 0),
        Scope::new(two_levels(&[2, 0]), (2, 4), 5),
        Scope::new(two_levels(&[2, 0]), (2, 4), 6).with_faults(1, 0, 0),
    ]);
}

#[test]
#[ignore = "takes minutes"]
fn deep_restarts_keep_the_invariants() {
    hold([
        Scope::new(one_level(3), (1, 2), 3).with_faults(1, 1, 0).with_restarts(1),
        Scope::new(one_level(2), (2, 4), 3).with_faults(1, 1, 0).with_restarts(1),
        Scope::new(two_levels(&[1, 1]), (1, 2), 2).with_faults(1, 1, 0).with_restarts(1),
        Scope::new(two_levels(&[2, 0]), (1, 2), 2).with_faults(1, 1, 0).with_restarts(1),
    ]);
}

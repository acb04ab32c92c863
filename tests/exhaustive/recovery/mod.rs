//! Exhaustive search of one recovery with a second failure: all ways in which the ranks of a small cluster recover from
//! the loss of their tree, executed by the production code of `sumac::recovery`.
//!
//! | file | contents |
//! |---|---|
//! | `initial` | the ranks' data when the tree is lost: all states of the tree, reduced to what a recovery reads |
//! | `rank` | a rank: the view change's state machine, the data left by the tree, and the driver of both |
//! | `visited` | numbered states of single ranks, messages and contributed data; production code runs once for each pair |
//! | `world` | all ranks, the messages between them, and the failures so far |
//! | `search` | breadth-first search of cluster states, oracles, reachability of the end, traces |
//! | `facts`, `check` | the facts of a rank, and the expected contents of its buffers |
//! | `violation`, `report` | kinds of violations, rules broken on purpose, and the size of a search |
//!
//! The first failure is the loss or restart of a device, which ranks detect one by one or learn from others. The second
//! one happens at any point ([`Fault`]): a rank, possibly the coordinator, fails, even before any rank has detected the
//! first failure or after some have returned; a connection of the view change or of a plan breaks; two ranks can no
//! longer reach each other; the next tree is lost, or one rank does not get it; a rank exceeds its deadline.
//!
//! Invariants: operations that succeed have exact results; each chunk of a failed operation is old or new, as the error
//! reports; no operation fails at a rank if it succeeded at another survivor; all ranks that commit a view commit the
//! same one and continue alike; ranks reported as failed are dead or excluded; no rank is excluded without a cause; and
//! without further faults the end is reachable from every state.
//!
//! Not modelled: operations of the next tree in progress when that tree is lost (they start alike at all ranks, as in
//! the first tree), and host collectives after the recovery.

mod check;
mod facts;
mod initial;
mod rank;
mod report;
mod search;
mod violation;
mod visited;
mod world;

use crate::machine::Machine;
use crate::scope::{Scope, Wiring, all_reduce, one_level, two_levels};
use crate::search::moments;
use initial::InitialStates;
use rank::Setting;
use report::{Report, Violation};
use search::{Limits, Search};
use std::rc::Rc;
use sumac::harness::Flaw;
use sumac_tests::oracle::Shape;
use violation::{Rules, ViolationKind};
use world::Fault;

/// A search case: a tree, its operations, and the faults during their recovery.
#[derive(Debug, Clone)]
struct Case {
    scope: Scope,
    faults: u32,
    kinds: &'static [Fault],
    has_controller: bool,
    rules: Rules,
}

impl Case {
    /// One second failure of any kind, with a controller that reports dead ranks.
    fn new(shape: Shape, sizes: (u16, u16), calls: &[usize]) -> Self {
        let calls = calls.iter().map(|&chunks| vec![all_reduce(chunks)]).collect();
        let scope = Scope::new(shape, sizes, 1).with_calls(calls).with_faults(1, 0, 0);
        Self { scope, faults: 1, kinds: &Fault::ALL, has_controller: true, rules: Rules::default() }
    }

    /// The same without a controller: ranks can only suspect each other.
    fn without_controller(self) -> Self {
        Self { has_controller: false, ..self }
    }

    /// The same with up to `faults` failures of these kinds.
    fn with(self, faults: u32, kinds: &'static [Fault]) -> Self {
        Self { faults, kinds, ..self }
    }

    /// The same, starting also from states of the tree in which a timer has fired early.
    fn with_early_timer(self) -> Self {
        Self { scope: self.scope.with_faults(1, 0, 1), ..self }
    }

    fn initial_states(&self) -> InitialStates {
        let initial_states = InitialStates::of(&self.scope, self.rules);
        println!(
            "{}: {} beginnings of {} states of ranks",
            self.scope,
            initial_states.all.len(),
            initial_states.moments
        );
        initial_states
    }

    fn search(&self, initial_states: &InitialStates) -> Result<Report, Box<Violation>> {
        let Self { scope, faults, kinds, has_controller, rules } = self;
        let wiring = Wiring::new(&scope.shape);
        let setting = Setting { scope, wiring: &wiring, rules: *rules, has_controller: *has_controller };
        Search::new(&setting, Limits { faults: *faults, kinds }).run(initial_states)
    }

    fn hold(&self, initial_states: &InitialStates) {
        let word = if self.has_controller { "a" } else { "no" };
        match self.search(initial_states) {
            Ok(report) => println!("  {word} controller, {} of {:?}: {report}", self.faults, self.kinds),
            Err(violation) => panic!("{}, {word} controller, {:?}: {violation}", self.scope, self.kinds),
        }
    }
}

/// Search cases that must have no violation, with and without a controller.
fn hold(cases: impl IntoIterator<Item = Case>) {
    for case in cases {
        let initial_states = case.initial_states();
        case.hold(&initial_states);
        case.without_controller().hold(&initial_states);
    }
}

/// Search a case that must have a violation with broken rules, and none without.
fn find(wrong: &[ViolationKind], case: Case, rules: Rules) {
    let case = Case { rules, ..case };
    match case.search(&case.initial_states()) {
        Ok(report) => panic!("{rules:?}: nothing found: {report}"),
        Err(violation) => {
            println!("{rules:?}: {violation}");
            assert!(wrong.contains(&violation.wrong), "{rules:?}: {violation}");
        }
    }
}

#[test]
fn two_rank_recovery_keeps_its_invariants() {
    hold([
        Case::new(one_level(2), (1, 2), &[2, 1]).with_early_timer(),
        Case::new(one_level(2), (2, 4), &[2]).with_early_timer(),
        Case::new(one_level(2), (2, 4), &[3]),
        Case::new(two_levels(&[1, 0]), (1, 2), &[1, 2]),
        Case::new(two_levels(&[1, 1]), (2, 4), &[2]),
        Case::new(one_level(2), (1, 2), &[2, 1]).with(2, &[Fault::Death, Fault::NoTree, Fault::Tree]),
    ]);
}

#[test]
fn three_rank_recovery_keeps_its_invariants() {
    let one_level = Case::new(one_level(3), (1, 2), &[1]);
    let initial_states = one_level.initial_states();
    one_level.hold(&initial_states);
    one_level.with(1, &[Fault::Death, Fault::Piece]).without_controller().hold(&initial_states);
    let two_levels = Case::new(two_levels(&[2, 0]), (1, 2), &[2]).with(1, &[Fault::Death, Fault::NoTree]);
    two_levels.hold(&two_levels.initial_states());
}

/// A restarted device leaves ranks in the same states as a dead one.
#[test]
fn restart_leaves_the_states_that_a_death_leaves() {
    for shape in [one_level(2), two_levels(&[1, 0])] {
        let scope = Scope::new(shape, (1, 2), 2).with_faults(1, 0, 0);
        let again = scope.clone().with_restarts(1);
        let is_old = |machine: &Rc<Machine>| machine.facts(&again).epoch == 1;
        let all = moments(&again);
        let before = all.len();
        let old: Vec<_> = all.into_iter().filter(|moment| moment.ranks.iter().all(is_old)).collect();
        println!("{again}: {} of {before} states of ranks and packets", old.len());
        let restarted = InitialStates::from(&again, old, Rules::default()).in_words(&again);
        let dead = InitialStates::of(&scope, Rules::default()).in_words(&scope);
        assert_eq!(restarted, dead, "{again}");
    }
}

/// A rank stops at any moment, with unread packets in flight to it, while timers of others fire. This, or more faults,
/// leads to no data that one loss and one such timer do not lead to.
fn expect_nothing_else(shapes: impl IntoIterator<Item = (Shape, (u16, u16), usize)>, faults: &[(u8, u8, u8)]) {
    for (shape, sizes, chunks) in shapes {
        let of = |(losses, duplicates, early)| {
            let scope = Scope::new(shape.clone(), sizes, chunks).with_faults(losses, duplicates, early);
            let initial_states = InitialStates::of(&scope, Rules::default());
            println!("{scope}: {} beginnings of {} states of ranks", initial_states.all.len(), initial_states.moments);
            initial_states.in_words(&scope)
        };
        let searched = of((1, 0, 1));
        assert!(faults.iter().all(|&faults| of(faults).is_subset(&searched)), "{shape:?}");
    }
}

#[test]
fn further_faults_reach_no_new_states() {
    let shapes = [(one_level(2), (1, 2), 3), (one_level(2), (2, 4), 2), (two_levels(&[2, 0]), (1, 2), 1)];
    expect_nothing_else(shapes, &[(1, 1, 0), (2, 0, 0)]);
}

#[test]
fn broken_recovery_rules_are_found() {
    let (two, sound) = (|| Case::new(one_level(2), (1, 2), &[2]), Rules::default());
    let in_a_plan: fn(Case) -> Case = |case| case.with(1, &[Fault::Piece]);
    find(&[ViolationKind::Unrecoverable], two().with(0, &[]), Rules { keeps_nothing: true, ..sound });
    find(&[ViolationKind::Result], two().with(0, &[]), Rules { unfenced: true, ..sound });
    find(&[ViolationKind::Result], in_a_plan(two()), Rules { forgets_landed: true, ..sound });
    find(
        &[ViolationKind::Contradiction, ViolationKind::Result],
        in_a_plan(two()),
        Rules { returns_early: true, ..sound },
    );
    let view = |flaw| Rules { view: Some(flaw), ..sound };
    let alone = two().with(1, &[Fault::Cut]).without_controller();
    find(&[ViolationKind::Disagreement, ViolationKind::Named], alone, view(Flaw::AnyMinority));
    let three = Case::new(one_level(3), (1, 2), &[1]).with(1, &[Fault::Death]);
    find(&[ViolationKind::Disagreement, ViolationKind::Contradiction], three, view(Flaw::NothingAdopted));
}

#[test]
#[ignore = "takes minutes"]
fn deep_further_faults_reach_no_new_states() {
    let shapes = [(one_level(2), (2, 4), 3), (one_level(3), (1, 2), 2), (two_levels(&[2, 0]), (1, 2), 2)];
    expect_nothing_else(shapes, &[(1, 1, 1), (2, 1, 0), (1, 0, 2)]);
}

#[test]
#[ignore = "takes minutes"]
fn deep_broken_recovery_rules_are_found() {
    let view = |flaw| Rules { view: Some(flaw), ..Rules::default() };
    let three = || Case::new(one_level(3), (1, 2), &[1]);
    let alone = three().with(1, &[Fault::Cut]).without_controller();
    find(&[ViolationKind::Disagreement, ViolationKind::Named], alone, view(Flaw::MessagesFromDead));
}

#[test]
#[ignore = "takes minutes"]
fn deep_two_rank_recovery_keeps_its_invariants() {
    hold([
        Case::new(one_level(2), (2, 4), &[2]).with(2, &[Fault::Death, Fault::Piece, Fault::Late]),
        Case::new(one_level(2), (1, 2), &[2]).with(2, &[Fault::Death, Fault::Break]),
        Case::new(two_levels(&[1, 0]), (2, 4), &[2, 1]),
    ]);
}

#[test]
#[ignore = "takes minutes"]
fn deep_three_rank_recovery_keeps_its_invariants() {
    hold([
        Case::new(one_level(3), (1, 2), &[1]).with(2, &[Fault::Death, Fault::NoTree]),
        Case::new(one_level(3), (1, 2), &[1]),
        Case::new(one_level(3), (1, 2), &[2]),
        Case::new(two_levels(&[2, 0]), (2, 4), &[2]).with(1, &[Fault::Death, Fault::Piece, Fault::NoTree]),
    ]);
}

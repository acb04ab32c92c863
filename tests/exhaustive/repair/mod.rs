//! One repair with a second failure: all ways in which the ranks of a small cluster can make good what the loss of their
//! tree has left, by the production code of `sumac::recovery`, whatever goes wrong meanwhile.
//!
//! | file | what |
//! |---|---|
//! | `front` | what ranks have when their tree is lost: from all states of the tree, collapsed to what a repair reads |
//! | `part` | a rank: the machine of the view change, what was left of the tree, and who drives them |
//! | `shelf` | states of single ranks, letters and gifts, by number; production code runs once for each pair |
//! | `world` | all ranks, what is on its way between them, and what has gone wrong |
//! | `search` | states of the cluster breadth first, the oracles, ways to the end, traces |
//! | `facts`, `check` | what is known of a rank, and what has to be in its buffers |
//! | `flaw`, `report` | what can be wrong, rules that are broken to see that it is found, and what a search comes to |
//!
//! The first failure is the death, or the restart, of a device of the tree: ranks find it out one by one, or are told by
//! others. The second happens at any point ([`Fault`]): a rank dies, be it the coordinator or not, also before anybody
//! has found out anything, and after some have returned; a connection breaks, of the view change or of a plan; two ranks
//! do not reach each other any more; the next tree is lost, too, or one rank does not get it; a rank takes too long.
//!
//! What has to hold: what returns is right, to the bit; what fails has its chunks old or new, as the error says; nobody
//! fails what another who lives has returned from; all that commit a view commit the same, and go on alike; the ranks
//! that are named as failed are dead, or out; nobody is out without a cause; and from every state there is a way to the
//! end without another fault.
//!
//! What is left out: operations of the next tree that went some way before that is lost (those begin in all ranks alike,
//! as in the first tree), and operations that run by schedules afterwards.

mod check;
mod facts;
mod flaw;
mod front;
mod part;
mod report;
mod search;
mod shelf;
mod world;

use crate::machine::Machine;
use crate::scope::{Scope, Wiring, all_reduce, one_level, two_levels};
use crate::search::moments;
use flaw::{Rules, Wrong};
use front::Fronts;
use part::Setting;
use report::{Report, Violation};
use search::{Limits, Search};
use std::rc::Rc;
use sumac::rehearsal::Flaw;
use sumac_tests::oracle::Shape;
use world::Fault;

/// What is searched: a tree and its operations, and what goes wrong in their repair.
#[derive(Debug, Clone)]
struct Case {
    scope: Scope,
    faults: u32,
    kinds: &'static [Fault],
    has_controller: bool,
    rules: Rules,
}

impl Case {
    /// One second failure of any kind, where the controller says who is dead.
    fn new(shape: Shape, sizes: (u16, u16), calls: &[usize]) -> Self {
        let calls = calls.iter().map(|&chunks| vec![all_reduce(chunks)]).collect();
        let scope = Scope::new(shape, sizes, 1).with_calls(calls).with_faults(1, 0, 0);
        Self { scope, faults: 1, kinds: &Fault::ALL, has_controller: true, rules: Rules::default() }
    }

    /// The same where ranks can only suspect each other.
    fn without_controller(self) -> Self {
        Self { has_controller: false, ..self }
    }

    /// The same with these failures only, so many of them.
    fn with(self, faults: u32, kinds: &'static [Fault]) -> Self {
        Self { faults, kinds, ..self }
    }

    /// The same from states of a tree in which a timer may also fire early.
    fn with_early_timer(self) -> Self {
        Self { scope: self.scope.with_faults(1, 0, 1), ..self }
    }

    fn fronts(&self) -> Fronts {
        let fronts = Fronts::of(&self.scope, self.rules);
        println!("{}: {} beginnings of {} states of ranks", self.scope, fronts.all.len(), fronts.moments);
        fronts
    }

    fn search(&self, fronts: &Fronts) -> Result<Report, Box<Violation>> {
        let Self { scope, faults, kinds, has_controller, rules } = self;
        let wiring = Wiring::new(&scope.shape);
        let setting = Setting { scope, wiring: &wiring, rules: *rules, has_controller: *has_controller };
        Search::new(&setting, Limits { faults: *faults, kinds }).run(fronts)
    }

    fn hold(&self, fronts: &Fronts) {
        let word = if self.has_controller { "a" } else { "no" };
        match self.search(fronts) {
            Ok(report) => println!("  {word} controller, {} of {:?}: {report}", self.faults, self.kinds),
            Err(violation) => panic!("{}, {word} controller, {:?}: {violation}", self.scope, self.kinds),
        }
    }
}

/// Search cases in which nothing may be wrong, with a controller and without.
fn hold(cases: impl IntoIterator<Item = Case>) {
    for case in cases {
        let fronts = case.fronts();
        case.hold(&fronts);
        case.without_controller().hold(&fronts);
    }
}

/// Search a case with broken rules, in which something has to be found; it holds with those that are kept.
fn find(wrong: &[Wrong], case: Case, rules: Rules) {
    let case = Case { rules, ..case };
    match case.search(&case.fronts()) {
        Ok(report) => panic!("{rules:?}: nothing found: {report}"),
        Err(violation) => {
            println!("{rules:?}: {violation}");
            assert!(wrong.contains(&violation.wrong), "{rules:?}: {violation}");
        }
    }
}

#[test]
fn repairs_of_two_ranks_hold() {
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
fn repairs_of_three_ranks_hold() {
    let one_level = Case::new(one_level(3), (1, 2), &[1]);
    let fronts = one_level.fronts();
    one_level.hold(&fronts);
    one_level.with(1, &[Fault::Death, Fault::Piece]).without_controller().hold(&fronts);
    let two_levels = Case::new(two_levels(&[2, 0]), (1, 2), &[2]).with(1, &[Fault::Death, Fault::NoTree]);
    two_levels.hold(&two_levels.fronts());
}

/// What ranks know of a device that has started again is no more than what they know of one that is dead.
#[test]
fn a_restart_leaves_what_a_death_leaves() {
    for shape in [one_level(2), two_levels(&[1, 0])] {
        let scope = Scope::new(shape, (1, 2), 2).with_faults(1, 0, 0);
        let again = scope.clone().with_restarts(1);
        let is_old = |machine: &Rc<Machine>| machine.facts(&again).epoch == 1;
        let all = moments(&again);
        let before = all.len();
        let old: Vec<_> = all.into_iter().filter(|moment| moment.ranks.iter().all(is_old)).collect();
        println!("{again}: {} of {before} states of ranks and packets", old.len());
        let restarted = Fronts::from(&again, old, Rules::default()).in_words(&again);
        let dead = Fronts::of(&scope, Rules::default()).in_words(&scope);
        assert_eq!(restarted, dead, "{again}");
    }
}

/// A rank stops at a moment of its own, with packets on their way to it that nobody takes in, while timers of others
/// fire. Nothing comes of that, or of more faults, which does not come of one loss and one such timer.
fn expect_nothing_else(shapes: impl IntoIterator<Item = (Shape, (u16, u16), usize)>, faults: &[(u8, u8, u8)]) {
    for (shape, sizes, chunks) in shapes {
        let of = |(losses, duplicates, early)| {
            let scope = Scope::new(shape.clone(), sizes, chunks).with_faults(losses, duplicates, early);
            let fronts = Fronts::of(&scope, Rules::default());
            println!("{scope}: {} beginnings of {} states of ranks", fronts.all.len(), fronts.moments);
            fronts.in_words(&scope)
        };
        let searched = of((1, 0, 1));
        assert!(faults.iter().all(|&faults| of(faults).is_subset(&searched)), "{shape:?}");
    }
}

#[test]
fn more_faults_leave_nothing_else() {
    let shapes = [(one_level(2), (1, 2), 3), (one_level(2), (2, 4), 2), (two_levels(&[2, 0]), (1, 2), 1)];
    expect_nothing_else(shapes, &[(1, 1, 0), (2, 0, 0)]);
}

#[test]
fn rules_of_repair_that_are_broken_are_found() {
    let (two, sound) = (|| Case::new(one_level(2), (1, 2), &[2]), Rules::default());
    let in_a_plan: fn(Case) -> Case = |case| case.with(1, &[Fault::Piece]);
    find(&[Wrong::Unrepairable], two().with(0, &[]), Rules { keeps_nothing: true, ..sound });
    find(&[Wrong::Result], two().with(0, &[]), Rules { unfenced: true, ..sound });
    find(&[Wrong::Result], in_a_plan(two()), Rules { forgets_landed: true, ..sound });
    find(&[Wrong::Contradiction, Wrong::Result], in_a_plan(two()), Rules { returns_early: true, ..sound });
    let view = |flaw| Rules { view: Some(flaw), ..sound };
    let alone = two().with(1, &[Fault::Cut]).without_controller();
    find(&[Wrong::Disagreement, Wrong::Named], alone, view(Flaw::AnyMinority));
    let three = Case::new(one_level(3), (1, 2), &[1]).with(1, &[Fault::Death]);
    find(&[Wrong::Disagreement, Wrong::Contradiction], three, view(Flaw::NothingAdopted));
}

#[test]
#[ignore = "takes minutes"]
fn deep_more_faults_leave_nothing_else() {
    let shapes = [(one_level(2), (2, 4), 3), (one_level(3), (1, 2), 2), (two_levels(&[2, 0]), (1, 2), 2)];
    expect_nothing_else(shapes, &[(1, 1, 1), (2, 1, 0), (1, 0, 2)]);
}

#[test]
#[ignore = "takes minutes"]
fn deep_rules_that_are_broken_are_found() {
    let view = |flaw| Rules { view: Some(flaw), ..Rules::default() };
    let three = || Case::new(one_level(3), (1, 2), &[1]);
    let alone = three().with(1, &[Fault::Cut]).without_controller();
    find(&[Wrong::Disagreement, Wrong::Named], alone, view(Flaw::TheDead));
}

#[test]
#[ignore = "takes minutes"]
fn deep_repairs_of_two_ranks_hold() {
    hold([
        Case::new(one_level(2), (2, 4), &[2]).with(2, &[Fault::Death, Fault::Piece, Fault::Late]),
        Case::new(one_level(2), (1, 2), &[2]).with(2, &[Fault::Death, Fault::Break]),
        Case::new(two_levels(&[1, 0]), (2, 4), &[2, 1]),
    ]);
}

#[test]
#[ignore = "takes minutes"]
fn deep_repairs_of_three_ranks_hold() {
    hold([
        Case::new(one_level(3), (1, 2), &[1]).with(2, &[Fault::Death, Fault::NoTree]),
        Case::new(one_level(3), (1, 2), &[1]),
        Case::new(one_level(3), (1, 2), &[2]),
        Case::new(two_levels(&[2, 0]), (2, 4), &[2]).with(1, &[Fault::Death, Fault::Piece, Fault::NoTree]),
    ]);
}

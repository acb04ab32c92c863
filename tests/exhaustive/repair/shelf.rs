//! Every state that a rank was ever in, all that ranks ever said and gave, and what came of it: as in
//! [`crate::library`], production code runs once for each pair.

use super::facts::Facts;
use super::flaw::Wrong;
use super::front::{Fronts, Late};
use super::part::{Act, Event, Gift, Part, Setting};
use crate::library::Mix;
use std::collections::HashMap;
use std::hash::{BuildHasherDefault, Hash};
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::rc::Rc;
use sumac::rehearsal::Said;

/// Something on its way to a rank.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub(super) enum Letter {
    /// From whom, about which view, and what.
    Said(usize, u32, Box<Said>),
    /// A packet of the lost tree.
    Late(Late),
}

/// What happens to a rank, by numbers.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Happening {
    Begin,
    Letter(u32),
    Hear(usize),
    Land([u32; 3]),
    Fail,
    Finish(bool),
    Retry,
    Resend,
    Deadline,
}

impl Happening {
    fn key(self) -> u64 {
        match self {
            Self::Letter(letter) => u64::from(letter) << 4,
            Self::Hear(dead) => (dead as u64) << 4 | 1,
            Self::Land(gifts) => gifts.iter().fold(0, |key, &gift| key << 20 | u64::from(gift)) << 4 | 2,
            Self::Begin => 3,
            Self::Fail => 4,
            Self::Finish(found) => 5 + u64::from(found),
            Self::Retry => 7,
            Self::Resend => 8,
            Self::Deadline => 9,
        }
    }
}

/// In place of a gift.
pub(super) const NO_GIFT: u32 = (1 << 20) - 1;

/// What came of it.
#[derive(Debug)]
pub(super) struct Outcome {
    pub(super) next: u32,
    /// To whom, and what.
    pub(super) said: Vec<(usize, u32)>,
    pub(super) gift: Option<u32>,
    pub(super) wrong: Option<(Wrong, String)>,
    /// A letter that nothing came of, and nothing ever will: the rank is through with what it is about.
    pub(super) inert: bool,
}

/// Values by number, each once.
#[derive(Debug)]
struct Numbers<T> {
    values: Vec<Rc<T>>,
    numbers: HashMap<Rc<T>, u32>,
}

impl<T: Hash + Eq> Numbers<T> {
    fn new() -> Self {
        Self { values: Vec::new(), numbers: HashMap::new() }
    }

    fn of(&mut self, value: T) -> u32 {
        if let Some(&number) = self.numbers.get(&value) {
            return number;
        }
        let number = self.values.len() as u32;
        let value = Rc::new(value);
        self.values.push(Rc::clone(&value));
        self.numbers.insert(value, number);
        number
    }

    fn get(&self, number: u32) -> &Rc<T> {
        &self.values[number as usize]
    }
}

/// What was found out about one rank.
#[derive(Debug)]
struct Shelf {
    parts: Numbers<Part>,
    facts: Vec<Facts>,
    outcomes: HashMap<(u32, u64), Rc<Outcome>, BuildHasherDefault<Mix>>,
    steps: Vec<(u32, u32)>,
    /// States, and letters that are inert there.
    inert: Vec<(u32, u32)>,
}

/// What was found out.
#[derive(Debug)]
pub(super) struct Shelves<'s> {
    setting: &'s Setting<'s>,
    shelves: Vec<Shelf>,
    letters: Numbers<Letter>,
    gifts: Numbers<Gift>,
}

impl<'s> Shelves<'s> {
    pub(super) fn new(setting: &'s Setting<'s>) -> Self {
        let shelf = |_| Shelf {
            parts: Numbers::new(),
            facts: Vec::new(),
            outcomes: HashMap::default(),
            steps: Vec::new(),
            inert: Vec::new(),
        };
        let shelves = (0..setting.wiring.ranks.len()).map(shelf).collect();
        Self { setting, shelves, letters: Numbers::new(), gifts: Numbers::new() }
    }

    /// Return the number of a rank that has this when its tree is lost.
    pub(super) fn begin(&mut self, fronts: &Fronts, rank: usize, front: usize) -> u32 {
        self.number_of(rank, Part::new(rank, &fronts.ranks[front]))
    }

    pub(super) fn late(&mut self, late: &Late) -> u32 {
        self.letters.of(Letter::Late(late.clone()))
    }

    pub(super) fn facts(&self, rank: usize, part: u32) -> &Facts {
        &self.shelves[rank].facts[part as usize]
    }

    pub(super) fn letter(&self, letter: u32) -> &Rc<Letter> {
        self.letters.get(letter)
    }

    /// Tell whether a rank is through with a letter before it comes, as it is with what that is about, or with who has
    /// sent it: only questions are answered then. Returns whom no answer reaches.
    fn past(&self, rank: usize, part: u32, letter: u32) -> Option<Option<usize>> {
        let facts = self.facts(rank, part);
        match &**self.letter(letter) {
            // Whom it knows to be dead is, or can't be reached.
            Letter::Said(from, ..) if facts.known.contains(from) => Some(Some(*from)),
            Letter::Said(_, view, _) => (facts.end.is_some() || facts.view > *view).then_some(None),
            Letter::Late(_) => None,
        }
    }

    pub(super) fn gift(&self, gift: u32) -> &Gift {
        self.gifts.get(gift)
    }

    pub(super) fn states(&self) -> usize {
        self.shelves.iter().map(|shelf| shelf.facts.len()).sum()
    }

    pub(super) fn runs(&self) -> usize {
        self.shelves.iter().map(|shelf| shelf.outcomes.len()).sum()
    }

    fn number_of(&mut self, rank: usize, part: Part) -> u32 {
        let shelf = &mut self.shelves[rank];
        let number = shelf.parts.of(part);
        if shelf.facts.len() == number as usize {
            shelf.facts.push(shelf.parts.get(number).facts(self.setting));
        }
        number
    }

    /// Return what comes of a happening to a rank.
    pub(super) fn outcome(&mut self, rank: usize, part: u32, happening: Happening) -> Rc<Outcome> {
        let key = (part, happening.key());
        if let Some(outcome) = self.shelves[rank].outcomes.get(&key) {
            return Rc::clone(outcome);
        }
        let mut next = Part::clone(self.shelves[rank].parts.get(part));
        let act = self.run(&mut next, happening);
        let next = self.number_of(rank, next);
        let said = act.said.into_iter();
        let said: Vec<_> =
            said.map(|(to, view, said)| (to, self.letters.of(Letter::Said(rank, view, Box::new(said))))).collect();
        let gift = act.gift.map(|gift| self.gifts.of(gift));
        assert!(gift.is_none_or(|gift| gift < NO_GIFT), "too many gifts for a key");
        let past = match happening {
            Happening::Letter(letter) => self.past(rank, part, letter),
            _ => None,
        };
        let reaches_nobody = past.is_some_and(|lost| said.iter().all(|(to, _)| Some(*to) == lost));
        let inert = reaches_nobody && next == part && gift.is_none() && act.wrong.is_none();
        let outcome = Rc::new(Outcome { next, said, gift, wrong: act.wrong, inert });
        let shelf = &mut self.shelves[rank];
        shelf.outcomes.insert(key, Rc::clone(&outcome));
        match happening {
            _ if next != part => shelf.steps.push((part, next)),
            Happening::Letter(letter) if inert => shelf.inert.push((part, letter)),
            _ => {}
        }
        outcome
    }

    fn run(&self, part: &mut Part, happening: Happening) -> Act {
        let gifts: Vec<&Gift> = match happening {
            Happening::Land(gifts) => {
                gifts.iter().filter(|&&gift| gift != NO_GIFT).map(|&gift| self.gift(gift)).collect()
            }
            _ => Vec::new(),
        };
        let event = match happening {
            Happening::Letter(letter) => match &**self.letter(letter) {
                Letter::Said(from, view, said) => Event::Said(*from, *view, said),
                Letter::Late((_, from, bytes)) => Event::Late(*from, bytes),
            },
            Happening::Begin => Event::Begin,
            Happening::Hear(dead) => Event::Hear(dead),
            Happening::Land(_) => Event::Land(&gifts),
            Happening::Fail => Event::Fail,
            Happening::Finish(found) => Event::Finish(found),
            Happening::Retry => Event::Retry,
            Happening::Resend => Event::Resend,
            Happening::Deadline => Event::Deadline,
        };
        let act = catch_unwind(AssertUnwindSafe(|| part.meet(self.setting, event)));
        act.unwrap_or_else(|cause| {
            let text = cause.downcast_ref::<String>().cloned();
            let text = text.or_else(|| cause.downcast_ref::<&str>().map(|text| (*text).to_owned()));
            Act { wrong: Some((Wrong::Panicked, text.unwrap_or_default())), ..Act::default() }
        })
    }

    /// Return a letter that was inert in a state of its receiver, and is not in a later one; see
    /// [`crate::library::Library::revived`].
    pub(super) fn revived(&mut self) -> Option<u32> {
        (0..self.shelves.len()).find_map(|rank| {
            let mut nexts: HashMap<u32, Vec<u32>> = HashMap::new();
            let steps = self.shelves[rank].steps.clone();
            steps.iter().for_each(|&(part, next)| nexts.entry(part).or_default().push(next));
            let mut looked = 0;
            while let Some(&(part, letter)) = self.shelves[rank].inert.get(looked) {
                looked += 1;
                for &next in nexts.get(&part).into_iter().flatten() {
                    if !self.outcome(rank, next, Happening::Letter(letter)).inert {
                        return Some(letter);
                    }
                }
            }
            None
        })
    }
}

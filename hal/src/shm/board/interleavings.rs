//! `loom` tries every interleaving of two members, and every value that the memory model lets a load return.
//!
//! What is posted lies in `loom` cells, which report unordered accesses. Descriptions are relaxed words: a member may
//! look back at one that is written again. Each test has a counterpart that removes one rule and must fail, which
//! shows that the search can find such errors.

use super::cells::DESCRIPTION_BYTES;
use super::{Board, BoardCell, BoardMemory};
use loom::cell::UnsafeCell;
use loom::sync::Arc;
use loom::sync::atomic::{AtomicU64, Ordering, fence};
use loom::thread;

/// The rules that a board's memory keeps to.
#[derive(Clone, Copy)]
struct Rules {
    /// The ordering of the stores that publish a cell.
    publish: Ordering,
    /// The ordering of the stores that say that a member is done.
    done: Ordering,
    /// A cell has no round while it is written.
    clears: bool,
}

const RULES: Rules = Rules { publish: Ordering::Release, done: Ordering::Release, clears: true };

/// One cell for each of two members, so that each round uses it again.
struct Memory {
    rules: Rules,
    done: [AtomicU64; 2],
    rounds: [AtomicU64; 2],
    tags: [AtomicU64; 2],
    descriptions: [[AtomicU64; 2]; 2],
    posts: [UnsafeCell<u8>; 2],
}

impl Memory {
    fn new(rules: Rules) -> Arc<Self> {
        let zeros = || [AtomicU64::new(0), AtomicU64::new(0)];
        Arc::new(Self {
            rules,
            done: zeros(),
            rounds: zeros(),
            tags: zeros(),
            descriptions: [zeros(), zeros()],
            posts: [UnsafeCell::new(0), UnsafeCell::new(0)],
        })
    }
}

impl BoardMemory for Arc<Memory> {
    const CELLS: u64 = 1;

    type Cell<'m> = MemberCell<'m>;

    fn cell(&self, member: u32, _index: usize) -> MemberCell<'_> {
        MemberCell { memory: self, member: member as usize }
    }

    fn done(&self, member: u32) -> u64 {
        self.done[member as usize].load(Ordering::Acquire)
    }

    fn set_done(&self, member: u32, round: u64) {
        self.done[member as usize].store(round, self.rules.done);
    }
}

/// The cell of a member.
struct MemberCell<'m> {
    memory: &'m Memory,
    member: usize,
}

impl BoardCell for MemberCell<'_> {
    fn round(&self) -> u64 {
        self.memory.rounds[self.member].load(Ordering::Acquire)
    }

    fn round_after_loads(&self) -> u64 {
        fence(Ordering::Acquire);
        self.memory.rounds[self.member].load(Ordering::Relaxed)
    }

    fn clear_round(&self) {
        if self.memory.rules.clears {
            self.memory.rounds[self.member].store(0, Ordering::Relaxed);
            fence(Ordering::Release);
        }
    }

    fn set_round(&self, round: u64) {
        self.memory.rounds[self.member].store(round, self.memory.rules.publish);
    }

    fn tag(&self) -> u64 {
        self.memory.tags[self.member].load(Ordering::Relaxed)
    }

    fn set_tag(&self, tag: u64) {
        self.memory.tags[self.member].store(tag, Ordering::Relaxed);
    }

    fn description(&self) -> [u8; DESCRIPTION_BYTES] {
        let words = &self.memory.descriptions[self.member];
        let mut description = [0; DESCRIPTION_BYTES];
        // The first and the last word: what lies between them is torn if they differ.
        description[..8].copy_from_slice(&words[0].load(Ordering::Relaxed).to_le_bytes());
        description[56..].copy_from_slice(&words[1].load(Ordering::Relaxed).to_le_bytes());
        description
    }

    fn set_description(&self, description: &[u8; DESCRIPTION_BYTES]) {
        let words = &self.memory.descriptions[self.member];
        words[0].store(u64::from(description[0]), Ordering::Relaxed);
        words[1].store(u64::from(description[56]), Ordering::Relaxed);
    }

    fn read(&self, _start: usize, bytes: &mut [u8]) {
        // SAFETY: `loom` aborts the model if another thread may write at the same time.
        bytes[0] = self.memory.posts[self.member].with(|post| unsafe { *post });
    }

    fn write(&self, bytes: &[u8]) {
        // SAFETY: `loom` aborts the model if another thread may access it at the same time.
        self.memory.posts[self.member].with_mut(|post| unsafe { *post = bytes[0] });
    }
}

/// How often a thread of an exchange is stopped at most where it would go on.
const PREEMPTIONS_MAX: usize = 3;

/// Post in a round as soon as possible.
fn post(board: &mut Board<Arc<Memory>>, round: u8) {
    while !board.post(u64::from(round), &[round; DESCRIPTION_BYTES], &[round]) {
        thread::yield_now();
    }
}

/// Wait for the other member's post in a round, and read it.
fn read(board: &Board<Arc<Memory>>, other: u32, round: u8) {
    let tag = loop {
        match board.tag_of(other) {
            Some(tag) => break tag,
            None => thread::yield_now(),
        }
    };
    assert_eq!(tag, u64::from(round));
    let mut bytes = [0];
    board.read(other, 0, &mut bytes);
    assert_eq!(bytes, [round]);
}

/// Both members post in each of two rounds, as in an all-reduce. With two threads that both wait for each other, not
/// every interleaving can be tried: those with few preemptions are.
fn exchange(rules: Rules) {
    let mut builder = loom::model::Builder::new();
    builder.preemption_bound = Some(PREEMPTIONS_MAX);
    builder.check(move || {
        let memory = Memory::new(rules);
        let member = |own: u32| {
            let mut board = Board::on(Arc::clone(&memory), 2, own);
            move || {
                for round in 1..=2 {
                    post(&mut board, round);
                    read(&board, 1 - own, round);
                    board.finish_round(true);
                }
            }
        };
        let other = thread::spawn(member(1));
        member(0)();
        other.join().expect("no panic");
    });
}

#[test]
fn posts_arrive_intact_in_their_rounds() {
    exchange(RULES);
}

#[test]
#[should_panic(expected = "Causality violation")]
fn relaxed_publication_races_with_reads() {
    exchange(Rules { publish: Ordering::Relaxed, ..RULES });
}

/// Member 0 posts in each of two rounds and reads nothing, as the root of a broadcast. It may go on when the other is
/// done, or when it believes so.
fn broadcast(rules: Rules, believes: bool) {
    loom::model(move || {
        let memory = Memory::new(rules);
        let mut reader = Board::on(Arc::clone(&memory), 2, 1);
        let reading = thread::spawn(move || {
            for round in 1..=2 {
                read(&reader, 0, round);
                reader.finish_round(true);
            }
        });
        let mut root = Board::on(memory, 2, 0);
        for round in 1..=2 {
            post(&mut root, round);
            root.finish_round(false);
            root.all_done = root.all_done.max(u64::from(believes && round == 1));
        }
        reading.join().expect("no panic");
    });
}

#[test]
fn root_that_runs_ahead_waits_for_readers() {
    broadcast(RULES, false);
}

#[test]
#[should_panic(expected = "Causality violation")]
fn relaxed_end_of_a_round_races_with_the_next_post() {
    broadcast(Rules { done: Ordering::Relaxed, ..RULES }, false);
}

#[test]
#[should_panic(expected = "Causality violation")]
fn root_that_does_not_wait_for_readers_races_with_them() {
    broadcast(RULES, true);
}

/// A member that is done with a round looks back at its description, while the other goes on to the next.
fn look_back(rules: Rules) {
    loom::model(move || {
        let memory = Memory::new(rules);
        let mut reader = Board::on(Arc::clone(&memory), 2, 1);
        let reading = thread::spawn(move || {
            read(&reader, 0, 1);
            reader.finish_round(true);
            if let Some(description) = reader.description_of(0, 1) {
                assert_eq!([description[0], description[56]], [1; 2], "of the first round");
            }
        });
        let mut root = Board::on(memory, 2, 0);
        for round in 1..=2 {
            post(&mut root, round);
            root.finish_round(false);
        }
        reading.join().expect("no panic");
    });
}

#[test]
fn description_of_an_earlier_round_is_intact_or_gone() {
    look_back(RULES);
}

#[test]
#[should_panic(expected = "of the first round")]
fn description_is_torn_if_a_cell_keeps_its_round_while_it_is_written() {
    look_back(Rules { clears: false, ..RULES });
}

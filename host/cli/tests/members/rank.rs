//! The program of a rank: it runs all-reduces in place until one fails, and then checks every chunk of the buffer.
//!
//! It reports in lines of JSON ([`Round`], [`Ending`], [`Recheck`], [`Leftovers`]). Element e of rank r in round i is
//! `base(e, i) * 4^r`. The sum `base * (1 + 4 + ...)` differs from every input and from the sum of any other set of
//! contributions, and a chunk of it differs from every other round and place.

use super::{Ending, Leftovers, Memory, Recheck, Round, Task, now_ns};
use half::bf16;
use serde::Serialize;
use std::fmt::Debug;
use std::io::Read;
use std::ops::DerefMut;
use std::time::{Duration, Instant};
use sumac::comm::{Element, Transfer};
use sumac::controller::proto::Transport;
use sumac::select::Algo;
use sumac::{Communicator, JoinConfig, Path, ReduceOp};

/// Run a task. `gate` is read to its end before the buffer is checked for the last time.
pub(crate) fn run(task: &Task, mut gate: impl Read) {
    let config = JoinConfig {
        algo: if task.recovery { Algo::Auto } else { Algo::Tree },
        deadline: Duration::from_millis(task.deadline_ms),
        join_timeout: Duration::from_millis(task.deadline_ms),
        recover: task.recovery,
        transport: if task.memory == Memory::Packets { Transport::Udp } else { Transport::Shm },
        ..JoinConfig::new(task.controller, task.job.clone(), task.rank, task.ranks)
    };
    match Communicator::join(config) {
        Err(error) => {
            report(&Ending { error: Some(format!("Join{}", variant(&error))), ..ending(error.to_string()) });
            // There is no buffer to check.
            report(&Recheck { changed: 0 });
        }
        Ok(comm) if task.rounds_values => alloc_and_reduce::<bf16>(task, comm, &mut gate),
        Ok(comm) => alloc_and_reduce::<u32>(task, comm, &mut gate),
    }
    let maps = std::fs::read_to_string("/proc/self/maps").expect("/proc");
    report(&Leftovers { mappings: maps.lines().filter(|line| line.contains("sumac-")).count() });
}

/// The element types of buffers.
trait Value: Element + PartialEq {
    fn of(base: u32, factor: u32) -> Self;
}

impl Value for u32 {
    fn of(base: u32, factor: u32) -> Self {
        base.wrapping_mul(factor)
    }
}

/// Integers up to 256 are exact, and so are all sums of three ranks.
impl Value for bf16 {
    fn of(base: u32, factor: u32) -> Self {
        Self::from_f32((((base >> 16) % 12 + 1) * factor) as f32)
    }
}

fn alloc_and_reduce<T: Value>(task: &Task, comm: Communicator, gate: &mut impl Read) {
    if task.memory != Memory::Registered {
        return reduce_and_check(task, comm, vec![T::zeroed(); task.elements], gate);
    }
    match comm.alloc::<T>(task.elements) {
        Ok(buffer) => reduce_and_check(task, comm, buffer, gate),
        Err(error) => {
            report(&Ending { error: Some(format!("Alloc{}", variant(&error))), ..ending(error.to_string()) });
            report(&Recheck { changed: 0 });
        }
    }
}

/// Run all-reduces until one fails, check the buffer, and check it again when `gate` ends.
fn reduce_and_check<T: Value>(
    task: &Task,
    comm: Communicator,
    mut buffer: impl DerefMut<Target = [T]>,
    gate: &mut impl Read,
) {
    let ended = reduce(task, &comm, &mut buffer);
    let failed = ended.error.is_some();
    report(&ended);
    let seen = buffer.to_vec();
    if failed || task.recovery {
        gate.read_to_end(&mut Vec::new()).expect("a pipe");
        report(&Recheck { changed: seen.iter().zip(buffer.iter()).filter(|(then, now)| then != now).count() });
    }
    if !failed {
        comm.leave();
    }
}

fn reduce<T: Value>(task: &Task, comm: &Communicator, buffer: &mut [T]) -> Ending {
    let (mut before, mut recoveries) = (None, 0);
    let (mut repaired, mut by_tree) = (Vec::new(), false);
    for round in 0..task.rounds {
        for (element, value) in buffer.iter_mut().enumerate() {
            *value = own(task.rank, element, round);
        }
        if let Some((took_us, repaired)) = before {
            report(&Round { round, took_us, repaired });
        }
        let begun = Instant::now();
        let result = comm.all_reduce(buffer, ReduceOp::Sum);
        let at_ns = now_ns();
        let took_us = begun.elapsed().as_micros() as u64;
        let ended = Ending { at_ns, repaired: repaired.clone(), by_tree, ..check_chunks(task, buffer, round) };
        let outcome = match result {
            Ok(outcome) => outcome,
            Err(error) => {
                let text = format!("{error}; {}", ended.text);
                return Ending { error: Some(variant(&error)), text, ..ended };
            }
        };
        // A tree that is lost between two calls is recovered there.
        let recoveries_before = std::mem::replace(&mut recoveries, comm.recoveries().count);
        before = Some((took_us, recoveries > recoveries_before));
        by_tree = outcome.path == Path::Tree;
        repaired.extend(outcome.recovered.then_some(round));
        if !task.recovery && outcome.transfer != Some(transfer(task.memory)) {
            return Ending { error: Some("WrongTransfer".into()), text: format!("{:?}", outcome.transfer), ..ended };
        }
        if ended.old + ended.torn > 0 {
            return Ending { error: Some("WrongResult".into()), ..ended };
        }
    }
    Ending { rounds: task.rounds, repaired, by_tree, ..ending(String::new()) }
}

/// Return the expected transfer for a kind of memory.
fn transfer(memory: Memory) -> Transfer {
    match memory {
        Memory::Registered => Transfer::ZeroCopy,
        Memory::Plain => Transfer::Bounced,
        Memory::Packets => Transfer::Packets,
    }
}

/// Compare every chunk with its old and its new contents.
fn check_chunks<T: Value>(task: &Task, buffer: &[T], round: u64) -> Ending {
    let mut seen = Ending { rounds: round, ..ending("no chunk is torn".into()) };
    // Chunks are measured in partial sums of 4 bytes, whichever type they are rounded to.
    let chunk = task.chunk_bytes / size_of::<u32>();
    for (first, values) in (0..).step_by(chunk).zip(buffer.chunks(chunk)) {
        let all = |expected: &dyn Fn(usize) -> T| (first..).zip(values).all(|(at, &value)| value == expected(at));
        if all(&|at| sum(task.ranks, at, round)) {
            seen.new += 1;
        } else if all(&|at| own(task.rank, at, round)) {
            seen.old += 1;
        } else {
            seen.torn += 1;
            let is_new = |at: usize| values[at - first] == sum(task.ranks, at, round);
            let is_old = |at: usize| values[at - first] == own(task.rank, at, round);
            let places = first..first + values.len();
            let (new, old) = (places.clone().filter(|&at| is_new(at)).count(), places.filter(|&at| is_old(at)).count());
            let other = values.len() - new - old;
            seen.text = format!("chunk from element {first} on: {new} new, {old} old, {other} neither");
        }
    }
    seen
}

fn base(element: usize, round: u64) -> u32 {
    (element as u32).wrapping_mul(0x9e37_79b2).wrapping_add((round as u32).wrapping_mul(0x85eb_ca6a)) | 1
}

fn own<T: Value>(rank: u32, element: usize, round: u64) -> T {
    T::of(base(element, round), 1 << (2 * rank))
}

fn sum<T: Value>(ranks: u32, element: usize, round: u64) -> T {
    T::of(base(element, round), (0..ranks).map(|rank| 1 << (2 * rank)).sum())
}

fn ending(text: String) -> Ending {
    let (error, rounds, old, new, torn, repaired, by_tree) = (None, 0, 0, 0, 0, Vec::new(), false);
    Ending { error, text, rounds, old, new, torn, at_ns: now_ns(), repaired, by_tree }
}

/// Return the name of an error's variant.
fn variant(error: &impl Debug) -> String {
    format!("{error:#?}").chars().take_while(char::is_ascii_alphanumeric).collect()
}

fn report(line: &impl Serialize) {
    println!("{}", serde_json::to_string(line).expect("plain values"));
}

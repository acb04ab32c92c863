//! Controller, devices and ranks, each a process of its own, where a lost tree is repaired: ranks go on with right
//! results when a device is killed or stopped at any moment, and also when a second thing dies while they repair.
//!
//! As in `faults.rs`, moments are drawn by a seeded generator, what a process does then is the machine's to say, and a
//! failure names its seed.

mod common;
mod members;

use common::Server;
use members::{
    Cluster, DEADLINE, DeviceMemory, Ending, Later, Member, Memory, Seen, Sockets, Task, be_a_rank, now_ns, signal,
    start,
};
use rustix::process::Signal;
use std::time::Duration;
use sumac_hal::emu::Rng;

/// Rounds of a job that survives: the first two or three before the fault, the others after it.
const ROUNDS: u64 = 5;

/// More rounds than any test waits for.
const FOR_EVER: u64 = 1 << 40;

/// How long a repair takes, about.
const REPAIRING: Duration = Duration::from_millis(25);

#[test]
#[ignore = "a rank of other tests"]
fn rank_process() {
    be_a_rank();
}

/// Start a job that gets over the loss of its tree, and wait until a random moment of an operation, or a little after.
fn job(cluster: &mut Cluster, rng: &mut Rng, ranks: u32, memory: Memory, rounds: u64) -> Vec<Member> {
    let task = cluster.task(ranks, memory, rounds, DEADLINE);
    let mut members = start(&Task { repair: true, rounds_values: rng.below(3) == 0, ..task });
    let first = members.iter_mut().map(Member::second_round).min().expect("a member");
    pause(rng, first + first / 4);
    members
}

/// Choosing a moment is all that this is for.
fn pause(rng: &mut Rng, at_most: Duration) {
    std::thread::sleep(rng.duration_up_to(at_most));
}

/// Mostly by reference; seldom in packets, where it takes seconds to notice that a device is gone.
fn memory_of(nth: u64) -> Memory {
    match nth % 10 {
        2 | 5 | 8 => Memory::Plain,
        9 => Memory::Packets,
        _ => Memory::Registered,
    }
}

/// See that all rounds went well at all ranks, that a repair was made in the same round wherever it was made in one,
/// and that the last round took the tree, or did not; end the members. Returns how many ranks were in a repaired call.
fn expect_all_well(members: Vec<Member>, is_by_tree: bool, context: &str) -> usize {
    let mut members = members;
    let endings: Vec<Ending> = members.iter_mut().map(Member::ending).collect();
    for ending in &endings {
        assert_eq!((ending.error.as_deref(), ending.rounds), (None, ROUNDS), "{context}: {ending:?}");
        assert_eq!(ending.by_tree, is_by_tree, "{context}: {ending:?}");
    }
    // A rank that is in no call takes part all the same, and has no call to say so.
    let said: Vec<&Vec<u64>> = endings.iter().map(|ending| &ending.repaired).filter(|said| !said.is_empty()).collect();
    assert!(!said.is_empty(), "{context}: {endings:?}");
    for member in &mut members {
        let Later { changed } = member.look_again();
        assert_eq!(changed, 0, "{context}: elements changed after the last round");
    }
    let said = said.len();
    members.into_iter().for_each(Member::end);
    said
}

/// See that all that are left name the same rank and the same call: before it, every call of each went well, and none
/// behind it did. A schedule keeps nothing for others, so that who had returned from that call by one may stand alone.
fn expect_the_same(endings: &[Ending], victim: u64, context: &str) {
    let told = |ending: &Ending| {
        let rest = ending.text.strip_prefix(&format!("rank {victim} is lost: call ")).map(str::to_owned);
        let (call, _) = rest.as_ref().and_then(|rest| rest.split_once(' ')).expect("a call is named");
        call.parse::<u64>().expect("a number")
    };
    let call = told(&endings[0]);
    for ending in endings {
        assert_eq!(told(ending), call, "{context}: {endings:?}");
        let stands_alone = ending.rounds == call + 1 && !ending.by_tree;
        assert!(ending.rounds == call || stands_alone, "{context}: {endings:?}");
    }
}

/// Run a job that needs its tree.
fn run_well(cluster: &mut Cluster, ranks: u32, memory: Memory, context: &str) {
    let mut members = cluster.job(ranks, memory, 2, DEADLINE);
    members.iter_mut().for_each(|member| assert_eq!(member.ending().error, None, "{context}"));
    members.into_iter().for_each(Member::end);
}

/// Take the device that serves the only job out of some.
fn serving(cluster: &Cluster, devices: &mut Vec<(String, Server)>) -> (String, Server) {
    let names = cluster.devices_of_the_job();
    let at = devices.iter().position(|(name, _)| *name == names[0]).expect("a device of these");
    devices.remove(at)
}

fn two_devices(cluster: &Cluster, nth: u64) -> Vec<(String, Server)> {
    let names = ["a", "b"].map(|letter| format!("device{nth}{letter}"));
    names.map(|name| (name.clone(), cluster.device(&name))).into()
}

#[test]
fn a_device_that_is_killed_at_any_moment_is_got_over() {
    const KILLS: u64 = 12;
    let mut cluster = Cluster::start();
    let (mut in_a_call, mut ranks_of_all) = (0, 0);
    for nth in 0..KILLS {
        let memory = memory_of(nth);
        let profile = ["full", "full", "inline-reduce", "copy-only"][(nth % 4) as usize];
        let context = format!("kill {nth}, seed {nth}, {memory:?}, engine {profile}");
        let (mut rng, ranks) = (Rng::new(nth), 2 + (nth % 2) as u32);
        let device = cluster.device_with(&format!("device{nth}"), profile);
        let sockets = Sockets::of(device.pid());
        let members = job(&mut cluster, &mut rng, ranks, memory, ROUNDS);
        device.kill();
        in_a_call += expect_all_well(members, false, &context);
        ranks_of_all += ranks;
        sockets.wait_until_gone(&context);
    }
    println!("{KILLS} kills of a device: {in_a_call} of {ranks_of_all} ranks were in a call that was repaired");
    cluster.end(Vec::new());
}

#[test]
fn a_job_whose_device_is_killed_moves_to_another() {
    const KILLS: u64 = 10;
    let mut cluster = Cluster::start();
    let mut devices = two_devices(&cluster, 0);
    for nth in 0..KILLS {
        let memory = memory_of(nth);
        let context = format!("kill {nth}, seed {nth}, {memory:?}");
        let before: Vec<_> =
            devices.iter().map(|(name, device)| (name.clone(), DeviceMemory::of(device.pid()))).collect();
        let members = job(&mut cluster, &mut Rng::new(nth), 3, memory, ROUNDS);
        let (_, victim) = serving(&cluster, &mut devices);
        victim.kill();
        expect_all_well(members, true, &context);
        let (name, left) = &devices[0];
        let (_, before) = before.iter().find(|(known, _)| known == name).expect("it was there");
        before.wait_for(left.pid(), &context);
        let name = format!("device{}c", nth + 1);
        devices.push((name.clone(), cluster.device(&name)));
    }
    cluster.end(devices.into_iter().map(|(_, device)| device).collect());
}

#[test]
fn the_device_that_a_job_moves_to_may_be_killed_as_well() {
    const KILLS: u64 = 10;
    let mut cluster = Cluster::start();
    for nth in 0..KILLS {
        let memory = if nth % 3 == 1 { Memory::Plain } else { Memory::Registered };
        let context = format!("kills {nth}, seed {nth}, {memory:?}");
        let mut rng = Rng::new(nth);
        let mut devices = two_devices(&cluster, nth);
        let members = job(&mut cluster, &mut rng, 3, memory, ROUNDS);
        let (_, victim) = serving(&cluster, &mut devices);
        victim.kill();
        pause(&mut rng, 2 * REPAIRING);
        devices.into_iter().for_each(|(_, device)| device.kill());
        expect_all_well(members, false, &context);
    }
    cluster.end(Vec::new());
}

#[test]
fn a_rank_that_is_killed_during_a_repair_is_named() {
    const KILLS: u64 = 12;
    let mut cluster = Cluster::start();
    let mut seen = Seen::default();
    for nth in 0..KILLS {
        let memory = if nth % 3 == 1 { Memory::Plain } else { Memory::Registered };
        let context = format!("kills {nth}, seed {nth}, {memory:?}");
        let mut rng = Rng::new(nth);
        let device = cluster.device(&format!("device{nth}"));
        let mut members = job(&mut cluster, &mut rng, 3, memory, FOR_EVER);
        device.kill();
        pause(&mut rng, REPAIRING);
        let (victim, killed) = (rng.below(3), now_ns());
        members.remove(victim as usize).kill();
        let endings: Vec<Ending> = members.iter_mut().map(Member::ending).collect();
        for ending in &endings {
            seen.note(ending, killed, DEADLINE, &["RanksFailed"], &context);
        }
        expect_the_same(&endings, victim, &context);
        for member in &mut members {
            let Later { changed } = member.look_again();
            assert_eq!(changed, 0, "{context}: elements changed after the call had returned");
        }
        members.into_iter().for_each(Member::end);
    }
    println!("{KILLS} kills of a device and a rank: {seen:?}");
    cluster.end(Vec::new());
}

#[test]
fn a_controller_that_is_killed_during_a_repair_is_not_needed() {
    for nth in 0..8 {
        let memory = [Memory::Registered, Memory::Plain, Memory::Registered, Memory::Packets][(nth % 4) as usize];
        let context = format!("kills {nth}, seed {nth}, {memory:?}");
        let mut rng = Rng::new(nth);
        let mut cluster = Cluster::start();
        let device = cluster.device("device");
        let members = job(&mut cluster, &mut rng, 3, memory, ROUNDS);
        device.kill();
        pause(&mut rng, REPAIRING);
        cluster.kill_controller();
        expect_all_well(members, false, &context);
        cluster.end(Vec::new());
    }
}

/// Nobody says who is dead: most of the ranks go on by what they see, and what is left of two does not.
#[test]
fn without_a_controller_most_ranks_agree_on_who_was_killed() {
    const KILLS: u64 = 6;
    for nth in 0..KILLS {
        let memory = memory_of(nth);
        let ranks = if nth % 3 == 2 { 2 } else { 3 };
        let context = format!("kills {nth}, seed {nth}, {memory:?}, {ranks} ranks");
        let (mut rng, mut seen) = (Rng::new(nth), Seen::default());
        let mut cluster = Cluster::start();
        let device = cluster.device("device");
        let mut members = job(&mut cluster, &mut rng, ranks, memory, FOR_EVER);
        cluster.kill_controller();
        pause(&mut rng, REPAIRING);
        let (victim, killed) = (rng.below(u64::from(ranks)), now_ns());
        members.remove(victim as usize).kill();
        let endings: Vec<Ending> = members.iter_mut().map(Member::ending).collect();
        let expected = if ranks == 2 { "Partitioned" } else { "RanksFailed" };
        for ending in &endings {
            seen.note(ending, killed, DEADLINE, &[expected], &context);
        }
        if ranks > 2 {
            expect_the_same(&endings, victim, &context);
        }
        for member in &mut members {
            assert_eq!(member.look_again().changed, 0, "{context}: elements changed after the call had returned");
        }
        members.into_iter().for_each(Member::end);
        drop(device);
        cluster.end(Vec::new());
    }
}

/// Whoever is silent is taken for dead by most of the others, and hears of that when it goes on.
#[test]
fn a_rank_that_is_stopped_without_a_controller_is_left_behind() {
    for (nth, memory) in (0..).zip([Memory::Registered, Memory::Packets]) {
        let context = format!("stop {nth}, seed {nth}, {memory:?}");
        let (mut rng, mut seen) = (Rng::new(nth), Seen::default());
        let mut cluster = Cluster::start();
        let device = cluster.device("device");
        let mut members = job(&mut cluster, &mut rng, 3, memory, FOR_EVER);
        cluster.kill_controller();
        let (at, stopped) = (rng.below(3), now_ns());
        let mut victim = members.remove(at as usize);
        signal(victim.pid(), Signal::STOP);
        let endings: Vec<Ending> = members.iter_mut().map(Member::ending).collect();
        for ending in &endings {
            seen.note(ending, stopped, DEADLINE, &["RanksFailed"], &context);
        }
        expect_the_same(&endings, at, &context);
        let continued = now_ns();
        signal(victim.pid(), Signal::CONT);
        seen.note(&victim.ending(), continued, DEADLINE, &["Partitioned"], &context);
        members.push(victim);
        for member in &mut members {
            assert_eq!(member.look_again().changed, 0, "{context}: elements changed after the call had returned");
        }
        members.into_iter().for_each(Member::end);
        println!("{context}: {seen:?}");
        drop(device);
        cluster.end(Vec::new());
    }
}

/// No device dies: each call of the tree ends alike at all that are left.
#[test]
fn a_rank_that_is_killed_in_the_tree_is_agreed_on() {
    const KILLS: u64 = 10;
    let mut cluster = Cluster::start();
    let device = cluster.device("device");
    let mut seen = Seen::default();
    for nth in 0..KILLS {
        let memory = memory_of(nth);
        let context = format!("kill {nth}, seed {nth}, {memory:?}");
        let mut rng = Rng::new(nth);
        let mut members = job(&mut cluster, &mut rng, 3, memory, FOR_EVER);
        let (victim, killed) = (rng.below(3), now_ns());
        members.remove(victim as usize).kill();
        let endings: Vec<Ending> = members.iter_mut().map(Member::ending).collect();
        for ending in &endings {
            seen.note(ending, killed, DEADLINE, &["RanksFailed"], &context);
            assert!(ending.by_tree, "{context}: {ending:?}");
        }
        expect_the_same(&endings, victim, &context);
        for member in &mut members {
            assert_eq!(member.look_again().changed, 0, "{context}: elements changed after the call had returned");
        }
        members.into_iter().for_each(Member::end);
    }
    println!("{KILLS} kills of a rank: {seen:?}");
    cluster.end(vec![device]);
}

/// In packets every rank notices; by reference the ranks of the other leaf do, and take the stopped one's memory away.
#[test]
fn a_device_that_is_stopped_is_got_over_and_writes_nothing_more_when_it_goes_on() {
    for (nth, memory) in (0..).zip([Memory::Packets, Memory::Registered, Memory::Plain]) {
        let context = format!("stop {nth}, seed {nth}, {memory:?}");
        let mut rng = Rng::new(nth);
        let mut cluster = if memory == Memory::Packets { Cluster::start() } else { Cluster::start_with_two_leaves() };
        let names: &[&str] = if memory == Memory::Packets { &["device"] } else { &["leaf0", "leaf1"] };
        let devices: Vec<Server> = names.iter().map(|name| cluster.device(name)).collect();
        let ranks = 2 * names.len() as u32;
        // A device that has got a parent once keeps the descriptor that it waits for it with.
        let with_parent = |held: DeviceMemory| DeviceMemory { files: held.files + 1, ..held };
        let before: Vec<_> = devices.iter().map(|device| with_parent(DeviceMemory::of(device.pid()))).collect();
        let mut members = job(&mut cluster, &mut rng, ranks, memory, ROUNDS);
        let stopped = now_ns();
        signal(devices[0].pid(), Signal::STOP);
        // Half of them go on while the ranks do, the others when these have done their last round.
        if nth % 2 == 0 {
            while !members[0].round().repaired {}
            let took = Duration::from_nanos(now_ns() - stopped);
            assert!(took < DEADLINE, "{context}: {took:?}");
            signal(devices[0].pid(), Signal::CONT);
        }
        let endings: Vec<Ending> = members.iter_mut().map(Member::ending).collect();
        for ending in &endings {
            assert_eq!((ending.error.as_deref(), ending.rounds), (None, ROUNDS), "{context}: {ending:?}");
        }
        if nth % 2 == 1 {
            signal(devices[0].pid(), Signal::CONT);
        }
        // What the device had in its hands it has finished, when it has served all of a later job.
        run_well(&mut cluster, ranks, memory, &context);
        for member in &mut members {
            assert_eq!(member.look_again().changed, 0, "{context}: elements changed after the last round");
        }
        members.into_iter().for_each(Member::end);
        before.iter().zip(&devices).for_each(|(before, device)| before.wait_for(device.pid(), &context));
        cluster.end(devices);
    }
}

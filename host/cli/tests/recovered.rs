//! Recovery of real processes from a lost tree: ranks continue with correct results when a device is killed or stopped
//! at any moment, also when a second process dies during the recovery.
//!
//! As in `faults.rs`, a seeded generator draws the moments of faults, and a failure names its seed. What a process is
//! doing at that moment depends on the machine.

mod common;
mod members;

use common::Server;
use members::{
    Cluster, DEADLINE, DeviceMemory, Ending, Member, Memory, Recheck, Seen, Sockets, Task, now_ns, run_rank, signal,
    start,
};
use rustix::process::Signal;
use std::time::Duration;
use sumac_hal::emu::Rng;

/// Rounds of a job that recovers: two or three before the fault, the others after it.
const ROUNDS: u64 = 5;

/// The limit of attempts, as a multiple of the usual number, until one hits a call: the machine decides which moment a
/// kill hits.
const ATTEMPTS_PER_RUN: u64 = 10;

/// More rounds than any test waits for.
const UNLIMITED: u64 = 1 << 40;

/// The approximate time of a recovery.
const RECOVERY_TIME: Duration = Duration::from_millis(25);

#[test]
#[ignore = "a rank of other tests"]
fn rank_process() {
    run_rank();
}

/// Start a job with recovery and wait until a random moment of an operation, or a little after it.
fn job(cluster: &mut Cluster, rng: &mut Rng, ranks: u32, memory: Memory, rounds: u64) -> Vec<Member> {
    let task = cluster.task(ranks, memory, rounds, DEADLINE);
    let mut members = start(&Task { recovery: true, rounds_values: rng.below(3) == 0, ..task });
    let first = members.iter_mut().map(Member::second_round).min().expect("a member");
    pause(rng, first + first / 4);
    members
}

/// Choose a random moment for a fault. Nothing is synchronised by the sleep.
fn pause(rng: &mut Rng, at_most: Duration) {
    std::thread::sleep(rng.duration_up_to(at_most));
}

/// Mostly zero-copy; rarely packets, where it takes seconds to detect a lost device.
fn memory_of(nth: u64) -> Memory {
    match nth % 10 {
        2 | 5 | 8 => Memory::Plain,
        9 => Memory::Packets,
        _ => Memory::Registered,
    }
}

/// Assert that all rounds succeeded on all ranks, and that the last one, unless it ended before the fault, took the
/// tree or did not; then end the members. Returns how many ranks recovered within a call.
fn expect_success(members: Vec<Member>, is_by_tree: bool, fault_ns: u64, context: &str) -> usize {
    let mut members = members;
    let endings: Vec<Ending> = members.iter_mut().map(Member::ending).collect();
    let is_late = endings.iter().any(|ending| ending.at_ns < fault_ns);
    for ending in &endings {
        assert_eq!((ending.error.as_deref(), ending.rounds), (None, ROUNDS), "{context}: {ending:?}");
        assert!(is_late || ending.by_tree == is_by_tree, "{context}: {ending:?}");
    }
    // A rank outside calls takes part in the recovery, too, but has no call that reports it.
    let repaired = endings.iter().filter(|ending| !ending.repaired.is_empty()).count();
    for member in &mut members {
        let Recheck { changed } = member.recheck();
        assert_eq!(changed, 0, "{context}: elements changed after the last round");
    }
    members.into_iter().for_each(Member::end);
    repaired
}

/// Assert that all survivors name the same rank and the same first failed call, that all earlier calls succeeded, and
/// that no later one did. A rank that had already returned from that call, by a host collective, may keep its result
/// alone.
fn expect_same_error(endings: &[Ending], victim: u64, context: &str) {
    let failed_call = |ending: &Ending| {
        let rest = ending.text.strip_prefix(&format!("rank {victim} is lost: collective #")).map(str::to_owned);
        let (call, _) = rest.as_ref().and_then(|rest| rest.split_once(' ')).expect("the error names a call");
        call.parse::<u64>().expect("a number")
    };
    let call = failed_call(&endings[0]);
    for ending in endings {
        assert_eq!(failed_call(ending), call, "{context}: {endings:?}");
        let keeps_result_alone = ending.rounds == call + 1 && !ending.by_tree;
        assert!(ending.rounds == call || keeps_result_alone, "{context}: {endings:?}");
    }
}

/// Run a job that requires its tree.
fn run_well(cluster: &mut Cluster, ranks: u32, memory: Memory, context: &str) {
    let mut members = cluster.job(ranks, memory, 2, DEADLINE);
    members.iter_mut().for_each(|member| assert_eq!(member.ending().error, None, "{context}"));
    members.into_iter().for_each(Member::end);
}

/// Remove and return the device that serves the only job.
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
fn job_survives_device_killed_at_any_moment() {
    const KILLS: u64 = 12;
    let mut cluster = Cluster::start();
    let (mut in_a_call, mut ranks_of_all) = (0, 0);
    for nth in 0..ATTEMPTS_PER_RUN * KILLS {
        if nth >= KILLS && in_a_call > 0 {
            break;
        }
        let memory = memory_of(nth);
        let profile = ["full", "full", "inline-reduce", "copy-only"][(nth % 4) as usize];
        let context = format!("kill {nth}, seed {nth}, {memory:?}, engine {profile}");
        let (mut rng, ranks) = (Rng::new(nth), 2 + (nth % 2) as u32);
        let device = cluster.device_with(&format!("device{nth}"), profile);
        let sockets = Sockets::of(device.pid());
        let members = job(&mut cluster, &mut rng, ranks, memory, ROUNDS);
        let killed = now_ns();
        device.kill();
        in_a_call += expect_success(members, false, killed, &context);
        ranks_of_all += ranks;
        sockets.wait_until_gone(&context);
    }
    println!("kills of a device: {in_a_call} of {ranks_of_all} ranks were in a call that was repaired");
    assert!(in_a_call > 0, "no kill was in the middle of a call");
    cluster.end(Vec::new());
}

#[test]
fn job_whose_device_is_killed_moves_to_another_device() {
    const KILLS: u64 = 10;
    let mut cluster = Cluster::start();
    let (mut devices, mut in_a_call) = (two_devices(&cluster, 0), 0);
    for nth in 0..ATTEMPTS_PER_RUN * KILLS {
        if nth >= KILLS && in_a_call > 0 {
            break;
        }
        let memory = memory_of(nth);
        let context = format!("kill {nth}, seed {nth}, {memory:?}");
        let before: Vec<_> =
            devices.iter().map(|(name, device)| (name.clone(), DeviceMemory::of(device.pid()))).collect();
        let members = job(&mut cluster, &mut Rng::new(nth), 3, memory, ROUNDS);
        let (_, victim) = serving(&cluster, &mut devices);
        let killed = now_ns();
        victim.kill();
        in_a_call += expect_success(members, true, killed, &context);
        let (name, left) = &devices[0];
        let (_, before) = before.iter().find(|(known, _)| known == name).expect("it was there");
        before.wait_for(left.pid(), &context);
        let name = format!("device{}c", nth + 1);
        devices.push((name.clone(), cluster.device(&name)));
    }
    assert!(in_a_call > 0, "no kill was in the middle of a call");
    cluster.end(devices.into_iter().map(|(_, device)| device).collect());
}

#[test]
fn job_survives_second_device_killed_during_recovery() {
    const KILLS: u64 = 10;
    let (mut cluster, mut in_a_call) = (Cluster::start(), 0);
    for nth in 0..ATTEMPTS_PER_RUN * KILLS {
        if nth >= KILLS && in_a_call > 0 {
            break;
        }
        let memory = if nth % 3 == 1 { Memory::Plain } else { Memory::Registered };
        let context = format!("kills {nth}, seed {nth}, {memory:?}");
        let mut rng = Rng::new(nth);
        let mut devices = two_devices(&cluster, nth);
        let members = job(&mut cluster, &mut rng, 3, memory, ROUNDS);
        let (_, victim) = serving(&cluster, &mut devices);
        victim.kill();
        pause(&mut rng, 2 * RECOVERY_TIME);
        let killed = now_ns();
        devices.into_iter().for_each(|(_, device)| device.kill());
        in_a_call += expect_success(members, false, killed, &context);
    }
    assert!(in_a_call > 0, "no kill was in the middle of a call");
    cluster.end(Vec::new());
}

#[test]
fn survivors_name_rank_killed_during_recovery() {
    const KILLS: u64 = 12;
    let mut cluster = Cluster::start();
    let mut seen = Seen::default();
    for nth in 0..KILLS {
        let memory = if nth % 3 == 1 { Memory::Plain } else { Memory::Registered };
        let context = format!("kills {nth}, seed {nth}, {memory:?}");
        let mut rng = Rng::new(nth);
        let device = cluster.device(&format!("device{nth}"));
        let mut members = job(&mut cluster, &mut rng, 3, memory, UNLIMITED);
        device.kill();
        pause(&mut rng, RECOVERY_TIME);
        let (victim, killed) = (rng.below(3), now_ns());
        members.remove(victim as usize).kill();
        let endings: Vec<Ending> = members.iter_mut().map(Member::ending).collect();
        for ending in &endings {
            seen.note(ending, killed, DEADLINE, &["RanksFailed"], &context);
        }
        expect_same_error(&endings, victim, &context);
        for member in &mut members {
            let Recheck { changed } = member.recheck();
            assert_eq!(changed, 0, "{context}: elements changed after the call had returned");
        }
        members.into_iter().for_each(Member::end);
    }
    println!("{KILLS} kills of a device and a rank: {seen:?}");
    cluster.end(Vec::new());
}

#[test]
fn recovery_completes_without_controller() {
    const KILLS: u64 = 8;
    let mut in_a_call = 0;
    for nth in 0..ATTEMPTS_PER_RUN * KILLS {
        if nth >= KILLS && in_a_call > 0 {
            break;
        }
        let memory = [Memory::Registered, Memory::Plain, Memory::Registered, Memory::Packets][(nth % 4) as usize];
        let context = format!("kills {nth}, seed {nth}, {memory:?}");
        let mut rng = Rng::new(nth);
        let mut cluster = Cluster::start();
        let device = cluster.device("device");
        let members = job(&mut cluster, &mut rng, 3, memory, ROUNDS);
        let killed = now_ns();
        device.kill();
        pause(&mut rng, RECOVERY_TIME);
        cluster.kill_controller();
        in_a_call += expect_success(members, false, killed, &context);
        cluster.end(Vec::new());
    }
    assert!(in_a_call > 0, "no kill was in the middle of a call");
}

/// Without a controller, a majority of ranks agrees on the failed rank; the survivor of two ranks ends as partitioned.
#[test]
fn majority_agrees_on_killed_rank_without_controller() {
    const KILLS: u64 = 6;
    for nth in 0..KILLS {
        let memory = memory_of(nth);
        let ranks = if nth % 3 == 2 { 2 } else { 3 };
        let context = format!("kills {nth}, seed {nth}, {memory:?}, {ranks} ranks");
        let (mut rng, mut seen) = (Rng::new(nth), Seen::default());
        let mut cluster = Cluster::start();
        let device = cluster.device("device");
        let mut members = job(&mut cluster, &mut rng, ranks, memory, UNLIMITED);
        cluster.kill_controller();
        pause(&mut rng, RECOVERY_TIME);
        let (victim, killed) = (rng.below(u64::from(ranks)), now_ns());
        members.remove(victim as usize).kill();
        let endings: Vec<Ending> = members.iter_mut().map(Member::ending).collect();
        let expected = if ranks == 2 { "Partitioned" } else { "RanksFailed" };
        for ending in &endings {
            seen.note(ending, killed, DEADLINE, &[expected], &context);
        }
        if ranks > 2 {
            expect_same_error(&endings, victim, &context);
        }
        for member in &mut members {
            assert_eq!(member.recheck().changed, 0, "{context}: elements changed after the call had returned");
        }
        members.into_iter().for_each(Member::end);
        drop(device);
        cluster.end(Vec::new());
    }
}

/// The majority excludes a silent rank, which learns of it when it continues.
#[test]
fn majority_excludes_stopped_rank_without_controller() {
    for (nth, memory) in (0..).zip([Memory::Registered, Memory::Packets]) {
        let context = format!("stop {nth}, seed {nth}, {memory:?}");
        let (mut rng, mut seen) = (Rng::new(nth), Seen::default());
        let mut cluster = Cluster::start();
        let device = cluster.device("device");
        let mut members = job(&mut cluster, &mut rng, 3, memory, UNLIMITED);
        cluster.kill_controller();
        let (at, stopped) = (rng.below(3), now_ns());
        let mut victim = members.remove(at as usize);
        signal(victim.pid(), Signal::STOP);
        let endings: Vec<Ending> = members.iter_mut().map(Member::ending).collect();
        for ending in &endings {
            seen.note(ending, stopped, DEADLINE, &["RanksFailed"], &context);
        }
        expect_same_error(&endings, at, &context);
        let continued = now_ns();
        signal(victim.pid(), Signal::CONT);
        seen.note(&victim.ending(), continued, DEADLINE, &["Partitioned"], &context);
        members.push(victim);
        for member in &mut members {
            assert_eq!(member.recheck().changed, 0, "{context}: elements changed after the call had returned");
        }
        members.into_iter().for_each(Member::end);
        println!("{context}: {seen:?}");
        drop(device);
        cluster.end(Vec::new());
    }
}

/// No device dies: each call through the tree ends the same on all survivors.
#[test]
fn survivors_agree_on_rank_killed_in_the_tree() {
    const KILLS: u64 = 10;
    let mut cluster = Cluster::start();
    let device = cluster.device("device");
    let mut seen = Seen::default();
    for nth in 0..KILLS {
        let memory = memory_of(nth);
        let context = format!("kill {nth}, seed {nth}, {memory:?}");
        let mut rng = Rng::new(nth);
        let mut members = job(&mut cluster, &mut rng, 3, memory, UNLIMITED);
        let (victim, killed) = (rng.below(3), now_ns());
        members.remove(victim as usize).kill();
        let endings: Vec<Ending> = members.iter_mut().map(Member::ending).collect();
        for ending in &endings {
            seen.note(ending, killed, DEADLINE, &["RanksFailed"], &context);
            assert!(ending.by_tree, "{context}: {ending:?}");
        }
        expect_same_error(&endings, victim, &context);
        for member in &mut members {
            assert_eq!(member.recheck().changed, 0, "{context}: elements changed after the call had returned");
        }
        members.into_iter().for_each(Member::end);
    }
    println!("{KILLS} kills of a rank: {seen:?}");
    cluster.end(vec![device]);
}

/// With packets every rank detects the stop. With zero-copy, the ranks of the other leaf do, and revoke the stopped
/// device's access to memory.
#[test]
fn job_survives_stopped_device_which_writes_nothing_after_it_continues() {
    for (nth, memory) in (0..).zip([Memory::Packets, Memory::Registered, Memory::Plain]) {
        let context = format!("stop {nth}, seed {nth}, {memory:?}");
        let mut rng = Rng::new(nth);
        let mut cluster = if memory == Memory::Packets { Cluster::start() } else { Cluster::start_with_two_leaves() };
        let names: &[&str] = if memory == Memory::Packets { &["device"] } else { &["leaf0", "leaf1"] };
        let devices: Vec<Server> = names.iter().map(|name| cluster.device(name)).collect();
        let ranks = 2 * names.len() as u32;
        // A device that has had a parent keeps the descriptor with which it waits for it.
        let with_parent = |held: DeviceMemory| DeviceMemory { files: held.files + 1, ..held };
        let before: Vec<_> = devices.iter().map(|device| with_parent(DeviceMemory::of(device.pid()))).collect();
        let mut members = job(&mut cluster, &mut rng, ranks, memory, ROUNDS);
        let stopped = now_ns();
        signal(devices[0].pid(), Signal::STOP);
        // Half of the devices continue while the ranks work, the others after the ranks' last round.
        if nth % 2 == 0 {
            while !members[0].round().repaired {}
            // A call ends by its deadline at the latest, and the stop may have hit the end of one.
            let took = Duration::from_nanos(now_ns() - stopped);
            assert!(took < 2 * DEADLINE, "{context}: {took:?}");
            signal(devices[0].pid(), Signal::CONT);
        }
        let endings: Vec<Ending> = members.iter_mut().map(Member::ending).collect();
        for ending in &endings {
            assert_eq!((ending.error.as_deref(), ending.rounds), (None, ROUNDS), "{context}: {ending:?}");
        }
        if nth % 2 == 1 {
            signal(devices[0].pid(), Signal::CONT);
        }
        // Once the device has served a later job completely, it has finished all earlier work.
        run_well(&mut cluster, ranks, memory, &context);
        for member in &mut members {
            assert_eq!(member.recheck().changed, 0, "{context}: elements changed after the last round");
        }
        members.into_iter().for_each(Member::end);
        before.iter().zip(&devices).for_each(|(before, device)| before.wait_for(device.pid(), &context));
        cluster.end(devices);
    }
}

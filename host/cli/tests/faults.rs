//! Controller, devices and ranks, each a process of its own, and what the others see when one is killed or stopped at
//! any moment: a named error within the deadline, buffers that are chunk by chunk old or new, and nothing left behind.
//!
//! The moments are drawn by a seeded generator; what a process does at a moment is the machine's to say. A failure
//! names its seed.

mod common;
mod members;

use common::Server;
use members::{
    Cluster, DEADLINE, DeviceMemory, Later, Member, Memory, Seen, Sockets, Task, be_a_rank, now_ns, signal, start,
};
use rustix::process::Signal;
use std::time::Duration;
use sumac::controller::ControllerConfig;
use sumac_hal::emu::Rng;

/// How many times as often as usual something is done, until it has been in the middle of an operation: which moment it
/// is, is the machine's to say.
const AT_MOST: u64 = 10;

/// More rounds than any test waits for.
const FOR_EVER: u64 = 1 << 40;

/// How long the way back from a failed call may take beyond its deadline: a fence that is not answered, the memory that
/// is taken away then, and a machine that does something else.
const WAY_BACK: Duration = Duration::from_secs(5);

/// How long ranks take to start and to join, about.
const JOINING: Duration = Duration::from_millis(12);

/// How long they may take where one of them is killed meanwhile: the others wait for one that has not come that long.
const JOIN_DEADLINE: Duration = Duration::from_secs(4);

#[test]
#[ignore = "a rank of other tests"]
fn rank_process() {
    be_a_rank();
}

/// Wait until all members begin an operation, and then until a random moment of it, or a little after.
fn wait_within_an_operation(members: &mut [Member], rng: &mut Rng) {
    let first = members.iter_mut().map(Member::second_round).min().expect("a member");
    // Choosing the moment is all that this sleep is for.
    std::thread::sleep(rng.duration_up_to(first + first / 4));
}

/// The memory of the nth repetition: mostly registered, where the device writes by itself; seldom in packets, where a
/// device that is gone is known by its silence alone, which takes seconds.
fn memory_of(nth: u64) -> Memory {
    match nth % 20 {
        3 | 8 | 13 | 18 => Memory::Plain,
        19 => Memory::Packets,
        _ => Memory::Registered,
    }
}

/// See that buffers are still what they were when the call returned.
fn nothing_changed(members: &mut [Member], context: &str) {
    for member in members {
        let Later { changed } = member.look_again();
        assert_eq!(changed, 0, "{context}: elements changed after the call had returned");
    }
}

#[test]
fn a_device_that_is_killed_at_any_moment_loses_no_input() {
    const KILLS: u64 = 24;
    let mut cluster = Cluster::start();
    let mut seen = Seen::default();
    for nth in 0..AT_MOST * KILLS {
        if nth >= KILLS && seen.mixed > 0 {
            break;
        }
        let memory = memory_of(nth);
        let profile = ["full", "full", "inline-reduce", "copy-only"][(nth % 4) as usize];
        let rounds_values = nth % 3 == 1;
        let context = format!("kill {nth}, seed {nth}, {memory:?}, engine {profile}, rounded: {rounds_values}");
        let mut rng = Rng::new(nth);
        let device = cluster.device_with(&format!("device{nth}"), profile);
        let sockets = Sockets::of(device.pid());
        let is_joining = nth % 8 == 6;
        let deadline = if is_joining { JOIN_DEADLINE } else { DEADLINE };
        let task = cluster.task(2, memory, FOR_EVER, deadline);
        let mut members = start(&Task { rounds_values, ..task });
        if is_joining {
            // Choosing the moment is all that this sleep is for.
            std::thread::sleep(rng.duration_up_to(JOINING));
        } else {
            wait_within_an_operation(&mut members, &mut rng);
        }
        let killed = now_ns();
        device.kill();
        let expected: &[&str] = match memory {
            Memory::Packets => &["PathLost", "RankLost"],
            _ if is_joining => &["JoinAttach", "AllocMemory", "NotPossible", "DeviceLost", "RankLost"],
            _ => &["DeviceLost", "RankLost"],
        };
        for member in &mut members {
            seen.note(&member.ending(), killed, DEADLINE, expected, &context);
        }
        nothing_changed(&mut members, &context);
        members.into_iter().for_each(Member::end);
        sockets.wait_until_gone(&context);
    }
    println!("kills of a device: {seen:?}");
    assert!(seen.mixed > 0, "no kill was in the middle of an operation: {seen:?}");
    cluster.end(Vec::new());
}

#[test]
fn a_rank_that_is_killed_at_any_moment_is_named_and_its_device_lives_on() {
    const KILLS: u64 = 12;
    let mut cluster = Cluster::start();
    let device = cluster.device("device");
    let before = DeviceMemory::of(device.pid());
    let (mut working, mut joining) = (Seen::default(), Seen::default());
    for nth in 0..AT_MOST * KILLS {
        if nth >= KILLS && working.mixed > 0 {
            break;
        }
        let memory = memory_of(nth);
        let context = format!("kill {nth}, seed {nth}, {memory:?}");
        let mut rng = Rng::new(nth);
        let is_joining = nth % 4 == 0;
        let deadline = if is_joining { JOIN_DEADLINE } else { DEADLINE };
        let mut members = cluster.job(3, memory, FOR_EVER, deadline);
        if is_joining {
            // Choosing the moment is all that this sleep is for.
            std::thread::sleep(rng.duration_up_to(JOINING));
        } else {
            wait_within_an_operation(&mut members, &mut rng);
        }
        // The one that was started last is least likely to have joined.
        let victim = if is_joining { 2 } else { rng.below(3) };
        let killed = now_ns();
        members.remove(victim as usize).kill();
        for member in &mut members {
            let ending = member.ending();
            if is_joining {
                joining.note(&ending, killed, DEADLINE, &["JoinController", "RankLost"], &context);
            } else {
                working.note(&ending, killed, DEADLINE, &["RankLost"], &context);
                assert!(ending.text.starts_with(&format!("rank {victim} is lost;")), "{context}: {ending:?}");
            }
        }
        nothing_changed(&mut members, &context);
        members.into_iter().for_each(Member::end);
        before.wait_for(device.pid(), &context);
        cluster.run_well(memory, &context);
        before.wait_for(device.pid(), &context);
    }
    println!("kills of a rank: while working {working:?}, while joining {joining:?}");
    assert!(working.mixed > 0, "no kill was in the middle of an operation: {working:?}");
    cluster.end(vec![device]);
}

#[test]
fn a_device_that_is_stopped_writes_nothing_more_when_it_goes_on() {
    const STOPS: u64 = 8;
    const SHORT: Duration = Duration::from_millis(1500);
    let mut cluster = Cluster::start();
    let device = cluster.device("device");
    let before = DeviceMemory::of(device.pid());
    let mut seen = Seen::default();
    for nth in 0..AT_MOST * STOPS {
        if nth >= STOPS && seen.mixed > 0 {
            break;
        }
        let memory = if nth % 4 == 3 { Memory::Plain } else { Memory::Registered };
        let context = format!("stop {nth}, seed {nth}, {memory:?}");
        let mut rng = Rng::new(nth);
        let mut members = cluster.job(2, memory, FOR_EVER, SHORT);
        wait_within_an_operation(&mut members, &mut rng);
        let stopped = now_ns();
        signal(device.pid(), Signal::STOP);
        for member in &mut members {
            seen.note(&member.ending(), stopped, SHORT + WAY_BACK, &["Deadline"], &context);
        }
        signal(device.pid(), Signal::CONT);
        // What the device had in its hands it has finished, when it has served all of a later job.
        cluster.run_well(memory, &context);
        nothing_changed(&mut members, &context);
        members.into_iter().for_each(Member::end);
        before.wait_for(device.pid(), &context);
    }
    println!("stops of a device: {seen:?}");
    assert!(seen.mixed > 0, "no stop was in the middle of an operation: {seen:?}");
    cluster.end(vec![device]);
}

#[test]
fn a_device_that_pauses_for_less_than_the_deadline_costs_nothing_else() {
    let mut cluster = Cluster::start();
    let device = cluster.device("device");
    for (nth, memory) in (0..).zip([Memory::Registered, Memory::Plain, Memory::Packets]) {
        let mut rng = Rng::new(nth);
        let mut members = cluster.job(2, memory, 4, DEADLINE);
        wait_within_an_operation(&mut members, &mut rng);
        signal(device.pid(), Signal::STOP);
        // What is chosen here is how long the pause is.
        std::thread::sleep(rng.duration_up_to(Duration::from_millis(500)));
        signal(device.pid(), Signal::CONT);
        for member in &mut members {
            let ending = member.ending();
            assert_eq!((ending.error.as_deref(), ending.rounds), (None, 4), "seed {nth}, {memory:?}: {ending:?}");
        }
        members.into_iter().for_each(Member::end);
    }
    cluster.end(vec![device]);
}

#[test]
fn a_controller_that_is_killed_is_missed_by_no_operation() {
    for (nth, memory) in (0..).zip([Memory::Registered, Memory::Plain, Memory::Packets]) {
        let context = format!("seed {nth}, {memory:?}");
        let mut cluster = Cluster::start();
        let device = cluster.device("device");
        let before = DeviceMemory::of(device.pid());
        let mut rng = Rng::new(nth);
        let mut members = cluster.job(2, memory, 6, DEADLINE);
        wait_within_an_operation(&mut members, &mut rng);
        cluster.kill_controller();
        for member in &mut members {
            let ending = member.ending();
            assert_eq!((ending.error.as_deref(), ending.rounds), (None, 6), "{context}: {ending:?}");
        }
        members.into_iter().for_each(Member::end);
        before.wait_for(device.pid(), &context);
        cluster.end(vec![device]);
    }
}

/// Nobody tells the others then.
#[test]
fn a_rank_that_is_killed_after_its_controller_costs_the_others_no_more_than_their_deadline() {
    const SHORT: Duration = Duration::from_millis(1500);
    for (nth, memory) in (0..).zip([Memory::Registered, Memory::Plain, Memory::Packets]) {
        let context = format!("seed {nth}, {memory:?}");
        let mut cluster = Cluster::start();
        let device = cluster.device("device");
        let before = DeviceMemory::of(device.pid());
        let mut rng = Rng::new(nth);
        let mut members = cluster.job(3, memory, FOR_EVER, SHORT);
        wait_within_an_operation(&mut members, &mut rng);
        cluster.kill_controller();
        let killed = now_ns();
        members.remove(rng.below(3) as usize).kill();
        let mut seen = Seen::default();
        for member in &mut members {
            seen.note(&member.ending(), killed, SHORT + WAY_BACK, &["Deadline"], &context);
        }
        nothing_changed(&mut members, &context);
        members.into_iter().for_each(Member::end);
        before.wait_for(device.pid(), &context);
        println!("{context}: {seen:?}");
        cluster.end(vec![device]);
    }
}

#[test]
fn either_device_of_two_levels_may_be_killed() {
    const KILLS: u64 = 8;
    let mut cluster = Cluster::start_with_two_leaves();
    let mut seen = Seen::default();
    for nth in 0..AT_MOST * KILLS {
        if nth >= KILLS && seen.mixed > 0 {
            break;
        }
        let context = format!("kill {nth}, seed {nth}");
        let mut rng = Rng::new(nth);
        let mut devices: Vec<_> = ["leaf0", "leaf1"].iter().map(|name| cluster.device(name)).collect();
        let mut members = cluster.job(4, Memory::Registered, FOR_EVER, DEADLINE);
        wait_within_an_operation(&mut members, &mut rng);
        let killed = now_ns();
        let victim = (nth % 2) as usize;
        devices.remove(victim).kill();
        // Those at the dead device know at once; the others when these are gone.
        members.rotate_left(2 * victim);
        for (place, mut member) in members.into_iter().enumerate() {
            let expected: &[&str] = if place < 2 { &["DeviceLost"] } else { &["RankLost", "PathLost"] };
            seen.note(&member.ending(), killed, DEADLINE, expected, &context);
            nothing_changed(std::slice::from_mut(&mut member), &context);
            member.end();
        }
        devices.iter_mut().for_each(Server::interrupt_and_expect_success);
    }
    println!("kills of a leaf or the root: {seen:?}");
    assert!(seen.mixed > 0, "no kill was in the middle of an operation: {seen:?}");
    cluster.end(Vec::new());
}

#[test]
fn a_rank_that_is_killed_does_not_disturb_another_job_on_its_device() {
    const KILLS: u64 = 4;
    let mut cluster = Cluster::start();
    let device = cluster.device("device");
    let before = DeviceMemory::of(device.pid());
    for nth in 0..KILLS {
        let context = format!("kill {nth}, seed {nth}");
        let mut rng = Rng::new(nth);
        let mut others = cluster.job(2, Memory::Registered, 8, DEADLINE);
        let mut members = cluster.job(2, Memory::Registered, FOR_EVER, DEADLINE);
        wait_within_an_operation(&mut members, &mut rng);
        members.remove(rng.below(2) as usize).kill();
        assert_eq!(members[0].ending().error.as_deref(), Some("RankLost"), "{context}");
        for member in &mut others {
            let ending = member.ending();
            assert_eq!((ending.error.as_deref(), ending.rounds), (None, 8), "{context}: {ending:?}");
        }
        nothing_changed(&mut members, &context);
        members.into_iter().chain(others).for_each(Member::end);
        before.wait_for(device.pid(), &context);
    }
    cluster.end(vec![device]);
}

#[test]
fn a_rank_that_is_stopped_costs_the_others_no_more_than_their_deadline() {
    const SHORT: Duration = Duration::from_millis(1500);
    let mut cluster = Cluster::start();
    let device = cluster.device("device");
    let before = DeviceMemory::of(device.pid());
    for (nth, memory) in (0..).zip([Memory::Registered, Memory::Plain, Memory::Packets]) {
        let context = format!("seed {nth}, {memory:?}");
        let mut rng = Rng::new(nth);
        let mut seen = Seen::default();
        let mut members = cluster.job(3, memory, FOR_EVER, SHORT);
        wait_within_an_operation(&mut members, &mut rng);
        let stopped = now_ns();
        let victim = members.remove(rng.below(3) as usize);
        signal(victim.pid(), Signal::STOP);
        for member in &mut members {
            seen.note(&member.ending(), stopped, SHORT + WAY_BACK, &["Deadline"], &context);
        }
        let continued = now_ns();
        signal(victim.pid(), Signal::CONT);
        members.push(victim);
        let last = members.last_mut().expect("the victim");
        seen.note(&last.ending(), continued, SHORT + WAY_BACK, &["Deadline"], &context);
        cluster.run_well(memory, &context);
        nothing_changed(&mut members, &context);
        members.into_iter().for_each(Member::end);
        before.wait_for(device.pid(), &context);
        println!("{context}: {seen:?}");
    }
    cluster.end(vec![device]);
}

#[test]
fn ranks_by_reference_and_in_packets_end_together() {
    const KILLS: u64 = 10;
    let mut cluster = Cluster::start();
    let device = cluster.device("device");
    let before = DeviceMemory::of(device.pid());
    let mut seen = Seen::default();
    for nth in 0..AT_MOST * KILLS {
        if nth >= KILLS && seen.mixed > 0 {
            break;
        }
        let context = format!("kill {nth}, seed {nth}");
        let mut rng = Rng::new(nth);
        let task = cluster.task(3, Memory::Registered, FOR_EVER, DEADLINE);
        // As for more levels than one: packets limit the chunks, and an engine wants cache lines.
        let task = Task { chunk_bytes: usize::from(ControllerConfig::new().chunk_max_bytes) / 64 * 64, ..task };
        let memories = (0..).zip([Memory::Registered, Memory::Packets, Memory::Plain]);
        let mut members: Vec<_> =
            memories.map(|(rank, memory)| Member::start(&Task { rank, memory, ..task.clone() })).collect();
        wait_within_an_operation(&mut members, &mut rng);
        let killed = now_ns();
        members.remove((nth % 3) as usize).kill();
        for member in &mut members {
            seen.note(&member.ending(), killed, DEADLINE, &["RankLost"], &context);
        }
        nothing_changed(&mut members, &context);
        members.into_iter().for_each(Member::end);
        before.wait_for(device.pid(), &context);
    }
    println!("kills of a rank among others that attach in another way: {seen:?}");
    assert!(seen.mixed > 0, "no kill was in the middle of an operation: {seen:?}");
    cluster.run_well(Memory::Registered, "at the end");
    cluster.end(vec![device]);
}

#[test]
fn a_device_that_is_stopped_before_a_job_begins_is_no_part_of_it() {
    // The controller waits for the device to answer, and gives up; ranks wait for the controller.
    const JOIN: Duration = Duration::from_secs(40);
    let mut cluster = Cluster::start();
    let device = cluster.device("device");
    let before = DeviceMemory::of(device.pid());
    let stopped = now_ns();
    signal(device.pid(), Signal::STOP);
    let mut members = cluster.job(2, Memory::Registered, FOR_EVER, JOIN);
    let mut seen = Seen::default();
    for member in &mut members {
        seen.note(&member.ending(), stopped, JOIN, &["NotPossible"], "without a device");
    }
    signal(device.pid(), Signal::CONT);
    nothing_changed(&mut members, "without a device");
    members.into_iter().for_each(Member::end);
    println!("a device that is stopped: {seen:?}");
    cluster.run_well(Memory::Registered, "with the device");
    before.wait_for(device.pid(), "at the end");
    cluster.end(vec![device]);
}

//! Faults of real processes without recovery: a controller, a device or a rank is killed or stopped at any moment. The
//! others get a named error within the deadline, each chunk of their buffers is either old or new, and no resources
//! leak.
//!
//! A seeded generator draws the moments, and a failure names its seed. What a process is doing at that moment depends
//! on the machine.

mod common;
mod members;

use common::Server;
use members::{
    Cluster, DEADLINE, DeviceMemory, Member, Memory, Recheck, Seen, Sockets, Task, now_ns, run_rank, signal, start,
};
use rustix::process::Signal;
use std::time::Duration;
use sumac::controller::ControllerConfig;
use sumac_hal::emu::Rng;

/// The limit of attempts, as a multiple of the usual number, until one hits an operation: the machine decides which
/// moment a kill hits.
const ATTEMPTS_PER_RUN: u64 = 10;

/// More rounds than any test waits for.
const UNLIMITED: u64 = 1 << 40;

/// How long a failed call may take beyond its deadline: for a fence without a reply, the revocation of memory, and a
/// loaded machine.
const RETURN_LIMIT: Duration = Duration::from_secs(15);

/// The approximate time in which ranks start and join.
const JOINING: Duration = Duration::from_millis(12);

/// The deadline of joining if a rank is killed meanwhile: the others wait for it that long.
const JOIN_DEADLINE: Duration = Duration::from_secs(4);

#[test]
#[ignore = "a rank of other tests"]
fn rank_process() {
    run_rank();
}

/// Wait until all members begin an operation, and then until a random moment in it or a little after it.
fn wait_within_an_operation(members: &mut [Member], rng: &mut Rng) {
    pause_within(members.iter_mut().map(Member::second_round).min().expect("a member"), rng);
}

fn pause_within(round: Duration, rng: &mut Rng) {
    // The sleep chooses a random moment; nothing is synchronised by it.
    std::thread::sleep(rng.duration_up_to(round + round / 4));
}

/// Start a job whose calls have a short deadline, and wait for a moment as [`wait_within_an_operation`]. Where a round
/// takes longer, on a busy machine, the deadline is twice as long. Returns the members and their deadline.
fn job_with_short_deadline(
    cluster: &mut Cluster,
    ranks: u32,
    memory: Memory,
    rng: &mut Rng,
) -> (Vec<Member>, Duration) {
    let mut deadline = Duration::from_millis(1500);
    loop {
        let mut members = cluster.job(ranks, memory, UNLIMITED, deadline);
        let rounds: Option<Vec<_>> = members.iter_mut().map(Member::second_round_in_time).collect();
        if let Some(first) = rounds.and_then(|rounds| rounds.into_iter().min()) {
            pause_within(first, rng);
            return (members, deadline);
        }
        deadline *= 2;
        assert!(deadline <= 4 * DEADLINE, "no round completes within {deadline:?}");
    }
}

/// Return the memory of repetition `nth`: mostly registered, to which the device writes directly; rarely packets, where
/// only silence reveals a lost device, which takes seconds.
fn memory_of(nth: u64) -> Memory {
    match nth % 20 {
        3 | 8 | 13 | 18 => Memory::Plain,
        19 => Memory::Packets,
        _ => Memory::Registered,
    }
}

/// Assert that buffers have not changed since the call returned.
fn expect_unchanged(members: &mut [Member], context: &str) {
    for member in members {
        let Recheck { changed } = member.recheck();
        assert_eq!(changed, 0, "{context}: elements changed after the call had returned");
    }
}

#[test]
fn device_killed_at_any_moment_tears_no_chunk_and_loses_no_input() {
    const KILLS: u64 = 24;
    let mut cluster = Cluster::start();
    let mut seen = Seen::default();
    for nth in 0..ATTEMPTS_PER_RUN * KILLS {
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
        let task = cluster.task(2, memory, UNLIMITED, deadline);
        let mut members = start(&Task { rounds_values, ..task });
        if is_joining {
            // The sleep chooses a random moment; nothing is synchronised by it.
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
        expect_unchanged(&mut members, &context);
        members.into_iter().for_each(Member::end);
        sockets.wait_until_gone(&context);
    }
    println!("kills of a device: {seen:?}");
    assert!(seen.mixed > 0, "no kill was in the middle of an operation: {seen:?}");
    cluster.end(Vec::new());
}

#[test]
fn rank_killed_at_any_moment_is_named_and_its_device_stays_usable() {
    const KILLS: u64 = 12;
    let mut cluster = Cluster::start();
    let device = cluster.device("device");
    let before = DeviceMemory::of(device.pid());
    let (mut working, mut joining) = (Seen::default(), Seen::default());
    for nth in 0..ATTEMPTS_PER_RUN * KILLS {
        if nth >= KILLS && working.mixed > 0 {
            break;
        }
        let memory = memory_of(nth);
        let context = format!("kill {nth}, seed {nth}, {memory:?}");
        let mut rng = Rng::new(nth);
        let is_joining = nth % 4 == 0;
        let deadline = if is_joining { JOIN_DEADLINE } else { DEADLINE };
        let mut members = cluster.job(3, memory, UNLIMITED, deadline);
        if is_joining {
            // The sleep chooses a random moment; nothing is synchronised by it.
            std::thread::sleep(rng.duration_up_to(JOINING));
        } else {
            wait_within_an_operation(&mut members, &mut rng);
        }
        // The rank that was started last is the least likely to have joined.
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
        expect_unchanged(&mut members, &context);
        members.into_iter().for_each(Member::end);
        before.wait_for(device.pid(), &context);
        cluster.run_successfully(memory, &context);
        before.wait_for(device.pid(), &context);
    }
    println!("kills of a rank: while working {working:?}, while joining {joining:?}");
    assert!(working.mixed > 0, "no kill was in the middle of an operation: {working:?}");
    cluster.end(vec![device]);
}

#[test]
fn stopped_device_writes_nothing_after_it_continues() {
    const STOPS: u64 = 8;
    let mut cluster = Cluster::start();
    let device = cluster.device("device");
    let before = DeviceMemory::of(device.pid());
    let mut seen = Seen::default();
    for nth in 0..ATTEMPTS_PER_RUN * STOPS {
        if nth >= STOPS && seen.mixed > 0 {
            break;
        }
        let memory = if nth % 4 == 3 { Memory::Plain } else { Memory::Registered };
        let context = format!("stop {nth}, seed {nth}, {memory:?}");
        let mut rng = Rng::new(nth);
        let (mut members, deadline) = job_with_short_deadline(&mut cluster, 2, memory, &mut rng);
        let stopped = now_ns();
        signal(device.pid(), Signal::STOP);
        for member in &mut members {
            seen.note(&member.ending(), stopped, deadline + RETURN_LIMIT, &["Deadline"], &context);
        }
        signal(device.pid(), Signal::CONT);
        // Once the device has served a later job completely, it has finished all earlier work.
        cluster.run_successfully(memory, &context);
        expect_unchanged(&mut members, &context);
        members.into_iter().for_each(Member::end);
        before.wait_for(device.pid(), &context);
    }
    println!("stops of a device: {seen:?}");
    assert!(seen.mixed > 0, "no stop was in the middle of an operation: {seen:?}");
    cluster.end(vec![device]);
}

#[test]
fn device_paused_for_less_than_the_deadline_causes_no_error() {
    let mut cluster = Cluster::start();
    let device = cluster.device("device");
    for (nth, memory) in (0..).zip([Memory::Registered, Memory::Plain, Memory::Packets]) {
        let mut rng = Rng::new(nth);
        let mut members = cluster.job(2, memory, 4, DEADLINE);
        wait_within_an_operation(&mut members, &mut rng);
        signal(device.pid(), Signal::STOP);
        // The sleep is the length of the pause.
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
fn operations_complete_after_the_controller_is_killed() {
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

/// Nobody notifies the survivors.
#[test]
fn survivors_end_at_their_deadline_if_controller_and_rank_are_killed() {
    for (nth, memory) in (0..).zip([Memory::Registered, Memory::Plain, Memory::Packets]) {
        let context = format!("seed {nth}, {memory:?}");
        let mut cluster = Cluster::start();
        let device = cluster.device("device");
        let before = DeviceMemory::of(device.pid());
        let mut rng = Rng::new(nth);
        let (mut members, deadline) = job_with_short_deadline(&mut cluster, 3, memory, &mut rng);
        cluster.kill_controller();
        let killed = now_ns();
        members.remove(rng.below(3) as usize).kill();
        let mut seen = Seen::default();
        for member in &mut members {
            seen.note(&member.ending(), killed, deadline + RETURN_LIMIT, &["Deadline"], &context);
        }
        expect_unchanged(&mut members, &context);
        members.into_iter().for_each(Member::end);
        before.wait_for(device.pid(), &context);
        println!("{context}: {seen:?}");
        cluster.end(vec![device]);
    }
}

#[test]
fn ranks_end_with_named_errors_if_either_device_of_two_levels_is_killed() {
    const KILLS: u64 = 8;
    let mut cluster = Cluster::start_with_two_leaves();
    let mut seen = Seen::default();
    for nth in 0..ATTEMPTS_PER_RUN * KILLS {
        if nth >= KILLS && seen.mixed > 0 {
            break;
        }
        let context = format!("kill {nth}, seed {nth}");
        let mut rng = Rng::new(nth);
        let mut devices: Vec<_> = ["leaf0", "leaf1"].iter().map(|name| cluster.device(name)).collect();
        let mut members = cluster.job(4, Memory::Registered, UNLIMITED, DEADLINE);
        wait_within_an_operation(&mut members, &mut rng);
        let killed = now_ns();
        let victim = (nth % 2) as usize;
        devices.remove(victim).kill();
        // Ranks of the dead device detect it at once, the others when those ranks are gone.
        members.rotate_left(2 * victim);
        for (place, mut member) in members.into_iter().enumerate() {
            let expected: &[&str] = if place < 2 { &["DeviceLost"] } else { &["RankLost", "PathLost"] };
            seen.note(&member.ending(), killed, DEADLINE, expected, &context);
            expect_unchanged(std::slice::from_mut(&mut member), &context);
            member.end();
        }
        devices.iter_mut().for_each(Server::interrupt_and_expect_success);
    }
    println!("kills of a leaf or the root: {seen:?}");
    assert!(seen.mixed > 0, "no kill was in the middle of an operation: {seen:?}");
    cluster.end(Vec::new());
}

#[test]
fn killed_rank_does_not_disturb_another_job_on_its_device() {
    const KILLS: u64 = 4;
    let mut cluster = Cluster::start();
    let device = cluster.device("device");
    let before = DeviceMemory::of(device.pid());
    for nth in 0..KILLS {
        let context = format!("kill {nth}, seed {nth}");
        let mut rng = Rng::new(nth);
        let mut others = cluster.job(2, Memory::Registered, 8, DEADLINE);
        let mut members = cluster.job(2, Memory::Registered, UNLIMITED, DEADLINE);
        wait_within_an_operation(&mut members, &mut rng);
        members.remove(rng.below(2) as usize).kill();
        assert_eq!(members[0].ending().error.as_deref(), Some("RankLost"), "{context}");
        for member in &mut others {
            let ending = member.ending();
            assert_eq!((ending.error.as_deref(), ending.rounds), (None, 8), "{context}: {ending:?}");
        }
        expect_unchanged(&mut members, &context);
        members.into_iter().chain(others).for_each(Member::end);
        before.wait_for(device.pid(), &context);
    }
    cluster.end(vec![device]);
}

#[test]
fn ranks_end_at_their_deadline_if_one_is_stopped() {
    let mut cluster = Cluster::start();
    let device = cluster.device("device");
    let before = DeviceMemory::of(device.pid());
    for (nth, memory) in (0..).zip([Memory::Registered, Memory::Plain, Memory::Packets]) {
        let context = format!("seed {nth}, {memory:?}");
        let mut rng = Rng::new(nth);
        let mut seen = Seen::default();
        let (mut members, deadline) = job_with_short_deadline(&mut cluster, 3, memory, &mut rng);
        let stopped = now_ns();
        let victim = members.remove(rng.below(3) as usize);
        signal(victim.pid(), Signal::STOP);
        for member in &mut members {
            seen.note(&member.ending(), stopped, deadline + RETURN_LIMIT, &["Deadline"], &context);
        }
        let continued = now_ns();
        signal(victim.pid(), Signal::CONT);
        members.push(victim);
        let last = members.last_mut().expect("the victim");
        seen.note(&last.ending(), continued, deadline + RETURN_LIMIT, &["Deadline"], &context);
        cluster.run_successfully(memory, &context);
        expect_unchanged(&mut members, &context);
        members.into_iter().for_each(Member::end);
        before.wait_for(device.pid(), &context);
        println!("{context}: {seen:?}");
    }
    cluster.end(vec![device]);
}

#[test]
fn zero_copy_and_packet_ranks_fail_together_if_one_is_killed() {
    const KILLS: u64 = 10;
    let mut cluster = Cluster::start();
    let device = cluster.device("device");
    let before = DeviceMemory::of(device.pid());
    let mut seen = Seen::default();
    for nth in 0..ATTEMPTS_PER_RUN * KILLS {
        if nth >= KILLS && seen.mixed > 0 {
            break;
        }
        let context = format!("kill {nth}, seed {nth}");
        let mut rng = Rng::new(nth);
        let task = cluster.task(3, Memory::Registered, UNLIMITED, DEADLINE);
        // As with several levels: packets limit the chunks, and the engine needs whole cache lines.
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
        expect_unchanged(&mut members, &context);
        members.into_iter().for_each(Member::end);
        before.wait_for(device.pid(), &context);
    }
    println!("kills of a rank among ranks of other transports: {seen:?}");
    assert!(seen.mixed > 0, "no kill was in the middle of an operation: {seen:?}");
    cluster.run_successfully(Memory::Registered, "at the end");
    cluster.end(vec![device]);
}

#[test]
fn device_stopped_before_a_job_begins_is_not_used() {
    // The controller waits for the device's reply until its limit, and the ranks wait for the controller.
    const JOIN: Duration = Duration::from_secs(40);
    let mut cluster = Cluster::start();
    let device = cluster.device("device");
    let before = DeviceMemory::of(device.pid());
    let stopped = now_ns();
    signal(device.pid(), Signal::STOP);
    let mut members = cluster.job(2, Memory::Registered, UNLIMITED, JOIN);
    let mut seen = Seen::default();
    for member in &mut members {
        seen.note(&member.ending(), stopped, JOIN, &["NotPossible"], "without a device");
    }
    signal(device.pid(), Signal::CONT);
    expect_unchanged(&mut members, "without a device");
    members.into_iter().for_each(Member::end);
    println!("a device that is stopped: {seen:?}");
    cluster.run_successfully(Memory::Registered, "with the device");
    before.wait_for(device.pid(), "at the end");
    cluster.end(vec![device]);
}

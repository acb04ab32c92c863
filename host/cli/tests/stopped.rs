//! A zero-copy device that is stopped in the middle of an operation and continues later. None of its connections close,
//! so only its missing heartbeat reveals the stop. The ranks recover well before their deadline, and the device's
//! pending work reaches no memory when it continues.
//!
//! As in `repaired.rs`, a seeded generator draws the moments, and a failure names its seed.

mod common;
mod members;

use members::{Cluster, DeviceMemory, Ending, Member, Memory, Task, now_ns, run_rank, signal, start};
use rustix::process::{Pid, Signal};
use std::fs;
use std::time::Duration;
use sumac_hal::emu::Rng;

const ROUNDS: u64 = 6;

/// The deadline of a call: far more than a recovery takes.
const LONG_DEADLINE: Duration = Duration::from_secs(60);

/// The limit for detection (5 s of silence), recovery and the other rounds, on a loaded machine.
const RECOVERY_LIMIT: Duration = Duration::from_secs(40);

/// How long a straggler is stopped: longer than a device may be silent.
const AWAY: Duration = Duration::from_secs(7);

#[test]
#[ignore = "a rank of other tests"]
fn rank_process() {
    run_rank();
}

/// Wait until all members begin an operation, and then until a random moment in it.
fn wait_within_an_operation(members: &mut [Member], rng: &mut Rng) {
    let first = members.iter_mut().map(Member::second_round).min().expect("a member");
    // The sleep chooses a random moment; nothing is synchronised by it.
    std::thread::sleep(rng.duration_up_to(first));
}

#[test]
fn job_recovers_from_its_only_device_stopped() {
    for (nth, memory) in (0..).zip([Memory::Registered, Memory::Plain, Memory::Registered]) {
        let context = format!("stop {nth}, seed {nth}, {memory:?}");
        let mut rng = Rng::new(nth);
        let mut cluster = Cluster::start();
        let device = cluster.device("device");
        let before = DeviceMemory::of(device.pid());
        let task = cluster.task(3, memory, ROUNDS, LONG_DEADLINE);
        let mut members = start(&Task { recovery: true, rounds_values: nth == 2, ..task });
        wait_within_an_operation(&mut members, &mut rng);
        let stopped = now_ns();
        signal(device.pid(), Signal::STOP);
        // The first device continues while the ranks work, the others after the ranks' last round.
        if nth == 0 {
            while !members[0].round().repaired {}
            signal(device.pid(), Signal::CONT);
        }
        let endings: Vec<Ending> = members.iter_mut().map(Member::ending).collect();
        for ending in &endings {
            assert_eq!((ending.error.as_deref(), ending.rounds), (None, ROUNDS), "{context}: {ending:?}");
            assert!(!ending.repaired.is_empty(), "{context}: {ending:?}");
            let took = Duration::from_nanos(ending.at_ns.saturating_sub(stopped));
            assert!(took < RECOVERY_LIMIT, "{context}: {took:?}: {ending:?}");
        }
        signal(device.pid(), Signal::CONT);
        // Once the device has served a later job completely, it has finished all earlier work.
        cluster.run_successfully(memory, &context);
        for member in &mut members {
            assert_eq!(member.recheck().changed, 0, "{context}: elements changed after the last round");
        }
        members.into_iter().for_each(Member::end);
        before.wait_for(device.pid(), &context);
        cluster.end(vec![device]);
    }
}

/// Return the processor time that a process has used.
fn cpu_time(process: Pid) -> Duration {
    let stat = fs::read_to_string(format!("/proc/{}/stat", process.as_raw_pid())).expect("it runs");
    // The fields follow the name, which may contain anything: state is the first, user and system time are 12th and
    // 13th.
    let (_, fields) = stat.rsplit_once(')').expect("a name");
    let ticks = fields.split_whitespace().skip(11).take(2).map(|ticks| ticks.parse::<u64>().expect("a number"));
    // 100 ticks per second: the value that Linux shows to user space.
    Duration::from_millis(10 * ticks.sum::<u64>())
}

/// Waiting ranks ring the device, which checks its queues and sleeps again.
#[test]
fn device_stays_alive_and_idle_while_ranks_wait_for_a_straggler() {
    let mut cluster = Cluster::start();
    let device = cluster.device("device");
    let task = cluster.task(2, Memory::Registered, ROUNDS, LONG_DEADLINE);
    let mut members = start(&Task { recovery: true, ..task });
    members.iter_mut().for_each(|member| _ = member.second_round());
    signal(members[1].pid(), Signal::STOP);
    let before = cpu_time(device.pid());
    // The sleep is the time for which the rank is stopped.
    std::thread::sleep(AWAY);
    let used = cpu_time(device.pid()) - before;
    signal(members[1].pid(), Signal::CONT);
    for member in &mut members {
        let ending = member.ending();
        assert_eq!((ending.error.as_deref(), ending.rounds), (None, ROUNDS), "{ending:?}");
        assert!(ending.repaired.is_empty() && ending.by_tree, "{ending:?}");
    }
    assert!(used < AWAY / 50, "{used:?}");
    for member in &mut members {
        assert_eq!(member.recheck().changed, 0);
    }
    members.into_iter().for_each(Member::end);
    cluster.end(vec![device]);
}

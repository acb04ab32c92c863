//! A device by reference that is stopped in the middle of an operation and goes on later: nothing of it hangs up, and
//! nobody else notices, so only its heartbeat tells. The ranks get over it well before their deadline, and what it had in
//! its hands when it was stopped reaches nobody's memory when it goes on.
//!
//! As in `repaired.rs`, moments are drawn by a seeded generator, and a failure names its seed.

mod common;
mod members;

use members::{Cluster, DeviceMemory, Ending, Member, Memory, Task, be_a_rank, now_ns, signal, start};
use rustix::process::{Pid, Signal};
use std::fs;
use std::time::Duration;
use sumac_hal::emu::Rng;

const ROUNDS: u64 = 6;

/// How long a call may take: far more than it takes to get over a stop.
const PATIENT: Duration = Duration::from_secs(60);

/// What a stop may cost: 5 s of silence, the way back and the other rounds, on a machine that does something else first.
const NOTICED: Duration = Duration::from_secs(20);

/// How long a straggler is away: longer than any device may be silent.
const AWAY: Duration = Duration::from_secs(7);

#[test]
#[ignore = "a rank of other tests"]
fn rank_process() {
    be_a_rank();
}

/// Wait until all members begin an operation, and then until a random moment of it.
fn wait_within_an_operation(members: &mut [Member], rng: &mut Rng) {
    let first = members.iter_mut().map(Member::second_round).min().expect("a member");
    // Choosing the moment is all that this is for.
    std::thread::sleep(rng.duration_up_to(first));
}

#[test]
fn the_only_device_of_a_job_is_got_over_when_it_is_stopped() {
    for (nth, memory) in (0..).zip([Memory::Registered, Memory::Plain, Memory::Registered]) {
        let context = format!("stop {nth}, seed {nth}, {memory:?}");
        let mut rng = Rng::new(nth);
        let mut cluster = Cluster::start();
        let device = cluster.device("device");
        let before = DeviceMemory::of(device.pid());
        let task = cluster.task(3, memory, ROUNDS, PATIENT);
        let mut members = start(&Task { repair: true, rounds_values: nth == 2, ..task });
        wait_within_an_operation(&mut members, &mut rng);
        let stopped = now_ns();
        signal(device.pid(), Signal::STOP);
        // One goes on while the ranks do, the others when these have done their last round.
        if nth == 0 {
            while !members[0].round().repaired {}
            signal(device.pid(), Signal::CONT);
        }
        let endings: Vec<Ending> = members.iter_mut().map(Member::ending).collect();
        for ending in &endings {
            assert_eq!((ending.error.as_deref(), ending.rounds), (None, ROUNDS), "{context}: {ending:?}");
            assert!(!ending.repaired.is_empty(), "{context}: {ending:?}");
            let took = Duration::from_nanos(ending.at_ns.saturating_sub(stopped));
            assert!(took < NOTICED, "{context}: {took:?}: {ending:?}");
        }
        signal(device.pid(), Signal::CONT);
        // What the device had in its hands it has finished, when it has served all of a later job.
        cluster.run_well(memory, &context);
        for member in &mut members {
            assert_eq!(member.look_again().changed, 0, "{context}: elements changed after the last round");
        }
        members.into_iter().for_each(Member::end);
        before.wait_for(device.pid(), &context);
        cluster.end(vec![device]);
    }
}

/// Return the processor time that a process has used.
fn cpu_time(process: Pid) -> Duration {
    let stat = fs::read_to_string(format!("/proc/{}/stat", process.as_raw_pid())).expect("it runs");
    // Behind the name, which may hold anything: the state is the first field, user and system time are 12th and 13th.
    let (_, fields) = stat.rsplit_once(')').expect("a name");
    let ticks = fields.split_whitespace().skip(11).take(2).map(|ticks| ticks.parse::<u64>().expect("a number"));
    // 100 a second, on every Linux that user space sees.
    Duration::from_millis(10 * ticks.sum::<u64>())
}

/// Who waits for it rings the device, which turns, and sleeps on.
#[test]
fn a_device_that_sleeps_while_ranks_wait_for_a_straggler_is_alive_and_idle() {
    let mut cluster = Cluster::start();
    let device = cluster.device("device");
    let task = cluster.task(2, Memory::Registered, ROUNDS, PATIENT);
    let mut members = start(&Task { repair: true, ..task });
    members.iter_mut().for_each(|member| _ = member.second_round());
    signal(members[1].pid(), Signal::STOP);
    let before = cpu_time(device.pid());
    // How long it is away is chosen here.
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
        assert_eq!(member.look_again().changed, 0);
    }
    members.into_iter().for_each(Member::end);
    cluster.end(vec![device]);
}

//! A rank whose process is stopped in the middle of an operation and continues later, as under a debugger or a job
//! scheduler. The others wait for it, also to leave, and no result is wrong or lost.

mod common;

use common::{Server, serve};
use rustix::process::{
    Pid, Signal, WaitId, WaitIdOptions, getpid, getppid, kill_process, set_parent_process_death_signal, waitid,
};
use serde::{Deserialize, Serialize};
use std::io::{BufRead, BufReader, Write};
use std::net::SocketAddr;
use std::process::{Child, Command, Stdio};
use std::sync::mpsc::{Receiver, RecvTimeoutError, channel};
use std::time::Duration;
use sumac::controller::proto::Transport;
use sumac::{Algo, Communicator, JoinConfig, ReduceOp};

const RANKS: u32 = 3;

/// The rank that is stopped.
const STOPPED: usize = 1;

/// Long enough for a loaded machine; a passing test never waits for it.
const LONG: Duration = Duration::from_secs(60);

/// How long a rank is stopped: longer than a hop may be silent.
const AWAY: Duration = Duration::from_secs(7);

/// How long the test checks that ranks do not leave yet.
const WATCHED: Duration = Duration::from_secs(1);

/// The number of elements of a broadcast: more than a rank has room for before it reads, and less than its peer's
/// socket holds.
const BROADCAST_LEN: usize = 1 << 17;

/// The variable that holds a rank's task.
const TASK: &str = "SUMAC_TEST_SUSPENDED";

#[derive(Debug, Clone, Serialize, Deserialize)]
struct Task {
    controller: SocketAddr,
    rank: u32,
    by_packets: bool,
    work: Work,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
enum Work {
    /// Run many all-reduces, and print a line before each.
    Rounds(u64),
    /// Run one all-reduce. One rank stops itself after it has contributed; the others contribute only after a line on
    /// stdin.
    StopBeforeTheResult,
    /// Broadcast among the ranks, without a tree; over TCP if by packets, else in shared memory. One rank is stopped
    /// while it waits for the root, which sends only after a line on stdin.
    StopInBroadcast,
}

#[test]
#[ignore = "a rank of other tests"]
fn rank_process() {
    let task = std::env::var(TASK).expect("started by a test");
    let (parent, task): (i32, Task) = serde_json::from_str(&task).expect("a task");
    // It is killed with the test, even if the test cannot do so itself.
    set_parent_process_death_signal(Some(Signal::KILL)).expect("any process may");
    if getppid().map(Pid::as_raw_pid) == Some(parent) {
        work(&task);
    }
}

fn value(rank: u32, round: u64, element: usize) -> u64 {
    (u64::from(rank) + 1).wrapping_mul(1_000_003).wrapping_add(round * 7919 + element as u64 * 31)
}

fn check(values: &[u64], round: u64) {
    let sum = |element| (0..RANKS).fold(0, |sum: u64, rank| sum.wrapping_add(value(rank, round, element)));
    let wrong = (0..values.len()).find(|&element| values[element] != sum(element));
    assert_eq!(wrong, None, "an element of round {round} is wrong");
}

fn work(task: &Task) {
    let config = JoinConfig {
        transport: if task.by_packets { Transport::Udp } else { Transport::Shm },
        algo: if task.work == Work::StopInBroadcast { Algo::Binomial } else { Algo::Auto },
        deadline: LONG,
        ..JoinConfig::new(task.controller, "suspended", task.rank, RANKS)
    };
    let comm = Communicator::join(config).expect("join");
    let input = |len, round| (0..len).map(|element| value(task.rank, round, element)).collect::<Vec<_>>();
    match task.work {
        Work::Rounds(rounds) => {
            for round in 0..rounds {
                println!("=round");
                let mut values = input(1 << 17, round);
                comm.all_reduce(&mut values, ReduceOp::Sum).expect("a sum");
                check(&values, round);
            }
        }
        Work::StopBeforeTheResult => {
            comm.barrier().expect("all are there");
            if task.rank as usize != STOPPED {
                std::io::stdin().read_line(&mut String::new()).expect("the line on which to continue");
            }
            let handle = comm.start_all_reduce(input(256, 0), ReduceOp::Sum).expect("room");
            if task.rank as usize == STOPPED {
                kill_process(getpid(), Signal::STOP).expect("it is ours");
            }
            check(&handle.wait().expect("a sum").0, 0);
        }
        Work::StopInBroadcast => {
            comm.all_reduce(&mut [0_u64], ReduceOp::Sum).expect("all are there");
            let mut values = if task.rank == 0 { input(BROADCAST_LEN, 0) } else { vec![0; BROADCAST_LEN] };
            if task.rank == 0 {
                std::io::stdin().read_line(&mut String::new()).expect("the line on which to continue");
            }
            if task.rank as usize == STOPPED {
                std::thread::spawn(|| {
                    // The time in which this rank tells the root that it waits.
                    std::thread::sleep(Duration::from_millis(200));
                    kill_process(getpid(), Signal::STOP)
                });
            }
            comm.broadcast(&mut values, 0).expect("the values of rank 0");
            assert!((0..BROADCAST_LEN).all(|element| values[element] == value(0, 0, element)), "a value is wrong");
        }
    }
    println!("=done");
    println!("={:?}", comm.leave_within(LONG));
}

/// A running rank. Dropping it kills the process.
struct Member {
    process: Child,
    lines: Receiver<String>,
}

impl Member {
    fn start(task: &Task) -> Self {
        let mut process = Command::new(std::env::current_exe().expect("the test program"))
            .args(["--quiet", "--exact", "--ignored", "--nocapture", "--test-threads=1", "rank_process"])
            .env(TASK, serde_json::to_string(&(std::process::id(), task)).expect("plain values"))
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()
            .expect("a process");
        let from = BufReader::new(process.stdout.take().expect("piped"));
        let (to, lines) = channel();
        // The thread ends with the rank.
        std::thread::spawn(move || {
            let lines = from.lines().map_while(Result::ok);
            // The test harness has written the beginning of the line.
            lines.filter_map(|line| Some(line.split_once('=')?.1.to_owned())).try_for_each(|line| to.send(line))
        });
        Self { process, lines }
    }

    fn signal(&self, signal: Signal) {
        kill_process(Pid::from_child(&self.process), signal).expect("it is ours");
    }

    /// Wait until it is stopped.
    fn until_stopped(&self) {
        waitid(WaitId::Pid(Pid::from_child(&self.process)), WaitIdOptions::STOPPED).expect("a child").expect("stopped");
    }

    fn go_on(&self) {
        self.process.stdin.as_ref().expect("piped").write_all(b"\n").expect("it reads");
    }

    fn expect(&self, expected: &str) {
        assert_eq!(self.lines.recv_timeout(LONG).as_deref(), Ok(expected));
    }

    fn end(mut self) {
        self.expect("done");
        self.expect("Clean");
        assert!(self.process.wait().expect("it is ours").success());
    }
}

impl Drop for Member {
    fn drop(&mut self) {
        // Fails if it has ended.
        let _ = self.process.kill();
        let _ = self.process.wait();
    }
}

/// Start a controller.
fn start_controller() -> (Server, SocketAddr) {
    let mut controller = serve(&["controller", "--listen", "127.0.0.1:0", "--prefer-tree"]);
    let line = controller.line();
    let addr = line.strip_prefix("listening ").and_then(|addr| addr.parse().ok()).expect("an address");
    (controller, addr)
}

/// Start a controller, a device and the ranks.
fn start(by_packets: bool, work: Work) -> (Server, Server, Vec<Member>) {
    let (controller, addr) = start_controller();
    let mut device = serve(&["device", "--name", "device", "--controller", &addr.to_string()]);
    assert_eq!(device.line(), "ready device");
    (controller, device, start_members(addr, by_packets, work))
}

fn start_members(controller: SocketAddr, by_packets: bool, work: Work) -> Vec<Member> {
    (0..RANKS).map(|rank| Member::start(&Task { controller, rank, by_packets, work })).collect()
}

#[test]
fn rank_stopped_in_an_operation_completes_it_after_it_continues() {
    const ROUNDS: u64 = 6;
    for by_packets in [true, false] {
        let (_controller, _device, members) = start(by_packets, Work::Rounds(ROUNDS));
        for round in 0..ROUNDS {
            members.iter().for_each(|member| member.expect("round"));
            if round == 2 {
                members[STOPPED].signal(Signal::STOP);
                // The sleep is the time for which the rank is stopped.
                std::thread::sleep(AWAY);
                members[STOPPED].signal(Signal::CONT);
            }
        }
        members.into_iter().for_each(Member::end);
    }
}

/// The other ranks have the last result and stay until the stopped rank has it, too, even if the device dies meanwhile.
#[test]
fn leaving_ranks_wait_for_a_stopped_rank() {
    for (by_packets, dies) in [(true, false), (false, false), (true, true), (false, true)] {
        let (_controller, device, members) = start(by_packets, Work::StopBeforeTheResult);
        members[STOPPED].until_stopped();
        let others = || members.iter().enumerate().filter(|(nth, _)| *nth != STOPPED).map(|(_, member)| member);
        others().for_each(Member::go_on);
        others().for_each(|member| member.expect("done"));
        let _device = if dies {
            device.kill();
            None
        } else {
            Some(device)
        };
        for member in others() {
            let left = member.lines.recv_timeout(WATCHED);
            assert_eq!(left, Err(RecvTimeoutError::Timeout), "by packets: {by_packets}, device dies: {dies}");
        }
        members[STOPPED].signal(Signal::CONT);
        members[STOPPED].expect("done");
        for member in &members {
            let left = member.lines.recv_timeout(LONG);
            assert_eq!(left.as_deref(), Ok("Clean"), "by packets: {by_packets}, device dies: {dies}");
        }
    }
}

/// It has received a part, and the root has returned from the broadcast: the rest is in the root's socket.
#[test]
fn leaving_root_waits_until_a_stopped_rank_has_received_its_broadcast() {
    let (_controller, addr) = start_controller();
    let members = start_members(addr, true, Work::StopInBroadcast);
    members[STOPPED].until_stopped();
    members[0].go_on();
    members[0].expect("done");
    assert_eq!(members[0].lines.recv_timeout(WATCHED), Err(RecvTimeoutError::Timeout));
    members[STOPPED].signal(Signal::CONT);
    assert_eq!(members[0].lines.recv_timeout(LONG).as_deref(), Ok("Clean"));
    members.into_iter().skip(1).for_each(Member::end);
}

/// In shared memory a rank copies a long payload out of the root's memory, which therefore stays in the broadcast.
#[test]
fn root_of_a_broadcast_waits_until_a_stopped_rank_has_copied_it() {
    let (_controller, addr) = start_controller();
    let members = start_members(addr, false, Work::StopInBroadcast);
    members[STOPPED].until_stopped();
    members[0].go_on();
    assert_eq!(members[0].lines.recv_timeout(WATCHED), Err(RecvTimeoutError::Timeout));
    members[STOPPED].signal(Signal::CONT);
    members.into_iter().for_each(Member::end);
}

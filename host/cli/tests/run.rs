//! `sumac run`: a program as ranks on this machine. Whatever ends it, no process is left.

mod common;

use common::{exit_status, processes_with, stderr, stdout};
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::process::{Pid, Signal, kill_process};
use std::collections::BTreeSet;
use std::io::{BufRead, BufReader, Read};
use std::process::{Child, ChildStdout, Command, Output, Stdio};
use std::thread;
use std::time::{Duration, Instant};

/// The variable by which a test finds all processes that it has started.
const MARK: &str = "SUMAC_TEST_RUN";

/// A run, and the mark of its processes.
struct Run {
    process: Child,
    stdout: BufReader<ChildStdout>,
    mark: String,
}

impl Run {
    /// Run a script as `ranks` ranks.
    fn start(test: &str, options: &[&str], script: &str) -> Self {
        let mark = format!("{test}-{}", std::process::id());
        let mut command = Command::new(env!("CARGO_BIN_EXE_sumac"));
        command.arg("run").args(options).args(["--", "sh", "-c", script]).env(MARK, &mark);
        command.env_remove("SUMAC_JOB").stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::piped());
        let mut process = command.spawn().expect("started");
        let stdout = BufReader::new(process.stdout.take().expect("piped"));
        Self { process, stdout, mark }
    }

    /// Wait for a line of each rank.
    fn lines(&mut self, count: usize) -> BTreeSet<String> {
        let lines = self.stdout.by_ref().lines().take(count);
        lines.map(|line| line.expect("a line")).collect()
    }

    fn signal(&self, signal: Signal) {
        kill_process(Pid::from_child(&self.process), signal).expect("running");
    }

    /// Wait for the end of the command, and for that of all processes that began in it.
    fn end(mut self) -> Output {
        let mut stdout = Vec::new();
        self.stdout.read_to_end(&mut stdout).expect("read");
        let mut output = self.process.wait_with_output().expect("ended");
        output.stdout = stdout;
        output
    }

    /// Return the output, and assert that no process is left at the end of the command.
    fn end_alone(self) -> Output {
        let mark = self.mark.clone();
        let output = self.end();
        let left: Vec<_> = processes_with(MARK, &mark).into_iter().map(|process| process.command).collect();
        assert!(left.is_empty(), "{left:?}");
        output
    }
}

/// Wait until all processes with this mark have ended.
fn wait_none_left(mark: &str) {
    let limit = Timespec { tv_sec: 30, tv_nsec: 0 };
    for process in processes_with(MARK, mark) {
        let ended = poll(&mut [PollFd::new(&process.ended, PollFlags::IN)], Some(&limit)).expect("polled");
        assert_eq!(ended, 1, "process {} is left: {}", process.pid.as_raw_pid(), process.command);
    }
}

#[test]
fn each_rank_finds_its_place_in_the_environment_and_its_lines_are_passed_on() {
    let script = "echo $SUMAC_RANK/$SUMAC_WORLD $SUMAC_LOCAL_RANK $RANK/$WORLD_SIZE $SUMAC_HOST $SUMAC_SUPERVISOR; \
                  printf end >&2";
    let output = Run::start("place", &["-n", "3", "--devices", "2"], script).end_alone();
    assert_eq!(exit_status(&output), 0, "{}", stderr(&output));
    let lines: BTreeSet<_> = stdout(&output).lines().map(str::to_owned).collect();
    let expected = (0..3).map(|rank| format!("{rank}/3 {rank} {rank}/3 h{rank}"));
    assert_eq!(lines, expected.collect());
    assert_eq!(stderr(&output).matches("end").count(), 3);
    let output = Run::start("label", &["-n", "2", "--label"], "echo a; echo b; printf c").end_alone();
    let mut lines: Vec<_> = stdout(&output).replace('c', "c\n").lines().map(str::to_owned).collect();
    lines.sort();
    assert_eq!(lines, ["0: a", "0: b", "0: c", "1: a", "1: b", "1: c"]);
}

#[test]
fn ranks_are_a_job_that_from_env_describes() {
    let doctor = format!("exec {} doctor --env", env!("CARGO_BIN_EXE_sumac"));
    let mut run = Run::start("job", &["-n", "2"], &doctor);
    let pid = run.process.id();
    let text = run.stdout.by_ref().lines().map(|line| line.expect("a line")).collect::<Vec<_>>().join("\n");
    for rank in ["0", "1"] {
        assert!(text.contains(&format!("rank {rank} of 2, local rank {rank}, job run-{pid}, by SUMAC_*")), "{text}");
    }
    assert_eq!(exit_status(&run.end_alone()), 0);
}

#[test]
fn failed_rank_is_named_and_the_others_are_ended() {
    // The others wait for ever, with a child of their own each.
    let script = "if [ $SUMAC_RANK = 2 ]; then exit 7; fi; sleep 1000 & sleep 1000";
    let output = Run::start("failed", &["-n", "4"], script).end_alone();
    assert_eq!(exit_status(&output), 1);
    let error = stderr(&output);
    assert!(error.contains("error: rank 2 failed (exit status: 7); the other ranks were ended"), "{error}");
    let output = Run::start("signalled", &["-n", "2"], "[ $SUMAC_RANK = 0 ] || kill -SEGV $$; sleep 1000").end_alone();
    assert!(stderr(&output).contains("rank 1 failed (signal: 11"), "{}", stderr(&output));
    assert_eq!(exit_status(&output), 1);
}

#[test]
fn interrupted_run_ends_all_ranks_and_what_they_started() {
    // One rank cleans up when it is asked to end; one ignores the request.
    let script = "if [ $SUMAC_RANK = 0 ]; then trap 'echo cleaned; exit' TERM; else trap '' TERM; fi; \
                  sleep 1000 & echo started; wait; sleep 1000";
    for (signal, status) in [(Signal::INT, 130), (Signal::TERM, 143)] {
        let mut run = Run::start(&format!("interrupted-{status}"), &["-n", "2"], script);
        assert_eq!(run.lines(1).len() + run.lines(1).len(), 2);
        run.signal(signal);
        let output = run.end_alone();
        assert_eq!((exit_status(&output), stdout(&output).as_str()), (status, "cleaned\n"), "{}", stderr(&output));
    }
}

#[test]
fn killed_run_leaves_nothing_behind() {
    let mut run = Run::start("killed", &["-n", "2"], "sleep 1000 & echo started; wait");
    assert_eq!(run.lines(2).len(), 1);
    let mark = run.mark.clone();
    // The command, controller, device, guard, and two shells with a child each. While a child executes its program, the
    // kernel shows no environment.
    let deadline = Instant::now() + Duration::from_secs(30);
    while processes_with(MARK, &mark).len() != 8 {
        assert!(Instant::now() < deadline, "{} processes", processes_with(MARK, &mark).len());
        thread::yield_now();
    }
    run.signal(Signal::KILL);
    run.process.wait().expect("ended");
    wait_none_left(&mark);
}

#[test]
fn daemon_of_a_rank_ends_with_the_run() {
    // The rank fails once its daemon, which is in a session of its own, has begun.
    let script = "if [ $SUMAC_RANK = 1 ]; then sleep 1000; fi; fifo=$(mktemp -u); mkfifo $fifo; \
                  setsid sh -c 'echo up >$0; exec sleep 1000 >/dev/null 2>&1' $fifo & read up <$fifo; rm $fifo; exit 1";
    let output = Run::start("daemon", &["-n", "2"], script).end_alone();
    assert_eq!(exit_status(&output), 1, "{}", stderr(&output));
}

#[test]
fn dead_controller_ends_the_run() {
    let mut run = Run::start("controller", &["-n", "2"], "echo started; sleep 1000");
    run.lines(2);
    let all = processes_with(MARK, &run.mark);
    let controller = all.iter().find(|process| process.command.contains("controller")).expect("one");
    kill_process(controller.pid, Signal::KILL).expect("running");
    let output = run.end_alone();
    assert_eq!(exit_status(&output), 1);
    assert!(stderr(&output).contains("the controller ended early"), "{}", stderr(&output));
}

/// As programs are named to mpirun and torchrun.
#[test]
fn program_and_its_options_need_no_dashes_before_them() {
    let output = common::sumac(&["run", "-n", "2", "sh", "-c", "echo $RANK $0", "--label"]);
    assert_eq!(exit_status(&output), 0, "{}", stderr(&output));
    let lines: BTreeSet<String> = String::from_utf8_lossy(&output.stdout).lines().map(str::to_owned).collect();
    assert_eq!(lines, BTreeSet::from(["0 --label".to_owned(), "1 --label".to_owned()]));
}

#[test]
fn invalid_program_or_usage_is_refused_before_anything_starts() {
    for (args, why) in [
        (&["run", "-n", "2", "--", "no-such-program"][..], "cannot find no-such-program in PATH"),
        (&["run", "-n", "2", "--", "/no/such/program"], "cannot run /no/such/program: No such file"),
        (&["run", "-n", "2"], "<PROGRAM>"),
        (&["run", "-n", "2", "--devces", "1", "true"], "--devices"),
        (&["run", "-n", "0", "--", "true"], "0 is not in 1..=1024"),
        (&["run", "-n", "2", "--devices", "3", "--", "true"], "3 is not in 1..=2"),
    ] {
        let output = common::sumac(args);
        assert_eq!(exit_status(&output), 2, "{args:?}: {}", stderr(&output));
        assert!(stderr(&output).contains(why), "{args:?}: {}", stderr(&output));
    }
}

//! Isolation between users of one machine: other jobs' results, memory, and devices' functions.

use crate::controller::request;
use crate::shm::socket_of;
use crate::testbed::{JobConfig, LONG, NOBODY, Process, TestBed, Tools, is_secret, wait_until};
use crate::traffic::Random;
use rustix::process::{Gid, Uid};
use rustix::thread::{set_thread_groups, set_thread_res_gid, set_thread_res_uid};
use std::fs::{self, File};
use std::net::SocketAddr;
use std::os::unix::fs::FileExt;
use std::time::Duration;
use sumac::Transport;
use sumac::controller::Session;
use sumac::controller::proto::{JoinRequest, TreeMembership};
use sumac_hal::ids::ChildIndex;
use sumac_hal::shm::{Connection, Message, machine};

const OVER_SHM: JobConfig = JobConfig { transport: Transport::Shm, schedules: false };

/// Become another user permanently; call this before starting threads.
pub(crate) fn set(user: u32) -> Result<(), String> {
    let (uid, gid) = (Uid::from_raw(user), Gid::from_raw(user));
    let set = set_thread_groups(&[]).and_then(|()| set_thread_res_gid(gid, gid, gid));
    set.and_then(|()| set_thread_res_uid(uid, uid, uid)).map_err(|error| format!("become user {user}: {error}"))
}

/// Run this program as another user, as a spy.
fn run_spy(testbed: &TestBed<'_>, arguments: &[&str]) -> Vec<String> {
    let own = testbed.tools.own.to_str().expect("UTF-8");
    let command: Vec<&str> = [own, "--spy"].iter().chain(arguments).copied().collect();
    let mut spy = Process::start(testbed.tools, "spy", &command, Some(NOBODY));
    spy.end_input();
    let lines: Vec<String> = std::iter::from_fn(|| Some(spy.line()).filter(|line| !line.is_empty())).collect();
    assert_eq!(spy.status_within(LONG), Some(0), "the spy failed: {lines:?}");
    lines
}

/// The spy: prints each finding on a line.
pub(crate) fn spy(args: &[String]) -> Result<(), String> {
    let arguments: Vec<&str> = args.iter().map(String::as_str).collect();
    match &arguments[..] {
        ["redo", controller] => redo(controller),
        ["files", pids @ ..] => {
            pids.iter().for_each(|pid| open_all(pid));
            Ok(())
        }
        ["attach", socket, group, child] => attach_as(socket, group, child),
        _ => Err(format!("unknown arguments {arguments:?}")),
    }
}

/// Join a zero-copy job, as any tenant may, and read all memory that it is given.
fn redo(controller: &str) -> Result<(), String> {
    let addr: SocketAddr = controller.parse().map_err(|error| format!("{controller}: {error}"))?;
    let request = JoinRequest { transport: Transport::Shm, machine: machine(), ..request("spy", (0, 1), "spy") };
    let joined = Session::join(addr, request, LONG, |_| None).map_err(|error| error.to_string())?;
    let (_session, membership) = joined;
    let tree: TreeMembership = membership.tree?;
    let socket = tree.attach.as_ref().ok_or("the tree is not by reference")?.socket.as_str().to_owned();
    let hello = Message::Attach { group: tree.group, child: tree.child, key: tree.key };
    let connection = Connection::open(&socket, LONG).map_err(|error| error.to_string())?;
    connection.send(&hello, None).map_err(|error| error.to_string())?;
    // Until the device's broker has handed over everything and is silent.
    let (mut handed, mut searched, mut found) = (0, 0, 0);
    while let Ok(received) = connection.receive(Duration::from_millis(500)) {
        if let Message::Refused { reason } = received.message {
            return Err(format!("refused: {reason:?}"));
        }
        let Some(file) = received.file.map(File::from) else { continue };
        handed += 1;
        let len = file.metadata().map_or(0, |meta| meta.len());
        let mut page = vec![0; 1 << 16];
        for at in (0..len).step_by(page.len()) {
            // Event descriptors cannot be read with `pread`.
            let Ok(read) = file.read_at(&mut page, at) else { break };
            searched += read;
            let words = page[..read].chunks_exact(8).map(|word| u64::from_le_bytes(word.try_into().expect("8 bytes")));
            found += words.filter(|word| is_secret(*word)).count();
        }
    }
    println!("handed {handed}");
    println!("searched {searched}");
    println!("found {found}");
    Ok(())
}

/// Try to open all files and memory of a process for reading.
fn open_all(pid: &str) {
    let folders = ["fd", "map_files", "task"].map(|folder| format!("/proc/{pid}/{folder}"));
    let inside = folders.iter().filter_map(|folder| fs::read_dir(folder).ok()).flatten().flatten();
    let paths = inside.map(|entry| entry.path()).chain([format!("/proc/{pid}/mem").into()]);
    let named = fs::read_dir("/dev/shm").into_iter().flatten().flatten().map(|entry| entry.path());
    let named = named.filter(|path| path.to_string_lossy().contains("sumac"));
    for path in paths.chain(named).filter(|path| !path.is_dir()) {
        if File::open(&path).is_ok() {
            println!("opened {}", path.display());
        }
    }
}

/// Request the function of a rank in another user's job.
fn attach_as(socket: &str, group: &str, child: &str) -> Result<(), String> {
    let number = |text: &str| text.parse::<u32>().map_err(|error| format!("{text}: {error}"));
    let (group, child, mut random) = (number(group)?, number(child)?, Random(8));
    for key in [0, u64::MAX, random.next()] {
        let hello = Message::Attach { group: sumac_hal::ids::GroupId(group), child: ChildIndex(child as u16), key };
        let Ok(connection) = Connection::open(socket, LONG) else {
            println!("no connection");
            continue;
        };
        let answer = connection.send(&hello, None).and_then(|()| connection.receive(LONG));
        match answer {
            Ok(received) if received.file.is_some() => println!("handed {:?}", received.message),
            Ok(received) => println!("answered {:?}", received.message),
            Err(error) => println!("hung up on: {error}"),
        }
    }
    Ok(())
}

/// A tenant of another user on the same device sees no results of the job, neither while it runs nor after its end.
pub(crate) fn redo_memory(tools: &Tools) {
    let mut testbed = TestBed::start(tools).with_job(OVER_SHM);
    let addr = testbed.addr.to_string();
    let look = |testbed: &TestBed<'_>, when: &str| {
        let lines = run_spy(testbed, &["redo", &addr]);
        let number = |name: &str| {
            let line = lines.iter().find_map(|line| line.strip_prefix(name));
            line.and_then(|number| number.trim().parse::<u64>().ok()).unwrap_or_else(|| panic!("{name}: {lines:?}"))
        };
        assert!(number("handed") >= 1, "a rank is handed its function");
        assert_eq!(number("found"), 0, "{when}: results of another job among {} bytes", number("searched"));
    };
    testbed.wait_for_rounds(50);
    look(&testbed, "beside the job");
    crate::testbed::finish(&mut testbed.ranks);
    testbed.ranks.clear();
    wait_until("the job's group is removed", || testbed.groups() == 0);
    look(&testbed, "after the job");
    testbed.check_alive();
}

pub(crate) fn files(tools: &Tools) {
    let mut testbed = TestBed::start(tools).with_job(OVER_SHM);
    let before = testbed.count();
    let all = testbed.devices.iter().chain(&testbed.ranks).chain([&testbed.controller]);
    let pids: Vec<String> = all.map(|process| process.pid().as_raw_nonzero().to_string()).collect();
    let arguments: Vec<&str> = ["files"].into_iter().chain(pids.iter().map(String::as_str)).collect();
    let opened = run_spy(&testbed, &arguments);
    assert!(opened.is_empty(), "another user has opened {} files, the first {}", opened.len(), opened[0]);
    testbed.check_unaffected(&before);
}

pub(crate) fn stolen_function(tools: &Tools) {
    let mut testbed = TestBed::start(tools).with_job(OVER_SHM);
    let (before, socket) = (testbed.count(), socket_of(&testbed));
    let group = crate::data::victim(&testbed).0.to_string();
    for child in ["0", "1", "2", "3"] {
        let lines = run_spy(&testbed, &["attach", &socket, &group, child]);
        assert_eq!(lines.len(), 3);
        assert!(lines.iter().all(|line| !line.starts_with("handed")), "{lines:?}");
    }
    testbed.check_unaffected(&before);
}

/// Ranks of root use packets with a device of another user, because zero-copy would map their memory into it.
pub(crate) fn foreign_device(tools: &Tools) {
    let mut testbed = TestBed::without_devices(tools);
    testbed.add_device("one", Some(NOBODY));
    let mut testbed = testbed.with_job(JobConfig { transport: Transport::Auto, schedules: false });
    let device = testbed.devices[0].pid().as_raw_nonzero();
    let tree = testbed.job_status("work").and_then(|job| job.tree?.ok()).expect("the job has a tree");
    let user = fs::metadata(format!("/proc/{device}")).map(|meta| std::os::unix::fs::MetadataExt::uid(&meta));
    assert_eq!(user.expect("it runs"), NOBODY);
    // Check the device's mappings, not the controller's record.
    let maps = fs::read_to_string(format!("/proc/{device}/maps")).expect("the superuser may");
    let before = testbed.count();
    let mut of_ranks = Vec::new();
    for rank in &testbed.ranks {
        let theirs = fs::read_to_string(format!("/proc/{}/maps", rank.pid().as_raw_nonzero())).expect("it runs");
        // Shared memory, by device and inode.
        let shared = theirs.lines().filter(|line| line.contains("memfd:"));
        of_ranks.extend(shared.filter_map(|line| line.split_whitespace().nth(4)).map(str::to_owned));
    }
    let shared = maps.lines().filter(|line| line.contains("memfd:"));
    let shared =
        shared.filter(|line| line.split_whitespace().nth(4).is_some_and(|inode| of_ranks.iter().any(|of| of == inode)));
    assert_eq!(
        shared.count(),
        0,
        "device and ranks of the superuser share memory; {} ranks over zero-copy",
        tree.zero_copy_ranks
    );
    testbed.check_unaffected(&before);
}

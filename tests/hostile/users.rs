//! What another user of the machine reaches: other jobs' results, memory, functions of devices.

use crate::bus::socket_of;
use crate::controller::request;
use crate::place::{LONG, NOBODY, Place, Process, Tools, Way, is_secret, wait_until};
use crate::strangers::Random;
use rustix::process::{Gid, Uid};
use rustix::thread::{set_thread_groups, set_thread_res_gid, set_thread_res_uid};
use std::fs::{self, File};
use std::os::unix::fs::FileExt;
use std::time::Duration;
use sumac::Attach;
use sumac::controller::Session;
use sumac::controller::proto::{JoinRequest, TreeMembership};
use sumac_hal::ids::ChildIndex;
use sumac_hal::shm::{Connection, Message, machine};

const BY_REFERENCE: Way = Way { attach: Attach::Shm, schedules: false };

/// Become another user, for good; before there are other threads.
pub(crate) fn set(user: u32) -> Result<(), String> {
    let (uid, gid) = (Uid::from_raw(user), Gid::from_raw(user));
    let set = set_thread_groups(&[]).and_then(|()| set_thread_res_gid(gid, gid, gid));
    set.and_then(|()| set_thread_res_uid(uid, uid, uid)).map_err(|error| format!("become user {user}: {error}"))
}

/// Start this program as another user, to look for what it can.
fn spy_on(place: &Place<'_>, words: &[&str]) -> Vec<String> {
    let own = place.tools.own.to_str().expect("UTF-8");
    let command: Vec<&str> = [own, "--spy"].iter().chain(words).copied().collect();
    let mut spy = Process::start(place.tools, "spy", &command, Some(NOBODY));
    spy.end_input();
    let lines: Vec<String> = std::iter::from_fn(|| Some(spy.line()).filter(|line| !line.is_empty())).collect();
    assert_eq!(spy.status_within(LONG), Some(0), "the spy failed: {lines:?}");
    lines
}

/// What the spy does; it says what it has found, a line each.
pub(crate) fn spy(args: &[String]) -> Result<(), String> {
    let words: Vec<&str> = args.iter().map(String::as_str).collect();
    match &words[..] {
        ["redo", controller] => redo(controller),
        ["files", pids @ ..] => {
            pids.iter().for_each(|pid| open_all(pid));
            Ok(())
        }
        ["seat", socket, group, child] => seat(socket, group, child),
        _ => Err(format!("{words:?}")),
    }
}

/// Join a job of one's own by reference, as any tenant may, and read all that comes with it.
fn redo(controller: &str) -> Result<(), String> {
    let addr = controller.parse().map_err(|error| format!("{controller}: {error}"))?;
    let request = JoinRequest { attach: Attach::Shm, machine: machine(), ..request("spy", (0, 1), "spy") };
    let joined = Session::join(addr, request, LONG, |_| None).map_err(|error| error.to_string())?;
    let (_session, membership) = joined;
    let tree: TreeMembership = membership.tree?;
    let socket = tree.bus.as_ref().ok_or("the tree is not by reference")?.socket.as_str().to_owned();
    let hello = Message::Attach { group: tree.group, child: tree.child, key: tree.key };
    let connection = Connection::open(&socket, LONG).map_err(|error| error.to_string())?;
    connection.send(&hello, None).map_err(|error| error.to_string())?;
    // Nothing more comes when all is handed over.
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
            // Events can't be read so.
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

/// Open whatever a process has, for reading.
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

/// Ask for the function of a rank of another's job.
fn seat(socket: &str, group: &str, child: &str) -> Result<(), String> {
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

/// A second tenant, another user, on the same device: of the first one's results it sees none, whether its job runs or has
/// ended.
pub(crate) fn redo_memory(tools: &Tools) {
    let mut place = Place::start(tools).with_job(BY_REFERENCE);
    let addr = place.addr.to_string();
    let look = |place: &Place<'_>, when: &str| {
        let lines = spy_on(place, &["redo", &addr]);
        let number = |name: &str| {
            let line = lines.iter().find_map(|line| line.strip_prefix(name));
            line.and_then(|number| number.trim().parse::<u64>().ok()).unwrap_or_else(|| panic!("{name}: {lines:?}"))
        };
        assert!(number("handed") >= 1, "a rank is handed its function");
        assert_eq!(number("found"), 0, "{when}: results of another job among {} bytes", number("searched"));
    };
    place.wait_for_rounds(50);
    look(&place, "beside the job");
    crate::place::finish(&mut place.ranks);
    place.ranks.clear();
    wait_until("the job's group stays", || place.groups() == 0);
    look(&place, "after the job");
    place.check_alive();
}

pub(crate) fn files(tools: &Tools) {
    let mut place = Place::start(tools).with_job(BY_REFERENCE);
    let before = place.count();
    let all = place.devices.iter().chain(&place.ranks).chain([&place.controller]);
    let pids: Vec<String> = all.map(|process| process.pid().as_raw_nonzero().to_string()).collect();
    let words: Vec<&str> = ["files"].into_iter().chain(pids.iter().map(String::as_str)).collect();
    let opened = spy_on(&place, &words);
    assert!(opened.is_empty(), "another user has opened {} files, the first {}", opened.len(), opened[0]);
    place.check_unhurt(&before);
}

pub(crate) fn stolen_seat(tools: &Tools) {
    let mut place = Place::start(tools).with_job(BY_REFERENCE);
    let (before, socket) = (place.count(), socket_of(&place));
    let group = crate::data::victim(&place).0.to_string();
    for child in ["0", "1", "2", "3"] {
        let lines = spy_on(&place, &["seat", &socket, &group, child]);
        assert_eq!(lines.len(), 3);
        assert!(lines.iter().all(|line| !line.starts_with("handed")), "{lines:?}");
    }
    place.check_unhurt(&before);
}

/// Ranks of the superuser use a device of another user by packets: by reference it would map their memory.
pub(crate) fn foreign_device(tools: &Tools) {
    let mut place = Place::without_devices(tools);
    place.add_device("one", Some(NOBODY));
    let mut place = place.with_job(Way { attach: Attach::Auto, schedules: false });
    let device = place.devices[0].pid().as_raw_nonzero();
    let tree = place.job_status("work").and_then(|job| job.tree?.ok()).expect("the job has a tree");
    let user = fs::metadata(format!("/proc/{device}")).map(|meta| std::os::unix::fs::MetadataExt::uid(&meta));
    assert_eq!(user.expect("it runs"), NOBODY);
    // Whatever the controller has on its books: which memory the device has is what counts.
    let maps = fs::read_to_string(format!("/proc/{device}/maps")).expect("the superuser may");
    let before = place.count();
    let mut of_ranks = Vec::new();
    for rank in &place.ranks {
        let theirs = fs::read_to_string(format!("/proc/{}/maps", rank.pid().as_raw_nonzero())).expect("it runs");
        // Shared memory, by device and inode.
        let shared = theirs.lines().filter(|line| line.contains("memfd:"));
        of_ranks.extend(shared.filter_map(|line| line.split_whitespace().nth(4)).map(str::to_owned));
    }
    let shared = maps.lines().filter(|line| line.contains("memfd:"));
    let shared =
        shared.filter(|line| line.split_whitespace().nth(4).is_some_and(|inode| of_ranks.iter().any(|of| of == inode)));
    assert_eq!(shared.count(), 0, "device and ranks of the superuser share memory; {} by reference", tree.by_reference);
    place.check_unhurt(&before);
}

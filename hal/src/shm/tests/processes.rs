//! Tests with several processes: queues whose ends sleep whenever they can, and detection of deaths.

use super::*;
use crate::dma::{Capabilities, Profile};
use crate::ids::{BootId, ChunkNo, Epoch};
use crate::mmio::AdminCommand;
use crate::mmio::{CompletionEntry, EntryStatus, Features, FunctionConfig, SubmissionEntry};
use crate::ring::{Consumer, Producer};
use std::process::{Child, Command, Stdio};

/// Entries that a rank submits: many times what the rings hold.
const ENTRIES: u64 = 20_000;

/// The other process, which is killed when the test ends.
pub(super) struct OtherProcess(Child);

impl OtherProcess {
    /// Start this program as `role` against the device `name`.
    pub(super) fn start(role: &str, name: &str) -> Self {
        let program = std::env::current_exe().expect("the test program");
        let child = Command::new(program)
            .args(["--exact", "--ignored", "--nocapture", "shm::tests::processes::other_process"])
            .env("SUMAC_TEST_ROLE", role)
            .env("SUMAC_TEST_DEVICE", name)
            .stdout(Stdio::null())
            .spawn();
        Self(child.expect("a process"))
    }

    pub(super) fn succeeded(mut self) -> bool {
        self.0.wait().expect("it is ours").success()
    }
}

impl Drop for OtherProcess {
    fn drop(&mut self) {
        // If it has ended, both calls do nothing.
        let _ = (self.0.kill(), self.0.wait());
    }
}

#[test]
#[ignore = "run by other tests as a second process"]
fn other_process() {
    let role = std::env::var("SUMAC_TEST_ROLE").expect("started by a test");
    let name = std::env::var("SUMAC_TEST_DEVICE").expect("started by a test");
    match role.as_str() {
        "submit" => submit(&name),
        "wait for the end" => {
            let device = Connection::open(&name, LONG).expect("a device");
            device.send(&ATTACH, None).expect("it is open");
            assert!(matches!(device.receive(LONG), Err(SocketError::Closed)));
        }
        "write" => write(&name),
        "full" => full(&name),
        "refer" => duplex::refer(&name),
        #[cfg(feature = "emu")]
        "reduce" => zero_copy::rank_process(&name),
        "listen as another user" => {
            become_another_user();
            let listener = Listener::bind(&name).expect("a free name");
            // Until the test kills this process.
            while listener.accept(LONG).is_ok() {}
        }
        "dial as another user" => {
            become_another_user();
            let refused = Connection::open_of(&name, LONG, DeviceUsers { own: OTHER_USER, named: None });
            // This side accepts root's device, whether or not that device accepts it.
            let device = refused.expect("the superuser's");
            assert!(matches!(device.receive(LONG), Err(SocketError::Closed)));
        }
        role => panic!("no role is called {role}"),
    }
}

/// A user without files or processes (`nobody`).
const OTHER_USER: u32 = 65_534;

fn become_another_user() {
    // SAFETY: it has no conditions; the library does it for all threads.
    assert_eq!(unsafe { libc::setresuid(OTHER_USER, OTHER_USER, OTHER_USER) }, 0, "this process is the superuser's");
}

/// Return whether this process may change its user; else print which test is skipped.
fn can_become_another_user(test: &str) -> bool {
    let is_root = rustix::process::geteuid().is_root();
    if !is_root {
        eprintln!("SKIPPED {test}: it needs a second user, and so has to run as root");
    }
    is_root
}

/// A device maps all memory of its ranks, so a rank of root has more to lose than others.
#[test]
fn device_of_another_user_is_refused_unless_named() {
    if !can_become_another_user("device_of_another_user_is_refused_unless_named") {
        return;
    }
    let name = unique_name();
    let _device = OtherProcess::start("listen as another user", &name);
    let start = Instant::now();
    let open = |users| loop {
        match Connection::open_of(&name, LONG, users) {
            // The process is still starting.
            Err(SocketError::Name { call: "connect", .. }) if start.elapsed() < LONG => std::thread::yield_now(),
            opened => return opened,
        }
    };
    for named in [None, Some(1), Some(0)] {
        let refused = open(DeviceUsers { named, ..DeviceUsers::own() }).expect_err("another user's");
        assert!(matches!(refused, SocketError::User { uid: OTHER_USER, .. }), "{refused}");
        assert!(refused.to_string().contains("SUMAC_DEVICE_USER"), "{refused}");
    }
    let device = open(DeviceUsers { named: Some(OTHER_USER), ..DeviceUsers::own() }).expect("the one that is named");
    assert_eq!(device.peer().uid(), OTHER_USER);
}

#[test]
fn rank_of_another_user_is_accepted_only_by_devices_serving_all() {
    if !can_become_another_user("rank_of_another_user_is_accepted_only_by_devices_serving_all") {
        return;
    }
    for serves_all in [false, true] {
        let name = unique_name();
        let listener = Listener::bind(&name).expect("a free name").serving_all(serves_all);
        let rank = OtherProcess::start("dial as another user", &name);
        match listener.accept(LONG) {
            Ok(Some(connection)) => assert!(serves_all && connection.peer().uid() == OTHER_USER),
            Err(SocketError::User { uid: OTHER_USER, .. }) => assert!(!serves_all),
            other => panic!("{other:?}"),
        }
        assert!(rank.succeeded());
    }
}

/// The first message of a rank.
const ATTACH: Message = Message::Attach { group: GroupId(3), child: ChildIndex(2), key: u64::MAX };

pub(super) fn config() -> FunctionConfig {
    FunctionConfig {
        boot_id: BootId(1),
        features: Features::ZERO_COPY,
        queues: 2,
        depth: 8,
        dma: Capabilities::new(Profile::Full, 1, 1),
    }
}

/// Accept a rank and give it a function.
pub(super) fn accept_rank(listener: &Listener) -> (Connection, Function) {
    let connection = listener.accept(LONG).expect("accepted").expect("a connection");
    assert_eq!(connection.receive(LONG).expect("a message").message, ATTACH);
    let function = Function::create(&config()).expect("memory");
    connection.send(&Message::Function, Some(function.file())).expect("it is open");
    (connection, function)
}

/// Attach as a rank.
pub(super) fn attach(name: &str) -> (Connection, Function) {
    let device = Connection::open(name, LONG).expect("a device");
    device.send(&ATTACH, None).expect("it is open");
    let received = device.receive(LONG).expect("a message");
    assert_eq!(received.message, Message::Function);
    let (function, _) = Function::open(received.file.expect("it comes with memory")).expect("a function");
    (device, function)
}

fn entry(number: u64) -> SubmissionEntry {
    let command = AdminCommand::Register { handle: !number, offset_bytes: number, len_bytes: number * 3 };
    SubmissionEntry::Admin { cookie: number, command }
}

/// Submit all entries and check that each is answered, in order; sleep whenever there is nothing to do.
fn submit(name: &str) {
    let (_device, function) = attach(name);
    let queue = function.queue(1).expect("a queue");
    let mut submissions = Producer::new(queue.submissions.clone());
    let mut completions = Consumer::new(queue.completions.clone());
    let waiter = Waiter::new(SpinPolicy::NONE);
    let (mut submitted, mut answered) = (0, 0);
    while answered < ENTRIES {
        let batch: Vec<_> = (submitted..ENTRIES.min(submitted + 3)).map(|number| entry(number).emit()).collect();
        let pushed = submissions.push_batch(&batch).expect("valid ring indices");
        submitted += pushed as u64;
        if pushed > 0 {
            ring(queue.device_bell());
        }
        let mut words = [[0; 4]; 5];
        let popped = completions.pop_batch(&mut words).expect("valid ring indices");
        for words in &words[..popped] {
            let answer = CompletionEntry::parse(words).expect("an answer");
            let expected = CompletionEntry::Admin { status: EntryStatus::Result, cookie: answered, value: answered };
            assert_eq!(answer, expected);
            answered += 1;
        }
        if popped > 0 {
            // Notify the device that there is room for completions.
            ring(queue.device_bell());
        }
        let ready = || {
            completions.available().expect("valid ring indices") > 0
                || submitted < ENTRIES && submissions.room().expect("valid ring indices") > 0
        };
        if answered < ENTRIES {
            assert_eq!(waiter.wait(&[queue.host_bell()], Some(Instant::now() + LONG), ready), Ok(true));
        }
    }
}

/// Serve `ranks` processes that submit; the device sleeps on all their doorbells at once.
fn serve(ranks: usize) {
    let name = unique_name();
    let listener = Listener::bind(&name).expect("a free name");
    let others: Vec<_> = (0..ranks).map(|_| OtherProcess::start("submit", &name)).collect();
    let functions: Vec<_> = others.iter().map(|_| accept_rank(&listener)).collect();
    let queues: Vec<_> = functions.iter().map(|(_, function)| function.queue(1).expect("a queue")).collect();
    let mut ends: Vec<_> = queues
        .iter()
        .map(|queue| (Consumer::new(queue.submissions.clone()), Producer::new(queue.completions.clone()), 0))
        .collect();
    let bells: Vec<_> = queues.iter().map(FunctionQueue::device_bell).collect();
    let waiter = Waiter::new(SpinPolicy::NONE);
    while ends.iter().any(|(_, _, answered)| *answered < ENTRIES) {
        for ((submissions, completions, answered), queue) in ends.iter_mut().zip(&queues) {
            let mut moved = 0;
            while completions.room().expect("valid ring indices") > 0
                && let Some(words) = submissions.pop().expect("valid ring indices")
            {
                assert_eq!(SubmissionEntry::parse(&words), Ok(entry(*answered)));
                let answer =
                    CompletionEntry::Admin { status: EntryStatus::Result, cookie: *answered, value: *answered };
                assert_eq!(completions.push(&answer.emit()), Ok(true));
                (*answered, moved) = (*answered + 1, moved + 1);
            }
            if moved > 0 {
                ring(queue.host_bell());
            }
        }
        let ready = || {
            ends.iter_mut().any(|(submissions, completions, answered)| {
                *answered == ENTRIES
                    || submissions.available().expect("valid ring indices") > 0
                        && completions.room().expect("valid ring indices") > 0
            })
        };
        assert_eq!(waiter.wait(&bells, Some(Instant::now() + LONG), ready), Ok(true));
    }
    assert!(others.into_iter().all(OtherProcess::succeeded));
}

#[test]
fn rank_and_device_that_sleep_when_idle_lose_no_entry() {
    serve(1);
}

#[test]
fn device_sleeping_on_several_doorbells_serves_all_ranks() {
    serve(2);
}

#[test]
fn death_of_either_side_closes_the_connection() {
    let name = unique_name();
    let listener = Listener::bind(&name).expect("a free name");
    let mut other = OtherProcess::start("wait for the end", &name);
    let rank = listener.accept(LONG).expect("accepted").expect("a connection");
    assert!(matches!(rank.receive(LONG).expect("a message").message, Message::Attach { .. }));
    assert_eq!(rank.peer().wait(Duration::ZERO), Ok(false), "it has not ended");
    rank.peer().kill().expect("it is ours");
    assert_eq!(rank.peer().wait(LONG), Ok(true));
    assert!(matches!(rank.receive(LONG), Err(SocketError::Closed)));
    assert!(!other.0.wait().expect("it is ours").success());
    rank.peer().kill().expect("killing an ended process is no error");

    // The other way around: the rank detects the end of the device.
    let other = OtherProcess::start("wait for the end", &name);
    let rank = listener.accept(LONG).expect("accepted").expect("a connection");
    assert!(matches!(rank.receive(LONG).expect("a message").message, Message::Attach { .. }));
    drop((rank, listener));
    assert!(other.succeeded(), "it has seen the connection close");
}

/// Write ones into all memory that is handed over, and acknowledge.
fn write(name: &str) {
    let device = Connection::open(name, LONG).expect("a device");
    loop {
        match device.receive(LONG) {
            Ok(Received { message: Message::Memory { handle }, file: Some(file) }) => {
                // Keep the mapping, to write to it again after the other side has severed it.
                let region = Region::open(file, 1 << 20).expect("it is sealed");
                region.write(0, &[1; 4096]);
                device.send(&numbered(handle), None).expect("it is open");
                let next = device.receive(LONG).expect("a message").message;
                assert_eq!(next, numbered(2));
                region.write(0, &[2; 4096]);
                device.send(&numbered(3), None).expect("it is open");
            }
            Err(SocketError::Closed) => return,
            other => panic!("{other:?}"),
        }
    }
}

#[test]
fn writes_through_an_old_mapping_miss_severed_memory() {
    let name = unique_name();
    let listener = Listener::bind(&name).expect("a free name");
    let other = OtherProcess::start("write", &name);
    let device = listener.accept(LONG).expect("accepted").expect("a connection");
    let mut region = Region::create(4096, Pages::Normal).expect("memory");
    device.send(&Message::Memory { handle: 7 }, Some(region.file())).expect("it is open");
    assert_eq!(device.receive(LONG).expect("a message").message, numbered(7));
    assert_eq!(bytes_of(&region, 0, 4096), [1; 4096]);
    region.sever(std::slice::from_ref(&(0..4096))).expect("memory");
    device.send(&numbered(2), None).expect("it is open");
    assert_eq!(device.receive(LONG).expect("a message").message, numbered(3));
    assert_eq!(bytes_of(&region, 0, 4096), [1; 4096]);
    drop(device);
    assert!(other.succeeded());
}

/// The view that contributions of the zero-copy test carry.
pub(super) fn view() -> (GroupId, Epoch, ChunkNo) {
    (GroupId(1), Epoch { term: 1, counter: 1 }, ChunkNo(0))
}

/// A process that is out of descriptors must not report a malformed message.
#[test]
fn descriptor_beyond_the_limit_is_reported_as_no_descriptor() {
    let name = unique_name();
    let listener = Listener::bind(&name).expect("a free name");
    let rank = OtherProcess::start("full", &name);
    let connection = listener.accept(LONG).expect("accepted").expect("a connection");
    let region = Region::create(4096, Pages::Normal).expect("memory");
    for handle in [1, 2] {
        connection.send(&Message::Memory { handle }, Some(region.file())).expect("it is open");
    }
    assert!(rank.succeeded());
}

/// The other process of the test above.
fn full(name: &str) {
    use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};
    let device = Connection::open(name, LONG).expect("a device");
    let limit = getrlimit(Resource::Nofile);
    // Open descriptors stay open.
    setrlimit(Resource::Nofile, Rlimit { current: Some(3), ..limit }).expect("less than before");
    let received = device.receive(LONG);
    let is_first = |message: &Message| *message == Message::Memory { handle: 1 };
    assert!(matches!(&received, Err(SocketError::NoDescriptor { message }) if is_first(message)), "{received:?}");
    setrlimit(Resource::Nofile, limit).expect("as before");
    let received = device.receive(LONG).expect("the next one has room");
    assert_eq!((received.message, received.file.is_some()), (Message::Memory { handle: 2 }, true));
}

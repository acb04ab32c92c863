//! Hostile peers: they do not read, leave messages incomplete, send values out of range, or come in large numbers.

use super::super::proto::{ClientReply, ClientRequest, JoinRefusal, ResumeRequest};
use super::replan::{Raw, SOON, no_tree_reason, request, tree_of};
use super::*;
use crate::plan::Child;
use crate::secret::JobSecret;
use std::io::{ErrorKind, Read, Write};
use std::sync::mpsc::RecvTimeoutError;
use std::time::Instant;
use sumac_hal::ctrl::{Rejection, StreamError};

/// A join request for the job `job`.
fn of_job(job: &str, rank: u32, world: u32) -> JoinRequest {
    JoinRequest { job: job.into(), ..request(rank, world) }
}

fn refusal(raw: &mut Raw) -> String {
    let reply = raw.recv();
    let ClientReply::Refused(refusal) = reply else { panic!("refused: {reply:?}") };
    refusal.to_string()
}

/// Wait until a condition holds; `what` describes it.
fn wait_until(what: &str, mut holds: impl FnMut() -> bool) {
    let deadline = Instant::now() + TEST_TIMEOUT;
    while !holds() {
        assert!(Instant::now() < deadline, "not in time: {what}");
        thread::yield_now();
    }
}

/// Send status requests until the connection blocks. A controller with blocking writes would be stuck by then.
fn request_without_reading(controller: &Controller) -> TcpStream {
    let mut stream = TcpStream::connect(controller.local_addr()).expect("a controller");
    send(&mut stream, &Hello::Client).expect("it listens");
    let mut asked = Vec::new();
    (0..1000).for_each(|_| send(&mut asked, &ClientRequest::Status).expect("memory"));
    stream.set_nonblocking(true).expect("a socket");
    let deadline = Instant::now() + TEST_TIMEOUT;
    let mut blocked_since = None;
    while Instant::now() < deadline {
        match stream.write(&asked) {
            Ok(_) => blocked_since = None,
            Err(error) if error.kind() == ErrorKind::WouldBlock => {
                // Distinguish blocked from slow.
                if blocked_since.get_or_insert_with(Instant::now).elapsed() > Duration::from_millis(500) {
                    break;
                }
                thread::yield_now();
            }
            // Hung up on.
            Err(_) => break,
        }
    }
    stream
}

#[test]
fn client_that_does_not_read_delays_no_other_peer() {
    let lease = Duration::from_secs(1);
    let controller = Controller::start(ControllerConfig { lease, ..ControllerConfig::new() }).expect("a port");
    let (renewals, renewed) = channel();
    let _device = Device::serve(&controller, announce("leaf0", 1, None), move |request| {
        if matches!(request, Request::RenewGroup(_)) {
            let _ = renewals.send(());
        }
        Reply::Done
    });
    let mut runs = Raw::join_with(&controller, of_job("runs", 0, 1), &[]);
    assert_eq!(tree_of(&runs.joined()).leaf, "leaf0");
    let deaf = request_without_reading(&controller);
    // A member of a job that does not read either.
    let mut member = Raw::join_with(&controller, of_job("deaf", 0, 2), &[]);
    (0..1000).for_each(|_| member.send(ClientRequest::Replan { view: 9 }));
    assert!(status(controller.local_addr()).is_ok());
    let mut joins = Raw::join_with(&controller, of_job("joins", 0, 1), &[]);
    assert_eq!(tree_of(&joins.joined()).leaf, "leaf0");
    while renewed.try_recv().is_ok() {}
    renewed.recv_timeout(SOON).expect("groups are renewed");
    let (done, ends) = channel();
    thread::spawn(move || {
        drop(controller);
        let _ = done.send(());
    });
    assert_ne!(ends.recv_timeout(SOON), Err(RecvTimeoutError::Timeout), "it ends");
    drop((deaf, member));
}

#[test]
fn client_beyond_its_output_limit_is_disconnected() {
    let limits = Limits { peer_output_bytes: 8192, ..Limits::default() };
    let controller = Controller::start(ControllerConfig { limits, ..ControllerConfig::new() }).expect("a port");
    let mut deaf = request_without_reading(&controller);
    deaf.set_nonblocking(false).expect("a socket");
    deaf.set_read_timeout(Some(SOON)).expect("a socket");
    // Data buffered by the kernel still arrives, then the connection ends.
    let mut rest = Vec::new();
    let ended = deaf.read_to_end(&mut rest);
    assert!(ended.is_ok() || ended.is_err_and(|error| error.kind() == ErrorKind::ConnectionReset), "disconnected");
    assert!(status(controller.local_addr()).is_ok());
}

#[test]
fn long_plan_delays_neither_status_nor_renewals_nor_shutdown() {
    let config = ControllerConfig { lease: Duration::from_secs(1), ..ControllerConfig::new() };
    let gate = config.gate.clone();
    let controller = Controller::start(config).expect("a port");
    let (renewals, renewed) = channel();
    let device = Device::serve(&controller, announce("leaf0", 1, None), move |request| {
        if matches!(request, Request::RenewGroup(_)) {
            let _ = renewals.send(());
        }
        Reply::Done
    });
    let mut runs = Raw::join_with(&controller, of_job("runs", 0, 1), &[]);
    assert_eq!(tree_of(&runs.joined()).leaf, "leaf0");
    let closed = gate.0.lock().expect("no panic");
    let mut plans = Raw::join_with(&controller, of_job("plans", 0, 1), &[]);
    let report = plans.report();
    let job = report.jobs.iter().find(|job| job.name == "plans").expect("it is there");
    assert_eq!((job.running, job.joined), (false, 1), "it is being planned");
    while renewed.try_recv().is_ok() {}
    renewed.recv_timeout(SOON).expect("groups are renewed");
    // The device disconnects before the plan is finished, so it is not used.
    drop(keep_closed_during(closed, || super::replan::disconnect_device(device, &controller)));
    assert!(no_tree_reason(&plans.joined()).contains("no device is connected"));
    let closed = gate.0.lock().expect("no panic");
    let _plans = Raw::join_with(&controller, of_job("ends", 0, 1), &[]).report();
    let (done, ends) = channel();
    thread::spawn(move || {
        drop(controller);
        let _ = done.send(());
    });
    assert_eq!(ends.recv_timeout(SOON), Ok(()), "it ends");
    drop(closed);
}

fn keep_closed_during<T>(closed: T, first: impl FnOnce()) -> T {
    first();
    closed
}

#[test]
fn counts_beyond_the_limits_are_refused() {
    let controller = controller();
    for world in [u32::MAX, RANKS_MAX + 1] {
        let expression = vec![vec![Child::Rank(Rank(0))]];
        let resumption = ResumeRequest {
            request: of_job("many", 0, world),
            devices: Vec::new(),
            view: 0,
            shrink_count: 0,
            secret: JobSecret::new([1; 32]),
            expression,
        };
        let mut raw = Raw::dial(&controller);
        raw.send(ClientRequest::Resume(Box::new(resumption)));
        assert!(refusal(&mut raw).contains("at most 16384"));
        assert!(refusal(&mut Raw::join_with(&controller, of_job("many", 0, world), &[])).contains("at most 16384"));
    }
    let pinned = ["leaf0"; 17];
    assert!(refusal(&mut Raw::join_with(&controller, of_job("deep", 0, 1), &pinned)).contains("at most 16"));
    assert_eq!(status(controller.local_addr()).expect("it goes on").jobs, []);
}

#[test]
fn too_many_ranks_for_one_device_get_the_reason_and_hold_nothing() {
    let controller = controller();
    let mut announce = announce("leaf0", 1, None);
    announce.capabilities.children = u16::MAX;
    let _device = Device::serve(&controller, announce, |_| Reply::Done);
    let mut ranks: Vec<Raw> =
        (0..300).map(|rank| Raw::join_with(&controller, of_job("wide", rank, 300), &["leaf0"])).collect();
    for rank in &mut ranks {
        assert!(no_tree_reason(&rank.joined()).contains("300 children; a group has at most 256"));
    }
    drop(ranks);
    let flat: Vec<Raw> = (0..300).map(|rank| Raw::join_with(&controller, of_job("flat", rank, 300), &[])).collect();
    for mut rank in flat {
        assert!(no_tree_reason(&rank.joined()).contains("300 ranks exceed the 256 children"));
    }
    let mut next = Raw::join_with(&controller, of_job("next", 0, 1), &[]);
    assert_eq!(tree_of(&next.joined()).leaf, "leaf0");
    let report = status(controller.local_addr()).expect("a report");
    assert_eq!(report.tenants.iter().map(|tenant| tenant.groups).sum::<u64>(), 1, "{:?}", report.tenants);
}

#[test]
fn second_join_on_a_connection_is_refused() {
    let controller = controller();
    let _device = Device::start(&controller, "leaf0", None, None);
    let mut greedy = Raw::dial(&controller);
    for nth in 0..300 {
        let mut request = of_job(&format!("job{nth}"), 0, 1);
        request.terms.tenant = format!("tenant{nth}");
        greedy.send(ClientRequest::Join(request));
    }
    let (mut joined, mut refused) = (0, 0);
    for _ in 0..300 {
        match greedy.recv() {
            ClientReply::Joined(_) => joined += 1,
            ClientReply::Refused(refusal) => {
                assert!(refusal.to_string().contains("joined as rank 0 of job \"job0\""), "{refusal}");
                refused += 1;
            }
            other => panic!("{other:?}"),
        }
    }
    assert_eq!((joined, refused), (1, 299));
    drop(greedy);
    wait_until("its job ends", || status(controller.local_addr()).expect("a report").jobs.is_empty());
    // All slots are free again: the device has room for exactly two such groups.
    let ranks: Vec<_> = (0..2).map(|nth| join(&controller, &format!("next{nth}"), &[AUTO])).collect();
    assert!(ranks.iter().all(|ranks| ranks[0].1.tree.is_ok()));
}

#[test]
fn rank_that_left_can_join_again_on_the_same_connection() {
    let controller = controller();
    let mut raw = Raw::join_with(&controller, of_job("first", 0, 1), &[]);
    raw.joined();
    raw.send(ClientRequest::Leave);
    assert_eq!(raw.recv(), ClientReply::Left);
    raw.send(ClientRequest::Join(of_job("second", 0, 1)));
    raw.joined();
}

#[test]
fn invalid_names_are_refused() {
    let controller = controller();
    let long = "x".repeat(65);
    for job in ["", "a b", "a\u{1b}[31m", "\u{202e}", &long, &"x".repeat(60_000)] {
        let mut raw = Raw::join_with(&controller, of_job(job, 0, 1), &[]);
        let why = refusal(&mut raw);
        assert!(why.contains("is not a valid job name") && !why.contains('\u{1b}') && why.len() < 600, "{why}");
    }
    let host = JoinRequest { host: Some("h\u{7}".into()), ..of_job("job", 0, 1) };
    assert!(refusal(&mut Raw::join_with(&controller, host, &[])).contains("is not a valid host name"));
    let machine = JoinRequest { machine: Some(text("m\u{1b}")), ..of_job("job", 0, 1) };
    assert!(refusal(&mut Raw::join_with(&controller, machine, &[])).contains("is not a valid machine name"));
    assert!(
        refusal(&mut Raw::join_with(&controller, of_job("job", 0, 1), &["\n"])).contains("not a valid device name")
    );
    let mut device = TcpStream::connect(controller.local_addr()).expect("a controller");
    send(&mut device, &Hello::Device(announce("leaf\u{1b}[2J", 1, None))).expect("it listens");
    let mut reader = FrameReader::new(device);
    let rejected = reader.recv::<Envelope<Request>>().expect("a message").message;
    assert_eq!(rejected, Request::Rejected(Rejection::Name));
    assert!(matches!(reader.recv::<Envelope<Request>>(), Err(StreamError::Closed)), "it is disconnected");
    let report = status(controller.local_addr()).expect("a report");
    assert!(report.jobs.is_empty() && report.devices.is_empty(), "{report:?}");
}

#[test]
fn escape_sequences_in_a_reason_are_replaced() {
    let controller = controller();
    let _device = Device::start(&controller, "leaf0", None, None);
    let mut rank = Raw::join_with(&controller, of_job("job", 0, 1), &[]);
    assert_eq!(tree_of(&rank.joined()).leaf, "leaf0");
    let why = format!("\u{1b}[31m{}", "y".repeat(2000));
    rank.send(ClientRequest::Decline { view: 0, device: None, why });
    let report = rank.report();
    let told = report.jobs[0].tree.as_ref().expect("complete").as_ref().expect_err("declined");
    assert!(!told.contains('\u{1b}') && told.contains("declined") && told.len() < 1000, "{told}");
}

#[test]
fn connection_beyond_the_limit_is_refused_with_the_limit() {
    let limits = Limits { connections: 3, ..Limits::default() };
    let controller = Controller::start(ControllerConfig { limits, ..ControllerConfig::new() }).expect("a port");
    let mut held: Vec<Raw> = (0..3).map(|_| Raw::dial(&controller)).collect();
    assert_eq!(held[2].report().jobs, []);
    let error = status(controller.local_addr()).expect_err("one too many").to_string();
    assert!(error.contains("at most 3 connections"), "{error}");
    held.pop();
    wait_until("there is room", || status(controller.local_addr()).is_ok());
}

#[test]
fn job_beyond_the_limit_is_refused_with_the_limit() {
    let limits = Limits { jobs: 2, ..Limits::default() };
    let controller = Controller::start(ControllerConfig { limits, ..ControllerConfig::new() }).expect("a port");
    let mut held: Vec<Raw> =
        (0..2).map(|nth| Raw::join_with(&controller, of_job(&format!("job{nth}"), 0, 2), &[])).collect();
    assert_eq!(held[1].report().jobs.len(), 2);
    assert!(refusal(&mut Raw::join_with(&controller, of_job("third", 0, 1), &[])).contains("at most 2 jobs"));
    let mut second = Raw::join_with(&controller, of_job("job1", 1, 2), &[]);
    assert_eq!(second.joined().mesh.len(), 2, "a rank of an existing job is accepted");
}

#[test]
fn silent_slow_and_idle_peers_are_disconnected() {
    let limits = Limits { greeting: Duration::from_millis(300), idle: Duration::from_millis(300), ..Limits::default() };
    let controller = Controller::start(ControllerConfig { limits, ..ControllerConfig::new() }).expect("a port");
    let is_disconnected = |mut stream: TcpStream| {
        stream.set_read_timeout(Some(SOON)).expect("a socket");
        matches!(stream.read(&mut [0; 16]), Ok(0))
    };
    let silent = TcpStream::connect(controller.local_addr()).expect("a controller");
    assert!(is_disconnected(silent), "no handshake");
    // Sending byte by byte does not extend the deadline.
    let mut dripping = TcpStream::connect(controller.local_addr()).expect("a controller");
    let mut greeting = Vec::new();
    send(&mut greeting, &Hello::Device(announce("leaf0", 1, None))).expect("memory");
    let began = Instant::now();
    dripping.set_read_timeout(Some(Duration::from_millis(50))).expect("a socket");
    let ended = greeting
        .iter()
        .any(|byte| dripping.write_all(&[*byte]).is_err() || matches!(dripping.read(&mut [0; 16]), Ok(0)));
    assert!(ended, "its greeting took {:?}", began.elapsed());
    let mut idle = TcpStream::connect(controller.local_addr()).expect("a controller");
    send(&mut idle, &Hello::Client).expect("it listens");
    assert!(is_disconnected(idle), "it asks for nothing");
    // A rank that has joined may be idle.
    let mut member = Raw::join_with(&controller, of_job("job", 0, 2), &[]);
    let silent = TcpStream::connect(controller.local_addr()).expect("a controller");
    assert!(is_disconnected(silent), "as much time has passed");
    assert_eq!(member.report().jobs.len(), 1);
}

/// The peer whose message exceeds the limit is not the one to disconnect.
#[test]
fn total_output_beyond_the_limit_disconnects_only_peers_that_do_not_read() {
    let limits = Limits { output_bytes: 1, ..Limits::default() };
    let controller = Controller::start(ControllerConfig { limits, ..ControllerConfig::new() }).expect("a port");
    let mut ranks: Vec<Raw> = (0..2).map(|rank| Raw::join_with(&controller, of_job("job", rank, 2), &[])).collect();
    ranks.iter_mut().for_each(|rank| drop(rank.joined()));
    let mut deaf = request_without_reading(&controller);
    ranks[0].send(ClientRequest::Suspect { view: 0 });
    assert!(ranks.iter_mut().all(|rank| rank.recv() == ClientReply::TreeLost { view: 0 }));
    let report = ranks[1].report();
    assert_eq!((report.jobs[0].joined, report.jobs[0].world), (2, 2));
    deaf.set_nonblocking(false).expect("a socket");
    deaf.set_read_timeout(Some(SOON)).expect("a socket");
    let ended = deaf.read_to_end(&mut Vec::new());
    assert!(ended.is_ok() || ended.is_err_and(|error| error.kind() == ErrorKind::ConnectionReset), "disconnected");
}

#[test]
fn total_input_beyond_the_limit_disconnects_the_largest_sender() {
    let limits = Limits { input_bytes: 100_000, ..Limits::default() };
    let controller = Controller::start(ControllerConfig { limits, ..ControllerConfig::new() }).expect("a port");
    // The request itself is refused in the end, for its number of devices.
    let long = |devices: usize| {
        let devices = vec!["x".repeat(100); devices];
        let mut bytes = Vec::new();
        send(&mut bytes, &ClientRequest::JoinOn { request: request(0, 1), devices }).expect("memory");
        bytes
    };
    let begun = |bytes: &[u8]| {
        let mut stream = TcpStream::connect(controller.local_addr()).expect("a controller");
        stream.set_read_timeout(Some(SOON)).expect("a socket");
        send(&mut stream, &Hello::Client).expect("it listens");
        stream.write_all(bytes).expect("it listens");
        stream
    };
    let greedy = long(950);
    let mut greedy = begun(&greedy[..greedy.len() - 1]);
    let modest = long(200);
    let (early, late) = modest.split_at(modest.len() - 1);
    let mut modest = begun(early);
    let ended = greedy.read(&mut [0; 16]);
    assert!(matches!(ended, Ok(0)) || ended.is_err_and(|error| error.kind() == ErrorKind::ConnectionReset));
    modest.write_all(late).expect("it listens");
    let reply = FrameReader::new(modest).recv::<ClientReply>().expect("an answer");
    assert!(matches!(reply, ClientReply::Refused(JoinRefusal::Limit { .. })), "{reply:?}");
}

/// The disconnect and the request arrive at the same time, in this order.
#[test]
fn disconnected_rank_is_missing_from_the_next_report() {
    let controller = controller();
    let mut asks = Raw::dial(&controller);
    for round in 0..300 {
        let member = Raw::join_with(&controller, of_job("job", 0, 2), &[]);
        while asks.report().jobs.is_empty() {}
        drop(member);
        assert!(asks.report().jobs.is_empty(), "round {round}");
    }
}

#[test]
fn report_too_long_for_a_peer_counts_omitted_jobs() {
    let limits = Limits { peer_output_bytes: 16 * 1024, ..Limits::default() };
    let controller = Controller::start(ControllerConfig { limits, ..ControllerConfig::new() }).expect("a port");
    let mut held: Vec<Raw> = (0..200)
        .map(|nth| Raw::join_with(&controller, of_job(&format!("job{nth}{}", "x".repeat(50)), 0, 2), &[]))
        .collect();
    held.iter_mut().for_each(|raw| raw.send(ClientRequest::Survivors));
    held.iter_mut().for_each(|raw| drop(raw.recv()));
    let report = status(controller.local_addr()).expect("a report");
    assert!(!report.jobs.is_empty() && report.jobs_left_out > 0, "{}", report.jobs.len());
    assert_eq!(report.jobs.len() as u32 + report.jobs_left_out, 200);
}

#[test]
fn device_that_owes_counters_is_not_queried_again() {
    let controller = controller();
    let device = Device::that_stops_responding(&controller, "leaf0", |request| matches!(request, Request::Stats));
    let first = status(controller.local_addr()).expect("a report");
    assert!(first.devices[0].stats.is_err());
    assert_eq!(device.stopped.recv_timeout(SOON), Ok(Request::Stats));
    let second = status(controller.local_addr()).expect("a report");
    let why = second.devices[0].stats.as_ref().expect_err("mute");
    assert!(why.contains("an earlier query"), "{why}");
    assert!(device.stopped.try_recv().is_err(), "it is not asked again, and not waited for");
}

#[test]
fn job_avoids_devices_with_overdue_counters() {
    let controller = controller();
    let _mute: Vec<_> = (0..8)
        .map(|nth| {
            Device::that_stops_responding(&controller, &format!("a{nth}"), |request| matches!(request, Request::Stats))
        })
        .collect();
    let _real = Device::start(&controller, "b", None, None);
    wait_until("all are there", || status(controller.local_addr()).expect("a report").devices.len() == 9);
    assert_eq!(tree_of(&Raw::join_with(&controller, of_job("job", 0, 1), &[]).joined()).leaf, "b");
    // A pinned device is used anyway: it may just be slow.
    let mut pinned = Raw::join_with(&controller, of_job("pinned", 0, 1), &["a0"]);
    pinned.extend_timeout();
    assert!(no_tree_reason(&pinned.joined()).contains("a0"));
}

#[test]
fn report_that_waits_for_a_device_delays_no_client() {
    let controller = controller();
    let device = Device::that_stops_responding(&controller, "leaf0", |request| matches!(request, Request::Stats));
    let mut rank = Raw::join_with(&controller, of_job("job", 0, 1), &[]);
    rank.joined();
    let addr = controller.local_addr();
    let report = thread::spawn(move || status(addr));
    assert_eq!(device.stopped.recv_timeout(SOON), Ok(Request::Stats));
    // While the report waits, other clients are answered: the rank is already taken.
    for _ in 0..20 {
        let mut second = Raw::join_with(&controller, of_job("job", 0, 1), &[]);
        assert!(matches!(second.recv(), ClientReply::Refused(_)));
    }
    assert!(!report.is_finished(), "it still waits for the device");
    assert!(report.join().expect("no panic").expect("a report").devices[0].stats.is_err());
}

#[test]
fn device_that_does_not_read_is_disconnected() {
    let controller = controller();
    let mut deaf = TcpStream::connect(controller.local_addr()).expect("a controller");
    send(&mut deaf, &Hello::Device(announce("leaf0", 1, None))).expect("it listens");
    wait_until("it is there", || status(controller.local_addr()).expect("a report").devices.len() == 1);
    // Each duplicate name makes the controller probe the device, until too many requests are unanswered.
    let mut other = announce("leaf0", 1, None);
    other.capabilities.groups = 5;
    wait_until("it is disconnected", || {
        let mut stream = TcpStream::connect(controller.local_addr()).expect("a controller");
        send(&mut stream, &Hello::Device(other.clone())).expect("it listens");
        // Refused, or welcomed.
        matches!(stream.read(&mut [0; 16]), Ok(1..))
    });
}

#[test]
fn crash_looping_device_gets_no_job_during_its_backoff() {
    let controller = controller();
    let place = |nth: usize| Raw::join_with(&controller, of_job(&format!("job{nth}"), 0, 1), &[]).joined();
    for nth in 0..3 {
        let device = Device::start(&controller, "leaf0", None, None);
        assert_eq!(tree_of(&place(nth)).leaf, "leaf0", "it may restart now and then");
        super::replan::disconnect_device(device, &controller);
    }
    let _device = Device::start(&controller, "leaf0", None, None);
    assert!(no_tree_reason(&place(3)).contains("crash loop"));
    let mut nth = 4..;
    wait_until("it has stayed for a while", || place(nth.next().expect("a number")).tree.is_ok());
}

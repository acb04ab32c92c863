//! Controllers of a pair: the machine step by step, and two controllers with keys.

use super::super::keys::{KeyStore, Principal};
use super::super::machine::{ConnId, Frames, Machine, Output};
use super::super::proto::{ClientReply, ClientRequest, JoinRefusal, PairRole, PeerReport, StatusReport};
use super::replan::request;
use super::*;
use crate::secret::JobSecret;
use std::collections::BTreeSet;
use std::net::TcpListener;
use sumac_hal::ctrl::{FrameBuffer, Rejection};
use sumac_hal::time::Instant;
use zeroize::Zeroizing;

const SILENCE: Duration = Duration::from_secs(5);

const fn report(seen: u64, is_active: bool, is_second: bool) -> PeerReport {
    PeerReport { seen, is_active, is_second }
}

struct Steps {
    machine: Machine,
    now: Instant,
    conns: u64,
    closed: BTreeSet<ConnId>,
    replies: Vec<(ConnId, ClientReply)>,
    requests: Vec<(ConnId, Request)>,
    devices: BTreeSet<ConnId>,
}

impl Steps {
    fn new(is_second: bool) -> Self {
        let peer = SocketAddr::from(([127, 0, 0, 1], 1));
        let pair = Some(PairConfig { peer, is_second, silence: SILENCE });
        let config = Arc::new(ControllerConfig { pair, ..ControllerConfig::new() });
        let machine = Machine::new(config, 1, Entropy::Seeded(1), Instant::ZERO).expect("valid");
        Self {
            machine,
            now: Instant::ZERO,
            conns: 0,
            closed: BTreeSet::new(),
            replies: Vec::new(),
            requests: Vec::new(),
            devices: BTreeSet::new(),
        }
    }

    /// The first one, which is active because the other one does not answer.
    fn active() -> Self {
        let mut steps = Self::new(false);
        steps.machine.handle_peer_answer(None, steps.now, steps.now);
        steps
    }

    fn client(&mut self) -> ConnId {
        self.conns += 1;
        assert!(self.machine.connect_client(ConnId(self.conns)));
        ConnId(self.conns)
    }

    fn device(&mut self) -> (ConnId, bool) {
        self.conns += 1;
        let conn = ConnId(self.conns);
        self.devices.insert(conn);
        (conn, self.machine.connect_device(conn, announce("leaf0", 1, None), self.now))
    }

    fn join(&mut self, rank: u32, world: u32) -> ConnId {
        let conn = self.client();
        self.machine.handle_request(conn, ClientRequest::Join(request(rank, world)), self.now);
        conn
    }

    /// Let the machine do everything that is due, and collect what it sends.
    fn settle(&mut self) {
        loop {
            if self.machine.poll_timeout() <= self.now {
                self.machine.handle_timeout(self.now);
            }
            let Some(plan) = self.machine.poll_plan() else { break };
            self.machine.handle_plan(plan.run(&ControllerConfig::new()), self.now);
        }
        while let Some((conn, output)) = self.machine.poll_transmit() {
            match output {
                Output::Close => _ = self.closed.insert(conn),
                Output::Frames(parts) => {
                    let mut buffer = FrameBuffer::new(1 << 20);
                    parts.iter().map(Frames::bytes).for_each(|bytes| buffer.push(bytes));
                    if self.devices.contains(&conn) {
                        let sent: Envelope<Request> = buffer.take_message().expect("valid").expect("whole");
                        self.requests.push((conn, sent.message));
                    } else {
                        let sent = buffer.take_message().expect("valid").expect("whole");
                        self.replies.push((conn, sent));
                    }
                }
            }
        }
    }

    fn replies(&mut self) -> Vec<(ConnId, ClientReply)> {
        self.settle();
        std::mem::take(&mut self.replies)
    }

    fn lose(&mut self, conns: &[ConnId]) -> Vec<(ConnId, ClientReply)> {
        self.machine.handle_disconnects(conns.iter().copied(), self.now);
        self.replies()
    }
}

#[test]
fn standby_refuses_joins_and_devices_and_takes_over_by_what_they_say() {
    let mut steps = Steps::new(true);
    steps.machine.handle_peer_answer(Some(report(1, true, false)), steps.now, steps.now);
    let peer = SocketAddr::from(([127, 0, 0, 1], 1));
    let rank = steps.join(0, 1);
    let refused = ClientReply::Refused(JoinRefusal::Standby { active: Some(peer) });
    assert_eq!(steps.replies(), [(rank, refused)]);
    let (device, is_accepted) = steps.device();
    steps.settle();
    let rejected = Request::Rejected(Rejection::Standby { active: Some(peer) });
    assert_eq!(
        (is_accepted, &steps.requests[..], steps.closed.contains(&device)),
        (false, &[(device, rejected)][..], true)
    );
    // Nobody has heard of the first one for as long as the pair waits.
    for _ in 0..5 {
        steps.now = steps.now + SILENCE / 5;
        steps.machine.handle_peer_answer(None, steps.now, steps.now);
        steps.settle();
    }
    steps.requests.clear();
    let (device, is_accepted) = steps.device();
    steps.settle();
    assert!(is_accepted, "it comes because it has lost the first one");
    let first = steps.requests.first().expect("a claim");
    assert!(matches!(first, (conn, Request::Claim(claim)) if *conn == device && claim.term == 2), "{first:?}");
    assert_eq!(steps.machine.report().pair.map(|pair| (pair.role, pair.term)), Some((PairRole::Active, 2)));
}

#[test]
fn active_controller_claims_its_term_on_every_connection_again_and_again() {
    let mut steps = Steps::active();
    let (device, _) = steps.device();
    let client = steps.client();
    steps.machine.notify_term(client, 0);
    steps.settle();
    steps.requests.clear();
    steps.replies.clear();
    for _ in 0..3 {
        steps.now = steps.now + SILENCE / 5;
        steps.settle();
    }
    let claims = steps.requests.iter().filter(|(conn, sent)| *conn == device && matches!(sent, Request::Claim(_)));
    assert_eq!((claims.count(), steps.replies.len()), (3, 3));
    assert!(matches!(steps.replies[0], (conn, ClientReply::Leading(claim)) if conn == client && claim.term == 1));
}

#[test]
fn device_of_a_higher_term_fences_the_controller_and_ends_all_connections() {
    let mut steps = Steps::active();
    let (device, _) = steps.device();
    let rank = steps.join(0, 2);
    let client = steps.client();
    steps.settle();
    // Another client cannot do that.
    steps.machine.handle_response(client, refused_term(9), steps.now);
    steps.machine.notify_term(client, 9);
    steps.settle();
    assert!(steps.closed.is_empty());
    steps.machine.handle_response(device, refused_term(2), steps.now);
    steps.settle();
    assert_eq!(steps.closed, BTreeSet::from([device, rank, client]));
    let report = steps.machine.report();
    assert_eq!((report.devices.len(), report.jobs.len()), (0, 0));
    assert_eq!(report.pair.map(|pair| (pair.role, pair.term)), Some((PairRole::Standby, 2)));
    // Late messages on those connections change nothing.
    steps.replies.clear();
    steps.machine.handle_request(rank, ClientRequest::Leave, steps.now);
    assert_eq!(steps.lose(&[device, rank, client]), []);
}

fn refused_term(seen: u64) -> Envelope<Response> {
    Envelope { id: u32::MAX, message: Response::Refused(Refusal::OldTerm { seen }) }
}

#[test]
fn plan_and_report_of_an_earlier_role_are_dropped() {
    let mut steps = Steps::active();
    let (device, _) = steps.device();
    let rank = steps.join(0, 1);
    let client = steps.client();
    steps.machine.handle_request(client, ClientRequest::Status, steps.now);
    steps.machine.handle_timeout(steps.now);
    let plan = steps.machine.poll_plan().expect("the job is whole").run(&ControllerConfig::new());
    steps.machine.handle_response(device, refused_term(2), steps.now);
    steps.machine.handle_plan(plan, steps.now);
    assert!(steps.replies().iter().all(|(conn, _)| *conn != rank), "the job is not known any more");
    assert!(steps.machine.report().jobs.is_empty());
}

/// Ranks that are cut off from a controller that does not reach the other one may have resumed the job there.
#[test]
fn job_without_majority_is_given_up_only_if_the_other_controller_may_have_the_rest() {
    for hears_peer in [false, true] {
        let mut steps = Steps::active();
        let ranks: Vec<_> = (0..4).map(|rank| steps.join(rank, 4)).collect();
        let joined = steps.replies();
        assert!(joined.iter().all(|(_, reply)| matches!(reply, ClientReply::Joined(_))) && joined.len() == 4);
        if hears_peer {
            steps.machine.handle_peer_answer(Some(report(0, false, true)), steps.now, steps.now);
        }
        let lost = |of: u32| ClientReply::RankLost(Rank(of));
        let told = steps.lose(&[ranks[3]]);
        assert_eq!(told, [0, 1, 2].map(|rank| (ranks[rank], lost(3))), "a majority is left");
        let told = steps.lose(&[ranks[2]]);
        if hears_peer {
            assert_eq!(told, [0, 1].map(|rank| (ranks[rank], lost(2))));
            assert!(steps.closed.is_empty());
        } else {
            assert_eq!(told, []);
            assert!(ranks[..2].iter().all(|rank| steps.closed.contains(rank)), "{:?}", steps.closed);
            assert_eq!(steps.lose(&ranks[..2]), []);
            assert!(steps.machine.report().jobs.is_empty());
        }
    }
}

fn part_of(addr: SocketAddr, key: &sumac_hal::ctrl::secure::Key) -> Option<StatusReport> {
    status(ControllerAddr { key: Some(key.clone()), ..addr.into() }).ok()
}

#[test]
fn controllers_with_keys_report_to_each_other_by_an_operators_key_only() {
    let mut store = KeyStore::default();
    let mut add = |byte, principal| store.add(principal, None, &Zeroizing::new([byte; 40])).expect("valid").clone();
    let tenant = add(1, Principal::Tenant { name: "ml".into() });
    let addrs = [0; 2].map(|_| TcpListener::bind("127.0.0.1:0").expect("a port")).map(|port| port.local_addr());
    let addrs = addrs.map(|addr| addr.expect("bound"));
    let config = |store: &KeyStore, index: usize| {
        let pair = PairConfig { peer: addrs[1 - index], is_second: index == 1, silence: Duration::from_secs(2) };
        let (pair, keys) = (Some(pair), Some(Arc::new(store.clone())));
        ControllerConfig { listen: addrs[index], pair, keys, ..ControllerConfig::new() }
    };
    let without = Controller::start(config(&store, 0)).expect_err("no operator");
    assert!(matches!(without, ControllerError::NoOperatorKey), "{without}");
    let operator = store.add(Principal::Operator, None, &Zeroizing::new([2; 40])).expect("valid").clone();
    let _pair = [0, 1].map(|index| Controller::start(config(&store, index)).expect("a port"));
    let deadline = std::time::Instant::now() + TEST_TIMEOUT;
    let parts = || addrs.map(|addr| part_of(addr, &operator)?.pair.map(|pair| (pair.role, pair.term, pair.peer_role)));
    let (active, standby) = (PairRole::Active, PairRole::Standby);
    while parts() != [Some((active, 1, Some(standby))), Some((standby, 1, Some(active)))] {
        assert!(std::time::Instant::now() < deadline, "{:?}", parts());
        thread::sleep(Duration::from_millis(20));
    }
    let as_tenant = ControllerAddr { key: Some(tenant), ..addrs[0].into() };
    let refused = super::super::connect::report_to_peer(&as_tenant, report(9, true, true), TEST_TIMEOUT);
    assert!(matches!(&refused, Err(ClientError::Refused(JoinRefusal::KeyScope { .. }))), "{refused:?}");
    assert_eq!(part_of(addrs[0], &operator).and_then(|report| report.pair).map(|pair| pair.term), Some(1));
}

/// A scripted controller of a pair: accepts one client, and claims a term.
fn accept_and_claim(listener: &TcpListener, term: u64) -> (TcpStream, FrameReader<TcpStream>, u64) {
    let (mut stream, _) = listener.accept().expect("a client");
    let mut reader = FrameReader::new(stream.try_clone().expect("a file"));
    let Ok(Hello::FailoverClient { seen }) = reader.recv() else { panic!("a client that knows both addresses") };
    let claim = sumac_hal::ctrl::TermClaim { term, silence_ms: 10_000 };
    send(&mut stream, &ClientReply::Leading(claim)).expect("it listens");
    (stream, reader, seen)
}

/// The rank has joined in term 2. It takes nothing from a controller of term 1, in whatever order it finds them.
#[test]
fn rank_resumes_at_no_controller_of_a_lower_term() {
    let ports = [0; 2].map(|_| TcpListener::bind("127.0.0.1:0").expect("a port"));
    let addrs = ports.each_ref().map(|port| port.local_addr().expect("bound"));
    let controller = ControllerAddr { alternatives: vec![addrs[1]], ..addrs[0].into() };
    let (to, notices) = channel();
    let on_notice = move |notice| {
        let _ = to.send(notice);
        None
    };
    let joins = thread::spawn(move || Session::join(controller, request(0, 1), TEST_TIMEOUT, on_notice));
    let (mut stream, mut reader, seen) = accept_and_claim(&ports[0], 2);
    assert_eq!(seen, 0);
    let Ok(ClientRequest::Join(_)) = reader.recv() else { panic!("a rank that joins") };
    let membership = Membership {
        tree: Err("no device".into()),
        queue: None,
        striping: Default::default(),
        mesh: vec![addrs[0]],
        recovery_mesh: vec![addrs[0]],
        secret: JobSecret::new([7; 32]),
        expression: Vec::new(),
        table: CostTable::emulated(),
        shape: Default::default(),
    };
    send(&mut stream, &ClientReply::Joined(Box::new(membership))).expect("it listens");
    let (session, _) = joins.join().expect("no panic").expect("joined");
    drop((stream, reader));
    let hear = |wanted: Notice| {
        let heard =
            notices.iter().find(|notice| matches!(notice, Notice::ControllerLost | Notice::ControllerBack { .. }));
        assert_eq!(heard, Some(wanted));
    };
    hear(Notice::ControllerLost);
    // The first one has come back and remembers nothing. The rank asks the other one at once, and nothing of this one.
    let (_first, mut reader, seen) = accept_and_claim(&ports[0], 1);
    assert_eq!(seen, 2);
    let (mut second, mut resumes, seen) = accept_and_claim(&ports[1], 4);
    assert_eq!(seen, 2);
    assert!(reader.recv::<ClientRequest>().is_err(), "it has closed the connection");
    let Ok(ClientRequest::Resume(_)) = resumes.recv() else { panic!("a rank that resumes") };
    send(&mut second, &ClientReply::Resumed { view: 1 }).expect("it listens");
    hear(Notice::ControllerBack { view: 1 });
    // A claim of another term ends a connection, too.
    let claim = sumac_hal::ctrl::TermClaim { term: 3, silence_ms: 10_000 };
    send(&mut second, &ClientReply::Leading(claim)).expect("it listens");
    hear(Notice::ControllerLost);
    drop(ports);
    session.leave();
}

/// A controller that was stopped keeps its connections open.
#[test]
fn rank_takes_a_silent_controller_for_lost() {
    let ports = [0; 2].map(|_| TcpListener::bind("127.0.0.1:0").expect("a port"));
    let addrs = ports.each_ref().map(|port| port.local_addr().expect("bound"));
    let controller = ControllerAddr { alternatives: vec![addrs[1]], ..addrs[0].into() };
    let mut short = request(0, 1);
    short.job = "silent".into();
    let joins = thread::spawn(move || Session::join(controller, short, TEST_TIMEOUT, |_| None).map(drop));
    let (mut stream, _) = ports[0].accept().expect("a client");
    let mut reader = FrameReader::new(stream.try_clone().expect("a file"));
    assert!(matches!(reader.recv(), Ok(Hello::FailoverClient { seen: 0 })));
    let claim = sumac_hal::ctrl::TermClaim { term: 1, silence_ms: 200 };
    send(&mut stream, &ClientReply::Leading(claim)).expect("it listens");
    let Ok(ClientRequest::Join(_)) = reader.recv() else { panic!("a rank that joins") };
    // It says nothing more, and the rank joins elsewhere.
    let again = thread::spawn(move || {
        let (mut stream, ..) = accept_and_claim(&ports[0], 2);
        let refusal = JoinRefusal::Running { job: "silent".into() };
        send(&mut stream, &ClientReply::Refused(refusal)).expect("it listens");
        stream
    });
    let error = joins.join().expect("no panic").expect_err("refused");
    assert!(matches!(error, ClientError::Refused(JoinRefusal::Running { .. })), "{error}");
    drop(again.join());
}

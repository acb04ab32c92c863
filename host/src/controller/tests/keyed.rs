//! Controllers with keys: who is accepted for what, and what happens to everybody else.

mod attacks;

use super::super::connect::{CONNECT_TIMEOUT, ControllerAddr};
use super::super::keys::{KeyStore, Principal};
use super::super::proto::{ClientReply, ClientRequest, JoinRefusal, StatusReport};
use super::replan::{SOON, request};
use super::*;
use crate::secret::JobSecret;
use std::io::{Read, Write};
use sumac_hal::ctrl::secure::{
    self, AwaitingReply, CHALLENGE_LEN, ControlReader, ControlWriter, HandshakeError, Initiator, Key, KeyId,
    KeyRefusal, MESSAGE_LEN, REPLY_LEN,
};
use sumac_hal::ctrl::{JobTicket, Rejection};
use zeroize::Zeroizing;

/// A controller's keys.
struct Keys {
    store: KeyStore,
    leaf: Key,
    ml: Key,
    other: Key,
    operator: Key,
}

impl Keys {
    fn new() -> Self {
        let mut store = KeyStore::default();
        let mut add = |byte, principal, expires| {
            store.add(principal, expires, &Zeroizing::new([byte; 40])).expect("valid").clone()
        };
        let leaf = add(1, Principal::Device { names: vec!["leaf0".into()] }, None);
        let tenant = |name: &str| Principal::Tenant { name: name.into() };
        let (ml, other) = (add(2, tenant("ml"), None), add(3, tenant("other"), None));
        let operator = add(4, Principal::Operator, None);
        Self { store, leaf, ml, other, operator }
    }

    fn config(&self) -> ControllerConfig {
        ControllerConfig { keys: Some(Arc::new(self.store.clone())), ..ControllerConfig::new() }
    }

    fn controller(&self) -> Controller {
        Controller::start(self.config()).expect("a port")
    }
}

fn at(controller: &Controller, key: &Key) -> ControllerAddr {
    ControllerAddr { key: Some(key.clone()), ..controller.local_addr().into() }
}

fn of_tenant(tenant: &str, job: &str, rank: u32, world: u32) -> JoinRequest {
    let terms = Terms { tenant: tenant.into(), ..Terms::default() };
    JoinRequest { job: job.into(), terms, ..request(rank, world) }
}

fn join_one(controller: &Controller, key: &Key, tenant: &str, job: &str) -> Result<(Session, Membership), ClientError> {
    Session::join(at(controller, key), of_tenant(tenant, job, 0, 1), TEST_TIMEOUT, |_| None)
}

type Secured = (ControlWriter<TcpStream>, FrameReader<ControlReader<TcpStream>>);

/// Connect, with a key or without, and send nothing more.
fn dial(controller: &Controller, key: Option<&Key>) -> Secured {
    let stream = TcpStream::connect(controller.local_addr()).expect("a controller");
    let (sealer, opener) =
        key.map(|key| secure::connect_within(&stream, key, CONNECT_TIMEOUT).expect("a good key")).unzip();
    stream.set_read_timeout(Some(SOON)).expect("a socket");
    let reader = ControlReader::new(stream.try_clone().expect("a file"), opener);
    (ControlWriter::new(stream, sealer), FrameReader::new(reader))
}

/// Register a device, and return what the controller requests first.
fn register(controller: &Controller, key: Option<&Key>, name: &str) -> (Secured, Request) {
    let (mut writer, mut reader) = dial(controller, key);
    send(&mut writer, &Hello::Device(announce(name, 1, None))).expect("it listens");
    let request = reader.recv::<Envelope<Request>>().expect("a request").message;
    ((writer, reader), request)
}

fn text_of<T>(result: Result<T, ClientError>) -> String {
    result.err().expect("refused").to_string()
}

#[test]
fn keys_are_good_for_their_principals_and_nothing_else() {
    let keys = Keys::new();
    let controller = keys.controller();
    let (_device, request) = register(&controller, Some(&keys.leaf), "leaf0");
    assert_eq!(request, Request::Identify);
    assert_eq!(register(&controller, Some(&keys.leaf), "leaf1").1, Request::Rejected(Rejection::KeyName));
    assert_eq!(register(&controller, Some(&keys.operator), "leaf1").1, Request::Rejected(Rejection::KeyName));
    let _job = join_one(&controller, &keys.ml, "ml", "job").expect("its own job");
    let refused = text_of(join_one(&controller, &keys.ml, "other", "job2"));
    assert!(refused.contains("tenant ml") && refused.contains("tenant other"), "{refused}");
    // A job of the same name does not let another tenant in.
    assert!(text_of(join_one(&controller, &keys.other, "other", "job")).contains("already running"));
    assert!(text_of(join_one(&controller, &keys.leaf, "ml", "job3")).contains("device leaf0"));
    assert!(text_of(join_one(&controller, &keys.operator, "ml", "job4")).contains("operator"));
    assert!(text_of(join_one(&controller, &keys.ml, "default", "job5")).contains("SUMAC_TENANT"));
    let join_on = |key: &Key| {
        let request = of_tenant("ml", "pinned", 0, 1);
        Session::join_on(at(&controller, key), request, vec!["absent".into()], TEST_TIMEOUT, |_| None)
    };
    assert!(text_of(join_on(&keys.ml)).contains("on chosen devices"));
    assert!(join_on(&keys.operator).is_ok());
}

#[test]
fn host_device_needs_the_key_of_its_tenant_too() {
    let keys = Keys::new();
    let controller = keys.controller();
    let (_device, _) = register(&controller, Some(&keys.leaf), "leaf0");
    let mut ranks = [0, 1].map(|rank| {
        let mut request = of_tenant("ml", "job", rank, 2);
        request.terms.hierarchical = true;
        request.mesh_addr.set_ip([10, 0, 0, 1].into());
        (request.transport, request.machine) = (Transport::Auto, Some(text(HERE)));
        let (mut writer, reader) = dial(&controller, Some(&keys.ml));
        send(&mut writer, &Hello::Client).expect("it listens");
        send(&mut writer, &ClientRequest::Join(request)).expect("it listens");
        (writer, reader)
    });
    let ClientReply::LeadHost(host) = ranks[0].1.recv::<ClientReply>().expect("a reply") else { panic!("it is asked") };
    let connect = |key: Option<&Key>| {
        let announce = announce(&host.device, 1, attach_point(1 << 20));
        let ticket = JobTicket { job: text("job"), rank: 0, proof: host.proof.bytes() };
        let (mut writer, mut reader) = dial(&controller, key);
        send(&mut writer, &Hello::HostDevice { announce, ticket }).expect("it listens");
        ((writer, reader.recv::<Envelope<Request>>().expect("a request").message), reader)
    };
    for (key, why) in [
        (Some(&keys.other), Rejection::KeyName),
        (Some(&keys.leaf), Rejection::KeyName),
        (Some(&keys.operator), Rejection::KeyName),
        (None, Rejection::KeyRequired),
    ] {
        assert_eq!(connect(key).0.1, Request::Rejected(why));
    }
    assert_eq!(connect(Some(&keys.ml)).0.1, Request::Identify);
}

#[test]
fn resumed_job_needs_the_key_of_its_tenant_too() {
    let keys = Keys::new();
    let controller = keys.controller();
    let (mut writer, mut reader) = dial(&controller, Some(&keys.other));
    send(&mut writer, &Hello::Client).expect("it listens");
    let resumption = super::super::proto::ResumeRequest {
        request: of_tenant("ml", "job", 0, 1),
        devices: Vec::new(),
        view: 0,
        shrink_count: 0,
        secret: JobSecret::new([7; 32]),
        expression: Vec::new(),
    };
    send(&mut writer, &ClientRequest::Resume(Box::new(resumption))).expect("it listens");
    let reply = reader.recv::<ClientReply>().expect("a reply");
    assert!(matches!(reply, ClientReply::Refused(JoinRefusal::KeyScope { .. })), "{reply:?}");
}

#[test]
fn report_shows_tenants_their_own_and_operators_everything() {
    let keys = Keys::new();
    let controller = keys.controller();
    let (_device, _) = register(&controller, Some(&keys.leaf), "leaf0");
    let _jobs = [("ml", &keys.ml), ("other", &keys.other)]
        .map(|(tenant, key)| join_one(&controller, key, tenant, &format!("job-{tenant}")).expect("its own job"));
    let seen = |key: &Key| {
        let report: StatusReport = status(at(&controller, key)).expect("a report");
        let jobs: Vec<_> = report.jobs.into_iter().map(|job| job.name).collect();
        let tenants: Vec<_> = report.tenants.into_iter().map(|tenant| tenant.name).collect();
        (jobs, tenants, report.devices.len())
    };
    assert_eq!(seen(&keys.ml), (vec!["job-ml".into()], vec!["ml".into()], 0));
    assert_eq!(seen(&keys.other), (vec!["job-other".into()], vec!["other".into()], 0));
    let all = (vec!["job-ml".into(), "job-other".into()], vec!["ml".into(), "other".into()], 1);
    assert_eq!(seen(&keys.operator), all);
    assert!(text_of(status(at(&controller, &keys.leaf))).contains("reports"));
}

#[test]
fn peers_without_a_key_are_refused_by_name_on_loopback_too() {
    let keys = Keys::new();
    let controller = keys.controller();
    let refused = text_of(status(controller.local_addr()));
    assert!(refused.contains("SUMAC_KEY_FILE"), "{refused}");
    let joined = Session::join(controller.local_addr(), request(0, 1), TEST_TIMEOUT, |_| None);
    assert!(matches!(joined, Err(ClientError::Refused(JoinRefusal::KeyRequired))), "{joined:?}");
    assert_eq!(register(&controller, None, "leaf0").1, Request::Rejected(Rejection::KeyRequired));
    // Before it requests anything, so that it holds no connection.
    let (mut writer, mut reader) = dial(&controller, None);
    send(&mut writer, &Hello::Client).expect("it listens");
    assert_eq!(reader.recv::<ClientReply>().expect("a reply"), ClientReply::Refused(JoinRefusal::KeyRequired));
    assert_eq!(status(at(&controller, &keys.operator)).expect("a report").devices, []);
}

#[test]
fn bad_keys_are_refused_with_their_reasons() {
    let mut keys = Keys::new();
    let expired =
        keys.store.add(Principal::Operator, Some(1_000_000), &Zeroizing::new([5; 40])).expect("valid").clone();
    keys.store.revoke(keys.other.id()).expect("it has that key");
    let controller = keys.controller();
    for (key, reason) in [
        (Key::new(KeyId(9), [9; 32]), "does not know this key, or has another secret"),
        (Key::new(keys.ml.id(), [9; 32]), "does not know this key, or has another secret"),
        (keys.other.clone(), "was revoked"),
        (expired, "has expired"),
    ] {
        let refused = text_of(status(at(&controller, &key)));
        assert!(refused.contains(reason) && refused.contains("sumac key new"), "{refused}");
        assert!(refused.contains(&key.id().to_string()) && !refused.contains("0909"), "{refused}");
    }
    let unkeyed = Controller::start(ControllerConfig::new()).expect("a port");
    let refused = text_of(status(at(&unkeyed, &keys.ml)));
    assert!(refused.contains("without keys") && refused.contains("--keys"), "{refused}");
}

#[test]
fn clock_of_a_controller_decides_on_expiry() {
    let mut keys = Keys::new();
    let day = 86_400;
    let key = keys.store.add(Principal::Operator, Some(100 * day), &Zeroizing::new([5; 40])).expect("valid").clone();
    for (days, is_valid) in [(99, true), (100, false)] {
        let started_ms = Some(days * day * 1000);
        let controller = Controller::start(ControllerConfig { started_ms, ..keys.config() }).expect("a port");
        assert_eq!(status(at(&controller, &key)).is_ok(), is_valid, "day {days}");
    }
}

#[test]
fn address_beyond_loopback_needs_keys() {
    let listen = SocketAddr::from(([0, 0, 0, 0], 0));
    let refused = Controller::start(ControllerConfig { listen, ..ControllerConfig::new() }).err();
    let refused = refused.expect("no keys").to_string();
    assert!(refused.contains("0.0.0.0") && refused.contains("--keys"), "{refused}");
    let keys = Keys::new();
    let controller = Controller::start(ControllerConfig { listen, ..keys.config() }).expect("it has keys");
    let addr = SocketAddr::from(([127, 0, 0, 1], controller.local_addr().port()));
    assert!(status(ControllerAddr { key: Some(keys.operator), ..addr.into() }).is_ok());
}

/// Ranks of different hosts may all give loopback addresses, by mistake.
#[test]
fn results_are_multicast_only_if_the_controller_listens_on_loopback() {
    let keys = Keys::new();
    for (ip, is_shared) in [([127, 0, 0, 1], true), ([0, 0, 0, 0], false)] {
        let listen = SocketAddr::from((ip, 0));
        let controller = Controller::start(ControllerConfig { listen, ..keys.config() }).expect("it has keys");
        let addr = SocketAddr::from(([127, 0, 0, 1], controller.local_addr().port()));
        let stream = TcpStream::connect(addr).expect("a controller");
        let (sealer, opener) = secure::connect_within(&stream, &keys.leaf, CONNECT_TIMEOUT).expect("a good key");
        let mut reader = FrameReader::new(ControlReader::new(stream.try_clone().expect("a file"), Some(opener)));
        let mut writer = ControlWriter::new(stream, Some(sealer));
        send(&mut writer, &Hello::Device(announce("leaf0", 1, None))).expect("it listens");
        let device = announce("leaf0", 1, None);
        thread::spawn(move || {
            while let Ok(Envelope { id, message }) = reader.recv::<Envelope<Request>>() {
                let is_identify = message == Request::Identify;
                let message = if is_identify { Response::Announce(device.clone()) } else { Response::Done };
                let _ = send(&mut writer, &Envelope { id, message });
            }
        });
        let operator = ControllerAddr { key: Some(keys.operator.clone()), ..addr.into() };
        while status(operator.clone()).expect("a report").devices.is_empty() {
            thread::yield_now();
        }
        let ranks: Vec<_> = (0..2)
            .map(|rank| {
                let (here, request) =
                    (ControllerAddr { key: Some(keys.ml.clone()), ..addr.into() }, of_tenant("ml", "job", rank, 2));
                thread::spawn(move || Session::join(here, request, TEST_TIMEOUT, |_| None).expect("its own job"))
            })
            .collect();
        for rank in ranks {
            assert_eq!(tree(&rank.join().expect("no panic")).shared.is_some(), is_shared, "{listen}");
        }
    }
}

#[test]
fn revoked_key_ends_its_connections_and_new_keys_become_valid() {
    let mut keys = Keys::new();
    let path = std::env::temp_dir().join(format!("sumac-keyed-{}.toml", std::process::id()));
    keys.store.write(&path).expect("a folder");
    let config = ControllerConfig { keys_file: Some(path.clone()), ..keys.config() };
    let controller = Controller::start(config).expect("a port");
    let _keeps = join_one(&controller, &keys.other, "other", "keeps").expect("its own job");
    let (notices, noticed) = channel();
    let notify = move |notice| {
        let _ = notices.send(notice);
        None
    };
    let _ends = Session::join(at(&controller, &keys.ml), of_tenant("ml", "ends", 0, 1), TEST_TIMEOUT, notify);
    keys.store.revoke(keys.ml.id()).expect("it has that key");
    let added = keys.store.add(Principal::Operator, None, &Zeroizing::new([6; 40])).expect("valid").clone();
    keys.store.write(&path).expect("a folder");
    while noticed.recv_timeout(TEST_TIMEOUT).expect("its connection ends") != Notice::ControllerLost {}
    let report = status(at(&controller, &added)).expect("a new key");
    assert_eq!(report.jobs.iter().map(|job| job.name.as_str()).collect::<Vec<_>>(), ["keeps"]);
    assert!(text_of(status(at(&controller, &keys.ml))).contains("was revoked"));
    std::fs::remove_file(&path).expect("a file");
}

#[test]
fn key_revoked_between_challenge_and_message_is_refused() {
    let mut keys = Keys::new();
    let path = std::env::temp_dir().join(format!("sumac-keyed-between-{}.toml", std::process::id()));
    keys.store.write(&path).expect("a folder");
    let config = ControllerConfig { keys_file: Some(path.clone()), ..keys.config() };
    let controller = Controller::start(config).expect("a port");
    let (notices, noticed) = channel();
    let notify = move |notice| {
        let _ = notices.send(notice);
        None
    };
    let _ends = Session::join(at(&controller, &keys.ml), of_tenant("ml", "ends", 0, 1), TEST_TIMEOUT, notify);
    let ml = keys.ml.clone();
    let exchanging = || {
        let mut half = TcpStream::connect(controller.local_addr()).expect("a controller");
        half.set_read_timeout(Some(TEST_TIMEOUT)).expect("a socket");
        let (initiator, hello) = Initiator::new(&ml, [7; 32]);
        half.write_all(&hello).expect("it listens");
        let mut challenge = [0; CHALLENGE_LEN];
        half.read_exact(&mut challenge).expect("a challenge");
        let (awaiting, message) = initiator.handle_challenge(&challenge).expect("no refusal");
        (half, awaiting, message)
    };
    let finish = |(mut half, awaiting, message): (TcpStream, AwaitingReply, [u8; MESSAGE_LEN])| {
        half.write_all(&message).expect("it listens");
        let mut reply = [0; REPLY_LEN];
        half.read_exact(&mut reply).expect("a reply");
        awaiting.handle_reply(&reply).map(drop)
    };
    assert_eq!(finish(exchanging()), Ok(()), "it is a good key");
    let half = exchanging();
    keys.store.revoke(keys.ml.id()).expect("it has that key");
    keys.store.write(&path).expect("a folder");
    // The controller has read its store again.
    while noticed.recv_timeout(TEST_TIMEOUT).expect("its connection ends") != Notice::ControllerLost {}
    let refused = HandshakeError::Refused { id: keys.ml.id(), refusal: KeyRefusal::Revoked };
    assert_eq!(finish(half), Err(refused));
    std::fs::remove_file(&path).expect("a file");
}

/// A controller of many ranks takes longer for a key exchange than a rank waits for one answer.
#[test]
fn rank_tries_again_if_the_controller_exchanges_no_keys_in_time() {
    let keys = Keys::new();
    let controller = keys.controller();
    let busy = TcpListener::bind("127.0.0.1:0").expect("a port");
    let addr = ControllerAddr { key: Some(keys.ml.clone()), ..busy.local_addr().expect("bound").into() };
    thread::scope(|scope| {
        scope.spawn(|| {
            let _silent = busy.accept().expect("the first attempt");
            let (rank, _) = busy.accept().expect("the second attempt");
            let served = TcpStream::connect(controller.local_addr()).expect("a controller");
            thread::scope(|scope| {
                for (mut from, mut to) in [(&rank, &served), (&served, &rank)] {
                    scope.spawn(move || {
                        let _ = std::io::copy(&mut from, &mut to);
                        let _ = to.shutdown(std::net::Shutdown::Write);
                    });
                }
            });
        });
        let joined = Session::join(addr, of_tenant("ml", "late", 0, 1), TEST_TIMEOUT, |_| None);
        if joined.is_err() {
            // The other thread still waits for a second attempt.
            TcpStream::connect(busy.local_addr().expect("bound")).expect("a listener");
        }
        assert!(joined.is_ok(), "{}", text_of(joined));
    });
}

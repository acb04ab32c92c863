//! Attacks on the controller's port.

use crate::testbed::{JobConfig, LONG, TestBed, Tools, wait_until};
use crate::traffic::{Random, client_handshake, dial, dial_within, drip, frame_of, idle, send_once};
use rustix::net::sockopt::set_socket_recv_buffer_size;
use rustix::net::{AddressFamily, SocketFlags, SocketType, connect, socket_with};
use rustix::process::{Resource, Rlimit, prlimit};
use std::io::Write;
use std::net::{SocketAddr, TcpStream};
use std::time::{Duration, Instant};
use sumac::controller::proto::{ClientReply, ClientRequest, JoinRequest, ResumeRequest, Terms};
use sumac::exec::JobSecret;
use sumac::{Order, Transport};
use sumac_hal::ctrl::{FrameReader, StreamError, send};
use sumac_hal::ids::Rank;
use sumac_hal::shm::DeviceUsers;

const OVER_UDP: JobConfig = JobConfig { transport: Transport::Udp, schedules: true };
const OVER_SHM: JobConfig = JobConfig { transport: Transport::Shm, schedules: true };

/// Return a rank's request to join a job.
pub(crate) fn request(job: &str, (rank, world): (u32, u32), tenant: &str) -> JoinRequest {
    JoinRequest {
        job: job.into(),
        rank: Rank(rank),
        world,
        host: None,
        order: Order::Arrival,
        mesh_addr: ([127, 0, 0, 1], 9).into(),
        recovery_addr: ([127, 0, 0, 1], 9).into(),
        max_packet_len_bytes: 65_000,
        transport: Transport::Udp,
        machine: None,
        device_users: DeviceUsers::own(),
        terms: Terms { tenant: tenant.into(), ..Terms::default() },
    }
}

/// A raw client.
pub(crate) struct Client {
    pub(crate) stream: TcpStream,
    reader: FrameReader<TcpStream>,
}

impl Client {
    pub(crate) fn open(addr: SocketAddr) -> Self {
        let mut stream = dial_within(addr, LONG).expect("the controller listens");
        stream.write_all(&client_handshake()).expect("the handshake is sent");
        let reader = FrameReader::new(stream.try_clone().expect("a descriptor"));
        Self { stream, reader }
    }

    /// Send a request; false if the connection has ended.
    pub(crate) fn ask(&mut self, request: &ClientRequest) -> bool {
        send(&mut self.stream, request).is_ok()
    }

    /// Wait for the next reply or the end of the connection.
    pub(crate) fn answer(&mut self) -> Result<ClientReply, StreamError> {
        self.reader.recv()
    }
}

/// Handshakes of one byte every two seconds are disconnected.
pub(crate) fn drip_handshakes(tools: &Tools) {
    let mut testbed = TestBed::start(tools).with_job(OVER_UDP);
    let before = testbed.count();
    let mut streams = idle(testbed.addr, 20);
    // Longer than any handshake.
    let handshake = frame_of(&[0; 200]);
    let left = drip(&mut streams, &handshake, Duration::from_secs(2), Duration::from_secs(22));
    assert_eq!(left, 0, "connections still open after 22 s of a slow handshake");
    testbed.check_unaffected(&before);
}

/// Random bytes, frames of random bytes, and frames of mutated messages.
pub(crate) fn garbage(tools: &Tools) {
    let mut testbed = TestBed::start(tools).with_job(OVER_SHM);
    let (before, mut random) = (testbed.count(), Random(1));
    let mut good = Vec::new();
    let messages = [
        ClientRequest::Join(request("garbage", (0, 2), "default")),
        ClientRequest::JoinOn { request: request("garbage", (0, 2), "default"), devices: vec!["one".into()] },
        ClientRequest::Survivors,
        ClientRequest::Decline { view: 0, device: Some("one".into()), why: "no reason".into() },
        ClientRequest::Pause { view: 0, at: 7 },
    ];
    for message in &messages {
        let mut frame = Vec::new();
        send(&mut frame, message).expect("it is short");
        good.push(frame.split_off(12));
    }
    for nth in 0..400 {
        let mut bytes = client_handshake();
        let body = &good[nth % good.len()];
        let mut mutated = body.clone();
        for _ in 0..1 + random.below(4) {
            let at = random.below(mutated.len() as u64) as usize;
            mutated[at] = random.next() as u8;
        }
        match nth % 6 {
            // Instead of the handshake: random bytes, or a frame of random bytes.
            0 => bytes = random.bytes(1 + nth),
            1 => bytes = frame_of(&random.bytes(nth)),
            // After the handshake.
            2 => bytes.extend(frame_of(&random.bytes(nth))),
            3 => bytes.extend(&frame_of(body)[..12 + nth % body.len()]),
            _ => bytes.extend(frame_of(&mutated)),
        }
        send_once(testbed.addr, &bytes);
    }
    // Longer than any message.
    let mut long = client_handshake();
    long[4..8].copy_from_slice(&u32::MAX.to_le_bytes());
    send_once(testbed.addr, &long);
    wait_until("jobs of garbage are removed", || testbed.report().jobs.iter().all(|job| job.name == "work"));
    testbed.check_unaffected(&before);
}

pub(crate) fn idle_connections(tools: &Tools) {
    let mut testbed = TestBed::start(tools).with_job(OVER_SHM);
    let before = testbed.count();
    let mut open = idle(testbed.addr, 500);
    open.extend((0..500).filter_map(|_| {
        let mut stream = dial(testbed.addr)?;
        // The controller may have no room.
        let _ = stream.write_all(&client_handshake());
        Some(stream)
    }));
    testbed.report();
    testbed.check_that_others_join("beside", OVER_UDP);
    drop(open);
    testbed.check_unaffected(&before);
}

/// Connect with a small receive buffer.
fn deaf(addr: SocketAddr) -> TcpStream {
    let socket = socket_with(AddressFamily::INET, SocketType::STREAM, SocketFlags::CLOEXEC, None).expect("a socket");
    set_socket_recv_buffer_size(&socket, 2_048).expect("a smaller buffer");
    connect(&socket, &addr).expect("the controller listens");
    let stream = TcpStream::from(socket);
    stream.set_write_timeout(Some(Duration::from_secs(1))).expect("a socket");
    stream
}

/// The controller replies until the connection is full, and serves all other clients meanwhile.
pub(crate) fn client_that_never_reads(tools: &Tools) {
    let mut testbed = TestBed::start(tools).with_job(OVER_UDP);
    let before = testbed.count();
    let mut asked = Vec::new();
    // Refused; the error quotes the beginning of the name.
    let wrong = request("deaf", (0, 1), &"\u{10ffff}".repeat(64));
    send(&mut asked, &ClientRequest::Join(wrong)).expect("it is short");
    let many = asked.repeat(100);
    let deaf: Vec<TcpStream> = (0..3)
        .map(|_| {
            let mut stream = deaf(testbed.addr);
            stream.write_all(&client_handshake()).expect("the handshake is sent");
            // Until the controller disconnects or accepts no more data.
            let _ = (0..400).try_for_each(|_| stream.write_all(&many));
            stream
        })
        .collect();
    testbed.report();
    testbed.check_that_others_join("beside", OVER_SHM);
    // Longer than a lease: groups are renewed.
    let until = Instant::now() + Duration::from_secs(4);
    while Instant::now() < until {
        testbed.wait_for_rounds(5);
    }
    testbed.report();
    drop(deaf);
    testbed.check_unaffected(&before);

    // Nor does it delay the controller's exit.
    let mut testbed = TestBed::start(tools);
    let mut stream = self::deaf(testbed.addr);
    stream.write_all(&client_handshake()).expect("the handshake is sent");
    let _ = (0..400).try_for_each(|_| stream.write_all(&many));
    testbed.controller.interrupt();
    assert_eq!(testbed.controller.status_within(LONG), Some(0), "the controller does not exit");
}

/// Jobs of one rank, each of another tenant.
pub(crate) fn joins_without_end(tools: &Tools) {
    let mut testbed = TestBed::start(tools).with_job(OVER_UDP);
    let (before, held) = (testbed.count(), testbed.groups());
    let mut client = Client::open(testbed.addr);
    for nth in 0..300 {
        let join = ClientRequest::Join(request(&format!("endless-{nth}"), (0, 1), &format!("tenant-{nth}")));
        if !client.ask(&join) || client.answer().is_err() {
            break;
        }
    }
    let groups = testbed.groups();
    assert!(groups <= held + 1, "one connection holds {} groups", groups - held);
    testbed.check_that_others_join("beside", OVER_UDP);
    drop(client);
    wait_until("groups of a connection that has ended", || testbed.groups() <= held);
    assert!(testbed.report().jobs.iter().all(|job| job.name == "work"), "jobs of a connection that has ended");
    testbed.check_unaffected(&before);
}

pub(crate) fn long_and_wild_names(tools: &Tools) {
    let mut testbed = TestBed::start(tools).with_job(OVER_UDP);
    let before = testbed.count();
    let names = [
        "n".repeat(60_000),
        "n".repeat(1_000),
        "\u{1b}[2J\u{1b}]0;owned\u{7}".to_owned(),
        "line\nbreak".to_owned(),
        String::new(),
        "\u{202e}reversed".to_owned(),
    ];
    let mut open = Vec::new();
    for name in &names {
        for world in [1, 2] {
            let mut client = Client::open(testbed.addr);
            let mut wild = request(name, (0, world), "default");
            wild.host = (world == 2).then(|| name.clone());
            client.ask(&ClientRequest::Join(wild));
            open.push(client);
            let mut client = Client::open(testbed.addr);
            let devices = vec![name.clone(); 1];
            client.ask(&ClientRequest::JoinOn { request: request("pinned", (0, world), "default"), devices });
            open.push(client);
        }
    }
    let report = testbed.report();
    let is_plain = |name: &str| name.len() <= 64 && !name.chars().any(|c| c.is_control() || c == '\u{202e}');
    let wild = report.jobs.iter().find(|job| !is_plain(&job.name));
    assert!(wild.is_none(), "a job of {} bytes: {:.40?}", wild.unwrap().name.len(), wild.unwrap().name);
    drop(open);
    testbed.check_unaffected(&before);
}

/// Return whether a request is refused, or its connection closed, at once.
fn is_refused(addr: SocketAddr, request: &ClientRequest) -> bool {
    let mut client = Client::open(addr);
    client.stream.set_read_timeout(Some(Duration::from_secs(3))).expect("a socket");
    client.ask(request);
    matches!(client.answer(), Ok(ClientReply::Refused(_)) | Err(StreamError::Closed))
}

pub(crate) fn impossible_world(tools: &Tools) {
    let mut testbed = TestBed::start(tools).with_job(OVER_UDP);
    let before = testbed.count();
    let resumption = |world, view, order| ResumeRequest {
        request: JoinRequest { order, ..request("resumed", (0, world), "default") },
        devices: Vec::new(),
        view,
        shrink_count: 0,
        secret: JobSecret::new([7; 32]),
        expression: Vec::new(),
    };
    for world in [u32::MAX, u32::MAX - 1, 1 << 31, 1 << 24, 70_000] {
        for order in [Order::Arrival, Order::TreeFold, Order::TreePairwise] {
            for view in [0, u32::MAX] {
                let resume = ClientRequest::Resume(Box::new(resumption(world, view, order)));
                assert!(is_refused(testbed.addr, &resume), "{world} ranks may come back, in order {order:?}");
            }
            let request = JoinRequest { order, ..request("joined", (0, world), "default") };
            assert!(is_refused(testbed.addr, &ClientRequest::Join(request)), "{world} ranks may join");
        }
    }
    testbed.check_unaffected(&before);
}

pub(crate) fn crowd_on_one_device(tools: &Tools) {
    const CROWD: u32 = 300;
    let mut testbed = TestBed::start(tools).with_job(OVER_UDP);
    let (before, held, addr) = (testbed.count(), testbed.groups(), testbed.addr);
    let mut crowd: Vec<Client> = (0..CROWD).map(|_| Client::open(addr)).collect();
    for (client, rank) in crowd.iter_mut().zip(0..) {
        let request = request("crowd", (rank, CROWD), "default");
        client.ask(&ClientRequest::JoinOn { request, devices: vec!["one".into()] });
    }
    for (client, rank) in crowd.iter_mut().zip(0..) {
        let answer = client.answer();
        let is_answer = matches!(answer, Ok(ClientReply::Joined(_) | ClientReply::Refused(_)));
        assert!(is_answer, "rank {rank} of {CROWD} is answered with {:?}", answer.map(|_| "something else"));
    }
    drop(crowd);
    wait_until("the crowd's group is removed", || testbed.groups() <= held);
    testbed.check_unaffected(&before);
}

/// Without descriptors to accept or serve connections, the controller neither spins nor ends.
pub(crate) fn no_descriptors(tools: &Tools) {
    // A connection may take two: one of these leaves one.
    for limit in [60, 61] {
        let mut testbed = TestBed::start(tools);
        let few = Rlimit { current: Some(limit), maximum: tools.files.maximum };
        prlimit(Some(testbed.controller.pid()), Resource::Nofile, few).expect("its limit");
        let open = idle(testbed.addr, 200);
        let share = testbed.controller.busiest(Duration::from_secs(1));
        assert!(share < 0.5, "of {limit} files, it keeps a processor busy to {:.0} %", 100.0 * share);
        drop(open);
        testbed.check_that_others_join("afterwards", OVER_UDP);
        testbed.check_alive();
    }
}

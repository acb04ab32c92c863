//! Tests of the addresses that a board listens on, announces and refuses, which need no controller.

use super::{Board, BoardConfig, BoardError, RegistrationError};
use std::io::Write;
use std::net::{Ipv4Addr, SocketAddr, TcpListener, TcpStream, UdpSocket};
use std::time::{Duration, Instant};
use sumac_hal::ctrl::{FrameError, VERSION, encode_frames};
use sumac_hal::hosted::HostedError;
use sumac_hal::port::Addr;
use sumac_hal::udp::UdpError;

/// A small board without a controller: nothing listens on TCP port 9 (discard, RFC 863).
fn config(shards: u16) -> BoardConfig {
    let controller = SocketAddr::from((Ipv4Addr::LOCALHOST, 9));
    BoardConfig { shards, slots: 8, slot_memory_bytes: 1 << 16, ..BoardConfig::new("board", controller) }
}

fn refused(config: BoardConfig) -> BoardError {
    Board::start(config).expect_err("refused")
}

fn addr(port: u16) -> SocketAddr {
    SocketAddr::from(([192, 0, 2, 1], port))
}

#[test]
fn advertised_addresses_replace_the_bound_ones() {
    let plain = Board::start(config(2)).expect("a board");
    assert!(plain.data_addrs().all(|addr| matches!(addr, Addr::Udp(addr) if addr.ip().is_loopback())));
    let translated = BoardConfig { advertise: Some(vec![addr(70), addr(9)]), ..config(2) };
    let translated = Board::start(translated).expect("a board");
    assert!(translated.data_addrs().eq([Addr::Udp(addr(70)), Addr::Udp(addr(9))]));
}

#[test]
fn data_port_in_use_is_refused_by_address() {
    let taken = UdpSocket::bind((Ipv4Addr::LOCALHOST, 0)).expect("a free port");
    let port = taken.local_addr().expect("bound").port();
    let error = refused(BoardConfig { data_port: Some(port), ..config(1) });
    assert!(
        matches!(&error, BoardError::Port(HostedError::Udp(UdpError::Io { addr, .. })) if addr.port() == port),
        "{error} is not about port {port}"
    );
}

#[test]
fn shards_use_consecutive_ports() {
    // A loopback address that only this process uses, so its ports are free. They are below the ephemeral range.
    let [_, a, b, c] = std::process::id().to_be_bytes();
    let own = Ipv4Addr::new(127, 128 | a, b, c);
    let taken = UdpSocket::bind((own, 7901)).expect("the address is not in use");
    let config = BoardConfig { bind: own.into(), data_port: Some(7900), ..config(2) };
    let error = refused(config.clone());
    assert!(
        matches!(&error, BoardError::Port(HostedError::Udp(UdpError::Io { addr, .. })) if addr.port() == 7901),
        "{error}"
    );
    drop(taken);
    let board = Board::start(config).expect("both ports are free");
    let ports = board.data_addrs().map(|addr| if let Addr::Udp(addr) = addr { addr.port() } else { 0 });
    assert!(ports.eq([7900, 7901]));
}

/// Return whether a connection to this port of loopback waits for its peer's answer.
fn is_connecting(port: u16) -> bool {
    let sockets = std::fs::read_to_string("/proc/net/tcp").expect("the system's connections");
    let peer = format!("0100007F:{port:04X}");
    sockets.lines().map(|line| line.split_whitespace().collect::<Vec<_>>()).any(|fields| {
        // TCP_SYN_SENT.
        fields.get(2) == Some(&peer.as_str()) && fields.get(3) == Some(&"02")
    })
}

#[test]
fn board_that_dials_a_silent_controller_is_dropped_at_once() {
    let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).expect("a free port");
    let controller = listener.local_addr().expect("bound");
    // With a full queue of connections, further ones get no answer, as from an address that nothing routes to.
    rustix::net::listen(&listener, 0).expect("a shorter queue");
    let mut queued = Vec::new();
    while let Ok(stream) = TcpStream::connect_timeout(&controller, Duration::from_millis(100)) {
        queued.push(stream);
    }
    let limit = Instant::now() + Duration::from_secs(20);
    let board = Board::start(BoardConfig { controller, ..config(1) }).expect("a board");
    while !is_connecting(controller.port()) {
        assert!(Instant::now() < limit, "it does not dial");
        std::thread::yield_now();
    }
    let begun = Instant::now();
    drop(board);
    assert!(begun.elapsed() < Duration::from_secs(2), "the drop took {:?}", begun.elapsed());
}

#[test]
fn shard_is_pinned_to_its_processor() {
    // This process's first processor, and one that no machine has: the second shard is not pinned.
    let allowed = rustix::thread::sched_getaffinity(None).expect("own processors");
    let first = (0..rustix::thread::CpuSet::MAX_CPU).find(|&core| allowed.is_set(core)).expect("one at least");
    let config = BoardConfig { cores: vec![first, usize::MAX], ..config(2) };
    let board = Board::start(config).expect("a board");
    let limit = std::time::Instant::now() + std::time::Duration::from_secs(60);
    let alone = |task: &std::path::Path| {
        let read = |file: &str| std::fs::read_to_string(task.join(file)).unwrap_or_default();
        let status = read("status");
        let cores = status.lines().find_map(|line| line.strip_prefix("Cpus_allowed_list:"));
        read("comm").trim() == "shard-0" && cores.is_some_and(|cores| cores.trim() == first.to_string())
    };
    let is_pinned = || {
        let tasks = std::fs::read_dir("/proc/self/task").expect("threads").flatten();
        tasks.into_iter().any(|task| alone(&task.path()))
    };
    // The thread pins itself once it runs.
    while !is_pinned() {
        assert!(std::time::Instant::now() < limit, "shard-0 runs on more than processor {first}");
        std::thread::yield_now();
    }
    assert_eq!(board.data_addrs().count(), 2);
}

#[test]
fn invalid_ports_and_addresses_are_refused_by_name() {
    let advertise = |addrs: &[SocketAddr]| Some(addrs.to_vec());
    let cases = [
        (BoardConfig { data_port: Some(0), ..config(1) }, "from data port 0 on"),
        (BoardConfig { data_port: Some(65_535), ..config(2) }, "2 shards from data port 65535 on"),
        (BoardConfig { advertise: advertise(&[]), ..config(1) }, "0 advertised address(es) for 1 shard(s)"),
        (BoardConfig { advertise: advertise(&[addr(1), addr(2)]), ..config(1) }, "2 advertised address(es) for 1"),
        (BoardConfig { advertise: advertise(&[addr(0)]), ..config(1) }, "192.0.2.1:0"),
        (BoardConfig { advertise: advertise(&[([0, 0, 0, 0], 7).into()]), ..config(1) }, "0.0.0.0:7"),
    ];
    for (config, named) in cases {
        let message = refused(config).to_string();
        assert!(message.contains(named), "{message}");
    }
}

#[test]
fn board_names_both_versions_if_its_controller_is_newer() {
    let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).expect("a port");
    let controller = listener.local_addr().expect("bound");
    let board = Board::start(BoardConfig { controller, ..config(1) }).expect("a board");
    let (mut stream, _) = listener.accept().expect("the board");
    let mut frame = encode_frames(&()).expect("short");
    frame[2..4].copy_from_slice(&(VERSION + 1).to_le_bytes());
    stream.write_all(&frame).expect("it listens");
    // It dials again once it has noticed, and goes on.
    drop(listener.accept().expect("the board"));
    let error = board.wait_registration(Duration::ZERO).expect_err("another version");
    assert_eq!(error, RegistrationError::Version(FrameError::Version(VERSION + 1)));
    let text = error.to_string();
    assert!([VERSION, VERSION + 1].iter().all(|version| text.contains(&version.to_string())), "{text}");
}

//! `sumac chaos` itself: usage errors, counters, rules and client eviction. `lossy.rs` runs whole jobs through it.

mod common;
mod proxy;

use common::{Dir, exit_status, stderr, stdout, sumac};
use proxy::Proxy;
use std::net::{Ipv4Addr, SocketAddr, UdpSocket};
use std::time::Duration;

fn open() -> UdpSocket {
    let socket = UdpSocket::bind((Ipv4Addr::LOCALHOST, 0)).expect("a socket");
    socket.set_read_timeout(Some(Duration::from_secs(30))).expect("set");
    socket
}

fn addr(socket: &UdpSocket) -> SocketAddr {
    socket.local_addr().expect("bound")
}

/// Send a packet through the proxy and a reply back. Returns the source address that the target saw.
fn exchange(client: &UdpSocket, target: &UdpSocket, bytes: &[u8]) -> SocketAddr {
    let mut buffer = [0; 64];
    client.send(bytes).expect("sent");
    let (len, from) = target.recv_from(&mut buffer).expect("a packet");
    assert_eq!(buffer[..len], *bytes);
    target.send_to(&[bytes, bytes].concat(), from).expect("sent");
    assert_eq!(client.recv(&mut buffer).expect("the reply"), 2 * bytes.len());
    assert_eq!(buffer[..2 * bytes.len()], [bytes, bytes].concat());
    from
}

#[test]
fn target_sees_one_address_per_client_and_link() {
    let targets = [open(), open()];
    let mut proxy = Proxy::start(&targets.each_ref().map(addr), "");
    let clients = [open(), open()];
    let mut seen = Vec::new();
    for (target, &front) in targets.iter().zip(proxy.addrs()) {
        for (client, number) in clients.iter().zip(0_u8..) {
            client.connect(front).expect("connected");
            let froms = [0, 1, 2].map(|round| exchange(client, target, &[round, number]));
            assert!(froms.iter().all(|from| *from == froms[0]), "{froms:?}");
            seen.push(froms[0]);
        }
    }
    seen.sort();
    seen.dedup();
    assert_eq!(seen.len(), 4, "{seen:?}");
    // Packets that do not come from the target are not relayed.
    open().send_to(&[9], seen[0]).expect("sent");
    // Counters of a running proxy lag behind by one turn.
    while proxy.counts().iter().any(|counts| counts.down.sent < 6) {}
    let counts = proxy.finish();
    for (counts, target) in counts.iter().zip(&targets) {
        assert_eq!((counts.to, counts.clients, counts.replaced), (addr(target), 2, 0));
        assert_eq!([counts.up.received, counts.up.sent, counts.down.received, counts.down.sent], [6; 4]);
    }
}

/// Send numbered packets through a proxy and return those that have arrived when it ends.
fn arrivals(options: &str) -> Vec<Vec<u8>> {
    const COUNT: u8 = 200;
    let (client, target) = (open(), open());
    let mut proxy = Proxy::start(&[addr(&target)], options);
    client.connect(proxy.addrs()[0]).expect("connected");
    (0..COUNT).for_each(|number| _ = client.send(&[number; 4]).expect("sent"));
    while proxy.counts()[0].up.received < u64::from(COUNT) {}
    let up = proxy.finish()[0].up;
    target.set_nonblocking(true).expect("set");
    let mut buffer = [0; 64];
    let arrived = std::iter::from_fn(|| target.recv(&mut buffer).ok().map(|len| buffer[..len].to_vec()));
    let arrived: Vec<_> = arrived.collect();
    assert_eq!(arrived.len() as u64, up.sent, "{up:?}");
    arrived
}

#[test]
fn same_seed_repeats_the_same_faults() {
    let options = |seed| format!("--loss 20% --corrupt 10% --seed {seed}");
    let first = arrivals(&options(1));
    assert!((120..180).contains(&first.len()), "{first:?}");
    assert!(first.iter().any(|bytes| bytes.iter().any(|byte| *byte != bytes[0]) || bytes.len() < 4), "{first:?}");
    assert_eq!(arrivals(&options(1)), first);
    assert_ne!(arrivals(&options(2)), first);
}

#[test]
fn rules_file_applies_by_link_direction_and_time() {
    let dir = Dir::new("chaos-rules");
    let rules = "[[rule]]\nlink = 2\ndirection = 'up'\nloss = '100%'\n[[rule]]\nat = '1000s'\nloss = '100%'\n";
    let path = dir.write("rules.toml", rules.as_bytes());
    let targets = [open(), open()];
    let mut proxy = Proxy::start(&targets.each_ref().map(addr), &format!("--rules {path}"));
    let client = open();
    client.connect(proxy.addrs()[1]).expect("connected");
    client.send(&[1]).expect("sent");
    client.connect(proxy.addrs()[0]).expect("connected");
    exchange(&client, &targets[0], &[2]);
    while proxy.counts()[1].up.received < 1 {}
    let counts = proxy.finish();
    assert_eq!([counts[0].up.lost, counts[0].down.lost, counts[1].up.lost], [0, 0, 1], "{counts:?}");
}

#[test]
fn delay_applies_to_both_directions() {
    let (client, target) = (open(), open());
    let proxy = Proxy::start(&[addr(&target)], "--delay 20ms --cut down --at 1000s --for 1s");
    client.connect(proxy.addrs()[0]).expect("connected");
    let begun = std::time::Instant::now();
    exchange(&client, &target, &[1]);
    assert!(begun.elapsed() >= Duration::from_millis(40), "round trip: {:?}", begun.elapsed());
    proxy.finish();
}

#[test]
fn many_source_addresses_never_evict_clients_with_replies() {
    let target = open();
    let mut proxy = Proxy::start(&[addr(&target)], "--clients 16");
    let front = proxy.addrs()[0];
    let clients = [open(), open(), open()];
    let mut froms = Vec::new();
    for client in &clients {
        client.connect(front).expect("connected");
        froms.push(exchange(client, &target, &[1]));
        (0..10).for_each(|_| _ = exchange(client, &target, &[2]));
    }
    let many: Vec<UdpSocket> = (0..200).map(|_| open()).collect();
    many.iter().for_each(|socket| _ = socket.send_to(&[9], front).expect("sent"));
    while proxy.counts()[0].up.received < 33 + 200 {}
    let mut buffer = [0; 64];
    (0..200).for_each(|_| assert_eq!(target.recv(&mut buffer).expect("relayed"), 1));
    for (client, &from) in clients.iter().zip(&froms) {
        assert_eq!(exchange(client, &target, &[3]), from, "it keeps its socket");
    }
    let late = open();
    late.connect(front).expect("connected");
    exchange(&late, &target, &[4]);
    let counts = proxy.finish()[0];
    assert_eq!((counts.clients, counts.up.refused), (3 + 200 + 1, 0), "{counts:?}");
    assert!(counts.replaced >= 188, "{counts:?}");
}

#[test]
fn invalid_usage_exits_with_2_and_names_the_limit() {
    let dir = Dir::new("chaos-usage");
    let bad = dir.write("bad.toml", b"[[rule]]\nloss = '5%'\nlos = '1%'\n");
    let (taken, link) = (open(), ["--listen", "127.0.0.1:0", "--to", "127.0.0.1:9"]);
    let taken = addr(&taken).to_string();
    let with = |more: &[&'static str]| [&link[..], more].concat();
    let cases: [(Vec<&str>, &str); 14] = [
        (vec!["--listen", "127.0.0.1:0"], "--to <ADDRESS>"),
        (with(&["--listen", "127.0.0.1:0"]), "2 --listen and 1 --to"),
        (vec!["--listen", "127.0.0.1:0", "--to", "127.0.0.1:0"], "a port other than 0"),
        (vec!["--listen", "0.0.0.0:7", "--to", "127.0.0.1:7"], "would loop for ever"),
        (vec!["--listen", "127.0.0.1", "--to", "127.0.0.1:7"], "127.0.0.1"),
        (vec!["--listen", &taken, "--to", "127.0.0.1:7"], "listen on"),
        (with(&["--loss", "5"]), "0% to 100% in steps of 0.1%"),
        (with(&["--loss", "60%", "--reorder", "50%"]), "110.0% together"),
        (with(&["--delay", "5ms..1ms"]), "the shorter first"),
        (with(&["--at", "2s"]), "--cut"),
        (with(&["--cut", "left"]), "up, down, both"),
        (with(&["--clients", "0"]), "1..=4096"),
        (with(&["--queue", "5G"]), "exceeds the limit of 4G"),
        ([&link[..], &["--rules", &bad]].concat(), "unknown field `los`"),
    ];
    for (args, named) in cases {
        let output = sumac(&[&["chaos"], &args[..]].concat());
        assert_eq!((exit_status(&output), stdout(&output)), (2, String::new()), "{args:?}: {}", stderr(&output));
        assert!(stderr(&output).contains(named), "{args:?}: {}", stderr(&output));
    }
}

//! Tests of the engine in virtual time.

use super::engine::{Direction, Flow, LaneCounters, LinkDelay, Sockets};
use super::*;
use std::collections::BTreeSet;
use std::time::Duration;
use sumac_hal::emu::{During, RandomFaults, Rule};
use sumac_hal::time::Instant;

const ROOM: usize = 1 << 20;

fn addr(port: u16) -> SocketAddr {
    SocketAddr::from(([10, 0, 0, 1], port))
}

fn target() -> SocketAddr {
    SocketAddr::from(([10, 0, 0, 2], 7900))
}

fn ms(ms: u64) -> Instant {
    Instant::from_nanos(ms * 1_000_000)
}

/// Sockets that record what is sent.
#[derive(Debug, Default)]
struct RecordingSockets {
    open: BTreeSet<Flow>,
    sent: Vec<(Flow, Direction, SocketAddr, Vec<u8>)>,
    /// The maximum number of open sockets.
    most: Option<usize>,
}

impl Sockets for RecordingSockets {
    fn open(&mut self, flow: Flow) -> bool {
        self.most.is_none_or(|most| self.open.len() < most) && self.open.insert(flow)
    }

    fn close(&mut self, flow: Flow) {
        assert!(self.open.remove(&flow), "{flow:?} is open");
    }

    fn send(&mut self, flow: Flow, direction: Direction, client: SocketAddr, bytes: &[u8]) -> bool {
        assert!(self.open.contains(&flow), "{flow:?} is open");
        self.sent.push((flow, direction, client, bytes.to_vec()));
        true
    }
}

/// An engine of one link, and its sockets.
struct Bench {
    engine: Engine,
    sockets: RecordingSockets,
}

impl Bench {
    fn new(seed: u64, lanes: (Lane, Lane), clients: usize, room: usize) -> Self {
        let (up, down) = lanes;
        let link = Link { target: target(), up, down, clients: Clients::new(clients) };
        Self { engine: Engine::new(seed, room, vec![link]), sockets: RecordingSockets::default() }
    }

    fn up(&mut self, at: Instant, port: u16, bytes: &[u8]) {
        self.engine.release(at, &mut self.sockets);
        self.engine.up(at, 0, addr(port), bytes, &mut self.sockets);
        self.check();
    }

    fn down(&mut self, at: Instant, client: u64, bytes: &[u8]) {
        self.engine.release(at, &mut self.sockets);
        self.engine.down(at, (0, client), bytes, &mut self.sockets);
        self.check();
    }

    /// Assert that the counters account for every packet.
    fn check(&self) {
        let counters = self.engine.counters()[0];
        for (lane, direction) in [(counters.up, Direction::Up), (counters.down, Direction::Down)] {
            let LaneCounters { received, duplicated, sent, lost, overflowed, refused, stray, unsent, .. } = lane;
            let gone = sent + lost + overflowed + refused + stray + unsent + self.engine.held(direction);
            assert_eq!(received + duplicated, gone, "{direction:?}: {lane:?}");
        }
    }

    /// Return the first byte of each packet sent since the last call.
    fn sent(&mut self) -> Vec<u8> {
        self.sockets.sent.drain(..).map(|(.., bytes)| bytes[0]).collect()
    }
}

fn lane(rule: impl Rule + Send + 'static) -> Lane {
    Lane { rules: vec![Box::new(rule)], delays: Vec::new() }
}

fn faults(loss: u16, duplicate: u16, reorder: u16, corrupt: u16) -> RandomFaults {
    RandomFaults {
        loss_per_mille: loss,
        duplicate_per_mille: duplicate,
        reorder_per_mille: reorder,
        corrupt_per_mille: corrupt,
        delay_max: Duration::from_millis(5),
    }
}

fn always(min: u64, max: u64) -> LinkDelay {
    let during = (Instant::ZERO, Instant::ZERO + Duration::MAX);
    LinkDelay { during, min: Duration::from_millis(min), max: Duration::from_millis(max) }
}

#[test]
fn packets_pass_unchanged_to_their_own_client_without_rules() {
    let mut bench = Bench::new(1, Default::default(), 4, ROOM);
    for round in 0..3 {
        bench.up(ms(round), 1, &[1]);
        bench.up(ms(round), 2, &[2]);
        bench.down(ms(round), 0, &[3]);
        bench.down(ms(round), 1, &[4]);
        let sent = std::mem::take(&mut bench.sockets.sent);
        let expected = [(0, Direction::Up, 1), (1, Direction::Up, 2), (0, Direction::Down, 1), (1, Direction::Down, 2)];
        let expected = expected.into_iter().zip(1..);
        assert!(
            sent.iter().eq(&expected
                .map(|((client, direction, port), byte)| ((0, client), direction, addr(port), vec![byte]))
                .collect::<Vec<_>>())
        );
    }
    assert_eq!(bench.engine.counters()[0].clients, 2);
    assert_eq!(bench.engine.next_release(), None);
}

/// Return what is sent for each packet of a flow while other clients send `others` packets in between.
fn fates(seed: u64, others: u16) -> Vec<Vec<Vec<u8>>> {
    let rules = || lane(faults(100, 100, 100, 100));
    let mut bench = Bench::new(seed, (rules(), rules()), 64, ROOM);
    bench.up(ms(0), 1, &[0; 8]);
    let mut fates = Vec::new();
    for nth in 0..500 {
        bench.sockets.sent.clear();
        bench.up(ms(10 * nth), 1, &[nth as u8; 8]);
        bench.down(ms(10 * nth), 0, &[nth as u8; 8]);
        bench.engine.release(ms(10 * nth + 9), &mut bench.sockets);
        fates.push(bench.sockets.sent.drain(..).map(|(.., bytes)| bytes).collect());
        (0..others).for_each(|other| bench.up(ms(10 * nth + 9), 2 + other, &[9; 8]));
    }
    fates
}

#[test]
fn fate_of_a_flow_depends_on_the_seed_and_not_on_other_flows() {
    let alone = fates(7, 0);
    assert_eq!(fates(7, 0), alone);
    assert_ne!(fates(8, 0), alone);
    // Packets of other flows are interleaved; this flow's are the same.
    let crowded = fates(7, 3);
    assert!(alone.iter().zip(&crowded).all(|(alone, crowded)| alone.iter().all(|bytes| crowded.contains(bytes))));
}

#[test]
fn faults_occur_at_the_requested_rates() {
    let mut bench = Bench::new(3, (lane(faults(100, 50, 70, 30)), Lane::default()), 4, ROOM);
    for nth in 0..10_000 {
        bench.up(ms(nth), 1, &[7; 32]);
    }
    bench.engine.release(ms(20_000), &mut bench.sockets);
    let up = bench.engine.counters()[0].up;
    let near = |count: u64, share: u64| assert!(count.abs_diff(share * 10) < share * 2, "{count} of {share} in 1000");
    near(up.lost, 100);
    near(up.duplicated, 50);
    near(up.reordered, 70);
    near(up.corrupted, 30);
    assert_eq!(up.sent, 10_000 + up.duplicated - up.lost);
    let damaged = bench.sockets.sent.iter().filter(|(.., bytes)| *bytes != [7; 32]).count();
    assert_eq!(damaged as u64, up.corrupted);
}

#[test]
fn cut_drops_one_direction_during_its_time_span() {
    let cut = During { during: ms(10)..ms(20), rule: faults(1000, 0, 0, 0) };
    let mut bench = Bench::new(1, (lane(cut), Lane::default()), 4, ROOM);
    for at in 0..30 {
        bench.up(ms(at), 1, &[at as u8]);
        bench.down(ms(at), 0, &[100 + at as u8]);
    }
    let sent = bench.sent();
    assert!(sent.iter().filter(|byte| **byte < 100).copied().eq((0..10).chain(20..30)));
    assert_eq!(sent.iter().filter(|byte| **byte >= 100).count(), 30);
}

#[test]
fn constant_delay_keeps_order_and_random_delay_does_not() {
    let slow = Lane { rules: Vec::new(), delays: vec![always(3, 3)] };
    let mut bench = Bench::new(1, (slow, Lane::default()), 4, ROOM);
    (0..5).for_each(|nth| bench.up(ms(0), 1, &[nth]));
    assert_eq!((bench.sent(), bench.engine.next_release()), (vec![], Some(ms(3))));
    bench.engine.release(ms(2), &mut bench.sockets);
    assert!(bench.sent().is_empty());
    bench.engine.release(ms(3), &mut bench.sockets);
    assert_eq!(bench.sent(), [0, 1, 2, 3, 4]);
    let drawn = Lane { rules: Vec::new(), delays: vec![always(1, 5)] };
    let mut bench = Bench::new(1, (drawn, Lane::default()), 4, ROOM);
    (0..50).for_each(|nth| bench.up(ms(0), 1, &[nth]));
    bench.engine.release(ms(1), &mut bench.sockets);
    assert!(bench.sent().len() < 5);
    bench.engine.release(ms(5), &mut bench.sockets);
    let sent = bench.sent();
    assert!(sent.len() > 40 && !sent.is_sorted(), "{sent:?}");
}

#[test]
fn delayed_packets_never_exceed_the_queue_limit() {
    let slow = || Lane { rules: vec![], delays: vec![always(100, 100)] };
    let mut bench = Bench::new(1, (slow(), slow()), 4, 10_000);
    for nth in 0..1000 {
        bench.up(ms(0), 1, &vec![1; nth % 300]);
        assert!(bench.engine.held_bytes() <= 10_000);
    }
    let up = bench.engine.counters()[0].up;
    assert!(up.overflowed > 900 && up.sent == 0, "{up:?}");
    bench.engine.release(ms(100), &mut bench.sockets);
    assert_eq!(bench.engine.held_bytes(), 0);
    bench.up(ms(200), 1, &[1]);
    assert_eq!(bench.engine.counters()[0].up.overflowed, up.overflowed, "there is room again");
}

/// Let each sender send once and receive this many replies.
fn settle(bench: &mut Bench, ports: std::ops::Range<u16>, answers: u64) {
    for (port, client) in ports.zip(0..) {
        bench.up(ms(1), port, &[1]);
        (0..answers).for_each(|_| bench.down(ms(1), client, &[2]));
    }
    bench.sockets.sent.clear();
}

#[test]
fn many_source_addresses_never_evict_clients_with_replies() {
    let mut bench = Bench::new(1, Default::default(), 8, ROOM);
    settle(&mut bench, 1..5, clients::SETTLED_REPLIES);
    for port in 1000..5000 {
        bench.up(ms(2), port, &[9]);
        assert!(bench.sockets.open.len() <= 8);
    }
    bench.sockets.sent.clear();
    for port in 1..5 {
        bench.up(ms(3), port, &[port as u8]);
        bench.down(ms(3), u64::from(port) - 1, &[port as u8]);
    }
    let expected: Vec<_> = (1..5)
        .flat_map(|port: u16| {
            [Direction::Up, Direction::Down]
                .map(|direction| ((0, u64::from(port) - 1), direction, addr(port), vec![port as u8]))
        })
        .collect();
    assert_eq!(bench.sockets.sent, expected, "they keep their sockets");
    let counters = bench.engine.counters()[0];
    assert_eq!((counters.clients, counters.replaced, counters.up.refused), (4004, 3996, 0));
    // A new client is admitted all the same, and stays as long as it sends and gets replies.
    bench.up(ms(4), 6, &[6]);
    bench.down(ms(4), 4004, &[7]);
    (6000..6003).for_each(|port| bench.up(ms(5), port, &[9]));
    bench.sockets.sent.clear();
    bench.down(ms(6), 4004, &[8]);
    assert_eq!(bench.sent(), [8]);
}

#[test]
fn full_table_of_replied_clients_admits_no_one_until_one_is_idle() {
    let mut bench = Bench::new(1, Default::default(), 3, ROOM);
    settle(&mut bench, 1..4, clients::SETTLED_REPLIES);
    bench.up(ms(2), 9, &[9]);
    assert_eq!((bench.sent(), bench.engine.counters()[0].up.refused), (vec![], 1));
    let later = ms(1) + clients::IDLE_LIMIT;
    bench.up(later, 1, &[1]);
    bench.up(later, 9, &[9]);
    assert_eq!((bench.sent(), bench.engine.counters()[0].replaced), (vec![1, 9], 1));
    // Packets for an evicted client are dropped.
    bench.down(later, 1, &[2]);
    assert_eq!((bench.sent(), bench.engine.counters()[0].down.stray), (vec![], 1));
}

#[test]
fn client_without_a_socket_is_refused_and_may_retry() {
    let mut bench = Bench::new(1, Default::default(), 8, ROOM);
    bench.sockets.most = Some(1);
    bench.up(ms(0), 1, &[1]);
    bench.up(ms(0), 2, &[2]);
    assert_eq!((bench.sent(), bench.engine.counters()[0].up.refused), (vec![1], 1));
    bench.sockets.most = None;
    bench.up(ms(1), 2, &[2]);
    assert_eq!(bench.sent(), [2]);
}

#[test]
fn forget_drops_delayed_packets_and_readmits_clients_as_new() {
    let slow = Lane { rules: vec![], delays: vec![always(5, 5)] };
    let mut bench = Bench::new(1, (Lane::default(), slow), 2, ROOM);
    bench.up(ms(0), 1, &[1]);
    bench.down(ms(0), 0, &[2]);
    bench.engine.forget(&mut bench.sockets);
    assert!(bench.sockets.open.is_empty() && bench.engine.next_release().is_none());
    bench.check();
    bench.up(ms(1), 1, &[3]);
    bench.engine.release(ms(100), &mut bench.sockets);
    assert_eq!((bench.sent(), bench.engine.counters()[0].clients), (vec![1, 3], 2));
}

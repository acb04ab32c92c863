use super::*;
use crate::port::Addr;
use crate::time::Instant;
use core::time::Duration;
use proptest::{prop_assert_eq, prop_assert_ne, proptest};

const A: Addr = Addr::Emu(1);
const B: Addr = Addr::Emu(2);
const C: Addr = Addr::Emu(3);

fn us(us: u64) -> Instant {
    Instant::from_nanos(us * 1000)
}

/// A link with a bandwidth of 1 byte per microsecond and a latency of 10 us.
fn slow() -> LinkConfig {
    LinkConfig {
        latency: Duration::from_micros(10),
        bandwidth_bytes_per_s: Some(1_000_000),
        receive_queue_bytes: Some(250),
        mark_queue_bytes: None,
        max_packet_len_bytes: None,
    }
}

fn drain(fabric: &mut Fabric) -> Vec<(u64, Addr, usize)> {
    let mut arrivals = Vec::new();
    while let Some(at) = fabric.next_event() {
        while let Some(delivery) = fabric.poll_delivery(at) {
            arrivals.push((delivery.at.as_nanos() / 1000, delivery.from, delivery.bytes.len()));
        }
    }
    arrivals
}

#[test]
fn packet_occupies_both_links_for_its_length() {
    let mut fabric = Fabric::new(1, slow());
    fabric.send(us(0), A, B, &[0; 100]);
    fabric.send(us(0), A, B, &[0; 50]);
    // 100 us on A's link, 10 us of latency, 100 us on B's link. The second leaves A at 150 and waits for B's link until
    // 210.
    assert_eq!(drain(&mut fabric), [(210, A, 100), (260, A, 50)]);
}

#[test]
fn ready_at_returns_when_the_senders_link_is_free() {
    let mut fabric = Fabric::new(1, slow());
    assert_eq!(fabric.ready_at(A), us(0));
    fabric.send(us(5), A, B, &[0; 100]);
    fabric.send(us(5), A, B, &[0; 50]);
    assert_eq!((fabric.ready_at(A), fabric.ready_at(B)), (us(155), us(0)), "sending is A's");
}

#[test]
fn set_link_applies_to_one_direction() {
    let mut fabric = Fabric::new(1, slow());
    fabric.set_link(B, A, LinkConfig { latency: Duration::from_micros(3), ..LinkConfig::default() });
    fabric.send(us(0), B, A, &[0; 100]);
    fabric.send(us(0), A, B, &[0; 100]);
    assert_eq!(drain(&mut fabric), [(3, B, 100), (210, A, 100)]);
}

#[test]
fn packet_is_not_delivered_before_its_arrival() {
    let mut fabric = Fabric::new(1, slow());
    fabric.send(us(0), A, B, &[0; 100]);
    assert_eq!(fabric.poll_delivery(us(209)), None);
    assert_eq!(fabric.in_flight(), 1);
    assert!(fabric.poll_delivery(us(210)).is_some());
}

#[test]
fn packet_longer_than_its_path_carries_is_lost_in_that_direction_only() {
    let mut fabric = Fabric::new(1, LinkConfig::default());
    fabric.set_link(A, B, LinkConfig { max_packet_len_bytes: Some(100), ..LinkConfig::default() });
    for (from, to, len) in [(A, B, 100), (A, B, 101), (B, A, 101)] {
        fabric.send(us(0), from, to, &vec![0; len]);
    }
    let arrived: Vec<_> =
        std::iter::from_fn(|| fabric.poll_delivery(us(10))).map(|got| (got.to, got.bytes.len())).collect();
    assert_eq!(arrived, [(B, 100), (A, 101)]);
    assert_eq!((fabric.counters().dropped_by_length, fabric.in_flight()), (1, 0));
    fabric.set_link(A, B, LinkConfig::default());
    fabric.send(us(20), A, B, &[0; 101]);
    assert!(fabric.poll_delivery(us(30)).is_some(), "it has become wider");
}

#[test]
fn incast_drops_packets_at_a_full_queue() {
    let mut fabric = Fabric::new(1, slow());
    for from in 10..14 {
        fabric.send(us(0), Addr::Emu(from), B, &[0; 100]);
    }
    assert_eq!(drain(&mut fabric).len(), 2, "250 bytes hold two of four");
    assert_eq!(fabric.counters().dropped_by_queue, 2);
    // The queue is empty again.
    fabric.send(us(1000), A, B, &[0; 250]);
    assert_eq!(drain(&mut fabric).len(), 1);
}

#[test]
fn first_verdict_other_than_pass_decides() {
    let mut fabric = Fabric::new(1, LinkConfig::default());
    fabric.add_rule(NthPacket { from: A, to: B, nth: 3, verdict: Verdict::Drop });
    let late = Verdict::Deliver { delay: Duration::from_micros(50) };
    let all_late =
        fabric.add_rule(move |frame: &Frame<'_>, _: &mut Rng| if frame.from == A { late } else { Verdict::Pass });
    for _ in 0..4 {
        fabric.send(us(0), A, B, b"a");
        fabric.send(us(0), C, B, b"c");
    }
    let arrivals = drain(&mut fabric);
    assert_eq!(arrivals[..4], [(1, C, 1); 4]);
    assert_eq!(arrivals[4..], [(51, A, 1); 3]);
    fabric.remove_rule(all_late);
    fabric.send(us(100), A, B, b"a");
    assert_eq!(drain(&mut fabric), [(101, A, 1)]);
}

#[test]
fn partition_drops_one_direction_for_its_period() {
    let mut fabric = Fabric::new(1, LinkConfig::default());
    fabric.add_rule(Partition { from: vec![A, C], to: vec![B], during: us(10)..us(20) });
    for at in [9, 10, 19, 20] {
        fabric.send(us(at), A, B, b"cut?");
        fabric.send(us(at), B, A, b"open");
    }
    let from = |from| move |arrival: &&(u64, Addr, usize)| arrival.1 == from;
    let arrivals = drain(&mut fabric);
    assert_eq!(arrivals.iter().filter(from(A)).map(|a| a.0).collect::<Vec<_>>(), [10, 21]);
    assert_eq!(arrivals.iter().filter(from(B)).count(), 4);
}

#[test]
fn during_limits_a_rule_without_changing_other_rules_draws() {
    let path = (Addr::Emu(0), Addr::Emu(1));
    let all = RandomFaults { loss_per_mille: 1000, ..RandomFaults::default() };
    let some = RandomFaults { loss_per_mille: 500, ..RandomFaults::default() };
    let verdicts = |during| {
        let mut rng = Rng::new(3);
        let mut first = During { during, rule: all };
        let mut rules: [Box<dyn Rule>; 2] = [
            Box::new(move |frame: &Frame<'_>, rng: &mut Rng| {
                // Ignore its verdict, so that the next rule is applied as well.
                let _ = first.on_packet(frame, rng);
                Verdict::Pass
            }),
            Box::new(some),
        ];
        let mut decide =
            |nth| decide(rules.iter_mut().map(|rule| &mut **rule), &Frame::new(nth, nth, us(nth), path, &[]), &mut rng);
        (0..200).map(&mut decide).collect::<Vec<_>>()
    };
    let never = verdicts(us(0)..us(0));
    assert_eq!(never, verdicts(us(50)..us(100)));
    assert!(never.contains(&Verdict::Drop) && never.contains(&Verdict::Pass));
    let mut cut = During { during: us(50)..us(100), rule: all };
    let lost = (0..200)
        .filter(|&nth| cut.on_packet(&Frame::new(nth, nth, us(nth), path, &[]), &mut Rng::new(nth)) == Verdict::Drop);
    assert!(lost.eq(50..100));
}

#[test]
fn slow_link_delays_one_direction_for_its_period() {
    let mut fabric = Fabric::new(1, LinkConfig::default());
    fabric.add_rule(SlowLink { from: vec![A], to: vec![B], during: us(10)..us(20), delay: Duration::from_micros(100) });
    for at in [9, 10, 19, 20] {
        fabric.send(us(at), A, B, b"slow?");
        fabric.send(us(at), B, A, b"as ever");
    }
    let arrivals = drain(&mut fabric);
    let of = |from| arrivals.iter().filter(move |arrival| arrival.1 == from).map(|arrival| arrival.0);
    assert_eq!(of(A).collect::<Vec<_>>(), [10, 21, 111, 120]);
    assert_eq!(of(B).collect::<Vec<_>>(), [10, 11, 20, 21]);
}

#[test]
fn duplicates_equal_the_packet_and_damage_changes_it() {
    let mut fabric = Fabric::new(1, LinkConfig::default());
    let delay = Duration::from_micros(7);
    fabric.add_rule(NthPacket { from: A, to: B, nth: 1, verdict: Verdict::Duplicate { delay } });
    fabric.add_rule(|frame: &Frame<'_>, _: &mut Rng| if frame.from == C { Verdict::Corrupt } else { Verdict::Pass });
    fabric.send(us(0), A, B, b"twice");
    assert_eq!(drain(&mut fabric), [(1, A, 5), (8, A, 5)]);
    let (mut cut, mut flipped) = (0, 0);
    for len in 1..=300_usize {
        let bytes = vec![0x5a; len];
        fabric.send(us(100), C, B, &bytes);
        let got = fabric.poll_delivery(us(200)).unwrap().bytes;
        assert_ne!(got, bytes);
        assert!(!got.is_empty());
        if got.len() < len {
            cut += 1;
        } else {
            let bits: u32 = got.iter().map(|byte| (byte ^ 0x5a).count_ones()).sum();
            assert!((1..=3).contains(&bits), "{bits} bits flipped");
            flipped += 1;
        }
    }
    assert!(cut > 30 && flipped > 100, "{cut} cut, {flipped} flipped");
}

#[test]
fn random_faults_have_the_requested_probabilities() {
    let mut fabric = Fabric::new(8, LinkConfig::default());
    fabric.add_rule(RandomFaults {
        loss_per_mille: 100,
        duplicate_per_mille: 50,
        reorder_per_mille: 200,
        corrupt_per_mille: 20,
        delay_max: Duration::from_micros(5),
    });
    for i in 0..20_000 {
        fabric.send(us(i), A, B, b"packet");
    }
    let counters = fabric.counters();
    for (count, share) in
        [(counters.dropped_by_rule, 100), (counters.duplicated, 50), (counters.delayed, 200), (counters.corrupted, 20)]
    {
        assert!((share * 18..share * 22).contains(&count), "{count} of 20000 for {share} per mille");
    }
}

/// Run a few hundred packets between four ports with faults.
fn swarm(seed: u64, faults: impl Rule + 'static, queue: Option<usize>) -> Fabric {
    let link = LinkConfig { receive_queue_bytes: queue, max_packet_len_bytes: Some(90), ..slow() };
    let mut fabric = Fabric::new(seed, link);
    fabric.record_faults();
    fabric.add_rule(faults);
    let mut rng = Rng::new(seed ^ 1);
    for i in 0..300 {
        let now = us(i * 20);
        let (from, to) = (Addr::Emu(rng.below(4) as u32), Addr::Emu(rng.below(4) as u32));
        fabric.send(now, from, to, &vec![i as u8; 1 + rng.below(100) as usize]);
        while fabric.poll_delivery(now).is_some() {}
        let counters = fabric.counters();
        let dropped = counters.dropped_by_rule + counters.dropped_by_queue + counters.dropped_by_length;
        assert_eq!(counters.sent + counters.duplicated, counters.delivered + dropped + fabric.in_flight());
    }
    fabric
}

proptest! {
    #[test]
    fn every_packet_is_counted_and_the_seed_determines_the_run(
        seed: u64, loss in 0_u16..300, duplicate in 0_u16..300, reorder in 0_u16..300, corrupt in 0_u16..100, queue in proptest::option::of(50_usize..500)
    ) {
        let faults = RandomFaults {
            loss_per_mille: loss,
            duplicate_per_mille: duplicate,
            reorder_per_mille: reorder,
            corrupt_per_mille: corrupt,
            delay_max: Duration::from_micros(100),
        };
        let (one, two) = (swarm(seed, faults, queue), swarm(seed, faults, queue));
        prop_assert_eq!(one.log_hash(), two.log_hash());
        prop_assert_eq!(one.counters(), two.counters());
        prop_assert_ne!(one.log_hash(), swarm(seed.wrapping_add(1), faults, queue).log_hash());
        // The recorded faults repeat the run, including the damage.
        let again = swarm(seed, Script::new(one.faults()), queue);
        prop_assert_eq!((again.log_hash(), again.faults()), (one.log_hash(), one.faults()));
        let counters = one.counters();
        let done = counters.dropped_by_rule + counters.duplicated + counters.delayed + counters.corrupted;
        prop_assert_eq!(one.faults().len() as u64, done);
    }
}

#[test]
fn port_drops_packets_beyond_its_receive_buffer() {
    use crate::port::{Port, RxToken, TxToken};
    let net = EmuNet::new(Fabric::new(1, LinkConfig::default()));
    let mut a = net.port(1, EmuPortConfig::default());
    let mut b = net.port(2, EmuPortConfig { receive_buffer_bytes: 100, ..EmuPortConfig::default() });
    for _ in 0..3 {
        a.transmit(us(0)).unwrap().consume(B, |buffer| (buffer[..40].fill(1), (40, ())).1);
    }
    a.flush(us(0));
    assert!(b.receive(us(0)).is_none(), "it is still in flight");
    assert_eq!(b.receive(us(5)).unwrap().consume(|from, bytes| (from, bytes.len())), (A, 40));
    assert!(b.receive(us(5)).is_some());
    assert!(b.receive(us(5)).is_none());
    assert_eq!(b.overflows(), 1);
    assert_eq!(net.fabric().counters().delivered, 3);
}

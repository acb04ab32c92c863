//! Packing does not change behaviour: each machine of a cluster runs twice, once packed after each event as in a search
//! and once unpacked with a running clock. Under seeded random events both send the same packets.

use crate::device::{searched_of, transmit};
use crate::machine::{Event, Machine};
use crate::rank::Member;
use crate::scope::{Scope, Wiring, all_reduce, one_level, two_levels};
use std::time::Duration;
use sumac_device::Node;
use sumac_hal::port::{Addr, Ecn};
use sumac_hal::time::Instant;
use sumac_hal::uplink::Uplink;
use sumac_tests::oracle::weight;

/// A machine that is never packed.
enum Live {
    Device(Box<Node<'static>>),
    Rank(Box<Member>),
}

impl Live {
    fn of(machine: &Machine) -> Self {
        match machine {
            Machine::Device(device) => Self::Device(Box::new(device.live())),
            Machine::Rank(member) => Self::Rank(member.clone()),
        }
    }

    fn timeout(&self) -> Option<Instant> {
        match self {
            Self::Device(node) => node.poll_timeout(),
            Self::Rank(member) => member.timeout(),
        }
    }

    fn meet(&mut self, scope: &Scope, wiring: &Wiring, event: Event<'_>, now: Instant) -> Vec<(Addr, Vec<u8>)> {
        match (self, event) {
            (Self::Rank(member), event) => member.meet(scope, wiring, event, now),
            (Self::Device(node), Event::Timer) => {
                node.handle_timeout(now);
                searched_of(scope, transmit(node, now))
            }
            (Self::Device(node), Event::Packets(packets)) => {
                packets.iter().for_each(|(from, bytes)| node.handle(now, *from, Ecn::Unmarked, bytes));
                searched_of(scope, transmit(node, now))
            }
            (Self::Device(_), event) => panic!("{event:?} is not part of a walk"),
        }
    }
}

/// Apply random events until every rank is done; return the number of timers that fired.
fn walk(scope: &Scope, seed: u64) -> usize {
    let wiring = Wiring::new(&scope.shape);
    let mut rested = Machine::all(scope, &wiring);
    let mut live: Vec<Live> = rested.iter().map(Live::of).collect();
    let mut packets: Vec<(usize, Addr, Vec<u8>)> = Vec::new();
    let mut now = Uplink::RESUME_AT;
    let (mut draws, mut fired) = (0, 0);
    let mut draw = |below: usize| {
        draws += 1;
        (weight(&[seed, draws]) % below as u64) as usize
    };
    for _ in 0..STEPS_MAX {
        let facts: Vec<_> = rested.iter().map(|machine| machine.facts(scope)).collect();
        if facts.iter().all(|facts| facts.done) {
            return fired;
        }
        // A hop's resolution is 66 us; a search treats all events as further apart.
        now = now + Duration::from_micros(66 + draw(100) as u64);
        let any = draw(rested.len());
        let taken;
        let (machine, event) = match draw(20) {
            0 if !packets.is_empty() => {
                packets.swap_remove(draw(packets.len()));
                continue;
            }
            1 | 2 if facts[any].can_call => (any, Event::Call),
            roll if facts[any].armed && (packets.is_empty() || roll == 3) => {
                // No peer is silent for long enough to be considered dead, and no packet is in flight for long enough
                // to make a hop appear longer than its timers.
                let due = live[any].timeout().expect("armed in both");
                if !packets.is_empty() && due > now + FLIGHT_MAX {
                    continue;
                }
                now = now.max(due);
                fired += 1;
                (any, Event::Timer)
            }
            roll if !packets.is_empty() => {
                let place = draw(packets.len());
                let (to, from, bytes) = packets[place].clone();
                if roll != 4 {
                    packets.swap_remove(place);
                }
                taken = (from, bytes);
                (to, Event::Packets(&[(taken.0, &taken.1)]))
            }
            _ => continue,
        };
        let act = rested[machine].act(scope, &wiring, event);
        assert_eq!(act.flaw, None);
        let sent = live[machine].meet(scope, &wiring, event, now);
        assert_eq!(sent, act.sent, "seed {seed}: {} and {event:?}", wiring.name(machine));
        rested[machine] = act.next;
        packets.extend(sent.into_iter().map(|(to, bytes)| (wiring.machine(to), wiring.addr(machine), bytes)));
    }
    panic!("seed {seed}: no end");
}

const STEPS_MAX: usize = 20_000;
const FLIGHT_MAX: Duration = Duration::from_secs(1);

#[test]
fn packed_machines_behave_as_unpacked_ones() {
    for shape in [one_level(3), two_levels(&[2, 1])] {
        let calls = vec![vec![all_reduce(4)], vec![all_reduce(2)]];
        let scope = Scope { credit_max: u16::MAX, ..Scope::new(shape, (2, 4), 1).with_calls(calls) };
        let fired: usize = (0..200).map(|seed| walk(&scope, seed)).sum();
        assert!(fired > 200, "{fired} timers");
    }
}

//! Scripts of takeovers, and a model: two controllers, devices and ranks, and every link between them cut and restored,
//! controllers and devices restarted and stopped at random.

use super::*;
use sumac_hal::ctrl::{Refusal, Request, TermClaim, TermGuard};

const SILENCE: Duration = Duration::from_secs(5);

fn config(is_second: bool) -> PairConfig {
    PairConfig { peer: SocketAddr::from(([127, 0, 0, 1], 1)), is_second, silence: SILENCE }
}

fn pair(is_second: bool) -> Pair {
    Pair::new(config(is_second), Instant::ZERO)
}

const fn at_s(seconds: u64) -> Instant {
    Instant::from_nanos(seconds * 1_000_000_000)
}

#[test]
fn first_that_does_not_reach_its_peer_activates_at_once_and_the_second_does_not() {
    let (mut first, mut second) = (pair(false), pair(true));
    for pair in [&mut first, &mut second] {
        assert_eq!(pair.update(), None, "before the peer was asked");
        pair.handle_no_answer();
    }
    assert_eq!(first.update(), Some(RoleChange::Activated { term: 1 }));
    for s in 1..60 {
        second.set_time(at_s(s));
        second.handle_no_answer();
        assert_eq!(second.update(), None, "nobody has lost the first one");
    }
}

#[test]
fn standby_takes_over_after_silence_and_a_witness_only() {
    let active = PeerReport { seen: 1, is_active: true, is_second: false };
    // Whether the peer stays silent, and whether somebody comes.
    for (is_silent, comes, takes_over) in [(true, true, true), (true, false, false), (false, true, false)] {
        let mut second = pair(true);
        second.handle_answer(active, at_s(0));
        let mut changes = Vec::new();
        for s in 1..=10 {
            second.set_time(at_s(s));
            if !is_silent {
                second.handle_answer(active, at_s(s));
            }
            if comes {
                second.handle_witness();
            }
            changes.extend(second.update().map(|change| (s, change)));
        }
        let expected = if takes_over { vec![(5, RoleChange::Activated { term: 2 })] } else { vec![] };
        assert_eq!(changes, expected, "silent {is_silent}, witness {comes}");
    }
}

#[test]
fn first_that_comes_back_is_fenced_by_its_peer_or_by_a_device() {
    for by_peer in [true, false] {
        let mut first = pair(false);
        first.handle_no_answer();
        assert_eq!(first.update(), Some(RoleChange::Activated { term: 1 }));
        if by_peer {
            first.handle_report(PeerReport { seen: 2, is_active: true, is_second: true });
        } else {
            first.handle_refused_term(2);
        }
        assert_eq!(first.update(), Some(RoleChange::Fenced { own: 1, by: 2 }));
        assert_eq!((first.update(), first.term()), (None, None), "it does not take over at once");
    }
}

#[test]
fn stopped_active_controller_stands_by_until_it_has_asked_its_peer() {
    let mut first = pair(false);
    first.handle_no_answer();
    first.update();
    assert_eq!(first.set_time(at_s(6)), Some(RoleChange::Stalled));
    first.handle_witness();
    assert_eq!(first.update(), None, "the peer may have taken over");
    // What it reported or answered before says nothing.
    let standby = PeerReport { seen: 1, is_active: false, is_second: true };
    first.handle_report(standby);
    first.handle_answer(standby, at_s(1));
    assert_eq!(first.update(), None, "the peer may have taken over since");
    first.handle_answer(standby, at_s(6));
    assert_eq!(first.update(), Some(RoleChange::Activated { term: 3 }));
}

#[test]
fn report_of_a_controller_on_the_same_side_is_ignored() {
    let mut first = pair(false);
    let report = PeerReport { seen: 9, is_active: true, is_second: false };
    first.handle_report(report);
    first.handle_answer(report, at_s(0));
    assert_eq!((first.hears_peer(), first.seen), (false, 0));
}

/// Without keys any process of the machine may report, and with keys any device.
#[test]
fn false_reports_of_high_terms_leave_terms_for_later_takeovers() {
    let mut pair = pair(false);
    for _ in 0..1000 {
        pair.see(TERM_MAX - 1);
    }
    assert_eq!(pair.seen, 1000 * HINT_MAX);
    for s in 1..=6 {
        pair.set_time(at_s(s));
        pair.handle_no_answer();
    }
    pair.handle_witness();
    let Some(RoleChange::Activated { term }) = pair.update() else { panic!("it takes over: {pair:?}") };
    assert!(term > 1000 * HINT_MAX && term < TERM_MAX / 1_000_000, "{term}");
}

#[test]
fn term_beyond_the_limit_is_ignored() {
    let mut first = pair(false);
    first.handle_answer(PeerReport { seen: u64::MAX, is_active: false, is_second: true }, at_s(0));
    assert_eq!(first.update(), Some(RoleChange::Activated { term: 1 }));
}

/// Pseudo-random numbers (SplitMix64).
struct Rng(u64);

impl Rng {
    const fn below(&mut self, limit: u64) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mixed = (self.0 ^ self.0 >> 30).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        (mixed ^ mixed >> 29) % limit
    }
}

const DEVICES: usize = 3;
const RANKS: usize = 2;

/// A device or a rank: one connection at a time, and the highest term it has seen.
struct Peer {
    guard: TermGuard,
    /// The controller it is connected to, in which incarnation, and since when it has heard nothing.
    connected: Option<(usize, u64, Instant)>,
    next: usize,
    is_device: bool,
}

struct Model {
    rng: Rng,
    now: Instant,
    controllers: [Pair; 2],
    incarnations: [u64; 2],
    /// Stopped until then, as by SIGSTOP.
    stopped: [Instant; 2],
    peers: Vec<Peer>,
    /// Links: between the controllers, then from each peer to each controller.
    cut: Vec<bool>,
    /// The highest term of which a request was executed, by peer.
    executed: Vec<u64>,
}

impl Model {
    fn new(seed: u64) -> Self {
        let peer = |index| Peer { guard: TermGuard::default(), connected: None, next: 0, is_device: index < DEVICES };
        Self {
            rng: Rng(seed),
            now: Instant::ZERO,
            controllers: [pair(false), pair(true)],
            incarnations: [0; 2],
            stopped: [Instant::ZERO; 2],
            peers: (0..DEVICES + RANKS).map(peer).collect(),
            cut: vec![false; 1 + 2 * (DEVICES + RANKS)],
            executed: vec![0; DEVICES + RANKS],
        }
    }

    fn runs(&self, controller: usize) -> bool {
        self.stopped[controller] <= self.now
    }

    fn restart(&mut self, controller: usize) {
        self.controllers[controller] = Pair::new(config(controller == 1), self.now);
        self.incarnations[controller] += 1;
        self.stopped[controller] = self.now;
    }

    /// Let half a second pass, and let everybody act in random order.
    fn step(&mut self) {
        self.now = self.now + Duration::from_millis(500);
        let count = 2 + self.peers.len();
        let first = self.rng.below(count as u64) as usize;
        for index in (0..count).map(|index| (index + first) % count) {
            match index.checked_sub(2) {
                None if self.runs(index) => self.ask_peer(index),
                None => {}
                Some(peer) => self.act(peer),
            }
        }
        self.check();
    }

    /// A controller asks the other one.
    fn ask_peer(&mut self, index: usize) {
        self.set_time(index);
        let other = 1 - index;
        if self.cut[0] || !self.runs(other) {
            self.controllers[index].handle_no_answer();
        } else {
            self.set_time(other);
            let report = self.controllers[index].report();
            self.controllers[other].handle_report(report);
            self.update(other);
            let report = self.controllers[other].report();
            self.controllers[index].handle_answer(report, self.now);
        }
        self.update(index);
    }

    /// A role that changes ends all connections.
    fn set_time(&mut self, index: usize) {
        if self.controllers[index].set_time(self.now).is_some() {
            self.incarnations[index] += 1;
        }
    }

    fn update(&mut self, index: usize) {
        while self.controllers[index].update().is_some() {
            self.incarnations[index] += 1;
        }
    }

    fn reaches(&self, peer: usize, controller: usize) -> bool {
        !self.cut[1 + 2 * peer + controller] && self.runs(controller)
    }

    /// A device or a rank connects, or executes what its controller sends.
    fn act(&mut self, index: usize) {
        if let Some((controller, incarnation, heard_at)) = self.peers[index].connected {
            let is_silent = !self.reaches(index, controller);
            let has_ended = !is_silent && self.incarnations[controller] != incarnation;
            if has_ended || self.now - heard_at >= SILENCE {
                self.peers[index].connected = None;
            } else if !is_silent {
                self.execute(index, controller);
            }
            return;
        }
        let controller = self.peers[index].next;
        self.peers[index].next = 1 - controller;
        if !self.reaches(index, controller) {
            return;
        }
        self.set_time(controller);
        if !self.peers[index].is_device {
            let seen = self.peers[index].guard.seen();
            self.controllers[controller].handle_hint(seen);
        }
        if self.controllers[controller].term().is_none() {
            self.controllers[controller].handle_witness();
            return self.update(controller);
        }
        self.peers[index].guard.connect();
        self.peers[index].connected = Some((controller, self.incarnations[controller], self.now));
        self.execute(index, controller);
    }

    /// The active controller claims its term and sends a request.
    fn execute(&mut self, index: usize, controller: usize) {
        self.set_time(controller);
        let Some(term) = self.controllers[controller].term() else { return };
        let claim = Request::Claim(TermClaim { term, silence_ms: 5000 });
        let peer = &mut self.peers[index];
        match peer.guard.admit(&claim) {
            Ok(()) => {
                assert!(self.executed[index] <= term, "{term} after {}", self.executed[index]);
                self.executed[index] = term;
                peer.connected = Some((controller, self.incarnations[controller], self.now));
            }
            Err(Refusal::OldTerm { seen }) => {
                peer.connected = None;
                if peer.is_device {
                    self.controllers[controller].handle_refused_term(seen);
                    self.update(controller);
                }
            }
            Err(refusal) => panic!("{refusal}"),
        }
    }

    fn check(&self) {
        let terms = self.controllers.each_ref().map(Pair::term);
        assert!(terms[0].is_none() || terms[0] != terms[1], "both are active in {:?}", terms[0]);
    }

    /// Cut or restore a link, or restart or stop somebody.
    fn disturb(&mut self) {
        match self.rng.below(8) {
            0 => {
                let controller = self.rng.below(2) as usize;
                self.restart(controller);
            }
            1 => {
                let (controller, time) = (self.rng.below(2) as usize, Duration::from_secs(self.rng.below(12)));
                self.stopped[controller] = self.now + time;
            }
            2 => {
                // A device that keeps its term over a restart.
                let device = self.rng.below(DEVICES as u64) as usize;
                self.peers[device].guard = TermGuard::new(self.peers[device].guard.seen());
                self.peers[device].connected = None;
            }
            _ => {
                let link = self.rng.below(self.cut.len() as u64) as usize;
                self.cut[link] = !self.cut[link];
            }
        }
    }
}

#[test]
fn no_part_returns_to_an_old_term_and_one_controller_serves_all_in_the_end() {
    let mut stranded = 0;
    for seed in 0..SEEDS {
        let mut model = Model::new(seed);
        for _ in 0..60 {
            model.disturb();
            for _ in 0..model.rng.below(16) {
                model.step();
            }
        }
        model.cut.fill(false);
        for _ in 0..100 {
            model.step();
        }
        let active: Vec<_> = (0..2).filter(|&index| model.controllers[index].term().is_some()).collect();
        assert_eq!(active.len(), 1, "seed {seed}: {:?}", model.controllers);
        let term = model.controllers[active[0]].term().expect("active");
        for (index, peer) in model.peers.iter().enumerate() {
            let served = peer.connected.map(|(controller, ..)| controller);
            let what = format!("seed {seed}: {index} of term {} at {term}", peer.guard.seen());
            // Both controllers may have forgotten a term that only ranks have seen, and those refuse lower ones.
            if peer.is_device || served.is_some() {
                assert_eq!((served, peer.guard.seen()), (Some(active[0]), term), "{what}");
            } else {
                assert!(peer.guard.seen() > term, "{what}");
                stranded += 1;
            }
        }
    }
    assert!(stranded < SEEDS / 50, "{stranded} ranks are stranded");
}

/// How many random runs.
const SEEDS: u64 = 2000;

/// The second one has three of the devices and ranks, the first one keeps the others.
#[test]
fn partitioned_pair_serves_each_device_under_one_term_and_heals_to_the_higher() {
    let mut model = Model::new(1);
    (0..4).for_each(|_| model.step());
    assert_eq!(model.controllers[0].term(), Some(1));
    model.cut[0] = true;
    for index in 0..model.peers.len() {
        let lost = usize::from(index >= 3);
        model.cut[1 + 2 * index + lost] = true;
    }
    (0..40).for_each(|_| model.step());
    assert_eq!(model.controllers.each_ref().map(Pair::term), [Some(1), Some(2)]);
    assert_eq!(model.executed, [2, 2, 2, 1, 1]);
    model.cut.fill(false);
    (0..20).for_each(|_| model.step());
    assert_eq!(model.controllers.each_ref().map(Pair::term), [None, Some(2)]);
    assert_eq!(model.executed, [2; 5]);
}

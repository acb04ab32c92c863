//! How many connections a controller serves whose peers have not proved that they have a key.
//!
//! Everybody who reaches the port can open connections, and each costs a key exchange. Whatever is beyond the budget is
//! closed unread, which costs as much as a socket that discards connections. Peers with a key try again.
//!
//! Invariants:
//! - A peer that proves to have a key gives back what its exchange took, so that jobs of any size may start at once.
//! - One address takes at most half of the budget, whatever it sends: the rest is there for others.
//! - Memory is bounded: of more than [`SOURCES_MAX`] addresses, those that have taken least are forgotten.

use std::net::IpAddr;
use std::time::Duration;
use sumac_hal::time::Instant;

/// How many addresses are told apart.
const SOURCES_MAX: usize = 64;

/// A limit on events: they are `interval` apart on average, and at most `burst` happen at once.
#[derive(Debug, Clone, Copy)]
pub(super) struct Pace {
    interval_ns: u64,
    /// How long a burst would take at this interval.
    burst_ns: u64,
}

impl Pace {
    pub(super) const fn new(interval: Duration, burst: u32) -> Self {
        let interval_ns = interval.as_nanos() as u64;
        Self { interval_ns, burst_ns: interval_ns.saturating_mul(burst as u64) }
    }

    /// At least one event at once, and one an hour.
    fn per_second(rate: u32, burst: u32) -> Self {
        let interval = Duration::from_secs(1).checked_div(rate).unwrap_or(Duration::from_secs(3600));
        Self::new(interval, burst.max(1))
    }
}

/// The events so far: when they would end if they had kept to the interval.
#[derive(Debug, Clone, Copy, Default)]
pub(super) struct Taken {
    until_ns: u64,
}

impl Taken {
    /// When one more event may happen; in the past if it may at once.
    pub(super) const fn next_at(self, pace: Pace) -> Instant {
        Instant::from_nanos((self.until_ns + pace.interval_ns).saturating_sub(pace.burst_ns))
    }

    /// One more event happens.
    pub(super) fn take(&mut self, pace: Pace, now: Instant) {
        self.until_ns = self.until_ns.max(now.as_nanos()) + pace.interval_ns;
    }

    /// One event is not counted after all.
    const fn give_back(&mut self, pace: Pace) {
        self.until_ns = self.until_ns.saturating_sub(pace.interval_ns);
    }
}

/// Where a connection comes from: an IPv4 address, or the network of an IPv6 address, in which hosts choose their own.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Source(u128);

impl From<IpAddr> for Source {
    fn from(addr: IpAddr) -> Self {
        match addr.to_canonical() {
            IpAddr::V4(addr) => Self(addr.to_ipv6_mapped().to_bits()),
            IpAddr::V6(addr) => Self(addr.to_bits() >> 64 << 64),
        }
    }
}

/// The key exchanges that may begin.
#[derive(Debug)]
pub(super) struct Budget {
    of_all: Pace,
    all: Taken,
    of_each: Pace,
    sources: Vec<(Source, Taken)>,
}

impl Budget {
    /// Allow `rate` exchanges a second that do not succeed, and `burst` at once.
    pub(super) fn new(rate: u32, burst: usize) -> Self {
        let burst = u32::try_from(burst).unwrap_or(u32::MAX);
        let (of_all, of_each) = (Pace::per_second(rate, burst), Pace::per_second(rate / 2, burst / 2));
        Self { of_all, all: Taken::default(), of_each, sources: Vec::new() }
    }

    /// Begin an exchange. False if it must not begin.
    pub(super) fn take(&mut self, source: Source, now: Instant) -> bool {
        let (of_all, of_each) = (self.of_all, self.of_each);
        let known = self.sources.iter().position(|(known, _)| *known == source);
        let taken = known.map_or_else(Taken::default, |at| self.sources[at].1);
        if self.all.next_at(of_all).max(taken.next_at(of_each)) > now {
            return false;
        }
        self.all.take(of_all, now);
        let at = known.unwrap_or_else(|| self.add(source));
        self.sources[at].1.take(of_each, now);
        true
    }

    /// An exchange has succeeded.
    pub(super) fn give_back(&mut self, source: Source) {
        self.all.give_back(self.of_all);
        if let Some((_, taken)) = self.sources.iter_mut().find(|(known, _)| *known == source) {
            taken.give_back(self.of_each);
        }
    }

    /// Make room for an address.
    fn add(&mut self, source: Source) -> usize {
        let entry = (source, Taken::default());
        if self.sources.len() < SOURCES_MAX {
            self.sources.push(entry);
            return self.sources.len() - 1;
        }
        let least = (0..SOURCES_MAX).min_by_key(|&at| self.sources[at].1.until_ns).unwrap_or(0);
        self.sources[least] = entry;
        least
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn at(ms: u64) -> Instant {
        Instant::ZERO + Duration::from_millis(ms)
    }

    fn host(number: u8) -> Source {
        IpAddr::from([10, 0, 0, number]).into()
    }

    /// How many of `count` exchanges of a host may begin at this time.
    fn begun(budget: &mut Budget, from: Source, count: usize, now: Instant) -> usize {
        (0..count).filter(|_| budget.take(from, now)).count()
    }

    #[test]
    fn one_address_takes_half_of_the_budget_and_others_the_rest() {
        let mut budget = Budget::new(100, 40);
        assert_eq!(begun(&mut budget, host(1), 1000, at(0)), 20);
        assert_eq!(begun(&mut budget, host(2), 10, at(0)), 10);
        assert_eq!(begun(&mut budget, host(3), 1000, at(0)), 10, "what is left");
        // As much as a tenth of a second brings back, for both.
        assert_eq!(begun(&mut budget, host(1), 1000, at(100)), 5);
        assert_eq!(begun(&mut budget, host(2), 1000, at(100)), 5);
        // No more than a burst, however long it was quiet.
        assert_eq!(begun(&mut budget, host(1), 1000, at(1_000_000)), 20);
    }

    #[test]
    fn exchanges_that_succeed_take_nothing() {
        let mut budget = Budget::new(1, 4);
        for _ in 0..1000 {
            assert_eq!(begun(&mut budget, host(1), 3, at(0)), 2);
            budget.give_back(host(1));
            budget.give_back(host(1));
        }
        // What was taken in vain is not given back with it, and a late success is no credit for later.
        assert_eq!(begun(&mut budget, host(1), 3, at(0)), 2);
        budget.give_back(host(1));
        assert_eq!(begun(&mut budget, host(1), 3, at(0)), 1);
        for _ in 0..100 {
            budget.give_back(host(1));
        }
        assert_eq!(begun(&mut budget, host(1), 100, at(0)), 2);
    }

    #[test]
    fn many_addresses_share_the_budget_in_bounded_memory() {
        let mut budget = Budget::new(1000, 1000);
        assert_eq!(begun(&mut budget, host(0), 600, at(1)), 500);
        let other = |number: u32| Source::from(IpAddr::from((0xc000_0000 + number).to_be_bytes()));
        assert_eq!((0..10_000).filter(|&number| budget.take(other(number), at(1))).count(), 500);
        assert_eq!(budget.sources.len(), SOURCES_MAX);
        // The one that has taken most is not forgotten.
        assert_eq!(begun(&mut budget, host(0), 600, at(101)), 50);
    }

    #[test]
    fn addresses_of_an_ipv6_network_are_one_source() {
        let source = |text: &str| Source::from(text.parse::<IpAddr>().expect("an address"));
        assert_eq!(source("2001:db8::1"), source("2001:db8::ffff:1"));
        assert_ne!(source("2001:db8::1"), source("2001:db8:0:1::1"));
        assert_eq!(source("::ffff:10.0.0.1"), host(1));
        assert_ne!(host(1), host(2));
    }

    #[test]
    fn zero_rate_allows_one_exchange() {
        let mut budget = Budget::new(0, 0);
        assert_eq!((begun(&mut budget, host(1), 9, at(0)), begun(&mut budget, host(1), 9, at(1_000_000))), (1, 0));
        assert_eq!(begun(&mut budget, host(1), 9, at(3_600_000)), 1);
    }
}

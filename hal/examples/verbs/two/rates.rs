//! Rates and latencies between two machines, measured by the side that connects.

use crate::LIMIT;
use std::time::{Duration, Instant as Clock};
use sumac_hal::port::{Addr, Port, RxToken, TxToken};
use sumac_hal::remote::{Arrived, Link, LinkError, MESSAGE_LEN_BYTES};
use sumac_hal::time::Instant;
use sumac_hal::verbs::{ExposedRegion, OneSided, RemoteRegion, VerbsPort};

/// How long each rate is measured.
pub(super) const MEASURED: Duration = Duration::from_millis(500);

/// Operations in flight; the queue has room for 128.
const IN_FLIGHT: u64 = 128;

/// Bytes in flight: more than a link of 400 Gbit/s holds in 20 us. A completion is requested for every eighth of them.
const IN_FLIGHT_BYTES: u64 = 2 << 20;

/// The number of round trips of each latency, and how long they may take together: fewer if they take longer.
const ROUNDS: usize = 1000;
const ROUNDS_LIMIT: Duration = Duration::from_secs(3);

/// The lengths whose rates are measured, in bytes.
const LENGTHS: [u64; 3] = [4 << 10, 64 << 10, 1 << 20];

/// The length of what travels for a latency, in bytes.
const SHORT: usize = 64;

/// Wait for the next arrival without sleeping.
pub(super) fn next(link: &mut dyn Link) -> Result<Arrived, LinkError> {
    let (start, mut message) = (Clock::now(), [0; MESSAGE_LEN_BYTES]);
    loop {
        if let Some(arrived) = link.receive(&mut message)? {
            return Ok(arrived);
        }
        assert!(start.elapsed() < LIMIT, "nothing comes");
        std::thread::yield_now();
    }
}

/// Print a rate.
pub(super) fn print_rate(what: &str, len_bytes: u64, bytes: u64, took: Duration) {
    println!("rate {what} {len_bytes} B {:.3} Gbit/s", bytes as f64 * 8e-9 / took.as_secs_f64());
}

/// Print the median and the 99th percentile; `trips` is what one time counts for: 2 halves round trips.
pub(super) fn print_latency(what: &str, len_bytes: usize, trips: u32, mut times: Vec<Duration>) {
    times.sort_unstable();
    let us = |part: usize| (times[times.len() * part / 100] / trips).as_secs_f64() * 1e6;
    println!("latency {what} {len_bytes} B {:.2} us, p99 {:.2} us", us(50), us(99));
}

/// Send one packet to and fro. Datagrams may be lost: a packet that does not return is sent again, and its time is not
/// counted.
pub(super) fn packets(port: &mut VerbsPort, to: Addr) {
    const AGAIN: Duration = Duration::from_millis(200);
    let (start, mut times, mut round) = (Clock::now(), Vec::with_capacity(ROUNDS), 0);
    while is_open(&times, start) {
        round += 1;
        send(port, to, round);
        let (mut sent, mut is_first) = (Clock::now(), true);
        while receive(port) != Some(round) {
            assert!(start.elapsed() < 3 * LIMIT, "no packet returns after {round} round trips: {port:?}");
            if sent.elapsed() > AGAIN {
                send(port, to, round);
                (sent, is_first) = (Clock::now(), false);
            }
        }
        if is_first {
            times.push(sent.elapsed());
        }
    }
    print_latency("packet", SHORT, 2, times);
}

/// Whether to measure another round trip; at least one.
pub(super) fn is_open(times: &[Duration], start: Clock) -> bool {
    times.is_empty() || times.len() < ROUNDS && start.elapsed() < ROUNDS_LIMIT
}

/// Send packets back until `is_over`.
pub(super) fn echo(port: &mut VerbsPort, to: Addr, is_over: impl Fn() -> bool) {
    let start = Clock::now();
    while !is_over() {
        assert!(start.elapsed() < 4 * LIMIT, "the other side does not finish: {port:?}");
        for _ in 0..ROUNDS {
            receive(port).into_iter().for_each(|round| send(port, to, round));
        }
    }
}

/// Return the round of a packet that has arrived.
fn receive(port: &mut VerbsPort) -> Option<u16> {
    let received = port.receive(Instant::ZERO).map(|token| token.consume(|_, bytes| [bytes[0], bytes[1]]));
    if received.is_none() {
        // On one processor, Soft-RoCE's threads have to run, too.
        std::thread::yield_now();
    }
    received.map(u16::from_le_bytes)
}

fn send(port: &mut VerbsPort, to: Addr, round: u16) {
    if let Some(token) = port.transmit(Instant::ZERO) {
        token.consume(to, |buffer| (buffer[..2].copy_from_slice(&round.to_le_bytes()), (SHORT, ())).1);
    }
    port.flush(Instant::ZERO);
}

#[derive(Clone, Copy)]
enum Access {
    Read,
    Write,
}

/// Measure reads and writes of the other machine's memory.
pub(super) fn one_sided(link: &mut OneSided, near: &mut ExposedRegion, theirs: &RemoteRegion) {
    for (access, name) in [(Access::Write, "write"), (Access::Read, "read")] {
        for len_bytes in LENGTHS {
            let start = Clock::now();
            let first = progress(link);
            let (mut next, mut done) = (first, first);
            while start.elapsed() < MEASURED {
                while (next - done) * len_bytes < IN_FLIGHT_BYTES && (next - done) < IN_FLIGHT {
                    post(link, near, theirs, access, len_bytes);
                    next += 1;
                    if next.is_multiple_of(IN_FLIGHT / 8) || next * len_bytes % (IN_FLIGHT_BYTES / 8) == 0 {
                        link.flush();
                    }
                }
                link.flush();
                done = progress(link);
            }
            until_done(link, next);
            print_rate(name, len_bytes, (next - first) * len_bytes, start.elapsed());
        }
        let (start, mut times) = (Clock::now(), Vec::with_capacity(ROUNDS));
        while is_open(&times, start) {
            let (sent, next) = (Clock::now(), progress(link) + 1);
            post(link, near, theirs, access, SHORT as u64);
            link.flush();
            until_done(link, next);
            times.push(sent.elapsed());
        }
        print_latency(name, SHORT, 1, times);
    }
}

/// Queue an operation.
fn post(link: &mut OneSided, near: &mut ExposedRegion, theirs: &RemoteRegion, access: Access, len_bytes: u64) {
    let queued = match access {
        Access::Read => link.read((near, 0), (theirs, 0), len_bytes),
        Access::Write => link.write((near, 0), (theirs, 0), len_bytes),
    };
    queued.expect("room");
}

/// Return how many operations are complete.
fn progress(link: &mut OneSided) -> u64 {
    let progress = link.poll();
    assert_eq!(progress.error, None, "{link:?}");
    std::thread::yield_now();
    progress.done
}

/// Wait until so many operations are complete.
fn until_done(link: &mut OneSided, count: u64) {
    let start = Clock::now();
    while progress(link) < count {
        assert!(start.elapsed() < 3 * LIMIT, "not complete: {link:?}");
    }
}

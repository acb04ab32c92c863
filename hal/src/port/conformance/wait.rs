//! The rules of a [`WaitPort`]: it comes back for a packet, for a wake and when time is up, and no wake is lost.

use super::{Ledger, Testbed, Violation, content, pair, put};
use crate::port::{Addr, Port, RxToken, TxToken, WaitPort, Wake};
use crate::time::Instant;
use std::sync::mpsc;
use std::thread;
use std::time::Duration;

/// Long enough that only a lost wake-up can use it up.
const FOREVER: Duration = Duration::from_secs(20);

/// How often two threads wake each other.
const ROUNDS: u32 = 2000;

/// A testbed whose ports can wait.
pub trait WaitTestbed: Testbed<Port: WaitPort + Send> {
    /// Return what wakes `port` from another thread.
    fn waker(&mut self, port: &Self::Port) -> Box<dyn Fn() + Send>;
}

/// Check every rule for a [`WaitPort`].
///
/// # Errors
/// The first rule that it breaks.
pub fn run_wait<B: WaitTestbed>(bed: &mut B) -> Result<(), Violation> {
    time_runs_out(bed)?;
    a_packet_ends_the_wait(bed)?;
    a_wake_ends_one_wait(bed)?;
    no_wake_is_lost(bed)?;
    no_packet_is_slept_over(bed)
}

fn expect(check: &'static str, expected: Wake, found: Wake) -> Result<(), Violation> {
    if expected == found { Ok(()) } else { Err(Violation::Wake { check, expected, found }) }
}

fn time_runs_out<B: WaitTestbed>(bed: &mut B) -> Result<(), Violation> {
    let (mut a, _b) = pair(bed);
    for timeout in [Duration::ZERO, Duration::from_nanos(1), Duration::from_millis(2)] {
        expect("time runs out", Wake::Timeout, a.wait(Some(timeout)))?;
    }
    Ok(())
}

/// Also for packets that the port fetched together with one already taken.
fn a_packet_ends_the_wait<B: WaitTestbed>(bed: &mut B) -> Result<(), Violation> {
    let check = "a packet ends the wait";
    let mut ledger = Ledger::new(check);
    let (mut a, mut b) = pair(bed);
    for i in 0..3 {
        ledger.send(bed, &mut a, b.local_addr(), &content(i, 100))?;
    }
    a.flush(bed.now());
    let at = b.local_addr();
    for _ in 0..3 {
        loop {
            expect(check, Wake::Packet, b.wait(Some(FOREVER)))?;
            if let Some(token) = b.receive(bed.now()) {
                break token.consume(|_, bytes| ledger.strike(at, bytes))?;
            }
        }
    }
    ledger.settle(bed, &mut b)?;
    expect(check, Wake::Timeout, b.wait(Some(Duration::ZERO)))
}

/// Wakes before a wait are kept, as one.
fn a_wake_ends_one_wait<B: WaitTestbed>(bed: &mut B) -> Result<(), Violation> {
    let check = "a wake ends one wait";
    let (mut a, _b) = pair(bed);
    let wake = bed.waker(&a);
    for _ in 0..3 {
        wake();
        wake();
        expect(check, Wake::Woken, a.wait(Some(FOREVER)))?;
        expect(check, Wake::Timeout, a.wait(Some(Duration::ZERO)))?;
    }
    Ok(())
}

fn no_wake_is_lost<B: WaitTestbed>(bed: &mut B) -> Result<(), Violation> {
    let (mut a, _b) = pair(bed);
    let wake = bed.waker(&a);
    let (go, rounds) = mpsc::channel::<u32>();
    thread::scope(|scope| {
        scope.spawn(move || {
            for round in rounds {
                // Meet the wait at different moments of its way to sleep.
                (0..round % 97 * 50).for_each(|_| std::hint::spin_loop());
                wake();
            }
        });
        for round in 0..ROUNDS {
            // The other thread ends when `go` is dropped.
            let _ = go.send(round);
            expect("no wake is lost", Wake::Woken, a.wait(Some(FOREVER)))?;
        }
        drop(go);
        Ok(())
    })
}

/// Two threads hand one packet back and forth, each asleep until it comes.
fn no_packet_is_slept_over<B: WaitTestbed>(bed: &mut B) -> Result<(), Violation> {
    let (mut a, mut b) = pair(bed);
    let (to_a, to_b) = (a.local_addr(), b.local_addr());
    let now = bed.now();
    thread::scope(|scope| {
        let other = scope.spawn(move || bounce(&mut b, to_a, false, now));
        bounce(&mut a, to_b, true, now)?;
        other.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic))
    })
}

fn bounce<P: WaitPort>(port: &mut P, to: Addr, serve: bool, now: Instant) -> Result<(), Violation> {
    for round in 0..ROUNDS {
        if !(serve && round == 0) {
            while port.receive(now).map(|token| token.consume(|_, _| ())).is_none() {
                expect("no packet is slept over", Wake::Packet, port.wait(Some(FOREVER)))?;
            }
        }
        if let Some(token) = port.transmit(to, now) {
            token.consume(|buffer| (put(buffer, &round.to_le_bytes()), ()));
        }
        port.flush(now);
    }
    Ok(())
}

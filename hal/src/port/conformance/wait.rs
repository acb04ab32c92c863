//! The rules of a [`WaitPort`]: it comes back for a packet, for a wake and when time is up, and no wake is lost.

use super::{Ledger, Testbed, Violation, content, pair, put};
use crate::port::{Addr, Port, RxToken, TxToken, WaitPort, Wake};
use crate::time::Instant;
use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};
use std::sync::mpsc;
use std::thread;
use std::time::Duration;

/// Long enough for one wait that only a lost wake-up can use it up, however busy the machine is.
const FOREVER: Duration = Duration::from_secs(30);

/// How often is looked whether a wait has ended.
const LOOK: Duration = Duration::from_millis(500);

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
    let check = "no wake is lost";
    let (mut a, mut b) = pair(bed);
    let (wake, to_a, now) = (bed.waker(&a), a.local_addr(), bed.now());
    let (go, rounds) = mpsc::channel::<u32>();
    let rescue = Rescue::default();
    thread::scope(|scope| {
        scope.spawn(move || {
            for round in rounds {
                // Meet the wait on its way to sleep, and asleep: on a core of its own the sleeper needs some hundred
                // microseconds, on this thread's core it needs the core.
                (0..1_u32 << (round % 16)).for_each(|_| std::hint::spin_loop());
                (0..round % 61).for_each(|_| thread::yield_now());
                wake();
            }
        });
        let finished = rescue.watch(scope, move || send(&mut b, to_a, 0, now));
        for round in 0..ROUNDS {
            // The other thread ends when `go` is dropped.
            let _ = go.send(round);
            let found = a.wait(None);
            if rescue.has_come() {
                return Err(Violation::SleptOver { check });
            }
            rescue.note_progress();
            expect(check, Wake::Woken, found)?;
        }
        drop((go, finished));
        Ok(())
    })
}

/// Two threads hand one packet back and forth, each asleep until it comes.
fn no_packet_is_slept_over<B: WaitTestbed>(bed: &mut B) -> Result<(), Violation> {
    let (mut a, mut b) = pair(bed);
    let (to_a, to_b, now) = (a.local_addr(), b.local_addr(), bed.now());
    let (wake_a, wake_b) = (bed.waker(&a), bed.waker(&b));
    let rescue = Rescue::default();
    thread::scope(|scope| {
        let finished = rescue.watch(scope, move || {
            wake_a();
            wake_b();
        });
        let other = scope.spawn(|| bounce(&mut b, to_a, now, &rescue));
        send(&mut a, to_b, 0, now);
        let result = bounce(&mut a, to_b, now, &rescue);
        if result.is_err() {
            // The other side waits for a packet that does not come.
            drop(finished);
        }
        result.and(other.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic)))
    })
}

/// Answer [`ROUNDS`] packets with one each.
fn bounce<P: WaitPort>(port: &mut P, to: Addr, now: Instant, rescue: &Rescue) -> Result<(), Violation> {
    let check = "no packet is slept over";
    for round in 0..ROUNDS {
        while port.receive(now).map(|token| token.consume(|_, _| ())).is_none() {
            let found = port.wait(None);
            if rescue.has_come() {
                return Err(Violation::SleptOver { check });
            }
            rescue.note_progress();
            expect(check, Wake::Packet, found)?;
        }
        send(port, to, round, now);
    }
    Ok(())
}

fn send<P: Port>(port: &mut P, to: Addr, round: u32, now: Instant) {
    if let Some(token) = port.transmit(to, now) {
        token.consume(|buffer| (put(buffer, &round.to_le_bytes()), ()));
    }
    port.flush(now);
}

/// Ends a sleep that should have ended by itself.
///
/// A wait with a timeout would hide that: at its end it looks around, and finds what it has slept over.
#[derive(Default)]
struct Rescue {
    /// Waits that have ended.
    progress: AtomicU32,
    has_come: AtomicBool,
}

impl Rescue {
    fn has_come(&self) -> bool {
        self.has_come.load(Ordering::Acquire)
    }

    fn note_progress(&self) {
        self.progress.fetch_add(1, Ordering::Relaxed);
    }

    /// End the sleep of whoever sleeps when the returned sender is dropped, or when no wait has ended for [`FOREVER`]: then
    /// one that should have ended by itself did not.
    fn watch<'scope, 'env>(
        &'scope self,
        scope: &'scope thread::Scope<'scope, 'env>,
        mut rescue: impl FnMut() + Send + 'scope,
    ) -> mpsc::Sender<()> {
        let (finished, watch) = mpsc::channel();
        scope.spawn(move || {
            let (mut seen, mut still) = (self.progress.load(Ordering::Relaxed), Duration::ZERO);
            // Nothing is ever sent.
            while let Err(mpsc::RecvTimeoutError::Timeout) = watch.recv_timeout(LOOK) {
                let now = self.progress.load(Ordering::Relaxed);
                still = if now == seen { still + LOOK } else { Duration::ZERO };
                seen = now;
                if still >= FOREVER {
                    self.has_come.store(true, Ordering::Release);
                    break;
                }
            }
            rescue();
        });
        finished
    }
}

//! The rules of a [`WaitPort`]: a wait ends on a packet, a wake or a timeout, and no wake is lost.

use super::{Expectations, Testbed, Violation, content, pair, put};
use crate::port::{Addr, Port, RxToken, TxToken, WaitPort, Wake};
use crate::time::Instant;
use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};
use std::sync::mpsc;
use std::thread;
use std::time::Duration;

/// A wait that takes this long has lost a wake-up, however busy the machine is.
const WAIT_LIMIT: Duration = Duration::from_secs(30);

/// How often the watchdog checks for progress.
const POLL_INTERVAL: Duration = Duration::from_millis(500);

/// How many times two threads wake each other.
const ROUNDS: u32 = 2000;

/// A testbed for [`WaitPort`]s.
pub trait WaitTestbed: Testbed<Port: WaitPort + Send> {
    /// Return a function that wakes `port` from another thread.
    fn waker(&mut self, port: &Self::Port) -> Box<dyn Fn() + Send>;
}

/// Check an implementation of [`WaitPort`] against every rule.
///
/// # Errors
/// The first [`Violation`].
pub fn run_wait<B: WaitTestbed>(bed: &mut B) -> Result<(), Violation> {
    wait_times_out(bed)?;
    packet_ends_wait(bed)?;
    wake_ends_one_wait(bed)?;
    every_wake_ends_a_wait(bed)?;
    every_packet_ends_a_wait(bed)
}

fn expect(check: &'static str, expected: Wake, found: Wake) -> Result<(), Violation> {
    if expected == found { Ok(()) } else { Err(Violation::WrongWake { check, expected, found }) }
}

fn wait_times_out<B: WaitTestbed>(bed: &mut B) -> Result<(), Violation> {
    let (mut a, _b) = pair(bed);
    for timeout in [Duration::ZERO, Duration::from_nanos(1), Duration::from_millis(2)] {
        expect("wait times out", Wake::Timeout, a.wait(Some(timeout)))?;
    }
    Ok(())
}

/// A packet ends a wait, even if the port fetched it together with one that was already received.
fn packet_ends_wait<B: WaitTestbed>(bed: &mut B) -> Result<(), Violation> {
    let check = "packet ends wait";
    let mut expected = Expectations::new(check);
    let (mut a, mut b) = pair(bed);
    let at = bed.addr_of(&b);
    for i in 0..3 {
        expected.send(bed, &mut a, at, &content(i, 100))?;
    }
    a.flush(bed.now());
    for _ in 0..3 {
        loop {
            expect(check, Wake::Packet, b.wait(Some(WAIT_LIMIT)))?;
            if let Some(token) = b.receive(bed.now()) {
                break token.consume(|_, bytes| expected.check_off(at, bytes))?;
            }
        }
    }
    expected.receive_exactly(bed, &mut b)?;
    expect(check, Wake::Timeout, b.wait(Some(Duration::ZERO)))
}

/// Wakes before a wait are remembered as one.
fn wake_ends_one_wait<B: WaitTestbed>(bed: &mut B) -> Result<(), Violation> {
    let check = "wake ends one wait";
    let (mut a, _b) = pair(bed);
    let wake = bed.waker(&a);
    for _ in 0..3 {
        wake();
        wake();
        expect(check, Wake::Woken, a.wait(Some(WAIT_LIMIT)))?;
        expect(check, Wake::Timeout, a.wait(Some(Duration::ZERO)))?;
    }
    Ok(())
}

fn every_wake_ends_a_wait<B: WaitTestbed>(bed: &mut B) -> Result<(), Violation> {
    let check = "every wake ends a wait";
    let (mut a, mut b) = pair(bed);
    let (wake, to_a, now) = (bed.waker(&a), bed.addr_of(&a), bed.now());
    let (go, rounds) = mpsc::channel::<u32>();
    let watchdog = Watchdog::default();
    thread::scope(|scope| {
        scope.spawn(move || {
            for round in rounds {
                // Hit the wait both while it goes to sleep and while it sleeps. A sleeper on its own core needs a few
                // hundred microseconds; one on this thread's core needs the core.
                (0..1_u32 << (round % 16)).for_each(|_| std::hint::spin_loop());
                (0..round % 61).for_each(|_| thread::yield_now());
                wake();
            }
        });
        let finished = watchdog.watch(scope, move || send(&mut b, to_a, 0, now));
        for round in 0..ROUNDS {
            // The other thread exits when `go` is dropped.
            let _ = go.send(round);
            let found = a.wait(None);
            if watchdog.has_fired() {
                return Err(Violation::MissedWakeUp { check });
            }
            watchdog.note_progress();
            expect(check, Wake::Woken, found)?;
        }
        drop((go, finished));
        Ok(())
    })
}

/// Two threads pass one packet back and forth; each sleeps until it arrives.
fn every_packet_ends_a_wait<B: WaitTestbed>(bed: &mut B) -> Result<(), Violation> {
    let (mut a, mut b) = pair(bed);
    let (to_a, to_b, now) = (bed.addr_of(&a), bed.addr_of(&b), bed.now());
    let (wake_a, wake_b) = (bed.waker(&a), bed.waker(&b));
    let watchdog = Watchdog::default();
    thread::scope(|scope| {
        let finished = watchdog.watch(scope, move || {
            wake_a();
            wake_b();
        });
        let other = scope.spawn(|| bounce(&mut b, to_a, now, &watchdog));
        send(&mut a, to_b, 0, now);
        let result = bounce(&mut a, to_b, now, &watchdog);
        if result.is_err() {
            // The other side waits for a packet that will not arrive.
            drop(finished);
        }
        result.and(other.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic)))
    })
}

/// Reply to [`ROUNDS`] packets with one each.
fn bounce<P: WaitPort>(port: &mut P, to: Addr, now: Instant, watchdog: &Watchdog) -> Result<(), Violation> {
    let check = "every packet ends a wait";
    for round in 0..ROUNDS {
        while port.receive(now).map(|token| token.consume(|_, _| ())).is_none() {
            let found = port.wait(None);
            if watchdog.has_fired() {
                return Err(Violation::MissedWakeUp { check });
            }
            watchdog.note_progress();
            expect(check, Wake::Packet, found)?;
        }
        send(port, to, round, now);
    }
    Ok(())
}

fn send<P: Port>(port: &mut P, to: Addr, round: u32, now: Instant) {
    if let Some(token) = port.transmit(now) {
        token.consume(to, |buffer| (put(buffer, &round.to_le_bytes()), ()));
    }
    port.flush(now);
}

/// Ends a wait that should have ended by itself.
///
/// A timeout would hide the error, because a wait checks for packets again when it expires.
#[derive(Default)]
struct Watchdog {
    /// The number of waits that have ended.
    progress: AtomicU32,
    has_fired: AtomicBool,
}

impl Watchdog {
    fn has_fired(&self) -> bool {
        self.has_fired.load(Ordering::Acquire)
    }

    fn note_progress(&self) {
        self.progress.fetch_add(1, Ordering::Relaxed);
    }

    /// Call `end_waits` to end all waits when the returned sender is dropped, or when no wait has ended for
    /// [`WAIT_LIMIT`]: one that should have ended did not.
    fn watch<'scope, 'env>(
        &'scope self,
        scope: &'scope thread::Scope<'scope, 'env>,
        mut end_waits: impl FnMut() + Send + 'scope,
    ) -> mpsc::Sender<()> {
        let (finished, watch) = mpsc::channel();
        scope.spawn(move || {
            let (mut seen, mut still) = (self.progress.load(Ordering::Relaxed), Duration::ZERO);
            // Nothing is ever sent.
            while let Err(mpsc::RecvTimeoutError::Timeout) = watch.recv_timeout(POLL_INTERVAL) {
                let now = self.progress.load(Ordering::Relaxed);
                still = if now == seen { still + POLL_INTERVAL } else { Duration::ZERO };
                seen = now;
                if still >= WAIT_LIMIT {
                    self.has_fired.store(true, Ordering::Release);
                    break;
                }
            }
            end_waits();
        });
        finished
    }
}

//! Signals that a program handles, profilers' and interval timers' among them, cut nothing short.

use super::*;
use std::sync::mpsc::channel;

/// Longer than it takes to see that a wait has ended early.
const LIMIT: Duration = Duration::from_millis(200);

extern "C" fn handled(_: libc::c_int) {}

/// Call `wait` while signals come in; returns how long it took, and what it returned.
fn under_signals<R: Send>(wait: impl FnOnce() -> R + Send) -> (Duration, R) {
    // SAFETY: a handler that does nothing may run anywhere; the structure's zeroes are an empty mask and no flags.
    unsafe {
        let mut action: libc::sigaction = std::mem::zeroed();
        action.sa_sigaction = handled as extern "C" fn(libc::c_int) as usize;
        assert_eq!(libc::sigaction(libc::SIGUSR1, &raw const action, std::ptr::null_mut()), 0);
    }
    let (tell, told) = channel();
    std::thread::scope(|scope| {
        let waiting = scope.spawn(move || {
            // SAFETY: it has no conditions.
            tell.send(unsafe { libc::pthread_self() }).expect("somebody listens");
            let begun = Instant::now();
            let returned = wait();
            (begun.elapsed(), returned)
        });
        let thread = told.recv().expect("a thread");
        while !waiting.is_finished() {
            // SAFETY: the thread was not joined yet, so that its name is valid.
            unsafe { libc::pthread_kill(thread, libc::SIGUSR1) };
            std::thread::yield_now();
        }
        waiting.join().expect("no panic")
    })
}

#[test]
fn signals_end_no_wait() {
    let name = unique_name();
    let listener = Listener::bind(&name).expect("a free name");
    let (took, accepted) = under_signals(|| listener.accept(LIMIT).expect("no error").is_none());
    assert!(accepted && took >= LIMIT, "accept: {took:?}");
    let connection = Connection::open(&name, LONG).expect("it listens");
    let (took, received) = under_signals(|| connection.receive(LIMIT));
    assert!(matches!(received, Err(SocketError::Timeout(LIMIT))) && took >= LIMIT, "receive: {took:?}");
    // This process itself.
    let (took, ended) = under_signals(|| connection.peer().wait(LIMIT));
    assert!(ended == Ok(false) && took >= LIMIT, "wait: {took:?}");
}

#[test]
fn a_wait_beyond_all_times_ends_with_what_it_waits_for() {
    let name = unique_name();
    let listener = Listener::bind(&name).expect("a free name");
    let ours = Connection::open(&name, LONG).expect("it listens");
    let theirs = listener.accept(Duration::MAX).expect("no error").expect("it is there");
    theirs.send(&numbered(3), None).expect("it is open");
    assert_eq!(ours.receive(Duration::MAX).expect("it was sent").message, numbered(3));
}

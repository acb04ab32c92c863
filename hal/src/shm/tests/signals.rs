//! Waits are not cut short by signals that the program handles, such as those of profilers and interval timers.

use super::*;
use std::sync::mpsc::channel;

/// Long enough to notice a wait that ends early.
const LIMIT: Duration = Duration::from_millis(200);

extern "C" fn handled(_: libc::c_int) {}

/// Call `wait` while signals arrive; returns how long it took, and its result.
fn under_signals<R: Send>(wait: impl FnOnce() -> R + Send) -> (Duration, R) {
    // SAFETY: a handler that does nothing may run anywhere; the structure's zeroes are an empty mask and no flags.
    unsafe {
        let mut action: libc::sigaction = std::mem::zeroed();
        action.sa_sigaction = handled as extern "C" fn(libc::c_int) as usize;
        assert_eq!(libc::sigaction(libc::SIGUSR1, &raw const action, std::ptr::null_mut()), 0);
    }
    let (sender, receiver) = channel();
    std::thread::scope(|scope| {
        let waiting = scope.spawn(move || {
            // SAFETY: it has no conditions.
            sender.send(unsafe { libc::pthread_self() }).expect("somebody listens");
            let start = Instant::now();
            let returned = wait();
            (start.elapsed(), returned)
        });
        let thread = receiver.recv().expect("a thread");
        while !waiting.is_finished() {
            // SAFETY: the thread was not joined yet, so that its name is valid.
            unsafe { libc::pthread_kill(thread, libc::SIGUSR1) };
            std::thread::yield_now();
        }
        waiting.join().expect("no panic")
    })
}

#[test]
fn waits_under_signals_last_their_timeout() {
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
fn wait_with_maximal_timeout_returns_on_arrival() {
    let name = unique_name();
    let listener = Listener::bind(&name).expect("a free name");
    let ours = Connection::open(&name, LONG).expect("it listens");
    let theirs = listener.accept(Duration::MAX).expect("no error").expect("it is there");
    theirs.send(&numbered(3), None).expect("it is open");
    assert_eq!(ours.receive(Duration::MAX).expect("it was sent").message, numbered(3));
}

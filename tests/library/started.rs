//! A start or wait that fails gives its buffer back.

use std::error::Error as StdError;
use std::fmt::Debug;
use std::sync::Barrier;
use sumac::testing::LocalCluster;
use sumac::{CallOptions, Communicator, Error, Handle, OwnedBuffer, ReduceOp, StartError, WaitError};

const LEN: usize = 6;

/// Start with `buffer`, which fails; check that it comes back as it was, and return the error.
fn refused<B: OwnedBuffer<Element = u32>>(
    buffer: B,
    start: impl FnOnce(B) -> Result<Handle<B>, StartError<B>>,
) -> Error {
    let (values, at) = (buffer.values().to_vec(), buffer.values().as_ptr());
    let StartError { error, buffer } = start(buffer).map(drop).expect_err("it cannot start");
    assert_eq!((buffer.values(), buffer.values().as_ptr()), (&values[..], at), "{error}");
    error
}

/// Make each start with a buffer from `make`; return the errors.
fn all_starts<B: OwnedBuffer<Element = u32>>(comm: &Communicator, make: impl Fn() -> B) -> Vec<Error> {
    vec![
        refused(make(), |buffer| comm.start_all_reduce(buffer, ReduceOp::Sum)),
        refused(make(), |buffer| comm.start_all_reduce_with(buffer, ReduceOp::Sum, &CallOptions::default())),
        refused(make(), |buffer| comm.start_reduce(buffer, ReduceOp::Sum, 0)),
        refused(make(), |buffer| comm.start_broadcast(buffer, 0)),
        refused(make(), |buffer| comm.start_reduce_scatter(buffer, ReduceOp::Sum)),
        refused(make(), |buffer| comm.start_all_gather(buffer)),
    ]
}

fn filled(len: usize) -> Vec<u32> {
    (7..).take(len).collect()
}

#[test]
fn start_on_an_ended_communicator_returns_the_buffer() {
    LocalCluster::start(2).expect("a cluster").run(|comm| {
        comm.canceller().cancel();
        comm.barrier().expect_err("it is cancelled");
        let registered = || {
            let mut buffer = comm.alloc(LEN).expect("memory");
            buffer.copy_from_slice(&filled(LEN));
            buffer
        };
        let errors = [all_starts(&comm, || filled(LEN)), all_starts(&comm, registered)].concat();
        assert!(errors.iter().all(|error| matches!(error, Error::Ended(_))), "{errors:?}");
    });
}

#[test]
fn start_with_invalid_arguments_returns_the_buffer_and_has_no_effect() {
    LocalCluster::start(2).expect("a cluster").run(|comm| {
        let scalar = CallOptions { scalar: Some(2.0), ..CallOptions::default() };
        let no_root = comm.size();
        let errors = [
            refused(filled(LEN), |buffer| comm.start_all_reduce_with(buffer, ReduceOp::Sum, &scalar)),
            refused(filled(LEN + 1), |buffer| comm.start_all_reduce(buffer, ReduceOp::MinLoc)),
            refused(filled(LEN), |buffer| comm.start_reduce(buffer, ReduceOp::Sum, no_root)),
            refused(filled(LEN), |buffer| comm.start_broadcast(buffer, no_root)),
            refused(filled(LEN + 1), |buffer| comm.start_reduce_scatter(buffer, ReduceOp::Sum)),
        ];
        assert!(errors.iter().all(|error| matches!(error, Error::Argument(_))), "{errors:?}");
        let sum = comm.start_all_reduce(filled(LEN), ReduceOp::Sum).expect("started").wait().expect("a sum").0;
        assert_eq!(sum, [14, 16, 18, 20, 22, 24]);
        comm.leave();
    });
}

/// Nothing reads or writes a buffer that has come back, so the caller may write to it.
#[test]
fn failed_wait_returns_the_buffer_of_the_start() {
    let both = Barrier::new(2);
    LocalCluster::start(2).expect("a cluster").run(|comm| {
        if comm.rank() == 1 {
            // Starts nothing, so nothing completes.
            both.wait();
            both.wait();
            comm.canceller().cancel();
            return;
        }
        let mut registered = comm.alloc::<u32>(LEN).expect("memory");
        registered.copy_from_slice(&filled(LEN));
        let at = registered.as_ptr();
        let in_place = comm.start_all_reduce(registered, ReduceOp::Sum).expect("started");
        let gathered = comm.start_all_gather(filled(LEN)).expect("started");
        both.wait();
        comm.canceller().cancel();
        let WaitError { error, buffer } = in_place.wait().expect_err("the other rank does not call it");
        let mut buffer = buffer.expect("it is in the tree");
        assert_eq!((error, buffer.len(), buffer.as_ptr()), (Error::Cancelled, LEN, at));
        buffer.fill(0);
        let WaitError { error, buffer } = gathered.wait().expect_err("the other rank does not call it");
        assert_eq!(buffer, Some(filled(LEN)), "an input that has an output of its own: {error}");
        assert_eq!(comm.outstanding().bytes, 0);
        both.wait();
    });
}

#[test]
fn message_that_cannot_be_started_returns_its_values() {
    LocalCluster::start(2).expect("a cluster").run(|comm| {
        let send = |to| {
            let values = filled(LEN);
            let at = values.as_ptr();
            let StartError { error, buffer } = comm.start_send(values, to, 0).map(drop).expect_err("it cannot start");
            assert_eq!((&buffer[..], buffer.as_ptr()), (&filled(LEN)[..], at), "{error}");
            error
        };
        let errors = [comm.rank(), comm.size()].map(send);
        assert!(errors.iter().all(Error::is_rejection), "{errors:?}");
        comm.barrier().expect("rejections have no effect");
        comm.canceller().cancel();
        let error = send(1 - comm.rank());
        // The other rank may have cancelled first.
        assert!(matches!(error, Error::Cancelled | Error::Ended(_) | Error::RanksFailed { .. }), "{error:#?}");
    });
}

#[test]
fn failed_message_returns_its_values() {
    // More than the sockets hold, so that the peer would have to receive it.
    let large: Vec<u32> = vec![7; 16 << 20];
    let both = Barrier::new(2);
    LocalCluster::start(2).expect("a cluster").run(|comm| {
        let peer = 1 - comm.rank();
        let sent = comm.start_send(large.clone(), peer, 0).expect("started");
        both.wait();
        // Fails if the other rank's message, which is larger, arrives at once.
        let received = comm.start_receive::<u32>(LEN, peer, 1);
        both.wait();
        comm.canceller().cancel();
        let WaitError { error, buffer } = sent.wait().expect_err("nobody receives it");
        assert!(buffer.is_some_and(|buffer| buffer == large), "{error}");
        if let Ok(received) = received {
            let WaitError { error, buffer } = received.wait().expect_err("nobody sends it");
            assert_eq!(buffer.map(|buffer| buffer.len()), Some(LEN), "{error}");
        }
        assert_eq!(comm.outstanding().bytes, 0);
    });
}

#[test]
fn start_error_converts_by_question_mark_and_prints_its_cause() {
    fn own(comm: &Communicator) -> Result<(), Error> {
        comm.start_broadcast(filled(LEN), comm.size())?.wait()?;
        Ok(())
    }
    fn any(comm: &Communicator) -> Result<(), Box<dyn StdError + Send + Sync>> {
        comm.start_broadcast(filled(LEN), comm.size())?.wait()?;
        Ok(())
    }
    fn text(error: impl Debug) -> String {
        format!("{error:?}")
    }
    LocalCluster::start(1).expect("a cluster").run(|comm| {
        let error = own(&comm).expect_err("there is no such root");
        assert!(matches!(error, Error::Argument(_)), "{error:#?}");
        assert_eq!((text(any(&comm).expect_err("the same")), text(&error)), (error.to_string(), error.to_string()));
        comm.leave();
    });
}

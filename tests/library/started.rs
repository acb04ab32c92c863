//! A start that fails gives its buffer back.

use std::error::Error as StdError;
use std::fmt::Debug;
use sumac::testing::LocalCluster;
use sumac::{CallOptions, Communicator, Error, Handle, OwnedBuffer, ReduceOp, StartError};

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

#[test]
fn start_error_converts_by_question_mark_and_prints_its_cause() {
    fn own(comm: &Communicator) -> Result<(), Error> {
        comm.start_broadcast(filled(LEN), comm.size())?.wait().map(drop)
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

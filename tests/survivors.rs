//! Ranks that die, and those that are left: they hear who it was, and go on without.

mod common;

use common::{Cluster, by_packets, plain};
use std::sync::Barrier;
use std::time::Duration;
use sumac::{Communicator, Error, JoinConfig, Order, Path, ReduceOp, ShrinkError};
use sumac_hal::ids::Rank;

const LEN: usize = 50_000;

fn quick(configure: fn(&mut JoinConfig)) -> impl Fn(&mut JoinConfig) + Sync {
    move |config| {
        configure(config);
        config.join_timeout = Duration::from_secs(5);
    }
}

/// Add up what each rank was at first.
fn sum(comm: &Communicator, own: u32) -> Result<u32, Error> {
    let mut buffer = vec![own + 1; LEN];
    comm.all_reduce(&mut buffer, ReduceOp::Sum)?;
    assert!(buffer.iter().all(|&x| x == buffer[0]));
    Ok(buffer[0])
}

fn named(error: &Error) -> Option<Rank> {
    match error {
        Error::RanksFailed { ranks, .. } => ranks.first().copied().filter(|_| ranks.len() == 1),
        _ => None,
    }
}

#[test]
fn who_is_left_goes_on_in_the_order_of_ranks() {
    for (configure, order) in
        [(plain as fn(&mut JoinConfig), Order::Arrival), (by_packets, Order::TreePairwise), (plain, Order::TreeFold)]
    {
        let cluster = Cluster::start(2, 3);
        let configure = |config: &mut JoinConfig| {
            quick(configure)(config);
            config.order = order;
        };
        let left = cluster.run("left", 5, configure, |comm| {
            let own = comm.rank();
            assert_eq!(sum(&comm, own).expect("all are there"), 15);
            if own == 1 {
                // Without leaving: a death, as the others see it.
                return None;
            }
            assert_eq!(named(&sum(&comm, own).expect_err("one is dead")), Some(Rank(1)));
            let smaller = comm.shrink().expect("four are left");
            assert_eq!((smaller.rank(), smaller.size()), (own - u32::from(own > 1), 4));
            assert_eq!(smaller.name(), "left~0");
            drop(comm);
            let mut ranks = vec![0_u32; 4];
            smaller.all_gather(&[own], &mut ranks).expect("all four are there");
            assert_eq!(ranks, [0, 2, 3, 4]);
            assert_eq!(sum(&smaller, own).expect("all four are there"), 13);
            let path = smaller.all_reduce(&mut [0_u32; 4], ReduceOp::Sum).expect("a sum").path;
            smaller.barrier().expect("all four are there");
            smaller.leave();
            Some(path)
        });
        assert!(left.iter().flatten().all(|&path| path == Path::Tree), "{left:?}");
    }
}

/// The first answer names a rank that then dies; who is left asks again.
#[test]
fn a_rank_that_dies_while_the_others_shrink_is_left_out_the_next_time() {
    let cluster = Cluster::start(1, 4);
    let all_have_asked = Barrier::new(3);
    cluster.run("again", 4, quick(plain), |comm| {
        let own = comm.rank();
        sum(&comm, own).expect("all are there");
        if own == 3 {
            return;
        }
        assert_eq!(named(&sum(&comm, own).expect_err("one is dead")), Some(Rank(3)));
        let smaller = comm.shrink().expect("three are left");
        all_have_asked.wait();
        if own == 0 {
            return;
        }
        assert_eq!(named(&sum(&smaller, own).expect_err("another is dead")), Some(Rank(0)));
        // The controller knows of both communicators who is left.
        let last = smaller.shrink().expect("two are left");
        assert_eq!(sum(&last, own).expect("both are there"), 2 + 3);
        let again = comm.shrink().expect("two are left");
        assert_eq!((again.name().as_str(), again.size()), ("again~1", 2));
        assert_eq!(sum(&again, own).expect("both are there"), 2 + 3);
    });
}

#[test]
fn who_asks_alone_is_told_so() {
    let cluster = Cluster::start(1, 2);
    let asked = Barrier::new(2);
    cluster.run("alone", 2, quick(plain), |comm| {
        sum(&comm, comm.rank()).expect("both are there");
        if comm.rank() == 0 {
            let error = comm.shrink().expect_err("the other does not ask");
            assert!(matches!(error, ShrinkError::Survivors { .. }), "{error}");
            assert!(error.to_string().contains("not all of them have asked"), "{error}");
        }
        asked.wait();
        // Nobody was harmed.
        assert_eq!(sum(&comm, comm.rank()).expect("both are there"), 3);
        comm.leave();
    });
}

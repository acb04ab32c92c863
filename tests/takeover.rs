//! A controller that ends under a running job, and the next one, which takes the job over.

mod common;

use common::{Cluster, checked_sum, over_udp, plain, prefer_tree};
use std::net::TcpListener;
use std::sync::Mutex;
use std::thread;
use std::time::{Duration, Instant};
use sumac::comm::ControllerState;
use sumac::controller::proto::{ClientReply, ClientRequest, JoinRefusal};
use sumac::controller::{Controller, ControllerConfig, status};
use sumac::{Communicator, JoinConfig, Path, ReduceOp};
use sumac_hal::ctrl::{FrameReader, Hello, send};

const SOON: Duration = Duration::from_secs(30);

/// Run operations until one uses the tree.
fn until_tree(comm: &Communicator, op: &mut u64) {
    let give_up = Instant::now() + SOON;
    loop {
        assert!(Instant::now() < give_up, "rank {}: no operation in the tree", comm.rank());
        *op += 1;
        if checked_sum(comm, *op).path == Path::Tree {
            return;
        }
    }
}

#[test]
fn job_continues_without_controller_and_gets_a_tree_from_the_next() {
    for configure in [over_udp as fn(&mut JoinConfig), plain] {
        is_taken_over_twice(configure);
    }
}

fn is_taken_over_twice(configure: fn(&mut JoinConfig)) {
    let cluster = Cluster::spare(2, prefer_tree());
    let addr = cluster.controller.local_addr();
    let Cluster { controller, boards } = cluster;
    let controller = Mutex::new(Some(controller));
    let ranks = &|number| {
        let mut config = JoinConfig::new(addr, "job", number, 3);
        configure(&mut config);
        let comm = Communicator::join(config).expect("join");
        let mut op = 0;
        until_tree(&comm, &mut op);
        for _ in 0..2 {
            comm.barrier().expect("all are there");
            if number == 0 {
                drop(controller.lock().expect("not poisoned").take());
            }
            comm.barrier().expect("all are there");
            for _ in 0..20 {
                op += 1;
                checked_sum(&comm, op);
            }
            comm.barrier().expect("all are there");
            if number == 0 {
                let config = ControllerConfig { listen: addr, ..prefer_tree() };
                *controller.lock().expect("not poisoned") = Some(Controller::start(config).expect("its port"));
            }
            until_tree(&comm, &mut op);
        }
        if number == 0 {
            let report = status(addr).expect("a report");
            let job = &report.jobs[0];
            assert_eq!((job.name.as_str(), job.joined, job.world, job.running), ("job", 3, 3, true));
            assert!(job.tree.as_ref().is_some_and(Result::is_ok), "{:?}", job.tree);
        }
        comm.barrier().expect("all are there");
        comm.leave();
    };
    thread::scope(|scope| {
        let ranks: Vec<_> = (0..3).map(|number| scope.spawn(move || ranks(number))).collect();
        ranks.into_iter().for_each(|rank| rank.join().expect("a rank panicked"));
    });
    drop(boards);
}

/// A controller that refuses all three ranks once each. The device may connect as well.
fn refuse_all(listener: &TcpListener) {
    let mut refused = 0;
    while refused < 3 {
        let (mut stream, _) = listener.accept().expect("a connection");
        let mut reader = FrameReader::new(stream.try_clone().expect("a file"));
        if !matches!(reader.recv(), Ok(Hello::Client)) {
            continue;
        }
        let Ok(ClientRequest::Resume(known)) = reader.recv() else { panic!("not a rank that resumes") };
        let refusal = JoinRefusal::Running { job: known.request.job };
        send(&mut stream, &ClientReply::Refused(refusal)).expect("it listens");
        refused += 1;
    }
}

/// Refused ranks report the reason, do not reconnect, and continue without a controller.
#[test]
fn ranks_refused_by_the_next_controller_continue_without_one() {
    let cluster = Cluster::spare(1, prefer_tree());
    let addr = cluster.controller.local_addr();
    let Cluster { controller, boards } = cluster;
    let controller = Mutex::new(Some(controller));
    let ranks = &|number| {
        let mut config = JoinConfig::new(addr, "job", number, 3);
        over_udp(&mut config);
        let comm = Communicator::join(config).expect("join");
        assert_eq!(comm.controller(), ControllerState::Connected);
        checked_sum(&comm, 1);
        comm.barrier().expect("all are there");
        if number == 0 {
            drop(controller.lock().expect("not poisoned").take());
            let listener = TcpListener::bind(addr).expect("its port");
            refuse_all(&listener);
        }
        let mut op = 1;
        let reason = loop {
            op += 1;
            checked_sum(&comm, op);
            let refused = [u64::from(matches!(comm.controller(), ControllerState::Refused { .. }))];
            let mut all = refused;
            comm.all_reduce(&mut all, ReduceOp::Min).expect("a minimum");
            if let (1, ControllerState::Refused { reason }) = (all[0], comm.controller()) {
                break reason;
            }
        };
        assert!(reason.contains("job \"job\" is already running"), "{reason}");
        for nth in 0..20 {
            checked_sum(&comm, op + nth);
        }
        let error = comm.shrink().expect_err("no controller to determine the survivors").to_string();
        assert!(
            error.contains("the restarted controller refused this rank: job \"job\" is already running"),
            "{error}"
        );
        comm.barrier().expect("all are there");
        comm.leave();
    };
    thread::scope(|scope| {
        let ranks: Vec<_> = (0..3).map(|number| scope.spawn(move || ranks(number))).collect();
        ranks.into_iter().for_each(|rank| rank.join().expect("a rank panicked"));
    });
    drop(boards);
}

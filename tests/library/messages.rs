//! Messages: from ranks by number, and from whichever rank sends first.

use sumac::testing::LocalCluster;
use sumac::{Communicator, Error, Progress};

/// Run `rank` on `ranks` ranks, with both kinds of progress.
fn on_ranks(ranks: u32, rank: impl Fn(&Communicator) + Sync) {
    let cluster = LocalCluster::start(ranks).expect("a cluster");
    for progress in [Progress::Caller, Progress::Thread] {
        std::thread::scope(|scope| {
            for mut config in cluster.join_configs() {
                config.progress = Some(progress);
                scope.spawn(|| rank(&Communicator::join(config).expect("it joins")));
            }
        });
    }
}

#[test]
fn receive_from_any_rank_names_its_source() {
    on_ranks(4, |comm| {
        if comm.rank() != 0 {
            for nth in 0..3 {
                comm.send(&[comm.rank(), nth], 0, 5).expect("it is received");
            }
            comm.barrier().expect("all are there");
            return;
        }
        let mut next = [0; 4];
        let mut count = |source: u32, values: &[u32]| {
            assert_eq!(values, [source, next[source as usize]], "the order of one rank's messages is kept");
            next[source as usize] += 1;
        };
        for _ in 0..3 {
            let mut values = [0; 2];
            let source = comm.receive_any(&mut values, 5).expect("somebody sends");
            count(source, &values);
        }
        let started: Vec<_> = (0..3).map(|_| comm.start_receive_any::<u32>(2, 5).expect("it is posted")).collect();
        for handle in started {
            let (source, values) = handle.wait_with_source().expect("somebody sends");
            count(source, &values);
        }
        for _ in 0..3 {
            let mut values = [0_u32; 2];
            // SAFETY: the values outlive the wait, and nobody else uses them before.
            let request = unsafe { comm.start_receive_any_raw(5, (values.as_mut_ptr().cast(), 8), Box::new(())) };
            let mut request = request.expect("it is posted");
            assert_eq!(request.source(), None, "it has not been waited for");
            request.wait().expect("somebody sends");
            count(request.source().expect("it is complete"), &values);
        }
        assert_eq!(next, [0, 3, 3, 3]);
        comm.barrier().expect("all are there");
    });
}

#[test]
fn receive_from_any_rank_of_one_is_refused() {
    on_ranks(1, |comm| {
        let refused = comm.receive_any(&mut [0_u8], 0);
        assert!(matches!(refused, Err(Error::Argument(_))), "{refused:?}");
        comm.barrier().expect("it goes on");
    });
}

//! All-to-alls of blocks of any length through relays.

use std::net::Ipv4Addr;
use std::sync::{Barrier, Mutex};
use sumac::testing::LocalCluster;
use sumac::{
    Algo, Buffers, CallOptions, Collective, Communicator, Counts, Dtype, Error, JoinConfig, OpDesc, Outcome, Path,
    Progress, RawBuffers,
};

/// The ranks of each server, and how many servers there are.
const SHAPES: [(u32, &str); 6] =
    [(4, "2x2"), (6, "servers:2"), (6, "servers:3"), (8, "servers:4"), (8, "2x2x2"), (9, "3x3")];

fn on_ranks(ranks: u32, shape: &str, progress: Progress, rank: impl Fn(Communicator) + Sync) {
    let configure = |config: &mut JoinConfig| {
        config.progress = Some(progress);
        config.set("shape", shape).expect("a shape");
    };
    on_configured(ranks, configure, rank);
}

fn on_configured(ranks: u32, configure: impl Fn(&mut JoinConfig), rank: impl Fn(Communicator) + Sync) {
    let cluster = LocalCluster::start(ranks).expect("a cluster");
    std::thread::scope(|scope| {
        for mut config in cluster.join_configs() {
            configure(&mut config);
            scope.spawn(|| rank(join(config)));
        }
    });
}

fn join(config: JoinConfig) -> Communicator {
    Communicator::join(config).expect("it joins")
}

fn through_relays() -> CallOptions {
    CallOptions { algo: Some(Algo::HierarchicalPairwise), ..CallOptions::default() }
}

fn describe(dtype: Dtype) -> OpDesc {
    OpDesc { collective: Collective::AllToAll, op: None, ..OpDesc::all_gather(dtype, 0) }
}

/// How many elements each pair of ranks exchanges: every mixture of none and some, one sender only, or none at all.
fn count(salt: usize, from: u32, to: u32) -> usize {
    match salt {
        0 => 0,
        1 => 70_000 * usize::from(from == 1 && to != 1),
        _ => (from as usize * 7 + to as usize * 3 + salt) % 5 * (1 + salt % 3 * 100),
    }
}

/// What a rank sends to another one.
fn block(dtype: Dtype, salt: usize, from: u32, to: u32) -> Vec<u8> {
    let len = count(salt, from, to) * OpDesc::all_gather(dtype, 1).element_bytes();
    (0..len).map(|at| (at as u32 * 31 + from * 17 + to * 5) as u8).collect()
}

fn exchange(
    comm: &Communicator,
    (dtype, salt): (Dtype, usize),
    options: &CallOptions,
    is_started: bool,
) -> Result<(Vec<u8>, Outcome), Error> {
    let (own, all) = (comm.rank(), 0..comm.size());
    let input: Vec<u8> = all.clone().flat_map(|to| block(dtype, salt, own, to)).collect();
    let expected: Vec<u8> = all.clone().flat_map(|from| block(dtype, salt, from, own)).collect();
    let counts = Counts::Exchange {
        send: all.clone().map(|to| count(salt, own, to)).collect(),
        recv: all.map(|from| count(salt, from, own)).collect(),
    };
    let mut output = vec![0xee; expected.len()];
    let outcome = if is_started {
        let raw = RawBuffers::Separate {
            input: input.as_ptr(),
            input_len: input.len(),
            output: output.as_mut_ptr(),
            output_len: output.len(),
        };
        // SAFETY: both outlive the request, which is waited for, and nobody else uses them.
        let mut request = unsafe { comm.start_raw_v(&describe(dtype), counts, raw, Box::new(()), options) }?;
        request.wait()?.expect("the outcome of an operation")
    } else {
        comm.run_v(&describe(dtype), &counts, Buffers::Separate { input: &input, output: &mut output }, options)?
    };
    assert!(output == expected, "{dtype}, {salt}, started: {is_started}");
    Ok((output, outcome))
}

#[test]
fn blocks_of_any_length_and_type_arrive_through_relays() {
    for (progress, (ranks, shape)) in [Progress::Caller, Progress::Thread].into_iter().cycle().zip(SHAPES) {
        on_ranks(ranks, shape, progress, |comm| {
            for is_started in [false, true] {
                for &dtype in Dtype::ALL {
                    for salt in 0..6 {
                        let found = exchange(&comm, (dtype, salt), &through_relays(), is_started);
                        assert_eq!(found.expect("an exchange").1.path, Path::HierarchicalPairwise);
                    }
                }
            }
            let (_, outcome) = exchange(&comm, (Dtype::U8, 2), &CallOptions::default(), false).expect("an exchange");
            assert_eq!(outcome.path, Path::Pairwise, "unless asked for by name");
            comm.leave();
        });
    }
}

/// Run an all-to-all on four ranks on two servers, which all get the same error, and no output; returns it. `counts` is
/// what a rank sends to rank 2, and what that one expects. With `hosts`, each server is a host of its own.
fn error_of(hosts: bool, dtype: Dtype, [sent, expected]: [[usize; 4]; 2]) -> String {
    let (errors, all) = (Mutex::new(Vec::new()), Barrier::new(4));
    let configure = |config: &mut JoinConfig| {
        config.set("shape", "servers:2").expect("a shape");
        if hosts {
            config.bind = Ipv4Addr::new(127, 0, 1, 1 + config.rank as u8 / 2).into();
        }
    };
    on_configured(4, configure, |comm| {
        let mut send = vec![0; 4];
        send[2] = sent[comm.rank() as usize];
        let recv = if comm.rank() == 2 { expected.to_vec() } else { vec![0; 4] };
        let each = OpDesc::all_gather(dtype, 1).element_bytes();
        let (input, mut output) = (vec![0; each * send[2]], vec![0; each * recv.iter().sum::<usize>()]);
        let counts = Counts::Exchange { send, recv };
        let buffers = Buffers::Separate { input: &input, output: &mut output };
        let exchanged = comm.run_v(&describe(dtype), &counts, buffers, &through_relays());
        // A rank that exchanges nothing may have done so before it is told.
        let result = exchanged.and_then(|_| comm.barrier());
        errors.lock().expect("no panic").push(result.map_or_else(|error| error.to_string(), |_| "none".into()));
        // Whoever leaves is lost to the others.
        all.wait();
    });
    let mut errors = errors.into_inner().expect("no panic");
    assert!(errors.iter().all(|error| error == &errors[0]), "{errors:?}");
    errors.remove(0)
}

/// The sums of what relays pass on agree, so no message has another length than expected.
#[test]
fn counts_that_differ_are_named_to_all_ranks_though_their_sums_agree() {
    for hosts in [false, true] {
        // Through rank 0, which passes on 8 elements of the 8 that are expected.
        let error = error_of(hosts, Dtype::F32, [[3, 5, 0, 0], [4, 4, 0, 0]]);
        assert!(error.contains("rank 0 sends rank 2 12 bytes where 16 are expected"), "{error}");
        // From the same server.
        let error = error_of(hosts, Dtype::I64, [[0, 0, 0, 3], [0, 0, 0, 4]]);
        assert!(error.contains("rank 3 sends rank 2 24 bytes where 32 are expected"), "{error}");
    }
}

/// The memory is never touched.
#[test]
fn relay_that_would_hold_too_much_ends_the_operation_on_all_ranks() {
    let len = 520 << 20;
    let error = error_of(false, Dtype::U8, [[len, len, 0, 0]; 2]);
    assert!(error.contains(&format!("rank 0 was interrupted: {} bytes", 2 * len)), "{error}");
    assert!(error.contains(&format!("holds {} at most: use pairwise", 1 << 30)), "{error}");
}

#[test]
fn algorithm_without_counts_is_refused_and_one_for_the_job_is_not() {
    let counts = |ranks: u32| Counts::Blocks(vec![1; ranks as usize]);
    on_ranks(4, "servers:2", Progress::Caller, |comm| {
        let by = |algo| CallOptions { algo: Some(algo), ..CallOptions::default() };
        let refused = |result: Result<(Vec<u8>, Outcome), Error>| result.expect_err("refused").to_string();
        let error = refused(exchange(&comm, (Dtype::U8, 2), &by(Algo::Ring), false));
        assert!(error.contains("by ring: takes pairwise, hier-pairwise for an all-to-all, or auto"), "{error}");
        let mut output = [0; 4];
        let buffers = Buffers::Separate { input: &[1], output: &mut output };
        let gather = OpDesc::all_gather(Dtype::U8, 0);
        comm.run_v(&gather, &counts(4), buffers, &through_relays()).expect_err("no all-gather");
        exchange(&comm, (Dtype::U8, 2), &by(Algo::Pairwise), false).expect("an exchange");
    });
    on_ranks(4, "line", Progress::Caller, |comm| {
        let error = exchange(&comm, (Dtype::U8, 2), &through_relays(), false).expect_err("no servers");
        assert!(matches!(error, Error::NotPossible(_)) && error.to_string().contains("hier-pairwise"), "{error}");
        exchange(&comm, (Dtype::U8, 2), &CallOptions::default(), false).expect("nothing was sent");
    });
    for (algo, path) in [("ring", Path::Pairwise), ("hier-pairwise", Path::HierarchicalPairwise)] {
        let cluster = LocalCluster::start(4).expect("a cluster");
        std::thread::scope(|scope| {
            for mut config in cluster.join_configs() {
                config.set("shape", "servers:2").expect("a shape");
                config.set("algo", algo).expect("a name");
                scope.spawn(move || {
                    let comm = join(config);
                    let found = exchange(&comm, (Dtype::U8, 3), &CallOptions::default(), false).expect("an exchange");
                    assert_eq!(found.1.path, path);
                    let mut output = [0; 4];
                    let own = [comm.rank() as u8];
                    let outcome = comm.all_gather_v(&own, (&mut output, &[1; 4])).expect("a gather");
                    assert_eq!((output, outcome.path), ([0, 1, 2, 3], Path::Pairwise));
                });
            }
        });
    }
}

/// A rank that exchanges directly and one that goes through relays are in different operations.
#[test]
fn ranks_that_differ_in_the_algorithm_get_a_mismatch() {
    let all = Barrier::new(4);
    on_ranks(4, "servers:2", Progress::Caller, |comm| {
        let options = if comm.rank() == 3 { CallOptions::default() } else { through_relays() };
        let result = exchange(&comm, (Dtype::I64, 4), &options, false);
        all.wait();
        let error = result.expect_err("they differ");
        assert!(matches!(error, Error::Mismatch { .. }), "{error}");
    });
}

//! Collectives on blocks of any length.

use std::ffi::c_void;
use sumac::testing::LocalCluster;
use sumac::{
    Buffers, CallOptions, Collective, Communicator, Counts, Dtype, Error, OpDesc, Order, Path, Progress, Rank,
    RawBuffers, ReduceOp,
};

fn on_ranks(cluster: &LocalCluster, rank: impl Fn(&Communicator) + Sync) {
    for progress in [Progress::Caller, Progress::Thread] {
        std::thread::scope(|scope| {
            for mut config in cluster.join_configs() {
                config.progress = Some(progress);
                scope.spawn(|| rank(&Communicator::join(config).expect("it joins")));
            }
        });
    }
}

/// Blocks of 0 to 4 elements.
fn counts(ranks: u32, salt: usize) -> Vec<usize> {
    (0..ranks as usize).map(|rank| (rank * 3 + salt) % 5).collect()
}

#[test]
fn all_gather_and_reduce_scatter_take_blocks_of_any_length() {
    let cluster = LocalCluster::start(5).expect("a cluster");
    on_ranks(&cluster, |comm| {
        let (rank, ranks) = (comm.rank(), comm.size());
        for counts in [counts(ranks, 0), counts(ranks, 2), vec![0; 5], vec![0, 0, 0, 0, 100_000]] {
            let len: usize = counts.iter().sum();
            let own = counts[rank as usize];
            let mut gathered = vec![u32::MAX; len];
            let outcome = comm.all_gather_v(&vec![rank; own], (&mut gathered, &counts)).expect("a gather");
            assert_eq!(outcome.path, Path::Pairwise);
            let expected: Vec<u32> = (0..ranks).flat_map(|from| vec![from; counts[from as usize]]).collect();
            assert!(gathered == expected, "{counts:?}");
            let input: Vec<u64> = (0..len as u64).map(|at| at * u64::from(rank + 1)).collect();
            let mut sums = vec![u64::MAX; own];
            comm.reduce_scatter_v((&input, &counts), &mut sums, ReduceOp::Sum).expect("a reduction");
            let start: usize = counts[..rank as usize].iter().sum();
            let expected: Vec<u64> = (start..start + own).map(|at| at as u64 * 15).collect();
            assert!(sums == expected, "{counts:?}");
        }
    });
}

/// In a declared order, the result of a block has the bits of an all-reduce.
#[test]
fn reduce_scatter_of_uneven_blocks_has_the_declared_order() {
    let cluster = LocalCluster::start(4).expect("a cluster");
    std::thread::scope(|scope| {
        for mut config in cluster.join_configs() {
            config.order = Order::TreeFold;
            scope.spawn(|| {
                let comm = Communicator::join(config).expect("it joins");
                let counts = counts(4, 1);
                let len = counts.iter().sum::<usize>();
                let input: Vec<f32> = (0..len).map(|at| 1.0 / (at as f32 + 3.7 + comm.rank() as f32)).collect();
                let mut whole = input.clone();
                comm.all_reduce(&mut whole, ReduceOp::Sum).expect("a sum");
                let mut own = vec![0.0_f32; counts[comm.rank() as usize]];
                comm.reduce_scatter_v((&input, &counts), &mut own, ReduceOp::Sum).expect("a sum");
                let start: usize = counts[..comm.rank() as usize].iter().sum();
                let bits = |values: &[f32]| values.iter().map(|value| value.to_bits()).collect::<Vec<_>>();
                assert_eq!(bits(&own), bits(&whole[start..start + own.len()]));
            });
        }
    });
}

#[test]
fn premultiplied_sum_of_uneven_blocks_scales_each_contribution() {
    let cluster = LocalCluster::start(2).expect("a cluster");
    on_ranks(&cluster, |comm| {
        let desc = OpDesc {
            collective: Collective::ReduceScatter,
            dtype: Some(Dtype::F64),
            op: Some(ReduceOp::PremulSum),
            root: Rank(0),
            count: 0,
        };
        let (input, mut output) = ([1.0_f64; 3], vec![0.0_f64; 1 + comm.rank() as usize]);
        let buffers = RawBuffers::Separate {
            input: input.as_ptr().cast(),
            input_len: 24,
            output: output.as_mut_ptr().cast::<c_void>().cast(),
            output_len: 8 * output.len(),
        };
        let options = CallOptions { scalar: Some(f64::from(comm.rank() + 1)), ..CallOptions::default() };
        // SAFETY: the arrays outlive the call, and nobody else uses them.
        let buffers: Buffers<'_> = unsafe { buffers.buffers() }.expect("memory");
        comm.run_v(&desc, &Counts::Blocks(vec![1, 2]), buffers, &options).expect("a sum");
        assert!(output.iter().all(|&value| value.to_bits() == 3.0_f64.to_bits()), "{output:?}");
    });
}

#[test]
fn counts_that_do_not_fit_are_refused_with_the_reason() {
    let cluster = LocalCluster::start(2).expect("a cluster");
    on_ranks(&cluster, |comm| {
        let text = |result: Result<_, Error>| match result {
            Err(Error::Argument(why)) => why,
            other => panic!("{other:?}"),
        };
        let mut output = [0_u8; 3];
        assert!(text(comm.all_gather_v(&[0_u8], (&mut output, &[1, 1, 1]))).contains("3 counts for 2 ranks"));
        assert!(text(comm.all_gather_v(&[0_u8; 4], (&mut output, &[1, 2]))).contains("needs"));
        assert!(text(comm.all_gather_v(&[0_u8; 3], (&mut output, &[usize::MAX, 3]))).contains("exceed"));
        let run = |desc: &OpDesc, counts: Counts| {
            let mut output = [0_u8; 2];
            let buffers = Buffers::Separate { input: &[0; 2], output: &mut output };
            comm.run_v(desc, &counts, buffers, &CallOptions::default())
        };
        let all_reduce = OpDesc::all_reduce(Dtype::U8, ReduceOp::Sum, 2);
        assert!(text(run(&all_reduce, Counts::Blocks(vec![1, 1]))).contains("with counts"));
        let gather = OpDesc { collective: Collective::AllGather, op: None, ..all_reduce };
        assert!(text(run(&gather, Counts::Exchange { send: vec![1, 1], recv: vec![1, 1] })).contains("with counts"));
        comm.barrier().expect("nothing was sent");
    });
}

/// Ranks that disagree on the counts all get an error.
#[test]
fn counts_that_differ_between_ranks_are_an_error_everywhere() {
    let cluster = LocalCluster::start(2).expect("a cluster");
    on_ranks(&cluster, |comm| {
        let counts = if comm.rank() == 0 { [1, 2] } else { [2, 1] };
        let mut output = [0_u16; 3];
        let own = vec![7_u16; counts[comm.rank() as usize]];
        comm.all_gather_v(&own, (&mut output, &counts)).expect_err("the blocks do not match");
    });
}

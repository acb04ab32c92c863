//! Algebraic laws: operators commute bit by bit, and those that do not depend on the order associate.

use super::located::pairs;
use super::values::{bytes_of, draw};
use super::{Kernel, kernels, source};
use crate::op::{Dtype, ReduceOp};
use proptest::prelude::*;

/// Draw a contribution of `len` elements, as bytes.
fn contribution(state: &mut u64, kernel: Kernel, len: usize, partial: bool) -> Vec<u8> {
    if kernel.op().is_located() {
        return pairs(state, kernel.dtype(), len);
    }
    let dtype = source(kernel, partial);
    bytes_of(dtype, &draw(state, dtype, len))
}

/// Return `a op b`, both of the same kind, as accumulators.
fn combined(kernel: Kernel, a: &[u8], b: &[u8], partial: bool) -> Vec<u8> {
    let mut acc = vec![0; kernel.count(a.len(), partial).expect("whole elements") * kernel.accumulator_bytes()];
    kernel.load(&mut acc, a, partial);
    kernel.combine(&mut acc, b, partial);
    acc
}

/// Return the results of the accumulators.
fn finished(kernel: Kernel, mut acc: Vec<u8>) -> Vec<u8> {
    let count = kernel.count(acc.len(), true).expect("whole accumulators");
    let len = kernel.finish(&mut acc, count, 3);
    acc.truncate(len);
    acc
}

proptest! {
    #[test]
    fn operators_commute(seed: u64, kernel in prop::sample::select(kernels().collect::<Vec<_>>()), partial: bool) {
        let mut state = seed;
        let [a, b] = [(); 2].map(|()| contribution(&mut state, kernel, 400, partial));
        let (forwards, backwards) = (combined(kernel, &a, &b, partial), combined(kernel, &b, &a, partial));
        prop_assert_eq!(finished(kernel, forwards), finished(kernel, backwards), "{:?}", kernel);
    }

    #[test]
    fn last_contribution_in_one_pass_is_that_in_two(
        seed: u64,
        kernel in prop::sample::select(kernels().collect::<Vec<_>>()),
        len in 1_usize..70,
        partial: bool,
    ) {
        let state = &mut seed.clone();
        let (a, b) = (contribution(state, kernel, len, true), contribution(state, kernel, len, partial));
        let (mut two, mut one) = (a.clone(), a.clone());
        kernel.combine(&mut two, &b, partial);
        if kernel.combine_last(&mut one, &b, partial) {
            let expected = finished(kernel, two);
            prop_assert_eq!(&one, &expected);
            #[cfg(feature = "std")]
            {
                let mut narrow = a;
                super::dispatch::avx2::sum_last(&mut narrow, &b);
                prop_assert_eq!(narrow, expected);
            }
        } else {
            prop_assert_eq!(one, a);
            prop_assert!((kernel.dtype(), kernel.op()) != (Dtype::F32, ReduceOp::Sum));
        }
    }

    #[test]
    fn order_independent_operators_associate(
        seed: u64,
        kernel in prop::sample::select(kernels().filter(|kernel| !kernel.depends_on_order()).collect::<Vec<_>>()),
    ) {
        let mut state = seed;
        let [a, b, c] = [(); 3].map(|()| contribution(&mut state, kernel, 400, true));
        let left = combined(kernel, &combined(kernel, &a, &b, true), &c, true);
        let right = combined(kernel, &a, &combined(kernel, &b, &c, true), true);
        prop_assert_eq!(finished(kernel, left), finished(kernel, right), "{:?}", kernel);
    }
}

/// Shows that the drawn values can reveal a dependency on the order.
#[test]
fn order_dependent_operators_do_not_associate() {
    for kernel in kernels().filter(Kernel::depends_on_order) {
        let mut state = 7;
        let [a, b, c] = [(); 3].map(|()| contribution(&mut state, kernel, 2000, true));
        let left = combined(kernel, &combined(kernel, &a, &b, true), &c, true);
        let right = combined(kernel, &a, &combined(kernel, &b, &c, true), true);
        assert_ne!(left, right, "{kernel:?}");
    }
}

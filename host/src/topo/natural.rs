//! Natural order of names: runs of digits compare as numbers, so `a2` comes before `a10`.
//!
//! Invariant: a total order in which only equal strings are equal (`a01` and `a1` differ), so sorting is deterministic.

use std::cmp::Ordering;

/// Compare two names naturally: digit runs by value, everything else by byte, ties by the whole string.
///
/// ```
/// use std::cmp::Ordering;
/// use sumac::topo::natural_cmp;
/// assert_eq!(natural_cmp("leaf2", "leaf10"), Ordering::Less);
/// ```
pub fn natural_cmp(a: &str, b: &str) -> Ordering {
    let (mut left, mut right) = (a.as_bytes(), b.as_bytes());
    while let (Some(&x), Some(&y)) = (left.first(), right.first()) {
        if x.is_ascii_digit() && y.is_ascii_digit() {
            let (run_a, rest_a) = digits(left);
            let (run_b, rest_b) = digits(right);
            // Without leading zeros, the longer run is the larger number.
            match run_a.len().cmp(&run_b.len()).then_with(|| run_a.cmp(run_b)) {
                Ordering::Equal => (left, right) = (rest_a, rest_b),
                unequal => return unequal,
            }
        } else if x == y {
            (left, right) = (&left[1..], &right[1..]);
        } else {
            return x.cmp(&y);
        }
    }
    left.len().cmp(&right.len()).then_with(|| a.cmp(b))
}

/// Split off a leading run of digits, without its leading zeros.
fn digits(text: &[u8]) -> (&[u8], &[u8]) {
    let end = text.iter().position(|c| !c.is_ascii_digit()).unwrap_or(text.len());
    let zeros = text[..end].iter().take_while(|&&c| c == b'0').count();
    (&text[zeros..end], &text[end..])
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn digit_runs_compare_by_value() {
        let mut names = ["a10", "a2", "b1", "a", "a02", "a99999999999999999999999", "a2-c10", "a2-c9"];
        names.sort_by(|a, b| natural_cmp(a, b));
        assert_eq!(names, ["a", "a02", "a2", "a2-c9", "a2-c10", "a10", "a99999999999999999999999", "b1"]);
    }

    proptest! {
        #[test]
        fn natural_order_is_total(a in "[a0-2]{0,5}", b in "[a0-2]{0,5}", c in "[a0-2]{0,5}") {
            prop_assert_eq!(natural_cmp(&a, &b), natural_cmp(&b, &a).reverse());
            prop_assert_eq!(natural_cmp(&a, &b) == Ordering::Equal, a == b);
            if natural_cmp(&a, &b).is_lt() && natural_cmp(&b, &c).is_lt() {
                prop_assert!(natural_cmp(&a, &c).is_lt());
            }
        }
    }
}

//! The numbers of collectives, element types and operators. They are also those on the wire, so they never change.

/// A collective.
#[repr(i32)]
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[allow(non_camel_case_types, reason = "names of C")]
pub enum Collective {
    /// All ranks contribute, all ranks receive the reduction.
    SUMAC_ALL_REDUCE = 1,
    /// All ranks contribute, the root receives the reduction.
    SUMAC_REDUCE = 2,
    /// The root contributes, all ranks receive.
    SUMAC_BROADCAST = 3,
    /// All ranks contribute, each rank receives its block of the reduction.
    SUMAC_REDUCE_SCATTER = 4,
    /// Each rank contributes its block, all ranks receive every block.
    SUMAC_ALL_GATHER = 5,
    /// No data; every rank waits for all ranks.
    SUMAC_BARRIER = 6,
    /// Each rank contributes its block, the root receives every block. Host collectives only.
    SUMAC_GATHER = 7,
    /// The root contributes, each rank receives its block. Host collectives only.
    SUMAC_SCATTER = 8,
    /// Every rank sends one block to every rank. Host collectives only.
    SUMAC_ALL_TO_ALL = 9,
    /// All-to-all with blocks of different lengths. Host collectives only.
    SUMAC_ALL_TO_ALL_V = 10,
}

/// An element type. All are little-endian.
#[repr(i32)]
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[allow(non_camel_case_types, reason = "names of C")]
pub enum Dtype {
    /// 8-bit signed integer; sums and products wrap.
    SUMAC_I8 = 1,
    /// 8-bit unsigned integer; sums and products wrap.
    SUMAC_U8 = 2,
    /// 16-bit signed integer; sums and products wrap.
    SUMAC_I16 = 3,
    /// 16-bit unsigned integer; sums and products wrap.
    SUMAC_U16 = 4,
    /// 32-bit signed integer; sums and products wrap.
    SUMAC_I32 = 5,
    /// 32-bit unsigned integer; sums and products wrap.
    SUMAC_U32 = 6,
    /// 64-bit signed integer; sums and products wrap.
    SUMAC_I64 = 7,
    /// 64-bit unsigned integer; sums and products wrap.
    SUMAC_U64 = 8,
    /// IEEE 754 binary16; accumulated in SUMAC_F32.
    SUMAC_F16 = 9,
    /// bfloat16; accumulated in SUMAC_F32.
    SUMAC_BF16 = 10,
    /// IEEE 754 binary32.
    SUMAC_F32 = 11,
    /// IEEE 754 binary64.
    SUMAC_F64 = 12,
    /// OCP 8-bit float E4M3 (without infinities; other libraries call it "e4m3fn"); accumulated in SUMAC_F32.
    SUMAC_F8_E4M3 = 13,
    /// OCP 8-bit float E5M2; accumulated in SUMAC_F32.
    SUMAC_F8_E5M2 = 14,
}

/// A reduction operator.
#[repr(i32)]
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[allow(non_camel_case_types, reason = "names of C")]
pub enum Op {
    /// Sum. Integers wrap; floats are rounded to the accumulator type after each addition.
    SUMAC_SUM = 1,
    /// Product. Integers wrap; floats are rounded to the accumulator type after each multiplication.
    SUMAC_PROD = 2,
    /// IEEE 754-2019 `minimum`: NaN propagates, and -0 < +0.
    SUMAC_MIN = 3,
    /// IEEE 754-2019 `maximum`: NaN propagates, and -0 < +0.
    SUMAC_MAX = 4,
    /// Average: the sum, divided once by the number of ranks, before the result is rounded.
    SUMAC_AVG = 5,
    /// Sum of the contributions, each multiplied by a scalar of its rank before it is sent.
    SUMAC_PREMUL_SUM = 6,
    /// Bitwise and of integers.
    SUMAC_BAND = 7,
    /// Bitwise or of integers.
    SUMAC_BOR = 8,
    /// Bitwise exclusive or of integers.
    SUMAC_BXOR = 9,
    /// Logical and of integers: 1 if no value is 0, else 0.
    SUMAC_LAND = 10,
    /// Logical or of integers: 1 if any value is not 0, else 0.
    SUMAC_LOR = 11,
    /// Logical exclusive or of integers: 1 if an odd number of values is not 0, else 0.
    SUMAC_LXOR = 12,
    /// The pair {value, index} with the smallest value: NaN propagates, and ties go to the lowest index.
    SUMAC_MIN_LOC = 13,
    /// The pair {value, index} with the largest value: NaN propagates, and ties go to the lowest index.
    SUMAC_MAX_LOC = 14,
}

#[cfg(test)]
mod tests {
    use crate::outcome::Path;

    /// Each number of the library has the same number here, and there is no other.
    #[test]
    fn numbers_are_those_of_the_wire() {
        let source = concat!(include_str!("numbers.rs"), include_str!("outcome.rs"));
        let numbers = |ty: &str| -> Vec<u8> {
            let (_, body) = source.split_once(&format!("pub enum {ty} {{")).expect("the enum");
            let (body, _) = body.split_once("\n}").expect("its end");
            body.lines()
                .filter_map(|line| line.trim().trim_end_matches(',').split_once(" = ")?.1.parse().ok())
                .collect()
        };
        let known = |from_wire: &dyn Fn(u8) -> bool| (1..=u8::MAX).filter(|&number| from_wire(number)).collect();
        let expected: [(&str, Vec<u8>); 4] = [
            ("Collective", known(&|number| sumac::Collective::from_wire(number).is_some())),
            ("Dtype", known(&|number| sumac::Dtype::from_wire(number).is_some())),
            ("Op", known(&|number| sumac::ReduceOp::from_wire(number).is_some())),
            ("Path", known(&|number| sumac::Path::from_wire(number).is_some())),
        ];
        for (ty, expected) in expected {
            let mut found = numbers(ty);
            found.retain(|&number| number != Path::SUMAC_PATH_NONE as u8);
            assert_eq!(found, expected, "{ty}");
        }
    }
}

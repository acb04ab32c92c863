//! Meshes between threads over loopback TCP: values against an oracle of one's own.

use super::*;
use crate::coll::{Place, Schedule, halving_doubling, ring};
use std::net::{SocketAddr, TcpListener};
use std::thread;
use std::time::{Duration, Instant};
use sumac_hal::op::{Dtype, OpDesc, Path, ReduceOp};
use sumac_hal::reduce::Kernel;

pub(super) const TOKEN: JobToken = JobToken(0x5eed);
/// Long enough for any machine; no test waits for it.
pub(super) const FAR: Duration = Duration::from_secs(120);
type Algorithm = fn(Place, usize) -> Schedule;
pub(super) const BOTH: [(Path, Algorithm); 2] =
    [(Path::Ring, ring::all_reduce), (Path::HalvingDoubling, halving_doubling::all_reduce)];

pub(super) fn meshes(ranks: u32) -> Vec<Mesh> {
    meshes_with(&vec![TOKEN; ranks as usize])
}

pub(super) fn meshes_with(tokens: &[JobToken]) -> Vec<Mesh> {
    let listeners: Vec<_> = tokens.iter().map(|_| TcpListener::bind("127.0.0.1:0").expect("loopback")).collect();
    let addresses: Vec<SocketAddr> = listeners.iter().map(|listener| listener.local_addr().expect("bound")).collect();
    let places = Place::all(tokens.len() as u32);
    let mesh = |((place, listener), &token)| Mesh::new(place, token, listener, addresses.clone()).expect("a mesh");
    places.zip(listeners).zip(tokens).map(mesh).collect()
}

/// Run `body` for each rank on a thread of its own; the meshes live until all have ended.
pub(super) fn on_ranks<T: Send>(meshes: &mut [Mesh], body: impl Fn(&mut Mesh) -> T + Sync) -> Vec<T> {
    thread::scope(|scope| {
        let body = &body;
        let ranks: Vec<_> = meshes.iter_mut().map(|mesh| scope.spawn(move || body(mesh))).collect();
        ranks.into_iter().map(|rank| rank.join().expect("no panic")).collect()
    })
}

pub(super) fn context(op_index: u64, desc: OpDesc, path: Path) -> Context {
    Context { op_index, signature: desc.signature(path, 1), desc, path, deadline: Instant::now() + FAR }
}

pub(super) fn all_reduce(
    mesh: &mut Mesh,
    op_index: u64,
    path: Path,
    dtype: Dtype,
    op: ReduceOp,
    buf: &mut [u8],
) -> Result<(), ExecError> {
    let count = buf.len() / dtype.size_bytes();
    let (_, algorithm) = BOTH.into_iter().find(|&(known, _)| known == path).expect("a host path");
    let schedule = algorithm(mesh.place(), count);
    let ctx = context(op_index, OpDesc::all_reduce(dtype, op, count as u64), path);
    execute(mesh, &schedule, Kernel::new(dtype, op).as_ref(), buf, &ctx, &mut NoInterrupt)
}

/// The input of a rank: small whole numbers, exact in every type and in every order of summation.
fn input(rank: u32, element: usize) -> i32 {
    let mixed = (u64::from(rank) + 1).wrapping_mul(0x9e37_79b9_7f4a_7c15)
        ^ (element as u64 + 7).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    (mixed >> 40) as i32 % 15 - 7
}

fn encode(dtype: Dtype, value: i32) -> Vec<u8> {
    match dtype {
        Dtype::I32 => value.to_le_bytes().to_vec(),
        Dtype::I64 => i64::from(value).to_le_bytes().to_vec(),
        Dtype::F32 => (value as f32).to_le_bytes().to_vec(),
        Dtype::F64 => f64::from(value).to_le_bytes().to_vec(),
        // A bfloat16 is the upper half of a binary32; these numbers need no rounding.
        Dtype::Bf16 => (value as f32).to_le_bytes()[2..].to_vec(),
        Dtype::F16 => f16_bits(value).to_le_bytes().to_vec(),
        other => panic!("no encoding for {other}"),
    }
}

/// Encode a small whole number as binary16 by its definition.
fn f16_bits(value: i32) -> u16 {
    let magnitude = value.unsigned_abs() as u16;
    assert!(magnitude < 2048, "exact up to 11 bits");
    let Some(exponent) = magnitude.checked_ilog2() else { return 0 };
    let fraction = (magnitude << (10 - exponent)) & 0x3ff;
    (u16::from(value < 0) << 15) | ((exponent as u16 + 15) << 10) | fraction
}

fn expected(ranks: u32, op: ReduceOp, element: usize) -> i32 {
    let inputs = (0..ranks).map(|rank| input(rank, element));
    match op {
        ReduceOp::Sum => inputs.sum(),
        ReduceOp::Min => inputs.min().expect("a rank"),
        ReduceOp::Max => inputs.max().expect("a rank"),
        other => panic!("no oracle for {other}"),
    }
}

fn counts(ranks: u32) -> Vec<usize> {
    vec![0, 1, ranks as usize - 1, ranks as usize, 777, 40_001]
}

use sumac_hal::ids::Rank;
#[test]
fn every_type_operator_count_and_rank_count() {
    for ranks in 1..=9_u32 {
        let mut meshes = meshes(ranks);
        on_ranks(&mut meshes, |mesh| {
            let mut op_index = 0;
            for (path, _) in BOTH {
                for &dtype in Dtype::ALL {
                    for &op in ReduceOp::ALL {
                        for count in counts(ranks) {
                            if count > 1000 && (op != ReduceOp::Sum || ranks % 3 != 0) {
                                continue;
                            }
                            let rank = mesh.place().rank().0;
                            let mut buf: Vec<u8> = (0..count).flat_map(|e| encode(dtype, input(rank, e))).collect();
                            all_reduce(mesh, op_index, path, dtype, op, &mut buf).expect("no error");
                            let right: Vec<u8> =
                                (0..count).flat_map(|e| encode(dtype, expected(ranks, op, e))).collect();
                            assert!(buf == right, "{} {dtype} {op} x {count} at rank {rank}", path.name());
                            op_index += 1;
                        }
                    }
                }
            }
            assert_eq!(mesh.foreign_dropped(), 0);
        });
    }
}

#[test]
fn the_bits_are_those_of_the_proved_expression() {
    use crate::coll::check::{Goal, check};
    let count = 1000;
    let float = |rank: u32, element: usize| {
        let bits = (u64::from(rank) << 32 | element as u64).wrapping_mul(0x9e37_79b9_7f4a_7c15);
        ((bits >> 40) as f32 - 8_388_608.0) * f32::from_bits(0x3000_0000 + ((bits as u32 & 0x1f) << 23))
    };
    for ranks in [3, 4, 6] {
        for (path, algorithm) in BOTH {
            let schedules: Vec<_> = Place::all(ranks).map(|place| algorithm(place, count)).collect();
            let report = check(Goal::AllReduce, &schedules).expect("proved");
            let mut right = vec![0_u32; count];
            for &(span, id) in &report.blocks {
                for (element, right) in right.iter_mut().enumerate().take(span.end()).skip(span.start) {
                    let sum = report.expressions.evaluate(id, &|rank| float(rank.0, element), &|a, b| a + b);
                    *right = sum.to_bits();
                }
            }
            let results = on_ranks(&mut meshes(ranks), |mesh| {
                let rank = mesh.place().rank().0;
                let mut buf: Vec<u8> = (0..count).flat_map(|element| float(rank, element).to_le_bytes()).collect();
                all_reduce(mesh, 0, path, Dtype::F32, ReduceOp::Sum, &mut buf).expect("no error");
                buf
            });
            let right: Vec<u8> = right.iter().flat_map(|bits| bits.to_le_bytes()).collect();
            assert!(results.iter().all(|result| *result == right), "{} over {ranks} ranks", path.name());
        }
    }
}

#[test]
fn sixteen_bit_floats_are_rounded_once() {
    // 256 + 1 is 256 in bfloat16; 256 + 1 + 1 is 258, if the partial sum is not rounded.
    for (path, _) in BOTH {
        let results = on_ranks(&mut meshes(3), |mesh| {
            let value = if mesh.place().rank() == Rank(0) { 256 } else { 1 };
            let mut buf = encode(Dtype::Bf16, value).repeat(5);
            all_reduce(mesh, 0, path, Dtype::Bf16, ReduceOp::Sum, &mut buf).expect("no error");
            buf
        });
        assert!(results.iter().all(|result| *result == encode(Dtype::Bf16, 258).repeat(5)));
    }
}

#[test]
fn nan_comes_out_canonical_also_from_a_rank_alone() {
    for ranks in [1, 2, 3] {
        let results = on_ranks(&mut meshes(ranks), |mesh| {
            let mut buf = 0xffc0_1234_u32.to_le_bytes().repeat(7);
            all_reduce(mesh, 0, Path::Ring, Dtype::F32, ReduceOp::Min, &mut buf).expect("no error");
            let mut half = 0xfe01_u16.to_le_bytes().repeat(7);
            all_reduce(mesh, 1, Path::Ring, Dtype::F16, ReduceOp::Sum, &mut half).expect("no error");
            (buf, half)
        });
        let right = (0x7fc0_0000_u32.to_le_bytes().repeat(7), 0x7e00_u16.to_le_bytes().repeat(7));
        assert!(results.iter().all(|result| *result == right), "{ranks} ranks");
    }
}

#[test]
fn two_ranks_that_send_more_than_sockets_hold_do_not_block() {
    let bytes = 32 << 20;
    for (path, _) in BOTH {
        let results = on_ranks(&mut meshes(2), |mesh| {
            let mut buf = vec![1; bytes];
            all_reduce(mesh, 0, path, Dtype::I32, ReduceOp::Sum, &mut buf).expect("no error");
            (buf.iter().all(|&byte| byte == 2), mesh.sent_bytes())
        });
        assert_eq!(results, [(true, bytes as u64); 2]);
    }
}

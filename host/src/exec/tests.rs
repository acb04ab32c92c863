//! Meshes between threads over loopback TCP: values against an independent oracle.

use super::*;
use crate::schedule::{Place, Schedule, halving_doubling, pairwise, ring};
use std::cell::Cell;
use std::net::{SocketAddr, TcpListener};
use std::thread;
use std::time::{Duration, Instant};
use sumac_hal::ids::Rank;
use sumac_hal::op::{Dtype, OpDesc, Path, ReduceOp};
use sumac_hal::reduce::Kernel;

/// The secret of the tests' jobs.
pub(crate) fn secret() -> JobSecret {
    JobSecret::new([0x5e; 32])
}

/// Long enough for any machine; no test waits for it.
pub(crate) const LONG: Duration = Duration::from_secs(120);
type Algorithm = fn(Place, usize) -> Schedule;
pub(crate) const BOTH: [(Path, Algorithm); 2] =
    [(Path::Ring, ring::all_reduce), (Path::HalvingDoubling, halving_doubling::all_reduce)];

thread_local! {
    static MEMORY: Cell<SharedMemory> = const { Cell::new(SharedMemory::Use) };
}

/// Make two tests of each of these functions: over TCP, and with shared memory.
macro_rules! both_ways {
    ($($name:ident),* $(,)?) => {$(
        mod $name {
            #[test]
            fn over_tcp() {
                crate::exec::tests::with_memory(crate::exec::SharedMemory::Avoid, super::$name);
            }

            #[test]
            fn in_shared_memory() {
                crate::exec::tests::with_memory(crate::exec::SharedMemory::Use, super::$name);
            }
        }
    )*};
}
pub(crate) use both_ways;

/// Run a test whose meshes share memory, or don't.
pub(crate) fn with_memory(memory: SharedMemory, test: impl FnOnce()) {
    MEMORY.set(memory);
    test();
}

pub(crate) fn meshes(ranks: u32) -> Vec<Mesh> {
    meshes_with(&vec![secret(); ranks as usize])
}

/// Return meshes whose links are all connected; in shared memory, if the test asks for it.
pub(crate) fn connected_meshes(ranks: u32) -> Vec<Mesh> {
    let mut meshes = meshes(ranks);
    for _ in 0..1000 {
        on_ranks(&mut meshes, |mesh| {
            let schedule = pairwise::all_to_all(mesh.place(), ranks as usize);
            let ctx = context(0, OpDesc::all_reduce(Dtype::U8, ReduceOp::Sum, 1), Path::Ring);
            let (input, mut output) = (vec![1; ranks as usize], vec![0; ranks as usize]);
            let buffers = Buffers::Separate { input: &input, output: &mut output };
            execute(mesh, &schedule, None, buffers, &ctx, &mut NoInterrupt).expect("no error");
        });
        let expected = if MEMORY.get() == SharedMemory::Use { ranks as usize - 1 } else { 0 };
        if meshes.iter().all(|mesh| mesh.shared_links() == (expected, ranks as usize - 1)) {
            return meshes;
        }
    }
    panic!(
        "{:?}",
        meshes.iter().map(|mesh| (mesh.shared_links(), mesh.foreign_dropped(), &mesh.sharing)).collect::<Vec<_>>()
    );
}

pub(crate) fn meshes_with(secrets: &[JobSecret]) -> Vec<Mesh> {
    let listeners: Vec<_> = secrets.iter().map(|_| TcpListener::bind("127.0.0.1:0").expect("loopback")).collect();
    let addresses: Vec<SocketAddr> = listeners.iter().map(|listener| listener.local_addr().expect("bound")).collect();
    let (places, memory) = (Place::all(secrets.len() as u32), MEMORY.get());
    let mesh = |((place, listener), secret): (_, &JobSecret)| {
        Mesh::new(place, secret.clone(), listener, addresses.clone(), memory).expect("a mesh")
    };
    places.zip(listeners).zip(secrets).map(mesh).collect()
}

/// Run `body` for each rank on its own thread; the meshes live until all have ended.
pub(crate) fn on_ranks<T: Send>(meshes: &mut [Mesh], body: impl Fn(&mut Mesh) -> T + Sync) -> Vec<T> {
    thread::scope(|scope| {
        let body = &body;
        let ranks: Vec<_> = meshes.iter_mut().map(|mesh| scope.spawn(move || body(mesh))).collect();
        ranks.into_iter().map(|rank| rank.join().expect("no panic")).collect()
    })
}

pub(crate) fn context(op_index: u64, desc: OpDesc, path: Path) -> Context {
    let number = op_index as u32 + 1;
    Context { op_index, number, signature: desc.signature(path, 1), desc, path, deadline: Instant::now() + LONG }
}

pub(crate) fn all_reduce(
    mesh: &mut Mesh,
    op_index: u64,
    path: Path,
    dtype: Dtype,
    op: ReduceOp,
    buf: &mut [u8],
) -> Result<(), ExecError> {
    let count = buf.len() / OpDesc::all_reduce(dtype, op, 1).element_bytes();
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

/// The same, adapted to type and operator: nothing negative for unsigned types, and factors whose product every type
/// holds.
fn operand(dtype: Dtype, op: ReduceOp, rank: u32, element: usize) -> i32 {
    let is_signed = !matches!(dtype, Dtype::U8 | Dtype::U16 | Dtype::U32 | Dtype::U64);
    let value = input(rank, element);
    match op {
        ReduceOp::Prod if value == 0 && rank < 4 => 2,
        ReduceOp::Prod if value < 0 && is_signed => -1,
        ReduceOp::Prod => 1,
        _ if is_signed => value,
        _ => value + 7,
    }
}

fn encode(dtype: Dtype, value: i32) -> Vec<u8> {
    encode_quotient(dtype, value, 1)
}

/// Encode a quotient as the type rounds it: integers truncate, narrow floats are rounded by the kernels, which have
/// tests of their own.
fn encode_quotient(dtype: Dtype, dividend: i32, divisor: u32) -> Vec<u8> {
    match dtype {
        Dtype::F64 => (f64::from(dividend) / f64::from(divisor)).to_le_bytes().to_vec(),
        _ if dtype.is_integer() => {
            (i64::from(dividend) / i64::from(divisor)).to_le_bytes()[..dtype.size_bytes()].to_vec()
        }
        _ => {
            let mut bytes = vec![0; dtype.size_bytes()];
            let kernel = Kernel::new(dtype, ReduceOp::Sum).expect("every type has sums");
            kernel.store(&mut bytes, &(dividend as f32 / divisor as f32).to_le_bytes(), 1);
            bytes
        }
    }
}

/// A rank's element of an operation: a value, or a pair with the rank as its index.
pub(crate) fn contribution(dtype: Dtype, op: ReduceOp, rank: u32, element: usize) -> Vec<u8> {
    let mut bytes = encode(dtype, operand(dtype, op, rank, element));
    if op.is_located() {
        bytes.extend(&u64::from(rank).to_le_bytes()[..dtype.size_bytes()]);
    }
    bytes
}

/// The expected element of the result, from all ranks' values.
pub(crate) fn expected(dtype: Dtype, op: ReduceOp, ranks: u32, element: usize) -> Vec<u8> {
    let values: Vec<i32> = (0..ranks).map(|rank| operand(dtype, op, rank, element)).collect();
    let (least, greatest) = (*values.iter().min().expect("a rank"), *values.iter().max().expect("a rank"));
    let truths = values.iter().filter(|&&value| value != 0).count();
    let divisor = if op == ReduceOp::Avg { ranks } else { 1 };
    let result = match op {
        ReduceOp::Sum | ReduceOp::Avg | ReduceOp::PremulSum => values.iter().sum(),
        ReduceOp::Prod => values.iter().product(),
        ReduceOp::Min | ReduceOp::MinLoc => least,
        ReduceOp::Max | ReduceOp::MaxLoc => greatest,
        ReduceOp::Band => values.iter().fold(-1, |a, b| a & b),
        ReduceOp::Bor => values.iter().fold(0, |a, b| a | b),
        ReduceOp::Bxor => values.iter().fold(0, |a, b| a ^ b),
        ReduceOp::Land => i32::from(truths == values.len()),
        ReduceOp::Lor => i32::from(truths > 0),
        ReduceOp::Lxor => i32::from(truths % 2 == 1),
        other => panic!("no oracle for {other}"),
    };
    let mut bytes = encode_quotient(dtype, result, divisor);
    if op.is_located() {
        let first = values.iter().position(|&value| value == result).expect("one of them") as u64;
        bytes.extend(&first.to_le_bytes()[..dtype.size_bytes()]);
    }
    bytes
}

both_ways! {
    every_type_operator_and_count_gives_the_reduction,
    results_match_the_proved_expression_bit_for_bit,
    sixteen_bit_floats_are_rounded_once,
    nan_result_is_canonical_even_with_one_rank,
    sends_beyond_socket_buffers_do_not_deadlock,
}

fn counts(ranks: u32) -> Vec<usize> {
    vec![0, 1, ranks as usize - 1, ranks as usize, 777, 40_001]
}

fn every_type_operator_and_count_gives_the_reduction() {
    // What lies between the ranks matters little here.
    let numbers: &[u32] = if MEMORY.get() == SharedMemory::Use { &[1, 2, 3, 4, 6, 9] } else { &[2, 5, 8] };
    for &ranks in numbers {
        let mut meshes = meshes(ranks);
        on_ranks(&mut meshes, |mesh| {
            let mut op_index = 0;
            for (path, _) in BOTH {
                for &dtype in Dtype::ALL {
                    for &op in ReduceOp::ALL.iter().filter(|&&op| Kernel::new(dtype, op).is_some()) {
                        for count in counts(ranks) {
                            let is_basic =
                                op == ReduceOp::Sum && matches!(dtype, Dtype::I32 | Dtype::F32 | Dtype::Bf16);
                            if count > 1000 && !(is_basic && ranks % 3 == 0) || count == 0 && !is_basic {
                                continue;
                            }
                            let rank = mesh.place().rank().0;
                            let mut buf: Vec<u8> = (0..count).flat_map(|e| contribution(dtype, op, rank, e)).collect();
                            all_reduce(mesh, op_index, path, dtype, op, &mut buf).expect("no error");
                            let right: Vec<u8> = (0..count).flat_map(|e| expected(dtype, op, ranks, e)).collect();
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

fn results_match_the_proved_expression_bit_for_bit() {
    use crate::schedule::check::{Goal, check};
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

fn nan_result_is_canonical_even_with_one_rank() {
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

fn sends_beyond_socket_buffers_do_not_deadlock() {
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

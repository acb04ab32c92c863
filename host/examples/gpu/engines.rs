//! The reductions of the GPU's copy engine.

use super::check::{Check, TIMEOUT, ordinary, to_text};
use super::findings::Findings;
use super::specials::{special_sums, tell};
use super::{Draws, get, put};
use std::time::Instant;
use sumac::gpu::engine::{Bulk, Family, GpuEngine};
use sumac::{Dtype, ReduceOp};
use sumac_hal::dma::{Address, Chain, Completion, Engine, Scope, Status, Step, Tag};
use sumac_hal::reduce::Kernel;

/// Compare the copy engine's reductions with the CPU's kernels.
pub(super) fn engines<G: Bulk>(check: &Check<'_, G>, draws: &mut Draws, findings: &mut Findings) {
    for family in [Family::Sums, Family::Integers] {
        let engine = (check.another)().and_then(|gpu| match gpu.check_bulk() {
            Ok(()) => GpuEngine::new(gpu, family).map(Some),
            Err(error) => {
                println!("{error}");
                Ok(None)
            }
        });
        let mut engine = match engine {
            Ok(Some(engine)) => engine,
            Ok(None) => return,
            Err(error) => return findings.note("the copy engine", Err(error.to_string())),
        };
        for &dtype in Dtype::ALL {
            for &op in ReduceOp::ALL {
                let Some(kernel) = Kernel::new(dtype, op).filter(|_| engine.capabilities().reduces(dtype, op)) else {
                    continue;
                };
                // Several tiles for some blocks, and a last tile that is not full.
                let len = 16 * (1 + (draws.next() >> 32) as usize % (check.elements * 100));
                let count = len / kernel.element_bytes();
                let operands = (ordinary(draws, &kernel, count), ordinary(draws, &kernel, count));
                let ran = engine_one(&mut engine, &kernel, &operands);
                let bits = ran.and_then(|found| match found == on_the_cpu(&kernel, &operands) {
                    true => Ok(()),
                    false => Err(format!("the bits of {count} elements differ")),
                });
                findings.note(&format!("the copy engine's {dtype} {op}"), bits);
                if family == Family::Sums && !dtype.is_integer() {
                    let specials = special_sums(dtype);
                    let ran = engine_one(&mut engine, &kernel, &specials);
                    let told = ran.map(|found| tell(&kernel, &specials, &found));
                    findings.note(&format!("the copy engine's {dtype} {op} of special values"), told);
                }
            }
        }
    }
}

/// Reduce on the CPU, as the copy engine should.
pub(super) fn on_the_cpu(kernel: &Kernel, (src, dst): &(Vec<u8>, Vec<u8>)) -> Vec<u8> {
    let mut accumulators = vec![0; src.len() / kernel.element_bytes() * kernel.accumulator_bytes()];
    kernel.load(&mut accumulators, dst, false);
    kernel.combine(&mut accumulators, src, false);
    let mut wanted = vec![0; src.len()];
    kernel.store(&mut wanted, &accumulators, 1);
    wanted
}

/// Reduce the first operand into the second on the engine; returns the result.
fn engine_one<G: Bulk>(
    engine: &mut GpuEngine<G>,
    kernel: &Kernel,
    (src, dst): &(Vec<u8>, Vec<u8>),
) -> Result<Vec<u8>, String> {
    let (len, count) = (src.len(), src.len() / kernel.element_bytes());
    let stream = engine.gpu().stream().map_err(to_text)?;
    let upload = |bytes: &[u8]| put(engine.gpu(), &stream, bytes).map_err(to_text);
    let (from, to) = (upload(src)?, upload(dst)?);
    let from_key = engine.register(from).ok_or("no region is free")?;
    let to_key = engine.register(to.clone()).ok_or("no region is free")?;
    let at = |region| Address { region, offset_bytes: 0 };
    let step = Step::Reduce {
        op: kernel.op(),
        source: kernel.dtype(),
        accumulator: kernel.dtype(),
        src: at(from_key),
        dst: at(to_key),
        count: count as u32,
    };
    let tag = Tag { seq: 1, slot: 0, attempt: 0 };
    if let Err(error) = engine.submit(Chain { tag, scope: Scope(0), steps: &[step] }) {
        return Err(format!("{error}: {}", reason(engine)));
    }
    let mut ends = [Completion { tag, status: Status::Aborted, step: 0 }];
    let deadline = Instant::now() + TIMEOUT;
    while engine.poll(&mut ends) == 0 {
        if Instant::now() > deadline {
            return Err("it did not complete in time".into());
        }
    }
    let found = get(engine.gpu(), &stream, &to, len).map_err(to_text)?;
    engine.deregister(from_key);
    engine.deregister(to_key);
    match ends[0].status {
        Status::Done => Ok(found),
        status => Err(format!("{status}: {}", reason(engine))),
    }
}

/// Return the driver's words for an engine's last failure.
fn reason<G: Bulk>(engine: &GpuEngine<G>) -> String {
    engine.error().map_or_else(|| "no reason".into(), ToString::to_string)
}

//! Data-parallel training of a small network: each rank has its own part of the data, and gradients are summed while
//! the backward pass goes on. `hello.rs` is the shortest program; this is what a real one adds:
//!
//! - Buckets in registered memory ([`Communicator::alloc`]), so that the device reads and writes them itself.
//! - Overlap: the last layer's gradients are under way while those of the first are computed.
//! - A declared order of summation, so that the same job always gives the same bits, by whatever path.
//! - What the outcome says: the path, why there is no tree, and that a lost device was recovered from. Nothing has to
//!   be done then.
//!
//! Run it like `hello.rs`, as N processes with RANK and WORLD_SIZE beside a `sumac controller` and a `sumac device`.

use sumac::comm::Outcome;
use sumac::{Buffer, Communicator, Error, JoinConfig, Order, ReduceOp, Transfer};

const INPUTS: usize = 16;
const HIDDEN: usize = 64;
/// The parameters of the first layer, weights and biases.
const FIRST: usize = HIDDEN * (INPUTS + 1);
/// The parameters of the last layer.
const LAST: usize = HIDDEN + 1;
/// Examples of one rank in a step.
const BATCH: usize = 32;
/// Examples of one rank.
const EXAMPLES: usize = 256;
const STEPS: usize = 200;
const LEARNING_RATE: f32 = 0.05;

pub(crate) fn main() -> Result<(), Error> {
    let mut config = JoinConfig::from_env()?;
    config.order = Order::TreePairwise;
    let comm = Communicator::join(config)?;
    let is_first = comm.rank() == 0;
    let mut path = None;
    let network = train(&comm, STEPS, |step, loss, outcome| {
        if is_first && outcome.recovered {
            println!("step {step}: a device was lost; its operations were completed without it");
        }
        let now = describe(outcome);
        if is_first && (step % 50 == 0 || step + 1 == STEPS || path.as_ref() != Some(&now)) {
            println!("step {step}: loss {loss:.4}, by {now}");
        }
        path = Some(now);
    })?;
    comm.leave();
    if is_first {
        println!("the parameters' checksum: {:016x}", checksum(&network));
    }
    Ok(())
}

/// Return how a sum was made: the path, and how data reached the device or why no tree was used.
fn describe(outcome: &Outcome) -> String {
    let how = outcome.fallback.clone().or_else(|| outcome.transfer.map(|transfer| Transfer::name(transfer).into()));
    format!("{} ({})", outcome.path.name(), how.unwrap_or_else(|| "as configured".into()))
}

/// Train for `steps` steps and return the parameters, which are the same on all ranks. `report` gets each step's number
/// and loss, and the outcome of its last sum.
pub(crate) fn train(
    comm: &Communicator,
    steps: usize,
    mut report: impl FnMut(usize, f32, &Outcome),
) -> Result<Vec<f32>, Error> {
    let (examples, ranks) = (examples(comm.rank()), comm.size() as f32);
    let mut first: Vec<f32> = random(1).take(FIRST).map(|x| x * 0.3).collect();
    let mut last: Vec<f32> = random(2).take(LAST).map(|x| x * 0.1).collect();
    // One bucket a layer. The last layer's also carries the loss.
    let mut first_bucket: Buffer<f32> = comm.alloc(FIRST)?;
    let mut last_bucket: Buffer<f32> = comm.alloc(LAST + 1)?;
    for step in 0..steps {
        let at = step * BATCH % EXAMPLES;
        let forward = Forward::new(&examples[at..at + BATCH], &first, &last);
        forward.last_gradients(&mut last_bucket);
        let last_sum = comm.start_all_reduce(last_bucket, ReduceOp::Sum)?;
        // The device sums the last layer's meanwhile.
        forward.first_gradients(&last, &mut first_bucket);
        let first_sum = comm.start_all_reduce(first_bucket, ReduceOp::Sum)?;
        let outcome;
        (last_bucket, _) = last_sum.wait()?;
        (first_bucket, outcome) = first_sum.wait()?;
        let rate = LEARNING_RATE / (ranks * BATCH as f32);
        last.iter_mut().zip(&last_bucket[..LAST]).for_each(|(weight, gradient)| *weight -= rate * gradient);
        first.iter_mut().zip(&first_bucket[..]).for_each(|(weight, gradient)| *weight -= rate * gradient);
        report(step, last_bucket[LAST] / (ranks * BATCH as f32), &outcome);
    }
    Ok([first, last].concat())
}

/// An input and its target.
type Example = ([f32; INPUTS], f32);

/// Return a rank's examples of the function to learn.
fn examples(rank: u32) -> Vec<Example> {
    let mut numbers = random(1000 + u64::from(rank));
    let mut input = || std::array::from_fn(|_| numbers.next().unwrap_or_default());
    let target = |x: &[f32; INPUTS]| x[0] * x[1] + (2.0 * x[2]).tanh() - 0.5 * x[3];
    (0..EXAMPLES).map(|_| input()).map(|x| (x, target(&x))).collect()
}

/// Return pseudo-random numbers from -1 to 1 (Steele et al., SplitMix64).
fn random(seed: u64) -> impl Iterator<Item = f32> {
    (1_u64..).map(move |nth| {
        let x = (seed << 32).wrapping_add(nth).wrapping_mul(0x9e37_79b9_7f4a_7c15);
        let x = (x ^ x >> 30).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        let x = (x ^ x >> 27).wrapping_mul(0x94d0_49bb_1331_11eb);
        ((x ^ x >> 31) >> 40) as f32 / (1 << 23) as f32 - 1.0
    })
}

/// A batch after the forward pass: one hidden layer of rectified units, and one output.
struct Forward<'a> {
    batch: &'a [Example],
    hidden: Vec<[f32; HIDDEN]>,
    /// The output's distance from the target.
    errors: Vec<f32>,
}

impl<'a> Forward<'a> {
    fn new(batch: &'a [Example], first: &[f32], last: &[f32]) -> Self {
        let (units, _) = first.as_chunks::<{ INPUTS + 1 }>();
        let unit = |weights: &[f32; INPUTS + 1], x: &[f32; INPUTS]| {
            let sum: f32 = weights.iter().zip(x).map(|(weight, x)| weight * x).sum();
            (sum + weights[INPUTS]).max(0.0)
        };
        let hidden = batch.iter().map(|(x, _)| std::array::from_fn(|nth| unit(&units[nth], x)));
        let hidden: Vec<[f32; HIDDEN]> = hidden.collect();
        let output = |hidden: &[f32; HIDDEN]| last.iter().zip(hidden).map(|(w, h)| w * h).sum::<f32>() + last[HIDDEN];
        let errors = hidden.iter().zip(batch).map(|(hidden, (_, target))| output(hidden) - target).collect();
        Self { batch, hidden, errors }
    }

    /// Write the last layer's gradients, and behind them the sum of squared errors.
    fn last_gradients(&self, gradients: &mut [f32]) {
        gradients.fill(0.0);
        for (hidden, error) in self.hidden.iter().zip(&self.errors) {
            gradients.iter_mut().zip(hidden).for_each(|(gradient, h)| *gradient += error * h);
            gradients[HIDDEN] += error;
            gradients[LAST] += error * error;
        }
    }

    /// Write the first layer's gradients.
    fn first_gradients(&self, last: &[f32], gradients: &mut [f32]) {
        gradients.fill(0.0);
        let (units, _) = gradients.as_chunks_mut::<{ INPUTS + 1 }>();
        for ((hidden, error), (x, _)) in self.hidden.iter().zip(&self.errors).zip(self.batch) {
            for ((unit, _), weight) in units.iter_mut().zip(hidden).zip(last).filter(|((_, h), _)| **h > 0.0) {
                let slope = error * weight;
                unit.iter_mut().zip(x).for_each(|(gradient, x)| *gradient += slope * x);
                unit[INPUTS] += slope;
            }
        }
    }
}

/// Return a checksum of all bits (FNV-1a).
pub(crate) fn checksum(values: &[f32]) -> u64 {
    let bytes = values.iter().flat_map(|value| value.to_bits().to_le_bytes());
    bytes.fold(0xcbf2_9ce4_8422_2325, |sum, byte| (sum ^ u64::from(byte)).wrapping_mul(0x0100_0000_01b3))
}

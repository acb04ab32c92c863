//! An operation, the memory that each rank passes to it, and the expected contents of that memory afterwards.

use rustix::param::page_size;
use std::ops::Range;
use sumac::{Buffer, Buffers, Collective, Communicator, OpDesc, Order, Outcome, Path, ReduceOp, Transfer};
use sumac_hal::op::Dtype;
use sumac_tests::oracle::{self, Shape, weight};

/// The period of a rank's values, in elements: the oracle computes one period only. A prime, so that values misplaced
/// by a chunk or block are detected.
const PERIOD: usize = 61;

/// The fill of memory that must not be written.
const UNTOUCHED: u8 = 0x5a;

/// Guard bytes around each buffer, which must stay unchanged.
const MARGIN: usize = 64;

/// The maximum length of a call's buffer, in bytes.
const ROOM: usize = 128 << 10;

/// An operation, each rank's input, and the expected result.
pub(crate) struct Call {
    pub(crate) desc: OpDesc,
    seed: u64,
    ranks: usize,
    /// The first period of each rank's input.
    inputs: Vec<Vec<u8>>,
    /// The first period of the result, for collectives that combine elements.
    results: Option<Vec<u8>>,
}

impl Call {
    /// Compute inputs and results for `ranks` ranks below `shape`. Values round if an order is declared.
    pub(crate) fn new(desc: OpDesc, (shape, ranks, order): (&Shape, usize, Order), seed: u64) -> Self {
        let some = 0..(desc.count as usize).min(PERIOD);
        let element = |rank: usize, e: usize| {
            let coordinates = [seed, rank as u64, e as u64];
            match (desc.dtype, desc.op) {
                (Some(dtype), Some(op)) => oracle::input(dtype, op, order == Order::Arrival, &coordinates),
                (Some(dtype), None) => weight(&coordinates).to_le_bytes()[..dtype.size_bytes()].to_vec(),
                (None, _) => Vec::new(),
            }
        };
        let inputs = (0..ranks).map(|rank| some.clone().flat_map(|e| element(rank, e)).collect()).collect();
        let result = |(dtype, op): (Dtype, ReduceOp)| {
            let of = |e| oracle::expected(shape, order, dtype, op, &|rank| element(rank, e));
            some.clone().flat_map(of).collect()
        };
        Self { desc, seed, ranks, inputs, results: desc.dtype.zip(desc.op).map(result) }
    }

    fn value_bytes(&self) -> usize {
        self.desc.dtype.map_or(1, Dtype::size_bytes)
    }

    /// Return the block of a rank, in elements.
    fn block(&self, rank: usize) -> Range<usize> {
        let start = |rank: usize| rank * self.desc.count as usize / self.ranks;
        start(rank)..start(rank + 1)
    }

    /// Return the range of elements in a rank's input.
    pub(crate) fn given(&self, rank: usize) -> Range<usize> {
        match self.desc.collective {
            Collective::Broadcast if rank != self.desc.root.0 as usize => 0..0,
            Collective::AllGather => self.block(rank),
            _ => 0..self.desc.count as usize,
        }
    }

    /// Return the range of elements in a rank's output.
    fn taken(&self, rank: usize) -> Range<usize> {
        match self.desc.collective {
            Collective::Reduce if rank != self.desc.root.0 as usize => 0..0,
            Collective::ReduceScatter => self.block(rank),
            _ => 0..self.desc.count as usize,
        }
    }

    /// Return `elements` of a rank's input.
    pub(crate) fn input(&self, rank: usize, elements: Range<usize>) -> Vec<u8> {
        self.repeat(&self.inputs[rank], elements)
    }

    /// Return `elements` of the expected result.
    pub(crate) fn result(&self, elements: Range<usize>) -> Vec<u8> {
        match (&self.results, self.desc.collective) {
            (Some(results), _) => self.repeat(results, elements),
            (None, Collective::AllGather) => {
                let within = |block: Range<usize>| block.start.max(elements.start)..block.end.min(elements.end);
                (0..self.ranks).flat_map(|rank| self.input(rank, within(self.block(rank)))).collect()
            }
            (None, _) => self.input(self.desc.root.0 as usize, elements),
        }
    }

    fn repeat(&self, first: &[u8], elements: Range<usize>) -> Vec<u8> {
        let each = self.desc.element_bytes();
        let mut bytes = Vec::with_capacity(elements.len() * each);
        let mut next = elements.start;
        while next < elements.end {
            let end = (next / PERIOD * PERIOD + PERIOD).min(elements.end);
            bytes.extend_from_slice(&first[next % PERIOD * each..][..(end - next) * each]);
            next = end;
        }
        bytes
    }
}

/// The memory with which one rank calls an operation.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Placement {
    pub(crate) in_place: bool,
    /// Whether the input, or the only buffer of an in-place call, is registered.
    pub(crate) registered_input: bool,
    pub(crate) registered_output: bool,
    /// The offset of the buffers in their memory, in bytes.
    skip: usize,
}

impl Placement {
    /// Draw the placement of one rank from the call's seed.
    pub(crate) fn draw(call: &Call, rank: usize) -> Self {
        let bits = weight(&[call.seed, rank as u64, u64::MAX]);
        let bit = |n: u32| bits >> n & 1 == 1;
        // One in eight is unaligned.
        let unit = if bits >> 32 & 7 == 0 { 1 } else { call.value_bytes() };
        let skip = (bits >> 8) as usize % 16 * unit;
        Self { in_place: bit(0), registered_input: bit(1), registered_output: bit(2), skip }
    }

    /// All memory registered, or none.
    pub(crate) const fn of(registered: bool, in_place: bool) -> Self {
        Self { in_place, registered_input: registered, registered_output: registered, skip: 0 }
    }
}

/// The memory of a rank: registered and plain, an input and an output of each.
pub(crate) struct Arena {
    registered: [Buffer<u8>; 2],
    plain: [Vec<u8>; 2],
}

impl Arena {
    pub(crate) fn new(comm: &Communicator) -> Self {
        let registered = || comm.alloc(ROOM + 4 * MARGIN).expect("registered memory");
        let plain = || vec![0; ROOM + 4 * MARGIN];
        Self { registered: [registered(), registered()], plain: [plain(), plain()] }
    }

    /// Run an operation and check every byte of the memory around its buffers.
    pub(crate) fn call(&mut self, comm: &Communicator, call: &Call, placement: Placement) -> Result<Outcome, String> {
        let rank = comm.rank() as usize;
        let (given, taken) = (call.given(rank), call.taken(rank));
        let Self { registered: [registered, other], plain: [plain, other_plain] } = self;
        let input: &mut [u8] = if placement.registered_input { registered } else { plain };
        let output: &mut [u8] = if placement.registered_output { other } else { other_plain };
        let start = MARGIN + placement.skip;
        let each = call.desc.element_bytes();
        let outcome = if placement.in_place {
            // In place, the buffer spans input and output, indexed like the whole vector.
            let whole = given.end.max(taken.end);
            let within = |elements: &Range<usize>| start + elements.start * each..start + elements.end * each;
            let around = &mut input[..start + whole * each + MARGIN];
            around.fill(UNTOUCHED);
            around[within(&given)].copy_from_slice(&call.input(rank, given.clone()));
            let mut after = around.to_vec();
            after[within(&taken)].copy_from_slice(&call.result(taken.clone()));
            let outcome = comm.run(&call.desc, &mut around[start..start + whole * each], &Default::default());
            same(around, &after, "buffer")?;
            outcome
        } else {
            let bytes = [given.len(), taken.len()].map(|elements| elements * each);
            let input = fill(input, start, &call.input(rank, given.clone()));
            let output = fill(output, start, &vec![UNTOUCHED; bytes[1]]);
            let (before, mut after) = (input.to_vec(), output.to_vec());
            after[start..start + bytes[1]].copy_from_slice(&call.result(taken.clone()));
            let within = |n: usize| start..start + bytes[n];
            let buffers = Buffers::Separate { input: &input[within(0)], output: &mut output[within(1)] };
            let outcome = comm.run(&call.desc, buffers, &Default::default());
            same(input, &before, "input")?;
            same(output, &after, "output")?;
            outcome
        };
        outcome.map_err(|error| error.to_string())
    }
}

/// Write `bytes` at `start`, surrounded by guard bytes; return them with their guards.
fn fill<'m>(memory: &'m mut [u8], start: usize, bytes: &[u8]) -> &'m mut [u8] {
    let around = &mut memory[..start + bytes.len() + MARGIN];
    around.fill(UNTOUCHED);
    around[start..start + bytes.len()].copy_from_slice(bytes);
    around
}

fn same(found: &[u8], expected: &[u8], what: &str) -> Result<(), String> {
    if found == expected {
        return Ok(());
    }
    let at = found.iter().zip(expected).position(|(found, expected)| found != expected);
    Err(format!("the {what} of {} bytes differs at byte {at:?}", found.len()))
}

/// Check the outcome of a zero-copy call: path and transfer, and that the device read exactly this rank's contribution,
/// once.
pub(crate) fn check_zero_copy(call: &Call, placement: Placement, rank: usize, outcome: &Outcome) -> Result<(), String> {
    let (given, taken) = (call.given(rank).len(), call.taken(rank).len());
    // Scaling happens during the copy into the bounce buffer.
    let scaled = call.desc.op == Some(ReduceOp::PremulSum);
    // Engines that combine need aligned values.
    let reaches = |registered: bool| registered && placement.skip.is_multiple_of(call.value_bytes());
    let output = reaches(if placement.in_place { placement.registered_input } else { placement.registered_output });
    // The device writes only to pages that hold nothing but the output.
    let output = output && has_whole_page(call, placement, rank);
    let bounces = given > 0 && (!reaches(placement.registered_input) || scaled) || taken > 0 && !output;
    let transfer = if bounces { Transfer::Bounced } else { Transfer::ZeroCopy };
    let wire_bytes = (given * call.desc.element_bytes()) as u64;
    let found = (outcome.path, outcome.transfer, outcome.wire_bytes, outcome.retransmits, &outcome.fallback);
    let expected = (Path::Tree, Some(transfer), wire_bytes, 0, &None);
    if found == expected { Ok(()) } else { Err(format!("{found:?} where {expected:?} was expected")) }
}

/// Return whether some page lies entirely within a rank's output. Registered memory is page-aligned.
fn has_whole_page(call: &Call, placement: Placement, rank: usize) -> bool {
    let (taken, each) = (call.taken(rank), call.desc.element_bytes());
    let skipped = if placement.in_place { taken.start * each } else { 0 };
    let start = MARGIN + placement.skip + skipped;
    let end = start + taken.len() * each;
    let page = page_size();
    start.next_multiple_of(page) < end / page * page
}

/// Return the shape of a leaf with these ranks, in order.
pub(crate) fn leaf(ranks: Range<usize>) -> Shape {
    Shape::Node(ranks.map(Shape::Rank).collect())
}

//! What a supervisor says to the ranks that it starts, and what they answer: JSON, one object a line.
//!
//! A rank reads one [`RankJob`] from stdin, a line, and prints [`Report`]s on stdout: [`Report::Joined`], then one
//! [`Report::Measured`], [`Report::NotPossible`] or [`Report::Explained`] a case, or one [`Report::Combined`]; before
//! [`Report::Measured`] comes [`Report::Begins`], if that was asked for. A rank that fails prints nothing more, says why on
//! stderr and exits with status 1.

use crate::collective::Piece;
use crate::options::Algo;
use crate::perf::Explained;
use crate::workload::{Check, MemoryKind};
use serde::{Deserialize, Serialize};
use std::net::SocketAddr;
use std::path::PathBuf;
use sumac::Attach;
use sumac::select::Attached;
use sumac_hal::ctrl::Order;
use sumac_hal::ids::Rank;
use sumac_hal::op::{Collective, Dtype, OpDesc, Path, ReduceOp};

/// What one rank is to do.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub(crate) struct RankJob {
    /// The controller that forms the communicator.
    pub(crate) controller: SocketAddr,
    /// The job's name there.
    pub(crate) job: String,
    /// This rank.
    pub(crate) rank: u32,
    /// How many there are.
    pub(crate) world: u32,
    /// Where in the fabric it pretends to be.
    pub(crate) host: String,
    /// In which order contributions combine; `None`: what the library does unasked.
    pub(crate) order: Option<Order>,
    /// How it is to reach its leaf device.
    pub(crate) attach: Attach,
    /// Over which RDMA port, if it is over verbs; `None`: the first that is active.
    #[serde(default)]
    pub(crate) verbs: Option<String>,
    /// How long an operation may take, in milliseconds.
    pub(crate) deadline_ms: u64,
    /// What to do once it has joined.
    pub(crate) work: Work,
}

/// What a rank does in its communicator.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub(crate) enum Work {
    /// Measure and check.
    Perf {
        /// What to measure, in order.
        cases: Vec<Case>,
        /// Unmeasured iterations before each.
        warmup: u32,
        /// Measured iterations of each.
        iterations: u32,
        /// What the buffers are in.
        memory: MemoryKind,
        /// Which of them are checked.
        check: Check,
        /// The measured iteration of each case whose beginning is reported, and after which a line on stdin is waited
        /// for; `None`: none.
        announced: Option<u32>,
    },
    /// Say what would be chosen, and why.
    Explain {
        /// Of what, in order.
        cases: Vec<Case>,
    },
    /// Combine the tensors of files.
    Files(FileWork),
}

/// A rank's part of a collective on files.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub(crate) struct FileWork {
    /// The collective.
    pub(crate) collective: Collective,
    /// The operator; of no meaning where nothing is reduced.
    pub(crate) op: ReduceOp,
    /// The root; of no meaning where there is none.
    pub(crate) root: u32,
    /// The way asked for.
    pub(crate) algo: Algo,
    /// This rank's file, if it contributes.
    pub(crate) input: Option<PathBuf>,
    /// The tensors, in an order that is the same at all ranks.
    pub(crate) pieces: Vec<Piece>,
    /// The file to write results to, behind what is there, if this rank does.
    pub(crate) output: Option<PathBuf>,
}

/// One row of a measurement.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Case {
    /// The collective.
    pub(crate) collective: Collective,
    /// The element type; of no meaning in a barrier.
    pub(crate) dtype: Dtype,
    /// The operator; of no meaning where nothing combines.
    pub(crate) op: ReduceOp,
    /// The root; of no meaning where there is none.
    pub(crate) root: u32,
    /// Elements of the whole operation, over all blocks.
    pub(crate) count: u64,
    /// The way asked for.
    pub(crate) algo: Algo,
}

impl Case {
    /// Describe the operation.
    pub(crate) fn desc(&self) -> OpDesc {
        let Self { collective, dtype, op, root, count, .. } = *self;
        OpDesc {
            collective,
            dtype: (collective != Collective::Barrier).then_some(dtype),
            op: collective.reduces().then_some(op),
            root: Rank(if collective.is_rooted() { root } else { 0 }),
            count,
        }
    }

    /// Return the size of the operation in bytes.
    pub(crate) fn size_bytes(&self) -> u64 {
        self.count * self.desc().element_bytes() as u64
    }
}

/// A line from a rank.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub(crate) enum Report {
    /// It is a member of the communicator.
    Joined {
        /// How the ranks reach the tree, if there is one; the same at all ranks.
        attached: Option<Attached>,
    },
    /// What would be chosen for the next case.
    Explained(Explained),
    /// All ranks are ready for the announced iteration of the next case, which begins now.
    Begins {
        /// The time, on the clock that all processes of a machine share.
        at_ns: u64,
        /// What the iterations measured before took, the median; 0 if there were none.
        usual_ns: u64,
    },
    /// The next case is measured.
    Measured(Measured),
    /// The next case can't be run: the way asked for is ruled out, at all ranks alike.
    NotPossible {
        /// The first condition that rules it out.
        why: String,
    },
    /// The files' tensors are combined.
    Combined {
        /// CRC-32C of the results, which ranks that get the same must agree on.
        crc: u32,
        /// The operations' time in nanoseconds.
        time_ns: u64,
        /// The ways that they took, and how many took each.
        paths: Vec<(Path, u32)>,
        /// Why one took another way than asked for.
        fallback: Option<String>,
    },
}

/// What one rank saw of one case.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub(crate) struct Measured {
    /// Time of each iteration in nanoseconds.
    pub(crate) times_ns: Vec<u64>,
    /// Elements that were not what they must be, over all iterations, warm-up included.
    pub(crate) wrong: u64,
    /// The way that the operations took; `None` before the first.
    pub(crate) path: Option<Path>,
    /// Why it was another one than asked for.
    pub(crate) fallback: Option<String>,
    /// Bytes sent, over all measured iterations.
    pub(crate) wire_bytes: u64,
    /// Processor time, over all measured iterations, in nanoseconds.
    pub(crate) cpu_ns: u64,
    /// Contributions sent again.
    pub(crate) retransmits: u64,
    /// The call that was repaired, the last one if there were several.
    pub(crate) repair: Option<Repair>,
    /// How often something was repaired, be it in a call or between two.
    pub(crate) repairs: u32,
    /// How long that took, in nanoseconds.
    pub(crate) repairs_ns: u64,
    /// Bytes sent to other ranks for it.
    pub(crate) repair_bytes: u64,
    /// The rank that came latest to a measured operation, and how many microseconds after the first.
    pub(crate) slowest: Option<(u32, u32)>,
}

/// A call that was repaired: a measured operation, or a barrier next to it.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Repair {
    /// The number of the measured iteration.
    pub(crate) iteration: u32,
    /// Whether it was a barrier.
    pub(crate) in_barrier: bool,
    /// How long the call took.
    pub(crate) time_ns: u64,
}

//! Messages between a supervisor and its ranks: JSON, one object per line.
//!
//! A rank reads one [`RankJob`] from stdin and prints [`Report`]s on stdout: [`Report::Joined`], then one
//! [`Report::Measured`] or [`Report::NotPossible`] per case and placement, or one [`Report::Explained`] per case, or a
//! single [`Report::Combined`].
//! [`Report::Begins`] precedes [`Report::Measured`] if the job asks for it. A rank that fails prints no further report,
//! writes its error to stderr and exits with status 1.

mod explained;

pub(crate) use explained::Explained;

use crate::exit::Failure;
use crate::options::Algo;
use crate::workload::{Check, Placements};
use rustix::time::{ClockId, clock_gettime};
use serde::{Deserialize, Serialize};
use std::io::{self, Write};
use std::net::SocketAddr;
use std::path::PathBuf;
use sumac::select::{JobFacts, TreeTransport};
use sumac::{MemoryKind, Shape, Transport, WaitPolicy};
use sumac_hal::ctrl::Order;
use sumac_hal::ctrl::secure::Key;
use sumac_hal::ids::Rank;
use sumac_hal::op::{Collective, Dtype, OpDesc, Path, ReduceOp};

/// The job of one rank.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub(crate) struct RankJob {
    /// The controller that forms the communicator.
    pub(crate) controller: SocketAddr,
    /// The job's name there.
    pub(crate) job: String,
    /// The key to join with.
    #[serde(default, with = "key_text")]
    pub(crate) key: Option<Key>,
    /// This rank.
    pub(crate) rank: u32,
    /// The number of ranks.
    pub(crate) world: u32,
    /// The host in the fabric that it stands for.
    pub(crate) host: String,
    /// The order of reduction; `None`: the library's default.
    pub(crate) order: Option<Order>,
    /// The transport to its leaf device.
    pub(crate) transport: Transport,
    /// The RDMA port for the transports that use one; `None`: the first that is active.
    #[serde(default)]
    pub(crate) verbs: Option<String>,
    /// The maximum number of trees; 0: as many as are faster.
    #[serde(default)]
    pub(crate) trees: u8,
    /// How the ranks lie. `None`: by their machines, or the fabric.
    #[serde(default)]
    pub(crate) shape: Option<Shape>,
    /// Whether it joins a tree for each rail, too.
    #[serde(default)]
    pub(crate) hybrid: bool,
    /// Whether the leaders of servers join a tree, too.
    #[serde(default)]
    pub(crate) rab: bool,
    /// The memory of its buffers.
    #[serde(default)]
    pub(crate) memory: MemoryKind,
    /// How it waits for other processes of its machine.
    #[serde(default)]
    pub(crate) wait_policy: WaitPolicy,
    /// The deadline of an operation, in milliseconds.
    pub(crate) deadline_ms: u64,
    /// Its work after joining.
    pub(crate) work: Work,
}

/// A key in a job: its text, or nothing.
mod key_text {
    use serde::{Deserialize, Deserializer, Serialize, Serializer, de};
    use sumac_hal::ctrl::secure::{Key, parse_key};
    use zeroize::Zeroizing;

    pub(super) fn serialize<S: Serializer>(key: &Option<Key>, serializer: S) -> Result<S::Ok, S::Error> {
        let text = key.as_ref().map(|key| Zeroizing::new(key.reveal().to_string()));
        text.as_ref().map(|text| text.as_str()).serialize(serializer)
    }

    pub(super) fn deserialize<'de, D: Deserializer<'de>>(deserializer: D) -> Result<Option<Key>, D::Error> {
        let text = Option::<String>::deserialize(deserializer)?.map(Zeroizing::new);
        text.map(|text| parse_key(&text)).transpose().map_err(de::Error::custom)
    }
}

/// What a rank does in its communicator.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub(crate) enum Work {
    /// Measure and check.
    Perf {
        /// The cases to measure, in order.
        cases: Vec<Case>,
        /// Warm-up iterations before each case.
        warmup: u32,
        /// Measured iterations of each case.
        iterations: u32,
        /// Which iterations are checked.
        check: Check,
        /// Where inputs and outputs lie.
        placements: Placements,
        /// The measured iteration of each case whose start is reported and after which the rank waits for a line on
        /// stdin; `None`: no such iteration.
        announced: Option<u32>,
    },
    /// Measure algorithms in turns: a report for each case, group by group.
    InTurns {
        /// The groups, in order.
        groups: Vec<Turns>,
    },
    /// Report which path would be selected, and why.
    Explain {
        /// The cases to explain, in order.
        cases: Vec<Case>,
    },
    /// Run a collective on the tensors of files.
    Files(FileWork),
}

/// Cases of one operation that take turns.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub(crate) struct Turns {
    /// The operation, by each algorithm.
    pub(crate) cases: Vec<Case>,
    /// How often each has its turn.
    pub(crate) rounds: u32,
    /// Measured iterations of a turn.
    pub(crate) iterations: u32,
}

/// A rank's part of a collective on files.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub(crate) struct FileWork {
    /// The collective.
    pub(crate) collective: Collective,
    /// The operator; ignored by collectives that do not reduce.
    pub(crate) op: ReduceOp,
    /// The root; ignored by collectives without one.
    pub(crate) root: u32,
    /// The requested algorithm.
    pub(crate) algo: Algo,
    /// This rank's file, if it contributes.
    pub(crate) input: Option<PathBuf>,
    /// The tensors, in the same order on all ranks.
    pub(crate) pieces: Vec<Piece>,
    /// The file to which this rank appends results, if it writes any.
    pub(crate) output: Option<PathBuf>,
}

/// A tensor in an operation.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Piece {
    /// Its name in the files.
    pub(crate) name: String,
    /// Its element type.
    pub(crate) dtype: Dtype,
    /// Whether its elements are in Fortran order.
    pub(crate) fortran_order: bool,
    /// The number of its elements in each rank's file.
    pub(crate) counts: Vec<u64>,
    /// The offset of the result in an output file, in bytes.
    pub(crate) offset: u64,
}

/// One row of a measurement.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Case {
    /// The collective.
    pub(crate) collective: Collective,
    /// The element type; ignored by a barrier.
    pub(crate) dtype: Dtype,
    /// The operator; ignored by collectives that do not reduce.
    pub(crate) op: ReduceOp,
    /// The root; ignored by collectives without one.
    pub(crate) root: u32,
    /// Elements of the whole operation, over all blocks.
    pub(crate) count: u64,
    /// The requested algorithm.
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
        /// The transport to the tree, if there is one; the same on all ranks.
        transport: Option<TreeTransport>,
    },
    /// What the costs of the job depend on, before measurements in turns; the same on all ranks.
    Facts(JobFacts),
    /// The selection for the next case.
    Explained(Explained),
    /// The announced iteration of the next case begins now; all ranks are ready for it.
    Begins {
        /// The time on the monotonic clock, which all processes of a machine share.
        at_ns: u64,
        /// The median time of the iterations before it; 0 if there were none.
        usual_ns: u64,
    },
    /// The next placement of the case is measured.
    Measured(Measured),
    /// The algorithm of the next case is not possible, on any rank.
    NotPossible {
        /// The first condition that rules it out.
        why: String,
    },
    /// The collective on files is complete.
    Combined {
        /// CRC-32C of the results; ranks with the same result must report the same value.
        crc: u32,
        /// The operations' time in nanoseconds.
        time_ns: u64,
        /// The paths taken, each with its number of operations.
        paths: Vec<(Path, u32)>,
        /// Why an operation fell back to another path, if one did.
        fallback: Option<String>,
    },
}

/// One rank's measurements of one case in one placement.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub(crate) struct Measured {
    /// Time of each iteration in nanoseconds.
    pub(crate) times_ns: Vec<u64>,
    /// Elements with wrong values, over all iterations including warm-up.
    pub(crate) wrong: u64,
    /// The path of the operations; `None` before the first.
    pub(crate) path: Option<Path>,
    /// The least number of trees that an operation was spread over; `None` before the first.
    pub(crate) trees: Option<u32>,
    /// Why they fell back to another path, if they did.
    pub(crate) fallback: Option<String>,
    /// Bytes sent, over all measured iterations.
    pub(crate) wire_bytes: u64,
    /// Processor time, over all measured iterations, in nanoseconds.
    pub(crate) cpu_ns: u64,
    /// Retransmitted contributions.
    pub(crate) retransmits: u64,
    /// The last call that recovered from a lost tree.
    pub(crate) recovery: Option<Recovery>,
    /// The number of recoveries, in calls and between them.
    pub(crate) recoveries: u32,
    /// The time of all recoveries, in nanoseconds.
    pub(crate) recoveries_ns: u64,
    /// Bytes sent to other ranks for recovery.
    pub(crate) repair_bytes: u64,
    /// The rank that arrived last at a measured operation, and how many microseconds after the first.
    pub(crate) slowest: Option<(u32, u32)>,
}

/// A call that recovered from a lost tree: a measured operation, or a barrier next to it.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Recovery {
    /// The number of the measured iteration.
    pub(crate) iteration: u32,
    /// Whether the call was a barrier.
    pub(crate) in_barrier: bool,
    /// How long the call took.
    pub(crate) time_ns: u64,
}

/// Return the time on the monotonic clock in nanoseconds, which all processes of this machine share.
pub(crate) fn now_ns() -> u64 {
    let now = clock_gettime(ClockId::Monotonic);
    now.tv_sec.unsigned_abs() * 1_000_000_000 + now.tv_nsec.unsigned_abs()
}

/// Print a report as a line on stdout.
pub(crate) fn report(report: &Report) -> Result<(), Failure> {
    let mut out = io::stdout().lock();
    serde_json::to_writer(&mut out, report).map_err(Failure::run)?;
    writeln!(out)?;
    Ok(out.flush()?)
}

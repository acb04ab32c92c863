//! Exchanges between ranks, and the conclusions that all draw from them.

use super::link::by_facts;
use super::{Bootstrap, Handle, PeerError, PeerFacts, PeerOptions, Peered, WhyStaged};
use crate::gpu::group::SpinWait;
use crate::gpu::nccl::{Nccl, NcclId, why_not_together};
use crate::gpu::{Gpu, GpuError};
use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};
use std::time::Instant;
use sumac_hal::op::{Dtype, OpDesc, ReduceOp};

/// Version of the exchanged messages.
const VERSION: u32 = 1;

/// First message of a rank.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub(super) struct Hello {
    version: u32,
    /// Options that must be equal on all ranks.
    options: String,
    pub(super) facts: PeerFacts,
    /// Network cost as estimated by this rank.
    network: Option<NetworkCost>,
}

/// Estimated cost of an all-reduce through the network in seconds: start, and for each byte.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
pub(super) struct NetworkCost {
    alpha_s: f64,
    beta_s: f64,
}

impl NetworkCost {
    /// Fit a line through the estimates for two sizes.
    fn of(bootstrap: &impl Bootstrap) -> Option<Self> {
        let cost_s = |count: u64| bootstrap.cost_s(&OpDesc::all_reduce(Dtype::F32, ReduceOp::Sum, count));
        let (small, large) = (cost_s(SMALL_COUNT)?, cost_s(LARGE_COUNT)?);
        let beta_s = ((large - small) / (4 * (LARGE_COUNT - SMALL_COUNT)) as f64).max(0.0);
        Some(Self { alpha_s: (small - beta_s * (4 * SMALL_COUNT) as f64).max(0.0), beta_s })
    }

    pub(super) fn seconds(&self, bytes: f64) -> f64 {
        self.alpha_s + self.beta_s * bytes
    }
}

/// Element counts of the two estimates: 1 KiB and 16 MiB.
const SMALL_COUNT: u64 = 1 << 8;
const LARGE_COUNT: u64 = 1 << 22;

/// A rank's exported memory, or why it is unavailable; `number` identifies its purpose.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
struct Export {
    number: u32,
    handle: Result<Handle, String>,
}

/// Exchange a message with all ranks; returns the decoded messages.
fn exchange_all<T: Serialize + DeserializeOwned>(
    bootstrap: &impl Bootstrap,
    what: &T,
    deadline: Instant,
) -> Result<Vec<T>, PeerError> {
    let malformed = |rank: usize, error: postcard::Error| PeerError::Message {
        rank: rank as u32,
        why: format!("unreadable message: {error}"),
    };
    let bytes = postcard::to_stdvec(what).map_err(|error| malformed(bootstrap.rank() as usize, error))?;
    let all = bootstrap.exchange(&bytes, deadline)?;
    if all.len() != bootstrap.ranks() as usize {
        let why = format!("{} messages of {} ranks", all.len(), bootstrap.ranks());
        return Err(PeerError::Message { rank: bootstrap.rank(), why });
    }
    let read = |(rank, bytes): (usize, &Vec<u8>)| postcard::from_bytes(bytes).map_err(|error| malformed(rank, error));
    all.iter().enumerate().map(read).collect()
}

/// Exchange facts; returns those of all ranks, and the network cost estimated by rank 0.
pub(super) fn hello<G: Peered>(
    gpu: &G,
    bootstrap: &impl Bootstrap,
    options: &PeerOptions,
    deadline: Instant,
) -> Result<(Vec<PeerFacts>, Option<NetworkCost>), PeerError> {
    let group = &options.group;
    let same = format!(
        "order {:?}, shape {}, table {}, pieces of {}, chunks of {}, direct: {}, network first: {}, NCCL: {}",
        group.order,
        group.shape,
        group.table.version,
        group.piece_bytes,
        options.chunk_bytes,
        options.direct,
        options.network_first,
        options.nccl
    );
    let mine = Hello { version: VERSION, options: same, facts: gpu.facts()?, network: NetworkCost::of(bootstrap) };
    let all = exchange_all(bootstrap, &mine, deadline)?;
    for (rank, hello) in all.iter().enumerate() {
        let differs = |why: String| Err(PeerError::Message { rank: rank as u32, why });
        if hello.version != VERSION {
            return differs(format!("message version {}, expected {VERSION}", hello.version));
        }
        if hello.options != mine.options {
            return differs(format!("options {} differ from {}", hello.options, mine.options));
        }
    }
    let network = all.first().and_then(|hello| hello.network);
    Ok((all.into_iter().map(|hello| hello.facts).collect(), network))
}

/// Return the first obstacle to direct access in the ranks' facts.
pub(super) fn first_reason(facts: &[PeerFacts]) -> Option<WhyStaged> {
    let pairs = (0..facts.len()).flat_map(|b| (0..b).map(move |a| (a, b)));
    pairs.into_iter().find_map(|(a, b)| by_facts((a as u32, &facts[a]), (b as u32, &facts[b])))
}

/// The memory of all ranks, by rank, or why some cannot open it; identical on all ranks.
pub(super) type OpenedMemory<M> = Result<Vec<M>, WhyStaged>;

/// Export memory to all ranks and open theirs, each at least as long as given, by rank. All ranks must pass the same
/// `number`.
pub(super) fn exchange_memory<G: Peered>(
    gpu: &G,
    bootstrap: &impl Bootstrap,
    facts: &[PeerFacts],
    (number, own, least_bytes): (u32, &G::Memory, &[usize]),
    deadline: Instant,
) -> Result<OpenedMemory<G::Memory>, PeerError> {
    let me = bootstrap.rank();
    let handle = gpu.export(own).map_err(|error| error.to_string());
    let shown = exchange_all(bootstrap, &Export { number, handle }, deadline)?;
    if let Some(rank) = shown.iter().position(|shown| shown.number != number) {
        let why = format!("memory number {}, expected {number}", shown[rank].number);
        return Err(PeerError::Message { rank: rank as u32, why });
    }
    let opened = open_all(gpu, (me, own), facts, &shown, least_bytes);
    let result: Result<(), WhyStaged> = opened.as_ref().map(|_| ()).map_err(Clone::clone);
    let results = exchange_all(bootstrap, &result, deadline)?;
    // All ranks use the same first reason; memory opened here is closed again.
    Ok(results.into_iter().collect::<Result<(), _>>().and(opened))
}

fn open_all<G: Peered>(
    gpu: &G,
    (me, own): (u32, &G::Memory),
    facts: &[PeerFacts],
    shown: &[Export],
    least_bytes: &[usize],
) -> OpenedMemory<G::Memory> {
    let open = |(peer, Export { handle, .. }): (usize, &Export)| {
        if peer as u32 == me {
            return Ok(own.clone());
        }
        let refused = |why: String| WhyStaged::Opening { rank: me, peer: peer as u32, why };
        let handle = handle.as_ref().map_err(|why| refused(why.clone()))?;
        let needed = least_bytes.get(peer).map_or(0, |&bytes| bytes as u64);
        if handle.len_bytes < needed {
            return Err(refused(format!("{} bytes, but {needed} are required", handle.len_bytes)));
        }
        gpu.reach(&facts[peer])?;
        gpu.open(&facts[peer], handle).map_err(|error| refused(error.to_string()))
    };
    shown.iter().enumerate().map(open).collect()
}

/// Return the number of ranks on the busiest GPU.
pub(super) fn ranks_on_busiest_gpu(facts: &[PeerFacts]) -> u32 {
    let same = |a: &PeerFacts, b: &PeerFacts| a.gpu == b.gpu && a.host == b.host;
    let on = |wanted: &PeerFacts| facts.iter().filter(|facts| same(facts, wanted)).count() as u32;
    facts.iter().map(on).max().unwrap_or(1)
}

/// Set up NCCL between all ranks, or return why not; identical on all ranks.
pub(super) fn join_nccl<G: Nccl + Gpu>(
    gpu: &G,
    bootstrap: &impl Bootstrap,
    facts: &[PeerFacts],
    deadline: Instant,
) -> Result<Result<G::Comm, String>, PeerError> {
    let versions = facts.iter().map(|facts| (&facts.nccl, format!("{} of {}", facts.gpu, facts.host)));
    if let Some(why) = why_not_together(versions) {
        return Ok(Err(why));
    }
    let id = match bootstrap.rank() {
        0 => gpu.nccl_id().map(Some).map_err(|error| error.to_string()),
        _ => Ok(None),
    };
    let ids: Vec<Result<Option<NcclId>, String>> = exchange_all(bootstrap, &id, deadline)?;
    let id = match ids.into_iter().next() {
        Some(Ok(Some(id))) => id,
        Some(Err(why)) => return Ok(Err(why)),
        _ => return Err(PeerError::Message { rank: 0, why: "no id for NCCL".into() }),
    };
    let joined = init(gpu, (&id, bootstrap.rank(), bootstrap.ranks()), deadline);
    let result: Result<(), String> = joined.as_ref().map(|_| ()).map_err(Clone::clone);
    let results = exchange_all(bootstrap, &result, deadline)?;
    let failed = results.iter().enumerate().find_map(|(rank, result)| Some((rank, result.as_ref().err()?)));
    match (failed, joined) {
        (None, joined) => Ok(joined),
        (Some((rank, why)), joined) => {
            if let Ok(comm) = &joined {
                gpu.nccl_abort(comm, deadline);
            }
            Ok(Err(format!("rank {rank}: {why}")))
        }
    }
}

fn init<G: Nccl + Gpu>(gpu: &G, (id, rank, ranks): (&NcclId, u32, u32), deadline: Instant) -> Result<G::Comm, String> {
    // Use at most half of the time, to leave some for notifying the others.
    let until = Instant::now() + deadline.saturating_duration_since(Instant::now()) / 2;
    let comm = gpu.nccl_init(id, rank, ranks).map_err(|error| error.to_string())?;
    let mut spin = SpinWait::default();
    let failed: GpuError = loop {
        match gpu.nccl_is_ready(&comm) {
            Ok(true) => return Ok(comm),
            Ok(false) if Instant::now() < until => spin.wait(),
            Ok(false) => break GpuError::Deadline,
            Err(error) => break error,
        }
    };
    gpu.nccl_abort(&comm, deadline);
    Err(format!("setup failed: {failed}"))
}

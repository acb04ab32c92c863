//! What ranks tell each other, and what all of them conclude from it.

use super::link::by_facts;
use super::{Bootstrap, Handle, PeerError, PeerFacts, PeerOptions, Peered, WhyStaged};
use crate::gpu::group::Patience;
use crate::gpu::nccl::{Nccl, NcclId, why_not_together};
use crate::gpu::{Gpu, GpuError};
use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};
use std::time::Instant;
use sumac_hal::op::{Dtype, OpDesc, ReduceOp};

/// Counts the forms of what ranks tell each other.
const VERSION: u32 = 1;

/// What a rank begins with.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub(super) struct Hello {
    version: u32,
    /// What has to be the same at all ranks.
    options: String,
    pub(super) facts: PeerFacts,
    /// What the network costs, as this rank sees it.
    network: Option<NetworkCost>,
}

/// What an all-reduce through the network is expected to take: to begin with, and for each byte, in seconds.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
pub(super) struct NetworkCost {
    alpha_s: f64,
    beta_s: f64,
}

impl NetworkCost {
    /// Ask for two sizes, and draw a line.
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

/// The elements of the operations that the network is asked for: 1 KiB and 16 MiB.
const SMALL_COUNT: u64 = 1 << 8;
const LARGE_COUNT: u64 = 1 << 22;

/// A rank's memory, or why nobody can have it; what it is for has a number.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
struct Shown {
    number: u32,
    handle: Result<Handle, String>,
}

/// Tell all ranks something, and return what each says, checked for its form.
fn tell<T: Serialize + DeserializeOwned>(
    bootstrap: &impl Bootstrap,
    what: &T,
    deadline: Instant,
) -> Result<Vec<T>, PeerError> {
    let malformed = |rank: usize, error: postcard::Error| PeerError::Message {
        rank: rank as u32,
        why: format!("a message that can't be read: {error}"),
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

/// Exchange what each rank has; return it with what rank 0 expects of the network.
pub(super) fn hello<G: Peered>(
    gpu: &G,
    bootstrap: &impl Bootstrap,
    options: &PeerOptions,
    deadline: Instant,
) -> Result<(Vec<PeerFacts>, Option<NetworkCost>), PeerError> {
    let group = &options.group;
    let same = format!(
        "order {:?}, table {}, pieces of {}, chunks of {}, direct: {}, network first: {}, NCCL: {}",
        group.order,
        group.table.version,
        group.piece_bytes,
        options.chunk_bytes,
        options.direct,
        options.network_first,
        options.nccl
    );
    let mine = Hello { version: VERSION, options: same, facts: gpu.facts()?, network: NetworkCost::of(bootstrap) };
    let all = tell(bootstrap, &mine, deadline)?;
    for (rank, hello) in all.iter().enumerate() {
        let differs = |why: String| Err(PeerError::Message { rank: rank as u32, why });
        if hello.version != VERSION {
            return differs(format!("messages of form {}, here they are of form {VERSION}", hello.version));
        }
        if hello.options != mine.options {
            return differs(format!("options {}, here they are {}", hello.options, mine.options));
        }
    }
    let network = all.first().and_then(|hello| hello.network);
    Ok((all.into_iter().map(|hello| hello.facts).collect(), network))
}

/// Return the first reason against the direct way that the ranks' own words have.
pub(super) fn first_reason(facts: &[PeerFacts]) -> Option<WhyStaged> {
    let pairs = (0..facts.len()).flat_map(|b| (0..b).map(move |a| (a, b)));
    pairs.into_iter().find_map(|(a, b)| by_facts((a as u32, &facts[a]), (b as u32, &facts[b])))
}

/// What the ranks show each other, by rank, or why some can't see it: the same at all ranks.
pub(super) type Seen<M> = Result<Vec<M>, WhyStaged>;

/// Show a piece of own memory to all ranks and open theirs, each of at least so many bytes, by rank. All ranks call it
/// with the same `number`.
pub(super) fn show<G: Peered>(
    gpu: &G,
    bootstrap: &impl Bootstrap,
    facts: &[PeerFacts],
    (number, own, least_bytes): (u32, &G::Memory, &[usize]),
    deadline: Instant,
) -> Result<Seen<G::Memory>, PeerError> {
    let me = bootstrap.rank();
    let handle = gpu.export(own).map_err(|error| error.to_string());
    let shown = tell(bootstrap, &Shown { number, handle }, deadline)?;
    if let Some(rank) = shown.iter().position(|shown| shown.number != number) {
        let why = format!("memory number {}, where this rank shows number {number}", shown[rank].number);
        return Err(PeerError::Message { rank: rank as u32, why });
    }
    let opened = open_all(gpu, (me, own), facts, &shown, least_bytes);
    let verdict: Result<(), WhyStaged> = opened.as_ref().map(|_| ()).map_err(Clone::clone);
    let verdicts = tell(bootstrap, &verdict, deadline)?;
    // The same first reason at all ranks; what this one has opened closes again.
    Ok(verdicts.into_iter().collect::<Result<(), _>>().and(opened))
}

fn open_all<G: Peered>(
    gpu: &G,
    (me, own): (u32, &G::Memory),
    facts: &[PeerFacts],
    shown: &[Shown],
    least_bytes: &[usize],
) -> Seen<G::Memory> {
    let open = |(peer, Shown { handle, .. }): (usize, &Shown)| {
        if peer as u32 == me {
            return Ok(own.clone());
        }
        let refused = |why: String| WhyStaged::Opening { rank: me, peer: peer as u32, why };
        let handle = handle.as_ref().map_err(|why| refused(why.clone()))?;
        let needed = least_bytes.get(peer).map_or(0, |&bytes| bytes as u64);
        if handle.len_bytes < needed {
            return Err(refused(format!("{} bytes of it, and {needed} are needed", handle.len_bytes)));
        }
        gpu.reach(&facts[peer])?;
        gpu.open(&facts[peer], handle).map_err(|error| refused(error.to_string()))
    };
    shown.iter().enumerate().map(open).collect()
}

/// Return how many ranks share the busiest GPU.
pub(super) fn crowd(facts: &[PeerFacts]) -> u32 {
    let same = |a: &PeerFacts, b: &PeerFacts| a.gpu == b.gpu && a.host == b.host;
    let on = |wanted: &PeerFacts| facts.iter().filter(|facts| same(facts, wanted)).count() as u32;
    facts.iter().map(on).max().unwrap_or(1)
}

/// Set up NCCL between all ranks, or say why not: the same at all ranks.
pub(super) fn join_nccl<G: Nccl + Gpu>(
    gpu: &G,
    bootstrap: &impl Bootstrap,
    facts: &[PeerFacts],
    deadline: Instant,
) -> Result<Result<G::Comm, String>, PeerError> {
    let said = facts.iter().map(|facts| (&facts.nccl, format!("{} of {}", facts.gpu, facts.host)));
    if let Some(why) = why_not_together(said) {
        return Ok(Err(why));
    }
    let id = match bootstrap.rank() {
        0 => gpu.nccl_id().map(Some).map_err(|error| error.to_string()),
        _ => Ok(None),
    };
    let ids: Vec<Result<Option<NcclId>, String>> = tell(bootstrap, &id, deadline)?;
    let id = match ids.into_iter().next() {
        Some(Ok(Some(id))) => id,
        Some(Err(why)) => return Ok(Err(why)),
        _ => return Err(PeerError::Message { rank: 0, why: "no id for NCCL".into() }),
    };
    let joined = init(gpu, (&id, bootstrap.rank(), bootstrap.ranks()), deadline);
    let verdict: Result<(), String> = joined.as_ref().map(|_| ()).map_err(Clone::clone);
    let verdicts = tell(bootstrap, &verdict, deadline)?;
    let failed = verdicts.iter().enumerate().find_map(|(rank, verdict)| Some((rank, verdict.as_ref().err()?)));
    match (failed, joined) {
        (None, joined) => Ok(joined),
        (Some((rank, why)), joined) => {
            if let Ok(comm) = &joined {
                gpu.nccl_abort(comm);
            }
            Ok(Err(format!("at rank {rank} {why}")))
        }
    }
}

fn init<G: Nccl + Gpu>(gpu: &G, (id, rank, ranks): (&NcclId, u32, u32), deadline: Instant) -> Result<G::Comm, String> {
    // Half of the time at most, so that there is some left to tell the others.
    let until = Instant::now() + deadline.saturating_duration_since(Instant::now()) / 2;
    let comm = gpu.nccl_init(id, rank, ranks).map_err(|error| error.to_string())?;
    let mut patience = Patience::default();
    let failed: GpuError = loop {
        match gpu.nccl_is_ready(&comm) {
            Ok(true) => return Ok(comm),
            Ok(false) if Instant::now() < until => patience.wait(),
            Ok(false) => break GpuError::Deadline,
            Err(error) => break error,
        }
    };
    gpu.nccl_abort(&comm);
    Err(format!("it was not set up: {failed}"))
}

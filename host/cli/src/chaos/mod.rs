//! `sumac chaos`: a UDP proxy between ranks and devices, or between devices, that applies the fault rules of the
//! simulator to real packets.
//!
//! ```text
//! client A --\                     /-- socket of A --\
//!             front socket (--listen)                 target (--to)
//! client B --/                     \-- socket of B --/
//! ```
//!
//! | module | content |
//! |---|---|
//! | `engine` | sans-I/O core: packets, rules, seed and time in; packets and counters out |
//! | `clients` | client table with eviction |
//! | `rules` | parsing of rules |
//! | `proxy` | the engine on real sockets; `perf --fault cut-link` uses it, too |

mod clients;
mod engine;
mod proxy;
mod rules;
#[cfg(test)]
mod tests;

pub(crate) use clients::Clients;
pub(crate) use engine::{Engine, Lane, Link, LinkCounters};
pub(crate) use proxy::{Proxy, front};

use crate::exit::Failure;
use crate::size::SizeBytes;
use anyhow::{Context, anyhow, ensure};
use clap::{Args, Parser};
use engine::LaneCounters;
use rules::{Directions, Rate, RuleSpec, Span, Time};
use serde::Serialize;
use signal_hook::consts::{SIGINT, SIGTERM, SIGUSR1};
use signal_hook::iterator::Signals;
use std::fs::File;
use std::io::{self, Read, Write};
use std::net::SocketAddr;
use std::path::PathBuf;
use std::str::FromStr;

/// The longest rules file, in bytes.
const RULES_MAX_BYTES: u64 = 1 << 20;

/// The most links of one proxy.
const LINKS_MAX: usize = 64;

/// The largest limit of --queue, in bytes.
const QUEUE_MAX_BYTES: u64 = 4 << 30;

/// `sumac chaos`.
#[derive(Debug, Args)]
pub(crate) struct ChaosArgs {
    /// Address to which clients send; port 0 picks a free one. Give it once per link
    #[arg(long, value_name = "ADDRESS", required = true)]
    listen: Vec<SocketAddr>,
    /// Target of the link. Give it once per --listen, in the same order
    #[arg(long, value_name = "ADDRESS", required = true)]
    to: Vec<SocketAddr>,
    #[command(flatten)]
    rules: RuleArgs,
    /// Maximum number of clients per link
    #[arg(long, value_name = "N", default_value_t = 256, value_parser = clap::value_parser!(u32).range(1..=4096))]
    clients: u32,
    /// Print counters as JSON, one line per link
    #[arg(long)]
    json: bool,
}

/// The faults to apply to packets.
#[derive(Debug, Clone, Args)]
pub(crate) struct RuleArgs {
    /// Rate of dropped packets, in both directions
    #[arg(long, value_name = "RATE", default_value = "0%")]
    loss: Rate,
    /// Rate of duplicated packets
    #[arg(long, value_name = "RATE", default_value = "0%")]
    duplicate: Rate,
    /// Rate of packets with 1 to 3 flipped bits, or truncated
    #[arg(long, value_name = "RATE", default_value = "0%")]
    corrupt: Rate,
    /// Rate of packets delayed by up to --late, so that others overtake them
    #[arg(long, value_name = "RATE", default_value = "0%")]
    reorder: Rate,
    /// Maximum delay of reordered packets and of copies [default: 5ms]
    #[arg(long, value_name = "TIME")]
    late: Option<Time>,
    /// Delay of every packet, in addition to all faults: a time, or a range to draw from, as in 1ms..5ms
    #[arg(long, value_name = "TIMES")]
    delay: Option<Span>,
    /// Drop all packets in one direction or both
    #[arg(long, value_name = "DIRECTION")]
    cut: Option<Directions>,
    /// Start of --cut, measured from the start of the proxy [default: 0s]
    #[arg(long, value_name = "TIME", requires = "cut")]
    at: Option<Time>,
    /// Length of --cut [default: unlimited]
    #[arg(long = "for", value_name = "TIME", requires = "cut")]
    length: Option<Time>,
    /// TOML file with rules per link, direction and time, instead of the options above
    #[arg(long = "rules", value_name = "FILE",
          conflicts_with_all = ["loss", "duplicate", "corrupt", "reorder", "late", "delay", "cut"])]
    file: Option<PathBuf>,
    /// Seed of all random choices: the same seed does the same to packet n of a client's flow
    #[arg(long, value_name = "N", default_value_t = 0)]
    seed: u64,
    /// Maximum size of delayed packets; packets beyond it are dropped and counted
    #[arg(long, value_name = "SIZE", default_value = "64M")]
    queue: SizeBytes,
}

/// The same options in one string, for `perf --chaos`.
#[derive(Debug, Clone, Parser)]
#[command(name = "--chaos", no_binary_name = true, disable_help_flag = true)]
struct RuleCommandLine {
    #[command(flatten)]
    rules: RuleArgs,
}

/// The JSON form of a link's counters.
#[derive(Debug, Serialize)]
struct Row {
    listen: SocketAddr,
    to: SocketAddr,
    #[serde(flatten)]
    counters: LinkCounters,
}

/// Relay until a signal.
pub(crate) fn run(args: &ChaosArgs) -> Result<(), Failure> {
    let mut signals =
        Signals::new([SIGINT, SIGTERM, SIGUSR1]).context("cannot install signal handlers").map_err(Failure::Run)?;
    let links = args.links().map_err(Failure::Input)?;
    let lanes = args.rules.lanes(links.len()).map_err(Failure::Input)?;
    let sockets = links
        .iter()
        .map(|&(listen, to)| Ok((front(listen).with_context(|| format!("cannot listen on {listen}"))?, to)));
    let sockets = sockets.collect::<anyhow::Result<Vec<_>>>().map_err(Failure::Input)?;
    let links = links.iter().zip(lanes).map(|(&(_, target), (up, down))| Link {
        target,
        up,
        down,
        clients: Clients::new(args.clients as usize),
    });
    let engine = args.rules.engine(links.collect());
    let ended = signals.handle();
    let proxy =
        Proxy::start(engine, sockets, move || ended.close()).context("cannot start the relay").map_err(Failure::Run)?;
    {
        let mut out = io::stdout().lock();
        for (listen, to) in proxy.fronts().iter().zip(&args.to) {
            writeln!(out, "relaying {listen} to {to}")?;
        }
        out.flush()?;
    }
    let fronts = proxy.fronts().to_vec();
    let got_signal = loop {
        match signals.forever().next() {
            Some(SIGUSR1) => args.print(&fronts, &proxy.counters())?,
            Some(_) => break true,
            None => break false,
        }
    };
    args.print(&fronts, &proxy.finish())?;
    if got_signal { Ok(()) } else { Err(Failure::Run(anyhow!("the relay failed: it cannot wait for packets"))) }
}

impl ChaosArgs {
    /// Return the pairs of listening address and target.
    fn links(&self) -> anyhow::Result<Vec<(SocketAddr, SocketAddr)>> {
        let (listen, to) = (self.listen.len(), self.to.len());
        ensure!(listen == to, "{listen} --listen and {to} --to: each link needs one of both, in the same order");
        ensure!(listen <= LINKS_MAX, "{listen} links exceed the limit of {LINKS_MAX}");
        for target in &self.to {
            ensure!(
                target.port() != 0 && !target.ip().is_unspecified(),
                "--to {target}: the target needs a specific IP address and a port other than 0"
            );
            // Packets would loop, and with duplication multiply without limit.
            let own = self
                .listen
                .iter()
                .find(|own| own.port() == target.port() && (own.ip() == target.ip() || own.ip().is_unspecified()));
            ensure!(own.is_none(), "--to {target} is also a --listen address: packets would loop for ever");
        }
        Ok(self.listen.iter().copied().zip(self.to.iter().copied()).collect())
    }

    fn print(&self, fronts: &[SocketAddr], counters: &[LinkCounters]) -> io::Result<()> {
        let mut out = io::stdout().lock();
        for ((&listen, &to), &counters) in fronts.iter().zip(&self.to).zip(counters) {
            if self.json {
                serde_json::to_writer(&mut out, &Row { listen, to, counters })?;
                writeln!(out)?;
                continue;
            }
            let LinkCounters { clients, replaced, up, down } = counters;
            writeln!(out, "{listen} to {to}: {clients} clients, {replaced} evicted")?;
            for (direction, lane) in [("up", up), ("down", down)] {
                let LaneCounters { received, sent, lost, duplicated, corrupted, reordered, .. } = lane;
                let LaneCounters { overflowed, refused, stray, unsent, .. } = lane;
                write!(out, "  {direction}: {received} received, {sent} sent, {lost} lost, {duplicated} duplicated, ")?;
                write!(out, "{corrupted} corrupted, {reordered} reordered; dropped: queue full {overflowed}, ")?;
                writeln!(out, "no room for client {refused}, client evicted {stray}, rejected by socket {unsent}")?;
            }
        }
        out.flush()
    }
}

impl RuleArgs {
    /// Return the lanes of each link, up and down.
    ///
    /// # Errors
    /// The rules or the size of the queue are invalid.
    pub(crate) fn lanes(&self, links: usize) -> anyhow::Result<Vec<(Lane, Lane)>> {
        ensure!(
            self.queue.0 <= QUEUE_MAX_BYTES,
            "--queue {} exceeds the limit of {}",
            self.queue,
            SizeBytes(QUEUE_MAX_BYTES)
        );
        Ok(rules::lanes(&self.specs()?, links)?)
    }

    /// Create the engine of links with these lanes.
    pub(crate) fn engine(&self, links: Vec<Link>) -> Engine {
        // A limit beyond the address space is no limit.
        Engine::new(self.seed, usize::try_from(self.queue.0).unwrap_or(usize::MAX), links)
    }

    /// Return the rules of the file or of the options.
    fn specs(&self) -> anyhow::Result<Vec<RuleSpec>> {
        if let Some(path) = &self.file {
            let file = File::open(path).with_context(|| format!("cannot read {}", path.display()))?;
            let mut text = String::new();
            let read = file.take(RULES_MAX_BYTES + 1).read_to_string(&mut text);
            let read = read.with_context(|| format!("cannot read {}", path.display()))?;
            ensure!(read as u64 <= RULES_MAX_BYTES, "{} is longer than {}", path.display(), SizeBytes(RULES_MAX_BYTES));
            return rules::parse(&text).with_context(|| path.display().to_string());
        }
        let &Self { loss, duplicate, corrupt, reorder, late, delay, at, length, .. } = self;
        let cut = self.cut.map(|direction| RuleSpec { direction, at, length, loss: Rate::ALL, ..RuleSpec::default() });
        let faults = RuleSpec { loss, duplicate, corrupt, reorder, late, delay, ..RuleSpec::default() };
        Ok(cut.into_iter().chain([faults]).collect())
    }
}

impl FromStr for RuleArgs {
    type Err = clap::Error;

    /// Parse a string of options that are separated by whitespace.
    fn from_str(options: &str) -> Result<Self, clap::Error> {
        RuleCommandLine::try_parse_from(options.split_whitespace()).map(|options| options.rules)
    }
}

//! `sumac chaos`: a proxy between ranks and devices, or between devices, that does to real packets what the simulator's
//! links do to theirs, by the same rules.
//!
//! ```text
//! client A --\                     /-- socket of A --\
//!             front socket (--listen)                 target (--to)
//! client B --/                     \-- socket of B --/
//! ```
//!
//! | file | what |
//! |---|---|
//! | `engine` | what becomes of each packet: rules, seed and time in, packets and counters out |
//! | `clients` | who sends, and who keeps a place |
//! | `rules` | rules as people write them |
//! | `proxy` | all of it on real sockets; `perf --fault cut-link` cuts its link with it |

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
use rules::{RuleSpec, Share, Span, Time, Ways};
use serde::Serialize;
use signal_hook::consts::{SIGINT, SIGTERM, SIGUSR1};
use signal_hook::iterator::Signals;
use std::fs::File;
use std::io::{self, Read, Write};
use std::net::SocketAddr;
use std::path::PathBuf;
use std::str::FromStr;

/// The longest file of rules, in bytes.
const RULES_MAX_BYTES: u64 = 1 << 20;

/// The most links of one proxy.
const LINKS_MAX: usize = 64;

/// The most that may be held back, in bytes.
const QUEUE_MAX_BYTES: u64 = 4 << 30;

/// `sumac chaos`.
#[derive(Debug, Args)]
pub(crate) struct ChaosArgs {
    /// Where clients send to; port 0 is any that is free. Once for each link
    #[arg(long, value_name = "ADDRESS", required = true)]
    listen: Vec<SocketAddr>,
    /// What their packets go on to. Once for each --listen, in the same order
    #[arg(long, value_name = "ADDRESS", required = true)]
    to: Vec<SocketAddr>,
    #[command(flatten)]
    rules: RuleArgs,
    /// The most clients of a link
    #[arg(long, value_name = "N", default_value_t = 256, value_parser = clap::value_parser!(u32).range(1..=4096))]
    clients: u32,
    /// Print counters as JSON, a link a line
    #[arg(long)]
    json: bool,
}

/// What is to be done to packets.
#[derive(Debug, Clone, Args)]
pub(crate) struct RuleArgs {
    /// Packets lost, both ways
    #[arg(long, value_name = "SHARE", default_value = "0%")]
    loss: Share,
    /// Packets doubled
    #[arg(long, value_name = "SHARE", default_value = "0%")]
    duplicate: Share,
    /// Packets with 1 to 3 bits flipped, or cut short
    #[arg(long, value_name = "SHARE", default_value = "0%")]
    corrupt: Share,
    /// Packets delayed by up to --late, so that others overtake them
    #[arg(long, value_name = "SHARE", default_value = "0%")]
    reorder: Share,
    /// The most that reordered packets, and copies, come later [default: 5ms]
    #[arg(long, value_name = "TIME")]
    late: Option<Time>,
    /// What every packet takes, on top of all else: a time, or two to draw between, as in 1ms..5ms
    #[arg(long, value_name = "TIMES")]
    delay: Option<Span>,
    /// Lose all packets one way, or both
    #[arg(long, value_name = "WAY")]
    cut: Option<Ways>,
    /// When --cut begins, since the start [default: 0s]
    #[arg(long, value_name = "TIME", requires = "cut")]
    at: Option<Time>,
    /// How long --cut lasts [default: for ever]
    #[arg(long = "for", value_name = "TIME", requires = "cut")]
    length: Option<Time>,
    /// Rules in TOML, for single links, ways and times, instead of the options above
    #[arg(long = "rules", value_name = "FILE",
          conflicts_with_all = ["loss", "duplicate", "corrupt", "reorder", "late", "delay", "cut"])]
    file: Option<PathBuf>,
    /// What all chance comes from: the same seed does the same to the nth packet of a client's flow
    #[arg(long, value_name = "N", default_value_t = 0)]
    seed: u64,
    /// The most bytes that are held back; what is more is lost, and counted
    #[arg(long, value_name = "SIZE", default_value = "64M")]
    queue: SizeBytes,
}

/// The same, as `perf --chaos` takes it.
#[derive(Debug, Clone, Parser)]
#[command(name = "--chaos", no_binary_name = true, disable_help_flag = true)]
struct RuleOptions {
    #[command(flatten)]
    rules: RuleArgs,
}

/// What is printed of a link.
#[derive(Debug, Serialize)]
struct Row {
    listen: SocketAddr,
    to: SocketAddr,
    #[serde(flatten)]
    counters: LinkCounters,
}

/// Relay until a signal.
pub(crate) fn run(args: &ChaosArgs) -> Result<(), Failure> {
    let mut signals = Signals::new([SIGINT, SIGTERM, SIGUSR1]).context("watch for signals").map_err(Failure::Run)?;
    let links = args.links().map_err(Failure::Input)?;
    let lanes = args.rules.lanes(links.len()).map_err(Failure::Input)?;
    let sockets =
        links.iter().map(|&(listen, to)| Ok((front(listen).with_context(|| format!("listen on {listen}"))?, to)));
    let sockets = sockets.collect::<anyhow::Result<Vec<_>>>().map_err(Failure::Input)?;
    let links = links.iter().zip(lanes).map(|(&(_, target), (up, down))| Link {
        target,
        up,
        down,
        clients: Clients::new(args.clients as usize),
    });
    let engine = args.rules.engine(links.collect());
    let ended = signals.handle();
    let proxy = Proxy::start(engine, sockets, move || ended.close()).context("start to relay").map_err(Failure::Run)?;
    {
        let mut out = io::stdout().lock();
        for (listen, to) in proxy.fronts().iter().zip(&args.to) {
            writeln!(out, "relaying {listen} to {to}")?;
        }
        out.flush()?;
    }
    let fronts = proxy.fronts().to_vec();
    let asked_to_end = loop {
        match signals.forever().next() {
            Some(SIGUSR1) => args.print(&fronts, &proxy.counters())?,
            Some(_) => break true,
            None => break false,
        }
    };
    args.print(&fronts, &proxy.finish())?;
    if asked_to_end { Ok(()) } else { Err(Failure::Run(anyhow!("the system does not let the relay wait for packets"))) }
}

impl ChaosArgs {
    /// Return where to listen and what to relay to, a pair each.
    fn links(&self) -> anyhow::Result<Vec<(SocketAddr, SocketAddr)>> {
        let (listen, to) = (self.listen.len(), self.to.len());
        ensure!(listen == to, "{listen} --listen and {to} --to: each link takes one of both, in the same order");
        ensure!(listen <= LINKS_MAX, "{listen} links; {LINKS_MAX} is the most of one proxy");
        for target in &self.to {
            ensure!(
                target.port() != 0 && !target.ip().is_unspecified(),
                "--to {target}: packets need one IP address and a port other than 0 to go to"
            );
            // Copies of copies would fill the machine.
            let own = self
                .listen
                .iter()
                .find(|own| own.port() == target.port() && (own.ip() == target.ip() || own.ip().is_unspecified()));
            ensure!(own.is_none(), "--to {target} is where --listen is: packets would go round for ever");
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
            writeln!(out, "{listen} to {to}: {clients} clients, {replaced} replaced by others")?;
            for (way, lane) in [("up", up), ("down", down)] {
                let LaneCounters { received, sent, lost, duplicated, corrupted, reordered, .. } = lane;
                let LaneCounters { overflowed, refused, stray, unsent, .. } = lane;
                write!(out, "  {way}: {received} received, {sent} sent, {lost} lost, {duplicated} duplicated, ")?;
                write!(out, "{corrupted} corrupted, {reordered} reordered; not held for want of room {overflowed}, ")?;
                writeln!(out, "refused {refused}, stray {stray}, not taken by a socket {unsent}")?;
            }
        }
        out.flush()
    }
}

impl RuleArgs {
    /// Make the lanes of each link, up and down.
    ///
    /// # Errors
    /// What can't be done, and what can.
    pub(crate) fn lanes(&self, links: usize) -> anyhow::Result<Vec<(Lane, Lane)>> {
        ensure!(self.queue.0 <= QUEUE_MAX_BYTES, "--queue {}; {} is the most", self.queue, SizeBytes(QUEUE_MAX_BYTES));
        Ok(rules::lanes(&self.specs()?, links)?)
    }

    /// Make the engine of links with such lanes.
    pub(crate) fn engine(&self, links: Vec<Link>) -> Engine {
        // More than there are addresses is as much as can be.
        Engine::new(self.seed, usize::try_from(self.queue.0).unwrap_or(usize::MAX), links)
    }

    /// Return the rules of the file, or of the options.
    fn specs(&self) -> anyhow::Result<Vec<RuleSpec>> {
        if let Some(path) = &self.file {
            let file = File::open(path).with_context(|| format!("cannot read {}", path.display()))?;
            let mut text = String::new();
            let read = file.take(RULES_MAX_BYTES + 1).read_to_string(&mut text);
            let read = read.with_context(|| format!("cannot read {}", path.display()))?;
            ensure!(read as u64 <= RULES_MAX_BYTES, "{}: longer than {}", path.display(), SizeBytes(RULES_MAX_BYTES));
            return rules::parse(&text).with_context(|| path.display().to_string());
        }
        let &Self { loss, duplicate, corrupt, reorder, late, delay, at, length, .. } = self;
        let cut = self.cut.map(|direction| RuleSpec { direction, at, length, loss: Share::ALL, ..RuleSpec::default() });
        let faults = RuleSpec { loss, duplicate, corrupt, reorder, late, delay, ..RuleSpec::default() };
        Ok(cut.into_iter().chain([faults]).collect())
    }
}

impl FromStr for RuleArgs {
    type Err = clap::Error;

    /// Read options as they stand on a command line, with blanks between them.
    fn from_str(options: &str) -> Result<Self, clap::Error> {
        RuleOptions::try_parse_from(options.split_whitespace()).map(|options| options.rules)
    }
}

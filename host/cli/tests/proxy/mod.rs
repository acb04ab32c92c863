//! A running `sumac chaos` process for tests, and its counters.

// Each test binary uses only a part of this module.
#![allow(dead_code)]

use crate::common::{Server, serve};
use rustix::process::{Signal, kill_process};
use serde::Deserialize;
use std::net::SocketAddr;

/// Counters of one direction of a link.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct Lane {
    pub(crate) received: u64,
    pub(crate) sent: u64,
    pub(crate) lost: u64,
    pub(crate) duplicated: u64,
    pub(crate) corrupted: u64,
    pub(crate) reordered: u64,
    pub(crate) overflowed: u64,
    pub(crate) refused: u64,
    pub(crate) stray: u64,
    pub(crate) unsent: u64,
}

/// Counters of a link.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct Counts {
    pub(crate) listen: SocketAddr,
    pub(crate) to: SocketAddr,
    pub(crate) clients: u64,
    pub(crate) replaced: u64,
    pub(crate) up: Lane,
    pub(crate) down: Lane,
}

/// A running proxy. Dropping it kills the process.
pub(crate) struct Proxy {
    server: Server,
    addrs: Vec<SocketAddr>,
}

impl Proxy {
    /// Relay to these targets, which need not exist yet, with these options.
    pub(crate) fn start(targets: &[SocketAddr], options: &str) -> Self {
        let links = targets.iter().flat_map(|to| ["--listen=127.0.0.1:0".to_owned(), format!("--to={to}")]);
        let links: Vec<String> = links.collect();
        let links = links.iter().map(String::as_str);
        let args: Vec<&str> = ["chaos", "--json"].into_iter().chain(links).chain(options.split_whitespace()).collect();
        let mut server = serve(&args);
        let listening = |to: &SocketAddr| {
            let line = server.line();
            let addr = line.strip_prefix("relaying ").and_then(|line| line.strip_suffix(&format!(" to {to}")));
            addr.and_then(|addr| addr.parse().ok()).unwrap_or_else(|| panic!("{line:?}"))
        };
        Self { addrs: targets.iter().map(listening).collect(), server }
    }

    /// Return the address of each link to which clients send.
    pub(crate) fn addrs(&self) -> &[SocketAddr] {
        &self.addrs
    }

    /// Return its counters while it runs.
    pub(crate) fn counts(&mut self) -> Vec<Counts> {
        kill_process(self.server.pid(), Signal::USR1).expect("running");
        let line = |_| serde_json::from_str(&self.server.line()).expect("counters of a link");
        self.addrs.iter().map(line).collect()
    }

    /// End it with SIGINT and return its final counters.
    pub(crate) fn finish(self) -> Vec<Counts> {
        kill_process(self.server.pid(), Signal::INT).expect("running");
        let lines = self.server.expect_success();
        lines.iter().map(|line| serde_json::from_str(line).expect("counters of a link")).collect()
    }
}

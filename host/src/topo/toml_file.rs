//! Reads hand-written fabric descriptions in TOML.
//!
//! ```toml
//! [[switch]]
//! name = "leaf1"
//! aggregation = true              # a device runs beside it; default: false
//!
//! [[host]]
//! name = "n1"
//! guid = "0xe09d730300156ff6"     # optional
//! server = "n1"                   # the machine; default: the name up to its first blank
//!
//! [[link]]
//! ends = ["n1", "leaf1"]          # or "leaf1:7" for port 7; else the first free port
//! rate_gbits = 400                # optional
//! count = 1                       # parallel cables; default: 1
//! ```
//!
//! Names are unique across switches and hosts, and contain no colon unless a port follows it. Invariant: every error
//! names the line.

use super::build::{Builder, Kind, Node, Record};
use super::servers::Origin;
use super::{Fabric, FabricError, Format, Rate, bare_guid};
use serde::Deserialize;
use std::collections::HashMap;
use std::ops::Range;
use toml::Spanned;

impl Fabric {
    /// Read a fabric from TOML:
    ///
    /// ```
    /// let fabric = sumac::topo::Fabric::from_toml(r#"
    ///     switch = [{ name = "leaf1", aggregation = true }]
    ///     host = [{ name = "n1" }, { name = "n2" }]
    ///     link = [
    ///         { ends = ["n1", "leaf1"], rate_gbits = 400 },
    ///         { ends = ["n2", "leaf1:7"], rate_gbits = 400 },
    ///     ]
    /// "#)?;
    /// assert_eq!(fabric.hosts().len(), 2);
    /// # Ok::<(), sumac::topo::FabricError>(())
    /// ```
    ///
    /// A `[[switch]]` has a `name` and `aggregation` (default false: no device beside it). A `[[host]]` has a `name`,
    /// if known a `guid`, and the `server` that it is in (default: its name up to the first blank). A `[[link]]` has
    /// two `ends`, each a name or `name:port`, a `rate_gbits` if known and a `count` of parallel cables (default 1).
    ///
    /// # Errors
    /// [`FabricError`] names the line, what was found and what was expected.
    pub fn from_toml(text: &str) -> Result<Self, FabricError> {
        let file: File = toml::from_str(text).map_err(|error| FabricError::Syntax {
            line: Lines::new(text).at(error.span().unwrap_or_default().start),
            found: found_at(text, error.span().unwrap_or_default()),
            expected: format!("a fabric file ({})", error.message().trim().replace('\n', "; ")),
        })?;
        let lines = Lines::new(text);
        let mut builder = Builder::default();
        let mut nodes: HashMap<&str, Node> = HashMap::new();
        for switch in &file.switch {
            let line = lines.at(switch.name.span().start);
            let name = valid_name(&switch.name, line)?;
            let node = builder.named(Kind::Switch, name, line)?;
            nodes.insert(name, node);
            if switch.aggregation {
                builder.equip(node);
            }
        }
        for host in &file.host {
            let line = lines.at(host.name.span().start);
            let name = valid_name(&host.name, line)?;
            if nodes.contains_key(name) {
                let expected = "a name that no other switch or host has".into();
                return Err(FabricError::Syntax { line, found: format!("`{name}` again"), expected });
            }
            let id = host.guid.as_deref().map_or(name.to_owned(), bare_guid);
            let origin = Origin { system_image: None, server: host.server.as_deref().map(Into::into) };
            let record = Record { kind: Kind::Host, description: Some(name.into()), origin, line };
            nodes.insert(name, builder.record(&id, record)?);
        }
        for link in &file.link {
            let line = lines.at(link.ends.span().start);
            let ends = link.ends.get_ref();
            let ends = [resolve(&nodes, &ends[0], line)?, resolve(&nodes, &ends[1], line)?];
            add_cables(&mut builder, link, ends, line)?;
        }
        builder.finish(Format::Toml, "[[switch]]")
    }
}

/// Where the lines of a text begin.
struct Lines(Vec<usize>);

impl Lines {
    fn new(text: &str) -> Self {
        Self(
            std::iter::once(0)
                .chain(text.bytes().enumerate().filter(|(_, c)| *c == b'\n').map(|(at, _)| at + 1))
                .collect(),
        )
    }

    /// The line (from 1) of a byte.
    fn at(&self, byte: usize) -> usize {
        self.0.partition_point(|start| *start <= byte)
    }
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct File {
    #[serde(default)]
    switch: Vec<SwitchEntry>,
    #[serde(default)]
    host: Vec<HostEntry>,
    #[serde(default)]
    link: Vec<LinkEntry>,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct SwitchEntry {
    name: Spanned<String>,
    #[serde(default)]
    aggregation: bool,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct HostEntry {
    name: Spanned<String>,
    guid: Option<String>,
    server: Option<String>,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct LinkEntry {
    ends: Spanned<[String; 2]>,
    rate_gbits: Option<f64>,
    #[serde(default = "one")]
    count: u16,
}

fn one() -> u16 {
    1
}

fn valid_name(name: &Spanned<String>, line: usize) -> Result<&str, FabricError> {
    let text: &str = name.get_ref();
    if text.trim() != text || text.is_empty() || split_port(text).1.is_some() {
        let expected = "a name without blanks around it and without a port behind it".into();
        return Err(FabricError::Syntax { line, found: format!("`{text}`"), expected });
    }
    Ok(text)
}

/// Split `name:port`. A colon that is not followed by a number belongs to the name.
fn split_port(end: &str) -> (&str, Option<&str>) {
    match end.rsplit_once(':') {
        Some((name, port)) if !port.is_empty() && port.bytes().all(|c| c.is_ascii_digit()) => (name, Some(port)),
        _ => (end, None),
    }
}

/// An end of a link: the node, and the port if given.
type EndEntry = (Node, Option<u16>);

/// Resolve the node of an end.
fn resolve(nodes: &HashMap<&str, Node>, end: &str, line: usize) -> Result<EndEntry, FabricError> {
    let (name, port) = split_port(end);
    let port = port.map(|digits| {
        digits.parse().ok().filter(|port| *port > 0).ok_or_else(|| FabricError::Syntax {
            line,
            found: format!("port `{digits}`"),
            expected: "a port from 1 to 65535".into(),
        })
    });
    let node = *nodes.get(name).ok_or_else(|| FabricError::UnknownNode { line, id: name.into() })?;
    Ok((node, port.transpose()?))
}

/// Add the parallel cables of an entry, each on the next free port unless given.
fn add_cables(builder: &mut Builder, link: &LinkEntry, ends: [EndEntry; 2], line: usize) -> Result<(), FabricError> {
    let refuse = |found: String, expected: &str| FabricError::Syntax { line, found, expected: expected.into() };
    let rate = match link.rate_gbits {
        Some(gbits) => Some(
            Rate::from_gbits(gbits)
                .ok_or_else(|| refuse(format!("rate_gbits = {gbits}"), "above 0, at most 1000000"))?,
        ),
        None => None,
    };
    let pinned = ends.iter().any(|(_, port)| port.is_some());
    if link.count == 0 || (link.count > 1 && pinned) {
        let expected = "a count of at least 1, and of 1 where an end names its port";
        return Err(refuse(format!("count = {}", link.count), expected));
    }
    if ends[0].0 == ends[1].0 {
        return Err(refuse(format!("a link from `{}` to itself", builder.id(ends[0].0)), "two different ends"));
    }
    for _ in 0..link.count {
        let a = ends[0].1.or_else(|| builder.free_port(ends[0].0));
        let b = ends[1].1.or_else(|| builder.free_port(ends[1].0));
        match (a, b) {
            (Some(a), Some(b)) => builder.cable((ends[0].0, a), (ends[1].0, b), rate, line)?,
            _ => {
                let found = format!("more cables at `{}`", builder.id(ends[0].0));
                return Err(refuse(found, "at most 65535 at one node"));
            }
        }
    }
    Ok(())
}

/// The text at a span, up to the end of its line.
fn found_at(text: &str, span: Range<usize>) -> String {
    let found = text.get(span.start..).unwrap_or_default().lines().next().unwrap_or_default().trim();
    if found.is_empty() { "nothing".into() } else { format!("`{found}`") }
}

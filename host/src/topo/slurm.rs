//! Reads Slurm's `topology.conf` (its manual page of that name).
//!
//! ```text
//! SwitchName=leaf[..] Nodes=n[0-15]        the plugin topology/tree
//! SwitchName=spine Switches=leaf[0-3]
//!
//! BlockName=b0 Nodes=n[0-17]               the plugin topology/block
//! BlockSizes=18
//! ```
//!
//! Keys are read in any case, a backslash continues a line, and `LinkSpeed` is skipped, as in Slurm: it has no unit.
//! The file names neither cables nor rates nor devices. What is made of it is an [`Assumption`].
//!
//! Invariant: the file's lists make at most [`NAMES_MAX`] names, all together.

use super::build::{Builder, Kind, Node};
use super::hostlist::{ListError, expand};
use super::{Assumption, Fabric, FabricError, Format};
use std::collections::HashMap;

/// The names that all lists of a file may make.
pub(super) const NAMES_MAX: usize = 1 << 18;

/// A line with a switch or a block.
struct Entry {
    line: usize,
    name: String,
    is_block: bool,
    nodes: Vec<String>,
    switches: Vec<String>,
}

impl Fabric {
    /// Parse Slurm's `topology.conf`, of the plugin for trees or for blocks.
    ///
    /// Each node gets one cable to its leaf or block, each switch one to the switch above it, and blocks one each to a
    /// switch above all of them: the file does not name any. [`Fabric::assumptions`] says so.
    ///
    /// # Errors
    /// [`FabricError`] names the line, what was found and what was expected.
    pub fn from_slurm(text: &str) -> Result<Self, FabricError> {
        let mut builder = Builder::default();
        let entries = entries(text, &mut builder)?;
        let blocks: Vec<&Entry> = entries.iter().filter(|entry| entry.is_block).collect();
        if !blocks.is_empty() && blocks.len() < entries.len() {
            let (line, found) = (blocks[0].line, "BlockName among SwitchName".to_owned());
            return Err(FabricError::Syntax { line, found, expected: "either switches or blocks".into() });
        }
        let mut nodes: HashMap<&str, Node> = HashMap::new();
        for entry in &entries {
            nodes.insert(&entry.name, builder.named(Kind::Switch, &entry.name, entry.line)?);
        }
        for entry in &entries {
            let above = nodes[entry.name.as_str()];
            for name in &entry.switches {
                let below = nodes.get(name.as_str()).copied();
                let below = below.ok_or_else(|| FabricError::UnknownNode { line: entry.line, id: name.clone() })?;
                cable(&mut builder, above, below, entry.line)?;
            }
        }
        let mut hosts: HashMap<&str, Node> = HashMap::new();
        for entry in &entries {
            let leaf = nodes[entry.name.as_str()];
            for name in &entry.nodes {
                let host = match hosts.get(name.as_str()) {
                    Some(host) => *host,
                    None => builder.named(Kind::Host, name, entry.line)?,
                };
                hosts.insert(name, host);
                cable(&mut builder, host, leaf, entry.line)?;
            }
        }
        builder.assume(Assumption::OneCableEach);
        if blocks.len() > 1 {
            join_blocks(&mut builder, &blocks, &nodes)?;
        }
        let format = if blocks.is_empty() { Format::SlurmTree } else { Format::SlurmBlock };
        builder.finish(format, "SwitchName=leaf0 Nodes=n[0-15]")
    }
}

/// Put a switch above all blocks.
fn join_blocks(builder: &mut Builder, blocks: &[&Entry], nodes: &HashMap<&str, Node>) -> Result<(), FabricError> {
    let mut name = "between-blocks".to_owned();
    while builder.find(&name).is_some() {
        name.push('-');
    }
    let above = builder.named(Kind::Switch, &name, 0)?;
    for block in blocks {
        cable(builder, above, nodes[block.name.as_str()], block.line)?;
    }
    builder.assume(Assumption::BlocksJoined { blocks: blocks.len() });
    Ok(())
}

/// Cable two nodes on their next free ports.
fn cable(builder: &mut Builder, a: Node, b: Node, line: usize) -> Result<(), FabricError> {
    if a == b {
        let found = format!("`{}` below itself", builder.id(a));
        return Err(FabricError::Syntax { line, found, expected: "other switches".into() });
    }
    match (builder.free_port(a), builder.free_port(b)) {
        (Some(from), Some(to)) => builder.cable((a, from), (b, to), None, line),
        _ => Err(FabricError::Syntax {
            line,
            found: format!("more nodes or switches at `{}`", builder.id(a)),
            expected: "at most 65535 at one switch".into(),
        }),
    }
}

/// Read all lines with a switch or a block.
fn entries(text: &str, builder: &mut Builder) -> Result<Vec<Entry>, FabricError> {
    let mut entries = Vec::new();
    let mut room = NAMES_MAX;
    let mut pending = String::new();
    let mut started = 0;
    for (line, content) in (1..).zip(text.lines()) {
        let content = content.split('#').next().unwrap_or_default().trim_end();
        if pending.is_empty() {
            started = line;
        }
        if let Some(part) = content.strip_suffix('\\') {
            pending.push_str(part);
            pending.push(' ');
            continue;
        }
        pending.push_str(content);
        let whole = std::mem::take(&mut pending);
        entries.extend(entry(&whole, started, &mut room, builder)?);
    }
    entries.extend(entry(&pending, started, &mut room, builder)?);
    Ok(entries)
}

/// Read a line; `None` if it has neither a switch nor a block.
fn entry(content: &str, line: usize, room: &mut usize, builder: &mut Builder) -> Result<Option<Entry>, FabricError> {
    let syntax = |found: &str, expected: &str| FabricError::Syntax {
        line,
        found: format!("`{}`", found.chars().take(60).collect::<String>()),
        expected: expected.into(),
    };
    let mut words = content.split_whitespace().peekable();
    let Some(first) = words.peek() else { return Ok(None) };
    if first.eq_ignore_ascii_case("include") {
        builder.warn(line, "an include is not followed; its switches are missing".into());
        return Ok(None);
    }
    let mut read = Entry { line, name: String::new(), is_block: false, nodes: Vec::new(), switches: Vec::new() };
    for word in words {
        let (key, value) = word.split_once('=').ok_or_else(|| syntax(word, "Key=value"))?;
        let mut list = |value: &str| {
            let names = expand(value, *room).map_err(|error| match error {
                ListError::Syntax(reason) => syntax(value, &format!("a list such as n[0-15,20] ({reason})")),
                ListError::TooMany => FabricError::TooManyNodes { line, limit: NAMES_MAX },
            })?;
            *room -= names.len();
            Ok(names)
        };
        match key.to_ascii_lowercase().as_str() {
            "switchname" => read.name = value.into(),
            "blockname" => (read.name, read.is_block) = (value.into(), true),
            "nodes" => read.nodes = list(value)?,
            "switches" => read.switches = list(value)?,
            "linkspeed" => {}
            "blocksizes" => return Ok(None),
            _ => return Err(syntax(word, "SwitchName, Switches, Nodes, LinkSpeed, BlockName or BlockSizes")),
        }
    }
    if read.name.is_empty() || read.name.contains(['[', ']']) {
        return Err(syntax(content, "SwitchName=<name> or BlockName=<name>, of one switch or block"));
    }
    Ok(Some(read))
}

//! Selections: the hosts of a tree, counted by servers or by single adapters.
//!
//! A tree has one rank a host, and a server may have several hosts, its **rails**. Counted by servers, each server is
//! one rank, at the rail that most of the selected servers have (`HCA-1`), so that ranks meet at the same leaves.
//! [`Taken::rails`] has the others. A server that runs the fabric manager is only taken by name.
//!
//! Invariants: no host is taken twice; the order is that of the ranks; what was left out is told.

use super::{Fabric, HostId, KnownBy, SelectError, ServerId, hostlist, similar};
use std::collections::{BTreeMap, BTreeSet};
use std::convert::Infallible;
use std::fmt;
use std::str::FromStr;

/// What a selection counts.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Unit {
    /// Machines.
    Server,
    /// Single adapters: every rail is a host.
    Adapter,
}

impl fmt::Display for Unit {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            // The term of messages and options: `--hosts`.
            Self::Server => "host",
            Self::Adapter => "adapter",
        })
    }
}

/// Which of them.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Which {
    /// All, in natural name order.
    All,
    /// The first N in natural name order.
    First(usize),
    /// These, as `n1,n[4-7]`; rank i is the i-th.
    List(String),
}

impl FromStr for Which {
    type Err = Infallible;

    /// Parse `all`, a number, or a list of names and GUIDs. A number of 16 digits is a GUID.
    fn from_str(text: &str) -> Result<Self, Infallible> {
        let text = text.trim();
        let is_number = !text.is_empty() && text.len() < 16 && text.bytes().all(|c| c.is_ascii_digit());
        Ok(match text.parse() {
            Ok(count) if is_number => Self::First(count),
            _ if text == "all" => Self::All,
            _ => Self::List(text.into()),
        })
    }
}

/// A selection of hosts.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Selection {
    /// What is counted.
    pub unit: Unit,
    /// Which of them.
    pub which: Which,
    /// Patterns of servers, adapters and GUIDs to leave out; `*` stands for any text, and `[1-4]` for numbers.
    pub exclude: Vec<String>,
}

/// The hosts that a selection takes.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Taken {
    /// What was counted.
    pub unit: Unit,
    /// The host of each rank.
    pub hosts: Vec<HostId>,
    /// All rails of each rank's server that were not left out, its own first.
    pub rails: Vec<Vec<HostId>>,
    /// Adapters that were left out by pattern.
    pub excluded: Vec<HostId>,
    /// Machines of the fabric manager that were left out.
    pub managers: Vec<ServerId>,
}

impl Selection {
    /// Resolve the selection.
    ///
    /// # Errors
    /// [`SelectError`] if nothing is selected, too many are requested, one is repeated, a name is unknown (with similar
    /// names) or ambiguous, or a pattern matches nothing.
    ///
    /// ```
    /// use sumac::topo::{Fabric, Selection, Unit};
    /// let fabric = Fabric::from_text("SwitchName=leaf0 Nodes=n[1-4]")?;
    /// let selection = Selection { unit: Unit::Server, which: "3".parse()?, exclude: vec!["n2".into()] };
    /// let taken = selection.resolve(&fabric)?;
    /// assert_eq!(taken.describe(&fabric)[0], "3 hosts: n1, n3, n4");
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// ```
    pub fn resolve(&self, fabric: &Fabric) -> Result<Taken, SelectError> {
        let excluded = self.excluded(fabric)?;
        let mut taken =
            Taken { unit: self.unit, hosts: Vec::new(), rails: Vec::new(), excluded: Vec::new(), managers: Vec::new() };
        match &self.which {
            Which::List(list) => self.take_named(fabric, list, &excluded, &mut taken)?,
            Which::All => self.take_first(fabric, None, &excluded, &mut taken)?,
            Which::First(count) => self.take_first(fabric, Some(*count), &excluded, &mut taken)?,
        }
        if taken.hosts.is_empty() {
            return Err(SelectError::Empty { unit: self.unit });
        }
        taken.excluded = excluded.into_iter().collect();
        Ok(taken)
    }

    /// The adapters that the patterns leave out.
    fn excluded(&self, fabric: &Fabric) -> Result<BTreeSet<HostId>, SelectError> {
        let mut excluded = BTreeSet::new();
        for pattern in &self.exclude {
            let before = excluded.len();
            for name in names_in(pattern)? {
                excluded.extend(fabric.host_ids().filter(|id| {
                    let host = fabric.host(*id);
                    [&fabric.server(host.server).name, &host.name, &host.guid].iter().any(|text| glob(&name, text))
                }));
            }
            if excluded.len() == before {
                return Err(SelectError::UselessPattern { pattern: pattern.clone() });
            }
        }
        Ok(excluded)
    }

    fn take_first(
        &self,
        fabric: &Fabric,
        count: Option<usize>,
        excluded: &BTreeSet<HostId>,
        taken: &mut Taken,
    ) -> Result<(), SelectError> {
        let is_manager = |id: &ServerId| fabric.server(*id).manages_fabric;
        taken.managers = fabric.server_ids().filter(is_manager).collect();
        let is_open = |host: &HostId| !excluded.contains(host) && !is_manager(&fabric.host(*host).server);
        let (available, all) = match self.unit {
            Unit::Adapter => {
                let open: Vec<HostId> = fabric.host_ids().filter(is_open).collect();
                (open.len(), fabric.hosts().len())
            }
            Unit::Server => {
                let has_open = |id: &ServerId| fabric.server(*id).adapters.iter().any(is_open);
                (fabric.server_ids().filter(has_open).count(), fabric.servers().len())
            }
        };
        let count = count.unwrap_or(available);
        if count > available {
            return Err(SelectError::TooMany { unit: self.unit, asked: count, available, excluded: all - available });
        }
        match self.unit {
            Unit::Adapter => {
                taken.hosts = fabric.host_ids().filter(is_open).take(count).collect();
                taken.rails = taken.hosts.iter().map(|host| vec![*host]).collect();
            }
            Unit::Server => {
                let open =
                    |id: ServerId| fabric.server(id).adapters.iter().copied().filter(is_open).collect::<Vec<_>>();
                let servers = fabric.server_ids().map(open).filter(|rails| !rails.is_empty()).take(count);
                taken.rails = servers.collect();
                choose_rails(fabric, &mut taken.rails);
                taken.hosts = taken.rails.iter().map(|rails| rails[0]).collect();
            }
        }
        Ok(())
    }

    fn take_named(
        &self,
        fabric: &Fabric,
        list: &str,
        excluded: &BTreeSet<HostId>,
        taken: &mut Taken,
    ) -> Result<(), SelectError> {
        let mut chosen = BTreeSet::new();
        let mut whole_servers = Vec::new();
        for item in hostlist::split(list).map_err(|error| list_error(list, &error))? {
            // A name may have brackets of its own.
            let names = if find(self.unit, fabric, item).is_some() { vec![item.to_owned()] } else { names_in(item)? };
            for name in names {
                let (rails, is_server) =
                    find(self.unit, fabric, &name).ok_or_else(|| not_found(self.unit, fabric, &name))?;
                let open: Vec<HostId> = rails.into_iter().filter(|host| !excluded.contains(host)).collect();
                if open.iter().any(|host| !chosen.insert(*host)) {
                    return Err(SelectError::Duplicate { name });
                }
                if !open.is_empty() {
                    whole_servers.push(is_server);
                    taken.rails.push(open);
                }
            }
        }
        let mut of_servers: Vec<Vec<HostId>> = taken
            .rails
            .iter()
            .zip(&whole_servers)
            .filter(|(_, whole)| **whole)
            .map(|(rails, _)| rails.clone())
            .collect();
        choose_rails(fabric, &mut of_servers);
        let mut ordered = of_servers.into_iter();
        for (rails, whole) in taken.rails.iter_mut().zip(whole_servers) {
            if let Some(next) = whole.then(|| ordered.next()).flatten() {
                *rails = next;
            }
        }
        taken.hosts = taken.rails.iter().map(|rails| rails[0]).collect();
        Ok(())
    }
}

/// Put the rail first that most servers have, the first in natural order among equals.
fn choose_rails(fabric: &Fabric, servers: &mut [Vec<HostId>]) {
    let mut counts: BTreeMap<&str, usize> = BTreeMap::new();
    for rail in servers.iter().flatten().filter_map(|host| fabric.host(*host).rail()) {
        *counts.entry(rail).or_default() += 1;
    }
    let best = counts.iter().max_by(|(a, x), (b, y)| x.cmp(y).then_with(|| super::natural_cmp(b, a)));
    let Some((best, _)) = best else { return };
    for rails in servers {
        if let Some(at) = rails.iter().position(|host| fabric.host(*host).rail() == Some(best)) {
            rails[..=at].rotate_right(1);
        }
    }
}

/// The adapters that a name stands for, and whether it is a server's.
fn find(unit: Unit, fabric: &Fabric, name: &str) -> Option<(Vec<HostId>, bool)> {
    let server = if unit == Unit::Server { fabric.find_server(name) } else { None };
    match server {
        Some(server) => Some((fabric.server(server).adapters.clone(), true)),
        None => fabric.find_host(name).map(|host| (vec![host], false)),
    }
}

fn not_found(unit: Unit, fabric: &Fabric, name: &str) -> SelectError {
    let with_description = fabric.hosts().iter().filter(|host| host.description.as_deref() == Some(name));
    let guids: Vec<String> = with_description.map(|host| host.guid.clone()).collect();
    if !guids.is_empty() {
        return SelectError::Ambiguous { name: name.into(), guids };
    }
    let near = match unit {
        Unit::Server => similar::nearest(name, fabric.servers().iter().map(|server| server.name.as_str())),
        Unit::Adapter => similar::nearest(name, fabric.hosts().iter().map(|host| host.name.as_str())),
    };
    SelectError::Unknown { unit, name: name.into(), near }
}

/// Expand the brackets of a name or pattern.
fn names_in(item: &str) -> Result<Vec<String>, SelectError> {
    hostlist::expand(item, NAMES_MAX).map_err(|error| list_error(item, &error))
}

/// The names that a list may make.
const NAMES_MAX: usize = 1 << 18;

fn list_error(list: &str, error: &hostlist::ListError) -> SelectError {
    let reason = match error {
        hostlist::ListError::Syntax(reason) => reason.clone(),
        hostlist::ListError::TooMany => format!("it names more than {NAMES_MAX}"),
    };
    SelectError::List { list: list.chars().take(60).collect(), reason }
}

/// Whether a text matches a pattern, in which `*` stands for any text and `?` for any character.
pub(super) fn glob(pattern: &str, text: &str) -> bool {
    let (pattern, text): (Vec<char>, Vec<char>) = (pattern.chars().collect(), text.chars().collect());
    let (mut p, mut t) = (0, 0);
    // The last star, and the text behind what it stands for: the only place to come back to.
    let mut star: Option<(usize, usize)> = None;
    while t < text.len() {
        match pattern.get(p) {
            Some('*') => {
                star = Some((p, t));
                p += 1;
            }
            Some(c) if *c == '?' || *c == text[t] => (p, t) = (p + 1, t + 1),
            _ => match &mut star {
                Some((at, from)) => {
                    *from += 1;
                    (p, t) = (*at + 1, *from);
                }
                None => return false,
            },
        }
    }
    pattern[p..].iter().all(|c| *c == '*')
}

impl Taken {
    /// Describe what was taken and what was left out, one sentence a line.
    pub fn describe(&self, fabric: &Fabric) -> Vec<String> {
        let label = |host: &HostId| match self.unit {
            Unit::Server => fabric.server(fabric.host(*host).server).name.clone(),
            Unit::Adapter => fabric.host(*host).name.clone(),
        };
        let names: Vec<String> = self.hosts.iter().map(label).collect();
        let mut lines = vec![format!("{}: {}", counted(names.len(), &self.unit.to_string()), abridged(&names))];
        let (most, least) = (self.rails.iter().map(Vec::len).max(), self.rails.iter().map(Vec::len).min());
        if let (Unit::Server, Some(most @ 2..), Some(least)) = (self.unit, most, least) {
            let own: BTreeSet<&str> = self.hosts.iter().filter_map(|host| fabric.host(*host).rail()).collect();
            let own: Vec<String> = own.into_iter().map(|rail| format!("`{rail}`")).collect();
            let of = if most == least { format!("{most}") } else { format!("{least} to {most}") };
            lines.push(format!("each host is one rank, at {} of its {of} adapters", own.join(" or ")));
        }
        let nameless = self.hosts.iter().filter(|host| {
            let server = fabric.server(fabric.host(**host).server);
            server.known_by == KnownBy::Guid && server.adapters.len() == 1
        });
        let nameless = nameless.count();
        if self.unit == Unit::Server && nameless > 0 {
            let text = "in no machine by name or system image, so each counts as a host";
            lines.push(format!("{} {text}", counted(nameless, "adapter")));
        }
        if !self.excluded.is_empty() {
            let names: Vec<String> = self.excluded.iter().map(|host| fabric.host(*host).name.clone()).collect();
            lines.push(format!("left out by --exclude: {}: {}", counted(names.len(), "adapter"), abridged(&names)));
        }
        if !self.managers.is_empty() {
            let names: Vec<String> = self.managers.iter().map(|id| fabric.server(*id).name.clone()).collect();
            lines.push(format!("left out: {}, the fabric manager's by its name; list it to take it", names.join(", ")));
        }
        lines
    }
}

fn counted(count: usize, word: &str) -> String {
    if count == 1 { format!("1 {word}") } else { format!("{count} {word}s") }
}

/// A list of names, without its middle if it is long.
fn abridged(names: &[String]) -> String {
    match names {
        [first, second, .., last] if names.len() > 6 => format!("{first}, {second}, …, {last}"),
        _ => names.join(", "),
    }
}

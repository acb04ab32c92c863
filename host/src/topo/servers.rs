//! Servers: which adapters belong to one machine.
//!
//! A description names the machine before the adapter: `node1 HCA-1` and `node1 HCA-2` belong to `node1`. A machine's
//! name ends at the first blank. An adapter without such a description belongs to the machine of its system image GUID,
//! which the ports of one adapter share. What a vendor writes at the factory (`MT4129 ConnectX7 ...`) names no machine,
//! nor does a description that adapters with different system images share.
//!
//! Invariants: every host is in exactly one server; a server's hosts are sorted; no two servers have one machine's
//! name; the order does not depend on the order in the file.

use super::{Fabric, Host, HostId, ServerId, Warning, natural_cmp};
use std::collections::HashMap;

/// What a record says of an adapter's machine.
#[derive(Debug, Clone, Default)]
pub(super) struct Origin {
    /// The system image GUID, as [`super::bare_guid`] spells it.
    pub(super) system_image: Option<Box<str>>,
    /// The machine's name, in sources that tell machines and adapters apart.
    pub(super) server: Option<Box<str>>,
}

/// A machine with one or several adapters.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Server {
    /// Unique name: of the machine, else the name of its one adapter, else the system image GUID.
    pub name: String,
    /// Its adapters, in natural order.
    pub adapters: Vec<HostId>,
    /// By what its adapters were found to belong together.
    pub known_by: KnownBy,
    /// Whether it runs the fabric manager, by its name: such a machine is no place for ranks.
    pub manages_fabric: bool,
}

/// By what adapters were found to belong together.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum KnownBy {
    /// The machine's name.
    Name,
    /// The system image GUID, or nothing: a single adapter.
    Guid,
}

/// Find a server by name.
pub(super) fn find(servers: &[Server], name: &str) -> Option<ServerId> {
    let named = servers.partition_point(|server| server.known_by == KnownBy::Name);
    let search = |from: usize, part: &[Server]| {
        let found = part.binary_search_by(|server| natural_cmp(&server.name, name)).ok()?;
        Some(ServerId((from + found) as u32))
    };
    search(0, &servers[..named]).or_else(|| search(named, &servers[named..]))
}

/// Group a fabric's hosts into servers. `origins` is in the order of the hosts.
pub(super) fn group(fabric: &mut Fabric, origins: &[Origin]) {
    let machines = machine_names(&fabric.hosts, origins, &mut fabric.warnings);
    // Adapters without a machine's name join the machine that their system image has.
    let mut image_machines: HashMap<&str, &str> = HashMap::new();
    for (origin, machine) in origins.iter().zip(&machines) {
        if let (Some(image), Some(machine)) = (&origin.system_image, machine) {
            image_machines.entry(image).or_insert(machine);
        }
    }
    // The key of a server: a machine's name, or a GUID. The two are kept apart.
    let mut groups: HashMap<(KnownBy, &str), Vec<HostId>> = HashMap::new();
    for (index, (origin, machine)) in origins.iter().zip(&machines).enumerate() {
        let image = origin.system_image.as_deref();
        let key = match (machine.as_deref(), image) {
            (Some(machine), _) => (KnownBy::Name, machine),
            (None, Some(image)) => match image_machines.get(image) {
                Some(machine) => (KnownBy::Name, *machine),
                None => (KnownBy::Guid, image),
            },
            (None, None) => (KnownBy::Guid, fabric.hosts[index].guid.as_str()),
        };
        groups.entry(key).or_default().push(HostId(index as u32));
    }
    let mut servers: Vec<Server> = groups
        .into_iter()
        .map(|((known_by, key), adapters)| Server {
            name: match adapters.as_slice() {
                [only] if known_by == KnownBy::Guid => fabric.hosts[only.0 as usize].name.clone(),
                _ => key.to_owned(),
            },
            adapters,
            known_by,
            manages_fabric: known_by == KnownBy::Name && is_fabric_manager(key),
        })
        .collect();
    servers.sort_by(|a, b| a.known_by.cmp(&b.known_by).then_with(|| natural_cmp(&a.name, &b.name)));
    for (id, server) in (0u32..).zip(&servers) {
        server.adapters.iter().for_each(|host| fabric.hosts[host.0 as usize].server = ServerId(id));
    }
    fabric.servers = servers;
}

/// The machine of each host, if its description or the source names it.
fn machine_names(hosts: &[Host], origins: &[Origin], warnings: &mut Vec<Warning>) -> Vec<Option<String>> {
    // Per description: the system image of its first adapter, and whether one of another machine has it too.
    let mut owners: HashMap<&str, (Option<&str>, bool)> = HashMap::new();
    for (host, origin) in hosts.iter().zip(origins) {
        if let Some(description) = &host.description {
            let image = origin.system_image.as_deref();
            owners
                .entry(description)
                .and_modify(|(first, shared)| *shared |= first.is_none() || *first != image)
                .or_insert((image, false));
        }
    }
    let mut shared: Vec<&str> = Vec::new();
    for (description, (_, is_shared)) in &owners {
        if *is_shared && machine_of(description).is_some() {
            shared.push(description);
        }
    }
    shared.sort_unstable();
    for description in shared {
        let text = format!("adapters of several machines are called `{description}`; they go by their GUIDs");
        warnings.push(Warning { line: 0, text });
    }
    hosts
        .iter()
        .zip(origins)
        .map(|(host, origin)| {
            if let Some(server) = &origin.server {
                return Some(server.to_string());
            }
            let description = text_of(host)?;
            let is_shared = owners.get(description).is_some_and(|(_, shared)| *shared);
            machine_of(description).filter(|_| !is_shared).map(str::to_owned)
        })
        .collect()
}

/// The description of an adapter. In formats without GUIDs, the id is a name.
fn text_of(host: &Host) -> Option<&str> {
    let is_guid = host.guid.len() == 16 && host.guid.bytes().all(|c| c.is_ascii_hexdigit());
    host.description.as_deref().or_else(|| (!is_guid).then_some(host.guid.as_str()))
}

/// The machine's name in an adapter's description, which ends at the first blank; `None` for what vendors write.
fn machine_of(description: &str) -> Option<&str> {
    let lower = description.to_ascii_lowercase();
    let is_part_number = lower.strip_prefix("mt").is_some_and(|rest| {
        let digits = rest.bytes().take_while(u8::is_ascii_digit).count();
        digits >= 4 && rest[digits..].starts_with([' ', '-', '\t'])
    });
    if is_part_number || VENDOR_TEXTS.iter().any(|text| lower.contains(text)) {
        return None;
    }
    description.split_whitespace().next()
}

/// Parts of descriptions that adapters leave the factory with.
const VENDOR_TEXTS: [&str; 5] = ["mellanox technologies", "connectx", "infinihost", "qlogic infiniband", "hca device"];

/// Whether a machine's name says that it runs the fabric manager. A dump does not tell where the subnet manager runs.
fn is_fabric_manager(name: &str) -> bool {
    let words = name.split(|c: char| !c.is_ascii_alphabetic()).map(str::to_ascii_lowercase);
    let mut words = words.filter(|word| !word.is_empty());
    // NVIDIA's Unified Fabric Manager, also as CUFM or UFMHA.
    words.any(|word| word.starts_with("ufm") || word.ends_with("ufm") || MANAGERS.contains(&word.as_str()))
}

/// Words that name a fabric or subnet manager.
const MANAGERS: [&str; 3] = ["opensm", "fabricmanager", "subnetmanager"];

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn machine_names_end_at_the_first_blank_and_vendors_name_none() {
        let golden = [
            ("node1 HCA-1", Some("node1")),
            ("node1", Some("node1")),
            ("  b07-p1\tmlx5_0 port 2", Some("b07-p1")),
            ("mt100 HCA-1", Some("mt100")),
            ("MT4129 ConnectX7   Mellanox Technologies", None),
            ("MT25408 HCA", None),
            ("ConnectX", None),
            ("Mellanox Technologies", None),
        ];
        for (description, machine) in golden {
            assert_eq!(machine_of(description), machine, "{description}");
        }
    }

    #[test]
    fn fabric_managers_are_known_by_words_of_their_names() {
        for name in ["B11-P1-CUFM-02", "ufm1", "UFMHA", "opensm.cluster"] {
            assert!(is_fabric_manager(name), "{name}");
        }
        for name in ["node1", "sm-01", "fumbler", "a05-p1-dgx-01-c01", "b-ufo", ""] {
            assert!(!is_fabric_manager(name), "{name}");
        }
    }
}

//! Reads fabric files, whose content tells their format.
//!
//! Invariants: at most [`FILE_MAX_BYTES`] are read. A file of a known kind that holds no fabric is named as that kind,
//! with what to use instead. The format is told from the first lines, in linear time.

use super::{Fabric, FabricError, ReadError};
use std::fmt;
use std::io::Read;
use std::path::Path;

/// The longest description that is read, in bytes: some 500,000 hosts.
pub const FILE_MAX_BYTES: u64 = 256 << 20;

/// What a fabric was read from.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum Format {
    /// Raw output of `ibnetdiscover`.
    Ibnetdiscover,
    /// A `.net` file of ibsim.
    Ibsim,
    /// This project's description in TOML.
    Toml,
    /// Slurm's `topology.conf` for the plugin `topology/tree`.
    SlurmTree,
    /// Slurm's `topology.conf` for the plugin `topology/block`.
    SlurmBlock,
    /// NetQ's topology graph, which it learns by LLDP, in JSON.
    NetQ,
    /// A topology of NCCL in XML: what is inside a server. It is joined to a fabric.
    NcclTopology,
    /// No file: the fabric was generated.
    Generated,
}

impl fmt::Display for Format {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Ibnetdiscover => "an ibnetdiscover dump",
            Self::Ibsim => "an ibsim .net file",
            Self::Toml => "a fabric in TOML",
            Self::SlurmTree => "Slurm's topology.conf (tree)",
            Self::SlurmBlock => "Slurm's topology.conf (block)",
            Self::NetQ => "NetQ's topology graph (JSON)",
            Self::NcclTopology => "an NCCL topology (XML)",
            Self::Generated => "a generated fabric",
        })
    }
}

/// A kind of file that is known and holds no fabric: what it is, and what to use.
type Unfit = (&'static str, &'static str);

impl Format {
    /// Tell the format of a text.
    ///
    /// # Errors
    /// [`FabricError::Unfit`] for a known kind without a fabric; [`FabricError::UnknownFormat`] for anything else.
    pub fn of(text: &str) -> Result<Self, FabricError> {
        let text = text.strip_prefix('\u{feff}').unwrap_or(text);
        let start = text.trim_start();
        if start.starts_with('<') {
            return xml(start);
        }
        let inner = start.strip_prefix('[').map(str::trim_start);
        if start.starts_with('{') && !start.starts_with("{ ") || inner.is_some_and(|rest| rest.starts_with(['{', ']']))
        {
            return json(start);
        }
        let mut first = None;
        for (line, content) in (1..).zip(text.lines()).filter(|(_, content)| !content.trim().is_empty()) {
            let content = content.trim();
            if let Some(format) = line_format(content) {
                return format.map_err(|(kind, instead)| FabricError::Unfit { kind, instead: instead.into() });
            }
            let is_header = content.starts_with('#') || is_property(content);
            if first.is_none() && !is_header {
                first = Some((line, content));
            }
            if line > LINES_MAX {
                break;
            }
        }
        match first {
            _ if text.len() <= TOML_PROBE_MAX_BYTES && text.parse::<toml::Table>().is_ok_and(|t| !t.is_empty()) => {
                Ok(Self::Toml)
            }
            // Comments and properties only: a dump of nothing.
            None => Ok(Self::Ibnetdiscover),
            Some((line, content)) => Err(FabricError::UnknownFormat { line, found: shorten(content) }),
        }
    }
}

/// Lines that are looked at.
const LINES_MAX: usize = 10_000;
/// The longest text that is tried as TOML without looking like it.
const TOML_PROBE_MAX_BYTES: usize = 1 << 20;

/// `key=value` as in a dump, before a record.
fn is_property(content: &str) -> bool {
    ["vendid=", "devid=", "sysimgguid=", "switchguid=", "caguid=", "rtguid="].iter().any(|key| content.starts_with(key))
}

/// The format that a line tells, if it tells one.
fn line_format(content: &str) -> Option<Result<Format, Unfit>> {
    let words: Vec<&str> = content.split_whitespace().take(4).collect();
    let is_number = |word: &&str| word.bytes().all(|c| c.is_ascii_digit());
    if matches!(words[..], ["Switch" | "Ca" | "Hca" | "Rt" | "Router", ports, id, ..] if is_number(&ports) && id.starts_with('"'))
    {
        let is_dump = content.contains('#') || content.contains("\"S-") || content.contains("\"H-");
        return Some(Ok(if is_dump { Format::Ibnetdiscover } else { Format::Ibsim }));
    }
    if content.starts_with("[[") || content.starts_with("switch =") || content.starts_with("switch=") {
        return Some(Ok(Format::Toml));
    }
    let lower = content.to_ascii_lowercase();
    let has = |key: &str| lower.contains(key);
    if lower.starts_with("switchname=") || lower.starts_with("blockname=") {
        return Some(match lower.starts_with("switchname=") {
            _ if has(" level=") || has(" blockindex=") => Err(SCONTROL),
            true => Ok(Format::SlurmTree),
            false => Ok(Format::SlurmBlock),
        });
    }
    UNFIT.iter().find(|(test, _)| test(&lower, &words)).map(|(_, unfit)| Err(*unfit))
}

const SCONTROL: Unfit = ("output of `scontrol show topology`", "Slurm's topology.conf itself");

/// Tests a line, in lower case and as words.
type Test = fn(&str, &[&str]) -> bool;

/// Lines of files that hold no fabric.
const UNFIT: [(Test, Unfit); 14] = [
    (
        |line, _| line.starts_with("unicast lids [") || line.starts_with("multicast mlids ["),
        ("forwarding tables (`dump_lfts`, `dump_mfts` or opensm's opensm-lfts.dump)", "the output of `ibnetdiscover`"),
    ),
    (
        |line, _| line.starts_with("switch: 0x") || line.starts_with("ca: ") || line.starts_with("switch 0x"),
        ("output of `iblinkinfo`", "the output of `ibnetdiscover`"),
    ),
    (
        |line, words| matches!(words, ["Switch" | "Ca" | "Rt", ":", ..]) && line.contains("ports"),
        ("a list of nodes (`ibhosts`, `ibswitches` or `ibnetdiscover -l`)", "the output of `ibnetdiscover` without -l"),
    ),
    (
        |_, words| matches!(words, ["SW" | "CA" | "RT", a, b, guid] if a.parse::<u32>().is_ok() && b.parse::<u32>().is_ok() && guid.starts_with("0x")),
        ("a list of ports (`ibnetdiscover -p`)", "the output of `ibnetdiscover` without -p"),
    ),
    (
        |line, _| line.starts_with("{ sw ports:") || line.starts_with("{ ca ports:"),
        ("a subnet list (ibdiagnet's .lst or opensm-subnet.lst)", "the output of `ibnetdiscover`"),
    ),
    (
        |line, _| {
            line == "start_nodes" || line.starts_with("start_") && line.ends_with("_info") || line == "start_header"
        },
        ("tables of ibdiagnet (.db_csv)", "the output of `ibnetdiscover`"),
    ),
    (
        |line, _| line.starts_with("- topology:") || line.starts_with("topology:"),
        ("Slurm's topology.yaml", "its tree or blocks as topology.conf"),
    ),
    (
        |line, _| {
            line.starts_with("clustername=") || line.starts_with("slurmctldhost=") || line.starts_with("nodename=")
        },
        ("slurm.conf", "the topology.conf beside it"),
    ),
    (
        |line, _| line.starts_with("digraph ") || line.starts_with("graph {") || line.starts_with("strict graph"),
        ("a graph for Graphviz", "the source that it was drawn from"),
    ),
    (
        |_, words| matches!(words, ["GPU0", ..]),
        ("output of `nvidia-smi topo`", "NCCL's topology, as NCCL_TOPO_DUMP_FILE writes it, beside a fabric"),
    ),
    (
        |line, _| line.starts_with("machine (") || line.starts_with("machine l#"),
        ("output of `lstopo`", "NCCL's topology, as NCCL_TOPO_DUMP_FILE writes it, beside a fabric"),
    ),
    (
        |line, _| line.starts_with("ca '") || line.starts_with("ca type:"),
        ("output of `ibstat`", "the output of `ibnetdiscover`"),
    ),
    (
        |line, _| line.starts_with("lldp neighbors:") || line.starts_with("interface:") && line.contains("via:"),
        ("neighbours of one machine (`lldpcli show neighbors`)", "NetQ's topology graph in JSON, or TOML"),
    ),
    (
        |_, words| matches!(words, [guid, first, last] if [guid, first, last].iter().all(|word| word.starts_with("0x"))),
        ("opensm's table of GUIDs and LIDs (guid2lid)", "the output of `ibnetdiscover`"),
    ),
];

fn unfit(kind: &'static str, instead: &str) -> FabricError {
    FabricError::Unfit { kind, instead: instead.into() }
}

/// The format of an XML file, by its root element.
fn xml(text: &str) -> Result<Format, FabricError> {
    let mut rest = text;
    let root = loop {
        let Some(at) = rest.find('<') else { break "" };
        rest = &rest[at + 1..];
        let end = match rest {
            _ if rest.starts_with("!--") => "-->",
            _ if rest.starts_with('?') => "?>",
            _ if rest.starts_with('!') => ">",
            _ => break rest.split(|c: char| c.is_whitespace() || c == '>' || c == '/').next().unwrap_or_default(),
        };
        let Some(at) = rest.find(end) else { break "" };
        rest = &rest[at + end.len()..];
    };
    match root {
        "system" => Ok(Format::NcclTopology),
        "graphs" | "graph" => {
            Err(unfit("NCCL's graphs (NCCL_GRAPH_DUMP_FILE)", "an `ibnetdiscover` dump for the fabric"))
        }
        "topology" => Err(unfit("hwloc's XML", "NCCL's topology, as NCCL_TOPO_DUMP_FILE writes it, beside a fabric")),
        "platform" => Err(unfit("a platform of SimGrid", "an `ibnetdiscover` dump, or TOML")),
        _ => Err(unfit("XML of another kind", "an `ibnetdiscover` dump, or TOML")),
    }
}

/// The format of a JSON file, by the names in it.
fn json(text: &str) -> Result<Format, FabricError> {
    let has = |key: &str| text.contains(key);
    if has("\"compounded_links\"") || has("\"compounded_nodes\"") {
        Ok(Format::NetQ)
    } else if has("\"lldp\"") {
        Err(unfit("neighbours of one machine (`lldpcli`)", "NetQ's topology graph, or TOML"))
    } else if has("\"max_link_sharing\"") {
        Err(unfit("a plan of this command", "the fabric that it was made on"))
    } else {
        Err(unfit("JSON of another kind", "NetQ's topology graph, an `ibnetdiscover` dump, or TOML"))
    }
}

/// Quote a line for a message, truncated to a readable length.
fn shorten(content: &str) -> String {
    const LENGTH_MAX_CHARS: usize = 60;
    match content.char_indices().nth(LENGTH_MAX_CHARS) {
        Some((end, _)) => format!("`{}…`", &content[..end]),
        None => format!("`{content}`"),
    }
}

impl Fabric {
    /// Read a fabric file, whose content tells its format (see [`Format`]). A name that ends in `.toml` tells it too.
    ///
    /// # Errors
    /// [`ReadError`] names the file and, for an error in the text, the line.
    pub fn read(path: impl AsRef<Path>) -> Result<Self, ReadError> {
        let path = path.as_ref();
        let text = read_text(path)?;
        let is_toml = path.extension().is_some_and(|extension| extension.eq_ignore_ascii_case("toml"));
        let fabric = if is_toml { Self::from_toml(&text) } else { Self::from_text(&text) };
        fabric.map_err(|source| ReadError::Fabric { path: path.into(), source })
    }

    /// Read a fabric from a text of any format.
    ///
    /// # Errors
    /// [`FabricError`] names the line, what was found and what was expected, or the kind of a file without a fabric.
    ///
    /// ```
    /// use sumac::topo::{Fabric, Format};
    /// let fabric = Fabric::from_text("SwitchName=leaf0 Nodes=n[1-4]\nSwitchName=leaf1 Nodes=n[5-8]\n\
    ///                                 SwitchName=spine Switches=leaf[0-1]\n")?;
    /// assert_eq!((fabric.format(), fabric.hosts().len()), (Format::SlurmTree, 8));
    /// # Ok::<(), sumac::topo::FabricError>(())
    /// ```
    pub fn from_text(text: &str) -> Result<Self, FabricError> {
        let text = text.strip_prefix('\u{feff}').unwrap_or(text);
        match Format::of(text)? {
            Format::Toml => Self::from_toml(text),
            Format::SlurmTree | Format::SlurmBlock => Self::from_slurm(text),
            Format::NetQ => Self::from_netq(text),
            Format::NcclTopology => Err(super::inside::not_a_fabric(text)),
            Format::Ibnetdiscover | Format::Ibsim | Format::Generated => Self::from_ibnetdiscover(text),
        }
    }
}

/// Read a file of at most [`FILE_MAX_BYTES`]. Node descriptions are arbitrary bytes from the devices; invalid UTF-8
/// must not make a dump unreadable.
pub(super) fn read_text(path: &Path) -> Result<String, ReadError> {
    let io = |source| ReadError::Io { path: path.into(), source };
    let file = std::fs::File::open(path).map_err(io)?;
    let mut bytes = Vec::new();
    file.take(FILE_MAX_BYTES + 1).read_to_end(&mut bytes).map_err(io)?;
    if bytes.len() as u64 > FILE_MAX_BYTES {
        return Err(ReadError::TooLong { path: path.into(), limit_bytes: FILE_MAX_BYTES });
    }
    Ok(String::from_utf8(bytes).unwrap_or_else(|error| String::from_utf8_lossy(error.as_bytes()).into_owned()))
}

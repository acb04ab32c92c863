//! Reads raw `ibnetdiscover` dumps and ibsim's `.net` files, which have the same form.
//!
//! The format is that of the tool's own manual page (rdma-core, `infiniband-diags`, "topology file format"):
//!
//! ```text
//! vendid=0x2c9                                  properties of the next record
//! switchguid=0x...(...)
//! Switch  65 "S-<guid>"    # "description" enhanced port 0 lid 73 lmc 0
//! [1]  "H-<guid>"[1](<port guid>)    # "description" lid 647 4xNDR
//!                                               an empty line ends the record
//! Ca  1 "H-<guid>"         # "description"
//! [1](<port guid>)  "S-<guid>"[17]   # lid 657 lmc 0 "description" lid 73 4xNDR
//! ```
//!
//! ibsim writes `Hca` for `Ca`, arbitrary ids, and no comments. Comment lines, ports outside a record of a known kind
//! and chassis headings are skipped; everything else must parse.
//!
//! Invariant: no input causes a panic; every error names the line.

use super::build::{Builder, Kind, Node, Record, is_aggregation_node};
use super::servers::Origin;
use super::{Fabric, FabricError, Format, Rate};

impl Fabric {
    /// Parse an `ibnetdiscover` dump or an ibsim `.net` file.
    ///
    /// Nodes that only their neighbours list, cables that only one end lists and the like are kept, and reported in
    /// [`Fabric::warnings`].
    ///
    /// # Errors
    /// [`FabricError`] names the line, what was found and what was expected.
    ///
    /// ```
    /// let fabric = sumac::topo::Fabric::from_ibnetdiscover(concat!(
    ///     "Switch 4 \"S-0000000000000001\" # \"leaf1\" enhanced port 0 lid 1 lmc 0\n",
    ///     "[1] \"H-0000000000000002\"[1](2) # \"n1 mlx5_0\" lid 2 4xNDR\n",
    /// ))?;
    /// assert_eq!(fabric.hosts()[0].name, "n1 mlx5_0");
    /// assert_eq!(fabric.links()[0].rate.map(|rate| rate.gbits()), Some(400.0));
    /// # Ok::<(), sumac::topo::FabricError>(())
    /// ```
    pub fn from_ibnetdiscover(text: &str) -> Result<Self, FabricError> {
        let mut builder = Builder::default();
        let mut record: Option<Header> = None;
        let mut properties = Properties::default();
        let mut format = Format::Ibsim;
        for (line, content) in (1..).zip(text.lines()) {
            let content = content.trim();
            if content.is_empty() {
                record = None;
                properties = Properties::default();
            } else if ["#", "Chassis", "Non-Chassis"].iter().any(|skipped| content.starts_with(skipped)) {
                continue;
            } else if content.starts_with('[') {
                let Some(header) = &record else {
                    let expected = "a record (Switch, Ca, Hca or Rt) before its ports".to_owned();
                    return Err(FabricError::Syntax { line, found: quote(content), expected });
                };
                port(&mut builder, header, content, line)?;
            } else if let Some((key, value)) = property(content) {
                // ibsim's files have none of these, nor comments behind a record.
                format = Format::Ibnetdiscover;
                match key {
                    "devid" => properties.is_aggregation_device |= value == AGGREGATION_DEVICE_ID,
                    "sysimgguid" => properties.system_image = system_image(value),
                    _ => {}
                }
            } else {
                if content.contains('#') {
                    format = Format::Ibnetdiscover;
                }
                record = Some(header(&mut builder, content, line, &mut properties)?);
            }
        }
        builder.finish(format, "Switch 65 \"S-<guid>\" # \"name\"")
    }
}

/// What stands before a record.
#[derive(Default)]
struct Properties {
    is_aggregation_device: bool,
    system_image: Option<Box<str>>,
}

/// A system image GUID, as [`bare_guid`] spells it. Zero is what devices without one report.
fn system_image(value: &str) -> Option<Box<str>> {
    let digits = value.trim().strip_prefix("0x")?;
    let number = u64::from_str_radix(digits, 16).ok().filter(|number| *number != 0)?;
    Some(format!("{number:016x}").into())
}

/// The PCI device id of Quantum aggregation nodes; identifies them if the description is missing.
const AGGREGATION_DEVICE_ID: &str = "0xcf09";

/// The parts of a record that parsing its ports needs.
struct Header {
    node: Node,
    ports: u16,
}

/// Split `key=value`, with a key of letters only.
fn property(content: &str) -> Option<(&str, &str)> {
    content.split_once('=').filter(|(key, _)| !key.is_empty() && key.bytes().all(|c| c.is_ascii_alphabetic()))
}

/// Parse a record's first line and add the record.
fn header(
    builder: &mut Builder,
    content: &str,
    line: usize,
    properties: &mut Properties,
) -> Result<Header, FabricError> {
    let mut cursor = Cursor { rest: content, line };
    let kind = match cursor.word() {
        "Switch" => Kind::Switch,
        "Ca" | "Hca" => Kind::Host,
        "Rt" | "Router" => Kind::Ignored,
        _ => {
            let expected = "a record (Switch, Ca, Hca or Rt), a port ([n]), a property (key=value) or a comment (#)";
            return Err(FabricError::Syntax { line, found: quote(content), expected: expected.into() });
        }
    };
    let ports = cursor.number("the number of ports (1 to 65535)")?;
    let id = cursor.quoted("the node's id in quotes")?;
    let description = described(cursor.comment()?);
    let aggregates = properties.is_aggregation_device || description.is_some_and(is_aggregation_node);
    let kind = if kind == Kind::Host && aggregates { Kind::Aggregation } else { kind };
    let origin = Origin { system_image: properties.system_image.take(), server: None };
    let node = builder.record(id, Record { kind, description: description.map(str::to_owned), origin, line })?;
    Ok(Header { node, ports })
}

/// Parse a port's line and add its listing.
fn port(builder: &mut Builder, record: &Header, content: &str, line: usize) -> Result<(), FabricError> {
    let mut cursor = Cursor { rest: content, line };
    let number = cursor.port_number()?;
    if number > record.ports {
        let expected = format!("a port of `{}`, which has {}", builder.id(record.node), record.ports);
        return Err(FabricError::Syntax { line, found: format!("port {number}"), expected });
    }
    cursor.skip_group('[', ']')?; // [ext 5]: the number printed on a chassis' front
    cursor.skip_group('(', ')')?; // the port's GUID
    let to = cursor.quoted("the id of the node at the other end in quotes")?;
    let to_number = cursor.port_number()?;
    cursor.skip_group('[', ']')?;
    cursor.skip_group('(', ')')?;
    while !cursor.rest.is_empty() && !cursor.rest.starts_with('#') {
        let before = cursor.rest;
        if property(cursor.word()).is_none() {
            let expected = "an attribute (w=4), a comment (#) or the end of the line".into();
            return Err(FabricError::Syntax { line, found: quote(before), expected });
        }
    }
    let comment = cursor.comment()?;
    // The rate comes last. A description may contain a word that looks like one, so search only behind it.
    let after_description = comment.rsplit('"').next().unwrap_or_default();
    let rate = after_description.split_whitespace().find_map(Rate::from_width_and_speed);
    let to = builder.node(to);
    builder.seen_as(to, described(comment));
    builder.listing((record.node, number), (to, to_number), rate, line)
}

/// The quoted description in a comment, unless missing or blank. Quotes inside it are kept.
fn described(comment: &str) -> Option<&str> {
    let (start, end) = (comment.find('"')?, comment.rfind('"')?);
    let text = comment.get(start + 1..end)?.trim();
    (!text.is_empty()).then_some(text)
}

/// Quote text for a message, truncated to a readable length.
fn quote(text: &str) -> String {
    const LENGTH_MAX_CHARS: usize = 60;
    match text.char_indices().nth(LENGTH_MAX_CHARS) {
        Some((end, _)) => format!("`{}…`", &text[..end]),
        None if text.is_empty() => "the end of the line".into(),
        None => format!("`{text}`"),
    }
}

/// A position in a line.
struct Cursor<'a> {
    rest: &'a str,
    line: usize,
}

impl<'a> Cursor<'a> {
    fn expected(&self, expected: &str) -> FabricError {
        FabricError::Syntax { line: self.line, found: quote(self.rest), expected: expected.into() }
    }

    fn advance(&mut self, rest: &'a str) {
        self.rest = rest.trim_start();
    }

    fn word(&mut self) -> &'a str {
        let end = self.rest.find(|c: char| c.is_whitespace() || c == '"').unwrap_or(self.rest.len());
        let (word, rest) = self.rest.split_at(end);
        self.advance(rest);
        word
    }

    fn number(&mut self, expected: &str) -> Result<u16, FabricError> {
        let before = Cursor { rest: self.rest, line: self.line };
        self.word().parse().ok().filter(|number| *number > 0).ok_or_else(|| before.expected(expected))
    }

    fn quoted(&mut self, expected: &str) -> Result<&'a str, FabricError> {
        let inner = self.rest.strip_prefix('"').ok_or_else(|| self.expected(expected))?;
        let (text, rest) = inner.split_once('"').ok_or_else(|| self.expected("a closing quote"))?;
        if text.is_empty() {
            return Err(self.expected(expected));
        }
        self.advance(rest);
        Ok(text)
    }

    fn port_number(&mut self) -> Result<u16, FabricError> {
        let parsed = self.rest.strip_prefix('[').and_then(|inner| inner.split_once(']'));
        let number = parsed.and_then(|(digits, rest)| Some((digits.trim().parse().ok()?, rest)));
        match number {
            Some((number, rest)) if number > 0 => {
                self.advance(rest);
                Ok(number)
            }
            _ => Err(self.expected("a port number in brackets ([1] to [65535])")),
        }
    }

    fn skip_group(&mut self, open: char, close: char) -> Result<(), FabricError> {
        if let Some(inner) = self.rest.strip_prefix(open) {
            let (_, rest) = inner.split_once(close).ok_or_else(|| self.expected(&format!("a closing `{close}`")))?;
            self.advance(rest);
        }
        Ok(())
    }

    /// Return what follows `#`; only a comment may be left.
    fn comment(&mut self) -> Result<&'a str, FabricError> {
        match self.rest.strip_prefix('#') {
            Some(comment) => Ok(comment),
            None if self.rest.is_empty() => Ok(""),
            None => Err(self.expected("a comment (#) or the end of the line")),
        }
    }
}

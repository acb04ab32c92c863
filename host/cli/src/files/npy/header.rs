//! A strict parser for the header of a `.npy` file.

use super::super::{FileError, Format};
use super::{MAGIC, TYPES};
use std::io::{ErrorKind, Read};
use std::path::Path;
use sumac_hal::op::Dtype;

/// The longest header in bytes: NumPy's limit for untrusted files.
const TEXT_MAX_LEN: usize = 10_000;

/// The maximum number of dimensions of a NumPy array (`NPY_MAXDIMS`).
const DIMENSIONS_MAX: usize = 64;

/// The contents of a header.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Header {
    pub(super) dtype: Dtype,
    pub(super) fortran_order: bool,
    pub(super) shape: Vec<u64>,
    /// All bytes in front of the elements.
    pub(super) bytes: Vec<u8>,
}

/// Read the header at the start of a file.
pub(super) fn read_header(from: &mut impl Read, path: &Path) -> Result<Header, FileError> {
    let foreign = |why: String| FileError::Foreign { path: path.into(), format: Format::Npy, why };
    let mut bytes = Vec::new();
    let mut take = |len: usize, what: &str| {
        let start = bytes.len();
        bytes.resize(start + len, 0);
        match from.read_exact(&mut bytes[start..]) {
            Ok(()) => Ok(bytes[start..].to_vec()),
            Err(error) if error.kind() == ErrorKind::UnexpectedEof => Err(foreign(format!("it ends within {what}"))),
            Err(source) => Err(FileError::Io { path: path.into(), source }),
        }
    };
    let start = take(8, "the first 8 bytes")?;
    if !start.starts_with(MAGIC) {
        return Err(foreign("it does not begin with \\x93NUMPY".into()));
    }
    let len_size = match start[6] {
        1 => 2,
        2 | 3 => 4,
        version => return Err(foreign(format!("unknown version {version}; 1, 2 and 3 are supported"))),
    };
    let len = take(len_size, "its header's length")?;
    let len = len.iter().rev().fold(0_usize, |n, &byte| n << 8 | usize::from(byte));
    if len > TEXT_MAX_LEN {
        return Err(foreign(format!("the header length {len} exceeds the limit of {TEXT_MAX_LEN} bytes")));
    }
    let text = String::from_utf8(take(len, "its header")?).map_err(|_| foreign("its header is not text".into()))?;
    let fields = Parser(&text).dictionary().map_err(|why| foreign(format!("its header {why}")))?;
    let (Some(descr), Some(fortran_order), Some(shape)) = fields else {
        return Err(foreign("its header lacks one of descr, fortran_order and shape".into()));
    };
    let Some(&(_, dtype)) = TYPES.iter().find(|(known, _)| *known == descr) else {
        let known = TYPES.map(|(descr, _)| descr).join(", ");
        return Err(FileError::Type { path: path.into(), label: String::new(), found: descr, known });
    };
    Ok(Header { dtype, fortran_order, shape, bytes })
}

type Fields = (Option<String>, Option<bool>, Option<Vec<u64>>);

/// A parser of the dictionary literal; it holds the remaining text.
struct Parser<'a>(&'a str);

impl<'a> Parser<'a> {
    fn dictionary(mut self) -> Result<Fields, String> {
        let mut fields = Fields::default();
        self.expect("{")?;
        while !self.accept("}") {
            let key = self.string()?;
            self.expect(":")?;
            match key {
                "descr" => fields.0 = Some(self.descr()?),
                "fortran_order" => fields.1 = Some(self.boolean()?),
                "shape" => fields.2 = Some(self.shape()?),
                other => return Err(format!("has the unknown key {other:?}")),
            }
            if !self.accept(",") {
                self.expect("}")?;
                break;
            }
        }
        self.skip_space();
        if self.0.is_empty() { Ok(fields) } else { Err(self.unexpected("its end")) }
    }

    /// Parse an element type. A record is returned as written.
    fn descr(&mut self) -> Result<String, String> {
        self.skip_space();
        if self.0.starts_with('[') {
            let end = self.0.rfind(']').map_or(self.0.len(), |at| at + 1);
            let (record, rest) = self.0.split_at(end);
            self.0 = rest;
            return Ok(record.to_owned());
        }
        self.string().map(str::to_owned)
    }

    fn string(&mut self) -> Result<&'a str, String> {
        self.skip_space();
        let quote =
            self.0.chars().next().filter(|c| matches!(c, '\'' | '"')).ok_or_else(|| self.unexpected("a string"))?;
        let (text, rest) = self.0[1..].split_once(quote).ok_or_else(|| self.unexpected("the end of a string"))?;
        self.0 = rest;
        Ok(text)
    }

    fn boolean(&mut self) -> Result<bool, String> {
        if self.accept("True") {
            return Ok(true);
        }
        self.expect("False").map(|()| false)
    }

    fn shape(&mut self) -> Result<Vec<u64>, String> {
        let mut shape = Vec::new();
        self.expect("(")?;
        while !self.accept(")") {
            self.skip_space();
            let end = self.0.bytes().take_while(u8::is_ascii_digit).count();
            let (digits, rest) = self.0.split_at(end);
            shape.push(digits.parse().map_err(|_| self.unexpected("a dimension"))?);
            if shape.len() > DIMENSIONS_MAX {
                return Err(format!("has more than {DIMENSIONS_MAX} dimensions"));
            }
            self.0 = rest;
            if !self.accept(",") {
                self.expect(")")?;
                break;
            }
        }
        Ok(shape)
    }

    fn accept(&mut self, token: &str) -> bool {
        self.skip_space();
        let rest = self.0.strip_prefix(token);
        self.0 = rest.unwrap_or(self.0);
        rest.is_some()
    }

    fn expect(&mut self, token: &str) -> Result<(), String> {
        if self.accept(token) { Ok(()) } else { Err(self.unexpected(token)) }
    }

    fn skip_space(&mut self) {
        self.0 = self.0.trim_start();
    }

    fn unexpected(&self, expected: &str) -> String {
        let found: String = self.0.chars().take(16).collect();
        format!("has {found:?} where {expected} was expected")
    }
}

//! Rows as comma-separated values (RFC 4180): the keys and values of the JSON object, in its order.

use super::row::Row;
use serde::de::{MapAccess, Visitor};
use serde::{Deserialize, Deserializer};
use serde_json::Value;
use std::fmt;
use std::io::{self, Write};

/// The entries of a JSON object in its order, which maps of `serde_json` do not keep.
struct Entries(Vec<(String, Value)>);

impl<'de> Deserialize<'de> for Entries {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct InOrder;

        impl<'de> Visitor<'de> for InOrder {
            type Value = Entries;

            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str("an object")
            }

            fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<Entries, A::Error> {
                let mut entries = Vec::new();
                while let Some(entry) = map.next_entry()? {
                    entries.push(entry);
                }
                Ok(Entries(entries))
            }
        }

        deserializer.deserialize_map(InOrder)
    }
}

fn entries(row: &Row) -> io::Result<Vec<(String, Value)>> {
    let Entries(entries) = serde_json::from_slice(&serde_json::to_vec(row)?)?;
    Ok(entries)
}

/// Print the line of column names; any row has the same.
pub(super) fn write_head(out: &mut impl Write, row: &Row) -> io::Result<()> {
    let names: Vec<String> = entries(row)?.into_iter().map(|(name, _)| name).collect();
    writeln!(out, "{}", names.join(","))
}

/// Print a row; a missing value is an empty cell.
pub(super) fn write_row(out: &mut impl Write, row: &Row) -> io::Result<()> {
    let cells: Vec<String> = entries(row)?.iter().map(|(_, value)| cell(value)).collect();
    writeln!(out, "{}", cells.join(","))
}

fn cell(value: &Value) -> String {
    match value {
        Value::Null => String::new(),
        Value::String(text) if text.contains([',', '"', '\n', '\r']) => format!("\"{}\"", text.replace('"', "\"\"")),
        Value::String(text) => text.clone(),
        value => value.to_string(),
    }
}

#[cfg(test)]
mod tests {
    use super::super::row::tests::{case, in_place, measured, row};
    use super::*;
    use serde_json::json;
    use sumac_hal::op::{Collective, Path};

    #[test]
    fn columns_are_the_keys_of_the_json_object_in_order() {
        let row = row(&case(Collective::Broadcast), &[in_place(vec![measured(&[1500], Path::Tree); 2])], None);
        let (mut head, mut line) = (Vec::new(), Vec::new());
        write_head(&mut head, &row).expect("memory");
        write_row(&mut line, &row).expect("memory");
        let [head, line] = [head, line].map(|text| String::from_utf8(text).expect("text"));
        assert!(head.starts_with("collective,dtype,op,ranks,size_bytes,count,algo,path,transport,time_us,"), "{head}");
        assert!(head.ends_with(",cores,version,command\n"), "{head}");
        assert!(line.starts_with("broadcast,f32,,2,1048576,262144,tree,tree,host,1.5,"), "{line}");
        assert_eq!(head.split(',').count(), line.split(',').count());
    }

    #[test]
    fn cells_with_separators_are_quoted() {
        assert_eq!(cell(&json!("a,b")), "\"a,b\"");
        assert_eq!(cell(&json!("say \"x\"")), "\"say \"\"x\"\"\"");
        assert_eq!([cell(&json!(null)), cell(&json!(true)), cell(&json!(0.5))], ["", "true", "0.5"]);
    }
}

//! Fabric descriptions: files, or stdin for `-`.

use anyhow::{Context, ensure};
use std::io::{self, Read};
use std::path::Path;
use sumac::topo::Fabric;

/// The longest description that is read from stdin, in bytes.
const STDIN_MAX_BYTES: u64 = 64 << 20;

/// Read a fabric, and return the text as well if it came from stdin, which cannot be read twice.
///
/// The name of a file tells its format; on stdin, the text does.
///
/// # Errors
/// A message that names the file or stdin, and the line of an error in the text.
pub(crate) fn read(path: &Path) -> anyhow::Result<(Fabric, Option<String>)> {
    if path.as_os_str() != "-" {
        return Ok((Fabric::read(path)?, None));
    }
    let mut bytes = Vec::new();
    let read = io::stdin().take(STDIN_MAX_BYTES + 1).read_to_end(&mut bytes);
    read.context("cannot read the fabric from stdin")?;
    ensure!(bytes.len() as u64 <= STDIN_MAX_BYTES, "stdin: the fabric has more than {} MiB", STDIN_MAX_BYTES >> 20);
    // Node descriptions in dumps are arbitrary bytes from the devices.
    let text = String::from_utf8_lossy(&bytes).into_owned();
    let fabric = if is_toml(&text) { Fabric::from_toml(&text) } else { Fabric::from_ibnetdiscover(&text) };
    Ok((fabric.context("stdin")?, Some(text)))
}

/// Tell TOML from a dump. A fabric in TOML is made of tables in arrays; no line of a dump looks like the head of one.
fn is_toml(text: &str) -> bool {
    text.lines().any(|line| line.trim_start().starts_with("[[")) || text.parse::<toml::Table>().is_ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn format_is_told_from_the_text() {
        let dump = include_str!("../../tests/fixtures/two-leaves.ibnetdiscover");
        assert!(!is_toml(dump));
        // The port lines of a dump begin with a bracket, too.
        assert!(dump.lines().any(|line| line.starts_with('[')), "{dump}");
        assert!(is_toml("# a fabric\n[[switch]]\nname = \"leaf0\"\n"));
        assert!(is_toml("# with an error\n[[switch]]\nname = leaf0\n"), "its error is one in TOML");
        assert!(is_toml("switch = [{ name = \"leaf0\" }]\n"));
    }
}

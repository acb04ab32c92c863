//! Names and passwords: from a file or a prompt, never from the command line, which other users can read.

use super::http::Credentials;
use anyhow::{Context, anyhow, ensure};
use std::fs::File;
use std::io::{self, BufRead, BufReader, Read, Write};
use std::os::unix::fs::MetadataExt;
use std::path::Path;
use zeroize::Zeroizing;

/// The longest file of credentials, in bytes.
const FILE_MAX_BYTES: u64 = 4096;

/// Read credentials from a file, `-` for stdin, or ask for them on the terminal.
pub(super) fn read(file: Option<&Path>) -> anyhow::Result<Credentials> {
    let Some(path) = file else { return ask() };
    let what = || format!("--credentials {}", path.display());
    if path == Path::new("-") {
        return from_line(io::stdin()).with_context(what);
    }
    let file = File::open(path).with_context(what)?;
    let mode = file.metadata().with_context(what)?.mode();
    ensure!(mode & 0o077 == 0, "{}: other users may read it; chmod 600 it", what());
    from_line(file).with_context(what)
}

/// Read the first line.
fn from_line(from: impl Read) -> anyhow::Result<Credentials> {
    let mut line = Zeroizing::new(String::with_capacity(FILE_MAX_BYTES as usize));
    BufReader::new(from.take(FILE_MAX_BYTES)).read_line(&mut line)?;
    let pair = Zeroizing::new(line.trim_end_matches(['\r', '\n']).to_owned());
    check(pair)
}

fn check(pair: Zeroizing<String>) -> anyhow::Result<Credentials> {
    let is_pair = pair.split_once(':').is_some_and(|(name, password)| !name.is_empty() && !password.is_empty());
    ensure!(is_pair && !pair.contains(char::is_control), "the first line must be NAME:PASSWORD");
    Ok(Credentials { pair })
}

fn ask() -> anyhow::Result<Credentials> {
    let name = || -> io::Result<String> {
        let mut terminal = File::options().read(true).write(true).open("/dev/tty")?;
        write!(terminal, "BMC user: ")?;
        let mut name = String::new();
        BufReader::new(terminal.take(FILE_MAX_BYTES)).read_line(&mut name)?;
        Ok(name.trim().to_owned())
    };
    let asked = name().and_then(|name| Ok((name, Zeroizing::new(rpassword::prompt_password("Password: ")?))));
    let (name, password) =
        asked.map_err(|error| anyhow!("no terminal to ask for credentials ({error}); give --credentials"))?;
    ensure!(!name.contains(':'), "a user's name has no colon");
    check(Zeroizing::new(format!("{name}:{}", *password)))
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::fs::{self, Permissions};
    use std::os::unix::fs::PermissionsExt;

    #[test]
    fn credentials_are_the_first_line_of_a_file_that_no_other_user_may_read() {
        let folder = tempfile::tempdir().expect("a folder");
        let path = folder.path().join("bmc");
        for (text, pair) in [("root:a:b c\nmore", Some("root:a:b c")), ("root:x\r\n", Some("root:x")), ("root", None)]
            .into_iter()
            .chain([(":x", None), ("root:", None), ("", None), ("root:\u{7}", None)])
        {
            fs::write(&path, text).expect("written");
            fs::set_permissions(&path, Permissions::from_mode(0o600)).expect("own");
            let read = read(Some(&path)).ok().map(|read| read.pair.to_string());
            assert_eq!(read.as_deref(), pair, "{text:?}");
        }
        fs::write(&path, "root:x").expect("written");
        fs::set_permissions(&path, Permissions::from_mode(0o640)).expect("own");
        let error = read(Some(&path)).err().expect("refused").to_string();
        assert!(error.contains("chmod 600") && !error.contains("root:x"), "{error}");
    }
}

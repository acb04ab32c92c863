//! Commands on other hosts by `ssh`.

use anyhow::{Context, anyhow};

/// What runs a command on another host, unless `SUMAC_SSH` names another program.
const SSH: &str = "ssh -o BatchMode=yes";

/// Return the words that run a command on another host: those of `SUMAC_SSH`, or the default ones and `more` options of
/// `ssh`.
pub(crate) fn words(more: &[&str]) -> Vec<String> {
    let words = |text: &str| text.split_whitespace().map(str::to_owned).collect::<Vec<_>>();
    match std::env::var("SUMAC_SSH").ok().filter(|value| !value.is_empty()) {
        Some(text) => words(&text),
        None => words(SSH).into_iter().chain(more.iter().map(|&word| word.to_owned())).collect(),
    }
}

/// Check that a text can be the name of a host: `ssh` would take `-x` for an option.
pub(crate) fn is_host(name: &str) -> bool {
    !name.is_empty() && !name.starts_with('-') && !name.contains(char::is_whitespace)
}

/// Return the program to run on the hosts: the given one, or the path of this one, as `mpirun` does.
pub(crate) fn program(path: Option<&str>) -> anyhow::Result<String> {
    match path {
        Some(path) => Ok(path.into()),
        None => {
            let path = std::env::current_exe().context("cannot find this program; give --sumac-path")?;
            path.into_os_string().into_string().map_err(|path| anyhow!("{path:?} is not UTF-8; give --sumac-path"))
        }
    }
}

/// Quote a word for the shell of the host.
pub(crate) fn quoted(word: &str) -> String {
    let is_plain = |c: char| c.is_ascii_alphanumeric() || "-_./:,=@%+".contains(c);
    if !word.is_empty() && word.chars().all(is_plain) {
        word.into()
    } else {
        format!("'{}'", word.replace('\'', r"'\''"))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn quoted_word_is_one_word_of_a_shell() {
        for (word, expected) in [("a=b", "a=b"), ("", "''"), ("a b", "'a b'"), ("it's;", r"'it'\''s;'")] {
            assert_eq!(quoted(word), expected);
        }
    }

    #[test]
    fn option_or_several_words_are_no_host() {
        assert!(["n1", "me@n1.lab", "fe80::1"].into_iter().all(is_host));
        assert!(!["", "-oProxyCommand=x", "a b", "a\nb"].into_iter().any(is_host));
    }
}

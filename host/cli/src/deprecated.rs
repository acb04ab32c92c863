//! Old spellings on the command line: accepted for one release, each with a warning that names the new one.
//!
//! They are replaced before the arguments are parsed, so that neither the help nor any other message shows them. Old
//! names of environment variables are the library's ([`sumac::comm::environment`]), which reads them.

use std::collections::BTreeSet;
use std::ffi::OsString;

/// Options, each with its new name.
const OPTIONS: [(&str, &str); 4] = [
    ("--attach", "--transport"),
    ("--no-bus", "--no-shm"),
    ("--seats", "--ranks-max"),
    ("--seat-mib", "--rank-memory-mib"),
];

/// Subcommands, each with the words that stand for it now.
const SUBCOMMANDS: [(&str, [&str; 2]); 1] = [("devices", ["card", "list"])];

/// The option whose value may be any word, also one of the old options.
const TAKES_ANY_VALUE: &str = "--qemu-arg";

/// Arguments under their new names, and what to warn about.
#[derive(Debug, Default)]
pub(crate) struct Arguments {
    /// The arguments, the program's name first.
    pub(crate) args: Vec<OsString>,
    /// One line for each old name, however often it occurs.
    pub(crate) warnings: BTreeSet<String>,
}

impl Arguments {
    /// Replace old names; what follows `--` is left alone.
    pub(crate) fn new(args: impl IntoIterator<Item = OsString>) -> Self {
        let mut args = args.into_iter();
        let mut found = Self::default();
        found.args.extend(args.next());
        let mut has_subcommand = false;
        while let Some(arg) = args.next() {
            let Some(text) = arg.to_str() else {
                found.args.push(arg);
                continue;
            };
            if text == "--" {
                found.args.push(arg);
                break;
            }
            if text == TAKES_ANY_VALUE {
                found.args.push(arg);
                found.args.extend(args.next());
            } else if text.starts_with('-') {
                found.option(text);
            } else if has_subcommand {
                found.args.push(arg);
            } else {
                // `help` is followed by the name of another one.
                has_subcommand = text != "help";
                found.subcommand(text);
            }
        }
        found.args.extend(args);
        found
    }

    fn option(&mut self, text: &str) {
        let (name, value) = text.split_once('=').map_or((text, None), |(name, value)| (name, Some(value)));
        let Some((old, new)) = OPTIONS.iter().find(|(old, _)| *old == name) else {
            self.args.push(text.into());
            return;
        };
        self.args.push(value.map_or_else(|| (*new).into(), |value| format!("{new}={value}").into()));
        self.warnings.insert(format!("{old} is deprecated; use {new}"));
    }

    fn subcommand(&mut self, text: &str) {
        let Some((old, new)) = SUBCOMMANDS.iter().find(|(old, _)| *old == text) else {
            self.args.push(text.into());
            return;
        };
        self.args.extend(new.iter().map(OsString::from));
        self.warnings.insert(format!("`sumac {old}` is deprecated; use `sumac {}`", new.join(" ")));
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn replaced(line: &str) -> (String, Vec<String>) {
        let Arguments { args, warnings } = Arguments::new(line.split(' ').map(OsString::from));
        let args: Vec<_> = args.into_iter().map(|arg| arg.into_string().expect("UTF-8")).collect();
        (args.join(" "), warnings.into_iter().collect())
    }

    #[test]
    fn old_names_become_new_ones_and_warn_once() {
        let (args, warnings) = replaced("sumac -v perf --attach=shm --attach udp --no-bus");
        assert_eq!(args, "sumac -v perf --transport=shm --transport udp --no-shm");
        assert_eq!(warnings, ["--attach is deprecated; use --transport", "--no-bus is deprecated; use --no-shm"]);
        let (args, warnings) = replaced("sumac -v devices --root devices");
        assert_eq!((args.as_str(), warnings.len()), ("sumac -v card list --root devices", 1));
        assert_eq!(replaced("sumac help devices").0, "sumac help card list");
    }

    #[test]
    fn values_and_arguments_after_a_double_dash_are_unchanged() {
        for line in [
            "sumac image run --qemu-arg --seats",
            "sumac emulate -- qemu --seats",
            "sumac status --controller devices",
            "sumac perf --attachment",
        ] {
            assert_eq!(replaced(line), (line.to_owned(), vec![]));
        }
    }
}

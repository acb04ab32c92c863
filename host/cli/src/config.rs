//! The configuration file of `controller` and `device`: the options that neither the command line nor the environment
//! gives.
//!
//! A table's keys are the long options of its subcommand, without hidden ones. What the file sets is inserted behind
//! the subcommand, and the whole is parsed as one command line, so a value in the file passes the same checks as an
//! option.
//!
//! Processes that a supervisor starts read no file: their options are complete.

use crate::cluster;
use crate::exit::Failure;
use anyhow::anyhow;
use clap::error::{ContextKind, ContextValue, ErrorKind};
use clap::{Arg, ArgAction, Command, Parser};
use std::ffi::{OsStr, OsString};
use std::path::{Path, PathBuf};
use sumac::config_file::{ConfigFile, ConfigFileError, Section, Value};

/// Long name of the option that names the file.
const OPTION: &str = "config";

/// Options that have a variable without clap's knowledge.
const VARIABLES: [(&str, &str); 2] = [("key-file", "SUMAC_KEY_FILE"), ("key-file", "SUMAC_KEY")];

/// The option that names the file.
pub(crate) fn option() -> Arg {
    Arg::new(OPTION).long(OPTION).value_name("FILE").value_parser(clap::value_parser!(PathBuf)).help(
        "Configuration file: a TOML file with the options of this subcommand in a table of its name. Options and variables \
         beat it [default: SUMAC_CONFIG, else none]",
    )
}

/// Why the command line is refused.
#[derive(Debug)]
pub(crate) enum ParseError {
    /// Options are invalid, or help was asked for.
    Usage(clap::Error),
    /// The configuration file is invalid.
    File(anyhow::Error),
}

/// Parse the command line, completed by the configuration file.
pub(crate) fn parse<C: Parser>(args: Vec<OsString>) -> Result<C, ParseError> {
    let named = std::env::var_os(sumac::config_file::VARIABLE);
    let named = named.filter(|path| !path.is_empty() && !cluster::is_supervised());
    complete(args, named, |name| std::env::var_os(name).is_some())
}

/// As [`parse`], with the file that the environment names, and whether it sets a variable.
fn complete<C: Parser>(
    mut args: Vec<OsString>,
    named: Option<OsString>,
    is_set: impl Fn(&OsStr) -> bool,
) -> Result<C, ParseError> {
    let plain = C::try_parse_from(&args).map_err(ParseError::Usage);
    if matches!(&plain, Err(ParseError::Usage(error)) if !error.use_stderr()) {
        return plain;
    }
    let Some((at, section)) = subcommand(&args) else { return plain };
    let own = &args[at + 1..];
    let Some(path) = value_of(own, OPTION).or(named) else { return plain };
    let settings = ConfigFile::read(Path::new(&path)).and_then(|file| settings(&file, section, &C::command()));
    let settings = settings.map_err(|error| ParseError::File(error.into()))?;
    let is_used = |setting: &Setting| !is_given(own, &setting.key) && !setting.is_overridden(&is_set);
    let used: Vec<_> = settings.into_iter().filter(is_used).collect();
    let inserted: Vec<_> = used.iter().flat_map(|setting| &setting.options).map(OsString::from).collect();
    args.splice(at + 1..at + 1, inserted);
    C::try_parse_from(args).map_err(|error| match used.iter().find(|setting| setting.is_named_by(&error)) {
        Some(setting) => ParseError::File(setting.refusal(Path::new(&path), &error)),
        None => ParseError::Usage(error),
    })
}

/// Return where the subcommand is, if it reads a file.
fn subcommand(args: &[OsString]) -> Option<(usize, Section)> {
    let is_name = |arg: &&OsString| !arg.as_encoded_bytes().starts_with(b"-");
    let name = args.iter().skip(1).find(is_name)?;
    let at = args.iter().skip(1).position(|arg| arg == name)? + 1;
    let section = [Section::Controller, Section::Device].into_iter().find(|section| name == section.name())?;
    Some((at, section))
}

/// Whether an option is among the arguments. No value of an option begins with a dash.
fn is_given(args: &[OsString], option: &str) -> bool {
    args.iter().any(|arg| arg.to_str().is_some_and(|arg| has_name(arg, option)))
}

/// Whether an argument, or the name of one in clap's messages, is this option: `--name`, `--name=...` or `--name
/// <...>`.
fn has_name(arg: &str, option: &str) -> bool {
    let rest = arg.strip_prefix("--").and_then(|arg| arg.strip_prefix(option));
    rest.is_some_and(|rest| rest.is_empty() || rest.starts_with(['=', ' ', '[']))
}

/// Return the value of an option.
fn value_of(args: &[OsString], option: &str) -> Option<OsString> {
    let at = args.iter().position(|arg| arg.to_str().is_some_and(|arg| has_name(arg, option)))?;
    match args[at].to_str()?.split_once('=') {
        Some((_, value)) => Some(value.into()),
        None => args.get(at + 1).cloned(),
    }
}

/// An option that the file sets.
#[derive(Debug)]
pub(crate) struct Setting {
    section: Section,
    /// Its long name.
    pub(crate) key: String,
    pub(crate) value: Value,
    /// The same on the command line.
    options: Vec<String>,
    /// Variables that beat the file.
    variables: Vec<OsString>,
}

impl Setting {
    fn is_overridden(&self, is_set: impl Fn(&OsStr) -> bool) -> bool {
        self.variables.iter().any(|variable| is_set(variable))
    }

    /// Return the variable of this process that overrides it, if one does.
    pub(crate) fn overridden_by(&self) -> Option<&OsStr> {
        self.variables.iter().map(OsString::as_os_str).find(|name| std::env::var_os(name).is_some())
    }

    /// Whether an error is about it.
    fn is_named_by(&self, error: &clap::Error) -> bool {
        let names = |kind| match error.get(kind) {
            Some(ContextValue::String(name)) => has_name(name, &self.key),
            Some(ContextValue::Strings(names)) => names.iter().any(|name| has_name(name, &self.key)),
            _ => false,
        };
        let is_missing = error.kind() == ErrorKind::MissingRequiredArgument;
        !self.options.is_empty() && !is_missing && (names(ContextKind::InvalidArg) || names(ContextKind::PriorArg))
    }

    fn refusal(&self, path: &Path, error: &clap::Error) -> anyhow::Error {
        let text = error.to_string();
        let reason = text.split("\n\n").next().unwrap_or_default().trim_start_matches("error: ").replace('\n', " ");
        anyhow!("{}: {} {}: {reason}", path.display(), self.section, self.key)
    }
}

/// Return the options that a file sets.
fn settings(file: &ConfigFile, section: Section, command: &Command) -> Result<Vec<Setting>, ConfigFileError> {
    let options: Vec<_> = command.find_subcommand(section.name()).into_iter().flat_map(keys).collect();
    let known: Vec<_> = options.iter().map(|(key, _)| *key).collect();
    let found = file.settings(section, &known)?.into_iter().filter_map(|found| {
        let (_, arg) = options.iter().find(|(key, _)| *key == found.key)?;
        let variables = VARIABLES.iter().filter(|(key, _)| *key == found.key).map(|(_, name)| OsString::from(name));
        let variables = arg.get_env().map(OsString::from).into_iter().chain(variables).collect();
        let options = in_options(arg, &found.key, &found.value).map_err(|why| file.invalid(section, &found.key, why));
        Some(options.map(|options| Setting { section, key: found.key, value: found.value, options, variables }))
    });
    found.collect()
}

/// Return the keys of a subcommand's table, each with its option.
fn keys(command: &Command) -> impl Iterator<Item = (&str, &Arg)> {
    let options = command.get_arguments().filter(|arg| !arg.is_hide_set());
    options.filter_map(|arg| Some((arg.get_long().filter(|name| *name != OPTION)?, arg)))
}

/// Write a value as it is on the command line.
fn in_options(arg: &Arg, key: &str, value: &Value) -> Result<Vec<String>, &'static str> {
    let is_flag = matches!(arg.get_action(), ArgAction::SetTrue);
    let may_be_bare = is_flag || arg.get_num_args().is_some_and(|number| number.min_values() == 0);
    match value {
        Value::Flag(is_set) if may_be_bare => Ok(is_set.then(|| format!("--{key}")).into_iter().collect()),
        Value::Flag(_) => Err("it takes a value, not true or false"),
        Value::One(_) | Value::Many(_) if is_flag => Err("it is true or false"),
        Value::One(text) => Ok(vec![format!("--{key}={text}")]),
        Value::Many(texts) if matches!(arg.get_action(), ArgAction::Append) => {
            Ok(texts.iter().map(|text| format!("--{key}={text}")).collect())
        }
        Value::Many(_) => Err("it takes one value, not a list"),
    }
}

/// Check the tables of `controller` and `device` in a file, and return what they set. `command` is the whole command.
pub(crate) fn check(file: &ConfigFile, command: &Command) -> Result<Vec<Setting>, Failure> {
    let mut all = Vec::new();
    for section in [Section::Controller, Section::Device] {
        let settings = settings(file, section, command).map_err(Failure::input)?;
        let options = settings.iter().flat_map(|setting| setting.options.iter().map(String::as_str));
        let mut args: Vec<_> = ["sumac", section.name()].into_iter().chain(options).collect();
        if section == Section::Device && !settings.iter().any(|setting| setting.key == "name") {
            args.push("--name=device");
        }
        if let Err(error) = command.clone().try_get_matches_from(args) {
            let named = settings.iter().find(|setting| setting.is_named_by(&error));
            let refusal = named.map(|setting| setting.refusal(file.path(), &error));
            return Err(Failure::Input(refusal.unwrap_or_else(|| anyhow!("{}: {error}", file.path().display()))));
        }
        all.extend(settings);
    }
    Ok(all)
}

impl Setting {
    /// Return its name with its table's.
    pub(crate) fn name(&self) -> String {
        format!("{} {}", self.section, self.key)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::args::Cli;
    use std::io::Write;

    /// Parse a command line under a file that an option or the environment names, and with these variables set.
    fn parsed(line: &str, file: &str, variables: &[&str]) -> Result<String, String> {
        let mut at = tempfile::NamedTempFile::new().expect("a file");
        at.write_all(file.as_bytes()).expect("written");
        let args = line.split(' ').map(OsString::from).collect();
        let is_set = |name: &OsStr| variables.iter().any(|variable| name == *variable);
        match complete::<Cli>(args, Some(at.path().into()), is_set) {
            Ok(cli) => Ok(format!("{:?}", cli.command)),
            Err(ParseError::Usage(error)) => Err(format!("usage: {error}")),
            Err(ParseError::File(error)) => {
                assert!(error.to_string().contains(at.path().to_str().expect("UTF-8")), "{error}");
                Err(format!("file: {error}"))
            }
        }
    }

    #[test]
    fn option_beats_variable_beats_file_beats_default() {
        let file = "[controller]\nlease = 7\n[device]\nname = 'leaf0'\nshards = 3\nbind = '127.0.0.9'\nno-shm = true";
        let controller = |line: &str| parsed(line, file, &[]).expect("valid");
        assert!(controller("sumac controller").contains("lease_s: 7"));
        assert!(controller("sumac controller --lease 8").contains("lease_s: 8"));
        assert!(controller("sumac -v controller --lease=8").contains("lease_s: 8"));
        assert!(parsed("sumac controller", "[device]\nshards = 3", &[]).expect("valid").contains("lease_s: 30"));
        let device = |line: &str, variables: &[&str]| parsed(line, file, variables).expect("valid");
        let by_file = device("sumac device", &[]);
        for set in ["name: \"leaf0\"", "shards: 3", "bind: Some(\"127.0.0.9\")", "no_shm: true"] {
            assert!(by_file.contains(set), "{set}: {by_file}");
        }
        assert!(device("sumac device --name leaf1", &[]).contains("name: \"leaf1\""));
        assert!(!device("sumac device", &["SUMAC_BIND"]).contains("127.0.0.9"), "the variable beats the file");
    }

    #[test]
    fn each_variable_of_the_key_beats_the_file() {
        let file = "[device]\nname = 'leaf0'\nkey-file = 'a.key'";
        let is_by_file = |variables: &[&str]| parsed("sumac device", file, variables).expect("valid").contains("a.key");
        assert!(is_by_file(&[]));
        assert!(!is_by_file(&["SUMAC_KEY_FILE"]) && !is_by_file(&["SUMAC_KEY"]));
    }

    #[test]
    fn lists_and_options_without_value_are_set_by_the_file() {
        let file = "[controller]\nquota = ['ml=groups:2', 'x=slots:4']\n[device]\nname = 'd'\nno-shm = false\n\
                    data-port = 7000\nadvertise = ['10.0.0.1:1']";
        let quotas = parsed("sumac controller", file, &[]).expect("valid");
        assert!(quotas.contains("\"ml\"") && quotas.contains("\"x\""), "{quotas}");
        let given = parsed("sumac controller --quota y=groups:1", file, &[]).expect("valid");
        assert!(given.contains("\"y\"") && !given.contains("\"ml\""), "a list is replaced as a whole: {given}");
        // An option that needs another one may be given where the file has that.
        let device = parsed("sumac device --advertise 10.0.0.2:2", file, &[]).expect("valid");
        assert!(
            device.contains("7000") && device.contains("10.0.0.2:2") && device.contains("no_shm: false"),
            "{device}"
        );
    }

    #[test]
    fn invalid_setting_error_names_the_key_and_the_reason() {
        for (line, file, named) in [
            ("controller", "[controller]\nlease = 0", "[controller] lease: invalid value '0'"),
            ("controller", "[controller]\nlease = true", "[controller] lease: it takes a value, not true or false"),
            ("controller", "[controller]\nlease = [1]", "[controller] lease: it takes one value, not a list"),
            ("controller", "[controller]\nleese = 1", "[controller] has no key \"leese\"; did you mean \"lease\"?"),
            ("controller", "[controller]\nkey = 'x'", "a key is never in this file; name its file: keys"),
            ("controller", "[controller]\nconfig = 'x'", "[controller] has no key \"config\""),
            ("controller", "[controller]\nprefer-tree = true", "has no key \"prefer-tree\""),
            ("controller --standby a", "[controller]\npeer = 'b'", "[controller] peer: the argument '"),
            ("device --name d", "[device]\nno-shm = 'yes'", "[device] no-shm: it is true or false"),
            ("device --name d", "[device]\nkey = 'x'", "a key is never in this file; name its file: key-file"),
            ("device --name d", "[device", ":1: unclosed table"),
        ] {
            let error = parsed(&format!("sumac {line}"), file, &[]).expect_err(file);
            assert!(error.starts_with("file: ") && error.contains(named), "{file}: {error}");
        }
    }

    #[test]
    fn error_of_the_command_line_stays_one_of_usage() {
        let file = "[controller]\nlease = 7";
        for line in ["sumac controller --lease 0", "sumac controller --leese 1", "sumac device", "sumac"] {
            assert!(parsed(line, file, &[]).expect_err(line).starts_with("usage: "), "{line}");
        }
        assert!(parsed("sumac controller --help", "[controller", &[]).expect_err("help").contains("--lease"));
        assert!(parsed("sumac doctor", "[controller", &[]).is_ok(), "other commands read no file");
    }
}

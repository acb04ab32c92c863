//! What the table `[rank]` of a configuration file sets, where the environment does not.

use super::super::launcher::{LaunchError, Placement};
use super::super::{JoinConfig, JoinError};
use super::{read, variable};
use crate::config_file::{ConfigFile, ConfigFileError, Section, Setting, Value};

/// A setting of `[rank]`.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct FileSetting {
    /// The key.
    pub key: String,
    /// The variable that sets the same.
    pub variable: &'static str,
    /// The value, as the variable would have it.
    pub value: String,
    /// The variable of this process that overrides it, if one does.
    pub overridden_by: Option<&'static str>,
}

/// Return what `[rank]` of a configuration file sets.
///
/// # Errors
/// An unknown key, or a value of a wrong type.
pub fn file_settings(file: &ConfigFile) -> Result<Vec<FileSetting>, ConfigFileError> {
    settings_under(file, &variable)
}

/// Return what `[rank]` of a configuration file sets under this environment.
fn settings_under(
    file: &ConfigFile,
    environment: &impl Fn(&str) -> Option<String>,
) -> Result<Vec<FileSetting>, ConfigFileError> {
    let keys = RANK_VARIABLES.map(key_of);
    let known: Vec<_> = keys.iter().map(String::as_str).collect();
    let settings = file.settings(Section::Rank, &known).map_err(|error| match error {
        ConfigFileError::Key { key, .. } if PROCESS_VARIABLES.iter().any(|variable| key_of(variable) == key) => {
            let why = format!("it is only read from the environment; set SUMAC_{}", key.to_uppercase());
            file.invalid(Section::Rank, &key, why)
        }
        other => other,
    })?;
    let settings = settings.into_iter().filter_map(|Setting { key, value }| {
        let variable = RANK_VARIABLES.into_iter().find(|variable| key_of(variable) == key)?;
        let others = OVERRIDING.iter().filter(|(overridden, _)| *overridden == variable).map(|(_, other)| *other);
        let overridden_by = [variable].into_iter().chain(others).find(|name| environment(name).is_some());
        let value = match value {
            Value::Flag(is_set) => Ok(if is_set { "1" } else { "0" }.to_owned()),
            Value::One(text) => Ok(text),
            Value::Many(_) => Err(file.invalid(Section::Rank, &key, "it takes one value, not a list")),
        };
        Some(value.map(|value| FileSetting { key, variable, value, overridden_by }))
    });
    settings.collect()
}

/// Return the key of `[rank]` that stands for a variable.
pub(super) fn key_of(variable: &str) -> String {
    variable.trim_start_matches("SUMAC_").to_lowercase()
}

/// Read the configuration of a rank from its environment and, where that sets nothing, a file.
pub(super) fn read_with(
    file: Option<&ConfigFile>,
    placement: Result<Placement, LaunchError>,
    environment: impl Fn(&str) -> Option<String>,
) -> Result<JoinConfig, JoinError> {
    let Some(file) = file else { return read(placement, environment) };
    let mut settings = settings_under(file, &environment)?;
    settings.retain(|setting| setting.overridden_by.is_none());
    let setting = |name: &str| settings.iter().find(|setting| setting.variable == name);
    let variable = |name: &str| environment(name).or_else(|| setting(name).map(|setting| setting.value.clone()));
    read(placement, variable).map_err(|error| match error {
        JoinError::Environment { name, why } if setting(name).is_some() => {
            file.invalid(Section::Rank, &key_of(name), why).into()
        }
        other => other,
    })
}

/// Variables that a key of `[rank]` in a configuration file stands for.
pub(super) const RANK_VARIABLES: [&str; 32] = [
    "SUMAC_ALGO",
    "SUMAC_BIND",
    "SUMAC_CONTROLLER",
    "SUMAC_DEADLINE",
    "SUMAC_EMBEDDED_CONTROLLER",
    "SUMAC_HIERARCHICAL",
    "SUMAC_HOST",
    "SUMAC_HYBRID",
    "SUMAC_IFNAME",
    "SUMAC_JOIN_TIMEOUT",
    "SUMAC_KEY_FILE",
    "SUMAC_MEMORY",
    "SUMAC_ORDER",
    "SUMAC_PROGRESS",
    "SUMAC_RAB",
    "SUMAC_RECOVER",
    "SUMAC_SHAPE",
    "SUMAC_STRAGGLER",
    "SUMAC_TENANT",
    "SUMAC_TRAFFIC_CLASS",
    "SUMAC_TRANSPORT",
    "SUMAC_TREES",
    "SUMAC_UDP_GRO",
    "SUMAC_UDP_GSO",
    "SUMAC_UDP_MAX_PACKET",
    "SUMAC_UDP_PEER",
    "SUMAC_UDP_RECEIVE_BUFFER",
    "SUMAC_UDP_SEND_BUFFER",
    "SUMAC_UDP_SPIN_US",
    "SUMAC_VERBS",
    "SUMAC_WAIT_FOR_TREE",
    "SUMAC_WAIT_POLICY",
];

/// Variables of ranks that belong to a process, not to its host: no file sets them.
const PROCESS_VARIABLES: [&str; 7] =
    ["SUMAC_DEVICE_USER", "SUMAC_JOB", "SUMAC_LOCAL_RANK", "SUMAC_LOG", "SUMAC_PORT", "SUMAC_RANK", "SUMAC_WORLD"];

/// Variables that a file may set, each with another one that sets the same and so overrides the file.
const OVERRIDING: [(&str, &str); 3] =
    [("SUMAC_KEY_FILE", "SUMAC_KEY"), ("SUMAC_TRANSPORT", "SUMAC_ATTACH"), ("SUMAC_RECOVER", "SUMAC_REPAIR")];

#[cfg(test)]
pub(super) mod tests {
    use super::super::super::launcher;
    use super::super::KNOWN;
    use super::*;
    use crate::controller::proto::Transport;
    use std::path::Path;

    /// Read variables and a file's table `[rank]`.
    pub(in super::super) fn config_with(variables: &[(&str, &str)], table: &str) -> Result<JoinConfig, JoinError> {
        let all = [("RANK", "1"), ("WORLD_SIZE", "2")].iter().chain(variables).rev();
        let variable = |name: &str| all.clone().find(|(known, _)| *known == name).map(|(_, value)| (*value).to_owned());
        let file = ConfigFile::parse(Path::new("a.toml"), &format!("[rank]\n{table}"))?;
        read_with(Some(&file), launcher::read(variable, || None).placement, variable)
    }

    #[test]
    fn environment_beats_the_file_and_the_file_beats_the_defaults() {
        let deadline = |variables: &[_], table| config_with(variables, table).expect("valid").deadline.as_secs();
        assert_eq!(deadline(&[], ""), 60);
        assert_eq!(deadline(&[], "deadline = 7"), 7);
        assert_eq!(deadline(&[("SUMAC_DEADLINE", "8")], "deadline = 7"), 8);
        assert_eq!(deadline(&[("SUMAC_DEADLINE", "8")], ""), 8);
        // An overridden value is not even parsed.
        assert_eq!(deadline(&[("SUMAC_DEADLINE", "8")], "deadline = 'soon'"), 8);
        let old_name = config_with(&[("SUMAC_ATTACH", "udp")], "transport = 'shm'").expect("valid");
        assert_eq!(old_name.transport, Transport::Udp);
        let old_name = config_with(&[("SUMAC_REPAIR", "0")], "recover = true").expect("valid");
        assert!(!old_name.recover);
        let key = format!("sumac-key-v1 0000000000000009 {}\n", "07".repeat(32));
        assert!(config_with(&[("SUMAC_KEY", &key)], "key_file = '/nonexistent'").expect("valid").key.is_some());
    }

    #[test]
    fn controller_in_the_file_beats_master_addr_and_not_the_variable() {
        let port = |variables: &[_]| {
            let all: Vec<_> =
                [("MASTER_ADDR", "10.0.0.1"), ("SUMAC_PORT", "9")].iter().chain(variables).copied().collect();
            config_with(&all, "controller = '10.0.0.2:8'").expect("valid").controller.to_string()
        };
        assert_eq!(port(&[]), "10.0.0.2:8");
        assert_eq!(port(&[("SUMAC_CONTROLLER", "10.0.0.3:7")]), "10.0.0.3:7");
    }

    #[test]
    fn invalid_setting_error_names_file_key_and_remedy() {
        for (table, named) in [
            ("deadline = 'soon'", "a.toml: [rank] deadline: \"soon\" is not a number of seconds"),
            ("recover = 2", "a.toml: [rank] recover: \"2\" is not one of 1, 0"),
            ("dead_line = 1", "a.toml: [rank] has no key \"dead_line\"; did you mean \"deadline\"?"),
            ("join-timeout = 1", "did you mean \"join_timeout\"?"),
            ("job = 'j'", "a.toml: [rank] job: it is only read from the environment; set SUMAC_JOB"),
            ("rank = 0", "set SUMAC_RANK"),
            ("ifname = ['eth', 'ib']", "[rank] ifname: it takes one value, not a list"),
            ("key_file = '/nonexistent/key'", "a.toml: [rank] key_file: "),
            ("key = 'x'", "[rank] key: a key is never in this file; name its file: key_file"),
        ] {
            let error = config_with(&[], table).expect_err(table).to_string();
            assert!(error.contains(named), "{table}: {error}");
        }
        let variable = config_with(&[("SUMAC_ORDER", "x")], "deadline = 1").expect_err("invalid").to_string();
        assert!(variable.starts_with("environment variable SUMAC_ORDER"), "{variable}");
    }

    #[test]
    fn each_known_variable_is_of_the_file_of_the_process_or_of_the_command() {
        let command =
            ["SUMAC_CARDS", "SUMAC_CONFIG", "SUMAC_KEY", "SUMAC_OPERATOR_KEY_FILE", "SUMAC_SSH", "SUMAC_SUPERVISOR"];
        let mut all = [&RANK_VARIABLES[..], &PROCESS_VARIABLES, &command].concat();
        all.sort_unstable();
        assert_eq!(all, KNOWN);
    }
}

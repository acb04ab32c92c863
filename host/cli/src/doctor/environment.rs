//! `sumac doctor --env`: what [`JoinConfig::from_env`] makes of the environment, as a program started here would.
//!
//! Run it under a launcher in place of the program: `mpirun -np 4 sumac doctor --env`. Values of variables that name a
//! secret are not shown. All tables of a configuration file are checked and listed, also those of `controller` and
//! `device`.

use crate::config;
use crate::exit::Failure;
use clap::Command;
use serde::Serialize;
use std::io::{self, Write};
use std::path::Path;
use sumac::JoinConfig;
use sumac::comm::environment::file_settings;
use sumac::comm::launcher::{self, Placement, Reading, Role, Variable};
use sumac::config_file::{ConfigFile, Section};
use sumac::controller::first_reachable;
use sumac::local_address::choose;

/// Where a value comes from.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
enum Origin {
    Environment,
    File,
}

/// A variable, or a setting of the configuration file.
#[derive(Debug, PartialEq, Eq, Serialize)]
struct Row {
    name: String,
    value: String,
    source: Origin,
    /// The launcher that it belongs to; `None` if it is an option.
    launcher: Option<String>,
    /// What it says, for variables of launchers.
    role: Option<&'static str>,
    /// Whether the result comes from it.
    used: bool,
}

/// The result, as JSON.
#[derive(Debug, Default, PartialEq, Eq, Serialize)]
struct Report {
    variables: Vec<Row>,
    launcher: Option<String>,
    rank: Option<u32>,
    world: Option<u32>,
    local_rank: Option<u32>,
    job: Option<String>,
    controller: Option<String>,
    address: Option<String>,
    error: Option<String>,
    config_file: Option<String>,
}

/// Print what was read. An environment that does not describe a rank is invalid input.
pub(super) fn run(json: bool, path: Option<&Path>, command: &Command) -> Result<(), Failure> {
    let file = path.map_or_else(ConfigFile::from_env, |path| ConfigFile::read(path).map(Some));
    let file = file.map_err(Failure::input)?;
    let settings = file.as_ref().map(|file| of_file(file, command)).transpose()?.unwrap_or_default();
    let config = JoinConfig::from_env_and_file(file.as_ref());
    let address = config.as_ref().ok().map(|config| {
        let JoinConfig { controller, controller_alternatives, bind, interfaces, .. } = config;
        choose(first_reachable(*controller, controller_alternatives), *bind, interfaces.as_ref())
    });
    let address = address.transpose();
    let options = std::env::vars_os().filter_map(|(name, value)| Some((name.into_string().ok()?, value)));
    let options = options.map(|(name, value)| (name, value.to_string_lossy().into_owned()));
    let mut report = Report::new(launcher::from_env(), &config, options.collect(), settings);
    report.config_file = file.map(|file| file.path().display().to_string());
    match &address {
        Ok(address) => report.address = address.map(|address| address.to_string()),
        Err(error) => report.error = Some(error.to_string()),
    }
    let mut out = io::stdout().lock();
    if json {
        serde_json::to_writer_pretty(&mut out, &report).map_err(io::Error::from)?;
        writeln!(out)?;
    } else {
        report.write(&mut out)?;
    }
    out.flush()?;
    config.map_err(Failure::input)?;
    address.map(|_| ()).map_err(Failure::input)
}

/// Return what a configuration file sets, after a check of all its tables.
fn of_file(file: &ConfigFile, command: &Command) -> Result<Vec<Row>, Failure> {
    let row = |name: String, value: String, is_overridden: bool| Row {
        value: shown("", value),
        name,
        source: Origin::File,
        launcher: None,
        role: None,
        used: !is_overridden,
    };
    let options = config::check(file, command)?.into_iter();
    let options = options.map(|option| row(option.name(), option.value.to_string(), option.overridden_by().is_some()));
    let ranks = file_settings(file).map_err(Failure::input)?.into_iter().map(|setting| {
        row(format!("{} {}", Section::Rank, setting.key), setting.value, setting.overridden_by.is_some())
    });
    Ok(options.chain(ranks).collect())
}

impl Report {
    fn new(
        reading: Reading,
        config: &Result<JoinConfig, sumac::JoinError>,
        mut environment: Vec<(String, String)>,
        settings: Vec<Row>,
    ) -> Self {
        let mut variables: Vec<Row> = reading.variables.iter().map(Row::of_launcher).collect();
        environment.sort();
        let is_option = |name: &str| name.starts_with("SUMAC_") || name == "MASTER_ADDR";
        let is_listed = |rows: &[Row], name: &str| rows.iter().any(|row| row.name == name);
        for (name, value) in environment {
            if is_option(&name) && !is_listed(&variables, &name) {
                let (value, source) = (shown(&name, value), Origin::Environment);
                variables.push(Row { value, name, source, launcher: None, role: None, used: true });
            }
        }
        variables.extend(settings);
        let mut report = Self { variables, ..Self::default() };
        if let Ok(Placement { launcher, rank, world, local_rank, job, .. }) = reading.placement {
            report.launcher = Some(launcher.to_string());
            (report.rank, report.world, report.local_rank, report.job) =
                (Some(rank), Some(world), local_rank, Some(shown("job", job)));
        }
        match config {
            Ok(config) => report.controller = Some(config.controller.to_string()),
            Err(error) => report.error = Some(error.to_string()),
        }
        report
    }

    fn write(&self, out: &mut impl Write) -> io::Result<()> {
        let width = |of: fn(&Row) -> usize| self.variables.iter().map(of).max().unwrap_or(0);
        let (name, value) = (width(|row| row.name.len()).max(8), width(|row| row.value.chars().count()).max(5));
        writeln!(out, "{:<name$}  {:<value$}  {:<10}  used", "variable", "value", "from")?;
        for row in &self.variables {
            let used = if row.used { "yes" } else { "no" };
            let from = match (&row.launcher, row.source) {
                (Some(launcher), _) => launcher,
                (None, Origin::Environment) => "option",
                (None, Origin::File) => "file",
            };
            writeln!(out, "{:<name$}  {:<value$}  {from:<10}  {used}", row.name, row.value)?;
        }
        self.config_file
            .iter()
            .try_for_each(|path| writeln!(out, "file {path}; what is not listed has its default"))?;
        let Self { launcher: Some(launcher), rank: Some(rank), world: Some(world), job: Some(job), .. } = self else {
            return Ok(());
        };
        let local = self.local_rank.map_or_else(String::new, |local| format!(", local rank {local}"));
        writeln!(out, "rank {rank} of {world}{local}, job {job}, by {launcher}")?;
        self.controller.iter().try_for_each(|controller| writeln!(out, "controller {controller}"))?;
        self.address.iter().try_for_each(|address| writeln!(out, "this host's address {address}"))
    }
}

impl Row {
    fn of_launcher(variable: &Variable) -> Self {
        Self {
            name: variable.name.to_owned(),
            value: shown(variable.name, variable.value.clone()),
            source: Origin::Environment,
            launcher: Some(variable.launcher.to_string()),
            role: match variable.role {
                Role::Rank => Some("rank"),
                Role::World => Some("world"),
                Role::LocalRank => Some("local_rank"),
                Role::Job => Some("job"),
                _ => None,
            },
            used: variable.is_used,
        }
    }
}

/// Return a value as it may be printed: no secret, and no control characters, which a terminal would act on.
fn shown(name: &str, value: String) -> String {
    if ["KEY", "SECRET", "TOKEN"].iter().any(|word| name.contains(word)) {
        return "(hidden)".into();
    }
    value.chars().map(|c| if c.is_control() { char::REPLACEMENT_CHARACTER } else { c }).collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::net::SocketAddr;

    #[test]
    fn report_lists_variables_with_their_launcher_and_hides_secrets() {
        let mpi = [("PMI_RANK", "1"), ("PMI_SIZE", "2"), ("SLURM_PROCID", "0"), ("SUMAC_JOB", "j\u{1b}[2J")];
        let all: Vec<_> =
            mpi.iter().chain(&[("SUMAC_KEY", "0123"), ("MASTER_ADDR", "n1"), ("HOME", "/root")]).collect();
        let variable = |name: &str| all.iter().find(|(known, _)| *known == name).map(|(_, value)| (*value).to_owned());
        let environment = all.iter().map(|(name, value)| ((*name).to_owned(), (*value).to_owned())).collect();
        let config = Ok(JoinConfig::new(SocketAddr::from(([10, 0, 0, 1], 7847)), "j", 1, 2));
        let report = Report::new(launcher::read(variable, || None), &config, environment, vec![]);
        let mut text = Vec::new();
        report.write(&mut text).expect("memory");
        let expected = "\
variable      value     from        used
SUMAC_JOB     j\u{fffd}[2J     SUMAC_*     yes
PMI_RANK      1         PMI         yes
PMI_SIZE      2         PMI         yes
SLURM_PROCID  0         Slurm       no
MASTER_ADDR   n1        option      yes
SUMAC_KEY     (hidden)  option      yes
rank 1 of 2, job j\u{fffd}[2J, by PMI
controller 10.0.0.1:7847
";
        assert_eq!(String::from_utf8(text).expect("UTF-8"), expected);
    }
}

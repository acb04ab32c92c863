//! Start-up as process 1 or as a service, up to a running supervisor.

use crate::config::{CommandLine, ConfigError, PREFIX, Settings};
use crate::log::{LINUX_UP, Log};
use crate::network::{self, NetworkError};
use crate::store::{STORE_LEN_BYTES, Store, StoreError};
use crate::supervisor;
use crate::system;
use std::convert::Infallible;
use std::fs;
use std::io;
use std::path::Path;
use std::time::Duration;
use sumac_firmware::slots::FileBlocks;
use thiserror::Error;

/// How long to wait for the store's device to appear.
const STORE_LIMIT: Duration = Duration::from_secs(10);

/// Why the agent failed.
#[derive(Debug, Error)]
#[non_exhaustive]
pub enum AgentError {
    /// A kernel file system could not be mounted.
    #[error("cannot mount {target}: {source}")]
    Mount {
        /// The mount point.
        target: &'static str,
        /// The system's error.
        source: io::Error,
    },
    /// The configuration is invalid or incomplete.
    #[error("{0}")]
    Config(#[from] ConfigError),
    /// The network of the data ports could not be set up.
    #[error("{0}")]
    Network(#[from] NetworkError),
    /// A file could not be read, or the runtime not be started.
    #[error("{what}: {source}")]
    System {
        /// The operation.
        what: &'static str,
        /// The system's error.
        source: io::Error,
    },
    /// The configuration store failed.
    #[error("{path}: {source}")]
    Store {
        /// The store.
        path: String,
        /// The error.
        source: StoreError<io::Error>,
    },
}

/// Run as process 1. Never returns: an error restarts the machine.
pub fn init() -> ! {
    let log = Log::default();
    let (panicked, hook) = (log.clone(), std::panic::take_hook());
    std::panic::set_hook(Box::new(move |panic| {
        hook(panic);
        // A panic of any thread restarts the machine: the agent cannot run without it.
        system::restart(&panicked, "the agent panicked");
    }));
    match boot(&log) {
        Ok(never) => match never {},
        Err(error) => system::restart(&log, &error.to_string()),
    }
}

fn boot(log: &Log) -> Result<Infallible, AgentError> {
    system::mount_all().map_err(|(target, source)| AgentError::Mount { target, source })?;
    system::open_console();
    let modules = system::load_modules(log);
    log.info(LINUX_UP);
    log.info(&format!("agent {}, {modules} modules", env!("CARGO_PKG_VERSION")));
    let line = fs::read_to_string("/proc/cmdline");
    let line = line.map_err(|source| AgentError::System { what: "/proc/cmdline", source })?;
    let line = CommandLine::parse(line.split_whitespace(), PREFIX)?;
    let mut settings = settings(&line, log);
    let config = settings.config()?;
    let ip = network::configure(&config, log)?;
    settings.set_ip(ip);
    supervise(log, &settings)
}

/// Serve with these settings on a machine that is set up already.
///
/// # Errors
/// [`AgentError`].
pub fn serve<'a>(words: impl IntoIterator<Item = &'a str>) -> Result<Infallible, AgentError> {
    let log = Log::new([]);
    let mut settings = settings(&CommandLine::parse(words, "")?, &log);
    let ip = network::existing_address(&settings.config()?)?;
    settings.set_ip(ip);
    supervise(&log, &settings)
}

fn supervise(log: &Log, settings: &Settings) -> Result<Infallible, AgentError> {
    supervisor::supervise(log, settings).map_err(|source| AgentError::System { what: "the runtime", source })
}

/// Return the settings of the command line, and of the store where the command line has none. A store that cannot be
/// used is logged and counts as empty, because the command line may suffice.
fn settings(line: &CommandLine, log: &Log) -> Settings {
    let Some(path) = &line.store else { return line.settings.clone() };
    let path = Path::new(path);
    let opened =
        wait_for(path).and_then(|()| open(path)).and_then(|mut store| Ok((stored(&mut store, path, log)?, store)));
    let (stored, mut store) = match opened {
        Ok(opened) => opened,
        Err(error) => {
            log.warn(&format!("store: {error}"));
            return line.settings.clone();
        }
    };
    let settings = stored.clone().overridden_by(&line.settings);
    if line.keep && settings != stored {
        match store.save(&settings.to_lines()) {
            Ok(state) => log.info(&format!("store: {state}")),
            Err(error) => log.warn(&format!("store: {error}")),
        }
    }
    settings
}

fn wait_for(path: &Path) -> Result<(), AgentError> {
    match system::wait_for_file(path, STORE_LIMIT) {
        Ok(true) => Ok(()),
        Ok(false) => Err(failure(path)(StoreError::Device(io::ErrorKind::NotFound.into()))),
        Err(error) => Err(failure(path)(StoreError::Device(error))),
    }
}

fn failure(path: &Path) -> impl FnOnce(StoreError<io::Error>) -> AgentError + use<> {
    let path = path.display().to_string();
    move |source| AgentError::Store { path, source }
}

fn open(path: &Path) -> Result<Store<FileBlocks>, AgentError> {
    let blocks = FileBlocks::open(path).map_err(|error| failure(path)(StoreError::Device(error)))?;
    Store::open(blocks).map_err(failure(path))
}

fn stored(store: &mut Store<FileBlocks>, path: &Path, log: &Log) -> Result<Settings, AgentError> {
    let (text, state) = store.load().map_err(failure(path))?;
    log.info(&format!("store: {state}"));
    Ok(match text.as_deref().map(Settings::from_lines) {
        Some(Ok(settings)) => settings,
        // Intact, but written by another version of the agent.
        Some(Err(error)) => {
            log.warn(&format!("store: {error}"));
            Settings::default()
        }
        None => Settings::default(),
    })
}

/// Return the contents of a store, and which of its copies are intact.
///
/// # Errors
/// [`AgentError`].
pub fn show_store(path: &Path) -> Result<String, AgentError> {
    let (text, state) = open(path)?.load().map_err(failure(path))?;
    Ok(format!("# {state}\n{}", text.unwrap_or_default()))
}

/// Write these settings to a store, creating the file if necessary.
///
/// # Errors
/// [`AgentError`]; nothing is written if a setting is invalid.
pub fn write_store<'a>(path: &Path, words: impl IntoIterator<Item = &'a str>) -> Result<String, AgentError> {
    let settings = Settings::from_words(words)?;
    let mut store = if path.exists() {
        open(path)?
    } else {
        let blocks =
            FileBlocks::create(path, STORE_LEN_BYTES).map_err(|error| failure(path)(StoreError::Device(error)))?;
        Store::open(blocks).map_err(failure(path))?
    };
    let state = store.save(&settings.to_lines()).map_err(failure(path))?;
    Ok(format!("# {state}\n{}", settings.to_lines()))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn silent_log() -> Log {
        Log::new([])
    }

    fn line(words: &[&str]) -> CommandLine {
        CommandLine::parse(words.iter().copied(), "").expect("a command line")
    }

    #[test]
    fn command_line_overrides_the_store_and_is_saved_with_keep() {
        let folder = tempfile::tempdir().expect("a folder");
        let path = folder.path().join("store");
        write_store(&path, ["name=kept", "controller=10.0.0.1:1"]).expect("written");
        let store = format!("store={}", path.display());
        let text = |words: &[&str]| settings(&line(words), &silent_log()).to_lines();
        assert_eq!(text(&[&store]), "name=kept\ncontroller=10.0.0.1:1\n");
        assert_eq!(text(&[&store, "name=other"]), "name=other\ncontroller=10.0.0.1:1\n");
        assert_eq!(text(&[&store]), "name=kept\ncontroller=10.0.0.1:1\n", "without keep=yes the store is unchanged");
        text(&[&store, "name=other", "keep=yes"]);
        assert_eq!(text(&[&store]), "name=other\ncontroller=10.0.0.1:1\n");
        let shown = show_store(&path).expect("readable");
        assert!(shown.starts_with("# A write 1, B write 2, B is current\nname=other\n"), "{shown}");
        // The current copy is damaged: the other one is used.
        let mut bytes = fs::read(&path).expect("readable");
        bytes[4096 + 100] ^= 1;
        fs::write(&path, &bytes).expect("written");
        assert_eq!(text(&[&store]), "name=kept\ncontroller=10.0.0.1:1\n");
        // Both are damaged: only the command line is used.
        bytes[100] ^= 1;
        fs::write(&path, &bytes).expect("written");
        assert_eq!(text(&[&store, "name=alone"]), "name=alone\n");
    }

    #[test]
    fn unusable_store_counts_as_empty_and_is_not_written() {
        let folder = tempfile::tempdir().expect("a folder");
        let short = folder.path().join("short");
        fs::write(&short, [0; 100]).expect("written");
        let store = format!("store={}", short.display());
        assert_eq!(settings(&line(&[&store, "name=d"]), &silent_log()).to_lines(), "name=d\n");
        assert!(write_store(&short, ["name=d"]).is_err());
        let error = write_store(&folder.path().join("new"), ["nome=d"]).expect_err("no key").to_string();
        assert!(error.contains("nome") && !folder.path().join("new").exists(), "{error}");
    }
}

//! Start-up as process 1 or as a service, up to a running supervisor.

use crate::config::{CommandLine, ConfigError, PREFIX, Settings, redact};
use crate::install::{self, InstallError};
use crate::log::{LINUX_UP, Log};
use crate::network::{self, NetworkError};
use crate::receive::Installer;
use crate::store::{STORE_LEN_BYTES, Store, StoreError};
use crate::supervisor::{self, Observers};
use crate::system;
use crate::trial;
use crate::update::{self, SlotsError, Trial};
use std::fs;
use std::io;
use std::path::Path;
use std::time::Duration;
use sumac_firmware::slots::{FileBlocks, HEALTHY_AFTER, Policy};
use sumac_firmware::tail::Fifo;
use sumac_hal::ctrl::secure::{Key, KeyFileError, check_private, read_key};
use sumac_hal::time::Instant;
use thiserror::Error;
use zeroize::Zeroizing;

/// How long to wait for the store's device to appear.
const STORE_LIMIT: Duration = Duration::from_secs(10);

/// How long the host may pause while it writes a payload: reads return nothing after half a second each on a card.
const FIFO_PAUSE: Duration = Duration::from_millis(100);
const FIFO_PAUSES_MAX: u32 = 100;

/// The boot FIFO of a BlueField card (Linux, drivers/platform/mellanox/mlxbf-bootctl.c: `bootfifo`).
const BOOT_FIFO: &str = "/sys/bus/platform/devices/MLNXBF04:00/bootfifo";

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
    /// The slots of updates cannot be used.
    #[error("{0}")]
    Slots(#[from] SlotsError),
    /// The slots of a version that a boot entry has started are those of its disk.
    #[error("sumac.slots= is for a service; this version was started from a slot of the card's disk: remove it")]
    SlotsOfService,
    /// What follows the stream was not installed, or no slot started.
    #[error("{0}")]
    Install(Box<InstallError>),
    /// The device's key, or a store with one, cannot be used.
    #[error("{0}")]
    Key(#[from] KeyFileError),
    /// Process 1 cannot read a key from a file.
    #[error(
        "sumac.key-file={0}: files of the initramfs are in the image, for all to read; send the key \
         with `sumac flash --key-file`, or enroll it in the store"
    )]
    KeyInImage(String),
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
        // An update, or the end of its trial.
        Ok(()) => system::restart_now(&log),
        Err(error) => system::restart(&log, &error.to_string()),
    }
}

fn boot(log: &Log) -> Result<(), AgentError> {
    system::mount_all().map_err(|(target, source)| AgentError::Mount { target, source })?;
    system::open_console();
    let modules = system::load_modules(log);
    system::mount_variables(log);
    system::mount_debugfs();
    log.info(LINUX_UP);
    log.info(&format!("agent {}, {modules} modules", env!("CARGO_PKG_VERSION")));
    let line = fs::read_to_string("/proc/cmdline");
    let text = line.map_err(|source| AgentError::System { what: "/proc/cmdline", source })?;
    let mut line = CommandLine::parse(text.split_whitespace(), PREFIX)?;
    if let Some(file) = line.key_file {
        return Err(AgentError::KeyInImage(file));
    }
    let mut observers = Observers::default();
    let (mut key, mut slot_disk) = (None, None);
    if let Some(slot) = line.slot {
        let running = install::start_from(slot, log).map_err(|error| AgentError::Install(Box::new(error)))?;
        let Some(running) = running else { system::restart_now(log) };
        let store = running.disk.store_path();
        line.store.get_or_insert_with(|| store.display().to_string());
        slot_disk = Some(running.disk.path.clone());
        let installer = Installer {
            disk: running.disk.clone(),
            slot,
            fifo: line.boot_fifo.as_deref().unwrap_or(BOOT_FIFO).into(),
            line: line.clone(),
            command_line: text.clone(),
        };
        let limits = (line.trial, line.confirm_after.unwrap_or(HEALTHY_AFTER));
        observers.health = Some(trial::watch(running, limits, installer, &observers.readiness, log));
    } else {
        key = behind_stream(&line, &text, log)?;
        log.info("runs from memory, until the next reset");
    }
    let mut settings = settings(&line, log)?;
    if let Some(key) = key {
        keep_key(&line, &key, log);
        settings.key = Some(key);
    }
    let config = settings.config()?;
    if line.slot.is_some() && config.slots.is_some() {
        return Err(AgentError::SlotsOfService);
    }
    match slot_disk {
        Some(disk) if config.update_key.is_some() => settings.set_slots_of(&disk),
        Some(_) => log.warn("no updates over the network: there is no sumac.update-key="),
        None => {}
    }
    let ip = network::configure(&config, log)?;
    settings.set_ip(ip);
    supervise(log, settings, observers)
}

/// Serve with these settings on a machine that is set up already, until an update requests a restart.
///
/// # Errors
/// [`AgentError`].
pub fn serve<'a>(words: impl IntoIterator<Item = &'a str>) -> Result<(), AgentError> {
    let log = Log::new([]);
    let line = CommandLine::parse(words, "")?;
    let mut settings = settings(&line, &log)?;
    if let Some(file) = &line.key_file {
        settings.key = Some(read_key(Path::new(file))?);
    }
    let ip = network::existing_address(&settings.config()?)?;
    settings.set_ip(ip);
    supervise(&log, settings, Observers::default())
}

/// Take up what followed the stream into the boot FIFO. A payload is installed, after which the machine restarts. A key
/// is returned; whatever else is there is logged.
fn behind_stream(line: &CommandLine, command_line: &str, log: &Log) -> Result<Option<Key>, AgentError> {
    let path = Path::new(line.boot_fifo.as_deref().unwrap_or(BOOT_FIFO));
    if line.boot_fifo.is_some() {
        if let Err(error) = wait_for(path) {
            log.warn(&error.to_string());
        }
    } else if !path.exists() {
        return Ok(None);
    }
    let file = match fs::File::open(path) {
        Ok(file) => file,
        Err(error) => {
            log.warn(&format!("{}: {error}", path.display()));
            return Ok(None);
        }
    };
    let mut fifo = Fifo::new(file, pause);
    let tail = match fifo.read_tail() {
        Ok(tail) => tail,
        Err(error) => {
            log.warn(&error.to_string());
            return Ok(None);
        }
    };
    let Some(payload) = tail.payload else { return Ok(tail.key) };
    install::install(&mut fifo, &payload, (line, command_line, tail.key.as_ref()), log)
        .map_err(|error| AgentError::Install(Box::new(error)))?;
    system::restart_now(log)
}

/// Wait for the host, which pauses, and return whether to go on after this number of empty reads in a row.
pub(crate) fn pause(empty: u32) -> bool {
    std::thread::sleep(FIFO_PAUSE);
    empty < FIFO_PAUSES_MAX
}

/// Write a key to the store for the next start. This start has it in any case.
fn keep_key(line: &CommandLine, key: &Key, log: &Log) {
    let id = key.id();
    let Some(path) = line.store.as_deref().map(Path::new) else {
        return log.warn(&format!("key {id} from the boot FIFO lasts until the next start: there is no sumac.store="));
    };
    let written = open(path).and_then(|mut store| write_key(&mut store, path, key.clone()));
    match written {
        Ok(_) => log.info(&format!("store: key {id} from the boot FIFO")),
        Err(error) => log.warn(&format!("store: {error}; key {id} from the boot FIFO lasts until the next start")),
    }
}

/// Supervise the runtime, and the trial of a slot that nothing watches yet, until a restart is requested.
fn supervise(log: &Log, mut settings: Settings, mut observers: Observers) -> Result<(), AgentError> {
    let config = settings.config()?;
    if observers.health.is_none()
        && let Some(selected) = update::select(&config, log)?
    {
        settings.set_slot(selected.slot);
        let begun = Trial::new(&selected, Policy::default(), config.confirm_after, Instant::ZERO);
        if let Some(begun) = begun {
            let restarts = observers.restarts.clone();
            observers.health = update::watch(begun, &config, log, move || restarts.request())?;
        }
    }
    let served = supervisor::supervise(log, &settings, &observers);
    served.map_err(|source| AgentError::System { what: "the runtime", source })
}

/// Return the settings of the command line, and of the store where the command line has none. A store that cannot be
/// used is logged and counts as empty, because the command line may suffice. One with a key that others can read is an
/// error: whoever can write it could have replaced the key, too.
fn settings(line: &CommandLine, log: &Log) -> Result<Settings, AgentError> {
    let Some(path) = &line.store else { return Ok(line.settings.clone()) };
    let path = Path::new(path);
    let opened =
        wait_for(path).and_then(|()| open(path)).and_then(|mut store| Ok((stored(&mut store, path, log)?, store)));
    let (stored, mut store) = match opened {
        Ok(opened) => opened,
        Err(error) => {
            log.warn(&format!("store: {error}"));
            return Ok(line.settings.clone());
        }
    };
    if let Some(key) = &stored.key {
        check_store(path)?;
        log.info(&format!("store: key {}", key.id()));
    }
    let settings = stored.clone().overridden_by(&line.settings);
    if line.keep && settings != stored {
        match store.save(&settings.to_secret_lines()) {
            Ok(state) => log.info(&format!("store: {state}")),
            Err(error) => log.warn(&format!("store: {error}")),
        }
    }
    Ok(settings)
}

/// Check that only its owner can read a store.
fn check_store(path: &Path) -> Result<(), AgentError> {
    let file = fs::File::open(path).map_err(|error| failure(path)(StoreError::Device(error)))?;
    Ok(check_private(path, file)?)
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
    let text = text.map(Zeroizing::new);
    Ok(format!("# {state}\n{}", text.as_deref().map_or_else(String::new, |text| redact(text))))
}

/// Write these settings to a store, creating the file if necessary. A key that is in it stays.
///
/// # Errors
/// [`AgentError`]; nothing is written if a setting is invalid.
pub fn write_store<'a>(path: &Path, words: impl IntoIterator<Item = &'a str>) -> Result<String, AgentError> {
    let settings = Settings::from_words(words)?;
    let mut store = open_or_create(path)?;
    let key = stored(&mut store, path, &Log::new([]))?.key;
    let text = settings.with_key(key).to_secret_lines();
    let state = store.save(&text).map_err(failure(path))?;
    Ok(format!("# {state}\n{}", redact(&text)))
}

/// Write the key of a file, or of stdin if it is `-`, to a store, creating the file if necessary. The other settings
/// stay. An earlier key is in neither copy afterwards.
///
/// # Errors
/// [`AgentError`]; nothing is written if others can read the store or the key's file, or if it is not a key.
pub fn enroll(path: &Path, key_file: &Path) -> Result<String, AgentError> {
    let key = read_key(key_file)?;
    write_key(&mut open_or_create(path)?, path, key)
}

/// Write a key to both copies of a store. Returns the contents as they may be shown.
pub(crate) fn write_key(store: &mut Store<FileBlocks>, path: &Path, key: Key) -> Result<String, AgentError> {
    check_store(path)?;
    let settings = stored(store, path, &Log::new([]))?;
    let text = settings.with_key(Some(key)).to_secret_lines();
    // Each write replaces the copy that is not current.
    store.save(&text).map_err(failure(path))?;
    let state = store.save(&text).map_err(failure(path))?;
    Ok(format!("# {state}\n{}", redact(&text)))
}

/// Open a store, or create one that only its owner can read.
fn open_or_create(path: &Path) -> Result<Store<FileBlocks>, AgentError> {
    if path.exists() {
        return open(path);
    }
    let blocks = FileBlocks::create(path, STORE_LEN_BYTES).map_err(|error| failure(path)(StoreError::Device(error)))?;
    Store::open(blocks).map_err(failure(path))
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::os::unix::fs::PermissionsExt;
    use std::path::PathBuf;
    use sumac_hal::ctrl::secure::{KeyId, write_new_key};

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
        let text = |words: &[&str]| settings(&line(words), &silent_log()).expect("settings").to_lines();
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
        assert_eq!(settings(&line(&[&store, "name=d"]), &silent_log()).expect("settings").to_lines(), "name=d\n");
        assert!(write_store(&short, ["name=d"]).is_err());
        let error = write_store(&folder.path().join("new"), ["nome=d"]).expect_err("no key").to_string();
        assert!(error.contains("nome") && !folder.path().join("new").exists(), "{error}");
    }

    #[test]
    fn enrolled_key_stays_in_the_store_and_an_earlier_one_is_gone() {
        let folder = tempfile::tempdir().expect("a folder");
        let (path, first, second) = (folder.path().join("store"), key_file(&folder, 1), key_file(&folder, 2));
        write_store(&path, ["name=kept"]).expect("written");
        let shown = enroll(&path, &first).expect("enrolled");
        assert!(shown.ends_with("\nname=kept\n# key 0000000000000001\n"), "{shown}");
        enroll(&path, &second).expect("enrolled");
        let bytes = fs::read(&path).expect("readable");
        let count = |digits: &str| bytes.windows(64).filter(|window| *window == digits.repeat(32).as_bytes()).count();
        assert_eq!((count("01"), count("02")), (0, 2), "the key is in both copies");
        write_store(&path, ["name=other"]).expect("written");
        let shown = show_store(&path).expect("readable");
        assert!(shown.contains("name=other") && shown.contains("# key 0000000000000002"), "{shown}");
        assert!(!shown.contains("0202"), "{shown}");
        let store = format!("store={}", path.display());
        // What is kept of the command line does not replace the key.
        let kept = settings(&line(&[&store, "name=last", "keep=yes"]), &silent_log()).expect("settings");
        assert_eq!(kept.key, read_key(&second).ok());
        assert_eq!(settings(&line(&[&store]), &silent_log()).expect("settings"), kept);
    }

    #[test]
    fn key_that_others_can_read_is_refused() {
        let folder = tempfile::tempdir().expect("a folder");
        let (path, key) = (folder.path().join("store"), key_file(&folder, 1));
        let refusal = |result: Result<String, AgentError>| result.expect_err("refused").to_string();
        let set_mode = |path: &Path, mode| fs::set_permissions(path, PermissionsExt::from_mode(mode)).expect("ours");
        set_mode(&key, 0o640);
        assert!(refusal(enroll(&path, &key)).contains("chmod 600"));
        assert!(!path.exists(), "nothing was written");
        set_mode(&key, 0o600);
        enroll(&path, &key).expect("enrolled in a new store");
        for mode in [0o640, 0o604, 0o602] {
            set_mode(&path, mode);
            let store = format!("store={}", path.display());
            let error = settings(&line(&[&store, "name=d"]), &silent_log()).expect_err("refused").to_string();
            assert!(error.contains("chmod 600"), "{error}");
            assert!(refusal(enroll(&path, &key)).contains("chmod 600"));
        }
    }

    #[test]
    fn key_behind_the_stream_replaces_that_of_the_store() {
        let folder = tempfile::tempdir().expect("a folder");
        let (path, fifo) = (folder.path().join("store"), folder.path().join("fifo"));
        write_store(&path, ["name=kept"]).expect("written");
        enroll(&path, &key_file(&folder, 1)).expect("enrolled");
        let key = Key::new(KeyId(2), [2; 32]);
        fs::write(&fifo, [&sumac_firmware::enrolment::emit(&key)[..], &[0; 512]].concat()).expect("written");
        let words = [format!("store={}", path.display()), format!("boot-fifo={}", fifo.display())];
        let line = line(&words.each_ref().map(String::as_str));
        assert_eq!(behind_stream(&line, "", &silent_log()).expect("no payload"), Some(key.clone()));
        keep_key(&line, &key, &silent_log());
        let kept = settings(&line, &silent_log()).expect("settings");
        assert_eq!((&kept.key, kept.to_lines()), (&Some(key), "name=kept\n".to_owned()));
        let bytes = fs::read(&path).expect("readable");
        assert!(!bytes.windows(64).any(|window| window == "01".repeat(32).as_bytes()), "the earlier key is gone");
        // Another content, as a vendor's bf.cfg, is no key and changes nothing.
        fs::write(&fifo, "BOOT=1\n").expect("written");
        assert_eq!(behind_stream(&line, "", &silent_log()).expect("no payload"), None);
    }

    /// Write a file with a key of this id, of whose secret each byte is the id.
    fn key_file(folder: &tempfile::TempDir, id: u8) -> PathBuf {
        let path = folder.path().join(format!("{id}.key"));
        write_new_key(&path, &Key::new(KeyId(id.into()), [id; 32]), "device leaf0").expect("written");
        path
    }
}

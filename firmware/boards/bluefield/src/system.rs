//! What process 1 does before anything else, and how it ends: mounts, modules, waiting for devices, restarting.

use crate::log::{CRITICAL, Level, Log};
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::fs::inotify;
use rustix::io::Errno;
use rustix::mount::{MountFlags, mount};
use rustix::stdio::{dup2_stderr, dup2_stdout};
use rustix::system::{RebootCommand, finit_module, reboot, uname};
use std::fs::{self, File, OpenOptions};
use std::io;
use std::mem::MaybeUninit;
use std::path::Path;
use std::time::{Duration, Instant};
use sumac_firmware::modules::{Modules, WANTED};

/// How long a reason to restart stays on the console: it is to be read, and restarting over and over should be slow.
const RESTART_DELAY: Duration = Duration::from_secs(10);

/// The kernel unpacks the module itself (Linux, include/uapi/linux/module.h: MODULE_INIT_COMPRESSED_FILE).
const COMPRESSED: i32 = 4;

/// File systems of the kernel, and where they go.
const MOUNTS: [(&str, &str, MountFlags); 5] = [
    ("proc", "/proc", MountFlags::NOSUID.union(MountFlags::NODEV).union(MountFlags::NOEXEC)),
    ("sysfs", "/sys", MountFlags::NOSUID.union(MountFlags::NODEV).union(MountFlags::NOEXEC)),
    ("devtmpfs", "/dev", MountFlags::NOSUID.union(MountFlags::NOEXEC)),
    ("tmpfs", "/run", MountFlags::NOSUID.union(MountFlags::NODEV)),
    ("tmpfs", "/tmp", MountFlags::NOSUID.union(MountFlags::NODEV)),
];

/// Mount what the kernel has.
///
/// # Errors
/// Which one failed and why. One that is mounted already is none.
pub fn mount_all() -> Result<(), (&'static str, io::Error)> {
    for (kind, target, flags) in MOUNTS {
        match fs::create_dir_all(target).map(|()| mount(kind, target, kind, flags, None)) {
            Ok(Ok(()) | Err(Errno::BUSY)) => {}
            Ok(Err(error)) => return Err((target, error.into())),
            Err(error) => return Err((target, error)),
        }
    }
    Ok(())
}

/// Speak to the console, or, where the kernel has none, into its log; with neither, nobody listens.
pub fn open_console() {
    let open = |path| OpenOptions::new().write(true).open(path);
    if let Ok(console) = open("/dev/console").or_else(|_| open("/dev/kmsg")) {
        // Fails only for files that are not open.
        let _ = dup2_stdout(&console).and_then(|()| dup2_stderr(&console));
    }
}

/// Load the modules of the running kernel that the agent needs and that are there; return how many.
///
/// What can't be loaded is told, and is no reason to stop: its hardware may not be there, or not be needed.
pub fn load_modules(log: &Log) -> usize {
    let version = uname().release().to_string_lossy().into_owned();
    let folder = Path::new("/lib/modules").join(version);
    // No list: everything is built in.
    let Ok(list) = fs::read_to_string(folder.join("modules.dep")) else { return 0 };
    let modules = Modules::parse(&list);
    let mut loaded = 0;
    for path in modules.in_order(&WANTED) {
        match load_module(&folder.join(path)) {
            Ok(()) => loaded += 1,
            Err(error) => log.warn(&format!("module {path}: {error}")),
        }
    }
    loaded
}

fn load_module(path: &Path) -> io::Result<()> {
    let flags = if path.extension().is_some_and(|extension| extension == "ko") { 0 } else { COMPRESSED };
    match finit_module(File::open(path)?, c"", flags) {
        Ok(()) | Err(Errno::EXIST) => Ok(()),
        Err(error) => Err(error.into()),
    }
}

/// Wait until there is a file at `path`, which a driver makes when it has found its hardware; false if there is none
/// within `timeout`.
///
/// # Errors
/// The folder can't be watched.
pub fn wait_for_file(path: &Path, timeout: Duration) -> io::Result<bool> {
    let deadline = Instant::now() + timeout;
    let events = inotify::init(inotify::CreateFlags::CLOEXEC | inotify::CreateFlags::NONBLOCK)?;
    let folder = path.parent().filter(|folder| !folder.as_os_str().is_empty()).unwrap_or(Path::new("."));
    inotify::add_watch(&events, folder, inotify::WatchFlags::CREATE | inotify::WatchFlags::MOVED_TO)?;
    // Looked at after each event, and once before: between the two it can't come unnoticed.
    while !path.exists() {
        let left = deadline.saturating_duration_since(Instant::now());
        if left.is_zero() {
            return Ok(false);
        }
        wait_readable(&events, left)?;
        let mut buffer = [MaybeUninit::uninit(); 512];
        let mut reader = inotify::Reader::new(&events, &mut buffer);
        while reader.next().is_ok() {}
    }
    Ok(true)
}

/// Wait until there is something to read, at most `timeout`.
pub(crate) fn wait_readable(file: &impl std::os::fd::AsFd, timeout: Duration) -> io::Result<()> {
    let timeout = Timespec::try_from(timeout).ok();
    match poll(&mut [PollFd::new(file, PollFlags::IN)], timeout.as_ref()) {
        Ok(_) | Err(Errno::INTR) => Ok(()),
        Err(error) => Err(error.into()),
    }
}

/// Say why, and restart the machine: what process 1 does in place of ending.
pub fn restart(log: &Log, why: &str) -> ! {
    log.say(Level::Error, &format!("{CRITICAL}: {why}"));
    log.say(Level::Error, &format!("restarting in {} s", RESTART_DELAY.as_secs()));
    std::thread::sleep(RESTART_DELAY);
    rustix::fs::sync();
    let error = reboot(RebootCommand::Restart);
    log.say(Level::Error, &format!("can't restart: {error:?}"));
    loop {
        // Without the right to restart there is nothing left to do, and ending would stop the kernel.
        std::thread::park();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_file_is_waited_for_and_not_for_ever() {
        let folder = tempfile::tempdir().expect("a folder");
        let path = folder.path().join("vda");
        assert!(!wait_for_file(&path, Duration::from_millis(10)).expect("watched"));
        let made = path.clone();
        let maker = std::thread::spawn(move || {
            fs::write(made.with_file_name("other"), "").expect("written");
            fs::write(made, "").expect("written");
        });
        assert!(wait_for_file(&path, Duration::from_secs(60)).expect("watched"));
        maker.join().expect("made");
        assert!(wait_for_file(&folder.path().join("none/x"), Duration::ZERO).is_err(), "no such folder");
    }
}

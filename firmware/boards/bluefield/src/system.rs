//! The system side of process 1: mounts, modules, waiting for devices, restarting.

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
use sumac_firmware::boot::EFIVARS;
use sumac_firmware::modules::{Modules, REQUIRED_MODULES};

/// How long the reason of a restart stays on the console, which also slows down restart loops.
const RESTART_DELAY: Duration = Duration::from_secs(10);

/// How often the host is told of the failure meanwhile: it reads the boot log about once a second.
const FAILURE_INTERVAL: Duration = Duration::from_secs(1);

/// The kernel decompresses the module (Linux, include/uapi/linux/module.h: MODULE_INIT_COMPRESSED_FILE).
const COMPRESSED: i32 = 4;

/// Kernel file systems and their mount points.
const MOUNTS: [(&str, &str, MountFlags); 5] = [
    ("proc", "/proc", MountFlags::NOSUID.union(MountFlags::NODEV).union(MountFlags::NOEXEC)),
    ("sysfs", "/sys", MountFlags::NOSUID.union(MountFlags::NODEV).union(MountFlags::NOEXEC)),
    ("devtmpfs", "/dev", MountFlags::NOSUID.union(MountFlags::NOEXEC)),
    ("tmpfs", "/run", MountFlags::NOSUID.union(MountFlags::NODEV)),
    ("tmpfs", "/tmp", MountFlags::NOSUID.union(MountFlags::NODEV)),
];

/// Mount the kernel file systems.
///
/// # Errors
/// The mount point and the error. A file system that is mounted already is not an error.
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

/// Mount the firmware's variables. A machine without them, or a kernel without the file system, has none.
pub fn mount_variables(log: &Log) {
    let target = Path::new(EFIVARS);
    if target.exists() {
        let flags = MountFlags::NOSUID | MountFlags::NODEV | MountFlags::NOEXEC;
        match mount("efivarfs", target, "efivarfs", flags, None) {
            Ok(()) | Err(Errno::BUSY) => {}
            Err(error) => log.warn(&format!("efivarfs: {error}")),
        }
    }
}

/// Mount what shows the registers of the eMMC; a kernel without it has none. Only a card whose firmware keeps no
/// variables needs it.
pub fn mount_debugfs() {
    let flags = MountFlags::NOSUID | MountFlags::NODEV | MountFlags::NOEXEC;
    // Whoever misses it says so.
    let _ = mount("debugfs", "/sys/kernel/debug", "debugfs", flags, None);
}

/// Redirect stdout and stderr to the console or, without one, to the kernel log; errors are ignored.
pub fn open_console() {
    let open = |path| OpenOptions::new().write(true).open(path);
    if let Ok(console) = open("/dev/console").or_else(|_| open("/dev/kmsg")) {
        // This fails only for closed files.
        let _ = dup2_stdout(&console).and_then(|()| dup2_stderr(&console));
    }
}

/// Load the modules that the agent needs and that exist for the running kernel; return how many.
///
/// A failure is logged and ignored: the hardware may not exist, or not be needed.
pub fn load_modules(log: &Log) -> usize {
    let version = uname().release().to_string_lossy().into_owned();
    let folder = Path::new("/lib/modules").join(version);
    // Without a list, everything is built in.
    let Ok(list) = fs::read_to_string(folder.join("modules.dep")) else { return 0 };
    let modules = Modules::parse(&list);
    let mut loaded = 0;
    for path in modules.in_order(&REQUIRED_MODULES) {
        match load_module(&folder.join(path)) {
            Ok(()) => loaded += 1,
            // The file's name, because the boot log has no room for its path.
            Err(error) => log.warn(&format!("module {}: {error}", path.rsplit('/').next().unwrap_or(path))),
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

/// Wait until a driver has created the file at `path`; false if it does not exist after `timeout`.
///
/// # Errors
/// The folder cannot be watched.
pub fn wait_for_file(path: &Path, timeout: Duration) -> io::Result<bool> {
    let folder = path.parent().filter(|folder| !folder.as_os_str().is_empty()).unwrap_or(Path::new("."));
    wait_until(folder, timeout, || path.exists())
}

/// Ask again whenever a file is created in `folder`; false if the answer is still no after `timeout`.
///
/// # Errors
/// The folder cannot be watched.
pub fn wait_until(folder: &Path, timeout: Duration, mut is_true: impl FnMut() -> bool) -> io::Result<bool> {
    let deadline = Instant::now() + timeout;
    let events = inotify::init(inotify::CreateFlags::CLOEXEC | inotify::CreateFlags::NONBLOCK)?;
    inotify::add_watch(&events, folder, inotify::WatchFlags::CREATE | inotify::WatchFlags::MOVED_TO)?;
    // Asked after the watch was added and after each event, so that no creation is missed.
    while !is_true() {
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

/// Wait until `file` is readable, for at most `timeout`.
pub(crate) fn wait_readable(file: &impl std::os::fd::AsFd, timeout: Duration) -> io::Result<()> {
    let timeout = Timespec::try_from(timeout).ok();
    match poll(&mut [PollFd::new(file, PollFlags::IN)], timeout.as_ref()) {
        Ok(_) | Err(Errno::INTR) => Ok(()),
        Err(error) => Err(error.into()),
    }
}

/// Log that the agent has failed, and tell the host again after each pause, because a full boot log drops what is
/// written: the host would wait for the card until its time limit.
fn report_failure(log: &Log, why: &str, pauses: impl IntoIterator<Item = Duration>) {
    let line = format!("{CRITICAL}: {why}");
    log.write(Level::Error, &line);
    for pause in pauses {
        std::thread::sleep(pause);
        log.tell_host(Level::Error, &line);
    }
}

/// Log the reason and restart the machine, which process 1 does instead of ending.
pub fn restart(log: &Log, why: &str) -> ! {
    let delay_s = RESTART_DELAY.as_secs();
    let pauses = (0..delay_s / FAILURE_INTERVAL.as_secs()).map(|_| FAILURE_INTERVAL);
    report_failure(log, &format!("{why}; restarting in {delay_s} s"), pauses);
    restart_now(log)
}

/// Restart the machine at once, as planned.
pub fn restart_now(log: &Log) -> ! {
    rustix::fs::sync();
    let error = reboot(RebootCommand::Restart);
    log.write(Level::Error, &format!("cannot restart: {error:?}"));
    loop {
        // Nothing else can be done, and if process 1 ended, the kernel would panic.
        std::thread::park();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The host reads nothing of what a full log drops.
    #[test]
    fn failure_is_told_until_the_restart() {
        let folder = tempfile::tempdir().expect("a folder");
        let path = folder.path().join("rsh_log");
        fs::write(&path, "").expect("written");
        let log = Log::new([path.clone()]);
        let mut lines = Vec::new();
        let dropped = (0..3).map(|_| {
            lines.push(fs::read_to_string(&path).expect("readable"));
            fs::write(&path, "").expect("written");
            Duration::ZERO
        });
        report_failure(&log, "no name", dropped);
        lines.push(fs::read_to_string(&path).expect("readable"));
        assert_eq!(lines, vec![format!("ERR {CRITICAL}: no name"); 4]);
    }

    #[test]
    fn wait_for_file_returns_on_creation_or_timeout() {
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

//! A simulated card: a FUSE folder with `boot` and `misc` that behaves like Mellanox/rshim-user-space and follows a
//! script.
//!
//! - Opening `boot` resets the card and sets BOOT_MODE to 0; a second opening is refused (`EBUSY`); closing it sets
//!   BOOT_MODE to 1.
//! - Writes go to a FIFO that drains as scripted: slowly, partially, with an error, or never.
//! - The first read of `misc` after an open returns the whole text, the next one end of file. At display level 2 the
//!   text includes the boot log, which has 128 words and overwrites its oldest entries.
//! - A write to `misc` must be one `KEY value` at offset 0; anything else fails with `EINVAL`.
//!
//! The script triggers events by bytes written and by reads of `misc`, never by time.

use fuser::{
    BackgroundSession, Config, Errno, FileAttr, FileHandle, FileType, Filesystem, FopenFlags, Generation, INodeNo,
    LockOwner, MountOption, OpenFlags, ReplyAttr, ReplyData, ReplyDirectory, ReplyEmpty, ReplyEntry, ReplyOpen,
    ReplyWrite, Request, WriteFlags,
};
use std::collections::VecDeque;
use std::ffi::OsStr;
use std::io;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, UNIX_EPOCH};

const ROOT: u64 = 1;
const BOOT: u64 = 2;
const MISC: u64 = 3;
/// The capacity of the boot log's buffer in words.
const LOG_WORDS: usize = 128;
/// The number of FUSE threads: calls that hang must not block others.
const THREADS: usize = 8;

/// When an event happens.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum When {
    /// From the start.
    Before,
    /// After this number of bytes of a stream.
    Written(u64),
    /// At this read of `misc` after a complete stream, counted from 0.
    Reading(u32),
}

/// A card's behaviour.
#[derive(Debug, Clone)]
pub(crate) struct Script {
    /// The length of the stream that makes the card boot, in bytes.
    pub(crate) len_bytes: u64,
    pub(crate) generation: u32,
    pub(crate) bf_mode: &'static str,
    pub(crate) is_secure: bool,
    pub(crate) is_dropping: bool,
    pub(crate) boot_mode: u32,
    /// Opening `boot` fails with this error.
    pub(crate) open_error: Option<Errno>,
    /// The maximum number of bytes that a write accepts.
    pub(crate) write_max: usize,
    /// The first write at or after this byte fails with this error.
    pub(crate) write_error: Option<(u64, Errno)>,
    /// All calls fail with this error from this trigger on.
    pub(crate) gone: Option<(When, Errno)>,
    /// All calls hang from this trigger on.
    pub(crate) hangs: Option<When>,
    /// `misc` refuses this key.
    pub(crate) refused_key: Option<&'static str>,
    /// The boot log.
    pub(crate) log: Vec<(When, String)>,
}

impl Script {
    /// A BlueField-3 that accepts a stream of `len_bytes` bytes and is ready after a few reads of `misc`.
    pub(crate) fn good(len_bytes: usize) -> Self {
        let line = |when, text: &str| (when, text.to_owned());
        Self {
            len_bytes: len_bytes as u64,
            generation: 3,
            bf_mode: "DPU mode",
            is_secure: false,
            is_dropping: false,
            boot_mode: 1,
            open_error: None,
            write_max: usize::MAX,
            write_error: None,
            gone: None,
            hangs: None,
            refused_key: None,
            log: vec![
                line(When::Written(1), "INFO[BL2]: start"),
                line(When::Reading(2), "INFO[UEFI]: exit Boot Service"),
                line(When::Reading(3), "INFO[MISC]: Linux up"),
                line(When::Reading(4), "INFO[MISC]: DPU is ready"),
            ],
        }
    }

    /// As [`Script::good`], with this boot log.
    pub(crate) fn with_log(len_bytes: usize, log: &[(When, &str)]) -> Self {
        Self { log: log.iter().map(|(when, line)| (*when, line.to_string())).collect(), ..Self::good(len_bytes) }
    }
}

/// The recorded history of a card.
#[derive(Debug, Clone, Default)]
pub(crate) struct Seen {
    /// The bytes written since `boot` was last opened.
    pub(crate) received: Vec<u8>,
    /// The number of attempts to open `boot`.
    pub(crate) opens: u32,
    /// The number of times that `boot` was closed.
    pub(crate) closes: u32,
    pub(crate) is_open: bool,
    /// Resets through `misc`.
    pub(crate) resets: u32,
    pub(crate) boot_mode: u32,
    pub(crate) display_level: u32,
    pub(crate) clear_on_read: bool,
    /// Keys and values written to `misc`.
    pub(crate) settings: Vec<String>,
    pub(crate) readings: u32,
}

#[derive(Debug)]
struct State {
    script: Script,
    seen: Seen,
    /// The number of reads of `misc` since a stream was complete.
    readings_after: u32,
    log: VecDeque<String>,
    /// Handles of `misc` that have returned their text.
    read: Vec<u64>,
    next_handle: u64,
    is_error_told: bool,
    /// Hanging calls are released.
    is_over: bool,
}

/// A card; dropping it unmounts its folder.
pub(crate) struct SimulatedCard {
    shared: Arc<Shared>,
    folder: PathBuf,
    session: Option<BackgroundSession>,
}

#[derive(Debug)]
struct Shared {
    state: Mutex<State>,
    changed: Condvar,
}

impl SimulatedCard {
    /// Mount a card at the empty folder `folder`.
    pub(crate) fn mount(folder: &Path, script: Script) -> io::Result<Self> {
        let seen = Seen { boot_mode: script.boot_mode, ..Seen::default() };
        let mut state = State {
            script,
            seen,
            readings_after: 0,
            log: VecDeque::new(),
            read: Vec::new(),
            next_handle: 1,
            is_error_told: false,
            is_over: false,
        };
        state.append_due_lines(When::Before);
        let shared = Arc::new(Shared { state: Mutex::new(state), changed: Condvar::new() });
        let mut config = Config::default();
        config.mount_options = vec![MountOption::FSName("rshim".into())];
        config.n_threads = Some(THREADS);
        let session = fuser::spawn_mount(Card { shared: shared.clone() }, folder, &config)?;
        Ok(Self { shared, folder: folder.into(), session: Some(session) })
    }

    /// Return the history so far.
    pub(crate) fn seen(&self) -> Seen {
        self.shared.lock().seen.clone()
    }

    /// Wait until the card's history satisfies a condition.
    pub(crate) fn wait(&self, what: &str, is_there: impl Fn(&Seen) -> bool) {
        let limit = Duration::from_secs(600);
        let state = self.shared.lock();
        let waited = self.shared.changed.wait_timeout_while(state, limit, |state| !is_there(&state.seen));
        let (state, timeout) = waited.unwrap_or_else(PoisonError::into_inner);
        assert!(!timeout.timed_out(), "{what} has not come: {:?}", Seen { received: Vec::new(), ..state.seen.clone() });
    }

    /// Release hanging calls.
    pub(crate) fn release(&self) {
        self.shared.lock().is_over = true;
        self.shared.changed.notify_all();
    }
}

impl Drop for SimulatedCard {
    fn drop(&mut self) {
        self.release();
        // Detach immediately, even if an abandoned worker still has a file open; fuser unmounts the rest.
        let _ = rustix::mount::unmount(&self.folder, rustix::mount::UnmountFlags::DETACH);
        drop(self.session.take());
    }
}

impl Shared {
    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Start a call into the driver, which hangs or fails if scripted.
    fn enter(&self) -> Result<MutexGuard<'_, State>, Errno> {
        let state = self.lock();
        let hangs = |state: &mut State| !state.is_over && state.script.hangs.is_some_and(|when| state.is_due(when));
        let state = self.changed.wait_while(state, hangs).unwrap_or_else(PoisonError::into_inner);
        match state.script.gone {
            Some((when, errno)) if state.is_due(when) => Err(errno),
            _ => Ok(state),
        }
    }

    /// Publish a change of the state.
    fn notify(&self, state: MutexGuard<'_, State>) {
        drop(state);
        self.changed.notify_all();
    }
}

impl State {
    fn is_whole(&self) -> bool {
        self.seen.received.len() as u64 >= self.script.len_bytes
    }

    fn is_due(&self, when: When) -> bool {
        match when {
            When::Before => true,
            When::Written(bytes) => self.seen.received.len() as u64 >= bytes,
            When::Reading(reading) => self.is_whole() && self.readings_after >= reading,
        }
    }

    /// Append the log lines that are due.
    fn append_due_lines(&mut self, now: When) {
        let before = now == When::Before;
        for (when, line) in std::mem::take(&mut self.script.log) {
            match when {
                When::Before => self.log.push_back(line),
                when if !before && self.is_due(when) => self.log.push_back(line),
                when => self.script.log.push((when, line)),
            }
        }
        // An entry has a header of one word.
        let words = |line: &String| 1 + line.len().div_ceil(8);
        while self.log.iter().map(words).sum::<usize>() > LOG_WORDS {
            self.log.pop_front();
        }
    }

    fn open_boot(&mut self) -> Result<(), Errno> {
        self.seen.opens += 1;
        if let Some(errno) = self.script.open_error {
            return Err(errno);
        }
        if self.script.is_secure {
            return Err(Errno::EPERM);
        }
        if self.script.is_dropping {
            return Err(Errno::EINVAL);
        }
        if self.seen.is_open {
            return Err(Errno::EBUSY);
        }
        self.seen.is_open = true;
        self.seen.boot_mode = 0;
        self.seen.received.clear();
        self.readings_after = 0;
        Ok(())
    }

    fn write_boot(&mut self, data: &[u8]) -> Result<u32, Errno> {
        if let Some((at, errno)) = self.script.write_error.filter(|_| !self.is_error_told) {
            let left = at.saturating_sub(self.seen.received.len() as u64);
            if left == 0 {
                self.is_error_told = true;
                return Err(errno);
            }
            return Ok(self.take(&data[..data.len().min(left as usize)]));
        }
        Ok(self.take(data))
    }

    fn take(&mut self, data: &[u8]) -> u32 {
        let len = data.len().min(self.script.write_max);
        self.seen.received.extend_from_slice(&data[..len]);
        len as u32
    }

    fn close_boot(&mut self) {
        self.seen.is_open = false;
        self.seen.closes += 1;
        self.seen.boot_mode = 1;
    }

    fn misc(&mut self) -> String {
        self.append_due_lines(When::Written(0));
        if self.is_whole() {
            self.readings_after += 1;
        }
        self.seen.readings += 1;
        let Script { generation, bf_mode, is_secure, is_dropping, .. } = self.script;
        let mut text = format!("{:<16}{} (0:basic, 1:advanced, 2:log)\n", "DISPLAY_LEVEL", self.seen.display_level);
        let mut line = |key: &str, value: String| text.push_str(&format!("{key:<16}{value}\n"));
        if generation == 3 {
            line("BF_MODE", bf_mode.into());
        }
        line("BOOT_MODE", format!("{} (0:rshim, 1:emmc, 2:emmc-boot-swap)", self.seen.boot_mode));
        line("BOOT_TIMEOUT", "300 (seconds)".into());
        line("USB_TIMEOUT", "40 (seconds)".into());
        line("DROP_MODE", format!("{} (0:normal, 1:drop)", u32::from(is_dropping)));
        line("SW_RESET", "0 (1: reset)".into());
        line("DEV_NAME", "pcie-0000:04:00.2".into());
        line("DEV_INFO", format!("BlueField-{generation}(Rev 1)"));
        line("OPN_STR", "900-9D3B6-00CV-AA0".into());
        if generation == 3 {
            line("UP_TIME", "123(s)".into());
            line("SECURE_NIC_MODE", format!("{} (0:no, 1:yes)", u32::from(is_secure)));
        }
        line("FORCE_CMD", "0 (1: send Force command)".into());
        if self.seen.display_level == 1 {
            line("BOOT_RESET_SKIP", "0 (1: skip)".into());
            line("PEER_MAC", "00:1a:ca:ff:ff:01 (rw)".into());
            line("PXE_ID", "0x00000000 (rw)".into());
            line("VLAN_ID", "0 0 (rw)".into());
            line("CLEAR_ON_READ", format!("{} (0:no, 1:yes)", u32::from(self.seen.clear_on_read)));
        }
        if self.seen.display_level == 2 {
            let rule = "-".repeat(39);
            text.push_str(&format!("{rule}\n             Log Messages\n{rule}\n"));
            self.log.iter().for_each(|entry| text.push_str(&format!(" {entry}\n")));
            if self.seen.clear_on_read {
                self.log.clear();
            }
        }
        text
    }

    fn set(&mut self, offset: u64, data: &[u8]) -> Result<(), Errno> {
        let text = std::str::from_utf8(data).map_err(|_| Errno::EINVAL)?;
        let mut words = text.split_whitespace();
        let (key, value) =
            (words.next().ok_or(Errno::EINVAL)?, words.next().and_then(|value| value.parse::<u32>().ok()));
        let value = value.filter(|_| offset == 0 && self.script.refused_key != Some(key)).ok_or(Errno::EINVAL)?;
        match key {
            "DISPLAY_LEVEL" => self.seen.display_level = value,
            "CLEAR_ON_READ" => self.seen.clear_on_read = value != 0,
            "BOOT_MODE" => self.seen.boot_mode = value & 3,
            "SW_RESET" => self.seen.resets += value,
            "BOOT_TIMEOUT" | "USB_TIMEOUT" | "BOOT_RESET_SKIP" => {}
            _ => return Err(Errno::EINVAL),
        }
        self.seen.settings.push(format!("{key} {value}"));
        Ok(())
    }
}

/// The folder.
struct Card {
    shared: Arc<Shared>,
}

fn attributes(inode: u64) -> FileAttr {
    let is_root = inode == ROOT;
    FileAttr {
        ino: INodeNo(inode),
        size: 0,
        blocks: 0,
        atime: UNIX_EPOCH,
        mtime: UNIX_EPOCH,
        ctime: UNIX_EPOCH,
        crtime: UNIX_EPOCH,
        kind: if is_root { FileType::Directory } else { FileType::RegularFile },
        perm: if is_root { 0o755 } else { 0o600 },
        nlink: 1,
        uid: rustix::process::getuid().as_raw(),
        gid: rustix::process::getgid().as_raw(),
        rdev: 0,
        blksize: 512,
        flags: 0,
    }
}

impl Filesystem for Card {
    fn lookup(&self, _request: &Request, _parent: INodeNo, name: &OsStr, reply: ReplyEntry) {
        match name.to_str() {
            Some("boot") => reply.entry(&Duration::ZERO, &attributes(BOOT), Generation(0)),
            Some("misc") => reply.entry(&Duration::ZERO, &attributes(MISC), Generation(0)),
            _ => reply.error(Errno::ENOENT),
        }
    }

    fn getattr(&self, _request: &Request, inode: INodeNo, _handle: Option<FileHandle>, reply: ReplyAttr) {
        reply.attr(&Duration::ZERO, &attributes(inode.into()));
    }

    fn readdir(
        &self,
        _request: &Request,
        _inode: INodeNo,
        _handle: FileHandle,
        offset: u64,
        mut reply: ReplyDirectory,
    ) {
        let entries = [(ROOT, "."), (ROOT, ".."), (BOOT, "boot"), (MISC, "misc")];
        for (next, (inode, name)) in (1..).zip(entries).skip(offset as usize) {
            if reply.add(INodeNo(inode), next, attributes(inode).kind, name) {
                break;
            }
        }
        reply.ok();
    }

    fn open(&self, _request: &Request, inode: INodeNo, _flags: OpenFlags, reply: ReplyOpen) {
        let opened = self.shared.enter().and_then(|mut state| {
            state.next_handle += 1;
            let handle = state.next_handle;
            let opened = if inode == INodeNo(BOOT) { state.open_boot() } else { Ok(()) };
            self.shared.notify(state);
            opened.map(|()| handle)
        });
        match opened {
            Ok(handle) => reply.opened(FileHandle(handle), FopenFlags::FOPEN_DIRECT_IO | FopenFlags::FOPEN_NONSEEKABLE),
            Err(errno) => reply.error(errno),
        }
    }

    fn read(
        &self,
        _request: &Request,
        inode: INodeNo,
        handle: FileHandle,
        _offset: u64,
        size: u32,
        _flags: OpenFlags,
        _lock_owner: Option<LockOwner>,
        reply: ReplyData,
    ) {
        let text = self.shared.enter().and_then(|mut state| {
            if inode != INodeNo(MISC) {
                return Err(Errno::EINVAL);
            }
            if state.read.contains(&handle.into()) {
                return Ok(String::new());
            }
            state.read.push(handle.into());
            let text = state.misc();
            self.shared.notify(state);
            Ok(text)
        });
        match text {
            Ok(text) => reply.data(&text.as_bytes()[..text.len().min(size as usize)]),
            Err(errno) => reply.error(errno),
        }
    }

    fn write(
        &self,
        _request: &Request,
        inode: INodeNo,
        _handle: FileHandle,
        offset: u64,
        data: &[u8],
        _write_flags: WriteFlags,
        _flags: OpenFlags,
        _lock_owner: Option<LockOwner>,
        reply: ReplyWrite,
    ) {
        let taken = self.shared.enter().and_then(|mut state| {
            let taken = match inode {
                INodeNo(BOOT) => state.write_boot(data),
                _ => state.set(offset, data).map(|()| data.len() as u32),
            };
            self.shared.notify(state);
            taken
        });
        match taken {
            Ok(len) => reply.written(len),
            Err(errno) => reply.error(errno),
        }
    }

    fn release(
        &self,
        _request: &Request,
        inode: INodeNo,
        _handle: FileHandle,
        _flags: OpenFlags,
        _lock_owner: Option<LockOwner>,
        _flush: bool,
        reply: ReplyEmpty,
    ) {
        if inode == INodeNo(BOOT) {
            let mut state = self.shared.lock();
            state.close_boot();
            self.shared.notify(state);
        }
        reply.ok();
    }
}

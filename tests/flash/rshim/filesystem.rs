//! The FUSE folder of a card.

use super::Shared;
use fuser::{
    Errno, FileAttr, FileHandle, FileType, Filesystem, FopenFlags, Generation, INodeNo, LockOwner, OpenFlags,
    ReplyAttr, ReplyData, ReplyDirectory, ReplyEmpty, ReplyEntry, ReplyOpen, ReplyWrite, Request, WriteFlags,
};
use std::ffi::OsStr;
use std::sync::Arc;
use std::time::{Duration, UNIX_EPOCH};

const ROOT: u64 = 1;
const BOOT: u64 = 2;
const MISC: u64 = 3;
/// The card's own side of the boot log.
const RSH_LOG: u64 = 4;

/// The folder.
pub(super) struct Card {
    pub(super) shared: Arc<Shared>,
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
            Some("rsh_log") => reply.entry(&Duration::ZERO, &attributes(RSH_LOG), Generation(0)),
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
                INodeNo(BOOT) => {
                    state = self.shared.while_held(state);
                    state.write_boot(data)
                }
                INodeNo(RSH_LOG) => state.write_rsh_log(data),
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

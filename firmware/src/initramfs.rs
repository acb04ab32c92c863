//! The initramfs of a card: the agent as `/init`, and the kernel modules that it loads.
//!
//! ```text
//! /init                          the agent, a static program
//! /dev/console /dev/null         its first files: the second for machines without a console
//! /lib/modules/VERSION/…         modules, with their part of modules.dep
//! /proc /sys /dev /run /tmp      empty mount points
//! ```
//!
//! The output is reproducible: the same inputs give the same bytes.

use crate::manifest::files::{Archive, FilesError, MODE_FILE, MODE_MANIFEST};
use crate::modules::{Modules, REQUIRED_MODULES};
use std::fs::{self, File};
use std::io::Write;
use std::path::Path;

/// Character devices (Linux, Documentation/admin-guide/devices.txt). If the kernel has no console, process 1 starts
/// without open files, and Rust's runtime opens /dev/null in their place, or else ends the process.
const CONSOLE: (u32, u32) = (5, 1);
const NULL: (u32, u32) = (1, 3);

/// The contents of an initramfs.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Contents {
    /// The modules, in load order.
    pub modules: Vec<String>,
}

/// Write an initramfs with `agent` as `/init`. `modules` is a kernel's module folder (`/lib/modules/VERSION`), from
/// which those in [`REQUIRED_MODULES`] and their dependencies are included.
///
/// # Errors
/// A file cannot be read or is too long, or writing failed. The output is unusable then.
pub fn write(agent: &Path, modules: Option<&Path>, out: &mut impl Write) -> Result<Contents, FilesError> {
    let mut archive = Archive::new(out);
    for folder in ["proc", "sys", "dev", "run", "tmp"] {
        archive.folder(folder)?;
    }
    archive.device("dev/console", CONSOLE)?;
    archive.device("dev/null", NULL)?;
    add_file(&mut archive, "init", agent)?;
    let names = match modules {
        Some(folder) => add_modules(&mut archive, folder)?,
        None => Vec::new(),
    };
    archive.finish()?;
    Ok(Contents { modules: names })
}

fn add_modules<W: Write>(archive: &mut Archive<'_, W>, folder: &Path) -> Result<Vec<String>, FilesError> {
    let list = folder.join("modules.dep");
    let fail = |source| FilesError::Io { path: list.display().to_string(), source };
    let modules = Modules::parse(&fs::read_to_string(&list).map_err(fail)?);
    // The kernel looks for a folder named by its version.
    let version = folder.file_name().and_then(|name| name.to_str());
    let version = version.ok_or_else(|| FilesError::Path(folder.display().to_string()))?;
    let paths = modules.in_order(&REQUIRED_MODULES);
    for path in &paths {
        add_file(archive, &format!("lib/modules/{version}/{path}"), &folder.join(path))?;
    }
    let part = modules.part(&paths);
    let to = format!("lib/modules/{version}/modules.dep");
    archive.add(&to, MODE_MANIFEST, &mut part.as_bytes(), part.len() as u64)?;
    Ok(paths.into_iter().map(str::to_owned).collect())
}

fn add_file<W: Write>(archive: &mut Archive<'_, W>, to: &str, from: &Path) -> Result<(), FilesError> {
    let fail = |source| FilesError::Io { path: from.display().to_string(), source };
    let mut file = File::open(from).map_err(fail)?;
    let len_bytes = file.metadata().map_err(fail)?.len();
    archive.add(to, MODE_FILE, &mut file, len_bytes).map(drop)
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::io::Read;

    type Entry = (String, u32, (u32, u32), Vec<u8>);

    fn entries(mut archive: &[u8]) -> Vec<Entry> {
        let mut all = Vec::new();
        loop {
            let mut reader = cpio::NewcReader::new(archive).expect("an entry");
            let entry = reader.entry();
            if entry.is_trailer() {
                return all;
            }
            let (name, mode) = (entry.name().to_owned(), entry.mode());
            let device = (entry.rdev_major(), entry.rdev_minor());
            let mut bytes = Vec::new();
            reader.read_to_end(&mut bytes).expect("its bytes");
            all.push((name, mode, device, bytes));
            archive = reader.finish().expect("the next one");
        }
    }

    #[test]
    fn initramfs_has_agent_devices_and_wanted_modules() {
        let folder = tempfile::tempdir().expect("a folder");
        let (agent, kernel) = (folder.path().join("agent"), folder.path().join("6.1.0-test"));
        fs::create_dir_all(kernel.join("net")).expect("made");
        fs::write(&agent, "program").expect("written");
        for name in ["virtio_net", "failover", "other"] {
            fs::write(kernel.join(format!("net/{name}.ko")), name).expect("written");
        }
        let list = "net/virtio_net.ko: net/failover.ko\nnet/failover.ko:\nnet/other.ko:\n";
        fs::write(kernel.join("modules.dep"), list).expect("written");
        let mut archive = Vec::new();
        let contents = write(&agent, Some(&kernel), &mut archive).expect("an archive");
        assert_eq!(contents.modules, ["net/failover.ko", "net/virtio_net.ko"]);
        let entries = entries(&archive);
        let find = |name: &str| entries.iter().find(|(other, ..)| other == name);
        assert_eq!(find("init").map(|(_, mode, _, bytes)| (*mode, &bytes[..])), Some((0o100_755, &b"program"[..])));
        assert_eq!(find("dev/console").map(|(_, mode, device, _)| (*mode, *device)), Some((0o020_600, CONSOLE)));
        assert_eq!(find("dev/null").map(|(_, mode, device, _)| (*mode, *device)), Some((0o020_600, NULL)));
        assert!(find("lib/modules/6.1.0-test/net/failover.ko").is_some());
        assert!(find("lib/modules/6.1.0-test/net/other.ko").is_none(), "not required");
        let part = find("lib/modules/6.1.0-test/modules.dep").map(|(.., bytes)| String::from_utf8_lossy(bytes));
        let order = Modules::parse(&part.expect("a list")).in_order(&REQUIRED_MODULES).join(" ");
        assert_eq!(order, "net/failover.ko net/virtio_net.ko");
        for (name, ..) in &entries {
            let above = Path::new(name).parent().filter(|above| *above != Path::new(""));
            let is_made = above.is_none_or(|above| find(&above.display().to_string()).is_some());
            assert!(is_made, "{name} comes before its folder");
        }
    }

    #[test]
    fn missing_agent_or_module_list_is_named() {
        let folder = tempfile::tempdir().expect("a folder");
        let error = write(&folder.path().join("none"), None, &mut Vec::new()).expect_err("no agent").to_string();
        assert!(error.contains("none"), "{error}");
        let agent = folder.path().join("agent");
        fs::write(&agent, "program").expect("written");
        let error = write(&agent, Some(folder.path()), &mut Vec::new()).expect_err("no list").to_string();
        assert!(error.contains("modules.dep"), "{error}");
    }
}

//! The state of a card and the driver's operations on it.

use super::script::{Script, UpTime, When};
use fuser::Errno;
use std::time::Instant;

/// The capacity of the boot log's buffer in words: its index has 7 bits.
const LOG_WORDS: usize = 127;
/// After how many reads of `misc` the last line of the boot log comes again.
const REPEATED_EVERY: u32 = 16;
/// How long a card has run when it is inserted, in seconds.
const UP_TIME_S: u64 = 100_000;

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
    /// The driver leaves the card running when `boot` is opened.
    pub(crate) skips_reset: bool,
    /// The number of resets by opening `boot`.
    pub(crate) boot_resets: u32,
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
pub(super) struct State {
    pub(super) script: Script,
    /// The lines of the boot log that are not yet due.
    pub(super) pending: Vec<(When, String)>,
    pub(super) seen: Seen,
    /// The number of reads of `misc` since a stream was complete.
    pub(super) readings_after: u32,
    pub(super) log: Vec<String>,
    /// The words of the boot log in use.
    pub(super) log_words: usize,
    /// Handles of `misc` that have returned their text.
    pub(super) read: Vec<u64>,
    pub(super) next_handle: u64,
    pub(super) is_error_told: bool,
    /// When `boot` was last opened.
    pub(super) reset: Option<Instant>,
    /// Hanging calls are released.
    pub(super) is_over: bool,
}

impl State {
    pub(super) fn is_whole(&self) -> bool {
        self.seen.received.len() as u64 >= self.script.len_bytes
    }

    pub(super) fn is_due(&self, when: When) -> bool {
        match when {
            When::Before => true,
            When::Written(bytes) => self.seen.received.len() as u64 >= bytes,
            When::Reading(reading) => self.is_whole() && self.readings_after >= reading,
        }
    }

    /// Append the log lines that are due.
    pub(super) fn append_due_lines(&mut self, now: When) {
        let before = now == When::Before;
        for (when, line) in std::mem::take(&mut self.pending) {
            match when {
                When::Before => self.append(&line),
                when if !before && self.is_due(when) => self.append(&line),
                when => self.pending.push((when, line)),
            }
        }
    }

    /// Repeat the last line now and then, as the agent does. The host may read it before its own writer has reported
    /// that all is written, which takes as long as a busy machine lets that process wait; it does not count then.
    fn repeat_last_line(&mut self) {
        let after = |(when, line): &(When, String)| match when {
            When::Reading(first) => Some((self.readings_after.checked_sub(*first)?, line.clone())),
            _ => None,
        };
        if let Some((readings, line)) = self.script.log.iter().rev().find_map(after)
            && readings > 0
            && readings.is_multiple_of(REPEATED_EVERY)
        {
            self.append(&line);
        }
    }

    /// Append a line to the boot log, cut to the room that is left. Its level and module are in a header of one word.
    fn append(&mut self, line: &str) {
        let text = line.split_once("]: ").map_or(line, |(_, text)| text);
        let left = LOG_WORDS.saturating_sub(self.log_words + 1);
        let words = text.len().div_ceil(8).min(left);
        if words > 0 {
            self.log_words += 1 + words;
            let end = line.len() - text.len() + text.len().min(words * 8);
            self.log.push(line[..end].to_owned());
        }
    }

    /// Write to the boot log as the card's Linux does.
    pub(super) fn write_rsh_log(&mut self, data: &[u8]) -> Result<u32, Errno> {
        if self.script.locked_writes > 0 {
            self.script.locked_writes -= 1;
            return Err(Errno::ETIMEDOUT);
        }
        let text = std::str::from_utf8(data).map_err(|_| Errno::EINVAL)?.trim_end_matches('\n');
        let level = ["INFO", "WARN", "ERR", "ASSERT"].into_iter().find(|level| text.starts_with(level));
        let text = text.strip_prefix(level.unwrap_or("")).unwrap_or(text).trim_start();
        self.append(&format!("{}[MISC]: {text}", level.unwrap_or("INFO")));
        // What did not fit is no error.
        Ok(data.len() as u32)
    }

    pub(super) fn open_boot(&mut self) -> Result<(), Errno> {
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
        if !self.seen.skips_reset {
            self.seen.boot_mode = 0;
            self.seen.boot_resets += 1;
            self.reset = Some(Instant::now());
        }
        self.seen.received.clear();
        self.readings_after = 0;
        // Each boot logs the same.
        self.pending = self.script.log.iter().filter(|(when, _)| *when != When::Before).cloned().collect();
        Ok(())
    }

    /// Return whether a write to `boot` has to wait.
    pub(super) fn is_held(&self) -> bool {
        let is_held = |(from, readings)| self.seen.received.len() as u64 >= from && self.readings_after < readings;
        !self.is_over && self.script.held.is_some_and(is_held)
    }

    pub(super) fn write_boot(&mut self, data: &[u8]) -> Result<u32, Errno> {
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

    pub(super) fn take(&mut self, data: &[u8]) -> u32 {
        let len = data.len().min(self.script.write_max);
        self.seen.received.extend_from_slice(&data[..len]);
        len as u32
    }

    pub(super) fn close_boot(&mut self) {
        self.seen.is_open = false;
        self.seen.closes += 1;
        self.seen.boot_mode = 1;
    }

    pub(super) fn misc(&mut self) -> String {
        self.append_due_lines(When::Written(0));
        if self.is_whole() {
            self.repeat_last_line();
            self.readings_after += 1;
        }
        self.seen.readings += 1;
        let Script { generation, bf_mode, is_secure, is_dropping, ref dev_name, up_time, .. } = self.script;
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
        line("DEV_NAME", dev_name.clone());
        line("DEV_INFO", format!("BlueField-{generation}(Rev 1)"));
        line("OPN_STR", "900-9D3B6-00CV-AA0".into());
        if generation == 3 {
            let since = self.reset.map_or(UP_TIME_S, |reset| reset.elapsed().as_secs());
            match up_time {
                UpTime::Counts => line("UP_TIME", format!("{since}(s)")),
                UpTime::Fixed => line("UP_TIME", format!("{UP_TIME_S}(s)")),
                UpTime::None => {}
            }
            line("SECURE_NIC_MODE", format!("{} (0:no, 1:yes)", u32::from(is_secure)));
        }
        line("FORCE_CMD", "0 (1: send Force command)".into());
        if self.seen.display_level == 1 {
            line("BOOT_RESET_SKIP", format!("{} (1: skip)", u32::from(self.seen.skips_reset)));
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
                self.log_words = 0;
            }
        }
        text
    }

    pub(super) fn set(&mut self, offset: u64, data: &[u8]) -> Result<(), Errno> {
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
            "FORCE_CMD" if self.script.is_dropping => {}
            "BOOT_RESET_SKIP" => self.seen.skips_reset = value != 0,
            "BOOT_TIMEOUT" | "USB_TIMEOUT" => {}
            _ => return Err(Errno::EINVAL),
        }
        self.seen.settings.push(format!("{key} {value}"));
        Ok(())
    }
}

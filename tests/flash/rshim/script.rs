//! The script of a card: its properties, its faults, and the boot log.

use fuser::Errno;

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

/// The time since its last reset that a card reports.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum UpTime {
    /// It counts from each reset, and had run for long before the first one.
    Counts,
    /// A reset does not change it.
    Fixed,
    /// It reports none.
    None,
}

/// A card's behaviour.
#[derive(Debug, Clone)]
pub(crate) struct Script {
    /// The length of the stream that makes the card boot, in bytes.
    pub(crate) len_bytes: u64,
    pub(crate) generation: u32,
    /// The driver's name of the card, with its slot.
    pub(crate) dev_name: String,
    /// Its time since its last reset, if it reports that.
    pub(crate) up_time: UpTime,
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
    /// Writes from this byte on wait until `misc` has been read this often after a complete stream: the card takes
    /// what follows the images once its Linux runs.
    pub(crate) held: Option<(u64, u32)>,
    /// All calls fail with this error from this trigger on.
    pub(crate) gone: Option<(When, Errno)>,
    /// All calls hang from this trigger on.
    pub(crate) hangs: Option<When>,
    /// `misc` refuses this key.
    pub(crate) refused_key: Option<&'static str>,
    /// This many writes of the card's Linux to the boot log fail, because the host has locked it.
    pub(crate) locked_writes: u32,
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
            dev_name: "pcie-0000:04:00.2".into(),
            up_time: UpTime::Counts,
            bf_mode: "DPU mode",
            is_secure: false,
            is_dropping: false,
            boot_mode: 1,
            open_error: None,
            write_max: usize::MAX,
            write_error: None,
            held: None,
            gone: None,
            hangs: None,
            refused_key: None,
            locked_writes: 0,
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

//! The boot entries of the slots and their order.

use super::entries::BootEntries;
use super::load_option::{LoadOption, Partition};
use super::variables::Variables;
use crate::payload::{INITRD_PATH, KERNEL_PATH};
use crate::slots::{BootOrder, Slot};
use std::io;
use thiserror::Error;

const ORDER: &str = "BootOrder";
const NEXT: &str = "BootNext";
const CURRENT: &str = "BootCurrent";
/// Above the numbers that firmware gives to what it finds itself.
const NUMBERS: std::ops::Range<u16> = 0x0010..0x0100;

/// Why the boot order cannot be read or changed.
#[derive(Debug, Error)]
#[non_exhaustive]
pub enum EntryError {
    /// The variable cannot be read or written.
    #[error(
        "EFI variable {name}: {source}; a card whose firmware keeps no boot order cannot run from its storage: flash it with \
         --ram"
    )]
    Variable {
        /// The variable.
        name: String,
        /// The system's error.
        source: io::Error,
    },
    /// The firmware does not keep what was written.
    #[error("EFI variable {0} does not read back as written: the firmware does not keep variables")]
    ReadBack(String),
    /// There is no entry of this slot.
    #[error("slot {0} has no boot entry; flash the card again")]
    NoEntry(Slot),
    /// No number is free for an entry.
    #[error("no number from 0010 to 00FF is free for a boot entry: delete some in the firmware's menu")]
    Full,
    /// The command line is too long for an entry.
    #[error("the kernel's command line is too long for a boot entry")]
    TooLong,
}

/// The boot order in the firmware's variables.
#[derive(Debug)]
pub struct EfiBootOrder<V> {
    variables: V,
}

/// Return the description of a slot's entry.
pub(super) const fn description(slot: Slot) -> &'static str {
    match slot {
        Slot::A => "Sumac A",
        Slot::B => "Sumac B",
    }
}

fn name_of(number: u16) -> String {
    format!("Boot{number:04X}")
}

impl<V: Variables> EfiBootOrder<V> {
    /// Use these variables.
    pub fn new(variables: V) -> Self {
        Self { variables }
    }

    /// Return the slot of the entry that the firmware has started, if it is one of ours.
    ///
    /// # Errors
    /// [`EntryError::Variable`].
    pub fn current(&self) -> Result<Option<Slot>, EntryError> {
        let current = self.read(CURRENT)?.and_then(|value| value.try_into().ok()).map(u16::from_le_bytes);
        current.map_or(Ok(None), |number| self.slot_of(number))
    }

    fn slot_of(&self, number: u16) -> Result<Option<Slot>, EntryError> {
        let description = self.read(&name_of(number))?.and_then(|bytes| LoadOption::description_of(&bytes));
        Ok(Slot::ALL.into_iter().find(|slot| description.as_deref() == Some(self::description(*slot))))
    }

    fn find(&self, slot: Slot) -> Result<Option<(u16, Vec<u8>)>, EntryError> {
        for number in NUMBERS {
            if let Some(bytes) = self.read(&name_of(number))?
                && LoadOption::description_of(&bytes).as_deref() == Some(description(slot))
            {
                return Ok(Some((number, bytes)));
            }
        }
        Ok(None)
    }

    fn free_number(&self) -> Result<u16, EntryError> {
        for number in NUMBERS {
            if self.read(&name_of(number))?.is_none() {
                return Ok(number);
            }
        }
        Err(EntryError::Full)
    }

    fn order(&self) -> Result<Vec<u16>, EntryError> {
        let value = self.read(ORDER)?.unwrap_or_default();
        let (units, _) = value.as_chunks::<2>();
        Ok(units.iter().map(|unit| u16::from_le_bytes(*unit)).collect())
    }

    fn write_order(&mut self, order: &[u16]) -> Result<(), EntryError> {
        let value: Vec<u8> = order.iter().flat_map(|number| number.to_le_bytes()).collect();
        self.write(ORDER, &value)
    }

    fn read(&self, name: &str) -> Result<Option<Vec<u8>>, EntryError> {
        self.variables.read(name).map_err(|source| EntryError::Variable { name: name.into(), source })
    }

    fn write(&mut self, name: &str, value: &[u8]) -> Result<(), EntryError> {
        let written = self.variables.write(name, value);
        written.map_err(|source| EntryError::Variable { name: name.into(), source })?;
        match self.read(name)? {
            Some(kept) if kept == value => Ok(()),
            _ => Err(EntryError::ReadBack(name.into())),
        }
    }
}

impl<V: Variables> BootOrder for EfiBootOrder<V> {
    type Error = EntryError;

    fn try_once(&mut self, slot: Slot) -> Result<(), EntryError> {
        let (number, _) = self.find(slot)?.ok_or(EntryError::NoEntry(slot))?;
        self.write(NEXT, &number.to_le_bytes())
    }

    fn prefer(&mut self, slot: Slot) -> Result<(), EntryError> {
        let (first, _) = self.find(slot)?.ok_or(EntryError::NoEntry(slot))?;
        let other = self.find(slot.other())?.map(|(number, _)| number);
        let order = self.order()?;
        let is_ours = |number: &u16| *number == first || other == Some(*number);
        let rest = order.iter().copied().filter(|number| !is_ours(number));
        // The other slot stays out if it was retired.
        let other = other.filter(|other| order.contains(other));
        let wanted: Vec<u16> = [first].into_iter().chain(other).chain(rest).collect();
        if wanted == order { Ok(()) } else { self.write_order(&wanted) }
    }
}

impl<V: Variables> BootEntries for EfiBootOrder<V> {
    fn preferred(&self) -> Result<Option<Slot>, EntryError> {
        for number in self.order()? {
            if let Some(slot) = self.slot_of(number)? {
                return Ok(Some(slot));
            }
        }
        Ok(None)
    }

    fn set_entry(&mut self, slot: Slot, partition: Partition, command_line: &str) -> Result<(), EntryError> {
        let option = LoadOption {
            description: description(slot).into(),
            partition,
            path: KERNEL_PATH.into(),
            arguments: arguments(slot, command_line),
        };
        let bytes = option.emit().ok_or(EntryError::TooLong)?;
        self.retire(slot)?;
        match self.find(slot)? {
            Some((_, had)) if had == bytes => Ok(()),
            Some((number, _)) => self.write(&name_of(number), &bytes),
            None => self.write(&name_of(self.free_number()?), &bytes),
        }
    }

    fn retire(&mut self, slot: Slot) -> Result<(), EntryError> {
        let Some((number, _)) = self.find(slot)? else { return Ok(()) };
        if self.read(NEXT)?.as_deref() == Some(&number.to_le_bytes()) {
            self.variables.remove(NEXT).map_err(|source| EntryError::Variable { name: NEXT.into(), source })?;
        }
        let order = self.order()?;
        let kept: Vec<u16> = order.iter().copied().filter(|other| *other != number).collect();
        if kept == order { Ok(()) } else { self.write_order(&kept) }
    }
}

/// Return the command line of a slot's kernel.
pub(super) fn arguments(slot: Slot, command_line: &str) -> String {
    let is_ours = |word: &&str| {
        !["initrd=", "sumac.slot=", "sumac.boot-fifo=", "BOOT_IMAGE="].iter().any(|key| word.starts_with(key))
    };
    let mut words: Vec<&str> = command_line.split_whitespace().filter(is_ours).collect();
    // A kernel that panics before the agent has opened the watchdog would otherwise wait for ever.
    if !words.iter().any(|word| word.starts_with("panic=")) {
        words.push("panic=10");
    }
    format!("{} initrd={INITRD_PATH} sumac.slot={slot}", words.join(" "))
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::cell::Cell;
    use std::collections::BTreeMap;

    /// Firmware's variables, of which the writes can fail or get lost.
    #[derive(Debug, Default)]
    struct Memory {
        values: BTreeMap<String, Vec<u8>>,
        writes_left: Cell<Option<usize>>,
        forgets: bool,
    }

    impl Variables for Memory {
        fn read(&self, name: &str) -> io::Result<Option<Vec<u8>>> {
            Ok(self.values.get(name).cloned())
        }

        fn write(&mut self, name: &str, value: &[u8]) -> io::Result<()> {
            if let Some(left) = self.writes_left.get() {
                self.writes_left.set(Some(left.checked_sub(1).ok_or(io::ErrorKind::ReadOnlyFilesystem)?));
            }
            if !self.forgets {
                self.values.insert(name.into(), value.into());
            }
            Ok(())
        }

        fn remove(&mut self, name: &str) -> io::Result<()> {
            self.values.remove(name);
            Ok(())
        }
    }

    const LINE: &str =
        "BOOT_IMAGE=x console=hvc0 initrd=initramfs sumac.name=leaf0 sumac.slot=B sumac.boot-fifo=/dev/vdb";

    fn partition(number: u32) -> Partition {
        Partition { number, start: 2048, blocks: 4096, guid: [number as u8; 16] }
    }

    /// Firmware with an entry of its own, and one of another system that has taken the first number.
    fn machine() -> EfiBootOrder<Memory> {
        let mut memory = Memory::default();
        let entry = |description: &str| {
            let option = LoadOption {
                description: description.into(),
                partition: partition(9),
                path: "\\x".into(),
                arguments: String::new(),
            };
            option.emit().expect("fits")
        };
        memory.values.insert("Boot0000".into(), entry("Shell"));
        memory.values.insert("Boot0010".into(), entry("ubuntu"));
        memory.values.insert(ORDER.into(), vec![0, 0, 0x10, 0]);
        EfiBootOrder::new(memory)
    }

    fn with_entries() -> EfiBootOrder<Memory> {
        let mut order = machine();
        order.set_entry(Slot::A, partition(1), LINE).expect("set");
        order.set_entry(Slot::B, partition(2), LINE).expect("set");
        order
    }

    #[test]
    fn entries_take_free_numbers_and_are_not_in_the_order() {
        let mut order = with_entries();
        assert_eq!(order.order().expect("read"), [0, 0x10]);
        assert_eq!(
            (order.find(Slot::A).expect("read").map(|found| found.0), order.preferred().expect("read")),
            (Some(0x11), None)
        );
        let before = order.variables.values.clone();
        order.variables.writes_left.set(Some(0));
        order.set_entry(Slot::A, partition(1), LINE).expect("nothing to write");
        assert_eq!(order.variables.values, before);
        order.variables.writes_left.set(None);
        order.prefer(Slot::A).expect("set");
        assert_eq!(order.order().expect("read"), [0x11, 0, 0x10]);
        order.set_entry(Slot::A, partition(3), LINE).expect("replaced");
        assert_eq!(order.order().expect("read"), [0, 0x10], "it has to be confirmed again");
        assert_eq!(order.find(Slot::A).expect("read").map(|found| found.0), Some(0x11), "under the same number");
    }

    #[test]
    fn slots_are_tried_once_preferred_and_retired() {
        let mut order = with_entries();
        order.try_once(Slot::B).expect("set");
        assert_eq!(order.variables.values[NEXT], [0x12, 0]);
        assert_eq!(order.order().expect("read"), [0, 0x10], "a trial leaves the order alone");
        order.prefer(Slot::A).expect("set");
        order.prefer(Slot::B).expect("set");
        assert_eq!(order.order().expect("read"), [0x12, 0x11, 0, 0x10]);
        assert_eq!(order.preferred().expect("read"), Some(Slot::B));
        order.retire(Slot::A).expect("set");
        order.prefer(Slot::B).expect("nothing to do");
        assert_eq!(order.order().expect("read"), [0x12, 0, 0x10], "a retired slot stays out");
        order.variables.values.insert(CURRENT.into(), vec![0x11, 0]);
        assert_eq!(order.current().expect("read"), Some(Slot::A));
        order.variables.values.insert(CURRENT.into(), vec![0, 0]);
        assert_eq!(order.current().expect("read"), None, "another system's");
    }

    /// A restart while it is written would start half of it.
    #[test]
    fn slot_that_is_written_again_is_not_tried_before_it_is_complete() {
        let mut order = with_entries();
        order.try_once(Slot::B).expect("set");
        order.set_entry(Slot::B, partition(5), LINE).expect("set");
        assert_eq!(order.variables.values.get(NEXT), None);
        let (_, entry) = order.find(Slot::B).expect("read").expect("an entry");
        let option = LoadOption {
            description: "Sumac B".into(),
            partition: partition(5),
            path: KERNEL_PATH.into(),
            arguments: arguments(Slot::B, LINE),
        };
        assert_eq!(Some(entry), option.emit());
        // What another slot is tried for stays.
        order.try_once(Slot::A).expect("set");
        order.set_entry(Slot::B, partition(5), LINE).expect("set");
        assert_eq!(order.variables.values[NEXT], [0x11, 0]);
    }

    #[test]
    fn missing_entry_or_firmware_that_refuses_or_forgets_is_an_error() {
        let mut order = machine();
        assert!(matches!(order.try_once(Slot::A), Err(EntryError::NoEntry(Slot::A))));
        order.variables.writes_left.set(Some(0));
        let error = order.set_entry(Slot::A, partition(1), LINE).expect_err("read-only").to_string();
        assert!(error.contains("EFI variable Boot0011") && error.contains("--ram"), "{error}");
        assert_eq!(order.order().expect("read"), [0, 0x10]);
        let mut order = machine();
        order.variables.forgets = true;
        assert!(matches!(order.set_entry(Slot::A, partition(1), LINE), Err(EntryError::ReadBack(_))));
    }

    #[test]
    fn command_line_keeps_the_settings_and_names_the_slots_own_initramfs() {
        let expected = "console=hvc0 sumac.name=leaf0 panic=10 initrd=\\INITRD sumac.slot=A";
        assert_eq!(arguments(Slot::A, LINE), expected);
        assert!(!arguments(Slot::A, "panic=1").contains("panic=10"));
    }
}

//! The text of `misc`: one setting per line with its name in the first 16 columns, followed by the boot log.
//!
//! Every line is optional, depending on the card's generation, the driver's version and the display level. A value that
//! cannot be parsed is absent.

use crate::bfb::Generation;

/// The mode of the card.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub enum CardMode {
    /// The Arm cores run, as Sumac requires.
    Dpu,
    /// A plain NIC; the Arm cores do not run.
    Nic,
    /// `Unknown`, `Reserved` or a new value.
    Other,
}

/// The contents of `misc`.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct Misc {
    /// The level of detail.
    pub display_level: Option<u32>,
    /// DPU or NIC mode; reported only by BlueField-3.
    pub mode: Option<CardMode>,
    /// The boot source.
    pub boot_mode: Option<u32>,
    /// How long the driver waits for the FIFO to drain, in seconds.
    pub boot_timeout_s: Option<u32>,
    /// Whether the driver discards what is written, because another backend uses the card.
    pub drop_mode: Option<bool>,
    /// The card's address, for example `pcie-0000:04:00.2`.
    pub dev_name: Option<String>,
    /// The card's type, for example `BlueField-3(Rev 1)`.
    pub dev_info: Option<String>,
    /// The part number.
    pub opn: Option<String>,
    /// The time since the last reset, in seconds.
    pub up_time_s: Option<u64>,
    /// Whether the card accepts nothing from the host.
    pub secure_nic_mode: Option<bool>,
    /// The boot log's lines, oldest first; only at display level 2.
    pub log: Vec<String>,
}

impl Misc {
    /// Parse the text.
    pub fn parse(text: &str) -> Self {
        let mut misc = Self::default();
        let mut lines = text.lines().map(str::trim);
        for line in lines.by_ref() {
            if line == LOG_TITLE {
                break;
            }
            if let Some((key, value)) = line.split_once(char::is_whitespace) {
                misc.setting(key, value.trim());
            }
        }
        misc.log = lines.filter(|line| !line.is_empty() && !is_rule(line)).map(str::to_owned).collect();
        misc
    }

    /// Return the card's generation, if it is a known one.
    pub fn generation(&self) -> Option<Generation> {
        let number = self.dev_info.as_deref()?.strip_prefix("BlueField-")?;
        match leading_number::<u32>(number)? {
            1 => Some(Generation::BlueField1),
            2 => Some(Generation::BlueField2),
            3 => Some(Generation::BlueField3),
            _ => None,
        }
    }

    fn setting(&mut self, key: &str, value: &str) {
        match key {
            "DISPLAY_LEVEL" => self.display_level = leading_number(value),
            "BF_MODE" => {
                self.mode = Some(match value {
                    "DPU mode" => CardMode::Dpu,
                    "NIC mode" => CardMode::Nic,
                    _ => CardMode::Other,
                });
            }
            "BOOT_MODE" => self.boot_mode = leading_number(value),
            "BOOT_TIMEOUT" => self.boot_timeout_s = leading_number(value),
            "DROP_MODE" => self.drop_mode = leading_number::<u32>(value).map(|value| value != 0),
            "DEV_NAME" => self.dev_name = Some(value.into()),
            "DEV_INFO" => self.dev_info = Some(value.into()),
            "OPN_STR" => self.opn = Some(value.into()),
            "UP_TIME" => self.up_time_s = leading_number(value),
            "SECURE_NIC_MODE" => self.secure_nic_mode = leading_number::<u32>(value).map(|value| value != 0),
            _ => {}
        }
    }
}

/// The line above the boot log.
const LOG_TITLE: &str = "Log Messages";

fn is_rule(line: &str) -> bool {
    line.bytes().all(|byte| byte == b'-')
}

fn leading_number<T: std::str::FromStr>(text: &str) -> Option<T> {
    let len = text.bytes().take_while(u8::is_ascii_digit).count();
    text[..len].parse().ok()
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn misc_text_with_every_line_is_parsed() {
        let misc = Misc::parse(
            "DISPLAY_LEVEL   2 (0:basic, 1:advanced, 2:log)\n\
             BF_MODE         NIC mode\n\
             BOOT_MODE       1 (0:rshim, 1:emmc, 2:emmc-boot-swap)\n\
             BOOT_TIMEOUT    300 (seconds)\n\
             USB_TIMEOUT     40 (seconds)\n\
             DROP_MODE       1 (0:normal, 1:drop)\n\
             DEV_NAME        pcie-0000:04:00.2\n\
             DEV_INFO        BlueField-3(Rev 1)\n\
             OPN_STR         900-9D3B6-00CV-AA0\n\
             UP_TIME         123(s)\n\
             SECURE_NIC_MODE 1 (0:no, 1:yes)\n\
             FORCE_CMD       0 (1: send Force command)\n\
             ---------------------------------------\n\
             \x20            Log Messages\n\
             ---------------------------------------\n\
             \x20PANIC(BL31): PC = 0x1234\n\
             \x20INFO[MISC]: Linux up\n",
        );
        let expected = Misc {
            display_level: Some(2),
            mode: Some(CardMode::Nic),
            boot_mode: Some(1),
            boot_timeout_s: Some(300),
            drop_mode: Some(true),
            dev_name: Some("pcie-0000:04:00.2".into()),
            dev_info: Some("BlueField-3(Rev 1)".into()),
            opn: Some("900-9D3B6-00CV-AA0".into()),
            up_time_s: Some(123),
            secure_nic_mode: Some(true),
            log: vec!["PANIC(BL31): PC = 0x1234".into(), "INFO[MISC]: Linux up".into()],
        };
        assert_eq!(misc, expected);
        assert_eq!(misc.generation(), Some(Generation::BlueField3));
    }

    #[test]
    fn missing_or_unknown_values_are_absent() {
        assert_eq!(Misc::parse(""), Misc::default());
        let misc = Misc::parse("DEV_INFO        BlueField-4(Rev 0)\nBOOT_MODE       x\nBF_MODE         Reserved\n");
        assert_eq!((misc.generation(), misc.boot_mode, misc.mode), (None, None, Some(CardMode::Other)));
    }

    proptest! {
        #[test]
        fn arbitrary_text_does_not_panic(text in "(DEV_INFO|UP_TIME|BlueField-|[ -~\n]|\\PC){0,40}") {
            let _ = Misc::parse(&text).generation();
        }
    }
}

//! Rules as people write them, on the command line or in a file of TOML:
//!
//! ```toml
//! [[rule]]                # each packet is shown to the rules in order; the first that does something to it decides
//! link = 1                # which --listen, from 1; without it, all
//! direction = "up"        # up, down or both, which is the default
//! at = "2s"               # from then on, since the proxy began [0s]
//! for = "500ms"           # for so long; without it, for ever
//! loss = "5%"
//! duplicate = "1%"
//! corrupt = "0.1%"
//! reorder = "2%"          # delayed, so that others overtake them
//! late = "5ms"            # by so much at most, copies too [5ms]
//! delay = "1ms..5ms"      # what every packet takes; it comes on top of whatever any rule does
//! ```

use super::engine::{Lane, Way};
use clap::ValueEnum;
use serde::Deserialize;
use std::str::FromStr;
use std::time::Duration;
use sumac_hal::emu::{During, RandomFaults};
use sumac_hal::time::Instant;
use thiserror::Error;

/// How much later packets come at most that others are to overtake, and copies, if nothing is said.
pub(super) const LATE: Duration = Duration::from_millis(5);

/// The most rules of a file.
const RULES_MAX: usize = 64;

/// The longest time that can be asked for.
const TIME_MAX: Duration = Duration::from_secs(7 * 24 * 3600);

/// Why something is no rule.
#[derive(Debug, Error)]
#[non_exhaustive]
pub(crate) enum RuleError {
    /// Not a share.
    #[error("{0:?} is no share of packets; write 0% to 100% in steps of 0.1%, as in 5% or 0.1%")]
    Share(String),
    /// Not a time.
    #[error("{0:?} is no time; write a whole number with us, ms or s behind it, as in 500ms; the longest is 7 days")]
    Time(String),
    /// Not a span.
    #[error(
        "{0:?} is no span of times; write one time, or two with .. between them, the shorter first, as in 1ms..5ms"
    )]
    Span(String),
    /// Shares of more than there is.
    #[error("the shares of one rule are {sum}.{tenths}% together: each packet suffers one fault, so 100% is the most")]
    Sum {
        /// Whole percent.
        sum: u32,
        /// And tenths.
        tenths: u32,
    },
    /// A link that is not.
    #[error("rule {rule} is for link {link}; the links are 1 to {links}, in the order of --listen")]
    Link {
        /// Which rule, from 1.
        rule: usize,
        /// Its link.
        link: usize,
        /// How many there are.
        links: usize,
    },
    /// Too many rules.
    #[error("{0} rules; {RULES_MAX} is the most")]
    TooMany(usize),
    /// It is not TOML, or has other fields.
    #[error(transparent)]
    Form(#[from] toml::de::Error),
}

/// A share of packets, in thousandths.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Deserialize)]
#[serde(try_from = "String")]
pub(crate) struct Share(pub(crate) u16);

impl Share {
    /// All of them.
    pub(crate) const ALL: Self = Self(1000);
}

impl FromStr for Share {
    type Err = RuleError;

    fn from_str(text: &str) -> Result<Self, RuleError> {
        let parse = || {
            let number = text.strip_suffix('%')?;
            let (whole, tenths) = number.split_once('.').unwrap_or((number, "0"));
            let digits =
                |part: &str| part.bytes().all(|byte| byte.is_ascii_digit()).then(|| part.parse::<u16>().ok())?;
            let share = digits(whole)?.checked_mul(10)?.checked_add(digits(tenths)?)?;
            (tenths.len() == 1 && share <= 1000).then_some(Self(share))
        };
        parse().ok_or_else(|| RuleError::Share(text.into()))
    }
}

/// A length of time.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Deserialize)]
#[serde(try_from = "String")]
pub(crate) struct Time(pub(crate) Duration);

impl FromStr for Time {
    type Err = RuleError;

    fn from_str(text: &str) -> Result<Self, RuleError> {
        let digits_len = text.bytes().take_while(u8::is_ascii_digit).count();
        let (digits, unit) = text.split_at(digits_len);
        let number = digits.parse::<u64>().ok();
        let time = number.and_then(|number| match unit {
            "us" => Some(Duration::from_micros(number)),
            "ms" => Some(Duration::from_millis(number)),
            "s" => Some(Duration::from_secs(number)),
            _ => None,
        });
        time.filter(|time| *time <= TIME_MAX).map(Self).ok_or_else(|| RuleError::Time(text.into()))
    }
}

/// A length of time that is drawn between two.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Deserialize)]
#[serde(try_from = "String")]
pub(crate) struct Span {
    pub(crate) min: Duration,
    pub(crate) max: Duration,
}

impl FromStr for Span {
    type Err = RuleError;

    fn from_str(text: &str) -> Result<Self, RuleError> {
        let (min, max) = text.split_once("..").unwrap_or((text, text));
        match (min.parse(), max.parse()) {
            (Ok(Time(min)), Ok(Time(max))) if min <= max => Ok(Self { min, max }),
            _ => Err(RuleError::Span(text.into())),
        }
    }
}

macro_rules! from_text {
    ($($type:ty),*) => { $(
        impl TryFrom<String> for $type {
            type Error = RuleError;

            fn try_from(text: String) -> Result<Self, RuleError> {
                text.parse()
            }
        }
    )* };
}

from_text!(Share, Time, Span);

/// Which way packets go that a rule is for.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Deserialize, ValueEnum)]
#[serde(rename_all = "lowercase")]
pub(crate) enum Ways {
    /// From clients to the target
    Up,
    /// From the target to clients
    Down,
    /// Both
    #[default]
    Both,
}

/// One rule.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub(crate) struct RuleSpec {
    pub(crate) link: Option<usize>,
    pub(crate) direction: Ways,
    pub(crate) at: Option<Time>,
    #[serde(rename = "for")]
    pub(crate) length: Option<Time>,
    pub(crate) loss: Share,
    pub(crate) duplicate: Share,
    pub(crate) corrupt: Share,
    pub(crate) reorder: Share,
    pub(crate) late: Option<Time>,
    pub(crate) delay: Option<Span>,
}

#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
struct File {
    #[serde(default)]
    rule: Vec<RuleSpec>,
}

/// Read a file's rules.
pub(crate) fn parse(toml: &str) -> Result<Vec<RuleSpec>, RuleError> {
    let File { rule } = toml::from_str(toml)?;
    if rule.len() > RULES_MAX { Err(RuleError::TooMany(rule.len())) } else { Ok(rule) }
}

/// Make the lanes of each link, up and down.
pub(crate) fn lanes(rules: &[RuleSpec], links: usize) -> Result<Vec<(Lane, Lane)>, RuleError> {
    let mut lanes: Vec<(Lane, Lane)> = (0..links).map(|_| Default::default()).collect();
    for (index, spec) in rules.iter().enumerate() {
        let faults = spec.faults()?;
        let its = match spec.link {
            None => &mut lanes[..],
            Some(link) => {
                let unknown = RuleError::Link { rule: index + 1, link, links };
                std::slice::from_mut(link.checked_sub(1).and_then(|link| lanes.get_mut(link)).ok_or(unknown)?)
            }
        };
        for (up, down) in its {
            let up = (spec.direction != Ways::Down).then_some(up);
            let down = (spec.direction != Ways::Up).then_some(down);
            up.into_iter().chain(down).for_each(|lane| spec.add_to(lane, faults));
        }
    }
    Ok(lanes)
}

impl RuleSpec {
    fn faults(&self) -> Result<RandomFaults, RuleError> {
        let Self {
            loss: Share(loss),
            duplicate: Share(duplicate),
            corrupt: Share(corrupt),
            reorder: Share(reorder),
            ..
        } = *self;
        let sum = [loss, duplicate, corrupt, reorder].into_iter().map(u32::from).sum::<u32>();
        if sum > 1000 {
            return Err(RuleError::Sum { sum: sum / 10, tenths: sum % 10 });
        }
        Ok(RandomFaults {
            loss_per_mille: loss,
            duplicate_per_mille: duplicate,
            reorder_per_mille: reorder,
            corrupt_per_mille: corrupt,
            delay_max: self.late.map_or(LATE, |Time(late)| late),
        })
    }

    fn add_to(&self, lane: &mut Lane, rule: RandomFaults) {
        let from = Instant::ZERO + self.at.map_or(Duration::ZERO, |Time(at)| at);
        let until = from + self.length.map_or(Duration::MAX, |Time(length)| length);
        lane.rules.push(Box::new(During { during: from..until, rule }));
        lane.ways.extend(self.delay.map(|Span { min, max }| Way { during: (from, until), min, max }));
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn shares_times_and_spans_are_read_as_people_write_them() {
        let share = |text: &str| text.parse::<Share>().map(|share| share.0).ok();
        assert_eq!(["0%", "5%", "0.1%", "100%", "99.9%"].map(share), [0, 50, 1, 1000, 999].map(Some));
        for text in ["", "%", "5", "100.1%", "0.05%", "-1%", "5.%", "+5%", "6554%", ".5%x"] {
            assert!(matches!(text.parse::<Share>(), Err(RuleError::Share(named)) if named == text), "{text}");
        }
        let span = |text: &str| text.parse::<Span>().map(|Span { min, max }| (min.as_micros(), max.as_micros())).ok();
        assert_eq!(["1ms..5ms", "20us", "0s..2s"].map(span), [(1000, 5000), (20, 20), (0, 2_000_000)].map(Some));
        for text in ["", "5", "5 ms", "5ms..1ms", "1ms..", "1ms..2ms..3ms", "1h", "604801s", "99999999999999999999s"] {
            assert!(matches!(text.parse::<Span>(), Err(RuleError::Span(named)) if named == text), "{text}");
        }
    }

    #[test]
    fn a_file_gives_each_lane_its_rules() {
        let rules = parse(
            "[[rule]]\ndirection = 'up'\nat = '2s'\nfor = '500ms'\nloss = '100%'\n[[rule]]\nlink = 2\ndelay = '1ms'\n",
        );
        let rules = rules.expect("two rules");
        let lanes = lanes(&rules, 2).expect("lanes");
        let numbers = |lane: &Lane| (lane.rules.len(), lane.ways.len());
        let numbers: Vec<_> = lanes.iter().map(|(up, down)| (numbers(up), numbers(down))).collect();
        assert_eq!(numbers, [((1, 0), (0, 0)), ((2, 1), (1, 1))]);
    }

    #[test]
    fn what_is_no_rule_is_refused_by_name() {
        let refused =
            |toml: &str| parse(toml).and_then(|rules| lanes(&rules, 2)).map(|_| ()).expect_err("no rule").to_string();
        let cases = [
            ("[[rule]]\nlos = '5%'", "unknown field `los`"),
            ("[[rule]]\nloss = '5'", "in steps of 0.1%"),
            ("[[rule]]\ndirection = 'left'", "expected one of `up`, `down`, `both`"),
            ("[[rule]]\nlink = 3", "rule 1 is for link 3; the links are 1 to 2"),
            ("[[rule]]\nlink = 0", "rule 1 is for link 0; the links are 1 to 2"),
            ("[[rule]]\nloss = '60%'\nreorder = '40.1%'", "100.1% together"),
            ("rule = 5", "invalid type"),
        ];
        for (toml, named) in cases {
            let error = refused(toml);
            assert!(error.contains(named), "{toml}: {error}");
        }
        assert!(refused(&"[[rule]]\n".repeat(65)).contains("65 rules; 64 is the most"));
    }
}

//! Fault rules, as given on the command line or in a TOML file:
//!
//! ```toml
//! [[rule]]                # each packet passes through the rules in order; the first fault decides
//! link = 1                # number of the --listen, from 1 [all links]
//! direction = "up"        # up, down or both [both]
//! at = "2s"               # start, measured from the start of the proxy [0s]
//! for = "500ms"           # length [unlimited]
//! loss = "5%"
//! duplicate = "1%"
//! corrupt = "0.1%"
//! reorder = "2%"          # delay so that other packets overtake
//! late = "5ms"            # maximum delay of reordered packets and of copies [5ms]
//! delay = "1ms..5ms"      # delay of every packet, in addition to all faults
//! ```

use super::engine::{Lane, LinkDelay};
use clap::ValueEnum;
use serde::Deserialize;
use std::str::FromStr;
use std::time::Duration;
use sumac_hal::emu::{During, RandomFaults};
use sumac_hal::time::Instant;
use thiserror::Error;

/// The default maximum delay of reordered packets and of copies.
pub(super) const LATE: Duration = Duration::from_millis(5);

/// The most rules of a file.
const RULES_MAX: usize = 64;

/// The longest time.
const TIME_MAX: Duration = Duration::from_secs(7 * 24 * 3600);

/// Why a rule is invalid.
#[derive(Debug, Error)]
#[non_exhaustive]
pub(crate) enum RuleError {
    /// Not a rate.
    #[error("{0:?} is not a rate; use 0% to 100% in steps of 0.1%, as in 5% or 0.1%")]
    Rate(String),
    /// Not a time.
    #[error("{0:?} is not a time; use a whole number with us, ms or s, as in 500ms, up to 7 days")]
    Time(String),
    /// Not a range of times.
    #[error("{0:?} is not a range of times; use one time, or two joined by .., the shorter first, as in 1ms..5ms")]
    Span(String),
    /// Rates of more than 100% in all.
    #[error(
        "the rates of one rule are {sum}.{tenths}% together; the limit is 100%, as each packet suffers one fault at most"
    )]
    Sum {
        /// The sum, in whole percent.
        sum: u32,
        /// Its tenths of a percent.
        tenths: u32,
    },
    /// A link that does not exist.
    #[error("rule {rule} names link {link}; the links are 1 to {links}, in the order of --listen")]
    Link {
        /// The rule, from 1.
        rule: usize,
        /// The link that it names.
        link: usize,
        /// The number of links.
        links: usize,
    },
    /// Too many rules.
    #[error("{0} rules exceed the limit of {RULES_MAX}")]
    TooMany(usize),
    /// Not TOML, or with unknown fields.
    #[error(transparent)]
    Form(#[from] toml::de::Error),
}

/// A rate of packets, in thousandths.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Deserialize)]
#[serde(try_from = "String")]
pub(crate) struct Rate(pub(crate) u16);

impl Rate {
    /// All packets.
    pub(crate) const ALL: Self = Self(1000);
}

impl FromStr for Rate {
    type Err = RuleError;

    fn from_str(text: &str) -> Result<Self, RuleError> {
        let parse = || {
            let number = text.strip_suffix('%')?;
            let (whole, tenths) = number.split_once('.').unwrap_or((number, "0"));
            let digits =
                |part: &str| part.bytes().all(|byte| byte.is_ascii_digit()).then(|| part.parse::<u16>().ok())?;
            let rate = digits(whole)?.checked_mul(10)?.checked_add(digits(tenths)?)?;
            (tenths.len() == 1 && rate <= 1000).then_some(Self(rate))
        };
        parse().ok_or_else(|| RuleError::Rate(text.into()))
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

/// A range of times to draw from.
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

from_text!(Rate, Time, Span);

/// The directions to which a rule applies.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Deserialize, ValueEnum)]
#[serde(rename_all = "lowercase")]
pub(crate) enum Directions {
    /// From clients to the target
    Up,
    /// From the target to clients
    Down,
    /// Both directions
    #[default]
    Both,
}

/// One rule.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub(crate) struct RuleSpec {
    pub(crate) link: Option<usize>,
    pub(crate) direction: Directions,
    pub(crate) at: Option<Time>,
    #[serde(rename = "for")]
    pub(crate) length: Option<Time>,
    pub(crate) loss: Rate,
    pub(crate) duplicate: Rate,
    pub(crate) corrupt: Rate,
    pub(crate) reorder: Rate,
    pub(crate) late: Option<Time>,
    pub(crate) delay: Option<Span>,
}

#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
struct File {
    #[serde(default)]
    rule: Vec<RuleSpec>,
}

/// Parse the rules in a TOML file.
pub(crate) fn parse(toml: &str) -> Result<Vec<RuleSpec>, RuleError> {
    let File { rule } = toml::from_str(toml)?;
    if rule.len() > RULES_MAX { Err(RuleError::TooMany(rule.len())) } else { Ok(rule) }
}

/// Return the lanes of each link, up and down.
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
            let up = (spec.direction != Directions::Down).then_some(up);
            let down = (spec.direction != Directions::Up).then_some(down);
            up.into_iter().chain(down).for_each(|lane| spec.add_to(lane, faults));
        }
    }
    Ok(lanes)
}

impl RuleSpec {
    fn faults(&self) -> Result<RandomFaults, RuleError> {
        let Self {
            loss: Rate(loss), duplicate: Rate(duplicate), corrupt: Rate(corrupt), reorder: Rate(reorder), ..
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
        lane.delays.extend(self.delay.map(|Span { min, max }| LinkDelay { during: (from, until), min, max }));
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rates_times_and_ranges_parse_and_invalid_ones_are_refused() {
        let rate = |text: &str| text.parse::<Rate>().map(|rate| rate.0).ok();
        assert_eq!(["0%", "5%", "0.1%", "100%", "99.9%"].map(rate), [0, 50, 1, 1000, 999].map(Some));
        for text in ["", "%", "5", "100.1%", "0.05%", "-1%", "5.%", "+5%", "6554%", ".5%x"] {
            assert!(matches!(text.parse::<Rate>(), Err(RuleError::Rate(named)) if named == text), "{text}");
        }
        let span = |text: &str| text.parse::<Span>().map(|Span { min, max }| (min.as_micros(), max.as_micros())).ok();
        assert_eq!(["1ms..5ms", "20us", "0s..2s"].map(span), [(1000, 5000), (20, 20), (0, 2_000_000)].map(Some));
        for text in ["", "5", "5 ms", "5ms..1ms", "1ms..", "1ms..2ms..3ms", "1h", "604801s", "99999999999999999999s"] {
            assert!(matches!(text.parse::<Span>(), Err(RuleError::Span(named)) if named == text), "{text}");
        }
    }

    #[test]
    fn rules_are_added_to_the_lanes_that_they_name() {
        let rules = parse(
            "[[rule]]\ndirection = 'up'\nat = '2s'\nfor = '500ms'\nloss = '100%'\n[[rule]]\nlink = 2\ndelay = '1ms'\n",
        );
        let rules = rules.expect("two rules");
        let lanes = lanes(&rules, 2).expect("lanes");
        let numbers = |lane: &Lane| (lane.rules.len(), lane.delays.len());
        let numbers: Vec<_> = lanes.iter().map(|(up, down)| (numbers(up), numbers(down))).collect();
        assert_eq!(numbers, [((1, 0), (0, 0)), ((2, 1), (1, 1))]);
    }

    #[test]
    fn invalid_rule_error_names_the_field_or_limit() {
        let refused =
            |toml: &str| parse(toml).and_then(|rules| lanes(&rules, 2)).map(|_| ()).expect_err("refused").to_string();
        let cases = [
            ("[[rule]]\nlos = '5%'", "unknown field `los`"),
            ("[[rule]]\nloss = '5'", "in steps of 0.1%"),
            ("[[rule]]\ndirection = 'left'", "expected one of `up`, `down`, `both`"),
            ("[[rule]]\nlink = 3", "rule 1 names link 3; the links are 1 to 2"),
            ("[[rule]]\nlink = 0", "rule 1 names link 0; the links are 1 to 2"),
            ("[[rule]]\nloss = '60%'\nreorder = '40.1%'", "100.1% together"),
            ("rule = 5", "invalid type"),
        ];
        for (toml, named) in cases {
            let error = refused(toml);
            assert!(error.contains(named), "{toml}: {error}");
        }
        assert!(refused(&"[[rule]]\n".repeat(65)).contains("65 rules exceed the limit of 64"));
    }
}

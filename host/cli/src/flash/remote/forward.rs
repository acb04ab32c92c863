//! The options that `sumac flash` on a host gets: those of the command line that are not about the way there.

use super::super::args::FlashArgs;
use anyhow::{anyhow, ensure};
use clap::parser::ValueSource;
use clap::{Arg, ArgAction, Args, Command};
use std::ffi::OsString;

/// Options that are not passed on: what goes in the stream, and what is about this host.
const OWN: [&str; 7] = ["image", "key", "config", "rootfs", "json", "hosts", "sumac_path"];

/// Return the options to pass on, of the arguments of this command.
pub(super) fn options(arguments: impl Iterator<Item = OsString>) -> anyhow::Result<Vec<String>> {
    let global = |name: &'static str, short, action| Arg::new(name).long(name).short(short).action(action);
    let command = FlashArgs::augment_args(Command::new("flash").no_binary_name(true))
        .arg(global("verbose", 'v', ArgAction::Count))
        .arg(global("quiet", 'q', ArgAction::SetTrue));
    let own: Vec<_> = arguments.skip_while(|argument| argument != "flash").skip(1).collect();
    let matches = command.clone().try_get_matches_from(own)?;
    let mut options = Vec::new();
    for argument in command.get_arguments() {
        let id = argument.get_id().as_str();
        let is_given = matches.value_source(id) == Some(ValueSource::CommandLine);
        let Some(long) = argument.get_long().filter(|_| is_given && !OWN.contains(&id)) else { continue };
        match argument.get_action() {
            ArgAction::SetTrue => options.push(format!("--{long}")),
            ArgAction::Count => {
                options.extend((0..matches.get_count(id)).map(|_| format!("--{long}")));
            }
            _ => {
                for value in matches.get_raw(id).into_iter().flatten() {
                    let value = value.to_str().ok_or_else(|| anyhow!("--{long} {value:?} is not UTF-8"))?;
                    ensure!(!value.contains('\0'), "--{long} {value:?} contains a zero byte");
                    options.push(format!("--{long}={value}"));
                }
            }
        }
    }
    Ok(options)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn options_about_cards_are_passed_on_and_those_about_the_way_are_not() {
        let forwarded = |line: &str| options(line.split_whitespace().map(OsString::from)).expect("options");
        let line = "sumac -v flash a.bfb --key=pub.pem --host h1,h2 --all --parallel 4 --if-different -q --timeout=7";
        let mut found = forwarded(line);
        found.sort();
        assert_eq!(found, ["--all", "--if-different", "--parallel=4", "--quiet", "--timeout=7"]);
        let line =
            "sumac flash --allow-unsigned --config c --rootfs r --sumac-path=/x --host h --json flash --rshim a,b -vv";
        let mut found = forwarded(line);
        found.sort();
        assert_eq!(found, ["--allow-unsigned", "--rshim=a", "--rshim=b", "--verbose", "--verbose"]);
    }

    #[test]
    fn every_option_that_is_not_passed_on_exists() {
        let command = FlashArgs::augment_args(Command::new("flash"));
        let all: Vec<_> = command.get_arguments().map(|argument| argument.get_id().as_str()).collect();
        assert!(OWN.iter().all(|own| all.contains(own)), "{all:?}");
    }
}

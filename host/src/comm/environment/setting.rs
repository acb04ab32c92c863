//! One setting of a rank by name and text, for programs that take settings from their own options, and for bindings.

use super::super::{JoinConfig, JoinError};
use super::file::{RANK_VARIABLES, key_of};
use super::{Variables, invalid, key, set};
use crate::config_file::closest;
use thiserror::Error;

/// Why a setting is refused.
#[derive(Debug, Clone, PartialEq, Eq, Error)]
#[error("setting {name}: {why}")]
pub struct SettingError {
    /// The name that was given.
    pub name: String,
    /// What is wrong with it or its value. No key is ever shown.
    pub why: String,
}

/// Settings that no file has: what a process is, and its key itself.
const OF_THE_PROCESS: [&str; 4] = ["SUMAC_JOB", "SUMAC_KEY", "SUMAC_RANK", "SUMAC_WORLD"];

impl JoinConfig {
    /// Set a field as its variable of [`from_env`](Self::from_env) would: `name` is the variable's without `SUMAC_` and
    /// in lower case, as `order` or `join_timeout`, and `value` is what the variable would have. The environment is not
    /// read. An error changes nothing.
    ///
    /// ```
    /// # let controller = std::net::SocketAddr::from(([127, 0, 0, 1], 7847));
    /// let mut config = sumac::JoinConfig::new(controller, "job", 0, 2);
    /// config.set("order", "pairwise")?;
    /// config.set("deadline", "2.5")?;
    /// # Ok::<(), sumac::comm::environment::SettingError>(())
    /// ```
    ///
    /// # Errors
    /// [`SettingError`] names the setting, and what it takes.
    pub fn set(&mut self, name: &str, value: &str) -> Result<(), SettingError> {
        let refuse = |why: String| SettingError { name: name.to_owned(), why };
        let all = || RANK_VARIABLES.into_iter().chain(OF_THE_PROCESS);
        let Some(variable) = all().find(|variable| key_of(variable) == name) else {
            let keys: Vec<String> = all().map(key_of).collect();
            let known: Vec<&str> = keys.iter().map(String::as_str).collect();
            let why = closest(name, known.iter().copied()).map_or_else(
                || format!("there is none of this name; there are {}", known.join(", ")),
                |similar| format!("there is none of this name; did you mean {similar}?"),
            );
            return Err(refuse(why));
        };
        let lookup = |wanted: &str| (wanted == variable).then(|| value.to_owned());
        let mut changed = self.clone();
        changed.set_variable(variable, value, lookup).map_err(|error| match error {
            JoinError::Environment { why, .. } => refuse(why),
            other => refuse(other.to_string()),
        })?;
        *self = changed;
        Ok(())
    }

    fn set_variable(
        &mut self,
        name: &'static str,
        value: &str,
        lookup: impl Fn(&str) -> Option<String>,
    ) -> Result<(), JoinError> {
        let variables = Variables(lookup);
        match name {
            "SUMAC_RANK" => set(&mut self.rank, variables.parsed(name, "a rank")?),
            "SUMAC_WORLD" => set(&mut self.world, variables.parsed(name, "a number of ranks")?),
            "SUMAC_JOB" => value.clone_into(&mut self.job),
            "SUMAC_CONTROLLER" => {
                (self.controller, self.controller_alternatives) = variables.controller()?;
            }
            "SUMAC_EMBEDDED_CONTROLLER" => self.embedded_controller = variables.embedded()?,
            "SUMAC_KEY" | "SUMAC_KEY_FILE" => {
                self.key = key(&variables.0).map_err(|(name, why)| invalid(name, why))?;
            }
            _ => {
                variables.placement(self)?;
                variables.calls(self)?;
                variables.udp(self)?;
            }
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::schedule::Shape;
    use crate::select::Algo;
    use std::net::SocketAddr;
    use std::time::Duration;

    fn config() -> JoinConfig {
        JoinConfig::new(SocketAddr::from(([127, 0, 0, 1], 7847)), "job", 0, 2)
    }

    #[test]
    fn setting_changes_its_field_and_no_other() {
        let mut set = config();
        for (name, value) in [
            ("rank", "1"),
            ("world", "4"),
            ("job", "other"),
            ("host", "node7"),
            ("verbs", "mlx5_0"),
            ("udp_peer", "10.0.0.1:7000"),
            ("algo", "ring"),
            ("shape", "1x2"),
            ("deadline", "0.25"),
            ("embedded_controller", "1"),
            ("controller", "10.0.0.2:8"),
        ] {
            set.set(name, value).expect(name);
        }
        let mut expected = config();
        (expected.rank, expected.world, expected.job) = (1, 4, "other".into());
        (expected.host, expected.verbs) = (Some("node7".into()), Some("mlx5_0".into()));
        expected.udp.peer = Some(SocketAddr::from(([10, 0, 0, 1], 7000)));
        (expected.algo, expected.deadline) = (Algo::Ring, Duration::from_millis(250));
        expected.shape = Some(Shape::grid(&[1, 2]).expect("a grid"));
        expected.embedded_controller = true;
        expected.controller = SocketAddr::from(([10, 0, 0, 2], 8));
        assert_eq!(format!("{set:?}"), format!("{expected:?}"));
    }

    #[test]
    fn refused_setting_names_the_remedy_and_changes_nothing() {
        for (name, value, why) in [
            ("dead_line", "1", "did you mean deadline?"),
            ("x", "1", "there are algo, bind"),
            ("deadline", "soon", "\"soon\" is not a number of seconds"),
            ("order", "random", "arrival, fold, pairwise"),
            ("shape", "round", "a grid as 4x8, or servers:N"),
            ("rank", "-1", "\"-1\" is not a rank"),
            ("controller", "localhost:port", "localhost:port"),
            ("key", "sumac-key 07", "sumac key new"),
        ] {
            let mut set = config();
            let error = set.set(name, value).expect_err(name).to_string();
            assert!(error.starts_with(&format!("setting {name}: ")) && error.contains(why), "{error}");
            assert_eq!(format!("{set:?}"), format!("{:?}", config()));
        }
    }
}

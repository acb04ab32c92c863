//! `sumac key`: the keys of a controller, and how a command is given its own.
//!
//! Secrets are read from files, the environment or stdin, never from the command line, which other users can see.

mod manage;

pub(crate) use manage::{KeyArgs, run};

use crate::cluster;
use crate::exit::Failure;
use anyhow::anyhow;
use clap::Args;
use std::path::{Path, PathBuf};
use sumac::comm::environment::key_from_env;
use sumac::controller::keys::read_key;
use sumac_hal::ctrl::secure::Key;

/// The option that gives a command its key.
#[derive(Debug, Args)]
pub(crate) struct KeyOption {
    /// Key to connect to the controller with: a file of `sumac key new`, which only its owner may read; `-` reads it
    /// from stdin [default: the file that SUMAC_KEY_FILE names, else the key in SUMAC_KEY]
    #[arg(long, value_name = "FILE")]
    key_file: Option<PathBuf>,
}

impl KeyOption {
    /// Read the key, if there is one. The environment's is not for processes that a supervisor starts: it gives them
    /// keys for its own controller, or none.
    ///
    /// # Errors
    /// The key cannot be read, or others can read it too.
    pub(crate) fn read(&self) -> Result<Option<Key>, Failure> {
        match &self.key_file {
            Some(path) => read_key(path).map(Some).map_err(Failure::input),
            None if cluster::is_supervised() => Ok(None),
            None => key_from_env().map_err(Failure::input),
        }
    }

    /// Read the key of a command for operators, which `sumac run` names in a variable of its own, since its ranks have
    /// another key.
    ///
    /// # Errors
    /// As [`read`](Self::read).
    pub(crate) fn read_operator(&self) -> Result<Option<Key>, Failure> {
        let named = std::env::var_os(cluster::OPERATOR_KEY_FILE).filter(|_| self.key_file.is_none());
        match named {
            Some(path) if !cluster::is_supervised() => {
                let why = |error| anyhow!("environment variable {}: {error}", cluster::OPERATOR_KEY_FILE);
                read_key(Path::new(&path)).map(Some).map_err(|error| Failure::Input(why(error)))
            }
            _ => self.read(),
        }
    }
}

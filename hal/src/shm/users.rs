//! Whose devices a rank lets at its memory.
//!
//! A device maps the memory of ranks, and may read and write all of it for as long as it lives. So a rank shares memory with
//! devices of its own user and of the superuser, who can reach it anyway, and with those of one user that the
//! administrator names. A rank of the superuser is no exception: whoever listens under a device's name would get its memory.

use rustix::process::geteuid;
use serde::{Deserialize, Serialize};

/// The variable by which an administrator names the user of the machine's devices: a number, or a name of `/etc/passwd`.
/// Both sides go by it: a rank lets such a device in, and a device of that user serves ranks of all users.
pub const DEVICE_USER_VARIABLE: &str = "SUMAC_DEVICE_USER";

/// Where names of users are looked up.
const PASSWD: &str = "/etc/passwd";

/// Whose devices a rank lets at its memory, beside the superuser's.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct DeviceUsers {
    /// The rank's own user.
    pub own: u32,
    /// The user that the administrator has named.
    pub named: Option<u32>,
}

/// The variable makes no sense.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("{DEVICE_USER_VARIABLE}={value:?}: {why}; give the number of the devices' user, or a name of {PASSWD}")]
pub struct DeviceUserError {
    /// What it says.
    pub value: String,
    /// What is wrong with that.
    pub why: String,
}

impl DeviceUsers {
    /// Let in devices of this process's own user.
    pub fn own() -> Self {
        Self { own: geteuid().as_raw(), named: None }
    }

    /// Let in devices of this process's own user, and of the one that [`DEVICE_USER_VARIABLE`] names, if it is set.
    ///
    /// # Errors
    /// [`DeviceUserError`]: a user that can't be found is not taken for none.
    pub fn from_env() -> Result<Self, DeviceUserError> {
        let Some(value) = std::env::var_os(DEVICE_USER_VARIABLE) else { return Ok(Self::own()) };
        let value = value.to_string_lossy();
        let passwd = || std::fs::read_to_string(PASSWD).map_err(|error| error.to_string());
        let named = parse(&value, passwd).map_err(|why| DeviceUserError { value: value.into_owned(), why })?;
        Ok(Self { named: Some(named), ..Self::own() })
    }

    /// Tell whether devices of a user are let in.
    pub const fn admit(&self, device: u32) -> bool {
        let is_named = matches!(self.named, Some(named) if named == device);
        device == 0 || device == self.own || is_named
    }

    /// Tell whether a device, run by the process that these are of, serves the ranks of all users: the superuser's does, and
    /// that of the user whom the administrator has named.
    pub const fn serve_all(&self) -> bool {
        let is_named = matches!(self.named, Some(named) if named == self.own);
        self.own == 0 || is_named
    }
}

/// Return the number of a user who is given by that or by name.
fn parse(value: &str, passwd: impl FnOnce() -> Result<String, String>) -> Result<u32, String> {
    if let Ok(number) = value.parse() {
        return Ok(number);
    }
    if value.is_empty() {
        return Err("it is empty".into());
    }
    // name:password:uid:...
    let passwd = passwd()?;
    let mut users = passwd.lines().map(|line| line.split(':'));
    let number = users.find_map(|mut fields| (fields.next() == Some(value)).then(|| fields.nth(1)?.parse().ok())?);
    number.ok_or_else(|| "there is no such user".into())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn device_user_is_a_number_or_a_name_of_the_file() {
        let passwd =
            || Ok("root:x:0:0::/root:/bin/sh\nsumac:x:977:977::/:/bin/false\nbroken\nodd:x:-1:0::/:\n".to_owned());
        assert_eq!(parse("1000", || panic!("a number needs no file")), Ok(1000));
        assert_eq!((parse("sumac", passwd), parse("root", passwd)), (Ok(977), Ok(0)));
        for unknown in ["suma", "x", "broken", "odd", "-1", "4294967296", "sumac "] {
            assert_eq!(parse(unknown, passwd), Err("there is no such user".into()), "{unknown}");
        }
        assert!(parse("", passwd).is_err());
        assert_eq!(parse("sumac", || Err("no file".into())), Err("no file".into()));
    }

    #[test]
    fn devices_of_other_users_are_let_in_by_name_alone() {
        let rank = |own, named| DeviceUsers { own, named };
        for (users, admitted, refused) in [
            (rank(1000, None), [0, 1000, 1000], [1001, 977]),
            (rank(0, None), [0, 0, 0], [1000, 977]),
            (rank(0, Some(977)), [0, 977, 977], [1000, 1001]),
            (rank(1000, Some(977)), [0, 977, 1000], [1001, 65534]),
        ] {
            assert!(admitted.iter().all(|&device| users.admit(device)), "{users:?}");
            assert!(!refused.iter().any(|&device| users.admit(device)), "{users:?}");
        }
        assert!(rank(0, None).serve_all() && rank(977, Some(977)).serve_all());
        assert!(!rank(977, None).serve_all() && !rank(1000, Some(977)).serve_all());
    }
}

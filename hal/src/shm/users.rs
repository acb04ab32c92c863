//! Which users' devices may access a rank's memory.
//!
//! A device maps the memory of its ranks and can read and write all of it until it ends. A rank therefore
//! shares memory only with devices of its own user and of root, who can reach that memory anyway, and of one user whom
//! the administrator names. Ranks of root are no exception: otherwise any process that listens under a device's name
//! would get their memory.

use rustix::process::geteuid;
use serde::{Deserialize, Serialize};

/// The environment variable that names the user of the machine's devices: a user id, or a name in `/etc/passwd`. Both
/// sides read it: ranks accept devices of that user, and a device of that user serves ranks of all users.
pub const DEVICE_USER_VARIABLE: &str = "SUMAC_DEVICE_USER";

/// Where user names are looked up.
const PASSWD: &str = "/etc/passwd";

/// The users, besides root, whose devices may access a rank's memory.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct DeviceUsers {
    /// The rank's own user.
    pub own: u32,
    /// The user that the administrator named.
    pub named: Option<u32>,
}

/// The variable's value is not a user.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("{DEVICE_USER_VARIABLE}={value:?}: {why}; set it to the user id of the devices, or to a name in {PASSWD}")]
pub struct DeviceUserError {
    /// The variable's value.
    pub value: String,
    /// Why it is invalid.
    pub why: String,
}

impl DeviceUsers {
    /// Accept devices of this process's own user.
    pub fn own() -> Self {
        Self { own: geteuid().as_raw(), named: None }
    }

    /// Accept devices of this process's own user, and of the user that [`DEVICE_USER_VARIABLE`] names, if it is set.
    ///
    /// # Errors
    /// [`DeviceUserError`]. A user that does not exist is an error, not an absent setting.
    pub fn from_env() -> Result<Self, DeviceUserError> {
        let Some(value) = std::env::var_os(DEVICE_USER_VARIABLE) else { return Ok(Self::own()) };
        let value = value.to_string_lossy();
        let passwd = || std::fs::read_to_string(PASSWD).map_err(|error| error.to_string());
        let named = parse(&value, passwd).map_err(|why| DeviceUserError { value: value.into_owned(), why })?;
        Ok(Self { named: Some(named), ..Self::own() })
    }

    /// Return whether devices of this user are accepted.
    pub const fn admit(&self, device: u32) -> bool {
        let is_named = matches!(self.named, Some(named) if named == device);
        device == 0 || device == self.own || is_named
    }

    /// Return whether a device run by this process serves ranks of all users: those of root and of the named user do.
    pub const fn serve_all(&self) -> bool {
        let is_named = matches!(self.named, Some(named) if named == self.own);
        self.own == 0 || is_named
    }
}

/// Return the user id for a user id or a name.
fn parse(value: &str, passwd: impl FnOnce() -> Result<String, String>) -> Result<u32, String> {
    if let Ok(number) = value.parse() {
        return Ok(number);
    }
    if value.is_empty() {
        return Err("the value is empty".into());
    }
    // name:password:uid:...
    let passwd = passwd()?;
    let mut users = passwd.lines().map(|line| line.split(':'));
    let number = users.find_map(|mut fields| (fields.next() == Some(value)).then(|| fields.nth(1)?.parse().ok())?);
    number.ok_or_else(|| "no such user".into())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn parse_takes_a_user_id_or_a_name_in_passwd() {
        let passwd =
            || Ok("root:x:0:0::/root:/bin/sh\nsumac:x:977:977::/:/bin/false\nbroken\nodd:x:-1:0::/:\n".to_owned());
        assert_eq!(parse("1000", || panic!("a number needs no file")), Ok(1000));
        assert_eq!((parse("sumac", passwd), parse("root", passwd)), (Ok(977), Ok(0)));
        for unknown in ["suma", "x", "broken", "odd", "-1", "4294967296", "sumac "] {
            assert_eq!(parse(unknown, passwd), Err("no such user".into()), "{unknown}");
        }
        assert!(parse("", passwd).is_err());
        assert_eq!(parse("sumac", || Err("no file".into())), Err("no file".into()));
    }

    #[test]
    fn admit_takes_root_own_and_named_user_only() {
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

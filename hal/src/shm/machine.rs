//! The identity of the machine for shared memory: one running kernel, one network namespace and one PID namespace.

use crate::ctrl::Name;
use std::fs;

/// Return an identifier that is equal for two processes exactly if they can share memory: the kernel's boot id, and the
/// namespaces of abstract sockets and process ids. `None` if `/proc` does not provide them.
pub fn machine() -> Option<Name> {
    let boot = fs::read_to_string("/proc/sys/kernel/random/boot_id").ok()?;
    let mut name = Name::new();
    let hex = boot.trim().chars().filter(|&c| c != '-');
    hex.clone().all(|c| c.is_ascii_hexdigit()).then_some(())?;
    for c in hex {
        name.push(c).ok()?;
    }
    for namespace in ["net", "pid"] {
        // "net:[4026531840]"
        let link = fs::read_link(format!("/proc/self/ns/{namespace}")).ok()?;
        let number: String = link.to_str()?.chars().filter(char::is_ascii_digit).collect();
        name.push('.').ok()?;
        name.push_str(&number).ok()?;
    }
    Some(name)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn machine_called_twice_returns_the_same_name() {
        let name = machine().expect("/proc is mounted");
        assert_eq!(machine(), Some(name.clone()));
        assert_eq!(name.split('.').count(), 3, "{name}");
    }
}

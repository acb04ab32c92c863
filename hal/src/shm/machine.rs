//! Which processes can share memory: those of one running kernel that see the same sockets and the same processes.

use crate::ctrl::Name;
use std::fs;

/// Return the name of this machine as far as shared memory goes: the kernel's boot id, and the namespaces that abstract
/// sockets and process numbers are of. `None` where the system does not tell.
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
    fn a_machine_is_the_same_each_time() {
        let name = machine().expect("Linux tells");
        assert_eq!(machine(), Some(name.clone()));
        assert_eq!(name.split('.').count(), 3, "{name}");
    }
}

//! The versions that a service shows of what it can update (the schema SoftwareInventoryCollection).

use super::super::targets::shown;
use super::error::RedfishError;
use super::http::Service;
use serde_json::{Map, Value};
use std::collections::BTreeMap;

/// The most members that are read.
const MEMBERS_MAX: usize = 256;
/// The most pages of a collection.
const PAGES_MAX: usize = 64;

/// The version of each component, by its identifier; null if it shows none.
#[derive(Debug, Default, PartialEq, Eq)]
pub(super) struct Inventory {
    versions: BTreeMap<String, Option<String>>,
}

impl Inventory {
    /// Read the inventory at a path.
    ///
    /// # Errors
    /// The collection cannot be read. Members that cannot be are left out.
    pub(super) fn read(service: &Service, path: &str) -> Result<Self, RedfishError> {
        let (mut inventory, mut members, mut next) = (Self::default(), 0, Some(path.to_owned()));
        for _ in 0..PAGES_MAX {
            let Some(path) = next.take() else { break };
            let page = service.get(&path)?;
            let links = page["Members"].as_array().into_iter().flatten();
            for link in links.filter_map(|member| member["@odata.id"].as_str()) {
                members += 1;
                if members > MEMBERS_MAX {
                    let why = format!("more than {MEMBERS_MAX} members");
                    return Err(RedfishError::Malformed { path, why });
                }
                match service.get(link) {
                    Ok(member) => inventory.insert(link, &member),
                    // A component may be absent while its device is off.
                    Err(RedfishError::Status { .. }) => {}
                    Err(error) => return Err(error),
                }
            }
            next = page["Members@odata.nextLink"].as_str().map(str::to_owned);
        }
        Ok(inventory)
    }

    fn insert(&mut self, link: &str, member: &Value) {
        let name = member["Id"].as_str().or_else(|| link.rsplit('/').next()).unwrap_or(link);
        self.versions.insert(shown(name), member["Version"].as_str().map(shown));
    }

    /// Return the JSON form.
    pub(super) fn json(&self) -> Value {
        let pairs = self.versions.iter().map(|(name, version)| (name.clone(), version.clone().into()));
        Value::Object(pairs.collect::<Map<_, _>>())
    }

    /// Return what it shows as a line of text.
    pub(super) fn line(&self) -> String {
        let pairs: Vec<_> = self.versions.iter().map(|(name, version)| format!("{name} {}", text(version))).collect();
        if pairs.is_empty() { "shows no versions".into() } else { pairs.join(", ") }
    }

    /// Return each component whose version has become another one, with both.
    pub(super) fn changes(&self, after: &Self) -> Vec<String> {
        let names: std::collections::BTreeSet<_> = self.versions.keys().chain(after.versions.keys()).collect();
        let change = |name: &String| {
            let (was, is) = (self.versions.get(name), after.versions.get(name));
            let text = |version: Option<&Option<String>>| version.map_or_else(|| "absent".into(), text);
            (was != is).then(|| format!("{name}: {} -> {}", text(was), text(is)))
        };
        names.into_iter().filter_map(change).collect()
    }
}

fn text(version: &Option<String>) -> String {
    version.clone().unwrap_or_else(|| "?".into())
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    #[test]
    fn changed_versions_are_found_between_two_inventories() {
        let inventory = |members: &[(&str, Value)]| {
            let mut inventory = Inventory::default();
            let member = |(id, version): &(&str, Value)| json!({ "Id": id, "Version": version });
            members.iter().for_each(|pair| inventory.insert("/x/unnamed", &member(pair)));
            inventory
        };
        let before = inventory(&[("BMC", json!("1")), ("DPU_OS", json!("1")), ("CEC", json!("9"))]);
        let after = inventory(&[("BMC", json!("1")), ("DPU_OS", json!("2")), ("NIC", json!(null))]);
        assert_eq!(before.changes(&after), ["CEC: 9 -> absent", "DPU_OS: 1 -> 2", "NIC: absent -> ?"]);
        assert_eq!(after.line(), "BMC 1, DPU_OS 2, NIC ?");
        assert!(before.changes(&before).is_empty());
        let mut unnamed = Inventory::default();
        unnamed.insert("/x/unnamed", &json!({ "Version": 5 }));
        assert_eq!(unnamed.json(), json!({ "unnamed": null }));
    }
}

//! Files with cost tables, and with overrides of them.

use anyhow::Context;
use std::path::Path;
use sumac::select::CostTable;

/// Read a cost table.
pub(crate) fn read(path: &Path) -> anyhow::Result<CostTable> {
    let text = std::fs::read_to_string(path).with_context(|| format!("cannot read {}", path.display()))?;
    CostTable::from_toml(&text).with_context(|| path.display().to_string())
}

/// Read the cost table and the overrides, as far as there are files.
pub(crate) fn with_overrides(costs: Option<&Path>, overrides: Option<&Path>) -> anyhow::Result<CostTable> {
    let table = costs.map(read).transpose()?.unwrap_or_else(CostTable::emulated);
    let Some(path) = overrides else { return Ok(table) };
    let text = std::fs::read_to_string(path).with_context(|| format!("cannot read {}", path.display()))?;
    table.with_overrides(&text).with_context(|| path.display().to_string())
}

//! Memory of the other side, as it was told.

use serde::{Deserialize, Serialize};
use thiserror::Error;

/// A peer's region, as it was told.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct RemoteRegion {
    /// Where it begins, as the peer's hardware knows it.
    pub addr: u64,
    /// Its length in bytes.
    pub len_bytes: u64,
    /// What opens it.
    pub rkey: u32,
    /// Counts how often it was revoked.
    pub generation: u32,
}

/// A range that is not inside its region.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Error)]
#[error("{len_bytes} bytes at {offset} of a region of {region_len_bytes}")]
pub struct RegionError {
    /// Where it begins.
    pub offset: u64,
    /// Its length.
    pub len_bytes: u64,
    /// That of the region.
    pub region_len_bytes: u64,
}

/// Check that a range is inside a region of this length.
pub(crate) fn inside(offset: u64, len_bytes: u64, region_len_bytes: u64) -> Result<(), RegionError> {
    let fits = offset.checked_add(len_bytes).is_some_and(|end| end <= region_len_bytes);
    if fits { Ok(()) } else { Err(RegionError { offset, len_bytes, region_len_bytes }) }
}

impl RemoteRegion {
    /// Return the address of a range.
    ///
    /// # Errors
    /// [`RegionError`]
    pub fn at(&self, offset: u64, len_bytes: u64) -> Result<u64, RegionError> {
        inside(offset, len_bytes, self.len_bytes)?;
        let outside = RegionError { offset, len_bytes, region_len_bytes: self.len_bytes };
        self.addr.checked_add(offset).ok_or(outside)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ranges_end_inside_their_region() {
        let region = RemoteRegion { addr: u64::MAX - 99, len_bytes: 100, rkey: 1, generation: 0 };
        assert_eq!(region.at(0, 100), Ok(u64::MAX - 99));
        assert_eq!(region.at(99, 1), Ok(u64::MAX));
        assert_eq!(region.at(100, 0).map_err(|error| error.region_len_bytes), Err(100), "beyond the last address");
        for (offset, len_bytes) in [(0, 101), (100, 1), (1, u64::MAX), (u64::MAX, 1), (u64::MAX, u64::MAX)] {
            assert_eq!(region.at(offset, len_bytes), Err(RegionError { offset, len_bytes, region_len_bytes: 100 }));
        }
    }
}

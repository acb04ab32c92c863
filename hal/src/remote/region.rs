//! A peer's memory, as the peer described it.

use serde::{Deserialize, Serialize};
use thiserror::Error;

/// A peer's region, as the peer described it.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct RemoteRegion {
    /// Its start address, as the peer's hardware uses it in operations.
    pub addr: u64,
    /// Its length in bytes.
    pub len_bytes: u64,
    /// The key that grants access to it.
    pub rkey: u32,
    /// How often it was revoked.
    pub generation: u32,
}

/// A range outside its region.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Error)]
#[error("{len_bytes} bytes at offset {offset} exceed a region of {region_len_bytes} bytes")]
pub struct RegionError {
    /// The offset of the range in bytes.
    pub offset: u64,
    /// The length of the range in bytes.
    pub len_bytes: u64,
    /// The length of the region in bytes.
    pub region_len_bytes: u64,
}

/// Check that a range lies inside a region of `region_len_bytes`.
pub(crate) fn check_range(offset: u64, len_bytes: u64, region_len_bytes: u64) -> Result<(), RegionError> {
    let fits = offset.checked_add(len_bytes).is_some_and(|end| end <= region_len_bytes);
    if fits { Ok(()) } else { Err(RegionError { offset, len_bytes, region_len_bytes }) }
}

impl RemoteRegion {
    /// Return the address of a range.
    ///
    /// # Errors
    /// [`RegionError`]
    pub fn at(&self, offset: u64, len_bytes: u64) -> Result<u64, RegionError> {
        check_range(offset, len_bytes, self.len_bytes)?;
        let outside = RegionError { offset, len_bytes, region_len_bytes: self.len_bytes };
        self.addr.checked_add(offset).ok_or(outside)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn range_beyond_region_or_address_space_is_refused() {
        let region = RemoteRegion { addr: u64::MAX - 99, len_bytes: 100, rkey: 1, generation: 0 };
        assert_eq!(region.at(0, 100), Ok(u64::MAX - 99));
        assert_eq!(region.at(99, 1), Ok(u64::MAX));
        assert_eq!(region.at(100, 0).map_err(|error| error.region_len_bytes), Err(100), "beyond the last address");
        for (offset, len_bytes) in [(0, 101), (100, 1), (1, u64::MAX), (u64::MAX, 1), (u64::MAX, u64::MAX)] {
            assert_eq!(region.at(offset, len_bytes), Err(RegionError { offset, len_bytes, region_len_bytes: 100 }));
        }
    }
}

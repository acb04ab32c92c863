//! What was found for recent keys: a program repeats the same few operations, and to evaluate all paths, or to make a
//! schedule, takes longer than a short operation.
//!
//! Invariant: a value depends only on its key and on what its owner knows. The owner drops all when that changes.

/// The capacity: enough for the operations of a program's inner loop.
const CAPACITY: usize = 8;

/// The values of the most recent keys.
#[derive(Debug)]
pub(super) struct Recent<K, V> {
    kept: Vec<(K, V)>,
    /// Index of the entry that was found last, which is compared first.
    latest: usize,
    /// Index of the entry that is replaced next.
    oldest: usize,
}

impl<K, V> Default for Recent<K, V> {
    fn default() -> Self {
        Self { kept: Vec::new(), latest: 0, oldest: 0 }
    }
}

impl<K: PartialEq, V: Clone> Recent<K, V> {
    /// Return the value of a key.
    pub(super) fn find(&mut self, key: &K) -> Option<V> {
        if let Some((kept, value)) = self.kept.get(self.latest)
            && kept == key
        {
            return Some(value.clone());
        }
        self.latest = self.kept.iter().position(|(kept, _)| kept == key)?;
        Some(self.kept[self.latest].1.clone())
    }

    /// Keep a value, in place of the oldest one if there is no room.
    pub(super) fn keep(&mut self, key: K, value: V) {
        if self.kept.len() < CAPACITY {
            self.latest = self.kept.len();
            self.kept.push((key, value));
        } else {
            self.latest = self.oldest;
            self.kept[self.oldest] = (key, value);
            self.oldest = (self.oldest + 1) % CAPACITY;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn latest_values_are_found_by_their_keys() {
        let mut recent = Recent::default();
        for key in 0..=CAPACITY {
            assert_eq!(recent.find(&key), None);
            recent.keep(key, key.to_string());
        }
        assert_eq!(recent.find(&0), None, "the oldest has gone");
        for key in (1..=CAPACITY).chain([3, 3, CAPACITY]) {
            assert_eq!(recent.find(&key), Some(key.to_string()));
        }
        recent.keep(0, "again".into());
        assert_eq!(recent.find(&0).as_deref(), Some("again"));
        assert_eq!(recent.find(&1), None, "now the oldest");
    }
}

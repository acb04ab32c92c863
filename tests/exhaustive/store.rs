//! The visited states of a search, each stored once and numbered in the order of discovery.

/// A set of word sequences in contiguous memory.
#[derive(Debug)]
pub(crate) struct Store {
    words: Vec<u32>,
    /// The end of each sequence.
    ends: Vec<usize>,
    /// Numbers + 1 by hash, 0 where free; open addressing, at most half full.
    table: Vec<u32>,
}

impl Store {
    /// Return an empty set.
    pub(crate) fn new() -> Self {
        Self { words: Vec::new(), ends: Vec::new(), table: vec![0; 1 << 12] }
    }

    /// Return the number of sequences.
    pub(crate) fn len(&self) -> usize {
        self.ends.len()
    }

    /// Return the sequence with number `index`.
    pub(crate) fn get(&self, index: usize) -> &[u32] {
        let start = if index == 0 { 0 } else { self.ends[index - 1] };
        &self.words[start..self.ends[index]]
    }

    /// Insert a sequence; return its number and whether it is new.
    pub(crate) fn insert(&mut self, state: &[u32]) -> (usize, bool) {
        let mut place = self.place(state);
        while self.table[place] != 0 {
            let index = self.table[place] as usize - 1;
            if self.get(index) == state {
                return (index, false);
            }
            place = (place + 1) & (self.table.len() - 1);
        }
        self.words.extend_from_slice(state);
        self.ends.push(self.words.len());
        self.table[place] = self.ends.len() as u32;
        if self.ends.len() * 2 > self.table.len() {
            self.grow();
        }
        (self.ends.len() - 1, true)
    }

    fn place(&self, state: &[u32]) -> usize {
        let hash = state.iter().fold(state.len() as u64, |hash, &word| {
            (hash ^ u64::from(word)).wrapping_mul(0x9e37_79b9_7f4a_7c15).rotate_left(29)
        });
        (hash >> 7) as usize & (self.table.len() - 1)
    }

    fn grow(&mut self) {
        self.table = vec![0; 4 * self.table.len()];
        for index in 0..self.ends.len() {
            let mut place = self.place(self.get(index));
            while self.table[place] != 0 {
                place = (place + 1) & (self.table.len() - 1);
            }
            self.table[place] = index as u32 + 1;
        }
    }
}

#[test]
fn store_keeps_each_state_once() {
    let mut store = Store::new();
    let state = |n: u32| vec![n % 7; n as usize % 5 + n as usize / 100];
    let mut seen = std::collections::BTreeMap::new();
    for n in (0..30_000).chain(0..30_000) {
        let (index, fresh) = store.insert(&state(n));
        let next = seen.len();
        assert_eq!(
            (index, fresh),
            match seen.get(&state(n)) {
                Some(&known) => (known, false),
                None => (next, true),
            }
        );
        seen.insert(state(n), index);
    }
    assert!(seen.iter().all(|(state, &index)| store.get(index) == state) && store.len() == seen.len());
}

//! The state of a recovery: all ranks, the messages in flight between them, and the faults so far.

/// A fault; its value is its index in [`World::used`].
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Fault {
    /// A rank dies.
    Death,
    /// A connection of the view change breaks: its pending messages arrive after later ones, or never.
    Break,
    /// A connection of a plan breaks.
    Piece,
    /// Two ranks can no longer reach each other.
    Cut,
    /// The next tree is lost as well.
    Tree,
    /// A rank does not get the next tree.
    NoTree,
    /// A rank exceeds its deadline.
    Late,
    /// A rank retransmits a message that is still in flight.
    Hurry,
}

impl Fault {
    pub(super) const ALL: [Self; 8] =
        [Self::Death, Self::Break, Self::Piece, Self::Cut, Self::Tree, Self::NoTree, Self::Late, Self::Hurry];
}

/// A state.
#[derive(Debug, Clone, Default)]
pub(super) struct World {
    /// The number of occurrences of each [`Fault`], four bits each.
    pub(super) used: u32,
    /// Dead ranks, one bit each.
    pub(super) dead: u32,
    /// Pairs that cannot reach each other, one bit each.
    pub(super) cut: u32,
    pub(super) parts: Vec<u32>,
    /// By sender and receiver: the current connection and the one before. Packets of the tree are on a rank's
    /// connection to itself.
    pub(super) wires: Vec<[Vec<u32>; 2]>,
    /// Data contributed to attempts, in order.
    pub(super) shared_data_sets: Vec<u32>,
}

impl World {
    pub(super) fn count(&self, fault: Fault) -> u32 {
        self.used >> (4 * fault as u32) & 0xf
    }

    pub(super) fn faults(&self) -> u32 {
        Fault::ALL.iter().map(|&fault| self.count(fault)).sum()
    }

    pub(super) fn use_up(&mut self, fault: Fault) {
        self.used += 1 << (4 * fault as u32);
    }

    pub(super) fn is_dead(&self, rank: usize) -> bool {
        self.dead >> rank & 1 == 1
    }

    pub(super) fn live(&self) -> impl Iterator<Item = usize> + use<> {
        let dead = self.dead;
        (0..self.parts.len()).filter(move |rank| dead >> rank & 1 == 0)
    }

    pub(super) fn is_cut(&self, one: usize, other: usize) -> bool {
        self.cut >> (one.min(other) * self.parts.len() + one.max(other)) & 1 == 1
    }

    pub(super) fn cut(&mut self, one: usize, other: usize) {
        self.cut |= 1 << (one.min(other) * self.parts.len() + one.max(other));
    }

    pub(super) fn wire(&mut self, from: usize, to: usize) -> &mut [Vec<u32>; 2] {
        let ranks = self.parts.len();
        &mut self.wires[from * ranks + to]
    }

    /// Encode it as words.
    pub(super) fn encode(&self, words: &mut Vec<u32>) {
        words.clear();
        words.extend([self.used, self.dead, self.cut]);
        words.extend_from_slice(&self.parts);
        words.push(self.shared_data_sets.len() as u32);
        words.extend_from_slice(&self.shared_data_sets);
        for (index, wire) in self.wires.iter().flatten().enumerate().filter(|(_, wire)| !wire.is_empty()) {
            words.push((index << 16 | wire.len()) as u32);
            words.extend_from_slice(wire);
        }
    }

    /// Decode it from words.
    pub(super) fn decode(words: &[u32], ranks: usize) -> Self {
        let (head, rest) = words.split_at(3);
        let (parts, rest) = rest.split_at(ranks);
        let (shared_data_sets, mut rest) = rest[1..].split_at(rest[0] as usize);
        let mut wires = vec![<[Vec<u32>; 2]>::default(); ranks * ranks];
        while let [first, others @ ..] = rest {
            let (index, len) = (*first as usize >> 16, *first as usize & 0xffff);
            let (envelopes, others) = others.split_at(len);
            wires[index / 2][index % 2] = envelopes.to_vec();
            rest = others;
        }
        Self {
            used: head[0],
            dead: head[1],
            cut: head[2],
            parts: parts.to_vec(),
            wires,
            shared_data_sets: shared_data_sets.to_vec(),
        }
    }
}

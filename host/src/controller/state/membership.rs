//! Encodes memberships for the ranks of a job. Most of a membership is the same for all ranks and grows with their
//! number, so for large jobs that part is encoded once and shared by all outboxes.

use crate::controller::outbox::Frames;
use crate::controller::output::{ConnId, Outputs};
use crate::controller::proto::{ClientReply, Membership, QueuePosition, Striping, TreeMembership};
use crate::plan::Child;
use crate::schedule::Shape;
use crate::secret::JobSecret;
use crate::select::CostTable;
use serde::Serialize;
use std::net::SocketAddr;
use sumac_hal::ctrl::{MAX_MESSAGE_LEN, fragment};

/// The fields of a [`Membership`] that all ranks share: the last ones, in the same order.
#[derive(Debug, Clone, Serialize)]
pub(super) struct SharedFields {
    pub(super) mesh: Vec<SocketAddr>,
    pub(super) recovery_mesh: Vec<SocketAddr>,
    pub(super) secret: JobSecret,
    pub(super) expression: Vec<Vec<Child>>,
    pub(super) table: CostTable,
    pub(super) shape: Shape,
}

impl SharedFields {
    fn with(&self, (tree, queue, striping): RankFields) -> Box<Membership> {
        let Self { mesh, recovery_mesh, secret, expression, table, shape } = self.clone();
        Box::new(Membership { tree, queue, striping, mesh, recovery_mesh, secret, expression, table, shape })
    }

    fn without_ranks(&self) -> Self {
        let secret = self.secret.clone();
        let table = CostTable { curves: Vec::new(), overrides: Vec::new(), ..self.table.clone() };
        let shape = self.shape;
        Self { mesh: Vec::new(), recovery_mesh: Vec::new(), secret, expression: Vec::new(), table, shape }
    }
}

/// The fields of a [`Membership`] that differ by rank.
type RankFields = (Result<TreeMembership, String>, Option<QueuePosition>, Striping);

/// The messages to all ranks, prepared for sending.
pub(super) enum MembershipMessages {
    /// Encode a whole message for each rank.
    Whole(SharedFields),
    /// `end` holds the encoded shared fields. `small` is the same without the fields that grow with the number of
    /// ranks; its encoding has `small_len` bytes.
    Split { end: Frames, small: SharedFields, small_len: usize },
}

impl MembershipMessages {
    pub(super) fn new(tail: SharedFields) -> Self {
        let Ok(bytes) = postcard::to_stdvec(&tail) else { return Self::Whole(tail) };
        // The fields before it take less than a quarter of a frame.
        if bytes.len() < MAX_MESSAGE_LEN / 4 * 3 {
            return Self::Whole(tail);
        }
        let small = tail.without_ranks();
        let small_len = postcard::to_stdvec(&small).map_or(0, |bytes| bytes.len());
        Self::Split { end: Frames::new(fragment(&bytes, true).concat()), small, small_len }
    }

    /// Send a rank its membership.
    pub(super) fn send(
        &self,
        (output, client): (&mut Outputs, ConnId),
        head: RankFields,
        reply: &impl Fn(Box<Membership>) -> ClientReply,
    ) {
        match self {
            Self::Whole(tail) => output.send(client, &reply(tail.with(head))),
            Self::Split { end, small, small_len } => match postcard::to_stdvec(&reply(small.with(head))) {
                Ok(mut bytes) => {
                    bytes.truncate(bytes.len() - small_len);
                    output.put(client, vec![Frames::new(fragment(&bytes, false).concat()), end.clone()]);
                }
                Err(error) => tracing::error!(%error, "cannot encode a membership"),
            },
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::controller::output::Output;
    use sumac_hal::ctrl::FrameReader;
    use sumac_hal::ids::Rank;

    #[test]
    fn split_memberships_of_a_large_job_decode_like_whole_ones() {
        for ranks in [3, 5000] {
            let mesh: Vec<_> = (1..=ranks).map(|port| SocketAddr::from(([10, 0, 0, 1], port))).collect();
            let expression = vec![(0..u32::from(ranks)).map(|rank| Child::Rank(Rank(rank))).collect()];
            let tail = SharedFields {
                recovery_mesh: mesh.iter().rev().copied().collect(),
                mesh,
                secret: JobSecret::new([7; 32]),
                expression,
                table: CostTable::emulated(),
                shape: Shape::grid(&[1, ranks.into()]).expect("a grid"),
            };
            let messages = MembershipMessages::new(tail.clone());
            assert_eq!(matches!(messages, MembershipMessages::Split { .. }), ranks == 5000);
            let striping = Striping { shares: vec![2, 1], reason: Some("no third device".into()), rails: Vec::new() };
            let head: RankFields = (Err("no tree".into()), Some(QueuePosition { position: 2, of: 3 }), striping);
            for view in [None, Some(9)] {
                let reply = |membership| match view {
                    Some(view) => ClientReply::Replanned { view, membership },
                    None => ClientReply::Joined(membership),
                };
                let mut output = Outputs::default();
                messages.send((&mut output, ConnId(1)), head.clone(), &reply);
                let Some((ConnId(1), Output::Frames(parts))) = output.pop() else { panic!("one message") };
                let bytes = parts.iter().map(Frames::bytes).collect::<Vec<_>>().concat();
                let read: ClientReply = FrameReader::with_limit(&bytes[..], 1 << 20).recv().expect("a reply");
                assert_eq!(read, reply(tail.with(head.clone())));
            }
        }
    }
}

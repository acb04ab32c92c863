//! What the ranks of a job are told of their places. Most of it is the same for all ranks, and grows with their number: of a
//! large job it is encoded once, and queued for all.

use super::Client;
use crate::controller::line::Frames;
use crate::controller::proto::{ClientReply, Membership, QueuePlace, TreeMembership};
use crate::plan::Child;
use crate::select::CostTable;
use serde::Serialize;
use std::net::SocketAddr;
use sumac_hal::ctrl::{MAX_MESSAGE_LEN, fragment};

/// What all ranks are told: the last fields of a [`Membership`], in their order.
#[derive(Debug, Clone, Serialize)]
pub(super) struct PlacesTail {
    pub(super) mesh: Vec<SocketAddr>,
    pub(super) repair_mesh: Vec<SocketAddr>,
    pub(super) mesh_token: u64,
    pub(super) expression: Vec<Vec<Child>>,
    pub(super) table: CostTable,
}

impl PlacesTail {
    fn with(&self, (tree, queue): Head) -> Box<Membership> {
        let Self { mesh, repair_mesh, mesh_token, expression, table } = self.clone();
        Box::new(Membership { tree, queue, mesh, repair_mesh, mesh_token, expression, table })
    }

    fn without_ranks(&self) -> Self {
        let (mesh_token, table) = (self.mesh_token, self.table.clone());
        Self { mesh: Vec::new(), repair_mesh: Vec::new(), mesh_token, expression: Vec::new(), table }
    }
}

/// What each is told by itself.
type Head = (Result<TreeMembership, String>, Option<QueuePlace>);

/// What all ranks are told, ready to be sent.
pub(super) enum Places {
    /// One message a rank.
    Short(PlacesTail),
    /// The end of all messages in its frames, and the same without what grows with the ranks, by its bytes.
    Long { end: Frames, short: PlacesTail, short_len: usize },
}

impl Places {
    pub(super) fn new(tail: PlacesTail) -> Self {
        let Ok(bytes) = postcard::to_stdvec(&tail) else { return Self::Short(tail) };
        // What comes before it is less than a quarter of a frame.
        if bytes.len() < MAX_MESSAGE_LEN / 4 * 3 {
            return Self::Short(tail);
        }
        let short = tail.without_ranks();
        let short_len = postcard::to_stdvec(&short).map_or(0, |bytes| bytes.len());
        Self::Long { end: Frames::new(fragment(&bytes, true).concat()), short, short_len }
    }

    /// Tell a rank its place.
    pub(super) fn tell(&self, client: &Client, head: Head, reply: &impl Fn(Box<Membership>) -> ClientReply) {
        match self {
            Self::Short(tail) => client.send(&reply(tail.with(head))),
            Self::Long { end, short, short_len } => match postcard::to_stdvec(&reply(short.with(head))) {
                Ok(mut bytes) => {
                    bytes.truncate(bytes.len() - short_len);
                    client.put(&[Frames::new(fragment(&bytes, false).concat()), end.clone()]);
                }
                Err(error) => tracing::error!(%error, "a rank can't be told its place"),
            },
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::controller::line::Line;
    use std::sync::{Arc, Mutex};
    use sumac_hal::ctrl::FrameReader;
    use sumac_hal::ids::Rank;

    /// Keeps what is sent.
    #[derive(Debug, Clone, Default)]
    struct Kept(Arc<Mutex<Vec<u8>>>);

    impl Line for Kept {
        fn put(&self, parts: &[Frames]) -> bool {
            parts.iter().for_each(|part| self.0.lock().expect("no panic").extend_from_slice(part.bytes()));
            true
        }

        fn hang_up(&self) {}
    }

    #[test]
    fn places_of_a_large_job_read_as_those_of_a_small_one() {
        for ranks in [3, 5000] {
            let mesh: Vec<_> = (1..=ranks).map(|port| SocketAddr::from(([10, 0, 0, 1], port))).collect();
            let expression = vec![(0..u32::from(ranks)).map(|rank| Child::Rank(Rank(rank))).collect()];
            let tail = PlacesTail {
                repair_mesh: mesh.iter().rev().copied().collect(),
                mesh,
                mesh_token: 7,
                expression,
                table: CostTable::EMULATED,
            };
            let places = Places::new(tail.clone());
            assert_eq!(matches!(places, Places::Long { .. }), ranks == 5000);
            let head: Head = (Err("no tree".into()), Some(QueuePlace { position: 2, of: 3 }));
            for view in [None, Some(9)] {
                let reply = |membership| match view {
                    Some(view) => ClientReply::Replanned { view, membership },
                    None => ClientReply::Joined(membership),
                };
                let kept = Kept::default();
                places.tell(&Client::new(Box::new(kept.clone())), head.clone(), &reply);
                let bytes = kept.0.lock().expect("no panic").clone();
                let read: ClientReply = FrameReader::with_limit(&bytes[..], 1 << 20).recv().expect("a reply");
                assert_eq!(read, reply(tail.with(head.clone())));
            }
        }
    }
}

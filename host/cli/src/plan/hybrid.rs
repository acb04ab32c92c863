//! `sumac plan --algo hybrid` and `rab`: messages inside servers, and the trees of the rails between them.

use super::algorithm::{AlgorithmArgs, Rail, Row, steps_of};
use crate::exit::Failure;
use anyhow::anyhow;
use sumac::schedule::{Algorithm, Place, Schedule, Shape, Span, hybrid, rab};
use sumac_hal::op::{Collective, Path};

/// A part of an operation inside servers.
type Part = fn(Place, usize, u32) -> Schedule;

impl AlgorithmArgs {
    /// Print or draw `hybrid` or `rab`.
    ///
    /// # Errors
    /// Invalid input.
    pub(super) fn print_by_rails(&self, path: Path, is_json: bool) -> Result<String, Failure> {
        let refuse = |why: String| Err(Failure::Input(anyhow!("--algo {}: {why}", path.name())));
        if self.collective != Collective::AllReduce {
            return refuse(format!("there is no {} by it, but all_reduce", self.collective.name()));
        }
        if self.links.is_some() {
            return refuse("--links counts messages between ranks, and its trees are in the network".into());
        }
        let Some([servers, each]) = hybrid::servers(self.shape(), self.ranks) else {
            return refuse("it needs several servers of several ranks; set --shape, as servers:4".into());
        };
        let count = usize::try_from(self.count.unwrap_or_else(|| self.ranks.into())).unwrap_or(usize::MAX);
        let (parts, trees, messages): ([Part; 2], _, _) = match path {
            Path::Rab => ([rab::reduce_inside, rab::broadcast_inside], 1, messages_of_rab([servers, each], count)),
            _ => {
                let messages = f64::from(self.ranks) * 2.0 * f64::from(each - 1);
                ([hybrid::reduce_scatter_inside, hybrid::all_gather_inside], each, messages)
            }
        };
        self.check_printable(path, messages, "")?;
        let part = |make: Part| {
            let schedules: Vec<_> = Place::all(self.ranks).map(|place| make(place, count, each)).collect();
            steps_of(&schedules, count)
        };
        let (first, last) = (part(parts[0])?, part(parts[1])?);
        let rail = |place: Place| {
            let ranks = (0..servers).map(|server| server * each + place.rank().0).collect();
            let is_whole = path == Path::Rab;
            Rail { ranks, part: if is_whole { Span::first(count) } else { hybrid::block_of(place, count, each) } }
        };
        let rails: Vec<_> = Place::all(self.ranks).take(trees as usize).map(rail).collect();
        let messages: usize = first.iter().chain(&last).map(Vec::len).sum();
        let summary = format!(
            "{} steps inside servers and {trees} tree{}, which carr{} {} elements at most; {messages} messages in all",
            first.len() + last.len(),
            if trees == 1 { "" } else { "s" },
            if trees == 1 { "ies" } else { "y" },
            rails.iter().map(|rail| rail.part.len).max().unwrap_or(0)
        );
        let rows: Vec<_> = first
            .into_iter()
            .map(Row::Messages)
            .chain([Row::Trees(rails)])
            .chain(last.into_iter().map(Row::Messages))
            .collect();
        self.render((path, count), &rows, &summary, None, is_json)
    }
}

/// The messages of all ranks by `rab`.
fn messages_of_rab([servers, each]: [u32; 2], count: usize) -> f64 {
    let parts = [rab::reduction(count, each), rab::broadcast(count, each)].map(Algorithm::named);
    let inside = parts.into_iter().flatten().map(|part| part.cost(each, Shape::Line, count).messages);
    f64::from(servers) * inside.sum::<f64>()
}

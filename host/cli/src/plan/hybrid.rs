//! `sumac plan --algo hybrid`: messages inside servers, and the trees of the rails between them.

use super::algorithm::{AlgorithmArgs, Rail, Row, steps_of};
use crate::exit::Failure;
use anyhow::anyhow;
use sumac::schedule::{Place, hybrid};
use sumac_hal::op::{Collective, Path};

impl AlgorithmArgs {
    /// Print or draw `hybrid`.
    ///
    /// # Errors
    /// Invalid input.
    pub(super) fn print_hybrid(&self, is_json: bool) -> Result<String, Failure> {
        let refuse = |why: String| Err(Failure::Input(anyhow!("--algo hybrid: {why}")));
        if self.collective != Collective::AllReduce {
            return refuse(format!("there is no {} by it, but all_reduce", self.collective.name()));
        }
        if self.links.is_some() {
            return refuse("--links counts messages between ranks, and its trees are in the network".into());
        }
        let Some([servers, each]) = hybrid::servers(self.shape(), self.ranks) else {
            return refuse("it needs several servers of several ranks; set --shape, as servers:4".into());
        };
        self.check_printable(Path::Hybrid, f64::from(self.ranks) * 2.0 * f64::from(each - 1), "")?;
        let count = usize::try_from(self.count.unwrap_or_else(|| self.ranks.into())).unwrap_or(usize::MAX);
        let part = |make: fn(Place, usize, u32) -> _| {
            let schedules: Vec<_> = Place::all(self.ranks).map(|place| make(place, count, each)).collect();
            steps_of(&schedules, count)
        };
        let (scatter, gather) = (part(hybrid::reduce_scatter_inside)?, part(hybrid::all_gather_inside)?);
        let rail = |place: Place| {
            let ranks = (0..servers).map(|server| server * each + place.rank().0).collect();
            Rail { ranks, part: hybrid::block_of(place, count, each) }
        };
        let rails: Vec<_> = Place::all(self.ranks).take(each as usize).map(rail).collect();
        let messages: usize = scatter.iter().chain(&gather).map(Vec::len).sum();
        let summary = format!(
            "{} steps inside servers and {each} trees, which carry {} elements at most; {messages} messages in all",
            scatter.len() + gather.len(),
            rails.iter().map(|rail| rail.part.len).max().unwrap_or(0)
        );
        let rows: Vec<_> = scatter
            .into_iter()
            .map(Row::Messages)
            .chain([Row::Trees(rails)])
            .chain(gather.into_iter().map(Row::Messages))
            .collect();
        self.render((Path::Hybrid, count), &rows, &summary, None, is_json)
    }
}

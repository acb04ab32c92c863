//! `sumac plan --algo`: the messages of a collective algorithm, drawn or printed, and what they load onto links.

use super::drawing;
use crate::exit::Failure;
use crate::perf::{Choice, algorithm_parser, collective_parser};
use anyhow::{Context, anyhow, ensure};
use clap::Args;
use serde::Serialize;
use std::fmt::Write as _;
use std::str::FromStr;
use sumac::schedule::loads::{Dragonfly, FatTree, FullMesh, Grid, Loads, Topology};
use sumac::schedule::rounds::{Message, rounds};
use sumac::schedule::tree::Tree;
use sumac::schedule::{ALGORITHMS, Algorithm, Cost, Place, Problem, Schedule, Shape, Span};
use sumac_hal::ctrl::Order;
use sumac_hal::ids::Rank;
use sumac_hal::op::{Collective, Path};

/// The options of `sumac plan --algo`.
#[derive(Debug, Args)]
#[group(skip)]
pub(crate) struct AlgorithmArgs {
    /// Print the messages of this algorithm step by step instead of a tree, or compare all with --links
    #[arg(long, value_name = "NAME", value_parser = algorithm_parser(), conflicts_with_all = FABRIC_OPTIONS)]
    pub(super) algo: Option<Choice<Path>>,
    /// Collective of --algo
    #[arg(long, value_name = "NAME", default_value = "all_reduce", value_parser = collective_parser(), requires = "algo")]
    pub(super) collective: Collective,
    /// Number of ranks of --algo
    #[arg(long, value_name = "N", default_value_t = 8, requires = "algo",
          value_parser = clap::value_parser!(u32).range(1..=i64::from(RANKS_MAX)))]
    pub(super) ranks: u32,
    /// Number of elements of --algo [default: one for each rank, or more where it divides them twice]
    #[arg(long, value_name = "N", requires = "algo", value_parser = clap::value_parser!(u64).range(0..=COUNT_MAX))]
    pub(super) count: Option<u64>,
    /// Root of the collective of --algo
    #[arg(long, value_name = "RANK", default_value_t = 0, requires = "algo")]
    root: u32,
    /// How the ranks of --algo or --explain lie: line, a grid as 2x4, or servers:4 [default: line,
    /// for --explain as the fabric has them]
    #[arg(long, value_name = "SHAPE", value_parser = clap::value_parser!(Shape))]
    pub(super) shape: Option<Shape>,
    /// Count what --algo loads onto each link: torus or mesh, of the dimensions of the shape, full-mesh,
    /// dragonfly:GROUP, with +OFFSET where rank 0 is not the first of its group, or fat-tree:LEAFxSPINES
    #[arg(long, value_name = "TOPOLOGY", requires = "algo")]
    pub(super) links: Option<Links>,
    /// Draw the messages of --algo as SVG
    #[arg(long, requires = "algo", conflicts_with_all = ["json", "links"])]
    svg: bool,
}

/// What goes with a fabric only.
const FABRIC_OPTIONS: [&str; 13] = [
    "topology",
    "inside",
    "hosts",
    "adapters",
    "exclude",
    "max_children",
    "size",
    "trees",
    "devices",
    "routes",
    "without",
    "explain",
    "dot",
];

/// The most ranks: a torus of 64 by 64.
const RANKS_MAX: u32 = 4096;
/// The most elements: sums over all ranks and steps stay exact as floating-point numbers.
const COUNT_MAX: u64 = 1 << 32;
/// The most messages that are printed or drawn.
const MESSAGES_MAX: f64 = 16_384.0;
/// The most messages whose links are counted: those of a ring of 724 ranks.
const COUNTED_MESSAGES_MAX: f64 = 1_048_576.0;

/// Links between ranks.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Links {
    Torus,
    Mesh,
    FullMesh,
    Dragonfly { group: u32, offset: u32 },
    FatTree { leaf: u32, spines: u32 },
}

impl FromStr for Links {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let number = |text: &str| text.parse::<u32>().ok().filter(|number| (1..=RANKS_MAX).contains(number));
        let parsed = match text.split_once(':') {
            None if text == "torus" => Some(Self::Torus),
            None if text == "mesh" => Some(Self::Mesh),
            None if text == "full-mesh" => Some(Self::FullMesh),
            Some(("dragonfly", groups)) => match groups.split_once('+') {
                Some((group, offset)) => number(group)
                    .zip(offset.parse().ok())
                    .filter(|(group, offset)| offset < group)
                    .map(|(group, offset)| Self::Dragonfly { group, offset }),
                None => number(groups).map(|group| Self::Dragonfly { group, offset: 0 }),
            },
            Some(("fat-tree", sizes)) => sizes
                .split_once('x')
                .and_then(|(leaf, spines)| Some(Self::FatTree { leaf: number(leaf)?, spines: number(spines)? })),
            _ => None,
        };
        parsed.ok_or_else(|| {
            format!(
                "torus, mesh, full-mesh, dragonfly:GROUP[+OFFSET] with OFFSET below GROUP, or fat-tree:LEAFxSPINES, with \
                 numbers from 1 to {RANKS_MAX}"
            )
        })
    }
}

impl Links {
    /// What carries messages between the ranks of a shape.
    fn topology(self, ranks: u32, shape: Shape) -> Box<dyn Topology> {
        let dims = || shape.dims(ranks).as_slice().to_vec();
        match self {
            Self::Torus => Box::new(Grid { dims: dims(), wraps: true }),
            Self::Mesh => Box::new(Grid { dims: dims(), wraps: false }),
            Self::FullMesh => Box::new(FullMesh { ranks }),
            Self::Dragonfly { group, offset } => {
                Box::new(Dragonfly { group, offset, groups: (ranks + offset).div_ceil(group) })
            }
            Self::FatTree { leaf, spines } => Box::new(FatTree { leaf, spines, ranks }),
        }
    }
}

/// What happens at the same time.
#[derive(Debug)]
pub(super) enum Row {
    /// A step of messages.
    Messages(Vec<Message>),
    /// Reductions in the network.
    Trees(Vec<Rail>),
}

/// The reduction of a rail's block in the rail's tree.
#[derive(Debug)]
pub(super) struct Rail {
    /// Its ranks.
    pub(super) ranks: Vec<u32>,
    /// The elements that it reduces.
    pub(super) part: Span,
}

/// An algorithm's messages, as JSON has them.
#[derive(Debug, Serialize)]
struct Printed<'a> {
    algo: &'static str,
    collective: &'static str,
    ranks: u32,
    shape: String,
    count: usize,
    steps: Vec<Vec<PrintedMessage>>,
    #[serde(skip_serializing_if = "Option::is_none")]
    trees: Option<PrintedTrees<'a>>,
    #[serde(skip_serializing_if = "Option::is_none")]
    links: Option<PrintedLinks<'a>>,
}

#[derive(Debug, Serialize)]
struct PrintedMessage {
    from: u32,
    to: u32,
    elements: usize,
    /// The first of them, if they are elements of the collective.
    first: Option<usize>,
    combined: bool,
}

/// Trees that reduce at the same time, after so many steps.
#[derive(Debug, Serialize)]
struct PrintedTrees<'a> {
    after_steps: usize,
    rails: Vec<PrintedRail<'a>>,
}

#[derive(Debug, Serialize)]
struct PrintedRail<'a> {
    ranks: &'a [u32],
    elements: usize,
    first: usize,
}

#[derive(Debug, Serialize)]
struct PrintedLinks<'a> {
    busiest: &'a [u64],
    congestion: u64,
}

impl AlgorithmArgs {
    /// Return what is asked for.
    ///
    /// # Errors
    /// Invalid input.
    pub(super) fn text(&self, algo: Choice<Path>, is_json: bool) -> Result<String, Failure> {
        self.shape().check(self.ranks).map_err(|why| Failure::Input(anyhow!("--shape: {why}")))?;
        if self.root >= self.ranks {
            return Err(Failure::Input(anyhow!("--root {}: ranks count from 0 to {}", self.root, self.ranks - 1)));
        }
        match (algo, self.links) {
            (Choice::All, Some(links)) if !is_json => self.compare(links),
            (Choice::All, _) => {
                Err(Failure::Input(anyhow!("--algo all: compares loads, so it needs --links, without --json")))
            }
            (Choice::One(path @ (Path::Hybrid | Path::Rab)), _) => self.print_by_rails(path, is_json),
            (Choice::One(path), _) => self.print(self.algorithm(path).map_err(Failure::Input)?, is_json),
        }
    }

    /// How the ranks lie.
    pub(super) fn shape(&self) -> Shape {
        self.shape.unwrap_or_default()
    }

    /// Return the algorithm of a family for the collective.
    fn algorithm(&self, path: Path) -> anyhow::Result<&'static Algorithm> {
        let of_path = || ALGORITHMS.iter().filter(move |algorithm| algorithm.path() == path);
        let is_wanted = |algorithm: &&Algorithm| algorithm.pattern.collective() == self.collective;
        let Some(found) = of_path().find(is_wanted) else {
            let known: Vec<_> = of_path().map(|algorithm| algorithm.pattern.collective().name()).collect();
            let (name, wanted) = (path.name(), self.collective.name());
            return Err(anyhow!("--algo {name}: there is no {wanted} by it, but {}", known.join(", ")));
        };
        self.check(found).with_context(|| format!("--algo {}", path.name()))?;
        Ok(found)
    }

    /// Check that the ranks lie as an algorithm needs it.
    fn check(&self, algorithm: &Algorithm) -> anyhow::Result<()> {
        let fits = !algorithm.needs_dimensions() || self.shape().is_multidimensional(self.ranks);
        ensure!(fits, "it needs at least two dimensions of at least two ranks; set --shape, as 2x4");
        Ok(())
    }

    /// The number of elements, unless it is given: as many as the algorithm divides without rest.
    fn count(&self, algorithm: &Algorithm) -> usize {
        let dims = self.shape().dims(self.ranks).as_slice().len() as u64;
        let divides_twice = self.shape() != Shape::Line || matches!(algorithm.path(), Path::Swing | Path::SwingLatency);
        let each = if divides_twice { 2 * dims } else { 1 };
        usize::try_from(self.count.unwrap_or(u64::from(self.ranks) * each)).unwrap_or(usize::MAX)
    }

    fn cost(&self, algorithm: &Algorithm) -> Cost {
        algorithm.cost(self.ranks, self.shape(), self.count(algorithm))
    }

    /// The number of messages of all ranks, further pieces included.
    fn pieces(&self, cost: &Cost) -> f64 {
        cost.messages + f64::from(self.ranks) * cost.extra_pieces
    }

    /// Make all ranks' schedules, one at a time.
    fn schedules<'a>(&'a self, algorithm: &'static Algorithm, tree: &'a Tree) -> impl Iterator<Item = Schedule> + 'a {
        let problem =
            |place| Problem { place, count: self.count(algorithm), root: Rank(self.root), tree, shape: self.shape() };
        Place::all(self.ranks).map(move |place| (algorithm.schedule)(&problem(place)))
    }

    /// The expression of algorithms that evaluate any: from the left.
    fn tree(&self) -> Result<Tree, Failure> {
        Tree::flat(self.ranks, Order::TreeFold).map_err(Failure::input)
    }

    fn loads(&self, algorithm: &'static Algorithm, links: Links, tree: &Tree) -> Loads {
        Loads::count(self.schedules(algorithm, tree), &*links.topology(self.ranks, self.shape()))
    }

    /// Print or draw one algorithm.
    fn print(&self, algorithm: &'static Algorithm, is_json: bool) -> Result<String, Failure> {
        let (tree, cost) = (self.tree()?, self.cost(algorithm));
        let loads_alone = ", or --algo all with --links for the loads alone";
        self.check_printable(algorithm.path(), self.pieces(&cost), loads_alone)?;
        let (schedules, count): (Vec<_>, _) = (self.schedules(algorithm, &tree).collect(), self.count(algorithm));
        let steps = steps_of(&schedules, count)?;
        let summary = format!(
            "{} steps; the busiest rank sends {} elements and combines {}; {} messages in all",
            steps.len(),
            cost.sent_elements.round(),
            cost.reduced_elements.round(),
            steps.iter().map(Vec::len).sum::<usize>()
        );
        let loads = self.links.map(|links| self.loads(algorithm, links, &tree));
        let rows: Vec<_> = steps.into_iter().map(Row::Messages).collect();
        self.render((algorithm.path(), count), &rows, &summary, loads.as_ref(), is_json)
    }

    /// Check that an algorithm has no more messages than are printed; `or` says what else can be done.
    pub(super) fn check_printable(&self, path: Path, messages: f64, or: &str) -> Result<(), Failure> {
        if messages <= MESSAGES_MAX {
            return Ok(());
        }
        let (name, ranks) = (path.name(), self.ranks);
        Err(Failure::Input(anyhow!(
            "{name} of {ranks} ranks has {messages} messages; at most {MESSAGES_MAX} are printed: use fewer --ranks{or}"
        )))
    }

    /// Print or draw what an algorithm does with `count` elements.
    pub(super) fn render(
        &self,
        (path, count): (Path, usize),
        rows: &[Row],
        summary: &str,
        loads: Option<&Loads>,
        is_json: bool,
    ) -> Result<String, Failure> {
        let title = self.title(path, count);
        if self.svg {
            return Ok(drawing::draw(&title, self.ranks, rows));
        }
        if is_json {
            return self.json((path, count), rows, loads);
        }
        let mut text = format!("{title}\n{summary}\n");
        let mut steps = 0;
        for row in rows {
            let _ = match row {
                Row::Messages(step) => {
                    steps += 1;
                    let messages: Vec<_> = step.iter().map(describe).collect();
                    writeln!(text, "step {steps:>2}  {}", messages.join("  "))
                }
                Row::Trees(rails) => {
                    let rails: Vec<_> = rails.iter().map(describe_rail).collect();
                    writeln!(text, "trees    {}", rails.join("  "))
                }
            };
        }
        if let Some(loads) = loads {
            let busiest: Vec<_> = loads.busiest().map(|elements| elements.to_string()).collect();
            let (sum, times) = (loads.congestion(), relative(count, loads));
            let _ = writeln!(text, "busiest link of each step: {}", busiest.join(" "));
            let _ = writeln!(text, "together {sum} elements, {times:.3} times all");
        }
        Ok(text)
    }

    fn json(&self, (path, count): (Path, usize), rows: &[Row], loads: Option<&Loads>) -> Result<String, Failure> {
        let printed = |message: &Message| PrintedMessage {
            from: message.from.0,
            to: message.to.0,
            elements: message.elements,
            first: message.part.map(|part| part.start),
            combined: message.combines,
        };
        let steps = rows.iter().filter_map(|row| if let Row::Messages(step) = row { Some(step) } else { None });
        let trees = rows.iter().enumerate().find_map(|(after_steps, row)| match row {
            Row::Trees(rails) => Some(PrintedTrees { after_steps, rails: rails.iter().map(PrintedRail::of).collect() }),
            Row::Messages(_) => None,
        });
        let busiest: Option<Vec<u64>> = loads.map(|loads| loads.busiest().collect());
        let links = busiest.as_ref().map(|busiest| PrintedLinks { busiest, congestion: busiest.iter().sum() });
        let text = serde_json::to_string_pretty(&Printed {
            algo: path.name(),
            collective: self.collective.name(),
            ranks: self.ranks,
            shape: self.shape().to_string(),
            count,
            steps: steps.map(|step| step.iter().map(printed).collect()).collect(),
            trees,
            links,
        });
        Ok(text.map_err(std::io::Error::from)? + "\n")
    }

    /// Compare all algorithms of the collective by what they load onto links.
    fn compare(&self, links: Links) -> Result<String, Failure> {
        let tree = self.tree()?;
        let of_collective = ALGORITHMS.iter().filter(|algorithm| algorithm.pattern.collective() == self.collective);
        let mut text = format!(
            "{} of n elements, {} ranks, {}\n{:<14} {:>7} {:>13} {:>14}\n",
            self.collective.name(),
            self.ranks,
            self.shape(),
            "algo",
            "steps",
            "sent / n",
            "busiest / n"
        );
        for algorithm in of_collective {
            let name = algorithm.path().name();
            if let Err(why) = self.check(algorithm) {
                let _ = writeln!(text, "{name:<14} {why}");
                continue;
            }
            let cost = self.cost(algorithm);
            let pieces = self.pieces(&cost);
            if pieces > COUNTED_MESSAGES_MAX {
                let _ = writeln!(text, "{name:<14} not counted: {pieces} messages, of at most {COUNTED_MESSAGES_MAX}");
                continue;
            }
            let times = relative(self.count(algorithm), &self.loads(algorithm, links, &tree));
            let sent = cost.sent_elements / (self.count(algorithm).max(1) as f64);
            let _ = writeln!(text, "{name:<14} {:>7} {sent:>13.3} {times:>14.3}", cost.steps);
        }
        Ok(text)
    }

    fn title(&self, path: Path, count: usize) -> String {
        let (name, collective) = (path.name(), self.collective.name());
        let shape = if self.shape() == Shape::Line { String::new() } else { format!(", {}", self.shape()) };
        format!("{name}: {collective} of {count} elements, {} ranks{shape}", self.ranks)
    }
}

impl<'a> PrintedRail<'a> {
    fn of(rail: &'a Rail) -> Self {
        Self { ranks: &rail.ranks, elements: rail.part.len, first: rail.part.start }
    }
}

/// The messages of all ranks' schedules of `count` elements, step by step.
pub(super) fn steps_of(schedules: &[Schedule], count: usize) -> Result<Vec<Vec<Message>>, Failure> {
    rounds(schedules, count).ok_or_else(|| Failure::run(anyhow!("a message of a schedule is never received")))
}

/// What the busiest links carry, as a multiple of the elements.
fn relative(count: usize, loads: &Loads) -> f64 {
    loads.congestion() as f64 / count.max(1) as f64
}

/// Say who sends what: `+` where the receiver combines it.
fn describe(message: &Message) -> String {
    let sign = if message.combines && message.elements > 0 { "+" } else { "" };
    format!("{}->{} {sign}{}", message.from.0, message.to.0, elements(message))
}

/// Say what a tree reduces, among whom.
fn describe_rail(rail: &Rail) -> String {
    let ranks: Vec<_> = rail.ranks.iter().map(ToString::to_string).collect();
    format!("{} +{}", ranks.join(","), span(rail.part))
}

/// Name the elements of a message: the first and the last, or how many there are.
pub(super) fn elements(message: &Message) -> String {
    match (message.part, message.elements) {
        (_, 0) => "-".into(),
        (Some(part), _) => span(part),
        (None, count) => format!("({count})"),
    }
}

/// Name elements: the first and the last.
pub(super) fn span(part: Span) -> String {
    match part.len {
        0 => "-".into(),
        1 => part.start.to_string(),
        _ => format!("{}-{}", part.start, part.end() - 1),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn links_are_named_with_their_sizes() {
        let parsed = |text: &str| text.parse::<Links>();
        assert_eq!(parsed("torus"), Ok(Links::Torus));
        assert_eq!(parsed("dragonfly:12+5"), Ok(Links::Dragonfly { group: 12, offset: 5 }));
        assert_eq!(parsed("fat-tree:8x4"), Ok(Links::FatTree { leaf: 8, spines: 4 }));
        for wrong in ["", "ring", "torus:4", "dragonfly", "dragonfly:0", "dragonfly:4+4", "fat-tree:8", "fat-tree:0x4"]
        {
            assert!(parsed(wrong).expect_err(wrong).contains("fat-tree:LEAFxSPINES"), "{wrong}");
        }
    }
}

//! `sumac topology`: show, compare and generate fabrics.

use crate::exit::Failure;
use crate::fabric::{self, FabricArgs};
use clap::{Args, Subcommand, ValueEnum};
use std::collections::BTreeMap;
use std::io::{self, Write};
use std::path::PathBuf;
use sumac::topo::generate::{self, Dragonfly, DragonflyPlus, Rails};
use sumac::topo::{Difference, Fabric, FabricError, Inside, LeafSpine, Locality, Rate};

/// `sumac topology`.
#[derive(Debug, Args)]
pub(crate) struct TopologyArgs {
    #[command(subcommand)]
    command: TopologyCommand,
}

#[derive(Debug, Subcommand)]
enum TopologyCommand {
    /// Show what a fabric file holds: format, switches, servers and their adapters, cables by rate, what is assumed
    Show(ShowArgs),
    /// Compare two readings of a fabric: `-` was lost, `+` is new
    Diff(DiffArgs),
    /// Generate a fabric and print it
    Generate(GenerateArgs),
}

#[derive(Debug, Args)]
struct ShowArgs {
    #[command(flatten)]
    fabric: FabricArgs,
    /// List each server with its adapters
    #[arg(long)]
    servers: bool,
}

#[derive(Debug, Args)]
struct DiffArgs {
    /// The fabric before
    before: PathBuf,
    /// The fabric after
    after: PathBuf,
}

#[derive(Debug, Args)]
struct GenerateArgs {
    #[command(subcommand)]
    shape: Shape,
    /// Rate of every cable in Gbit/s [default: not stated]
    #[arg(long, value_name = "GBITS", global = true, value_parser = rate)]
    rate: Option<Rate>,
    /// Format; ibsim's has no rates and no devices
    #[arg(long, value_enum, default_value_t = Written::Toml, global = true)]
    format: Written,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
enum Written {
    Toml,
    Ibsim,
}

/// The shapes. Hosts are those at each switch that has any.
#[derive(Debug, Subcommand)]
enum Shape {
    /// Leaves that reach every spine; oversubscribed where hosts exceed spines times cables
    LeafSpine {
        #[arg(long)]
        leaves: usize,
        #[arg(long)]
        spines: usize,
        #[arg(long)]
        hosts: usize,
        /// Parallel cables between a leaf and a spine
        #[arg(long, default_value_t = 1)]
        cables: usize,
    },
    /// Three levels of switches with this many ports
    FatTree {
        #[arg(long)]
        radix: usize,
    },
    /// Each adapter of a server at the leaves of its own rail
    Rails {
        #[arg(long)]
        servers: usize,
        #[arg(long)]
        rails: usize,
        #[arg(long, default_value_t = 32)]
        servers_per_leaf: usize,
        /// Spines of a rail
        #[arg(long, default_value_t = 0)]
        spines: usize,
    },
    /// Groups of routers that are all joined, with one cable between any two groups
    Dragonfly {
        /// Routers of a group
        #[arg(long)]
        routers: usize,
        /// Cables of a router to other groups
        #[arg(long)]
        global: usize,
        #[arg(long)]
        hosts: usize,
    },
    /// Groups of leaves and spines, whose spines are joined between groups
    DragonflyPlus {
        #[arg(long)]
        groups: usize,
        /// Leaves of a group
        #[arg(long)]
        leaves: usize,
        /// Spines of a group
        #[arg(long)]
        spines: usize,
        #[arg(long)]
        hosts: usize,
        /// Cables between any two groups
        #[arg(long, default_value_t = 1)]
        cables: usize,
    },
    /// A grid whose rows are rings, as in 4x4 or 3x4x5
    Torus {
        #[arg(value_parser = dimensions)]
        size: Dimensions,
        #[arg(long, default_value_t = 1)]
        hosts: usize,
    },
    /// A grid, as in 4x4 or 3x4x5
    Mesh {
        #[arg(value_parser = dimensions)]
        size: Dimensions,
        #[arg(long, default_value_t = 1)]
        hosts: usize,
    },
    /// Switches whose numbers differ in one bit are joined
    Hypercube {
        #[arg(long)]
        dimensions: usize,
        #[arg(long, default_value_t = 1)]
        hosts: usize,
    },
    /// A ring of switches
    Ring {
        #[arg(long)]
        switches: usize,
        #[arg(long, default_value_t = 1)]
        hosts: usize,
    },
    /// Switches that are all joined
    FullMesh {
        #[arg(long)]
        switches: usize,
        #[arg(long, default_value_t = 1)]
        hosts: usize,
    },
    /// One switch
    Star {
        #[arg(long)]
        hosts: usize,
    },
}

/// The sizes of a grid.
#[derive(Debug, Clone)]
struct Dimensions(Vec<usize>);

fn dimensions(text: &str) -> Result<Dimensions, String> {
    let sizes = text.split('x').map(str::parse).collect::<Result<_, _>>();
    sizes.map(Dimensions).map_err(|_| "expected sizes such as 4x4".into())
}

fn rate(text: &str) -> Result<Rate, String> {
    let gbits = text.parse().ok().and_then(Rate::from_gbits);
    gbits.ok_or_else(|| "expected Gbit/s above 0, at most 1000000".into())
}

/// Run the subcommand.
pub(crate) fn run(args: &TopologyArgs) -> Result<(), Failure> {
    let mut out = io::stdout().lock();
    match &args.command {
        TopologyCommand::Show(args) => show(&mut out, &args.fabric.read()?, args.servers)?,
        TopologyCommand::Diff(args) => {
            let (before, _) = fabric::read(&args.before).map_err(Failure::Input)?;
            let (after, _) = fabric::read(&args.after).map_err(Failure::Input)?;
            write!(out, "{}", Difference::between(&before, &after))?;
        }
        TopologyCommand::Generate(args) => {
            let fabric = args.shape.generate(args.rate).map_err(Failure::input)?;
            let text = match args.format {
                Written::Toml => fabric.to_toml(),
                Written::Ibsim => fabric.to_ibsim().map_err(Failure::input)?,
            };
            out.write_all(text.as_bytes())?;
        }
    }
    Ok(out.flush()?)
}

impl Shape {
    fn generate(&self, rate: Option<Rate>) -> Result<Fabric, FabricError> {
        match *self {
            Self::LeafSpine { leaves, spines, hosts, cables } => {
                Fabric::leaf_spine(LeafSpine { leaves, spines, hosts_per_leaf: hosts, cables, rate })
            }
            Self::FatTree { radix } => Fabric::fat_tree(radix, rate),
            Self::Rails { servers, rails, servers_per_leaf, spines } => {
                generate::rails(Rails { servers, rails, servers_per_leaf, spines, rate })
            }
            Self::Dragonfly { routers, global, hosts } => {
                generate::dragonfly(Dragonfly { routers, global, hosts, rate })
            }
            Self::DragonflyPlus { groups, leaves, spines, hosts, cables } => {
                generate::dragonfly_plus(DragonflyPlus { groups, leaves, spines, hosts, cables, rate })
            }
            Self::Torus { ref size, hosts } => generate::torus(&size.0, hosts, rate),
            Self::Mesh { ref size, hosts } => generate::mesh(&size.0, hosts, rate),
            Self::Hypercube { dimensions, hosts } => generate::hypercube(dimensions, hosts, rate),
            Self::Ring { switches, hosts } => generate::ring(switches, hosts, rate),
            Self::FullMesh { switches, hosts } => generate::full_mesh(switches, hosts, rate),
            Self::Star { hosts } => generate::star(hosts, rate),
        }
    }
}

/// Describe a fabric.
fn show(out: &mut impl Write, fabric: &Fabric, lists_servers: bool) -> io::Result<()> {
    let devices = fabric.switches().iter().filter(|switch| switch.aggregation.is_some()).count();
    writeln!(out, "format    {}", fabric.format())?;
    writeln!(out, "switches  {}, {devices} with a device", fabric.switches().len())?;
    writeln!(out, "servers   {} with {} adapters", fabric.servers().len(), fabric.hosts().len())?;
    let mut rates: BTreeMap<Option<Rate>, usize> = BTreeMap::new();
    fabric.links().iter().for_each(|link| *rates.entry(link.rate).or_default() += 1);
    let rates: Vec<String> = rates
        .iter()
        .rev()
        .map(|(rate, count)| match rate {
            Some(rate) => format!("{count} of {rate}"),
            None => format!("{count} of unknown rate"),
        })
        .collect();
    writeln!(out, "cables    {}", if rates.is_empty() { "none".into() } else { rates.join(", ") })?;
    for assumed in fabric.assumptions() {
        writeln!(out, "assumed   {assumed}")?;
    }
    for server in fabric.servers().iter().filter(|server| server.manages_fabric) {
        writeln!(out, "manager   {}, by its name: no place for ranks", server.name)?;
    }
    for (id, server) in fabric.server_ids().zip(fabric.servers()) {
        if lists_servers {
            let adapters: Vec<&str> = server.adapters.iter().map(|host| fabric.host(*host).name.as_str()).collect();
            writeln!(out, "server    {}: {}", server.name, adapters.join(", "))?;
        }
        if let Some(inside) = fabric.inside(id) {
            show_inside(out, &server.name, inside)?;
        }
    }
    Ok(())
}

/// Describe what is inside a server.
fn show_inside(out: &mut impl Write, server: &str, inside: &Inside) -> io::Result<()> {
    let rate = |rate: Option<Rate>| rate.map_or_else(|| "unknown rate".into(), |rate| rate.to_string());
    writeln!(out, "inside    {server}: {} GPUs, {} adapters", inside.gpus.len(), inside.adapters.len())?;
    for gpu in &inside.gpus {
        let near = |adapter: &&sumac::topo::InsideAdapter| Inside::locality(gpu, adapter) == Locality::SameSwitch;
        let near: Vec<&str> = inside.adapters.iter().filter(near).map(label).collect();
        let near =
            if near.is_empty() { "no adapter below its switch".into() } else { format!("near {}", near.join(", ")) };
        let links: u32 = gpu.nvlinks.iter().map(|link| link.count).fold(0, u32::saturating_add);
        let nvlink = match gpu.nvlinks.iter().map(|link| link.rate.map(Rate::gbits)).sum::<Option<f64>>() {
            _ if links == 0 => String::new(),
            Some(gbits) => format!(", {links} NVLinks of {gbits} Gbit/s together"),
            None => format!(", {links} NVLinks"),
        };
        writeln!(out, "  GPU {}: PCIe {}{nvlink}, {near}", gpu.bus, rate(gpu.pcie))?;
    }
    for adapter in &inside.adapters {
        writeln!(out, "  adapter {}: PCIe {}, port {}", label(adapter), rate(adapter.pcie), rate(adapter.rate))?;
    }
    Ok(())
}

fn label(adapter: &sumac::topo::InsideAdapter) -> &str {
    adapter.name.as_deref().unwrap_or(&adapter.bus)
}

//! What is inside a server: GPUs, adapters, and the PCIe and NVLink between them, from NCCL's topology files.
//!
//! NCCL writes such a file to `NCCL_TOPO_DUMP_FILE`, and cloud providers ship them for `NCCL_TOPO_FILE`:
//!
//! ```text
//! <system version="1"> <cpu numaid="0" ...>
//!   <pci busid="ffff:ff:01.0" class="0x060400" link_speed="16 GT/s" link_width="16">     a PCIe switch
//!     <pci busid="0003:00:00.0" class="0x030200" ...> <gpu sm="80"> <nvlink count="12" .../> </gpu></pci>
//!     <pci busid="0103:00:00.0" class="0x020700" ...> <nic> <net name="mlx5_0" guid="0x..."/> </nic></pci>
//! ```
//!
//! It is no fabric: [`Fabric::join_inside`] joins it to the servers of one, by the adapters' GUIDs or by name.
//!
//! Invariants: at most [`ELEMENTS_MAX`] elements are read, without entities of their own; PCIe rates are those of the
//! slowest link up to the CPU.

use super::{Fabric, FabricError, JoinError, Rate, ServerId, bare_guid, similar};
use roxmltree::{Document, Node, ParsingOptions};

/// The longest file, in elements and attributes.
const ELEMENTS_MAX: u32 = 1 << 16;
/// PCIe switches between a device and its CPU that are followed.
const DEPTH_MAX: usize = 16;

/// What is inside a server.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Inside {
    /// The GPUs, in the order of the file.
    pub gpus: Vec<InsideGpu>,
    /// The network adapters, in the order of the file.
    pub adapters: Vec<InsideAdapter>,
}

/// A place on PCIe.
#[derive(Debug, Clone, PartialEq, Eq)]
struct Slot {
    /// The bus ids of the PCIe switches above, the nearest first.
    switches: Vec<String>,
    /// The number of the CPU (NUMA node).
    cpu: Option<i32>,
}

/// A GPU.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct InsideGpu {
    /// Its bus id.
    pub bus: String,
    /// NCCL's number of it, if the file has it.
    pub number: Option<u32>,
    /// The rate of its PCIe, in one direction.
    pub pcie: Option<Rate>,
    /// Its NVLinks.
    pub nvlinks: Vec<NvLink>,
    slot: Slot,
}

/// NVLinks between a GPU and another device.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct NvLink {
    /// The bus id of the other end: a GPU or an NVSwitch.
    pub to: String,
    /// Links side by side.
    pub count: u32,
    /// Their rate together in one direction, if the GPU's generation is known.
    pub rate: Option<Rate>,
}

/// A network adapter.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct InsideAdapter {
    /// Its bus id.
    pub bus: String,
    /// Its name, such as `mlx5_0`.
    pub name: Option<String>,
    /// Its GUID: the system image's, as 16 hex digits.
    pub guid: Option<String>,
    /// The rate of its port.
    pub rate: Option<Rate>,
    /// The rate of its PCIe, in one direction.
    pub pcie: Option<Rate>,
    slot: Slot,
}

/// How near a GPU and an adapter are.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub enum Locality {
    /// Below one PCIe switch.
    SameSwitch,
    /// Below one CPU.
    SameCpu,
    /// Below different CPUs.
    OtherCpu,
}

impl Inside {
    /// Parse a topology file of NCCL.
    ///
    /// # Errors
    /// [`FabricError`] names the line of what is malformed.
    pub fn from_nccl(text: &str) -> Result<Self, FabricError> {
        let options = ParsingOptions { nodes_limit: ELEMENTS_MAX, ..ParsingOptions::default() };
        let document = Document::parse_with_options(text, options).map_err(|error| FabricError::Syntax {
            line: error.pos().row as usize,
            found: format!("malformed XML ({error})"),
            expected: "NCCL's topology: <system> with <cpu>, <pci>, <gpu> and <net>".into(),
        })?;
        let refuse = |node: &Node<'_, '_>, found: String, expected: &str| FabricError::Syntax {
            line: document.text_pos_at(node.range().start).row as usize,
            found,
            expected: expected.into(),
        };
        let root = document.root_element();
        if !root.has_tag_name("system") {
            return Err(refuse(&root, format!("<{}>", root.tag_name().name()), "<system>"));
        }
        let mut inside = Self { gpus: Vec::new(), adapters: Vec::new() };
        for pci in root.descendants().filter(|node| node.has_tag_name("pci")) {
            let (slot, rate) = slot(&pci).ok_or_else(|| {
                refuse(&pci, format!("PCIe switches nested deeper than {DEPTH_MAX}"), "a server's PCIe")
            })?;
            let bus = pci.attribute("busid").unwrap_or_default().to_owned();
            match device_class(&pci) {
                Some(Class::Gpu) => inside.gpus.push(gpu(&pci, bus, slot, rate)),
                Some(Class::Network) => add_adapters(&mut inside.adapters, &pci, &bus, &slot, rate),
                None => {}
            }
        }
        if inside.gpus.is_empty() && inside.adapters.is_empty() {
            return Err(refuse(&root, "neither a GPU nor an adapter".into(), "<pci> of one of them"));
        }
        Ok(inside)
    }

    /// How near a GPU and an adapter are.
    pub fn locality(gpu: &InsideGpu, adapter: &InsideAdapter) -> Locality {
        if gpu.slot.switches.iter().any(|switch| adapter.slot.switches.contains(switch)) {
            Locality::SameSwitch
        } else if gpu.slot.cpu == adapter.slot.cpu {
            Locality::SameCpu
        } else {
            Locality::OtherCpu
        }
    }
}

enum Class {
    Gpu,
    Network,
}

/// The kind of a PCIe device, by its class code (PCI Code and ID Assignment) or by what is in it.
fn device_class(pci: &Node<'_, '_>) -> Option<Class> {
    let has = |tag: &str| pci.children().any(|child| child.has_tag_name(tag));
    match pci.attribute("class").unwrap_or_default() {
        class if class.starts_with("0x03") => Some(Class::Gpu),
        class if class.starts_with("0x02") => Some(Class::Network),
        _ if has("gpu") => Some(Class::Gpu),
        _ if has("nic") => Some(Class::Network),
        _ => None,
    }
}

/// The place of a device and the rate of its PCIe; `None` if it is too deep.
fn slot(pci: &Node<'_, '_>) -> Option<(Slot, Option<Rate>)> {
    let mut slot = Slot { switches: Vec::new(), cpu: None };
    let mut rate = pcie_rate(pci);
    // The device itself, the switches, the CPU and the system.
    for (depth, above) in pci.ancestors().skip(1).enumerate() {
        if depth > DEPTH_MAX {
            return None;
        }
        if above.has_tag_name("pci") {
            slot.switches.push(above.attribute("busid").unwrap_or_default().to_owned());
            rate = [rate, pcie_rate(&above)].into_iter().flatten().min();
        } else if above.has_tag_name("cpu") {
            slot.cpu = above.attribute("numaid").and_then(|number| number.trim().parse().ok());
        }
    }
    Some((slot, rate))
}

/// The rate of a PCIe link in one direction: transfers a second times lanes, less the line code.
fn pcie_rate(pci: &Node<'_, '_>) -> Option<Rate> {
    let transfers: f64 = pci.attribute("link_speed")?.split_whitespace().next()?.parse().ok()?;
    let lanes: u32 = pci.attribute("link_width")?.trim().parse().ok()?;
    // PCI Express base specification: 8b/10b up to 5 GT/s, then 128b/130b, and flits of 242 in 256 bytes from 64 GT/s.
    let code = match transfers {
        _ if transfers < 8.0 => 0.8,
        _ if transfers < 64.0 => 128.0 / 130.0,
        _ => 242.0 / 256.0,
    };
    Rate::from_gbits(transfers * f64::from(lanes) * code)
}

fn gpu(pci: &Node<'_, '_>, bus: String, slot: Slot, pcie: Option<Rate>) -> InsideGpu {
    let element = pci.children().find(|child| child.has_tag_name("gpu"));
    let number = |node: &Node<'_, '_>, name: &str| node.attribute(name)?.trim().parse::<u32>().ok();
    let generation = element.as_ref().and_then(|gpu| number(gpu, "sm"));
    let nvlinks = element.iter().flat_map(|gpu| gpu.children().filter(|child| child.has_tag_name("nvlink")));
    let nvlinks = nvlinks.filter_map(|link| {
        let count = number(&link, "count")?;
        let rate = nvlink_gbits(generation?).and_then(|gbits| Rate::from_gbits(f64::from(count) * gbits));
        Some(NvLink { to: link.attribute("target").unwrap_or_default().to_owned(), count, rate })
    });
    let nvlinks = nvlinks.collect();
    InsideGpu { bus, number: element.as_ref().and_then(|gpu| number(gpu, "dev")), pcie, nvlinks, slot }
}

/// The rate of an NVLink in one direction in Gbit/s, by the GPU's compute capability: half of what NVIDIA's data sheets
/// of P100, V100, A100, A40, H100 and B200 give for both directions, by the number of links.
fn nvlink_gbits(capability: u32) -> Option<f64> {
    match capability {
        60..=69 => Some(160.0),
        70..=80 | 90..=99 => Some(200.0),
        86..=89 => Some(112.5),
        100..=109 => Some(400.0),
        _ => None,
    }
}

fn add_adapters(adapters: &mut Vec<InsideAdapter>, pci: &Node<'_, '_>, bus: &str, slot: &Slot, pcie: Option<Rate>) {
    let nics = pci.children().filter(|child| child.has_tag_name("nic"));
    let nets = nics.flat_map(|nic| nic.children()).filter(|child| child.has_tag_name("net"));
    let before = adapters.len();
    let plain = InsideAdapter { bus: bus.into(), name: None, guid: None, rate: None, pcie, slot: slot.clone() };
    adapters.extend(nets.map(|net| {
        // NCCL writes Mbit/s.
        let mbits = net.attribute("speed").and_then(|speed| speed.trim().parse::<f64>().ok());
        InsideAdapter {
            name: net.attribute("name").map(str::to_owned),
            guid: net.attribute("guid").and_then(guid),
            rate: mbits.and_then(|mbits| Rate::from_gbits(mbits / 1000.0)),
            ..plain.clone()
        }
    }));
    if adapters.len() == before {
        adapters.push(plain);
    }
}

/// A GUID as [`bare_guid`] spells it. Zero is what adapters without one have.
fn guid(text: &str) -> Option<String> {
    let digits = text.trim().trim_start_matches("0x");
    let number = u64::from_str_radix(digits, 16).ok().filter(|number| *number != 0)?;
    Some(bare_guid(&format!("{number:016x}")))
}

/// Why an NCCL topology alone is no fabric, with what it holds.
pub(super) fn not_a_fabric(text: &str) -> FabricError {
    match Inside::from_nccl(text) {
        Err(error) => error,
        Ok(inside) => {
            let (gpus, adapters) = (inside.gpus.len(), inside.adapters.len());
            let instead = format!(
                "it beside the file of a fabric, as `sumac topology show --topology FABRIC --inside SERVER=FILE`: it \
                 tells what is inside a server ({gpus} GPUs, {adapters} adapters), and no switch or cable"
            );
            FabricError::Unfit { kind: "an NCCL topology", instead }
        }
    }
}

impl Fabric {
    /// Join what is inside a server to the servers whose name matches the pattern (`*` stands for any text), or,
    /// without one, to those with an adapter that has one of the topology's GUIDs. Return them.
    ///
    /// # Errors
    /// [`JoinError`] if there is no such server.
    pub fn join_inside(&mut self, servers: Option<&str>, inside: &Inside) -> Result<Vec<ServerId>, JoinError> {
        let joined: Vec<ServerId> = match servers {
            Some(pattern) => {
                let matches = |id: &ServerId| super::select::glob(pattern, &self.server(*id).name);
                let found: Vec<ServerId> = self.server_ids().filter(matches).collect();
                if found.is_empty() {
                    let names = self.servers().iter().map(|server| server.name.as_str());
                    let near = similar::nearest(pattern, names);
                    return Err(JoinError::NoServer { pattern: pattern.into(), near });
                }
                found
            }
            None => self.servers_of(inside)?,
        };
        for server in &joined {
            self.insides.insert(*server, inside.clone());
        }
        Ok(joined)
    }

    /// The servers with an adapter that has one of the GUIDs.
    fn servers_of(&self, inside: &Inside) -> Result<Vec<ServerId>, JoinError> {
        let guids: Vec<String> = inside.adapters.iter().filter_map(|adapter| adapter.guid.clone()).collect();
        if guids.is_empty() {
            return Err(JoinError::NoGuids);
        }
        let mut found: Vec<ServerId> =
            guids.iter().filter_map(|guid| Some(self.host(self.find_host(guid)?).server)).collect();
        found.sort();
        found.dedup();
        if found.is_empty() { Err(JoinError::UnknownGuids { guids }) } else { Ok(found) }
    }
}

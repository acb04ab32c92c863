//! The host's computation when no device does it: the declared expression over all ranks' contributions to one chunk,
//! with the production kernels and tree description.

use crate::oracle::Shape;
use sumac::plan::Child;
use sumac::schedule::tree::Tree;
use sumac_hal::ctrl::Order;
use sumac_hal::ids::Rank;
use sumac_hal::op::OpDesc;
use sumac_hal::reduce::Kernel;

/// Describe a shape for host collectives. Without a declared order any expression is valid.
pub(super) fn tree(shape: &Shape, ranks: usize, order: Order) -> Tree {
    let order = if order == Order::Arrival { Order::TreeFold } else { order };
    let mut nodes = Vec::new();
    add(shape, &mut nodes);
    Tree::new(nodes, ranks as u32, order).expect("a shape is a tree over its ranks")
}

/// Return the shape of an expression, below a node.
pub(super) fn shape_of(expression: &[Vec<Child>], node: usize) -> Shape {
    let child = |child: &Child| match child {
        Child::Rank(rank) => Shape::Rank(rank.0 as usize),
        Child::Node(below) => shape_of(expression, *below),
    };
    Shape::Node(expression[node].iter().map(child).collect())
}

fn add(shape: &Shape, nodes: &mut Vec<Vec<Child>>) -> Child {
    match shape {
        Shape::Rank(rank) => Child::Rank(Rank(*rank as u32)),
        Shape::Node(children) => {
            let index = nodes.len();
            nodes.push(Vec::new());
            let children = children.iter().map(|child| add(child, nodes)).collect();
            nodes[index] = children;
            Child::Node(index)
        }
    }
}

/// Return a chunk's result from the contributions of all ranks, in rank order.
pub(super) fn reduce(tree: &Tree, desc: &OpDesc, contributions: &[Vec<u8>]) -> Vec<u8> {
    let kernel = desc.dtype.zip(desc.op).and_then(|(dtype, op)| Kernel::new(dtype, op));
    let kernel = kernel.expect("what is only moved is held by its owner");
    let load = |rank: Rank| {
        let bytes = &contributions[rank.0 as usize];
        let mut accumulators = vec![0; bytes.len() / kernel.element_bytes() * kernel.accumulator_bytes()];
        kernel.load(&mut accumulators, bytes, false);
        accumulators
    };
    let combine = |mut left: Vec<u8>, right: Vec<u8>| {
        kernel.combine(&mut left, &right, true);
        left
    };
    let mut result = tree.evaluate(load, combine);
    let count = result.len() / kernel.accumulator_bytes();
    let len = kernel.finish(&mut result, count, tree.ranks());
    result.truncate(len);
    result
}

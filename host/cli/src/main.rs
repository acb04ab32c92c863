//! The `sumac` command.

fn main() {}

//! Draws a collective as SVG: a line for each rank, time downward, an arrow for each message, a bar for each tree.

use super::algorithm::{Rail, Row, elements, span};
use std::fmt::Write as _;
use sumac::schedule::rounds::Message;

/// Pixels between ranks, from the left to the first one, of a step, and above the first step.
const COLUMN: u32 = 72;
const LEFT: u32 = 88;
const STEP: u32 = 52;
const TOP: u32 = 76;
/// Pixels between trees that reduce at the same time, and around them.
const TREE: u32 = 26;

/// Ranks with more messages in a step have no room for what they carry.
const LABELLED_MAX: usize = 2;

/// Colours that fit light and dark pages.
const STYLE: &str = "<style>
text { font: 12px 'Segoe UI', 'Noto Sans', Helvetica, Arial, sans-serif; fill: #1f2328; text-anchor: middle }
.title { font-size: 14px; font-weight: 600; text-anchor: start }
.step, .key { fill: #59636e; text-anchor: start }
.part { font-size: 11px; paint-order: stroke; stroke: #ffffff; stroke-width: 4px }
.rank { fill: #ddf4ff; stroke: #0969da }
.life { stroke: #d1d9e0; stroke-width: 1 }
.move { stroke: #59636e; stroke-width: 1.4; stroke-dasharray: 5 3 }
.sum { stroke: #0969da; stroke-width: 1.8 }
.move-head { fill: #59636e }
.sum-head { fill: #0969da }
@media (prefers-color-scheme: dark) {
text { fill: #f0f6fc }
.step, .key { fill: #9198a1 }
.part { stroke: #0d1117 }
.rank { fill: #0c2d4f; stroke: #4493f8 }
.life { stroke: #3d444d }
.move { stroke: #9198a1 }
.sum { stroke: #4493f8 }
.move-head { fill: #9198a1 }
.sum-head { fill: #4493f8 }
}
</style>";

/// The same of trees.
const TREE_STYLE: &str = "<style>
.tree { stroke: #0969da; stroke-width: 4; stroke-linecap: round }
.member { fill: #0969da }
@media (prefers-color-scheme: dark) {
.tree { stroke: #4493f8 }
.member { fill: #4493f8 }
}
</style>
";

/// Draw what happens, step by step.
pub(super) fn draw(title: &str, ranks: u32, rows: &[Row]) -> String {
    let bottom = TOP + rows.iter().map(height).sum::<u32>();
    let tree_style = if rows.iter().any(|row| matches!(row, Row::Trees(_))) { TREE_STYLE } else { "" };
    let (width, height_px) = (LEFT + COLUMN * ranks.max(4), bottom + 44);
    let mut svg = format!(
        "<svg xmlns='http://www.w3.org/2000/svg' width='{width}' height='{height_px}' viewBox='0 0 {width} {height_px}' \
         role='img'>\n<title>{title}</title>\n<desc>A line for each rank, time downward. An arrow is a message, with the \
         elements that it carries.</desc>\n{STYLE}\n{tree_style}<defs>\n"
    );
    for kind in ["move", "sum"] {
        let _ = writeln!(
            svg,
            "<marker id='{kind}' viewBox='0 0 8 8' refX='7' refY='4' markerWidth='7' markerHeight='7' orient='auto'><path \
             class='{kind}-head' d='M0,0 L8,4 L0,8 z'/></marker>"
        );
    }
    let _ = writeln!(svg, "</defs>\n<text class='title' x='12' y='22'>{title}</text>");
    for rank in 0..ranks {
        let x = column(rank);
        let _ = writeln!(svg, "<line class='life' x1='{x}' y1='{TOP}' x2='{x}' y2='{bottom}'/>");
        let _ = writeln!(svg, "<circle class='rank' cx='{x}' cy='{}' r='14'/>", TOP - 22);
        let _ = writeln!(svg, "<text x='{x}' y='{}'>{rank}</text>", TOP - 18);
    }
    let (mut y, mut steps) = (TOP, 0);
    for row in rows {
        let middle = y + height(row) / 2 + 4;
        match row {
            Row::Messages(messages) => {
                steps += 1;
                let _ = writeln!(svg, "<text class='step' x='12' y='{middle}'>step {steps}</text>");
                draw_messages(&mut svg, messages, y);
            }
            Row::Trees(rails) => {
                let _ = writeln!(svg, "<text class='step' x='12' y='{middle}'>trees</text>");
                draw_trees(&mut svg, rails, y);
            }
        }
        y += height(row);
    }
    key(&mut svg, bottom + 28);
    svg + "</svg>\n"
}

/// The pixels that a row takes.
const fn height(row: &Row) -> u32 {
    match row {
        Row::Messages(_) => STEP,
        Row::Trees(rails) => TREE * (rails.len() as u32 + 1),
    }
}

/// Draw the messages of a step from `y` on.
fn draw_messages(svg: &mut String, step: &[Message], y: u32) {
    step.iter().for_each(|message| arrow(svg, message, y));
    let sent_by = |rank| step.iter().filter(|message| message.from == rank).count();
    let is_between = |message: &Message, other: &Message| (message.from, message.to) == (other.from, other.to);
    // After all arrows, so that none crosses them; several messages of two ranks together.
    for (nth, message) in step.iter().enumerate() {
        let is_first = !step[..nth].iter().any(|other| is_between(other, message));
        if is_first && sent_by(message.from) <= LABELLED_MAX {
            let together = step[nth..].iter().filter(|other| is_between(other, message) && other.elements > 0);
            label(svg, message, y, &together.map(elements).collect::<Vec<_>>().join(", "));
        }
    }
}

/// Draw trees, one below the other from `y` on, with a dot at each of its ranks.
fn draw_trees(svg: &mut String, rails: &[Rail], y: u32) {
    for (rail, y) in rails.iter().zip((1..).map(|nth| y + TREE * nth)) {
        let ends = [rail.ranks.first(), rail.ranks.last()].map(|rank| column(*rank.unwrap_or(&0)));
        let _ = writeln!(svg, "<line class='tree' x1='{}' y1='{y}' x2='{}' y2='{y}'/>", ends[0], ends[1]);
        for &rank in &rail.ranks {
            let _ = writeln!(svg, "<circle class='member' cx='{}' cy='{y}' r='5'/>", column(rank));
        }
        let words = span(rail.part);
        let _ = writeln!(svg, "<text class='part' x='{}' y='{}'>{words}</text>", ends[0] + COLUMN / 2, y + 4);
    }
}

const fn column(rank: u32) -> u32 {
    LEFT + COLUMN / 2 + COLUMN * rank
}

/// The ends of a message's arrow.
const fn ends(message: &Message, y: u32) -> [u32; 4] {
    [column(message.from.0), y + 6, column(message.to.0), y + STEP - 6]
}

fn arrow(svg: &mut String, message: &Message, y: u32) {
    let kind = if message.combines { "sum" } else { "move" };
    let [x1, y1, x2, y2] = ends(message, y);
    let _ = writeln!(svg, "<line class='{kind}' x1='{x1}' y1='{y1}' x2='{x2}' y2='{y2}' marker-end='url(#{kind})'/>");
}

/// Label an arrow near its start, where arrows in both directions do not meet.
fn label(svg: &mut String, message: &Message, y: u32, words: &str) {
    let [x1, y1, x2, y2] = ends(message, y).map(f64::from);
    let (x, y) = (x1 + 0.26 * (x2 - x1), y1 + 0.26 * (y2 - y1) + 4.0);
    if !words.is_empty() {
        let _ = writeln!(svg, "<text class='part' x='{x:.0}' y='{y:.0}'>{words}</text>");
    }
}

fn key(svg: &mut String, y: u32) {
    for (x, kind, words) in [(12, "sum", "the receiver combines"), (190, "move", "the receiver stores")] {
        let _ = writeln!(
            svg,
            "<line class='{kind}' x1='{x}' y1='{0}' x2='{1}' y2='{0}' marker-end='url(#{kind})'/>\n<text class='key' \
             x='{2}' y='{y}'>{words}</text>",
            y - 4,
            x + 32,
            x + 40
        );
    }
}

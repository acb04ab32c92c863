//! Similar names, for messages about unknown ones.

/// The names most similar to the one asked for, the nearest first, at most three.
pub(crate) fn nearest<'a>(asked: &str, names: impl Iterator<Item = &'a str>) -> Vec<String> {
    let mut near: Vec<(usize, &str)> = names.filter_map(|name| Some((similarity(asked, name)?, name))).collect();
    // Stable: equally near names stay in natural order.
    near.sort_by_key(|(distance, _)| *distance);
    near.into_iter().take(NEAR_MAX).map(|(_, name)| name.to_owned()).collect()
}

/// The distance of two names, or `None` if they are not similar.
fn similarity(asked: &str, name: &str) -> Option<usize> {
    let (asked, name) = (asked.to_lowercase(), name.to_lowercase());
    if !asked.is_empty() && name.contains(&asked) {
        return Some(0);
    }
    let distance = edit_distance(&asked, &name);
    (distance <= (asked.chars().count() / 4).max(2)).then_some(distance)
}

/// The Levenshtein distance: the minimum number of insertions, deletions and replacements of a character.
fn edit_distance(a: &str, b: &str) -> usize {
    let b: Vec<char> = b.chars().collect();
    let mut row: Vec<usize> = (0..=b.len()).collect();
    for (i, x) in a.chars().enumerate() {
        let mut diagonal = row[0];
        row[0] = i + 1;
        for (j, y) in b.iter().enumerate() {
            let replaced = diagonal + usize::from(x != *y);
            diagonal = row[j + 1];
            row[j + 1] = replaced.min(diagonal + 1).min(row[j] + 1);
        }
    }
    row[b.len()]
}

/// The end of a message that suggests names.
pub(crate) fn hint(near: &[String]) -> String {
    if near.is_empty() { String::new() } else { format!("; did you mean `{}`?", near.join("` or `")) }
}

/// List the first few items.
pub(crate) fn some_of(all: &[String]) -> String {
    let shown = all[..all.len().min(NEAR_MAX)].join(", ");
    if all.len() > NEAR_MAX { format!("{shown}, …") } else { shown }
}

/// Maximum number of names in a message.
const NEAR_MAX: usize = 3;

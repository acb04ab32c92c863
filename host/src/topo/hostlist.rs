//! Lists of hosts in Slurm's notation: `leaf[100-119,200]`, `rack[0-3]node[01-16]`, `a[1-2],b`.
//!
//! Brackets hold numbers, ranges, names, and lists with brackets of their own. Leading zeros of a range's first number
//! set its width. Invariant: no more names are made than there is room for, whatever the text says.

/// Why a list cannot be expanded.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) enum ListError {
    /// What is wrong with the text.
    Syntax(String),
    /// It names more hosts than there is room for.
    TooMany,
}

/// Brackets in brackets that are followed.
const DEPTH_MAX: usize = 4;

/// Expand a list into at most `room` names, in the order of the text.
pub(super) fn expand(text: &str, room: usize) -> Result<Vec<String>, ListError> {
    let mut names = Vec::new();
    for item in split(text)? {
        let more = room.saturating_sub(names.len());
        names.extend(product(item, more, 0)?);
    }
    Ok(names)
}

/// Split a list at the commas outside brackets.
pub(super) fn split(text: &str) -> Result<Vec<&str>, ListError> {
    let (mut items, mut depth, mut start) = (Vec::new(), 0_usize, 0);
    for (at, c) in text.bytes().enumerate() {
        match c {
            b'[' => depth += 1,
            b']' => depth = depth.checked_sub(1).ok_or_else(|| ListError::Syntax("a `]` without a `[`".into()))?,
            b',' if depth == 0 => {
                items.push(text[start..at].trim());
                start = at + 1;
            }
            _ => {}
        }
    }
    if depth > 0 {
        return Err(ListError::Syntax("a `[` without a `]`".into()));
    }
    items.push(text[start..].trim());
    if items.iter().any(|item| item.is_empty()) {
        return Err(ListError::Syntax("an empty item".into()));
    }
    Ok(items)
}

/// Expand an item: text and brackets in turn, whose lists multiply.
fn product(item: &str, room: usize, depth: usize) -> Result<Vec<String>, ListError> {
    let mut names = vec![String::new()];
    let mut rest = item;
    while !rest.is_empty() {
        let open = rest.find('[').unwrap_or(rest.len());
        let (literal, bracket) = rest.split_at(open);
        names.iter_mut().for_each(|name| name.push_str(literal));
        let Some(inner) = bracket.strip_prefix('[') else { break };
        // Balanced, as `split` has checked.
        let end = closing(inner).ok_or_else(|| ListError::Syntax("a `[` without a `]`".into()))?;
        let parts = bracketed(&inner[..end], room, depth)?;
        if names.len().checked_mul(parts.len()).is_none_or(|count| count > room) {
            return Err(ListError::TooMany);
        }
        names = names.iter().flat_map(|name| parts.iter().map(move |part| format!("{name}{part}"))).collect();
        rest = &inner[end + 1..];
    }
    if names.len() > room { Err(ListError::TooMany) } else { Ok(names) }
}

/// The position of the bracket that closes the one before `inner`.
fn closing(inner: &str) -> Option<usize> {
    let mut depth = 0_usize;
    inner.bytes().position(|c| match c {
        b'[' => {
            depth += 1;
            false
        }
        b']' if depth == 0 => true,
        b']' => {
            depth -= 1;
            false
        }
        _ => false,
    })
}

/// Expand what is in brackets: numbers, ranges, and lists.
fn bracketed(list: &str, room: usize, depth: usize) -> Result<Vec<String>, ListError> {
    if depth == DEPTH_MAX {
        return Err(ListError::Syntax(format!("brackets nested deeper than {DEPTH_MAX}")));
    }
    let mut parts = Vec::new();
    for item in split(list)? {
        let more = room.saturating_sub(parts.len());
        match item.split_once('-') {
            Some((first, last)) if is_number(first) && is_number(last) => parts.extend(range(first, last, more)?),
            _ => parts.extend(product(item, more, depth + 1)?),
        }
    }
    Ok(parts)
}

fn is_number(text: &str) -> bool {
    !text.is_empty() && text.bytes().all(|c| c.is_ascii_digit())
}

fn range(first: &str, last: &str, room: usize) -> Result<Vec<String>, ListError> {
    let number =
        |text: &str| text.parse::<u64>().map_err(|_| ListError::Syntax(format!("`{text}` is too large a number")));
    let (low, high) = (number(first)?, number(last)?);
    if low > high {
        return Err(ListError::Syntax(format!("the range `{first}-{last}` runs backwards")));
    }
    if high - low >= room as u64 {
        return Err(ListError::TooMany);
    }
    let width = first.len();
    Ok((low..=high).map(|value| format!("{value:0width$}")).collect())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lists_expand_in_the_order_of_the_text() {
        let golden: [(&str, &[&str]); 8] = [
            ("n1", &["n1"]),
            ("n[1-3,7]", &["n1", "n2", "n3", "n7"]),
            ("n[08-11]", &["n08", "n09", "n10", "n11"]),
            ("a[1-2],b", &["a1", "a2", "b"]),
            ("r[0-1]n[0-1]x", &["r0n0x", "r0n1x", "r1n0x", "r1n1x"]),
            ("n[a,b[1-2]]", &["na", "nb1", "nb2"]),
            ("[1-2]", &["1", "2"]),
            ("n-1", &["n-1"]),
        ];
        for (text, names) in golden {
            assert_eq!(
                expand(text, 100).as_deref(),
                Ok(&names.iter().map(ToString::to_string).collect::<Vec<_>>()[..]),
                "{text}"
            );
        }
    }

    #[test]
    fn malformed_or_endless_lists_are_refused() {
        let syntax = [
            "n[1-2",
            "n]",
            "a,,b",
            "",
            "n[3-1]",
            "n[1,]",
            "n[99999999999999999999-99999999999999999999]",
            "[[[[[[1]]]]]]",
        ];
        for text in syntax {
            assert!(matches!(expand(text, 100), Err(ListError::Syntax(_))), "{text}: {:?}", expand(text, 100));
        }
        for text in ["n[0-100]", "n[0-18446744073709551615]", "a[0-9]b[0-9]c", "n[0-50],m[0-49]", "a[0-99][0-99][0-99]"]
        {
            assert_eq!(expand(text, 99), Err(ListError::TooMany), "{text}");
        }
        assert_eq!(expand("n[0-98]", 99).map(|names| names.len()), Ok(99));
    }
}

//! Patterns of annotation names, as containerd's `pod_annotations` takes them: those of Go's
//! `path.Match`.

use std::fmt;
use std::str::FromStr;

use serde::{Deserialize, Serialize};

/// One pattern: `*` stands for any run of characters without a slash, `?` for one that is no slash,
/// `[a-c]` and `[^a-c]` for one that is in the ranges, or not; a backslash takes the next character
/// as it is. It must fit the whole name.
#[derive(Clone, Debug, Deserialize, PartialEq, Eq, Serialize)]
#[serde(try_from = "String", into = "String")]
pub struct Pattern {
    text: String,
    parts: Vec<Part>,
}

#[derive(Clone, Debug, PartialEq, Eq)]
enum Part {
    Any,
    One,
    In { ranges: Vec<(char, char)>, not: bool },
    Char(char),
}

impl Pattern {
    /// Whether it fits.
    pub fn fits(&self, name: &str) -> bool {
        // The parts that may come next: all ways of dividing the name at once, however many stars
        // there are.
        let mut next = vec![false; self.parts.len() + 1];
        if let Some(first) = next.first_mut() {
            *first = true;
        }
        self.skip_stars(&mut next);
        for c in name.chars() {
            let mut after = vec![false; next.len()];
            for (index, part) in
                self.parts.iter().enumerate().filter(|(index, _)| next.get(*index) == Some(&true))
            {
                let (fits, at) = match part {
                    Part::Any => (c != '/', index),
                    Part::One => (c != '/', index + 1),
                    Part::In { ranges, not } => (
                        ranges.iter().any(|(low, high)| (*low..=*high).contains(&c)) != *not,
                        index + 1,
                    ),
                    Part::Char(own) => (*own == c, index + 1),
                };
                if let Some(reached) = after.get_mut(at) {
                    *reached |= fits;
                }
            }
            self.skip_stars(&mut after);
            next = after;
        }
        next.last() == Some(&true)
    }

    /// A star may stand for nothing.
    fn skip_stars(&self, next: &mut [bool]) {
        for (index, part) in self.parts.iter().enumerate() {
            if *part == Part::Any
                && next.get(index) == Some(&true)
                && let Some(after) = next.get_mut(index + 1)
            {
                *after = true;
            }
        }
    }

    /// The text of the pattern.
    pub fn as_str(&self) -> &str {
        &self.text
    }
}

impl fmt::Display for Pattern {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.text)
    }
}

impl FromStr for Pattern {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let parts = parts(text).map_err(|()| format!("{text:?} is not a valid pattern"))?;
        Ok(Self { text: text.to_owned(), parts })
    }
}

fn parts(text: &str) -> Result<Vec<Part>, ()> {
    let mut parts = Vec::new();
    let mut rest = text.chars();
    while let Some(c) = rest.next() {
        parts.push(match c {
            '*' => Part::Any,
            '?' => Part::One,
            '\\' => Part::Char(rest.next().ok_or(())?),
            '[' => class(&mut rest)?,
            c => Part::Char(c),
        });
    }
    Ok(parts)
}

/// Parses a character class after its opening bracket.
fn class(rest: &mut std::str::Chars<'_>) -> Result<Part, ()> {
    let not = rest.as_str().starts_with('^');
    if not {
        rest.next();
    }
    let mut ranges = Vec::new();
    loop {
        if rest.as_str().starts_with(']') && !ranges.is_empty() {
            rest.next();
            return Ok(Part::In { ranges, not });
        }
        let low = end_of_range(rest)?;
        let high = if rest.as_str().starts_with('-') {
            rest.next();
            end_of_range(rest)?
        } else {
            low
        };
        ranges.push((low, high));
    }
}

fn end_of_range(rest: &mut std::str::Chars<'_>) -> Result<char, ()> {
    match rest.next() {
        None | Some('-' | ']') => Err(()),
        Some('\\') => rest.next().ok_or(()),
        Some(c) => Ok(c),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn patterns_of_go() {
        for (pattern, name, fits) in [
            ("abc", "abc", true),
            ("*", "abc", true),
            ("*c", "abc", true),
            ("a*", "a", true),
            ("a*", "ab/c", false),
            ("a*/b", "abc/b", true),
            ("a*/b", "a/c/b", false),
            ("a*b*c*d*e*/f", "axbxcxdxe/f", true),
            ("a*b*c*d*e*/f", "axbxcxdxexxx/fff", false),
            ("a*b?c*x", "abxbbxdbxebxczzx", true),
            ("a*b?c*x", "abxbbxdbxebxczzy", false),
            ("ab[c]", "abc", true),
            ("ab[b-d]", "abc", true),
            ("ab[e-g]", "abc", false),
            ("ab[^c]", "abc", false),
            ("ab[^e-g]", "abc", true),
            ("a\\*b", "a*b", true),
            ("a\\*b", "ab", false),
            ("a?b", "aäb", true),
            ("a[^a]b", "aäb", true),
            ("a?b", "a/b", false),
            ("a*b", "a/b", false),
            ("[\\]a]", "]", true),
            ("[\\-]", "-", true),
            ("[x\\-]", "z", false),
            ("", "", true),
            ("", "a", false),
            ("*x", "xxx", true),
        ] {
            assert_eq!(Pattern::from_str(pattern).unwrap().fits(name), fits, "{pattern} {name}");
        }
        for bad in ["[", "[^", "[^bc", "a[", "[]a]", "[-]", "[x-]", "[-x]", "\\", "[a-b-c]"] {
            assert!(Pattern::from_str(bad).is_err(), "{bad}");
        }
    }
}

//! Patterns of annotation names, as containerd's `pod_annotations` takes them: those of Go's
//! `path.Match`, without its classes and escapes.

use std::fmt;
use std::str::FromStr;

use serde::{Deserialize, Serialize};

/// One pattern: `*` stands for any run of characters without a slash, `?` for one that is no slash.
/// It must fit the whole name.
#[derive(Clone, Debug, Deserialize, PartialEq, Eq, Serialize)]
#[serde(try_from = "String", into = "String")]
pub struct Pattern(String);

impl Pattern {
    /// Whether it fits.
    pub fn fits(&self, name: &str) -> bool {
        // Only a slash stands for a slash, so the parts between them fit one by one.
        let mut parts = name.split('/');
        self.0.split('/').all(|part| parts.next().is_some_and(|name| fits(part, name)))
            && parts.next().is_none()
    }

    /// The text of the pattern.
    pub fn as_str(&self) -> &str {
        &self.0
    }
}

/// Whether a pattern fits a name, both without a slash. What an earlier star could take a later one
/// can, so only the last star is tried again, with one character more.
fn fits(pattern: &str, name: &str) -> bool {
    let (pattern, name) = (Vec::from_iter(pattern.chars()), Vec::from_iter(name.chars()));
    let (mut at, mut seen, mut star) = (0, 0, None);
    while let Some(c) = name.get(seen) {
        match (pattern.get(at), star) {
            (Some('*'), _) => {
                at += 1;
                star = Some((at, seen));
            }
            (Some(own), _) if *own == '?' || own == c => (at, seen) = (at + 1, seen + 1),
            (_, Some((after, begun))) => {
                (at, seen) = (after, begun + 1);
                star = Some((after, begun + 1));
            }
            (_, None) => return false,
        }
    }
    pattern.iter().skip(at).all(|rest| *rest == '*')
}

impl fmt::Display for Pattern {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

impl FromStr for Pattern {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        if text.contains(['[', '\\']) {
            return Err(format!("{text:?} has a class or an escape: a pattern has only * and ?"));
        }
        Ok(Self(text.to_owned()))
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
            ("a?b", "aäb", true),
            ("a?b", "a/b", false),
            ("a*b", "a/b", false),
            ("a/", "a", false),
            ("a", "a/", false),
            ("*/*", "a/b", true),
            ("**", "", true),
            ("a]-^", "a]-^", true),
            ("", "", true),
            ("", "a", false),
            ("*x", "xxx", true),
        ] {
            assert_eq!(Pattern::from_str(pattern).unwrap().fits(name), fits, "{pattern} {name}");
        }
        for bad in ["[", "a[b]", "\\*"] {
            assert!(Pattern::from_str(bad).is_err(), "{bad}");
        }
    }
}

//! The import that is added to the text of a TOML file: every other byte stays as it is.

use toml::de::DeTable;

/// A value of the root table, as its place in the text.
fn place(text: &str, key: &str) -> Result<Option<std::ops::Range<usize>>, String> {
    let table = DeTable::parse(text).map_err(|e| format!("is not TOML: {}", e.message()))?;
    Ok(table.get_ref().get(key).map(toml::Spanned::span))
}

/// The text whose list `imports` of the root table begins with `import`.
///
/// # Errors
/// The text is not TOML, or `imports` is no list.
pub(super) fn add_import(text: &str, import: &str) -> Result<String, String> {
    let import = toml::Value::from(import).to_string();
    let Some(place) = place(text, "imports")? else {
        return Ok(prepended(text, &format!("imports = [{import}]")));
    };
    let list = text[place.clone()].strip_prefix('[').ok_or("has `imports` that is not a list")?;
    let separator = if list.trim_start().starts_with(']') { "" } else { ", " };
    Ok(format!("{}[{import}{separator}{list}{}", &text[..place.start], &text[place.end..]))
}

/// The text with a first line: there the root table is, whatever follows.
fn prepended(text: &str, line: &str) -> String {
    const MARK: &str = "\u{feff}";
    let (mark, rest) = match text.strip_prefix(MARK) {
        Some(rest) => (MARK, rest),
        None => ("", text),
    };
    let end = if rest.lines().next().is_some() && rest.contains("\r\n") { "\r\n" } else { "\n" };
    format!("{mark}{line}{end}{rest}")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn all_else_of_a_text_stays() {
        let text = "# first\n\tversion = 2 # two\n[plugins]\n  a\t= 1\r\n";
        assert_eq!(
            add_import(text, "/c.d/*.toml").unwrap(),
            format!("imports = [\"/c.d/*.toml\"]\r\n{text}")
        );
        assert_eq!(add_import("\u{feff}b = 1", "x").unwrap(), "\u{feff}imports = [\"x\"]\nb = 1");
        // containerd before 2.4 reads a dotted key into a table that only a deeper header has named.
        assert!(add_import("[a.b.c]\n[a]\nb.d = 1\n", "x").is_ok());
    }

    #[test]
    fn an_import_is_added_to_lists_of_every_form() {
        for (list, expected) in [
            ("[]", "[\"x\"]"),
            ("[ ]", "[\"x\" ]"),
            ("['a']", "[\"x\", 'a']"),
            ("[\n  'a', # one\n  # two\n]", "[\"x\", \n  'a', # one\n  # two\n]"),
            ("[ # none\n]", "[\"x\",  # none\n]"),
        ] {
            let made = add_import(&format!("a = 1\nimports = {list}\nb = 2\n"), "x").unwrap();
            assert_eq!(made, format!("a = 1\nimports = {expected}\nb = 2\n"));
            let table: toml::Table = made.parse().unwrap();
            assert_eq!(table["imports"][0].as_str(), Some("x"));
        }
        assert!(add_import("imports = 1", "x").unwrap_err().contains("not a list"));
        assert!(add_import("imports = ", "x").unwrap_err().contains("is not TOML"));
    }
}

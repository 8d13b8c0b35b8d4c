//! Colours of `check` and `list` on a terminal. A pipe, a file and `NO_COLOR` get plain text.

use std::io::{self, IsTerminal as _};

const RED: u8 = 31;
const GREEN: u8 = 32;
const YELLOW: u8 = 33;
const CYAN: u8 = 36;

/// Where colours are shown: on a terminal that has them, unless the user wants none
/// (<https://no-color.org>).
pub fn shown() -> bool {
    let set = |name: &str| std::env::var_os(name).is_some_and(|value| !value.is_empty());
    let is_dumb = std::env::var_os("TERM").is_none_or(|term| term == "dumb");
    io::stdout().is_terminal() && !set("NO_COLOR") && !is_dumb
}

/// The findings of `check`, with the colour of each level and of each remedy.
pub fn findings(text: &str) -> String {
    let colours = [("ok", GREEN), ("warn", YELLOW), ("FAIL", RED), ("      ->", CYAN)];
    let line = |line: &str| {
        let found = colours.iter().find(|(begins, _)| line.starts_with(begins));
        found.map_or_else(
            || line.to_owned(),
            |(begins, colour)| painted(begins, *colour) + &line[begins.len()..],
        )
    };
    text.split_inclusive('\n').map(line).collect()
}

/// The table of `list`, with the colour of each state.
pub fn states(table: &str) -> String {
    let heading = table.lines().next().unwrap_or_default();
    let columns = heading.find("STATE").zip(heading.find("PID"));
    let line = |line: &str| {
        // The columns are aligned by characters.
        let byte = |column| line.char_indices().nth(column).map(|(at, _)| at);
        let cell = columns.and_then(|(state, pid)| byte(state).zip(byte(pid)));
        let Some((begin, end)) = cell else {
            return line.to_owned();
        };
        let state = line[begin..end].trim_end();
        let colour = match state {
            "STATE" | "created" | "starting" => return line.to_owned(),
            "ready" => GREEN,
            "quarantined" => RED,
            _ => YELLOW,
        };
        format!("{}{}{}", &line[..begin], painted(state, colour), &line[begin + state.len()..])
    };
    table.split_inclusive('\n').map(line).collect()
}

/// A text in a colour (ECMA-48 SGR).
fn painted(text: &str, colour: u8) -> String {
    format!("\x1b[{colour}m{text}\x1b[0m")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_finding_has_the_colour_of_its_level() {
        assert_eq!(
            findings("ok    a: b\nwarn  a: b\n      -> c\nFAIL  a: b\n      d\n"),
            "\x1b[32mok\x1b[0m    a: b\n\x1b[33mwarn\x1b[0m  a: b\n\x1b[36m      ->\x1b[0m c\n\
             \x1b[31mFAIL\x1b[0m  a: b\n      d\n"
        );
    }

    #[test]
    fn a_state_has_its_colour_and_the_columns_stay() {
        let table = "\
SANDBOX  POD  STATE                      PID  AGE
a        é    ready                      12   1s
b        ok   ready (cleanup failed 3x)  -    1s
c        w    starting                   -    1s
";
        let plain = states(table).replace("\x1b[0m", "");
        let plain = plain.replace("\x1b[32m", "").replace("\x1b[33m", "");
        assert_eq!(plain, table);
        let painted = states(table);
        let lines: Vec<_> = painted.lines().collect();
        assert!(!lines[0].contains('\x1b') && !lines[3].contains('\x1b'), "{painted}");
        assert!(lines[1].contains("é    \x1b[32mready\x1b[0m     "), "{painted}");
        assert!(lines[2].contains("\x1b[33mready (cleanup failed 3x)\x1b[0m  -"), "{painted}");
    }
}

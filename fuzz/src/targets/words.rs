//! Short texts with a grammar of their own: the first byte says which, the rest is the text.

use pause_sandboxer::cgroup::slice;
use pause_sandboxer::config::Pattern;
use pause_sandboxer::log_context::TraceId;
use pause_sandboxer::podsandbox::check_id;

use super::{Seeds, assert_told};

pub fn run(input: &[u8]) {
    let Some((kind, text)) = input.split_first() else { return };
    let Ok(text) = std::str::from_utf8(text) else { return };
    match kind {
        0 => pattern(text),
        1 => trace(text),
        2 => id(text),
        3 => of_slice(text),
        _ => {}
    }
}

/// A pattern, and behind a line break a name.
fn pattern(text: &str) {
    let (pattern, name) = text.split_once('\n').unwrap_or((text, ""));
    let Ok(read) = pattern.parse::<Pattern>() else { return };
    assert_eq!(read.as_str(), pattern);
    let fits = read.fits(name);
    // A text without special characters matches itself.
    if !pattern.contains(['*', '?', '[', '\\']) {
        assert_eq!(fits, pattern == name);
    }
    let starred: Pattern = format!("{pattern}*").parse().expect("with a star it is a pattern too");
    assert!(!fits || starred.fits(name), "{pattern} fits {name}, with a star it does not");
}

fn trace(text: &str) {
    let Some(trace) = TraceId::of_traceparent(text) else { return };
    assert_eq!(text.split('-').nth(1), Some(trace.to_string().as_str()));
    assert!(text.is_ascii() || !text.starts_with("00-"));
}

fn id(text: &str) {
    match check_id(text) {
        Ok(_) => assert!(
            (1..=76).contains(&text.len())
                && !text.contains(['/', '\0', ' '])
                && text != "."
                && text != "..",
            "{text:?} is an id"
        ),
        Err(e) => assert_told(&e.to_string()),
    }
}

fn of_slice(text: &str) {
    match slice::path(text) {
        Ok(path) => {
            assert!(path.is_relative());
            assert!(
                path.components()
                    .all(|part| part.as_os_str().to_string_lossy().ends_with(".slice")),
                "{path:?}"
            );
            assert!(
                text == "-.slice" || path.file_name().is_some_and(|name| name == text),
                "{text:?} is at {path:?}"
            );
        }
        Err(reason) => assert_told(&reason),
    }
}

pub fn seeds() -> Seeds {
    let input = |kind: u8, text: &str| [&[kind], text.as_bytes()].concat();
    vec![
        ("pattern".into(), input(0, "a*[b-d]?\\*/[^x]\nabcd*/y")),
        ("pattern-stars".into(), input(0, "a*b*c*d*/*\naxbxcxdx/y")),
        ("trace".into(), input(1, "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01")),
        (
            "trace-later".into(),
            input(1, "cc-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01-what-will-be"),
        ),
        ("id".into(), input(2, "0a1b-c.d_e")),
        ("id-path".into(), input(2, "../x")),
        ("slice".into(), input(3, "kubepods-burstable-pod1.slice")),
        ("slice-root".into(), input(3, "-.slice")),
    ]
}

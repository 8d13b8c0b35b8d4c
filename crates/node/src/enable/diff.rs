//! The difference of two texts, as `diff -u` shows it.

/// Lines around a change.
const CONTEXT: usize = 3;

/// One hunk from the first line that differs to the last one; empty if none does. `None` stands for
/// a file that does not exist.
pub(super) fn unified(path: &str, before: Option<&str>, after: Option<&str>) -> String {
    let split = |text: Option<&str>| -> Vec<String> {
        text.unwrap_or_default().split_inclusive('\n').map(str::to_owned).collect()
    };
    let (old, new) = (split(before), split(after));
    if old == new && before.is_some() == after.is_some() {
        return String::new();
    }
    let same = |pair: &(&String, &String)| pair.0 == pair.1;
    let head = old.iter().zip(&new).take_while(same).count();
    let most = old.len().min(new.len()) - head;
    let tail = old.iter().rev().zip(new.iter().rev()).take_while(same).count().min(most);
    let first = head.saturating_sub(CONTEXT);
    let end = |lines: &[String]| (lines.len() - tail + CONTEXT).min(lines.len());
    let name = |text: Option<&str>| if text.is_some() { path } else { "/dev/null" };
    let place = |lines: &[String]| {
        let count = end(lines) - first;
        format!("{},{count}", if count == 0 { first } else { first + 1 })
    };
    let mut shown = format!(
        "--- {}\n+++ {}\n@@ -{} +{} @@\n",
        name(before),
        name(after),
        place(&old),
        place(&new)
    );
    let mut add = |sign: char, lines: &[String]| {
        for line in lines {
            shown.push(sign);
            shown.push_str(line);
            if !line.ends_with('\n') {
                shown.push_str("\n\\ No newline at end of file\n");
            }
        }
    };
    add(' ', &old[first..head]);
    add('-', &old[head..old.len() - tail]);
    add('+', &new[head..new.len() - tail]);
    add(' ', &old[old.len() - tail..end(&old)]);
    shown
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn differences_are_those_of_diff() {
        assert_eq!(unified("/f", Some("a\n"), Some("a\n")), "");
        assert_eq!(
            unified("/f", None, Some("a\n")),
            "--- /dev/null\n+++ /f\n@@ -0,0 +1,1 @@\n+a\n"
        );
        assert_eq!(
            unified("/f", Some("a\n"), None),
            "--- /f\n+++ /dev/null\n@@ -1,1 +0,0 @@\n-a\n"
        );
        assert_eq!(
            unified("/f", Some("1\n2\n3\n4\n5\n6\n7\n8\n9"), Some("1\n2\n3\n4\nx\n6\n7\n8\n9")),
            "--- /f\n+++ /f\n@@ -2,7 +2,7 @@\n 2\n 3\n 4\n-5\n+x\n 6\n 7\n 8\n"
        );
        assert_eq!(
            unified("/f", Some("a\na\n"), Some("a\na\na")),
            "--- /f\n+++ /f\n@@ -1,2 +1,3 @@\n a\n a\n+a\n\\ No newline at end of file\n"
        );
    }

    /// patch(1) takes them.
    #[test]
    fn the_other_text_can_be_made_of_them() {
        let texts = ["", "a\n", "a\nb\nc\n", "b\n", "a\nx\nb\nc\nd\ne\nf\n", "a\nb\nc\nd\ne\nf\n"];
        for before in texts {
            for after in texts {
                let shown = unified("/f", Some(before), Some(after));
                let kept = |sign: char| -> String {
                    let lines = shown.lines().skip(3).filter(|line| line.starts_with([' ', sign]));
                    lines.fold(String::new(), |text, line| text + &line[1..] + "\n")
                };
                if !shown.is_empty() {
                    assert!(before.contains(&kept('-')) && after.contains(&kept('+')), "{shown}");
                }
            }
        }
    }
}

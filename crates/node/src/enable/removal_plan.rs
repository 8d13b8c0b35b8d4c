//! The result of `disable --dry-run`, for operators and for scripts.

use std::fmt;

use serde::Serialize;

/// The changes that `disable` would make, and what else a removal of the sandboxer depends on.
/// Scripts of the packages read it as JSON.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize)]
pub struct RemovalPlan {
    /// containerd's config file.
    pub containerd_config: String,
    /// The drop-in of `enable`, which need not exist.
    pub drop_in: String,
    /// The files that would be written or removed.
    pub changes: Vec<String>,
    /// The runtime handlers of this sandboxer in containerd's config.
    pub handlers: Vec<String>,
    /// The runtime handlers that containerd has loaded and that its config no longer defines;
    /// `None` if CRI does not respond.
    pub stale_handlers: Option<Vec<String>>,
    /// Files of containerd's config that were written after containerd's start.
    pub unread_files: Vec<String>,
    /// All changes as `diff -u` shows them.
    pub diff: String,
}

impl RemovalPlan {
    /// The plan as an object with a key per line, and with an item of a list per line.
    pub fn to_json(&self) -> String {
        // Strings and lists of strings can be serialized.
        serde_json::to_string_pretty(self).unwrap_or_default()
    }
}

impl fmt::Display for RemovalPlan {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let stale = self.stale_handlers.as_deref().unwrap_or_default();
        if self.changes.is_empty() && !stale.is_empty() {
            return write!(
                f,
                "containerd still has runtime handlers loaded that {} no longer defines: {}",
                self.containerd_config,
                stale.join(", ")
            );
        }
        if self.changes.is_empty() {
            return f.write_str(super::NO_CHANGES);
        }
        f.write_str(self.diff.trim_end())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_plan_without_changes_is_one_line() {
        let mut plan =
            RemovalPlan { containerd_config: "/c.toml".to_owned(), ..RemovalPlan::default() };
        assert_eq!(plan.to_string(), "no file needs a change");
        plan.stale_handlers = Some(vec!["a".to_owned(), "b".to_owned()]);
        let stale = "containerd still has runtime handlers loaded that /c.toml no longer defines: ";
        assert_eq!(plan.to_string(), format!("{stale}a, b"));
        plan.changes = vec!["/c.toml".to_owned()];
        plan.diff = "--- /c.toml\n".to_owned();
        assert_eq!(plan.to_string(), "--- /c.toml");
    }

    #[test]
    fn the_object_has_a_key_and_an_item_per_line() {
        let plan = RemovalPlan { changes: vec!["/a".to_owned()], ..RemovalPlan::default() };
        assert_eq!(
            plan.to_json(),
            "{\n  \"containerd_config\": \"\",\n  \"drop_in\": \"\",\n  \"changes\": [\n    \
             \"/a\"\n  ],\n  \"handlers\": [],\n  \"stale_handlers\": null,\n  \
             \"unread_files\": [],\n  \"diff\": \"\"\n}"
        );
    }
}

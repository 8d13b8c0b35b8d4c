//! `pause-sandboxer disable --check`: what needs the sandboxer on this node. The scripts of the
//! packages and the installer ask it before they remove the program.

use std::fmt;

use base::config::Config;

use super::disable::{BlockingPods, Removal};
use super::node_state::{NodeState, shown};
use super::pods::{self, Pods};
use super::{EnableError, NodeChange, must_be_root, refuse};
use crate::check::Subject;
use crate::check::containerd::{self as merged_config, NodeContainerd};

/// The facts for which the sandboxer is needed. Its text has a line for each, which begins with the
/// kind.
#[derive(Debug, Default)]
pub struct Need {
    /// `default`: new pods need the sandboxer, because its handler is containerd's default.
    default: Option<String>,
    /// `unread`: containerd may have a handler, or a default handler, that its files do not show.
    unread: Option<String>,
    /// `pod`: pods that only the sandboxer can stop and remove.
    pods: Pods,
    /// `config`: what `disable` removes from containerd's config. No pod needs it.
    config: Vec<String>,
}

impl Need {
    /// Whether pods need the sandboxer, or new ones would.
    pub fn is_needed(&self) -> bool {
        self.default.is_some() || !self.pods.is_empty()
    }
}

impl fmt::Display for Need {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let mut line = |kind: &str, fact: &str| writeln!(f, "{kind}: {fact}");
        self.default.iter().try_for_each(|fact| line("default", fact))?;
        self.unread.iter().try_for_each(|fact| line("unread", fact))?;
        self.pods.iter().try_for_each(|(id, name)| line("pod", &format!("{name} ({id})")))?;
        self.config.iter().try_for_each(|fact| line("config", fact))
    }
}

/// Finds what needs the sandboxer. Nothing is changed.
///
/// # Errors
/// It is unknown: the pods, or containerd's config, cannot be read, or its config file is unknown.
pub async fn need(change: &NodeChange) -> Result<Need, EnableError> {
    must_be_root()?;
    // A node with several containerds that no setting names has no handler of `enable`.
    let change = &change.located(&change.subject.config).unwrap_or_else(|_| change.clone());
    let subject = &change.subject;
    let containerd = NodeContainerd::find(subject);
    let located = change.check_config_file(&containerd, false);
    if located.is_err() || !containerd.is_installed() {
        let mut pods = pods::of_daemon(&subject.config).await?;
        pods.append(&mut pods::of_shims(&subject.config)?);
        if pods.is_empty() {
            located?;
        }
        return Ok(Need { pods, ..Need::default() });
    }
    let node = NodeState::read(subject).await?;
    let removal = Removal::new(&node, change, None)?;
    let BlockingPods { pods, unknown, .. } = BlockingPods::find(subject, &removal).await?;
    if let Some(reason) = unknown {
        return refuse(format!(
            "containerd runs, but CRI does not list the pods that may need the handler: {reason}"
        ));
    }
    let default = default_handler(&node, &removal, subject)?;
    Ok(Need {
        default,
        unread: unread(&node, &removal),
        pods,
        config: in_config(&node, &removal, &subject.config),
    })
}

fn default_handler(
    node: &NodeState,
    removal: &Removal,
    subject: &Subject,
) -> Result<Option<String>, EnableError> {
    let merged = node.merged.as_ref().map_err(|reason| {
        format!("containerd's default handler is unknown, correct its config first: {reason}")
    })?;
    let known = merged_config::all(merged, &subject.config);
    if !removal.handlers.contains(&known.default) {
        return Ok(None);
    }
    let how = match removal.default_handler() {
        Some((_, command)) => format!("run {command}"),
        None => format!(
            "remove default_runtime_name from {} or the file that it imports, and restart \
             containerd",
            node.containerd.file.display()
        ),
    };
    Ok(Some(format!("{} is containerd's default handler, for new pods: {how}", known.default)))
}

/// The default handler of the containerd that runs may be another than that of its files.
fn unread(node: &NodeState, removal: &Removal) -> Option<String> {
    let stale = removal.stale.clone().unwrap_or_default();
    let files = node.containerd.unread_files();
    let fact = if !stale.is_empty() {
        format!("containerd has runtime handlers that its config no longer defines: {stale:?}")
    } else if removal.changes_containerd() && !files.is_empty() {
        format!("containerd was started before {} was written", shown(&files, " and "))
    } else {
        return None;
    };
    Some(format!("{fact}: run `pause-sandboxer disable --restart`"))
}

fn in_config(node: &NodeState, removal: &Removal, config: &Config) -> Vec<String> {
    let handlers = removal.lost().into_iter().map(|name| format!("runtime handler {name}"));
    let files = removal.changes.paths().map(|path| format!("file {}", path.display()));
    let mut found: Vec<String> = handlers.chain(files).collect();
    if found.is_empty()
        && node.merged.as_ref().is_ok_and(|merged| merged_config::proxy(merged, config).is_ok())
    {
        found.push(format!("a proxy plugin in {}", node.containerd.file.display()));
    }
    found
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_fact_is_a_line_with_its_kind() {
        let mut need = Need { config: vec!["runtime handler a".to_owned()], ..Need::default() };
        assert!(!need.is_needed());
        assert_eq!(need.to_string(), "config: runtime handler a\n");
        need.pods.insert("abc".to_owned(), "default/web".to_owned());
        assert!(need.is_needed());
        need.unread = Some("u".to_owned());
        need.default = Some("d".to_owned());
        let text = "default: d\nunread: u\npod: default/web (abc)\nconfig: runtime handler a\n";
        assert_eq!(need.to_string(), text);
        assert_eq!(Need::default().to_string(), "");
    }
}

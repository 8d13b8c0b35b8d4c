//! One of the two handlers, as a case uses it: its own namespace, and `kubectl` in it.

use std::process::Child;
use std::time::Duration;

use anyhow::{Context, Result, ensure};
use kit::{Handler, TEST_IMAGE};
use serde_json::{Value, json};

use crate::cluster::{Cluster, output, until};

/// How long a pod may take to become what it should, on a busy machine of usual speed.
pub(crate) const LIMIT: Duration = Duration::from_secs(120);

/// The same as an option of kubectl, for this machine.
pub(crate) fn limit() -> String {
    timeout(LIMIT)
}

pub(crate) fn timeout(limit: Duration) -> String {
    format!("--timeout={}s", kit::patient(limit).as_secs())
}

/// The observed facts of a case, by name. Both handlers must show the same.
#[derive(Clone, Debug, Default)]
pub(crate) struct Facts(pub(crate) Vec<(String, String)>);

impl Facts {
    pub(crate) fn add(&mut self, name: impl Into<String>, value: impl ToString) {
        self.0.push((name.into(), value.to_string().trim().to_owned()));
    }

    pub(crate) fn get(&self, name: &str) -> Option<&str> {
        self.0.iter().find(|(known, _)| known == name).map(|(_, value)| value.as_str())
    }

    /// Adds a fact that is the same on every node.
    pub(crate) fn expect(&mut self, name: &str, value: impl ToString, wanted: &str) -> Result<()> {
        self.add(name, value);
        let seen = self.get(name).unwrap_or_default();
        ensure!(seen == wanted, "{name}: {seen:?} and not {wanted:?}");
        Ok(())
    }
}

#[derive(Clone, Copy)]
pub(crate) struct Side<'a> {
    pub(crate) cluster: &'a Cluster,
    pub(crate) handler: Handler,
}

impl Side<'_> {
    /// Also the name of the handler in results.
    pub(crate) fn namespace(&self) -> &'static str {
        match self.handler {
            Handler::Builtin => "builtin",
            Handler::Ours => "ours",
        }
    }

    /// Makes the namespace.
    pub(crate) fn prepare(&self) -> Result<()> {
        let namespace = self.namespace();
        self.cluster.kubectl(&["create", "namespace", namespace])?;
        self.kubectl(&["wait", "--for=create", "serviceaccount/default", &limit()])?;
        Ok(())
    }

    pub(crate) fn kubectl(&self, arguments: &[&str]) -> Result<String> {
        self.cluster.kubectl(&[&["--namespace", self.namespace()], arguments].concat())
    }

    /// `kubectl` in the background, as `port-forward` needs it.
    pub(crate) fn spawn(&self, arguments: &[&str]) -> Result<Child> {
        let arguments = [&["--namespace", self.namespace()], arguments].concat();
        let mut command = self.cluster.kubectl_command(&arguments);
        command.stdout(std::process::Stdio::null()).stderr(std::process::Stdio::null());
        command.spawn().with_context(|| arguments.join(" "))
    }

    pub(crate) fn kubectl_with(&self, arguments: &[&str], input: &str) -> Result<String> {
        let arguments = [&["--namespace", self.namespace()], arguments].concat();
        output(self.cluster.kubectl_command(&arguments), input.as_bytes())
    }

    /// The spec of a pod of this handler, with what most pods have.
    pub(crate) fn spec(&self, spec: Value) -> Value {
        let mut whole = json!({
            "terminationGracePeriodSeconds": 1,
            "automountServiceAccountToken": false,
        });
        if self.handler == Handler::Ours {
            whole["runtimeClassName"] = self.handler.name().into();
        }
        for (key, value) in spec.as_object().into_iter().flatten() {
            whole[key] = value.clone();
        }
        whole
    }

    pub(crate) fn apply(&self, object: &Value) -> Result<()> {
        self.kubectl_with(&["apply", "-f", "-"], &object.to_string()).map(drop)
    }

    /// Makes a pod, which need not run yet.
    pub(crate) fn create(&self, name: &str, spec: Value) -> Result<()> {
        self.apply(&json!({
            "apiVersion": "v1", "kind": "Pod",
            "metadata": { "name": name, "labels": { "app": name.get(..63).unwrap_or(name) } },
            "spec": self.spec(spec),
        }))
    }

    /// Makes a pod and waits until it is ready.
    pub(crate) fn run(&self, name: &str, spec: Value) -> Result<()> {
        self.create(name, spec)?;
        self.wait(&format!("pod/{name}"), "condition=Ready")
    }

    pub(crate) fn wait(&self, object: &str, what: &str) -> Result<()> {
        let what = format!("--for={what}");
        let waited = self.kubectl(&["wait", object, &what, &limit()]);
        waited.map(drop).map_err(|e| match self.kubectl(&["describe", object]) {
            Ok(described) => e.context(described),
            Err(_) => e,
        })
    }

    pub(crate) fn get(&self, object: &str) -> Result<Value> {
        Ok(serde_json::from_str(&self.kubectl(&["get", object, "-o", "json"])?)?)
    }

    pub(crate) fn pods(&self, label: &str) -> Result<Vec<Value>> {
        let list = self.kubectl(&["get", "pods", "-l", label, "-o", "json"])?;
        let list: Value = serde_json::from_str(&list)?;
        Ok(list["items"].as_array().cloned().unwrap_or_default())
    }

    /// The output of a shell in the first container of a pod.
    pub(crate) fn sh(&self, pod: &str, script: &str) -> Result<String> {
        self.kubectl(&["exec", pod, "--", "sh", "-c", script])
    }

    pub(crate) fn logs(&self, arguments: &[&str]) -> Result<String> {
        self.kubectl(&[&["logs"], arguments].concat())
    }

    /// Deletes objects and waits until they are gone.
    pub(crate) fn delete(&self, objects: &[&str]) -> Result<()> {
        self.kubectl(&[&["delete", "--ignore-not-found", &limit()], objects].concat()).map(drop)
    }

    /// Waits until something holds of an object.
    pub(crate) fn until(
        &self,
        object: &str,
        what: &str,
        holds: impl Fn(&Value) -> bool,
    ) -> Result<Value> {
        until(&format!("{object}: {what}"), LIMIT, || {
            let seen = self.get(object)?;
            ensure!(holds(&seen), "{}", seen["status"]);
            Ok(seen)
        })
    }

    /// The reasons of the events of an object, once each.
    pub(crate) fn events(&self, name: &str) -> Result<String> {
        let selector = format!("involvedObject.name={name}");
        let template = "jsonpath={range .items[*]}{.reason}{\"\\n\"}{end}";
        let listed =
            self.kubectl(&["get", "events", "--field-selector", &selector, "-o", template])?;
        let mut reasons: Vec<&str> = listed.lines().collect();
        reasons.sort_unstable();
        reasons.dedup();
        Ok(reasons.join(" "))
    }
}

/// A container that runs a script in busybox.
pub(crate) fn container(name: &str, script: &str) -> Value {
    json!({ "name": name, "image": TEST_IMAGE, "command": ["sh", "-c", script] })
}

/// A container that waits, and ends at once when it should.
pub(crate) fn sleeping(name: &str) -> Value {
    container(name, "trap 'exit 0' TERM; sleep 100000 & wait")
}

/// A container with other fields besides.
pub(crate) fn with(mut container: Value, more: Value) -> Value {
    for (key, value) in more.as_object().into_iter().flatten() {
        container[key] = value.clone();
    }
    container
}

/// A value of a path such as `status.phase` or `status.containerStatuses.0.restartCount`.
pub(crate) fn at(object: &Value, path: &str) -> String {
    let found = object.pointer(&format!("/{}", path.replace('.', "/")));
    match found {
        None => "none".to_owned(),
        Some(Value::String(text)) => text.clone(),
        Some(other) => other.to_string(),
    }
}

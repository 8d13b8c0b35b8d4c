//! An API server with the objects that `rollout.sh` uses, which also plays Jobs: one ends at the
//! second list after it was created.

use std::collections::BTreeMap;
use std::io::{BufRead as _, BufReader, Read as _, Write as _};
use std::net::{TcpListener, TcpStream};
use std::sync::{Arc, Mutex, MutexGuard};

use serde_json::{Value, json};

/// Objects of a page: the script must read all pages.
const PAGE: usize = 2;

/// The objects of the cluster, and what it does with Jobs.
#[derive(Default)]
pub(super) struct Objects {
    pub(super) nodes: BTreeMap<String, Value>,
    pub(super) jobs: BTreeMap<String, Value>,
    /// Pods of the RuntimeClass, by name, with their node.
    pub(super) pods: BTreeMap<String, String>,
    /// The pods of ended Jobs.
    pub(super) ended: Vec<Value>,
    pub(super) config: Value,
    /// Exit status and message of the Jobs of a node; without a status they do not end.
    pub(super) outcomes: BTreeMap<String, (Option<i64>, String)>,
    /// A pod that arrives on the node of the next change of a label.
    pub(super) arrives: Option<String>,
    /// Requests fail.
    pub(super) is_down: bool,
    /// The path whose next answer ends after its header.
    pub(super) cut: Option<&'static str>,
    /// What was done, in order: `install NODE`, `label NODE VALUE`.
    pub(super) journal: Vec<String>,
    /// How many Jobs ran at once.
    pub(super) peak: usize,
    made: usize,
}

impl Objects {
    fn nodes_of_jobs(&self) -> Vec<(String, String)> {
        let node = |job: &Value| job["metadata"]["annotations"]["pause-sandboxer/node"].clone();
        self.jobs
            .iter()
            .map(|(name, job)| (name.clone(), node(job).as_str().unwrap().to_owned()))
            .collect()
    }

    /// Lets Jobs end that were listed before.
    fn play(&mut self) {
        for (name, node) in self.nodes_of_jobs() {
            let (code, message) =
                self.outcomes.get(&node).cloned().unwrap_or_else(|| (Some(0), String::new()));
            let job = self.jobs.get_mut(&name).unwrap();
            let seen = job["seen"].as_u64().unwrap_or(0);
            job["seen"] = (seen + 1).into();
            let (Some(code), 1) = (code, seen) else { continue };
            let kind = if code == 0 { "Complete" } else { "Failed" };
            job["status"] = json!({ "conditions": [
                { "type": kind, "status": "True", "message": format!("exit code {code}") },
            ] });
            self.ended.push(json!({
                "metadata": {
                    "labels": { "job-name": name },
                    "ownerReferences": [{ "kind": "Job", "uid": job["metadata"]["uid"] }],
                    "creationTimestamp": seen.to_string(),
                },
                "status": { "containerStatuses": [
                    { "state": { "terminated": { "exitCode": code, "message": message } } },
                ] },
            }));
        }
    }

    fn patch(object: &mut Value, patch: &Value) {
        let Value::Object(fields) = patch else {
            *object = patch.clone();
            return;
        };
        if !object.is_object() {
            *object = json!({});
        }
        for (key, value) in fields {
            if value.is_null() {
                object.as_object_mut().unwrap().remove(key);
            } else {
                Self::patch(&mut object[key], value);
            }
        }
    }

    fn page(items: impl Iterator<Item = Value>, query: &BTreeMap<String, String>) -> Value {
        let begin: usize = query.get("continue").map_or(0, |text| text.parse().unwrap_or(0));
        let items: Vec<Value> = items.collect();
        let end = items.len().min(begin + PAGE);
        let more = if end < items.len() { end.to_string() } else { String::new() };
        json!({ "metadata": { "continue": more }, "items": items[begin.min(end)..end] })
    }

    fn answer(
        &mut self,
        method: &str,
        path: &str,
        query: &BTreeMap<String, String>,
        body: &Value,
    ) -> (u16, Value) {
        if self.is_down {
            return (503, json!("away"));
        }
        let selector = "app.kubernetes.io/instance=release,app.kubernetes.io/component=installer";
        let selected = query.get("labelSelector").is_some_and(|text| text == selector);
        let last = path.rsplit('/').next().unwrap().to_owned();
        match (method, path) {
            ("GET", "/api/v1/namespaces/system/configmaps/release") => (200, self.config.clone()),
            ("PATCH", "/api/v1/namespaces/system/configmaps/release") => {
                Self::patch(&mut self.config, body);
                self.journal.push(format!("config {}", self.config["data"]["revision"]));
                (200, json!({}))
            }
            ("GET", "/api/v1/nodes") => {
                let wanted = query["labelSelector"].as_str();
                assert!(["os=linux", ""].contains(&wanted), "{wanted}");
                (200, Self::page(self.nodes.values().cloned(), query))
            }
            ("GET", "/apis/batch/v1/namespaces/system/jobs") if selected => {
                if !query.contains_key("continue") || query["continue"].is_empty() {
                    self.play();
                }
                (200, Self::page(self.jobs.values().cloned(), query))
            }
            ("GET", "/api/v1/namespaces/system/pods") if selected => {
                (200, Self::page(self.ended.iter().cloned(), query))
            }
            ("GET", "/api/v1/pods") => {
                let node = query["fieldSelector"].strip_prefix("spec.nodeName=").unwrap();
                let node = node.split(',').next().unwrap();
                let pods = self.pods.iter().filter(|(_, on)| *on == node).map(|(name, _)| {
                    json!({ "metadata": { "namespace": "default", "name": name },
                        "spec": { "runtimeClassName": "class" } })
                });
                (200, Self::page(pods, query))
            }
            ("POST", "/apis/batch/v1/namespaces/system/jobs") => self.create(body),
            ("PATCH", path) if path.starts_with("/api/v1/nodes/") => {
                let Some(node) = self.nodes.get_mut(&last) else { return (404, json!("no node")) };
                Self::patch(node, body);
                if let Some(label) = body["metadata"]["labels"].get("label/ready") {
                    self.journal.push(format!("label {last} {label}"));
                    if let Some(pod) = self.arrives.take() {
                        self.pods.insert(pod, last);
                    }
                }
                (200, json!({}))
            }
            ("DELETE", path) if path.starts_with("/apis/batch/v1/namespaces/system/jobs/") => {
                self.ended.retain(|pod| pod["metadata"]["labels"]["job-name"] != *last);
                match self.jobs.remove(&last) {
                    Some(_) => (200, json!({})),
                    None => (404, json!("no Job")),
                }
            }
            _ => (403, json!(format!("{method} {path}"))),
        }
    }

    fn create(&mut self, body: &Value) -> (u16, Value) {
        let name = body["metadata"]["name"].as_str().unwrap().to_owned();
        if self.jobs.contains_key(&name) {
            return (409, json!("AlreadyExists"));
        }
        let mut job = body.clone();
        self.made += 1;
        job["metadata"]["uid"] = format!("job-{}", self.made).into();
        let node = job["metadata"]["annotations"]["pause-sandboxer/node"].as_str().unwrap();
        let mode = job["spec"]["template"]["spec"]["containers"][0]["args"][0].as_str().unwrap();
        self.journal.push(format!("{mode} {node}"));
        self.jobs.insert(name, job);
        let running = self.jobs.values().filter(|job| job.get("status").is_none()).count();
        self.peak = self.peak.max(running);
        (201, json!({}))
    }
}

/// The server, which serves as long as the test runs.
pub(super) struct Api {
    objects: Arc<Mutex<Objects>>,
    pub(super) address: String,
}

impl Api {
    pub(super) fn new() -> Self {
        let objects = Arc::new(Mutex::new(Objects::default()));
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let address = format!("http://{}", listener.local_addr().unwrap());
        let served = objects.clone();
        std::thread::spawn(move || {
            for stream in listener.incoming() {
                serve(&mut stream.unwrap(), &served);
            }
        });
        Self { objects, address }
    }

    pub(super) fn objects(&self) -> MutexGuard<'_, Objects> {
        self.objects.lock().unwrap()
    }
}

/// Answers one request. A client that has ended meanwhile needs no answer.
fn serve(stream: &mut TcpStream, objects: &Mutex<Objects>) {
    let mut reader = BufReader::new(stream.try_clone().unwrap());
    let mut first = String::new();
    let (mut length, mut has_token) = (0, false);
    let _ = reader.read_line(&mut first);
    loop {
        let mut line = String::new();
        if reader.read_line(&mut line).unwrap_or(0) <= 2 {
            break;
        }
        let line = line.trim_end().to_ascii_lowercase();
        has_token |= line == "authorization: bearer secret";
        if let Some(value) = line.strip_prefix("content-length: ") {
            length = value.parse().unwrap();
        }
    }
    let mut body = vec![0; length];
    let mut words = first.split(' ');
    let (Some(method), Some(url)) = (words.next(), words.next()) else { return };
    if reader.read_exact(&mut body).is_err() {
        return;
    }
    let (path, query) = url.split_once('?').unwrap_or((url, ""));
    let query = query
        .split('&')
        .filter_map(|pair| pair.split_once('='))
        .map(|(key, value)| (key.to_owned(), decoded(value)))
        .collect();
    let body = serde_json::from_slice(&body).unwrap_or(Value::Null);
    let (status, answer) = if has_token {
        objects.lock().unwrap().answer(method, path, &query, &body)
    } else {
        (401, json!("no token"))
    };
    let answer = answer.to_string();
    let is_cut = objects.lock().unwrap().cut.take_if(|cut| *cut == path).is_some();
    let _ = write!(
        stream,
        "HTTP/1.1 {status} Status\r\nContent-Length: {}\r\nConnection: close\r\n\r\n{}",
        answer.len(),
        if is_cut { "" } else { &answer }
    );
}

/// The text of a part of a URL.
fn decoded(text: &str) -> String {
    let mut parts = text.split('%');
    let mut decoded = parts.next().unwrap().to_owned();
    for part in parts {
        decoded.push(char::from(u8::from_str_radix(&part[..2], 16).unwrap()));
        decoded.push_str(&part[2..]);
    }
    decoded
}

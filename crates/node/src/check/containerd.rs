//! containerd: its version, its socket, and whether its config names this sandboxer.

use std::collections::{BTreeMap, BTreeSet};
use std::io;
use std::os::unix::fs::MetadataExt as _;
use std::path::Path;

use tokio::net::UnixStream;
use toml::{Table, Value};

use super::program::run;
use super::{ENABLE, ENABLE_SHIM_ONLY, Finding, HandlerRuntime, Level};
use super::{ShimFindings, Subject, kubelet, sandboxes};
use base::config::Config;
use base::runtime::check_served;
use containerd_api::cri::CriClient;

mod config;
pub(crate) mod enabled;
mod files;
pub(crate) mod find;
mod loaded;
mod node;
pub(crate) mod pause_image;
mod running;
pub(crate) mod shared;
pub(crate) mod shim_only;

pub use enabled::Mode;
pub(crate) use files::{Main, runtime_table};
use loaded::Answer;
pub(crate) use node::NodeContainerd;
use running::ContainerdProgram;
use shared::Difference;

const SUBJECT: &str = "containerd";
const CONFIG: &str = "containerd config";

/// The proxy plugin's name that the advice and the documents use.
const NAME: &str = "pause-sandboxer";

/// The plugin that holds CRI's runtime settings.
pub(crate) const RUNTIME: &str = "io.containerd.cri.v1.runtime";

/// The plugin that holds CRI's settings of images.
pub(crate) const IMAGES: &str = "io.containerd.cri.v1.images";

/// The plugin that holds all of CRI's settings in a config of version 2.
pub(crate) const CRI_OF_2: &str = "io.containerd.grpc.v1.cri";

/// The plugin that listens, from containerd 2.3 on.
const SERVER: &str = "io.containerd.server.v1.grpc";

/// The first two numbers of a version.
pub(crate) type Release = (u32, u32);

/// Examines containerd's program, socket and config, and its CRI. `has_daemon`: the daemon answers;
/// `None`: the node does not need it.
pub(super) async fn examine(
    subject: &Subject,
    node: &NodeContainerd,
    has_daemon: Option<bool>,
    shims: &ShimFindings<'_>,
) -> Vec<Finding> {
    let (version, release) = examine_program(&node.program).await;
    let mut findings = vec![version];
    // Only a containerd is asked for its config: any program may listen at the socket.
    if release.is_some() {
        findings.push(socket(&subject.config.containerd_address, &node.unit).await);
    }
    if node.pid.is_none() {
        // Before the first `enable` the settings have the usual address.
        for finding in findings.iter_mut().filter(|finding| finding.level == Level::Fail) {
            finding.advice +=
                &format!("; if one runs with another address, as in k3s, {ENABLE} finds it");
        }
    }
    if let Some(release) = release {
        findings.extend(examine_config(node, &subject.config, release, has_daemon, shims).await);
    }
    let mode = if has_daemon.is_some() { Mode::Sandboxer } else { Mode::ShimOnly };
    let (command, shim_only) = (node.enable_command(mode), node.enable_command(Mode::ShimOnly));
    for finding in &mut findings {
        let advice = finding.advice.replace(ENABLE, &command);
        finding.advice = advice.replace(ENABLE_SHIM_ONLY, &shim_only);
    }
    findings
}

async fn examine_config(
    node: &NodeContainerd,
    config: &Config,
    release: Release,
    has_daemon: Option<bool>,
    shims: &ShimFindings<'_>,
) -> Vec<Finding> {
    let (main, table) = match read_config(node).await {
        Ok(config) => config,
        Err(finding) => return vec![finding],
    };
    if let Some(disabled) = disabled(&table, node) {
        return vec![disabled];
    }
    let mut findings =
        vec![Finding::ok(CONFIG, format!("{} with its imports", node.file.display()))];
    findings.extend(main.missing_imports(&[]));
    findings.extend(main.lost_handlers(&table));
    let cri = CriClient::new(&config.containerd_address);
    let handlers = all(&table, config);
    let named = [&handlers.ours[..], &handlers.shim_only].concat();
    let condition = if has_daemon.is_some() { ", while the daemon responds" } else { "" };
    let restart = format!("systemctl restart {}{condition}; pods keep running", node.unit);
    let answer = loaded::ask(node, &named, &cri, &restart).await;
    let mut unread = node.started.and_then(|started| main.written_after(started, &restart));
    if let Answer::Loaded(lacking) = &answer {
        // The remedy is the same.
        unread = unread.filter(|_| lacking.is_none());
    }
    findings.extend(unread);
    if has_daemon.is_some() {
        findings.extend(config_findings(&table, &handlers, config));
    }
    findings.extend(shim_only::examine(&handlers).await);
    let is_asked = match answer {
        Answer::Silent(silent) => {
            findings.push(silent);
            return findings;
        }
        Answer::Loaded(lacking) => {
            findings.extend(lacking);
            true
        }
        Answer::NotAsked => false,
    };
    let ours = handlers.tables(Mode::Sandboxer).map(|(_, handler)| handler);
    let image = pause_image::needed(&table, release, ours);
    if let Some(image) = image.filter(|_| is_asked) {
        let command = node.enable_command(Mode::Sandboxer);
        findings.extend(pause_image::examine(&cri, &image, &command).await);
    }
    findings.extend(shims(handler_runtimes(&handlers), config.clone()).await);
    findings.extend(kubelet::examine(&handlers, &restart));
    if is_asked && has_daemon == Some(true) {
        findings.extend(sandboxes::compare(config, &handlers.ours, &restart).await);
    }
    findings
}

/// The config file, and what containerd makes of it.
///
/// # Errors
/// The finding that one of the two cannot be read.
async fn read_config(node: &NodeContainerd) -> Result<(Main, Table), Finding> {
    let shown = node.file.display();
    let main = files::Main::read(&node.file).map_err(|e| {
        let advice = match e.kind() {
            io::ErrorKind::NotFound => {
                format!("{ENABLE} creates it, or set its path with --containerd-config")
            }
            _ => "make it readable".to_owned(),
        };
        Finding::fail(CONFIG, format!("{shown}: {e}"), advice)
    })?;
    let table = node.dump().await.map_err(|reason| {
        let advice = "run the command; containerd does not start with a config that it cannot load";
        Finding::fail(CONFIG, reason, advice)
    })?;
    Ok((main, table))
}

/// The finding about the version of the program, and its release if it is a supported containerd.
async fn examine_program(program: &ContainerdProgram) -> (Finding, Option<Release>) {
    let mut command = program.command();
    command.arg("--version");
    let advice = "install and start containerd, or set the path of its program with --containerd";
    let reason = match run(command).await {
        Ok(output) if output.stdout.starts_with("containerd ") => return version(&output.stdout),
        Ok(output) => {
            let first = output.stdout.lines().next().unwrap_or_default();
            format!("prints {first:?}, so it is not containerd")
        }
        Err(reason) => reason,
    };
    let fact = format!("{} --version: {reason}", program.path().display());
    (Finding::fail(SUBJECT, fact, advice), None)
}

/// `printed` is what `containerd --version` prints: name, module, version, revision.
fn version(printed: &str) -> (Finding, Option<Release>) {
    let version = printed.split_whitespace().nth(2).unwrap_or_default();
    let mut numbers = version.trim_start_matches('v').split('.').map(|number| number.parse().ok());
    let release = numbers.next().flatten().zip(numbers.next().flatten());
    match release {
        Some((2, _)) => (Finding::ok(SUBJECT, format!("version {version}")), release),
        Some((0 | 1, _)) => {
            let fact = format!("version {version} cannot use external sandboxers");
            (Finding::fail(SUBJECT, fact, "upgrade containerd to 2.0 or newer"), None)
        }
        _ => {
            let fact = format!("unknown version: {:?}", printed.trim());
            (Finding::warn(SUBJECT, fact, "use containerd 2.x"), Some(release.unwrap_or((2, 0))))
        }
    }
}

/// `unit` starts containerd.
async fn socket(path: &Path, unit: &str) -> Finding {
    let shown = path.display();
    match UnixStream::connect(path).await {
        Ok(_) => Finding::ok(SUBJECT, format!("listens on {shown}")),
        Err(e)
            if matches!(e.kind(), io::ErrorKind::NotFound | io::ErrorKind::ConnectionRefused) =>
        {
            Finding::fail(
                SUBJECT,
                format!("does not listen on {shown}: {e}"),
                format!("systemctl start {unit}, or set containerd_address to its gRPC socket"),
            )
        }
        Err(e) => Finding::fail(
            SUBJECT,
            format!("{shown}: {e}"),
            "set containerd_address to containerd's gRPC socket",
        ),
    }
}

/// Examines containerd's merged config.
fn config_findings(table: &Table, handlers: &kubelet::Handlers, config: &Config) -> Vec<Finding> {
    let mut findings = Vec::new();
    match proxy(table, config) {
        Ok(name) => {
            findings.push(Finding::ok(CONFIG, format!("proxy plugin {name:?} is this sandboxer")));
            findings.extend(handler_findings(handlers, &name));
        }
        Err(finding) => findings.push(finding),
    }
    findings.extend(path_findings(table, config));
    findings.extend(setting_findings(table, handlers, config));
    findings
}

/// CRI must not be disabled, as the config of Docker's package has it.
pub(crate) fn disabled(table: &Table, node: &NodeContainerd) -> Option<Finding> {
    let names = table.get("disabled_plugins").and_then(Value::as_array).into_iter().flatten();
    let mut names = names.filter_map(Value::as_str);
    let name = names.find(|name| matches!(*name, "cri" | CRI_OF_2 | RUNTIME | IMAGES))?;
    let fact = format!("CRI plugin {name} is disabled, so kubelet can run no pod");
    let advice = format!(
        "remove it from disabled_plugins in {} or a file that it imports, then systemctl restart \
         {}",
        node.file.display(),
        node.unit
    );
    Some(Finding::fail(CONFIG, fact, advice))
}

/// Whether two paths lead to the same file, as through a link such as `/var/run`. Paths that do not
/// exist yet are compared by their directories and names.
pub(crate) fn same_file(a: &Path, b: &Path) -> bool {
    let id = |path: &Path| path.metadata().ok().map(|meta| (meta.dev(), meta.ino()));
    let place = |path: &Path| Some((id(path.parent()?)?, path.file_name()?.to_owned()));
    a == b
        || match (id(a), id(b)) {
            (Some(a), Some(b)) => a == b,
            (None, None) => place(a).is_some_and(|a| Some(a) == place(b)),
            _ => false,
        }
}

/// The name of the proxy plugin that is this sandboxer.
pub(crate) fn proxy(table: &Table, config: &Config) -> Result<String, Finding> {
    let socket = config.socket.display().to_string();
    let dialled =
        |address: &str| Path::new(address.strip_prefix("unix://").unwrap_or(address)).to_owned();
    let (mut ours, mut others) = (Vec::new(), Vec::new());
    for (name, plugin) in table.get("proxy_plugins").and_then(Value::as_table).into_iter().flatten()
    {
        let text = |key| plugin.get(key).and_then(Value::as_str).unwrap_or_default();
        let address = text("address");
        let (same, sandbox) =
            (same_file(&dialled(address), &config.socket), text("type") == "sandbox");
        match (same, sandbox) {
            (true, true) => ours.push(name.clone()),
            (true, false) => {
                let fact = format!(
                    "proxy plugin {name:?} has this sandboxer's address, but type {:?}",
                    text("type")
                );
                return Err(Finding::fail(CONFIG, fact, "set its type to \"sandbox\""));
            }
            (false, true) => others.push(format!("{name:?} at {address}")),
            (false, false) => {}
        }
    }
    match (ours.pop(), others.is_empty()) {
        (Some(name), _) => Ok(name),
        (None, true) => Err(Finding::fail(
            CONFIG,
            "no proxy plugin of type \"sandbox\"",
            format!(
                "{ENABLE}; or add: [proxy_plugins.{NAME}] with type = \"sandbox\" and address = \
                 \"{socket}\""
            ),
        )),
        (None, false) => Err(Finding::fail(
            CONFIG,
            format!("no sandbox proxy plugin has the address {socket}, but {}", others.join(", ")),
            "set its address to that socket, or `socket` of this sandboxer to its address",
        )),
    }
}

/// CRI's runtime settings.
pub(crate) fn runtime(table: &Table) -> Option<&Value> {
    table.get("plugins")?.get(RUNTIME)
}

/// The runtime handlers.
fn runtimes(table: &Table) -> impl Iterator<Item = (&String, &Value)> {
    runtime_table(table, RUNTIME).into_iter().flatten()
}

/// A string; empty if it is missing.
fn text(value: Option<&Value>) -> &str {
    value.and_then(Value::as_str).unwrap_or_default()
}

/// The runtimes of the handlers that need this program's files, each once.
fn handler_runtimes(handlers: &kubelet::Handlers) -> Vec<HandlerRuntime> {
    let named = handlers.all.iter().filter(|(name, _)| handlers.has(name));
    let runtime = |(name, handler): (&String, &Table)| HandlerRuntime {
        kind: text(handler.get("runtime_type")).to_owned(),
        binary: text(handler.get("options").and_then(|all| all.get("BinaryName"))).to_owned(),
        shim_only: handlers.shim_only.contains(name),
    };
    let all: BTreeSet<HandlerRuntime> = named.map(runtime).collect();
    // Another finding is about those that cannot be served.
    let is_served =
        |runtime: &HandlerRuntime| !runtime.kind.is_empty() && check_served(&runtime.kind).is_ok();
    all.into_iter().filter(is_served).collect()
}

/// All runtime handlers, with which of them need this program's files and which is the default.
pub(crate) fn all(table: &Table, config: &Config) -> kubelet::Handlers {
    let default =
        runtime(table).and_then(|cri| cri.get("containerd")?.get("default_runtime_name")?.as_str());
    let all: BTreeMap<String, Table> = runtimes(table)
        .filter_map(|(name, handler)| Some((name.clone(), handler.as_table()?.clone())))
        .collect();
    let sandboxer = proxy(table, config).ok();
    let is_ours = |handler: &Table| {
        let named = handler.get("sandboxer").and_then(Value::as_str);
        named.is_some() && named == sandboxer.as_deref()
    };
    let ours = all.iter().filter(|(_, handler)| is_ours(handler)).map(|(name, _)| name.clone());
    let ours: Vec<String> = ours.collect();
    kubelet::Handlers {
        default: default.unwrap_or_default().to_owned(),
        all,
        shim_only: shim_only::handlers(table, &ours),
        ours,
    }
}

/// The findings about the runtime handlers of the sandboxer, which containerd knows by this name.
fn handler_findings(handlers: &kubelet::Handlers, sandboxer: &str) -> Vec<Finding> {
    if handlers.ours.is_empty() {
        return vec![Finding::fail(
            CONFIG,
            format!("no runtime handler has sandboxer = \"{sandboxer}\""),
            format!(
                "{ENABLE}; or add: [plugins.\"{RUNTIME}\".containerd.runtimes.{NAME}] with \
                 runtime_type = \"io.containerd.runc.v2\" and sandboxer = \"{sandboxer}\""
            ),
        )];
    }
    let names: Vec<String> = handlers.ours.iter().map(|name| format!("{name:?}")).collect();
    let fact = format!("runtime handlers of this sandboxer: {}", names.join(", "));
    let mut findings = vec![Finding::ok(CONFIG, fact)];
    for (name, handler) in handlers.tables(Mode::Sandboxer) {
        let runtime = text(handler.get("runtime_type"));
        if let Err(reason) = check_served(runtime) {
            findings.push(Finding::fail(
                CONFIG,
                format!("no pod of runtime handler {name:?} can start: {reason}"),
                format!(
                    "remove sandboxer = \"{sandboxer}\" from that handler, and restart containerd"
                ),
            ));
        }
        if runtime.is_empty() {
            let advice = "set its runtime_type, such as \"io.containerd.runc.v2\"";
            let fact = format!("runtime handler {name:?} has no runtime_type");
            findings.push(Finding::fail(CONFIG, fact, advice));
        }
    }
    findings
}

/// Findings about containerd's directories and socket, which must equal the sandboxer's settings.
fn path_findings(table: &Table, config: &Config) -> Vec<Finding> {
    let default = Config::default();
    // From config version 4 on (containerd 2.3) the server is a plugin; the old key is still taken.
    let server = table.get("plugins").and_then(|plugins| plugins.get(SERVER));
    let address = server.or_else(|| table.get("grpc")).and_then(|grpc| grpc.get("address"));
    let (root, state) = (table.get("root"), table.get("state"));
    type PathOf = fn(&Config) -> &Path;
    let paths: [(&str, _, PathOf, &str); 3] = [
        ("root", root, |config| &config.containerd_root, "containerd_root"),
        ("state", state, |config| &config.containerd_state, "containerd_state"),
        ("grpc.address", address, |config| &config.containerd_address, "containerd_address"),
    ];
    let differing = paths.into_iter().filter_map(|(key, theirs, path, setting)| {
        let set = theirs.and_then(Value::as_str).filter(|text| !text.is_empty());
        let (theirs, ours) = (set.map_or_else(|| path(&default), Path::new), path(config));
        let (theirs_shown, ours_shown) = (theirs.display(), ours.display());
        let fact = format!("containerd's {key} is {theirs_shown}, but {setting} is {ours_shown}");
        let advice = format!("set {setting} = \"{theirs_shown}\"");
        // `enable` finds containerd by its address.
        let by_enable = if key == "grpc.address" { "" } else { &format!("{ENABLE}, or ") };
        let advice = format!("{by_enable}{advice}");
        (!same_file(theirs, ours)).then(|| Finding::fail(CONFIG, fact, advice))
    });
    differing.collect()
}

/// Findings about the settings that containerd and the sandboxer share.
fn setting_findings(table: &Table, handlers: &kubelet::Handlers, config: &Config) -> Vec<Finding> {
    let mut findings: Vec<Finding> =
        shared::differences(table, config).iter().map(|found| differs(found.key, found)).collect();
    findings.extend(handlers.tables(Mode::Sandboxer).filter_map(|(name, handler)| {
        let found = shared::annotations(handler, config)?;
        Some(differs(&format!("{} of runtime handler {name:?}", found.key), &found))
    }));
    let variables = shared::missing_variables(table, config);
    if !variables.is_empty() {
        findings.push(Finding::warn(
            CONFIG,
            format!("containerd sets {variables:?} for shims, this sandboxer does not"),
            format!("add {variables:?} to shim_env in this sandboxer's config"),
        ));
    }
    findings
}

/// The finding about a setting, by its name in the texts.
fn differs(key: &str, found: &Difference) -> Finding {
    let fact =
        format!("containerd's {key} is {}, but this sandboxer's is {}", found.theirs, found.ours);
    Finding::warn(CONFIG, fact, format!("{ENABLE} adopts it; or set {key} the same in both"))
}

#[cfg(test)]
mod tests;

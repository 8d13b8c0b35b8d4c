//! How a shim's binary is called: arguments and environment of the runtime-v2 protocol, and calls
//! that must end.

use std::collections::BTreeMap;
use std::ffi::OsString;
use std::io;
use std::path::Path;
use std::process::Stdio;
use std::time::Duration;

use nix::errno::Errno;
use nix::sys::signal::{Signal, killpg};
use nix::unistd::Pid;
use tokio::io::AsyncReadExt as _;
use tokio::process::{Child, Command};
use tokio::sync::Semaphore;

use super::ShimSettings;
use crate::config::CONTAINERD_NAMESPACE;
use crate::error::{IoContext as _, StepError};
use crate::process::spawn::limit_open_files;

/// How long a call may take.
const CALL_TIMEOUT: Duration = Duration::from_secs(10);

/// Calls of one kind at once. Further ones wait for a permit before their time limit begins: each
/// is a process, and a hundred deletions at once would take longer than that on a small node.
const AT_ONCE: usize = 32;
static DELETIONS: Semaphore = Semaphore::const_new(AT_ONCE);

/// How much a call may write; bytes.
const MOST: u64 = 64 << 10;

/// Where programs are on a node whose service manager names no more.
const PATH: &str = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin";

/// The daemon's own dealings with its service manager, which are no shim's.
const OWN: [&str; 9] = [
    "NOTIFY_SOCKET",
    "WATCHDOG_PID",
    "WATCHDOG_USEC",
    "LISTEN_PID",
    "LISTEN_FDS",
    "LISTEN_FDNAMES",
    "INVOCATION_ID",
    "JOURNAL_STREAM",
    "PATH",
];

/// Where shims and the runtimes that they call are looked for: the daemon's PATH, and what usually
/// belongs there.
pub fn path() -> String {
    let mut path = std::env::var("PATH").unwrap_or_default();
    for dir in PATH.split(':') {
        if !path.split(':').any(|listed| listed == dir) {
            if !path.is_empty() {
                path.push(':');
            }
            path.push_str(dir);
        }
    }
    path
}

/// What asks for a core scheduling domain, if it is not empty (containerd's `SCHED_CORE`).
const CORE_DOMAIN: &str = "SCHED_CORE";

/// Whose environment a shim gets, before what containerd adds and what an operator has set.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Inherited {
    /// The daemon's, as shims of other runtimes have that of containerd.
    Daemon,
    /// None. The own shim passes its environment on to the runtime and to the hooks of containers,
    /// which could read what only the daemon is to know, such as the password of a proxy.
    Nothing,
}

/// The environment of a shim: what it inherits, what containerd adds (`pkg/shim.Command`), and what
/// an operator has set.
fn environment(
    settings: &ShimSettings,
    inherited: Inherited,
    threads: &str,
) -> BTreeMap<OsString, OsString> {
    let protocol = [
        ("PATH", path()),
        ("TTRPC_ADDRESS", settings.containerd_ttrpc()),
        ("GRPC_ADDRESS", settings.containerd_address.display().to_string()),
        ("NAMESPACE", CONTAINERD_NAMESPACE.to_owned()),
        ("MAX_SHIM_VERSION", "2".to_owned()),
        ("GOMAXPROCS", threads.to_owned()),
    ];
    let mut environment: BTreeMap<OsString, OsString> = match inherited {
        Inherited::Daemon => std::env::vars_os().collect(),
        Inherited::Nothing => BTreeMap::new(),
    };
    environment.retain(|name, _| OWN.iter().all(|own| name != own));
    environment.extend(protocol.map(|(name, value)| (name.into(), value.into())));
    environment
        .extend(settings.environment.iter().map(|(name, value)| (name.into(), value.into())));
    environment
}

/// Whether the server gets a core scheduling domain of its own. containerd's shim makes it in its
/// `start`, which a server of ours has not had.
pub fn has_core_domain(environment: &[OsString]) -> bool {
    let value = |variable: &OsString| {
        let value = variable.to_str()?.strip_prefix(CORE_DOMAIN)?.strip_prefix('=')?;
        Some(!value.is_empty())
    };
    environment.iter().find_map(value).unwrap_or(false)
}

/// The arguments of a shim's server for group `id`.
pub fn server_arguments(settings: &ShimSettings, id: &str) -> Vec<OsString> {
    let address = settings.containerd_address.as_os_str().to_owned();
    vec![
        "-namespace".into(),
        CONTAINERD_NAMESPACE.into(),
        "-id".into(),
        id.into(),
        "-address".into(),
        address,
    ]
}

/// The environment of a shim's server, `NAME=value`.
pub fn server_environment(
    settings: &ShimSettings,
    inherited: Inherited,
    id: &str,
) -> Vec<OsString> {
    const SERVICE: &str = "OTEL_SERVICE_NAME";
    let mut environment = environment(settings, inherited, "4");
    if !settings.environment.contains_key(SERVICE) {
        environment.insert(SERVICE.into(), format!("containerd-shim-{id}").into());
    }
    let join = |(mut name, value): (OsString, OsString)| {
        name.push("=");
        name.push(value);
        name
    };
    environment.into_iter().map(join).collect()
}

/// Has the shim clean up in `bundle` after container `id`, whose server is dead: `delete`.
///
/// # Errors
/// It cannot be run, fails, or does not end in time.
pub async fn delete(
    settings: &ShimSettings,
    (binary, inherited): (&Path, Inherited),
    id: &str,
    bundle: &Path,
) -> Result<(), StepError> {
    let mut command = Command::new(binary);
    command
        .args(["-namespace", CONTAINERD_NAMESPACE, "-address"])
        .arg(&settings.containerd_address)
        .args(["-publish-binary", "containerd", "-id", id, "-bundle"])
        .arg(bundle)
        .arg("delete")
        .current_dir(bundle)
        .env_clear()
        .envs(environment(settings, inherited, "2"));
    // Never closed.
    let _permit = DELETIONS.acquire().await;
    call("delete container of dead shim", bundle, command, settings.open_files).await
}

/// Runs a command to its end, with the soft limit of open files that shims get.
async fn call(
    what: &'static str,
    subject: &Path,
    mut command: Command,
    open_files: Option<u64>,
) -> Result<(), StepError> {
    command.stdin(Stdio::null()).stdout(Stdio::null()).stderr(Stdio::piped()).process_group(0);
    limit_open_files(command.as_std_mut(), open_files);
    let mut child = KillGroupOnDrop(command.spawn().step_at(what, subject)?);
    let errors = child.0.stderr.take();
    let all = async {
        let errors = read_pipe(errors).await?;
        Ok((child.0.wait().await?, errors))
    };
    let ended: io::Result<_> = tokio::time::timeout(CALL_TIMEOUT, all).await.unwrap_or_else(|_| {
        Err(io::Error::new(
            io::ErrorKind::TimedOut,
            format!("timed out after {} s", CALL_TIMEOUT.as_secs()),
        ))
    });
    let (status, errors) = ended.step_at(what, subject)?;
    if status.success() {
        return Ok(());
    }
    let said = String::from_utf8_lossy(&errors);
    Err(StepError::at(what, subject, io::Error::other(format!("{status}: {}", said.trim()))))
}

/// A program that was called, at the head of a process group of its own. One that is given up is
/// killed with all that it has called itself, such as the runtime, which would otherwise still run
/// beside the next try.
struct KillGroupOnDrop(Child);

impl Drop for KillGroupOnDrop {
    fn drop(&mut self) {
        // `None`: it was reaped. Processes that it left in its group, such as a server, must keep
        // running. Before the reap, the pid cannot have been reused.
        if let Some(group) = self.0.id().and_then(|pid| i32::try_from(pid).ok())
            && let Err(e) = killpg(Pid::from_raw(group), Signal::SIGKILL)
            && e != Errno::ESRCH
        {
            log::warn!("failed to kill process group {group} of a call that timed out: {e}");
        }
    }
}

/// All that a pipe gives, if that is not more than it may.
async fn read_pipe(pipe: Option<impl tokio::io::AsyncRead + Unpin>) -> io::Result<Vec<u8>> {
    let mut bytes = Vec::new();
    if let Some(pipe) = pipe {
        pipe.take(MOST + 1).read_to_end(&mut bytes).await?;
    }
    if bytes.len() as u64 > MOST {
        return Err(io::Error::new(
            io::ErrorKind::FileTooLarge,
            format!("wrote more than {MOST} bytes"),
        ));
    }
    Ok(bytes)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn set_variables_override_all_others_and_occur_once() {
        let set = |name: &str, value: &str| (name.to_owned(), value.to_owned());
        let settings = |variables: &[(String, String)]| ShimSettings {
            containerd_address: "/c.sock".into(),
            containerd_state: "/state".into(),
            state_dir: "/own".into(),
            sandboxes: "/own/sandboxes".into(),
            open_files: None,
            environment: variables.iter().cloned().collect(),
            own_shim: None,
        };
        let server = |variables: &[(String, String)]| {
            server_environment(&settings(variables), Inherited::Daemon, "pod")
        };
        let own = server(&[]);
        assert!(!has_core_domain(&own), "{own:?}");
        let changed = server(&[set("SCHED_CORE", "1"), set("GOMAXPROCS", "9"), set("X", "y=z")]);
        assert!(has_core_domain(&changed), "{changed:?}");
        for expected in ["SCHED_CORE=1", "GOMAXPROCS=9", "X=y=z", "NAMESPACE=k8s.io"] {
            assert_eq!(
                changed.iter().filter(|variable| *variable == expected).count(),
                1,
                "{expected}: {changed:?}"
            );
        }
        assert_eq!(changed.len(), own.len() + 2, "{changed:?}");
        let named = server(&[set("OTEL_SERVICE_NAME", "own")]);
        assert!(
            named.contains(&"OTEL_SERVICE_NAME=own".into()) && named.len() == own.len(),
            "{named:?}"
        );
        assert!(!has_core_domain(&server(&[set("SCHED_CORE", "")])));
    }

    async fn shell(script: &str) -> Result<(), String> {
        let mut command = Command::new("/bin/sh");
        command.args(["-c", script]);
        call("call", Path::new("/bundle"), command, Some(77)).await.map_err(|e| e.to_string())
    }

    #[tokio::test]
    async fn a_call_ends_whatever_the_program_does() {
        assert_eq!(shell("yes | head -c 200000; cat").await, Ok(()));
        let error = shell("echo why >&2; exit 7").await.unwrap_err();
        assert_eq!(error, "call /bundle: exit status: 7: why");
        let error = shell("yes >&2").await.unwrap_err();
        assert!(error.contains("wrote more than"), "{error}");
    }

    #[tokio::test]
    async fn a_call_has_the_limit_of_open_files_that_the_daemon_was_started_with() {
        assert_eq!(shell("[ $(ulimit -Sn) = 77 ]").await, Ok(()));
    }

    #[tokio::test(start_paused = true)]
    async fn a_call_that_hangs_times_out() {
        let error = shell("exec sleep 1000").await.unwrap_err();
        assert!(error.contains("timed out after 10 s"), "{error}");
    }

    /// Promise: runtime_command_has_a_deadline.
    #[tokio::test]
    async fn a_call_that_times_out_is_killed_with_its_children() {
        let mut command = Command::new("/bin/sh");
        command
            .args(["-c", "sleep 1000 >/dev/null & echo $! $$; exec >&-; wait"])
            .stdout(Stdio::piped())
            .process_group(0);
        let mut called = KillGroupOnDrop(command.spawn().unwrap());
        let pids = String::from_utf8(read_pipe(called.0.stdout.take()).await.unwrap()).unwrap();
        drop(called);
        let gone = |pid: &str| {
            let stat = std::fs::read_to_string(format!("/proc/{pid}/stat"));
            stat.map_or(true, |stat| stat.contains(") Z ") || stat.contains(") X "))
        };
        assert_eq!(pids.split_whitespace().count(), 2, "{pids}");
        while !pids.split_whitespace().all(gone) {
            tokio::task::yield_now().await;
        }
    }

    #[test]
    fn path_has_each_directory_once() {
        let path = path();
        let dirs: Vec<&str> = path.split(':').collect();
        for dir in PATH.split(':') {
            assert_eq!(dirs.iter().filter(|listed| **listed == dir).count(), 1, "{path}");
        }
    }
}

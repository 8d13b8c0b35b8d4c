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
use super::own::{OwnShim, VOLATILE_ROOTFS};
use crate::config::CONTAINERD_NAMESPACE;
use crate::error::{IoContext as _, StepError};
use crate::process::inheritance::Inheritance;

/// How long a call may take.
const CALL_TIMEOUT: Duration = Duration::from_secs(10);

/// Calls of one kind at once. Further ones wait for a permit before their time limit begins: each
/// is a process, and a hundred deletions at once would take longer than that on a small node.
const AT_ONCE: usize = 32;
static DELETIONS: Semaphore = Semaphore::const_new(AT_ONCE);

/// How much a call may write; bytes.
const MOST: u64 = 64 << 10;

/// containerd's own dealings with its service manager, which are no shim's.
const OWN: [&str; 8] = [
    "NOTIFY_SOCKET",
    "WATCHDOG_PID",
    "WATCHDOG_USEC",
    "LISTEN_PID",
    "LISTEN_FDS",
    "LISTEN_FDNAMES",
    "INVOCATION_ID",
    "JOURNAL_STREAM",
];

/// The variable that asks for a core scheduling domain, if it is not empty (containerd's
/// `SCHED_CORE`).
const CORE_DOMAIN: &str = "SCHED_CORE";

/// The environment of a shim: what it inherits of containerd, what containerd adds
/// (`pkg/shim.Command`), and what an operator has set.
fn environment(
    settings: &ShimSettings,
    inheritance: &Inheritance,
    threads: &str,
) -> BTreeMap<OsString, OsString> {
    let protocol = [
        ("TTRPC_ADDRESS", settings.containerd_ttrpc()),
        ("GRPC_ADDRESS", settings.config.containerd_address.display().to_string()),
        ("NAMESPACE", CONTAINERD_NAMESPACE.to_owned()),
        ("MAX_SHIM_VERSION", "2".to_owned()),
        ("GOMAXPROCS", threads.to_owned()),
    ];
    let mut environment: BTreeMap<OsString, OsString> = inheritance.variables().collect();
    environment.retain(|name, _| OWN.iter().all(|own| name != own));
    environment.extend(protocol.map(|(name, value)| (name.into(), value.into())));
    let set = settings.config.shim_env.iter();
    environment.extend(set.map(|set| (set.name.clone().into(), set.value.clone().into())));
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
    let address = settings.config.containerd_address.as_os_str().to_owned();
    vec![
        "-namespace".into(),
        CONTAINERD_NAMESPACE.into(),
        "-id".into(),
        id.into(),
        "-address".into(),
        address,
    ]
}

/// The environment of a shim's server, `NAME=value`. `own` is this project's own shim, if that is
/// the pod's: others would pass on the variable of its mounts to runtimes.
pub fn server_environment(
    settings: &ShimSettings,
    inheritance: &Inheritance,
    id: &str,
    own: Option<&OwnShim>,
) -> Vec<OsString> {
    const SERVICE: &str = "OTEL_SERVICE_NAME";
    let mut environment = environment(settings, inheritance, "4");
    if settings.config.shim_env.iter().all(|set| set.name != SERVICE) {
        environment.insert(SERVICE.into(), format!("containerd-shim-{id}").into());
    }
    if own.is_some() && settings.config.volatile_rootfs {
        environment.insert(VOLATILE_ROOTFS.into(), "1".into());
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
    (binary, inheritance): (&Path, &Inheritance),
    id: &str,
    bundle: &Path,
) -> Result<(), StepError> {
    let mut command = Command::new(binary);
    command
        .args(["-namespace", CONTAINERD_NAMESPACE, "-address"])
        .arg(&settings.config.containerd_address)
        .args(["-publish-binary", "containerd", "-id", id, "-bundle"])
        .arg(bundle)
        .arg("delete")
        .current_dir(bundle)
        .env_clear()
        .envs(environment(settings, inheritance, "2"));
    // The semaphore is never closed.
    let _permit = DELETIONS.acquire().await;
    call("delete container of dead shim", bundle, command, inheritance).await
}

/// Runs a command to its end, with the limits and the umask that shims get.
async fn call(
    what: &'static str,
    subject: &Path,
    mut command: Command,
    inheritance: &Inheritance,
) -> Result<(), StepError> {
    command.stdin(Stdio::null()).stdout(Stdio::null()).stderr(Stdio::piped()).process_group(0);
    inheritance.give_to(command.as_std_mut());
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
    use std::sync::Arc;

    use super::*;
    use crate::config::{Config, Variable};

    #[test]
    fn set_variables_override_all_others_and_occur_once() {
        let set =
            |name: &str, value: &str| Variable { name: name.to_owned(), value: value.to_owned() };
        let settings = |variables: &[Variable]| {
            let config =
                Config { shim_env: variables.to_vec(), volatile_rootfs: true, ..Config::default() };
            let own = Inheritance::read("self").unwrap();
            ShimSettings { config: Arc::new(config), own, own_shim: None }
        };
        let server = |variables: &[Variable]| {
            let own = Inheritance::read("self").unwrap();
            server_environment(&settings(variables), &own, "pod", None)
        };
        let program = OwnShim::open("/bin/sh".into()).unwrap();
        let of_own = server_environment(
            &settings(&[]),
            &Inheritance::read("self").unwrap(),
            "pod",
            Some(&program),
        );
        let volatile = format!("{VOLATILE_ROOTFS}=1").into();
        let own = server(&[]);
        assert!(!has_core_domain(&own), "{own:?}");
        // The shims of runtimes would pass it on.
        assert!(of_own.contains(&volatile) && of_own.len() == own.len() + 1, "{of_own:?}");
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
        let own = Inheritance::read("self").unwrap();
        call("call", Path::new("/bundle"), command, &own).await.map_err(|e| e.to_string())
    }

    #[tokio::test]
    async fn a_call_ends_whatever_the_program_does() {
        assert_eq!(shell("yes | head -c 200000; cat").await, Ok(()));
        let error = shell("echo why >&2; exit 7").await.unwrap_err();
        assert_eq!(error, "call /bundle: exit status: 7: why");
        let error = shell("yes >&2").await.unwrap_err();
        assert!(error.contains("wrote more than"), "{error}");
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
}

//! The attributes that the children of containerd inherit: the limits, the environment and the rest
//! that shims and containers have with the built-in controller.
//!
//! containerd itself executes this daemon's program, which reports its attributes. They cannot be
//! read from containerd: like all Go programs it raises its own soft limit of open files and gives
//! its children the one before, and it extends `PATH` in its memory only.

use std::ffi::OsString;
use std::io;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::{Duration, Instant};

use parking_lot::RwLock;
use process_identity::{Stat, program_file};
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use tokio::net::UnixStream;
use tokio::sync::Mutex;

use crate::config::{CONTAINERD_NAMESPACE, ContainerLimit};
use crate::containerd::{GrpcEndpoint, runtime_info};
use crate::error::{IoContext as _, StepError};
use crate::process::inheritance::Inheritance;

/// The only argument of the program that containerd executes.
const REPORT: &str = "-info";

/// How long shims are launched without a new attempt after a failed one.
const RETRY: Duration = Duration::from_secs(10);

/// Where containerd adds programs to its `PATH` by default (its plugin `opt`).
const OPT: &str = "/opt/containerd/bin";

/// Where programs are on a node whose service manager names no more.
const PATH: &str = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin";

/// The report of this process, if the arguments ask for it.
pub fn report(arguments: impl Iterator<Item = OsString>) -> Option<Result<Vec<u8>, StepError>> {
    let asked = arguments.eq([OsString::from(REPORT)]);
    let encode = |own: Inheritance| {
        let text = serde_json::to_string(&own).map_err(io::Error::other);
        text.and_then(runtime_info).step("encode inherited attributes")
    };
    asked.then(|| Inheritance::read("self").and_then(encode))
}

/// A containerd process: its pid and start time.
type ContainerdProcess = (i32, u64);

/// The attributes of a child of the containerd that listens at `address`.
///
/// # Errors
/// containerd does not answer, is not root's, or cannot execute the program of this process.
pub async fn ask(address: &Path) -> Result<(ContainerdProcess, Inheritance), StepError> {
    let process = listener(address).await.step_at("find containerd at", address)?;
    let containerd = GrpcEndpoint::new(address, CONTAINERD_NAMESPACE);
    // Not the link: containerd may execute it late, when another process has the pid. The program
    // of an upgrade answers too.
    let program = program_file(&std::env::current_exe().step("find the own program")?);
    let answer = containerd.execute(&program).await?;
    let inheritance = serde_json::from_str(&answer).map_err(io::Error::from);
    Ok((process, inheritance.step_at("decode answer of", program)?))
}

/// The attributes for shims while containerd's are not known: those of `own`, but of its
/// environment only `PATH`, because shims pass theirs on to hooks of containers.
pub fn substitute(mut own: Inheritance) -> Inheritance {
    let path = own.path().to_string_lossy().into_owned();
    let mut directories = vec![OPT];
    for directory in path.split(':').chain(PATH.split(':')) {
        if !directory.is_empty() && !directories.contains(&directory) {
            directories.push(directory);
        }
    }
    own.environment = vec![format!("PATH={}", directories.join(":")).into()];
    own.parent_directory = None;
    own
}

/// The node's containerd, as the parent that shims have with the built-in controller.
#[derive(Debug)]
pub(super) struct Containerd {
    address: PathBuf,
    own: Inheritance,
    limits: Vec<ContainerLimit>,
    attempt: Mutex<Attempt>,
    last: RwLock<Arc<Inheritance>>,
}

/// The last attempt to learn the attributes.
#[derive(Debug, Default)]
struct Attempt {
    answered: Option<ContainerdProcess>,
    failed: Option<Instant>,
}

impl Containerd {
    /// The containerd that listens at `address`; `own` are the daemon's own attributes, and
    /// `limits` those that an operator has set.
    pub(super) fn new(address: PathBuf, own: Inheritance, limits: Vec<ContainerLimit>) -> Self {
        let last = RwLock::new(Arc::new(substitute(own.clone()).with(&limits)));
        Self { address, own, limits, attempt: Mutex::default(), last }
    }

    /// The attributes that were learned last, or the substitute.
    pub(super) fn inheritance(&self) -> Arc<Inheritance> {
        Arc::clone(&self.last.read())
    }

    /// Learns the attributes again if containerd is another process than before.
    pub(super) async fn learn(&self) {
        let mut attempt = self.attempt.lock().await;
        let is_same = |(pid, started): ContainerdProcess| {
            let stat = Stat::of_process(pid.unsigned_abs());
            stat.is_ok_and(|stat| stat.start_time == started)
        };
        if attempt.answered.is_some_and(is_same)
            || attempt.failed.is_some_and(|at| at.elapsed() < RETRY)
        {
            return;
        }
        match ask(&self.address).await {
            Ok((process, inheritance)) => {
                *attempt = Attempt { answered: Some(process), failed: None };
                let inheritance = inheritance.with(&self.limits);
                self.warn(&inheritance);
                *self.last.write() = Arc::new(inheritance);
            }
            Err(step) => {
                *attempt = Attempt { answered: None, failed: Some(Instant::now()) };
                log::warn!(
                    "failed to learn limits and environment from containerd; shims get the last \
                     known ones, or the daemon's: {step}"
                );
            }
        }
    }

    fn warn(&self, inheritance: &Inheritance) {
        let beyond = inheritance.limits_beyond(&self.own);
        if !beyond.is_empty() {
            log::warn!(
                "containers get lower limits than with containerd: {}; the daemon has no \
                 CAP_SYS_RESOURCE, which raises them",
                beyond.join(" ")
            );
        }
    }
}

/// The process that listens at containerd's socket.
async fn listener(address: &Path) -> io::Result<ContainerdProcess> {
    let stream = UnixStream::connect(address).await?;
    let peer = stream.peer_cred()?;
    if peer.uid() != 0 {
        return Err(io::Error::other(format!("the listener belongs to user {}", peer.uid())));
    }
    let pid = peer.pid().ok_or_else(|| io::Error::other("its PID namespace is not visible"))?;
    let started = Stat::of_process(pid.unsigned_abs())?.start_time;
    // The socket closes when the listener exits, and only then its pid can be reused.
    let mut polled = [PollFd::new(&stream, PollFlags::empty())];
    poll(&mut polled, Some(&Timespec { tv_sec: 0, tv_nsec: 0 }))?;
    if polled[0].revents().contains(PollFlags::HUP) {
        return Err(io::ErrorKind::ConnectionReset.into());
    }
    Ok((pid, started))
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::PermissionsExt as _;
    use std::os::unix::net::UnixListener;

    use rustix::process::Uid;

    use super::*;

    #[tokio::test]
    async fn shims_get_the_usual_path_and_no_variable_while_containerd_does_not_answer() {
        let dir = tempfile::tempdir().unwrap();
        let mut own = Inheritance::read("self").unwrap();
        own.environment = ["SECRET=x", "PATH=/a:/usr/bin:/a"].map(Into::into).to_vec();
        let containerd = Containerd::new(dir.path().join("c.sock"), own.clone(), Vec::new());
        containerd.learn().await;
        let substitute = containerd.inheritance();
        let path = "PATH=/opt/containerd/bin:/a:/usr/bin:/usr/local/sbin:/usr/local/bin:/usr/sbin:\
                    /sbin:/bin";
        assert_eq!(substitute.environment, [path]);
        assert_eq!(substitute.limits, own.limits);
    }

    /// Promise: only_files_of_root_count.
    #[tokio::test]
    async fn a_listener_of_another_user_is_not_asked() {
        if kit::skip_without_root() {
            return;
        }
        let dir = tempfile::tempdir().unwrap();
        let address = dir.path().join("c.sock");
        let everyone = std::fs::Permissions::from_mode(0o777);
        std::fs::set_permissions(dir.path(), everyone).unwrap();
        let (user, path) = (Uid::from_raw(65534), address.clone());
        let bind = move || {
            rustix::thread::set_thread_res_uid(user, user, user).unwrap();
            UnixListener::bind(path).unwrap()
        };
        // The kernel records the user of the thread.
        let foreign = std::thread::spawn(bind).join().unwrap();
        let refused = ask(&address).await.unwrap_err().to_string();
        assert!(refused.ends_with("the listener belongs to user 65534"), "{refused}");
        drop(foreign);
        std::fs::remove_file(&address).unwrap();
        let _own = UnixListener::bind(&address).unwrap();
        let (pid, started) = listener(&address).await.unwrap();
        assert_eq!(pid.unsigned_abs(), std::process::id());
        assert_eq!(started, Stat::of_process(std::process::id()).unwrap().start_time);
    }
}

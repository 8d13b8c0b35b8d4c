//! A pod's shim, with a real runc, and a stand-in of containerd that takes its events. The shim is
//! launched as the daemon does it, or with `SHIM_OF_START` as the command `start` does it.

mod container;
mod containerd;
mod fifo;
mod usage;

use std::fs;
use std::os::fd::OwnedFd;
use std::os::unix::fs::symlink;
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::sync::OnceLock;
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::{Duration, Instant};

use containerd_shim_protos::TaskClient;
use containerd_shim_protos::api::*;
use containerd_shim_protos::events::task as task_events;
use containerd_shim_protos::protobuf::well_known_types::any::Any;
use containerd_shim_protos::protobuf::{Message as _, MessageField};
use containerd_shim_protos::ttrpc::{self, context};

pub use self::container::Container;
use self::container::process;
#[allow(unused_imports, reason = "not every program of tests uses them")]
pub use self::container::{MAPPED, mount};
pub use self::containerd::Answers;
use self::containerd::{Containerd, Taken};
#[allow(unused_imports, reason = "not every program of tests uses them")]
pub use self::fifo::{open, reader, reader_that_may_find_nothing, write};

/// How long anything may take.
const WITHIN: Duration = Duration::from_secs(90);

/// A number of its own for each pod of the process.
static PODS: AtomicU32 = AtomicU32::new(0);

/// A pod.
pub struct Pod {
    pub dir: tempfile::TempDir,
    pub shim: Child,
    pub client: TaskClient,
    name: String,
    taken: Taken,
    containerd: Option<Containerd>,
}

/// The runtime that the tests run with: `$RUNTIME` (`crun`), else runc.
pub fn runtime() -> PathBuf {
    match std::env::var_os("RUNTIME") {
        Some(name) => std::env::split_paths(&std::env::var_os("PATH").unwrap())
            .map(|dir| dir.join(&name))
            .find(|path| path.is_file())
            .expect("the runtime is installed"),
        None => runc(),
    }
}

/// Whether the tests run with runc.
pub fn is_runc() -> bool {
    std::env::var_os("RUNTIME").is_none()
}

pub fn runc() -> PathBuf {
    static RUNC: OnceLock<PathBuf> = OnceLock::new();
    RUNC.get_or_init(|| kit::Parts::get().unwrap().runc()).clone()
}

/// The number of an environment variable, for runs by hand; else `usual`.
pub fn count(variable: &str, usual: usize) -> usize {
    std::env::var(variable).map_or(usual, |number| number.parse().unwrap())
}

/// The program under test.
pub fn program() -> PathBuf {
    let built = env!("CARGO_BIN_EXE_pause-sandboxer-runc-shim");
    std::env::var_os("SHIM_PROGRAM").map_or(built.into(), PathBuf::from)
}

/// Waits until `check` holds.
pub fn eventually<T>(what: &str, mut check: impl FnMut() -> Option<T>) -> T {
    let end = Instant::now() + WITHIN;
    loop {
        if let Some(found) = check() {
            return found;
        }
        assert!(Instant::now() < end, "{what}");
        std::thread::sleep(Duration::from_millis(5));
    }
}

pub fn context() -> context::Context {
    context_within(WITHIN)
}

/// The context of a call that may take so long.
fn context_within(limit: Duration) -> context::Context {
    let mut context = context::with_timeout(limit.as_nanos() as i64);
    context.add("containerd-namespace-ttrpc".to_owned(), "test".to_owned());
    context
}

impl Pod {
    pub fn new() -> Self {
        Self::with_log(Stdio::inherit())
    }

    /// A pod whose shim writes its log to `log`.
    pub fn with_log(log: Stdio) -> Self {
        Self::launch(":", log)
    }

    /// A pod whose shim is executed by a shell after these commands.
    pub fn after(commands: &str) -> Self {
        Self::launch(commands, Stdio::inherit())
    }

    /// A pod whose shim finds programs in this directory first.
    pub fn with_programs(directory: &Path) -> Self {
        Self::after(&format!("export PATH='{}':\"$PATH\"", directory.display()))
    }

    /// A pod whose shim is executed after these commands.
    fn launch(before: &str, log: Stdio) -> Self {
        let dir = tempfile::tempdir().unwrap();
        let listener = UnixListener::bind(dir.path().join("s")).unwrap();
        // `start` names the file of the socket, and writes a byte.
        let rest = match std::env::var_os("SHIM_OF_START") {
            Some(_) => r#"-socket "$PWD/s" 3<&0 0</dev/zero"#,
            None => "3<&0 0</dev/null",
        };
        let shim = Command::new("/bin/sh")
            .args(["-c", &format!("{before}; exec \"$0\" \"$@\" {rest}")])
            .arg(program())
            .args(["-namespace", "test", "-id", "pod", "-address", "/none"])
            .env_clear()
            .env("PATH", std::env::var("PATH").unwrap())
            .env("SET_BY_OPERATOR", "yes")
            .env("TTRPC_ADDRESS", dir.path().join("e"))
            .stdin(Stdio::from(OwnedFd::from(listener)))
            .stderr(log)
            .current_dir(dir.path())
            .spawn()
            .unwrap();
        let client = connect(&dir.path().join("s"));
        let root = dir.path().join("root/bin");
        fs::create_dir_all(&root).unwrap();
        fs::copy("/bin/busybox", root.join("busybox")).unwrap();
        for applet in
            ["sh", "sleep", "cat", "echo", "dd", "true", "stty", "tail", "test", "id", "seq", "ls"]
        {
            symlink("busybox", root.join(applet)).unwrap();
        }
        fs::write(root.join("probe"), kit::image::PROBE).unwrap();
        fs::set_permissions(
            root.join("probe"),
            fs::metadata("/bin/busybox").unwrap().permissions(),
        )
        .unwrap();
        for mount_point in ["proc", "dev", "tmp"] {
            fs::create_dir(dir.path().join("root").join(mount_point)).unwrap();
        }
        let number = PODS.fetch_add(1, Ordering::Relaxed);
        let name = format!("{}-{number}", std::process::id());
        let (taken, containerd) = Default::default();
        let mut pod = Self { dir, shim, client, name, taken, containerd };
        pod.start_containerd();
        pod
    }

    /// Begins to take events.
    pub fn start_containerd(&mut self) {
        self.start_containerd_that(Answers::Takes);
    }

    /// Begins to take events, or not.
    pub fn start_containerd_that(&mut self, answers: Answers) {
        let path = self.dir.path().join("e");
        self.containerd = Some(Containerd::start(&path, self.taken.clone(), answers));
    }

    /// A connection of its own to the shim.
    pub fn connect(&self) -> TaskClient {
        connect(&self.dir.path().join("s"))
    }

    /// A connection to the shim without a client.
    pub fn socket(&self) -> UnixStream {
        UnixStream::connect(self.dir.path().join("s")).unwrap()
    }

    /// Takes no events any more.
    pub fn stop_containerd(&mut self) {
        self.containerd = None;
    }

    pub fn path(&self, name: &str) -> String {
        self.dir.path().join(name).display().to_string()
    }

    pub fn fifo(&self, name: &str) -> String {
        let path = self.path(name);
        assert!(Command::new("mkfifo").arg(&path).status().unwrap().success());
        path
    }

    pub fn bundle(&self, id: &str) -> PathBuf {
        self.dir.path().join(self.id(id))
    }

    /// Where the container's state is, so that pods do not meet.
    fn root(&self) -> String {
        self.path("runc")
    }

    pub fn id(&self, id: &str) -> String {
        format!("{id}-{}", self.name)
    }

    pub fn try_create(&self, id: &str, script: &str, with: &Container) -> ttrpc::Result<u32> {
        self.try_create_within(id, script, with, WITHIN)
    }

    /// Creates a container within a time limit.
    pub fn try_create_within(
        &self,
        id: &str,
        script: &str,
        with: &Container,
        limit: Duration,
    ) -> ttrpc::Result<u32> {
        let bundle = self.bundle(id);
        // containerd makes the directory, in which CRIU's files go.
        fs::create_dir_all(bundle.join("work")).unwrap();
        let config = self.config(id, script, with);
        fs::write(bundle.join("config.json"), config.to_string()).unwrap();
        let mut options = with.options.clone();
        if options.binary_name.is_empty() {
            options.binary_name = runtime().display().to_string();
        }
        options.root = self.root();
        let mut any = Any::new();
        any.type_url = "containerd.runc.v1.Options".to_owned();
        any.value = options.write_to_bytes().unwrap();
        let mut request = CreateTaskRequest::new();
        request.id = self.id(id);
        request.bundle = bundle.display().to_string();
        request.stdin.clone_from(&with.stdin);
        request.stdout.clone_from(&with.stdout);
        request.stderr.clone_from(&with.stderr);
        request.terminal = with.terminal;
        request.rootfs.clone_from(&with.rootfs);
        request.checkpoint.clone_from(&with.checkpoint);
        request.options = MessageField::some(any);
        self.client.create(context_within(limit), &request).map(|response| response.pid)
    }

    pub fn create(&self, id: &str, script: &str, with: &Container) -> u32 {
        let _readers = fifo::readers([&with.stdout, &with.stderr]);
        self.try_create(id, script, with).unwrap()
    }

    pub fn run(&self, id: &str, script: &str, with: &Container) -> u32 {
        let pid = self.create(id, script, with);
        assert_eq!(self.start(id, "").unwrap(), pid);
        pid
    }

    pub fn start(&self, id: &str, exec: &str) -> ttrpc::Result<u32> {
        let mut request = StartRequest::new();
        (request.id, request.exec_id) = (self.id(id), exec.to_owned());
        self.client.start(context(), &request).map(|response| response.pid)
    }

    pub fn wait(&self, id: &str, exec: &str) -> ttrpc::Result<u32> {
        let mut request = WaitRequest::new();
        (request.id, request.exec_id) = (self.id(id), exec.to_owned());
        self.client.wait(context(), &request).map(|response| response.exit_status)
    }

    pub fn kill(&self, id: &str, exec: &str, signal: u32) -> ttrpc::Result<()> {
        let mut request = KillRequest::new();
        (request.id, request.exec_id) = (self.id(id), exec.to_owned());
        request.signal = signal;
        self.client.kill(context(), &request).map(drop)
    }

    pub fn delete(&self, id: &str, exec: &str) -> ttrpc::Result<DeleteResponse> {
        let mut request = DeleteRequest::new();
        (request.id, request.exec_id) = (self.id(id), exec.to_owned());
        self.client.delete(context(), &request)
    }

    pub fn state(&self, id: &str, exec: &str) -> ttrpc::Result<StateResponse> {
        let mut request = StateRequest::new();
        (request.id, request.exec_id) = (self.id(id), exec.to_owned());
        self.client.state(context(), &request)
    }

    pub fn status(&self, id: &str) -> Status {
        self.state(id, "").unwrap().status.enum_value().unwrap()
    }

    pub fn exec(&self, id: &str, exec: &str, script: &str, with: &Container) -> ttrpc::Result<()> {
        let process = process(script, with.terminal);
        let mut spec = Any::new();
        spec.value = process.to_string().into_bytes();
        let mut request = ExecProcessRequest::new();
        (request.id, request.exec_id) = (self.id(id), exec.to_owned());
        request.spec = MessageField::some(spec);
        request.stdin.clone_from(&with.stdin);
        request.stdout.clone_from(&with.stdout);
        request.stderr.clone_from(&with.stderr);
        request.terminal = with.terminal;
        self.client.exec(context(), &request).map(drop)
    }

    /// Ends a container and deletes it.
    pub fn end(&self, id: &str) {
        match self.kill(id, "", 9) {
            Ok(()) => {}
            Err(e) => assert!(e.to_string().contains("already finished"), "{e}"),
        }
        self.wait(id, "").unwrap();
        self.delete(id, "").unwrap();
    }

    /// How many events were taken.
    pub fn event_count(&self) -> usize {
        self.taken.lock().unwrap().len()
    }

    /// All events that were taken: topic, container or exec id, status for an exit.
    pub fn events(&self) -> Vec<(String, String, u32)> {
        let taken = self.taken.lock().unwrap();
        let suffix = format!("-{}", self.name);
        let event = |(topic, any): &(String, Any)| {
            let (id, status) = match topic.as_str() {
                "/tasks/exit" => {
                    let exit = task_events::TaskExit::parse_from_bytes(&any.value).unwrap();
                    assert_eq!(any.type_url, "containerd.events.TaskExit");
                    (exit.id, exit.exit_status)
                }
                "/tasks/exec-added" => {
                    let event = task_events::TaskExecAdded::parse_from_bytes(&any.value).unwrap();
                    (event.exec_id, 0)
                }
                "/tasks/exec-started" => {
                    let event = task_events::TaskExecStarted::parse_from_bytes(&any.value).unwrap();
                    (event.exec_id, 0)
                }
                // The first field of all others is the container's id.
                _ => {
                    let event = task_events::TaskStart::parse_from_bytes(&any.value).unwrap();
                    (event.container_id, 0)
                }
            };
            let id = id.strip_suffix(&suffix).map(str::to_owned).unwrap_or(id);
            (topic.trim_start_matches("/tasks/").to_owned(), id, status)
        };
        taken.iter().map(event).collect()
    }

    /// The events of one container and its execs, once there are so many.
    pub fn events_of(&self, ids: &[&str], count: usize) -> Vec<String> {
        eventually("events", || {
            let events: Vec<String> = self
                .events()
                .into_iter()
                .filter(|(_, id, _)| ids.contains(&id.as_str()))
                .map(|(topic, id, status)| match topic.as_str() {
                    "exit" => format!("{topic} {id} {status}"),
                    _ => format!("{topic} {id}"),
                })
                .collect();
            (events.len() >= count).then_some(events)
        })
    }

    /// Shuts the shim down and waits for its end.
    pub fn shut_down(&mut self) {
        let _ = self.client.shutdown(context(), &ShutdownRequest::new());
        self.has_ended();
    }

    /// Waits for the shim's end, which is a good one.
    pub fn has_ended(&mut self) {
        let status = eventually("the shim ends", || self.shim.try_wait().unwrap());
        assert!(status.success(), "{status}");
    }

    /// Where the runtime keeps the state of a container.
    pub fn runtime_state(&self, id: &str) -> String {
        format!("{}/{}", self.path("runc/test"), self.id(id))
    }

    /// The command that containerd runs to delete a container whose shim has exited.
    pub fn deletion(&self, id: &str) -> Command {
        self.deletion_in(id, self.bundle(id).as_ref())
    }

    fn deletion_in(&self, id: &str, bundle: &Path) -> Command {
        let mut command = Command::new(program());
        command.args(["-namespace", "test", "-id", &self.id(id), "-bundle"]);
        command.arg(bundle).arg("delete");
        command
    }

    /// A helper of the shim that does `action` for a container, with what it is given.
    pub fn helper(&self, id: &str, action: &str, given: OwnedFd) -> Child {
        let mut command = Command::new("/bin/sh");
        command.args(["-c", "exec \"$0\" \"$@\" 4<&0 0</dev/null"]).arg(program());
        command.args(["-namespace", "test", "-id", &self.id(id), "-bundle"]);
        command.arg(self.bundle(id)).arg(action).current_dir(self.bundle(id));
        command.stdin(Stdio::from(given)).stdout(Stdio::null()).spawn().unwrap()
    }

    /// Deletes a container whose shim has exited, as containerd does.
    pub fn delete_after_shim(&self, id: &str) -> DeleteResponse {
        self.delete_by(self.deletion(id), id)
    }

    /// Runs what the daemon runs instead: in a bundle of its own, as containerd removes its own at
    /// any moment.
    pub fn delete_by_daemon(&self, id: &str) -> DeleteResponse {
        let own = Path::new(&self.path("dead")).join(self.id(id));
        fs::create_dir_all(&own).unwrap();
        let bundle = self.bundle(id);
        let bundle: &Path = bundle.as_ref();
        // The daemon writes the options that it knows itself; a killed shim may have written one.
        for name in ["config.json", "options.json", "runtime"] {
            match fs::copy(bundle.join(name), own.join(name)) {
                Err(e) if e.kind() == std::io::ErrorKind::NotFound => {}
                copied => drop(copied.unwrap()),
            }
        }
        symlink(bundle, own.join("containerd")).unwrap();
        self.delete_by(self.deletion_in(id, &own), id)
    }

    fn delete_by(&self, mut deletion: Command, id: &str) -> DeleteResponse {
        let output = deletion.output().unwrap();
        eprint!("{}", String::from_utf8_lossy(&output.stderr));
        assert!(output.status.success(), "{output:?}");
        let left = self.runtime_state(id);
        assert!(!exists(&left), "{left}");
        DeleteResponse::parse_from_bytes(&output.stdout).unwrap()
    }
}

impl Drop for Pod {
    fn drop(&mut self) {
        // The stand-in ends before its directory is removed.
        self.stop_containerd();
        // A test that failed leaves containers: they die with their shim's commands.
        if self.shim.try_wait().unwrap().is_none() {
            for id in fs::read_dir(self.path("runc/test")).into_iter().flatten().flatten() {
                let _ = Command::new(runtime())
                    .args(["--root", &self.path("runc/test"), "delete", "--force"])
                    .arg(id.file_name())
                    .status();
            }
            let _ = self.shim.kill();
            let _ = self.shim.wait();
        }
    }
}

pub fn connect(path: &Path) -> TaskClient {
    let address = format!("unix://{}", path.display());
    TaskClient::new(ttrpc::Client::connect(&address).unwrap())
}

/// Makes a script that can be run.
pub fn script(path: &str, text: &str) {
    kit::write_program(path, format!("#!/bin/sh\n{text}\n").as_bytes()).unwrap();
}

/// Signals a child.
pub fn signal(child: &Child, signal: i32) {
    let pid = rustix::process::Pid::from_child(child);
    let signal = rustix::process::Signal::from_named_raw(signal).unwrap();
    rustix::process::kill_process(pid, signal).unwrap();
}

pub fn code(e: &ttrpc::Error) -> ttrpc::Code {
    match e {
        ttrpc::Error::RpcStatus(status) => status.code(),
        other => panic!("{other}"),
    }
}

/// Whether something is at a path.
pub fn exists(path: impl AsRef<Path>) -> bool {
    path.as_ref().exists()
}

//! Containers: their life, resources, processes.

use std::time::SystemTime;

use containerd_shim_protos::api::*;
use containerd_shim_protos::protobuf::Message as _;
use containerd_shim_protos::shim::oci::Options;
use containerd_shim_protos::ttrpc::Code;
use containerd_shim_protos::{cgroups, cgroups_v2};

use crate::pod::{self, Container, Pod, code, context, eventually, exists, reader, script};

#[test]
fn a_container_runs_and_its_events_come_in_order() {
    let mut pod = Pod::new();
    let (out, err) = (pod.fifo("out"), pod.fifo("err"));
    let (stdout, stderr) = (reader(&out), reader(&err));
    let with = Container { stdout: out, stderr: err, ..Default::default() };
    let pid = pod.create("a", "echo out; echo err >&2; exit 7", &with);
    assert!(exists(format!("/proc/{pid}")));
    assert_eq!(pod.status("a"), Status::CREATED);
    assert_eq!(code(&pod.try_create("a", "true", &with).unwrap_err()), Code::ALREADY_EXISTS);
    let started = SystemTime::now();
    assert_eq!(pod.start("a", "").unwrap(), pid);
    assert_eq!(pod.wait("a", "").unwrap(), 7);
    let state = pod.state("a", "").unwrap();
    assert_eq!((state.status.enum_value(), state.exit_status), (Ok(Status::STOPPED), 7));
    let exited_at: SystemTime = state.exited_at.clone().unwrap().into();
    assert!(started < exited_at && exited_at < SystemTime::now(), "{exited_at:?}");
    assert_eq!(
        (stdout.join().unwrap(), stderr.join().unwrap()),
        (b"out\n".into(), b"err\n".into())
    );
    assert_eq!(code(&pod.kill("a", "", 9).unwrap_err()), Code::NOT_FOUND);
    assert_eq!(code(&pod.start("a", "").unwrap_err()), Code::FAILED_PRECONDITION);
    for name in ["init.pid", "options.json", "runtime"] {
        assert!(exists(pod.bundle("a").join(name)), "{name}");
    }
    let deleted = pod.delete("a", "").unwrap();
    assert_eq!((deleted.pid, deleted.exit_status), (pid, 7));
    assert_eq!(deleted.exited_at, state.exited_at);
    assert_eq!(code(&pod.state("a", "").unwrap_err()), Code::NOT_FOUND);
    assert_eq!(pod.events_of(&["a"], 4), ["create a", "start a", "exit a 7", "delete a"]);
    pod.shut_down();
}

/// As a containerd that starts deletes a task without processes, with an exit that it has not seen.
#[test]
fn a_container_that_has_ended_has_a_process_until_its_deletion() {
    let mut pod = Pod::new();
    let pid = pod.run("a", "exit 3", &Container::default());
    assert_eq!(pod.wait("a", "").unwrap(), 3);
    let request = PidsRequest { id: pod.id("a"), ..Default::default() };
    let pids = pod.client.pids(context(), &request).unwrap().processes;
    assert_eq!(pids.iter().map(|process| process.pid).collect::<Vec<_>>(), [pid]);
    pod.delete("a", "").unwrap();
    pod.shut_down();
}

#[test]
fn a_container_that_was_not_started_can_be_killed_and_deleted() {
    let mut pod = Pod::new();
    let pid = pod.create("a", "true", &Container::default());
    assert_eq!(pod.delete("a", "").unwrap().pid, pid);
    assert_eq!(pod.events_of(&["a"], 3).len(), 3);
    // Nothing has ended that could end its output before.
    let (out, begun) = (pod.fifo("out"), std::time::Instant::now());
    pod.create("c", "true", &Container { stdout: out, ..Default::default() });
    pod.delete("c", "").unwrap();
    assert!(begun.elapsed() < std::time::Duration::from_secs(8), "{:?}", begun.elapsed());
    pod.create("b", "true", &Container::default());
    pod.kill("b", "", 9).unwrap();
    assert_eq!(pod.wait("b", "").unwrap(), 137);
    pod.delete("b", "").unwrap();
    pod.shut_down();
}

#[test]
fn what_cannot_be_created_leaves_nothing_and_says_why() {
    let mut pod = Pod::new();
    let mut with = Container::default();
    with.options.binary_name = "/no/such/runtime".to_owned();
    let error = pod.try_create("a", "true", &with).unwrap_err();
    assert!(error.to_string().contains("/no/such/runtime"), "{error}");
    let with = Container { memory: Some(1), ..Default::default() };
    let error = pod.try_create("a", "true", &with).unwrap_err().to_string();
    assert!(error.contains("OCI runtime create failed: "), "{error}");
    assert!(!exists(pod.path("runc/test").to_owned() + "/" + &pod.id("a")));
    assert_eq!(code(&pod.state("a", "").unwrap_err()), Code::NOT_FOUND);
    let with = Container { stdout: pod.path("no-fifo"), ..Default::default() };
    let error = pod.try_create("a", "true", &with).unwrap_err().to_string();
    assert!(error.contains("no-fifo"), "{error}");
    pod.run("a", "sleep 1000", &Container::default());
    pod.end("a");
    pod.shut_down();
}

/// A runtime that is gone once it has created a container, until it is put back.
fn leaving_runtime(pod: &Pod) -> Container {
    let path = pod.path("leaves");
    let runtime = pod::runtime().display().to_string();
    // Without its pid, the shim cannot use the container.
    let text = format!(
        "{runtime} \"$@\" || exit\ncase \" $* \" in *\" create \"*) mv init.pid made.pid; \
         mv {path} {path}.gone;; esac"
    );
    pod::script(&path, &text);
    let mut with = Container::default();
    with.options.binary_name = path;
    with
}

#[test]
fn what_a_failed_creation_has_left_is_removed_by_a_deletion() {
    let mut pod = Pod::new();
    let with = leaving_runtime(&pod);
    let error = pod.try_create("a", "sleep 1000", &with).unwrap_err().to_string();
    assert!(error.contains("failed to retrieve OCI runtime container pid"), "{error}");
    let pid = std::fs::read_to_string(pod.bundle("a").join("made.pid")).unwrap();
    let (process, state) = (format!("/proc/{pid}"), pod.runtime_state("a"));
    assert!(exists(&process) && exists(&state));
    assert_eq!(code(&pod.state("a", "").unwrap_err()), Code::NOT_FOUND);
    let refused = pod.try_create("a", "true", &Container::default()).unwrap_err();
    assert_eq!(code(&refused), Code::ALREADY_EXISTS);
    let refused = pod.delete("a", "").unwrap_err().to_string();
    assert!(refused.contains("No such file"), "{refused}");
    // It keeps the shim.
    pod.client.shutdown(context(), &ShutdownRequest::new()).unwrap();
    let path = &with.options.binary_name;
    std::fs::rename(format!("{path}.gone"), path).unwrap();
    assert_eq!(pod.delete("a", "").unwrap().pid, 0);
    assert!(!exists(&process) && !exists(&state));
    assert_eq!(code(&pod.delete("a", "").unwrap_err()), Code::NOT_FOUND);
    pod.run("a", "exit 3", &Container::default());
    assert_eq!(pod.wait("a", "").unwrap(), 3);
    pod.delete("a", "").unwrap();
    assert_eq!(pod.events_of(&["a"], 4), ["create a", "start a", "exit a 3", "delete a"]);
    pod.shut_down();
}

/// containerd sends one Delete, at once, when the cause of the failure may still be there.
#[test]
fn what_a_failed_creation_has_left_is_removed_by_the_next_one() {
    let mut pod = Pod::new();
    let with = leaving_runtime(&pod);
    pod.try_create("a", "sleep 1000", &with).unwrap_err();
    let pid = std::fs::read_to_string(pod.bundle("a").join("made.pid")).unwrap();
    let (process, state) = (format!("/proc/{pid}"), pod.runtime_state("a"));
    pod.delete("a", "").unwrap_err();
    pod.create("b", "exit 3", &Container::default());
    assert!(exists(&process) && exists(&state));
    let path = &with.options.binary_name;
    std::fs::rename(format!("{path}.gone"), path).unwrap();
    // Also of one with the same id, which is refused meanwhile.
    let refused = pod.try_create("a", "true", &Container::default()).unwrap_err();
    assert_eq!(code(&refused), Code::ALREADY_EXISTS);
    eventually("its end", || (!exists(&process) && !exists(&state)).then_some(()));
    eventually("its removal", || pod.delete("a", "").err().filter(|e| code(e) == Code::NOT_FOUND));
    pod.run("a", "exit 3", &Container::default());
    assert_eq!(pod.wait("a", "").unwrap(), 3);
    for id in ["a", "b"] {
        pod.delete(id, "").unwrap();
    }
    pod.shut_down();
}

/// The pods of a namespace have the runtime's state in one directory.
#[test]
fn a_create_of_a_container_of_another_shim_is_refused_and_does_not_delete_it() {
    let (mut pod, mut other) = (Pod::new(), Pod::new());
    let pid = pod.run("a", "exec sleep 1000", &Container::default());
    let mut options = Options::new();
    options.binary_name = pod::runtime().display().to_string();
    options.root = pod.path("runc");
    let mut request = CreateTaskRequest::new();
    (request.id, request.bundle) = (pod.id("a"), pod.bundle("a").display().to_string());
    let any = request.options.mut_or_insert_default();
    any.type_url = "containerd.runc.v1.Options".to_owned();
    any.value = options.write_to_bytes().unwrap();
    // The second one fails before the runtime is called.
    for stdout in [String::new(), pod.path("missing")] {
        request.stdout = stdout;
        let refused = other.client.create(context(), &request).unwrap_err();
        assert_eq!(code(&refused), Code::ALREADY_EXISTS, "{refused}");
        let state = StateRequest { id: pod.id("a"), ..Default::default() };
        let unknown = other.client.state(context(), &state).unwrap_err();
        assert_eq!(code(&unknown), Code::NOT_FOUND);
        assert!(exists(format!("/proc/{pid}")) && exists(pod.runtime_state("a")));
    }
    assert_eq!(pod.status("a"), Status::RUNNING);
    pod.end("a");
    pod.shut_down();
    other.shut_down();
}

/// Cgroups in the container's, one in the other: their path is longer than a system call takes.
fn nest_cgroups(pid: u32, depth: usize) -> Vec<std::path::PathBuf> {
    use rustix::fs::{CWD, Mode, OFlags, mkdirat, openat};
    let text = std::fs::read_to_string(format!("/proc/{pid}/cgroup")).unwrap();
    let controller = if text.contains(":pids:") { "pids" } else { "" };
    let line = text.lines().find(|line| line.split(':').nth(1) == Some(controller)).unwrap();
    let path = line.splitn(3, ':').nth(2).unwrap().trim_start_matches('/');
    let cgroup = std::path::Path::new("/sys/fs/cgroup").join(controller).join(path);
    let mut at = openat(CWD, &cgroup, OFlags::RDONLY, Mode::empty()).unwrap();
    for _ in 0..depth {
        mkdirat(&at, c"nested", Mode::RWXU).unwrap();
        at = openat(&at, c"nested", OFlags::RDONLY, Mode::empty()).unwrap();
    }
    vec![cgroup]
}

#[test]
fn cgroups_are_removed_however_deep_they_are_nested() {
    if !pod::is_runc() {
        kit::skip("the deletion of crun 1.8.1 does not end with such cgroups");
        return;
    }
    let mut pod = Pod::new();
    let pid = pod.run("a", "exec sleep 1000", &Container::default());
    let cgroups = nest_cgroups(pid, 700);
    pod.end("a");
    assert!(cgroups.iter().all(|cgroup| !exists(cgroup)), "{cgroups:?}");
    let pid = pod.run("b", "exec sleep 1000", &Container::default());
    let cgroups = nest_cgroups(pid, 700);
    pod::signal(&pod.shim, libc::SIGKILL);
    pod.shim.wait().unwrap();
    pod.delete_after_shim("b");
    assert!(cgroups.iter().all(|cgroup| !exists(cgroup)), "{cgroups:?}");
}

#[test]
fn a_container_is_paused_and_resumed() {
    let mut pod = Pod::new();
    let pid = pod.run("a", "sleep 1000", &Container::default());
    let (mut pause, mut resume) = (PauseRequest::new(), ResumeRequest::new());
    (pause.id, resume.id) = (pod.id("a"), pod.id("a"));
    pod.client.pause(context(), &pause).unwrap();
    assert_eq!(pod.status("a"), Status::PAUSED);
    let refused = pod.client.pause(context(), &pause).unwrap_err();
    assert_eq!(code(&refused), Code::FAILED_PRECONDITION);
    let refused = pod.exec("a", "e", "true", &Container::default()).unwrap_err();
    assert_eq!(code(&refused), Code::FAILED_PRECONDITION);
    pod.client.resume(context(), &resume).unwrap();
    assert_eq!(pod.status("a"), Status::RUNNING);
    let mut request = PidsRequest::new();
    request.id = pod.id("a");
    let pids = pod.client.pids(context(), &request).unwrap();
    assert_eq!(pids.processes.iter().map(|process| process.pid).collect::<Vec<_>>(), [pid]);
    let mut request = ConnectRequest::new();
    request.id = pod.id("a");
    let connected = pod.client.connect(context(), &request).unwrap();
    assert_eq!((connected.shim_pid, connected.task_pid), (pod.shim.id(), pid));
    pod.client.pause(context(), &pause).unwrap();
    pod.end("a");
    let events = pod.events_of(&["a"], 7);
    let expected = ["create a", "start a", "paused a", "resumed a", "paused a", "exit a 137"];
    assert_eq!(events[..6], expected);
    pod.shut_down();
}

#[test]
fn all_processes_end_with_a_container_that_shares_its_pid_namespace() {
    let mut pod = Pod::new();
    let with = Container { host_pids: true, ..Default::default() };
    pod.run("a", "sleep 1000 & sleep 1000 & exec sleep 1000", &with);
    let mut request = PidsRequest::new();
    request.id = pod.id("a");
    let pids = eventually("three processes", || {
        let pids = pod.client.pids(context(), &request).unwrap().processes;
        (pids.len() == 3).then_some(pids)
    });
    pod.kill("a", "", 15).unwrap();
    assert_eq!(pod.wait("a", "").unwrap(), 143);
    for process in pids {
        eventually("its end", || (!exists(format!("/proc/{}", process.pid))).then_some(()));
    }
    pod.delete("a", "").unwrap();
    pod.shut_down();
}

#[test]
fn an_oom_kill_is_announced_before_the_exit() {
    let mut pod = Pod::new();
    let with = Container { memory: Some(8 << 20), ..Default::default() };
    pod.run("a", "exec tail /dev/zero", &with);
    assert_eq!(pod.wait("a", "").unwrap(), 137);
    pod.delete("a", "").unwrap();
    let events = pod.events_of(&["a"], 5);
    let oom = events.iter().position(|event| event == "oom a").expect("an OOM event");
    let exit = events.iter().position(|event| event == "exit a 137").expect("an exit");
    assert!(oom < exit, "{events:?}");
    pod.shut_down();
}

/// As systemd does, which removes the scope of a container with its last process.
#[test]
fn an_oom_kill_is_announced_though_the_cgroup_is_gone() {
    if exists("/sys/fs/cgroup/memory") {
        kit::skip("cgroup version 1 has no count of the kills in a pod");
        return;
    }
    let mut pod = Pod::new();
    let with = Container { memory: Some(32 << 20), pod_cgroup: true, ..Default::default() };
    let pid = pod.run("a", "exec sleep 1000", &with);
    let line = std::fs::read_to_string(format!("/proc/{pid}/cgroup")).unwrap();
    let path = format!("/sys/fs/cgroup{}", line.trim().strip_prefix("0::").unwrap());
    let cgroup = std::path::Path::new(&path);
    pod::signal(&pod.shim, libc::SIGSTOP);
    std::fs::write(cgroup.join("memory.max"), "0").unwrap();
    eventually("its last process ends", || std::fs::remove_dir(cgroup).ok());
    pod::signal(&pod.shim, libc::SIGCONT);
    assert_eq!(pod.wait("a", "").unwrap(), 137);
    pod.delete("a", "").unwrap();
    let events = pod.events_of(&["a"], 5);
    assert_eq!(events[..4], ["create a", "start a", "oom a", "exit a 137"]);
    pod.shut_down();
    std::fs::remove_dir(cgroup.parent().unwrap()).unwrap();
}

#[test]
fn the_runtime_has_the_environment_without_what_is_the_shim_s_own() {
    let mut pod = Pod::new();
    let (script, seen) = (pod.path("runtime"), pod.path("seen"));
    let runc = pod::runtime().display().to_string();
    pod::script(&script, &format!("env >>{seen}\nexec {runc} \"$@\""));
    let mut with = Container::default();
    with.options.binary_name = script;
    pod.run("a", "true", &with);
    pod.wait("a", "").unwrap();
    pod.delete("a", "").unwrap();
    let seen = std::fs::read_to_string(seen).unwrap();
    // A shell adds the working directory.
    let names: std::collections::BTreeSet<&str> = seen
        .lines()
        .filter_map(|line| line.split_once('=').map(|(name, _)| name))
        .filter(|name| !["PWD", "OLDPWD", "SHLVL", "_"].contains(name))
        .collect();
    assert_eq!(names.into_iter().collect::<Vec<_>>(), ["PATH", "SET_BY_OPERATOR"]);
    let name = std::fs::read_to_string(format!("/proc/{}/comm", pod.shim.id())).unwrap();
    assert_eq!(name, "runc-shim\n");
    pod.shut_down();
}

#[test]
fn options_of_calls_reach_the_command_line_of_the_runtime() {
    let mut pod = Pod::new();
    let (path, seen) = (pod.path("runtime"), pod.path("seen"));
    let runtime = pod::runtime().display().to_string();
    script(&path, &format!("echo \" $* \" >>{seen}\nexec {runtime} \"$@\""));
    let mut with = Container::default();
    with.options.binary_name = path;
    pod.run("plain", "exec sleep 1000", &with);
    (with.options.no_pivot_root, with.options.no_new_keyring) = (true, true);
    pod.run("a", "sleep 1000 & exec sleep 1000", &with);
    let mut kill = KillRequest::new();
    (kill.id, kill.signal, kill.all) = (pod.id("a"), 9, true);
    pod.client.kill(context(), &kill).unwrap();
    assert_eq!(pod.wait("a", "").unwrap(), 137);
    pod.delete("a", "").unwrap();
    pod.end("plain");
    let seen = std::fs::read_to_string(seen).unwrap();
    let line = |command: &str, id: &str| {
        let id = format!(" {} ", pod.id(id));
        seen.lines().find(|line| line.contains(command) && line.contains(&id)).map(str::to_owned)
    };
    let created = line(" create ", "a").unwrap();
    let plain = line(" create ", "plain").unwrap();
    for option in [" --no-pivot ", " --no-new-keyring "] {
        assert!(created.contains(option) && !plain.contains(option), "{created}\n{plain}");
    }
    let kill = format!(" kill --all {} 9 ", pod.id("a"));
    assert!(line(" kill ", "a").unwrap().ends_with(&kill), "{seen}");
    assert_eq!(line(" kill ", "plain"), None);
    pod.shut_down();
}

/// The memory limit and the number of tasks in the metrics of a cgroup.
fn limit_and_pids(name: &str, value: &[u8]) -> (u64, u64) {
    match name {
        "io.containerd.cgroups.v1.Metrics" => {
            let metrics = cgroups::metrics::Metrics::parse_from_bytes(value).unwrap();
            (metrics.memory.usage.limit, metrics.pids.current)
        }
        "io.containerd.cgroups.v2.Metrics" => {
            let metrics = cgroups_v2::metrics::Metrics::parse_from_bytes(value).unwrap();
            (metrics.memory.usage_limit, metrics.pids.current)
        }
        other => panic!("{other}"),
    }
}

#[test]
fn resources_are_changed_and_read() {
    let mut pod = Pod::new();
    let with = Container { memory: Some(64 << 20), ..Default::default() };
    pod.run("a", "sleep 1000", &with);
    let mut request = UpdateTaskRequest::new();
    request.id = pod.id("a");
    request.resources.mut_or_insert_default().value =
        br#"{"memory":{"limit":33554432,"swap":33554432}}"#.to_vec();
    pod.client.update(context(), &request).unwrap();
    let mut stats = StatsRequest::new();
    stats.id = pod.id("a");
    // The runtime's threads are gone when the container's program is executed.
    eventually("the limit, and one process", || {
        let stats = pod.client.stats(context(), &stats).unwrap().stats.unwrap_or_default();
        (limit_and_pids(&stats.type_url, &stats.value) == (32 << 20, 1)).then_some(())
    });
    stats.id = pod.id("none");
    assert_eq!(code(&pod.client.stats(context(), &stats).unwrap_err()), Code::NOT_FOUND);
    request.resources.mut_or_insert_default().value = b"rubbish".to_vec();
    let refused = pod.client.update(context(), &request).unwrap_err();
    assert_eq!(code(&refused), Code::INVALID_ARGUMENT);
    pod.end("a");
    pod.shut_down();
}

/// A runtime that begins a container anew instead of restoring it: what the shim does of a restore
/// is the same, and CRIU does not run on every kernel. By `create` and `start`: a restore has no
/// process between the runtime and the container, which `crun run --detach` has, and which may exit
/// after the command, so that the container is no child of the shim yet.
fn restoring_runtime(pod: &Pod) -> Container {
    let path = pod.path("restores");
    let runtime = pod::runtime().display().to_string();
    let text = format!(
        "root=$2 log=$4; shift 6\n\
         test $1 = restore || exec {runtime} --root $root --log $log --log-format json \"$@\"\n\
         while test $# -gt 1; do case $1 in --pid-file) file=$2;; --bundle) bundle=$2;; esac; \
         shift; done\n\
         {runtime} --root $root create --pid-file $file --bundle $bundle $1 && \
         exec {runtime} --root $root start $1"
    );
    pod::script(&path, &text);
    let mut with = Container { checkpoint: pod.path("checkpoint"), ..Default::default() };
    with.options.binary_name = path;
    with
}

#[test]
fn a_restored_container_runs_and_its_exit_is_not_lost() {
    let mut pod = Pod::new();
    let with = restoring_runtime(&pod);
    for round in 0..10 {
        let id = format!("a{round}");
        assert_eq!(pod.create(&id, &format!("exit {round}"), &with), 0);
        let pid = pod.start(&id, "").unwrap();
        assert_eq!(pod.wait(&id, "").unwrap(), round);
        let deleted = pod.delete(&id, "").unwrap();
        assert_eq!((deleted.pid, deleted.exit_status), (pid, round));
        let expected =
            [format!("create {id}"), format!("start {id}"), format!("exit {id} {round}")];
        assert_eq!(pod.events_of(&[&id], 4)[..3], expected);
    }
    pod.shut_down();
}

#[test]
fn a_restored_container_has_its_logging_program() {
    let mut pod = Pod::new();
    let (path, log, hangs) = (pod.path("logger"), pod.path("log"), pod.path("hangs"));
    // It is ready late: the restore waits for it.
    pod::script(&path, &format!("sleep 0.2; exec 5>&- >>{log}.$CONTAINER_ID; cat <&3; echo end"));
    pod::script(&hangs, &format!("echo $$ >{log}.pid; exec sleep 1000 5>&-"));
    let mut with = restoring_runtime(&pod);
    with.stdout = format!("binary-v2://{hangs}");
    assert_eq!(pod.create("a", "echo out; exit 3", &with), 0);
    pod.start("a", "").unwrap_err();
    let pid = std::fs::read_to_string(format!("{log}.pid")).unwrap();
    let ended = || !exists(format!("/proc/{}", pid.trim()));
    eventually("the end of a program that is not ready", || ended().then_some(()));
    with.stdout = format!("binary://{path}");
    assert_eq!(pod.create("b", "echo out; exit 3", &with), 0);
    pod.start("b", "").unwrap();
    assert_eq!(pod.wait("b", "").unwrap(), 3);
    let log = format!("{log}.{}", pod.id("b"));
    eventually("the program's end", || {
        std::fs::read_to_string(&log).ok().filter(|text| text == "out\nend\n")
    });
    // A container that was not restored can be deleted.
    pod.delete("a", "").unwrap();
    pod.delete("b", "").unwrap();
    pod.shut_down();
}

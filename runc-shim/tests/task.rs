//! The Task service with a real runc. Needs root.

#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]

mod pod;

use containerd_shim_protos::api::*;
use containerd_shim_protos::protobuf::Message as _;
use containerd_shim_protos::ttrpc::Code;
use containerd_shim_protos::{cgroups, cgroups_v2};
use pod::{Container, Pod, code, context, eventually, exists, reader, write};

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
    assert_eq!(pod.start("a", "").unwrap(), pid);
    assert_eq!(pod.wait("a", "").unwrap(), 7);
    let state = pod.state("a", "").unwrap();
    assert_eq!((state.status.enum_value(), state.exit_status), (Ok(Status::STOPPED), 7));
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
    assert_eq!(code(&pod.state("a", "").unwrap_err()), Code::NOT_FOUND);
    assert_eq!(pod.events_of(&["a"], 4), ["create a", "start a", "exit a 7", "delete a"]);
    pod.shut_down();
}

#[test]
fn a_container_that_was_not_started_can_be_killed_and_deleted() {
    let mut pod = Pod::new();
    let pid = pod.create("a", "true", &Container::default());
    assert_eq!(pod.delete("a", "").unwrap().pid, pid);
    assert_eq!(pod.events_of(&["a"], 3).len(), 3);
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

#[test]
fn short_containers_and_execs_are_not_lost() {
    let mut pod = Pod::new();
    pod.run("long", "sleep 1000", &Container::default());
    for round in 0..60 {
        let exec = format!("e{round}");
        pod.exec("long", &exec, &format!("exit {round}"), &Container::default()).unwrap();
        let pid = pod.start("long", &exec).unwrap();
        assert_eq!(pod.wait("long", &exec).unwrap(), round);
        let deleted = pod.delete("long", &exec).unwrap();
        assert_eq!((deleted.exit_status, deleted.pid), (round, pid));
        let events = pod.events_of(&[&exec], 3);
        let exit = format!("exit {exec} {round}");
        assert_eq!(events, [format!("exec-added {exec}"), format!("exec-started {exec}"), exit]);
        assert!(!exists(pod.bundle("long").join(format!("{exec}.pid"))));
    }
    for round in 0..20 {
        let id = format!("c{round}");
        pod.run(&id, &format!("exit {round}"), &Container::default());
        assert_eq!(pod.wait(&id, "").unwrap(), round);
        pod.delete(&id, "").unwrap();
    }
    pod.end("long");
    pod.shut_down();
}

#[test]
fn many_execs_at_once_end_before_their_container() {
    let mut pod = Pod::new();
    pod.run("a", "sleep 1000", &Container::default());
    let pod_ref = &pod;
    let names: Vec<String> = (0..40).map(|number| format!("e{number}")).collect();
    std::thread::scope(|scope| {
        for name in &names {
            scope.spawn(move || {
                pod_ref.exec("a", name, "sleep 1000", &Container::default()).unwrap();
                pod_ref.start("a", name).unwrap();
            });
        }
    });
    pod.kill("a", "", 9).unwrap();
    assert_eq!(pod.wait("a", "").unwrap(), 137);
    let error = pod.exec("a", "late", "true", &Container::default()).unwrap_err();
    assert_eq!(code(&error), Code::FAILED_PRECONDITION);
    for name in &names {
        assert_eq!(pod.wait("a", name).unwrap(), 137);
        pod.delete("a", name).unwrap();
    }
    pod.delete("a", "").unwrap();
    eventually("the last event", || pod.events().iter().find(|e| e.0 == "delete").cloned());
    let exits: Vec<String> =
        pod.events().into_iter().filter(|event| event.0 == "exit").map(|event| event.1).collect();
    assert_eq!(exits.len(), names.len() + 1);
    assert_eq!(exits.last().map(String::as_str), Some("a"));
    pod.shut_down();
}

#[test]
fn an_exec_that_cannot_be_started_says_why_and_is_deleted() {
    let mut pod = Pod::new();
    pod.run("a", "sleep 1000", &Container::default());
    let err = pod.fifo("err");
    let stderr = pod::open(&err);
    let with = Container { stderr: err, ..Default::default() };
    let mut request = ExecProcessRequest::new();
    (request.id, request.exec_id) = (pod.id("a"), "bad".to_owned());
    request.stderr.clone_from(&with.stderr);
    request.spec.mut_or_insert_default().value =
        br#"{"args":["/no/such/program"],"cwd":"/","user":{}}"#.to_vec();
    pod.client.exec(context(), &request).unwrap();
    let error = pod.start("a", "bad").unwrap_err().to_string();
    assert!(error.contains("/no/such/program") && error.contains("exec failed"), "{error}");
    pod.delete("a", "bad").unwrap();
    let said = rustix::io::ioctl_fionread(&stderr).unwrap();
    assert_eq!(said, 0, "what the runtime says is not the container's");
    let missing = pod.start("a", "bad").unwrap_err();
    assert_eq!(code(&missing), Code::NOT_FOUND);
    pod.exec("a", "good", "exit 3", &Container::default()).unwrap();
    assert_eq!(code(&pod.kill("a", "good", 9).unwrap_err()), Code::FAILED_PRECONDITION);
    let twice = pod.exec("a", "good", "true", &Container::default()).unwrap_err();
    assert_eq!(code(&twice), Code::ALREADY_EXISTS);
    pod.start("a", "good").unwrap();
    assert_eq!(pod.wait("a", "good").unwrap(), 3);
    pod.end("a");
    pod.shut_down();
}

#[test]
fn standard_input_ends_when_it_is_closed() {
    let mut pod = Pod::new();
    let (input, out) = (pod.fifo("in"), pod.fifo("out"));
    let stdout = reader(&out);
    let with = Container { stdin: input.clone(), stdout: out, ..Default::default() };
    pod.run("a", "cat; echo end", &with);
    write(&input, b"one\n");
    // A writer that goes, as containerd does when it is restarted, is no end.
    write(&input, b"two\n");
    assert_eq!(pod.status("a"), Status::RUNNING);
    let mut request = CloseIORequest::new();
    (request.id, request.stdin) = (pod.id("a"), true);
    pod.client.close_io(context(), &request).unwrap();
    assert_eq!(pod.wait("a", "").unwrap(), 0);
    assert_eq!(stdout.join().unwrap(), b"one\ntwo\nend\n");
    pod.delete("a", "").unwrap();
    pod.shut_down();
}

#[test]
fn output_outlives_its_reader() {
    let mut pod = Pod::new();
    let out = pod.fifo("out");
    let with = Container { stdout: out.clone(), ..Default::default() };
    drop(pod::open(&out));
    pod.run("a", "dd if=/dev/zero bs=1k count=1000 2>/dev/null; exec sleep 1000", &with);
    // There is no reader for a while, and the container waits.
    let first = {
        use std::io::Read as _;
        let mut fifo = pod::open(&out);
        let mut part = vec![0; 10_000];
        eventually("the first bytes", || fifo.read_exact(&mut part).ok());
        part.len()
    };
    let rest = reader(&out);
    pod.exec("a", "e", "true", &Container::default()).unwrap();
    pod.start("a", "e").unwrap();
    pod.wait("a", "e").unwrap();
    pod.kill("a", "", 9).unwrap();
    pod.wait("a", "").unwrap();
    let rest = rest.join().unwrap().len();
    assert!(first + rest <= 1_024_000, "{first} {rest}");
    pod.delete("a", "").unwrap();
    // The last words wait for a reader.
    let with = Container { stdout: out.clone(), ..Default::default() };
    pod.run("b", "echo last", &with);
    pod.wait("b", "").unwrap();
    assert_eq!(reader(&out).join().unwrap(), b"last\n");
    pod.delete("b", "").unwrap();
    pod.shut_down();
}

#[test]
fn a_terminal_is_a_terminal() {
    let mut pod = Pod::new();
    let (input, out) = (pod.fifo("in"), pod.fifo("out"));
    let stdout = reader(&out);
    let with =
        Container { stdin: input.clone(), stdout: out, terminal: true, ..Default::default() };
    pod.create("a", "stty size; read line; echo got $line; exit 4", &with);
    let mut size = ResizePtyRequest::new();
    (size.id, size.width, size.height) = (pod.id("a"), 91, 37);
    pod.client.resize_pty(context(), &size).unwrap();
    pod.start("a", "").unwrap();
    write(&input, b"word\n");
    assert_eq!(pod.wait("a", "").unwrap(), 4);
    let said = String::from_utf8(stdout.join().unwrap()).unwrap();
    assert!(said.contains("37 91\r\n") && said.contains("got word\r\n"), "{said:?}");
    pod.delete("a", "").unwrap();
    assert!(
        !std::fs::read_dir(pod.bundle("a"))
            .unwrap()
            .any(|entry| { entry.unwrap().file_name().to_string_lossy().ends_with(".sock") })
    );
    pod.run("b", "sleep 1000", &Container::default());
    let out = pod.fifo("exec-out");
    let stdout = reader(&out);
    let with = Container { stdout: out, terminal: true, ..Default::default() };
    pod.exec("b", "tty", "test -t 1 && echo yes; exit 5", &with).unwrap();
    pod.start("b", "tty").unwrap();
    assert_eq!(pod.wait("b", "tty").unwrap(), 5);
    assert_eq!(stdout.join().unwrap(), b"yes\r\n");
    pod.end("b");
    pod.shut_down();
}

#[test]
fn events_outlive_containerd() {
    let mut pod = Pod::new();
    pod.run("a", "sleep 1000", &Container::default());
    pod.events_of(&["a"], 2);
    for round in 0..3 {
        pod.stop_containerd();
        let before = pod.events().len();
        let exec = format!("e{round}");
        pod.exec("a", &exec, "exit 1", &Container::default()).unwrap();
        pod.start("a", &exec).unwrap();
        pod.wait("a", &exec).unwrap();
        pod.delete("a", &exec).unwrap();
        assert_eq!(pod.events().len(), before);
        pod.start_containerd(false);
        let exit = format!("exit {exec} 1");
        let expected = [format!("exec-added {exec}"), format!("exec-started {exec}"), exit];
        assert_eq!(pod.events_of(&[&exec], 3), expected);
    }
    // One that was killed before it answered has taken the event or not: it comes again.
    pod.stop_containerd();
    pod.start_containerd(true);
    pod.exec("a", "twice", "true", &Container::default()).unwrap();
    eventually("a second attempt", || {
        (pod.events_of(&["twice"], 1) == ["exec-added twice", "exec-added twice"]).then_some(())
    });
    pod.stop_containerd();
    pod.start_containerd(false);
    pod.end("a");
    assert_eq!(pod.events_of(&["a"], 4), ["create a", "start a", "exit a 137", "delete a"]);
    pod.shut_down();
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
fn a_kill_for_want_of_memory_is_announced_before_the_exit() {
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

#[test]
fn a_shim_with_containers_does_not_shut_down() {
    let mut pod = Pod::new();
    pod.run("a", "sleep 1000", &Container::default());
    pod.client.shutdown(context(), &ShutdownRequest::new()).unwrap();
    assert_eq!(pod.status("a"), Status::RUNNING);
    pod.end("a");
    pod.shut_down();
}

#[test]
fn the_runtime_has_the_environment_without_what_is_the_shim_s_own() {
    let mut pod = Pod::new();
    let (script, seen) = (pod.path("runtime"), pod.path("seen"));
    let runc = pod::runc().display().to_string();
    let text = format!("#!/bin/sh\nenv >>{seen}\nexec {runc} \"$@\"\n");
    std::fs::write(&script, text).unwrap();
    std::fs::set_permissions(&script, std::os::unix::fs::PermissionsExt::from_mode(0o755)).unwrap();
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
fn a_signal_ends_the_shim_and_not_its_containers() {
    for signal in [libc::SIGTERM, libc::SIGINT] {
        let mut pod = Pod::new();
        let pid = pod.run("a", "sleep 1000", &Container::default());
        pod.events_of(&["a"], 2);
        pod.stop_containerd();
        pod.run("b", "exit 3", &Container::default());
        assert_eq!(pod.wait("b", "").unwrap(), 3);
        pod::signal(&pod.shim, signal);
        pod.start_containerd(false);
        pod.has_ended();
        assert_eq!(pod.events_of(&["b"], 3), ["create b", "start b", "exit b 3"]);
        assert!(exists(format!("/proc/{pid}")));
        for id in ["a", "b"] {
            pod.delete_after_shim(id);
        }
    }
}

/// A runtime that creates the first file when `action` is called, and waits for the second.
fn slow_runtime(pod: &Pod, action: &str) -> (Container, String, String) {
    let (script, began, go) = (pod.path("slow"), pod.path("began"), pod.path("go"));
    let runc = pod::runc().display().to_string();
    let text = format!(
        "#!/bin/sh\ncase \" $* \" in *\" {action} \"*) >{began}; while ! test -e {go}; do \
         sleep 0.01; done;; esac\nexec {runc} \"$@\"\n"
    );
    std::fs::write(&script, text).unwrap();
    std::fs::set_permissions(&script, std::os::unix::fs::PermissionsExt::from_mode(0o755)).unwrap();
    let mut with = Container::default();
    with.options.binary_name = script;
    (with, began, go)
}

#[test]
fn a_deletion_after_the_shim_is_not_interrupted() {
    let mut pod = Pod::new();
    let (with, began, go) = slow_runtime(&pod, "delete");
    pod.run("a", "sleep 1000", &with);
    pod::signal(&pod.shim, libc::SIGKILL);
    pod.shim.wait().unwrap();
    let mut deletion = pod.deletion("a").stdout(std::process::Stdio::null()).spawn().unwrap();
    eventually("the runtime runs", || exists(&began).then_some(()));
    for signal in [libc::SIGTERM, libc::SIGINT] {
        pod::signal(&deletion, signal);
    }
    std::fs::write(&go, "").unwrap();
    assert!(deletion.wait().unwrap().success());
    assert!(!exists(format!("{}/{}", pod.path("runc/test"), pod.id("a"))));
}

#[test]
fn a_container_that_is_being_created_is_answered_before_the_end() {
    let mut pod = Pod::new();
    let (with, began, go) = slow_runtime(&pod, "create");
    let pid = std::thread::scope(|scope| {
        let created = scope.spawn(|| pod.try_create("a", "sleep 1000", &with));
        eventually("the runtime runs", || exists(&began).then_some(()));
        pod::signal(&pod.shim, libc::SIGTERM);
        std::fs::write(&go, "").unwrap();
        created.join().unwrap().unwrap()
    });
    pod.has_ended();
    assert_eq!(pod.events_of(&["a"], 1), ["create a"]);
    assert!(exists(format!("/proc/{pid}")));
    pod.delete_after_shim("a");
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

#[test]
fn output_goes_to_files_and_programs() {
    let mut pod = Pod::new();
    let file = pod.path("logs/file");
    let with = Container {
        stdout: format!("file://{file}"),
        stderr: format!("file://{file}"),
        ..Default::default()
    };
    pod.run("a", "echo out; echo err >&2", &with);
    pod.wait("a", "").unwrap();
    pod.delete("a", "").unwrap();
    let written = std::fs::read_to_string(&file).unwrap();
    assert!(written.contains("out\n") && written.contains("err\n"), "{written:?}");

    let (script, log) = (pod.path("logger"), pod.path("log"));
    let text = format!(
        "#!/bin/sh\necho ready >&5; exec 5>&-\n\
         {{ echo $CONTAINER_NAMESPACE $1 $2; cat <&3; cat <&4; \
         echo end; }} >{log}\n"
    );
    std::fs::write(&script, text).unwrap();
    std::fs::set_permissions(&script, std::os::unix::fs::PermissionsExt::from_mode(0o755)).unwrap();
    for (id, scheme) in [("b", "binary"), ("c", "binary-v2")] {
        let with =
            Container { stdout: format!("{scheme}://{script}?--a=b%20c"), ..Default::default() };
        pod.run(id, "echo out; echo err >&2", &with);
        pod.wait(id, "").unwrap();
        let whole = eventually("the program's end", || {
            std::fs::read_to_string(&log).ok().filter(|text| text.ends_with("end\n"))
        });
        assert_eq!(whole, "test --a b c\nout\nerr\nend\n");
        std::fs::remove_file(&log).unwrap();
        pod.delete(id, "").unwrap();
    }
    let with = Container { stdout: "binary-v2:///bin/true".to_owned(), ..Default::default() };
    let error = pod.try_create("d", "true", &with).unwrap_err().to_string();
    assert!(error.contains("did not call ready"), "{error}");
    pod.shut_down();
}

#[test]
fn root_file_systems_are_mounted_and_unmounted() {
    let mut pod = Pod::new();
    let lower = pod.path("root");
    let layers: Vec<String> =
        (0..110).map(|number| pod.path(&format!("layers/{number:0>20}"))).collect();
    for dir in layers.iter().chain([&pod.path("upper"), &pod.path("work")]) {
        std::fs::create_dir_all(dir).unwrap();
    }
    let overlay = |dirs: &[String], more: &[&str]| {
        let mut mount = Mount::new();
        (mount.type_, mount.source) = ("overlay".to_owned(), "overlay".to_owned());
        mount.options = vec![format!("lowerdir={}", dirs.join(":"))];
        mount.options.extend(more.iter().map(|option| (*option).to_owned()));
        mount
    };
    let mounts = || std::fs::read_to_string("/proc/self/mountinfo").unwrap();
    // Longer than the kernel takes at once.
    let mut dirs = layers.clone();
    dirs.push(lower.clone());
    assert!(dirs.join(":").len() > 4096);
    let with = Container { rootfs: vec![overlay(&dirs, &["ro"])], ..Default::default() };
    let rootfs = pod.bundle("a").join("rootfs").display().to_string();
    pod.run("a", "exit 3", &with);
    assert!(mounts().contains(&rootfs));
    assert_eq!(pod.wait("a", "").unwrap(), 3);
    pod.delete("a", "").unwrap();
    assert!(!mounts().contains(&rootfs));

    let with = Container {
        rootfs: vec![overlay(
            &[lower.clone(), layers[0].clone()],
            &["uidmap=0:70000:65536", "gidmap=0:70000:65536"],
        )],
        ..Default::default()
    };
    pod.create("b", "true", &with);
    use std::os::unix::fs::MetadataExt as _;
    let rootfs = pod.bundle("b").join("rootfs");
    assert_eq!(std::fs::metadata(rootfs.join("bin/busybox")).unwrap().uid(), 70000);
    assert!(!exists(pod.bundle("b").join("idmapped")));
    pod.kill("b", "", 9).unwrap();
    pod.wait("b", "").unwrap();
    pod.delete("b", "").unwrap();

    let mut refused = overlay(&dirs, &["X-containerd.mkdir.path=/a"]);
    let with = Container { rootfs: vec![refused.clone()], ..Default::default() };
    let error = pod.try_create("c", "true", &with).unwrap_err();
    assert_eq!(code(&error), Code::INVALID_ARGUMENT);
    // What was mounted before the one that fails is undone.
    refused.options = vec!["lowerdir=/no/such".to_owned()];
    let with = Container { rootfs: vec![overlay(&dirs, &["ro"]), refused], ..Default::default() };
    pod.try_create("c", "true", &with).unwrap_err();
    assert!(!mounts().contains(&pod.bundle("c").display().to_string()));
    pod.shut_down();
}

#[test]
fn what_a_dead_shim_has_left_is_deleted() {
    let mut pod = Pod::new();
    let pid = pod.run("a", "sleep 1000", &Container::default());
    pod.shim.kill().unwrap();
    pod.shim.wait().unwrap();
    assert!(exists(format!("/proc/{pid}")));
    let deleted = pod.delete_after_shim("a");
    assert_eq!((deleted.pid, deleted.exit_status), (pid, 137));
}

//! Many processes that end at once: none of their exits is lost. `SHORT_EXECS`, `SHORT_CONTAINERS`
//! and `EXECS_AT_ONCE` say how many.

use std::collections::BTreeMap;
use std::sync::atomic::{AtomicUsize, Ordering};

use crate::pod::{self, Container, Pod, code, count, eventually, exists, reader, script};
use containerd_shim_protos::ttrpc::Code;

/// How many callers there are at a time.
const CALLERS: usize = 4;

/// Each number from 0 to `count` once, by some threads.
fn each(count: usize, work: impl Fn(usize) + Sync) {
    let next = AtomicUsize::new(0);
    std::thread::scope(|scope| {
        for _ in 0..CALLERS {
            scope.spawn(|| {
                loop {
                    let number = next.fetch_add(1, Ordering::Relaxed);
                    if number >= count {
                        return;
                    }
                    work(number);
                }
            });
        }
    });
}

/// The events of each container or exec, in their order, once there are so many in all.
fn events(pod: &Pod, count: usize) -> BTreeMap<String, Vec<String>> {
    eventually("all events", || (pod.event_count() >= count).then_some(()));
    let mut by_id: BTreeMap<String, Vec<String>> = BTreeMap::new();
    for (topic, id, status) in pod.events() {
        by_id.entry(id).or_default().push(format!("{topic} {status}"));
    }
    by_id
}

/// A runtime that ends a moment after what it has started has, most likely.
fn slow(pod: &Pod) -> Container {
    let path = pod.path("slow");
    let runtime = pod::runtime().display().to_string();
    let text = format!(
        "{runtime} \"$@\"; code=$?\ncase \" $* \" in *\" exec \"*|*\" start \"*) sleep 0.01;; \
         esac\nexit $code"
    );
    script(&path, &text);
    let mut with = Container::default();
    with.options.binary_name = path;
    with
}

/// Promise: exit_is_not_lost.
#[test]
fn short_execs_are_not_lost() {
    let mut pod = Pod::new();
    let all = count("SHORT_EXECS", 120);
    pod.run("long", "exec sleep 1000000", &slow(&pod));
    let (pod_ref, early) = (&pod, AtomicUsize::new(0));
    let round = |number: usize| {
        let (exec, status) = (format!("e{number}"), (number % 200) as u32);
        pod_ref.exec("long", &exec, &format!("exit {status}"), &Container::default()).unwrap();
        let pid = pod_ref.start("long", &exec).unwrap();
        let state = pod_ref.state("long", &exec).unwrap();
        early.fetch_add(usize::from(state.exited_at.is_some()), Ordering::Relaxed);
        assert_eq!(pod_ref.wait("long", &exec).unwrap(), status);
        let deleted = pod_ref.delete("long", &exec).unwrap();
        assert_eq!((deleted.exit_status, deleted.pid), (status, pid));
        assert!(!exists(pod_ref.bundle("long").join(format!("exec-{exec}.pid"))));
    };
    round(0);
    let before = pod.memory();
    each(all, |number| round(number + 1));
    let after = pod.memory();
    eprintln!("{all} execs: {early:?} ended before the answer; shim {before} kB, then {after} kB");
    assert!(after < before + 512, "{before} kB, then {after} kB");
    let events = events(&pod, 3 * (all + 1) + 2);
    for number in 0..=all {
        let expected = ["exec-added 0", "exec-started 0", &format!("exit {}", number % 200)];
        assert_eq!(events[&format!("e{number}")], expected, "{number}");
    }
    pod.end("long");
    pod.shut_down();
}

/// Promise: exit_is_not_lost.
#[test]
fn short_containers_are_not_lost() {
    let mut pod = Pod::new();
    let all = count("SHORT_CONTAINERS", 40);
    let (slow, pod_ref, early) = (slow(&pod), &pod, AtomicUsize::new(0));
    let before = pod.memory();
    each(all, |number| {
        let (id, status) = (format!("c{number}"), (number % 200) as u32);
        pod_ref.run(&id, &format!("exit {status}"), &slow);
        let state = pod_ref.state(&id, "").unwrap();
        early.fetch_add(usize::from(state.exited_at.is_some()), Ordering::Relaxed);
        assert_eq!(pod_ref.wait(&id, "").unwrap(), status);
        assert_eq!(pod_ref.delete(&id, "").unwrap().exit_status, status);
        std::fs::remove_dir_all(pod_ref.bundle(&id)).unwrap();
    });
    let after = pod.memory();
    eprintln!(
        "{all} containers: {early:?} ended before the answer; shim {before} kB, then {after} kB"
    );
    assert!(after < before + 512, "{before} kB, then {after} kB");
    let events = events(&pod, 4 * all);
    for number in 0..all {
        let expected = ["create 0", "start 0", &format!("exit {}", number % 200), "delete 0"];
        assert_eq!(events[&format!("c{number}")], expected, "{number}");
    }
    pod.shut_down();
}

#[test]
fn many_execs_at_once_end_before_their_container() {
    let mut pod = Pod::new();
    pod.run("a", "sleep 1000", &Container::default());
    let pod_ref = &pod;
    let all = count("EXECS_AT_ONCE", 40);
    let names: Vec<String> = (0..all).map(|number| format!("e{number}")).collect();
    std::thread::scope(|scope| {
        for name in &names {
            scope.spawn(move || {
                pod_ref.exec("a", name, "sleep 1000", &Container::default()).unwrap();
                pod_ref.start("a", name).unwrap();
            });
        }
    });
    let full = pod.memory();
    pod.kill("a", "", 9).unwrap();
    assert_eq!(pod.wait("a", "").unwrap(), 137);
    let error = pod.exec("a", "late", "true", &Container::default()).unwrap_err();
    assert_eq!(code(&error), Code::FAILED_PRECONDITION);
    for name in &names {
        assert_eq!(pod.wait("a", name).unwrap(), 137);
        pod.delete("a", name).unwrap();
    }
    pod.delete("a", "").unwrap();
    eprintln!("{all} execs at once: shim {full} kB, then {} kB", pod.memory());
    eventually("the last event", || pod.events().iter().find(|e| e.0 == "delete").cloned());
    let exits: Vec<String> =
        pod.events().into_iter().filter(|event| event.0 == "exit").map(|event| event.1).collect();
    assert_eq!(exits.len(), names.len() + 1);
    assert_eq!(exits.last().map(String::as_str), Some("a"));
    pod.shut_down();
}

/// The streams of an exec take several descriptors of the shim each.
#[test]
fn the_limit_of_open_files_is_the_containers_and_not_the_shims() {
    let mut pod = Pod::after("ulimit -Sn 64");
    let out = pod.fifo("out");
    let (stdout, limit) = (reader(&out), Container { stdout: out, ..Default::default() });
    pod.run("a", "ulimit -Sn; exec sleep 1000", &limit);
    let names: Vec<String> = (0..20).map(|number| format!("e{number}")).collect();
    for name in &names {
        let (stdin, stdout) = (pod.fifo(&format!("{name}-in")), pod.fifo(&format!("{name}-out")));
        let with = Container { stdin, stdout, ..Default::default() };
        let _reader = pod::open(&with.stdout);
        pod.exec("a", name, "exec sleep 1000", &with).unwrap();
        pod.start("a", name).unwrap();
    }
    pod.kill("a", "", 9).unwrap();
    assert_eq!(pod.wait("a", "").unwrap(), 137);
    for name in &names {
        assert_eq!(pod.wait("a", name).unwrap(), 137);
        pod.delete("a", name).unwrap();
    }
    pod.delete("a", "").unwrap();
    assert_eq!(stdout.join().unwrap(), b"64\n");
    pod.shut_down();
}

/// containerd may have been started below nohup(1).
#[test]
fn a_container_ignores_no_signal_that_its_shim_ignores() {
    let mut pod = Pod::after("trap '' HUP INT USR1");
    let pid = pod.run("a", "exec sleep 1000", &Container::default());
    let status = || std::fs::read_to_string(format!("/proc/{pid}/status")).unwrap();
    let status = eventually("the program", || {
        Some(status()).filter(|status| status.starts_with("Name:\tsleep\n"))
    });
    let ignored = status.lines().find_map(|line| line.strip_prefix("SigIgn:\t")).unwrap();
    // The C library refuses to change its own two signals.
    let of_library = 3 << (32 - 1);
    assert_eq!(u64::from_str_radix(ignored, 16).unwrap() & !of_library, 0, "{ignored}");
    pod.end("a");
    pod.shut_down();
}

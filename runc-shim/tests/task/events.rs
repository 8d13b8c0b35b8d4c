//! Events, while containerd goes away and returns.

use std::io::Read as _;
use std::time::Duration;

use crate::pod::{Answers, Container, Pod, count, eventually};

/// An event comes at least once, and in its place. It comes again only if containerd has taken it
/// and gone before it has answered.
///
/// Promise: exit_is_not_lost.
#[test]
fn events_come_in_order_over_ten_restarts_of_any_kind() {
    let mut pod = Pod::new();
    pod.run("a", "sleep 1000", &Container::default());
    let mut expected = vec!["create a".to_owned(), "start a".to_owned()];
    pod.events_of(&["a"], 2);
    for round in 0..10 {
        pod.stop_containerd();
        match round % 3 {
            0 => {}
            1 => pod.start_containerd_that(Answers::Dies),
            _ => pod.start_containerd_that(Answers::Hangs),
        }
        let exec = format!("e{round}");
        pod.exec("a", &exec, "exit 1", &Container::default()).unwrap();
        pod.start("a", &exec).unwrap();
        pod.wait("a", &exec).unwrap();
        pod.delete("a", &exec).unwrap();
        expected.push(format!("exec-added {exec}"));
        expected.push(format!("exec-started {exec}"));
        expected.push(format!("exit {exec} 1"));
        if round % 3 > 0 {
            // One is on its way.
            eventually("an event without an answer", || {
                pod.events().iter().any(|(_, id, _)| *id == exec).then_some(())
            });
            pod.stop_containerd();
        }
        pod.start_containerd();
        let exit = format!("exit {exec} 1");
        eventually("the exit", || pod.events_of(&[&exec], 3).contains(&exit).then_some(()));
    }
    pod.end("a");
    expected.extend(["exit a 137".to_owned(), "delete a".to_owned()]);
    let mut ids: Vec<String> = (0..10).map(|round| format!("e{round}")).collect();
    ids.push("a".to_owned());
    let ids: Vec<&str> = ids.iter().map(String::as_str).collect();
    let mut events = eventually("the last event", || {
        let events = pod.events_of(&ids, 1);
        events.iter().any(|event| event == "delete a").then_some(events)
    });
    let all = events.len();
    events.dedup();
    assert_eq!(events, expected);
    assert!(all > expected.len(), "none came twice");
    pod.shut_down();
}

/// `CONTAINERD_STOPPED_SECONDS` says how long.
#[test]
fn no_event_is_lost_while_containerd_is_stopped() {
    let mut pod = Pod::new();
    let seconds = count("CONTAINERD_STOPPED_SECONDS", 3) as u64;
    pod.run("a", "sleep 1000000", &Container::default());
    let mut expected = vec!["create a".to_owned(), "start a".to_owned()];
    pod.events_of(&["a"], 2);
    pod.stop_containerd();
    let execs: Vec<String> = (0..10).map(|number| format!("e{number}")).collect();
    for exec in &execs {
        pod.exec("a", exec, "exit 1", &Container::default()).unwrap();
        pod.start("a", exec).unwrap();
        assert_eq!(pod.wait("a", exec).unwrap(), 1);
        pod.delete("a", exec).unwrap();
        expected.extend([format!("exec-added {exec}"), format!("exec-started {exec}")]);
        expected.push(format!("exit {exec} 1"));
        std::thread::sleep(Duration::from_secs(seconds) / 10);
    }
    pod.end("a");
    expected.extend(["exit a 137".to_owned(), "delete a".to_owned()]);
    assert_eq!(pod.event_count(), 2);
    pod.start_containerd();
    let mut ids: Vec<&str> = execs.iter().map(String::as_str).collect();
    ids.push("a");
    assert_eq!(pod.events_of(&ids, expected.len()), expected);
    pod.shut_down();
}

#[test]
fn an_event_that_containerd_refuses_for_a_while_is_not_lost() {
    let mut pod = Pod::new();
    pod.stop_containerd();
    pod.start_containerd_that(Answers::Refuses(7));
    pod.run("a", "exit 3", &Container::default());
    assert_eq!(pod.wait("a", "").unwrap(), 3);
    pod.delete("a", "").unwrap();
    let expected = ["create a", "start a", "exit a 3", "delete a"];
    assert_eq!(pod.events_of(&["a"], 4), expected);
    pod.shut_down();
}

#[test]
fn a_dropped_event_is_logged_with_its_topic() {
    let (read, write) = rustix::pipe::pipe_with(rustix::pipe::PipeFlags::CLOEXEC).unwrap();
    let mut pod = Pod::with_log(write.into());
    pod.stop_containerd();
    pod.start_containerd_that(Answers::Malformed(5));
    pod.run("a", "exit 3", &Container::default());
    assert_eq!(pod.wait("a", "").unwrap(), 3);
    pod.delete("a", "").unwrap();
    // The first one was dropped.
    assert_eq!(pod.events_of(&["a"], 3), ["start a", "exit a 3", "delete a"]);
    pod.shut_down();
    let mut log = String::new();
    std::fs::File::from(read).read_to_string(&mut log).unwrap();
    assert!(log.contains("retrying: event /tasks/create: malformed"), "{log}");
    let dropped = "containerd refused event /tasks/create 5 times; dropped: malformed";
    assert!(log.contains(dropped), "{log}");
}

/// Calls are served while containerd cannot be reached for events.
#[test]
fn only_events_of_execs_are_dropped_when_too_many_are_queued() {
    let (read, write) = rustix::pipe::pipe_with(rustix::pipe::PipeFlags::CLOEXEC).unwrap();
    let mut pod = Pod::with_log(write.into());
    pod.run("a", "sleep 1000", &Container::default());
    pod.events_of(&["a"], 2);
    pod.stop_containerd();
    for number in 0..4200 {
        let exec = format!("probe{number}");
        pod.exec("a", &exec, "true", &Container::default()).unwrap();
        pod.delete("a", &exec).unwrap();
    }
    pod.run("b", "exit 5", &Container::default());
    assert_eq!(pod.wait("b", "").unwrap(), 5);
    pod.delete("b", "").unwrap();
    pod.start_containerd();
    assert_eq!(pod.events_of(&["b"], 4), ["create b", "start b", "exit b 5", "delete b"]);
    let probes = pod.events().into_iter().filter(|(_, id, _)| id.starts_with("probe")).count();
    assert_eq!(probes, 4096);
    // The queue is empty: none is dropped.
    pod.exec("a", "later", "true", &Container::default()).unwrap();
    pod.delete("a", "later").unwrap();
    pod.end("a");
    let last = ["exec-added later", "exit a 137", "delete a"];
    assert_eq!(pod.events_of(&["a", "later"], 5)[2..], last);
    pod.shut_down();
    let mut log = String::new();
    std::fs::File::from(read).read_to_string(&mut log).unwrap();
    assert_eq!(log.matches("dropping those of execs").count(), 1, "{log}");
}

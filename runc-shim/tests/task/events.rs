//! Events, while containerd goes away and returns.

use crate::pod::{Container, Pod, eventually};

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

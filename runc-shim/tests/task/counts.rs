//! Many processes that end at once: none of their exits is lost.

use crate::pod::{Container, Pod, exists};

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

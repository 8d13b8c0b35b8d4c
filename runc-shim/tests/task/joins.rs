//! Execs that are started while something else happens to them.

use containerd_shim_protos::api::*;

use crate::ends::slow_runtime;
use crate::pod::{Container, Pod, context, eventually, exists};

#[test]
fn a_terminal_has_the_size_that_was_set_during_its_start() {
    let mut pod = Pod::new();
    let (with, began, go) = slow_runtime(&pod, "exec");
    pod.run("a", "exec sleep 1000", &with);
    let with = Container { stdout: pod.fifo("out"), terminal: true, ..Default::default() };
    let script = "for i in $(seq 200); do test \"$(stty size)\" = '37 91' && exit 4; \
                  sleep 0.05; done";
    pod.exec("a", "e", script, &with).unwrap();
    std::thread::scope(|scope| {
        let started = scope.spawn(|| pod.start("a", "e"));
        eventually("the exec begins", || exists(&began).then_some(()));
        let mut size = ResizePtyRequest::new();
        (size.id, size.exec_id) = (pod.id("a"), "e".to_owned());
        (size.width, size.height) = (91, 37);
        let client = pod.connect();
        let resized = scope.spawn(move || client.resize_pty(context(), &size));
        // An answer that comes at once would be one before the start.
        std::thread::sleep(std::time::Duration::from_millis(300));
        std::fs::write(&go, "").unwrap();
        started.join().unwrap().unwrap();
        resized.join().unwrap().unwrap();
    });
    assert_eq!(pod.wait("a", "e").unwrap(), 4);
    pod.end("a");
    pod.shut_down();
}

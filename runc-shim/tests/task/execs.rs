//! Processes that are executed in a container.

use containerd_shim_protos::api::*;
use containerd_shim_protos::ttrpc::Code;

use crate::pod::{self, Container, Pod, code, context, eventually};

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

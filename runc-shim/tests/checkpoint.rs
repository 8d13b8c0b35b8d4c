//! A container is written to a checkpoint and restored from it: with CRIU, where that runs on the
//! node's kernel, else counted as ignored; and with a stand-in, which begins the container anew.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic, reason = "a test fails so")]

#[path = "task/pod/mod.rs"]
#[allow(dead_code, reason = "other tests use the rest")]
mod pod;

use std::process::{Command, ExitCode};

use containerd_shim_protos::api::{CheckpointTaskRequest, Status};
use containerd_shim_protos::protobuf::Message as _;
use containerd_shim_protos::shim::oci::CheckpointOptions;
use libtest_mimic::{Arguments, Trial};

use crate::pod::{Container, Pod, context, exists};

fn main() -> ExitCode {
    let arguments = Arguments::from_args();
    let with_criu = Trial::test("a_container_is_restored_from_a_checkpoint", || {
        restores(|_| Container::default(), "");
        Ok(())
    });
    let stand_in = Trial::test("a_container_is_restored_by_a_stand_in_of_criu", || {
        restores(stand_in_of_criu, PARENT);
        Ok(())
    });
    let trials = vec![with_criu.with_kind("CRIU").with_ignored_flag(!criu_works()), stand_in];
    libtest_mimic::run(&arguments, trials).exit_code()
}

/// Whether CRIU is there and has what it needs of the kernel.
fn criu_works() -> bool {
    Command::new("criu").arg("check").output().is_ok_and(|output| output.status.success())
}

/// The parent image of a checkpoint, relative to it, which the stand-in expects.
const PARENT: &str = "../before";

/// A runtime that kills instead of writing a checkpoint, and begins anew instead of restoring. It
/// uses `create` and `start`, because with `crun run --detach` a process between the runtime and
/// the container may exit after the command, so that the container is no child of the shim yet.
fn stand_in_of_criu(pod: &Pod) -> Container {
    let path = pod.path("stand-in");
    let runtime = pod::runtime().display().to_string();
    let text = format!(
        "root=$2 log=$4; shift 6\n\
         runtime() {{ {runtime} --root $root --log $log --log-format json \"$@\"; }}\n\
         case $1 in\n\
         checkpoint)\n\
         while test $# -gt 1; do case $1 in --image-path) image=$2;; \
         --parent-path) parent=$2;; esac; shift; done\n\
         test \"$parent\" = {PARENT} && mkdir $image && runtime kill $1 9;;\n\
         restore)\n\
         while test $# -gt 1; do case $1 in --pid-file) file=$2;; --bundle) bundle=$2;; \
         --image-path) test -d $2 || exit 1;; esac; shift; done\n\
         runtime create --pid-file $file --bundle $bundle $1 && runtime start $1;;\n\
         *) runtime \"$@\";;\n\
         esac"
    );
    pod::script(&path, &text);
    let mut with = Container::default();
    with.options.binary_name = path;
    with
}

/// The errors in the log that a failure of runc names.
fn log_of_criu(error: &str) -> String {
    let path = error.split("path= ").nth(1).and_then(|rest| rest.split('"').next());
    let log = path.and_then(|path| std::fs::read_to_string(path).ok()).unwrap_or_default();
    let errors = log.lines().filter(|line| line.contains("Error") || line.contains("Warn"));
    errors.collect::<Vec<_>>().join("\n")
}

/// Writes a checkpoint of a container, which ends by that, and restores another one from it.
fn restores(container: impl Fn(&Pod) -> Container, parent: &str) {
    let mut pod = Pod::new();
    let with = container(&pod);
    pod.run("a", "exec sleep 1000", &with);
    let mut options = CheckpointOptions::new();
    options.exit = true;
    if !parent.is_empty() {
        // Field 10, of containerd 2.4.
        options.mut_unknown_fields().add_length_delimited(10, parent.as_bytes().to_vec());
    }
    let mut request = CheckpointTaskRequest::new();
    (request.id, request.path) = (pod.id("a"), pod.path("image"));
    request.options.mut_or_insert_default().value = options.write_to_bytes().unwrap();
    if let Err(e) = pod.client.checkpoint(context(), &request) {
        panic!("{e}\n{}", log_of_criu(&e.to_string()));
    }
    assert!(exists(&request.path));
    assert_eq!(pod.wait("a", "").unwrap(), 137);
    pod.delete("a", "").unwrap();
    let events = pod.events_of(&["a"], 5);
    assert!(events.contains(&"checkpointed a".to_owned()), "{events:?}");
    let restored = Container { checkpoint: request.path, ..with };
    assert_eq!(pod.create("b", "exec sleep 1000", &restored), 0);
    let pid = pod.start("b", "").unwrap();
    assert!(exists(format!("/proc/{pid}")));
    assert_eq!(pod.status("b"), Status::RUNNING);
    pod.kill("b", "", 9).unwrap();
    assert_eq!(pod.wait("b", "").unwrap(), 137);
    pod.delete("b", "").unwrap();
    assert_eq!(pod.events_of(&["b"], 4)[..3], ["create b", "start b", "exit b 137"]);
    pod.shut_down();
}

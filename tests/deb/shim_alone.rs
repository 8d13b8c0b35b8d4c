//! The packages of the shim alone: each installed, used by a container of `ctr`, and removed.

use std::path::Path;

use super::pods::Pods;
use super::{eventually, no_process_is_left, quiet, run, says, typed};

const PROGRAM: &str = "/usr/bin/containerd-shim-runc-small-v2";

pub fn comes_and_goes(deb: &str, rpm: &str) {
    Pods::new().up();
    says("Install the package of the shim alone");
    run(&format!("dpkg -i {deb}"));
    keeps_a_container(
        "apt-get -qq remove pause-sandboxer-runc-shim",
        "dpkg-query -W -f '${db:Status-Status}' pause-sandboxer-runc-shim | grep -x installed",
    );

    says("Install the RPM package of the shim alone");
    run(&format!("rpm --force-debian --nodeps --install {rpm}"));
    assert_eq!(quiet("rpm --verify --nodeps pause-sandboxer-runc-shim 2>&1"), "");
    keeps_a_container(
        "rpm --erase pause-sandboxer-runc-shim",
        "rpm --query pause-sandboxer-runc-shim",
    );
}

/// Runs a container with the installed shim, and removes the package before and after its deletion.
fn keeps_a_container(removal: &str, is_installed: &str) {
    run(&format!(
        "ctr -n k8s.io run -d --runtime io.containerd.runc-small.v2 {} alone sleep 10000",
        kit::TEST_IMAGE
    ));
    let shim = shims();
    assert!(!shim.is_empty() && !shim.contains('\n'), "one shim: {shim:?}");
    let (code, text) = typed(removal);
    assert_ne!(code, 0, "{text}");
    assert!(text.contains(&format!("(processes {shim}; ")), "{text}");
    run(is_installed);
    let arguments = run(&format!("ps -o args= -p {shim}"));
    assert!(arguments.contains("-namespace k8s.io -id alone"), "{arguments}");

    run("ctr -n k8s.io task rm -f alone && ctr -n k8s.io container rm alone");
    eventually("the shim has exited", || {
        let left = shims();
        if left.is_empty() { Ok(()) } else { Err(left) }
    });
    run(removal);
    assert!(!Path::new(PROGRAM).exists(), "the package is removed");
    no_process_is_left();
}

/// The processes of the program, one a line.
fn shims() -> String {
    let own = format!("[ \"$(readlink $exe)\" = {PROGRAM} ] && echo $exe");
    quiet(&format!("for exe in /proc/[0-9]*/exe; do {own}; done | cut -d / -f 3"))
}

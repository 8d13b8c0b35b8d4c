//! The script that runs the installation on one node after the other, with an API server and an
//! `install.sh` of the test.

use std::fs;
use std::io::{BufRead as _, BufReader};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};

use super::kubernetes::DIR;

/// Creates, shows and deletes the one Lease, with the preconditions of the request; where there is
/// the file `refuses`, answers 500. After a GET of it `swapped-at-get` replaces the Lease. Notes
/// the requests, the header of stdin, and whether an argument has the token.
const CURL: &str = r#"#!/bin/sh
case " $* " in *' -H @- '*) cat >"$CLUSTER/header" ;; esac
case $* in *secret*) : >"$CLUSTER/leaked" ;; esac
while [ $# -gt 0 ]; do
    case $1 in
    -X) method=$2 ;;
    --data) data=$2 ;;
    --output) output=$2 ;;
    esac
    last=$1
    shift
done
leases=$SERVER/apis/coordination.k8s.io/v1/namespaces/system/leases
case "$method $last" in
"POST $leases" | "GET $leases/rollout" | "DELETE $leases/rollout") ;;
*) exit 9 ;;
esac
cd "$CLUSTER"
echo "$method" >>requests
if [ -e refuses ]; then
    echo refused >"$output"
    printf 500
    exit 0
fi
case $method in
POST)
    made='"metadata":{"uid":"lease-'$$'","resourceVersion":"'$$'",'
    data=$(echo "$data" | sed "s/\"metadata\":{/$made/")
    (set -C; echo "$data" >lease) 2>/dev/null && printf 201 || printf 409
    ;;
GET)
    # For curl the server indents.
    text=$(cat lease 2>/dev/null) || { printf 404; exit 0; }
    echo "$text" | sed 's/[,{]/&\n  /g; s/":/": /g' >"$output" && printf 200
    [ ! -e swapped-at-get ] || mv swapped-at-get lease
    ;;
DELETE)
    wanted=$(echo "$data" | sed -n 's/.*"preconditions":{\(.*\)}}$/\1/p')
    [ -n "$wanted" ] || exit 9
    if [ ! -e lease ]; then
        printf 404
    elif grep -qF "$wanted," lease; then
        rm lease && printf 200
    else
        printf 409
    fi
    ;;
esac
"#;

/// The command notes each run; it fails on the node that the file `fails` names, and if two run at
/// once.
/// While it runs `swapped-at-work` replaces the Lease. A node needs the sandboxer while there is
/// `pods-NODE`, which `arrives` becomes when the removal begins.
const INSTALL: &str = r#"#!/bin/sh
cd "$CLUSTER"
pods=pods-$NODE_NAME
case $1 in
ready) exit 0 ;;
unneeded)
    [ -e "$pods" ] || exit 0
    echo "$NODE_NAME waits for pods"
    exit 75
    ;;
esac
[ "$ONCE" = 1 ] || exit 8
if [ "$1" = uninstall ]; then
    [ ! -e arrives ] || mv arrives "$pods"
    [ ! -e "$pods" ] || exit 75
fi
mkdir busy || { echo overlap >>journal; exit 7; }
echo "$1 $NODE_NAME" >>journal
sleep 0.2
[ ! -e swapped-at-work ] || mv swapped-at-work lease
rmdir busy
[ "$NODE_NAME" != "$(cat fails)" ]
"#;

struct Cluster(tempfile::TempDir);

impl Cluster {
    fn new() -> Self {
        let cluster = Self(tempfile::tempdir().unwrap());
        fs::create_dir(cluster.path("bin")).unwrap();
        for (name, text) in [("curl", CURL), ("install.sh", INSTALL)] {
            kit::write_program(cluster.path("bin").join(name), text.as_bytes()).unwrap();
        }
        for (name, text) in [("token", "secret"), ("fails", "none"), ("journal", "")] {
            fs::write(cluster.path(name), text).unwrap();
        }
        cluster
    }

    fn path(&self, name: &str) -> PathBuf {
        self.0.path().join(name)
    }

    fn command(&self, node: &str, word: &str) -> Command {
        let script = Path::new(env!("CARGO_MANIFEST_DIR")).join(DIR).join("rollout.sh");
        let path = std::env::var("PATH").unwrap();
        let mut command = Command::new(script);
        command
            .arg(word)
            .env("CLUSTER", self.0.path())
            .env("ACCOUNT", self.0.path())
            .env("PATH", format!("{}:{path}", self.path("bin").display()))
            .env("SERVER", "https://api:443")
            .env("KUBERNETES_SERVICE_HOST", "api")
            .env("KUBERNETES_SERVICE_PORT", "443")
            .env("NAMESPACE", "system")
            .env("POD_NAME", format!("installer-{node}"))
            .env("POD_UID", format!("uid-{node}"))
            .env("NODE_NAME", node)
            .env("FINISHED", self.path(&format!("finished-{node}")))
            .env("LEASE", "rollout")
            .env("ROLLOUT_ONCE", "1")
            .env("EVERY", "0.05")
            .stdin(Stdio::null());
        command
    }

    fn succeeds(&self, node: &str, word: &str) -> bool {
        self.command(node, word).output().unwrap().status.success()
    }

    /// Starts a command, and returns when its output contains `why`.
    fn waiting(&self, node: &str, word: &str, why: &str) -> Child {
        let mut child = self.command(node, word).stdout(Stdio::piped()).spawn().unwrap();
        let lines = BufReader::new(child.stdout.as_mut().unwrap()).lines().map(Result::unwrap);
        let seen: Vec<String> = lines.take(1).collect();
        assert!(seen[0].contains(why), "{seen:?}");
        child
    }

    fn journal(&self) -> String {
        fs::read_to_string(self.path("journal")).unwrap()
    }

    fn lease(&self) -> Option<serde_json::Value> {
        let text = fs::read_to_string(self.path("lease")).ok()?;
        Some(serde_json::from_str(&text).unwrap())
    }
}

/// A command that waited succeeds.
fn ends(mut child: Child) {
    // Output without a reader must not block it.
    drop(child.stdout.take().map(|mut said| std::io::copy(&mut said, &mut std::io::sink())));
    assert!(child.wait().unwrap().success());
}

/// Promise: rollout_changes_one_node.
#[test]
fn nodes_are_changed_one_after_the_other() {
    for word in ["install", "uninstall"] {
        let cluster = Cluster::new();
        let nodes = ["a", "b", "c", "d"];
        let running: Vec<Child> = nodes
            .map(|node| cluster.command(node, word).stdout(Stdio::null()).spawn().unwrap())
            .into();
        for mut child in running {
            assert!(child.wait().unwrap().success(), "{word}: {}", cluster.journal());
        }
        let journal = cluster.journal();
        let mut lines: Vec<&str> = journal.lines().collect();
        lines.sort_unstable();
        assert_eq!(lines, nodes.map(|node| format!("{word} {node}")), "{journal}");
        assert_eq!(cluster.lease(), None);
        assert!(nodes.iter().all(|node| cluster.succeeds(node, "ready")));
    }
}

/// Promise: rollout_changes_one_node.
#[test]
fn a_failed_installation_stops_the_others_until_it_succeeds() {
    let cluster = Cluster::new();
    fs::write(cluster.path("fails"), "a").unwrap();
    assert!(!cluster.succeeds("a", "install"));
    let lease = cluster.lease().expect("the node keeps it");
    assert_eq!(lease["spec"]["holderIdentity"], "a");
    // Kubernetes deletes it with this pod.
    assert_eq!(lease["metadata"]["ownerReferences"][0]["uid"], "uid-a");
    assert!(!cluster.succeeds("a", "ready"), "an unavailable pod stops the DaemonSet's update");
    let b = cluster.waiting("b", "install", "waiting for node a, which has Lease rollout");
    // Its container is restarted.
    assert!(!cluster.succeeds("a", "install"));
    assert!(!cluster.journal().contains("install b"), "{}", cluster.journal());
    fs::write(cluster.path("fails"), "none").unwrap();
    assert!(cluster.succeeds("a", "install"));
    ends(b);
    assert_eq!(cluster.journal(), "install a\ninstall a\ninstall a\ninstall b\n");
    assert_eq!(cluster.lease(), None);
}

/// kubelet sets the bare address.
#[test]
fn the_api_server_may_have_an_ipv6_address() {
    let cluster = Cluster::new();
    let mut command = cluster.command("a", "install");
    command.env("KUBERNETES_SERVICE_HOST", "fd00::1").env("SERVER", "https://[fd00::1]:443");
    // Without an answer it waits.
    let mut child = command.stdout(Stdio::piped()).spawn().unwrap();
    let said = BufReader::new(child.stdout.take().unwrap()).lines().next();
    child.kill().unwrap();
    let done = child.wait().unwrap().success();
    assert!(said.is_none() && done, "{said:?}");
    assert_eq!((cluster.journal().as_str(), cluster.lease()), ("install a\n", None));
}

/// The Lease is deleted by hand, or by Kubernetes with the pod that owns it.
#[test]
fn the_others_continue_when_the_lease_of_a_failed_node_is_deleted() {
    let cluster = Cluster::new();
    fs::write(cluster.path("fails"), "a").unwrap();
    assert!(!cluster.succeeds("a", "install"));
    let b = cluster.waiting("b", "install", "waiting for node a");
    fs::remove_file(cluster.path("lease")).unwrap();
    ends(b);
    assert_eq!(cluster.journal(), "install a\ninstall b\n");
}

/// An operator deletes the Lease of a node that works, and another node takes it.
#[test]
fn the_lease_of_another_node_is_not_deleted() {
    const OTHERS: &str = r#"{"metadata":{"uid":"lease-b","resourceVersion":"7",
        "ownerReferences":[{"uid":"uid-b"}]},"spec":{"holderIdentity":"b"}}"#;
    for when in ["swapped-at-work", "swapped-at-get"] {
        let cluster = Cluster::new();
        fs::write(cluster.path(when), OTHERS).unwrap();
        assert!(cluster.succeeds("a", "install"), "{when}");
        assert!(!cluster.path(when).exists(), "{when}");
        let lease = cluster.lease().unwrap_or_else(|| panic!("{when}: the Lease is deleted"));
        assert_eq!(lease["spec"]["holderIdentity"], "b", "{when}");
        assert!(cluster.succeeds("a", "ready"), "{when}");
    }
}

#[test]
fn nothing_is_installed_while_the_api_server_does_not_answer() {
    let cluster = Cluster::new();
    fs::write(cluster.path("refuses"), "").unwrap();
    let a = cluster.waiting("a", "install", "cannot take Lease rollout: status 500: refused");
    assert_eq!(cluster.journal(), "");
    fs::remove_file(cluster.path("refuses")).unwrap();
    ends(a);
    assert_eq!(cluster.journal(), "install a\n");
}

#[test]
fn a_removal_is_ready_when_it_is_done() {
    let cluster = Cluster::new();
    assert!(!cluster.succeeds("a", "ready"));
    fs::write(cluster.path("fails"), "a").unwrap();
    assert!(!cluster.succeeds("a", "uninstall"));
    assert!(!cluster.succeeds("a", "ready"));
    fs::write(cluster.path("fails"), "none").unwrap();
    assert!(cluster.succeeds("a", "uninstall"));
    assert!(cluster.succeeds("a", "ready"));
    assert_eq!(cluster.lease(), None);
}

/// Promise: rollout_changes_one_node.
#[test]
fn a_failed_removal_stops_the_others_until_it_succeeds() {
    let cluster = Cluster::new();
    fs::write(cluster.path("fails"), "a").unwrap();
    assert!(!cluster.succeeds("a", "uninstall"));
    let b = cluster.waiting("b", "uninstall", "waiting for node a, which has Lease rollout");
    assert!(!cluster.succeeds("a", "uninstall"));
    fs::write(cluster.path("fails"), "none").unwrap();
    assert!(cluster.succeeds("a", "uninstall"));
    ends(b);
    assert_eq!(cluster.journal(), "uninstall a\nuninstall a\nuninstall a\nuninstall b\n");
    assert_eq!(cluster.lease(), None);
}

/// They may stay for days.
#[test]
fn a_node_that_waits_for_its_pods_holds_up_no_other() {
    const WAITS: &str = "a waits for pods";
    // The pods were there before, came while the node waited for the Lease, or came after a failed
    // attempt, of which the node has the Lease.
    for case in ["before", "meanwhile", "after"] {
        let cluster = Cluster::new();
        match case {
            "before" => fs::write(cluster.path("pods-a"), "").unwrap(),
            "meanwhile" => fs::write(cluster.path("arrives"), "").unwrap(),
            _ => {
                fs::write(cluster.path("fails"), "a").unwrap();
                assert!(!cluster.succeeds("a", "uninstall"));
                assert!(cluster.lease().is_some());
                fs::write(cluster.path("fails"), "none").unwrap();
                fs::write(cluster.path("pods-a"), "").unwrap();
                fs::write(cluster.path("journal"), "").unwrap();
            }
        }
        let a = cluster.waiting("a", "uninstall", WAITS);
        assert!(cluster.succeeds("b", "uninstall"), "{case}");
        assert_eq!((cluster.journal().as_str(), cluster.lease()), ("uninstall b\n", None));
        assert!(!cluster.succeeds("a", "ready"), "{case}");
        fs::remove_file(cluster.path("pods-a")).unwrap();
        ends(a);
        assert_eq!(cluster.journal(), "uninstall b\nuninstall a\n", "{case}");
        assert_eq!(cluster.lease(), None, "{case}");
    }
}

/// This holds with `serial: false`, and if an operator makes the changes and the script restarts
/// nothing.
#[test]
fn a_removal_that_needs_no_lease_does_not_wait_for_one() {
    for (name, value) in [("LEASE", ""), ("EDIT_CONTAINERD_CONFIG", "false")] {
        let cluster = Cluster::new();
        fs::write(cluster.path("lease"), "{}").unwrap();
        let mut command = cluster.command("a", "uninstall");
        assert!(command.env(name, value).output().unwrap().status.success(), "{name}");
        assert!(cluster.lease().is_some(), "{name}");
    }
}

/// kubelet kills a probe that takes too long, as where the daemon is down, every ten seconds.
#[test]
fn a_probe_that_is_killed_leaves_no_file() {
    let cluster = Cluster::new();
    assert!(cluster.succeeds("a", "install"));
    let temporary = cluster.path("temporary");
    fs::create_dir(&temporary).unwrap();
    kit::write_program(cluster.path("bin/install.sh"), b"#!/bin/sh\nkill -KILL $PPID\n").unwrap();
    let mut command = cluster.command("a", "ready");
    let killed = command.env("TMPDIR", &temporary).status().unwrap();
    assert_eq!(killed.code(), None, "{killed:?}");
    assert_eq!(fs::read_dir(&temporary).unwrap().count(), 0);
}

#[test]
fn the_token_of_the_account_is_in_no_argument() {
    let cluster = Cluster::new();
    assert!(cluster.succeeds("a", "install"));
    assert!(!cluster.path("leaked").exists());
    let header = fs::read_to_string(cluster.path("header")).unwrap();
    assert_eq!(header, "Authorization: Bearer secret\n");
}

/// Hundreds of nodes may wait for hours.
#[test]
fn a_node_that_waits_asks_once_at_a_time_and_logs_a_change_of_the_holder() {
    let cluster = Cluster::new();
    let lease = |node: &str| {
        let text = format!(
            r#"{{"metadata":{{"uid":"l","ownerReferences":[{{"uid":"uid-{node}"}}]}},
            "spec":{{"holderIdentity":"{node}"}}}}"#
        );
        fs::write(cluster.path("new"), text).unwrap();
        fs::rename(cluster.path("new"), cluster.path("lease")).unwrap();
    };
    let sleep = b"#!/bin/sh\necho \"$1\" >>\"$CLUSTER/slept\"\nexec /bin/sleep \"$1\"\n";
    kit::write_program(cluster.path("bin/sleep"), sleep).unwrap();
    let lines = |name: &str| -> Vec<String> {
        let text = fs::read_to_string(cluster.path(name)).unwrap_or_default();
        text.lines().map(str::to_owned).collect()
    };
    lease("b");
    let mut a = cluster.command("a", "install").stdout(Stdio::piped()).spawn().unwrap();
    let mut said = BufReader::new(a.stdout.take().unwrap()).lines().map(Result::unwrap);
    assert!(said.next().unwrap().contains("waiting for node b"));
    while lines("slept").len() < 8 {
        std::thread::sleep(std::time::Duration::from_millis(10));
    }
    lease("c");
    let next = said.next().unwrap();
    assert!(next.contains("waiting for node c"), "{next}");
    let requests = lines("requests");
    assert!(requests.iter().all(|method| method == "GET"), "{requests:?}");
    let mut slept = lines("slept");
    assert!(requests.len() <= slept.len() + 1, "{requests:?} {slept:?}");
    let seconds = |text: &String| text.parse::<f64>().unwrap();
    assert!(slept.iter().map(seconds).all(|one| (0.025..=0.075).contains(&one)), "{slept:?}");
    slept.dedup();
    assert!(slept.len() > 1, "the nodes ask at the same time");
    fs::remove_file(cluster.path("lease")).unwrap();
    assert_eq!(said.next(), None);
    assert!(a.wait().unwrap().success());
    assert_eq!(lines("requests").iter().filter(|method| *method == "POST").count(), 1);
}

use std::pin::Pin;

use super::super::{Level, worst};
use super::*;

const GOOD: &str = r#"
version = 3
[proxy_plugins.mine]
type = "sandbox"
address = "/run/pause-sandboxer/pause-sandboxer.sock"
[plugins."io.containerd.cri.v1.runtime".containerd.runtimes.fast]
runtime_type = "io.containerd.runc.v2"
sandboxer = "mine"
"#;

fn findings_of(table: &Table, config: &Config) -> Vec<Finding> {
    config_findings(table, &all(table, config), config)
}

fn checked(text: &str) -> Vec<Finding> {
    findings_of(&toml::from_str(text).unwrap(), &Config::default())
}

/// The one finding that is not ok.
fn fault(text: &str) -> Finding {
    let mut faults: Vec<_> = checked(text).into_iter().filter(|f| f.level != Level::Ok).collect();
    assert_eq!(faults.len(), 1, "{faults:?}");
    faults.remove(0)
}

#[test]
fn a_good_config() {
    let findings = checked(GOOD);
    assert_eq!(worst(&findings), Level::Ok, "{findings:?}");
    assert!(
        findings.iter().any(|f| f.fact == "runtime handlers of this sandboxer: \"fast\""),
        "{findings:?}"
    );
    assert_eq!(worst(&checked(&GOOD.replace("\"/run/pause", "\"unix:///run/pause"))), Level::Ok);
}

#[test]
fn category_ranges_differ_where_pods_have_labels() {
    let labelled = "plugins.\"io.containerd.cri.v1.runtime\".enable_selinux = true\n\
        plugins.\"io.containerd.cri.v1.runtime\".selinux_category_range = 512\n\
        [proxy_plugins.mine]";
    let table: Table = toml::from_str(&GOOD.replace("[proxy_plugins.mine]", labelled)).unwrap();
    let config = Config { enable_selinux: true, ..Config::default() };
    let findings: Vec<_> =
        findings_of(&table, &config).into_iter().filter(|f| f.level != Level::Ok).collect();
    assert_eq!(findings.len(), 1, "{findings:?}");
    assert_eq!(
        findings[0].fact,
        "containerd's selinux_category_range is 512, but this sandboxer's is 1024"
    );
    let unlabelled: Table =
        toml::from_str(&GOOD.replace("[proxy_plugins.mine]", &labelled.replace("true", "false")))
            .unwrap();
    assert_eq!(worst(&findings_of(&unlabelled, &Config::default())), Level::Ok);
}

#[test]
fn a_path_over_a_link_is_the_same() {
    let dir = tempfile::tempdir().unwrap();
    let (real, link) = (dir.path().join("real"), dir.path().join("link"));
    std::fs::create_dir_all(real.join("containerd")).unwrap();
    std::os::unix::fs::symlink(&real, &link).unwrap();
    let config = Config {
        socket: real.join("s.sock"),
        containerd_state: real.join("containerd"),
        containerd_address: real.join("c.sock"),
        ..Config::default()
    };
    let text = |at: &Path| {
        GOOD.replace(
            "/run/pause-sandboxer/pause-sandboxer.sock",
            &at.join("s.sock").display().to_string(),
        )
        .replace(
            "version = 3",
            &format!(
                "version = 3\nstate = \"{0}/containerd\"\ngrpc = {{ address = \"{0}/c.sock\" }}",
                at.display()
            ),
        )
    };
    let level = |at: &Path, config: &Config| {
        worst(&findings_of(&toml::from_str(&text(at)).unwrap(), config))
    };
    assert_eq!(level(&real, &config), Level::Ok);
    assert_eq!(level(&link, &config), Level::Ok, "a link");
    assert_eq!(level(&dir.path().join("other"), &config), Level::Fail);
}

#[test]
fn each_fault_is_one_finding_with_advice() {
    for (from, to, fact, advice) in [
        ("\"sandbox\"", "\"snapshot\"", "but type \"snapshot\"", "set its type"),
        (
            "[proxy_plugins.mine]",
            "[other]",
            "no proxy plugin of type",
            "[proxy_plugins.pause-sandboxer]",
        ),
        (
            "runtime_type = \"io.containerd.runc.v2\"",
            "",
            "\"fast\" has no runtime_type",
            "io.containerd.runc.v2",
        ),
        (
            "version = 3",
            "version = 3\nstate = \"/x\"",
            "containerd's state is /x",
            "containerd_state = \"/x\"",
        ),
        (
            "version = 3",
            "version = 3\ngrpc = { address = \"/x\" }",
            "containerd's grpc.address is /x",
            "containerd_address = \"/x\"",
        ),
        (
            "[proxy_plugins.mine]",
            "plugins.\"io.containerd.server.v1.grpc\".address = \"/x\"\n[proxy_plugins.mine]",
            "containerd's grpc.address is /x",
            "containerd_address = \"/x\"",
        ),
        (
            "[proxy_plugins.mine]",
            "plugins.\"io.containerd.cri.v1.runtime\".restrict_oom_score_adj = true\n\
             [proxy_plugins.mine]",
            "restrict_oom_score_adj is true",
            "the same in both",
        ),
    ] {
        let finding = fault(&GOOD.replace(from, to));
        assert!(finding.fact.contains(fact), "{finding} lacks {fact}");
        assert!(finding.advice.contains(advice), "{finding} lacks {advice}");
    }
}

#[test]
fn containerd_versions_are_rated() {
    let rated = |version: &str| {
        let printed = format!("containerd github.com/containerd/containerd/v2 {version} abc\n");
        let (finding, release) = super::version(&printed);
        (finding.level, release)
    };
    assert_eq!(rated("2.1.9"), (Level::Ok, Some((2, 1))));
    assert_eq!(rated("v2.4.0-beta.0"), (Level::Ok, Some((2, 4))));
    assert_eq!(rated("1.6.20~ds1"), (Level::Fail, None));
    assert_eq!(rated("9.0"), (Level::Warn, Some((9, 0))));
    assert_eq!(rated("odd").0, Level::Warn);
}

#[tokio::test]
async fn a_program_that_is_not_there_is_reported() {
    for (path, reason) in
        [("/nowhere/containerd", "No such file"), ("/bin/true", "so it is not containerd")]
    {
        let (finding, release) = examine_program(&ContainerdProgram::File(path.into())).await;
        assert_eq!((finding.level, release), (Level::Fail, None), "{finding}");
        assert!(finding.fact.contains(path) && finding.fact.contains(reason), "{finding}");
    }
}

/// On a node of k3s the settings have another address before the first `enable`.
#[tokio::test]
async fn without_containerd_at_the_address_enable_is_a_remedy() {
    let dir = tempfile::tempdir().unwrap();
    let mut subject = Subject {
        config: Config { containerd_address: dir.path().join("c.sock"), ..Config::default() },
        containerd_config: Some(dir.path().join("c.toml")),
        containerd_program: Some("/nowhere/containerd".into()),
    };
    let script = dir.path().join("containerd");
    kit::write_program(&script, b"#!/bin/sh\necho containerd x 2.3.0 y\n").unwrap();
    for program in [Path::new("/nowhere/containerd"), &script] {
        subject.containerd_program = Some(program.to_owned());
        let node = NodeContainerd::find(&subject);
        let shims =
            |_, _| -> Pin<Box<dyn Future<Output = Vec<Finding>>>> { Box::pin(async { vec![] }) };
        for (has_daemon, option) in [(Some(false), ""), (None, " --shim-only")] {
            let found = examine(&subject, &node, has_daemon, &shims).await;
            let problem = found.iter().find(|finding| finding.level == Level::Fail).unwrap();
            let remedy = format!(
                "; if one runs with another address, as in k3s, pause-sandboxer enable \
                 --restart{option} finds it"
            );
            assert!(problem.advice.ends_with(&remedy), "{problem}");
        }
    }
}

/// `enable` adopts containerd's directories, but it finds containerd by its address.
#[test]
fn enable_does_not_correct_another_address() {
    let fault_with =
        |line: &str| fault(&GOOD.replace("version = 3", &format!("version = 3\n{line}")));
    let address = fault_with("grpc = { address = '/x/c.sock' }");
    assert_eq!(address.advice, "set containerd_address = \"/x/c.sock\"");
    assert!(fault_with("root = '/x'").advice.starts_with(ENABLE));
}

#[test]
fn a_disabled_cri_is_a_failure_with_the_file_and_the_unit() {
    let dir = tempfile::tempdir().unwrap();
    let node = NodeContainerd::find(&Subject {
        config: Config { containerd_address: dir.path().join("c.sock"), ..Config::default() },
        containerd_config: Some("/etc/c.toml".into()),
        containerd_program: None,
    });
    let found = |names: &[&str]| {
        disabled(&toml::from_str(&format!("disabled_plugins = {names:?}")).unwrap(), &node)
    };
    // Docker's package has the first.
    for name in ["cri", CRI_OF_2, RUNTIME, IMAGES] {
        let finding = found(&["other", name]).unwrap();
        assert_eq!(finding.level, Level::Fail);
        assert_eq!(
            finding.fact,
            format!("CRI plugin {name} is disabled, so kubelet can run no pod")
        );
        let remedy = "remove it from disabled_plugins in /etc/c.toml or a file that it imports, then \
                      systemctl restart containerd.service";
        assert_eq!(finding.advice, remedy);
    }
    assert_eq!(found(&["other"]), None);
}

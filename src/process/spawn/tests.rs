use std::os::unix::net::UnixListener;
use std::process::Command;

use super::*;
use crate::process::inheritance::Limits;

fn arguments(script: &str) -> Vec<OsString> {
    ["-c", script].map(OsString::from).to_vec()
}

fn launch(
    launcher: &Launcher,
    directory: &Path,
    program: &str,
    arguments: &[OsString],
) -> Result<Arc<dyn Process>, StepError> {
    let socket = UnixListener::bind(directory.join("s")).unwrap();
    let inheritance = other_inheritance();
    launcher.launch(&Launch {
        program: Program::Path(Path::new(program)),
        arguments,
        environment: &["A=b".into()],
        inheritance: &inheritance,
        core_domain: false,
        directory,
        socket: socket.as_fd(),
        errors: None,
    })
}

/// The attributes of this process, with another umask, other soft limits, and a hard limit that
/// only CAP_SYS_RESOURCE can raise.
fn other_inheritance() -> Inheritance {
    let mut inheritance = Inheritance::read("self").unwrap();
    let own = std::fs::read_to_string("/proc/self/limits").unwrap();
    let lines = own.lines().map(|line| match &line[..18] {
        "Max open files    " => format!("{:<26}77 99", "Max open files"),
        "Max core file size" => format!("{:<26}4096 unlimited", "Max core file size"),
        "Max pending signal" => format!("{:<26}50 unlimited", "Max pending signals"),
        _ => line.to_owned(),
    });
    inheritance.limits = Limits::parse(&lines.collect::<Vec<_>>().join("\n")).unwrap();
    inheritance.umask = 0o137;
    inheritance
}

/// Promise: only_files_of_root_count.
#[tokio::test]
async fn a_process_gets_its_socket_and_nothing_else_of_the_daemon() {
    let directory = tempfile::tempdir().unwrap();
    let launcher = Launcher::new().unwrap();
    // The shell blocks signals of its own while it starts a program, so its status is read
    // before and by itself.
    let script = "exec >out; while read -r line; do echo \"$line\"; done </proc/$$/status; \
                  ls -l /proc/$$/fd; cat /proc/$$/limits /proc/$$/environ; exit 3";
    let process = launch(&launcher, directory.path(), "/bin/sh", &arguments(script)).unwrap();
    assert_eq!(process.exited().await.status, 3);
    let out =
        String::from_utf8_lossy(&std::fs::read(directory.path().join("out")).unwrap()).into_owned();
    let links: Vec<&str> = out.lines().filter_map(|line| line.split(" -> ").nth(1)).collect();
    // The shell itself keeps a copy of what it redirects at 10 or above, if at all.
    assert!(links.iter().filter(|to| to.starts_with("socket:")).count() == 1, "{out}");
    assert!(
        links
            .iter()
            .all(|to| ["/dev/null", "socket:"].iter().any(|p| to.starts_with(p))
                || to.ends_with("/out")),
        "{out}"
    );
    assert!(out.contains("SigBlk:\t0000000000000000") && out.contains("A=b"), "{out}");
    let ignored = out.lines().find_map(|line| line.strip_prefix("SigIgn:\t")).unwrap();
    // This process ignores SIGPIPE, and the program that has started the tests may ignore others.
    assert_eq!(u64::from_str_radix(ignored, 16).unwrap(), 0, "{ignored}");
    assert!(out.contains("Umask:\t0137"), "{out}");
    let limit = |name: &str| {
        let line = out.lines().find_map(|line| line.strip_prefix(name)).unwrap();
        line.split_whitespace().map(str::to_owned).collect::<Vec<_>>()
    };
    assert_eq!(limit("Max open files")[..2], ["77", "99"]);
    assert_eq!(limit("Max core file size")[0], "4096");
    assert_eq!(limit("Max pending signals")[0], "50");
}

#[tokio::test]
async fn a_process_inherits_nothing_else_on_kernels_that_cannot_close_at_exec() {
    for errno in [libc::EINVAL, libc::ENOSYS] {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().to_owned();
        // A parent may leave its descriptors unmarked.
        let inherited = std::fs::File::open("/etc/passwd").unwrap();
        nix::fcntl::fcntl(&inherited, nix::fcntl::F_SETFD(nix::fcntl::FdFlag::empty())).unwrap();
        // The filter is the thread's and its children's.
        let launched = std::thread::spawn(move || {
            sys::filter::without_close_at_execute(errno);
            let script = "ls -l /proc/$$/fd >out; exit 3";
            launch(&Launcher::new().unwrap(), &path, "/bin/sh", &arguments(script))
        });
        let process = launched.join().unwrap().unwrap();
        assert_eq!(process.exited().await.status, 3);
        let out = std::fs::read_to_string(directory.path().join("out")).unwrap();
        assert!(out.contains("socket:") && !out.contains("passwd"), "{out}");
    }
}

#[test]
fn a_command_has_the_limits_that_it_is_given() {
    let mut command = Command::new("/bin/sh");
    let inheritance = other_inheritance();
    inheritance.give_to(command.args(["-c", "ulimit -Sn; ulimit -Hn; ulimit -Sc; umask"]));
    let output = command.output().unwrap();
    assert_eq!(String::from_utf8_lossy(&output.stdout), "77\n99\n8\n0137\n");
}

#[tokio::test]
async fn a_process_is_found_with_and_without_a_record() {
    let directory = tempfile::tempdir().unwrap();
    let launcher = Launcher::new().unwrap();
    // Others on this machine may sleep as long.
    let seconds: &[OsString] = &[format!("1000.{}", std::process::id()).into()];
    let process = launch(&launcher, directory.path(), "/bin/sleep", seconds).unwrap();
    let found = launcher.find_process(directory.path(), seconds).unwrap().unwrap();
    assert_eq!(found.identity(), process.identity());
    assert!(launcher.find_process(directory.path(), &["100".into()]).unwrap().is_none());
    assert!(launcher.find_process(Path::new("/"), seconds).unwrap().is_none());
    assert!(matches!(launcher.adopt(process.identity()), Adoption::Alive(_)));
    found.kill().unwrap();
    assert_eq!(process.exited().await.status, 137);
    assert!(matches!(launcher.adopt(process.identity()), Adoption::Dead(_)));
    assert!(launcher.find_process(directory.path(), seconds).unwrap().is_none());
}

/// Any process may have these arguments in a directory that it may enter.
///
/// Promise: foreign_process_survives.
#[test]
fn a_process_of_another_user_is_not_found() {
    use std::os::unix::fs::PermissionsExt as _;
    use std::os::unix::process::CommandExt as _;

    if kit::skip_without_root() {
        return;
    }
    let directory = tempfile::tempdir().unwrap();
    let open = std::fs::Permissions::from_mode(0o755);
    std::fs::set_permissions(directory.path(), open).unwrap();
    let launcher = Launcher::new().unwrap();
    let seconds: &[OsString] = &[format!("1000.{}", std::process::id()).into()];
    for user in [65534, 0] {
        let mut command = Command::new("/bin/sleep");
        command.args(seconds).current_dir(directory.path()).uid(user);
        let mut child = command.spawn().unwrap();
        let found = launcher.find_process(directory.path(), seconds);
        child.kill().unwrap();
        child.wait().unwrap();
        let found = found.unwrap().map(|process| process.identity().pid);
        assert_eq!(found, (user == 0).then_some(child.id()));
    }
}

/// Looks from a mount namespace of its own, where `/proc` shows nothing.
fn hidden<T: Send + 'static>(look: impl FnOnce() -> T + Send + 'static) -> T {
    use nix::mount::{MsFlags, mount};

    let thread = std::thread::spawn(move || {
        sys::unshare(libc::CLONE_NEWNS).unwrap();
        let private = MsFlags::MS_REC | MsFlags::MS_PRIVATE;
        mount(None::<&str>, "/", None::<&str>, private, None::<&str>).unwrap();
        mount(Some("none"), "/proc", Some("tmpfs"), MsFlags::empty(), None::<&str>).unwrap();
        look()
    });
    thread.join().unwrap()
}

#[tokio::test]
async fn a_process_that_proc_hides_is_not_reported_as_dead() {
    if kit::skip_without_root() {
        return;
    }
    let directory = tempfile::tempdir().unwrap();
    let launcher = Arc::new(Launcher::new().unwrap());
    let process = launch(&launcher, directory.path(), "/bin/sleep", &["1000".into()]).unwrap();
    let look = || {
        let (launcher, identity) = (Arc::clone(&launcher), process.identity().clone());
        hidden(move || (launcher.adopt(&identity), launcher.open(identity.pid)))
    };
    let (adopted, opened) = look();
    assert!(matches!(adopted, Adoption::Unknown(_)), "{adopted:?}");
    assert!(opened.unwrap_err().to_string().contains("/stat"));
    process.kill().unwrap();
    process.exited().await;
    let (adopted, opened) = look();
    assert!(matches!(adopted, Adoption::Dead(_)), "{adopted:?}");
    assert!(opened.unwrap().is_none());
}

#[tokio::test]
async fn a_process_is_found_behind_a_symbolic_link() {
    let directory = tempfile::tempdir().unwrap();
    let (real, link) = (directory.path().join("real"), directory.path().join("link"));
    std::fs::create_dir_all(real.join("same")).unwrap();
    std::fs::create_dir_all(directory.path().join("other/same")).unwrap();
    std::os::unix::fs::symlink(&real, &link).unwrap();
    let launcher = Launcher::new().unwrap();
    let process = launch(&launcher, &link.join("same"), "/bin/sleep", &["1001".into()]).unwrap();
    let find = |at: &Path| launcher.find_process(&at.join("same"), &["1001".into()]).unwrap();
    while find(&real).is_none() {
        tokio::task::yield_now().await;
    }
    assert_eq!(find(&link).unwrap().identity(), process.identity());
    assert!(find(&directory.path().join("other")).is_none(), "the name is not all");
    assert!(find(&directory.path().join("none")).is_none());
    process.kill().unwrap();
    process.exited().await;
}

fn core_cookie(pid: u32) -> u64 {
    let pid = rustix::process::Pid::from_raw(pid.cast_signed()).unwrap();
    rustix::thread::core_scheduling_cookie(pid, CoreSchedulingScope::Thread).unwrap()
}

/// Or none is launched, where the kernel has no such domains.
#[tokio::test]
async fn a_process_gets_a_core_scheduling_domain_on_request() {
    let directory = tempfile::tempdir().unwrap();
    let socket = UnixListener::bind(directory.path().join("s")).unwrap();
    let launched = Launcher::new().unwrap().launch(&Launch {
        program: Program::Path(Path::new("/bin/sleep")),
        arguments: &["1000".into()],
        environment: &[],
        inheritance: &Inheritance::read("self").unwrap(),
        core_domain: true,
        directory: directory.path(),
        socket: socket.as_fd(),
        errors: None,
    });
    // The kernel's answer to another process.
    let script = format!("print syscall({}, 62, 1, 0, 1, 0) == 0 ? 0 : $!+0", libc::SYS_prctl);
    let said = Command::new("perl").args(["-e", &script]).output().unwrap();
    let errno: i32 = String::from_utf8(said.stdout).unwrap().trim().parse().unwrap();
    match launched {
        Ok(process) => {
            let cookie = core_cookie(process.identity().pid);
            process.kill().unwrap();
            assert_eq!(errno, 0);
            assert!(cookie != 0 && cookie != core_cookie(std::process::id()), "{cookie}");
        }
        Err(step) => {
            let error = io::Error::from_raw_os_error(errno);
            let expected =
                format!("make core scheduling domain {}: {error}", directory.path().display());
            assert_eq!(step.to_string(), expected);
        }
    }
}

/// On each kernel: a filter answers the one call that makes a domain for the child, and no
/// other.
#[tokio::test]
async fn the_child_requests_the_core_scheduling_domain_for_itself() {
    let launched = |errno, core_domain| {
        let launch = move || {
            let directory = tempfile::tempdir().unwrap();
            let socket = UnixListener::bind(directory.path().join("s")).unwrap();
            sys::filter::with_core_domains(std::process::id(), errno);
            Launcher::new().unwrap().launch(&Launch {
                program: Program::Path(Path::new("/bin/true")),
                arguments: &[],
                environment: &[],
                inheritance: &Inheritance::read("self").unwrap(),
                core_domain,
                directory: directory.path(),
                socket: socket.as_fd(),
                errors: None,
            })
        };
        // The filter is the thread's and its children's.
        std::thread::spawn(launch).join().unwrap()
    };
    assert_eq!(launched(0, true).unwrap().exited().await.status, 0);
    let refused = launched(libc::EDOM, true).unwrap_err().to_string();
    let reason = io::Error::from_raw_os_error(libc::EDOM).to_string();
    assert!(refused.starts_with("make core scheduling domain"), "{refused}");
    assert!(refused.ends_with(&reason), "{refused}");
    assert_eq!(launched(libc::EDOM, false).unwrap().exited().await.status, 0);
}

#[tokio::test]
async fn a_missing_program_is_named() {
    let directory = tempfile::tempdir().unwrap();
    let launcher = Launcher::new().unwrap();
    let error = launch(&launcher, directory.path(), "/no/such/shim", &[]).unwrap_err().to_string();
    assert_eq!(error, "execute /no/such/shim: No such file or directory (os error 2)");
}

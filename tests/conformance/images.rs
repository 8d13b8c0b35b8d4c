//! The images that critest's cases want, under the names that it wants, made here of busybox and of
//! the kit's own program.

use std::fs;
use std::path::Path;
use std::process::Command;

use anyhow::{Context, Result, ensure};
use kit::PROBE;
use kit::image::{self, Image, Layer};

/// Where critest has its images from, as paths of a registry.
const KUBERNETES: &str = "e2e-test-images";
const CRI_TOOLS: &str = "k8s-staging-cri-tools";

/// Programs that busybox of Debian lacks. The first is asked for what matches exactly.
const SCRIPTS: [(&str, &str); 2] = [
    ("bin/pgrep", "#!/bin/sh\nexec pidof \"$@\"\n"),
    ("bin/ipcs", "#!/bin/sh\nexec cat /proc/sysvipc/shm\n"),
];

/// Images by their paths and tags in a registry.
pub(crate) fn all(registry: &str, busybox: &Path) -> Result<Vec<(String, Image)>> {
    let system = system(busybox)?;
    let mut images = Vec::new();
    let mut add = |path: &str, layer: &[u8], command: &[&str], user: &str| -> Result<()> {
        let name = format!("{registry}/{path}");
        let image = Image::new(&name, layer, command, user)?;
        images.push((name, image));
        Ok(())
    };
    let shell: &[&str] = &["/bin/sh"];
    add(&format!("{KUBERNETES}/busybox:1.29-2"), &system.with(&[])?, shell, "")?;
    // The words that are looked for in its arguments.
    let nginx = system.with(&[("bin/nginx", 0o755, PROBE)])?;
    let serve = |port| ["/bin/nginx", "web", port, "nginx: master process"];
    add(&format!("{KUBERNETES}/nginx:1.14-2"), &nginx, &serve("80"), "")?;
    let host = format!("{CRI_TOOLS}/hostnet-nginx-{}:latest", image::architecture());
    add(&host, &nginx, &serve("12003"), "")?;
    let httpd = system.with(&[("bin/httpd-server", 0o755, PROBE)])?;
    let command = ["/bin/httpd-server", "web", "80"];
    add(&format!("{KUBERNETES}/httpd:2.4.39-4"), &httpd, &command, "")?;
    let setuid = system.with(&[("bin/nnp", 0o4755, PROBE)])?;
    add(&format!("{KUBERNETES}/nonewprivs:1.3"), &setuid, &["/bin/nnp", "euid"], "")?;
    let pause = system.with(&[("pause", 0o755, PROBE)])?;
    add("pause:3.9", &pause, &["/pause"], "65535:65535")?;
    for (name, user) in [
        ("test-image-user-uid", "1002"),
        ("test-image-user-username", "www-data"),
        ("test-image-user-uid-group", "1003:1004"),
        ("test-image-user-username-group", "www-data:1004"),
        ("test-image-predefined-group", "1000"),
    ] {
        add(&format!("{CRI_TOOLS}/{name}:latest"), &system.with(&[])?, shell, user)?;
    }
    // Those with one tag differ, and those with the same name do not. They run until they are
    // killed: a case starts one and removes it at once, which containerd refuses for some
    // milliseconds after it has deleted the task of a container that ended by itself ("container is
    // still running, to stop first").
    let stay = ["/bin/sleep", "3600"];
    for (name, file) in [
        ("test-image-1:latest", "1"),
        ("test-image-2:latest", "2"),
        ("test-image-3:latest", "3"),
        ("test-image-latest:latest", "latest"),
        ("test-image-tag:test", "test"),
        ("test-image-tag:all", "all"),
        ("test-image-tags:1", "same"),
        ("test-image-tags:2", "same"),
        ("test-image-tags:3", "same"),
    ] {
        let layer = system.with(&[(file, 0o644, b"")])?;
        add(&format!("{CRI_TOOLS}/{name}"), &layer, &stay, "")?;
    }
    Ok(images)
}

/// busybox with all its applets, its libraries, and the users that cases name.
struct System {
    files: Vec<(String, Vec<u8>)>,
    applets: Vec<String>,
}

fn system(busybox: &Path) -> Result<System> {
    let mut files = vec![("bin/busybox".to_owned(), read(busybox)?)];
    for library in libraries(busybox)? {
        files.push((library.trim_start_matches('/').to_owned(), read(Path::new(&library))?));
    }
    let listed = output(Command::new(busybox).arg("--list"))?;
    let applets = listed.lines().filter(|name| *name != "busybox").map(str::to_owned).collect();
    Ok(System { files, applets })
}

impl System {
    /// Its layer, with these files besides: their paths, modes and bytes.
    fn with(&self, more: &[(&str, u32, &[u8])]) -> Result<Vec<u8>> {
        let mut layer = Layer::new(Vec::new());
        for directory in ["bin/", "dev/", "etc/", "proc/", "root/", "run/", "sys/", "var/"] {
            layer.directory(directory, 0o755)?;
        }
        layer.directory("tmp/", 0o1777)?;
        layer.symlink("var/run", "../run")?;
        layer.file("etc/passwd", 0o644, PASSWD.as_bytes())?;
        layer.file("etc/group", 0o644, GROUP.as_bytes())?;
        for (path, bytes) in &self.files {
            layer.file(path, 0o755, bytes)?;
        }
        // Each a name of the file and no symbolic link: to mask one is not to mask all.
        for applet in &self.applets {
            layer.link(&format!("bin/{applet}"), "bin/busybox")?;
        }
        for (path, script) in SCRIPTS {
            layer.file(path, 0o755, script.as_bytes())?;
        }
        for (path, mode, bytes) in more {
            layer.file(path, *mode, bytes)?;
        }
        layer.finish()
    }
}

const PASSWD: &str = "root:x:0:0:root:/root:/bin/sh\n\
    www-data:x:33:33:www-data:/:/bin/sh\n\
    default-user:x:1000:1000:default-user:/:/bin/sh\n\
    nobody:x:65534:65534:nobody:/:/bin/sh\n";
const GROUP: &str = "root:x:0:\n\
    www-data:x:33:\n\
    default-user:x:1000:\n\
    group-defined-in-image:x:50000:default-user\n\
    nogroup:x:65534:\n";

/// The files that the dynamic linker loads for a program, itself included.
fn libraries(program: &Path) -> Result<Vec<String>> {
    let needed = output(Command::new("ldd").arg(program))?;
    let paths = needed.lines().filter_map(|line| {
        line.split_whitespace().find(|word| word.starts_with('/')).map(str::to_owned)
    });
    Ok(paths.collect())
}

fn read(path: &Path) -> Result<Vec<u8>> {
    fs::read(path).with_context(|| format!("read {}", path.display()))
}

fn output(command: &mut Command) -> Result<String> {
    let done = command.output().with_context(|| format!("run {command:?}"))?;
    ensure!(done.status.success(), "{command:?}: {}", done.status);
    Ok(String::from_utf8(done.stdout)?)
}

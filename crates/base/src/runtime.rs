//! Which runtimes the sandboxer can serve.

/// Runtimes whose containers are plain processes of the node, by the part of the name that says
/// which: `io.containerd.NAME.VERSION`.
const HOST_PROCESSES: [&str; 3] = ["runc", "crun", "youki"];

/// The containers of a runtime cannot join the namespaces of a pause process.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error(
    "the containers of runtime {runtime:?} are not plain processes of the node: leave `sandboxer` \
     out of its handler in containerd's config, so that containerd's built-in controller serves \
     it; gVisor and Kata have a sandbox service of their own (`sandboxer = \"shim\"`)"
)]
pub struct NotServed {
    /// The runtime name, or the path of its shim.
    pub runtime: String,
}

/// Decides whether the sandboxer can serve pods of a runtime, which is given as the name that is
/// containerd's `runtime_type`, or as the absolute path of a shim: its containers must be plain
/// processes of the node, which join the namespaces of the pause process. A pod without a runtime
/// name has no containers and is served.
///
/// # Errors
/// [`NotServed`], with what an operator can do.
pub fn check_served(runtime: &str) -> Result<(), NotServed> {
    let file = runtime.rsplit('/').next().unwrap_or_default();
    let kind = match file.strip_prefix("containerd-shim-") {
        Some(name) => name.rsplit('-').nth(1),
        None => file.rsplit('.').nth(1),
    };
    if runtime.is_empty() || kind.is_some_and(|kind| HOST_PROCESSES.contains(&kind)) {
        return Ok(());
    }
    Err(NotServed { runtime: runtime.to_owned() })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn runtimes_of_plain_processes_are_served_and_others_are_refused_with_the_remedy() {
        for served in [
            "",
            "io.containerd.runc.v2",
            "io.containerd.runc.v1",
            "io.containerd.crun.v2",
            "com.example.youki.v1",
            "/usr/local/bin/containerd-shim-runc-v2",
            "/opt/containerd-shim-crun-v2",
        ] {
            assert_eq!(check_served(served), Ok(()), "{served}");
        }
        for refused in [
            "io.containerd.runsc.v1",
            "io.containerd.kata.v2",
            "io.containerd.wasmtime.v1",
            "runc",
            "io.runc.containerd.v2",
            "/usr/bin/containerd-shim-kata-v2",
            "/usr/bin/runc",
            "/opt/runc.v2/containerd-shim-kata-v2",
        ] {
            let error = check_served(refused).unwrap_err();
            assert_eq!(error.runtime, refused);
            let text = error.to_string();
            assert!(text.contains(refused) && text.contains("leave `sandboxer` out"), "{text}");
        }
    }
}

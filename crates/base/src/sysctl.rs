//! Which sysctls a pod can have: those of namespaces that it can own.

/// A namespace with sysctls.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Namespace {
    /// The network namespace.
    Network,
    /// The IPC namespace.
    Ipc,
    /// The UTS namespace.
    Uts,
}

/// Whether this is the name of a sysctl, with dots: no path that leads elsewhere.
pub fn is_name(name: &str) -> bool {
    name.split('.').all(|part| !part.is_empty() && !part.contains(['/', '\0']))
}

/// The namespace that a sysctl belongs to, as runc knows it; `None`: it is the node's.
pub fn namespace_of(name: &str) -> Option<Namespace> {
    const IPC: [&str; 8] = [
        "kernel.msgmax",
        "kernel.msgmnb",
        "kernel.msgmni",
        "kernel.sem",
        "kernel.shmall",
        "kernel.shmmax",
        "kernel.shmmni",
        "kernel.shm_rmid_forced",
    ];
    if IPC.contains(&name) || name.starts_with("fs.mqueue.") {
        Some(Namespace::Ipc)
    } else if name.starts_with("net.") {
        Some(Namespace::Network)
    } else if name == "kernel.domainname" {
        Some(Namespace::Uts)
    } else {
        None
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Promise: invalid_request_names_the_field.
    #[test]
    fn sysctls_have_the_namespaces_that_runc_gives_them() {
        assert_eq!(namespace_of("net.core.somaxconn"), Some(Namespace::Network));
        assert_eq!(namespace_of("kernel.shmmax"), Some(Namespace::Ipc));
        assert_eq!(namespace_of("fs.mqueue.msg_max"), Some(Namespace::Ipc));
        assert_eq!(namespace_of("kernel.domainname"), Some(Namespace::Uts));
        for node in [
            "vm.swappiness",
            "kernel.pid_max",
            "kernel.shmmaxx",
            "fs.file-max",
            "kernel.hostname",
            "netx.a",
        ] {
            assert_eq!(namespace_of(node), None, "{node}");
        }
    }
}

//! Known results of critest's cases.

/// Cases that fail by chance with both sandboxers, which are tried again.
pub(crate) const FLAKY: [&str; 0] = [];

/// Cases that cannot run here, and why.
pub(crate) const CANNOT_RUN: [(&str, &str); 1] = [(
    "[k8s.io] Image Manager public image with digest should be pulled and removed [Conformance]",
    "it wants one image by its digest, which none that is made here can have",
)];

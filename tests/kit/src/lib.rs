//! Real nodes for tests, demo and benches: containerd, its parts, a CRI client, and a look at what is left on the machine.

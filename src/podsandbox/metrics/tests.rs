//! Metrics of trees written by hand after real ones, and of the machine's own cgroups.

use std::fs;
use std::process::{Child, Command};
use std::time::{Duration, Instant};

use containerd_shim_protos::{cgroups, cgroups_v2};
use tempfile::TempDir;

use super::*;

fn tree(files: &[(&str, &str)]) -> TempDir {
    let root = tempfile::tempdir().unwrap();
    for (path, content) in files {
        let path = root.path().join(path);
        fs::create_dir_all(path.parent().unwrap()).unwrap();
        fs::write(path, content).unwrap();
    }
    root
}

#[test]
fn the_parent_cgroup_of_each_driver() {
    for (given, expected) in [
        ("/kubepods/burstable/pod1", "kubepods/burstable/pod1"),
        ("kubepods//pod1/", "kubepods/pod1"),
        ("/", ""),
        (
            "kubepods-besteffort-pod1_2.slice",
            "kubepods.slice/kubepods-besteffort.slice/kubepods-besteffort-pod1_2.slice",
        ),
        ("/x/kubepods-pod1.slice", "x/kubepods-pod1.slice"),
        ("system.slice", "system.slice"),
        ("-.slice", ""),
        ("/../..", ""),
    ] {
        assert_eq!(parent(given).unwrap(), Path::new(expected), "{given}");
    }
    let error = read_metrics("").unwrap_err();
    assert_eq!(error.to_string(), "read metrics of cgroup: the pod has no cgroup_parent");
}

#[test]
fn version_1() {
    let root = tree(&[
        ("cpuacct/pods/p/cpuacct.usage", "123456789\n"),
        ("cpuacct/pods/p/cpuacct.usage_percpu", "100000000 23456789 \n"),
        ("cpuacct/pods/p/cpuacct.stat", "user 7\nsystem 3\n"),
        ("cpu/pods/p/cpu.stat", "nr_periods 9\nnr_throttled 2\nthrottled_time 5000\n"),
        (
            "memory/pods/p/memory.stat",
            "cache 1\nrss 2\npgfault 5\nhierarchical_memsw_limit 6\ntotal_rss 7\n",
        ),
        ("memory/pods/p/memory.oom_control", "oom_kill_disable 0\nunder_oom 1\noom_kill 4\n"),
        ("memory/pods/p/memory.usage_in_bytes", "4096\n"),
        ("memory/pods/p/memory.max_usage_in_bytes", "8192\n"),
        ("memory/pods/p/memory.failcnt", "3\n"),
        ("memory/pods/p/memory.limit_in_bytes", "9223372036854771712\n"),
        ("memory/pods/p/memory.kmem.usage_in_bytes", "512\n"),
        ("pids/pods/p/pids.current", "5\n"),
        ("pids/pods/p/pids.max", "max\n"),
        ("blkio/pods/p/blkio.throttle.io_serviced", "8:0 Read 12\n8:0 Total 12\nTotal 12\n"),
        ("blkio/pods/p/blkio.throttle.io_service_bytes", "999:77 49152\n"),
        ("rdma/pods/p/rdma.current", "mlx4_0 hca_handle=2 hca_object=2000\n"),
        ("rdma/pods/p/rdma.max", "mlx4_0 hca_handle=max hca_object=max\n"),
    ]);
    let metrics = v1::read(root.path(), Path::new("pods/p")).unwrap();

    let usage = &metrics.cpu.usage;
    assert_eq!((usage.total, &usage.per_cpu[..]), (123_456_789, &[100_000_000, 23_456_789][..]));
    // 100 ticks a second on every Linux that runs pods.
    assert_eq!((usage.user, usage.kernel), (70_000_000, 30_000_000));
    let throttling = &metrics.cpu.throttling;
    assert_eq!(
        (throttling.periods, throttling.throttled_periods, throttling.throttled_time),
        (9, 2, 5000)
    );
    let memory = &metrics.memory;
    assert_eq!((memory.cache, memory.rss, memory.pg_fault, memory.total_rss), (1, 2, 5, 7));
    assert_eq!((memory.hierarchical_swap_limit, memory.total_cache), (6, 0));
    let entry = &memory.usage;
    assert_eq!(
        (entry.usage, entry.max, entry.failcnt, entry.limit),
        (4096, 8192, 3, 9_223_372_036_854_771_712)
    );
    assert_eq!((memory.kernel.usage, memory.kernel.limit), (512, 0));
    // CRI reads them without asking whether they are there.
    assert!(memory.swap.is_some() && memory.kernel_tcp.is_some());
    assert_eq!((metrics.memory_oom_control.under_oom, metrics.memory_oom_control.oom_kill), (1, 4));
    assert_eq!((metrics.pids.current, metrics.pids.limit), (5, 0));
    let io: Vec<_> =
        metrics.blkio.io_serviced_recursive.iter().map(|e| (e.op.as_str(), e.value)).collect();
    assert_eq!(io, [("Read", 12), ("Total", 12)]);
    let bytes = &metrics.blkio.io_service_bytes_recursive[0];
    assert_eq!((bytes.major, bytes.minor, bytes.op.as_str(), bytes.value), (999, 77, "", 49152));
    assert_eq!(bytes.device, "");
    let (current, limit) = (&metrics.rdma.current[0], &metrics.rdma.limit[0]);
    assert_eq!(
        (current.device.as_str(), current.hca_handles, current.hca_objects),
        ("mlx4_0", 2, 2000)
    );
    assert_eq!((limit.hca_handles, limit.hca_objects), (u32::MAX, u32::MAX));
    assert!(metrics.hugetlb.is_empty() && metrics.network.is_empty());
}

#[test]
fn version_1_with_little_in_it() {
    let root = tree(&[("pids/p/pids.current", "1\n"), ("memory/other/memory.stat", "cache 1\n")]);
    let metrics = v1::read(root.path(), Path::new("p")).unwrap();
    assert_eq!((metrics.pids.current, metrics.pids.limit), (1, 0));
    assert!(
        metrics.memory.is_none() && metrics.memory_oom_control.is_none() && metrics.blkio.is_none()
    );
    assert!(metrics.cpu.usage.is_some() && metrics.cpu.throttling.is_some());

    let error = v1::read(root.path(), Path::new("gone")).unwrap_err().to_string();
    let path = root.path().join("gone");
    assert_eq!(
        error,
        format!(
            "read metrics of cgroup {}: No such file or directory (os error 2)",
            path.display()
        )
    );
}

#[test]
fn version_2() {
    let root = tree(&[
        (
            "a.slice/cpu.stat",
            "usage_usec 10\nuser_usec 6\nsystem_usec 4\nnr_bursts 1\n\
             core_sched.force_idle_usec 0\n",
        ),
        (
            "a.slice/cpu.pressure",
            "some avg10=0.12 avg60=1.50 avg300=0.00 total=77\n\
             full avg10=0.00 avg60=0.00 avg300=0.00 total=5\n",
        ),
        ("a.slice/memory.stat", "anon 1\nfile 2\nslab 9\nthp_collapse_alloc 3\n"),
        ("a.slice/memory.current", "4096\n"),
        ("a.slice/memory.max", "max\n"),
        ("a.slice/memory.swap.max", "0\n"),
        ("a.slice/memory.events", "low 0\nhigh 0\nmax 1\noom 2\noom_kill 3\noom_group_kill 4\n"),
        ("a.slice/pids.current", "2\n"),
        ("a.slice/pids.max", "max\n"),
        (
            "a.slice/io.stat",
            "254:0 rbytes=4096 wbytes=8192 rios=1 wios=2 dbytes=0 dios=0 cost.vrate=99.5\n259:1 \n",
        ),
    ]);
    let metrics = v2::read(root.path(), Path::new("a.slice")).unwrap();

    let cpu = &metrics.cpu;
    assert_eq!((cpu.usage_usec, cpu.user_usec, cpu.system_usec, cpu.nr_bursts), (10, 6, 4, 1));
    assert_eq!((cpu.psi.some.avg10, cpu.psi.some.avg60, cpu.psi.some.total), (0.12, 1.5, 77));
    assert_eq!(cpu.psi.full.total, 5);
    let memory = &metrics.memory;
    assert_eq!((memory.anon, memory.file, memory.slab, memory.thp_collapse_alloc), (1, 2, 9, 3));
    assert_eq!((memory.usage, memory.usage_limit, memory.swap_limit), (4096, u64::MAX, 0));
    assert!(memory.psi.is_none());
    assert_eq!((metrics.memory_events.oom_kill, metrics.memory_events.oom_group_kill), (3, 4));
    assert_eq!((metrics.pids.current, metrics.pids.limit), (2, u64::MAX));
    let io: Vec<_> = metrics
        .io
        .usage
        .iter()
        .map(|e| (e.major, e.minor, e.rbytes, e.wbytes, e.rios, e.wios))
        .collect();
    assert_eq!(io, [(254, 0, 4096, 8192, 1, 2), (259, 1, 0, 0, 0, 0)]);
    assert!(metrics.rdma.is_none() && metrics.hugetlb.is_empty());

    let error = v2::read(root.path(), Path::new("gone")).unwrap_err().to_string();
    assert!(error.contains("/gone: No such file or directory"), "{error}");
}

#[test]
fn version_2_without_controllers() {
    let root = tree(&[("p/cpu.stat", "usage_usec 10\n"), ("p/cgroup.procs", "")]);
    let metrics = v2::read(root.path(), Path::new("p")).unwrap();
    assert_eq!(metrics.cpu.usage_usec, 10);
    assert!(metrics.memory.is_none() && metrics.pids.is_none() && metrics.io.is_none());
    assert!(metrics.memory_events.is_none());
}

#[test]
fn malformed_kernel_files_are_errors_that_name_the_file() {
    for (file, content) in [
        ("pids/p/pids.current", "many\n"),
        ("memory/p/memory.stat", "cache\n"),
        ("memory/p/memory.stat", "cache 1 2\n"),
        ("blkio/p/blkio.throttle.io_serviced", "8:0\n"),
        ("cpuacct/p/cpuacct.usage_percpu", "1 x\n"),
        ("cpuacct/p/cpuacct.usage", "99999999999999999999999\n"),
    ] {
        let root = tree(&[(file, content)]);
        let error = v1::read(root.path(), Path::new("p")).unwrap_err().to_string();
        assert!(error.contains(file) && error.contains("is not what the kernel writes"), "{error}");
    }
    let root = tree(&[("p/cpu.stat", ""), ("p/io.stat", "1:2 rbytes=x\n")]);
    let error = v2::read(root.path(), Path::new("p")).unwrap_err().to_string();
    assert!(error.contains("p/io.stat"), "{error}");
    // Old kernels report such a number.
    let root = tree(&[("pids/p/pids.current", "-1\n")]);
    assert_eq!(v1::read(root.path(), Path::new("p")).unwrap().pids.current, 0);
}

#[test]
fn lines_without_a_device_and_malformed_pressure_are_left_out() {
    let root = tree(&[
        ("p/io.stat", "(unknown) rbytes=1\n254:0 rbytes=2\n254 rbytes=3\n"),
        ("p/cpu.stat", "usage_usec 10\n"),
        ("p/cpu.pressure", "some avg10=no total=1\nfull avg10=0.50 total=5\n"),
    ]);
    let metrics = v2::read(root.path(), Path::new("p")).unwrap();
    let io: Vec<_> = metrics.io.usage.iter().map(|e| (e.major, e.minor, e.rbytes)).collect();
    assert_eq!(io, [(254, 0, 2)]);
    assert!(metrics.cpu.psi.some.is_none());
    assert_eq!((metrics.cpu.psi.full.avg10, metrics.cpu.psi.full.total), (0.5, 5));
}

/// A cgroup of the machine in every hierarchy, with a busy process in it.
struct Busy {
    name: String,
    directories: Vec<PathBuf>,
    child: Child,
}

impl Busy {
    fn new(unified: bool) -> Self {
        let name = format!("pause-sandboxer-metrics-{}", std::process::id());
        let layout = match unified {
            true => vec![PathBuf::from(ROOT)],
            // Without cpuset, whose new cgroups take no process.
            false => ["cpu", "cpuacct", "memory", "pids", "blkio"]
                .map(|c| Path::new(ROOT).join(c))
                .to_vec(),
        };
        let mut directories: Vec<PathBuf> = layout.iter().map(|root| root.join(&name)).collect();
        // cpu and cpuacct may be one hierarchy with two names.
        directories.retain(|directory| match fs::create_dir(directory) {
            Err(e) if e.kind() == io::ErrorKind::AlreadyExists => false,
            other => other.map(|()| true).unwrap(),
        });
        let child = Command::new("sh").args(["-c", "while :; do :; done"]).spawn().unwrap();
        let busy = Self { name, directories, child };
        for directory in &busy.directories {
            fs::write(directory.join("cgroup.procs"), busy.child.id().to_string()).unwrap();
        }
        busy
    }

    /// A number as the kernel shows it, with awk's eyes: line `key`, or the whole file.
    fn kernel(&self, controller: &str, file: &str, key: &str) -> u64 {
        let path = Path::new(ROOT).join(controller).join(&self.name).join(file);
        let script = if key.is_empty() {
            "{print $1}".to_owned()
        } else {
            format!("$1 == \"{key}\" {{print $2}}")
        };
        let output = Command::new("awk").arg(script).arg(&path).output().unwrap();
        let text = String::from_utf8(output.stdout).unwrap();
        text.trim().parse().unwrap_or_else(|_| panic!("{}: {text:?}", path.display()))
    }
}

impl Drop for Busy {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
        for directory in &self.directories {
            fs::remove_dir(directory).unwrap();
        }
    }
}

/// Counters only grow, so a reading lies between what the kernel showed before and after it.
#[test]
fn the_machine_s_own_cgroups() {
    if kit::skip_without_root() {
        return;
    }
    let unified = unified(Path::new(ROOT)).unwrap();
    let busy = Busy::new(unified);
    let (usage, total) = if unified { ("cpu.stat", "usage_usec") } else { ("cpuacct.usage", "") };
    let cpu = || busy.kernel(if unified { "" } else { "cpuacct" }, usage, total);
    // Enough for a whole tick in user and kernel time.
    let enough = if unified { 100_000 } else { 100_000_000 };
    let begun = Instant::now();
    while cpu() < enough {
        assert!(begun.elapsed() < Duration::from_secs(60), "the child does not run");
        // The child needs the processor that starting one awk after another would take.
        std::thread::sleep(Duration::from_millis(10));
    }
    if !unified {
        fs::write(Path::new(ROOT).join("pids").join(&busy.name).join("pids.max"), "7").unwrap();
        fs::write(
            Path::new(ROOT).join("memory").join(&busy.name).join("memory.limit_in_bytes"),
            "67108864",
        )
        .unwrap();
    }

    let faults = || if unified { 0 } else { busy.kernel("memory", "memory.stat", "pgfault") };
    let before = (cpu(), faults());
    let metric = read_metrics(&format!("/{}", busy.name)).unwrap();
    let after = (cpu(), faults());

    assert!(metric.timestamp.elapsed().unwrap() < Duration::from_secs(30));
    if unified {
        assert_eq!(metric.data.type_url, "io.containerd.cgroups.v2.Metrics");
        let metrics = cgroups_v2::metrics::Metrics::parse_from_bytes(&metric.data.value).unwrap();
        assert!(
            (before.0..=after.0).contains(&metrics.cpu.usage_usec),
            "{before:?} {} {after:?}",
            metrics.cpu.usage_usec
        );
    } else {
        assert_eq!(metric.data.type_url, "io.containerd.cgroups.v1.Metrics");
        let metrics = cgroups::metrics::Metrics::parse_from_bytes(&metric.data.value).unwrap();
        let usage = &metrics.cpu.usage;
        assert!(
            (before.0..=after.0).contains(&usage.total),
            "{before:?} {} {after:?}",
            usage.total
        );
        let sum: u64 = usage.per_cpu.iter().sum();
        assert!((before.0..=after.0).contains(&sum), "{before:?} {sum} {after:?}");
        assert!(usage.user + usage.kernel > 0);
        assert!((before.1..=after.1).contains(&metrics.memory.pg_fault), "{before:?} {after:?}");
        assert_eq!((metrics.pids.current, metrics.pids.limit), (1, 7));
        assert_eq!(metrics.memory.usage.limit, 67_108_864);
        assert!(metrics.blkio.is_some() && metrics.memory_oom_control.is_some());
    }

    let name = busy.name.clone();
    drop(busy);
    let error = read_metrics(&name).unwrap_err().to_string();
    assert!(error.contains(&name) && error.contains("os error 2"), "{error}");
}

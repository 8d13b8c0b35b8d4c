//! Version 1: one directory per controller (kernel `Documentation/admin-guide/cgroup-v1`).

use std::collections::HashMap;
use std::fs;
use std::path::{Path, PathBuf};

use containerd_shim_protos::cgroups::metrics::{
    BlkIOEntry, BlkIOStat, CPUStat, CPUUsage, HugetlbStat, MemoryEntry, MemoryOomControl,
    MemoryStat, Metrics, PidsStat, RdmaEntry, RdmaStat, Throttle,
};
use protobuf::MessageField;

use crate::directory::{Directory, rdma_devices};
use crate::{Error, huge_page_sizes, missing};

const NANOSECONDS: u64 = 1_000_000_000;

/// Reads what every controller tells of `cgroup`, a path below the root of each hierarchy.
///
/// # Errors
/// The failed step; where no controller knows the cgroup, that.
pub fn read(root: &Path, cgroup: &Path) -> Result<Metrics, Error> {
    read_at(|controller| Some(root.join(controller).join(cgroup)))?
        .ok_or_else(|| missing(&root.join(cgroup)))
}

/// Reads the same of a cgroup whose path may be another for each controller; `None`: no controller
/// knows it.
///
/// # Errors
/// The failed step.
pub fn read_at(path: impl Fn(&str) -> Option<PathBuf>) -> Result<Option<Metrics>, Error> {
    let open = |controller: &str| path(controller).map_or(Ok(None), Directory::open);
    let mut found = false;
    let mut metrics = Metrics::new();
    // Always there, as containerd has it.
    let mut cpu = CPUStat {
        usage: some(CPUUsage::new()),
        throttling: some(Throttle::new()),
        ..Default::default()
    };

    if let Some(directory) = open("cpuacct")? {
        found = true;
        cpu.usage = some(usage(&directory)?);
    }
    if let Some(directory) = open("cpu")? {
        found = true;
        cpu.throttling = some(throttling(&directory)?);
    }
    metrics.cpu = some(cpu);
    if let Some(directory) = open("memory")? {
        found = true;
        metrics.memory = memory(&directory)?.into();
        metrics.memory_oom_control = oom_control(&directory)?.into();
    }
    if let Some(directory) = open("pids")? {
        found = true;
        metrics.pids = pids(&directory)?.into();
    }
    if let Some(directory) = open("blkio")? {
        found = true;
        metrics.blkio = some(blkio(&directory)?);
    }
    if let Some(directory) = open("hugetlb")? {
        found = true;
        metrics.hugetlb = hugetlb(&directory)?;
    }
    if let Some(directory) = open("rdma")? {
        found = true;
        metrics.rdma = rdma(&directory)?.into();
    }
    Ok(found.then_some(metrics))
}

fn some<T>(message: T) -> MessageField<T> {
    MessageField::some(message)
}

fn usage(directory: &Directory) -> Result<CPUUsage, Error> {
    // In ticks; everything else is in nanoseconds.
    let ticks = directory.numbers("cpuacct.stat")?.unwrap_or_default();
    let per_second = rustix::param::clock_ticks_per_second();
    let nanoseconds = |ticks: u64| ticks.saturating_mul(NANOSECONDS) / per_second.max(1);
    Ok(CPUUsage {
        total: directory.number("cpuacct.usage", u64::MAX)?.unwrap_or_default(),
        kernel: nanoseconds(ticks.get("system")),
        user: nanoseconds(ticks.get("user")),
        per_cpu: directory.row("cpuacct.usage_percpu")?,
        ..Default::default()
    })
}

fn throttling(directory: &Directory) -> Result<Throttle, Error> {
    let stat = directory.numbers("cpu.stat")?.unwrap_or_default();
    Ok(Throttle {
        periods: stat.get("nr_periods"),
        throttled_periods: stat.get("nr_throttled"),
        throttled_time: stat.get("throttled_time"),
        ..Default::default()
    })
}

fn memory(directory: &Directory) -> Result<Option<MemoryStat>, Error> {
    let Some(stat) = directory.numbers("memory.stat")? else { return Ok(None) };
    Ok(Some(MemoryStat {
        cache: stat.get("cache"),
        rss: stat.get("rss"),
        rss_huge: stat.get("rss_huge"),
        mapped_file: stat.get("mapped_file"),
        dirty: stat.get("dirty"),
        writeback: stat.get("writeback"),
        pg_pg_in: stat.get("pgpgin"),
        pg_pg_out: stat.get("pgpgout"),
        pg_fault: stat.get("pgfault"),
        pg_maj_fault: stat.get("pgmajfault"),
        inactive_anon: stat.get("inactive_anon"),
        active_anon: stat.get("active_anon"),
        inactive_file: stat.get("inactive_file"),
        active_file: stat.get("active_file"),
        unevictable: stat.get("unevictable"),
        hierarchical_memory_limit: stat.get("hierarchical_memory_limit"),
        hierarchical_swap_limit: stat.get("hierarchical_memsw_limit"),
        total_cache: stat.get("total_cache"),
        total_rss: stat.get("total_rss"),
        total_rss_huge: stat.get("total_rss_huge"),
        total_mapped_file: stat.get("total_mapped_file"),
        total_dirty: stat.get("total_dirty"),
        total_writeback: stat.get("total_writeback"),
        total_pg_pg_in: stat.get("total_pgpgin"),
        total_pg_pg_out: stat.get("total_pgpgout"),
        total_pg_fault: stat.get("total_pgfault"),
        total_pg_maj_fault: stat.get("total_pgmajfault"),
        total_inactive_anon: stat.get("total_inactive_anon"),
        total_active_anon: stat.get("total_active_anon"),
        total_inactive_file: stat.get("total_inactive_file"),
        total_active_file: stat.get("total_active_file"),
        total_unevictable: stat.get("total_unevictable"),
        usage: some(entry(directory, "memory")?),
        swap: some(entry(directory, "memory.memsw")?),
        kernel: some(entry(directory, "memory.kmem")?),
        kernel_tcp: some(entry(directory, "memory.kmem.tcp")?),
        ..Default::default()
    }))
}

/// All zero where the kernel does not account for it: CRI takes the entry itself for granted.
fn entry(directory: &Directory, prefix: &str) -> Result<MemoryEntry, Error> {
    let number = |name: &str| -> Result<u64, Error> {
        Ok(directory.number(&format!("{prefix}.{name}"), u64::MAX)?.unwrap_or_default())
    };
    Ok(MemoryEntry {
        limit: number("limit_in_bytes")?,
        usage: number("usage_in_bytes")?,
        max: number("max_usage_in_bytes")?,
        failcnt: number("failcnt")?,
        ..Default::default()
    })
}

fn oom_control(directory: &Directory) -> Result<Option<MemoryOomControl>, Error> {
    let control = |control: crate::directory::Numbers| MemoryOomControl {
        oom_kill_disable: control.get("oom_kill_disable"),
        under_oom: control.get("under_oom"),
        oom_kill: control.get("oom_kill"),
        ..Default::default()
    };
    Ok(directory.numbers("memory.oom_control")?.map(control))
}

fn pids(directory: &Directory) -> Result<Option<PidsStat>, Error> {
    let Some(current) = directory.number("pids.current", 0)? else { return Ok(None) };
    // No limit is 0 in this version.
    let limit = directory.number("pids.max", 0)?.unwrap_or_default();
    Ok(Some(PidsStat { current, limit, ..Default::default() }))
}

fn hugetlb(directory: &Directory) -> Result<Vec<HugetlbStat>, Error> {
    let mut stats = Vec::new();
    for pagesize in huge_page_sizes() {
        let number = |name: &str| directory.number(&format!("hugetlb.{pagesize}.{name}"), u64::MAX);
        let Some(usage) = number("usage_in_bytes")? else { continue };
        let max = number("max_usage_in_bytes")?.unwrap_or_default();
        let failcnt = number("failcnt")?.unwrap_or_default();
        stats.push(HugetlbStat { usage, max, failcnt, pagesize, ..Default::default() });
    }
    Ok(stats)
}

/// The I/O scheduler's own statistics where it keeps some, else those of the throttling layer.
fn blkio(directory: &Directory) -> Result<BlkIOStat, Error> {
    let mut devices = None;
    let mut entries = |name: &str| io_entries(directory, &format!("blkio.{name}"), &mut devices);
    let mut stat = BlkIOStat {
        io_service_bytes_recursive: entries("io_service_bytes_recursive")?,
        io_serviced_recursive: entries("io_serviced_recursive")?,
        io_queued_recursive: entries("io_queued_recursive")?,
        io_service_time_recursive: entries("io_service_time_recursive")?,
        io_wait_time_recursive: entries("io_wait_time_recursive")?,
        io_merged_recursive: entries("io_merged_recursive")?,
        io_time_recursive: entries("time_recursive")?,
        sectors_recursive: entries("sectors_recursive")?,
        ..Default::default()
    };
    if stat == BlkIOStat::new() {
        stat.io_serviced_recursive = entries("throttle.io_serviced")?;
        stat.io_service_bytes_recursive = entries("throttle.io_service_bytes")?;
    }
    Ok(stat)
}

type Devices = HashMap<(u64, u64), String>;

/// Lines `major:minor [operation] number`, and a total, which is left out.
fn io_entries(
    directory: &Directory,
    name: &str,
    devices: &mut Option<Devices>,
) -> Result<Vec<BlkIOEntry>, Error> {
    let text = directory.text(name)?.unwrap_or_default();
    let mut entries = Vec::new();
    for line in text.lines() {
        let words: Vec<&str> = line.split([' ', ':']).filter(|word| !word.is_empty()).collect();
        let (major, minor, op, value) = match words[..] {
            ["Total", _] => continue,
            [major, minor, value] => (major, minor, "", value),
            [major, minor, op, value] => (major, minor, op, value),
            _ => return Err(directory.malformed(name, line)),
        };
        let (major, minor) = (directory.parse(name, major)?, directory.parse(name, minor)?);
        let device = devices
            .get_or_insert_with(block_devices)
            .get(&(major, minor))
            .cloned()
            .unwrap_or_default();
        let value = directory.parse(name, value)?;
        entries.push(BlkIOEntry {
            op: op.to_owned(),
            device,
            major,
            minor,
            value,
            ..Default::default()
        });
    }
    Ok(entries)
}

/// The nodes of the block devices by number (`/proc/partitions`); a device that it lacks stays
/// without a name.
fn block_devices() -> Devices {
    let text = fs::read_to_string("/proc/partitions").unwrap_or_default();
    let device = |line: &str| {
        let words: Vec<&str> = line.split_whitespace().collect();
        let [major, minor, _, name] = words[..] else { return None };
        Some(((major.parse().ok()?, minor.parse().ok()?), format!("/dev/{name}")))
    };
    text.lines().filter_map(device).collect()
}

fn rdma(directory: &Directory) -> Result<Option<RdmaStat>, Error> {
    let (Some(current), Some(limit)) =
        (directory.text("rdma.current")?, directory.text("rdma.max")?)
    else {
        return Ok(None);
    };
    Ok(Some(RdmaStat {
        current: rdma_entries(&current),
        limit: rdma_entries(&limit),
        ..Default::default()
    }))
}

fn rdma_entries(text: &str) -> Vec<RdmaEntry> {
    let entry = |(device, hca_handles, hca_objects)| RdmaEntry {
        device,
        hca_handles,
        hca_objects,
        ..Default::default()
    };
    rdma_devices(text).map(entry).collect()
}

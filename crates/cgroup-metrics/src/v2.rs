//! Version 2: one directory (kernel `Documentation/admin-guide/cgroup-v2.rst`).

use std::path::Path;

use containerd_shim_protos::cgroups_v2::metrics::{
    CPUStat, HugeTlbStat, IOEntry, IOStat, MemoryEvents, MemoryStat, Metrics, PSIData, PSIStats,
    PidsStat, RdmaEntry, RdmaStat,
};
use protobuf::MessageField;

use crate::directory::{Directory, keyed, rdma_devices};
use crate::{Error, huge_page_sizes, missing};

/// Reads the metrics of `cgroup`, a path below `root`. A controller that is not enabled is absent.
///
/// # Errors
/// The failed step; where there is no such cgroup, that.
pub fn read(root: &Path, cgroup: &Path) -> Result<Metrics, Error> {
    let directory =
        Directory::open(root.join(cgroup))?.ok_or_else(|| missing(&root.join(cgroup)))?;
    Ok(Metrics {
        pids: pids(&directory)?.into(),
        cpu: cpu(&directory)?.into(),
        memory: memory(&directory)?.into(),
        rdma: rdma(&directory)?.into(),
        io: io(&directory)?.into(),
        hugetlb: hugetlb(&directory)?,
        memory_events: memory_events(&directory)?.into(),
        ..Default::default()
    })
}

fn pids(directory: &Directory) -> Result<Option<PidsStat>, Error> {
    let Some(current) = directory.number("pids.current", u64::MAX)? else { return Ok(None) };
    let limit = directory.number("pids.max", u64::MAX)?.unwrap_or_default();
    Ok(Some(PidsStat { current, limit, ..Default::default() }))
}

fn cpu(directory: &Directory) -> Result<Option<CPUStat>, Error> {
    let Some(stat) = directory.numbers("cpu.stat")? else { return Ok(None) };
    Ok(Some(CPUStat {
        usage_usec: stat.get("usage_usec"),
        user_usec: stat.get("user_usec"),
        system_usec: stat.get("system_usec"),
        nr_periods: stat.get("nr_periods"),
        nr_throttled: stat.get("nr_throttled"),
        throttled_usec: stat.get("throttled_usec"),
        nr_bursts: stat.get("nr_bursts"),
        burst_usec: stat.get("burst_usec"),
        psi: pressure(directory, "cpu.pressure")?,
        ..Default::default()
    }))
}

fn memory(directory: &Directory) -> Result<Option<MemoryStat>, Error> {
    let Some(stat) = directory.numbers("memory.stat")? else { return Ok(None) };
    let number = |name: &str| -> Result<u64, Error> {
        Ok(directory.number(name, u64::MAX)?.unwrap_or_default())
    };
    Ok(Some(MemoryStat {
        anon: stat.get("anon"),
        file: stat.get("file"),
        kernel_stack: stat.get("kernel_stack"),
        slab: stat.get("slab"),
        sock: stat.get("sock"),
        shmem: stat.get("shmem"),
        file_mapped: stat.get("file_mapped"),
        file_dirty: stat.get("file_dirty"),
        file_writeback: stat.get("file_writeback"),
        anon_thp: stat.get("anon_thp"),
        inactive_anon: stat.get("inactive_anon"),
        active_anon: stat.get("active_anon"),
        inactive_file: stat.get("inactive_file"),
        active_file: stat.get("active_file"),
        unevictable: stat.get("unevictable"),
        slab_reclaimable: stat.get("slab_reclaimable"),
        slab_unreclaimable: stat.get("slab_unreclaimable"),
        pgfault: stat.get("pgfault"),
        pgmajfault: stat.get("pgmajfault"),
        workingset_refault: stat.get("workingset_refault"),
        workingset_activate: stat.get("workingset_activate"),
        workingset_nodereclaim: stat.get("workingset_nodereclaim"),
        pgrefill: stat.get("pgrefill"),
        pgscan: stat.get("pgscan"),
        pgsteal: stat.get("pgsteal"),
        pgactivate: stat.get("pgactivate"),
        pgdeactivate: stat.get("pgdeactivate"),
        pglazyfree: stat.get("pglazyfree"),
        pglazyfreed: stat.get("pglazyfreed"),
        thp_fault_alloc: stat.get("thp_fault_alloc"),
        thp_collapse_alloc: stat.get("thp_collapse_alloc"),
        usage: number("memory.current")?,
        usage_limit: number("memory.max")?,
        swap_usage: number("memory.swap.current")?,
        swap_limit: number("memory.swap.max")?,
        max_usage: number("memory.peak")?,
        swap_max_usage: number("memory.swap.peak")?,
        psi: pressure(directory, "memory.pressure")?,
        ..Default::default()
    }))
}

fn memory_events(directory: &Directory) -> Result<Option<MemoryEvents>, Error> {
    let Some(events) = directory.numbers("memory.events")? else { return Ok(None) };
    Ok(Some(MemoryEvents {
        low: events.get("low"),
        high: events.get("high"),
        max: events.get("max"),
        oom: events.get("oom"),
        oom_kill: events.get("oom_kill"),
        oom_group_kill: events.get("oom_group_kill"),
        ..Default::default()
    }))
}

/// Pressure is reported also where the controller is not enabled; the kernel may have it switched
/// off.
fn io(directory: &Directory) -> Result<Option<IOStat>, Error> {
    let (stat, psi) = (directory.text("io.stat")?, pressure(directory, "io.pressure")?);
    if stat.is_none() && psi.is_none() {
        return Ok(None);
    }
    let text = stat.unwrap_or_default();
    let usage = text.lines().filter_map(|line| io_entry(directory, line).transpose());
    let usage = usage.collect::<Result<_, _>>()?;
    Ok(Some(IOStat { usage, psi, ..Default::default() }))
}

/// A line `major:minor rbytes=… wbytes=… …`; `None`: the line has no device number, such as
/// `(unknown)`, which the kernel writes for a device that was removed.
fn io_entry(directory: &Directory, line: &str) -> Result<Option<IOEntry>, Error> {
    const NAME: &str = "io.stat";
    let mut words = line.split_whitespace();
    let device = words.next().and_then(|device| device.split_once(':'));
    let Some((major, minor)) = device else { return Ok(None) };
    let (major, minor) = (directory.parse(NAME, major)?, directory.parse(NAME, minor)?);
    let mut entry = IOEntry { major, minor, ..Default::default() };
    for (key, number) in keyed(words) {
        let place = match key {
            "rbytes" => &mut entry.rbytes,
            "wbytes" => &mut entry.wbytes,
            "rios" => &mut entry.rios,
            "wios" => &mut entry.wios,
            // Discards, and what controllers such as io.cost add, which may be fractions.
            _ => continue,
        };
        *place = directory.parse(NAME, number)?;
    }
    Ok(Some(entry))
}

/// Pressure stall information: lines `some avg10=… avg60=… avg300=… total=…` and the same for
/// `full`. A line of another form is left out, as by containerd.
fn pressure(directory: &Directory, name: &str) -> Result<MessageField<PSIStats>, Error> {
    let Some(text) = directory.text(name)? else { return Ok(MessageField::none()) };
    let mut stats = PSIStats::new();
    for line in text.lines() {
        match pressure_line(line) {
            Some(("some", data)) => stats.some = MessageField::some(data),
            Some(("full", data)) => stats.full = MessageField::some(data),
            _ => {}
        }
    }
    Ok(MessageField::some(stats))
}

fn pressure_line(line: &str) -> Option<(&str, PSIData)> {
    let mut words = line.split_whitespace();
    let kind = words.next()?;
    let mut data = PSIData::new();
    for (key, number) in keyed(words) {
        match key {
            "avg10" => data.avg10 = number.parse().ok()?,
            "avg60" => data.avg60 = number.parse().ok()?,
            "avg300" => data.avg300 = number.parse().ok()?,
            "total" => data.total = number.parse().ok()?,
            _ => {}
        }
    }
    Some((kind, data))
}

fn hugetlb(directory: &Directory) -> Result<Vec<HugeTlbStat>, Error> {
    let mut stats = Vec::new();
    for pagesize in huge_page_sizes() {
        let number = |name: &str| directory.number(&format!("hugetlb.{pagesize}.{name}"), u64::MAX);
        let Some(current) = number("current")? else { continue };
        let max = number("max")?.unwrap_or_default();
        let failcnt = directory
            .numbers(&format!("hugetlb.{pagesize}.events"))?
            .unwrap_or_default()
            .get("max");
        stats.push(HugeTlbStat { current, max, pagesize, failcnt, ..Default::default() });
    }
    Ok(stats)
}

fn rdma(directory: &Directory) -> Result<Option<RdmaStat>, Error> {
    let (current, limit) = (directory.text("rdma.current")?, directory.text("rdma.max")?);
    let (Some(current), Some(limit)) = (current, limit) else { return Ok(None) };
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

//! Standard streams: FIFOs, terminals, files, logging programs.

use std::fs::OpenOptions;
use std::io::{ErrorKind, Read as _, Write as _};
use std::path::PathBuf;
use std::time::{Duration, Instant};

use containerd_shim_protos::api::*;
use containerd_shim_protos::ttrpc::Code;

use crate::pod::{self, Container, Pod, context, count, eventually, reader, write};

#[test]
fn standard_input_ends_when_it_is_closed() {
    let mut pod = Pod::new();
    let (input, out) = (pod.fifo("in"), pod.fifo("out"));
    let stdout = reader(&out);
    let with = Container { stdin: input.clone(), stdout: out, ..Default::default() };
    pod.run("a", "cat; echo end", &with);
    write(&input, b"one\n");
    // A writer that goes, as containerd does when it is restarted, is no end.
    write(&input, b"two\n");
    assert_eq!(pod.status("a"), Status::RUNNING);
    pod.close_input("a", "");
    assert_eq!(pod.wait("a", "").unwrap(), 0);
    assert_eq!(stdout.join().unwrap(), b"one\ntwo\nend\n");
    pod.delete("a", "").unwrap();
    pod.shut_down();
}

#[test]
fn output_outlives_its_reader() {
    let mut pod = Pod::new();
    let out = pod.fifo("out");
    let with = Container { stdout: out.clone(), ..Default::default() };
    drop(pod::open(&out));
    pod.run("a", "dd if=/dev/zero bs=1k count=1000 2>/dev/null; exec sleep 1000", &with);
    // There is no reader for a while, and the container waits.
    let first = {
        let mut fifo = pod::open(&out);
        let mut part = vec![0; 10_000];
        eventually("the first bytes", || fifo.read_exact(&mut part).ok());
        part.len()
    };
    let rest = reader(&out);
    pod.exec("a", "e", "true", &Container::default()).unwrap();
    pod.start("a", "e").unwrap();
    pod.wait("a", "e").unwrap();
    pod.kill("a", "", 9).unwrap();
    pod.wait("a", "").unwrap();
    let rest = rest.join().unwrap().len();
    assert!(first + rest <= 1_024_000, "{first} {rest}");
    pod.delete("a", "").unwrap();
    // The last words wait for a reader.
    let with = Container { stdout: out.clone(), ..Default::default() };
    pod.run("b", "echo last", &with);
    pod.wait("b", "").unwrap();
    assert_eq!(reader(&out).join().unwrap(), b"last\n");
    pod.delete("b", "").unwrap();
    pod.shut_down();
}

#[test]
fn a_terminal_is_a_terminal() {
    let mut pod = Pod::new();
    let (input, out) = (pod.fifo("in"), pod.fifo("out"));
    let stdout = reader(&out);
    let with =
        Container { stdin: input.clone(), stdout: out, terminal: true, ..Default::default() };
    pod.create("a", "stty size; read line; echo got $line; exit 4", &with);
    let mut size = ResizePtyRequest::new();
    (size.id, size.width, size.height) = (pod.id("a"), 91, 37);
    pod.client.resize_pty(context(), &size).unwrap();
    pod.start("a", "").unwrap();
    write(&input, b"word\n");
    assert_eq!(pod.wait("a", "").unwrap(), 4);
    let said = String::from_utf8(stdout.join().unwrap()).unwrap();
    assert!(said.contains("37 91\r\n") && said.contains("got word\r\n"), "{said:?}");
    pod.delete("a", "").unwrap();
    assert!(
        !std::fs::read_dir(pod.bundle("a"))
            .unwrap()
            .any(|entry| { entry.unwrap().file_name().to_string_lossy().ends_with(".sock") })
    );
    pod.run("b", "sleep 1000", &Container::default());
    let out = pod.fifo("exec-out");
    let stdout = reader(&out);
    let with = Container { stdout: out, terminal: true, ..Default::default() };
    pod.exec("b", "tty", "test -t 1 && echo yes; exit 5", &with).unwrap();
    pod.start("b", "tty").unwrap();
    assert_eq!(pod.wait("b", "tty").unwrap(), 5);
    assert_eq!(stdout.join().unwrap(), b"yes\r\n");
    pod.end("b");
    pod.shut_down();
}

#[test]
fn output_goes_to_files_and_programs() {
    let mut pod = Pod::new();
    let file = pod.path("logs/file");
    let with = Container {
        stdout: format!("file://{file}"),
        stderr: format!("file://{file}"),
        ..Default::default()
    };
    pod.run("a", "echo out; echo err >&2", &with);
    pod.wait("a", "").unwrap();
    pod.delete("a", "").unwrap();
    let written = std::fs::read_to_string(&file).unwrap();
    assert!(written.contains("out\n") && written.contains("err\n"), "{written:?}");
    let uri = format!("file://{}?x=1", pod.path("logs/a%20b"));
    pod.run("u", "echo out", &Container { stdout: uri, ..Default::default() });
    pod.wait("u", "").unwrap();
    pod.delete("u", "").unwrap();
    assert_eq!(std::fs::read_to_string(pod.path("logs/a b")).unwrap(), "out\n");

    let (script, log) = (pod.path("logger"), pod.path("log"));
    let text = format!(
        "echo ready >&5; exec 5>&-\n\
         {{ echo $CONTAINER_NAMESPACE $1 $2; cat <&3; cat <&4; \
         echo end; }} >{log}"
    );
    pod::script(&script, &text);
    for (id, scheme) in [("b", "binary"), ("c", "binary-v2")] {
        let with =
            Container { stdout: format!("{scheme}://{script}?--a=b%20c"), ..Default::default() };
        pod.run(id, "echo out; echo err >&2", &with);
        pod.wait(id, "").unwrap();
        let whole = eventually("the program's end", || {
            std::fs::read_to_string(&log).ok().filter(|text| text.ends_with("end\n"))
        });
        assert_eq!(whole, "test --a b c\nout\nerr\nend\n");
        std::fs::remove_file(&log).unwrap();
        pod.delete(id, "").unwrap();
    }
    let with = Container { stdout: "binary-v2:///bin/true".to_owned(), ..Default::default() };
    let error = pod.try_create("d", "true", &with).unwrap_err().to_string();
    assert!(error.contains("did not call ready"), "{error}");
    pod.shut_down();
}

#[test]
fn a_deletion_waits_until_the_logging_program_has_read_all() {
    let mut pod = Pod::new();
    let (script, log) = (pod.path("logger"), pod.path("log"));
    pod::script(&script, &format!("exec 5>&-; cat <&3 >{log}; sleep 1; echo end >>{log}"));
    let with = Container { stdout: format!("binary://{script}"), ..Default::default() };
    let whole = || std::fs::read_to_string(&log).unwrap();
    pod.run("a", "exec sleep 1000", &Container::default());
    pod.exec("a", "e", "echo exec", &with).unwrap();
    pod.start("a", "e").unwrap();
    assert_eq!(pod.wait("a", "e").unwrap(), 0);
    pod.delete("a", "e").unwrap();
    assert_eq!(whole(), "exec\nend\n");
    std::fs::remove_file(&log).unwrap();
    pod.run("b", "echo out", &with);
    assert_eq!(pod.wait("b", "").unwrap(), 0);
    pod.delete("b", "").unwrap();
    assert_eq!(whole(), "out\nend\n");
    pod.end("a");
    // The wait for a logging program that does not exit has a bound.
    pod::script(&script, "exec 5>&-; while :; do sleep 1; done");
    pod.run("c", "echo out", &with);
    assert_eq!(pod.wait("c", "").unwrap(), 0);
    let begun = Instant::now();
    pod.delete("c", "").unwrap();
    assert!(begun.elapsed() < Duration::from_secs(15), "{:?}", begun.elapsed());
    pod.shut_down();
}

/// Numbers that look like any, from 1 on.
struct Numbers(u64);

impl Numbers {
    fn next(&mut self) -> u64 {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        self.0
    }

    fn below(&mut self, bound: usize) -> usize {
        (self.next() % bound as u64) as usize
    }
}

/// Reads so many bytes, by readers that come, are slow, and go. With `stays` the first one stays:
/// the shim closes the FIFO after the last output when it has a reader.
fn read_by_many(path: &str, count: usize, numbers: &mut Numbers, stays: bool) -> Vec<u8> {
    let mut all = Vec::with_capacity(count);
    while all.len() < count {
        std::thread::sleep(Duration::from_millis(numbers.below(20) as u64));
        let mut fifo = pod::open(path);
        let part_of_all = all.len() + 1 + numbers.below(4 << 20);
        let end = if stays { count } else { part_of_all.min(count) };
        let slow = numbers.below(4) == 0;
        while all.len() < end {
            let mut part = vec![0; (end - all.len()).min(1 + numbers.below(1 << 17))];
            match fifo.read(&mut part) {
                Ok(read) => {
                    assert!(read > 0 || all.is_empty(), "an end after {} bytes", all.len());
                    all.extend(&part[..read]);
                }
                Err(e) => assert_eq!(e.kind(), std::io::ErrorKind::WouldBlock),
            }
            if slow {
                std::thread::sleep(Duration::from_micros(300));
            }
        }
    }
    all
}

/// `OUTPUT_MB` says how much.
///
/// Promise: output_is_not_lost.
#[test]
fn no_byte_is_lost_or_doubled_whatever_the_reader_does() {
    let mut pod = Pod::new();
    let blocks = count("OUTPUT_MB", 24);
    let mut numbers = Numbers(0x9e37_79b9_7f4a_7c15);
    let block: Vec<u8> = (0..1 << 17).flat_map(|_| numbers.next().to_le_bytes()).collect();
    std::fs::write(pod.path("root/block"), &block).unwrap();
    let out = pod.fifo("out");
    let with = Container { stdout: out.clone(), ..Default::default() };
    let before = pod.memory();
    let script = format!(
        "i=0; while test $i -lt {blocks}; do echo $i; cat /block; i=$((i+1)); done; exit 9"
    );
    let begun = Instant::now();
    pod.run("a", &script, &with);
    let mut most = 0;
    for number in 0..blocks {
        let head = format!("{number}\n").into_bytes();
        let is_last = number + 1 == blocks;
        let read = read_by_many(&out, head.len() + block.len(), &mut numbers, is_last);
        let same = read[..head.len()] == head && read[head.len()..] == block;
        assert!(same, "block {number}");
        most = most.max(pod.memory());
    }
    // The last writer has gone when all was read.
    assert_eq!(pod.wait("a", "").unwrap(), 9);
    pod.delete("a", "").unwrap();
    assert_eq!(pod::reader_that_may_find_nothing(&out), b"");
    eprintln!("{blocks} MB in {:?}; shim {before} kB, at most {most} kB", begun.elapsed());
    assert!(most < before + 512, "{before} kB, at most {most} kB");
    pod.shut_down();
}

#[test]
fn much_output_has_large_pipes_and_memory_only_while_it_lasts() {
    let mut pod = Pod::new();
    let out = pod.fifo("out");
    let mut fifo = pod::open(&out);
    let before = pod.memory();
    let with = Container { stdout: out, ..Default::default() };
    pod.run("a", "dd if=/dev/zero bs=1M count=8 2>/dev/null; exec sleep 1000", &with);
    eventually("more than a small FIFO holds", || {
        (rustix::io::ioctl_fionread(&fifo).unwrap() > 128 << 10).then_some(())
    });
    let mut all = Vec::new();
    eventually("all output", || {
        // The end does not come while the container runs.
        assert_eq!(fifo.read_to_end(&mut all).unwrap_err().kind(), ErrorKind::WouldBlock);
        (all.len() == 8 << 20).then_some(())
    });
    eventually("a small FIFO", || {
        (rustix::pipe::fcntl_getpipe_size(&fifo).unwrap() == 64 << 10).then_some(())
    });
    let after = pod.memory();
    assert!(after < before + 100, "{before} kB, then {after} kB");
    pod.end("a");
    pod.shut_down();
}

#[test]
fn the_last_output_of_a_terminal_waits_for_its_reader() {
    let mut pod = Pod::new();
    let out = pod.fifo("out");
    let with = Container { stdout: out.clone(), terminal: true, ..Default::default() };
    // The FIFO is full: the output is in the terminal when its process ends. How much a FIFO holds
    // of several writes depends on their sizes.
    let mut fifo = OpenOptions::new().read(true).write(true).open(&out).unwrap();
    let full = ".".repeat(64 << 10);
    fifo.write_all(full.as_bytes()).unwrap();
    pod.run("a", "seq 101 199; exit 4", &with);
    drop(fifo);
    let lines = (101..=199).map(|number| format!("{number}\r\n"));
    let expected = full + &lines.collect::<String>();
    assert_eq!(pod.wait("a", "").unwrap(), 4);
    let said = reader(&out).join().unwrap();
    assert!(said == expected.as_bytes(), "{} of {} bytes", said.len(), expected.len());
    pod.delete("a", "").unwrap();
    pod.shut_down();
}

#[test]
fn a_terminal_outlives_its_readers() {
    let mut pod = Pod::new();
    let out = pod.fifo("out");
    let with = Container { stdout: out.clone(), terminal: true, ..Default::default() };
    pod.run("a", "seq 100001 199999; exit 4", &with);
    let expected: String = (100_001..=199_999).map(|number| format!("{number}\r\n")).collect();
    let said = read_by_many(&out, expected.len(), &mut Numbers(7), false);
    assert!(said == expected.as_bytes());
    assert_eq!(pod.wait("a", "").unwrap(), 4);
    pod.delete("a", "").unwrap();
    pod.shut_down();
}

#[test]
fn a_slow_reader_has_all_output_of_a_deleted_container() {
    let mut pod = Pod::new();
    let out = pod.fifo("out");
    let mut fifo = pod::open(&out);
    let with = Container { stdout: out.clone(), ..Default::default() };
    // FIFO and pipe hold this output.
    pod.run("a", "seq 100001 116000; exit 4", &with);
    assert_eq!(pod.wait("a", "").unwrap(), 4);
    // This waits for the reader, and then no more.
    pod.delete("a", "").unwrap();
    let expected: String = (100_001..=116_000).map(|number| format!("{number}\n")).collect();
    let mut said = Vec::new();
    eventually("all output", || match fifo.read_to_end(&mut said) {
        Ok(_) => Some(()),
        Err(_) => None,
    });
    assert!(said == expected.as_bytes(), "{} of {} bytes", said.len(), expected.len());
    pod.shut_down();
}

#[test]
fn a_terminal_that_no_process_has_open_for_a_while_stays() {
    let mut pod = Pod::new();
    let out = pod.fifo("out");
    let stdout = reader(&out);
    let with = Container { stdout: out, terminal: true, ..Default::default() };
    // Long enough for the shim to see it closed.
    let script = "exec </dev/null >/dev/null 2>&1; sleep 1; echo again >/dev/console; exit 4";
    pod.run("a", script, &with);
    assert_eq!(pod.wait("a", "").unwrap(), 4);
    assert_eq!(String::from_utf8(stdout.join().unwrap()).unwrap(), "again\r\n");
    pod.delete("a", "").unwrap();
    pod.shut_down();
}

/// How many bytes of a FIFO no one has read.
fn unread(path: &str) -> u64 {
    rustix::io::ioctl_fionread(pod::open(path)).unwrap()
}

#[test]
fn a_process_that_does_not_read_its_input_delays_no_other_stream() {
    let mut pod = Pod::new();
    let input = pod.fifo("in");
    pod.run("a", "exec sleep 1000", &Container::default());
    let with = Container { stdin: input.clone(), ..Default::default() };
    pod.exec("a", "e", "exec sleep 1000", &with).unwrap();
    pod.start("a", "e").unwrap();
    let writer = std::thread::spawn({
        let input = input.clone();
        // Fails when the process has ended.
        move || {
            std::fs::File::options().write(true).open(input).unwrap().write_all(&vec![7; 1 << 20])
        }
    });
    eventually("pipe and FIFO are full", || (unread(&input) >= 60 << 10).then_some(()));
    let out = pod.fifo("out");
    let stdout = reader(&out);
    pod.run("b", "echo out", &Container { stdout: out, ..Default::default() });
    assert_eq!(pod.wait("b", "").unwrap(), 0);
    assert_eq!(stdout.join().unwrap(), b"out\n");
    pod.delete("b", "").unwrap();
    pod.kill("a", "e", 9).unwrap();
    assert_eq!(pod.wait("a", "e").unwrap(), 137);
    pod.delete("a", "e").unwrap();
    assert!(writer.join().unwrap().is_err(), "the input of a deleted process has no reader");
    pod.end("a");
    pod.shut_down();
}

/// Promise: output_is_not_lost.
#[test]
fn no_byte_of_the_input_of_a_slow_process_is_lost() {
    let mut pod = Pod::new();
    let (input, out) = (pod.fifo("in"), pod.fifo("out"));
    let mut numbers = Numbers(11);
    let block: Vec<u8> = (0..1 << 17).flat_map(|_| numbers.next().to_le_bytes()).collect();
    pod.run("a", "exec sleep 1000", &Container::default());
    let stdout = reader(&out);
    let with = Container { stdin: input.clone(), stdout: out, ..Default::default() };
    pod.exec("a", "e", "sleep 1; exec cat", &with).unwrap();
    pod.start("a", "e").unwrap();
    write(&input, &block);
    pod.close_input("a", "e");
    assert_eq!(pod.wait("a", "e").unwrap(), 0);
    assert!(stdout.join().unwrap() == block);
    pod.delete("a", "e").unwrap();
    pod.end("a");
    pod.shut_down();
}

#[test]
fn a_deleted_execs_output_ends_although_a_process_keeps_it() {
    let mut pod = Pod::new();
    pod.run("a", "exec sleep 1000", &Container::default());
    for (name, script, whole) in [
        ("quiet", "echo word; sleep 1000 &", true),
        ("loud", "echo word; dd if=/dev/zero 2>/dev/null &", false),
    ] {
        let out = pod.fifo(name);
        let stdout = reader(&out);
        pod.exec("a", name, script, &Container { stdout: out, ..Default::default() }).unwrap();
        pod.start("a", name).unwrap();
        assert_eq!(pod.wait("a", name).unwrap(), 0);
        // This waits for the end, and then no more.
        pod.delete("a", name).unwrap();
        let said = stdout.join().unwrap();
        assert!(said.starts_with(b"word\n") && (!whole || said.len() == 5), "{}", said.len());
    }
    pod.end("a");
    pod.shut_down();
}

/// A cgroup in which the shim can start neither a thread nor a process, until it is dropped.
struct NoThreads {
    root: PathBuf,
    full: PathBuf,
    shim: u32,
}

impl NoThreads {
    /// `None`: the node has no controller for it.
    fn new(pod: &Pod) -> Option<Self> {
        let roots = ["/sys/fs/cgroup/pids", "/sys/fs/cgroup"];
        let root = PathBuf::from(roots.into_iter().find(|root| pod::exists(root)).unwrap());
        let shim = pod.shim.id();
        let full = root.join(format!("no-threads-{shim}"));
        std::fs::create_dir(&full).unwrap();
        let limited = Self { root, full, shim };
        std::fs::write(limited.full.join("pids.max"), "1").ok()?;
        std::fs::write(limited.full.join("cgroup.procs"), shim.to_string()).unwrap();
        Some(limited)
    }
}

impl Drop for NoThreads {
    fn drop(&mut self) {
        // The shim has ended if the test has failed.
        let _ = std::fs::write(self.root.join("cgroup.procs"), self.shim.to_string());
        std::fs::remove_dir(&self.full).unwrap();
    }
}

#[test]
fn a_container_for_which_there_is_no_thread_leaves_nothing() {
    let mut pod = Pod::new();
    let Some(limit) = NoThreads::new(&pod) else {
        kit::skip("the node has no pids controller");
        return;
    };
    let out = pod.fifo("out");
    let with = Container { stdout: out.clone(), ..Default::default() };
    let early = pod::open(&out);
    let error = pod.try_create("a", "echo out", &with).unwrap_err().to_string();
    drop(early);
    assert!(error.contains("copier thread") && error.contains("os error 11"), "{error}");
    assert_eq!(pod::code(&pod.delete("a", "").unwrap_err()), Code::NOT_FOUND);
    assert!(!pod::exists(pod.runtime_state("a")));
    drop(limit);
    let stdout = reader(&out);
    pod.run("a", "echo out", &with);
    assert_eq!(pod.wait("a", "").unwrap(), 0);
    pod.delete("a", "").unwrap();
    assert_eq!(stdout.join().unwrap(), b"out\n");
    pod.shut_down();
}

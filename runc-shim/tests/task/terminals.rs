//! Terminals whose input ends.

use std::io::Read as _;

use crate::pod::{self, Container, Pod, eventually, reader, write};

#[test]
fn a_slow_reader_has_all_output_of_a_terminal_whose_input_ends() {
    let mut pod = Pod::new();
    let (stdin, stdout) = (pod.fifo("in"), pod.fifo("out"));
    let mut fifo = pod::open(&stdout);
    let with = Container { stdin, stdout, terminal: true, ..Default::default() };
    // More than the FIFO holds: the rest is in the shim and in the terminal.
    let pid = pod.run("a", "seq 100001 108800; exec cat", &with);
    eventually("all is written", || {
        let name = std::fs::read_to_string(format!("/proc/{pid}/comm")).unwrap();
        (name == "cat\n").then_some(())
    });
    pod.close_input("a", "");
    let expected: String = (100_001..=108_800).map(|number| format!("{number}\r\n")).collect();
    let mut said = Vec::new();
    eventually("all output", || fifo.read_to_end(&mut said).ok());
    assert!(said == expected.as_bytes(), "{} of {} bytes", said.len(), expected.len());
    assert_eq!(pod.wait("a", "").unwrap(), 0);
    pod.delete("a", "").unwrap();
    pod.shut_down();
}

#[test]
fn a_terminal_whose_input_ends_early_has_all_output_until_the_exit() {
    let mut pod = Pod::new();
    pod.run("a", "exec sleep 1000", &Container::default());
    // A line that is not complete is not the end.
    for (name, input) in [("lines", "one\n"), ("part", "one")] {
        let (stdin, stdout) = (pod.fifo(&format!("{name}-in")), pod.fifo(&format!("{name}-out")));
        let reader = reader(&stdout);
        let with = Container { stdin: stdin.clone(), stdout, terminal: true, ..Default::default() };
        pod.exec("a", name, "stty -echo; cat; sleep 1; echo two; exit 5", &with).unwrap();
        pod.start("a", name).unwrap();
        write(&stdin, input.as_bytes());
        pod.close_input("a", name);
        assert_eq!(pod.wait("a", name).unwrap(), 5);
        pod.delete("a", name).unwrap();
        let said = String::from_utf8(reader.join().unwrap()).unwrap();
        assert!(said.ends_with("two\r\n") && said.contains("one"), "{said:?}");
    }
    pod.end("a");
    pod.shut_down();
}

#[test]
fn a_terminal_without_input_and_reader_hangs_up() {
    let mut pod = Pod::new();
    pod.run("a", "exec sleep 1000", &Container::default());
    let (stdin, stdout) = (pod.fifo("in"), pod.fifo("out"));
    let fifo = pod::open(&stdout);
    let with = Container { stdin, stdout, terminal: true, ..Default::default() };
    pod.exec("a", "e", "exec sleep 1000", &with).unwrap();
    pod.start("a", "e").unwrap();
    pod.close_input("a", "e");
    drop(fifo);
    assert_eq!(pod.wait("a", "e").unwrap(), 129, "the signal of the terminal");
    pod.delete("a", "e").unwrap();
    pod.end("a");
    pod.shut_down();
}

/// containerd stops reading the output of an exec with a terminal when a write of its input fails,
/// and waits for a FIFO of the input that has no reader.
#[test]
fn the_input_of_a_terminal_may_come_after_the_exit() {
    let mut pod = Pod::new();
    pod.run("a", "exec sleep 1000", &Container::default());
    let (stdin, stdout) = (pod.fifo("in"), pod.fifo("out"));
    let reader = reader(&stdout);
    let with = Container { stdin: stdin.clone(), stdout, terminal: true, ..Default::default() };
    pod.exec("a", "e", "echo word", &with).unwrap();
    pod.start("a", "e").unwrap();
    assert_eq!(pod.wait("a", "e").unwrap(), 0);
    assert_eq!(reader.join().unwrap(), b"word\r\n", "the terminal is closed");
    // More than the FIFO holds.
    write(&stdin, &[b'x'; 200_000]);
    pod.delete("a", "e").unwrap();
    pod.end("a");
    pod.shut_down();
}

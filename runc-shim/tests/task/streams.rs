//! Standard streams: FIFOs, terminals, files, logging programs.

use containerd_shim_protos::api::*;

use crate::pod::{self, Container, Pod, context, eventually, reader, write};

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
    let mut request = CloseIORequest::new();
    (request.id, request.stdin) = (pod.id("a"), true);
    pod.client.close_io(context(), &request).unwrap();
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
        use std::io::Read as _;
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

    let (script, log) = (pod.path("logger"), pod.path("log"));
    let text = format!(
        "#!/bin/sh\necho ready >&5; exec 5>&-\n\
         {{ echo $CONTAINER_NAMESPACE $1 $2; cat <&3; cat <&4; \
         echo end; }} >{log}\n"
    );
    std::fs::write(&script, text).unwrap();
    std::fs::set_permissions(&script, std::os::unix::fs::PermissionsExt::from_mode(0o755)).unwrap();
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

//! `pagemill crypt serve --export`: several volumes of one process.

use std::fs;
use std::io::{Read, Write};
use std::net::TcpStream;
use std::process::Command;

use rustix::process::Signal;

use crate::common::{Folder, PROGRAM, noise, signal, until};
use crate::crypt_far::{far_end, far_uri, need};
use crate::crypt_serve::{QUICK, Serving, folder_with, nbdcopy, pagemill};
use crate::crypt_service::{Service, certificate};

/// Volumes `volume` (key `key`), `b` (key `other`) and `c` (key `key`) of 4 MiB each.
fn folder() -> Folder {
    let folder = folder_with("20M", QUICK);
    folder.file("other", &[8; 32]);
    for (image, key) in [("b", "other"), ("c", "key")] {
        let line = format!("crypt format {image} --size 20M --key-file {key} --kdf pbkdf2 --kdf-iterations 1000");
        let made = pagemill(&folder, &line);
        assert_eq!(made.code, Some(0), "{}", made.stderr);
    }
    folder
}

#[test]
fn volumes_are_listed_and_served_by_their_names() {
    need("nbdcopy", "libnbd-bin");
    let folder = folder();
    let words =
        "crypt serve volume --key-file key --unix socket --name a --export b=b,key-file=other --export c=c,read-only";
    let serving = Serving::start(&folder, words);
    until("its socket", || folder.path("socket").exists());
    let uri = |name: &str| format!("nbd+unix:///{name}?socket={}", folder.path("socket").display());
    let list = folder.run(Command::new("nbdinfo").args(["--list", "--json", &uri("")]));
    assert_eq!(list.code, Some(0), "{}", list.stderr);
    let list: serde_json::Value = serde_json::from_str(&list.stdout).unwrap();
    let about = |export: &serde_json::Value| {
        (
            export["export-name"].as_str().unwrap().to_owned(),
            export["export-size"].clone(),
            export["is_read_only"].clone(),
        )
    };
    let about: Vec<_> = list["exports"].as_array().unwrap().iter().map(about).collect();
    let expected = [("a", false), ("b", false), ("c", true)];
    assert_eq!(about, expected.map(|(name, is)| (name.to_owned(), (4 << 20).into(), is.into())));
    for (name, byte) in [("a", 1), ("b", 2)] {
        folder.file("raw", &vec![byte; 4 << 20]);
        nbdcopy(&folder, "raw", &uri(name));
    }
    for (name, byte) in [("", 1), ("a", 1), ("b", 2)] {
        nbdcopy(&folder, &uri(name), "back");
        assert!(fs::read(folder.path("back")).unwrap() == vec![byte; 4 << 20], "{name}");
    }
    let unknown = folder.run(Command::new("nbdinfo").arg(uri("d")));
    assert_ne!(unknown.code, Some(0), "{}", unknown.stdout);
    drop(serving);
    // Each is an ordinary volume of its key, and a server may do without an IMAGE.
    fs::remove_file(folder.path("socket")).unwrap();
    let mut serving = Serving::start(&folder, "crypt serve --export=b=b --key-file other --unix socket");
    let first = serving.first_line();
    assert!(first.contains("serving 4194304 bytes"), "{first}");
    nbdcopy(&folder, &uri(""), "back");
    assert!(fs::read(folder.path("back")).unwrap() == vec![2; 4 << 20]);
}

/// What becomes of one disk of several is logged with its export's name, in the log's form.
#[test]
fn the_log_names_the_export_whose_disk_fails() {
    need("nbdcopy", "libnbd-bin");
    let folder = folder();
    let mut far = far_end(&folder);
    let words = format!(
        "crypt serve c --name a --key-file key --export b={},key-file=key --reconnect 0 --unix socket --log debug",
        far_uri(&folder)
    );
    let mut serving = Serving::start(&folder, &words);
    until("its socket", || folder.path("socket").exists());
    far.0.kill().unwrap();
    far.0.wait().unwrap();
    let uri = format!("nbd+unix:///b?socket={}", folder.path("socket").display());
    assert_ne!(folder.run(Command::new("nbdcopy").args([&uri, "back"])).code, Some(0));
    signal(&serving.0, Signal::TERM);
    assert_ne!(serving.0.wait().unwrap().code(), Some(0));
    let mut said = String::new();
    serving.0.stderr.take().unwrap().read_to_string(&mut said).unwrap();
    let line = |what: &str| said.lines().find(|line| line.contains(what)).unwrap_or_else(|| panic!("{what}: {said}"));
    for (what, level) in [("the far end is lost", " WARN "), ("the disk failed", " WARN ")] {
        let line = line(what);
        assert!(line.contains(level) && line.contains(" export=b"), "{line}");
    }
    line("the export \"b\": the far end is away; start the server there");
    // Also which volume a client has, and had.
    let chosen = line("a client has chosen its export");
    assert!(chosen.contains(" DEBUG ") && chosen.contains(" export=b"), "{chosen}");
    let end = said.lines().find(|line| line.contains("client gone ") || line.contains("client cut off "));
    assert!(end.is_some_and(|line| line.contains(" export=b ")), "{said}");
}

/// While the far end of one volume is away and a client waits for it, everything else goes on: clients of another volume,
/// its keys, its growth, new certificates, figures. Commands that would destroy it are refused.
#[test]
fn a_far_end_that_is_away_holds_up_its_own_clients_alone() {
    need("nbdcopy", "libnbd-bin");
    let folder = folder();
    certificate(&folder, "first");
    let mut far = far_end(&folder);
    let words = format!(
        "crypt serve b --name b --key-file other --export far={},key-file=key --reconnect 100000 --tcp 127.0.0.1:0 \
         --tls-cert server.pem --tls-key server.key --metrics 0 --handshake-timeout 600",
        far_uri(&folder)
    );
    let mut service = Service::run(&folder, Command::new(PROGRAM).args(words.split(' ')));
    let line = service.says(&["serving 2 volumes at nbds://"]);
    let address = line.split("nbds://").nth(1).unwrap().split(": ").next().unwrap().to_owned();
    let uri =
        |name: &str, trust: &str| format!("nbds://{address}/{name}?tls-certificates={}", folder.path(trust).display());
    let line = service.says(&["figures at http://"]);
    let figures_at = line.split("http://").nth(1).unwrap().strip_suffix("/metrics").unwrap().to_owned();
    let figures = || -> Option<String> {
        let mut client = TcpStream::connect(&figures_at).ok()?;
        client.write_all(b"GET /metrics HTTP/1.1\r\n\r\n").ok()?;
        let mut answer = String::new();
        client.read_to_string(&mut answer).ok().filter(|_| !answer.is_empty())?;
        Some(answer)
    };
    let bytes = noise(4 << 20);
    folder.file("raw", &bytes);
    // Not flushed, so it is kept until the far end is back.
    let copied = folder.run(Command::new("nbdcopy").args(["raw", &uri("far", "first")]));
    assert_eq!(copied.code, Some(0), "{}", copied.stderr);
    far.0.kill().unwrap();
    far.0.wait().unwrap();
    service.says(&["the far end is lost", "export=far"]);
    let mut waiting = Command::new("nbdcopy");
    let mut waiting = Serving(folder.spawn(waiting.args(["--connections=1", &uri("far", "first"), "waited"])));
    until("a client that waits", || !figures().unwrap().contains("pagemill_crypt_connections 0\n"));

    certificate(&folder, "second");
    service.signal(Signal::HUP);
    service.says(&["loaded the certificates again"]);
    nbdcopy(&folder, "raw", &uri("b", "second"));
    let refused = folder.run(Command::new("nbdinfo").args(["--size", &uri("b", "first")]));
    assert_ne!(refused.code, Some(0), "{}", refused.stdout);
    folder.file("third", &[9; 32]);
    for (words, code) in [
        (format!("crypt change-key b --key-file other --new-key-file third {QUICK}"), 0),
        ("crypt test-passphrase b --key-file other".to_owned(), 3),
        ("crypt test-passphrase b --key-file third".to_owned(), 0),
        ("crypt header-backup b saved".to_owned(), 0),
        ("crypt erase b --force".to_owned(), 1),
        ("crypt header-restore b saved --force".to_owned(), 1),
        ("crypt resize b --size 18M --force".to_owned(), 1),
        ("crypt resize b --size 24M".to_owned(), 0),
    ] {
        let done = pagemill(&folder, &words);
        assert_eq!(done.code, Some(code), "{words}: {}{}", done.stdout, done.stderr);
    }
    nbdcopy(&folder, &uri("b", "second"), "back");
    assert!(fs::read(folder.path("back")).unwrap() == bytes);
    assert!(waiting.0.try_wait().unwrap().is_none(), "it has not waited");

    let far = far_end(&folder);
    assert!(waiting.0.wait().unwrap().success());
    assert!(fs::read(folder.path("waited")).unwrap() == bytes);
    service.says(&["the far end is back", "export=far"]);
    // Asked for all the time, to the end.
    std::thread::scope(|scope| {
        let asking = scope.spawn(|| std::iter::from_fn(figures).count());
        service.signal(Signal::TERM);
        assert_eq!(service.ends(), Some(0), "{:?}", service.lines.lock().unwrap());
        asking.join().unwrap();
    });
    drop(far);
    for (image, key, len) in [("volume", "key", 4 << 20), ("b", "third", 8 << 20)] {
        let server = Serving::start(&folder, &format!("crypt serve {image} --key-file {key} --unix {image}.sock"));
        until("its socket", || folder.path(&format!("{image}.sock")).exists());
        nbdcopy(&folder, &format!("nbd+unix:///?socket={}", folder.path(&format!("{image}.sock")).display()), "back");
        let back = fs::read(folder.path("back")).unwrap();
        assert!(back.len() == len && back[..4 << 20] == bytes, "{image}");
        drop(server);
    }
}

#[test]
fn exports_that_make_no_sense_are_refused() {
    let folder = folder();
    let refused = |words: &str, why: &[&str]| {
        pagemill(&folder, &format!("crypt serve {words} --key-file key --unix socket")).refused_by("crypt", why);
    };
    refused("volume --export =c", &["two exports have the name \"\"", "--name"]);
    refused("--export a=b,key-file=other --export a=c", &["two exports have the name \"a\""]);
    refused("volume --export a=./volume", &["the exports \"\" and \"a\" are the same volume", "leave one out"]);
    refused("--export a=c --name b", &["for IMAGE"]);
    for words in ["", "--export b", "--export a=c,key=file"] {
        let line = format!("crypt serve --unix socket {words}");
        assert_eq!(pagemill(&folder, line.trim_end()).code, Some(2), "{words}");
    }
    let missing = pagemill(&folder, "crypt serve volume --key-file key --export a=missing --unix socket");
    assert_eq!(missing.code, Some(1), "{}", missing.stderr);
    assert!(missing.stderr.contains("missing: No such file or directory; check the name"), "{}", missing.stderr);
    assert!(missing.stderr.contains("this volume can't be opened export=a\n"), "{}", missing.stderr);
    let wrong = pagemill(&folder, "crypt serve volume --key-file key --export a=b --unix socket");
    assert_eq!(wrong.code, Some(3), "{}", wrong.stderr);
    assert!(wrong.stderr.contains("this volume can't be opened export=a\n"), "{}", wrong.stderr);
    assert!(!folder.path("socket").exists());
}

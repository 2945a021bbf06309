//! TLS: where it is configured, nothing works without it; common clients work; and clients that abuse it lose only
//! their own connection.

use std::fs;
use std::io::{Read, Write};
use std::net::TcpListener;
use std::os::fd::AsFd;
use std::os::unix::net::UnixStream;
use std::thread;
use std::time::Duration;

use crate::common::certificates::*;
use crate::common::served::*;
use crate::common::*;
use pagemill_crypt::serve::{Listener, TlsServer};

const LEN: u64 = 8 * MIB;

fn start(bench: &Bench, setup: Setup, tls: TlsServer) -> Served {
    bench.file("image", LEN);
    Served::start_tls(bench, bench.open("image"), plain_volume(LEN, 512), setup, tls)
}

/// Reads until the other side closes.
fn rest(stream: &mut UnixStream) -> Vec<u8> {
    let mut rest = Vec::new();
    // Reset counts as an end.
    let _ = stream.read_to_end(&mut rest);
    rest
}

#[test]
fn libnbd_and_qemu_connect_by_tls() {
    let Some(bench) = Bench::with(&["nbdinfo", "nbdcopy", "qemu-img"]) else { return };
    let certificates = Certificates::new();
    certificates.for_clients(&bench.path("with"), true);
    certificates.for_clients(&bench.path("without"), false);
    Certificates::new().for_clients(&bench.path("strangers"), true);
    for asks in [false, true] {
        let served = start(&bench, Setup::new(), certificates.for_server(asks));
        // Also by TCP: on a Unix socket this libnbd does not check names, and so not the authority.
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let address = listener.local_addr().unwrap();
        let (stop, stopped) = UnixStream::pair().unwrap();
        thread::scope(|scope| {
            scope.spawn(|| served.server.accept(&Listener::Tcp(listener), stopped.as_fd()).unwrap());
            talk(&bench, &served, &address.to_string(), asks);
            drop(stop);
        });
        served.wait_for_connections(0);
        served.stop();
    }
}

fn talk(bench: &Bench, served: &Served, address: &str, asks: bool) {
    let socket = served.socket.display().to_string();
    let folder = |name: &str| bench.path(name).display().to_string();
    let by_unix = |name: &str| format!("nbds+unix:///?socket={socket}&tls-certificates={}", folder(name));
    let by_tcp = |name: &str| format!("nbds://{address}/?tls-certificates={}", folder(name));
    let plain = pattern(LEN as usize);
    write(&bench.path("raw"), &plain);
    for uri in [by_unix("with"), by_tcp("with")] {
        bench.ok("rm -f back");
        bench.ok(&format!("nbdcopy --connections=3 --flush raw {uri}"));
        bench.ok(&format!("nbdcopy --connections=3 {uri} back"));
        assert!(fs::read(bench.path("back")).unwrap() == plain);
        let info = bench.ok(&format!("nbdinfo {uri}"));
        assert!(info.contains("with TLS"), "{info}");
    }
    // A client without a certificate is accepted if none is required. A client that trusts another authority
    // disconnects, and a client without TLS fails.
    let shows_nothing = bench.run(&format!("nbdinfo {}", by_tcp("without")));
    assert_eq!(shows_nothing.status.success(), !asks, "{}", String::from_utf8_lossy(&shows_nothing.stderr));
    assert!(!bench.run(&format!("nbdinfo {}", by_tcp("strangers"))).status.success());
    for uri in [format!("nbd+unix:///?socket={socket}"), format!("nbd://{address}")] {
        assert!(!bench.run(&format!("nbdinfo {uri}")).status.success());
    }

    let object = |name: &str| format!("--object tls-creds-x509,id=tls,endpoint=client,dir={}", folder(name));
    let unix = format!("driver=nbd,tls-creds=tls,tls-hostname=localhost,server.type=unix,server.path={socket}");
    bench.ok("rm -f back");
    bench.ok(&format!("qemu-img convert -O raw {} --image-opts {unix} back", object("with")));
    assert!(fs::read(bench.path("back")).unwrap() == plain);
    assert!(!bench.run(&format!("qemu-img info {} --image-opts {unix}", object("strangers"))).status.success());
    assert!(!bench.run(&format!("qemu-img info nbd+unix:///?socket={socket}")).status.success());
}

#[test]
fn before_required_tls_every_option_is_refused() {
    const REQUIRED: u32 = 0x8000_0005;
    let bench = Bench::with(&[]).unwrap();
    let certificates = Certificates::new();
    let served = start(&bench, Setup::new(), certificates.for_server(false));
    let mut stream = greeted(&served.socket);
    // LIST, INFO, GO, STRUCTURED_REPLY, both options for contexts, and an unknown one.
    for number in [3, 6, 7, 8, 9, 10, 77] {
        stream.write_all(&option(number)).unwrap();
        assert_eq!(answer(&mut stream), (number, REQUIRED));
    }
    // ABORT is answered. EXPORT_NAME can't be answered with an error, so it ends the connection.
    stream.write_all(&option(2)).unwrap();
    assert_eq!(answer(&mut stream), (2, ACK));
    assert_eq!(rest(&mut stream), b"");
    let mut stream = greeted(&served.socket);
    stream.write_all(&option(1)).unwrap();
    assert_eq!(rest(&mut stream), b"");

    // By TLS everything works.
    let mut stream = certificates.connect(agreed(&served.socket));
    stream.write_all(&option(STARTTLS)).unwrap();
    assert_eq!(answer(&mut stream), (STARTTLS, 0x8000_0003), "a second time");
    let mut client = Client::go(stream);
    let noise = pattern(3 << 20);
    client.write(MIB, &noise, FUA).unwrap();
    assert!(client.read(MIB, 3 << 20).unwrap() == noise);
    client.0.conn.send_close_notify();
    client.0.conn.write_tls(&mut client.0.sock).unwrap();
    served.wait_for_connections(0);
    served.stop();
}

/// An attacker in between appends an option to the client's STARTTLS, so that it would be taken for the client's.
#[test]
fn bytes_after_starttls_are_not_taken_for_tls() {
    let bench = Bench::with(&[]).unwrap();
    let served = start(&bench, Setup::new(), Certificates::new().for_server(false));
    for behind in [option(3), option(7)[..5].to_vec(), vec![0x16, 3, 1, 0, 0], vec![0]] {
        let mut stream = greeted(&served.socket);
        stream.write_all(&[option(STARTTLS), behind].concat()).unwrap();
        // The connection ends, with the answer to STARTTLS or without it; nothing else is sent.
        let rest = rest(&mut stream);
        assert!(rest.is_empty() || (rest.len() == 20 && rest[8..16] == [0, 0, 0, 5, 0, 0, 0, 1]), "{rest:?}");
    }
    served.wait_for_connections(0);
    served.stop();
}

#[test]
fn clients_that_abuse_tls_lose_only_their_connection() {
    let bench = Bench::with(&[]).unwrap();
    let certificates = Certificates::new();
    let mut setup = Setup::new();
    (setup.limits.handshake, setup.limits.stall) = (Duration::from_secs(5), Some(Duration::from_secs(5)));
    let served = start(&bench, setup, certificates.for_server(true));
    let mut good = Client::go(certificates.connect(agreed(&served.socket)));

    let mut streams = Vec::new();
    // A part of a client's real first message; no TLS at all; records with a wrong length; silence.
    let mut hello = Vec::new();
    let mut pair = certificates.connect(UnixStream::pair().unwrap().0);
    pair.conn.write_tls(&mut hello).unwrap();
    let lies = [
        hello[..1].to_vec(),
        hello[..hello.len() / 2].to_vec(),
        hello.clone(),
        [&hello[..], &hello[..]].concat(),
        b"GET / HTTP/1.1\r\n\r\n".to_vec(),
        vec![0x16, 3, 1, 0xff, 0xff, 1],
        vec![0x17, 3, 3, 0, 0],
        vec![0xff; 70_000],
        vec![],
    ];
    for said in lies {
        let mut stream = agreed(&served.socket);
        let _ = stream.write_all(&said); // It may be disconnected before all is sent.
        streams.push(stream);
    }
    // After the handshake: a write that stops in the middle, garbage between records, and reads whose answers are not
    // received.
    let mut half = Client::go(certificates.connect(agreed(&served.socket)));
    half.send(command::WRITE, 0, 1, 0, 1 << 20);
    half.0.write_all(&[1; 5000]).unwrap();
    streams.push(half.0.sock);
    let mut rubbish = Client::go(certificates.connect(agreed(&served.socket)));
    rubbish.send(command::READ, 0, 1, 0, 4096);
    rubbish.0.sock.write_all(&[0x17, 3, 3, 0, 32, 9]).unwrap();
    rubbish.0.sock.write_all(&[9; 4096]).unwrap();
    streams.push(rubbish.0.sock);
    let mut silent = Client::go(certificates.connect(agreed(&served.socket)));
    (0..8).for_each(|cookie| silent.send(command::READ, 0, cookie, 0, 1 << 20));
    let silent = silent.0.sock;

    let noise = pattern(1 << 20);
    for round in 0..8 {
        good.write(round << 20, &noise, 0).unwrap();
        assert!(good.read(round << 20, 1 << 20).unwrap() == noise);
    }
    served.wait_for_connections(1);
    streams.iter_mut().for_each(|stream| drop(rest(stream)));
    drop((silent, good));
    served.wait_for_connections(0);
    assert_eq!(served.server.path().memory.pool().stats().out, 0);
    served.stop();
}

/// The server has an answer that nobody receives. The limits are ten minutes, so nothing else would end the connection.
#[test]
fn clients_that_disconnect_in_the_handshake_are_removed_at_once() {
    let bench = Bench::with(&[]).unwrap();
    let certificates = Certificates::new();
    let served = start(&bench, Setup { threads: 1, ..Setup::new() }, certificates.for_server(false));
    let mut hello = Vec::new();
    let mut pair = certificates.connect(UnixStream::pair().unwrap().0);
    pair.conn.write_tls(&mut hello).unwrap();
    // While the server's only thread answers the first client, the others come and go.
    let streams: Vec<_> = (0..50).map(|_| agreed(&served.socket)).collect();
    streams.into_iter().for_each(|mut stream| stream.write_all(&hello).unwrap());
    served.wait_for_connections(0);
    served.stop();
}

#[test]
fn stopping_finishes_begun_requests_over_tls() {
    let bench = Bench::with(&[]).unwrap();
    let certificates = Certificates::new();
    let served = start(&bench, Setup::new(), certificates.for_server(false));
    let mut client = Client::go(certificates.connect(agreed(&served.socket)));
    let noise = pattern(LEN as usize);
    client.send(command::WRITE, 0, 5, 0, LEN as u32);
    client.0.write_all(&noise[..noise.len() / 2]).unwrap();
    let mut begins = agreed(&served.socket);
    thread::scope(|scope| {
        let stopping = scope.spawn(|| served.stop());
        // A client in the middle of its handshake gets TLS's closing alert: level "warning", number 0.
        assert_eq!(rest(&mut begins), [21, 3, 3, 0, 2, 1, 0]);
        client.0.write_all(&noise[noise.len() / 2..]).unwrap();
        assert_eq!(client.reply(), (0, 5));
        // TLS's closing alert has come: otherwise `rustls` would return an error.
        assert_eq!(client.0.read(&mut [0]).unwrap(), 0);
        drop(client);
        stopping.join().unwrap();
    });
    assert!(plain_contents(&bench.open("image"), 512) == noise);
}

#[test]
fn keys_that_do_not_match_certificates_are_refused() {
    let (ours, other) = (Certificates::new(), Certificates::new());
    let refused = |chain: &str, key: &str, authorities: Option<&str>| {
        let authorities = authorities.map(|text| pem("ca.pem", text));
        TlsServer::new(pem("cert.pem", chain), pem("key.pem", key), authorities).unwrap_err().to_string()
    };
    let (chain, key) = (&ours.server.certificate, &ours.server.key);
    // Each error names the file, what is wrong with it, and what to do.
    let damaged = chain.replacen("MII", "***", 1);
    for (said, file, why, next) in [
        (refused("", key, None), "cert.pem: ", "no certificate in PEM", "name the file with the server's certificate"),
        (refused(&damaged, key, None), "cert.pem: ", "no certificate in PEM (", "name the file with the server's"),
        (refused(chain, "", None), "key.pem: ", "no private key in PEM (", "name the file with the certificate's"),
        (refused(chain, chain, None), "key.pem: ", "no private key in PEM (", "name the file with the certificate's"),
        (refused(chain, &other.server.key, None), "cert.pem with key.pem: ", "KeyMismatch", "its own key"),
        (
            refused(chain, key, Some("nothing")),
            "ca.pem: ",
            "no certificate in PEM",
            "name the file with the authorities",
        ),
    ] {
        assert!(said.starts_with(file) && said.contains(why) && said.contains(next), "{said}");
    }
    TlsServer::new(pem("", chain), pem("", key), Some(pem("", &other.authority))).unwrap();
}

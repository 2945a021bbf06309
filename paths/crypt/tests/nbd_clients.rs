//! The NBD protocol with common clients: `nbdinfo`, `nbdcopy`, `qemu-img`. The data path is the simplest possible one,
//! on an encrypted volume in memory.

use std::fs;
use std::io::{Read, Write};
use std::os::unix::net::{UnixListener, UnixStream};
use std::sync::{Arc, Mutex};
use std::thread;

use crate::common::*;
use pagemill_crypt::nbd::{Command, Config, Event, Export, Extent, Request, Session, Tls};
use pagemill_crypt::plain::Plain;
use pagemill_crypt::{SectorSize, Volume};

const SIZE: usize = 2 << 20;

/// The encrypted bytes, and their key.
struct Image {
    bytes: Mutex<Vec<u8>>,
    volume: Volume,
}

/// Serves the volumes `small` (512-byte sectors) and `large` (4096) at `path`, for as long as the test runs.
fn serve(path: &std::path::Path) -> Arc<Vec<Image>> {
    let mut exports = Vec::new();
    let mut images = Vec::new();
    for (name, sector) in [("small", 512), ("large", 4096)] {
        let sector_size = SectorSize::new(sector).unwrap();
        let plain =
            Plain { key_bytes: 64, hash: None, offset: 0, skip: 0, size: None, sector_size, counts_sectors: false };
        let volume = Volume::new(&plain.key(&pattern(64)).unwrap(), plain.geometry(SIZE as u64).unwrap()).unwrap();
        images.push(Image { bytes: Mutex::new(vec![0; SIZE]), volume });
        exports.push(Export {
            name: name.to_owned(),
            description: "a volume".to_owned(),
            size: SIZE as u64,
            is_read_only: false,
            min_block: sector as u32,
            preferred_block: 4096,
        });
    }
    let (config, images) = (Arc::new(Config { exports, tls: Tls::None, block_size_agreed: false }), Arc::new(images));
    let (listener, kept) = (UnixListener::bind(path).unwrap(), Arc::clone(&images));
    thread::spawn(move || {
        for stream in listener.incoming() {
            let (config, images) = (Arc::clone(&config), Arc::clone(&images));
            thread::spawn(move || serve_one(stream.unwrap(), config, &images));
        }
    });
    kept
}

fn serve_one(mut stream: UnixStream, config: Arc<Config>, images: &[Image]) {
    let mut out = Vec::new();
    let mut session = Session::new(config, &mut out);
    let (mut input, mut at) = (Vec::new(), 0);
    loop {
        if at == input.len() {
            stream.write_all(&out).unwrap();
            out.clear();
            input.resize(9000, 0);
            match stream.read(&mut input) {
                Ok(n) if n > 0 => input.truncate(n),
                _ => return,
            }
            at = 0;
        }
        let (taken, event) = session.feed(&input[at..], &mut out);
        at += taken;
        match event {
            Event::Continue => {}
            Event::Request(request) => {
                let image = &images[usize::from(session.export().unwrap().name == "large")];
                let mut payload = vec![0; if request.command == Command::Write { request.len as usize } else { 0 }];
                let here = payload.len().min(input.len() - at);
                payload[..here].copy_from_slice(&input[at..at + here]);
                at += here;
                stream.read_exact(&mut payload[here..]).unwrap();
                answer(image, &request, &payload, session.replies(), &mut out);
            }
            Event::Goodbye => return,
            other => panic!("{other:?}"),
        }
    }
}

fn answer(image: &Image, request: &Request, payload: &[u8], replies: pagemill_crypt::nbd::Replies, out: &mut Vec<u8>) {
    let mut bytes = image.bytes.lock().unwrap();
    let place = request.at as usize..request.at as usize + request.len as usize;
    match request.command {
        Command::Read => {
            replies.before_data(request, out);
            let start = out.len();
            out.extend_from_slice(&bytes[place]);
            image.volume.decrypt_in_place(request.at, &mut out[start..]).unwrap();
        }
        Command::Write => {
            image.volume.encrypt(request.at, payload, &mut bytes[place]).unwrap();
            replies.done(request.cookie, out);
        }
        Command::WriteZeroes => {
            image.volume.encrypt(request.at, &vec![0; request.len as usize], &mut bytes[place]).unwrap();
            replies.done(request.cookie, out);
        }
        Command::BlockStatus { .. } => {
            replies.block_status(request, &[Extent { len: request.len, is_hole: false, is_zero: false }], out);
        }
        Command::Flush | Command::Trim | Command::Cache => replies.done(request.cookie, out),
    }
}

#[test]
fn nbdinfo_and_nbdcopy_list_describe_and_copy_exports() {
    let Some(bench) = Bench::with(&["nbdinfo", "nbdcopy"]) else { return };
    let images = serve(&bench.path("socket"));
    let socket = bench.path("socket").display().to_string();
    let list: serde_json::Value =
        serde_json::from_str(&bench.ok(&format!("nbdinfo --json --list nbd+unix:///?socket={socket}"))).unwrap();
    let large = &list["exports"][1];
    assert_eq!(large["export-name"], "large", "{list}");
    assert_eq!(large["export-size"], SIZE);
    assert_eq!(large["block_size_minimum"], 4096);
    assert_eq!(large["contexts"], serde_json::json!(["base:allocation"]));
    for flag in ["can_multi_conn", "can_flush", "can_fua", "can_trim", "can_zero", "can_df"] {
        assert_eq!(large[flag], true, "{flag}");
    }
    let plain = pattern(SIZE);
    write(&bench.path("raw"), &plain);
    for name in ["small", "large"] {
        let uri = format!("nbd+unix:///{name}?socket={socket}");
        bench.ok(&format!("nbdcopy --connections=3 --flush raw {uri}"));
        bench.ok(&format!("nbdcopy {uri} back"));
        assert!(fs::read(bench.path("back")).unwrap() == plain, "{name}");
        let map = bench.ok(&format!("nbdinfo --map {uri}"));
        assert!(map.contains(&SIZE.to_string()) && map.contains("data"), "{map}");
    }
    // The images have ciphertext, which differs by the size of the sectors.
    let bytes: Vec<_> = images.iter().map(|image| image.bytes.lock().unwrap().clone()).collect();
    assert!(bytes[0] != plain && bytes[1] != plain && bytes[0] != bytes[1]);
    assert!(bytes[0][..512] == bytes[1][..512], "the first 512 bytes have the same key and tweak");
}

#[test]
fn qemu_img_writes_and_compares_exports() {
    let Some(bench) = Bench::with(&["qemu-img"]) else { return };
    let _images = serve(&bench.path("socket"));
    let mut plain = pattern(SIZE);
    plain[70_000..900_000].fill(0); // It writes zeroes without sending their bytes.
    write(&bench.path("raw"), &plain);
    for name in ["small", "large"] {
        let uri = format!("nbd+unix:///{name}?socket={}", bench.path("socket").display());
        bench.ok(&format!("qemu-img convert -n -W -f raw -O raw raw {uri}"));
        bench.ok(&format!("qemu-img compare -f raw -F raw raw {uri}"));
        plain[5] ^= 1;
        write(&bench.path("other"), &plain);
        assert_eq!(bench.run(&format!("qemu-img compare -f raw -F raw other {uri}")).status.code(), Some(1));
        plain[5] ^= 1;
    }
}

//! NBD clients that the fuzzer plays: what comes out is within the protocol, however the bytes are cut.
#![no_main]

use std::sync::Arc;

use libfuzzer_sys::fuzz_target;
use pagemill_crypt::nbd::{Command, Config, Event, Export, MAX_PAYLOAD, Session, Tls};

fuzz_target!(|bytes: &[u8]| {
    let Some((&choice, bytes)) = bytes.split_first() else { return };
    let export = |name: &str, min_block| Export {
        name: name.to_owned(),
        description: String::new(),
        size: 1 << 20,
        is_read_only: choice & 1 != 0,
        min_block,
        preferred_block: 4096,
    };
    let tls = [Tls::None, Tls::Offered, Tls::Required, Tls::None][usize::from(choice >> 1 & 3)];
    let config = Config { exports: vec![export("a", 512), export("b", 4096)], tls, block_size_agreed: false };
    let mut out = Vec::new();
    let mut session = Session::new(Arc::new(config), &mut out);
    let cut = usize::from(choice >> 3) + 1;
    let mut at = 0;
    while at < bytes.len() {
        let (taken, event) = session.feed(&bytes[at..bytes.len().min(at + cut)], &mut out);
        at += taken;
        match event {
            Event::Continue => assert!(taken > 0, "it neither takes nor says anything"),
            Event::Request(request) => {
                let export = session.export().expect("a request is one of an export");
                let end = request.at.checked_add(u64::from(request.len)).expect("it ends somewhere");
                assert!(end <= export.size && request.at.is_multiple_of(u64::from(export.min_block)), "{request:?}");
                match request.command {
                    Command::Read | Command::Write => assert!(request.len <= MAX_PAYLOAD),
                    _ => {}
                }
                if request.command == Command::Write {
                    assert!(!export.is_read_only);
                    at += request.len as usize;
                }
            }
            Event::StartTls => session.tls_started(),
            Event::Goodbye | Event::Violation(_) => break,
        }
        out.clear();
    }
});

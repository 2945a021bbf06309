//! `nfs-peers LIBRARY DIR` serves a directory over loopback with a library that the table `rpc` compares with: `nfsserve` or
//! `nfs3_server`. Its first line is the port. It serves what the table asks for and no more, to anybody on this machine: it is
//! for measuring.
//!
//! Both libraries take the file system from their user. Theirs is [`tree::Tree`], the same for both, which costs as little as it
//! can: files stay open, and are read and written by the thread that has the request.

mod nfs3_server;
mod nfsserve;
mod tree;

use std::error::Error;
use std::path::{Path, PathBuf};

use tree::Tree;

fn main() -> Result<(), Box<dyn Error>> {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    let [library, directory] = &arguments[..] else {
        return Err("usage: nfs-peers nfsserve|nfs3_server DIR".into());
    };
    let tree = Tree::new(PathBuf::from(directory));
    let runtime = tokio::runtime::Builder::new_multi_thread().enable_all().build()?;
    match library.as_str() {
        "nfsserve" => runtime.block_on(nfsserve::serve(tree, directory))?,
        "nfs3_server" => runtime.block_on(nfs3_server::serve(tree, directory))?,
        other => return Err(format!("no library {other}").into()),
    }
    Ok(())
}

/// Where both listen: a port that the system chooses.
const ADDRESS: &str = "127.0.0.1:0";

/// The last component of a request, which may be anything.
fn component(name: &[u8]) -> std::io::Result<&Path> {
    use std::os::unix::ffi::OsStrExt;
    let name = Path::new(std::ffi::OsStr::from_bytes(name));
    let is_one = name.file_name() == Some(name.as_os_str());
    if is_one { Ok(name) } else { Err(std::io::ErrorKind::PermissionDenied.into()) }
}

//! `cargo xtask vm`: tests that need a kernel to themselves, as root: its own NUMA nodes, huge pages, device mapper. Each
//! `tests/vm/NAME.sh` runs in a virtual machine of its own, on Debian's kernel, under QEMU's emulation: for correctness
//! alone, its speed means nothing.
//!
//! The script's head says what the machine has to have, a line each:
//! - `# machine: ARGS` what QEMU gets besides
//! - `# kernel: ARGS` what the kernel is told besides
//! - `# disks: NAME=SIZE[,OPTION …] …` empty images that are made for it, each a drive of that name for the machine's devices
//! - `# modules: NAME …` modules of the kernel, loaded with those that they need
//! - `# programs: NAME …` programs of this machine, copied with their libraries
//! - `# tests: CRATE/NAME …` tests of the workspace, at `/tests/NAME`; those of `pagemill-sys` at `/tests/sys-NAME`
//! - `# crate: PACKAGE` a program of the workspace, at `/bin/pagemill`

use std::collections::BTreeMap;
use std::fs;
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::Duration;

use anyhow::{Context, Result, bail};

use crate::builds::OPTIMISED;
use crate::shell::{Ran, Shell};
use crate::tally::{self, Tally};
use crate::tools::Need;

/// What the virtual machine is made with; those that a script's head names come besides.
pub(crate) const NEEDS: &[Need] = &[
    crate::tools::GCC,
    Need::Deb("qemu-system-x86", &["qemu-system-x86_64", "--version"]),
    Need::Deb("busybox-static", &["busybox", "true"]),
    Need::Deb("cpio", &["cpio", "--version"]),
    Need::Deb("kmod", &["/sbin/modprobe", "--version"]),
    Need::Deb("dpkg-dev", &["dpkg-deb", "--version"]),
    // For what the scripts do.
    crate::tools::CRYPTSETUP,
    Need::Deb("e2fsprogs", &["/sbin/mkfs.ext4", "-V"]),
    Need::Deb("nbd-client", &["/sbin/nbd-client", "-V"]),
];

/// A machine that takes longer hangs.
const LIMIT: Duration = Duration::from_secs(600);
/// What `tests/vm/init` prints first.
const STARTED: &str = "vm: started";
/// What the kernel is told. Without tests of its ciphers: under emulation one of them has hung at boot, for ever.
const APPEND: &str = "console=ttyS0 quiet panic=-1 mitigations=off cryptomgr.notests";

/// All scripts.
pub(crate) fn all(shell: &Shell) -> Result<Tally> {
    some(shell, &[])
}

/// The scripts of these names; all for none.
pub(crate) fn some(shell: &Shell, names: &[String]) -> Result<Tally> {
    let folder = shell.root.join("tests/vm");
    let mut scripts: Vec<_> = fs::read_dir(&folder)?.filter_map(|entry| Some(entry.ok()?.path())).collect();
    scripts.retain(|path| path.extension().is_some_and(|end| end == "sh"));
    scripts.sort();
    let name = |path: &PathBuf| path.file_stem().unwrap_or_default().to_string_lossy().into_owned();
    if let Some(unknown) = names.iter().find(|wanted| scripts.iter().all(|path| name(path) != **wanted)) {
        bail!(
            "there is no tests/vm/{unknown}.sh; there are {}",
            scripts.iter().map(name).collect::<Vec<_>>().join(", ")
        );
    }
    let kernel = kernel(shell)?;
    let mut tally = Tally::default();
    for script in scripts.iter().filter(|path| names.is_empty() || names.contains(&name(path))) {
        match boot(shell, &kernel, script, &name(script)) {
            Ok(found) => tally.add(found),
            Err(error) => tally.failures.push(format!("vm/{}: {error:#}", name(script))),
        }
    }
    Ok(tally)
}

/// Debian's kernel package, downloaded and unpacked, not installed. Returns where.
fn kernel(shell: &Shell) -> Result<PathBuf> {
    let folder = shell.own_target("vm-kernel");
    if image(&folder).is_ok() {
        return Ok(folder);
    }
    fs::create_dir_all(&folder)?;
    let depends = shell.command("apt-cache").arg("depends").arg("linux-image-amd64").run("vm-package")?.expect_ok()?;
    let package = depends.text.lines().find_map(|line| line.trim().strip_prefix("Depends: "));
    let package = package.context("linux-image-amd64 depends on no kernel: run `apt-get update`")?.to_owned();
    let download = shell.command("apt-get").arg("download").arg(&package).current_dir(&folder);
    download.run("vm-download")?.expect_ok()?;
    let mut deb = fs::read_dir(&folder)?.filter_map(|entry| Some(entry.ok()?.path()));
    let deb = deb.find(|path| path.extension().is_some_and(|end| end == "deb")).context("no package came")?;
    shell.command("dpkg-deb").arg("-x").arg(&deb).arg(&folder).run("vm-unpack")?.expect_ok()?;
    fs::remove_file(deb)?;
    let version = version(&folder)?;
    shell.command("/sbin/depmod").arg("-b").arg(&folder).arg(version).run("vm-depmod")?.expect_ok()?;
    Ok(folder)
}

fn image(kernel: &Path) -> Result<PathBuf> {
    Ok(kernel.join(format!("boot/vmlinuz-{}", version(kernel)?)))
}

fn version(kernel: &Path) -> Result<String> {
    let modules = fs::read_dir(kernel.join("lib/modules"))?.next().context("a kernel without modules")??;
    Ok(modules.file_name().to_string_lossy().into_owned())
}

/// Boots a machine that runs the script, and reads what it printed.
fn boot(shell: &Shell, kernel: &Path, script: &Path, name: &str) -> Result<Tally> {
    let text = fs::read_to_string(script)?;
    let head = |key: &str| -> Vec<String> {
        let prefix = format!("# {key}: ");
        let lines = text.lines().filter_map(|line| line.strip_prefix(&prefix));
        lines.flat_map(str::split_whitespace).map(str::to_owned).collect()
    };
    let root = shell.own_target("vm").join(name);
    if root.exists() {
        fs::remove_dir_all(&root)?;
    }
    for folder in ["bin", "sbin", "proc", "sys", "dev", "tmp", "run", "mnt", "tests", "modules", "etc"] {
        fs::create_dir_all(root.join(folder))?;
    }
    fs::copy(shell.root.join("tests/vm/init"), root.join("init"))?;
    fs::set_permissions(root.join("init"), fs::Permissions::from_mode(0o755))?;
    fs::copy(script, root.join("test.sh"))?;
    for program in ["busybox".to_owned()].iter().chain(&head("programs")) {
        put(&which(program)?, &root, &format!("bin/{program}"))?;
    }
    let tests = head("tests");
    if !tests.is_empty() {
        let built = test_programs(shell)?;
        for named in &tests {
            let (package, test) = named.split_once('/').context("tests are named CRATE/NAME")?;
            let program = built.get(named).with_context(|| format!("cargo named no program for {named}"))?;
            let prefix = if package == "pagemill-sys" { "sys-" } else { "" };
            put(program, &root, &format!("tests/{prefix}{test}"))?;
        }
    }
    for package in head("crate") {
        let build = shell.cargo(&format!("build --locked --release -p {package}"));
        build.limit(Duration::from_secs(900)).run("vm-build")?.expect_ok()?;
        put(&shell.target.join("release/pagemill"), &root, "bin/pagemill")?;
    }
    modules(shell, kernel, &root, &head("modules"))?;

    let initrd = root.with_extension("cpio");
    let pack = format!("find . | cpio --quiet -o -H newc > {}", quoted(&initrd));
    shell.command("sh").arg("-c").arg(pack).current_dir(&root).run("vm-pack")?.expect_ok()?;
    let start = || -> Result<Ran> {
        let mut qemu = shell.command("qemu-system-x86_64");
        qemu.args(["-machine", "q35", "-cpu", "max", "-nographic", "-no-reboot", "-net", "none", "-kernel"]);
        qemu.args([image(kernel)?.as_os_str(), "-initrd".as_ref(), initrd.as_os_str()]);
        let append: Vec<_> = [APPEND.to_owned()].into_iter().chain(head("kernel")).collect();
        qemu.args(["-append", &append.join(" ")]);
        let machine = head("machine");
        qemu.args(if machine.is_empty() { vec!["-m".to_owned(), "1024".to_owned()] } else { machine });
        for disk in head("disks") {
            qemu.args(["-drive", &self::disk(&root, &disk)?]);
        }
        qemu.limit(LIMIT).run(&format!("vm-{name}"))
    };
    let mut ran = start()?;
    let mut times = "";
    if !ran.text.contains(STARTED) {
        // A kernel that hangs as it boots, which emulated ones do at times, has run nothing of ours.
        ran = start()?;
        times = ", at the second start: the first time the kernel did not come to our program";
    }
    let log = ran.log.clone();
    let text = ran.text.replace('\r', "");
    let mut tally = tally::of_tests(&format!("vm-{name}"), &text);
    match text.lines().find_map(|line| line.strip_prefix("vm: the test ended with ")) {
        Some("0") => tally.add(Tally::pass(format!("{name}: ended well{times}"))),
        Some(code) => bail!("ended with {code}; everything it printed: {}\n{}", log.display(), ran.last_lines(40)),
        None => bail!("never ended; everything it printed: {}\n{}", log.display(), ran.last_lines(40)),
    }
    Ok(tally)
}

/// Makes an empty image, and says what QEMU is told of it. Nothing of it is kept from one run to the next.
fn disk(root: &Path, named: &str) -> Result<String> {
    let (name, rest) = named.split_once('=').context("disks are named NAME=SIZE[,OPTION …]")?;
    let (size, options) = rest.split_once(',').map_or((rest, String::new()), |(size, rest)| (size, format!(",{rest}")));
    let mib: u64 = size.strip_suffix('M').and_then(|mib| mib.parse().ok()).context("a disk's size is a number of M")?;
    let image = root.with_extension(format!("{name}.img"));
    fs::File::create(&image)?.set_len(mib << 20)?;
    // A comma in the path would end it.
    let path = image.display().to_string().replace(',', ",,");
    Ok(format!("file={path},if=none,format=raw,id={name}{options}"))
}

/// Copies a program, with the libraries that it is linked to, to where it finds them.
fn put(program: &Path, root: &Path, to: &str) -> Result<()> {
    fs::copy(program, root.join(to)).with_context(|| program.display().to_string())?;
    let listed = Command::new("ldd").arg(program).output()?;
    for library in String::from_utf8_lossy(&listed.stdout).lines().filter_map(|line| {
        let path = line.split_once("=> ").map_or(line, |(_, path)| path);
        path.split_whitespace().next().filter(|path| path.starts_with('/'))
    }) {
        let place = root.join(library.trim_start_matches('/'));
        fs::create_dir_all(place.parent().context("a library in a folder")?)?;
        fs::copy(library, place)?;
    }
    Ok(())
}

fn which(program: &str) -> Result<PathBuf> {
    let path = std::env::var_os("PATH").unwrap_or_default();
    let mut folders: Vec<_> = std::env::split_paths(&path).collect();
    folders.extend(["/sbin".into(), "/usr/sbin".into()]);
    let found = folders.into_iter().map(|folder| folder.join(program)).find(|path| path.is_file());
    found.with_context(|| format!("there is no program {program} here; install the Debian package that has it"))
}

/// Builds the tests that `test-release` builds, and returns where each is, by CRATE/NAME.
fn test_programs(shell: &Shell) -> Result<BTreeMap<String, PathBuf>> {
    let build = shell.cargo(&format!("test --locked --no-run {OPTIMISED} --lib --tests --message-format json"));
    let ran = build.limit(Duration::from_secs(900)).run("vm-build-tests")?.expect_ok()?;
    // What is no message of cargo's is its progress.
    let messages = ran.text.lines().filter_map(|line| serde_json::from_str::<serde_json::Value>(line).ok());
    let built = messages.filter_map(|message| {
        let path = PathBuf::from(message["executable"].as_str()?);
        let manifest = Path::new(message["manifest_path"].as_str()?);
        let package = manifest.parent()?.file_name()?.to_str()?;
        Some((format!("{package}/{}", message["target"]["name"].as_str()?), path))
    });
    Ok(built.collect())
}

/// The modules and what they need, in the order in which they can be loaded.
fn modules(shell: &Shell, kernel: &Path, root: &Path, names: &[String]) -> Result<()> {
    let mut order = Vec::new();
    for name in names {
        let mut modprobe = shell.command("/sbin/modprobe");
        modprobe.args(["-S".as_ref(), version(kernel)?.as_ref(), "-d".as_ref(), kernel.as_os_str()]);
        let ran = modprobe.arg("--show-depends").arg(name).run("vm-modules")?.expect_ok()?;
        for path in ran.text.lines().filter_map(|line| line.strip_prefix("insmod ")) {
            // Behind the file's name come options of this machine's, which the other does not need.
            let (folder, file) = path.trim().rsplit_once('/').context("a module is a file")?;
            let file = file.split_whitespace().next().unwrap_or_default().to_owned();
            let path = Path::new(folder).join(&file);
            if !order.contains(&file) {
                fs::copy(&path, root.join("modules").join(&file)).with_context(|| path.display().to_string())?;
                order.push(file);
            }
        }
    }
    Ok(fs::write(root.join("modules/order"), order.join("\n"))?)
}

fn quoted(path: &Path) -> String {
    format!("'{}'", path.display().to_string().replace('\'', r"'\''"))
}

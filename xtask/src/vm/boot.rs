//! Puts a machine together for a script, starts it, and reads its output.

use std::fs;
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context, Result, bail, ensure};

use super::debian::{self, Kernel};
use super::host::Host;
use super::{Arch, Script, found};
use crate::builds::{BUILD_LIMIT, OPTIMISED, lightly};
use crate::shell::{Cmd, Ran, Shell, quoted};
use crate::suites;
use crate::tally::Tally;

/// What a machine says of its steps, and of tests, begins so.
const TOLD: &[&str] = &[STARTED, "== ", "vm: begin ", "vm: the test ended "];
/// The first line that `tests/vm/init` prints.
const STARTED: &str = "vm: started";
/// Arguments for every kernel. `cryptomgr.notests`: under emulation a test of a cipher has hung at boot, for ever. `norandmaps`:
/// QEMU translates a program anew for each address that it lies at, which takes a third of a second for each process.
const APPEND: &str = "quiet panic=-1 mitigations=off cryptomgr.notests norandmaps";
/// A machine may take this many times its processor time by the clock. A machine that hangs still serves its timer, so it is
/// never idle.
const WALL: u64 = 10;

/// A program that takes the place of `pagemill` on this machine, to see what a script says of another server.
const OTHER_SERVER: &str = "PAGEMILL_VM_SERVER";

const TARGET: &str = "aarch64-unknown-linux-gnu";
/// The packages of the library's tests and of the program. Cargo then selects one set of features for the dependencies of both,
/// and compiles them once.
const CROSS: &str = "-p pagemill-core -p pagemill-os -p pagemill -p pagemill-nvme";
/// The features of the program that need no C compiler.
const CROSS_PROGRAM: &str = "--no-default-features --features nvme";

impl Arch {
    /// QEMU for this processor, and the options of every machine.
    fn qemu(self) -> (&'static str, &'static [&'static str]) {
        match self {
            Self::X86_64 => ("qemu-system-x86_64", &["-machine", "q35", "-cpu", "max"]),
            // QEMU's own pointer authentication. The architecture's would take most of the time.
            Self::Aarch64 => ("qemu-system-aarch64", &["-machine", "virt", "-cpu", "max,pauth-impdef=on"]),
        }
    }

    fn console(self) -> &'static str {
        match self {
            Self::X86_64 => "ttyS0",
            Self::Aarch64 => "ttyAMA0",
        }
    }
}

/// Runs a script in a machine of its own.
pub(super) fn run(shell: &Shell, script: &Script) -> Result<Tally> {
    shell.tell(&format!("{}: fetching the kernel, building what runs in the machine", script.name));
    let kernel = Kernel::fetch(shell, script.arch, script.head("kernel-package").first().map(String::as_str))?;
    let root = shell.own_target("vm").join(&script.name);
    fill(shell, script, &root)?;
    modules(shell, &kernel, &root, &script.head("modules"))?;
    let host = host(shell, script)?;
    fs::write(root.join("etc/host"), host.as_ref().map_or("", |host| &host.facts))?;
    let initrd = root.with_extension("cpio");
    let pack = format!("find . | cpio --quiet -o -H newc > {}", quoted(&initrd));
    shell.command("sh").arg("-c").arg(pack).current_dir(&root).run("vm-pack")?.expect_ok()?;

    let network: &[_] = if host.is_some() { &["-nic", "user,model=virtio-net-pci"] } else { &["-net", "none"] };
    let start = || start(shell, script, &kernel, &root, &initrd, network);
    let mut ran = start()?;
    let mut times = "";
    if !ran.text.contains(STARTED) {
        // An emulated kernel sometimes hangs at boot, before it starts our program.
        ran = start()?;
        times = ", at the second start: the first time the kernel did not come to our program";
    }
    judge(script, &ran, times, shell.filter.is_some())
}

/// `is_part`: a filter selects tests, of which this machine may have none.
fn judge(script: &Script, ran: &Ran, times: &str, is_part: bool) -> Result<Tally> {
    let text = ran.text.replace('\r', "");
    let mut tally = found::read(&text);
    match text.lines().find_map(|line| line.strip_prefix("vm: the test ended with ")) {
        Some("0") if is_part && tally.passed + tally.skips.len() == 0 => {}
        Some("0") if tally.failures.is_empty() => {
            tally.add(Tally::pass(format!("{}: ended well{times}", script.name)));
        }
        Some("0") => {}
        code => {
            let how = code.map_or_else(|| format!("never ended: {}", ran.end), |code| format!("ended with {code}"));
            tally.fail("", format!("{how}; everything it printed: {}\n{}", ran.log.display(), ran.last_lines(40)));
        }
    }
    Ok(tally)
}

/// Fills a folder with the machine's root file system.
fn fill(shell: &Shell, script: &Script, root: &Path) -> Result<()> {
    if root.exists() {
        fs::remove_dir_all(root)?;
    }
    for folder in ["bin", "sbin", "proc", "sys", "dev", "tmp", "run", "mnt", "tests", "modules", "etc", "lib"] {
        fs::create_dir_all(root.join(folder))?;
    }
    let files = shell.root.join("tests/vm");
    put(&files.join("init"), &root.join("init"))?;
    for entry in fs::read_dir(files.join("bin"))? {
        let entry = entry?;
        put(&entry.path(), &root.join("bin").join(entry.file_name()))?;
    }
    fs::copy(&script.path, root.join("test.sh"))?;
    for name in script.head("files") {
        let from = files.join("etc").join(&name);
        fs::copy(&from, root.join("etc").join(&name)).with_context(|| from.display().to_string())?;
    }
    fs::write(root.join("etc/filter"), shell.filter.as_deref().unwrap_or_default())?;

    let programs = script.head("programs");
    match script.arch {
        Arch::X86_64 => {
            for program in ["busybox".to_owned()].iter().chain(&programs) {
                put_linked(&which(program)?, root, &format!("bin/{program}"))?;
            }
        }
        Arch::Aarch64 => {
            ensure!(programs.is_empty(), "programs of this machine do not run on aarch64");
            put_userland(&debian::userland(shell, script.arch)?, root)?;
        }
    }
    let tests = script.head("tests");
    let built = if tests.is_empty() { Vec::new() } else { test_programs(shell, script.arch)? };
    for name in &tests {
        let (package, kind) = name.strip_suffix(".unit").map_or((name.as_str(), "test"), |package| (package, "lib"));
        let program = built.iter().find(|program| program.package == package && program.kind == kind);
        let program = program.with_context(|| format!("cargo built no {name}"))?;
        put_built(script.arch, &program.path, root, &format!("tests/{name}"))?;
    }
    for name in script.head("examples") {
        ensure!(script.arch == Arch::X86_64, "examples are built for this machine's processor");
        let (package, example) = name.split_once('/').context("examples are named PACKAGE/EXAMPLE")?;
        let build = format!("build --locked --release -p {package} --example {example}");
        shell.cargo(&build).limit(BUILD_LIMIT).run("vm-build-example")?.expect_ok()?;
        put_linked(&shell.target.join("release/examples").join(example), root, &format!("bin/{example}"))?;
    }
    for package in script.head("crate") {
        put_built(script.arch, &program(shell, script.arch, &package)?, root, "bin/pagemill")?;
    }
    Ok(())
}

/// The server on this machine that the script uses.
fn host(shell: &Shell, script: &Script) -> Result<Option<Host>> {
    let head = script.head("host");
    let Some((kind, args)) = head.split_first() else { return Ok(None) };
    let server = match std::env::var_os(OTHER_SERVER) {
        Some(other) => other.into(),
        None => program(shell, Arch::X86_64, "pagemill-cli")?,
    };
    Host::start(shell, server, kind, args).map(Some)
}

fn start(shell: &Shell, script: &Script, kernel: &Kernel, root: &Path, initrd: &Path, network: &[&str]) -> Result<Ran> {
    let limit = script.limit()?;
    let (program, options) = script.arch.qemu();
    let console = format!("console={}", script.arch.console());
    let append: Vec<_> = [console, APPEND.to_owned()].into_iter().chain(script.head("kernel")).collect();
    let machine = script.head("machine");
    let machine = if machine.is_empty() { vec!["-m".to_owned(), "1024".to_owned()] } else { machine };
    let wall = (WALL * limit.as_secs()).to_string();
    let mut qemu = shell.command("timeout").args(["--kill-after=5", &wall, program]).args(options);
    qemu = qemu.args(["-nographic", "-no-reboot", "-append", &append.join(" ")]).args(network).args(machine);
    qemu = qemu.arg("-kernel").arg(kernel.image()).arg("-initrd").arg(initrd);
    for disk in script.head("disks") {
        qemu = qemu.args(["-drive", &self::disk(root, &disk)?]);
    }
    let log = format!("vm-{}", script.name);
    shell.tell(&format!("{}: starting the machine; its output: {}", script.name, shell.log(&log).display()));
    qemu.limit(limit).run_telling(&log, TOLD)
}

/// Makes an empty image, and returns QEMU's argument for it. Each run starts with an empty image.
fn disk(root: &Path, named: &str) -> Result<String> {
    let (name, rest) = named.split_once('=').context("disks are named NAME=SIZE[,OPTION …]")?;
    let (size, options) = rest.split_once(',').map_or((rest, String::new()), |(size, rest)| (size, format!(",{rest}")));
    let mib: u64 = size.strip_suffix('M').and_then(|mib| mib.parse().ok()).context("a disk's size is a number of M")?;
    let image = root.with_extension(format!("{name}.img"));
    fs::File::create(&image)?.set_len(mib << 20)?;
    // QEMU reads two commas as one that does not end the path.
    let path = image.display().to_string().replace(',', ",,");
    Ok(format!("file={path},if=none,format=raw,id={name}{options}"))
}

/// Copies a program and makes it executable.
fn put(program: &Path, to: &Path) -> Result<()> {
    fs::copy(program, to).with_context(|| program.display().to_string())?;
    Ok(fs::set_permissions(to, fs::Permissions::from_mode(0o755))?)
}

/// Copies a program that cargo built, for this machine's processor with the libraries that it is linked to.
fn put_built(arch: Arch, program: &Path, root: &Path, to: &str) -> Result<()> {
    match arch {
        Arch::X86_64 => put_linked(program, root, to),
        Arch::Aarch64 => put(program, &root.join(to)),
    }
}

/// Copies a program, and the libraries that it is linked to, to the places where it looks for them.
fn put_linked(program: &Path, root: &Path, to: &str) -> Result<()> {
    put(program, &root.join(to))?;
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

/// Copies the shell, and the libraries that Rust's programs are linked to.
fn put_userland(userland: &Path, root: &Path) -> Result<()> {
    let find = |name: &str| {
        // Debian is moving the files below /usr.
        let folders =
            ["bin", "lib", "lib/aarch64-linux-gnu"].iter().flat_map(|it| [it.to_string(), format!("usr/{it}")]);
        let place = folders.map(|folder| userland.join(folder).join(name)).find(|path| path.exists());
        place.with_context(|| format!("Debian's packages have no {name}"))
    };
    put(&find("busybox")?, &root.join("bin/busybox"))?;
    for library in ["ld-linux-aarch64.so.1", "libc.so.6", "libm.so.6", "libgcc_s.so.1"] {
        put(&find(library)?, &root.join("lib").join(library))?;
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

/// A cargo command for aarch64. Without assertions, as on x86-64 in virtual machines: under emulation they would use up the time
/// of a test or a child of stress. With little optimisation and no lines for backtraces, which makes less to compile, pack and
/// unpack.
fn cross<'a>(shell: &'a Shell, args: &str) -> Cmd<'a> {
    let cargo = lightly(shell, &format!("{args} --target {TARGET}"));
    cargo.env("CARGO_TARGET_AARCH64_UNKNOWN_LINUX_GNU_LINKER", "aarch64-linux-gnu-gcc")
}

/// Builds the test programs. On x86-64 they are those that `test-release` builds.
fn test_programs(shell: &Shell, arch: Arch) -> Result<Vec<suites::Program>> {
    let cargo = match arch {
        Arch::X86_64 => shell.cargo(&format!("test --locked {OPTIMISED} --lib --tests")).limit(BUILD_LIMIT),
        Arch::Aarch64 => cross(shell, &format!("test --locked --release {CROSS} --lib --tests")),
    };
    Ok(suites::build(cargo, "vm-build-tests")?.tests)
}

/// Builds the program `pagemill`. For aarch64 it leaves out the features that need a C compiler.
fn program(shell: &Shell, arch: Arch, package: &str) -> Result<PathBuf> {
    let build = format!("build --locked --release -p {package}");
    let (cargo, folder) = match arch {
        Arch::X86_64 => (shell.cargo(&build).limit(BUILD_LIMIT), shell.target.join("release")),
        Arch::Aarch64 => (cross(shell, &format!("{build} {CROSS_PROGRAM}")), shell.target.join(TARGET).join("release")),
    };
    cargo.run("vm-build")?.expect_ok()?;
    let program = folder.join("pagemill");
    if !program.exists() {
        bail!("{package} has no program pagemill");
    }
    Ok(program)
}

/// Copies the modules and those that they need, and writes down the order in which they can be loaded.
fn modules(shell: &Shell, kernel: &Kernel, root: &Path, names: &[String]) -> Result<()> {
    let mut order = Vec::new();
    for name in names {
        let modprobe = shell.command("/sbin/modprobe").args(["-S", &kernel.version, "-d"]).arg(&kernel.root);
        let ran = modprobe.args(["--show-depends", name]).run("vm-modules")?.expect_ok()?;
        for path in ran.text.lines().filter_map(|line| line.strip_prefix("insmod ")) {
            // Options behind the file's name belong to this machine.
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

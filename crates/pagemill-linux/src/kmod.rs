//! `pagemill-kmod FILE.c`: compiles a module of the Linux kernel, links it with Pagemill, and runs it in a process.
//!
//! The main function of that process is in `module.c`: it sets the module's parameters, calls its functions, and says what it leaves
//! behind. Here is what comes before: finding headers and libraries, compiling, and saying what is to be done about an error.

use std::env;
use std::ffi::{c_int, c_ulong};
use std::fs;
use std::io::{self, Write};
use std::os::unix::process::{CommandExt, ExitStatusExt};
use std::path::{Path, PathBuf};
use std::process::{Command, ExitCode, Stdio};
use std::time::SystemTime;

use clap::Parser;

#[path = "../install.rs"]
mod install;
#[path = "../../pagemill-capi/install.rs"]
mod libraries;

/// This crate's folder, as long as the program is run where it was built.
const FOLDER: &str = env!("CARGO_MANIFEST_DIR");

/// Run a module of the Linux kernel in a process, on Pagemill's pages
///
/// Compiles FILE.c as it stands against headers under the kernel's names. Then
/// calls the module's first function, and, if that returned 0 or more, its last
/// one. What the module says (pr_info and so on) goes to standard output, as in
/// the kernel's log; warnings and what pagemill-kmod says go to standard error.
#[derive(Parser)]
#[command(name = "pagemill-kmod", version, verbatim_doc_comment, after_help = AFTER_HELP)]
struct Args {
    /// The module's source file
    #[arg(value_name = "FILE.c", required = true)]
    file: PathBuf,
    /// More files in C that belong to it, and its parameters
    #[arg(value_name = "FILE.c|NAME=VALUE")]
    rest: Vec<String>,
    /// Zero all memory that is allocated, as init_on_alloc=1 in the kernel
    #[arg(long)]
    init_on_alloc: bool,
    /// Look for headers in this folder too, before Pagemill's
    #[arg(short = 'I', value_name = "DIR")]
    include: Vec<PathBuf>,
    /// Keep the program that was compiled, and say where: for a debugger
    #[arg(long)]
    keep: bool,
}

const AFTER_HELP: &str = "\
Examples:
  pagemill-kmod lib/test_free_pages.c
  pagemill-kmod --init-on-alloc lib/test_meminit.c
  pagemill-kmod lib/test_vmalloc.c nr_threads=2 test_loop_count=1000

On Debian, `apt-get install linux-source` brings the kernel's own test modules,
packed in /usr/src.

Exit codes:
  0  the first function returned 0 or more, nothing was warned of, and all
     memory is freed
  1  anything else that happened while the module ran
  2  the module does not compile or has no first function, or a parameter or the
     command line is wrong

Environment:
  CC, CFLAGS               the compiler (cc) and more options for it, divided at
                           spaces; quotes are passed on as they are
  PAGEMILL_FAIL=after=100  pages run out, after a hundred trips to a zone";

fn main() -> ExitCode {
    let args = Args::parse();
    match run(&args) {
        Ok(code) => code,
        Err(message) => {
            say(&format!("pagemill-kmod: {message}\n"));
            ExitCode::from(2)
        }
    }
}

/// Writes to standard error. Whoever closed that wants to read no more.
fn say(text: &str) {
    _ = io::stderr().write_all(text.as_bytes());
}

fn run(args: &Args) -> Result<ExitCode, String> {
    let (more, parameters): (Vec<&String>, Vec<&String>) =
        args.rest.iter().partition(|word| word.ends_with(".c") && !word.contains('='));
    let mut sources = vec![args.file.clone()];
    sources.extend(more.into_iter().map(PathBuf::from));
    for source in &mut sources {
        let found = fs::metadata(&*source).map_err(|error| {
            let next = "name a module's source file: one of a kernel's source, for example (Debian: apt-get install linux-source)";
            format!("{}: {error}; {next}", source.display())
        })?;
        if found.is_dir() {
            return Err(format!("{} is a folder; name a module's source file in it", source.display()));
        }
        if source.as_os_str().as_encoded_bytes().starts_with(b"-") {
            // The compiler would take it for an option.
            *source = Path::new(".").join(&*source);
        }
    }
    signal(SIGINT, keep_on);
    let stem = args.file.file_stem().unwrap_or_default().to_string_lossy();
    let name: String = stem.chars().map(|c| if c.is_alphanumeric() { c } else { '_' }).collect();
    let folder = tempfile::Builder::new().prefix("pagemill-kmod-").tempdir();
    let folder = folder.map_err(|error| format!("no folder for the program: {error}; set TMPDIR to another place"))?;
    let program = folder.path().join(&name);
    compile(&sources, &args.include, &name, &program)?;
    if args.keep {
        // Its folder stays.
        say(&format!("pagemill-kmod: the program is {}\n", folder.keep().join(&name).display()));
    }
    let mut command = Command::new(&program);
    command.args(args.init_on_alloc.then_some("--init-on-alloc")).arg(&name).args(parameters).stdin(Stdio::null());
    // SAFETY: one system call, which touches nothing of this process's.
    unsafe { command.pre_exec(end_with_parent) };
    let status = command.status().map_err(|error| format!("{}: {error}", program.display()))?;
    // With ^C, and as soon as nobody reads the log (`| head`), a program just ends.
    if let Some(signal) = status.signal().filter(|&signal| signal != SIGINT && signal != SIGPIPE) {
        let next = "run it with --keep, and the program in gdb";
        say(&format!("pagemill-kmod: {name}: {} ended it; {next}\n", signal_name(signal)));
    }
    Ok(ExitCode::from(status.code().map_or(1, |code| u8::try_from(code).unwrap_or(1))))
}

const SIGINT: c_int = 2;
const SIGPIPE: c_int = 13;
unsafe extern "C" {
    safe fn signal(signal: c_int, handler: extern "C" fn(c_int)) -> usize;
    safe fn prctl(what: c_int, value: c_ulong) -> c_int;
}

/// A module may run for ever: if this program is killed, it goes too.
fn end_with_parent() -> io::Result<()> {
    const PR_SET_PDEATHSIG: c_int = 1;
    const SIGKILL: c_ulong = 9;
    if prctl(PR_SET_PDEATHSIG, SIGKILL) == 0 { Ok(()) } else { Err(io::Error::last_os_error()) }
}

/// ^C ends the compiler or the module, which do not inherit this function. Then this program removes its folder.
extern "C" fn keep_on(_signal: c_int) {}

/// Compiles and links a module.
fn compile(sources: &[PathBuf], include: &[PathBuf], name: &str, program: &Path) -> Result<(), String> {
    let prefix = prefix()?;
    let headers = prefix.join("include");
    let compiler = env::var("CC").unwrap_or_else(|_| "cc".to_owned());
    let mut words = compiler.split_whitespace();
    let mut cc = Command::new(words.next().ok_or("CC is set to nothing: unset it, or name a compiler")?);
    // The kernel's own choice of language and options, as far as they change what a program means.
    cc.args(words).args(["-std=gnu11", "-O2", "-g", "-fno-strict-aliasing", "-fwrapv", "-rdynamic"]);
    cc.args(["-Werror=implicit-function-declaration", "-D__KERNEL__", "-DMODULE"]);
    cc.arg(format!("-DKBUILD_MODNAME=\"{name}\"")).arg(format!("-DKBUILD_BASENAME=\"{name}\""));
    for folder in include.iter().chain([&headers.join("pagemill-linux"), &headers]) {
        cc.arg("-I").arg(folder);
    }
    cc.args(env::var("CFLAGS").unwrap_or_default().split_whitespace()).args(sources).arg("-o").arg(program);
    cc.args(["lib/libpagemill-linux.a", "lib/libpagemill.a"].map(|library| prefix.join(library)));
    cc.args(libraries::SYSTEM.split(' ')).env("LC_ALL", "C");
    let ran = cc.output().map_err(|error| {
        format!("{compiler}: {error}; install a C compiler (Debian: apt-get install gcc), or name one in CC")
    })?;
    let said = String::from_utf8_lossy(&ran.stderr);
    say(&said);
    if ran.status.success() {
        return Ok(());
    }
    let hints: String = hints(&said).iter().map(|hint| format!("\n  {hint}")).collect();
    Err(format!("{} does not compile{hints}", sources[0].display()))
}

/// What to do about a compiler's errors.
fn hints(said: &str) -> Vec<String> {
    let mut hints = Vec::new();
    for line in said.lines() {
        let hint = if let Some(header) = between(line, "fatal error: ", ": No such file")
            .or_else(|| between(line, "fatal error: '", "' file not found"))
        {
            format!(
                "There is no {header} here. Write what the module needs of it into a file DIR/{header}, and add -I DIR. \
                 If other modules need it too: crates/pagemill-linux/include/pagemill-linux/{header} in Pagemill's source."
            )
        } else if let Some(function) = between(line, "implicit declaration of function '", "'")
            .or_else(|| between(line, "call to undeclared function '", "'"))
        {
            format!(
                "No header that the module includes has {function}. Declare it in a header of yours (-I DIR), and define it in a \
                 file of yours, named behind the module: pagemill-kmod FILE.c MORE.c"
            )
        } else if let Some(what) = between(line, "undefined reference to `", "'") {
            format!(
                "Nothing defines {what}. Define it in a file of yours, named behind the module: pagemill-kmod FILE.c MORE.c"
            )
        } else {
            continue;
        };
        if !hints.contains(&hint) {
            hints.push(hint);
        }
    }
    hints
}

fn between<'a>(line: &'a str, before: &str, after: &str) -> Option<&'a str> {
    let (_, rest) = line.split_once(before)?;
    rest.split_once(after).map(|(found, _)| found)
}

/// The folder with `include` and `lib`: where this program is installed, or, in the tree that it was built in, one beside it.
fn prefix() -> Result<PathBuf, String> {
    let program = env::current_exe().map_err(|error| format!("this program's own place: {error}"))?;
    let here = program.parent().ok_or("this program lies in no folder")?;
    let installed = here.join("..");
    if installed.join("lib/libpagemill-linux.a").exists() {
        return Ok(installed);
    }
    let in_tree = in_build_tree(here)
        .map_err(|error| format!("installing headers and libraries beside this program: {error}"))?;
    in_tree.ok_or_else(|| {
        let lib = installed.join("lib/libpagemill-linux.a");
        format!(
            "there is no {}: run `cargo xtask install --prefix DIR` in Pagemill's source, and DIR/bin/pagemill-kmod",
            lib.display()
        )
    })
}

/// Installs below a folder that is named by the time of the newest file that goes into it, unless that exists.
fn in_build_tree(here: &Path) -> io::Result<Option<PathBuf>> {
    let folder = Path::new(FOLDER);
    let Some(archive) = newest_archive(&here.join("deps"))? else { return Ok(None) };
    if !folder.join("include").exists() {
        return Ok(None);
    }
    let mut newest = archive.metadata()?.modified()?;
    for part in ["include", "src", "../pagemill-capi/include"] {
        newest = newest.max(newest_below(&folder.join(part))?);
    }
    let time = newest.duration_since(SystemTime::UNIX_EPOCH).unwrap_or_default().as_nanos();
    let prefix = here.join(format!("pagemill-kmod-{time}"));
    if !prefix.exists() {
        let begun = tempfile::tempdir_in(here)?;
        let version = env!("CARGO_PKG_VERSION");
        libraries::install(&archive, &folder.join("../pagemill-capi"), version, begun.path())?;
        install::install(folder, version, begun.path())?;
        // Another run of this program may have been faster.
        if fs::rename(begun.path(), &prefix).is_ok() {
            let _ = begun.keep();
        }
    }
    Ok(Some(prefix))
}

fn newest_archive(deps: &Path) -> io::Result<Option<PathBuf>> {
    let Ok(files) = fs::read_dir(deps) else { return Ok(None) };
    let mut newest: Option<(SystemTime, PathBuf)> = None;
    for entry in files {
        let path = entry?.path();
        let name = path.file_name().unwrap_or_default().to_string_lossy();
        if name.starts_with("libpagemill_capi") && name.ends_with(".a") {
            newest = newest.max(Some((path.metadata()?.modified()?, path)));
        }
    }
    Ok(newest.map(|(_, path)| path))
}

fn newest_below(folder: &Path) -> io::Result<SystemTime> {
    let mut newest = SystemTime::UNIX_EPOCH;
    for entry in fs::read_dir(folder)? {
        let entry = entry?;
        let is_folder = entry.file_type()?.is_dir();
        newest = newest.max(if is_folder { newest_below(&entry.path())? } else { entry.metadata()?.modified()? });
    }
    Ok(newest)
}

fn signal_name(signal: i32) -> String {
    let names =
        [(4, "SIGILL"), (6, "SIGABRT"), (7, "SIGBUS"), (8, "SIGFPE"), (9, "SIGKILL"), (11, "SIGSEGV"), (15, "SIGTERM")];
    let known = names.iter().find(|(number, _)| *number == signal);
    known.map_or_else(|| format!("signal {signal}"), |(_, name)| (*name).to_owned())
}

//! Formatting, lints, builds and the ordinary tests.
//!
//! Nearly all builds share one folder, one profile and one choice of packages, so that the dependencies are compiled once: cargo
//! selects features for each choice of packages, and keeps separate objects for each profile. The profile is the one that a user
//! builds with. Tests add assertions and overflow checks ([`checked`]) in the project's own crates; Cargo.toml keeps both out of
//! the dependencies.

use std::env;
use std::fs;
use std::io;
use std::path::{Path, PathBuf};
use std::time::Duration;

use anyhow::{Context, Result, ensure};

use crate::paths;
use crate::shell::{Cmd, Ran, Shell};
use crate::suites::{self, Built, Suite};
use crate::tally::{self, Tally};
use crate::tools::OLDEST;
use crate::{change, papers};

/// The crates that a user's program links.
pub(crate) const LIBRARY: &str = "-p pagemill-core -p pagemill-os -p pagemill -p pagemill-capi -p pagemill-watch";

/// The fuzz targets are no member of the workspace: they build only on nightly.
const FUZZ: &str = "fuzz/Cargo.toml";

/// The program that puts small faults into a copy of the library is no member either: nothing else needs it.
pub(crate) const MUTANTS: &str = "tests/mutants/Cargo.toml";

/// Processor time for a build from nothing, with the C of the peers.
pub(crate) const BUILD_LIMIT: Duration = Duration::from_secs(1800);

/// All crates, with the features that none of the project's programs turns on. The table `rpc` finds its peers beside `pagemill`.
const WORKSPACE: &str = "--workspace --features pagemill/bytes,pagemill/compio,pagemill/cuda,pagemill/monoio,pagemill/object_store,pagemill/tokio-uring,pagemill/uring,pagemill-watch/metrics,pagemill-nfs-bench/peers";

/// The optimisation level of each crate in [`lightly`]. Optimising takes longer than the tests save by it, except in code that
/// tests run millions of times.
const LIGHTLY: &[(&str, u8)] = &[
    ("pagemill-core", 1),
    ("pagemill-os", 1),
    ("pagemill", 1),
    ("pagemill-watch", 0),
    ("pagemill-capi", 1),
    ("pagemill-linux", 0),
    ("pagemill-crypt", 1),
    ("pagemill-harness", 0),
    ("pagemill-bench", 0),
    ("pagemill-crypt-bench", 0),
    ("pagemill-cli", 0),
    ("pagemill-command", 0),
    ("pagemill-nfs", 0),
    ("pagemill-nfs-bench", 0),
    ("pagemill-nvme", 0),
    ("pagemill-xdp", 0),
    ("pagemill-xdp-bench", 0),
    ("pagemill-checks", 0),
];

/// A cargo command that optimises the project's own crates only as far as their tests need.
pub(crate) fn lightly<'a>(shell: &'a Shell, args: &str) -> Cmd<'a> {
    let (task, rest) = args.split_once(' ').unwrap_or((args, ""));
    // Four units a crate instead of sixteen: a tenth less code is compiled twice, and two processors are as busy.
    let levels = LIGHTLY.iter().map(|(name, level)| {
        let key = format!("--config profile.release.package.{name}");
        format!(" {key}.opt-level={level} {key}.codegen-units=4")
    });
    // A panic names its line without debug information.
    let cargo = shell.cargo(&format!("{task}{} {rest}", levels.collect::<String>()));
    cargo.env("CARGO_PROFILE_RELEASE_DEBUG", "none").limit(BUILD_LIMIT)
}

/// Shares intermediate objects with the ordinary build. The programs go to a folder of their own, so that they are not mistaken
/// for those that a user builds.
pub(crate) fn beside<'a>(shell: &'a Shell, cargo: Cmd<'a>, name: &str) -> Cmd<'a> {
    cargo.env("CARGO_BUILD_BUILD_DIR", &shell.target).env("CARGO_TARGET_DIR", shell.own_target(name))
}

/// As [`lightly`], with assertions and overflow checks in the project's crates.
fn checked<'a>(shell: &'a Shell, args: &str) -> Cmd<'a> {
    let cargo = lightly(shell, args).env("CARGO_PROFILE_RELEASE_DEBUG_ASSERTIONS", "true");
    beside(shell, cargo.env("CARGO_PROFILE_RELEASE_OVERFLOW_CHECKS", "true"), "checked")
}

pub(crate) fn fmt(shell: &Shell) -> Result<Tally> {
    let mut tally = Tally::default();
    const NO_OS: &str = "tests/no-os/Cargo.toml";
    for (what, manifest) in
        [("the workspace", "Cargo.toml --all"), ("no-os", NO_OS), ("mutants", MUTANTS), ("fuzz", FUZZ)]
    {
        if manifest == FUZZ && !shell.root.join(FUZZ).exists() {
            continue; // The step `fuzz` says so.
        }
        let check = format!("fmt --check --manifest-path {manifest} -- --color never");
        let ran = shell.cargo(&check).run("fmt")?;
        let files: Vec<_> = ran.text.lines().filter_map(|line| line.strip_prefix("Diff in ")).collect();
        if ran.is_ok() {
            tally.add(Tally::pass(what));
        } else if files.is_empty() {
            ran.expect_ok()?;
        } else {
            let first = files.iter().take(8).map(|file| format!("\n{file}")).collect::<String>();
            tally.fail("", format!("{what}: cargo fmt would change {} places{first}", files.len()));
        }
    }
    Ok(tally)
}

pub(crate) fn clippy(shell: &Shell) -> Result<Tally> {
    let everything = format!("clippy --locked --release {WORKSPACE} --all-targets -- -D warnings");
    shell.cargo(&everything).limit(BUILD_LIMIT).run("clippy")?.expect_ok()?;
    if !shell.is_quick {
        // The only feature that changes the behaviour of the library.
        let bare = "clippy --locked --release -p pagemill --all-targets --features full-states -- -D warnings";
        shell.cargo(bare).limit(BUILD_LIMIT).run("clippy-full-states")?.expect_ok()?;
    }
    Ok(Tally::pass("all targets"))
}

/// `pagemill` must build for a user whose only C compiler is the linker's driver. A build script that starts a C compiler gets a
/// program that fails.
pub(crate) fn library(shell: &Shell) -> Result<Tally> {
    let build = shell.cargo("build --locked --release -p pagemill").env("CC", "false").env("CXX", "false");
    build.limit(BUILD_LIMIT).run("build")?.expect_ok()?;
    Ok(Tally::pass("cargo build -p pagemill, with CC and CXX set to a program that fails"))
}

/// Elsewhere than on Linux, the first error that a user sees says that Pagemill is for Linux; core builds.
pub(crate) fn elsewhere(shell: &Shell) -> Result<Tally> {
    let check = |name: &str| {
        let check = shell.cargo(&format!("check --locked --target x86_64-pc-windows-gnu -p {name}"));
        check.env("CARGO_TARGET_DIR", shell.own_target("elsewhere")).limit(BUILD_LIMIT).run("elsewhere")
    };
    check("pagemill-core")?.expect_ok()?;
    let text = check("pagemill")?.text;
    let first = text.lines().find(|line| line.starts_with("error")).context("pagemill builds for Windows")?;
    ensure!(first.starts_with("error: Pagemill runs on Linux alone"), "the first error is: {first}");
    Ok(Tally::pass("for Windows, core builds, and pagemill says that it is for Linux"))
}

/// The toolchain that `rust-version` promises must build the library.
pub(crate) fn oldest(shell: &Shell) -> Result<Tally> {
    let manifest = fs::read_to_string(shell.root.join("Cargo.toml"))?;
    let promise = format!("rust-version = \"{OLDEST}\"");
    ensure!(manifest.contains(&promise), "Cargo.toml does not say {promise}, as xtask/src/tools.rs does");
    let check = shell.cargo(&format!("+{OLDEST} check --locked {LIBRARY}"));
    let check = check.env("CARGO_TARGET_DIR", shell.own_target("oldest"));
    check.limit(BUILD_LIMIT).run("oldest")?.expect_ok()?;
    Ok(Tally::pass(format!("Rust {OLDEST}")))
}

/// Builds every test, except those of the paths that [`left_out`] names.
fn everything(shell: &Shell, step: &str) -> Result<Built> {
    let left_out = left_out(shell)?;
    let left_out: String = left_out.iter().map(|path| format!(" --exclude {}", path.package)).collect();
    // Without a choice of targets cargo builds examples as programs, with `--examples` as test harnesses.
    let test = format!("test --locked --release {WORKSPACE}{left_out}");
    suites::build(checked(shell, &test), &format!("{step}-build"))
}

/// The paths whose tests can be left out: if this change lies within other paths, the ones it did not touch.
fn left_out(shell: &Shell) -> Result<Vec<&'static paths::Path>> {
    Ok(if shell.is_all { Vec::new() } else { paths::untouched(&change::files(shell)?.unwrap_or_default()) })
}

pub(crate) fn tests(shell: &Shell) -> Result<Tally> {
    let built = everything(shell, "tests")?;
    let left_out = left_out(shell)?;
    let of_others: Vec<_> =
        left_out.iter().flat_map(|path| path.program_tests).map(|name| format!("{name}::")).collect();
    let is_of_others = |package: &str, test: &str| {
        package == "pagemill-cli" && of_others.iter().any(|module| test.starts_with(module.as_str()))
    };
    let suite = Suite::new(shell, "tests").only(|program, test| !is_of_others(&program.package, test));
    // No backend is forced: a test that tries both does so, and the others get the backend that a user gets.
    let why = no_rseq(shell, &built)?;
    let mut tally = suite.run(&built.tests)?;
    if let Some(why) = why {
        // The tests ran on the portable lists instead: report it as a skip.
        tally.add(Tally::skip("tests", format!("restartable sequences: {why}")));
    }
    if !left_out.is_empty() {
        let names: Vec<_> = left_out.iter().map(|path| path.name).collect();
        tally.notes.push(format!("left to `cargo xtask test --all`, as nothing of it changed: {}", names.join(", ")));
    }
    at_least_one(shell, tally, "tests")
}

/// The modules of tests that run on whichever backend they are given, by package. The others choose a backend, run on both, or use
/// no lists.
const TAKE_A_BACKEND: &[(&str, &str)] = &[
    (
        "pagemill",
        "device_rings devices dma_pool fork fork_and_locks fork_short forms give_back memory memory_limit pressure races \
         refused shrinkers",
    ),
    (
        "pagemill-capi",
        "pages_come_and_go_in_every_form misuse_is_refused_and_changes_nothing signal_handlers_allocate_and_free",
    ),
    (
        "pagemill-linux",
        "pages_come_and_go_in_every_form misuse_is_refused_and_changes_nothing \
         pools_serve_from_their_reserve_and_take_back_what_it_lacks",
    ),
    ("pagemill-watch", "metrics_facade serve_http serve_stats"),
    ("pagemill-checks", "zero"),
];

/// The tests that choose no backend, on the portable lists.
pub(crate) fn portable(shell: &Shell) -> Result<Tally> {
    let built = everything(shell, "portable")?;
    let takes = |program: &suites::Program, test: &str| {
        let modules = TAKE_A_BACKEND.iter().find(|(package, _)| *package == program.package);
        let module = test.split("::").next().unwrap_or_default();
        modules.is_some_and(|(_, modules)| program.kind == "lib" || modules.split(' ').any(|it| it == module))
    };
    let suite = Suite::new(shell, "portable").only(takes).env("PAGEMILL_BACKEND", "portable");
    at_least_one(shell, suite.run(&built.tests)?, "portable")
}

/// The unit tests of the crates in which something changed since main.
pub(crate) fn unit(shell: &Shell) -> Result<Tally> {
    let folders = papers::folders(shell)?;
    let packages = match change::files(shell)? {
        Some(files) => change::packages(&files, &folders),
        // Without a main to compare with, all packages count as changed.
        None => folders.keys().cloned().collect(),
    };
    if packages.is_empty() {
        return Ok(Tally { notes: vec!["no crate has changed since main".to_owned()], ..Tally::default() });
    }
    let named: String = packages.iter().map(|name| format!(" -p {name}")).collect();
    // Cargo refuses `--lib` if none of the packages has a library.
    let has_library =
        |name: &&String| folders.get(*name).is_some_and(|it| shell.root.join(it).join("src/lib.rs").exists());
    let library = if packages.iter().any(|name| has_library(&name)) { " --lib" } else { "" };
    let test = format!("test --locked --release{named}{library} --bins");
    let built = suites::build(checked(shell, &test), "unit-build")?;
    let mut tally = Suite::new(shell, "unit").run(&built.tests)?;
    tally.notes.push(packages.into_iter().collect::<Vec<_>>().join(", "));
    Ok(tally)
}

/// The library as a user builds it, without assertions.
pub(crate) const OPTIMISED: &str =
    "--release -p pagemill-core -p pagemill-os -p pagemill -p pagemill-capi -p pagemill-watch";

pub(crate) fn test_release(shell: &Shell) -> Result<Tally> {
    let test = shell.cargo(&format!("test --locked {OPTIMISED} --lib --tests")).limit(BUILD_LIMIT);
    let built = suites::build(test, "test-release-build")?;
    at_least_one(shell, Suite::new(shell, "test-release").fewer_cases().run(&built.tests)?, "test-release")
}

/// Compares docs/one-page.md with a trace of a real page.
pub(crate) fn one_page(shell: &Shell) -> Result<Tally> {
    let test = checked(shell, "test --locked --release -p pagemill --features trace --test tests");
    let built = suites::build(test, "one-page-build")?;
    at_least_one(shell, Suite::new(shell, "one-page").run(&built.tests)?, "one-page")
}

/// Why restartable sequences do not work here, as the library reports it; none if they work.
fn no_rseq(shell: &Shell, built: &Built) -> Result<Option<String>> {
    let backend = built.programs.get("backend").context("pagemill-checks has a program `backend`")?;
    let ran = shell.command(backend).env("PAGEMILL_BACKEND", "rseq").run("tests-backend")?;
    if let Some(why) = ran.text.lines().find_map(|line| line.strip_prefix("unavailable: ")) {
        return Ok(Some(why.to_owned()));
    }
    let ran = ran.expect_ok()?;
    ensure!(ran.text.contains("backend: rseq"), "rseq was forced, and this came: {}", ran.text);
    Ok(None)
}

/// A step that ran no test at all has failed, unless a filter selects tests.
pub(crate) fn at_least_one(shell: &Shell, mut tally: Tally, step: &str) -> Result<Tally> {
    if shell.filter.is_none() && tally.passed == 0 && tally.skips.is_empty() && tally.failures.is_empty() {
        tally.fail("", format!("{step} ran no test at all"));
    }
    Ok(tally)
}

/// Counts the tests of a cargo command that runs them itself. It must end well and run at least one test.
pub(crate) fn count(shell: &Shell, step: &str, ran: Ran) -> Result<Tally> {
    let mut tally = tally::of_tests(step, &ran.text);
    if !ran.is_ok() {
        let Some(first) = tally.failures.first_mut() else {
            ran.expect_ok()?;
            return Ok(tally);
        };
        first.why = format!("{}\n{}", ran.how_it_ended(), tally::said_by_failures(&ran.text));
    }
    at_least_one(shell, tally, step)
}

/// Does all that publishing the library's crates takes, in the order in which they need each other, but for the upload: packs each,
/// and builds it from its package alone.
pub(crate) fn packages(shell: &Shell) -> Result<Tally> {
    const CRATES: [&str; 5] = ["pagemill-core", "pagemill-os", "pagemill", "pagemill-capi", "pagemill-watch"];
    let names = CRATES.map(|name| format!(" -p {name}")).concat();
    let target = shell.own_target("packages");
    forget_packages(&target)?;
    // Uncommitted files are packed too: the check is of what stands here.
    let publish = shell.cargo(&format!("publish --dry-run --locked --allow-dirty{names}"));
    let publish = publish.env("CARGO_TARGET_DIR", &target).limit(BUILD_LIMIT).run("packages")?.expect_ok()?;
    let mut tally = Tally::default();
    for lacks in publish.text.lines().filter(|line| line.starts_with("warning: manifest has no")) {
        tally.fail("", lacks.to_owned());
    }
    for name in CRATES {
        let files = shell.cargo(&format!("package --locked --allow-dirty --list -p {name}")).run("packages-list")?;
        let has = |wanted: &str| files.text.lines().any(|line| line == wanted);
        match ["LICENSE-MIT", "LICENSE-APACHE", "README.md"].into_iter().find(|wanted| !has(wanted)) {
            None => tally.add(Tally::pass(name)),
            Some(lacks) => tally.fail("", format!("the package {name} has no {lacks}")),
        }
    }
    for name in FIRST_PROGRAMS {
        outside(shell, &target, name)?;
        tally.add(Tally::pass(format!("{name}, outside of the workspace")));
    }
    Ok(tally)
}

/// Removes what an earlier run built and unpacked. Cargo takes a registry's package for unchanged as long as its version is:
/// `publish` unpacks each crate from a registry of its own to where cargo keeps those of all registries.
fn forget_packages(target: &Path) -> Result<()> {
    let cargo_home = env::var_os("CARGO_HOME").map(PathBuf::from);
    let cargo_home = cargo_home.or_else(|| Some(env::home_dir()?.join(".cargo"))).context("no home folder")?;
    let mut old = vec![target.join("debug")];
    for registry in entries(&cargo_home.join("registry/src"))? {
        // The registry of a folder has no host in its name.
        if registry.file_name().is_some_and(|name| name.as_encoded_bytes().starts_with(b"-")) {
            let is_ours = |package: &PathBuf| {
                package.file_name().is_some_and(|name| name.as_encoded_bytes().starts_with(b"pagemill"))
            };
            old.extend(entries(&registry)?.into_iter().filter(is_ours));
        }
    }
    for folder in old.iter().filter(|folder| folder.exists()) {
        fs::remove_dir_all(folder).with_context(|| folder.display().to_string())?;
    }
    Ok(())
}

/// The paths of what is in a folder; none if there is no such folder.
fn entries(folder: &Path) -> Result<Vec<PathBuf>> {
    match fs::read_dir(folder) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(Vec::new()),
        Err(error) => Err(error).with_context(|| folder.display().to_string()),
        Ok(entries) => entries.map(|entry| Ok(entry?.path())).collect(),
    }
}

/// The examples that are like the programs that people write first.
const FIRST_PROGRAMS: [&str; 3] = ["cache", "kv_blocks", "uring_server"];

/// Builds and runs an example as a user's program, from the packages that lie unpacked in `target`.
fn outside(shell: &Shell, target: &Path, name: &str) -> Result<()> {
    let place = target.join("user");
    let package = |name: &str| target.join("package").join(format!("{name}-{}", env!("CARGO_PKG_VERSION")));
    let patch = ["pagemill-core", "pagemill-os", "pagemill"]
        .map(|name| format!("{name} = {{ path = {:?} }}\n", package(name).display().to_string()));
    let manifest = format!(
        "[package]\nname = \"user\"\nversion = \"0.0.0\"\nedition = \"2024\"\n[workspace]\n\
         [dependencies]\nio-uring = \"0.7\"\nlibc = \"0.2\"\npagemill = \"{}\"\n[patch.crates-io]\n{}",
        env!("CARGO_PKG_VERSION"),
        patch.concat()
    );
    fs::create_dir_all(place.join("src"))?;
    fs::write(place.join("Cargo.toml"), manifest)?;
    // So that it has the versions that are there already, also without a network.
    fs::copy(shell.root.join("Cargo.lock"), place.join("Cargo.lock"))?;
    fs::copy(package("pagemill").join("examples").join(format!("{name}.rs")), place.join("src/main.rs"))?;
    let run = shell.cargo("run --release").current_dir(&place).env("CARGO_TARGET_DIR", target.join("user/target"));
    run.limit(BUILD_LIMIT).run(&format!("packages-{name}"))?.expect_ok()?;
    Ok(())
}

pub(crate) fn doctest(shell: &Shell) -> Result<Tally> {
    let test = checked(shell, &format!("test --locked --no-fail-fast --release {WORKSPACE} --doc --"));
    count(shell, "doctest", test.args(&shell.filter).run("doctest")?)
}

/// The names of the Rust programs in a folder, sorted; at least one.
pub(crate) fn programs_in(folder: &Path) -> Result<Vec<String>> {
    let mut names = Vec::new();
    for entry in fs::read_dir(folder).with_context(|| folder.display().to_string())? {
        let path = entry?.path();
        if path.extension().is_some_and(|end| end == "rs") {
            names.extend(path.file_stem().map(|stem| stem.to_string_lossy().into_owned()));
        }
    }
    names.sort();
    ensure!(!names.is_empty(), "{}: no program in it", folder.display());
    Ok(names)
}

/// Runs each program in crates/pagemill/examples.
pub(crate) fn examples(shell: &Shell) -> Result<Tally> {
    let built = everything(shell, "examples")?;
    let mut tally = Tally::default();
    for name in programs_in(&shell.root.join("crates/pagemill/examples"))? {
        let program = built.programs.get(&name).with_context(|| format!("cargo built no example {name}"))?;
        match shell.command(program).run(&format!("examples-{name}"))?.expect_ok() {
            Ok(ran) => tally.add(match ran.text.lines().find_map(|line| line.strip_prefix("skipped: ")) {
                None => Tally::pass(name),
                Some(why) => Tally::skip(format!("examples/{name}"), why),
            }),
            Err(error) => tally.fail(format!("examples/{name}"), format!("{error:#}")),
        }
    }
    Ok(tally)
}

pub(crate) fn rustdoc(shell: &Shell) -> Result<Tally> {
    // Private items too: the modules' theories are written on them, and public items link to them. The program `pagemill` is
    // left out, because its page would replace the library's.
    const FEATURES: &str = "pagemill/bytes,pagemill/compio,pagemill/cuda,pagemill/monoio,pagemill/object_store,pagemill/tokio-uring,pagemill/uring";
    let all = "doc --locked --release --workspace --exclude pagemill-cli --no-deps --document-private-items";
    let doc = shell.cargo(&format!("{all} --features {FEATURES}"));
    doc.env("RUSTDOCFLAGS", "-D warnings -A rustdoc::private_intra_doc_links")
        .limit(BUILD_LIMIT)
        .run("rustdoc")?
        .expect_ok()?;
    let mut tally = Tally::pass("every crate, with -D warnings");
    for features in feature_sets(shell)? {
        let doc = shell.cargo(&format!("doc --locked --release -p pagemill --no-deps {features}"));
        let doc = doc.env("RUSTDOCFLAGS", "-D warnings").env("CARGO_TARGET_DIR", shell.own_target("rustdoc"));
        doc.limit(BUILD_LIMIT).run("rustdoc-features")?.expect_ok()?;
        tally.add(Tally::pass(format!("pagemill, {features}")));
    }
    // As docs.rs builds it: with nightly, which marks what needs a feature.
    let docs_rs = "doc --locked -p pagemill-os -p pagemill -p pagemill-watch --no-deps";
    let features = format!("--features {FEATURES},pagemill-watch/metrics");
    let flags = "--cfg docsrs -D warnings -A rustdoc::private_intra_doc_links";
    let doc = shell.nightly(&format!("{docs_rs} {features}")).env("RUSTDOCFLAGS", flags);
    let target = shell.own_target("docs-rs");
    doc.env("CARGO_TARGET_DIR", &target).limit(BUILD_LIMIT).run("rustdoc-docs-rs")?.expect_ok()?;
    let page = fs::read_to_string(target.join("doc/pagemill/struct.Cuda.html"))?;
    ensure!(page.contains("Available on <strong>crate feature <code>cuda</code></strong>"), "Cuda has no badge");
    tally.add(Tally::pass("as docs.rs builds it, with badges of features"));
    Ok(tally)
}

/// Arguments for cargo: none of the features of `pagemill`, each alone, and all.
fn feature_sets(shell: &Shell) -> Result<Vec<String>> {
    let manifest: toml::Table = fs::read_to_string(shell.root.join("crates/pagemill/Cargo.toml"))?.parse()?;
    let features = manifest["features"].as_table().context("pagemill has features")?;
    let each = features.keys().map(|name| format!("--features {name}"));
    Ok(["--no-default-features".to_owned()].into_iter().chain(each).chain(["--all-features".to_owned()]).collect())
}

pub(crate) fn release(shell: &Shell) -> Result<Tally> {
    shell.cargo("build --locked --release").limit(BUILD_LIMIT).run("release")?.expect_ok()?;
    Ok(Tally::pass("cargo build --release"))
}

//! Checks of compiled code: the sizes of the hot functions and what they call, the descriptors of the restartable sequences, and
//! that core links without a library below it.

use std::collections::BTreeMap;
use std::fs;
use std::path::PathBuf;

use anyhow::{Context, Result, ensure};
use object::{Object, ObjectSection, ObjectSymbol, RelocationTarget, SymbolKind};

use crate::shell::Shell;
use crate::tally::Tally;

/// Parts of the mangled names of functions that a hot function must not call directly. Code that formats belongs in a cold
/// function out of line (C3.15). A bare panic is such a function already, and is allowed.
const COLD: &[&str] = &["core9panicking9panic_fmt", "4core3fmt", "core..fmt..", "5alloc3fmt", "3std2io"];

/// The file with the most bytes that each hot function may have.
const LIMITS: &str = "tests/checks/limits.toml";

/// Objects for this target are compiled and not run.
const AARCH64: &str = "aarch64-unknown-linux-gnu";

/// Compiles `pagemill-checks` into one object file, for this machine or for a target.
fn checks_object(shell: &Shell, target: Option<&str>) -> Result<PathBuf> {
    let name = target.unwrap_or("host");
    let object = shell.own_target("objects").join(format!("checks-{name}.o"));
    fs::create_dir_all(object.parent().expect("a file in a directory"))?;
    let target = target.map(|target| format!(" --target {target}")).unwrap_or_default();
    let build = shell.cargo(&format!("rustc --locked --release -p pagemill-checks --lib{target} --"));
    let build = build.arg("-Ccodegen-units=1").arg(format!("--emit=obj={}", object.display()));
    build.run(&format!("object-{name}"))?.expect_ok()?;
    Ok(object)
}

/// Compares the sizes of the functions `hot_*` with their limits, and looks at what they call.
pub(crate) fn sizes(shell: &Shell) -> Result<Tally> {
    let path = checks_object(shell, None)?;
    let data = fs::read(&path)?;
    let hot = hot_functions(&object::File::parse(&*data)?)?;
    let limits = fs::read_to_string(shell.root.join(LIMITS)).context(LIMITS)?;
    let limits: BTreeMap<String, u64> = toml::from_str(&limits).context(LIMITS)?;
    let mut problems = Vec::new();
    let mut table = format!("{:<26} {:>6} {:>6}  calls\n", "hot function", "bytes", "limit");
    for (name, function) in &hot {
        let Some(limit) = limits.get(name) else {
            problems.push(format!("{name} has {} bytes, and no limit in {LIMITS}", function.bytes));
            continue;
        };
        table.push_str(&format!("{name:<26} {:>6} {limit:>6}  {}\n", function.bytes, function.calls.len()));
        if function.bytes > *limit {
            problems.push(format!("{name} has {} bytes, {limit} are allowed ({LIMITS})", function.bytes));
        }
        for call in function.calls.iter().filter(|call| COLD.iter().any(|cold| call.contains(cold))) {
            problems.push(format!("{name} formats by itself: it calls {call}"));
        }
    }
    for name in limits.keys().filter(|name| !hot.contains_key(*name)) {
        problems.push(format!("{LIMITS} names {name}, which is not there"));
    }
    ensure!(!hot.is_empty(), "{}: no function hot_*", path.display());
    Ok(Tally::from_problems(problems, table))
}

struct Hot {
    bytes: u64,
    calls: Vec<String>,
}

/// The functions `hot_*` of an object file in which each function has a section of its own.
fn hot_functions(file: &object::File<'_>) -> Result<BTreeMap<String, Hot>> {
    let mut hot = BTreeMap::new();
    for symbol in file.symbols().filter(|symbol| symbol.kind() == SymbolKind::Text) {
        let name = symbol.name()?;
        if !name.starts_with("hot_") {
            continue;
        }
        let section = file.section_by_index(symbol.section_index().context("a function without a section")?)?;
        let mut calls = Vec::new();
        for (_, relocation) in section.relocations() {
            let RelocationTarget::Symbol(index) = relocation.target() else { continue };
            let callee = file.symbol_by_index(index)?;
            // An undefined symbol or a function is a call. Other symbols are data.
            if callee.is_undefined() || callee.kind() == SymbolKind::Text {
                calls.push(callee.name()?.to_owned());
            }
        }
        calls.sort();
        calls.dedup();
        hot.insert(name.to_owned(), Hot { bytes: symbol.size(), calls });
    }
    Ok(hot)
}

/// Links core into a static program with no library below it, and runs the program.
pub(crate) fn no_os(shell: &Shell) -> Result<Tally> {
    const TARGET: &str = "x86_64-unknown-none";
    let target = shell.own_target("no-os");
    let build = shell.cargo(&format!("build --locked --release --target {TARGET}"));
    let lint = shell.cargo(&format!("clippy --locked --release --target {TARGET} -- -D warnings"));
    for (cargo, log) in [(lint, "no-os-clippy"), (build, "no-os-build")] {
        // Cargo finds the flags in the .cargo/config.toml of that folder.
        let cargo = cargo.current_dir(shell.root.join("tests/no-os")).env("CARGO_TARGET_DIR", &target);
        cargo.run(log)?.expect_ok()?;
    }
    let program = target.join(TARGET).join("release").join("no-os");
    let data = fs::read(&program).with_context(|| program.display().to_string())?;
    let file = object::File::parse(&*data)?;
    ensure!(file.section_by_name(".interp").is_none(), "{}: asks for a dynamic loader", program.display());
    let missing: Vec<_> = file.symbols().filter(|symbol| symbol.is_undefined()).filter_map(|s| s.name().ok()).collect();
    let missing: Vec<_> = missing.into_iter().filter(|name| !name.is_empty()).collect();
    ensure!(missing.is_empty(), "{}: left open by the linker: {missing:?}", program.display());
    let ran = shell.command(&program).run("no-os")?.expect_ok()?;
    ensure!(ran.text.contains("frames out and in three times"), "{}: said {:?}", program.display(), ran.text);
    Ok(Tally::pass(format!("linked for {TARGET}, then run: {}", ran.text.trim())))
}

/// Compiles the library for aarch64 and checks the descriptor of each restartable sequence.
pub(crate) fn aarch64(shell: &Shell) -> Result<Tally> {
    let path = checks_object(shell, Some(AARCH64))?;
    let data = fs::read(&path)?;
    let found = descriptors(&object::File::parse(&*data)?, 0xd428_bc00)?;
    ensure!(found > 0, "{}: no restartable sequence in it", path.display());
    // The sequences of x86-64 are known to run: reading their descriptors too shows that the reader is right.
    let path = checks_object(shell, None)?;
    let data = fs::read(&path)?;
    let on_x86 = descriptors(&object::File::parse(&*data)?, 0x5305_3053)?;
    ensure!(on_x86 > 0, "{}: no restartable sequence in it", path.display());
    Ok(Tally::pass(format!("{found} descriptors on aarch64, {on_x86} on x86-64: version, range and signature hold")))
}

/// Checks every `struct rseq_cs` in the object and returns their number. A descriptor has 32 bytes: version and flags (both 0),
/// start, length, abort handler. Relocations fill in the start and the abort handler. The four bytes in front of the abort handler
/// must be the signature, or the kernel kills the process.
fn descriptors(file: &object::File<'_>, signature: u32) -> Result<usize> {
    const SIZE: u64 = 32;
    const START: u64 = 8;
    const LENGTH: u64 = 16;
    const ABORT: u64 = 24;
    let mut found = 0;
    for section in file.sections().filter(|section| section.name().is_ok_and(is_descriptor_section)) {
        let data = section.data()?;
        ensure!((data.len() as u64).is_multiple_of(SIZE), "{}: {} bytes", section.name()?, data.len());
        ensure!(section.align() >= SIZE, "{}: aligned to {}", section.name()?, section.align());
        let pointers: BTreeMap<u64, object::Relocation> = section.relocations().collect();
        for at in (0..data.len() as u64).step_by(SIZE as usize) {
            let word = |offset: u64| -> Result<u64> {
                let from = (at + offset) as usize;
                Ok(u64::from_le_bytes(data[from..from + 8].try_into()?))
            };
            ensure!(word(0)? == 0, "a descriptor's version or flags are not 0");
            let start = pointers.get(&(at + START)).context("a descriptor without a start")?;
            let abort = pointers.get(&(at + ABORT)).context("a descriptor without an abort handler")?;
            let (start_section, start) = place(file, start)?;
            let (abort_section, abort) = place(file, abort)?;
            // The length is a number, or a difference that the linker fills in.
            let length = word(LENGTH)?;
            let is_outside = abort_section != start_section || abort < start || abort >= start + length;
            ensure!(length > 0 || pointers.contains_key(&(at + LENGTH)), "a descriptor of an empty range");
            ensure!(is_outside, "an abort handler inside its own sequence");
            let code = file.section_by_index(abort_section)?;
            let code = code.data()?;
            let from = usize::try_from(abort)?.checked_sub(4).context("an abort handler with nothing in front")?;
            let before = u32::from_le_bytes(code.get(from..from + 4).context("no code")?.try_into()?);
            ensure!(before == signature, "in front of an abort handler: {before:#x}, not {signature:#x}");
            found += 1;
        }
    }
    Ok(found)
}

/// Whether a section holds descriptors; `__rseq_cs_ptr_array` holds pointers to them.
fn is_descriptor_section(name: &str) -> bool {
    name.starts_with("__rseq_cs") && !name.contains("ptr")
}

/// The target of a relocation: a section, and an offset in it.
fn place(file: &object::File<'_>, relocation: &object::Relocation) -> Result<(object::SectionIndex, u64)> {
    let RelocationTarget::Symbol(index) = relocation.target() else {
        anyhow::bail!("a descriptor's pointer that leads to no symbol");
    };
    let symbol = file.symbol_by_index(index)?;
    let section = symbol.section_index().context("a descriptor's pointer that leads out of the object")?;
    Ok((section, symbol.address().wrapping_add_signed(relocation.addend())))
}

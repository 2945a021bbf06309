//! Runs the commands of the README and of the programs' page as they stand. The README's Rust example is a doc test of
//! `pagemill-checks`.

use std::fs;

use anyhow::{Context, Result, ensure};

use crate::shell::Shell;
use crate::tally::Tally;

/// The documents whose commands are run.
const DOCUMENTS: [&str; 2] = ["README.md", "docs/programs.md"];

/// The line that opens a block of commands.
const FENCE: &str = "\n```sh\n";

/// The command that runs this step, so this step cannot run it.
const THIS: &str = "cargo xtask test";

pub(crate) fn commands(shell: &Shell) -> Result<Tally> {
    let mut scripts = Vec::new();
    for document in DOCUMENTS {
        let text = fs::read_to_string(shell.root.join(document)).context(document)?;
        let before = scripts.len();
        scripts.extend(blocks(&text).map(|block| (document, block.to_owned())));
        ensure!(scripts.len() > before, "{document} has no block {FENCE:?}");
    }
    // The commands write files to target/, which is another folder than `shell.target` if CARGO_TARGET_DIR is set.
    fs::create_dir_all(shell.root.join("target"))?;
    let mut tally = Tally::default();
    for (number, (document, block)) in scripts.iter().enumerate() {
        let script: String = block.lines().filter(|line| line.trim() != THIS).map(|line| format!("{line}\n")).collect();
        if script.trim().is_empty() {
            continue;
        }
        let sh = shell.command("sh").args(["-eu", "-c", &script]).env("CARGO_TARGET_DIR", &shell.target);
        let sh = if shell.is_offline { sh.env("CARGO_NET_OFFLINE", "true") } else { sh };
        let ran = sh.run(&format!("readme-{}", number + 1))?;
        let first = script.lines().next().unwrap_or_default().to_owned();
        match ran.expect_ok() {
            Ok(_) => tally.add(Tally::pass(first)),
            Err(error) => tally.fail("", format!("{document}: {first}: {error:#}")),
        }
    }
    Ok(tally)
}

/// The blocks of commands, in order.
fn blocks(text: &str) -> impl Iterator<Item = &str> {
    text.split(FENCE).skip(1).filter_map(|rest| rest.split("\n```").next())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_blocks_of_commands_are_found() {
        let text = "a\n```sh\none\ntwo\n```\n```rust\nlet x;\n```\n```sh\nthree\n```\n";
        assert_eq!(blocks(text).collect::<Vec<_>>(), ["one\ntwo", "three"]);
    }
}

//! The terminal while the table is live: the alternate screen, and keys one by one. At the end the terminal is as it was, whatever
//! ends the program.
use std::io::{self, Write};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering::Relaxed};

use rustix::termios::{LocalModes, OptionalActions, SpecialCodeIndex, Termios, tcgetattr, tcgetwinsize, tcsetattr};
use signal_hook::consts::{SIGHUP, SIGINT, SIGTERM, SIGTSTP, SIGWINCH};

/// Enters the alternate screen and hides the cursor; and back.
const ENTER: &str = "\x1b[?1049h\x1b[?25l";
const LEAVE: &str = "\x1b[?25h\x1b[?1049l";

/// The terminal. Dropping restores it.
pub(super) struct Screen {
    /// The modes of standard input before, if it is a terminal.
    before: Option<Termios>,
    /// The signal that has come to end the program, or 0.
    end: Arc<AtomicUsize>,
    /// Whether SIGTSTP has come.
    pause: Arc<AtomicBool>,
}

impl Screen {
    pub(super) fn enter() -> io::Result<Self> {
        let mut screen = Self { before: None, end: Arc::default(), pause: Arc::default() };
        for signal in [SIGINT, SIGTERM, SIGHUP] {
            signal_hook::flag::register_usize(signal, Arc::clone(&screen.end), signal as usize)?;
        }
        signal_hook::flag::register(SIGTSTP, Arc::clone(&screen.pause))?;
        // The signal ends the wait, and the table is drawn anew.
        signal_hook::flag::register(SIGWINCH, Arc::default())?;
        screen.take()?;
        Ok(screen)
    }

    /// The signal that has come to end the program, if any.
    pub(super) fn ended_by(&self) -> Option<i32> {
        // Relaxed: only the number itself is read.
        Some(self.end.load(Relaxed) as i32).filter(|signal| *signal != 0)
    }

    /// After SIGTSTP, gives the terminal back and stops this program until the shell continues it.
    pub(super) fn pause_if_asked(&mut self) -> io::Result<()> {
        if self.pause.swap(false, Relaxed) {
            self.restore();
            signal_hook::low_level::raise(signal_hook::consts::SIGSTOP)?;
            self.take()?;
        }
        Ok(())
    }

    /// Takes the terminal: keys come one by one and are not shown. Ctrl-C and the like still send signals.
    fn take(&mut self) -> io::Result<()> {
        // If standard input is no terminal, there are no keys.
        self.before = tcgetattr(io::stdin()).ok();
        if let Some(before) = &self.before {
            let mut now = before.clone();
            now.local_modes -= LocalModes::ICANON | LocalModes::ECHO;
            now.special_codes[SpecialCodeIndex::VMIN] = 1;
            now.special_codes[SpecialCodeIndex::VTIME] = 0;
            tcsetattr(io::stdin(), OptionalActions::Now, &now)?;
        }
        say(ENTER)
    }

    fn restore(&mut self) {
        // With the terminal gone there is nothing to restore.
        let _ = say(LEAVE);
        if let Some(before) = self.before.take() {
            let _ = tcsetattr(io::stdin(), OptionalActions::Now, &before);
        }
    }

    pub(super) fn has_keys(&self) -> bool {
        self.before.is_some()
    }

    /// Draws as many lines as there is room for, from line `top` on, and `foot` below them. Lowers `top` if fewer lines than fit
    /// would be shown.
    pub(super) fn draw(&self, lines: &[String], top: &mut usize, foot: &str) -> io::Result<()> {
        let size = tcgetwinsize(io::stdout()).ok();
        let (rows, columns) = size.map_or((24, 80), |size| (size.ws_row as usize, size.ws_col as usize));
        // A terminal that does not know its size reports 0.
        let (rows, columns) = (if rows == 0 { 24 } else { rows }, if columns == 0 { 80 } else { columns });
        let room = rows - 1;
        *top = (*top).min(lines.len().saturating_sub(room));
        let mut frame = String::from("\x1b[H");
        for line in lines[*top..].iter().take(room) {
            frame.extend(line.chars().take(columns));
            frame.push_str("\x1b[K\r\n");
        }
        let hidden = lines.len().saturating_sub(room);
        let more = if hidden == 0 { String::new() } else { format!("; j and k scroll, {hidden} lines more") };
        frame.push_str("\x1b[J");
        frame.extend(format!("{foot}{more}").chars().take(columns));
        say(&frame)
    }
}

impl Drop for Screen {
    fn drop(&mut self) {
        self.restore();
    }
}

fn say(text: &str) -> io::Result<()> {
    let mut out = io::stdout().lock();
    out.write_all(text.as_bytes())?;
    out.flush()
}

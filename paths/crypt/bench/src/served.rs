//! Over NBD: fio on a unix socket, against each server in turn.
//!
//! In each turn our servers are new processes with new images: as in `inside`, the place of a process and its image in
//! memory makes one of two equal servers faster for as long as it runs.

use std::time::{Duration, Instant};

use crate::client::{Seen, lacking, measure};
use crate::servers::{How, Make, Place, Server, Stop};
use crate::{BESIDE, BULK, CELLS, Cell, LARGE, Plan, failed};
use pagemill_harness::record::Record;
use pagemill_harness::rounds::{CellSamples, Sample};
use pagemill_harness::rounds::{Kind, Unavailable};
use pagemill_harness::{Error, Run};

/// The peer that the bars compare with, and the server that does not encrypt.
pub(crate) const LUKS: &str = "nbdkit-luks";
pub(crate) const NO_ENCRYPTION: &str = "nbdkit";

pub(crate) fn served(run: &mut Run<'_>, plan: &Plan) -> Result<Vec<Record>, Error> {
    let stop = Stop::watch().map_err(|error| failed("waiting for signals", error))?;
    let ours = |name, how| Make { name, kind: Kind::Ours, how };
    let mut makes = vec![ours(BULK, How::Pagemill), ours(LARGE, How::PagemillLarge)];
    if run.is_compared {
        makes.push(Make { name: LUKS, kind: Kind::Peer, how: How::NbdkitLuks });
        match plan.is_deep {
            true => makes.push(Make { name: "qemu-nbd", kind: Kind::Peer, how: How::QemuNbd }),
            false => run.note_absent("qemu-nbd", "-", &Unavailable("left out by --quick".to_owned())),
        }
        makes.push(Make { name: NO_ENCRYPTION, kind: Kind::Floor, how: How::Nbdkit });
    }
    let place = match Place::new(run.program, plan.image, makes.len() as u64) {
        Ok(place) => place,
        Err(why) => {
            run.note_absent("all over NBD", "-", &why);
            return Ok(Vec::new());
        }
    };
    let mut servers = Vec::new();
    for make in makes {
        run.progress.set_message(format!("crypt: starting {}", make.name));
        match Server::start(make, run.program, &place, &stop)? {
            Ok(server) => servers.push(server),
            Err(why) if make.kind == Kind::Ours => return Err(failed(make.name, why)),
            Err(why) => run.note_absent(make.name, "-", &why),
        }
    }
    let mut turns = Turns { run, place: &place, stop: &stop, plan, servers };
    turns.warm()?;
    turns.all()
}

struct Turns<'r, 'a> {
    run: &'r mut Run<'a>,
    place: &'r Place,
    stop: &'r Stop,
    plan: &'r Plan,
    servers: Vec<Server>,
}

impl Turns<'_, '_> {
    /// Runs each server once, untimed. A peer that does not work is left out; without fio all are.
    fn warm(&mut self) -> Result<(), Error> {
        if let Some(why) = lacking("fio") {
            self.run.note_absent("all over NBD", "-", &why);
            self.servers.clear();
        }
        for at in (0..self.servers.len()).rev() {
            let server = &self.servers[at];
            let warmed = measure(self.place.folder(), &server.socket, &CELLS[1], self.plan.turn / 3, self.stop)?;
            if let Err(why) = warmed {
                let make = self.servers.remove(at).make;
                if make.kind == Kind::Ours {
                    return Err(failed(make.name, why));
                }
                self.run.note_absent(make.name, "-", &why);
            }
        }
        Ok(())
    }

    /// Replaces a server of ours by a new one.
    fn renew(&mut self, at: usize) -> Result<(), Error> {
        if self.servers[at].make.kind != Kind::Ours {
            return Ok(());
        }
        // The old one ends before the new one starts: they have the same socket and image.
        let make = self.servers.remove(at).make;
        let server = Server::start(make, self.run.program, self.place, self.stop)?;
        // It worked a moment ago.
        self.servers.insert(at, server.map_err(|why| failed(make.name, why))?);
        Ok(())
    }

    /// Measures every cell in every turn, so that what slows the machine for a while slows some rounds of all cells.
    fn all(mut self) -> Result<Vec<Record>, Error> {
        let mut cells = self.plan.cells();
        cells.push(BESIDE);
        let mut samples: Vec<Vec<CellSamples>> = cells.iter().map(|cell| self.samples(cell)).collect();
        // The mean duration of a round of one server in the previous turn.
        let mut of_one = Duration::ZERO;
        let count = self.servers.len();
        let rounds = (count * cells.len()).max(1) as u32;
        for turn in 0..self.plan.turns {
            let start = Instant::now();
            // The first turn runs however late it is: a table without figures is worse than one that takes long.
            if turn > 0 && start + of_one * rounds > self.plan.until {
                break;
            }
            let starts = if turn > 0 { count } else { 0 };
            (0..starts).try_for_each(|at| self.renew(at))?;
            for (cell, samples) in cells.iter().zip(&mut samples) {
                self.run.progress.set_message(format!("crypt: NBD, {}, turn {}", cell.shown, turn + 1));
                for place in 0..count {
                    let at = (place + turn) % count;
                    // At that depth it takes seconds.
                    if cell.depth == 256 && self.servers[at].make.how == How::QemuNbd {
                        continue;
                    }
                    let (seen, cpu_ns) = self.round(at, cell)?;
                    samples[at].samples.push(Sample::whole(seen.ns_a_page));
                    samples[at].latencies_us.push(seen.latency_us);
                    samples[at].cpu_ns.push(cpu_ns);
                }
                if turn == 0 {
                    self.run.progress.inc(1);
                }
            }
            of_one = start.elapsed() / rounds;
        }
        Ok(samples.into_iter().flatten().filter_map(CellSamples::record).collect())
    }

    /// The client's figures, and the server's processor time a page in nanoseconds.
    fn round(&self, at: usize, cell: &Cell) -> Result<(Seen, f64), Error> {
        let server = &self.servers[at];
        let name = || format!("{}, {}", server.make.name, cell.shown);
        let used = || server.cpu_time().map_err(|error| failed(&name(), error));
        let before = used()?;
        let measured = measure(self.place.folder(), &server.socket, cell, self.plan.turn, self.stop)?;
        // It worked a moment ago. Without this round the table would compare figures that were not measured together.
        let seen = measured.map_err(|why| failed(&name(), why))?;
        let used = used()?.saturating_sub(before);
        Ok((seen, used.as_nanos() as f64 / seen.pages))
    }

    fn samples(&self, cell: &Cell) -> Vec<CellSamples> {
        let of = |make: Make| {
            let backend = if make.kind == Kind::Ours { self.run.backend } else { "-" };
            CellSamples::new(cell.served, (make.name, backend, make.kind), cell.pages)
        };
        self.servers.iter().map(|server| of(server.make)).collect()
    }
}

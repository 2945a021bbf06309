//! The transport of the server: remote procedure calls over TCP (RFC 5531), many connections, few threads.
//!
//! # The way of a request
//! Service threads wait on one `poller`, not too many at a time (`crew`). The thread that is woken for a `connection` receives
//! what came, at most a kilobyte or one WRITE, and makes requests of it (`input`). The data of a WRITE go to pages of the
//! thread's array. Then it gives the connection's input back, answers the requests through [`Service`], and sends the replies
//! (`output`). A thread of its own accepts connections, and ends those that have stalled (`accept`).
//!
//! # Invariants
//! - S1 No thread waits for a peer: neither for the rest of a record, nor for a peer to take its replies.
//! - S2 What a peer sends decides only about memory that is bounded: 16 KiB of a record, pages by `room`, and replies by
//!   `connection`.
//! - S3 A thread's array of pages is full before it waits for a connection.
//! - S4 A thread takes one batch of a connection, and then waits for the next event: those behind it are served first. Of a batch
//!   it answers slow requests last, so no quick one waits for a slow one.
//! - S5 A peer that is slow keeps nothing for long: within a record, and in taking replies, it must make progress. If there are
//!   as many connections as there may be, a newcomer gets the place of an idle one, or one of an address that has more than half.
//!
//! # Locks
//! Those of a `connection`; then those of `connections` and `room`, which are leaves, and that of `crew`, with which no other
//! is held. None is held while a procedure runs.
mod accept;
mod clock;
mod connection;
mod connections;
mod counters;
mod crew;
mod hub;
mod input;
mod output;
mod poller;
mod room;
#[cfg(test)]
mod tests;

use std::io;
use std::mem;
use std::net::{IpAddr, TcpListener};
use std::num::NonZero;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::atomic::Ordering::Relaxed;
use std::sync::{Arc, Mutex};
use std::thread::{self, Builder, JoinHandle};
use std::time::Duration;

use pagemill::{Allocator, Cancel};

use crate::call::{Answer, Call, Pace, Payload, Status};
use crate::pages::{PageArray, PageCounters};
use crate::record::{self, Header, Refusal};
use crate::sync::lock;
use connection::Connection;
use connections::Connections;
pub(crate) use counters::{Counters, Why};
use crew::{Crew, Place};
use hub::Hub;
#[cfg(fuzzing)]
pub(crate) use input::check_stream;
use input::{Batch, Data, Received, Source};
use output::Replies;
use poller::{Event, Poller};
use room::Room;

/// At least this many threads wait for events: a quick request may still block.
const ACTIVE_MIN: usize = 2;

/// Answers requests.
pub(crate) trait Service: Send + Sync + 'static {
    /// How long a request takes as a rule, by its program, version and procedure.
    fn pace(&self, procedure: [u32; 3]) -> Pace;

    /// Called by several threads at a time, also for requests of one connection.
    fn answer(&self, call: &mut Call<'_>) -> Answer;
}

/// Service threads, unless the command line says otherwise.
pub(crate) const THREADS: u16 = 16;
/// Connections at a time, likewise.
pub(crate) const CONNECTIONS: u32 = 4096;

#[derive(Clone, Copy, Debug)]
pub(crate) struct Settings {
    pub(crate) threads: usize,
    /// A further one takes the place of another, or is refused.
    pub(crate) connections: usize,
    /// A connection is closed that makes no progress for so long, within a record or in taking replies.
    pub(crate) stalled_after: Duration,
    /// Pages that unfinished WRITEs may keep. At least as many as the largest WRITE has.
    pub(crate) unfinished_pages: usize,
    /// Arrays are refilled by a call for each page: for comparison only.
    pub(crate) is_one_by_one: bool,
}

impl Default for Settings {
    fn default() -> Self {
        Self {
            threads: THREADS.into(),
            connections: CONNECTIONS as usize,
            stalled_after: Duration::from_secs(30),
            unfinished_pages: 16 << 10,
            is_one_by_one: false,
        }
    }
}

/// A server that runs. Dropped, it stops.
pub(crate) struct Server {
    hub: Arc<Hub>,
    page_counters: Arc<PageCounters>,
    threads: Mutex<Vec<JoinHandle<()>>>,
}

impl Server {
    /// Serves the connections to `listener` from peers that `allows` allows.
    ///
    /// # Errors
    /// There is no descriptor for the events, or no thread.
    pub(crate) fn start(
        listener: TcpListener,
        settings: Settings,
        allocator: &Allocator,
        allows: impl Fn(IpAddr) -> bool + Send + Sync + 'static,
        service: Arc<impl Service>,
    ) -> io::Result<Self> {
        listener.set_nonblocking(true)?;
        let largest = record::DATA_MAX.div_ceil(pagemill::PAGE_SIZE);
        let hub = Arc::new(Hub {
            poller: Arc::new(Poller::new()?),
            connections: Connections::default(),
            room: Arc::new(Room::new(settings.unfinished_pages.max(largest))),
            counters: Counters::default(),
            settings,
            stop: Cancel::new(),
            clock: Arc::default(),
            crew: Crew::new(thread::available_parallelism().map_or(ACTIVE_MIN, NonZero::get).max(ACTIVE_MIN)),
        });
        // From here on, an error stops the threads that run already.
        let server = Self { hub: hub.clone(), page_counters: Arc::default(), threads: Mutex::default() };
        for number in 0..settings.threads.max(1) {
            let array = PageArray::new(allocator, server.page_counters.clone());
            let array = if settings.is_one_by_one { array.one_by_one() } else { array };
            let (hub, service) = (hub.clone(), service.clone() as Arc<dyn Service>);
            let run = move || Thread::new(hub, array, service).run();
            lock(&server.threads).push(Builder::new().name(format!("nfs-{number}")).spawn(run)?);
        }
        let run = move || accept::accept(&listener, &hub, &allows);
        lock(&server.threads).push(Builder::new().name("nfs-accept".into()).spawn(run)?);
        Ok(server)
    }
    pub(crate) fn counters(&self) -> &Counters {
        &self.hub.counters
    }
    pub(crate) fn page_counters(&self) -> &PageCounters {
        &self.page_counters
    }
    /// Answers the requests in progress, ends all threads, and closes all connections. Counters can be read still.
    pub(crate) fn stop(&self) {
        self.hub.stop.cancel();
        self.hub.poller.stop();
        self.hub.crew.stop();
        for thread in mem::take(&mut *lock(&self.threads)) {
            // A thread that panicked has ended too.
            let _ = thread.join();
        }
        self.hub.connections.all().iter().for_each(|connection| connection.close(&self.hub, Why::Stopped));
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        self.stop();
    }
}

/// A service thread.
struct Thread {
    hub: Arc<Hub>,
    service: Arc<dyn Service>,
    array: PageArray,
    /// Pages taken from the array since it was full.
    taken: usize,
    /// Unless it serves what may take long.
    place: Option<Place>,
    batch: Batch,
    replies: Replies,
}

impl Thread {
    fn new(hub: Arc<Hub>, array: PageArray, service: Arc<dyn Service>) -> Self {
        Self { hub, service, array, taken: 0, place: None, batch: Batch::default(), replies: Replies::default() }
    }

    fn run(mut self) {
        let hub = self.hub.clone();
        while !hub.stop.is_cancelled() {
            if self.taken > 0 {
                self.leave(); // Memory may lack.
            }
            // S3. The refill ends early only because the server stops.
            if self.array.refill(&hub.stop).is_err() {
                return;
            }
            self.taken = 0;
            let Some(place) = self.place.take().or_else(|| hub.crew.join()) else { return };
            let event = hub.crew.poll(&place, || hub.poller.wait());
            self.place = Some(place);
            match event {
                Event::Stop => return,
                Event::Output(token) => {
                    if let Some(connection) = self.hub.connections.get(token) {
                        connection.has_room_to_send(&self.hub);
                    }
                }
                Event::Left(token) => {
                    if let Some(connection) = self.hub.connections.get(token) {
                        connection.has_left(&self.hub);
                    }
                }
                Event::Input(token) => {
                    if let Some(connection) = self.hub.connections.get(token) {
                        self.serve(&connection);
                    }
                }
            }
        }
    }

    /// Others may wait for events in its place.
    fn leave(&mut self) {
        if let Some(place) = self.place.take() {
            self.hub.crew.leave(place);
        }
    }

    fn serve(&mut self, connection: &Arc<Connection>) {
        let source = Source { array: &mut self.array, taken: &mut self.taken };
        connection.receive(&self.hub, &mut self.batch, source);
        let (bytes, mut requests) = (mem::take(&mut self.batch.bytes), mem::take(&mut self.batch.requests));
        let pace = |request: &Received| self.service.pace(record::procedure(&bytes[request.record.clone()]));
        requests.sort_by_key(|request| pace(request) == Pace::Slow); // S4. The others keep their order.
        for request in requests.drain(..) {
            let asks = request.asks;
            self.answer(connection, &bytes, request);
            self.replies.requests += 1;
            self.replies.asked += asks;
        }
        if self.replies.requests > 0 {
            connection.send(&mut self.replies, &self.hub);
        }
        // Their capacity is used again.
        self.batch = Batch { bytes, requests };
        self.batch.bytes.clear();
    }

    fn answer(&mut self, connection: &Arc<Connection>, bytes: &[u8], request: Received) {
        let (xid, answer) = match record::header(&bytes[request.record]) {
            Ok(header) if header.is_write() == request.data.is_some() && !request.is_cut => {
                (header.xid, self.call(connection, header, request.data))
            }
            // A WRITE that lies about the length of its data.
            Ok(header) => (header.xid, Answer::Refused(Status::Garbage)),
            Err(Refusal::Answered { xid, status }) => (xid, Answer::Refused(status)),
            Err(Refusal::NoCall) => return, // The input has refused it.
        };
        let counters = &self.hub.counters;
        match answer {
            Answer::Refused(Status::Garbage) => drop(counters.garbage.fetch_add(1, Relaxed)),
            Answer::Refused(Status::Auth(_) | Status::RpcMismatch) => drop(counters.denied.fetch_add(1, Relaxed)),
            _ => {}
        }
        self.replies.answer(xid, answer);
    }

    fn call(&mut self, connection: &Arc<Connection>, header: Header<'_>, data: Option<Data>) -> Answer {
        let (mut pages, len) = data.map_or_else(Default::default, |data| (data.pages, data.len));
        let mut call = Call {
            xid: header.xid,
            program: header.program,
            version: header.version,
            procedure: header.procedure,
            credential: header.credential,
            peer: connection.peer,
            args: header.args,
            payload: Payload { pages: &mut pages, len },
        };
        let pace = self.service.pace([call.program, call.version, call.procedure]);
        if pace != Pace::Quick {
            self.leave();
        }
        if pace == Pace::Slow && self.replies.requests > 0 {
            connection.send(&mut self.replies, &self.hub); // Those before it do not wait with it.
        }
        // A request that panics leaves nothing half done here; what the service shares, it must keep whole itself.
        let answer = catch_unwind(AssertUnwindSafe(|| self.service.answer(&mut call))).unwrap_or_else(|_| {
            self.hub.counters.panics.fetch_add(1, Relaxed);
            Answer::Refused(Status::SystemError)
        });
        Source { array: &mut self.array, taken: &mut self.taken }.fill(pages);
        answer
    }
}

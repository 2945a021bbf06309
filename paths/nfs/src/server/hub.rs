//! What all threads of a server share.
use std::sync::Arc;

use pagemill::Cancel;

use super::Settings;
use super::clock::Clock;
use super::connections::Connections;
use super::counters::Counters;
use super::crew::Crew;
use super::poller::Poller;
use super::room::Room;

pub(super) struct Hub {
    pub(super) poller: Arc<Poller>,
    pub(super) connections: Connections,
    pub(super) room: Arc<Room>,
    pub(super) counters: Counters,
    pub(super) settings: Settings,
    /// Ends waits for memory.
    pub(super) stop: Cancel,
    pub(super) clock: Arc<Clock>,
    pub(super) crew: Crew,
}
